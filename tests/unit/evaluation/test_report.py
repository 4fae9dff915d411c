"""The report: strict JSON, sentences that say what the numbers say, tables, and pictures of the data."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import image

from hetsngp import metrics
from hetsngp.evaluation import evaluate, panels, report_plots
from hetsngp.evaluation.report_plots import draw_corrupted, severity_panel
from hetsngp.evaluation.report_text import verdict
from hetsngp.paper.synthetic import plots
from hetsngp.types import Prediction

N, CLASSES = 80, 3


class Told:
    """x (B, 1) holds the numbers of rows of a prediction that is known."""

    def __init__(self, probs: torch.Tensor, scores: torch.Tensor) -> None:
        values = {f.name: scores * (1 + i) for i, f in enumerate(fields(Prediction))}
        values |= {"probs": probs, "clean_probs": probs, "member_uncertainty": torch.zeros(len(probs))}
        self.prediction = Prediction(**values)

    def predict(self, x: torch.Tensor) -> Prediction:
        return self.prediction[x[:, 0].long()]


ROWS = torch.arange(float(N))[:, None]


def sure(confidence: float, share: float, **more: Any) -> Any:
    """The report of a model with one confidence that is correct in a share of the examples."""
    rest = (1 - confidence) / (CLASSES - 1)
    probs = torch.full((2 * N, CLASSES), rest)
    probs[:, 0] = confidence
    labels = (torch.arange(N) >= round(share * N)).long()
    scores = torch.cat([torch.linspace(0.1, 1, N), torch.linspace(0.55, 2, N)])
    return evaluate(Told(probs, scores), [(ROWS, labels)], **more)


@pytest.fixture(scope="module")
def report() -> Any:
    g = torch.Generator().manual_seed(0)
    probs = torch.softmax(2 * torch.randn(3 * N, CLASSES, generator=g), -1)
    scores = torch.cat(
        [torch.rand(N, generator=g), torch.rand(N, generator=g) + 0.5, torch.rand(N, generator=g)]
    )
    y = torch.arange(N) % CLASSES
    ood = {"svhn": [ROWS + N], "a set | with a rather long name that no table has room for": [ROWS + 2 * N]}
    corrupted = {("fog", s): [(ROWS + s, y)] for s in (1, 2)} | {("motion_blur", 2): [(ROWS + 9, y)]}
    corrupted[("dust|dirt", 1)] = [(ROWS + 11, y)]
    return evaluate(Told(probs, scores), [(ROWS, y)], ood, corrupted, title="A model")


class Alone(Told):
    """The model of a report, which can leave uncertainties out."""

    def __init__(self, report: Any) -> None:
        found = report.predictions["id"]
        confidence, uncertainty = found.confidence, found.scores["ood_score"]
        probs = torch.stack([confidence, 0.7 * (1 - confidence), 0.3 * (1 - confidence)], 1)
        super().__init__(probs, uncertainty)

    def predict_probs(self, x: torch.Tensor) -> torch.Tensor:
        return self.predict(x).probs


CORRUPTED = {"corrupted": {("fog", s): [(ROWS, torch.arange(N) % CLASSES)] for s in (1, 4)}}


# --- JSON -----------------------------------------------------------------------------------------------


def test_the_json_is_strict_and_whole(report: Any) -> None:
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["id"]["accuracy"] == report.id.accuracy
    assert (
        found["ood"]["svhn"]["scores"]["ood_score"]["fpr95"] == report.ood["svhn"].scores["ood_score"].fpr95
    )
    assert found["corrupted"]["by_severity"]["2"]["nll"] == report.corrupted.by_severity[2].nll
    assert found["corrupted"]["sets"][2]["corruption"] == "motion_blur"
    assert found["selection"]["ood_score"]["accuracy_at_coverage"].keys() == {"0.80", "0.90", "0.95"}
    assert found["summary"] == report.summary()
    assert sum(each["count"] for each in found["reliability"]) == N
    assert [each["from"] for each in found["reliability"]] == pytest.approx([i / 15 for i in range(15)])


def test_what_is_undefined_is_null() -> None:
    found = sure(0.9, 0.9, ood={"one": [ROWS[:1] + N]}).to_dict()
    empty = [each for each in found["reliability"] if each["count"] == 0]
    assert len(empty) == 14
    assert all(each["accuracy"] is None and each["confidence"] is None for each in empty)
    assert found["ood"]["one"]["scores"]["ood_score"]["auroc_standard_error"] is None


# --- words ----------------------------------------------------------------------------------------------


def test_the_summary_says_how_accurate_and_on_how_many(report: Any) -> None:
    first = report.summary()[0]
    assert f"{100 * report.id.accuracy:.1f} % ± {100 * report.id.accuracy_standard_error:.1f}" in first
    assert f"of {N} predictions" in first


@pytest.mark.parametrize(
    ("confidence", "share", "words"),
    [
        (0.95, 0.7, "overconfident by 25.0 points"),
        (0.5, 0.8, "underconfident by 30.0 points"),
        (0.82, 0.8, "neither over- nor underconfident beyond chance"),
    ],
)
def test_the_summary_says_which_way_it_errs(confidence: float, share: float, words: str) -> None:
    line = sure(confidence, share).summary()[1]
    assert line.startswith("Calibration: ")
    assert words in line


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_right_or_all_wrong_may_be_chance(share: float) -> None:
    """20 examples, all correct at a confidence of 0.95, happen in a third of all cases."""
    q = sure(0.95, share).id
    assert q.accuracy_standard_error > 0
    few = replace(q, examples=20, overconfidence_standard_error=(0.95 * 0.05 / 20) ** 0.5)
    chance = "neither over- nor underconfident beyond chance"
    assert (verdict(few) == chance) == (share == 1.0)


def test_chance_is_two_standard_errors() -> None:
    """Of the calibrated model: √(Σ c(1−c))/n, not of the accuracy."""
    q = sure(0.9, 0.9).id
    error = q.overconfidence_standard_error
    assert error == pytest.approx((0.9 * 0.1 / N) ** 0.5, rel=1e-6)
    for many, beyond in ((1.1, False), (-1.9, False), (2.1, True), (-2.1, True)):
        assert ("beyond chance" not in verdict(replace(q, overconfidence=many * error))) == beyond


def test_the_summary_names_every_ood_set(report: Any) -> None:
    line = report.summary()[2]
    (name, first), (other, second) = ((n, each.scores["ood_score"]) for n, each in report.ood.items())
    assert f"{name} has an AUROC of {first.auroc:.3f} by ood_score" in line
    assert f"95 % of it {100 * first.fpr95:.1f} % of the in-distribution examples" in line
    assert f"; {other} {second.auroc:.3f} and {100 * second.fpr95:.1f} %" in line


def test_without_ood_data_it_says_so() -> None:
    line = sure(0.9, 0.9).summary()[2]
    assert "no OOD data were given" in line
    assert "most certain 80 % of examples" in line


def test_a_model_without_any_uncertainty_says_so() -> None:
    probs = torch.full((2 * N, CLASSES), 1 / CLASSES)
    report = evaluate(Told(probs, torch.zeros(2 * N)), [(ROWS, torch.zeros(N).long())], {"far": [ROWS + N]})
    assert report.scores == ()
    assert "same for every example" in report.summary()[2]
    assert report.selection.keys() == {"one_minus_confidence"}
    json.dumps(report.to_dict(), allow_nan=False)
    for text in (report.markdown(), str(report)):
        assert "AUROC ↑" not in text  # no headings without rows
        assert "score is the same for all examples" in text


def test_corruption_is_told_from_least_to_most(report: Any) -> None:
    line = report.summary()[3]
    by = report.corrupted.by_severity
    assert f"{100 * by[1].accuracy:.1f} % correct at severity 1, {100 * by[2].accuracy:.1f} % at 2" in line
    assert "over 4 corrupted sets" in line


def test_names_of_0_1_still_work(report: Any) -> None:
    for old, new, found, expected in (
        ("rows", "predictions", lambda: report.rows, report.predictions),
        ("several_labels", "multi_label", lambda: report.several_labels, False),
        ("rows", "examples", lambda: report.id.rows, N),
        ("rows", "examples", lambda: report.ood["svhn"].rows, N),
    ):
        with pytest.warns(DeprecationWarning, match=rf"\.{old} is now called {new}"):
            assert found() == expected
    model, data = Alone(report), [(ROWS, torch.arange(N) % CLASSES)]
    with pytest.warns(DeprecationWarning, match="corrupted_doubt is now called corrupted_uncertainty"):
        less = evaluate(model, data, **CORRUPTED, corrupted_doubt=False)
    assert "model_uncertainty" not in less.corrupted.mean.scores
    with pytest.warns(DeprecationWarning, match="outside is now called ood_scores"):
        assert metrics.auroc(torch.zeros(3), outside=torch.ones(3)) == 1.0
    with pytest.warns(DeprecationWarning, match="doubt is now called uncertainty"):
        assert metrics.aurc(doubt=torch.rand(3), correct=torch.ones(3).bool()) == 0.0


# --- tables ---------------------------------------------------------------------------------------------


def cells(text: str, first: str) -> list[str]:
    """The row of a Markdown table that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_tables_hold_the_numbers(report: Any) -> None:
    text = report.markdown()
    assert text.startswith("# Evaluation: A model\n\n- **Accuracy:** ")
    assert cells(text, "id")[2:5] == [f"{v:.4f}" for v in (report.id.nll, report.id.ece, report.id.brier)]
    section = text.split("## Out of distribution: svhn")[1].split("## ")[0]
    found = report.ood["svhn"].scores["ood_score"]
    auroc, fpr95 = cells(section, "ood_score")[1:3]
    assert auroc.strip("*") == f"{found.auroc:.4f} ± {found.auroc_standard_error:.4f}"
    assert fpr95.strip("*") == f"{found.fpr95:.4f}"
    by = report.corrupted
    assert cells(text, "motion_blur")[1] == f"{by.by_corruption['motion_blur'].accuracy:.4f}"
    assert f"| mean | {by.mean.accuracy:.4f} |" in text


