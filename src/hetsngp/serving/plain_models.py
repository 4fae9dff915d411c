"""Models saved by :func:`hetsngp.save` alone: their preprocessing, where the network tells it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetsngp.data.preprocessing import Preprocessing
from hetsngp.models.classifier import Classifier
from hetsngp.models.ensemble import Ensemble


def assumed_inputs(
    model: Classifier | Ensemble, folder: Path, class_names: Sequence[str] | None
) -> tuple[Preprocessing, str]:
    """Preprocessing of a network of timm's by its architecture, and a line that says what was assumed.

    ``class_names``: None: the numbers of the classes. A network of another origin is an error that says how
    to write the preprocessing.
    """
    members = model.members if isinstance(model, Ensemble) else [model]
    sources = [member.config["backbone"] for member in members if isinstance(member, Classifier)]
    found = _timm_config(sources)
    if found is None:
        is_text = any("pooling" in (source.get("config") or ()) for source in sources)
        how = _how_to_write_texts if is_text else _how_to_write
        raise FileNotFoundError(how(folder, model.num_classes))
    name, size, config = found
    names = tuple(map(str, range(model.num_classes))) if class_names is None else tuple(class_names)
    if len(names) != model.num_classes:
        raise ValueError(
            f"the model has {model.num_classes} classes, and {len(names)} names were given: give one for each"
        )
    resize = int(size / config["crop_pct"])  # as timm rounds it
    multi_label = any(member.head.sigmoid for member in members if isinstance(member, Classifier))
    inputs = Preprocessing(
        (size, size), config["mean"], config["std"], names, multi_label, resize=resize, resize_arrays=True
    )
    numbered = "; classes are numbered, --classes names them" if class_names is None else ""
    note = (
        f"{folder} has no serving.json: images are prepared as timm's {name} takes them (short side "
        f"{resize}, centre of {size} pixels, mean {_listed(inputs.mean)}, std {_listed(inputs.std)}), and "
        f"there are no thresholds for verdicts{numbered}"
    )
    return inputs, note


def read_class_names(given: str) -> tuple[str, ...]:
    """Class names of ``--classes``: separated by commas, or a text file with one on each line."""
    is_file = os.path.isfile(given)  # Path.is_file raises where many names are too long for a path
    parts = Path(given).read_text(encoding="utf-8").splitlines() if is_file else given.split(",")
    names = tuple(part.strip() for part in parts if part.strip())
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(
            f"--classes takes two or more names, a,b,c, or a file with one on each line, got {given}"
        )
    return names


def _timm_config(sources: Sequence[Mapping[str, Any]]) -> tuple[str, int, dict[str, Any]] | None:
    """Name, side of the input and ``pretrained_cfg`` of a network of timm's for square RGB images; None for
    another, and for members of several.
    """
    kinds = {(source["name"], repr(source.get("config"))) for source in sources}
    if len(kinds) != 1 or sources[0]["name"] != "timm" or sources[0]["config"].get("in_chans", 3) != 3:
        return None
    import timm

    given = sources[0]["config"]
    known = timm.get_pretrained_cfg(given["model_name"])
    if known is None or not known.mean or not known.std:
        return None
    config = known.to_dict()
    height, width = given.get("img_size") or config["input_size"][1:]
    return None if height != width else (given["model_name"], height, config)


def _how_to_write(folder: Path, num_classes: int) -> str:
    line = (
        "from hetsngp.data.preprocessing import Preprocessing; from hetsngp.serving import write_serving; "
        f"write_serving({str(folder)!r}, Preprocessing((224, 224), (0.485, 0.456, 0.406), "
        f"(0.229, 0.224, 0.225), tuple(map(str, range({num_classes})))))"
    )
    return (
        f"{folder / 'serving.json'} is missing, which holds the preprocessing of the images, and the network "
        "does not say how it takes them: finish the training (hetsngp train …), copy the complete folder, "
        f"or write it in Python, with your size, mean, std and class names: {line}"
    )


def _how_to_write_texts(folder: Path, num_classes: int) -> str:
    line = (
        "from hetsngp.data.text.preprocessing import TextPreprocessing; "
        "from hetsngp.pretrained.text_networks import pretrained_text_network; "
        "from hetsngp.serving import write_serving; "
        f"write_serving({str(folder)!r}, TextPreprocessing(pretrained_text_network('minilm').tokenizer, "
        f"tuple(map(str, range({num_classes})))))"
    )
    return (
        f"{folder / 'serving.json'} is missing, which holds the tokenizer's settings: finish the training "
        "(hetsngp train …), copy the complete folder, or write it in Python, with the name of your network "
        f"and those of the classes: {line}"
    )


def _listed(values: Sequence[float]) -> str:
    return "/".join(f"{value:.3f}" for value in values)
