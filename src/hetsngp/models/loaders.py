"""How many examples a loader has, and how many of each class; for streams, which have no end, None."""

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
from hetsngp.validation import check_batch, check_class_labels, check_weight


def dataset_size(loader: Iterable[Any]) -> float | None:
    """N, by weight where examples have one, and where the loader or its dataset knows its length.

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
    return len(y) if weight is None else float(check_weight(weight, len(y)).double().sum())


def class_counts(loader: Iterable[Any], num_classes: int) -> Tensor | None:
    """Examples of each class by their weight, (K,) in float64: one pass over a loader that knows its size.

    >>> class_counts([(torch.zeros(3, 2), torch.tensor([0, 2, 2]))], 3)
    tensor([1., 0., 2.], dtype=torch.float64)
    """
    data: Any = getattr(loader, "dataset", loader)
    if not hasattr(data, "__len__"):
        return None
    counts = torch.zeros(num_classes, dtype=torch.float64)
    for batch in _all_at_once(loader) or loader:
        _, y, weight = check_batch(batch, "loader")
        weight = torch.ones(len(y)) if weight is None else check_weight(weight, len(y))
        y = check_class_labels(y, num_classes, len(y)).cpu()
        counts += torch.bincount(y, weight.cpu().double(), minlength=num_classes)
    return counts if counts.any() else None


def is_device_loader(loader: Any) -> bool:
    """A :class:`hetsngp.data.images.device_loader.DeviceLoader`, which stands in a room above, by what it can do."""
    return hasattr(loader, "start_at")


def _all_at_once(loader: Any) -> list[Any] | None:
    """All examples in one batch, where they lie in memory; else None."""
    if is_device_loader(loader):  # which may leave out some in an epoch, others in the next
        return [(loader.dataset.images, loader.dataset.labels)]
    return [loader.dataset.tensors] if _goes_through_all(loader) else None


def _goes_through_all(loader: Any) -> bool:
    """Whether the batches hold every row of a TensorDataset once: then its labels are all there are."""
    if type(loader) is not DataLoader or type(loader.dataset) is not TensorDataset:
        return False
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) is not BatchSampler or batches.sampler is not sampler:
        return False  # the batches are somebody's own, and loader.sampler is a default that nobody asks
    if type(sampler) is SequentialSampler:
        whole = sampler.data_source is loader.dataset
    elif type(sampler) is RandomSampler:
        whole = sampler.data_source is loader.dataset and not sampler.replacement
        whole = whole and len(sampler) == len(loader.dataset)
    else:
        whole = False
    return whole and loader.collate_fn is default_collate


def num_batches(loader: Iterable[Any]) -> int | None:
    """Batches of an epoch; a DataLoader over a stream has ``__len__`` and no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def tell_counts(model: Classifier, loader: Iterable[Any]) -> None:
    """Tell the model what it was not told; from a stream it cannot be had, and the loss warns of it."""
    if model.dataset_size is None:
        model.dataset_size = dataset_size(loader)
    if model.wants_class_counts:
        counts = class_counts(loader, model.num_classes)
        if counts is not None:
            model.class_counts = counts
