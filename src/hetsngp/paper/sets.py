"""Sets that the columns of a table are measured on, found before anything is trained."""

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
from hetsngp.data.preprocessing import made_by_hetsngp
from hetsngp.data.sources import open_set
from hetsngp.paper.definitions import FAR, PaperColumn, PaperTable

CORRUPTED = (*FOLDERS, "imagenet-c")
DETECTION = ("auroc", "fpr95_at_id_recall")


@dataclass(frozen=True)
class EvaluationSet:
    """A set that a model is measured on: accuracy, NLL and ECE, or the OOD score of each example."""

    spec: str
    """Name in the registry, or a folder."""
    corruption: tuple[str, int] | None = None
    """Corruption and severity."""
    scores: bool = False
    """Whether ``ood_score`` is measured."""
    made: bool = False
    """Whether the corrupted images are made by us and not the published ones."""
    size: int | None = None
    """Number of images, where it is known without reading each."""

    @property
    def name(self) -> str:
        """Name for files and messages, different for each set.

        >>> EvaluationSet("imagenet-c", ("fog", 3)).name
        'imagenet-c.fog.3'
        """
        parts = [self.spec, *map(str, self.corruption or ())]
        return ".".join([*parts, *(["made"] if self.made else []), *(["scores"] if self.scores else [])])


@dataclass(frozen=True)
class AvailableSets:
    """Result of :func:`find_sets`."""

    far: str
    corrupted: Mapping[str, tuple[Mapping[tuple[str, int], int | None], bool]]
    """Name → the available (corruption, severity), with the number of images where these are files; and
    whether they are made by us."""
    sizes: Mapping[str, int]
    """Number of images of the other sets."""

    def spec(self, column: PaperColumn) -> str:
        """Name of the set that a column is measured on."""
        return self.far if column.data == FAR else column.data

    def evaluation_sets(self, column: PaperColumn, data: str) -> tuple[EvaluationSet, ...]:
        """Sets of a column, for a model trained on ``data``: one, all corrupted ones, or ID and OOD."""
        spec = self.spec(column)
        if column.metric in DETECTION:
            pair = (data, spec)
            return tuple(EvaluationSet(name, scores=True, size=self.sizes.get(name)) for name in pair)
        if spec in self.corrupted:
            keys, made = self.corrupted[spec]
            return tuple(EvaluationSet(spec, key, made=made, size=size) for key, size in keys.items())
        return (EvaluationSet(spec, size=self.sizes.get(spec)),)

    def notes(self, table: PaperTable) -> list[str]:
        """Notes on differences to the paper's sets."""
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


def find_sets(
    table: PaperTable, training: Iterable[str], far: str, root: str | Path | None = None
) -> AvailableSets:
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
    return AvailableSets(far, corrupted, sizes)


def _corrupted(spec: str, root: Any) -> tuple[dict[tuple[str, int], int | None], bool]:
    """Find the standard corruptions: a mean over others is not that of the benchmark.

    The 75 folders are listed, which takes seconds: one that is unpacked in part must not pass for complete.
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
    return keys, made_by_hetsngp(found)


def _open_far(far: str, root: Any) -> int:
    try:
        return len(open_set(far, "test", root=root))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}\nOr take another set as far: --far scenes, or a folder of images"
        ) from error


def all_evaluation_sets(
    columns: Sequence[PaperColumn], sets: AvailableSets, data: str
) -> tuple[EvaluationSet, ...]:
    """Sets of several columns, each once."""
    return tuple(dict.fromkeys(each for column in columns for each in sets.evaluation_sets(column, data)))
