"""h → p, the heads: :class:`Head`, the interface that models and calibration use, and :class:`GaussianHead`,
a latent, label noise and a link, which is every method but the Posterior Network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.functional import link as functional
from hetsngp.functional import uncertainty
from hetsngp.functional.label_loss import LabelLoss, label_loss
from hetsngp.functional.noise import noise_weight
from hetsngp.functional.ood import ClassSums
from hetsngp.functional.sampling import draw_seed
from hetsngp.nn.latent import LinearLatent, PrecomputedGP, RandomFeatureGP
from hetsngp.nn.noise import Noise
from hetsngp.nn.ood import MAX_ELEMENTS, OODScore
from hetsngp.nn.posteriors import (
    KroneckerPosterior,
    MomentumPosterior,
    Posterior,
    Statistics,
    example_count,
)
from hetsngp.types import LatentNormal, Prediction, UtilityNormal
from hetsngp.validation import check_multi_hot, check_targets

# Distance between the seeds of members: with equal points their integration errors would not average out.
MEMBER_SEED = 7919
# Errors of the parts of an OOD score, relative or of values below one: those of float32 arithmetic, and of an
# entropy or a model uncertainty that is an integral.
ROUNDING_ERROR, INTEGRATION_ERROR = 1e-6, 1e-4


@dataclass(frozen=True)
class Link:
    """Options of u → p. ``num_samples`` None: chosen from a target error when predicting."""

    link: str = "softmax"
    likelihood: str = "log_mean"
    sampler: str = "sobol"
    num_samples: int | None = None


class Head(nn.Module):
    """Base of the heads. Shapes: h (B, D); labels (B,), or multi-hot (B, K) under the sigmoid.

    Temperatures are buffers, not parameters: learned on the training loss they collapse, so they are given or
    set on held-out data.
    """

    temperature: Tensor
    mode_temperature: Tensor
    training_temperature: Tensor
    num_members = 1
    """M, functions of one h; training labels have B·M rows."""
    batch_part: tuple[int, int] = (0, 1)
    """(i, n): in training, h is the i-th (from 0) of n equal parts of a batch, as where each process has one.
    All processes must then draw from equal generators.
    """

    def __init__(self, num_classes: int, link: Link, temperature: float) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.link = link
        # τ of predictions, of the MAP estimate (``model(x)``), of training; calibration sets the first two.
        for name in ("temperature", "mode_temperature", "training_temperature"):
            self.register_buffer(name, torch.tensor(float(temperature)))

    @property
    def temperatures(self) -> tuple[Tensor, Tensor, Tensor]:
        """τ of predictions, of the MAP estimate and of training."""
        return self.temperature, self.mode_temperature, self.training_temperature

    def reset_calibration(self) -> None:
        """Set all temperatures to that of training."""
        for temperature in self.temperatures:
            temperature.copy_(self.training_temperature)

    @property
    def sigmoid(self) -> bool:
        """Whether labels are multi-hot."""
        return self.link.link == "sigmoid"

    def backbone_features(self, h: Tensor) -> Tensor:
        """The backbone's features in the input of this head: all of h, unless the head takes [h, φ]."""
        return h

    # --- training ---------------------------------------------------------------------------------------

    def adapt(self, h: Tensor, generator: torch.Generator | None = None) -> None:
        """Prepare for training on features h (n, D) that stay the same: make inducing features from them."""

    def nll(self, h: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Training loss of each example and member: labels of B·M rows → (B·M,)."""
        raise NotImplementedError

    def log_probs(self, h: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """log P(y) at the MAP estimate: (B, K); under the sigmoid link log-odds."""
        raise NotImplementedError

    def undecayed_parameters(self) -> list[nn.Parameter]:
        """Parameters without weight decay: those with a prior, and those of a density."""
        return []

    def prior_penalty(self) -> Tensor | None:
        """−log prior up to a constant, ½‖β‖², where there is one."""
        return None

    @property
    def wants_class_counts(self) -> bool:
        """Whether this head uses the number of examples of each class and has not been given it."""
        return False

    @property
    def class_counts(self) -> Tensor | None:
        """Number of examples of each class (K,), where it is used and known."""
        return None

    def set_uniform_counts(self, total: float) -> None:
        """Assume ``total`` examples, equally many of each class, until the counts are known."""

    def set_class_counts(self, counts: Tensor) -> None:
        """Set the number of examples of each class (K,); most heads do not use it."""

    # --- prediction -------------------------------------------------------------------------------------

    def predict(
        self, h: Tensor, *, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Prediction:
        """Probabilities and uncertainties for features h (B, D)."""
        raise NotImplementedError

    def probs(
        self, h: Tensor, *, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """``predict(h).probs`` alone: (B, K)."""
        raise NotImplementedError

    def latent_normal(self, h: Tensor) -> LatentNormal:
        """f at h, under the posterior; for members, the Gaussian with the mean and covariance of their
        mixture.
        """
        raise TypeError(f"{type(self).__name__} has no Gaussian over logits; use model.predict(x)")

    def utility_normal(self, h: Tensor) -> UtilityNormal:
        """u at h, under the posterior, before the temperature; for members as in :meth:`latent_normal`."""
        raise TypeError(f"{type(self).__name__} has no Gaussian over logits; use model.predict(x)")

    # --- posterior and calibration ----------------------------------------------------------------------

    @property
    def posterior(self) -> Posterior | None:
        """Posterior that ``fit_posterior`` fits, or None."""
        return None

    @property
    def has_posterior(self) -> bool:
        """Whether a prediction needs ``fit_posterior`` first."""
        return self.posterior is not None and self.posterior.needs_fit

    def statistics(self, h: Tensor, weight: Tensor | None = None) -> Statistics:
        """Contribution of h (B, D) to the posterior; the number of examples alone where there is none."""
        raise NotImplementedError

    @property
    def ood_score(self) -> OODScore | None:
        """OOD score that is fitted on training and held-out data, where there is one."""
        return None

    def class_sums(self, h: Tensor, y: Tensor, weight: Tensor | None = None) -> ClassSums:
        """Contribution of h (B, D) with targets y to the density of the OOD score, where there is one."""
        raise NotImplementedError

    def ood_parts(self, h: Tensor) -> Tensor:
        """Parts of the OOD score at h (B, D), whose density is known: (B, S)."""
        raise NotImplementedError

    def fisher(self, h: Tensor, weight: Tensor | None = None) -> Tensor | None:
        """Sum of output Hessians at h, where the posterior takes one from held-out data."""
        return None

    def held_out_nll(
        self, h: Tensor, y: Tensor, temperature: Tensor, *, posterior: bool, shift: Tensor | None = None
    ) -> Tensor:
        """−log P(y) at a given temperature, at fixed points, with or without the posterior: (B,).

        ``shift`` (B, K), if given, is added to f.
        """
        return self.nll_by_temperature(h, y, posterior=posterior, shift=shift)(temperature)

    def nll_by_temperature(
        self, h: Tensor, y: Tensor, *, posterior: bool, shift: Tensor | None = None
    ) -> Callable[[Tensor], Tensor]:
        """:meth:`held_out_nll` as a function of the temperature, with what all temperatures share computed
        once.
        """
        raise NotImplementedError


class GaussianHead(Head):
    """Any latent with any noise, or none, through the tempered link.

    With M members there are M Gaussians for each h, in M consecutive rows; the prediction is their mixture.
    ``sample_beta`` adds the posterior of β in training too (the paper's "MC sampling" ablation), once one has
    been fitted; in closed form, since Gaussians add.
    """

    label_loss: LabelLoss = staticmethod(label_loss)
    """Loss of labels and its gradients; training may replace it by another way to compute the same."""

    def __init__(
        self,
        latent: LinearLatent | RandomFeatureGP,
        noise: Noise | None,
        link: Link,
        *,
        num_classes: int,
        temperature: float = 1.0,
        sample_beta: bool = False,
    ) -> None:
        super().__init__(num_classes, link, temperature)
        self.latent = latent
        self.noise = noise
        self.num_members = latent.members
        self.sample_beta = sample_beta
        if isinstance(latent, LinearLatent):
            num_features = latent.linear.in_features
        else:
            num_features = latent.normalizer.out_features
        if not self.sigmoid and num_features * max(num_features, num_classes) <= MAX_ELEMENTS:
            self.ood = OODScore(num_features, self._part_errors)

    def backbone_features(self, h: Tensor) -> Tensor:
        return self.latent.backbone_features(h) if isinstance(self.latent, PrecomputedGP) else h

    # --- h → f → u --------------------------------------------------------------------------------------

    def parts(self, h: Tensor, *, posterior: bool) -> tuple[LatentNormal, UtilityNormal | None]:
        """f, and the noise u − f as a zero-mean Gaussian (None without noise), of B·M rows.

        The noise is learned at the training data only. Under the posterior it is weighted by the contraction
        of the GP, or noise extrapolated from a noisy region would count as data uncertainty far away and hide
        the model uncertainty.
        """
        # Not in training (``sample_beta``), where every input is an example of the data.
        fades = posterior and not self.training and self.noise is not None
        if fades:
            latent, contraction = self.latent.with_contraction(h)
        else:
            latent = self.latent(h, posterior=posterior)
        if self.noise is None:
            return latent, None
        var, factor = self.noise(self.backbone_features(h), self.latent)
        noise = UtilityNormal(torch.zeros_like(latent.mean), var, factor)
        if fades:
            width = noise.marginal_variance().mean(-1) / self.training_temperature.to(var).square()
            weight = noise_weight(width, contraction.repeat_interleave(self.num_members)).unsqueeze(-1)
            noise = UtilityNormal(noise.mean, var * weight, factor.weighted(weight.sqrt()))
        return latent, noise

    def utility(self, h: Tensor, *, posterior: bool) -> UtilityNormal:
        """u = f + noise, in closed form: h (B, D) → mean (B·M, K), var (B·M, K), factor."""
        latent, noise = self.parts(h, posterior=posterior)
        return functional.add(latent.as_utility(), noise)

    def latent_normal(self, h: Tensor) -> LatentNormal:
        latent: LatentNormal = self.latent(h, posterior=True)
        return latent.pooled(self.num_members)

    def utility_normal(self, h: Tensor) -> UtilityNormal:
        return self.utility(h, posterior=True).pooled(self.num_members)

    def noise_free_probs(self, mean: Tensor) -> Tensor:
        """p at û/τ, from which the weights of Eq. (5) are computed: (B, K) → (B, K)."""
        u = mean / self.temperature.to(mean)
        return torch.sigmoid(u) if self.sigmoid else torch.softmax(u, -1)

    def _training_utility(self, h: Tensor) -> UtilityNormal:
        """u/τ at the MAP estimate; with ``sample_beta``, under the posterior once one has been fitted."""
        sampled = self.sample_beta and self.training and self.has_posterior
        posterior = sampled and self.posterior.is_filled  # type: ignore[union-attr]
        temperature = self.training_temperature if self.training else self.mode_temperature
        return self.utility(h, posterior=posterior).tempered(temperature.to(h))

    # --- training ---------------------------------------------------------------------------------------

    def log_probs(self, h: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """log P(y) at the MAP estimate: (B, K); under the sigmoid link log-odds.

        In training mode the points are drawn anew from ``generator``; in evaluation they are fixed.
        """
        utility = self._training_utility(h)
        if self.sigmoid:
            log_yes, log_no = functional.sigmoid_log_probs(utility)
            return self._mixed(log_yes) - self._mixed(log_no)
        if self.noise is None and not self.sample_beta:
            # No variance; decided here because tracing cannot look at values.
            return self._mixed(torch.log_softmax(utility.mean, -1))
        return self._mixed(functional.softmax_log_probs(utility, **self._points(generator)))

    def _mixed(self, log_probs: Tensor) -> Tensor:
        """log of the members' mean probability: (B·M, K) → (B, K)."""
        if self.num_members == 1:
            return log_probs
        return log_probs.unflatten(0, (-1, self.num_members)).logsumexp(1) - math.log(self.num_members)

    def _points(self, generator: torch.Generator | None) -> dict[str, Any]:
        """Arguments of the integration: new points in training, fixed ones in evaluation."""
        count = self.link.num_samples
        if count is None and not self.training:
            count = functional.num_evaluation_points(self.num_classes, self.link.sampler)
        return {
            "num_samples": count,
            "sampler": self.link.sampler,
            "generator": generator,
            "seed": None if self.training or generator is not None else 0,
            "decorrelate": self.training,
            "part": self.batch_part,
        }

    def adapt(self, h: Tensor, generator: torch.Generator | None = None) -> None:
        if isinstance(self.latent, RandomFeatureGP):
            self.latent.adapt(h, generator)

    def on_precomputed(self) -> GaussianHead:
        """View of this head whose inputs are [h, φ] (B, D + m), from ``latent.with_features``; the latent is
        a GP. Parameters, buffers and posterior are shared.
        """
        assert isinstance(self.latent, RandomFeatureGP)
        view = copy.copy(self)
        view._modules = {**self._modules, "latent": PrecomputedGP(self.latent)}
        return view

    def nll(self, h: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """−log p̄(y) of each example and member: (B·M,). Labels (B·M,), or soft targets or multi-hot
        labels (B·M, K).
        """
        rows = h.shape[0] * self.num_members
        if self.sigmoid:
            y = check_multi_hot(y, self.num_classes, rows)
            return functional.sigmoid_nll(self._training_utility(h), y, self.link.likelihood)
        y = check_targets(y, self.num_classes, rows)
        utility = self._training_utility(h)
        if self.noise is None and not self.sample_beta:
            return F.cross_entropy(utility.mean, y.to(utility.mean) if y.dim() == 2 else y, reduction="none")
        return functional.softmax_nll(
            utility,
            y,
            likelihood=self.link.likelihood,
            compute=self.label_loss,
            **self._points(generator),
        )

    def undecayed_parameters(self) -> list[nn.Parameter]:
        return [self.latent.beta] if isinstance(self.latent, RandomFeatureGP) else []

    def prior_penalty(self) -> Tensor | None:
        return self.latent.prior_penalty()

    # --- prediction -------------------------------------------------------------------------------------

    def predict(
        self, h: Tensor, *, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Prediction:
        seed = 0 if generator is None else draw_seed(generator)
        latent, noise = self.parts(h, posterior=True)
        prediction = self._prediction(latent, noise, num_samples, seed)
        if self.ood_score is None or not self.ood_score.is_filled:
            return prediction
        return replace(prediction, ood_score=self.ood_score(self._ood_parts(h, latent, prediction)))

    def _prediction(
        self, latent: LatentNormal, noise: UtilityNormal | None, num_samples: int | None, seed: int
    ) -> Prediction:
        """Prediction from f and the noise, of B·M rows; without an OOD score of held-out data."""
        temperature = self.temperature.to(latent.mean)
        f = latent.as_utility().tempered(temperature)
        noise = None if noise is None else noise.tempered(temperature)
        if self.num_members == 1:
            return self._predict(f, noise, latent.var, num_samples, seed)
        each = []
        for member in range(self.num_members):
            which = member, self.num_members
            own = None if noise is None else noise.of_member(*which)
            var = latent.var.unflatten(0, (-1, self.num_members))[:, member]
            each.append(
                self._predict(f.of_member(*which), own, var, num_samples, seed + MEMBER_SEED * member)
            )
        return uncertainty.mixture(each, sigmoid=self.sigmoid)

    def _predict(
        self,
        f: UtilityNormal,
        noise: UtilityNormal | None,
        latent_var: Tensor,
        num_samples: int | None,
        seed: int,
    ) -> Prediction:
        """Prediction of one member; f and noise (B, K) are tempered."""
        if self.sigmoid:
            probs = functional.sigmoid_probs(functional.add(f, noise))
            clean = probs if noise is None else functional.sigmoid_probs(f)
            total = uncertainty.binary_entropy(probs)
            model = torch.zeros_like(total)
            if self.has_posterior:  # decided here because tracing cannot look at values
                noise_var = None if noise is None else noise.marginal_variance()
                model = uncertainty.sigmoid_model_uncertainty(f.mean, f.marginal_variance(), noise_var, probs)
            points = torch.zeros_like(probs[:, 0], dtype=torch.long)
        else:
            options = self._prediction_points(num_samples, seed)
            split = uncertainty.softmax_split(f, noise, posterior=self.has_posterior, **options)
            probs, clean, model = split.probs, split.clean_probs, split.model
            points = torch.full_like(model, split.num_points, dtype=torch.long)
            total = uncertainty.entropy(probs)
        model = model.minimum(total)
        data = total - model
        tiny = torch.finfo(probs.dtype).tiny  # so that logarithms are finite
        return Prediction(
            probs=probs.clamp_min(tiny),
            clean_probs=clean.clamp_min(tiny),
            total_uncertainty=data + model,  # H(probs) to the last bit but one, so that the sum is exact
            data_uncertainty=data,
            model_uncertainty=model,
            latent_variance=latent_var.mean(-1),
            ood_score=model if self.has_posterior else total,
            member_uncertainty=torch.zeros_like(model),
            num_points=points,
        )

    def _prediction_points(self, num_samples: int | None, seed: int) -> dict[str, Any]:
        """Arguments of the integration of one member: errors of M average, so each takes an M-th of the
        points.
        """
        count = self.link.num_samples if num_samples is None else num_samples
        return {
            "num_samples": None if count is None else math.ceil(count / self.num_members),
            "sampler": self.link.sampler,
            "seed": seed,
            "members": self.num_members,
        }

    def probs(
        self, h: Tensor, *, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        seed = 0 if generator is None else draw_seed(generator)
        utility = self.utility(h, posterior=True).tempered(self.temperature.to(h))
        each = []
        for member in range(self.num_members):
            own = utility.of_member(member, self.num_members) if self.num_members > 1 else utility
            if self.sigmoid:
                each.append(functional.sigmoid_probs(own))
            elif self.noise is None and not self.has_posterior:  # no variance
                each.append(torch.softmax(own.mean, -1))
            else:
                options = self._prediction_points(num_samples, seed + MEMBER_SEED * member)
                each.append(functional.softmax_probs(own, **options)[0])
        tiny = torch.finfo(each[0].dtype).tiny
        return torch.stack([probs.clamp_min(tiny) for probs in each]).mean(0)

    # --- posterior and calibration ----------------------------------------------------------------------

    @property
    def posterior(self) -> Posterior | None:
        return self.latent.posterior if isinstance(self.latent, RandomFeatureGP) else None

    def update_posterior(self, h: Tensor, dataset_size: float | None) -> None:
        """Update a momentum posterior by one batch."""
        assert isinstance(self.latent, RandomFeatureGP)
        assert isinstance(self.latent.posterior, MomentumPosterior)
        self.latent.posterior.update(self.latent.features(h), dataset_size)

    def statistics(self, h: Tensor, weight: Tensor | None = None) -> Statistics:
        if not self.has_posterior:
            return Statistics(example_count(h, weight), h.new_zeros(0), h.new_zeros(0))
        assert isinstance(self.latent, RandomFeatureGP)
        phi = self.latent.features(h)
        probs = self.noise_free_probs(self.latent.mean(phi))
        return self.latent.posterior.statistics(phi, probs, self.temperature.to(phi), weight)

    @property
    def ood_score(self) -> OODScore | None:
        return getattr(self, "ood", None)  # pickles of 0.1 have none

    def reset_calibration(self) -> None:
        super().reset_calibration()
        if self.ood_score is not None:
            self.ood_score.clear()

    def class_sums(self, h: Tensor, y: Tensor, weight: Tensor | None = None) -> ClassSums:
        z = self._normalized(h)
        z = (z.cpu() if z.device.type == "mps" else z).double()  # mps has no float64
        return ClassSums.of(z, y.to(z.device), self.num_classes, weight)

    def ood_parts(self, h: Tensor) -> Tensor:
        latent, noise = self.parts(h, posterior=True)
        return self._ood_parts(h, latent, self._prediction(latent, noise, None, 0))

    def _ood_parts(self, h: Tensor, latent: LatentNormal, prediction: Prediction) -> Tensor:
        """Parts of the OOD score (B, S); the energy is the mean of the members'."""
        assert self.ood_score is not None
        z = self._normalized(h)
        if not self.has_posterior:
            return self.ood_score.parts([prediction.total_uncertainty], z)
        energy = -(latent.mean / self.temperature.to(h)).logsumexp(-1)
        energy = energy.unflatten(0, (-1, self.num_members)).mean(1)
        return self.ood_score.parts([energy, prediction.model_uncertainty], z)

    @property
    def _part_errors(self) -> tuple[float, ...]:
        """Errors of the parts of the OOD score: an integral has more than rounding."""
        if self.has_posterior:
            return ROUNDING_ERROR, INTEGRATION_ERROR, ROUNDING_ERROR
        return (ROUNDING_ERROR if self.noise is None else INTEGRATION_ERROR), ROUNDING_ERROR

    def _normalized(self, h: Tensor) -> Tensor:
        """z, the input of the kernel, or h itself under a linear layer: (B, D)."""
        h = self.backbone_features(h)
        return h if isinstance(self.latent, LinearLatent) else self.latent.normalizer.normalized(h)

    def fisher(self, h: Tensor, weight: Tensor | None = None) -> Tensor | None:
        posterior = self.posterior
        if not isinstance(posterior, KroneckerPosterior) or not isinstance(self.latent, RandomFeatureGP):
            return None
        probs = self.noise_free_probs(self.latent.mean(self.latent.features(h)))
        return posterior.fisher(probs, self.temperature.to(h), weight, len(h))

    def shifted_log_probs(self, h: Tensor, shift: Tensor, temperature: Tensor) -> Tensor:
        """log P(y) at the MAP estimate with ``shift`` (B, K) added to f, under the softmax: (B, K)."""
        utility = self.utility(h, posterior=False)
        utility = replace(utility, mean=utility.mean + shift).tempered(temperature.to(h))
        if self.noise is None:
            return torch.log_softmax(utility.mean, -1)
        return functional.softmax_log_probs(utility, seed=0)

    def nll_by_temperature(
        self, h: Tensor, y: Tensor, *, posterior: bool, shift: Tensor | None = None
    ) -> Callable[[Tensor], Tensor]:
        utility = self.utility(h, posterior=posterior)
        if shift is not None:
            utility = replace(utility, mean=utility.mean + shift)
        has_variance = self.noise is not None or (posterior and self.has_posterior)
        many = not self.sigmoid and self.num_classes >= functional.MANY_CLASSES
        correlated = many and functional.separated_forms(utility)[1] is not None
        points = functional.num_label_points(utility) if correlated else None  # of all temperatures
        return lambda temperature: self._nll(utility.tempered(temperature.to(h)), y, has_variance, points)

    def _nll(self, utility: UtilityNormal, y: Tensor, has_variance: bool, points: int | None) -> Tensor:
        """−log P(y) under u/τ of B·M rows, at fixed points, ``points`` where classes correlate: (B,)."""
        if self.sigmoid:
            log_yes, log_no = (self._mixed(part) for part in functional.sigmoid_log_probs(utility))
            y = y.to(log_yes.dtype)
            return -(y * log_yes + (1 - y) * log_no).sum(-1)
        if not has_variance:
            log_probs = torch.log_softmax(utility.mean, -1)
        elif y.dim() == 2 or (points is None and functional.separated_forms(utility)[1] is not None):
            log_probs = functional.softmax_log_probs(utility, seed=0)
        else:
            labels = y.repeat_interleave(self.num_members)
            if points is not None:
                nll = functional.correlated_nll(utility, labels, num_samples=points)
            else:
                count = functional.num_evaluation_points(self.num_classes)
                nll = functional.softmax_nll(utility, labels, num_samples=count, seed=0)
            return -self._mixed(-nll.unsqueeze(-1)).squeeze(-1)
        log_probs = self._mixed(log_probs)
        return F.nll_loss(log_probs, y, reduction="none") if y.dim() == 1 else -(y * log_probs).sum(-1)
