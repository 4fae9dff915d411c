"""A table as text: for a terminal of 100 columns, and as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from hetsngp.paper.definitions import PaperColumn, PaperPart, PaperRow
from hetsngp.paper.intervals import LEVEL, RESAMPLES, Interval
from hetsngp.paper.results import Cell, Result, has_paper
from hetsngp.serving.text_tables import markdown_table, plain_table

WIDTH = 100
NONE = "–"
ARROWS = {1: "↑", -1: "↓"}
MARKED = "± is one standard error over seeds; {mark}: within one standard error of the best. "
PAPER = "paper: Fortuin, Collier et al. 2022."
CLEAR = f"*: zero is outside the {LEVEL:.0%} interval of a paired bootstrap over examples and seeds."


def plain_text(result: Result) -> str:
    """Title, for every row our numbers above the paper's, and notes."""
    blocks = [textwrap.fill(result.request.title(), WIDTH)]
    for part in result.table.parts:
        heading = f"{part.title}\n" if len(result.table.parts) > 1 else ""
        blocks.append(heading + _part(result, part))
        if _has_intervals(result, part):
            assert part.baseline is not None
            blocks.append(f"Differences from {part.baseline.title}\n{_differences(result, part)}\n{CLEAR}")
    notes = [_marked(result, "*"), *result.notes]
    return "\n\n".join([*blocks, "\n".join(textwrap.fill(note, WIDTH) for note in notes)])


def markdown(result: Result) -> str:
    """Table as a Markdown document."""
    table = result.table
    blocks = [f"# {result.request.title()}", f"`{result.request.command}`{_unfinished(result)}"]
    for part in table.parts:
        if len(table.parts) > 1:
            blocks.append(f"## {part.title}")
        headings = ["", "", *(f"{column.title} {ARROWS[column.sign]}" for column in part.columns)]
        lines = []
        best = {column.name: result.best(part, column) for column in part.columns}
        for row in part.rows:
            ours, paper = [], []
            for column in part.columns:
                cell = result.cell(part, row, column)
                mean, error = _ours(cell)
                mean = f"**{mean}**" if row.name in best[column.name] else mean
                ours.append(f"{mean} {error}".strip())
                paper.append(" ".join(_papers(cell)).strip())
            lines.append([row.title, f"ours, n = {_count(result, part, row)}", *ours])
            if _has_paper(result, part, row):
                lines.append(["", "paper", *paper])
        blocks.append(markdown_table(headings, lines, num_names=2))
        if _has_intervals(result, part):
            blocks += _markdown_differences(result, part)
    blocks.append(f"![{table.title}]({result.request.name}.png)")
    blocks += [f"*{note}*" for note in (_marked(result, "bold"), *result.notes)]
    return "\n\n".join(blocks) + "\n"


def _marked(result: Result, mark: str) -> str:
    return (MARKED.format(mark=mark) + (PAPER if has_paper(result) else "")).strip()


def _has_intervals(result: Result, part: PaperPart) -> bool:
    return any(name == part.name for name, _, _ in result.intervals)


def _compared(result: Result, part: PaperPart) -> Iterator[tuple[PaperRow, list[Interval | None]]]:
    """Each row but the baseline, with its difference in every column."""
    for row in part.rows:
        if row is not part.baseline:
            yield row, [result.intervals.get((part.name, row.name, c.name)) for c in part.columns]


def _differences(result: Result, part: PaperPart) -> str:
    """Differences from the baseline, for a terminal, which has no room for intervals."""
    headings = ["", *(_heading(column, below=True) for column in part.columns)]
    rows = [
        [
            row.title,
            *(NONE if i is None else f"{i.difference:+.3f}{'*' if i.is_clear else ' '}" for i in each),
        ]
        for row, each in _compared(result, part)
    ]
    return plain_table(headings, rows, gap=1)


