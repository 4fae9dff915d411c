"""Optimiser steps by Lightning Fabric, with what follows a step: spectral norms and the moving average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hetsngp.fitting.loop import Gradients, TrainState
from hetsngp.functional.label_loss import label_loss
from hetsngp.models.classifier import Classifier
from hetsngp.nn.latent import FeatureNormalizer
from hetsngp.nn.spectral_cache import cache_spectral_norms, cacheable_layers, remeasure_spectral_norms
from hetsngp.training.checkpointing.state_dicts import STATISTICS
from hetsngp.training.config import TrainConfig
from hetsngp.training.loaders import to_channels_last
from hetsngp.training.moving_average import MovingAverage
from hetsngp.validation import skip_validation

# Power iterations of an update. The bound holds the largest singular value down while the next one grows:
# with one iteration in ten steps its direction would be found too late (docs/decisions.md).
ITERATIONS = 3
# Most shapes of batches whose loss is a CUDA graph: each graph keeps its memory. The last batch of an epoch
# may have another shape than the rest.
MAX_GRAPHS = 3
# Most logits of such a batch, ten times as many as in the batches whose training was timed (512 × 100): a
# graph keeps its memory, and the more a kernel computes, the less its launch matters.
MAX_LOGITS = 2**19

T = TypeVar("T")


def capture(function: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """CUDA graph of a function, and its result, which every replay overwrites.

    Graphs of one ``pool`` share their memory: read a result before another graph is replayed.
    """
    # A graph must not be the first to call a library, which then asks for memory.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on to pin memory, as those of a DataLoader do.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = function()
    return graph, result


class CapturedLoss(NamedTuple):
    """CUDA graph of :func:`label_loss`, with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor | None, ...]
    nll: Tensor
    gradients: tuple[Tensor | None, ...]


