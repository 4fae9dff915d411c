"""Texts from tables, JSON lines, folders, data sets of Hugging Face's and by name."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.small_texts import sentences, write_csv

from hetsngp.data.datasets.registry import open_data
from hetsngp.data.fingerprint import compare_fingerprints, fingerprint_data
from hetsngp.data.images.arrays import stratified
from hetsngp.data.text import LabelledTexts, read_texts, texts_from_columns, texts_from_datasets
from hetsngp.data.text.sources import has_split, open_texts
from hetsngp.limits import LimitExceeded

TEXTS, TOPICS = sentences(12)
ROWS = [
    {"id": row, "Utterance": text, "intent": topic}
    for row, (text, topic) in enumerate(zip(TEXTS, TOPICS, strict=True))
]


def write(file: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """Write rows in the format of the ending."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(rows)
    if file.suffix == ".parquet":
        frame.to_parquet(file)
    elif ".jsonl" in file.name:
        content = "\n".join(json.dumps(row) for row in rows) + "\n\n"
        file.write_bytes(gzip.compress(content.encode()) if file.suffix == ".gz" else content.encode())
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=1))
    else:
        frame.to_csv(file, index=False, sep="\t" if ".tsv" in file.name else ",", encoding="utf-8-sig")
    return file


@pytest.mark.parametrize(
    "name", ["a.csv", "a.tsv", "a.csv.gz", "a.parquet", "a.jsonl", "a.jsonl.gz", "a.json"]
)
def test_every_format_gives_the_same(name: str, tmp_path: Path) -> None:
    """Also with the byte-order mark that spreadsheets write."""
    data, columns = read_texts(write(tmp_path / name))
    assert data.texts == tuple(TEXTS)
    assert [data.class_names[label] for label in data.labels.tolist()] == TOPICS
    assert data.class_names == ("alarm", "music", "weather")
    assert str(columns) == "texts in the column 'Utterance', classes in 'intent'"
    assert columns.guessed


def test_columns_are_recognised_by_their_values_where_their_names_are_unusual() -> None:
    columns = {"n": [1, 2, 3, 4], "was": ["a b", "c d", "e f", "g h"], "art": ["x", "x", "z", "z"]}
    data, found = texts_from_columns(columns)
    assert (found.text, found.label) == ("was", "art")
    assert data.labels.tolist() == [0, 0, 1, 1]


def test_given_columns_win_over_usual_names() -> None:
    columns = {"text": ["a b", "c d"], "other": ["e f", "g h"], "label": [0, 1], "second": [1.0, 0.0]}
    data, found = texts_from_columns(columns, "other", "second")
    assert data.texts == ("e f", "g h")
    assert data.labels.tolist() == [1, 0]
    assert data.class_names == ("0", "1")
    assert not found.guessed


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"a": ["x y", "z"], "b": ["p q", "r"], "label": [0, 1]}, {}, "'a', 'b' could be.*text_column="),
        ({"text": ["x y", "z w"], "b": ["p", "r"]}, {}, "of the classes.*label_column="),
        ({"text": ["x y", "z w"], "label": [0, 1]}, {"text": "txt"}, "no column 'txt'.*did you mean 'text'"),
        ({"text": ["x y", "z w"], "label": [0, 1]}, {"text": "label", "label": "text"}, "holds no texts.* 0"),
        ({"text": ["x", None, " "], "label": [0, 1, 1]}, {}, "2 of 3 texts are empty, the first is number 1"),
        ({"text": ["x", "y", "z"], "label": ["a", "", None]}, {}, "no class for 2 of 3 texts.*number 1"),
        ({"text": ["x", "y"], "label": ["a", "c"]}, {"class_names": ("a", "b")}, "class 'c'.*are a, b"),
        ({"text": [], "label": []}, {}, "no examples"),
        ({"text": ["\U0001f600 é", "a \ud83d"], "label": [0, 1]}, {}, r"number 1 .*no Unicode, 'a \\ud83d'"),
    ],
)  # fmt: skip
def test_errors_name_the_fix(columns: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        texts_from_columns(columns, **options)


def test_files_that_are_no_texts_are_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"text": "Käse", "label": 1}'.encode("latin-1"))
    with pytest.raises(ValueError, match="not text in UTF-8"):
        read_texts(latin)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a", "label": 1}\n{"text": ')
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        read_texts(broken)
    broken.write_text("[[1, 2]]")
    with pytest.raises(ValueError, match="a list where objects"):
        read_texts(broken)
    lines = tmp_path / "lines.txt"
    lines.write_text("one text\n\nanother\n")
    with pytest.raises(ValueError, match="without classes"):
        read_texts(lines)
    assert read_texts(lines, labelled=False)[0].texts == ("one text", "another")


def test_files_that_ask_for_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "deep.jsonl"
    deep.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is no JSON"):
        read_texts(deep)
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(b"\n" * 1_000_000))
    monkeypatch.setenv("HETSNGP_MAX_TABLE_BYTES", "10000")
    with pytest.raises(LimitExceeded, match="HETSNGP_MAX_TABLE_BYTES"):
        read_texts(bomb)
    bomb.write_bytes(bomb.read_bytes()[:40])
    with pytest.raises(ValueError, match="cannot be decompressed"):
        read_texts(bomb)


