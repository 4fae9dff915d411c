"""Data sets. ``synthetic`` draws the paper's tasks in two dimensions.

Images are an ``images.ImageArrays``, bytes in memory: ``cifar``, ``folders`` and ``arrays`` read them,
``sources.open_images`` does so by name, and ``device_loader.DeviceLoader`` makes augmented batches of them on
the device. All need torch only, but for reading image files, which takes the extra ``vision``.
"""
