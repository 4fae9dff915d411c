"""Choices of a person: what is read, what is refused and why, and the corrected labels."""

import csv
from pathlib import Path

import numpy as np
import pytest

from hetsngp.auditing.choices import LabelChoice, read_choices, write_corrected
from hetsngp.labels import find_label_errors

NAMES = ("cat", "dog", 'a "quoted", name\nof two lines')
PATHS = ("b/2.png", "a/1.png", "a/10, with a comma.png", "ü.png")
GIVEN = (0, 0, 1, 2)


@pytest.fixture(params=["path", "index"])
def key(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ids(key: str) -> tuple[str, ...]:
    return PATHS if key == "path" else ("0", "1", "2", "3")


@pytest.fixture
def folder(tmp_path: Path, key: str) -> Path:
    """Folder of an audit of four examples."""
    probs = np.full((4, 3), 0.1) + 0.7 * np.eye(3)[[1, 0, 1, 2]]
    errors = find_label_errors(np.array(GIVEN), probs, sharpening=1.0)
    path = tmp_path / "audit" / "label_errors.csv"
    errors.to_csv(path, class_names=NAMES, names=PATHS if key == "path" else None)
    return path.parent


def write(path: Path, key: str, *lines: tuple[str, str, str, str], heading: str | None = None) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as handle:
        rows = csv.writer(handle)
        rows.writerow([key, "given_label", "decision", "new_label"] if heading is None else [heading])
        rows.writerows(lines)
    return path


def corrected(folder: Path) -> list[list[str]]:
    with open(folder / "corrected_labels.csv", encoding="utf-8", newline="") as handle:
        return list(csv.reader(handle))


def test_choices_become_corrected_labels(
    folder: Path, key: str, ids: tuple[str, ...], tmp_path: Path
) -> None:
    before = (folder / "label_errors.csv").read_bytes()
    file = write(
        tmp_path / "choices.csv",
        key,
        (ids[0], "cat", "change", "dog"),
        (ids[2], "dog", "drop", ""),
        (ids[3], NAMES[2], "keep", ""),
    )
    choices = read_choices(file, folder)
    assert choices == {
        ids[0]: LabelChoice("cat", "dog"),
        ids[2]: LabelChoice("dog", None),
        ids[3]: LabelChoice(NAMES[2], NAMES[2]),
    }
    assert write_corrected(folder, choices) == folder / "corrected_labels.csv"
    by_id = {
        ids[0]: ["cat", "dog", "person"],
        ids[1]: ["cat", "cat", "given"],
        ids[2]: ["dog", "", "person"],
        ids[3]: [NAMES[2], NAMES[2], "person"],
    }
    assert corrected(folder)[0] == [key, "given_label", "label", "source"]
    order = sorted(ids) if key == "path" else list(ids)
    assert corrected(folder)[1:] == [[i, *by_id[i]] for i in order]
    assert (folder / "label_errors.csv").read_bytes() == before
    assert {path.name for path in folder.iterdir()} == {"label_errors.csv", "corrected_labels.csv"}


def test_a_later_file_replaces_its_examples_and_keeps_the_others(
    folder: Path, key: str, ids: tuple[str, ...], tmp_path: Path
) -> None:
    first = write(tmp_path / "1.csv", key, (ids[0], "cat", "change", "dog"), (ids[1], "cat", "drop", ""))
    second = write(tmp_path / "2.csv", key, (ids[1], "cat", "keep", "cat"), (ids[3], NAMES[2], "drop", ""))
    for file in (first, second):
        write_corrected(folder, read_choices(file, folder))
    found = {row[0]: row[2:] for row in corrected(folder)[1:]}
    assert found == {
        ids[0]: ["dog", "person"],
        ids[1]: ["cat", "person"],
        ids[2]: ["dog", "given"],
        ids[3]: ["", "person"],
    }


def test_a_choice_whose_line_is_removed_is_taken_back(
    folder: Path, key: str, ids: tuple[str, ...], tmp_path: Path
) -> None:
    """To keep a label is a choice like another; a label that was written into the file is one too."""
    choices = write(tmp_path / "1.csv", key, (ids[0], "cat", "keep", ""), (ids[1], "cat", "drop", ""))
    file = write_corrected(folder, read_choices(choices, folder))
    assert [row[3] for row in corrected(folder)[1:]].count("person") == 2
    rows = [row for row in corrected(folder) if row[0] != ids[0]]
    rows = [[*row[:2], "cat", "given"] if row[0] == ids[2] else row for row in rows]
    with open(file, "w", encoding="utf-8", newline="") as handle:
        csv.writer(handle).writerows(rows)
    write_corrected(folder, {})
    found = {row[0]: row[2:] for row in corrected(folder)[1:]}
    assert found == {
        ids[0]: ["cat", "given"],
        ids[1]: ["", "person"],
        ids[2]: ["cat", "person"],
        ids[3]: [NAMES[2], "given"],
    }


def test_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    probs = np.tile([0.6, 0.4], (12, 1))
    find_label_errors(np.zeros(12, int), probs, sharpening=1.0).to_csv(tmp_path / "label_errors.csv")
    write_corrected(tmp_path, {})
    assert [row[0] for row in corrected(tmp_path)[1:]] == [str(i) for i in range(12)]


def test_a_class_without_examples_can_be_chosen_where_it_is_named(
    folder: Path, key: str, ids: tuple[str, ...], tmp_path: Path
) -> None:
    file = write(tmp_path / "choices.csv", key, (ids[0], "cat", "change", "bird"))
    with pytest.raises(ValueError, match=r"line 2: unknown class 'bird': write a class of this audit"):
        read_choices(file, folder)
    read = read_choices(file, folder, class_names=(*NAMES, "bird"))
    assert read[ids[0]] == LabelChoice("cat", "bird")


def test_files_of_spreadsheets(folder: Path, key: str, ids: tuple[str, ...], tmp_path: Path) -> None:
    """With a byte order mark, other columns, empty lines, lines of commas, and the same line twice."""
    line = f'"{ids[2]}",dog,drop,,seen\r\n'
    text = f"\ufeff{key},given_label,decision,new_label,remark\r\n{line}\r\n{line},,,,\r\n"
    (tmp_path / "choices.csv").write_bytes(text.encode())
    assert read_choices(tmp_path / "choices.csv", folder) == {ids[2]: LabelChoice("dog", None)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("?", "cat", "keep", ""), r"line 3: this audit has no example '\?'.*downloaded from the page"),
        (("0", "dog", "keep", ""), r"line 3: the given label of .* is 'cat' in this audit, not 'dog'"),
        (
            ("0", "cat", "maybe", ""),
            r"line 3: unknown decision 'maybe': choose one of 'keep', 'change', 'drop'",
        ),
        (("0", "cat", "change", "dgo"), r"line 3: unknown class 'dgo': write a class .* such as dog"),
        (("0", "cat", "change", ""), r"line 3: new_label is empty: write the class"),
        (("0", "cat", "keep", "dog"), r"line 3: the decision is 'keep' but there is a new_label, 'dog'"),
        (("0", "cat", "drop", "cat"), r"line 3: the decision is 'drop' but there is a new_label"),
        (("1", "cat", "change", "dog"), r"line 3: .* was decided otherwise in line 2: remove one"),
    ],
)
def test_a_wrong_line_is_named(
    line: tuple[str, str, str, str],
    message: str,
    folder: Path,
    key: str,
    ids: tuple[str, ...],
    tmp_path: Path,
) -> None:
    example = ids[int(line[0])] if line[0].isdecimal() else line[0]
    file = write(tmp_path / "choices.csv", key, (ids[1], "cat", "drop", ""), (example, *line[1:]))
    with pytest.raises(ValueError, match=message):
        read_choices(file, folder)


