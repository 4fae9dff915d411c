"""The corruptions are the published ones, pixel by pixel, and follow from image, number and seed alone."""

from __future__ import annotations

import functools
import io
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetsngp.data.corruptions import (
    CORRUPTIONS,
    EXTRA,
    SEVERITIES,
    CounterRNG,
    corrupt,
    corrupt_float,
    has_frost,
    load_frost,
    prepared_frost,
)
from hetsngp.data.datasets.cifar import load_cifar

ndimage = pytest.importorskip("scipy.ndimage")
Image = pytest.importorskip("PIL.Image")
stats = pytest.importorskip("scipy.stats")

from tests.reference import corruptions as oracle  # noqa: E402  needs SciPy
from tests.reference.corruption_shapes import cut  # noqa: E402

NAMES = (*CORRUPTIONS, *EXTRA)
FAMILIES = ("cifar", "imagenet")
FIXED = {
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
}

every_name = pytest.mark.parametrize("name", NAMES)
both_families = pytest.mark.parametrize("constants", FAMILIES)


@functools.cache
def photograph(name: str) -> np.ndarray:
    """One of scikit-learn's two photographs, 427 × 640."""
    return pytest.importorskip("sklearn.datasets").load_sample_image(name)


def crop(name: str, left: int, top: int, window: int, size: tuple[int, int]) -> np.ndarray:
    """A square window of a photograph at `size` (height, width): (3, H, W) bytes."""
    image = Image.fromarray(photograph(name)).crop((left, top, left + window, top + window))
    return np.asarray(image.resize(size[::-1], Image.Resampling.BICUBIC)).transpose(2, 0, 1)


@functools.cache
def clouds(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth random colours, cut off at black and white: (3, H, W) bytes."""
    noise = np.random.default_rng(seed).normal(size=(3, height, width))
    smooth = ndimage.gaussian_filter(noise, (0, 3, 3), mode="wrap")
    return np.clip(128 + 90 * smooth / smooth.std(), 0, 255).astype(np.uint8)


def pictures(height: int, width: int | None = None) -> Tensor:
    """Two photographs and clouds: (3, 3, H, W) bytes."""
    size = (height, width or height)
    photos = [crop("china.jpg", 170, 60, 280, size), crop("flower.jpg", 120, 40, 300, size)]
    return torch.from_numpy(np.stack([*photos, clouds(*size)]))


@functools.cache
def overlays() -> tuple[Tensor, ...]:
    """Six made-up frosts of sides that are no multiples of five."""
    return tuple(torch.from_numpy(clouds(329 + 4 * i, 341 + 3 * i, seed=i) // 2 + 110) for i in range(6))


def frost_for(name: str) -> tuple[Tensor, ...] | None:
    return overlays() if name == "frost" else None


def in_both(images: Tensor, name: str, severity: int, constants: str) -> tuple[np.ndarray, np.ndarray]:
    """Ours and the oracle's, in float64, under the same draws."""
    x = images.double() / 255
    draws = CounterRNG(3, name, severity, first=7, count=len(x), dtype=torch.float64)
    frost = frost_for(name)
    prepared = None if frost is None else prepared_frost(frost, constants, "cpu")
    ours = corrupt_float(x, name, severity, draws, constants=constants, frost=prepared)
    assert ours.dtype == torch.float64
    made = [overlay.numpy() for overlay in frost or ()]
    return ours.numpy(), oracle.corrupted(x.numpy(), name, severity, draws, constants, made)


# --- against the oracle --------------------------------------------------------------------------------


@both_families
@every_name
def test_pictures_are_the_oracles(name: str, constants: str) -> None:
    for size, severities in (((32, 32), SEVERITIES), ((40, 56), (2, 5))):
        for severity in severities:
            ours, theirs = in_both(pictures(*size), name, severity, constants)
            if name == "jpeg_compression":
                # A colour exactly between two bytes falls by the last bit of its sum.
                assert (np.rint(255 * ours) == np.rint(255 * theirs)).mean() > 0.999
            else:
                # Prepared overlays are float32.
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 if name == "frost" else 1e-9)


@both_families
@every_name
def test_flat_and_pure_colours_are_the_oracles(name: str, constants: str) -> None:
    colours = [(0, 0, 0), (255, 255, 255), (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (77, 77, 77)]
    flat = torch.tensor(colours, dtype=torch.uint8)[:, :, None, None].expand(-1, -1, 32, 32)
    ours, theirs = in_both(flat, name, 4, constants)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 if name == "frost" else 1e-9)


