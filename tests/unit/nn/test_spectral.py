"""Spectral bound: the norms against SVDs of dense matrices, and the life of a bounded layer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract.toy import assert_same, weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetsngp.functional.spectral import conv_norm, linear_norm, soft_bound, start_vector
from hetsngp.nn.spectral import (
    BoundedConv1d,
    BoundedConv2d,
    BoundedLinear,
    bound_layer,
    bound_spectrally,
    fold_spectral_bound,
    measure_bounds,
    measure_sigma,
)
from hetsngp.nn.spectral_cache import cache_spectral_norms

BUFFERS = ("spectral_bound", "spectral_sigma", "spectral_v")


def dense_norm(operator: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Largest singular value of the matrix whose columns are the images of the basis vectors."""
    basis = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).reshape(-1, *shape)
    return torch.linalg.svdvals(operator(basis).flatten(1)).max()


def true_sigma(layer: nn.Module, weight: Tensor, spatial: tuple[int, ...] = ()) -> float:
    """Dense operator norm of the plain layer that has this weight."""
    plain = copy.deepcopy(layer)
    fold_spectral_bound(plain)
    plain = plain.double()
    plain.weight = nn.Parameter(weight.detach().double())
    plain.bias = None
    channels = plain.in_features if isinstance(plain, nn.Linear) else plain.in_channels
    with torch.no_grad():
        return float(dense_norm(plain, (channels, *spatial)))


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )


def images(seed: int = 1, batch: int = 5) -> Tensor:
    return torch.randn(batch, 2, 8, 8, generator=torch.Generator().manual_seed(seed))


def trained(bound: float = 0.5, steps: int = 3) -> nn.Sequential:
    model = network()
    bound_spectrally(model, bound)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(steps):
        step(model, optimizer, images(seed))
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), torch.arange(len(x)) % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


# The norms


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (1, 4), (4, 1)])
def test_linear_norm_is_the_largest_singular_value(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, dtype=torch.float64)
    sigma, v = linear_norm(weight, start_vector(shape[1:], torch.float64, "cpu"), iterations=2000)
    torch.testing.assert_close(sigma, torch.linalg.svdvals(weight)[0], rtol=1e-9, atol=0)
    torch.testing.assert_close(v.norm(), torch.ones_like(sigma))


CONVS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((3, 2, 3), (9,), {}),
    ((3, 2, 3), (9,), {"stride": 2, "padding": 1}),
    ((3, 2, 3), (10,), {"stride": 2, "padding": 1}),
    ((4, 2, 3), (9,), {"padding": 2, "dilation": 2, "groups": 2}),
    ((3, 2, 4), (9,), {"padding": "same"}),
    ((3, 2, 3, 3), (6, 5), {}),
    ((3, 2, 3, 3), (6, 5), {"padding": 1}),
    ((3, 2, 3, 3), (6, 5), {"stride": 2, "padding": 0}),
    ((3, 2, 3, 3), (6, 5), {"stride": 2, "padding": 1}),
    ((3, 2, 3, 2), (7, 5), {"stride": (2, 3), "padding": (2, 1)}),
    ((3, 2, 2, 2), (7, 6), {"stride": 3}),  # the last rows are read by no kernel
    ((3, 2, 3, 3), (7, 6), {"dilation": 2, "padding": 2}),
    ((3, 2, 3, 2), (8, 9), {"dilation": (2, 1), "padding": (1, 0), "stride": (1, 2)}),
    ((4, 2, 3, 3), (6, 5), {"groups": 2, "padding": 1}),
    ((4, 1, 3, 3), (5, 6), {"groups": 4, "padding": 1, "stride": 2}),
    ((3, 2, 2, 4), (6, 5), {"padding": "same", "dilation": (3, 1)}),
    ((3, 2, 3, 3), (6, 5), {"padding": "valid"}),
    *(
        ((3, 2, 3, 3), (6, 5), {"padding": (2, 1), "stride": s, "padding_mode": mode})
        for s in (1, 2)
        for mode in ("circular", "reflect", "replicate")
    ),
]


