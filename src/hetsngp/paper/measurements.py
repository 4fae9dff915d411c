"""What a column needs of a run: each set is measured once and kept in a small file beside the run's model.

A file counts only as long as what decided it is what it was: the model, how it sees images, the set, and the
code that predicts and measures. Of the set that is its name and its number of images.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetsngp import metrics
from hetsngp.data.corrupted import CorruptedImages
from hetsngp.data.datasets.imagenet import imagenet_subset
from hetsngp.data.datasets.imagenet21k import to_imagenet1k
from hetsngp.data.datasets.synsets import SUBSETS
from hetsngp.data.preprocessing import Preprocessing
from hetsngp.evaluation.cache import code_fingerprint
from hetsngp.evaluation.restriction import restrict
from hetsngp.files import write_atomically
from hetsngp.io.storage import CONFIG
from hetsngp.models.classifier import to_device
from hetsngp.models.ensemble import Ensemble
from hetsngp.paper.sets import DETECTION, Probe, Sets
from hetsngp.paper.tables import PaperColumn
from hetsngp.serving.bundle import open_run

ONE_THOUSAND = ("imagenet", "imagenet-c", "imagenet-a", "imagenet-r", "imagenet-v2")
"""Sets with labels among the 1,000 classes of ImageNet."""
BATCH, LARGE_BATCH, LARGE = 1000, 250, 128
"""Images at a time; fewer from so many pixels a side on."""
NUM_BINS = 15


# --- the model ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Candidate:
    """One run, or the members of an ensemble: where it is kept, and what it was trained on."""

    folders: tuple[Path, ...]
    """Of the runs."""
    measured: Path
    """Where its numbers are."""
    data: str
    """A name of the registry."""

    def identity(self) -> list[str]:
        """Of each model: its config, which names the SHA-256 of its weights, and how it sees images."""
        files = [folder / "model" / name for folder in self.folders for name in (CONFIG, "serving.json")]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

    def open(self, device: torch.device) -> tuple[Any, Any]:
        """The model and its inputs."""
        served = [open_run(folder, device) for folder in self.folders]
        models: list[Any] = [each.model for each in served]
        inputs = [each.inputs for each in served]
        if len(models) == 1:
            return models[0], inputs[0]
        ensemble = Ensemble(models)
        same = all(each == inputs[0] for each in inputs)
        return ensemble if same else OwnScales(ensemble, tuple(inputs)), inputs[0]


@dataclass(frozen=True, eq=False)
class OwnScales:
    """An ensemble whose members differ in the mean and std of pixels: those of the images each trained on."""

    ensemble: Ensemble
    inputs: tuple[Preprocessing, ...]

    def predict_probs(self, x: Tensor) -> Tensor:
        """(B, K) of images (B, C, H, W) as the first member takes them."""
        mean, std = _scale(self.inputs[0], x)
        pixels = x * std + mean
        probs = []
        for member, inputs in zip(self.ensemble.members, self.inputs, strict=True):
            mean, std = _scale(inputs, x)
            probs.append(member.predict_probs((pixels - mean) / std))
        return torch.stack(probs).mean(0)


def _scale(inputs: Preprocessing, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std (C, 1, 1)."""
    mean, std = (torch.tensor(value).to(like)[:, None, None] for value in (inputs.mean, inputs.std))
    return mean, std


def seen_as(model: Any, data: str, spec: str) -> tuple[Any, Tensor | None]:
    """A model of ``data`` as one for the labels of ``spec``; and where these are among its classes.

    A network of the 21,843 classes chooses among the 1,000. ImageNet-A and -R number their 200 classes anew;
    a network of the 1,000 chooses among all of them, as in the paper.
    """
    base = spec.partition(":")[0]
    if data == "imagenet21k" and base in ONE_THOUSAND:
        model = restrict(model, to_imagenet1k())
    return model, imagenet_subset(base).index if base in SUBSETS else None


# --- one set --------------------------------------------------------------------------------------------


@torch.no_grad()
def quality(model: Any, batches: Any, places: Tensor | None, device: torch.device) -> dict[str, float]:
    """Accuracy, NLL and ECE of (x, y); of several labels a row precision@1 in place of accuracy.

    ``places`` (K',): the class of the model for each label.
    """
    multi_label, parts = False, []
    for x, y in batches:
        probs, y = model.predict_probs(to_device(x, device)), y.to(device)
        multi_label = y.dim() == 2
        if not multi_label and places is not None:
            y = places.to(device)[y]
        terms = metrics.example_terms(probs, y)
        parts.append(torch.stack([term.double() for term in terms]).cpu())
    terms = torch.cat(parts, 1)
    if not bool(terms.isfinite().all()):
        raise FloatingPointError("probabilities are not numbers")
    numbers = metrics.quality(*terms, num_bins=NUM_BINS)
    return {"precision_at_1": numbers.pop("accuracy"), **numbers} if multi_label else numbers


