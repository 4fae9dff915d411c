"""What fitting a posterior found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PosteriorReport:
    """What ``fit_posterior`` did; also kept as ``model.calibration``."""

    temperature: float
    posterior: str = "none"
    """Kind of posterior."""
    count: float = 0
    """Training examples that went in, or their total weight."""
    scale: float = 1.0
    """Factor on the posterior variance."""
    held_out: float = 0
    """Held-out examples, or their total weight; 0 without calibration."""
    left_out: float = 0
    """Training examples that bore witness of the temperature too, each as if it had not been there."""
    nll_before: float | None = None
    """Held-out NLL at the posterior mode and the training temperature."""
    mode_temperature: float | None = None
    """The best at the posterior mode; ``temperature`` is the best with the posterior."""
    nll_mode: float | None = None
    """Held-out NLL at the posterior mode and its temperature."""
    nll: float | None = None
    """… with the posterior, at the chosen scale and ``temperature``."""
    standard_error: float | None = None
    """Of ``nll_mode``."""
    allowance: float | None = None
    """Nats that the chosen scale was allowed to cost: one standard error of the difference from the best
    scale, example by example, and at least a tolerance."""
    scale_grid: tuple[tuple[float, float], ...] = ()
    """(scale, held-out NLL at ``mode_temperature``) of every scale tried."""

    def __str__(self) -> str:
        has_posterior = self.posterior != "none"
        text = (
            f"posterior {self.posterior} from {_number(self.count)} examples"
            if has_posterior
            else "no posterior"
        )
        if not self.held_out:
            return text + ", not calibrated"
        text += f"; on {_number(self.held_out)} held-out examples "
        text += f"and {_number(self.left_out)} left out one at a time chose " if self.left_out else "chose "
        if has_posterior:
            text += (
                f"posterior scale {self.scale:.3g}, the largest that costs at most {self.allowance:.4f}, and "
            )
        return f"{text}temperature {self.temperature:.3g}: NLL {self.nll_before:.4f} → {self.nll:.4f}"


def _number(count: float) -> str:
    """A total weight without a tail of digits; a number of examples as it is."""
    return f"{count:.2f}".rstrip("0").rstrip(".")
