"""Tiny data sets in the layouts of the real ones, for end-to-end tests: training, tables, commands.

Every class has its own colour under noise, so that a network learns it in a few steps. CIFAR must have
50,000 and 10,000 images: :func:`small_cifar` lowers these numbers in this process, :attr:`Made.command` in
another.
"""

import colorsys
import io
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from hetsngp.data.corruptions import CORRUPTIONS, SEVERITIES
from hetsngp.data.datasets import cifar
from hetsngp.data.datasets.cifar_c import CLASS_NAMES, FOLDERS
from hetsngp.data.datasets.human_labels import CIFAR10N_KEYS
from hetsngp.data.datasets.imagenet21k import LABELS
from hetsngp.data.datasets.places import CATEGORIES, LISTS
from hetsngp.data.datasets.synsets import wnids

TEDDY = "n04399382"
"""The one of the 1,000 classes that is not among the 21,843; ImageNet-A has it, ImageNet-R does not."""
ORGANISM = "n00004475"
"""One of the 21,843 classes, not of the 1,000: the second label of multi-label images."""
PLACES = ("/a/airfield", "/a/apartment_building/outdoor", "/z/zen_garden")
SCENES = ("airport", "kitchen")
PHOTOS = ("blue", "green", "red", "yellow")


@dataclass(frozen=True)
class Made:
    """Sets written below ``root``; labels are in the order in which a set is opened."""

    root: Path
    wnids: tuple[str, ...]
    """The classes of ImageNet that have images."""
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    """Severities of ImageNet-C; the files of CIFAR-C have all five."""
    sizes: dict[str, int]
    """Number of images of CIFAR's splits."""
    labels: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """(set, split) → labels; for corrupted sets, those of each corruption and severity."""
    several: dict[str, list[list[int]]] = field(default_factory=dict)
    """Labels of ImageNet-21k's splits."""

    @property
    def command(self) -> list[str]:
        """``hetsngp`` as a process that takes these for all of CIFAR: ``[*made.command, "train", …]``."""
        code = (
            "import sys; sys.argv[0] = 'hetsngp'; from hetsngp.data.datasets import cifar; "
            f"cifar.SIZES.update({self.sizes}); from hetsngp.cli import main; main()"
        )
        return [sys.executable, "-c", code]


