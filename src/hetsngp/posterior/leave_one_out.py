"""Approximate leave-one-out in closed form: training examples predicted as if each had been left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from hetsngp.models.classifier import Classifier, evaluating
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.latent import RandomFeatureGP
from hetsngp.posterior.calibration import CALIBRATION_BATCH_SIZE, HeldOut

# Largest K·m²·(m + n), multiplications, for calibration: some minutes of one core. Beyond it calibration does
# without.
MAX_OPERATIONS = 10**12
# Examples at a time for which a triangular system is solved.
CHUNK = 2**14
# Smallest 1 − leverage: rounding must not send an example that determines its own prediction to infinity.
MIN_ONE_MINUS_LEVERAGE = 0.02


def leave_one_out_operations(model: Classifier, examples: int) -> float:
    """Multiplications that leave-one-out takes: K·m²·(m + n)."""
    latent = _latent(model)
    m = latent.beta.shape[0]
    return model.num_classes * m * m * (m + examples)


def leave_one_out_examples(
    model: Classifier, batches: Iterable[tuple[Tensor, ...]], unique: Tensor
) -> HeldOut | None:
    """Training examples (x, y, weight) as calibration examples, which cost no held-out data.

    Only examples that are ``unique`` (n,) are used: a copy in the training data still has the label of the
    example that is left out. None where it would take too long, or where the training loss is not the NLL of
    the predictions (``likelihood="mean_log"``).
    """
    h, y, weight = (torch.cat(parts) for parts in zip(*batches, strict=True))
    too_long = leave_one_out_operations(model, len(h)) > MAX_OPERATIONS
    if too_long or model.head.link.likelihood != "log_mean" or not bool(unique.any()):
        return None
    unique = unique.to(h.device)
    shift = leave_one_out_shift(model, h, y, weight)
    return HeldOut(h[unique], y[unique], weight[unique], shift[unique])


def leave_one_out_shift(
    model: Classifier,
    h: Tensor,
    y: Tensor,
    weight: Tensor,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Shift of f at each training example h (n, D) that training without it would cause: (n, K).

    One Newton step from the MAP estimate, as in approximate leave-one-out cross-validation:
    f⁻ᵢ = f + v·g/(1 − w·v), with g and w the gradient and curvature of the example's loss in f and
    v = φᵀ(ΦᵀWΦ + I)⁻¹φ, for each class separately. Two classes move against each other under the softmax,
    so that their curvatures add, which is exact; more are taken as independent, which makes shifts up to a
    quarter too large or too small (one matrix of all classes would be exact). Curvature averaged over
    classes would need one matrix instead of K, but biases the temperature by more than the additional
    examples improve it. Labels y (n,) or soft targets (n, K). ``progress`` is called with 1 after each
    class.
    """
    head, latent = model.head, _latent(model)
    assert isinstance(head, GaussianHead)
    with evaluating(model):
        phi = torch.cat([latent.features(rows) for rows in h.split(CALIBRATION_BATCH_SIZE)])
        parts = zip(h.split(CALIBRATION_BATCH_SIZE), y.split(CALIBRATION_BATCH_SIZE), strict=True)
        gradients, curvatures = zip(*(_gradient_and_curvature(head, *part) for part in parts), strict=True)
        coupling = 2.0 if model.num_classes == 2 and not head.sigmoid else 1.0
        gradient = torch.cat(gradients) * weight[:, None]
        curvature = torch.cat(curvatures) * weight[:, None] * coupling
        shift = torch.empty_like(gradient)
        for c in range(model.num_classes):
            precision = (phi.mT * curvature[:, c]) @ phi
            precision.diagonal().add_(1.0)
            root = torch.linalg.cholesky(precision)
            variance = torch.cat(
                [
                    torch.linalg.solve_triangular(root, rows.mT, upper=False).square().sum(0)
                    for rows in phi.split(CHUNK)
                ]
            )
            rest = (1 - curvature[:, c] * variance).clamp_min(MIN_ONE_MINUS_LEVERAGE)
            shift[:, c] = variance * gradient[:, c] / rest
            if progress is not None:
                progress(1)
    return shift


def _latent(model: Classifier) -> RandomFeatureGP:
    head = model.head
    assert isinstance(head, GaussianHead)
    assert isinstance(head.latent, RandomFeatureGP)
    return head.latent


def _gradient_and_curvature(head: GaussianHead, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and curvature of −log p(y) in f at the MAP estimate and the training temperature: (B, K) each.

    The curvature is the Fisher information: the mean squared gradient over labels drawn from the model.
    Without noise it is p(1 − p)/τ².
    """
    if head.noise is None and not head.sigmoid and head.num_members == 1:
        temperature = head.training_temperature.to(h)
        p = torch.softmax(head.latent(h, posterior=False).mean / temperature, -1)
        target = y.to(p) if y.dim() == 2 else F.one_hot(y, p.shape[1])
        return (p - target) / temperature, p * (1 - p) / temperature.square()
    log_probs = head.log_probs(h)
    if head.sigmoid:  # the labels are independent
        probs = log_probs.sigmoid()
        yes, no = (_gradient(head, h, torch.full_like(probs, label)) for label in (1.0, 0.0))
        curvature = probs * yes.square() + (1 - probs) * no.square()
    else:
        curvature = torch.zeros_like(log_probs)
        for c, p in enumerate(log_probs.exp().unbind(1)):
            label = torch.full((len(h),), c, device=h.device)  # y may be soft targets
            curvature += p.unsqueeze(1) * _gradient(head, h, label).square()
    return _gradient(head, h, y), curvature


def _gradient(head: GaussianHead, h: Tensor, y: Tensor) -> Tensor:
    """Gradient of −log p(y) in f: (B, K)."""
    with torch.enable_grad():
        shift = torch.zeros(len(h), head.num_classes, dtype=h.dtype, device=h.device, requires_grad=True)
        nll = head.held_out_nll(h, y, head.training_temperature, posterior=False, shift=shift)
        (gradient,) = torch.autograd.grad(nll.sum(), shift)
    return gradient
