"""CLINC150: questions to an assistant in 150 intents, and questions out of its scope."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hetsngp.data.bounded import read_file
from hetsngp.data.datasets.dataset import DataSet, data_root, first_file
from hetsngp.data.text.texts import LabelledTexts, sorted_classes
from hetsngp.limits import LIST_BYTES

FILE = "data_full.json"
SPLITS = ("train", "val", "test")
OUT_OF_SCOPE = "oos"
GET = (
    "git clone https://github.com/clinc/oos-eval in the folder of data sets, or only data/data_full.json "
    "from there"
)


def open_clinc150(root: str | Path | None, split: str, variant: str | None = None) -> LabelledTexts:
    """Sentences of the 150 intents, sorted by name; ``variant`` "oos": those out of scope, of one class."""
    base = data_root(root)
    places = (base / "clinc150", base, base / "oos-eval" / "data")
    file = first_file("clinc150", [folder / FILE for folder in places], GET)
    try:
        content = json.loads(read_file(file, LIST_BYTES).decode("utf-8"))
        if variant is not None:
            return _texts(content[f"{OUT_OF_SCOPE}_{split}"], (OUT_OF_SCOPE,))
        return _texts(content[split], sorted_classes(str(intent) for _, intent in content["train"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{file} is damaged or no file of CLINC150 ({error}): get it again, {GET}"
        ) from error


def _texts(rows: Any, class_names: tuple[str, ...]) -> LabelledTexts:
    number = {name: index for index, name in enumerate(class_names)}
    return LabelledTexts(
        tuple(text for text, _ in rows), torch.tensor([number[intent] for _, intent in rows]), class_names
    )


CLINC150 = DataSet(
    "clinc150",
    "CLINC150: questions in 150 intents, 15,000 to train, 3,000 val, 4,500 test; oos 100, 100 and 1,000",
    f"{FILE} here or in clinc150/ or oos-eval/data/",
    GET,
    SPLITS,
    open_clinc150,
    variants=(OUT_OF_SCOPE,),
    gives="LabelledTexts",
)
