"""Which posterior and which normalisation should a convolutional network get by default? CIFAR-100 decides.

    HETSNGP_DATA=<data folder> PYTHONPATH=src python experiments/defaults/images.py --out <folder> --minutes 9

Each configuration trains a WRN-16-4 once a seed; every posterior is then fitted to the same network, on
cached features. OOD images are only scored, never chosen by. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from results import POSTERIORS, SCORES, auroc, calibration_error, finished, save, source_digest, write
from torch import Tensor, nn

import hetsngp
from hetsngp.nn.backbones.wide_resnet import WideResNet
from hetsngp.nn.latent import RandomFeatureGP
from hetsngp.nn.multi_input import widen_inputs
from hetsngp.nn.posteriors import POSTERIOR_TYPES

# Normalisations are compared without a spectral bound, which costs a third of a step; bounds then among them.
UNBOUNDED = {"spectral_bound": math.inf}
GP: dict[str, Any] = {"rank": 6, "amplitude": 10.0, "normalization": "direction", **UNBOUNDED}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "direction": ("hetsngp", GP),
    "polar": ("hetsngp", {**GP, "normalization": "polar"}),
    "rms": ("hetsngp", {**GP, "normalization": "rms"}),
    "deterministic": ("deterministic", {}),
    "heteroscedastic": ("heteroscedastic", {"rank": 6}),
    "sngp": ("sngp", {**GP}),
    "amplitude5": ("hetsngp", {**GP, "amplitude": 5.0}),
    "bound6": ("hetsngp", {**GP, "spectral_bound": 6.0}),
    "bound3": ("hetsngp", {**GP, "spectral_bound": 3.0}),
    "feature": ("hetsngp", {**GP, "noise": "feature"}),
    "posterior_network": ("posterior_network", {}),
    "mimo": ("mimo", {"batch_repetition": 4}),
    "mimo_parted": ("mimo", {"batch_repetition": 4}),
    "hetsngp_mimo_parted": ("hetsngp_mimo", {**GP, "batch_repetition": 4}),
}
PARTED = "_parted"  # not only tiled: random differences that cancel make the inputs unlike from the start
PAD, SIDE, CLASSES = 4, 32, 100
GUESS_S = 45.0  # a run's cost before one has been timed
LIBRARY = source_digest(Path(hetsngp.__file__).parent)  # of the code that was imported, not of later edits


@dataclass(frozen=True)
class Settings:
    """What a result depends on besides configuration and seed; finished runs are reused if these agree."""

    depth: int = 16
    width: int = 4
    random_features: int = 1024
    epochs: int = 20
    batch: int = 1024
    lr: float = 0.2
    weight_decay: float = 5e-4
    held_out: int = 5000
    per_class: int | None = None  # training images read of each class; None: all 500
    evaluated: int | None = None  # images of each test set; None: all
    num_samples: int | None = None  # integration points of a prediction; None: the library chooses


SMOKE = Settings(10, 1, 64, epochs=1, batch=64, held_out=200, per_class=6, evaluated=200, num_samples=128)


def read(paths: list[Path]) -> list[np.ndarray]:
    """Each file as (n, 32, 32, 3): strips as they are, photographs resized."""

    def one(path: Path) -> np.ndarray:
        image = Image.open(path).convert("RGB")
        if image.width != SIDE:
            image = image.resize((SIDE, SIDE), Image.Resampling.BOX)
        return np.asarray(image).reshape(-1, SIDE, SIDE, 3)

    if not paths:
        raise FileNotFoundError("no images: HETSNGP_DATA must hold cifar100/, cifar10/ and scenes/")
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # PIL decodes outside the interpreter's lock
        return list(pool.map(one, paths))


@dataclass(frozen=True)
class Data:
    """Training images are padded for cropping: (N, 40, 40, 3); ``out`` holds test, near and far."""

    train: Tensor
    train_labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor
    test_labels: Tensor
    out: dict[str, Tensor]


def load(root: Path, settings: Settings, device: torch.device) -> Data:
    def cifar100(split: str, rows: int | None) -> tuple[Tensor, Tensor]:
        paths = sorted((root / "cifar100").glob(f"{split}_*.webp"))
        strips = [strip[:rows] for strip in read(paths)]
        labels = [int(path.name.split("_")[1]) for path in paths]
        y = np.repeat(labels, [len(strip) for strip in strips])
        return torch.from_numpy(np.concatenate(strips)), torch.from_numpy(y)

    limit = settings.evaluated
    x, y = cifar100("train", settings.per_class)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))  # one split for every seed
    held, rest = order[: settings.held_out], order[settings.held_out :]
    test, test_labels = cifar100("test", None if limit is None else limit // CLASSES)
    near = np.concatenate(read(sorted((root / "cifar10").glob("test_*.webp"))))[:limit]
    far = np.concatenate(read(sorted((root / "scenes").glob("*/*.webp"))[:limit]))
    margin = ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0))
    train = torch.from_numpy(np.pad(x[rest].numpy(), margin, mode="reflect"))
    out = {"test": test, "near": torch.from_numpy(near), "far": torch.from_numpy(far)}
    moved = [t.to(device) for t in (train, y[rest], x[held], y[held], test_labels)]
    return Data(*moved, {name: t.to(device) for name, t in out.items()})


@functools.cache  # copied once: a copy from the host waits for the GPU
def pixel_statistics(device: torch.device) -> Tensor:
    """Mean and standard deviation of the CIFAR-100 training pixels: (2, 3)."""
    return torch.tensor([[0.5071, 0.4866, 0.4409], [0.2673, 0.2564, 0.2762]], device=device) * 255


def normalized(images: Tensor) -> Tensor:
    """(B, 32, 32, 3) uint8 → (B, 3, 32, 32) float32, which is channels_last in memory as it stands."""
    mean, std = pixel_statistics(images.device)
    return ((images - mean) / std).permute(0, 3, 1, 2)


def augmented_batches(data: Data, batch: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of whole batches: crop and flip as a single gather, no host synchronisation."""
    device, n = data.train.device, len(data.train)
    pixel = torch.arange(SIDE, device=device)
    order = torch.randperm(n, device=device, generator=generator)
    shift = torch.randint(0, 2 * PAD + 1, (2, n, 1), device=device, generator=generator)
    flip = torch.rand(n, 1, device=device, generator=generator) < 0.5
    rows = pixel + shift[0]
    columns = torch.where(flip, SIDE - 1 - pixel, pixel) + shift[1]
    for start in range(0, n - batch + 1, batch):
        i = order[start : start + batch]
        crops = data.train[i[:, None, None], rows[i][:, :, None], columns[i][:, None]]
        yield normalized(crops), data.train_labels[i]


