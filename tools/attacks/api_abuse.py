"""Wrong and extreme arguments to every public function: an error of ours, or a right answer.

Where a call succeeds its answer is checked: probabilities are finite and sum to one, uncertainties are finite
and not negative, and inputs in another form or precision give the same probabilities.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.attacks.harness import Result, Wrong, run_case
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hetsngp
from hetsngp import metrics
from hetsngp.data.class_maps import ClassMap
from hetsngp.evaluation import restrict
from hetsngp.fitting import Schedule, train
from hetsngp.fitting.loop import mean_nll
from hetsngp.models.methods import METHODS
from hetsngp.models.options import Options
from hetsngp.nn.backbones import ResidualMLP, WideResNet
from hetsngp.nn.spectral import bound_spectrally
from hetsngp.serving.decisions import Thresholds, set_thresholds, verdicts
from hetsngp.types import Prediction

NAME = "API abuse"
NAN, INF = math.nan, math.inf
CLASSES, EXAMPLES = 3, 12
SECONDS = 20.0
Case = tuple[str, Callable[[], Any]]
"""Name, which begins with its kind, and function."""


# --- right answers --------------------------------------------------------------------------------------


def check_probs(probs: Any, *, sigmoid: bool = False) -> None:
    probs = torch.as_tensor(probs).double()
    if (
        probs.dim() != 2
        or not bool(probs.isfinite().all())
        or bool((probs < 0).any() | (probs > 1 + 1e-5).any())
    ):
        raise Wrong(f"probabilities are {probs.flatten()[:6].tolist()}")
    if not sigmoid and not bool(((probs.sum(-1) - 1).abs() < 2e-3).all()):
        raise Wrong(f"probabilities sum to {probs.sum(-1)[:6].tolist()}")


def check_prediction(prediction: Prediction, *, sigmoid: bool = False) -> None:
    check_probs(prediction.probs, sigmoid=sigmoid)
    check_probs(prediction.clean_probs, sigmoid=sigmoid)
    for field in fields(Prediction)[2:]:
        values = torch.as_tensor(getattr(prediction, field.name)).double()
        negative = field.name != "ood_score" and bool((values < -1e-6).any())
        if negative or not bool(values.isfinite().all()):
            raise Wrong(f"{field.name} is {values[:6].tolist()}")


def check_finite(*values: Any) -> None:
    for value in values:
        tensor = torch.as_tensor(value)
        if not bool(tensor.double().isfinite().all()):
            raise Wrong(f"the answer is {tensor.flatten()[:6].tolist()}")


def check_model(model: Any) -> None:
    """A model still predicts data like those it was trained with."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    check_prediction(model.predict(blobs()[0].to(dtype)), sigmoid=model.members[0].head.sigmoid)


def accepted(value: Any) -> None:
    raise Wrong(f"accepted, with {type(value).__name__} as the answer")


# --- models and data ------------------------------------------------------------------------------------


