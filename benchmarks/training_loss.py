"""Training loss with wide label noise: bias and spread of its value and gradients, and its time.

    python benchmarks/training_loss.py --out benchmarks/results                    # the package Python finds
    python benchmarks/training_loss.py --before PATH/src --out benchmarks/results  # both, interleaved
    python benchmarks/training_loss.py --before PATH/src --device cuda             # times on a GPU too
    python benchmarks/training_loss.py --training-points 2 8 16                    # other numbers of points

``functional.link.softmax_nll`` as the heads call it in training (its own number of points, or 64 where it has
no default; ``decorrelate``), at the widths of the audit in integration.md. d is constant and equal to sd, the
entries of V are N(0, sd²/R), R = 15, so that each part has a standard deviation of sd. Mean logits are
N(0, 9) plus a margin for one class; a fifth of the labels are another class, uniformly. The margin grows with
the noise (MARGIN), or every label would be as probable as another: it is what brings the true ∂L/∂log d near
the audit's. That and ∂L/∂log V are derivatives in a scale of all of d or V, mean over the examples.

Reference, in float64 and without the package (:func:`reference`): given the noise of the other classes,
p_y is a one-dimensional integral over the noise of y, tabulated; the other K − 1 + R coordinates take 2^18
(sd 3: 2^20) antithetic random points. Its standard errors are in the JSON. :func:`quadrature_loss`,
which integrates the whole diagonal as in integration.md and takes Sobol points for the factor, checks it on a
few examples. A reference is made once (CPU, one thread: 4 minutes for K = 100, 16 for K = 1,000) and read
from the JSON afterwards.

Bias: mean over examples and seeds minus the reference; ± its standard error, over seeds, with that of the
reference. "rms": of one example at one seed, around the reference. "spread": over seeds, of a batch's mean.
The gradient in the mean logits is compared at the label and the 15 other classes of largest mean; its rms is
relative to the length of the true one, and so is its bias, the rms over examples of the mean over seeds.

Times are medians of loss and gradient in (mean, var, factor), B = 128, float32. Both packages are measured in
turn, in processes that live all the time, so that other load meets both.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

RANK, BATCH, SHOWN = 15, 128, 16
POINTS_0_1 = 64  # nn/heads.TRAIN_POINTS of 0.1, whose softmax_nll has no default
WIDTHS = (0.5, 1.5, 3.0)
MEAN_WIDTH = 3.0
MARGIN = {(100, 0.5): 9.0, (100, 1.5): 9.0, (100, 3.0): 15.0}
MARGIN |= {(1000, 0.5): 15.0, (1000, 1.5): 17.0, (1000, 3.0): 21.0}
EXAMPLES = {10: 40, 100: 40, 1000: 20}
REFERENCE_POINTS, SEEDS = {3.0: 2**20}, 128  # else 2^18
CHECK = {100: (5, 2**10), 1000: (5, 2**8)}  # examples and points of the check, four times
BLOCK = 2**16  # elements of a working block
NAMES = ("loss", "log_d", "log_V")


class Problem(NamedTuple):
    """u ~ N(mean, sd²I + VVᵀ) and labels: (B, K), number, (B, K, R), (B,)."""

    mean: Tensor
    sd: float
    factor: Tensor
    y: Tensor


def margin(classes: int, sd: float) -> float:
    return MARGIN.get((classes, sd), 4.0 + 4.0 * sd)


def problem(classes: int, sd: float, examples: int, seed: int = 0) -> Problem:
    g = torch.Generator().manual_seed(seed)
    kind: dict[str, Any] = {"generator": g, "dtype": torch.float64}
    mean = MEAN_WIDTH * torch.randn(examples, classes, **kind)
    likely = torch.randint(classes, (examples,), generator=g)
    mean[torch.arange(examples), likely] += margin(classes, sd)
    wrong, y = math.ceil(examples / 5), likely.clone()
    y[:wrong] = (likely[:wrong] + torch.randint(1, classes, (wrong,), generator=g)) % classes
    factor = sd / math.sqrt(RANK) * torch.randn(examples, classes, RANK, **kind)
    # What the package gets, in float32, and the reference must be the same numbers.
    return Problem(mean.float().double(), sd, factor.float().double(), y)


def shown_classes(p: Problem) -> Tensor:
    """The label, and the other classes of largest mean: (B, SHOWN)."""
    label = p.y.unsqueeze(1)
    others = p.mean.scatter(1, label, -math.inf).topk(min(SHOWN, p.mean.shape[1]) - 1).indices
    return torch.cat([label, others], 1)


# --- references, independent of the package ---------------------------------------------------------------


def normal_grid(step: float = 0.05, end: float = 12.0) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the trapezoid rule for E g(ε)."""
    z = torch.arange(-end, end + step / 2, step, dtype=torch.float64)
    return z, torch.softmax(-0.5 * z.square(), 0)


