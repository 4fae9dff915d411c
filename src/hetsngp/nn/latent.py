"""h → f, the latent logits, as modules.

:class:`FeatureNormalizer` scales h for the kernel and :class:`InducingFeatures` makes kernel features from
training points; the latents themselves are :class:`LinearLatent`, a linear layer, and
:class:`RandomFeatureGP`, a Gaussian process with a posterior. With M members there are M functions of the
same h: the logits of an example fill M consecutive rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.functional import features
from hetsngp.functional.features import kernel_components, median_distance, normalize, rbf_kernel, signed_root
from hetsngp.nn.initialization import seeded_linear
from hetsngp.nn.posteriors import POSTERIOR_TYPES
from hetsngp.nn.precision import KeepsPrecision, is_recomputing
from hetsngp.types import LatentNormal

# Examples of a batch that the median distance is taken over: 8,128 pairs.
DISTANCE_EXAMPLES = 128
# Forward passes before one backward pass that activation checkpointing may repeat exactly.
RECENT_PASSES = 64
# Smallest scale and length: features that do not vary stay finite.
_SMALLEST = 1e-12
# Most training points in a kernel matrix: its eigenvectors take seconds.
MOST_POINTS = 4096
# ℓ of inducing features in units of the median distance, chosen by held-out NLL (docs/decisions.md). Random
# features take 1: the shorter the length scale, the more of them are needed.
LENGTH_RATIO = 0.7
# Examples at a time through the kernel: their distances to all inducing points are in memory.
KERNEL_EXAMPLES = 1024
# Standard deviation of the logits at initialisation: β starts as a narrow draw of the prior's shape.
INITIAL_LOGIT_STD = 0.5


# --- normalisation of features ---------------------------------------------------------------------------


class NormalizerStatistics(NamedTuple):
    """Statistics of features, μ (D,) and scalars; each kind of normalisation reads some of them."""

    mean: Tensor
    mean_square: Tensor
    log_length: Tensor
    log_variance: Tensor
    distance: Tensor


class RecentPass(NamedTuple):
    """A forward pass in training."""

    mark: Tensor
    """Mean of its features (D,)."""
    repeats: Tensor
    """How many times it was repeated."""
    statistics: NormalizerStatistics


class RecentStatistics:
    """Statistics of the last forward passes in training, which a recomputation needs again.

    A pass is recognised by the mean of its features. Copies of the model have none.
    """

    def __init__(self) -> None:
        self.passes: deque[RecentPass] = deque(maxlen=RECENT_PASSES)

    def keep(self, mark: Tensor, statistics: NormalizerStatistics) -> None:
        """Keep the statistics of a pass whose features have the mean ``mark`` (D,)."""
        self.passes.append(RecentPass(mark, torch.zeros_like(mark[0]), statistics))

    def find(self, mark: Tensor) -> NormalizerStatistics | None:
        """Statistics of the pass whose features have the mean ``mark`` (D,); None where there was no pass.

        With several passes of the same features it is the last that was repeated less often than the others:
        backward passes come in the reverse order.
        """
        # Replicas of DataParallel share this object.
        passes = [each for each in list(self.passes) if each.mark.device == mark.device]
        if len(passes) < 2:
            return passes[0].statistics if passes else None
        # All on the device, without waiting for it.
        repeats = [each.repeats for each in passes]
        distance = (torch.stack([each.mark for each in passes]) - mark).abs().sum(1)
        number = torch.arange(len(passes), device=mark.device)
        order = number - len(passes) * torch.stack(repeats)
        found = order.masked_fill(distance > distance.amin(), -torch.inf).argmax()
        torch._foreach_add_(repeats, (number == found).to(mark).unbind())
        columns = zip(*(each.statistics for each in passes), strict=True)
        return NormalizerStatistics(*(torch.stack(column)[found] for column in columns))

    def __deepcopy__(self, memo: Any) -> RecentStatistics:
        return RecentStatistics()

    def __reduce__(self) -> tuple[type[RecentStatistics], tuple[()]]:
        return RecentStatistics, ()


class FeatureNormalizer(KeepsPrecision):
    """Centre and scale features by statistics gathered while training; see :func:`normalize` for the kinds.

    The statistics are plain averages for the first hundred steps and moving averages with weight 0.01 after
    that; those that the kind does not use stay as they are, and so does ``distance``, the median distance of
    normalised features, without ``measures_distance``. They change in training mode only, so they are
    constant while a posterior is fitted and afterwards. They are float32 or better: an average stalls in
    bfloat16, and a square overflows in float16.
    ``gather`` (b, D) → (B, D) collects the features of all processes, where each has a part of the batch.

    Buffers are written in place, so that compiled and CUDA graphs keep their addresses, and no graph of
    autograd has one: a backward pass may follow any number of forward passes. A forward pass that
    activation checkpointing repeats takes the statistics of the first time and changes none.
    """

    gather: Callable[[Tensor], Tensor] | None = None
    measures_distance = True

    mean: Tensor
    mean_square: Tensor
    log_length: Tensor
    log_variance: Tensor
    distance: Tensor
    steps: Tensor
    _recent: RecentStatistics

    def __init__(
        self, num_features: int, kind: str, momentum: float = 0.01, *, measures_distance: bool = True
    ) -> None:
        super().__init__()
        self.kind = kind
        self.momentum = momentum
        self.measures_distance = measures_distance
        self.out_features = num_features + (kind == "polar")
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("mean_square", torch.ones(()))
        self.register_buffer("log_length", torch.tensor(0.5 * math.log(num_features)))
        self.register_buffer("log_variance", torch.ones(()))
        # Independent points of length √D lie √(2D) apart: the value before any data is seen.
        self.register_buffer("distance", torch.tensor(math.sqrt(2 * num_features)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self._recent = RecentStatistics()

    def forward(self, h: Tensor) -> Tensor:
        """(B, D) → (B, D), or (B, D+1) for polar."""
        return self.with_statistics(h)[0]

    def with_statistics(self, h: Tensor) -> tuple[Tensor, NormalizerStatistics]:
        """Normalised h, and the statistics that belong to it, which later passes do not write to."""
        if not self.training:
            # With gradients a graph may have them, and training may go on before its backward pass.
            statistics = self._stored(copied=torch.is_grad_enabled())
            return self._normalized(h, statistics), statistics
        own = h.detach()
        if is_recomputing():
            statistics = self._recent.find(self._values(own).mean(0)) or self._stored(copied=True)
            return self._normalized(h, statistics), statistics
        rows = own if self.gather is None else self.gather(own)
        batch_mean, weight, statistics = self._move(rows)
        z = self._normalized(h, statistics)
        if self.measures_distance:
            shown = z.detach() if self.gather is None else None
            statistics = self._move_distance(rows, weight, statistics, shown)
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            mark = batch_mean if self.gather is None else self._values(own).mean(0)
            self._recent.keep(mark, statistics)
        return z, statistics

    def set_statistics(self, h: Tensor) -> None:
        """Replace the statistics by those of h (n, D), all training features in random order."""
        self.steps.zero_()
        _, weight, statistics = self._move(h)
        self._move_distance(h, weight, statistics)

    def normalized(self, h: Tensor) -> Tensor:
        """Normalised h by the present statistics, which do not change."""
        return self._normalized(h, self._stored())

    def _stored(self, *, copied: bool = False) -> NormalizerStatistics:
        # Of the buffers autograd would keep the distance alone, by which features are divided.
        distance = self.distance.clone() if copied else self.distance
        return NormalizerStatistics(self.mean, self.mean_square, self.log_length, self.log_variance, distance)

    def _values(self, h: Tensor) -> Tensor:
        """What the mean is taken of."""
        return signed_root(h) if self.kind == "power" else h

    def _normalized(self, h: Tensor, statistics: NormalizerStatistics) -> Tensor:
        rms, spread = statistics.mean_square, statistics.log_variance
        if self.kind == "rms":
            rms = rms.to(h.dtype).sqrt().clamp_min(_SMALLEST)
        elif self.kind == "polar":
            spread = spread.to(h.dtype).sqrt().clamp_min(1e-3)
        return normalize(h, self.kind, statistics.mean.to(h), rms, statistics.log_length.to(h.dtype), spread)

    @torch.no_grad()
    def _move(self, h: Tensor) -> tuple[Tensor, Tensor, NormalizerStatistics]:
        """Mean of a batch, the weight of its statistics, and the statistics with it, but for the distance."""
        values = self._values(h)
        batch_mean = values.mean(0)
        # Identical examples have no spread: as a first batch they would make the scale zero.
        variance = F.mse_loss(values, batch_mean.expand_as(values))
        varied = variance > 1e-10 / len(batch_mean) * batch_mean.dot(batch_mean)
        self.steps += varied
        weight = (varied / self.steps.clamp(1, 1 / self.momentum)).to(h.dtype)
        statistics = self._stored()
        mean = self._moved(self.mean, batch_mean, weight)
        if self.kind == "rms":
            square = F.mse_loss(values, mean.to(h).expand_as(values))
            return (
                batch_mean,
                weight,
                statistics._replace(mean=mean, mean_square=self._moved(self.mean_square, square, weight)),
            )
        if self.kind != "polar":
            return batch_mean, weight, statistics._replace(mean=mean)
        log_length = (values - mean.to(h)).norm(dim=1).clamp_min(_SMALLEST).log()
        mean_log = self._moved(self.log_length, log_length.mean(), weight)
        square = (log_length - mean_log.to(h)).square().mean()
        return (
            batch_mean,
            weight,
            statistics._replace(
                mean=mean, log_length=mean_log, log_variance=self._moved(self.log_variance, square, weight)
            ),
        )

    @torch.no_grad()
    def _move_distance(
        self, h: Tensor, weight: Tensor, statistics: NormalizerStatistics, z: Tensor | None = None
    ) -> NormalizerStatistics:
        """Statistics with the median distance of the first examples; z: h normalised, if it is known."""
        z = self._normalized(h[:DISTANCE_EXAMPLES], statistics) if z is None else z[:DISTANCE_EXAMPLES]
        distance = median_distance(z).to(self.distance)
        distance = torch.where(distance.isnan(), self.distance, distance)
        return statistics._replace(distance=self._moved(self.distance, distance, weight))

    @staticmethod
    def _moved(buffer: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        moved = torch.lerp(buffer, value.to(buffer), weight.to(buffer.dtype))
        buffer.copy_(moved)
        return moved

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._recent = RecentStatistics()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # `load` gives a model the precision of its file, where half-precision models of 0.1 have these too.
        for name in NormalizerStatistics._fields:
            buffer = getattr(self, name)
            setattr(self, name, buffer.to(torch.promote_types(buffer.dtype, torch.float32)))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_recent", RecentStatistics())  # pickles of 0.1 have none


# --- kernel features of training points -----------------------------------------------------------------


class InducingFeatures(KeepsPrecision):
    """Φ(z) = [k(z, Z)·U/√λ, 0]: the m − 1 largest components of the kernel matrix of training points Z.

    Random frequencies approximate the kernel everywhere; these components do so near the data, and far fewer
    are needed. The remaining prior variance, 1 − ‖Φ‖², belongs to the other components, of which the data
    determine little: :meth:`with_residual` puts its root into the last coordinate, which is zero in training,
    so that the posterior does not reduce it. With every training point and every component this is the exact
    GP.
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
        """Make the features from z (n, D), normalised features of training points."""
        wide = (z.cpu() if z.device.type == "mps" else z).double()  # mps has no float64
        gram = rbf_kernel(wide, wide, length_scale=float(length_scale))
        if not bool(torch.isfinite(gram).all()):
            raise ValueError(
                "the kernel between training features is not finite: the features are too large for "
                f"{z.dtype}; scale them to about one"
            )
        self.length_scale.fill_(float(length_scale))
        self.points = z.to(self.length_scale).contiguous()
        # A kernel value has an error of about eps, n of them √n·eps together: over √λ at most 0.1 √eps.
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
    def with_residual(phi: Tensor, amplitude: float) -> Tensor:
        """φ = a·Φ with the root of the remaining prior variance in its last coordinate: ‖φ‖ = a."""
        residual = (amplitude**2 - phi.square().sum(1, keepdim=True)).clamp_min(0).sqrt()
        return torch.cat([phi[:, :-1], residual], dim=1)

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


