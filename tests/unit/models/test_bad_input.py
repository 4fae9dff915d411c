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
from hetsngp.nn.extractor import Features
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


@pytest.mark.parametrize(
    "name", ["temperature", "amplitude", "length_scale", "spectral_bound", "linear_share"]
)
@pytest.mark.parametrize("value", [0, 0.0, -1.0, NAN, "1", True])
def test_options_that_must_be_positive(name: str, value: Any) -> None:
    with refuses(ValueError, name, "positive finite number", repr(value)):
        toy.build("hetsngp", **{name: value})


@pytest.mark.parametrize("name", ["temperature", "amplitude", "length_scale"])
def test_options_that_must_be_finite(name: str) -> None:
    with refuses(ValueError, name, "positive finite number", "inf"):
        toy.build("hetsngp", **{name: INF})
    toy.build("hetsngp", spectral_bound=INF)  # documented: no bound


@pytest.mark.parametrize("value", [1, 1.5, INF])
def test_the_linear_kernel_is_a_part_of_the_prior(value: float) -> None:
    with refuses(ValueError, "linear_share", repr(value)):
        toy.build("sngp", kernel="rbf+linear", linear_share=value)


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


# --- other forms and precisions, and failing backbones ------------------------------------------------------


def _calls(model: Any) -> dict[str, Any]:
    y = _data()[1]
    return {
        "predict": model.predict,
        "predict_probs": model.predict_probs,
        "model(x)": model,
        "loss": lambda x: model.loss(x, y),
        "utility": model.utility,
        "fit_posterior": lambda x: hetsngp.fit_posterior(model, [(x, y)]),
        "train": lambda x: loop.train(model, [(x, y)], epochs=1),
        "validation": lambda x: loop.mean_nll(model, [(x, y)]),
        "extract_features": lambda x: hetsngp.extract_features(model, [(x, y)]),
    }


CALLS = tuple(_calls(toy.build("sngp")))
X = _data()[0]
ODD_INPUTS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "float64": (X.double(), RuntimeError, ("torch.float64", "x.to(torch.float32)")),
    "float16": (X.half(), RuntimeError, ("torch.float16", "x.to(torch.float32)")),
    "int64": (X.long(), RuntimeError, ("torch.int64", "x.to(torch.float32)")),
    "complex": (X.to(torch.complex64), RuntimeError, ("torch.complex64", "x.to(torch.float32)")),
    "NumPy": (X.numpy(), TypeError, ("NumPy array (12, 2) of float32", "torch.as_tensor(x")),
    "list": (X.tolist(), TypeError, ("a list of 12", "torch.as_tensor(x")),
    "None": (None, TypeError, ("NoneType", "torch.as_tensor(x")),
    "dict": ({"x": X}, TypeError, ("dict of 'x'", "form that the backbone takes")),
    "width": (torch.ones(12, 3), RuntimeError, ("(12, 3)", "shape that the backbone takes")),
    "meta": (X.to("meta"), ValueError, ("meta device", "no values")),
    "sparse": (X.to_sparse(), TypeError, ("sparse", "to_dense()")),
    "nested": (torch.nested.nested_tensor([X[0], X[1]]), TypeError, ("nested", "to_padded_tensor")),
    "complex NaN": (X.to(torch.complex64) * NAN, ValueError, ("NaN or infinite", "row 0")),
}


@pytest.mark.parametrize("name", ODD_INPUTS)
@pytest.mark.parametrize("call", CALLS)
def test_inputs_that_the_backbone_cannot_take(call: str, name: str) -> None:
    """torch's own words, what was given, and what to give instead."""
    x, kind, words = ODD_INPUTS[name]
    if (call, name) == ("model(x)", "meta"):
        kind, words = RuntimeError, ("on meta", "weights are on cpu")
    with refuses(kind, *words):
        _calls(toy.trained("hetsngp"))[call](x)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TypeError])
def test_errors_of_the_backbone_keep_their_words_and_cause(kind: type[Exception]) -> None:
    class Fails(Returns):
        def forward(self, x: Tensor) -> Any:
            raise kind("the width is wrong")

    with refuses(kind, "the backbone failed on x", "(12, 2)", "the width is wrong") as caught:
        hetsngp.build("sngp", Fails(None), 3, **toy.TINY)(X)
    assert isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize("error", [KeyError("mine"), OSError("mine"), torch.OutOfMemoryError("mine")])
def test_other_errors_of_the_backbone_pass_unchanged(error: Exception) -> None:
    class Fails(Returns):
        def forward(self, x: Tensor) -> Any:
            raise error

    with pytest.raises(type(error)) as caught:
        hetsngp.build("sngp", Fails(None), 3, **toy.TINY)(X)
    assert caught.value is error


