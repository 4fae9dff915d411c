"""MIMO: a first layer for M inputs, who meets whom in training, and what the M members become."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from tests.reference import oracles
from torch import Tensor, nn

import hetsngp
from hetsngp.functional.link import TARGET_ERROR
from hetsngp.models.multi_input import MultiInput
from hetsngp.nn.backbones import ResidualMLP, WideResNet
from hetsngp.nn.multi_input import input_stack, widen_inputs
from hetsngp.nn.spectral import bound_spectrally


class SmallCNN(nn.Module):
    """Stem, norm, pooling, a residual block, pooled features: what torchvision and timm look like."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.maxpool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        return (h + F.relu(self.conv2(h))).mean((-2, -1))


class Wrapped(nn.Module):
    """Any layers as a backbone; its input may be a dict."""

    def __init__(self, body: nn.Module, num_features: int) -> None:
        super().__init__()
        self.body, self.num_features = body, num_features

    def forward(self, x: Any) -> Tensor:
        h: Tensor = self.body(x["image"] if isinstance(x, dict) else x)
        return h


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 7), (5,)),
    "linear of a sequence": (lambda: nn.Linear(5, 7), (4, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 6, 3, stride=2, padding=1), (3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 6, 3, stride=2, padding=1), (3, 6, 5)),
    "conv2d reflected": (lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), (3, 6, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, dilation=2), (2, 4, 3, 5)),
    "flatten": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 4)),
        (3, 2, 2),
    ),
    "cnn": (SmallCNN, (3, 8, 8)),
    "residual mlp, isometry fits": (lambda: ResidualMLP(2, width=16, depth=2), (2,)),
    "residual mlp, isometry is too wide": (lambda: ResidualMLP(6, width=8, depth=2), (6,)),
    "residual mlp, embedding": (lambda: ResidualMLP(12, width=8, depth=2), (12,)),
    "wide resnet": (lambda: WideResNet(depth=10, width=1), (3, 8, 8)),
}
every_network = pytest.mark.parametrize("name", NETWORKS)
M = 3


def network(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[int, ...]]:
    make, shape = NETWORKS[name]
    net = make().to(dtype)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics that are not the identity
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return net.eval(), shape


def entrance(net: nn.Module) -> Any:
    """The layer that is widened, by hand; the ResidualMLP itself where that is its isometry."""
    if isinstance(net, ResidualMLP):
        return net if net.embedding is None else net.embedding
    return {SmallCNN: lambda: net.conv1, WideResNet: lambda: net.stem, nn.Sequential: lambda: net[1]}.get(
        type(net), lambda: net
    )()


def first_weight(net: nn.Module) -> Tensor:
    layer = entrance(net)
    return layer.isometry if isinstance(layer, ResidualMLP) else layer.weight


def sum_over_members(original: nn.Module, weight: Tensor, inputs: list[Tensor]) -> Tensor:
    """Features where the first layer gives Σ_m W_m x_m + b: W_m the m-th part of ``weight`` (out, M·in, …).

    The first layer of a copy of the original is applied to each input, with its own part; the sum is put
    in its place on the way through the original network.
    """
    net, parts = copy.deepcopy(original), weight.chunk(len(inputs), 1)
    layer = entrance(net)
    if isinstance(layer, ResidualMLP):
        total = sum(x @ part.mT for x, part in zip(inputs, parts, strict=True))
        return net.blocks(total)
    before = nn.Flatten() if isinstance(net, nn.Sequential) else nn.Identity()
    bias = layer.bias
    outputs = []
    for x, part in zip(inputs, parts, strict=True):
        own = copy.deepcopy(layer)
        own.weight, own.bias = nn.Parameter(part.clone()), None
        outputs.append(own(before(x)))
    total = sum(outputs)
    if bias is not None:
        total = total + (bias if isinstance(layer, nn.Linear) else bias.view(-1, *[1] * (total.dim() - 2)))
    layer.register_forward_hook(lambda *_: total)
    return net(inputs[0])


# --- the widened layer --------------------------------------------------------------------------------------