def train(config: str, seed: int, data: Data, settings: Settings, compiled: bool) -> tuple[Any, float]:
    """The trained model and the mean loss of its last epoch."""
    device = data.train.device
    torch.manual_seed(seed)  # the linear and noise layers draw from the global generator
    host = torch.Generator().manual_seed(seed)  # on the CPU: drawing a seed from it does not wait for the GPU
    on_device = torch.Generator(device).manual_seed(seed)
    method, options = CONFIGS[config]
    backbone = WideResNet(settings.depth, settings.width, generator=host)
    if config.endswith(PARTED):
        widen_inputs(backbone, 3)  # so that build finds it done
        weight = backbone.stem.weight.detach()
        noise = torch.randn(3, len(weight), 3, *weight.shape[2:], generator=host)
        size = weight.square().mean().sqrt() * 3 / math.sqrt(3)  # independent inputs come out as one did
        parts = torch.cat(list(noise - noise.mean(0)), 1)
        backbone.stem.weight = nn.Parameter(weight + size * parts)
    counts = torch.bincount(data.train_labels.cpu(), minlength=CLASSES).tolist()
    options = {**options, "random_features": settings.random_features, "class_counts": counts}
    options["dataset_size"] = len(data.train)
    model = hetsngp.build(method, backbone, CLASSES, generator=host, **options).to(device).train()
    model.backbone.to(memory_format=torch.channels_last)
    if compiled:
        model.backbone(normalized(data.held_out[: settings.batch]))  # a bounded layer's first pass is eager
        model.backbone.compile()
    groups = model.parameter_groups(settings.weight_decay)
    optimizer = torch.optim.SGD(groups, lr=settings.lr, momentum=0.9, nesterov=True)
    per_epoch, step, losses = len(data.train) // settings.batch, 0, []
    for _ in range(settings.epochs):
        losses.clear()
        for x, y in augmented_batches(data, settings.batch, on_device):
            progress = max(0.0, (step - per_epoch) / max(1, per_epoch * (settings.epochs - 1)))
            rate = min(1.0, (step + 1) / per_epoch) * 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * rate
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model.loss(x, y, generator=host)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            step += 1
    return model.eval(), float(torch.stack(losses).mean())


