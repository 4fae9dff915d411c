"""One contract for every method in ``hetsngp.models.methods.METHODS``; a new entry there is tested too."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from tests.contract.toy import FIELDS, GAUSSIAN, GP, MIXTURES, NOISY, same_bits
from tests.reference import oracles
from torch import Tensor

import hetsngp
from hetsngp.choices import NOISES, POSTERIORS
from hetsngp.functional.link import EVALUATION_POINTS, sigmoid_log_probs, softmax_nll
from hetsngp.models.methods import METHODS
from hetsngp.nn.backbones import ResidualMLP, WideResNet
from hetsngp.nn.dirichlet import LOG_UNIT, DirichletHead
from hetsngp.nn.heads import GaussianHead

UNCERTAINTIES = (
    "total_uncertainty",
    "data_uncertainty",
    "model_uncertainty",
    "function_uncertainty",
    "member_uncertainty",
    "latent_variance",
)

# Every method with its defaults; then each posterior, noise, link and number of members where they mean
# something. A posterior is shared by members, so for mixtures two kinds that are made differently will do.
VARIANTS = [
    *((method, {}) for method in METHODS),
    *(
        (method, {"posterior": kind})
        for method in GP
        for kind in (("exact", "none") if method in MIXTURES else POSTERIORS)
        if kind != "kronecker"
    ),
    *((method, {"noise": kind}) for method in NOISY for kind in NOISES if kind != "low_rank"),
    *((method, {"link": "sigmoid"}) for method in GAUSSIAN),
    *(("hetsngp", {"normalization": kind}) for kind in ("direction", "polar")),
    *((method, {"kernel": "rbf+linear"}) for method in ("sngp", "hetsngp_mimo")),
    *((method, {"num_members": 2}) for method in MIXTURES),
    *((method, {"input_repetition": 0.5, "batch_repetition": 2}) for method in MIXTURES),
]


def _name(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *map(str, variant[1].values())])


every_method = pytest.mark.parametrize("method", METHODS)
every_variant = pytest.mark.parametrize(("method", "options"), VARIANTS, ids=map(_name, VARIANTS))


def _data(classes: int = 3, **options: Any) -> tuple[Tensor, Tensor]:
    x, y = toy.blobs(classes, 6)
    return x, toy.labels_for(y, classes, options)


def _stochastic(model: Any) -> bool:
    """Whether this model's softmax needs integration points (more than two classes, some variance)."""
    head = model.head
    return isinstance(head, GaussianHead) and (head.noise is not None or head.has_posterior)


def _refuses_a_gaussian() -> Any:
    """Error of a head without a Gaussian over logits, which names the alternative."""
    return pytest.raises(TypeError, match=r"no Gaussian over logits; use model\.predict\(x\)")


def _seed(value: int) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def _assert_well_formed(
    p: Any, rows: int, classes: int, dtype: torch.dtype, *, sigmoid: bool = False
) -> None:
    for name in FIELDS:
        field = getattr(p, name)
        wide = name in ("probs", "clean_probs")
        assert field.shape == ((rows, classes) if wide else (rows,)), name
        assert field.dtype == (torch.long if name == "num_points" else dtype), name
        assert not field.requires_grad, name
        assert torch.isfinite(field.double()).all(), name
    for name in UNCERTAINTIES:
        assert (getattr(p, name) >= 0).all(), name
    for probs in (p.probs, p.clean_probs):
        assert ((probs >= 0) & (probs <= 1)).all()
        if not sigmoid:
            torch.testing.assert_close(probs.sum(-1), torch.ones(rows, dtype=dtype), rtol=0, atol=2e-6)
    # Exact to the bit: total is defined as the sum.
    assert torch.equal(p.data_uncertainty + p.model_uncertainty, p.total_uncertainty)
    parts = p.data_uncertainty + p.function_uncertainty + p.member_uncertainty
    torch.testing.assert_close(parts, p.total_uncertainty, rtol=1e-5, atol=1e-6)
    assert torch.equal(p.labels, p.probs.argmax(-1))
    assert torch.equal(p.confidence, p.probs.max(-1).values)
    assert p.labels.shape == p.confidence.shape == (rows,)


# --- initial values -----------------------------------------------------------------------------------------

BACKBONES: dict[str, Callable[[torch.Generator], torch.nn.Module]] = {
    "isometry": lambda g: ResidualMLP(2, width=16, depth=1, generator=g),
    "embedding": lambda g: ResidualMLP(20, width=16, depth=1, generator=g),
    "convolutions": lambda g: WideResNet(depth=10, width=1, generator=g),
}


