"""Predictions from several threads: the answers, modes and buffers of one thread."""

import copy
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetsngp
from hetsngp.models.classifier import evaluating
from hetsngp.models.methods import METHODS
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.nn.spectral import bound_spectrally
from hetsngp.nn.spectral_cache import cache_spectral_norms

THREADS, ROUNDS, POINTS = 8, 3, 16
WAIT = 60.0  # seconds until a test that hangs fails


class Noisy(nn.Module):
    """Network with all that training mode changes: BatchNorm, dropout and a measured spectral norm."""

    num_features = 16
    kind = "mlp"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 16)
        )
        bound_spectrally(self.layers, 0.9)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            threading.Event().wait(1e-4)  # lets other threads run in the middle of a pass
        return x


def batch(seed: int, classes: int = 3, size: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.arange(size) % classes


def built(method: str, seed: int = 0) -> hetsngp.Classifier:
    """Model that has seen two training batches, with a posterior."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hetsngp.build(method, Noisy(), 3, dataset_size=24, random_features=16, rank=1)
        cache_spectral_norms(model)
        for step in range(2):
            model.loss(*batch(step), generator=torch.Generator().manual_seed(step))
        hetsngp.fit_posterior(model, [batch(0), batch(1)])
    return model


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_mode(model: nn.Module) -> None:
    model.train()


def eval_mode(model: nn.Module) -> None:
    model.eval()


def mixed_modes(model: nn.Module) -> None:
    for index, module in enumerate(model.modules()):
        module.training = index % 3 != 1


MODES = [train_mode, eval_mode, mixed_modes]


def from_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of the calls, each of them in one of several threads that begin together."""
    begin = threading.Barrier(THREADS)
    with ThreadPoolExecutor(THREADS, initializer=lambda: begin.wait(WAIT)) as pool:
        return [future.result(WAIT) for future in [pool.submit(call) for call in calls]]


def check(model: Any, predict: Callable[[Any, Tensor], Any], same: Callable[[Any, Any], None]) -> None:
    """The answers of one thread, in eval mode, to the bit; modes and state unchanged."""
    inputs = [batch(seed)[0] for seed in range(THREADS)]
    alone = copy.deepcopy(model).eval()
    expected = [predict(alone, x) for x in inputs]
    before, buffers = modes(model), state(model)
    got = from_threads([lambda x=x: predict(model, x) for x in inputs * ROUNDS])  # type: ignore[misc]
    for answer, wanted in zip(got, expected * ROUNDS, strict=True):
        same(answer, wanted)
    assert modes(model) == before
    for name, value in state(model).items():
        assert torch.equal(value, buffers[name]), name


def same_prediction(got: Any, wanted: Any) -> None:
    for name, value in vars(wanted).items():
        assert torch.equal(getattr(got, name), value), name


@pytest.mark.parametrize("set_mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_in_any_mode(method: str, set_mode: Callable[[nn.Module], None]) -> None:
    model = built(method)
    set_mode(model)
    check(model, lambda model, x: model.predict(x, POINTS), same_prediction)


@pytest.mark.parametrize("set_mode", MODES)
def test_an_ensemble_whose_members_share_a_backbone(set_mode: Callable[[nn.Module], None]) -> None:
    first, second = built("hetsngp"), built("sngp", seed=1)
    second.backbone = first.backbone
    hetsngp.fit_posterior(second, [batch(0), batch(1)])
    ensemble = hetsngp.Ensemble([first, second])
    set_mode(ensemble)
    check(ensemble, lambda ensemble, x: ensemble.predict(x, POINTS), same_prediction)


@pytest.mark.parametrize("name", ["predict_probs", "utility", "latent"])
def test_other_answers(name: str) -> None:
    def answer(model: Any, x: Tensor) -> Tensor:
        if name == "latent":
            return model.latent(torch.cat([x] * 4, 1)).mean
        found = getattr(model, name)(x)
        return found if name == "predict_probs" else found.mean

    def same(got: Tensor, wanted: Tensor) -> None:
        assert torch.equal(got, wanted)

    check(built("hetsngp").train(), answer, same)


def test_models_that_share_modules_at_once() -> None:
    """A head on features, and the model it belongs to: each would restore the modes under the other."""
    model = built("hetsngp").train()
    view = model.on_features()
    x, h = batch(0)[0], torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    expected = copy.deepcopy(model).eval().predict(x, POINTS), copy.deepcopy(view).eval().predict(h, POINTS)
    before, buffers = modes(model), state(model)
    got = from_threads(
        [lambda: model.predict(x, POINTS), lambda: view.predict(h, POINTS)] * (ROUNDS * THREADS // 2)
    )
    for answer, wanted in zip(got, expected * (len(got) // 2), strict=True):
        same_prediction(answer, wanted)
    assert modes(model) == before
    assert all(torch.equal(value, buffers[name]) for name, value in state(model).items())


def test_an_error_in_one_thread_leaves_mode_and_answers() -> None:
    model = built("hetsngp").train()
    x = batch(0)[0]
    expected = copy.deepcopy(model).eval().predict(x, POINTS)
    before, buffers = modes(model), state(model)

    def fails() -> None:
        with pytest.raises((RuntimeError, ValueError)):
            model.predict(torch.randn(3, 5))

    got = from_threads([fails, lambda: model.predict(x, POINTS)] * (ROUNDS * THREADS // 2))
    for answer in got[1::2]:
        same_prediction(answer, expected)
    assert modes(model) == before
    assert all(torch.equal(value, buffers[name]) for name, value in state(model).items())


@pytest.mark.parametrize("method", ["hetsngp", "mimo"])
def test_a_training_pass_and_predictions_do_not_see_the_mode_of_the_other(method: str) -> None:
    """BatchNorm counts the training passes, and no prediction; dropout is off in predictions."""
    model = built(method).train()
    x, y = batch(0)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    for parameter in model.parameters():  # predictions depend on buffers, which training passes change
        parameter.requires_grad_(False)
    norm.momentum = 0.0
    begun = int(norm.num_batches_tracked)
    seen: list[bool] = []
    model.backbone.layers[3].register_forward_hook(
        lambda module, args, output: seen.append(module.training != torch.equal(args[0], output))
    )
    calls = [lambda: model.loss(x, y), lambda: model.predict(x, POINTS), lambda: model(x)]
    from_threads(calls * (THREADS * 2))
    assert all(seen)
    assert int(norm.num_batches_tracked) - begun == THREADS * 2 * 2  # those of loss and model(x)
    assert all(modes(model).values())


def test_a_held_out_loss_of_several_inputs_does_not_change_predictions() -> None:
    model = built("mimo").eval()
    x, y = batch(0)
    expected = model.predict(x, POINTS)
    got = from_threads([lambda: model.loss(x, y), lambda: model.predict(x, POINTS)] * (ROUNDS * THREADS))
    for answer in got[1::2]:
        same_prediction(answer, expected)


def test_train_waits_for_predictions_of_other_threads() -> None:
    model = built("sngp").train()
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with evaluating(model):
            inside.set()
            assert go_on.wait(WAIT)
            assert not any(modes(model).values())

    with ThreadPoolExecutor(2) as pool:
        holding = pool.submit(hold)
        assert inside.wait(WAIT)
        setting = pool.submit(model.train)
        try:
            with pytest.raises(TimeoutError):
                setting.result(0.2)
            assert not any(modes(model).values())
        finally:
            go_on.set()
        holding.result(WAIT), setting.result(WAIT)
    assert all(modes(model).values())
    with ThreadPoolExecutor(1) as pool:  # and eval mode that was asked for meanwhile stays
        with evaluating(model):
            setting = pool.submit(model.eval)
        setting.result(WAIT)
    assert not any(modes(model).values())


def test_a_copy_does_not_wait_for_the_predictions_of_its_original() -> None:
    model = built("hetsngp")
    with evaluating(model):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other.train().loss(*batch(0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_the_mode_from_before_the_predictions_of_other_threads() -> None:
    model = built("sngp").train()
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with evaluating(model):
            inside.set()
            assert go_on.wait(WAIT)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert inside.wait(WAIT)
        try:
            process = os.fork()
            if process == 0:
                kept = all(modes(model).values())
                model.eval()  # waits for nobody
                os._exit(0 if kept else 1)
            assert os.waitpid(process, 0)[1] == 0
            assert not any(modes(model).values())
        finally:
            go_on.set()
        holding.result(WAIT)
    assert all(modes(model).values())


def test_a_prediction_compiles_to_one_graph() -> None:
    model = hetsngp.build("deterministic", ResidualMLP(4, width=8), 2).eval()
    compiled = torch.compile(model.predict_probs, backend="eager", fullgraph=True)
    x = batch(0)[0]
    assert torch.equal(compiled(x), model.predict_probs(x))


def test_models_whose_backbones_share_an_inner_network() -> None:
    """train() of one waits for a prediction of the other, since it would switch the network inside of it."""

    class Around(nn.Module):
        num_features = 16
        kind = "mlp"

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            before = self.inner.training
            inside.set()
            threading.Event().wait(0.2)
            seen.append((before, self.inner.training))
            return self.inner(x)

    inside, seen, shared = threading.Event(), [], Noisy()
    one, two = (hetsngp.build("deterministic", Around(shared), 3, spectral_bound=None) for _ in range(2))
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(one.predict, batch(0)[0])
        assert inside.wait(WAIT)
        pool.submit(two.train).result(WAIT)
        answer.result(WAIT)
    assert seen == [(False, False)]
    assert shared.training
