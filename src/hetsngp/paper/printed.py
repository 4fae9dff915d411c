"""The numbers that the paper prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CONTENT: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
SOURCE: str = _CONTENT.pop("source")
PAPER: dict[str, dict[str, dict[str, tuple[float, float | None]]]] = {
    part: {row: {name: (mean, error) for name, (mean, error) in cells.items()} for row, cells in rows.items()}
    for part, rows in _CONTENT.items()
}
"""Part of a table → row → column → mean and standard error over runs; None where the paper has none."""


def printed(part: str, row: str, column: str) -> tuple[float, float | None] | None:
    """Mean and standard error, or None where the paper has no such number.

    >>> printed("imagenet", "hetsngp", "imc_acc")
    (0.428, 0.001)
    """
    return PAPER.get(part, {}).get(row, {}).get(column)
