"""Corners of the model that the contract does not reach."""

import copy
import os
import stat
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract import toy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import hetsngp
from hetsngp.choices import NOISES
from hetsngp.fitting.loop import train
from hetsngp.functional.link import softmax_probs
from hetsngp.models.methods import METHODS
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.types import UtilityNormal


def small(method: str = "hetsngp", classes: int = 3, **options) -> hetsngp.Classifier:
    return hetsngp.build(method, ResidualMLP(4, 16, 1), classes, random_features=32, **options)


def data(n: int = 60, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=g), torch.randint(classes, (n,), generator=g)


@pytest.mark.parametrize("rank", [1, 6])
def test_a_covariance_of_low_rank_is_no_obstacle_in_float32(rank: int) -> None:
    """V large, d almost nothing, more classes than rank: singular to float32."""
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        u = UtilityNormal(
            torch.randn(1, 20, generator=g),
            torch.full((1, 20), 1e-6),
            10 * torch.randn(1, 20, rank, generator=g),
        )
        probs, _ = softmax_probs(u)
        wide = UtilityNormal(u.mean.double(), u.var.double(), u.factor.double())
        assert torch.allclose(probs.double(), softmax_probs(wide)[0], atol=1e-3)


def test_calibration_under_autocast() -> None:
    model, (x, y) = small(), data()
    with torch.autocast("cpu", torch.bfloat16):
        report = hetsngp.fit_posterior(model, [(x, y)], calibration=[(x.clone(), y)])
    again = hetsngp.fit_posterior(model, [(x, y)], calibration=[(x.clone(), y)])
    assert report == again  # full precision either way, and nothing of the first fit stays


