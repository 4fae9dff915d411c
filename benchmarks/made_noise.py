"""Label noise that is known: how much of it each method finds, and the NLL that it costs.

    python benchmarks/made_noise.py --label before --device cuda --out benchmarks/results
    python benchmarks/made_noise.py --label after --device cuda --out benchmarks/results
    python benchmarks/made_noise.py --table --out benchmarks/results
    python benchmarks/made_noise.py --label before --quick                  # on a CPU, to try the script

The package is the one that Python finds, so one file measures two versions: ``before``, 64 points over all
K + R coordinates in training, and ``after``. ``--points`` gives the number of points instead: with very many
of them the version before shows where an exact integral would go. A finished run is a file below ``--parts``
and is not repeated; runs may be in parallel, each in its own process, by ``--methods`` and ``--seeds``.

A fixed teacher, seeded, makes the data. Inputs x ~ N(0, I) go through a random network with four features h.
The mean of the 100 logits is linear in h; their noise has a diagonal d(x) = softplus(affine) and a factor
V(x) = affine of rank 6, with a direction each along which the noise of all classes grows. A label is one draw
of softmax(u), u ~ N(μ, VVᵀ + diag(d²)), at temperature one. The student is given the features, so μ, d and V
of ``heteroscedastic`` have exactly the teacher's form, and what remains is the integral of the training loss.
Every batch is made anew: nothing can be memorised, and the minimum of an exact loss is the truth.

Labels alone do not determine the noise: with any other noise some mean gives every input the same
probabilities. What determines it here is that the mean is linear, which such a mean is not. The GP of
``hetsngp`` therefore has a long length scale, so that its functions are nearly linear; they remain more
flexible, and its noise is determined less well.

The softmax ignores what all logits have in common, so covariances are compared after the projection
P = I − 11ᵀ/K. "noise" is the root of mean tr PΣ̂P over mean tr PΣP, over test inputs; "diagonal" and "factor"
are the same for each part alone, and "mean" for the squared contrasts of the mean. A factor that is too wide
can make up for a diagonal that is too narrow, so that "noise" is near one where neither part is: "error",
mean ‖P(Σ̂ − Σ)P‖ over mean ‖PΣP‖ (Frobenius), and "correlation", of log tr PΣ̂P with log tr PΣP over inputs,
show that. Probabilities for NLL and ECE are plain Monte Carlo in float64 from the model's Gaussian
``model.utility(x)``, at the same points for every model and for the truth, and independent of the package's
integrals. Both are expectations over the labels' true distribution, from other points, as if a test label
were drawn infinitely often. "NLL − truth's" is the excess over the NLL of the true law.

All arms have the same settings: Adam, cosine schedule, no weight decay. They were chosen before there was an
``after``, in short runs on a CPU (500 steps, batches of 512): of ``lr`` .02, .05 and .1 the version before
has a validation NLL of 2.911, 2.877 and 2.867 with ``heteroscedastic``; .05 is used, since with .1 the GP's
mean changes so fast that the noise of ``hetsngp`` explains it. For the same reason β has a lower one. d
starts at one instead of the package's 0.13, in all arms, since a narrow d grows slowly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

METHODS = ("heteroscedastic", "hetsngp")
LABELS = ("before", "after")
TEACHER_SEED = 2023
# Seeds of inputs and of points: apart from those of training, 0 to 2.
TEST_SEED, VALIDATION_SEED, TRUTH_POINTS_SEED, POINTS_SEED = 10_001, 10_002, 10_003, 10_004
# Rows and points of one step of the Monte Carlo integral: 105 MiB in float64 for 100 classes.
ROWS, BLOCK = 512, 256
BINS = 15
NUMBERS = ("noise", "diagonal", "factor", "mean", "correlation", "error", "nll", "excess", "ece", "seconds")


@dataclass(frozen=True)
class Settings:
    """Sizes, noise and training of a run; equal for all arms of a table."""

    classes: int = 100
    rank: int = 6
    inputs: int = 16
    features: int = 4
    mean_std: float = 4.0
    """Standard deviation of a mean logit over inputs."""
    typical_diagonal: float = 1.0
    """d where the affine map is at its bias, before classes differ."""
    typical_factor: float = 1.2
    """Standard deviation of a logit from the constant part of V."""
    diagonal_slope: float = 3.5
    """Slope of softplus⁻¹(d) along the direction that all classes share, for z of typical length one."""
    class_slope: float = 1.5
    """Standard deviation of a class's own slopes."""
    steps: int = 8000
    batch: int = 2048
    lr: float = 0.05
    gp_lr_multiplier: float = 0.06
    random_features: int = 64
    length_scale: float = 8.0
    """ℓ of the GP; features are about 2.8 apart, so that linear parts are five times the quadratic ones."""
    amplitude: float = 16.0
    """a of the GP: linear parts then have a prior standard deviation of about four, as the true mean has."""
    start_diagonal: float = 1.0
    points: int | None = None
    """Integration points of a training step; None: as the package chooses."""
    test_inputs: int = 4096
    integral_points: int = 2**15


