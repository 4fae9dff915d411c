"""Ensemble: several classifiers behind the seams of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.functional.uncertainty import binary_entropy, entropy
from hetsngp.model import Classifier
from hetsngp.types import Prediction


class Ensemble(nn.Module):
    """A mixture of models: probabilities are averaged, and disagreement is a third source of doubt.

    total = I(y; member) + mean I(y; f) + mean E[H(y | f)]: ``member_uncertainty``, the rest of
    ``model_uncertainty``, and ``data_uncertainty``.
    """

    def __init__(self, members: Sequence[Classifier]) -> None:
        super().__init__()
        if len(members) == 0:
            raise ValueError("an Ensemble needs at least one member: Ensemble([model, ...])")
        classes = {member.num_classes for member in members}
        links = {member.head.link.link for member in members}
        if len(classes) > 1 or len(links) > 1:
            raise ValueError(
                f"members must share classes and link, got {sorted(classes)} classes, links {sorted(links)}"
            )
        self._members = nn.ModuleList(members)

    @property
    def members(self) -> list[Classifier]:
        """The models."""
        return list(self._members)  # type: ignore[arg-type]

    @property
    def num_classes(self) -> int:
        """K."""
        return self.members[0].num_classes

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """The members' groups, one after another."""
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
        """The mixture's probabilities and the three-way split."""
        each = [m.predict(x, num_samples=num_samples, generator=generator) for m in self.members]
        if len(each) == 1:
            return each[0]
        stacked = Prediction(
            **{
                name: torch.stack([getattr(p, name) for p in each])
                for name in Prediction.__dataclass_fields__
            }
        )
        probs = stacked.probs.mean(0)
        sigmoid = self.members[0].head.link.link == "sigmoid"
        total = binary_entropy(probs) if sigmoid else entropy(probs)
        member = (total - stacked.total_uncertainty.mean(0)).clamp_min(0)
        data = stacked.data_uncertainty.mean(0).minimum(total)
        model = total - data
        return Prediction(
            probs=probs,
            clean_probs=stacked.clean_probs.mean(0),
            total_uncertainty=data + model,
            data_uncertainty=data,
            model_uncertainty=model,
            latent_variance=stacked.latent_variance.mean(0),
            ood_score=model,
            member_uncertainty=member,
            num_points=stacked.num_points.sum(0),
        )

    def predict_probs(
        self, x: Any, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """``predict(x).probs`` alone: (B, K)."""
        each = [m.predict_probs(x, num_samples=num_samples, generator=generator) for m in self.members]
        return torch.stack(each).mean(0)

    def forward(self, x: Any) -> Tensor:
        """log of the mean probability (log-odds under the sigmoid) at the posterior modes: (B, K)."""
        each = torch.stack([m(x) for m in self.members])
        if self.members[0].head.link.link == "sigmoid":
            return torch.logit(torch.sigmoid(each).mean(0))
        return each.logsumexp(0) - math.log(len(self.members))