@pytest.mark.parametrize(
    ("method", "options", "backbone"),
    [
        *((method, options, "isometry") for method, options in VARIANTS),
        *((method, {}, backbone) for method in METHODS for backbone in ("embedding", "convolutions")),
        *((method, {"features": "inducing"}, "isometry") for method in GP),
    ],
)
def test_a_generator_draws_every_initial_value(method: str, options: dict[str, Any], backbone: str) -> None:
    """The paper's backbones included; torch's global generator neither changes nor matters."""
    built = []
    with torch.random.fork_rng(devices=[]):
        for global_seed, seed in ((1, 5), (2, 5), (2, 6)):
            torch.manual_seed(global_seed)
            before, generator = torch.get_rng_state(), _seed(seed)
            network = BACKBONES[backbone](generator)
            model = hetsngp.build(method, network, 3, generator=generator, **toy.TINY, **options)
            assert torch.equal(torch.get_rng_state(), before)
            built.append(toy.weights(model))
    toy.assert_same(*built[:2])
    drawn = [name for name, t in built[0].items() if t.numel() and not torch.equal(t, built[2][name])]
    assert len(drawn) >= 2  # of the backbone, and of the head
    assert any(name.startswith("head.") for name in drawn)


# --- what comes back ----------------------------------------------------------------------------------------


@every_variant
def test_a_prediction_is_well_formed(method: str, options: dict[str, Any]) -> None:
    x, _ = _data()
    sigmoid = options.get("link") == "sigmoid"
    model = toy.trained(method, **options)
    p = model.predict(x)
    _assert_well_formed(p, len(x), 3, torch.float32, sigmoid=sigmoid)
    entropy = torch.special.entr(p.probs.double())
    if sigmoid:
        entropy = entropy + torch.special.entr(1 - p.probs.double())
    torch.testing.assert_close(p.total_uncertainty.double(), entropy.sum(-1), rtol=1e-4, atol=1e-6)


@every_variant
def test_uncertainty_is_zero_exactly_where_it_has_no_source(method: str, options: dict[str, Any]) -> None:
    """Function uncertainty comes from a posterior, member uncertainty from members."""
    x, _ = _data()
    model = toy.trained(method, **options)
    p = model.predict(x)
    members = options.get("num_members", toy.HEADS[method].num_members)
    assert (p.member_uncertainty > 0).any() == (members > 1)
    if method not in GAUSSIAN:
        assert (p.function_uncertainty > 0).all()
        assert (p.latent_variance > 0).all()
        return
    has_posterior = method in GP and options.get("posterior") != "none"
    for uncertainty in (p.function_uncertainty, p.latent_variance):
        assert (uncertainty > 0).all() if has_posterior else (uncertainty == 0).all()
    if members == 1:
        assert torch.equal(p.ood_score, p.model_uncertainty if has_posterior else p.total_uncertainty)
    else:  # that of the mixture, but for the rounding of means
        expected = p.model_uncertainty if has_posterior else p.total_uncertainty
        torch.testing.assert_close(p.ood_score, expected, rtol=1e-4, atol=1e-6)


@every_method
def test_label_noise_is_all_that_separates_probs_from_clean_probs(method: str) -> None:
    x, _ = _data()
    p = toy.trained(method, flip=0.3).predict(x)
    assert torch.equal(p.probs, p.clean_probs) == (method not in NOISY)


# With 100 classes the nested rule and the noise have other shapes; past 256 the posterior is diagonal.
@pytest.mark.parametrize("classes", [2, 100, 300])
@pytest.mark.parametrize(
    ("method", "options"),
    [*((method, {}) for method in METHODS), ("hetsngp", {"noise": "feature"}), ("mimo", {"num_members": 2})],
)
def test_any_number_of_classes(method: str, options: dict[str, Any], classes: int) -> None:
    x = torch.randn(8, 2, generator=_seed(0))
    y = torch.randint(classes, (8,), generator=_seed(1))
    model = toy.build(method, classes, **options)
    model.loss(x, y).backward()
    hetsngp.fit_posterior(model, toy.loader(x, y))
    _assert_well_formed(model.predict(x), 8, classes, torch.float32)


