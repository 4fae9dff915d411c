"""Out-of-sample probabilities by a recipe: its network is trained once for each fold, in resumable runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.copies import image_folds
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.label_files import LabelFile
from hetsngp.files import remove_leftovers, replace_file, write_tensors
from hetsngp.labels.rounds import Score
from hetsngp.serving.bundle import open_run
from hetsngp.training.config import CheckpointConfig
from hetsngp.training.engine import Engine
from hetsngp.training.finished_runs import MODEL
from hetsngp.training.recipe_run import train_recipe
from hetsngp.training.recipes.recipe import Recipe


class RecipeFolds:
    """Cross-fitting of images by a recipe: see :class:`hetsngp.labels.rounds.CrossFit`.

    Each call is a round: ``folder/round-R/fold-I`` is a run on the images outside fold I, and
    ``folder/round-R/fold-I.safetensors`` its probabilities of those inside. What is finished is not repeated.
    From the second round on, and where examples are not to be trained on, ``folder/round-R`` has the labels
    of the round. The caller holds the lock of a folder that contains ``folder``.
    """

    def __init__(
        self,
        recipe: Recipe,
        images: ImageArrays | ImageFiles,
        names: tuple[str, ...],
        folder: Path,
        engine: Engine,
        *,
        folds: int,
        keys: Sequence[bytes] | None = None,
        batch_size: int = 64,
        show: bool | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.recipe, self.images, self.names, self.folder, self.engine = recipe, images, names, folder, engine
        self.batch_size, self.show, self.say = batch_size, show, say
        self.rows = image_folds(images, folds, recipe.config.seed, keys)
        self.round = 0

    def __call__(self, targets: Any, trained: Any, score: Score) -> Any:
        """Out-of-sample probabilities (N, K)."""
        self.round += 1
        folder = self.folder / f"round-{self.round}"
        remove_leftovers(folder)
        labels = None
        if self.round > 1 or not trained.all():
            self._write_labels(folder, self._labels(targets, trained))
            labels = str(folder)
        probs = np.empty((len(self.images), self.images.num_classes), dtype=np.float32)
        for number, rows in enumerate(self.rows, 1):
            self.say(f"round {self.round}, fold {number} of {len(self.rows)}")
            probs[rows] = self._fold(folder / f"fold-{number}", f"{number}/{len(self.rows)}", labels, rows)
        return probs

    def _labels(self, targets: Any, trained: Any) -> LabelFile:
        values = torch.tensor(targets)  # a copy: the given labels may be the targets, and a file has both
        values = values.long() if values.dim() == 1 else values.float()
        kept = torch.from_numpy(np.asarray(trained))
        return LabelFile(self.names, self.images.class_names, self.images.labels.cpu(), values, kept)

    @staticmethod
    def _write_labels(folder: Path, labels: LabelFile) -> None:
        """Write ``labels``, unless those of the interrupted audit are there, which its runs were trained on:
        another processor gives targets with other last digits.
        """
        try:
            before = LabelFile.read(folder)
        except (FileNotFoundError, ValueError):
            before = None
        if before is None or not before.is_close(labels):
            labels.write(folder)

    def _fold(self, folder: Path, fold: str, labels: str | None, rows: Tensor) -> Any:
        """Probabilities (n, K) of the images ``rows`` by the run in ``folder``, trained if necessary."""
        task = replace(self.recipe.task, fold=fold, labels=labels)
        recipe = replace(self.recipe, task=task)
        try:
            summary = train_recipe(recipe, self.engine, CheckpointConfig(folder), show=self.show)
        except ValueError as error:
            reason, other, _ = str(error).partition("give another folder")
            if not other:
                raise
            raise ValueError(f"{reason}{other}, --out, or remove {self.folder}") from error
        file = folder.with_suffix(".safetensors")
        weights = torch.frombuffer(bytearray(summary["weights"].encode()), dtype=torch.uint8)
        before = _read(file)
        if before is None or not torch.equal(before["weights"], weights):
            probs = self._predict(folder / MODEL, rows)
            before = {"probs": probs, "weights": weights}
            tensors = before
            replace_file(file, lambda temporary: write_tensors(tensors, temporary))
        return before["probs"].numpy()

    def _predict(self, model: Path, rows: Tensor) -> Tensor:
        served = open_run(model, device=self.engine.device, allow_download=False)
        loader = served.inputs.loader(
            self.images.take(rows), self.batch_size, num_workers=self.recipe.task.workers
        )
        found = [served.model.predict(x.to(served.device)).probs.float().cpu() for x, _ in loader]
        return torch.cat(found)


def _read(file: Path) -> dict[str, Tensor] | None:
    """Probabilities of a finished run, and the digest of its weights; None: not there, or damaged."""
    try:
        tensors = load_file(file)
        return {name: tensors[name] for name in ("probs", "weights")}
    except (FileNotFoundError, SafetensorError, KeyError):
        return None
