"""Tables as text: for a terminal by rich, and as Markdown.

Cells are strings and may have several lines. The first columns, which hold names, are aligned to the left,
the numbers after them to the right.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

BLANK = "\u2800"
"""Stands for a space at the end of a cell, which rich would strip before it aligns to the right."""
WIDEST = 10_000


def rich_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int = 1, **style: Any
) -> Any:
    """Make a ``rich.table.Table``; a row of one cell is the heading of a section.

    ``style``: arguments of ``rich.table.Table`` in place of ours.
    """
    try:
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError("tables need rich: pip install 'hetsngp[eval]'") from error
    table = Table(**{"box": None, "padding": (0, 2, 0, 0), "pad_edge": False, **style})
    for index, heading in enumerate(headings):
        justify: Any = "left" if index < num_names else "right"
        table.add_column(Text(heading), justify=justify, no_wrap=True, header_style="")
    for index, row in enumerate(rows):
        last = index + 1 < len(rows) and len(rows[index + 1]) == 1
        cells = [Text(_keep_spaces(cell)) for cell in row]
        table.add_row(*cells, style="bold" if len(row) == 1 < len(headings) else "", end_section=last)
    return table


def plain_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int = 1, gap: int = 2
) -> str:
    """Aligned columns without lines around them, ``gap`` spaces apart.

    >>> print(plain_table(["method", "NLL"], [["sngp", "0.947"], ["hetsngp", "0.9"]]))
    method     NLL
    sngp     0.947
    hetsngp    0.9
    """
    table = rich_table(
        [_keep_spaces(heading) for heading in headings], rows, num_names=num_names, padding=(0, gap, 0, 0)
    )
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=WIDEST, color_system=None, force_terminal=False, legacy_windows=False).print(
        table
    )
    lines = file.getvalue().replace(BLANK, " ").splitlines()
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int = 1) -> str:
    """Table in Markdown.

    >>> print(markdown_table(["method", "NLL"], [["sngp", "0.947"]]))
    | method | NLL |
    |---|---:|
    | sngp | 0.947 |
    """
    rule = "|".join("---" if index < num_names else "---:" for index in range(len(headings)))
    lines = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (headings, *rows)
    ]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _keep_spaces(cell: str) -> str:
    """Replace spaces at the end of each line."""
    lines = cell.split("\n")
    return "\n".join(line.rstrip(" ") + BLANK * (len(line) - len(line.rstrip(" "))) for line in lines)
