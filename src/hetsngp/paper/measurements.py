"""Measurements of a trained model: each set is measured once and cached in a small file beside the model.

A cached measurement is valid as long as nothing that decides it changes: the model, its preprocessing, the
set (its name and number of images), and the code that predicts and measures.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hetsngp.data.corrupted import CorruptedImages
from hetsngp.data.datasets.imagenet import imagenet_subset
from hetsngp.data.datasets.imagenet21k import to_imagenet1k
from hetsngp.data.datasets.synsets import SUBSETS
from hetsngp.data.images.device_loader import DeviceLoader
from hetsngp.data.preprocessing import Preprocessing
from hetsngp.evaluation.cache import ResultCache, code_fingerprint, fingerprint_of
from hetsngp.evaluation.loader_quality import measure_examples, summarize
from hetsngp.evaluation.restriction import restrict
from hetsngp.io.storage import CONFIG
from hetsngp.models.classifier import Classifier, to_device
from hetsngp.models.ensemble import Ensemble
from hetsngp.serving.bundle import image_inputs, open_run
from hetsngp.types import Prediction

if TYPE_CHECKING:  # the definitions of the tables decide no number
    from hetsngp.paper.sets import EvaluationSet

ONE_THOUSAND = ("imagenet", "imagenet-c", "imagenet-a", "imagenet-r", "imagenet-v2")
"""Sets with labels among the 1,000 classes of ImageNet."""
BATCH, LARGE_BATCH, LARGE = 1000, 250, 128
"""Images in a batch; ``LARGE_BATCH`` where a side has at least ``LARGE`` pixels."""
NUM_BINS = 15


# --- the model ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained network, or an ensemble of them."""

    folders: tuple[Path, ...]
    """Folders of the training runs."""
    measured: Path
    """Folder of its measurements."""
    data: str
    """Training data set, by its name in the registry."""

    def identity(self) -> list[str]:
        """Hashes of each model's config, which contains the SHA-256 of its weights, and preprocessing."""
        files = [folder / "model" / name for folder in self.folders for name in (CONFIG, "serving.json")]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

    def open(self, device: torch.device) -> tuple[Any, Any]:
        """Load the model and its preprocessing."""
        served = [open_run(folder, device) for folder in self.folders]
        models: list[Any] = [each.model for each in served]
        if device.type == "cuda":  # as the batches are: convolutions take half the time
            models = [model.to(memory_format=torch.channels_last) for model in models]
        inputs = [image_inputs(each) for each in served]
        if len(models) == 1:
            return models[0], inputs[0]
        ensemble = Ensemble(models)
        same = all(each == inputs[0] for each in inputs)
        return ensemble if same else PerMemberNormalization(ensemble, tuple(inputs)), inputs[0]


@dataclass(frozen=True, eq=False)
class PerMemberNormalization:
    """An ensemble whose members normalise pixels differently, by the images that each was trained on."""

    ensemble: Ensemble
    inputs: tuple[Preprocessing, ...]

    def predict(self, x: Tensor) -> Prediction:
        """Prediction of the mixture for images (B, C, H, W) normalised as for the first member."""
        return self.ensemble.mix([member.predict(own) for member, own in self._own_inputs(x)])

    def predict_probs(self, x: Tensor) -> Tensor:
        """Return ``predict(x).probs`` alone: (B, K)."""
        return torch.stack([member.predict_probs(own) for member, own in self._own_inputs(x)]).mean(0)

    def _own_inputs(self, x: Tensor) -> Iterator[tuple[Classifier, Tensor]]:
        """Each member, and the images normalised as for it."""
        mean, std = _scale(self.inputs[0], x)
        pixels = x * std + mean
        for member, inputs in zip(self.ensemble.members, self.inputs, strict=True):
            mean, std = _scale(inputs, x)
            yield member, (pixels - mean) / std


