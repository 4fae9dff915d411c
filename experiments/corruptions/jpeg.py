"""How far our batched JPEG is from Pillow's, which the published images were made with.

    HETSNGP_DATA=... python experiments/corruptions/jpeg.py      # one minute on two cores; jpeg.json

500 of CIFAR-100's test images at CIFAR-C's five qualities, and 50 of the photographs in imagenet_val2_224 at
ImageNet-C's. Differences are in levels of 0 to 255, beside those that JPEG itself makes.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hetsngp.data.corruptions import CONSTANTS, SEVERITIES, corrupt
from hetsngp.data.datasets.dataset import data_root
from hetsngp.data.images.files import read_image
from hetsngp.data.sources import open_images
from hetsngp.files import write_json


def by_pillow(image: Tensor, quality: int) -> Tensor:
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=quality)
    return torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)


def compared(images: Tensor, constants: str) -> dict[str, float]:
    gaps, losses = [], []
    for severity in SEVERITIES:
        ours = corrupt(images, "jpeg_compression", severity, constants=constants)
        quality = CONSTANTS["jpeg_compression"][constants][severity - 1]
        theirs = torch.stack([by_pillow(image, quality) for image in images])
        gaps.append((ours.int() - theirs.int()).abs())
        losses.append((theirs.int() - images.int()).abs().float().mean())
    gap = torch.stack(gaps)
    return {
        "images": len(images),
        "share_equal": float((gap == 0).float().mean()),
        "share_within_one": float((gap <= 1).float().mean()),
        "mean_difference": float(gap.float().mean()),
        "largest_difference": int(gap.max()),
        "least_loss_of_jpeg": float(min(losses)),
        "largest_loss_of_jpeg": float(max(losses)),
    }


def main() -> None:
    small = open_images("cifar100", "test").images[::20]
    photographs = sorted((data_root() / "imagenet_val2_224").glob("*.webp"))[::40]
    large = torch.stack([read_image(file, 224) for file in photographs])
    found = {"cifar": compared(small, "cifar"), "imagenet": compared(large, "imagenet")}
    print(found)
    write_json(Path(__file__).parent / "jpeg.json", found)


if __name__ == "__main__":
    main()