class Table(NamedTuple):
    """Functions of one variable (n, F) on a grid of equal steps, interpolated linearly."""

    start: float
    step: float
    values: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x (…) → (…, F)."""
        at = ((x - self.start) / self.step).clamp(0, len(self.values) - 1.001)
        low = at.long()
        return torch.lerp(self.values[low], self.values[low + 1], (at - low).unsqueeze(-1))


def logistic_table(sd: float) -> Table:
    """log E σ(m + sd·ε), and its derivatives in m and log sd."""
    z, weight = normal_grid()
    m = torch.arange(-90, 90, 0.01, dtype=torch.float64)
    x = m.unsqueeze(1) + sd * z
    value, slope = torch.sigmoid(x), torch.sigmoid(x) * torch.sigmoid(-x)
    total = value @ weight
    return Table(
        -90, 0.01, torch.stack([total.log(), slope @ weight / total, slope @ (weight * sd * z) / total], 1)
    )


@torch.no_grad()
def reference(p: Problem, points: int, seed: int = 1) -> dict[str, Any]:
    """Loss and gradients of each example, and their standard errors; see the docstring of this file."""
    generator = torch.Generator().manual_seed(seed)
    table, (examples, classes) = logistic_table(p.sd), p.mean.shape
    shown, pairs = shown_classes(p), max(1, min(points // 16, BLOCK // classes))  # 8 blocks or more
    blocks = math.ceil(points / 2 / pairs)
    out: dict[str, list[Any]] = {name: [] for name in (*NAMES, "mean", "errors")}
    for i in range(examples):
        sums = []
        for _ in range(blocks):
            own = p.sd * torch.randn(pairs, classes, generator=generator, dtype=torch.float64)
            common = torch.randn(pairs, RANK, generator=generator, dtype=torch.float64) @ p.factor[i].mT
            sums.append(
                sum(_label_terms(p, i, sign * own, sign * common, table, shown[i]) for sign in (1, -1))
            )
        terms = torch.stack(sums) / (2 * pairs)  # type: ignore[arg-type]
        share = terms.mean(0)[0]
        ratios = terms.mean(0) / share
        ratios[0] = share.log()
        spread = (terms - terms[:, :1] * ratios)[:, 1:]
        errors = torch.cat([terms[:, :1], spread], 1).std(0) / share / math.sqrt(blocks)
        for name, value in zip(NAMES, (-ratios[:3]).tolist(), strict=True):
            out[name].append(value)
        out["mean"].append((-ratios[3:]).tolist())
        out["errors"].append(errors[:3].tolist())
    return {**out, "points": 2 * pairs * blocks}


def _label_terms(p: Problem, i: int, own: Tensor, common: Tensor, table: Table, shown: Tensor) -> Tensor:
    """Sums over points of p_y, and of its derivatives in log d, log V and the shown mean logits."""
    label = int(p.y[i])
    u = p.mean[i] + own + common
    u[:, label] = -math.inf
    top = u.amax(1, keepdim=True)
    q = u.sub_(top).exp_()
    size = q.sum(1)
    value, slope, in_scale = table(p.mean[i, label] + common[:, label] - top.squeeze(1) - size.log()).unbind(
        1
    )
    value = value.exp()
    pull = value * slope / size  # of the others' shares q/size
    in_d = value * in_scale - pull * (q * own).sum(1)
    in_v = value * slope * common[:, label] - pull * (q * common).sum(1)
    in_mean = -(pull @ q)
    in_mean[label] = (value * slope).sum()
    return torch.cat([torch.stack([value.sum(), in_d.sum(), in_v.sum()]), in_mean[shown]])


def hazard_table(sd: float) -> Table:
    """log φ(x) and log a(x) at x = μ + t: φ = E exp(−e^{x + sd·ε}), a = −φ′."""
    z, weight = normal_grid()
    x = torch.arange(-70, 90, 0.005, dtype=torch.float64)
    pieces = []
    for part in x.split(2048):
        at = (part.unsqueeze(1) + sd * z).clamp_max(700)
        exp = at.exp()
        below = -torch.expm1(-exp) @ weight
        log_phi = torch.where(below < 0.5, torch.log1p(-below), (weight.log() - exp).logsumexp(1))
        pieces.append(torch.stack([log_phi, (weight.log() + at - exp).logsumexp(1)], 1))
    return Table(-70, 0.005, torch.cat(pieces))


@torch.no_grad()
def quadrature_loss(p: Problem, points: int, in_d: float = 1.0, in_v: float = 1.0, seed: int = 0) -> Tensor:
    """−log E p_y with d and V multiplied by numbers, from E[p_y | factor] = ∫ (a_y/φ_y) ∏ φ_k dt and Sobol
    points of the factor: (B,).
    """
    sd = p.sd * in_d
    table, classes = hazard_table(sd), p.mean.shape[1]
    tau = torch.arange(-15 - 7 * sd, 6 + 5 * sd, 0.4, dtype=torch.float64)
    eps = torch.quasirandom.SobolEngine(RANK, scramble=True, seed=seed).draw(points, dtype=torch.float64)
    eps = torch.special.ndtri(eps.clamp(1e-12, 1 - 1e-12))
    out = []
    for mean, factor, label in zip(p.mean, in_v * p.factor, p.y, strict=True):
        total = torch.zeros((), dtype=torch.float64)
        for part in eps.split(max(1, 2**22 // (classes * len(tau)))):
            s = mean + part @ factor.mT
            x = (s - s.logsumexp(1, keepdim=True)).unsqueeze(2) + tau
            log_phi, log_a = table(x).unbind(-1)
            total += (log_a[:, label] - log_phi[:, label] + log_phi.sum(1)).exp().sum() * 0.4
        out.append(-(total / points).log())
    return torch.stack(out)


def quadrature_reference(p: Problem, points: int, seed: int = 0, by: float = 0.01) -> dict[str, Tensor]:
    """The same by :func:`quadrature_loss`, derivatives by central differences: (B,) each."""

    def slope(name: str) -> Tensor:
        low, high = (quadrature_loss(p, points, seed=seed, **{name: math.exp(s)}) for s in (-by, by))
        return (high - low) / (2 * by)

    return {"loss": quadrature_loss(p, points, seed=seed), "log_d": slope("in_d"), "log_V": slope("in_v")}


def check_reference(p: Problem, found: dict[str, Any], examples: int, points: int) -> dict[str, Any]:
    """Largest difference of the references on a few examples, and the largest in standard errors of both."""
    few = torch.linspace(0, len(p.y) - 1, examples).long()  # wrong labels come first
    part = Problem(p.mean[few], p.sd, p.factor[few], p.y[few])
    seeds = [quadrature_reference(part, points, seed) for seed in range(4)]
    out: dict[str, Any] = {}
    for at, name in enumerate(NAMES):
        values = torch.stack([each[name] for each in seeds])
        gap = (torch.tensor(found[name], dtype=torch.float64)[few] - values.mean(0)).abs()
        error = (values.var(0) / len(seeds) + torch.tensor(found["errors"])[few, at].square()).sqrt()
        out[name] = {"largest": float(gap.max()), "in standard errors": float((gap / error).max())}
    return out


def key(classes: int, sd: float) -> str:
    return f"K {classes}, sd {sd}, margin {margin(classes, sd)}"


def make_reference(
    classes: int, sd: float, points: int, examples: int, check: tuple[int, int]
) -> dict[str, Any]:
    p = problem(classes, sd, examples)
    start = time.perf_counter()
    found = reference(p, points)
    spent = time.perf_counter() - start
    gaps = check_reference(p, found, *check)
    for name in ("mean", "errors", *NAMES):
        found[name] = torch.tensor(found[name], dtype=torch.float64).mul(1e6).round().div(1e6).tolist()
    return {"classes": classes, "sd": sd, **found, "gap to quadrature": gaps, "seconds": spent}


# --- the package ------------------------------------------------------------------------------------------


def nll(
    p: Problem, mean: Tensor, var: Tensor, factor: Tensor, seed: int, points: int | None = None
) -> Tensor:
    """The package's loss of each example, as in training; with another number of points than its own."""
    from hetsngp.functional.link import softmax_nll
    from hetsngp.types import UtilityNormal

    given = inspect.signature(softmax_nll).parameters["num_samples"].default is not inspect.Parameter.empty
    options: dict[str, Any] = {"num_samples": points} if given else {"num_samples": POINTS_0_1}
    utility = UtilityNormal(mean, var, factor)
    return softmax_nll(utility, p.y.to(mean.device), seed=seed, decorrelate=True, **options)


