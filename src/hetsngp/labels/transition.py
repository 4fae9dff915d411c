"""Transition matrices P(given | true), and the posterior of the true label, by EM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Strengths κ of the prior on a row of T, in examples, from "any row" to "the same for every class".
STRENGTHS = torch.logspace(0, 5, 11, dtype=torch.float64)
FIRST_STRENGTH = 10.0
# Rounds of EM with the first strength; rounds between two choices of it; rounds at most; nats per example by
# which a round must lower the loss.
FIRST_ROUNDS, ROUNDS_PER_STRENGTH, MAX_ROUNDS, MIN_GAIN = 15, 5, 60, 1e-6
# Draws of Gibbs sampling before those that count.
FIRST_DRAWS = 10
# Examples × classes at a time: some megabytes, which stay in a core's cache.
CHUNK = 2**19
# Smallest count that leaving an example out may leave.
SMALLEST = 1e-9
MISSING = -1
"""Label of an example that an annotator has not seen."""


@dataclass(frozen=True)
class TransitionFit:
    """Result of :func:`fit_transition`, for N examples, K classes and A annotators."""

    concentration: Tensor
    """(A, K, K): parameters of the Dirichlet posterior of each row of T, float64."""
    loss: Tensor
    """(N,): −log P(labels of the example | x), with T estimated without the example."""
    strength: float
    """κ: examples of each class that the prior on T counts as."""

    @property
    def transition(self) -> Tensor:
        """E T = P(given | true): (A, K, K)."""
        return _mean(self.concentration)


def fit_transition(log_clean: Tensor, labels: Tensor) -> TransitionFit:
    """Fit T to ``labels`` (N, A), −1 where there is none, by EM; ``log_clean`` (N, K): log P(true | x).

    P(labels | x) = Σ_k P(k | x) ∏_a T_a[k, label_a]. Each row of T has a Dirichlet prior, κ examples of the
    mean (1 − ε) on the class itself and ε on the others by their frequency; several annotators have the prior
    mean in common, which is estimated from all of them in the same way. ε and κ are estimated too (empirical
    Bayes): noise that is alike in every class needs one number, and labels that are mistaken for one other
    class need a whole matrix.
    """
    counts, last = _confusion(log_clean, labels), float("inf")
    prior = _Prior(labels, log_clean.shape[1])
    for number in range(MAX_ROUNDS):
        # The strength must not be chosen before the noise is known to have a pattern.
        choose = number >= FIRST_ROUNDS and number % ROUNDS_PER_STRENGTH == 0
        concentration = counts + prior(counts, choose)
        counts, loss = _expected_counts(log_clean, labels, concentration)
        mean = float(loss.mean())
        if number > FIRST_ROUNDS and last - mean < MIN_GAIN:
            break
        last = mean
    return TransitionFit(concentration, _leave_one_out(log_clean, labels, concentration), prior.strength)


def draw_wrong(log_clean: Tensor, labels: Tensor, concentration: Tensor, draws: int) -> Tensor:
    """Draw numbers of wrong labels from their posterior: (draws,), always the same.

    Gibbs sampling of T and the true classes in turn, from the fit on. Draws around the expected counts of EM
    alone would take the true classes as known, and so say too little about T.
    """
    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    prior, num_classes, found = _Prior(labels, log_clean.shape[1]), log_clean.shape[1], []
    for number in range(-FIRST_DRAWS, draws):
        transition = torch.from_numpy(random.standard_gamma(concentration.numpy())).clamp_min(1e-12)
        transition /= transition.sum(-1, keepdim=True)
        counts = torch.zeros_like(concentration)
        for rows, posterior in posterior_of_true(log_clean, labels, transition):
            point = torch.rand(len(posterior), 1, generator=generator)
            true = torch.searchsorted(posterior.cumsum(1), point).clamp_max(num_classes - 1)
            for each, given in zip(counts, labels[rows].unbind(1), strict=True):
                known = given != MISSING
                each.index_put_((true[known, 0], given[known]), each.new_ones(()), accumulate=True)
        concentration = counts + prior(counts, number % ROUNDS_PER_STRENGTH == 0)
        if number >= 0:
            found.append(counts.sum() - counts.diagonal(dim1=1, dim2=2).sum())
    return torch.stack(found)


def posterior_of_true(
    log_clean: Tensor, labels: Tensor, transition: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield P(true | x, labels) (b, K) of consecutive examples, with ``transition`` (A, K, K)."""
    by_given = _by_given(transition, log_clean)
    for rows in _chunks(log_clean):
        yield rows, torch.softmax(_joint(log_clean[rows], labels[rows], by_given), 1)


def label_losses(log_clean: Tensor, labels: Tensor, transition: Tensor) -> Tensor:
    """−log P(labels of an example | x) (N,), with ``transition`` (A, K, K)."""
    by_given = _by_given(transition, log_clean)
    parts = (_joint(log_clean[rows], labels[rows], by_given) for rows in _chunks(log_clean))
    return torch.cat([-joint.logsumexp(1).double() for joint in parts])


# --- the steps --------------------------------------------------------------------------------------------


