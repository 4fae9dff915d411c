"""Defaults of posterior_network and mimo, by held-out NLL; unseen clusters are scored beside it.

    python experiments/defaults/methods.py --out <folder> --jobs 2      # 10 minutes on two cores

* ``unit``: the length that posterior_network's density is measured in, as the log of its inverse for each
  dimension of the latent: 0 is the paper's (one standard deviation after BatchNorm), 1.42 makes a Gaussian
  cloud of entropy zero, 0.5 is in between.
* ``latent_dim`` at the chosen unit.
* ``batch_repetition`` and ``input_repetition`` of mimo and hetsngp_mimo.

Problems: two moons and the Gaussian mixture with the demo's recipes, on seeds that are not reported; wine
through the estimator; 100 clusters in 16 dimensions ("clusters").
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hetsngp
import hetsngp.nn.dirichlet as dirichlet_head
import hetsngp.paper.synthetic.experiment as synthetic
from hetsngp.files import write_json
from hetsngp.fitting.loop import train
from hetsngp.nn.backbones import ResidualMLP

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Job:
    study: str
    problem: str
    method: str
    seed: int
    unit: float
    options: Options


def on_synthetic(job: Job) -> dict[str, Any]:
    build = hetsngp.build
    synthetic.build = lambda *args, **kwargs: build(*args, **{**kwargs, **dict(job.options)})  # type: ignore
    run = synthetic.SyntheticRun(job.problem, job.method, job.seed, settings=synthetic.SETTINGS[job.problem])
    numbers = synthetic.train_and_measure(run).numbers
    kept = ("accuracy", "ood_auroc", "direction_auroc_mean", "direction_auroc_min")
    return {"held_out_nll": numbers["posterior"]["nll"], **{name: numbers[name] for name in kept}}


def on_table(job: Job) -> dict[str, Any]:
    from sklearn import datasets

    X, y = getattr(datasets, f"load_{job.problem}")(return_X_y=True)
    clf = hetsngp.HetSNGPClassifier(job.method, random_state=job.seed, **dict(job.options))
    return {"held_out_nll": clf.fit(X, y).report_.nll}


def on_clusters(job: Job) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(job.seed)
    centres = torch.randn(100, 16, generator=generator)
    y = torch.randint(100, (6000,), generator=generator)
    x = centres[y] + 0.4 * torch.randn(6000, 16, generator=generator)
    backbone = ResidualMLP(16, 128, 3, generator=generator)
    model = hetsngp.build(job.method, backbone, 100, generator=generator, **dict(job.options))
    batches = list(zip(x[:5000].split(64), y[:5000].split(64), strict=True))
    train(model, batches, epochs=15, lr=2e-3, generator=generator)
    held_out = [(x[5000:5500], y[5000:5500])]
    report = hetsngp.fit_posterior(model, [(x[:5000], y[:5000])], calibration=held_out)
    test, far = model.predict(x[5500:]), model.predict(3 * torch.randn(500, 16, generator=generator))
    wins = (far.ood_score[:, None] > test.ood_score).float().mean()
    accuracy = (test.labels == y[5500:]).float().mean()
    return {"held_out_nll": report.nll, "accuracy": float(accuracy), "ood_auroc": float(wins)}


def carry_out(job: Job) -> dict[str, Any]:
    torch.set_num_threads(1)
    dirichlet_head.LOG_UNIT = job.unit
    kinds = {"wine": on_table, "clusters": on_clusters}
    start = time.process_time()
    numbers = kinds.get(job.problem, on_synthetic)(job)
    return {**numbers, "seconds": time.process_time() - start}


def jobs() -> list[Job]:
    chosen = dirichlet_head.LOG_UNIT
    seeds = {"two_moons": range(104, 108), "gaussian_mixture": range(104, 108)}
    found = []
    for problem in ("clusters", "wine", "two_moons", "gaussian_mixture"):
        for seed in seeds.get(problem, range(102, 104)):
            own = (problem, "posterior_network", seed)
            found += [Job("unit", *own, unit, ()) for unit in (0.0, 0.5, 1.42)]
            found += [Job("latent_dim", *own, chosen, (("latent_dim", dim),)) for dim in (3, 6, 16)]
    for problem in ("two_moons", "gaussian_mixture"):
        for method in ("mimo", "hetsngp_mimo"):
            for repeats, share in ((1, 0.0), (1, 0.5), (4, 0.0)):
                options = (("batch_repetition", repeats), ("input_repetition", share))
                found += [
                    Job("repetition", problem, method, seed, chosen, options) for seed in (100, 101, 102)
                ]
    return sorted(found, key=lambda job: (job.problem != "clusters", job.method != "hetsngp_mimo"))


def table(results: list[tuple[Job, dict[str, Any]]]) -> str:
    """Means over seeds."""
    groups = collections.defaultdict(list)
    for job, numbers in results:
        unit = f"unit {job.unit:g}" if job.study == "unit" else ""
        setting = unit or ", ".join(f"{name} {value:g}" for name, value in job.options)
        groups[job.study, job.problem, job.method, setting].append(numbers)
    lines = [
        "| study | problem | method | setting | seeds | held-out NLL | accuracy | AUROC | least of seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key in sorted(groups):
        runs = groups[key]
        nll = statistics.fmean(run["held_out_nll"] for run in runs)
        right = [run["accuracy"] for run in runs if run.get("accuracy") is not None]
        found = [run["ood_auroc"] for run in runs if run.get("ood_auroc") is not None]
        accuracy = f"{statistics.fmean(right):.3f}" if right else "–"
        auroc = f"{statistics.fmean(found):.3f} | {min(found):.3f}" if found else "– | –"
        lines.append(f"| {' | '.join(key)} | {len(runs)} | {nll:.3f} | {accuracy} | {auroc} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for methods.json and methods.md")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    todo = jobs()
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        results = list(zip(todo, pool.map(carry_out, todo), strict=True))
    args.out.mkdir(parents=True, exist_ok=True)
    content = [{**vars(job), "options": dict(job.options), **numbers} for job, numbers in results]
    versions = {"torch": torch.__version__, "hetsngp": hetsngp.__version__}
    write_json(args.out / "methods.json", {"versions": versions, "runs": content})
    (args.out / "methods.md").write_text(table(results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
