"""The posterior between two epochs, for training under it: ``sample_beta``, the paper's "MC sampling"."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetsngp.models.classifier import Classifier


def samples_beta(model: Classifier) -> bool:
    """Whether the loss is to count the posterior of β: where the option is set, and there is one."""
    return bool(getattr(model.head, "sample_beta", False)) and model.head.has_posterior


class Refit:
    """The posterior at the weights as they are, by ``fit``, which passes over the data; all else stays.

    Within an epoch the weights move on and the covariance does not: it is a pass over the data behind.
    """

    def __init__(self, model: Classifier, fit: Callable[[], object]) -> None:
        self.model, self.fit = model, fit

    @torch.no_grad()
    def __call__(self) -> None:
        """A call of all processes."""
        calibration, temperatures = self.model.calibration, self.model.head.temperatures
        before = [temperature.clone() for temperature in temperatures]
        with torch.compiler.set_stance("force_eager"):  # a last batch has a shape of its own
            self.fit()
        self.model.calibration = calibration
        for temperature, value in zip(temperatures, before, strict=True):
            temperature.copy_(value)

    def forget(self) -> None:
        """Of a trained model it is out of date, and with averaged weights no covariance at all."""
        posterior = self.model.head.posterior
        assert posterior is not None
        fresh = type(posterior)(posterior.num_classes, posterior.num_features, posterior.link)
        posterior.load_state_dict(fresh.to(posterior.scale.dtype).state_dict())
        self.model.mark_fitted()  # nothing is left that could be stale
