"""Options of build(): their names and types for editors, their defaults, and their checks."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, get_args, get_type_hints

import numpy as np
from torch import Tensor

from hetsngp.choices import (
    FEATURES,
    KERNELS,
    LIKELIHOODS,
    LINKS,
    NOISES,
    NORMALIZATIONS,
    POSTERIORS,
    SAMPLERS,
    FeaturesName,
    KernelName,
    LikelihoodName,
    LinkName,
    MethodName,
    NoiseName,
    NormalizationName,
    PosteriorName,
    SamplerName,
)
from hetsngp.validation import LARGEST_SIZE, MOST_POINTS, check_choice, check_positive, check_size

ClassCounts = Sequence[float] | np.ndarray | Tensor

CHOICES: dict[str, tuple[str, ...]] = {
    "normalization": NORMALIZATIONS,
    "kernel": KERNELS,
    "features": FEATURES,
    "posterior": POSTERIORS,
    "noise": NOISES,
    "link": LINKS,
    "likelihood": LIKELIHOODS,
    "sampler": SAMPLERS,
}
"""Allowed values of the options that are names."""


class BuildOptions(TypedDict, total=False):
    """Keyword arguments of :func:`hetsngp.build`; a method ignores those it has no use for.

    The defaults are those of :class:`Options`.
    """

    rank: int
    """R, columns of the noise factor V(x)."""
    temperature: float
    """τ of the link; ``fit_posterior(..., calibration=...)`` sets it on held-out data."""
    random_features: int
    """m, even."""
    amplitude: float | None
    """a, prior standard deviation of a logit: large fits clean labels, 2–3 resists noisy ones; None: 5 for
    convolutional networks, 10 for the rest."""
    length_scale: float | None
    """ℓ in units of the normalised features (typical length √D); None: their median distance."""
    normalization: NormalizationName | None
    """None: "rms" for MLPs, "direction" for the rest."""
    kernel: KernelName
    """Prior of a logit: "rbf", or "rbf+linear", a²·((1 − s)·k + s·zᵀz′/D) under one posterior."""
    linear_share: float
    """s, share of the linear kernel in the prior variance of "rbf+linear", above 0 and below 1."""
    features: FeaturesName
    """"random" frequencies, or "inducing": components of the kernel between training points, which
    :func:`hetsngp.fit_head` makes for a backbone that does not change; m of them."""
    posterior: PosteriorName
    """Form of the GP's posterior; "none" predicts with the MAP estimate."""
    noise: NoiseName
    """Form of the label noise; the size of "feature" (on Φ) does not depend on the number of classes."""
    link: LinkName
    """"softmax" for one label, "sigmoid" for multi-hot labels."""
    likelihood: LikelihoodName
    """"log_mean", or "mean_log" as Algorithm 1 prints it."""
    sampler: SamplerName
    """Integration points."""
    num_samples: int | None
    """Number of integration points of the noise's factor; None: 4 in training and 256 in prediction, 16 to
    64 and 512 up to 32 classes.
    """
    spectral_bound: float | None
    """c of W·min(1, c/σ); None: 0.95 for MLPs, 6 for convolutions, none for attention; inf: no bound."""
    dataset_size: int | None
    """N, scales the prior in the loss."""
    class_counts: ClassCounts | None
    """N_c, training examples of each class (K,), for posterior_network; None: dataset_size/K each."""
    num_members: int
    """M, inputs and heads of mimo and hetsngp_mimo."""
    input_repetition: float
    """ρ, share of training examples for which the M inputs are the same."""
    batch_repetition: int
    """How often mimo and hetsngp_mimo repeat a training batch."""
    latent_dim: int
    """Dimensions of posterior_network's latent z."""
    flow_layers: int
    """Radial layers of each flow of posterior_network."""
    entropy_weight: float
    """λ of the entropy in the loss of posterior_network."""
    sample_beta: bool
    """Add the posterior of β in training too, once it is fitted (the paper's "MC sampling" ablation)."""


