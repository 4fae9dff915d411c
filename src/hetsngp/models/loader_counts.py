"""Numbers of examples, of batches and of examples of each class of a loader; None for endless streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from hetsngp.models.classifier import Classifier
from hetsngp.validation import check_batch, check_targets, check_weight, is_device_loader


def dataset_size(loader: Iterable[Any]) -> float | None:
    """Number N of examples, or their total weight; None where neither loader nor dataset has a length.

    >>> dataset_size(DataLoader(TensorDataset(torch.zeros(5, 2), torch.zeros(5).long()), batch_size=2))
    5
    """
    data: Any = getattr(loader, "dataset", loader)
    if not hasattr(data, "__len__"):
        return None
    if _goes_through_all(loader):
        return _weight_of(data.tensors)
    # The length of a list is its number of batches.
    return len(data) if data is not loader else sum(_weight_of(batch) for batch in data)


def _weight_of(batch: Any) -> float:
    _, y, weight = check_batch(batch, "loader")
    if not isinstance(y, Tensor) or y.dim() == 0:
        raise TypeError(f"loader must yield labels of a batch as a tensor, got {type(y).__name__}")
    return len(y) if weight is None else float(check_weight(weight, len(y)).double().sum())


def class_counts(loader: Iterable[Any], num_classes: int) -> Tensor | None:
    """Total weight of the examples of each class, (K,) in float64: one pass over a loader with a length.

    Soft targets (B, K) count for each class by their share.

    >>> class_counts([(torch.zeros(3, 2), torch.tensor([0, 2, 2]))], 3)
    tensor([1., 0., 2.], dtype=torch.float64)
    """
    data: Any = getattr(loader, "dataset", loader)
    if not hasattr(data, "__len__"):
        return None
    counts = torch.zeros(num_classes, dtype=torch.float64)
    for batch in _all_at_once(loader) or loader:
        _, y, weight = check_batch(batch, "loader")
        if not isinstance(y, Tensor) or y.dim() == 0:
            raise TypeError(f"loader must yield labels of a batch as a tensor, got {type(y).__name__}")
        weight = torch.ones(len(y)) if weight is None else check_weight(weight, len(y))
        y, weight = check_targets(y, num_classes, len(y)).cpu(), weight.cpu().double()
        soft = y.dim() == 2
        counts += weight @ y.double() if soft else torch.bincount(y, weight, minlength=num_classes)
    return counts if counts.any() else None


def _all_at_once(loader: Any) -> list[Any] | None:
    """Labels of all examples as one batch, if they are in memory; else None."""
    if is_device_loader(loader):  # which may leave some out in one epoch, and others in the next
        return [(None, loader.dataset.loader_labels)]
    return [loader.dataset.tensors] if _goes_through_all(loader) else None


def _goes_through_all(loader: Any) -> bool:
    """Whether the batches hold every example of a TensorDataset once, so that its labels can be counted."""
    if type(loader) is not DataLoader or type(loader.dataset) is not TensorDataset:
        return False
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) is not BatchSampler or batches.sampler is not sampler:
        return False  # a custom batch sampler, which does not use loader.sampler
    if type(sampler) is SequentialSampler:
        complete = sampler.data_source is loader.dataset
    elif type(sampler) is RandomSampler:
        complete = sampler.data_source is loader.dataset and not sampler.replacement
        complete = complete and len(sampler) == len(loader.dataset)
    else:
        complete = False
    return complete and loader.collate_fn is default_collate


def num_batches(loader: Iterable[Any]) -> int | None:
    """Number of batches of an epoch; None for a stream, whose DataLoader has ``__len__`` but no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def set_missing_counts(model: Classifier, loader: Iterable[Any]) -> None:
    """Set dataset size and class counts of ``model`` from the loader, unless they are set.

    A stream has neither; the loss warns of it.
    """
    if model.dataset_size is None:
        model.dataset_size = dataset_size(loader)
    if model.wants_class_counts:
        counts = class_counts(loader, model.num_classes)
        if counts is not None:
            model.class_counts = counts
