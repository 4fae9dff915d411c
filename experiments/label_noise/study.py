"""Wrong labels on frozen features: found, corrected, and what the uncertainties say, beside a linear softmax.

    export HETSNGP_DATA=...
    python experiments/label_noise/features.py --out out/label_noise
    python experiments/label_noise/study.py probs --out out/label_noise     # out-of-sample probabilities
    python experiments/label_noise/study.py heads --out out/label_noise     # trained directly, and corrected
    python experiments/label_noise/study.py folds --out out/label_noise     # leave-one-out against real folds
    python experiments/label_noise/study.py shared --out out/label_noise --only worse --seeds 3 4 5
    python experiments/label_noise/study.py uncertainty --out out/label_noise   # against people's votes
    python experiments/label_noise/detect.py --out out/label_noise        # wrong labels, beside cleanlab

A result is a file for each set of labels and seed, which a second call does not make again; ``--only worse
--seeds 0`` makes some. With ``--device cuda`` the heads are fitted on a GPU. No clean label is read before a
result is measured: amplitudes, sharpenings, rounds, epochs and temperatures are chosen by the given labels.

``probs``: all images (50,000 of CIFAR-10; 10,606 of CIFAR-100). ``heads`` and ``folds``: 10,000 images of
CIFAR-10 that the seed draws, tested on CIFAR-10's 10,000 test images.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import features as sets
import numpy as np
import torch
from torch import Tensor

import hetsngp
from hetsngp import metrics
from hetsngp.choices import MethodName
from hetsngp.data.datasets.human_labels import load_cifar10h
from hetsngp.files import replace_file, write_text
from hetsngp.frozen.features import FeatureSet
from hetsngp.frozen.label_noise import FOLDS
from hetsngp.labels import LabelErrors
from hetsngp.paper.results import versions

LABELS = ("worse", "random1", "aggre", "cifar100")
SEEDS = (0, 1, 2)
IMAGES = 10_000
METHODS: tuple[MethodName, ...] = ("deterministic", "heteroscedastic", "sngp", "hetsngp")
GPS = ("sngp", "hetsngp")
UNCERTAINTIES = (
    "total_uncertainty",
    "data_uncertainty",
    "model_uncertainty",
    "latent_variance",
    "ood_score",
)


def load(folder: Path, labels: str, seed: int, count: int | None) -> tuple[FeatureSet, Tensor]:
    """Features with given labels, and true labels (n,): all, or ``count`` that the seed draws."""
    found = FeatureSet.load(folder / f"{'cifar100' if labels == 'cifar100' else 'cifar10'}-train.safetensors")
    rows = torch.arange(len(found))
    if count is not None:
        rows = torch.from_numpy(np.random.default_rng(seed).permutation(len(found))[:count])
    return FeatureSet(found.h[rows].float(), sets.given_labels(labels)[rows]), found.y[rows]


def model_for(data: FeatureSet, classes: int, device: torch.device) -> hetsngp.Classifier:
    """A frozen network whose features these are, to fit heads on; normalised as those of convolutions are."""
    readout = torch.nn.Linear(data.h.shape[1], classes)
    model = hetsngp.convert(readout, "sngp", data.h[:2], freeze=True, normalization="power")
    return model.to(device)


def describe(errors: LabelErrors) -> dict[str, Any]:
    low, high = errors.expected_wrong_interval
    return {
        "expected_wrong": round(errors.expected_wrong, 1),
        "interval": [round(low, 1), round(high, 1)],
        "flagged": int(errors.is_wrong.sum()),
        "sharpening": round(errors.sharpening, 3),
    }


def probs(
    folder: Path, labels: str, seed: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Out-of-sample probabilities of a linear softmax in folds and of a GP by leave-one-out; rounds."""
    data, _ = load(folder, labels, seed, None)
    model = model_for(data, int(data.y.max()) + 1, device)
    arrays, seconds, rounds = {}, {}, []
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        seconds[name], began = round(time.perf_counter() - began, 1), time.perf_counter()

    linear = hetsngp.out_of_sample_probs(model, data, method="deterministic", seed=seed, progress=False)
    arrays["linear"] = linear.probs
    lap("linear, 5 folds")
    gp = hetsngp.out_of_sample_probs(model, data, method="sngp", seed=seed, progress=False)
    arrays["gp"] = gp.probs
    lap("gp, leave-one-out")

    def on_round(number: int, errors: LabelErrors, loss: float) -> None:
        rounds.append({"validation NLL": round(loss, 4), **describe(errors)})
        arrays[f"wrong after round {number}"] = errors.wrong_probability
        arrays[f"suggested after round {number}"] = errors.suggested.astype(np.uint8)
        print(labels, seed, number, rounds[-1], flush=True)

    found = hetsngp.correct_labels(model, data, method="sngp", seed=seed, progress=False, on_round=on_round)
    lap("correction, all rounds")
    about = {
        "how": gp.how,
        "amplitude": gp.amplitude,
        "rounds": rounds,
        "round": found.round,
        "seconds": seconds,
    }
    return {**about, "amplitude after": found.amplitude}, arrays


