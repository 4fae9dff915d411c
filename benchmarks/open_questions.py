"""Three rules of the library that were chosen by argument, each measured against its alternatives.

    HETSNGP_DATA=~/data OMP_NUM_THREADS=1 python benchmarks/open_questions.py --out benchmarks/results
    python benchmarks/open_questions.py --out benchmarks/results --table           # the tables in Markdown

A seed takes about 13 minutes of one core: fade 3, temperature 2, temperature-exact 2, ensemble 5,
ensemble-deterministic 1; and once a minute or two for the features of the images, which are kept in
out/open_questions. Finished parts (question, problem, seed) are in open_questions.json and are not repeated;
delete the file to start anew. ``--questions``, ``--problems`` and ``--seeds`` select parts.

- ``fade``: under the posterior the label noise is multiplied by a weight that follows the posterior
  contraction k. "odds" is the library's weight, k/(k + (1 − k)·max(σ², 1)); "contraction" is k; "none" is 1.
- ``temperature``: the Hessian of the Laplace posterior is taken at the calibrated τ ("calibrated", the
  library) or at the τ that the MAP estimate was trained with ("training"). ``temperature-exact`` is the same
  for the posterior of Eq. (5).
- ``ensemble``: the temperatures of four members are calibrated member by member ("members"), or are then
  multiplied by one factor that the held-out NLL of the mixture chooses ("joint", the library since this
  was measured).
  ``ensemble-deterministic`` is the same for networks without GP and label noise.

All variants of a part share the trained networks, the held-out data and the integration points; each is
calibrated anew. Every seed draws new data (or another split, and other flipped labels) and new networks.
Differences are paired by seed: mean ± standard error over seeds. The row "all" is the mean over problems, its
error that of independent problems. Test labels are noisy like the training labels, except that "accuracy" is
of the true ones where they are known. "noise rank" is Spearman's correlation of the data uncertainty with the
entropy of the true label distribution. "far model" is the mean model uncertainty far away, a share of log K.
"gap" is mean confidence − accuracy on the noisy labels: below 0 is underconfident.

Problems: the synthetic tasks with labels flipped in some classes only (near: 16 compass
directions at 1.2 times the reach of the data, far: at distance 10); digits 0 to 7 (near: 8 and 9, far:
uniform pixels), as given and with 40 % of the labels of four classes flipped; breast_cancer and wine as given
(near: columns shuffled, far: normal with standard deviation 3); and CIFAR-10 images with one human label each
(CIFAR-10N, 17 % wrong) through a frozen EfficientNet-Lite0 at 112 pixels, by ``fit_head`` ("cifar head") and
by a residual MLP trained to the end on its features ("cifar mlp"). "plain" networks are MLPs of two layers
without a spectral bound, trained to the end: they learn wrong labels by heart, and their members differ. On
images the label noise is the entropy of CIFAR-10H's votes on test images; near is CIFAR-100, far the scenes.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp import metrics
from hetsngp.data.datasets.synthetic import compass, flip_labels, make_task
from hetsngp.files import write_json
from hetsngp.fitting import train
from hetsngp.frozen.features import FeatureSet
from hetsngp.frozen.head import FROZEN_TOLERANCE
from hetsngp.models.classifier import Classifier, evaluating
from hetsngp.models.ensemble import Ensemble
from hetsngp.nn import heads
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.posteriors import POSTERIOR_TYPES
from hetsngp.posterior.calibration import TEMPERATURE_SPREAD, TOLERANCE
from hetsngp.posterior.fit import PosteriorReport
from hetsngp.types import Prediction

FROZEN = Path(__file__).parents[1] / "experiments" / "frozen" / "run.py"
PIXELS, POOL, TRAINING, HELD_OUT, TEST, VOTED, OOD = 112, 6_000, 2_000, 500, 2_000, 1_000, 600
MEMBERS = 4
BATCH = 500

Batch = tuple[Tensor, Tensor]


# --- problems ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """How the networks of a problem are trained; what is not here is a default of ``build``."""

    epochs: int = 60
    batch_size: int = 64
    lr: float = 2e-3
    width: int = 128
    depth: int = 4
    early_stopping: bool = False
    plain: bool = False
    """An MLP of two layers without isometry, skip connections or a spectral bound, as most people have."""
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE


@dataclass(frozen=True, eq=False)
class Problem:
    """Data of one seed. ``voted`` are the inputs whose label ``entropy`` is known."""

    num_classes: int
    train: Batch
    held_out: Batch
    test: Batch
    clean: Tensor
    voted: Tensor
    entropy: Tensor | None
    near: Tensor
    far: Tensor
    settings: Settings


def flip_entropy(probability: Tensor) -> Tensor:
    """Entropy of the label of each class that is flipped with ``probability`` (K,)."""
    others = len(probability) - 1
    return -(torch.xlogy(1 - probability, 1 - probability) + torch.xlogy(probability, probability / others))


def synthetic(name: str, flips: tuple[float, ...], settings: Settings, seed: int) -> Problem:
    task = make_task(name, seed)
    probability = torch.tensor(flips)
    generator = torch.Generator().manual_seed(1_000 + seed)
    parts = [
        (part.x, flip_labels(part.clean, probability, generator)) for part in (task.train, task.held_out)
    ]
    rows = torch.randperm(len(task.test), generator=generator)[:1_000]
    x, clean = task.test.x[rows], task.test.clean[rows]
    centre = task.train.x.mean(0)
    edge = 1.2 * float((task.train.x - centre).norm(dim=1).max())
    near = compass(centre, edge).repeat_interleave(40, 0)
    near = near + 0.1 * edge * torch.randn(len(near), 2, generator=generator)
    return Problem(
        task.num_classes,
        parts[0],
        parts[1],
        (x, flip_labels(clean, probability, generator)),
        clean,
        x,
        flip_entropy(probability)[clean],
        near,
        compass(centre, 10.0),
        settings,
    )


def table(name: str, flips: tuple[float, ...] | None, settings: Settings, seed: int) -> Problem:
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y).long()
    generator = torch.Generator().manual_seed(2_000 + seed)
    near = far = None
    if name == "digits":
        near = x[y > 7]
        far = 16 * torch.rand(OOD, x.shape[1], generator=generator)
        x, y = x[y < 8], y[y < 8]
    order = torch.randperm(len(x), generator=generator)
    first, second = len(x) // 2, 3 * len(x) // 4
    rows = order[:first], order[first:second], order[second:]
    mean, std = x[rows[0]].mean(0), x[rows[0]].std(0)
    scale = torch.where(std > 0, std, torch.ones_like(std))
    x = (x - mean) / scale
    if near is not None and far is not None:
        near, far = (near - mean) / scale, (far - mean) / scale
    else:
        near = torch.stack([c[torch.randperm(len(c), generator=generator)] for c in x.mT], 1)
        far = 3 * torch.randn(OOD, x.shape[1], generator=generator)
    classes = int(y.max()) + 1
    probability = torch.zeros(classes) if flips is None else torch.tensor(flips)
    noisy = flip_labels(y, probability, generator)
    train_part, held_out, test = ((x[r], noisy[r]) for r in rows)
    entropy = None if flips is None else flip_entropy(probability)[y[rows[2]]]
    return Problem(classes, train_part, held_out, test, y[rows[2]], test[0], entropy, near, far, settings)


def images(standardise: bool, settings: Settings, seed: int) -> Problem:
    found = image_features()
    pool, voted = found["pool"], found["voted"]
    human = torch.from_numpy(
        np.load(frozen_script().data_root() / "cifar10/cifar_n.npz")["c10_random_label1"]
    )
    votes = np.load(frozen_script().data_root() / "cifar10/cifar10h_counts.npz")["counts"]
    share = torch.from_numpy(votes[voted.y.numpy()]).double()
    share = share / share.sum(1, keepdim=True)
    order = torch.randperm(POOL, generator=torch.Generator().manual_seed(3_000 + seed))
    number, clean = pool.y.long(), found["labels"].y.long()
    parts = order.split([TRAINING, HELD_OUT, TEST, POOL - TRAINING - HELD_OUT - TEST])[:3]
    h, near, far, voted_h = pool.h, found["near"].h, found["far"].h, voted.h
    if standardise:
        mean, std = h[parts[0]].mean(0), h[parts[0]].std(0).clamp_min(1e-3)
        h, near, far, voted_h = ((part - mean) / std for part in (h, near, far, voted_h))
    train_part, held_out, test = ((h[rows], human[number[rows]].long()) for rows in parts)
    entropy = -torch.xlogy(share, share).sum(1).float()
    return Problem(10, train_part, held_out, test, clean[parts[2]], voted_h, entropy, near, far, settings)


@functools.cache
def frozen_script() -> Any:
    """experiments/frozen/run.py, which knows the network and the images."""
    spec = importlib.util.spec_from_file_location("frozen_run", FROZEN)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SIZE = PIXELS
    return module


@functools.cache
def image_features(folder: Path = Path("out/open_questions")) -> dict[str, FeatureSet]:
    """Features of the images; ``y`` is an image's number, and in "labels" the class of those in "pool"."""
    run = frozen_script()
    rng = np.random.default_rng(0)
    numbers = {
        "pool": rng.permutation(50_000)[:POOL],
        "voted": rng.permutation(10_000)[:VOTED],
        "near": rng.permutation(10_000)[:OOD],
        "far": rng.permutation(1_016)[:OOD],
    }
    model = None
    found = {}
    for name, rows in numbers.items():
        file = folder / f"{name}.safetensors"
        if not file.is_file():
            model = hetsngp.convert(run.network(), num_classes=10, freeze=True) if model is None else model
            if name in ("pool", "voted"):
                pixels = run.cifar10("train" if name == "pool" else "test", rows)[0]
            else:
                pixels = (run.cifar100_test() if name == "near" else run.scenes())[rows]
            batches = run.batches(pixels, np.zeros(len(rows)), torch.device("cpu"), name)
            h = hetsngp.extract_features(model, batches).h
            FeatureSet(h, torch.from_numpy(rows)).save(file)
        found[name] = FeatureSet.load(file)
    labels = np.load(run.data_root() / "cifar10/cifar_n.npz")["c10_clean_label"][numbers["pool"]]
    found["labels"] = FeatureSet(torch.zeros(POOL, 1), torch.from_numpy(labels))
    return found


