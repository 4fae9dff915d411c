"""Weights that are not finite or of another type, and values in a config of every wrong type."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract import toy
from tests.contract.toy import same_bits
from tests.unit.io.test_artifact import Own, X, config_of, edit, replace_weights, weights_of
from torch import Tensor, nn

import hetsngp
from hetsngp import ArtifactError
from hetsngp.files import with_checksum


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hetsngp.save(toy.trained("hetsngp"), tmp_path / "model")
    return tmp_path / "model"


def put(folder: Path, name: str, tensor: Tensor) -> None:
    tensors = {**load_file(weights_of(folder)), name: tensor}
    save_file(tensors, folder / "other")
    replace_weights(folder, (folder / "other").read_bytes())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(saved: Path, tmp_path: Path, value: float) -> None:
    model = hetsngp.load(saved)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    names = [name for name, t in state.items() if t.is_floating_point() and t.numel()]
    parameters = dict(model.named_parameters())
    assert len(names) > 10
    for name in names:
        # Masks of a network of one's own may be infinite; ours has none.
        legal = name.startswith("backbone.") and name not in parameters and "spectral" not in name
        if legal and not math.isnan(value):
            continue
        changed = state[name].clone(memory_format=torch.contiguous_format)
        changed.view(-1)[-1] = value
        model.load_state_dict({**state, name: changed})
        with pytest.raises(ValueError, match=rf"cannot be saved: {name} has (NaN|infinite values)"):
            hetsngp.save(model, tmp_path / "never")
        put(saved, name, changed)
        with pytest.raises(ArtifactError, match=rf"not of a model: {name} has (NaN|infinite values)"):
            hetsngp.load(saved)
        put(saved, name, state[name].contiguous())
    assert not (tmp_path / "never").exists()
    hetsngp.load(saved)


class Masked(Own):
    """With a mask as attention has it, and an integer table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))
        self.register_buffer("table", torch.arange(4))


def test_masks_of_a_network_may_be_infinite_but_not_nan(tmp_path: Path) -> None:
    model = hetsngp.build("sngp", Masked(), 3, posterior="none", **toy.TINY)
    hetsngp.save(model, tmp_path)
    twin = hetsngp.load(tmp_path, backbone=Masked())
    assert same_bits(twin.predict(X), model.predict(X))
    model.backbone.mask[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"backbone\.mask has NaN"):
        hetsngp.save(model, tmp_path)
    model.backbone.mask[0, 0] = 0
    model.backbone.norm.running_var[0] = math.inf
    with pytest.raises(ValueError, match=r"running_var has infinite values"):
        hetsngp.save(model, tmp_path)
    assert same_bits(hetsngp.load(tmp_path, backbone=Masked()).predict(X), twin.predict(X))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8]
)
@pytest.mark.parametrize("name", ["head.latent.beta", "head.temperature", "backbone.blocks.0.weight"])
def test_other_types_where_real_numbers_belong(saved: Path, name: str, dtype: torch.dtype) -> None:
    tensors = load_file(weights_of(saved))
    name = name if name in tensors else next(n for n in tensors if n.startswith("backbone."))
    put(saved, name, tensors[name].to(dtype))
    with pytest.raises(ArtifactError, match=rf"{name} has dtype {dtype}, but must be a real number"):
        hetsngp.load(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_other_types_where_whole_numbers_and_switches_belong(saved: Path, dtype: torch.dtype) -> None:
    tensors = load_file(weights_of(saved))
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.dtype == dtype:
            continue
        put(saved, name, tensor.to(dtype))
        with pytest.raises(ArtifactError, match=rf"{name} has dtype {dtype}, but must be {tensor.dtype}"):
            hetsngp.load(saved)
        put(saved, name, tensor)
    hetsngp.load(saved)


def test_a_type_that_cannot_be_computed_with_is_not_saved(tmp_path: Path) -> None:
    model = toy.build("deterministic")
    layer = model.head.latent.linear
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e5m2), requires_grad=False)
    with pytest.raises(ValueError, match=r"linear\.weight has dtype torch\.float8_e5m2"):
        hetsngp.save(model, tmp_path / "never")


