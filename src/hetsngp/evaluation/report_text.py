"""A report as text: a summary and tables, as Markdown or for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetsngp.evaluation.scores import COVERAGES, Corrupted, Means, Quality
from hetsngp.evaluation.set_predictions import SCORES
from hetsngp.serving.text_tables import markdown_table, plain_table

if TYPE_CHECKING:
    from hetsngp.evaluation.report import Report

WIDTH = 80
# Two standard errors: what differs by less may be chance.
CHANCE = 2.0
NOTES = (
    "↑ higher is better, ↓ lower. NLL in nats; Brier from 0 to 2; ± is one standard error, of accuracy by "
    "Wilson's interval. OOD is the positive class: AUROC is how often an OOD example has the higher score "
    "(0.5 is chance), FPR95 the share of in-distribution examples flagged when 95 % of the OOD examples are, "
    "AUPR average precision with OOD (out) or in-distribution (in) as positive, which depends on the number "
    "of each. AURC is the mean error over all shares of examples answered, most certain first; its excess is "
    "the difference to the best order; beside them is the accuracy on the most certain 80, 90 and 95 %. "
    "Uncertainties (unc.) are means, in nats."
)
AFTERWARDS = (
    "Bold: the best in its column, known only with the OOD examples at hand. ood_score is the score chosen "
    "before."
)
PROBS_ALONE = "Measured by probabilities alone, with the uncertainties that follow from them."
NO_SCORE = "Every uncertainty score is the same for all examples, so none detects these."


def summary(report: Report) -> list[str]:
    """Sentences on accuracy, calibration and OOD detection; on corruption, if measured."""
    lines = [_accuracy(report), _calibration(report), _ood_detection(report)]
    return lines if report.corrupted is None else [*lines, _under_corruption(report)]


def markdown(report: Report, pictures: Mapping[str, str]) -> str:
    """Markdown of a report; ``pictures``: name → file to link to."""
    lines = [f"# Evaluation: {report.title}", ""]
    lines += [f"- **{head}:** {rest}" for head, rest in (line.split(": ", 1) for line in report.summary())]
    blocks = ["\n".join(lines), _measured(report, "`"), _picture("overview", pictures)]
    kind = "multi-label" if report.multi_label else f"{report.num_classes} classes"
    blocks += [
        f"## In distribution\n\n{report.id.examples:,} examples, {kind}.",
        markdown_table(*_quality(report)),
    ]
    blocks.append(_picture("reliability", pictures))
    for name, ood_set in report.ood.items():
        found = markdown_table(*_ood(report, name)) if ood_set.scores else NO_SCORE
        blocks += [f"## Out of distribution: {name}\n\n{ood_set.examples:,} examples.", found]
    if report.ood and report.scores:
        blocks += [AFTERWARDS, _picture("roc", pictures), _picture("scores", pictures)]
    blocks += ["## Selective prediction", markdown_table(*_selection(report))]
    blocks.append(_picture("risk_coverage", pictures))
    if report.corrupted is not None:
        by = report.corrupted
        count = f"{by.mean.sets} set{'s' if by.mean.sets != 1 else ''}, each counted once."
        count += "" if _has_uncertainties(by) else f" {PROBS_ALONE}"
        blocks += [
            f"## Corrupted\n\n{count}",
            markdown_table(*_corrupted(report, by.by_severity, "severity")),
        ]
        blocks += [markdown_table(*_corrupted(report, by.by_corruption, "corruption"))]
        blocks.append(_picture("corrupted", pictures))
    return "\n\n".join(block for block in [*blocks, f"*{NOTES}*"] if block) + "\n"


def plain_text(report: Report) -> str:
    """Text of a report, at most 80 columns wide."""
    blocks = [report.title[:WIDTH], *([_wrapped(_measured(report))] if report.about else [])]
    blocks.append("\n".join(_wrapped(line) for line in report.summary()))
    blocks.append(plain_table(*_quality(report)))
    for name, ood_set in report.ood.items():
        found = plain_table(*_ood(report, name, bold=False)) if ood_set.scores else NO_SCORE
        blocks.append(f"{f'OOD {name}'[:WIDTH]}\n{found}")
    blocks.append(f"selective prediction\n{plain_table(*_selection(report))}")
    if report.corrupted is not None:
        found = plain_table(*_corrupted(report, report.corrupted.by_severity, "severity"))
        blocks.append(
            "\n".join(["corrupted", found, *([] if _has_uncertainties(report.corrupted) else [PROBS_ALONE])])
        )
    return "\n\n".join(blocks)


def _wrapped(line: str) -> str:
    """Wrap a line; a number stays with its sign, because textwrap does not break at a no-break space."""
    text = line.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")
    return textwrap.fill(text, WIDTH, subsequent_indent="  ").replace("\u00a0", " ")


def _measured(report: Report, quote: str = "") -> str:
    """Line on data, recipe and versions, where they are known."""
    said = (f"{name} {quote}{' '.join(value.split())}{quote}" for name, value in report.about.items())
    return f"Measured: {', '.join(said)}." if report.about else ""


# --- sentences ------------------------------------------------------------------------------------------


def _accuracy(report: Report) -> str:
    q = report.id
    share = f"{_percent(q.accuracy)} ± {100 * q.accuracy_standard_error:.1f}"
    if report.multi_label:
        return (
            f"Accuracy: the most probable class is among the labels in {share} of {q.examples:,} examples "
            f"(precision@1); NLL {q.nll:.3f} nats."
        )
    return (
        f"Accuracy: {share} of {q.examples:,} predictions are correct; NLL {q.nll:.3f} nats, Brier "
        f"{q.brier:.3f} of at most 2."
    )


def _calibration(report: Report) -> str:
    q = report.id
    means = f"mean confidence {_percent(q.confidence)}, accuracy {_percent(q.accuracy)}"
    return f"Calibration: {means}: {verdict(q)}; ECE {q.ece:.3f}."


def verdict(q: Quality) -> str:
    """Whether the model is over- or underconfident, and by how much, if by more than chance explains."""
    if abs(q.overconfidence) <= CHANCE * q.overconfidence_standard_error:
        return "neither over- nor underconfident beyond chance"
    side = "over" if q.overconfidence > 0 else "under"
    return f"{side}confident by {100 * abs(q.overconfidence):.1f} points"


def _ood_detection(report: Report) -> str:
    certain = report.selection["one_minus_confidence"].accuracy_at_coverage
    share = f"{COVERAGES[0]:.2f}"
    rest = (
        f"Of the most certain {100 * COVERAGES[0]:.0f} % of examples {_percent(certain[share])} are correct."
    )
    head = "OOD detection"
    if not report.ood:
        return f"{head}: no OOD data were given. {rest}"
    if "ood_score" not in report.scores:
        return f"{head}: its ood_score is the same for every example, so none is detected. {rest}"
    (name, first), *others = ((n, each.scores["ood_score"]) for n, each in report.ood.items())
    text = (
        f"{head}: {name} has an AUROC of {first.auroc:.3f} by ood_score (0.5 is chance), and with 95 % of it "
        f"{_percent(first.fpr95)} of the in-distribution examples are flagged (FPR95)"
    )
    text += "".join(f"; {n} {found.auroc:.3f} and {_percent(found.fpr95)}" for n, found in others)
    return f"{text}. {rest}"


def _under_corruption(report: Report) -> str:
    assert report.corrupted is not None
    mean, by = report.corrupted.mean, report.corrupted.by_severity
    text = (
        f"Corruption: {_percent(mean.accuracy)} correct, NLL {mean.nll:.3f}, ECE {mean.ece:.3f} on average "
    )
    text += f"over {mean.sets} corrupted set{'s' if mean.sets != 1 else ''}"
    if len(by) > 1:
        low, high = min(by), max(by)
        text += f"; {_percent(by[low].accuracy)} correct at severity {low}, "
        text += f"{_percent(by[high].accuracy)} at {high}"
    return text + "."


# --- tables ---------------------------------------------------------------------------------------------

TextTable = tuple[list[str], list[list[str]]]
"""Headings, and rows whose first cell is a name."""


def _quality(report: Report) -> TextTable:
    q = report.id
    name = "precision@1 ↑" if report.multi_label else "accuracy ↑"
    values = {
        name: f"{q.accuracy:.4f} ± {q.accuracy_standard_error:.4f}",
        "NLL ↓": f"{q.nll:.4f}",
        "ECE ↓": f"{q.ece:.4f}",
        "Brier ↓": _number(q.brier),
        "confidence": f"{q.confidence:.4f}",
    }
    return ["", *values], [["id", *values.values()]]


def _ood(report: Report, name: str, bold: bool = True) -> TextTable:
    scores = report.ood[name].scores
    kinds = {"auroc": "AUROC ↑", "fpr95": "FPR95 ↓", "aupr_out": "AUPR out ↑", "aupr_in": "AUPR in ↑"}
    best = {
        kind: (min if kind == "fpr95" else max)(getattr(d, kind) for d in scores.values()) for kind in kinds
    }
    rows = []
    for score, found in scores.items():
        cells = []
        for kind in kinds:
            value = getattr(found, kind)
            error = found.auroc_standard_error if kind == "auroc" else None
            text = f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
            cells.append(f"**{text}**" if bold and value == best[kind] else text)
        rows.append([label(score), *cells])
    return ["score", *kinds.values()], rows


def _selection(report: Report) -> TextTable:
    headings = ["score", "AURC ↓", "excess ↓", *(f"at {100 * c:.0f} % ↑" for c in COVERAGES)]
    rows = [
        [label(score), f"{s.aurc:.4f}", f"{s.excess_aurc:.4f}"]
        + [f"{s.accuracy_at_coverage[f'{c:.2f}']:.4f}" for c in COVERAGES]
        for score, s in report.selection.items()
    ]
    return headings, rows


def _corrupted(report: Report, groups: Mapping[str, Means] | Mapping[int, Means], name: str) -> TextTable:
    assert report.corrupted is not None
    known = report.corrupted.mean.scores
    both = ("total_uncertainty", "model_uncertainty")
    uncertainties = [score for score in both if score in report.scores and score in known]
    headings = [
        name,
        "accuracy ↑",
        "NLL ↓",
        "ECE ↓",
        "Brier ↓",
        *(f"{score.removesuffix('_uncertainty')} unc." for score in uncertainties),
    ]
    rows = []
    for group, mean in [*groups.items(), ("mean", report.corrupted.mean)]:
        cells = [f"{mean.accuracy:.4f}", f"{mean.nll:.4f}", f"{mean.ece:.4f}", _number(mean.brier)]
        rows.append([str(group), *cells, *(f"{mean.scores[score]:.4f}" for score in uncertainties)])
    return headings, rows


def _has_uncertainties(corrupted: Corrupted) -> bool:
    return len(corrupted.mean.scores) == len(SCORES)


def label(score: str) -> str:
    """Label of a score in tables and figures."""
    return {"ood_score": "ood_score", "one_minus_confidence": "1 − confidence"}.get(
        score, score.replace("_", " ")
    )


def _picture(name: str, pictures: Mapping[str, str]) -> str:
    return f"![{name.replace('_', ' ')}]({pictures[name]})" if name in pictures else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
