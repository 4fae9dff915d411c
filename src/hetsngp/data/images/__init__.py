"""Labelled images and their loaders.

``arrays``: in memory; ``device_loader``: augmented batches of them on the device; ``npz``: from a .npz file.
``files``: on disk, decoded when needed; ``copies``: images of the same content, and folds that keep them
together; ``multi_label``: with any number of labels each; ``folders``: from one folder for each class;
``decoding``: from an encoded image to a tensor.
"""

from hetsngp.data.images.arrays import ImageArrays, stratified
from hetsngp.data.images.copies import image_folds
from hetsngp.data.images.device_loader import Augmentation, DeviceLoader
from hetsngp.data.images.folders import folder_loader

__all__ = ["Augmentation", "DeviceLoader", "ImageArrays", "folder_loader", "image_folds", "stratified"]