@pytest.mark.parametrize(("kernel", "spatial", "options"), CONVS)
def test_conv_norm_is_that_of_the_dense_operator(
    kernel: tuple[int, ...], spatial: tuple[int, ...], options: dict[str, Any]
) -> None:
    channels = kernel[1] * options.get("groups", 1)
    layer_type = nn.Conv1d if len(spatial) == 1 else nn.Conv2d
    layer = layer_type(channels, kernel[0], kernel[2:], bias=False, **options).double()
    assert layer.weight.shape == kernel
    with torch.no_grad():
        layer.weight.normal_()
        expected = dense_norm(layer, (channels, *spatial))
        start = start_vector((channels, *spatial), torch.float64, "cpu")
        sigma, v = conv_norm(layer.weight, start, 3000, **options)
    torch.testing.assert_close(sigma, expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(measure_sigma(layer, spatial), expected, rtol=0.02, atol=0)
    assert v.shape == (channels, *spatial)


def test_a_growing_group_is_noticed() -> None:
    """One common vector would have died out in group 1 long before it grew."""
    weight = torch.tensor([4.0, 1e-3]).reshape(2, 1, 1)
    _, v = conv_norm(weight, start_vector((2, 5), torch.float32, "cpu"), 500, groups=2)
    sigma, _ = conv_norm(weight.flip(0) * 10, v, 2, groups=2)
    torch.testing.assert_close(sigma, torch.tensor(40.0))


@pytest.mark.parametrize("convolution", [False, True])
def test_gradient_through_sigma_is_that_of_the_largest_singular_value(convolution: bool) -> None:
    shape, start = ((3, 2, 2, 2), (2, 4, 3)) if convolution else ((4, 3), (3,))
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def power(w: Tensor, v: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        return (
            conv_norm(w, v, iterations, stride=(1, 2), padding=1)
            if convolution
            else linear_norm(w, v, iterations)
        )

    first, v = power(weight, start_vector(start, torch.float64, "cpu"), 2000)
    c = 0.5 * first.item()

    def norm(w: Tensor) -> Tensor:
        return power(w, v, 5)[0]

    assert torch.autograd.gradcheck(norm, weight)
    assert torch.autograd.gradcheck(lambda w: soft_bound(w, norm(w), c), weight)
    assert torch.autograd.gradcheck(lambda w: soft_bound(w, norm(w), 4 * c), weight)


def test_linear_gradient_is_the_outer_product_of_the_singular_vectors() -> None:
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    sigma, v = linear_norm(weight, torch.ones(3, dtype=torch.float64), 1500)
    sigma.backward()
    u, _, vh = torch.linalg.svd(weight.detach())
    torch.testing.assert_close(weight.grad, torch.outer(u[:, 0], vh[0]))
    assert not v.requires_grad


@pytest.mark.parametrize("scale", [0.0, 1e-30])
def test_a_vanishing_weight_keeps_its_vector_and_wakes_up(scale: float) -> None:
    weight = torch.full((3, 3), scale, requires_grad=True)
    sigma, v = linear_norm(weight, torch.ones(3), 5)
    soft_bound(weight, sigma, 0.5).sum().backward()
    assert torch.isfinite(weight.grad).all()
    sigma, _ = linear_norm(2 * torch.eye(3), v, 5)
    torch.testing.assert_close(sigma, torch.tensor(2.0))


def test_wrong_arguments_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="Conv1d or Conv2d"):
        conv_norm(torch.zeros(1, 1, 3), torch.zeros(1, 4, 4))
    with pytest.raises(ValueError, match="same"):
        conv_norm(torch.zeros(1, 1, 3), torch.zeros(1, 4), padding="full")
    with pytest.raises(ValueError, match="at least 1"):
        linear_norm(torch.zeros(1, 1), torch.zeros(1), 0)


# One layer


LAYERS = [
    (lambda: nn.Linear(6, 5), (4, 6), (), BoundedLinear),
    (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 4, 9), (9,), BoundedConv1d),
    (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (4, 2, 6, 5), (6, 5), BoundedConv2d),
]
each_layer = pytest.mark.parametrize(("make", "shape", "spatial", "kind"), LAYERS)