# --- latents --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """Prior of the GP: amplitude a (standard deviation of a logit), length scale ℓ, features, normalisation.

    ``features``: "sincos", "cosine" (the paper's) or "inducing"; ``orthogonal``: frequencies in orthogonal
    blocks; ``linear_share``: share s of a linear function of the normalised features in the prior variance,
    a²·((1 − s)·k(z, z′) + s·zᵀz′/D), so that a² stays the variance of a logit at features of typical length.
    """

    random_features: int = 1024
    amplitude: float = 10.0
    length_scale: float | None = None
    normalization: str = "rms"
    features: str = "sincos"
    orthogonal: bool = True
    linear_share: float = 0.0

    @property
    def rbf_amplitude(self) -> float:
        """Amplitude of the RBF kernel."""
        return self.amplitude * math.sqrt(1 - self.linear_share)

    @property
    def linear_amplitude(self) -> float:
        """Amplitude of the linear kernel beside it."""
        return self.amplitude * math.sqrt(self.linear_share)


def member_rows(outputs: Tensor, members: int) -> Tensor:
    """(B, M·K) → (B·M, K)."""
    return outputs if members == 1 else outputs.reshape(outputs.shape[0] * members, -1)


class LinearLatent(nn.Module):
    """f = Wh + b, with zero variance."""

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        members: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.members = members
        self.linear = seeded_linear(num_features, members * num_classes, generator)

    def forward(self, h: Tensor, *, posterior: bool) -> LatentNormal:
        """(B, D) → f: mean (B·M, K), zero variance."""
        bias = self.linear.bias.to(h)
        mean = member_rows(F.linear(h, self.linear.weight.to(h), bias), self.members)
        return LatentNormal(mean, torch.zeros_like(mean))

    @property
    def readout(self) -> Tensor:
        """Matrix that maps features to logits: (D, M·K)."""
        return self.linear.weight.mT

    def posterior_contraction(self, h: Tensor) -> Tensor:
        """(B, D) → (B,): one for every input, since a linear layer has no posterior."""
        return h.new_ones(h.shape[0])

    def with_contraction(self, h: Tensor) -> tuple[LatentNormal, Tensor]:
        """f and :meth:`posterior_contraction`: (B, D) → mean (B·M, K) and (B,)."""
        return self(h, posterior=True), self.posterior_contraction(h)

    def prior_penalty(self) -> Tensor | None:
        """None: a linear layer has weight decay instead of a prior."""
        return None


class RandomFeatureGP(nn.Module):
    """f_c = φᵀβ_c, β_c ~ N(0, I), φ = a·Φ(z/ℓ) random features of the normalised h, Eq. (4).

    With ``length_scale`` None, ℓ is the running median distance of training features. Sine–cosine pairs by
    default: ‖φ‖ = a for every input, where the paper's cosines give the prior variance only on average.
    ``features="inducing"``, for frozen backbones, are not random: :class:`InducingFeatures`. A linear kernel
    beside the RBF one adds the coordinates of z to φ: f = wᵀz + GP, with one posterior over both.
    Each member has its own β; φ and the posterior covariance, that of the curvature averaged over members,
    are shared.
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        kernel: Kernel,
        *,
        posterior: str = "kronecker",
        link: str = "softmax",
        members: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.members = members
        m = kernel.random_features
        self.normalizer = FeatureNormalizer(
            num_features, kernel.normalization, measures_distance=kernel.length_scale is None
        )
        width = self.normalizer.out_features
        self.inducing = InducingFeatures(width, m) if kernel.features == "inducing" else None
        if self.inducing is None:
            draw = features.orthogonal_frequencies if kernel.orthogonal else features.gaussian_frequencies
            rows = m // 2 if kernel.features == "sincos" else m
            self.register_buffer("frequencies", draw(rows, width, generator=generator))
        if kernel.features == "cosine":
            self.register_buffer("phases", 2 * math.pi * torch.rand(m, generator=generator))
        size = m + width if kernel.linear_share else m
        std = INITIAL_LOGIT_STD / kernel.amplitude
        self.beta = nn.Parameter(torch.randn(size, members * num_classes, generator=generator) * std)
        self.posterior = POSTERIOR_TYPES[posterior](num_classes, size, link)

    @property
    def num_kernel_features(self) -> int:
        """Number of coordinates of φ: m, and with a linear kernel those of z."""
        return self.beta.shape[0]

    @property
    def length_scale(self) -> Tensor:
        """ℓ in the units of the normalised features (typical length √D)."""
        if self.inducing is not None:
            return self.inducing.length_scale
        return self._length_scale(self.normalizer.distance)

    def _length_scale(self, distance: Tensor) -> Tensor:
        given = self.kernel.length_scale
        return distance if given is None else torch.full_like(distance, given)

    @torch.no_grad()
    def adapt(self, h: Tensor, generator: torch.Generator | None = None) -> None:
        """Make inducing features from training features h (n, D); does nothing for random features."""
        if self.inducing is None:
            return
        shuffled = self.set_statistics(h, generator)
        z = self.normalizer.normalized(shuffled[:MOST_POINTS])
        given = self.kernel.length_scale
        self.inducing.adapt(z, LENGTH_RATIO * self.normalizer.distance if given is None else given)

    @torch.no_grad()
    def set_statistics(self, h: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Set the statistics by which h is normalised to those of training features h (n, D), as firmly as
        after many steps of training; return h in random order.
        """
        shuffled = h[torch.randperm(len(h), generator=generator).to(h.device)]
        self.normalizer.set_statistics(shuffled)
        self.normalizer.steps.fill_(round(1 / self.normalizer.momentum))
        return shuffled

    @torch.no_grad()
    def with_features(self, h: Tensor) -> Tensor:
        """[h, φ]: (n, D) → (n, D + m), the input of :class:`PrecomputedGP`."""
        phi = torch.cat([self.features(rows) for rows in h.split(KERNEL_EXAMPLES)])
        return torch.cat([h, phi], dim=1)

    def features(self, h: Tensor) -> Tensor:
        """φ: (B, D) → (B, m), or (B, m + D) with a linear kernel. ‖φ‖² is the prior variance, for inducing
        features after :meth:`with_prior_variance`.
        """
        if self.inducing is not None:
            z = self.normalizer.normalized(h)
            phi = self.inducing(z)
        else:
            z, statistics = self.normalizer.with_statistics(h)
            scaled = z / self._length_scale(statistics.distance).to(z)
            if self.kernel.features == "sincos":
                phi = features.sincos_features(scaled, self.frequencies.to(z))
            else:
                phi = features.cosine_features(scaled, self.frequencies.to(z), self.phases.to(z))
        phi = self.kernel.rbf_amplitude * phi
        if self.kernel.linear_share:
            linear = self.kernel.linear_amplitude / math.sqrt(h.shape[-1]) * z
            phi = torch.cat([phi, linear], dim=-1)
        return phi

    def with_prior_variance(self, phi: Tensor) -> Tensor:
        """φ with ‖φ‖² the prior variance, from which variances are computed."""
        if self.inducing is None:
            return phi
        rbf, linear = phi.tensor_split([self.kernel.random_features], dim=-1)
        return torch.cat([self.inducing.with_residual(rbf, self.kernel.rbf_amplitude), linear], dim=-1)

    def mean(self, phi: Tensor) -> Tensor:
        """û = φᵀβ̂: (B, m) → (B·M, K)."""
        return member_rows(phi @ self.beta.to(phi), self.members)

    @property
    def readout(self) -> Tensor:
        """Matrix that maps features to logits: (m, M·K)."""
        return self.beta

    def forward(self, h: Tensor, *, posterior: bool) -> LatentNormal:
        """(B, D) → f of B·M rows; without ``posterior`` the MAP estimate with zero variance."""
        phi = self.features(h)
        mean = self.mean(phi)
        if not posterior:
            return LatentNormal(mean, torch.zeros_like(mean))
        var, factor = self.posterior.covariance(self.with_prior_variance(phi))
        return LatentNormal(mean, var, factor).repeated(self.members)

    def posterior_contraction(self, h: Tensor) -> Tensor:
        """1 − posterior variance/prior variance: (B, D) → (B,), in [0, 1]."""
        return self.posterior.posterior_contraction(self.with_prior_variance(self.features(h)))

    def with_contraction(self, h: Tensor) -> tuple[LatentNormal, Tensor]:
        """f under the posterior, of B·M rows, and :meth:`posterior_contraction` (B,), from one φ and one
        projection of it on the posterior.
        """
        phi = self.features(h)
        var, factor, contraction = self.posterior.covariance_and_contraction(self.with_prior_variance(phi))
        return LatentNormal(self.mean(phi), var, factor).repeated(self.members), contraction

    def prior_penalty(self) -> Tensor:
        """−log p(β) up to a constant: ½‖β‖²."""
        return 0.5 * self.beta.square().sum()


class PrecomputedGP(RandomFeatureGP):
    """View of a GP whose inputs are [h, φ] (B, D + m), from :meth:`RandomFeatureGP.with_features`.

    For data that are needed many times while the features stay the same. Parameters, buffers and posterior
    are those of the GP itself.
    """

    def __init__(self, gp: RandomFeatureGP) -> None:
        self.__dict__.update(gp.__dict__)

    def features(self, h: Tensor) -> Tensor:
        """φ, the last m columns: (B, D + m) → (B, m)."""
        return h[:, h.shape[1] - self.num_kernel_features :]

    def backbone_features(self, h: Tensor) -> Tensor:
        """h alone, the first D columns: (B, D + m) → (B, D)."""
        return h[:, : h.shape[1] - self.num_kernel_features]
