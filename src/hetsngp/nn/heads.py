"""What every head h → p offers: to the model a loss and a prediction, to calibration a temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetsngp.nn.posteriors import Posterior
from hetsngp.nn.statistics import Statistics
from hetsngp.types import LatentNormal, Prediction, UtilityNormal

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


class Head(nn.Module):
    """Base of the heads. Shapes: h (B, D); labels (B,), or multi-hot (B, K) under the sigmoid.

    The temperature is a buffer, not a parameter: learned on the training loss it collapses, so it is given
    or set on held-out data.
    """

    temperature: Tensor
    mode_temperature: Tensor
    training_temperature: Tensor
    num_members = 1
    """M, functions of one h; their training labels come as B·M rows."""

    def __init__(self, num_classes: int, link: Link, temperature: float) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.link = link
        # Of predictions, of the posterior mode (``model(x)``), and of training. Calibration moves the first
        # two; training goes on with its own.
        for name in ("temperature", "mode_temperature", "training_temperature"):
            self.register_buffer(name, torch.tensor(float(temperature)))

    @property
    def temperatures(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of predictions, of the posterior mode, of training."""
        return self.temperature, self.mode_temperature, self.training_temperature

    def forget_calibration(self) -> None:
        """Back to the temperature of training."""
        for temperature in self.temperatures:
            temperature.copy_(self.training_temperature)

    @property
    def sigmoid(self) -> bool:
        """Whether labels are multi-hot."""
        return self.link.link == "sigmoid"

    # --- training ---------------------------------------------------------------------------------------

    def adapt(self, h: Tensor, also: Sequence[Tensor] = (), generator: torch.Generator | None = None) -> None:
        """Look at all training features h (n, D) before training, where they are at hand and will not change;
        what is known of them and of ``also`` is kept until :meth:`forget_rows`.
        """

    def forget_rows(self) -> None:
        """The features of before will not come again."""

    def nll(self, h: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """The training loss of each example, and member: labels of B·M rows → (B·M,)."""
        raise NotImplementedError

    def log_probs(self, h: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """log P(y) at the posterior mode (B, K); log-odds under the sigmoid, the logits of its own loss."""
        raise NotImplementedError

    def undecayed_parameters(self) -> list[nn.Parameter]:
        """Those of natural size one, with a prior or a density of their own instead of weight decay."""
        return []

    def prior_penalty(self) -> Tensor | None:
        """−log prior up to a constant, ½‖β‖², where there is one."""
        return None

    @property
    def wants_class_counts(self) -> bool:
        """Whether the numbers of examples of each class matter here and have not been given."""
        return False

    @property
    def class_counts(self) -> Tensor | None:
        """Those numbers (K,), where they are used and known."""
        return None

    def spread_counts(self, total: float) -> None:
        """Until they are known: so many examples in all, the same number in each class."""

    def set_class_counts(self, counts: Tensor) -> None:
        """Examples of each class: (K,). Most heads have no use for them."""

    # --- prediction -------------------------------------------------------------------------------------

    def predict(
        self, h: Tensor, *, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Prediction:
        """Probabilities and both doubts for features h (B, D)."""
        raise NotImplementedError

    def probs(
        self, h: Tensor, *, num_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """``predict(h).probs`` alone: (B, K)."""
        raise NotImplementedError

    def latent_normal(self, h: Tensor) -> LatentNormal:
        """f at h, under the posterior: of a mixture, the Gaussian with its mean and covariance."""
        raise TypeError(f"{type(self).__name__} has no Gaussian over logits; use model.predict(x)")

    def utility_normal(self, h: Tensor) -> UtilityNormal:
        """u at h, under the posterior and before the temperature; of a mixture as above."""
        raise TypeError(f"{type(self).__name__} has no Gaussian over logits; use model.predict(x)")

    # --- posterior and calibration ----------------------------------------------------------------------

    @property
    def posterior(self) -> Posterior | None:
        """What ``fit_posterior`` fits, or None."""
        return None

    @property
    def has_posterior(self) -> bool:
        """Whether a prediction needs ``fit_posterior`` first."""
        return self.posterior is not None and self.posterior.needs_fit

    def statistics(self, h: Tensor, weight: Tensor | None = None) -> Statistics:
        """What h (B, D) contributes to the posterior; only where there is one."""
        raise NotImplementedError

    def fisher(self, h: Tensor, weight: Tensor | None = None) -> Tensor | None:
        """Sum of output Hessians at h, where the posterior takes one from held-out data."""
        return None

    def held_out_nll(
        self, h: Tensor, y: Tensor, temperature: Tensor, *, posterior: bool, shift: Tensor | None = None
    ) -> Tensor:
        """−log P(y) at a given temperature, at fixed points, with or without the posterior: (B,).

        ``shift`` (B, K) is added to f, where there is one.
        """
        raise NotImplementedError
