"""From the Gaussian over logits to probabilities, Eq. (6): E softmax(u/τ) or E σ(u/τ).

Without a factor the integral is one-dimensional (:mod:`hetsngp.functional.integration`) and takes no points.
The Kronecker posterior has a factor of rank K − 1 whose covariance is almost diagonal: its diagonal is
integrated, and the effect of the correlations is a mean of differences, between correlated and independent
draws from the same points. With another factor, as label noise has, all coordinates take points.

Sums over integration points are streamed (:mod:`hetsngp.functional.sampling`), in O(B·K) memory. With two
classes only the difference of the logits matters, and with the sigmoid only the marginal variance of each
logit: both integrals are one-dimensional and computed by quadrature, without sampling error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetsngp.functional.integration import probs_and_entropy
from hetsngp.functional.label_loss import LabelNLL
from hetsngp.functional.laplace import contrast_basis
from hetsngp.functional.quadrature import expected_log_sigmoid, log_expected_sigmoid
from hetsngp.functional.sampling import (
    MILD_VARIANCE,
    IntegrationPoints,
    StreamedLogSoftmax,
    constant_points,
    draw_seed,
    num_coordinates,
    pack,
    random_signs,
    replicate_sums,
    row_chunks,
)
from hetsngp.types import Factor, FactorSum, UtilityNormal, join_factors

TARGET_ERROR = 0.005
MAX_POINTS = 2**16
# Independent randomisations from which an error is estimated, and the number of points each starts with.
REPLICATES, FIRST = 8, 16
# The largest of K errors should stay under the target, not only a typical one: three standard errors.
SAFETY = 3.0
# Draws of the differences that the correlations of a posterior make: times the classes, and their least and
# largest number. Few classes may be far from independent, and cost little.
CORRELATED_LOGITS, FEWEST_DRAWS, MOST_DRAWS = 2**13, 64, 2048
# Elements of a factor (B, K, R) up to which a factored form is written out for the training loss.
DENSE_LIMIT = 2**24
# Up to this many classes a covariance is written in its K−1 contrasts before sampling: fewer coordinates,
# at the cost of one small Cholesky factorisation for each example. Up to 30 times fewer points at K = 3, 1.1
# to 1.6 at 10 (benchmarks/points.py).
CONTRAST_CLASSES = 32


def separated(utility: UtilityNormal) -> tuple[UtilityNormal, Factor | None]:
    """Utility with the diagonal of its contrasts in ``var``, and the factor of contrasts, if it has one.

    The softmax does not depend on the direction 1, which contrasts leave out: it gets their mean variance,
    which makes the covariance as diagonal as it can be.
    """
    form = utility.form
    parts = () if form is None else form.parts if isinstance(form, FactorSum) else (form,)
    contrasts = [part for part in parts if part.contrasts]
    if len(contrasts) != 1:  # several: moments of a mixture, which are taken as they are
        return utility, None
    own = contrasts[0]
    rest = join_factors(*(part for part in parts if not part.contrasts))
    return UtilityNormal(utility.mean, utility.var + _diagonal(own), rest), own


def _diagonal(contrasts: Factor) -> Tensor:
    assert contrasts.column is not None
    common = contrasts.column.square().mean(-1, keepdim=True) / len(contrasts.basis)
    return contrasts.variance() + common


def num_draws(num_classes: int) -> int:
    """Number of draws of :func:`correlated_draws`, a power of two.

    >>> num_draws(3), num_draws(10), num_draws(100)
    (2048, 512, 64)
    """
    wanted = min(max(CORRELATED_LOGITS // num_classes, FEWEST_DRAWS), MOST_DRAWS)
    return 1 << (wanted.bit_length() - 1)


def num_points(utility: UtilityNormal, num_samples: int | None) -> int:
    """Number of draws of :func:`integrated_softmax`: none where classes are independent."""
    return 0 if utility.form is None else num_samples or num_draws(utility.mean.shape[-1])


def correlated_draws(contrasts: Factor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draws of mean zero with the covariance of the contrasts, and with its diagonal alone: (B, S, K) each.

    From the same points: Σ^{1/2}ε and diag(Σ)^{1/2}ε, as near to each other as Σ is to its diagonal.
    """
    basis, column = contrasts.basis, contrasts.column
    assert column is not None
    eps = constant_points(count, len(basis), seed + 2, column)
    correlated = ((eps @ basis) * column.unsqueeze(1)) @ basis.mT
    return correlated, _diagonal(contrasts).sqrt().unsqueeze(1) * eps


def is_integrated(utility: UtilityNormal, sampler: str) -> bool:
    """Whether the softmax is integrated without points of a factor: three classes or more, and no factor but
    one of contrasts.
    """
    classes = utility.mean.shape[-1]
    return sampler == "sobol" and classes > 2 and separated(utility)[0].form is None


