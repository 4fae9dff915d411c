"""evaluate: its numbers are those of the predictions, it keeps little, goes on where it was, and refuses."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from tests.contract import toy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp import metrics
from hetsngp.data.class_maps import ClassMap
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import Augmentation, DeviceLoader
from hetsngp.evaluation import evaluate, restrict
from hetsngp.evaluation import report as reports
from hetsngp.evaluation.set_evaluation import EvaluationProgress
from hetsngp.evaluation.set_predictions import OF_PROBS, SCORES
from hetsngp.locking import FolderInUse
from hetsngp.types import Prediction

N = 60


def some_prediction(seed: int, classes: int = 4, rows: int = N) -> Prediction:
    g = torch.Generator().manual_seed(seed)
    values: dict[str, Any] = {f.name: torch.rand(rows, generator=g) for f in fields(Prediction)}
    values["model_uncertainty"] = values["model_uncertainty"] + values["member_uncertainty"]
    for name in ("probs", "clean_probs"):
        values[name] = torch.softmax(2 * torch.randn(rows, classes, generator=g), -1)
    return Prediction(**values)


class Told:
    """A model whose answers are known: x (B, 1) holds the numbers of rows of ``prediction``."""

    def __init__(self, prediction: Prediction, device: str = "cpu") -> None:
        self.prediction, self.device = prediction, torch.device(device)
        self.rows: list[int] = []
        self.options: list[dict[str, Any]] = []

    def predict(self, x: Any, **options: Any) -> Prediction:
        x = x["rows"] if isinstance(x, Mapping) else x
        assert x.device == self.device
        self.rows.append(len(x))
        self.options.append(options)
        index = torch.arange(self.start, self.start + len(x)) if x.is_meta else x[:, 0].long()
        return self.prediction[index]

    start = 0

    def fingerprint(self) -> str:
        return str(self.prediction.probs.tolist())


ROWS = torch.arange(float(N))[:, None]
LABELS = torch.arange(N) % 4


def batches(x: Tensor, y: Tensor | None = None, size: int = 7) -> list[Any]:
    return list(x.split(size)) if y is None else list(zip(x.split(size), y.split(size), strict=True))


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take seconds, and have tests of their own."""
    monkeypatch.setattr(reports, "draw_report", lambda report, folder: {})


@pytest.fixture
def told() -> Told:
    return Told(some_prediction(0, rows=3 * N))


# --- the numbers ----------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_predictions(told: Told) -> None:
    p, y = told.prediction, LABELS
    corrupted = {("fog", 1): batches(ROWS + N, y), ("fog", 3): batches(ROWS + 2 * N, y)}
    corrupted[("snow", 1)] = batches(ROWS + N + 5, y)
    report = evaluate(told, batches(ROWS, y), {"far": batches(ROWS + N)}, corrupted, num_bins=10)
    inside, outside, third = p[:N], p[N : 2 * N], p[2 * N :]
    assert report.id.examples == N
    assert report.id.accuracy == pytest.approx(metrics.accuracy(inside.probs, y), abs=1e-6)
    assert report.id.nll == pytest.approx(metrics.nll(inside.probs, y), abs=1e-12)
    assert report.id.ece == pytest.approx(metrics.ece(inside.probs, y, 10), abs=1e-12)
    assert report.id.brier == pytest.approx(metrics.brier(inside.probs, y), abs=1e-12)
    assert report.id.confidence == pytest.approx(float(inside.confidence.double().mean()), abs=1e-12)
    assert report.id.overconfidence == pytest.approx(report.id.confidence - report.id.accuracy, abs=1e-12)
    interval = binomtest(round(N * report.id.accuracy), N).proportion_ci(0.6826894921, method="wilson")
    half = (interval.high - interval.low) / 2
    assert report.id.accuracy_standard_error == pytest.approx(half, abs=1e-9)
    c = inside.confidence.double()
    chance = float((c * (1 - c)).mean() / N) ** 0.5
    assert report.id.overconfidence_standard_error == pytest.approx(chance, rel=1e-9)
    assert report.scores == SCORES
    correct = inside.probs.argmax(1) == y
    for name in SCORES:
        near, far = (
            1 - each.confidence if name == "one_minus_confidence" else getattr(each, name)
            for each in (inside, outside)
        )
        found = report.ood["far"].scores[name]
        assert found.auroc == pytest.approx(metrics.auroc(near, far), abs=1e-12)
        assert found.aupr_out == pytest.approx(metrics.aupr(near, far), abs=1e-12)
        assert found.aupr_in == pytest.approx(metrics.aupr(-far, -near), abs=1e-12)
        assert found.fpr95 == pytest.approx(metrics.fpr95(near, far), abs=1e-12)
        assert report.ood["far"].mean_scores[name] == pytest.approx(float(far.mean()), abs=1e-6)
        assert report.mean_scores[name] == pytest.approx(float(near.mean()), abs=1e-6)
        chosen = report.selection[name]
        assert chosen.aurc == pytest.approx(metrics.aurc(near, correct), abs=1e-12)
        assert chosen.excess_aurc == pytest.approx(metrics.excess_aurc(near, correct), abs=1e-12)
        for share in (0.8, 0.9, 0.95):
            expected = metrics.accuracy_at_coverage(near, correct, share)
            assert chosen.accuracy_at_coverage[f"{share:.2f}"] == pytest.approx(expected, abs=1e-12)
    by = report.corrupted
    assert by is not None
    fog = [metrics.accuracy(each.probs, y) for each in (outside, third)]
    snow = metrics.accuracy(p[N + 5 : 2 * N + 5].probs, y)
    assert [each.quality.accuracy for each in by.sets] == pytest.approx([*fog, snow], abs=1e-6)
    assert by.by_corruption["fog"].accuracy == pytest.approx(sum(fog) / 2, abs=1e-6)
    assert by.by_severity[1].accuracy == pytest.approx((fog[0] + snow) / 2, abs=1e-6)
    assert list(by.by_severity) == [1, 3]
    assert by.mean.accuracy == pytest.approx((sum(fog) + snow) / 3, abs=1e-6)
    assert by.mean.sets == 3
    nll = [metrics.nll(each.probs, y) for each in (outside, third, p[N + 5 : 2 * N + 5])]
    assert by.mean.nll == pytest.approx(sum(nll) / 3, abs=1e-12)
    uncertainty = float(third.data_uncertainty.double().mean())
    assert by.by_severity[3].scores["data_uncertainty"] == pytest.approx(uncertainty, abs=1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        lambda x, y: batches(x, y, size=N),
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=13),
        lambda x, y: (batch for batch in batches(x, y)),
        lambda x, y: [{"rows": a, "labels": b} for a, b in batches(x, y)],
    ],
    ids=["one batch", "DataLoader", "generator", "dicts"],
)
def test_any_loader_gives_the_same(told: Told, kind: Callable[[Tensor, Tensor], Any]) -> None:
    expected = evaluate(told, batches(ROWS, LABELS), {"far": batches(ROWS + N)})
    report = evaluate(told, kind(ROWS, LABELS), {"far": kind(ROWS + N, LABELS)})
    assert report.id == expected.id
    assert report.ood == expected.ood


