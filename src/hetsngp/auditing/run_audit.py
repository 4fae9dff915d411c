"""``hetsngp audit``: an audit of images or texts, by a frozen network or by folds of a recipe; choices."""

from __future__ import annotations

import difflib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetsngp.auditing.audit import (
    PAGE,
    AuditedData,
    RoundLog,
    check_choices,
    check_packages,
    check_same_data,
    is_complete,
    read_audit,
    summary,
    write_audit,
)
from hetsngp.auditing.choices import read_choices, write_corrected
from hetsngp.auditing.examples import ImageExamples
from hetsngp.auditing.recipe_folds import RecipeFolds
from hetsngp.auditing.text_audit import audited_texts, network_of_texts
from hetsngp.choices import MethodName
from hetsngp.conversion.conversion import convert
from hetsngp.data.datasets.registry import DATASETS
from hetsngp.data.fingerprint import fingerprint_data
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.copies import first_copies
from hetsngp.data.images.files import ImageFiles
from hetsngp.data.label_files import OneLabel, class_folder, example_names, read_lines
from hetsngp.data.sources import HELD_OUT, open_set
from hetsngp.data.text.sources import is_text_source
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.files import remove_leftovers, sha256_of
from hetsngp.fitting.progress import at_a_terminal
from hetsngp.frozen.features import FeatureSet
from hetsngp.frozen.head import FROZEN_NORMALIZATION
from hetsngp.frozen.label_noise import correct_labels
from hetsngp.labels import Correction, correct_in_rounds
from hetsngp.labels.rounds import most_rounds
from hetsngp.locking import one_writer
from hetsngp.pretrained.image_features import image_features, keys_with_progress
from hetsngp.pretrained.image_networks import DEFAULT as DEFAULT_NETWORK
from hetsngp.pretrained.image_networks import PretrainedNetwork, pretrained_network
from hetsngp.pretrained.text_features import text_features
from hetsngp.pretrained.text_networks import PACKAGED
from hetsngp.serving.bundle import find_device
from hetsngp.training.engine import Engine
from hetsngp.training.finished_runs import MODEL, SUMMARY, recipe_of_run
from hetsngp.training.frozen_run import FEATURES, cache_folder
from hetsngp.training.recipes.recipe import Recipe, read_recipe, recipe_names
from hetsngp.training.recipes.task import ImageTask, Task, TextTask
from hetsngp.validation import check_positive, check_seed

