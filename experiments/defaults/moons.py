"""Which posterior and which normalisation should a residual MLP get by default? Separable two moons decide.

    PYTHONPATH=src python experiments/defaults/moons.py --out experiments/defaults/results   # 2 min a seed

The bar: mean model uncertainty at most 0.05 nats on the training data, at least 0.3 at distance 10 in each of
16 directions; no calibration. Each network is trained once a seed, and every posterior is fitted to it.
Runs that are already in the results file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from pathlib import Path

import torch
from sklearn.datasets import make_moons
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp.fitting.loop import train
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.nn.posteriors import POSTERIOR_TYPES

NORMALIZATIONS, POSTERIORS, FLIPS = (
    ("rms", "polar", "direction"),
    ("kronecker", "exact", "shared"),
    (0.0, 0.2),
)
AMPLITUDE, EPOCHS, FEATURES = 10.0, 60, 1024
COLUMNS = (
    "model_on_data",
    "model_far_min",
    "variance_on_data",
    "variance_far_min",
    "confidence_far_max",
    "accuracy",
)


def moons(seed: int, flip: float, count: int = 800) -> tuple[Tensor, Tensor, Tensor]:
    """Standardised points, labels as given, and as they should be."""
    x, clean = make_moons(count, noise=0.1, random_state=seed)
    x, clean = torch.tensor(x, dtype=torch.float32), torch.tensor(clean)
    x = x + torch.where(clean[:, None] == 0, torch.tensor([-0.1, 0.2]), torch.tensor([0.1, -0.2]))
    flipped = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < flip
    return (x - x.mean(0)) / x.std(0), torch.where(flipped, 1 - clean, clean), clean


def ring(radius: float = 10.0, directions: int = 16) -> Tensor:
    angle = torch.arange(directions) * math.tau / directions
    return radius * torch.stack([angle.cos(), angle.sin()], 1)


def run(method: str, normalization: str, flip: float, seed: int) -> list[dict[str, object]]:
    """Train once, measure every posterior."""
    torch.manual_seed(seed)
    x, y, clean = moons(seed, flip)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    options = {"amplitude": AMPLITUDE, "normalization": normalization, "random_features": FEATURES}
    model = hetsngp.build(method, ResidualMLP(2), 2, dataset_size=len(x), **options)
    train(model, loader, epochs=EPOCHS, lr=2e-3)
    rows = []
    for kind in POSTERIORS:
        model.head.latent.posterior = POSTERIOR_TYPES[kind](2, FEATURES, "softmax")
        hetsngp.fit_posterior(model, loader)
        near, far = model.predict(x), model.predict(ring())
        values = (
            near.model_uncertainty.mean(),
            far.model_uncertainty.min(),
            near.latent_variance.mean(),
            far.latent_variance.min(),
            far.confidence.max(),
            (near.labels == clean).float().mean(),
        )
        key = {
            "method": method,
            "normalization": normalization,
            "posterior": kind,
            "flip": flip,
            "seed": seed,
        }
        rows.append({**key, **{name: float(v) for name, v in zip(COLUMNS, values, strict=True)}})
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """Mean ± standard error over seeds, Markdown."""
    groups: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in ("method", "flip", "normalization", "posterior")), []).append(
            row
        )
    lines = [
        "| method | flipped | normalization | posterior | seeds | " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * (5 + len(COLUMNS)),
    ]
    for key, members in groups.items():
        cells = []
        for name in COLUMNS:
            values = [float(m[name]) for m in members]  # type: ignore[arg-type]
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
            cells.append(f"{statistics.mean(values):.3f} ± {error:.3f}")
        lines.append(f"| {' | '.join(map(str, key))} | {len(members)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/defaults"), help="folder for moons.json and moons.md"
    )
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "moons.json"
    rows: list[dict[str, object]] = json.loads(file.read_text()) if file.exists() else []
    done = {(r["method"], r["normalization"], r["flip"], r["seed"]) for r in rows}
    for seed in range(args.seeds):
        for method in ("hetsngp", "sngp"):
            for flip in FLIPS:
                for normalization in NORMALIZATIONS:
                    if (method, normalization, flip, seed) in done:
                        continue
                    rows += run(method, normalization, flip, seed)
                    part = file.with_suffix(".part")
                    part.write_text(json.dumps(rows, indent=1))
                    os.replace(part, file)
                    print(f"seed {seed} {method} {normalization} flip {flip}", flush=True)
    text = table(rows)
    (args.out / "moons.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
