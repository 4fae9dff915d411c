"""Candidates for an OOD score. None has seen an OOD example; all are higher further from the training data.

They are scores of a fitted model and of its training features; ``ood_score`` is the library's, which also
knows held-out examples. ``gather.py`` combines them.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hetsngp
from hetsngp.frozen.features import FeatureSet
from hetsngp.nn.latent import LinearLatent, RandomFeatureGP

NEIGHBOURS = 50
EXAMPLES = 2000
"""Examples at a time."""


class Density:
    """Class means and one covariance of z (n, D), and the Gaussian of all classes together."""

    def __init__(self, z: Tensor, y: Tensor, num_classes: int) -> None:
        z = z.double()
        self.middle = z.mean(0)
        z = z - self.middle
        one_hot = torch.nn.functional.one_hot(y, num_classes).to(z)
        self.means = (one_hot.mT @ z) / one_hot.sum(0).clamp_min(1).unsqueeze(1)
        self.within = self._whitener(z - self.means[y])
        self.all = self._whitener(z)
        self.white_means = self.means @ self.within

    @staticmethod
    def _whitener(centred: Tensor) -> Tensor:
        """W with WWᵀ = Σ⁻¹: (D, D)."""
        covariance = centred.mT @ centred / len(centred)
        ridge = 1e-4 * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
        root = torch.linalg.cholesky(covariance + ridge)
        return torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=False).mT

    def distances(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(n,), (n,): the squared distance to the nearest class, and that to all of them together."""
        z = z.double() - self.middle
        near = torch.cdist(z @ self.within, self.white_means).square().amin(1)
        return near, (z @ self.all).square().sum(1)


class RawScores:
    """Scores of a fitted model, by its training features."""

    def __init__(self, model: hetsngp.Classifier, train: FeatureSet) -> None:
        self.model = model.on_features()
        self.latent = model.head.latent
        self.spaces = {"h": Density(train.h, train.y, model.num_classes)}
        z = self._inputs(train.h)
        if "z" in z:
            self.spaces["z"] = Density(z["z"], train.y, model.num_classes)
            self.spaces["phi"] = Density(z["phi"], train.y, model.num_classes)
        self.neighbours = {name: _unit(values) for name, values in z.items() if name != "phi"}
        self._fit_vim(train.h)

    def _inputs(self, h: Tensor) -> dict[str, Tensor]:
        """h, and for a GP the input of its kernel z and the kernel features φ."""
        if not isinstance(self.latent, RandomFeatureGP):
            return {"h": h}
        with torch.no_grad():
            parts = [
                (self.latent.normalizer.normalized(b), self.latent.features(b)) for b in h.split(EXAMPLES)
            ]
        return {"h": h, "z": torch.cat([z for z, _ in parts]), "phi": torch.cat([phi for _, phi in parts])}

    def _logits(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            return self.latent(h, posterior=False).mean

    def _fit_vim(self, h: Tensor) -> None:
        """Virtual-logit matching (Wang et al. 2022): the norm of h outside its principal subspace."""
        self.origin = h.double().mean(0)
        if isinstance(self.latent, LinearLatent):
            linear = self.latent.linear
            weight, bias = linear.weight.detach().double(), linear.bias.detach().double()
            self.origin = -torch.linalg.pinv(weight) @ bias
        centred = h.double() - self.origin
        vectors = torch.linalg.eigh(centred.mT @ centred / len(h)).eigenvectors
        self.residual = vectors[:, : vectors.shape[1] // 2]  # eigenvalues ascend
        length = (centred @ self.residual).norm(dim=1).mean()
        self.alpha = torch.cat([self._logits(b).amax(1) for b in h.split(EXAMPLES)]).double().mean() / length

    def __call__(self, h: Tensor) -> dict[str, Tensor]:
        """Every score at h (n, D): (n,) each."""
        parts = [self._part(batch) for batch in h.split(EXAMPLES)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _part(self, h: Tensor) -> dict[str, Tensor]:
        prediction = self.model.predict(h)
        logits = (self._logits(h) / self.model.head.mode_temperature).double()
        scores = {
            "entropy": prediction.total_uncertainty,
            "1 − confidence": 1 - prediction.confidence,
            "MSP": 1 - logits.softmax(-1).amax(-1),
            "max logit": -logits.amax(-1),
            "energy": -logits.logsumexp(-1),
            "ood_score": prediction.ood_score,
        }
        if self.model.head.has_posterior:
            scores["model uncertainty"] = prediction.model_uncertainty
            scores["variance"] = prediction.latent_variance
        inputs = self._inputs(h)
        for space, density in self.spaces.items():
            near, everything = density.distances(inputs[space])
            scores[f"Mahalanobis {space}"], scores[f"relative Mahalanobis {space}"] = near, near - everything
        for space, known in self.neighbours.items():
            distances = torch.cdist(_unit(inputs[space]), known)
            scores[f"kNN {space}"] = distances.kthvalue(NEIGHBOURS, dim=1).values
        residual = ((h.double() - self.origin) @ self.residual).norm(dim=1)
        energy = self._logits(h).double().logsumexp(-1)
        scores["ViM"] = self.alpha * residual - energy
        return {name: values.double() for name, values in scores.items()}


def _unit(h: Tensor) -> Tensor:
    return torch.nn.functional.normalize(h.float(), dim=1)
