"""Files of an audit, written from corrected labels of any examples: images, texts, or rows of a table."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hetsngp.auditing.choices import LABEL_ERRORS
from hetsngp.auditing.examples import Examples, TextExamples
from hetsngp.auditing.page import check_paths, write_page
from hetsngp.auditing.sheet import draw_suspicious
from hetsngp.data.fingerprint import Fingerprint, compare_fingerprints
from hetsngp.data.label_files import CORRECTED, LABELS, LabelFile
from hetsngp.files import csv_text, has_checksum, sync_folder, with_checksum, write_json, write_text
from hetsngp.labels import ClassConfusions, Correction, LabelErrors, class_confusions
from hetsngp.labels.label_errors import HARDLY_LEARNED
from hetsngp.serving.text_tables import printable

AUDIT, PAGE, SHEET = "audit.json", "review.html", "suspicious.png"
CONFUSIONS, CONFUSION_MAP = "confusions.csv", "confusions.png"
FORMAT, VERSION = "hetsngp audit", 1
KEYS = {
    *(
        "expected_wrong",
        "expected_wrong_interval",
        "flagged",
        "disagreeing",
        "examples",
        "round",
        "losses",
        "nll",
        "entropy",
    ),
    *("classes", "fingerprint"),
}
"""Some keys of ``audit.json``, without which it cannot be read."""
MOST_LISTED = 5
"""Classes in the printed summary, and examples in a sentence."""
FEWEST_OF_CLASS = 10
"""Examples of a class, on average, below which the numbers of an audit mean little."""


@dataclass(frozen=True, eq=False)
class AuditedData:
    """N labelled examples, and what to call and how to show them."""

    name: str
    """What the data are called in headings."""
    given: Any
    """Given labels, (N,) class numbers."""
    class_names: tuple[str, ...]
    names: tuple[str, ...]
    """Name of each example: its path below the data folder, or its index."""
    key: Literal["path", "index"]
    """Column of the names in CSV files."""
    examples: Examples
    fingerprint: Fingerprint | None = None
    """By which the same data are recognised."""
    copies: Any = None
    """Number of the first example with the same content, for each: (N,). None: every example is another."""

    def __post_init__(self) -> None:
        for name in self.class_names:
            if not name or self.class_names.count(name) > 1:
                what = f"two classes are called {printable(name)}" if name else "a class has an empty name"
                raise ValueError(
                    f"{what} in {self.name}, and the files of an audit name labels: give each class a name "
                    "of its own"
                )
        sizes = np.bincount(self.given, minlength=len(self.class_names))
        if int((sizes > 0).sum()) < 2:
            raise ValueError(
                f"all examples of {self.name} have one class: an audit needs at least two, to say which of "
                "them a label should be; give a folder with one folder for each class"
            )
        if int(sizes.max()) < 2:
            raise ValueError(
                f"{self.name} has one example of each class: a label is compared with other examples of its "
                "class; add examples, at least some tens of each class"
            )
        if self.key == "path":
            check_paths(self.names)  # now, and not after the training


def write_audit(
    folder: Path,
    data: AuditedData,
    found: Correction,
    about: Mapping[str, Any],
    *,
    notes: Sequence[str] = (),
    most: int = 5000,
    page: bool = True,
) -> dict[str, Any]:
    """Write every file of an audit, each of them atomically, ``audit.json`` last; returns its content.

    ``about``: what to add to ``audit.json``, with the ``rounds`` of a :class:`RoundLog`. ``notes``:
    sentences for the page. ``most``: largest number of examples there; ``page``: whether to write one.
    """
    began, errors, names = time.perf_counter(), found.errors, data.class_names
    (folder / AUDIT).unlink(missing_ok=True)  # an older one describes other files
    if folder.is_dir():
        sync_folder(folder)
    targets = torch.from_numpy(np.ascontiguousarray(errors.clean_probs, dtype=np.float32))
    given = torch.as_tensor(np.asarray(data.given)).long()
    numbers = _numbers(data, found)
    LabelFile(data.names, names, given, targets, fingerprint=data.fingerprint).write(folder)
    contradicting = contradicting_copies(data)
    by_path = data.names if data.key == "path" else None
    texts = data.examples.texts if isinstance(data.examples, TextExamples) else None
    errors.to_csv(folder / LABEL_ERRORS, class_names=names, names=by_path, texts=texts)
    confusions = class_confusions(errors, names)
    write_text(folder / CONFUSIONS, _confusions_csv(confusions))
    confusions.plot(folder / CONFUSION_MAP)
    shown: dict[str, Any] = {"class_names": names, "names": data.names}
    if data.examples.kind == "image":
        draw_suspicious(folder / SHEET, errors, data.examples, **shown)
    if page:
        title = f"Labels of {data.name}"
        told = [_hardly_learned(numbers), _few(numbers), _contradiction(contradicting)]
        notes = [*filter(None, told), _hard_examples(numbers), *notes]
        write_page(
            folder / PAGE, errors, data.examples, key=data.key, title=title, notes=notes, most=most, **shown
        )
    else:
        (folder / PAGE).unlink(missing_ok=True)  # one of an earlier audit
    content = {
        "format": FORMAT,
        "version": VERSION,
        **about,
        **numbers,
        "copies_with_other_labels": contradicting,
        "fingerprint": data.fingerprint,
        "seconds": {
            **about.get("seconds", {}),
            "rounds": round(sum(each["seconds"] for each in about.get("rounds", ())), 1),
            "files": round(time.perf_counter() - began, 1),
        },
    }
    content = with_checksum(json.loads(json.dumps(content)))
    write_json(folder / AUDIT, content)
    return content


def contradicting_copies(data: AuditedData) -> list[list[str]]:
    """Names of examples with the same content and several labels, of which all but one must be wrong."""
    if data.copies is None:
        return []
    groups: dict[int, list[int]] = {}
    for row, first in enumerate(np.asarray(data.copies).tolist()):
        groups.setdefault(first, []).append(row)
    several = [rows for rows in groups.values() if len({int(data.given[row]) for row in rows}) > 1]
    return [[data.names[row] for row in rows] for rows in several]


def read_audit(folder: Path) -> dict[str, Any] | None:
    """Content of ``audit.json``; None where the audit is not finished. Raises where it is damaged."""
    file = folder / AUDIT
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON ({error}): remove it and repeat the audit") from error
    known = isinstance(content, dict) and (content.get("format"), content.get("version")) == (FORMAT, VERSION)
    if not known or not content.keys() >= KEYS or not has_checksum(content):
        raise ValueError(f"{file} is damaged, or of another version: remove it and repeat the audit")
    return dict(content)


def check_same_data(
    folder: Path, before: Mapping[str, Any], data: AuditedData, *, applying: bool = False
) -> None:
    """Raise unless the finished audit in ``folder`` was of these data, wherever they lay then.

    ``applying``: choices about the data of the audit, which are to be applied.
    """
    changes = _changed_names(folder, before, data)
    changes = changes or compare_fingerprints(before["fingerprint"] or {}, data.fingerprint or {})
    if changes:
        what_to_do = (
            "choices are applied to the data as they were then: give those, or audit the changed data into "
            "another folder, --out, and decide on its page"
            if applying
            else f"give another folder, --out; or, to audit the changed data there, remove {AUDIT}, and "
            f"{CORRECTED} if it is there"
        )
        raise ValueError(f"{folder} holds an audit of other data ({'; '.join(changes)}): {what_to_do}")


def check_choices(folder: Path, data: AuditedData) -> None:
    """Raise where ``folder`` has choices of a person about other data, and no finished audit."""
    if not (folder / CORRECTED).is_file():
        return
    try:
        before = LabelFile.read(folder).fingerprint
    except (OSError, ValueError):
        before = None
    changes = ["nothing there says of which"]
    if before is not None:
        changes = compare_fingerprints(before, data.fingerprint or {})
    if changes:
        raise ValueError(
            f"{folder / CORRECTED} has the choices of a person about other data ({'; '.join(changes)}), and "
            "a training would take them for certain: move it away, or give another folder, --out"
        )


def _changed_names(folder: Path, before: Mapping[str, Any], data: AuditedData) -> list[str]:
    """Files that are new, gone, or have another label since the audit, in words."""
    if (before.get("key"), data.key) != ("path", "path"):
        return []
    try:
        labels = LabelFile.read(folder)
    except (OSError, ValueError):  # the audit is not complete, and is repeated
        return []
    then = {name: labels.class_names[k] for name, k in zip(labels.names, labels.given.tolist(), strict=True)}
    now = {name: data.class_names[k] for name, k in zip(data.names, data.given, strict=True)}
    gone, new = sorted(then.keys() - now.keys()), sorted(now.keys() - then.keys())
    place = {_in_class(name): name for name in new}
    moved = {name: place.pop(_in_class(name)) for name in gone if _in_class(name) in place}
    found = {
        "with another label": [f"{name}, now {other}" for name, other in moved.items()]
        + [f"{name}, now {now[name]}" for name in sorted(then) if now.get(name, then[name]) != then[name]],
        "new": sorted(set(new) - set(moved.values())),
        "gone": [name for name in gone if name not in moved],
    }
    return [f"{len(names)} {what}, such as {printable(names[0])}" for what, names in found.items() if names]


def _in_class(name: str) -> str:
    """Path in the folder of the class."""
    return name.partition("/")[2] or name


def is_complete(folder: Path, before: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether the finished audit was made with the settings in ``about``, and its files are there."""
    settings = json.loads(json.dumps(about["settings"]))
    files = [LABELS, LABEL_ERRORS, CONFUSIONS, CONFUSION_MAP, *([PAGE] if settings["page"] else [])]
    files += [SHEET] if before.get("kind") == "image" else []
    return before.get("settings") == settings and all((folder / file).is_file() for file in files)