SMALL = {"random_features": 512}
HALF = (0.0, 0.0, 0.0, 0.0, 0.4, 0.4, 0.4, 0.4)
PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "moons": functools.partial(
        synthetic, "two_moons", (0.0, 0.4), Settings(40, 128, options={**SMALL, "length_scale": 8.0})
    ),
    "mixture": functools.partial(
        synthetic, "gaussian_mixture", (0.0, 0.2, 0.4), Settings(30, options={**SMALL, "length_scale": 8.0})
    ),
    "circles": functools.partial(
        synthetic,
        "noisy_circles",
        (0.1, 0.3, 0.5),
        Settings(120, 128, 5e-3, options={**SMALL, "length_scale": 11.3, "temperature": 0.5}),
    ),
    "digits": functools.partial(table, "digits", None, Settings(30, options=SMALL)),
    "digits flipped": functools.partial(
        table,
        "digits",
        HALF,
        Settings(30, early_stopping=True, options=SMALL),
    ),
    "cancer": functools.partial(table, "breast_cancer", None, Settings(60, options=SMALL)),
    "wine": functools.partial(table, "wine", None, Settings(60, options=SMALL)),
    "cifar head": functools.partial(
        images, False, Settings(options={"random_features": 1024}, tolerance=FROZEN_TOLERANCE)
    ),
    "cifar mlp": functools.partial(images, True, Settings(15, 64, 1e-3, depth=2, options=SMALL)),
    "digits plain": functools.partial(
        table,
        "digits",
        HALF,
        Settings(30, width=256, plain=True, options={**SMALL, "spectral_bound": math.inf}),
    ),
    "cifar plain": functools.partial(
        images,
        True,
        Settings(15, lr=1e-3, width=256, plain=True, options={**SMALL, "spectral_bound": math.inf}),
    ),
}
FLIPPED = ("moons", "mixture", "circles", "digits flipped", "cifar head", "cifar mlp")
NETWORKS = tuple(name for name in PROBLEMS if name != "cifar head")  # heads on equal features hardly differ
COSTLY = ("mixture", "circles")  # a minute each, and members of one opinion: deterministic ensembles only


