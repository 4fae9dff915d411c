"""Folders of images whose names, not their order, say which class they hold."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

ENDINGS = (".jpeg", ".jpg", ".png", ".webp")
SHOWN = 5


def class_files(
    folder: Path, label_of: Mapping[str, int], title: str, *, advice: str = ""
) -> tuple[list[str], list[int]]:
    """Images in the folders of ``folder``, as "class/file", by label and then by name; and their labels.

    ``label_of`` gives the label of each name a folder may have. A folder of any other name is an error: its
    images have no label. Classes without images are allowed, so that a part of a data set can be used, and
    warned of. Hidden folders and files that are no images are passed over. ``advice`` ends the errors.
    """
    there = {entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")}
    example = next(iter(label_of))
    if not there:
        raise ValueError(f"{folder} has no class folders such as {example}/: {advice or 'put them there'}")
    unknown = sorted(there - label_of.keys())
    if unknown:
        raise ValueError(
            f"{folder} has {_listed(unknown)}, which {_are(unknown)} no class of {title}: a folder for each "
            f"class, named such as {example}/, should lie in it directly; remove or rename the others"
        )
    files: list[str] = []
    labels: list[int] = []
    empty = []
    for name, label in sorted(label_of.items(), key=lambda item: item[1]):
        images = sorted(image_names(folder / name)) if name in there else []
        files += [f"{name}/{image}" for image in images]
        labels += [label] * len(images)
        if not images:
            empty.append(name)
    if not files:
        endings = ", ".join(ENDINGS)
        raise ValueError(f"no folder in {folder} has an image ({endings}): copy or unpack {title} again")
    if empty:
        warnings.warn(
            f"{folder} is a part of {title}: no images of {len(empty)} of {len(label_of)} classes, "
            f"{_listed(empty)}; the others keep their labels in the whole",
            stacklevel=4,
        )
    return files, labels


def image_names(folder: Path) -> Iterator[str]:
    """Names of the images in a folder, in no order."""
    for entry in os.scandir(folder):
        # by name first: a million files should not be asked what they are
        name = entry.name
        if name.lower().endswith(ENDINGS) and not name.startswith(".") and entry.is_file():
            yield name


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
