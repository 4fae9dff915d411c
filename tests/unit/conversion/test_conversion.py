"""convert: the layer that makes the logits is found by what it does, and nothing else is changed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from tests.contract.toy import same_bits
from torch import Tensor, nn

import hetsngp
from hetsngp.conversion.conversion import convert
from hetsngp.conversion.tracing import ClassifierNotFoundError, find_last_layer
from hetsngp.models.methods import METHODS
from hetsngp.nn.extractor import Extractor
from hetsngp.nn.spectral import BoundedConv2d, BoundedLinear

BOUNDED = (BoundedLinear, BoundedConv2d)
IMAGES = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
LABELS = torch.arange(8) % 3


class CNN(nn.Module):
    """A user's network, with statistics of its own."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1, stride=2)
        self.norm2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, classes)

    def features(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


def cnn(classes: int = 3) -> CNN:
    net = CNN(classes)
    for norm in (net.norm1, net.norm2):
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return net


def mlp(classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, classes))


class Body(nn.Module):
    """x (B, 4) → h (B, 8); the networks below put a last layer on it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.fc = nn.Linear(8, 3)


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in module.state_dict().items()}


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(t, b[name]) for name, t in a.items())


def seen(net: nn.Module, name: str, x: Any) -> tuple[Tensor, Tensor]:
    """What entered the layer ``name`` and what left it, in a plain call of the network in eval mode."""
    calls: list[tuple[Tensor, Tensor]] = []
    net = copy.deepcopy(net).eval()
    net.get_submodule(name).register_forward_hook(lambda _, args, out: calls.append((args[0], out)))
    with torch.no_grad():
        net(x)
    return calls[-1]


def convert_tiny(net: Any, method: str = "hetsngp", x: Any = None, **options: Any) -> hetsngp.Classifier:
    return convert(net, method, x, **{**toy.TINY, **options})


# --- finding the layer --------------------------------------------------------------------------------------


class LogSoftmax(Body):
    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.fc(self.body(x)), 1)


class Softmax(Body):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.fc(self.body(x)), 1)


class Sigmoid(Body):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.fc(self.body(x)))


class Pair(Body):
    """(logits, extra)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.fc(h), h


class Dict(Body):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.body(x)
        return {"hidden": h, "logits": self.fc(h)}


class Object(Body):
    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=None, logits=self.fc(self.body(x)))


class Auxiliary(Body):
    """A second head that is returned too, and called last."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.fc(h), self.other(h)


class Misleading(nn.Module):
    """The layers called ``fc``, ``head`` and ``classifier`` are not the last."""

    def __init__(self) -> None:
        super().__init__()
        self.foo = nn.Linear(3, 3)
        self.classifier = nn.Linear(4, 3)
        self.fc = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.foo(torch.tanh(self.head(torch.tanh(self.fc(torch.tanh(self.classifier(x)))))))


class Shared(Body):
    """The last layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.also = nn.ModuleList([self.fc])

    def forward(self, x: Tensor) -> Tensor:
        return self.also[0](self.body(x))


class Prior(Body):
    """Class frequencies are added: the layer still makes the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("log_prior", torch.tensor([0.2, -0.3, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.fc(self.body(x)) + self.log_prior, 1)


class InPlace(Body):
    def forward(self, x: Tensor) -> Tensor:
        logits = self.fc(self.body(x))
        logits -= 1.0
        return logits


class Convolution(nn.Module):
    """A 1×1 convolution on what was pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.conv(x)).mean((2, 3), keepdim=True)).flatten(1)


class ConvolutionSoftmax(Convolution):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x)).mean((2, 3), keepdim=True)
        return F.log_softmax(self.last(h).reshape(len(x), 3), 1)