# --- models -----------------------------------------------------------------------------------------------


def plain_network(columns: int, width: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        layers = nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    backbone: Any = nn.Sequential(*layers)
    backbone.num_features = width
    return backbone


def network(problem: Problem, seed: int, method: Any = "hetsngp") -> Classifier:
    settings, (x, y) = problem.settings, problem.train
    generator = torch.Generator().manual_seed(seed)
    backbone: Any = ResidualMLP(x.shape[1], settings.width, settings.depth, generator=generator)
    if settings.plain:
        backbone = plain_network(x.shape[1], settings.width, seed)
    options = settings.options
    if method == "deterministic":  # has no GP
        options = {name: value for name, value in options.items() if name == "temperature"}
    model = hetsngp.build(
        method, backbone, problem.num_classes, generator=generator, dataset_size=len(x), **options
    )
    loader = DataLoader(TensorDataset(x, y), settings.batch_size, shuffle=True, generator=generator)
    train(
        model,
        loader,
        epochs=settings.epochs,
        lr=settings.lr,
        generator=generator,
        validation=[problem.held_out] if settings.early_stopping else None,
    )
    return model.eval()


def frozen_head(problem: Problem, seed: int) -> Classifier:
    model = hetsngp.convert(frozen_script().network(), num_classes=10, freeze=True)
    parts = (FeatureSet(*part) for part in (problem.train, problem.held_out))
    hetsngp.fit_head(model, *parts, seed=seed, progress=False, **problem.settings.options)
    return model.on_features().eval()


@functools.lru_cache(2 * MEMBERS)
def trained(name: str, seed: int, member: int = 0, method: Any = "hetsngp") -> Classifier:
    problem = make_problem(name, seed)
    if name == "cifar head":
        return frozen_head(problem, 100 * seed + member)
    return network(problem, 100 * seed + member, method)


@functools.lru_cache(2)
def make_problem(name: str, seed: int) -> Problem:
    return PROBLEMS[name](seed)


def fit(model: Classifier, problem: Problem) -> PosteriorReport:
    """Posterior and calibration; heads on frozen features have the tolerance of ``fit_head``."""
    data = [problem.train], [problem.held_out]
    return hetsngp.fit_posterior(model, *data, tolerance=problem.settings.tolerance)


# --- measurement ------------------------------------------------------------------------------------------


def predict(model: Any, x: Tensor) -> Prediction:
    return Prediction.cat([model.predict(part) for part in x.split(BATCH)])


def measure(model: Any, problem: Problem) -> tuple[dict[str, float], Tensor]:
    """Numbers of one variant, and −log p of each test label."""
    (x, y), classes = problem.test, problem.num_classes
    test, near, far = predict(model, x), predict(model, problem.near), predict(model, problem.far)
    terms = metrics.nll_terms(test.probs, y)
    correct = (test.probs.argmax(1) == y).double()
    numbers = {
        "nll": float(terms.mean()),
        "ece": metrics.ece(test.probs, y),
        "gap": float(test.confidence.double().mean() - correct.mean()),
        "accuracy": metrics.accuracy(test.probs, problem.clean),
        "near": metrics.auroc(test.ood_score, near.ood_score),
        "far": metrics.auroc(test.ood_score, far.ood_score),
        "far_model": float(far.model_uncertainty.mean()) / math.log(classes),
        "far_model_min": float(far.model_uncertainty.min()) / math.log(classes),
        "test_model": float(test.model_uncertainty.mean()) / math.log(classes),
        "test_data": float(test.data_uncertainty.mean()) / math.log(classes),
    }
    if problem.entropy is not None:
        voted = test if problem.voted is x else predict(model, problem.voted)
        numbers["noise_rank"] = spearman(voted.data_uncertainty, problem.entropy)
    return numbers, terms


def spearman(a: Tensor, b: Tensor) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(a.double().numpy(), b.double().numpy())[0])


