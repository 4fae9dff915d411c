"""Cached spectral norms: G against gradients of dense SVDs, ⟨W, G⟩ against the power iteration."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.contract.toy import assert_same, weights
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import hetsngp
from hetsngp.functional.spectral import cached_norm, conv_direction, conv_norm, linear_direction, linear_norm
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.nn.multi_input import widen_layer
from hetsngp.nn.spectral import bound_layer, bound_spectrally, fold_spectral_bound, measure_bounds
from hetsngp.nn.spectral_cache import cache_spectral_norms, remeasure_spectral_norms, uncache_spectral_norms

OPTIONS = ("stride", "padding", "dilation", "groups", "padding_mode")

CASES: list[tuple[Callable[..., nn.Module], tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = [
    (nn.Linear, (6, 5), {}, ()),
    (nn.Linear, (4, 7), {}, ()),
    (nn.Conv1d, (2, 3, 3), {"stride": 2, "padding": 1}, (10,)),
    (nn.Conv1d, (4, 6, 3), {"padding": 2, "dilation": 2, "groups": 2}, (9,)),
    (nn.Conv1d, (2, 3, 4), {"padding": "same", "padding_mode": "replicate"}, (9,)),
    (nn.Conv2d, (2, 3, 3), {"padding": 1}, (6, 5)),
    (nn.Conv2d, (2, 3, (3, 2)), {"stride": (2, 3), "padding": (2, 1)}, (7, 5)),
    (nn.Conv2d, (2, 3, 2), {"stride": 3}, (7, 6)),  # the last rows are read by no kernel
    (nn.Conv2d, (2, 3, (3, 2)), {"dilation": (2, 1), "padding": (1, 0), "stride": (1, 2)}, (8, 9)),
    (nn.Conv2d, (4, 4, 3), {"groups": 4, "padding": 1, "stride": 2}, (5, 6)),
    (nn.Conv2d, (2, 3, 3), {"padding": (2, 1), "padding_mode": "reflect", "stride": 2}, (6, 5)),
    (nn.Conv2d, (2, 3, 3), {"padding": (2, 1), "padding_mode": "circular"}, (6, 5)),
]
each_case = pytest.mark.parametrize(("kind", "sizes", "options", "spatial"), CASES)
FEW = [CASES[i] for i in (0, 3, 10)]
each_kind = pytest.mark.parametrize(("kind", "sizes", "options", "spatial"), FEW)


def made(kind: Any, sizes: Any, options: Any, bound: float | None = None) -> Any:
    """A layer whose singular values are of order one, float64, bounded if there is a bound."""
    layer = kind(*sizes, **options, dtype=torch.float64)
    if bound is not None:
        bound_layer(layer, bound)
    return layer


def batch_for(layer: Any, spatial: tuple[int, ...], batch: int = 4) -> Tensor:
    return torch.randn(batch, channels(layer), *spatial, dtype=layer.weight.dtype)


def channels(layer: Any) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def dense_sigma(layer: Any, weight: Tensor, spatial: tuple[int, ...]) -> Tensor:
    """Largest singular value of the plain layer with this weight, as a matrix; float64, differentiable."""
    plain = type(layer) if type(layer).__module__.startswith("torch") else type(layer).__bases__[1]
    shape = (channels(layer), *spatial)
    basis = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).reshape(-1, *shape)
    if plain is nn.Linear:
        matrix = F.linear(basis, weight.double())
    else:
        names = {"stride", "padding", "dilation", "groups", "padding_mode", "kernel_size"}
        other = plain(
            layer.in_channels,
            layer.out_channels,
            bias=False,
            dtype=torch.float64,
            **{name: getattr(layer, name) for name in names},
        )
        matrix = torch.func.functional_call(other, {"weight": weight.double()}, basis)
    return torch.linalg.svdvals(matrix.flatten(1)).max()


def groups(layer: Any) -> int:
    return getattr(layer, "groups", 1)


def norm_of(layer: Any, weight: Tensor, v: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    if isinstance(layer, nn.Linear):
        return linear_norm(weight, v, iterations)
    return conv_norm(weight, v, iterations, **{name: getattr(layer, name) for name in OPTIONS})


def direction_of(layer: Any, v: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(layer, nn.Linear):
        return linear_direction(layer.weight, v, iterations)
    return conv_direction(layer.weight, v, iterations, **{name: getattr(layer, name) for name in OPTIONS})


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2, padding=1, padding_mode="reflect"),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


SIZES = {0: (8, 8), 2: (4, 4), 5: ()}


def images(seed: int = 1, size: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 2, size, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def step(model: nn.Module, x: Tensor, lr: float = 0.1, run: Callable[..., Tensor] | None = None) -> Tensor:
    loss = F.cross_entropy((run or model)(x), torch.arange(len(x), device=x.device) % 3)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p -= lr * gradient
    return loss.detach()


def trained(bound: float = 0.1, steps: int = 3, cached: bool = True) -> nn.Sequential:
    """Held, it has a G that is a step or two old."""
    model = network()
    bound_spectrally(model, bound)
    if cached:
        cache_spectral_norms(model)
    for seed in range(steps):
        if cached and seed == 1:
            remeasure_spectral_norms(model)
        step(model, images(seed))
    return model


# G and ⟨W, G⟩


@each_case
def test_cached_sigma_and_its_gradient_are_those_of_the_dense_norm(
    kind: Any, sizes: Any, options: Any, spatial: Any
) -> None:
    torch.manual_seed(1)  # with 0 the two largest singular values of one case are equal to 1e-3
    layer = made(kind, sizes, options)
    sigma, _, direction = direction_of(layer, torch.randn(channels(layer), *spatial).double(), 2000)
    expected = dense_sigma(layer, layer.weight, spatial)
    cached = cached_norm(layer.weight, direction, groups(layer))
    torch.testing.assert_close(sigma, expected.detach(), rtol=1e-7, atol=0)
    torch.testing.assert_close(cached.detach(), sigma, rtol=1e-12, atol=0)
    if options.get("padding_mode") != "circular":  # there singular values come in pairs: no one gradient
        gradients = [torch.autograd.grad(x, layer.weight)[0] for x in (cached, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@each_case
@pytest.mark.parametrize("iterations", [1, 3])
def test_cached_sigma_and_its_gradient_are_those_of_the_power_iteration(
    kind: Any, sizes: Any, options: Any, spatial: Any, iterations: int
) -> None:
    """Far from convergence too: it is this gradient that a cached layer trains with."""
    layer = made(kind, sizes, options)
    v = torch.randn(channels(layer), *spatial, dtype=torch.float64)
    expected, expected_v = norm_of(layer, layer.weight, v, iterations)
    sigma, v, direction = direction_of(layer, v, iterations)
    assert torch.equal(sigma, expected)
    assert torch.equal(v, expected_v)
    assert not any(t.requires_grad for t in (sigma, v, direction))
    cached = cached_norm(layer.weight, direction, groups(layer))
    torch.testing.assert_close(cached, expected, rtol=1e-13, atol=0)
    gradients = [torch.autograd.grad(x, layer.weight)[0] for x in (cached, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_groups_are_cached_one_by_one() -> None:
    """The gradient is that of the largest, and another that outgrows it is noticed without a measurement."""
    layer = made(nn.Conv1d, (3, 3, 3), {"groups": 3, "padding": 1}, bound=0.1)
    kernel = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)

    def gradient(*scales: float, remeasure: bool) -> Tensor:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(scales).reshape(3, 1, 1) * kernel)
        if remeasure:
            remeasure_spectral_norms(layer, 200)
        sigma = layer.measure((9,))
        torch.testing.assert_close(sigma.detach(), dense_sigma(layer, layer.weight.detach(), (9,)))
        return torch.autograd.grad(sigma, layer.weight)[0].abs().amax((1, 2))

    layer(torch.randn(2, 3, 9, dtype=torch.float64))
    cache_spectral_norms(layer)
    assert (gradient(1.0, 2.0, 0.5, remeasure=True) > 0.1).tolist() == [False, True, False]
    assert (gradient(1.0, 2.0, 4.0, remeasure=False) > 0.1).tolist() == [False, False, True]


@each_kind
def test_the_error_is_of_second_order_and_from_below(
    kind: Any, sizes: Any, options: Any, spatial: Any
) -> None:
    layer = made(kind, sizes, options)
    direction = direction_of(layer, torch.randn(channels(layer), *spatial).double(), 2000)[2]
    weight, move = layer.weight.detach(), torch.randn_like(layer.weight)
    errors = []
    for epsilon in (4e-3, 2e-3, 1e-3):
        moved = weight + epsilon * move
        errors.append(
            float(dense_sigma(layer, moved, spatial) - cached_norm(moved, direction, groups(layer)))
        )
    assert min(errors) > 0
    assert errors[1] / errors[0] == pytest.approx(0.25, abs=0.02)
    assert errors[2] / errors[1] == pytest.approx(0.25, abs=0.01)
    for size in (0.3, 3.0):  # however far
        moved = weight + size * move
        assert cached_norm(moved, direction, groups(layer)) < dense_sigma(layer, moved, spatial)


@each_kind
def test_just_remeasured_a_cached_pass_is_that_of_the_power_iteration(
    kind: Any, sizes: Any, options: Any, spatial: Any
) -> None:
    layer = made(kind, sizes, options, bound=0.05)
    layer(batch_for(layer, spatial))
    with torch.no_grad():
        layer.weight += 0.3 * torch.randn_like(layer.weight)
    other, x = copy.deepcopy(layer), batch_for(layer, spatial)
    cache_spectral_norms(layer)
    remeasure_spectral_norms(layer)
    sigma = layer.spectral_sigma.clone()
    outs = [each(x) for each in (layer, other)]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(layer.spectral_sigma, sigma, rtol=1e-14, atol=0)
    for name in ("spectral_sigma", "spectral_v"):
        torch.testing.assert_close(getattr(layer, name), getattr(other, name), rtol=1e-14, atol=1e-15)
    for out, each in zip(outs, (layer, other), strict=True):
        out.square().sum().backward()
        assert each.weight.grad.abs().max() > 0
    torch.testing.assert_close(layer.weight.grad, other.weight.grad, rtol=1e-10, atol=1e-13)


# Training


def test_remeasured_at_each_step_it_trains_as_if_not_cached() -> None:
    """From a fresh network, through a change of the image size."""
    model = network().double()
    bound_spectrally(model, 0.2)
    other, start = copy.deepcopy(model), weights(model)
    cache_spectral_norms(model)
    for i in range(24):
        x = images(i, size=8 if i < 12 else 11, dtype=torch.float64)
        remeasure_spectral_norms(model)
        for each in (model, other):
            step(each, x, lr=10.0)
    uncache_spectral_norms(model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-9, atol=1e-11)
    assert (model[0].weight - start["0.weight"]).abs().max() > 0.01


def largest_norm_in_training(
    lr: float, bound: float, steps: int, every: int | None = None, iterations: int = 1, cached: bool = True
) -> float:
    """True norms of the bounded weights as passes apply them, the largest over layers and steps, over c."""
    torch.manual_seed(3)
    model = network()
    bound_spectrally(model, bound)
    if cached:
        cache_spectral_norms(model)
    ratios = []
    for i in range(steps):
        if every is not None and i % every == 0:
            remeasure_spectral_norms(model, iterations)
        before = weights(model)
        step(model, images(i % 3), lr)
        if i % 3 == 0:  # at all distances from a measurement, in turn
            for k, size in SIZES.items():
                sigma = float(dense_sigma(model[k], before[f"{k}.weight"], size))
                ratios.append(sigma / max(bound, float(model[k].spectral_sigma)))
    return max(ratios)


def test_a_measurement_every_ten_steps_keeps_the_bound() -> None:
    assert largest_norm_in_training(0.05, 0.7, steps=150, every=10) < 1.03
    assert largest_norm_in_training(0.05, 0.7, steps=150) > 1.08  # what measurements are for


def test_as_many_iterations_as_steps_keep_the_bound_as_one_a_step_does() -> None:
    """Where another singular value overtakes, v takes iterations to turn to it, whenever they are made."""
    uncached = largest_norm_in_training(0.03, 1.0, steps=200, cached=False)
    assert largest_norm_in_training(0.03, 1.0, steps=200, every=10, iterations=10) < uncached + 0.02
    assert largest_norm_in_training(0.03, 1.0, steps=200, every=10, iterations=1) > uncached + 0.1


def test_a_pass_writes_sigma_only_and_a_measurement_keeps_addresses() -> None:
    model = trained()
    layer = model[0]
    buffers = ("spectral_sigma", "spectral_v", "spectral_direction")
    before, tensors = weights(model), [getattr(layer, name) for name in buffers]
    places = [t.data_ptr() for t in tensors]
    with torch.no_grad():
        layer.weight *= 1.01
    model(images())
    torch.testing.assert_close(layer.spectral_sigma, 1.01 * cached_norm(before["0.weight"], tensors[2]))
    assert torch.equal(layer.spectral_v, before["0.spectral_v"])
    assert torch.equal(layer.spectral_direction, before["0.spectral_direction"])
    remeasure_spectral_norms(model)
    for name, tensor, place in zip(buffers, tensors, places, strict=True):
        assert getattr(layer, name) is tensor
        assert tensor.data_ptr() == place
    assert not torch.equal(layer.spectral_v, before["0.spectral_v"])
    assert not torch.equal(layer.spectral_direction, before["0.spectral_direction"])
    remeasure_spectral_norms(model, iterations=300)
    for index, size in SIZES.items():
        sigma = dense_sigma(model[index], model[index].weight.detach(), size)
        assert float(model[index].spectral_sigma) == pytest.approx(float(sigma), rel=1e-4)


@pytest.mark.parametrize("keep", [False, True])
def test_first_passes_measure_as_ever(keep: bool) -> None:
    """Also at a new image size, and with the bounds of pretrained layers, which follow it."""
    model = network()
    with torch.no_grad():
        model[0].weight *= 20
    bound_spectrally(model, 0.5, keep=keep)
    other = copy.deepcopy(model)
    assert cache_spectral_norms(model) == ["0", "2", "5"]
    remeasure_spectral_norms(model)  # nothing to start from yet
    assert not model[0].spectral_v.numel()
    assert not model[0].spectral_direction.any()
    for size in (8, 11):
        torch.testing.assert_close(model(images(size=size)), other(images(size=size)))
        cached = {k: t for k, t in weights(model).items() if not k.endswith("direction")}
        for name, value in other.state_dict().items():
            torch.testing.assert_close(cached[name], value)
    assert (float(model[0].spectral_bound) > 0.5) == keep


def test_measure_bounds_measures_cached_layers() -> None:
    model = network()
    bound_spectrally(model, 0.5)
    cache_spectral_norms(model)
    for layer, (index, size) in zip(
        measure_bounds(model, lambda: model.eval()(images())), SIZES.items(), strict=True
    ):
        assert layer.sigma == pytest.approx(
            float(dense_sigma(model[index], model[index].weight.detach(), size)), rel=0.04
        )


def test_two_image_sizes_before_one_backward() -> None:
    model = trained()
    (model(images(1)).sum() + model(images(2, size=11)).sum()).backward()
    assert torch.isfinite(model[0].weight.grad).all()
    loss = model(images(1, size=11)).sum()
    remeasure_spectral_norms(model)
    with pytest.raises(
        RuntimeError, match="inplace"
    ):  # G of the pass is gone: an error, not a wrong gradient
        loss.backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_cached_and_measured_without_gradients_it_trains_on(context: Any) -> None:
    model, late = network(), trained(cached=False)
    bound_spectrally(model, 0.1)
    with context():
        cache_spectral_norms(model)
        cache_spectral_norms(late)
        model(images())
    for each in (model, late):
        remeasure_spectral_norms(each)
        before = each[0].weight.clone()
        step(each, images())
        assert not torch.equal(before, each[0].weight)


def test_a_vanishing_weight_wakes_up_at_a_measurement() -> None:
    layer = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(layer.weight)
    bound_layer(layer, 0.5)
    cache_spectral_norms(layer)
    layer(torch.ones(2, 3)).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()
    with torch.no_grad():
        layer.weight.copy_(2 * torch.eye(3))
    remeasure_spectral_norms(layer, 5)
    torch.testing.assert_close(layer(torch.eye(3)), 0.5 * torch.eye(3))


# Evaluation, and the way back


def test_a_measured_layer_has_its_direction_when_it_is_cached() -> None:
    model = trained(cached=False)
    other = copy.deepcopy(model)
    cache_spectral_norms(model)
    torch.testing.assert_close(model(images()), other(images()))
    torch.testing.assert_close(model[0].spectral_sigma, other[0].spectral_sigma)


def test_caching_and_uncaching_change_nothing() -> None:
    model, x = trained(cached=False), images()
    other, expected, before = copy.deepcopy(model), copy.deepcopy(model).eval()(x), weights(model)
    cache_spectral_norms(model)
    assert torch.equal(model.eval()(x), expected)
    uncache_spectral_norms(model)
    assert torch.equal(model(x), expected)
    assert_same(weights(model), before)
    for each in (model.train(), other):
        step(each, x)
    assert_same(weights(model), weights(other))


def test_evaluation_takes_the_sigma_of_the_last_pass_and_writes_nothing() -> None:
    model, x = trained(), images()
    model(x)
    before = weights(model)
    first = model.eval()(x)
    sigma = cached_norm(model[0].weight, model[0].spectral_direction).detach()
    assert torch.equal(model[0].spectral_sigma, sigma)
    assert torch.equal(model[0].bounded_weight(), model[0].weight * (model[0].spectral_bound / sigma))
    assert torch.equal(model(x), first)
    assert_same(weights(model), before)
    uncache_spectral_norms(model)
    assert torch.equal(model(x), first)


def test_caching_twice_keeps_the_direction() -> None:
    model = trained()
    before = model[0].spectral_direction
    assert cache_spectral_norms(model) == ["0", "2", "5"]
    assert model[0].spectral_direction is before


def test_fold_gives_plain_layers_and_the_same_bits() -> None:
    model, x = trained(), images()
    expected = model.eval()(x)
    assert fold_spectral_bound(model) == 3
    assert type(model[0]) is nn.Conv2d
    assert not dict(model.named_buffers())
    assert torch.equal(model(x), expected)
    assert model.state_dict().keys() == network().state_dict().keys()
    assert cache_spectral_norms(model) == []


def test_what_cannot_be_remeasured_says_so() -> None:
    model = trained(cached=False)
    with pytest.raises(ValueError, match=r"cache_spectral_norms\(module\)"):
        remeasure_spectral_norms(model)
    with pytest.raises(ValueError, match="at least 1"):
        remeasure_spectral_norms(trained(), iterations=0)
    remeasure_spectral_norms(network())  # no bounds at all: an engine need not ask
    uncache_spectral_norms(network())
    uncache_spectral_norms(model)


# Precision and memory


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(kind: Any, sizes: Any, options: Any, spatial: Any, dtype: torch.dtype) -> None:
    layer = made(kind, sizes, options, bound=0.05).float()
    layer(batch_for(layer, spatial))
    cache_spectral_norms(layer)
    before = layer.spectral_direction.clone()
    layer.to(dtype)
    assert layer.spectral_direction.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(layer.spectral_direction, before.to(layer.spectral_direction.dtype))
    out = layer(batch_for(layer, spatial))
    expected = cached_norm(layer.weight.detach().double(), before.double(), groups(layer)).float()
    torch.testing.assert_close(layer.spectral_sigma.float(), expected)  # not rounded to 8 bits
    uncache_spectral_norms(layer)
    cache_spectral_norms(layer)
    assert layer.spectral_direction.dtype == before.to(layer.spectral_sigma).dtype
    remeasure_spectral_norms(layer, 30)
    sigma = float(dense_sigma(layer, layer.weight.detach(), spatial))
    assert float(layer.spectral_sigma) == pytest.approx(sigma, rel=0.02)
    layer(batch_for(layer, spatial)).sum().backward()
    assert out.dtype == layer.weight.grad.dtype == dtype


@each_kind
def test_autocast_measures_in_float32(kind: Any, sizes: Any, options: Any, spatial: Any) -> None:
    layer = made(kind, sizes, options, bound=0.05).float()
    x = batch_for(layer, spatial)
    layer(x)
    cache_spectral_norms(layer)
    with torch.no_grad():
        layer.weight += 0.1 * torch.randn_like(layer.weight)
    other = copy.deepcopy(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        remeasure_spectral_norms(layer)
        out = layer(x)
    remeasure_spectral_norms(other)
    other(x)
    assert out.dtype == torch.bfloat16
    assert_same(weights(layer), weights(other))
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_the_direction_has_the_memory_format_of_the_weight() -> None:
    model = trained(cached=False).to(memory_format=torch.channels_last)
    cache_spectral_norms(model)
    model(images(size=11).contiguous(memory_format=torch.channels_last))
    remeasure_spectral_norms(model)
    for index in (0, 2):
        assert model[index].weight.stride() == model[index].spectral_direction.stride()
    early = trained().to(memory_format=torch.channels_last)
    assert early[0].weight.stride() == early[0].spectral_direction.stride()


def test_a_widened_layer_makes_its_direction_anew() -> None:
    layer = nn.Linear(4, 3)
    bound_layer(layer, 0.1)
    cache_spectral_norms(layer)
    layer(torch.randn(2, 4))
    widen_layer(layer, 3)
    layer(torch.randn(2, 12))
    assert layer.spectral_direction.shape == (3, 12)
    sigma = torch.linalg.matrix_norm(layer.weight.detach(), 2)
    torch.testing.assert_close(layer.spectral_sigma, sigma, rtol=0.03, atol=0)


# Copies, checkpoints and files


def via_state_dict(model: nn.Module) -> nn.Module:
    fresh = network()
    bound_spectrally(fresh, 123.0)
    cache_spectral_norms(fresh)
    fresh.load_state_dict(model.state_dict())
    return fresh


def via_assigned_state_dict(model: nn.Module) -> nn.Module:
    fresh = network()
    bound_spectrally(fresh, 123.0)
    cache_spectral_norms(fresh)
    fresh.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return fresh


def into_a_trained_one(model: nn.Module) -> nn.Module:
    other = trained(bound=3.0, steps=1)
    other.load_state_dict(model.state_dict())
    return other


def via_pickle(model: nn.Module) -> nn.Module:
    restored: nn.Module = pickle.loads(pickle.dumps(model))
    return restored


COPIES = [via_state_dict, via_assigned_state_dict, into_a_trained_one, via_pickle, copy.deepcopy]


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_copy_resumes_to_the_bit(duplicate: Callable[[nn.Module], nn.Module], steps: int) -> None:
    """Between two measurements, where G is older than the weights; and before there is any G."""
    model = trained(steps=steps)
    other = duplicate(model)
    assert_same(weights(model), weights(other))
    for seed in (7, 8, 9):
        if seed == 9:
            remeasure_spectral_norms(model)
            remeasure_spectral_norms(other)
        for each in (model, other):
            step(each, images(seed))
    assert_same(weights(model), weights(other))
    step(model, images())
    remeasure_spectral_norms(model)
    assert not torch.equal(model[0].spectral_direction, other[0].spectral_direction)  # nothing is shared


def test_a_state_without_directions_loads_as_if_cached_after() -> None:
    plain = trained(cached=False)
    model, after = trained(bound=3.0, steps=1), network()
    model.load_state_dict(plain.state_dict())
    bound_spectrally(after, 123.0)
    after.load_state_dict(plain.state_dict())
    cache_spectral_norms(after)
    assert_same(weights(model), weights(after))
    empty = network()
    bound_spectrally(empty, 0.1)
    model.load_state_dict(empty.state_dict())  # from before any measurement
    assert not model[0].spectral_direction.any()
    model(images())
    wider = {"0.weight": torch.zeros(4, 3, 3, 3), "0.spectral_v": torch.zeros(3, 8, 8)}
    with pytest.raises(RuntimeError, match="size mismatch"):  # torch's own error, not one of ours on top
        trained().load_state_dict({**plain.state_dict(), **wider})


def test_a_state_with_directions_wants_a_cached_network() -> None:
    with pytest.raises(RuntimeError, match="spectral_direction"):
        trained(cached=False).load_state_dict(trained().state_dict())


def test_a_state_dict_has_directions_only_while_cached() -> None:
    model = trained(cached=False)
    names = set(model.state_dict())
    assert not any("direction" in name for name in names)
    cache_spectral_norms(model)
    assert set(model.state_dict()) - names == {f"{i}.spectral_direction" for i in SIZES}
    assert {name for name, _ in model.named_parameters()} <= names
    uncache_spectral_norms(model)
    assert set(model.state_dict()) == names


def test_a_cached_model_is_saved_without_directions(tmp_path: Path) -> None:
    model = hetsngp.build(
        "sngp", ResidualMLP(2, width=8, depth=1), 3, random_features=8, dataset_size=6, spectral_bound=0.2
    )
    names = set(model.state_dict())
    cache_spectral_norms(model)
    x, y = torch.randn(6, 2), torch.arange(6) % 3
    model.train().loss(x, y).backward()
    assert len(model.state_dict()) > len(names)
    hetsngp.save(model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    assert set(load_file(file)) == names
    twin = hetsngp.load(tmp_path)
    assert torch.equal(twin(x), model.eval()(x))
    twin.train().loss(x, y).backward()


# Compilers and graphs


def test_cached_training_compiles_to_one_graph_once() -> None:
    torch._dynamo.reset()
    model = trained()
    other, counter = copy.deepcopy(model), CompileCounter()
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    for seed in range(6):
        if seed % 2:
            remeasure_spectral_norms(model)
            remeasure_spectral_norms(other)
        torch.testing.assert_close(step(model, images(seed)), step(other, images(seed), run=compiled))
    assert counter.frame_count == 1
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)
    uncache_spectral_norms(other)
    compiled(images())
    assert counter.frame_count == 2
    torch._dynamo.reset()


@pytest.mark.gpu
def test_a_cuda_graph_goes_on_with_remeasured_directions() -> None:
    model = trained().cuda()
    other, x = copy.deepcopy(model), images().cuda()
    model(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(other, x, lr=0.0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(other, x)
    for i in range(7):
        if i % 3 == 0:
            remeasure_spectral_norms(model)
            remeasure_spectral_norms(other)
        expected = step(model, x)
        graph.replay()
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-2, atol=1e-3)