def test_what_is_no_file_of_choices(folder: Path, key: str, tmp_path: Path) -> None:
    file = write(tmp_path / "choices.csv", key, heading="path;given_label;decision;new_label")
    with pytest.raises(ValueError, match=r"has no column .*separated by commas"):
        read_choices(file, folder)
    file.write_bytes(f"{key},given_label,decision,new_label\n1,cat\n".encode())
    with pytest.raises(ValueError, match="line 2: 2 values for 4 columns"):
        read_choices(file, folder)
    file.write_bytes(f"{key},given_label,decision,new_label\n1,\xe4,keep,\n".encode("latin-1"))
    with pytest.raises(ValueError, match="cannot be read as CSV in UTF-8"):
        read_choices(file, folder)
    file.write_bytes(f'{key},given_label,decision,new_label\n1,"cat,keep,\n'.encode())
    with pytest.raises(ValueError, match="cannot be read as CSV in UTF-8"):
        read_choices(file, folder)


def test_what_is_no_folder_of_an_audit(folder: Path, key: str, ids: tuple[str, ...], tmp_path: Path) -> None:
    for call in (lambda: read_choices("choices.csv", tmp_path), lambda: write_corrected(tmp_path, {})):
        with pytest.raises(FileNotFoundError, match="give the folder of an audit"):
            call()
    write_corrected(folder, {ids[0]: LabelChoice("cat", "dog")})
    text = (folder / "corrected_labels.csv").read_text()
    (folder / "corrected_labels.csv").write_text(text.replace("cat,dog,person", "dog,dog,person"))
    with pytest.raises(ValueError, match="is of another audit: move it away"):
        write_corrected(folder, {})
    lines = (folder / "label_errors.csv").read_text()
    (folder / "label_errors.csv").write_text(lines + lines.splitlines(True)[1])
    with pytest.raises(ValueError, match="is there twice: repeat the audit"):
        write_corrected(folder, {})
