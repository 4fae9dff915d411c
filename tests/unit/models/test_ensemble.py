"""Ensembles as one thing: trained in one call, saved in one folder, loaded to the bit."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from tests.contract import toy
from tests.contract.toy import same_bits
from tests.unit.io.test_artifact import (
    Own,
    Single,
    config_of,
    edit,
    leftovers,
    name_of_change,
    refused,
    replace_weights,
    weights_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp import ArtifactError, Ensemble
from hetsngp.fitting.loop import EpochResult, best_epoch, train
from hetsngp.io import storage
from hetsngp.models.methods import METHODS
from hetsngp.nn.backbones import ResidualMLP

X = toy.blobs(3)[0][:9]


def same_state(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(torch.equal(t, second[name]) for name, t in first.items())


def owner(method: str, width: int = 8, moved: float = 0.0) -> Any:
    """A fitted model on a network that hetsngp does not know."""
    model = hetsngp.build(method, Own(width), 3, dataset_size=36, **toy.TINY)
    for parameter in model.parameters():
        parameter.data += moved
    hetsngp.fit_posterior(model, toy.loader(*toy.blobs(3)))
    return model.eval()


def pair() -> Ensemble:
    return Ensemble([toy.trained("hetsngp"), toy.trained("sngp")])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hetsngp.save(pair(), tmp_path / "ensemble")
    return tmp_path / "ensemble"


# --- round trips --------------------------------------------------------------------------------------------


def check_round_trip(ensemble: Ensemble, folder: Path, **options: Any) -> Ensemble:
    hetsngp.save(ensemble, folder)
    assert leftovers(folder) == []  # one config, one file of weights
    twin = hetsngp.load(folder, **options)
    assert type(twin) is Ensemble
    assert not any(module.training for module in twin.modules())
    assert same_bits(twin.predict(X), ensemble.predict(X))
    assert torch.equal(twin.predict_probs(X), ensemble.predict_probs(X))
    assert torch.equal(twin(X), ensemble.eval()(X))
    for member, original in zip(twin.members, ensemble.members, strict=True):
        assert same_state(member, original)
        assert type(member) is type(original)
        assert member.config == original.config
        assert member.dataset_size == original.dataset_size
        assert member.calibration == json.loads(json.dumps(original.calibration))
    return twin


@pytest.mark.parametrize("method", METHODS)
def test_round_trip_of_a_trained_fitted_and_calibrated_ensemble(method: str, tmp_path: Path) -> None:
    def network(generator: torch.Generator) -> nn.Module:
        return hetsngp.nn.backbones.ResidualMLP(2, 8, 1, generator=generator)

    ensemble = hetsngp.build_ensemble(method, network, 3, seeds=[0, 1], **toy.TINY)
    x, y = toy.blobs(3, flip=0.3)
    train(ensemble, toy.loader(x, y), epochs=3, lr=0.02)
    hetsngp.fit_posterior(ensemble, toy.loader(x, y), toy.loader(*toy.blobs(3, 8, flip=0.3, seed=5)))
    ensemble.members[1].dataset_size = 1234
    assert not same_bits(*(member.predict(X) for member in ensemble.members))
    twin = check_round_trip(ensemble, tmp_path / "a" / "b")  # parents are made
    assert [member.dataset_size for member in twin.members] == [36, 1234]
    assert all(member.calibration["held_out"] == 24 for member in twin.members)
    hetsngp.save(twin, tmp_path / "again")
    assert weights_of(tmp_path / "again").name == weights_of(tmp_path / "a" / "b").name  # content decides
    train(twin, toy.loader(x, y), epochs=1)  # it trains on


def test_members_of_different_methods(tmp_path: Path) -> None:
    check_round_trip(Ensemble([toy.trained(method) for method in METHODS]), tmp_path)


@pytest.mark.parametrize("members", [1, 2, 11])
def test_ensembles_of_any_size_keep_their_order(members: int, tmp_path: Path) -> None:
    """Eleven: member 10 comes after member 9, not after member 1."""
    models = [toy.build("deterministic") for _ in range(members)]
    for number, model in enumerate(models):
        model.head.latent.linear.bias.data += 0.1 * number
    twin = check_round_trip(Ensemble(models), tmp_path)
    assert len(twin.members) == members


def test_an_ensemble_in_double_precision(tmp_path: Path) -> None:
    ensemble = Ensemble([toy.trained("hetsngp").double(), toy.trained("posterior_network").double()])
    hetsngp.save(ensemble, tmp_path)
    twin = hetsngp.load(tmp_path)
    assert same_bits(twin.predict(X.double()), ensemble.predict(X.double()))


def test_each_member_remembers_that_it_was_trained_after_its_fit(tmp_path: Path) -> None:
    ensemble = pair()
    stale = ensemble.members[1].train()
    stale.loss(*toy.blobs(3)).backward()
    hetsngp.save(ensemble.eval(), tmp_path)
    assert [member._trained_since_fit for member in hetsngp.load(tmp_path).members] == [False, True]


def test_what_is_written(saved: Path) -> None:
    config, members = config_of(saved), pair().members
    assert list(config) == ["format", "version", "weights", "sha256", "members", "checksum"]
    for entry, member in zip(config["members"], members, strict=True):
        assert list(entry) == ["model", "calibration", "trained_since_fit"]
        assert entry["model"] == {**member.config, "dataset_size": member.dataset_size}
    tensors = load_file(weights_of(saved))
    names = [f"members.{i}.{name}" for i, member in enumerate(members) for name in member.state_dict()]
    assert sorted(tensors) == sorted(names)
    assert torch.equal(tensors["members.1.head.latent.beta"], members[1].head.latent.beta)


def test_members_may_share_a_network(tmp_path: Path) -> None:
    """In the file each member has a copy."""
    one = toy.trained("deterministic")
    two = hetsngp.build("heteroscedastic", one.backbone, 3, **toy.TINY).eval()
    twin = check_round_trip(Ensemble([one, two]), tmp_path)
    assert len({id(member.backbone) for member in twin.members}) == 2


def test_a_model_and_an_ensemble_replace_each_other(saved: Path) -> None:
    (saved / "model-mine.safetensors").write_text("mine")
    model = toy.trained("sngp")
    for what in (model, pair(), model):
        hetsngp.save(what, saved)
        assert leftovers(saved) == ["model-mine.safetensors"]
        found = hetsngp.load(saved)
        assert type(found) is type(what)
        assert same_bits(found.predict(X), what.predict(X))


def test_it_is_loaded_onto_a_device(saved: Path) -> None:
    twin = hetsngp.load(saved, device="meta")
    assert {t.device.type for t in twin.state_dict().values()} == {"meta"}
    assert {t.device.type for t in hetsngp.load(saved, device="cpu").state_dict().values()} == {"cpu"}


def test_only_ensembles_of_built_models_are_saved(tmp_path: Path) -> None:
    class Of(Ensemble):
        """Features of any input."""

        def __init__(self, *given: Any) -> None:
            super().__init__([toy.build("sngp")])
            self.given = list(given)

        @property
        def members(self) -> list[Any]:
            return getattr(self, "given", None) or super().members

    model = toy.build("sngp")
    with pytest.raises(
        TypeError, match=r"no Ensemble as member 2.*Ensemble\(\[\*a\.members, \*b\.members\]\)"
    ):
        hetsngp.save(Of(model, Ensemble([model])), tmp_path / "x")
    with pytest.raises(TypeError, match=r"made by hetsngp\.build, got Linear as member 3 of an Ensemble"):
        hetsngp.save(Of(model, model, nn.Linear(1, 1)), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_more_members_than_can_be_read_again_are_not_written(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = config_of(saved)
    size = (saved / "config.json").stat().st_size
    monkeypatch.setattr(storage, "_MAX_CONFIG_BYTES", size + 600)
    larger = Ensemble([*pair().members, toy.trained("deterministic")])
    with pytest.raises(ArtifactError, match="could not be read again: save fewer members"):
        hetsngp.save(larger, saved)
    assert config_of(saved) == before
    assert leftovers(saved) == []
    hetsngp.load(saved)


# --- networks of one's own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_one_network_is_copied_for_each_member(method: str, tmp_path: Path) -> None:
    ensemble = Ensemble([owner(method), toy.trained(method), owner(method, moved=0.1)])
    hetsngp.save(ensemble, tmp_path)
    with pytest.raises(ArtifactError, match=r"member 1: .*'Own'.*cannot rebuild.*backbone=MyNetwork\(\)"):
        hetsngp.load(tmp_path)
    given = Own()
    before = copy.deepcopy(given)
    twin = check_round_trip(ensemble, tmp_path, backbone=given)
    assert same_state(given, before)  # only copies were filled
    assert type(given.layer) is nn.Linear
    kinds = [type(member.backbone).__name__ for member in twin.members]
    assert kinds == ["Own", "ResidualMLP", "Own"]
    check_round_trip(twin, tmp_path, backbone=Own())  # and again


@pytest.mark.parametrize("method", METHODS)
def test_a_network_for_each_member(method: str, tmp_path: Path) -> None:
    ensemble = Ensemble([owner(method), toy.trained(method), owner(method, width=9)])
    for networks in ([Own(), None, Own(9)], (Own(), None, Own(9))):
        twin = check_round_trip(ensemble, tmp_path, backbone=networks)
        assert twin.members[0].backbone is networks[0]
        assert twin.members[2].backbone is networks[2]


def test_networks_that_do_not_fit(tmp_path: Path) -> None:
    hetsngp.save(Ensemble([owner("sngp"), owner("sngp", width=9), toy.trained("sngp")]), tmp_path)
    for given, words in (
        (Own(), r"do not fit.*member 2: .*give a list, backbone=\[MyNetwork\(\), Another\(\)\]"),
        ([Own(), Own(), None], "do not fit.*member 2: "),
        ([Own(8), Own(9), Own(9)], "do not fit.*member 3: "),
        ([Own(), None, None], "member 2: its backbone is 'Own'"),
        ([None, None, None], "member 1: its backbone is 'Own'"),
    ):
        with pytest.raises(ArtifactError, match=words):
            hetsngp.load(tmp_path, backbone=given)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda: [Own()], ValueError, "a list of 1 for an ensemble of 2: .*None where.*which is copied"),
        (lambda: [Own(), Own(), Own()], ValueError, "a list of 3 for an ensemble of 2"),
        (list, ValueError, "a list of 0 for an ensemble of 2"),
        (lambda: [Own()] * 2, ValueError, r"two members would share.*\[MyNetwork\(\) for _ in range\(n\)\]"),
        (lambda: [Own(), Own], TypeError, r"backbone=MyNetwork\(\), got <class.*a network or None for each"),
        (lambda: Own, TypeError, r"backbone=MyNetwork\(\), got <class"),
        (lambda: "Own", TypeError, r"backbone=MyNetwork\(\), got 'Own'"),
        (lambda: {"0": Own()}, TypeError, r"backbone=MyNetwork\(\), got {"),
        (lambda: iter([Own(), Own()]), TypeError, r"backbone=MyNetwork\(\), got <list_iterator"),
        (Single, ArtifactError, r"cannot be copied for each member: give a list .*there is only one of me"),
    ],
)
def test_what_is_no_network_for_each_member(
    given: Callable[[], Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    hetsngp.save(Ensemble([owner("sngp"), owner("sngp")]), tmp_path)
    with pytest.raises(error, match=words):
        hetsngp.load(tmp_path, backbone=given())


def test_networks_that_share_a_part_are_refused(tmp_path: Path) -> None:
    hetsngp.save(Ensemble([owner("sngp"), owner("sngp")]), tmp_path)
    one, two = Own(), Own()
    two.layer = one.layer
    with pytest.raises(ValueError, match="two members would share"):
        hetsngp.load(tmp_path, backbone=[one, two])


def test_a_network_that_cannot_be_copied_can_be_listed(tmp_path: Path) -> None:
    check_round_trip(Ensemble([owner("sngp"), owner("hetsngp")]), tmp_path, backbone=[Single(), Single()])


def test_a_list_is_for_ensembles(tmp_path: Path) -> None:
    hetsngp.save(owner("sngp"), tmp_path)
    with pytest.raises(TypeError, match=r"one model was saved: give backbone=MyNetwork\(\)"):
        hetsngp.load(tmp_path, backbone=[Own()])


# --- interrupted saves --------------------------------------------------------------------------------------


class Died(BaseException):
    pass


def _count_steps(patch: pytest.MonkeyPatch, last: int, *, dead: bool) -> list[str]:
    """Before and after every call that touches the disk is a step. It ends at step ``last``; ``dead``: every
    later one fails too, as if the power had gone.
    """
    steps: list[str] = []

    def step(name: str) -> None:
        steps.append(name)
        if len(steps) == last or (dead and len(steps) > last):
            raise Died

    def stepping(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            step(f"before {name}")
            result = original(*args, **kwargs)
            step(f"after {name}")
            return result

        return call

    for where, name in (
        *((os, "replace"), (os, "fsync"), (Path, "write_text"), (Path, "unlink")),
        *((safetensors.torch, "save_file"), (storage, "sha256_of")),
    ):
        patch.setattr(where, name, stepping(name, getattr(where, name)))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("dead", [False, True], ids=["interrupted", "dead"])
@pytest.mark.parametrize("old", ["ensemble", "model", "nothing"])
def test_a_save_that_ends_at_any_step_leaves_the_old_or_the_new_one_whole(
    old: str, dead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"ensemble": pair(), "model": toy.trained("sngp"), "nothing": None}[old]
    new = Ensemble([toy.trained("deterministic"), toy.trained("hetsngp")])
    if first is not None:
        hetsngp.save(first, tmp_path / "start")
    found: list[str] = []
    step = 0
    while True:
        step += 1
        folder = tmp_path / str(step)
        if first is not None:
            shutil.copytree(tmp_path / "start", folder)
        with monkeypatch.context() as patch:
            steps = _count_steps(patch, step, dead=dead)
            try:
                hetsngp.save(new, folder)
            except Died:
                pass
            else:
                break
        if first is None and not (folder / "config.json").exists():
            found.append("old")
            with pytest.raises(FileNotFoundError):
                hetsngp.load(folder)
        else:
            got = hetsngp.load(folder)
            assert same_state(got, new) or same_state(got, first)
            found.append("new" if same_state(got, new) else "old")
        if not dead and steps[-1] != "before unlink" and folder.exists():
            assert not [name for name in leftovers(folder) if name.startswith(".")]  # no temporary files
        hetsngp.save(new, folder)  # the next save works
        assert same_state(hetsngp.load(folder), new)
        assert [name for name in leftovers(folder) if not name.startswith(".")] == []  # and tidies up
    assert found == sorted(found, reverse=True)  # the old one up to some step, the new one from there on
    assert found.count("old") >= 16
    assert found.count("new") >= (1 if old == "nothing" else 2)


# --- corrupt and foreign files ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [3, 50, -5])
def test_flipped_bits(saved: Path, where: int) -> None:
    content = bytearray(weights_of(saved).read_bytes())
    content[where] ^= 4
    weights_of(saved).write_bytes(content)
    refused(saved, "damaged", "checksum")


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_truncated_or_missing_weights(saved: Path, keep: int) -> None:
    replace_weights(saved, weights_of(saved).read_bytes()[:keep])
    refused(saved, "not a safetensors file")
    weights_of(saved).unlink()
    refused(saved, "is missing", "copied or unpacked only in part")


def _rename(tensors: dict[str, Tensor], start: str, new: str) -> dict[str, Tensor]:
    return {new + k.removeprefix(start) if k.startswith(start) else k: t for k, t in tensors.items()}


BETA = "members.1.head.latent.beta"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {k: v for k, v in t.items() if k != BETA}, ("member 2: missing ['head.latent.beta']",)),
        (lambda t: {k: v for k, v in t.items() if "members.0." not in k}, ("member 1: missing",)),
        (lambda t: {**t, BETA: t[BETA][:5].contiguous()}, ("member 2: ", "head.latent.beta (5, 3)")),
        (lambda t: {**t, "members.1.more": torch.ones(1)}, ("member 2: ", "unexpected ['more']")),
        (lambda t: {**t, "members.2.more": torch.ones(1)}, ("unexpected ['members.2.more'] for 2 members",)),
        (lambda t: {**t, "members.01.more": torch.ones(1)}, ("unexpected ['members.01.more']",)),
        (lambda t: {**t, "members.-1.more": torch.ones(1)}, ("unexpected ['members.-1.more']",)),
        (lambda t: {**t, "members." + "9" * 5000 + ".x": torch.ones(1)}, ("unexpected",)),
        (lambda t: {**t, "head.more": torch.ones(1)}, ("unexpected ['head.more']",)),
        (lambda t: _rename(t, "members.1.", "members.2."), ("unexpected ['members.2.",)),
        (lambda t: _rename(t, "members.0.", ""), ("unexpected",)),
        (lambda t: {}, ("member 1: missing",)),
    ],
)
def test_tensors_that_are_not_those_of_the_members(
    saved: Path, change: Callable[[Any], Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    save_file(change(load_file(weights_of(saved))), tmp_path / "other")
    replace_weights(saved, (tmp_path / "other").read_bytes())
    refused(saved, "do not fit", *words)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"members": []}, "a list of at least one"),
        ({"members": {}}, "a list of at least one"),
        ({"members": None}, "a list of at least one"),
        ({"members": "ab"}, "a list of at least one"),
        ({"members": 3}, "a list of at least one"),
        ({"members": [{}]}, "unexpected ['members.1."),
        ({"members": [3, 3]}, "member 1: "),
        ({"members": [None, None]}, "member 1: "),
        ({"members": [{}] * 100_000}, "member 1: model is missing"),
        ({"members__1": {"members": []}}, "member 2: model is missing"),
        ({"model": {}}, "no model beside them"),
        ({"members__0__calibration": 0}, "member 1: calibration is 0"),
        ({"members__1__model": {}}, "member 2: method is missing"),
        ({"members__1__model__num_classes": 10**12}, "member 2: num_classes"),
        ({"members__1__model__num_classes": 4}, "do not fit"),
        ({"members__1__model__options__random_features": 10**12}, "member 2: random_features"),
        ({"members__1__model__options__random_features": 34}, "do not fit"),
        ({"members__1__model__options__num_members": 10_000}, "member 2: num_members"),
        ({"members__1__model__backbone__config__width": 10**9}, "member 2: width"),
        ({"members__1__model__backbone__config__depth": 10**9}, "member 2: depth"),
        ({"members__1__model__backbone__name": "os.system"}, "cannot rebuild"),
        ({"members__1__model__backbone__name": ["ResidualMLP"]}, "does not describe a model: member 2: "),
        ({"members__1__model__method": "hetsngp"}, "do not fit"),
        ({"members__1__model__method": "eval"}, "member 2: unknown method 'eval'"),
        ({"members__1__model__options__amplitude": math.nan}, "member 2: amplitude"),
        ({"version": 3}, "reads version 1 and 2"),
        ({"sha256": None}, "checksum"),
    ],
    ids=name_of_change,
)
def test_configs_that_lie(saved: Path, change: dict[str, Any], word: str) -> None:
    edit(saved, **change)
    refused(saved, word)


def test_members_that_do_not_belong_together(tmp_path: Path) -> None:
    hetsngp.save(Ensemble([toy.build("deterministic"), toy.build("deterministic")]), tmp_path)
    edit(tmp_path, members__1__model__options__link="sigmoid")  # which no shape gives away
    refused(tmp_path, "does not describe a model", "members must share classes and link")


def test_more_members_than_weights(saved: Path) -> None:
    entries = config_of(saved)["members"]
    edit(saved, members=[*entries, entries[1]])
    refused(saved, "do not fit", "member 3: missing")
    edit(saved, members=entries[::-1])
    refused(saved, "do not fit", "member 1: ")


def test_a_lie_about_a_later_member_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All members are compared on the meta device before one is made, or the given network copied."""
    hetsngp.save(Ensemble([owner("sngp"), owner("sngp")]), tmp_path)
    edit(tmp_path, members__1__model__options__random_features=34)
    made: list[str] = []
    original = hetsngp.io.artifact.build

    def build(method: str, network: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made.append(next(network.parameters()).device.type)
        return original(method, network, *args, **kwargs)

    monkeypatch.setattr(hetsngp.io.artifact, "build", build)
    with pytest.raises(ArtifactError, match=r"do not fit.*member 2: "):
        hetsngp.load(tmp_path, backbone=Own())
    assert made == ["meta", "meta"]
    edit(tmp_path, members__1__model__options__random_features=32)
    hetsngp.load(tmp_path, backbone=Own())
    assert made[2:] == ["meta", "meta", "cpu", "cpu"]


# --- training -----------------------------------------------------------------------------------------------

EPOCHS = 6
TRAIN, HELD_OUT = toy.blobs(3, 8, flip=0.4), toy.blobs(3, 12, flip=0.4, seed=1)


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def shuffled(order: torch.Generator) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*TRAIN), 10, shuffle=True, generator=order)