class Signal(nn.Module):
    """A convolution over time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv1d(4, 8, 1), nn.Conv1d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x[:, :, None]))
        return F.log_softmax(self.last(h).reshape(len(x), 3), 1)


FOUND: dict[str, tuple[Callable[[], nn.Module], str, Tensor]] = {
    "log_softmax": (LogSoftmax, "fc", ROWS),
    "softmax": (Softmax, "fc", ROWS),
    "sigmoid": (Sigmoid, "fc", ROWS),
    "tuple": (Pair, "fc", ROWS),
    "dict": (Dict, "fc", ROWS),
    "object": (Object, "fc", ROWS),
    "second head": (Auxiliary, "fc", ROWS),
    "misleading names": (Misleading, "foo", ROWS),
    "two names": (Shared, "fc", ROWS),
    "prior": (Prior, "fc", ROWS),
    "in place": (InPlace, "fc", ROWS),
    "one layer": (lambda: nn.Linear(4, 3), "", ROWS),
    "no bias": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)), "2", ROWS),
    "1×1 convolution": (Convolution, "last", IMAGES),
    "1×1 convolution, softmax": (ConvolutionSoftmax, "last", IMAGES),
    "convolution over time": (Signal, "last", ROWS),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_layer_is_found_and_its_input_becomes_the_features(name: str) -> None:
    make, layer, x = FOUND[name]
    net = make()
    entered, logits = (t.flatten(1) for t in seen(net, layer, x))
    model = convert(net, "deterministic", x).eval()
    assert model.conversion.classifier == layer
    assert model.conversion.num_features == model.num_features == entered.shape[1]
    assert model.conversion.num_outputs == model.num_classes == 3
    assert torch.equal(model.backbone(x), entered)
    torch.testing.assert_close(model(x), F.log_softmax(logits, 1))  # the layer's weights are the head's


@pytest.mark.parametrize("name", FOUND)
def test_one_row_is_example_enough(name: str) -> None:
    make, layer, x = FOUND[name]
    assert convert(make(), "deterministic", x[:1]).conversion.classifier == layer


def test_a_convolution_before_the_pooling_gives_pooled_features() -> None:
    """Mean of W·h = W·mean of h."""

    class Map(Convolution):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.conv(x))).mean((2, 3))

    net = Map()
    model = convert(net, "deterministic", IMAGES).eval()
    assert torch.equal(model.backbone(IMAGES), seen(net, "last", IMAGES)[0].mean((2, 3)))
    torch.testing.assert_close(model(IMAGES), F.log_softmax(net(IMAGES), 1))


class Twice(Body):
    """The last layer is called on two views of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(nn.Linear(4, 8), nn.Tanh())


class FirstOfTwo(Twice):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(self.body(x)), self.fc(self.other(x))


class MeanOfTwo(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(self.body(x)) + self.fc(self.other(x))) / 2


@pytest.mark.parametrize("make", [FirstOfTwo, MeanOfTwo])
def test_of_a_layer_that_is_called_twice_the_features_make_the_logits_or_it_is_refused(
    make: type[Twice],
) -> None:
    net = make()
    output = net(ROWS)
    logits = output if isinstance(output, Tensor) else output[0]
    try:
        model = convert(net, "deterministic", ROWS).eval()
    except ClassifierNotFoundError:
        return
    torch.testing.assert_close(net.fc(model.backbone(ROWS)), logits)


class SumOfHeads(Body):
    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x)) + self.right(x)


class Rectified(Body):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(self.body(x)))


class Scaled(Body):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.fc(self.body(x))


@pytest.mark.parametrize(
    ("make", "reason", "listed"),
    [
        (SumOfHeads, "each of these layers adds", [r"'fc' (8,) → (3,)", r"'right' (4,) → (3,)"]),
        (Rectified, "no single linear layer", [r"'fc' (8,) → (3,)", r"'body.0' (4,) → (8,)"]),
        (Scaled, "no single linear layer", [r"'fc' (8,) → (3,)", r"'body.0' (4,) → (8,)"]),
    ],
)
def test_where_no_layer_or_several_make_the_logits_they_are_listed(
    make: Callable[[], Body], reason: str, listed: list[str]
) -> None:
    net = make()
    with pytest.raises(ClassifierNotFoundError) as caught:
        convert(net, example_input=ROWS)
    message = str(caught.value)
    assert reason in message
    assert 'classifier="..."' in message
    assert all(each in message for each in listed)
    assert isinstance(caught.value, ValueError)
    for named in ("fc", net.fc):
        model = convert_tiny(net, "sngp", ROWS, classifier=named)
        assert model.conversion.classifier == "fc"
        assert torch.equal(model.eval().backbone(ROWS), net.body(ROWS))
        assert model(ROWS).shape == (8, 3)


