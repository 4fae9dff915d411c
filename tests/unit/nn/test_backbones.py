"""Backbones: shapes, rebuilding from config, and what the residual MLP promises about distances."""

from __future__ import annotations

import copy
import inspect
import json
import pickle

import pytest
import torch
from torch import Tensor, nn

from hetsngp.nn.backbones import BACKBONES, ResidualMLP, WideResNet
from hetsngp.nn.spectral import bound_spectrally

EXAMPLES: list[tuple[nn.Module, tuple[int, ...]]] = [
    (ResidualMLP(3, width=8, depth=2, dropout=0.1), (5, 3)),
    (ResidualMLP(20, width=8, depth=1), (5, 20)),
    (WideResNet(depth=10, width=1, in_channels=1, dropout=0.1), (5, 1, 16, 12)),
]
each_backbone = pytest.mark.parametrize(("backbone", "shape"), EXAMPLES)


def distances(h: Tensor) -> Tensor:
    return torch.pdist(h.double())


@each_backbone
def test_features_have_the_promised_shape(backbone: nn.Module, shape: tuple[int, ...]) -> None:
    h = copy.deepcopy(backbone)(torch.randn(shape))
    assert h.shape == (shape[0], backbone.num_features)
    h.sum().backward()


@each_backbone
def test_config_rebuilds_the_network(backbone: nn.Module, shape: tuple[int, ...]) -> None:
    config = json.loads(json.dumps(backbone.config))
    fresh = BACKBONES[type(backbone).__name__](**config)
    x = torch.randn(shape)
    original = copy.deepcopy(backbone).eval()
    fresh.load_state_dict(original.state_dict())
    assert torch.equal(fresh.eval()(x), original(x))
    assert fresh.config == backbone.config
    assert {*config, "generator"} == {*inspect.signature(type(backbone)).parameters}
    assert fresh.blocks[0].dropout.p == backbone.blocks[0].dropout.p


@each_backbone
def test_bounded_backbones_train_copy_and_pickle(backbone: nn.Module, shape: tuple[int, ...]) -> None:
    model, x = copy.deepcopy(backbone), torch.randn(shape)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    assert bound_spectrally(model, 0.5) == layers
    model(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("kind", [ResidualMLP, WideResNet])
def test_the_generator_decides_everything(kind: type) -> None:
    kwargs = {"in_features": 3, "width": 8} if kind is ResidualMLP else {"depth": 10, "width": 1}
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(states))
        before = torch.get_rng_state()
        states.append(kind(**kwargs, generator=torch.Generator().manual_seed(seed)).state_dict())
        assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not any(
        torch.equal(states[0][name], states[2][name])
        for name in states[0]
        if name.endswith(("linear.weight", "linear.bias", "isometry", "conv1.weight", "stem.weight"))
    )


# Residual MLP


@pytest.mark.parametrize("in_features", [1, 2, 16])
def test_the_embedding_keeps_every_distance(in_features: int) -> None:
    model = ResidualMLP(in_features, width=16, depth=1)
    x = 10 * torch.randn(50, in_features)
    torch.testing.assert_close(distances(x @ model.isometry.T), distances(x), rtol=1e-5, atol=1e-6)
    assert "isometry" in model.state_dict()
    assert "isometry" not in dict(model.named_parameters())


def test_the_forward_pass_is_the_formula() -> None:
    model, x = ResidualMLP(2, width=8, depth=3, dropout=0.5).eval(), torch.randn(4, 2)
    h = x @ model.isometry.T
    for block in model.blocks:
        h = h + (h @ block.linear.weight.T + block.linear.bias).clamp(min=0)
    torch.testing.assert_close(model(x), h)


def test_wide_inputs_pass_through_a_trained_layer() -> None:
    model = ResidualMLP(9, width=8, depth=1)
    assert isinstance(model.embedding, nn.Linear)
    assert model.embedding.weight.shape == (8, 9)