def check_packages(*, page: bool) -> None:
    """Raise an ImportError where a package that writes figures or the page is missing."""
    for package in ("matplotlib", *(["jinja2"] if page else [])):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"an audit needs {package}: pip install 'hetsngp[eval]'")


# --- numbers ----------------------------------------------------------------------------------------------


def _numbers(data: AuditedData, found: Correction) -> dict[str, Any]:
    """Numbers of the audit, as plain values."""
    errors, names = found.errors, data.class_names
    sizes = np.bincount(data.given, minlength=len(names))
    wrong = np.bincount(data.given, weights=errors.wrong_probability, minlength=len(names))
    flagged = np.bincount(data.given, weights=errors.is_wrong, minlength=len(names))
    shares = sizes[sizes > 0] / sizes.sum()
    numbers = zip(names, sizes.tolist(), wrong.tolist(), flagged.tolist(), strict=True)
    return {
        "examples": len(errors),
        "key": data.key,
        "kind": data.examples.kind,
        "expected_wrong": errors.expected_wrong,
        "expected_wrong_interval": list(errors.expected_wrong_interval),
        "flagged": int(errors.is_wrong.sum()),
        "disagreeing": errors.disagreeing,
        "sharpening": errors.sharpening,
        "round": found.round,
        "losses": list(found.losses),
        "nll": found.losses[found.round - 1] if found.losses else None,
        "entropy": float(-(shares * np.log(shares)).sum()),
        "classes": [
            {"name": name, "examples": size, "expected_wrong": wrong, "flagged": int(flagged)}
            for name, size, wrong, flagged in numbers
        ],
    }


