"""Measurements of images.py: written to files, resumed from them, and averaged over seeds."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

POSTERIORS = ("kronecker", "exact", "shared", "none")
SCORES = ("total_uncertainty", "model_uncertainty", "latent_variance", "ood_score")
MEASURES = ("accuracy", "nll", "ece", "held_out_nll", "temperature", "scale", "points")


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """ECE: Σ |Σ (correct − confidence)| / N over equal-width bins of confidence."""
    index = (confidence * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, device=confidence.device).index_add_(0, index, correct.float() - confidence)
    return float(gap.abs().sum() / len(confidence))


def auroc(in_distribution: Tensor, ood: Tensor) -> float | None:
    """P(an OOD image scores higher); None where the score is the same for all."""
    score = torch.cat([in_distribution, ood]).double().cpu().numpy()
    label = np.repeat([0, 1], [len(in_distribution), len(ood)])
    return None if score.min() == score.max() else float(roc_auc_score(label, score))


def source_digest(folder: Path) -> str:
    """Twelve hex digits of the library's source: results of different code must not be averaged unseen."""
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def write(path: Path, value: Any) -> None:
    """Atomically: a killed process leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(value if isinstance(value, str) else json.dumps(value, indent=1))
    part.replace(path)


def finished(out: Path, results: Path, settings: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Runs of these settings in OUT/runs and in the results file, by (configuration, seed)."""
    runs = json.loads(results.read_text()) if results.exists() else []
    runs += [json.loads(path.read_text()) for path in sorted((out / "runs").glob("*.json"))]
    return {(run["config"], run["seed"]): run for run in runs if run["settings"] == settings}


def summarize(runs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Mean and standard error over seeds of each (configuration, posterior): rows, and a Markdown table."""
    names = [*MEASURES, *(f"{where}_{score}" for where in ("near", "far") for score in SCORES)]
    header = ["config", "posterior", "seeds", *names, "train_seconds"]
    rows, lines = [], ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    configs = dict.fromkeys(r["config"] for r in runs)  # in order, once each
    for config, kind in [(c, k) for c in configs for k in POSTERIORS]:
        chosen = [r for r in runs if r["config"] == config and kind in r["posteriors"]]
        if not chosen:
            continue
        row: dict[str, Any] = {"config": config, "posterior": kind, "seeds": [r["seed"] for r in chosen]}
        columns = {name: [r["posteriors"][kind][name] for r in chosen] for name in names}
        columns["train_seconds"] = [r["train_seconds"] for r in chosen]
        for name, values in columns.items():
            known = [v for v in values if v is not None]
            error = float(np.std(known, ddof=1) / math.sqrt(len(known))) if len(known) > 1 else None
            row[name] = {"mean": float(np.mean(known)) if known else None, "standard_error": error}
        rows.append(row)
        cells = [config, kind, str(len(chosen)), *(_cell(row[name]) for name in columns)]
        lines.append("| " + " | ".join(cells) + " |")
    libraries = sorted({r["library"] for r in runs})
    return rows, "\n".join(lines) + f"\n\nlibrary source: {', '.join(libraries)}\n"


def _cell(value: dict[str, float | None]) -> str:
    if value["mean"] is None:
        return "–"
    error = value["standard_error"]
    return f"{value['mean']:.4g}" if error is None else f"{value['mean']:.4g} ± {error:.1g}"


def save(results: Path, runs: Iterable[dict[str, Any]]) -> str:
    """Write all runs to ``results``, the summary beside it, and return the table."""
    runs = list(runs)
    rows, table = summarize(runs)
    write(results, runs)
    write(results.parent / "summary.json", rows)
    write(results.parent / "summary.md", table)
    return table