@each_layer
def test_below_the_bound_nothing_changes_to_the_bit(make: Any, shape: Any, spatial: Any, kind: Any) -> None:
    plain, x = make(), torch.randn(shape)
    layer = copy.deepcopy(plain)
    bound_layer(layer, 1.01 * true_sigma(layer, layer.weight, spatial))
    assert type(layer) is kind
    for mode in (True, False):
        out, expected = layer.train(mode)(x), plain(x)
        assert torch.equal(out, expected)
        wanted = torch.autograd.grad(expected.square().sum(), plain.parameters())
        for got, want in zip(
            torch.autograd.grad(out.square().sum(), layer.parameters()), wanted, strict=True
        ):
            assert torch.equal(got, want)


@each_layer
def test_above_the_bound_the_norm_is_the_bound(make: Any, shape: Any, spatial: Any, kind: Any) -> None:
    layer, x = make(), torch.randn(shape)
    c = 0.3 * true_sigma(layer, layer.weight, spatial)
    bound_layer(layer, c)
    for _ in range(200):
        layer(x)
    assert true_sigma(layer, layer.eval().bounded_weight(), spatial) == pytest.approx(c, rel=1e-3)
    assert layer.spectral_sigma == pytest.approx(c / 0.3, rel=1e-3)
    plain = make()
    plain.load_state_dict({"weight": 0.3 * layer.weight, "bias": layer.bias})
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-3, atol=1e-4)


@each_layer
def test_before_the_first_measurement_the_weight_is_left_alone(
    make: Any, shape: Any, spatial: Any, kind: Any
) -> None:
    plain, x = make(), torch.randn(shape)
    layer = copy.deepcopy(plain)
    bound_layer(layer, 1e-3)
    assert torch.equal(layer.eval()(x), plain(x))
    assert layer.spectral_sigma == 0
    assert layer.spectral_v.numel() == 0


@each_layer
def test_the_first_pass_is_already_close(make: Any, shape: Any, spatial: Any, kind: Any) -> None:
    layer = make()
    bound_layer(layer, 0.2)
    layer(torch.randn(shape))
    assert layer.spectral_sigma == pytest.approx(true_sigma(layer, layer.weight, spatial), rel=0.03)


def test_training_with_a_huge_learning_rate_stays_bounded() -> None:
    model = network()
    bound_spectrally(model, 0.7)
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    for seed in range(30):
        step(model, optimizer, images(seed))
    raw = [true_sigma(model[i], model[i].weight, size) for i, size in ((0, (8, 8)), (2, (4, 4)), (4, ()))]
    assert max(raw) > 2.0  # the bound had something to do
    with torch.no_grad():  # σ lags the weights by one step; at rest it catches up
        for seed in range(20):
            model(images(seed))
    model.eval()
    for i, size in ((0, (8, 8)), (2, (4, 4)), (4, ())):
        assert true_sigma(model[i], model[i].bounded_weight(), size) <= 0.7 * 1.01


def test_one_iteration_a_step_follows_a_drifting_weight() -> None:
    """Within 10 % while two singular values cross (the worst case for one vector), within 1 % after."""
    layer = nn.Linear(8, 8)
    bound_layer(layer, 0.5)
    direction = torch.randn(8, 8)
    for step in range(60):
        with torch.no_grad():
            layer.weight += 0.01 * direction
        layer(torch.randn(1, 8))
        weight = layer.eval().bounded_weight()
        layer.train()
        assert torch.linalg.matrix_norm(weight, 2) <= 0.5 * (1.1 if step < 50 else 1.01)
    assert measure_sigma(layer) > 2


def test_gradient_in_training_goes_through_sigma() -> None:
    """Bounded and converged, the output is invariant to the weight's length: ⟨gradient, W⟩ = 0."""
    layer = nn.Linear(6, 4).double()
    bound_layer(layer, 0.1)
    x = torch.randn(3, 6, dtype=torch.float64)
    for _ in range(500):
        layer(x)
    layer(x).square().sum().backward()
    cosine = F.cosine_similarity(layer.weight.grad.flatten(), layer.weight.flatten(), dim=0)
    assert abs(cosine) < 1e-8
    layer.weight.grad = None
    layer.eval()(x).square().sum().backward()  # in eval mode the factor is a constant
    assert F.cosine_similarity(layer.weight.grad.flatten(), layer.weight.flatten(), dim=0) > 0.1


