"""What is measured of a run: the right numbers, on the right classes, once."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.small_sets import random_bytes, write_image
from torch import Tensor

import hetsngp
from hetsngp.data.class_maps import ClassMap
from hetsngp.data.datasets.synsets import wnids
from hetsngp.data.preprocessing import Preprocessing
from hetsngp.evaluation import restrict
from hetsngp.evaluation.loader_quality import measure_quality
from hetsngp.evaluation.predictors import device_of
from hetsngp.files import with_checksum
from hetsngp.nn.backbones import ResidualMLP, WideResNet
from hetsngp.paper import measurements as measuring
from hetsngp.paper.definitions import TABLES, PaperColumn
from hetsngp.paper.measurements import (
    KeptSets,
    ModelMeasurements,
    TrainedModel,
    adapt_to_labels,
    scores,
)
from hetsngp.paper.results import value_of
from hetsngp.paper.sets import AvailableSets, EvaluationSet, find_sets
from hetsngp.serving.bundle import write_serving
from hetsngp.serving.decisions import Thresholds

CPU = torch.device("cpu")
NAMES = ("cat", "dog", "owl")
TEDDY = "n04399382"


# --- a run without a training ---------------------------------------------------------------------------


def make_run(
    folder: Path, seed: int = 0, names: tuple[str, ...] = NAMES, **options: Any
) -> hetsngp.Classifier:
    """A model as a training leaves it, for images of 8 pixels."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hetsngp.build(
            "hetsngp", WideResNet(10, 1), len(names), generator=generator, random_features=16, **options
        )
    x = torch.rand(6, 3, 8, 8, generator=generator)
    hetsngp.fit_posterior(model, [(x, torch.arange(6) % 3)])
    hetsngp.save(model, folder / "model")
    inputs = Preprocessing((8, 8), (0.5,) * 3, (0.25,) * 3, names)
    write_serving(folder / "model", inputs, Thresholds(None, None, 0.95, 0.05, 1, None, 0.0))
    return model


def make_set(file: Path, seed: int = 0, count: int = 7) -> tuple[Tensor, Tensor]:
    """Images and labels, also as the model gets them."""
    random = np.random.default_rng(seed)
    x, y = random.integers(0, 256, (count, 8, 8, 3), np.uint8), random.integers(0, 3, count)
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
    return (torch.from_numpy(x).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25, torch.from_numpy(y)


def trained(*folders: Path) -> TrainedModel:
    return TrainedModel(folders, folders[0] / "measured", "photos")


def test_numbers_are_those_of_the_definitions(tmp_path: Path) -> None:
    model = make_run(tmp_path / "run")
    x, y = make_set(tmp_path / "a.npz")
    one = EvaluationSet(str(tmp_path / "a.npz"))
    work = ModelMeasurements(trained(tmp_path / "run"), [one])
    assert list(work.measure(work.missing(), CPU)) == [7]
    probs = model.predict_probs(x).double().numpy()
    right = probs.argmax(1) == y.numpy()
    bins = np.minimum((probs.max(1) * 15).astype(int), 14)
    gaps = [abs((right[bins == b] - probs.max(1)[bins == b]).sum()) for b in range(15)]
    expected = {
        "accuracy": right.mean(),
        "nll": -np.log(probs[np.arange(7), y.numpy()]).mean(),
        "ece": sum(gaps) / 7,
        "examples": 7,
    }
    assert work.read(one) == pytest.approx(expected, rel=1e-5)


def test_an_ensemble_is_measured_as_one(tmp_path: Path) -> None:
    models = [make_run(tmp_path / str(seed), seed) for seed in range(3)]
    x, y = make_set(tmp_path / "a.npz")
    one = EvaluationSet(str(tmp_path / "a.npz"))
    work = ModelMeasurements(trained(*(tmp_path / str(seed) for seed in range(3))), [one])
    list(work.measure([one], CPU))
    mean = torch.stack([model.predict_probs(x) for model in models]).double().mean(0)
    nll = -mean.gather(1, y[:, None]).log().mean()
    assert work.read(one)["nll"] == pytest.approx(float(nll), rel=1e-5)  # type: ignore[index]


def test_members_with_different_normalisations_predict_on_their_own(tmp_path: Path) -> None:
    """Probabilities and OOD scores are means over members that each get pixels as in their own training."""
    scales = [((0.5,) * 3, (0.25,) * 3), ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)), ((0.1,) * 3, (0.9,) * 3)]
    models, folders = [], [tmp_path / str(seed) for seed in range(3)]
    for seed, (folder, (mean, std)) in enumerate(zip(folders, scales, strict=True)):
        models.append(make_run(folder, seed))
        inputs = Preprocessing((8, 8), mean, std, NAMES)
        write_serving(folder / "model", inputs, Thresholds(None, None, 0.95, 0.05, 1, None, 0.0))
    x, _ = make_set(tmp_path / "a.npz")
    pixels = (x * 0.25 + 0.5).numpy()
    own = [
        model.predict(
            torch.from_numpy((pixels - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))).float()
        )
        for model, (mean, std) in zip(models, scales, strict=True)
    ]
    ensemble, inputs = trained(*folders).open(CPU)
    assert (inputs.mean, inputs.std) == scales[0]
    found = ensemble.predict(x)
    each = np.stack([prediction.probs.double().numpy() for prediction in own])
    probs = each.mean(0)
    assert np.allclose(found.probs, probs, atol=1e-6)
    assert np.allclose(ensemble.predict_probs(x), probs, atol=1e-6)
    # The score: the members' mean, and the mutual information between label and member.
    score = np.stack([prediction.ood_score.double().numpy() for prediction in own]).mean(0)
    between = entropy(probs) - np.mean(
        [prediction.total_uncertainty.double().numpy() for prediction in own], 0
    )
    assert np.allclose(found.ood_score, score + between, rtol=1e-4, atol=1e-6)
    assert not np.allclose(found.ood_score, hetsngp.Ensemble(models).predict(x).ood_score, rtol=1e-2)
    scored = EvaluationSet(str(tmp_path / "a.npz"), scores=True)
    work = ModelMeasurements(trained(*folders), [scored])
    list(work.measure([scored], CPU))
    assert work.read(scored)["ood_score"] == pytest.approx(list(score + between), rel=1e-4, abs=1e-6)  # type: ignore[index]


