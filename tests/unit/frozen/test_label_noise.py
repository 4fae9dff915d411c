"""Out-of-sample probabilities of heads on frozen features, and corrected labels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract import toy
from tests.unit.labels.made_noise import alike, draw
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import hetsngp
from hetsngp import FeatureSet, correct_labels, fit_head, out_of_sample_probs
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import DeviceLoader
from hetsngp.frozen import label_noise
from hetsngp.frozen.label_noise import AMPLITUDES, _FrozenCrossFit


def noisy_blobs(per_class: int, rate: float = 0.25, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (n, 2) of three classes, given labels and true labels."""
    x, true = toy.blobs(3, per_class, seed=seed)
    given = draw(alike(3, rate)[true.numpy()], np.random.default_rng(seed))
    return x, torch.from_numpy(given), true


X, GIVEN, TRUE = noisy_blobs(60)
DATA = [(X, GIVEN)]
FITTED: dict[str, Any] = {"amplitude": 3.0}
"""Without a choice of the amplitude."""


def nll(probs: Any, labels: Tensor) -> float:
    return float(-np.log(probs[np.arange(len(labels)), labels.numpy()]).mean())


# --- leave-one-out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_each_example_is_predicted_as_by_a_fit_without_it(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against fits that really leave it out, and apart from what the head says that was fitted to it."""
    x, given, _ = noisy_blobs(30)
    model = toy.frozen(method)
    of = functools.partial(_FrozenCrossFit.of, model, [(x, given)], None, 0, False)
    fitter, every = of({**FITTED}), np.ones(90, dtype=bool)
    assert fitter.how == "leave-one-out"
    found = fitter(given.numpy(), every, None)
    some = list(range(0, 90, 3 if method == "sngp" else 9))
    exact = np.empty((len(some), 3))
    for place, row in enumerate(some):
        rest = every.copy()
        rest[row] = False
        exact[place] = fitter(given.numpy(), rest, None)[row]
    monkeypatch.setattr(
        label_noise, "leave_one_out_shift", lambda _, h, *rest, **_more: h.new_zeros(len(h), 3)
    )
    monkeypatch.setattr(label_noise, "OPTIMISTIC", float("inf"))  # else folds would take its place
    seen = of({**FITTED})(given.numpy(), every, None)
    error, change = np.abs(found[some] - exact).mean(), np.abs(seen[some] - exact).mean()
    assert change > 0.01
    assert error < 0.5 * change


def test_it_is_near_what_folds_say() -> None:
    by_fit = out_of_sample_probs(toy.frozen("sngp"), DATA, **FITTED)
    by_folds = out_of_sample_probs(toy.frozen("sngp"), DATA, folds=20, **FITTED)
    assert (by_fit.how, by_folds.how) == ("leave-one-out", "20 folds (as asked)")
    assert np.abs(by_fit.probs - by_folds.probs).mean() < 0.03
    assert abs(nll(by_fit.probs, GIVEN) - nll(by_folds.probs, GIVEN)) < 0.03


def test_probabilities_are_those_of_given_labels() -> None:
    found = out_of_sample_probs(toy.frozen("sngp"), DATA)
    assert isinstance(found.probs, np.ndarray)
    assert found.probs.shape == (180, 3)
    np.testing.assert_allclose(found.probs.sum(1), 1, rtol=1e-5)
    # Calibrated for labels of which a quarter are wrong, so not certain of any.
    rate = float((found.probs.argmax(1) == GIVEN.numpy()).mean())
    assert found.probs.max(1).mean() == pytest.approx(rate, abs=0.08)
    errors = hetsngp.find_label_errors(GIVEN.numpy(), found.probs)
    assert (errors.is_wrong == (GIVEN != TRUE).numpy()).mean() > 0.95


# --- examples that occur several times ----------------------------------------------------------------------