def _hardly_learned(numbers: Mapping[str, Any]) -> str | None:
    """Sentence for models that predict labels hardly better than their frequencies do."""
    nll, entropy = numbers["nll"], numbers["entropy"]
    if nll is None or nll < HARDLY_LEARNED * entropy:
        return None
    return (
        f"The models hardly tell the classes apart: the NLL of the given labels is {nll:.2f}, and "
        f"{entropy:.2f} by the frequencies of the classes alone. Do not rely on these numbers: use another "
        "network, or a recipe with more epochs, unless most labels are random."
    )


def _hard_examples(numbers: Mapping[str, Any]) -> str:
    """Sentence about how far to trust the expected number."""
    most = numbers["disagreeing"]
    up_to = f": up to about {most}, for which the models predict another class than the given one"
    return (
        "People err more often on hard examples, and then more labels are wrong than this number says"
        f"{up_to if most > numbers['expected_wrong'] else ''}. The order of the examples is more reliable."
    )


def _few(numbers: Mapping[str, Any]) -> str | None:
    """Sentence for data that are too few to compare labels."""
    classes = sum(each["examples"] > 0 for each in numbers["classes"])
    if numbers["examples"] >= FEWEST_OF_CLASS * classes:
        return None
    return (
        f"There are {numbers['examples']} examples of {classes} classes: with fewer than some tens of each "
        "class these numbers mean little."
    )


