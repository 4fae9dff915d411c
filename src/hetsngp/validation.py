"""Checks of user input, in public functions only; each error says what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from hetsngp._moved import renamed
from hetsngp.limits import is_out_of_memory


class PosteriorNotFittedError(RuntimeError):
    """A prediction needs the posterior and it has not been fitted."""

    def __init__(self) -> None:
        super().__init__(
            "posterior not fitted: call hetsngp.fit_posterior(model, loader) with the training data after "
            "training, or build the model with posterior='none' to predict with the MAP estimate"
        )


MOST_POINTS = 2**30
"""Most integration points, the length of torch's Sobol sequence."""
MOST_BINS = 2**20
LARGEST_SIZE = 2**31
"""Largest number of classes, features and similar sizes."""
LARGEST_INTEGER = 2**62


class NotFiniteError(ValueError, FloatingPointError):
    """Weights or an answer are NaN or infinite."""


_skips: ContextVar[bool] = ContextVar("skip_validation", default=False)


@contextmanager
def skip_validation() -> Iterator[None]:
    """Context in which values are not checked: for batches that were checked before they went to the device,
    where a check makes the host wait.
    """
    token = _skips.set(True)
    try:
        yield
    finally:
        _skips.reset(token)


def eager(*tensors: Tensor) -> bool:
    """Whether values may be checked: not while compiling, exporting or capturing a CUDA graph, nor inside
    :func:`skip_validation`.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or _skips.get():
        return False
    if any(_in_transform(t) for t in tensors):
        return False
    return not (any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing())


def _in_transform(tensor: Tensor) -> bool:
    """Whether it is a value inside vmap or grad of torch.func, or of a fake mode, which cannot be read."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or hasattr(tensor, "fake_mode")


def check_choice(name: str, value: str, choices: Iterable[str]) -> str:
    """Check that ``value`` is one of ``choices``."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(map(repr, choices))}{hint}")
    return value


def check_positive(name: str, value: Any, *, integer: bool = False) -> float:
    """Check that ``value`` is finite and positive, an integer if ``integer``; returns a Python number."""
    kind = "a positive whole number" if integer else "a positive finite number"
    has_type = isinstance(value, numbers.Integral if integer else numbers.Real)
    if isinstance(value, bool) or not has_type or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be {kind}, got {value!r:.200}")
    if value > LARGEST_INTEGER and integer:
        raise ValueError(f"{name} must be at most 2**62, got {value!r:.50}")
    try:
        return int(value) if integer else float(value)
    except OverflowError:
        raise ValueError(f"{name} must be {kind}, got {value!r:.50}, which is no float") from None


def check_not_negative(name: str, value: Any, below: float = float("inf")) -> float:
    """Check that ``value`` is a number from 0 to less than ``below``; returns a float."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < below:
        limit = "finite" if below == float("inf") else f"below {below:g}"
        raise ValueError(f"{name} must be at least 0 and {limit}, got {value!r:.200}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be at least 0 and finite, got {value!r:.50}") from None


def check_size(name: str, value: float, most: int = LARGEST_SIZE) -> None:
    """Check that a size is one that a computer has room for."""
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value!r:.50}")


def check_num_bins(num_bins: Any) -> int:
    """Check a number of bins of confidences."""
    count = int(check_positive("num_bins", num_bins, integer=True))
    check_size("num_bins", count, MOST_BINS)
    return count


def check_num_samples(num_samples: Any) -> int:
    """Check a number of integration points."""
    count = int(check_positive("num_samples", num_samples, integer=True))
    if count > MOST_POINTS:
        raise ValueError(
            f"num_samples must be at most {MOST_POINTS:,}, got {num_samples!r:.50}: some hundred are "
            "enough for most purposes; None chooses their number"
        )
    return count


def check_seed(seed: Any) -> int:
    """Check that a seed is a whole number, not negative."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r:.100}")
    return int(seed)


def check_generator(generator: Any, device: str | None = None) -> torch.Generator | None:
    """Check that a source of randomness is torch's, and on ``device`` if that is given."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {type(generator).__name__}: "
            "torch.Generator().manual_seed(0)"
        )
    if generator is not None and device is not None and generator.device.type != device:
        raise ValueError(
            f"generator is on {generator.device}, but must be on {device}: torch.Generator({device!r})"
        )
    return generator


def check_num_classes(num_classes: int) -> int:
    """Check that there are at least two classes; accepts NumPy integers."""
    if isinstance(num_classes, bool) or not isinstance(num_classes, numbers.Integral) or num_classes < 2:
        raise ValueError(
            f"num_classes must be a whole number of at least 2, got {num_classes!r}: "
            "a yes-or-no label has 2 classes"
        )
    check_size("num_classes", num_classes)
    return int(num_classes)