def test_the_member_is_named(tmp_path: Path) -> None:
    models = [toy.build("deterministic") for _ in range(2)]
    with torch.no_grad():
        models[1].head.latent.linear.weight.fill_(math.nan)
    with pytest.raises(ValueError, match=r"member 2: head\.latent\.linear\.weight has NaN"):
        hetsngp.save(hetsngp.Ensemble(models), tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("mixed", ["double", "half backbone", "bfloat16 backbone", "double head"])
def test_every_precision_is_saved_and_loaded(mixed: str, tmp_path: Path) -> None:
    model = toy.trained("sngp")
    {
        "double": lambda: model.double(),
        "half backbone": lambda: model.backbone.half(),
        "bfloat16 backbone": lambda: model.backbone.bfloat16(),
        "double head": lambda: model.head.double(),
    }[mixed]()
    hetsngp.save(model, tmp_path)
    twin = hetsngp.load(tmp_path)
    assert {n: t.dtype for n, t in twin.state_dict().items()} == {
        n: t.dtype for n, t in model.state_dict().items()
    }
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in twin.state_dict().items())


# --- the config ---------------------------------------------------------------------------------------------


def paths(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [before, *(path for key, part in inner for path in paths(part, (*before, key)))]


WRONG: list[Any] = [
    None,
    True,
    0,
    -1,
    10**12,
    10**400,
    1e300,
    math.nan,
    math.inf,
    "",
    "x",
    [],
    [[]],
    {},
    {"x": 1},
]


def test_values_of_every_wrong_type(saved: Path) -> None:
    """Each entry replaced by each of these values loads, or is refused by name; nothing else happens."""
    before = config_of(saved)
    own = [path for path in paths(before) if path and path[0] != "calibration"]
    loaded, errors = 0, []
    for path in own:
        for wrong in WRONG:
            config = json.loads(json.dumps(before))
            inner = config
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = wrong
            (saved / "config.json").write_text(json.dumps(with_checksum(config)))
            try:
                hetsngp.load(saved)
                loaded += 1
            except ArtifactError as error:
                errors.append(str(error))
    assert not any("\n" in error for error in errors)
    assert len(errors) > 4 * loaded > 0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model__options__num_samples": 10**12}, "HETSNGP_MAX_NUM_SAMPLES"),
        ({"model__options__batch_repetition": 10**12}, "batch_repetition"),
        ({"model__dataset_size": "60"}, "dataset_size is '60'"),
        ({"model__dataset_size": True}, "dataset_size is True"),
        ({"model__dataset_size": [60]}, r"dataset_size is \[60\]"),
        ({"model__dataset_size": -1}, "dataset_size must be"),
        ({"model__dataset_size": 10**400}, "dataset_size must be"),
        ({"model__options__sample_beta": "yes"}, "sample_beta"),
        ({"model__given": 3}, "given is 3"),
        ({"model__given": [3]}, "given must be"),
        ({"model__num_classes": True}, "num_classes is True"),
        ({"calibration": [1]}, r"calibration is \[1\]"),
        ({"trained_since_fit": 1}, "trained_since_fit is 1"),
        ({"trained_since_fit": None}, "trained_since_fit is None"),
    ],
    ids=str,
)
def test_wrong_types_are_named(saved: Path, change: dict[str, Any], word: str) -> None:
    edit(saved, **change)
    with pytest.raises(ArtifactError, match=word):
        hetsngp.load(saved)


def test_a_model_that_could_not_be_loaded_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy.build("hetsngp", num_samples=200_000)
    with pytest.raises(ValueError, match=r"200,000 integration points.*HETSNGP_MAX_NUM_SAMPLES=200000"):
        hetsngp.save(model, tmp_path / "model")
    monkeypatch.setenv("HETSNGP_MAX_NUM_SAMPLES", "200000")
    hetsngp.save(model, tmp_path / "model")
    assert hetsngp.load(tmp_path / "model").config["options"]["num_samples"] == 200_000


EXTRACTORS = [
    {"reads": "output", "classifier": 3},
    {"reads": "magic"},
    {"reads": "input", "classifier": None},
    {"num_outputs": 10**12},
    {"num_outputs": "3"},
    {"num_features": 17},
    {"frozen": "no"},
    {"classifier": "no such layer"},
]


@pytest.mark.parametrize("change", EXTRACTORS, ids=str)
def test_a_converted_networks_description_is_checked(change: dict[str, Any], tmp_path: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))

    hetsngp.save(hetsngp.convert(network(), "deterministic", X), tmp_path)
    edit(tmp_path, **{f"model__backbone__extractor__{name}": value for name, value in change.items()})
    with pytest.raises(ArtifactError):
        hetsngp.load(tmp_path, backbone=network())


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried…")],
    ids=["python", "torch"],
)
def test_a_lack_of_memory_is_not_called_damage(
    saved: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetsngp.io import artifact

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(artifact, "build", fail)
    with pytest.raises(MemoryError, match="not enough memory for the model"):
        hetsngp.load(saved)
