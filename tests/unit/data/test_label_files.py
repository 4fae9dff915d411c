"""Files of corrected labels: what is written is read, a person has the last word, other data are refused."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetsngp.data.fingerprint import fingerprint_data
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.images.multi_label import MultiLabelFiles
from hetsngp.data.label_files import (
    CORRECTED,
    LABELS,
    LabelFile,
    apply_labels,
    example_names,
    match_labels,
    read_labels,
)
from hetsngp.limits import LimitExceeded

NAMES = ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/ü, 2.jpg", "owl/1.jpg")
CLASSES = ("cat", "dog", "owl")
GIVEN = torch.tensor([0, 0, 1, 1, 2])
TARGETS = torch.tensor([[0.9, 0.1, 0], [0.2, 0.8, 0], [0.3, 0.3, 0.4], [0, 1, 0], [0, 0.5, 0.5]])
HEAD = "path,given_label,label,source\n"


def labels(**changes: Any) -> LabelFile:
    return replace(LabelFile(NAMES, CLASSES, GIVEN, TARGETS), **changes)


def files(root: str = "data/train") -> ImageFiles:
    return ImageFiles(tuple(Path(root) / name for name in NAMES), GIVEN, CLASSES)


def arrays() -> ImageArrays:
    pixels = torch.arange(5 * 12).reshape(5, 3, 2, 2).byte()
    return ImageArrays(pixels, GIVEN, CLASSES)


def by_index(**changes: Any) -> LabelFile:
    return labels(names=tuple("01234"), **changes)


def same(one: LabelFile, other: LabelFile) -> bool:
    tensors = ("given", "targets", "is_kept")
    equal = all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors)
    return equal and (one.names, one.class_names, one.fingerprint) == (
        other.names,
        other.class_names,
        other.fingerprint,
    )


# --- labels.safetensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kept": torch.tensor([True, False, True, True, False])},
        {"targets": torch.tensor([0, 1, 1, 2, 2])},
        {"fingerprint": fingerprint_data(arrays())},
    ],
    ids=["soft", "dropped", "hard", "fingerprint"],
)
def test_what_is_written_is_read(changes: dict[str, Any], tmp_path: Path) -> None:
    wrote = labels(**changes)
    assert wrote.write(tmp_path / "audit") == tmp_path / "audit" / LABELS
    assert same(LabelFile.read(tmp_path / "audit"), wrote)
    assert same(LabelFile.read(tmp_path / "audit" / LABELS), wrote)
    assert same(read_labels(tmp_path / "audit"), wrote)
    assert [file.name for file in (tmp_path / "audit").iterdir()] == [LABELS]
    labels().write(tmp_path / "audit")  # in its place
    assert same(LabelFile.read(tmp_path / "audit"), labels())


def test_most_probable_classes_and_changes() -> None:
    assert labels().labels.tolist() == [0, 1, 2, 1, 1]
    assert labels().changed.tolist() == [False, True, True, False, True]
    hard = labels(targets=torch.tensor([2, 0, 1, 1, 2]))
    assert hard.labels.tolist() == [2, 0, 1, 1, 2]
    assert hard.changed.tolist() == [True, False, False, False, False]


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_close_labels_are_the_same_but_for_rounding() -> None:
    names, classes, given = ("a", "b"), ("cat", "dog"), torch.tensor([0, 1])
    labels = LabelFile(names, classes, given, torch.tensor([[0.9, 0.1], [0.8, 0.2]]))
    near = replace(labels, targets=labels.targets + torch.tensor([1e-5, -1e-5]))
    assert labels.is_close(near)
    assert labels.is_close(replace(labels, kept=torch.tensor([True, True])))
    for changes in (
        {"names": ("a", "c")},
        {"class_names": ("cat", "eel")},
        {"given": torch.tensor([0, 0])},
        {"targets": torch.tensor([[0.9, 0.1], [0.79, 0.21]])},
        {"targets": torch.tensor([0, 0])},
        {"kept": torch.tensor([True, False])},
    ):
        assert not labels.is_close(replace(labels, **changes)), changes


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    wrote = labels(kept=torch.tensor([True] * 4 + [False]))
    file = wrote.write(tmp_path)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in range(0, len(whole), 5):
        flip(file, place)
        found = None
        with suppress(ValueError):
            found = LabelFile.read(tmp_path)
        if found is not None:  # a bit that says nothing, such as one of the padding
            assert place < header
            assert same(found, wrote)
        file.write_bytes(whole)
    for content in (b"", b"{}", whole[:-3], b"\x80\x04pickle"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="is damaged, or no file of labels"):
            read_labels(tmp_path)
    file.write_bytes(whole)
    tensors = load_file(file)
    save_file({name: t for name, t in tensors.items() if name != "targets"}, file)
    with pytest.raises(ValueError, match="is damaged, or no file of labels"):
        LabelFile.read(tmp_path)
    about = json.loads(tensors["about"].numpy().tobytes())
    for change in ({"version": 2}, {"names": [*NAMES[:4], 5]}, {"class_names": None}):
        content = json.dumps({**about, **change}).encode()
        save_file({**tensors, "about": torch.frombuffer(bytearray(content), dtype=torch.uint8)}, file)
        with pytest.raises(ValueError, match="is damaged, or no file of labels"):
            LabelFile.read(tmp_path)


def test_limits_and_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="hetsngp audit"):
        read_labels(tmp_path)
    with pytest.raises(FileNotFoundError, match="there are no labels"):
        read_labels(tmp_path / "nowhere")
    labels().write(tmp_path)
    monkeypatch.setenv("HETSNGP_MAX_LIST_BYTES", "100")
    with pytest.raises(LimitExceeded, match="HETSNGP_MAX_LIST_BYTES"):
        read_labels(tmp_path)
    (tmp_path / CORRECTED).write_text(HEAD + "x" * 100)
    with pytest.raises(LimitExceeded, match="HETSNGP_MAX_LIST_BYTES"):
        read_labels(tmp_path / CORRECTED)
    monkeypatch.delenv("HETSNGP_MAX_LIST_BYTES")
    monkeypatch.setenv("HETSNGP_MAX_CLASSES", "2")
    with pytest.raises(LimitExceeded, match="HETSNGP_MAX_CLASSES"):
        read_labels(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"names": NAMES[:4]},
        {"names": (*NAMES[:4], NAMES[0])},
        {"names": (1, 2, 3, 4, 5)},
        {"class_names": ("cat", "dog", "dog")},
        {"given": GIVEN + 1},
        {"targets": 2 * TARGETS},
        {"targets": TARGETS.double()},
        {"targets": TARGETS[:, :2]},
        {"targets": torch.tensor([0, 1, 1, 2, 3])},
        {"kept": torch.ones(5)},
    ],
)
def test_labels_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        labels(**changes)


# --- corrected_labels.csv -------------------------------------------------------------------------------


def choices(folder: Path, *lines: str, head: str = HEAD) -> Path:
    (folder / CORRECTED).write_text(head + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder / CORRECTED


def test_choices_of_a_person_come_on_top(tmp_path: Path) -> None:
    labels().write(tmp_path)
    choices(
        tmp_path,
        "cat/2.jpg,cat,cat,person",  # confirmed
        "cat/1.jpg,cat,cat,given",  # its soft target stays
        '"dog/ü, 2.jpg",dog,,person',  # dropped
        "owl/1.jpg,owl,dog,given",  # another label is a choice, whoever is named
    )
    found = read_labels(tmp_path)
    want = TARGETS.clone()
    want[1], want[4] = torch.tensor([[1.0, 0, 0], [0, 1.0, 0]])
    assert torch.equal(found.targets, want)
    assert found.is_kept.tolist() == [True, True, True, False, True]
    assert torch.equal(LabelFile.read(tmp_path).targets, TARGETS)  # the audit itself does not change


def test_a_file_alone_has_hard_labels(tmp_path: Path) -> None:
    lines = (
        "owl/1.jpg,owl,owl,given",
        '"dog/ü, 2.jpg",dog,,person',
        "cat/2.jpg,cat,dog,person",
        "cat/1.jpg,cat,cat,given",
        "dog/1.jpg,dog,dog,given",
    )
    file = choices(tmp_path, *lines, head="\ufeff" + HEAD)
    found = read_labels(file)
    assert found.class_names == CLASSES
    assert found.targets.dtype == torch.int64
    relabelled = apply_labels(files(), found)
    assert relabelled.targets is None
    assert [file.name for file in relabelled.files] == ["1.jpg", "2.jpg", "1.jpg", "1.jpg"]
    assert relabelled.labels.tolist() == [0, 1, 1, 2]
    more = read_labels(file, (*CLASSES, "yak"))
    assert (more.class_names[-1], more.labels.tolist()) == ("yak", found.labels.tolist())


def test_a_file_alone_by_index(tmp_path: Path) -> None:
    lines = [f"{i},{CLASSES[k]},{CLASSES[(k + 1) % 3]},person" for i, k in enumerate(GIVEN.tolist())]
    file = choices(tmp_path, *reversed(lines), head=HEAD.replace("path", "index"))
    relabelled = apply_labels(arrays(), read_labels(file))
    assert relabelled.labels.tolist() == ((GIVEN + 1) % 3).tolist()
    assert torch.equal(relabelled.images, arrays().images)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("cat/1.jpg,cat,lynx,person", "line 3: 'lynx' is not one of the 3 classes"),
        ("cat/1.jpg,lynx,cat,person", "line 3: 'lynx' is not one of the 3 classes"),
        ("cat/1.jpg,dog,cat,person", "line 3: labels.safetensors has another given label of 'cat/1.jpg'"),
        ("cat/7.jpg,cat,dog,person", "line 3: labels.safetensors has no example 'cat/7.jpg'"),
        ("cat/2.jpg,cat,dog,person", "line 3: 'cat/2.jpg' has a line already"),
        ("cat/1.jpg,cat,dog,robot", "line 3: source is given or person, got 'robot'"),
        ("cat/1.jpg,cat,dog", "line 3: 4 values are expected"),
        ("cat/1.jpg,cat,dog,person,x", "line 3: 4 values are expected"),
        ('cat/1.jpg,"cat,dog,person', "is not a CSV file in UTF-8"),
    ],
)
def test_a_wrong_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    labels().write(tmp_path)
    file = choices(tmp_path, "cat/2.jpg,cat,cat,person", line)
    with pytest.raises(ValueError, match=r"corrected_labels\.csv") as error:
        read_labels(tmp_path)
    assert words in str(error.value)
    if "safetensors" not in words:
        with pytest.raises(ValueError, match=r"corrected_labels\.csv"):
            read_labels(file, CLASSES)


def test_a_file_without_its_columns_is_refused(tmp_path: Path) -> None:
    for head in ("", "path;given_label;label;source\n", "path,label,source\n", HEAD):
        with pytest.raises(ValueError, match="columns"):
            read_labels(choices(tmp_path, head=head))
    (tmp_path / CORRECTED).write_bytes(HEAD.encode() + b"\xff,cat,cat,given\n")
    with pytest.raises(ValueError, match="is not a CSV file in UTF-8"):
        read_labels(tmp_path / CORRECTED)


# --- images ---------------------------------------------------------------------------------------------


def test_names_are_paths_below_the_folder_of_the_classes() -> None:
    assert example_names(files()) == example_names(files("/elsewhere")) == NAMES
    assert example_names(arrays()) == tuple("01234")


def test_files_are_matched_by_path_and_arrays_by_index() -> None:
    order = torch.tensor([3, 0, 4, 1, 2])
    shuffled = LabelFile(
        tuple(NAMES[i] for i in order),
        CLASSES,
        GIVEN[order],
        TARGETS[order],
        torch.tensor([True] * 4 + [False]),
    )
    for root in ("data/train", "/moved"):
        matched = match_labels(files(root), shuffled)
        assert torch.equal(matched.targets, TARGETS)
        relabelled = apply_labels(files(root), shuffled)
        kept = [0, 1, 3, 4]
        assert [str(file) for file in relabelled.files] == [f"{root}/{NAMES[i]}" for i in kept]
        assert relabelled.targets is not None
        assert torch.equal(relabelled.targets, TARGETS[kept])
        assert relabelled.labels.tolist() == TARGETS[kept].argmax(1).tolist()
    order = torch.tensor([4, 3, 2, 1, 0])
    numbers = LabelFile(tuple("43210"), CLASSES, GIVEN[order], TARGETS[order])
    for images in (arrays(), files()):
        found: Any = apply_labels(images, numbers)
        assert torch.equal(found.targets, TARGETS)


def test_labels_of_other_data_are_refused() -> None:
    cases: list[tuple[LabelFile, Any, str]] = [
        (labels(class_names=("cat", "dog", "yak")), files(), "the classes differ, e.g. 'owl'"),
        (labels(class_names=("dog", "cat", "owl")), files(), "the classes differ, e.g. 'their order'"),
        (labels(), files().take([0, 1, 2]), "there are 5 labels and 3 examples"),
        (labels(names=(*NAMES[:4], "owl/2.jpg")), files(), "they have no example 'owl/1.jpg'"),
        (labels(), arrays(), "they have no example '0'"),
        (
            labels(given=torch.tensor([0, 0, 2, 0, 2])),
            files(),
            "the given label of 'dog/1.jpg' is 'owl', and 'dog' in the data",
        ),
    ]
    for wrong, images, words in cases:
        with pytest.raises(ValueError, match="the labels were made for other data") as error:
            apply_labels(images, wrong)
        assert words in str(error.value)
    several: Any = MultiLabelFiles.of(Path("pets"), ["a.jpg"], [[0]], CLASSES)
    with pytest.raises(ValueError, match="with one label each, not for MultiLabelFiles"):
        apply_labels(several, labels())


def test_arrays_in_another_order_are_refused() -> None:
    """Their labels may be the same: the fingerprint tells."""
    made = by_index(fingerprint=fingerprint_data(arrays()))
    assert apply_labels(arrays(), made).targets is not None
    swapped = arrays().take([1, 0, 2, 3, 4])
    with pytest.raises(ValueError, match="made for other data: image 0 has other content"):
        apply_labels(swapped, made)
    assert apply_labels(swapped, by_index()).targets is not None  # it is not known


# --- targets of images ----------------------------------------------------------------------------------


def soft(images: Any) -> Any:
    return replace(images, targets=TARGETS)


@pytest.mark.parametrize("images", [arrays(), files()], ids=["arrays", "files"])
def test_targets_go_with_their_images(images: Any) -> None:
    given = soft(images)
    assert torch.equal(given.take([3, 1]).targets, TARGETS[[3, 1]])
    rest, held_out = given.split(2, seed=1)
    order = [*rest.labels.tolist(), *held_out.labels.tolist()]
    plain = [part.labels.tolist() for part in images.split(2, seed=1)]
    assert order == plain[0] + plain[1]
    both = torch.cat([rest.targets, held_out.targets])
    assert sorted(both.tolist()) == sorted(TARGETS.tolist())
    for wrong in (TARGETS[:4], TARGETS[:, :2], 2 * TARGETS, TARGETS[0]):
        with pytest.raises(ValueError, match=r"targets"):
            replace(images, targets=wrong)
    for wrong in (TARGETS.double(), TARGETS.tolist(), GIVEN):
        with pytest.raises(TypeError, match="targets must be a tensor of float32"):
            replace(images, targets=wrong)


def test_targets_count_as_labels_in_fingerprints() -> None:
    from hetsngp.data.fingerprint import compare_fingerprints

    before, other = fingerprint_data(arrays()), TARGETS.flip(0)
    now, later = fingerprint_data(soft(arrays())), fingerprint_data(replace(arrays(), targets=other))
    assert before is not None
    assert now is not None
    assert later is not None
    assert compare_fingerprints(before, now) == compare_fingerprints(now, later)
    assert compare_fingerprints(now, later) == ["other labels or class names"]
    assert now == fingerprint_data(soft(arrays()))


def test_device_loaders_yield_targets_in_every_part_and_from_any_batch() -> None:
    from hetsngp.data.images.device_loader import DeviceLoader

    def parts(loader: DeviceLoader) -> list[Tensor]:
        return [y for _, y in loader]

    plain = DeviceLoader(arrays(), 2, shuffle=True, drop_last=False, seed=3)
    rows = torch.cat([x for x, _ in plain]).flatten(1)[:, 0].argsort().argsort()
    loader = DeviceLoader(soft(arrays()), 2, shuffle=True, drop_last=False, seed=3).to(
        "cpu", channels_last=True
    )
    whole = parts(loader)
    assert torch.equal(torch.cat(whole), TARGETS[rows])
    shards = [
        DeviceLoader(soft(arrays()), 2, shuffle=True, seed=3, drop_last=False).shard(r, 2) for r in (0, 1)
    ]
    pieces = [parts(shard) for shard in shards]
    for batch in range(2):
        assert torch.equal(torch.cat([piece[batch] for piece in pieces]), whole[batch])
    loader.set_epoch(0)
    loader.start_at(1)
    assert all(torch.equal(a, b) for a, b in zip(parts(loader), whole[1:], strict=True))
    in_order = next(iter(loader.clean()))[1]
    in_order.zero_()  # a copy: the data do not change
    assert torch.equal(torch.cat(parts(loader.clean())), TARGETS)
