"""The OOD score of a fitted model: its parts, what they are compared with, and when it is the model
uncertainty or the entropy.
"""

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract import toy
from torch import Tensor

import hetsngp
from hetsngp.functional.ood import ClassSums
from hetsngp.nn.extractor import Features
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.posteriors import Statistics
from hetsngp.posterior.cross_fitting import cross_fit_posterior
from hetsngp.serving.decisions import set_thresholds

X, Y = toy.blobs(3, 100, flip=0.2)
TRAIN, HELD_OUT = (X[::2], Y[::2]), (X[1::2], Y[1::2])
ELSEWHERE = torch.tensor([[30.0, 30.0], [-300.0, 100.0]])


def trained(method: str = "hetsngp", **options: Any) -> hetsngp.Classifier:
    generator = torch.Generator().manual_seed(0)
    model = hetsngp.build(
        method, Features(2, "mlp"), 3, dataset_size=150, generator=generator, **toy.TINY, **options
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    y = toy.labels_for(TRAIN[1], 3, options)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(TRAIN[0], y, generator=generator).backward()
        optimizer.step()
    return model


def fitted(method: str = "hetsngp", **options: Any) -> hetsngp.Classifier:
    model = trained(method, **options)
    pairs = [(x, toy.labels_for(y, 3, options)) for x, y in (TRAIN, HELD_OUT)]
    hetsngp.fit_posterior(model, pairs[:1], pairs[1:])
    return model


def textbook_distance(z: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Relative Mahalanobis distance of x by inverse covariances of z, with the ridge of the library."""
    means = torch.stack([z[y == c].mean(0) for c in range(3)])
    ridge: Any = None

    def squared(rest: Tensor, centred: Tensor) -> Tensor:
        nonlocal ridge
        covariance = centred.mT @ centred / len(centred)
        ridge = 2 / len(z) * covariance.diagonal().mean() if ridge is None else ridge
        inverse = torch.linalg.inv(covariance + ridge * torch.eye(len(covariance)).to(covariance))
        return (rest @ inverse * rest).sum(1)

    near = torch.stack([squared(x - mean, z - means[y]) for mean in means]).amin(0)
    return near - squared(x - z.mean(0), z - z.mean(0))


@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_it_adds_the_log_shares_of_held_out_examples_that_are_as_unusual(method: str) -> None:
    model = fitted(method)
    latent = model.head.latent  # type: ignore[union-attr]
    x = HELD_OUT[0]
    prediction = model.predict(x)
    z, train = (latent.normalizer.normalized(part).double() for part in (x, TRAIN[0]))
    energy = -(model.latent(x).mean / model.temperature).logsumexp(1)
    parts = [energy, prediction.model_uncertainty, textbook_distance(train, TRAIN[1], z)]
    shares = [(part.double()[:, None] <= part.double()).double().mean(1) for part in parts]
    expected = -sum(share.log() for share in shares)  # type: ignore[union-attr]
    common = torch.stack(shares).amin(0) > 0.12  # beyond, the tail is exponential
    assert int(common.sum()) > 60
    torch.testing.assert_close(prediction.ood_score.double()[common], expected[common], rtol=0, atol=0.15)
    ranks = [values.argsort().argsort() for values in (prediction.ood_score, expected)]
    assert np.corrcoef(*ranks)[0, 1] > 0.98


def test_it_grows_further_away_where_the_model_uncertainty_cannot() -> None:
    model = fitted()
    far = model.predict(torch.cat([ELSEWHERE, 10 * ELSEWHERE]))
    assert float(far.model_uncertainty.max()) < 1.1
    assert float(far.ood_score.min()) > float(model.predict(X).ood_score.max())
    assert bool((far.ood_score[2:] > far.ood_score[:2]).all())


@pytest.mark.parametrize("method", ["sngp", "deterministic"])
def test_models_of_multi_hot_labels_keep_theirs(method: str) -> None:
    model = fitted(method, link="sigmoid")
    assert model.head.ood_score is None
    prediction = model.predict(X)
    field = "model_uncertainty" if method == "sngp" else "total_uncertainty"
    assert torch.equal(prediction.ood_score, getattr(prediction, field))


@pytest.mark.parametrize(
    ("features", "classes", "expected"), [(5000, 3, True), (5001, 3, False), (2, 12_500_001, False)]
)
def test_a_density_that_is_too_large_is_left_out(features: int, classes: int, expected: bool) -> None:
    with torch.device("meta"):
        model = hetsngp.build("deterministic", Features(features), classes)
    assert (model.head.ood_score is not None) == expected


def test_training_after_calibration_is_noticed_without_a_posterior(tmp_path: Path) -> None:
    """The entropy belongs to any weights, the density of the features does not."""
    model = fitted("deterministic")
    model.loss(*TRAIN).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    with pytest.warns(UserWarning, match="trained after fit_posterior"):
        model.predict(X)
    hetsngp.fit_posterior(model, [TRAIN], [HELD_OUT])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(X)


@pytest.mark.parametrize(
    ("method", "options"),
    [("deterministic", {}), ("heteroscedastic", {}), ("hetsngp", {"posterior": "none"})],
    ids=["deterministic", "heteroscedastic", "none"],
)
def test_without_a_posterior_it_has_the_entropy_and_the_distance(
    method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = fitted(method, **options)
    x = HELD_OUT[0]
    prediction = model.predict(x)
    h, train = x.double(), TRAIN[0].double()
    if options:
        normalizer = model.head.latent.normalizer  # type: ignore[union-attr]
        h, train = (normalizer.normalized(part).double() for part in (x, TRAIN[0]))
    parts = [prediction.total_uncertainty, textbook_distance(train, TRAIN[1], h)]
    shares = [(part.double()[:, None] <= part.double()).double().mean(1) for part in parts]
    expected = -sum(share.log() for share in shares)  # type: ignore[union-attr]
    common = torch.stack(shares).amin(0) > 0.12
    assert int(common.sum()) > 60
    torch.testing.assert_close(prediction.ood_score.double()[common], expected[common], rtol=0, atol=0.1)
    far = model.predict(torch.cat([ELSEWHERE, 10 * ELSEWHERE])).ood_score
    hetsngp.save(model, tmp_path / "model")
    loaded = hetsngp.load(tmp_path / "model", backbone=Features(2, "mlp"))
    assert torch.equal(loaded.predict(x).ood_score, prediction.ood_score)
    if method == "deterministic":  # confident and far from every class, whatever its entropy
        assert float(far.min()) > float(prediction.ood_score.max())
    hetsngp.fit_posterior(model, [TRAIN])
    assert torch.equal(model.predict(x).ood_score, model.predict(x).total_uncertainty)


def test_an_ensemble_without_posteriors_calls_unfamiliar_what_its_members_disagree_on() -> None:
    """Entropy is in its score, and ambiguous inputs are not unfamiliar."""
    ensemble = hetsngp.Ensemble([fitted("deterministic"), fitted("heteroscedastic")])
    thresholds = set_thresholds(ensemble.predict(HELD_OUT[0]), HELD_OUT[1])
    assert thresholds.score == "model_uncertainty"
    one = set_thresholds(fitted("deterministic").predict(HELD_OUT[0]), HELD_OUT[1])
    assert one.unfamiliar is None


def test_without_held_out_data_it_is_the_model_uncertainty() -> None:
    model = fitted()
    assert not torch.equal(model.predict(X).ood_score, model.predict(X).model_uncertainty)
    hetsngp.fit_posterior(model, [TRAIN])
    assert torch.equal(model.predict(X).ood_score, model.predict(X).model_uncertainty)


def test_it_is_saved_copied_and_moved(tmp_path: Path) -> None:
    model = fitted()
    expected = model.predict(ELSEWHERE).ood_score
    hetsngp.save(model, tmp_path / "model")
    loaded = hetsngp.load(tmp_path / "model", backbone=Features(2, "mlp"))
    assert isinstance(loaded, hetsngp.Classifier)
    for other in (loaded, copy.deepcopy(model)):
        assert torch.equal(other.predict(ELSEWHERE).ood_score, expected)
    wide = model.double().predict(ELSEWHERE.double()).ood_score
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["hetsngp", "deterministic"])
def test_it_is_exported_with_a_dynamic_batch(method: str) -> None:
    model = fitted(method)
    module = model.prediction_module()
    program = torch.export.export(module, (X[:4],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    found = program.module()(torch.cat([X, ELSEWHERE]))["ood_score"]
    torch.testing.assert_close(
        found, model.predict(torch.cat([X, ELSEWHERE])).ood_score, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("calibrated", [True, False])
def test_weights_can_be_assigned_to_a_model_on_the_meta_device(calibrated: bool) -> None:
    model = fitted("sngp")
    if not calibrated:
        hetsngp.fit_posterior(model, [TRAIN])
    with torch.device("meta"):
        other = hetsngp.build("sngp", Features(2, "mlp"), 3, **toy.TINY)
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other.to("cpu").predict(X).ood_score, model.predict(X).ood_score)


def test_an_ensemble_of_calibrated_and_other_members_has_the_model_uncertainty() -> None:
    """The scores of its members have different units."""
    members = [fitted("sngp"), fitted("hetsngp")]
    both = hetsngp.Ensemble(members).predict(ELSEWHERE)
    assert float(both.ood_score.min()) > 10
    hetsngp.fit_posterior(members[1], [TRAIN])
    mixed = hetsngp.Ensemble(members).predict(ELSEWHERE)
    assert torch.equal(mixed.ood_score, mixed.model_uncertainty)


def test_few_held_out_examples_leave_the_model_uncertainty() -> None:
    model = trained("sngp")
    hetsngp.fit_posterior(model, [TRAIN], [(X[1:20:2], Y[1:20:2])])
    assert torch.equal(model.predict(X).ood_score, model.predict(X).model_uncertainty)


def test_saved_tensors_that_do_not_belong_together_are_refused() -> None:
    state = fitted().state_dict()
    for name, value in (
        ("head.ood.precisions", torch.ones(7)),
        ("head.ood.center", torch.zeros(9)),
        ("head.ood.knots", None),
    ):
        changed = {k: v for k, v in {**state, name: value}.items() if v is not None}
        with pytest.raises(RuntimeError, match=r"OOD score in head\.ood (has shapes|lacks)"):
            trained().load_state_dict(changed)


def test_an_error_while_fitting_leaves_the_score_as_it_was() -> None:
    model = fitted()
    expected = model.predict(ELSEWHERE).ood_score
    with pytest.raises(ValueError, match="labels"):
        hetsngp.fit_posterior(model, [(X, Y + 5)], [HELD_OUT])
    assert torch.equal(model.predict(ELSEWHERE).ood_score, expected)


def test_soft_targets_that_are_one_hot_give_the_same_score() -> None:
    model = fitted()
    expected = model.predict(X).ood_score
    one_hot = [(x, torch.nn.functional.one_hot(y, 3).float()) for x, y in (TRAIN, HELD_OUT)]
    hetsngp.fit_posterior(model, one_hot[:1], one_hot[1:])
    torch.testing.assert_close(model.predict(X).ood_score, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("method", ["sngp", "deterministic"])
def test_folds_give_their_held_out_scores_to_the_model_of_all_data(method: str) -> None:
    """One fold of the training data, with the examples held out from it: what ``fit_posterior`` does."""
    model = trained(method)
    cross_fit_posterior(model, [TRAIN], [(copy.deepcopy(model), [TRAIN], [HELD_OUT])])
    expected = fitted(method).predict(X).ood_score
    assert not torch.equal(expected, fitted(method).predict(X).total_uncertainty)
    torch.testing.assert_close(model.predict(X).ood_score, expected, rtol=1e-4, atol=1e-4)


def test_sums_of_several_processes_have_those_of_the_density() -> None:
    head = trained("sngp").head
    assert isinstance(head, GaussianHead)
    classes = head.class_sums(*TRAIN)
    total = Statistics(1.0, torch.eye(2).double(), torch.eye(3), classes)
    reduced = total.reduced(lambda tensor: 2 * tensor)
    assert isinstance(reduced.classes, ClassSums)
    for twice, once in zip(reduced.classes, classes, strict=True):
        assert torch.equal(twice, 2 * once)
    added = total + total
    assert added.classes is not None
    assert torch.equal(added.classes.squares, 2 * classes.squares)


def test_an_ensemble_is_scored_under_its_common_temperature() -> None:
    """The tables of members belong to the temperatures that they predict with."""
    ensemble = hetsngp.Ensemble([trained("sngp"), trained("hetsngp")])
    hetsngp.fit_posterior(ensemble, [TRAIN], [HELD_OUT])
    for member in ensemble.members:
        score = member.head.ood_score
        assert score is not None
        before = score.knots.clone()
        with torch.no_grad():
            score.fit_tables(member.eval().head.ood_parts(HELD_OUT[0]))
        torch.testing.assert_close(score.knots, before, rtol=1e-4, atol=1e-5)
