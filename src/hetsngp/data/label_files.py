"""Corrected labels in files: soft targets of an audit, the choices of a person, and images with these labels.

An audit folder has ``labels.safetensors``, the given labels and P(true | x, given) of every example, and may
have ``corrected_labels.csv``, what a person has decided. Such a CSV file alone has a label for every example.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetsngp.data.bounded import check_regular, read_file
from hetsngp.data.fingerprint import Fingerprint, compare_fingerprints, fingerprint_data
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.files import has_checksum, replace_file, with_checksum, write_tensors
from hetsngp.limits import CLASSES, LIST_BYTES, LimitExceeded
from hetsngp.validation import check_class_labels, check_targets

LABELS, CORRECTED = "labels.safetensors", "corrected_labels.csv"
"""Files of an audit folder."""
FORMAT, VERSION = "hetsngp labels", 1
COLUMNS = ("given_label", "label", "source")
"""Columns of the CSV file, after ``path`` or ``index``."""
GIVEN, PERSON = SOURCES = ("given", "person")
"""Who has set the label of a line."""
ROUNDING = 1e-4
"""Difference of soft targets that rounding may make: EM in float32 goes through some tens of rounds."""

OneLabel = ImageArrays | ImageFiles | LabelledTexts
"""Examples with one label each."""
Pictures = TypeVar("Pictures", ImageArrays, ImageFiles, LabelledTexts)


@dataclass(frozen=True, eq=False)
class LabelFile:
    """Given and corrected labels of N examples.

    >>> targets = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    >>> labels = LabelFile(("cat/1.jpg", "dog/7.jpg"), ("cat", "dog"), torch.tensor([0, 1]), targets)
    >>> labels.labels, labels.changed
    (tensor([0, 0]), tensor([False,  True]))
    """

    names: tuple[str, ...]
    """Path of each file relative to the data folder (:func:`example_names`), or its index."""
    class_names: tuple[str, ...]
    given: Tensor
    """(N,) int64."""
    targets: Tensor
    """(N, K) float32, soft targets P(true | x, given); or hard labels (N,) int64."""
    kept: Tensor | None = None
    """(N,) bool: examples that are not dropped; None: all."""
    fingerprint: Fingerprint | None = None
    """Fingerprint of the images, by :func:`~hetsngp.data.fingerprint.fingerprint_data`."""

    def __post_init__(self) -> None:
        for name in ("names", "class_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not all(isinstance(each, str) for each in getattr(self, name)):
                raise TypeError(f"{name} must be words")
        count, classes = len(self), len(self.class_names)
        if not count or len(set(self.names)) < count or len(set(self.class_names)) < classes:
            raise ValueError("there are no examples, or two examples or classes have the same name")
        check_class_labels(self.given, classes, count)
        if self.targets.dtype not in (torch.float32, torch.int64):
            raise TypeError(f"targets must be float32, or hard labels of int64, got {self.targets.dtype}")
        check_targets(self.targets, classes, count)
        if self.kept is not None and (self.kept.dtype != torch.bool or self.kept.shape != (count,)):
            raise ValueError(f"kept must be a tensor of bool, one for each of {count} examples")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def labels(self) -> Tensor:
        """Most probable class of each example: (N,)."""
        return self.targets if self.targets.dim() == 1 else self.targets.argmax(1)

    @property
    def is_kept(self) -> Tensor:
        """Examples that are not dropped: (N,) bool."""
        return torch.ones(len(self), dtype=torch.bool) if self.kept is None else self.kept

    @property
    def changed(self) -> Tensor:
        """Examples whose most probable class is not the given label: (N,) bool."""
        return self.labels != self.given

    def is_close(self, other: LabelFile) -> bool:
        """Whether ``other`` has the same examples and labels, but for rounding of the targets."""
        if (self.names, self.class_names) != (other.names, other.class_names):
            return False
        same = torch.equal(self.given, other.given) and torch.equal(self.is_kept, other.is_kept)
        if not same or self.targets.shape != other.targets.shape:
            return False
        return torch.allclose(self.targets.double(), other.targets.double(), rtol=0.0, atol=ROUNDING)

    def digest(self) -> str:
        """SHA-256 of names and labels."""
        digest = hashlib.sha256(json.dumps([self.names, self.class_names]).encode())
        for tensor in (self.given, self.targets, self.is_kept):
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def to_fingerprint(self) -> Fingerprint:
        """Fingerprint by which a training that is resumed recognises its labels."""
        return {"examples": len(self), "labels": self.digest()}

    def write(self, folder: str | Path) -> Path:
        """Write ``labels.safetensors`` into ``folder``, replacing one that is there; returns its path."""
        about = {
            "format": FORMAT,
            "version": VERSION,
            "sha256": self.digest(),
            "class_names": list(self.class_names),
            "names": list(self.names),
            "fingerprint": self.fingerprint,
        }
        content = json.dumps(with_checksum(json.loads(json.dumps(about)))).encode()
        tensors = {"given": self.given.long(), "targets": self.targets, "kept": self.is_kept}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        # As a tensor: the header of a safetensors file has no space for the names of many files.
        tensors["about"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        file = Path(folder) / LABELS
        replace_file(file, lambda temporary: write_tensors(tensors, temporary))
        return file

    @staticmethod
    def read(path: str | Path) -> LabelFile:
        """Read what :meth:`write` wrote: the file, or its folder."""
        path = Path(path).expanduser()
        file = path / LABELS if path.is_dir() else path
        if not file.exists():
            raise FileNotFoundError(f"{file} is not there: give a folder that `hetsngp audit` has written")
        check_regular(file)
        try:
            return _read_tensors(file)
        except LimitExceeded:
            raise
        except (SafetensorError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError(f"{file} is damaged, or no file of labels ({error}): write it again") from error


def _read_tensors(file: Path) -> LabelFile:
    with safe_open(file, framework="pt") as opened:
        LIST_BYTES.check(opened.get_slice("about").get_shape()[0], f"the list of names in {file}")
        about = json.loads(opened.get_tensor("about").numpy().tobytes())
        given, targets, kept = (opened.get_tensor(name) for name in ("given", "targets", "kept"))
    if not isinstance(about, dict) or about.get("format") != FORMAT or about.get("version") != VERSION:
        raise ValueError(f"version {VERSION} of the format is expected")
    CLASSES.check(len(about["class_names"]), str(file))
    found = LabelFile(about["names"], about["class_names"], given, targets, kept, about["fingerprint"])
    if not has_checksum(about) or about["sha256"] != found.digest():
        raise ValueError("its checksum is not that of its content")
    return found


# --- corrected_labels.csv ---------------------------------------------------------------------------------


def read_labels(path: str | Path, class_names: Sequence[str] | None = None) -> LabelFile:
    """Labels of an audit folder with the choices of a person on top, or those of a CSV file alone.

    The file has the columns ``path`` or ``index``, ``given_label``, ``label`` and ``source``. An example
    whose ``label`` is empty is dropped. In a folder, a line with the source "person", or with another label
    than the given one, sets the label of its example; the others keep their soft targets, and lines may be
    missing. Alone, the file has a line for each example, and its labels are hard. ``class_names``: the
    classes of a file alone; None: those of its given labels, sorted.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        labels, choices = LabelFile.read(path), path / CORRECTED
        return _with_choices(labels, choices) if choices.exists() else labels
    if not path.exists():
        raise FileNotFoundError(f"there are no labels {path}: give an audit folder, or a {CORRECTED}")
    lines = read_lines(path)
    names = sorted({line.given for line in lines}) if class_names is None else class_names
    index = {name: number for number, name in enumerate(names)}
    given = torch.tensor([_class(line.given, line, index, path) for line in lines])
    chosen = torch.tensor([_class(line.label or line.given, line, index, path) for line in lines])
    kept = torch.tensor([line.label != "" for line in lines])
    return LabelFile(tuple(line.name for line in lines), tuple(names), given, chosen, kept)


