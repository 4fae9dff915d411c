"""Defaults of HetSNGPClassifier, chosen on tables that benchmarks/tabular.py does not use.

    python experiments/defaults/tabular.py --out experiments/defaults/results     # 15 minutes on two cores

Made tables, small as the benchmark's are: Gaussian classes of different covariance, clusters of
``make_classification``, two moons. Five folds, labels as given and 20 % of them flipped, in training and test
alike: log loss against labels drawn like the training labels is what can be chosen by. The MLP and the
random forest stand beside for orientation.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "amplitude 1": {"amplitude": 1.0},
    "amplitude 10": {"amplitude": 10.0},
    "twice the length scale": {"length_scale": 32.0},
    "100 epochs": {"epochs": 100},
}
FOLDS = 5


def gaussians(count: int, columns: int, classes: int, distance: float, seed: int) -> tuple[Any, Any]:
    """Classes with a mean and a covariance of their own."""
    rng = np.random.default_rng(seed)
    x = []
    for _ in range(classes):
        mix = rng.normal(size=(columns, columns)) / np.sqrt(columns) + 0.5 * np.eye(columns)
        mean = 2 * distance * rng.normal(size=columns) / np.sqrt(columns)
        x.append(rng.normal(size=(count // classes, columns)) @ mix + mean)
    return np.vstack(x), np.repeat(np.arange(classes), count // classes)


def load(name: str) -> tuple[Any, Any]:
    from sklearn.datasets import make_classification, make_moons

    if name == "150 × 4, 3 classes":
        return gaussians(150, 4, 3, 1.6, seed=0)
    if name == "180 × 13, 3 classes":
        return gaussians(180, 13, 3, 1.5, seed=1)
    if name == "120 × 8, 2 classes":
        return gaussians(120, 8, 2, 1.2, seed=2)
    if name == "moons, 300 × 2":
        return make_moons(300, noise=0.25, random_state=5)
    kind = {"n_informative": 10, "n_redundant": 10, "class_sep": 1.5, "flip_y": 0.01, "random_state": 3}
    return make_classification(569, 30, n_classes=2, **kind)


TABLES = (
    "150 × 4, 3 classes",
    "180 × 13, 3 classes",
    "120 × 8, 2 classes",
    "moons, 300 × 2",
    "569 × 30, 2 classes",
)


def flip(y: Any, share: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    classes = int(y.max()) + 1
    return np.where(rng.random(len(y)) < share, (y + rng.integers(1, classes, len(y))) % classes, y)


def one_fold(setting: str, table: str, share: float, fold: int) -> dict[str, float]:
    import torch
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from hetsngp import HetSNGPClassifier

    torch.set_num_threads(1)
    x, y = load(table)
    train, test = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(x, y))[fold]
    if setting == "MLP":
        model = make_pipeline(StandardScaler(), MLPClassifier(random_state=fold))
    elif setting == "forest":
        model = RandomForestClassifier(random_state=fold)
    else:
        model = HetSNGPClassifier(random_state=fold, **SETTINGS[setting])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the MLP's 200 iterations
        model.fit(x[train], flip(y[train], share, fold))
    probs = model.predict_proba(x[test])
    loss = log_loss(flip(y[test], share, 100 + fold), probs, labels=np.arange(probs.shape[1]))
    return {"log loss": float(loss), "accuracy": float((probs.argmax(1) == y[test]).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/defaults"), help="folder for tabular.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--settings", default=",".join(["MLP", "forest", *SETTINGS]))
    args = parser.parse_args()
    path = args.out / "tabular.json"
    runs: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.settings.split(",")
    jobs = [(s, t, p, f) for s in names for t in TABLES for p in (0.0, 0.2) for f in range(FOLDS)]
    with ProcessPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(one_fold, *job): job for job in jobs if "/".join(map(str, job)) not in runs}
        for count, future in enumerate(as_completed(waiting), 1):
            runs["/".join(map(str, waiting[future]))] = future.result()
            part = path.with_suffix(".part")
            part.write_text(json.dumps(dict(sorted(runs.items())), indent=0))
            os.replace(part, path)
            print(f"\r{count}/{len(waiting)}", end="", flush=True)
    print("\n\n| log loss, as given / 20 % flipped | " + " | ".join(TABLES) + " | mean |")
    print("|---" * (len(TABLES) + 2) + "|")
    for setting in names:
        cells, every = [], []
        for table in TABLES:
            pair = [
                np.mean([runs[f"{setting}/{table}/{p}/{f}"]["log loss"] for f in range(FOLDS)])
                for p in (0.0, 0.2)
            ]
            every += pair
            cells.append(f"{pair[0]:.3f} / {pair[1]:.3f}")
        print(f"| {setting} | " + " | ".join(cells) + f" | {np.mean(every):.3f} |")


if __name__ == "__main__":
    main()
