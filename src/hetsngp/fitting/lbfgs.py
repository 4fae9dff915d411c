"""MAP estimates by L-BFGS on all examples at once, for Gaussian processes on features that do not change."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.fitting.loop import EpochResult, pooled_mean_nll
from hetsngp.fitting.mean_loss import Batch, MeanLoss, mean_curvature, mean_units
from hetsngp.models.classifier import Classifier
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.latent import RandomFeatureGP

# L-BFGS iterations of a round, after which the loss is reported; rounds at most; steps in L-BFGS's history.
ITERATIONS_PER_ROUND, MAX_ROUNDS, HISTORY_SIZE = 5, 40, 20
# Nats by which a round must lower the loss: per example, and in total.
MIN_GAIN, MIN_TOTAL_GAIN = 1e-5, 0.05
# Gain of a round, in nats per example, after which β without noise is a good start for all with noise.
START_GAIN = 1e-4
# Largest examples × classes of one evaluation, with 64 integration points of each in memory; and examples.
MAX_LOGITS, MAX_EXAMPLES = 2**21, 2**15


def fit_map(
    models: Sequence[Classifier],
    batches: Sequence[Iterable[Batch]],
    *,
    weight_decay: float = 1e-4,
    seed: int = 0,
    validation: Sequence[Iterable[Any]] = (),
    on_epoch: Callable[[EpochResult], None] | None = None,
) -> list[EpochResult]:
    """Minimise the loss of each model over all of its batches by L-BFGS, one round of each model at a time.

    The Laplace posterior is a Gaussian around the MAP estimate and is correct only there. Stochastic steps
    with early stopping end before it, most of all in directions about which the data say little: those that
    separate similar classes. In the GP's weights the loss is convex. Integration points are the same at each
    evaluation. Weight decay is a prior here, ½·decay·‖θ‖², on parameters that have no other, and part of the
    reported losses. The weights of the examples have mean one.

    The NLL on ``validation`` is reported only. Results are means over the models, as in ``train_folds``.
    """
    runs = [_rounds(m, list(data), weight_decay, seed) for m, data in zip(models, batches, strict=True)]
    history: list[EpochResult] = []
    losses = [float("nan")] * len(runs)
    for round_number, found in enumerate(itertools.zip_longest(*runs), 1):
        losses = [old if new is None else new for old, new in zip(losses, found, strict=True)]
        held_out = pooled_mean_nll(models, validation) if validation else None
        history.append(EpochResult(round_number, MAX_ROUNDS, sum(losses) / len(losses), held_out))
        if on_epoch is not None:
            on_epoch(history[-1])
    for model in models:
        model.eval()
    return history


def _rounds(model: Classifier, batches: list[Batch], weight_decay: float, seed: int) -> Iterator[float]:
    """Yield the loss after each round.

    First β alone, without noise; then, where there is noise, everything.
    """
    if MeanLoss.serves(model):
        noisy = model.head.noise is not None
        losses = MeanLoss(model, batches).minimize(_descend, START_GAIN if noisy else _enough(model, batches))
        if not noisy:
            yield from losses
            return
        for _ in losses:
            pass
    yield from _joint_rounds(model, batches, weight_decay, seed)


def _enough(model: Classifier, batches: list[Batch]) -> float:
    return min(MIN_GAIN, MIN_TOTAL_GAIN / (model.dataset_size or sum(len(y) for _, y, _ in batches)))


def _joint_rounds(model: Classifier, batches: list[Batch], weight_decay: float, seed: int) -> Iterator[float]:
    """Minimise the loss in all parameters."""
    count = sum(len(y) for _, y, _ in batches)
    parameters = [
        (parameter, _step_size(model, parameter, group["weight_decay"], batches), group["weight_decay"])
        for group in model.parameter_groups(weight_decay)
        for parameter in group["params"]
    ]
    scaled = [nn.Parameter(parameter.detach() / size) for parameter, size, _ in parameters]

    def evaluate() -> Tensor:
        with torch.no_grad():
            for variable, (parameter, size, _) in zip(scaled, parameters, strict=True):
                parameter.copy_(variable * size)
        model.zero_grad(set_to_none=True)
        model.train()
        value = scaled[0].new_zeros(())
        with torch.enable_grad():
            for number, (x, y, weight) in enumerate(batches):
                points = torch.Generator().manual_seed(seed + number)
                loss = model.loss(x, y, generator=points, weight=weight) * (len(y) / count)
                loss.backward()
                value = value + loss.detach()
        with torch.no_grad():
            for variable, (parameter, size, decay) in zip(scaled, parameters, strict=True):
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                variable.grad = (gradient + decay * parameter) * size
                value = value + 0.5 * decay * parameter.square().sum()
        return value

    yield from _descend(scaled, evaluate, _enough(model, batches))
    model.zero_grad(set_to_none=True)


def _descend(variables: list[nn.Parameter], evaluate: Callable[[], Tensor], enough: float) -> Iterator[float]:
    """Yield the loss after each round of L-BFGS, until one no longer lowers it enough, or all later ones
    together would not, if gains went on to fall as they did last. ``evaluate`` sets the gradients.
    """
    known: list[tuple[list[Tensor], Tensor]] = []  # where the last evaluation was, and its value

    def once() -> Tensor:
        # L-BFGS begins each call where the last one ended; the gradients are still there.
        if not known or not all(map(torch.equal, known[0][0], variables)):
            value = evaluate()
            known[:] = [([variable.detach().clone() for variable in variables], value)]
        return known[0][1]

    optimizer = torch.optim.LBFGS(
        variables,
        max_iter=ITERATIONS_PER_ROUND,
        history_size=HISTORY_SIZE,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    last, before = math.inf, math.inf
    for _ in range(MAX_ROUNDS):
        optimizer.step(once)
        loss = float(once())
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}: lower the amplitude, or train by AdamW, epochs=50")
        yield loss
        gain = last - loss
        if gain < enough or (gain < before < math.inf and gain**2 / (before - gain) < enough):
            break
        last, before = loss, gain


@torch.no_grad()
def _step_size(model: Classifier, parameter: Tensor, decay: float, batches: list[Batch]) -> Tensor:
    """Unit of a parameter, 1/√(expected curvature): in these units all curvatures are about the same.

    The inputs of the layers of the noise have a typical length of one; often their weight decay is most of
    the curvature.
    """
    latent = model.head.latent if isinstance(model.head, GaussianHead) else None
    if isinstance(latent, RandomFeatureGP) and parameter is latent.beta:
        squares = torch.stack([weight @ latent.features(x).square() for x, _, weight in batches]).sum(0)
        return mean_units(squares, model.num_classes)
    count = model.dataset_size or sum(len(y) for _, y, _ in batches)
    width = parameter.shape[-1] if parameter.dim() > 1 else 1
    curvature = mean_curvature(model.num_classes) / width + decay
    return parameter.new_tensor((1 + count * curvature) ** -0.5)
