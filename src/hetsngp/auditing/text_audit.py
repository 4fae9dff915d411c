"""Texts as what is audited: opened with what to call and how to show them, and their features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetsngp.auditing.audit import AuditedData
from hetsngp.auditing.examples import TextExamples
from hetsngp.data.fingerprint import fingerprint_data
from hetsngp.data.label_files import example_names
from hetsngp.data.text.sources import open_texts
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.pretrained.text_features import text_features
from hetsngp.pretrained.text_networks import PACKAGED, pretrained_text_network


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


def features_of_texts(
    texts: LabelledTexts,
    keys: Sequence[bytes],
    folder: Path,
    settings: Any,
    device: torch.device,
    say: Callable[[str], None],
    show: bool,
) -> tuple[Tensor, str, dict[str, Any]]:
    """Features (N, D) of texts by a frozen network, how it is called, and what to note of it."""
    for name in ("weights", "size"):
        if getattr(settings, name) is not None:
            raise ValueError(
                f"--{name} is for networks of images: leave it out, --network names one for texts"
            )
    network = pretrained_text_network(settings.network or PACKAGED)
    network.encoder.to(device)
    say(f"features of {len(texts)} texts by {network.name}")
    h = text_features(texts, network, folder, keys=keys, batch_size=settings.batch_size, show=show)
    return h, network.name, {"network": network.name, "max_length": network.tokenizer.max_length}
