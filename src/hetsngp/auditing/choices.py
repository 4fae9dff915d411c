"""What a person chose on the page of an audit: read from a CSV file, and applied to the labels."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetsngp.data.label_files import COLUMNS, CORRECTED, GIVEN, PERSON, read_lines
from hetsngp.files import csv_text, write_text
from hetsngp.locking import one_writer
from hetsngp.validation import check_choice

LABEL_ERRORS = "label_errors.csv"
"""File in the folder of an audit."""
DECISIONS = ("keep", "change", "drop")
CHOSEN = ("given_label", "decision", "new_label")
"""Columns of the file of choices, after that of the examples."""


@dataclass(frozen=True)
class LabelChoice:
    """Decision about the label of one example. ``new_label``: the label from now on, None: it is dropped."""

    given_label: str
    new_label: str | None


def read_choices(
    path: str | Path, folder: str | Path, *, class_names: Iterable[str] | None = None
) -> dict[str, LabelChoice]:
    """Read and check a file that the page of the audit in ``folder`` wrote: choices by example.

    ``class_names``: labels that may be chosen; None: those that ``label_errors.csv`` has. An example that is
    decided twice in the same way counts once. A line that is wrong raises a ValueError with its number.
    """
    path = Path(path)
    key, given, labels = _read_given(Path(folder))
    known = labels if class_names is None else set(class_names)
    choices: dict[str, LabelChoice] = {}
    lines: dict[str, int] = {}
    for line, row in _rows(path, (key, *CHOSEN), hint="download it from the page of this audit"):
        example, label, where = row[key], row["given_label"], f"{path}, line {line}"
        if example not in given:
            raise ValueError(
                f"{where}: this audit has no example {example!r}: the file is of other data; give one that "
                f"was downloaded from the page in {folder}"
            )
        if label != given[example]:
            raise ValueError(
                f"{where}: the given label of {example} is {given[example]!r} in this audit, not {label!r}: "
                f"the file was made for other labels; decide again on the page in {folder}"
            )
        try:
            choice = LabelChoice(label, _new_label(row, known))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if choices.setdefault(example, choice) != choice:
            raise ValueError(
                f"{where}: {example} was decided otherwise in line {lines[example]}: remove one of both lines"
            )
        lines.setdefault(example, line)
    return choices


def write_corrected(folder: str | Path, choices: Mapping[str, LabelChoice]) -> Path:
    """Write ``corrected_labels.csv`` into the folder of an audit: a line for each example of the data.

    Columns: ``index`` or ``path``, by which the lines are sorted, ``given_label``, ``label``, which is empty
    where the example is dropped, and ``source``, "given" or "person". ``choices``: of :func:`read_choices`.
    They replace earlier ones of the same examples; earlier ones of other examples stay. To keep the given
    label is a choice too, which a training takes for certain. A choice whose line is removed from the file is
    taken back. The data are not changed.
    """
    folder = Path(folder)
    key, given, _ = _read_given(folder)
    with one_writer(folder, wait=10.0):
        choices = _read_corrected(folder, given) | dict(choices)
        rows: list[list[str | None]] = [[key, *COLUMNS]]
        for example in sorted(given, key=int) if key == "index" else sorted(given):
            choice = choices.get(example)
            label = given[example] if choice is None else choice.new_label
            rows.append([example, given[example], label, GIVEN if choice is None else PERSON])
        write_text(folder / CORRECTED, csv_text(rows))
    return folder / CORRECTED


def _new_label(row: Mapping[str, str], known: set[str]) -> str | None:
    """Label that a line of choices gives its example; None: dropped."""
    given, new = row["given_label"], row["new_label"]
    decision = check_choice("decision", row["decision"], DECISIONS)
    if decision == "change":
        if not new:
            raise ValueError("new_label is empty: write the class to change to, or the decision keep or drop")
        if new not in known:
            close = difflib.get_close_matches(new, known) or sorted(known)[:3]
            raise ValueError(
                f"unknown class {new!r}: write a class of this audit, such as {', '.join(close)}"
            )
        return new
    if new not in ("", given if decision == "keep" else ""):
        raise ValueError(
            f"the decision is {decision!r} but there is a new_label, {new!r}: leave it empty, or write change"
        )
    return given if decision == "keep" else None


def _read_given(folder: Path) -> tuple[str, dict[str, str], set[str]]:
    """Name of the column of the examples, the given label of each, and all labels, given and predicted."""
    file, hint = folder / LABEL_ERRORS, "repeat the audit"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {LABEL_ERRORS}: give the folder of an audit of labels")
    with open(file, encoding="utf-8", newline="") as handle:
        key = "path" if handle.readline().startswith("path,") else "index"
    given: dict[str, str] = {}
    labels: set[str] = set()
    for line, row in _rows(file, (key, "given_label", "predicted_label"), hint=hint):
        if row[key] in given:
            raise ValueError(f"{file}, line {line}: {row[key]} is there twice: {hint}")
        if key == "index" and not row[key].isdecimal():
            raise ValueError(f"{file}, line {line}: the index {row[key]!r} is no number: {hint}")
        given[row[key]] = row["given_label"]
        labels |= {row["given_label"], row["predicted_label"]}
    return key, given, labels


def _read_corrected(folder: Path, given: Mapping[str, str]) -> dict[str, LabelChoice]:
    """Choices that were applied before."""
    file = folder / CORRECTED
    lines = read_lines(file) if file.is_file() else []
    for line in lines:
        if given.get(line.name) != line.given:
            raise ValueError(
                f"{file}, line {line.number}: {line.name} is of another audit: move it away, and apply all "
                "choices again"
            )
    return {line.name: LabelChoice(line.given, line.label or None) for line in lines if line.is_choice}


def _rows(file: Path, columns: tuple[str, ...], *, hint: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Lines of a CSV file, by number, as values of ``columns``; ``hint``: where to get a better file."""
    with open(file, encoding="utf-8-sig", newline="") as handle:  # spreadsheets begin a file with a mark
        rows = csv.reader(handle, strict=True)
        try:
            heading = next(rows, [])
            missing = [name for name in columns if name not in heading]
            if missing:
                raise ValueError(
                    f"{file} has no column {', '.join(missing)} (its first line is {','.join(heading)!r:.99}"
                    f"; columns are separated by commas): {hint}"
                )
            for row in rows:
                if not any(row):  # spreadsheets end a file with lines of commas
                    continue
                if len(row) != len(heading):
                    raise ValueError(
                        f"{file}, line {rows.line_num}: {len(row)} values for {len(heading)} columns: {hint}"
                    )
                values = dict(zip(heading, row, strict=True))
                yield rows.line_num, {name: values[name] for name in columns}
        except (csv.Error, UnicodeDecodeError) as error:
            where = f"{file}, line {rows.line_num}"
            raise ValueError(f"{where} cannot be read as CSV in UTF-8 ({error}): {hint}") from error