def test_outside_rows_need_no_labels(told: Told) -> None:
    """x alone, in a list of one as TensorDataset(x) gives it, or with labels of other classes."""
    far = ROWS + N
    expected = evaluate(told, batches(ROWS, LABELS), {"far": batches(far)})
    alone = DataLoader(TensorDataset(far), batch_size=9)
    strange = batches(far, torch.full((N,), 77))
    tables = [{"rows": part} for part in batches(far)]
    report = evaluate(told, batches(ROWS, LABELS), {"a": alone, "b": strange, "c": tables})
    assert report.ood["a"] == report.ood["b"] == report.ood["c"] == expected.ood["far"]


def test_scores_that_say_nothing_are_not_offered(told: Told) -> None:
    p = told.prediction
    told.prediction = Prediction(
        **{f.name: getattr(p, f.name) for f in fields(Prediction)}
        | {
            "member_uncertainty": torch.zeros(3 * N),
            "latent_variance": torch.full((3 * N,), 0.3),
            "ood_score": p.model_uncertainty,
        }
    )
    report = evaluate(told, batches(ROWS, LABELS), {"far": batches(ROWS + N)})
    left = ("total_uncertainty", "data_uncertainty", "model_uncertainty")
    assert report.scores == ("ood_score", *left, "one_minus_confidence")
    assert report.ood["far"].scores["ood_score"] == report.ood["far"].scores["model_uncertainty"]


def test_the_rounding_of_a_difference_is_no_score(told: Told) -> None:
    """Members are all there is: model − member is 0 but for float32."""
    g = torch.Generator().manual_seed(1)
    p = told.prediction
    noise = 1 + 1e-7 * torch.randn(3 * N, generator=g)
    values = {f.name: getattr(p, f.name) for f in fields(Prediction)}
    told.prediction = Prediction(**values | {"member_uncertainty": p.model_uncertainty * noise})
    assert float(told.prediction.function_uncertainty.abs().max()) > 0
    report = evaluate(told, batches(ROWS, LABELS))
    assert "function_uncertainty" not in report.scores
    assert {"model_uncertainty", "member_uncertainty"} <= set(report.scores)


def test_the_rounding_of_two_entropies_is_no_doubt_about_the_model() -> None:
    """total − data where both are the entropy, summed in another way; it is the model's function's too."""
    g = torch.Generator().manual_seed(0)
    probs = torch.softmax(torch.randn(N, 4, generator=g), -1)
    total, data = torch.special.entr(probs).sum(-1), -(probs * probs.log()).sum(-1)
    assert float((total - data).abs().max()) > 0
    given: dict[str, Any] = {f.name: torch.zeros(N) for f in fields(Prediction)}
    given |= {"probs": probs, "clean_probs": probs, "total_uncertainty": total, "ood_score": total}
    told = Told(Prediction(**given | {"data_uncertainty": data, "model_uncertainty": total - data}))
    found = evaluate(told, batches(ROWS, LABELS)).scores
    assert found == ("ood_score", "total_uncertainty", "data_uncertainty", "one_minus_confidence")


def test_without_members_the_function_is_all_there_is_of_the_model(told: Told) -> None:
    values = {f.name: getattr(told.prediction, f.name) for f in fields(Prediction)}
    assert "function_uncertainty" in evaluate(told, batches(ROWS, LABELS)).scores
    told.prediction = Prediction(**values | {"member_uncertainty": torch.zeros(3 * N)})
    found = evaluate(told, batches(ROWS, LABELS)).scores
    assert "model_uncertainty" in found
    assert "function_uncertainty" not in found


