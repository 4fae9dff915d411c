"""What the experiments on pretrained networks share: baselines on features, tables, paired intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import hetsngp
from hetsngp import metrics
from hetsngp.files import write_json
from hetsngp.frozen.features import FeatureSet
from hetsngp.paper.results import versions

RESAMPLES = 2000
COVERAGES = (50, 60, 70, 80, 90, 100)
"""Per cent of the test examples that are answered, the most confident ones."""
EXACTLY = 1e-12


# --- predictions of one fitted model ----------------------------------------------------------------------


@dataclass
class Predictions:
    """Probabilities (n, K) of the test examples with their labels, and OOD scores by name and set ("id" is
    that of the test examples).
    """

    probs: Tensor
    labels: Tensor
    scores: dict[str, dict[str, Tensor]]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def nll(self) -> Tensor:
        return F.nll_loss(self.probs.clamp_min(EXACTLY).log(), self.labels, reduction="none").double()

    @property
    def correct(self) -> Tensor:
        return (self.probs.argmax(1) == self.labels).double()

    def numbers(self) -> dict[str, float]:
        """Accuracy, NLL, ECE, risk at coverage; AUROC, AUPR and FPR95 of each score on each OOD set."""
        confidence = self.probs.max(1).values
        found = {
            "accuracy": metrics.accuracy(self.probs, self.labels),
            "nll": float(self.nll.mean()),
            "ece": metrics.ece(self.probs, self.labels),
            "aurc": metrics.aurc(-confidence, self.correct.bool()),
        }
        for percent in COVERAGES:
            answered = metrics.accuracy_at_coverage(-confidence, self.correct.bool(), percent / 100)
            found[f"error_at_{percent}"] = 1 - answered
        for score, by_set in self.scores.items():
            for name, values in by_set.items():
                if name != "id":
                    pair = by_set["id"].double(), values.double()
                    found[f"{name}/{score}/auroc"] = metrics.auroc(*pair)
                    found[f"{name}/{score}/aupr"] = metrics.aupr(*pair)
                    found[f"{name}/{score}/fpr95"] = metrics.fpr95(*pair)
        return found


def predict(model: hetsngp.Classifier, sets: Mapping[str, FeatureSet], **about: Any) -> Predictions:
    """Predictions of a model on features; ``sets["id"]`` are the test examples."""
    view = model.on_features()

    def batches(h: Tensor) -> hetsngp.Prediction:
        return hetsngp.Prediction.cat([view.predict(x) for x in h.split(1000)])

    found = {name: batches(each.h) for name, each in sets.items()}
    names = ("ood_score", "model_uncertainty", "latent_variance", "total_uncertainty")
    scores = {each: {name: getattr(p, each) for name, p in found.items()} for each in names}
    if not model.head.has_posterior:
        del scores["model_uncertainty"], scores["latent_variance"]
    return Predictions(found["id"].probs, sets["id"].y, scores, about)


# --- baselines --------------------------------------------------------------------------------------------

Prepare = Callable[[Tensor], Tensor]


def preparations(h: Tensor) -> dict[str, Prepare]:
    """Two ways in which features are usually prepared for a softmax: unit length, and standardised."""
    mean, std = h.mean(0), h.std(0).clamp_min(1e-6)
    root = h.shape[1] ** 0.5
    return {"unit length": lambda x: root * F.normalize(x, dim=1), "standardised": lambda x: (x - mean) / std}


def best_temperature(logits: Tensor, y: Tensor) -> tuple[float, float]:
    """Temperature of the lowest NLL on a fine grid, and that NLL."""
    grid = torch.linspace(-2.5, 2.5, 251).exp()
    losses = torch.stack([F.cross_entropy(logits / t, y) for t in grid])
    return float(grid[losses.argmin()]), float(losses.min())


def softmax(
    train: FeatureSet,
    held_out: FeatureSet,
    sets: Mapping[str, FeatureSet],
    strengths: Sequence[float] = (0.03, 0.1, 0.3),
    neighbours: int = 10,
) -> Predictions:
    """Logistic regression with the OOD scores that people use on it. Regularisation and preparation of the
    features are those of the lowest held-out NLL at the best temperature, which is set.

    MSP, entropy and energy at that temperature; Mahalanobis distance to the nearest class mean under one
    covariance, the same less the distance under the covariance of all features (relative), and the cosine
    distance to the k-th nearest training example.
    """
    best: tuple[float, Any] = (float("inf"), None)
    settings = []
    for how, prepare in preparations(train.h).items():
        x = prepare(train.h)
        for strength in strengths:
            began = time.process_time()
            weight, bias = logistic_regression(x, train.y, strength)
            seconds = time.process_time() - began
            temperature, nll = best_temperature(prepare(held_out.h) @ weight + bias, held_out.y)
            settings.append({"features": how, "C": strength, "nll": round(nll, 4), "cpu": round(seconds, 1)})
            if nll < best[0]:
                best = nll, (prepare, weight, bias, temperature, settings[-1], seconds)
    prepare, weight, bias, temperature, chosen, seconds = best[1]
    logits = {name: (prepare(each.h) @ weight + bias) / temperature for name, each in sets.items()}
    scores: dict[str, dict[str, Tensor]] = {
        "msp": {name: -torch.softmax(z, 1).max(1).values for name, z in logits.items()},
        "entropy": {name: torch.distributions.Categorical(logits=z).entropy() for name, z in logits.items()},
        "energy": {name: -z.logsumexp(1) for name, z in logits.items()},
        **distances(train, sets, neighbours),
    }
    about = {"chosen": chosen, "temperature": temperature, "tried": settings, "cpu": round(seconds, 1)}
    return Predictions(torch.softmax(logits["id"], 1), sets["id"].y, scores, about)


def logistic_regression(x: Tensor, y: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """W (D, K) and b (K,) at the minimum of C·Σ NLL + ½‖W‖², as scikit-learn has it, in float32."""
    classes = int(y.max()) + 1
    weight, bias = torch.zeros(x.shape[1], classes), torch.zeros(classes)
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=1000, history_size=20, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weight + bias, y) + weight.square().sum() / (2 * strength * len(y))
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach(), bias.detach()


def distances(
    train: FeatureSet, sets: Mapping[str, FeatureSet], neighbours: int
) -> dict[str, dict[str, Tensor]]:
    """OOD scores that need no classifier."""
    x, y = train.h.double(), train.y
    classes = y.unique()
    means = torch.stack([x[y == c].mean(0) for c in classes])
    places = torch.searchsorted(classes, y)
    within, mean = _whiten(x - means[places]), x.mean(0)
    around = _whiten(x - mean)
    unit = F.normalize(train.h, dim=1)
    found: dict[str, dict[str, Tensor]] = {"mahalanobis": {}, "relative mahalanobis": {}, "knn": {}}
    for name, each in sets.items():
        h = each.h.double()
        nearest = torch.cdist(h @ within, means @ within).square().min(1).values
        found["mahalanobis"][name] = nearest
        found["relative mahalanobis"][name] = nearest - ((h - mean) @ around).square().sum(1)
        similarity = F.normalize(each.h, dim=1)
        found["knn"][name] = torch.cat(
            [-(part @ unit.T).topk(neighbours, 1).values[:, -1] for part in similarity.split(1000)]
        )
    return found


def _whiten(centred: Tensor) -> Tensor:
    """L with LLᵀ the inverse of the covariance (D, D), a small ridge added."""
    covariance = centred.T @ centred / len(centred)
    covariance.diagonal().add_(1e-6 * covariance.diagonal().mean())
    return torch.linalg.inv(torch.linalg.cholesky(covariance)).T


# --- labels -----------------------------------------------------------------------------------------------


def flipped(y: Tensor, share: float, num_classes: int, seed: int) -> Tensor:
    """Labels of which this share is replaced by another class, all others being equally probable."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.rand(len(y), generator=g) < share
    return torch.where(rows, (y + torch.randint(1, num_classes, y.shape, generator=g)) % num_classes, y)