def compare(variants: dict[str, Callable[[], tuple[dict[str, float], Tensor]]]) -> dict[str, Any]:
    """Numbers of each variant, with the error over inputs of its NLL's difference from the first one's."""
    out: dict[str, Any] = {}
    first: Tensor | None = None
    for name, run in variants.items():
        numbers, terms = run()
        first = terms if first is None else first
        difference = (terms - first).double()
        numbers["nll_input_error"] = float(difference.std() / math.sqrt(len(difference)))
        out[name] = {key: round(value, 6) for key, value in numbers.items()}
    return out


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)  # an AttributeError here means that the library has moved it
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# --- the fade ---------------------------------------------------------------------------------------------

WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "odds": heads.noise_weight,
    "contraction": lambda variance, contraction: contraction,
    "none": lambda variance, contraction: torch.ones_like(contraction),
}


def fade(name: str, seed: int) -> dict[str, Any]:
    problem, model = make_problem(name, seed), trained(name, seed)

    def variant(weight: Callable[[Tensor, Tensor], Tensor]) -> tuple[dict[str, float], Tensor]:
        with patched(heads, "noise_weight", weight):
            report = fit(model, problem)
            numbers, terms = measure(model, problem)
        return numbers | chosen(report), terms

    return compare({key: functools.partial(variant, weight) for key, weight in WEIGHTS.items()})


