"""Texts as token numbers, by a fast tokenizer of Hugging Face's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetsngp.data.bounded import read_file
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.limits import LIST_BYTES
from hetsngp.validation import check_positive

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""What networks take; ``input_ids`` always."""
MISSING = "texts are tokenized with the package tokenizers: pip install 'hetsngp[text]'"
CHUNK = 10_000
"""Texts tokenized at a time: what the tokenizer returns takes a hundred times the memory of the numbers."""
MULTIPLE = 8
"""Lengths of batches on a GPU are multiples of it, for its matrix units."""


@dataclass(frozen=True)
class TextTokenizer:
    """Tokenizer of a network. Texts of more than ``max_length`` tokens are cut.

    ``definition``: content of a tokenizer.json.
    """

    definition: str
    max_length: int
    inputs: tuple[str, ...] = INPUTS[:2]
    """Those of :data:`INPUTS` that the network takes."""
    pad_id: int = 0

    def __post_init__(self) -> None:
        check_positive("max_length", self.max_length, integer=True)
        object.__setattr__(self, "inputs", tuple(self.inputs))
        if "input_ids" not in self.inputs or not set(self.inputs) <= set(INPUTS):
            raise ValueError(
                f"inputs are input_ids and others of {', '.join(INPUTS)}, got {self.inputs!r:.200}"
            )
        if type(self.pad_id) is not int or self.pad_id < 0:
            raise ValueError(f"pad_id is the number of a token, got {self.pad_id!r:.50}")
        self._fast  # noqa: B018  # raises where the definition is damaged

    @staticmethod
    def read(file: str | Path, max_length: int, inputs: Sequence[str], pad_id: int) -> TextTokenizer:
        """Tokenizer of a file tokenizer.json."""
        path = Path(file)
        if not path.is_file():
            raise FileNotFoundError(f"there is no tokenizer {path}: copy the complete folder of the model")
        content = read_file(path, LIST_BYTES).decode("utf-8")
        return TextTokenizer(content, max_length, tuple(inputs), pad_id)

    @property
    def sha256(self) -> str:
        """SHA-256 of the definition."""
        return hashlib.sha256(self.definition.encode()).hexdigest()

    @cached_property
    def _fast(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(MISSING) from error
        try:
            json.loads(self.definition)
            fast = Tokenizer.from_str(self.definition)
        except Exception as error:  # tokenizers raises plain Exceptions
            raise ValueError(f"the tokenizer is damaged: {' '.join(str(error).split()):.200}") from error
        special = fast.num_special_tokens_to_add(False)
        if self.max_length <= special:
            raise ValueError(
                f"max_length={self.max_length} leaves no token of a text: choose more than {special}"
            )
        fast.no_padding()
        fast.enable_truncation(self.max_length)
        return fast

    def note_on_cut(self, truncated: int, count: int) -> str:
        """Sentence that says how many of ``count`` texts are cut."""
        most = self.max_length
        return f"{truncated} of {count} texts have more than {most} tokens and are cut there (max_length)"

    def batch(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Batch x of a few texts."""
        tokens = self.encode(LabelledTexts.unlabelled(texts))
        return tokens.batch(torch.arange(len(tokens)))[0]

    def encode(self, data: LabelledTexts) -> TokenizedTexts:
        """Token numbers of all texts."""
        names = {"input_ids": "ids"}
        if "token_type_ids" in self.inputs:
            names["token_type_ids"] = "type_ids"
        parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
        lengths: list[int] = []
        truncated = 0
        for begin in range(0, len(data), CHUNK):
            encoded = self._fast.encode_batch(list(data.texts[begin : begin + CHUNK]))
            lengths += (len(each.ids) for each in encoded)
            truncated += sum(bool(each.overflowing) for each in encoded)
            for name, attribute in names.items():
                numbers = chain.from_iterable(getattr(each, attribute) for each in encoded)
                parts[name].append(np.fromiter(numbers, np.int32))
        return TokenizedTexts(
            {name: torch.from_numpy(np.concatenate(each)) for name, each in parts.items()},
            torch.tensor(lengths),
            data.labels,
            data.num_classes,
            data.targets,
            "attention_mask" in self.inputs,
            self.pad_id,
            truncated,
        )


@dataclass(frozen=True, eq=False)
class TokenizedTexts:
    """Token numbers of N texts, one after another without padding, and labels."""

    tokens: dict[str, Tensor]
    """(T,) int32 each, by their names in a batch."""
    lengths: Tensor
    """Number of tokens of each text, (N,) int64 on the CPU."""
    labels: Tensor
    """(N,) int64."""
    num_classes: int
    targets: Tensor | None
    """Soft targets (N, K) float32, or None."""
    masked: bool
    """Whether batches have an attention mask."""
    pad_id: int
    truncated: int
    """Number of texts that were cut."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def loader_labels(self) -> Tensor:
        """What loaders yield: ``targets`` (N, K) where there are any, else ``labels`` (N,)."""
        return self.labels if self.targets is None else self.targets

    @property
    def device(self) -> torch.device:
        """Device of tokens and labels."""
        return self.tokens["input_ids"].device

    def to(self, device: torch.device | str) -> TokenizedTexts:
        """Copy to ``device``; ``self`` where it is there already."""
        if self.tokens["input_ids"].to(device) is self.tokens["input_ids"]:
            return self
        return replace(
            self,
            tokens={name: flat.to(device) for name, flat in self.tokens.items()},
            labels=self.labels.to(device),
            targets=None if self.targets is None else self.targets.to(device),
        )

    @cached_property
    def _starts(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths

    def batch(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Batch (x, y) of the texts at ``rows`` (b,), on the CPU: x by the names of the network's inputs, (b,
        L) int64, padded to the longest.
        """
        lengths, multiple = self.lengths[rows], MULTIPLE if self.device.type == "cuda" else 1
        longest = max(1, int(lengths.max()))
        place = torch.arange(-(-longest // multiple) * multiple)
        mask = place < lengths[:, None]
        index = torch.where(mask, self._starts[rows][:, None] + place, 0).to(self.device)
        mask = mask.to(self.device)
        x = {}
        for name, flat in self.tokens.items():
            pad = self.pad_id if name == "input_ids" else 0
            x[name] = flat[index].long().masked_fill(~mask, pad) if len(flat) else mask.long() * 0 + pad
        if self.masked:
            x["attention_mask"] = mask.long()
        return x, self.loader_labels[rows.to(self.device)]
