"""Methods are known from one table: no other code names them, and a new one needs only its function."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract import toy
from torch import nn

import hetsngp
from hetsngp.choices import NOISES
from hetsngp.models import methods
from hetsngp.models.components import DEFAULT_AMPLITUDE, Components
from hetsngp.nn.backbones import ResidualMLP, WideResNet
from hetsngp.nn.extractor import Features
from hetsngp.nn.heads import Head

SRC = Path(hetsngp.__file__).parent
# Their rows are methods.
TABLES_OF_THE_PAPER = ("paper/*.py", "paper/runtime/*.py", "paper/synthetic/table.py")


def _strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """String constants that are no docstrings, no defaults of parameters, and not in a ``Literal``."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.arguments):
            skipped |= {id(default) for default in (*node.defaults, *node.kw_defaults) if default is not None}
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", None) == "Literal":
            skipped |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node


def test_no_other_code_names_a_method() -> None:
    package = {"hetsngp"}  # the name of the library itself, and of the artifact's format
    named = [
        f"{path.relative_to(SRC)}:{node.lineno} {node.value!r}"
        for path in SRC.rglob("*.py")
        if not any(path.relative_to(SRC).match(pattern) for pattern in TABLES_OF_THE_PAPER)
        for node in _strings(ast.parse(path.read_text(encoding="utf-8")))
        if node.value in set(methods.METHODS) - package
    ]
    assert named == []


def test_every_method_is_short_and_has_a_title() -> None:
    tree = ast.parse((SRC / "models" / "methods.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, entry in methods.METHODS.items():
        function = functions[name]
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno < 15, name
        assert entry.title
        assert entry.compose.__doc__


@pytest.fixture
def ninth() -> Iterator[str]:
    """A method as CONTRIBUTING.md says how to add one."""

    @methods.method("SNGP + MIMO")
    def sngp_mimo(parts: Components) -> Head:
        """M inputs, M SNGP heads, one backbone."""
        return methods.sngp(parts.for_members())

    yield sngp_mimo.__name__
    del methods.METHODS[sngp_mimo.__name__]


def test_a_new_method_needs_only_its_function(ninth: str, tmp_path: Path) -> None:
    x, y = toy.blobs(3, 20)
    model = toy.build(ninth)
    losses = toy.descend(model, x, y, 30)
    assert losses[-1] < 0.5 * losses[0]
    hetsngp.fit_posterior(model, toy.loader(x, y))
    prediction = model.predict(x)
    assert (prediction.labels == y).float().mean() > 0.9
    assert torch.equal(prediction.probs, prediction.clean_probs)  # no noise model, unlike hetsngp_mimo
    assert (prediction.function_uncertainty > 0).any()
    hetsngp.save(hetsngp.Ensemble([model, toy.trained("hetsngp")]), tmp_path / "both")
    assert toy.same_bits(hetsngp.load(tmp_path / "both").members[0].predict(x), prediction)


def test_a_new_method_is_in_the_estimator_the_demo_and_the_command_line(
    ninth: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from hetsngp.cli import make_app

    x, y = toy.blobs(3, 20)
    small: dict[str, Any] = {"width": 16, "depth": 1, "random_features": 32, "epochs": 2}
    clf = hetsngp.HetSNGPClassifier(ninth, random_state=0, **small).fit(x.numpy(), y.numpy())
    assert clf.model_.config["method"] == ninth
    command = ["demo", "--methods", ninth, "--tasks", "two_moons", "--epochs", "1", "--jobs", "1"]
    result = CliRunner().invoke(make_app(), [*command, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert ninth in result.output
    assert (tmp_path / "two_moons.png").stat().st_size > 10_000


# --- defaults by kind of backbone -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "default"),
    [
        (lambda: WideResNet(10, 1), 5.0),
        (lambda: ResidualMLP(2, width=8, depth=1), 10.0),
        (lambda: Features(8, "convolutional"), 5.0),
        (lambda: Features(8, "attention"), 10.0),
    ],
    ids=["wide resnet", "mlp", "features of convolutions", "features of attention"],
)
@pytest.mark.parametrize("given", [{}, {"amplitude": None}, {"amplitude": 7.0}], ids=["", "None", "7"])
def test_the_amplitude_is_the_given_one_or_that_for_the_backbone(
    network: Callable[[], nn.Module], default: float, given: dict[str, Any]
) -> None:
    expected = given.get("amplitude") or default
    for method in methods.METHODS:
        if method in toy.MIXTURES and isinstance(network(), Features):
            continue  # no first layer to widen
        model = hetsngp.build(method, network(), 3, **toy.TINY, **given)
        assert model.config["options"]["amplitude"] == expected
        if method in toy.GP:
            assert model.head.latent.kernel.amplitude == expected
            phi = model.head.latent.features(torch.randn(4, model.backbone.num_features))
            torch.testing.assert_close(phi.norm(dim=-1), torch.full((4,), expected))  # ‖φ‖ = a


def test_a_saved_model_keeps_its_amplitude_when_the_default_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hetsngp.save(hetsngp.build("hetsngp", WideResNet(10, 1), 3, **toy.TINY), tmp_path)
    monkeypatch.setitem(DEFAULT_AMPLITUDE, "convolutional", 1.0)
    fresh = hetsngp.build("hetsngp", WideResNet(10, 1), 3, **toy.TINY)
    assert fresh.head.latent.kernel.amplitude == 1.0
    assert hetsngp.load(tmp_path).head.latent.kernel.amplitude == 5.0


# --- randomness -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("method", methods.METHODS)
def test_a_given_generator_leaves_the_global_one_alone(method: str, noise: str) -> None:
    """Equal generators also give equal models, whatever the global state."""
    for features, posterior in (("random", "kronecker"), ("inducing", "momentum")):
        backbone = toy.backbone(), toy.backbone()
        before = torch.get_rng_state()
        options = {**toy.TINY, "noise": noise, "features": features, "posterior": posterior}
        built = []
        for seed, net in enumerate(backbone):
            g = torch.Generator().manual_seed(7)
            built.append(hetsngp.build(method, net, 3, generator=g, **options))
            if seed == 0:
                assert torch.equal(torch.get_rng_state(), before)
                torch.manual_seed(99)
        toy.assert_same(toy.weights(built[0]), toy.weights(built[1]))
