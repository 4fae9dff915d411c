"""Head of the Posterior Network (Charpentier et al. 2020): h → z → α → p.

:class:`ClassFlows` is a density of z for each class; :class:`DirichletHead` turns densities into evidence,
the concentration α of a Dirichlet over p.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.functional import dirichlet
from hetsngp.nn.heads import Head, Link
from hetsngp.nn.initialization import seeded_linear
from hetsngp.nn.precision import KeepsPrecision, is_recomputing
from hetsngp.types import Prediction
from hetsngp.validation import check_targets

# softplus of this is one: a layer acts at about one standard deviation around its centre.
UNIT_ALPHA = math.log(math.e - 1)
# Initial standard deviation of β′ around α′: almost the identity, at which the centres would have no
# gradient.
INITIAL_STD = 0.01
# z is measured in units of e^(1/2) standard deviations, which multiplies a density by e^(L/2): as much as a
# Gaussian decreases at a typical distance, √L. In units of one standard deviation the initial evidence is so
# low that small tables are not learned; in larger units it is so high that the densities do not concentrate
# on the data (docs/decisions.md).
LOG_UNIT = 0.5
# Evidence of e⁵⁰ ≈ 5·10²¹ examples is certainty, and its square is still finite.
MOST_LOG_EVIDENCE = 50.0


class ClassFlows(KeepsPrecision):
    """q(z | c): F radial layers for each of K classes on a latent of L dimensions, initially near N(0, I).

    Every class has its own random centres, so that training can tell the classes apart.

    >>> flows = ClassFlows(num_classes=3, latent_dim=2, layers=4)
    >>> flows(torch.zeros(5, 2)).shape
    torch.Size([5, 3])
    """

    def __init__(
        self, num_classes: int, latent_dim: int, layers: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(layers, num_classes, latent_dim, generator=generator))
        self.raw_alphas = nn.Parameter(torch.full((layers, num_classes), UNIT_ALPHA))
        noise = INITIAL_STD * torch.randn(layers, num_classes, generator=generator)
        self.raw_betas = nn.Parameter(UNIT_ALPHA + noise)

    def forward(self, z: Tensor) -> Tensor:
        """log q(z | c): (B, L) → (B, K)."""
        return dirichlet.log_density(z, self.centres.to(z), self.raw_alphas.to(z), self.raw_betas.to(z))


class LatentNorm(nn.BatchNorm1d):
    """BatchNorm that normalises a single training example by the running statistics.

    A pass that activation checkpointing repeats does not move them, and autograd has copies of them, so that
    other passes may follow before a backward pass.
    """

    def forward(self, input: Tensor) -> Tensor:
        """z: (B, L) → (B, L)."""
        by_batch = self.training and input.shape[0] > 1
        if by_batch and not is_recomputing():
            return super().forward(input)
        mean, var = self.running_mean, self.running_var
        assert mean is not None
        assert var is not None
        if torch.is_grad_enabled():
            mean, var = mean.clone(), var.clone()
        return F.batch_norm(input, mean, var, self.weight, self.bias, by_batch, 0.0, self.eps)


class DirichletHead(KeepsPrecision, Head):
    """α_c = 1 + (N_c·q(z|c))^(1/τ), p ~ Dir(α), z = BatchNorm(Wh + b) in a few dimensions.

    q is a normalising flow for each class, so that evidence cannot be large everywhere; N_c, the number of
    training examples of class c, is the total that q distributes. τ = 1 is the paper; calibration sets it.
    """

    counts: Tensor
    counted: Tensor

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        link: Link,
        *,
        latent_dim: int = 6,
        flow_layers: int = 8,
        entropy_weight: float = 1e-5,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_classes, link, temperature)
        self.entropy_weight = entropy_weight
        self.projection = seeded_linear(num_features, latent_dim, generator)
        self.norm = LatentNorm(latent_dim)
        self.flows = ClassFlows(num_classes, latent_dim, flow_layers, generator=generator)
        self.register_buffer("counts", torch.ones(num_classes))
        self.register_buffer("counted", torch.tensor(False))
        self._counted = False  # copy of ``counted`` that can be read without waiting for a GPU

    def set_uniform_counts(self, total: float) -> None:
        self.counts.fill_(total / self.num_classes)

    @property
    def class_counts(self) -> Tensor | None:
        return self.counts if self._counted else None

    @property
    def wants_class_counts(self) -> bool:
        return not self._counted

    def set_class_counts(self, counts: Tensor) -> None:
        self.counts.copy_(counts)
        self.counted.fill_(True)
        self._counted = True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._counted = bool(state_dict.get(prefix + "counted", self._counted))

    # --- h → z → α --------------------------------------------------------------------------------------

    def log_evidence(self, h: Tensor) -> Tensor:
        """log N_c + log q(z | c): (B, D) → (B, K); −∞ for a class without examples."""
        h = h.to(self.counts.dtype)
        return self.log_density(self.norm(self.projection(h))) + self.counts.log()

    def log_density(self, z: Tensor) -> Tensor:
        """log q(z | c) of z = BatchNorm(Wh + b), in the unit of :data:`LOG_UNIT`: (B, L) → (B, K)."""
        log_density: Tensor = self.flows(z) + z.shape[-1] * LOG_UNIT
        return log_density

    def concentration(self, log_evidence: Tensor, temperature: Tensor) -> Tensor:
        """α ≥ 1: (B, K), in float64 where the device has it."""
        wide = log_evidence if log_evidence.device.type == "mps" else log_evidence.double()
        return 1 + (wide / temperature.to(wide)).clamp_max(MOST_LOG_EVIDENCE).exp()

    def _map_concentration(self, h: Tensor) -> Tensor:
        temperature = self.training_temperature if self.training else self.mode_temperature
        return self.concentration(self.log_evidence(h), temperature)

    def undecayed_parameters(self) -> list[nn.Parameter]:
        return [*self.norm.parameters(), *self.flows.parameters()]

    # --- training ---------------------------------------------------------------------------------------

    def nll(self, h: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """E_p[−log p_y] − λ·H(Dir(α)), the UCE loss with its regulariser, λ = ``entropy_weight``: (B,)."""
        y = check_targets(y, self.num_classes, h.shape[0])
        alpha = self._map_concentration(h)
        loss = dirichlet.uncertain_cross_entropy(alpha, y)
        if self.entropy_weight:
            loss = loss - self.entropy_weight * dirichlet.differential_entropy(alpha)
        return loss.to(h.dtype)

    def log_probs(self, h: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return dirichlet.mean(self._map_concentration(h)).log().to(h.dtype)

    # --- prediction -------------------------------------------------------------------------------------

    def probs(
        self, h: Tensor, *, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        return dirichlet.mean(self.concentration(self.log_evidence(h), self.temperature)).to(h.dtype)

    def predict(
        self, h: Tensor, *, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Prediction:
        """Data uncertainty is E_p[H(p)], model uncertainty I(y; p), all in closed form.

        ``ood_score`` is −log of the total evidence: model uncertainty reaches its maximum where there is no
        evidence, while the density decreases further.
        """
        log_evidence = self.log_evidence(h)
        alpha = self.concentration(log_evidence, self.temperature)
        probs = dirichlet.mean(alpha)
        model = dirichlet.mutual_information(alpha).to(h.dtype)
        data = dirichlet.expected_entropy(alpha).to(h.dtype)
        return Prediction(
            probs=probs.to(h.dtype),
            clean_probs=probs.to(h.dtype),
            total_uncertainty=data + model,
            data_uncertainty=data,
            model_uncertainty=model,
            latent_variance=dirichlet.latent_variance(alpha).to(h.dtype),
            ood_score=-log_evidence.logsumexp(-1).to(h.dtype),
            member_uncertainty=torch.zeros_like(model),
            num_points=torch.zeros_like(model, dtype=torch.long),
        )

    # --- calibration ------------------------------------------------------------------------------------

    def nll_by_temperature(
        self, h: Tensor, y: Tensor, *, posterior: bool, shift: Tensor | None = None
    ) -> Callable[[Tensor], Tensor]:
        log_evidence = self.log_evidence(h)

        def nll(temperature: Tensor) -> Tensor:
            log_probs = dirichlet.mean(self.concentration(log_evidence, temperature)).log()
            if y.dim() == 2:
                return -(y.to(log_probs) * log_probs).sum(-1).to(h.dtype)
            return -log_probs.gather(1, y.unsqueeze(1)).squeeze(1).to(h.dtype)

        return nll