def alone(members: list[Any], **options: Any) -> list[list[EpochResult]]:
    """The members trained by hand, one after another."""
    order, points = seed(1), seed(2)
    return [train(m, shuffled(order), generator=points, **options) for m in members]


def together(members: list[Any], **options: Any) -> list[EpochResult]:
    return train(Ensemble(members), shuffled(seed(1)), generator=seed(2), **options)


def numbered(histories: list[list[EpochResult]]) -> list[EpochResult]:
    return [
        EpochResult(r.epoch, r.epochs, r.loss, r.held_out, number, len(histories))
        for number, history in enumerate(histories, 1)
        for r in history
    ]


@pytest.mark.parametrize("method", METHODS)
def test_to_train_an_ensemble_of_one_is_to_train_its_member(method: str) -> None:
    options: dict[str, Any] = {
        "epochs": EPOCHS,
        "lr": 0.05,
        "gp_lr_multiplier": 3.0,
        "validation": [HELD_OUT],
    }
    one, two = toy.build(method, dataset_size=None), toy.build(method, dataset_size=None)
    start = copy.deepcopy(one)
    assert together([one], **options) == alone([two], **options)[0]
    assert same_state(one, two)
    assert not same_state(one, start)


@pytest.mark.parametrize("patience", [None, 2])
def test_to_train_an_ensemble_is_to_train_its_members_one_after_another(patience: int | None) -> None:
    """One member of every method, two of the first: to the bit the same as trained by hand, one by one."""

    def members() -> list[Any]:
        return [toy.build(method, dataset_size=None) for method in (*METHODS, "deterministic")]

    options: dict[str, Any] = {"epochs": EPOCHS, "lr": 0.05, "weight_decay": 0.01, "gp_lr_multiplier": 3.0}
    options |= {"validation": [HELD_OUT], "patience": patience}
    mine, by_hand = members(), members()
    seen: list[EpochResult] = []
    history = together(mine, on_epoch=seen.append, **options)
    histories = alone(by_hand, **options)
    assert history == seen == numbered(histories)
    for one, two in zip(mine, by_hand, strict=True):
        assert same_state(one, two)
        assert one.dataset_size == 24
    assert not same_state(mine[0], mine[-1])  # the same start, but other orders
    lengths = {len(h) for h in histories}
    best = {best_epoch(h) for h in histories}
    assert lengths == {EPOCHS} if patience is None else len(lengths) > 1  # each stops by itself
    assert len(best) > 1  # and goes back to an epoch of its own
    assert [best_epoch([r for r in history if r.member == 2])] == [best_epoch(histories[1])]
    with pytest.raises(ValueError, match=r"several members.*r\.member == 1"):
        best_epoch(history)


