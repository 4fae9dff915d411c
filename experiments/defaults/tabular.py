"""Defaults of HetSNGPClassifier, chosen on tables that benchmarks/tabular.py does not use.

    python experiments/defaults/tabular.py --out experiments/defaults/results     # 30 minutes on two cores

Made tables, small as the benchmark's are: Gaussian classes of different covariance (overlapping and well
separated), clusters of ``make_classification``, two moons. Five folds, labels as given and 20 % of the
training labels flipped. Test labels are the true ones, and for the flipped case also flipped alike, which is
what a model trained on such labels can be chosen by. The MLP and the random forest stand beside for
orientation. "ideas" are rules of the library replaced by others: what it would be like without them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "amplitude 1": {"amplitude": 1.0},
    "amplitude 10": {"amplitude": 10.0},
}
IDEAS = (
    "all epochs",
    "epoch by the NLL at its best temperature",
    "temperature at the MAP estimate",
    "scales compared at one temperature",
)
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


def clusters(columns: int, informative: int, redundant: int, separation: float, seed: int) -> tuple[Any, Any]:
    from sklearn.datasets import make_classification

    kind = {"n_informative": informative, "n_redundant": redundant, "class_sep": separation, "flip_y": 0.01}
    return make_classification(569, columns, n_classes=2, random_state=seed, **kind)


def moons() -> tuple[Any, Any]:
    from sklearn.datasets import make_moons

    return make_moons(300, noise=0.25, random_state=5)


TABLES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "150 × 4, 3 classes": lambda: gaussians(150, 4, 3, 1.6, seed=0),
    "180 × 13, 3 classes": lambda: gaussians(180, 13, 3, 1.5, seed=1),
    "120 × 8, 2 classes": lambda: gaussians(120, 8, 2, 1.2, seed=2),
    "moons, 300 × 2": moons,
    "569 × 30, 2 classes": lambda: clusters(30, 10, 10, 1.5, seed=3),
    "150 × 4, apart": lambda: gaussians(150, 4, 3, 3.0, seed=10),
    "180 × 13, apart": lambda: gaussians(180, 13, 3, 3.0, seed=11),
    "400 × 20, apart": lambda: gaussians(400, 20, 2, 2.0, seed=12),
    "569 × 30, apart": lambda: clusters(30, 6, 20, 2.0, seed=13),
}


def flip(y: Any, share: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    classes = int(y.max()) + 1
    return np.where(rng.random(len(y)) < share, (y + rng.integers(1, classes, len(y))) % classes, y)


@contextlib.contextmanager
def idea(name: str) -> Iterator[None]:
    """Replace one rule of the library by another."""
    from hetsngp.fitting import loop
    from hetsngp.fitting import table_trainer as fitting
    from hetsngp.posterior import calibration

    def all_epochs(models: Any, loaders: Any, validation: Any, schedule: Any, **options: Any) -> Any:
        for model, loader, generator in zip(models, loaders, options["generators"], strict=True):
            history = loop.train_with_schedule(model, loader, schedule, generator=generator)
        return [replace(result, held_out=-float(result.epoch)) for result in history]

    def sums_at_best_temperature(model: Any, loader: Any) -> tuple[float, float]:
        # Fold by fold, not pooled: near enough to see whether it helps.
        start, found = model.head.mode_temperature.clone(), []
        for by in (0.2, 0.4, 0.55, 0.75, 1.0, 1.35, 1.8):
            model.head.mode_temperature.copy_(model.head.training_temperature * by)
            found.append(nll_sums(model, loader))
        model.head.mode_temperature.copy_(start)
        return min(found)

    def temperature_at_map(pairs: Any, *, posterior: bool = False) -> Any:
        return best_temperature(pairs)

    def one_temperature(value: Any, start: float, step: float, most_steps: int | None = None) -> float:
        # The temperature of each scale is the one search without a limit of its own.
        return start if most_steps is None else local_minimum(value, start, step, most_steps)

    nll_sums, best_temperature = loop.nll_sums, calibration.best_temperature
    local_minimum = calibration._local_minimum
    place, attribute, other = {
        "all epochs": (fitting, "train_folds", all_epochs),
        "epoch by the NLL at its best temperature": (loop, "nll_sums", sums_at_best_temperature),
        "temperature at the MAP estimate": (calibration, "best_temperature", temperature_at_map),
        "scales compared at one temperature": (calibration, "_local_minimum", one_temperature),
    }[name]
    before = getattr(place, attribute)
    setattr(place, attribute, other)
    try:
        yield
    finally:
        setattr(place, attribute, before)


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
    x, y = TABLES[table]()
    train, test = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(x, y))[fold]
    if setting == "MLP":
        model = make_pipeline(StandardScaler(), MLPClassifier(random_state=fold))
    elif setting == "forest":
        model = RandomForestClassifier(random_state=fold)
    else:
        model = HetSNGPClassifier(random_state=fold, **SETTINGS.get(setting, {}))
    with warnings.catch_warnings(), idea(setting) if setting in IDEAS else contextlib.nullcontext():
        warnings.simplefilter("ignore")  # the MLP's 200 iterations
        model.fit(x[train], flip(y[train], share, fold))
    probs = model.predict_proba(x[test])
    labels = np.arange(probs.shape[1])
    return {
        "log loss": float(log_loss(y[test], probs, labels=labels)),
        "log loss, labels flipped alike": float(
            log_loss(flip(y[test], share, 100 + fold), probs, labels=labels)
        ),
        "accuracy": float((probs.argmax(1) == y[test]).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/defaults"), help="folder for tabular.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--settings", default=",".join(["MLP", "forest", *SETTINGS, *IDEAS]))
    args = parser.parse_args()
    path = args.out / "tabular.json"
    runs: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if any(key.count("/") != 3 for key in runs):
        parser.error(f"{path} is not a file of this script: choose another folder by --out")
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
    print("\n\n| log loss: as given, flipped alike / true | " + " | ".join(TABLES) + " | mean |")
    print("|---" * (len(TABLES) + 2) + "|")
    for setting in names:
        rows = []
        for table in TABLES:
            wanted = ((0.0, "log loss"), (0.2, "log loss, labels flipped alike"), (0.2, "log loss"))
            rows.append([
                np.mean([runs[f"{setting}/{table}/{share}/{fold}"][name] for fold in range(FOLDS)])
                for share, name in wanted
            ])  # fmt: skip
        cells = ["{:.3f}, {:.3f} / {:.3f}".format(*row) for row in [*rows, np.mean(rows, 0)]]
        print(f"| {setting} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