def with_copies(lonely: int) -> tuple[Tensor, Tensor, Tensor]:
    """The blobs, and ``lonely`` inputs around them, twice each, with random labels; which rows these are."""
    rng = np.random.default_rng(3)
    where = torch.from_numpy(rng.uniform(-6, 6, (lonely, 2))).float()
    label = torch.from_numpy(rng.integers(3, size=lonely))
    x, y = torch.cat([X, where, where]), torch.cat([GIVEN, label, label])
    return x, y, torch.arange(len(x)) >= len(X)


@pytest.mark.parametrize("lonely", [15, 60])
def test_a_copy_does_not_tell_the_label(lonely: int) -> None:
    """Random labels cannot be predicted better than by chance: two of three are missed."""
    x, y, copies = with_copies(lonely)
    found = out_of_sample_probs(toy.frozen("sngp"), [(x, y)], amplitude=10.0, length_scale=0.3)
    assert found.how.startswith("leave-one-out" if lonely == 15 else "5 folds (many examples occur several")
    hit = (found.probs.argmax(1) == y.numpy())[copies][:lonely].mean()
    assert hit < 1 / 3 + 4 * np.sqrt(2 / 9 / lonely)
    assert nll(found.probs[copies], y[copies]) > 0.9
    first, second = found.probs[copies][:lonely], found.probs[copies][lonely:]
    np.testing.assert_allclose(first, second, atol=1e-4)


# --- the amplitude ------------------------------------------------------------------------------------------


def test_the_amplitude_is_the_one_that_predicts_given_labels_best() -> None:
    found = out_of_sample_probs(toy.frozen("sngp"), DATA)
    each = {a: out_of_sample_probs(toy.frozen("sngp"), DATA, amplitude=a) for a in AMPLITUDES}
    place = AMPLITUDES.index(found.amplitude)
    loss = [nll(each[a].probs, GIVEN) for a in AMPLITUDES]
    assert all(loss[place] <= loss[other] for other in (place - 1, place + 1) if 0 <= other < len(loss))
    assert max(loss) > min(loss) + 0.005
    np.testing.assert_allclose(found.probs, each[found.amplitude].probs, atol=1e-5)


def test_a_given_amplitude_is_kept() -> None:
    assert out_of_sample_probs(toy.frozen("sngp"), DATA, amplitude=7.0).amplitude == 7.0
    assert out_of_sample_probs(toy.frozen("sngp", amplitude=6.0), DATA).amplitude == 6.0


# --- folds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "how"),
    [
        ("sngp", {"folds": 3}, "3 folds (as asked)"),
        ("sngp", {"features": "random"}, "5 folds (leave-one-out is for a GP on frozen features)"),
        ("deterministic", {}, "5 folds (leave-one-out is for a GP on frozen features)"),
        (
            "sngp",
            {"likelihood": "mean_log"},
            "5 folds (leave-one-out is for one member and likelihood='log_mean')",
        ),
    ],
    ids=["asked", "random", "deterministic", "mean_log"],
)
def test_folds_say_why(method: str, options: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_noise, "MIN_STEPS", 400)
    x, given, true = noisy_blobs(20)
    gp = FITTED if method == "sngp" else {}
    found = out_of_sample_probs(toy.frozen(method), [(x, given)], **gp, **options)
    assert found.how == how
    assert found.probs.shape == (60, 3)
    np.testing.assert_allclose(found.probs.sum(1), 1, rtol=1e-5)
    assert (found.probs.argmax(1) == true.numpy()).mean() > 0.8
    assert (found.amplitude is None) == (method == "deterministic")


def test_folds_where_leave_one_out_would_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_noise, "MOST_OPERATIONS", 1e3)
    found = out_of_sample_probs(toy.frozen("sngp"), DATA, **FITTED)
    assert found.how == "5 folds (leave-one-out would take longer)"


def test_the_gradients_of_label_noise_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_noise, "MOST_OPERATIONS", 9 * len(X) * label_noise.NOISE_OPERATIONS)
    how = [out_of_sample_probs(toy.frozen(m), DATA, **FITTED).how for m in ("sngp", "hetsngp")]
    assert how == ["leave-one-out", "5 folds (leave-one-out would take longer)"]


