"""Parts of an evaluation are kept as long as model, data, code and precision are what they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

import hetsngp
from hetsngp.data.class_maps import ClassMap
from hetsngp.evaluation import evaluate, fingerprints, restrict
from hetsngp.evaluation import report as reports
from hetsngp.evaluation.cache import imported_modules
from hetsngp.types import Prediction

SRC = Path(hetsngp.__file__).parent
X = torch.linspace(-1, 1, 120).reshape(60, 2)
Y = torch.arange(60) % 2
DATA = TensorDataset(X, Y)


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take seconds."""
    monkeypatch.setattr(reports, "draw_report", lambda report, folder: {})


# --- models ---------------------------------------------------------------------------------------------


def prediction(probs: Tensor) -> Prediction:
    uncertainty, zero = torch.special.entr(probs).sum(-1), torch.zeros(len(probs))
    return Prediction(probs, probs, uncertainty, uncertainty, zero, zero, uncertainty, zero, zero)


class Scaled(nn.Module):
    """Counts how often it is asked, where the count is no attribute of it."""

    def __init__(self, scale: float = 1.0, calls: list[int] | None = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.1))
        with torch.no_grad():
            self.inner[0].weight.copy_(torch.eye(2))
            self.inner[0].bias.zero_()
        self.scale = scale
        self.register_buffer("shift", torch.zeros(2), persistent=False)

    def predict(self, x: Tensor) -> Prediction:
        CALLS.append(len(x))
        return prediction((self.inner(x) * self.scale + self.shift).softmax(-1))


CALLS: list[int] = []


def changed(change: Callable[[Any], Any]) -> nn.Module:
    model = Scaled()
    change(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "an attribute": lambda: Scaled(10.0),
    "a slope": lambda: changed(lambda m: setattr(m.inner[1], "negative_slope", 0.9)),
    "a buffer that is not saved": lambda: changed(lambda m: m.shift.add_(1)),
    "a weight": lambda: changed(lambda m: m.inner[0].weight.data.mul_(2)),
    "a config": lambda: changed(lambda m: setattr(m.inner, "config", {"a": 1})),
    "a module in a list": lambda: changed(lambda m: setattr(m, "more", [nn.LeakyReLU(0.2)])),
}


@pytest.mark.parametrize("name", MODELS)
def test_another_model_is_seen(name: str) -> None:
    known = fingerprints.model_fingerprint(Scaled())
    assert known is not None
    assert fingerprints.model_fingerprint(MODELS[name]()) != known


def test_other_code_under_the_same_name_is_another_model() -> None:
    def network(factor: int) -> nn.Module:
        class Network(nn.Module):
            def predict(self, x: Tensor) -> Tensor:
                return 2 * x

        class Edited(nn.Module):
            def predict(self, x: Tensor) -> Tensor:
                return 3 * x

        Edited.__name__, Edited.__qualname__ = Network.__name__, Network.__qualname__
        return Network() if factor == 2 else Edited()

    assert fingerprints.model_fingerprint(network(2)) == fingerprints.model_fingerprint(network(2))
    assert fingerprints.model_fingerprint(network(2)) != fingerprints.model_fingerprint(network(3))


def test_modes_hooks_and_warnings_make_no_other_model() -> None:
    model = Scaled()
    known = fingerprints.model_fingerprint(model)
    model.train().inner.eval()
    model.inner.register_forward_hook(lambda *_: None)
    model._warned = {"something"}
    model.predict(X)
    assert fingerprints.model_fingerprint(model) == known


def test_a_model_that_cannot_be_seen_into_is_measured_each_time(tmp_path: Path) -> None:
    model = changed(lambda m: setattr(m, "more", threading.Lock()))
    assert fingerprints.model_fingerprint(model) is None
    CALLS.clear()
    for _ in range(2):
        evaluate(model, [(X, Y)], out=tmp_path)
    assert len(CALLS) == 2


def test_how_a_restriction_normalises_is_seen() -> None:
    some = ClassMap(torch.tensor([1, 0]), ("b", "a"), num_inputs=2)
    other = ClassMap(torch.tensor([0, 1]), ("a", "b"), num_inputs=2)
    found = [restrict(Scaled(), some, normalise=how).fingerprint() for how in ("softmax", "sigmoid", "none")]
    found.append(restrict(Scaled(), other, normalise="softmax").fingerprint())
    assert len({*found}) == 4
    assert restrict(Scaled(), some, normalise="softmax").fingerprint() == found[0]


# --- data -----------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """As many as LENGTH says, which is none of its attributes."""

    def __init__(self, table: Any = None) -> None:
        self.table = table

    def __len__(self) -> int:
        return LENGTH[0]

    def __getitem__(self, row: int) -> Any:
        return X[row], Y[row]


LENGTH = [60]


class Own:
    """A loader of somebody's own, whose length is none of its attributes."""

    def __len__(self) -> int:
        return LENGTH[0] // 20

    def __iter__(self) -> Iterator[Any]:
        return iter(list(DataLoader(DATA, batch_size=20))[: len(self)])


