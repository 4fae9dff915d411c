"""Simulated label noise by class: the truth, P(true | x) and P(given | true) are known."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Noisy(NamedTuple):
    """Examples with wrong labels."""

    true: Any
    """(N,)"""
    given: Any
    """(N,)"""
    probs: Any
    """P(true | x)^(1/blur), with the sum one: (N, K)."""
    transition: Any
    """P(given | true): (K, K)."""

    @property
    def wrong(self) -> Any:
        return self.given != self.true


def draw(probs: Any, rng: Any) -> Any:
    """One class for each row of ``probs`` (N, K): (N,)."""
    return np.minimum((probs.cumsum(1) < rng.random((len(probs), 1))).sum(1), probs.shape[1] - 1)


def pairs(num_classes: int, rate: float) -> Any:
    """Each class is mistaken for the next one."""
    return (1 - rate) * np.eye(num_classes) + rate * np.roll(np.eye(num_classes), 1, axis=1)


def alike(num_classes: int, rate: float) -> Any:
    """Each class is mistaken for all others equally often."""
    others = 1 - np.eye(num_classes)
    return (1 - rate) * np.eye(num_classes) + rate * others / (num_classes - 1)


def noisy(
    seed: int, n: int, transition: Any, *, blur: float = 1.0, spread: float = 3.0, offset: Any = 0.0
) -> Noisy:
    """N examples: the true class is drawn from P(true | x) = softmax(``offset`` + ``spread`` · N(0, 1)), the
    given label from its row of ``transition`` (K, K).
    """
    rng = np.random.default_rng(seed)
    logits = spread * rng.standard_normal((n, len(transition))) + offset
    clean, blurred = (np.exp(z - z.max(1, keepdims=True)) for z in (logits, logits / blur))
    true = draw(clean / clean.sum(1, keepdims=True), rng)
    given = draw(transition[true], rng)
    return Noisy(true, given, blurred / blurred.sum(1, keepdims=True), transition)
