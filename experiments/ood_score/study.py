"""Which kernel, posterior scale and OOD score? A study on CIFAR-100 without CIFAR-100's test images.

    export HETSNGP_DATA=...
    python experiments/ood_score/study.py train --out out/study          # trains what is missing; one GPU
    python experiments/ood_score/study.py table --out out/study          # AUROC of every candidate

WRN-16-8 learns 80 of the 100 classes, from 450 images of each; 50 of each are held out, to calibrate by and
as in-distribution examples. The 20 other classes are near OOD, ImageNet's images at 32 pixels without
CIFAR-100's classes (far_images.py) far OOD. The two splits of classes are drawn by seeds 0 and 1. Each
network writes a JSON file with its settings, seconds and numbers, and an .npz file with every score of every
image.
Several processes may share ``--out``: each takes the next network that none has begun. After a kill remove
``*.begun``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import time
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from candidates import RawScores
from far_images import open_far

import hetsngp
from hetsngp import metrics
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import DeviceLoader
from hetsngp.data.sources import open_images
from hetsngp.files import write_json
from hetsngp.frozen.features import FeatureSet
from hetsngp.training import Engine, Hardware
from hetsngp.training.image_data import make_loaders
from hetsngp.training.images import make_model
from hetsngp.training.input_kinds import TaskData
from hetsngp.training.recipes.recipe import read_recipe

HERE = Path(__file__).parent
HELD_OUT_CLASSES = 20
SPLITS = (0, 1)
TOLERANCES = (0.01, 0.03, 10.0)
"""Nats that a larger posterior scale may cost; the first is the library's, with the last the scale is 1."""
WIDTH = 512**0.5
FIRST: dict[str, tuple[str, ...]] = {
    "deterministic": ("method=deterministic",),
    "hetsngp": (),
    "linear": ("options.kernel=rbf+linear",),
    "polar": ("options.normalization=polar",),
    "deterministic, lr 0.2": ("method=deterministic", "schedule.lr=0.2"),
    "lr 0.2": ("schedule.lr=0.2",),
    "bound 3": ("options.spectral_bound=3",),
    "no bound": ("options.spectral_bound=inf",),
    "length 0.5": (f"options.length_scale={0.5 * 2**0.5 * WIDTH}",),
    "length 2": (f"options.length_scale={2 * 2**0.5 * WIDTH}",),
    "amplitude 5": ("options.amplitude=5",),
    "amplitude 20": ("options.amplitude=20",),
    "average": ("training.ema_decay=0.998",),
    "lr 0.4": ("schedule.lr=0.4",),
}
"""Name → changes to study.toml, the recipe "cifar100" of 0.1; lengths in units of √(2D), about the median
distance.
"""
_LR, _DET, _FIVE = "schedule.lr=0.4", "method=deterministic", "options.amplitude=5"
SECOND: dict[str, tuple[str, ...]] = {
    "lr 0.4, amplitude 5": (_LR, _FIVE),
    "deterministic, lr 0.4": (_LR, _DET),
    "lr 0.4, amplitude 5, weight decay 1e-3": (_LR, _FIVE, "schedule.weight_decay=1e-3"),
    "deterministic, lr 0.4, weight decay 1e-3": (_LR, _DET, "schedule.weight_decay=1e-3"),
    "lr 0.8, amplitude 5": ("schedule.lr=0.8", _FIVE),
    "deterministic, lr 0.8": ("schedule.lr=0.8", _DET),
    "lr 0.4, amplitude 3": (_LR, "options.amplitude=3"),
    "lr 0.4, amplitude 5, polar": (_LR, _FIVE, "options.normalization=polar"),
    "lr 0.4, amplitude 5, average": (_LR, _FIVE, "training.ema_decay=0.998"),
    "lr 0.4, amplitude 5, bound 3": (_LR, _FIVE, "options.spectral_bound=3"),
    "lr 0.4, amplitude 5, linear": (_LR, _FIVE, "options.kernel=rbf+linear"),
    "lr 0.4, amplitude 5, constant, average": (
        *(_LR, _FIVE, "schedule.decay=constant", "training.ema_decay=0.998"),
    ),
    "sngp, lr 0.4, amplitude 5": (_LR, _FIVE, "method=sngp"),
    "lr 0.4": (_LR,),
    "deterministic, lr 0.4, average": (_LR, _DET, "training.ema_decay=0.998"),
    "lr 0.4, amplitude 5, length 2": (_LR, _FIVE, f"options.length_scale={2 * 2**0.5 * WIDTH}"),
}
"""Second stage, around what was best by held-out NLL in the first."""
_AVERAGE = (_LR, "schedule.decay=constant", "training.ema_decay=0.998")
_DECAY = "schedule.weight_decay=1e-3"
THIRD: dict[str, tuple[str, ...]] = {
    "lr 0.4, amplitude 5, constant, average, weight decay 1e-3": (*_AVERAGE, _FIVE, _DECAY),
    "deterministic, lr 0.4, constant, average, weight decay 1e-3": (*_AVERAGE, _DET, _DECAY),
    "deterministic, lr 0.4, constant, average": (*_AVERAGE, _DET),
    "lr 0.4, constant, average": _AVERAGE,
}
"""Third stage: a constant learning rate with averaged weights, which was best for hetsngp in the second, for
the deterministic network too; and amplitude 10 under it. Scales of the posterior were compared at
the temperature of the MAP estimate in the first two stages, and each at its own since.
"""
FOURTH = ("lr 0.4, amplitude 5, constant, average", "deterministic, lr 0.4, constant, average")
"""Fourth stage: the recipe that was chosen, with another seed (``--seed 1``). Nothing is chosen by it."""
CONFIGS = {**FIRST, **SECOND, **THIRD}
STAGES = {"first": tuple(FIRST), "second": tuple(SECOND), "third": tuple(THIRD), "fourth": FOURTH}


