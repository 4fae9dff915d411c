"""Made sentences, and a tiny BERT with a tokenizer of their words."""

import json
import random
from pathlib import Path
from typing import Any

import torch

TOPICS = {
    "alarm": ("wake", "alarm", "clock", "morning", "ring"),
    "music": ("play", "song", "band", "guitar", "loud"),
    "weather": ("rain", "sun", "cold", "wind", "snow"),
}
FILLERS = ("please", "the", "a", "my", "is", "it", "now", "today", "very")
WIDTH = 32
"""Features of the network."""
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *FILLERS, *(word for topic in TOPICS.values() for word in topic))


def sentences(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """``count`` different sentences of 3 to 12 words, and their topics."""
    draw = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        topic = draw.choice(list(TOPICS))
        words = draw.choices(TOPICS[topic], k=draw.randint(2, 4))
        words += draw.choices(FILLERS, k=draw.randint(1, 8))
        draw.shuffle(words)
        found[" ".join(words)] = topic
    return list(found), list(found.values())


def write_csv(file: Path, count: int, seed: int = 0) -> Path:
    """Write sentences with the columns utterance and intent."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{text},{topic}" for text, topic in zip(*sentences(count, seed), strict=True)]
    file.write_text("\n".join(["utterance,intent", *rows]) + "\n")
    return file


def tokenizer_json() -> str:
    """WordPiece tokenizer of the words, as BERT's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return str(made.to_str())


def tiny_bert() -> Any:
    """A BERT with the same random weights at every call."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=24,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return transformers.BertModel(config)


def write_network(folder: Path, *, pooling: str | None = None) -> Path:
    """Write a folder as transformers and sentence-transformers do, of :func:`tiny_bert`."""
    tiny_bert().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    about = {"model_max_length": 24, "tokenizer_class": "BertTokenizer", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({**modes}))
    return folder
