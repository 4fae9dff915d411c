"""From the Gaussian over logits to probabilities, Eq. (6): E softmax(u/τ) or E σ(u/τ).

The diagonal of the covariance is integrated in one dimension (:mod:`hetsngp.functional.integration`), and
only the coordinates of the factor take points: a fixed number of quasi-random ones. The Kronecker posterior
has a factor of rank K − 1 whose covariance is almost diagonal: its diagonal is integrated, and the effect of
the correlations is a mean of differences, between correlated and independent draws from the same points. The
loss of a label moves the points towards those that make the label probable, and weights them. A factor of
more columns than a few dozen, as noise on features has, and ``sampler="mc"`` take points in all coordinates.

With two classes only the difference of the logits matters, and with the sigmoid only the marginal variance of
each logit: both integrals are one-dimensional and computed by quadrature.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hetsngp.functional.integration import (
    MANY_CLASSES,
    Quantiles,
    chunk_of_rows,
    probs_and_entropy,
    scratch,
    within_table,
)
from hetsngp.functional.label_loss import (
    LONGEST,
    TOWARDS,
    Diagonal,
    LabelLoss,
    LogNormalizer,
    LogProbs,
    SoftNLL,
    WithGradients,
    label_loss,
)
from hetsngp.functional.quadrature import expected_log_sigmoid, log_expected_sigmoid
from hetsngp.functional.sampling import (
    IntegrationPoints,
    StreamedLogSoftmax,
    constant_points,
    controlled_mean,
    draw,
    draw_seed,
    num_coordinates,
    pack,
    random_signs,
)
from hetsngp.types import AnyFactor, Factor, FactorSum, UtilityNormal, join_factors

# Error of a probability from the default number of points, about; where a factor is much wider than the
# diagonal up to twice that (benchmarks/points.py).
TARGET_ERROR = 0.005
# Points of the factor's coordinates in training, where errors average over batches and steps: of many
# classes, of targets that are no labels, and of few classes, times their number. For held-out data, of few
# and of many classes, and of all coordinates.
TRAINING_POINTS, SOFT_POINTS, TRAINING_LOGITS = 4, 16, 256
EVALUATION_POINTS, EVALUATION_POINTS_MANY, EVALUATION_POINTS_SAMPLED = 128, 32, 512
# Points of the loss of a held-out label where classes correlate: of few classes; of many where the variance
# of a logit is WIDE or more; and of many where it is less.
LABEL_POINTS, LABEL_POINTS_WIDE, LABEL_POINTS_MANY, WIDE = 512, 128, 32, 1.0
# Points of predictions, more of few classes, whose probabilities are large and cost little; numbers of
# classes from which they are very many, and up to which they are few.
PREDICTION_POINTS, PREDICTION_POINTS_FEW = 256, 512
VERY_MANY_CLASSES, FEW_CLASSES = 512, 32
# A factor of more columns takes points in all coordinates: so many for each point that they replace.
WIDE_RANK, SAMPLED = 64, 8
# Elements of a factor (B, K, R) up to which it is written out for the loss of a label.
DENSE_LIMIT = 2**24
# Least number of points of a member of a mixture.
FEWEST_POINTS = 32
# Draws of the differences that the correlations of a posterior make: times the classes, and their least and
# largest number. Few classes may be far from independent, and cost little.
CORRELATED_LOGITS, FEWEST_DRAWS, MOST_DRAWS = 2**13, 512, 2048


def separated_forms(utility: UtilityNormal) -> tuple[AnyFactor | None, Factor | None]:
    """Factor without its contrasts, and the factor of contrasts; each None where there is none."""
    form = utility.form
    parts = () if form is None else form.parts if isinstance(form, FactorSum) else (form,)
    contrasts = [part for part in parts if part.contrasts]
    if len(contrasts) != 1:  # several: moments of a mixture, which are taken as they are
        return form, None
    return join_factors(*(part for part in parts if not part.contrasts)), contrasts[0]


def separated(utility: UtilityNormal) -> tuple[UtilityNormal, Factor | None]:
    """Utility with the diagonal of its contrasts in ``var``, and the factor of contrasts, if it has one.

    The softmax does not depend on the direction 1, which contrasts leave out: it gets their mean variance,
    which makes the covariance as diagonal as it can be.
    """
    rest, contrasts = separated_forms(utility)
    if contrasts is None:
        return utility, None
    return UtilityNormal(utility.mean, utility.var + _diagonal(contrasts), rest), contrasts


def _diagonal(contrasts: Factor) -> Tensor:
    assert contrasts.column is not None
    common = contrasts.column.square().mean(-1, keepdim=True) / len(contrasts.basis)
    return contrasts.variance() + common


def num_draws(num_classes: int) -> int:
    """Number of draws of :func:`correlated_draws`, a power of two.

    >>> num_draws(3), num_draws(10), num_draws(100)
    (2048, 512, 512)
    """
    wanted = min(max(CORRELATED_LOGITS // num_classes, FEWEST_DRAWS), MOST_DRAWS)
    return 1 << (wanted.bit_length() - 1)


def num_factor_points(num_classes: int) -> int:
    """Number of points of a prediction.

    >>> num_factor_points(3), num_factor_points(1000)
    (512, 256)
    """
    return PREDICTION_POINTS_FEW if num_classes <= FEW_CLASSES else PREDICTION_POINTS


def num_points(utility: UtilityNormal, num_samples: int | None, sampler: str, members: int = 1) -> int:
    """Number of points of :func:`softmax_probs`; 0 where the integral takes none."""
    classes, rest = utility.mean.shape[-1], separated_forms(utility)[0]
    if sampler == "sobol" and (classes == 2 or utility.form is None):
        return 0
    if num_samples is not None:
        return num_samples
    if rest is None and sampler == "sobol":
        return num_draws(classes)
    if not is_sampled(utility, sampler):
        return max(num_factor_points(classes) // members, FEWEST_POINTS)
    count = PREDICTION_POINTS if classes < VERY_MANY_CLASSES else PREDICTION_POINTS // 2
    return SAMPLED * max(count // members, FEWEST_POINTS)


def num_training_points(num_classes: int, *, soft: bool = False) -> int:
    """Number of points of the training loss, of labels or of soft targets.

    More of few classes, where they cost little: with a wide factor the gradient of 16 points is biased.

    >>> [num_training_points(classes) for classes in (3, 6, 10, 100)], num_training_points(100, soft=True)
    ([64, 32, 16, 4], 16)
    """
    if num_classes > FEW_CLASSES:
        return SOFT_POINTS if soft else TRAINING_POINTS
    wanted = min(max(TRAINING_LOGITS // num_classes, 16), 64)
    return 1 << (wanted.bit_length() - 1)


def num_evaluation_points(num_classes: int, sampler: str = "sobol") -> int:
    """Number of points of the loss of held-out data."""
    if sampler != "sobol":
        return EVALUATION_POINTS_SAMPLED
    return EVALUATION_POINTS if num_classes < MANY_CLASSES else EVALUATION_POINTS_MANY


def correlated_draws(contrasts: Factor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """Draws of mean zero with the covariance of the contrasts, and with its diagonal alone: (B, S, K) each.

    From the same points ε (S, K): Σ^{1/2}ε and diag(Σ)^{1/2}ε, as near to each other as Σ is to its diagonal.
    In memory few classes are in front.
    """
    basis, column = contrasts.basis, contrasts.column
    assert column is not None
    std = _diagonal(contrasts).sqrt()
    if eps.shape[1] > FEW_CLASSES:
        return ((eps @ basis) * column.unsqueeze(1)) @ basis.mT, std.unsqueeze(1) * eps
    scaled = column.mT.unsqueeze(-1) * (eps @ basis).mT.unsqueeze(1)  # (K − 1, B, S)
    correlated = (basis @ scaled.flatten(1)).unflatten(1, scaled.shape[1:])
    return correlated.movedim(0, -1), (std.mT.unsqueeze(-1) * eps.mT.unsqueeze(1)).movedim(0, -1)


def is_sampled(utility: UtilityNormal, sampler: str) -> bool:
    """Whether all coordinates take points."""
    form = separated_forms(utility)[0]
    return sampler != "sobol" or (form is not None and form.rank > WIDE_RANK)


@torch.no_grad()
def integrated_softmax(
    utility: UtilityNormal, seed: int, *, entropy: bool, num_samples: int | None = None
) -> tuple[Tensor, Tensor]:
    """E softmax(u) (B, K) and E H(softmax(u)) (B,), NaN without ``entropy``, of three classes or more with no
    factor but one of contrasts.

    ``num_samples``: number of draws where classes correlate; None: :func:`num_draws`.
    """
    rest, contrasts = separated(utility)
    probs, given = probs_and_entropy(rest.mean, rest.var, entropy=entropy)
    # To the last bit where there is no variance.
    probs = torch.where(rest.var.amax(-1, keepdim=True) == 0, torch.softmax(rest.mean, -1), probs)
    if contrasts is None:
        return probs, given
    pieces, count = [], num_samples or num_draws(utility.mean.shape[-1])
    eps = constant_points(count, utility.mean.shape[-1], seed + 2, utility.mean)
    for rows in example_chunks(rest.mean, count):
        part = contrasts.map(lambda t, rows=rows: t[rows])  # type: ignore[misc]
        mean, draws = rest.mean[rows], correlated_draws(part, eps)
        mean = mean - mean.amax(-1, keepdim=True)  # numbers near zero keep their digits
        if not entropy:
            pieces.append((mean_change(mean.unsqueeze(1), *draws), given[rows]))  # NaN stays NaN
            continue
        centre = torch.softmax(mean, -1)
        known = half_spread(UtilityNormal(mean, torch.zeros_like(mean), part), centre)
        known = known - half_spread(UtilityNormal(mean, _diagonal(part)), centre)
        pieces.append(mean_changes(mean, *draws, probs[rows], known))
    change, more = (torch.cat(each) for each in zip(*pieces, strict=True))
    return _normalized(probs + change), given + more


def _normalized(probs: Tensor) -> Tensor:
    """Probabilities that draws have moved outside [0, 1], inside it again and of sum one: (B, K)."""
    probs = probs.clamp_min(0)
    return probs / probs.sum(-1, keepdim=True)


def example_chunks(mean: Tensor, points: int, larger: int = 1) -> list[slice]:
    """Slices of the examples of mean (B, K) that are computed together, with all of so many points in memory;
    ``larger`` times as large as elsewhere.
    """
    if torch.compiler.is_compiling():  # the number of slices would be that of the traced batch
        return [slice(None)]
    size = chunk_of_rows(mean, points * mean.shape[1] // larger)
    return [slice(i, i + size) for i in range(0, len(mean), size)]


def mean_change(mean: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Mean of softmax(mean + first) − softmax(mean + second) over draws (B, S, K): (B, K)."""
    few = mean.shape[-1] <= FEW_CLASSES
    p, q = (_softmax(mean, each, few)[1].mean(2 if few else 1) for each in (first, second))
    return (p - q).mT if few else p - q


