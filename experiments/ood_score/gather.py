"""Tables of the study from the files of its networks: settings by held-out NLL, and OOD scores by AUROC.

    python experiments/ood_score/gather.py out/study out/frozen --out experiments/ood_score

Reads the JSON and .npz files that study.py and frozen.py wrote, adds combinations of scores by held-out tail
probabilities, and writes ``study.json``, with every network, and ``study.md``. Networks of a study.json that
is there already are kept, so that the stages can be gathered one after another; the intervals of a group are
those of the call that had its networks. An interval is of a paired
bootstrap: 500 times, examples of each set are drawn again, the same ones for both scores and for every
network that was measured on this set.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetsngp import metrics
from hetsngp.files import write_atomically, write_json
from hetsngp.functional.ood import tail_score, tail_table

PARTS = ("held_out", "near", "far")
MODEL, ENERGY, DENSITY = "model uncertainty", "energy", "relative Mahalanobis {space}"
COMBINATIONS = {
    "energy + model uncertainty + relative Mahalanobis": (ENERGY, MODEL, DENSITY),
    "model uncertainty + relative Mahalanobis": (MODEL, DENSITY),
    "energy + relative Mahalanobis": (ENERGY, DENSITY),
    "energy + model uncertainty": (ENERGY, MODEL),
    "model uncertainty + variance": (MODEL, "variance"),
    "model uncertainty + Mahalanobis": (MODEL, "Mahalanobis {space}"),
    "model uncertainty + kNN": (MODEL, "kNN {space}"),
    "energy + entropy + relative Mahalanobis": (ENERGY, "entropy", DENSITY),
    "entropy + relative Mahalanobis": ("entropy", DENSITY),
    "max logit + relative Mahalanobis": ("max logit", DENSITY),
}
CHOSEN = next(iter(COMBINATIONS))
DETERMINISTIC_CHOSEN = "entropy + relative Mahalanobis"
"""Score of networks without a posterior that has the best mean over the columns of study.md."""
RESAMPLES = 500
Scores = dict[str, dict[str, Tensor]]
"""Score → part → values."""


def read(file: Path) -> tuple[dict[str, Any], Scores]:
    """Description of a network, and its scores of every example."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    scores: Scores = {}
    with np.load(file.with_suffix(".npz")) as arrays:
        for key in arrays.files:
            part, _, score = key.partition("|")
            if f"near|{score}" in arrays.files:
                scores.setdefault(score, {})[part] = torch.from_numpy(arrays[key]).double()
    return found, scores | combinations(scores)


def combinations(scores: Scores, sets: Sequence[str] = PARTS) -> Scores:
    """Combinations by held-out tail probabilities, on ``sets``, of those scores that there are."""
    space = "z" if "variance" in scores else "h"
    found: Scores = {}
    for name, parts in COMBINATIONS.items():
        names = [part.format(space=space) for part in parts]
        if all(part in scores for part in names):
            values = {each: torch.stack([scores[n][each] for n in names], 1) for each in sets}
            table = tail_table(values["held_out"])
            found[name] = {each: tail_score(rows, table) for each, rows in values.items()}
    return found


def aurocs(scores: Scores) -> dict[str, dict[str, float]]:
    """AUROC of every score, near and far."""
    return {
        part: {name: metrics.auroc(each["held_out"], each[part]) for name, each in scores.items()}
        for part in PARTS[1:]
    }


def resampled(a: dict[str, Tensor], b: dict[str, Tensor], part: str, split: int) -> np.ndarray:
    """AUROC of a minus that of b for drawn examples of both sets: (RESAMPLES,)."""

    def drawn(count: int, seed: int) -> np.ndarray:
        random = np.random.default_rng(seed)
        return random.multinomial(count, [1 / count] * count, RESAMPLES)

    # Networks of a split share their held-out and near examples, all of them the far ones.
    known = drawn(len(a["held_out"]), split)
    others = drawn(len(a[part]), 100 if part == "far" else 10 + split)
    return _weighted(a, part, known, others) - _weighted(b, part, known, others)