def check_on_device(tensor: Tensor, name: str = "a tensor of the batch") -> None:
    """Check that a tensor has values."""
    if tensor.device.type == "meta":
        raise ValueError(f"{name} is on the meta device, so it has no values: make it on another device")


def check_plain(name: str, tensor: Tensor) -> None:
    """Check that a tensor has its values in memory, one after another."""
    if torch.compiler.is_compiling():
        return
    check_on_device(tensor, name)
    if tensor.is_nested and tensor.layout != torch.jagged:
        raise TypeError(f"{name} is a nested tensor: pad it, torch.nested.to_padded_tensor({name}, 0.0)")
    if tensor.layout not in (torch.strided, torch.jagged):
        raise TypeError(f"{name} is a sparse tensor, {tensor.layout}: give {name}.to_dense()")
    if tensor.is_quantized:
        raise TypeError(f"{name} is a quantized tensor, {tensor.dtype}: give {name}.dequantize()")


def check_real_tensors(**values: Any) -> None:
    """Check that values are tensors of real numbers."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}: torch.as_tensor({name})")
        check_plain(name, value)
        if value.is_complex():
            raise TypeError(f"{name} must be real numbers, got {value.dtype}")


def check_inputs(x: Any) -> None:
    """Check that floating-point inputs are finite; inputs of other types are left to the backbone."""
    if isinstance(x, Tensor):
        if not x.is_quantized:  # a quantized backbone takes them
            check_plain("x", x)
        if x.dim() == 0:
            raise ValueError("x is a single number: inputs have the batch first, (B, ...)")
        if x.shape[0] == 0:
            raise ValueError("x is an empty batch: give at least one row")
        has_fractions = x.is_floating_point() or x.is_complex()
        if has_fractions and eager(x) and not bool(torch.isfinite(x).all()):
            row = int((~torch.isfinite(x)).reshape(x.shape[0], -1).any(1).int().argmax())
            raise ValueError(f"x has NaN or infinite values, first in row {row}: clean or impute the inputs")
    elif isinstance(x, Mapping | tuple | list):
        for value in x.values() if isinstance(x, Mapping) else x:
            check_inputs(value)


EXPLAINED = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError)
"""Errors of a backbone that are explained; subclasses of these pass unchanged."""


@contextmanager
def explain_failure(x: Any, backbone: nn.Module) -> Iterator[None]:
    """Context of a call of the backbone: an error in it says what it was called with, and what to change.

    TypeErrors and ValueErrors keep their type, other errors of torch are RuntimeErrors. Running out of memory
    and errors of other kinds pass unchanged.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        given = list(_leaves(x))
        strange = [part for part in given if not isinstance(part, Tensor)]
        if type(error) not in EXPLAINED or is_out_of_memory(error):
            raise
        if isinstance(error, AttributeError) and not strange:
            raise
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = f"the backbone failed on x, {_describe(x)}: {words}"
        hint = _hint(x, given, strange, backbone)
        if isinstance(error, TypeError | AttributeError):
            raise TypeError(f"{message}; {hint}") from error
        if isinstance(error, ValueError):
            raise ValueError(f"{message}; {hint}") from error
        raise RuntimeError(f"{message}; {hint}") from error


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, Mapping | tuple | list):
        for value in x.values() if isinstance(x, Mapping) else x:
            yield from _leaves(value)
    else:
        yield x


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor {tuple(x.shape)} of {x.dtype} on {x.device}"
    if isinstance(x, np.ndarray):
        return f"a NumPy array {x.shape} of {x.dtype}"
    if isinstance(x, Mapping):
        return f"a dict of {', '.join(map(repr, x)) or 'nothing'}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return f"a {type(x).__name__}"


def _hint(x: Any, given: list[Any], strange: list[Any], backbone: nn.Module) -> str:
    weight = next((p for p in backbone.parameters() if p.is_floating_point()), None)
    dtype = torch.get_default_dtype() if weight is None else weight.dtype
    if strange or not given:
        return f"give tensors as the backbone takes them, e.g. torch.as_tensor(x, dtype={dtype})"
    if isinstance(x, Mapping | tuple | list):
        return "give x in the form that the backbone takes"
    if weight is not None and x.device != weight.device:
        return f"its weights are on {weight.device}: give x.to({str(weight.device)!r})"
    if weight is not None and x.dtype != dtype:
        return f"its weights are {dtype}: give x.to({dtype})"
    return "give x in the shape that the backbone takes, the batch first"


