"""``evaluate`` measures any model on your data; ``restrict`` makes it choose among some of its classes."""

from hetsngp.evaluation.evaluator import evaluate
from hetsngp.evaluation.report import Report
from hetsngp.evaluation.restriction import restrict

__all__ = ["Report", "evaluate", "restrict"]
