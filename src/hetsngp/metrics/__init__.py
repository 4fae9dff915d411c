"""Numbers for predictions, on torchmetrics where it has the metric; needs ``pip install 'hetsngp[eval]'``.

``probabilities``: probs against labels, votes or multi-label targets. ``per_example``: accuracy, NLL and ECE
from three numbers for each example. ``detection``: scores of in-distribution against out-of-distribution
examples. ``selection``: errors that remain when the most uncertain examples are left out.
"""

from hetsngp.metrics.detection import aupr, auroc, auroc_standard_error, fpr95, roc
from hetsngp.metrics.per_example import ExampleTerms, example_terms, quality
from hetsngp.metrics.probabilities import (
    Reliability,
    accuracy,
    binary_nll_terms,
    brier,
    brier_terms,
    calibration_error,
    ece,
    has_top_class,
    multi_label_nll,
    nll,
    nll_terms,
    precision_at_1,
    reliability_bins,
    vote_kl,
    vote_nll,
)
from hetsngp.metrics.selection import accuracy_at_coverage, aurc, excess_aurc, risks

__all__ = [
    "ExampleTerms",
    "Reliability",
    "accuracy",
    "accuracy_at_coverage",
    "aupr",
    "aurc",
    "auroc",
    "auroc_standard_error",
    "binary_nll_terms",
    "brier",
    "brier_terms",
    "calibration_error",
    "ece",
    "example_terms",
    "excess_aurc",
    "fpr95",
    "has_top_class",
    "multi_label_nll",
    "nll",
    "nll_terms",
    "precision_at_1",
    "quality",
    "reliability_bins",
    "risks",
    "roc",
    "vote_kl",
    "vote_nll",
]