def test_without_validation_too() -> None:
    mine, by_hand = ([toy.build(m) for m in ("hetsngp", "sngp")] for _ in range(2))
    ensemble = Ensemble(mine)
    history = train(ensemble, shuffled(seed(1)), epochs=2, generator=seed(2))
    assert history == numbered(alone(by_hand, epochs=2))
    assert all(same_state(a, b) for a, b in zip(mine, by_hand, strict=True))
    assert not any(module.training for module in ensemble.modules())
    for result, (epoch, member) in zip(history, [(1, 1), (2, 1), (1, 2), (2, 2)], strict=True):
        assert (result.epoch, result.epochs, result.member, result.members) == (epoch, 2, member, 2)


def test_each_member_goes_through_the_loader_by_itself() -> None:
    """Every epoch of each sees all examples, in an order that no other has."""
    seen: list[list[float]] = [[]]

    class Watching:
        dataset = range(24)

        def __iter__(self) -> Iterator[Any]:
            for x, y in shuffled(order):
                seen[-1] += x[:, 0].tolist()
                yield x, y

    order = seed(1)
    members = [toy.build("deterministic"), toy.build("sngp"), toy.build("deterministic")]
    train(Ensemble(members), Watching(), epochs=2, on_epoch=lambda _: seen.append([]))
    orders = seen[:-1]
    assert len(orders) == 6
    assert all(sorted(o) == sorted(TRAIN[0][:, 0].tolist()) for o in orders)
    assert len({tuple(o) for o in orders}) == 6


