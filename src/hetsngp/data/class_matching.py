"""Which of a model's classes are those of another data set."""

from __future__ import annotations

from collections.abc import Sequence

from hetsngp.data.class_maps import ClassMap
from hetsngp.data.datasets.synsets import LISTS, wnids

SAME_CLASSES = {"imagenet-c": "imagenet", "imagenet-v2": "imagenet"}
"""Sets with the classes of another."""


def match_classes(
    trained_on: str, model_classes: Sequence[str], spec: str, set_classes: Sequence[str]
) -> ClassMap | None:
    """From the classes of a model trained on the set ``trained_on`` to those of the set ``spec``.

    None where they are the same. Sets of the ImageNet family are matched by WordNet's numbers, all others by
    the names of the classes.

    >>> match_classes("a", ["cat", "dog"], "b", ["dog", "owl"]).index
    tensor([ 1, -1])
    """
    ours, theirs = list(model_classes), list(set_classes)
    if ours == theirs:
        return None
    model_wnids, set_wnids = _wnids(trained_on, ours), _wnids(spec, theirs)
    if model_wnids is not None and set_wnids is not None:
        return ClassMap.between(model_wnids, set_wnids, theirs)
    if not set(ours) & set(theirs):
        raise ValueError(
            f"no class of {spec}, such as {theirs[0]!r}, is one of the model's, such as {ours[0]!r}: give it "
            "as an OOD set, or a set with the model's classes"
        )
    return ClassMap.between(ours, theirs)


def _wnids(name: str, names: Sequence[str]) -> tuple[str, ...] | None:
    base = name.partition(":")[0]
    base = SAME_CLASSES.get(base, base)
    known = wnids(base) if base in LISTS else None
    return known if known is not None and len(known) == len(names) else None