def test_splits_are_those_of_images() -> None:
    data = LabelledTexts.from_lists(TEXTS, TOPICS)
    rest, held_out = data.split(0.25, seed=3)
    rows = stratified(data.labels, 3, 0.25, 3)
    for part, chosen in ((rest, rows[0]), (held_out, rows[1])):
        assert part.texts == tuple(TEXTS[row] for row in chosen)
        assert torch.equal(part.labels, data.labels[chosen])
    soft = LabelledTexts(data.texts, data.labels, data.class_names, torch.eye(3)[data.labels])
    assert torch.equal(soft.take([5, 2]).loader_labels, torch.eye(3)[data.labels[[5, 2]]])


def test_contradicting_copies_are_counted_and_told(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text,label\nhi,a\nyo,b\nhi,b\nyo,b\nhey,a\n")
    said: list[str] = []
    data = open_texts(file, say=said.append)
    assert data.contradictions() == [[0, 2]]
    assert "1 different texts" in said[-1]
    assert "'hi' (a, b)" in said[-1]
    assert said[0] == "a.csv: texts in the column 'text', classes in 'label'"


def test_a_folder_has_splits_with_the_classes_of_train(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", 30)
    (tmp_path / "validation.csv").write_text("utterance,intent\nplay it,music\n")
    assert has_split(tmp_path, "val")
    assert not has_split(tmp_path, "test")
    val = open_texts(tmp_path, "val")
    assert val.class_names == open_texts(tmp_path).class_names == ("alarm", "music", "weather")
    assert val.labels.tolist() == [1]
    with pytest.raises(FileNotFoundError, match="no file test"):
        open_texts(tmp_path, "test")
    (tmp_path / "val.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"several files of the split val, val.jsonl, validation.csv"):
        open_texts(tmp_path, "val")


class ClassLabel:
    """What ``datasets.ClassLabel`` has."""

    names = ("no", "yes")


class Dataset:
    """What ``datasets.Dataset`` has: names, features, and columns by name."""

    def __init__(self, columns: dict[str, list[Any]], features: dict[str, Any]) -> None:
        self.columns, self.features, self.column_names = columns, features, list(columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def test_class_labels_of_hugging_face_keep_their_names() -> None:
    train = Dataset({"idx": [7, 8], "sentence": ["a b", "c d"], "label": [1, 1]}, {"label": ClassLabel()})
    data, found = texts_from_datasets(train)
    assert (data.class_names, data.labels.tolist(), found.text) == (("no", "yes"), [1, 1], "sentence")
    both, _ = texts_from_datasets({"test": train, "train": train})
    assert list(both) == ["test", "train"]
    unknown = Dataset({"sentence": ["a b"], "label": [-1]}, {"label": ClassLabel()})
    with pytest.raises(ValueError, match="no class for 1 of 1"):
        texts_from_datasets(unknown)


def test_words_of_a_split_get_the_numbers_of_train() -> None:
    train = Dataset({"text": ["a b", "c d"], "label": ["x", "y"]}, {})
    test = Dataset({"text": ["e f"], "label": ["y"]}, {})
    assert texts_from_datasets({"test": test, "train": train})[0]["test"].labels.tolist() == [1]


def test_clinc150_by_name(tmp_path: Path) -> None:
    rows = {"train": [["hi", "greet"], ["bye", "exit"]], "val": [["ho", "greet"]], "test": [["cu", "exit"]]}
    oos = {f"oos_{split}": [["what", "oos"]] for split in rows}
    (tmp_path / "clinc150").mkdir()
    (tmp_path / "clinc150" / "data_full.json").write_text(json.dumps({**rows, **oos}))
    train = open_texts("clinc150", "train", root=tmp_path)
    assert (train.class_names, train.labels.tolist()) == (("exit", "greet"), [1, 0])
    assert open_texts("clinc150", "val", root=tmp_path).labels.tolist() == [1]
    out = open_texts("clinc150:oos", "test", root=tmp_path)
    assert (out.texts, out.class_names) == (("what",), ("oos",))
    (tmp_path / "clinc150" / "data_full.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"damaged or no file of CLINC150 .*oos_test"):
        open_data("clinc150:oos", "test", tmp_path)


def test_sizes_of_clinc150(data_root: Path) -> None:
    sizes = [len(open_texts(f"clinc150{v}", s)) for v in ("", ":oos") for s in ("train", "val", "test")]
    assert sizes == [15_000, 3_000, 4_500, 100, 100, 1_000]


def test_a_fingerprint_knows_another_text() -> None:
    before = LabelledTexts.from_lists(TEXTS, TOPICS)
    changed = LabelledTexts.from_lists(["new words", *TEXTS[1:]], TOPICS)
    relabelled = LabelledTexts(before.texts, before.labels.flip(0), before.class_names)
    now = fingerprint_data(before)
    assert now is not None
    assert compare_fingerprints(now, fingerprint_data(changed) or {}) == ["text 0 has other content"]
    assert compare_fingerprints(now, fingerprint_data(relabelled) or {}) == ["other labels or class names"]
    assert compare_fingerprints(now, fingerprint_data(LabelledTexts.from_lists(TEXTS, TOPICS)) or {}) == []
