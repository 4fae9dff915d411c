"""Our head against the textbook one on a CPU: time, extra memory, and error against a long float64 reference.

    python benchmarks/head.py --out benchmarks/results   # 6 minutes on two quiet cores, 11 GiB

Both heads have the same weights and the same ``shared`` posterior, at B = 128, h = 640, m = 1024, R = 6. The
textbook's materialises S × K samples of the logits for every row, as the original code does:
S = 5,000 to predict, 1,000 to train.

* predict: all of ours (``head.predict``: probabilities, clean probabilities and the split of uncertainty)
  against the textbook's probabilities alone. "probs": our probabilities alone.
* train: loss and gradient of every parameter. Ours takes the smallest number of points whose gradient error
  is no larger than the textbook's; the errors in the weights of the mean, of d and of V alone are in the
  JSON.

Noise: "trained" is a head after 300 steps on 640-dimensional clusters with 20 % of labels wrong; the others
are the same head with its noise scaled to a standard deviation in V and in d. Errors: root mean square over
rows and classes, and the mean over rows of the largest error of a class; of gradients, the root mean square
over repetitions relative to the length of the reference.

Each time is the median of several calls in a process of its own, each memory the growth of that process's
peak resident set. Times are ratios within this run. ``split.py heads`` has the same heads with the default
posterior too, beside another version of the package.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hetsngp
from hetsngp.functional import link
from hetsngp.nn.noise import LowRankNoise
from hetsngp.types import UtilityNormal

BATCH, WIDTH, FEATURES, RANK = 128, 640, 1024, 6
PREDICT_SAMPLES, TRAIN_SAMPLES = 5000, 1000
NOISE: dict[str, tuple[float, float] | None] = {
    "trained": None,
    "mild": (0.5, 0.5),
    "medium": (1.5, 1.5),
    "wide": (4.0, 4.0),
}
POINTS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
REPETITIONS = 24  # gradients from which an error is estimated
REFERENCE = 2**16
REFERENCE_EXAMPLES = 8


class Identity(nn.Module):
    num_features = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        return x


def clusters(classes: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features in ``classes`` overlapping clusters; a fifth of the labels are wrong."""
    centres = torch.randn(classes, WIDTH, generator=torch.Generator().manual_seed(7))
    y = torch.randint(classes, (count,), generator=generator)
    x = centres[y] + 3 * torch.randn(count, WIDTH, generator=generator)
    wrong = torch.rand(count, generator=generator) < 0.2
    other = torch.randint(classes, (count,), generator=generator)
    return x, torch.where(wrong, other, y)


