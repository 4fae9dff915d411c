"""Ablations of one trained HetSNGP network that need no training: posteriors, and numbers of points.

    export HETSNGP_DATA=...
    python experiments/cifar/refits.py RUN_FOLDER --far scenes --out experiments/cifar

1. Every posterior, fitted on the features of the network's training images and calibrated on its held-out
   ones. The Kronecker posterior is that of the saved model, whose predictions it must repeat.
2. Predictions of the saved model with other numbers of integration points: quasi-random (Sobol) points of the
   noise's factor, the other coordinates being integrated, or Monte Carlo draws of all coordinates. Points are
   drawn several times, by generators with seeds 0, 1, ...

Test images are in-distribution, CIFAR-10's are near OOD. Writes ``refits.json`` and ``refits.md``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scores import BATCH, Network, add_options, commit, folder_name, open_network, read_summary
from torch import Tensor

import hetsngp
from hetsngp import metrics
from hetsngp.files import write_atomically, write_json
from hetsngp.frozen.features import FeatureSet
from hetsngp.models.classifier import Classifier
from hetsngp.models.components import kind_of
from hetsngp.models.methods import check_options, make_head
from hetsngp.nn.extractor import Features
from hetsngp.nn.heads import GaussianHead
from hetsngp.serving.bundle import find_device

POSTERIORS = ("kronecker", "exact", "shared", "none")
POINTS = {"sobol": (4, 16, 64, 256, 1024), "mc": (5, 100, 1000, 5000)}
"""Sampler → numbers of points."""
DRAWS = 5
FITTED = ("latent.posterior.", "ood.")
"""Beginnings of the names of tensors that ``fit_posterior`` makes."""
LARGEST_MEAN_DIFFERENCE = 0.005
"""Largest mean, over test images, of the largest difference of a probability between refit and saved model.
Features in TF32 on another GPU differ by some 1e-3; another scale or temperature changes more."""


def with_posterior(model: Classifier, posterior: str) -> Classifier:
    """View on features with the trained weights and another posterior, which is not fitted."""
    options = check_options({**model.config["options"], "posterior": posterior})
    backbone = Features(model.num_features, kind_of(model.backbone))
    head = make_head(model.config["method"], backbone, model.num_classes, options)
    kept = {name: t for name, t in model.head.state_dict().items() if not name.startswith(FITTED)}
    missing, unexpected = head.load_state_dict(kept, strict=False)
    missing = [name for name in missing if not name.startswith(FITTED)]
    if missing or unexpected:
        raise RuntimeError(f"the heads differ in more than the posterior: {[*missing, *unexpected]}")
    head.to(model.temperature.device)
    view = Classifier(backbone, head, num_features=model.num_features, dataset_size=model.dataset_size)
    return view.eval()


def with_sampler(model: Classifier, sampler: str) -> Classifier:
    """View on features with the same fitted head and other integration points."""
    view = model.on_features()
    assert isinstance(view.head, GaussianHead)
    view.head = copy.copy(view.head)
    view.head.link = replace(view.head.link, sampler=sampler)
    return view


def timed(fn: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Result, and seconds until the device has it."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    begun = time.perf_counter()
    found = fn()
    wait()
    return found, time.perf_counter() - begun


def quality(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, NLL and ECE of test images."""
    probs, labels = probs.cpu(), labels.cpu()
    return {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": metrics.nll(probs, labels),
        "ece": metrics.ece(probs, labels),
    }


def all_probs(view: Classifier, found: FeatureSet, **options: Any) -> Tensor:
    """Probabilities of all examples: (n, K)."""
    return torch.cat([view.predict_probs(h, **options) for h in found.h.split(BATCH)])


def ood_scores(view: Classifier, found: FeatureSet) -> tuple[Tensor, Tensor]:
    """Probabilities (n, K) and OOD scores (n,) of all examples."""
    predicted = [view.predict(h) for h in found.h.split(BATCH)]
    return torch.cat([p.probs for p in predicted]), torch.cat([p.ood_score for p in predicted]).double()


# --- posteriors -----------------------------------------------------------------------------------------


