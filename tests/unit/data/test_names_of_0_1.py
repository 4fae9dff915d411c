"""Names and paths of release 0.1 still work, with a warning that has the new one."""

import importlib
import sys
from typing import Any

import pytest

from hetsngp._moved import MOVED
from hetsngp.data.corrupted import LazyMap
from hetsngp.data.corruptions import CounterRNG
from hetsngp.data.images.decoding import IMAGENET_MEAN, resize_and_center_crop
from hetsngp.data.images.files import read_image
from hetsngp.data.preprocessing import Preprocessing
from hetsngp.data.shards.streams import ShardedImages, hold_out_shards


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("data.inputs", "Inputs", Preprocessing),
        ("data.corrupted", "Mapped", LazyMap),
        ("data.corruptions", "Draws", CounterRNG),
        ("data.corruptions.draws", "Draws", CounterRNG),
        ("data.decoding", "middle", resize_and_center_crop),
        ("data.folders", "IMAGENET_MEAN", IMAGENET_MEAN),
        ("data.folders", "read_image", read_image),
        ("data.shard_choice", "part_of", hold_out_shards),
    ],
)
def test_names_that_changed(module: str, name: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"hetsngp.{module}"
    if module in MOVED:
        monkeypatch.delitem(sys.modules, path, raising=False)  # it warns when it is imported first
    with pytest.warns(DeprecationWarning, match=rf"{path}.* (has moved to|is now called) "):
        found = getattr(importlib.import_module(path), name)
    assert found is expected or found == expected


def test_the_shards_of_0_1_are_in_the_package() -> None:
    from hetsngp.data import shards

    assert shards.ShardedImages is ShardedImages


def test_several_labels_is_multi_label() -> None:
    values: dict[str, Any] = {"size": (8, 8), "mean": (0.5,), "std": (0.5,), "class_names": ("a", "b")}
    with pytest.warns(DeprecationWarning, match="several_labels is now called multi_label"):
        old = Preprocessing(**values, several_labels=True)
    assert old == Preprocessing(**values, multi_label=True)
    with pytest.warns(DeprecationWarning, match="now called multi_label"):
        assert old.several_labels
    assert old.to_dict()["several_labels"]  # as 0.1 wrote and reads it
    assert "multi_label" not in old.to_dict()
    with pytest.warns(DeprecationWarning, match="of_dict is now called from_dict"):
        assert Preprocessing.of_dict(old.to_dict()) == old
