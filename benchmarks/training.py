"""The training engine on one GPU: its epochs against the bare step, and hetsngp's against deterministic's.

    export HETSNGP_DATA=...
    python benchmarks/training.py --seeds 0 1 2 --out benchmarks/results            # one H200: 5 minutes
    python benchmarks/training.py --epochs 2 --depth 10 --width 1 --images 600 --batch 64  # quick, on a CPU

WRN-16-8 on CIFAR-100, 45,000 images to train on and 5,000 held out (to calibrate; nothing is chosen by test
images), by the recipe "cifar100": 30 epochs of SGD with Nesterov's momentum, batch 512, averaged weights,
bfloat16, channels_last, compiled. The bare step is forward, cross-entropy, backward and SGD of the same
compiled network on a batch that stays in place: no data, no augmentation, no loop around it. Seconds of an
epoch are the median without the first, which compiles. Methods run one after another in the same process, the
bare step before and after them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hetsngp.data.sources import open_images
from hetsngp.files import write_json
from hetsngp.nn.backbones import WideResNet
from hetsngp.nn.spectral import bounded_layers, measure_sigma
from hetsngp.paper.results import versions
from hetsngp.training import Engine, Hardware
from hetsngp.training.image_data import make_loaders
from hetsngp.training.images import make_model
from hetsngp.training.input_kinds import TaskData
from hetsngp.training.recipes.recipe import Recipe, read_recipe
from hetsngp.training.run_results import measure

HELD_OUT = 5000
STEPS = 60


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bare_step(options: Any, classes: int, device: torch.device) -> float:
    """Median seconds of a step."""
    torch.manual_seed(0)
    network = WideResNet(options.depth, options.width)
    model = nn.Sequential(network, nn.Linear(network.num_features, classes)).to(device)
    model.to(memory_format=torch.channels_last)
    if options.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4)
    x = torch.randn(options.batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(classes, (options.batch,), device=device)

    def steps(count: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16-mixed"):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        synchronize(device)
        return (time.perf_counter() - start) / count

    steps(3 if device.type == "cpu" else 20)
    return statistics.median(steps(1 if device.type == "cpu" else STEPS) for _ in range(5))


def largest_excess(model: Any) -> float:
    """Largest σ of the bounded layers over their bound c, σ of the weight as it is applied."""
    found = [0.0]
    for layer in bounded_layers(model.backbone).values():
        size = layer.spectral_v.shape[1:]
        sigma = float(measure_sigma(layer, size, iterations=100))
        applied = sigma * min(1.0, float(layer.spectral_bound) / float(layer.spectral_sigma))
        found.append(applied / float(layer.spectral_bound))
    return max(found)


def recipe_of(method: str, bound_every: int, options: Any, seed: int) -> Recipe:
    """Recipe "cifar100" with the settings that were asked for."""
    warmup = min(read_recipe("cifar100").config.schedule.warmup, options.epochs / 5)
    changes = [
        f"method={method}",
        f"seed={seed}",
        f"network=wrn-{options.depth}-{options.width}",
        f"batch_size={options.batch}",
        f"training.bound_every={bound_every}",
        f"schedule.epochs={options.epochs}",
        f"schedule.warmup={warmup}",
    ]
    if options.spectral_bound is not None:
        changes.append(f"options.spectral_bound={options.spectral_bound}")
    return read_recipe("cifar100", changes)


def train(
    method: str, bound_every: int, options: Any, engine: Engine, data: Any, seed: int
) -> dict[str, Any]:
    recipe = recipe_of(method, bound_every, options, seed)
    torch.manual_seed(seed)
    model, scale = make_model(recipe.task, data.num_classes, data.shape)
    loaders = make_loaders(recipe.task, data, scale, seed=seed)
    loader = loaders.train
    synchronize(engine.device)
    start = time.perf_counter()
    trained = engine.train(model, loader, recipe.config, show=True)
    synchronize(engine.device)
    whole = time.perf_counter() - start
    seconds = [float(row["seconds"] or 0) for row in trained.rows]
    start = time.perf_counter()
    engine.fit_posterior(trained.model, loaders.clean, loaders.held_out)
    synchronize(engine.device)
    posterior = time.perf_counter() - start
    result = {
        "method": method,
        "bound_every": bound_every,
        "seed": seed,
        "training_seconds": whole,
        "first_epoch_seconds": seconds[0],
        "epoch_seconds": statistics.median(seconds[1:] or seconds),
        "step_seconds": statistics.median(seconds[1:] or seconds) / len(loader),
        "posterior_seconds": posterior,
        "loss": trained.history[-1].loss,
        "largest_sigma_over_bound": largest_excess(trained.model),
        "held_out": measure(trained.model, loaders.held_out, engine),
        "test": measure(trained.model, loaders.test, engine),
    }
    print(result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--runs", default="deterministic,hetsngp:10", help="method, or method:bound_every")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--spectral-bound", type=float, default=None, help="in place of the default")
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--images", type=int, default=None, help="number of training images, for a quick run")
    parser.add_argument("--out", type=Path, default=None, help="folder for training.json")
    parser.add_argument("--name", default="training")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    options.compile, options.precision = on_gpu, "bf16-mixed" if on_gpu else "32-true"
    hardware = Hardware(devices=1, precision=options.precision, channels_last=True, compile=options.compile)
    engine = Engine(hardware)
    everything, test = (open_images(options.data, split) for split in ("train", "test"))
    if options.images is not None:
        everything = everything.split(options.images)[1]
        test = test.split(options.images // 5)[1]
    parts = everything.split(min(HELD_OUT, len(everything) // 5))
    data = TaskData(*parts, test, None, tuple(test.images.shape[1:]))
    before = bare_step(options, test.num_classes, engine.device)
    print(f"bare step {1000 * before:.2f} ms", flush=True)
    results = []
    for seed in options.seeds:
        for run in options.runs.split(","):
            method, _, every = run.partition(":")
            results.append(train(method, int(every or 1), options, engine, data, seed))
    after = bare_step(options, test.num_classes, engine.device)
    bare = (before + after) / 2
    for result in results:
        result["step_over_bare"] = result["step_seconds"] / bare
    first = [r for r in results if r["method"] == "deterministic"]
    for result in results:
        same = [r for r in first if r["seed"] == result["seed"]]
        result["epoch_over_deterministic"] = (
            result["epoch_seconds"] / same[0]["epoch_seconds"] if same else None
        )
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        **versions(),
        "options": {k: v for k, v in vars(options).items() if k != "out"},
        "bare_step_seconds": [before, after],
        "bare_epoch_of_50000_seconds": bare * 50000 / options.batch,
        "runs": results,
    }
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / f"{options.name}.json", report)
    for r in results:
        print(
            f"{r['method']:14} every {r['bound_every']}: step {1000 * r['step_seconds']:.2f} ms, "
            f"{r['step_over_bare']:.2f} of the bare step; test accuracy {r['test']['accuracy']:.4f}, "
            f"NLL {r['test']['nll']:.4f}, ECE {r['test']['ece']:.4f}; {r['training_seconds']:.0f} s to train"
        )


if __name__ == "__main__":
    main()