class LabelLine(NamedTuple):
    """A line of ``corrected_labels.csv``."""

    number: int
    name: str
    given: str
    label: str
    """Empty: the example is dropped."""
    source: str

    @property
    def is_choice(self) -> bool:
        """Whether a person has set the label, or confirmed the given one."""
        return self.source == PERSON or self.label != self.given


def _with_choices(labels: LabelFile, file: Path) -> LabelFile:
    row_of = {name: row for row, name in enumerate(labels.names)}
    index = {name: number for number, name in enumerate(labels.class_names)}
    targets, kept = labels.targets.clone(), labels.is_kept.clone()
    for line in read_lines(file):
        row = row_of.get(line.name)
        if row is None or _class(line.given, line, index, file) != int(labels.given[row]):
            known = "no example" if row is None else "another given label of"
            raise ValueError(
                f"{file}, line {line.number}: {LABELS} has {known} {line.name!r}: both files must be of one "
                "audit"
            )
        kept[row] = line.label != ""
        if line.label and line.is_choice:
            chosen = torch.tensor(_class(line.label, line, index, file))
            targets[row] = chosen if targets.dim() == 1 else F.one_hot(chosen, targets.shape[1]).to(targets)
    return replace(labels, targets=targets, kept=kept)


def _class(name: str, line: LabelLine, index: Mapping[str, int], file: Path) -> int:
    if name not in index:
        raise ValueError(
            f"{file}, line {line.number}: {name!r} is not one of the {len(index)} classes, such as "
            f"{next(iter(index))!r}: write the name of a class, or leave label empty to drop the example"
        )
    return index[name]