@torch.no_grad()
def integrated_softmax(
    utility: UtilityNormal, seed: int, *, entropy: bool, num_samples: int | None = None
) -> tuple[Tensor, Tensor]:
    """E softmax(u) (B, K) and E H(softmax(u)) (B,), NaN without ``entropy``, where :func:`is_integrated`.

    ``num_samples``: number of draws where classes correlate; None: :func:`num_draws`.
    """
    rest, contrasts = separated(utility)
    probs, given = probs_and_entropy(rest.mean, rest.var, entropy=entropy)
    # To the last bit where there is no variance.
    probs = torch.where(rest.var.amax(-1, keepdim=True) == 0, torch.softmax(rest.mean, -1), probs)
    if contrasts is None:
        return probs, given
    pieces, count = [], num_points(utility, num_samples)
    for rows in row_chunks(rest.mean, count):
        part = contrasts.map(lambda t, rows=rows: t[rows])  # type: ignore[misc]
        draws = correlated_draws(part, count, seed)
        pieces.append(_mean_change(rest.mean[rows].unsqueeze(1), *draws, entropy))
    change, more = (torch.cat(each) for each in zip(*pieces, strict=True))
    return (probs + change).clamp_min(0), given + more


def _mean_change(mean: Tensor, first: Tensor, second: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """Mean of softmax(mean + first) − softmax(mean + second) over draws (B, S, K), (B, K), and of the
    difference of their entropies, (B,), zero without ``entropy``.
    """
    few = mean.shape[-1] <= CONTRAST_CLASSES
    # A softmax over a short last dimension uses one lane of eight: few classes go in front.
    at = 0 if few else -1
    draws = [(mean + each).movedim(-1, 0).contiguous() if few else mean + each for each in (first, second)]
    p, q = (torch.softmax(each, at) for each in draws)
    change = (p - q).mean(2).mT if few else (p - q).mean(1)
    if not entropy:
        return change, torch.zeros_like(change[:, 0])
    more = torch.special.entr(p) - torch.special.entr(q)
    return change, more.sum(at).mean(1)


def in_contrasts(utility: UtilityNormal) -> UtilityNormal:
    """Utility with the same distribution of logit differences in K−1 coordinates instead of K + R.

    By a Cholesky factor rather than eigenvectors: those are arbitrary where the covariance is a multiple of
    I, and rounding would decide the result.
    """
    # In float64: a covariance of low rank is singular, and float32 rounds it below zero.
    dtype, jitter = (torch.float32, 1e-5) if utility.mean.device.type == "mps" else (torch.float64, 1e-10)
    basis = contrast_basis(utility.mean.shape[-1], utility.mean.to(dtype))
    form = utility.form
    dense = None if form is None else form.dense().to(dtype)
    wide = UtilityNormal(utility.mean.to(dtype), utility.var.to(dtype), dense)
    covariance = basis.mT @ wide.covariance() @ basis
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    diagonal += (jitter * diagonal.mean(-1, keepdim=True)).clamp_min(1e-30)  # moves no probability
    factor = basis @ torch.linalg.cholesky(covariance)
    return UtilityNormal(utility.mean, torch.zeros_like(utility.var), factor.to(utility.mean.dtype))


def softmax_log_probs(
    utility: UtilityNormal,
    *,
    num_samples: int,
    likelihood: str = "log_mean",
    sampler: str = "sobol",
    generator: torch.Generator | None = None,
    seed: int | None = None,
    decorrelate: bool = False,
    part: tuple[int, int] = (0, 1),
) -> Tensor:
    """log E softmax(u) (``log_mean``), or E log softmax(u) (``mean_log``, Algorithm 1), differentiable.

    ``utility`` is already tempered, (B, K). Randomness comes from ``seed`` if given, else from
    ``generator``. ``decorrelate`` gives each example its own random signs of the shared points, so that a
    batch gradient averages over them; without it, as in prediction, an example does not depend on its batch.
    ``part`` (i, n): these examples are the i-th of n equal parts of a batch, as where each process has one;
    with equal seeds they get the signs that they have in the whole batch.

    >>> u = UtilityNormal(torch.zeros(1, 3), torch.ones(1, 3))
    >>> softmax_log_probs(u, num_samples=64, seed=0).exp().sum()
    tensor(1.)
    """
    if utility.mean.shape[-1] == 2 and sampler == "sobol":
        return _two_class(utility, likelihood)
    rank, diagonal = num_coordinates(utility)
    if rank + diagonal == 0:
        return torch.log_softmax(utility.mean, -1)
    points = IntegrationPoints(sampler, rank, diagonal, draw_seed(generator) if seed is None else seed, part)
    flip = random_signs(points, utility.mean.shape[0], utility.mean) if decorrelate else None
    out: Tensor = StreamedLogSoftmax.apply(points, num_samples, likelihood, flip, *pack(utility))
    return out


def softmax_nll(
    utility: UtilityNormal,
    y: Tensor,
    *,
    num_samples: int,
    sampler: str = "sobol",
    generator: torch.Generator | None = None,
    seed: int | None = None,
    decorrelate: bool = False,
    part: tuple[int, int] = (0, 1),
) -> Tensor:
    """−log E softmax(u)_y of labels y (B,): (B,), as from :func:`softmax_log_probs`, with the same arguments.

    Value and gradient come from one pass over the points, several times faster and less noisy than all K
    log-probabilities, which are used only where a factored form is too large to be written out.
    """
    batch, classes = utility.mean.shape
    if classes == 2 and sampler == "sobol":
        mean, var = difference(utility)
        return -log_expected_sigmoid((2 * y - 1) * mean, var)
    rank, diagonal = num_coordinates(utility)
    form = utility.form
    large = (
        form is not None
        and not (isinstance(form, Factor) and form.is_dense)
        and batch * classes * rank > DENSE_LIMIT
    )
    if rank + diagonal == 0 or large:
        log_probs = softmax_log_probs(
            utility,
            num_samples=num_samples,
            sampler=sampler,
            generator=generator,
            seed=seed,
            decorrelate=decorrelate,
            part=part,
        )
        return -log_probs.gather(1, y.unsqueeze(1)).squeeze(1)
    points = IntegrationPoints(sampler, rank, diagonal, draw_seed(generator) if seed is None else seed, part)
    std = utility.var.sqrt() if diagonal else None
    factor = None if form is None else form.dense().expand(batch, -1, -1).mT
    if decorrelate:
        signs = random_signs(points, batch, utility.mean)
        std = None if std is None else std * signs[:, rank:]
        factor = None if factor is None else factor * signs[:, :rank, None]
    factor = None if factor is None else factor.contiguous()
    out: Tensor = LabelNLL.apply(points, num_samples, y, utility.mean, std, factor)
    return out


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
    target_error: float = TARGET_ERROR,
    max_points: int = MAX_POINTS,
    first: int = FIRST,
) -> tuple[Tensor, Tensor]:
    """E softmax(u): probabilities (B, K) and the number of points used for each example (B,).

    Without a factor, or with that of a posterior alone, by :func:`integrated_softmax`. Otherwise, with
    ``num_samples`` None, the number follows from the width of the noise: the standard error of every
    probability is estimated from eight independent randomisations, and an example is finished when three
    times its largest is below ``target_error``. Examples do not influence each other. ``first``: number of
    points that each randomisation starts with.

    >>> wide = UtilityNormal(torch.zeros(1, 4), torch.full((1, 4), 25.0))
    >>> probs, points = softmax_probs(wide)
    >>> bool((probs - 0.25).abs().max() < 0.005)
    True
    """
    batch, classes = utility.mean.shape
    none = torch.zeros(batch, dtype=torch.long, device=utility.mean.device)
    if classes == 2 and sampler == "sobol":
        return _two_class(utility, "log_mean").exp(), none
    rank, diagonal = num_coordinates(utility)
    if rank + diagonal == 0:
        return torch.softmax(utility.mean, -1), none
    if is_integrated(utility, sampler):
        probs = integrated_softmax(utility, seed, entropy=False, num_samples=num_samples)[0]
        return probs, none + num_points(utility, num_samples)
    if sampler == "sobol" and classes <= CONTRAST_CLASSES:
        utility = in_contrasts(utility)
        rank, diagonal = classes - 1, 0
    points = IntegrationPoints(sampler, rank, diagonal, seed)
    mild = none.bool()
    if sampler == "sobol" and classes > CONTRAST_CLASSES:
        mild = utility.marginal_variance().amax(-1) <= MILD_VARIANCE
    probs, spent = torch.empty_like(utility.mean), none.clone()
    for controlled in (True, False):
        rows = (mild == controlled).nonzero().squeeze(-1)
        if len(rows):
            part = utility.rows(rows)
            if num_samples is not None:
                sums = replicate_sums(part, points, 0, num_samples, 1, controlled=controlled)[:, 0]
                probs[rows], spent[rows] = sums / num_samples, num_samples
            else:
                probs[rows], spent[rows] = _adaptive(
                    part, points, target_error, max_points, controlled, first
                )
    return probs.clamp_min_(0), spent


def _adaptive(
    utility: UtilityNormal,
    points: IntegrationPoints,
    target_error: float,
    max_points: int,
    controlled: bool,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Double the points of every example until its estimated error is below the target or none are left."""
    batch, classes = utility.mean.shape
    probs = torch.empty_like(utility.mean)
    spent = torch.zeros(batch, dtype=torch.long, device=probs.device)
    active = torch.arange(batch, device=probs.device)
    sums = probs.new_zeros(batch, REPLICATES, classes)
    done, size = 0, first
    while len(active):
        part = utility.rows(active)
        sums = sums + replicate_sums(part, points, done, size, REPLICATES, controlled=controlled)
        done += size
        size = done  # doubling keeps the wasted work under one half
        means = sums / done
        centre = means.mean(1, keepdim=True)
        variance = (means - centre).square().sum(1) / (REPLICATES - 1)
        error = (variance.amax(-1) / REPLICATES).sqrt()
        finished = error * SAFETY <= target_error
        if done * REPLICATES * 2 > max_points:
            finished = torch.ones_like(finished)
        rows = active[finished]
        probs[rows], spent[rows] = means[finished].mean(1), done * REPLICATES
        active, sums = active[~finished], sums[~finished]
    return probs, spent