def test_a_new_input_size_is_measured_afresh() -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1)
    bound_layer(layer, 0.1)
    layer(torch.randn(2, 2, 4, 4))
    layer(torch.randn(2, 2, 9, 7))
    assert layer.spectral_v.shape == (2, 9, 7)
    assert layer.spectral_sigma == pytest.approx(true_sigma(layer, layer.weight, (9, 7)), rel=0.03)
    layer(torch.randn(2, 5, 5))  # without a batch dimension
    assert layer.spectral_v.shape == (2, 5, 5)


def test_raising_the_bound_frees_the_layer() -> None:
    model = trained(bound=0.1)
    plain = copy.deepcopy(model)
    for layer in plain:
        if hasattr(layer, "spectral_bound"):
            layer.spectral_bound.fill_(1e9)
    fold_spectral_bound(plain)
    reference = network()
    reference.load_state_dict(plain.state_dict())
    for i in (0, 2, 4):
        assert torch.equal(reference[i].weight, model[i].weight)
        model[i].spectral_bound.mul_(1e6)
    x = images()
    assert torch.equal(model.eval()(x), reference(x))


def test_same_vectors_whatever_the_global_seed() -> None:
    layer, x = nn.Linear(6, 6), torch.randn(2, 6)
    bound_layer(layer, 0.5)
    other = copy.deepcopy(layer)
    state = torch.get_rng_state()
    layer(x)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(123)
    other(x)
    assert_same(weights(layer), weights(other))


# Precision


@each_layer
def test_autocast_measures_in_float32(make: Any, shape: Any, spatial: Any, kind: Any) -> None:
    layer, x = make(), torch.randn(shape)
    bound_layer(layer, 0.5)
    other = copy.deepcopy(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    other(x)
    assert out.dtype == torch.bfloat16
    assert_same(weights(layer), weights(other))
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@each_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(make: Any, shape: Any, spatial: Any, kind: Any, dtype: torch.dtype) -> None:
    layer = make()
    bound_layer(layer, 0.3)
    layer(torch.randn(shape))
    before = weights(layer)
    layer.to(dtype)
    out = layer(torch.randn(shape, dtype=dtype))
    out.sum().backward()
    assert out.dtype == layer.weight.grad.dtype == dtype
    for name in BUFFERS:
        assert getattr(layer, name).dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(layer.spectral_bound.float(), before["spectral_bound"])
    for _ in range(30):
        layer(torch.randn(shape, dtype=dtype))
    assert true_sigma(layer, layer.eval().bounded_weight(), spatial) == pytest.approx(0.3, rel=0.02)


# The life of a network


def test_names_and_what_is_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "conv": nn.Conv1d(2, 2, 1),
            "inner": nn.Sequential(nn.Linear(2, 2), nn.Conv2d(2, 2, 1)),
            "special": Special(2, 2),
            "attention": nn.MultiheadAttention(4, 2),
            "encoder": nn.TransformerEncoderLayer(4, 2, 8),
            "volume": nn.Conv3d(1, 1, 1),
        }
    )
    state = {name for name, _ in model.named_parameters()}
    assert bound_spectrally(model, 0.9) == ["conv", "inner.0", "inner.1"]
    assert {name for name, _ in model.named_parameters()} == state
    assert bound_spectrally(model, 0.2) == []
    assert model["conv"].spectral_bound == pytest.approx(0.9)
    assert bound_spectrally(nn.Linear(2, 2), 1.0) == [""]


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_must_be_positive(bound: float) -> None:
    model = network()
    with pytest.raises(ValueError, match="positive"):
        bound_spectrally(model, bound)
    with pytest.raises(ValueError, match="positive"):
        bound_layer(model[0], bound)
    assert type(model[0]) is nn.Conv2d
    assert not dict(model.named_buffers())


def test_what_cannot_be_bounded_says_so() -> None:
    with pytest.raises(TypeError, match="BatchNorm1d"):
        bound_layer(nn.BatchNorm1d(2), 1.0)
    with pytest.raises(TypeError, match="complex"):
        bound_layer(nn.Linear(2, 2, dtype=torch.complex64), 1.0)
    with pytest.raises(ValueError, match="'1' has no weight yet"):
        bound_spectrally(nn.Sequential(nn.ReLU(), nn.LazyLinear(2)), 1.0)