def test_small_doubt_is_doubt(told: Told) -> None:
    values = {f.name: getattr(told.prediction, f.name) for f in fields(Prediction)}
    told.prediction = Prediction(**values | {"latent_variance": 1e-12 * values["latent_variance"]})
    assert "latent_variance" in evaluate(told, batches(ROWS, LABELS)).scores


def test_small_confidences_of_many_classes_are_told_apart() -> None:
    """1 − p in float32 would make most of them equal."""
    g = torch.Generator().manual_seed(0)
    p = some_prediction(0, classes=20_000, rows=N)
    probs = torch.softmax(1e-4 * torch.randn(N, 20_000, generator=g), -1)
    model = Told(Prediction(**{f.name: getattr(p, f.name) for f in fields(Prediction)} | {"probs": probs}))
    report = evaluate(model, batches(ROWS, LABELS))
    assert len(report.predictions["id"].scores["one_minus_confidence"].unique()) == len(
        probs.amax(1).unique()
    )


def test_several_labels_a_row(told: Told) -> None:
    g = torch.Generator().manual_seed(2)
    y = (torch.rand(N, 4, generator=g) < 0.4).float()
    report = evaluate(told, batches(ROWS, y), {"far": batches(ROWS + N)}, {("fog", 1): batches(ROWS, y)})
    probs = told.prediction[:N].probs
    assert report.multi_label
    assert report.id.accuracy == pytest.approx(metrics.precision_at_1(probs, y), abs=1e-12)
    assert report.id.nll == pytest.approx(metrics.multi_label_nll(probs, y), abs=1e-6)
    hits = metrics.has_top_class(probs, y)
    assert report.id.ece == pytest.approx(metrics.calibration_error(probs.amax(1), hits), abs=1e-12)
    assert report.id.brier is None
    assert report.corrupted is not None
    assert report.corrupted.mean.brier is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_are_tensors_for_a_network(dtype: type) -> None:
    x, y = toy.blobs(3, 6)
    model = toy.trained("sngp")
    expected = evaluate(model, [(x, y)], {"far": [x + 30]})
    found = evaluate(model, [(x.numpy().astype(dtype), y.numpy())], {"far": [(x + 30).numpy().astype(dtype)]})
    assert found.id == expected.id
    assert found.ood == expected.ood
    some = restrict(model, ClassMap(torch.tensor([2, 0, 1]), ("c", "a", "b"), num_inputs=3))
    assert evaluate(some, [(x.numpy().astype(dtype), y.numpy())]).id.examples == len(x)
    with pytest.raises(TypeError, match=r"id: x is an array of <U1.*numbers"):
        evaluate(model, [(np.array([["a", "b"]]), np.array([0]))])


def test_inputs_go_to_the_models_device() -> None:
    model = Told(some_prediction(0), device="meta")
    report = evaluate(model, [({"rows": ROWS}, LABELS)])
    assert report.id.accuracy == pytest.approx(metrics.accuracy(model.prediction.probs, LABELS), abs=1e-6)


def test_images_are_taken_as_they_are() -> None:
    """A loader for training crops, shuffles and leaves out the last batch; its images are measured whole."""
    g = torch.Generator().manual_seed(0)
    images = ImageArrays(
        torch.randint(256, (10, 1, 4, 4), generator=g).byte(), torch.arange(10) % 3, ("a", "b", "c")
    )

    class Mean:
        def predict(self, x: Tensor) -> Prediction:
            probs = torch.softmax(x.flatten(2).mean(-1) * torch.arange(3.0), -1)
            return Prediction(probs, probs, *(probs[:, 0] for _ in range(7)))

    train = DeviceLoader(images, 4, shuffle=True, augment=Augmentation(crop=1))
    report = evaluate(Mean(), train)
    assert report.id.examples == 10
    assert report.id == evaluate(Mean(), DeviceLoader(images, 10, mean=train.mean, std=train.std)).id


def test_an_estimator_with_labels_of_its_own() -> None:
    pytest.importorskip("sklearn")
    x, y = (part.numpy() for part in toy.blobs(3, 30))
    names = np.array(["ant", "bee", "cow"])[y]
    clf = hetsngp.HetSNGPClassifier(
        epochs=3, width=16, depth=1, random_features=32, rank=2, random_state=0, validation_fraction=0.0
    ).fit(x, names)
    report = evaluate(clf, [(x, names)], {"far": [x + 40]})
    expected = clf.predict_uncertainty(x)
    assert report.id.accuracy == pytest.approx(clf.score(x, names), abs=1e-12)
    assert report.id.nll == pytest.approx(
        metrics.nll(torch.as_tensor(expected.probs), torch.as_tensor(y)), abs=1e-9
    )
    far = clf.predict_uncertainty(x + 40).latent_variance
    assert report.ood["far"].mean_scores["latent_variance"] == pytest.approx(far.mean(), rel=1e-9)
    with pytest.raises(ValueError, match=r"'dog'.*none of the estimator's classes_"):
        evaluate(clf, [(x[:2], np.array(["ant", "dog"]))])
    with pytest.raises(TypeError, match="when it is made"):
        evaluate(clf, [(x, names)], num_samples=4)


# --- restrict -------------------------------------------------------------------------------------------


