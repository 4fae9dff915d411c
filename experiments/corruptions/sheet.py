"""A contact sheet: every corruption, every severity, beside the clean image.

    export HETSNGP_DATA=...                                     # for frost/; without it that row is empty
    python experiments/corruptions/sheet.py                     # cifar.jpg and imagenet.jpg, in this folder
    python experiments/corruptions/sheet.py --data cifar100 --number 12 --out out/sheets    # a test image

Without --data the picture is scikit-learn's china.jpg (by ultraleo1, CC BY 2.0). CIFAR-C's constants are for
32 pixels and drawn on 32, enlarged without smoothing; ImageNet-C's on 224.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hetsngp.data.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, corrupt, has_frost, load_frost
from hetsngp.data.sources import open_images
from hetsngp.evaluation.figures import new_figure
from hetsngp.files import write_atomically

SIDES = {"cifar": 32, "imagenet": 224}
TITLES = {"cifar": "CIFAR-C", "imagenet": "ImageNet-C"}


def photograph(side: int) -> Tensor:
    """(1, 3, side, side): centre crop of the photograph."""
    from sklearn.datasets import load_sample_image

    picture = Image.fromarray(load_sample_image("china.jpg"))
    picture = picture.crop((90, 0, 90 + 427, 427)).resize((side, side), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].contiguous()


def draw(image: Tensor, constants: str, path: Path) -> None:
    names = [*CORRUPTIONS, *EXTRA]
    frost = load_frost() if has_frost() else None
    figure = new_figure(9.6, 1.36 * len(names))
    axes = figure.subplots(len(names), 1 + len(SEVERITIES))
    for row, name in zip(axes, names, strict=True):
        show(row[0], image)
        row[0].set_ylabel(name.replace("_", "\n"), rotation=0, ha="right", va="center", fontsize=9)
        for ax, severity in zip(row[1:], SEVERITIES, strict=True):
            if name == "frost" and frost is None:
                ax.text(0.5, 0.5, "no overlays", ha="center", va="center")
                ax.set(xticks=[], yticks=[])
                continue
            given: Any = frost if name == "frost" else None
            show(ax, corrupt(image, name, severity, constants=constants, frost=given))
    for ax, title in zip(axes[0], ("clean", *(f"severity {s}" for s in SEVERITIES)), strict=True):
        ax.set_title(title, fontsize=10)
    side = image.shape[-1]
    figure.suptitle(f"Corruptions with the constants of {TITLES[constants]}, on {side} pixels", fontsize=12)
    write_atomically(
        path, lambda file: figure.savefig(file, dpi=100, format="jpeg", pil_kwargs={"quality": 85})
    )
    print(path)


def show(ax: Any, image: Tensor) -> None:
    ax.imshow(image[0].permute(1, 2, 0).numpy(), interpolation="nearest" if image.shape[-1] < 100 else None)
    ax.set(xticks=[], yticks=[])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default=None, help="a data set of hetsngp.data.datasets.registry: its test images"
    )
    parser.add_argument("--number", type=int, default=0, help="index of the image in that set")
    parser.add_argument(
        "--size", type=int, default=None, help="pixels, where the set has files of many sizes"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    if options.data is None:
        for constants, side in SIDES.items():
            draw(photograph(side), constants, options.out / f"{constants}.jpg")
        return
    images = open_images(options.data, "test", size=options.size).images
    image = images[options.number : options.number + 1]
    constants = "cifar" if image.shape[-1] <= 64 else "imagenet"
    draw(image, constants, options.out / f"{options.data}-{options.number}.jpg")


if __name__ == "__main__":
    main()