def read_lines(file: Path) -> list[LabelLine]:
    """Lines of ``corrected_labels.csv``, checked but for names and classes."""
    try:
        text = read_file(file, LIST_BYTES).decode("utf-8-sig")  # spreadsheets begin a file with a mark
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        columns = rows.fieldnames or []
        key = next((name for name in ("path", "index") if name in columns), None)
        if key is None or not set(COLUMNS) <= set(columns):
            raise ValueError(f"the columns are path or index, {', '.join(COLUMNS)}, separated by commas")
        lines, seen = [], set()
        for row in rows:
            name, given, label, source = values = [row[column] for column in (key, *COLUMNS)]
            if not any(values):  # spreadsheets end a file with lines of commas
                continue
            where = f"line {rows.line_num}: "
            if None in values or None in row:
                raise ValueError(f"{where}{len(columns)} values are expected, as in the first line")
            if source not in SOURCES:
                raise ValueError(f"{where}source is {' or '.join(SOURCES)}, got {source!r}")
            if name in seen:
                raise ValueError(f"{where}{name!r} has a line already: remove one")
            seen.add(name)
            lines.append(LabelLine(rows.line_num, name, given, label, source))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} is not a CSV file in UTF-8: {error}") from error
    except LimitExceeded:
        raise
    except ValueError as error:
        raise ValueError(f"{file}, {error}") from None
    if not lines:
        raise ValueError(f"{file} has no line below the names of the columns")
    return lines


# --- images -----------------------------------------------------------------------------------------------


def example_names(images: OneLabel) -> tuple[str, ...]:
    """Name of each example: its path below the folder that all files have in common, or its index.

    >>> example_names(ImageFiles(("a/cat/1.jpg", "a/dog/1.jpg"), torch.tensor([0, 1]), ("cat", "dog")))
    ('cat/1.jpg', 'dog/1.jpg')
    """
    if not isinstance(images, ImageFiles):
        return tuple(map(str, range(len(images))))
    folder = class_folder(images)
    return tuple(file.relative_to(folder).as_posix() for file in images.files)


def class_folder(images: ImageFiles) -> Path:
    """Folder that all files have in common: that of the classes, where there are two or more."""
    return Path(os.path.commonpath([file.parent for file in images.files]))


