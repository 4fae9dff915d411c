"""Wrong labels: found, corrected, and which classes are mistaken for each other. Arrays only."""

from hetsngp.labels.confusions import ClassConfusions, ConfusedPair, class_confusions
from hetsngp.labels.label_errors import LabelErrors, find_label_errors
from hetsngp.labels.rounds import Correction, correct_in_rounds

__all__ = [
    "ClassConfusions",
    "ConfusedPair",
    "Correction",
    "LabelErrors",
    "class_confusions",
    "correct_in_rounds",
    "find_label_errors",
]
