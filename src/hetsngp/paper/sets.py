"""The sets that the columns of a table are measured on, found before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetsngp.data.corrupted import open_corrupted
from hetsngp.data.corruptions import CORRUPTIONS, SEVERITIES
from hetsngp.data.datasets.cifar_c import FOLDERS
from hetsngp.data.datasets.imagenet import CorruptedFolders
from hetsngp.data.datasets.registry import open_data
from hetsngp.data.images.folders import image_names
from hetsngp.data.preprocessing import is_made
from hetsngp.data.sources import open_set
from hetsngp.paper.tables import FAR, PaperColumn, PaperTable

CORRUPTED = (*FOLDERS, "imagenet-c")
DETECTION = ("auroc", "fpr95")


@dataclass(frozen=True)
class Probe:
    """A set to be measured on a run: accuracy and the like, or the scores of its rows."""

    spec: str
    """A name of the registry, or a folder."""
    corruption: tuple[str, int] | None = None
    """With its severity."""
    scores: bool = False
    """Whether it is ``ood_score`` that is wanted."""
    made: bool = False
    """Whether the corrupted images are ours and not the published ones."""
    size: int | None = None
    """Its number of images, where that is known without looking at each."""

    @property
    def name(self) -> str:
        """For files and people; another for each.

        >>> Probe("imagenet-c", ("fog", 3)).name
        'imagenet-c.fog.3'
        """
        parts = [self.spec, *map(str, self.corruption or ())]
        return ".".join([*parts, *(["made"] if self.made else []), *(["scores"] if self.scores else [])])


@dataclass(frozen=True)
class Sets:
    """What :func:`find_sets` found."""

    far: str
    corrupted: Mapping[str, tuple[Mapping[tuple[str, int], int | None], bool]]
    """Name → the (corruption, severity) that are there, with the images of each where these are files, and
    whether they are made by us."""
    sizes: Mapping[str, int]
    """Of the others."""

    def spec(self, column: PaperColumn) -> str:
        """What the column is measured on."""
        return self.far if column.data == FAR else column.data

    def probes(self, column: PaperColumn, data: str) -> tuple[Probe, ...]:
        """The sets behind a column of a model trained on ``data``: one, all corrupted ones, or both sides."""
        spec = self.spec(column)
        if column.metric in DETECTION:
            inside, outside = (Probe(name, scores=True, size=self.sizes.get(name)) for name in (data, spec))
            return inside, outside
        if spec in self.corrupted:
            keys, made = self.corrupted[spec]
            return tuple(Probe(spec, key, made=made, size=size) for key, size in keys.items())
        return (Probe(spec, size=self.sizes.get(spec)),)

    def notes(self, table: PaperTable) -> list[str]:
        """What a reader must know of them."""
        found = []
        if self.far != "places365" and any(c.data == FAR for part in table.parts for c in part.columns):
            found.append(f"Far is {self.far} here, and Places365 in the paper.")
        for spec, (keys, made) in self.corrupted.items():
            if made:
                found.append(f"{spec} is made of the test images by our code, not the published files.")
            whole = len(CORRUPTIONS) * len(SEVERITIES)
            if len(keys) < whole:
                found.append(f"Of {spec} {len(keys)} of {whole} sets are at hand: the mean is over these.")
            counts = [size for size in keys.values() if size is not None]
            smaller = sum(size < max(counts) for size in counts)
            if smaller:
                found.append(f"{smaller} sets of {spec} have fewer images than the largest, {max(counts)}.")
        return found


def find_sets(table: PaperTable, training: Iterable[str], far: str, root: str | Path | None = None) -> Sets:
    """Open every set of the table, or raise the error that says what to put where.

    ``training``: the sets that something is still to be trained on.
    """
    for data in training:
        open_set(data, "train", root=root)
    specs = dict.fromkeys(column.data for part in table.parts for column in part.columns)
    corrupted, sizes = {}, {}
    for spec in specs:
        if spec in CORRUPTED:
            corrupted[spec] = _corrupted(spec, root)
        elif spec == FAR:
            sizes[far] = _open_far(far, root)
        else:
            sizes[spec] = len(open_set(spec, "test", root=root))
    return Sets(far, corrupted, sizes)


def _corrupted(spec: str, root: Any) -> tuple[dict[tuple[str, int], int | None], bool]:
    """The standard ones: a mean over others is not that of the benchmark.

    Folders are listed, 75 of them, which takes seconds: one that is unpacked in part must not pass for whole.
    """
    found = open_data(spec, "test", root) if spec == "imagenet-c" else open_corrupted(spec, root)
    folders = found.folders if isinstance(found, CorruptedFolders) else {}
    keys = {
        key: sum(1 for _ in image_names(folders[key], deep=True)) if key in folders else None
        for key in found
        if key[0] in CORRUPTIONS
    }
    if not keys:
        raise ValueError(
            f"{spec} has none of the standard corruptions {', '.join(CORRUPTIONS)}: get it again"
        )
    return keys, is_made(found)


def _open_far(far: str, root: Any) -> int:
    try:
        return len(open_set(far, "test", root=root))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}\nOr take another set as far: --far scenes, or a folder of images"
        ) from error


def all_probes(columns: Sequence[PaperColumn], sets: Sets, data: str) -> tuple[Probe, ...]:
    """Those of several columns, each once."""
    return tuple(dict.fromkeys(probe for column in columns for probe in sets.probes(column, data)))