# --- tables -----------------------------------------------------------------------------------------------


def mean_and_error(values: Sequence[float]) -> list[float | None]:
    """Mean and standard error over seeds; no error of one seed."""
    error = round(float(np.std(values, ddof=1) / len(values) ** 0.5), 4) if len(values) > 1 else None
    return [round(float(np.mean(values)), 4), error]


def summary(runs: Sequence[Predictions]) -> dict[str, list[float | None]]:
    """Mean and standard error over seeds of every number."""
    each = [run.numbers() for run in runs]
    return {name: mean_and_error([numbers[name] for numbers in each]) for name in each[0]}


def paired(
    ours: Sequence[Predictions], theirs: Sequence[Predictions], columns: Mapping[str, tuple[str, str, str]]
) -> dict[str, dict[str, float]]:
    """Ours less theirs with a 95 % interval of a bootstrap over examples and seeds, paired by both.

    ``columns``: AUROCs to compare, (set, our score, their score) by name. Baselines without random numbers
    may have one run, which then counts for every seed.
    """
    seeds = max(len(ours), len(theirs))
    ours, theirs = (list(each) * seeds if len(each) == 1 else list(each) for each in (ours, theirs))
    random = np.random.default_rng(0)
    size = len(ours[0].labels)
    shares = random.multinomial(seeds, [1 / seeds] * seeds, RESAMPLES) / seeds
    drawn = {"id": random.multinomial(size, [1 / size] * size, RESAMPLES)}
    found: dict[str, dict[str, float]] = {}

    def add(name: str, value: Callable[[Predictions, np.ndarray, str], np.ndarray]) -> None:
        gap = np.stack(
            [value(a, drawn["id"], "ours") - value(b, drawn["id"], "theirs") for a, b in _zip(ours, theirs)],
            1,
        )
        once = np.ones((1, size))
        exact = np.mean(
            [value(a, once, "ours")[0] - value(b, once, "theirs")[0] for a, b in _zip(ours, theirs)]
        )
        low, high = np.quantile((gap * shares).sum(1), [0.025, 0.975])
        found[name] = {"difference": round(float(exact), 4), "low": round(low, 4), "high": round(high, 4)}

    add("accuracy", lambda p, counts, _: counts @ p.correct.numpy() / counts.sum(1))
    add("nll", lambda p, counts, _: counts @ p.nll.numpy() / counts.sum(1))
    add("ece", lambda p, counts, _: _ece(p, counts))
    for name, (other, our_score, their_score) in columns.items():
        outside = len(ours[0].scores[our_score][other])
        drawn[other] = random.multinomial(outside, [1 / outside] * outside, RESAMPLES)

        def value(
            p: Predictions, counts: np.ndarray, whose: str, column: Any = (other, our_score, their_score)
        ) -> np.ndarray:
            scores = p.scores[column[1 if whose == "ours" else 2]]
            others = drawn[column[0]] if len(counts) > 1 else np.ones((1, len(scores[column[0]])))
            return _auroc(scores["id"].numpy(), scores[column[0]].numpy(), counts, others)

        add(name, value)
    return found