def _weighted(scores: dict[str, Tensor], part: str, known: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Weighted AUROC of each row of weights; ties are broken by the order of the sets."""
    order = np.argsort(torch.cat([scores["held_out"], scores[part]]).numpy(), kind="stable")
    zeros = np.zeros_like(known[:, :1], shape=(len(known), other.shape[1]))
    below = np.concatenate([known, zeros], 1)[:, order].cumsum(1, dtype=np.float64)
    found = np.concatenate([np.zeros_like(known), other], 1)[:, order]
    return np.asarray((below * found).sum(1) / (known.sum(1) * other.sum(1)))


def difference(pairs: Sequence[tuple[int, dict[str, Tensor], dict[str, Tensor]]]) -> dict[str, list[float]]:
    """Mean difference of two scores (split, one, other), and its 95 % interval, near and far."""
    out = {}
    for part in PARTS[1:]:
        each = np.mean([resampled(one, other, part, split) for split, one, other in pairs], axis=0)
        low, middle, high = np.quantile(each, [0.025, 0.5, 0.975])
        out[part] = [round(float(value), 4) for value in (middle, low, high)]
    return out


def group(found: dict[str, Any]) -> str | None:
    """Group of networks that a table of scores averages over."""
    name = found["name"]
    kind = "deterministic" if "deterministic" in name else "GP"
    if name.startswith("frozen"):
        return f"{name.split()[1].rstrip(',')}, frozen, {kind}"
    stages = {"second": f"images, trained, {kind}", "fourth": f"images, trained, seed 1, {kind}"}
    return stages.get(found["stage"])


def pair(values: dict[str, dict[str, float]], name: str) -> str:
    return (
        " / ".join(f"{values[part][name]:.4f}".lstrip("0") for part in PARTS[1:])
        if name in values["near"]
        else "–"
    )


def mean_aurocs(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """AUROC of every score, near and far, the mean over networks."""
    names = [name for name in runs[0]["auroc"]["near"] if "tolerance" not in name]
    return {
        part: {name: statistics.fmean(run["auroc"][part][name] for run in runs) for name in names}
        for part in PARTS[1:]
    }


def settings_table(networks: list[dict[str, Any]]) -> list[str]:
    """Quality on held-out examples of every network, and AUROC near / far; entropy without a posterior."""
    heads = [
        "network",
        "splits",
        "accuracy",
        "NLL",
        "ECE",
        "scale",
        "AUROC: model uncertainty or entropy",
        "chosen score",
    ]
    lines = ["| " + " | ".join(heads) + " |"]
    lines += ["|---|---|---:|---:|---:|---:|---|---|"]
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in networks:
        by_name.setdefault((each["stage"], each["name"]), []).append(each)
    for (_, name), runs in by_name.items():
        rules = [next(iter(run["rules"].values())) for run in runs]
        cells = [
            f"{statistics.fmean(r[k] for r in rules):.3f}".lstrip("0") for k in ("accuracy", "nll", "ece")
        ]
        scales = ", ".join(sorted({f"{r['scale']:.2g}" for r in rules}))
        means = [
            {
                part: {
                    s: statistics.fmean(run["auroc"][part][s] for run in runs) for s in runs[0]["auroc"][part]
                }
                for part in PARTS[1:]
            }
        ][0]
        first = MODEL if MODEL in means["near"] else "entropy"
        last = CHOSEN if CHOSEN in means["near"] else DETERMINISTIC_CHOSEN
        splits = " and ".join(str(run["split"]) for run in runs)
        seed = f", seed {runs[0]['seed']}" if runs[0].get("seed") else ""
        cells = [name + seed, splits, *cells, scales, pair(means, first), pair(means, last)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def scores_table(networks: list[dict[str, Any]], groups: list[str]) -> list[str]:
    """AUROC of every score, the mean over the networks of each group."""
    means: dict[str, dict[str, dict[str, float]]] = {}
    for name in groups:
        runs = [run for run in networks if run["group"] == name]
        means[name] = mean_aurocs(runs)
    names = {score: None for each in means.values() for score in each["near"]}

    def mean(score: str) -> float:
        found = [each[part][score] for each in means.values() for part in PARTS[1:] if score in each["near"]]
        return statistics.fmean(found)

    lines = ["| score | " + " | ".join(groups) + " |", "|---" * (len(groups) + 1) + "|"]
    for score in sorted(names, key=mean, reverse=True):
        lines.append(f"| {score} | " + " | ".join(pair(means[name], score) for name in groups) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    networks: list[dict[str, Any]] = []
    scores: list[Scores] = []
    for folder in options.folders:
        for file in sorted(folder.glob("*.json")):
            found, values = read(file)
            stages = {"2": "second", "3": "third", "4": "fourth"}
            found["stage"] = stages.get(folder.name[-1], "first") if "recipe" in found else "first"
            found["group"] = group(found)
            found["auroc"] = {
                p: {k: round(v, 5) for k, v in each.items()} for p, each in aurocs(values).items()
            }
            found["rules"] = {
                rule: {k: v for k, v in each.items() if k != "auroc"} for rule, each in found["rules"].items()
            }
            networks.append(found)
            scores.append(values)
    earlier: dict[str, Any] = {"networks": [], "differences": {}}
    if (options.out / "study.json").is_file():
        earlier = json.loads((options.out / "study.json").read_text(encoding="utf-8"))
    here = [(each["stage"], each["name"], each["split"]) for each in networks]
    kept = [n for n in earlier["networks"] if (n["stage"], n["name"], n["split"]) not in here]
    new_groups = {each["group"] for each in networks}
    networks = [*kept, *networks]
    gp = sorted({each["group"] for each in networks if (each["group"] or "").endswith("GP")})
    baselines = [name.replace("GP", "deterministic") for name in gp]
    with_scores = list(zip(networks[len(kept) :], scores, strict=True))
    differences = {
        f"{CHOSEN}, less {MODEL}: {name}": difference(
            [(n["split"], s[CHOSEN], s[MODEL]) for n, s in with_scores if n["group"] == name]
        )
        for name in gp
        if name in new_groups
    }
    last = {("deterministic" in n["name"], n["split"]): s for n, s in with_scores if n["stage"] == "fourth"}
    pairs = [
        (split, s["ood_score"], last[True, split]["ood_score"])
        for (baseline, split), s in last.items()
        if not baseline and (True, split) in last
    ]
    if pairs:
        differences["ood_score of hetsngp, less that of deterministic: images, trained, seed 1"] = difference(
            pairs
        )
    differences = {**earlier["differences"], **differences}
    trained = [each for each in networks if "recipe" in each]
    lines = [
        "# Study of OOD scores",
        "",
        "Written by gather.py.",
        "",
        "## Networks",
        "",
        *settings_table(trained),
    ]
    lines += [
        "",
        "## Heads on frozen features",
        "",
        *settings_table([n for n in networks if "recipe" not in n]),
    ]
    lines += ["", "## Scores of GP heads, AUROC near / far", "", *scores_table(networks, gp)]
    lines += ["", "## Scores of deterministic heads", "", *scores_table(networks, baselines)]
    lines += ["", "## Differences, with 95 % intervals", ""]
    lines += [f"- {name}: near {each['near']}, far {each['far']}" for name, each in differences.items()]
    text = "\n".join([*lines, ""])
    write_json(options.out / "study.json", {"networks": networks, "differences": differences})
    write_atomically(options.out / "study.md", lambda file: file.write(text.encode()))
    print(text)


if __name__ == "__main__":
    main()
