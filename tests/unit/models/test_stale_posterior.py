"""A stale posterior is noticed however the weights changed, and only if they changed."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract import toy
from torch import Tensor, nn

import hetsngp
from hetsngp.nn.posteriors import checksum, marks_of

Change = Callable[[Any], Any]


def _warns(model: Any) -> bool:
    x = toy.blobs()[0].to(next(p.dtype for p in model.backbone.parameters()))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.predict(x)
    return any("trained after fit_posterior" in str(warning.message) for warning in found)


def _edited(change: Callable[[Tensor], Any]) -> Change:
    def apply(model: Any) -> Any:
        with torch.no_grad():
            change(next(model.parameters()))
        return model

    return apply


_scaled = _edited(lambda p: p.mul_(1.5))


def _step(kind: type[torch.optim.Optimizer], **options: Any) -> Change:
    def apply(model: Any) -> Any:
        optimizer = kind(model.parameters(), lr=1e-3, **options)
        model.loss(*toy.blobs()).backward()
        optimizer.step()
        return model

    return apply


def _pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _state_of_itself(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer, weights_only=True))
    return model


def _other_weights(model: Any) -> Any:
    state = {n: t + 0.01 if n == "head.latent.beta" else t for n, t in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def _new_parameter(model: Any) -> Any:
    layer = next(m for m in model.backbone.modules() if isinstance(m, nn.Linear))
    layer.weight = nn.Parameter(layer.weight.detach() * 1.5)
    return model


STALE: dict[str, Change] = {
    "SGD": _step(torch.optim.SGD),
    "AdamW": _step(torch.optim.AdamW),
    "fused AdamW": _step(torch.optim.AdamW, fused=True),  # leaves the version of a tensor as it is
    "state dict of other weights": _other_weights,
    "in place": _scaled,
    "one value": _edited(lambda p: p.view(-1)[0].add_(1e-3)),
    "sign": _edited(lambda p: p.neg_()),
    "order": _edited(lambda p: p.copy_(p.flip(0))),
    "data": _edited(lambda p: setattr(p, "data", p.data * 1.5)),
    "new parameter": _new_parameter,
    "after a deepcopy": lambda m: _scaled(copy.deepcopy(m)),
    "after a pickle": lambda m: _scaled(_pickled(m)),
    "after a conversion": lambda m: _scaled(m.double()),
    "before a deepcopy": lambda m: copy.deepcopy(_scaled(m)),
    "before a pickle": lambda m: _pickled(_scaled(m)),
    "before a conversion": lambda m: _scaled(m).half(),
}
FRESH: dict[str, Change] = {
    "nothing": lambda m: m,
    "deepcopy": copy.deepcopy,
    "pickle": _pickled,
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "half and back": lambda m: m.half().float(),
    "head alone": lambda m: (m.head.double(), m)[1],
    "state dict": _state_of_itself,
    "assigned": lambda m: (m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True), m)[1],
    "same values": _edited(lambda p: p.copy_(p.clone())),
    "frozen": lambda m: m.requires_grad_(False),
    "a loss without a step": lambda m: (m.loss(*toy.blobs()).backward(), m)[1],
    "temperature": lambda m: (setattr(m, "temperature", 2.0), m)[1],
}


@pytest.mark.parametrize("predicted", [False, True], ids=["", "after a prediction"])
@pytest.mark.parametrize("name", STALE)
def test_changed_weights_are_noticed_in_eval_mode(name: str, predicted: bool) -> None:
    model = toy.trained("sngp")
    assert not predicted or not _warns(model)
    model = STALE[name](model)
    assert model._trained_since_fit
    assert _warns(model)
    assert not _warns(model)  # once
    hetsngp.fit_posterior(model.float(), [toy.blobs()])
    assert not _warns(model)


@pytest.mark.parametrize("name", FRESH)
def test_the_same_weights_are_no_reason_to_warn(name: str) -> None:
    model = FRESH[name](toy.trained("hetsngp"))
    assert not model._trained_since_fit
    assert not _warns(model)


def test_weights_that_come_with_their_own_posterior() -> None:
    """The state of another fitted model is consistent; that of one whose posterior is older is not."""
    model, other = toy.trained("sngp"), _scaled(toy.trained("sngp"))
    hetsngp.fit_posterior(other, [toy.blobs()])
    model.load_state_dict(other.state_dict())
    assert not _warns(model)
    stale = _scaled(copy.deepcopy(other))
    model.load_state_dict(stale.state_dict())
    assert _warns(model)


def test_saved_models_know_it(tmp_path: Path) -> None:
    model = toy.trained("sngp")
    hetsngp.save(model, tmp_path / "fresh")
    hetsngp.save(_scaled(model), tmp_path / "stale")
    assert not _warns(hetsngp.load(tmp_path / "fresh"))
    assert _warns(hetsngp.load(tmp_path / "stale"))
    assert _warns(_scaled(hetsngp.load(tmp_path / "fresh")))


def test_the_view_on_features_knows_it() -> None:
    model = _scaled(toy.trained("sngp"))
    with pytest.warns(UserWarning, match="trained after fit_posterior"):
        model.on_features().predict(torch.zeros(2, 16))


def test_models_without_a_posterior_never_warn() -> None:
    assert not _warns(_scaled(toy.trained("deterministic")))


def test_a_compiled_prediction_does_not_look_at_marks() -> None:
    assert (
        torch.compile(lambda x: x + (marks_of(nn.Linear(2, 2)) is None), backend="eager")(torch.ones(1)) == 2
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_the_checksum_depends_on_every_value_and_its_place(dtype: torch.dtype) -> None:
    values = torch.randperm(97).to(dtype).reshape(97, 1)
    found = {checksum(values)}
    for index in range(len(values)):
        changed = values.clone()
        changed[index] += 1
        found.add(checksum(changed))
    assert len(found) == 98
    assert checksum(values.flip(0)) not in found
    assert checksum(values.T) == checksum(values.clone())
    assert checksum(-values) != checksum(values)


def test_a_model_on_the_meta_device_has_no_weights() -> None:
    model = toy.trained("sngp").to("meta")
    for call in (model.predict, lambda x: hetsngp.fit_posterior(model, [(x, toy.blobs()[1])])):
        with pytest.raises(ValueError, match="the model is on the meta device"):
            call(toy.blobs()[0])