def estimates(p: Problem, seeds: int, points: int | None = None) -> dict[str, Tensor]:
    """The package's loss and gradients: (seeds, B) each, in the mean (seeds, B, SHOWN)."""
    out: dict[str, list[Tensor]] = {name: [] for name in (*NAMES, "mean")}
    shown = shown_classes(p)
    for seed in range(seeds):
        mean = p.mean.float().requires_grad_()
        in_d, in_v = (torch.ones(len(p.y), 1, requires_grad=True) for _ in range(2))
        var, factor = (p.sd * in_d).square().expand_as(mean), p.factor.float() * in_v[..., None]
        loss = nll(p, mean, var, factor, seed, points)
        grads = torch.autograd.grad(loss.sum(), (in_d, in_v, mean))
        values = (loss.detach(), grads[0].squeeze(1), grads[1].squeeze(1), grads[2].gather(1, shown))
        for name, value in zip(out, values, strict=True):
            out[name].append(value.double())
    return {name: torch.stack(values) for name, values in out.items()}


def errors(found: dict[str, Tensor], truth: dict[str, Any]) -> dict[str, Any]:
    """Bias, its standard error, rms of an example and spread of a batch's mean, of each quantity."""
    out: dict[str, Any] = {}
    for at, name in enumerate(NAMES):
        value, true = found[name], torch.tensor(truth[name], dtype=torch.float64)
        spread, reference_error = value.mean(1).std(), torch.tensor(truth["errors"])[:, at].norm() / len(true)
        out[name] = {
            "true": float(true.mean()),
            "mean": float(value.mean()),
            "bias": float(value.mean() - true.mean()),
            "bias error": float((spread.square() / len(value) + reference_error.square()).sqrt()),
            "rms": float((value - true).square().mean().sqrt()),
            "spread": float(spread),
        }
    value, true = found["mean"], torch.tensor(truth["mean"], dtype=torch.float64)
    length = true.square().sum(1).mean().sqrt()
    # The variance of the mean over seeds is no bias.
    bias = (value.mean(0) - true).square().sum(1) - value.var(0).sum(1) / len(value)
    rms = (value - true).square().sum(2).mean().sqrt()
    out["mean"] = {"bias": float(bias.mean().clamp_min(0).sqrt() / length), "rms": float(rms / length)}
    return out