def test_a_restricted_model_chooses_among_fewer(told: Told) -> None:
    some = ClassMap(torch.tensor([3, 0]), ("three", "zero"), num_inputs=4)
    report = evaluate(restrict(told, some), batches(ROWS, LABELS % 2), {"far": batches(ROWS + N)})
    probs = told.prediction[:N].probs[:, [3, 0]]
    probs = probs / probs.sum(1, keepdim=True)
    assert report.num_classes == 2
    assert report.id.nll == pytest.approx(metrics.nll(probs, LABELS % 2), abs=1e-6)
    whole = evaluate(told, batches(ROWS, LABELS), {"far": batches(ROWS + N)})
    for name in SCORES[:-1]:  # uncertainty is the model's own
        assert report.ood["far"].scores[name] == whole.ood["far"].scores[name]


def test_a_restricted_sigmoid_is_the_softmax_of_what_is_left() -> None:
    model = toy.trained("sngp", link="sigmoid")
    x, y = toy.blobs(3, 6)
    some = restrict(model, ClassMap(torch.tensor([2, 0]), ("c", "a"), num_inputs=3))
    probs = some.predict(x).probs
    odds = model.predict(x).probs[:, [2, 0]]
    odds = odds / (1 - odds)
    assert torch.allclose(probs, odds / odds.sum(1, keepdim=True), atol=1e-5)
    kept = y != 1
    report = evaluate(some, [(x[kept], (y[kept] == 0).long())])
    assert not report.multi_label


def test_restrict_refuses(told: Told) -> None:
    with pytest.raises(TypeError, match=r"ClassMap\.between"):
        restrict(told, [0, 1])
    some = ClassMap(torch.tensor([3, 0]), ("three", "zero"))
    with pytest.raises(TypeError, match="predict"):
        restrict(torch.nn.Linear(2, 2), some)
    with pytest.raises(ValueError, match="softmax"):
        restrict(told, some, normalise="max")


# --- memory ---------------------------------------------------------------------------------------------


class Lazy(Mapping[tuple[str, int], Any]):
    """Makes a loader when asked, and knows how many there are at once."""

    def __init__(self, keys: list[tuple[str, int]]) -> None:
        self._keys = keys
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = self.made = 0

    def __getitem__(self, key: tuple[str, int]) -> Any:
        gc.collect()
        loader = DataLoader(TensorDataset(ROWS + self._keys.index(key), LABELS), batch_size=16)
        self.made += 1
        self.alive.add(loader)
        self.most = max(self.most, len(self.alive))
        return loader

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@pytest.mark.parametrize("keep", [False, True])
def test_corrupted_sets_are_made_one_at_a_time(told: Told, tmp_path: Path, keep: bool) -> None:
    sets = Lazy([(name, severity) for name in ("fog", "snow") for severity in (1, 2, 3)])
    report = evaluate(told, batches(ROWS, LABELS), corrupted=sets, out=tmp_path if keep else None)
    assert sets.made == 6
    assert sets.most == 1
    assert report.corrupted is not None
    assert len(report.corrupted.sets) == 6


def test_a_mapping_that_knows_its_sets_makes_none_twice(told: Told, tmp_path: Path) -> None:
    class Knowing(Lazy):
        version = "1"

        def fingerprint(self, key: tuple[str, int]) -> str:
            return f"{key} {self.version}"

    sets = Knowing([("fog", 1), ("fog", 2)])
    first = evaluate(told, batches(ROWS, LABELS), corrupted=sets, out=tmp_path)
    assert sets.made == 2
    assert evaluate(told, batches(ROWS, LABELS), corrupted=sets, out=tmp_path).corrupted == first.corrupted
    assert sets.made == 2
    sets.version = "2"
    evaluate(told, batches(ROWS, LABELS), corrupted=sets, out=tmp_path)
    assert sets.made == 4
    assert sets.most == 1


def test_a_mapping_that_cannot_tell_has_its_sets_made_and_looked_at(told: Told, tmp_path: Path) -> None:
    class Silent(Lazy):
        shift = 0

        def fingerprint(self, key: tuple[str, int]) -> str | None:
            return None

        def __getitem__(self, key: tuple[str, int]) -> Any:
            super().__getitem__(key)
            return [(ROWS + self.shift, LABELS)]

    sets = Silent([("fog", 1)])
    first = evaluate(told, batches(ROWS, LABELS), corrupted=sets, out=tmp_path)
    told.rows.clear()
    assert evaluate(told, batches(ROWS, LABELS), corrupted=sets, out=tmp_path).corrupted == first.corrupted
    assert told.rows == []
    sets.shift = 5
    assert evaluate(told, batches(ROWS, LABELS), corrupted=sets, out=tmp_path).corrupted != first.corrupted


class Quick(Told):
    """One that gives probabilities alone too."""

    asked = 0

    def predict_probs(self, x: Tensor, **options: Any) -> Tensor:
        self.asked += 1
        self.options.append(options)
        return self.prediction[x[:, 0].long()].probs