@every_network
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
def test_given_the_same_input_m_times_the_network_is_the_one_it_was(name: str, dtype: torch.dtype) -> None:
    original, shape = network(name, dtype)
    wide = copy.deepcopy(original)
    widen_inputs(wide, M, generator=seed())
    assert first_weight(wide).shape[1] == M * first_weight(original).shape[1]
    x = torch.randn(4, *shape, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(wide(x), original(x), rtol=0, atol=2e-6)
    assert wide(x).dtype == dtype


def test_in_double_precision_it_is_so_to_double_precision() -> None:
    original, shape = network("conv2d")
    wide = copy.deepcopy(original)
    widen_inputs(wide, M, generator=seed())
    x = torch.randn(4, *shape, dtype=torch.float64)
    torch.testing.assert_close(wide(x), original(x), rtol=0, atol=1e-12)


@every_network
def test_different_inputs_enter_by_their_own_parts(name: str) -> None:
    original, shape = network(name)
    wide = copy.deepcopy(original)
    stack = widen_inputs(wide, M, generator=seed())
    inputs = [torch.randn(4, *shape, dtype=torch.float64) for _ in range(M)]
    with torch.no_grad(), stack.distinct():
        found = wide(torch.cat(inputs))
        exchanged = wide(torch.cat([inputs[1], inputs[0], inputs[2]]))
    assert found.shape[0] == 4
    with torch.no_grad():
        expected = sum_over_members(original, first_weight(wide), inputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    if "isometry" in name:
        # Who is who matters about as much as what they are, at once: it will never be trained.
        assert (found - exchanged).norm() > 0.3 * (found - found.roll(1, 0)).norm()
    else:
        tiled = first_weight(original).detach().repeat(1, M, *[1] * (first_weight(original).dim() - 2)) / M
        torch.testing.assert_close(first_weight(wide).detach(), tiled, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["linear", "conv2d", "residual mlp, embedding", "cnn"])
def test_only_the_weight_of_the_first_layer_is_touched(name: str) -> None:
    original, _ = network(name)
    wide = copy.deepcopy(original)
    entrance(wide).weight.requires_grad_(False)
    widen_inputs(wide, M, generator=seed())
    own = first_weight(wide)
    assert isinstance(own, nn.Parameter)
    assert not own.requires_grad
    before = dict(original.named_parameters()) | dict(original.named_buffers())
    after = dict(wide.named_parameters()) | dict(wide.named_buffers())
    assert before.keys() == after.keys()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert [after[key] is own for key in changed] == [True]
    assert all(after[key].requires_grad == before[key].requires_grad for key in before if key not in changed)
    layer = entrance(wide)
    size = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    assert size == own.shape[1]
    trained, _ = network(name)
    widen_inputs(trained, M, generator=seed())
    assert first_weight(trained).requires_grad


@pytest.mark.parametrize("members", [2, 3, 5])
@pytest.mark.parametrize("inputs", [2, 3])
def test_all_m_inputs_together_keep_their_distances_where_they_fit(inputs: int, members: int) -> None:
    """√M times the widened isometry has singular values one only: no joint direction is lost or stretched."""
    net = ResidualMLP(inputs, width=16, depth=1).double()
    net.isometry = net.isometry * torch.tensor([1.0, -1.0, 1.0])[:inputs]  # as another QR would have it
    before = net.isometry
    widen_inputs(net, members, generator=seed())
    wide = net.isometry
    assert wide.shape == (16, members * inputs)
    values = torch.linalg.svdvals(math.sqrt(members) * wide)
    torch.testing.assert_close(values, torch.ones(members * inputs).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(wide.chunk(members, 1)), before, rtol=0, atol=1e-6)  # made in single


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ResidualMLP(50, width=400),
        lambda: ResidualMLP(400, width=500),
    ],
    ids=["isometry that fits", "isometry too wide"],
)
def test_independent_inputs_are_as_large_in_the_output_as_one_input_was(
    make: Callable[[], nn.Module], members: int
) -> None:
    """E‖Wx‖² of a standard normal x is ‖W‖²_F, and the M parts together have that of the original, within
    four standard errors. Tiling alone (W/M) would have an M-th."""
    original = make().double()
    wide = copy.deepcopy(original)
    widen_inputs(wide, members, generator=seed(members))
    old, new = first_weight(original).detach(), first_weight(wide).detach()
    # Of Σ(W/M + Δ)², the cross term and Σ Δ² are random: n entries each, of relative variance of a few.
    error = math.sqrt(8 / old.numel())
    assert (new.square().sum() / old.square().sum()).item() == pytest.approx(1, abs=4 * error)
    # And of no member more than of another.
    shares = torch.stack([part.square().sum() for part in new.chunk(members, 1)]) / old.square().sum()
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / members), rtol=0, atol=4 * error)


def test_the_new_parts_come_from_the_generator() -> None:
    for make in (lambda: ResidualMLP(2, width=8), lambda: ResidualMLP(4, width=8)):
        original = make()
        nets = [copy.deepcopy(original) for _ in range(3)]
        before = torch.get_rng_state()
        for net, value in zip(nets, (1, 1, 2), strict=True):
            widen_inputs(net, M, generator=seed(value))
        assert torch.equal(before, torch.get_rng_state())
        one, same, other = (first_weight(net) for net in nets)
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


def test_one_input_leaves_the_layer_alone() -> None:
    for name in ("linear", "conv2d", "residual mlp, isometry fits", "residual mlp, embedding"):
        original, shape = network(name)
        wide = copy.deepcopy(original)
        stack = widen_inputs(wide, 1)
        assert torch.equal(first_weight(wide), first_weight(original))
        x = torch.randn(4, *shape, dtype=torch.float64)
        assert torch.equal(wide(x), original(x))
        with stack.distinct():
            assert torch.equal(wide(x), original(x))


def test_a_layer_that_is_bounded_already_is_the_one_it_was() -> None:
    original = nn.Sequential(nn.Linear(4, 6))
    with torch.no_grad():
        original[0].weight.mul_(10)
    bound_spectrally(original, 0.95)
    original.train()(torch.randn(3, 4))  # measures σ
    wide = copy.deepcopy(original.eval())
    widen_inputs(wide, M, generator=seed())
    x = torch.randn(5, 4)
    torch.testing.assert_close(wide(x), original(x), rtol=0, atol=1e-5)


def test_a_layer_that_is_bounded_already_is_bounded_for_all_inputs() -> None:
    net = nn.Sequential(nn.Linear(4, 6))
    with torch.no_grad():
        net[0].weight.mul_(10)
    bound_spectrally(net, 0.95)
    net.train()(torch.randn(3, 4))
    stack = widen_inputs(net, M, generator=seed())
    with stack.distinct():
        for _ in range(30):
            net(torch.randn(6, 4))
    norm = torch.linalg.matrix_norm(matrix(net.eval()[0], (4 * M,)), 2).item()
    assert norm == pytest.approx(0.95 / math.sqrt(M), rel=0.01)  # to equal inputs, 0.95


# --- networks that cannot be widened ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6)), r"'body\.0' \(BatchNorm1d\).*widen_inputs"),
        (nn.Embedding(9, 6), r"'body' \(Embedding\).*Linear or Conv"),
        (nn.Sequential(nn.Conv1d(4, 6, 1, groups=2), nn.Flatten()), r"'body\.0' has groups=2.*groups=1"),
        (nn.Flatten(), "no layer with parameters"),
    ],
    ids=["batchnorm", "embedding", "grouped", "no parameters"],
)
@pytest.mark.parametrize("method", ["mimo", "hetsngp_mimo"])
def test_a_first_layer_that_cannot_be_widened_is_named(body: nn.Module, says: str, method: str) -> None:
    with pytest.raises(ValueError, match=says):
        hetsngp.build(method, Wrapped(copy.deepcopy(body), 6), num_classes=3)