def test_leave_one_out_that_is_too_optimistic_chooses_no_amplitude() -> None:
    """Labels of fifty classes, a fifth of them wrong: a large amplitude memorises these, and leave-one-out
    then predicts them better than any model that was not trained on them.
    """
    rng = np.random.default_rng(0)
    centres, true = rng.normal(size=(50, 8)), np.repeat(np.arange(50), 30)
    x = torch.from_numpy(centres[true] + 0.35 * rng.normal(size=(1500, 8))).float()
    given = draw(alike(50, 0.2)[true], rng)
    model = hetsngp.convert(torch.nn.Linear(8, 50), "sngp", x[:2], freeze=True, normalization="rms")
    features = FeatureSet(x, torch.from_numpy(given))
    for options, how in (
        ({}, "leave-one-out"),
        ({"amplitude": 10.0}, "5 folds (leave-one-out would be too optimistic)"),
    ):
        found = out_of_sample_probs(model, features, random_features=128, **options)
        assert found.how == how
        assert options or found.amplitude in (0.5, 1.0, 2.0)
        errors = hetsngp.find_label_errors(given, found.probs)
        low, high = errors.expected_wrong_interval
        assert low <= (given != true).sum() <= high
        assert (errors.is_wrong == (given != true)).mean() > 0.95


def test_in_folds_an_example_is_predicted_by_models_of_the_others() -> None:
    """Another label changes the predictions of others, and not its own but by the common temperature."""
    given = GIVEN.clone()
    given[17] = (given[17] + 1) % 3
    before, after = (
        out_of_sample_probs(toy.frozen("sngp"), [(X, y)], folds=4, **FITTED).probs for y in (GIVEN, given)
    )
    own, others = np.abs(before - after)[17].max(), np.abs(before - after).max()
    assert own < 0.3 * others


# --- what is given ------------------------------------------------------------------------------------------


def test_features_and_loaders_and_batches_are_alike() -> None:
    model = toy.frozen("sngp")
    features = hetsngp.extract_features(model, DATA)
    expected = out_of_sample_probs(model, DATA, **FITTED).probs
    for data in (features, toy.loader(X, GIVEN), [(X, GIVEN, torch.ones(180))]):
        np.testing.assert_allclose(out_of_sample_probs(model, data, **FITTED).probs, expected, atol=1e-4)


def test_examples_of_weight_zero_are_left_out() -> None:
    weight = torch.ones(180)
    weight[::3] = 0
    kept = weight > 0
    found = correct_labels(toy.frozen("sngp"), [(X, GIVEN, weight)], rounds=1, **FITTED)
    alone = correct_labels(toy.frozen("sngp"), [(X[kept], GIVEN[kept])], rounds=1, **FITTED)
    assert len(found.errors) == 120
    np.testing.assert_allclose(found.probs, alone.probs, atol=1e-4)
    weight[1] = 2
    weighted = correct_labels(toy.frozen("sngp"), [(X, GIVEN, weight)], rounds=1, **FITTED)
    assert weighted.features is not None
    assert torch.equal(weighted.features.weight, weight[kept])


@pytest.mark.parametrize("weight", [0.2, 5.0])
def test_weights_of_another_scale_do_not_tell_the_label(weight: float) -> None:
    """Against folds: an example of weight five is left out as a whole."""
    data = [(X, GIVEN, torch.full((180,), weight))]
    by_fit = out_of_sample_probs(toy.frozen("sngp"), data, **FITTED)
    by_folds = out_of_sample_probs(toy.frozen("sngp"), data, folds=20, **FITTED)
    assert abs(nll(by_fit.probs, GIVEN) - nll(by_folds.probs, GIVEN)) < 0.04


