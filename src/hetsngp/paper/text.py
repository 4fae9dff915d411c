"""A table in words: for a terminal of 100 columns, and as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from hetsngp.paper.results import Cell, Result
from hetsngp.paper.tables import PaperColumn, PaperPart, PaperRow

WIDTH = 100
NONE = "–"
ARROWS = {1: "↑", -1: "↓"}
MARKED = "± is one standard error over seeds; {mark}: within one standard error of the best. "
PAPER = "paper: Fortuin, Collier et al. 2022."


def plain_text(result: Result) -> str:
    """Title, ours above the paper's for every row, notes."""
    blocks = [textwrap.fill(result.asked.title(), WIDTH)]
    for part in result.table.parts:
        heading = f"{part.title}\n" if len(result.table.parts) > 1 else ""
        blocks.append(heading + _part(result, part))
    notes = [MARKED.format(mark="*") + PAPER, *result.notes]
    return "\n\n".join([*blocks, "\n".join(textwrap.fill(note, WIDTH) for note in notes)])


def markdown(result: Result) -> str:
    """The same as a document."""
    table = result.table
    blocks = [f"# {result.asked.title()}", f"`{_command(result)}`{_unfinished(result)}"]
    for part in table.parts:
        if len(table.parts) > 1:
            blocks.append(f"## {part.title}")
        headings = ["", "", *(f"{column.title} {ARROWS[column.sign]}" for column in part.columns)]
        lines = [f"| {' | '.join(headings)} |", "|---|---|" + "---:|" * len(part.columns)]
        best = {column.name: result.best(part, column) for column in part.columns}
        for row in part.rows:
            ours, paper = [], []
            for column in part.columns:
                cell = result.cell(part, row, column)
                mean, error = _ours(cell)
                mean = f"**{mean}**" if row.name in best[column.name] else mean
                ours.append(f"{mean} {error}".strip())
                paper.append(" ".join(_papers(cell)).strip())
            lines.append(f"| {row.title} | ours, n = {_count(result, part, row)} | {' | '.join(ours)} |")
            if _has_paper(result, part, row):
                lines.append(f"| | paper | {' | '.join(paper)} |")
        blocks.append("\n".join(lines))
    blocks.append(f"![{table.title}]({result.asked.name}.png)")
    blocks += [f"*{note}*" for note in (MARKED.format(mark="bold") + PAPER, *result.notes)]
    return "\n\n".join(blocks) + "\n"


def _command(result: Result) -> str:
    chosen = result.asked.chosen
    return f"hetsngp reproduce {result.table.name}" + (f" --methods {','.join(chosen)}" if chosen else "")


def _unfinished(result: Result) -> str:
    return "" if result.is_finished else " (unfinished)"


def _count(result: Result, part: PaperPart, row: PaperRow) -> int:
    return max(len(result.cell(part, row, column).values) for column in part.columns)


def _has_paper(result: Result, part: PaperPart, row: PaperRow) -> bool:
    return any(result.cell(part, row, column).paper is not None for column in part.columns)


def _ours(cell: Cell) -> tuple[str, str]:
    """Mean and standard error."""
    if cell.mean is None:
        return NONE, ""
    return f"{cell.mean:.3f}", "" if cell.standard_error is None else f"± {cell.standard_error:.3f}"


def _papers(cell: Cell) -> tuple[str, str]:
    if cell.paper is None:
        return NONE, ""
    mean, error = cell.paper
    return f"{mean:.3f}", "" if error is None else f"± {error:.3f}"


# --- columns --------------------------------------------------------------------------------------------


def _part(result: Result, part: PaperPart) -> str:
    """Errors beside the means where that fits, else below them."""
    beside = _aligned(_lines(result, part, below=False))
    if max(map(len, beside.splitlines())) <= WIDTH:
        return beside
    return _aligned(_lines(result, part, below=True))


def _lines(result: Result, part: PaperPart, *, below: bool) -> list[list[str]]:
    """Cells of every line; ``below``: errors, and the second word of a heading, on a line of their own."""
    blocks: list[tuple[str, str, list[tuple[str, str]]]] = []
    best = {column.name: result.best(part, column) for column in part.columns}
    for row in part.rows:
        cells = [result.cell(part, row, column) for column in part.columns]
        marks = ["*" if row.name in best[column.name] else " " for column in part.columns]
        ours = [(mean + mark, error) for (mean, error), mark in zip(map(_ours, cells), marks, strict=True)]
        blocks.append((row.title, "ours", ours))
        if _has_paper(result, part, row):
            blocks.append(("", "paper", [(f"{mean} ", error) for mean, error in map(_papers, cells)]))
    widest = max(len(_short(error)) for _, _, pairs in blocks for _, error in pairs)
    lines = _headings(part.columns, below)
    for title, whose, pairs in blocks:
        if not below:
            lines.append([title, whose, *(mean + _short(error).ljust(widest) for mean, error in pairs)])
            continue
        lines.append([title, whose, *(mean for mean, _ in pairs)])
        if any(error for _, error in pairs):
            lines.append(["", "", *(f"{error.replace('± ', '±')} " for _, error in pairs)])
    return lines


def _short(error: str) -> str:
    return error.replace("± 0.", "±.").replace("± ", "±")


def _headings(columns: Sequence[PaperColumn], below: bool) -> list[list[str]]:
    titles = [f"{column.title} {ARROWS[column.sign]}" for column in columns]
    if not below:
        return [["", "", *(f"  {title} " for title in titles)]]
    pairs = [title.replace("-", " ", 1).split(" ", 1) for title in titles]
    return [["", "", *(f"{first} " for first, _ in pairs)], ["", "", *(f"{second} " for _, second in pairs)]]


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Names to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    texts = []
    for line in lines:
        cells = [
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells[:2]) + "".join(f" {cell}" for cell in cells[2:]))
    return "\n".join(text.rstrip() for text in texts)
