"""What was tried to rank the wrong labels of CIFAR-10N worse better than study.py does; the same features.

    python experiments/label_noise/ideas.py --out out/label_noise --device cuda

Each idea is a way to out-of-sample probabilities of all 50,000 images at amplitude 1, which study.py's search
chooses there, or to rounds of correction. Judged by the given labels (``given nll``); the average precision
beside it reads the true ones.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import features as sets
import study
import torch
from sklearn.metrics import average_precision_score

import hetsngp
from hetsngp.files import write_text
from hetsngp.paper.results import versions

FIXED: dict[str, Any] = {"amplitude": 1.0, "progress": False}
IDEAS: dict[str, dict[str, Any]] = {
    "sngp-1024": {"method": "sngp", "random_features": 1024},
    "sngp-2048": {"method": "sngp", "random_features": 2048},
    "sngp-4096": {"method": "sngp", "random_features": 4096},
    "hetsngp-1024": {"method": "hetsngp", "random_features": 1024},
    "rounds-2048": {"method": "sngp", "random_features": 2048},
}


def measure(name: str, model: hetsngp.Classifier, data: Any, true: torch.Tensor, seed: int) -> dict[str, Any]:
    began, wrong = time.perf_counter(), (data.y != true).numpy()
    about: dict[str, Any] = {}
    if name.startswith("rounds"):
        about["rounds"] = []

        def on_round(number: int, errors: Any, loss: float) -> None:
            ap = average_precision_score(wrong, errors.wrong_probability)
            about["rounds"].append({"validation NLL": loss, "ap": float(ap), **study.describe(errors)})

        found = hetsngp.correct_labels(
            model, data, seed=seed, progress=False, on_round=on_round, **IDEAS[name]
        )
        errors, about["round"] = found.errors, found.round
    else:
        probs = hetsngp.out_of_sample_probs(model, data, seed=seed, **FIXED, **IDEAS[name]).probs
        errors = hetsngp.find_label_errors(data.y, probs)
    return about | {
        "given nll": float(errors.losses.mean()),
        "ap": float(average_precision_score(wrong, errors.wrong_probability)),
        "suggested accuracy": float((errors.suggested == true.numpy()).mean()),
        **study.describe(errors),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/label_noise"), help="folder of the features")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=list(IDEAS), choices=IDEAS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(study.SEEDS))
    args = parser.parse_args()
    folder = args.out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        data, _ = study.load(args.out, "worse", seed, None)
        model = study.model_for(data, 10, torch.device(args.device))
        for name in args.only:
            file = folder / f"ideas-{name}-{seed}.json"
            if not file.is_file():
                found = measure(name, model, data, sets.true_labels("worse"), seed)
                print(name, seed, found, flush=True)
                write_text(
                    file, json.dumps({**versions(), "idea": name, "seed": seed, **found}, indent=1) + "\n"
                )


if __name__ == "__main__":
    main()
