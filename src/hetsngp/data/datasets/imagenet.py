"""ImageNet and its variants as folders of image files.

A label is the index of a class in timm's lists, as in every ImageNet network, never the index of its folder
among those that are there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from hetsngp.data.class_maps import ClassMap
from hetsngp.data.corruptions import CORRUPTIONS, SEVERITIES
from hetsngp.data.datasets.dataset import DataSet, data_root, missing
from hetsngp.data.datasets.imagenet21k import GET_21K, LAYOUT_21K, open_imagenet21k
from hetsngp.data.datasets.synsets import SUBSETS, class_names, wnids
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.images.folders import class_files, subfolders
from hetsngp.validation import check_choice

FOLDERS = {"train": "train", "test": "val"}
"""Folders of ImageNet's splits; the test labels were never published, so its validation set is "test"."""
VALPREP = "https://raw.githubusercontent.com/soumith/imagenetloader.torch/master/valprep.sh"
GROUPS = ("noise", "blur", "weather", "digital", "extra")
"""Archives of ImageNet-C; folders of these names may contain those of the corruptions."""
V2 = ("matched-frequency", "threshold0.7", "top-images")
"""The three sets of ImageNet-V2; the first is the default."""

GET = {
    "imagenet": "https://image-net.org/download (ILSVRC 2012, after registration)",
    "imagenet-c": "https://zenodo.org/records/2235448",
    "imagenet-a": "https://github.com/hendrycks/natural-adv-examples",
    "imagenet-r": "https://github.com/hendrycks/imagenet-r",
    "imagenet-v2": "https://huggingface.co/datasets/vaishaal/ImageNetV2",
}


def open_imagenet(root: str | Path | None = None, split: str = "test") -> ImageFiles:
    """Open ``imagenet/train/<wnid>/*.JPEG`` or, for "test", ``imagenet/val/<wnid>/*.JPEG`` below ``root``."""
    folder = data_root(root) / "imagenet" / FOLDERS[check_choice("split", split, FOLDERS)]
    if not folder.is_dir():
        raise missing("imagenet", [folder], GET["imagenet"])
    advice = "unpack the archive of each class into a folder of its name"
    if split == "test":
        advice = f"sort the images into folders by running the script {VALPREP} in it"
    return _by_wnid(folder, "imagenet", advice)


def open_imagenet_a(root: str | Path | None = None, split: str = "test") -> ImageFiles:
    """Open ImageNet-A, ``imagenet-a/<wnid>/*``: labels 0 … 199; see :func:`imagenet_subset`."""
    return _open_subset(root, "imagenet-a", split)


def open_imagenet_r(root: str | Path | None = None, split: str = "test") -> ImageFiles:
    """Open ImageNet-R, ``imagenet-r/<wnid>/*``: labels 0 … 199; see :func:`imagenet_subset`."""
    return _open_subset(root, "imagenet-r", split)


def imagenet_subset(name: str) -> ClassMap:
    """Map from the 1,000 classes of ImageNet to the 200 of "imagenet-a" or "imagenet-r"."""
    check_choice("subset of ImageNet", name, SUBSETS)
    return ClassMap.between(wnids("imagenet"), wnids(name), class_names(name))


def open_imagenet_v2(
    root: str | Path | None = None, split: str = "test", variant: str = "matched-frequency"
) -> ImageFiles:
    """Open ImageNet-V2: ``imagenetv2-<variant>-format-val/<0 … 999>/*`` in ``root`` or ``root/imagenet-v2``.

    The variant "matched-frequency" may also lie in ``imagenet-v2`` itself. The folders are named by the
    label. Sorted as text they would be 0, 1, 10, 100, …, and nearly every label wrong.
    """
    check_choice("split", split, ("test",))
    base = data_root(root)
    archive = f"imagenetv2-{check_choice('variant', variant, V2)}.tar.gz"
    folder = _v2_folder(base, variant)
    if folder is None:
        there = " or ".join(f"imagenet-v2:{name}" for name in V2 if _v2_folder(base, name))
        get = f"{GET['imagenet-v2']}, {archive}" + (f"; what is there opens as {there}" if there else "")
        raise missing(f"imagenet-v2:{variant}", _v2_candidates(base, variant), get)
    names = class_names("imagenet")
    label_of = {str(label): label for label in range(len(names))}
    files, labels = class_files(folder, label_of, "imagenet-v2", advice=f"unpack {archive} again")
    return ImageFiles(tuple(folder / file for file in files), torch.tensor(labels), names)


def open_imagenet_c(root: str | Path | None = None, split: str = "test") -> CorruptedFolders:
    """Open ImageNet-C, ``imagenet-c/<corruption>/<1 … 5>/<wnid>/*.JPEG``, also in folders of its archives.

    A mapping from (corruption, severity) to images of 224 pixels, for those that are there, with a warning
    where some of the 15 standard corruptions are missing.
    """
    check_choice("split", split, ("test",))
    folder = data_root(root) / "imagenet-c"
    if not folder.is_dir():
        raise missing("imagenet-c", [folder], GET["imagenet-c"])
    found = CorruptedFolders(folder)
    absent = [name for name in CORRUPTIONS for severity in SEVERITIES if (name, severity) not in found]
    if absent:
        warnings.warn(
            f"{folder} lacks {', '.join(dict.fromkeys(absent))}, or some of their severities: a mean over "
            f"the rest is not that of the benchmark. To complete it: {GET['imagenet-c']}",
            stacklevel=2,
        )
    return found


