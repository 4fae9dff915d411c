"""Features of texts, computed once and kept by the content of each."""

from pathlib import Path

import pytest
import torch
from tests.unit.small_texts import WIDTH, sentences, write_network

from hetsngp.data.text import LabelledTexts
from hetsngp.pretrained.text_features import text_features
from hetsngp.pretrained.text_networks import PretrainedTextNetwork, pretrained_text_network

pytest.importorskip("transformers")
DATA = LabelledTexts.from_lists(*sentences(30))


@pytest.fixture
def network(tmp_path: Path) -> PretrainedTextNetwork:
    return pretrained_text_network(str(write_network(tmp_path / "network")))


def test_each_text_has_the_features_of_itself_alone(network: PretrainedTextNetwork, tmp_path: Path) -> None:
    h = text_features(DATA, network, tmp_path / "features", batch_size=7)
    assert h.shape == (30, WIDTH)
    for row, text in enumerate(DATA.texts):
        tokens = network.tokenizer.encode(LabelledTexts.unlabelled([text]))
        with torch.no_grad():
            alone = network.encoder(**tokens.batch(torch.tensor([0]))[0])[0]
        assert torch.allclose(h[row], alone, atol=1e-6)


def test_texts_that_are_cut_are_counted(tmp_path: Path) -> None:
    short = pretrained_text_network(str(write_network(tmp_path / "network")), max_length=6)
    cut = sum(len(text.split()) > 4 for text in DATA.texts)  # beside [CLS] and [SEP]
    with pytest.warns(UserWarning, match=f"^{cut} of 30 texts have more than 6 tokens and are cut there"):
        text_features(DATA, short, tmp_path / "features")


def test_only_new_texts_are_computed_whatever_their_order_and_labels(
    network: PretrainedTextNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = text_features(DATA, network, tmp_path / "features")
    seen: list[int] = []
    forward = network.encoder.forward

    def counted(input_ids: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        seen.append(len(input_ids))
        return forward(input_ids, **others)

    monkeypatch.setattr(network.encoder, "forward", counted)
    again = LabelledTexts.unlabelled([*DATA.texts[::-1], "snow snow snow", "snow snow snow"])
    h = text_features(again, network, tmp_path / "features")
    assert torch.equal(h[:30], before.flip(0))
    assert torch.equal(h[30], h[31])
    assert sum(seen) == 1  # the copy is computed once
    assert len(list((tmp_path / "features").iterdir())) == 1
