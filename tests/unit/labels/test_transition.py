"""Transition matrices: against Bayes by loops, a direct optimum, and fits without an example."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tests.unit.labels.made_noise import alike, draw, noisy, pairs
from torch import Tensor

from hetsngp.labels import transition as module
from hetsngp.labels.transition import (
    MISSING,
    draw_wrong,
    fit_transition,
    label_losses,
    posterior_of_true,
)

K = 3


def annotated(seed: int = 0, n: int = 60, annotators: int = 3, gaps: float = 0.4) -> tuple[Tensor, Tensor]:
    """log P(true | x) (N, K), and labels (N, A) of annotators with different noise and with gaps."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(K, 0.5), n)
    true = draw(probs, rng)
    labels = np.stack([draw(pairs(K, 0.1 + 0.2 * a)[true], rng) for a in range(annotators)], 1)
    labels[rng.random(labels.shape) < gaps] = MISSING
    labels[0] = MISSING  # an example without any label
    return torch.from_numpy(np.maximum(probs, 1e-5)).log(), torch.from_numpy(labels)


def some_transition(annotators: int, seed: int = 1) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.dirichlet(np.ones(K), (annotators, K)))


def joint_by_loops(log_clean: Tensor, labels: Tensor, transition: Tensor) -> Any:
    """P(true = k, labels | x): (N, K)."""
    joint = log_clean.exp().numpy().astype(np.float64).copy()
    for i, k in itertools.product(range(len(joint)), range(joint.shape[1])):
        for a, label in enumerate(labels[i].tolist()):
            if label != MISSING:
                joint[i, k] *= float(transition[a, k, label])
    return joint


# --- the posterior ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("annotators", [1, 3])
def test_the_posterior_is_that_of_bayes(annotators: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 7 * K)  # several chunks, the last one smaller
    log_clean, labels = annotated(annotators=annotators)
    transition = some_transition(annotators)
    joint = joint_by_loops(log_clean, labels, transition)
    chunks = list(posterior_of_true(log_clean, labels, transition))
    assert len(chunks) == 9
    np.testing.assert_allclose(
        torch.cat([part for _, part in chunks]), joint / joint.sum(1, keepdims=True), rtol=1e-9
    )
    np.testing.assert_allclose(
        label_losses(log_clean, labels, transition), -np.log(joint.sum(1)), rtol=1e-9, atol=1e-12
    )


# --- EM -----------------------------------------------------------------------------------------------------


def expected_counts(log_clean: Tensor, labels: Tensor, transition: Tensor) -> Any:
    joint = joint_by_loops(log_clean, labels, transition)
    posterior = joint / joint.sum(1, keepdims=True)
    counts = np.zeros(transition.shape)
    for i, a in itertools.product(range(len(labels)), range(labels.shape[1])):
        if labels[i, a] != MISSING:
            counts[a, :, int(labels[i, a])] += posterior[i]
    return counts


def penalised(log_clean: Tensor, labels: Tensor, transition: Tensor, prior: Any) -> float:
    """log P(labels | x, T) + Σ prior·log T, which EM with this prior climbs."""
    likelihood = np.log(joint_by_loops(log_clean, labels, transition).sum(1)).sum()
    return float(likelihood + (prior * np.log(transition.numpy())).sum())


