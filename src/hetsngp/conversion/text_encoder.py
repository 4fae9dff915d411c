"""Encoder of texts: a transformer whose token vectors are pooled to one vector for each text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from hetsngp.validation import check_choice

Pooling = Literal["mean", "cls"]
POOLINGS = ("mean", "cls")


class TextEncoder(nn.Module):
    """Token numbers → h (B, D): the vectors of a transformer's last layer, pooled.

    ``network``: a model of transformers that returns ``last_hidden_state`` (B, L, D), as ``AutoModel`` makes
    it; its own pooling layer is removed. ``pooling``: "mean" over the tokens of the text, or "cls", the first
    token. h is not normalised: heads do that.
    """

    def __init__(self, network: nn.Module, pooling: Pooling = "mean") -> None:
        super().__init__()
        check_choice("pooling", pooling, POOLINGS)
        if isinstance(getattr(network, "pooler", None), nn.Module):
            network._modules["pooler"] = None  # its weights would get no gradient
        self.network, self.pooling = network, pooling
        self.num_features = int(network.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self.classifier = nn.Identity()
        """Place of a last layer, by which ``convert`` knows that there is none."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """(B, L) each → (B, D)."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        output = self.network(**{name: value for name, value in given.items() if value is not None})
        h = output.last_hidden_state
        if self.pooling == "cls":
            return self.classifier(h[:, 0])
        if attention_mask is None:
            return self.classifier(h.mean(1))
        mask = attention_mask.to(h)[:, :, None]
        return self.classifier((h * mask).sum(1) / mask.sum(1).clamp(min=1))

    def extra_repr(self) -> str:
        """Summary for ``print(model)``."""
        return f"pooling={self.pooling!r}"


def pooling_of(folder: Path) -> Pooling:
    """Pooling that the files of sentence-transformers in ``folder`` name; without them the mean."""
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return "mean"
    try:
        modes = json.loads(file.read_text(encoding="utf-8"))
        chosen = {name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error}): copy the folder of the network again") from error
    if chosen == {"pooling_mode_cls_token"}:
        return "cls"
    if chosen <= {"pooling_mode_mean_tokens"}:
        return "mean"
    raise ValueError(
        f"{file} asks for {', '.join(sorted(chosen))}, and texts are pooled by mean or cls: choose one of "
        "them"
    )
