"""Labelled images, in memory or on disk, and their loaders."""