@cache
def class_split(split: int, size: int | None) -> tuple[ImageArrays, ImageArrays, ImageArrays]:
    """Images to train on, held-out images of the same 80 classes, and images of the 20 others."""
    everything = open_images("cifar100", "train")
    if size is not None:  # a quick run
        everything = everything.take(torch.arange(0, len(everything), len(everything) // size))
    order = torch.randperm(everything.num_classes, generator=torch.Generator().manual_seed(split))
    known = order[HELD_OUT_CLASSES:].sort().values
    number = torch.full((everything.num_classes,), -1)
    number[known] = torch.arange(len(known))
    labels = number[everything.labels]
    inside, outside = (labels >= 0).nonzero().flatten(), (labels < 0).nonzero().flatten()
    names = tuple(everything.class_names[i] for i in known.tolist())
    learned = ImageArrays(everything.images[inside], labels[inside], names)
    train, held_out = learned.split(0.1, seed=0)
    near = everything.take(outside)
    return train, held_out, replace(near, labels=torch.zeros_like(near.labels))


def commit() -> str:
    """Commit of the code, where there is a repository or the environment says."""
    told = os.environ.get("HETSNGP_COMMIT")
    if told:
        return told
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    return found.stdout.strip() or "unknown"


def study(name: str, split: int, options: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """Train a network, and measure every score under each rule for the posterior's scale."""
    changes = [*options.set, *CONFIGS[name], f"schedule.epochs={options.epochs}", f"seed={options.seed}"]
    recipe = read_recipe(HERE / "study.toml", changes)
    train, held_out, near = class_split(split, options.images)
    sets = {"held_out": held_out, "near": near, "far": open_far()}
    data = TaskData(train, held_out, None, None, (3, 32, 32))
    torch.manual_seed(options.seed)
    begun = time.perf_counter()
    model, scale = make_model(recipe.task, data.num_classes, data.shape)
    loaders = make_loaders(recipe.task, data, scale, seed=options.seed)
    trained = engine.train(model, loaders.train, replace(recipe.config, best=False), show=False)
    seconds = time.perf_counter() - begun
    shift: Any = {"mean": loaders.clean.mean, "std": loaders.clean.std}

    def features(loader: Any) -> FeatureSet:
        found = hetsngp.extract_features(trained.model, loader.to(engine.device, channels_last=True))
        return FeatureSet(found.h.to(engine.device), found.y.to(engine.device))

    known = features(loaders.clean)
    h = {part: features(DeviceLoader(images, 1000, **shift)) for part, images in sets.items()}
    result: dict[str, Any] = {
        "name": name,
        "split": split,
        "seed": options.seed,
        "epochs": options.epochs,
        "recipe": recipe.describe(),
        "commit": commit(),
        "torch": torch.__version__,
        "training_seconds": seconds,
        "examples": {"train": len(known), **{part: len(found) for part, found in h.items()}},
        "rules": {},
    }
    arrays: dict[str, np.ndarray] = {}
    view = trained.model.on_features()
    for tolerance in TOLERANCES if view.head.has_posterior else TOLERANCES[:1]:
        batches = list(zip(known.h.split(1000), known.y.split(1000), strict=True))
        report = hetsngp.fit_posterior(
            view, batches, [(h["held_out"].h, h["held_out"].y)], tolerance=tolerance
        )
        raw = RawScores(trained.model, known) if tolerance == TOLERANCES[0] else None
        scores = {}
        for part, found in h.items():
            if raw is not None:
                scores[part] = raw(found.h)
            else:
                predicted = [view.predict(rows) for rows in found.h.split(1000)]
                scores[part] = {
                    "model uncertainty": torch.cat([p.model_uncertainty for p in predicted]),
                    "entropy": torch.cat([p.total_uncertainty for p in predicted]),
                }
            for score, values in scores[part].items():
                key = score if raw is not None else f"{score}, tolerance {tolerance:g}"
                arrays[f"{part}|{key}"] = values.float().cpu().numpy()
        result["rules"][f"{tolerance:g}"] = scored(view, h["held_out"], scores, report)
    result["seconds"] = time.perf_counter() - begun
    if name in options.keep:
        tensors = {f"{part}.h": found.h.half().cpu() for part, found in h.items()}
        tensors |= {"train.h": known.h.half().cpu(), "train.y": known.y.to(torch.uint8).cpu()}
        tensors["held_out.y"] = h["held_out"].y.to(torch.uint8).cpu()
        torch.save((tensors, trained.model.head.state_dict()), options.out / f"{file_name(name, split)}.pt")
    np.savez_compressed(options.out / f"{file_name(name, split)}.npz", **arrays)
    return result


def scored(
    view: hetsngp.Classifier, held_out: FeatureSet, scores: dict[str, Any], report: hetsngp.PosteriorReport
) -> dict[str, Any]:
    """Quality of the predictions of held-out features, and AUROC of every score."""
    probs = torch.cat([view.predict_probs(rows) for rows in held_out.h.split(1000)]).cpu()
    labels = held_out.y.cpu()
    return {
        "scale": report.scale,
        "temperature": report.temperature,
        "accuracy": metrics.accuracy(probs, labels),
        "nll": metrics.nll(probs, labels),
        "ece": metrics.ece(probs, labels),
        "auroc": {
            part: {
                score: metrics.auroc(values.cpu(), scores[part][score].cpu())
                for score, values in scores["held_out"].items()
            }
            for part in ("near", "far")
        },
    }


def file_name(name: str, split: int) -> str:
    return f"{name.replace(', ', '-').replace(' ', '_')}-{split}"


def train_missing(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    precision: Any = "bf16-mixed" if gpu else "32-true"
    engine = Engine(Hardware(1, precision=precision, channels_last=True, compile=gpu))
    for name, split in itertools.product(options.configs or STAGES[options.stage], options.splits):
        file = options.out / f"{file_name(name, split)}.json"
        begun = file.with_suffix(".begun")
        try:
            begun.touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            result = study(name, split, options, engine)
        except Exception:  # the other networks are independent of this one
            begun.rename(file.with_suffix(".failed"))
            traceback.print_exc()
            continue
        except BaseException:
            begun.unlink()
            raise
        write_json(file, result)
        print(line(result), flush=True)


SHOWN = ("entropy", "model uncertainty", "variance", "max logit", "relative Mahalanobis z", "Mahalanobis z")


def line(result: dict[str, Any]) -> str:
    """One line for a network."""
    rule = result["rules"][f"{TOLERANCES[0]:g}"]
    cells = [f"{result['name']:24s} {result['split']} {result['seconds']:5.0f} s"]
    cells += [f"acc {rule['accuracy']:.3f} NLL {rule['nll']:.3f} ECE {rule['ece']:.3f}"]
    cells += [f"scale {rule['scale']:.3g}"]
    for score in SHOWN:
        pair = [rule["auroc"][part].get(score) for part in ("near", "far")]
        if pair[0] is not None:
            cells.append(f"{score} " + "/".join(f"{value:.3f}" for value in pair))
    return ", ".join(cells)


def show(options: argparse.Namespace) -> None:
    for file in sorted(options.out.glob("*.json")):
        print(line(json.loads(file.read_text(encoding="utf-8"))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "table"])
    parser.add_argument("--out", type=Path, default=Path("out/study"))
    parser.add_argument("--stage", choices=list(STAGES), default="first")
    parser.add_argument("--configs", nargs="+", choices=list(CONFIGS), metavar="NAME", help="of a stage")
    parser.add_argument("--splits", nargs="+", type=int, default=list(SPLITS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the recipe, for all")
    parser.add_argument("--images", type=int, default=None, help="use so many images only: does it run?")
    parser.add_argument(
        "--keep", nargs="*", default=[], metavar="NAME", help="networks whose features to keep"
    )
    options = parser.parse_args()
    if options.what == "train":
        train_missing(options)
    else:
        show(options)


if __name__ == "__main__":
    main()
