"""The table of `hetsngp reproduce cifar100`, of runs that were trained and measured in several places.

    python experiments/cifar/gather.py FOLDER --seeds 2 --far scenes --out experiments/cifar --set …

FOLDER has `runs/` as the command left it, or copies of the `summary.json` and `measured/` of every run. On
one machine the command itself puts the table together; it measures again what another version of torch had
measured, and this does not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hetsngp.data.corruptions import CORRUPTIONS, SEVERITIES
from hetsngp.files import write_json
from hetsngp.paper.measurements import ModelMeasurements, TrainedModel, value_of
from hetsngp.paper.plots import draw
from hetsngp.paper.reproduction import check_request
from hetsngp.paper.results import Result
from hetsngp.paper.runs import runs_of
from hetsngp.paper.sets import AvailableSets, EvaluationSet, all_evaluation_sets

KEPT = ("seconds", "epochs", "epoch", "held_out", "posterior")


def numbers(measurements: ModelMeasurements, of: EvaluationSet) -> Any:
    file = measurements.cache.file(of.name, ".json")
    return json.loads(file.read_text(encoding="utf-8"))["numbers"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--far", default="places365")
    parser.add_argument("--set", dest="changes", action="append", default=[])
    parser.add_argument("--published", action="store_true", help="the corruptions are the published files")
    parser.add_argument("--torch", default=None, help="the version that trained")
    parser.add_argument("--python", default=None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    request = check_request("cifar100", options.seeds, None, options.changes)
    keys = dict.fromkeys((name, severity) for name in CORRUPTIONS for severity in SEVERITIES)
    sets = AvailableSets(options.far, {"cifar100-c": (keys, not options.published)}, {})
    result = Result(request, notes=(*request.table.notes, *sets.notes(request.table)))
    for part in request.table.parts:
        measured = all_evaluation_sets(part.columns, sets, "cifar100")
        for row in part.rows:
            for seed in request.seeds:
                (run,) = runs_of(row, request.changes, seed)
                folder = run.folder(options.folder)
                summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
                about = {name: summary[name] for name in KEPT} | {"settings": summary["recipe"]}
                result.runs[run.name] = {
                    "recipe": run.recipe,
                    "changes": list(run.changes),
                    "seed": seed,
                    **about,
                }
                model = TrainedModel((folder,), folder / "measured", "cifar100")
                measurements = ModelMeasurements(model, measured)
                found = {each: numbers(measurements, each) for each in measured}
                for column in part.columns:
                    value = value_of(column, sets, "cifar100", found)
                    assert value is not None
                    result.add(part, row, column, seed, value)
    result.save(options.out)
    file = options.out / "cifar100.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    given = {"torch": options.torch, "python": options.python}
    content["versions"] |= {name: version for name, version in given.items() if version is not None}
    write_json(file, content)
    draw(result, options.out / "cifar100.png")
    print(result)


if __name__ == "__main__":
    main()