QUICK = {"steps": 100, "batch": 128, "test_inputs": 256, "integral_points": 2**10}


# --- the teacher ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """u ~ N(mean, diag(std²) + factor factorᵀ): (B, K), (B, K), (B, K, R)."""

    mean: Tensor
    std: Tensor
    factor: Tensor


class FeatureNetwork(nn.Module):
    """x → h: a random network of one hidden layer, centred and scaled to a mean square of one; all buffers,
    so that nothing is trained and a spectral bound finds nothing to bound.
    """

    hidden: Tensor
    bias: Tensor
    out: Tensor
    centre: Tensor
    scale: Tensor

    def __init__(self, inputs: int, features: int, generator: torch.Generator, width: int = 64) -> None:
        super().__init__()
        self.num_features = features
        self.register_buffer("hidden", torch.randn(inputs, width, generator=generator) / math.sqrt(inputs))
        self.register_buffer("bias", 0.3 * torch.randn(width, generator=generator))
        self.register_buffer("out", torch.randn(width, features, generator=generator) / math.sqrt(width))
        h = torch.tanh(torch.randn(2**16, inputs, generator=generator) @ self.hidden + self.bias) @ self.out
        self.register_buffer("centre", h.mean(0))
        self.register_buffer("scale", (h - h.mean(0)).square().mean().sqrt())

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.hidden + self.bias) @ self.out - self.centre) / self.scale


