"""Files of an audit, from corrected labels of any examples; and what an audit refuses."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hetsngp.auditing.audit import (
    AUDIT,
    AuditedData,
    RoundLog,
    _confusions_csv,
    check_same_data,
    is_complete,
    read_audit,
    summary,
    write_audit,
)
from hetsngp.auditing.examples import ImageExamples, TextExamples
from hetsngp.data.fingerprint import fingerprint_data
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.label_files import LabelFile
from hetsngp.files import with_checksum
from hetsngp.labels import ClassConfusions, Correction, correct_in_rounds, find_label_errors, rounds

CLASSES = ("bad, awful", "good", "neutral")
COUNT = 120
FILES = {AUDIT, "label_errors.csv", "labels.safetensors", "confusions.csv", "confusions.png", "review.html"}


def make_texts(**changes: Any) -> tuple[AuditedData, Correction]:
    rng = np.random.default_rng(0)
    true = rng.integers(3, size=COUNT)
    given = np.where(rng.random(COUNT) < 0.2, (true + 1) % 3, true)
    probs = np.full((COUNT, 3), 0.1) + 0.7 * np.eye(3)[true]
    texts = TextExamples([f"text {i}" for i in range(COUNT)])
    values: dict[str, Any] = {
        "name": "reviews",
        "given": given,
        "class_names": CLASSES,
        "names": tuple(map(str, range(COUNT))),
        "key": "index",
        "examples": texts,
        "fingerprint": {"examples": COUNT, "labels": "a"},
    }
    return AuditedData(**values | changes), Correction(find_label_errors(given, probs), 1, (0.5,))


def rows(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def test_texts_have_every_file_but_the_sheet(tmp_path: Path) -> None:
    data, found = make_texts()
    about = {
        "data": "reviews",
        "settings": {"page": True},
        "rounds": [{"round": 1, "nll": 0.5, "seconds": 2.0}],
    }
    content = write_audit(tmp_path, data, found, about, notes=["a sentence"])
    assert {file.name for file in tmp_path.iterdir()} == FILES
    errors = found.errors
    lines = rows(tmp_path / "label_errors.csv")
    assert [int(line["index"]) for line in lines] == errors.order.tolist()
    assert {line["given_label"] for line in lines} == set(CLASSES)
    labels = LabelFile.read(tmp_path)
    assert torch.equal(labels.targets, torch.from_numpy(errors.clean_probs))
    assert labels.given.tolist() == data.given.tolist()
    assert (labels.names, labels.class_names, labels.fingerprint) == (
        data.names,
        CLASSES,
        data.fingerprint,
    )
    page = (tmp_path / "review.html").read_text(encoding="utf-8")
    assert "Labels of reviews" in page
    assert "a sentence" in page
    assert f"text {errors.order[0]}" in page
    assert content == read_audit(tmp_path)
    assert content["seconds"]["rounds"] == 2.0
    assert "suspicious.png" not in summary(tmp_path, content)


def test_the_numbers_are_sums_over_examples(tmp_path: Path) -> None:
    data, found = make_texts()
    content = write_audit(tmp_path, data, found, {"settings": {}})
    errors = found.errors
    by_class = {each["name"]: each for each in content["classes"]}
    for k, name in enumerate(CLASSES):
        of_class = [i for i in range(COUNT) if data.given[i] == k]
        assert by_class[name]["examples"] == len(of_class)
        expected = sum(float(errors.wrong_probability[i]) for i in of_class)
        assert by_class[name]["expected_wrong"] == pytest.approx(expected)
        assert by_class[name]["flagged"] == sum(errors.wrong_probability[i] > 0.5 for i in of_class)
    assert content["flagged"] == sum(each["flagged"] for each in content["classes"]) > 10
    assert content["expected_wrong_interval"] == list(errors.expected_wrong_interval)
    listed = {(row["true"], row["given"]): float(row["labels"]) for row in rows(tmp_path / "confusions.csv")}
    assert listed
    for t, true in enumerate(CLASSES):
        for g, given in enumerate(CLASSES):
            labels = sum(float(errors.clean_probs[i, t]) for i in range(COUNT) if data.given[i] == g)
            if t != g and labels >= 0.11:
                assert listed[true, given] == pytest.approx(labels, abs=0.01)
            elif t == g or labels < 0.09:
                assert (true, given) not in listed


def test_a_cross_fit_of_any_examples_is_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files need a Correction, whoever has made it."""
    monkeypatch.setattr(rounds, "FEWEST_EXAMPLES", COUNT)
    monkeypatch.setattr(rounds, "FEWEST_VALIDATION", COUNT // 5)
    data, found = make_texts()

    def cross_fit(targets: Any, trained: Any, score: Any) -> Any:
        assert trained.sum() == COUNT - COUNT // 5
        return found.probs

    said: list[str] = []
    log = RoundLog(said.append)
    correction = correct_in_rounds(data.given, cross_fit, rounds=2, on_round=log)
    content = write_audit(tmp_path, data, correction, {"rounds": log.rounds})
    assert [each["round"] for each in content["rounds"]] == [1, 2]
    assert [each["nll"] for each in content["rounds"]] == list(correction.losses)
    assert [line.partition(":")[0] for line in said] == ["round 1", "round 2"]
    assert f"{correction.losses[0]:.4f}" in summary(tmp_path, content)


def test_images_have_a_sheet_too(tmp_path: Path) -> None:
    pixels = torch.randint(256, (COUNT, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    data, found = make_texts()
    images = ImageArrays(pixels, torch.from_numpy(data.given), CLASSES)
    data, found = make_texts(examples=ImageExamples(images), fingerprint=fingerprint_data(images))
    write_audit(tmp_path, data, found, {}, page=False)
    assert {file.name for file in tmp_path.iterdir()} == FILES - {"review.html"} | {"suspicious.png"}
    with Image.open(tmp_path / "suspicious.png") as sheet:
        assert sheet.size[0] > 500


def test_an_audit_that_fails_halfway_is_not_finished_nor_is_the_one_before(tmp_path: Path) -> None:
    class Broken(TextExamples):
        def content(self, index: int) -> str:
            raise RuntimeError("the disk is gone")

    data, found = make_texts()
    write_audit(tmp_path, data, found, {})
    assert read_audit(tmp_path) is not None
    data, _ = make_texts(examples=Broken([""] * COUNT))
    with pytest.raises(RuntimeError, match="the disk is gone"):
        write_audit(tmp_path, data, found, {})
    assert read_audit(tmp_path) is None


def test_an_audit_without_a_page_removes_an_older_page(tmp_path: Path) -> None:
    data, found = make_texts()
    content = write_audit(tmp_path, data, found, {"settings": {"page": True}})
    assert is_complete(tmp_path, content, {"settings": {"page": True}})
    assert not is_complete(tmp_path, content, {"settings": {"page": True, "rounds": 2}})
    content = write_audit(tmp_path, data, found, {"settings": {"page": False}}, page=False)
    assert not (tmp_path / "review.html").exists()
    assert is_complete(tmp_path, content, {"settings": {"page": False}})
    (tmp_path / "labels.safetensors").unlink()
    assert not is_complete(tmp_path, content, {"settings": {"page": False}})


def test_audits_of_other_data_are_told_apart(tmp_path: Path) -> None:
    data, found = make_texts()
    content = write_audit(tmp_path, data, found, {})
    check_same_data(tmp_path, content, data)
    changed = replace(data, fingerprint={"examples": 7, "labels": "a"})
    with pytest.raises(ValueError, match=r"of other data .*examples 120, now 7.*--out.*remove audit\.json"):
        check_same_data(tmp_path, content, changed)
    changed = replace(data, fingerprint={"examples": COUNT, "labels": "b"})
    with pytest.raises(ValueError, match=r"other labels or class names.*decide on its page$") as caught:
        check_same_data(tmp_path, content, changed, applying=True)
    assert "audit.json" not in str(caught.value)


def test_files_that_are_new_gone_or_moved_are_named(tmp_path: Path) -> None:
    """Every file after the one that was moved has another place in the fingerprint: it is not said."""
    names = tuple(f"{'abc'[i % 3]}/{i:03d}.png" for i in range(COUNT))
    data, found = make_texts(key="path", names=names)
    content = write_audit(tmp_path, data, found, {})
    check_same_data(tmp_path, content, data)
    changed = ("b/000.png", "c/new.png", *names[2:])
    other = {"examples": COUNT, "sample": [["a/000.png", "ab"]]}
    with pytest.raises(ValueError, match="of other data") as caught:
        check_same_data(tmp_path, content, replace(data, names=changed, fingerprint=other))
    assert (
        "(1 with another label, such as a/000.png, now b/000.png; 1 new, such as c/new.png; 1 gone, such as "
        f"{names[1]})" in str(caught.value)
    )
    given = np.array(data.given)
    given[5] = (given[5] + 1) % 3
    with pytest.raises(
        ValueError, match=rf"\(1 with another label, such as {names[5]}, now {CLASSES[given[5]]}\)"
    ):
        check_same_data(tmp_path, content, replace(data, given=given))


def test_classes_without_an_expected_wrong_label_are_not_listed(tmp_path: Path) -> None:
    data, found = make_texts()
    content = write_audit(tmp_path, data, found, {})
    assert "most of them in: " in summary(tmp_path, content)
    classes = [{**each, "expected_wrong": 0.4} for each in content["classes"]]
    assert "most of them in" not in summary(tmp_path, {**content, "classes": classes})
    classes[1]["expected_wrong"] = 0.6
    listed = [
        line for line in summary(tmp_path, {**content, "classes": classes}).splitlines() if "most" in line
    ]
    assert listed == [f"most of them in: good 1 of {classes[1]['examples']}"]


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    data, found = make_texts()
    content = write_audit(tmp_path, data, found, {})
    without = with_checksum({name: value for name, value in content.items() if name != "classes"})
    changed = ({**content, "examples": 3}, {**content, "version": 2}, without)
    for text in ("{", "[]", *map(json.dumps, changed)):
        (tmp_path / AUDIT).write_text(text)
        with pytest.raises(ValueError, match="remove it and repeat the audit"):
            read_audit(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"given": np.ones(COUNT, dtype=np.int64)}, "all examples of reviews have one class"),
        (
            {"given": np.arange(3), "names": ("0", "1", "2"), "examples": TextExamples(["", "", ""])},
            "reviews has one example of each class",
        ),
        ({"key": "path", "names": ("a",) * COUNT}, "names are not unique"),
        ({"class_names": ("bad", "good", "bad")}, "two classes are called bad in reviews.*a name of its own"),
        ({"class_names": ("bad", "", "good")}, "a class has an empty name in reviews"),
        ({"key": "path", "names": tuple(f"\udcff{i}" for i in range(COUNT))}, "rename the file"),
    ],
)
def test_what_cannot_be_audited_is_refused_at_the_start(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_texts(**changes)


@pytest.mark.parametrize(("below", "weak"), [(0.05, True), (0.15, False)])
def test_models_that_have_learned_nothing_are_named(below: float, weak: bool, tmp_path: Path) -> None:
    data, found = make_texts()
    shares = np.bincount(data.given) / COUNT
    nll = (1 - below) * -sum(share * math.log(share) for share in shares)
    content = write_audit(tmp_path, data, replace(found, losses=(nll,)), {})
    page = (tmp_path / "review.html").read_text(encoding="utf-8")
    for text in (page, summary(tmp_path, content)):
        assert ("hardly tell the classes apart" in text) == weak


def test_pairs_of_hardly_any_label_are_not_listed(tmp_path: Path) -> None:
    counts = np.array([[5.0, 0.2, 0.05], [0.0, 3.0, 2.0], [0.0, 0.0, 1.0]])
    lines = _confusions_csv(ClassConfusions(counts, CLASSES)).splitlines()
    assert lines == [
        "true,given,labels,share",
        "good,neutral,2.00,0.400000",
        '"bad, awful",good,0.20,0.038095',
    ]


def test_few_examples_are_said_to_mean_little(tmp_path: Path) -> None:
    few = "There are 120 examples of 3 classes"
    data, found = make_texts()
    assert few not in summary(tmp_path, write_audit(tmp_path, data, found, {}))
    names = tuple(f"class {k}" for k in range(13))
    given = np.arange(COUNT) % 13
    probs = np.full((COUNT, 13), 0.02) + 0.74 * np.eye(13)[given]
    data = replace(data, given=given, class_names=names)
    content = write_audit(tmp_path, data, Correction(find_label_errors(given, probs), 1, (0.5,)), {})
    assert few.replace("3", "13") in summary(tmp_path, content)
    assert few.replace("3", "13") in (tmp_path / "review.html").read_text()