def test_hooks_identity_ties_and_optimisers_survive() -> None:
    model, calls = network(), []
    model[0].register_forward_hook(lambda module, args, out: calls.append(module))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alias, weight, first = model[0], model[0].weight, model[0].weight.clone()
    bound_spectrally(model, 0.5)
    step(model, optimizer, images())
    assert calls == [alias]
    assert alias.weight is weight
    assert not torch.equal(weight, first)


def test_eval_writes_nothing_and_repeats_to_the_bit() -> None:
    model, x = trained(), images()
    model.eval()
    before = weights(model)
    first = model(x)
    model(torch.randn(2, 2, 8, 8))
    assert torch.equal(model(x), first)
    assert_same(weights(model), before)


def test_training_without_gradients_still_measures() -> None:
    for context in (torch.no_grad, torch.inference_mode):
        model = network()
        bound_spectrally(model, 0.5)
        with context():
            model(images())
        assert model[0].spectral_sigma > 0
        F.cross_entropy(model(images()), torch.zeros(5, dtype=torch.long)).backward()


def test_two_passes_before_one_backward() -> None:
    model = trained()
    (model(images(1)).sum() + model(images(2)).sum()).backward()
    assert torch.isfinite(model[0].weight.grad).all()


def via_state_dict(model: nn.Module) -> nn.Module:
    fresh = network()
    bound_spectrally(fresh, 123.0)
    fresh.load_state_dict(model.state_dict())
    return fresh


def via_assigned_state_dict(model: nn.Module) -> nn.Module:
    fresh = network()
    bound_spectrally(fresh, 123.0)
    fresh.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return fresh


def via_pickle(model: nn.Module) -> nn.Module:
    restored: nn.Module = pickle.loads(pickle.dumps(model))
    return restored


@pytest.mark.parametrize("duplicate", [via_state_dict, via_assigned_state_dict, via_pickle, copy.deepcopy])
def test_a_copy_predicts_and_resumes_exactly(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = trained()
    other = duplicate(model)
    x = images(9)
    assert torch.equal(model.eval()(x), other.eval()(x))
    for each in (model, other):
        step(each.train(), torch.optim.SGD(each.parameters(), lr=0.1), x)
    assert_same(weights(model), weights(other))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    assert not torch.equal(model[0].spectral_v, other[0].spectral_v)  # no storage is shared


def test_an_unmeasured_state_loads_into_a_trained_model() -> None:
    model, fresh = trained(), network()
    bound_spectrally(fresh, 0.5)
    model.load_state_dict(fresh.state_dict())
    assert torch.equal(model.eval()(images()), fresh.eval()(images()))
    model.train()(images())


def test_fold_gives_plain_layers_and_the_same_bits() -> None:
    model, x = trained(bound=0.1), images()
    model.eval()
    expected, raw = model(x), model[0].weight.clone()
    assert fold_spectral_bound(model) == 3
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.Flatten, nn.Linear]
    assert not dict(model.named_buffers())
    assert torch.equal(model(x), expected)
    assert not torch.equal(model[0].weight, raw)
    assert fold_spectral_bound(model) == 0
    reference = network()
    reference.load_state_dict(model.state_dict())
    assert torch.equal(reference(x), expected)


def test_fold_unties_a_shared_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    table = nn.Embedding(4, 4)
    table.weight = model[0].weight
    bound_layer(model[0], 0.1)
    bound_layer(model[1], 0.2)
    whole, x, token = nn.ModuleDict({"layers": model, "table": table}), torch.randn(3, 4), torch.tensor([1])
    for _ in range(3):
        model(x)
    whole.eval()
    expected, row = model(x), table(token)
    fold_spectral_bound(whole)
    assert torch.equal(model(x), expected)
    assert torch.equal(table(token), row)


def test_fold_refuses_a_weight_that_a_hook_recomputes() -> None:
    layer = nn.Linear(4, 4)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(layer)
    bound_layer(layer, 0.1)
    layer(torch.randn(2, 4)).sum().backward()  # the bound itself works on top of it
    assert layer.weight_g.grad is not None
    with pytest.raises(ValueError, match="hook"):
        fold_spectral_bound(layer)


