"""Which column of a table holds the texts, and which the classes: as given, or guessed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXT_NAMES = (
    *("text", "texts", "sentence", "question", "utterance", "query", "review", "message", "comment", "tweet"),
    *("content", "body", "document", "description", "title", "instruction", "prompt"),
)
"""Usual names of the column of texts, the most usual first."""
LABEL_NAMES = (
    *("label", "labels", "intent", "category", "class", "target", "topic", "sentiment", "label_text"),
    *("class_name", "coarse_label", "fine_label", "tag", "y"),
)
"""Usual names of the column of classes."""
MOST_CLASSES = 0.5
"""Share of different values among the rows up to which a column may hold classes, when it is guessed."""

Columns = Mapping[str, Sequence[Any]]
"""Values of each column by its name; None where one is missing."""


@dataclass(frozen=True)
class TextColumns:
    """Columns of the texts and of the classes; ``label`` None: the classes are not read."""

    text: str
    label: str | None
    guessed: bool = False
    """Whether one of them was not given."""

    def __str__(self) -> str:
        """Sentence that says where texts and classes were found."""
        classes = "" if self.label is None else f", classes in {self.label!r}"
        return f"texts in the column {self.text!r}{classes}"


def choose_columns(
    columns: Columns,
    where: str,
    text: str | None = None,
    label: str | None = None,
    *,
    labelled: bool = True,
    guess_missing: bool = False,
) -> TextColumns:
    """Columns as given, or by usual names, or else the only one that can be meant.

    ``where``: what the errors call the table. ``labelled``: whether classes are read; without, a column of
    classes, given or with a usual name, is only one that the texts are not in. ``guess_missing``: whether to
    guess where there is no column of the given name, which else is an error.

    >>> print(choose_columns({"id": [1, 2], "Utterance": ["a b", "c d"], "intent": ["x", "x"]}, "table"))
    texts in the column 'Utterance', classes in 'intent'
    """
    for name in (text, label):
        if name is not None and name not in columns and not guess_missing:
            raise _unknown(where, columns, name)
    text, label = (name if name in columns else None for name in (text, label))
    if labelled and text is not None and text == label:
        raise ValueError(
            f"{where}: the texts and the classes cannot both be in {text!r}: give another column"
        )
    found_text = text or _by_name(columns, TEXT_NAMES, label, _holds_text)
    found_label = label or _by_name(columns, LABEL_NAMES, found_text, lambda values: True)
    if found_text is None:
        free = [name for name in columns if name != found_label and _holds_text(columns[name])]
        many = [name for name in free if _share_of_different(columns[name]) > MOST_CLASSES]
        found_text = _only(many or free, where, columns, "texts", "text_column")
    if found_label is None and labelled:
        free = [name for name in columns if name != found_text and _may_be_classes(columns[name])]
        found_label = _only(free, where, columns, "classes", "label_column")
    if not _holds_text(columns[found_text]):
        value = next((value for value in columns[found_text] if value is not None), None)
        raise ValueError(
            f"{where}: the column {found_text!r} holds no texts but values such as {value!r:.50}: "
            f"name the column of the texts, of {_listed(columns)}"
        )
    guessed = text is None or (labelled and label is None)
    return TextColumns(found_text, found_label if labelled else None, guessed)


def _by_name(
    columns: Columns, names: Sequence[str], other: str | None, fits: Callable[[Sequence[Any]], bool]
) -> str | None:
    """First column with a usual name, in any case, that is not ``other``."""
    known = {name.strip().casefold(): name for name in reversed(list(columns)) if name != other}
    return next((known[name] for name in names if name in known and fits(columns[known[name]])), None)


def _holds_text(values: Sequence[Any]) -> bool:
    """Whether the values that are there are words, and not all of them numbers."""
    there = [value for value in values if value is not None]
    return bool(there) and all(isinstance(value, str) for value in there) and not all(map(_is_number, there))


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _may_be_classes(values: Sequence[Any]) -> bool:
    plain = all(value is None or isinstance(value, str | int | float) for value in values)
    return plain and len(set(values)) > 1 and _share_of_different(values) <= MOST_CLASSES


def _share_of_different(values: Sequence[Any]) -> float:
    return len(set(values)) / max(1, len(values))


def _only(found: Sequence[str], where: str, columns: Columns, what: str, key: str) -> str:
    if len(found) == 1:
        return found[0]
    reason = f"{', '.join(map(repr, found))} could be meant" if found else f"there are {_listed(columns)}"
    raise ValueError(
        f"{where}: no column could be recognised as the one of the {what} ({reason}): name it, "
        f"{key}=… (in a recipe --set {key}=…)"
    )


def _unknown(where: str, columns: Columns, name: str) -> ValueError:
    close = difflib.get_close_matches(name, columns, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"{where} has no column {name!r}, only {_listed(columns)}{hint}")


def _listed(columns: Columns) -> str:
    return ", ".join(map(repr, columns))
