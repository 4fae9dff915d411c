"""Noisy circles trained by two versions of the package: NLL of training and test labels, early and late.

    python benchmarks/circles.py --before PATH/src --out benchmarks/results     # 12 minutes on two cores

The heteroscedastic network of ``hetsngp demo``, for as many epochs. NLL of the training labels and of test
labels drawn like them: after the last epoch, and after the epoch of the lowest NLL on the held-out points,
which the demo does not look for. Every fifth epoch is measured; nothing is calibrated.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from training_loss import package, start_workers, work, write

EVERY = 5
SHOWN = ("train", "test", "best_train", "best_test", "best_epoch")


def train(job: dict[str, Any]) -> dict[str, float]:
    """Train a network; NLLs in nats after the last epoch and after the best on the held-out points."""
    import hetsngp
    from hetsngp import metrics
    from hetsngp.data.datasets.synthetic import make_task
    from hetsngp.fitting.loop import train as fit
    from hetsngp.nn.backbones import ResidualMLP
    from hetsngp.paper.synthetic.experiment import SETTINGS

    torch.set_num_threads(1)
    settings, task = SETTINGS["noisy_circles"], make_task("noisy_circles", job["seed"])
    epochs = job["epochs"] or settings.epochs
    generator = torch.Generator().manual_seed(job["seed"])
    model = hetsngp.build(
        job["method"],
        ResidualMLP(2, settings.width, settings.depth, generator=generator),
        task.num_classes,
        generator=generator,
        dataset_size=len(task.train),
        rank=settings.rank,
        temperature=settings.temperature,
    )
    seen: list[dict[str, float]] = []

    def look(result: Any) -> None:
        if result.epoch % EVERY and result.epoch != epochs:
            return
        parts = {"train": task.train, "held_out": task.held_out, "test": task.test}
        nll = {name: metrics.nll(model.predict_probs(part.x), part.y) for name, part in parts.items()}
        seen.append({"epoch": float(result.epoch), **nll})
        model.train()

    data = TensorDataset(task.train.x, task.train.y)
    loader = DataLoader(data, settings.batch_size, shuffle=True, generator=generator)
    given = {"lr": settings.lr, "weight_decay": settings.weight_decay, "generator": generator}
    fit(model, loader, epochs=epochs, on_epoch=look, **given)
    last, best = seen[-1], min(seen, key=lambda at: at["held_out"])
    return last | {f"best_{name}": value for name, value in best.items()}


def answer(job: dict[str, Any]) -> Any:
    """Do one job of a worker."""
    return package() if job["what"] == "package" else train(job)


def table(rows: list[dict[str, Any]]) -> str:
    """Means over the seeds, and the difference of the versions with its standard error."""
    versions = [name for name in rows[0] if name != "seed"]
    lines = ["| NLL | " + " | ".join(versions) + " | difference |", "|---" * (len(versions) + 2) + "|"]
    for name in SHOWN:
        columns = {v: [row[v][name] for row in rows] for v in versions}
        change = [b - a for a, b in zip(columns.get("before", []), columns["after"], strict=False)]
        error = statistics.stdev(change) / len(change) ** 0.5 if len(change) > 1 else float("nan")
        cells = [f"{statistics.mean(values):.4f}" for values in columns.values()]
        cells.append(f"{statistics.mean(change):+.4f} ± {error:.4f}" if change else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", help="folder of another version of the package, measured beside it")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for circles.json")
    parser.add_argument("--method", default="heteroscedastic", choices=("deterministic", "heteroscedastic"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(200, 210)))
    parser.add_argument("--epochs", type=int, help="instead of the demo's, for a quick look")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(answer)
        return
    workers, packages = start_workers(args.before, __file__)
    rows: list[dict[str, Any]] = []
    result = {"torch": torch.__version__, "packages": packages, "method": args.method, "rows": rows}
    for seed in args.seeds:
        job = {"what": "train", "method": args.method, "seed": seed, "epochs": args.epochs}
        with ThreadPoolExecutor() as pool:  # a version has its own process
            found = pool.map(lambda worker, job=job: worker.ask(**job), workers.values())
            rows.append({"seed": seed, **dict(zip(workers, found, strict=True))})
        print(rows[-1], flush=True)
        write(args.out / "circles.json", result)
    print(table(rows))
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    main()