def small_cifar(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    """Make CIFAR complete with the images that were written."""
    monkeypatch.setattr(cifar, "SIZES", made.sizes)


def made_data(
    root: Path,
    classes: int = 4,
    images: int = 6,
    size: int = 16,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    shards: bool = False,
) -> Made:
    """Write all sets of the paper below ``root``, and ``photos``, a folder of a user's images.

    Each of ``classes`` (at least 2) has ``images`` to train on and half as many to test, files of ``size``
    pixels and a little more; a corrupted set has one of each. ``shards``: ImageNet-21k as tar files.
    """
    pytest.importorskip("PIL.Image")
    common = [w for w in wnids("imagenet") if w in set(wnids("imagenet-a")) & set(wnids("imagenet-r"))]
    chosen = [common[place] for place in np.linspace(0, len(common) - 1, classes - 1).round().astype(int)]
    counts = {"train": images, "test": max(2, images // 2)}
    made = Made(
        root,
        tuple(sorted((*chosen, TEDDY), key=wnids("imagenet").index)),
        tuple(corruptions),
        tuple(severities),
        {split: classes * count for split, count in counts.items()},
    )
    writer = _Writer(made, counts, Painter(size, classes))
    writer.imagenet()
    (writer.imagenet21k_shards if shards else writer.imagenet21k)()
    writer.cifar()
    writer.places()
    for split, count in counts.items():
        names = PHOTOS[:classes]
        writer.folders("photos", split, root / "photos" / split, names, names, f"{count}.png")
    return made


class Painter:
    """Images of a class: its hue, under noise, from seeded random numbers."""

    def __init__(self, size: int, classes: int) -> None:
        self.size, self.classes = size, classes
        self.random = np.random.default_rng(0)

    def paint(self, place: int | None, noise: float = 30.0, size: int | None = None) -> np.ndarray:
        """(size + 4, size, 3) bytes, or (size, size, 3) where a size is given; None: grey."""
        shape = (self.size + 4, self.size, 3) if size is None else (size, size, 3)
        hue, saturation = (0.0, 0.0) if place is None else (place / self.classes, 0.8)
        pixels = 255 * np.array(colorsys.hsv_to_rgb(hue, saturation, 0.7))
        pixels = pixels + noise * self.random.standard_normal(shape)
        return np.clip(pixels, 0, 255).astype(np.uint8)

    def file(self, place: int | None, ending: str, noise: float = 30.0) -> bytes:
        """A picture as the content of a file."""
        from PIL import Image

        stream = io.BytesIO()
        form = {"png": "PNG", "webp": "WEBP"}.get(ending, "JPEG")
        Image.fromarray(self.paint(place, noise)).save(stream, form, quality=95)
        return stream.getvalue()


@dataclass(frozen=True)
class _Writer:
    made: Made
    counts: dict[str, int]
    """Images of a class in each split."""
    painter: Painter

    def folders(
        self,
        name: str,
        split: str,
        folder: Path,
        classes: Sequence[str],
        known: Sequence[str],
        files: str,
        noise: float = 30.0,
    ) -> None:
        """Write a folder for each class, labelled by its index in ``known``; ``files`` "3.png": 3 each."""
        count, ending = files.split(".")
        for place, title in enumerate(classes):
            (folder / title).mkdir(parents=True)
            for number in range(int(count)):
                content = self.painter.file(place, ending, noise)
                (folder / title / f"{title}_{number}.{ending}").write_bytes(content)
        labels = sorted(known.index(title) for title in classes)
        self.made.labels[name, split] = [label for label in labels for _ in range(int(count))]

    def imagenet(self) -> None:
        """ImageNet, -C, -A, -R and -V2."""
        root, classes, known = self.made.root, self.made.wnids, wnids("imagenet")
        train, tests = self.counts["train"], self.counts["test"]
        self.folders("imagenet", "train", root / "imagenet/train", classes, known, f"{train}.JPEG")
        self.folders("imagenet", "test", root / "imagenet/val", classes, known, f"{tests}.JPEG")
        for corruption in self.made.corruptions:
            for severity in self.made.severities:
                folder, noise = root / "imagenet-c" / corruption / str(severity), 30.0 * (1 + severity)
                self.folders("imagenet-c", "test", folder, classes, known, "1.JPEG", noise)
        for name in ("imagenet-a", "imagenet-r"):
            there = [wnid for wnid in classes if wnid in wnids(name)]
            self.folders(name, "test", root / name, there, wnids(name), f"{tests}.jpg", 60.0)
        numbers, all_numbers = [str(known.index(wnid)) for wnid in classes], list(map(str, range(len(known))))
        folder = root / "imagenetv2-matched-frequency-format-val"
        self.folders("imagenet-v2", "test", folder, numbers, all_numbers, f"{tests}.jpeg")

    # --- ImageNet-21k: every other image is also one of an organism ---------------------------------------

    def _big(self, number: int) -> list[tuple[int, str, list[str]]]:
        """Place, wnid and labels of the image of that number in each class."""
        classes = [wnid for wnid in self.made.wnids if wnid != TEDDY]
        return [(place, w, [w, ORGANISM] if number % 2 else [w]) for place, w in enumerate(classes)]

    def _remember(self, split: str, labels: list[str]) -> None:
        known = wnids("imagenet21k")
        self.made.several.setdefault(split, []).append(sorted(known.index(label) for label in labels))

    def imagenet21k(self) -> None:
        """ImageNet-21k in folders, with lists."""
        for split, name in (("train", "train"), ("test", "val")):
            folder, lines = self.made.root / "imagenet21k" / name, []
            for number in range(self.counts[split]):
                for place, wnid, labels in self._big(number):
                    (folder / wnid).mkdir(parents=True, exist_ok=True)
                    file = f"{wnid}/{wnid}_{number}.JPEG"
                    (folder / file).write_bytes(self.painter.file(place, "JPEG"))
                    lines.append(f"{file},{' '.join(labels)}\n")
                    self._remember(split, labels)
            (folder / LABELS).write_text("".join(lines), encoding="utf-8")

    def imagenet21k_shards(self) -> None:
        """ImageNet-21k in shards, one for each image of a class, so that some can be held out."""
        for split, name in (("train", "train"), ("test", "val")):
            folder = self.made.root / "imagenet21k" / name
            folder.mkdir(parents=True)
            for number in range(self.counts[split]):
                with tarfile.open(folder / f"imagenet21k-{name}-{number:04d}.tar", "w") as tar:
                    for place, wnid, labels in self._big(number):
                        parts = {"jpg": self.painter.file(place, "jpg"), "cls": " ".join(labels).encode()}
                        for ending, content in parts.items():
                            member = tarfile.TarInfo(f"{wnid}_{number}.{ending}")
                            member.size = len(content)
                            tar.addfile(member, io.BytesIO(content))
                        self._remember(split, labels)

    # --- CIFAR --------------------------------------------------------------------------------------------

    def cifar(self) -> None:
        """The authors' binary files: label bytes, then the planes of red, green and blue."""
        for name, layout in cifar.CIFAR.items():
            folder, names = self.made.root / layout.binary, CLASS_NAMES[f"{name}-c"]
            folder.mkdir(parents=True)
            (folder / layout.names).write_text("\n".join(names) + "\n", encoding="ascii")
            classes = self.painter.classes
            spread = np.linspace(0, len(names) - 1, classes).round().astype(np.uint8)
            for split, count in self.counts.items():
                places = self.painter.random.permutation(np.repeat(np.arange(classes), count))
                pixels = np.stack([self.painter.paint(place, size=cifar.SIDE) for place in places])
                planes = pixels.transpose(0, 3, 1, 2).reshape(len(places), -1)
                # CIFAR-100 has a coarse label, which is not read, before the fine one.
                labels = np.repeat(spread[places][:, None], layout.label_bytes, 1)
                records, files = np.concatenate([labels, planes], 1), layout.files[split]
                for file, part in zip(files, np.array_split(records, len(files)), strict=True):
                    part.tofile(folder / f"{file}.bin")
                self.made.labels[name, split] = spread[places].tolist()
            self._cifar_c(f"{name}-c", pixels)
        self._human_labels()

    def _cifar_c(self, name: str, clean: np.ndarray) -> None:
        """CIFAR-C of the test images: five severities of noise one after another."""
        folder, labels = self.made.root / FOLDERS[name], self.made.labels[name.removesuffix("-c"), "test"]
        folder.mkdir()
        np.save(folder / "labels.npy", np.tile(np.array(labels, np.uint8), len(SEVERITIES)))
        for corruption in self.made.corruptions:
            noise = self.painter.random.standard_normal((len(SEVERITIES), *clean.shape))
            noise *= 20.0 * np.array(SEVERITIES)[:, None, None, None, None]
            pixels = np.clip(clean + noise, 0, 255).astype(np.uint8)
            np.save(folder / f"{corruption}.npy", pixels.reshape(-1, *clean.shape[1:]))
        self.made.labels[name, "test"] = labels

    def _human_labels(self) -> None:
        """CIFAR-10N, every fourth of "worse" wrong, and CIFAR-10H, where all voters agree."""
        labels, folder = self.made.labels, self.made.root / "cifar10"
        clean = np.array(labels["cifar10", "train"])
        wrong = np.where(np.arange(len(clean)) % 4 == 0, (clean + 1) % 10, clean)
        human = {f"c10_{key}": wrong if name == "worse" else clean for name, key in CIFAR10N_KEYS.items()}
        folder.mkdir()
        np.savez(folder / "cifar_n.npz", **human)
        votes = 50 * np.eye(10, dtype=np.int64)[labels["cifar10", "test"]]
        np.savez(folder / "cifar10h_counts.npz", counts=votes)
        labels["cifar10n", "train"] = wrong.tolist()
        labels["cifar10n", "test"] = labels["cifar10h", "test"] = labels["cifar10", "test"]

    # --- places: grey, unlike any class -------------------------------------------------------------------

    def places(self) -> None:
        """Places365 by torchvision's lists, scenes by folders."""
        home, count = self.made.root / "places365", self.counts["test"]
        (home / "val_256").mkdir(parents=True)
        rows = [(f"Places365_val_{n + 1:08d}.jpg", n % len(PLACES)) for n in range(len(PLACES) * count)]
        for file, _ in rows:
            (home / "val_256" / file).write_bytes(self.painter.file(None, "jpg", 80.0))
        for name, pairs in ((LISTS["test"], rows), (CATEGORIES, [(p, n) for n, p in enumerate(PLACES)])):
            (home / name).write_text("".join(f"{path} {n}\n" for path, n in pairs), encoding="utf-8")
        self.made.labels["places365", "test"] = [label for _, label in rows]
        for name in SCENES:
            (self.made.root / "scenes" / name).mkdir(parents=True)
            for number in range(count):
                content = self.painter.file(None, "webp", 80.0)
                (self.made.root / "scenes" / name / f"sun_{number}.webp").write_bytes(content)
        self.made.labels["scenes", "test"] = [label for label in range(len(SCENES)) for _ in range(count)]
