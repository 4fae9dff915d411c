"""The runtime tables: counts, times, and what is cached."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from hetsngp.cli import make_app
from hetsngp.nn.backbones import WideResNet
from hetsngp.paper.runtime import measurement as runtime
from hetsngp.paper.runtime.definitions import NETWORKS
from hetsngp.paper.runtime.measurement import Job, RuntimeResult, measure_runtime
from hetsngp.paper.runtime.timing import Pace, TimedModel, count_flops, ratio
from hetsngp.training.recipes.recipe import read_recipe

ONCE = Pace(warmup=1, least=1, most=1, seconds=0.0)
THRICE = Pace(warmup=1, least=3, most=3, seconds=0.0)
TINY = (
    "network=wrn-10-1",
    "size=16",
    "batch_size=2",
    "hardware.accelerator=cpu",
    "options.random_features=64",
)
SMALL = {name: replace(network, num_classes=10) for name, network in NETWORKS.items()}
VIT = {"vit": replace(SMALL["vit"], rows={k: SMALL["vit"].rows[k] for k in ("deterministic", "hetsngp")})}


def on_disk(out: Path) -> dict[str, bytes]:
    return {file.stem: file.read_bytes() for file in (out / "runtime").iterdir()}


# --- what the paper has ---------------------------------------------------------------------------------


def test_rows_and_numbers_of_the_paper() -> None:
    """As its two tables print them, in their order; rows of ours come after."""
    resnet50 = {
        "deterministic": 0.04,
        "sngp": 0.047,
        "mimo": 0.04,
        "heteroscedastic": 0.061,
        "hetsngp": 0.045,
    }
    rows = NETWORKS["resnet50"].rows
    assert [name for name, row in rows.items() if not row.ours] == list(resnet50) == list(rows)[:5]
    for name, value in resnet50.items():
        assert NETWORKS["resnet50"].printed(name) == {"ms_eval": value, "ms_eval_ratio": value / 0.04}
    assert all(NETWORKS["resnet50"].printed(name) == {} for name, row in rows.items() if row.ours)
    vit = {
        "deterministic": (4.72, 106.61, 1.08, 35.31),
        "sngp": (4.74, 106.65, 1.08, 35.32),
        "heteroscedastic": (6.09, 112.17, 1.37, 37.79),
        "hetsngp": (6.13, 112.22, 1.38, 37.80),
    }
    assert list(NETWORKS["vit"].rows) == list(vit)
    for name, values in vit.items():
        printed = NETWORKS["vit"].printed(name)
        columns = ("ms_train", "gflop_train", "ms_eval", "gflop_eval")
        assert tuple(printed[column] for column in columns) == values
        assert printed["gflop_train_ratio"] == pytest.approx(values[1] / 106.61)


def test_rows_are_the_recipes_with_the_papers_samples(tmp_path: Path) -> None:
    jobs = {
        row: Job.of("resnet50", row, NETWORKS["resnet50"], (), tmp_path) for row in SMALL["resnet50"].rows
    }
    points = {row: job.recipe.task.options.get("num_samples") for row, job in jobs.items()}
    assert (points["heteroscedastic"], points["hetsngp"]) == (5000, 100)
    assert points["heteroscedastic-default"] is points["hetsngp-default"] is None
    assert {jobs[row].recipe.task.options["sampler"] for row in ("heteroscedastic", "hetsngp")} == {"mc"}
    assert all(
        (job.recipe.task.network, job.num_classes, job.size) == ("resnet50", 1000, 224)
        for job in jobs.values()
    )
    vit = Job.of("vit", "hetsngp", NETWORKS["vit"], (), tmp_path)
    assert (vit.recipe.task.network, vit.num_classes) == ("vit_base_patch16_224", 21_843)
    assert vit.recipe.task.options["link"] == "sigmoid"


# --- what is counted ------------------------------------------------------------------------------------


def test_operations_of_an_mlp_and_a_convolution_by_hand() -> None:
    mlp = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(11, 7)
    forward = 2 * 11 * (7 * 5 + 5 * 3)
    assert count_flops(lambda: mlp(x)) == forward
    # Backward: by the weights of both layers, and by the input of the second alone.
    assert count_flops(lambda: mlp(x).sum().backward()) == 2 * forward + 2 * 11 * 5 * 3
    conv = nn.Conv2d(3, 8, 5, stride=2, padding=2)
    assert count_flops(lambda: conv(torch.randn(2, 3, 16, 16))) == 2 * 2 * 8 * 8 * 8 * 3 * 5 * 5


def test_operations_of_attention_are_counted() -> None:
    """Scores and their sums over values: each 2·B·H·N²·d."""
    q = torch.randn(2, 4, 9, 16)
    assert count_flops(lambda: F.scaled_dot_product_attention(q, q, q)) == 2 * (2 * 2 * 4 * 9 * 9 * 16)


def test_operations_of_the_papers_transformer_are_the_papers() -> None:
    timm = pytest.importorskip("timm")
    with torch.device("meta"):  # shapes without values
        network, x = (
            timm.create_model("vit_base_patch16_224", num_classes=21_843),
            torch.zeros(1, 3, 224, 224),
        )
    paper = NETWORKS["vit"].printed("deterministic")
    assert count_flops(lambda: network(x)) / 1e9 == pytest.approx(paper["gflop_eval"], rel=0.02)
    trained = count_flops(lambda: network(x).sum().backward()) / 1e9
    assert trained == pytest.approx(paper["gflop_train"], rel=0.02)


# --- what is timed --------------------------------------------------------------------------------------


def test_pace_of_quick_and_of_slow_work() -> None:
    calls: list[int] = []
    cpu = torch.device("cpu")
    assert len(Pace(warmup=2, least=3, most=5, seconds=60.0).time(lambda: calls.append(1), cpu)) == 5
    assert len(calls) == 7
    calls.clear()
    assert len(Pace(warmup=2, least=3, most=5, seconds=0.0).time(lambda: calls.append(1), cpu)) == 3
    assert len(calls) == 4  # one to warm up is enough where time is over


def test_ratio_is_to_what_was_measured_around_it() -> None:
    assert ratio([6.0, 5.0, 100.0], [1.0, 2.0, 3.0], [4.0, 4.0, 9.0]) == pytest.approx(6 / 3)


def test_a_training_step_is_whole_and_leaves_the_weights() -> None:
    recipe = read_recipe("imagenet21k/hetsngp", TINY)
    timed = TimedModel(recipe, 10, 16, 2, torch.device("cpu"), trains=True)
    before = {name: value.clone() for name, value in timed.model.named_parameters()}
    timed.train()
    missing = [name for name, p in timed.model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    assert timed.optimizer is not None
    assert len(timed.optimizer.state) == sum(p.requires_grad for p in timed.model.parameters())
    assert all(torch.equal(before[name], value) for name, value in timed.model.named_parameters())
    rows, classes = timed.y.shape
    assert (rows, classes) == (2, 10)
    assert bool((timed.y.sum(1) >= 1).all())


# --- both tables ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, str]:
    """By the command, on networks of ten classes."""
    out, kept = tmp_path_factory.mktemp("runtime"), []

    def small(**given: Any) -> RuntimeResult:
        kept.append(measure_runtime(networks=SMALL, pace=THRICE, **given))
        return kept[-1]

    changes = [text for change in TINY for text in ("--set", change)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "measure_runtime", small)
        done = CliRunner().invoke(make_app(), ["reproduce", "runtime", "--out", str(out), *changes])
    assert done.exit_code == 0, done.output
    (result,) = kept
    assert all(file.stat().st_size for file in result.files)
    assert result.text() in done.output
    return out, result.tables, result.text()


def test_every_number_comes_from_the_stored_times(measured: tuple[Path, dict, str]) -> None:
    out, tables, _ = measured
    assert json.loads((out / "runtime.json").read_text()) == tables
    for name, network in SMALL.items():
        assert list(tables["networks"][name]["rows"]) == list(network.rows)
        for row, shown in tables["networks"][name]["rows"].items():
            stored = json.loads((out / "runtime" / f"{name}-{row}.json").read_text())
            around = stored["deterministic"]
            for kind in (*network.kinds, "predict"):
                times, of = stored["seconds"][kind], "eval" if kind == "predict" else kind
                assert len(times) == 3
                middle = sorted(times)[1]
                assert shown["numbers"][f"ms_{kind}"] == pytest.approx(1000 * middle / 2)
                base = statistics.mean(sorted(around[side][of])[1] for side in ("before", "after"))
                assert shown["numbers"][f"ms_{kind}_ratio"] == pytest.approx(middle / base)
            for kind in network.kinds if network.counted else ():
                share = stored["gflop"][kind] / around["gflop"][kind]
                assert shown["numbers"][f"gflop_{kind}_ratio"] == pytest.approx(share)
                assert share == 1 if row == "deterministic" else share > 0.99


def test_the_points_are_those_of_the_rows(measured: tuple[Path, dict, str]) -> None:
    rows = measured[1]["networks"]["resnet50"]["rows"]
    assert (rows["heteroscedastic"]["points"], rows["hetsngp"]["points"]) == (5000, 100)
    assert rows["deterministic"]["points"] is rows["mimo"]["points"] is None
    assert rows["hetsngp-default"]["points"] >= 128  # eight replicates of sixteen


def test_operations_are_those_of_one_image(measured: tuple[Path, dict, str]) -> None:
    network, image = WideResNet(10, 1).eval(), torch.zeros(1, 3, 16, 16)
    readout = nn.Linear(network.num_features, 10)
    gflop = measured[1]["networks"]["vit"]["rows"]["deterministic"]["gflop"]
    assert gflop["eval"] == pytest.approx(count_flops(lambda: readout(network(image))) / 1e9)
    assert 2.5 < gflop["train"] / gflop["eval"] < 3.0  # the first layer has no gradient by its input


def test_texts_have_every_row_and_the_papers_numbers(measured: tuple[Path, dict, str]) -> None:
    out, tables, text = measured
    page = (out / "runtime.md").read_text()
    for name, network in SMALL.items():
        for row, titled in network.rows.items():
            assert text.count(f"\n{titled.title} ") >= len(network.kinds)
            found = tables["networks"][name]["rows"][row]["numbers"]
            lines = [line for line in page.splitlines() if line.startswith(f"| {titled.title} | ")]
            for kind in (*network.kinds, "predict"):
                assert any(f" | {found[f'ms_{kind}_ratio']:.2f} |" in line for line in lines)
    for number in ("0.047", "0.061", "106.61", "112.22", "35.32", "37.79", "4.74", "1.37"):
        assert number in text
        assert number in page
    assert max(map(len, text.splitlines())) <= 110
    assert "![ratios](runtime.png)" in page


# --- what is kept ---------------------------------------------------------------------------------------


def test_an_interrupted_measurement_goes_on(tmp_path: Path) -> None:
    """Rows that are done keep their times and the deterministic ones around them."""

    def stop(text: str) -> None:
        if text.startswith("  Det:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_runtime(changes=TINY, out=tmp_path, networks=VIT, pace=ONCE, say=stop)
    first = on_disk(tmp_path)
    assert list(first) == ["vit-deterministic"]
    damaged = tmp_path / "runtime" / "vit-hetsngp.json"
    damaged.write_bytes(first["vit-deterministic"][:100])
    said: list[str] = []
    measure_runtime(changes=TINY, out=tmp_path, networks=VIT, pace=ONCE, say=said.append)
    assert "1 of 2 rows" in said[0]
    second = on_disk(tmp_path)
    assert second["vit-deterministic"] == first["vit-deterministic"]
    rows = {name: json.loads(content) for name, content in second.items()}
    around = [row["deterministic"]["before"]["eval"] for row in rows.values()]
    assert around[0] != around[1]  # of the process that measured the row

    other = ["batch_size=3" if change.startswith("batch_size") else change for change in TINY]
    result = measure_runtime(changes=other, out=tmp_path, networks=VIT, pace=ONCE, show=False)
    assert not set(on_disk(tmp_path).values()) & set(second.values())
    assert result.tables["networks"]["vit"]["batch_size"] == 3


def test_errors_name_the_fix(tmp_path: Path) -> None:
    huge = [*TINY, "batch_size=1000000000000"]
    with pytest.raises(RuntimeError, match=r"Det: out of memory .* --set batch_size=500000000000"):
        measure_runtime(changes=huge, out=tmp_path, networks=VIT, pace=ONCE, show=False)
    with pytest.raises(ValueError, match=r"options\.rank"):
        measure_runtime(changes=["options.rnk=3"], out=tmp_path, pace=ONCE)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    changes = [change for change in TINY if not change.startswith("hardware")]
    result = measure_runtime(changes=changes, out=tmp_path, networks=SMALL, pace=ONCE, show=False)
    assert result.tables["device"] == torch.cuda.get_device_name()
    assert {table["precision"] for table in result.tables["networks"].values()} == {"bf16-mixed"}