class _Prior:
    """Parameters of the Dirichlet prior of T, (1, K, K) or (A, K, K), from the counts that it explains."""

    def __init__(self, labels: Tensor, num_classes: int) -> None:
        frequency = _label_counts(labels, num_classes) + 1
        others = frequency.expand(num_classes, -1).clone().fill_diagonal_(0)
        self.others = others / others.sum(1, keepdim=True)
        self.strength = self.own = FIRST_STRENGTH

    def __call__(self, counts: Tensor, choose: bool) -> Tensor:
        """``counts``: (A, K, K) of true class k given as j; ``choose``: choose the strengths anew."""
        pooled = counts.sum(0)
        centre = _centre(pooled, self.others)
        if choose:
            self.strength = _best_strength(pooled.unsqueeze(0), centre)
        prior = self.strength * centre
        if len(counts) > 1:
            centre = (pooled + prior) / (pooled + prior).sum(1, keepdim=True)
            self.own = _best_strength(counts, centre) if choose else self.own
            prior = self.own * centre
        return prior.unsqueeze(0)


def _chunks(log_clean: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK // log_clean.shape[1])
    for start in range(0, len(log_clean), size):
        yield slice(start, start + size)


def _by_given(transition: Tensor, like: Tensor) -> Tensor:
    """log T with a row for each given label, and zeros for −1, where there is none: (A, K + 1, K)."""
    return F.pad(transition.log().to(like).mT, (0, 0, 0, 1))


def _joint(log_clean: Tensor, labels: Tensor, by_given: Tensor) -> Tensor:
    """log P(true = k, labels | x): (b, K)."""
    joint = log_clean
    for given, log_t in zip(labels.unbind(1), by_given, strict=True):
        joint = joint + log_t[given]
    return joint


def _expected_counts(log_clean: Tensor, labels: Tensor, concentration: Tensor) -> tuple[Tensor, Tensor]:
    """Expected numbers (A, K, K) of true class k given as j, and −log P(labels of an example) (N,)."""
    by_given = _by_given(_mean(concentration), log_clean)
    counts, losses = _no_counts(labels, log_clean.shape[1]), []
    for rows in _chunks(log_clean):
        joint = _joint(log_clean[rows], labels[rows], by_given)
        losses.append(-joint.logsumexp(1).double())
        _add_counts(counts, joint.softmax(1).double(), labels[rows])
    return counts, torch.cat(losses)


def _leave_one_out(log_clean: Tensor, labels: Tensor, concentration: Tensor) -> Tensor:
    """−log P(labels of an example) (N,), with T without what the example added to its estimate.

    An example adds q(k) = P(true = k | x, labels) to the counts of its label in row k.
    """
    by_given, total = _by_given(_mean(concentration), log_clean), concentration.sum(-1)
    losses = []
    for rows in _chunks(log_clean):
        joint = _joint(log_clean[rows], labels[rows], by_given)
        own = joint.softmax(1).double()
        without = log_clean[rows].double()
        for given, counts, row_sums in zip(labels[rows].unbind(1), concentration, total, strict=True):
            rest = (counts.mT[given.clamp_min(0)] - own).clamp_min(SMALLEST) / (row_sums - own)
            without = without + rest.log().masked_fill((given == MISSING).unsqueeze(1), 0.0)
        losses.append(-without.logsumexp(1))
    return torch.cat(losses)


def _mean(concentration: Tensor) -> Tensor:
    return concentration / concentration.sum(-1, keepdim=True)


def _confusion(log_clean: Tensor, labels: Tensor) -> Tensor:
    """How often class k is given as j if the model is right: (A, K, K), where EM begins."""
    counts = _no_counts(labels, log_clean.shape[1])
    for rows in _chunks(log_clean):
        _add_counts(counts, log_clean[rows].softmax(1).double(), labels[rows])
    return counts


def _no_counts(labels: Tensor, num_classes: int) -> Tensor:
    """Zeros (A, K, K), by column in memory: examples add to the column of their label."""
    return torch.zeros(labels.shape[1], num_classes, num_classes, dtype=torch.float64).mT


def _add_counts(counts: Tensor, posterior: Tensor, labels: Tensor) -> None:
    for each, given in zip(counts, labels.unbind(1), strict=True):
        known = given != MISSING
        each.mT.index_add_(0, given[known], posterior[known])


def _label_counts(labels: Tensor, num_classes: int) -> Tensor:
    return torch.bincount(labels[labels != MISSING], minlength=num_classes).double()


def _centre(counts: Tensor, others: Tensor) -> Tensor:
    """Mean of the prior, (1 − ε) I + ε·others: (K, K), with ε the share of wrong labels in ``counts``."""
    noise = float((1 - counts.trace() / counts.sum()).clamp(1e-4, 1 - 1e-4))
    return noise * others + (1 - noise) * torch.eye(len(counts), dtype=counts.dtype)


def _best_strength(counts: Tensor, centre: Tensor) -> float:
    """κ with the largest Dirichlet-multinomial likelihood of ``counts`` (A, K, K) around ``centre``."""
    used = counts > 0  # the other cells add nothing, and lgamma takes most of the time
    observed, centres, totals = counts[used], centre.expand_as(counts)[used], counts.sum(-1)

    def log_likelihood(strength: Tensor) -> float:
        prior = strength * centres
        rows = torch.lgamma(strength) - torch.lgamma(strength + totals)  # rows of the centre have the sum one
        return float(rows.sum() + (torch.lgamma(prior + observed) - torch.lgamma(prior)).sum())

    return float(max(STRENGTHS, key=log_likelihood))