def test_equal_rows_do_not_make_the_length_scale_zero() -> None:
    model = small("sngp").train()
    x = torch.zeros(8, 4)
    x[0] = 1.0
    loss = model.loss(x, torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    same = small("sngp").train()
    assert torch.isfinite(same.loss(torch.ones(8, 4), torch.zeros(8, dtype=torch.long)))


@pytest.mark.parametrize("method", [method for method in METHODS if method not in toy.NOISY])
def test_evaluation_exports(method: str) -> None:
    """Without noise: its points come from a Sobol engine, which cannot be traced."""
    model, (x, y) = small(method, dataset_size=60), data()
    model.loss(x, y).backward()
    model.eval()
    program = torch.export.export(model, (x[:7],))
    assert torch.allclose(program.module()(x[:7]), model(x[:7]), atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_every_tensor_follows_the_device(method: str) -> None:
    """The meta device stands in for a GPU: whatever stays behind would still hold data."""
    model, (x, y) = small(method), data()
    hetsngp.fit_posterior(model, [(x, y)], calibration=[(x + 0.1, y)])
    model.to("meta")
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}
    if method in toy.GP:
        assert model.head.posterior.vectors.shape == (32, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_fitted_model_moves_to_the_gpu_and_back(method: str) -> None:
    model, (x, y) = small(method, classes=2), data(classes=2)
    hetsngp.fit_posterior(model, [(x, y)], calibration=[(x.clone(), y)])
    here = model.predict(x)
    there = model.cuda().predict(x.cuda()).to("cpu")
    assert torch.allclose(here.probs, there.probs, atol=1e-4)
    assert torch.allclose(here.model_uncertainty, there.model_uncertainty, atol=1e-4)
    assert torch.equal(model.cpu().predict(x).probs, here.probs)


class Reads(TorchDispatchMode):
    """Counts the values that the host reads from tensors: on a GPU it waits for each."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_a_prediction_waits_for_the_device_only_at_its_start_and_its_end(method: str) -> None:
    """The head can be launched while a GPU is busy with the backbone."""
    model, (x, y) = small(method), data()
    hetsngp.fit_posterior(model, [(x, y)])
    for predict in (model.predict, model.predict_probs):
        predict(x)  # constants are made once
        with Reads() as reads:
            predict(x)
        assert reads.count == 2


@pytest.mark.parametrize("method", METHODS)
def test_the_head_is_built_where_the_backbone_lives(method: str) -> None:
    backbone = ResidualMLP(4, 16, 1).to("meta")
    model = hetsngp.build(method, backbone, 3, random_features=32)
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}


def test_an_interrupted_fit_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = small(), data()
    hetsngp.fit_posterior(model, [(x, y)], calibration=[(x.clone(), y)])
    before = {name: t.clone() for name, t in model.state_dict().items()}

    def interrupted(*_: object, **__: object) -> None:
        model.head.latent.posterior.scale.fill_(0.123)
        raise KeyboardInterrupt

    monkeypatch.setattr("hetsngp.posterior.calibration.largest_good_scale", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hetsngp.fit_posterior(model, [(2 * x, y)], calibration=[(x.clone(), y)])
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("method", METHODS)
def test_training_keeps_its_own_temperature(method: str) -> None:
    model, (x, y) = small(method, dataset_size=60), data()

    def training_loss() -> float:
        twin = copy.deepcopy(model).train()  # running statistics move in training
        return float(twin.loss(x, y, generator=torch.Generator().manual_seed(0)).detach())

    loss = training_loss()
    hetsngp.fit_posterior(model, [(x, y)], calibration=[(x + 0.1, y)])
    assert float(model.temperature) != 1.0
    assert training_loss() == loss
    hetsngp.fit_posterior(model, [(x, y)])
    assert float(model.temperature) == 1.0  # not calibrated, as the report says


def test_latent_does_not_move_the_running_statistics() -> None:
    model, (x, y) = small("sngp"), data()
    hetsngp.fit_posterior(model, [(x, y)])
    model.train()
    before = model.head.latent.normalizer.mean.clone()
    model.latent(torch.randn(9, 16) * 100)
    assert torch.equal(model.head.latent.normalizer.mean, before)
    assert model.training


@pytest.mark.parametrize(
    ("method", "noise"),
    [(method, noise) for method in METHODS for noise in (NOISES if method in toy.NOISY else NOISES[:1])],
)
def test_a_generator_decides_all_that_is_added(method: str, noise: str) -> None:
    """The head, and what lets a backbone take several inputs."""
    backbone = ResidualMLP(4, 16, 1)

    def added(seed: int) -> dict[str, torch.Tensor]:
        options = {"random_features": 32, "noise": noise, "generator": torch.Generator().manual_seed(seed)}
        return hetsngp.build(method, copy.deepcopy(backbone), 3, **options).state_dict()

    one, two, other = added(1), added(1), added(2)
    assert all(torch.equal(one[k], two[k]) for k in one)
    differ = {k.partition(".")[0] for k in one if not torch.equal(one[k], other[k])}
    assert differ == ({"head", "backbone"} if method in toy.MIXTURES else {"head"})


def test_numpy_numbers_are_numbers(tmp_path: Path) -> None:
    model = small(classes=np.int64(3), rank=np.int64(4), amplitude=np.float32(4.0), dataset_size=np.int32(60))
    hetsngp.save(model, tmp_path)
    assert hetsngp.load(tmp_path).config == model.config


def test_training_rows_in_another_wrapping_are_noticed() -> None:
    """Copied, shuffled, rebatched: still the training data. Rows that are new raise no alarm."""
    model, (x, y) = small("sngp"), data()
    order = torch.randperm(40)
    training, again = TensorDataset(x, y), TensorDataset(x[order].clone(), y[order])
    with pytest.warns(UserWarning, match="100% of the calibration examples are also in the training data"):
        hetsngp.fit_posterior(model, DataLoader(training, 7), DataLoader(again, 13))
    few_repeated = torch.cat([torch.arange(40, 60), torch.arange(15)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (torch.arange(40, 60), few_repeated):
            hetsngp.fit_posterior(model, [(x[:40], y[:40])], [(x[rows], y[rows])])


def test_a_dataset_or_a_class_in_the_wrong_place_is_named(tmp_path: Path) -> None:
    model, (x, y) = small(), data()
    with pytest.raises(TypeError, match="DataLoader"):
        hetsngp.fit_posterior(model, TensorDataset(x, y))
    hetsngp.save(model, tmp_path)
    with pytest.raises(TypeError, match="MyNetwork"):
        hetsngp.load(tmp_path, backbone=ResidualMLP)


def test_no_probability_is_exactly_zero() -> None:
    for classes in (2, 3):
        model, (x, _) = small("deterministic", classes=classes), data()
        model.temperature = 1e-4
        assert torch.isfinite(model.predict(x).probs.log()).all()


def test_disjoint_parts_of_one_dataset_may_calibrate() -> None:
    model, (x, y) = small(), data()
    dataset = TensorDataset(x, y)
    part = [DataLoader(dataset, 16, sampler=SubsetRandomSampler(range(a, a + 30))) for a in (0, 30)]
    assert hetsngp.fit_posterior(model, part[0], calibration=part[1]).held_out == 30


def test_mean_of_logs_trains_and_still_predicts_a_distribution() -> None:
    model, (x, y) = small("heteroscedastic", likelihood="mean_log"), data()
    other = small("heteroscedastic")
    other.load_state_dict(model.state_dict())
    assert torch.allclose(model.eval()(x).exp().sum(-1), torch.ones(60), atol=1e-5)
    # By Jensen the mean of logs is a larger loss than the log of the mean, at the same points.
    assert float(model.loss(x, y)) > float(other.eval().loss(x, y))


def test_saved_files_have_ordinary_permissions_and_remember_staleness(tmp_path: Path) -> None:
    model, (x, y) = small("sngp"), data()
    hetsngp.fit_posterior(model, [(x, y)])
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.loss(x, y).backward()
    hetsngp.save(model, tmp_path)
    mask = os.umask(0)
    os.umask(mask)
    assert {stat.S_IMODE(f.stat().st_mode) for f in tmp_path.iterdir()} == {0o666 & ~mask}
    with pytest.warns(UserWarning, match="fit_posterior"):
        hetsngp.load(tmp_path).predict(x)


def test_the_loop_takes_dicts_streams_and_ensembles() -> None:
    class FromDict(nn.Module):
        num_features = 16

        def __init__(self) -> None:
            super().__init__()
            self.body = ResidualMLP(4, 16, 1)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.body(batch["x"])

    x, y = data()
    model = hetsngp.build("hetsngp", FromDict(), 3, random_features=32, dataset_size=60)
    train(model, [({"x": x}, y)], epochs=2)
    hetsngp.fit_posterior(model, [({"x": x}, y)])
    assert model.predict({"x": x}).probs.shape == (60, 3)
    ensemble = hetsngp.Ensemble([small(), small("sngp")])
    history = train(ensemble, DataLoader(TensorDataset(x, y), 20), epochs=3)
    assert [(r.member, r.epoch) for r in history] == [(m, e) for m in (1, 2) for e in (1, 2, 3)]
    assert [m.dataset_size for m in ensemble.members] == [60, 60]
    assert len(hetsngp.fit_posterior(ensemble, [(x, y)])) == 2
    assert toy.same_bits(ensemble.predict(x), ensemble.predict(x))