def chosen(report: PosteriorReport) -> dict[str, float]:
    assert report.mode_temperature is not None
    assert report.nll is not None
    return {
        "scale": report.scale,
        "tau": report.temperature,
        "mode_tau": report.mode_temperature,
        "held_out_nll": report.nll,
    }


# --- the temperature of the Hessian -----------------------------------------------------------------------


def at_training_temperature(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: GaussianHead, *args: Any, **kwargs: Any) -> Any:
        calibrated = self.temperature.clone()
        self.temperature.copy_(self.training_temperature)
        try:
            return method(self, *args, **kwargs)
        finally:
            self.temperature.copy_(calibrated)

    return wrapped


def hessian_temperature(kind: str, name: str, seed: int) -> dict[str, Any]:
    problem, model = make_problem(name, seed), trained(name, seed)
    latent: Any = model.head.latent
    before = latent.posterior
    if before.name != kind:
        latent.posterior = POSTERIOR_TYPES[kind](before.num_classes, before.num_features, before.link)

    def calibrated() -> tuple[dict[str, float], Tensor]:
        report = fit(model, problem)
        numbers, terms = measure(model, problem)
        return numbers | chosen(report), terms

    def training() -> tuple[dict[str, float], Tensor]:
        with (
            patched(GaussianHead, "statistics", at_training_temperature(GaussianHead.statistics)),
            patched(GaussianHead, "fisher", at_training_temperature(GaussianHead.fisher)),
        ):
            return calibrated()

    try:
        return compare({"calibrated": calibrated, "training": training})
    finally:
        latent.posterior = before


# --- ensembles --------------------------------------------------------------------------------------------


def mixture_nll(members: list[Classifier], h: list[Tensor], y: Tensor, factor: float) -> Tensor:
    """−log of the members' mean probability of each held-out label, with every τ multiplied by ``factor``."""
    each = [
        m.head.held_out_nll(x, y, m.head.temperature * factor, posterior=m.head.has_posterior)
        for m, x in zip(members, h, strict=True)
    ]
    return math.log(len(members)) - (-torch.stack(each)).logsumexp(0)


def joint_factor(members: list[Classifier], problem: Problem) -> float:
    """Factor on all temperatures: a MAP estimate by the mixture's NLL, to 0.02.

    The prior is that of a single temperature, around the one of training. (With a prior around a factor of 1
    a few dozen held-out examples would pull the temperatures away from training a second time.)
    """
    x, y = problem.held_out
    strength = 0.5 / (TEMPERATURE_SPREAD**2 * len(y))
    moved = [math.log(float(m.head.temperature / m.head.training_temperature)) for m in members]
    h = []
    for member in members:
        with evaluating(member):
            h.append(member.backbone(x))

    @functools.cache
    def value(step: int) -> float:
        nll = float(mixture_nll(members, h, y, math.exp(0.02 * step)).mean())
        return nll + strength * statistics.fmean((0.02 * step + log) ** 2 for log in moved)

    with torch.no_grad():
        near = min(range(-40, 41, 4), key=value)
        return math.exp(0.02 * min(range(near - 3, near + 4), key=value))


def ensemble(method: str, name: str, seed: int) -> dict[str, Any]:
    problem = make_problem(name, seed)
    members = [trained(name, seed, member, method) for member in range(MEMBERS)]
    for member in members:
        fit(member, problem)
    temperatures = [member.head.temperature.clone() for member in members]
    model = Ensemble(members)

    def variant(factor: float) -> tuple[dict[str, float], Tensor]:
        for member, temperature in zip(members, temperatures, strict=True):
            member.head.temperature.copy_(temperature * factor)
        numbers, terms = measure(model, problem)
        return numbers | {"factor": factor}, terms

    factor = joint_factor(members, problem)
    alone = variant(1.0)
    return compare({"members": lambda: alone, "joint": lambda: alone if factor == 1 else variant(factor)})


# --- parts and tables -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    measure: Callable[[str, int], dict[str, Any]]
    problems: tuple[str, ...]
    columns: tuple[str, ...]