def entropy(probs: np.ndarray) -> np.ndarray:
    return -(probs * np.log(probs)).sum(1)


def test_scores_are_of_every_row_and_give_auroc_and_fpr95(tmp_path: Path) -> None:
    model = make_run(tmp_path / "run")
    sets = AvailableSets("far.npz", {}, {})
    scored = {}
    for name, seed in (("photos", 1), ("far.npz", 2)):
        x, y = make_set(tmp_path / "a.npz", seed, 40)
        scored[name] = scores(model, [(x[:30], y[:30]), (x[30:], y[30:])], CPU)
        assert np.allclose(scored[name]["ood_score"], model.predict(x).ood_score, rtol=2e-6)
    found = {EvaluationSet(name, scores=True): each for name, each in scored.items()}
    inside, outside = (np.array(scored[name]["ood_score"]) for name in ("photos", "far.npz"))
    auroc = value_of(PaperColumn("far_auroc", "Far-ROC", "auroc", "far"), sets, "photos", found)
    assert auroc == pytest.approx((outside[:, None] > inside).mean(), abs=1e-6)
    (column,) = (c for c in TABLES["cifar100"].parts[0].columns if c.name == "far_fpr95")
    threshold = np.sort(inside)[37]  # of 40 all but two are at or below it: 95 %
    expected = (outside <= threshold).mean()  # the paper's: OOD examples classified as in-distribution
    assert value_of(column, sets, "photos", found) == pytest.approx(expected, abs=1e-6)
    assert expected != pytest.approx((inside >= np.sort(outside)[2]).mean(), abs=1e-3)  # as reports have it


# --- classes --------------------------------------------------------------------------------------------


class Oracle:
    """Knows the wnid of an image, which is x itself: sure of it, or of class 0 where it has no such class."""

    def __init__(self, known: str) -> None:
        self.known = wnids(known)

    def predict_probs(self, x: Tensor) -> Tensor:
        probs = torch.full((len(x), len(self.known)), 1e-6)
        for row, number in zip(probs, x.tolist(), strict=True):
            wnid = f"n{int(number):08d}"
            row[self.known.index(wnid) if wnid in self.known else 0] = 0.9
        return probs

    def predict(self, x: Tensor) -> Any:
        raise AssertionError("the cheap way is enough")


def labelled(name: str, some: list[str]) -> list[tuple[Tensor, Tensor]]:
    known = wnids(name)
    return [(torch.tensor([int(w[1:]) for w in some]).double(), torch.tensor([known.index(w) for w in some]))]


