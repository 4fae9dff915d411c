"""Cost of each method relative to a deterministic network: parameters, a training step, a prediction.

    python benchmarks/methods.py --problems table --out benchmarks/results                     # half a minute
    python benchmarks/methods.py --problems images --batch 32 --steps 20 --rounds 3 --out benchmarks/results
    python benchmarks/methods.py --device cuda --out benchmarks/results                        # a minute

On a CPU one thread is used, and the second command takes four minutes.

Two problems: "images", WRN-16-4 on 32×32 images of 100 classes, and "table", a residual MLP (4 blocks of
width 128) on 16 columns and 10 classes. A model is first trained for a few steps on clusters with a tenth of
the labels wrong, and its posterior is fitted and calibrated, because the number of integration points of a
prediction depends on the learned noise and posterior. The methods take turns in every round, so that other
load of the machine affects all of them; a time is the median over rounds. Times are ratios to the
deterministic network of the same run, whose times are given in seconds. "predict" includes the split of
uncertainty; "probs" is the probabilities alone (``predict_probs``); "fixed" is "predict" at 256 integration
points for all methods, where the default chooses the number from a target error.

"Ensemble (3)" is an ensemble of three HetSNGP; its step is one of all three.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hetsngp
from hetsngp.files import write_json
from hetsngp.models.methods import METHODS
from hetsngp.nn.backbones import ResidualMLP, WideResNet

ENSEMBLE = "Ensemble (3)"
MEMBERS = 3
POINTS = 256
COLUMNS, BATCHES = 16, 12


def network(problem: str, generator: torch.Generator) -> nn.Module:
    if problem == "images":
        return WideResNet(16, 4, generator=generator)
    return ResidualMLP(COLUMNS, 128, 4, generator=generator)


def clusters(problem: str, count: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs around a centre for each class; a tenth of the labels are wrong."""
    shape = (3, 32, 32) if problem == "images" else (COLUMNS,)
    centres = torch.randn(classes, *shape, generator=torch.Generator().manual_seed(7))
    y = torch.randint(classes, (count,), generator=generator)
    x = centres[y] + torch.randn(count, *shape, generator=generator)
    wrong = torch.rand(count, generator=generator) < 0.1
    return x, torch.where(wrong, torch.randint(classes, (count,), generator=generator), y)


def make(problem: str, method: str, classes: int, size: int) -> Any:
    seeds = range(MEMBERS) if method == ENSEMBLE else [0]
    name = "hetsngp" if method == ENSEMBLE else method
    build = functools.partial(network, problem)
    return hetsngp.build_ensemble(name, build, classes, seeds=seeds, dataset_size=size)


class Contender:
    """Trained model to be timed."""

    def __init__(self, problem: str, method: str, args: argparse.Namespace) -> None:
        classes, device = (100 if problem == "images" else 10), torch.device(args.device)
        generator = torch.Generator().manual_seed(0)
        x, y = (part.to(device) for part in clusters(problem, (BATCHES + 4) * args.batch, classes, generator))
        train = BATCHES * args.batch
        self.x, self.y, self.test = x[:train], y[:train], x[-args.batch :]
        self.batch, self.device = args.batch, device
        model = make(problem, method, classes, train).to(device)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model = model if method == ENSEMBLE else model.members[0]
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(1e-4), lr=2e-3)
        self.generator = torch.Generator().manual_seed(1)
        for _ in range(args.steps):
            self.step()
        seen = list(zip(self.x.split(args.batch), self.y.split(args.batch), strict=True))
        hetsngp.fit_posterior(
            self.model, seen, calibration=[(x[train : -args.batch], y[train : -args.batch])]
        )
        self.model.eval()

    def step(self) -> None:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        start = int(torch.randint(BATCHES, (), generator=self.generator)) * self.batch
        rows = slice(start, start + self.batch)
        self.model.loss(self.x[rows], self.y[rows], generator=self.generator).backward()
        self.optimizer.step()

    def predict(self) -> Any:
        return self.model.eval().predict(self.test)

    def probs(self) -> Any:
        return self.model.eval().predict_probs(self.test)

    def fixed(self) -> Any:
        return self.model.eval().predict(self.test, num_samples=POINTS)

    def time(self, work: Callable[[], Any]) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def measure(problem: str, args: argparse.Namespace) -> dict[str, Any]:
    contenders = {method: Contender(problem, method, args) for method in (*METHODS, ENSEMBLE)}
    points = {method: float(c.predict().num_points.float().mean()) for method, c in contenders.items()}
    times: dict[str, dict[str, list[float]]] = {
        m: {"train": [], "predict": [], "probs": [], "fixed": []} for m in contenders
    }
    for _ in range(args.rounds):  # predictions first: a later step would make the posterior stale
        for method, contender in contenders.items():
            times[method]["predict"].append(contender.time(contender.predict))
            times[method]["probs"].append(contender.time(contender.probs))
            times[method]["fixed"].append(contender.time(contender.fixed))
    for _ in range(args.rounds):
        for method, contender in contenders.items():
            times[method]["train"].append(contender.time(contender.step))
    base = contenders["deterministic"].parameters
    seconds = {m: {kind: statistics.median(v) for kind, v in t.items()} for m, t in times.items()}
    return {
        method: {
            "parameters": c.parameters,
            "parameters_ratio": c.parameters / base,
            **{f"{kind}_ms": 1e3 * s for kind, s in seconds[method].items()},
            **{f"{kind}_ratio": s / seconds["deterministic"][kind] for kind, s in seconds[method].items()},
            "points": points[method],
        }
        for method, c in contenders.items()
    }


def table(results: dict[str, Any]) -> str:
    """Table in Markdown: ratios to deterministic, and of predictions to hetsngp."""
    lines = []
    for problem, methods in results.items():
        own, het = methods["deterministic"], methods["hetsngp"]
        lines += [
            f"{problem}: deterministic has {own['parameters']:,} parameters, a step takes "
            f"{own['train_ms']:.1f} ms, a prediction {own['predict_ms']:.1f} ms",
            "",
            "| method | parameters | training step | predict | probs | fixed | of hetsngp: predict | fixed |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for method, r in methods.items():
            ratios = [r[f"{kind}_ratio"] for kind in ("parameters", "train", "predict", "probs", "fixed")]
            ratios += [r[f"{kind}_ms"] / het[f"{kind}_ms"] for kind in ("predict", "fixed")]
            lines.append(f"| {method} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60, help="training steps before anything is timed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--problems", default="images,table")
    parser.add_argument("--out", type=Path, help="folder for methods-PROBLEMS-DEVICE.json")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    results = {problem: measure(problem, args) for problem in args.problems.split(",")}
    print(table(results))
    if args.out is not None:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread"
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        versions = {"torch": torch.__version__, "hetsngp": hetsngp.__version__}
        content = {"device": name, "settings": settings, "versions": versions, "results": results}
        args.out.mkdir(parents=True, exist_ok=True)
        problems = args.problems.replace(",", "-")
        write_json(args.out / f"methods-{problems}-{args.device}.json", content)


if __name__ == "__main__":
    main()