def reused(first: Any, second: Any, out: Path, **more: Any) -> bool:
    """Whether the second is taken for the first; if not, its numbers are its own."""
    model = Scaled()
    evaluate(model, first, out=out)
    CALLS.clear()
    evaluate(model, second, out=out, **more)
    return not CALLS


def loader(data: Any = DATA, **how: Any) -> DataLoader[Any]:
    return DataLoader(data, **{"batch_size": 20, **how})


def with_order(*rows: range) -> list[int]:
    return [row for part in rows for row in part]


LOADERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "sampler": (
        lambda: loader(sampler=with_order(range(40))),
        lambda: loader(sampler=with_order(range(20), range(40, 60))),
    ),
    "batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=[with_order(range(20)), [30, 31]]),
        lambda: DataLoader(DATA, batch_sampler=[with_order(range(20)), [30, 32]]),
    ),
    "subset": (lambda: loader(Subset(DATA, range(41))), lambda: loader(Subset(DATA, range(45)))),
    "drop_last": (
        lambda: loader(Subset(DATA, range(50))),
        lambda: loader(Subset(DATA, range(50)), drop_last=True),
    ),
    "last row": (lambda: loader(), lambda: loader(TensorDataset(X, torch.cat([Y[:-1], 1 - Y[-1:]])))),
}


@pytest.mark.parametrize("name", LOADERS)
def test_other_data_are_measured_and_equal_ones_are_not(name: str, tmp_path: Path) -> None:
    one, other = LOADERS[name]
    assert reused(one(), one(), tmp_path)
    assert not reused(one(), other(), tmp_path)


@pytest.mark.parametrize(
    ("make", "length"), [(lambda: loader(Rows()), 59), (Own, 40)], ids=["data set", "loader"]
)
def test_a_length_that_changed_is_seen(make: Callable[[], Any], length: int, tmp_path: Path) -> None:
    """59 rows are three batches as 60 are."""
    try:
        assert reused(make(), make(), tmp_path)
        LENGTH[0] = length
        CALLS.clear()
        assert evaluate(Scaled(), make(), out=tmp_path).id.examples == length
        assert CALLS
    finally:
        LENGTH[0] = 60


def test_generators_of_a_loader_make_no_other_data(tmp_path: Path) -> None:
    """Its own has got on after the first pass; the order that one draws shows in the first batch."""
    generator = torch.Generator()
    own = loader(generator=generator)
    assert reused(own, own, tmp_path)
    drawn = [RandomSampler(DATA, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert reused(loader(sampler=drawn[0]), loader(sampler=drawn[1]), tmp_path)


class Stream(IterableDataset[Any]):
    def __init__(self, rows: int) -> None:
        self.rows = [rows]

    def __iter__(self) -> Iterator[Any]:
        return iter([(X[i], Y[i]) for i in range(self.rows[0])])


@pytest.mark.parametrize(
    "make",
    [lambda: (batch for batch in loader()), lambda: iter([(X, Y)]), lambda: loader(Stream(60))],
    ids=["generator", "iterator", "stream"],
)
def test_data_of_unknown_length_are_not_kept(make: Callable[[], Any], tmp_path: Path) -> None:
    assert not reused(make(), make(), tmp_path)
    assert not (tmp_path / "parts").exists()


def test_data_that_cannot_be_seen_into_are_not_kept(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert not reused(loader(Rows(file)), loader(Rows(file)), tmp_path)
    assert reused(loader(Rows({"a": 1})), loader(Rows({"a": 1})), tmp_path)


# --- surroundings ---------------------------------------------------------------------------------------


def test_autocast_versions_and_code_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reused([(X, Y)], [(X, Y)], tmp_path)
    known = [fingerprints.environment_fingerprint()]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            known.append(fingerprints.environment_fingerprint())
            assert not reused([(X[:9], Y[:9])], [(X, Y)], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.0")
        known.append(fingerprints.environment_fingerprint())
    with monkeypatch.context() as patch:
        patch.setattr(fingerprints, "code_fingerprint", lambda *modules: "other")
        known.append(fingerprints.environment_fingerprint())
        assert not reused([(X[:9], Y[:9])], [(X, Y)], tmp_path)
    assert len({*known}) == len(known)
    assert fingerprints.environment_fingerprint() == known[0]


def test_the_code_of_all_that_predicts_and_measures_counts_and_not_what_shows_it() -> None:
    modules = imported_modules(*fingerprints.DECIDES)
    names = ("set_predictions", "predictors", "restriction", "scores", "set_evaluation", "fingerprints")
    assert {f"hetsngp.evaluation.{name}" for name in names} <= set(modules)
    assert {"hetsngp.metrics.per_example", "hetsngp.models.ensemble", "hetsngp.nn.extractor"} <= set(modules)
    for package in ("functional", "nn", "models", "posterior", "conversion", "frozen", "estimator", "data"):
        files = (SRC / package).rglob("*.py")
        missing = {file for file in files if file.name != "__init__.py"} - set(modules.values())
        assert not missing
    assert not {"hetsngp.evaluation.report_plots", "hetsngp.evaluation.report_text"} & set(modules)
    assert not {name for name in modules if name.split(".")[1] in ("cli", "paper", "training")}