@pytest.mark.parametrize("name", ["imagenet", "imagenet-a", "imagenet-r"])
def test_labels_of_subsets_are_found_among_all_classes(name: str) -> None:
    some = list(wnids(name))[3::40]
    model, class_index = adapt_to_labels(Oracle("imagenet"), "imagenet", name)
    found = measure_quality(model, labelled(name, some), CPU, class_index=class_index)
    assert found["accuracy"] == 1.0
    assert (class_index is None) == (name == "imagenet")


@pytest.mark.parametrize("name", ["imagenet", "imagenet-a", "imagenet-r"])
def test_a_network_of_21843_classes_chooses_among_the_1000(name: str) -> None:
    """And has the teddy bear at probability zero: 87 nats where it is the label."""
    some = [wnid for wnid in wnids(name) if wnid != TEDDY][3::60]
    restricted, class_index = adapt_to_labels(Oracle("imagenet21k"), "imagenet21k", name)
    restricted = restrict(Oracle("imagenet21k"), restricted.class_map, normalise="sigmoid")
    assert restricted.num_classes == 1000
    assert measure_quality(restricted, labelled(name, some), CPU, class_index=class_index)["accuracy"] == 1.0
    if TEDDY in wnids(name):
        missing = measure_quality(restricted, labelled(name, [TEDDY]), CPU, class_index=class_index)
        assert missing["accuracy"] == 0.0
        assert missing["nll"] == pytest.approx(87.3, abs=0.1)


def test_several_labels_are_measured_by_precision_at_1() -> None:
    some = list(wnids("imagenet21k"))[5:9]
    y = torch.zeros(4, 21843)
    for row, label in enumerate([5, 6, 7, 0]):  # the last image is none of its labels
        y[row, [label, 100]] = 1.0
    (x, _), *_ = labelled("imagenet21k", some)
    model, class_index = adapt_to_labels(Oracle("imagenet21k"), "imagenet21k", "imagenet21k")
    found = measure_quality(model, [(x, y)], CPU, class_index=class_index)
    assert found["precision_at_1"] == 0.75
    assert "accuracy" not in found


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_a_restricted_model_has_a_cheap_way_to_the_same_probabilities(link: str) -> None:
    generator = torch.Generator().manual_seed(0)
    backbone = ResidualMLP(2, width=8, depth=1, generator=generator)
    model = hetsngp.build("heteroscedastic", backbone, 4, generator=generator, link=link)
    some = restrict(model, ClassMap(torch.tensor([2, -1, 0]), NAMES, num_inputs=4))
    x = torch.randn(5, 2, generator=generator)
    assert torch.allclose(some.predict_probs(x), some.predict(x).probs, atol=1e-6)
    assert device_of(some) == CPU

    class Foreign:
        def predict(self, x: Tensor) -> Any:
            return model.predict(x)

    foreign = restrict(Foreign(), some.class_map, normalise="softmax")
    assert torch.equal(foreign.predict_probs(x), foreign.predict(x).probs)


# --- once -----------------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path) -> ModelMeasurements:
    make_run(tmp_path / "run")
    for name in "abc":
        make_set(tmp_path / f"{name}.npz", ord(name))
    return again(tmp_path)


def again(tmp_path: Path, size: int | None = None) -> ModelMeasurements:
    """As another process would see it."""
    several = [EvaluationSet(str(tmp_path / f"{name}.npz"), size=size) for name in "abc"]
    return ModelMeasurements(trained(tmp_path / "run"), several)


def test_an_interrupted_measurement_goes_on(work: ModelMeasurements, tmp_path: Path) -> None:
    going = work.measure(work.missing(), CPU)
    next(going), next(going)
    going.close()
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "run/measured").iterdir()}
    assert sorted(file.suffix for file in files) == [".json", ".json", ".npz", ".npz"]
    rest = again(tmp_path)
    assert rest.missing() == rest.sets[2:]
    list(rest.measure(rest.missing(), CPU))
    assert again(tmp_path).missing() == []
    assert all(file.stat().st_mtime_ns == then for file, then in files.items())