def test_probabilities_alone_are_said(report: Any) -> None:
    """And what is not known has neither a column nor a line in a picture."""
    means = report.corrupted.mean, *report.corrupted.by_severity.values()
    assert all("model_uncertainty" in each.scores for each in means)
    assert "model unc." in report.markdown()
    less = evaluate(
        Alone(report), [(ROWS, torch.arange(N) % CLASSES)], **CORRUPTED, corrupted_uncertainty=False
    )
    for text in (less.markdown(), str(less)):
        assert text.count("by probabilities alone") == 1
        assert "total unc." in text
        assert "model unc." not in text
    for text in (report.markdown(), str(report)):
        assert "by probabilities alone" not in text
    assert max(len(line) for line in str(less).splitlines()) <= 80
    lines = [len(ax.lines) for ax in draw_corrupted(less).axes if "uncertainty" in ax.get_title()]
    assert lines == [1]
    assert [len(ax.lines) for ax in draw_corrupted(report).axes if "uncertainty" in ax.get_title()] == [3]


def test_the_best_score_is_bold(report: Any) -> None:
    section = report.markdown().split("## Out of distribution: svhn")[1].split("## ")[0]
    scores = report.ood["svhn"].scores
    names = {name: "1 − confidence" if "confidence" in name else name.replace("_", " ") for name in scores}
    names["ood_score"] = "ood_score"
    for column, (kind, best) in enumerate((("auroc", max), ("fpr95", min)), start=1):
        values = {name: getattr(each, kind) for name, each in scores.items()}
        bold = {name for name in scores if cells(section, names[name])[column].startswith("**")}
        assert bold == {name for name, value in values.items() if value == best(values.values())}


