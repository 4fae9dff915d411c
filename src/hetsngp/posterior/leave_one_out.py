"""Training examples as calibration examples, by approximate leave-one-out: they cost no held-out data."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hetsngp.models.classifier import Classifier, evaluating
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.latent import RandomFeatureGP
from hetsngp.posterior.calibration import CALIBRATION_BATCH_SIZE, HeldOut

# Largest K·m²·(m + n), multiplications: some minutes of one core. Beyond it leave-one-out is skipped.
MAX_OPERATIONS = 10**12
# Smallest 1 − leverage: rounding must not send an example that determines its own prediction to infinity.
MIN_ONE_MINUS_LEVERAGE = 0.02


def leave_one_out_examples(
    model: Classifier, batches: Iterable[tuple[Tensor, ...]], unique: Tensor
) -> HeldOut | None:
    """Training examples (x, y, weight) with the shift of f that leaving each of them out would cause.

    One Newton step from the MAP estimate, as in approximate leave-one-out cross-validation:
    f⁻ᵢ = f + v·g/(1 − w·v), with g and w the gradient and curvature of the example's loss in f and
    v = φᵀ(ΦᵀWΦ + I)⁻¹φ, for each class separately. Curvature averaged over classes would need one matrix
    instead of K, but biases the temperature by more than the additional examples improve it.

    Only examples that are ``unique`` (n,) are used: a copy in the training data still has the label of the
    example that is left out. None where it would take too long, or where the training loss is not the NLL of
    the predictions (``likelihood="mean_log"``).
    """
    head = model.head
    assert isinstance(head, GaussianHead)
    latent = head.latent
    assert isinstance(latent, RandomFeatureGP)
    h, y, weight = (torch.cat(parts) for parts in zip(*batches, strict=True))
    n, m, k = len(h), latent.beta.shape[0], model.num_classes
    if k * m * m * (m + n) > MAX_OPERATIONS or head.link.likelihood != "log_mean" or not bool(unique.any()):
        return None
    unique = unique.to(h.device)
    with evaluating(model):
        phi = torch.cat([latent.features(rows) for rows in h.split(CALIBRATION_BATCH_SIZE)])
        parts = zip(h.split(CALIBRATION_BATCH_SIZE), y.split(CALIBRATION_BATCH_SIZE), strict=True)
        gradients, curvatures = zip(*(_gradient_and_curvature(head, *part) for part in parts), strict=True)
        gradient, curvature = torch.cat(gradients) * weight[:, None], torch.cat(curvatures) * weight[:, None]
        shift = torch.empty_like(gradient)
        for c in range(k):
            precision = (phi.mT * curvature[:, c]) @ phi
            precision.diagonal().add_(1.0)
            root = torch.linalg.cholesky(precision)
            variance = torch.linalg.solve_triangular(root, phi.mT, upper=False).square().sum(0)
            rest = (1 - curvature[:, c] * variance).clamp_min(MIN_ONE_MINUS_LEVERAGE)
            shift[:, c] = variance * gradient[:, c] / rest
    return HeldOut(h[unique], y[unique], weight[unique], shift[unique])


def _gradient_and_curvature(head: GaussianHead, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and curvature of −log p(y) in f at the MAP estimate and the training temperature: (B, K) each.

    The curvature is the Fisher information: the mean squared gradient over labels drawn from the model.
    Without noise it is p(1 − p)/τ².
    """
    log_probs = head.log_probs(h)
    if head.sigmoid:  # the labels are independent
        probs = log_probs.sigmoid()
        yes, no = (_gradient(head, h, torch.full_like(probs, label)) for label in (1.0, 0.0))
        curvature = probs * yes.square() + (1 - probs) * no.square()
    else:
        curvature = torch.zeros_like(log_probs)
        for c, p in enumerate(log_probs.exp().unbind(1)):
            curvature += p.unsqueeze(1) * _gradient(head, h, torch.full_like(y, c)).square()
    return _gradient(head, h, y), curvature


def _gradient(head: GaussianHead, h: Tensor, y: Tensor) -> Tensor:
    """Gradient of −log p(y) in f: (B, K)."""
    with torch.enable_grad():
        shift = torch.zeros(len(h), head.num_classes, dtype=h.dtype, device=h.device, requires_grad=True)
        nll = head.held_out_nll(h, y, head.training_temperature, posterior=False, shift=shift)
        (gradient,) = torch.autograd.grad(nll.sum(), shift)
    return gradient
