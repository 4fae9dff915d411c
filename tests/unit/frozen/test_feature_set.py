"""Features of a data set: what the backbone makes of it, whole files of them, and heads that take them."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.contract import toy
from tests.contract.toy import same_bits
from torch import Tensor, nn

import hetsngp
from hetsngp import FeatureSet, MultiInput, extract_features
from hetsngp.models.methods import METHODS

X, Y = toy.blobs(3, 20)  # 60 rows


def network() -> nn.Sequential:
    """With statistics and dropout, which must not matter."""
    layers = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    layers[1].running_mean += 0.3
    layers[1].running_var *= 2.0
    return layers


def converted(method: str = "sngp", *, freeze: bool = False, **options: Any) -> hetsngp.Classifier:
    return hetsngp.convert(network(), method, X[:2], freeze=freeze, **{**toy.TINY, **options})


def by_hand(model: hetsngp.Classifier, x: Tensor) -> Tensor:
    """tanh of the normalised first layer, in float64."""
    state = {name.removeprefix("network."): t.double() for name, t in model.backbone.state_dict().items()}
    z = x.double() @ state["0.weight"].mT + state["0.bias"]
    z = (z - state["1.running_mean"]) / (state["1.running_var"] + 1e-5).sqrt()
    return torch.tanh(z * state["1.weight"] + state["1.bias"])


def batches(*tensors: Tensor, size: int = 25) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.split(size) for t in tensors), strict=True))


# --- extract_features -----------------------------------------------------------------------------------


@pytest.mark.parametrize("freeze", [False, True])
def test_features_are_what_enters_the_last_layer_in_eval_mode(freeze: bool) -> None:
    model = converted("deterministic", freeze=freeze).train()
    modes = [module.training for module in model.modules()]
    state = {name: t.clone() for name, t in model.state_dict().items()}
    counted: list[int] = []
    features = extract_features(model, batches(X, Y), progress=counted.append)
    torch.testing.assert_close(features.h.double(), by_hand(model, X), rtol=1e-4, atol=1e-5)
    assert torch.equal(features.y, Y)
    assert features.weight is None
    assert len(features) == 60
    assert counted == [25, 25, 10]
    assert not features.h.requires_grad
    assert features.h.dtype == torch.float32
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_weights_come_along_and_rows_of_weight_zero_do_not() -> None:
    model = converted()
    weight = torch.arange(60.0) % 4
    features = extract_features(model, batches(X, Y, weight))
    keep = weight > 0
    assert torch.equal(features.y, Y[keep])
    assert torch.equal(features.weight, weight[keep])
    torch.testing.assert_close(features.h, extract_features(model, batches(X, Y)).h[keep])


def test_where_only_some_batches_have_weights_the_others_count_one() -> None:
    first, second, third = batches(X, Y)
    features = extract_features(converted(), [first, (*second, torch.full((25,), 3.0)), third])
    assert features.weight.tolist() == [1.0] * 25 + [3.0] * 25 + [1.0] * 10
    assert torch.equal(features.y, Y)


def test_half_precision_ends_at_the_backbone() -> None:
    model = converted()
    model.backbone.bfloat16()
    features = extract_features(model, batches(X.bfloat16(), Y))
    assert features.h.dtype == torch.float32
    torch.testing.assert_close(features.h.double(), by_hand(model, X), rtol=0.05, atol=0.05)


def test_labels_of_several_classes_keep_their_columns() -> None:
    labels = torch.rand(60, 3).round()
    features = extract_features(converted(link="sigmoid"), batches(X, labels))
    assert torch.equal(features.y, labels)


@pytest.mark.parametrize(
    ("loader", "kind", "message"),
    [
        ([], ValueError, "loader is empty"),
        ([(X, Y, torch.zeros(60))], ValueError, "every weight of loader is zero"),
        ([(X, Y + 1)], ValueError, "labels from 1 to 3"),
        ([(X, Y[:5])], ValueError, "one label for each row"),
        ([X], TypeError, "labels are needed too"),
        (torch.utils.data.TensorDataset(X, Y), TypeError, "is a Dataset: wrap it"),
        ([(X / 0, Y)], ValueError, "NaN or infinite"),
    ],
)
def test_a_bad_loader_is_refused_and_modes_come_back(
    loader: Any, kind: type[Exception], message: str
) -> None:
    model = converted().train()
    with pytest.raises(kind, match=message):
        extract_features(model, loader)
    assert all(module.training for module in model.modules())


# --- a model on features --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_model_on_features_has_the_very_same_head(method: str) -> None:
    model = toy.trained(method)
    if isinstance(model, MultiInput):
        for refused in (model.on_features, lambda: extract_features(model, [(X, Y)])):
            with pytest.raises(TypeError, match="no features of single examples"):
                refused()
        return
    view = model.on_features()
    features = extract_features(model, [(X, Y)])
    assert view.head is model.head
    assert (view.dataset_size, view.calibration) == (model.dataset_size, model.calibration)
    assert same_bits(view.predict(features.h), model.predict(X))
    assert torch.equal(view(features.h), model(X))
    view.temperature = 2.5
    assert float(model.temperature) == 2.5
    with pytest.raises(ValueError, match=r"\(B, 16\) was expected"):
        view.predict(X)
    before = [p.clone() for p in model.head.parameters()]
    toy.descend(view.train(), features.h, Y, 1)
    assert any(not torch.equal(p, q) for p, q in zip(model.head.parameters(), before, strict=True))


def test_a_model_on_features_is_in_the_mode_of_the_model() -> None:
    """Reading log-probabilities in eval mode is no training: the posterior stays as good as it was."""
    model = toy.trained("sngp").eval()
    features = extract_features(model, [(X, Y)])
    view = model.on_features()
    view(features.h)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view.predict(features.h)
    assert not view.training
    assert model.train().on_features().training


# --- files ----------------------------------------------------------------------------------------------


def sets() -> dict[str, FeatureSet]:
    g = torch.Generator().manual_seed(0)
    h, y, w = torch.randn(40, 6, generator=g), torch.arange(40) % 3, torch.rand(40, generator=g)
    return {
        "plain": FeatureSet(h, y),
        "weighted": FeatureSet(h, y, w),
        "multi-hot": FeatureSet(h, torch.rand(40, 3, generator=g).round(), w.double()),
        "double": FeatureSet(h.double(), y.int()),
        "a part": FeatureSet(h[5:9], y[5:9], w[5:9]),
        "every other": FeatureSet(h[::2], y[::2], w[::2]),
        "columns": FeatureSet(h.T.contiguous().T, y),
    }


def assert_same(a: FeatureSet, b: FeatureSet) -> None:
    assert (a.weight is None) == (b.weight is None)
    for one, two in ((a.h, b.h), (a.y, b.y), (a.weight, b.weight)):
        if one is not None:
            assert one.dtype == two.dtype
            assert torch.equal(one, two)


@pytest.mark.parametrize("name", sets())
def test_what_is_saved_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    features, file = sets()[name], tmp_path / "new" / "folder" / "features.safetensors"
    features.save(file)
    assert_same(FeatureSet.load(file), features)
    assert_same(FeatureSet.load(str(file)), features)
    assert os.listdir(file.parent) == [file.name]
    with safe_open(file, framework="pt") as handle:  # a format that holds no code
        assert set(handle.keys()) == {"h", "y"} | ({"weight"} if features.weight is not None else set())
    sets()["plain"].save(file)
    assert_same(FeatureSet.load(file), sets()["plain"])


def test_the_file_is_readable_for_whom_the_umask_lets(tmp_path: Path) -> None:
    """Features are shared between people as weights are."""
    plain, file = tmp_path / "plain", tmp_path / "features"
    plain.write_text("")
    sets()["plain"].save(file)
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_head_from_saved_features_is_a_head_from_the_data(tmp_path: Path) -> None:
    one = converted(freeze=True)
    two = converted(freeze=True)
    two.backbone.load_state_dict(one.backbone.state_dict())
    extract_features(one, [(X, Y)]).save(tmp_path / "f")
    report = hetsngp.fit_head(one, FeatureSet.load(tmp_path / "f"), epochs=2)
    assert report == hetsngp.fit_head(two, [(X, Y)], epochs=2)
    assert same_bits(one.predict(X), two.predict(X))


def no_space(tensors: Any, file: Any, **options: Any) -> None:
    Path(file).write_bytes(b"half a file")
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(tensors: Any, file: Any, **options: Any) -> None:
    Path(file).write_bytes(b"half a file")
    raise KeyboardInterrupt


@pytest.mark.parametrize("fails", [no_space, interrupted])
@pytest.mark.parametrize("existing", [False, True])
def test_a_save_that_fails_leaves_what_was_there(
    fails: Any, existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "features"
    if existing:
        sets()["plain"].save(file)
    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises((OSError, KeyboardInterrupt)):
        sets()["weighted"].save(file)
    assert os.listdir(tmp_path) == (["features"] if existing else [])
    if existing:
        assert_same(FeatureSet.load(file), sets()["plain"])


def test_a_folder_is_no_place_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "features").mkdir()
    with pytest.raises(OSError):
        sets()["plain"].save(tmp_path / "features")
    assert os.listdir(tmp_path) == ["features"]


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize(
    "kind", ["text", "nothing", "pickle", "torch", "cut", "other", "half", "more", "long"]
)
def test_another_file_is_named_and_not_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, features = tmp_path / "my.features", sets()["plain"]
    tensors = {"h": features.h, "y": features.y}
    if kind == "text":
        file.write_text("h,y\n1.0,2\n")
    elif kind == "nothing":
        file.write_bytes(b"")
    elif kind == "pickle":
        file.write_bytes(pickle.dumps(Payload()))
    elif kind == "torch":
        torch.save({**tensors, "payload": Payload()}, file)
    elif kind == "cut":
        features.save(file)
        file.write_bytes(file.read_bytes()[:-8])
    elif kind == "other":
        save_file({"head.weight": features.h}, file)
    elif kind == "half":
        save_file({"h": features.h}, file)
    elif kind == "more":
        save_file({**tensors, "z": features.h.clone()}, file)
    else:
        save_file({"h": features.h, "y": features.y[:-1].clone()}, file)
    with pytest.raises(ValueError, match=r"my\.features was not written by FeatureSet\.save"):
        FeatureSet.load(file)
    assert not (tmp_path / "unpickled").exists()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"my\.features"):
        FeatureSet.load(tmp_path / "my.features")


def test_features_cannot_be_changed_by_accident() -> None:
    features: Any = sets()["plain"]
    with pytest.raises(AttributeError):
        features.h = torch.zeros(1)


@pytest.mark.parametrize("value", [None, 3, "h", [1.0], torch.tensor(1.0)])
def test_a_feature_set_holds_tensors(value: Any) -> None:
    good = torch.ones(3, 2)
    for arguments in (
        (value, torch.arange(3)),
        (good, value),
        *([] if value is None else [(good, torch.arange(3), value)]),
    ):
        with pytest.raises(TypeError, match="of a FeatureSet must be a tensor"):
            FeatureSet(*arguments)


def test_reading_a_feature_set_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*FeatureSet\.save"):
        FeatureSet.load(tmp_path / "nothing")
    with pytest.raises(TypeError, match="path must be the name of a file"):
        FeatureSet.load(3)  # type: ignore[arg-type]
