"""The tables of the paper: complete, as printed, on recipes that exist; means, marks and texts of results."""

import itertools
import json
import os
import re
import shlex
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from scipy.stats import sem
from typer.testing import CliRunner

from hetsngp.cli import make_app
from hetsngp.models.methods import check_options
from hetsngp.paper import TABLES, plan_of
from hetsngp.paper.definitions import METRICS, PAPER, PaperPart, printed
from hetsngp.paper.intervals import Interval
from hetsngp.paper.plots import draw
from hetsngp.paper.reproduction import _each_warning_once, _Work, check_request
from hetsngp.paper.results import Cell, Result, TableRequest, within_one_error
from hetsngp.paper.runs import TableRun, all_runs, merge, runs_of
from hetsngp.paper.sets import AvailableSets, EvaluationSet
from hetsngp.paper.synthetic.table import config_for
from hetsngp.paper.text import NONE, WIDTH, markdown, plain_text
from hetsngp.training.recipes.recipe import read_recipe


def request(name: str, seeds: int, changes: tuple[str, ...] = ()) -> TableRequest:
    return TableRequest(TABLES[name], tuple(range(seeds)), changes)


OWN_WAY = ("synthetic", "runtime")
"""Tables whose rows are no recipes of the book."""
TRAINED = [name for name in TABLES if name not in OWN_WAY]


def parts() -> list[PaperPart]:
    return [part for table in TABLES.values() for part in table.parts]


# --- the paper's numbers --------------------------------------------------------------------------------


def paper_folder() -> Path:
    folder = Path(os.environ.get("HETSNGP_DATA", "/nowhere")).parent / "paper"
    if not (folder / "tables.json").is_file():
        pytest.skip("the paper is not at hand")
    return folder


def test_every_table_has_the_rows_and_columns_of_the_paper() -> None:
    for part in parts():
        rows = [row.name for row in part.rows]
        if part.name == "synthetic":  # the paper has no numbers of moons, mixture and Posterior Network there
            assert set(PAPER[part.name]) <= set(rows)
            continue
        if part.name not in PAPER:
            assert part.name.startswith("cifar100-")  # our own
            continue
        ours = ["mimo", "hetsngp_mimo"] if part.name == "cifar100" else []
        assert rows == [*PAPER[part.name], *ours]
        more = {"id_ece", "corr_ece"} if part.name == "cifar100" else set()
        for row in PAPER[part.name]:
            columns = [column.name for column in part.columns if column.name not in more]
            assert columns == list(PAPER[part.name][row])
        assert more <= {column.name for column in part.columns}
    others = set(PAPER) - {part.name for part in parts()}
    assert others == {"runtime-resnet50", "runtime-vit"}


def test_counts_of_the_tables() -> None:
    """Rows, columns and runs: as one counts them in the paper, and those that are ours on CIFAR-100."""
    counted = {part.name: (len(part.rows), len(part.columns)) for part in parts()}
    assert counted == {
        "synthetic": (5, 3),
        "cifar100": (7, 10),
        "cifar100-ensembles": (4, 10),
        "cifar100-ablations-rank": (3, 5),
        "cifar100-ablations-temperature": (3, 5),
        "cifar100-ablations-training": (2, 5),
        "imagenet": (5, 9),
        "imagenet-r-v2": (5, 6),
        "imagenet21k": (4, 6),
        "ensembles": (4, 6),
        "ablations-samples": (6, 3),
        "ablations-rank": (5, 3),
        "ablations-temperature": (7, 3),
        "ablations-training": (2, 3),
    }
    seeds = {name: table.seeds for name, table in TABLES.items()}
    assert seeds == {
        **{"synthetic": 10, "cifar100": 10, "imagenet": 10, "imagenet-r-v2": 10, "imagenet21k": 5},
        **{"ensembles": 1, "runtime": 1, "ablations": 1, "cifar100-ensembles": 1, "cifar100-ablations": 1},
    }
    assert {name for name, table in TABLES.items() if table.parts and not table.in_paper} == {
        "cifar100-ensembles",
        "cifar100-ablations",
    }
    assert [c.title for c in TABLES["cifar100"].parts[0].columns][:6] == [
        *("ID Acc", "ID NLL", "ID ECE", "Corr Acc", "Corr NLL", "Corr ECE")
    ]
    ablation = TABLES["cifar100-ablations"].parts[0]
    assert [c.title for c in ablation.columns] == ["ID Acc", "ID NLL", "ID ECE", "Near-ROC", "Far-ROC"]


LABELS = {
    "cifar100": "tab:cifar",
    "imagenet": "tab:ImageNet",
    "imagenet-r-v2": "tab:ImageNet_additional",
    "imagenet21k": "tab:ImageNet21k",
    "ensembles": "tab:ImageNet_ensemble",
}
NAMES = {
    "Det": "deterministic",
    "Post.Net": "posterior_network",
    "Het": "heteroscedastic",
    "SNGP": "sngp",
    "HetSNGP": "hetsngp",
}


