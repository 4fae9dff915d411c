"""Data sets: readers, corruptions, loaders.

- ``datasets``: the sets known by name. ``datasets.open_data`` opens one, ``describe`` lists them;
  ``datasets.synthetic`` draws the paper's tasks in two dimensions.
- ``images``: labelled images in memory (``ImageArrays``, with ``DeviceLoader``) and on disk (``ImageFiles``,
  ``MultiLabelFiles``).
- ``shards``: images in tar files.
- ``sources``: ``open_images`` and ``open_set`` take a name, a folder or a .npz file.
- ``corruptions``: the 15 corruptions of CIFAR-C and ImageNet-C; ``corrupted``: sets of corrupted images.
- ``preprocessing``: how images become tensors, saved with a model.
- ``class_maps``: from a model's classes to those of a data set.
- ``tables``: CSV and Parquet files.

All need torch only, but for image files and SVHN (the extra ``vision``) and tables (the extra ``tables``).
"""