def test_two_classes_are_predicted_as_by_folds() -> None:
    x, true = toy.blobs(2, 100)
    given = torch.from_numpy(draw(alike(2, 0.3)[true.numpy()], np.random.default_rng(0)))
    options = {"amplitude": 5.0, "random_features": 64}
    by_fit = out_of_sample_probs(toy.frozen("sngp", classes=2), [(x, given)], **options)
    by_folds = out_of_sample_probs(toy.frozen("sngp", classes=2), [(x, given)], folds=20, **options)
    assert np.abs(by_fit.probs - by_folds.probs).mean() < 0.03
    assert abs(nll(by_fit.probs, given) - nll(by_folds.probs, given)) < 0.02


def test_labels_that_are_not_trained_on_have_no_part_in_folds() -> None:
    """Neither in training nor in the choice of epochs and temperature."""
    trained = np.ones(180, dtype=bool)
    trained[::7] = False
    fitter = _FrozenCrossFit.of(toy.frozen("sngp"), DATA, 4, 0, False, {**FITTED})
    other = GIVEN.numpy().copy()
    other[~trained] = (other[~trained] + 1) % 3
    first, second = (fitter(targets, trained, None) for targets in (GIVEN.numpy(), other))
    np.testing.assert_array_equal(first, second)


def test_the_model_and_the_global_random_state_stay_as_they_are() -> None:
    model = toy.frozen("sngp")
    before, state = toy.weights(model), torch.get_rng_state()
    out_of_sample_probs(model, DATA)
    toy.assert_same(before, toy.weights(model))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training


def test_the_same_seed_gives_the_same_result() -> None:
    first, again = (correct_labels(toy.frozen("sngp", random_features=16), DATA, rounds=2) for _ in range(2))
    assert (first.errors.clean_probs == again.errors.clean_probs).all()
    assert first.losses == again.losses
    folds = [
        out_of_sample_probs(toy.frozen("sngp"), DATA, folds=3, seed=s, **FITTED).probs for s in (0, 0, 1)
    ]
    assert (folds[0] == folds[1]).all()
    assert (folds[0] != folds[2]).any()


ONE_HOT = torch.nn.functional.one_hot(GIVEN, 3)


@pytest.mark.parametrize("call", [out_of_sample_probs, correct_labels])
@pytest.mark.parametrize(
    ("data", "options", "error", "words"),
    [
        ([(X, 0.9 * ONE_HOT + 0.1 / 3)], {}, ValueError, "soft targets"),
        ([(X, ONE_HOT.float())], {"link": "sigmoid"}, ValueError, "multi-hot"),
        (DATA, {"folds": 1}, ValueError, "folds must be at least 2"),
        (DATA, {"folds": 2.5}, ValueError, "folds"),
        (DATA, {"seed": -1}, ValueError, "seed"),
        ([(X[:3], GIVEN[:3])], {"folds": 5}, ValueError, "3 different examples.*5 folds"),
        ([(X[:1].expand(6, 2), GIVEN[:6])], {}, ValueError, "1 different examples.*5 folds"),
        ([], {}, ValueError, "empty|no batch|yields"),
        (DATA, {"method": "mimo"}, ValueError, "mimo"),
        (FeatureSet(torch.zeros(5, 3), GIVEN[:5]), {}, ValueError, r"\(n, 16\)"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_names_the_fix(
    call: Any, data: Any, options: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(toy.frozen("sngp"), data, **options)


@pytest.mark.parametrize("call", [out_of_sample_probs, correct_labels])
@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch sampler", "device loader"])
def test_data_in_a_random_order_are_refused(call: Any, kind: str) -> None:
    """Their results could not be matched with the examples."""
    data = TensorDataset(X, GIVEN)
    images = ImageArrays(torch.arange(720).view(180, 1, 2, 2).byte(), GIVEN, ("a", "b", "c"))
    loaders: dict[str, Any] = {
        "shuffle": lambda: DataLoader(data, 30, shuffle=True),
        "sampler": lambda: DataLoader(data, 30, sampler=SubsetRandomSampler(range(180))),
        "batch sampler": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 30, False)),
        "device loader": lambda: DeviceLoader(images, 30, shuffle=True),
    }
    with pytest.raises(ValueError, match=r"random order.*shuffle=False"):
        call(toy.frozen("sngp"), loaders[kind](), **FITTED)
    in_order = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 30, False))
    if call is out_of_sample_probs:
        found = call(toy.frozen("sngp"), in_order, **FITTED).probs
        np.testing.assert_allclose(found, call(toy.frozen("sngp"), DATA, **FITTED).probs, atol=1e-4)