@pytest.mark.parametrize(
    ("features", "kind", "words"),
    [
        (torch.ones(5, 16), ValueError, ("5 examples for 12", "batch first")),
        (torch.ones(12, 16).long(), TypeError, ("torch.int64", "floating point")),
        (torch.ones(12, 16).to_sparse(), TypeError, ("sparse", "dense")),
        (torch.ones(12, 16, device="meta"), ValueError, ("on meta", "head is on cpu", "model.to(device)")),
        (torch.full((12, 16), NAN), ValueError, ("no finite features", "row 0")),
    ],
)
def test_features_that_a_head_cannot_take(features: Tensor, kind: type[Exception], words: Any) -> None:
    model = toy.trained("sngp")
    model.backbone = Returns(features)
    with refuses(kind, *words):
        model.predict(X)


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("size", [1e8, 1e19, 1e30, 1e38, 3e38, 1e-39])
def test_extreme_inputs_have_a_finite_answer_or_an_error(method: str, size: float) -> None:
    model, x = toy.trained(method), X.sign() * size
    for call in (model.predict, lambda x: model(x)):
        answer, message = None, ""
        try:
            answer = call(x)
        except ValueError as error:
            message = str(error)
        if answer is None:
            assert size > 1e18
            assert re.match(
                r"no finite (features|prediction) for x, first in row \d+: .*standardise", message
            )
            continue
        probs = answer.exp() if isinstance(answer, Tensor) else answer.probs
        assert torch.isfinite(probs).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(12), atol=2e-3, rtol=0)


@pytest.mark.parametrize("size", [1e19, 1e30, 3e38])
@pytest.mark.parametrize("kind", ["rms", "polar", "direction"])
@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_very_large_features_are_unfamiliar(method: str, kind: str, size: float) -> None:
    """Squares of 1e19 overflow in float32: such features were at the centre of the data, with .001 nats of
    model uncertainty, or ended in a LinAlgError. By direction alone they are as familiar as shorter ones."""
    x, y = toy.blobs()
    h = torch.cat([x, x.roll(1, 1)], 1)
    options = {"random_features": 128, "rank": 1, "generator": torch.Generator().manual_seed(0)}
    model = hetsngp.build(method, Features(4, "mlp"), 3, normalization=kind, dataset_size=len(x), **options)
    toy.descend(model, h, y, steps=60)
    hetsngp.fit_posterior(model, toy.loader(h, y))
    near = model.predict(h)
    large = h / h.abs().amax(1, keepdim=True) * size
    far = model.predict(large)
    if kind == "direction":
        expected = model.predict(h * 1e6)  # the mean of the features is nothing beside these
        torch.testing.assert_close(far.probs, expected.probs, rtol=1e-3, atol=1e-3)
        # The label noise is not of the direction alone.
        torch.testing.assert_close(far.ood_score, expected.ood_score, rtol=1e-2, atol=1e-2)
        return
    assert far.model_uncertainty.min() > 0.8
    assert far.ood_score.min() > near.ood_score.max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow_with_large_features(dtype: torch.dtype) -> None:
    """The mean square of features of a thousand is above the largest number of float16, 65,504: the accuracy
    fell from 1.00 to chance."""
    x, y = toy.blobs()
    h = 400 * torch.cat([x, x.roll(1, 1)], 1)
    options = {"random_features": 128, "rank": 1, "generator": torch.Generator().manual_seed(0)}
    model = hetsngp.build("hetsngp", Features(4, "mlp"), 3, normalization="rms", dataset_size=36, **options)
    toy.descend(model, h, y, steps=60)
    hetsngp.fit_posterior(model, toy.loader(h, y))
    assert float(model.head.latent.normalizer.mean_square) > 65_504
    want = model.predict_probs(h)
    assert (want.argmax(1) == y).float().mean() > 0.95
    got = model.to(dtype).predict_probs(h.to(dtype)).float()
    torch.testing.assert_close(got, want, rtol=0, atol=0.1)
    assert (got.argmax(1) == y).float().mean() > 0.95


# --- weights that are not finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_weights_that_are_not_finite_are_named(method: str, bad: float) -> None:
    good = toy.trained(method)
    names = [name for name, _ in good.named_parameters()]
    names += [
        name for name, t in good.head.named_buffers(prefix="head") if t.is_floating_point() and t.numel()
    ]
    for name in names:
        model = toy.trained(method)
        model.predict(X)  # so that the weights have been looked at before
        with torch.no_grad():
            tensor = (
                model.get_parameter(name)
                if name in dict(model.named_parameters())
                else model.get_buffer(name)
            )
            tensor[(0,) * tensor.dim()] = bad
        for call in (
            model.predict,
            model.predict_probs,
            lambda x, model=model: hetsngp.fit_posterior(model, [(x, _data()[1])]),
        ):
            with refuses(ValueError, f"{name} has NaN or infinite values", "train again"):
                call(X)


def test_masks_of_a_backbone_may_be_infinite() -> None:
    model = toy.trained("sngp")
    model.backbone.register_buffer("mask", torch.tensor([0.0, -INF]))
    model.predict(X)
    model.backbone.isometry[0, 0] = NAN
    with refuses(ValueError, "backbone.isometry has NaN"):
        model.predict(X)


