"""sample_weight and class_weight, checked and multiplied."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import _check_sample_weight

from hetsngp.validation import check_choice


def example_weights(sample_weight: Any, class_weight: Any, X: Any, classes: Any, codes: Any) -> Any:
    """What each row of X (n, d) counts: (n,). ``codes`` (n,) number the rows' labels among ``classes``."""
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if (weight < 0).any():
        raise ValueError("Negative values in sample_weight: give 0 to an example that must not count")
    if not (weight > 0).any():
        raise ValueError("every sample_weight is zero: give some examples a positive weight")
    if class_weight is None:
        return weight
    if isinstance(class_weight, str):
        check_choice("class_weight", class_weight, ["balanced"])
        totals = np.bincount(codes, weights=weight)  # by weight, as if repeated
        present = np.count_nonzero(totals)
        return weight * (weight.sum() / (present * np.where(totals > 0, totals, 1.0)))[codes]
    by_class = compute_class_weight(class_weight, classes=classes, y=classes[codes])
    if not (np.isfinite(by_class) & (by_class >= 0)).all():
        raise ValueError(f"class_weight must be finite and not negative, got {class_weight!r}")
    weight = weight * by_class[codes]
    if not (weight > 0).any():
        raise ValueError(f"class_weight={class_weight!r} leaves no example a positive weight")
    return weight