# Compilers


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "steps_before"), [("aot_eager", 0), ("inductor", 1)])
def test_compiled_training_and_evaluation_match_eager(backend: str, steps_before: int) -> None:
    torch._dynamo.reset()
    model = trained(steps=steps_before)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend=backend)
    losses = []
    for net, run in ((model, model), (other, compiled)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses.append([step(run, optimizer, images(seed)) for seed in range(4)])
    torch.testing.assert_close(*losses)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled.eval()(images()), model.eval()(images()))
    torch._dynamo.reset()


def test_after_the_first_pass_training_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    model = trained()
    before = weights(model)
    torch.compile(model, backend="eager", fullgraph=True)(images())
    assert not torch.equal(model[0].spectral_v, before["0.spectral_v"])
    torch._dynamo.reset()


def test_export_in_eval_mode_matches() -> None:
    model, x = trained(bound=0.1).eval(), images()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    other = images(7, batch=3)
    torch.testing.assert_close(program.module()(other), model(other))


# Pretrained layers: a bound that changes nothing


def large(scale: float = 50.0) -> nn.Sequential:
    """The first layer is far above any bound that is asked for."""
    model = network()
    with torch.no_grad():
        model[0].weight *= scale
    return model


SIZES = {"0": (8, 8), "2": (4, 4), "4": ()}


def test_bounds_are_measured_at_the_sizes_that_come() -> None:
    model = large().eval()
    expected = model(images())
    sigmas = {
        name: true_sigma(model[int(name)], model[int(name)].weight, size) for name, size in SIZES.items()
    }
    before = {name: p.clone() for name, p in model.named_parameters()}
    bound_spectrally(model, 3.0, keep=True)
    found = measure_bounds(model, lambda: model(images()))
    assert [layer.name for layer in found] == list(SIZES)
    for layer in found:
        sigma = sigmas[layer.name]
        assert layer.sigma == pytest.approx(sigma, rel=0.04)
        assert layer.sigma == float(model.get_submodule(layer.name).spectral_sigma)
        assert layer.bound == float(model.get_submodule(layer.name).spectral_bound)
        if layer.name == "0":
            assert sigma < layer.bound == pytest.approx(1.05 * sigma, rel=0.04)
        else:
            assert layer.bound == 3.0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(model(images()), expected)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(module.training for module in model.modules())


def test_a_bound_just_over_the_norm_is_raised_too() -> None:
    """σ is an estimate from below: without a margin, the next one would shrink the layer."""
    layer = nn.Linear(6, 6)
    sigma = true_sigma(layer, layer.weight)
    bound_layer(layer, 1.02 * sigma, keep=True)
    layer(torch.randn(3, 6))
    assert float(layer.spectral_bound) == pytest.approx(1.05 * sigma, rel=0.02)
    loose = nn.Linear(6, 6)
    bound_layer(loose, 1.2 * true_sigma(loose, loose.weight), keep=True)
    before = float(loose.spectral_bound)
    loose(torch.randn(3, 6))
    assert float(loose.spectral_bound) == before


def test_without_keep_a_layer_is_shrunk_to_the_bound_that_was_asked_for() -> None:
    model = large()
    bound_spectrally(model, 3.0)
    measure_bounds(model, lambda: model(images()))
    assert float(model[0].spectral_bound) == 3.0
    assert true_sigma(model[0], model.eval()[0].bounded_weight(), (8, 8)) <= 3.0 * 1.04


def test_the_first_training_pass_measures_bounds_as_well() -> None:
    model, other = large(), large()
    other.load_state_dict(model.state_dict())
    expected = model(images())
    for net in (model, other):
        bound_spectrally(net, 3.0, keep=True)
    torch.testing.assert_close(model.train()(images()), expected)
    measure_bounds(other, lambda: other.eval()(images()))
    torch.testing.assert_close(model[0].spectral_bound, other[0].spectral_bound)


