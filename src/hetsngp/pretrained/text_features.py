"""Features of texts by a frozen network, kept by the content of the texts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hetsngp.data.images.copies import content_keys
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.models.classifier import evaluating
from hetsngp.pretrained.feature_cache import batches_of, cached_features
from hetsngp.pretrained.text_networks import PretrainedTextNetwork


def text_features(
    texts: LabelledTexts,
    network: PretrainedTextNetwork,
    folder: Path,
    *,
    keys: Sequence[bytes] | None = None,
    batch_size: int = 64,
    show: bool = False,
) -> Tensor:
    """Features (N, D) of all texts; those that ``folder`` has are read, the others are written there. A
    warning says how many of these the tokenizer cuts.

    ``keys``: of :func:`~hetsngp.data.images.copies.content_keys`, where they are known.
    """
    keys = content_keys(texts) if keys is None else keys
    device = next(network.encoder.parameters()).device
    computed = truncated = 0

    def compute(rows: list[int]) -> Iterator[tuple[int, Tensor]]:
        nonlocal computed, truncated
        tokens = network.tokenizer.encode(texts.take(rows)).to(device)
        computed, truncated = computed + len(rows), truncated + tokens.truncated
        by_length = tokens.lengths.argsort(stable=True).tolist()
        for batch in batches_of(by_length, batch_size):
            x, _ = tokens.batch(torch.tensor(batch))
            with evaluating(network.encoder):
                h = network.encoder(**x).float().cpu()
            yield from zip((rows[place] for place in batch), h, strict=True)

    name = f"features by {network.name}"
    h = cached_features(keys, folder / network.identity()[:16], compute, title=name, unit="texts", show=show)
    if truncated:
        warnings.warn(network.tokenizer.note_on_cut(truncated, computed), stacklevel=2)
    return h
