"""Import paths of release 0.1: those of its README and docs keep working, and say where things are now."""

import copy
import dataclasses
import doctest
import importlib
import inspect
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import hetsngp
from hetsngp._moved import MOVED, RENAMED, MovedModule, _public_names, rename_keys

SRC = Path(hetsngp.__file__).parents[1]
PICKLES = Path(__file__).parents[1] / "saved_0_1" / "pickles.pkl"

# Every import in README.md, CONTRIBUTING.md, docs/ and experiments/*/README.md of 0.1, and what it says now.
IMPORTS: list[tuple[str, tuple[str, ...]]] = [
    ("import hetsngp", ()),
    ("import hetsngp, torch", ()),
    ("from hetsngp import HetSNGPClassifier", ()),
    ("from hetsngp.data.class_maps import ClassMap", ()),
    ("from hetsngp.data.corrupted import Mapped, corrupted_images", ("Mapped is now called",)),
    ("from hetsngp.data.corruptions import CORRUPTIONS, corrupt", ()),
    (
        "from hetsngp.data.device_loader import Augmentation, DeviceLoader",
        ("hetsngp.data.device_loader has",),
    ),
    ("from hetsngp.data.folders import folder_loader", ("hetsngp.data.folders has moved",)),
    ("from hetsngp.data.imagenet import imagenet_subset", ("hetsngp.data.imagenet has moved",)),
    ("from hetsngp.data.imagenet21k import to_imagenet1k", ("hetsngp.data.imagenet21k has moved",)),
    ("from hetsngp.data.images import ImageArrays", ()),
    ("from hetsngp.data.registry import describe, open_data", ("hetsngp.data.registry has moved",)),
    ("from hetsngp.data.sources import open_images", ()),
    ("from hetsngp.data.tables import load_table", ()),
    ("from hetsngp.evaluation import restrict", ()),
    ("from hetsngp.loop import train", ("hetsngp.loop has moved to hetsngp.fitting.loop",)),
    ("from hetsngp.metrics import vote_kl, vote_nll", ()),
    ("from hetsngp.nn.backbones import ResidualMLP", ()),
    ("from hetsngp.nn.backbones import WideResNet", ()),
    ("from hetsngp.serving import as_json, open_run, predict_files", ()),
    ("from hetsngp.serving import set_thresholds", ()),
    ("from hetsngp.serving.verdicts import verdicts", ("hetsngp.serving.verdicts has moved",)),
    (
        "from hetsngp.training import Engine, Hardware, Keep, Plan, Schedule",
        ("Keep is now called CheckpointConfig", "Plan is now called TrainConfig"),
    ),
    ("from hetsngp.training.recipe import book_names, read_recipe", ("hetsngp.training.recipe has moved",)),
    # dotted names in their text
    ("import hetsngp; hetsngp.loop.train", ("hetsngp.loop has moved to hetsngp.fitting.loop",)),
    ("import hetsngp; hetsngp.options.Options", ("hetsngp.options has moved to hetsngp.models.options",)),
    ("import hetsngp; hetsngp.nn.heads.Head", ()),
    ("import hetsngp; hetsngp.nn.backbones.ResidualMLP", ()),
    ("import hetsngp; hetsngp.metrics.vote_kl", ()),
    ("import hetsngp; hetsngp.training.Engine", ()),
    ("import hetsngp; hetsngp.evaluation.restrict", ()),
    ("import hetsngp; hetsngp.serving.write_serving", ()),
    ("from hetsngp.loop import Gradients, run_epoch, train_folds", ("hetsngp.loop has moved",)),
    ("from hetsngp.data.arrays import load_npz", ("hetsngp.data.arrays has moved",)),
    ("from hetsngp.data.corrupted import open_corrupted", ()),
    ("from hetsngp.data.folders import scan_folder", ("hetsngp.data.folders has moved",)),
    ("from hetsngp.data.inputs import Inputs", ("hetsngp.data.inputs has moved",)),
    ("import hetsngp.data.synthetic", ("hetsngp.data.synthetic has moved",)),
    ("from hetsngp.evaluation.synthetic import RECIPES", ("hetsngp.evaluation.synthetic has moved",)),
    ("import hetsngp.nn.held", ("hetsngp.nn.held has moved",)),
    ("from hetsngp.training.gradients import FabricGradients", ()),
    ("from hetsngp.validation import trusting", ("trusting is now called",)),
    ("import hetsngp.reproduction.tables", ("hetsngp.reproduction has", "hetsngp.reproduction.tables has")),
]