def test_a_network_without_linear_layers_has_no_such_layer() -> None:
    with pytest.raises(ClassifierNotFoundError, match=r"the last first: none.*hetsngp\.build"):
        convert(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()), example_input=ROWS)


def test_a_layer_on_single_tokens_whose_output_is_no_mean_is_refused() -> None:
    class Largest(Body):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.stack([self.body(x), self.body(-x)], 1)).amax(1)

    for named in (None, "fc"):
        with pytest.raises(ClassifierNotFoundError, match=r"'fc'.*\(8, 2, 8\), not on one vector"):
            convert(Largest(), example_input=ROWS, classifier=named)


def test_a_named_layer_may_be_any_with_a_vector_in() -> None:
    net = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    )
    model = convert_tiny(net, "sngp", ROWS, classifier="2")
    assert torch.equal(model.eval().backbone(ROWS), net[:2](ROWS))
    assert (model.num_features, model.num_classes) == (8, 3)
    assert not any(name.startswith("2.") for name in model.backbone.network.state_dict())


def test_wrong_names_are_answered_with_the_right_ones() -> None:
    net = LogSoftmax()
    with pytest.raises(ValueError, match=r"unknown classifier 'fcc'.*'body\.0', 'fc'; did you mean 'fc'\?"):
        convert(net, example_input=ROWS, classifier="fcc")
    with pytest.raises(ValueError, match=r"classifier is no layer of this model"):
        convert(net, example_input=ROWS, classifier=nn.Linear(8, 3))
    unused = Body()
    unused.add_module("spare", nn.Linear(8, 3))
    unused.forward = lambda x: unused.fc(unused.body(x))  # type: ignore[method-assign]
    with pytest.raises(ClassifierNotFoundError, match=r"'spare'.*was not called.*'fc' \(8,\) → \(3,\)"):
        convert(unused, example_input=ROWS, classifier="spare", copy=False)


def test_a_named_layer_needs_no_example() -> None:
    for net, named, x in ((cnn(), "fc", IMAGES), (mlp(), "4", ROWS)):
        model = convert_tiny(net, classifier=named, generator=seeded()).eval()
        assert torch.equal(model.backbone(x), seen(net, named, x)[0])
        assert torch.equal(model(x), convert_tiny(net, x=x, generator=seeded()).eval()(x))
    with pytest.raises(ValueError, match=r"'last' is a Conv2d.*example_input"):
        convert(Convolution(), classifier="last")


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_without_example_and_name_both_are_asked_for() -> None:
    with pytest.raises(ValueError, match=r'what CNN takes.*example_input=.*classifier="\.\.\."'):
        convert(cnn())


def test_an_example_of_the_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"CNN did not take example_input: RuntimeError.*a tensor, a dict"):
        convert(cnn(), example_input=ROWS)
    with pytest.raises(ValueError, match=r"did not take example_input: TypeError"):
        convert(cnn(), example_input={"pictures": IMAGES})
    with pytest.raises(ValueError, match="NaN"):
        convert(cnn(), example_input=torch.full_like(IMAGES, float("nan")))


