"""Bad input is refused at the boundary, by a message that says what was wrong and what to do."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from tests.contract import toy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import hetsngp
from hetsngp.fitting import loop
from hetsngp.models.methods import METHODS
from hetsngp.validation import check_class_labels, check_inputs, check_multi_hot

NAN, INF = math.nan, math.inf
METHOD_NAMES = tuple(METHODS)


def refuses(kind: type[Exception], *words: str) -> Any:
    """pytest.raises whose message holds every one of ``words``."""
    everywhere = "".join(rf"(?=.*{re.escape(word)})" for word in words)
    return pytest.raises(kind, match=rf"(?s)^{everywhere}")


def _data(rows: int = 12) -> tuple[Tensor, Tensor]:
    x, y = toy.blobs(3)
    return x[:rows].clone(), y[:rows].clone()


def _multi_hot(y: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(y, 3).float()


# --- inputs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_inputs_that_are_not_finite(method: str, bad: float) -> None:
    x, y = _data()
    model = toy.trained(method)
    x[7, 1] = bad
    for call in (
        lambda: model.loss(x, y),
        lambda: model.predict(x),
        lambda: model.utility(x),
        lambda: hetsngp.fit_posterior(model, [_data()], calibration=[(x, y)]),
    ):
        with refuses(ValueError, "NaN or infinite", "row 7", "clean or impute"):
            call()
    if method in toy.GP:
        with refuses(ValueError, "NaN or infinite", "row 7"):
            hetsngp.fit_posterior(model, [(x, y)])


def test_inputs_in_a_dictionary_are_looked_at() -> None:
    check_inputs({"ids": torch.ones(3, 2, dtype=torch.long), "pixels": torch.ones(3, 2)})
    with refuses(ValueError, "NaN or infinite", "row 1"):
        check_inputs({"pixels": torch.tensor([[0.0], [NAN]])})


def test_empty_and_dimensionless_batches() -> None:
    x, y = _data()
    model = toy.trained("hetsngp")
    for call in (lambda: model.loss(x[:0], y[:0]), lambda: model.predict(x[:0])):
        with refuses(ValueError, "empty batch", "at least one row"):
            call()
    with refuses(ValueError, "empty batch"):
        hetsngp.fit_posterior(model, [(x[:0], y[:0])])
    with refuses(ValueError, "single number", "batch first"):
        model.predict(torch.tensor(1.0))


# --- labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 3, 255, -(2**40)])
@pytest.mark.parametrize("where", ["loss", "posterior", "calibration"])
def test_labels_out_of_range(bad: int, where: str) -> None:
    x, y = _data()
    y[4] = bad
    model = toy.trained("hetsngp")
    with refuses(ValueError, str(bad), "num_classes=3", "0 … 2", "renumber"):
        if where == "loss":
            model.loss(x, y)
        elif where == "posterior":
            hetsngp.fit_posterior(model, [(x, y)])
        else:
            hetsngp.fit_posterior(model, [_data()], calibration=[(x, y)])


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_method_refuses_labels_in_the_user_s_terms(method: str) -> None:
    """Members train on rows of their own; the message is of the batch that was given."""
    x, y = _data()
    model = toy.trained(method, batch_repetition=2).train()
    for wrong, words in (
        (torch.where(y == 1, 3, y), ("labels from 0 to 3", "num_classes=3", "renumber")),
        (y[:5], ("(5,)", "(12,)", "one label for each row")),
        (_multi_hot(y).long(), ("(12, 3)", "(12,)", "one label for each row")),
    ):
        with refuses(ValueError, *words):
            model.loss(x, wrong)
    with refuses(TypeError, "torch.float32", "y.long()"):
        model.loss(x, y.float())
    for wrong in (torch.ones(5), torch.ones(12, 1)):
        with refuses(ValueError, str(tuple(wrong.shape)), "(12,)", "one for each row"):
            model.loss(x, y, weight=wrong)
    with refuses(ValueError, "finite and not negative"):
        model.loss(x, y, weight=-torch.ones(12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.complex64])
def test_labels_that_are_not_whole_numbers(dtype: torch.dtype) -> None:
    x, y = _data()
    for call in (
        lambda: toy.trained("sngp").loss(x, y.to(dtype)),
        lambda: hetsngp.fit_posterior(toy.trained("sngp"), [(x, y.to(dtype))]),
    ):
        with refuses(TypeError, str(dtype), "y.long()", "link='sigmoid'"):
            call()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_whole_numbers_do(dtype: torch.dtype) -> None:
    x, y = _data()
    assert torch.isfinite(toy.trained("sngp").loss(x, y.to(dtype)))


def test_labels_of_the_wrong_shape() -> None:
    x, y = _data()
    model = toy.trained("sngp")
    for wrong in (y[:5], y[:, None], _multi_hot(y).long(), torch.tensor(1)):
        with refuses(ValueError, str(tuple(wrong.shape)), "(12,)", "one label for each row"):
            model.loss(x, wrong)
    with refuses(TypeError, "tensor of class numbers", "list"):
        model.loss(x, y.tolist())


def test_multi_hot_labels_of_the_wrong_kind() -> None:
    x, y = _data()
    model = toy.trained("hetsngp", link="sigmoid")
    for wrong in (y, _multi_hot(y)[:, :2], _multi_hot(y)[:5]):
        for call in (
            lambda wrong=wrong: model.loss(x, wrong),
            lambda wrong=wrong: hetsngp.fit_posterior(model, [(x, wrong)]),
        ):
            with refuses(ValueError, str(tuple(wrong.shape)), "(12, 3)", "one_hot", "link='softmax'"):
                call()
    for bad in (-0.1, 1.5, NAN):
        labels = _multi_hot(y)
        labels[3, 1] = bad
        with refuses(ValueError, "multi-hot", "[0, 1]"):
            model.loss(x, labels)
    with refuses(TypeError, "multi-hot tensor", "list"):
        model.loss(x, _multi_hot(y).tolist())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_multi_hot_labels_of_any_dtype_do(dtype: torch.dtype) -> None:
    x, y = _data()
    labels = _multi_hot(y).to(dtype)
    model = toy.trained("hetsngp", link="sigmoid")
    expected = model.loss(x, _multi_hot(y))
    assert torch.equal(model.loss(x, labels), expected)
    assert hetsngp.fit_posterior(model, [(x, labels)], calibration=[(x + 0.1, labels)]).held_out == len(x)


# --- loaders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", toy.GP)
def test_an_empty_loader(method: str) -> None:
    model = toy.build(method)
    with refuses(ValueError, "loader is empty", "used-up iterator"):
        hetsngp.fit_posterior(model, [])
    with refuses(ValueError, "calibration is empty"):
        hetsngp.fit_posterior(model, [_data()], calibration=[])
    used_up = iter([_data()])
    next(used_up)
    with refuses(ValueError, "loader is empty"):
        hetsngp.fit_posterior(model, used_up)
    with refuses(ValueError, "loader is empty"):
        loop.train(model, [], epochs=1)


def test_a_loader_without_labels() -> None:
    x, y = _data()
    model = toy.build("sngp")
    for batches, got in (
        ([x], "Tensor"),
        (DataLoader(TensorDataset(x)), "1 values"),
        ([(x, y, torch.ones(len(x)), y)], "4 values"),
    ):
        for call in (
            lambda batches=batches: hetsngp.fit_posterior(model, batches),
            lambda batches=batches: loop.train(model, batches, epochs=1),
        ):
            with refuses(TypeError, "pairs (x, y)", got, "DataLoader(TensorDataset(x, y))"):
                call()
    with refuses(TypeError, "calibration must yield pairs"):
        hetsngp.fit_posterior(model, [(x, y)], calibration=[x])


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_calibration_on_the_training_data(method: str) -> None:
    data = TensorDataset(*_data())
    model = toy.build(method)
    batches = DataLoader(data, batch_size=4)
    for calibration in (batches, DataLoader(data, batch_size=6, shuffle=True)):
        with refuses(ValueError, "calibration is the training data", "held-out", "random_split"):
            hetsngp.fit_posterior(model, batches, calibration=calibration)
    assert model.calibration is None
    parts = (Subset(data, range(6)), Subset(data, range(6, 12)))  # what random_split makes is fine
    hetsngp.fit_posterior(model, DataLoader(parts[0]), calibration=DataLoader(parts[1]))


def test_one_held_out_example() -> None:
    x, y = _data()
    with refuses(ValueError, "one example", "at least two"):
        hetsngp.fit_posterior(toy.build("sngp"), [(x, y)], calibration=[(x[:1] + 1, y[:1])])


# --- backbones ----------------------------------------------------------------------------------------------


class Returns(nn.Module):
    """A backbone that says 16 and returns what it is told to; for several inputs the same."""

    num_features = 16

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def widen_inputs(self, num_inputs: int, generator: torch.Generator | None) -> None:
        pass

    def forward(self, x: Tensor) -> Any:
        return self.value


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_backbones_that_return_something_else(method: str) -> None:
    x, y = _data()
    for shape in ((12, 15), (12, 16, 2, 2), (16,)):
        model = hetsngp.build(method, Returns(torch.ones(shape)), 3, **toy.TINY)
        for call in (lambda model=model: model.loss(x, y), lambda model=model: model(x)):
            with refuses(ValueError, str(shape), "(B, 16)", "num_features is 16", "pool and flatten"):
                call()
    model = hetsngp.build(method, Returns({"logits": 1}), 3, **toy.TINY)
    with refuses(TypeError, "must return a tensor (B, 16)", "dict"):
        model(x)
    with refuses(ValueError, "(12, 7)", "(B, 16)"):
        toy.trained(method).latent(torch.ones(12, 7))


@pytest.mark.parametrize("width", [None, 0, -3, True, 16.0, "16"])
def test_backbones_without_num_features(width: Any) -> None:
    network = nn.Linear(2, 16)
    if width is not None:
        network.num_features = width
    with refuses(ValueError, "Linear.num_features", repr(width), "backbone.num_features = 512"):
        hetsngp.build("deterministic", network, 3)


def test_backbones_that_are_no_modules() -> None:
    with refuses(TypeError, "torch.nn.Module", "function"):
        hetsngp.build("deterministic", lambda x: x, 3)


# --- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [1, 0, -2, True, 2.0, None, "3"])
def test_fewer_than_two_classes(classes: Any) -> None:
    with refuses(ValueError, "num_classes", "at least 2", repr(classes), "2 classes"):
        hetsngp.build("deterministic", toy.backbone(), classes)


@pytest.mark.parametrize("name", ["temperature", "amplitude", "length_scale", "spectral_bound"])
@pytest.mark.parametrize("value", [0, 0.0, -1.0, NAN, "1", True])
def test_options_that_must_be_positive(name: str, value: Any) -> None:
    with refuses(ValueError, name, "positive finite number", repr(value)):
        toy.build("hetsngp", **{name: value})


@pytest.mark.parametrize("name", ["temperature", "amplitude", "length_scale"])
def test_options_that_must_be_finite(name: str) -> None:
    with refuses(ValueError, name, "positive finite number", "inf"):
        toy.build("hetsngp", **{name: INF})
    toy.build("hetsngp", spectral_bound=INF)  # documented: no bound


@pytest.mark.parametrize(
    "name",
    [
        *("rank", "random_features", "num_samples", "dataset_size"),
        *("num_members", "batch_repetition", "latent_dim", "flow_layers"),
    ],
)
@pytest.mark.parametrize("value", [0, -2, 2.0, NAN, "4", True])
def test_options_that_must_be_positive_whole_numbers(name: str, value: Any) -> None:
    with refuses(ValueError, name, "positive whole number", repr(value)):
        toy.build("hetsngp", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("input_repetition", value) for value in (-0.1, 1.1, NAN, "1", True, None)),
        *(("entropy_weight", value) for value in (-1e-9, NAN, INF, "1", True, None)),
    ],
)
def test_options_that_may_be_zero(name: str, value: Any) -> None:
    with refuses(ValueError, f"{name} must be a number from 0 to", repr(value)):
        toy.build("mimo", **{name: value})
    toy.build("mimo", **{name: 0})
    toy.build("mimo", **{name: 1})


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([1, 2], ("shape (2,)", "(3,)", "torch.bincount")),
        ([1, -1, 1], ("finite and not negative",)),
        ([1, NAN, 1], ("finite and not negative",)),
        ([0, 0, 0], ("all zero", "count the labels")),
    ],
)
def test_class_counts_that_cannot_be(counts: Any, words: tuple[str, ...]) -> None:
    model = toy.build("posterior_network")
    with refuses(ValueError, "class_counts", *words):
        model.class_counts = torch.tensor(counts)
    assert model.class_counts is None
    with refuses(ValueError, "class_counts", *words):
        toy.build("posterior_network", class_counts=counts)


def test_odd_random_features() -> None:
    with refuses(ValueError, "random_features", "even", "33"):
        toy.build("sngp", random_features=33)


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_number_of_points_of_a_prediction(value: Any) -> None:
    with refuses(ValueError, "num_samples", "positive whole number", repr(value)):
        toy.trained("hetsngp").predict(_data()[0], num_samples=value)


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF])
def test_a_temperature_set_later(value: float) -> None:
    model = toy.build("deterministic")
    with refuses(ValueError, "temperature", "positive finite"):
        model.temperature = value
    assert float(model.temperature) == 1.0


def test_unknown_methods_and_options_suggest_the_known() -> None:
    with refuses(ValueError, "unknown method 'hetsgnp'", "'sngp'", "did you mean 'hetsngp'?"):
        toy.build("hetsgnp")
    with refuses(ValueError, "unknown option 'temprature'", "'rank'", "did you mean 'temperature'?"):
        toy.build("hetsngp", temprature=1.0)
    with refuses(ValueError, "unknown option 'qqq'", "choose one of"):
        toy.build("hetsngp", qqq=1.0)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("posterior", "kroneker", "kronecker"),
        ("noise", "lowrank", "low_rank"),
        ("link", "soft_max", "softmax"),
        ("likelihood", "logmean", "log_mean"),
        ("sampler", "sobl", "sobol"),
        ("normalization", "directon", "direction"),
    ],
)
def test_unknown_choices_suggest_the_known(name: str, wrong: str, right: str) -> None:
    with refuses(ValueError, f"unknown {name} {wrong!r}", "choose one of", f"did you mean {right!r}?"):
        toy.build("hetsngp", **{name: wrong})
    for other in ("", None, 3) if name != "normalization" else ("", 3):
        with refuses(ValueError, f"unknown {name}", right):
            toy.build("hetsngp", **{name: other})


# --- ensembles and streams ----------------------------------------------------------------------------------


def test_ensembles_that_cannot_be() -> None:
    with refuses(ValueError, "at least one member", "Ensemble([model, ...])"):
        hetsngp.Ensemble([])
    with refuses(ValueError, "share classes", "[2, 3]"):
        hetsngp.Ensemble([toy.build("sngp", 2), toy.build("sngp", 3)])
    with refuses(ValueError, "link", "sigmoid", "softmax"):
        hetsngp.Ensemble([toy.build("sngp"), toy.build("sngp", link="sigmoid")])


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_update_posterior_is_for_streams(method: str) -> None:
    with refuses(TypeError, "posterior='momentum'", "hetsngp.fit_posterior(model, loader)"):
        toy.build(method).update_posterior(_data()[0])


def test_a_stream_of_bad_inputs() -> None:
    model = toy.build("sngp", posterior="momentum")
    with refuses(ValueError, "NaN or infinite"):
        model.update_posterior(torch.full((2, 2), NAN))
    with pytest.raises(hetsngp.PosteriorNotFittedError):
        model.predict(_data()[0])


# --- a failed call leaves the model as it was ---------------------------------------------------------------


def test_a_failed_fit_does_not_spoil_the_model() -> None:
    x, y = _data()
    model = toy.trained("hetsngp")
    model.temperature = 1.3
    model.head.latent.posterior.scale.fill_(0.1)  # as a calibration would leave them
    expected = model.predict(x)
    for batches, calibration in (([(x, y), (x, y + 9)], None), ([(x, y)], [(x, y + 9)])):
        with pytest.raises(ValueError):
            hetsngp.fit_posterior(model, batches, calibration=calibration)
        assert toy.same_bits(model.predict(x), expected)


# --- compiled -----------------------------------------------------------------------------------------------


def test_values_are_not_looked_at_while_compiling() -> None:
    def checked(x: Tensor, y: Tensor, hot: Tensor) -> Tensor:
        check_inputs(x)
        return x.sum() + check_class_labels(y, 3, 2).sum() + check_multi_hot(hot, 3, 2).sum()

    bad = (torch.full((2, 2), NAN), torch.tensor([0, 9]), torch.full((2, 3), 7.0))
    with refuses(ValueError, "NaN"):
        checked(*bad)
    assert torch.compile(checked, backend="eager", fullgraph=True)(*bad).isnan()


@pytest.mark.parametrize("method", ["deterministic", "hetsngp"])
def test_the_eval_forward_compiles(method: str) -> None:
    x, _ = _data()
    model = toy.trained(method).eval()
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), expected)
