"""Rounds of correction on small made data: one round against up to three.

    python experiments/label_noise/rounds.py            # about 15 minutes on two cores; resumes

Between 1,000 and 10,000 examples validation labels are too few to choose the sharpening of later rounds by
(hetsngp.labels.rounds). Measured are the targets, −log P(true | x, given label), and a head that is trained
on them, on 4,000 clean test examples; and what is found where labels are drawn at random.
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import make_classification

import hetsngp
from hetsngp.files import write_json
from hetsngp.frozen.features import FeatureSet
from hetsngp.paper.results import versions

HERE = Path(__file__).parent
SIZES, SEEDS, TEST, COLUMNS = (1000, 2000), (0, 1, 2), 4000, 16
# Classes, share of wrong labels, and how many classes a label may be mistaken for.
NOISE = ((2, 0.2, 1), (3, 0.4, 2), (5, 0.2, 1), (10, 0.4, 9), (3, 2 / 3, 2))
RANDOM = NOISE[-1]
"""Labels that are drawn at random."""


def made_data(examples: int, classes: int, noise: float, others: int, seed: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    x, true = make_classification(
        examples + TEST,
        n_features=COLUMNS,
        n_informative=10,
        n_redundant=2,
        n_classes=classes,
        n_clusters_per_class=2 if classes == 2 else 1,
        class_sep=1.5,
        flip_y=0,
        random_state=seed,
    )
    wrong = rng.random(len(true)) < noise
    given = np.where(wrong, (true + rng.integers(1, others + 1, len(true))) % classes, true)
    x = (x - x.mean(0)) / x.std(0)
    return torch.tensor(x, dtype=torch.float32), torch.from_numpy(true), torch.from_numpy(given)


def measure(case: tuple[int, tuple[int, float, int], int]) -> dict[str, Any]:
    examples, (classes, noise, others), seed = case
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x, true, given = made_data(examples, classes, noise, others, seed)
    about: dict[str, Any] = {"examples": examples, "classes": classes, "noise": noise, "seed": seed}
    for rounds in (1, 3):
        model = hetsngp.convert(
            torch.nn.Linear(COLUMNS, classes), "sngp", x[:2], freeze=True, normalization="rms"
        )
        data = FeatureSet(x[:examples], given[:examples])
        found = hetsngp.correct_labels(model, data, rounds=rounds, seed=seed, progress=False)
        hetsngp.fit_head(model, found.features, amplitude=found.amplitude, progress=False)
        probs, rows = model.predict(x[examples:]).probs, torch.arange(examples)
        targets = torch.from_numpy(found.errors.clean_probs)
        about[f"{rounds} rounds"] = {
            "round": found.round,
            "losses": found.losses,
            "nll of targets": float(-targets[rows, true[:examples]].clamp_min(1e-9).log().mean()),
            "expected wrong": found.errors.expected_wrong / examples,
            "agrees with given": float((found.probs.argmax(1) == given[:examples].numpy()).mean()),
            "accuracy": hetsngp.metrics.accuracy(probs, true[examples:]),
            "nll": hetsngp.metrics.nll(probs, true[examples:]),
        }
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    file = HERE / "rounds.json"
    before = json.loads(file.read_text()) if file.is_file() else {"results": []}
    results: list[dict[str, Any]] = before["results"]
    done = {(r["examples"], r["classes"], r["noise"], r["seed"]) for r in results}
    cases = [c for c in itertools.product(SIZES, NOISE, SEEDS) if (c[0], *c[1][:2], c[2]) not in done]
    with ProcessPoolExecutor(args.processes) as pool:
        for about in pool.map(measure, cases):
            results.append(about)
            write_json(file, {**versions(), "results": results})
            print(json.dumps(about), flush=True)


if __name__ == "__main__":
    main()