QUALITY = ("nll", "ece", "gap")
QUESTIONS = {
    "fade": Question(
        fade,
        FLIPPED,
        (*QUALITY, "accuracy", "near", "far", "noise_rank", "far_model", "far_model_min", "scale"),
    ),
    "temperature": Question(
        functools.partial(hessian_temperature, "kronecker"),
        tuple(PROBLEMS),
        (*QUALITY, "near", "far", "far_model", "held_out_nll", "scale", "mode_tau", "tau"),
    ),
    "temperature-exact": Question(
        functools.partial(hessian_temperature, "exact"),
        tuple(PROBLEMS),
        (*QUALITY, "near", "far", "far_model", "held_out_nll", "scale", "mode_tau", "tau"),
    ),
    "ensemble": Question(
        functools.partial(ensemble, "hetsngp"),
        tuple(name for name in NETWORKS if name not in COSTLY),
        (*QUALITY, "accuracy", "near", "far", "factor"),
    ),
    "ensemble-deterministic": Question(
        functools.partial(ensemble, "deterministic"),
        NETWORKS,
        (*QUALITY, "accuracy", "near", "far", "factor"),
    ),
}


def mean_error(values: list[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def tables(parts: dict[str, Any]) -> str:
    lines: list[str] = []
    for question, spec in QUESTIONS.items():
        found = {
            problem: [run for key, run in sorted(parts.items()) if key.startswith(f"{question}/{problem}/")]
            for problem in spec.problems
        }
        found = {problem: runs for problem, runs in found.items() if runs}
        if not found:
            continue
        lines += ["", f"### {question}", "", "| problem | variant | " + " | ".join(spec.columns) + " |"]
        lines.append("|---|---" + "|---" * len(spec.columns) + "|")
        together: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for problem, runs in found.items():
            base, *others = runs[0]["variants"]
            for variant in (base, *others):
                cells = []
                for column in spec.columns:
                    rows = [run["variants"] for run in runs if column in run["variants"][base]]
                    if not rows:
                        cells.append("–")
                    elif variant == base:
                        cells.append(f"{statistics.fmean(r[base][column] for r in rows):.3f}")
                    else:
                        value = mean_error([r[variant][column] - r[base][column] for r in rows])
                        if len(rows) > 1:  # one seed has no error
                            together.setdefault(variant, {}).setdefault(column, []).append(value)
                        cells.append(difference(*value))
                lines.append(f"| {problem} ({len(runs)}) | {variant} | " + " | ".join(cells) + " |")
        for variant, columns in together.items():
            cells = []
            for column in spec.columns:
                pairs = columns.get(column, [])
                count = max(1, len(pairs))
                mean = sum(m for m, _ in pairs) / count
                cells.append(
                    difference(mean, math.sqrt(sum(e * e for _, e in pairs)) / count) if pairs else "–"
                )
            lines.append(f"| all | {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference(mean: float, error: float) -> str:
    """Difference to the first variant; bold beyond two standard errors."""
    text = f"{mean:+.4f} ± {error:.4f}"
    return f"**{text}**" if abs(mean) > 2 * error and abs(mean) >= 5e-5 else text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder of the JSON file")
    parser.add_argument("--questions", default=",".join(QUESTIONS))
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    parser.add_argument(
        "--table", action="store_true", help="print the tables of finished parts, run nothing"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.out / "open_questions.json"
    parts: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}
    if not args.table:
        run(args, path, parts)
    print(tables(parts))


def run(args: argparse.Namespace, path: Path, parts: dict[str, Any]) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    questions = {name: QUESTIONS[name] for name in args.questions.split(",")}
    for seed in range(args.seeds):
        for name in args.problems.split(","):
            for title, question in questions.items():
                key = f"{title}/{name}/{seed}"
                if key in parts or name not in question.problems:
                    continue
                start = time.process_time()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a fit under other rules leaves the model "stale"
                    variants = question.measure(name, seed)
                parts[key] = {"seconds": round(time.process_time() - start, 1), "variants": variants}
                versions = {"torch": torch.__version__, "hetsngp": hetsngp.__version__}
                write_json(path, {"versions": versions, "parts": dict(sorted(parts.items()))}, indent=1)
                print(key, parts[key]["seconds"], "s", flush=True)


if __name__ == "__main__":
    main()