def _scale(inputs: Preprocessing, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of pixels, (C, 1, 1)."""
    mean, std = (torch.tensor(value).to(like)[:, None, None] for value in (inputs.mean, inputs.std))
    return mean, std


def adapt_to_labels(model: Any, data: str, spec: str) -> tuple[Any, Tensor | None]:
    """Adapt a model trained on ``data`` to the labels of ``spec``; also the model's class for each label.

    A network of the 21,843 classes chooses among the 1,000. ImageNet-A and -R number their 200 classes anew;
    a network of the 1,000 chooses among all of them, as in the paper.
    """
    base = spec.partition(":")[0]
    if data == "imagenet21k" and base in ONE_THOUSAND:
        model = restrict(model, to_imagenet1k())
    return model, imagenet_subset(base).index if base in SUBSETS else None


# --- one set --------------------------------------------------------------------------------------------


@torch.no_grad()
def scores(model: Any, batches: Any, device: torch.device) -> dict[str, Any]:
    """Values of ``ood_score``, one for each example."""
    found = torch.cat([model.predict(to_device(x, device)).ood_score.double().cpu() for x, _ in batches])
    # Nine digits are all that float32 has; the list is long.
    return {"ood_score": [float(f"{score:.9g}") for score in found.tolist()], "examples": len(found)}


# --- all sets -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ModelMeasurements:
    """Measurements of ``model`` on ``sets``, those that are cached and those that are missing."""

    model: TrainedModel
    sets: Sequence[EvaluationSet]

    @functools.cached_property
    def _identity(self) -> list[str]:
        return self.model.identity()

    @property
    def cache(self) -> ResultCache:
        """Files of the measurements, by the name of the set."""
        return ResultCache(self.model.measured)

    def read(self, of: EvaluationSet) -> dict[str, Any] | None:
        """Numbers of a set, or None where they are missing or not valid any more."""
        found = self.cache.read(of.name, self.fingerprint(of))
        return None if found is None else found.get("numbers")

    def examples(self, of: EvaluationSet) -> dict[str, Any] | None:
        """Values of each example of a set: ``ood_score``, or ``confidence``, ``correct`` and ``nll``."""
        return self.read(of) if of.scores else self.cache.read_arrays(of.name, self.fingerprint(of))

    def missing(self) -> list[EvaluationSet]:
        """Sets that are not measured."""
        return [each for each in self.sets if self.read(each) is None or self.examples(each) is None]

    def measure(
        self,
        sets: Sequence[EvaluationSet],
        device: torch.device,
        root: Any = None,
        opened: dict[str, Mapping[Any, Any]] | None = None,
    ) -> Iterator[int]:
        """Measure and cache each set; yields its number of images. No two sets are in memory at once, except
        for small corrupted ones on a GPU. ``opened``: corrupted sets that another model has opened.
        """
        if not sets:
            return
        model, inputs = self.model.open(device)
        opened = {} if opened is None else opened
        for each in sets:
            begun = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is odd about a set was told when it was found
                if each.corruption is not None and each.spec not in opened:
                    opened[each.spec] = _corrupted(inputs, each.spec, device, root)
                # No name for the images here: they must be gone before the next set is made.
                batches = _loader(inputs, each, opened.get(each.spec, {}), device, root)
            numbers = self._numbers(model, each, batches, device)
            del batches
            about = {"set": each.name, "seconds": round(time.perf_counter() - begun, 3)}
            self.cache.write(each.name, self.fingerprint(each), {**about, "numbers": numbers})
            yield int(numbers["examples"])

    def _numbers(self, model: Any, of: EvaluationSet, batches: Any, device: torch.device) -> dict[str, Any]:
        """Numbers of a set; caches those of each example, except for scores, which are numbers here."""
        if of.scores:
            return scores(model, batches, device)
        adapted, class_index = adapt_to_labels(model, self.model.data, of.spec)
        try:
            terms, multi_label = measure_examples(adapted, batches, device, class_index=class_index)
        except FloatingPointError as error:
            raise FloatingPointError(
                f"{self.model.measured.parent}: {error} on {of.name}, so training diverged: lower the "
                "learning rate, --set schedule.lr=…, and train again in another folder"
            ) from error
        values = {name: value.float().numpy() for name, value in terms._asdict().items()}
        values["correct"] = values["correct"] > 0
        self.cache.write_arrays(of.name, self.fingerprint(of), values)
        return summarize(terms, multi_label=multi_label, num_bins=NUM_BINS)

    def fingerprint(self, of: EvaluationSet) -> str:
        """Hash of all that decides the numbers of a set."""
        versions = [torch.__version__, timm_version()]
        return fingerprint_of(
            code_fingerprint(__name__), *versions, self._identity, self.model.data, of.name, of.size
        )


def _corrupted(inputs: Any, spec: str, device: torch.device, root: Any) -> Mapping[Any, Any]:
    sets: Mapping[Any, Any] = inputs.open_corrupted(spec, root=root)
    if not isinstance(sets, CorruptedImages):
        return sets
    # Ours are made on the device of the images.
    made = replace(sets, images=sets.images.to(device))
    return KeptSets(made) if device.type == "cuda" else made


class KeptSets(Mapping[Any, Any]):
    """Sets that are made once, for all models that are measured on them: CIFAR-100-C has 2.3 GB."""

    def __init__(self, sets: Mapping[Any, Any]) -> None:
        self.sets, self.made = sets, dict[Any, Any]()

    def __getitem__(self, key: Any) -> Any:
        if key not in self.made:
            self.made[key] = self.sets[key]
        return self.made[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sets)

    def __len__(self) -> int:
        return len(self.sets)


def _loader(inputs: Any, of: EvaluationSet, sets: Mapping[Any, Any], device: torch.device, root: Any) -> Any:
    size = LARGE_BATCH if max(inputs.size) >= LARGE else BATCH
    images = inputs.open(of.spec, root=root) if of.corruption is None else sets[of.corruption]
    # The images of ImageNet-C are cropped already.
    cut = inputs.size[0] if of.spec == "imagenet-c" else None
    loader = inputs.loader(images, size, resize=cut)
    if isinstance(loader, DeviceLoader):
        return loader.to(device, channels_last=device.type == "cuda")
    return loader


@functools.cache
def timm_version() -> str | None:
    """Version of timm; None where it is not installed, so that no network is from it."""
    try:
        return importlib.metadata.version("timm")
    except importlib.metadata.PackageNotFoundError:
        return None
