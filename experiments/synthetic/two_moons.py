"""Two moons: a deterministic network and HetSNGP, and both kinds of doubt as a picture.

    python experiments/synthetic/two_moons.py --out out/demo      # about 20 s on two cores

One class's labels are noisy on purpose (15 % flipped where x₁ < 0), so that the data uncertainty has
something to show. Expected: HetSNGP's model uncertainty is low on the data and high everywhere else; its
data uncertainty is high on the noisy half only; the deterministic network is sure of itself far away.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import make_moons
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp.loop import EpochResult, train
from hetsngp.nn.backbones import ResidualMLP

METHODS = ("deterministic", "hetsngp")
OOD_CENTRE, REACH = (2.5, -1.75), 4.0


def moons(count: int, seed: int, flip: float = 0.15) -> tuple[Tensor, Tensor, Tensor]:
    """Points (n, 2), the labels as given, and the labels as they should be."""
    x, clean = make_moons(count, noise=0.1, random_state=seed)
    x, clean = torch.tensor(x, dtype=torch.float32), torch.tensor(clean)
    x = x + torch.where(clean[:, None] == 0, torch.tensor([-0.1, 0.2]), torch.tensor([0.1, -0.2]))
    generator = torch.Generator().manual_seed(seed)
    flipped = (torch.rand(count, generator=generator) < flip) & (x[:, 0] < 0)
    return x, torch.where(flipped, 1 - clean, clean), clean


def fit(method: str, seed: int, epochs: int) -> tuple[hetsngp.Classifier, float]:
    """Train on 1,000 points, fit and calibrate on 300 more."""
    torch.manual_seed(seed)
    x, y, _ = moons(1000, seed)
    held_x, held_y, _ = moons(300, seed + 1000)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    held_out = DataLoader(TensorDataset(held_x, held_y), batch_size=300)
    model = hetsngp.build(method, ResidualMLP(2, width=128, depth=4), num_classes=2, dataset_size=len(x))
    start = time.perf_counter()

    def show(result: EpochResult) -> None:
        if not sys.stdout.isatty() and result.epoch < result.epochs:
            return  # a log file gets the last line only
        print(
            f"\r  {method:<14} epoch {result.epoch:3d}/{result.epochs}  loss {result.loss:.3f}",
            end="",
            flush=True,
        )

    train(model, loader, epochs=epochs, lr=2e-3, on_epoch=show)
    report = hetsngp.fit_posterior(model, loader, calibration=held_out)
    print(f"\n  {report}")
    return model, time.perf_counter() - start


def auroc(inside: Tensor, outside: Tensor) -> float:
    """P(an outside score exceeds an inside one), ties counted half."""
    difference = outside[:, None] - inside
    return float((difference > 0).float().mean() + 0.5 * (difference == 0).float().mean())


def measure(model: hetsngp.Classifier, seed: int) -> dict[str, float]:
    """Numbers on 2,000 new points, an unseen cluster, and a ring at distance 10."""
    x, y, clean = moons(2000, seed + 2000)
    generator = torch.Generator().manual_seed(seed)
    cluster = torch.tensor(OOD_CENTRE) + 0.1 * torch.randn(200, 2, generator=generator)
    angle = torch.arange(16) * math.tau / 16
    ring = x.mean(0) + 10 * torch.stack([angle.cos(), angle.sin()], 1)
    inside, outside, far = model.predict(x), model.predict(cluster), model.predict(ring)
    nll = -inside.probs.gather(1, y[:, None]).log().mean()
    noisy = x[:, 0] < 0
    return {
        "accuracy on clean labels": float((inside.labels == clean).float().mean()),
        "NLL": float(nll),
        "OOD AUROC": auroc(inside.ood_score, outside.ood_score),
        "data doubt, noisy half": float(inside.data_uncertainty[noisy].mean()),
        "data doubt, clean half": float(inside.data_uncertainty[~noisy].mean()),
        "model doubt on the data": float(inside.model_uncertainty.mean()),
        "model doubt at distance 10": float(far.model_uncertainty.min()),
    }


def draw(models: dict[str, hetsngp.Classifier], seed: int, path: Path) -> None:
    """A row a method: confidence, data uncertainty, model uncertainty."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x, y, _ = moons(1000, seed)
    centre = x.mean(0).tolist()
    side = torch.linspace(-REACH, REACH, 120)
    grid = torch.cartesian_prod(centre[0] + side, centre[1] + side)
    extent = (centre[0] - REACH, centre[0] + REACH, centre[1] - REACH, centre[1] + REACH)
    panels = {
        "total: entropy of the prediction": "total_uncertainty",
        "data: the labels are noisy here": "data_uncertainty",
        "model: nothing like this was seen": "model_uncertainty",
    }
    figure, axes = plt.subplots(len(models), 3, figsize=(11, 3.5 * len(models)), layout="constrained")
    for row, (method, model) in zip(axes, models.items(), strict=True):
        prediction = model.predict(grid)
        for ax, (title, name) in zip(row, panels.items(), strict=True):
            values = getattr(prediction, name).view(120, 120).mT.numpy()
            image = ax.imshow(
                values,
                origin="lower",
                extent=extent,
                vmin=0,
                vmax=math.log(2),
                cmap="viridis",
                aspect="equal",
            )
            for label, colour in ((0, "#ff7ac6"), (1, "white")):
                part = x[y == label].numpy()
                ax.scatter(part[:, 0], part[:, 1], s=4, c=colour, linewidths=0, label=f"class {label}")
            ax.scatter(*OOD_CENTRE, marker="x", c="red", s=40, label="unseen cluster")
            ax.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[], title=title)
        row[0].set_ylabel(method, fontsize=12)
    axes[0, 0].legend(loc="lower left", fontsize=8, markerscale=2, facecolor="#555555", labelcolor="white")
    figure.colorbar(image, ax=axes, shrink=0.7, label="nats (two classes: at most log 2 = 0.69)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder for the figure and the numbers"
    )
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the network is too small for threads to pay
    models, numbers = {}, {}
    for method in METHODS:
        models[method], seconds = fit(method, args.seed, args.epochs)
        numbers[method] = {**measure(models[method], args.seed), "seconds": seconds}
    draw(models, args.seed, args.out / "two_moons.png")
    temporary = args.out / "two_moons.json.part"
    temporary.write_text(json.dumps({"seed": args.seed, "epochs": args.epochs, "results": numbers}, indent=2))
    os.replace(temporary, args.out / "two_moons.json")
    print(f"\n{'':28}" + "".join(f"{method:>16}" for method in METHODS))
    for name in numbers[METHODS[0]]:
        print(f"{name:28}" + "".join(f"{numbers[method][name]:16.3f}" for method in METHODS))
    print(f"\nfigure: {args.out / 'two_moons.png'}\nnumbers: {args.out / 'two_moons.json'}")


if __name__ == "__main__":
    main()
