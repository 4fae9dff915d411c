"""The options of build(): one definition for the checks at run time, for editors and for type checkers."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

import hetsngp
from hetsngp.choices import METHOD_NAMES, MethodName
from hetsngp.models import methods
from hetsngp.models.options import CHOICES, BuildOptions, HeadOptions, Options

SRC = Path(hetsngp.__file__).parents[1]
HINTS = typing.get_type_hints(BuildOptions)
# `class_counts` of a dataset are found by `fit`; the others are decided by the estimator.
NOT_IN_THE_ESTIMATOR = {"features", "link", "dataset_size", "class_counts", "sample_beta"}


def choices_of(hint: object) -> tuple[str, ...] | None:
    """The names that a ``Literal``, or one that may be None, allows."""
    kinds = [hint, *typing.get_args(hint)]
    return next((typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is typing.Literal), None)


def test_the_dataclass_has_the_options_of_the_typed_dict() -> None:
    assert [f.name for f in fields(Options)] == list(HINTS)
    assert typing.get_type_hints(Options) == HINTS
    assert not BuildOptions.__required_keys__
    assert typing.get_type_hints(HeadOptions) == {**HINTS, "method": MethodName}


def test_what_is_allowed_is_what_the_literals_say() -> None:
    named = {name: choices_of(hint) for name, hint in HINTS.items()}
    assert {name: values for name, values in named.items() if values is not None} == CHOICES
    for name, allowed in CHOICES.items():
        for value in allowed:
            assert getattr(Options(**{name: value}), name) == value
        with pytest.raises(ValueError, match=f"unknown {name} 'other'"):
            Options(**{name: "other"})


def test_the_methods_are_those_of_the_literal() -> None:
    assert tuple(methods.METHODS) == METHOD_NAMES == typing.get_args(MethodName)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (hetsngp.build, BuildOptions),
        (hetsngp.build_ensemble, BuildOptions),
        (hetsngp.convert, BuildOptions),
        (hetsngp.fit_head, HeadOptions),
    ],
)
def test_functions_unpack_the_options(function: object, kind: type) -> None:
    hint = typing.get_type_hints(function)["options"]
    assert typing.get_origin(hint) is typing.Unpack
    assert typing.get_args(hint) == (kind,)


def test_the_estimator_has_the_same_types() -> None:
    pytest.importorskip("sklearn")
    from hetsngp.estimator.classifier import OPTIONS, HetSNGPClassifier

    hints = typing.get_type_hints(HetSNGPClassifier.__init__)
    assert hints["method"] == MethodName
    assert set(OPTIONS) == set(HINTS) - NOT_IN_THE_ESTIMATOR
    assert {name: hints[name] for name in OPTIONS} == {name: HINTS[name] for name in OPTIONS}
    for name, parameter in inspect.signature(HetSNGPClassifier).parameters.items():
        if name in CHOICES:
            assert parameter.default in (*CHOICES[name], None)


# --- a user's program under mypy ------------------------------------------------------------------------

PROGRAM = """\
import hetsngp
from hetsngp.nn.backbones import ResidualMLP

net = ResidualMLP(2, width=8, depth=1)
hetsngp.build("hetsngp", net, 3, rank=2, posterior="exact", normalization=None, class_counts=[5, 5, 5])
hetsngp.build("hetsngp", net, 3, ranks=2)  # wrong: ranks
hetsngp.build("hetsngp", net, 3, posterior="exakt")  # wrong: exakt
hetsngp.build("hetsgnp", net, 3)  # wrong: hetsgnp
hetsngp.build("sngp", net, 3, amplitude="large")  # wrong: amplitude
hetsngp.build_ensemble("sngp", lambda g: net, 3, sampler="mc", seeds=[0])
hetsngp.build_ensemble(["sngp", "mimo"], lambda g: net, 3)
hetsngp.build_ensemble("sngp", lambda g: net, 3, samplers="mc")  # wrong: samplers
hetsngp.build_ensemble(["sngp", "mimos"], lambda g: net, 3)  # wrong: mimos
hetsngp.convert(net, "sngp", noise="feature", spectral_bound=float("inf"))
hetsngp.convert(net, "sngp", noise="features")  # wrong: features
hetsngp.convert(net, "sngpp")  # wrong: sngpp
model = hetsngp.convert(net)
hetsngp.fit_head(model, [], method="sngp", features="inducing", epochs=3)
hetsngp.fit_head(model, [], metod="sngp")  # wrong: metod
hetsngp.fit_head(model, [], link="probit")  # wrong: probit
hetsngp.HetSNGPClassifier("hetsngp", posterior="shared", likelihood="mean_log")
hetsngp.HetSNGPClassifier("hetsngp", posterior="shred")  # wrong: shred
hetsngp.HetSNGPClassifier("hetsnpg")  # wrong: hetsnpg
hetsngp.HetSNGPClassifier(random_feature=8)  # wrong: random_feature
reveal_type(model)  # reveals: hetsngp.models.classifier.Classifier
reveal_type(hetsngp.build_ensemble)  # reveals: -> hetsngp.models.ensemble.Ensemble
reveal_type(model.predict([]))  # reveals: hetsngp.types.Prediction
reveal_type(hetsngp.load("x"))  # reveals: Classifier | hetsngp.models.ensemble.Ensemble
reveal_type(hetsngp.fit_posterior)  # reveals: hetsngp.posterior.fit.PosteriorReport
hetsngp.biuld  # wrong: biuld
"""


def test_mypy_finds_what_is_wrong_in_a_users_program(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    pytest.importorskip("mypy")
    cache = pytestconfig.cache.mkdir("mypy")  # reading torch's types takes 20 s, once
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", "--no-pretty"]
    command += [
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "--cache-dir",
        str(cache),
        str(program),
    ]
    # From an empty folder, with an empty configuration: as somebody who has installed the package.
    (tmp_path / "mypy.ini").write_text("[mypy]\n")
    env = {**os.environ, "MYPYPATH": str(SRC)}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    said: dict[int, str] = {}
    for line in run.stdout.splitlines():
        found = re.match(r"program\.py:(\d+): (?:error|note): (.*)", line.removeprefix(f"{tmp_path}/"))
        assert found is not None, line
        said[int(found[1])] = said.get(int(found[1]), "") + found[2]
    lines = list(enumerate(PROGRAM.splitlines(), 1))
    expected = {i: re.split("# (?:wrong|reveals): ", line)[1] for i, line in lines if "# " in line}
    assert set(said) == set(expected), run.stdout
    for number, words in expected.items():
        assert words in said[number].replace('"', ""), (number, said[number])