class HeadOptions(BuildOptions, total=False):
    """Keyword arguments of :func:`hetsngp.fit_head`."""

    method: MethodName
    """Method of the new head, for a frozen backbone."""


@dataclass(frozen=True)
class Options:
    """Every option of :func:`build` with its default, checked; :class:`BuildOptions` says what each means."""

    rank: int = 6
    temperature: float = 1.0
    random_features: int = 1024
    amplitude: float | None = None
    length_scale: float | None = None
    normalization: NormalizationName | None = None
    kernel: KernelName = "rbf"
    linear_share: float = 0.5
    features: FeaturesName = "random"
    posterior: PosteriorName = "kronecker"
    noise: NoiseName = "low_rank"
    link: LinkName = "softmax"
    likelihood: LikelihoodName = "log_mean"
    sampler: SamplerName = "sobol"
    num_samples: int | None = None
    spectral_bound: float | None = None
    dataset_size: int | None = None
    class_counts: ClassCounts | None = None
    num_members: int = 3
    input_repetition: float = 0.0
    batch_repetition: int = 1
    latent_dim: int = 6
    flow_layers: int = 8
    entropy_weight: float = 1e-5
    sample_beta: bool = False

    def __post_init__(self) -> None:
        for name in INTEGERS + FLOATS:
            value = getattr(self, name)
            no_bound = name == "spectral_bound" and isinstance(value, float) and value == float("inf")
            if no_bound or (value is None and name in MAY_BE_NONE):
                continue
            # NumPy's numbers become Python's, which JSON can hold.
            object.__setattr__(self, name, check_positive(name, value, integer=name in INTEGERS))
            if name in INTEGERS and name != "dataset_size":
                check_size(name, getattr(self, name), MOST.get(name, LARGEST_SIZE))
        for name, most in MAY_BE_ZERO.items():
            value = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= most or value == float("inf"):
                raise ValueError(f"{name} must be a number from 0 to {most:g}, got {value!r}")
            object.__setattr__(self, name, float(value))
        if not self.linear_share < 1:
            raise ValueError(
                f"linear_share must be above 0 and below 1, got {self.linear_share!r}: kernel='rbf' has no "
                "linear part, method='deterministic' nothing else"
            )
        if self.random_features % 2:
            raise ValueError(f"random_features must be even (sine–cosine pairs), got {self.random_features}")
        if not isinstance(self.sample_beta, bool | np.bool_ | int) or self.sample_beta not in (0, 1):
            raise ValueError(f"sample_beta must be True or False, got {self.sample_beta!r:.100}")
        object.__setattr__(self, "sample_beta", bool(self.sample_beta))
        if self.class_counts is not None:
            object.__setattr__(self, "class_counts", _counts(self.class_counts))
        for name, allowed in CHOICES.items():
            if name != "normalization" or self.normalization is not None:
                check_choice(name, getattr(self, name), allowed)


def _counts(counts: Any) -> list[float]:
    """As Python's numbers, which JSON can hold."""
    try:
        if isinstance(counts, Mapping):  # going through it would give its keys
            raise TypeError
        return [float(count) for count in counts]
    except (TypeError, ValueError):
        raise ValueError(
            f"class_counts must be a list of the numbers of training examples of class 0, 1, …, not "
            f"{counts!r}: e.g. torch.bincount(train_labels, minlength=num_classes)"
        ) from None


MOST = {"random_features": 2**20, "num_samples": MOST_POINTS}
"""Largest values of some numbers: a posterior takes m² memory."""
MAY_BE_ZERO = {"input_repetition": 1.0, "entropy_weight": float("inf")}
"""Numbers that may be zero, and the largest value of each; all others are positive."""
_TYPES = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Options).items()}
INTEGERS = tuple(name for name, types in _TYPES.items() if int in types)
FLOATS = tuple(name for name, types in _TYPES.items() if float in types and name not in MAY_BE_ZERO)
MAY_BE_NONE = tuple(name for name, types in _TYPES.items() if type(None) in types)
