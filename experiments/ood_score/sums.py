"""Other sums of scores, other weights, other tables, on held-out data: is any better than the chosen score?

    python experiments/ood_score/sums.py out/study4 --out experiments/ood_score

Reads the .npz files of the fourth stage of study.py and writes ``sums.json``: AUROC near and far, means over
the splits, of every sum of up to four scores of hetsngp, of its three parts with weights, and of the chosen
scores of both methods under one width of the tables for all parts and under that of each part. Nothing is
chosen by it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from gather import DENSITY, ENERGY, MODEL, PARTS, Scores, read

from hetsngp import metrics
from hetsngp.files import write_json
from hetsngp.functional.ood import ERRORS, tail_score, tail_table
from hetsngp.nn.heads import INTEGRATION_ERROR, ROUNDING_ERROR

CANDIDATES = (
    *(ENERGY, "max logit", MODEL, "entropy", "relative Mahalanobis z", "relative Mahalanobis phi"),
    *("relative Mahalanobis h", "variance", "kNN z", "1 − confidence", "Mahalanobis phi", "Mahalanobis z"),
)
CHOSEN = (ENERGY, MODEL, DENSITY.format(space="z"))
BASELINE = ("entropy", DENSITY.format(space="h"))
ONE_WIDTH = 1e-3 / ERRORS
"""Error for which no piece of a table is narrower than 1e-3."""


def aurocs(
    networks: Sequence[Scores],
    names: Sequence[str],
    weights: Sequence[float] | None = None,
    errors: Sequence[float] | None = None,
) -> list[float]:
    """AUROC near and far of the sum of ``names``, the mean over networks."""
    found: dict[str, list[float]] = {part: [] for part in PARTS[1:]}
    for scores in networks:
        values = {part: torch.stack([scores[name][part] for name in names], 1) for part in PARTS}
        table = tail_table(values["held_out"], errors=errors)
        if weights is not None:
            table = table._replace(slopes=table.slopes * torch.tensor(weights).double().unsqueeze(1))
        summed = {part: tail_score(rows, table) for part, rows in values.items()}
        for part, each in found.items():
            each.append(metrics.auroc(summed["held_out"], summed[part]))
    return [round(statistics.fmean(each), 5) for each in found.values()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    found = [read(file) for file in sorted(options.folder.glob("*.json"))]
    ours, theirs = (
        [scores for about, scores in found if ("deterministic" in about["name"]) is baseline]
        for baseline in (False, True)
    )
    sums = {
        " + ".join(names): aurocs(ours, names)
        for number in range(1, 5)
        for names in itertools.combinations(CANDIDATES, number)
    }
    weighted = {
        " : ".join(f"{w:g}" for w in weights): aurocs(ours, CHOSEN, weights)
        for weights in itertools.product((0.0, 0.5, 1.0, 2.0), (0.5, 1.0, 2.0), (0.5, 1.0, 2.0))
    }
    own = (ROUNDING_ERROR, INTEGRATION_ERROR, ROUNDING_ERROR)
    widths = {
        "hetsngp, one width": aurocs(ours, CHOSEN, errors=[ONE_WIDTH] * 3),
        "hetsngp, a width for each part": aurocs(ours, CHOSEN, errors=own),
        "deterministic, one width": aurocs(theirs, BASELINE, errors=[ONE_WIDTH] * 2),
        "deterministic, a width for each part": aurocs(theirs, BASELINE, errors=[ROUNDING_ERROR] * 2),
    }
    best = {
        name: dict(sorted(each.items(), key=lambda item: -sum(item[1]))[:20])
        for name, each in (("sums", sums), ("weights of " + " : ".join(CHOSEN), weighted))
    }
    content = {"networks": len(ours), "tried": len(sums), "best": best, "widths": widths}
    write_json(options.out / "sums.json", content)
    for name, (near, far) in (best["sums"] | widths).items():
        print(f"{near:.4f} {far:.4f}  {name}")


if __name__ == "__main__":
    main()
