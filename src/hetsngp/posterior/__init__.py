"""The posterior over the GP's weights: fitted in one pass over the data, calibrated on held-out data."""

from hetsngp.posterior.fit import PosteriorReport, fit_posterior

__all__ = ["PosteriorReport", "fit_posterior"]
