"""PredictionModule: predictions as a plain module, for torch.export and torch.compile."""

from __future__ import annotations

import copy
from contextlib import nullcontext, suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hetsngp.functional.constants import kept_constants
from hetsngp.nn.latent import RandomFeatureGP
from hetsngp.nn.spectral import fold_spectral_bound
from hetsngp.types import Prediction

if TYPE_CHECKING:
    from hetsngp.models.classifier import Classifier
    from hetsngp.models.ensemble import Ensemble

_FIELDS = tuple(f.name for f in fields(Prediction))


class PredictionModule(nn.Module):
    """x ↦ the fields of ``model.predict(x)``, as a dict of tensors. Made by ``model.prediction_module()``.

    A dict, because compilers and exported programs take tensors in plain containers and no classes of ours;
    ``Prediction(**module(x))`` makes a :class:`hetsngp.Prediction` of it, with ``labels`` and ``confidence``.

    It is a copy of the model, always in eval mode: training, fitting or calibrating the model does not change
    it. Spectral bounds are written into the weights, factorisations are done before, and integration points
    are constants. ``forward`` does not look at values, so that one graph is right for all inputs: NaN in an
    example is NaN in its answer, where ``predict`` raises an error. There are no gradients.
    """

    def __init__(self, model: Classifier | Ensemble) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        super().train(False)
        self.requires_grad_(False)
        for member in self.model.members:
            with suppress(ValueError):  # a hook computes the weight: it is bounded in the graph
                fold_spectral_bound(member.backbone)
            latent = getattr(member.head, "latent", None)
            if isinstance(latent, RandomFeatureGP):
                latent.posterior = latent.posterior.for_tracing()
        self._keep_constants()

    def _keep_constants(self) -> None:
        with kept_constants(), torch.no_grad():
            for member in self.model.members:
                like = member.temperature
                if like.device.type != "meta":
                    member.prediction_of(torch.zeros(1, member.num_features).to(like))

    def forward(self, x: Any) -> dict[str, Tensor]:
        """x: (B, …), as of ``predict`` → every field of a :class:`hetsngp.Prediction`, (B,) or (B, K)."""
        # The weights take no gradient: a graph needs no switch.
        with nullcontext() if torch.compiler.is_compiling() else torch.no_grad():
            prediction = self.model.traceable_prediction(x)
        return {name: getattr(prediction, name) for name in _FIELDS}

    def _apply(self, fn: Any, recurse: bool = True) -> PredictionModule:
        super()._apply(fn, recurse)
        self._keep_constants()  # on another device, or in another precision
        return self

    def train(self, mode: bool = True) -> PredictionModule:
        """Return the module, which stays in eval mode."""
        return self
