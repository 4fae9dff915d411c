"""Texts from CSV, Parquet and files of JSON lines, from columns, and from Hugging Face's data sets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetsngp.data.bounded import read_file
from hetsngp.data.tables import COMPRESSED, PARQUET, SEPARATORS, expanded, read_frame
from hetsngp.data.text.columns import Columns, TextColumns, choose_columns
from hetsngp.data.text.texts import LabelledTexts, check_texts
from hetsngp.limits import TABLE_BYTES, LimitExceeded
from hetsngp.validation import check_choice

JSON_LINES = (".jsonl", ".ndjson", ".json")
PLAIN = (".txt",)
ENDINGS = (*SEPARATORS, *PARQUET, *JSON_LINES)
"""Endings of files with columns, which may be compressed."""


def read_texts(
    path: str | Path,
    text: str | None = None,
    label: str | None = None,
    *,
    class_names: Sequence[str] | None = None,
    labelled: bool = True,
    guess_missing: bool = False,
) -> tuple[LabelledTexts, TextColumns]:
    """Texts of a .csv, .tsv, .parquet, .jsonl or .json file, and the columns they were in.

    ``text``, ``label``: names of the columns; None: guessed, which the second result says. ``class_names``:
    the classes; None: those there are, sorted. Not ``labelled``: the column of classes is not read, and a
    .txt file, with a text on each line, is taken too. ``guess_missing``: whether to guess a column where
    there is none of the given name.
    """
    path = Path(path).expanduser()
    if _ending(path) in PLAIN:
        if labelled:
            raise ValueError(
                f"{path} has texts without classes: give a .csv or .jsonl file with a column of classes"
            )
        lines = [line for line in _decoded(path).splitlines() if line.strip()]
        check_texts(lines, str(path))
        return LabelledTexts.unlabelled(lines), TextColumns("text", None)
    how: dict[str, Any] = {"class_names": class_names, "labelled": labelled, "guess_missing": guess_missing}
    return texts_from_columns(read_columns(path), text, label, where=str(path), **how)


def texts_from_columns(
    columns: Columns,
    text: str | None = None,
    label: str | None = None,
    *,
    where: str = "the columns",
    class_names: Sequence[str] | None = None,
    labelled: bool = True,
    guess_missing: bool = False,
) -> tuple[LabelledTexts, TextColumns]:
    """Texts of columns by name, such as ``frame.to_dict("list")`` of pandas, as :func:`read_texts`.

    >>> columns = {"question": ["what is it", "who"], "intent": ["thing", "person"]}
    >>> data, found = texts_from_columns(columns)
    >>> data.class_names, str(found)
    (('person', 'thing'), "texts in the column 'question', classes in 'intent'")
    """
    if not columns or not len(next(iter(columns.values()))):
        raise ValueError(f"{where}: there are no examples: give at least one")
    chosen = choose_columns(columns, where, text, label, labelled=labelled, guess_missing=guess_missing)
    texts = ["" if value is None else value for value in columns[chosen.text]]
    check_texts(texts, f"{where}, column {chosen.text!r}")
    if chosen.label is None:
        return replace(LabelledTexts.unlabelled(texts), columns=chosen), chosen
    found = [class_name(value) for value in columns[chosen.label]]
    labels = [name for name in found if name is not None]
    missing = [row for row, name in enumerate(found) if name is None]
    if missing:
        raise ValueError(
            f"{where}: the column {chosen.label!r} has no class for {len(missing)} of {len(found)} texts, "
            f"the first is number {missing[0]} (counted from 0): give them one, or remove them"
        )
    try:
        return replace(LabelledTexts.from_lists(texts, labels, class_names), columns=chosen), chosen
    except ValueError as error:
        raise ValueError(f"{where}, column {chosen.label!r}: {error}") from None


def texts_from_datasets(
    dataset: Any,
    text: str | None = None,
    label: str | None = None,
    *,
    class_names: Sequence[str] | None = None,
    labelled: bool = True,
) -> tuple[Any, TextColumns]:
    """Texts of a ``Dataset`` of Hugging Face's package ``datasets``; of a ``DatasetDict`` a dict of them.

    The classes of a ``ClassLabel`` keep their names and order; else they are those of the split "train".
    """
    if isinstance(dataset, Mapping):
        if not dataset:
            raise ValueError("the DatasetDict has no splits: give one that has")
        parts: dict[str, LabelledTexts] = {}
        columns, names = None, class_names
        for split in sorted(dataset, key=lambda name: name != "train"):
            parts[split], columns = texts_from_datasets(
                dataset[split], text, label, class_names=names, labelled=labelled
            )
            names = parts[split].class_names if labelled and names is None else names
        return {split: parts[split] for split in dataset}, columns  # type: ignore[return-value]
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "features"):
        raise TypeError(
            f"{type(dataset).__name__} is no Dataset of the package datasets: give one, or columns by name "
            "to hetsngp.data.text.texts_from_columns"
        )
    features = dataset.features or {}
    words = {name: tuple(getattr(features.get(name), "names", None) or ()) for name in dataset.column_names}
    columns_by_name = {name: _named(list(dataset[name]), words[name]) for name in dataset.column_names}
    chosen = choose_columns(columns_by_name, "the data set", text, label, labelled=labelled)
    if chosen.label is not None and class_names is None and words[chosen.label]:
        class_names = words[chosen.label]
    kept = {name: columns_by_name[name] for name in (chosen.text, chosen.label) if name is not None}
    how: dict[str, Any] = {"class_names": class_names, "labelled": labelled}
    found, _ = texts_from_columns(kept, chosen.text, chosen.label, where="the data set", **how)
    return found, chosen


def read_columns(path: Path) -> dict[str, list[Any]]:
    """Values of each column of a file, None where one is missing; those of a text file are text."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if check_choice(f"ending of {path}:", _ending(path), ENDINGS) in JSON_LINES:
        return _columns_of(_read_json(path), path)
    frame = read_frame(path, None)
    return {
        str(name): [
            None if absent else value
            for value, absent in zip(series.tolist(), series.isna().tolist(), strict=True)
        ]
        for name, series in frame.items()
    }


