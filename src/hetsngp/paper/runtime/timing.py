"""Cost of a training step and of a prediction: times and floating-point operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hetsngp.posterior.fit import fit_posterior
from hetsngp.training.config import TrainConfig
from hetsngp.training.images import make_model
from hetsngp.training.recipes.recipe import Recipe
from hetsngp.training.recipes.task import ImageTask
from hetsngp.validation import skip_validation

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# Random batches behind a posterior, which count as many images as ImageNet has: the fewer they are, the wider
# the posterior, and the more points a prediction takes.
FIT_BATCHES, DATASET_SIZE = 4, 1_281_167
# Of the batch, to count on: operations an image do not depend on the others, and attention written out as
# matrix products takes much memory.
COUNTED = 8
# Labels of a multi-label image.
LABELS = 4


@dataclass(frozen=True)
class Pace:
    """Number of timed calls: ``warmup`` calls, then up to ``most``, until ``seconds`` are over.

    Slow calls are fewer: after ``seconds``, ``least`` calls and one to warm up are enough.
    """

    warmup: int = 5
    least: int = 3
    most: int = 30
    seconds: float = 1.0

    def time(self, work: Callable[[], Any], device: torch.device) -> list[float]:
        """Seconds of each call, including the work of the device."""
        begun = time.perf_counter()
        for _ in range(self.warmup):
            _timed(work, device)
            if time.perf_counter() - begun > self.seconds:
                break
        begun, times = time.perf_counter(), [_timed(work, device)]
        while len(times) < self.most and (
            len(times) < self.least or time.perf_counter() - begun < self.seconds
        ):
            times.append(_timed(work, device))
        return times


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_flops(work: Callable[[], Any]) -> int:
    """Floating-point operations of ``work``: matrix products and convolutions, a multiply-add as two.

    Attention is computed by matrix products: the counter knows only some of its fused kernels.

    >>> count_flops(lambda: torch.zeros(2, 3) @ torch.zeros(3, 5))
    60
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def ratio(times: Sequence[float], before: Sequence[float], after: Sequence[float]) -> float:
    """Median of ``times`` divided by the mean of the medians of ``before`` and ``after``.

    >>> ratio([3.0, 9.0, 3.0], [1.0], [2.0])
    2.0
    """
    baseline = (statistics.median(before) + statistics.median(after)) / 2
    return statistics.median(times) / baseline


class TimedModel:
    """Untrained model of a recipe, with ``batch`` random images on ``device``.

    Where it ``trains`` it has an optimiser with a learning rate of zero: steps cost the same, and predictions
    afterwards do not depend on their number.
    """

    def __init__(
        self, recipe: Recipe, num_classes: int, size: int, batch: int, device: torch.device, *, trains: bool
    ) -> None:
        assert isinstance(recipe.task, ImageTask)
        assert isinstance(recipe.config, TrainConfig)
        self.device, self.hardware = device, recipe.hardware
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(recipe.config.seed)  # torch.manual_seed would reach every GPU
            self.model = make_model(recipe.task, num_classes, (3, size, size))[0].to(device)
        self.model.dataset_size = DATASET_SIZE
        if self.hardware.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.generator = torch.Generator().manual_seed(0)
        self.points = torch.Generator().manual_seed(0)
        self.shape, self.num_classes = (batch, 3, size, size), num_classes
        self.spent: Tensor | None = None
        self.x, self.y = self._batch()
        self.optimizer = recipe.config.schedule.make_optimizer(self.model) if trains else None
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["lr"] = 0.0
        self.fit()

    def _batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(self.shape, generator=self.generator).to(self.device)
        if self.hardware.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        batch, multi_label = len(x), self.model.head.sigmoid
        shape = (batch, min(LABELS, self.num_classes)) if multi_label else (batch,)
        y = torch.randint(self.num_classes, shape, generator=self.generator)
        if multi_label:
            y = torch.zeros(batch, self.num_classes).scatter_(1, y, 1.0)
        return x, y.to(self.device)

    def fit(self) -> None:
        """Fit the posterior, which a GP needs to predict, on a few random batches and ours."""
        batches = [(self.x, self.y), *(self._batch() for _ in range(FIT_BATCHES - 1))]
        weight = torch.full((len(self.x),), DATASET_SIZE / (FIT_BATCHES * len(self.x)))
        fit_posterior(self.model, [(x, y, weight) for x, y in batches])

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = AUTOCAST.get(self.hardware.precision)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    # --- timed work -------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run forward, loss, backward and an optimiser step."""
        assert self.optimizer is not None
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with (
            self._autocast(),
            skip_validation(),
        ):  # as in the engine, which checks a batch before it gets here
            loss = self.model.loss(self.x, self.y, generator=self.points)
        loss.backward()
        self.optimizer.step()

    def eval(self) -> None:
        """Predict probabilities, as the paper times it."""
        with self._autocast():
            self.model.predict_probs(self.x)

    def predict(self) -> None:
        """Predict probabilities and both uncertainties."""
        with self._autocast():
            self.spent = self.model.predict(self.x).num_points

    def times(self, kinds: Sequence[str], pace: Pace) -> dict[str, list[float]]:
        """Seconds of each repetition of ``kinds`` ("train", "eval", "predict"), of the whole batch."""
        found = {}
        for kind in kinds:
            found[kind] = pace.time(getattr(self, kind), self.device)
            if kind == "train":
                self._forget_gradients()
                self.model.mark_fitted()  # a learning rate of zero left the weights unchanged
        return found

    def _forget_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    # --- counted work -----------------------------------------------------------------------------------

    def gflop(self, kinds: Sequence[str]) -> dict[str, float]:
        """GFLOP of an image, in float32: forward ("eval"), forward and backward ("train")."""
        x, y = self.x[:COUNTED], self.y[:COUNTED]

        def train() -> None:
            self.model.train()
            self.model.loss(x, y, generator=self.points).backward()

        works: Mapping[str, Callable[[], Any]] = {"train": train, "eval": lambda: self.model.predict_probs(x)}
        found = {kind: count_flops(works[kind]) / (1e9 * len(x)) for kind in kinds}
        self._forget_gradients()
        self.model.mark_fitted()
        return found

    def num_points(self) -> float | None:
        """Mean number of integration points of a prediction; None where there are none."""
        return None if self.spent is None else float(self.spent.float().mean()) or None
