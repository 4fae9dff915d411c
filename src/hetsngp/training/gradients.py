"""The loop's gradients by Fabric: on any device, in any precision, over any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.fitting.loop import Gradients, TrainState
from hetsngp.models.classifier import Classifier
from hetsngp.nn.latent import FeatureNormalizer
from hetsngp.nn.spectral_cache import hold_bounds, holdable_layers, refresh_bounds
from hetsngp.training.average import Average
from hetsngp.training.checkpointing.states import STATISTICS
from hetsngp.training.config import TrainConfig
from hetsngp.training.feeds import to_channels_last
from hetsngp.validation import trusting

# Power iterations at a time. The largest singular value is held down while the next one grows: with one
# iteration in ten steps its direction would be followed too late (docs/decisions.md).
ITERATIONS = 3


class BoundRefresh:
    """:func:`refresh_bounds`, on a GPU as one CUDA graph: its hundreds of tiny kernels would keep the host
    busy for as long as a whole training step.
    """

    def __init__(self, model: Classifier, iterations: int = ITERATIONS) -> None:
        self.model, self.iterations = model, iterations
        self.graph: torch.cuda.CUDAGraph | None = None
        self.addresses: list[int] = []

    def __call__(self) -> None:
        """At the present weights, in place."""
        if self.model.temperature.device.type != "cuda":
            refresh_bounds(self.model, self.iterations)
            return
        addresses = self._addresses()
        if self.graph is None or addresses != self.addresses:  # new images, of another size, have new vectors
            self.graph, self.addresses = self._capture(), addresses
        self.graph.replay()

    def _addresses(self) -> list[int]:
        tensors = [
            t
            for layer in holdable_layers(self.model).values()
            for t in (layer.weight, layer.spectral_v, layer.spectral_direction)
            if t is not None
        ]
        return [t.data_ptr() for t in tensors]

    def _capture(self) -> torch.cuda.CUDAGraph:
        # A graph must not be the first to call a library, which then asks for memory.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            refresh_bounds(self.model, self.iterations)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            refresh_bounds(self.model, self.iterations)
        return graph


class Seams(nn.Module):
    """Both seams of a model behind ``forward``, which is what ddp and fsdp take hold of."""

    def __init__(self, model: Classifier, generator: torch.Generator) -> None:
        super().__init__()
        self.model, self.generator = model, generator

    def forward(self, x: Any, y: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """The loss of a batch; without labels, log-probabilities."""
        if y is None:
            out: Tensor = self.model(x)
            return out
        return self.model.loss(x, y, generator=self.generator, weight=weight)


class FabricGradients(Gradients):
    """Steps by Fabric; after each, the average and now and then the spectral bound are brought up to date."""

    def __init__(
        self,
        fabric: Any,
        model: Classifier,
        plan: TrainConfig,
        generator: torch.Generator,
        *,
        channels_last: bool,
        sharded: bool,
    ) -> None:
        self.fabric, self.plan, self.channels_last = fabric, plan, channels_last
        self.module = fabric.setup_module(Seams(model, generator))
        # A share of a weight has no σ: under fsdp the power iteration stays inside the forward pass. After
        # ddp has seen the buffers: what all processes compute alike need not be sent around.
        self.holds = plan.bound_every > 1 and not sharded and bool(hold_bounds(model))
        optimizer = fabric.setup_optimizers(plan.schedule.make_optimizer(model))
        super().__init__(model, optimizer, generator)
        self.points = generator
        self.average = None if plan.ema_decay is None else Average(model, plan.ema_decay)
        self.refresh = BoundRefresh(model)
        self.updates = 0

    @property
    def device(self) -> torch.device:
        device: torch.device = self.fabric.device
        return device

    def add(self, x: Any, y: Tensor, weight: Tensor | None, *, group: int, complete: bool) -> Tensor:
        """As the loop asks; processes average their gradients at the last batch of a group."""
        x = to_channels_last(x) if self.channels_last else x
        torch.compiler.cudagraph_mark_step_begin()
        with self.fabric.no_backward_sync(self.module, enabled=not complete):
            with trusting():  # a feed has checked the batch
                loss: Tensor = self.module(x, y, weight)
            self.fabric.backward(loss / group if group > 1 else loss)
        return loss

    def mean_loss(self, place: TrainState) -> float:
        """Over the batches of all processes, so that all meet a NaN together."""
        return float(self.mean_total(place)) / max(place.seen, 1)

    def mean_total(self, place: TrainState) -> Tensor:
        """``place.total``, the mean over processes."""
        total = torch.as_tensor(place.total, device=self.device)
        if self.fabric.world_size > 1:
            total = self.fabric.all_reduce(total.clone(), reduce_op="sum") / self.fabric.world_size
        return total

    def step(self) -> None:
        """An update of the weights, and what follows it."""
        if self.plan.clip is not None:
            self.fabric.clip_gradients(
                self.module, self.optimizer, max_norm=self.plan.clip, error_if_nonfinite=False
            )
        super().step()
        self.updates += 1
        if self.holds and self.updates % self.plan.bound_every == 0:
            self.refresh()
        if self.average is not None:
            self.average.update()

    def level(self) -> None:
        """Give all processes the mean of their BatchNorm statistics: each knows only its own parts."""
        if self.fabric.world_size == 1:
            return
        for state in (self.model.state_dict(), {} if self.average is None else self.average.state):
            for name, statistic in state.items():
                if name.endswith(STATISTICS):
                    statistic.copy_(self.fabric.all_reduce(statistic.clone(), reduce_op="mean"))

    @property
    def scaler(self) -> Any:
        """Of losses in float16, or None."""
        return getattr(self.fabric.strategy.precision, "scaler", None)

    def _gather(self, h: Tensor) -> Tensor:
        """(b, D) of each process → (B, D), in the order of the batch."""
        rows: Tensor = self.fabric.all_gather(h)
        return rows.flatten(0, 1)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Inside, running statistics are of whole batches, whichever process has which rows."""
        normalizers = [m for m in self.model.modules() if isinstance(m, FeatureNormalizer)]
        if self.fabric.world_size > 1:
            for normalizer in normalizers:
                normalizer.gather = self._gather
        try:
            yield
        finally:
            for normalizer in normalizers:
                normalizer.gather = None
