"""The momentum posterior: an average in float64, factorised at the first prediction after updates."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract import toy
from torch import Tensor, nn

import hetsngp
from hetsngp.functional import laplace
from hetsngp.nn.posteriors import MomentumPosterior
from hetsngp.validation import PosteriorNotFittedError

M = 32
X, Y = toy.blobs()


def collapsed(batches: int = 20, spread: float = 1e-3) -> list[Tensor]:
    """Features of a network that maps all inputs nearly to one point: ‖φ‖ = 10, and a tiny spread."""
    g = torch.Generator().manual_seed(0)
    point = torch.randn(M, generator=g)
    rows = [point + spread * torch.randn(64, M, generator=g) for _ in range(batches)]
    return [10 * phi / phi.norm(dim=1, keepdim=True) for phi in rows]


def updated(batches: list[Tensor], size: float | None = None) -> MomentumPosterior:
    posterior = MomentumPosterior(3, M, "softmax")
    for phi in batches:
        posterior.update(phi, size)
    return posterior


def model_of(**options: Any) -> Any:
    model = toy.trained("hetsngp", fit=False, posterior="momentum", **options)
    for x in X.split(12):
        model.update_posterior(x)
    return model


def count_factorisations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    factorise = laplace.precision_cholesky

    def counted(sums: Tensor) -> Tensor:
        calls.append(len(sums))
        return factorise(sums)

    monkeypatch.setattr(laplace, "precision_cholesky", counted)
    return calls


# --- precision ------------------------------------------------------------------------------------------


def test_collapsed_features_of_many_examples_have_the_variance_of_float64() -> None:
    """N = 1.3e7 times the rounding errors of float32 is not positive definite."""
    batches, size = collapsed(), 1.3e7
    posterior = updated(batches, size)
    query = torch.cat([batches[0][:5], torch.randn(5, M, generator=torch.Generator().manual_seed(1))])
    wide = [phi.double() for phi in batches]
    average = sum(laplace.gram(phi) / len(phi) for phi in wide) / len(wide)
    precision = torch.eye(M, dtype=torch.float64) + size * average
    want = torch.einsum("bm,bm->b", query.double(), torch.linalg.solve(precision, query.double().mT).mT)
    torch.testing.assert_close(posterior.covariance(query)[0][:, 0].double(), want, rtol=1e-3, atol=1e-6)
    assert posterior.average.dtype == torch.float64


def test_an_average_in_float32_of_release_0_1_is_made_semidefinite() -> None:
    posterior = updated(collapsed())
    state = posterior.state_dict()
    state["average"] = state["average"].float()
    old = MomentumPosterior(3, M, "softmax")
    old.load_state_dict(state)
    old.update(collapsed(1)[0], 1.3e9)
    assert torch.isfinite(old.covariance(collapsed(1)[0])[0]).all()


# --- when it is factorised ------------------------------------------------------------------------------


def test_updates_do_not_factorise_and_predictions_do_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy.trained("hetsngp", fit=False, posterior="momentum")
    calls = count_factorisations(monkeypatch)
    for x in X.split(6):
        model.update_posterior(x)
    assert calls == []
    first = model.predict(X)
    for _ in range(3):
        assert torch.equal(model.predict(X).probs, first.probs)
    assert len(calls) == 1
    model.update_posterior(X[:4])
    assert len(calls) == 1
    assert not torch.equal(model.predict(X).probs, first.probs)
    assert len(calls) == 2


def test_a_prediction_writes_no_buffer_and_marks_nothing() -> None:
    model = model_of()
    before = {name: (id(t), t._version) for name, t in model.named_buffers()}
    weights = model._weights_now()
    model.predict(X)
    assert {name: (id(t), t._version) for name, t in model.named_buffers()} == before
    assert model._weights_now() == weights


def test_staleness_is_noticed_with_a_lazy_factor() -> None:
    model = model_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(X)
    with torch.no_grad():
        model.head.latent.beta.mul_(1.5)
    with pytest.warns(UserWarning, match="trained after fit_posterior"):
        model.predict(X)
    model.update_posterior(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(X)


def test_it_is_not_fitted_before_the_first_update() -> None:
    posterior = MomentumPosterior(3, M, "softmax")
    phi = collapsed(1)[0]
    for call in (posterior.covariance, posterior.covariance_and_contraction):
        with pytest.raises(PosteriorNotFittedError):
            call(phi)
    assert not posterior.is_filled
    posterior.update(phi)
    assert posterior.is_filled
    assert bool(posterior.fitted)


def test_an_average_that_is_written_to_is_factorised_again() -> None:
    posterior = updated(collapsed(2, 0.5))
    query = torch.randn(4, M)
    before = posterior.covariance(query)[0]
    posterior.average.mul_(4)
    assert (posterior.covariance(query)[0] < before).all()


def test_threads_predict_the_same_at_the_same_time() -> None:
    model = model_of()
    want = copy.deepcopy(model).predict(X).probs
    answers: list[Tensor] = []

    def predict() -> None:
        answers.append(model.predict(X).probs)

    threads = [threading.Thread(target=predict) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert all(torch.equal(probs, want) for probs in answers)


# --- copies, files and conversions ----------------------------------------------------------------------


def copies(model: Any, folder: Path) -> dict[str, Any]:
    """Copies of a model by every way there is."""
    hetsngp.save(model, folder)
    fresh = toy.build("hetsngp", posterior="momentum")
    fresh.load_state_dict(model.state_dict())
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "file": hetsngp.load(folder),
        "state dict": fresh.eval(),
        "to": copy.deepcopy(model).to("cpu"),
        "float": copy.deepcopy(model).float(),
    }


@pytest.mark.parametrize("predicted", [False, True])
def test_copies_predict_the_same_and_go_on_the_same(predicted: bool, tmp_path: Path) -> None:
    model = model_of()
    if predicted:
        model.predict(X)
    found = copies(model, tmp_path)
    want = model.predict(X)
    for way, other in found.items():
        assert torch.equal(other.predict(X).probs, want.probs), way
        assert other.head.posterior.average.dtype == torch.float64, way
        assert "head.latent.posterior.cholesky" in other.state_dict(), way
    model.update_posterior(X[:7])
    want = model.predict(X)
    for way, other in found.items():
        other.update_posterior(X[:7])
        assert torch.equal(other.predict(X).probs, want.probs), way


def test_half_precision_keeps_the_average() -> None:
    posterior = updated(collapsed(), 1.3e7)
    want = posterior.covariance(collapsed(1)[0])[0]
    for convert in (nn.Module.half, nn.Module.bfloat16, nn.Module.float, nn.Module.double):
        other = convert(copy.deepcopy(posterior))
        assert torch.equal(other.average, posterior.average)
        torch.testing.assert_close(other.covariance(collapsed(1)[0])[0], want, rtol=1e-4, atol=1e-7)


def test_a_state_of_release_0_1_predicts_with_its_own_factor() -> None:
    """There the factor was computed at every update, and the average is in float32."""
    batches = collapsed(4, 0.5)
    average = sum(laplace.gram(phi.double()) / len(phi) for phi in batches) / len(batches)
    factor = laplace.precision_cholesky(256 * average).float()
    state = MomentumPosterior(3, M, "softmax").state_dict()
    state |= {"fitted": torch.tensor(True), "average": average.float(), "cholesky": factor}
    state |= {"seen": torch.tensor(256), "steps": torch.tensor(4)}
    posterior = MomentumPosterior(3, M, "softmax")
    posterior.load_state_dict(state)
    assert torch.equal(posterior.precision_factor(), factor)
    again = posterior.state_dict()
    assert all(torch.equal(again[name], t) for name, t in state.items())
    posterior.update(batches[0])
    want = updated([*batches, batches[0]])
    torch.testing.assert_close(
        posterior.covariance(batches[1])[0], want.covariance(batches[1])[0], rtol=1e-3, atol=1e-6
    )
