"""Recipes for texts, from a CSV file to predictions: columns, splits, resumed runs, and what they serve."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.cli.test_cli import invoke, refused
from tests.unit.small_texts import TOPICS, sentences, tokenizer_json, write_csv, write_network

pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")
pytest.importorskip("transformers", reason="pip install 'hetsngp[text]'")
pytest.importorskip("pandas", reason="pip install 'hetsngp[tables]'")

import hetsngp
from hetsngp.conversion.text_encoder import TextEncoder
from hetsngp.data.fingerprint import fingerprint_data
from hetsngp.data.label_files import LabelFile
from hetsngp.data.text.preprocessing import TextPreprocessing
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.data.text.tokenizer import TextTokenizer
from hetsngp.pretrained.text_features import text_features
from hetsngp.serving.bundle import open_run
from hetsngp.serving.output import as_json
from hetsngp.serving.predictions import predict_texts
from hetsngp.training import CheckpointConfig, Engine, Hardware
from hetsngp.training.gradients import FabricGradients
from hetsngp.training.recipe_run import train_recipe
from hetsngp.training.recipes.recipe import Recipe, read_recipe
from hetsngp.training.task_data import open_task
from hetsngp.training.texts import TextInputs

SMALL = """
inputs = "text"
method = "hetsngp"
batch_size = 16
held_out = 0.25
[options]
random_features = 32
rank = 1
[schedule]
epochs = 2
lr = 3e-3
[training]
clip = 1.0
[hardware]
accelerator = "cpu"
"""


class Died(BaseException):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network, and a file of sentences."""
    made = tmp_path_factory.mktemp("texts")
    write_network(made / "network")
    write_csv(made / "tickets.csv", 120)
    return made


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A finished run."""
    train_recipe(recipe(folder), engine(), CheckpointConfig(folder / "run", tensorboard=False), show=False)
    return folder / "run"


def engine() -> Engine:
    return Engine(Hardware(devices=1, accelerator="cpu"))


def recipe(folder: Path, *changes: str, data: str = "tickets.csv") -> Recipe:
    file = folder / "small.toml"
    file.write_text(f"data = '{folder / data}'\nnetwork = '{folder / 'network'}'\n{SMALL}")
    return read_recipe(file, changes)


# --- data -------------------------------------------------------------------------------------------------


def test_a_data_sets_own_validation_texts_are_held_out(folder: Path, tmp_path: Path) -> None:
    for name, count in (("train", 40), ("val", 12), ("test", 9)):
        write_csv(tmp_path / "data" / f"{name}.csv", count, seed=count)
    (tmp_path / "network").symlink_to(folder / "network")
    data = open_task(recipe(tmp_path, data="data").task, seed=0)
    assert list(data.held_out.texts) == sentences(12, 12)[0]
    assert [len(part) for part in (data.train, data.held_out, data.test)] == [40, 12, 9]
    (tmp_path / "data" / "val.csv").unlink()
    data = open_task(recipe(tmp_path, data="data").task, seed=0)
    assert [len(part) for part in (data.train, data.held_out, data.test)] == [30, 10, 9]


def test_columns_are_as_the_recipe_says(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text,label,other,kind\n" + "".join(f"a {i},x,b {i},{'pq'[i % 2]}\n" for i in range(8)))
    task = recipe(folder, f"data={file}", "text_column=other", "label_column=kind").task
    data = open_task(task, seed=0)
    assert data.train.class_names == ("p", "q")
    assert all(text.startswith("b ") for text in data.train.texts)
    with pytest.raises(ValueError, match=r"all texts of .* have the class 'x'.*label_column="):
        open_task(replace(task, label_column="label"), seed=0)


def test_other_files_are_read_by_the_columns_that_were_recognised_in_the_training_file(
    folder: Path, tmp_path: Path
) -> None:
    """Both others have a column with a more usual name, which is not what the network was trained on."""
    rows = list(zip(*sentences(40), strict=True))
    made = tmp_path / "data"
    made.mkdir()
    (made / "train.csv").write_text("wording,art\n" + "".join(f"{text},{topic}\n" for text, topic in rows))
    more = "".join(f"case {i},{text},urgent,{topic}\n" for i, (text, topic) in enumerate(rows[:6]))
    (made / "test.csv").write_text("title,wording,label,art\n" + more)
    data = open_task(replace(recipe(folder).task, data=str(made)), seed=0)
    wanted = [text for text, _ in rows[:6]]
    assert list(data.test.texts) == wanted
    assert [data.test.class_names[label] for label in data.test.labels] == [topic for _, topic in rows[:6]]
    inputs = TextInputs.inputs(data, TextTokenizer(tokenizer_json(), 24))
    said: list[str] = []
    assert list(inputs.open(made / "test.csv", labelled=False, say=said.append).texts) == wanted
    assert not said
    (tmp_path / "new.csv").write_text("title,n\nsnow today,1\n")
    assert inputs.open(tmp_path / "new.csv", labelled=False, say=said.append).texts == ("snow today",)
    assert said == ["new.csv: texts in the column 'title'"]


def test_corrected_labels_are_those_of_the_same_texts(folder: Path, tmp_path: Path) -> None:
    task = recipe(folder).task
    texts, topics = sentences(120)
    data = LabelledTexts.from_lists(texts, topics)
    soft = torch.eye(3)[data.labels].roll(1, 1)
    names = tuple(map(str, range(120)))
    LabelFile(names, data.class_names, data.labels, soft).write(tmp_path / "audit")
    changed = open_task(replace(task, labels=str(tmp_path / "audit")), seed=0)
    plain = open_task(task, seed=0)
    assert changed.train.texts == plain.train.texts
    assert torch.equal(changed.train.labels, (plain.train.labels + 1) % 3)
    assert changed.train.targets is not None
    other = fingerprint_data(LabelledTexts(("snow", *data.texts[1:]), data.labels, data.class_names))
    LabelFile(names, data.class_names, data.labels, soft, fingerprint=other).write(tmp_path / "other")
    with pytest.raises(ValueError, match="made for other data: text 0 has other content"):
        open_task(replace(task, labels=str(tmp_path / "other")), seed=0)


# --- training ---------------------------------------------------------------------------------------------


def test_a_run_that_died_within_an_epoch_ends_with_the_same_bits(
    folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 updates an epoch; the dropout of the network draws at each."""
    checkpoints = CheckpointConfig(tmp_path / "run", seconds=0, tensorboard=False)
    step = FabricGradients.step

    def dying(self: FabricGradients) -> None:
        if self.updates == 8:
            raise Died
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(FabricGradients, "step", dying)
        with pytest.raises(Died):
            train_recipe(recipe(folder), engine(), checkpoints, show=False)
    summary = train_recipe(recipe(folder), engine(), checkpoints, show=False)
    alone = json.loads((run / "summary.json").read_text())
    assert summary["weights"] == alone["weights"]
    assert summary["held_out"] == alone["held_out"]
    model = hetsngp.load(tmp_path / "run" / "model")
    assert isinstance(model.backbone.network, TextEncoder)
    untrained = torch.tensor(0.1) == model.backbone.network.network.encoder.layer[0].output.dropout.p
    assert bool(untrained)  # the network as it came, with its dropout
    write_csv(tmp_path / "tickets.csv", 120, seed=5)
    (tmp_path / "network").symlink_to(folder / "network")
    with pytest.raises(ValueError, match=r"holds a run on other data.*text 0 has other content"):
        train_recipe(recipe(tmp_path), engine(), checkpoints, show=False)


