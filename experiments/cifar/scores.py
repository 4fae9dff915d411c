"""OOD scores of trained networks on the test sets: every candidate of the study, for every method.

    export HETSNGP_DATA=...
    python experiments/cifar/scores.py RUN_FOLDER [RUN_FOLDER ...] --far scenes --out out/scores
    python experiments/cifar/scores.py --gather out/scores --out experiments/cifar

RUN_FOLDER is a folder that ``hetsngp train`` or ``hetsngp reproduce`` wrote. The first command writes a JSON
file with AUROC and FPR95 of every score of a network, and an .npz file with some scores of every image;
networks that have a JSON file are skipped. Test images are in-distribution, CIFAR-10's are near OOD.
Densities are those of the network's own training images, and combinations are by tail probabilities of its
held-out images, as in ../ood_score. Several processes may share ``--out``; after a kill remove ``*.begun``.

The second command writes ``scores.json`` and ``scores.md``: means over seeds, and differences of AUROC with
intervals of a bootstrap that draws seeds and images, the same ones for both methods.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hetsngp
from hetsngp import metrics
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import DeviceLoader
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.preprocessing import Preprocessing
from hetsngp.data.sources import open_set
from hetsngp.files import write_atomically, write_json
from hetsngp.frozen.features import FeatureSet
from hetsngp.models.classifier import Classifier
from hetsngp.paper.intervals import RESAMPLES, Resamples, paired_interval, resampled_detection
from hetsngp.serving.bundle import find_device, open_run
from hetsngp.training.input_kinds import TaskData
from hetsngp.training.recipes.keys import current_description
from hetsngp.training.recipes.task import ImageTask
from hetsngp.training.task_data import open_task, spread

STUDY = Path(__file__).parents[1] / "ood_score"


def study_script(name: str) -> ModuleType:
    """Module of a script of the study. By its file, which is no package."""
    spec = importlib.util.spec_from_file_location(f"ood_score_{name}", STUDY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(STUDY))  # scripts of the study import each other
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(STUDY))
    return module


study, study_gather = study_script("study"), study_script("gather")
RawScores = study.RawScores
commit, combinations = study.commit, study_gather.combinations

METHODS = ("deterministic", "heteroscedastic", "sngp", "hetsngp")
"""Methods with one Gaussian over logits for an image; MIMO and the Posterior Network have none."""
SETS = ("held_out", "test", "near", "far")
BATCH = 1000
DETERMINISTIC_CHOSEN = study_gather.DETERMINISTIC_CHOSEN
"""Score of a network without a posterior, chosen by the study on held-out classes (../ood_score/study.md)."""
KEPT = ("ood_score", "model uncertainty", "entropy", "energy", study_gather.CHOSEN, DETERMINISTIC_CHOSEN)
"""Scores of every image that are stored."""
COMPARISONS = (
    (("hetsngp", "ood_score"), ("deterministic", DETERMINISTIC_CHOSEN)),
    (("hetsngp", "ood_score"), ("deterministic", "entropy")),
    (("hetsngp", "ood_score"), ("hetsngp", "model uncertainty")),
    (("sngp", "ood_score"), ("deterministic", DETERMINISTIC_CHOSEN)),
)
"""Pairs of (method, score) whose difference of AUROC is reported."""
"""Seeds of the random draws of the bootstrap."""


# --- a trained network and its features -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Network:
    """A trained network, and the features of all sets."""

    model: Classifier
    train: FeatureSet
    sets: dict[str, FeatureSet]
    """Features of the held-out, test, near and far images; labels of the last two are zeros."""


def read_summary(folder: Path) -> dict[str, Any]:
    """Summary of a finished run."""
    file = folder / "summary.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no summary.json: give folders of finished runs")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {**found, "recipe": current_description(found["recipe"])}


def unsupported(summary: Mapping[str, Any]) -> str | None:
    """Reason why the scores are not defined for a run; None: they are."""
    method = summary["recipe"]["task"]["method"]
    if method in METHODS:
        return None
    return f"method {method} is not supported, only {', '.join(METHODS)}"


@functools.lru_cache(maxsize=2)
def open_split(seed: int, **data: Any) -> TaskData:
    """Training, held-out and test images of the run with this seed; its method and network do not matter."""
    return open_task(ImageTask(**data), seed)


@functools.lru_cache(maxsize=4)
def ood_images(spec: str, size: tuple[int, int], resize: int | None) -> ImageArrays:
    """Test images of a set, in memory, with label zero."""
    images = open_set(spec, "test")
    if isinstance(images, ImageFiles):
        images = images.load(size[0], resize=resize)
    if not isinstance(images, ImageArrays):
        raise ValueError(f"{spec} is a {type(images).__name__}: give a set of images with one label each")
    return replace(images, labels=torch.zeros_like(images.labels))


def extract(model: Classifier, inputs: Preprocessing, images: Any, device: torch.device) -> FeatureSet:
    """Features of images, on ``device``."""
    loader = inputs.loader(images, BATCH)
    if isinstance(loader, DeviceLoader):
        loader = loader.to(device, channels_last=device.type == "cuda")
    found = hetsngp.extract_features(model, loader)
    return FeatureSet(found.h.to(device), found.y.to(device))


def open_network(
    folder: Path, summary: Mapping[str, Any], options: argparse.Namespace, device: torch.device
) -> Network:
    """Load a run and compute the features of its sets, each once; with the scale of its own images."""
    served = open_run(folder, device)
    model, inputs = served.model, served.inputs
    if not isinstance(model, Classifier):
        raise TypeError(f"{folder} is an ensemble: give the folder of one network")
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    task = summary["recipe"]["task"]
    keys = ("data", "held_out", "size", "resize", "from_disk")
    data = open_split(summary["recipe"]["config"]["seed"], **{key: task[key] for key in keys})
    images: dict[str, Any] = {"train": data.train, "held_out": data.held_out, "test": data.test}
    if data.test is None:
        raise FileNotFoundError(data.missing or f"{task['data']} has no test images")
    for part, spec in (("near", options.near), ("far", options.far)):
        images[part] = ood_images(spec, inputs.size, inputs.resize)
    if options.limit is not None:
        images = {part: spread(each, options.limit) for part, each in images.items()}
    found = {part: extract(model, inputs, each, device) for part, each in images.items()}
    return Network(model, found["train"], {part: found[part] for part in SETS})


# --- scores of a network --------------------------------------------------------------------------------


def all_scores(network: Network) -> dict[str, dict[str, Tensor]]:
    """Score → set → values (n,) in float64 on the CPU, combinations among them."""
    raw = RawScores(network.model, network.train)
    by_set = {part: raw(found.h) for part, found in network.sets.items()}
    scores = {name: {part: by_set[part][name].double().cpu() for part in SETS} for name in by_set["test"]}
    return scores | combinations(scores, SETS)


def detection(scores: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, dict[str, float]]]:
    """AUROC and FPR95 of every score, near and far, with the test images as in-distribution."""

    def of(measure: Any) -> dict[str, dict[str, float]]:
        return {
            part: {name: round(measure(each["test"], each[part]), 5) for name, each in scores.items()}
            for part in ("near", "far")
        }

    return {"auroc": of(metrics.auroc), "fpr95": of(functools.partial(metrics.fpr95, positive="id"))}


def folder_name(folder: Path) -> str:
    """Name of a run: of its folder, and of the one above where ``hetsngp reproduce`` calls it "seed0"."""
    folder = folder.resolve()
    return f"{folder.parent.name}-{folder.name}" if re.fullmatch(r"seed\d+", folder.name) else folder.name


def measure(
    folder: Path, summary: Mapping[str, Any], options: argparse.Namespace, device: torch.device
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Numbers of a network, and the scores of its images that are stored."""
    begun = time.perf_counter()
    network = open_network(folder, summary, options, device)
    extracted = time.perf_counter() - begun
    scores = all_scores(network)
    found = detection(scores)
    score = network.model.head.ood_score
    result = {
        "method": summary["recipe"]["task"]["method"],
        "seed": summary["recipe"]["config"]["seed"],
        "folder": folder_name(folder),
        "weights": summary.get("weights"),
        "near": Path(options.near).name,
        "far": Path(options.far).name,
        "limit": options.limit,
        "examples": {"train": len(network.train)} | {part: len(each) for part, each in network.sets.items()},
        # False: of release 0.1 or not calibrated, and ood_score is the model uncertainty, or the entropy.
        "ood_score_fitted": None if score is None else score.is_filled,
        "recipe": summary["recipe"],
        "commit": commit(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "feature_seconds": round(extracted, 2),
        "seconds": round(time.perf_counter() - begun, 2),
        **found,
    }
    arrays = {
        f"{part}|{name}": scores[name][part].float().numpy()
        for name in KEPT
        if name in scores
        for part in SETS[1:]
    }
    return result, arrays


def check_same_run(file: Path, summary: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Raise where the file of a network is that of another run with this name, or of other images."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["weights"] != summary.get("weights"):
        raise ValueError(f"{file} is of another run whose folder has the same name: choose another --out")
    asked = Path(options.near).name, Path(options.far).name, options.limit
    if (found["near"], found["far"], found["limit"]) != asked:
        raise ValueError(f"{file} was measured with other --near, --far or --limit: choose another --out")


def measure_missing(options: argparse.Namespace) -> int:
    """Measure every network that has no file yet; returns the number of those that failed."""
    options.out.mkdir(parents=True, exist_ok=True)
    device, failed = find_device(options.device), 0
    for folder, summary in [(each, read_summary(each)) for each in options.folders]:
        problem = unsupported(summary)
        if problem is not None:
            print(f"{folder}: skipped, {problem}", flush=True)
            continue
        file = options.out / f"{folder_name(folder)}.json"
        begun = file.with_suffix(".begun")
        try:
            begun.touch(exist_ok=False)
        except FileExistsError:
            print(f"{folder}: skipped, another process has begun it ({begun})", flush=True)
            continue
        try:
            if file.exists():
                check_same_run(file, summary, options)
                print(f"{folder}: in {file} already", flush=True)
                continue
            result, arrays = measure(folder, summary, options, device)
            np.savez_compressed(file.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]
            write_json(file, result)
            print(line(result), flush=True)
        except Exception:  # the other networks are independent of this one
            failed += 1
            traceback.print_exc()
        finally:
            begun.unlink()
    return failed


def line(result: Mapping[str, Any]) -> str:
    """One line for a network."""
    cells = [f"{result['folder']}: {result['method']}, seed {result['seed']}, {result['seconds']:.1f} s"]
    for name in KEPT:
        cell = study_gather.pair(result["auroc"], name)
        if cell != "–":
            cells.append(f"{name} {cell}")
    return ", ".join(cells)


# --- tables ---------------------------------------------------------------------------------------------

Stored = dict[tuple[str, int], dict[str, dict[str, np.ndarray]]]
"""(method, seed) → score → set → values."""


def read_network(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """Numbers of a network, and its stored scores."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    scores: dict[str, dict[str, np.ndarray]] = {}
    with np.load(file.with_suffix(".npz")) as arrays:
        for key in arrays.files:
            part, _, name = key.partition("|")
            scores.setdefault(name, {})[part] = arrays[key]
    return found, scores


def check_networks(networks: Sequence[Mapping[str, Any]]) -> None:
    """Check that networks can be compared: one for each method and seed, all with the same images."""
    if not networks:
        raise ValueError("there is no network to gather: first give folders of runs")
    seen: dict[tuple[str, int], str] = {}
    for each in networks:
        key = each["method"], each["seed"]
        if key in seen:
            raise ValueError(f"{each['folder']} and {seen[key]} have the same method and seed: remove one")
        seen[key] = each["folder"]

    def images(of: Mapping[str, Any]) -> Any:
        sizes = [of["examples"][part] for part in SETS[1:]]
        return of["near"], of["far"], of["recipe"]["task"]["data"], *sizes

    for each in networks[1:]:
        if images(each) != images(networks[0]):
            raise ValueError(
                f"{each['folder']} was measured on {images(each)}, {networks[0]['folder']} on "
                f"{images(networks[0])}: measure both on the same images"
            )


def means_of(networks: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Method → its seeds, and AUROC and FPR95 of every score, the mean over seeds."""
    out: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        runs = [run for run in networks if run["method"] == method]
        if not runs:
            continue
        out[method] = {"seeds": sorted(run["seed"] for run in runs)}
        for key in ("auroc", "fpr95"):
            out[method][key] = {
                part: {
                    name: round(statistics.fmean(run[key][part][name] for run in runs), 5)
                    for name in runs[0][key][part]
                }
                for part in ("near", "far")
            }
    return out


def compare(scores: Stored, populations: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every comparison for which there are networks of both methods with the same seeds.

    ``populations``: names of the sets "test", "near" and "far", by which images are drawn as in the tables of
    ``hetsngp reproduce``.
    """
    resamples = Resamples()

    def aurocs(method: str, name: str, part: str) -> dict[int, tuple[float, np.ndarray]]:
        """Seed → AUROC of the images themselves, and of every resample."""
        found = {}
        for seed in sorted(seed for other, seed in scores if other == method):
            pair = [scores[method, seed][name][each].astype(np.float64) for each in ("test", part)]
            once = resampled_detection(*pair, *(np.ones((1, len(each))) for each in pair))
            names = populations["test"], populations[part]
            counts = (resamples.of(n, len(each)) for n, each in zip(names, pair, strict=True))
            found[seed] = float(once[0, 0]), resampled_detection(*pair, *counts)[:, 0]
        return found

    out: list[dict[str, Any]] = []
    for one, two in COMPARISONS:
        about: dict[str, Any] = {"one": list(one), "two": list(two)}
        for part in ("near", "far"):
            first, second = aurocs(*one, part), aurocs(*two, part)
            interval = paired_interval(first, second, resamples)
            if interval is not None:
                about["seeds"] = sorted(first.keys() & second.keys())
                about[part] = [round(float(value), 5) for value in interval[:3]]
        if "seeds" in about:
            out.append(about)
    return out


def scores_table(means: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """A row for each score, by falling mean AUROC; a column for each method, near / far."""
    names = {name: None for each in means.values() for name in each["auroc"]["near"]}

    def mean(name: str) -> float:
        values = [each["auroc"][part].get(name) for each in means.values() for part in ("near", "far")]
        return statistics.fmean(value for value in values if value is not None)

    lines = ["| score | " + " | ".join(means) + " |", "|---" + "|---:" * len(means) + "|"]
    for name in sorted(names, key=mean, reverse=True):
        cells = [study_gather.pair(each[key], name) for each in means.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def differences_table(differences: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each comparison."""

    def short(value: float) -> str:
        return f"{value:+.4f}".replace("0.", ".", 1)

    def cell(values: Sequence[float]) -> str:
        return f"{short(values[0])} [{short(values[1])}, {short(values[2])}]"

    lines = ["| score | less | seeds | near | far |", "|---|---|---:|---:|---:|"]
    for each in differences:
        names = [f"{name} of {method}" for method, name in (each["one"], each["two"])]
        lines.append(
            f"| {' | '.join(names)} | {len(each['seeds'])} | {cell(each['near'])} | {cell(each['far'])} |"
        )
    return lines


def report(networks: Sequence[Mapping[str, Any]], differences: Sequence[Mapping[str, Any]]) -> str:
    """Text of ``scores.md``."""
    means, one = means_of(networks), networks[0]
    seeds = ", ".join(f"{method} {len(each['seeds'])}" for method, each in means.items())
    sizes = {part: f"{one['examples'][part]:,}" for part in SETS}
    lines = [
        "# OOD scores of trained networks",
        "",
        f"Written by scores.py. Test images of {one['recipe']['task']['data']} ({sizes['test']}) are",
        f"in-distribution, {one['near']} ({sizes['near']}) is near OOD, {one['far']} ({sizes['far']}) far.",
        f"Means over seeds ({seeds}).",
        "Combinations are of features z, the kernel's input, for sngp and hetsngp, and of h for the others.",
        "",
        "## AUROC, near / far",
        "",
        *scores_table(means, "auroc"),
        "",
        "## FPR95, near / far",
        "",
        "Share of OOD images taken for in-distribution at 95 % in-distribution recall.",
        "",
        *scores_table(means, "fpr95"),
    ]
    if differences:
        lines += ["", "## Differences of AUROC, with 95 % intervals", "", *differences_table(differences)]
    return "\n".join([*lines, ""])


def gather(folder: Path, out: Path) -> None:
    """Write ``scores.json`` and ``scores.md`` of the networks in a folder."""
    begun = time.perf_counter()
    read = [read_network(file) for file in sorted(folder.glob("*.json"))]
    networks = [found for found, _ in read]
    check_networks(networks)
    first = networks[0]
    populations = {"test": first["recipe"]["task"]["data"], "near": first["near"], "far": first["far"]}
    stored = {(found["method"], found["seed"]): scores for found, scores in read}
    differences = compare(stored, populations)
    text = report(networks, differences)
    content = {
        "commit": commit(),
        "torch": torch.__version__,
        "resamples": RESAMPLES,
        "means": means_of(networks),
        "differences": differences,
        "networks": networks,
        "seconds": round(time.perf_counter() - begun, 2),
    }
    write_json(out / "scores.json", content)
    write_atomically(out / "scores.md", lambda file: file.write(text.encode()))
    print(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which images to use, and where."""
    parser.add_argument("--near", default="cifar10", help="near-OOD images")
    parser.add_argument("--far", default="scenes", help="far-OOD images")
    parser.add_argument("--limit", type=int, default=None, help="so many images of each set: does it run?")
    parser.add_argument("--device", default="auto")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--gather", type=Path, metavar="FOLDER", help="make the tables of this folder")
    parser.add_argument("--out", type=Path, required=True)
    add_options(parser)
    options = parser.parse_args()
    if (options.gather is None) == (not options.folders):
        parser.error("give folders of runs, or --gather with the folder of their scores")
    if options.gather is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        gather(options.gather, options.out)
    elif measure_missing(options):
        sys.exit(1)


if __name__ == "__main__":
    main()