@torch.no_grad()
def features(model: nn.Module, images: Tensor, rows: int = 1000) -> Tensor:
    """h of (N, 32, 32, 3) in float32: bf16 would round what the posterior is about."""
    return torch.cat([model.backbone(normalized(part)) for part in images.split(rows)])


def evaluate(model: Any, h: dict[str, Tensor], data: Data, settings: Settings, rows: int) -> dict[str, Any]:
    """Fit and calibrate the posterior that ``model`` has now, on cached features, and measure."""
    start = time.perf_counter()
    loader = zip(h["train"].split(5000), data.train_labels.split(5000), strict=True)
    report = hetsngp.fit_posterior(model, loader, calibration=[(h["held_out"], data.held_out_labels)])
    fit_seconds = time.perf_counter() - start

    def predict(name: str) -> hetsngp.Prediction:
        return hetsngp.Prediction.cat([model.predict(x, settings.num_samples) for x in h[name].split(rows)])

    test, y = predict("test"), data.test_labels
    result = {
        "accuracy": float((test.labels == y).float().mean()),
        "nll": float(-test.probs.gather(1, y[:, None]).clamp_min(1e-12).log().mean()),
        "ece": calibration_error(test.confidence, test.labels == y),
        "held_out_nll": report.nll,
        **{name: getattr(report, name) for name in ("temperature", "scale")},
        "points": float(test.num_points.float().mean()),
        "fit_seconds": fit_seconds,
        "report": asdict(report),
    }
    for name in ("near", "far"):
        foreign = predict(name)
        result |= {f"{name}_{s}": auroc(getattr(test, s), getattr(foreign, s)) for s in SCORES}
    return {**result, "evaluation_seconds": time.perf_counter() - start}


