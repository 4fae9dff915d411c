"""Images in tar files, as WebDataset writes them.

``streams``: :class:`ShardedImages` and its loader; ``tar_samples``: samples and labels of one file;
``index``: the number of samples of each file.
"""

from hetsngp.data.shards.streams import ShardedImages, ShardLoader, ShardStream

__all__ = ["ShardLoader", "ShardStream", "ShardedImages"]