def test_a_plain_network_is_refused() -> None:
    with pytest.raises(TypeError, match=r"hetsngp\.convert"):
        out_of_sample_probs(torch.nn.Linear(2, 3), DATA)  # type: ignore[arg-type]


# --- corrected labels ---------------------------------------------------------------------------------------


def test_corrected_labels_train_a_better_head() -> None:
    """Accuracy on clean test examples, with 40 % of the training labels wrong."""
    x, given, true = noisy_blobs(150, 0.4)
    x_test, y_test = toy.blobs(3, 300, seed=9)
    found = correct_labels(toy.frozen("sngp"), [(x, given)])
    assert (found.errors.suggested == true.numpy()).mean() > 0.95
    accuracies = []
    for data in ([(x, given)], found.features):
        model = toy.frozen("sngp")
        fit_head(model, data, amplitude=10.0 if isinstance(data, list) else found.amplitude)
        accuracies.append(float((model.predict(x_test).labels == y_test).float().mean()))
    assert accuracies[1] > accuracies[0] + 0.02
    assert accuracies[1] > 0.97


def test_targets_and_class_numbers_calibrate_together() -> None:
    """A clean held-out set beside corrected targets, and the reverse: as if both were targets."""
    x, given, _ = noisy_blobs(50)
    targets = 0.8 * torch.eye(3)[given] + 0.2 / 3
    x_other, y_other = toy.blobs(3, 40, seed=9)
    soft = torch.eye(3)[y_other]
    for train, held_out, as_targets in (
        ([(x, targets)], [(x_other, y_other)], ([(x, targets)], [(x_other, soft)])),
        ([(x, given)], [(x_other, soft)], ([(x, torch.eye(3)[given])], [(x_other, soft)])),
    ):
        temperatures = []
        for data in ((train, held_out), as_targets):
            model = toy.frozen("sngp")
            fit_head(model, *data, amplitude=3.0)
            temperatures.append(float(model.temperature))
        assert temperatures[0] == pytest.approx(temperatures[1], rel=1e-3)


def test_the_parts_of_the_correction_agree() -> None:
    model = toy.frozen("sngp")
    seen: list[Any] = []
    found = correct_labels(model, DATA, on_round=lambda *args: seen.append(args))
    assert found.how == "leave-one-out"
    assert [number for number, _, _ in seen] == list(range(1, len(found.losses) + 1))
    assert found.errors is seen[found.round - 1][1]
    assert found.amplitude in AMPLITUDES
    assert found.features is not None
    torch.testing.assert_close(found.features.h, hetsngp.extract_features(model, DATA).h)
    assert (found.features.y.numpy() == found.errors.clean_probs).all()
    assert found.features.weight is None
    assert f"round {found.round} " in str(found)


def test_labels_of_validation_examples_train_nothing() -> None:
    """Labels of the tenth that compares rounds do not change how examples are predicted."""
    x, given, _ = noisy_blobs(667)
    validation = hetsngp.labels.rounds._validation(len(given), 0)
    assert validation.sum() == 200
    other = given.clone()
    other[validation] = (other[validation] + 1) % 3
    first, second = (
        correct_labels(toy.frozen("sngp", random_features=16), [(x, y)], rounds=1, **FITTED).probs
        for y in (given, other)
    )
    np.testing.assert_array_equal(first, second)