def test_what_decides_a_number_makes_it_measured_again(
    work: ModelMeasurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(work.measure(work.missing(), CPU))
    before = [work.read(one) for one in work.sets]
    assert again(tmp_path, size=8).missing()  # the set has grown
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "code_fingerprint", lambda *modules: "another")
        assert again(tmp_path).missing()
    model = tmp_path / "run/model"
    shutil.copytree(model, tmp_path / "kept")
    for change in ({"seed": 1}, {"num_samples": 7}, {"sampler": "mc"}):
        make_run(tmp_path / "run", **change)
        assert again(tmp_path).missing() == list(work.sets), change
        shutil.rmtree(model)
        shutil.copytree(tmp_path / "kept", model)
        assert again(tmp_path).missing() == []
    assert [again(tmp_path).read(one) for one in work.sets] == before


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"numbers": 3}', '{"fingerprint": "x", "numbers": {}}'])
def test_a_damaged_file_counts_as_none(work: ModelMeasurements, tmp_path: Path, damage: str) -> None:
    list(work.measure(work.missing()[:1], CPU))
    (file,) = (tmp_path / "run/measured").glob("*.json")
    assert len(again(tmp_path).missing()) == 2
    file.write_text(damage)
    assert len(again(tmp_path).missing()) == 3


@pytest.mark.parametrize(
    "damage", ["gone", "empty", "truncated", "one byte", "of another model", "no arrays"]
)
def test_a_set_without_the_values_of_its_examples_is_measured_again(
    work: ModelMeasurements, tmp_path: Path, damage: str
) -> None:
    list(work.measure(work.missing()[:1], CPU))
    (file,) = (tmp_path / "run/measured").glob("*.npz")
    assert len(again(tmp_path).missing()) == 2
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "one byte":
        content[content.index(b"nll.npy") + 30] ^= 255  # in the compressed values
        file.write_bytes(content)
    elif damage == "of another model":
        work.cache.write_arrays(work.sets[0].name, "another", {"nll": np.zeros(7)})
    else:
        np.savez(file, nothing=np.zeros(1))
    rest = again(tmp_path)
    assert rest.read(rest.sets[0]) is not None  # the other file is whole
    assert rest.examples(rest.sets[0]) is None
    assert rest.missing() == rest.sets
    list(rest.measure(rest.missing()[:1], CPU))
    assert again(tmp_path).missing() == rest.sets[1:]


def test_values_of_examples_are_those_that_the_numbers_are_means_of(tmp_path: Path) -> None:
    model = make_run(tmp_path / "run")
    x, y = make_set(tmp_path / "a.npz", count=40)
    one, scored = (EvaluationSet(str(tmp_path / "a.npz"), scores=wanted) for wanted in (False, True))
    work = ModelMeasurements(trained(tmp_path / "run"), [one, scored])
    list(work.measure(work.missing(), CPU))
    found, probs = work.examples(one), model.predict_probs(x).double()
    assert found is not None
    assert sorted(found) == ["confidence", "correct", "nll"]
    np.testing.assert_allclose(found["confidence"], probs.max(1).values, rtol=1e-5)
    np.testing.assert_array_equal(found["correct"], probs.argmax(1) == y)
    np.testing.assert_allclose(found["nll"], -probs.gather(1, y[:, None]).squeeze(1).log(), rtol=1e-5)
    assert work.examples(scored) == work.read(scored)
    assert [file.name for file in (tmp_path / "run/measured").glob("*scores*.npz")] == []


def test_kept_sets_are_made_once_and_when_they_are_asked_for() -> None:
    made = []

    class Sets(dict[str, int]):
        def __getitem__(self, key: str) -> int:
            made.append(key)
            return super().__getitem__(key)

    sets = KeptSets(Sets(fog=1, snow=2))
    assert list(sets) == ["fog", "snow"]
    assert (len(sets), made) == (2, [])
    assert [sets["snow"], sets["snow"], sets["fog"]] == [2, 2, 1]
    assert made == ["snow", "fog"]
    with pytest.raises(KeyError):
        sets["rain"]


def test_a_model_that_diverged_is_named(tmp_path: Path) -> None:
    model = make_run(tmp_path / "run")
    make_set(tmp_path / "a.npz")
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "beta" in name or p.dim() == 2).fill_(3e38)
    hetsngp.save(model, tmp_path / "run/model")
    serving = json.loads((tmp_path / "run/model/serving.json").read_text())
    serving["sha256"] = json.loads((tmp_path / "run/model/config.json").read_text())["sha256"]
    (tmp_path / "run/model/serving.json").write_text(json.dumps(with_checksum(serving)))
    one = EvaluationSet(str(tmp_path / "a.npz"))
    with pytest.raises(FloatingPointError, match=r"run: .* on .*a.npz, so training diverged"):
        list(ModelMeasurements(trained(tmp_path / "run"), [one]).measure([one], CPU))
    assert not (tmp_path / "run/measured").exists()