class GraphedLabelLoss:
    """:func:`label_loss` with gradients as one CUDA graph for each shape of a batch: the host would need
    longer to launch its hundreds of small kernels than the GPU to run them.
    """

    def __init__(self) -> None:
        self.captured: dict[Any, CapturedLoss] = {}
        self.pool = torch.cuda.graph_pool_handle()

    @torch.no_grad()
    def __call__(
        self, mean: Tensor, var: Tensor, factor: Tensor | None, y: Tensor, eps: Tensor | None, gradients: bool
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        inputs = mean, var, factor, y, eps
        shapes = tuple(None if t is None else (t.shape, t.dtype) for t in inputs)
        new = shapes not in self.captured
        if not gradients or mean.numel() > MAX_LOGITS or (new and len(self.captured) == MAX_GRAPHS):
            return label_loss(*inputs, gradients)
        if new:
            kept = mean.clone(), var.clone(), _clone(factor), y.clone(), _clone(eps)
            with torch.cuda.device(mean.device):
                graph, result = capture(lambda: label_loss(*kept, gradients=True), self.pool)
            self.captured[shapes] = CapturedLoss(graph, kept, *result)
        loss = self.captured[shapes]
        for own, given in zip(loss.inputs, inputs, strict=True):
            if own is not None and given is not None:
                own.copy_(given)
        loss.graph.replay()
        return loss.nll.clone(), tuple(_clone(gradient) for gradient in loss.gradients)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


class SpectralNormUpdate:
    """Measure the cached spectral norms anew; on a GPU as one CUDA graph, because launching its hundreds of
    small kernels would take the host as long as a training step.
    """

    def __init__(self, model: Classifier, iterations: int = ITERATIONS) -> None:
        self.model, self.iterations = model, iterations
        self.graph: torch.cuda.CUDAGraph | None = None
        self.addresses: list[int] = []

    def __call__(self) -> None:
        """Update the norms in place, at the present weights."""
        if self.model.temperature.device.type != "cuda":
            remeasure_spectral_norms(self.model, self.iterations)
            return
        addresses = self._addresses()
        if self.graph is None or addresses != self.addresses:  # new images, of another size, have new vectors
            self.graph, _ = capture(lambda: remeasure_spectral_norms(self.model, self.iterations))
            self.addresses = addresses
        self.graph.replay()

    def _addresses(self) -> list[int]:
        tensors = [
            t
            for layer in cacheable_layers(self.model).values()
            for t in (layer.weight, layer.spectral_v, layer.spectral_direction)
            if t is not None
        ]
        return [t.data_ptr() for t in tensors]


class LossModule(nn.Module):
    """``loss`` and log-probabilities of a model behind ``forward``, the method that ddp and fsdp wrap."""

    def __init__(self, model: Classifier, generator: torch.Generator) -> None:
        super().__init__()
        self.model, self.generator = model, generator

    def forward(self, x: Any, y: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Loss of a batch; without labels, log-probabilities."""
        if y is None:
            out: Tensor = self.model(x)
            return out
        return self.model.loss(x, y, generator=self.generator, weight=weight)


class FabricGradients(Gradients):
    """Steps by Fabric; each updates the moving average, each ``bound_every``-th the spectral norms."""

    def __init__(
        self,
        fabric: Any,
        model: Classifier,
        config: TrainConfig,
        generator: torch.Generator,
        *,
        channels_last: bool,
        sharded: bool,
    ) -> None:
        self.fabric, self.config, self.channels_last = fabric, config, channels_last
        self.module = fabric.setup_module(LossModule(model, generator))
        # A shard of a weight has no σ: under fsdp the power iteration stays inside the forward pass. Cached
        # after ddp has seen the buffers: all processes compute the same norms, so none need be broadcast.
        self.caches_norms = config.bound_every > 1 and not sharded and bool(cache_spectral_norms(model))
        optimizer = fabric.setup_optimizers(config.schedule.make_optimizer(model))
        super().__init__(model, optimizer, generator, config.mixup)
        self.points = generator
        self.ema = None if config.ema_decay is None else MovingAverage(model, config.ema_decay)
        self.update_norms = SpectralNormUpdate(model)
        self.updates = 0

    @property
    def device(self) -> torch.device:
        device: torch.device = self.fabric.device
        return device

    def add(self, x: Any, y: Tensor, weight: Tensor | None, *, group: int, complete: bool) -> Tensor:
        """Add the gradient of a batch; processes average their gradients at the last batch of a group."""
        with skip_validation():  # ResumableLoader has checked the batch
            x, y, weight = self.mixed(x, y, weight)
        x = to_channels_last(x) if self.channels_last else x
        torch.compiler.cudagraph_mark_step_begin()
        with self.fabric.no_backward_sync(self.module, enabled=not complete):
            with skip_validation():
                loss: Tensor = self.module(x, y, weight)
            self.fabric.backward(loss / group if group > 1 else loss)
        return loss

    def mean_loss(self, state: TrainState) -> float:
        """Mean loss over the batches of all processes, so that all see a NaN at the same time."""
        return float(self.mean_total(state)) / max(state.seen, 1)

    def mean_total(self, state: TrainState) -> Tensor:
        """Mean of ``state.total`` over processes."""
        total = torch.as_tensor(state.total, device=self.device)
        if self.fabric.world_size > 1:
            total = self.fabric.all_reduce(total.clone(), reduce_op="sum") / self.fabric.world_size
        return total

    def step(self) -> None:
        """Clip, update the weights, then spectral norms and moving average."""
        if self.config.clip is not None:
            self.fabric.clip_gradients(
                self.module, self.optimizer, max_norm=self.config.clip, error_if_nonfinite=False
            )
        super().step()
        self.updates += 1
        if self.caches_norms and self.updates % self.config.bound_every == 0:
            self.update_norms()
        if self.ema is not None:
            self.ema.update()

    def average_statistics(self) -> None:
        """Give all processes the mean of their BatchNorm statistics: each has seen its own batches."""
        if self.fabric.world_size == 1:
            return
        for state in (self.model.state_dict(), {} if self.ema is None else self.ema.state):
            for name, statistic in state.items():
                if name.endswith(STATISTICS):
                    statistic.copy_(self.fabric.all_reduce(statistic.clone(), reduce_op="mean"))

    @property
    def scaler(self) -> Any:
        """Gradient scaler of float16, or None."""
        return getattr(self.fabric.strategy.precision, "scaler", None)

    def _gather(self, h: Tensor) -> Tensor:
        """(b, D) of each process → (B, D), in the order of the batch."""
        gathered: Tensor = self.fabric.all_gather(h)
        return gathered.flatten(0, 1)

    @contextmanager
    def whole_batches(self) -> Iterator[None]:
        """Compute running statistics and integration points of whole batches, which processes share."""
        normalizers = [m for m in self.model.modules() if isinstance(m, FeatureNormalizer)]
        if self.fabric.world_size > 1:
            self.model.head.batch_part = (self.fabric.global_rank, self.fabric.world_size)
            for normalizer in normalizers:
                normalizer.gather = self._gather
        try:
            yield
        finally:
            self.model.head.batch_part = (0, 1)
            for normalizer in normalizers:
                normalizer.gather = None