def _markdown_differences(result: Result, part: PaperPart) -> list[str]:
    """Differences from the baseline with their intervals: a title and a table."""
    assert part.baseline is not None
    headings = ["", *(f"{column.title} {ARROWS[column.sign]}" for column in part.columns)]
    rows = []
    for row, each in _compared(result, part):
        cells = []
        for column, interval in zip(part.columns, each, strict=True):
            if interval is None:
                cells.append(NONE)
                continue
            text = f"{interval.difference:+.3f}"
            better = interval.is_clear and interval.difference * column.sign > 0
            text = f"**{text}**" if better else text
            cells.append(f"{text} ({interval.low:+.3f} to {interval.high:+.3f})")
        seeds = max((interval.seeds for interval in each if interval is not None), default=0)
        rows.append([f"{row.title}, {seeds} seed{'' if seeds == 1 else 's'}", *cells])
    title = (
        f"Differences from {part.baseline.title}, with the {LEVEL:.0%} interval of a paired bootstrap over "
        f"examples and seeds ({RESAMPLES:,} resamples); bold: better, and zero is outside the interval. "
        "Of one seed it is over examples alone."
    )
    return [title, markdown_table(headings, rows)]


def _unfinished(result: Result) -> str:
    return "" if result.is_finished else " (unfinished)"


def _count(result: Result, part: PaperPart, row: PaperRow) -> int:
    return max(len(result.cell(part, row, column).values) for column in part.columns)


def _has_paper(result: Result, part: PaperPart, row: PaperRow) -> bool:
    return any(result.cell(part, row, column).paper is not None for column in part.columns)


def _ours(cell: Cell) -> tuple[str, str]:
    """Our mean and standard error."""
    if cell.mean is None:
        return NONE, ""
    return f"{cell.mean:.3f}", "" if cell.standard_error is None else f"± {cell.standard_error:.3f}"


def _papers(cell: Cell) -> tuple[str, str]:
    """Mean and standard error of the paper."""
    if cell.paper is None:
        return NONE, ""
    mean, error = cell.paper
    return f"{mean:.3f}", "" if error is None else f"± {error:.3f}"


# --- columns --------------------------------------------------------------------------------------------


def _part(result: Result, part: PaperPart) -> str:
    """Table with standard errors beside the means where that fits, else below them."""
    beside = plain_table(*_cells(result, part, below=False), num_names=2, gap=1)
    if max(map(len, beside.splitlines())) <= WIDTH:
        return beside
    return plain_table(*_cells(result, part, below=True), num_names=2, gap=1)


def _cells(result: Result, part: PaperPart, *, below: bool) -> tuple[list[str], list[list[str]]]:
    """Headings and rows; ``below``: errors, and the second word of a heading, on a second line.

    Spaces at the end of a cell keep numbers without a mark or an error aligned with the others.
    """
    rows: list[tuple[str, str, list[tuple[str, str]]]] = []
    best = {column.name: result.best(part, column) for column in part.columns}
    for row in part.rows:
        cells = [result.cell(part, row, column) for column in part.columns]
        marks = ["*" if row.name in best[column.name] else " " for column in part.columns]
        ours = [(mean + mark, error) for (mean, error), mark in zip(map(_ours, cells), marks, strict=True)]
        rows.append((row.title, "ours ", ours))
        if _has_paper(result, part, row):
            rows.append(("", "paper ", [(f"{mean} ", error) for mean, error in map(_papers, cells)]))
    headings = ["", "", *(_heading(column, below) for column in part.columns)]
    widest = max(len(_short(error)) for _, _, pairs in rows for _, error in pairs)
    if below:
        return headings, [
            [
                title,
                whose,
                *(f"{mean}\n{_short(error)} " if error else mean for mean, error in pairs),
            ]
            for title, whose, pairs in rows
        ]
    return headings, [
        [title, whose, *(mean + _short(error).ljust(widest) for mean, error in pairs)]
        for title, whose, pairs in rows
    ]


def _short(error: str) -> str:
    return error.replace("± 0.", "±.").replace("± ", "±")


def _heading(column: PaperColumn, below: bool) -> str:
    title = f"{column.title} {ARROWS[column.sign]}"
    if not below:
        return f"  {title} "
    first, second = title.replace("-", " ", 1).split(" ", 1)
    return f"{first} \n{second} "
