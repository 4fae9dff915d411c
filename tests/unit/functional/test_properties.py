"""What must hold for any Gaussian over any number of classes."""

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetsngp.functional.link import num_points, sigmoid_log_probs, softmax_log_probs, softmax_probs
from hetsngp.functional.uncertainty import binary_entropy, entropy, mixture, softmax_split
from hetsngp.types import Prediction, UtilityNormal


@st.composite
def utilities(draw: st.DrawFn) -> UtilityNormal:
    classes, rank = draw(st.integers(2, 40)), draw(st.integers(0, 50))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    width = 10 ** draw(st.floats(-3, 1.3))
    mean = 10 ** draw(st.floats(-1, 2)) * torch.randn(2, classes, generator=g, dtype=torch.float64)
    var = width**2 * torch.rand(2, classes, generator=g, dtype=torch.float64)
    factor = width * torch.randn(2, classes, rank, generator=g, dtype=torch.float64) if rank else None
    return UtilityNormal(mean, var, factor)


@settings(max_examples=60, deadline=None)
@given(utilities())
def test_probabilities_are_probabilities(u: UtilityNormal) -> None:
    probs, points = softmax_probs(u)
    assert torch.isfinite(probs).all()
    assert (probs >= 0).all()
    assert torch.allclose(probs.sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-9)
    assert points == num_points(u, None, "sobol") <= 512
    log_probs = softmax_log_probs(u, num_samples=32, seed=0)
    assert torch.isfinite(log_probs).all()
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-9)
    log_yes, log_no = sigmoid_log_probs(u)
    assert torch.allclose(log_yes.exp() + log_no.exp(), torch.ones_like(log_yes), atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(utilities(), st.floats(-50, 50))
def test_a_common_shift_of_the_logits_changes_nothing(u: UtilityNormal, shift: float) -> None:
    probs, _ = softmax_probs(u, num_samples=64)
    moved, _ = softmax_probs(UtilityNormal(u.mean + shift, u.var, u.factor), num_samples=64)
    assert torch.allclose(probs, moved, atol=1e-9)


def test_entropy_of_a_probability_rounded_above_one_is_not_negative() -> None:
    probs = torch.tensor([[1 + 2**-52, 1e-40], [1.0, 0.0]], dtype=torch.float64)
    assert (entropy(probs) >= 0).all()


@settings(max_examples=40, deadline=None)
@given(utilities())
def test_model_uncertainty_lies_between_zero_and_what_there_is(u: UtilityNormal) -> None:
    noise = UtilityNormal(torch.zeros_like(u.mean), u.var.flip(0), None)
    for given_noise in (noise, None):
        split = softmax_split(u, given_noise)
        assert (split.model >= 0).all()
        assert (split.model <= math.log(u.mean.shape[-1]) + 0.1).all()
        # Averaging over the function cannot make a label more certain than its noise alone leaves it.
        assert (split.model <= entropy(split.probs) + 0.1).all()


@st.composite
def members(draw: st.DrawFn) -> tuple[list[Prediction], bool]:
    """Predictions of the same three inputs by several models, from certain to ignorant and from equal to
    unrelated, in float32."""
    classes, sigmoid = draw(st.integers(2, 30)), draw(st.booleans())
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    common, apart = 10 ** draw(st.floats(-2, 2)), draw(st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 100.0]))
    shared = common * torch.randn(3, classes, generator=g)
    each = []
    for _ in range(draw(st.integers(1, 5))):
        logits = shared + apart * torch.randn(3, classes, generator=g)
        probs = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
        total = binary_entropy(probs) if sigmoid else entropy(probs)
        model = total * torch.rand(3, generator=g) * draw(st.sampled_from([0.0, 1.0]))
        data = total - model
        inner = model * draw(st.sampled_from([0.0, 1.0]))  # disagreement, if it is a mixture itself
        zero = torch.zeros(3)
        each.append(Prediction(probs, probs, data + model, data, model, zero, model, inner, zero.long()))
    return each, sigmoid


@settings(max_examples=100, deadline=None)
@given(members())
def test_the_uncertainty_of_a_mixture_is_never_negative_and_adds_up(given_members: tuple[Any, bool]) -> None:
    each, sigmoid = given_members
    p = mixture(each, sigmoid=sigmoid)
    assert torch.equal(p.data_uncertainty + p.model_uncertainty, p.total_uncertainty)
    for name in ("data", "function", "member", "model", "total"):
        assert (getattr(p, f"{name}_uncertainty") >= 0).all(), name
    most = math.log(2) * p.probs.shape[-1] if sigmoid else math.log(p.probs.shape[-1])
    assert (p.total_uncertainty <= most + 1e-4).all()
    inner = sum(e.member_uncertainty for e in each) / len(each)
    between = math.log(len(each)) * (p.probs.shape[-1] if sigmoid else 1)  # as much as there is to know
    assert (p.member_uncertainty <= inner + between + 1e-4).all()
    # Disagreement is I(y; member): mixing only adds uncertainty.
    assert (p.total_uncertainty >= sum(e.total_uncertainty for e in each) / len(each) - 1e-4).all()
    back = mixture(each[::-1], sigmoid=sigmoid)
    torch.testing.assert_close(back.member_uncertainty, p.member_uncertainty, rtol=1e-3, atol=1e-5)
