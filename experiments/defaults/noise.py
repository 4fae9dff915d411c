"""How long should the features be that the noise heads read? Length 1 against √D, under SGD, on real images.

    HETSNGP_DATA=<data> PYTHONPATH=src python experiments/defaults/noise.py --out <folder>   # 5 min, one core

CIFAR-100, its first 20 classes at 16×16, 128 principal components, a small MLP; 9,000 images train, 1,000 are
held out and decide. Results are means over seeds; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import hetsngp
from hetsngp.nn.noise import LowRankNoise

CLASSES, COMPONENTS, EPOCHS, BATCH, HELD_OUT = 20, 128, 12, 128, 1000
CONFIGS = [
    ("deterministic", None),
    ("heteroscedastic", "1"),
    ("heteroscedastic", "sqrt(D)"),
    ("sngp", None),
    ("hetsngp", "1"),
    ("hetsngp", "sqrt(D)"),
]


class Network(nn.Sequential):
    """128 → 512 → 256 with BatchNorm and dropout: memorises if it may."""

    num_features = 256

    def __init__(self) -> None:
        first = (nn.Linear(COMPONENTS, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.3))
        super().__init__(*first, nn.Linear(512, 256), nn.BatchNorm1d(256), nn.ReLU())


def load(root: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whitened components of training and test images, and their labels."""

    def split(name: str) -> tuple[Tensor, Tensor]:
        strips = []
        for path in sorted((root / "cifar100").glob(f"{name}_*.webp"))[:CLASSES]:
            images = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 32, 32, 3)[:, ::2, ::2]
            strips.append(images.reshape(len(images), -1).astype(np.float32) / 255)
        y = np.repeat(np.arange(CLASSES), [len(s) for s in strips])
        return torch.from_numpy(np.concatenate(strips)), torch.from_numpy(y)

    (x, y), (test, test_y) = split("train"), split("test")
    mean = x.mean(0)
    _, values, vectors = torch.linalg.svd(x - mean, full_matrices=False)
    whiten = vectors[:COMPONENTS].mT / (values[:COMPONENTS] / math.sqrt(len(x)))
    return (x - mean) @ whiten, y, (test - mean) @ whiten, test_y


def run(method: str, length: str | None, seed: int, data: tuple[Tensor, ...]) -> dict[str, float]:
    """Train, calibrate, measure."""
    x, y, test, test_y = data
    torch.manual_seed(seed)
    options = {"spectral_bound": math.inf, "normalization": "direction", "dataset_size": len(x) - HELD_OUT}
    model = hetsngp.build(method, Network(), CLASSES, **options)
    noise = model.head.noise
    if isinstance(noise, LowRankNoise) and length == "sqrt(D)":
        stretch = noise.length
        noise.length, noise.longest = 1.0, noise.longest * stretch
        for layer in (m for m in noise.modules() if isinstance(m, nn.Linear)):
            layer.weight.data /= stretch  # the same noise at initialisation
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(9))
    held, rest = order[:HELD_OUT], order[HELD_OUT:]
    optimizer = torch.optim.SGD(model.parameter_groups(5e-4), lr=0.1, momentum=0.9, nesterov=True)
    steps = EPOCHS * (len(rest) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(EPOCHS):
        shuffled = rest[torch.randperm(len(rest), generator=generator)]
        for batch in shuffled[: len(rest) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            model.loss(x[batch], y[batch], generator=generator).backward()
            optimizer.step()
            schedule.step()
    report = hetsngp.fit_posterior(model, [(x[rest], y[rest])], calibration=[(x[held], y[held])])
    prediction = model.predict(test)
    return {
        "held-out NLL (mode)": report.nll_mode,
        "accuracy": float((prediction.labels == test_y).float().mean()),
        "NLL": float(-prediction.probs.gather(1, test_y[:, None]).log().mean()),
        "points": float(prediction.num_points.float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/defaults"), help="folder for noise.json")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "noise.json"
    done: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
    data = load(Path(os.environ["HETSNGP_DATA"]))
    for seed in range(args.seeds):
        for method, length in CONFIGS:
            key = f"{method}, length {length}, seed {seed}" if length else f"{method}, seed {seed}"
            if key not in done:
                done[key] = run(method, length, seed, data)
                part = file.with_suffix(".part")
                part.write_text(json.dumps(done, indent=1))
                os.replace(part, file)
                print(key, done[key], flush=True)
    columns = list(next(iter(done.values())))
    print("| method | noise reads length | " + " | ".join(columns) + " |\n|" + "---|" * (2 + len(columns)))
    for method, length in CONFIGS:
        prefix = f"{method}, length {length}, seed" if length else f"{method}, seed"
        rows = [value for key, value in done.items() if key.startswith(prefix)]
        means = [sum(row[c] for row in rows) / len(rows) for c in columns]
        print(f"| {method} | {length or '–'} | " + " | ".join(f"{m:.4g}" for m in means) + " |")


if __name__ == "__main__":
    main()
