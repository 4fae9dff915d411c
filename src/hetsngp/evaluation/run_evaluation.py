"""Evaluation of a finished training run, on sets given by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetsngp.data.class_maps import match_classes
from hetsngp.data.corrupted import CorruptedImages, LazyMap
from hetsngp.data.datasets.registry import DATASETS
from hetsngp.data.preprocessing import made_by_hetsngp
from hetsngp.data.sources import has_test
from hetsngp.evaluation.evaluator import evaluate
from hetsngp.evaluation.report import Report
from hetsngp.evaluation.restriction import restrict
from hetsngp.models.methods import METHODS
from hetsngp.serving.bundle import ServedModel, open_run


@dataclass(frozen=True)
class RunSets:
    """Sets to evaluate a run on: names of data sets, folders or .npz files."""

    data: str | None = None
    """Labelled images; None: the test images of the training data set."""
    ood: Mapping[str, str] = field(default_factory=dict)
    corrupted: str | None = None
    limit: int | None = None
    """Largest number of images of each set."""


def evaluate_run(
    run: str | Path,
    sets: RunSets,
    out: str | Path,
    *,
    batch_size: int = 500,
    quick: bool = False,
    device: str | torch.device = "cpu",
) -> Report:
    """Run :func:`hetsngp.evaluate` on the model in ``run``; all sets are opened before anything is predicted.

    Where the classes of ``sets.data`` are some of the model's, it chooses among these. ``quick``: corrupted
    sets without uncertainties.
    """
    served = open_run(run, device=device)
    inputs, trained_on = served.inputs, str(served.about.get("data") or "")
    spec = sets.data or _own_set(served, run)
    id_images = inputs.open(spec, limit=sets.limit)
    ood_images = {name: inputs.open(other, limit=sets.limit) for name, other in sets.ood.items()}
    corrupted = None
    if sets.corrupted is not None:
        corrupted = inputs.open_corrupted(sets.corrupted, clean=spec, limit=sets.limit)
        _check_same_classes(corrupted, sets.corrupted, id_images.class_names, spec)
    model: Any = served.model
    wanted = match_classes(trained_on, inputs.class_names, spec, id_images.class_names)
    if wanted is not None:
        model = restrict(model, wanted)

    def loader(images: Any, resize: int | None = None) -> Any:
        return inputs.loader(images, batch_size, device=device, resize=resize)

    # The images of ImageNet-C are cropped already.
    cut = inputs.size[0] if sets.corrupted == "imagenet-c" else None
    prepared = f"{inputs.to_dict()} {batch_size} {cut}"
    return evaluate(
        model,
        loader(id_images),
        ood={name: loader(images) for name, images in ood_images.items()},
        corrupted=None if corrupted is None else LazyMap(corrupted, lambda i: loader(i, cut), about=prepared),
        out=out,
        title=_title(served, spec),
        about=_about(served, sets, corrupted),
        corrupted_uncertainty=not quick,
        show=None,
    )


def _own_set(served: ServedModel, run: str | Path) -> str:
    """Data set that the run was trained on, if there are test images."""
    # A path that was given from another folder is still found.
    spec = str(served.about.get("data_path") or served.about.get("data") or "")
    if not spec:
        raise ValueError(f"{run} does not say what it was trained on: name the labelled images, --data SET")
    if spec.partition(":")[0] in DATASETS:
        return spec
    path = Path(spec).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{run} was trained on {spec}, where nothing is any more: name the labelled images, --data SET"
        )
    if path.is_dir() and not has_test(path):  # classes alone, all of which were trained on
        raise ValueError(f"{spec}, which it was trained on, has no test images: name others, --data SET")
    return spec


def _about(served: ServedModel, sets: RunSets, corrupted: Mapping[Any, Any] | None) -> dict[str, str]:
    """Sets, recipe and versions, for the report."""
    found = {"recipe": str(served.about.get("recipe") or served.folder.name)}
    found["data"] = sets.data or str(served.about.get("data"))
    found |= {f"ood {name}": spec for name, spec in sets.ood.items()}
    if corrupted is not None:
        whose = "made by hetsngp" if made_by_hetsngp(corrupted) else "published files"
        found["corrupted"] = f"{sets.corrupted} ({whose})"
    if sets.limit is not None:
        found["limit"] = f"{sets.limit} images of each set"
    found |= {"hetsngp": importlib.import_module("hetsngp").__version__, "torch": torch.__version__}
    note = _note_on_labels(served, sets)
    return found if note is None else {**found, "note": note}


def _note_on_labels(served: ServedModel, sets: RunSets) -> str | None:
    """Sentence for the report where the labelled images are those that were trained on."""
    own = str(served.about.get("data_path") or served.about.get("data") or "")
    if not own or sets.data is None or not _is_training_set(own, sets.data):
        return None
    note = "these are the images that were trained on, so that the numbers are too good"
    if "labels" in served.about:
        note += f"; measured by their labels as given, not as corrected by {served.about['labels']}"
    return note


def _is_training_set(own: str, spec: str) -> bool:
    """Whether ``spec`` is the folder of classes that a run was trained on, or that of its training images."""
    if own.partition(":")[0] in DATASETS or spec.partition(":")[0] in DATASETS:
        return False
    trained, given = (Path(each).expanduser().resolve() for each in (own, spec))
    return given == trained / "train" or (given == trained and given.is_dir() and not has_test(given))


def _check_same_classes(corrupted: Mapping[Any, Any], name: str, classes: Sequence[str], spec: str) -> None:
    """Check that corrupted images have the classes of the clean ones, by which their labels are numbered."""
    inner = corrupted.sets if isinstance(corrupted, LazyMap) else corrupted
    found = inner.images if isinstance(inner, CorruptedImages) else inner[next(iter(inner))]
    if tuple(found.class_names) != tuple(classes):
        raise ValueError(
            f"{name} has other classes than {spec}, {found.class_names[0]!r} first and not {classes[0]!r}: "
            "give the corrupted images of that set, or name the set of these, --data SET"
        )


def _title(served: ServedModel, spec: str) -> str:
    config = getattr(served.model, "config", {})
    method = config.get("method")
    title = METHODS[method].title if method in METHODS else type(served.model).__name__
    return f"{title} ({served.about.get('recipe', served.folder.name)}) on {Path(spec).name}"
