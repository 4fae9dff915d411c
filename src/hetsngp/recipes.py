"""build(): the methods of the paper as a small grid of latent × noise, not seven copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from hetsngp.functional.features import NORMALIZATIONS
from hetsngp.functional.laplace import POSTERIORS
from hetsngp.functional.link import LIKELIHOODS, LINKS
from hetsngp.functional.noise import NOISES
from hetsngp.functional.points import SAMPLERS
from hetsngp.model import Classifier
from hetsngp.nn.backbones import BACKBONES
from hetsngp.nn.heads import GaussianHead, Link
from hetsngp.nn.latent import Kernel, LinearLatent, RandomFeatureGP
from hetsngp.nn.noise import NOISE_TYPES, LowRankNoise
from hetsngp.nn.spectral import bound_spectrally
from hetsngp.validation import check_choice, check_num_classes, check_positive

# What the kernel sees and how tightly layers are bounded, by kind of backbone; measured in docs/decisions.md.
DEFAULT_NORMALIZATION = {"mlp": "rms", "convolutional": "direction", "attention": "direction"}
DEFAULT_BOUND = {"mlp": 0.95, "convolutional": 6.0, "attention": None}


@dataclass(frozen=True)
class Options:
    """Every option of :func:`build` with its default. A method ignores those it has no use for."""

    rank: int = 6
    """R, columns of the noise factor V(x)."""
    temperature: float = 1.0
    """τ of the link; ``fit_posterior(..., calibration=...)`` sets it on held-out data."""
    random_features: int = 1024
    """m, even."""
    amplitude: float = 10.0
    """a, prior standard deviation of a logit: large fits clean labels, 2–3 resists noisy ones."""
    length_scale: float | None = None
    """ℓ in units of the normalised features (typical length √D); None: their median distance."""
    normalization: str | None = None
    """"direction", "polar" or "rms"; None: "rms" for MLPs, "direction" for the rest."""
    posterior: str = "kronecker"
    """"kronecker", "exact", "shared", "momentum" or "none"."""
    noise: str = "low_rank"
    """"low_rank" or "parameter_efficient"."""
    link: str = "softmax"
    """"softmax" for one label, "sigmoid" for multi-hot labels."""
    likelihood: str = "log_mean"
    """"log_mean", or "mean_log" as Algorithm 1 prints it."""
    sampler: str = "sobol"
    """"sobol", "mc" or "antithetic"."""
    num_samples: int | None = None
    """Integration points; None: 64 in training, chosen from a target error of 0.005 in prediction."""
    spectral_bound: float | None = None
    """c of W·min(1, c/σ); None: 0.95 for MLPs, 6 for convolutions, none for attention; inf: no bound."""
    dataset_size: int | None = None
    """N, scales the prior in the loss."""
    sample_beta: bool = False
    """Add the posterior of β in training too, once it is fitted (the paper's "MC sampling" ablation)."""

    def __post_init__(self) -> None:
        whole, real = ("rank", "random_features", "num_samples", "dataset_size"), ("temperature", "amplitude")
        for name in (*whole, *real, "length_scale", "spectral_bound"):
            value = getattr(self, name)
            no_bound = name == "spectral_bound" and value == float("inf")
            if no_bound or (value is None and name not in ("rank", "random_features", *real)):
                continue
            # NumPy's numbers become Python's, which JSON can hold.
            object.__setattr__(self, name, check_positive(name, value, integer=name in whole))
        if self.random_features % 2:
            raise ValueError(f"random_features must be even (sine–cosine pairs), got {self.random_features}")
        if self.normalization is not None:
            check_choice("normalization", self.normalization, NORMALIZATIONS)
        choices = {"posterior": POSTERIORS, "noise": NOISES, "link": LINKS}
        for name, allowed in {**choices, "likelihood": LIKELIHOODS, "sampler": SAMPLERS}.items():
            check_choice(name, getattr(self, name), allowed)


@dataclass(frozen=True)
class Parts:
    """What a recipe is composed of."""

    backbone: nn.Module
    num_features: int
    num_classes: int
    options: Options
    generator: torch.Generator | None

    def bound_backbone(self) -> None:
        """Bound the backbone spectrally, in place."""
        bound = self.options.spectral_bound
        bound = DEFAULT_BOUND[kind_of(self.backbone)] if bound is None else bound
        if bound is not None and bound != float("inf"):
            bound_spectrally(self.backbone, bound)

    def linear(self) -> LinearLatent:
        return LinearLatent(self.num_features, self.num_classes, generator=self.generator)

    def gp(self) -> RandomFeatureGP:
        o = self.options
        kind = o.normalization or DEFAULT_NORMALIZATION[kind_of(self.backbone)]
        kernel = Kernel(o.random_features, o.amplitude, o.length_scale, kind)
        return RandomFeatureGP(
            self.num_features,
            self.num_classes,
            kernel,
            posterior=o.posterior,
            link=o.link,
            generator=self.generator,
        )

    def noise(self) -> LowRankNoise:
        kind = NOISE_TYPES[self.options.noise]
        return kind(self.num_features, self.num_classes, self.options.rank, generator=self.generator)

    def head(self, latent: LinearLatent | RandomFeatureGP, noise: LowRankNoise | None) -> GaussianHead:
        o = self.options
        link = Link(o.link, o.likelihood, o.sampler, o.num_samples)
        return GaussianHead(
            latent,
            noise,
            link,
            num_classes=self.num_classes,
            temperature=o.temperature,
            sample_beta=o.sample_beta,
        )


def deterministic(parts: Parts) -> GaussianHead:
    """Linear latent, no noise: the ordinary classifier."""
    return parts.head(parts.linear(), None)


def heteroscedastic(parts: Parts) -> GaussianHead:
    """Linear latent, label noise (Collier et al. 2021)."""
    return parts.head(parts.linear(), parts.noise())


def sngp(parts: Parts) -> GaussianHead:
    """Bounded backbone and a GP (Liu et al. 2020)."""
    parts.bound_backbone()
    return parts.head(parts.gp(), None)


def hetsngp(parts: Parts) -> GaussianHead:
    """Bounded backbone, a GP, and label noise on top of it: the paper."""
    parts.bound_backbone()
    return parts.head(parts.gp(), parts.noise())


METHODS: dict[str, Callable[[Parts], GaussianHead]] = {
    "deterministic": deterministic,
    "heteroscedastic": heteroscedastic,
    "sngp": sngp,
    "hetsngp": hetsngp,
}


def kind_of(backbone: nn.Module) -> str:
    """Kind of network the defaults depend on: "attention", "convolutional" or "mlp"."""
    names = [type(module).__name__.lower() for module in backbone.modules()]
    if any("attention" in name for name in names):
        return "attention"
    return "convolutional" if any("conv" in name for name in names) else "mlp"


def build(
    method: str,
    backbone: nn.Module,
    num_classes: int,
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Classifier:
    """A classifier of ``method`` on ``backbone``, which maps x to (B, D) and has ``num_features`` = D.

    Options and their defaults are those of :class:`Options`. The backbone is used as it is, not copied; sngp
    and hetsngp bound its layers in place. ``generator`` (on the CPU) draws the head's initial values.

    >>> import hetsngp
    >>> from hetsngp.nn.backbones import ResidualMLP
    >>> model = hetsngp.build("hetsngp", ResidualMLP(2, width=16, depth=2), num_classes=3, random_features=64)
    >>> model(torch.zeros(5, 2)).shape
    torch.Size([5, 3])
    """
    check_choice("method", method, METHODS)
    num_classes = check_num_classes(num_classes)
    known = {f.name for f in fields(Options)}
    for name in options:
        check_choice("option", name, sorted(known))
    resolved = Options(**options)
    width = _num_features(backbone)
    head = METHODS[method](Parts(backbone, width, num_classes, resolved, generator))
    home = next((t.device for t in (*backbone.parameters(), *backbone.buffers())), None)
    if home is not None and head.temperature.device.type != "meta":
        head.to(home)
    config = {
        "method": method,
        "num_classes": num_classes,
        "options": asdict(resolved),
        "backbone": describe_backbone(backbone),
    }
    size = resolved.dataset_size
    return Classifier(backbone, head, num_features=width, dataset_size=size, config=config)


def _num_features(backbone: nn.Module) -> int:
    if not isinstance(backbone, nn.Module):
        raise TypeError(f"backbone must be a torch.nn.Module, got {type(backbone).__name__}")
    width = getattr(backbone, "num_features", None)
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ValueError(
            f"{type(backbone).__name__}.num_features is {width!r}: set it to the width D of the features the "
            "backbone returns, e.g. backbone.num_features = 512"
        )
    return width


def describe_backbone(backbone: nn.Module) -> dict[str, Any]:
    """Name and arguments of one of our backbones; for another, only its class name, to ask for it by."""
    name = type(backbone).__name__
    if BACKBONES.get(name) is type(backbone):
        return {"name": name, "config": dict(backbone.config)}  # type: ignore[arg-type]
    return {"name": None, "class": name}