@pytest.mark.parametrize("patience", [None, 1])
def test_what_training_a_member_needs_is_free_before_the_next(
    patience: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.optim.Optimizer] = []

    class Recorded(torch.optim.AdamW):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(torch.optim, "AdamW", Recorded)
    members = [toy.build("hetsngp"), toy.build("sngp"), toy.build("deterministic")]
    busy: list[list[bool]] = []

    def look(result: EpochResult) -> None:
        states = [len(optimizer.state) > 0 for optimizer in made]
        assert all(p.grad is None for m in members for p in m.parameters())  # each step frees its own
        busy.append(states + [False] * (len(members) - len(made)))

    train(
        Ensemble(members),
        shuffled(seed(1)),
        epochs=9,
        lr=0.1,
        patience=patience,
        on_epoch=look,
        validation=[HELD_OUT],
    )
    assert len(made) == 3
    assert {tuple(each) for each in busy} == {
        (True, False, False),
        (False, True, False),
        (False, False, True),
    }
    assert len(busy) == 27 if patience is None else len(busy) < 27
    assert not any(len(optimizer.state) for optimizer in made)


def test_an_interruption_leaves_the_members_before_it_trained() -> None:
    def stop(result: EpochResult) -> None:
        if result.member == 2:
            raise KeyboardInterrupt

    mine, by_hand = ([toy.build(m) for m in ("sngp", "hetsngp", "sngp")] for _ in range(2))
    untouched = copy.deepcopy(mine[2])
    options: dict[str, Any] = {"epochs": EPOCHS, "lr": 0.05, "validation": [HELD_OUT]}
    with pytest.raises(KeyboardInterrupt):
        together(mine, on_epoch=stop, **options)
    alone(by_hand[:1], **options)
    assert same_state(mine[0], by_hand[0])
    assert not mine[0].training
    assert same_state(mine[2], untouched)


