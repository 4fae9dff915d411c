"""Data sets by name: where their files are expected, and how they are read."""
