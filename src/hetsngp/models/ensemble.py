"""Ensemble: several classifiers with the interface of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.functional.uncertainty import mixture
from hetsngp.models.classifier import Classifier
from hetsngp.models.prediction_module import PredictionModule
from hetsngp.types import Prediction


class Ensemble(nn.Module):
    """A mixture of models: probabilities are averaged, and disagreement is a third source of uncertainty.

    total = I(y; member) + mean I(y; f) + mean E[H(y | f)]: ``member_uncertainty`` (which network?),
    ``function_uncertainty`` (which function of its features?) and ``data_uncertainty``; with HetSNGP members
    the paper's three sources. Made by :func:`hetsngp.build_ensemble`, or from existing models.
    """

    def __init__(self, members: Sequence[Classifier]) -> None:
        super().__init__()
        if not isinstance(members, Iterable) or isinstance(members, str | Tensor):
            raise TypeError(
                f"members must be a list of models, got {type(members).__name__}: Ensemble([model])"
            )
        members = list(members)
        if len(members) == 0:
            raise ValueError("an Ensemble needs at least one member: Ensemble([model, ...])")
        if not all(isinstance(member, Classifier) for member in members):
            kinds = sorted({type(member).__name__ for member in members})
            raise TypeError(f"members must be models made by hetsngp.build, got {', '.join(kinds)}")
        if len({id(member) for member in members}) < len(members):
            raise ValueError("a model is in the ensemble twice: it could not disagree with itself")
        classes = {member.num_classes for member in members}
        links = {member.head.link.link for member in members}
        if len(classes) > 1 or len(links) > 1:
            raise ValueError(
                f"members must share classes and link, got {sorted(classes)} classes, links {sorted(links)}"
            )
        self._members = nn.ModuleList(members)

    @property
    def members(self) -> list[Classifier]:
        """Models of the ensemble."""
        return list(self._members)  # type: ignore[arg-type]

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return self.members[0].num_classes

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups of all members, one after another."""
        return [group for member in self.members for group in member.parameter_groups(weight_decay)]

    def loss(
        self,
        x: Any,
        y: Tensor,
        generator: torch.Generator | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Mean of the members' losses: each trains as if alone."""
        losses = [m.loss(x, y, generator=generator, weight=weight) for m in self.members]
        return torch.stack(losses).mean()

    def predict(
        self, x: Any, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Prediction:
        """Probabilities of the mixture and its uncertainties from three sources."""
        return self.mix([m.predict(x, num_samples=num_samples, generator=generator) for m in self.members])

    def mix(self, each: Sequence[Prediction]) -> Prediction:
        """Prediction of the mixture, from the prediction of each member for the same examples."""
        out = mixture(each, sigmoid=self.members[0].head.sigmoid)
        heads = [m.head for m in self.members]
        ranked = [head.ood_score is not None and head.ood_score.is_filled for head in heads]
        kinds = {(type(h), h.has_posterior, r) for h, r in zip(heads, ranked, strict=True)}
        # Scores of different kinds have different units; model uncertainty is in nats for all.
        return out if len(kinds) == 1 else replace(out, ood_score=out.model_uncertainty)

    def prediction_module(self) -> PredictionModule:
        """Module with a copy of the ensemble, as :meth:`hetsngp.models.Classifier.prediction_module`."""
        for member in self.members:
            member.check_predictable()
        return PredictionModule(self)

    def traceable_prediction(self, x: Any) -> Prediction:
        """Prediction without checks of values, in the mode that the members are in."""
        return self.mix([m.traceable_prediction(x) for m in self.members])

    def predict_probs(
        self, x: Any, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return ``predict(x).probs`` alone: (B, K)."""
        each = [m.predict_probs(x, num_samples=num_samples, generator=generator) for m in self.members]
        return torch.stack(each).mean(0)

    def forward(self, x: Any) -> Tensor:
        """Log of the mean probability (log-odds under the sigmoid) at the MAP estimates: (B, K)."""
        each = torch.stack([m(x) for m in self.members])
        if self.members[0].head.sigmoid:
            return F.logsigmoid(each).logsumexp(0) - F.logsigmoid(-each).logsumexp(0)
        return each.logsumexp(0) - math.log(len(self.members))
