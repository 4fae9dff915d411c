"""A report in words: three sentences first, then tables, as Markdown or for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hetsngp.evaluation.predictions import SCORES
from hetsngp.evaluation.scores import COVERAGES, Corrupted, Means, Quality

if TYPE_CHECKING:
    from hetsngp.evaluation.report import Report

WIDTH = 80
# Two standard errors: what differs by less may be chance.
CHANCE = 2.0
NOTES = (
    "↑ higher is better, ↓ lower. NLL in nats; Brier from 0 to 2; ± is one standard error, of accuracy by "
    "Wilson's interval. OOD is the positive class: AUROC is how often an OOD row has the higher score (0.5 "
    "is chance), FPR95 the share of familiar rows flagged when 95 % of the OOD rows are, AUPR average "
    "precision with OOD (out) or the familiar rows (in) as positive, which depends on how many there are of"
    " each. AURC is the mean error over all shares of rows answered, surest first; its excess is what the "
    "best order would not have; beside them is the accuracy on the surest 80, 90 and 95 %. Doubt is a mean,"
    " in nats."
)
AFTERWARDS = (
    "Bold: the best in its column, known only with the OOD rows at hand. ood_score is the one chosen before."
)
PROBS_ALONE = "Measured by probabilities alone: of doubt there is what follows from them."
NO_SCORE = "Every measure of doubt is the same for all rows, so none tells these apart."


def summary(report: Report) -> list[str]:
    """How accurate, how calibrated, how well it knows what it does not know; under damage, if measured."""
    lines = [_accurate(report), _calibrated(report), _knowing(report)]
    return lines if report.corrupted is None else [*lines, _damaged(report)]


def markdown(report: Report, pictures: Mapping[str, str]) -> str:
    """``pictures``: name → file to link to."""
    lines = [f"# Evaluation: {report.title}", ""]
    lines += [f"- **{head}:** {rest}" for head, rest in (line.split(": ", 1) for line in report.summary())]
    blocks = ["\n".join(lines), _measured(report, "`"), _picture("overview", pictures)]
    kind = "several labels a row" if report.several_labels else f"{report.num_classes} classes"
    blocks += [f"## In distribution\n\n{report.id.rows:,} rows, {kind}.", _table(*_quality(report))]
    blocks.append(_picture("reliability", pictures))
    for name, outside in report.ood.items():
        found = _table(*_ood(report, name)) if outside.scores else NO_SCORE
        blocks += [f"## Out of distribution: {name}\n\n{outside.rows:,} rows.", found]
    if report.ood and report.scores:
        blocks += [AFTERWARDS, _picture("roc", pictures), _picture("scores", pictures)]
    blocks += ["## Answering only where it is sure", _table(*_selection(report))]
    blocks.append(_picture("risk_coverage", pictures))
    if report.corrupted is not None:
        by = report.corrupted
        count = f"{by.mean.sets} set{'s' if by.mean.sets != 1 else ''}, each counted once."
        count += "" if _has_doubt(by) else f" {PROBS_ALONE}"
        blocks += [f"## Corrupted\n\n{count}", _table(*_corrupted(report, by.by_severity, "severity"))]
        blocks += [_table(*_corrupted(report, by.by_corruption, "corruption"))]
        blocks.append(_picture("corrupted", pictures))
    return "\n\n".join(block for block in [*blocks, f"*{NOTES}*"] if block) + "\n"


def plain_text(report: Report) -> str:
    """At most 80 columns wide."""
    blocks = [report.title[:WIDTH], *([_wrapped(_measured(report))] if report.about else [])]
    blocks.append("\n".join(_wrapped(line) for line in report.summary()))
    blocks.append(_columns(*_quality(report)))
    for name, outside in report.ood.items():
        found = _columns(*_ood(report, name, bold=False)) if outside.scores else NO_SCORE
        blocks.append(f"{f'OOD {name}'[:WIDTH]}\n{found}")
    blocks.append(f"answering only where it is sure\n{_columns(*_selection(report))}")
    if report.corrupted is not None:
        found = _columns(*_corrupted(report, report.corrupted.by_severity, "severity"))
        blocks.append(
            "\n".join(["corrupted", found, *([] if _has_doubt(report.corrupted) else [PROBS_ALONE])])
        )
    return "\n\n".join(blocks)


def _wrapped(line: str) -> str:
    """A number stays with its sign: textwrap does not break at a no-break space."""
    text = line.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")
    return textwrap.fill(text, WIDTH, subsequent_indent="  ").replace("\u00a0", " ")


def _measured(report: Report, quote: str = "") -> str:
    """One line, or nothing where nobody said."""
    said = (f"{name} {quote}{' '.join(value.split())}{quote}" for name, value in report.about.items())
    return f"Measured: {', '.join(said)}." if report.about else ""


# --- sentences ------------------------------------------------------------------------------------------


def _accurate(report: Report) -> str:
    q = report.id
    share = f"{_percent(q.accuracy)} ± {100 * q.accuracy_standard_error:.1f}"
    if report.several_labels:
        return (
            f"Accurate: the most probable class is among the labels in {share} of {q.rows:,} rows "
            f"(precision@1); NLL {q.nll:.3f} nats a row."
        )
    return (
        f"Accurate: {share} of {q.rows:,} labels are right; NLL {q.nll:.3f} nats, Brier {q.brier:.3f} of at "
        "most 2."
    )


def _calibrated(report: Report) -> str:
    q = report.id
    said = f"it is {_percent(q.confidence)} sure on average and right in {_percent(q.accuracy)}"
    return f"Calibrated: {said}: {verdict(q)}; ECE {q.ece:.3f}."


def verdict(q: Quality) -> str:
    """Over- or under-confident, and by how much, if by more than chance makes of right confidences."""
    if abs(q.overconfidence) <= CHANCE * q.overconfidence_standard_error:
        return "neither over- nor under-confident beyond chance"
    side = "over" if q.overconfidence > 0 else "under"
    return f"{side}-confident by {100 * abs(q.overconfidence):.1f} points"


def _knowing(report: Report) -> str:
    sure = report.selection["one_minus_confidence"].accuracy_at_coverage
    share = f"{COVERAGES[0]:.2f}"
    rest = f"Of the {100 * COVERAGES[0]:.0f} % of rows it is surest of, {_percent(sure[share])} are right."
    head = "Knows what it does not know"
    if not report.ood:
        return f"{head}: no OOD data were given. {rest}"
    if "ood_score" not in report.scores:
        return f"{head}: its ood_score is the same for every row, so nothing stands out. {rest}"
    (name, first), *others = ((n, outside.scores["ood_score"]) for n, outside in report.ood.items())
    text = (
        f"{head}: {name} has an AUROC of {first.auroc:.3f} by ood_score (0.5 is chance), and to find 95 % of "
        f"it {_percent(first.fpr95)} of the familiar rows are flagged too (FPR95)"
    )
    text += "".join(f"; {n} {found.auroc:.3f} and {_percent(found.fpr95)}" for n, found in others)
    return f"{text}. {rest}"


def _damaged(report: Report) -> str:
    assert report.corrupted is not None
    mean, by = report.corrupted.mean, report.corrupted.by_severity
    text = (
        f"Under damage: {_percent(mean.accuracy)} right, NLL {mean.nll:.3f}, ECE {mean.ece:.3f} on average "
    )
    text += f"over {mean.sets} corrupted set{'s' if mean.sets != 1 else ''}"
    if len(by) > 1:
        low, high = min(by), max(by)
        text += f"; {_percent(by[low].accuracy)} right at severity {low}, "
        text += f"{_percent(by[high].accuracy)} at {high}"
    return text + "."


# --- tables ---------------------------------------------------------------------------------------------

Table = tuple[list[str], list[list[str]]]
"""Headings, and rows whose first cell is a name."""


def _quality(report: Report) -> Table:
    q = report.id
    name = "precision@1 ↑" if report.several_labels else "accuracy ↑"
    values = {
        name: f"{q.accuracy:.4f} ± {q.accuracy_standard_error:.4f}",
        "NLL ↓": f"{q.nll:.4f}",
        "ECE ↓": f"{q.ece:.4f}",
        "Brier ↓": _number(q.brier),
        "confidence": f"{q.confidence:.4f}",
    }
    return ["", *values], [["id", *values.values()]]


def _ood(report: Report, name: str, bold: bool = True) -> Table:
    outside = report.ood[name]
    kinds = {"auroc": "AUROC ↑", "fpr95": "FPR95 ↓", "aupr_out": "AUPR out ↑", "aupr_in": "AUPR in ↑"}
    best = {
        kind: (min if kind == "fpr95" else max)(getattr(d, kind) for d in outside.scores.values())
        for kind in kinds
    }
    rows = []
    for score, found in outside.scores.items():
        cells = []
        for kind in kinds:
            value = getattr(found, kind)
            error = found.auroc_standard_error if kind == "auroc" else None
            text = f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
            cells.append(f"**{text}**" if bold and value == best[kind] else text)
        rows.append([label(score), *cells])
    return ["score", *kinds.values()], rows


def _selection(report: Report) -> Table:
    headings = ["score", "AURC ↓", "excess ↓", *(f"at {100 * c:.0f} % ↑" for c in COVERAGES)]
    rows = [
        [label(score), f"{s.aurc:.4f}", f"{s.excess_aurc:.4f}"]
        + [f"{s.accuracy_at_coverage[f'{c:.2f}']:.4f}" for c in COVERAGES]
        for score, s in report.selection.items()
    ]
    return headings, rows


def _corrupted(report: Report, groups: Mapping[str, Means] | Mapping[int, Means], name: str) -> Table:
    assert report.corrupted is not None
    known = report.corrupted.mean.scores
    both = ("total_uncertainty", "model_uncertainty")
    doubts = [score for score in both if score in report.scores and score in known]
    headings = [
        name,
        "accuracy ↑",
        "NLL ↓",
        "ECE ↓",
        "Brier ↓",
        *(f"{score.split('_')[0]} doubt" for score in doubts),
    ]
    rows = []
    for group, mean in [*groups.items(), ("mean", report.corrupted.mean)]:
        cells = [f"{mean.accuracy:.4f}", f"{mean.nll:.4f}", f"{mean.ece:.4f}", _number(mean.brier)]
        rows.append([str(group), *cells, *(f"{mean.scores[score]:.4f}" for score in doubts)])
    return headings, rows


def _has_doubt(corrupted: Corrupted) -> bool:
    return len(corrupted.mean.scores) == len(SCORES)


def label(score: str) -> str:
    """A score's name for people."""
    return {"ood_score": "ood_score", "one_minus_confidence": "1 − confidence"}.get(
        score, score.replace("_", " ")
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    line = "|".join(["---", *("---:" for _ in headings[1:])])
    body = [[cell.replace("|", "\\|") for cell in row] for row in (headings, *rows)]
    texts = [f"| {' | '.join(row)} |" for row in body]
    return "\n".join([texts[0], f"|{line}|", *texts[1:]])


def _columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Names to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    lines = []
    for row in (headings, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _picture(name: str, pictures: Mapping[str, str]) -> str:
    return f"![{name.replace('_', ' ')}]({pictures[name]})" if name in pictures else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
