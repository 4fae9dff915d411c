"""Labelled texts in memory: texts, labels and the names of the classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetsngp.data.images.arrays import check_soft_targets, chosen_rows, stratified
from hetsngp.data.text.columns import TextColumns
from hetsngp.validation import check_class_labels

UNLABELLED = ("unlabelled",)
"""``class_names`` of texts without classes, whose labels are all 0."""
SHOWN = 60
"""Letters of a text in messages."""


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Labelled texts. ``texts``: N. ``labels``: (N,) int64 in 0 … K−1. ``class_names``: K.

    ``targets``, (N, K) float32: soft targets, which loaders yield in place of ``labels``; splits go by
    ``labels``. ``columns``: those of the table that the texts come from.

    >>> data = LabelledTexts(("hi", "bye", "hello", "ciao"), torch.tensor([0, 1, 0, 1]), ("greet", "leave"))
    >>> rest, held_out = data.split(0.5)
    >>> held_out.texts, held_out.labels
    (('hello', 'ciao'), tensor([0, 1]))
    """

    texts: tuple[str, ...]
    labels: Tensor
    class_names: tuple[str, ...]
    targets: Tensor | None = None
    columns: TextColumns | None = None

    def __post_init__(self) -> None:
        if isinstance(self.texts, str):
            raise TypeError('texts are a list, got one text: give ["…", "…"]')
        object.__setattr__(self, "texts", tuple(self.texts))
        check_texts(self.texts)
        object.__setattr__(self, "class_names", tuple(str(name) for name in self.class_names))
        if not isinstance(self.labels, Tensor):
            raise TypeError(
                f"labels must be a tensor, got {type(self.labels).__name__}: torch.tensor(labels)"
            )
        check_class_labels(self.labels, self.num_classes, len(self.texts))
        check_soft_targets(self.targets, self.labels, self.num_classes)

    @staticmethod
    def from_lists(
        texts: Iterable[str], labels: Iterable[Any], class_names: Sequence[str] | None = None
    ) -> LabelledTexts:
        """Texts with classes by name or number. ``class_names`` None: the classes there are, sorted.

        >>> LabelledTexts.from_lists(["a b", "c", "d"], ["x", "y", "x"]).labels
        tensor([0, 1, 0])
        """
        names = [str(label) for label in labels]
        classes = sorted_classes(names) if class_names is None else tuple(class_names)
        number = {name: index for index, name in enumerate(classes)}
        unknown = next((name for name in names if name not in number), None)
        if unknown is not None:
            raise ValueError(
                f"there is the class {unknown!r:.100}, and the classes are {_some(classes)}: give texts of "
                "these classes, or also train on some of that class"
            )
        return LabelledTexts(tuple(texts), torch.tensor([number[name] for name in names]), classes)

    @staticmethod
    def unlabelled(texts: Iterable[str]) -> LabelledTexts:
        """Texts without classes: to predict, or out-of-distribution."""
        found = tuple(texts)
        return LabelledTexts(found, torch.zeros(len(found), dtype=torch.int64), UNLABELLED)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.class_names)

    @property
    def loader_labels(self) -> Tensor:
        """What loaders yield: ``targets`` (N, K) where there are any, else ``labels`` (N,)."""
        return self.labels if self.targets is None else self.targets

    def take(self, indices: Tensor | np.ndarray | Sequence[int]) -> LabelledTexts:
        """Examples at ``indices`` (n,), in that order; classes without examples stay."""
        rows = chosen_rows(indices)
        targets = None if self.targets is None else self.targets[rows]
        texts = tuple(self.texts[row] for row in rows.tolist())
        return replace(self, texts=texts, labels=self.labels[rows], targets=targets)

    def split(self, held_out: int | float, seed: int = 0) -> tuple[LabelledTexts, LabelledTexts]:
        """(rest, held out): ``held_out`` examples, or that fraction, stratified by class, in order."""
        rest, chosen = stratified(self.labels, self.num_classes, held_out, seed)
        return self.take(rest), self.take(chosen)

    def contradictions(self) -> list[list[int]]:
        """Indices of texts that are there several times with different labels, a list for each text."""
        rows_of: dict[str, list[int]] = {}
        for row, text in enumerate(self.texts):
            rows_of.setdefault(text, []).append(row)
        labels = self.labels.tolist()
        return [rows for rows in rows_of.values() if len({labels[row] for row in rows}) > 1]


def check_texts(texts: Sequence[Any], where: str = "texts") -> None:
    """Check that there are texts, all of them words in Unicode."""
    if not texts:
        raise ValueError(f"{where}: there is no text: give at least one")
    strange = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
    if strange is not None:
        raise TypeError(
            f"{where}: number {strange} is {texts[strange]!r:.50}, not a text: remove it, or convert it "
            "with str"
        )
    broken = next((row for row, text in enumerate(texts) if not _is_unicode(text)), None)
    if broken is not None:
        raise ValueError(
            f"{where}: number {broken} (counted from 0) has bytes or characters that are no Unicode, "
            f"{texts[broken]!a:.50}: save the texts as UTF-8 again, or remove it"
        )
    empty = [row for row, text in enumerate(texts) if not text.strip()]
    if empty:
        raise ValueError(
            f"{where}: {len(empty)} of {len(texts)} texts are empty, the first is number {empty[0]} (counted "
            "from 0): remove them"
        )


def sorted_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Different names, sorted; by their value where all are whole numbers.

    >>> sorted_classes(["10", "9", "10"]), sorted_classes(["b", "10", "a"])
    (('9', '10'), ('10', 'a', 'b'))
    """
    found = set(names)
    whole = all(name.removeprefix("-").isdecimal() for name in found)
    return tuple(sorted(found, key=int) if whole else sorted(found))


def shorten(text: str, most: int = SHOWN) -> str:
    """Beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _is_unicode(text: str) -> bool:
    """Whether a text has no halves of surrogate pairs, which also stand for bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