def test_a_widened_backbone_is_not_taken_for_another_one() -> None:
    net = Wrapped(nn.Linear(4, 6), 6)
    first = hetsngp.build("mimo", net, num_classes=3, num_members=2)
    weight = net.body.weight
    with pytest.raises(ValueError, match=r"already takes 2 inputs.*fresh one for num_members=3"):
        hetsngp.build("mimo", net, num_classes=3, num_members=3)
    with pytest.raises(ValueError, match=r"widened to take 2 inputs.*needs a fresh"):
        hetsngp.build("deterministic", net, num_classes=3)
    with pytest.raises(ValueError, match=r"widened to take 2 inputs.*needs a fresh"):
        hetsngp.build("posterior_network", net, num_classes=3)
    second = hetsngp.build("mimo", net, num_classes=3, num_members=2)
    assert net.body.weight is weight  # not widened twice
    assert weight.shape == (6, 8)
    assert isinstance(second, MultiInput)
    assert second.inputs is first.inputs
    assert sum(len(module._forward_pre_hooks) for module in net.modules()) == 1


class Elsewhere(nn.Module):
    """Registers a layer first that its features do not come from."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(4, 2)
        self.body = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(x)
        return h


def test_a_layer_that_is_registered_first_but_does_not_take_the_input() -> None:
    model = hetsngp.build("mimo", Elsewhere(), num_classes=3)
    with pytest.raises(
        RuntimeError, match=r"Register the first layer first, or give the backbone a method widen"
    ):
        model.loss(torch.randn(5, 4), torch.arange(5) % 3)


class Late(nn.Module):
    """Registers its last layer first."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 6)
        self.stem = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.out(self.stem(x).relu())
        return h


def test_a_layer_that_is_registered_first_but_called_last() -> None:
    model = hetsngp.build("mimo", Late(), num_classes=3)
    with pytest.raises(
        RuntimeError, match=r"Register the first layer first, or give the backbone a method widen"
    ):
        model.loss(torch.randn(5, 4), torch.arange(5) % 3)


@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_a_backbone_that_is_refused_is_left_alone(method: str) -> None:
    net = Wrapped(nn.Linear(4, 6), 6)
    model = hetsngp.build("mimo", net, num_classes=3)
    with pytest.raises(ValueError, match="needs a fresh"):
        hetsngp.build(method, net, num_classes=3, random_features=16)
    assert type(net.body) is nn.Linear
    assert type(model.backbone.body) is nn.Linear


class ClassToken(nn.Module):
    """A ViT in small: its first layer is a convolution, and it has a parameter of its own."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.randn(1, 1, 6))
        self.patches = nn.Conv2d(3, 6, 4, stride=4)
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], 1)
        out: Tensor = self.layer(tokens)[:, 0]
        return out


def test_a_vision_transformer_is_widened_at_its_patches() -> None:
    original = ClassToken().eval()
    net = copy.deepcopy(original)
    model = hetsngp.build("mimo", net, num_classes=3).eval()
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(net(x), original(x), rtol=0, atol=1e-5)
    model.loss(x, torch.arange(5) % 3).backward()
    assert net.patches.weight.shape == (6, 9, 4, 4)


class ByKeyword(nn.Module):
    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(input=x)
        return h


def test_a_first_layer_that_is_called_by_keyword() -> None:
    original = ByKeyword()
    net = copy.deepcopy(original)
    model = hetsngp.build("mimo", net, num_classes=3)
    x = torch.randn(5, 4)
    torch.testing.assert_close(net(x), original(x), rtol=0, atol=1e-6)
    model.loss(x, torch.arange(5) % 3).backward()


def test_a_weight_that_is_computed_from_others_is_refused_with_a_reason() -> None:
    net = Wrapped(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), 6)
    with pytest.raises(ValueError, match="body"):
        hetsngp.build("mimo", net, num_classes=3)


class Own(nn.Module):
    """Knows how to be widened: what the registered order cannot say."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(4, 2)
        self.body = nn.Linear(4, 6)

    def widen_inputs(self, num_inputs: int, generator: torch.Generator | None) -> None:
        wide = nn.Linear(4 * num_inputs, 6)
        wide.weight = nn.Parameter(self.body.weight.detach().repeat(1, num_inputs) / num_inputs)
        wide.bias = self.body.bias
        self.body = wide

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(x)
        return h


def test_a_backbone_may_widen_itself() -> None:
    original = Own()
    net = copy.deepcopy(original)
    model = hetsngp.build("mimo", net, num_classes=3)
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    torch.testing.assert_close(net(x), original(x), rtol=0, atol=1e-6)
    model.loss(x, y).backward()
    assert net.body.weight.grad is not None
    assert net.body.weight.shape == (6, 12)


# --- the spectral bound -------------------------------------------------------------------------------------


def matrix(layer: Any, shape: tuple[int, ...]) -> Tensor:
    """The linear part of the layer, from all M inputs side by side to the output, column by column."""
    size = math.prod(shape)
    with torch.no_grad():  # forward: past the stack's hook
        columns = layer.forward(torch.eye(size).view(size, *shape)) - layer.forward(torch.zeros(1, *shape))
    return columns.flatten(1).mT.double()