@both_families
@every_name
def test_bytes_are_the_oracles_cut_off(name: str, constants: str) -> None:
    """Single precision, on which `corrupt` works, moves hardly any byte."""
    images = pictures(64)
    for severity in (2, 5):
        ours = corrupt(
            images, name, severity, seed=3, first=7, constants=constants, frost=frost_for(name)
        ).numpy()
        assert ours.dtype == np.uint8
        theirs = np.rint(255 * cut(in_both(images, name, severity, constants)[1]))
        assert (ours == theirs).mean() > 0.995


@both_families
@pytest.mark.parametrize("size", [(32, 32), (224, 224), (40, 56), (37, 51)])
def test_jpeg_is_pillows(size: tuple[int, int], constants: str) -> None:
    """libjpeg's whole numbers move a few coefficients by a step: 3 % of what compression does."""
    images, difference, loss = pictures(*size), [], []
    for severity, quality in enumerate(oracle.CONSTANTS[constants]["jpeg_compression"], 1):
        ours = corrupt(images, "jpeg_compression", severity, constants=constants).numpy().astype(int)
        theirs = np.stack([through_pillow(image, quality) for image in images.numpy()]).astype(int)
        difference.append(np.abs(ours - theirs))
        loss.append(np.abs(images.numpy() - theirs))
    assert np.mean(difference) < 0.03 * np.mean(loss)
    assert np.quantile(difference, 0.99) <= 6


def through_pillow(image: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file)).transpose(2, 0, 1)


def test_real_frost_is_the_oracles(data_root: Path) -> None:
    assert has_frost(data_root)
    real = load_frost(data_root)
    assert [overlay.shape[0] for overlay in real] == [3] * 6
    assert all(overlay.dtype == torch.uint8 and min(overlay.shape[1:]) > 300 for overlay in real)
    x = pictures(32).double() / 255
    for constants in FAMILIES:
        draws = CounterRNG(0, "frost", 3, count=len(x), dtype=torch.float64)
        ready = prepared_frost(real, constants, "cpu")
        ours = corrupt_float(x, "frost", 3, draws, constants=constants, frost=ready)
        theirs = oracle.corrupted(x.numpy(), "frost", 3, draws, constants, [o.numpy() for o in real])
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


# --- what a picture depends on -------------------------------------------------------------------------