def test_every_row_of_a_table_has_its_cells(report: Any) -> None:
    block: list[str] = []
    for line in [*report.markdown().splitlines(), ""]:
        if line.startswith("|"):
            block.append(line)
        elif block:
            assert len({len(re.split(r"(?<!\\)\|", row)) for row in block}) == 1
            block = []


def test_the_text_fits_a_terminal(report: Any) -> None:
    lines = str(report).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert f"{report.ood['svhn'].scores['ood_score'].auroc:.4f}" in str(report)
    assert not any(line.lstrip().startswith(("%", "±")) for line in lines)


# --- files ----------------------------------------------------------------------------------------------


def test_save_writes_what_the_markdown_links_to(report: Any, tmp_path: Path) -> None:
    path = report.save(tmp_path / "new" / "folder")
    folder = path.parent
    assert path == folder / "report.md"
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert sorted(links) == sorted(file.name for file in folder.glob("*.png"))
    assert {
        "report.png",
        "reliability.png",
        "roc.png",
        "scores.png",
        "risk_coverage.png",
        "corrupted.png",
    } == {*links}
    for name in links:
        assert image.imread(folder / name).std() > 0.05
    assert json.loads((folder / "report.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(report.to_dict())
    )
    assert not list(folder.glob(".*"))


def test_save_draws_only_what_there_is(tmp_path: Path) -> None:
    sure(0.9, 0.8).save(tmp_path)
    assert {file.name for file in tmp_path.glob("*.png")} == {
        "report.png",
        "reliability.png",
        "risk_coverage.png",
    }
    assert "roc.png" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_pictures_of_an_earlier_report_do_not_stay(report: Any, tmp_path: Path) -> None:
    for name in ("roc.png", "scores.png", "corrupted.png", "mine.png"):
        (tmp_path / name).write_bytes(b"old")
    text = sure(0.9, 0.8).save(tmp_path).read_text(encoding="utf-8")
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert {file.name for file in tmp_path.glob("*.png")} == {*links, "mine.png"}


# --- pictures -------------------------------------------------------------------------------------------


def test_the_reliability_diagram_shows_the_bins(report: Any) -> None:
    figure = report_plots.draw_reliability(report)
    upper, lower = figure.axes
    bins = report.reliability
    full = bins.count > 0
    assert 0 < int(full.sum()) < 15
    heights = [patch.get_height() for patch in upper.containers[0]]
    assert heights == pytest.approx(bins.accuracy[full].tolist())
    dots = upper.containers[1].lines[0].get_xydata()
    assert dots == pytest.approx(np.stack([bins.confidence[full], bins.accuracy[full]], 1))
    assert [patch.get_height() for patch in lower.patches] == bins.count.tolist()
    grey = [patch for patch in upper.patches if patch not in list(upper.containers[0])]
    assert sorted(round(15 * patch.get_x()) for patch in grey) == (~full).nonzero().flatten().tolist()


def test_error_bars_are_wilsons() -> None:
    """Against the interval of SciPy at one standard deviation."""
    from scipy.stats import binomtest, norm

    level = float(norm.cdf(1) - norm.cdf(-1))
    right, count = np.array([0, 3, 7, 1]), np.array([4, 9, 7, 1])
    below, above = panels._wilson(right / count, count)
    for k, n, low, high in zip(right, count, below, above, strict=True):
        expected = binomtest(int(k), int(n)).proportion_ci(level, method="wilson")
        assert k / n - low == pytest.approx(expected.low, abs=1e-9)
        assert k / n + high == pytest.approx(expected.high, abs=1e-9)


def test_histograms_hold_every_row(report: Any) -> None:
    figure = report_plots.draw_scores(report)
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert len(shown) == len(report.scores)
    for ax in shown:
        assert len(ax.patches) == 1 + len(report.ood)
        for patch in ax.patches:
            assert float(np.sum(patch.get_data().values)) == pytest.approx(100)


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [
        (np.geomspace(1e-8, 1, 500), True),
        (np.linspace(1, 2, 500), False),
        (np.linspace(-1, 2, 500), False),
        (np.concatenate([np.zeros(500), np.geomspace(1e-8, 1, 500)]), False),
        (np.array([0.0, 0.0, 1.0]), False),
        (np.array([5.0]), False),
    ],
)
def test_bins_are_increasing_and_by_decades_where_values_are(values: np.ndarray, logarithmic: bool) -> None:
    edges, by_decades = panels._edges(values, 30)
    assert len(edges) == 31
    assert bool((np.diff(edges) > 0).all())
    assert by_decades == logarithmic
    assert edges[0] <= np.quantile(values, 0.01)
    assert edges[-1] >= np.quantile(values, 0.99)


