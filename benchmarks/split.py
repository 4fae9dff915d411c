"""Probabilities and the split of uncertainty: error against a long float64 reference, and time of a head.

    python benchmarks/split.py references --device cuda --out benchmarks/results  # a GPU: a CPU takes hours
    python benchmarks/split.py accuracy --before PATH/src --out benchmarks/results
    python benchmarks/split.py heads --before PATH/src --device cuda --times cpu cuda --out benchmarks/results

* ``references`` makes split_reference.safetensors, which ``accuracy`` reads: nothing of it depends on the
  package. A setting that the file has is not made again.
* ``accuracy``: the default (Kronecker) posterior at a standard deviation of the GP, and each kind of label
  noise at a standard deviation, of d and of V each (of ``feature``: of both parts). Model uncertainty I(y; f)
  and probabilities, as the head computes them, of 200 inputs.
* ``heads``: trained heads of benchmarks/head.py (B = 128, h = 640, m = 1024, R = 6), sngp and hetsngp with
  the default posterior and with ``shared``; the noise as it was trained, and scaled to 4 and 8. Times of
  ``predict_probs`` and ``predict``, both packages in turn, and errors over 200 inputs. Heads are trained by
  the package before, which the one after can load. A second run of the same packages adds to the first:
  errors on a GPU, then ``--no-errors`` for times on another machine.

Means are N(0, 4) with a margin of 0 to 8 for one class. The covariance of f is U diag(s) Uᵀ by the formulas
of the posterior, from the mean softmax Hessian of these inputs and a kernel matrix whose eigenvalues are
log-spaced, scaled for each input to the standard deviation; past 256 classes it is its diagonal, as there.

Reference (:func:`reference`), for each input. Nested: p(f) = E softmax(f + ε) for many f and ε at a time is
two products of matrices, since e^{f+ε} = e^f e^ε: Z = AEᵀ, p = A ⊙ (Z⁻¹E)/N. Blocks of shifted Sobol points
give a standard error; the bias of H(p̂) in the number N of inner points is removed by halving it (jackknife).
The mean of KL(p(f) ‖ p̄) over f has a control variate, KL(softmax(κf) ‖ p̄), whose expectation, like p̄, comes
from many more plain random points. The file has the rms over inputs of the standard errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from training_loss import Worker, measure_times, package, start_workers, work, write

KINDS = ("low_rank", "parameter_efficient", "feature")
GP_SD, NOISE_SD = (0.3, 1.0, 3.0), (0.0, 1.0, 2.0, 4.0, 8.0)
INPUTS = 200
RANK, NOISY_FEATURES, FULL_CLASSES = 6, 128, 256
SHOWN = 4  # probabilities stored for each input: those of the largest means
UNIT = 2.5e-4  # of stored numbers, int16: up to 8.19
HEAD_NOISE = {"trained": None, "4": 4.0, "8": 8.0}
METHODS = (("sngp", "kronecker"), ("sngp", "shared"), ("hetsngp", "kronecker"), ("hetsngp", "shared"))


# --- the Gaussians ----------------------------------------------------------------------------------------


class Gaussian(NamedTuple):
    """f ~ N(mean, diag(std²) + factor factorᵀ) and the same of ε, zero-mean; parts may be None.

    Shapes: (B, K), (B, K), (B, K, R).
    """

    mean: Tensor
    std: Tensor | None = None
    factor: Tensor | None = None
    noise_std: Tensor | None = None
    noise_factor: Tensor | None = None

    def row(self, i: int) -> Gaussian:
        return Gaussian(*(None if t is None else t[i] for t in self))  # type: ignore[arg-type]

    def to(self, device: str) -> Gaussian:
        return Gaussian(*(None if t is None else t.to(device, torch.float64) for t in self))  # type: ignore[arg-type]


class Case(NamedTuple):
    """A setting of ``accuracy``; ``parts`` are the tensors of its kind of noise."""

    kind: str
    mean: Tensor
    basis: Tensor | None
    scales: Tensor
    noise_std: Tensor | None
    parts: tuple[Tensor, ...]


def key(classes: int, kind: str, gp_sd: float, noise_sd: float) -> str:
    return f"{classes} {kind if noise_sd else 'none'} {gp_sd} {noise_sd}"


def settings(classes: list[int]) -> list[tuple[int, str, float, float]]:
    """Without noise all kinds are one."""
    kinds = [("none", 0.0), *((kind, sd) for kind in KINDS for sd in NOISE_SD[1:])]
    return [(k, kind, gp_sd, sd) for k in classes for gp_sd in GP_SD for kind, sd in kinds]


def case(classes: int, kind: str, gp_sd: float, noise_sd: float, inputs: int) -> Case:
    """On the CPU, in float64, of numbers that float32 has: the same for reference and packages."""
    g = torch.Generator().manual_seed(classes)
    options: dict[str, Any] = {"generator": g, "dtype": torch.float64}
    mean = 2 * torch.randn(inputs, classes, **options)
    mean[torch.arange(inputs), torch.randint(classes, (inputs,), generator=g)] += 8 * torch.rand(
        inputs, **options
    )
    probs = torch.softmax(mean, -1)
    fisher = torch.diag(probs.mean(0)) - probs.mT @ probs / inputs
    squares = torch.rand(inputs, 64, **options).log().neg()
    values = torch.logspace(-1, 4, 64, dtype=torch.float64)
    basis = None
    if classes <= FULL_CLASSES:
        contrasts = torch.linalg.qr(torch.ones(classes, 1, dtype=torch.float64), mode="complete")[0][:, 1:]
        gamma, rotation = torch.linalg.eigh(contrasts.mT @ fisher @ contrasts)
        basis = contrasts @ rotation
    else:
        gamma = fisher.diagonal()
    scales = squares @ (1 / (1 + values.unsqueeze(1) * gamma))
    scales = gp_sd**2 * scales * classes / scales.sum(1, keepdim=True)
    std: Tensor | None = None
    parts: tuple[Tensor, ...] = ()
    if kind in ("low_rank", "parameter_efficient"):
        std = _width(0.5 + torch.rand(inputs, classes, **options), noise_sd)
        shared = torch.randn(classes, RANK, **options)
        if kind == "low_rank":
            factor = shared + torch.randn(inputs, classes, RANK, **options)
            parts = (_width(factor, noise_sd / math.sqrt(RANK)),)
        else:
            row = 1 + torch.randn(inputs, classes, **options)
            parts = (_width(row.unsqueeze(2) * shared, noise_sd / math.sqrt(RANK), row), shared)
    elif kind == "feature":
        readout = torch.randn(NOISY_FEATURES, classes, **options)
        own = 0.5 + torch.rand(inputs, NOISY_FEATURES, **options)
        row = 1 + torch.randn(inputs, NOISY_FEATURES, **options)
        shared = torch.randn(NOISY_FEATURES, RANK, **options)
        low_rank = torch.einsum("fk,bf,fr->bkr", readout, row, shared)
        parts = (
            readout,
            _width(own.unsqueeze(1) * readout.mT, noise_sd / math.sqrt(NOISY_FEATURES), own),
            _width(low_rank, noise_sd / math.sqrt(RANK), row),
            shared,
        )
    mean, scales, *parts_now = (t.float().double() for t in (mean, scales, *parts))
    basis, std = (None if t is None else t.float().double() for t in (basis, std))
    return Case(kind, mean, basis, scales, std, tuple(parts_now))


def _width(whole: Tensor, sd: float, part: Tensor | None = None) -> Tensor:
    """``part`` (None: all) times the number that gives ``whole`` a root mean square of ``sd`` in each row."""
    by = sd / whole.square().flatten(1).mean(1).sqrt()
    part = whole if part is None else part
    return part * by.view(-1, *[1] * (part.dim() - 1))


def gaussian(c: Case) -> Gaussian:
    """The case written out, without the package."""
    factor: Tensor | None = None
    if c.kind == "low_rank":
        factor = c.parts[0]
    elif c.kind == "parameter_efficient":
        factor = c.parts[0].unsqueeze(2) * c.parts[1]
    elif c.kind == "feature":
        readout, std, row, shared = c.parts
        low_rank = torch.einsum("fk,bf,fr->bkr", readout, row, shared)
        factor = torch.cat([low_rank, std.unsqueeze(1) * readout.mT], 2)
    root = c.scales.sqrt()
    if c.basis is None:
        return Gaussian(c.mean, root, None, c.noise_std, factor)
    return Gaussian(c.mean, None, c.basis * root.unsqueeze(1), c.noise_std, factor)


# --- the reference, independent of the package ------------------------------------------------------------


class Sizes(NamedTuple):
    """Outer and inner points of a block, blocks, and plain random points."""

    outer: int = 2**10
    inner: int = 2**12
    blocks: int = 32
    plain: int = 2**20


class Reference(NamedTuple):
    """Model uncertainty (B,), its standard error (B,), and probabilities (B, K)."""

    model: Tensor
    error: Tensor
    probs: Tensor


KAPPAS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.65, 1.0)
_bases: dict[Any, Tensor] = {}


def normals(count: int, blocks: int, dims: int, generator: torch.Generator) -> Tensor:
    """Sobol points with a random shift for each block: (blocks, count, dims)."""
    device = generator.device
    if (count, dims, device) not in _bases:
        base = torch.quasirandom.SobolEngine(dims).draw(count, dtype=torch.float64)
        _bases[count, dims, device] = base.to(device)
    shift = torch.rand(blocks, 1, dims, generator=generator, device=device, dtype=torch.float64)
    return torch.special.ndtri(((_bases[count, dims, device] + shift) % 1).clamp(1e-15, 1 - 1e-15))


def _apply(std: Tensor | None, factor: Tensor | None, z: Tensor) -> Tensor:
    """Draws with the covariance from z (…, number of :func:`_dims`): (…, K)."""
    rank = 0 if factor is None else factor.shape[1]
    out = None if factor is None else z[..., :rank] @ factor.mT
    if std is None:
        assert out is not None
        return out
    own = z[..., rank:] * std
    return own if out is None else out + own


def _dims(std: Tensor | None, factor: Tensor | None) -> int:
    return (0 if factor is None else factor.shape[1]) + (0 if std is None else len(std))


def _full_root(std: Tensor | None, factor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A factor with more columns than classes as a square one."""
    if factor is None or factor.shape[1] <= len(factor):
        return std, factor
    values, vectors = torch.linalg.eigh(factor @ factor.mT)
    return std, vectors * values.clamp_min(0).sqrt()


def entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def divergence(p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q)."""
    return -entropy(p) - p @ log_q


def nested(f: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E softmax(f + ε) over all inner points and over each half of them: (…, M, K), (…, N, K) → (…, M, K)."""
    a = (f - f.amax(-1, keepdim=True)).exp()
    e = (eps - eps.amax(-1, keepdim=True)).exp()
    weight = (a @ e.mT).reciprocal_()
    half = e.shape[-2] // 2
    first, second = (
        a * (weight[..., part] @ e[..., part, :]) / half for part in (slice(half), slice(half, None))
    )
    return (first + second) / 2, first, second


@torch.no_grad()
def reference(g: Gaussian, sizes: Sizes, device: str = "cpu", seed: int = 0) -> Reference:
    generator = torch.Generator(device).manual_seed(seed)
    rows = [_one(g.row(i).to(device), sizes, generator) for i in range(len(g.mean))]
    return Reference(*(torch.stack([row[j] for row in rows]).cpu() for j in range(3)))


def _one(g: Gaussian, sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    std, factor = _full_root(g.std, g.factor)
    noise_std, noise_factor = _full_root(g.noise_std, g.noise_factor)
    noisy = noise_std is not None or noise_factor is not None
    dims, noise_dims = _dims(std, factor), _dims(noise_std, noise_factor)
    limit = 2**27 if generator.device.type == "cuda" else 2**21

    def draws(blocks: int) -> tuple[Tensor, Tensor]:
        f = g.mean + _apply(std, factor, normals(sizes.outer, blocks, dims, generator))
        return f, _apply(noise_std, noise_factor, normals(sizes.inner, blocks, noise_dims, generator))

    kappa = 1.0
    if noisy:  # the shrinkage whose divergence goes most with that of p(f)
        f, eps = draws(1)
        p = nested(f[0], eps[0])[0]
        target = divergence(p, p.mean(0).log())
        controls = [divergence(q, q.mean(0).log()) for q in (torch.softmax(k * f[0], -1) for k in KAPPAS)]
        fits = torch.stack([torch.corrcoef(torch.stack([target, c]))[0, 1] for c in controls])
        kappa = KAPPAS[int(fits.nan_to_num(-1).argmax())]

    # p̄, and of q = softmax(κf) the mean and the mean entropy, from plain random points.
    step = max(1, min(sizes.plain // 8, limit // (4 * len(g.mean))))
    sums, count = [], math.ceil(sizes.plain / step)
    kind: dict[str, Any] = {"generator": generator, "device": generator.device, "dtype": torch.float64}
    for _ in range(count):
        f = g.mean + _apply(std, factor, torch.randn(step, dims, **kind))
        q = torch.softmax(kappa * f, -1)
        p = q
        if noisy:
            p = torch.softmax(f + _apply(noise_std, noise_factor, torch.randn(step, noise_dims, **kind)), -1)
        sums.append((p.mean(0), p.square().mean(0), q.mean(0), entropy(q).mean()))
    p_bars, squares, q_bars, entropies = (torch.stack(each) for each in zip(*sums, strict=True))
    p_bar = p_bars.mean(0)
    log_p = p_bar.clamp_min(1e-300).log()
    # E KL(p(f) ‖ p̂) exceeds I by KL(p̄ ‖ p̂), of p̂ with an error from so many points.
    excess = ((squares.mean(0) - p_bar.square()) / p_bar.clamp_min(1e-300)).sum() / (2 * count * step)
    control = -entropies - q_bars @ log_p  # E KL(q ‖ p̄), by parts
    control_error = control.std() / math.sqrt(count)
    if not noisy:
        return control.mean() - excess, control_error, p_bar

    values, changes, at_once = [], [], max(1, limit // (sizes.outer * sizes.inner))
    for start in range(0, sizes.blocks, at_once):
        f, eps = draws(min(at_once, sizes.blocks - start))
        whole, *halves = (divergence(p, log_p) for p in nested(f, eps))
        values.append(2 * whole - (halves[0] + halves[1]) / 2)
        changes.append(divergence(torch.softmax(kappa * f, -1), log_p))
    value, change = torch.cat(values), torch.cat(changes)
    both = torch.cov(torch.stack([value.flatten(), change.flatten()]))
    slope = both[0, 1] / both[1, 1].clamp_min(1e-30)
    rest = (value - slope * change).mean(1)
    error = (rest.var() / sizes.blocks + (slope * control_error).square()).sqrt()
    return rest.mean() + slope * control.mean() - excess, error, p_bar


def shown_classes(mean: Tensor) -> Tensor:
    return mean.topk(min(SHOWN, mean.shape[1])).indices


def make_references(path: Path, classes: list[int], inputs: int, sizes: Sizes, device: str) -> None:
    """Add the settings that the file does not have, and write it after each."""
    tensors, about = read_references(path)
    for at in settings(classes):
        name, start = key(*at), time.perf_counter()
        if name not in tensors:
            c = case(*at, inputs)
            found = reference(gaussian(c), sizes, device)
            numbers = [found.model, entropy(found.probs), *found.probs.gather(1, shown_classes(c.mean)).mT]
            tensors[name] = (torch.stack(numbers) / UNIT).round().to(torch.int16)
            about[name] = {
                "error": float(found.error.square().mean().sqrt()),
                "largest": float(found.error.max()),
                "sizes": sizes,
                "seconds": time.perf_counter() - start,
            }
            print(f"{name}: {about[name]}", flush=True)
            write_references(path, tensors, about)


def read_references(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open
    from safetensors.torch import load_file

    if not path.exists():
        return {}, {}
    with safe_open(path, "pt") as file:
        return load_file(path), json.loads(file.metadata()["about"])


def write_references(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"about": json.dumps(about)})
    os.replace(part, path)


# --- the package ------------------------------------------------------------------------------------------


def package_case(c: Case) -> tuple[Any, Any]:
    """f and the noise as the head passes them on, float32."""
    from hetsngp.functional import noise as functional
    from hetsngp.types import Factor, UtilityNormal

    mean, scales = c.mean.float(), c.scales.float()
    if c.basis is None:
        f = UtilityNormal(mean, scales)
    else:
        known: dict[str, Any] = (
            {"contrasts": True} if "contrasts" in {x.name for x in dataclasses.fields(Factor)} else {}
        )
        f = UtilityNormal(
            mean, torch.zeros_like(mean), Factor(c.basis.float(), column=scales.sqrt(), **known)
        )
    parts = [t.float() for t in c.parts]
    if c.kind == "none":
        return f, None
    if c.kind == "low_rank":
        factor: Any = functional.low_rank_factor(parts[0].flatten(1), RANK)
    elif c.kind == "parameter_efficient":
        factor = functional.parameter_efficient_factor(*parts)
    else:
        factor = functional.feature_factor(parts[0].unsqueeze(1), *parts[1:])
    var = torch.zeros_like(mean) if c.noise_std is None else c.noise_std.float().square()
    return f, UtilityNormal(torch.zeros_like(mean), var, factor)


@torch.no_grad()
def package_split(f: Any, noise: Any) -> tuple[Tensor, Tensor]:
    """Probabilities and model uncertainty as ``head.predict`` has them."""
    from hetsngp.functional import link, uncertainty
    from hetsngp.types import UtilityNormal, join_factors

    module: Any = uncertainty
    if hasattr(module, "softmax_split"):
        split = module.softmax_split(f, noise)
        probs, model = split.probs, split.model
    else:  # 0.1
        u = f
        if noise is not None:
            u = UtilityNormal(f.mean, f.var + noise.var, join_factors(noise.form, f.form))
        probs = link.softmax_probs(u)[0]
        model = module.model_uncertainty(f, noise, probs)
    return probs, model.minimum(entropy(probs))


def answer(job: dict[str, Any]) -> Any:
    """Do one job of a worker."""
    what = job["what"]
    if what == "package":
        return package()
    if what == "accuracy":
        torch.set_num_threads(1)
        classes, kind, gp_sd, noise_sd = job["at"]
        c = case(classes, kind, gp_sd, noise_sd, job["inputs"])
        probs, model = package_split(*package_case(c))
        return {"model": model.tolist(), "probs": probs.gather(1, shown_classes(c.mean)).tolist()}
    return HEAD_JOBS[what](job)


# --- heads ------------------------------------------------------------------------------------------------

_loaded: dict[Any, Any] = {}


def _train(job: dict[str, Any]) -> None:
    import head

    import hetsngp

    hetsngp.save(head.make(job["classes"], job["steps"], job["method"], job["posterior"]), job["path"])


def _model(job: dict[str, Any]) -> Any:
    """The head and inputs, on the device; kept until another is asked for."""
    import head

    import hetsngp

    asked = job["path"], job["noise"], job["device"]
    if asked not in _loaded:
        _loaded.clear()
        model: Any = hetsngp.load(job["path"], backbone=head.Identity())
        x, _ = head.clusters(model.num_classes, job["inputs"], torch.Generator().manual_seed(5))
        sd = HEAD_NOISE.get(job["noise"])
        if sd is not None:
            head.scale_noise(model, x, sd, sd)
        _loaded[asked] = model.to(job["device"]).eval(), x.to(job["device"])
    return _loaded[asked]


def _predict(job: dict[str, Any]) -> None:
    """Save the predictions, and what is predicted from: the Gaussians."""
    torch.set_num_threads(1)
    model, x = _model(job)
    with torch.no_grad():
        found = model.predict(x)
    parts = {"probs": found.probs, "model": found.model_uncertainty, "gaussian": gaussian_of(model, x)}
    torch.save(parts, job["to"])


@torch.no_grad()
def gaussian_of(model: Any, x: Tensor) -> list[Tensor | None]:
    """Fields of the :class:`Gaussian` of a model of the package after, at its temperature."""
    latent, noise = model.head.parts(x, posterior=True)
    f = latent.as_utility().tempered(model.temperature)
    g = [f.mean, None if latent.factor is not None else f.var.sqrt()]
    g += [None if f.form is None else f.form.dense().expand(len(x), -1, -1), None, None]
    if noise is not None:
        noise = noise.tempered(model.temperature)
        g[3:] = noise.var.sqrt(), noise.form.dense().expand(len(x), -1, -1)
    return g


def _time(job: dict[str, Any]) -> list[float]:
    torch.set_num_threads(job["threads"])
    model, x = _model(job)
    x, call = x[: job["batch"]], getattr(model, job["action"])
    out = []
    for _ in range(job["repeats"]):
        start = time.perf_counter()
        call(x)
        if job["device"] != "cpu":
            torch.cuda.synchronize()
        out.append(time.perf_counter() - start)
    return out


HEAD_JOBS = {"train": _train, "predict": _predict, "time": _time}


def compare_head(
    workers: dict[str, Worker], at: dict[str, Any], folder: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One row of the table: errors of both packages, and their times."""
    job = {**at, "inputs": args.inputs, "batch": min(128, args.inputs)}
    row: dict[str, Any] = {name: {} for name in workers}
    truth: Reference | None = None
    # The Gaussians are those of the package after.
    for name, worker in () if args.no_errors else reversed(workers.items()):
        to = f"{folder}/{name}.pt"
        worker.ask(what="predict", to=to, device=args.device, **job)
        found = torch.load(to, map_location="cpu")
        if truth is None:
            g = Gaussian(*found["gaussian"])
            truth = reference(g, Sizes(*args.sizes), args.device)
            row["sd"] = {"gp": _sd(g.std, g.factor), "noise": _sd(g.noise_std, g.noise_factor)}
            row["reference error"] = float(truth.error.square().mean().sqrt())
        row[name] |= error_numbers(found["model"], truth.model, found["probs"], truth.probs)
    for device in args.times:
        for action in ("predict_probs", "predict"):
            timed = {**job, "action": action, "device": device, "threads": args.threads}
            for name, value in measure_times(workers, timed, args.rounds, 1, args.budget).items():
                row[name][f"{action}, {device}"] = value
    return row


def keep(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the row into ``rows``; what an earlier run measured of the same head, errors or times, stays."""
    names = ("classes", "method", "posterior", "noise")
    for i, old in enumerate(rows):
        if all(old[name] == row[name] for name in names):
            both = {key: old[key] | row[key] for key in old.keys() & row.keys() if isinstance(row[key], dict)}
            rows[i] = old | row | both
            return rows[i]
    rows.append(row)
    return row


def _sd(std: Tensor | None, factor: Tensor | None) -> float:
    """Standard deviation of a logit, mean over classes and inputs of the variance."""
    total = 0.0 if std is None else float(std.square().mean())
    return math.sqrt(total + (0.0 if factor is None else float(factor.square().sum(-1).mean())))


def error_numbers(model: Tensor, true_model: Tensor, probs: Tensor, true_probs: Tensor) -> dict[str, float]:
    """rms and signed error of the model uncertainty, rms of the probabilities."""
    error = model.double() - true_model
    return {
        "rms": float(error.square().mean().sqrt()),
        "bias": float(error.mean()),
        "largest": float(error.abs().max()),
        "true": float(true_model.mean()),
        "probs": float((probs.double() - true_probs).square().mean().sqrt()),
    }


# --- tables -----------------------------------------------------------------------------------------------


def accuracy_table(result: dict[str, Any]) -> str:
    versions = list(result["packages"])
    heads = ["K", "noise", "GP sd", "noise sd", "I(y; f)", "reference ±"]
    heads += [f"{v}: {what}" for what in ("rms", "bias", "probs rms") for v in versions]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in result["accuracy"]:
        cells = [*map(str, row["at"]), f"{row[versions[0]]['true']:.4f}", f"{row['reference error']:.4f}"]
        for what in ("rms", "bias", "probs"):
            sign = "+" if what == "bias" else ""
            cells += [f"{row[v][what]:{sign}.4f}" for v in versions]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def head_table(result: dict[str, Any]) -> str:
    """Times in milliseconds; the ratio of predict to the predict_probs of the first package too."""
    versions = list(result["packages"])
    heads = ["K", "method", "posterior", "noise (its sd; GP's)", "device"]
    heads += [f"predict_probs {v}" for v in versions] + ["ratio"] + [f"predict {v}" for v in versions]
    heads += [f"predict {versions[-1]} / predict_probs {v}" for v in versions]
    heads += [f"{what} {v}" for what in ("split rms", "split bias", "probs rms") for v in versions]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in result["heads"]:
        noise = row["noise"] + (f" ({row['sd']['noise']:.1f}; {row['sd']['gp']:.1f})" if "sd" in row else "")
        for device in [name.split(", ")[1] for name in row[versions[0]] if name.startswith("predict,")]:
            alone = [row[v][f"predict_probs, {device}"] for v in versions]
            both = [row[v][f"predict, {device}"] for v in versions]
            cells = [str(row["classes"]), row["method"], row["posterior"], noise, device]
            cells += [f"{1000 * t:.1f}" for t in alone] + [f"{alone[-1] / alone[0]:.2f}"]
            cells += [f"{1000 * t:.1f}" for t in both] + [f"{both[-1] / t:.2f}" for t in alone]
            for what in ("rms", "bias", "probs"):
                cells += [f"{row[v][what]:.4f}" if what in row[v] else "" for v in versions]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("references", "accuracy", "heads"))
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder of the results")
    parser.add_argument("--before", help="folder of another version of the package, measured beside it")
    parser.add_argument(
        "--device", default="cpu", help="of references, and of the predictions that are compared with them"
    )
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--inputs", type=int, default=INPUTS, help="of a setting")
    parser.add_argument("--sizes", type=int, nargs=4, default=list(Sizes()), help="of a reference, see Sizes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--times", nargs="*", default=["cpu"], help="devices of which times are measured")
    parser.add_argument("--rounds", type=int, default=15, help="times of each version in turn")
    parser.add_argument(
        "--budget", type=float, default=10, help="seconds of one time after which no round begins"
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps of a head")
    parser.add_argument("--no-errors", action="store_true", help="times of heads alone, without a reference")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(answer)
        return
    stored = args.out / "split_reference.safetensors"
    if args.what == "references":
        make_references(stored, args.classes, args.inputs, Sizes(*args.sizes), args.device)
        return
    if args.what is None:
        parser.error("what to do: references, accuracy or heads")
    workers, packages = start_workers(args.before, __file__)
    path = args.out / f"split_{args.what}.json"
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"torch": torch.__version__, "packages": packages, args.what: rows}
    if args.what == "accuracy":
        tensors, about = read_references(stored)
        for at in (at for at in settings(args.classes) if key(*at) in tensors):
            true = tensors[key(*at)].double() * UNIT
            row: dict[str, Any] = {"at": at, "reference error": about[key(*at)]["error"]}
            for name, worker in workers.items():
                found = worker.ask(what="accuracy", at=at, inputs=true.shape[1])
                model, probs = (torch.tensor(found[x], dtype=torch.float64) for x in ("model", "probs"))
                row[name] = error_numbers(model, true[0], probs, true[2:].mT)
            rows.append(row)
        print(accuracy_table(result))
    else:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        old = json.loads(path.read_text()) if path.exists() else {}
        rows += old["heads"] if old.get("packages") == packages else []
        with tempfile.TemporaryDirectory() as folder:
            for classes in args.classes:
                for method, posterior in METHODS:
                    head = {"classes": classes, "method": method, "posterior": posterior}
                    trained = {**head, "path": f"{folder}/{method}-{posterior}-{classes}"}
                    next(iter(workers.values())).ask(what="train", steps=args.steps, **trained)
                    for noise in HEAD_NOISE if method == "hetsngp" else ("none",):
                        row = {**head, "noise": noise}
                        row |= compare_head(workers, {**trained, "noise": noise}, folder, args)
                        row["times" if args.no_errors else "errors"] = f"torch {torch.__version__}, {device}"
                        row = keep(row, rows)
                        print(head_table({**result, "heads": [row]}).splitlines()[-1], flush=True)
                        write(path, result)
        print(head_table(result))
    write(path, result)
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    main()