@every_name
def test_a_picture_follows_from_image_number_and_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.cat([pictures(32), pictures(32).flip(-1)])
    before = images.clone()
    more = {"frost": frost_for(name), "constants": "imagenet"}
    whole = corrupt(images, name, 3, seed=5, first=100, **more)
    assert torch.equal(images, before)
    assert torch.equal(whole, corrupt(images, name, 3, seed=5, first=100, **more))

    parts = [
        corrupt(images[a:b], name, 3, seed=5, first=100 + a, **more) for a, b in ((0, 1), (1, 4), (4, 6))
    ]
    assert torch.equal(torch.cat(parts), whole)
    monkeypatch.setattr("hetsngp.data.corruptions.apply.CHUNK", 4 * images[0].numel())
    assert torch.equal(corrupt(images, name, 3, seed=5, first=100, **more), whole)

    others = torch.cat([255 - images[:2], images[2:3], images[3:] // 2])
    assert torch.equal(corrupt(others, name, 3, seed=5, first=100, **more)[2], whole[2])

    for seed, first in ((6, 100), (5, 101)):
        again = corrupt(images, name, 3, seed=seed, first=first, **more)
        changed = (again != whole).flatten(1).any(1)
        assert not changed.any() if name in FIXED else changed.all()


@pytest.mark.gpu
@both_families
@every_name
def test_cuda_makes_the_same_picture(name: str, constants: str) -> None:
    images = pictures(64)
    for severity in (1, 5):
        here = corrupt(images, name, severity, constants=constants, frost=frost_for(name))
        there = corrupt(images.cuda(), name, severity, constants=constants, frost=frost_for(name))
        assert there.is_cuda
        assert (there.cpu() == here).double().mean() > 0.995


# --- the random numbers --------------------------------------------------------------------------------

MANY = 1_000_000


def standard_errors(values: np.ndarray, expected: float) -> float:
    """How many of its standard errors a mean lies from what it should be."""
    return abs(values.mean() - expected) / (values.std() / math.sqrt(values.size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_have_the_right_moments(dtype: torch.dtype) -> None:
    draws = CounterRNG(1, "snow", 2, first=3, count=2, dtype=dtype)
    u, z = (draw("a stream", MANY // 4, 2).double().numpy() for draw in (draws.uniform, draws.normal))
    assert u.shape == z.shape == (2, MANY // 4, 2)
    assert u.min() >= 0
    assert u.max() < 1
    for power, expected in ((1, 1 / 2), (2, 1 / 3), (3, 1 / 4), (4, 1 / 5)):
        assert standard_errors(u**power, expected) < 4
    for power, expected in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        assert standard_errors(z**power, expected) < 4
    for beyond in (1, 2, 3, 4):
        assert standard_errors(np.abs(z) > beyond, 2 * stats.norm.sf(beyond)) < 4
    k = draws.integers("a stream", -2, 3, MANY // 2).numpy()
    for value in range(-2, 3):
        assert standard_errors(k == value, 1 / 5) < 4
    assert set(np.unique(k)) == set(range(-2, 3))


def test_draws_are_unrelated() -> None:
    """Neighbours, images, streams, seeds, severities and corruptions: no correlation, also of the squares."""
    base: dict[str, Any] = {"seed": 1, "name": "snow", "severity": 2, "first": 3, "dtype": torch.float64}
    z = CounterRNG(**base).normal("flakes", MANY // 10)[0]
    other_images = {
        first: CounterRNG(**base | {"first": first}).normal("flakes", MANY // 10)[0] for first in (4, 103)
    }
    shifted: dict[Any, Tensor] = {"neighbour": z.roll(1), "row": z.roll(32), **other_images}
    # One image's sequence must not be the next one's, a place on.
    shifted |= {"before": other_images[4].roll(-1), "after": other_images[4].roll(1)}
    for change in ({"seed": 2}, {"name": "fog"}, {"severity": 3}):
        shifted[str(change)] = CounterRNG(**base | change).normal("flakes", MANY // 10)[0]
    shifted["stream"] = CounterRNG(**base).normal("angle", MANY // 10)[0]
    for what, other in shifted.items():
        for power in (1, 2):
            pair = (z**power - (power - 1)) * (other**power - (power - 1))
            assert standard_errors(pair.numpy(), 0) < 4, what


def test_draws_are_the_same_in_single_precision() -> None:
    single, double = (
        CounterRNG(0, "fog", 1, count=3, dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    assert (single.uniform("a", 99) - double.uniform("a", 99)).abs().max() <= 2.0**-24
    assert (single.normal("a", 99) - double.normal("a", 99)).abs().max() < 1e-5
    assert torch.equal(single.integers("a", -4, 4, 99), double.integers("a", -4, 4, 99))


# --- severity ------------------------------------------------------------------------------------------

# Steps s → s + 1 at which the published constants themselves bring the picture nearer to the clean one, in
# mean squared distance: measured on 200 images of CIFAR-100 and 40 of ImageNet, and seen from the constants.
NEARER = {
    # As many displaced pixels under a wider blur, which hides some of the displacement.
    ("cifar", "glass_blur"): {1, 2, 4},
    ("imagenet", "glass_blur"): {1, 3},
    # The image's weight falls and the frost's stays: less light is added.
    ("cifar", "frost"): {3},
    ("imagenet", "frost"): {3},
    # The affine jitter shrinks by more than the local displacement grows.
    ("cifar", "elastic_transform"): {1, 2, 3, 4},
    ("imagenet", "elastic_transform"): {2},
    # From colours nearly taken away (factor 0.1) to colours strengthened (1.5 or 2).
    ("cifar", "saturate"): {2},
    ("imagenet", "saturate"): {2},
}
# Radius 6 and 8 at the same σ = 2: the taps that are added weigh less than 1e-8.
SAME = {("cifar", "motion_blur"): {3}}
# Which is farther depends on images and draws: snow's mean rises with the threshold that cuts it, and fog of
# the same amount only gets rougher.
EITHER = {("imagenet", "snow"): {2}, ("imagenet", "fog"): {3}}


def check_severity(images: Tensor, name: str, constants: str, frost: tuple[Tensor, ...] | None) -> None:
    """The mean squared distance grows with severity but for the steps named above; the draws are the same."""
    x, distances = images.float() / 255, []
    ready = None if frost is None else prepared_frost(frost, constants, "cpu")
    for severity in SEVERITIES:
        draws = CounterRNG(0, name, 1, count=len(x))
        y = corrupt_float(x, name, severity, draws, constants=constants, frost=ready)
        distances.append(float((y - x).square().mean()))
    case, said = (constants, name), f"{name} {constants}: {distances}"
    for step, (now, then) in enumerate(itertools.pairwise(distances), 1):
        if step in SAME.get(case, ()):
            assert then == pytest.approx(now, rel=1e-4), said
        elif step in EITHER.get(case, ()):
            assert then == pytest.approx(now, rel=0.15), said
        elif step in NEARER.get(case, ()):
            assert then < now, said
        else:
            assert then > now, said


@every_name
def test_severity_grows_on_photographs(name: str) -> None:
    small = [
        crop(photo, left, top, 128, (32, 32))
        for photo in ("china.jpg", "flower.jpg")
        for left in range(0, 500, 100)
        for top in range(0, 290, 70)
    ]
    check_severity(torch.from_numpy(np.stack(small)), name, "cifar", frost_for(name))
    large = [crop(photo, 150, 20, 380, (224, 224)) for photo in ("china.jpg", "flower.jpg")]
    check_severity(torch.from_numpy(np.stack(large)), name, "imagenet", frost_for(name))


@pytest.fixture(scope="module")
def real(data_root: Path) -> dict[str, Tensor]:
    """200 test images of CIFAR-100 and 10 of ImageNet's validation set."""
    files = sorted((data_root / "imagenet_val2_224").glob("*.webp"))[::200]
    if not files:
        pytest.skip("no imagenet_val2_224 among the data sets")
    large = [np.asarray(Image.open(file).convert("RGB")).transpose(2, 0, 1) for file in files]
    small = load_cifar("cifar100", "test", data_root).images[::50]
    return {"cifar": small, "imagenet": torch.from_numpy(np.stack(large))}


@pytest.mark.slow
@both_families
@every_name
def test_severity_grows_on_real_images(
    name: str, constants: str, real: dict[str, Tensor], data_root: Path
) -> None:
    frost = load_frost(data_root) if name == "frost" else None
    check_severity(real[constants], name, constants, frost)


# --- errors --------------------------------------------------------------------------------------------


def test_errors_name_the_fix(tmp_path: Path) -> None:
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"(?s)'gausian_noise'.*'shot_noise'.*did you mean 'gaussian_noise'"):
        corrupt(images, "gausian_noise", 1)
    for severity in (0, 6, -1, 2.5, True, "3"):
        with pytest.raises(ValueError, match="severity must be 1, 2, 3, 4 or 5"):
            corrupt(images, "fog", severity)
    with pytest.raises(ValueError, match="'cifar', 'imagenet'"):
        corrupt(images, "fog", 1, constants="svhn")
    with pytest.raises(TypeError, match=r"float32.*\(255 \* images\)"):
        corrupt(images.float(), "fog", 1)
    with pytest.raises(TypeError, match="ndarray"):
        corrupt(images.numpy(), "fog", 1)  # type: ignore[arg-type]
    for wrong in (images[0], images[:, :1], images.permute(0, 2, 3, 1), images[..., None]):
        with pytest.raises(ValueError, match=r"\(N, 3, H, W\)"):
            corrupt(wrong, "fog", 1)
    with pytest.raises(ValueError, match="expand"):
        corrupt(images[:, :1], "fog", 1)
    for frost in (None, overlays()[:4]):
        with pytest.raises(ValueError, match=r"frost=load_frost\(\)"):
            corrupt(images, "frost", 1, frost=frost)
    assert not has_frost(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"(?s)frost1\.png.*To get it"):
        load_frost(tmp_path)


def test_frost_is_read_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "frost"
    folder.mkdir()
    names = ["frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg", "frost6.jpg"]
    for name, overlay in zip(names, overlays(), strict=True):
        Image.fromarray(overlay.permute(1, 2, 0).numpy()).save(folder / name, quality=95)
    read = load_frost(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(read[:3], overlays()[:3], strict=True))
    assert [a.shape for a in read] == [a.shape for a in overlays()]
    (folder / "frost6.jpg").unlink()
    assert not has_frost(tmp_path)


# --- whatever the user has set ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jpeg_compression", "glass_blur", "zoom_blur", "pixelate", "snow"])
def test_autocast_changes_nothing(name: str) -> None:
    images = torch.randint(256, (2, 3, 24, 24), generator=torch.Generator().manual_seed(0)).byte()
    with torch.autocast("cpu", torch.bfloat16):
        within = corrupt(images, name, 3)
    assert torch.equal(within, corrupt(images, name, 3))


def test_reduced_matmul_precision_changes_nothing() -> None:
    images = torch.randint(256, (2, 3, 24, 24), generator=torch.Generator().manual_seed(0)).byte()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        within = corrupt(images, "zoom_blur", 3)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(within, corrupt(images, "zoom_blur", 3))


@pytest.mark.parametrize("name", [name for name in [*CORRUPTIONS, *EXTRA] if name != "frost"])
@pytest.mark.parametrize("constants", ["cifar", "imagenet"])
def test_the_smallest_images(name: str, constants: str) -> None:
    for height, width in ((1, 1), (2, 3), (1, 9)):
        images = torch.full((1, 3, height, width), 100, dtype=torch.uint8)
        for severity in (1, 5):
            assert corrupt(images, name, severity, constants=constants).shape == images.shape


def test_a_severity_is_a_whole_number() -> None:
    images = torch.full((1, 3, 8, 8), 100, dtype=torch.uint8)
    with pytest.raises(ValueError, match="severity must be"):
        corrupt(images, "fog", 3.0)  # type: ignore[arg-type]
    assert torch.equal(corrupt(images, "fog", np.int64(3)), corrupt(images, "fog", 3))  # type: ignore[arg-type]
