"""Decoding: the pixels that torchvision makes, from files and from bytes; what is no image is named."""

import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.small_sets import random_bytes, write_image

from hetsngp.data.images.decoding import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Decoder,
    open_picture,
    random_resized_crop,
    resize_and_center_crop,
    worker_count,
)
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.images.multi_label import MultiLabelFiles

Image = pytest.importorskip("PIL.Image")
AS_IT_IS: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def encoded(pixels: np.ndarray, kind: str = "PNG", mode: str | None = None) -> bytes:
    stream = io.BytesIO()
    picture = Image.fromarray(pixels)
    (picture if mode is None else picture.convert(mode)).save(stream, kind)
    return stream.getvalue()


@pytest.fixture
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torchvision", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, module, None)


# --- opening -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK"])
def test_a_file_and_its_bytes_are_one_picture(mode: str, tmp_path: Path) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    content = encoded(random_bytes(9, 7, 3), kind, mode)
    (tmp_path / "a").write_bytes(content)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    for source in (content, tmp_path / "a"):
        picture = open_picture(source, "a")
        assert picture.mode == "RGB"
        assert np.array_equal(np.asarray(picture), expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no image", "cannot identify"),
        (b"", "cannot identify"),
        (encoded(random_bytes(40, 40, 3))[:900], "truncated"),
        (encoded(np.full((9, 9), 60_000, np.uint16)), "pixels of mode 'I;16', only 8 bits a channel"),
        (encoded(np.ones((9, 9), np.int32), "TIFF"), "pixels of mode 'I', only 8 bits"),
        (encoded(np.ones((9, 9), np.float32), "TIFF"), "pixels of mode 'F', only 8 bits"),
    ],
    ids=["text", "empty", "cut", "16 bits", "32 bits", "float"],
)
def test_what_is_no_image_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(content)
    for source in (content, tmp_path / "a.png"):
        with pytest.raises(
            ValueError, match=rf"^sample 7 cannot be read as an image \(.*{message}.*\): replace or remove it"
        ):
            open_picture(source, "sample 7")


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.png cannot be read as an image \(.*No such file"):
        open_picture(tmp_path / "a.png", str(tmp_path / "a.png"))


# --- pixels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 8, 13, 40])
def test_the_centre_crop_is_torchvisions(size: int) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    theirs = v2.Compose([v2.Resize(size, antialias=True), v2.CenterCrop(size), v2.PILToTensor()])
    for height, width in [(8, 8), (8, 9), (9, 8), (13, 29), (29, 12), (40, 41), (7, 100), (100, 3)]:
        picture = Image.fromarray(random_bytes(height, width, 3, seed=height))
        found = resize_and_center_crop(picture, size)
        assert found.shape == (3, size, size)
        assert found.dtype == torch.uint8
        assert torch.equal(found, theirs(picture)), (height, width)


def test_a_random_crop_is_torchvisions() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    theirs = v2.Compose([v2.RandomResizedCrop(8, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()])
    pixels = random_bytes(30, 40, 3)
    ours, by_seed = random_resized_crop(8), Decoder(8, train=True, **AS_IT_IS)
    crops = []
    for seed in range(12):
        torch.manual_seed(seed)
        expected = theirs(Image.fromarray(pixels))
        torch.manual_seed(seed)
        assert torch.equal(ours(Image.fromarray(pixels)), expected)
        assert torch.equal(by_seed(encoded(pixels), "a", seed), expected / 255)
        crops.append(expected)
    assert len({crop.numpy().tobytes() for crop in crops}) == 12


def test_a_seed_leaves_the_callers_random_numbers_alone() -> None:
    pytest.importorskip("torchvision")
    decoder, content = Decoder(8, train=True), encoded(random_bytes(30, 40, 3))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    decoder(content, "a", 1)
    assert torch.equal(torch.get_rng_state(), before)
    first, second = decoder(content, "a"), decoder(content, "a")  # these draw from them
    assert not torch.equal(first, second)
    torch.set_rng_state(before)
    assert torch.equal(decoder(content, "a"), first)


def test_a_failure_leaves_the_callers_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    decoder = Decoder(8, train=True)

    def fail(picture: Any) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(decoder, "random_crop", fail)
    before = torch.get_rng_state()
    with pytest.raises(MemoryError):
        decoder(encoded(random_bytes(9, 9, 3)), "a", 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_pixels_are_scaled() -> None:
    content = encoded(random_bytes(9, 9, 3))
    x = torch.from_numpy(random_bytes(9, 9, 3)).permute(2, 0, 1).double() / 255
    for mean, std in ((IMAGENET_MEAN, IMAGENET_STD), ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))):
        found = Decoder(9, train=False, mean=mean, std=std)(content, "a")
        centre, scale = (torch.tensor(value, dtype=torch.float64)[:, None, None] for value in (mean, std))
        torch.testing.assert_close(found.double(), (x - centre) / scale, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("no_torchvision")
def test_all_readers_give_the_same_pixels_without_torchvision(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(6)]
    for number, name in enumerate(names):
        write_image(tmp_path / name, random_bytes(14 + number, 20 - number, 3, seed=number))
    files = ImageFiles(tuple(tmp_path / name for name in names), torch.zeros(6).long(), ("a",))
    several = MultiLabelFiles.of(tmp_path, names, [[0]] * 6, ("a",))
    expected = files.load(12).images / 255
    for data in (files, several):
        x, _ = next(iter(data.loader(12, 6, num_workers=0, **AS_IT_IS)))
        assert torch.equal(x, expected)
    decoder = Decoder(12, train=False, **AS_IT_IS)
    for name, image in zip(names, expected, strict=True):
        assert torch.equal(decoder((tmp_path / name).read_bytes(), name, 3), image)


@pytest.mark.parametrize("train", [False, True])
def test_a_decoder_can_be_sent_to_a_process(train: bool) -> None:
    pytest.importorskip("torchvision")
    decoder, content = Decoder(8, train=train), encoded(random_bytes(30, 40, 3))
    assert torch.equal(pickle.loads(pickle.dumps(decoder))(content, "a", 2), decoder(content, "a", 2))


# --- what it needs -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_torchvision")
def test_random_crops_need_torchvision() -> None:
    with pytest.raises(ImportError, match=r"random crops .*torchvision: pip install 'hetsngp\[vision\]'"):
        Decoder(8, train=True)


def test_missing_pillow_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for call in (lambda: Decoder(8, train=False), lambda: open_picture(b"", "a")):
        with pytest.raises(ImportError, match=r"Pillow: pip install 'hetsngp\[vision\]'"):
            call()


@pytest.mark.parametrize("size", [0, -3, 1.5, True])
def test_sizes_are_checked(size: Any) -> None:
    with pytest.raises(ValueError, match="size must be a positive whole number"):
        Decoder(size, train=False)


def test_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (worker_count(0), worker_count(20)) == (0, 20)
    for cores, expected in ((2, 2), (64, 8), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert worker_count(None) == expected