ALL_OF_0_1 = (
    *("ArtifactError", "Classifier", "Conversion", "Ensemble", "FeatureSet", "LatentNormal", "MultiInput"),
    *("PosteriorNotFittedError", "PosteriorReport", "Prediction", "UtilityNormal", "build", "build_ensemble"),
    *("convert", "evaluate", "extract_features", "fit_head", "fit_posterior", "forget_features", "load"),
    "save",
)

# Executes each line by itself: what an earlier one imported from a moved module is forgotten before.
RUNNER = """
import json, sys, warnings

found = []
for number, line in enumerate(json.load(sys.stdin)):
    from hetsngp._moved import MovedModule
    for name in [name for name, module in sys.modules.items() if isinstance(module, MovedModule)]:
        parent, _, last = name.rpartition(".")
        vars(sys.modules.get(parent, sys)).pop(last, None)
        del sys.modules[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(compile(line, f"<import {number}>", "exec"), {"__name__": "user"})
            error = None
        except Exception as raised:
            error = repr(raised)
    ours = [w for w in caught if issubclass(w.category, DeprecationWarning) and "hetsngp" in str(w.message)]
    # `from package import name` asks for the name twice.
    found.append([error, list(dict.fromkeys((str(w.message), w.filename) for w in ours))])
json.dump(found, sys.stdout)
"""


@pytest.mark.parametrize(
    "name",
    ["nn.heads.Head", "functional.laplace.gram", "nn.backbones.ResidualMLP", "reproduction.Table"],
)
def test_attributes_of_the_package_are_there_in_a_fresh_interpreter(name: str, tmp_path: Path) -> None:
    """0.1 had imported these modules with the package; here each is the first that is asked for."""
    code = f"import hetsngp; hetsngp.{name}"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every line of IMPORTS, executed in one fresh interpreter: its error and its warnings."""
    pytest.importorskip("sklearn")
    lines = [line for line, _ in IMPORTS]
    run = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(lines),
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(lines, json.loads(run.stdout), strict=True))


@pytest.mark.parametrize(("line", "expected"), IMPORTS, ids=[line for line, _ in IMPORTS])
def test_imports_of_0_1_work(line: str, expected: tuple[str, ...], executed: dict[str, Any]) -> None:
    error, warned = executed[line]
    assert error is None
    assert len(warned) == len(expected), warned
    number = [known for known, _ in IMPORTS].index(line)
    for (message, filename), words in zip(warned, expected, strict=True):
        assert words in message
        assert filename == f"<import {number}>"  # the line that imports


def test_all_names_of_0_1_are_there_without_a_warning() -> None:
    assert set(ALL_OF_0_1) <= set(hetsngp.__all__) <= set(dir(hetsngp))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ALL_OF_0_1:
            assert callable(getattr(hetsngp, name))


def test_objects_are_those_of_the_new_modules() -> None:
    sys.modules.pop("hetsngp.loop", None)
    with pytest.warns(DeprecationWarning, match="hetsngp.loop has moved to hetsngp.fitting.loop"):
        old = importlib.import_module("hetsngp.loop")
    new = importlib.import_module("hetsngp.fitting.loop")
    assert old.train is new.train
    assert old.Place is new.TrainState  # renamed since


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(MOVED))
def test_every_moved_module_resolves(name: str) -> None:
    """The targets exist, no file hides the entry, and the names of all targets are found."""
    module = importlib.import_module(f"hetsngp.{name}")
    assert isinstance(module, MovedModule), f"hetsngp.{name} exists: the entry is never used"
    for target in MOVED[name]:
        found = importlib.import_module(f"hetsngp.{target}")
        assert not isinstance(found, MovedModule)
        first = _public_names(found)[0]
        assert getattr(module, first) is not None
        assert first in dir(module)


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_every_renamed_name_is_found_with_a_warning(name: str) -> None:
    """In the module itself, which warns of the name, or in a moved one, which has warned already."""
    path, _, old = name.rpartition(".")
    module = importlib.import_module(f"hetsngp.{path}")
    assert old not in vars(module), f"{name} exists: the entry is never used"
    new = getattr(module, RENAMED[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if hasattr(module, old):
            assert getattr(module, old) is new
            assert f"{old} is now called {RENAMED[name]}" in str(caught[0].message)
            assert caught[0].filename == __file__
        else:
            homes = [importlib.import_module(f"hetsngp.{home}") for home in MOVED if path in MOVED[home]]
            assert any(getattr(home, old, None) is new for home in homes)


def test_what_was_pickled_by_0_1_loads() -> None:
    """``tests/saved_0_1/make_pickles.py`` wrote it: models, a prediction, a report and others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in [name for name, module in sys.modules.items() if isinstance(module, MovedModule)]:
            del sys.modules[name]
        found = pickle.loads(PICKLES.read_bytes())
    prediction = found["model"].predict(found["x"])
    for name in ("probs", "data_uncertainty", "model_uncertainty", "ood_score"):
        # Integrals took more points then.
        torch.testing.assert_close(
            getattr(prediction, name), getattr(found["prediction"], name), rtol=0, atol=0.005
        )
    assert type(found["model"]) is hetsngp.Classifier
    assert type(found["prediction"]) is hetsngp.Prediction
    assert type(found["utility"]) is hetsngp.UtilityNormal
    assert type(found["features"]) is hetsngp.FeatureSet
    assert isinstance(found["report"], hetsngp.PosteriorReport)
    assert "30 held-out examples" in str(found["report"])
    assert "Linear: layer ''" in str(found["conversion"])
    assert [m.config["method"] for m in found["ensemble"].members] == ["deterministic", "posterior_network"]
    assert found["ensemble"].predict(found["x"]).probs.shape == (6, 3)
    assert (found["schedule"].epochs, found["schedule"].lr) == (3, 0.1)


