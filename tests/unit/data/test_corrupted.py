"""Sets by (corruption, severity): made of clean images when asked for and not kept, or published files."""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.unit.small_sets import (
    CIFAR_SIZES,
    make_cifar_small,
    random_bytes,
    write_cifar10,
    write_cifar_c,
    write_image,
)
from torch import Tensor, nn

import hetsngp
from hetsngp import metrics
from hetsngp.data import corrupted
from hetsngp.data.corrupted import CorruptedImages, LazyMap, corrupted_images, open_corrupted
from hetsngp.data.corruptions import SEVERITIES, corrupt, load_frost
from hetsngp.data.datasets.cifar_c import CorruptedFiles
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import DeviceLoader
from hetsngp.data.sources import open_images
from hetsngp.evaluation import evaluate
from hetsngp.fitting.loop import train

# As in the tables of Hendrycks & Dietterich (2019).
FIFTEEN = [
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
]
FROST = ["frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg", "frost6.jpg"]
NO_FROST = [name for name in FIFTEEN if name != "frost"]
SIDE = 32


def some_images(count: int = 3, height: int = SIDE, width: int | None = None, seed: int = 0) -> ImageArrays:
    pixels = torch.from_numpy(random_bytes(count, 3, height, width or height, seed=seed))
    return ImageArrays(pixels, torch.arange(count) % 3, ("cat", "dog", "owl"))


def write_frost(root: Path, files: Sequence[str] = FROST) -> None:
    """Random overlays, at a fifth of their size just large enough for 32 pixels."""
    for number, file in enumerate(files):
        write_image(root / "frost" / file, random_bytes(160 + number, 170, 3, seed=number))


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETSNGP_DATA", raising=False)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What has been made so far."""
    seen: list[tuple[str, int]] = []

    def noted(images: Tensor, name: str, severity: int, **how: Any) -> Tensor:
        seen.append((name, severity))
        return corrupt(images, name, severity, **how)

    monkeypatch.setattr(corrupted, "corrupt", noted)
    return seen


# --- corrupted_images -----------------------------------------------------------------------------------


def test_all_75_are_there_and_are_those_of_corrupt(tmp_path: Path) -> None:
    write_frost(tmp_path)
    clean = some_images()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sets = corrupted_images(clean, seed=5, root=tmp_path)
    assert list(sets) == [(name, severity) for name in FIFTEEN for severity in (1, 2, 3, 4, 5)]
    assert len(sets) == 75
    assert sets.left_out == ()
    overlays = load_frost(tmp_path)
    for (name, severity), images in sets.items():
        frost = overlays if name == "frost" else None
        expected = corrupt(clean.images, name, severity, seed=5, constants="cifar", frost=frost)
        assert torch.equal(images.images, expected), (name, severity)
        assert torch.equal(images.labels, clean.labels)
        assert images.class_names == clean.class_names
    other = corrupted_images(clean, seed=6, root=tmp_path)
    assert not torch.equal(other["fog", 3].images, sets["fog", 3].images)


def test_sets_are_made_when_they_are_asked_for_and_not_kept(made: list[tuple[str, int]]) -> None:
    sets = corrupted_images(some_images(), NO_FROST)
    assert len(sets) == len(list(sets)) == len(sets.keys()) == 70
    assert ("fog", 5) in sets
    assert ("fog", 5) in list(sets)
    assert made == []
    first, second = sets["fog", 5], sets["fog", 5]
    assert made == [("fog", 5), ("fog", 5)]
    assert torch.equal(first.images, second.images)
    assert first.images.data_ptr() != second.images.data_ptr()
    held = weakref.ref(first.images)
    del first
    gc.collect()
    assert held() is None


def test_the_clean_images_stay_clean(tmp_path: Path) -> None:
    write_frost(tmp_path)
    clean = some_images()
    before = clean.images.clone()
    sets = corrupted_images(clean, severities=[5], root=tmp_path)
    for images in sets.values():
        images.images.zero_()
    assert torch.equal(clean.images, before)