def make(
    classes: int, steps: int = 300, method: str = "hetsngp", posterior: str = "shared"
) -> hetsngp.Classifier:
    """Trained head with a posterior."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"rank": RANK} if method == "hetsngp" else {}
    options |= {"posterior": posterior, "random_features": FEATURES, "dataset_size": 50_000}
    model = hetsngp.build(method, Identity(), classes, generator=generator, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameter_groups(1e-4), lr=3e-3)
    model.train()
    for _ in range(steps):
        x, y = clusters(classes, BATCH, generator)
        optimizer.zero_grad()
        model.loss(x, y, generator=generator).backward()
        optimizer.step()
    hetsngp.fit_posterior(model, [clusters(classes, 512, generator) for _ in range(8)])
    return model


def scale_noise(model: hetsngp.Classifier, x: Tensor, in_factor: float, in_diagonal: float) -> None:
    """Give the noise a standard deviation of ``in_factor`` (all of V) and ``in_diagonal`` on average."""
    noise = model.head.noise
    assert isinstance(noise, LowRankNoise)
    with torch.no_grad():
        _, factor = noise(x, model.head.latent)  # type: ignore[arg-type]
        by = in_factor / factor.variance().mean().sqrt()
        noise.factor.weight.mul_(by)  # type: ignore[union-attr,operator]
        noise.factor.bias.mul_(by)  # type: ignore[union-attr,operator]
        noise.diagonal.weight.zero_()
        noise.diagonal.bias.fill_(math.log(math.expm1(in_diagonal)))


# --- the textbook head ------------------------------------------------------------------------------------


def textbook_samples(u: UtilityNormal, samples: int) -> Tensor:
    """(S, B, K), all at once."""
    assert u.form is not None
    batch, classes = u.mean.shape
    noise = u.var.sqrt() * torch.randn(samples, batch, classes)
    noise = noise + torch.einsum("bkr,sbr->sbk", u.form.dense(), torch.randn(samples, batch, RANK))
    return u.mean + noise


def textbook_predict(model: hetsngp.Classifier, x: Tensor) -> Tensor:
    with torch.no_grad():
        u = model.utility(x).tempered(model.temperature)
        return torch.softmax(textbook_samples(u, PREDICT_SAMPLES), -1).mean(0)


def textbook_loss(model: hetsngp.Classifier, x: Tensor, y: Tensor, samples: int = TRAIN_SAMPLES) -> Tensor:
    u = model.head.utility(x, posterior=False).tempered(model.temperature)
    log_probs = torch.log_softmax(textbook_samples(u, samples), -1)
    of_label = log_probs.gather(2, y.view(1, -1, 1).expand(samples, -1, 1)).squeeze(2)
    nll = math.log(samples) - of_label.logsumexp(0)
    penalty = model.head.prior_penalty()
    assert penalty is not None
    return nll.mean() + penalty / model.dataset_size


# --- errors -----------------------------------------------------------------------------------------------


def reference(u: UtilityNormal) -> Tensor:
    """E softmax(u) by antithetic pairs in float64: (rows, K)."""
    assert u.form is not None
    mean, std, factor = u.mean.double(), u.var.double().sqrt(), u.form.dense().double()
    generator = torch.Generator().manual_seed(11)
    total = torch.zeros_like(mean)
    rows, classes = mean.shape
    step = max(1, 2**20 // (rows * classes))
    for _ in range(0, REFERENCE, 2 * step):
        e = std * torch.randn(step, rows, classes, generator=generator, dtype=torch.float64)
        z = torch.randn(step, rows, RANK, generator=generator, dtype=torch.float64)
        e += torch.einsum("bkr,sbr->sbk", factor, z)
        total += torch.softmax(mean + e, -1).sum(0) + torch.softmax(mean - e, -1).sum(0)
    return total / total.sum(-1, keepdim=True)


def probability_errors(model: hetsngp.Classifier, x: Tensor) -> dict[str, Any]:
    u = model.utility(x[:REFERENCE_EXAMPLES]).tempered(model.temperature)
    truth = reference(u)
    ours, points = link.softmax_probs(u)
    textbook = torch.stack(
        [torch.softmax(textbook_samples(u, PREDICT_SAMPLES), -1).mean(0) for _ in range(4)]
    )
    out: dict[str, Any] = {"points": points}
    for name, probs in {"ours": ours.unsqueeze(0), "textbook": textbook}.items():
        error = (probs - truth).abs()
        out[name] = {"rms": float(error.square().mean().sqrt()), "largest": float(error.amax(-1).mean())}
    return out


def gradient_errors(model: hetsngp.Classifier, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Relative error of the gradient in each group of weights, by the number of points."""
    x, y = x[:REFERENCE_EXAMPLES], y[:REFERENCE_EXAMPLES]
    noise = model.head.noise
    assert isinstance(noise, LowRankNoise)
    groups = {"mean": [model.head.latent.beta], "d": [*noise.diagonal.parameters()]}  # type: ignore[union-attr]
    groups["V"] = [*noise.factor.parameters()]  # type: ignore[operator,union-attr]

    def gradient(loss: Tensor) -> dict[str, Tensor]:
        wanted = [p for group in groups.values() for p in group]
        grads = iter(torch.autograd.grad(loss, wanted))
        return {name: torch.cat([next(grads).flatten() for _ in group]) for name, group in groups.items()}

    def ours(points: int, seed: int) -> dict[str, Tensor]:
        u = model.head.utility(x, posterior=False).tempered(model.temperature)
        nll = link.softmax_nll(u, y, num_samples=points, seed=seed, decorrelate=True)
        penalty = model.head.prior_penalty()
        assert penalty is not None
        return gradient(nll.mean() + penalty / model.dataset_size)

    # The mean of many textbook gradients: independent of our points.
    many = [gradient(textbook_loss(model, x, y, samples=2000)) for _ in range(REPETITIONS)]
    truth = {name: torch.stack([g[name] for g in many]).double().mean(0) for name in groups}
    # The variance of that mean is not included in the errors below, for both heads.
    spare = {
        name: float(torch.stack([g[name] for g in many]).double().var(0).sum() / len(many)) for name in groups
    }

    def error(draws: list[dict[str, Tensor]]) -> dict[str, float]:
        out, squares = {}, {}
        for name in groups:
            square = torch.stack([(d[name].double() - truth[name]).square().sum() for d in draws]).mean()
            squares[name] = max(float(square) - spare[name], 0.0)
            out[name] = math.sqrt(squares[name]) / float(truth[name].norm())
        length = sum(float(part.square().sum()) for part in truth.values())
        return {"all": math.sqrt(sum(squares.values()) / length), **out}

    textbook = error([gradient(textbook_loss(model, x, y)) for _ in range(REPETITIONS)])
    table: dict[str, Any] = {"textbook": textbook}
    for points in POINTS:
        table[str(points)] = error([ours(points, seed) for seed in range(REPETITIONS)])
        if table[str(points)]["all"] <= textbook["all"]:
            table["points"] = points
            break
    return table