# Class, module that has it now, name of 0.1 → name of the field now.
RENAMED_FIELDS: list[tuple[str, str, dict[str, str]]] = [
    ("TrainConfig", "training.config", {"average": "ema_decay"}),
    ("Schedule", "fitting.schedule", {"gp_lr": "gp_lr_multiplier"}),
    ("Preprocessing", "data.preprocessing", {"several_labels": "multi_label"}),
    ("Thresholds", "serving.decisions", {"right": "correct"}),
    ("VerdictRules", "training.recipes.task", {"right": "correct"}),
    ("Recipe", "training.recipes.recipe", {"plan": "config"}),
    ("Quality", "evaluation.scores", {"rows": "examples"}),
    ("OODSet", "evaluation.report", {"rows": "examples"}),
    ("Report", "evaluation.report", {"several_labels": "multi_label", "rows": "predictions"}),
]


@pytest.mark.parametrize(("name", "module", "renamed"), RENAMED_FIELDS, ids=[n for n, _, _ in RENAMED_FIELDS])
def test_fields_keep_their_values_in_pickles_of_0_1(name: str, module: str, renamed: dict[str, str]) -> None:
    cls = getattr(importlib.import_module(f"hetsngp.{module}"), name)
    value = cls.__new__(cls)
    new_state = {field.name: f"value of {field.name}" for field in dataclasses.fields(cls)}
    vars(value).update(rename_keys(new_state, {new: old for old, new in renamed.items()}))
    found = pickle.loads(pickle.dumps(value))  # the state is that of 0.1
    assert vars(found) == new_state
    assert vars(pickle.loads(pickle.dumps(found))) == new_state
    assert vars(copy.copy(found)) == new_state


# --- a moved module is a module -------------------------------------------------------------------------


@pytest.fixture
def moved() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("hetsngp.loop")


def test_probing_finds_what_is_there_and_nothing_else(moved: Any) -> None:
    assert hasattr(moved, "train")
    for name in ("trian", "_private", "__wrapped__", "__path__", "__file__", "__len__"):
        assert not hasattr(moved, name)
    assert not hasattr(hetsngp, "trian")
    assert not hasattr(hetsngp, "loop.train")
    assert "train" in dir(moved)


def test_inspect_and_doctest_do_not_stumble(moved: Any) -> None:
    assert inspect.ismodule(moved)
    assert inspect.getdoc(moved) is None
    assert inspect.getmodule(moved.train).__name__ == "hetsngp.fitting.loop"
    assert dict(inspect.getmembers(moved))["train"] is moved.train
    assert inspect.unwrap(moved) is moved
    assert doctest.DocTestFinder().find(moved, "loop") == []
    with pytest.raises(TypeError, match="built-in module"):
        inspect.getsource(moved)


def test_classes_of_a_moved_module_copy_and_pickle(moved: Any) -> None:
    assert copy.deepcopy(moved.train) is moved.train
    assert pickle.loads(pickle.dumps(moved.train)) is moved.train
    assert b"fitting.loop" in pickle.dumps(moved.train, 0)
    with pytest.raises(TypeError, match="cannot pickle"):  # as every module
        copy.copy(moved)


def test_a_star_import_gets_the_public_names() -> None:
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        exec("from hetsngp.loop import *", names)
    assert names["train"] is importlib.import_module("hetsngp.fitting.loop").train


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_that_never_was_is_not_found() -> None:
    for name in ("hetsngp.loops", "hetsngp.reproduction.nothing", "loop"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