class Teacher(nn.Module):
    """The data: inputs, features, the law of the logits, and labels drawn by it."""

    mean_weight: Tensor
    diagonal_weight: Tensor
    diagonal_bias: Tensor
    factor_weight: Tensor
    factor_bias: Tensor

    def __init__(self, settings: Settings, seed: int = TEACHER_SEED) -> None:
        super().__init__()
        s, g = settings, torch.Generator().manual_seed(seed)
        self.inputs, self.rank = s.inputs, s.rank
        self.network = FeatureNetwork(s.inputs, s.features, g)
        along, across = (F.normalize(torch.randn(s.features, generator=g), dim=0) for _ in range(2))
        classes, ranks = (s.features, s.classes), (s.features, s.classes, s.rank)
        unit = s.typical_factor / math.sqrt(s.rank)
        factor_bias = unit * torch.randn(s.classes, s.rank, generator=g)
        tensors = {
            "mean_weight": s.mean_std / math.sqrt(s.features) * torch.randn(classes, generator=g),
            "diagonal_weight": s.diagonal_slope * along[:, None]
            + s.class_slope * torch.randn(classes, generator=g),
            "diagonal_bias": math.log(math.expm1(s.typical_diagonal))
            + 0.5 * torch.randn(s.classes, generator=g),
            "factor_weight": 3 * across[:, None, None] * factor_bias
            + 0.7 * unit * torch.randn(ranks, generator=g),
            "factor_bias": factor_bias,
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def draw_inputs(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, self.inputs, generator=generator, device=generator.device)

    def law(self, x: Tensor) -> Law:
        """True mean and noise at x, in the form of the package's low-rank noise."""
        h = self.network(x)
        z = h / math.sqrt(h.shape[1])
        z = z * (2 / z.norm(dim=1, keepdim=True).clamp_min(2))  # clipped as in hetsngp.nn.noise
        std = F.softplus(z @ self.diagonal_weight + self.diagonal_bias) + 1e-3
        factor = torch.einsum("bd,dkr->bkr", z, self.factor_weight) + self.factor_bias
        return Law(h @ self.mean_weight, std, factor)

    def draw_labels(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """One label for each input, by the largest of u + Gumbel noise: (B,)."""
        law = self.law(x)
        kind: dict[str, Any] = {"generator": generator, "device": x.device}
        noise = law.std * torch.randn(law.mean.shape, **kind)
        common = torch.randn(len(x), self.rank, 1, **kind)
        gumbel = -torch.empty_like(law.mean).exponential_(generator=generator).log()
        return (law.mean + noise + (law.factor @ common).squeeze(2) + gumbel).argmax(1)


# --- measuring ------------------------------------------------------------------------------------------


@torch.no_grad()
def probabilities(law: Law, points: int, seed: int) -> Tensor:
    """E softmax(u) by plain Monte Carlo in float64, new points for every ROWS inputs: (B, K)."""
    generator = torch.Generator(law.mean.device).manual_seed(seed)
    kind: dict[str, Any] = {"generator": generator, "device": law.mean.device, "dtype": torch.float64}
    classes, rank = law.factor.shape[1:]
    out = []
    for start in range(0, len(law.mean), ROWS):
        mean, std, factor = (t[start : start + ROWS].double() for t in (law.mean, law.std, law.factor))
        total = torch.zeros_like(mean)
        for done in range(0, points, BLOCK):
            size = min(BLOCK, points - done)
            own, common = torch.randn(size, classes, **kind), torch.randn(size, rank, **kind)
            u = torch.addcmul(mean.unsqueeze(1), std.unsqueeze(1), own)
            total += torch.softmax(u + common @ factor.mT, -1).sum(1)
        out.append(total / points)
    return torch.cat(out)


def contrasts(covariance: Tensor) -> Tensor:
    """PΣP with P = I − 11ᵀ/K: (B, K, K)."""
    centred = covariance - covariance.mean(-1, keepdim=True)
    return centred - centred.mean(-2, keepdim=True)


@torch.no_grad()
def compare_noise(law: Law, fitted: Law) -> dict[str, float]:
    """Size and shape of the fitted noise beside the true one; sizes are ratios of standard deviations."""
    sums: dict[str, list[Tensor]] = {}
    for start in range(0, len(law.mean), ROWS):
        rows = slice(start, start + ROWS)
        parts = []
        for each in (law, fitted):
            mean, std, factor = (t[rows].double() for t in (each.mean, each.std, each.factor))
            diagonal, common = contrasts(torch.diag_embed(std.square())), contrasts(factor @ factor.mT)
            centred = mean - mean.mean(1, keepdim=True)
            parts.append((diagonal, common, diagonal + common, centred.square().sum(1)))
        (d, v, both, mean), (d_fit, v_fit, both_fit, mean_fit) = parts
        measured = {
            "diagonal": (trace(d), trace(d_fit)),
            "factor": (trace(v), trace(v_fit)),
            "noise": (trace(both), trace(both_fit)),
            "mean": (mean, mean_fit),
            "error": (both.norm(dim=(1, 2)), (both_fit - both).norm(dim=(1, 2))),
        }
        for name, pair in measured.items():
            sums.setdefault(name, []).append(torch.stack(pair))
    whole = {name: torch.cat(pairs, 1) for name, pairs in sums.items()}
    out = {name: float(pair.mean(1)[1] / pair.mean(1)[0]) for name, pair in whole.items()}
    for name in ("diagonal", "factor", "noise", "mean"):
        out[name] = math.sqrt(out[name])
    out["correlation"] = float(torch.corrcoef(whole["noise"].log())[0, 1])
    return out


def trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def expected_nll(truth: Tensor, probs: Tensor) -> float:
    """−Σ_k p_k log p̂_k, mean over inputs."""
    smallest = torch.finfo(probs.dtype).tiny
    return float(-(truth * probs.clamp_min(smallest).log()).sum(1).mean())


def expected_ece(truth: Tensor, probs: Tensor) -> float:
    """Calibration error of the largest probability, BINS bins of equal width."""
    confidence, top = probs.max(1)
    correct = truth.gather(1, top.unsqueeze(1)).squeeze(1)
    bins = (confidence * BINS).long().clamp_max(BINS - 1)
    gaps = torch.zeros(BINS, dtype=probs.dtype, device=probs.device)
    return float(gaps.index_add_(0, bins, confidence - correct).abs().sum() / len(probs))


@torch.no_grad()
def law_of(model: Any, x: Tensor) -> Law:
    """The model's Gaussian over logits; the factor is what is not its diagonal."""
    utility = model.utility(x)
    factor = utility.factor
    dense = factor if isinstance(factor, Tensor) else factor.dense()
    return Law(utility.mean, utility.var.sqrt(), dense.expand(len(x), -1, -1))


class Examination:
    """Test or validation inputs with the truth about them."""

    def __init__(self, teacher: Teacher, count: int, points: int, seed: int, device: torch.device) -> None:
        self.points = points
        self.x = teacher.draw_inputs(count, torch.Generator(device).manual_seed(seed))
        self.law = teacher.law(self.x)
        self.truth = probabilities(self.law, self.points, TRUTH_POINTS_SEED)

    def quality(self, law: Law) -> dict[str, float]:
        """NLL, ECE and accuracy."""
        probs = probabilities(law, self.points, POINTS_SEED)
        correct = self.truth.gather(1, probs.argmax(1, keepdim=True))
        return {
            "nll": expected_nll(self.truth, probs),
            "ece": expected_ece(self.truth, probs),
            "accuracy": float(correct.mean()),
        }

    def noise(self) -> dict[str, Any]:
        """The teacher's noise: standard deviations of a logit, and how they vary over inputs."""
        diagonal, factor = self.law.std.square().mean(1), self.law.factor.square().sum(2).mean(1)
        std = (diagonal + factor).sqrt()
        levels = torch.tensor([0.05, 0.5, 0.95], device=std.device)
        return {
            "std": float((diagonal + factor).mean().sqrt()),
            "diagonal_std": float(diagonal.mean().sqrt()),
            "factor_std": float(factor.mean().sqrt()),
            "std_quantiles_5_50_95": [float(q) for q in std.quantile(levels)],
        }


# --- a run ----------------------------------------------------------------------------------------------


def make_student(method: str, teacher: Teacher, settings: Settings, seed: int, device: torch.device) -> Any:
    import hetsngp

    options: dict[str, Any] = {} if settings.points is None else {"num_samples": settings.points}
    model = hetsngp.build(
        method,  # type: ignore[arg-type]
        teacher.network,
        settings.classes,
        rank=settings.rank,
        random_features=settings.random_features,
        length_scale=settings.length_scale,
        amplitude=settings.amplitude,
        spectral_bound=math.inf,
        posterior="none",  # of millions of examples it would be narrow: measured is what training found
        dataset_size=settings.steps * settings.batch,
        generator=torch.Generator().manual_seed(seed),
        **options,
    ).to(device)
    start = math.log(math.expm1(settings.start_diagonal))
    with torch.no_grad():
        dict(model.named_parameters())["head.noise.diagonal.bias"].fill_(start)
    return model


def train(
    model: Any, teacher: Teacher, settings: Settings, seed: int, device: torch.device, show: Any
) -> None:
    """Adam on batches that are made anew; ``show(step, loss)`` eight times."""
    data = torch.Generator(device).manual_seed(seed)
    points = torch.Generator().manual_seed(seed)  # on the CPU: the package draws a seed from it
    groups = model.parameter_groups(0.0)
    for group in groups:
        group["lr"] = settings.lr * (settings.gp_lr_multiplier if group.get("no_weight_decay") else 1.0)
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    )
    model.train()
    total, since = torch.zeros((), device=device), 0
    for step in range(1, settings.steps + 1):
        x = teacher.draw_inputs(settings.batch, data)
        loss = model.loss(x, teacher.draw_labels(x, data), generator=points)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        total, since = total + loss.detach(), since + 1
        if step * 8 // settings.steps > (step - 1) * 8 // settings.steps:
            show(step, float(total) / since)
            total, since = torch.zeros((), device=device), 0


def one_run(label: str, method: str, seed: int, settings: Settings, device: torch.device) -> dict[str, Any]:
    teacher = Teacher(settings).to(device)
    count, points = settings.test_inputs, settings.integral_points
    test = Examination(teacher, count, points, TEST_SEED, device)
    model = make_student(method, teacher, settings, seed, device)
    name, curve = run_name(label, method, seed, settings), []
    start = time.perf_counter()

    def show(step: int, loss: float) -> None:
        seconds = time.perf_counter() - start
        found = compare_noise(test.law, law_of(model, test.x))
        curve.append({"step": step, "loss": loss, **found})
        sizes = " ".join(f"{part} {found[part]:.3f}" for part in ("noise", "diagonal", "factor", "mean"))
        print(f"{name}: step {step}, {seconds:.0f} s, loss {loss:.4f}, {sizes}", flush=True)

    train(model, teacher, settings, seed, device, show)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    validation = Examination(teacher, count // 4, points, VALIDATION_SEED, device)
    fitted, truth = law_of(model, test.x), test.quality(test.law)
    quality = test.quality(fitted)
    result = compare_noise(test.law, fitted) | quality | {"excess": quality["nll"] - truth["nll"]}
    print(f"{name}: noise {result['noise']:.3f} of the truth, excess NLL {result['excess']:.4f}", flush=True)
    return {
        "label": label,
        "method": method,
        "seed": seed,
        "settings": asdict(settings),
        **result,
        "validation_nll": validation.quality(law_of(model, validation.x))["nll"],
        "truth": truth | test.noise(),
        "curve": curve,
        "seconds": seconds,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "package": package_digest(),
    }


def package_digest() -> str:
    """SHA-256 of the package's source files, by which two versions can be told apart."""
    import hetsngp

    digest = hashlib.sha256()
    folder = Path(hetsngp.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


# --- results --------------------------------------------------------------------------------------------


def arm(label: str, points: int | None) -> str:
    return label if points is None else f"{label}-{points}"


def run_name(label: str, method: str, seed: int, settings: Settings) -> str:
    return f"{arm(label, settings.points)}-{method}-{seed}"


def write(path: Path, content: Any) -> None:
    """Write JSON so that a reader finds all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)


def finished_runs(parts: Path, merged: Path) -> dict[str, dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = json.loads(merged.read_text())["runs"] if merged.exists() else {}
    runs |= {path.stem: json.loads(path.read_text()) for path in sorted(parts.glob("*.json"))}
    return dict(sorted(runs.items()))


def merge(parts: Path, merged: Path) -> dict[str, dict[str, Any]]:
    runs = finished_runs(parts, merged)
    write(merged, {"summary": summarise(runs), "runs": runs})
    return runs


def summarise(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each arm and method: mean and standard deviation over seeds of every number."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs.values():
        key = (run["method"], arm(run["label"], run["settings"]["points"]))
        rows.setdefault(key, []).append(run)
    out = []
    for (method, name), same in sorted(rows.items(), key=lambda item: (item[0][0], item[0][1] != "before")):
        row: dict[str, Any] = {"method": method, "arm": name, "seeds": sorted(run["seed"] for run in same)}
        for number in NUMBERS:
            values = [run[number] for run in same]
            row[number] = (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan)
        row["truth_nll"] = statistics.mean(run["truth"]["nll"] for run in same)
        out.append(row)
    return out


def check_versions(runs: dict[str, dict[str, Any]]) -> None:
    """A wrong path would measure one version twice."""
    packages = {label: {r["package"] for r in runs.values() if r["label"] == label} for label in LABELS}
    if packages["before"] & packages["after"]:
        print(f"before and after are the same package, {packages}: look at PYTHONPATH", flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    shown = [name for name in NUMBERS if name != "seconds"]
    titles = {"nll": "NLL", "ece": "ECE", "excess": "NLL − truth's"}
    heads = ["method", "arm", "seeds", *(titles.get(name, name) for name in shown), "seconds"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["method"], row["arm"], str(len(row["seeds"]))]
        for name in shown:
            mean, spread = row[name]
            digits = 4 if name in ("nll", "excess", "ece") else 3
            cells.append(f"{mean:.{digits}f}" + ("" if math.isnan(spread) else f" ± {spread:.{digits}f}"))
        lines.append("| " + " | ".join([*cells, f"{row['seconds'][0]:.0f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--label", choices=LABELS, help="name of the version that Python finds")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for made_noise.json")
    parser.add_argument("--parts", type=Path, default=Path("out/made_noise"), help="folder for finished runs")
    parser.add_argument("--quick", action="store_true", help="a few steps, for a CPU; gives its own files")
    parser.add_argument("--table", action="store_true", help="merge finished runs and print the table")
    for name in ("steps", "batch", "points"):
        parser.add_argument(f"--{name}", type=int, default=None)
    for name in ("lr", "gp-lr-multiplier"):
        parser.add_argument(f"--{name}", type=float, default=None)
    args = parser.parse_args()
    if args.label is None and not args.table:
        parser.error("--label names the version that is measured, before or after; --table prints results")
    settings = replace(Settings(), **QUICK) if args.quick else Settings()
    given = ("steps", "batch", "points", "lr", "gp_lr_multiplier")
    settings = replace(settings, **{n: getattr(args, n) for n in given if getattr(args, n) is not None})
    parts, merged = args.parts, args.out / "made_noise.json"
    if args.quick:
        parts, merged = parts / "quick", parts / "quick" / "merged" / "made_noise.json"
    jobs = [] if args.label is None else [(m, seed) for seed in args.seeds for m in args.methods.split(",")]
    for method, seed in jobs:
        name = run_name(args.label, method, seed, settings)
        known = finished_runs(parts, merged).get(name)
        if known is not None and known["settings"] == asdict(settings):
            print(f"{name}: finished already", flush=True)
            continue
        write(parts / f"{name}.json", one_run(args.label, method, seed, settings, torch.device(args.device)))
        merge(parts, merged)
    if args.table or args.quick:
        # Merged again: of several processes that end together, one may have missed another's part.
        runs = merge(parts, merged)
        print(table(summarise(runs)))
        check_versions(runs)


if __name__ == "__main__":
    main()