def test_a_bound_is_raised_once_and_growing_weights_cannot_move_it() -> None:
    model = large()
    bound_spectrally(model, 3.0, keep=True)
    measure_bounds(model, lambda: model(images()))
    bounds = [float(model[i].spectral_bound) for i in (0, 2, 4)]
    with torch.no_grad():
        for p in model.parameters():
            p *= 20
    for _ in range(5):
        model.train()(images())
    measure_bounds(model, lambda: model(images()))
    assert [float(model[i].spectral_bound) for i in (0, 2, 4)] == bounds
    model.eval()
    for (name, size), bound in zip(SIZES.items(), bounds, strict=True):
        layer = model[int(name)]
        assert true_sigma(layer, layer.weight, size) > 1.5 * bound
        assert true_sigma(layer, layer.bounded_weight(), size) <= 1.04 * bound


def test_layers_that_are_not_called_are_measured_when_they_are() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "spare": nn.Linear(4, 4)})
    with torch.no_grad():
        model["spare"].weight *= 50
    bound_spectrally(model, 9.0, keep=True)
    assert [layer.name for layer in measure_bounds(model, lambda: model["used"](torch.randn(2, 4)))] == [
        "used"
    ]
    assert float(model["spare"].spectral_sigma) == 0
    model["spare"].train()(torch.randn(2, 4))
    sigma = true_sigma(model["spare"], model["spare"].weight)
    assert float(model["spare"].spectral_bound) == pytest.approx(1.05 * sigma, rel=0.04)


def test_hooks_are_taken_off_when_the_pass_fails() -> None:
    model = network()
    bound_spectrally(model, 3.0, keep=True)
    with pytest.raises(RuntimeError):
        measure_bounds(model, lambda: model(torch.randn(2, 5)))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_raised_bounds_are_copied_pickled_and_saved() -> None:
    model = large()
    bound_spectrally(model, 3.0, keep=True)
    measure_bounds(model, lambda: model(images()))
    fresh = network()
    bound_spectrally(fresh, 3.0, keep=True)
    fresh.load_state_dict(model.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
        assert torch.equal(twin[0].spectral_bound, model[0].spectral_bound)
        assert torch.equal(twin.eval()(images()), model.eval()(images()))


def test_a_folded_layer_that_is_bounded_again_forgets_that_it_was_kept() -> None:
    layer = nn.Linear(4, 4)
    bound_layer(layer, 0.1, keep=True)
    layer(torch.randn(2, 4))
    fold_spectral_bound(layer)
    bound_layer(layer, 0.1)
    layer(torch.randn(2, 4))
    assert float(layer.spectral_bound) == pytest.approx(0.1)


# --- passes that a backward pass repeats --------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_network_has_the_same_gradient_and_norms(reentrant: bool, cached: bool) -> None:
    """Of two image sizes, each with its own vector of the power iteration, before one backward pass."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        BoundedConv2d(3, 8, 3, padding=1, bound=0.5), nn.ReLU(), BoundedConv2d(8, 4, 3, groups=2, bound=0.5)
    ).double()
    small, large = (torch.randn(2, 3, n, n, dtype=torch.float64, requires_grad=True) for n in (6, 9))
    for _ in range(3):
        plain(small)
    if cached:
        cache_spectral_norms(plain)
    repeated = copy.deepcopy(plain)
    sizes = [small] if cached else [small, large]  # a cached norm is of one size
    sum(plain(x).square().sum() for x in sizes).backward()  # type: ignore[union-attr]
    passes = [checkpoint(repeated, x, use_reentrant=reentrant) for x in sizes]
    sum(out.square().sum() for out in passes).backward()  # type: ignore[union-attr]
    for (name, p), q in zip(plain.named_parameters(), repeated.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-12, msg=name)
    for (name, b), other in zip(plain.named_buffers(), repeated.buffers(), strict=True):
        assert torch.equal(other, b), name


def test_start_vectors_are_neither_copied_nor_folded() -> None:
    layer = BoundedLinear(6, 6, bound=0.5)
    layer(torch.randn(2, 6))
    assert layer.spectral_starts
    assert not copy.deepcopy(layer).spectral_starts
    assert not pickle.loads(pickle.dumps(layer)).spectral_starts
    fold_spectral_bound(layer)
    assert "spectral_starts" not in vars(layer)