def seconds(
    classes: int, sd: float, threads: int, device: str, repeats: int, points: int | None = None
) -> list[float]:
    """Times of loss and gradient in mean, var and factor."""
    torch.set_num_threads(threads)
    p = problem(classes, sd, BATCH)
    p = p._replace(y=p.y.to(device))
    mean, factor = (t.float().to(device).requires_grad_() for t in (p.mean, p.factor))
    var = torch.full_like(mean, sd**2).requires_grad_()
    out = []
    for seed in range(repeats):
        start = time.perf_counter()
        torch.autograd.grad(nll(p, mean, var, factor, seed, points).mean(), (mean, var, factor))
        if device != "cpu":
            torch.cuda.synchronize()
        out.append(time.perf_counter() - start)
    return out


def answer(job: dict[str, Any]) -> Any:
    """Do one job of a worker."""
    if job["what"] == "package":
        return package()
    if job["what"] == "errors":
        torch.set_num_threads(1)
        truth = job["truth"]
        p = problem(truth["classes"], truth["sd"], len(truth["loss"]))
        return errors(estimates(p, job["seeds"], job.get("points")), truth)
    return seconds(**{name: value for name, value in job.items() if name != "what"})


# --- processes with a version of the package each ---------------------------------------------------------


def package() -> dict[str, str]:
    """Version of the package, and a digest by which two can be told apart."""
    import hetsngp

    folder, digest = Path(hetsngp.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return {"version": hetsngp.__version__, "digest": digest.hexdigest()[:16]}


class Worker:
    """Process with one version of the package, which answers jobs; ``options`` are part of each."""

    def __init__(self, source: str | None, script: str = __file__, **options: Any) -> None:
        self.options = options
        environment = os.environ | ({} if source is None else {"PYTHONPATH": source})
        command = [sys.executable, script, "--worker"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, **job: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(self.options | job), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that measures ended at {job['what']}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work(answer: Callable[[dict[str, Any]], Any]) -> None:
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def start_workers(before: str | None, script: str = __file__) -> tuple[dict[str, Worker], dict[str, Any]]:
    """Workers by version, and their packages."""
    sources = ({"before": before} if before else {}) | {"after": None}
    workers = {name: Worker(source, script) for name, source in sources.items()}
    packages = {name: worker.ask(what="package") for name, worker in workers.items()}
    if len({found["digest"] for found in packages.values()}) < len(packages):
        print("before and after are the same package: look at PYTHONPATH", flush=True)
    return workers, packages


def write(path: Path, result: Any) -> None:
    """Write JSON so that a reader finds all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result) + "\n")
    os.replace(part, path)


# --- results ----------------------------------------------------------------------------------------------


def measure_times(
    workers: dict[str, Worker], job: dict[str, Any], rounds: int, repeats: int, budget: float = math.inf
) -> dict[str, float]:
    """Median seconds by version, a few repetitions of each in turn; fewer rounds past ``budget`` seconds."""
    found: dict[str, list[float]] = {name: [] for name in workers}
    for worker in workers.values():
        worker.ask(what="time", repeats=1, **job)
    start = time.perf_counter()
    for _ in range(rounds):
        for name, worker in workers.items():
            found[name] += worker.ask(what="time", repeats=repeats, **job)
        if time.perf_counter() - start > budget:
            break
    return {name: statistics.median(times) for name, times in found.items()}


def table(result: dict[str, Any]) -> str:
    versions = list(result["packages"])
    lines = ["| K, sd | quantity | true | " + " | ".join(f"{v}: bias" for v in versions)]
    lines[0] += " | " + " | ".join(f"{v}: rms, spread" for v in versions) + " |"
    lines.append("|---" * (3 + 2 * len(versions)) + "|")
    titles = {"loss": "L", "log_d": "∂L/∂log d", "log_V": "∂L/∂log V", "mean": "∂L/∂μ, relative"}
    for row in result["errors"]:
        for name, title in titles.items():
            each = [row[version][name] for version in versions]
            true = f"{each[0]['true']:.4f}" if "true" in each[0] else ""
            bias = [f"{e['bias']:+.4f}" + (f" ± {e['bias error']:.4f}" if "true" in e else "") for e in each]
            rms = [f"{e['rms']:.3f}" + (f", {e['spread']:.4f}" if "spread" in e else "") for e in each]
            lines.append(
                f"| {row['classes']}, {row['sd']} | {title} | {true} | " + " | ".join(bias + rms) + " |"
            )
    lines += ["", "| K, sd | device, threads | " + " | ".join(f"{v}, ms" for v in versions) + " | ratio |"]
    lines.append("|---" * (3 + len(versions)) + "|")
    for row in result["times"]:
        times = [row[version] for version in versions]
        ratio = f"{row['after'] / row['before']:.2f}" if "before" in row else ""
        where = f"{row['device']}, {row['threads']}"
        cells = [f"{row['classes']}, {row['sd']}", where, *(f"{1000 * t:.2f}" for t in times), ratio]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/benchmarks"), help="folder for training_loss.json"
    )
    parser.add_argument(
        "--before", help="folder that holds another version of the package, measured beside it"
    )
    parser.add_argument("--classes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--sd", type=float, nargs="+", default=list(WIDTHS))
    parser.add_argument("--device", default="cpu", help="where times are measured")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=12, help="times of each version in turn")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions in a turn")
    parser.add_argument(
        "--training-points", type=int, nargs="+", default=[], help="other numbers of points of the factor"
    )
    parser.add_argument("--points", type=int, help="points of a missing reference")
    parser.add_argument("--examples", type=int, help="examples of a missing reference")
    parser.add_argument("--references-only", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(answer)
        return
    path = args.out / "training_loss.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    references: dict[str, Any] = old.get("references", {})

    settings = [(classes, sd) for classes in args.classes for sd in args.sd]
    torch.set_num_threads(1)
    for classes, sd in settings:
        name = key(classes, sd)
        if name not in references:
            examples = args.examples or EXAMPLES.get(classes, 20)
            points = args.points or REFERENCE_POINTS.get(sd, 2**18)
            few, check = CHECK.get(classes, (5, 2**10))
            check_sizes = min(few, examples), min(check, points)
            references[name] = made = make_reference(classes, sd, points, examples, check_sizes)
            shown = ", ".join(f"{n} {statistics.mean(made[n]):.4f}" for n in NAMES)
            print(f"reference {name}: {shown}; {made['gap to quadrature']}", flush=True)
            write(path, {**old, "references": references})
    if args.references_only:
        return
    workers, packages = start_workers(args.before)
    for count in args.training_points:
        workers[f"{count} points"] = Worker(None, points=count)
        packages[f"{count} points"] = packages["after"]
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device != "cpu" else "cpu",
        "packages": packages,
        "errors": [],
        "times": [],
        "references": references,
    }
    for classes, sd in settings:
        truth = references[key(classes, sd)]
        row = {
            name: worker.ask(what="errors", truth=truth, seeds=args.seeds) for name, worker in workers.items()
        }
        result["errors"].append({"classes": classes, "sd": sd, **row})
        for device in dict.fromkeys(("cpu", args.device)):
            for threads in args.threads if device == "cpu" else args.threads[:1]:
                job = {"classes": classes, "sd": sd, "threads": threads, "device": device}
                times = measure_times(workers, job, args.rounds, args.repeats)
                result["times"].append({**job, **times})
        write(path, result)
    for worker in workers.values():
        worker.close()
    print(table(result))


if __name__ == "__main__":
    main()
