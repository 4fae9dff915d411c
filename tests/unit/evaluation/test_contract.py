"""``evaluate`` on every method of METHODS, and on an ensemble: the numbers are those of ``model.predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract import toy
from tests.contract.toy import GP, LINKED, MIXTURES

import hetsngp
from hetsngp import metrics
from hetsngp.evaluation import report as reports
from hetsngp.models.methods import METHODS

every_method = pytest.mark.parametrize("method", METHODS)
FAR = 40.0


def inside(classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return toy.blobs(classes, 10, seed=5)


def report_of(model: Any, **more: Any) -> Any:
    x, y = inside()
    return hetsngp.evaluate(model, toy.loader(x, y), {"far": [x[:7] + FAR, x[7:] + FAR]}, **more)


@every_method
def test_the_numbers_are_those_of_the_predictions(method: str) -> None:
    x, y = inside()
    model = toy.trained(method)
    near, far = model.predict(x), model.predict(x + FAR)
    report = report_of(model, corrupted={("shift", 1): toy.loader(x + 1, y)})
    assert report.id.accuracy == pytest.approx(metrics.accuracy(near.probs, y), abs=1e-6)
    assert report.id.nll == pytest.approx(metrics.nll(near.probs, y), abs=1e-6)
    assert report.id.ece == pytest.approx(metrics.ece(near.probs, y), abs=1e-6)
    assert report.id.brier == pytest.approx(metrics.brier(near.probs, y), abs=1e-6)
    found = report.ood["far"].scores
    assert "ood_score" in found
    for name in set(found) - {"one_minus_confidence"}:
        expected = metrics.auroc(getattr(near, name), getattr(far, name))
        # Batches of other sizes round otherwise, which can turn a pair of the 900.
        assert found[name].auroc == pytest.approx(expected, abs=3 / 900), name
    shifted = model.predict(x + 1)
    assert report.corrupted.mean.nll == pytest.approx(metrics.nll(shifted.probs, y), abs=1e-6)
    json.dumps(report.to_dict(), allow_nan=False)
    assert report.title in str(report)


@every_method
def test_what_a_method_offers_is_what_it_has(method: str) -> None:
    model = toy.trained(method)
    prediction = model.predict(torch.cat([inside()[0], inside()[0] + FAR]))
    offered = report_of(model).scores
    for name in ("model_uncertainty", "member_uncertainty", "latent_variance"):
        values = getattr(prediction, name)
        assert (name in offered) == bool((values != values[0]).any()), name
    assert ("member_uncertainty" in offered) == (method in MIXTURES)
    assert ("latent_variance" in offered) >= (method in GP)
    assert {"total_uncertainty", "data_uncertainty", "one_minus_confidence"} <= set(offered)


def test_a_deterministic_network_has_no_doubt_about_itself() -> None:
    assert not {"model_uncertainty", "function_uncertainty", "latent_variance"} & set(
        report_of(toy.trained("deterministic")).scores
    )


@pytest.mark.parametrize("method", ["deterministic", "hetsngp"])
def test_an_ensemble_offers_its_disagreement(method: str) -> None:
    ensemble = hetsngp.Ensemble([toy.trained(method), toy.trained(method, flip=0.5)])
    report = report_of(ensemble)
    assert "member_uncertainty" in report.scores
    assert ("function_uncertainty" in report.scores) == (method in GP)
    x, y = inside()
    assert report.id.nll == pytest.approx(metrics.nll(ensemble.predict(x).probs, y), abs=1e-6)


@pytest.mark.parametrize("method", [method for method, link in LINKED if link == "sigmoid"])
def test_several_labels_a_row(method: str) -> None:
    x, y = inside()
    model = toy.trained(method, link="sigmoid")
    labels = torch.nn.functional.one_hot(y, 3).float()
    labels[:, 0] = 1.0
    report = hetsngp.evaluate(model, toy.loader(x, labels), {"far": [x + FAR]})
    probs = model.predict(x).probs
    assert report.id.accuracy == pytest.approx(metrics.precision_at_1(probs, labels), abs=1e-6)
    assert report.id.nll == pytest.approx(metrics.multi_label_nll(probs, labels), rel=1e-5)
    assert report.id.brier is None
    assert "precision@1" in str(report)


@every_method
def test_a_second_evaluation_takes_every_part_from_its_file(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a model remembers of a first one (warnings it gave) is no other model; an attribute is."""
    monkeypatch.setattr(reports, "draw_report", lambda report, folder: {})  # which takes seconds
    x, y = inside()
    model = toy.trained(method)
    sets = {("shift", 1): toy.loader(x + 1, y)}
    first = report_of(model, corrupted=sets, out=tmp_path)
    calls: list[int] = []
    backbone = model.backbone.register_forward_hook(lambda *_: calls.append(1))
    again = report_of(model, corrupted=sets, out=tmp_path)
    assert calls == []
    assert {**again.to_dict(), "seconds": 0} == {**first.to_dict(), "seconds": 0}
    model.backbone.beside = 3.0
    report_of(model, corrupted=sets, out=tmp_path)
    assert len(calls) == 3 + 2 + 3
    backbone.remove()


@every_method
def test_evaluating_changes_nothing(method: str) -> None:
    model = toy.trained(method).train()
    before, modes = toy.weights(model), [module.training for module in model.modules()]
    first = report_of(model)
    toy.assert_same(before, toy.weights(model))
    assert modes == [module.training for module in model.modules()]
    second = report_of(model)
    assert second.id == first.id
    assert second.ood == first.ood
