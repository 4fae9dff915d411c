"""An audit of a file of texts: wrong labels first, with their texts, and labels that a training takes."""

import csv
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.cli.test_cli import invoke
from tests.unit.small_texts import sentences, write_network

pytest.importorskip("transformers", reason="pip install 'hetsngp[text]'")
pytest.importorskip("pandas", reason="pip install 'hetsngp[tables]'")
pytest.importorskip("jinja2", reason="pip install 'hetsngp[eval]'")

from hetsngp.auditing.run_audit import AuditSource
from hetsngp.data.label_files import LabelFile, open_labels
from hetsngp.data.text.sources import open_texts

COUNT = 240
WRONG = (3, 40, 77, 90)
"""Rows of the file with another topic than their words have."""


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder of data and audit, and what was printed."""
    folder = tmp_path_factory.mktemp("audit")
    write_network(folder / "network")
    texts, topics = sentences(COUNT)
    other = {"alarm": "music", "music": "weather", "weather": "alarm"}
    labels = [other[topic] if row in WRONG else topic for row, topic in enumerate(topics)]
    with open(folder / "tickets.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "kind"), *zip(texts, labels, strict=True)])
    result = invoke("audit", folder / "tickets.csv", "--network", folder / "network", "--out", folder / "out")
    assert result.exit_code == 0, result.output
    return folder, result.output


def drop_row_5(folder: Path) -> str:
    """Content of the choices.csv of a person who drops one example."""
    given = open_texts(folder / "tickets.csv")
    name = given.class_names[int(given.labels[5])]
    return f"index,given_label,decision,new_label\n5,{name},drop,\n"


def test_wrong_labels_come_first_with_their_texts(audit: tuple[Path, str]) -> None:
    folder, _ = audit
    texts, topics = sentences(COUNT)
    with open(folder / "out" / "label_errors.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {int(row["index"]) for row in rows[: len(WRONG)]} == set(WRONG)
    for row in rows:
        assert row["text"] == texts[int(row["index"])]
    assert all(row["predicted_label"] == topics[int(row["index"])] for row in rows[: len(WRONG)])


def test_the_page_shows_the_texts_and_there_is_no_sheet(audit: tuple[Path, str]) -> None:
    folder, _ = audit
    page = (folder / "out" / "review.html").read_text()
    assert sentences(COUNT)[0][WRONG[0]] in page
    assert {file.name for file in (folder / "out").iterdir()} == {
        *("audit.json", "confusions.csv", "confusions.png", "features", "label_errors.csv"),
        *("labels.safetensors", "review.html"),
    }
    assert json.loads((folder / "out" / "audit.json").read_text())["kind"] == "text"


def test_a_training_takes_the_corrected_labels(audit: tuple[Path, str]) -> None:
    folder, printed = audit
    data = open_texts(folder / "tickets.csv")
    labels = open_labels(folder / "out", data)
    topics = torch.tensor([data.class_names.index(topic) for topic in sentences(COUNT)[1]])
    assert torch.equal(labels.labels[list(WRONG)], topics[list(WRONG)])
    assert int((labels.labels != topics).sum()) <= 5  # given: four, all of them corrected
    network, features = folder / "network", folder / "out" / "features"
    words = (
        f"train text --set data={folder / 'tickets.csv'} --set network={network} --set features={features}"
    )
    assert f"{words} --set labels={folder / 'out'}" in printed


def test_choices_of_a_person_are_applied(audit: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = audit
    choices = tmp_path / "choices.csv"
    given = open_texts(folder / "tickets.csv")
    choices.write_text(drop_row_5(folder))
    result = invoke("audit", folder / "tickets.csv", "--apply", choices, "--out", folder / "out")
    assert result.exit_code == 0, result.output
    found = open_labels(folder / "out", given)
    assert found.is_kept.logical_not().nonzero().flatten().tolist() == [5]
    assert LabelFile.read(folder / "out").names == tuple(map(str, range(COUNT)))


def test_a_changed_text_is_other_data(audit: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = audit
    file = tmp_path / "tickets.csv"
    file.write_text((folder / "tickets.csv").read_text().replace(sentences(COUNT)[0][0], "rain rain rain"))
    result = invoke("audit", file, "--network", folder / "network", "--out", folder / "out")
    assert result.exit_code == 2
    assert "holds an audit of other data" in result.output


def test_options_of_images_are_refused(audit: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = audit
    result = invoke("audit", folder / "tickets.csv", "--size", "8", "--out", tmp_path / "out")
    assert "--size is for networks of images" in result.output


def test_a_finished_run_is_audited_by_its_own_features(audit: tuple[Path, str], tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")
    folder, _ = audit
    given = {"data": folder / "tickets.csv", "network": folder / "network", "method": "sngp"}
    changes = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    result = invoke("train", "text", *changes, "--set", "label_column=kind", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    before = sorted((tmp_path / "features").rglob("*.safetensors"))
    result = invoke("audit", tmp_path / "run", "--rounds", "1", "--out", tmp_path / "audit")
    assert result.exit_code == 0, result.output
    assert sorted((tmp_path / "features").rglob("*.safetensors")) == before
    assert not (tmp_path / "audit" / "features").exists()
    with open(tmp_path / "audit" / "label_errors.csv", newline="") as file:
        first = [int(row["index"]) for row in csv.DictReader(file)][: len(WRONG)]
    assert set(first) == set(WRONG)
    printed = next(line for line in result.output.splitlines() if "--apply" in line)
    moved = replace(AuditSource.find(str(tmp_path / "run")), data="/moved/tickets.csv")
    trains = moved.train_command(tmp_path / "audit", {})
    assert [word for word in shlex.split(trains) if word.startswith("data=")] == ["data=/moved/tickets.csv"]
    (tmp_path / "choices.csv").write_text(drop_row_5(folder))
    words = shlex.split(printed.replace("choices.csv", str(tmp_path / "choices.csv")))[1:]
    result = invoke(*words)
    assert result.exit_code == 0, result.output