def test_roc_curves_go_from_corner_to_corner_with_the_right_area(report: Any) -> None:
    figure = report_plots.draw_roc(report)
    for ax, name in zip(figure.axes, report.ood, strict=True):
        assert ax.get_title() == name
        for line, score in zip(ax.lines, report.scores, strict=False):
            x, y = line.get_data()
            assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 100, 100)
            area = np.trapezoid(y, x) / 1e4
            assert area == pytest.approx(report.ood[name].scores[score].auroc, abs=1e-6)


def test_many_points_are_thinned_and_keep_their_ends() -> None:
    values = torch.linspace(0, 1, 100_000).double()
    thin = panels._thinned(values)
    assert len(thin) <= 2 * panels.POINTS
    assert (thin[0], thin[-1]) == (0, 1)


def test_risk_curves_end_at_the_error_of_all(report: Any) -> None:
    figure = report_plots.draw_risk_coverage(report)
    (ax,) = figure.axes
    for line in ax.lines[: len(report.selection)]:
        x, y = line.get_data()
        assert x[-1] == 100
        assert y[-1] == pytest.approx(100 * (1 - report.id.accuracy))


def test_severities_begin_with_the_clean_set(report: Any) -> None:
    ax = plots.new_figure(4, 4).subplots()
    severity_panel(ax, report, "accuracy")
    x, y = ax.lines[-1].get_data()
    by = report.corrupted.by_severity
    assert list(x) == [0, 1, 2]
    assert list(y) == pytest.approx([100 * report.id.accuracy, 100 * by[1].accuracy, 100 * by[2].accuracy])