def tex_rows(label: str) -> dict[str, list[tuple[float, float | None, bool]]]:
    """Row → (mean, standard error, bold), read from the source of the paper."""
    tex = (paper_folder() / "hetsngp.tex").read_text(encoding="utf-8")
    body = tex[: tex.index(f"\\label{{{label}}}")].rpartition("\\midrule")[2].partition("\\bottomrule")[0]
    rows = {}
    for line in filter(None, (text.strip() for text in body.split("\\\\"))):
        name, *cells = line.split("&")
        found = []
        for cell in cells:
            numbers = [float(number) for number in re.findall(r"\d+\.\d+", cell)]
            found.append((numbers[0], numbers[1] if len(numbers) > 1 else None, "textbf" in cell))
        rows[re.match(r"[A-Za-z.]+[a-zA-Z]", name.strip())[0]] = found  # type: ignore[index]
    return rows


@pytest.mark.parametrize("name", LABELS)
def test_numbers_are_those_printed_in_the_paper(name: str) -> None:
    rows = tex_rows(LABELS[name])
    mimo = set(PAPER[name]) - {NAMES[row] for row in rows}
    assert mimo <= {"mimo"}  # has tables of its own in the appendix
    for row, cells in rows.items():
        ours = list(PAPER[name][NAMES[row]].values())
        assert [(mean, error) for mean, error, _ in cells] == ours


@pytest.mark.parametrize("name", ["cifar100", "imagenet", "imagenet-r-v2", "imagenet21k"])
def test_marks_are_those_of_the_paper(name: str) -> None:
    """Where three digits decide: a cell may be marked or not if its distance is known only to a digit."""
    rows, (part,) = tex_rows(LABELS[name]), TABLES[name].parts
    decided = 0
    columns = [column for column in part.columns if column.name in PAPER[name]["sngp"]]
    for place, column in enumerate(columns):
        means = {row: cells[place][:2] for row, cells in rows.items()}
        best, error = max(means.values(), key=lambda cell: column.sign * cell[0])
        marked = within_one_error(means, column.sign)
        for row, cells in rows.items():
            distance = column.sign * (best - cells[place][0])
            if abs(distance - error) > 0.0015:
                decided += 1
                assert (row in marked) == cells[place][2], (row, column.name)
    assert decided > len(rows) * len(columns) / 2


def test_numbers_are_those_of_the_shared_file() -> None:
    found = json.loads((paper_folder() / "tables.json").read_text(encoding="utf-8"))
    names = {"det": "deterministic", "het": "heteroscedastic", "postnet": "posterior_network"}
    shared = {"imagenet-r-v2": "imagenet_r_v2", "ensembles": "imagenet_ensemble_of_4"}
    for name in LABELS:
        table = found[shared.get(name, name)]
        for row, cells in table.items():
            if row in ("columns", "runs"):
                continue
            ours = PAPER[name][names.get(row, row)]
            assert list(ours) == table["columns"]
            assert [list(cell) for cell in ours.values()] == cells
        if name != "ensembles":
            assert TABLES[name].seeds == table["runs"]
    ablations = found["ablations_imagenet_hetsngp"]
    for ours, theirs in {
        "samples": "mc_samples",
        **{n: n for n in ("rank", "temperature", "training")},
    }.items():
        rows = {
            row: [mean for mean, _ in cells.values()] for row, cells in PAPER[f"ablations-{ours}"].items()
        }
        assert rows == ablations[theirs]
    circles = {names.get(row, row): value for row, value in found["synthetic_circles_accuracy"].items()}
    assert {row: cells["circles_acc"][0] for row, cells in PAPER["synthetic"].items()} == circles
    inference = {cell["ms_eval"][0] for cell in PAPER["runtime-resnet50"].values()}
    assert inference == set(found["runtime_resnet50_ms_per_example"].values())
    vit = found["runtime_vit_b16_imagenet21k"]
    for row, cells in PAPER["runtime-vit"].items():
        assert [mean for mean, _ in cells.values()] == vit[{v: k for k, v in names.items()}.get(row, row)]


# --- rows are recipes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_every_row_is_a_recipe_of_its_method_on_its_data(name: str) -> None:
    known = ("cifar100", "imagenet21k", "imagenet")
    data = next((each for each in known if name.startswith(each)), "imagenet")
    for part in TABLES[name].parts:
        for row in part.rows:
            recipe = read_recipe(row.recipe, row.changes)
            assert recipe.task.data == data
            assert recipe.task.method == ("hetsngp" if "ablations" in name else row.name)
            assert row.members == {"ensembles": 4, "cifar100-ensembles": 3}.get(name, 1)


@pytest.mark.parametrize(
    ("part", "option"),
    [
        ("samples", "num_samples"),
        ("rank", "rank"),
        ("temperature", "temperature"),
        ("training", "sample_beta"),
    ],
)
def test_an_ablation_varies_one_thing_from_one_base(part: str, option: str) -> None:
    base = {"num_samples": 1000, "rank": 15, "temperature": 1.25, "sample_beta": False, "sampler": "mc"}
    found = next(p for p in TABLES["ablations"].parts if p.name == f"ablations-{part}")
    for row in found.rows:
        task = read_recipe(row.recipe, row.changes).task
        assert not task.calibrate
        value = {"map": False, "mc_sampling": True}.get(row.name)
        expected = {**base, option: float(row.name) if value is None else value}
        assert {name: task.options[name] for name in expected} == expected


