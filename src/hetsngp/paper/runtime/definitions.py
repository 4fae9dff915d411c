"""Rows and columns of both runtime tables, with the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetsngp.paper.definitions import PAPER

BASELINE = "deterministic"


@dataclass(frozen=True)
class RuntimeRow:
    """Row of a table: a recipe and changes to it."""

    title: str
    method: str
    changes: tuple[str, ...] = ()
    ours: bool = False
    """Whether the paper has no such row."""


@dataclass(frozen=True)
class RuntimeNetwork:
    """Table: a network, its rows, and the kinds of measurements ("train" and "eval")."""

    title: str
    recipes: str
    """Folder of the recipes."""
    paper: str
    """Name of the table in ``paper.json``."""
    num_classes: int
    batch: int
    """Batch size on a GPU."""
    kinds: tuple[str, ...]
    counted: bool
    """Whether operations are counted too."""
    rows: Mapping[str, RuntimeRow]

    def printed(self, row: str) -> dict[str, float]:
        """Numbers of the paper for a row, and their ratios to its deterministic row; none for a row of ours.

        >>> NETWORKS["resnet50"].printed("sngp")
        {'ms_eval': 0.047, 'ms_eval_ratio': 1.175}
        """
        table = PAPER[self.paper]
        out = {}
        for column, (value, _) in table.get(row, {}).items():
            out[column] = value
            out[f"{column}_ratio"] = value / table[BASELINE][column][0]
        return out


def _sampled(samples: int) -> tuple[str, ...]:
    return ("options.sampler=mc", f"options.num_samples={samples}")


DEFAULT_POINTS = ("options.sampler=sobol", "options.num_samples=none")
NETWORKS = {
    "resnet50": RuntimeNetwork(
        "ResNet-50 on ImageNet",
        "imagenet",
        "runtime-resnet50",
        num_classes=1000,
        batch=256,
        kinds=("eval",),
        counted=False,
        rows={
            "deterministic": RuntimeRow("Deterministic", BASELINE),
            "sngp": RuntimeRow("SNGP", "sngp"),
            "mimo": RuntimeRow("MIMO", "mimo"),
            "heteroscedastic": RuntimeRow("Het. (5000 MC samples)", "heteroscedastic", _sampled(5000)),
            "hetsngp": RuntimeRow("HetSNGP (100 MC samples)", "hetsngp", _sampled(100)),
            "heteroscedastic-default": RuntimeRow(
                "Het. (ours, default points)", "heteroscedastic", DEFAULT_POINTS, ours=True
            ),
            "hetsngp-default": RuntimeRow(
                "HetSNGP (ours, default points)", "hetsngp", DEFAULT_POINTS, ours=True
            ),
        },
    ),
    "vit": RuntimeNetwork(
        "ViT-B/16 on ImageNet-21k",
        "imagenet21k",
        "runtime-vit",
        num_classes=21_843,
        batch=128,
        kinds=("train", "eval"),
        counted=True,
        rows={
            "deterministic": RuntimeRow("Det", BASELINE),
            "sngp": RuntimeRow("SNGP", "sngp"),
            "heteroscedastic": RuntimeRow("Het", "heteroscedastic"),
            "hetsngp": RuntimeRow("HetSNGP", "hetsngp"),
        },
    ),
}
"""Rows of the paper, and below them ours."""