@pytest.mark.parametrize("c", [0.3, 0.9])
def test_bounded_blocks_are_bi_lipschitz(c: float) -> None:
    """(1−c)‖h−h′‖ ≤ ‖g(h)−g(h′)‖ ≤ (1+c)‖h−h′‖ for every block, hence powers of these for the network."""
    model = ResidualMLP(2, width=16, depth=3)
    with torch.no_grad():
        for block in model.blocks:  # far above the bound, and contracting: −I is the worst case below
            block.linear.weight.mul_(5).sub_(3 * torch.eye(16))
    x = torch.cat([torch.randn(60, 2), 1e-2 * torch.randn(60, 2), 100 * torch.randn(60, 2)])
    unbounded = [distances(block(h)) / distances(h) for block in model.blocks for h in [model(x)]]
    assert max(r.max() for r in unbounded) > 1 + c  # the test can fail
    bound_spectrally(model, c)
    for _ in range(300):
        model(x[:2])
    model.eval()
    h = x @ model.isometry.T
    for block in model.blocks:
        out = block(h)
        probes = torch.cat([h, 3 * torch.randn(100, 16), adversarial(block, 16)])
        ratio = distances(block(probes)) / distances(probes)
        assert 1 - c - 1e-3 <= ratio.min()
        assert ratio.max() <= 1 + c + 1e-3
        h = out
    ratio = distances(model(x)) / distances(x)
    assert (1 - c) ** 3 - 1e-3 <= ratio.min()
    assert ratio.max() <= (1 + c) ** 3 + 1e-3


def adversarial(block: nn.Module, width: int) -> Tensor:
    """Points along the top singular vector of the bounded weight, where the branch moves most."""
    _, _, vh = torch.linalg.svd(block.linear.bounded_weight().detach())
    return torch.linspace(-50, 50, 40)[:, None] * vh[0]


def test_residual_mlp_checks_its_sizes() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ResidualMLP(0)


# Wide ResNet


@pytest.mark.parametrize(("depth", "width", "millions"), [(28, 10, 36.5), (16, 4, 2.7), (40, 2, 2.2)])
def test_wide_resnet_has_the_published_size(depth: int, width: int, millions: float) -> None:
    """Parameters in millions as in Table 1 and 4 of the WRN paper, with its ten-class linear layer added."""
    with torch.device("meta"):
        model = WideResNet(depth, width)
    total = sum(p.numel() for p in model.parameters()) + 10 * (model.num_features + 1)
    assert total / 1e6 == pytest.approx(millions, abs=0.06)
    assert model.num_features == 64 * width


def test_wide_resnet_has_as_many_layers_as_its_depth_says() -> None:
    model = WideResNet(depth=22, width=1)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert sum(m.kernel_size == (3, 3) for m in convs) + 1 == 22 - 2  # 3 shortcuts take the place of layers
    sizes: list[tuple[int, ...]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, a, out: sizes.append(tuple(out.shape[1:])))
    model(torch.randn(2, 3, 32, 32))
    assert sizes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


def test_wide_resnet_is_the_formula() -> None:
    model, x = WideResNet(depth=16, width=1, dropout=0.5), torch.randn(3, 3, 8, 8)
    model(x)  # running statistics other than 0 and 1
    model.eval()
    h = model.stem(x)
    for block in model.blocks:
        active = block.norm1(h).clamp(min=0)
        branch = block.conv2(block.norm2(block.conv1(active)).clamp(min=0))
        h = branch + (h if block.shortcut is None else block.shortcut(active))
    torch.testing.assert_close(model(x), model.norm(h).clamp(min=0).flatten(2).mean(2))


def test_wide_resnet_starts_with_unit_scale() -> None:
    layer = WideResNet(depth=10, width=4).blocks[2].conv2
    expected = (2 / (9 * 256)) ** 0.5
    assert layer.weight.std().item() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("depth", [4, 11, 27])
def test_wide_resnet_refuses_other_depths(depth: int) -> None:
    with pytest.raises(ValueError, match="6n"):
        WideResNet(depth=depth)
