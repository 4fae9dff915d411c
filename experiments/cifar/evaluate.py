"""The whole report on CIFAR-100: accuracy, calibration, near and far OOD, all 15 corruptions at 5 severities.

    export HETSNGP_DATA=...     # cifar100/, cifar10/, scenes/, frost/
    python experiments/cifar/evaluate.py --seeds 0 1 2                     # one H200: some 20 minutes
    python experiments/cifar/evaluate.py --methods deterministic --epochs 2 --depth 10 --width 1 --images 2000

WRN-16-8 trained by the recipe of benchmarks/training.py on 45,000 images, calibrated on 5,000 others; test
images are only measured. Near: CIFAR-10's test images, far: the scenes. The paper's networks have a corrupted
accuracy of .455; ours shows that our corruptions are as hard as the published ones. Results:
experiments/cifar/results/, and there a folder with report and pictures for each run (one is kept here).
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch

import hetsngp
from hetsngp.data.corrupted import Mapped, open_corrupted
from hetsngp.data.device_loader import Augmentation, DeviceLoader
from hetsngp.data.images import ImageArrays
from hetsngp.data.sources import open_images
from hetsngp.evaluation import evaluate
from hetsngp.evaluation.store import write_json
from hetsngp.nn.backbones import WideResNet
from hetsngp.recipes import METHODS
from hetsngp.training import Engine, Hardware, Plan, Schedule

HERE = Path(__file__).parent
HELD_OUT = 0.1


def train(method: str, seed: int, options: Any, engine: Engine, images: ImageArrays) -> tuple[Any, Any]:
    """The fitted model, and the loader it was trained with."""
    train_set, held_out_set = images.split(HELD_OUT, seed=seed)
    batch = min(512, len(train_set) // 4)
    loader = DeviceLoader(train_set, batch, shuffle=True, augment=Augmentation(), seed=seed)
    held_out = DeviceLoader(held_out_set, 1000, mean=loader.mean, std=loader.std)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    backbone = WideResNet(options.depth, options.width, generator=generator)
    model = hetsngp.build(method, backbone, images.num_classes)
    warmup = min(2.0, options.epochs / 5)
    rate = Schedule(options.epochs, lr=0.1, weight_decay=5e-4, optimizer="sgd", warmup=warmup, smooth=True)
    trained = engine.train(model, loader, Plan(rate, bound_every=10, seed=seed), show=False)
    engine.fit_posterior(trained.model, loader, held_out)
    return trained.model, loader


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="deterministic,hetsngp", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--images", type=int, default=None, help="of the training images, for a look")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    precision = "bf16-mixed" if gpu else "32-true"
    engine = Engine(Hardware(1, precision=precision, channels_last=True, compile=gpu))
    images, near = open_images("cifar100", "train"), open_images("cifar10", "test")
    test, far = open_images("cifar100", "test"), open_images("scenes", "test", size=32)
    if options.images is not None:
        images = images.split(options.images)[1]
    damaged = open_corrupted("cifar100-c")
    network = f"WRN-{options.depth}-{options.width}"
    for seed in options.seeds:
        for method in options.methods.split(","):
            began = time.perf_counter()
            model, loader = train(method, seed, options, engine, images)
            trained = time.perf_counter() - began

            def batches(data: ImageArrays, loader: DeviceLoader = loader) -> DeviceLoader:
                clean = DeviceLoader(data, 1000, mean=loader.mean, std=loader.std)
                return clean.to(engine.device, channels_last=True)

            folder = options.out / f"{method}-{seed}"
            report = evaluate(
                model,
                batches(test),
                ood={"CIFAR-10 (near)": batches(near), "scenes (far)": batches(far)},
                corrupted=Mapped(damaged, batches, about=f"{loader.mean.tolist()} {loader.std.tolist()}"),
                title=f"{METHODS[method].title}, {network} on CIFAR-100, seed {seed}",
                out=folder,
            )
            print(report, flush=True)
            about = {"method": method, "seed": seed, "epochs": options.epochs, "training_seconds": trained}
            write_json(options.out / f"{method}-{seed}.json", {**about, "report": report.to_dict()})
            shutil.rmtree(folder / "parts")


if __name__ == "__main__":
    main()
