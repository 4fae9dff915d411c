"""ImageNet's customary view, short side 256 and centre crop 224: torchvision's pixels, by every reader."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.data.test_shards import make_shards
from tests.unit.small_sets import random_bytes, write_image
from torch import Tensor

from hetsngp.data.images.decoding import Decoder, resize_and_center_crop, short_side
from hetsngp.data.images.files import ImageFiles, read_image
from hetsngp.data.images.multi_label import MultiLabelFiles

Image = pytest.importorskip("PIL.Image")
v2 = pytest.importorskip("torchvision.transforms.v2")
AS_IT_IS: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def theirs(pixels: np.ndarray, size: int, resize: int) -> Tensor:
    steps = [v2.Resize(resize, antialias=True), v2.CenterCrop(size), v2.PILToTensor()]
    return v2.Compose(steps)(Image.fromarray(pixels))


@pytest.mark.parametrize(
    ("size", "resize"), [(224, 256), (224, 232), (8, 9), (7, 16), (13, 13), (1, 30), (12, 15)]
)
def test_the_centre_crop_is_torchvisions(size: int, resize: int) -> None:
    for height, width in [(8, 9), (13, 29), (29, 12), (300, 401), (100, 7), (256, 256)]:
        pixels = random_bytes(height, width, 3, seed=height)
        found = resize_and_center_crop(Image.fromarray(pixels), size, resize)
        assert found.shape == (3, size, size)
        assert torch.equal(found, theirs(pixels, size, resize)), (height, width)


def test_resize_as_large_as_size_is_none() -> None:
    picture = Image.fromarray(random_bytes(20, 31, 3))
    assert torch.equal(resize_and_center_crop(picture, 12, 12), resize_and_center_crop(picture, 12))
    assert not torch.equal(resize_and_center_crop(picture, 12, 14), resize_and_center_crop(picture, 12))


def test_every_reader_takes_it(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(5)]
    pixels = [random_bytes(24 + number, 30 - number, 3, seed=number) for number in range(5)]
    for name, image in zip(names, pixels, strict=True):
        write_image(tmp_path / name, image)
    expected = torch.stack([theirs(image, 10, 16) for image in pixels])
    files = ImageFiles(tuple(tmp_path / name for name in names), torch.zeros(5).long(), ("a",))
    several = MultiLabelFiles.of(tmp_path, names, [[0]] * 5, ("a",))

    def encoded(number: int) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(pixels[number]).save(stream, "PNG")
        return stream.getvalue()

    shards = make_shards(tmp_path / "shards", (2, 3), encoded)
    assert torch.equal(files.load(10, resize=16).images, expected)
    assert torch.equal(read_image(files.files[3], 10, 16), expected[3])
    for data in (files, several, shards):
        x = torch.cat([x for x, _ in data.loader(10, 2, resize=16, num_workers=0, **AS_IT_IS)])
        assert torch.equal(x, expected / 255)
    assert torch.equal(Decoder(10, 16, train=False, **AS_IT_IS)(encoded(1), "a"), expected[1] / 255)


def test_training_crops_ignore_it(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", random_bytes(30, 40, 3))
    content = (tmp_path / "a.png").read_bytes()
    for seed in range(4):
        found = Decoder(8, 24, train=True)(content, "a", seed)
        assert torch.equal(found, Decoder(8, train=True)(content, "a", seed))


def test_what_would_leave_an_edge_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", random_bytes(30, 40, 3))
    files = ImageFiles((tmp_path / "a.png",), torch.tensor([0]), ("a",))
    several = MultiLabelFiles.of(tmp_path, ["a.png"], [[0]], ("a",))
    shards = make_shards(tmp_path / "shards", (2,))
    for call in (
        lambda: short_side(224, 223),
        lambda: files.load(224, resize=223),
        lambda: files.loader(224, 1, resize=223),
        lambda: several.loader(224, 1, resize=223),
        lambda: shards.loader(224, 1, resize=223),
        lambda: resize_and_center_crop(Image.fromarray(random_bytes(30, 40, 3)), 224, 223),
    ):
        with pytest.raises(ValueError, match=r"resize=223 .* the crop of 224 pixels.*at least 224, or None"):
            call()
    for resize in (0, -5, 250.5, True):
        with pytest.raises(ValueError, match="resize must be a positive whole number"):
            short_side(224, resize)  # type: ignore[arg-type]
