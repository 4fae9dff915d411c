"""The page of an audit: one HTML file in which a person reviews labels that are probably wrong."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hetsngp.auditing.examples import Examples
from hetsngp.files import write_text
from hetsngp.labels import LabelErrors, class_confusions
from hetsngp.serving.text_tables import printable
from hetsngp.validation import check_choice

LEAST_WRONG, FEWEST = 0.01, 100
"""Examples below this probability of a wrong label are left out, beyond the first 100."""
THUMBNAIL, SMALL = 112, 64
"""Pixels of the longer side: of any picture, and of those that are shown enlarged and need more quality."""
QUALITY, SMALL_QUALITY = 80, 95
MOST_TOP = 3
"""Classes whose probability is shown for each example, each with a key."""
MOST_MAPPED, MOST_PAIRS, MOST_CLASSES = 30, 10, 30
"""Classes up to which the map of confusions is drawn; pairs and classes that are listed."""
MOST_LETTERS, MOST_COLUMNS = 2000, 40
"""Letters of a text, and columns of a row, that are shown."""
CELL, LETTER, LONGEST = 30, 6.4, 16
"""Map of confusions: side of a cell and width of a letter in its units, and letters of a name."""
FEW_MAPPED = 12
"""Classes up to which it is drawn larger, and beside the lists."""


def write_page(
    path: str | Path,
    errors: LabelErrors,
    examples: Examples,
    *,
    class_names: Sequence[str],
    names: Sequence[str],
    key: str,
    title: str,
    notes: Sequence[str] = (),
    most: int = 5000,
) -> None:
    """Write a page for the review of an audit, which needs a browser and nothing else: no server, no network.

    It has the number of wrong labels, classes and pairs of classes that are confused, and the ``most``
    suspicious examples with the decisions keep, change and drop, which the browser remembers and writes into
    ``choices.csv``, the file of :func:`~hetsngp.auditing.choices.read_choices`.

    Args:
        path: The HTML file.
        errors: Result of ``find_label_errors`` for one label of each example.
        examples: What is shown of the N examples, in the order of the labels.
        class_names: K names.
        names: N names of the examples, as they are shown.
        key: Column of ``choices.csv``: "path", which holds ``names``, or "index", their numbers.
        title: Heading.
        notes: Sentences below the numbers, such as how the audit was made.
        most: Largest number of examples on the page.
    """
    count, num_classes = errors.clean_probs.shape
    if np.ndim(errors.labels) != 1:
        raise ValueError("the page shows one label of each example: make an audit for each annotator")
    check_choice("key", key, ("path", "index"))
    for what, found, expected in (
        ("examples", len(examples), count),
        ("names", len(names), count),
        ("class_names", len(class_names), num_classes),
    ):
        if found != expected:
            raise ValueError(f"there are {found} {what} where {expected} were expected: one for each")
    if key == "path":
        check_paths(names)
    chosen = errors.order[:most]
    number = int((errors.wrong_probability[chosen] > LEAST_WRONG).sum())
    chosen = chosen[: max(number, FEWEST)]
    shown = [printable(str(name)) for name in class_names]
    data = _data(errors, chosen, names, key) | {
        "classes": shown,
        "labels": [str(name) for name in class_names],
    }
    # Choices belong to these data with these labels, however an audit of them was made.
    whole = [key, list(map(str, names)), data["labels"], errors.labels.tolist()]
    data["audit"] = hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]
    data |= {"kind": examples.kind, "contents": _contents(examples, chosen.tolist())}
    counts = class_confusions(errors).counts
    folder = Path(__file__).parent
    script, style = ((folder / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    text = _template(folder / "page.html.j2").render(
        title=printable(title),
        notes=[printable(note) for note in notes],
        kind=examples.kind,
        numbers=_numbers(errors),
        classes=_classes(errors, shown),
        pairs=_pairs(counts, shown),
        map=_map(counts, shown) if num_classes <= MOST_MAPPED else None,
        chosen=_count(len(chosen)),
        top=min(MOST_TOP, num_classes),
        data=_script_json(data),
        script=script,
        style=style,
        script_hash=_csp_hash(script),
        style_hash=_csp_hash(style),
    )
    write_text(Path(path), text)


# --- the data of the cards --------------------------------------------------------------------------------


def other_classes(errors: LabelErrors) -> Any:
    """Suggested class of each example; of a flagged label that is still the most probable class, the next."""
    found = errors.suggested.copy()
    rows = np.flatnonzero(errors.is_wrong & (found == errors.labels))
    probs = errors.clean_probs[rows]
    probs[np.arange(len(rows)), found[rows]] = -1
    found[rows] = probs.argmax(1)
    return found


def check_paths(names: Sequence[str]) -> None:
    """Raise unless the names tell the examples apart, and can be written into a file."""
    if len(set(names)) != len(names):
        raise ValueError(
            "names are not unique, so choices would not say which example they mean: use key='index'"
        )
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"the name {printable(name)} has letters that no text file can hold: rename the file"
            ) from None


def _data(errors: LabelErrors, chosen: Any, names: Sequence[str], key: str) -> dict[str, Any]:
    """Columns of the examples ``chosen``."""
    probs = errors.clean_probs[chosen]
    top = np.argsort(-probs, axis=1, kind="stable")[:, :MOST_TOP]
    return {
        "key": key,
        "ids": [names[i] if key == "path" else str(i) for i in chosen.tolist()],
        "names": [printable(str(names[i])) for i in chosen.tolist()],
        "given": errors.labels[chosen].tolist(),
        "suggested": other_classes(errors)[chosen].tolist(),
        "wrong": [round(p, 4) for p in errors.wrong_probability[chosen].tolist()],
        "flagged": errors.is_wrong[chosen].astype(int).tolist(),
        "top": top.tolist(),
        "probs": [[round(p, 4) for p in row] for row in np.take_along_axis(probs, top, 1).tolist()],
    }


def _contents(examples: Examples, chosen: list[int]) -> list[Any]:
    show: dict[str, Callable[[Any], Any]] = {"image": _picture, "text": _text, "table": _row}
    kind = show[examples.kind]

    def content(i: int) -> Any:
        try:
            return kind(examples.content(i))
        except (OSError, ValueError):  # a picture that was removed since: the card says so
            return None

    with ThreadPoolExecutor() as pool:  # Pillow decodes and encodes without Python's lock
        return list(pool.map(content, chosen))


def _picture(picture: Any) -> str:
    """WebP of a picture as base64."""
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    encoded = io.BytesIO()
    quality = SMALL_QUALITY if max(picture.size) <= SMALL else QUALITY
    picture.save(encoded, format="WEBP", quality=quality)
    return base64.b64encode(encoded.getvalue()).decode("ascii")


def _text(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"


def _row(row: dict[str, Any]) -> list[tuple[str, str]]:
    shown = [(name, _text(_value(value))) for name, value in list(row.items())[:MOST_COLUMNS]]
    return shown if len(row) <= MOST_COLUMNS else [*shown, ("…", f"{len(row) - MOST_COLUMNS} more columns")]


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | np.floating) else str(value)


def _script_json(data: dict[str, Any]) -> str:
    """JSON that ends no script element: without <, >, & and line separators, as ASCII."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _csp_hash(text: str) -> str:
    """Source of a Content-Security-Policy that allows this script or style and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- numbers and figures ----------------------------------------------------------------------------------


def _numbers(errors: LabelErrors) -> dict[str, str]:
    low, high = errors.expected_wrong_interval
    return {
        "expected": _count(errors.expected_wrong),
        "labels": _count(len(errors)),
        "share": _share(errors.expected_wrong / len(errors)),
        "low": _count(low),
        "high": _count(high),
        "flagged": _count(errors.is_wrong.sum()),
    }


def _count(number: float) -> str:
    """Whole number; below one, with a digit after the point.

    >>> _count(4020.4), _count(0.34), _count(0.02), _count(0)
    ('4,020', '0.3', '< 0.1', '0')
    """
    if 0 < number < 0.05:
        return "< 0.1"
    return f"{number:.1f}" if 0 < number < 0.95 else f"{number:,.0f}"


def _share(share: float) -> str:
    """Percentage.

    >>> _share(0.0804), _share(0.00002)
    ('8.0 %', '< 0.1 %')
    """
    return "< 0.1 %" if 0 < share < 0.0005 else f"{share:.1%}".replace("%", " %")


def _classes(errors: LabelErrors, shown: Sequence[str]) -> list[dict[str, Any]]:
    """Numbers of the classes with the most labels that are probably wrong."""
    sizes = np.bincount(errors.labels, minlength=len(shown))
    wrong = np.bincount(errors.labels, weights=errors.wrong_probability, minlength=len(shown))
    shares = wrong / np.maximum(sizes, 1)
    largest = shares.max() or 1.0
    return [
        {
            "number": k,
            "name": shown[k],
            "size": _count(sizes[k]),
            "wrong": _count(wrong[k]),
            "share": _share(shares[k]),
            "bar": round(100 * shares[k] / largest, 1),
        }
        for k in np.argsort(-wrong, kind="stable")[:MOST_CLASSES].tolist()
    ]


def _pairs(counts: Any, shown: Sequence[str]) -> list[dict[str, Any]]:
    """Most frequent confusions, of at least half an example; ``counts`` by true and given class."""
    wrong = counts * (1 - np.eye(len(counts)))
    largest = wrong.max() or 1.0
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]
    pairs = [divmod(flat, len(counts)) for flat in order.tolist()]
    return [
        {
            "given": given,
            "true": true,
            "names": (shown[given], shown[true]),
            "count": _count(wrong[true, given]),
            "bar": round(100 * wrong[true, given] / largest, 1),
        }
        for true, given in pairs
        if wrong[true, given] >= 0.5
    ]


def _map(counts: Any, shown: Sequence[str]) -> dict[str, Any]:
    """Positions, shades and texts of the map of confusions; the diagonal, correct labels, has no shade."""
    largest = (counts * (1 - np.eye(len(counts)))).max() or 1.0
    cells = [
        {
            "given": given,
            "true": true,
            "x": given * CELL,
            "y": true * CELL,
            # Areas look in proportion to their shade; the root makes small counts visible.
            "shade": 0.0 if given == true else round(math.sqrt(count / largest), 3),
            "text": _short(count) if count >= 0.5 else "",
            "title": f"true class {shown[true]}, given label {shown[given]}: {_count(count)}",
        }
        for (true, given), count in np.ndenumerate(counts)
    ]
    side = CELL * len(counts)
    left = round(14 + LETTER * min(LONGEST, max(map(len, shown))))
    top = right = round(0.75 * left)  # of names at an angle of 45°
    scale = 1.35 if len(counts) <= FEW_MAPPED else 1.0
    return {
        "cells": cells,
        "names": [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in shown],
        "cell": CELL,
        "beside": len(counts) <= FEW_MAPPED,
        **{"side": side, "left": left, "top": top, "right": right, "width": scale * (left + side + right)},
    }


def _short(count: float) -> str:
    """Count of at most four letters.

    >>> _short(987.3), _short(4870.0), _short(123456.0)
    ('987', '4.9k', '123k')
    """
    if count < 999.5:
        return f"{count:.0f}"
    return f"{count / 1000:.1f}k" if count < 9950 else f"{count / 1000:.0f}k"


def _template(file: Path) -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("the page of an audit needs jinja2: pip install 'hetsngp[eval]'") from error
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(file.read_text(encoding="utf-8"))
