"""The files of a finished run: its summary, checked, and its logs, written again where they are damaged."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetsngp.evaluation.figures import draw_curves
from hetsngp.files import CHECKSUM, has_checksum, sha256_of, with_checksum, write_text
from hetsngp.io.storage import CONFIG, ArtifactError
from hetsngp.serving.bundle import open_run
from hetsngp.training.checkpointing.checkpoint import CHECKPOINT, PREVIOUS, read_rows
from hetsngp.training.checkpointing.checkpoint_files import has_state
from hetsngp.training.logs import METRICS, write_csv
from hetsngp.training.recipes.keys import current_description
from hetsngp.training.recipes.recipe import Recipe, described_recipe, read_recipe, recipe_names

SUMMARY, MODEL, CURVES = "summary.json", "model", "curves.png"
LOGS = (METRICS, CURVES)
SUMMARY_KEYS = {"recipe", "seconds", "posterior", "held_out", "test", "no_test", "thresholds"}
"""Keys of a complete summary."""


def finished(folder: Path) -> dict[str, Any] | None:
    """Summary of a finished run; None: it is not finished, or its summary or model is damaged or missing.

    The model is loaded for this check.
    """
    try:
        return check_finished(Path(folder))
    except (OSError, ValueError):
        return None


def check_finished(folder: Path) -> dict[str, Any] | None:
    """Summary of a finished run; None without one. Raises where a file of the model is missing or damaged."""
    file = folder / SUMMARY
    if not file.exists():
        return None
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{file} is not a JSON file: {error}") from error
    if not isinstance(summary, dict) or not summary.keys() >= SUMMARY_KEYS:
        raise ArtifactError(f"{file} is damaged: it is not the summary of a run")
    # Release 0.1, which called the configuration "plan", wrote no checksum.
    by_0_1 = isinstance(summary["recipe"], dict) and "plan" in summary["recipe"]
    if not has_checksum(summary) and not (by_0_1 and CHECKSUM not in summary):
        raise ArtifactError(f"{file} is damaged: its checksum is not that of its content")
    open_run(folder / MODEL)
    if summary.get("weights", weights_digest(folder)) != weights_digest(folder):
        raise ValueError(
            f"{folder / MODEL} holds another model than the one that {file} describes: move it to another "
            f"folder, or remove {file}, so that the model is written again from the checkpoint"
        )
    kept = {name: value for name, value in summary.items() if name != CHECKSUM}
    return {**kept, "recipe": current_description(summary["recipe"])}


def recipe_of_run(folder: Path) -> Recipe:
    """Recipe of a finished run, with the path of its data as it is now.

    Of a recipe of the package it has the hardware, too, which a summary does not say.
    """
    summary = check_finished(folder)
    if summary is None:
        raise FileNotFoundError(f"{folder} is no finished run: it has no {SUMMARY}; finish the training")
    described, changes = summary["recipe"], tuple(summary.get("changes", ()))
    recipe = described_recipe(described, changes)
    if recipe.name in recipe_names():
        with suppress(ValueError):  # a change that this release does not know
            known = read_recipe(recipe.name, changes)
            recipe = known if known.describe() == described else recipe
    about = open_run(folder / MODEL).about
    if not Path(recipe.task.data).expanduser().exists() and "data_path" in about:
        recipe = replace(recipe, task=replace(recipe.task, data=str(about["data_path"])))
    return recipe


def inspect_run(folder: Path, *, frozen: bool = False) -> tuple[dict[str, Any] | None, str | None]:
    """Summary of a finished run, and what is wrong with it; an error where there is no checkpoint to mend it
    from, unless it is of a ``frozen`` network, whose head is fitted again.
    """
    summary, problem = None, None
    try:
        summary = check_finished(folder)
    except (ArtifactError, FileNotFoundError) as error:
        problem = str(error)
        if not frozen and not any(has_state(folder / name) for name in (CHECKPOINT, PREVIOUS)):
            raise ArtifactError(
                f"{problem}; without {CHECKPOINT}/ it cannot be written again: copy the folder from where it "
                "is complete, or train again in another folder, --out"
            ) from error
    return summary, problem


def write_summary(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Write the summary, which names the model's weights and the logs by their SHA-256, with a checksum."""
    logs = {name: sha256_of(folder / name) for name in LOGS if (folder / name).is_file()}
    content = {**json.loads(json.dumps(summary)), "files": logs}
    write_text(folder / SUMMARY, json.dumps(with_checksum(content), indent=2) + "\n")
    return content


def changed_files(folder: Path, summary: dict[str, Any]) -> list[str]:
    """Logs of a finished run that are missing, or not as they were written."""

    def is_same(name: str, digest: Any) -> bool:
        return (folder / name).is_file() and sha256_of(folder / name) == digest

    written = summary.get("files", {})  # release 0.1 has none
    return [name for name, digest in written.items() if name in LOGS and not is_same(name, digest)]


def write_logs_again(folder: Path, summary: dict[str, Any]) -> None:
    """Write metrics.csv and the curves again, from the checkpoint."""
    names = ", ".join(changed_files(folder, summary))
    try:
        rows = read_rows(folder)
    except (ArtifactError, FileNotFoundError) as error:
        warnings.warn(
            f"{names} in {folder} is damaged or missing, and so is the checkpoint: {error}", stacklevel=2
        )
        return
    warnings.warn(
        f"{names} in {folder} is damaged or missing: written again from the checkpoint", stacklevel=2
    )
    write_csv(folder / METRICS, rows)
    draw_curves(rows, summary["epoch"], folder / CURVES)
    write_summary(folder, summary)


def weights_digest(folder: Path) -> str:
    """SHA-256 of the weights of the model, from its ``config.json``."""
    return str(json.loads((folder / MODEL / CONFIG).read_text(encoding="utf-8"))["sha256"])