def test_some_names_and_severities_in_their_order() -> None:
    sets = corrupted_images(some_images(), ["fog", "saturate", "contrast"], (np.int64(5), 1))
    assert list(sets) == [(n, s) for n in ("fog", "saturate", "contrast") for s in (5, 1)]
    assert all(type(severity) is int for _, severity in sets)
    assert list(corrupted_images(some_images(), "fog", [2])) == [("fog", 2)]
    twice = corrupted_images(some_images(), ["fog", "snow", "fog"], [2, 3, 2])
    assert list(twice) == [("fog", 2), ("fog", 3), ("snow", 2), ("snow", 3)]
    assert len(twice) == 4


@pytest.mark.parametrize(
    ("height", "width", "constants"),
    [
        (32, 32, "cifar"),
        (64, 64, "cifar"),
        (65, 65, "imagenet"),
        (64, 65, "imagenet"),
        (65, 64, "imagenet"),
        (224, 224, "imagenet"),
    ],
)
def test_constants_go_by_size(height: int, width: int, constants: str) -> None:
    clean = some_images(2, height, width)
    chosen = corrupted_images(clean, ["contrast"])
    assert chosen.constants == constants
    assert torch.equal(
        chosen["contrast", 3].images, corrupt(clean.images, "contrast", 3, constants=constants)
    )
    other = "cifar" if constants == "imagenet" else "imagenet"
    asked = corrupted_images(clean, ["contrast"], constants=other)["contrast", 3]
    assert torch.equal(asked.images, corrupt(clean.images, "contrast", 3, constants=other))
    assert not torch.equal(asked.images, chosen["contrast", 3].images)


@pytest.mark.parametrize("key", [("fog", 0), ("fog", 2), ("snow", 1), "fog", ("fog",), None])
def test_unknown_keys_are_told_the_known_ones(key: Any, made: list[tuple[str, int]]) -> None:
    sets = corrupted_images(some_images(), ["fog", "contrast"], [1, 5])
    assert key not in sets
    with pytest.raises(KeyError, match="of fog, contrast and 1, 5"):
        sets[key]
    assert made == []


# --- frost ----------------------------------------------------------------------------------------------


def test_without_overlays_frost_is_left_out_and_a_warning_says_where_they_go(tmp_path: Path) -> None:
    write_frost(tmp_path, FROST[:5])  # five are as good as none
    with pytest.warns(UserWarning, match="frost") as caught:
        sets = corrupted_images(some_images(), root=tmp_path)
    assert len(caught) == 1
    for part in (str(tmp_path / "frost"), "14 of 15", *FROST, "https://github.com/hendrycks/robustness"):
        assert part in str(caught[0].message)
    assert caught[0].filename == __file__
    assert sets.left_out == ("frost",)
    assert sets.names == tuple(NO_FROST)
    assert len(sets) == 70
    assert ("frost", 1) not in sets


def test_the_folder_of_overlays_is_that_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="HETSNGP_DATA is not set"):
        corrupted_images(some_images())
    monkeypatch.setenv("HETSNGP_DATA", str(tmp_path))
    with pytest.warns(UserWarning, match=f"no frost overlays in {tmp_path / 'frost'}, so"):
        corrupted_images(some_images())
    write_frost(tmp_path)
    sets = corrupted_images(some_images())
    assert torch.equal(
        sets["frost", 2].images, corrupt(some_images().images, "frost", 2, frost=load_frost(tmp_path))
    )


def test_frost_by_name_needs_its_overlays(tmp_path: Path, made: list[tuple[str, int]]) -> None:
    with pytest.raises(FileNotFoundError) as error:
        corrupted_images(some_images(), ["fog", "frost"], root=tmp_path)
    for file in FROST:
        assert str(tmp_path / "frost" / file) in str(error.value)
    with pytest.raises(ValueError, match="HETSNGP_DATA"):
        corrupted_images(some_images(), ["frost"])
    assert made == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody asked for frost
        assert corrupted_images(some_images(), ["fog"]).left_out == ()


