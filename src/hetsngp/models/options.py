"""Every option of build(), with its default and its check."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetsngp.functional.features import FEATURES, NORMALIZATIONS
from hetsngp.functional.laplace import POSTERIORS
from hetsngp.functional.link import LIKELIHOODS, LINKS
from hetsngp.functional.noise import NOISES
from hetsngp.functional.sampling import SAMPLERS
from hetsngp.validation import check_choice, check_positive


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
    """"direction", "polar", "rms" or "power"; None: "rms" for MLPs, "direction" for the rest."""
    features: str = "random"
    """"random" frequencies, or "inducing": components of the kernel between training points, which
    :func:`hetsngp.fit_head` makes for a backbone that does not change; m of them."""
    posterior: str = "kronecker"
    """"kronecker", "exact", "shared", "momentum" or "none"."""
    noise: str = "low_rank"
    """"low_rank", "parameter_efficient", or "feature" (on Φ: its size does not depend on the classes)."""
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
    class_counts: Any = None
    """N_c, training examples of each class (K,), for posterior_network; None: dataset_size/K each."""
    num_members: int = 3
    """M, inputs and heads of mimo and hetsngp_mimo."""
    input_repetition: float = 0.0
    """ρ, share of training examples for which the M inputs are the same."""
    batch_repetition: int = 1
    """How often mimo and hetsngp_mimo repeat a training batch."""
    latent_dim: int = 6
    """Dimensions of posterior_network's latent z."""
    flow_layers: int = 8
    """Radial layers of each of its flows."""
    entropy_weight: float = 1e-5
    """λ of the entropy in its loss."""
    sample_beta: bool = False
    """Add the posterior of β in training too, once it is fitted (the paper's "MC sampling" ablation)."""

    def __post_init__(self) -> None:
        for name in WHOLE + REAL:
            value = getattr(self, name)
            no_bound = name == "spectral_bound" and value == float("inf")
            if no_bound or (value is None and name in MAY_BE_NONE):
                continue
            # NumPy's numbers become Python's, which JSON can hold.
            object.__setattr__(self, name, check_positive(name, value, integer=name in WHOLE))
        for name, most in (("input_repetition", 1.0), ("entropy_weight", float("inf"))):
            value = getattr(self, name)
            right_type = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not right_type or not 0 <= value <= most or value == float("inf"):
                raise ValueError(f"{name} must be a number from 0 to {most:g}, got {value!r}")
            object.__setattr__(self, name, float(value))
        if self.random_features % 2:
            raise ValueError(f"random_features must be even (sine–cosine pairs), got {self.random_features}")
        if self.class_counts is not None:
            object.__setattr__(self, "class_counts", _counts(self.class_counts))
        if self.normalization is not None:
            check_choice("normalization", self.normalization, NORMALIZATIONS)
        choices = {"posterior": POSTERIORS, "noise": NOISES, "link": LINKS, "features": FEATURES}
        for name, allowed in {**choices, "likelihood": LIKELIHOODS, "sampler": SAMPLERS}.items():
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


WHOLE = (
    *("rank", "random_features", "num_samples", "dataset_size"),
    *("num_members", "batch_repetition", "latent_dim", "flow_layers"),
)
REAL = ("temperature", "amplitude", "length_scale", "spectral_bound")
MAY_BE_NONE = ("num_samples", "dataset_size", "length_scale", "spectral_bound")
