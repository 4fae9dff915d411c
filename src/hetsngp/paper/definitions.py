"""Tables of the paper: rows and their recipes, columns and the sets that they are measured on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetsngp._moved import renamed
from hetsngp.validation import check_choice

_CONTENT: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
SOURCE: str = _CONTENT.pop("source")
PAPER: dict[str, dict[str, dict[str, tuple[float, float | None]]]] = {
    part: {row: {name: (mean, error) for name, (mean, error) in cells.items()} for row, cells in rows.items()}
    for part, rows in _CONTENT.items()
}
"""Part of a table → row → column → mean and standard error over runs; None where the paper has none."""


def printed(part: str, row: str, column: str) -> tuple[float, float | None] | None:
    """Mean and standard error, or None where the paper has no such number.

    >>> printed("imagenet", "hetsngp", "imc_acc")
    (0.428, 0.001)
    """
    return PAPER.get(part, {}).get(row, {}).get(column)


METRICS = {"accuracy": 1, "precision_at_1": 1, "auroc": 1, "nll": -1, "ece": -1, "fpr95_at_id_recall": -1}
"""1 where higher is better, else −1. ``fpr95_at_id_recall`` is the paper's FPR95; tables of release 0.1 have
``fpr95``, with OOD as positive.
"""
FAR = "far"
"""Stands for the set that the caller chooses."""

NO_MATTER = ("hardware.", "workers")
"""Prefixes of keys of a recipe that do not decide a result: a run may continue with other values."""


@dataclass(frozen=True)
class PaperColumn:
    """Column of a table."""

    name: str
    """Name in ``paper.json``."""
    title: str
    """Heading in the paper."""
    metric: str
    """Name in :data:`METRICS`."""
    data: str
    """Set that it is measured on: a name in the registry, or :data:`FAR`."""

    @property
    def sign(self) -> int:
        """1 where higher is better, else −1."""
        return METRICS[self.metric]


@dataclass(frozen=True)
class PaperRow:
    """Row of a table: a recipe, trained once for each seed."""

    name: str
    """Name in ``paper.json``."""
    title: str
    recipe: str
    """Name of the recipe."""
    changes: tuple[str, ...] = ()
    """Changes of the recipe, as "key=value"."""
    members: int = 1
    """Members of an ensemble, each trained with another seed."""
    drops_equal_changes: bool = False
    """Whether changes to values that the recipe has already are left out, so that a row of default values is
    a run of another table."""


@dataclass(frozen=True)
class PaperPart:
    """One printed table; the ablations are four."""

    name: str
    """Name in ``paper.json``."""
    title: str
    columns: tuple[PaperColumn, ...]
    rows: tuple[PaperRow, ...]
    axis: str | None = None
    """Quantity that the rows are values of, where they are numbers."""

    @property
    def baseline(self) -> PaperRow | None:
        """Row that the others are compared with: the deterministic network, where it is among them."""
        return next((row for row in self.rows if row.name == "deterministic"), None)


@dataclass(frozen=True)
class PaperTable:
    """Tables that one command reproduces."""

    name: str
    title: str
    seeds: int
    """Number of runs in the paper, or by default where the paper has no such table."""
    parts: tuple[PaperPart, ...]
    notes: tuple[str, ...] = ()

    @property
    def in_paper(self) -> bool:
        """Whether the paper has numbers of this table."""
        return any(part.name in PAPER for part in self.parts)

    @property
    def choices(self) -> tuple[str, ...]:
        """Names that :meth:`only` takes: rows, or parts where there are several."""
        return tuple(r.name for r in self.parts[0].rows) if len(self.parts) == 1 else tuple(self._short)

    @property
    def _short(self) -> dict[str, PaperPart]:
        return {part.name.removeprefix(f"{self.name}-"): part for part in self.parts}

    def only(self, names: Sequence[str] | None) -> PaperTable:
        """Table with the rows (of the ablations: the parts) of these names; all for None.

        >>> [row.title for row in TABLES["imagenet"].only(["sngp", "hetsngp"]).parts[0].rows]
        ['SNGP', 'HetSNGP']
        """
        if names is None:
            return self
        if not names:
            raise ValueError(f"name at least one of {', '.join(self.choices)}")
        for name in names:
            check_choice(f"row of {self.name}", name, self.choices)
        if len(self.parts) > 1:
            return replace(self, parts=tuple(part for name, part in self._short.items() if name in names))
        part = self.parts[0]
        return replace(self, parts=(replace(part, rows=tuple(r for r in part.rows if r.name in names)),))


TITLES = {
    "deterministic": "Det.",
    "posterior_network": "Post.Net.",
    "heteroscedastic": "Het.",
    "sngp": "SNGP",
    "hetsngp": "HetSNGP",
    "mimo": "MIMO",
    "hetsngp_mimo": "HetSNGP MIMO",
}
_QUALITY = {"acc": ("Acc", "accuracy"), "nll": ("NLL", "nll"), "ece": ("ECE", "ece")}
_ALL_CLASSES = (
    "ImageNet-A and -R have 200 of the 1,000 classes. As in the paper the networks choose among all 1,000; "
    "by the benchmarks' own protocol, among the 200, accuracies are higher."
)


def _quality(data: str, name: str, title: str, kinds: Sequence[str] = tuple(_QUALITY)) -> list[PaperColumn]:
    return [
        PaperColumn(f"{name}_{kind}", f"{title} {_QUALITY[kind][0]}", _QUALITY[kind][1], data)
        for kind in kinds
    ]


def _ood(data: str, name: str, title: str) -> list[PaperColumn]:
    return [
        PaperColumn(f"{name}_auroc", f"{title}-ROC", "auroc", data),
        PaperColumn(f"{name}_fpr95", f"{title}-FPR95", "fpr95_at_id_recall", data),
    ]


def _methods(names: Iterable[str], folder: str, suffix: str = "", members: int = 1) -> tuple[PaperRow, ...]:
    """Rows of methods, each of the recipe ``folder/name``."""
    return tuple(
        PaperRow(
            name,
            (TITLES[name].rstrip(".") if suffix else TITLES[name]) + suffix,
            f"{folder}/{name}",
            (),
            members,
        )
        for name in names
    )


_BASE: Mapping[str, Any] = {
    "calibrate": "false",
    "options.num_samples": 1000,
    "options.sampler": "mc",
    "options.rank": 15,
    "options.temperature": 1.25,
    "options.sample_beta": "false",
}
"""Settings that the ablations vary one by one. Every row sets all of them, so that equal rows are one run."""
_CIFAR100_BASE: Mapping[str, Any] = {
    "options.rank": 6,
    "options.temperature": 1,
    "options.sample_beta": "false",
}
"""Settings that the ablations on CIFAR-100 vary one by one; those of the recipe cifar100."""
_TRAINING = {"map": ("MAP", "false"), "mc_sampling": ("MC sampling", "true")}
_CIFAR100 = (
    *_quality("cifar100", "id", "ID"),
    *_quality("cifar100-c", "corr", "Corr"),
    *_ood("cifar10", "near", "Near"),
    *_ood(FAR, "far", "Far"),
)
_ROC = "ROC is the area under the curve of ood_score, with OOD images as positive"
_DETECTION = (
    f"{_ROC}; FPR95 is, as the paper defines it, the share of OOD images taken for in-distribution when 95 % "
    "of the in-distribution ones are."
)
_NOT_IN_PAPER = "The paper has no such table."


def _ablation(
    name: str, title: str, axis: str | None, key: str, values: Mapping[str, tuple[str, Any]]
) -> PaperPart:
    """Make an ablation; ``values``: row → its title and the value of ``key``."""
    rows = [
        PaperRow(row, text, "imagenet/hetsngp", tuple(f"{k}={v}" for k, v in {**_BASE, key: value}.items()))
        for row, (text, value) in values.items()
    ]
    columns = [replace(c, name=c.metric[:3], title=c.title[3:]) for c in _quality("imagenet", "id", "ID")]
    return PaperPart(f"ablations-{name}", title, tuple(columns), tuple(rows), axis)


def _cifar100_ablation(
    name: str, title: str, axis: str | None, key: str, values: Mapping[str, tuple[str, Any]]
) -> PaperPart:
    """Make an ablation on CIFAR-100, of calibrated networks; ``values`` as in :func:`_ablation`."""
    rows = [
        PaperRow(
            row,
            text,
            "cifar100/hetsngp",
            tuple(f"{k}={v}" for k, v in {**_CIFAR100_BASE, key: value}.items()),
            drops_equal_changes=True,
        )
        for row, (text, value) in values.items()
    ]
    columns = [c for c in _CIFAR100 if c.name.startswith("id_") or c.metric == "auroc"]
    return PaperPart(f"cifar100-ablations-{name}", title, tuple(columns), tuple(rows), axis)


def _numbers(part: str, letter: str) -> dict[str, tuple[str, Any]]:
    return {row: (f"{letter} = {float(row):,g}", row) for row in PAPER[f"ablations-{part}"]}


def _table(
    name: str, title: str, seeds: int, columns: Sequence[PaperColumn], rows: Sequence[PaperRow], *notes: str
) -> PaperTable:
    return PaperTable(name, title, seeds, (PaperPart(name, title, tuple(columns), tuple(rows)),), notes)


TABLES: dict[str, PaperTable] = {
    table.name: table
    for table in (
        _table(
            "synthetic",
            "Synthetic tasks",
            10,
            [
                PaperColumn("circles_acc", "Circles Acc", "accuracy", "noisy_circles"),
                PaperColumn("moons_auroc", "Moons ROC", "auroc", "two_moons"),
                PaperColumn("mixture_auroc", "Mixture ROC", "auroc", "gaussian_mixture"),
            ],
            [PaperRow(name, TITLES[name], name) for name in TITLES if "mimo" not in name],
            "The paper's accuracies are on circles of its own, whose radii and noise it does not give: "
            "compare the order of the methods. Of moons and mixture it shows pictures, and no numbers.",
        ),
        _table(
            "cifar100",
            "CIFAR-100",
            10,
            _CIFAR100,
            _methods([*PAPER["cifar100"], "mimo", "hetsngp_mimo"], "cifar100"),
            f"{_DETECTION} The paper's ROC is at chance level (0.5) for all methods, and what its code calls "
            "FPR95 is 1 − FPR: these columns of the paper's are no target.",
            "The paper's table has neither ECE nor the rows MIMO and HetSNGP MIMO.",
        ),
        _table(
            "cifar100-ensembles",
            "Ensembles of 3 on CIFAR-100",
            1,
            _CIFAR100,
            _methods(PAPER["ensembles"], "cifar100", " Ensemble", members=3),
            "The members are the runs of the table cifar100 with seeds 0 to 2.",
            _DETECTION,
            _NOT_IN_PAPER,
        ),
        PaperTable(
            "cifar100-ablations",
            "Ablations of HetSNGP on CIFAR-100",
            1,
            (
                _cifar100_ablation(
                    *("rank", "Rank of the covariance", "R", "options.rank"),
                    {value: (f"R = {value}", value) for value in ("2", "6", "15")},
                ),
                _cifar100_ablation(
                    *("temperature", "Softmax temperature in training", "τ", "options.temperature"),
                    {value: (f"τ = {value}", value) for value in ("0.5", "1", "2")},
                ),
                _cifar100_ablation(
                    *("training", "MAP or MC sampling in training", None, "options.sample_beta"), _TRAINING
                ),
            ),
            (
                "R = 6, τ = 1 in training and MAP where nothing else is said; that run is in all three. The "
                "temperature of predictions is set on held-out images, as the recipe says.",
                f"{_ROC}.",
                _NOT_IN_PAPER,
            ),
        ),
        _table(
            "imagenet",
            "ImageNet",
            10,
            [
                *_quality("imagenet", "id", "ID"),
                *_quality("imagenet-c", "imc", "ImC"),
                *_quality("imagenet-a", "ima", "ImA"),
            ],
            _methods(PAPER["imagenet"], "imagenet"),
            _ALL_CLASSES,
        ),
        _table(
            "imagenet-r-v2",
            "ImageNet-R and ImageNet-V2",
            10,
            [*_quality("imagenet-r", "imr", "ImR"), *_quality("imagenet-v2", "imv2", "ImV2")],
            _methods(PAPER["imagenet-r-v2"], "imagenet"),
            _ALL_CLASSES,
        ),
        _table(
            "imagenet21k",
            "ImageNet-21k",
            5,
            [
                PaperColumn("id_prec_at_1", "ID prec@1", "precision_at_1", "imagenet21k"),
                *_quality("imagenet", "im", "Im", ("acc",)),
                *_quality("imagenet-c", "imc", "ImC", ("acc",)),
                *_quality("imagenet-a", "ima", "ImA", ("acc",)),
                *_quality("imagenet-r", "imr", "ImR", ("acc",)),
                *_quality("imagenet-v2", "imv2", "ImV2", ("acc",)),
            ],
            _methods(PAPER["imagenet21k"], "imagenet21k"),
            "On the sets of ImageNet the networks choose among its 1,000 classes; n04399382 is not among the "
            "21,843, and has probability zero, as in the paper.",
        ),
        _table(
            "ensembles",
            "Ensembles of 4 on ImageNet",
            1,
            [*_quality("imagenet", "id", "ID"), *_quality("imagenet-c", "imc", "ImC")],
            _methods(PAPER["ensembles"], "imagenet", " Ensemble", members=4),
            "The members are the runs of the table imagenet with seeds 0 to 3; a second ensemble has 4 to 7.",
        ),
        PaperTable("runtime", "Runtimes", 1, ()),
        PaperTable(
            "ablations",
            "Ablations of HetSNGP on ImageNet",
            1,
            (
                _ablation(
                    *("samples", "Number of MC samples", "S", "options.num_samples"), _numbers("samples", "S")
                ),
                _ablation(*("rank", "Rank of the covariance", "R", "options.rank"), _numbers("rank", "R")),
                _ablation(
                    *("temperature", "Softmax temperature", "τ", "options.temperature"),
                    _numbers("temperature", "τ"),
                ),
                _ablation(
                    *("training", "MAP or MC sampling in training", None, "options.sample_beta"), _TRAINING
                ),
            ),
            (
                "S = 1,000 plain Monte Carlo draws, R = 15, τ = 1.25 and MAP where nothing else is said; "
                "that run is in all four. Nothing is calibrated on held-out images, which would set another "
                "τ.",
            ),
        ),
    )
}
"""Tables by the name that the command line takes."""


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