def test_runs_at_the_base_of_the_ablations_are_one() -> None:
    runs = list(all_runs(request("ablations", 1)))
    assert len(runs) == len(set(runs)) == 17  # of 20 rows
    rows = [row for part in TABLES["ablations"].parts for row in part.rows]
    at_base = [row.name for row in rows if runs_of(row, (), 0)[0].changes == rows[1].changes]
    assert at_base == ["1000", "15", "1.25", "map"]


def test_ensembles_are_of_the_runs_of_the_imagenet_table() -> None:
    single = set(all_runs(request("imagenet", 4, ("batch_size=8",))))
    members = list(all_runs(request("ensembles", 1, ("batch_size=8",))))
    assert len(members) == 16
    assert set(members) <= single
    assert {run.seed for run in all_runs(request("ensembles", 2))} == set(range(8))
    both = set(all_runs(request("imagenet-r-v2", 10)))
    assert both == set(all_runs(request("imagenet", 10)))


def test_the_first_seed_of_every_row_comes_first() -> None:
    runs = list(all_runs(request("cifar100", 10)))
    assert len(runs) == 70
    assert [run.seed for run in runs[:8]] == [0] * 7 + [1]


def test_a_folder_is_named_by_what_decides_the_result() -> None:
    names = {
        TableRun("imagenet/sngp", changes, 3).name
        for changes in [
            (),
            ("hardware.devices=8",),
            ("workers=2",),
            ("batch_size=8",),
            ("batch_size=8", "hardware.precision=32-true"),
            ("batch_size=9",),
        ]
    }
    assert len(names) == 3
    assert "imagenet-sngp/seed3" in names
    swapped = [TableRun("a", merge(c), 0).name for c in (["x=1", "y=2"], ["y = 2", "x=0", "x=1"])]
    assert swapped[0] == swapped[1]


