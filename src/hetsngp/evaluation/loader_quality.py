"""Accuracy, NLL and calibration error of a model over a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hetsngp import metrics
from hetsngp.models.classifier import to_device


def measure_quality(
    model: Any,
    loader: Iterable[Any],
    device: torch.device,
    *,
    class_index: Tensor | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    num_bins: int = 15,
    soft: bool = False,
) -> dict[str, float]:
    """Accuracy (precision@1 for multi-label data), mean NLL, ECE, and the number of examples.

    The arguments are those of :func:`measure_examples`.
    """
    terms, multi_label = measure_examples(
        model, loader, device, class_index=class_index, gather=gather, dtype=dtype, soft=soft
    )
    return summarize(terms, multi_label=multi_label, num_bins=num_bins)


def summarize(terms: metrics.ExampleTerms, *, multi_label: bool, num_bins: int = 15) -> dict[str, float]:
    """Accuracy (precision@1 for multi-label data), mean NLL, ECE, and the number of examples."""
    numbers = metrics.quality(*terms, num_bins)
    return {"precision_at_1": numbers.pop("accuracy"), **numbers} if multi_label else numbers


@torch.no_grad()
def measure_examples(
    model: Any,
    loader: Iterable[Any],
    device: torch.device,
    *,
    class_index: Tensor | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    soft: bool = False,
) -> tuple[metrics.ExampleTerms, bool]:
    """Confidence, correctness and NLL of each example, on the CPU; and whether the data are multi-label.

    The model has ``predict_probs``, the loader yields (x, y). No probabilities are kept, but three values
    of ``dtype`` for each example.

    class_index: (K',), the class of the model for each label; not for multi-label data.
    soft: labels (n, K) are soft targets, of which the most probable class counts as correct.
    gather: with several processes, makes of the values (3, n) of this one those of all.
    """
    multi_label, parts = False, []
    for x, y in loader:
        probs, y = model.predict_probs(to_device(x, device)), to_device(y, device)
        multi_label = y.dim() == 2 and not soft
        if y.dim() == 1 and class_index is not None:
            y = class_index.to(device)[y]
        parts.append(torch.stack([term.to(dtype) for term in metrics.example_terms(probs, y, soft=soft)]))
    values = torch.cat(parts, 1)
    if gather is not None:
        values = gather(values)
    values = values.cpu().double()
    if not bool(values.isfinite().all()):
        raise FloatingPointError("probabilities are not numbers")
    return metrics.ExampleTerms(*values), multi_label
