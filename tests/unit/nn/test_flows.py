"""Radial flows: the Jacobian by automatic differentiation, a total mass of one, a plain loop over classes."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from tests.reference.oracles import radial_flow_log_density
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hetsngp.functional import dirichlet as flows
from hetsngp.nn.dirichlet import ClassFlows

Parameters = tuple[Tensor, Tensor, Tensor]


def parameters(layers: int, classes: int, dim: int, *, seed: int = 0, spread: float = 1.5) -> Parameters:
    """Centres (F, K, L), raw α and β (F, K): α and b from about 0.05 to 5, pulling in and pushing out."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return draw(layers, classes, dim), spread * draw(layers, classes), spread * draw(layers, classes)


def points(rows: int, dim: int, seed: int = 9) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- one layer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 6])
@pytest.mark.parametrize("raw_beta", [-30.0, -3.0, 0.0, 3.0, 30.0])
@pytest.mark.parametrize("raw_alpha", [-4.0, 0.5, 10.0])
def test_log_det_is_that_of_the_jacobian(raw_alpha: float, raw_beta: float, dim: int) -> None:
    """From b/α = 1e-14 (all but a collapse onto the centre) to 2,000 (an explosion), far and near."""
    centre = points(1, dim)
    alpha, beta = (torch.tensor([raw], dtype=torch.float64) for raw in (raw_alpha, raw_beta))
    for distance in (1e-3, 0.3, 2.0, 50.0):
        direction = points(1, dim, seed=3)
        z = centre + distance * direction / direction.norm()
        jacobian = torch.func.jacrev(
            lambda x: flows.radial(x.view(1, 1, dim), centre, alpha, beta)[0].view(-1)
        )
        sign, oracle = torch.linalg.slogdet(jacobian(z.view(-1)))
        _, log_det = flows.radial(z.unsqueeze(0), centre, alpha, beta)
        assert sign == 1
        # Rounding of the Jacobian's entries, over its smallest singular value.
        assert torch.allclose(log_det.squeeze(), oracle, rtol=1e-10, atol=1e-10)


def test_the_layer_is_the_paper_s() -> None:
    centres, raw_alphas, raw_betas = (p[0] for p in parameters(1, 4, 3))
    z = points(5, 3)
    moved, log_det = flows.radial(z.unsqueeze(1), centres, raw_alphas, raw_betas)
    assert moved.shape == (5, 4, 3)
    assert log_det.shape == (5, 4)
    for c in range(4):
        alpha = math.log1p(math.exp(raw_alphas[c]))
        beta = -alpha + math.log1p(math.exp(raw_betas[c]))
        for b in range(5):
            offset = z[b] - centres[c]
            want = z[b] + beta / (alpha + offset.norm()) * offset
            assert torch.allclose(moved[b, c], want, atol=1e-13)
    again, log_det_again = flows.radial(
        z.unsqueeze(1).expand(-1, 4, -1), centres, raw_alphas, raw_betas
    )  # (B, K, L) is the same as (B, 1, L)
    assert torch.equal(again, moved)
    assert torch.equal(log_det_again, log_det)


@pytest.mark.parametrize("dim", [1, 6])
def test_single_precision_keeps_its_digits_under_strong_contraction(dim: int) -> None:
    """b down to e⁻²⁰ beside α = 1, r down to 1e-6, where float32 has no digit of 1 + βh left."""
    offsets = torch.logspace(-6, 3, 40).unsqueeze(1) * torch.nn.functional.normalize(torch.ones(1, dim))
    raw_betas = torch.tensor([-20.0, -12.0, -5.0, 0.0, 20.0])
    _, got = flows.radial(offsets.unsqueeze(1), torch.zeros(5, dim), torch.full((5,), 0.5), raw_betas)
    alpha = math.log1p(math.exp(0.5))
    beta = -alpha + np.log1p(np.exp(raw_betas.double().numpy()))
    r = offsets.double().norm(dim=-1, keepdim=True).numpy()
    h = 1 / (alpha + r)
    want = (dim - 1) * np.log1p(beta * h) + np.log1p(beta * h - beta * h**2 * r)
    assert want.min() < -10
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=2e-6)