def test_what_is_no_network_is_refused() -> None:
    model = convert_tiny(cnn(), x=IMAGES)
    for converted in (model, hetsngp.Ensemble([model])):
        with pytest.raises(TypeError, match=r"has a head of ours already.*fit_head"):
            convert(converted, example_input=IMAGES)  # type: ignore[arg-type]
    for thing in (CNN, None, "resnet18", CNN().forward):
        with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
            convert(thing, example_input=IMAGES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown method 'sngpp'.*did you mean 'sngp'"):
        convert(cnn(), "sngpp", IMAGES)
    with pytest.raises(ValueError, match=r"unknown option 'ranks'.*did you mean 'rank'"):
        convert(cnn(), "sngp", IMAGES, ranks=3)


def test_one_output_needs_a_number_of_classes() -> None:
    with pytest.raises(ValueError, match=r"CNN has 1 output.*num_classes=2"):
        convert(cnn(1), example_input=IMAGES)
    model = convert_tiny(cnn(1), x=IMAGES, num_classes=2)
    assert model(IMAGES).shape == (8, 2)
    with pytest.raises(ValueError, match=r"num_classes must be a whole number of at least 2"):
        convert(cnn(), example_input=IMAGES, num_classes=1)


def test_the_precision_of_the_network_is_taken() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        net = cnn().to(dtype)
        model = convert_tiny(net, x=IMAGES).eval()  # the example is as it comes
        assert model.conversion.classifier == "fc"
        assert torch.equal(model.backbone(IMAGES.to(dtype)), net.eval().features(IMAGES.to(dtype)))
        assert torch.isfinite(model(IMAGES.to(dtype))).all()


@pytest.mark.parametrize("make", [Misleading, Auxiliary])
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_small_and_large_logits_are_told_from_other_outputs_of_their_width(
    make: Callable[[], nn.Module], scale: float
) -> None:
    net, last = make(), "foo" if make is Misleading else "fc"
    with torch.no_grad():
        net.get_submodule(last).weight *= scale
    assert find_last_layer(net, ROWS).name == last


# --- nothing else changes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_network_is_left_as_it_was(training: bool, freeze: bool) -> None:
    net = cnn().train(training)
    net.norm1.eval()  # a module with a mode of its own
    net.conv2.weight.requires_grad_(False)
    before, printed = snapshot(net), repr(net)
    modes = [module.training for module in net.modules()]
    model = convert_tiny(net, x=IMAGES, freeze=freeze, dataset_size=8)
    model.train().loss(IMAGES, LABELS).backward()
    assert same_tensors(net.state_dict(), before)
    assert repr(net) == printed
    assert [module.training for module in net.modules()] == modes
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["conv2.weight"]
    assert all(p.grad is None for p in net.parameters())
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    for root in (net, model):
        assert not any(getattr(module, kind) for module in root.modules() for kind in hooks)


@pytest.mark.parametrize("copied", [True, False])
def test_every_module_keeps_its_mode(copied: bool) -> None:
    net = cnn()
    net.norm1.eval()
    model = convert_tiny(net, x=IMAGES, copy=copied)
    network = model.backbone.network
    assert {name for name, module in network.named_modules() if not module.training} == {"norm1"}
    assert model.training


def test_what_was_frozen_before_stays_frozen() -> None:
    net = cnn()
    net.conv1.requires_grad_(False)
    model = convert_tiny(net, x=IMAGES)
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {
        "backbone.network.conv1.weight",
        "backbone.network.conv1.bias",
    }


def test_without_copy_the_network_is_taken_over() -> None:
    net = cnn()
    before = snapshot(net)
    model = convert_tiny(net, x=IMAGES, copy=False)
    assert model.backbone.network is net
    kept = {name: t for name, t in before.items() if not name.startswith("fc.")}
    assert all(torch.equal(net.state_dict()[name], t) for name, t in kept.items())
    assert not isinstance(net.fc, nn.Linear)
    assert convert_tiny(cnn(), x=IMAGES).backbone.network is not net


class Single(CNN):
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("there is only one of me")


def test_a_network_that_cannot_be_copied_can_be_taken_over() -> None:
    net = Single()
    with pytest.raises(ValueError, match=r"Single cannot be copied.*only one of me.*copy=False"):
        convert(net, example_input=IMAGES)
    assert isinstance(net.fc, nn.Linear)
    model = convert_tiny(net, x=IMAGES, copy=False)
    assert model.backbone.network is net


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda net: torch.compile(net, backend="eager"),
        lambda net: torch.compile(nn.DataParallel(net), backend="eager"),
        lambda net: nn.DataParallel(torch.compile(net, backend="eager")),
    ],
    ids=["parallel", "compiled", "compiled parallel", "parallel compiled"],
)
def test_wrapped_networks_are_unwrapped(wrap: Callable[[nn.Module], Any]) -> None:
    net = cnn()
    for named in (None, "fc", net.fc):
        model = convert_tiny(wrap(net), x=IMAGES, classifier=named).eval()
        assert type(model.backbone.network) is CNN
        assert model.conversion.classifier == "fc"
        assert torch.equal(model.backbone(IMAGES), net.eval().features(IMAGES))