def blobs(examples: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(examples) % CLASSES
    angle = 2 * math.pi * y / CLASSES
    x = 3 * torch.stack([angle.cos(), angle.sin()], 1)
    return x + 0.7 * torch.randn(examples, 2, generator=generator), y


def network(inputs: int = 2, width: int = 16) -> ResidualMLP:
    return ResidualMLP(inputs, width=width, depth=1, generator=torch.Generator().manual_seed(1))


def build(method: str = "hetsngp", backbone: nn.Module | None = None, **options: Any) -> Any:
    given = {"random_features": 32, "rank": 2, "dataset_size": EXAMPLES, **options}
    generator = torch.Generator().manual_seed(2)
    return hetsngp.build(
        method, network() if backbone is None else backbone, CLASSES, generator=generator, **given
    )


@functools.cache
def _fitted(method: str, options: tuple[tuple[str, Any], ...]) -> Any:
    model = build(method, **dict(options))
    x, y = blobs(60)
    y = nn.functional.one_hot(y, CLASSES).float() if model.head.sigmoid else y
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(15):
        optimizer.zero_grad()
        model.loss(x, y, generator=torch.Generator().manual_seed(0)).backward()
        optimizer.step()
    hetsngp.fit_posterior(model, [(x, y)])
    return model.eval()


def fitted(method: str = "hetsngp", **options: Any) -> Any:
    """A trained model with its posterior, as new."""
    return copy.deepcopy(_fitted(method, tuple(sorted(options.items()))))


def labels_for(x: Any) -> Tensor:
    """As many labels as x has examples, if that can be said."""
    try:
        return blobs()[1][: len(x)]
    except (TypeError, RuntimeError):
        return blobs()[1]


class Returns(nn.Module):
    """A backbone that returns what it is told to, or what a function makes of x."""

    def __init__(self, value: Any, num_features: Any = 16) -> None:
        super().__init__()
        self.value, self.num_features = value, num_features
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        return self.value(x) if callable(self.value) else self.value


class Stream(IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


# --- inputs ---------------------------------------------------------------------------------------------


def _with(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    x = blobs()[0].to(dtype)
    x[7, 1] = value
    return x


class NotATensor:
    """Something that a network cannot take."""


def bad_inputs() -> dict[str, Callable[[], Any]]:
    """Inputs that have no right answer."""
    x = blobs()[0]
    return {
        "NaN": lambda: _with(NAN),
        "all NaN": lambda: torch.full_like(x, NAN),
        "inf": lambda: _with(INF),
        "-inf": lambda: _with(-INF),
        "NaN in float64": lambda: _with(NAN, torch.float64),
        "NaN in float16": lambda: _with(NAN, torch.float16),
        "NaN in NumPy": lambda: _with(NAN).numpy(),
        "complex64": lambda: x.to(torch.complex64),
        "strings": lambda: np.array([["a", "b"]] * EXAMPLES),
        "objects": lambda: np.array([[object(), 1]] * EXAMPLES, dtype=object),
        "a string": lambda: "x",
        "None": lambda: None,
        "a number": lambda: 3.0,
        "an object": NotATensor,
        "a scalar tensor": lambda: torch.tensor(1.0),
        "empty batch": lambda: x[:0],
        "empty NumPy": lambda: x[:0].numpy(),
        "no columns": lambda: x[:, :0],
        "one column": lambda: x[:, :1],
        "three columns": lambda: torch.ones(EXAMPLES, 3),
        "one example without batch": lambda: x[0],
        "rank 4": lambda: torch.ones(EXAMPLES, 3, 8, 8),
        "meta": lambda: x.to("meta"),
        "sparse": lambda: x.to_sparse(),
        "sparse CSR": lambda: x.to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([x[0], x[1]]),
        "nested jagged": lambda: torch.nested.nested_tensor([x[0], x[1][:1]], layout=torch.jagged),
        "empty list": list,
        "empty dict": dict,
        "set": lambda: {1, 2},
    }


def odd_inputs() -> dict[str, Callable[[], Any]]:
    """Inputs that may have an answer: extreme values, other forms and precisions."""
    x = blobs()[0]
    return {
        "1e30": lambda: x * 1e30,
        "one 1e30": lambda: _with(1e30),
        "1e38": lambda: x.sign() * 1e38,
        "3e38": lambda: x.sign() * 3e38,
        "1e19": lambda: x * 1e19,
        "1e8": lambda: x * 1e8,
        "1e-45": lambda: x.sign() * 1e-45,
        "1e-39": lambda: x.sign() * 1e-39,
        "zeros": lambda: torch.zeros_like(x),
        "float16": lambda: x.half(),
        "bfloat16": lambda: x.bfloat16(),
        "float64": lambda: x.double(),
        "1e300 in float64": lambda: x.double() * 1e300,
        "int8": lambda: x.to(torch.int8),
        "uint8": lambda: x.abs().to(torch.uint8),
        "int64": lambda: x.long(),
        "bool": lambda: x > 0,
        "NumPy float32": lambda: x.numpy(),
        "NumPy float64": lambda: x.double().numpy(),
        "NumPy int64": lambda: x.long().numpy(),
        "list": lambda: x.tolist(),
        "tuple of tensors": lambda: tuple(x),
        "dict": lambda: {"x": x},
        "pandas": lambda: __import__("pandas").DataFrame(x.numpy()),
        "one example": lambda: x[:1],
        "requires grad": lambda: x.clone().requires_grad_(),
        "not contiguous": lambda: x.T.contiguous().T,
        "expanded": lambda: x[:1].expand(EXAMPLES, 2),
        "subclass": lambda: nn.Parameter(x),
    }


def _predict(x: Any, method: str = "hetsngp", **options: Any) -> None:
    model = fitted(method, **options)
    prediction = model.predict(x)
    check_prediction(prediction, sigmoid=model.head.sigmoid)
    # The same input in another form has the same answer.
    try:
        same = torch.as_tensor(x).float()
    except (TypeError, ValueError, RuntimeError):
        return
    expected = model.predict(same).probs
    if float((prediction.probs.float() - expected).abs().max()) > 0.05:
        raise Wrong("another form of the same input has another answer")


def _forward(x: Any) -> None:
    check_probs(fitted()(x).exp())


def _loss(x: Any) -> None:
    model = fitted().train()
    loss = model.loss(x, labels_for(x))
    if not bool(loss.isfinite()):
        return  # seen by whoever trains: the training loop refuses it
    loss.backward()
    check_finite(*(p.grad for p in model.parameters() if p.grad is not None))
    check_model(model)


def _utility(x: Any) -> None:
    utility = fitted().utility(x)
    check_finite(utility.mean, utility.marginal_variance(), utility.covariance())


def _latent(h: Any) -> None:
    latent = on_features().latent(h)
    check_finite(latent.mean, latent.var)
    if bool((latent.var < 0).any()):
        raise Wrong("negative variance")


@functools.cache
def _on_features() -> Any:
    from hetsngp.nn.extractor import Features

    model = build(backbone=Features(2))
    hetsngp.fit_posterior(model, [blobs(60)])
    return model.eval()


def on_features() -> Any:
    """A fitted model of the features themselves."""
    return copy.deepcopy(_on_features())


def _fit_posterior(x: Any) -> None:
    model = fitted()
    report = hetsngp.fit_posterior(model, [(x, labels_for(x))])
    check_finite(report.temperature, report.count)
    check_model(model)


def _calibrate(x: Any) -> None:
    model = fitted()
    report = hetsngp.fit_posterior(model, [blobs(60)], calibration=[(x, labels_for(x))])
    check_finite(report.temperature, report.nll, report.scale)
    check_model(model)


def _train(x: Any) -> None:
    model = fitted()
    history = train(model, [(x, labels_for(x))], epochs=2, lr=1e-3)
    check_finite(*(result.loss for result in history))
    hetsngp.fit_posterior(model, [blobs(60)])
    check_model(model)


def _validate(x: Any) -> None:
    history = train(fitted(), [blobs(60)], epochs=1, validation=[(x, labels_for(x))])
    check_finite(*(result.held_out for result in history))


def _extract(x: Any) -> None:
    check_finite(hetsngp.extract_features(fitted(), [(x, labels_for(x))]).h)


def _fit_head(x: Any) -> None:
    model = fitted("sngp")
    hetsngp.fit_head(model, [(x, labels_for(x))], calibration=None, epochs=1)
    check_model(model)


def _evaluate(x: Any) -> None:
    report = hetsngp.evaluate(fitted(), [(x, labels_for(x))], ood={"far": [x]}, show=False)
    check_finite(report.id["accuracy"] if isinstance(report.id, dict) else report.id.accuracy)


def _update(x: Any) -> None:
    model = fitted("sngp", posterior="momentum")
    model.update_posterior(x)
    check_model(model)


def _ensemble(x: Any) -> None:
    ensemble = hetsngp.Ensemble([fitted(), fitted("deterministic")])
    check_prediction(ensemble.predict(x))
    check_probs(ensemble.predict_probs(x))
    check_probs(ensemble(x).exp())


def _probs(x: Any) -> None:
    check_probs(fitted().predict_probs(x))


CALLS: dict[str, Callable[[Any], None]] = {
    "predict": _predict,
    "predict_probs": _probs,
    "model(x)": _forward,
    "loss": _loss,
    "utility": _utility,
    "latent": _latent,
    "fit_posterior": _fit_posterior,
    "calibration": _calibrate,
    "train": _train,
    "validation": _validate,
    "extract_features": _extract,
    "fit_head": _fit_head,
    "evaluate": _evaluate,
    "update_posterior": _update,
    "Ensemble": _ensemble,
}


COMMON = (
    *("NaN", "inf", "complex64", "strings", "None", "empty batch", "three columns", "meta", "sparse"),
    *("one example without batch", "quantized", "nested", "empty list"),
    *("1e30", "3e38", "1e-45", "float16", "float64", "int64", "NumPy float32", "list", "dict", "pandas"),
)
"""Inputs that every function gets; ``predict`` gets all."""


def input_cases() -> Iterator[Case]:
    for call, function in CALLS.items():
        for name, make in bad_inputs().items():
            if call == "predict" or name in COMMON:
                yield f"{call}: x is {name}", lambda f=function, m=make: accepted(f(m()))
        for name, make in odd_inputs().items():
            if call == "predict" or name in COMMON:
                yield f"{call}: x is {name}", lambda f=function, m=make: f(m())
    for method in METHODS:
        for link in ("softmax", "sigmoid"):
            if method == "posterior_network" and link == "sigmoid":
                continue
            for name in ("1e30", "1e38", "1e-45"):
                make = odd_inputs()[name]
                yield (
                    f"methods: {method} {link}, x is {name}",
                    lambda m=method, k=link, x=make: _predict(x(), m, link=k),
                )
    for posterior in ("exact", "shared", "momentum", "none"):
        for name in ("1e30", "1e38"):
            make = odd_inputs()[name]
            yield (
                f"methods: posterior {posterior}, x is {name}",
                lambda p=posterior, x=make: _predict(x(), "hetsngp", posterior=p),
            )
    for normalization in ("direction", "polar", "power"):
        for name in ("1e30", "3e38", "1e-45"):
            make = odd_inputs()[name]
            yield (
                f"methods: normalization {normalization}, x is {name}",
                lambda n=normalization, x=make: _predict(x(), "sngp", normalization=n),
            )


# --- labels and weights ---------------------------------------------------------------------------------


def bad_labels() -> dict[str, Callable[[], Any]]:
    y = blobs()[1]
    hot = nn.functional.one_hot(y, CLASSES)
    return {
        "a list": y.tolist,
        "NumPy": y.numpy,
        "None": lambda: None,
        "a number": lambda: 1,
        "negative": lambda: y - 1,
        "too large": lambda: y + 1,
        "2**62": lambda: y + 2**62,
        "float": y.float,
        "NaN": lambda: torch.full((EXAMPLES,), NAN),
        "bool": lambda: y > 0,
        "complex": lambda: y.to(torch.complex64),
        "too short": lambda: y[:5],
        "too long": lambda: torch.cat([y, y]),
        "empty": lambda: y[:0],
        "a column": lambda: y[:, None],
        "one-hot": lambda: hot,
        "NaN shares": lambda: hot.float() * NAN,
        "a scalar": lambda: y[0],
        "meta": lambda: y.to("meta"),
        "sparse": lambda: y.to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(y.float(), 1.0, 0, torch.qint8),
        "strings": lambda: np.array(["a"] * EXAMPLES),
        "nested": lambda: torch.nested.nested_tensor([y[:6], y[6:]]),
    }


def bad_multi_hot() -> dict[str, Callable[[], Any]]:
    hot = nn.functional.one_hot(blobs()[1], CLASSES).float()
    return {
        "class numbers": lambda: blobs()[1],
        "NaN": lambda: hot * NAN,
        "inf": lambda: hot / 0,
        "negative": lambda: hot - 1,
        "too large": lambda: hot * 2,
        "too few columns": lambda: hot[:, :2],
        "complex": lambda: hot.to(torch.complex64),
        "NumPy": hot.numpy,
        "meta": lambda: hot.to("meta"),
        "sparse": lambda: hot.to_sparse(),
        "None": lambda: None,
    }


def bad_weights() -> dict[str, Callable[[], Any]]:
    ones = torch.ones(EXAMPLES)
    return {
        "NaN": lambda: ones * NAN,
        "inf": lambda: ones * INF,
        "negative": lambda: -ones,
        "too short": lambda: ones[:5],
        "a column": lambda: ones[:, None],
        "a list": ones.tolist,
        "NumPy": ones.numpy,
        "a number": lambda: 1.0,
        "complex": lambda: ones.to(torch.complex64),
        "meta": lambda: ones.to("meta"),
        "sparse": ones.to_sparse,
        "strings": lambda: ["a"] * EXAMPLES,
    }


COMMON_LABELS = (
    *("NumPy", "negative", "too large", "float", "too short", "a column", "meta", "sparse", "None", "NaN"),
    *("class numbers", "complex", "one-hot"),
)
"""Labels that every function gets; ``loss`` gets all."""


def label_cases() -> Iterator[Case]:
    x, y = blobs()

    def users(link: str) -> dict[str, Callable[[Any], Any]]:
        def held_out(labels: Any) -> Any:
            good = blobs(60)[1]
            good = nn.functional.one_hot(good, CLASSES) if link == "sigmoid" else good
            return hetsngp.fit_posterior(fitted(link=link), [(blobs(60)[0], good)], [(x, labels)])

        def validated(labels: Any) -> Any:
            good = blobs(60)[1]
            good = nn.functional.one_hot(good, CLASSES) if link == "sigmoid" else good
            return train(fitted(link=link), [(blobs(60)[0], good)], epochs=1, validation=[(x, labels)])

        return {
            "loss": lambda labels: fitted(link=link).loss(x, labels),
            "fit_posterior": lambda labels: hetsngp.fit_posterior(fitted(link=link), [(x, labels)]),
            "calibration": held_out,
            "train": lambda labels: train(fitted(link=link), [(x, labels)], epochs=1),
            "validation": validated,
            "extract_features": lambda labels: hetsngp.extract_features(fitted(link=link), [(x, labels)]),
            "fit_head": lambda labels: hetsngp.fit_head(
                fitted(link=link), [(x, labels)], calibration=None, epochs=1
            ),
            "evaluate": lambda labels: hetsngp.evaluate(fitted(link=link), [(x, labels)], show=False),
            "set_thresholds": lambda labels: set_thresholds(fitted(link=link).predict(x), labels),
        }

    # Labels in a form that some functions take on purpose.
    taken = {("evaluate", "NumPy"), *(("set_thresholds", name) for name in ("a list", "NumPy", "one-hot"))}
    for link, labels in (("softmax", bad_labels()), ("sigmoid", bad_multi_hot())):
        for user, use in users(link).items():
            for name, make in labels.items():
                if user != "loss" and name not in COMMON_LABELS:
                    continue
                if (user, name) in taken or (
                    user == "set_thresholds" and link == "sigmoid" and name == "class numbers"
                ):
                    yield f"labels: {user}, {link}, {name}", lambda u=use, m=make: u(m())
                else:
                    yield f"labels: {user}, {link}, {name}", lambda u=use, m=make: accepted(u(m()))
    weighted: dict[str, Callable[[Any], Any]] = {
        "loss": lambda weight: fitted().loss(x, y, weight=weight),
        "fit_posterior": lambda weight: hetsngp.fit_posterior(fitted(), [(x, y, weight)]),
        "train": lambda weight: train(fitted(), [(x, y, weight)], epochs=1),
        "train a new model": lambda weight: train(build(dataset_size=None), [(x, y, weight)], epochs=1),
        "validation": lambda weight: train(fitted(), [(x, y)], epochs=1, validation=[(x, y, weight)]),
        "fit_head": lambda weight: hetsngp.fit_head(fitted(), [(x, y, weight)], calibration=None, epochs=1),
        "class counts": lambda weight: train(
            build("posterior_network", dataset_size=None), [(x, y, weight)], epochs=1
        ),
    }
    for user, use in weighted.items():
        for name, make in bad_weights().items():
            if user != "loss" and name in ("inf", "a column", "a list", "a number", "strings"):
                continue
            yield f"weights: {user}, {name}", lambda u=use, m=make: accepted(u(m()))


# --- loaders --------------------------------------------------------------------------------------------


RARE_LOADERS = (
    *("a number", "an array", "empty dict", "an empty stream", "four values", "None batches", "numbers"),
    *("other rank later", "other dtype later", "empty batch later", "dict without labels", "a module"),
)


def loader_cases() -> Iterator[Case]:
    x, y = blobs()

    def used_up() -> Any:
        batches = iter([(x, y)])
        next(batches)
        return batches

    def breaks() -> Iterator[Any]:
        yield x, y
        raise OSError("the disk is gone")

    loaders: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "a number": lambda: 3,
        "a string": lambda: "data",
        "a tensor": lambda: x,
        "an array": x.numpy,
        "empty list": list,
        "empty dict": dict,
        "used up": used_up,
        "a Dataset": lambda: TensorDataset(x, y),
        "an empty stream": lambda: DataLoader(Stream([]), batch_size=None),
        "x alone": lambda: [x],
        "four values": lambda: [(x, y, y, y)],
        "strings": lambda: ["ab", "cd"],
        "None batches": lambda: [None],
        "numbers": lambda: [1, 2],
        "one batch, not in a list": lambda: (x, y),
        "other width later": lambda: [(x, y), (torch.ones(4, 3), y[:4])],
        "other rank later": lambda: [(x, y), (torch.ones(4, 2, 2), y[:4])],
        "other dtype later": lambda: [(x, y), (x.to(torch.complex64), y)],
        "NaN later": lambda: [(x, y), (_with(NAN), y)],
        "empty batch later": lambda: [(x, y), (x[:0], y[:0])],
        "labels swapped with inputs": lambda: [(y, x)],
        "dict without labels": lambda: [{"x": x}],
        "a module": lambda: nn.Linear(2, 2),
    }
    users: dict[str, Callable[[Any], Any]] = {
        "fit_posterior": lambda data: hetsngp.fit_posterior(fitted(), data),
        "calibration": lambda data: hetsngp.fit_posterior(fitted(), [blobs(60)], data),
        "train": lambda data: train(fitted(), data, epochs=1),
        "train a new model": lambda data: train(build(dataset_size=None), data, epochs=1),
        "train counts": lambda data: train(build("posterior_network", dataset_size=None), data, epochs=1),
        "validation": lambda data: train(fitted(), [(x, y)], epochs=1, validation=data),
        "mean_nll": lambda data: mean_nll(fitted(), data),
        "extract_features": lambda data: hetsngp.extract_features(fitted(), data),
        "fit_head": lambda data: hetsngp.fit_head(fitted(), data, calibration=None, epochs=1),
        "evaluate": lambda data: hetsngp.evaluate(fitted(), data, show=False),
        "evaluate ood": lambda data: hetsngp.evaluate(fitted(), [(x, y)], ood={"far": data}, show=False),
    }
    right = {("calibration", "None"), ("validation", "None"), ("evaluate ood", "x alone")}
    for user, use in users.items():
        for name, make in loaders.items():
            if (user, name) in right or (user not in ("fit_posterior", "train") and name in RARE_LOADERS):
                continue
            yield f"loaders: {user}, {name}", lambda u=use, m=make: accepted(u(m()))
        # An error of the loader's own passes unchanged.
        yield f"loaders: {user}, one that fails", lambda u=use: _passes(OSError, lambda: u(breaks()))
    both = functools.partial(_two_members, "hetsngp", "sngp")
    yield (
        "loaders: fit_posterior of an ensemble, iterator",
        lambda: accepted(hetsngp.fit_posterior(both(), iter([(x, y)]))),
    )
    yield "loaders: train an ensemble, iterator", lambda: accepted(train(both(), iter([(x, y)]), epochs=1))
    data = TensorDataset(x, y)
    batches = DataLoader(data, batch_size=4)
    yield (
        "loaders: calibration is the training loader",
        lambda: accepted(hetsngp.fit_posterior(fitted(), batches, batches)),
    )
    yield (
        "loaders: calibration is the training data",
        lambda: accepted(hetsngp.fit_posterior(fitted(), batches, DataLoader(data, batch_size=6))),
    )
    yield (
        "loaders: calibration of one example",
        lambda: accepted(hetsngp.fit_posterior(fitted(), [(x, y)], [(x[:1], y[:1])])),
    )


def _two_members(*methods: str) -> Any:
    return hetsngp.Ensemble([fitted(method) for method in methods])


def _passes(kind: type[Exception], call: Callable[[], Any]) -> None:
    try:
        call()
    except kind:
        return
    except Exception as error:
        raise Wrong(f"{kind.__name__} of the caller became {type(error).__name__}: {error}") from error
    raise Wrong(f"{kind.__name__} of the caller was swallowed")


# --- options --------------------------------------------------------------------------------------------

WRONG_TYPES: tuple[Any, ...] = ("8", None, True, [1], NAN, torch.ones(2))


def option_cases() -> Iterator[Case]:
    for name in (f.name for f in __import__("dataclasses").fields(Options)):
        for value in (*WRONG_TYPES, {}, -1, 0, 10**12, 2**70, INF):
            yield f"options: build({name}={_short(value)})", lambda n=name, v=value: _build_with(n, v)
    for value in (*WRONG_TYPES, 0, 1, -3, 10**12, 2**70):
        yield (
            f"options: num_classes={_short(value)}",
            lambda v=value: accepted(hetsngp.build("hetsngp", network(), v)),
        )
        yield f"options: method={_short(value)}", lambda v=value: accepted(hetsngp.build(v, network(), 3))
        yield (
            f"options: backbone={_short(value)}",
            lambda v=value: accepted(hetsngp.build("hetsngp", v, 3)),
        )
    x, y = blobs()
    for value in (*WRONG_TYPES, 0, -1, 10**12, 2**70, 2.5):
        if value is not None:
            for call in ("predict", "predict_probs"):
                yield (
                    f"options: {call}(num_samples={_short(value)})",
                    lambda c=call, v=value: accepted(getattr(fitted(), c)(x, num_samples=v)),
                )
        if value is not None:
            yield (
                f"options: evaluate(num_samples={_short(value)})",
                lambda v=value: accepted(hetsngp.evaluate(fitted(), [(x, y)], num_samples=v, show=False)),
            )
            yield (
                f"options: temperature={_short(value)}",
                lambda v=value: _set_temperature(v),
            )
            yield (
                f"options: dataset_size={_short(value)}",
                lambda v=value: _set_dataset_size(v),
            )
        yield f"options: class_counts={_short(value)}", lambda v=value: accepted(_set_counts(v))
        for name in ("epochs", "lr", "weight_decay", "gp_lr_multiplier", "momentum", "warmup", "gamma"):
            yield f"options: Schedule({name}={_short(value)})", lambda n=name, v=value: _schedule(n, v)
        for name in ("optimizer", "decay", "milestones", "stop_after"):
            yield f"options: Schedule({name}={_short(value)})", lambda n=name, v=value: _schedule(n, v)
        for name in ("patience", "epochs", "generator", "stop_after"):
            if (name, value) not in (("patience", None), ("generator", None), ("stop_after", None)):
                yield f"options: train({name}={_short(value)})", lambda n=name, v=value: _train_with(n, v)
        yield (
            f"options: fit_posterior(tolerance={_short(value)})",
            lambda v=value: _fit_with_tolerance(v),
        )
        for name in ("epochs", "batch_size", "lr", "weight_decay", "patience", "seed", "calibration"):
            yield f"options: fit_head({name}={_short(value)})", lambda n=name, v=value: _fit_head_with(n, v)
        yield (
            f"options: parameter_groups({_short(value)})",
            lambda v=value: _groups(v),
        )
        yield f"options: evaluate(num_bins={_short(value)})", lambda v=value: _bins(v)
    for value in ("8", 3, True, [1], torch.ones(1), np.random.default_rng(0)):
        for call in ("predict", "predict_probs"):
            yield (
                f"options: {call}(generator={_short(value)})",
                lambda c=call, v=value: accepted(getattr(fitted(), c)(x, generator=v)),
            )
        yield (
            f"options: loss(generator={_short(value)})",
            lambda v=value: accepted(fitted().train().loss(x, y, generator=v)),
        )
        yield (
            f"options: build(generator={_short(value)})",
            lambda v=value: accepted(hetsngp.build("hetsngp", network(), 3, generator=v)),
        )
    for name in ("temprature", "Rank", "", "1"):
        yield f"options: build({name!r}=1)", lambda n=name: accepted(build(**{n: 1}))
        yield (
            f"options: fit_head({name!r}=1)",
            lambda n=name: accepted(hetsngp.fit_head(fitted(), [(x, y)], **{n: 1})),
        )


def _short(value: Any) -> str:
    text = type(value).__name__ if isinstance(value, Tensor | np.random.Generator) else repr(value)
    return "object()" if text.startswith("<object") else text


def _build_with(name: str, value: Any) -> None:
    model = build(**{name: value})
    x, y = blobs()
    hot = nn.functional.one_hot(y, CLASSES)
    if model.config["options"]["features"] == "inducing":
        return
    check_finite(model.loss(x, hot if model.head.sigmoid else y).detach())
    hetsngp.fit_posterior(model, [(x, hot if model.head.sigmoid else y)])
    check_prediction(model.predict(x), sigmoid=model.head.sigmoid)


def _set_temperature(value: Any) -> None:
    model = fitted()
    model.temperature = value
    check_model(model)


def _set_dataset_size(value: Any) -> None:
    model = fitted()
    model.dataset_size = value
    check_finite(model.loss(*blobs()).detach())


def _set_counts(value: Any) -> None:
    model = build("posterior_network")
    model.class_counts = value


def _schedule(name: str, value: Any) -> None:
    given = {"epochs": 2, **({"decay": "step"} if name in ("milestones", "gamma") else {})}
    given |= {"milestones": (1,)} if name == "gamma" else {}
    schedule = Schedule(**{**given, "optimizer": "sgd", name: value})
    if schedule.epochs < 10:
        model = build()
        optimizer = schedule.make_optimizer(model)
        check_finite(*(schedule.set_lr(optimizer, epoch) for epoch in range(int(schedule.epochs))))


def _train_with(name: str, value: Any) -> None:
    if name == "epochs" and isinstance(value, int) and value > 10**9:
        return
    x, y = blobs()
    more = {"validation": [(x, y)]} if name == "patience" else {}
    history = train(build(), [(x, y)], **{"epochs": 2, **more, name: value})
    check_finite(*(result.loss for result in history))


def _fit_with_tolerance(value: Any) -> None:
    x, y = blobs(60)
    report = hetsngp.fit_posterior(fitted(), [(x, y)], [(x + 0.1, y)], tolerance=value)
    check_finite(report.temperature, report.scale)


def _fit_head_with(name: str, value: Any) -> None:
    if name == "epochs" and isinstance(value, int) and value > 10**9:
        return
    x, y = blobs(60)
    model = fitted("sngp")
    hetsngp.fit_head(model, [(x, y)], **{"epochs": 1, "calibration": None, name: value})
    check_model(model)


def _groups(value: Any) -> None:
    model = fitted()
    torch.optim.AdamW(model.parameter_groups(value), lr=1e-3)


def _bins(value: Any) -> None:
    x, y = blobs()
    if isinstance(value, int) and value > 10**9:
        accepted(hetsngp.evaluate(fitted(), [(x, y)], num_bins=value, show=False))
    hetsngp.evaluate(fitted(), [(x, y)], num_bins=value, show=False)


# --- backbones ------------------------------------------------------------------------------------------


def backbone_cases() -> Iterator[Case]:
    x, y = blobs()
    wrong: dict[str, Any] = {
        "None": None,
        "a tuple": (torch.ones(EXAMPLES, 16), 1),
        "a dict": {"logits": torch.ones(EXAMPLES, 16)},
        "NumPy": np.ones((EXAMPLES, 16)),
        "too narrow": torch.ones(EXAMPLES, 15),
        "rank 3": torch.ones(EXAMPLES, 16, 2),
        "rank 1": torch.ones(16),
        "fewer examples": torch.ones(5, 16),
        "more examples": torch.ones(EXAMPLES + 1, 16),
        "no examples": torch.ones(0, 16),
        "NaN": torch.full((EXAMPLES, 16), NAN),
        "inf": torch.full((EXAMPLES, 16), INF),
        "integers": torch.ones(EXAMPLES, 16, dtype=torch.long),
        "bool": torch.ones(EXAMPLES, 16, dtype=torch.bool),
        "complex": torch.ones(EXAMPLES, 16, dtype=torch.complex64),
        "sparse": torch.ones(EXAMPLES, 16).to_sparse(),
        "meta": torch.ones(EXAMPLES, 16, device="meta"),
        "a string": "h",
    }
    uses: dict[str, Callable[[Any], Any]] = {
        "predict": lambda model: model.predict(x),
        "loss": lambda model: model.loss(x, y),
        "fit_posterior": lambda model: hetsngp.fit_posterior(model, [(x, y)]),
        "extract_features": lambda model: hetsngp.extract_features(model, [(x, y)]),
        "utility": lambda model: model.utility(x),
    }
    for method in ("hetsngp", "deterministic", "posterior_network"):
        for name, value in wrong.items():
            for use, call in uses.items():
                if method != "hetsngp" and use not in ("predict", "loss"):
                    continue
                if method == "hetsngp" and use in ("predict", "utility"):
                    make = functools.partial(_swapped, value)
                else:
                    make = functools.partial(build, method, Returns(value))
                if use == "loss" and name in ("NaN", "inf"):
                    continue  # the training loop reports a loss that is not finite
                yield f"backbones: {method} {use}, returns {name}", lambda m=make, c=call: accepted(c(m()))

    def raises(kind: type[Exception]) -> Callable[[Any], Any]:
        def fail(x: Any) -> Any:
            raise kind("the user's own error")

        return fail

    # An error of the user's own code keeps its words.
    for kind in (RuntimeError, ValueError, TypeError, KeyError, ZeroDivisionError, OSError):
        yield (
            f"backbones: raises {kind.__name__}",
            lambda k=kind: _keeps_words(lambda: build(backbone=Returns(raises(k))).loss(x, y)),
        )
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        value = torch.randn(EXAMPLES, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        yield (
            f"backbones: returns {dtype}",
            lambda v=value: _works(build(backbone=Returns(v))),
        )
    for value in (0, -1, True, 16.0, "16", None, 2**70, torch.tensor(16), np.int64(16), NAN):
        module = Returns(torch.ones(EXAMPLES, 16), num_features=value)
        yield f"backbones: num_features={_short(value)}", lambda m=module: _works_or_raises(m)
    for method in ("hetsngp", "mimo", "hetsngp_mimo"):
        yield f"backbones: shared by two models of {method}", lambda m=method: _shared_backbone(m)
    yield "backbones: a lazy layer", lambda: accepted(build(backbone=_lazy()))
    yield "backbones: on the meta device", lambda: accepted(_works(build(backbone=network().to("meta"))))
    yield "backbones: integer weights", lambda: accepted(_works(build(backbone=_integer_network())))
    yield (
        "backbones: images too small",
        lambda: check_prediction(_image_model().predict(torch.ones(2, 3, 1, 1))),
    )
    for name, image in {
        "flat": torch.ones(2, 3 * 64),
        "grey": torch.ones(2, 1, 8, 8),
        "channels last": torch.ones(2, 8, 8, 3),
        "uint8": torch.ones(2, 3, 8, 8, dtype=torch.uint8),
        "float64": torch.ones(2, 3, 8, 8, dtype=torch.float64),
        "one image": torch.ones(3, 8, 8),
        "NumPy": np.ones((2, 3, 8, 8), dtype=np.float32),
        "1e30": torch.full((2, 3, 8, 8), 1e30),
        "NaN": torch.full((2, 3, 8, 8), NAN),
        "no pixels": torch.ones(2, 3, 0, 0),
    }.items():
        yield f"backbones: images, {name}", lambda i=image: check_prediction(_image_model().predict(i))


def _swapped(value: Any) -> Any:
    model = fitted()
    model.backbone = Returns(value)
    return model


def _keeps_words(call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception as error:
        if "the user's own error" in str(error):
            return
        raise Wrong(f"the words are lost: {error}") from error
    raise Wrong("an error of the backbone was swallowed")


def _works(model: Any) -> None:
    x, y = blobs()
    check_finite(model.loss(x, y).detach())
    hetsngp.fit_posterior(model, [(x, y)])
    check_prediction(model.predict(x))


def _works_or_raises(module: nn.Module) -> None:
    _works(build(backbone=module))


def _lazy() -> nn.Module:
    net = nn.Sequential(nn.LazyLinear(16))
    net.num_features = 16  # type: ignore[assignment]
    return net


def _integer_network() -> nn.Module:
    net = nn.Linear(2, 16)
    net.weight = nn.Parameter(torch.ones(16, 2, dtype=torch.int8), requires_grad=False)
    net.num_features = 16  # type: ignore[assignment]
    return net


def _image_model() -> Any:
    net = WideResNet(depth=10, width=1, generator=torch.Generator().manual_seed(0))
    model = build(backbone=net)
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    hetsngp.fit_posterior(model, [(images, torch.arange(6) % CLASSES)])
    return model.eval()


def _shared_backbone(method: str) -> None:
    shared = network()
    build(method, shared)
    x, y = blobs()
    check_finite(build(method, shared).loss(x, y).detach())


# --- states of a model ----------------------------------------------------------------------------------


def _state_changes() -> dict[str, Callable[[Any], Any]]:
    """Changes after which a prediction is still right."""

    def saved_and_loaded(model: Any) -> Any:
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        model.load_state_dict(torch.load(buffer, weights_only=True))
        return model

    def loaded_into_new(model: Any) -> Any:
        new = build().eval()
        new.load_state_dict(model.state_dict())
        return new

    return {
        "as it is": lambda m: m,
        "eval": lambda m: m.eval(),
        "train mode": lambda m: m.train(),
        "half": lambda m: m.half(),
        "bfloat16": lambda m: m.bfloat16(),
        "double": lambda m: m.double(),
        "half and back": lambda m: m.half().float(),
        "to cpu": lambda m: m.to("cpu"),
        "backbone half": lambda m: (m.backbone.half(), m)[1],
        "head double": lambda m: (m.head.double(), m)[1],
        "deepcopy": copy.deepcopy,
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        "state_dict": saved_and_loaded,
        "state_dict into a new model": loaded_into_new,
        "assigned state": lambda m: (m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True), m)[1],
        "frozen": lambda m: m.requires_grad_(False),
        "share memory": lambda m: m.share_memory(),
        "compiled": lambda m: (m.compile(backend="eager"), m)[1],
        "channels last": lambda m: m.to(memory_format=torch.channels_last),
        "zero grad": lambda m: (m.zero_grad(), m)[1],
        "one cell copied onto itself": _touch,
    }


def _touch(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.clone())
    return model


def _stale_changes() -> dict[str, Callable[[Any], Any]]:
    """Changes that make a posterior stale."""
    x, y = blobs()

    def step(model: Any, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
        optimizer = kind(model.parameters(), lr=1e-3, **options)
        model.loss(x, y).backward()
        optimizer.step()
        return model

    def other_weights(model: Any) -> Any:
        state = model.state_dict()
        state = {
            n: t + 0.01 if t.is_floating_point() and n.startswith("backbone") else t for n, t in state.items()
        }
        model.load_state_dict(state)
        return model

    def edit(model: Any, change: Callable[[Tensor], Any]) -> Any:
        with torch.no_grad():
            change(next(model.parameters()))
        return model

    def after(first: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda m: edit(first(m), lambda p: p.mul_(1.5))

    def replace_parameter(model: Any) -> Any:
        layer = next(m for m in model.backbone.modules() if isinstance(m, nn.Linear))
        layer.weight = nn.Parameter(layer.weight.detach() * 1.5)
        return model

    return {
        "SGD in eval mode": lambda m: step(m, torch.optim.SGD),
        "AdamW in eval mode": lambda m: step(m, torch.optim.AdamW),
        "fused AdamW in eval mode": lambda m: step(m, torch.optim.AdamW, fused=True),
        "foreach SGD in eval mode": lambda m: step(m, torch.optim.SGD, foreach=True),
        "SGD in training mode": lambda m: step(m.train(), torch.optim.SGD).eval(),
        "load_state_dict of other weights": other_weights,
        "mul_": lambda m: edit(m, lambda p: p.mul_(1.5)),
        "sign": lambda m: edit(m, lambda p: p.neg_()),
        "one value": lambda m: edit(m, lambda p: p.view(-1)[0].add_(1e-3)),
        "permuted": lambda m: edit(m, lambda p: p.copy_(p.flip(0))),
        "data replaced": lambda m: edit(m, lambda p: setattr(p, "data", p.data * 1.5)),
        "parameter replaced": replace_parameter,
        "deepcopy, then edited": after(copy.deepcopy),
        "pickled, then edited": after(lambda m: pickle.loads(pickle.dumps(m))),
        "half, then edited": after(lambda m: m.half()),
        "double, then edited": after(lambda m: m.double()),
        "state_dict, then edited": after(_state_changes()["state_dict"]),
        "edited, then deepcopy": lambda m: copy.deepcopy(edit(m, lambda p: p.mul_(1.5))),
        "edited, then pickled": lambda m: pickle.loads(pickle.dumps(edit(m, lambda p: p.mul_(1.5)))),
        "edited, then double": lambda m: edit(m, lambda p: p.mul_(1.5)).double(),
        "edited, then half": lambda m: edit(m, lambda p: p.mul_(1.5)).half(),
    }


def _warns_of_stale(model: Any, expected: bool) -> None:
    import warnings

    dtype = next(p.dtype for p in model.backbone.parameters())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        prediction = model.predict(blobs()[0].to(dtype))
    stale = any("trained after fit_posterior" in str(warning.message) for warning in found)
    if stale is not expected:
        raise Wrong("a stale posterior is not noticed" if expected else "false alarm of a stale posterior")
    check_prediction(prediction)


def state_cases() -> Iterator[Case]:
    x, y = blobs()
    for method in ("hetsngp", "mimo", "hetsngp_mimo", "posterior_network"):
        for name, change in _state_changes().items():
            if method != "hetsngp" and name == "state_dict into a new model":
                continue
            yield f"states: {method}, {name}", lambda m=method, c=change: _warns_of_stale(c(fitted(m)), False)
    for method in ("hetsngp",):
        for name, change in _stale_changes().items():
            for predicted in (False, True):

                def case(m: str = method, c: Any = change, p: bool = predicted) -> None:
                    model = fitted(m)
                    if p:
                        model.predict(x)
                    _warns_of_stale(c(model), True)

                yield f"states: {method} stale, {name}{', after a prediction' if predicted else ''}", case
    names = [n for n, t in fitted().state_dict().items() if t.is_floating_point()]
    for name in names:
        for value in (NAN, INF):
            inner = functools.partial(_spoiled, name, value)
            yield f"weights of NaN: predict, {value} in {name}", lambda i=inner: accepted(i().predict(x))
    for name in (n for n, _ in fitted().named_parameters()):
        inner = functools.partial(_spoiled, name, NAN)
        yield (
            f"weights of NaN: fit_posterior, {name}",
            lambda i=inner: accepted(hetsngp.fit_posterior(i(), [(x, y)])),
        )
        yield f"weights of NaN: predict_probs, {name}", lambda i=inner: accepted(i().predict_probs(x))
        yield f"weights of NaN: utility, {name}", lambda i=inner: accepted(i().utility(x))
        yield (
            f"weights of NaN: ensemble, {name}",
            lambda i=inner: accepted(hetsngp.Ensemble([fitted(), i()]).predict(x)),
        )
        yield (
            f"weights of NaN: extract_features, {name}",
            lambda i=inner, n=name: _finite_features(i(), n),
        )
        yield (
            f"weights of NaN: evaluate, {name}",
            lambda i=inner: accepted(hetsngp.evaluate(i(), [(x, y)], show=False)),
        )
        yield f"weights of NaN: train, {name}", lambda i=inner: accepted(train(i(), [(x, y)], epochs=1))
    for method in METHODS:
        yield (
            f"weights of NaN: {method}",
            lambda m=method: accepted(
                _spoil(fitted(m), next(n for n, _ in fitted(m).named_parameters())).predict(x)
            ),
        )
        yield f"weights of NaN: {method}, all zero", lambda m=method: _zeroed(m)
        yield f"weights of NaN: {method}, all 1e30", lambda m=method: _zeroed(m, 1e30)
    yield "states: not fitted", lambda: accepted(build().predict(x))
    yield "states: on the meta device", lambda: accepted(fitted().to("meta").predict(x))
    yield "states: all on the meta device", lambda: accepted(fitted().to("meta").predict(x.to("meta")))
    yield (
        "states: meta, fit_posterior",
        lambda: accepted(hetsngp.fit_posterior(fitted().to("meta"), [(x, y)])),
    )
    yield "states: meta, loss", lambda: accepted(fitted().to("meta").loss(x, y))
    yield "states: float32 input, half model", lambda: _odd_precision(torch.float16, torch.float32)
    yield "states: float64 input, half model", lambda: _odd_precision(torch.float16, torch.float64)
    yield "states: half input, double model", lambda: _odd_precision(torch.float64, torch.float16)
    yield "states: float32 input, double model", lambda: _odd_precision(torch.float64, torch.float32)
    yield "states: training a half model", lambda: _trains(torch.float16)
    yield "states: training a bfloat16 model", lambda: _trains(torch.bfloat16)
    yield "states: training a double model", lambda: _trains(torch.float64)
    yield (
        "states: training a frozen model",
        lambda: accepted(train(fitted().requires_grad_(False), [(x, y)], epochs=1)),
    )
    yield "states: complex model", lambda: accepted(_complex_model().predict(x))


def _finite_features(model: Any, name: str) -> None:
    features = hetsngp.extract_features(model, [blobs()])
    check_finite(features.h)
    if name.startswith("backbone"):
        accepted(features)


def _spoil(model: Any, name: str, value: float = NAN) -> Any:
    tensor = model.state_dict()[name]
    with torch.no_grad():
        tensor[(0,) * tensor.dim()] = value
    return model


def _spoiled(name: str, value: float) -> Any:
    return _spoil(fitted(), name, value)


def _zeroed(method: str, value: float = 0.0) -> None:
    model = fitted(method)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    check_model(model)


def _odd_precision(of_model: torch.dtype, of_input: torch.dtype) -> None:
    check_prediction(fitted().to(of_model).predict(blobs()[0].to(of_input)))


def _trains(dtype: torch.dtype) -> None:
    x, y = blobs()
    model = fitted().to(dtype)
    check_finite(*(result.loss for result in train(model, [(x.to(dtype), y)], epochs=1)))
    hetsngp.fit_posterior(model, [(x.to(dtype), y)])
    check_model(model)


def _complex_model() -> Any:
    model = fitted()
    for parameter in model.backbone.parameters():
        parameter.data = parameter.data.to(torch.complex64)
    return model


# --- whole functions ------------------------------------------------------------------------------------


def function_cases() -> Iterator[Case]:
    x, y = blobs()
    strange: dict[str, Any] = {
        "None": None,
        "a string": "model",
        "a number": 3,
        "a tensor": x,
        "a module": nn.Linear(2, 3),
        "a list": [1],
    }
    for name, value in strange.items():
        calls: dict[str, Callable[[Any], Any]] = {
            "fit_posterior": lambda v: hetsngp.fit_posterior(v, [(x, y)]),
            "train": lambda v: train(v, [(x, y)], epochs=1),
            "fit_head": lambda v: hetsngp.fit_head(v, [(x, y)]),
            "extract_features": lambda v: hetsngp.extract_features(v, [(x, y)]),
            "evaluate": lambda v: hetsngp.evaluate(v, [(x, y)], show=False),
            "save": lambda v: hetsngp.save(v, Path("nothing")),
            "Ensemble": lambda v: hetsngp.Ensemble(v),
            "Ensemble of": lambda v: hetsngp.Ensemble([fitted(), v]),
            "convert": lambda v: hetsngp.convert(v, example_input="x"),
            "build_ensemble": lambda v: hetsngp.build_ensemble(v, lambda g: network(), 3),
            "build_ensemble network": lambda v: hetsngp.build_ensemble("sngp", v, 3),
            "build_ensemble seeds": lambda v: hetsngp.build_ensemble("sngp", lambda g: network(), 3, seeds=v),
            "mean_nll": lambda v: mean_nll(v, [(x, y)]),
            "restrict": lambda v: restrict(v, ClassMap(torch.tensor([0]), ("a",))),
            "restrict by": lambda v: restrict(fitted(), v),
            "ClassMap": lambda v: ClassMap(v, ("a",)),
            "ClassMap.between": lambda v: ClassMap.between(v, ["a"]),
            "FeatureSet": lambda v: hetsngp.FeatureSet(v, v),
            "FeatureSet labels": lambda v: hetsngp.FeatureSet(x, v),
            "FeatureSet.load": lambda v: hetsngp.FeatureSet.load(v),
            "Prediction.cat": lambda v: Prediction.cat(v),
            "Prediction index": lambda v: (
                fitted().predict(x)[v] if not isinstance(v, type(None)) else accepted(0)
            ),
            "verdicts": lambda v: verdicts(fitted().predict(x), v, ("a", "b", "c")),
            "verdicts names": lambda v: verdicts(fitted().predict(x), _thresholds(), v),
            "verdicts of": lambda v: verdicts(v, _thresholds(), ("a", "b", "c")),
            "set_thresholds": lambda v: set_thresholds(v, y),
            "set_thresholds correct": lambda v: set_thresholds(fitted().predict(x), y, correct=v),
            "set_thresholds unfamiliar": lambda v: set_thresholds(fitted().predict(x), y, unfamiliar=v),
            "Thresholds.from_dict": lambda v: Thresholds.from_dict(v),
        }
        right = {("build_ensemble seeds", "a list"), ("ClassMap.between", "a list"), ("mean_nll", "a module")}
        right |= {("FeatureSet", "a tensor"), ("FeatureSet labels", "a tensor")}
        right |= {
            ("Prediction index", "None"),
            ("Prediction index", "a number"),
            ("Prediction index", "a list"),
        }
        right |= {("ClassMap.between", "a string"), ("verdicts names", "a string")}
        for call, function in calls.items():
            if (call, name) not in right:
                yield f"functions: {call}({name})", lambda f=function, v=value: accepted(f(v))
    yield "functions: Ensemble of a model twice", lambda: accepted(_twice())
    yield (
        "functions: Ensemble of other classes",
        lambda: accepted(hetsngp.Ensemble([fitted(), hetsngp.build("sngp", network(), 4)])),
    )
    yield (
        "functions: Ensemble of other links",
        lambda: accepted(hetsngp.Ensemble([fitted(), fitted(link="sigmoid")])),
    )
    yield (
        "functions: Ensemble of other widths",
        lambda: accepted(hetsngp.Ensemble([fitted(), build(backbone=network(3))]).predict(x)),
    )
    yield (
        "functions: Ensemble of other precisions",
        lambda: _works_ensemble(hetsngp.Ensemble([fitted(), fitted().double()])),
    )
    yield (
        "functions: Ensemble on two devices",
        lambda: accepted(hetsngp.Ensemble([fitted(), fitted().to("meta")]).predict(x)),
    )
    for name, value in {"labels short": (x, y[:3], None), "weights short": (x, y, torch.ones(3))}.items():
        yield f"functions: FeatureSet, {name}", lambda v=value: accepted(hetsngp.FeatureSet(*v))
    for name, make in {
        "NaN": lambda: torch.full((EXAMPLES, 16), NAN),
        "other width": lambda: torch.ones(EXAMPLES, 3),
        "rank 1": lambda: torch.ones(EXAMPLES),
        "complex": lambda: torch.ones(EXAMPLES, 16, dtype=torch.complex64),
        "integers": lambda: torch.ones(EXAMPLES, 16, dtype=torch.long),
        "bool": lambda: torch.ones(EXAMPLES, 16, dtype=torch.bool),
        "empty": lambda: torch.ones(0, 16),
        "meta": lambda: torch.ones(EXAMPLES, 16, device="meta"),
        "sparse": lambda: torch.ones(EXAMPLES, 16).to_sparse(),
        "1e30": lambda: torch.randn(EXAMPLES, 16) * 1e30,
        "1e38": lambda: torch.randn(EXAMPLES, 16).sign() * 1e38,
        "1e-40": lambda: torch.randn(EXAMPLES, 16) * 1e-40,
        "equal": lambda: torch.ones(EXAMPLES, 16),
    }.items():
        may_work = name in ("1e30", "1e38", "1e-40", "equal", "integers", "bool")
        for how in ("adamw", "lbfgs"):
            yield (
                f"functions: fit_head on features, {name}, {how}",
                lambda m=make, w=may_work, h=how: _head_on(m(), w, h),
            )
    yield (
        "functions: convert without a linear layer",
        lambda: accepted(hetsngp.convert(nn.ReLU(), example_input=x)),
    )
    yield "functions: convert a model", lambda: accepted(hetsngp.convert(fitted(), example_input=x))
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    for name, make in bad_inputs().items():
        if name not in ("None", "NaN in float64", "NaN in float16"):
            yield (
                f"functions: convert, example {name}",
                lambda m=make: hetsngp.convert(net, example_input=m()).conversion and None,
            )
    for value in ("nothing", 3, nn.Linear(2, 2), ["2"]):
        yield (
            f"functions: convert(classifier={_short(value)[:20]})",
            lambda v=value: accepted(hetsngp.convert(net, example_input=x, classifier=v)),
        )
    for value in (0, -1, NAN, "c", None, INF, [1]):
        yield (
            f"functions: bound_spectrally({_short(value)})",
            lambda v=value: accepted(bound_spectrally(network(), v)),
        )
    yield "functions: load a missing folder", lambda: accepted(hetsngp.load("nowhere"))
    yield "functions: save an unnamed backbone", lambda: _save(build(backbone=Returns(torch.ones(12, 16))))


def _save(model: Any) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        hetsngp.save(model, Path(folder) / "model")


def _twice() -> Any:
    model = fitted()
    return hetsngp.Ensemble([model, model])


def _works_ensemble(ensemble: Any) -> None:
    check_prediction(ensemble.predict(blobs()[0]))


def _head_on(h: Tensor, may_work: bool, how: str) -> None:
    model = fitted("sngp")
    given = {"epochs": 1} if how == "adamw" else {"features": "inducing"}
    try:
        features = hetsngp.FeatureSet(h, blobs()[1])
        hetsngp.fit_head(model, features, calibration=None, **given)
    finally:
        check_model(fitted("sngp"))
    if not may_work:
        accepted(model)
    check_prediction(model.on_features().predict(h.float()))


def _thresholds() -> Thresholds:
    return Thresholds(0.9, 1.0, correct=0.95, share=0.05, held_out=100, accuracy=0.96, coverage=0.7)


# --- metrics and mathematics ----------------------------------------------------------------------------


RARE = ("a number", "an object", "inf", "quantized", "no classes", "rank 3", "a scalar", "strings")


def metric_cases() -> Iterator[Case]:
    probs = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])
    y = torch.tensor([0, 1, 2])
    hot = nn.functional.one_hot(y, 3)
    strange: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "a string": lambda: "probs",
        "a number": lambda: 3,
        "an object": NotATensor,
        "NaN": lambda: torch.full((3, 3), NAN),
        "inf": lambda: torch.full((3, 3), INF),
        "complex": lambda: probs.to(torch.complex64),
        "meta": lambda: probs.to("meta"),
        "sparse": probs.to_sparse,
        "quantized": lambda: torch.quantize_per_tensor(probs, 0.1, 0, torch.qint8),
        "empty": lambda: probs[:0],
        "no classes": lambda: probs[:, :0],
        "rank 1": lambda: probs[0],
        "rank 3": lambda: probs[None],
        "a scalar": lambda: torch.tensor(1.0),
        "logits": lambda: probs * 10 - 3,
        "strings": lambda: np.array([["a"] * 3] * 3),
    }
    of_probs: dict[str, tuple[Callable[..., Any], Any]] = {
        "accuracy": (metrics.accuracy, y),
        "nll": (metrics.nll, y),
        "nll_terms": (metrics.nll_terms, y),
        "brier": (metrics.brier, y),
        "ece": (metrics.ece, y),
        "vote_nll": (metrics.vote_nll, hot),
        "vote_kl": (metrics.vote_kl, hot),
        "precision_at_1": (metrics.precision_at_1, hot),
        "multi_label_nll": (metrics.multi_label_nll, hot),
        "example_terms": (metrics.example_terms, y),
        "example_terms multi": (metrics.example_terms, hot),
    }
    logits_fine = {"accuracy", "precision_at_1"}
    for name, (metric, labels) in of_probs.items():
        for kind, make in strange.items():
            if kind == "NaN" and "terms" in name:
                continue  # NaN where probs are
            if (kind == "logits" and name in logits_fine) or (
                name not in ("nll", "vote_nll") and kind in RARE
            ):
                continue
            yield f"metrics: {name}, probs are {kind}", lambda f=metric, m=make, t=labels: accepted(f(m(), t))
        for kind, make in bad_labels().items():
            if kind not in ("None", "negative", "too large", "NaN", "complex", "meta", "sparse", "a string"):
                continue
            yield (
                f"metrics: {name}, labels are {kind}",
                lambda f=metric, m=make: accepted(f(probs, _three(m()))),
            )
        for kind, make in {"a list": y.tolist, "NumPy": labels.numpy, "list of lists": labels.tolist}.items():
            yield (
                f"metrics: {name}, labels as {kind}",
                lambda f=metric, m=make, t=labels: _same_or_raises(f, (probs, m()), (probs, t)),
            )
        yield (
            f"metrics: {name}, probs as NumPy",
            lambda f=metric, t=labels: _same_or_raises(f, (probs.numpy(), t), (probs, t)),
        )
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            yield (
                f"metrics: {name}, probs as {dtype}",
                lambda f=metric, t=labels, d=dtype: _same_or_raises(f, (probs.to(d), t), (probs, t)),
            )
    scores = torch.tensor([0.1, 0.5, 0.3])
    pairs: dict[str, tuple[Callable[..., Any], Any]] = {
        "auroc": (metrics.auroc, scores + 0.2),
        "aupr": (metrics.aupr, scores + 0.2),
        "fpr95": (metrics.fpr95, scores + 0.2),
        "roc": (metrics.roc, scores + 0.2),
        "auroc_standard_error": (metrics.auroc_standard_error, scores + 0.2),
        "risks": (metrics.risks, scores > 0.2),
        "aurc": (metrics.aurc, scores > 0.2),
        "excess_aurc": (metrics.excess_aurc, scores > 0.2),
        "calibration_error": (metrics.calibration_error, scores > 0.2),
        "reliability_bins": (metrics.reliability_bins, scores > 0.2),
    }
    strange_scores: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "a string": lambda: "scores",
        "a number": lambda: 3,
        "NaN": lambda: scores * NAN,
        "inf": lambda: scores * INF,
        "complex": lambda: scores.to(torch.complex64),
        "meta": lambda: scores.to("meta"),
        "sparse": scores.to_sparse,
        "empty": lambda: scores[:0],
        "a scalar": lambda: torch.tensor(0.3),
        "rank 2": lambda: scores[None],
        "strings": lambda: ["a", "b", "c"],
        "quantized": lambda: torch.quantize_per_tensor(scores, 0.1, 0, torch.qint8),
    }
    for name, (metric, other) in pairs.items():
        for kind, make in strange_scores.items():
            if name not in ("auroc", "aurc", "calibration_error") and kind in RARE:
                continue
            yield f"metrics: {name}, first is {kind}", lambda f=metric, m=make, o=other: accepted(f(m(), o))
            yield f"metrics: {name}, second is {kind}", lambda f=metric, m=make: accepted(f(scores, m()))
        for kind, args in {
            "NumPy": (scores.numpy(), other.numpy()),
            "lists": (scores.tolist(), other.tolist()),
            "float64": (scores.double(), other),
        }.items():
            yield (
                f"metrics: {name}, {kind}",
                lambda f=metric, a=args, o=other: _same_or_raises(f, a, (scores, o)),
            )
    for value in (*WRONG_TYPES, 0, -1, 2, INF):
        yield (
            f"metrics: accuracy_at_coverage({_short(value)})",
            lambda v=value: accepted(metrics.accuracy_at_coverage(scores, scores > 0.2, v)),
        )
    for value in (*WRONG_TYPES, 0, -1, 2.5, 10**12, 2**70):
        for name in ("ece", "calibration_error", "reliability_bins", "quality"):
            yield f"metrics: {name}(num_bins={_short(value)})", lambda n=name, v=value: _metric_bins(n, v)


def _three(labels: Any) -> Any:
    return labels[:3] if isinstance(labels, Tensor) and labels.dim() and not labels.is_sparse else labels


def _same_or_raises(metric: Callable[..., Any], args: Any, reference: Any) -> None:
    found, expected = metric(*args), metric(*reference)
    for a, b in zip(_flat(found), _flat(expected), strict=True):
        if not torch.allclose(a, b, atol=0.02, equal_nan=True):
            raise Wrong(f"{a.tolist()} where {b.tolist()} is right")


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, tuple):
        return [part for item in value for part in _flat(item)]
    if isinstance(value, metrics.Reliability):
        return [value.count.double(), value.confidence, value.accuracy]
    return [torch.as_tensor(NAN if value is None else value).double()]


