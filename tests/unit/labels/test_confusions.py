"""Confusions of classes: counts by hand, the printed table, and a heat map that shows what it should."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.labels.made_noise import alike, noisy, pairs

from hetsngp.labels import ClassConfusions, class_confusions, find_label_errors


def confusions(k: int, n: int = 400, names: list[str] | None = None, rate: float = 0.3) -> ClassConfusions:
    data = noisy(0, n, 0.6 * pairs(k, rate) + 0.4 * alike(k, rate), spread=5.0)
    return class_confusions(find_label_errors(data.given, data.probs, sharpening=1.0), names)


def by_hand(counts: Any, names: tuple[str, ...] = ("a", "b", "c")) -> ClassConfusions:
    return ClassConfusions(np.array(counts, dtype=float), names)


def test_counts_are_sums_over_the_examples() -> None:
    data = noisy(0, 60, pairs(3, 0.3))
    errors = find_label_errors(data.given, data.probs)
    expected = np.zeros((3, 3))
    for given, clean in zip(data.given, errors.clean_probs, strict=True):
        for k in range(3):
            expected[k, given] += clean[k]
    found = class_confusions(errors)
    np.testing.assert_allclose(found.counts, expected, rtol=1e-6)
    assert found.class_names == ("0", "1", "2")
    assert found.counts.sum() == pytest.approx(60, rel=1e-5)
    wrong = found.counts.sum() - np.trace(found.counts)
    assert wrong == pytest.approx(errors.expected_wrong, rel=1e-4)


def test_labels_of_several_annotators_are_added() -> None:
    data = noisy(0, 50, pairs(3, 0.3))
    labels = np.stack([data.given, data.true, np.full(50, -1)], 1)
    labels[::4, 0] = -1
    errors = find_label_errors(labels, data.probs)
    expected = np.zeros((3, 3))
    for row, clean in zip(labels, errors.clean_probs, strict=True):
        for given in row[row >= 0]:
            expected[:, given] += clean
    np.testing.assert_allclose(class_confusions(errors).counts, expected, rtol=1e-6)


def test_examples_of_which_nothing_is_known_do_not_count() -> None:
    """Examples of weight zero have a label and NaN for its probability, as the estimator says them."""
    data = noisy(0, 80, pairs(3, 0.3))
    errors = find_label_errors(data.given, data.probs)
    wrong = errors.wrong_probability.copy()
    wrong[:50] = np.nan
    counts = class_confusions(replace(errors, wrong_probability=wrong)).counts
    assert counts.sum() == pytest.approx(30, rel=1e-5)


def test_confusions_are_of_label_errors() -> None:
    with pytest.raises(TypeError, match="find_label_errors"):
        class_confusions(np.zeros((4, 2)))  # type: ignore[arg-type]


def test_rates_and_pairs_of_a_table_by_hand() -> None:
    found = by_hand([[6, 3, 1], [0, 5, 0], [0, 0, 0]])
    np.testing.assert_allclose(found.rates, [[0.6, 0.3, 0.1], [0, 1, 0], [0, 0, 0]])
    assert found.pairs == [("a", "b", 3.0, 0.3), ("a", "c", 1.0, 0.1)]
    assert found.pairs[0].true == "a"
    assert found.pairs[0].given == "b"
    assert found.most_affected(2) == [0, 1]
    assert str(found).splitlines() == [
        "true  given  labels  share",
        "a     b         3.0  30.0%",
        "a     c         1.0  10.0%",
    ]


def test_the_printed_table_is_short_and_aligned() -> None:
    lines = str(confusions(12, names=[f"class {'x' * k}" for k in range(12)])).splitlines()
    assert len(lines) == 21
    assert len({len(line) for line in lines}) == 1


def test_labels_that_are_all_correct_print_no_pairs() -> None:
    found = by_hand([[6, 0.09, 0], [0, 5, 0], [0, 0, 2]])
    assert str(found) == "no class is mistaken for another"
    assert found.pairs == []
    assert len(by_hand([[6, 0.1, 0], [0, 5, 0], [0, 0, 2]]).pairs) == 1


def test_names_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 class_names for 3 classes"):
        confusions(3, names=["a", "b"])


# --- the heat map -------------------------------------------------------------------------------------------


class Drawn:
    """Texts and colours of a heat map, as matplotlib got them; and the file."""

    def __init__(self, found: ClassConfusions, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        figure = pytest.importorskip("matplotlib.figure").Figure
        kept: list[Any] = []
        save = figure.savefig

        def savefig(figure: Any, *args: Any, **options: Any) -> None:
            kept.append(figure)
            save(figure, *args, **options)

        monkeypatch.setattr(figure, "savefig", savefig)
        found.plot(path)
        figure = kept[0]
        figure.draw_without_rendering()  # positions in the points of this figure and not of the file
        self.axis = figure.axes[0]
        self.size = figure.bbox
        self.rows = [label.get_text() for label in self.axis.get_yticklabels()]
        self.columns = [label.get_text() for label in self.axis.get_xticklabels()]
        self.cells = {tuple(map(int, text.get_position()[::-1])): text.get_text() for text in self.axis.texts}
        self.scale = self.axis.images[0].get_clim()


@pytest.mark.parametrize("k", [2, 3, 10, 60])
def test_the_map_names_classes_and_shares(k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    names = [f"{'a class with a rather long name ' if i % 7 == 0 else ''}class {i}" for i in range(k)]
    found = confusions(k, 40 * k, names)
    path = tmp_path / "confusions.png"
    drawn = Drawn(found, path, monkeypatch)
    with image.open(path) as picture:
        assert picture.format == "PNG"
        assert 300 < picture.width < 3000
        assert 300 < picture.height < 3000
        assert len(picture.convert("RGB").getcolors(2**24)) > 5
    shown = found.most_affected()
    assert len(shown) == min(k, 40)
    assert len(drawn.rows) == len(shown)
    assert drawn.rows == drawn.columns
    assert all(
        len(label) <= 32 and names[i].startswith(label.rstrip("…"))
        for label, i in zip(drawn.rows, shown, strict=True)
    )
    for (row, column), text in drawn.cells.items():
        assert text == f"{found.rates[shown[row], shown[column]]:.0%}"
    assert {(i, i) for i in range(len(shown))} <= set(drawn.cells)
    title = drawn.axis.get_title()
    assert title == ("" if k <= 40 else "the 40 of 60 classes with the most wrong labels")
    # Nothing is cut off, and no name runs into the next one.
    for labels, side in ((drawn.axis.get_yticklabels(), "height"), (drawn.axis.get_xticklabels(), "width")):
        boxes = [label.get_window_extent() for label in labels]
        assert all(drawn.size.x0 <= box.x0 and box.x1 <= drawn.size.x1 for box in boxes)
        assert all(drawn.size.y0 <= box.y0 and box.y1 <= drawn.size.y1 for box in boxes)
        step = getattr(drawn.axis.get_window_extent(), side) / len(labels)
        assert all(getattr(box, side) < step for box in boxes)


def test_a_few_wrong_labels_do_not_look_like_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = by_hand([[99.9, 0.1, 0], [0, 100, 0], [0, 0, 100]])
    assert Drawn(clean, tmp_path / "clean.png", monkeypatch).scale == (0, 0.05)


def test_names_are_texts_and_not_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("cost in $", "two\nlines $", "$x")
    drawn = Drawn(by_hand(np.ones((3, 3)), names), tmp_path / "names.png", monkeypatch)
    assert drawn.rows == ["cost in $", "two lines $", "$x"]
    assert not any(label.get_parse_math() for label in drawn.axis.get_yticklabels())


def test_letters_that_a_font_lacks_are_one_warning(tmp_path: Path) -> None:
    counts = np.array([[5.0, 2.0], [1.0, 6.0]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ClassConfusions(counts, ("狗猫鱼", "鸟马")).plot(tmp_path / "map.png")
    [told] = [str(each.message) for each in caught]
    assert told.startswith(f"{tmp_path / 'map.png'} shows boxes in place of some letters of names")
    assert "matplotlib.rcParams['font.family']" in told
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_ticks_of_the_scale_are_where_they_say() -> None:
    """Without a file the figure is returned, for a notebook; steps of 2.5 % are not rounded."""
    figure = by_hand([[0.78, 0.22, 0], [0, 1, 0], [0, 0, 1]]).plot()
    figure.canvas.draw()
    _, scale = figure.axes
    for tick, label in zip(scale.get_yticks(), scale.get_yticklabels(), strict=True):
        assert float(label.get_text().rstrip("%")) == pytest.approx(100 * tick)
