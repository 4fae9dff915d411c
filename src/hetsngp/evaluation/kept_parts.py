"""Finished parts of an evaluation on disk, so that an interrupted one goes on where it was.

A part is taken from its file only where all that decides its numbers is what it was: our code and torch's
version, autocast, model, settings and data. Of the data that is: the first batch, the number of batches, and
all that lies in memory or in a list (tensors, file names, labels, the order of a sampler). A file whose
content changed under the same name is seen if it is in the first batch. What cannot be compared is not kept:
data whose length is not known (a generator would be known by its first batch alone), and whatever
:mod:`hetsngp.evaluation.fingerprints` cannot see into.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hetsngp.evaluation.cache import code_fingerprint
from hetsngp.evaluation.fingerprints import Digest, Unseen
from hetsngp.evaluation.predictions import EvaluationBatches
from hetsngp.files import write_atomically
from hetsngp.models.loaders import num_batches

DECIDES = ("hetsngp.evaluation.evaluator", "hetsngp.models", "hetsngp.estimator")
"""Modules whose code, with all that they import, decides the numbers of a part."""


@dataclass(frozen=True)
class Parts:
    """The folder ``parts`` of an evaluation. ``model`` is None where nothing can tell two models apart: then
    everything is measured anew.
    """

    folder: Path | None
    model: str | None
    settings: str

    def fingerprint(
        self, name: str, data: EvaluationBatches | str, num_bins: int | None = None
    ) -> str | None:
        """Of all that decides the numbers of a part; None: it is not kept. A text stands for its data;
        ``num_bins`` is for numbers that depend on it.
        """
        if self.folder is None or self.model is None:
            return None
        told = data if isinstance(data, str) else data_fingerprint(data)
        if told is None:
            return None
        decides = [surroundings(), self.model, self.settings, str(num_bins), name, told]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def read(self, name: str, fingerprint: str | None) -> dict[str, np.ndarray] | None:
        """What :meth:`write` wrote with this fingerprint, or None; a damaged file counts as none."""
        if fingerprint is None or not self._file(name).is_file():
            return None
        try:
            with np.load(self._file(name), allow_pickle=False) as file:
                arrays = dict(file)
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            return None
        return arrays if str(arrays.pop("fingerprint", "")) == fingerprint else None

    def write(self, name: str, fingerprint: str | None, arrays: Mapping[str, np.ndarray]) -> None:
        """In place of what was kept under this name."""
        if fingerprint is not None:
            content: dict[str, Any] = {"fingerprint": np.array(fingerprint), **arrays}
            write_atomically(self._file(name), lambda file: np.savez(file, **content))

    def _file(self, name: str) -> Path:
        """Readable, and another for each name."""
        assert self.folder is not None
        plain = re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._")[:60]
        return self.folder / f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.npz"


def surroundings() -> str:
    """Our code, torch's version, and the precision that autocast sets."""
    cast = [(d, str(torch.get_autocast_dtype(d))) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    return json.dumps([code_fingerprint(*DECIDES), torch.__version__, cast])


def model_fingerprint(model: Any) -> str | None:
    """Of a network: its tensors, the plain attributes of its modules and the code of their classes; of the
    estimator the same and its settings. None for another object, unless it has a method ``fingerprint() ->
    str | None`` that says, and for one that cannot be seen into.
    """
    if callable(getattr(model, "fingerprint", None)):
        told = model.fingerprint()
        return None if told is None else str(told)
    if not isinstance(model, nn.Module) and not hasattr(model, "predict_uncertainty"):
        return None
    try:
        return Digest().of(model)
    except Unseen:
        return None


def data_fingerprint(batches: EvaluationBatches) -> str | None:
    """Of the first batch, and of all that is plain to see in the loader and its data set."""
    count = num_batches(batches.loader)
    if count is None:
        return None
    try:
        return Digest().of([batches.first, count, batches.loader])
    except Unseen:
        return None