def _metric_bins(name: str, value: Any) -> None:
    probs, y = torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 1])
    if name == "ece":
        accepted(metrics.ece(probs, y, num_bins=value))
    if name == "quality":
        accepted(metrics.quality(*metrics.example_terms(probs, y), num_bins=value))
    accepted(getattr(metrics, name)(probs.amax(-1), y == y, num_bins=value))


# --- the estimator --------------------------------------------------------------------------------------


@functools.cache
def _estimator() -> Any:
    x, y = blobs(60)
    model = hetsngp.HetSNGPClassifier(width=16, depth=1, epochs=2, random_features=32, random_state=0)
    return model.fit(x.numpy(), y.numpy())


def estimator_cases() -> Iterator[Case]:
    x, y = (t.numpy() for t in blobs(60))
    strange: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "a string": lambda: "x",
        "a number": lambda: 3.0,
        "NaN": lambda: np.where(x > 2, np.nan, x),
        "inf": lambda: np.where(x > 2, np.inf, x),
        "strings": lambda: np.array([["a", "b"]] * 60),
        "empty": lambda: x[:0],
        "no columns": lambda: x[:, :0],
        "other width": lambda: np.ones((60, 3)),
        "rank 1": lambda: x[:, 0],
        "rank 3": lambda: x[None],
        "complex": lambda: x.astype(complex),
        "scipy sparse": lambda: __import__("scipy.sparse").sparse.csr_matrix(x),
        "meta": lambda: torch.from_numpy(x).to("meta"),
    }
    for name, make in strange.items():
        if name not in ("other width", "meta"):
            yield (
                f"estimator: fit, X is {name}",
                lambda m=make: _sklearn(lambda: _new_estimator().fit(m(), y)),
            )
            yield (
                f"estimator: find_label_errors, X is {name}",
                lambda m=make: _sklearn(lambda: _new_estimator().find_label_errors(m(), y)),
            )
        for call in ("predict", "predict_proba", "predict_uncertainty"):
            yield (
                f"estimator: {call}, X is {name}",
                lambda m=make, c=call: _sklearn(lambda: getattr(_estimator(), c)(m())),
            )
    for name, value in {
        "1e30": x * 1e30,
        "1e300": x.astype(float) * 1e300,
        "1e-300": x.astype(float) * 1e-300,
        "float16": x.astype(np.float16),
        "int": x.astype(int),
        "lists": x.tolist(),
        "tensor": torch.from_numpy(x),
        "constant": np.ones_like(x),
        "one far": np.concatenate([x[:59], [[1e200, 1e200]]]),
    }.items():
        yield (
            f"estimator: predict {name}",
            lambda v=value: check_prediction(_estimator().predict_uncertainty(v)),
        )
        yield (
            f"estimator: fit {name}",
            lambda v=value: check_prediction(_new_estimator().fit(v, y).predict_uncertainty(v)),
        )
        yield (
            f"estimator: correct the labels of {name}",
            lambda v=value: check_prediction(
                _new_estimator(label_noise="correct").fit(v, y).predict_uncertainty(v)
            ),
        )
    for name, labels in {
        "None": None,
        "short": y[:5],
        "NaN": np.full(60, np.nan),
        "continuous": np.linspace(0, 1, 60),
        "one-hot": np.eye(3)[y],
        "empty": y[:0],
        "a string": "y",
    }.items():
        yield f"estimator: fit, y is {name}", lambda t=labels: _sklearn(lambda: _new_estimator().fit(x, t))
        yield (
            f"estimator: find_label_errors, y is {name}",
            lambda t=labels: _sklearn(lambda: _new_estimator().find_label_errors(x, t)),
        )
    for name, weight in {
        "NaN": np.full(60, np.nan),
        "negative": -np.ones(60),
        "zero": np.zeros(60),
        "short": np.ones(5),
        "strings": np.array(["a"] * 60),
    }.items():
        yield (
            f"estimator: weights are {name}",
            lambda w=weight: _sklearn(lambda: _new_estimator().fit(x, y, w)),
        )
    for name in hetsngp.HetSNGPClassifier().get_params():
        for value in ("zzz", -1, NAN, 2**70):
            yield f"estimator: {name}={_short(value)}", lambda n=name, v=value: _estimator_option(n, v)


