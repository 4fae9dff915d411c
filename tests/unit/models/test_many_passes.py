"""Forward passes in any order and number before one backward pass, and forward passes that are repeated.

Activation checkpointing runs a forward pass again during the backward pass. What is gathered in training
(statistics of features, vectors of the power iteration) must not move a second time then, and the gradient
must be that of the first pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contract import toy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetsngp
from hetsngp.choices import NOISES
from hetsngp.models.methods import METHODS
from hetsngp.nn.backbones import ResidualMLP

MODELS = [
    (method, link)
    for method in METHODS
    for link in ("softmax", "sigmoid")
    if not (method == "posterior_network" and link == "sigmoid")
]
KINDS = ["rms", "direction", "polar", "power"]
X, Y = toy.blobs(3, 8)


def labels(link: str, y: Tensor = Y) -> Tensor:
    return toy.labels_for(y, 3, {"link": link})


def model_of(method: str, link: str = "softmax", **options: Any) -> hetsngp.Classifier:
    """Model in float64, after three steps of training: its statistics are in use."""
    model = toy.build(method, link=link, dataset_size=len(X), **options).double().train()
    torch.manual_seed(1)
    for rows in X.double().split(8):
        model.loss(rows, labels(link, Y[: len(rows)]))
    return model


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Gradients of a loss from the same random state."""
    model.zero_grad()
    torch.manual_seed(0)
    loss().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 1e-9) -> None:
    assert got.keys() == want.keys()
    assert any(bool(t.abs().max() > 0) for t in want.values())
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=rtol * float(value.abs().max()), msg=name
        )


@pytest.mark.parametrize(("method", "link"), MODELS)
def test_passes_before_one_backward_add_their_gradients(method: str, link: str) -> None:
    """Two views, ``loss`` and ``model(x)`` by turns, in training and in eval mode: the sum of the gradients
    that the same passes have one by one."""
    model, x, y = model_of(method, link), X.double(), labels(link)

    def probe(out: Tensor) -> Tensor:
        return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()

    def eval_pass(m: Any) -> Tensor:
        m.eval()
        out = m(x)
        m.train()
        return probe(out)

    passes: list[Callable[[Any], Tensor]] = [
        lambda m: m.loss(x, y),
        lambda m: probe(m(x + 1)),
        eval_pass,
        lambda m: m.loss(2 * x, y),
        lambda m: probe(m(x - 1)),
    ]
    one_by_one = copy.deepcopy(model)

    def separately() -> Tensor:
        for single in passes[:-1]:
            single(one_by_one).backward()
        return passes[-1](one_by_one)

    want = gradients(one_by_one, separately)
    assert_equal(gradients(model, lambda: sum(single(model) for single in passes)), want)  # type: ignore[arg-type, return-value]
    for (name, a), b in zip(model.named_buffers(), one_by_one.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("method", "link"), MODELS)
def test_a_checkpointed_loss_has_the_same_gradient_and_statistics(
    method: str, link: str, reentrant: bool
) -> None:
    model, x, y = model_of(method, link), X.double(), labels(link)
    plain = copy.deepcopy(model)
    want = gradients(plain, lambda: plain.loss(x, y))
    x = x.requires_grad_()  # without it the reentrant kind has no gradient at all
    got = gradients(model, lambda: checkpoint(model.loss, x, y, use_reentrant=reentrant))  # type: ignore[return-value]
    assert_equal(got, want)
    for (name, a), b in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


class Checkpointed(nn.Module):
    """A network whose forward pass is repeated in the backward pass."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant
        self.num_features = inner.num_features

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpointed_backbone_has_the_same_gradient(method: str, reentrant: bool) -> None:
    model, x, y = model_of(method), X.double(), labels("softmax")
    plain = copy.deepcopy(model)
    model.backbone = Checkpointed(model.backbone, reentrant)
    for call in (lambda m: m.loss(x, y), lambda m: m(x).square().sum()):
        want = gradients(plain, lambda: call(plain))  # noqa: B023
        got = gradients(model, lambda: call(model))  # noqa: B023
        assert_equal({name.replace(".inner.", "."): t for name, t in got.items()}, want)
    for (name, a), b in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(("hetsngp", {"normalization": kind}) for kind in KINDS),
        *(("heteroscedastic", {"noise": noise}) for noise in NOISES),
        *((method, {}) for method in METHODS if method not in ("hetsngp", "heteroscedastic")),
    ],
)
def test_each_of_several_checkpointed_losses_has_its_own_statistics(
    method: str, options: dict[str, Any], reentrant: bool
) -> None:
    """No spectral bound here: its power iteration goes on from pass to pass."""
    model = model_of(method, spectral_bound=float("inf"), **options)
    x, y = X.double(), labels("softmax")
    plain = copy.deepcopy(model)
    others = (x + i for i in range(16))  # the first once more
    views = [view.clone().requires_grad_() for view in (x, 3 * x + 1, x[:12], x - 5, *others)]
    want = gradients(plain, lambda: sum(plain.loss(view, y[: len(view)]) for view in views))  # type: ignore[arg-type, return-value]

    def repeated() -> Tensor:
        return sum(checkpoint(model.loss, view, y[: len(view)], use_reentrant=reentrant) for view in views)  # type: ignore[misc, return-value]

    assert_equal(gradients(model, repeated), want)


def test_a_loss_of_two_views_trains_with_every_noise() -> None:
    """A consistency loss, as contrastive and distillation losses are: three steps, all finite."""
    for noise in NOISES:
        model = hetsngp.build(
            "hetsngp", ResidualMLP(2, width=8, depth=1), 3, noise=noise, dataset_size=24, **toy.TINY
        ).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            both = model(X), model(X + 0.1)
            loss = model.loss(X, Y) + (both[0] - both[1]).square().mean() + model.loss(X + 0.1, Y)
            loss.backward()
            optimizer.step()
            assert torch.isfinite(loss)