FOLDS = 5
"""Folds of a recipe."""
FOLD_RUNS = "folds"
"""Folder of an audit with the runs that an interrupted one goes on from; beside ``FEATURES``."""
DEFAULT, RUNS = Path("audits"), Path("runs")
SET_BY_AUDIT = ("labels", "fold")
"""Keys of a recipe that an audit sets by itself."""
FEW_IMAGES = 2000
"""Images of each class below which a pretrained network is proposed."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class AuditSettings:
    """How an audit is made."""

    rounds: int = 3
    """Largest number of rounds of correction; 1: wrong labels are found, and not corrected to find more."""
    folds: int | None = None
    """None: leave-one-out on frozen features, where it is possible, and 5 for a recipe."""
    seed: int = 0
    """Seed of heads, folds on frozen features, and validation examples; a recipe has its own key."""
    most: int = 5000
    """Largest number of examples on the page."""
    page: bool = True
    """Whether to write the page."""
    network: str | None = None
    """Frozen network, as of :func:`~hetsngp.pretrained.image_networks.pretrained_network`."""
    weights: Path | None = None
    """Its weights."""
    size: int | None = None
    """Side of its input in pixels."""
    device: str = "auto"
    """Device of the frozen network and of its head."""
    batch_size: int = 64
    """Images of a batch."""

    def __post_init__(self) -> None:
        for name in ("rounds", "most", "batch_size"):
            check_positive(name, getattr(self, name), integer=True)
        check_seed(self.seed)
        if self.folds is not None and check_positive("folds", self.folds, integer=True) < 2:
            raise ValueError("folds must be at least 2: each image is predicted by the models of the others")

    def describe(self) -> dict[str, Any]:
        """Settings that decide the result, for JSON."""
        names = ("rounds", "folds", "seed", "most", "page", "network", "size")
        found = {name: getattr(self, name) for name in names}
        return {**found, "weights": None if self.weights is None else sha256_of(self.weights)}


@dataclass(frozen=True)
class AuditSource:
    """Images or texts to audit, by the argument of the command."""

    source: str
    """As it was given."""
    data: str
    """Name, folder or file of the examples."""
    recipe: Recipe | None = None
    run: Path | None = None
    """Folder of the finished run that the recipe is of."""

    @staticmethod
    def find(source: str, changes: Sequence[str] = (), *, recipe: bool = False) -> AuditSource:
        """Data set, folder, .npz file, recipe, or finished run. Where data and a recipe are meant it is data,
        unless ``recipe``.
        """
        if (Path(source) / SUMMARY).is_file() and (Path(source) / MODEL).is_dir():
            return AuditSource._of_run(source, changes)
        is_name = source.partition(":")[0] in DATASETS
        is_data = is_name or (Path(source).expanduser().exists() and not source.endswith(".toml"))
        if recipe or source.endswith(".toml") or (source in recipe_names() and not is_data):
            found = read_recipe(source, changes)
            return AuditSource(source, found.task.data, found)
        if not is_data:
            close = difflib.get_close_matches(source, [*DATASETS, *recipe_names(), *_beside(source)], n=1)
            raise ValueError(
                f"there is no data set, folder, .npz file or recipe {source!r}: "
                + (f"did you mean {close[0]!r}? " if close else "")
                + "`hetsngp data` and `hetsngp recipes` list names"
            )
        if changes:
            more = f", or audit the recipe {source}, --recipe" if source in recipe_names() else ""
            raise ValueError(f"--set changes a recipe, and {source} is data: leave out --set{more}")
        is_data_file = Path(source).suffix == ".npz" or is_text_source(source)
        if not is_name and Path(source).is_file() and not is_data_file:
            raise ValueError(
                f"{source} is a file: give the folder that has one folder for each class, a .npz file, a "
                "file of texts (.csv, .jsonl, .parquet), or a recipe in TOML"
            )
        return AuditSource(source, source)

    @staticmethod
    def _of_run(source: str, changes: Sequence[str]) -> AuditSource:
        if changes:
            raise ValueError(f"--set changes a recipe, and {source} is a finished run: leave out --set")
        found = recipe_of_run(Path(source))
        task = replace(found.task, labels=None, fold=None)
        kept = [each for each in found.changes if each.partition("=")[0].strip() not in SET_BY_AUDIT]
        return AuditSource(source, task.data, replace(found, task=task, changes=tuple(kept)), Path(source))

    @property
    def note(self) -> str | None:
        """Line that says what else the argument might mean."""
        if self.run is not None:
            what = "texts" if self.is_text else "images"
            return f"{self.source} is a finished run: its training {what} are audited, by their given labels"
        if self.recipe is not None or self.source not in recipe_names():
            return None
        return f"{self.source} is a recipe too: --recipe trains its network in folds instead"

    @property
    def cache(self) -> Path:
        """Folder with the features that trainings by the recipe share."""
        assert self.recipe is not None
        return cache_folder(self.recipe.task, RUNS / "run" if self.run is None else self.run)

    @property
    def folder(self) -> Path:
        """Folder of the audit where none is given."""
        if self.run is not None:
            return DEFAULT / self.run.resolve().name
        if self.recipe is not None:
            return DEFAULT / self.recipe.name.replace("/", "-")
        if self.source.partition(":")[0] in DATASETS:
            return DEFAULT / self.source.replace(":", "-")
        path = Path(self.source).expanduser().resolve()
        return DEFAULT / (path.name.partition(".")[0] if path.is_file() else path.name)

    @property
    def is_text(self) -> bool:
        """Whether texts are audited."""
        return is_text_source(self.data) if self.recipe is None else isinstance(self.recipe.task, TextTask)

    def open(self) -> tuple[OneLabel, AuditedData]:
        """Training images or texts, which are audited."""
        if self.is_text:
            task = None if self.recipe is None else self.recipe.task
            columns = (task.text_column, task.label_column) if isinstance(task, TextTask) else ()
            return audited_texts(self.data, *columns)
        images = open_set(self.data, "train")
        if not isinstance(images, ImageArrays | ImageFiles):
            raise ValueError(
                f"the images of {self.data} are {type(images).__name__}, and an audit is for images with one "
                "label each: give a folder with one folder for each class, or another data set"
            )
        data = AuditedData(
            self.data,
            images.labels.cpu().numpy(),
            images.class_names,
            example_names(images),
            "path" if isinstance(images, ImageFiles) else "index",
            ImageExamples(images),
            fingerprint_data(images),
        )
        return images, data

    def command(self, folder: Path) -> str:
        """Command that applies choices, quoted for a shell."""
        words = ["hetsngp", "audit", self.source]
        if self.run is None:  # a run has its changes
            words += self._changes
            words += ["--recipe"] if self.recipe is not None and self._is_also_data else []
        words += ["--apply", "choices.csv"]
        return shlex.join([*words, "--out", str(folder)])

    def train_command(self, folder: Path, content: Mapping[str, Any]) -> str:
        """Command that trains on the labels in ``folder``, quoted for a shell; ``content`` of audit.json."""
        name = folder.resolve().name
        if self.recipe is not None:
            own = self.recipe.name if self.recipe.name in recipe_names() else f"{self.recipe.name}.toml"
            words = ["hetsngp", "train", self.source if self.run is None else own, *self._changes]
        elif self.is_text or content["examples"] < FEW_IMAGES * len(content["classes"]):
            recipe, usual = ("text", PACKAGED) if self.is_text else ("frozen", DEFAULT_NETWORK)
            words = ["hetsngp", "train", recipe, "--set", f"data={_path_value(self.data)}"]
            settings = content.get("settings", {})
            if settings.get("weights") is None and settings.get("size") is None and "network" in content:
                # The features of the audit are those of the training.
                network = content["network"]
                words += [] if network == usual else ["--set", f"network={network}"]
                words += ["--set", f"features={_path_value(str(folder / FEATURES))}"]
        else:
            words = ["hetsngp", "train", "images", "--set", f"data={_path_value(self.data)}"]
            words += [] if content["key"] == "path" else ["--set", "size=none"]
        labels = f"labels={_path_value(str(folder))}"
        return shlex.join([*words, "--set", labels, "--out", f"runs/{name}-corrected"])

    @property
    def _changes(self) -> list[str]:
        changes = () if self.recipe is None else self.recipe.changes
        if self.run is not None:  # which may have been trained from another working directory
            now = f"data={_path_value(self.data)}"
            changes = tuple(now if change.startswith("data=") else change for change in changes)
        return [word for change in changes for word in ("--set", change)]

    @property
    def _is_also_data(self) -> bool:
        return self.source.partition(":")[0] in DATASETS or Path(self.source).is_dir()


def run_audit(
    source: AuditSource, folder: Path, settings: AuditSettings, *, say: Say = print, show: bool | None = None
) -> dict[str, Any]:
    """Audit images or texts and write everything into ``folder``; returns the content of ``audit.json``.

    The same call resumes an interrupted audit, and returns the result of a finished one. ``say`` gets lines
    to print; ``show``: whether to show progress, None: at a terminal.
    """
    check_packages(page=settings.page)
    if source.note is not None:
        say(source.note)
    if source.recipe is not None:
        _check_recipe(source.recipe, source.source, settings)
    images, data = source.open()
    _check_folder(images, folder)
    if (settings.folds or 2) > len(images):
        what = "texts" if source.is_text else "images"
        raise ValueError(f"{len(images)} {what} cannot be divided into {settings.folds} folds: choose fewer")
    about: dict[str, Any] = {"data": source.data, "settings": settings.describe()}
    if source.recipe is not None:
        about["recipe"] = source.recipe.describe()
    with one_writer(folder):
        remove_leftovers(folder)
        before = read_audit(folder)
        if before is not None:
            check_same_data(folder, before, data)
            if before.get("recipe") == about.get("recipe") and is_complete(folder, before, about):
                say("the audit is finished, and nothing has changed since")
                return before
        else:
            check_choices(folder, data)
        if not settings.page and (folder / PAGE).is_file():
            say(f"{PAGE}, of an earlier audit, will be removed")
        keys = keys_with_progress(images, at_a_terminal() if show is None else show)
        data = replace(data, copies=first_copies(keys))
        log = RoundLog(say)
        if source.recipe is None or source.recipe.task.frozen:
            found, how = _by_network(source, images, keys, folder, settings, log, say, show)
        else:
            found, how = _by_recipe(
                source, source.recipe, images, keys, data, folder, settings, log, say, show
            )
        notes = [f"How: {how['how']}; round {found.round} of {len(found.losses)} is used."]
        notes.append(f"To apply the choices: {source.command(folder)}")
        shown: dict[str, Any] = {"notes": notes, "most": settings.most, "page": settings.page}
        return write_audit(folder, data, found, {**about, **how, "rounds": log.rounds}, **shown)


def _beside(path: str) -> list[str]:
    """Folders beside where ``path`` would be, as the user would write them."""
    parent = Path(path).expanduser().parent
    folders = [each.name for each in parent.iterdir() if each.is_dir()] if parent.is_dir() else []
    return [str(Path(path).parent / name) for name in folders]


def _check_folder(images: OneLabel, folder: Path) -> None:
    """Raise where the files of the audit would lie among the images, as images of a class."""
    if isinstance(images, ImageFiles):
        data, out = class_folder(images).resolve(), folder.resolve()
        others = [data.parent / name for name in HELD_OUT] if data.name == "train" else []
        if any(out.is_relative_to(each) for each in (data, *others)):
            other = shlex.quote(str(data.parent / f"{data.name}-audit"))
            raise ValueError(
                f"the audit would write into the data, {out}, and its pictures would become examples: give "
                f"another folder, such as --out {other}"
            )


def _check_recipe(recipe: Recipe, source: str, settings: AuditSettings) -> None:
    for name in ("network", "weights", "size"):
        if getattr(settings, name) is not None:
            raise ValueError(
                f"--{name} is for a frozen network, and the recipe or run {source} has its own: leave it out"
            )
    if settings.device != "auto" and not recipe.task.frozen:
        raise ValueError("--device is for a frozen network: of a recipe --set hardware.accelerator=cpu")
    for name in SET_BY_AUDIT:
        if getattr(recipe.task, name) is not None:
            raise ValueError(f"{name} is set by the audit: leave it out of the recipe, --set {name}=none")
    devices, nodes = recipe.hardware.started()
    if nodes > 1 or devices not in (1, "auto"):
        raise ValueError("an audit trains on one device: start one process, with --set hardware.devices=1")


def _by_network(
    source: AuditSource,
    images: OneLabel,
    keys: Sequence[bytes],
    folder: Path,
    settings: AuditSettings,
    log: RoundLog,
    say: Say,
    show: bool | None,
    method: MethodName = "sngp",
) -> tuple[Correction, dict[str, Any]]:
    """Correction on features of a frozen network, and how it was made.

    Where no recipe says another ``method`` it is SNGP, which takes a third of the time of HetSNGP and ranks
    wrong labels as well (experiments/label_noise).
    """
    began = time.perf_counter()
    device, cache = find_device(settings.device), folder / FEATURES
    visible, options = at_a_terminal() if show is None else show, dict[str, Any]()
    task = None if source.recipe is None else source.recipe.task
    if source.recipe is not None:
        method, options = source.recipe.task.method, dict(source.recipe.task.options)
        cache = source.cache
    batch_size = settings.batch_size if task is None else task.batch_size
    how_run: Any = {"keys": keys, "batch_size": batch_size, "show": visible}
    if isinstance(images, LabelledTexts):
        encoder = network_of_texts(settings, task, device)
        say(f"features of {len(images)} texts by {encoder.name}")
        h = text_features(images, encoder, cache, **how_run)
        called, kind = encoder.name, "attention"
        noted: dict[str, Any] = {"network": encoder.name, "max_length": encoder.tokenizer.max_length}
    else:
        network = network_of_images(settings, task, device)
        say(f"features of {len(images)} images by {network.name} at {network.size} pixels")
        h = image_features(images, network, cache, **how_run)
        called, kind = f"{network.name}, {network.size} pixels", network.kind
        noted = {"network": network.name, "size": network.size}
    spent = time.perf_counter() - began
    say("label errors of the features" if settings.rounds == 1 else "rounds of correction on the features")
    log.begin()
    readout = nn.Linear(h.shape[1], images.num_classes)
    options = {"normalization": FROZEN_NORMALIZATION.get(kind, "direction"), **options}
    model = convert(readout, method, h[:2], freeze=True, normalization=options["normalization"])
    features = FeatureSet(h, images.labels.cpu())
    common: Any = {"folds": settings.folds, "seed": settings.seed, "on_round": log}
    common["progress"] = visible and at_a_terminal()  # elsewhere it is a line for each of many iterations
    found = correct_labels(model.to(device), features, rounds=settings.rounds, **common, **options)
    how = f"{method} on frozen features of {called}, {found.how}"
    about = {"method": method, **noted, "amplitude": found.amplitude}
    return found, {"how": how, **about, "seconds": {"features": round(spent, 1)}}


def network_of_images(settings: AuditSettings, task: Task | None, device: torch.device) -> PretrainedNetwork:
    """Frozen network of an audit, or of a recipe, on ``device``."""
    if task is None:
        name, size, resize = settings.network, settings.size, None
    else:
        assert isinstance(task, ImageTask)
        name, size, resize = task.network, task.size, task.resize
    return pretrained_network(name, weights=settings.weights, size=size, resize=resize, device=device)


def _by_recipe(
    source: AuditSource,
    recipe: Recipe,
    images: OneLabel,
    keys: Sequence[bytes],
    data: AuditedData,
    folder: Path,
    settings: AuditSettings,
    log: RoundLog,
    say: Say,
    show: bool | None,
) -> tuple[Correction, dict[str, Any]]:
    """Correction by the folds of a recipe, and how it was made."""
    chosen, note = replace(recipe, hardware=replace(recipe.hardware, devices=1)).on_this_machine()
    if note:
        say(note)
    if chosen.task.head_first:  # features of the pretrained network, for the runs of all folds and rounds
        chosen = replace(chosen, task=replace(chosen.task, features=str(source.cache)))
    folds, rounds = settings.folds or FOLDS, most_rounds(len(images), settings.rounds)
    say(
        f"{folds} trainings for each round, at most {folds * rounds} for {rounds} "
        f"{'round' if rounds == 1 else 'rounds'}; finished ones are not repeated"
    )
    cross_fit = RecipeFolds(
        chosen,
        images,
        data.names,
        folder / FOLD_RUNS,
        Engine(chosen.hardware),
        folds=folds,
        keys=keys,
        batch_size=settings.batch_size,
        show=show,
        say=say,
    )
    log.begin()
    found = correct_in_rounds(data.given, cross_fit, rounds=settings.rounds, seed=settings.seed, on_round=log)
    how = f"recipe {recipe.name} ({recipe.task.method}, {recipe.task.network}) in {folds} folds"
    return found, {"how": how, "method": recipe.task.method, "network": recipe.task.network, "seconds": {}}


def _path_value(path: str) -> str:
    """Path as a value of ``--set``, where "none" means that a key is not set."""
    return f"./{path}" if path == "none" else path


def report(source: AuditSource, folder: Path, content: Mapping[str, Any]) -> str:
    """Result of an audit, and the next commands."""
    lines = [summary(folder, content)]
    if (folder / PAGE).is_file():
        lines.append(f"next: open {folder / PAGE} in a browser, decide, and download choices.csv; then")
        lines.append(f"  {source.command(folder)}")
    else:
        lines.append("next:")
    lines.append(f"  {source.train_command(folder, content)}")
    return "\n".join(lines)


def apply_choices(source: AuditSource, folder: Path, choices: Path) -> str:
    """Write ``corrected_labels.csv`` of the finished audit in ``folder``; returns what was done, to print."""
    before = read_audit(folder)
    if before is None:
        raise FileNotFoundError(
            f"{folder} has no finished audit: make one first, "
            + shlex.join(["hetsngp", "audit", source.source, "--out", str(folder)])
            + ", or give the folder that has one, --out FOLDER"
        )
    _, data = source.open()
    check_same_data(folder, before, data, applying=True)
    found = read_choices(choices, folder, class_names=data.class_names)
    dropped = sum(choice.new_label is None for choice in found.values())
    kept = sum(choice.new_label == choice.given_label for choice in found.values())
    file = write_corrected(folder, found)
    in_all = sum(line.is_choice for line in read_lines(file))
    none = ": it has a heading alone, and takes nothing back" if not found else ""
    return (
        f"{len(found)} choices in {choices}{none}: {kept} kept, {len(found) - kept - dropped} changed, "
        f"{dropped} dropped\n"
        f"{file} has {in_all} choices now; the data are unchanged\n"
        f"next:\n  {source.train_command(folder, before)}"
    )