@torch.no_grad()
def scores(model: Any, batches: Any, device: torch.device) -> dict[str, Any]:
    """``ood_score`` of each row."""
    found = torch.cat([model.predict(to_device(x, device)).ood_score.double().cpu() for x, _ in batches])
    # Nine digits are all that float32 has; the list is long.
    return {"ood_score": [float(f"{score:.9g}") for score in found.tolist()], "examples": len(found)}


# --- all of them ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Measuring:
    """Of a candidate: what is measured of the ``probes``, and what is left to do."""

    candidate: Candidate
    probes: Sequence[Probe]

    @functools.cached_property
    def _identity(self) -> list[str]:
        return self.candidate.identity()

    def read(self, probe: Probe) -> dict[str, Any] | None:
        """The numbers kept of a set; None: there are none, or of something else."""
        try:
            content = json.loads(self._file(probe).read_text(encoding="utf-8"))
            numbers: dict[str, Any] = content["numbers"]
            return numbers if content["fingerprint"] == self.fingerprint(probe) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def to_do(self) -> list[Probe]:
        """Those that are not measured."""
        return [probe for probe in self.probes if self.read(probe) is None]

    def measure(self, todo: Sequence[Probe], device: torch.device, root: Any = None) -> Iterator[int]:
        """Measure and keep each; yields its number of images. No two sets are held at once."""
        if not todo:
            return
        model, inputs = self.candidate.open(device)
        opened: dict[str, Mapping[Any, Any]] = {}
        for probe in todo:
            begun = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is odd about a set was told when it was found
                if probe.corruption is not None and probe.spec not in opened:
                    opened[probe.spec] = _corrupted(inputs, probe.spec, device, root)
                # No name for the images here: they must be gone before the next set is made.
                batches = _loader(inputs, probe, opened.get(probe.spec, {}), device, root)
            numbers = self._numbers(model, probe, batches, device)
            del batches
            about = {"set": probe.name, "seconds": round(time.perf_counter() - begun, 3)}
            content = {"fingerprint": self.fingerprint(probe), **about, "numbers": numbers}
            text = json.dumps(content, allow_nan=False) + "\n"
            write_atomically(self._file(probe), lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
            yield int(numbers["examples"])

    def _numbers(self, model: Any, probe: Probe, batches: Any, device: torch.device) -> dict[str, Any]:
        if probe.scores:
            return scores(model, batches, device)
        seen, places = seen_as(model, self.candidate.data, probe.spec)
        try:
            return quality(seen, batches, places, device)
        except FloatingPointError as error:
            raise FloatingPointError(
                f"{self.candidate.measured.parent}: {error} on {probe.name}, so training diverged: lower the "
                "rate, --set schedule.lr=…, and train again in another folder"
            ) from error

    def fingerprint(self, probe: Probe) -> str:
        """Of all that decides its numbers."""
        versions = [torch.__version__, timm_version()]
        decides = [
            code_fingerprint(__name__),
            *versions,
            self._identity,
            self.candidate.data,
            probe.name,
            probe.size,
        ]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]

    def _file(self, probe: Probe) -> Path:
        """Readable, and another for each name."""
        plain = re.sub(r"[^A-Za-z0-9.-]+", "-", probe.name).strip("-.")[-60:]
        own = "" if plain == probe.name else f"-{hashlib.sha256(probe.name.encode()).hexdigest()[:8]}"
        return self.candidate.measured / f"{plain}{own}.json"


def value_of(column: PaperColumn, sets: Sets, data: str, found: Mapping[Probe, Any]) -> float | None:
    """The number of a column, of what was ``found`` of its sets; None where one is missing.

    Of corrupted sets it is the mean, each counted once.
    """
    parts = [found[probe] for probe in sets.probes(column, data) if found.get(probe) is not None]
    if len(parts) < len(sets.probes(column, data)):
        return None
    if column.metric in DETECTION:
        inside, outside = (torch.tensor(part["ood_score"], dtype=torch.float64) for part in parts)
        return float(getattr(metrics, column.metric)(inside, outside))
    return math.fsum(part[column.metric] for part in parts) / len(parts)


def _corrupted(inputs: Any, spec: str, device: torch.device, root: Any) -> Mapping[Any, Any]:
    sets: Mapping[Any, Any] = inputs.open_corrupted(spec, root=root)
    # Ours are made where the images are.
    return replace(sets, images=sets.images.to(device)) if isinstance(sets, CorruptedImages) else sets


def _loader(inputs: Any, probe: Probe, sets: Mapping[Any, Any], device: torch.device, root: Any) -> Any:
    size = LARGE_BATCH if max(inputs.size) >= LARGE else BATCH
    if probe.corruption is None:
        return inputs.loader(inputs.open(probe.spec, root=root), size, device=device)
    # The images of ImageNet-C are cut already.
    cut = inputs.size[0] if probe.spec == "imagenet-c" else None
    return inputs.loader(sets[probe.corruption], size, device=device, resize=cut)


@functools.cache
def timm_version() -> str | None:
    """None where it is not installed: then no network is from it."""
    try:
        return importlib.metadata.version("timm")
    except importlib.metadata.PackageNotFoundError:
        return None
