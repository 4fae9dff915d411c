"""Wrong labels: ranked and flagged by hetsngp.find_label_errors and by cleanlab, on the same probabilities.

    pip install --no-deps cleanlab==2.9.0 termcolor
    python experiments/label_noise/study.py probs --out out/label_noise
    python experiments/label_noise/detect.py --out out/label_noise

Reads the probabilities that study.py wrote and writes ``detect.json``; what that has of other sets and seeds
is kept. True labels are read here, to measure.
Of cleanlab each score is measured, as it is and with ``adjust_pred_probs``, and each filter: what is reported
beside hetsngp is the best of them by the true labels, in each set and seed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import features as sets
import numpy as np
import study
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from sklearn.metrics import average_precision_score, roc_auc_score

import hetsngp
from hetsngp.files import write_text
from hetsngp.paper.results import versions

SCORES = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
FILTERS = ("prune_by_noise_rate", "prune_by_class", "both", "confident_learning", "predicted_neq_given")
# Sharpenings whose ranks are measured by the true labels, to compare the chosen one with.
SHARPENINGS = (0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0, 5.66)


def ranking(wrong: np.ndarray, suspicion: np.ndarray) -> dict[str, float]:
    return {
        "auroc": float(roc_auc_score(wrong, suspicion)),
        "ap": float(average_precision_score(wrong, suspicion)),
    }


def flagging(wrong: np.ndarray, flagged: np.ndarray) -> dict[str, float]:
    both = float((wrong & flagged).sum())
    precision, recall = both / max(1, flagged.sum()), both / max(1, wrong.sum())
    return {
        "flagged": int(flagged.sum()),
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / max(1e-12, precision + recall),
    }


def ours(given: np.ndarray, true: np.ndarray, probs: np.ndarray) -> dict[str, Any]:
    wrong, began = given != true, time.perf_counter()
    errors = hetsngp.find_label_errors(given, probs)
    seconds = time.perf_counter() - began
    return {
        **ranking(wrong, errors.wrong_probability),
        **flagging(wrong, errors.is_wrong),
        **study.describe(errors),
        "wrong": int(wrong.sum()),
        "suggested accuracy": float((errors.suggested == true).mean()),
        "seconds": round(seconds, 2),
    }


def sharpenings(given: np.ndarray, true: np.ndarray, probs: np.ndarray) -> list[dict[str, float]]:
    """What every sharpening would have given: NLL of the given labels, which chooses, and what is hidden."""
    found = []
    for s in SHARPENINGS:
        errors = hetsngp.find_label_errors(given, probs, sharpening=s)
        clean = errors.clean_probs[np.arange(len(true)), true]
        found.append(
            {
                "sharpening": s,
                "given nll": float(errors.losses.mean()),
                "true nll": float(-np.log(np.maximum(clean, 1e-12)).mean()),
                **ranking(given != true, errors.wrong_probability),
            }
        )
    return found


def cleanlab(given: np.ndarray, true: np.ndarray, probs: np.ndarray) -> dict[str, Any]:
    wrong, scores, filters = given != true, {}, {}
    began = time.perf_counter()
    for score in SCORES:
        for adjust in (False, True):
            if adjust and score == "confidence_weighted_entropy":
                continue  # cleanlab refuses it
            quality = get_label_quality_scores(given, probs, method=score, adjust_pred_probs=adjust)
            scores[f"{score}{', adjusted' if adjust else ''}"] = ranking(wrong, -quality)
    for name in FILTERS:
        filters[name] = flagging(wrong, find_label_issues(given, probs, filter_by=name, n_jobs=1))
    seconds = time.perf_counter() - began
    return {
        "scores": scores,
        "filters": filters,
        "best score": max(scores, key=lambda name: scores[name]["ap"]),
        "best filter": max(filters, key=lambda name: filters[name]["f1"]),
        "seconds": round(seconds, 2),
    }


def compare(given: np.ndarray, true: np.ndarray, probs: np.ndarray) -> dict[str, Any]:
    return {"hetsngp": ours(given, true, probs), "cleanlab": cleanlab(given, true, probs)}


def mixtures(given: np.ndarray, true: np.ndarray, arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """Average precision of other combinations of what is stored: linear and GP probabilities, and rounds."""
    wrong, found = given != true, {}
    for share in (0.25, 0.5, 0.75):
        logits = (1 - share) * arrays["linear"].astype(np.float32) + share * arrays["gp"].astype(np.float32)
        probs = np.exp(logits - logits.max(1, keepdims=True))
        errors = hetsngp.find_label_errors(given, probs / probs.sum(1, keepdims=True))
        found[f"{share:.0%} GP, {1 - share:.0%} linear, in logarithms"] = ranking(
            wrong, errors.wrong_probability
        )["ap"]
    rounds = [np.clip(a, 1e-7, 1 - 1e-7) for name, a in arrays.items() if name.startswith("wrong after")]
    found["mean of the logits of all rounds"] = ranking(wrong, sum(np.log(a / (1 - a)) for a in rounds))["ap"]
    return found


def measure(results: Path, labels: str, seed: int) -> dict[str, Any]:
    about = json.loads((results / f"probs-{labels}-{seed}.json").read_text())
    given, true = sets.given_labels(labels).numpy(), sets.true_labels(labels).numpy()
    with np.load(results / f"probs-{labels}-{seed}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    found: dict[str, Any] = {
        **{"device": about["device"], "commit": about.get("commit"), "measured": versions()},
        **about["result"],
    }
    for name in ("linear", "gp"):
        probs = np.exp(arrays[name].astype(np.float32))
        probs /= probs.sum(1, keepdims=True)
        found[name] = compare(given, true, probs)
        found[name]["accuracy of given"] = float((probs.argmax(1) == given).mean())
        found[name]["accuracy of true"] = float((probs.argmax(1) == true).mean())
        if name == "gp" and labels == "worse":
            found["mixtures"] = mixtures(given, true, arrays)
        if name == "gp":
            found["sharpenings"] = sharpenings(given, true, probs)
    for number, of_round in enumerate(found["rounds"], start=1):
        suspicion = arrays[f"wrong after round {number}"]
        of_round |= ranking(given != true, suspicion) | flagging(given != true, suspicion > 0.5)
        of_round["suggested accuracy"] = float((arrays[f"suggested after round {number}"] == true).mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/label_noise"), help="folder that study.py had")
    parser.add_argument("--results", type=Path, help="where study.py wrote; default: OUT/results")
    parser.add_argument("--write", type=Path, default=Path(__file__).parent / "detect.json")
    args = parser.parse_args()
    results = args.results or args.out / "results"
    found = json.loads(args.write.read_text()) if args.write.is_file() else {}
    for labels in study.LABELS:
        for seed in study.SEEDS:
            if (results / f"probs-{labels}-{seed}.json").is_file():
                found[f"{labels}-{seed}"] = one = measure(results, labels, seed)
                for name in ("linear", "gp"):
                    peer = one[name]["cleanlab"]
                    print(
                        f"{labels} {seed} {name}: AP {one[name]['hetsngp']['ap']:.4f}, "
                        f"cleanlab {peer['scores'][peer['best score']]['ap']:.4f}",
                        flush=True,
                    )
                print([round(r["ap"], 4) for r in one["rounds"]], one["round"], flush=True)
    write_text(args.write, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
