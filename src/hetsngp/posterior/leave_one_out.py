"""Each training example as if it had not been there: witnesses of the temperature that cost no data."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hetsngp.models.classifier import Classifier, evaluating
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.latent import RandomFeatureGP
from hetsngp.posterior.calibration import CALIBRATION_ROWS, HeldOut

# Multiplications, K·m²·(m + n): some minutes of one core. With more, held-out examples have to do.
MOST_WORK = 10**12
# 1 − leverage, at least: rounding must not send an example that decides for itself to infinity.
LEAST_REST = 0.02


def left_out(model: Classifier, batches: Iterable[tuple[Tensor, ...]], alone: Tensor) -> HeldOut | None:
    """What the mode would say of each training example (x, y, weight) if that one had been left out.

    One Newton step from the mode, as in approximate leave-one-out cross-validation: f⁻ᵢ = f + v·g/(1 − w·v),
    with g and w the slope and curvature of the example's loss in f and v = φᵀ(ΦᵀWΦ + I)⁻¹φ, for each class by
    itself. Curvature averaged over classes would need one matrix instead of K, but gives a temperature that
    is off by more than the witnesses are worth.

    Only examples that are ``alone`` (n,) bear witness: a copy of one that is left out still tells its label.
    None where it would take too long, or where the loss that was minimised is not that of the predictions
    (``likelihood="mean_log"``).
    """
    head = model.head
    assert isinstance(head, GaussianHead)
    latent = head.latent
    assert isinstance(latent, RandomFeatureGP)
    h, y, weight = (torch.cat(parts) for parts in zip(*batches, strict=True))
    n, m, k = len(h), latent.beta.shape[0], model.num_classes
    if k * m * m * (m + n) > MOST_WORK or head.link.likelihood != "log_mean" or not bool(alone.any()):
        return None
    alone = alone.to(h.device)
    with evaluating(model):
        phi = torch.cat([latent.features(rows) for rows in h.split(CALIBRATION_ROWS)])
        parts = zip(h.split(CALIBRATION_ROWS), y.split(CALIBRATION_ROWS), strict=True)
        slopes, curvatures = zip(*(_slope_and_curvature(head, *part) for part in parts), strict=True)
        slope, curvature = torch.cat(slopes) * weight[:, None], torch.cat(curvatures) * weight[:, None]
        shift = torch.empty_like(slope)
        for c in range(k):
            precision = (phi.mT * curvature[:, c]) @ phi
            precision.diagonal().add_(1.0)
            root = torch.linalg.cholesky(precision)
            variance = torch.linalg.solve_triangular(root, phi.mT, upper=False).square().sum(0)
            shift[:, c] = variance * slope[:, c] / (1 - curvature[:, c] * variance).clamp_min(LEAST_REST)
    return HeldOut(h[alone], y[alone], weight[alone], shift[alone])


def _slope_and_curvature(head: GaussianHead, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of −log p(y) in f at the mode, in training's temperature: (B, K) each.

    The curvature is Fisher's: the mean square of the slope, over labels as the model expects them. Without
    noise that is p(1 − p)/τ².
    """
    log_probs = head.log_probs(h)
    if head.sigmoid:  # the labels are independent
        probs = log_probs.sigmoid()
        yes, no = (_slope(head, h, torch.full_like(probs, label)) for label in (1.0, 0.0))
        curvature = probs * yes.square() + (1 - probs) * no.square()
    else:
        curvature = torch.zeros_like(log_probs)
        for c, p in enumerate(log_probs.exp().unbind(1)):
            curvature += p.unsqueeze(1) * _slope(head, h, torch.full_like(y, c)).square()
    return _slope(head, h, y), curvature


def _slope(head: GaussianHead, h: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        shift = torch.zeros(len(h), head.num_classes, dtype=h.dtype, device=h.device, requires_grad=True)
        nll = head.held_out_nll(h, y, head.training_temperature, posterior=False, shift=shift)
        (slope,) = torch.autograd.grad(nll.sum(), shift)
    return slope
