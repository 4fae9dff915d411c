"""Calibration methods for the GP head, compared with a linear head on validation images.

Heads on frozen features as in run.py, on its tuning seeds and three more: 5,000 training images, 1,000
held-out ones, and 10,000 others of CIFAR-10's training set for validation; no test image is used. Logits are
those of the MAP estimate. Methods are fitted on the held-out images alone; "best temperature" is fitted on
the validation images themselves, and is the best that any choice of a temperature can give.

    HETSNGP_DATA=~/data python experiments/frozen/ece.py      # six seeds: half an hour on two cores

Result: experiments/frozen/ece.json.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from run import HELD_OUT, HERE, TRAINING, VALIDATION, features, mean_and_error, network, part, predict
from torch import Tensor

import hetsngp
from hetsngp import metrics

SEEDS = tuple(range(100, 106))
AMPLITUDES = (3.0, 5.0, 7.0, 10.0)
# Factor of ½‖θ‖², where a method has many parameters.
MATRIX_PENALTY, VECTOR_PENALTY = 200.0, 10.0

Calibrated = Callable[[Tensor, Tensor], Tensor]
"""(parameters, logits) → log-probabilities."""


def minimise(loss: Callable[[Tensor], Tensor], start: Tensor, iterations: int = 100) -> Tensor:
    variable = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [variable],
        max_iter=iterations,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_change=1e-10,
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(variable)
        value.backward()
        return value

    optimizer.step(closure)
    return variable.detach()


# --- calibration methods ----------------------------------------------------------------------------------


def temperature(theta: Tensor, logits: Tensor) -> Tensor:
    return (logits * theta[0].exp()).log_softmax(1)


def floor(theta: Tensor, logits: Tensor) -> Tensor:
    """A label is any of them with probability ε."""
    share = torch.sigmoid(theta[1] - 4)
    return ((1 - share) * temperature(theta, logits).exp() + share / logits.shape[1]).log()


def bias(theta: Tensor, logits: Tensor) -> Tensor:
    return (logits * theta[0].exp() + theta[1:]).log_softmax(1)


def vector(theta: Tensor, logits: Tensor) -> Tensor:
    """A temperature for each class."""
    return (logits * (theta[0] + theta[1:]).exp()).log_softmax(1)


def matrix(theta: Tensor, logits: Tensor) -> Tensor:
    """Classes are mixed."""
    k = logits.shape[1]
    mixed = logits + logits @ theta[1:].reshape(k, k)
    return (mixed * theta[0].exp()).log_softmax(1)


IDEAS: dict[str, tuple[Calibrated, int, float]] = {
    "temperature": (temperature, 1, 0.0),
    "temperature and uniform floor": (floor, 2, 0.0),
    "temperature and bias of each class": (bias, 11, VECTOR_PENALTY),
    "temperature of each class": (vector, 11, VECTOR_PENALTY),
    "matrix": (matrix, 101, MATRIX_PENALTY),
}


def fitted(idea: str, logits: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    log_probs, count, penalty = IDEAS[idea]

    def loss(theta: Tensor) -> Tensor:
        return F.nll_loss(log_probs(theta, logits), y) + 0.5 * penalty / len(y) * theta[1:].square().sum()

    theta = minimise(loss, logits.new_zeros(count))
    return lambda other: log_probs(theta, other).exp()


# --- MAP estimate and leave-one-out -----------------------------------------------------------------------


def map_estimate(phi: Tensor, y: Tensor) -> Tensor:
    """β that minimises Σ CE + ½‖β‖², by L-BFGS on all examples: convex."""
    size = (
        (1 + 0.03 * phi.square().sum(0)).rsqrt().unsqueeze(1)
    )  # unit of a step, from the expected curvature

    def loss(scaled: Tensor) -> Tensor:
        beta = scaled * size
        return F.cross_entropy(phi @ beta, y) + 0.5 * beta.square().sum() / len(y)

    return minimise(loss, phi.new_zeros(phi.shape[1], 10), 150) * size


def leave_one_out(phi: Tensor, beta: Tensor, y: Tensor, *, shared: bool = False) -> Tensor:
    """Leave-one-out logits of the training images: one Newton step, with the curvature of each class, or with
    their mean for all.
    """
    logits = phi @ beta
    probs = logits.softmax(1)
    gradient = probs - F.one_hot(y, probs.shape[1])
    out = logits.clone()
    for c in range(probs.shape[1]):
        curvature = probs * (1 - probs)
        weight = curvature.mean(1) if shared else curvature[:, c]
        precision = (phi.mT * weight) @ phi + torch.eye(phi.shape[1]).to(phi)
        root = torch.linalg.cholesky(precision)
        variance = torch.linalg.solve_triangular(root, phi.mT, upper=False).square().sum(0)
        out[:, c] += variance * gradient[:, c] / (1 - weight * variance).clamp_min(0.02)
    return out


# --- measuring --------------------------------------------------------------------------------------------


def judged(probs: Tensor, y: Tensor) -> dict[str, float]:
    probs, y = probs.cpu(), y.cpu()
    accuracy = metrics.accuracy(probs, y)
    return {
        "nll": metrics.nll(probs, y),
        "ece": metrics.ece(probs, y),
        "accuracy": accuracy,
        "confidence_minus_accuracy": float(probs.max(1).values.mean()) - accuracy,
    }


def one_seed(seed: int, folder: Path, model: hetsngp.Classifier) -> dict[str, dict[str, float]]:
    device = model.temperature.device
    whole = features(f"cifar10-train-{seed}", folder, model)
    training, held_out = part(whole, 0, TRAINING), part(whole, TRAINING, HELD_OUT)
    validation = part(whole, TRAINING + HELD_OUT, VALIDATION)
    x, hx, vx = (p.h.float().to(device) for p in (training, held_out, validation))
    y, hy, vy = (p.y.to(device) for p in (training, held_out, validation))
    out: dict[str, dict[str, float]] = {}

    def add(name: str, held: Tensor, other: Tensor, ideas: tuple[str, ...] = ("temperature",)) -> None:
        """Calibrate on the logits of held-out images, measure on those of validation images."""
        for idea in ideas:
            out[f"{name}, {idea}"] = judged(fitted(idea, held, hy)(other), vy)
        out[f"{name}, best temperature"] = judged(fitted("temperature", other, vy)(other), vy)

    for method in ("deterministic", "hetsngp", "sngp"):
        steps: dict[str, Any] = {} if method == "deterministic" else {"epochs": 50, "amplitude": 10.0}
        hetsngp.fit_head(model, training, held_out, seed=seed, method=method, **steps)
        out[f"{method}, by AdamW"] = judged(predict(model, vx).probs, vy)
        latent: Any = model.head.latent
        with torch.no_grad():
            logits = [
                torch.cat([latent(rows, posterior=False).mean for rows in h.split(1000)]) for h in (hx, vx)
            ]
        if method == "deterministic":
            out["linear, as trained"] = judged(logits[1].softmax(1), vy)
            add("linear", *logits, tuple(IDEAS))
        elif method == "sngp":
            add("AdamW, stopped early", *logits, tuple(IDEAS))
    unit = latent.kernel.amplitude
    with torch.no_grad():
        phis = [torch.cat([latent.features(rows) for rows in h.split(1000)]) / unit for h in (x, hx, vx)]
    for amplitude in AMPLITUDES:
        phi, held, other = (amplitude * p for p in phis)
        beta = map_estimate(phi, y)
        name = f"exact mode, amplitude {amplitude:g}"
        add(name, held @ beta, other @ beta)
        for shared in (False, True):
            loo = leave_one_out(phi, beta, y, shared=shared)
            both = fitted("temperature", torch.cat([loo, held @ beta]), torch.cat([y, hy]))
            how = ", one curvature for all classes" if shared else ""
            out[f"{name}, temperature of training images left out too{how}"] = judged(both(other @ beta), vy)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/frozen"), help="folder of the features")
    parser.add_argument("--results", type=Path, default=HERE, help="where the result is written")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    args = parser.parse_args()
    model = hetsngp.convert(network().to(args.device), num_classes=10, freeze=True)
    runs = []
    for seed in args.seeds:
        runs.append(one_seed(seed, args.out, model))
        for name, found in runs[-1].items():
            print(seed, f"{name:70s}", {k: round(v, 4) for k, v in found.items()}, flush=True)
    linear = "linear, temperature"
    result: dict[str, Any] = {"what": (__doc__ or "").splitlines()[0], "seeds": args.seeds, "runs": {}}
    for name in runs[0]:
        values = {key: mean_and_error([run[name][key] for run in runs]) for key in runs[0][name]}
        less = mean_and_error([run[name]["ece"] - run[linear]["ece"] for run in runs])
        gap = math.fsum(abs(run[name]["confidence_minus_accuracy"]) for run in runs) / len(runs)
        result["runs"][name] = {**values, "ece_minus_linear": less, "mean_absolute_gap": round(gap, 4)}
    file = args.results / "ece.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
