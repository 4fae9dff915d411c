"""Data sets. ``synthetic`` draws the paper's tasks in two dimensions.

``registry.open_data`` opens every named set as it lies on disk (``registry.describe`` lists them), and
``sources.open_images`` reads images by name, from folders and from .npz files into memory. There they are an
``images.ImageArrays``, of which ``device_loader.DeviceLoader`` makes augmented batches on the device; on disk
they are a ``files.ImageFiles``. ``corruptions`` makes the 15 of CIFAR-C and ImageNet-C. ``tables.load_table``
reads CSV and Parquet. All need torch only, but for image files and SVHN (the extra ``vision``) and tables
(the extra ``tables``).
"""