@pytest.mark.parametrize(
    ("make", "find", "shape", "joint"),
    [
        (
            lambda: Wrapped(nn.Sequential(nn.Flatten(), nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 8)), 8),
            lambda net: net.body[1],
            (2, 2),
            (4 * M,),
        ),
        (SmallCNN, lambda net: net.conv1, (3, 6, 6), (3 * M, 6, 6)),
        (lambda: ResidualMLP(12, width=8, depth=1), lambda net: net.embedding, (12,), (12 * M,)),
    ],
    ids=["linear", "conv2d", "embedding"],
)
def test_hetsngp_mimo_bounds_the_operator_of_all_inputs_together(
    make: Callable[[], nn.Module],
    find: Callable[[nn.Module], Any],
    shape: tuple[int, ...],
    joint: tuple[int, ...],
) -> None:
    net, bound = make(), 0.3
    model = hetsngp.build(
        "hetsngp_mimo", net, 3, random_features=16, rank=2, spectral_bound=bound, dataset_size=24
    )
    x, y = torch.randn(24, *shape), torch.arange(24) % 3
    toy.descend(model.train(), x, y, steps=12)
    layer = find(net)
    with torch.no_grad():  # σ lags behind in training, by one power iteration a step: let it catch up
        for _ in range(1000):
            layer.bounded_weight(joint[1:])
    model.eval()
    norm = torch.linalg.matrix_norm(matrix(layer, joint), 2).item()
    bound = bound / math.sqrt(M)  # of all inputs together
    assert 0.99 * bound < norm < 1.01 * bound
    layer.spectral_sigma.zero_()  # not measured: the weight as it is
    assert torch.linalg.matrix_norm(matrix(layer, joint), 2).item() > 1.5 * bound


# --- who meets whom -----------------------------------------------------------------------------------------


def partners(rows: int, value: int = 0, **options: Any) -> Tensor:
    model = hetsngp.build("mimo", ResidualMLP(2, width=8, depth=1), 3, **options)
    assert isinstance(model, MultiInput)
    return model._partners(rows, seed(value))


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("repetition", [1, 4])
@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
def test_every_example_is_each_member_s_input_equally_often(
    members: int, repetition: int, rho: float
) -> None:
    order = partners(17, num_members=members, batch_repetition=repetition, input_repetition=rho)
    assert order.shape == (members, 17 * repetition)
    for member in order:
        assert torch.bincount(member, minlength=17).tolist() == [repetition] * 17


@pytest.mark.parametrize("repetition", [1, 3])
@pytest.mark.parametrize("rho", [0.0, 0.25, 0.6, 1.0])
def test_the_share_of_rows_with_equal_inputs_is_rho(rho: float, repetition: int) -> None:
    """Among the others two members agree by chance: r times on average, however many they are. (A random
    permutation has one fixed point on average.)"""
    rows = 400
    order = partners(rows, input_repetition=rho, batch_repetition=repetition)
    total = rows * repetition
    same = round(rho * total)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        by_chance = int((order[a] == order[b]).sum()) - same
        # Poisson, nearly: more than 9 of mean 1, or 17 of mean 3, has a probability of 1e-7.
        assert 0 <= by_chance <= (0 if rho == 1 else {1: 9, 3: 17}[repetition])
    if rho == 1:
        assert (order == order[0]).all()


def test_which_examples_are_repeated_is_drawn_anew_each_time() -> None:
    """Example 0 is met by itself in a share ρ of all draws, within four standard errors; by chance once more
    in (1 − ρ)/n² of them."""
    model = hetsngp.build("mimo", ResidualMLP(2, width=8, depth=1), 3, input_repetition=0.25)
    assert isinstance(model, MultiInput)
    g, draws, hits = seed(), 400, 0
    for _ in range(draws):
        order = model._partners(40, g)
        hits += bool(((order == 0).all(0)).any())
    assert abs(hits / draws - 0.25) < 4 * math.sqrt(0.25 * 0.75 / draws) + 1 / 40**2


