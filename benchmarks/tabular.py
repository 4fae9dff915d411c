"""HetSNGPClassifier as it comes against scikit-learn's MLP and random forest as they come.

    python benchmarks/tabular.py --out benchmarks/results        # 4 minutes on two cores

Five-fold cross-validation on digits, breast_cancer, wine and iris, with the labels as they are and with 20 %
of the training labels flipped. Every number is a mean over folds ± its standard error. Log loss is reported
twice for the flipped case: against the true test labels, and against test labels flipped like the training
ones, which is what ``predict_proba`` of a model trained on them estimates. "clean" is ``clean_probs`` of
HetSNGP, the label noise taken out. OOD (digits): train on 0–7; the digits 8 and 9 and uniform noise are
unseen; scores are ``ood_score`` for ours and the entropy of the prediction for the others.

The MLP gets standardised inputs, as ours does by itself. No hyperparameter of ours was chosen on these
data: defaults come from ``experiments/defaults/tabular.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

MODELS = ("hetsngp", "mlp", "forest")
TASKS = ("digits", "breast_cancer", "wine", "iris")
FLIPPED = 0.2
FOLDS = 5
BINS = 15


def load(task: str) -> tuple[Any, Any]:
    from sklearn import datasets

    return getattr(datasets, f"load_{task}")(return_X_y=True)


def make(model: str, seed: int) -> Any:
    if model == "mlp":
        from sklearn.neural_network import MLPClassifier
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        return make_pipeline(StandardScaler(), MLPClassifier(random_state=seed))
    if model == "forest":
        from sklearn.ensemble import RandomForestClassifier

        return RandomForestClassifier(random_state=seed)
    from hetsngp import HetSNGPClassifier

    return HetSNGPClassifier(model, random_state=seed)


def flip(y: Any, share: float, seed: int) -> Any:
    """``share`` of the labels, chosen at random, changed to another class at random."""
    rng = np.random.default_rng(seed)
    classes = int(y.max()) + 1
    changed = rng.random(len(y)) < share
    return np.where(changed, (y + rng.integers(1, classes, len(y))) % classes, y)


def ece(probs: Any, y: Any) -> float:
    """Expected calibration error, 15 bins of equal width."""
    confidence, correct = probs.max(1), probs.argmax(1) == y
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs(confidence[bins == b].sum() - correct[bins == b].sum()) for b in range(BINS)]
    return float(sum(gaps) / len(y))


def scores(model: str, fitted: Any, x: Any) -> tuple[Any, Any, Any]:
    """Probabilities, those without label noise, and the OOD score."""
    if model in ("mlp", "forest"):
        probs = fitted.predict_proba(x)
        return probs, probs, -(probs * np.log(np.clip(probs, 1e-12, 1))).sum(1)
    prediction = fitted.predict_uncertainty(x)
    return prediction.probs, prediction.clean_probs, prediction.ood_score


def one_fold(model: str, task: str, flipped: bool, fold: int, seed: int) -> dict[str, Any]:
    """Fit on four fifths, measure on the rest."""
    import torch
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold

    torch.set_num_threads(1)
    x, y = load(task)
    train, test = list(StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(x, y))[fold]
    share, number = FLIPPED if flipped else 0.0, 100 * seed + fold
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the MLP says that 200 iterations did not converge: its defaults
        fitted = make(model, number).fit(x[train], flip(y[train], share, number))
    seconds = time.process_time() - start
    probs, clean, _ = scores(model, fitted, x[test])
    noisy, labels = flip(y[test], share, number + 50), np.arange(probs.shape[1])
    return {
        "accuracy": float((probs.argmax(1) == y[test]).mean()),
        "log loss": float(log_loss(y[test], probs, labels=labels)),
        "log loss, clean": float(log_loss(y[test], clean, labels=labels)),
        "log loss, labels flipped alike": float(log_loss(noisy, probs, labels=labels)),
        "ECE": ece(probs, noisy),
        "fit seconds": seconds,
    }


def unseen_digits(model: str, task: str, flipped: bool, fold: int, seed: int) -> dict[str, Any]:
    """AUROC of 8s, 9s and uniform noise against held-back digits 0 to 7."""
    import torch
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold

    torch.set_num_threads(1)
    x, y = load("digits")
    known, number = y < 8, 100 * seed + fold
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(x[known], y[known])
    train, test = list(folds)[fold]
    labels = flip(y[known][train], FLIPPED if flipped else 0.0, number)
    noise = np.random.default_rng(number).integers(0, 17, (500, x.shape[1])).astype(float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = make(model, number).fit(x[known][train], labels)
    inside = scores(model, fitted, x[known][test])[2]
    out = {}
    for name, other in {"OOD AUROC, 8 and 9": x[~known], "OOD AUROC, noise": noise}.items():
        outside = scores(model, fitted, other)[2]
        truth = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
        out[name] = float(roc_auc_score(truth, np.r_[inside, outside]))
    return out


def mean_and_error(values: list[float]) -> tuple[float, float]:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return float(np.mean(values)), spread / math.sqrt(len(values))


def summarise(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a (task, flipped, model): mean and standard error of every number."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for key, run in runs.items():
        task, flipped, model = key.split("/")[1:4]
        row = rows.setdefault((task, flipped, model), {})
        for name, value in run.items():
            row.setdefault(name, []).append(value)
    return [
        {"task": task, "labels": flipped, "model": model}
        | {name: mean_and_error(values) for name, values in row.items()}
        for (task, flipped, model), row in sorted(rows.items())
    ]


def table(rows: list[dict[str, Any]]) -> str:
    names = [n for n in dict.fromkeys(n for row in rows for n in row) if n not in ("task", "labels", "model")]
    lines = [
        "| task | training labels | model | " + " | ".join(names) + " |",
        "|---" * (len(names) + 3) + "|",
    ]
    for row in rows:
        cells = ["–" if n not in row else f"{row[n][0]:.3f} ± {row[n][1]:.3f}" for n in names]
        lines.append(f"| {row['task']} | {row['labels']} | {row['model']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for tabular.json")
    parser.add_argument("--seeds", type=int, default=1, help="repetitions of the five folds")
    parser.add_argument(
        "--models", default=",".join(MODELS), help="also sngp, heteroscedastic, deterministic"
    )
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    path = args.out / "tabular.json"
    runs: dict[str, dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else {}
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [
        (kind, task, flipped, model, seed, fold)
        for seed in range(args.seeds)
        for kind, tasks in (("cv", args.tasks.split(",")), ("ood", ["digits"]))
        for task in tasks
        for flipped in (False, True)
        for model in args.models.split(",")
        for fold in range(FOLDS)
    ]
    named = {_name(*job): job for job in jobs}
    waiting = {name: job for name, job in named.items() if name not in runs}
    if len(waiting) < len(named):
        print(
            f"{len(named) - len(waiting)} of {len(named)} fits are in {path} already; delete it to start anew"
        )
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = {
            pool.submit(one_fold if kind == "cv" else unseen_digits, model, task, flipped, fold, seed): name
            for name, (kind, task, flipped, model, seed, fold) in waiting.items()
        }
        for count, future in enumerate(as_completed(futures), 1):
            runs[futures[future]] = future.result()
            if count % 10 == 0 or count == len(futures):
                _write(path, runs)
            print(f"\r{count}/{len(futures)} fits", end="", flush=True)
    print("\n\n" + table(summarise({name: runs[name] for name in named})))


def _name(kind: str, task: str, flipped: bool, model: str, seed: int, fold: int) -> str:
    return f"{kind}/{task}/{'20 % flipped' if flipped else 'as given'}/{model}/{seed}/{fold}"


def _write(path: Path, runs: dict[str, dict[str, Any]]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"summary": summarise(runs), "runs": dict(sorted(runs.items()))}, indent=1))
    os.replace(part, path)


if __name__ == "__main__":
    main()