def test_the_network_learns_the_topics(folder: Path, run: Path) -> None:
    """Before: a third of the sentences by chance."""
    summary = train_recipe(
        recipe(folder, "schedule.epochs=8", "schedule.lr=0.01"),
        engine(),
        CheckpointConfig(folder / "longer", tensorboard=False),
        show=False,
    )
    assert summary["held_out"]["accuracy"] > 0.9
    assert summary["held_out"]["examples"] == 30
    assert summary["recipe"]["task"]["inputs"] == "text"


FROZEN = """
inputs = "text"
frozen = true
method = "sngp"
held_out = 0.25
[hardware]
accelerator = "cpu"
"""


def frozen(folder: Path, *changes: str) -> Recipe:
    file = folder / "frozen.toml"
    file.write_text(f"data = '{folder / 'tickets.csv'}'\nnetwork = '{folder / 'network'}'\n{FROZEN}")
    return read_recipe(file, changes)


def test_a_frozen_run_predicts_as_its_head_on_the_cached_features(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is shared: another method computes no features again."""
    checkpoints = CheckpointConfig(tmp_path / "sngp")
    summary = train_recipe(frozen(folder), engine(), checkpoints, show=False)
    served = open_run(tmp_path / "sngp")
    data = open_task(frozen(folder).task, seed=0)
    h = text_features(data.held_out, TextInputs.network(frozen(folder).task), tmp_path / "features")
    expected = served.model.on_features().predict(h)
    found = [record.confidence for record in predict_texts(served, data.held_out)]
    assert found == pytest.approx(expected.probs.max(1).values.tolist(), abs=1e-5)
    accuracy = float((expected.probs.argmax(1) == data.held_out.labels).double().mean())
    assert summary["held_out"]["accuracy"] == pytest.approx(accuracy)
    monkeypatch.setattr(TextTokenizer, "encode", None)
    train_recipe(
        frozen(folder, "method=deterministic"), engine(), CheckpointConfig(tmp_path / "det"), show=False
    )


def test_the_head_may_be_fitted_before_everything_is_trained(folder: Path, tmp_path: Path) -> None:
    """It begins better than a new head ends after as many epochs."""
    losses = []
    for name in ("true", "false"):
        made = recipe(folder, f"head_first={name}", "method=sngp", "schedule.epochs=1", "schedule.lr=1e-4")
        summary = train_recipe(
            made, engine(), CheckpointConfig(tmp_path / name, tensorboard=False), show=False
        )
        losses.append(summary["held_out"]["nll"])
    assert losses[0] < 0.6 * losses[1]


# --- predictions ------------------------------------------------------------------------------------------


def records(*arguments: object) -> list[dict[str, Any]]:
    result = invoke("predict", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_every_source_gives_the_same_predictions(run: Path, tmp_path: Path) -> None:
    texts, topics = sentences(6, seed=3)
    (tmp_path / "a.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"words": text, "n": 1}) for text in texts))
    write_csv(tmp_path / "a.csv", 6, seed=3)
    served = open_run(run)
    expected = served.model.predict(served.inputs.read(texts))
    direct = list(predict_texts(served, texts))
    assert [record.input for record in direct] == texts
    assert [record.confidence for record in direct] == expected.confidence.tolist()
    names = served.inputs.class_names
    assert names == tuple(sorted(TOPICS))
    assert [record.label for record in direct] == [names[label] for label in expected.labels.tolist()]
    wanted = [{k: v for k, v in json.loads(as_json(record)).items() if k != "name"} for record in direct]
    one_by_one = [word for text in texts for word in ("--text", text)]
    for arguments in ([tmp_path / "a.txt"], [tmp_path / "a.csv"], [tmp_path / "a.jsonl"], one_by_one):
        found = records(run, *arguments)
        assert [{k: v for k, v in record.items() if k != "name"} for record in found] == wanted
    assert found[2]["name"] == "text[2]"
    assert records(run, tmp_path / "a.csv", "--limit", "2")[1]["name"] == f"{tmp_path / 'a.csv'}[3]"
    assert [record["input"] for record in records(run, tmp_path / "a.csv", "--column", "intent")] == topics


def test_lines_of_standard_input(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from hetsngp import cli

    result = CliRunner().invoke(cli.make_app(), ["predict", str(run), "-"], input="play it\n\nsnow today\n")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["text", "label"]
    assert [line.split("  ")[0] for line in lines[1:3]] == ["play it", "snow today"]


def test_long_texts_are_shortened_in_the_table_alone(run: Path) -> None:
    long = "please " * 30 + "play"
    result = invoke("predict", run, "--text", long)
    assert "please pl…" in result.stdout or "pleas…" in result.stdout
    assert long not in result.stdout
    assert records(run, "--text", long)[0]["input"] == long


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "there is nothing to predict: give FILE, or of a model of texts --text TEXT"),
        (("photo.jpg",), "takes texts, not images"),
        (("missing.csv",), "there is no file missing.csv"),
        (("--text", " "), "1 of 1 texts are empty"),
        (("--text", "a", "--text", "caf\udce9"), "(counted from 0) has bytes or characters that are no"),
        (("--text", "a", "--sheet", "a.png"), "takes texts, not images"),
        (("svhn",), "svhn is a set of images, and texts are expected: give clinc150"),
    ],
)
def test_wrong_sources_are_named(run: Path, arguments: tuple[str, ...], words: str) -> None:
    refused(invoke("predict", run, *arguments), words)


def test_a_folder_of_images_is_no_text(run: Path, tmp_path: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    refused(invoke("predict", run, tmp_path / "photos"), "has no file test with one of the endings")
    (tmp_path / "photos" / "cat" / "1.jpg").touch()
    refused(invoke("predict", run, tmp_path / "photos"), "takes texts, not images")


def test_a_damaged_tokenizer_is_another_models(run: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(run / "model", tmp_path / "model")
    file = copy / "tokenizer.json"
    file.write_text(file.read_text().replace("guitar", "violin"))
    with pytest.raises(hetsngp.ArtifactError, match="another tokenizer than the model was trained with"):
        open_run(copy)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        open_run(copy)


def test_preprocessing_is_the_same_after_json(run: Path) -> None:
    served = open_run(run)
    assert isinstance(served.inputs, TextPreprocessing)
    again = TextPreprocessing.from_dict(json.loads(json.dumps(served.inputs.to_dict())), run / "model")
    assert again == served.inputs


def test_a_plainly_saved_model_says_how_to_write_its_tokenizer(
    folder: Path, run: Path, tmp_path: Path
) -> None:
    hetsngp.save(open_run(run).model, tmp_path / "model")
    with pytest.raises(FileNotFoundError) as error:
        open_run(tmp_path / "model")
    line = str(error.value).partition("classes: ")[2]
    exec(line.replace("'minilm'", repr(str(folder / "network"))), {})
    found, before = (next(iter(predict_texts(open_run(at), ["play it"]))) for at in (tmp_path / "model", run))
    assert (found.confidence, found.verdict) == (before.confidence, "")


# --- evaluation -------------------------------------------------------------------------------------------


def test_evaluate_on_files(run: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "new.csv", 40, seed=8)
    (tmp_path / "far.txt").write_text("very very very\nplease\nit is\nthe a my\n")
    out = tmp_path / "out"
    result = invoke(
        "evaluate", run, "--data", tmp_path / "new.csv", "--ood", f"far={tmp_path / 'far.txt'}", "--out", out
    )
    assert result.exit_code == 0, result.output
    report = json.loads((out / "report.json").read_text())
    served = open_run(run)
    texts, topics = sentences(40, 8)
    labels = served.model.predict(served.inputs.read(texts)).labels.tolist()
    correct = [served.inputs.class_names[label] == topic for label, topic in zip(labels, topics, strict=True)]
    assert report["id"]["accuracy"] == pytest.approx(sum(correct) / 40)
    assert set(report["ood"]) == {"far"}
    new = ("evaluate", run, "--data", tmp_path / "new.csv")
    assert "has no test texts: name others, --data SET" in invoke("evaluate", run).output
    assert "leave out --corrupted" in invoke(*new, "--corrupted", "made").output
    own = invoke("evaluate", run, "--data", run.parent / "tickets.csv", "--out", tmp_path / "own")
    assert "these are the texts that were trained on" in " ".join(own.output.split())
    assert "trained on" not in result.output
    (tmp_path / "new.csv").write_text("utterance,intent\nplay it,dance\n")
    assert "'dance', and the classes are alarm" in invoke(*new).output
