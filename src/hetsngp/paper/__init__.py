"""Every table of the paper as one call: rows are recipes, columns are measurements.

``definitions`` has rows and columns, ``runs`` trains the rows, ``measurements`` measures the columns, and
``results``, ``text`` and ``plots`` show them beside the paper's. ``runtime`` and ``synthetic`` have tables
of another kind.
"""

from typing import Any

from hetsngp._moved import renamed
from hetsngp.paper.definitions import TABLES, PaperTable
from hetsngp.paper.reproduction import plan_of, reproduce
from hetsngp.paper.results import Result

__all__ = ["TABLES", "PaperTable", "Result", "plan_of", "reproduce"]


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