class CorruptedFolders(Mapping[tuple[str, int], ImageFiles]):
    """Mapping (corruption, severity) → :class:`ImageFiles`; a folder is listed at each access.

    The 15 standard corruptions come first, in the order of the benchmark's tables.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folders: dict[tuple[str, int], Path] = {}
        found = _folders(folder)
        for group in [found.pop(name) for name in GROUPS if name in found]:
            for name, path in _folders(group).items():
                if name in found:
                    raise ValueError(f"{found[name]} and {path} are the same corruption: remove one of them")
                found[name] = path
        if not found:
            raise ValueError(
                f"{folder} has no corruptions: unpack noise.tar, blur.tar, weather.tar and digital.tar of "
                f"{GET['imagenet-c']} into it, so that there are folders such as gaussian_noise/1/n01440764"
            )
        standard = [name for name in CORRUPTIONS if name in found]
        for name in [*standard, *sorted(found.keys() - set(standard))]:
            self._add(name, found[name])

    def _add(self, corruption: str, path: Path) -> None:
        found = _folders(path)
        odd = sorted(found.keys() - set(map(str, SEVERITIES)))
        if odd or not found:
            raise ValueError(
                f"{path} is no corruption of ImageNet-C: it has {repr(odd[0]) if odd else 'nothing'} where "
                "folders 1 … 5, one for each severity, were expected; move it out of the folder"
            )
        for severity in SEVERITIES:
            if str(severity) in found:
                self.folders[corruption, severity] = found[str(severity)]

    def __getitem__(self, key: tuple[str, int]) -> ImageFiles:
        if key not in self.folders:
            names = ", ".join(dict.fromkeys(corruption for corruption, _ in self.folders))
            raise KeyError(
                f"no {key!r} in {self.folder}: ask for (corruption, severity), a corruption of {names}, a "
                f"severity of {SEVERITIES[0]} … {SEVERITIES[-1]}"
            )
        return _by_wnid(self.folders[key], "imagenet", "unpack the archives of ImageNet-C again")

    def __contains__(self, key: object) -> bool:
        return key in self.folders  # Mapping's own would list the folder

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.folders)

    def __len__(self) -> int:
        return len(self.folders)


def _open_subset(root: str | Path | None, name: str, split: str) -> ImageFiles:
    check_choice("split", split, ("test",))
    folder = data_root(root) / name
    if not folder.is_dir():
        raise missing(name, [folder], GET[name])
    return _by_wnid(folder, name, f"unpack {name}.tar again")


def _v2_candidates(base: Path, variant: str) -> list[Path]:
    outer, inner = base / "imagenet-v2", f"imagenetv2-{variant}-format-val"
    return [base / inner, outer / inner, *([outer] if variant == V2[0] else [])]


def _v2_folder(base: Path, variant: str) -> Path | None:
    for folder in _v2_candidates(base, variant):
        # The folder imagenet-v2 may hold the classes, or the other sets.
        if folder.is_dir() and not any(name.startswith("imagenetv2-") for name in subfolders(folder)):
            return folder
    return None


def _by_wnid(folder: Path, name: str, advice: str) -> ImageFiles:
    label_of = {wnid: label for label, wnid in enumerate(wnids(name))}
    files, labels = class_files(folder, label_of, name, advice=advice)
    return ImageFiles(tuple(folder / file for file in files), torch.tensor(labels), class_names(name))


def _folders(path: Path) -> dict[str, Path]:
    return {name: path / name for name in subfolders(path)}


IMAGENET_SETS: tuple[DataSet, ...] = (
    DataSet(
        "imagenet",
        "ImageNet, 1,281,167 photographs to train on and 50,000 to test, 1,000 classes",
        "imagenet/train/<wnid>/*.JPEG and imagenet/val/<wnid>/*.JPEG",
        GET["imagenet"],
        ("train", "test"),
        open_imagenet,
        gives="ImageFiles",
    ),
    DataSet(
        "imagenet-c",
        "ImageNet-C, the 50,000 under 15 (and 4 extra) corruptions at 5 severities",
        "imagenet-c/<corruption>/<1 … 5>/<wnid>/*.JPEG",
        GET["imagenet-c"],
        ("test",),
        open_imagenet_c,
        224,
        gives="CorruptedFolders",
    ),
    DataSet(
        "imagenet-a",
        "ImageNet-A, 7,500 photographs that a ResNet-50 gets wrong, 200 of the classes",
        "imagenet-a/<wnid>/*.jpg",
        GET["imagenet-a"],
        ("test",),
        open_imagenet_a,
        gives="ImageFiles",
    ),
    DataSet(
        "imagenet-r",
        "ImageNet-R, 30,000 paintings, toys and other renditions, 200 of the classes",
        "imagenet-r/<wnid>/*.jpg",
        GET["imagenet-r"],
        ("test",),
        open_imagenet_r,
        gives="ImageFiles",
    ),
    DataSet(
        "imagenet-v2",
        "ImageNet-V2, 10,000 new photographs collected as ImageNet's were, 1,000 classes",
        "imagenetv2-matched-frequency-format-val/<0 … 999>/*.jpeg, or imagenet-v2/<0 … 999>/*.jpeg",
        GET["imagenet-v2"],
        ("test",),
        open_imagenet_v2,
        variants=V2,
        gives="ImageFiles",
    ),
    DataSet(
        "imagenet21k",
        "ImageNet-21k, some 13 million photographs, 21,843 classes, multi-label",
        LAYOUT_21K,
        GET_21K,
        ("train", "test"),
        open_imagenet21k,
        gives="MultiLabelFiles or ShardedImages",
    ),
)
"""Entries of ``hetsngp.data.datasets.registry``."""