def open_labels(path: str | Path, images: OneLabel) -> LabelFile:
    """:func:`read_labels` for ``images``, in their order."""
    return match_labels(images, read_labels(path, images.class_names))


def match_labels(images: OneLabel, labels: LabelFile) -> LabelFile:
    """``labels`` in the order of ``images``; an error names what shows that they were made for other data.

    Examples are matched by their index where that is their name, else by path.
    """
    if not isinstance(images, OneLabel):
        raise ValueError(
            f"corrected labels are for examples with one label each, not for {type(images).__name__}"
        )
    if labels.class_names != images.class_names:
        odd = sorted(set(labels.class_names) ^ set(images.class_names)) or ["their order"]
        raise _other_data(f"the classes differ, e.g. {odd[0]!r}")
    if len(labels) != len(images):
        raise _other_data(f"there are {len(labels)} labels and {len(images)} examples")
    row_of = {name: row for row, name in enumerate(labels.names)}
    wanted = tuple(map(str, range(len(images)))) if "0" in row_of else example_names(images)
    missing = next((name for name in wanted if name not in row_of), None)
    if missing is not None:
        raise _other_data(f"they have no example {missing!r}")
    rows = torch.tensor([row_of[name] for name in wanted])
    differs = labels.given[rows] != images.labels.cpu()
    if bool(differs.any()):
        first = int(differs.int().argmax())
        before, now = (
            images.class_names[int(numbers[first])] for numbers in (labels.given[rows], images.labels)
        )
        raise _other_data(f"the given label of {wanted[first]!r} is {before!r}, and {now!r} in the data")
    before_images = labels.fingerprint or {}
    # Files may be copies of another size. Examples that are known by their index alone must be the same.
    by_index = isinstance(images, LabelledTexts) or (
        isinstance(images, ImageArrays) and "shapes" in before_images
    )
    if by_index:
        try:
            changes = compare_fingerprints(before_images, fingerprint_data(images) or {})
        except (TypeError, LookupError) as error:
            raise ValueError(
                f"the fingerprint of the labels is damaged ({error!r}): write them again"
            ) from error
        if changes:
            raise _other_data("; ".join(changes))
    kept = None if labels.kept is None else labels.kept[rows]
    return replace(labels, names=wanted, given=labels.given[rows], targets=labels.targets[rows], kept=kept)


def with_labels(images: Pictures, matched: LabelFile) -> Pictures:
    """All images with the labels of :func:`match_labels`, those too that are to be dropped."""
    device = images.labels.device
    targets = matched.targets.to(device) if matched.targets.dim() == 2 else None
    return replace(images, labels=matched.labels.to(device), targets=targets)


def apply_labels(images: Pictures, labels: LabelFile) -> Pictures:
    """Images with soft targets, or hard labels, without those that were dropped.

    ``images`` are the whole set that the labels were made for, as it was opened; ``labels`` of the result are
    the most probable classes.

    >>> images = ImageArrays(torch.zeros(3, 3, 4, 4).byte(), torch.tensor([0, 1, 1]), ("cat", "dog"))
    >>> targets, kept = torch.tensor([[1.0, 0.0], [0.8, 0.2], [0.1, 0.9]]), torch.tensor([True, True, False])
    >>> labels = LabelFile(("0", "1", "2"), images.class_names, images.labels, targets, kept)
    >>> relabelled = apply_labels(images, labels)
    >>> relabelled.labels, relabelled.targets
    (tensor([0, 0]), tensor([[1.0000, 0.0000],
            [0.8000, 0.2000]]))
    """
    matched = match_labels(images, labels)
    relabelled = with_labels(images, matched)
    return relabelled if bool(matched.is_kept.all()) else relabelled.take(matched.is_kept.nonzero().flatten())


def _other_data(difference: str) -> ValueError:
    return ValueError(
        f"the labels were made for other data: {difference}; give the data that they were made for, as they "
        "were then"
    )
