"""The Gaussian head: latent, noise and link in a row. h → f → u → p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.functional import link as functional
from hetsngp.functional import uncertainty
from hetsngp.functional.noise import known_share
from hetsngp.functional.points import draw_seed
from hetsngp.nn.latent import LinearLatent, RandomFeatureGP
from hetsngp.nn.noise import LowRankNoise
from hetsngp.types import LatentNormal, Prediction, UtilityNormal, join_factors
from hetsngp.validation import check_class_labels, check_multi_hot

# Points for a training step and for ``model(x)`` in evaluation. A gradient averages over the batch and over
# steps, so it needs few; predictions choose their own number.
TRAIN_POINTS, EVAL_POINTS = 64, 256


@dataclass(frozen=True)
class Link:
    """How u becomes probabilities. ``num_samples`` None: chosen from a target error when predicting."""

    link: str = "softmax"
    likelihood: str = "log_mean"
    sampler: str = "sobol"
    num_samples: int | None = None


class GaussianHead(nn.Module):
    """Any latent with any noise (or none) through the tempered link.

    The temperature is a buffer, not a parameter: learned on the training loss it collapses, so it is given
    or set on held-out data. ``sample_beta`` adds the posterior of β in training too (the paper's "MC
    sampling" ablation), as soon as one has been fitted; in closed form, since Gaussians add.
    """

    temperature: Tensor
    mode_temperature: Tensor
    training_temperature: Tensor

    def __init__(
        self,
        latent: LinearLatent | RandomFeatureGP,
        noise: LowRankNoise | None,
        link: Link,
        *,
        num_classes: int,
        temperature: float = 1.0,
        sample_beta: bool = False,
    ) -> None:
        super().__init__()
        self.latent = latent
        self.noise = noise
        self.link = link
        self.num_classes = num_classes
        self.sample_beta = sample_beta
        # Of predictions, of the posterior mode (``model(x)``), and of training. Calibration moves the first
        # two; training goes on with its own.
        for name in ("temperature", "mode_temperature", "training_temperature"):
            self.register_buffer(name, torch.tensor(float(temperature)))

    @property
    def has_posterior(self) -> bool:
        """Whether a prediction needs ``fit_posterior`` first."""
        return isinstance(self.latent, RandomFeatureGP) and self.latent.posterior.needs_fit

    @property
    def temperatures(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of predictions, of the posterior mode, of training."""
        return self.temperature, self.mode_temperature, self.training_temperature

    def forget_calibration(self) -> None:
        """Back to the temperature of training."""
        for temperature in self.temperatures:
            temperature.copy_(self.training_temperature)

    # --- the road ---------------------------------------------------------------------------------------

    def parts(self, h: Tensor, *, posterior: bool) -> tuple[LatentNormal, UtilityNormal | None]:
        """f, and the noise u − f as a zero-mean Gaussian (None without noise).

        The noise is learned from the data and known only where they are. Under the posterior it fades with
        the GP's familiarity, or noise extrapolated from a noisy region would pass for data uncertainty far
        away and hide the model's.
        """
        latent: LatentNormal = self.latent(h, posterior=posterior)
        if self.noise is None:
            return latent, None
        var, factor = self.noise(h)
        noise = UtilityNormal(torch.zeros_like(latent.mean), var, factor)
        # Not while it is being learned (``sample_beta``): there every input is one of the data.
        if posterior and not self.training:
            width = noise.marginal_variance().mean(-1) / self.training_temperature.to(var).square()
            known = known_share(width, self.latent.familiarity(h)).unsqueeze(-1)
            noise = UtilityNormal(noise.mean, var * known, factor.weighted(known.sqrt()))
        return latent, noise

    def utility(self, h: Tensor, *, posterior: bool) -> UtilityNormal:
        """u = f + noise, in closed form: h (B, D) → mean (B, K), var (B, K), factor."""
        latent, noise = self.parts(h, posterior=posterior)
        return _add_noise(latent.as_utility(), noise)

    def noise_free_probs(self, mean: Tensor) -> Tensor:
        """p at û/τ, the probabilities that Eq. (5) weighs with: (B, K) → (B, K)."""
        u = mean / self.temperature.to(mean)
        return torch.sigmoid(u) if self.link.link == "sigmoid" else torch.softmax(u, -1)

    def _training_utility(self, h: Tensor) -> UtilityNormal:
        """u/τ at the posterior mode; with ``sample_beta``, under the posterior as soon as there is one."""
        sampled = self.sample_beta and self.training and self.has_posterior
        posterior = sampled and bool(self.latent.posterior.fitted)  # type: ignore[union-attr]
        temperature = self.training_temperature if self.training else self.mode_temperature
        return self.utility(h, posterior=posterior).tempered(temperature.to(h))

    # --- training ---------------------------------------------------------------------------------------

    def log_probs(self, h: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """log P(y) at the posterior mode (B, K); log-odds under the sigmoid, the logits of its own loss.

        In training mode the points are fresh each time (from ``generator``); in evaluation they are fixed.
        """
        utility = self._training_utility(h)
        if self.link.link == "sigmoid":
            log_yes, log_no = functional.sigmoid_log_probs(utility)
            return log_yes - log_no
        if self.noise is None and not self.sample_beta:
            return torch.log_softmax(utility.mean, -1)  # a point; said here so that tracing need not look
        return functional.softmax_log_probs(utility, **self._points(generator))

    def _points(self, generator: torch.Generator | None) -> dict[str, Any]:
        """How to integrate: fresh points in training, fixed ones in evaluation."""
        return {
            "num_samples": self.link.num_samples or (TRAIN_POINTS if self.training else EVAL_POINTS),
            "sampler": self.link.sampler,
            "generator": generator,
            "seed": None if self.training or generator is not None else 0,
            "decorrelate": self.training,
        }

    def nll(self, h: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """−log p̄(y) of each example: (B,). Labels (B,), or multi-hot (B, K) under the sigmoid."""
        if self.link.link == "sigmoid":
            y = check_multi_hot(y, self.num_classes, h.shape[0])
            return functional.sigmoid_nll(self._training_utility(h), y, self.link.likelihood)
        y = check_class_labels(y, self.num_classes, h.shape[0])
        utility = self._training_utility(h)
        if self.noise is None and not self.sample_beta:
            return F.cross_entropy(utility.mean, y, reduction="none")
        if self.link.likelihood == "log_mean":
            return functional.softmax_nll(utility, y, **self._points(generator))
        log_probs = functional.softmax_log_probs(utility, likelihood="mean_log", **self._points(generator))
        return -log_probs.gather(1, y.unsqueeze(1)).squeeze(1)

    def prior_penalty(self) -> Tensor | None:
        """½‖β‖² where there is a prior."""
        return self.latent.prior_penalty()

    # --- prediction -------------------------------------------------------------------------------------

    def predict(
        self, h: Tensor, *, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Prediction:
        """Probabilities and both doubts for features h (B, D)."""
        seed = 0 if generator is None else draw_seed(generator)
        latent, noise = self.parts(h, posterior=True)
        temperature = self.temperature.to(h)
        f = latent.as_utility().tempered(temperature)
        if noise is not None:
            noise = noise.tempered(temperature)
        if self.link.link == "sigmoid":
            return self._predict_sigmoid(latent, f, noise)
        count = num_samples if num_samples is not None else self.link.num_samples
        options = {"num_samples": count, "sampler": self.link.sampler, "seed": seed}
        probs, points = functional.softmax_probs(_add_noise(f, noise), **options)  # type: ignore[arg-type]
        clean = probs if noise is None else functional.softmax_probs(f, **options)[0]  # type: ignore[arg-type]
        total = uncertainty.entropy(probs)
        model = uncertainty.model_uncertainty(f, noise, probs, seed=seed).minimum(total)
        return self._prediction(latent, probs, clean, total, model, points)

    def _predict_sigmoid(
        self, latent: LatentNormal, f: UtilityNormal, noise: UtilityNormal | None
    ) -> Prediction:
        probs = functional.sigmoid_log_probs(_add_noise(f, noise))[0].exp()
        clean = probs if noise is None else functional.sigmoid_log_probs(f)[0].exp()
        total = uncertainty.binary_entropy(probs)
        latent_var = f.marginal_variance()
        noise_var = torch.zeros_like(latent_var) if noise is None else noise.marginal_variance()
        model = uncertainty.sigmoid_model_uncertainty(f.mean, latent_var, noise_var, probs).minimum(total)
        return self._prediction(
            latent, probs, clean, total, model, torch.zeros_like(probs[:, 0], dtype=torch.long)
        )

    def _prediction(
        self, latent: LatentNormal, probs: Tensor, clean: Tensor, total: Tensor, model: Tensor, points: Tensor
    ) -> Prediction:
        data = total - model
        tiny = torch.finfo(probs.dtype).tiny  # nothing is impossible: a logarithm stays finite
        return Prediction(
            probs=probs.clamp_min(tiny),
            clean_probs=clean.clamp_min(tiny),
            total_uncertainty=data + model,  # H(probs) to the last bit but one, so that the sum is exact
            data_uncertainty=data,
            model_uncertainty=model,
            latent_variance=latent.var.mean(-1),
            ood_score=model if self.has_posterior else total,
            member_uncertainty=torch.zeros_like(model),
            num_points=points,
        )


def _add_noise(f: UtilityNormal, noise: UtilityNormal | None) -> UtilityNormal:
    if noise is None:
        return f
    return UtilityNormal(f.mean, f.var + noise.var, join_factors(noise.form, f.form))