def test_a_module_of_ones_own_called_module_is_no_wrapper() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.fc = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.tanh(self.module(x)))

    assert convert(Outer(), "deterministic", ROWS).conversion.classifier == "fc"


@pytest.mark.parametrize("make", [cnn, LogSoftmax], ids=["output", "input"])
def test_copies_and_pickles_predict_the_same(make: Callable[[], nn.Module]) -> None:
    x = IMAGES if make is cnn else ROWS
    model = convert_tiny(make(), x=x, dataset_size=8)
    assert model.backbone.reads == ("output" if make is cnn else "input")
    model.train().loss(x, LABELS).backward()
    hetsngp.fit_posterior(model, [(x, LABELS)])
    expected = model.predict(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_bits(twin.predict(x), expected)
        assert str(twin.conversion) == str(model.conversion)


def test_a_network_that_ends_with_a_softmax_is_loaded(tmp_path: Path) -> None:
    model = convert_tiny(LogSoftmax(), x=ROWS, dataset_size=8)
    hetsngp.fit_posterior(model, [(ROWS, LABELS)])
    hetsngp.save(model, tmp_path)
    twin = hetsngp.load(tmp_path, backbone=LogSoftmax())
    assert twin.backbone.reads == "input"
    assert same_bits(twin.predict(ROWS), model.predict(ROWS))


# --- heads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_converts_trains_and_is_saved(method: str, tmp_path: Path) -> None:
    net = cnn()
    model = convert_tiny(net, method, IMAGES, dataset_size=8, generator=seeded())
    assert model.config["method"] == model.conversion.method == method
    torch.testing.assert_close(model.eval().backbone(IMAGES), net.eval().features(IMAGES))
    before = snapshot(model)
    losses = toy.descend(model.train(), IMAGES, LABELS, 1)
    assert torch.isfinite(torch.tensor(losses)).all()
    after = model.state_dict()
    trained = {name for name, _ in model.named_parameters()}
    assert {name for name in trained if not torch.equal(after[name], before[name])} >= {
        name for name in trained if name.startswith("backbone.") and "weight" in name
    }
    assert any(name.startswith("head.") and not torch.equal(after[name], before[name]) for name in trained)
    hetsngp.fit_posterior(model, [(IMAGES, LABELS)])
    prediction = model.predict(IMAGES)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(8))
    hetsngp.save(model, tmp_path)
    assert same_bits(hetsngp.load(tmp_path, backbone=CNN()).predict(IMAGES), prediction)


