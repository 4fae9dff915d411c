"""Tables of scikit-learn with 20 % of the labels flipped, the more the nearer an example is to another class.

    pip install --no-deps cleanlab==2.9.0 termcolor
    python experiments/label_noise/tables.py            # two cores: some minutes; writes tables.json

The recipe of the flips was fixed before any result: the instance-dependent noise of Xia et al. (2020,
arXiv:2006.07836). Each example has a rate q from Normal(0.2, 0.1²), truncated to [0, 1]; standardised columns
times a random matrix (d, K) of its class give scores; it is flipped with probability q, to another class with
probability softmax(scores).

Three ways to out-of-sample probabilities: ``HetSNGPClassifier().find_label_errors`` with its defaults; the
columns themselves as features of a GP, by leave-one-out; scikit-learn's logistic regression in five folds, as
cleanlab's tutorials do. On each, cleanlab's best score and filter by the true labels.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import detect
import numpy as np
import torch
from sklearn import datasets
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import hetsngp
from hetsngp.files import write_text
from hetsngp.frozen.features import FeatureSet
from hetsngp.paper.results import versions

TABLES = ("digits", "breast_cancer", "wine")
SEEDS = (0, 1, 2)
RATE, SPREAD = 0.2, 0.1


def flip(X: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
    """Instance-dependent label noise: labels (n,) of which about a fifth are wrong."""
    rng, classes = np.random.default_rng(seed), int(y.max()) + 1
    rate = rng.normal(RATE, SPREAD, size=10 * len(y))
    rate = rate[(rate >= 0) & (rate <= 1)][: len(y)]
    weights = rng.standard_normal((classes, X.shape[1], classes))
    scores = np.einsum("nd,ndk->nk", StandardScaler().fit_transform(X), weights[y])
    scores[np.arange(len(y)), y] = -np.inf
    scores -= scores.max(1, keepdims=True)
    probs = rate[:, None] * np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    probs[np.arange(len(y)), y] = 1 - rate
    return np.array([rng.choice(classes, p=p / p.sum()) for p in probs])


def leave_one_out(X: np.ndarray, given: np.ndarray, seed: int) -> Any:
    """Probabilities by a GP on the standardised columns, from one fit unless that would be too optimistic."""
    x = torch.from_numpy(StandardScaler().fit_transform(X)).float()
    readout = torch.nn.Linear(x.shape[1], int(given.max()) + 1)
    model = hetsngp.convert(readout, "sngp", x[:2], freeze=True)
    data = FeatureSet(x, torch.from_numpy(given))
    return hetsngp.out_of_sample_probs(model, data, seed=seed, progress=False)


def measure(name: str, seed: int) -> dict[str, Any]:
    X, true = getattr(datasets, f"load_{name}")(return_X_y=True)
    given = flip(X, true, seed)
    found: dict[str, Any] = {
        "measured": versions(),
        "examples": len(true),
        "wrong": int((given != true).sum()),
    }
    began = time.perf_counter()
    probs = hetsngp.HetSNGPClassifier(random_state=seed).find_label_errors(X, given).probs
    found["estimator"] = detect.compare(given, true, probs) | {
        "fit seconds": round(time.perf_counter() - began, 1)
    }
    began = time.perf_counter()
    gp = leave_one_out(X, given, seed)
    found["gp on columns"] = detect.compare(given, true, gp.probs) | {
        "fit seconds": round(time.perf_counter() - began, 1),
        "how": gp.how,
        "amplitude": gp.amplitude,
    }
    logistic = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    probs = cross_val_predict(logistic, X, given, cv=5, method="predict_proba")
    found["logistic regression"] = detect.compare(given, true, probs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", type=Path, default=Path(__file__).parent / "tables.json")
    args = parser.parse_args()
    found = {}
    for name in TABLES:
        for seed in SEEDS:
            found[f"{name}-{seed}"] = one = measure(name, seed)
            for way in ("estimator", "gp on columns", "logistic regression"):
                peer = one[way]["cleanlab"]
                print(
                    f"{name} {seed} {way}: AP {one[way]['hetsngp']['ap']:.3f}, "
                    f"cleanlab {peer['scores'][peer['best score']]['ap']:.3f}",
                    flush=True,
                )
    write_text(args.write, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
