"""The kernel's own principal components as features, for h that do not change while a head is fitted."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hetsngp.functional.features import kernel_components, rbf_kernel
from hetsngp.nn.precision import KeepsPrecision

# Training points the kernel is known by: the eigenvectors of so many are a matter of seconds.
MOST_POINTS = 4096
# ℓ in units of the median distance, chosen by held-out NLL (docs/decisions.md); random features want 1: the
# shorter the length scale, the more of them it takes.
LENGTH_RATIO = 0.7


class InducingFeatures(KeepsPrecision):
    """Φ(z) = [k(z, Z)·U/√λ, 0]: the m − 1 largest components of the kernel matrix of training points Z.

    Random frequencies approximate the kernel everywhere; these do it where the data are, and so need far
    fewer. What they leave of the prior's variance, 1 − ‖Φ‖², belongs to directions that are left out, of
    which the data say little: :meth:`with_rest` puts its root into the last coordinate, which is zero in
    training, so that the posterior leaves it as it is. With every training point and component kept no
    training point lies in those directions, and this is the exact GP.
    """

    points: Tensor
    projection: Tensor
    length_scale: Tensor

    def __init__(self, num_features: int, num_components: int) -> None:
        super().__init__()
        self.num_features, self.num_components = num_features, num_components
        self.register_buffer("points", torch.empty(0))
        self.register_buffer("projection", torch.empty(0))
        self.register_buffer("length_scale", torch.tensor(math.sqrt(2 * num_features)))

    @torch.no_grad()
    def adapt(self, z: Tensor, length_scale: float | Tensor) -> None:
        """Take the rows of z (n, D), which are normalised features of training points."""
        wide = (z.cpu() if z.device.type == "mps" else z).double()  # which has no float64
        gram = rbf_kernel(wide, wide, length_scale=float(length_scale))
        self.length_scale.fill_(float(length_scale))
        self.points = z.to(self.length_scale).contiguous()
        # A kernel value is right to about eps, n of them to √n·eps together: over √λ at most 0.1 √eps.
        smallest = 100 * len(z) * torch.finfo(self.length_scale.dtype).eps
        projection = kernel_components(gram, self.num_components - 1, smallest)
        self.projection = projection.to(self.length_scale).contiguous()

    def forward(self, z: Tensor) -> Tensor:
        """z (B, D) → Φ (B, m), ‖Φ‖ ≤ 1."""
        if self.points.numel() == 0:
            raise RuntimeError(
                "features='inducing' are made from the features of training data, which this model has not "
                "seen: hetsngp.fit_head(model, loader) gives it a head; to train a network use "
                "features='random'"
            )
        kernel = rbf_kernel(z, self.points.to(z), length_scale=self.length_scale.to(z))
        return torch.cat([kernel @ self.projection.to(z), z.new_zeros(len(z), 1)], dim=1)

    @staticmethod
    def with_rest(phi: Tensor, amplitude: float) -> Tensor:
        """φ = a·Φ with the rest of the prior in its last coordinate: ‖φ‖ = a."""
        rest = (amplitude**2 - phi.square().sum(1, keepdim=True)).clamp_min(0).sqrt()
        return torch.cat([phi[:, :-1], rest], dim=1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        points, projection = (state_dict.get(prefix + name) for name in ("points", "projection"))
        if points is not None and projection is not None and self._belong_together(points, projection):
            self.points = torch.empty_like(points, device=self.length_scale.device)
            self.projection = torch.empty_like(projection, device=self.length_scale.device)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _belong_together(self, points: Tensor, projection: Tensor) -> bool:
        if points.dim() != 2 or points.shape[1] != self.num_features:
            return False
        return tuple(projection.shape) == (len(points), self.num_components - 1)


class RowMemory:
    """Features of rows that will come again and again, found by the bits of the rows."""

    def __init__(self, rows: Tensor, values: Tensor) -> None:
        keys, order = row_hashes(rows).sort()
        self.keys, self.values = keys, values[order]
        self.last: tuple[Tensor, int, Tensor] | None = None

    def find(self, rows: Tensor) -> Tensor | None:
        """The features of ``rows``; None if one of them is not known."""
        if rows.device != self.keys.device or rows.dtype != self.values.dtype:
            return None
        if self.last is not None and rows is self.last[0] and _version(rows) == self.last[1]:
            return self.last[2]  # the very tensor, as it was
        keys = row_hashes(rows)
        place = torch.searchsorted(self.keys, keys).clamp_max(len(self.keys) - 1)
        if not bool((self.keys[place] == keys).all()):
            return None
        found = self.values[place]
        if not rows.is_inference():
            self.last = (rows, _version(rows), found)
        return found


def _version(rows: Tensor) -> int:
    """Goes up with each change in place."""
    return int(rows._version)


def row_hashes(rows: Tensor) -> Tensor:
    """A 64-bit number for each row (n, D) of floats: equal for equal bits, else by chance once in 10¹⁹."""
    bits = rows.contiguous().view(torch.int32 if rows.element_size() == 4 else torch.int64).long()
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=generator).to(rows.device) * 2 + 1
    mixed = bits * odd
    return (mixed ^ (mixed >> 29)).sum(1)