def test_gradients_at_a_centre_are_finite_and_right() -> None:
    centres, raw_alphas, raw_betas = (p[0].requires_grad_() for p in parameters(1, 3, 4))
    z = centres.detach()[:1].clone().requires_grad_()  # the centre of class 0, and no other
    moved, log_det = flows.radial(z.unsqueeze(1), centres, raw_alphas, raw_betas)
    assert torch.equal(moved[0, 0], centres[0])
    gradients = torch.autograd.grad(log_det.sum() + moved.square().sum(), (z, centres, raw_alphas, raw_betas))
    assert all(torch.isfinite(g).all() for g in gradients)
    jacobian = torch.func.jacrev(lambda x: flows.radial(x, centres, raw_alphas, raw_betas)[0][0, 0])(
        z.detach().unsqueeze(1)
    )
    ratio = torch.nn.functional.softplus(raw_betas[0]) / torch.nn.functional.softplus(raw_alphas[0])
    assert torch.allclose(jacobian.view(4, 4), ratio * torch.eye(4, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(log_det[0, 0], 4 * ratio.log(), atol=1e-12)


def test_equal_raw_values_are_the_identity() -> None:
    centres, raw, _ = parameters(5, 3, 4)
    z = points(6, 4)
    moved, log_det = flows.radial(z.unsqueeze(1), centres[0], raw[0], raw[0])
    assert torch.allclose(moved, z.unsqueeze(1).expand_as(moved), atol=1e-14)
    assert log_det.abs().max() < 1e-14
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1, keepdim=True)
    assert torch.allclose(flows.log_density(z, centres, raw, raw), normal.expand(-1, 3), atol=1e-12)
    none = flows.log_density(z, centres[:0], raw[:0], raw[:0])
    assert torch.allclose(none, normal.expand(-1, 3), atol=1e-12)


# --- a stack -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 6])
def test_all_classes_at_once_are_a_loop_over_classes(dim: int) -> None:
    stack, z = parameters(4, 7, dim), 3 * points(5, dim)
    got = flows.log_density(z, *stack)
    assert got.shape == (5, 7)
    np.testing.assert_allclose(
        got.numpy(), radial_flow_log_density(z.numpy(), *(p.numpy() for p in stack)), rtol=1e-11, atol=1e-11
    )
    assert got.std(-1).min() > 0.1  # the classes differ, so a mix-up would show


def test_a_stack_is_its_log_det_by_automatic_differentiation() -> None:
    centres, raw_alphas, raw_betas = parameters(5, 3, 4)
    z = points(6, 4)
    for c in range(3):

        def image(x: Tensor, c: int = c) -> Tensor:
            for f in range(5):
                layer = (centres[f, c : c + 1], raw_alphas[f, c : c + 1], raw_betas[f, c : c + 1])
                x = flows.radial(x.view(1, 1, 4), *layer)[0].view(-1)
            return x

        base = torch.stack([-0.5 * image(x).square().sum() - 2 * math.log(2 * math.pi) for x in z])
        log_det = torch.linalg.slogdet(torch.stack([torch.func.jacrev(image)(x) for x in z]))[1]
        got = flows.log_density(z, centres, raw_alphas, raw_betas)[:, c]
        assert torch.allclose(got, base + log_det, atol=1e-10)


def grid_mass(stack: Parameters, dim: int, half: float, step: float) -> tuple[Tensor, Tensor]:
    """∫ q(z | c) dz by the trapezoid rule on a cube, and a bound of its error: (K,), (K,).

    On a line the error is at most step²/8 times the total variation of the slope, kinks included; the second
    differences of the values add up to that variation times the step.
    """
    axis = torch.arange(-half, half + step / 2, step, dtype=torch.float64)
    grid = torch.cartesian_prod(*[axis] * dim).view(-1, dim)
    density = torch.cat([flows.log_density(part, *stack).exp() for part in grid.split(2**17)])
    density = density.unflatten(0, (len(axis),) * dim)
    over = tuple(range(dim))
    variation = sum(density.diff(n=2, dim=d).abs().sum(over) for d in over)
    return density.sum(over) * step**dim, variation * step**dim / 8


@pytest.mark.parametrize(("dim", "step", "spread"), [(1, 0.002, 1.5), (2, 0.05, 1.0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_density_has_mass_one(dim: int, step: float, spread: float, seed: int) -> None:
    stack = parameters(3, 4, dim, seed=seed, spread=spread)
    alpha, b = (torch.nn.functional.softplus(raw) for raw in stack[1:])
    assert (b / alpha).log().abs().max() > 1  # far from the identity
    # A layer moves no point by more than |β|: nine standard deviations of the base are inside.
    half = 9 + float((b - alpha).abs().sum(0).max())
    mass, error = grid_mass(stack, dim, half, step)
    assert ((mass - 1).abs() < 2 * error + 1e-9).all()  # twice: the variation is seen on the grid only
    assert error.max() < 0.02


def test_a_density_in_six_dimensions_has_mass_one() -> None:
    """By importance sampling from N(0, 2²I), within four standard errors."""
    stack, samples = parameters(3, 4, 6, spread=0.5), 200_000
    z = 2 * points(samples, 6)
    proposal = torch.distributions.Normal(0.0, 2.0).log_prob(z).sum(-1, keepdim=True)
    weight = (flows.log_density(z, *stack) - proposal).exp()
    error = weight.std(0) / math.sqrt(samples)
    assert error.max() < 0.02
    assert ((weight.mean(0) - 1).abs() < 4 * error).all()


@pytest.mark.parametrize("dim", [1, 3])
def test_gradients(dim: int) -> None:
    inputs = [t.requires_grad_() for t in (points(3, dim), *parameters(3, 2, dim))]
    assert torch.autograd.gradcheck(flows.log_density, inputs)
    layer = [
        points(3, dim).unsqueeze(1).requires_grad_(),
        *(p[0].detach().requires_grad_() for p in inputs[1:]),
    ]
    assert torch.autograd.gradcheck(flows.radial, layer)


class CountOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_thousand_classes_cost_no_more_operations_than_two() -> None:
    counts = []
    for classes in (2, 1000):
        module, z = ClassFlows(classes, 8, 6), torch.randn(32, 8)
        with CountOperations() as counter:
            out = module(z)
            out.sum().backward()
        counts.append(counter.count)
        assert out.shape == (32, classes)
        assert all(torch.isfinite(p.grad).all() for p in module.parameters())
    assert counts[0] == counts[1]
    some = [3, 500, 999]
    stack = [
        p.detach().double()[:, some].numpy() for p in (module.centres, module.raw_alphas, module.raw_betas)
    ]
    oracle = radial_flow_log_density(z.double().numpy(), *stack)
    np.testing.assert_allclose(out[:, some].detach().numpy(), oracle, rtol=1e-5)


# --- the module ----------------------------------------------------------------------------------------


def test_the_module_starts_near_the_normal_and_its_classes_can_part() -> None:
    module = ClassFlows(5, 6, 8)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == {
        "centres": (8, 5, 6),
        "raw_alphas": (8, 5),
        "raw_betas": (8, 5),
    }
    z = torch.randn(100, 6)
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1, keepdim=True)
    difference = module(z) - normal
    assert difference.abs().max() < 0.1
    assert difference.std(-1).min() > 1e-4  # not the identity, where the centres would stand still
    assert torch.pdist(module.centres.detach().transpose(0, 1).flatten(1)).min() > 1
    module(z).sum().backward()
    assert all((p.grad != 0).all() for p in module.parameters())


def test_initial_values_come_from_the_generator() -> None:
    def build(seed: int) -> ClassFlows:
        return ClassFlows(3, 2, 4, generator=torch.Generator().manual_seed(seed))

    before = torch.get_rng_state()
    one, same, other = build(1), build(1), build(2)
    assert torch.equal(before, torch.get_rng_state())
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a is one.raw_alphas or not torch.equal(a, c)


@pytest.mark.parametrize("seeded", [False, True])
def test_the_module_is_built_on_the_meta_device(seeded: bool) -> None:
    generator = torch.Generator().manual_seed(0) if seeded else None
    with torch.device("meta"):
        module = ClassFlows(3, 2, 4, generator=generator)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    filled = ClassFlows(3, 2, 4)
    module.load_state_dict(filled.state_dict(), assign=True)
    z = torch.randn(5, 2)
    assert torch.equal(module(z), filled(z))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_stay_in_single_precision(dtype: torch.dtype) -> None:
    module = ClassFlows(3, 2, 4)
    kept = copy.deepcopy(module)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), module).to(dtype)
    assert model[0].weight.dtype == dtype
    for a, b in zip(module.parameters(), kept.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
        assert isinstance(a, torch.nn.Parameter)
    module.double()
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert {p.dtype for p in module.half().parameters()} == {torch.float32}


def test_the_input_s_precision_is_the_output_s() -> None:
    module, z = ClassFlows(3, 2, 4), torch.randn(5, 2)
    double = module(z.double())
    assert double.dtype == torch.float64
    assert torch.allclose(module(z).double(), double, atol=1e-5)
    assert module(z.bfloat16()).dtype == torch.bfloat16


def test_copies_give_the_same_density() -> None:
    module, z = ClassFlows(3, 2, 4), torch.randn(5, 2)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(z), module(z))
        with torch.no_grad():
            other.centres.add_(1)
        assert not torch.equal(other(z), module(z))
