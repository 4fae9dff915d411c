"""Far-OOD images to choose by: ImageNet's validation images at 32 pixels, without CIFAR-100's classes.

Labels are positions in ImageNet's list of 1,000 classes. An image is left out if its label, or any of its
ReaL labels, is a class of CIFAR-100, a kind of one (lizard: every lizard) or a part of one (road: street
sign).
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from hetsngp.data.datasets.dataset import data_root
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.files import ImageFiles

FOLDER = "imagenet_val2_224"


def _span(*ends: int) -> tuple[int, ...]:
    """Whole numbers from the first to the second, from the third to the fourth, …, ends included."""
    return tuple(i for low, high in zip(ends[::2], ends[1::2], strict=True) for i in range(low, high + 1))


OVERLAPS: dict[str, tuple[int, ...]] = {
    "apple, pear, orange": (948, 950, 956, 957),
    "aquarium fish, flatfish, trout": (0, 1, 107, *_span(389, 397)),
    "shark, ray": _span(2, 6),
    "baby, boy, girl, man, woman": (431, 443, 516, 520, 529, 680, 834, 903, 906, *_span(981, 983)),
    "bear, wolf, fox": _span(269, 280, 294, 297),
    "leopard, lion, tiger": _span(286, 293),
    "beaver, otter, seal, whale, dolphin": (147, 148, 149, 150, *_span(337, 337, 356, 360)),
    "hamster, mouse, rabbit, squirrel, porcupine, shrew": (*_span(330, 336), 338, 673),
    "possum, raccoon, skunk": (361, 362, 387, 388),
    "kangaroo, camel, cattle, elephant, chimpanzee": (
        *_span(101, 106),
        *_span(345, 347, 354, 355),
        385,
        386,
        367,
    ),
    "lizard, crocodile, dinosaur, snake, turtle": _span(33, 68),
    "spider": (70, *_span(72, 77), 815),
    "crab, lobster": _span(118, 125),
    "snail, worm": (*_span(110, 114), 117),
    "bee, beetle, cockroach, butterfly, caterpillar": (410, 599, *_span(300, 309), 314, *_span(321, 326)),
    "bed, couch, chair, table, wardrobe": (
        *(423, 526, 532, 548, 559, 564, 703, 721, 736, 750, 765, 831, 857, 861, 894),
        *_span(492, 493, 495, 495, 453, 453),
    ),
    "bottle, bowl, can, cup, plate": (
        *(440, 441, 463, 469, 504, 505, 567, 572, 647, 653, 659, 720, 725, 729, 737, 738, 809, 849, 868, 876),
        *(898, 899, 901, 907, 909, 923, *_span(924, 926), *_span(966, 969), 438, 711, 773, 883),
    ),
    "bicycle, motorcycle": (444, 518, 665, 670, 671, 870, 880),
    "bus, pickup truck, streetcar, train, tank, tractor, lawn mower": (
        *(
            407,
            436,
            466,
            468,
            547,
            555,
            561,
            565,
            569,
            586,
            595,
            609,
            621,
            627,
            654,
            656,
            675,
            705,
            717,
            734,
            757,
        ),
        *(779, 803, 820, 829, 847, 856, 864, 866, 867, 874, 408),
    ),
    "rocket": (657, 744, 812),
    "bridge, castle, house, road, skyscraper": (
        *(
            425,
            437,
            442,
            448,
            449,
            483,
            497,
            500,
            538,
            580,
            634,
            660,
            663,
            668,
            682,
            698,
            706,
            716,
            727,
            743,
            762,
        ),
        *(821, 832, 839, 853, 858, 873, 888, 900, 915, 919, 920),
    ),
    "clock, lamp, telephone, television, keyboard": (
        *(409, 426, 487, 508, 527, 528, 530, 531, 590, 598, 605, 619, 620, 664, 681, 707, 782, 810, 818, 826),
        *(835, 846, 851, 878, 892),
    ),
    "mushroom": _span(947, 947, 991, 997),
    "orchid, poppy, rose, sunflower, tulip": (984, 985, 986, 989),
    "sweet pepper": (945,),
    "cloud, forest, mountain, plain, sea": (
        404,
        405,
        417,
        460,
        536,
        649,
        672,
        701,
        718,
        *_span(970, 980),
        958,
    ),
    "maple, oak, palm, pine, willow": (988, 990),
}
"""Classes of CIFAR-100, and ImageNet's classes that show them."""


def open_far(size: int = 32) -> ImageArrays:
    """Images whose labels are no class of CIFAR-100: (N, 3, size, size)."""
    folder = data_root() / FOLDER
    file = folder / "labels.csv"
    if not file.is_file():
        raise FileNotFoundError(f"the study needs {FOLDER}/labels.csv and its images in HETSNGP_DATA")
    left_out = {label for labels in OVERLAPS.values() for label in labels}
    paths: list[Path] = []
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            shown = {int(row["label"]), *(int(label) for label in row["real_labels"].split())}
            if not shown & left_out:
                paths.append(folder / f"{row['image']}.webp")
    images = ImageFiles(tuple(paths), torch.zeros(len(paths), dtype=torch.long), ("no class of CIFAR-100",))
    return images.load(size)