def _new_estimator(**options: Any) -> Any:
    given = {"width": 16, "depth": 1, "epochs": 1, "random_features": 32, "random_state": 0, **options}
    return hetsngp.HetSNGPClassifier(**given)


def _sklearn(call: Callable[[], Any]) -> None:
    """Errors of scikit-learn's own checks are what its users expect; others must be ours."""
    import traceback

    try:
        answer = call()
    except (ValueError, TypeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if "sklearn/utils" in frames[-1].filename or any("sklearn/utils" in f.filename for f in frames):
            return
        raise
    accepted(answer)


def _estimator_option(name: str, value: Any) -> None:
    import traceback

    if name in ("epochs", "patience", "class_weight") and value == 2**70:
        return
    x, y = (t.numpy() for t in blobs(60))
    try:
        found = _new_estimator(**{name: value}).fit(x, y)
    except (ValueError, TypeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any("sklearn/utils" in frame.filename for frame in frames):
            return
        raise
    check_prediction(found.predict_uncertainty(x))


# --- the attack -----------------------------------------------------------------------------------------

KINDS: tuple[Callable[[], Iterator[Case]], ...] = (
    input_cases,
    label_cases,
    loader_cases,
    option_cases,
    backbone_cases,
    state_cases,
    function_cases,
    metric_cases,
    estimator_cases,
)


def cases() -> list[Case]:
    """Every case, in order."""
    return [case for kind in KINDS for case in kind()]


def attack(seed: int, share: float, folder: Path) -> Iterator[Result]:
    """Run a share of the cases, at least a few of each kind."""
    rng = random.Random(seed)
    for method in METHODS:  # made once, before the forks
        fitted(method)
    fitted(link="sigmoid"), fitted("sngp", posterior="momentum"), on_features(), _estimator()
    _evaluate(blobs()[0])
    by_kind: dict[str, list[Case]] = {}
    for case in cases():
        by_kind.setdefault(case[0].partition(":")[0], []).append(case)
    for found in by_kind.values():
        count = len(found) if share >= 1 else min(len(found), max(3, round(share * len(found))))
        chosen = found if count == len(found) else rng.sample(found, count)
        for name, function in chosen:
            yield run_case(NAME, name, function, seconds=SECONDS)