def fog_and_snow(x: Tensor, y: Tensor) -> dict[tuple[str, int], Any]:
    return {("fog", 1): batches(x + 0.5, y), ("snow", 3): batches(1.5 * x, y)}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("hetsngp", {}),
        ("sngp", {"link": "sigmoid"}),
        ("posterior_network", {}),
        ("mimo", {}),
        ("ensemble", {}),
    ],
)
def test_without_doubt_corrupted_sets_have_the_same_quality(kind: str, options: dict[str, Any]) -> None:
    x, y = toy.blobs(3, 6)
    y = toy.labels_for(y, 3, options)
    if kind == "ensemble":
        model: Any = hetsngp.Ensemble([toy.trained("sngp"), toy.trained("hetsngp")])
    else:
        model = toy.trained(kind, **options)
    given: dict[str, Any] = {"ood": {"far": [9 * x]}, "corrupted": fog_and_snow(x, y)}
    whole = evaluate(model, [(x, y)], **given)
    quick = evaluate(model, [(x, y)], **given, corrupted_uncertainty=False)
    for name in ("id", "ood", "scores", "selection", "mean_scores"):
        assert getattr(quick, name) == getattr(whole, name)
    for fast, slow in zip(quick.corrupted.sets, whole.corrupted.sets, strict=True):
        for name, value in asdict(slow.quality).items():
            assert getattr(fast.quality, name) == (None if value is None else pytest.approx(value, abs=1e-6))
        assert slow.scores.keys() == set(SCORES)
        assert fast.scores == pytest.approx({name: slow.scores[name] for name in OF_PROBS}, abs=1e-5)
    assert quick.corrupted.mean.scores.keys() == set(OF_PROBS)


def test_without_doubt_predict_is_not_asked_for_corrupted_sets() -> None:
    quick, corrupted = Quick(some_prediction(0, rows=3 * N)), fog_and_snow(ROWS, LABELS)
    evaluate(quick, batches(ROWS, LABELS), None, corrupted, corrupted_uncertainty=False, num_samples=8)
    assert (len(quick.rows), quick.asked) == (PER_PART, 2 * PER_PART)
    assert all(options == {"num_samples": 8} for options in quick.options)
    evaluate(quick, batches(ROWS, LABELS), None, corrupted)
    assert (len(quick.rows), quick.asked) == (4 * PER_PART, 2 * PER_PART)


def test_a_model_that_only_predicts_has_its_doubt(told: Told) -> None:
    corrupted = fog_and_snow(ROWS, LABELS)
    whole = evaluate(told, batches(ROWS, LABELS), None, corrupted)
    quick = evaluate(told, batches(ROWS, LABELS), None, corrupted, corrupted_uncertainty=False)
    assert quick.corrupted == whole.corrupted
    assert whole.corrupted is not None
    assert whole.corrupted.mean.scores.keys() == set(SCORES)


def test_the_entropy_of_fewer_classes_is_not_the_models() -> None:
    model, corrupted = Quick(some_prediction(0, rows=3 * N)), fog_and_snow(ROWS, LABELS % 2)
    some = restrict(model, ClassMap(torch.tensor([3, 1]), ("three", "one")))
    whole = evaluate(some, batches(ROWS, LABELS % 2), None, corrupted).corrupted
    quick = evaluate(some, batches(ROWS, LABELS % 2), None, corrupted, corrupted_uncertainty=False).corrupted
    assert [each.quality for each in quick.sets] == [each.quality for each in whole.sets]
    assert quick.mean.scores == {"one_minus_confidence": whole.mean.scores["one_minus_confidence"]}


def test_with_and_without_doubt_are_parts_of_their_own(tmp_path: Path) -> None:
    quick = Quick(some_prediction(0, rows=3 * N))

    def measured(uncertainty: bool) -> tuple[int, int]:
        quick.rows.clear()
        quick.asked = 0
        report = everything(quick, tmp_path, corrupted_uncertainty=uncertainty)
        assert report.corrupted.mean.scores.keys() == set(SCORES if uncertainty else OF_PROBS)
        return len(quick.rows), quick.asked

    assert measured(True) == (4 * PER_PART, 0)
    assert measured(False) == (0, 2 * PER_PART)
    assert measured(False) == (0, 0)
    assert measured(True) == (2 * PER_PART, 0)


def test_numpys_severities_are_whole_numbers(told: Told) -> None:
    sets = {("fog", np.int64(s)): batches(ROWS + s, LABELS) for s in (1, 3)}
    report = evaluate(told, batches(ROWS, LABELS), corrupted=sets)
    assert report.corrupted is not None
    assert [type(each.severity) for each in report.corrupted.sets] == [int, int]
    assert list(report.to_dict()["corrupted"]["by_severity"]) == ["1", "3"]


def test_no_batch_of_probabilities_outlives_the_next(told: Told) -> None:
    """Bytes of all tensors that are alive, at each call: scores that are views of a batch would hold it."""
    rows, classes = 10, 2000
    alive: list[int] = []

    class Wide:
        def predict(self, x: Tensor) -> Prediction:
            tensors = [each for each in gc.get_objects() if type(each) is Tensor]
            tensors = [each for each in tensors if each.layout == torch.strided and not each.is_nested]
            alive.append(sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))
            probs = torch.full((len(x), classes), 1 / classes)
            return Prediction(probs, probs, *(probs[:, i] for i in range(len(fields(Prediction)) - 2)))

    evaluate(Wide(), [(ROWS[:rows], LABELS[:rows])] * 3, {"far": [ROWS[:rows]] * 3})
    assert len(alive) == 6
    assert alive[-1] - alive[1] < 4 * rows * classes


def test_of_a_row_a_few_numbers_are_kept() -> None:
    rows = 30
    model = Told(some_prediction(0, classes=5000, rows=rows))
    report = evaluate(model, batches(ROWS[:rows], LABELS[:rows]))
    kept = sum(array.nbytes for array in report.predictions["id"].arrays().values())
    assert kept < 8 * rows * (len(SCORES) + 5)


# --- going on -------------------------------------------------------------------------------------------