# --- sets -----------------------------------------------------------------------------------------------


def test_a_mean_over_corrupted_sets_counts_each_once_and_waits_for_all() -> None:
    keys = dict.fromkeys([("fog", 1), ("fog", 2), ("snow", 5)])
    sets = AvailableSets("far", {"cifar100-c": (keys, False)}, {})
    column = next(c for c in TABLES["cifar100"].parts[0].columns if c.name == "corr_nll")
    several = sets.evaluation_sets(column, "cifar100")
    assert [one.name for one in several] == ["cifar100-c.fog.1", "cifar100-c.fog.2", "cifar100-c.snow.5"]
    found = {
        one: {"nll": value, "examples": n}
        for one, value, n in zip(several, (1.0, 2.0, 6.0), (1, 2, 9), strict=True)
    }
    assert value_of(column, sets, "cifar100", found) == 3.0
    assert value_of(column, sets, "cifar100", {**found, several[0]: None}) is None


def test_notes_say_what_is_not_the_papers() -> None:
    keys = dict.fromkeys(("fog", severity) for severity in range(1, 6))
    notes = " ".join(AvailableSets("scenes", {"cifar100-c": (keys, True)}, {}).notes(TABLES["cifar100"]))
    assert "Far is scenes" in notes
    assert "made of the test images" in notes
    assert "5 of 75 sets" in notes
    assert not AvailableSets("places365", {}, {}).notes(TABLES["cifar100"])


@pytest.mark.filterwarnings("ignore:.*(lacks|is a part of)")
def test_a_set_of_imagenet_c_that_grew_is_measured_again(tmp_path: Path) -> None:
    """Files are unpacked one after another: a folder may be opened before it is whole."""

    def write(corruption: str, severity: int, *files: str) -> None:
        for number, name in enumerate(files):
            pixels = random_bytes(8, 8, 3, seed=number + severity)
            write_image(tmp_path / "imagenet-c" / corruption / str(severity) / name, pixels)

    column = PaperColumn("imc_nll", "ImC-NLL", "nll", "imagenet-c")
    table = TABLES["imagenet"]
    table = replace(table, parts=(replace(table.parts[0], columns=(column,)),))

    def look() -> tuple[ModelMeasurements, list[str]]:
        sets = find_sets(table, [], "far", tmp_path)
        run = replace(trained(tmp_path / "run"), data="imagenet")
        return ModelMeasurements(run, sets.evaluation_sets(column, "imagenet")), sets.notes(table)

    cat, dog = "n02123045", "n02099601"
    for corruption, severity in (("fog", 1), ("fog", 2), ("snow", 1)):
        write(corruption, severity, f"{cat}/1.png", f"{dog}/1.png")
    (tmp_path / "imagenet-c/fog/1" / cat / "list.txt").write_text("no image")
    write("speckle_noise", 1, f"{cat}/1.png")  # not of the benchmark's mean
    make_run(tmp_path / "run", names=wnids("imagenet"))
    work, notes = look()
    assert [(one.name, one.size) for one in work.sets] == [
        ("imagenet-c.snow.1", 2),
        ("imagenet-c.fog.1", 2),
        ("imagenet-c.fog.2", 2),
    ]
    assert not any("fewer images" in note for note in notes)
    assert list(work.measure(work.missing(), CPU, tmp_path)) == [2, 2, 2]
    assert look()[0].missing() == []
    write("fog", 2, f"{cat}/1.png", f"{dog}/1.png", f"{dog}/2.png")
    work, notes = look()
    assert [one.name for one in work.missing()] == ["imagenet-c.fog.2"]
    assert list(work.measure(work.missing(), CPU, tmp_path)) == [3]
    assert "2 sets of imagenet-c have fewer images than the largest, 3." in notes
    assert look()[0].missing() == []


def test_made_and_published_sets_are_not_taken_for_each_other() -> None:
    assert len({EvaluationSet("cifar100-c", ("fog", 1), made=made).name for made in (True, False)}) == 2
    assert len({EvaluationSet("cifar100", scores=wanted).name for wanted in (True, False)}) == 2


def test_a_missing_set_is_the_registrys_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no imagenet: there is no"):
        find_sets(TABLES["imagenet"], [], "places365", tmp_path)
    with pytest.raises(FileNotFoundError, match="no imagenet21k"):
        find_sets(TABLES["imagenet"], ["imagenet21k"], "places365", tmp_path)
