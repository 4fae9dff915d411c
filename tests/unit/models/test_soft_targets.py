"""Soft targets (B, K) in the loss of every method with the softmax link."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from torch import Tensor

import hetsngp
from hetsngp.choices import LIKELIHOODS, NOISES
from hetsngp.models.methods import METHODS

CLASSES = 4


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def soft(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.softmax(2 * torch.randn(rows, CLASSES, generator=seed(5)), -1).to(dtype)


def built(method: str, **options: Any) -> tuple[hetsngp.Classifier, Tensor, Tensor]:
    """Model in evaluation mode, so that no statistics move, inputs and labels."""
    x, y = toy.blobs(CLASSES, 6)
    model = toy.build(method, CLASSES, **options)
    model.loss(x, y, generator=seed())
    return model.eval(), x, y


def gradient(loss: Tensor, model: hetsngp.Classifier) -> Tensor:
    wanted = [p for p in model.parameters() if p.requires_grad]
    parts = torch.autograd.grad(loss, wanted, allow_unused=True)
    both = zip(wanted, parts, strict=True)
    return torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for p, g in both])


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_of_soft_targets_is_finite_and_trains(method: str) -> None:
    model, x, _ = built(method)
    targets = soft(len(x))
    model.train()
    loss = model.loss(x, targets, generator=seed(1))
    assert loss.shape == ()
    assert torch.isfinite(loss)
    assert torch.isfinite(found := gradient(loss, model)).all()
    assert found.norm() > 1e-3
    losses = toy.descend(model, x, targets, 30)
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("method", METHODS)
def test_one_hot_targets_have_the_loss_of_their_labels(method: str, noise: str) -> None:
    """Exactly without noise. With noise labels move the points and take four nodes where soft targets take
    five, and feature noise is sampled: at 512 points the means over these 24 examples are within .02 of the
    integral, and so within .04 of each other.
    """
    model, x, y = built(method, noise=noise, num_samples=512)
    hard, one_hot = (
        model.loss(x, target, generator=seed(1)) for target in (y, F.one_hot(y, CLASSES).float())
    )
    noisy = getattr(model.head, "noise", None) is not None
    assert float((hard - one_hot).detach()) == pytest.approx(0, abs=0.04 if noisy else 1e-5)
    a, b = gradient(hard, model), gradient(one_hot, model)
    assert (a - b).norm() < (0.1 if noisy else 1e-4) * a.norm()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("method", METHODS)
def test_a_mixture_of_targets_has_the_weighted_sum_of_losses(method: str, likelihood: str) -> None:
    """The loss is linear in the targets, at the same points; the penalty of a prior counts once."""
    options = {"likelihood": likelihood} if likelihood == "mean_log" else {}
    model, x, y = built(method, **options)
    first, second = soft(len(x)), F.one_hot(y, CLASSES).float()
    losses = [
        float(model.loss(x, t, generator=seed(1)).detach())
        for t in (first, second, 0.25 * first + 0.75 * second)
    ]
    assert losses[2] == pytest.approx(0.25 * losses[0] + 0.75 * losses[1], abs=1e-4)
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_targets_of_other_floating_types(method: str) -> None:
    model, x, _ = built(method)
    want = float(model.loss(x, soft(len(x)), generator=seed(1)).detach())
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.bfloat16, 0.02)):
        targets = soft(len(x), dtype)
        targets = targets if dtype == torch.float64 else F.one_hot(targets.argmax(-1), CLASSES).to(dtype)
        got = model.loss(x, targets, generator=seed(1)).detach()
        other = want if dtype == torch.float64 else float(
            model.loss(x, targets.float(), generator=seed(1)).detach()
        )  # fmt: skip
        assert float(got) == pytest.approx(other, abs=tolerance)


# --- refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_targets_that_are_no_probabilities_are_refused(method: str) -> None:
    model, x, _ = built(method)
    targets = soft(len(x))
    twice, negative, missing = 2 * targets, targets.clone(), targets.clone()
    negative[3, :2] += torch.tensor([1.5, -1.5])
    missing[2, 1] = torch.nan
    for wrong in (twice, negative, missing, torch.ones_like(targets)):
        with pytest.raises(ValueError, match=re.escape("y / y.sum(-1, keepdim=True)")) as error:
            model.loss(x, wrong)
        assert "link='sigmoid'" in str(error.value)


@pytest.mark.parametrize("method", METHODS)
def test_targets_of_the_wrong_shape_are_refused(method: str) -> None:
    model, x, _ = built(method)
    targets = soft(len(x))
    for wrong in (targets[:, :3] / targets[:, :3].sum(1, keepdim=True), targets[:5]):
        with pytest.raises(ValueError, match="soft targets") as error:
            model.loss(x, wrong)
        assert str(tuple(wrong.shape)) in str(error.value)
        assert str((len(x), CLASSES)) in str(error.value)
    with pytest.raises((TypeError, ValueError), match="y has"):
        model.loss(x, targets.unsqueeze(1))


@pytest.mark.parametrize("method", METHODS)
def test_integer_multi_hot_labels_are_refused(method: str) -> None:
    """A matrix of integers may be one-hot or multi-hot: neither is guessed."""
    model, x, y = built(method)
    with pytest.raises(ValueError, match=re.escape(f"y has shape {(len(x), CLASSES)}") + ".*y.float()"):
        model.loss(x, F.one_hot(y, CLASSES))
    with pytest.raises(TypeError, match="link='sigmoid' for multi-hot labels"):
        model.loss(x, F.one_hot(y, CLASSES).bool())


@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_the_sigmoid_link_takes_multi_hot_labels_as_before(method: str) -> None:
    model, x, y = built_sigmoid(method)
    several = (torch.rand(len(x), CLASSES, generator=seed(2)) < 0.5).float()
    assert torch.isfinite(model.loss(x, several, generator=seed(1)))
    with pytest.raises(ValueError, match="multi-hot"):
        model.loss(x, y)


def built_sigmoid(method: str) -> tuple[hetsngp.Classifier, Tensor, Tensor]:
    x, y = toy.blobs(CLASSES, 6)
    return toy.build(method, CLASSES, link="sigmoid"), x, y