@pytest.mark.parametrize("annotators", [1, 2])
def test_it_ends_at_the_optimum_of_its_objective(annotators: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The direct optimum of the likelihood and the prior that EM ended with, by SciPy from elsewhere."""
    monkeypatch.setattr(module, "MIN_GAIN", 0.0)
    monkeypatch.setattr(module, "MAX_ROUNDS", 2000)
    log_clean, labels = annotated(n=120, annotators=annotators, gaps=0.2 * (annotators - 1))
    fit = fit_transition(log_clean, labels)
    prior = fit.concentration.numpy() - expected_counts(log_clean, labels, fit.transition)
    assert (prior > 0).all()
    if annotators == 1:
        np.testing.assert_allclose(prior.sum(-1), fit.strength, rtol=1e-4)  # examples of each class

    def objective(flat: Any) -> tuple[float, Any]:
        logits = torch.tensor(flat).view(annotators, K, K).requires_grad_()
        log_t = torch.log_softmax(logits, -1)
        joint = log_clean
        for a in range(annotators):
            known = (labels[:, a] != MISSING).unsqueeze(1)
            joint = joint + torch.where(known, log_t[a].T[labels[:, a].clamp_min(0)], 0.0)
        loss = -joint.logsumexp(1).sum() - (torch.from_numpy(prior) * log_t).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        return float(loss.detach()), logits.grad.numpy().ravel()

    start = np.tile(2 * np.eye(K), (annotators, 1, 1)).ravel()
    options = {"gtol": 1e-9, "ftol": 0.0, "maxiter": 5000}
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    direct = torch.softmax(torch.tensor(found.x).view(annotators, K, K), -1)
    np.testing.assert_allclose(fit.transition, direct, atol=1e-4)
    assert -found.fun == pytest.approx(penalised(log_clean, labels, fit.transition, prior), abs=1e-5)


def test_each_round_climbs() -> None:
    log_clean, labels = annotated(n=80, annotators=2)
    prior = torch.from_numpy(np.random.default_rng(2).gamma(1.0, 2.0, (2, K, K)))
    concentration = prior + 20 * some_transition(2)
    values = []
    for _ in range(25):
        transition = concentration / concentration.sum(-1, keepdim=True)
        values.append(penalised(log_clean, labels, transition, prior.numpy()))
        counts, loss = module._expected_counts(log_clean, labels, concentration)
        np.testing.assert_allclose(counts, expected_counts(log_clean, labels, transition), rtol=1e-9)
        np.testing.assert_allclose(loss, label_losses(log_clean, labels, transition), rtol=1e-12)
        concentration = counts + prior
    assert np.diff(values).min() >= -1e-9
    assert values[-1] > values[0] + 1


@pytest.mark.parametrize("made", [pairs(4, 0.3), alike(4, 0.3)], ids=["pairs", "alike"])
def test_the_true_matrix_is_found(made: Any) -> None:
    data = noisy(0, 20_000, made)
    fit = fit_transition(torch.from_numpy(data.probs).log(), torch.from_numpy(data.given)[:, None])
    np.testing.assert_allclose(fit.transition[0], made, atol=0.02)


def test_the_strength_of_the_prior_says_how_alike_the_classes_are() -> None:
    strengths = []
    for made in (pairs(5, 0.3), alike(5, 0.3)):
        data = noisy(0, 4000, made, spread=6.0)
        log_clean, labels = torch.from_numpy(data.probs).log(), torch.from_numpy(data.given)[:, None]
        strengths.append(fit_transition(log_clean, labels).strength)
    assert strengths[0] < 20
    assert strengths[1] > 300


def test_an_annotator_without_labels_is_like_the_others() -> None:
    log_clean, labels = annotated(n=400, annotators=2)
    alone = fit_transition(log_clean, labels)
    joined = fit_transition(log_clean, torch.cat([labels, torch.full((400, 1), MISSING)], 1))
    assert torch.equal(joined.transition[:2], alone.transition)
    assert torch.equal(joined.loss, alone.loss)
    np.testing.assert_allclose(joined.transition[2].sum(1), 1.0)
    low, high = alone.transition.amin(0), alone.transition.amax(0)
    assert bool(((joined.transition[2] > low - 0.1) & (joined.transition[2] < high + 0.1)).all())


# --- leave-one-out ------------------------------------------------------------------------------------------


def test_where_the_truth_is_known_an_example_is_left_out_exactly() -> None:
    """P(true | x) is 0 or 1: leaving out is to count one example less."""
    rng = np.random.default_rng(0)
    true = rng.integers(K, size=40)
    given = draw(pairs(K, 0.3)[true], rng)
    certain = np.full((40, K), -80.0)
    certain[np.arange(40), true] = 0.0
    fit = fit_transition(torch.from_numpy(certain), torch.from_numpy(given)[:, None])
    counts = fit.concentration[0].numpy()
    for i, (k, j) in enumerate(zip(true, given, strict=True)):
        expected = -np.log((counts[k, j] - 1) / (counts[k].sum() - 1))
        assert float(fit.loss[i]) == pytest.approx(expected, rel=1e-9)


def test_leaving_out_is_nearly_what_a_fit_without_the_example_says() -> None:
    """Most of the change is that T has an example less; that others' true classes look different too, and the
    strength of the prior, is left out.
    """
    data, n = noisy(3, 300, pairs(3, 0.15), spread=4.0), 300
    log_clean, labels = torch.from_numpy(data.probs).log(), torch.from_numpy(data.given)[:, None]
    fit = fit_transition(log_clean, labels)
    within, guessed = label_losses(log_clean, labels, fit.transition).numpy(), fit.loss.numpy()
    exact = np.empty(n)
    for i in range(n):
        rest = np.arange(n) != i
        refitted = fit_transition(log_clean[rest], labels[rest]).transition
        exact[i] = float(label_losses(log_clean[[i]], labels[[i]], refitted))
    assert abs(guessed.mean() - exact.mean()) < 0.5 * (exact.mean() - within.mean())
    some = np.flatnonzero(data.wrong)
    error, change = np.abs(guessed - exact)[some], np.abs(within - exact)[some]
    assert change.mean() > 0.02
    assert error.mean() < 0.5 * change.mean()


# --- draws of the number of wrong labels --------------------------------------------------------------------


def test_draws_are_the_same_each_time_and_leave_the_global_state_alone() -> None:
    log_clean, labels = annotated(annotators=2)
    concentration = fit_transition(log_clean, labels).concentration
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[union-attr] # noqa: NPY002
    first = draw_wrong(log_clean, labels, concentration, 5)
    again = draw_wrong(log_clean, labels, concentration, 5)
    assert first.shape == (5,)
    assert torch.equal(first, again)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # type: ignore[index] # noqa: NPY002


def test_with_much_data_draws_vary_as_the_truth_of_each_label() -> None:
    """T is known then: the number is a sum of independent events."""
    data = noisy(0, 40_000, alike(2, 0.2), spread=4.0)
    log_clean, labels = torch.from_numpy(data.probs).log(), torch.from_numpy(data.given)[:, None]
    draws = draw_wrong(log_clean, labels, fit_transition(log_clean, labels).concentration, 60)
    joint = joint_by_loops(log_clean, labels, torch.from_numpy(data.transition)[None])
    wrong = 1 - joint[np.arange(len(joint)), data.given] / joint.sum(1)
    spread = np.sqrt((wrong * (1 - wrong)).sum())
    assert spread < float(draws.std()) < 2 * spread
    assert abs(float(draws.mean()) - data.wrong.sum()) < 4 * float(draws.std())