@pytest.mark.parametrize(
    ("table", "given", "words"),
    [
        ("imagnet", {}, "imagenet"),
        ("imagenet", {"methods": ["posterior_network"]}, "deterministic"),
        ("imagenet", {"methods": []}, "at least one"),
        ("imagenet", {"seeds": 0}, "seeds"),
        ("imagenet", {"changes": ["schedule.epoch=3"]}, "schedule.epochs"),
        ("imagenet", {"changes": ["seed=3"]}, "leave out 'seed=3'"),
        ("imagenet", {"changes": ["method=sngp"]}, "leave out"),
        ("ablations", {"changes": ["options.rank=3"]}, "leave out"),
        ("ablations", {"methods": ["hetsngp"]}, "samples"),
        ("runtime", {"methods": ["sngp"]}, "leave out --methods"),
        ("synthetic", {"changes": ["network=wrn-10-1"]}, "schedule.epochs"),
        ("cifar100", {"recipe": "cifar10"}, "name a recipe with data = 'cifar100', or leave out --recipe"),
        ("imagenet", {"recipe": "cifar100"}, "the row deterministic of the table imagenet on imagenet"),
        ("cifar100", {"recipe": "cifar1000"}, "did you mean 'cifar100'"),
        ("cifar100", {"recipe": "cifar100", "changes": ["method=sngp"]}, "leave out 'method=sngp'"),
        ("synthetic", {"recipe": "cifar100"}, "leave out --recipe"),
        ("runtime", {"one_seed": ["mimo"]}, "leave out --recipe and --one-seed"),
        ("cifar100", {"one_seed": ["mini"]}, "'sngp', 'hetsngp', 'mimo', 'hetsngp_mimo'"),
        ("cifar100", {"seeds": 3, "one_seed": ["mimo"], "methods": ["sngp"]}, "choose one of 'sngp'"),
        ("cifar100-ablations", {"one_seed": ["6"]}, "leave it out"),
        ("cifar100-ablations", {"changes": ["options.temperature=3"]}, "leave out"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_the_fix(table: str, given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        plan_of(table, out="nowhere", **given)
    assert len(str(error.value).splitlines()) == 1


# --- one recipe for all rows ------------------------------------------------------------------------------

METHODS = ("deterministic", "posterior_network", "heteroscedastic", "sngp", "hetsngp", "mimo", "hetsngp_mimo")
FEW = ("posterior_network", "mimo", "hetsngp_mimo")


def test_a_recipe_trains_the_method_of_every_row() -> None:
    runs = list(all_runs(check_request("cifar100", 1, recipe="cifar100")))
    assert runs == [TableRun("cifar100", (f"method={name}",), 0) for name in METHODS]
    assert [run.name for run in runs] == [f"cifar100+{name}/seed0" for name in METHODS]
    for run, name in zip(runs, METHODS, strict=True):
        recipe, expected = run.read(), read_recipe("cifar100").task
        assert (recipe.task.method, recipe.task.network) == (name, expected.network)
        assert dict(recipe.task.options) == {}  # those of cifar100, not of cifar100/mimo


def test_a_folder_of_such_a_run_has_a_hash_only_for_more_than_the_method() -> None:
    def name(*changes: str, recipe: str = "cifar100") -> str:
        return next(
            iter(all_runs(check_request("cifar100", 1, ["sngp"], changes, recipe=recipe)))
        ).name.removesuffix("/seed0")

    assert name("hardware.devices=8", "workers=2") == name() == "cifar100+sngp"
    assert re.fullmatch(r"cifar100\+sngp-[0-9a-f]{8}", name("schedule.epochs=3"))
    assert name("schedule.epochs=3") != name("schedule.epochs=4")
    assert name(recipe="cifar100/mimo") == "cifar100-mimo+sngp"


def test_a_recipe_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('data = "cifar100"\nnetwork = "wrn-10-1"\n[schedule]\nepochs = 1\n', encoding="utf-8")
    (run,) = all_runs(check_request("cifar100", 1, ["mimo"], recipe=str(file)))
    assert run.name == "mine+mimo/seed0"
    assert (run.read().task.method, run.read().task.network) == ("mimo", "wrn-10-1")
    file.write_text('data = "cifar10"\nnetwork = "wrn-10-1"\n[schedule]\nepochs = 1\n', encoding="utf-8")
    with pytest.raises(ValueError, match="trains on cifar10, the row mimo of the table cifar100 on cifar100"):
        check_request("cifar100", 1, ["mimo"], recipe=str(file))


def test_rows_of_one_seed_are_trained_with_the_first_alone(tmp_path: Path) -> None:
    given = {"seeds": 3, "recipe": "cifar100", "one_seed": [*reversed(FEW), "mimo"]}
    plan = plan_of("cifar100", out=tmp_path, **given)  # type: ignore[arg-type]
    seeds: dict[str, list[int]] = {}
    for run, state in plan:
        seeds.setdefault(run.read().task.method, []).append(run.seed)
        assert state == "to do"
    assert seeds == {name: [0] if name in FEW else [0, 1, 2] for name in METHODS}
    asked = check_request("cifar100", **given)  # type: ignore[arg-type]
    assert asked.one_seed == FEW  # in the order of the table
    assert [run.seed for run, _ in plan] == [0] * 7 + [1] * 4 + [2] * 4
    assert check_request("cifar100", 1, one_seed=FEW).one_seed == ()  # all have one


def test_a_table_with_rows_of_one_seed_is_finished_without_more() -> None:
    asked = check_request("cifar100", 2, recipe="cifar100", one_seed=FEW)
    result, (part,) = Result(asked), asked.table.parts
    for seed, _, row in asked.rows_by_seed():
        assert not result.is_finished
        for column in part.columns:
            result.add(part, row, column, seed, 0.5)
    assert result.is_finished
    assert "| MIMO | ours, n = 1 |" in markdown(result)
    assert "| SNGP | ours, n = 2 |" in markdown(result)


def test_title_json_and_command_say_which_recipe_and_rows(tmp_path: Path) -> None:
    asked = check_request(
        *("cifar100", 3, None, ["schedule.decay=step", "schedule.milestone_shares=[0.5, 0.8]"]),
        recipe="cifar100",
        one_seed=FEW,
        far="scenes",
    )
    assert asked.title() == (
        "CIFAR-100, 3 seeds (the paper: 10), 1 seed of posterior_network, mimo, hetsngp_mimo; "
        "recipe cifar100; changed: schedule.decay=step, schedule.milestone_shares=[0.5, 0.8]"
    )
    command = (
        "hetsngp reproduce cifar100 --recipe cifar100 --seeds 3 "
        "--one-seed posterior_network,mimo,hetsngp_mimo --far scenes "
        "--set schedule.decay=step --set 'schedule.milestone_shares=[0.5, 0.8]'"
    )
    json_file, document = Result(asked).save(tmp_path)
    assert f"`{command}`" in document.read_text(encoding="utf-8")
    found = json.loads(json_file.read_text(encoding="utf-8"))
    assert (found["recipe"], found["one_seed"], found["far"]) == ("cifar100", list(FEW), "scenes")
    assert found["command"] == command


def test_the_printed_command_asks_for_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = check_request(
        *("cifar100", 3, ["sngp", "mimo"], ["schedule.decay=step", "schedule.milestones=[5, 9]"]),
        recipe="cifar100",
        one_seed=["mimo"],
        far="a folder",
    )
    seen = []

    def keep(table: str, *, out: Path, **given: object) -> None:
        seen.append(check_request(table, **given))  # type: ignore[arg-type]

    monkeypatch.setattr("hetsngp.paper.reproduce", keep)
    done = CliRunner().invoke(make_app(), [*shlex.split(asked.command)[1:], "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert seen == [asked]
    plain = check_request("imagenet", far="scenes")
    assert plain.command == "hetsngp reproduce imagenet"  # nothing is far there


# --- our tables on CIFAR-100 --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "cifar100"])
def test_ensembles_on_cifar100_are_of_the_runs_of_its_table(recipe: str | None) -> None:
    single = set(all_runs(check_request("cifar100", 3, recipe=recipe)))
    members = list(all_runs(check_request("cifar100-ensembles", recipe=recipe)))
    assert len(members) == 12
    assert set(members) <= single
    assert {run.seed for run in members} == {0, 1, 2}
    assert TABLES["cifar100-ensembles"].parts[0].columns == TABLES["cifar100"].parts[0].columns


def ablation_runs(**given: object) -> dict[str, TableRun]:
    asked = check_request("cifar100-ablations", **given)  # type: ignore[arg-type]
    return {
        f"{part.name.removeprefix('cifar100-ablations-')} {row.name}": asked.runs_of(row, 0)[0]
        for part in asked.table.parts
        for row in part.rows
    }


def test_default_rows_of_the_ablations_are_the_run_of_hetsngp() -> None:
    given = {"recipe": "cifar100", "changes": ["schedule.epochs=3", "options.random_features=32"]}
    runs = ablation_runs(**given)
    asked = check_request("cifar100", 1, ["hetsngp"], **given)  # type: ignore[arg-type]
    (run,) = all_runs(asked)
    shared = {name for name, each in runs.items() if each == run}
    assert shared == {"rank 6", "temperature 1", "training map"}
    assert len(set(runs.values())) == 6
    expected = {"rank 2": ("rank", 2), "rank 15": ("rank", 15), "training mc_sampling": ("sample_beta", True)}
    expected |= {"temperature 0.5": ("temperature", 0.5), "temperature 2": ("temperature", 2.0)}
    for name, (option, value) in expected.items():
        task = runs[name].read().task
        assert dict(task.options) == {"random_features": 32, option: value}
        assert task.calibrate


def test_ablations_by_the_own_recipe_have_the_values_of_their_rows() -> None:
    """Its temperature is 0.5: the row of that value, not the default one, is its run."""
    runs = ablation_runs()
    (run,) = all_runs(check_request("cifar100", 1, ["hetsngp"]))
    assert {name for name, each in runs.items() if each == run} == {"temperature 0.5"}
    base = {"rank": 6, "temperature": 1.0, "sample_beta": False, "spectral_bound": 6.0}
    for name, each in runs.items():
        part, row = name.split()
        option = {"training": "sample_beta"}.get(part, part)
        value = {"map": False, "mc_sampling": True}.get(row)
        expected = {**base, option: float(row) if value is None else value}
        options = asdict(check_options(each.read().task.options))
        assert {name: options[name] for name in expected} == expected
    assert len(set(runs.values())) == 6


def test_parts_of_the_ablations_on_cifar100_can_be_chosen() -> None:
    asked = check_request("cifar100-ablations", methods=["training", "rank"], recipe="cifar100")
    assert [part.name for part in asked.table.parts] == [
        "cifar100-ablations-rank",
        "cifar100-ablations-training",
    ]
    assert asked.name == "cifar100-ablations-rank+training"
    assert asked.command == "hetsngp reproduce cifar100-ablations --recipe cifar100 --methods rank,training"
    assert "the paper" not in check_request("cifar100-ablations", 2).title()


def test_names_of_the_ablations_on_imagenet_are_those_of_release_0_1() -> None:
    """Though some of their changes are to values that the recipe has: runs of that release must be found."""
    row = TABLES["ablations"].parts[1].rows[0]
    assert runs_of(row, (), 0)[0].changes == row.changes


def test_rows_and_parts_can_be_chosen() -> None:
    some = check_request("imagenet", methods=["mimo", "sngp"]).table.parts[0]
    assert [row.name for row in some.rows] == ["sngp", "mimo"]
    assert [part.name for part in check_request("ablations", methods=["rank"]).table.parts] == [
        "ablations-rank"
    ]


def test_nothing_is_finished_in_an_empty_folder(tmp_path: Path) -> None:
    plan = plan_of("imagenet", out=tmp_path, seeds=2, methods=["sngp"])
    assert [(str(run), state) for run, state in plan] == [
        ("imagenet/sngp, seed 0", "to do"),
        ("imagenet/sngp, seed 1", "to do"),
    ]
    assert not list(tmp_path.iterdir())


def test_the_rows_of_the_runtime_tables_are_planned_too(tmp_path: Path) -> None:
    plan = plan_of("runtime", out=tmp_path)
    assert len(plan) >= len(PAPER["runtime-resnet50"]) + len(PAPER["runtime-vit"])
    assert {state for _, state in plan} == {"to do"}


def test_the_same_warning_of_many_runs_is_shown_once() -> None:
    with warnings.catch_warnings(record=True) as shown, _each_warning_once():
        warnings.simplefilter("always")
        for place in range(3):
            with warnings.catch_warnings():  # which would have Python forget that it was shown
                warnings.warn("a part is missing", stacklevel=1)
            warnings.warn(f"number {min(place, 1)}", stacklevel=1)
    assert [str(each.message) for each in shown] == ["a part is missing", "number 0", "number 1"]


def test_synthetic_seeds_are_not_those_that_settings_were_chosen_on() -> None:
    config = config_for(check_request("synthetic", changes=["schedule.epochs=2"]))
    assert config.seeds == tuple(range(200, 210))
    assert config.epochs == 2
    assert set(config.tasks) == {"noisy_circles", "two_moons", "gaussian_mixture"}


# --- means, errors, marks -------------------------------------------------------------------------------


def test_mean_and_standard_error_are_scipys() -> None:
    values = [0.75, 0.76, 0.79]
    cell = Cell(dict(enumerate(values)))
    assert cell.mean == pytest.approx(sum(values) / 3)
    assert cell.standard_error == pytest.approx(sem(values))
    assert Cell({0: 0.5}).standard_error is None
    assert Cell({}).mean is None


@pytest.mark.parametrize("sign", [1, -1])
def test_marked_is_what_is_within_the_error_of_the_best(sign: int) -> None:
    means = {"best": (1.0, 0.1), "in": (1.0 - sign * 0.1, None), "out": (1.0 - sign * 0.11, 5.0)}
    assert within_one_error(means, sign) == {"best", "in"}
    alone = {name: (mean, None) for name, (mean, _) in means.items()}
    assert within_one_error(alone, sign) == {"best"}
    assert within_one_error({}, sign) == set()


def filled(name: str, seeds: int, changes: tuple[str, ...] = ()) -> Result:
    """A result with numbers that differ in every cell, the paper's size."""
    table = TABLES[name]
    result = Result(TableRequest(table, tuple(range(seeds)), changes), notes=table.notes)
    for part in table.parts:
        for i, row in enumerate(part.rows):
            for j, column in enumerate(part.columns):
                mean = (printed(part.name, row.name, column.name) or (0.5, None))[0]
                for seed in range(seeds):
                    result.add(part, row, column, seed, mean + 0.01 * i - 0.007 * j + 0.001 * seed)
    return result


@pytest.mark.parametrize("name", [n for n in TABLES if n != "runtime"])
@pytest.mark.parametrize("seeds", [1, 3])
def test_texts_fit_and_hold_every_number(name: str, seeds: int) -> None:
    result = filled(name, seeds)
    lines = plain_text(result).splitlines()
    assert max(map(len, lines)) <= WIDTH
    text, document = "\n".join(lines), markdown(result)
    for part in result.table.parts:
        for row in part.rows:
            assert row.title in text
            for column in part.columns:
                cell = result.cell(part, row, column)
                shown = f"{cell.mean:.3f}"
                error = "" if cell.standard_error is None else f" ± {cell.standard_error:.3f}"
                assert shown in text
                assert f"{shown}{error} |" in document or f"**{shown}**{error} |" in document
                if cell.paper is not None:
                    assert f"{cell.paper[0]:.3f}" in text
    assert document.count("**") / 2 == sum(
        len(result.best(part, column)) for part in result.table.parts for column in part.columns
    )


def test_an_unfinished_table_can_be_read() -> None:
    result = filled("imagenet", 2)
    assert result.is_finished
    for column in result.table.parts[0].columns:
        del result.values["imagenet", "mimo", column.name]
    assert not result.is_finished
    row = next(line for line in plain_text(result).splitlines() if line.startswith("MIMO"))
    assert row.split() == ["MIMO", "ours", *[NONE] * 9]
    assert "(unfinished)" in markdown(result)
    empty = Result(TableRequest(TABLES["ablations"], (0,)))
    assert max(map(len, str(empty).splitlines())) <= WIDTH


def test_the_title_says_what_is_not_the_papers() -> None:
    table = TABLES["cifar100"]
    assert TableRequest(table, tuple(range(10))).title() == "CIFAR-100, 10 seeds"
    request = TableRequest(table, (0,), ("schedule.epochs=3", "hardware.devices=1"))
    assert request.title() == "CIFAR-100, 1 seed (the paper: 10); changed: schedule.epochs=3"
    assert TableRequest(TABLES["ensembles"], (0,)).title() == "Ensembles of 4 on ImageNet, 1 ensemble"


def test_some_rows_do_not_take_the_place_of_all(tmp_path: Path) -> None:
    request = {
        None: "ablations",
        ("training", "rank"): "ablations-rank+training",
        ("rank",): "ablations-rank",
        TABLES["ablations"].choices: "ablations",
    }
    for methods, name in request.items():
        assert check_request("ablations", methods=methods).name == name
    whole, some = check_request("cifar100", 1), check_request("cifar100", 1, methods=["hetsngp", "sngp"])
    assert (whole.name, some.name) == ("cifar100", "cifar100-sngp+hetsngp")
    assert some.title() == "CIFAR-100 (sngp, hetsngp alone), 1 seed (the paper: 10)"
    assert "alone" not in whole.title()
    Result(whole).save(tmp_path)
    before = (tmp_path / "cifar100.json").read_bytes()
    json_file, document = Result(some).save(tmp_path)
    assert (tmp_path / "cifar100.json").read_bytes() == before
    assert json.loads(json_file.read_text(encoding="utf-8"))["methods"] == ["sngp", "hetsngp"]
    text = document.read_text(encoding="utf-8")
    assert document.name == "cifar100-sngp+hetsngp.md"
    assert "(cifar100-sngp+hetsngp.png)" in text
    assert "`hetsngp reproduce cifar100 --seeds 1 --methods sngp,hetsngp`" in text
    assert check_request("runtime").name == "runtime"


def test_the_footnote_warns_of_the_papers_auroc() -> None:
    assert "chance level" in plain_text(filled("cifar100", 1))


def test_json_holds_every_value(tmp_path: Path) -> None:
    result = filled("cifar100", 2, ("schedule.epochs=3",))
    result.runs["a"] = {"seconds": 2.5}
    result.save(tmp_path)
    found = json.loads((tmp_path / "cifar100.json").read_text(encoding="utf-8"))
    assert found["finished"]
    assert found["changes"] == ["schedule.epochs=3"]
    assert found["seconds"] == 2.5
    cell = found["parts"]["cifar100"]["rows"]["sngp"]["cells"]["corr_nll"]
    ours = result.cell(result.table.parts[0], result.table.parts[0].rows[3], result.table.parts[0].columns[4])
    assert cell["values"] == {str(seed): value for seed, value in ours.values.items()}
    assert (cell["mean"], cell["standard_error"], cell["n"]) == (ours.mean, ours.standard_error, 2)
    assert cell["paper"] == [2.339, 0.007]


# --- differences from the deterministic network -----------------------------------------------------------

COMPARED = [name for name in TRAINED if any(part.baseline for part in TABLES[name].parts)]
BY_COLUMN = (
    Interval(+1.234, +1.2, +1.3, 3),
    Interval(-1.567, -1.6, -1.5, 3),
    Interval(+0.012, -0.1, +0.2, 3),
    None,
)
"""Higher, lower, neither for sure, and none; columns have them in turn."""


def compared(name: str) -> Result:
    result = filled(name, 3)
    for part in result.table.parts:
        for row in part.rows:
            for place, column in enumerate(part.columns):
                interval = BY_COLUMN[place % len(BY_COLUMN)]
                if row is not part.baseline and interval is not None:
                    result.intervals[part.name, row.name, column.name] = interval
    return result


@pytest.mark.parametrize("name", COMPARED)
def test_differences_fit_a_terminal_and_clear_ones_are_marked(name: str) -> None:
    result = compared(name)
    (part,) = result.table.parts
    text = plain_text(result)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert part.baseline is not None
    before, _, block = text.partition(f"\n\nDifferences from {part.baseline.title}\n")
    block, _, after = block.partition("\n\n")
    assert before.startswith(result.request.title()[:40])
    assert "within one standard error of the best" in after
    *_, clear = block.splitlines()
    assert clear == "*: zero is outside the 95% interval of a paired bootstrap over examples and seeds."
    for row in part.rows:
        lines = [line for line in block.splitlines() if line.startswith(f"{row.title} ")]
        lines = [line for line in lines if line.removeprefix(row.title).split()[0][0] in "+-"]  # not "… MIMO"
        if row is part.baseline:
            assert lines == []
            continue
        (line,) = lines
        shown = [("+1.234*", "-1.567*", "+0.012", NONE)[i % 4] for i in range(len(part.columns))]
        assert line.removeprefix(row.title).split() == shown
    assert "Differences" not in plain_text(filled(name, 3))


@pytest.mark.parametrize("name", COMPARED)
def test_a_document_has_the_intervals_and_clear_gains_in_bold(name: str) -> None:
    """What is better depends on the column: a higher accuracy, a lower NLL."""
    result = compared(name)
    (part,) = result.table.parts
    assert part.baseline is not None
    document = markdown(result)
    before, _, after = document.partition(f"Differences from {part.baseline.title}, with the 95% interval of")
    assert "(1,000 resamples)" in after
    assert markdown(filled(name, 3)).startswith(before)
    rows = [line.strip("| ").split(" | ") for line in after.splitlines() if line.startswith("| ")]
    found = {title.strip(): [cell.strip() for cell in cells] for title, *cells in rows if title.strip()}
    others = [row for row in part.rows if row is not part.baseline]
    shown = []
    for place, column in enumerate(part.columns):
        gain = column.sign > 0
        higher, lower = ("**+1.234**", "-1.567") if gain else ("+1.234", "**-1.567**")
        shown.append(
            [
                f"{higher} (+1.200 to +1.300)",
                f"{lower} (-1.600 to -1.500)",
                "+0.012 (-0.100 to +0.200)",
                NONE,
            ][place % 4]
        )
    assert {title: cells for title, cells in found.items() if "seeds" in title} == {
        f"{row.title}, 3 seeds": shown for row in others
    }


def test_json_has_the_differences(tmp_path: Path) -> None:
    result = compared("cifar100")
    result.save(tmp_path)
    part = json.loads((tmp_path / "cifar100.json").read_text(encoding="utf-8"))["parts"]["cifar100"]
    about = {"from": "deterministic", "level": 0.95, "resamples": 1000, "over": "examples and seeds, paired"}
    assert part["differences"] == about
    cells = part["rows"]["sngp"]["cells"]
    names = list(cells)
    assert cells[names[1]]["difference"] == {"difference": -1.567, "low": -1.6, "high": -1.5, "seeds": 3}
    assert "difference" not in cells[names[3]]
    assert all("difference" not in cell for cell in part["rows"]["deterministic"]["cells"].values())
    alone = Result(request("cifar100-ablations", 1)).to_dict()["parts"]["cifar100-ablations-rank"]
    assert "differences" not in alone  # no deterministic network to compare with


def measured_examples(seed: int, shift: float) -> Callable[[EvaluationSet], dict[str, np.ndarray]]:
    """Values of 50 examples of any set, of a seed; ``shift`` is added to every NLL, and to OOD scores."""

    def examples(of: EvaluationSet) -> dict[str, np.ndarray]:
        random = np.random.default_rng([seed, *of.name.encode()])
        values = random.random((3, 50))
        if of.scores:
            return {"ood_score": values[0] + shift * (of.spec != "cifar100")}
        return {"confidence": values[0], "correct": values[1] < values[0], "nll": values[2] + shift}

    return examples


def test_rows_are_compared_with_the_deterministic_one_by_seed() -> None:
    """SNGP of three seeds is worse by 0.25 nats for every image, HetSNGP of one by 0.5; both find OOD."""
    asked = check_request("cifar100", 3, ["deterministic", "sngp", "hetsngp"], one_seed=["hetsngp"])
    result, (part,) = Result(asked), asked.table.parts
    sets = AvailableSets("far", {"cifar100-c": ({("fog", 1): None, ("fog", 2): None}, True)}, {})
    work: Any = _Work(result, Path("nowhere"), None, sets, False, print, 0, ())
    shifts = {"deterministic": 0.0, "sngp": 0.25, "hetsngp": 0.5}
    for seed, _, row in asked.rows_by_seed():
        examples = measured_examples(seed, shifts[row.name])
        work.measured[part.name, row.name, seed] = SimpleNamespace(
            model=SimpleNamespace(data="cifar100"), examples=examples
        )
        for column in part.columns:
            needed = sets.evaluation_sets(column, "cifar100")
            found = {of: {name: v.mean() for name, v in examples(of).items()} for of in needed}
            value = found[needed[0]]["nll"] if column.metric == "nll" else 0.125 * (row.name == "sngp")
            result.add(part, row, column, seed, float(value))
    work._compare(part)
    names = [column.name for column in part.columns]
    assert list(result.intervals) == [(part.name, row, name) for row in ("sngp", "hetsngp") for name in names]
    for row, seeds in (("sngp", 3), ("hetsngp", 1)):
        for name in ("id_nll", "corr_nll"):
            interval = result.intervals[part.name, row, name]
            assert interval == pytest.approx((shifts[row],) * 3 + (seeds,), abs=1e-5)
            assert interval.is_clear
        accuracy = result.intervals[part.name, row, "id_acc"]
        # The value is the table's; the same examples are right for both, in every resample.
        assert accuracy == pytest.approx((0.125 * (row == "sngp"), 0.0, 0.0, seeds), abs=1e-6)
        near = result.intervals[part.name, row, "near_auroc"]
        assert 0.05 < near.low < near.high
    assert not _compared_without_baseline()


def _compared_without_baseline() -> dict[Any, Any]:
    asked = check_request("cifar100", 1, ["sngp", "hetsngp"])
    work: Any = _Work(Result(asked), Path("nowhere"), None, AvailableSets("far", {}, {}), False, print, 0, ())
    work._compare(asked.table.parts[0])
    return work.result.intervals


def test_every_metric_has_a_direction() -> None:
    assert {c.metric for part in parts() for c in part.columns} == set(METRICS)
    for part in parts():
        for column in part.columns:
            assert column.sign == (-1 if re.search(r"NLL|ECE|FPR95", column.title) else 1)


# --- pictures -------------------------------------------------------------------------------------------


def test_a_picture_has_a_panel_a_column_and_nothing_overlaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr("hetsngp.paper.plots.save_figure", lambda figure, path: drawn.append(figure))
    for name in ("ablations", "imagenet", "cifar100", "cifar100-ensembles", "cifar100-ablations"):
        draw(filled(name, 2, tuple(f"options.option{n}=1" for n in range(12))), tmp_path / "unused.png")
    for figure, panels in zip(drawn, (12, 9, 10, 10, 15), strict=True):
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        axes = [ax for ax in figure.axes if ax.get_visible()]
        assert len(axes) == panels
        for ax in axes:
            for axis in (ax.xaxis, ax.yaxis):
                texts = [t for t in axis.get_ticklabels() if t.get_visible() and t.get_text()]
                boxes = [text.get_window_extent(renderer) for text in texts]
                assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))
        whole = figure.bbox
        boxes = [ax.get_tightbbox(renderer) for ax in axes]
        boxes += [figure._suptitle.get_window_extent(renderer), figure.legends[0].get_window_extent(renderer)]
        assert all(box.x0 >= -1 and box.x1 <= whole.x1 + 1 for box in boxes)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_picture_of_nothing_yet_can_be_drawn(tmp_path: Path) -> None:
    table = TABLES["ablations"].only(["training", "rank"])
    draw(Result(TableRequest(table, (0,))), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000