@pytest.mark.parametrize("method", ["deterministic", "mimo"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_head_begins_with_the_weights_it_replaces(method: str, bias: bool) -> None:
    net = cnn()
    net.fc = nn.Linear(8, 3, bias=bias)
    model = convert(net, method, IMAGES).eval()
    torch.testing.assert_close(model(IMAGES), F.log_softmax(net.eval()(IMAGES), 1))
    assert model.conversion.kept_readout
    assert "its weights kept" in str(model.conversion)


def test_other_classes_have_weights_of_their_own() -> None:
    net = cnn()
    model = convert(net, "deterministic", IMAGES, num_classes=5).eval()
    assert model(IMAGES).shape == (8, 5)
    assert not model.conversion.kept_readout
    assert "kept" not in str(model.conversion)
    weight = model.head.latent.linear.weight
    assert not torch.equal(weight[:3], net.fc.weight)


def test_a_gp_keeps_no_readout() -> None:
    for method in ("sngp", "hetsngp"):
        assert not convert_tiny(cnn(), method, IMAGES).conversion.kept_readout


def test_a_layer_that_uses_its_weight_in_another_way_does_not_hand_it_over() -> None:
    """Only the uncertainty changes, or the head is a new one."""

    class Cosine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 10 * F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1))

    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Cosine(8, 3))
    model = convert(net, "deterministic", ROWS).eval()
    assert torch.equal(model.backbone(ROWS), net[:2](ROWS))
    same = torch.allclose(model(ROWS), F.log_softmax(net(ROWS), 1), atol=1e-5)
    assert same or not model.conversion.kept_readout


