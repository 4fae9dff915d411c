"""Limits on what a file may ask for: a damaged or hostile one must not take all memory.

Each is far above what data sets and models have, and can be raised by an environment variable, which worker
processes inherit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


class LimitExceeded(ValueError):
    """A file asks for more than a limit allows."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, NumPy, a GPU or torch's CPU allocator, which has no error type of its own, has no more
    memory.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to …"))
    True
    """
    names = [kind.__name__ for kind in type(error).__mro__]  # without importing torch
    text = str(error)
    known = isinstance(error, MemoryError) or "OutOfMemoryError" in names
    return known or "can't allocate memory" in text or "not enough memory" in text


@dataclass(frozen=True)
class Limit:
    """Largest amount of something in a file that is read.

    >>> sides = Limit("SIDE", 1000, "pixels a side", "height or width of an image")
    >>> sides.check(900, "cat.png")
    >>> sides.check(2000, "cat.png")
    Traceback (most recent call last):
    hetsngp.limits.LimitExceeded: cat.png has 2,000 pixels a side, more than the limit of 1,000: if you ...
    """

    name: str
    default: int
    unit: str
    about: str
    """What is limited, for the documents."""

    @property
    def variable(self) -> str:
        """Environment variable that replaces the default."""
        return f"HETSNGP_MAX_{self.name}"

    @property
    def value(self) -> int:
        """The limit in force."""
        text = os.environ.get(self.variable)
        if text is None:
            return self.default
        if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) == 0:
            raise ValueError(f"{self.variable} is {text!r:.50}: give a positive whole number")
        return int(text)

    def check(self, amount: int, what: str) -> None:
        """Raise :class:`LimitExceeded` where ``amount`` of ``what`` is above the limit."""
        if amount > self.value:
            raise LimitExceeded(
                f"{what} has {amount:,} {self.unit}, more than the limit of {self.value:,}: if you trust the "
                f"file, set the environment variable {self.variable}={amount}"
            )


IMAGE_PIXELS = Limit("IMAGE_PIXELS", 2**27, "pixels", "height × width of an image, before it is decoded")
IMAGE_BYTES = Limit("IMAGE_BYTES", 2**28, "bytes", "an encoded image: a file, or a member of a tar shard")
INPUT_SIDE = Limit("INPUT_SIDE", 2**11, "pixels a side", "`size` and `resize` of a model's `serving.json`")
CLASSES = Limit("CLASSES", 2**20, "classes", "number of classes that the largest label of a file implies")
ARRAY_BYTES = Limit(
    "ARRAY_BYTES", 2**33, "bytes", "an array in a `.npz` or `.mat` file, where that is more than the file has"
)
TABLE_BYTES = Limit("TABLE_BYTES", 2**30, "bytes", "a compressed table, or text in Parquet, after expansion")
TABLE_COLUMNS = Limit("TABLE_COLUMNS", 2**15, "columns", "columns of a table")
TABLE_FIELDS = Limit("TABLE_FIELDS", 2**28, "fields", "rows × columns of a Parquet file")
LABEL_BYTES = Limit("LABEL_BYTES", 2**20, "bytes", "a `.cls` or `.json` member beside an image in a shard")
INDEX_BYTES = Limit("INDEX_BYTES", 2**24, "bytes", "an index of tar shards or WebP strips, after expansion")
LIST_BYTES = Limit("LIST_BYTES", 2**28, "bytes", "a list of images or of classes, as a text file")
PICKLE_BYTES = Limit("PICKLE_BYTES", 2**30, "bytes", "a pickle of CIFAR or CIFAR-10N")
PICKLE_VALUES = Limit("PICKLE_VALUES", 2**22, "values", "opcodes of such a pickle")
DATA_LIMITS = (
    IMAGE_PIXELS,
    IMAGE_BYTES,
    INPUT_SIDE,
    CLASSES,
    ARRAY_BYTES,
    TABLE_BYTES,
    TABLE_COLUMNS,
    TABLE_FIELDS,
    LABEL_BYTES,
    INDEX_BYTES,
    LIST_BYTES,
    PICKLE_BYTES,
    PICKLE_VALUES,
)
"""Limits on data, listed in docs/data.md."""

CONFIG_NUMBER = Limit(
    "CONFIG_NUMBER",
    2**17,
    "",
    "a whole number in the config of a library's network, where no saved tensor is as large",
)
CONFIG_POSITIONS = Limit(
    "CONFIG_POSITIONS", 2**24, "positions", "longest text of a transformer whose positions are rotations"
)
UNSAVED_BYTES = Limit(
    "UNSAVED_BYTES",
    2**28,
    "bytes of tensors that are not saved",
    "masks, tables and other tensors that a saved network computes, beyond the size of its weights file",
)
NUM_SAMPLES = Limit("NUM_SAMPLES", 2**17, "integration points", "option `num_samples` of a saved model")
MODEL_LIMITS = (CONFIG_NUMBER, CONFIG_POSITIONS, UNSAVED_BYTES, NUM_SAMPLES)
"""Limits on saved models, listed in docs/reliability.md."""
