"""Tables and figures: train, measure, draw. ``synthetic`` is the paper's Figures 1 and 2.

``evaluate`` measures any model on data of yours, and ``restrict`` has it choose among some of its classes.
"""

from hetsngp.evaluation.evaluator import evaluate
from hetsngp.evaluation.report import Report
from hetsngp.evaluation.restriction import restrict

__all__ = ["Report", "evaluate", "restrict"]