def test_per_cents_end_at_a_hundred() -> None:
    """And a model without uncertainty has no panel of it, which would be empty."""
    probs = torch.full((2 * N, CLASSES), 0.0)
    probs[:, 0] = 1.0
    for label in (0, 1):  # all right, all wrong
        y = torch.full((N,), label)
        found = evaluate(Told(probs, torch.zeros(2 * N)), [(ROWS, y)], corrupted={("fog", 1): [(ROWS, y)]})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figures = [draw_corrupted(found), report_plots.draw_overview(found)]
            for figure in figures:
                figure.draw_without_rendering()
        assert "Mean uncertainty under corruption" not in [ax.get_title() for ax in figures[0].axes]
        shown = [ax for figure in figures for ax in figure.axes if ax.get_ylabel().startswith("% ")]
        assert len(shown) == 3
        for ax in shown:
            low, high = ax.get_ylim()
            ticks = [tick for tick in ax.get_yticks() if low <= tick <= high]
            assert ticks
            assert 0 <= min(ticks) < max(ticks) <= 100


def test_a_narrow_overview_has_the_whole_verdict() -> None:
    figure = report_plots.draw_overview(sure(0.82, 0.8))
    assert len(figure.axes) == 3
    title = figure._suptitle
    assert "neither over- nor underconfident beyond chance" in title.get_text().replace("\n", " ")
    figure.draw_without_rendering()
    whole, extent = figure.get_window_extent(), title.get_window_extent()
    assert whole.x0 <= extent.x0 < extent.x1 <= whole.x1


def test_no_legend_covers_data(report: Any) -> None:
    """Every legend of the overview lies outside its axes."""
    figure = report_plots.draw_overview(report)
    figure.draw_without_rendering()
    (below,) = figure.legends
    assert len(below.get_texts()) == 1 + len(report.ood)
    legends = [below, *(ax.get_legend() for ax in figure.axes if ax.get_legend() is not None)]
    assert len(legends) >= 3
    whole = figure.get_window_extent()
    for legend in legends:
        extent = legend.get_window_extent()
        assert not any(ax.get_window_extent().overlaps(extent) for ax in figure.axes)
        assert whole.x0 <= extent.x0 < extent.x1 <= whole.x1
        assert whole.y0 <= extent.y0 < extent.y1 <= whole.y1


def test_many_sets_with_long_names_stay_within_the_picture(report: Any) -> None:
    """And leave the panels room."""
    name, outside = next(iter(report.ood.items()))
    names = [f"{i} is a set whose name is far too long to stand beside six others" for i in range(7)]
    rows = {f"ood {each}": report.predictions[f"ood {name}"] for each in names}
    many = replace(
        report, ood=dict.fromkeys(names, outside), predictions={"id": report.predictions["id"], **rows}
    )
    for draw in (report_plots.draw_overview, report_plots.draw_roc, report_plots.draw_scores):
        figure = draw(many)
        figure.draw_without_rendering()
        whole = figure.get_window_extent()
        texts = [figure.legends[0], *([figure._suptitle] if figure._suptitle else [])]
        for part in texts:
            assert whole.x0 <= part.get_window_extent().x0 < part.get_window_extent().x1 <= whole.x1
        for ax in figure.axes:
            if ax.get_visible():
                assert ax.get_window_extent().width > 0.17 * whole.width


def test_a_report_of_three_sets_has_a_colour_and_dashes_for_each() -> None:
    looks = [panels.style(index) for index in range(len(panels.PALETTE))]
    assert len({look["color"] for look in looks}) == len({str(look["linestyle"]) for look in looks}) == 8