def run(config: str, seed: int, data: Data, settings: Settings, args: argparse.Namespace) -> dict[str, Any]:
    """Train once, then every posterior on the same network."""
    device, start = data.train.device, time.perf_counter()
    trained, loss = train(config, seed, data, settings, args.compile)
    seconds = time.perf_counter() - start  # reading the loss has waited for the GPU
    images = {"train": data.train[:, PAD:-PAD, PAD:-PAD], "held_out": data.held_out, **data.out}
    h = {name: features(trained, part) for name, part in images.items()}
    model = hetsngp.Classifier(nn.Identity(), trained.head, num_features=trained.num_features)
    temperature, latent = float(trained.temperature), getattr(trained.head, "latent", None)
    bounded = [layer for layer in trained.backbone.modules() if hasattr(layer, "spectral_sigma")]
    gaussian_process = isinstance(latent, RandomFeatureGP)
    posteriors = {}
    for kind in args.posteriors if gaussian_process else ("none",):
        model.temperature = temperature  # undo the calibration of the posterior before
        if gaussian_process:
            latent.posterior = POSTERIOR_TYPES[kind](CLASSES, settings.random_features, "softmax").to(device)
        posteriors[kind] = evaluate(model, h, data, settings, args.predict_rows)
    return {
        "config": config,
        "seed": seed,
        "recipe": str(CONFIGS[config]),  # as text: JSON has no infinity
        "settings": asdict(settings),
        "library": LIBRARY,
        "bounds": [(float(layer.spectral_sigma), float(layer.spectral_bound)) for layer in bounded],
        "machine": (torch.__version__, torch.cuda.get_device_name() if device.type == "cuda" else "cpu"),
        "train_loss": loss,
        "train_seconds": seconds,
        "seconds": time.perf_counter() - start,
        "posteriors": posteriors,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Posteriors and normalisations on CIFAR-100.")
    names, add = (lambda text: text.split(",")), parser.add_argument
    add("--out", type=Path, required=True, help="folder; one JSON a run goes to OUT/runs")
    add("--results", type=Path, help="all runs in one file, also read to resume (default OUT/results.json)")
    add("--configs", type=names, default=list(CONFIGS), help=",".join(CONFIGS))
    add("--posteriors", type=names, default=list(POSTERIORS), help=",".join(POSTERIORS))
    add("--seeds", type=lambda s: [int(i) for i in s.split(",")], help="default 0,1,2")
    add("--epochs", type=int)
    add("--num-samples", type=int, help="integration points of a prediction (default: the library chooses)")
    add("--predict-rows", type=int, default=10_000, help="rows of one predict call; speed and memory only")
    add("--minutes", type=float, default=math.inf, help="start no run that would end later than this")
    add("--compile", action="store_true", help="torch.compile the backbone")
    add("--smoke", action="store_true", help="a few images, one epoch, WRN-10-1: does it run?")
    add("--summarize", action="store_true", help="only make the table from what is finished")
    args = parser.parse_args()
    args.results = args.results or args.out / "results.json"
    args.seeds = args.seeds or ([0] if args.smoke else [0, 1, 2])
    base = SMOKE if args.smoke else Settings()
    samples = args.num_samples or base.num_samples
    args.settings = replace(base, epochs=args.epochs or base.epochs, num_samples=samples)
    for name, known in (("configs", CONFIGS), ("posteriors", POSTERIORS)):
        if unknown := set(getattr(args, name)) - set(known):
            parser.error(f"unknown {name}: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return args


def main() -> None:
    args, begin = arguments(), time.perf_counter()
    done = finished(args.out, args.results, asdict(args.settings))
    # Seeds outside: when time runs out, every configuration has the same seeds, or all but one.
    todo = [(c, s) for s in args.seeds for c in args.configs if (c, s) not in done]
    if todo and not args.summarize:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.backends.cudnn.benchmark = True
        data = load(Path(os.environ["HETSNGP_DATA"]), args.settings, device)
        print(f"{len(data.train)} training images read in {time.perf_counter() - begin:.0f} s", flush=True)
        longest = GUESS_S
        for count, (config, seed) in enumerate(todo):
            if time.perf_counter() - begin + longest > 60 * args.minutes:
                print(f"time is nearly out: {len(todo) - count} runs left for another call", flush=True)
                break
            result = run(config, seed, data, args.settings, args)
            longest = result["seconds"] if count == 0 else max(longest, result["seconds"])
            done[config, seed] = result
            write(args.out / "runs" / f"{config}-{seed}.json", result)
            save(args.results, done.values())
            first = next(iter(result["posteriors"].values()))
            cost = f"{result['train_seconds']:.0f} s training, {result['seconds']:.0f} s in all"
            quality = ", ".join(f"{name} {first[name]:.4g}" for name in ("accuracy", "nll", "points"))
            print(f"{config} seed {seed}: {cost}; {quality}", flush=True)
    print(save(args.results, done.values()), flush=True)


if __name__ == "__main__":
    main()