@torch.no_grad()
def first_non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first floating-point tensor that has a NaN or infinite value; None: all are finite.

    Buffers of a network may hold −∞ on purpose (masks of attention); parameters never do.

    >>> first_non_finite([("weight", torch.ones(2)), ("bias", torch.tensor([0.0, float("nan")]))])
    'bias'
    """
    for name, tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
            continue
        if not bool(torch.isfinite(tensor).all()):
            return name
    return None


def check_features(h: Any, width: int, rows: int | None = None) -> Tensor:
    """Check that the backbone returned (B, width), of ``rows`` examples if given, in floating point."""
    if not isinstance(h, Tensor):
        raise TypeError(f"the backbone must return a tensor (B, {width}), got {type(h).__name__}")
    if h.dim() != 2 or h.shape[1] != width:
        raise ValueError(
            f"the backbone returned shape {tuple(h.shape)} where (B, {width}) was expected: "
            f"backbone.num_features is {width}; pool and flatten its output, or correct num_features"
        )
    if not h.is_floating_point() or h.layout != torch.strided:
        kind = h.dtype if h.layout == torch.strided else h.layout
        raise TypeError(f"the backbone returned {kind}: features must be dense, real and floating point")
    if rows is not None and h.shape[0] != rows:
        raise ValueError(
            f"the backbone returned features of {h.shape[0]} examples for {rows}: it must take and return "
            "the batch first"
        )
    return h


def check_class_labels(y: Any, num_classes: int, rows: int) -> Tensor:
    """Check integer labels (B,) in 0 … K−1, for the softmax link."""
    if not isinstance(y, Tensor):
        raise TypeError(f"y must be a tensor of class numbers, got {type(y).__name__}")
    check_plain("y", y)
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise TypeError(
            f"y has dtype {y.dtype}, but link='softmax' takes whole class numbers: pass y.long(), "
            "or build with link='sigmoid' for multi-hot labels"
        )
    if y.dim() != 1 or y.shape[0] != rows:
        mend = "; of one-hot labels y.argmax(-1), of soft targets y.float()" if y.dim() == 2 else ""
        raise ValueError(
            f"y has shape {tuple(y.shape)} where ({rows},) was expected, one label for each row of x{mend}"
        )
    if eager(y):
        low, high = torch.stack(torch.aminmax(y)).tolist()
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"y holds labels from {low} to {high}, but this model has num_classes={num_classes}, so "
                f"labels must be 0 … {num_classes - 1}: renumber them, or build with another num_classes"
            )
    return y.long()


def check_targets(y: Any, num_classes: int, rows: int) -> Tensor:
    """Check labels (B,), or soft targets (B, K) that sum to one, for the softmax link."""
    if not isinstance(y, Tensor) or y.dim() != 2 or not y.is_floating_point():
        return check_class_labels(y, num_classes, rows)
    check_plain("y", y)
    if y.shape != (rows, num_classes):
        raise ValueError(
            f"y has shape {tuple(y.shape)}, but soft targets are ({rows}, {num_classes}), a probability for "
            "each class"
        )
    if eager(y):
        total = y.sum(-1)
        if not bool((y >= 0).all()) or not bool(((total - 1).abs() <= 1e-3).all()):
            raise ValueError(
                "soft targets must be probabilities, not negative and with the sum one in each row: "
                "y / y.sum(-1, keepdim=True); for multi-hot labels build with link='sigmoid'"
            )
    return y


def check_multi_hot(y: Any, num_classes: int, rows: int) -> Tensor:
    """Check labels (B, K) in [0, 1], for the sigmoid link."""
    if not isinstance(y, Tensor):
        raise TypeError(f"y must be a multi-hot tensor, got {type(y).__name__}")
    check_plain("y", y)
    if y.is_complex():
        raise TypeError(f"y has dtype {y.dtype}: multi-hot labels are real numbers in [0, 1]")
    if y.shape != (rows, num_classes):
        raise ValueError(
            f"y has shape {tuple(y.shape)}, but link='sigmoid' takes multi-hot labels "
            f"({rows}, {num_classes}): use torch.nn.functional.one_hot, or build with link='softmax' for "
            "class numbers"
        )
    if eager(y) and not bool(((y >= 0) & (y <= 1)).all()):
        raise ValueError("multi-hot labels must lie in [0, 1]")
    return y


def check_weight(weight: Any, rows: int) -> Tensor:
    """Check weights (B,), finite and not negative: an example of weight 2 counts as two examples."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"the weights of a batch must be a tensor, got {type(weight).__name__}")
    check_plain("weight", weight)
    if weight.is_complex():
        raise TypeError(f"the weights of a batch have dtype {weight.dtype}: give real numbers")
    if weight.shape != (rows,):
        raise ValueError(
            f"the weights have shape {tuple(weight.shape)} where ({rows},) was expected, one for each row"
        )
    if eager(weight) and not bool(((weight >= 0) & (weight < float("inf"))).all()):
        raise ValueError("weights must be finite and not negative: give 0 to an example that must not count")
    return weight