def heads(
    folder: Path, labels: str, seed: int, device: torch.device, method: MethodName
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Test of a method, trained on the given labels and on corrected ones."""
    data, true = load(folder, labels, seed, IMAGES)
    test = FeatureSet.load(folder / "cifar10-test.safetensors")
    votes = load_cifar10h().double()
    model, results = model_for(data, 10, device), {}

    def fit(name: str, data: Any, about: dict[str, Any], **options: Any) -> None:
        began = time.perf_counter()
        hetsngp.fit_head(model, data, method=method, seed=seed, progress=False, **options)
        seconds = round(time.perf_counter() - began, 1)
        results[name] = measure(model, test, votes) | options | about | {"seconds": seconds}
        print(labels, seed, method, name, results[name], flush=True)

    fit("direct", data, {})
    # Label errors of GP heads are found by sngp from one fit, those of the others by themselves in folds.
    finder: MethodName = "sngp" if method in GPS else method
    began = time.perf_counter()
    found = hetsngp.correct_labels(model, data, method=finder, seed=seed, progress=False)
    about = {
        **describe(found.errors),
        "round": found.round,
        "losses": list(found.losses),
        "how": found.how,
        "suggested accuracy": float((torch.from_numpy(found.errors.suggested) == true).double().mean()),
        "correction seconds": round(time.perf_counter() - began, 1),
    }
    if method in GPS:
        chosen = hetsngp.out_of_sample_probs(model, data, method="sngp", seed=seed, progress=False).amplitude
        fit("direct, amplitude by given labels", data, {}, amplitude=chosen)
        fit("corrected", found.features, about, amplitude=found.amplitude)
    else:
        fit("corrected", found.features, about)
    return results, {}


def shared(
    folder: Path, labels: str, seed: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every head on labels that sngp has corrected, where ``heads`` has those without a GP on their own."""
    data, _ = load(folder, labels, seed, IMAGES)
    test = FeatureSet.load(folder / "cifar10-test.safetensors")
    votes, model, results = load_cifar10h().double(), model_for(data, 10, device), {}
    found = hetsngp.correct_labels(model, data, method="sngp", seed=seed, progress=False)
    assert found.features is not None
    for method in METHODS:
        gp = method in GPS
        amplitude = {"amplitude": found.amplitude} if gp else {}
        ways = {} if gp else {"direct": data}  # in ``heads``
        for way, train in (ways | {"corrected by sngp": found.features}).items():
            hetsngp.fit_head(model, train, method=method, seed=seed, progress=False, **amplitude)
            results[f"{method}, {way}"] = measure(model, test, votes)
            print(labels, seed, method, way, results[f"{method}, {way}"], flush=True)
    return results | {"correction": {"round": found.round, **describe(found.errors)}}, {}


def measure(model: hetsngp.Classifier, test: FeatureSet, votes: Tensor) -> dict[str, float]:
    """On clean test labels, and against people's votes for the test images."""
    view, device = model.on_features(), model.temperature.device
    found = hetsngp.Prediction.cat([view.predict(h.float().to(device)) for h in test.h.split(1000)])
    people = votes / votes.sum(1, keepdim=True)
    entropy = -(people * people.clamp_min(1e-12).log()).sum(1).numpy()
    out = {}
    for name, p in (("", found.probs.cpu()), ("clean_probs ", found.clean_probs.cpu())):
        out |= {
            f"{name}accuracy": metrics.accuracy(p, test.y),
            f"{name}nll": metrics.nll(p, test.y),
            f"{name}ece": metrics.ece(p, test.y),
            f"{name}votes nll": float(-(people * p.double().log()).sum(1).mean()),
        }
    for name in ("total", "data", "model"):
        out[f"{name} uncertainty, Spearman"] = spearman(
            getattr(found, f"{name}_uncertainty").cpu().double().numpy(), entropy
        )
    return out


def uncertainty(
    folder: Path, labels: str, seed: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every uncertainty of each test image, against the entropy of people's votes."""
    data, _ = load(folder, labels, seed, IMAGES)
    test = FeatureSet.load(folder / "cifar10-test.safetensors")
    model, results, arrays = model_for(data, 10, device), {}, {}
    found = hetsngp.correct_labels(model, data, method="sngp", seed=seed, progress=False)
    chosen = hetsngp.out_of_sample_probs(model, data, method="sngp", seed=seed, progress=False).amplitude
    assert found.features is not None
    ways: dict[str, tuple[FeatureSet, dict[str, Any]]] = {
        "deterministic, direct": (data, {"method": "deterministic"}),
        "hetsngp, direct": (data, {"method": "hetsngp", "amplitude": chosen}),
        "hetsngp, corrected": (found.features, {"method": "hetsngp", "amplitude": found.amplitude}),
    }
    for name, (train, options) in ways.items():
        hetsngp.fit_head(model, train, seed=seed, progress=False, **options)
        view = model.on_features()
        parts = [view.predict(h.float().to(device)) for h in test.h.split(1000)]
        prediction = hetsngp.Prediction.cat(parts).numpy()
        own = {key: np.asarray(getattr(prediction, key), dtype=np.float32) for key in UNCERTAINTIES}
        results[name] = against_people(own)
        arrays |= {f"{name}: {key}": value for key, value in own.items()}
        arrays |= {f"{name}: {key}": getattr(prediction, key) for key in ("probs", "clean_probs")}
        print(labels, seed, name, results[name], flush=True)
    return results, arrays


def against_people(values: dict[str, np.ndarray]) -> dict[str, Any]:
    """Spearman correlation with the entropy of people's votes, also where the other kind is held fixed."""
    votes = load_cifar10h().double()
    people = votes / votes.sum(1, keepdim=True)
    entropy = -(people * people.clamp_min(1e-12).log()).sum(1).numpy()
    out: dict[str, Any] = {name: spearman(value, entropy) for name, value in values.items()}
    for one, other in itertools.permutations(("data_uncertainty", "model_uncertainty")):
        a, b = values[one], values[other]
        if a.std() > 0 and b.std() > 0:
            r, with_other, between = out[one], out[other], spearman(a, b)
            rest = ((1 - with_other**2) * (1 - between**2)) ** 0.5
            out[f"{one} given {other}"] = (r - with_other * between) / max(rest, 1e-12)
    return out


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic) if a.std() > 0 else 0.0


def folds(
    folder: Path, labels: str, seed: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same head by leave-one-out, in 5 and in 10 folds, at the amplitude that leave-one-out chooses."""
    data, true = load(folder, labels, seed, IMAGES)
    model, given, results, arrays = model_for(data, 10, device), data.y, {}, {}
    amplitude = None
    for name, count in (("leave-one-out", None), ("5 folds", FOLDS), ("10 folds", 2 * FOLDS)):
        began = time.perf_counter()
        fixed: dict[str, Any] = {} if amplitude is None else {"amplitude": amplitude}
        found = hetsngp.out_of_sample_probs(
            model, data, method="sngp", folds=count, seed=seed, progress=False, **fixed
        )
        amplitude, p = found.amplitude, torch.from_numpy(found.probs)
        arrays[name], suspicion = found.probs, 1 - p.gather(1, given[:, None]).squeeze(1)
        results[name] = {
            "given nll": metrics.nll(p, given),
            "given accuracy": metrics.accuracy(p, given),
            "true accuracy": metrics.accuracy(p, true),
            "auroc": metrics.auroc(suspicion[given == true], suspicion[given != true]),
            "amplitude": amplitude,
            "seconds": round(time.perf_counter() - began, 1),
        }
        print(labels, seed, name, results[name], flush=True)
    for name in ("5 folds", "10 folds"):
        own = [np.log(arrays[key][np.arange(len(given)), given.numpy()]) for key in ("leave-one-out", name)]
        results[name]["Spearman with leave-one-out"] = spearman(*own)
    return results, {}


def write(file: Path, about: dict[str, Any], arrays: dict[str, Any]) -> None:
    if arrays:
        # In 16 bits logarithms keep three digits of small probabilities and of what large ones lack to 1.
        small = {
            name: np.log(np.maximum(v, 1e-12)).astype(np.float16) if v.ndim == 2 else v
            for name, v in arrays.items()
        }

        def save(part: Path) -> None:
            with open(part, "wb") as handle:
                np.savez_compressed(handle, **small)

        replace_file(file.with_suffix(".npz"), save)
    write_text(file.with_suffix(".json"), json.dumps(about, indent=1) + "\n")


STAGES: dict[str, Callable[..., tuple[dict[str, Any], dict[str, Any]]]] = {
    "probs": probs,
    "heads": heads,
    "folds": folds,
    "uncertainty": uncertainty,
    "shared": shared,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, default=Path("out/label_noise"), help="folder of the features")
    parser.add_argument("--results", type=Path, help="where results are written; default: OUT/results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=list(LABELS), choices=LABELS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="for heads")
    args = parser.parse_args()
    device, results = torch.device(args.device), args.results or args.out / "results"
    results.mkdir(parents=True, exist_ok=True)
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    methods = [(method,) for method in args.methods] if args.stage == "heads" else [()]
    # CIFAR-100's images are all of those with labels by people: none is left to test heads on.
    names = [labels for labels in args.only if args.stage == "probs" or labels != "cifar100"]
    for labels, seed, method in itertools.product(names, args.seeds, methods):
        file = results / "-".join([args.stage, labels, str(seed), *method])
        if not file.with_suffix(".json").is_file():
            about, arrays = STAGES[args.stage](args.out, labels, seed, device, *method)
            write(file, {"device": name, **versions(), "result": about}, arrays)


if __name__ == "__main__":
    main()