def refit(network: Network, posterior: str, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Numbers of the network with this posterior, and its probabilities of the test images."""
    train, sets = network.train, network.sets
    view = with_posterior(network.model, posterior)
    batches = list(zip(train.h.split(BATCH), train.y.split(BATCH), strict=True))
    held_out = [(sets["held_out"].h, sets["held_out"].y)]
    fitted, seconds = timed(lambda: hetsngp.fit_posterior(view, batches, held_out), device)
    view.predict(sets["test"].h[:BATCH])  # makes tables that are kept
    (probs, known), predicting = timed(lambda: ood_scores(view, sets["test"]), device)
    found = {
        "posterior": posterior,
        **quality(probs, sets["test"].y),
        "auroc": {
            part: metrics.auroc(known.cpu(), ood_scores(view, sets[part])[1].cpu())
            for part in ("near", "far")
        },
        "scale": fitted.scale,
        "temperature": fitted.temperature,
        "held_out_nll": fitted.nll,
        "fit_seconds": seconds,
        "predict_seconds": predicting,
    }
    return found, probs


def reproduction(network: Network, probs: Tensor, refitted: Mapping[str, Any], limit: Any) -> dict[str, Any]:
    """How far the probabilities of the Kronecker refit are from those of the saved model."""
    saved = ood_scores(network.model.on_features(), network.sets["test"])[0]
    largest = (saved - probs).abs().amax(1)
    calibration = network.model.calibration or {}
    return {
        "largest_difference": float(largest.max()),
        "mean_largest_difference": float(largest.mean()),
        "saved": {name: calibration.get(name) for name in ("scale", "temperature")},
        "refitted": {name: refitted[name] for name in ("scale", "temperature")},
        # With a part of the training images the posterior is another.
        "ok": None if limit is not None else float(largest.mean()) <= LARGEST_MEAN_DIFFERENCE,
    }


# --- numbers of points ----------------------------------------------------------------------------------


def with_points(
    network: Network, sampler: str, points: int, draws: int, device: torch.device
) -> dict[str, Any]:
    """Numbers of the saved model with so many points, the mean over several draws of them."""
    view, test = with_sampler(network.model, sampler), network.sets["test"]
    view.predict_probs(test.h[:BATCH], num_samples=points)  # makes tables that are kept
    found, seconds = [], []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        probs, each = timed(
            lambda g=generator: all_probs(view, test, num_samples=points, generator=g),  # type: ignore[misc]
            device,
        )
        found.append(quality(probs, test.y))
        seconds.append(each)
    nll = [each["nll"] for each in found]
    return {
        "sampler": sampler,
        "points": points,
        "draws": draws,
        **{name: statistics.fmean(each[name] for each in found) for name in found[0]},
        "nll_sd": statistics.stdev(nll) if draws > 1 else None,
        "predict_seconds": statistics.median(seconds),
    }


# --- tables ---------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}f}".removeprefix("0")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def report(content: Mapping[str, Any]) -> str:
    """Text of ``refits.md``."""
    numbers = ("accuracy", "NLL", "ECE")
    posteriors = [
        [
            each["posterior"],
            *(number(each[name]) for name in ("accuracy", "nll", "ece")),
            *(number(each["auroc"][part]) for part in ("near", "far")),
            f"{each['scale']:.3g}",
            f"{each['temperature']:.3g}",
            *(f"{each[name]:.2f}" for name in ("fit_seconds", "predict_seconds")),
        ]
        for each in content["posteriors"]
    ]
    points = [
        [
            {"sobol": "Sobol", "mc": "Monte Carlo"}[each["sampler"]],
            str(each["points"]),
            *(number(each[name]) for name in ("accuracy", "nll")),
            number(each["nll_sd"], 5),
            number(each["ece"]),
            f"{each['predict_seconds']:.2f}",
        ]
        for each in content["points"]
    ]
    sizes, found = content["examples"], content["reproduction"]
    lines = [
        "# Ablations of one HetSNGP network without training",
        "",
        f"Written by refits.py: {content['folder']}, seed {content['seed']}, {sizes['test']:,} test images,",
        f"on {content['device']}.",
        "",
        "## Posteriors",
        "",
        "AUROC of `ood_score` (without a posterior: of entropy and distance) against "
        f"{content['near']} (near) and",
        f"{content['far']} (far). Seconds to fit and calibrate, and to predict test images from features.",
        "",
        *table(
            ("posterior", *numbers, "near AUROC", "far AUROC", "scale", "temperature", "fit s", "predict s"),
            posteriors,
        ),
        "",
        "Largest difference of a probability between the saved model and the Kronecker refit: "
        f"{found['largest_difference']:.2g},",
        f"its mean over test images {found['mean_largest_difference']:.2g}.",
        "",
        "## Integration points",
        "",
        f"Means over {content['points'][0]['draws']} draws of the points; the seconds are their median.",
        "",
        *table(("points", "number", "accuracy", "NLL", "sd of NLL", "ECE", "predict s"), points),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=DRAWS, help="of the integration points")
    add_options(parser)
    options = parser.parse_args()
    begun, device = time.perf_counter(), find_device(options.device)
    summary = read_summary(options.folder)
    method = summary["recipe"]["task"]["method"]
    if method != "hetsngp":
        parser.error(f"{options.folder} is a run of {method}: give one of hetsngp")
    network = open_network(options.folder, summary, options, device)
    refits = {name: refit(network, name, device) for name in POSTERIORS}
    content: dict[str, Any] = {
        "method": method,
        "seed": summary["recipe"]["config"]["seed"],
        "folder": folder_name(options.folder),
        "near": Path(options.near).name,
        "far": Path(options.far).name,
        "limit": options.limit,
        "examples": {"train": len(network.train)} | {part: len(each) for part, each in network.sets.items()},
        "recipe": summary["recipe"],
        "commit": commit(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "posteriors": [found for found, _ in refits.values()],
        "reproduction": reproduction(network, refits["kronecker"][1], refits["kronecker"][0], options.limit),
        "points": [
            with_points(network, sampler, count, options.draws, device)
            for sampler, counts in POINTS.items()
            for count in counts
        ],
    }
    content["seconds"] = round(time.perf_counter() - begun, 2)
    text = report(content)
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "refits.json", content)
    write_atomically(options.out / "refits.md", lambda file: file.write(text.encode()))
    print(text)
    if content["reproduction"]["ok"] is False:
        sys.exit(f"the Kronecker refit does not repeat the saved model: {content['reproduction']}")


if __name__ == "__main__":
    main()
