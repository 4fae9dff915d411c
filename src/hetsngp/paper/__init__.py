"""Every table of the paper as one call: its rows are recipes of the book, its columns what is measured.

``tables`` and ``paper`` say what a table has, ``runs`` trains its rows, ``measuring`` fills its columns,
``results``, ``text`` and ``plots`` show them beside the paper's. ``runtime`` and ``synthetic`` go ways of
their own.
"""

from hetsngp.paper.reproduction import plan_of, reproduce
from hetsngp.paper.results import Result
from hetsngp.paper.tables import TABLES, PaperTable

__all__ = ["TABLES", "PaperTable", "Result", "plan_of", "reproduce"]