def test_weights_are_looked_at_again_only_after_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from hetsngp.models import classifier

    model, looks = toy.trained("sngp"), []
    found = classifier.first_non_finite
    monkeypatch.setattr(classifier, "first_non_finite", lambda tensors: (looks.append(1), found(tensors))[1])
    for _ in range(3):
        model.predict(X)
    assert len(looks) == 1
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.warns(UserWarning, match="trained after fit_posterior"):
        model.predict(X)
    assert len(looks) == 2


# --- labels and weights of held-out data, models, options ---------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 3])
def test_labels_of_validation_out_of_range(bad: int) -> None:
    x, y = _data()
    y[2] = bad
    with refuses(ValueError, "num_classes=3", "renumber"):
        loop.train(toy.build("sngp"), [_data()], epochs=1, validation=[(x, y)])


def test_labels_and_weights_of_validation_are_checked() -> None:
    x, y = _data()
    model = toy.trained("sngp")
    with refuses(TypeError, "torch.float32", "y.long()"):
        loop.mean_nll(model, [(x, y.float())])
    with refuses(TypeError, "tensor of class numbers", "ndarray"):
        loop.mean_nll(model, [(x, y.numpy())])
    with refuses(ValueError, "finite and not negative"):
        loop.mean_nll(model, [(x, y, -torch.ones(12))])
    with refuses(ValueError, "multi-hot", "[0, 1]"):
        loop.mean_nll(toy.trained("sngp", link="sigmoid"), [(x, _multi_hot(y) * 2)])


@pytest.mark.parametrize("model", [None, "model", 3, nn.Linear(2, 3)])
def test_functions_of_a_model_take_no_other_thing(model: Any) -> None:
    for call in (
        lambda: hetsngp.fit_posterior(model, [_data()]),
        lambda: loop.train(model, [_data()], epochs=1),
        lambda: loop.mean_nll(model, [_data()]),
        lambda: hetsngp.extract_features(model, [_data()]),
        lambda: hetsngp.fit_head(model, [_data()]),
    ):
        with refuses(TypeError, type(model).__name__):
            call()
    with refuses(TypeError, "members", type(model).__name__) if model is None else pytest.raises(TypeError):
        hetsngp.Ensemble(model)


@pytest.mark.parametrize("data", [None, 3, "data", X, X.numpy(), {}, nn.Linear(2, 2)])
def test_loaders_that_are_none(data: Any) -> None:
    model = toy.trained("sngp")
    for call in (hetsngp.fit_posterior, lambda m, d: loop.train(m, d, epochs=1), hetsngp.extract_features):
        with refuses(TypeError, "loader", "DataLoader", type(data).__name__):
            call(model, data)
    with refuses(TypeError, "one batch", "[(x, y)]"):
        loop.train(model, _data(), epochs=1)
    with refuses(TypeError, "Dataset", "wrap it"):
        loop.train(model, TensorDataset(*_data()), epochs=1)


@pytest.mark.parametrize("value", [10**12, 2**70])
def test_sizes_that_no_computer_has_room_for(value: int) -> None:
    for name in ("rank", "random_features", "num_samples", "num_members", "latent_dim"):
        with refuses(ValueError, name, "at most"):
            toy.build("hetsngp", **{name: value})
    with refuses(ValueError, "num_classes", "at most"):
        hetsngp.build("hetsngp", toy.backbone(), value)
    with refuses(ValueError, "num_samples", "at most"):
        toy.trained("hetsngp").predict(X, num_samples=value)


@pytest.mark.parametrize("generator", [0, "0", True, [0]])
def test_generators_that_are_none(generator: Any) -> None:
    model = toy.trained("hetsngp")
    for call in (
        lambda: model.predict(X, generator=generator),
        lambda: model.loss(X, _data()[1], generator=generator),
        lambda: loop.train(model, [_data()], epochs=1, generator=generator),
        lambda: hetsngp.build("sngp", toy.backbone(), 3, generator=generator),
    ):
        with refuses(TypeError, "torch.Generator", type(generator).__name__, "manual_seed"):
            call()


def test_training_a_frozen_model() -> None:
    with refuses(ValueError, "every parameter is frozen", "requires_grad_(True)"):
        loop.train(toy.build("sngp").requires_grad_(False), [_data()], epochs=1)


def test_values_are_not_looked_at_in_a_transform() -> None:
    """vmap cannot branch on values."""
    model = toy.trained("deterministic")
    found = torch.func.vmap(lambda row: model(row[None])[0])(X)
    torch.testing.assert_close(found, model(X))


def test_errors_of_the_users_own_kinds_pass_unchanged() -> None:
    class Stop(RuntimeError):
        """Raised by a backbone to end a loop."""

    class Stopping(nn.Module):
        num_features = 2

        def forward(self, x: Tensor) -> Tensor:
            raise Stop("enough")

    model = hetsngp.build("deterministic", Stopping(), 2)
    with pytest.raises(Stop, match=r"^enough$"):
        model.predict(torch.zeros(3, 2))