@pytest.mark.parametrize(
    ("height", "width", "constants"), [(64, 64, "cifar"), (40, 35, "cifar"), (200, 90, "imagenet")]
)
def test_overlays_smaller_than_the_images_are_enlarged(
    height: int, width: int, constants: str, tmp_path: Path
) -> None:
    write_frost(tmp_path)
    clean = some_images(6, height, width)
    sets = corrupted_images(clean, ["frost"], constants=constants, root=tmp_path)
    pixels = (height, width) if constants == "imagenet" else (5 * height, 5 * width)
    # Of 160 × 170 the first is the smallest in both, so that the longer way decides.
    factor = max(pixels[0] / 160, pixels[1] / 170)
    larger = [
        F.interpolate(
            overlay[None].float(),
            size=[round(factor * side) for side in overlay.shape[1:]],
            mode="bilinear",
        )[0]
        .round()
        .byte()
        for overlay in load_frost(tmp_path)
    ]
    for severity in (1, 5):
        expected = corrupt(clean.images, "frost", severity, constants=constants, frost=larger)
        difference = (sets["frost", severity].images.int() - expected.int()).abs()
        assert difference.max() <= 1  # a half may fall either way
        assert difference.float().mean() < 0.01


def test_overlays_larger_than_the_images_stay_as_they_are(tmp_path: Path) -> None:
    write_frost(tmp_path)
    clean = some_images(6, 20)
    sets = corrupted_images(clean, ["frost"], root=tmp_path)
    expected = corrupt(clean.images, "frost", 3, frost=load_frost(tmp_path))
    assert torch.equal(sets["frost", 3].images, expected)


def test_the_real_overlays_fit_images_of_64_pixels(data_root: Path) -> None:
    """The smallest overlay has 63 pixels with CIFAR's constants."""
    if not (data_root / "frost").is_dir():
        pytest.skip("no frost in HETSNGP_DATA")
    sets = corrupted_images(some_images(20, 64), ["frost"], root=data_root)
    assert sets.constants == "cifar"
    assert len(sets["frost", 5]) == 20


# --- what is refused before anything is made --------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"names": ["fog", "fgo"]}, r"(?s)'fgo'.*'gaussian_noise'.*did you mean 'fog'"),
        ({"names": ["fog", "spatter"]}, "unknown corruption 'spatter'"),
        ({"names": ["fog"], "severities": [1, 6]}, "severity must be 1, 2, 3, 4 or 5, got 6"),
        ({"names": ["fog"], "severities": [0]}, "severity must be 1, 2, 3, 4 or 5, got 0"),
        ({"names": ["fog"], "severities": [True]}, "severity must be 1, 2, 3, 4 or 5, got True"),
        ({"names": ["fog"], "constants": "svhn"}, "'cifar', 'imagenet'"),
    ],
)
def test_what_is_unknown_is_refused_at_once(
    how: dict[str, Any], message: str, made: list[tuple[str, int]]
) -> None:
    with pytest.raises(ValueError, match=message):
        corrupted_images(some_images(), **how)
    assert made == []


def test_grey_images_are_refused_at_once() -> None:
    grey = ImageArrays(torch.zeros(2, 1, 32, 32).byte(), torch.tensor([0, 1]), ("a", "b"))
    with pytest.raises(ValueError, match=r"\(N, 3, H, W\).*expand"):
        corrupted_images(grey, ["fog"])


# --- open_corrupted -------------------------------------------------------------------------------------