def check_class_counts(counts: Any, num_classes: int) -> Tensor:
    """Check numbers of examples of each class, (K,): finite, not negative, not all zero."""
    try:
        counts = torch.as_tensor(counts, dtype=torch.get_default_dtype())
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"class_counts must be numbers of training examples, one per class, not {type(counts).__name__}: "
            "e.g. torch.bincount(train_labels, minlength=num_classes)"
        ) from None
    if counts.shape != (num_classes,):
        raise ValueError(
            f"class_counts has shape {tuple(counts.shape)} where ({num_classes},) was expected: the number "
            "of training examples of each class, e.g. torch.bincount(train_labels, minlength=num_classes)"
        )
    if eager(counts) and counts.device.type != "meta":
        if not bool((torch.isfinite(counts) & (counts >= 0)).all()):
            raise ValueError("class_counts must be finite and not negative")
        if not bool(counts.any()):
            raise ValueError("class_counts are all zero: count the labels of the training data")
    return counts


def check_loader(loader: Any, where: str) -> None:
    """Refuse what yields no batches, by its type."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"{where} is a Dataset: wrap it, torch.utils.data.DataLoader(dataset, batch_size=256)"
        )
    if not isinstance(loader, Iterable) or isinstance(loader, str | bytes | Mapping | Tensor | np.ndarray):
        raise TypeError(
            f"{where} must be a loader of batches, e.g. a DataLoader or a list [(x, y)], got "
            f"{type(loader).__name__}"
        )
    if isinstance(loader, list | tuple) and len(loader) == 2 and _is_one_batch(*loader):
        raise TypeError(
            f"{where} is x and y of one batch, but must be a list of batches: put it into one, [(x, y)]"
        )


def _is_one_batch(x: Any, y: Any) -> bool:
    """Whether these are inputs and labels, and not two batches of inputs, which are alike."""
    arrays = isinstance(x, Tensor | np.ndarray) and isinstance(y, Tensor | np.ndarray)
    return arrays and (x.ndim != y.ndim or x.dtype != y.dtype)


def check_repeatable(times: int, **loaders: Any) -> None:
    """Check that loaders can be iterated over several times, once for each member."""
    for name, loader in loaders.items():
        if times > 1 and isinstance(loader, Iterator):
            raise TypeError(
                f"{name} is a {type(loader).__name__}, which the first of {times} members would use up: give "
                "one that starts again, e.g. a DataLoader or a list of batches"
            )


def check_batch(batch: Any, where: str) -> tuple[Any, Any, Any]:
    """Split a loader's batch (x, y) or (x, y, weight); without weights the third value is None.

    Also accepts a dict with the labels in it, as from Hugging Face's collators: x is then the rest of it.
    """
    if isinstance(batch, Mapping):
        return _labelled_mapping(batch, where)
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        got = f"{len(batch)} values" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise TypeError(
            f"{where} must yield pairs (x, y) or triples (x, y, weight), got {got}: labels are needed too, "
            "e.g. DataLoader(TensorDataset(x, y))"
        )
    return batch[0], batch[1], batch[2] if len(batch) == 3 else None


def _labelled_mapping(batch: Mapping[str, Any], where: str) -> tuple[Any, Any, Any]:
    names = [name for name in ("labels", "label", "label_ids") if name in batch]
    if not names:
        raise TypeError(
            f"{where} yields a dict with {', '.join(map(repr, batch))} and no 'labels': labels are needed "
            "too, as the entry 'labels', or as pairs (x, y)"
        )
    return {name: value for name, value in batch.items() if name not in names}, batch[names[0]], None


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)


def check_held_out(loader: Any, calibration: Any) -> None:
    """Raise an error if ``calibration`` is the data of ``loader``."""
    if calibration is None:
        return
    datasets = [
        part.dataset
        for part in (loader, calibration)
        if (isinstance(part, DataLoader) and isinstance(part.sampler, RandomSampler | SequentialSampler))
        or is_device_loader(part)
    ]
    if calibration is loader or (len(datasets) == 2 and datasets[0] is datasets[1]):
        raise ValueError(
            "calibration is the training data: give held-out data, e.g. from torch.utils.data.random_split; "
            "on data the network has memorised every temperature looks too high"
        )


def is_device_loader(loader: Any) -> bool:
    """Whether it is a ``DeviceLoader`` of :mod:`hetsngp.data`, which this package does not import."""
    return hasattr(loader, "start_at")
