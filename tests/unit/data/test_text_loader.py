"""Token numbers as the tokenizer makes them, and batches of similar length from (seed, epoch) alone."""

from typing import Any

import pytest
import torch
from tests.unit.small_texts import WORDS, sentences, tokenizer_json

from hetsngp.data.text import LabelledTexts, TextLoader, TextTokenizer
from hetsngp.data.text.loader import BUCKET, bucketed_order

pytest.importorskip("tokenizers")
DATA = LabelledTexts.from_lists(*sentences(70))


def tokenizer(**options: Any) -> TextTokenizer:
    return TextTokenizer(tokenizer_json(), **{"max_length": 24, **options})


def by_hand(text: str) -> list[int]:
    """Numbers of the words between [CLS] and [SEP]."""
    return [WORDS.index(word) for word in ("[CLS]", *text.split(), "[SEP]")]


def test_batches_hold_the_words_padded_to_the_longest() -> None:
    loader = TextLoader(tokenizer(inputs=("input_ids", "attention_mask", "token_type_ids")).encode(DATA), 32)
    seen = 0
    for x, y in loader:
        rows = [by_hand(text) for text in DATA.texts[seen : seen + len(y)]]
        width = max(map(len, rows))
        assert x["input_ids"].tolist() == [row + [0] * (width - len(row)) for row in rows]
        assert x["attention_mask"].tolist() == [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        assert not x["token_type_ids"].any()
        assert torch.equal(y, DATA.labels[seen : seen + len(y)])
        seen += len(y)
    assert seen == len(DATA)


def test_long_texts_are_cut_and_counted() -> None:
    data = LabelledTexts.unlabelled(["play " * 30, "play it"])
    tokens = tokenizer(max_length=8).encode(data)
    assert tokens.lengths.tolist() == [8, 4]
    assert tokens.truncated == 1
    assert tokens.batch(torch.tensor([0]))[0]["input_ids"][0, -1] == WORDS.index("[SEP]")
    with pytest.raises(ValueError, match="choose more than 2"):
        tokenizer(max_length=2)


def test_an_epoch_has_every_text_once_in_batches_of_similar_length() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 100, (1000,), generator=generator)
    order = bucketed_order(lengths, 8, generator)
    assert torch.equal(order.sort().values, torch.arange(1000))
    spread = [int(batch.max() - batch.min()) for batch in lengths[order].split(8)]
    assert sum(spread) / len(spread) < 6  # 97 · 8 / (50 · 8) between neighbours of a bucket, 75 at random
    assert BUCKET == 50
    shortest = lengths[order].view(-1, 8)[:BUCKET, 0]
    assert not torch.equal(shortest, shortest.sort().values)  # the batches of a bucket are mixed


def test_an_epoch_follows_from_seed_and_number_and_starts_anywhere() -> None:
    tokens = tokenizer().encode(DATA)
    loader, again = (TextLoader(tokens, 8, shuffle=True, seed=5) for _ in range(2))
    first, second = list(loader), list(loader)
    again.set_epoch(1)
    again.start_at(3)
    rest = list(again)
    assert len(first) == 8
    assert len(rest) == 5
    for (x, y), (x_again, y_again) in zip(second[3:], rest, strict=True):
        assert torch.equal(y, y_again)
        assert all(torch.equal(x[name], x_again[name]) for name in x)
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))


def test_processes_share_a_batch() -> None:
    tokens = tokenizer().encode(DATA)
    whole = TextLoader(tokens, 8, shuffle=True, seed=1)
    parts = [TextLoader(tokens, 8, shuffle=True, seed=1).shard(rank, 2) for rank in range(2)]
    for (_, y), *shares in zip(whole, *parts, strict=True):
        assert torch.equal(y, torch.cat([share[1] for share in shares]))


def test_soft_targets_take_the_place_of_labels() -> None:
    soft = LabelledTexts(DATA.texts, DATA.labels, DATA.class_names, torch.eye(3)[DATA.labels])
    _, y = next(iter(TextLoader(tokenizer().encode(soft), 8)))
    assert torch.equal(y, torch.eye(3)[DATA.labels[:8]])


def test_a_damaged_tokenizer_is_named() -> None:
    with pytest.raises(ValueError, match="the tokenizer is damaged"):
        TextTokenizer(tokenizer_json()[:-20], 24)