def test_what_the_first_member_would_use_up_is_refused() -> None:
    ensemble = Ensemble([toy.build("deterministic"), toy.build("sngp")])
    before = copy.deepcopy(ensemble)
    with pytest.raises(TypeError, match=r"loader is a list_iterator.*2 members would use up.*DataLoader"):
        train(ensemble, iter([TRAIN]), epochs=1)
    with pytest.raises(TypeError, match=r"validation is a generator.*starts again"):
        train(ensemble, [TRAIN], epochs=1, validation=(batch for batch in [HELD_OUT]))
    assert same_state(ensemble, before)
    train(Ensemble(ensemble.members[:1]), iter([TRAIN]), epochs=1)


def test_bad_arguments_are_refused_before_anything_is_trained() -> None:
    ensemble = Ensemble([toy.build("deterministic"), toy.build("sngp")])
    before = copy.deepcopy(ensemble)
    with pytest.raises(ValueError, match="patience needs a validation loader"):
        train(ensemble, [TRAIN], epochs=1, patience=1)
    with pytest.raises(ValueError, match="patience must be a positive whole number"):
        train(ensemble, [TRAIN], epochs=1, patience=0, validation=[HELD_OUT])
    with pytest.raises(ValueError, match="epochs must be a positive whole number"):
        train(ensemble, [TRAIN], epochs=0)
    assert same_state(ensemble, before)


