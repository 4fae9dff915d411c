"""The OOD score of a head: what it predicts, and the features, compared with held-out examples.

With a posterior the parts are the energy, the model uncertainty and the relative Mahalanobis distance, which
say different things: the energy −log Σ_k e^{f_k} rises as the GP's mean returns to zero, the model
uncertainty where classes are plausible that the data do not rule out, the distance where no class has such
features. Without one they are the entropy and the distance. docs/decisions.md has the study that chose them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetsngp.functional.ood import (
    ClassSums,
    Discriminants,
    TailTable,
    discriminants,
    relative_mahalanobis,
    tail_score,
    tail_table,
)
from hetsngp.nn.precision import KeepsPrecision

_DENSITY, _TABLE = Discriminants._fields, TailTable._fields
MAX_ELEMENTS = 5000**2
"""Most elements of a covariance, and of the class means: 200 MB in float64."""


class OODScore(KeepsPrecision):
    """Class-conditional density of features, and tables of tail probabilities of held-out examples.

    Buffers are empty until ``fit_posterior`` has training data for the density, and held-out data for the
    tables. Those that are empty are not in the state dict, so that a model that is not calibrated has the
    tensors of release 0.1. ``errors``: of each part of the score, the distance last, as in
    :func:`hetsngp.functional.ood.tail_table`.
    """

    center: Tensor
    projection: Tensor
    class_means: Tensor
    precisions: Tensor
    knots: Tensor
    slopes: Tensor
    names = (*_DENSITY, *_TABLE)
    """Names of the buffers."""

    def __init__(self, num_features: int, errors: Sequence[float]) -> None:
        super().__init__()
        self.num_features, self.errors = num_features, tuple(errors)
        for name in self.names:
            self.register_buffer(name, torch.empty(0), persistent=False)

    @property
    def is_filled(self) -> bool:
        """Whether density and tables are known, without waiting for the device."""
        return self.knots.numel() > 0

    def clear(self) -> None:
        """Forget density and tables."""
        # A model that was built on the meta device and got its weights by assignment is on no other yet.
        device = "cpu" if self.center.is_meta else self.center.device
        for name in self.names:
            setattr(self, name, torch.empty(0, dtype=self.center.dtype, device=device))

    def fit_density(self, total: ClassSums) -> None:
        """Set the density from sums over the training examples."""
        self._store(discriminants(total))

    def fit_tables(self, parts: Tensor, weight: Tensor | None = None) -> None:
        """Set the tables from the parts of the score of held-out examples (n, S)."""
        self._store(tail_table(parts, weight, errors=self.errors))

    def _store(self, found: Discriminants | TailTable) -> None:
        dtype = torch.promote_types(self.center.dtype, torch.float32)
        for name, value in zip(found._fields, found, strict=True):
            setattr(self, name, value.to(device=self.center.device, dtype=dtype).contiguous())

    def parts(self, uncertainties: Sequence[Tensor], z: Tensor) -> Tensor:
        """Parts of the score: ``uncertainties`` (B,) and the distance of features z (B, D) → (B, S)."""
        density = Discriminants(*(getattr(self, name).to(z) for name in _DENSITY))
        return torch.stack([*uncertainties, relative_mahalanobis(z, density)], dim=1)

    def forward(self, parts: Tensor) -> Tensor:
        """Sum of −log tail probabilities of the parts: (B, S) → (B,)."""
        return tail_score(parts, TailTable(*(getattr(self, name).to(parts) for name in _TABLE)))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.names if self.is_filled else ():
            destination[prefix + name] = getattr(self, name)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, other: Any, errors: Any
    ) -> None:
        found = {name: state_dict[prefix + name] for name in self.names if prefix + name in state_dict}
        problem = self._wrong_shapes(found)
        if problem is not None:
            errors.append(f"the OOD score in {prefix.rstrip('.')} {problem}")
            return
        self.clear()
        for name, value in found.items():
            setattr(self, name, torch.empty_like(value, dtype=self.center.dtype, device=self.center.device))
        self._non_persistent_buffers_set -= found.keys()  # so that torch copies or assigns them
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, other, errors)
        self._non_persistent_buffers_set |= found.keys()

    def _wrong_shapes(self, found: dict[str, Tensor]) -> str | None:
        """Say what is wrong with saved tensors; all or none of them are there."""
        shapes = {name: tuple(value.shape) for name, value in found.items()}
        if not shapes:
            return None
        if len(shapes) < len(self.names):
            return f"lacks {', '.join(name for name in self.names if name not in shapes)}"
        rank, levels = shapes["precisions"][-1:], shapes["knots"][-1:]
        expected = {
            "center": (self.num_features,),
            "projection": (self.num_features, *rank),
            "class_means": (*shapes["class_means"][:1], *rank),
            "precisions": rank,
            "knots": (len(self.errors), *levels),
            "slopes": (len(self.errors), *levels),
        }
        wrong = [f"{name} {shapes[name]}" for name in found if shapes[name] != expected[name]]
        return f"has shapes that do not belong together: {', '.join(wrong)}" if wrong else None
