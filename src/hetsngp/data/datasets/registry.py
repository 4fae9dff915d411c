"""Registry of data sets by name; :func:`describe` lists them.

To add a set, write a function (root, split) → images or texts and add a ``DataSet`` with it to
:data:`DATASETS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetsngp.data.datasets.cifar import CIFAR_SETS
from hetsngp.data.datasets.cifar_c import CIFAR_C_SETS
from hetsngp.data.datasets.clinc150 import CLINC150
from hetsngp.data.datasets.dataset import DataSet, data_root
from hetsngp.data.datasets.human_labels import HUMAN_LABEL_SETS
from hetsngp.data.datasets.imagenet import IMAGENET_SETS
from hetsngp.data.datasets.places import PLACES365, SCENES
from hetsngp.data.datasets.svhn import SVHN
from hetsngp.validation import check_choice

DATASETS: dict[str, DataSet] = {
    data.name: data
    for data in (
        *CIFAR_SETS,
        *HUMAN_LABEL_SETS,
        *CIFAR_C_SETS,
        SCENES,
        PLACES365,
        SVHN,
        *IMAGENET_SETS,
        CLINC150,
    )
}


def open_data(name: str, split: str = "test", root: str | Path | None = None) -> Any:
    """Open the ``split`` of the data set ``name`` in the folder of data sets ``root``.

    ``root`` None: the environment variable HETSNGP_DATA. The class of the result depends on the set,
    ``DATASETS[name].gives``: bytes in memory (``ImageArrays``), files (``ImageFiles``), images with votes
    (``VotedImages``), a mapping from (corruption, severity) to images, multi-label images, or texts
    (``LabelledTexts``). A name may have a variant after a colon: "cifar10n:aggre".
    """
    data, variant = find(name)
    check_choice(f"split of {data.name}", split, data.splits)
    return data.open(data_root(root), split, *variant)


def find(name: str) -> tuple[DataSet, tuple[str, ...]]:
    """Data set of that name, and its variant, if one is named.

    >>> data, variant = find("cifar10n:aggre")
    >>> data.name, variant
    ('cifar10n', ('aggre',))
    """
    base, colon, variant = name.partition(":")
    data = DATASETS[check_choice("data set", base, DATASETS)]
    if not colon:
        return data, ()
    if not data.variants:
        raise ValueError(f"{base} has no variants: leave out {colon + variant!r}")
    return data, (check_choice(f"variant of {base}", variant, data.variants),)


def describe(*names: str) -> str:
    """Description of each set: its content, the files expected, and how to get them. No names: all sets.

    >>> print(describe("svhn"))
    svhn
      SVHN: 73,257 digits to train, 26,032 to test, 531,131 extra, 32 pixels
      splits: train, test, extra
      files:  train_32x32.mat, test_32x32.mat, extra_32x32.mat, here or in svhn/
      get:    torchvision.datasets.SVHN(root / 'svhn', 'test', download=True)
    """
    return "\n".join(_entry(find(name)[0]) for name in names or DATASETS)


def _entry(data: DataSet) -> str:
    lines = [data.name, f"  {data.about}", f"  splits: {', '.join(data.splits)}"]
    if data.variants:
        lines.append("  also:   " + ", ".join(f"{data.name}:{variant}" for variant in data.variants))
    return "\n".join([*lines, f"  files:  {data.layout}", f"  get:    {data.get}"])
