"""Texts as what is audited: opened with what to call and how to show them, and their features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetsngp.auditing.audit import AuditedData
from hetsngp.auditing.examples import TextExamples
from hetsngp.data.fingerprint import fingerprint_data
from hetsngp.data.label_files import example_names
from hetsngp.data.text.sources import open_texts
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.pretrained.text_networks import PACKAGED, PretrainedTextNetwork, pretrained_text_network
from hetsngp.training.recipes.task import Task, TextTask
from hetsngp.training.texts import TextInputs


def audited_texts(
    spec: str, text: str | None = None, label: str | None = None, *, say: Callable[[str], None] = print
) -> tuple[LabelledTexts, AuditedData]:
    """Training texts of a data set, file or folder, by columns as of ``open_texts``."""
    texts = open_texts(spec, "train", text=text, label=label, say=say)
    examples, fingerprint = TextExamples(texts.texts), fingerprint_data(texts)
    names = example_names(texts)
    return texts, AuditedData(
        spec, texts.labels.numpy(), texts.class_names, names, "index", examples, fingerprint
    )


def network_of_texts(settings: Any, task: Task | None, device: torch.device) -> PretrainedTextNetwork:
    """Frozen network of an audit, by its settings, or of a recipe, on ``device``."""
    for name in ("weights", "size"):
        if getattr(settings, name) is not None:
            raise ValueError(
                f"--{name} is for networks of images: leave it out, --network names one for texts"
            )
    if task is None:
        network = pretrained_text_network(settings.network or PACKAGED)
    else:
        assert isinstance(task, TextTask)
        network = TextInputs.network(task)
    network.encoder.to(device)
    return network
