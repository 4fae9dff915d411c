"""What processes that share a batch, or a pass over the data, do in parts is what one does with all of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contract import toy
from torch import Tensor

import hetsngp
from hetsngp.choices import NORMALIZATIONS, SAMPLERS
from hetsngp.functional.link import softmax_log_probs, softmax_nll
from hetsngp.nn.latent import FeatureNormalizer, Kernel, RandomFeatureGP
from hetsngp.nn.posteriors import Statistics
from hetsngp.types import UtilityNormal
from hetsngp.validation import check_class_labels, check_inputs, check_weight, eager, skip_validation

BATCH = 12


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def utility(classes: int = 5, rank: int = 2, *, diagonal: bool = True) -> UtilityNormal:
    g = seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    var = draw(BATCH, classes).square() + 0.1 if diagonal else torch.zeros(BATCH, classes).double()
    return UtilityNormal(draw(BATCH, classes), var, draw(BATCH, classes, rank) if rank else None)


def soft_targets(u: UtilityNormal, y: Tensor) -> Tensor:
    """0.9 of the label, the rest for all classes alike."""
    classes = u.mean.shape[1]
    return 0.9 * torch.nn.functional.one_hot(y, classes).to(u.mean) + 0.1 / classes


# --- integration points ---------------------------------------------------------------------------------

UTILITIES = {
    "both": lambda: utility(),
    "diagonal": lambda: utility(rank=0),
    "factor": lambda: utility(diagonal=False),
    "Latin hypercube": lambda: utility(classes=140),
}


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", UTILITIES)
def test_each_row_of_a_part_gets_the_points_it_has_in_the_batch(kind: str, sampler: str, parts: int) -> None:
    u = UTILITIES[kind]()
    y = torch.randint(u.mean.shape[1], (BATCH,), generator=seed(2))
    size = BATCH // parts
    options: dict[str, Any] = {"num_samples": 20, "sampler": sampler, "decorrelate": True}
    losses: list[Callable[..., Tensor]] = [
        lambda u, y, g, **part: softmax_nll(u, y, generator=g, **options, **part),
        lambda u, y, g, **part: softmax_nll(u, soft_targets(u, y), generator=g, **options, **part),
        lambda u, y, g, **part: softmax_log_probs(u, generator=g, **options, **part),
        lambda u, y, g, **part: softmax_log_probs(u, generator=g, likelihood="mean_log", **options, **part),
    ]
    whole, shared = seed(7), [seed(7) for _ in range(parts)]
    for loss in losses * 2:  # from the second on: in step with each other
        want = loss(u, y, whole)
        rows = [slice(i * size, (i + 1) * size) for i in range(parts)]
        pieces = [loss(u.rows(rows[i]), y[rows[i]], shared[i], part=(i, parts)) for i in range(parts)]
        torch.testing.assert_close(torch.cat(pieces), want, rtol=1e-12, atol=1e-12)
    if kind == "diagonal" and sampler == "sobol":  # the diagonal is integrated: no points
        assert torch.equal(losses[0](u, y, seed(8)), losses[0](u, y, seed(9)))
    elif parts > 1:  # as a batch of its own it gets other points
        last = rows[-1]
        states = whole.get_state()
        want = losses[0](u, y, whole)[last]
        whole.set_state(states)
        assert (losses[0](u.rows(last), y[last], whole) - want).abs().max() > 1e-6


def test_the_loss_of_a_model_is_the_mean_over_parts() -> None:
    """In training mode, gradients and statistics too."""
    x, y = toy.blobs(3, 8)
    x = x.double()
    whole = toy.build("hetsngp", num_samples=16).double().train()
    halves = [copy.deepcopy(whole) for _ in range(2)]
    loss = whole.loss(x, y, generator=seed(3))
    loss.backward()
    h = copy.deepcopy(halves[0]).backbone(x).detach()
    losses = []
    for index, (rows, half) in enumerate(zip((slice(12), slice(12, 24)), halves, strict=True)):
        half.head.batch_part = (index, 2)
        normalizers = [m for m in half.modules() if isinstance(m, FeatureNormalizer)]
        assert normalizers
        for normalizer in normalizers:
            normalizer.gather = lambda _: h
        losses.append(half.loss(x[rows], y[rows], generator=seed(3)))
        losses[-1].backward()
    assert float((losses[0] + losses[1] - 2 * loss).detach()) == pytest.approx(0, abs=1e-12)
    for (name, p), a, b in zip(
        whole.named_parameters(), *(half.parameters() for half in halves), strict=True
    ):
        torch.testing.assert_close((a.grad + b.grad) / 2, p.grad, rtol=1e-9, atol=1e-12, msg=name)
    for half in halves:
        for (name, want), got in zip(whole.named_buffers(), half.buffers(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=name)


# --- running statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NORMALIZATIONS)
def test_gathered_features_give_the_statistics_of_the_whole_batch(kind: str) -> None:
    whole, part = (FeatureNormalizer(4, kind).double().train() for _ in range(2))
    given: list[Tensor] = []
    for step in range(3):
        h = torch.randn(10, 4, generator=seed(step), dtype=torch.float64, requires_grad=True) * (1 + step)

        def gather(rows: Tensor, h: Tensor = h) -> Tensor:
            given.append(rows)
            return h.detach()

        part.gather = gather
        want, got = whole(h), part(h[6:])
        torch.testing.assert_close(got, want[6:])
        assert given[-1].shape == (4, 4)  # its own rows, and no graph with them
        assert not given[-1].requires_grad
        assert got.requires_grad
        for (name, a), b in zip(part.named_buffers(), whole.buffers(), strict=True):
            assert torch.equal(a, b), name
    part.eval()(h[6:])
    assert len(given) == 3  # in training only
    assert FeatureNormalizer.gather is None


# --- sums over data -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 4), (3, 4, 4)])
@pytest.mark.parametrize("in_place", [False, True])
def test_statistics_are_added_up_in_one_call(shape: tuple[int, ...], in_place: bool) -> None:
    def draw(value: int) -> Statistics:
        g = seed(value)
        sums = torch.randn(*shape, generator=g, dtype=torch.float64)
        return Statistics(10.5 + value, sums, torch.randn(3, 3, generator=g))

    mine, other = draw(0), draw(1)
    given: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        given.append(tensor.clone())
        return tensor

    other.reduced(record)
    calls: list[Tensor] = []

    def reduce(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        return tensor.add_(given[0]) if in_place else tensor + given[0]

    before = mine.sums.clone()
    total, want = mine.reduced(reduce), mine + other
    assert len(calls) == 1
    assert total.count == pytest.approx(want.count, rel=1e-12)
    assert isinstance(total.count, float)
    torch.testing.assert_close(total.sums, want.sums)
    torch.testing.assert_close(total.fisher, want.fisher)
    assert torch.equal(mine.sums, before)


def in_parts(models: list[Any], parts: list[Any], *calibration: Any) -> list[Any]:
    """fit_posterior in two processes, one after the other: first what each has to say is written down."""
    said: list[list[Tensor]] = []
    for model, part in zip(models, parts, strict=True):
        words: list[Tensor] = []

        def record(tensor: Tensor, words: list[Tensor] = words) -> Tensor:
            words.append(tensor.clone())
            return tensor

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hetsngp.fit_posterior(copy.deepcopy(model), part, *calibration, reduce=record)
        said.append(words)
    reports = []
    for rank, (model, part) in enumerate(zip(models, parts, strict=True)):
        others = iter(said[1 - rank])

        def add(tensor: Tensor, others: Any = others) -> Tensor:
            return tensor + next(others)

        reports.append(hetsngp.fit_posterior(model, part, *calibration, reduce=add))
        assert next(others, None) is None
    return reports


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("posterior", ["kronecker", "exact", "shared"])
def test_a_posterior_from_uneven_parts(posterior: str, calibrated: bool) -> None:
    x, y = toy.blobs(3, 9)
    held_out = [toy.blobs(3, 8, seed=1)] if calibrated else None
    whole = toy.trained("hetsngp", fit=False, posterior=posterior)
    twins = [copy.deepcopy(whole) for _ in range(2)]
    want = hetsngp.fit_posterior(whole, [(x, y)], held_out)
    parts = [[(x[:5], y[:5]), (x[5:8], y[5:8])], [(x[8:], y[8:])]]
    reports = in_parts(twins, parts, held_out)
    assert reports[0] == reports[1]
    assert reports[0].count == want.count == 27
    assert reports[0].temperature == pytest.approx(want.temperature, rel=1e-4)
    assert reports[0].scale == pytest.approx(want.scale)
    far = 3 * toy.blobs(3, 4, seed=2)[0]
    a, b, c = (model.predict(far) for model in (*twins, whole))
    assert toy.same_bits(a, b)
    torch.testing.assert_close(a.probs, c.probs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(a.latent_variance, c.latent_variance, rtol=1e-3, atol=1e-3)


def test_training_data_in_the_calibration_are_noticed_wherever_they_are() -> None:
    """A third of it turns up in either process: two thirds together, which is most of it."""
    x, y = toy.blobs(3, 8)
    new = toy.blobs(3, 8, seed=1)
    calibration = [(torch.cat([x[:4], x[12:16], new[0][:4]]), torch.cat([y[:4], y[12:16], new[1][:4]]))]
    models = [toy.trained("sngp", fit=False) for _ in range(2)]
    with pytest.warns(UserWarning, match="67% of the calibration examples are also in the training data"):
        in_parts(models, [[(x[:12], y[:12])], [(x[12:], y[12:])]], calibration)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hetsngp.fit_posterior(models[0], [(x[:12], y[:12])], calibration)  # a third is no reason


# --- batches that were checked --------------------------------------------------------------------------


def test_skip_validation_checks_no_values() -> None:
    x, y, weight = torch.tensor([[torch.nan]]), torch.tensor([7]), torch.tensor([-1.0])

    def looked_at() -> None:
        assert eager(x)
        with pytest.raises(ValueError, match="NaN"):
            check_inputs(x)
        with pytest.raises(ValueError, match="labels from 7 to 7"):
            check_class_labels(y, 3, 1)
        with pytest.raises(ValueError, match="not negative"):
            check_weight(weight, 1)

    looked_at()
    with skip_validation():
        assert not eager(x)
        with skip_validation():
            check_inputs(x)
        check_inputs(x)  # still
        check_class_labels(y, 3, 1)
        check_weight(weight, 1)
        with pytest.raises(ValueError, match=r"y has shape \(1,\)"):  # what costs nothing is checked
            check_class_labels(y, 3, 2)
        with pytest.raises(ValueError, match="weights have shape"):
            check_weight(weight, 2)
    looked_at()
    with pytest.raises(KeyError), skip_validation():
        raise KeyError
    looked_at()


def test_a_linear_kernel_is_half_of_the_prior_variance() -> None:
    gp = RandomFeatureGP(6, 3, Kernel(8, amplitude=4.0, normalization="direction", linear_share=0.5))
    h = torch.randn(50, 6)
    phi = gp.features(h)  # in training mode, by the statistics of this batch
    z = gp.normalizer.normalized(h)
    assert phi.shape == (50, gp.num_kernel_features) == (50, 8 + 6)
    assert torch.allclose(phi.square().sum(1), torch.full((50,), 16.0))
    assert torch.allclose(phi[:, 8:] @ phi[:, 8:].mT, 8.0 * z @ z.mT / 6, atol=1e-4)