def test_the_generator_decides_the_initial_values() -> None:
    net = cnn()
    one, two, other = (
        convert_tiny(net, x=IMAGES, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert same_tensors(one.state_dict(), two.state_dict())
    assert not same_tensors(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_global_generator_is_left_alone(method: str, freeze: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several inputs at once through a frozen layer
        convert_tiny(net, method, ROWS, freeze=freeze, generator=seeded())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_was_done_is_told() -> None:
    told = str(convert(cnn(), "hetsngp", IMAGES, freeze=True).conversion)
    assert told == "CNN: layer 'fc' (8 → 3) replaced by a hetsngp head for 3 classes; everything else frozen"
    told = str(convert(cnn(), "deterministic", IMAGES).conversion)
    assert told.endswith("a deterministic head for 3 classes, its weights kept; no spectral bound")
    told = str(convert(cnn(), "sngp", IMAGES, num_classes=4).conversion)
    assert told.endswith("a sngp head for 4 classes; 2 layers bounded spectrally at 6")


# --- freezing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [cnn, LogSoftmax], ids=["output", "input"])
def test_of_a_frozen_network_only_the_head_trains(make: Callable[[], nn.Module]) -> None:
    x = IMAGES if make is cnn else ROWS
    model = convert_tiny(make(), x=x, freeze=True, dataset_size=8)
    network = {f"backbone.{name}" for name, _ in model.backbone.named_parameters()}
    grouped = {id(p) for group in model.parameter_groups(1e-4) for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in grouped}
    assert names == {name for name, _ in model.named_parameters()} - network
    before = snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)  # all of them, as people do
    model.train()
    assert not any(module.training for module in model.backbone.network.modules())
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(x, LABELS, generator=seeded()).backward()
        optimizer.step()
    F.cross_entropy(model(x), LABELS).backward()
    assert all(p.grad is None for p in model.backbone.parameters())
    after = model.state_dict()
    moved = {name for name, t in before.items() if not torch.equal(after[name], t)}
    assert moved
    assert all(name.startswith("head.") for name in moved)


@pytest.mark.parametrize("options", [{}, {"spectral_bound": 0.1}])
def test_a_frozen_network_is_not_bounded(options: dict[str, Any]) -> None:
    model = convert_tiny(cnn(), x=IMAGES, freeze=True, **options)
    assert not any(isinstance(module, BOUNDED) for module in model.modules())
    assert not any("spectral" in name for name in model.state_dict())
    assert model.conversion.bounds == ()


def test_what_is_not_frozen_moves_its_statistics() -> None:
    """The counterpart: the tests above could not fail if nothing moved."""
    model = convert_tiny(cnn(), x=IMAGES)
    before = model.backbone.network.norm1.running_mean.clone()
    model.train()(IMAGES)
    assert not torch.equal(model.backbone.network.norm1.running_mean, before)


# --- the spectral bound -------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A transformer, by what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.mix = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.mix(self.layer(self.embed(x)[:, None]))[:, 0])


def bounded(model: hetsngp.Classifier) -> dict[str, float]:
    """The bounds of the network's layers."""
    layers = model.backbone.network.named_modules()
    return {name: float(m.spectral_bound) for name, m in layers if isinstance(m, BOUNDED)}


@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_convolutional_networks_and_mlps_are_bounded_and_transformers_are_not(method: str) -> None:
    assert bounded(convert_tiny(cnn(), method, IMAGES)) == {"conv1": 6.0, "conv2": 6.0}
    small = mlp()
    with torch.no_grad():
        small[0].weight *= 0.1
        small[2].weight *= 0.1
    assert bounded(convert_tiny(small, method, ROWS)) == {"0": pytest.approx(0.95), "2": pytest.approx(0.95)}
    model = convert_tiny(Tokens(), method, ROWS)
    assert bounded(model) == {}
    assert "no spectral bound" in str(model.conversion)


def test_a_number_bounds_any_network_and_infinity_none() -> None:
    assert bounded(convert_tiny(Tokens(), x=ROWS, spectral_bound=20.0)) == {"embed": 20.0, "mix": 20.0}
    assert bounded(convert_tiny(cnn(), x=IMAGES, spectral_bound=20.0)) == {"conv1": 20.0, "conv2": 20.0}
    for net, x in ((cnn(), IMAGES), (mlp(), ROWS), (Tokens(), ROWS)):
        model = convert_tiny(net, x=x, spectral_bound=float("inf"))
        assert bounded(model) == {}
        assert "no spectral bound" in str(model.conversion)


def test_methods_without_a_gp_are_not_bounded() -> None:
    for method in set(METHODS) - {"sngp", "hetsngp", "hetsngp_mimo"}:
        assert bounded(convert_tiny(cnn(), method, IMAGES)) == {}


def large_mlp(scale: float = 50.0) -> nn.Sequential:
    """The first layer is far above the bound, the second below it."""
    net = mlp()
    with torch.no_grad():
        net[0].weight *= scale
        net[2].weight *= 0.2
    return net


def norm(weight: Tensor) -> float:
    return float(torch.linalg.svdvals(weight.detach().double())[0])


def test_a_bound_is_raised_for_a_layer_that_is_larger() -> None:
    net = large_mlp()
    sigma = norm(net[0].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = convert_tiny(net, x=ROWS)
    bounds = bounded(model)
    assert bounds["0"] == pytest.approx(1.05 * sigma, rel=0.02)
    assert bounds["0"] > sigma  # or the features would change
    assert bounds["2"] == pytest.approx(0.95)
    found = model.conversion
    assert found.asked_bound == 0.95
    assert [layer.name.removeprefix("network.") for layer in found.bounds] == ["0", "2"]
    (raised,) = found.raised
    assert raised.name.endswith("0")
    assert raised.bound == pytest.approx(bounds["0"])
    assert raised.sigma == pytest.approx(sigma, rel=0.02)
    assert "2 layers bounded spectrally at 0.95, raised for 1 whose own norm is larger" in str(found)
    assert f"{raised.bound:.3g}" in str(found)


@pytest.mark.parametrize("example", [ROWS, None], ids=["example", "no example"])
def test_no_bound_changes_the_features(example: Tensor | None) -> None:
    net = large_mlp()
    expected = net[:4](ROWS)
    model = convert_tiny(net, x=example, classifier="4")
    assert torch.equal(model.eval().backbone(ROWS), expected)
    model.train()
    for _ in range(3):  # each measures σ again
        torch.testing.assert_close(model.backbone(ROWS), expected)
    assert torch.equal(model.eval().backbone(ROWS), expected)
    assert bounded(model)["0"] == pytest.approx(1.05 * norm(net[0].weight), rel=0.02)


def test_no_bound_changes_the_features_of_larger_images() -> None:
    """A convolution's norm grows with the size of its input; the example may be small."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    with torch.no_grad():
        net[0].weight.abs_()
        net[0].weight *= 2
    model = convert_tiny(net, x=IMAGES[:, :, :2, :2])
    torch.testing.assert_close(model.train().backbone(IMAGES), net[:3](IMAGES))


def test_without_example_the_first_training_pass_raises_the_bound() -> None:
    net = large_mlp()
    model = convert_tiny(net, classifier="4")
    assert bounded(model) == {"0": pytest.approx(0.95), "2": pytest.approx(0.95)}
    model.train()(ROWS)
    assert bounded(model)["0"] == pytest.approx(1.05 * norm(net[0].weight), rel=0.02)
    assert bounded(model)["2"] == pytest.approx(0.95)


def test_bounds_that_were_not_measured_are_told_of_too() -> None:
    model = convert_tiny(mlp(), classifier="4")
    assert set(bounded(model)) == {"0", "2"}
    assert "no spectral bound" not in str(model.conversion)


def test_a_bound_that_was_asked_for_and_raised_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"spectral_bound=0\.5 was raised: .*raised for 1 ") as caught:
        convert_tiny(large_mlp(), x=ROWS, spectral_bound=0.5)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_tiny(large_mlp(), x=ROWS, spectral_bound=1e4)


@pytest.mark.parametrize("example", [ROWS, None], ids=["example", "no example"])
def test_training_cannot_grow_the_weights_over_the_bound(example: Tensor | None) -> None:
    net = large_mlp()
    model = convert_tiny(net, x=example, classifier="4")
    layers = [model.backbone.network[i] for i in (0, 2)]
    optimizer = torch.optim.SGD([layer.weight for layer in layers], lr=0.02)
    model.train().backbone(ROWS)
    raised = bounded(model)
    for _ in range(60):
        optimizer.zero_grad()
        (-sum((layer.weight**2).sum() for layer in layers)).backward()  # growth, whatever the loss
        optimizer.step()
        model.backbone(ROWS)
    assert bounded(model) == raised  # raised once, not after the weights
    model.eval()
    for layer in layers:
        limit = float(layer.spectral_bound)
        assert norm(layer.weight) > 2 * limit
        assert norm(layer.bounded_weight()) <= limit * 1.01


# --- optional packages --------------------------------------------------------------------------------------

ALONE = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import torch
from torch import nn
import hetsngp
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                    nn.Linear(8, 3))
x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
model = hetsngp.convert(net, example_input=x, random_features=32)
hetsngp.fitting.loop.train(model, [(x, y)], epochs=1)
hetsngp.fit_posterior(model, [(x, y)])
assert model.predict(x).probs.shape == (6, 3)
print(sorted(name for name in ("timm", "torchvision", "transformers") if sys.modules.get(name) is not None))
"""


@pytest.mark.parametrize("blocked", [("timm", "torchvision", "transformers"), ()], ids=["missing", "there"])
def test_a_network_of_ones_own_needs_and_imports_no_library_of_networks(blocked: tuple[str, ...]) -> None:
    code = ALONE.format(blocked=blocked)
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_the_backbone_is_an_extractor_that_describes_itself() -> None:
    model = convert_tiny(cnn(), x=IMAGES)
    assert isinstance(model.backbone, Extractor)
    assert model.config["backbone"] == model.backbone.description


def test_a_saturated_softmax_is_no_evidence() -> None:
    """It hides every shift, also that of a layer that makes no logits."""

    class Saturated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(4, 3)
            self.readout = nn.Parameter(1e4 * torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.hidden(x) @ self.readout).softmax(1)

    with pytest.raises(ClassifierNotFoundError, match="classifier="):
        hetsngp.convert(Saturated(), example_input=torch.randn(2, 4))


def test_a_batch_in_the_place_of_the_method_is_told_where_it_belongs() -> None:
    with pytest.raises(TypeError, match="example_input=x"):
        hetsngp.convert(nn.Linear(4, 3), torch.randn(2, 4))  # type: ignore[arg-type]