def class_name(value: Any) -> str | None:
    """Name of a class: a whole number without decimals, words without spaces around them; None: missing.

    >>> class_name(3.0), class_name(" yes "), class_name(""), class_name(True)
    ('3', 'yes', None, 'True')
    """
    if value is None or value != value:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip() or None


def is_text_file(path: str | Path) -> bool:
    """Whether a file has one of the endings that are read here."""
    return _ending(Path(path)) in (*ENDINGS, *PLAIN)


def _ending(path: Path) -> str:
    """Last ending of the name, but for one of a compression; "" without one."""
    endings = [ending.lower() for ending in path.suffixes]
    if endings and endings[-1] in COMPRESSED:
        endings.pop()
    return endings[-1] if endings else ""


def _named(values: list[Any], names: Sequence[str]) -> list[Any]:
    """Numbers of a ClassLabel as names; −1 is a missing class."""
    if not names:
        return values
    return [names[value] if value is not None and value >= 0 else None for value in values]


def _read_json(path: Path) -> list[Any]:
    """Objects of a file: one on each line, or a list of them."""
    content = _decoded(path)
    if content.lstrip().startswith("["):
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is no JSON ({error}): save it again, with an object on each line"
            ) from error
        return list(found)
    rows = []
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number} is no JSON ({error}): write an object on each line"
                ) from error
    return rows


def _columns_of(rows: Sequence[Any], path: Path) -> dict[str, list[Any]]:
    strange = next((row for row in rows if not isinstance(row, dict)), None)
    if strange is not None or not rows:
        got = "no rows" if not rows else f"a {type(strange).__name__}"
        raise ValueError(f'{path} has {got} where objects such as {{"text": …, "label": …}} are expected')
    names: Iterable[str] = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _decoded(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        content = _expanded(path) if path.suffix.lower() in COMPRESSED else read_file(path, TABLE_BYTES)
        return content.decode("utf-8-sig")  # spreadsheets begin a file with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}): save it as that") from error


def _expanded(path: Path) -> bytes:
    try:
        with expanded(path) as stream:
            return stream.read()
    except LimitExceeded:
        raise
    except Exception as error:  # the decompressors raise many types
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} cannot be decompressed ({reason}): save it again") from error