def test_every_member_that_weighs_classes_is_told_their_sizes() -> None:
    y = torch.tensor([0] * 12 + [1] * 8 + [2] * 4)
    members = [toy.build(m) for m in ("posterior_network", "sngp", "posterior_network")]
    members[2].class_counts = [5, 6, 7]
    train(Ensemble(members), DataLoader(TensorDataset(TRAIN[0], y), 10), epochs=1)
    assert [m.class_counts is None or m.class_counts.tolist() for m in members] == [
        [12, 8, 4],
        True,
        [5, 6, 7],
    ]


# --- what an ensemble is made of ----------------------------------------------------------------------------


def test_members_are_models_with_weights_of_their_own() -> None:
    model = toy.build("deterministic")
    with pytest.raises(TypeError, match=r"made by hetsngp\.build, got Ensemble"):
        hetsngp.Ensemble([hetsngp.Ensemble([model])])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="twice"):
        hetsngp.Ensemble([model, model])
    shared = toy.backbone()
    with pytest.raises(ValueError, match="make_backbone must return a new network"):
        hetsngp.build_ensemble("deterministic", lambda generator: shared, 3, seeds=[0, 1])


def test_members_by_method_and_seed() -> None:
    def network(generator: torch.Generator) -> Any:
        return ResidualMLP(2, width=8, depth=1, generator=generator)

    before = torch.get_rng_state()
    ensemble = hetsngp.build_ensemble(["mimo", "hetsngp"], network, 3, seeds=[4, 5], **toy.TINY)
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.config["method"] for m in ensemble.members] == ["mimo", "mimo", "hetsngp", "hetsngp"]
    again = hetsngp.build_ensemble("hetsngp", network, 3, seeds=[5], **toy.TINY).members[0]
    for name, value in again.state_dict().items():
        assert torch.equal(value, ensemble.members[3].state_dict()[name]), name
    assert not torch.equal(ensemble.members[2].backbone.isometry, ensemble.members[3].backbone.isometry)


def test_log_odds_of_very_sure_members_stay_finite() -> None:
    members = [toy.build("deterministic", link="sigmoid") for _ in range(2)]
    with torch.no_grad():
        for member in members:
            member.head.latent.linear.bias.fill_(40.0)
    out = hetsngp.Ensemble(members)(torch.zeros(2, 2))
    torch.testing.assert_close(out, torch.stack([m(torch.zeros(2, 2)) for m in members]).mean(0))


def test_scores_of_different_kinds_are_not_added() -> None:
    x, _ = toy.blobs(3, 6)
    mixed = hetsngp.Ensemble([toy.trained("sngp"), toy.trained("posterior_network")]).predict(x)
    assert torch.equal(mixed.ood_score, mixed.model_uncertainty)


def test_a_posterior_is_not_fitted_to_the_first_member_only() -> None:
    x, y = toy.blobs(3, 6)
    ensemble = hetsngp.Ensemble([toy.trained("sngp", fit=False), toy.trained("hetsngp", fit=False)])
    with pytest.raises(TypeError, match=r"loader is a .*iterator.* starts again"):
        hetsngp.fit_posterior(ensemble, iter([(x, y)]))
    assert not any(bool(m.head.posterior.fitted) for m in ensemble.members)