def write_cifar100(root: Path) -> np.ndarray:
    """torchvision's folder; pixels (n, 3, 32, 32) of the test images."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    names = [f"class {number}" for number in range(100)]
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}, protocol=2))
    pixels = random_bytes(CIFAR_SIZES["test"], 3072, seed=100)
    batch = {"data": pixels, "fine_labels": [90 + number for number in range(len(pixels))]}
    (folder / "test").write_bytes(pickle.dumps(batch, protocol=2))
    return pixels.reshape(-1, 3, 32, 32)


@pytest.mark.parametrize(
    ("name", "folder", "classes"), [("cifar10-c", "CIFAR-10-C", 10), ("cifar100-c", "CIFAR-100-C", 100)]
)
def test_published_files_win(
    name: str, folder: str, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cifar_small(monkeypatch)
    write_cifar10(tmp_path)
    write_cifar100(tmp_path)
    written = write_cifar_c(tmp_path / folder, FIFTEEN, 7, classes)
    found = open_corrupted(name, tmp_path)
    assert isinstance(found, CorruptedFiles)
    block = written["fog"].reshape(5, 7, 32, 32, 3)[2]
    assert np.array_equal(found["fog", 3].images.permute(0, 2, 3, 1).numpy(), block)
    assert found["fog", 3].num_classes == classes


@pytest.mark.parametrize("name", ["cifar10-c", "cifar100-c"])
def test_without_them_sets_are_made_of_the_clean_test_images(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cifar_small(monkeypatch)
    clean = {"cifar10-c": write_cifar10(tmp_path)["test"], "cifar100-c": write_cifar100(tmp_path)}[name]
    # The other set's files are none of this one's.
    write_cifar_c(tmp_path / ("CIFAR-10-C" if name == "cifar100-c" else "CIFAR-100-C"), FIFTEEN, 7, 10)
    with pytest.warns(UserWarning, match=f"no frost overlays in {tmp_path / 'frost'}"):
        found = open_corrupted(name, tmp_path, seed=7)
    assert isinstance(found, CorruptedImages)
    assert list(found) == [(n, s) for n in NO_FROST for s in SEVERITIES]
    images = found["gaussian_noise", 4]
    expected = corrupt(torch.from_numpy(clean), "gaussian_noise", 4, seed=7)
    assert torch.equal(images.images, expected)
    labels = open_images(name.removesuffix("-c"), "test", root=tmp_path).labels
    assert torch.equal(images.labels, labels)
    write_frost(tmp_path)
    monkeypatch.setenv("HETSNGP_DATA", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = open_corrupted(name)
    assert len(found) == 75
    assert torch.equal(
        found["gaussian_noise", 4].images, corrupt(torch.from_numpy(clean), "gaussian_noise", 4)
    )


def test_without_either_both_folders_are_named(tmp_path: Path) -> None:
    for name, folder, clean in (
        ("cifar10-c", "CIFAR-10-C", "cifar-10-batches-py"),
        ("cifar100-c", "CIFAR-100-C", "cifar-100-python"),
    ):
        with pytest.raises(FileNotFoundError) as error:
            open_corrupted(name, tmp_path)
        for part in (
            f"no {name}",
            str(tmp_path / folder),
            str(tmp_path / clean),
            "torchvision.datasets.CIFAR",
        ):
            assert part in str(error.value)
    with pytest.raises(ValueError, match="HETSNGP_DATA"):
        open_corrupted("cifar100-c")
    with pytest.raises(ValueError, match=r"'cifar10-c', 'cifar100-c'; did you mean 'cifar100-c'"):
        open_corrupted("cifar100", tmp_path)


# --- LazyMap, and all of it together -----------------------------------------------------------------------


def test_mapped_does_nothing_before_it_is_asked() -> None:
    asked: list[int] = []

    def doubled(value: int) -> int:
        asked.append(value)
        return 2 * value

    sets = LazyMap({"a": 1, "b": 2}, doubled)
    assert list(sets) == ["a", "b"]
    assert len(sets) == 2
    assert "a" in sets
    assert "c" not in sets
    assert asked == []
    assert sets["b"] == 4
    assert sets["b"] == 4
    assert asked == [2, 2]
    assert dict(sets) == {"a": 2, "b": 4}
    with pytest.raises(KeyError):
        sets["c"]


class Small(nn.Module):
    """Means over a grid of 4 × 4."""

    num_features = 48

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 4).flatten(1)


def test_evaluate_measures_every_set_and_never_holds_two(tmp_path: Path, made: list[tuple[str, int]]) -> None:
    write_frost(tmp_path)
    g = torch.Generator().manual_seed(0)
    level = torch.arange(20) % 2
    pixels = torch.randint(0, 140, (20, 3, SIDE, SIDE), generator=g) + 40 * level[:, None, None, None]
    clean = ImageArrays(pixels.byte(), level, ("dark", "bright"))
    model = hetsngp.build("sngp", Small(), 2, random_features=32, generator=g)
    train(model, DeviceLoader(clean, 10), epochs=10, generator=g)
    hetsngp.fit_posterior(model, DeviceLoader(clean, 10))
    mean, std = clean.statistics()
    alive: list[weakref.ref[Tensor]] = []

    def loader(images: ImageArrays) -> DeviceLoader:
        assert all(held() is None for held in alive)
        alive.append(weakref.ref(images.images))
        return DeviceLoader(images, 8, mean=mean, std=std)

    sets = LazyMap(corrupted_images(clean, seed=3, root=tmp_path), loader)
    report = evaluate(model, DeviceLoader(clean, 8), corrupted=sets)
    assert made == [(name, severity) for name in FIFTEEN for severity in SEVERITIES]
    assert report.corrupted is not None
    found = {(each.corruption, each.severity): each for each in report.corrupted.sets}
    assert list(found) == made

    overlays, errors, nll = load_frost(tmp_path), [], {}
    for name, severity in found:
        frost = overlays if name == "frost" else None
        corrupted = corrupt(clean.images, name, severity, seed=3, frost=frost)
        x = (corrupted.double() / 255 - mean[:, None, None]) / std[:, None, None]
        probs = model.predict(x.float()).probs
        quality = found[name, severity].quality
        assert quality.examples == 20
        assert quality.accuracy == pytest.approx(metrics.accuracy(probs, level), abs=1e-6)
        assert quality.nll == pytest.approx(metrics.nll(probs, level), abs=1e-5)
        assert quality.brier == pytest.approx(metrics.brier(probs, level), abs=1e-5)
        assert quality.ece == pytest.approx(metrics.ece(probs, level), abs=1e-5)
        errors.append(1 - metrics.accuracy(probs, level))
        nll[name, severity] = metrics.nll(probs, level)
    # Or one set might pass for another.
    assert 0 < sum(errors) / 75 < 0.5
    assert len({round(value, 4) for value in nll.values()}) > 60
    assert report.corrupted.mean.nll == pytest.approx(sum(nll.values()) / 75, abs=1e-5)
    fog = [nll["fog", severity] for severity in SEVERITIES]
    assert report.corrupted.by_corruption["fog"].nll == pytest.approx(sum(fog) / 5, abs=1e-5)


# --- known without being made ---------------------------------------------------------------------------


def test_a_fingerprint_tells_sets_apart() -> None:
    images = some_images()
    sets = corrupted_images(images, ["fog", "contrast"])
    fingerprint = sets.fingerprint(("fog", 3))
    assert fingerprint == corrupted_images(some_images(), ["fog"]).fingerprint(("fog", 3))
    assert fingerprint != sets.fingerprint(("fog", 4))
    assert fingerprint != corrupted_images(images, ["fog"], seed=1).fingerprint(("fog", 3))
    assert fingerprint != corrupted_images(images, ["fog"], constants="imagenet").fingerprint(("fog", 3))
    assert fingerprint != corrupted_images(some_images(seed=1), ["fog"]).fingerprint(("fog", 3))
    relabelled = ImageArrays(images.images, (images.labels + 1) % 3, images.class_names)
    assert fingerprint != corrupted_images(relabelled, ["fog"]).fingerprint(("fog", 3))


def test_mapped_sets_are_known_only_with_what_decides_the_function() -> None:
    sets = corrupted_images(some_images(), ["fog"])
    assert LazyMap(sets, len).fingerprint(("fog", 3)) is None
    assert LazyMap({("fog", 3): 1}, len, about="length").fingerprint(("fog", 3)) is None
    assert LazyMap(LazyMap(sets, len), len, about="length").fingerprint(("fog", 3)) is None
    known = LazyMap(sets, len, about="length").fingerprint(("fog", 3))
    assert known is not None
    assert known != LazyMap(sets, len, about="width").fingerprint(("fog", 3))


def test_an_evaluation_that_goes_on_makes_no_set_twice(made: list[tuple[str, int]], tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = some_images(6)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 4), nn.ReLU(), nn.Linear(4, 3))
    model = hetsngp.convert(network, "deterministic", torch.zeros(2, 3, SIDE, SIDE))
    clean = DeviceLoader(images, 3)

    def again(about: str | None) -> Any:
        made.clear()
        loaders = LazyMap(
            corrupted_images(images, ["fog"]),
            lambda d: DeviceLoader(d, 3, mean=clean.mean, std=clean.std),
            about,
        )
        return evaluate(model, clean, corrupted=loaders, out=tmp_path).to_dict()["corrupted"]

    first = again("scaled as the clean images")
    assert len(made) == 5
    assert again("scaled as the clean images") == first
    assert made == []
    assert again("otherwise") == first
    assert len(made) == 5
