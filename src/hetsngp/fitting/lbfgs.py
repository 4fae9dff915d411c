"""All rows at once, down to the mode: for Gaussian processes on features that stay as they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.fitting.loop import EpochResult, nll_sums
from hetsngp.models.classifier import Classifier
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.latent import RandomFeatureGP

Rows = tuple[Tensor, ...]
"""x (n, D), y, weight (n,)."""

# L-BFGS iterations between two looks at the loss, looks at most, and steps that it remembers.
ITERATIONS, MOST_LOOKS, HISTORY = 5, 40, 20
# Nats that so many iterations must still gain: an example, and in all.
ENOUGH, ENOUGH_IN_ALL = 1e-5, 0.05
# Typical curvature of −log p(y) in a logit: 0.09 of ten even classes, none where the label is certain.
CURVATURE = 0.03
# Rows × classes of one evaluation, with 64 integration points of each in memory; and rows.
LOGITS_AT_A_TIME, ROWS_AT_A_TIME = 2**21, 2**15


def descend(
    models: Sequence[Classifier],
    batches: Sequence[Iterable[Rows]],
    *,
    weight_decay: float = 1e-4,
    seed: int = 0,
    validation: Sequence[Iterable[Any]] = (),
    on_epoch: Callable[[EpochResult], None] | None = None,
) -> list[EpochResult]:
    """Bring each model to the minimum of its loss over all its batches together, side by side, by L-BFGS.

    The posterior is a Gaussian around the mode and is right only there. Stochastic steps that are stopped
    early stop short of it, most of all in directions of which the data say little: those that tell similar
    classes apart. In the GP's weights the loss is convex. Integration points are the same at each evaluation.
    Weight decay is a prior here, ½·decay·‖θ‖², on what has none of its own, and in the losses that are
    reported. Weights of rows are of mean one.

    ``validation`` is watched, and decides nothing. Results are means over the models, as in ``train_folds``.
    """
    runs = [_looks(m, list(rows), weight_decay, seed) for m, rows in zip(models, batches, strict=True)]
    history: list[EpochResult] = []
    losses = [float("nan")] * len(runs)
    for look, found in enumerate(itertools.zip_longest(*runs), 1):
        losses = [old if new is None else new for old, new in zip(losses, found, strict=True)]
        held_out = None
        if validation:
            sums = [nll_sums(m, data) for m, data in zip(models, validation, strict=True)]
            held_out = sum(total for total, _ in sums) / sum(weight for _, weight in sums)
        history.append(EpochResult(look, MOST_LOOKS, sum(losses) / len(losses), held_out))
        if on_epoch is not None:
            on_epoch(history[-1])
    for model in models:
        model.eval()
    return history


def _looks(model: Classifier, rows: list[Rows], weight_decay: float, seed: int) -> Iterator[float]:
    """Go on by some iterations each time the next loss is asked for, until that gains no more."""
    count = sum(len(y) for _, y, _ in rows)
    moved = [
        (parameter, _step_size(model, parameter, rows), group["weight_decay"])
        for group in model.parameter_groups(weight_decay)
        for parameter in group["params"]
    ]
    places = [nn.Parameter(parameter.detach() / size) for parameter, size, _ in moved]

    def evaluate() -> Tensor:
        with torch.no_grad():
            for place, (parameter, size, _) in zip(places, moved, strict=True):
                parameter.copy_(place * size)
        model.zero_grad(set_to_none=True)
        model.train()
        value = places[0].new_zeros(())
        with torch.enable_grad():
            for number, (x, y, weight) in enumerate(rows):
                points = torch.Generator().manual_seed(seed + number)
                loss = model.loss(x, y, generator=points, weight=weight) * (len(y) / count)
                loss.backward()
                value = value + loss.detach()
        with torch.no_grad():
            for place, (parameter, size, decay) in zip(places, moved, strict=True):
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                place.grad = (gradient + decay * parameter) * size
                value = value + 0.5 * decay * parameter.square().sum()
        return value

    optimizer = torch.optim.LBFGS(
        places,
        max_iter=ITERATIONS,
        history_size=HISTORY,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    enough = min(ENOUGH, ENOUGH_IN_ALL / (model.dataset_size or count))
    last = float("inf")
    for _ in range(MOST_LOOKS):
        optimizer.step(evaluate)
        loss = float(evaluate())
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}: lower the amplitude, or train by AdamW, epochs=50")
        yield loss
        if last - loss < enough:
            break
        last = loss
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def _step_size(model: Classifier, parameter: Tensor, rows: list[Rows]) -> Tensor:
    """Unit of a step: one over the root of the curvature to be expected, so that it is the same everywhere.

    The features of a GP are principal components, hardly correlated and of very different sizes. Weights of
    a layer are about 1/√width.
    """
    latent = model.head.latent if isinstance(model.head, GaussianHead) else None
    if isinstance(latent, RandomFeatureGP) and parameter is latent.beta:
        squares = torch.stack([weight @ latent.features(x).square() for x, _, weight in rows]).sum(0)
        return (1 + CURVATURE * squares).rsqrt().unsqueeze(1)
    return parameter.new_tensor(parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1)