def mean_changes(
    mean: Tensor, first: Tensor, second: Tensor, probs: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`mean_change` for mean (B, K), and the mean of the difference of the entropies: (B, K), (B,).

    ``probs`` (B, K): the expectation with the second draws. The KL divergence from it has the second-order
    part ½(Σ p a² − (Σ p a)²) with p = softmax(mean) and a draw a;
    ``known`` (B,), the expectation of its difference, makes it a control variate.
    """
    few = mean.shape[-1] <= FEW_CLASSES
    at, traced = 0 if few else -1, torch.compiler.is_compiling()
    log_q = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    # Elementwise, because the product of a batch of matrices with a vector each takes four times as long.
    centre, at_q = (_classes_in_front(each.unsqueeze(1), few) for each in (torch.softmax(mean, -1), log_q))
    means, divergences, spreads = [], [], []
    for draws in (first, second):
        logits, p = _softmax(mean.unsqueeze(1), draws, few)
        means.append(p.mean(2).mT if few else p.mean(1))
        log_normalizer = logits.amax(at) - p.amax(at).log()
        divergences.append(logits.sub_(at_q).mul_(p).sum(at) - log_normalizer)
        own = _classes_in_front(draws, few)
        weighted = torch.mul(own, centre, out=None if traced else logits)
        first_order = weighted.sum(at)
        spreads.append(0.5 * (weighted.mul_(own).sum(at) - first_order.square()))  # (B, S)
    change, difference, control = (each[0] - each[1] for each in (means, divergences, spreads))
    deviation = control - control.mean(1, keepdim=True)
    square = deviation.square().sum(1).clamp_min(torch.finfo(mean.dtype).tiny)
    slope = ((difference * deviation).sum(1) / square).clamp(0, 2)
    return change, slope * (control.mean(1) - known) - difference.mean(1) - (change * log_q).sum(-1)


def _classes_in_front(x: Tensor, few: bool) -> Tensor:
    """Few classes go in front, (B, S, K) → (K, B, S): a softmax over a short last dimension uses one lane of
    eight.
    """
    return x.movedim(-1, 0) if few else x


def _softmax(mean: Tensor, draws: Tensor, few: bool) -> tuple[Tensor, Tensor]:
    """Logits mean + draws (B, S, K), few classes in front, and their softmax, in memory that the next call
    overwrites.
    """
    mean, draws = _classes_in_front(mean, few), _classes_in_front(draws, few)
    logits = torch.add(mean, draws, out=scratch(draws, "logits", draws.shape))
    probs = torch.softmax(logits, 0 if few else -1, out=scratch(draws, "probs", draws.shape))
    return logits, probs


def half_spread(utility: UtilityNormal, probs: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """½ E[Σ p a² − (Σ p a)²] for probabilities p (B, K) and a = scale ⊙ (u − mean): (B,)."""
    weight = probs * scale
    square = (utility.var * weight.square()).sum(-1)
    if utility.form is not None:
        square = square + utility.form.project(weight).square().sum(-1)
    return 0.5 * ((weight * scale * utility.marginal_variance()).sum(-1) - square)


def add(latent: UtilityNormal, noise: UtilityNormal | None) -> UtilityNormal:
    """u = f + noise, in closed form."""
    if noise is None:
        return latent
    return UtilityNormal(latent.mean, latent.var + noise.var, join_factors(noise.form, latent.form))


def point_means(utility: UtilityNormal, eps: Tensor | None) -> Tensor:
    """Means μ + Fε at points ε (S, R) or (B, S, R): (B, K, S); (B, K, 1) without a factor."""
    form = utility.form
    if form is None or eps is None:
        return utility.mean.unsqueeze(-1)
    return (utility.mean.unsqueeze(1) + form.matmul(eps)).mT


def _factor_points(
    utility: UtilityNormal,
    count: int,
    generator: torch.Generator | None,
    seed: int | None,
    decorrelate: bool,
    part: tuple[int, int],
) -> Tensor | None:
    """Points of the factor's coordinates (S, R), or (B, S, R) with ``decorrelate``; None without a factor."""
    form, mean = utility.form, utility.mean
    if form is None:
        return None
    if not decorrelate and seed is not None:
        return constant_points(count, form.rank, seed, mean)
    points = IntegrationPoints("sobol", form.rank, 0, draw_seed(generator) if seed is None else seed, part)
    eps = points.block(0, count, like=mean)[0]
    return eps * random_signs(points, len(mean), mean).unsqueeze(1) if decorrelate else eps


def softmax_log_probs(
    utility: UtilityNormal,
    *,
    num_samples: int | None = None,
    likelihood: str = "log_mean",
    sampler: str = "sobol",
    generator: torch.Generator | None = None,
    seed: int | None = None,
    decorrelate: bool = False,
    part: tuple[int, int] = (0, 1),
) -> Tensor:
    """log E softmax(u) (``log_mean``), or E log softmax(u) (``mean_log``, Algorithm 1), differentiable.

    ``utility`` is already tempered, (B, K). ``num_samples``: points of the factor's coordinates; of all
    coordinates where all are sampled. Randomness comes from ``seed`` if given, else from ``generator``.
    ``decorrelate`` gives each example its own random signs of the shared points, so that a batch gradient
    averages over them; without it, as in prediction, an example does not depend on its batch. ``part``
    (i, n): these examples are the i-th of n equal parts of a batch, as where each process has one; with equal
    seeds they get the signs that they have in the whole batch. Where a posterior correlates the classes all
    coordinates are sampled.

    >>> u = UtilityNormal(torch.zeros(1, 3), torch.ones(1, 3))
    >>> softmax_log_probs(u)
    tensor([[-1.0986, -1.0986, -1.0986]])
    """
    if utility.mean.shape[-1] == 2 and sampler == "sobol":
        return _two_class(utility, likelihood)
    if is_sampled(utility, sampler) or separated_forms(utility)[1] is not None:
        rank, diagonal = num_coordinates(utility)
        seed = draw_seed(generator) if seed is None else seed
        points = IntegrationPoints(sampler, rank, diagonal, seed, part)
        flip = random_signs(points, utility.mean.shape[0], utility.mean) if decorrelate else None
        count = num_samples or EVALUATION_POINTS_SAMPLED
        out: Tensor = StreamedLogSoftmax.apply(points, count, likelihood, flip, *pack(utility))
        return out
    rest, _ = separated(utility)
    count = num_samples or num_evaluation_points(utility.mean.shape[-1])
    eps = _factor_points(rest, count, generator, seed, decorrelate, part)
    means = point_means(rest, eps)
    diagonal_of = Diagonal.of(rest.var, means.shape[2])
    if likelihood == "log_mean":
        out = LogProbs.apply(means, rest.var, diagonal_of)
        return out
    return rest.mean - LogNormalizer.apply(means, rest.var, diagonal_of).unsqueeze(-1)


def softmax_nll(
    utility: UtilityNormal,
    y: Tensor,
    *,
    num_samples: int | None = None,
    likelihood: str = "log_mean",
    sampler: str = "sobol",
    generator: torch.Generator | None = None,
    seed: int | None = None,
    decorrelate: bool = False,
    part: tuple[int, int] = (0, 1),
    compute: LabelLoss = label_loss,
) -> Tensor:
    """−log E softmax(u)_y of labels y (B,), or −Σ_k y_k log E softmax(u)_k of soft targets y (B, K): (B,).

    Arguments as of :func:`softmax_log_probs`. Value and gradient come from one pass, that of labels by
    ``compute``.
    """
    options = {"generator": generator, "seed": seed, "decorrelate": decorrelate, "part": part}
    soft, classes = y.dim() == 2, utility.mean.shape[-1]
    rest, contrasts = separated(utility)
    wide = is_sampled(utility, sampler) and (soft or _too_large(utility))
    sampled = sampler != "sobol" or wide or contrasts is not None
    if sampled or classes == 2 or likelihood == "mean_log":
        count = num_samples or num_training_points(classes, soft=likelihood != "mean_log")
        count = count * SAMPLED if sampled and num_samples is None else count
        log_probs = softmax_log_probs(
            utility,
            num_samples=count,
            likelihood=likelihood,
            sampler=sampler,
            **options,  # type: ignore[arg-type]
        )
        return -((y.to(log_probs) * log_probs).sum(-1) if soft else log_probs.gather(1, y[:, None])[:, 0])
    count = num_samples or num_training_points(classes, soft=soft)
    eps = _factor_points(rest, count, **options)  # type: ignore[arg-type]
    if soft:
        diagonal = Diagonal.of(rest.var, 1 if eps is None else count)
        nll: Tensor = SoftNLL.apply(point_means(rest, eps), rest.var, y.to(rest.mean), diagonal)
        return nll
    factor = None if rest.form is None else rest.form.dense().expand(len(y), -1, -1)
    inputs = rest.mean, rest.var, factor
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    nll, gradients = compute(*inputs, y, eps, wanted)
    return WithGradients.apply(nll, *inputs, *gradients) if wanted else nll


def num_label_points(utility: UtilityNormal) -> int:
    """Number of points of :func:`correlated_nll`, by the number of classes and the mean variance."""
    if utility.mean.shape[1] < MANY_CLASSES:
        return LABEL_POINTS
    return LABEL_POINTS_WIDE if float(utility.marginal_variance().mean()) >= WIDE else LABEL_POINTS_MANY


@torch.no_grad()
def correlated_nll(
    utility: UtilityNormal, y: Tensor, *, num_samples: int | None = None, seed: int = 0
) -> Tensor:
    """−log E softmax(u)_y of labels y (B,), from points in all coordinates: (B,), without gradients.

    For factors whose classes correlate, as under the Kronecker posterior. The points u are moved by t·Σr,
    with the gradient r of log p(y) and the covariance Σ, to where the label is probable; the weights make up
    for it.
    """
    mean, form = utility.mean, utility.form
    assert form is not None
    count = num_samples or num_label_points(utility)
    spread = (1 + math.pi / 8 * utility.marginal_variance()).sqrt()
    rise = F.one_hot(y, mean.shape[1]) - torch.softmax(mean / spread, -1)
    along = form.project(rise)  # (B, R)
    std = utility.var.sqrt()
    directions = torch.cat([along, std * rise], -1)
    length = directions.norm(dim=-1, keepdim=True)
    step = TOWARDS * (LONGEST / (TOWARDS * length).clamp_min(LONGEST))  # (B, 1)
    moved = mean + step * (utility.var * rise + form.matmul(along.unsqueeze(-2)).squeeze(-2))
    eps = constant_points(count, sum(num_coordinates(utility)), seed, mean)
    log_weight = -step * (directions[:, : eps.shape[1]] @ eps.mT) - 0.5 * (step * length).square()  # (B, S)
    centred = UtilityNormal(moved, std, form)
    out = torch.empty_like(mean[:, 0])
    for rows in example_chunks(mean, count):
        logits = draw(centred.rows(rows), std[rows], eps[:, : form.rank], eps[:, form.rank :])
        label = logits.gather(2, y[rows, None, None].expand(-1, count, 1)).squeeze(2)
        log_p = label - logits.logsumexp(-1)
        out[rows] = math.log(count) - (log_p + log_weight[rows]).logsumexp(1)
    return out


def _too_large(utility: UtilityNormal) -> bool:
    """Whether the factor is not written out for the loss of a label."""
    form = utility.form
    return form is not None and utility.mean.numel() * form.rank > DENSE_LIMIT


def difference(utility: UtilityNormal) -> tuple[Tensor, Tensor]:
    """Mean and variance of u₁ − u₀ for K = 2: each (B,)."""
    mean = utility.mean[:, 1] - utility.mean[:, 0]
    var = utility.var.sum(-1)
    form = utility.form
    if form is not None:
        dense = form.dense()
        var = var + (dense[:, 1] - dense[:, 0]).square().sum(-1)
    return mean, var


def _two_class(utility: UtilityNormal, likelihood: str) -> Tensor:
    mean, var = difference(utility)
    expectation = log_expected_sigmoid if likelihood == "log_mean" else expected_log_sigmoid
    return torch.stack([expectation(-mean, var), expectation(mean, var)], dim=-1)


def sigmoid_log_probs(utility: UtilityNormal, likelihood: str = "log_mean") -> tuple[Tensor, Tensor]:
    """log P(y_c = 1) and log P(y_c = 0): each (B, K). Only the marginal variances matter: no sampling."""
    var = utility.marginal_variance()
    expectation = log_expected_sigmoid if likelihood == "log_mean" else expected_log_sigmoid
    return expectation(utility.mean, var), expectation(-utility.mean, var)


def sigmoid_probs(utility: UtilityNormal) -> Tensor:
    """P(y_c = 1): (B, K)."""
    return log_expected_sigmoid(utility.mean, utility.marginal_variance()).exp()


def sigmoid_nll(utility: UtilityNormal, y: Tensor, likelihood: str = "log_mean") -> Tensor:
    """−log P(y) of multi-hot labels y (B, K), summed over classes: (B,)."""
    log_yes, log_no = sigmoid_log_probs(utility, likelihood)
    y = y.to(log_yes.dtype)
    return -(y * log_yes + (1 - y) * log_no).sum(-1)


@torch.no_grad()
def softmax_probs(
    utility: UtilityNormal,
    *,
    num_samples: int | None = None,
    sampler: str = "sobol",
    seed: int = 0,
    members: int = 1,
) -> tuple[Tensor, int]:
    """E softmax(u): probabilities (B, K), and the number of points that each took.

    ``num_samples``: points of the factor's coordinates; None: a fixed number, for an error of about
    :data:`TARGET_ERROR`, an M-th of it where M ``members`` will be averaged. Examples do not influence each
    other.

    >>> wide = UtilityNormal(torch.zeros(1, 4), torch.full((1, 4), 25.0))
    >>> softmax_probs(wide)
    (tensor([[0.2500, 0.2500, 0.2500, 0.2500]]), 0)
    """
    classes, count = utility.mean.shape[-1], num_points(utility, num_samples, sampler, members)
    if classes == 2 and sampler == "sobol":
        return _two_class(utility, "log_mean").exp(), count
    if is_sampled(utility, sampler):
        return controlled_mean(utility, sampler, count, seed), count
    if separated_forms(utility)[0] is None:
        return integrated_softmax(utility, seed, entropy=False, num_samples=num_samples)[0], count
    rest, contrasts = separated(utility)
    probs = _given_points(rest, count, seed)
    if contrasts is not None:
        probs = probs + _change_by_correlations(utility, rest, contrasts, seed)
    return _normalized(probs), count


def _given_points(utility: UtilityNormal, count: int, seed: int) -> Tensor:
    """E softmax(u) with independent classes but for the factor: (B, K)."""
    form, classes = utility.form, utility.mean.shape[1]
    assert form is not None
    # The time first, which has the best coordinate: its points are equidistant.
    points = constant_points(count, 1 + form.rank, seed, utility.mean)
    level, eps = (-torch.special.log_ndtr(points[:, 0])).log(), points[:, 1:]
    mean, std, shrink = within_table(utility.mean, utility.var)
    nodes, traced = Quantiles.of(mean, std), torch.compiler.is_compiling()
    scaled = UtilityNormal(mean, std.square(), form.weighted(1 / shrink))
    together = count if traced else chunk_of_rows(std, classes)
    pieces = []
    for rows in example_chunks(mean, count):
        part, own = scaled.rows(rows), nodes.rows(rows)
        total, weight = torch.zeros_like(part.mean), torch.zeros_like(part.mean[:, :1])
        for some, levels in zip(eps.split(together), level.split(together), strict=True):
            sums = own.probs(_written_means(part, some), levels)
            total, weight = total + sums[0], weight + sums[1]
        pieces.append(total / weight)
    return torch.cat(pieces)


def _written_means(utility: UtilityNormal, eps: Tensor) -> Tensor:
    """As :func:`point_means`, with the longer of the dimensions K and S as the inner one, in memory that the
    next call overwrites.
    """
    form, (batch, classes), count = utility.form, utility.mean.shape, len(eps)
    assert form is not None
    factor = form.dense().expand(batch, -1, -1)
    points = eps.expand(batch, -1, -1)
    if count > classes:
        out = scratch(eps, "means", (batch, classes, count))
        return torch.baddbmm(utility.mean.unsqueeze(2), factor, points.mT, out=out)
    out = scratch(eps, "means", (batch, count, classes))
    return torch.baddbmm(utility.mean.unsqueeze(1), points, factor.mT, out=out).mT


def _change_by_correlations(
    utility: UtilityNormal, rest: UtilityNormal, contrasts: Factor, seed: int
) -> Tensor:
    """What the correlations of contrasts change of E softmax(u) beside another factor: (B, K)."""
    classes = utility.mean.shape[-1]
    count = num_draws(classes)
    form = rest.form
    assert form is not None
    # One sequence for all: two, of whatever seeds, correlate point by point.
    eps = constant_points(count, form.rank + 2 * classes, seed + 1, utility.mean)
    of_factor, of_diagonal, of_contrasts = eps.split([form.rank, classes, classes], 1)
    pieces = []
    for rows in example_chunks(rest.mean, count):
        part = utility.rows(rows)
        others = rest.rows(rows).form
        assert others is not None
        noise = part.mean.unsqueeze(1) + part.var.sqrt().unsqueeze(1) * of_diagonal
        noise = noise + others.matmul(of_factor)
        draws = correlated_draws(contrasts.map(lambda t, rows=rows: t[rows]), of_contrasts)  # type: ignore[misc]
        pieces.append(mean_change(noise, *draws))
    return torch.cat(pieces)