# --- time and memory, each in a separate process ----------------------------------------------------------


def peak_memory() -> int:
    """Bytes of the largest resident set since :func:`reset_peak`; since the start, where that cannot be."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def measure(action: str, path: str, noise: str, points: int) -> dict[str, float]:
    """Seconds and bytes of one action on the saved head."""
    model = hetsngp.load(path, backbone=Identity())
    generator = torch.Generator().manual_seed(5)
    x, y = clusters(model.num_classes, BATCH, generator)
    widths = NOISE[noise]
    if widths is not None:
        scale_noise(model, x, *widths)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()

    def train_ours() -> None:
        model.train()
        object.__setattr__(model.head.link, "num_samples", points)
        step(model.loss(x, y))

    actions = {
        "predict ours": lambda: model.predict(x),
        "probs ours": lambda: link.softmax_probs(model.utility(x).tempered(model.temperature)),
        "predict textbook": lambda: textbook_predict(model, x),
        "train ours": train_ours,
        "train textbook": lambda: step(textbook_loss(model, x, y)),
    }
    run = actions[action]
    if "ours" in action:
        run()  # fills the caches of Sobol nets and permutations
    seconds = []
    reset_peak()
    before = peak_memory()
    for _ in range(7 if "ours" in action else 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "bytes": max(peak_memory() - before, 4096)}


def in_a_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(classes: int, noise: str, path: str) -> dict[str, Any]:
    model = hetsngp.load(path, backbone=Identity())
    x, y = clusters(classes, BATCH, torch.Generator().manual_seed(5))
    widths = NOISE[noise]
    if widths is not None:
        scale_noise(model, x, *widths)
    noise_now = model.head.noise
    assert noise_now is not None
    with torch.no_grad():
        var, factor = noise_now(x, model.head.latent)
    torch.manual_seed(3)
    row: dict[str, Any] = {
        "classes": classes,
        "noise": noise,
        "noise sd": {"V": float(factor.variance().mean().sqrt()), "d": float(var.mean().sqrt())},
        "probabilities": probability_errors(model, x),
        "gradients": gradient_errors(model, x, y),
    }
    points = row["gradients"].get("points")
    wanted = ["predict ours", "probs ours", "predict textbook", "train textbook"]
    for action in wanted + (["train ours"] if points else []):
        row[action] = in_a_process(action, path, noise, str(points or 64))
    for ours, textbook in (
        ("predict ours", "predict textbook"),
        ("probs ours", "predict textbook"),
        ("train ours", "train textbook"),
    ):
        if ours in row:
            row[f"ratio, {ours}"] = {
                "time": row[textbook]["seconds"] / row[ours]["seconds"],
                "memory": row[textbook]["bytes"] / row[ours]["bytes"],
            }
    return row


def line(row: dict[str, Any]) -> str:
    def ratio(name: str) -> str:
        found = row.get(f"ratio, {name}")
        if found is None:
            return "–"
        memory = f"{found['memory']:.0f}×" if found["memory"] < 1000 else "> 1000×"  # too little to measure
        return f"{found['time']:.0f}× / {memory}"

    p, g = row["probabilities"], row["gradients"]
    errors = f"{p['ours']['rms']:.1e} / {p['textbook']['rms']:.1e}"
    largest = f"{p['ours']['largest']:.4f} / {p['textbook']['largest']:.4f}"
    cells = [row["classes"], row["noise"], p["points"], errors, largest, ratio("probs ours")]
    return (
        "| "
        + " | ".join(map(str, [*cells, ratio("predict ours"), g.get("points", "–"), ratio("train ours")]))
        + " |"
    )


HEADER = (
    "| K | noise | points | rms error, ours / textbook | largest error | probs: time / memory "
    "| predict: time / memory | points | training step: time / memory |\n" + "|---" * 9 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for head.json")
    parser.add_argument("--classes", default="1000,100,10")
    parser.add_argument("--noise", default=",".join(NOISE))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure:
        action, path, noise, points = args.measure
        print(json.dumps(measure(action, path, noise, int(points))))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        for classes in map(int, args.classes.split(",")):
            path = f"{folder}/head{classes}"
            hetsngp.save(make(classes), path)
            for noise in args.noise.split(","):
                rows.append(compare(classes, noise, path))
                print(line(rows[-1]), flush=True)
                part = args.out / "head.part"
                result = {"torch": torch.__version__, "threads": args.threads, "rows": rows}
                part.write_text(json.dumps(result, indent=1))
                os.replace(part, args.out / "head.json")


if __name__ == "__main__":
    main()
