"""Fingerprints of data sets: the same wherever the data are, and another for any other content."""

import itertools
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.small_sets import random_bytes
from torch.utils.data import Subset, TensorDataset

from hetsngp.data import fingerprint
from hetsngp.data.fingerprint import compare_fingerprints, fingerprint_data
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.images.multi_label import MultiLabelFiles
from hetsngp.data.shards.streams import ShardedImages

WNIDS = ("n00000001", "n00000002")


def write_files(folder: Path, count: int = 12, seed: int = 0) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{row:03d}.jpg" for row in range(count)]
    for row, file in enumerate(files):
        file.write_bytes(random_bytes(50 + row, seed=seed + row).tobytes())
    return files


def arrays(folder: Path) -> ImageArrays:
    return ImageArrays(torch.from_numpy(random_bytes(12, 3, 4, 4)), torch.arange(12) % 2, ("cat", "dog"))


def files(folder: Path) -> ImageFiles:
    return ImageFiles(tuple(write_files(folder)), torch.arange(12) % 2, ("cat", "dog"))


def multi_label(folder: Path) -> MultiLabelFiles:
    names = [file.name for file in write_files(folder)]
    return MultiLabelFiles.of(folder, names, [[0], [0, 1]] * 6, ("cat", "dog"))


def undated(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = 0
    return member


def shards(folder: Path) -> ShardedImages:
    inside = write_files(folder / "inside")
    made = []
    for part in range(2):
        made.append(folder / f"{part}.tar")
        with tarfile.open(made[-1], "w") as tar:
            for file in inside[part * 6 : part * 6 + 6]:
                (file.with_suffix(".cls")).write_text(WNIDS[0])
                for each in (file, file.with_suffix(".cls")):
                    tar.add(each, each.name, filter=undated)
    return ShardedImages(tuple(made), WNIDS)


def tensors(folder: Path) -> TensorDataset:
    return TensorDataset(torch.arange(24.0).reshape(12, 2), torch.arange(12) % 2)


def part_of_tensors(folder: Path) -> Subset[Any]:
    return Subset(tensors(folder), range(1, 12, 2))


def batches(folder: Path) -> list[Any]:
    return [(torch.arange(6.0), torch.zeros(6).long()), (torch.ones(6), torch.ones(6).long())]


KINDS: dict[str, Callable[[Path], Any]] = {
    each.__name__: each for each in (arrays, files, multi_label, shards, tensors, part_of_tensors, batches)
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("everything", [False, True])
def test_data_that_were_copied_are_the_same(kind: str, everything: bool, tmp_path: Path) -> None:
    first = fingerprint_data(KINDS[kind](tmp_path / "a"), everything=everything)
    copied = KINDS[kind](tmp_path / "elsewhere" / "b")
    for file in tmp_path.rglob("elsewhere/**/*.*"):
        os.utime(file, (1, 1))  # times do not count
    second = fingerprint_data(copied, everything=everything)
    assert first is not None
    assert second is not None
    assert first.keys() == second.keys()
    assert compare_fingerprints(json.loads(json.dumps(first)), second) == []


def flip(file: Path, at: int = 5) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def changed_arrays(data: ImageArrays) -> ImageArrays:
    data.images[3, 0, 0, 0] ^= 1
    return data


def changed_labels(data: ImageArrays) -> ImageArrays:
    return ImageArrays(data.images, 1 - data.labels, data.class_names)


def changed_names(data: ImageArrays) -> ImageArrays:
    return ImageArrays(data.images, data.labels, ("cat", "owl"))


def changed_file(data: ImageFiles) -> ImageFiles:
    flip(data.files[7])
    return data


def changed_size(data: ImageFiles) -> ImageFiles:
    data.files[7].write_bytes(data.files[7].read_bytes() + b"0")
    return data


def changed_multi_label_file(data: MultiLabelFiles) -> MultiLabelFiles:
    flip(data.file(11))
    return data


def moved_label(data: MultiLabelFiles) -> MultiLabelFiles:
    names = [os.fsdecode(name) for name in data.names]
    return MultiLabelFiles.of(data.folder, names, [[0, 0], [1]] * 6, data.class_names)


def changed_shard(data: ShardedImages) -> ShardedImages:
    flip(data.shards[1], 520)
    return data


def changed_wnids(data: ShardedImages) -> ShardedImages:
    return ShardedImages(data.shards, WNIDS[::-1])


def changed_tensors(data: TensorDataset) -> TensorDataset:
    data.tensors[0][5, 1] += 1
    return data


def changed_part(data: Subset[Any]) -> Subset[Any]:
    return Subset(data.dataset, range(0, 12, 2))


def changed_batches(data: list[Any]) -> list[Any]:
    data[1][0][2] = 7
    return data


CHANGES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("arrays", changed_arrays, "image 3 has other content"),
    ("arrays", changed_labels, "other labels or class names"),
    ("arrays", changed_names, "other labels or class names"),
    ("arrays", lambda data: data.take(range(11)), "examples 12, now 11"),
    ("files", changed_file, "a/007.jpg has other content"),
    ("files", changed_size, "bytes 666, now 667"),
    ("files", lambda data: data.take([*range(11), 10]), "other labels"),
    ("multi_label", changed_multi_label_file, "a/011.jpg has other content"),
    ("multi_label", moved_label, "other labels or class names"),
    ("shards", changed_shard, "a/1.tar has other content"),
    ("shards", changed_wnids, "other labels or class names"),
    ("tensors", changed_tensors, "example 5 has other content"),
    ("tensors", lambda data: TensorDataset(data.tensors[0].double(), data.tensors[1]), "shapes"),
    ("part_of_tensors", changed_part, "example 0 has other content"),
    ("batches", changed_batches, "other content"),
]


@pytest.mark.parametrize(("kind", "change", "words"), CHANGES)
def test_other_data_are_noticed_and_named(
    kind: str, change: Callable[[Any], Any], words: str, tmp_path: Path
) -> None:
    data = KINDS[kind](tmp_path / "a")
    before = fingerprint_data(data)
    after = fingerprint_data(change(data))
    assert before is not None
    assert after is not None
    assert words in "; ".join(compare_fingerprints(before, after))


@pytest.mark.parametrize("make", [arrays, files])
def test_a_change_outside_the_sample_needs_a_hash_of_everything(
    make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "SAMPLE", 4)  # rows 0, 3, 7 and 11
    monkeypatch.setattr(fingerprint, "IN_MEMORY", 100)
    data = make(tmp_path)

    def both() -> tuple[Any, Any]:
        return fingerprint_data(data), fingerprint_data(data, everything=True)

    sampled, complete = both()
    if isinstance(data, ImageArrays):
        data.images[5, 0, 0, 0] ^= 1
    else:
        flip(data.files[5])
    now, all_now = both()
    assert compare_fingerprints(sampled, now) == []
    assert compare_fingerprints(complete, now) == compare_fingerprints(sampled, all_now) == []
    assert compare_fingerprints(complete, all_now) == ["other content outside the sample"]


def test_the_sample_is_spread_over_the_whole_set() -> None:
    rows = fingerprint._spread(1_281_167, 64)
    assert len(set(rows)) == 64
    assert (rows[0], rows[-1]) == (0, 1_281_166)
    gaps = [b - a for a, b in itertools.pairwise(rows)]
    assert max(gaps) - min(gaps) <= 1
    assert fingerprint._spread(5, 64) == [0, 1, 2, 3, 4]


def test_blocks_of_a_large_file_are_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_FILE", 1000)
    monkeypatch.setattr(fingerprint, "BLOCK", 64)
    file = tmp_path / "a.tar"
    file.write_bytes(random_bytes(64 * 160).tobytes())
    before = fingerprint._sha_of_parts(file)
    for at in (0, (64 * 159) * 7 // 15 + 3, 64 * 160 - 1):
        flip(file, at)
        assert fingerprint._sha_of_parts(file) != before
        flip(file, at)
    assert fingerprint._sha_of_parts(file) == before


def test_loaders_of_files_are_known_by_their_files(tmp_path: Path) -> None:
    """Their items are random crops, of which no two are the same."""
    for data in (files(tmp_path / "a"), multi_label(tmp_path / "a")):
        loader = data.loader(4, 2, train=True, num_workers=0)
        assert fingerprint_data(loader.dataset) == fingerprint_data(data)
    sharded = shards(tmp_path / "b")
    assert fingerprint_data(sharded.loader(4, 2, num_workers=0).dataset) == fingerprint_data(sharded)
    shutil.rmtree(tmp_path / "a")


def test_other_kinds_have_no_fingerprint() -> None:
    assert fingerprint_data(range(3)) is None
    assert fingerprint_data([("text", None)]) is None
