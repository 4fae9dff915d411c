"""Open texts by name, or by the path of a file or a folder of files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetsngp.data.datasets.registry import DATASETS, find, open_data
from hetsngp.data.text.files import ENDINGS, is_text_file, read_texts
from hetsngp.data.text.texts import LabelledTexts, shorten
from hetsngp.validation import check_choice

SPLITS = ("train", "val", "test")
STEMS = {"train": ("train",), "val": ("val", "valid", "validation", "dev"), "test": ("test",)}
"""Names of the files of each split in a folder, without their endings."""


def open_texts(
    spec: str | Path,
    split: str = "train",
    *,
    text: str | None = None,
    label: str | None = None,
    labelled: bool = True,
    class_names: Sequence[str] | None = None,
    guess_missing: bool = False,
    root: str | Path | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> LabelledTexts:
    """Texts of ``spec``: a name such as ``clinc150``, a file (one set, for any split), or a folder of files.

    A folder has a file train.csv (or .tsv, .parquet, .jsonl, .json) and may have test and val (or valid,
    validation, dev); all have the classes of train, and its columns where they are there. ``text``,
    ``label``: columns, which are guessed where they are not given, and ``say`` is called with a sentence that
    names them. ``class_names``: the classes, None: those there are. Not ``labelled``: classes are not read.
    ``guess_missing``: whether to guess a column where there is none of the given name. ``root``: folder of
    data sets, and of relative paths.
    """
    check_choice("split", split, SPLITS)
    if is_name(spec):
        if find(str(spec))[0].gives != LabelledTexts.__name__:
            names = ", ".join(name for name, data in DATASETS.items() if data.gives == LabelledTexts.__name__)
            raise ValueError(
                f"{spec} is a set of images, and texts are expected: give {names}, or a file "
                f"({', '.join(ENDINGS)}) with a column of texts"
            )
        named: LabelledTexts = open_data(str(spec), split, root)
        return named
    path = _path(spec, root)
    file = _file_of(path, split) if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"there are no texts {str(spec)!r}: it is no data set (hetsngp data), and there is no file {file}"
        )
    if class_names is None and labelled and path.is_dir() and split != "train" and has_split(path, "train"):
        first, columns = read_texts(_file_of(path, "train"), text, label)
        class_names, guess_missing = first.class_names, guess_missing or (text is None and label is None)
        text, label = columns.text, columns.label
    how: dict[str, Any] = {"class_names": class_names, "labelled": labelled, "guess_missing": guess_missing}
    found, columns = read_texts(file, text, label, **how)
    if columns.guessed:
        say(f"{file.name}: {columns}")
    if labelled:
        _tell_contradictions(found, file, say)
    return found


def has_split(spec: str | Path, split: str, *, root: str | Path | None = None) -> bool:
    """Whether there is this split: of a file only "train"."""
    if is_name(spec):
        return split in find(str(spec))[0].splits
    path = _path(spec, root)
    if not path.is_dir():
        return split == "train"
    return bool(_files_of(path, split))


def is_name(spec: str | Path) -> bool:
    """Whether ``spec`` names a data set of the registry; a Path never does."""
    return isinstance(spec, str) and spec.partition(":")[0] in DATASETS


def is_text_source(spec: str | Path) -> bool:
    """Whether ``spec`` is a named set of texts, a file of texts, or a folder with one for training.

    >>> is_text_source("clinc150"), is_text_source("cifar10"), is_text_source("a.csv")
    (True, False, True)
    """
    if is_name(spec):
        return find(str(spec))[0].gives == LabelledTexts.__name__
    path = Path(spec).expanduser()
    return has_split(path, "train") if path.is_dir() else is_text_file(path)


def _path(spec: str | Path, root: str | Path | None) -> Path:
    path = Path(spec).expanduser()
    return path if root is None else Path(root).expanduser() / path


def _files_of(folder: Path, split: str) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.is_file() and is_text_file(file))
    return [file for file in files if file.name.partition(".")[0].lower() in STEMS[split]]


def _file_of(folder: Path, split: str) -> Path:
    files = _files_of(folder, split)
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{folder} has several files of the split {split}, {names}: leave one of them there")
    wanted = " or ".join(STEMS[split])
    raise FileNotFoundError(
        f"{folder} has no file {wanted} with one of the endings {', '.join(ENDINGS)}: add it, or give a file"
    )


def _tell_contradictions(data: LabelledTexts, file: Path, say: Callable[[str], None]) -> None:
    """Say how many texts are there several times with different classes."""
    found = data.contradictions()
    if found:
        rows = found[0]
        names = ", ".join(sorted({data.class_names[int(data.labels[row])] for row in rows}))
        say(
            f"{file.name}: {len(found)} different texts are there several times with "
            f"different classes, such as {shorten(data.texts[rows[0]])!r} ({names}); `hetsngp audit` "
            "finds wrong labels"
        )
