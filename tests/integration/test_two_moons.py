"""The bar of the project: on separable two moons the model knows what it knows, and what it does not."""

import runpy
from pathlib import Path

import pytest
import torch
from tests.contract import toy
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp.fitting.loop import train
from hetsngp.models.methods import METHODS
from hetsngp.nn.backbones import ResidualMLP

pytestmark = pytest.mark.slow

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.mark.parametrize("method", [m for m in METHODS if m in toy.GP or m not in toy.GAUSSIAN])
def test_the_defaults_are_sure_on_the_data_and_doubt_far_away(method: str) -> None:
    """Amplitude 10, all else default, no calibration: ≤ 0.05 nats on the data, ≥ 0.3 at distance 10. (A
    Dirichlet has 0.19 of them at most, and falls back on its density.)"""
    script = runpy.run_path(str(EXPERIMENTS / "defaults" / "moons.py"))
    x, y, _ = script["moons"](seed=0, flip=0.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = hetsngp.build(method, ResidualMLP(2), 2, amplitude=10.0, dataset_size=len(x))
    train(model, loader, epochs=40, lr=2e-3)
    report = hetsngp.fit_posterior(model, loader)
    assert report.posterior == ("kronecker" if method in toy.GP else "none")
    near, far = model.predict(x), model.predict(script["ring"](10.0, 16))
    # Members share a network that was made for one: they are right a little less often.
    assert (near.labels == y).float().mean() > (0.98 if method in toy.MIXTURES else 0.99)
    assert near.model_uncertainty.mean() <= 0.05
    assert far.ood_score.min() > near.ood_score.max()
    if method in toy.GP:
        assert far.model_uncertainty.min() >= 0.3
        # A logit's variance returns to the prior's a²(1 − 1/K), and the prediction to uniform.
        assert far.latent_variance.min() > 0.95 * 50
        assert far.confidence.max() < 0.65
    assert torch.allclose(far.total_uncertainty, far.data_uncertainty + far.model_uncertainty)
