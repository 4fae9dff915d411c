"""Encoders of texts: pooling, conversion, and the same network again from a config alone."""

import json
from pathlib import Path

import pytest
import torch
from tests.unit.small_texts import WIDTH, sentences, write_network

import hetsngp
from hetsngp.conversion.text_encoder import TextEncoder
from hetsngp.data.text import LabelledTexts, TextLoader
from hetsngp.models.components import kind_of
from hetsngp.pretrained.text_networks import PretrainedTextNetwork, pretrained_text_network

transformers = pytest.importorskip("transformers")
DATA = LabelledTexts.from_lists(*sentences(24))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTextNetwork:
    return pretrained_text_network(str(write_network(tmp_path_factory.mktemp("network"), pooling="mean")))


def loader(pretrained: PretrainedTextNetwork, batch_size: int = 24) -> TextLoader:
    return TextLoader(pretrained.tokenizer.encode(DATA), batch_size)


def test_padding_does_not_change_the_mean(pretrained: PretrainedTextNetwork) -> None:
    """Each text alone, without padding, through transformers' own network."""
    x, _ = next(iter(loader(pretrained)))
    encoder = pretrained.encoder
    with torch.no_grad():
        h = encoder(**x)
        for row, length in enumerate(x["attention_mask"].sum(1).tolist()):
            alone = encoder.network(input_ids=x["input_ids"][row : row + 1, :length])
            assert torch.allclose(h[row], alone.last_hidden_state[0].mean(0), atol=1e-6)


def test_the_first_token_where_the_folder_says_so(tmp_path: Path) -> None:
    made = pretrained_text_network(str(write_network(tmp_path / "a", pooling="cls")))
    x, _ = next(iter(loader(made)))
    with torch.no_grad():
        expected = made.encoder.network(**x).last_hidden_state[:, 0]
        assert torch.equal(made.encoder(**x), expected)
    file = tmp_path / "a" / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match="pooling_mode_max_tokens, and texts are pooled by mean or cls"):
        pretrained_text_network(str(tmp_path / "a"))


@pytest.mark.parametrize("freeze", [True, False])
def test_a_converted_encoder_is_rebuilt_from_its_config(
    pretrained: PretrainedTextNetwork, freeze: bool, tmp_path: Path
) -> None:
    model = hetsngp.convert(pretrained.encoder, "hetsngp", num_classes=3, freeze=freeze)
    assert kind_of(model.backbone) == "attention"
    assert model.num_features == WIDTH
    with torch.no_grad():
        x, y = next(iter(loader(pretrained)))
        assert torch.equal(model.eval().backbone(x), pretrained.encoder(**x))
    model.dataset_size = len(DATA)
    model.train()
    loss = model.loss(x, y)
    loss.backward()
    trained = {name for name, p in model.backbone.named_parameters() if p.grad is not None}
    assert bool(trained) != freeze
    assert freeze or trained == {name for name, _ in model.backbone.named_parameters()}  # none is left over
    hetsngp.fit_posterior(model, loader(pretrained))
    hetsngp.save(model, tmp_path / "model")
    again = hetsngp.load(tmp_path / "model")
    assert isinstance(again.backbone.network, TextEncoder)
    assert torch.equal(again.predict(x).probs, model.predict(x).probs)


def test_a_head_on_features_of_a_loader_of_texts(pretrained: PretrainedTextNetwork) -> None:
    model = hetsngp.convert(pretrained.encoder, "sngp", num_classes=3, freeze=True)
    features = hetsngp.extract_features(model, loader(pretrained, 5))
    with torch.no_grad():
        x, y = next(iter(loader(pretrained)))
        assert torch.allclose(features.h, pretrained.encoder(**x), atol=1e-6)
    assert torch.equal(features.y, y)


def test_identity_follows_weights_and_length(pretrained: PretrainedTextNetwork, tmp_path: Path) -> None:
    folder = write_network(tmp_path / "a", pooling="mean")
    same, cut = pretrained_text_network(str(folder)), pretrained_text_network(str(folder), max_length=9)
    assert pretrained.identity() == same.identity() != cut.identity()
    with torch.no_grad():
        next(same.encoder.parameters())[0, 0] += 1
    assert pretrained.identity() != same.identity()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_network(tmp_path / "a")
    assert pretrained_text_network(str(folder)).tokenizer.max_length == 24
    with pytest.raises(ValueError, match=r"max_length=99, and .* takes 24 tokens"):
        pretrained_text_network(str(folder), max_length=99)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot load the network in .*or minilm"):
        pretrained_text_network(str(folder))


def test_without_a_connection_the_packaged_network_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RuntimeError, match=r"no folder here, and cannot be fetched .*or minilm") as error:
        pretrained_text_network("someone/nothing")
    assert "\n" not in str(error.value)
