"""The spectral bound between steps: held, and measured anew every so often."""

from __future__ import annotations

import torch

from hetsngp.models.classifier import Classifier
from hetsngp.nn.spectral_cache import holdable_layers, refresh_bounds

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
