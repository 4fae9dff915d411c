"""HetSNGP with very many classes: parameters, memory and time of each kind of label noise.

    python benchmarks/classes.py --device cuda --out benchmarks/results      # half a minute on one H200
    python benchmarks/classes.py --classes 1000 --batch 8 --rank 6           # quick, on a CPU

The backbone is one hidden layer of 768 units, so that the head is measured. 21,843 is the
number of classes of ImageNet-21k, R = 50 the paper's rank there. Times are medians and ratios
to the deterministic head of the same run; memory is the peak of a training step and of a prediction, with
weights, gradients and Adam's state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hetsngp
from hetsngp.files import write_json

WIDTH = 768
HEADS = {
    "deterministic": ("deterministic", "low_rank"),
    "low_rank": ("hetsngp", "low_rank"),
    "parameter_efficient": ("hetsngp", "parameter_efficient"),
    "feature": ("hetsngp", "feature"),
}


class Layer(nn.Module):
    num_features = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


def timed(work: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float]:
    """Median seconds, and the peak of memory in GiB (0 on a CPU)."""
    work()
    times = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return statistics.median(times), peak


def measure(head: str, classes: int, args: argparse.Namespace) -> dict[str, float]:
    device = torch.device(args.device)
    method, noise = HEADS[head]
    torch.manual_seed(0)
    model = hetsngp.build(method, Layer(), classes, noise=noise, rank=args.rank, dataset_size=10**6).to(
        device
    )
    x = torch.randn(args.batch, WIDTH, device=device)
    y = torch.randint(classes, (args.batch,), device=device)
    optimizer = torch.optim.Adam(model.parameter_groups(0.0), lr=1e-3)
    points = torch.Generator().manual_seed(0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model.loss(x, y, generator=points).backward()
        optimizer.step()

    train, train_memory = timed(step, device, args.repeats)
    hetsngp.fit_posterior(model, [(x, y)])
    predict, predict_memory = timed(lambda: model.predict(x), device, args.repeats)
    probs, _ = timed(lambda: model.predict_probs(x), device, args.repeats)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_ms": 1e3 * train,
        "predict_ms": 1e3 * predict,
        "probs_ms": 1e3 * probs,
        "train_gib": train_memory,
        "predict_gib": predict_memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--classes", default="1000,21843")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rank", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for classes.json")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    print("| classes | head | parameters | training step | predict | probs | GiB to train | GiB to predict |")
    print("|---|---|---|---|---|---|---|---|")
    for classes in map(int, args.classes.split(",")):
        rows = {head: measure(head, classes, args) for head in HEADS}
        own = rows["deterministic"]
        for head, row in rows.items():
            ratios = [row[f"{kind}_ms"] / own[f"{kind}_ms"] for kind in ("train", "predict", "probs")]
            row |= {f"{kind}_ratio": r for kind, r in zip(("train", "predict", "probs"), ratios, strict=True)}
            shown = " | ".join(f"{ratio:.1f}" for ratio in ratios)
            memory = f"{row['train_gib']:.2f} | {row['predict_gib']:.2f}"
            print(
                f"| {classes:,} | {head} | {row['parameters'] / 1e6:.1f} M | {shown} | {memory} |", flush=True
            )
        results[str(classes)] = rows
    if args.out is not None:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        versions = {"torch": torch.__version__, "hetsngp": hetsngp.__version__}
        args.out.mkdir(parents=True, exist_ok=True)
        content = {"device": name, "settings": settings, "versions": versions, "results": results}
        write_json(args.out / "classes.json", content)


if __name__ == "__main__":
    main()