@every_variant
def test_probabilities_alone_are_those_of_the_prediction(method: str, options: dict[str, Any]) -> None:
    x, _ = _data()
    model = toy.trained(method, **options)
    assert torch.equal(model.predict_probs(x), model.predict(x).probs)
    for points in (None, 32):
        one = model.predict_probs(x, num_samples=points, generator=_seed(3))
        assert torch.equal(one, model.predict(x, num_samples=points, generator=_seed(3)).probs)


@every_variant
def test_a_batch_of_one(method: str, options: dict[str, Any]) -> None:
    x, y = _data(**options)
    model = toy.build(method, **options)
    loss = model.loss(x[:1], y[:1])
    loss.backward()
    # Not merely finite: the first version divided by the spread of one row and gave gradients of 1e36.
    assert max(float(p.grad.abs().max()) for p in model.parameters()) < 1e3
    fitted = toy.trained(method, **options)
    p = fitted.predict(x[:1])
    _assert_well_formed(p, 1, 3, torch.float32, sigmoid="link" in options)
    torch.testing.assert_close(p.probs, fitted.predict(x).probs[:1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", NOISY)
@pytest.mark.parametrize("noise", NOISES)
def test_more_noise_columns_than_classes(method: str, noise: str) -> None:
    x, y = _data(classes=2)
    model = toy.build(method, 2, rank=5, noise=noise)
    assert math.isfinite(toy.descend(model, x, y, 2)[-1])
    hetsngp.fit_posterior(model, toy.loader(x, y))
    assert model.utility(x).form.dense().shape[-1] >= 5
    _assert_well_formed(model.predict(x), len(x), 2, torch.float32)


# --- precision ----------------------------------------------------------------------------------------------


@every_method
def test_autocast_trains_and_predicts_in_float32(method: str) -> None:
    x, y = _data()
    model = toy.build(method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.backbone(x).dtype == torch.bfloat16  # autocast does reach the backbone
        history = toy.descend(model, x, y, 15)
        hetsngp.fit_posterior(model, toy.loader(x, y))
        p = model.predict(x)
        assert model(x).dtype == torch.float32
    assert history[-1] < history[0]
    _assert_well_formed(p, len(x), 3, torch.float32)


@every_method
def test_bfloat16_predicts_close_to_float32(method: str) -> None:
    x = _data()[0].bfloat16()
    model = toy.trained(method)
    expected = model.predict(x.float())
    before = {name: t.clone() for name, t in model.state_dict().items() if ".posterior." in name}
    p = model.to(torch.bfloat16).predict(x)
    assert model.backbone.isometry.dtype == torch.bfloat16
    for name, t in before.items():  # a variance is a small difference of large numbers: kept in float32
        assert torch.equal(model.state_dict()[name], t), name
        assert model.state_dict()[name].dtype == t.dtype, name
    _assert_well_formed(p, len(x), 3, torch.float32)
    # Weights and features keep 8 bits: some 2⁻⁸ of a logit of size ~5.
    torch.testing.assert_close(p.probs, expected.probs, rtol=0, atol=0.02)
    torch.testing.assert_close(p.model_uncertainty, expected.model_uncertainty, rtol=0, atol=0.02)


@every_variant
def test_float64_carries_the_posterior_and_predicts_close(method: str, options: dict[str, Any]) -> None:
    x, _ = _data()
    model = toy.trained(method, **options)
    expected = model.predict(x)
    model = model.to(torch.float64)
    assert all(t.dtype == torch.float64 for t in model.state_dict().values() if t.is_floating_point())
    p = model.predict(x.double())
    _assert_well_formed(p, len(x), 3, torch.float64, sigmoid="link" in options)
    for name in ("probs", "clean_probs", "total_uncertainty", "model_uncertainty"):
        # Of a control variate, whose scale has few digits where an input is certain.
        error = 5e-4 if name == "model_uncertainty" and method in NOISY else 1e-4
        torch.testing.assert_close(getattr(p, name).float(), getattr(expected, name), rtol=0, atol=error)
    torch.testing.assert_close(p.latent_variance.float(), expected.latent_variance, rtol=1e-3, atol=1e-5)


# --- training -----------------------------------------------------------------------------------------------


@every_variant
def test_gradients_reach_every_parameter(method: str, options: dict[str, Any]) -> None:
    x, y = _data(**options)
    model = toy.build(method, **options)
    loss = model.loss(x, y)
    assert loss.shape == ()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name


@every_variant
def test_every_parameter_exists_after_build(method: str, options: dict[str, Any]) -> None:
    x, y = _data(**options)
    model = toy.build(method, **options)
    before = {name: id(p) for name, p in model.named_parameters()}
    model.loss(x, y).backward()
    hetsngp.fit_posterior(model, toy.loader(x, y))
    model.predict(x)
    model(x)
    assert {name: id(p) for name, p in model.named_parameters()} == before


@every_variant
def test_the_loss_goes_down(method: str, options: dict[str, Any]) -> None:
    x, y = _data(**options)
    history = toy.descend(toy.build(method, **options), x, y, 25)
    assert history[-1] < 0.5 * history[0]
    if "link" not in options:
        assert (toy.trained(method, **options).predict(x).labels == y).float().mean() > 0.95


@every_method
def test_an_ordinary_training_loop_on_log_probabilities(method: str) -> None:
    x, y = _data()
    model = toy.build(method)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    history = []
    for _ in range(25):
        log_probs = model(x)  # never fitted, never asked for
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(len(x)), rtol=0, atol=1e-5)
        loss = F.cross_entropy(log_probs, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()))
    assert history[-1] < 0.5 * history[0]
    assert model.eval()(x).shape == (len(x), 3)


@torch.no_grad()
def _gaussian_loss(model: Any, x: Tensor, y: Tensor) -> float:
    """Each member's mean −log p̄(y), summed over members, at the fixed points of evaluation."""
    members, total = model.head.num_members, 0.0
    u = model.head.utility(model.backbone(x), posterior=False)
    assert len(u.mean) == members * len(x)
    for m in range(members):
        own = u.rows(slice(m, None, members))
        nll = F.cross_entropy(own.mean, y)
        if model.head.noise is not None:
            nll = softmax_nll(own, y, num_samples=EVALUATION_POINTS, seed=0).mean()
        total += float(nll)
    return total


@torch.no_grad()
def _dirichlet_loss(model: Any, x: Tensor, y: Tensor) -> float:
    """The mean of ψ(α₀) − ψ(α_y) − λ·H(Dir(α)), α = 1 + N_c·q(z | c), by the loops of the oracles."""
    head = model.head
    z, norm = head.projection(model.backbone(x)), head.norm
    z = (z - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    parts = (head.flows.centres, head.flows.raw_alphas, head.flows.raw_betas)
    density = oracles.radial_flow_log_density(z.numpy(), *(part.numpy() for part in parts))
    each = []
    evidence = 12 * np.exp(density) * np.exp(LOG_UNIT) ** z.shape[1]  # q of z in another unit
    for row, label in zip(evidence, y.tolist(), strict=True):
        of = oracles.dirichlet([1 + seen for seen in row], label)
        each.append(of["uncertain_cross_entropy"] - head.entropy_weight * of["differential_entropy"])
    return float(np.mean(each))


# A new kind of head needs an oracle here.
LOSSES = {GaussianHead: _gaussian_loss, DirichletHead: _dirichlet_loss}


@every_method
def test_the_loss_is_the_mean_over_examples_plus_the_prior(method: str) -> None:
    x, y = _data()
    x = x.double()
    model = toy.alike(toy.trained(method, entropy_weight=0.1).double())
    expected = LOSSES[type(model.head)](model, x, y)
    named = dict(model.named_parameters())
    penalty = 0.0
    if method in GP:
        penalty = float(named["head.latent.beta"].detach().square().sum()) / (2 * model.dataset_size)
        assert penalty > 1e-3
    assert float(model.loss(x, y).detach()) == pytest.approx(expected + penalty, rel=1e-9)


@every_method
def test_what_the_loss_misses_is_said_once(method: str) -> None:
    """The size of the data where there is a prior, of the classes where the head uses it."""
    x, y = _data()
    x = x.double()
    model = toy.alike(toy.trained(method).double())
    with_prior = float(model.loss(x, y).detach())
    n, model.dataset_size = model.dataset_size, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        without = float(model.loss(x, y).detach())
        model.loss(x, y)
    told = [str(w.message).split()[0] for w in caught if "is not set" in str(w.message)]
    assert told == ["dataset_size"] * (method in GP) + ["class_counts"] * model.wants_class_counts
    prior = [p for name, p in model.named_parameters() if name.endswith(".beta")]
    assert bool(prior) == (method in GP)
    penalty = sum(float(p.detach().square().sum()) for p in prior) / (2 * n)
    assert with_prior - without == pytest.approx(penalty, rel=1e-9, abs=1e-15)


@every_method
def test_parameter_groups_cover_each_parameter_once_and_spare_what_has_its_own_size(method: str) -> None:
    """β has a prior, and weight decay would flatten a density."""
    model = toy.build(method)
    groups = model.parameter_groups(0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    own = ("head.latent.beta", "head.norm.", "head.flows.")
    spared = {id(p) for name, p in model.named_parameters() if name.startswith(own)}
    assert bool(spared) == (method in GP or method not in GAUSSIAN)
    for group in groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.0 if id(parameter) in spared else 0.1)
            assert group.get("no_weight_decay", False) == (id(parameter) in spared)
    torch.optim.AdamW(groups)


@pytest.mark.parametrize("method", GP)
def test_sample_beta_widens_training_once_there_is_a_posterior(method: str) -> None:
    x, y = _data()
    plain, sampled = toy.trained(method).train(), toy.trained(method, sample_beta=True).train()
    sampled.load_state_dict(plain.state_dict())
    a = plain.loss(x, y, generator=_seed(0)).detach()
    b = sampled.loss(x, y, generator=_seed(0))
    assert not torch.isclose(a, b.detach(), rtol=1e-2)  # the GP variance is far from negligible here
    b.backward()
    assert sampled.head.latent.beta.grad.any()
    fresh = toy.build(method, sample_beta=True)
    assert torch.isfinite(fresh.loss(x, y))  # without a posterior it trains at the mode


# --- randomness ---------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("num_samples", [None, 64])
def test_prediction_is_a_function_of_input_and_generator(method: str, num_samples: int | None) -> None:
    x, _ = _data()
    model = toy.trained(method)
    state = torch.get_rng_state()
    a, b = model.predict(x, num_samples=num_samples), model.predict(x, num_samples=num_samples)
    c = model.predict(x, num_samples=num_samples, generator=_seed(1))
    d = model.predict(x, num_samples=num_samples, generator=_seed(1))
    e = model.predict(x, num_samples=num_samples, generator=_seed(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert same_bits(a, b)
    assert same_bits(c, d)
    assert torch.equal(c.probs, e.probs) != _stochastic(model)
    torch.testing.assert_close(c.probs, e.probs, rtol=0, atol=0.01 if num_samples is None else 0.1)
    if not _stochastic(model):
        assert (a.num_points == 0).all()
    elif num_samples is not None:  # members share them, in equal parts
        members = model.head.num_members
        assert (a.num_points == members * math.ceil(num_samples / members)).all()


@every_method
def test_two_classes_need_no_sampling(method: str) -> None:
    x, _ = _data(2)
    model = toy.trained(method, 2)
    assert same_bits(model.predict(x, generator=_seed(1)), model.predict(x, generator=_seed(2)))
    assert (model.predict(x).num_points == 0).all()


@every_method
def test_the_loss_draws_from_the_given_generator_only(method: str) -> None:
    x, y = _data()
    models = [toy.trained(method).train() for _ in range(3)]  # a DataLoader draws a seed for its workers
    state = torch.get_rng_state()
    values = [m.loss(x, y, generator=_seed(s)).detach() for m, s in zip(models, (1, 1, 2), strict=True)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2]) == (method not in (*NOISY, *MIXTURES))


@pytest.mark.parametrize("sampler", ["mc", "antithetic"])
def test_other_samplers_agree(sampler: str) -> None:
    x, _ = _data()
    a, b = toy.trained("hetsngp"), toy.trained("hetsngp", sampler=sampler)
    b.load_state_dict(a.state_dict())
    # Independent points have a standard error of at most ½/√2048 = .011.
    assert int(b.predict(x).num_points[0]) == 2048
    torch.testing.assert_close(a.predict(x).probs, b.predict(x).probs, rtol=0, atol=0.03)


# --- manners ------------------------------------------------------------------------------------------------


@every_method
def test_the_backbone_runs_once(method: str) -> None:
    x, y = _data()
    model = toy.trained(method)
    calls: list[int] = []
    model.backbone.register_forward_hook(lambda *_: calls.append(1))
    calling = [model.predict, model.predict_probs, lambda x: model.loss(x, y), model]
    for call in [*calling, model.utility] if method in GAUSSIAN else calling:
        calls.clear()
        call(x)
        assert len(calls) == 1


@every_method
def test_predict_restores_every_mode_and_leaves_no_gradient(method: str) -> None:
    x, _ = _data()
    model = toy.trained(method).train()
    model.backbone.blocks[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = {name: t.clone() for name, t in model.state_dict().items()}
    model.predict(x)
    model.predict_probs(x)
    with nullcontext() if method in GAUSSIAN else _refuses_a_gaussian():
        model.utility(x)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    model.backbone.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.predict(x)
    assert {name: module.training for name, module in model.named_modules()} == modes


@every_method
def test_fit_posterior_trains_nothing(method: str) -> None:
    x, y = _data()
    model = toy.trained(method, fit=False).train()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    hetsngp.fit_posterior(model, toy.loader(x, y))
    assert model.training
    for name, t in model.state_dict().items():
        if ".posterior." not in name:
            assert torch.equal(t, state[name]), name


@every_variant
def test_chunked_equals_whole(method: str, options: dict[str, Any]) -> None:
    x, _ = _data()
    model = toy.trained(method, **options)
    whole = model.predict(x)
    chunks = hetsngp.Prediction.cat([model.predict(part) for part in x.split(7)])
    assert len(chunks) == len(whole) == len(x)
    for name in FIELDS:
        torch.testing.assert_close(getattr(chunks, name), getattr(whole, name), rtol=1e-4, atol=1e-5)


@every_variant
def test_copies_keep_every_bit(method: str, options: dict[str, Any], tmp_path: Any) -> None:
    x, _ = _data()
    model = toy.trained(method, **options)
    expected = model.predict(x)
    hetsngp.save(model, tmp_path / "model")
    for twin in (hetsngp.load(tmp_path / "model"), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_bits(twin.predict(x), expected)
        assert twin.dataset_size == model.dataset_size
        assert twin.config == model.config


@every_method
def test_bfloat16_and_float64_models_survive_saving(method: str, tmp_path: Any) -> None:
    x, _ = _data()
    for dtype in (torch.bfloat16, torch.float64):
        model = toy.trained(method).to(dtype)
        hetsngp.save(model, tmp_path / "model")
        twin = hetsngp.load(tmp_path / "model")
        assert same_bits(twin.predict(x.to(dtype)), model.predict(x.to(dtype)))
        types = {name: t.dtype for name, t in twin.state_dict().items()}
        assert types == {name: t.dtype for name, t in model.state_dict().items()}


@every_method
def test_temperature_is_a_number_that_flattens(method: str) -> None:
    x, _ = _data()
    model = toy.trained(method, posterior="none")
    assert float(model.temperature) == 1.0
    before = model.predict(x)
    at_one = model.utility(x).mean if method in GAUSSIAN else None
    model.temperature = 3.0
    assert float(model.temperature) == 3.0
    p = model.predict(x)
    assert (p.total_uncertainty > before.total_uncertainty).all()
    h = model.backbone(x)
    if method not in GAUSSIAN:
        counts = 1 + (model.head.log_evidence(h) / 3).exp()
        torch.testing.assert_close(p.probs, counts / counts.sum(-1, keepdim=True))
        return
    assert torch.equal(model.utility(x).mean, at_one)  # the utility is not divided by τ
    if method not in NOISY:
        logits = model.head.utility(h, posterior=False).mean.unflatten(0, (len(x), -1))
        torch.testing.assert_close(p.probs, torch.softmax(logits / 3, -1).mean(1))


# --- the posterior ------------------------------------------------------------------------------------------


@every_variant
def test_predict_asks_for_the_posterior_exactly_where_one_is_needed(
    method: str, options: dict[str, Any]
) -> None:
    x, y = _data(**options)
    model = toy.build(method, **options)
    needs = method in GP and options.get("posterior") != "none"
    assert model.head.has_posterior == needs
    if not needs:
        before = model.predict(x)
        state = {name: t.clone() for name, t in model.state_dict().items()}
        report = hetsngp.fit_posterior(model, toy.loader(x, y))
        assert report.posterior == "none"
        assert report.count == 0
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
        assert same_bits(model.predict(x), before)
        return
    for call in (model.predict, model.utility, lambda x: model.latent(model.backbone(x))):
        with pytest.raises(hetsngp.PosteriorNotFittedError, match=r"hetsngp\.fit_posterior\(model, loader\)"):
            call(x)
    report = hetsngp.fit_posterior(model, toy.loader(x, y))
    assert report.count == len(x)
    assert report.posterior == options.get("posterior", "kronecker")
    model.predict(x)


def _moments(u: Any, members: int) -> tuple[Tensor, Tensor]:
    """Mean (B, K) and covariance (B, K, K) of the mixture of each ``members`` rows, by loops in float64."""
    means, covariances = u.mean.double(), u.covariance().double()
    out = []
    for start in range(0, len(means), members):
        rows = range(start, start + members)
        mean = sum(means[r] for r in rows) / members
        second = sum(covariances[r] + torch.outer(means[r], means[r]) for r in rows) / members
        out.append((mean, second - torch.outer(mean, mean)))
    return torch.stack([m for m, _ in out]), torch.stack([c for _, c in out])


@every_variant
def test_latent_and_utility_agree_with_their_documentation(method: str, options: dict[str, Any]) -> None:
    x, _ = _data()
    x = x.double()
    model = toy.trained(method, **options).double()
    with torch.no_grad():
        h = model.backbone(x)
    if method not in GAUSSIAN:
        for call in (lambda: model.latent(h), lambda: model.utility(x)):
            with _refuses_a_gaussian():
                call()
        return
    latent, u, members = model.latent(h), model.utility(x), model.head.num_members
    assert latent.mean.shape == latent.var.shape == u.mean.shape == u.var.shape == (len(x), 3)
    torch.testing.assert_close(latent.covariance().diagonal(dim1=-2, dim2=-1), latent.var)
    torch.testing.assert_close(u.marginal_variance(), u.covariance().diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(latent.mean, u.mean)
    with torch.no_grad():
        each = model.head.utility(h, posterior=True), model.head.parts(h, posterior=True)[0]
    for got, rows in zip((u, latent), each, strict=True):  # of members, the moments of their mixture
        mean, covariance = _moments(rows, members)
        torch.testing.assert_close(got.mean, mean)
        torch.testing.assert_close(got.covariance(), covariance)
    extra = u.covariance() - latent.covariance()  # Σ(x): positive definite with noise, nothing without
    if method in NOISY:
        # On features it has their rank at most, which is the classes' here.
        assert (torch.linalg.eigvalsh(extra) > 0).all()
    else:
        torch.testing.assert_close(extra, torch.zeros_like(extra), rtol=0, atol=1e-12)
    _, within = _moments(each[1], 1)
    variance = within.diagonal(dim1=-2, dim2=-1).mean(-1).unflatten(0, (len(x), members)).mean(1)
    torch.testing.assert_close(model.predict(x).latent_variance, variance)  # without their disagreement


@pytest.mark.parametrize("method", GP)
def test_a_posterior_older_than_the_weights_is_said(method: str) -> None:
    x, y = _data()
    model = toy.trained(method)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(x)
        model.eval().loss(x, y).backward()
        model.train()
        with torch.no_grad():
            model.loss(x, y)  # a validation loss is not training
        model.predict(x)
    toy.descend(model.train(), x, y, 1)
    with pytest.warns(UserWarning, match=r"fit_posterior\(model, loader\) again"):
        model.predict(x)
    hetsngp.fit_posterior(model, toy.loader(x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(x)


@pytest.mark.parametrize("method", GP)
def test_a_stream_updates_a_momentum_posterior_by_hand(method: str) -> None:
    x, y = _data()
    model = toy.build(method, posterior="momentum", dataset_size=None)
    for part in x.split(6):
        model.update_posterior(part)
    shared = toy.build(method, posterior="shared")
    hetsngp.fit_posterior(shared, toy.loader(x, y))
    # Equal batches and few of them: a plain mean of φφᵀ times the number seen, which is the shared sum.
    torch.testing.assert_close(
        model.predict(x).latent_variance, shared.predict(x).latent_variance, rtol=1e-3, atol=1e-5
    )


# --- the sigmoid link ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", GAUSSIAN)
def test_multi_hot_labels_are_learned(method: str) -> None:
    x = torch.randn(80, 2, generator=_seed(0))
    y = torch.stack([x[:, 0] > 0, x[:, 1] > 0, x[:, 0] > x[:, 1]], 1).float()  # none to all three at a time
    model = toy.build(method, link="sigmoid")
    toy.descend(model, x, y, 20)
    hetsngp.fit_posterior(model, toy.loader(x, y))
    p = model.predict(x)
    _assert_well_formed(p, 80, 3, torch.float32, sigmoid=True)
    assert ((p.probs > 0) & (p.probs < 1)).all()
    assert ((p.probs > 0.5) == (y > 0.5)).float().mean() > 0.9
    assert p.probs.sum(-1).std() > 0.3  # not normalised over classes
    assert (p.num_points == 0).all()
    with torch.no_grad():
        log_odds = model.eval()(x)
        u = model.head.utility(model.backbone(x), posterior=False)
    yes = sigmoid_log_probs(u)[0].exp().unflatten(0, (80, -1)).mean(1)
    # For binary_cross_entropy_with_logits: its loss is the −log P(y) of the members' mean.
    each = F.binary_cross_entropy_with_logits(log_odds, y, reduction="none")
    torch.testing.assert_close(each, F.binary_cross_entropy(yes, y, reduction="none"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [method for method in METHODS if method not in GAUSSIAN])
def test_a_link_that_a_method_has_not_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match=r"one label of each example.*link='sigmoid'.*link='softmax'"):
        toy.build(method, link="sigmoid")


# --- ensembles ----------------------------------------------------------------------------------------------


def _member(method: str, seed: int, **options: Any) -> Any:
    model = toy.build(method, **options)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=_seed(seed))
    x, y = _data(**options)
    toy.descend(model, x, y, 10)
    hetsngp.fit_posterior(model, toy.loader(x, y))
    return model.eval()


@every_method
def test_an_ensemble_of_one_is_its_member(method: str) -> None:
    x, y = _data()
    model = toy.trained(method)
    ensemble = hetsngp.Ensemble([model])
    assert same_bits(ensemble.predict(x), model.predict(x))
    assert same_bits(ensemble.predict(x, generator=_seed(1)), model.predict(x, generator=_seed(1)))
    assert torch.equal(ensemble(x), model(x))
    assert torch.equal(ensemble.loss(x, y, generator=_seed(1)), model.loss(x, y, generator=_seed(1)))
    assert ensemble.members == [model]
    assert model.members == [model]


@pytest.mark.parametrize(("method", "link"), toy.LINKED)
def test_an_ensemble_of_two_splits_uncertainty_in_three(method: str, link: str) -> None:
    options = {} if link == "softmax" else {"link": link}
    x, y = _data(**options)
    pair = [_member(method, seed, **options) for seed in (1, 2)]
    ensemble = hetsngp.Ensemble(pair)
    p, each = ensemble.predict(x), [m.predict(x) for m in pair]
    _assert_well_formed(p, len(x), 3, torch.float32, sigmoid=link == "sigmoid")

    def mean(name: str) -> Tensor:
        return torch.stack([getattr(e, name) for e in each]).mean(0)

    def entropy(probs: Tensor) -> Tensor:
        probs = probs.double()
        out = torch.special.entr(probs)
        return (out + torch.special.entr(1 - probs) if link == "sigmoid" else out).sum(-1)

    assert torch.equal(p.probs, mean("probs"))
    assert torch.equal(p.clean_probs, mean("clean_probs"))
    between = (entropy(p.probs) - torch.stack([entropy(e.probs) for e in each]).mean(0)).float()
    assert (between > 1e-4).any()  # they were trained apart
    for name, expected in (
        ("total_uncertainty", entropy(p.probs).float()),
        ("data_uncertainty", mean("data_uncertainty")),
        ("function_uncertainty", mean("function_uncertainty")),
        ("member_uncertainty", between + mean("member_uncertainty")),  # inner members are members too
        ("ood_score", mean("ood_score") + between),
        ("latent_variance", mean("latent_variance")),
    ):
        torch.testing.assert_close(getattr(p, name), expected, rtol=1e-5, atol=3e-6)
    assert (mean("member_uncertainty") > 0).any() == (method in MIXTURES)
    assert torch.equal(p.num_points, sum(e.num_points for e in each))
    with torch.no_grad():
        prob = torch.sigmoid if link == "sigmoid" else torch.exp
        torch.testing.assert_close(prob(ensemble(x)), torch.stack([prob(m(x)) for m in pair]).mean(0))
    one, other = _seed(4), _seed(4)  # each draws on from where the one before it ended
    expected = sum(m.loss(x, y, generator=one) for m in pair) / 2
    torch.testing.assert_close(ensemble.loss(x, y, generator=other), expected)
    reports = hetsngp.fit_posterior(ensemble, toy.loader(x, y))
    assert isinstance(reports, list)
    assert len(reports) == 2
