"""class_confusions(): which classes are mistaken for each other, as numbers, a table and a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetsngp.files import write_figure
from hetsngp.labels.label_errors import LabelErrors, class_names_of

# Most classes that the heat map shows, those with the most wrong labels; its side in inches for each.
MAX_CLASSES, CELL = 40, 0.42
# Least end of the scale of colours: a few wrong labels do not look like many. Longest name of a class.
LEAST_SCALE, NAME_LENGTH = 0.05, 32
# Most pairs of the printed table; fewest labels of a pair that is listed.
PRINTED_PAIRS, FEWEST_LABELS = 20, 0.1


class ConfusedPair(NamedTuple):
    """Examples of one class that are labelled as another."""

    true: str
    given: str
    examples: float
    """Expected number of them."""
    share: float
    """Their share of all labels of the true class."""


@dataclass(frozen=True, eq=False)
class ClassConfusions:
    """Expected numbers of labels by true and given class; made by :func:`class_confusions`."""

    counts: Any
    """(K, K): labels of examples of the true class (row) that were given as the class of the column."""
    class_names: tuple[str, ...]

    @property
    def rates(self) -> Any:
        """P(given | true) among these examples: (K, K), rows of zeros for classes without any."""
        return self.counts / np.maximum(self.counts.sum(1, keepdims=True), 1e-12)

    @property
    def pairs(self) -> list[ConfusedPair]:
        """Pairs of different classes, by the expected number of wrong labels; of 0.1 labels or more."""
        rates, off = self.rates, self.counts * (1 - np.eye(len(self.counts)))
        true, given = np.nonzero(off >= FEWEST_LABELS)
        order = np.argsort(-off[true, given], kind="stable")
        return [
            ConfusedPair(self.class_names[k], self.class_names[j], float(off[k, j]), float(rates[k, j]))
            for k, j in zip(true[order].tolist(), given[order].tolist(), strict=True)
        ]

    def __str__(self) -> str:
        pairs = self.pairs[:PRINTED_PAIRS]
        if not pairs:
            return "no class is mistaken for another"
        wide = (
            max(4, *(len(pair.true) for pair in pairs)),
            max(5, *(len(pair.given) for pair in pairs)),
        )
        lines = [f"{'true':{wide[0]}}  {'given':{wide[1]}}  labels  share"]
        for pair in pairs:
            lines.append(
                f"{pair.true:{wide[0]}}  {pair.given:{wide[1]}}  {pair.examples:6.1f}  {pair.share:5.1%}"
            )
        return "\n".join(lines)

    def most_affected(self, most: int = MAX_CLASSES) -> list[int]:
        """Numbers of the classes with the most wrong labels, given or true, in their own order."""
        off = self.counts * (1 - np.eye(len(self.counts)))
        return sorted(np.argsort(-(off.sum(0) + off.sum(1)), kind="stable")[:most].tolist())

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw P(given | true) as a labelled heat map, without the colour of the diagonal.

        Returns the figure of matplotlib, which a notebook shows, and writes it as PNG into the file ``path``.
        Where there are more than 40 classes it shows those with the most wrong labels.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import PercentFormatter
        except ImportError as error:
            raise ImportError("heat maps need matplotlib: pip install 'hetsngp[eval]'") from error
        shown = self.most_affected()
        rates = self.rates[np.ix_(shown, shown)]
        names = [_short(self.class_names[k]) for k in shown]
        side = CELL * len(shown) + 2.4
        figure = Figure(figsize=(side + 0.6, side), layout="constrained")
        axis = figure.subplots()
        off = np.where(np.eye(len(shown), dtype=bool), np.nan, rates)
        largest = max(LEAST_SCALE, float(np.nanmax(off)))
        drawn = axis.imshow(off, cmap="cividis", vmin=0, vmax=largest)
        if len(shown) < len(self.class_names):
            axis.set_title(f"the {len(shown)} of {len(self.class_names)} classes with the most wrong labels")
        axis.set(xlabel="given label", ylabel="true class (estimated)")
        plain: Any = {"parse_math": False}
        axis.set_xticks(range(len(shown)), names, rotation=90, **plain)
        axis.set_yticks(range(len(shown)), names, **plain)
        for k, row in enumerate(rates):
            for j, rate in enumerate(row):
                if k == j:
                    axis.text(j, k, f"{rate:.0%}", ha="center", va="center", fontsize=7, color="0.45")
                elif rate >= 0.005:
                    colour = "black" if rate > 0.6 * largest else "white"
                    axis.text(j, k, f"{rate:.0%}", ha="center", va="center", fontsize=7, color=colour)
        scale: Any = PercentFormatter(1.0)
        figure.colorbar(drawn, ax=axis, shrink=0.6, label="share of the true class", format=scale)
        if path is not None:
            write_figure(figure, Path(path), dpi=130)
        return figure


def _short(name: str) -> str:
    """One line of a limited length."""
    line = " ".join(name.split())
    return line if len(line) <= NAME_LENGTH else f"{line[: NAME_LENGTH - 1]}…"


def class_confusions(errors: LabelErrors, class_names: Sequence[str] | None = None) -> ClassConfusions:
    """Expected numbers of labels by true and given class: Σ_i P(true = k | x_i, given) over labels j.

    >>> import numpy as np
    >>> from hetsngp.labels import find_label_errors
    >>> rng = np.random.default_rng(0)
    >>> true = rng.integers(3, size=900)
    >>> given = np.where((true == 0) & (rng.random(900) < 0.3), 2, true)
    >>> errors = find_label_errors(given, np.full((900, 3), 0.1) + 0.7 * np.eye(3)[true])
    >>> pair = class_confusions(errors, ["cat", "dog", "lynx"]).pairs[0]
    >>> pair.true, pair.given, round(pair.share, 1)
    ('cat', 'lynx', 0.3)
    """
    if not isinstance(errors, LabelErrors):
        raise TypeError(
            f"class_confusions takes label errors, got {type(errors).__name__}: "
            "class_confusions(hetsngp.find_label_errors(labels, probs))"
        )
    num_classes = errors.clean_probs.shape[1]
    names = class_names_of(class_names, errors)
    labels, wrong = (each.reshape(len(errors), -1) for each in (errors.labels, errors.wrong_probability))
    counts = np.zeros((num_classes, num_classes))
    for given, known in zip(labels.T, ~np.isnan(wrong.T), strict=True):  # NaN: none given, or of weight zero
        np.add.at(counts.T, given[known], errors.clean_probs[known].astype(np.float64))
    return ClassConfusions(counts, names)
