"""Labelled images, in memory or on disk, and their loaders."""

from hetsngp.data.images.arrays import ImageArrays, stratified

__all__ = ["ImageArrays", "stratified"]