def _contradiction(copies: Sequence[Sequence[str]]) -> str | None:
    """Sentence for copies of which at least one has a wrong label."""
    if not copies:
        return None
    shown = "; ".join(" and ".join(map(printable, names[:MOST_LISTED])) for names in copies[:MOST_LISTED])
    more = f"; {AUDIT} names all" if len(copies) > MOST_LISTED else ""
    examples = "example is there" if len(copies) == 1 else "examples are there"
    return (
        f"{len(copies)} {examples} more than once with different labels, at most one of them correct: "
        f"{shown}{more}."
    )


def _confusions_csv(confusions: ClassConfusions) -> str:
    pairs = [[p.true, p.given, f"{p.examples:.2f}", f"{p.share:.6f}"] for p in confusions.pairs]
    return csv_text([["true", "given", "labels", "share"], *pairs])


def summary(folder: Path, content: Mapping[str, Any]) -> str:
    """Result of a finished audit in a few lines."""
    count, (low, high) = content["examples"], content["expected_wrong_interval"]
    expected = content["expected_wrong"]
    lines = [
        f"about {expected:.0f} of {count} labels are wrong ({expected / count:.1%}, 95% interval "
        f"{low:.0f} to {high:.0f}); {content['flagged']} are flagged, more probably wrong than correct",
        _hard_examples(content),
    ]
    classes = sorted(content["classes"], key=lambda each: -each["expected_wrong"])[:MOST_LISTED]
    each = [
        f"{printable(c['name'])} {c['expected_wrong']:.0f} of {c['examples']}"
        for c in classes
        if c["expected_wrong"] >= 0.5
    ]
    if each:
        lines.append(f"most of them in: {', '.join(each)}")
    losses = ", ".join(f"{loss:.4f}" for loss in content["losses"])
    lines.append(f"round {content['round']} is used; NLL of given labels after each round: {losses}")
    copies = _contradiction(content.get("copies_with_other_labels", ()))
    lines += filter(None, (_hardly_learned(content), _few(content), copies))
    files = (PAGE, LABEL_ERRORS, SHEET, CONFUSIONS, CONFUSION_MAP, LABELS, CORRECTED, AUDIT)
    there = [name for name in files if (folder / name).is_file()]
    lines.append(f"in {folder}{os.sep}: {', '.join(there)}")
    return "\n".join(lines)


class RoundLog:
    """Numbers of the rounds of correction, of which each is said as a line; an ``on_round``."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.began = say, time.perf_counter()
        self.rounds: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Take the time of the first round from now on."""
        self.began = time.perf_counter()

    def __call__(self, number: int, errors: LabelErrors, loss: float) -> None:
        """Add a round."""
        self.rounds.append(
            {
                "round": number,
                "nll": loss,
                "expected_wrong": errors.expected_wrong,
                "flagged": int(errors.is_wrong.sum()),
                "sharpening": errors.sharpening,
                "seconds": round(time.perf_counter() - self.began, 1),
            }
        )
        self.began = time.perf_counter()
        self.say(f"round {number}: {errors}; NLL of given labels {loss:.4f}")