def _zip(ours: Sequence[Predictions], theirs: Sequence[Predictions]) -> Any:
    return zip(ours, theirs, strict=True)


def _ece(p: Predictions, counts: np.ndarray, bins: int = 15) -> np.ndarray:
    confidence = p.probs.max(1).values.double().numpy()
    gap = np.zeros((len(confidence), bins))
    gap[np.arange(len(gap)), np.clip((confidence * bins).astype(int), 0, bins - 1)] = (
        p.correct.numpy() - confidence
    )
    return np.abs(counts @ gap).sum(1) / counts.sum(1)


def _auroc(inside: np.ndarray, outside: np.ndarray, counts: np.ndarray, others: np.ndarray) -> np.ndarray:
    """AUROC where each example counts so often, ties half: counts (R, n), others (R, m) → (R,)."""
    values, place = np.unique(np.concatenate([inside, outside]), return_inverse=True)
    at, of = place[: len(inside)], place[len(inside) :]
    found = np.empty(len(counts))
    for row, (a, b) in enumerate(zip(counts, others, strict=True)):
        own = np.bincount(at, weights=a, minlength=len(values))
        below = np.cumsum(own) - own / 2
        found[row] = (b * below[of]).sum() / (a.sum() * b.sum())
    return found


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Write results with the versions and the commit that they are of."""
    write_json(file, {**content, **versions()})
    print(f"wrote {file.name}", flush=True)