def test_partners_come_from_the_generator_only() -> None:
    before = torch.get_rng_state()
    model = hetsngp.build("mimo", toy.backbone(), 3, generator=seed())
    assert isinstance(model, MultiInput)
    assert torch.equal(before, torch.get_rng_state())
    one, same, other = (model._partners(30, seed(value)) for value in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    x, y = toy.blobs()
    model.loss(x, y, generator=seed(1))
    assert torch.equal(before, torch.get_rng_state())
    g = seed(1)
    assert not torch.equal(model._partners(30, g), model._partners(30, g))  # the next step meets others
    torch.manual_seed(5)
    one = model._partners(30, None)
    torch.manual_seed(5)
    assert torch.equal(one, model._partners(30, None))  # without a generator: torch's own


def recorder(members: int, **options: Any) -> MultiInput:
    """A model whose features are its inputs side by side: x (B, 1), h[row, m] the input of member m."""
    net = Wrapped(nn.Linear(1, members), members)
    model = hetsngp.build("mimo", net, 50, num_members=members, **options)
    assert isinstance(model, MultiInput)
    with torch.no_grad():
        net.body.weight.copy_(torch.eye(members))
        net.body.bias.zero_()
    return model


@pytest.mark.parametrize("kind", ["tensor", "dict"])
@pytest.mark.parametrize("options", [{}, {"batch_repetition": 3}, {"input_repetition": 0.4}])
def test_labels_and_weights_belong_to_the_inputs(options: dict[str, Any], kind: str) -> None:
    """Example i is the number i, with label i and weight i/10: what reaches a member must match."""
    model, rows = recorder(3, **options), 50
    x, y, weight = torch.arange(50.0).unsqueeze(1), torch.arange(50), torch.arange(50) / 10
    batch = {"image": x, "mask": torch.zeros(50)} if kind == "dict" else x
    h, labels, weights = model._training_batch(batch, y, weight, seed())
    rows *= options.get("batch_repetition", 1)
    assert h.shape == (rows, 3)
    # Row by row, and within a row member by member, as the head's logits are.
    assert torch.equal(labels.view(rows, 3), h.round().long())
    assert weights is not None
    torch.testing.assert_close(weights.view(rows, 3), h / 10)
    mixed = (h.round() != h[:, :1].round()).any(1).float().mean()
    assert mixed > 0.5 if options.get("input_repetition") else mixed > 0.9


def test_multi_hot_labels_belong_to_the_inputs_too() -> None:
    model = recorder(3, link="sigmoid")
    y = F.one_hot(torch.arange(50), 50).float()
    h, labels, _ = model._training_batch(torch.arange(50.0).unsqueeze(1), y, None, seed())
    assert torch.equal(labels.view(50, 3, 50).argmax(-1), h.round().long())


# --- the loss -----------------------------------------------------------------------------------------------


def test_with_equal_inputs_training_starts_from_the_original_network() -> None:
    """ρ = 1: the sum over members of their cross-entropies on the features of the network before widening."""
    net = SmallCNN().eval()
    original = copy.deepcopy(net)
    model = hetsngp.build("mimo", net, 4, input_repetition=1.0).eval()
    x, y = torch.randn(10, 3, 8, 8), torch.arange(10) % 4
    linear = model.head.latent.linear
    logits = F.linear(original(x), linear.weight, linear.bias).view(10, M, 4)
    expected = sum(F.cross_entropy(logits[:, m], y) for m in range(M))
    torch.testing.assert_close(model.loss(x, y), expected, rtol=1e-5, atol=1e-6)
    weight = torch.rand(10)
    each = torch.stack([F.cross_entropy(logits[:, m], y, reduction="none") for m in range(M)])
    expected = (weight * each).sum() / 10
    torch.testing.assert_close(model.loss(x, y, weight=weight), expected, rtol=1e-5, atol=1e-6)


def test_the_loss_is_that_of_the_partners_it_drew() -> None:
    """ρ = 0: the oracle goes through the rows that ``_partners`` gives for the same seed."""
    net = ResidualMLP(2, width=16, depth=1)
    original = copy.deepcopy(net)
    model = hetsngp.build("mimo", net, 3, batch_repetition=2).eval()
    assert isinstance(model, MultiInput)
    x, y = toy.blobs()
    order = model._partners(len(x), seed(4))
    h = sum_over_members(original, net.isometry, [x[order[m]] for m in range(M)])
    linear, expected = model.head.latent.linear, 0.0
    for m in range(M):
        own = slice(3 * m, 3 * m + 3)
        expected += F.cross_entropy(F.linear(h, linear.weight[own], linear.bias[own]), y[order[m]])
    torch.testing.assert_close(model.loss(x, y, generator=seed(4)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["mimo", "hetsngp_mimo"])
def test_an_example_of_weight_zero_does_not_count(method: str) -> None:
    model = toy.build(method).eval()
    x, y = toy.blobs()
    weight = torch.ones(len(y))
    weight[::3] = 0

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return model.loss(x, y, generator=seed(), weight=weight).detach()

    other_labels = torch.where(weight == 0, (y + 1) % 3, y)
    assert torch.equal(loss(x, other_labels), loss(x, y))
    assert not torch.equal(model.loss(x, other_labels, generator=seed()), loss(x, y))
    # Its input is still somebody's partner, except where everybody meets only itself.
    other_inputs = torch.where((weight == 0).unsqueeze(1), x + 5, x)
    assert not torch.equal(loss(other_inputs, y), loss(x, y))
    model.input_repetition = 1.0
    torch.testing.assert_close(loss(other_inputs, y), loss(x, y), rtol=1e-6, atol=0)


def test_a_dict_of_inputs_trains_and_predicts_as_its_tensor() -> None:
    x, y = toy.blobs()
    model = hetsngp.build("mimo", Wrapped(nn.Linear(2, 8), 8), 3)
    batch = {"image": x, "mask": torch.zeros(len(x))}
    assert torch.equal(model.loss(batch, y, generator=seed()), model.loss(x, y, generator=seed()))
    assert torch.equal(model.predict(batch).probs, model.predict(x).probs)


# --- one member ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("several", "single"), [("mimo", "deterministic"), ("hetsngp_mimo", "hetsngp")], ids=["mimo", "hetsngp"]
)
@pytest.mark.parametrize("noise", ["low_rank", "parameter_efficient", "feature"])
def test_one_member_is_the_method_itself(several: str, single: str, noise: str) -> None:
    a, b = (toy.build(method, num_members=1, noise=noise) for method in (several, single))
    x, y = toy.blobs()
    assert isinstance(a, MultiInput)
    for key, value in b.state_dict().items():
        assert torch.equal(a.state_dict()[key], value), key
    assert toy.descend(a, x, y, steps=5) == toy.descend(b, x, y, steps=5)
    for model in (a, b):
        hetsngp.fit_posterior(model, toy.loader(x, y))
    assert toy.same_bits(a.predict(x), b.predict(x))


# --- trained ------------------------------------------------------------------------------------------------


@functools.cache
def _trained(method: str) -> MultiInput:
    """M = 3 networks in one, on separable blobs; different inputs in every row."""
    model = hetsngp.build(
        method,
        ResidualMLP(2, width=32, depth=2, generator=seed(1)),
        3,
        generator=seed(2),
        random_features=64,
        rank=2,
        dataset_size=96,
        batch_repetition=2,
    )
    assert isinstance(model, MultiInput)
    x, y = toy.blobs(3, 32)
    toy.descend(model.train(), x, y, steps=250 if method == "mimo" else 120, lr=0.01)
    hetsngp.fit_posterior(model, toy.loader(x, y))
    return model.eval()


def trained(method: str) -> MultiInput:
    return copy.deepcopy(_trained(method))


def member_logits(model: MultiInput, inputs: list[Tensor]) -> Tensor:
    """(M, B, K): each member's logits in rows with these inputs."""
    with torch.no_grad(), model.inputs.distinct():
        h = model.backbone(torch.cat(inputs))
    return model.head.utility(h, posterior=False).mean.detach().view(len(h), M, -1).transpose(0, 1)


def responses(model: MultiInput) -> Tensor:
    """(M, M): how far member m's logits move when input j becomes another example, averaged over rows."""
    x, _ = toy.blobs(3, 40, seed=5)
    g = seed(6)
    inputs = [x[torch.randperm(len(x), generator=g)] for _ in range(M)]
    base = member_logits(model, inputs)
    out = torch.zeros(M, M)
    for j in range(M):
        changed = list(inputs)
        changed[j] = x[torch.randperm(len(x), generator=g)]
        out[:, j] = (member_logits(model, changed) - base).norm(dim=-1).mean(-1)
    return out


@pytest.mark.parametrize("method", ["mimo", "hetsngp_mimo"])
def test_every_member_alone_classifies(method: str) -> None:
    model = trained(method)
    x, y = toy.blobs(3, 50, seed=9)
    h = model.backbone(x)
    members = model.head.utility(h, posterior=True).mean.view(len(x), M, 3)
    for m in range(M):
        assert (members[:, m].argmax(-1) == y).float().mean() > 0.95, m
    p = model.predict(x)
    assert (p.labels == y).float().mean() > 0.97
    # And each reads its own input, whatever the others are given.
    g = seed(8)
    order = [torch.randperm(len(x), generator=g) for _ in range(M)]
    logits = member_logits(model, [x[i] for i in order])
    for m in range(M):
        assert (logits[m].argmax(-1) == y[order[m]]).float().mean() > 0.9, m


@pytest.mark.parametrize("method", ["mimo", "hetsngp_mimo"])
def test_a_member_answers_to_its_own_input(method: str) -> None:
    model = trained(method)
    found = responses(model)
    own, others = found.diagonal(), found - torch.diag(torch.full((M,), math.inf))
    assert (own > 2 * others.amax(1)).all(), found
    # What this is made to catch: heads that all see the mean of the inputs answer to all alike.
    with torch.no_grad():
        parts = model.backbone.isometry.chunk(M, 1)
        model.backbone.isometry = (sum(parts) / M).repeat(1, M)
    found = responses(model)
    assert (found.diagonal() < 1.5 * found.mean(1)).all(), found


@pytest.mark.parametrize("method", ["mimo", "hetsngp_mimo"])
def test_members_disagree_where_no_data_tie_them(method: str) -> None:
    model = trained(method)
    x, _ = toy.blobs(3, 20, seed=9)
    angle = torch.arange(60) * (2 * math.pi / 60)
    ring = 6 * torch.stack([angle.cos(), angle.sin()], 1)
    near, off = model.predict(x), model.predict(torch.cat([ring, 0.3 * torch.randn(60, 2)]))
    assert (off.member_uncertainty > 0).float().mean() > 0.9
    if method == "mimo":  # a member has no model uncertainty
        assert off.member_uncertainty.mean() > 20 * near.member_uncertainty.mean()
        assert off.member_uncertainty.max() > 0.1
        torch.testing.assert_close(off.member_uncertainty, off.model_uncertainty)
    else:  # each has model uncertainty, which leaves less to disagree about
        assert off.member_uncertainty.mean() > near.member_uncertainty.mean()
        assert off.member_uncertainty.max() > 0.005
        assert (off.function_uncertainty > 0).all()


# --- the posterior ------------------------------------------------------------------------------------------


def dense_covariance(kind: str, phi: Tensor, probs: Tensor, query: Tensor) -> Tensor:
    """Covariance of f at each query (Q, K, K): (I + Hessian)⁻¹ of all K·m weights of a member, written out.

    phi: (N, m); probs: (N, M, K), over whose members the curvature is averaged; query: (Q, m).
    """
    m, classes = phi.shape[1], probs.shape[-1]
    gram = sum(torch.outer(row, row) for row in phi)
    curvature = torch.stack(
        [torch.stack([torch.diag(p) - torch.outer(p, p) for p in row]).mean(0) for row in probs]
    )
    seen = torch.eye(classes).double()
    if kind == "kronecker":
        hessian = torch.kron(curvature.mean(0), gram)
        seen = seen - torch.ones(classes, classes).double() / classes
    elif kind == "exact":
        weights = curvature.diagonal(dim1=1, dim2=2)
        hessian = torch.block_diag(*[(phi.mT * weights[:, c]) @ phi for c in range(classes)])
    else:
        hessian = torch.kron(torch.eye(classes).double(), gram)
    covariance = torch.linalg.inv(torch.eye(classes * m).double() + hessian)
    at = torch.stack([torch.kron(seen, row.unsqueeze(0)) for row in query])
    return at @ covariance @ at.mT


@pytest.mark.parametrize("kind", ["kronecker", "exact", "shared", "momentum"])
def test_the_posterior_is_fitted_on_tiled_inputs(kind: str) -> None:
    x, y = toy.blobs(3, 8, flip=0.3)
    x = x.double()
    model = toy.build("hetsngp_mimo", posterior=kind, dataset_size=24).double()
    assert isinstance(model, MultiInput)
    toy.descend(model, x, y, steps=10)
    hetsngp.fit_posterior(model.eval(), toy.loader(x, y, 7))
    net, latent = model.backbone, model.head.latent

    def phi_of(inputs: list[Tensor]) -> Tensor:
        with torch.no_grad():  # past the stack: the inputs side by side, by hand
            return latent.features(net.blocks(F.linear(torch.cat(inputs, 1), net.isometry)))

    phi = phi_of([x] * M)
    beta = latent.beta.detach()
    probs = torch.softmax((phi @ beta).view(len(x), M, 3), -1)
    query = torch.tensor([[0.0, 0.0], [3.0, 0.0], [-4.0, 5.0]]).double()
    expected = dense_covariance(kind, phi, probs, phi_of([query] * M))
    with torch.no_grad():
        found = latent(net(query), posterior=True).covariance().view(3, M, 3, 3)
    for m in range(M):  # members share it
        torch.testing.assert_close(found[:, m], expected, rtol=1e-6, atol=1e-8)
    # Fitted on different inputs, as it trains, it would be another one.
    order = model._partners(len(x), seed(1))
    mixed = phi_of([x[i] for i in order])
    mixed_probs = torch.softmax((mixed @ beta).view(len(x), M, 3), -1)
    other = dense_covariance(kind, mixed, mixed_probs, phi_of([query] * M))
    assert (other - expected).norm() > 0.02 * expected.norm()


def test_an_update_of_a_momentum_posterior_is_on_tiled_inputs_too() -> None:
    x, y = toy.blobs(3, 8)
    model = toy.build("hetsngp_mimo", posterior="momentum", dataset_size=24).double().eval()
    toy.descend(model.train(), x.double(), y, steps=3)
    model.eval().update_posterior(x.double())
    with torch.no_grad():
        phi = model.head.latent.features(model.backbone(x.double()))
    torch.testing.assert_close(model.head.posterior.average, phi.mT @ phi / len(x), rtol=1e-6, atol=1e-8)


# --- predictions --------------------------------------------------------------------------------------------


def test_probabilities_are_the_mean_of_the_members() -> None:
    """Each member's E softmax(u) by plain Monte Carlo, averaged; four standard errors plus the target."""
    model = trained("hetsngp_mimo")
    angle = torch.arange(6) * (2 * math.pi / 6)
    x = torch.cat([2 * torch.stack([angle.cos(), angle.sin()], 1), torch.tensor([[20.0, 20.0]])])
    h = model.backbone(x)
    both, clean = model.head.utility(h, posterior=True), model.head.latent(h, posterior=True).as_utility()
    p, draws = model.predict(x), 20_000
    spread = 0.0
    for row in range(len(x)):
        for field, utility in (("probs", both), ("clean_probs", clean)):
            means, variances = [], []
            for member in range(M):
                u = utility.rows(slice(row * M + member, row * M + member + 1))
                parts = (u.mean[0], u.var[0].sqrt(), u.form.dense()[0])
                mean, std = oracles.monte_carlo_softmax(
                    *(part.detach().double().numpy() for part in parts), draws, 100 * row + member
                )
                means.append(torch.tensor(mean))
                variances.append(torch.tensor(std).square() / draws)
            expected, error = torch.stack(means).mean(0), torch.stack(variances).sum(0).sqrt() / M
            found = getattr(p, field)[row].double()
            assert ((found - expected).abs() < 4 * error + TARGET_ERROR).all(), (field, row)
            spread = max(spread, float((torch.stack(means) - expected).abs().max()))
    assert spread > 0.05  # a single member would be told from their mean
    assert torch.equal(model.predict_probs(x), p.probs)


def test_without_noise_and_posterior_the_mixture_is_exact() -> None:
    model = trained("mimo")
    x, _ = toy.blobs(3, 5, seed=11)
    x = torch.cat([x, 4 * torch.randn(10, 2)])
    with torch.no_grad():
        linear = model.head.latent.linear
        logits = F.linear(model.backbone(x), linear.weight, linear.bias).view(-1, M, 3).double()
    members = torch.softmax(logits, -1)
    expected = members.mean(1)
    p = model.predict(x)
    torch.testing.assert_close(p.probs.double(), expected, rtol=1e-5, atol=1e-7)
    total = torch.special.entr(expected).sum(-1)
    data = torch.special.entr(members).sum(-1).mean(-1)
    torch.testing.assert_close(p.total_uncertainty.double(), total, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.data_uncertainty.double(), data, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.member_uncertainty.double(), total - data, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model(x).exp().double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["mimo", "hetsngp_mimo"])
def test_the_three_kinds_of_doubt_add_up(method: str) -> None:
    p = trained(method).predict(5 * torch.randn(40, 2))
    for name in ("data_uncertainty", "function_uncertainty", "member_uncertainty"):
        assert (getattr(p, name) >= 0).all(), name
    assert torch.equal(p.data_uncertainty + p.model_uncertainty, p.total_uncertainty)
    torch.testing.assert_close(
        p.data_uncertainty + p.function_uncertainty + p.member_uncertainty, p.total_uncertainty
    )
    torch.testing.assert_close(p.total_uncertainty, torch.special.entr(p.probs).sum(-1), rtol=1e-5, atol=1e-6)


def _backbone(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "residual mlp":
        return ResidualMLP(2, width=16, depth=1), torch.randn(12, 2)
    return SmallCNN(), torch.randn(12, 3, 8, 8)


@pytest.mark.parametrize("kind", ["residual mlp", "cnn"])
@pytest.mark.parametrize("method", ["mimo", "hetsngp_mimo"])
def test_copies_and_files_predict_the_same(method: str, kind: str, tmp_path: Path) -> None:
    net, x = _backbone(kind)
    y = torch.arange(12) % 3
    model = hetsngp.build(method, net, 3, random_features=32, rank=2, dataset_size=12, num_members=2)
    toy.descend(model.train(), x, y, steps=5)
    hetsngp.fit_posterior(model, toy.loader(x, y))
    expected = model.eval().predict(x)
    hetsngp.save(model, tmp_path / "model")
    fresh = None if kind == "residual mlp" else SmallCNN()
    others = {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "file": hetsngp.load(tmp_path / "model", backbone=fresh),
    }
    for name, other in others.items():
        assert isinstance(other, MultiInput), name
        assert toy.same_bits(other.predict(x), expected), name
        assert other.inputs is not model.inputs, name
        loss = model.eval().loss(x, y, generator=seed(3))
        assert torch.equal(other.eval().loss(x, y, generator=seed(3)), loss), name
        with torch.no_grad():
            first_weight(other.backbone).mul_(2)
    assert toy.same_bits(model.predict(x), expected)  # nobody shares the widened weight
    double = copy.deepcopy(model).double().predict(x.double())
    assert double.probs.dtype == torch.float64
    # The same points in another precision; a row may stop at another number of them.
    torch.testing.assert_close(
        double.probs, expected.probs.double(), rtol=0, atol=1e-5 if method == "mimo" else TARGET_ERROR
    )


class Failing(nn.Module):
    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(2, 6), False

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        if self.fails:
            raise FloatingPointError("out of order")
        return h


def test_after_an_error_in_the_backbone_inputs_are_tiled_again() -> None:
    net = Failing()
    model = hetsngp.build("mimo", net, 3)
    x, y = toy.blobs()
    expected = model.predict(x).probs
    net.fails = True
    with pytest.raises(FloatingPointError):
        model.loss(x, y)
    net.fails = False
    assert input_stack(net) is not None
    assert torch.equal(model.predict(x).probs, expected)


class RemembersTheBatch(nn.Module):
    """As Hugging Face's and torchvision's ViTs: the number of rows is read before the first layer."""

    num_features = 8

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.patches = nn.Conv2d(3, 8, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        tokens = self.patches(x).flatten(2).mT
        return torch.cat([self.token.expand(rows, -1, -1), tokens], 1).mean(1)


class FlattensByRows(nn.Module):
    num_features = 8

    def __init__(self, columns: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body, self.shape = nn.Linear(columns, 8), shape

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        return self.body(x.reshape(rows, *self.shape)).reshape(rows, -1, 8).mean(1)


@pytest.mark.parametrize(
    "original",
    [RemembersTheBatch(), FlattensByRows(192, (-1,)), FlattensByRows(8, (24, -1))],
    ids=["convolution", "flattened", "sequence"],
)
def test_a_backbone_that_reads_the_number_of_rows_first_is_given_them_side_by_side(original: Any) -> None:
    model = hetsngp.build("mimo", copy.deepcopy(original), num_classes=3)
    x, y = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    if getattr(original, "shape", ()) == (24, -1):
        x = x.reshape(6, 24, 8)
    torch.testing.assert_close(model.backbone(x), original(x))
    layer = next(m for m in model.backbone.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    nn.init.normal_(layer.weight)  # equal parts would hide an exchange of inputs
    order = model._partners(6, seed(4))
    loss = model.loss(x, y, generator=seed(4))
    # The map is affine: each input goes by its own part of the weight, through the original network.
    constant = original(torch.zeros_like(x))
    h = constant
    for rows, part in zip(order, layer.weight.detach().chunk(3, 1), strict=True):
        alone = copy.deepcopy(original)
        next(m for m in alone.modules() if isinstance(m, nn.Linear | nn.Conv2d)).weight = nn.Parameter(part)
        h = h + alone(x[rows]) - constant
    logits = model.head.latent(h, posterior=False).mean
    expected = 3 * nn.functional.cross_entropy(logits, y[order.T.flatten()])
    torch.testing.assert_close(loss, expected)


def test_several_inputs_are_bounded_as_one_where_they_are_equal() -> None:
    """Predictions are made on equal inputs: to them the widened layer has the norm it was allowed."""
    net = Wrapped(nn.Linear(4, 6), 6)
    model = hetsngp.build("hetsngp_mimo", net, num_classes=3, spectral_bound=0.5, random_features=32)
    layer = net.body
    with torch.no_grad():
        layer.weight.mul_(50)
    for _ in range(20):
        model.loss(torch.randn(8, 4), torch.randint(3, (8,))).backward()
    tiled = layer.eval().bounded_weight().detach().unflatten(1, (3, 4)).sum(1)
    assert float(torch.linalg.matrix_norm(tiled, 2)) == pytest.approx(0.5, rel=0.02)


def test_a_frozen_first_layer_is_said_to_see_only_a_mean() -> None:
    net = Wrapped(nn.Linear(4, 6), 6)
    net.body.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"frozen.*requires_grad_\(True\)"):
        hetsngp.build("mimo", net, num_classes=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.TransformerEncoderLayer(8, 2, 8), "TransformerEncoderLayer"),
        (lambda: type("Standardised", (nn.Conv2d,), {})(3, 4, 3), "Standardised"),
        (lambda: nn.LazyLinear(4), "lazy layer"),
    ],
    ids=["attention", "subclass", "lazy"],
)
def test_layers_that_cannot_be_widened_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        widen_inputs(nn.Sequential(make()), 2)


def test_a_dict_with_another_number_of_labels_is_refused() -> None:
    class Dict(nn.Module):
        num_features = 6

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 6)

        def forward(self, x: Any) -> Tensor:
            assert x["flag"] is None
            return self.body(x["values"])

    model = hetsngp.build("mimo", Dict(), num_classes=3)
    x = {"flag": None, "values": torch.randn(10, 4)}
    assert torch.isfinite(model.loss(x, torch.randint(3, (10,))))
    with pytest.raises(ValueError, match=r"\(10,\) was expected"):
        model.loss(x, torch.randint(3, (8,)))
    with pytest.raises(TypeError, match="tensor"):
        model.loss([1, 2], torch.randint(3, (2,)))