def everything(model: Any, out: Path, **more: Any) -> Any:
    corrupted = {("fog", s): batches(ROWS + s, LABELS) for s in (1, 2)}
    given = {"id": batches(ROWS, LABELS), "ood": {"far": batches(ROWS + N)}, "corrupted": corrupted}
    return evaluate(model, **{**given, "out": out, **more})


PER_PART = -(-N // 7)


def test_finished_parts_are_not_measured_again(told: Told, tmp_path: Path) -> None:
    first = everything(told, tmp_path)
    assert len(told.rows) == 4 * PER_PART
    again = everything(told, tmp_path)
    assert len(told.rows) == 4 * PER_PART
    assert {**again.to_dict(), "seconds": 0} == {**first.to_dict(), "seconds": 0}
    everything(told, tmp_path, fresh=True)
    assert len(told.rows) == 8 * PER_PART


def test_an_interrupted_evaluation_goes_on(told: Told, tmp_path: Path) -> None:
    whole = everything(told, tmp_path / "whole")
    told.rows.clear()
    predict = told.predict

    def interrupted(x: Any, **options: Any) -> Prediction:
        if len(told.rows) == 2 * PER_PART + 3:  # in the middle of the first corrupted set
            raise KeyboardInterrupt
        return predict(x, **options)

    told.predict = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        everything(told, tmp_path / "cut")
    told.predict = predict  # type: ignore[method-assign]
    told.rows.clear()
    rest = everything(told, tmp_path / "cut")
    assert len(told.rows) == 2 * PER_PART
    assert {**rest.to_dict(), "seconds": 0} == {**whole.to_dict(), "seconds": 0}


def test_what_changed_is_measured_again(told: Told, tmp_path: Path) -> None:
    everything(told, tmp_path)

    def measured(**more: Any) -> int:
        told.rows.clear()
        everything(told, tmp_path, **more)
        return len(told.rows)

    assert measured() == 0
    assert measured(num_samples=8) == 4 * PER_PART
    assert measured(num_samples=8) == 0
    assert measured() == 4 * PER_PART
    assert measured(num_bins=7) == 2 * PER_PART  # corrupted sets are kept as numbers, the others as rows
    assert measured(num_bins=7) == 0
    last = LABELS.clone()
    last[-1] = 3 - last[-1]  # in the last batch only
    assert measured(num_bins=7, id=batches(ROWS, last)) == PER_PART
    assert measured(num_bins=7, id=DataLoader(TensorDataset(ROWS, last), batch_size=7)) == PER_PART
    last = last.clone()
    last[-1] = 3 - last[-1]
    assert measured(num_bins=7, id=DataLoader(TensorDataset(ROWS, last), batch_size=7)) == PER_PART
    assert measured(num_bins=7, id=DataLoader(TensorDataset(ROWS, last), batch_size=7)) == 0
    assert measured(num_bins=7, id=batches(ROWS[:14], LABELS[:14])) == 2
    assert measured(num_bins=7) == PER_PART
    told.prediction = some_prediction(5, rows=3 * N)
    assert measured(num_bins=7) == 4 * PER_PART


def test_a_trained_model_is_another_one(tmp_path: Path) -> None:
    x, y = toy.blobs(3, 6)
    model = toy.trained("sngp")
    before = evaluate(model, [(x, y)], out=tmp_path)
    model.temperature = 3.0
    after = evaluate(model, [(x, y)], out=tmp_path)
    assert after.id.nll == pytest.approx(metrics.nll(model.predict(x).probs, y), abs=1e-12)
    assert after.id.nll != before.id.nll


def test_an_object_without_tensors_is_measured_each_time(tmp_path: Path) -> None:
    class Plain:
        calls = 0

        def predict(self, x: Tensor) -> Prediction:
            self.calls += 1
            return some_prediction(self.calls, rows=len(x))

    model = Plain()
    evaluate(model, [(ROWS, LABELS)], out=tmp_path)
    evaluate(model, [(ROWS, LABELS)], out=tmp_path)
    assert model.calls == 2
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 cut", None])
def test_a_damaged_part_is_measured_again(told: Told, tmp_path: Path, damage: bytes | None) -> None:
    expected = everything(told, tmp_path)
    for file in (tmp_path / "parts").iterdir():
        file.write_bytes(file.read_bytes()[:-40] if damage is None else damage)
    told.rows.clear()
    assert everything(told, tmp_path).id == expected.id
    assert len(told.rows) == 4 * PER_PART


def test_names_that_look_alike_have_files_of_their_own(told: Told, tmp_path: Path) -> None:
    ood = {"a/b": batches(ROWS + N), "a b": batches(ROWS + 2 * N), "../up": batches(ROWS + 1)}
    for _ in range(2):
        report = evaluate(told, batches(ROWS, LABELS), ood, out=tmp_path)
        assert report.ood["a/b"] != report.ood["a b"]
    assert len(list((tmp_path / "parts").iterdir())) == 4
    assert len(told.rows) == 4 * PER_PART


# --- randomness -----------------------------------------------------------------------------------------


def test_num_samples_and_generator_are_handed_on(told: Told) -> None:
    evaluate(told, batches(ROWS, LABELS))
    assert told.options == [{}] * PER_PART
    told.options.clear()
    evaluate(told, batches(ROWS, LABELS), num_samples=8, generator=torch.Generator().manual_seed(0))
    assert {options["num_samples"] for options in told.options} == {8}
    assert all(isinstance(options["generator"], torch.Generator) for options in told.options)
    told.options.clear()
    evaluate(told, [(ROWS, LABELS)], {"far": [ROWS]}, generator=torch.Generator().manual_seed(0))
    first, second = (options["generator"].initial_seed() for options in told.options)
    assert first != second


def test_without_a_generator_the_numbers_repeat_and_with_one_they_follow_it() -> None:
    x, y = toy.blobs(3, 6)
    model = toy.trained("hetsngp")

    def total(seed: int | None, **more: Any) -> float:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return evaluate(model, [(x, y)], num_samples=4, generator=generator, **more).id.nll

    assert total(None) == total(None)
    assert total(1) == total(1)
    assert total(1) != total(2)


def test_a_part_that_is_skipped_changes_no_other(tmp_path: Path) -> None:
    x, y = toy.blobs(3, 6)
    model = toy.trained("hetsngp")
    sets = {"near": [x + 1], "far": [x + 30]}

    def run(out: Path, names: tuple[str, ...]) -> Any:
        ood = {name: sets[name] for name in names}
        g = torch.Generator().manual_seed(3)
        return evaluate(model, [(x, y)], ood, num_samples=4, generator=g, out=out)

    whole = run(tmp_path / "whole", ("near", "far"))
    run(tmp_path / "cut", ("near",))
    rest = run(tmp_path / "cut", ("near", "far"))
    assert rest.ood == whole.ood


# --- progress -------------------------------------------------------------------------------------------


def test_it_is_silent_unless_asked(told: Told, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    everything(told, tmp_path, show=False)
    assert capsys.readouterr().out == ""


def test_progress_counts_parts_and_what_is_kept(
    told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetsngp.fitting.progress.SECONDS", -1.0)
    everything(told, tmp_path, show=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"id  {N} examples (25%)"
    assert lines[-1] == f"corrupted['fog', 2]  {4 * N} examples (100%)"
    everything(told, tmp_path, show=True)
    assert capsys.readouterr().out.splitlines()[0] == f"id (cached)  {N} examples (25%)"


def test_a_bar_moves_within_a_part(told: Told) -> None:
    progress = EvaluationProgress(2, show=False)
    seen: list[float] = []

    class Bar:
        def update(self, task: Any, completed: float, description: str) -> None:
            seen.append(completed)

    progress.bar = Bar()
    progress.begin("id", 4)
    for _ in range(4):
        progress.batch(5)
    progress.add(0)
    progress.begin("stream", None)
    progress.batch(5)
    assert seen == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert progress.examples == 25


# --- refusals -------------------------------------------------------------------------------------------


def refused(told: Told, error: type[Exception], match: str, **wrong: Any) -> None:
    """Before anything long: nothing but a first batch is predicted."""
    with pytest.raises(error, match=match):
        evaluate(told, **{"id": batches(ROWS, LABELS), **wrong})
    assert len(told.rows) <= 1


def test_bad_arguments_are_refused_first(told: Told, tmp_path: Path) -> None:
    good = batches(ROWS, LABELS)
    refused(told, TypeError, r"ood must be a dict of loaders by name.*list", ood=good)
    refused(told, TypeError, r"ood has the name 3", ood={3: good})
    refused(told, TypeError, r"ood\['a'\] is a Dataset: wrap it", ood={"a": TensorDataset(ROWS)})
    refused(told, TypeError, r"ood\['a'\] must be a loader of batches.*Tensor", ood={"a": ROWS})
    refused(told, TypeError, r"id must be a loader of batches.*dict", id={"x": ROWS})
    refused(told, TypeError, r"id is a Dataset", id=TensorDataset(ROWS, LABELS))
    refused(told, TypeError, r"corrupted must be a mapping", corrupted=[good])
    for key in ("fog", ("fog",), ("fog", "3"), (3, "fog"), ("fog", True)):
        refused(told, TypeError, r"keys are \(corruption, severity\).*\('fog', 3\)", corrupted={key: good})
    refused(told, ValueError, "num_bins", num_bins=0)
    refused(told, ValueError, "num_samples", num_samples=-1)
    (tmp_path / "file").write_text("")
    refused(told, NotADirectoryError, "give a folder", out=tmp_path / "file")
    assert told.rows == []


def test_bad_batches_are_refused(told: Told) -> None:
    refused(told, ValueError, "id is empty", id=[])
    refused(told, TypeError, r"id must yield pairs \(x, y\)", id=[ROWS])
    refused(told, ValueError, r"id yields weights.*give \(x, y\)", id=[(ROWS, LABELS, torch.ones(N))])
    refused(
        told, ValueError, r"id: y holds labels from 0 to 4.*num_classes=4", id=[(ROWS[:5], torch.arange(5))]
    )
    told.rows.clear()
    refused(told, ValueError, r"id: y has shape \(3,\) where \(5,\)", id=[(ROWS[:5], LABELS[:3])])
    told.rows.clear()
    refused(told, TypeError, r"id: y has dtype torch.float32", id=[(ROWS[:5], LABELS[:5].float())])
    told.rows.clear()
    refused(told, ValueError, r"id: y has shape \(5, 3\)", id=[(ROWS[:5], torch.ones(5, 3))])


def test_empty_sets_are_named(told: Told) -> None:
    with pytest.raises(ValueError, match=r"ood\['far'\] is empty"):
        evaluate(told, batches(ROWS, LABELS), {"far": []})
    with pytest.raises(ValueError, match=r"corrupted\['fog', 1\] is empty"):
        evaluate(told, batches(ROWS, LABELS), corrupted={("fog", 1): []})


def test_votes_for_a_model_of_one_label_name_the_metric() -> None:
    x, _ = toy.blobs(3, 6)
    with pytest.raises(ValueError, match=r"hetsngp\.metrics\.vote_nll.*link='sigmoid'"):
        evaluate(toy.trained("sngp"), [(x, torch.ones(len(x), 3))])
    with pytest.raises(ValueError, match="multi-hot"):
        evaluate(toy.trained("sngp", link="sigmoid"), [(x, torch.zeros(len(x)).long())])


@pytest.mark.parametrize("name", ["ood_score", "latent_variance", "probs"])
def test_nan_is_refused_and_its_row_named(told: Told, name: str) -> None:
    getattr(told.prediction, name)[N + 17] = float("nan")
    with pytest.raises(
        ValueError, match=r"ood\['far'\]: .* is NaN or infinite, first in example 17: .* posterior"
    ):
        evaluate(told, batches(ROWS, LABELS), {"far": batches(ROWS + N)})


def test_what_is_no_probability_is_refused_at_once(told: Told) -> None:
    probs = told.prediction.probs.clone()
    refusals = {
        r"id: probs are from .* logits\.softmax": 5 * probs,
        r"id: probs are from -.* \.exp\(\)": probs.log(),
        r"id: the probs of an example add up to 0\.9, .*softmax": 0.9 * probs,
        r"id: the probs of an example add up to 1\.1.*multi-hot": (1.1 * probs).clamp(max=1),
    }
    for match, wrong in refusals.items():
        told.prediction.probs.copy_(wrong)
        told.rows.clear()
        refused(told, ValueError, match)
    told.prediction.probs.copy_(probs)
    told.prediction.probs[N:] = probs[N:].log()
    with pytest.raises(ValueError, match=r"ood\['far'\]: probs are from -"):
        evaluate(told, batches(ROWS, LABELS), {"far": batches(ROWS + N)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_left_out_classes_are_probabilities(told: Told, dtype: torch.dtype) -> None:
    values = {f.name: getattr(told.prediction, f.name).to(dtype) for f in fields(Prediction)}
    told.prediction = Prediction(**values)
    assert evaluate(told, batches(ROWS, LABELS)).id.examples == N
    some = ClassMap(torch.tensor([3, 0]), ("three", "zero"), num_inputs=4)
    assert evaluate(restrict(told, some, normalise="none"), batches(ROWS, LABELS % 2)).id.examples == N


def test_errors_of_predict_name_the_set() -> None:
    model = toy.trained("deterministic")
    x, y = toy.blobs(3, 6)
    wide = torch.zeros(5, 3)
    with pytest.raises(RuntimeError, match=r"^ood\['svhn'\]: .*shapes"):
        evaluate(model, [(x, y)], {"svhn": [wide]})
    with pytest.raises(RuntimeError, match=r"^corrupted\['fog', 2\]: .*shapes"):
        evaluate(model, [(x, y)], corrupted={("fog", 2): [(wide, y[:5])]})


def test_one_batch_is_no_list_of_batches(told: Told) -> None:
    for pair in ((ROWS, LABELS), [ROWS, LABELS], (ROWS.numpy(), LABELS.numpy())):
        refused(told, TypeError, r"ood\['a'\] is x and y .*\[\(x, y\)\]", ood={"a": pair})
        refused(told, TypeError, r"id is x and y .*\[\(x, y\)\]", id=pair)
    assert evaluate(told, batches(ROWS, LABELS), {"a": ROWS.split(N // 2)}).ood["a"].examples == N


def test_a_model_that_cannot_predict(told: Told) -> None:
    with pytest.raises(TypeError, match=r"Linear has no predict: hetsngp\.convert"):
        evaluate(torch.nn.Linear(2, 2), batches(ROWS, LABELS))

    class Labels:
        def predict(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(TypeError, match=r"Labels\.predict must return a hetsngp\.Prediction, got Tensor"):
        evaluate(Labels(), batches(ROWS, LABELS))


def test_an_unfitted_posterior_says_so() -> None:
    x, y = toy.blobs(3, 6)
    with pytest.raises(hetsngp.PosteriorNotFittedError, match="fit_posterior"):
        evaluate(toy.trained("sngp", fit=False), [(x, y)])


def test_missing_packages_are_named_first(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchmetrics.functional", None)
        refused(told, ImportError, r"hetsngp\[eval\]")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        refused(told, ImportError, r"hetsngp\[eval\]", out=tmp_path)
    assert told.rows == []


def test_a_folder_has_one_report_at_a_time(told: Told, tmp_path: Path) -> None:
    """A second evaluation is refused, and does not disturb the first."""
    errors: list[BaseException] = []

    def second() -> None:
        try:
            evaluate(told, batches(ROWS, LABELS), out=tmp_path)
        except FolderInUse as error:
            errors.append(error)

    class Disturbed(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            if not errors:
                thread = threading.Thread(target=second)
                thread.start()
                thread.join()
            return super().__iter__()

    (tmp_path / ".saving-1").write_text("of a process that was killed")
    report = evaluate(told, Disturbed(batches(ROWS, LABELS)), out=tmp_path)
    assert len(errors) == 1
    assert (tmp_path / "report.json").is_file()
    assert not list(tmp_path.rglob(".*"))
    assert report.id == evaluate(told, batches(ROWS, LABELS), out=tmp_path).id
