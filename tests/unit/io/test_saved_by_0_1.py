"""Models and runs that 0.1 saved: they load with the same bits, predict the same and train on.

``tests/saved_0_1/make.py`` wrote them with 0.1.0. ``expected.safetensors`` beside a model holds inputs and
what 0.1 predicted for them.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hetsngp
from hetsngp.files import has_checksum
from hetsngp.functional.link import TARGET_ERROR
from hetsngp.models.classifier import Classifier
from hetsngp.models.components import DEFAULT_AMPLITUDE

SAVED = Path(__file__).parents[2] / "saved_0_1"
MODELS = ("hetsngp", "ensemble", "converted", "converted_bert")


def own_network() -> nn.Module:
    """The network that ``make.py`` converted."""
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))


def load(folder: Path) -> Any:
    if folder.name == "converted_bert":
        pytest.importorskip("transformers")
    return hetsngp.load(folder, backbone=own_network() if folder.name == "converted" else None)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / json.loads((folder / "config.json").read_text())["weights"])


def state_of(model: Any) -> dict[str, Tensor]:
    """State dicts under the names of the file, where members have numbers."""
    if isinstance(model, Classifier):
        return model.state_dict()
    states = enumerate(member.state_dict() for member in model.members)
    return {f"members.{i}.{name}": t for i, state in states for name, t in state.items()}


def assert_same_bits(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name], tensor), name


def assert_predicts(model: Any, folder: Path) -> None:
    expected = load_file(folder / "expected.safetensors")
    given = {name.removeprefix("input."): expected.pop(name) for name in list(expected) if "input." in name}
    prediction = model.predict(given["x"] if list(given) == ["x"] else given)
    assert set(expected) >= {"probs", "clean_probs", "data_uncertainty", "model_uncertainty", "ood_score"}
    for name, value in expected.items():
        # Integrals took more points then: their errors are allowed for.
        error = 1e-6 if "variance" in name else 1.5 * TARGET_ERROR if "probs" in name else 0.05
        torch.testing.assert_close(getattr(prediction, name), value, rtol=1e-6, atol=error, msg=name)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """As when they were written: the number of threads decides the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_loads_with_the_same_bits_and_predicts_the_same(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # a file is not something that a user can mend
        warnings.filterwarnings("ignore", module="torch|transformers")
        model = load(SAVED / name)
    assert_same_bits(state_of(model), tensors_of(SAVED / name))
    assert_predicts(model, SAVED / name)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_saved_again_has_the_same_tensors(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    hetsngp.save(load(SAVED / name), folder)
    assert_same_bits(tensors_of(folder), tensors_of(SAVED / name))
    written, before = (json.loads((f / "config.json").read_text()) for f in (folder, SAVED / name))
    assert has_checksum(written)
    written.pop("checksum")
    for entry in before.get("members", [before]):  # options since then, and their values for such a model
        entry["model"]["options"] |= {"kernel": "rbf", "linear_share": 0.5}
    assert written == {**before, "version": 2}  # with the same name of the weights, which is their checksum
    assert_predicts(load(folder), SAVED / name)


def test_a_config_without_a_checksum_gives_a_warning_until_it_is_saved_again(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"has no checksum.*save it again, hetsngp\.save") as caught:
        model = load(SAVED / "hetsngp")
    assert len(caught) == 1
    hetsngp.save(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path)


def test_the_checks_can_fail(tmp_path: Path) -> None:
    model = load(SAVED / "hetsngp")
    for name in ("head.latent.beta", "head.temperature"):
        changed = {key: t.clone() for key, t in tensors_of(SAVED / "hetsngp").items()}
        found = next((key for key in changed if key.endswith(name.rpartition(".")[2])), None)
        assert found is not None, sorted(changed)
        changed[found] *= 1 + 1e-5
        with pytest.raises(AssertionError):
            assert_same_bits(state_of(model), changed)
    shutil.copytree(SAVED / "hetsngp", tmp_path / "hetsngp")
    expected = load_file(SAVED / "hetsngp" / "expected.safetensors")
    for name in ("probs", "model_uncertainty", "ood_score"):
        changed = {**expected, name: expected[name] + 0.06}
        save_file(changed, tmp_path / "hetsngp" / "expected.safetensors")
        with pytest.raises(AssertionError):
            assert_predicts(model, tmp_path / "hetsngp")
    missing = {key: t for key, t in tensors_of(SAVED / "hetsngp").items() if "temperature" not in key}
    with pytest.raises(AssertionError):
        assert_same_bits(state_of(model), missing)


# --- runs of `hetsngp train` ----------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of both runs, their recipe and their images, in the current folder."""
    pytest.importorskip("lightning")
    shutil.copytree(SAVED, tmp_path / "runs", ignore=shutil.ignore_patterns("*.py", "*.pkl", "converted*"))
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"


def train(folder: str, recipe: str = "recipe.toml", changes: Sequence[str] = ()) -> dict[str, Any]:
    """Train as ``make.py`` did, with the names of today."""
    from hetsngp.training import CheckpointConfig, Engine, Hardware
    from hetsngp.training.images import train_images
    from hetsngp.training.recipes.recipe import read_recipe

    engine = Engine(Hardware(devices=1, accelerator="cpu"))
    checkpoints = CheckpointConfig(Path(folder), seconds=0, tensorboard=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the keys of 0.1 in the recipe
        return train_images(read_recipe(recipe, changes), engine, checkpoints, show=False)


def test_a_finished_run_is_served(run: Path) -> None:
    from hetsngp.serving import open_run

    served = open_run(run / "run", torch.device("cpu"))
    assert_same_bits(state_of(served.model), tensors_of(SAVED / "run" / "model"))
    assert_predicts(served.model, SAVED / "run")
    assert served.inputs.size == (8, 8)
    summary = json.loads((SAVED / "run" / "summary.json").read_text())
    assert served.thresholds.to_dict() == summary["thresholds"]


def test_a_finished_run_is_not_trained_again_by_its_recipe(run: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in (run / "run").rglob("*")}
    summary = train("run")
    before = json.loads((SAVED / "run" / "summary.json").read_text())
    assert {**summary, "recipe": None} == {**before, "recipe": None}
    assert {path: path.stat().st_mtime_ns for path in (run / "run").rglob("*")} == files


def test_another_value_of_a_renamed_key_is_another_recipe(run: Path) -> None:
    """So that what is not trained again is recognised by its values, not by ignoring what has a new name."""
    text = (run / "recipe.toml").read_text()
    assert "gp_lr = 2.0" in text
    (run / "recipe.toml").write_text(text.replace("gp_lr = 2.0", "gp_lr = 3.0"))
    train("run")
    with pytest.raises(AssertionError):
        assert_same_bits(tensors_of(run / "run" / "model"), tensors_of(SAVED / "run" / "model"))


# Statistics of features that these models never read: 0.1 gathered them all the same.
UNREAD = (
    "latent.normalizer.mean_square",
    "latent.normalizer.log_length",
    "latent.normalizer.log_variance",
    "noise.normalizer.log_length",
    "noise.normalizer.log_variance",
    "noise.normalizer.distance",
)


CALIBRATED = ("head.temperature", "head.mode_temperature", "head.latent.posterior.gamma")


def without_unread(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    assert all(f"head.{name}" in tensors for name in UNREAD)
    # The OOD score, which is fitted with the posterior, came after 0.1.
    kept = {name: t for name, t in tensors.items() if not name.startswith("head.ood.")}
    return {name: t for name, t in kept.items() if name.removeprefix("head.") not in UNREAD}


def test_an_interrupted_run_resumes_and_ends_with_the_same_bits(run: Path) -> None:
    first = (run / "interrupted" / "metrics.csv").read_text().splitlines()
    assert len(first) == 2  # a header and an epoch
    train("interrupted")
    assert (run / "interrupted" / "metrics.csv").read_text().splitlines()[1] == first[1]  # not trained anew
    resumed, whole = tensors_of(run / "interrupted" / "model"), tensors_of(SAVED / "run" / "model")
    for name in CALIBRATED:  # after training; another search has another last digit
        torch.testing.assert_close(resumed.pop(name), whole.pop(name), rtol=0.005, atol=0)
    assert_same_bits(without_unread(resumed), without_unread(whole))


def amplitude_of(run: Path) -> float:
    return float(json.loads((run / "model" / "config.json").read_text())["model"]["options"]["amplitude"])


def test_an_interrupted_run_keeps_the_amplitude_that_was_the_default(run: Path) -> None:
    """10, which its checkpoint does not name: given, it is the same run, and that of today is another."""
    with pytest.raises(ValueError, match=r"holds a run on other data \(amplitude 10\.0, now 5\.0"):
        train("interrupted", changes=["options.amplitude=5"])
    train("interrupted", changes=["options.amplitude=10"])
    assert amplitude_of(run / "interrupted") == 10.0
    train("new")
    assert amplitude_of(run / "new") == 5.0


def test_a_run_keeps_its_amplitude_when_the_default_changes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is lost, and written again from the checkpoint, with a library whose default is 7."""
    train("new")
    whole = tensors_of(run / "new" / "model")
    shutil.rmtree(run / "new" / "model")
    (run / "new" / "summary.json").unlink()
    monkeypatch.setitem(DEFAULT_AMPLITUDE, "convolutional", 7.0)
    train("new")
    assert amplitude_of(run / "new") == 5.0
    assert_same_bits(tensors_of(run / "new" / "model"), whole)


def test_a_run_of_a_given_amplitude_is_not_resumed_with_the_default(run: Path) -> None:
    train("new", changes=["options.amplitude=3"])
    assert json.loads((run / "new" / "summary.json").read_text())["amplitude"] == 3.0
    shutil.rmtree(run / "new" / "model")
    (run / "new" / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"holds a run on other data \(amplitude 3\.0, now 5\.0"):
        train("new")


def test_the_checkpoint_of_an_interrupted_run_is_what_counts(run: Path) -> None:
    """Without it the same training begins anew; with a changed one it ends elsewhere."""
    folder = run / "interrupted" / "checkpoint"
    tensors = tensors_of(folder)
    name = next(name for name in tensors if name.endswith("/model/backbone.stem.weight"))
    from hetsngp.io import storage

    config, _ = storage.read(folder)
    description = {k: v for k, v in config.items() if k not in ("format", "version", "weights", "sha256")}
    storage.write(folder, description, {**tensors, name: tensors[name] + 0.01})
    train("interrupted")
    resumed, whole = tensors_of(run / "interrupted" / "model"), tensors_of(SAVED / "run" / "model")
    with pytest.raises(AssertionError):
        assert_same_bits(without_unread(resumed), without_unread(whole))
