"""Extractor: a network without its last layer gives what entered that layer, from whatever it is given."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetsngp.nn.extractor import Catch, Extractor, Features, Passage, call, flat, logits_of, replace_layer


class Net(nn.Module):
    """x → h (8) → 3 logits; ``ending``: what is done with them."""

    def __init__(self, ending: str = "plain") -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 3)
        self.ending = ending
        self.barrier: Any = None

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.body(x)))

    def forward(self, x: Tensor, scale: float = 1.0, labels: Any = None) -> Any:
        assert labels is None
        logits = self.fc(self.features(x * scale))
        if self.barrier is not None:
            self.barrier.wait(timeout=20)  # every thread is here before any goes on
        if self.ending == "softmax":
            return F.softmax(logits, 1)
        return {"logits": logits, "other": x} if self.ending == "dict" else logits


def stripped(ending: str = "plain", **options: Any) -> tuple[Extractor, Net]:
    """An extractor, and the network it was made of, as it was."""
    net = Net(ending)
    nn.init.normal_(net.norm.running_mean)
    reads = "input" if ending == "softmax" else "output"
    return Extractor(copy.deepcopy(net), "fc", 8, 3, reads=reads, **options), net


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(7))


# --- features -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["plain", "dict", "softmax"])
def test_the_features_are_what_entered_the_last_layer(ending: str) -> None:
    extractor, net = stripped(ending)
    assert torch.equal(extractor.eval()(X), net.eval().features(X))


@pytest.mark.parametrize("ending", ["plain", "softmax"])
def test_gradients_reach_every_parameter_that_is_left(ending: str) -> None:
    extractor, net = stripped(ending)
    extractor(X).square().sum().backward()
    net.features(X).square().sum().backward()
    expected = {name: p.grad for name, p in net.named_parameters() if not name.startswith("fc.")}
    found = {name: p.grad for name, p in extractor.network.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_tensors_dicts_and_tuples_are_taken() -> None:
    extractor, net = stripped()
    expected = net.eval().features(2 * X)
    extractor.eval()
    y = torch.tensor([0, 1, 2, 0, 1])
    for x in (2 * X, {"x": X, "scale": 2.0}, UserDict(x=X, scale=2.0), (X, 2.0), [X, 2.0]):
        assert torch.equal(extractor(x), expected)
    for name in ("labels", "label", "label_ids"):  # from which the network would compute a loss of its own
        assert torch.equal(extractor({"x": X, "scale": 2.0, name: y}), expected)


def test_call_keeps_every_argument_that_is_no_label() -> None:
    assert call(lambda **given: given, {"a": 1, "labels": 2, "label": 3, "b": 4}) == {"a": 1, "b": 4}
    assert call(lambda *given: given, (1, 2)) == (1, 2)
    assert call(lambda x: x, X) is X


def test_logits_are_found_in_what_networks_return() -> None:
    logits, other = torch.randn(2, 3), torch.randn(2, 5)
    returned: list[Any] = [
        logits,
        {"loss": None, "logits": logits},
        UserDict(logits=logits),
        (logits, other),
        [logits, other],
        SimpleNamespace(loss=other, logits=logits),
    ]
    assert all(logits_of(output) is logits for output in returned)
    nothing: list[Any] = [{"scores": logits}, (), "text", None, SimpleNamespace(scores=logits)]
    for output in nothing:
        with pytest.raises(TypeError, match=r"no logits were found"):
            logits_of(output)


def test_only_dimensions_of_one_are_flattened() -> None:
    assert flat(torch.zeros(2, 5, 1, 1)).shape == (2, 5)
    assert flat(torch.zeros(2, 5, 1)).shape == (2, 5)
    for shape in ((2, 5), (2, 5, 3), (2, 5, 1, 3), (1, 5), (2, 1)):
        assert flat(torch.zeros(shape)).shape == shape


# --- the layer's place --------------------------------------------------------------------------------------


def test_a_layer_is_replaced_under_every_name_it_has() -> None:
    shared = nn.Linear(4, 4)
    net = nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.ReLU(), shared), "c": nn.Linear(4, 4)})
    other = net["c"]
    stand_in = Passage()
    assert replace_layer(net, "a", stand_in) is net
    assert net["a"] is stand_in
    assert net["b"][1] is stand_in
    assert net["c"] is other


def test_a_network_that_is_the_layer_becomes_what_replaces_it() -> None:
    layer, stand_in = nn.Linear(4, 3), Passage()
    assert replace_layer(layer, "", stand_in) is stand_in
    assert torch.equal(Extractor(layer, "", 4, 3)(X), X)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(8, 3), (2, 8)),
        (nn.Linear(8, 3), (2, 6, 8)),
        (nn.Conv2d(8, 3, 1), (2, 8, 1, 1)),
        (nn.Conv1d(8, 3, 1), (2, 8, 1)),
    ],
    ids=["linear", "tokens", "conv2d", "conv1d"],
)
def test_zeros_of_the_layers_own_shape_stand_for_its_output(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """So that what follows in the network still runs."""
    h = torch.randn(shape)
    expected = torch.zeros_like(layer(h))
    catch = Extractor(nn.Sequential(layer), "0", 8, 3, reads="input").network[0]
    assert isinstance(catch, Catch)
    zeros = catch(h)
    assert zeros.shape == expected.shape
    assert torch.equal(zeros, expected)
    assert catch.take() is h


def test_a_layer_that_is_not_called_is_an_error() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(self.a(x) if self.training else self.b(x), 1)

    extractor = Extractor(Branches(), "b", 4, 3, reads="input")
    assert torch.equal(extractor.eval()(X), X)
    with pytest.raises(RuntimeError, match=r"did not call the layer.*classifier="):
        extractor.train()(X)


def test_every_batch_is_taken_once() -> None:
    """Nothing of a batch is kept: neither its memory, nor features for the next call to find."""
    extractor, _ = stripped("softmax")
    extractor(X)
    with pytest.raises(RuntimeError, match="did not call"):
        extractor.network.fc.take()


# --- freezing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["plain", "softmax"])
def test_a_frozen_network_has_no_gradients_and_stays_in_eval_mode(ending: str) -> None:
    extractor, net = stripped(ending, frozen=True)
    expected = net.eval().features(X)
    assert not any(p.requires_grad for p in extractor.parameters())
    before = {name: t.clone() for name, t in extractor.state_dict().items()}
    outer = nn.Sequential(extractor)
    outer.train()
    assert extractor.training
    assert not any(module.training for module in extractor.network.modules())
    h = extractor(X)
    assert torch.equal(h, expected)
    assert not h.requires_grad
    assert all(torch.equal(t, before[name]) for name, t in extractor.state_dict().items())


def test_what_is_not_frozen_follows_the_mode() -> None:
    extractor, net = stripped()
    extractor.train()
    assert torch.equal(extractor(X), net.train().features(X))  # by the statistics of the batch
    assert torch.equal(extractor.network.norm.running_mean, net.norm.running_mean)
    assert not any(module.training for module in extractor.eval().modules())


# --- copies and threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["plain", "softmax"])
def test_copies_and_pickles_give_the_same_features(ending: str) -> None:
    extractor, _ = stripped(ending)
    expected = extractor.eval()(X)
    for twin in (copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor))):
        assert torch.equal(twin(X), expected)
        assert twin.network is not extractor.network


def test_features_that_nobody_took_do_not_stand_in_the_way_of_a_copy() -> None:
    extractor, _ = stripped("softmax")
    extractor.network(X)  # the layer is called, and nobody asks for what it was given
    twin = copy.deepcopy(extractor).eval()
    assert torch.equal(twin(X), extractor.eval()(X))


def test_threads_do_not_see_each_others_features() -> None:
    """Both have entered the last layer before either goes on."""
    extractor, net = stripped("softmax")
    extractor.eval()
    net.eval()
    batches = [torch.randn(5, 4), torch.randn(5, 4)]
    found: list[Any] = [None, None]
    extractor.network.barrier = threading.Barrier(2)

    def run(i: int) -> None:
        with torch.no_grad():
            found[i] = extractor(batches[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], net.features(batches[i])) for i in range(2))


# --- what is written down -----------------------------------------------------------------------------------


def test_the_description_makes_the_same_extractor_again() -> None:
    extractor, net = stripped("softmax", frozen=True)
    twin = Extractor(net, **extractor.description["extractor"])
    assert extractor.description == {
        "name": None,
        "class": "Net",
        "extractor": {
            "classifier": "fc",
            "num_features": 8,
            "num_outputs": 3,
            "reads": "input",
            "frozen": True,
        },
    }
    assert twin.description == extractor.description
    assert torch.equal(twin(X), extractor(X))
    assert "classifier='fc', num_features=8, frozen=True" in repr(extractor)


def test_features_pass_through_the_backbone_of_a_head_on_features() -> None:
    assert Features(4)(X) is X
    assert Features(4).num_features == 4
