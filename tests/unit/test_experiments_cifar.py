"""experiments/cifar: combinations, the bootstrap and the tables of scores.py, and the heads of refits.py."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.scripts import load_script

import hetsngp
from hetsngp.frozen.features import FeatureSet
from hetsngp.nn.backbones import ResidualMLP

SETS = ("test", "near", "far")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("experiments/cifar/scores.py")


@pytest.fixture(scope="module")
def refits(script: ModuleType) -> ModuleType:
    return load_script("experiments/cifar/refits.py")


# --- combinations ---------------------------------------------------------------------------------------


def random_scores(names: tuple[str, ...], seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"held_out": 2000, "test": 7, "near": 5, "far": 3}
    return {
        name: {part: torch.randn(n, generator=generator).double() for part, n in sizes.items()}
        for name in names
    }


def test_a_combination_adds_log_shares_of_held_out_examples(script: ModuleType) -> None:
    names = ("entropy", "energy", "relative Mahalanobis h")
    scores = random_scores(names)
    found = script.combinations(scores, script.SETS)
    assert set(found) == {
        "energy + relative Mahalanobis",
        "energy + entropy + relative Mahalanobis",
        "entropy + relative Mahalanobis",
    }
    for part in SETS:
        for row, value in enumerate(found[script.DETERMINISTIC_CHOSEN][part]):
            expected = 0.0
            for name in ("entropy", "relative Mahalanobis h"):
                beyond = (scores[name]["held_out"] >= scores[name][part][row]).double().mean()
                if beyond < 0.12:
                    break  # in the tail, which is not of shares
                expected -= math.log(beyond)
            else:
                assert float(value) == pytest.approx(expected, abs=0.06)


def test_a_gp_is_combined_with_its_own_features(script: ModuleType) -> None:
    names = ("entropy", "variance", "relative Mahalanobis h", "relative Mahalanobis z")
    scores = random_scores(names)
    found = script.combinations(scores, script.SETS)[script.DETERMINISTIC_CHOSEN]
    assert set(found) == set(script.SETS)
    del scores["relative Mahalanobis h"]
    again = script.combinations(scores, script.SETS)[script.DETERMINISTIC_CHOSEN]
    assert all(torch.equal(found[part], again[part]) for part in script.SETS)
    del scores["relative Mahalanobis z"]
    assert script.DETERMINISTIC_CHOSEN not in script.combinations(scores, script.SETS)


# --- bootstrap ------------------------------------------------------------------------------------------

SIZES = {"test": 30, "near": 30, "far": 11}


def network_scores(random: np.random.Generator, shift: float) -> dict[str, np.ndarray]:
    """Scores of one decimal, so that there are ties."""
    return {
        part: (random.normal(size=n) + shift * (part != "test")).round(1).astype(np.float32)
        for part, n in SIZES.items()
    }


def pairwise_auroc(known: np.ndarray, other: np.ndarray) -> float:
    """Share of pairs in which the OOD score is higher, ties counted half."""
    return float(((other > known[:, None]) + 0.5 * (other == known[:, None])).mean())


def test_a_score_less_another_is_the_difference_of_their_aurocs(script: ModuleType) -> None:
    random = np.random.default_rng(1)
    chosen = script.DETERMINISTIC_CHOSEN
    names = {"hetsngp": ("ood_score", "model uncertainty"), "deterministic": ("entropy", chosen)}
    scores = {
        (method, seed): {name: network_scores(random, 1.0) for name in each}
        for method, each in names.items()
        for seed in range(2)
    }

    def auroc(method: str, name: str, seed: int, part: str) -> float:
        return pairwise_auroc(*(scores[method, seed][name][each] for each in ("test", part)))

    found = script.compare(scores, {"test": "cifar100", "near": "cifar10", "far": "scenes"})
    assert [each["one"][0] for each in found] == ["hetsngp"] * 3  # none of sngp, which is not there
    for each in found:
        assert each["seeds"] == [0, 1]
        for part in ("near", "far"):
            expected = np.mean(
                [auroc(*each["one"], seed, part) - auroc(*each["two"], seed, part) for seed in range(2)]
            )
            difference, low, high = each[part]
            assert difference == pytest.approx(expected, abs=1e-5)
            assert low < difference < high


# --- tables ---------------------------------------------------------------------------------------------


def write_network(
    script: ModuleType, folder: Path, method: str, seed: int, **changes: Any
) -> dict[str, dict[str, np.ndarray]]:
    """Files of a network, whose AUROC is not that of the stored scores."""
    random = np.random.default_rng(10 * seed + len(method))
    gp = method in ("sngp", "hetsngp")
    names = ("entropy", script.DETERMINISTIC_CHOSEN, *(("ood_score", "model uncertainty") if gp else ()))
    scores = {name: network_scores(random, 1.0) for name in names}
    value = 0.5 + 0.1 * seed + 0.01 * gp
    numbers = {part: dict.fromkeys(names, value + 0.001 * (part == "far")) for part in ("near", "far")}
    found = {
        "method": method,
        "seed": seed,
        "folder": f"{method}-{seed}",
        "near": "cifar10",
        "far": "scenes",
        "examples": {"held_out": 9, **SIZES},
        "recipe": {"task": {"data": "cifar100"}},
        "auroc": numbers,
        "fpr95": {part: {name: 1 - v for name, v in each.items()} for part, each in numbers.items()},
    } | changes
    (folder / f"{method}-{seed}.json").write_text(json.dumps(found))
    arrays = {f"{part}|{name}": values for name, each in scores.items() for part, values in each.items()}
    np.savez(folder / f"{method}-{seed}.npz", **arrays)
    return scores


def gathered(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    out = folder / "out"
    monkeypatch.setattr(sys, "argv", ["scores.py", "--gather", str(folder), "--out", str(out)])
    script.main()
    return json.loads((out / "scores.json").read_text()), (out / "scores.md").read_text()


def test_the_table_has_means_over_seeds_and_paired_differences(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = {"deterministic": (0, 1, 2), "hetsngp": (0, 2), "sngp": (0,)}
    scores = {
        (method, seed): write_network(script, tmp_path, method, seed)
        for method in seeds
        for seed in seeds[method]
    }
    content, text = gathered(script, tmp_path, monkeypatch)
    lines = text.splitlines()
    assert "| score | deterministic | sngp | hetsngp |" in lines
    # Means of .5, .6, .7; of .51; and of .51, .71.
    assert "| entropy | .6000 / .6010 | .5100 / .5110 | .6100 / .6110 |" in lines
    assert "| entropy | .4000 / .3990 | .4900 / .4890 | .3900 / .3890 |" in lines
    assert "| ood_score | – | .5100 / .5110 | .6100 / .6110 |" in lines
    assert content["means"]["hetsngp"]["seeds"] == [0, 2]
    assert {"commit", "torch", "seconds"} <= content.keys()
    assert len(content["networks"]) == 6
    assert [(each["one"], each["two"], each["seeds"]) for each in content["differences"]] == [
        (["hetsngp", "ood_score"], ["deterministic", "entropy + relative Mahalanobis"], [0, 2]),
        (["hetsngp", "ood_score"], ["deterministic", "entropy"], [0, 2]),
        (["hetsngp", "ood_score"], ["hetsngp", "model uncertainty"], [0, 2]),
        (["sngp", "ood_score"], ["deterministic", "entropy + relative Mahalanobis"], [0]),
    ]
    for each in content["differences"]:
        for part in ("near", "far"):
            (method, name), (other, less) = each["one"], each["two"]
            expected = np.mean(
                [
                    pairwise_auroc(scores[method, s][name]["test"], scores[method, s][name][part])
                    - pairwise_auroc(scores[other, s][less]["test"], scores[other, s][less][part])
                    for s in each["seeds"]
                ]
            )
            middle, low, high = each[part]
            assert middle == pytest.approx(expected, abs=1e-5)
            assert low < middle < high
            assert 0.1 < high - low < 0.8
    row = next(
        line for line in lines if line.startswith("| ood_score of hetsngp | entropy of deterministic | 2 ")
    )
    near = content["differences"][1]["near"]
    assert f"{near[0]:+.4f}".replace("0.", ".", 1) in row


def test_networks_that_do_not_compare_are_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="no network"):
        gathered(script, tmp_path, monkeypatch)
    write_network(script, tmp_path, "deterministic", 0)
    write_network(script, tmp_path, "hetsngp", 0, far="svhn")
    with pytest.raises(ValueError, match="same images"):
        gathered(script, tmp_path, monkeypatch)
    file = tmp_path / "hetsngp-0.json"
    file.write_text(file.read_text().replace('"method": "hetsngp"', '"method": "deterministic"'))
    with pytest.raises(ValueError, match="same method and seed"):
        gathered(script, tmp_path, monkeypatch)


def test_detection_takes_test_images_as_in_distribution(script: ModuleType) -> None:
    values = {"held_out": [9.0], "test": [0.0, 1.0, 2.0, 3.0], "near": [2.5, 4.0], "far": [5.0, 6.0]}
    found = script.detection({"entropy": {part: torch.tensor(v) for part, v in values.items()}})
    assert found["auroc"] == {"near": {"entropy": 0.875}, "far": {"entropy": 1.0}}
    assert found["fpr95"] == {"near": {"entropy": 0.5}, "far": {"entropy": 0.0}}


def test_names_and_methods_of_runs(script: ModuleType) -> None:
    assert script.folder_name(Path("/somewhere/runs/hetsngp-3")) == "hetsngp-3"
    assert script.folder_name(Path("/somewhere/runs/cifar100-sngp-1a2b/seed4")) == "cifar100-sngp-1a2b-seed4"
    for method in ("mimo", "hetsngp_mimo", "posterior_network"):
        assert "not supported" in script.unsupported({"recipe": {"task": {"method": method}}})
    assert script.unsupported({"recipe": {"task": {"method": "hetsngp"}}}) is None


# --- refits ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network(script: ModuleType) -> Any:
    """A network with a fitted head; its features stand for those of every set."""
    generator = torch.Generator().manual_seed(0)
    backbone = ResidualMLP(2, width=8, depth=1, generator=generator)
    model = hetsngp.build("hetsngp", backbone, 4, random_features=32, rank=2, generator=generator).eval()
    h = {
        part: torch.randn(n, 8, generator=generator)
        for part, n in (("train", 200), ("held_out", 80), ("test", 50))
    }
    y = {part: torch.randint(4, (len(each),), generator=generator) for part, each in h.items()}
    sets = {part: FeatureSet(h[part], y[part]) for part in h}
    sets |= {"near": FeatureSet(2 * h["test"], y["test"]), "far": FeatureSet(9 * h["test"], y["test"])}
    train = sets.pop("train")
    hetsngp.fit_posterior(
        model.on_features(), [(train.h, train.y)], [(sets["held_out"].h, sets["held_out"].y)]
    )
    return script.Network(model, train, sets)


def test_the_kronecker_refit_is_the_saved_model(refits: ModuleType, network: Any) -> None:
    cpu = torch.device("cpu")
    found, probs = refits.refit(network, "kronecker", cpu)
    same = refits.reproduction(network, probs, found, None)
    assert same["ok"]
    assert same["largest_difference"] < 1e-5
    other, others = refits.refit(network, "none", cpu)
    assert refits.reproduction(network, others, other, None)["largest_difference"] > 1e-3
    assert other["scale"] == 1
    assert 0 <= found["auroc"]["near"] <= 1


def test_a_refit_shares_the_weights_and_not_the_posterior(refits: ModuleType, network: Any) -> None:
    view = refits.with_posterior(network.model, "shared")
    assert torch.equal(view.head.latent.beta, network.model.head.latent.beta)
    assert not view.head.posterior.is_filled
    with pytest.raises(RuntimeError):
        view.predict(network.sets["test"].h)


def test_many_points_of_either_sampler_agree(refits: ModuleType, network: Any) -> None:
    test = network.sets["test"]
    sobol, mc = (refits.with_sampler(network.model, name) for name in ("sobol", "mc"))
    exact = refits.all_probs(sobol, test)
    few, many = (refits.all_probs(mc, test, num_samples=n) for n in (5, 5000))
    assert float((many - exact).abs().max()) < 0.04  # four standard errors of a probability: 4·0.5/√5000
    assert float((few - exact).abs().max()) > float((many - exact).abs().max())
    assert network.model.head.link.sampler == "sobol"
    found = refits.with_points(network, "mc", 5, 3, torch.device("cpu"))
    assert found["nll_sd"] > 0
    assert found["draws"] == 3
