"""Leave-one-out examples: the MAP estimate without each training example, and calibration with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from tests.contract import toy
from tests.contract.toy import frozen
from torch import Tensor

import hetsngp
from hetsngp import fit_head
from hetsngp.fitting import lbfgs
from hetsngp.fitting.table_trainer import TrainingTable
from hetsngp.posterior import calibration, leave_one_out
from hetsngp.posterior.calibration import (
    HeldOut,
    best_temperature,
    choose_scale,
    choose_temperature,
    held_out_nll,
)

X, Y = toy.blobs(3, 15, flip=0.2)
X2, Y2 = toy.blobs(3, 40, flip=0.2, seed=1)
N = len(Y)
ONES, EVERY = torch.ones(N, dtype=torch.float64), torch.ones(N, dtype=torch.bool)


def at_the_mode(
    method: str = "sngp", weight: Tensor = ONES, monkeypatch: pytest.MonkeyPatch | None = None, **options: Any
) -> hetsngp.Classifier:
    model = toy.inducing(X, method, random_features=46, **options)
    if monkeypatch is not None:
        monkeypatch.setattr(lbfgs, "MIN_GAIN", 1e-10)
    lbfgs.fit_map([model], [[(X.double(), Y, weight)]])
    return model


def rows(weight: Tensor = ONES) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.split(20) for t in (X.double(), Y, weight)), strict=True))


def refitted_without(
    model: hetsngp.Classifier, row: int, weight: Tensor, x: Tensor = X, y: Tensor | None = None
) -> Tensor:
    """f at a training point, of a MAP estimate that is found anew without it."""
    phi = model.head.latent.features(x.double()).detach()  # type: ignore[union-attr, operator]
    labels, classes = Y if y is None else y, model.num_classes
    rest = weight.clone()
    rest[row] = 0.0

    def objective(flat: Any) -> tuple[float, Any]:
        beta = torch.tensor(flat).reshape(phi.shape[1], classes).requires_grad_()
        loss = (rest * F.cross_entropy(phi @ beta, labels, reduction="none")).sum()
        loss = loss + 0.5 * beta.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert beta.grad is not None
        return float(loss.detach()), beta.grad.numpy().ravel()

    start = np.zeros(phi.shape[1] * classes)
    found = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-5})
    return phi[row] @ torch.tensor(found.x).reshape(-1, classes)


@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_nearly_what_a_fit_without_the_example_says(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = 0.2 + 1.6 * torch.rand(N, generator=torch.Generator().manual_seed(5)).double()
    weight = weight / weight.mean() if weighted else ONES
    model = at_the_mode("sngp", weight, monkeypatch)
    found = leave_one_out.leave_one_out_examples(model, rows(weight), EVERY)
    assert found is not None
    assert found.shift is not None
    with torch.no_grad():
        f = model.head.latent(X.double(), posterior=False).mean  # type: ignore[union-attr]
    some = list(range(0, N, 3))
    exact = torch.stack([refitted_without(model, row, weight) for row in some])
    centred = [t - t.mean(1, keepdim=True) for t in (f[some], (f + found.shift)[some], exact)]
    missed, moved = (centred[1] - centred[2]).norm(), (centred[0] - centred[2]).norm()
    assert float(missed) < 0.35 * float(moved)
    # And by what it is used for: the loss of an example that was not met.
    labels = Y[some]
    seen, guessed, true = (
        float(F.cross_entropy(t, labels)) for t in (f[some], (f + found.shift)[some], exact)
    )
    assert abs(guessed - true) < 0.25 * abs(seen - true)


@pytest.mark.parametrize(("classes", "scale"), [(2, 1.0), (3, 1.0), (3, 5.0), (3, 0.2), (5, 1.0)])
def test_shifts_have_the_size_of_those_of_real_fits(
    classes: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the direction: too large shifts would make a model look worse out of sample than it is."""
    x, y = toy.blobs(classes, 120 // classes, flip=0.3)
    weight = torch.full((len(y),), scale, dtype=torch.float64)
    model = toy.inducing(x, classes=classes, random_features=26, dataset_size=len(y))
    model.dataset_size = float(weight.sum())
    monkeypatch.setattr(lbfgs, "MIN_GAIN", 1e-10)
    lbfgs.fit_map([model], [[(x.double(), y, torch.ones_like(weight))]])
    shift = leave_one_out.leave_one_out_shift(model, x.double(), y, weight)
    some = list(range(0, len(y), 5))
    with torch.no_grad():
        f = model.head.latent(x.double(), posterior=False).mean  # type: ignore[union-attr]
    exact = torch.stack([refitted_without(model, row, weight, x, y) for row in some]) - f[some]
    exact, guessed = (t - t.mean(1, keepdim=True) for t in (exact, shift[some]))
    slope = float((exact * guessed).sum() / exact.square().sum())
    assert slope == pytest.approx(1.0, abs=0.1 if classes == 2 else 0.25)


def test_it_is_a_newton_step_of_the_loss_without_the_example() -> None:
    """Labels under the sigmoid are independent, so that class by class is exact."""
    labels = torch.stack([X[:, 0] > 0, X[:, 1] > 0.5], 1).double()
    weight = 0.2 + torch.rand(N, generator=torch.Generator().manual_seed(5)).double()
    model = toy.inducing(X, classes=2, random_features=46, link="sigmoid", temperature=0.8)
    model.head.latent.beta.data.normal_(generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr]
    found = leave_one_out.leave_one_out_examples(model, [(X.double(), labels, weight)], EVERY)
    assert found is not None
    assert found.shift is not None
    phi = model.head.latent.features(X.double()).detach()  # type: ignore[union-attr, operator]
    probs = (phi @ model.head.latent.beta.detach() / 0.8).sigmoid()  # type: ignore[union-attr, operator]
    for row, c in ((0, 0), (7, 1), (30, 0)):
        rest = weight.clone()
        rest[row] = 0.0
        curvature = rest * probs[:, c] * (1 - probs[:, c]) / 0.64
        hessian = (phi.mT * curvature) @ phi + torch.eye(phi.shape[1]).double()
        slope = weight[row] * (probs[row, c] - labels[row, c]) / 0.8  # its part of the gradient
        step = phi[row] @ torch.linalg.solve(hessian, phi[row]) * slope
        assert float(found.shift[row, c]) == pytest.approx(float(step), rel=1e-6)


@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_the_slope_is_that_of_the_loss(method: str) -> None:
    model = at_the_mode(method, temperature=0.7).eval()
    head: Any = model.head
    h, tau = X.double(), head.training_temperature
    slope, curvature = leave_one_out._gradient_and_curvature(head, h, Y)
    step = 1e-5 * torch.eye(3, dtype=torch.float64)
    with torch.no_grad():
        for c in range(3):
            ahead, behind = (
                head.held_out_nll(h, Y, tau, posterior=False, shift=sign * step[c].expand(N, 3))
                for sign in (1, -1)
            )
            # With noise the points follow the label, and by another way at the next logits.
            error = 1e-6 if method == "sngp" else 0.005
            torch.testing.assert_close(slope[:, c], (ahead - behind) / 2e-5, rtol=1e-4, atol=error)
        probs = head.log_probs(h).exp()
    if method == "sngp":
        torch.testing.assert_close(curvature, probs * (1 - probs) / 0.49)
    else:
        each = torch.stack([leave_one_out._gradient(head, h, torch.full_like(Y, c)) for c in range(3)], 1)
        torch.testing.assert_close(curvature, (probs.unsqueeze(2) * each.square()).sum(1))


def test_wide_noise_flattens_the_loss() -> None:
    """p(1 − p) would take the label to be as telling as without noise."""
    model = at_the_mode("hetsngp").eval()
    head: Any = model.head
    head.noise.diagonal.bias.data.fill_(2.0)
    _, curvature = leave_one_out._gradient_and_curvature(head, X.double(), Y)
    with torch.no_grad():
        probs = head.log_probs(X.double()).exp()
    assert float((curvature.detach() / (probs * (1 - probs))).median()) < 0.8
    assert bool((curvature >= 0).all())


def test_the_other_likelihood_is_left_alone() -> None:
    model = at_the_mode("hetsngp", likelihood="mean_log")
    assert leave_one_out.leave_one_out_examples(model, rows(), EVERY) is None


def test_an_example_has_its_shift_in_the_loss() -> None:
    model = at_the_mode()
    found = leave_one_out.leave_one_out_examples(model, rows(), EVERY)
    assert found is not None
    assert found.shift is not None
    with torch.no_grad():
        f = model.head.latent(X.double(), posterior=False).mean  # type: ignore[union-attr]
        got = held_out_nll(model, found, torch.tensor(2.0), posterior=False)
    torch.testing.assert_close(got, F.cross_entropy((f + found.shift) / 2, Y, reduction="none"))
    assert float(got.mean()) > float(F.cross_entropy(f / 2, Y))  # or nothing was left out


def test_long_data_keep_their_shifts_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model = at_the_mode()
    found = leave_one_out.leave_one_out_examples(model, rows(), EVERY)
    assert found is not None
    whole = held_out_nll(model, found, torch.tensor(1.0), posterior=False)
    monkeypatch.setattr(calibration, "CALIBRATION_BATCH_SIZE", 7)
    torch.testing.assert_close(held_out_nll(model, found, torch.tensor(1.0), posterior=False), whole)


def test_too_many_classes_or_rows_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = at_the_mode()
    work = 3 * 46 * 46 * (46 + N)
    monkeypatch.setattr(leave_one_out, "MAX_OPERATIONS", work)
    assert leave_one_out.leave_one_out_examples(model, rows(), EVERY) is not None
    monkeypatch.setattr(leave_one_out, "MAX_OPERATIONS", work - 1)
    assert leave_one_out.leave_one_out_examples(model, rows(), EVERY) is None


def test_an_example_with_a_copy_is_not_used() -> None:
    table = TrainingTable(np.zeros((5, 1)), np.zeros(5), np.ones(5), np.array([3, 1, 3, 0, 2]))
    assert table.unique.tolist() == [False, True, False, True, True]
    model = at_the_mode()
    alone = torch.arange(N) % 2 == 0
    found = leave_one_out.leave_one_out_examples(model, rows(), alone)
    everyone = leave_one_out.leave_one_out_examples(model, rows(), EVERY)
    assert found is not None
    assert everyone is not None
    assert torch.equal(found.h, X.double()[alone])
    assert torch.equal(found.y, Y[alone])
    assert torch.equal(found.shift, everyone.shift[alone])  # type: ignore[arg-type, index]
    assert leave_one_out.leave_one_out_examples(model, rows(), ~EVERY) is None


def test_all_examples_set_the_temperature_and_the_held_out_what_the_posterior_changes() -> None:
    model = at_the_mode()
    held_out, left_out = HeldOut(X2.double(), Y2), leave_one_out.leave_one_out_examples(model, rows(), EVERY)
    assert left_out is not None
    pairs, further = [(model, held_out)], [(model, left_out)]
    with torch.no_grad():
        chosen = choose_temperature(pairs, further)
        together, by_held_out = best_temperature([*pairs, *further]), best_temperature(pairs)
        assert float(together) == chosen["mode_temperature"] == float(model.head.mode_temperature)
        assert float(together) != float(by_held_out)
        assert (chosen["held_out"], chosen["left_out"]) == (120, N)
        assert chosen["nll"] == pytest.approx(
            float(held_out_nll(model, held_out, together, posterior=False).mean())
        )
        posterior: Any = model.head.posterior
        posterior.fit(model.head.statistics(X.double()), model.head.fisher(X2.double()) / 120)  # type: ignore[operator]
        choose_scale(pairs, further)
        ratio = best_temperature(pairs, posterior=True) / by_held_out
        assert float(model.temperature) == pytest.approx(float(together * ratio), rel=1e-6)


def with_posterior() -> tuple[Any, Any]:
    """A model whose posterior has no scale yet, and the pair to choose it by."""
    model: Any = at_the_mode()
    pairs = [(model, HeldOut(X2.double(), Y2))]
    with torch.no_grad():
        choose_temperature(pairs)
        model.head.posterior.fit(model.head.statistics(X.double()), model.head.fisher(X2.double()) / 120)
    return model, pairs


def test_the_tolerance_bounds_the_scale() -> None:
    model, pairs = with_posterior()
    with torch.no_grad():
        scales = [choose_scale(pairs, (), nats)["scale"] for nats in (0.0, 0.01, 10.0)]
    assert scales[0] <= scales[1] < scales[2] == model.head.posterior.largest_scale


def test_a_tolerance_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tolerance is nats .* at least 0, got -1"):
        hetsngp.fit_posterior(at_the_mode(), rows(), [(X2.double(), Y2)], tolerance=-1.0)


# --- fit_head ---------------------------------------------------------------------------------------------


def test_fit_head_asks_its_training_data_too() -> None:
    report = fit_head(frozen(), [(X, Y)], [(X2, Y2)])
    assert (report.held_out, report.left_out) == (120, N)
    assert "on 120 held-out examples and 45 training examples by leave-one-out chose posterior scale" in str(
        report
    )
    twice = fit_head(frozen(), [(X, Y), (X[:5], Y[:5])], [(X2, Y2)])
    assert twice.left_out == N - 5
    assert fit_head(frozen(), [(X, Y)], None).left_out == 0
    by_adam = fit_head(frozen(), [(X, Y)], [(X2, Y2)], epochs=3)
    assert by_adam.left_out == 0  # which does not end at the MAP estimate
    assert "left out" not in str(by_adam)
    assert fit_head(frozen(), [(X, Y)], 0.1).left_out == 0  # folds hold out all there is


@pytest.mark.parametrize("part", [0.1, [(X2, Y2)]])  # in folds, and with one part
def test_fit_head_has_a_tolerance_of_its_own(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = []
    for tolerance in (0.001, 10.0):
        monkeypatch.setattr("hetsngp.frozen.head.FROZEN_TOLERANCE", tolerance)
        allowed.append(fit_head(frozen(), [(X, Y)], part).allowance)
    assert allowed[0] is not None
    assert allowed[0] < 1.0
    assert allowed[1] == 10.0


def test_few_held_out_examples_matter_less() -> None:
    """Of four held-out parts of 20, the temperatures differ less than their own best ones do."""
    parts = [(X2[i::6], Y2[i::6]) for i in range(4)]
    reports = [fit_head(frozen(), [(X, Y)], [part]) for part in parts]
    spread = np.std([np.log(r.mode_temperature or 0) for r in reports])
    by_adam = [fit_head(frozen(), [(X, Y)], [part], epochs=100, lr=0.05) for part in parts]
    assert spread < 0.7 * np.std([np.log(r.mode_temperature or 0) for r in by_adam])


def test_multi_hot_labels_are_left_out_one_by_one_too() -> None:
    x, labels = X2, torch.stack([X2[:, 0] > 0, X2[:, 1] > 0], 1).float()
    model = frozen(classes=2, link="sigmoid")
    report = fit_head(model, [(x[:80], labels[:80])], [(x[80:], labels[80:])])
    assert report.left_out == 80
    assert report.nll is not None
    assert report.nll < 2 * np.log(2)


# --- gradient and curvature in closed form, and soft targets ------------------------------------------------

SOFT = torch.softmax(2 * torch.randn(N, 3, generator=torch.Generator().manual_seed(8)).double(), 1)
ONE_HOT = F.one_hot(Y, 3).double()


@pytest.mark.parametrize("targets", [Y, SOFT], ids=["labels", "soft"])
def test_without_noise_they_are_the_derivatives_of_the_loss(targets: Tensor) -> None:
    model = at_the_mode("sngp", temperature=0.7).eval()
    head: Any = model.head
    gradient, curvature = leave_one_out._gradient_and_curvature(head, X.double(), targets)
    with torch.no_grad():
        f = head.latent(X.double(), posterior=False).mean
    tau = float(head.training_temperature)

    def loss(utility: Tensor, target: Tensor) -> Tensor:
        return -(target * torch.log_softmax(utility / tau, -1)).sum()

    soft = ONE_HOT if targets.dim() == 1 else targets
    slope = torch.func.vmap(torch.func.grad(loss))(f, soft)
    hessian = torch.func.vmap(torch.func.hessian(loss))(f, soft)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(curvature, hessian.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("targets", [Y, SOFT], ids=["labels", "soft"])
def test_without_noise_the_shift_is_that_of_autograd(
    targets: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of heads with noise, which only calls the loss."""
    model = at_the_mode("sngp", temperature=0.7)
    weight = 0.2 + torch.rand(N, generator=torch.Generator().manual_seed(5)).double()
    shift = leave_one_out.leave_one_out_shift(model, X.double(), targets, weight)

    def general(head: Any, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        probs = head.log_probs(h).exp()
        labels = [leave_one_out._gradient(head, h, torch.full((len(h),), c)) for c in range(3)]
        each = torch.stack(labels, 1)
        return leave_one_out._gradient(head, h, y), (probs.unsqueeze(2) * each.square()).sum(1)

    monkeypatch.setattr(leave_one_out, "_gradient_and_curvature", general)
    other = leave_one_out.leave_one_out_shift(model, X.double(), targets, weight)
    torch.testing.assert_close(shift, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_the_curvature_does_not_depend_on_the_form_of_the_targets(method: str) -> None:
    """The Fisher information is a mean over labels of the model, whatever was given."""
    model = at_the_mode(method, temperature=0.7).eval()
    head: Any = model.head
    of_labels, of_one_hot, of_soft = (
        leave_one_out._gradient_and_curvature(head, X.double(), y)[1] for y in (Y, ONE_HOT, SOFT)
    )
    assert torch.equal(of_labels, of_one_hot)
    assert torch.equal(of_labels, of_soft)


@pytest.mark.parametrize("method", ["sngp", "hetsngp"])
def test_the_slope_of_soft_targets_is_the_mean_of_those_of_labels(method: str) -> None:
    """−Σ_c t_c log p_c is linear in t."""
    model = at_the_mode(method, temperature=0.7).eval()
    head: Any = model.head
    h = X.double()
    of_classes = torch.stack(
        [leave_one_out._gradient(head, h, F.one_hot(torch.full((N,), c), 3).double()) for c in range(3)], 1
    )
    slope, _ = leave_one_out._gradient_and_curvature(head, h, SOFT)
    torch.testing.assert_close(slope, (SOFT.unsqueeze(2) * of_classes).sum(1), rtol=1e-9, atol=1e-10)


def test_soft_targets_are_left_out_as_a_fit_without_them_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy.inducing(X, "sngp", random_features=46)
    monkeypatch.setattr(lbfgs, "MIN_GAIN", 1e-10)
    lbfgs.fit_map([model], [[(X.double(), SOFT, ONES)]])
    shift = leave_one_out.leave_one_out_shift(model, X.double(), SOFT, ONES)
    monkeypatch.setitem(globals(), "Y", SOFT)  # cross_entropy of refitted_without takes soft targets too
    some = list(range(0, N, 5))
    exact = torch.stack([refitted_without(model, row, ONES) for row in some])
    with torch.no_grad():
        f = model.head.latent(X.double(), posterior=False).mean  # type: ignore[union-attr]
    seen, guessed, true = (t - t.mean(1, keepdim=True) for t in (f[some], (f + shift)[some], exact))
    assert float((guessed - true).norm()) < 0.35 * float((seen - true).norm())


def test_scales_that_are_far_worse_drop_out_on_some_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice, its cost and its temperature are those of all examples."""
    model, pairs = with_posterior()
    with torch.no_grad():
        want = choose_scale(pairs)
        temperature = float(model.temperature)
        for name, value in (("SCREENED_LOGITS", 0), ("ENOUGH", 60)):
            monkeypatch.setattr(calibration, name, value)
        found = choose_scale(pairs)
    assert found["scale"] == want["scale"]
    assert found["nll"] == pytest.approx(want["nll"], abs=1e-4)
    assert float(model.temperature) == pytest.approx(temperature, rel=0.02)
    assert len(found["scale_grid"]) <= len(want["scale_grid"])
