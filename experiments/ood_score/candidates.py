"""Candidates for an OOD score, none of which has seen an OOD example.

All are higher further from the training data. Ranks are among held-out images of the training distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hetsngp
from hetsngp.frozen.features import FeatureSet
from hetsngp.nn.latent import RandomFeatureGP

NEIGHBOURS = 50
PAIRS = {
    "ranks: model + relative Mahalanobis": ("model uncertainty", "relative Mahalanobis"),
    "ranks: entropy + relative Mahalanobis": ("entropy", "relative Mahalanobis"),
    "ranks: entropy + variance": ("entropy", "variance"),
    "ranks: model + variance": ("model uncertainty", "variance"),
    "ranks: entropy + model": ("entropy", "model uncertainty"),
}


class Density:
    """Class means and one covariance of z (n, D), and the Gaussian of all classes together."""

    def __init__(self, z: Tensor, y: Tensor) -> None:
        z = z.double()
        classes = y.unique()
        self.means = torch.stack([z[y == c].mean(0) for c in classes])
        within = z - self.means[torch.searchsorted(classes, y)]
        self.middle = z.mean(0)
        self.within, self.all = self._root(within), self._root(z - self.middle)

    @staticmethod
    def _root(centred: Tensor) -> Tensor:
        covariance = centred.mT @ centred / len(centred)
        ridge = 1e-4 * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
        return torch.linalg.cholesky(covariance + ridge)

    def distances(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(n,), (n,): the squared distance to the nearest class, and that to all of them together."""
        near = torch.full((len(z),), torch.inf, dtype=torch.float64, device=z.device)
        for mean in self.means:
            near = near.minimum(self._square(z.double() - mean, self.within))
        return near, self._square(z.double() - self.middle, self.all)

    @staticmethod
    def _square(centred: Tensor, root: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(root, centred.mT, upper=False).square().sum(0)


class Candidates:
    """Scores of a fitted model, given its training features and held-out ones."""

    def __init__(self, model: hetsngp.Classifier, train: FeatureSet, held_out: Tensor) -> None:
        self.model, self.head = model, model.on_features()
        self.train_z = self._normalised(train.h)
        self.density = Density(self.train_z, train.y)
        self.held_out = {name: values.sort().values for name, values in self.raw(held_out).items()}

    def _normalised(self, h: Tensor) -> Tensor:
        """Input of the kernel, or h where there is none."""
        latent = getattr(self.model.head, "latent", None)
        with torch.no_grad():
            return latent.normalizer.normalized(h) if isinstance(latent, RandomFeatureGP) else h

    def raw(self, h: Tensor) -> dict[str, Tensor]:
        parts = [self._part(batch) for batch in h.split(2000)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _part(self, h: Tensor) -> dict[str, Tensor]:
        prediction = self.head.predict(h)
        utility = self.head.utility(h)
        z = self._normalised(h)
        near, all_classes = self.density.distances(z)
        distances = torch.cdist(z.float(), self.train_z.float()[:: max(1, len(self.train_z) // 20_000)])
        out = {
            "entropy": prediction.total_uncertainty,
            "1 − confidence": 1 - prediction.confidence,
            "model uncertainty": prediction.model_uncertainty,
            "variance": prediction.latent_variance,
            "data uncertainty": prediction.data_uncertainty,
            "energy": -(utility.mean / self.model.temperature).logsumexp(-1),
            "Mahalanobis": near,
            "relative Mahalanobis": near - all_classes,
            "50th neighbour": distances.kthvalue(NEIGHBOURS, dim=1).values,
            "today's ood_score": prediction.ood_score,
        }
        return {name: values.double() for name, values in out.items()}

    def scores(self, h: Tensor) -> dict[str, Tensor]:
        """Every candidate at h (n, D): (n,) each; those that do not vary are left out."""
        raw = self.raw(h)
        varying = {n: v for n, v in raw.items() if self.held_out[n][0] < self.held_out[n][-1]}
        ranks = {name: self._rank(name, values) for name, values in varying.items()}
        pairs = {n: ranks[a] + ranks[b] for n, (a, b) in PAIRS.items() if a in ranks and b in ranks}
        return varying | pairs

    def _rank(self, name: str, values: Tensor) -> Tensor:
        """Share of held-out examples below; beyond all of them it grows further, with the limit 2."""
        known = self.held_out[name]
        rank = torch.searchsorted(known, values) / len(known)
        spread = (known[-1] - known[len(known) // 2]).clamp_min(1e-12)
        beyond = ((values - known[-1]) / spread).clamp_min(0)
        return rank + beyond / (1 + beyond)
