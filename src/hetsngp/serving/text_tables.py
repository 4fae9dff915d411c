"""Tables as text: for a terminal by rich, and as Markdown.

Cells are strings and may have several lines. In a table the first columns, which hold names, are aligned to
the left, the numbers after them to the right.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any

MISSING = "tables need rich: pip install 'hetsngp[eval]'"
Cells = Sequence[str]


def rich_table(headings: Cells, rows: Sequence[Cells], *, num_names: int = 1, **style: Any) -> Any:
    """Make a ``rich.table.Table``; a row of one cell is the heading of a section.

    ``style``: arguments of ``rich.table.Table``.
    """
    try:
        from rich.table import Table
    except ImportError as error:
        raise ImportError(MISSING) from error
    table = Table(**style)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < num_names else "right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], ()], strict=True):
        is_heading = len(row) == 1 < len(headings)
        table.add_row(*row, style="bold" if is_heading else "", end_section=len(following) <= 1)
    return table


def plain_table(headings: Cells, rows: Sequence[Cells], *, num_names: int = 1, gap: int = 2) -> str:
    """Aligned columns without lines around them, ``gap`` spaces apart.

    >>> print(plain_table(["method", "NLL"], [["sngp", "0.947"], ["hetsngp", "0.9"]]))
    method     NLL
    sngp     0.947
    hetsngp    0.9
    """
    lines, _ = align_rows([headings, *rows], right=range(num_names, len(headings)), gap=gap)
    return "\n".join(lines)


def align_rows(
    rows: Sequence[Cells], *, right: Collection[int] = (), min_widths: Sequence[int] = (), gap: int = 2
) -> tuple[list[str], list[int]]:
    """Align rows; returns the lines and the width of each column.

    Columns ``right`` are aligned to the right, and no column is narrower than in ``min_widths``: a table that
    comes in blocks keeps its columns with the widths of the block before. Without rich, every character
    counts as one cell wide.

    >>> align_rows([["a", "1.0"], ["bcd", "10.0"]], right=[1], min_widths=[4, 0])
    (['a      1.0', 'bcd   10.0'], [4, 4])
    """
    try:
        from rich.cells import cell_len
    except ImportError:
        cell_len = len

    def aligned(line: str, index: int) -> str:
        spaces = " " * (widths[index] - cell_len(line))
        return spaces + line if index in right else line + spaces

    cells = [[cell.split("\n") for cell in row] for row in rows]
    widths = [max(cell_len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    if min_widths:
        widths = [max(pair) for pair in zip(widths, min_widths, strict=True)]
    lines = []
    for row in cells:
        for parts in zip_longest(*row, fillvalue=""):
            lines.append((gap * " ").join(aligned(line, index) for index, line in enumerate(parts)).rstrip())
    return lines, widths


def printable(text: str) -> str:
    """Escape line breaks and letters that cannot be shown: file names may hold anything."""
    return text if text.isprintable() else ascii(text)[1:-1]


def markdown_table(headings: Cells, rows: Sequence[Cells], *, num_names: int = 1) -> str:
    """Table in Markdown.

    >>> print(markdown_table(["method", "NLL"], [["sngp", "0.947"]]))
    | method | NLL |
    |---|---:|
    | sngp | 0.947 |
    """
    rule = "|".join("---" if index < num_names else "---:" for index in range(len(headings)))
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (headings, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in escaped]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])
