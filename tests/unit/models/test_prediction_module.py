"""prediction_module() against predict, as it is, exported and compiled."""

import copy
import pickle
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend

import hetsngp
from hetsngp.functional import integration, sampling
from hetsngp.models.methods import METHODS
from hetsngp.models.prediction_module import PredictionModule
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.nn.posteriors import POSTERIOR_TYPES
from hetsngp.nn.spectral import bounded_layers

NOISY = {"heteroscedastic", "hetsngp", "hetsngp_mimo"}
WITH_GP = {"sngp", "hetsngp", "hetsngp_mimo"}
# Factorisations, sizes that depend on values, reads of a value by the host, and contexts.
FORBIDDEN = re.compile(
    r"nonzero|cholesky|solve|qr(?!t)|eig|svd|lstsq|_lu|(?<!get)item|_local_scalar|unique|masked_select|autocast"
)
# The fast tier: every method, link and posterior once, and what differs between them.
FAST = {
    "deterministic-softmax-3",
    "deterministic-sigmoid-2",
    "heteroscedastic-softmax-2",
    "heteroscedastic-softmax-3",
    "heteroscedastic-sigmoid-3",
    "sngp-softmax-2-exact",
    "sngp-softmax-3-kronecker",
    "sngp-softmax-3-none",
    "sngp-sigmoid-2-shared",
    "sngp-sigmoid-3-momentum",
    "hetsngp-softmax-2-kronecker",
    "hetsngp-softmax-3-kronecker",
    "hetsngp-sigmoid-3-kronecker",
    "posterior_network-softmax-3",
    "mimo-softmax-3",
}


def labels(count: int, num_classes: int, link: str) -> Tensor:
    y = torch.arange(count) % num_classes
    return nn.functional.one_hot(y, num_classes) if link == "sigmoid" else y


def fitted(method: str, num_classes: int, link: str = "softmax", **options: Any) -> hetsngp.Classifier:
    """Small model after two steps of training, in which norms and statistics are measured."""
    generator = torch.Generator().manual_seed(0)
    if method in WITH_GP:
        options = {"random_features": 16, **options}
    if "mimo" in method:
        options["num_members"] = 2
    backbone = ResidualMLP(2, 8, 1, generator=generator)
    model = hetsngp.build(
        method, backbone, num_classes, link=link, dataset_size=24, generator=generator, **options
    )
    x, y = torch.randn(24, 2, generator=generator), labels(24, num_classes, link)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(x, y, generator=generator).backward()
        optimizer.step()
    hetsngp.fit_posterior(model, [(x, y)])
    return model


def inputs(batch: int) -> Tensor:
    """Near the data, and far."""
    return torch.linspace(0.5, 4, batch).unsqueeze(1) * torch.randn(
        batch, 2, generator=torch.manual_seed(batch)
    )


def assert_as_predicted(got: dict[str, Tensor], model: Any, x: Tensor) -> None:
    want = model.predict(x)
    assert set(got) == set(vars(want))
    for name, value in got.items():
        torch.testing.assert_close(value, getattr(want, name), rtol=1e-5, atol=1e-5, msg=name)


def exported(model: Any, batch: int = 4, **options: Any) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("batch")},)
    return torch.export.export(model.prediction_module(), (inputs(batch),), dynamic_shapes=shapes, **options)


def operators(whole: torch.fx.GraphModule) -> set[str]:
    """Functions and methods that a graph and the graphs in it call."""
    graphs = [module.graph for module in whole.modules() if isinstance(module, torch.fx.GraphModule)]
    calls = ("call_function", "call_method")
    return {str(node.target) for graph in graphs for node in graph.nodes if node.op in calls}


def combinations() -> Iterator[Any]:
    """Methods × links × classes × posteriors."""
    for method in METHODS:
        for link in ("softmax",) if method == "posterior_network" else ("softmax", "sigmoid"):
            for num_classes in (2, 3):
                for posterior in POSTERIOR_TYPES if method in WITH_GP else ("",):
                    name = "-".join(filter(None, (method, link, str(num_classes), posterior)))
                    if name not in FAST and num_classes == 2 and posterior not in ("", "kronecker"):
                        continue  # two classes see the variance of one difference, whatever it comes from
                    marks = [] if name in FAST else [pytest.mark.slow]
                    yield pytest.param(method, link, num_classes, posterior, marks=marks, id=name)


@pytest.mark.parametrize(("method", "link", "num_classes", "posterior"), list(combinations()))
def test_one_graph_for_every_batch(method: str, link: str, num_classes: int, posterior: str) -> None:
    """Exported with a dynamic batch, and compiled, without graph breaks."""
    model = fitted(method, num_classes, link, **({"posterior": posterior} if posterior else {}))
    # hetsngp_mimo has the heads of hetsngp: it is exported with a factor and without one, and else captured.
    captured = method == "hetsngp_mimo" and posterior not in ("kronecker", "shared")
    if not captured:
        program = exported(model)
        assert [name for name in operators(program.graph_module) if FORBIDDEN.search(name)] == []
        module = program.module()
        for batch in (1, 3, 11):
            assert_as_predicted(module(inputs(batch)), model, inputs(batch))
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward if captured else lookup_backend("aot_eager")(graph, examples)

    torch.compiler.reset()
    compiled = torch.compile(model.prediction_module(), fullgraph=True, backend=record, dynamic=False)
    assert_as_predicted(compiled(inputs(5)), model, inputs(5))
    (whole,) = graphs
    assert [name for name in operators(whole) if FORBIDDEN.search(name)] == []


# --- other models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(("sngp", "sngp"), marks=pytest.mark.slow),
        ("deterministic", "posterior_network", "sngp"),
    ],
)
def test_ensembles(methods: tuple[str, ...]) -> None:
    """Of one kind, and of several, whose scores have different units."""
    ensemble = hetsngp.Ensemble([fitted(method, len(methods)) for method in methods])
    program = exported(ensemble)
    assert [name for name in operators(program.graph_module) if FORBIDDEN.search(name)] == []
    module = program.module()
    for batch in (1, 9):
        assert_as_predicted(module(inputs(batch)), ensemble, inputs(batch))
    torch.compiler.reset()
    compiled = torch.compile(ensemble.prediction_module(), fullgraph=True, backend="aot_eager", dynamic=False)
    assert_as_predicted(compiled(inputs(5)), ensemble, inputs(5))


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["low_rank", "parameter_efficient", "feature"])
@pytest.mark.parametrize("method", ["heteroscedastic", "hetsngp", "hetsngp_mimo"])
def test_every_kind_of_noise(method: str, noise: str) -> None:
    model = fitted(method, 3, "sigmoid", noise=noise)
    program = exported(model)
    assert [name for name in operators(program.graph_module) if FORBIDDEN.search(name)] == []
    assert_as_predicted(program.module()(inputs(7)), model, inputs(7))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("hetsngp", {"noise": "feature"}),
        pytest.param("hetsngp_mimo", {"noise": "feature"}, marks=pytest.mark.slow),
        pytest.param("heteroscedastic", {"noise": "parameter_efficient"}, marks=pytest.mark.slow),
        pytest.param("hetsngp", {"noise": "parameter_efficient"}, marks=pytest.mark.slow),
        ("sngp", {"sampler": "mc"}),
        pytest.param("hetsngp", {"sampler": "mc"}, marks=pytest.mark.slow),
    ],
)
def test_points_in_all_coordinates_and_other_noise_under_the_softmax(
    method: str, options: dict[str, Any]
) -> None:
    """Noise on 80 features is a factor of more columns than take points alone."""
    gp = {"random_features": 80} if method in WITH_GP else {}
    model = fitted(method, 3, **options, **gp)
    program = exported(model)
    assert [name for name in operators(program.graph_module) if FORBIDDEN.search(name)] == []
    module = program.module()
    for batch in (1, 7):
        assert_as_predicted(module(inputs(batch)), model, inputs(batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_classes": 40},  # too many to go in front
        {"num_classes": 3, "normalization": "polar"},
        {"num_classes": 3, "normalization": "direction"},
        {"num_classes": 3, "num_samples": 128},
    ],
)
def test_options_of_the_gp(options: dict[str, Any]) -> None:
    model = fitted("sngp", **options)
    program = exported(model)
    assert [name for name in operators(program.graph_module) if FORBIDDEN.search(name)] == []
    module = program.module()
    for batch in (1, 7):
        assert_as_predicted(module(inputs(batch)), model, inputs(batch))


def test_a_posterior_that_was_updated_and_not_factorised_since() -> None:
    model = fitted("sngp", 2, "sigmoid", posterior="momentum")
    model.update_posterior(inputs(12))
    assert model.head.posterior.cholesky.numel() == 0
    assert_as_predicted(exported(model).module()(inputs(3)), model, inputs(3))


def test_images_through_bounded_convolutions_and_batch_norm() -> None:
    class Network(nn.Sequential):
        num_features = 4

    backbone = Network(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model = hetsngp.build("sngp", backbone, 2, random_features=16, spectral_bound=0.5, dataset_size=12)
    x, y = torch.randn(12, 1, 6, 6), labels(12, 2, "softmax")
    model.loss(x, y)
    hetsngp.fit_posterior(model, [(x, y)])
    model.train()
    module = model.prediction_module()
    assert float(model.backbone[0].spectral_sigma) > 0.5  # the bound acts
    assert list(bounded_layers(model)) == ["backbone.0"]
    assert not bounded_layers(module)
    assert_as_predicted(module(x), model, x)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert_as_predicted(program.module()(x[:5]), model, x[:5])
    assert model.training


# --- tracing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_first_call_of_all_may_be_an_export(strict: bool) -> None:
    """Constants are cached: none may be made of tensors without values, as tracing has them."""
    model = fitted("sngp", 3)
    integration._lines_on.cache_clear()
    sampling._constant_points.cache_clear()
    program = exported(model, strict=strict)
    assert sampling._constant_points.cache_info().currsize > 0
    assert_as_predicted(program.module()(inputs(6)), model, inputs(6))


@pytest.mark.slow
def test_an_exported_program_is_saved_with_all_it_needs(tmp_path: Any) -> None:
    model = fitted("sngp", 3)
    torch.export.save(exported(model), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2")
    assert_as_predicted(program.module()(inputs(6)), model, inputs(6))


@pytest.mark.parametrize("first", [5, 512])
def test_a_first_batch_of_the_size_of_a_constant(first: int) -> None:
    """There are 5 levels and 512 points: sizes that are equal by chance must not become equal for ever."""
    torch.compiler.reset()
    model = fitted("heteroscedastic", 3)
    compiled = torch.compile(
        model.prediction_module(), fullgraph=True, dynamic=True, backend=lambda graph, examples: graph.forward
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (first, 7):
            assert_as_predicted(compiled(inputs(batch)), model, inputs(batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "link"), [("sngp", "softmax"), ("hetsngp", "softmax"), ("hetsngp", "sigmoid")]
)
def test_the_default_compiler(method: str, link: str) -> None:
    torch.compiler.reset()
    model = fitted(method, 3, link)
    compiled = torch.compile(model.prediction_module(), fullgraph=True)
    for batch in (5, 1, 8):
        assert_as_predicted(compiled(inputs(batch)), model, inputs(batch))
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "link"),
    [("sngp", "softmax"), ("hetsngp", "softmax"), ("hetsngp", "sigmoid"), ("mimo", "softmax")],
)
def test_on_a_gpu(method: str, link: str) -> None:
    model = fitted(method, 3, link).cuda()
    module = model.prediction_module()
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(module, (inputs(4).cuda(),), dynamic_shapes=shapes)
    for batch in (1, 7):
        assert_as_predicted(program.module()(inputs(batch).cuda()), model, inputs(batch).cuda())
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True)
    assert_as_predicted(compiled(inputs(5).cuda()), model, inputs(5).cuda())


# --- the module itself -----------------------------------------------------------------------------------


def test_without_tracing_it_gives_the_fields_of_a_prediction() -> None:
    model = fitted("hetsngp", 3)
    module = model.prediction_module()
    assert isinstance(module, PredictionModule)
    assert_as_predicted(module(inputs(5)), model, inputs(5))
    assert torch.equal(hetsngp.Prediction(**module(inputs(5))).labels, model.predict(inputs(5)).labels)


def test_it_stays_in_eval_mode_and_takes_no_gradient() -> None:
    model = fitted("sngp", 3)
    model.train()
    module = model.prediction_module().train()
    assert not any(part.training for part in module.modules())
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not module(inputs(5).requires_grad_())["probs"].requires_grad
    assert all(part.training for part in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_later_training_and_fitting_do_not_change_it() -> None:
    model = fitted("sngp", 3, posterior="momentum")
    module, x = model.prediction_module(), inputs(6)
    before = module(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.temperature = 3.0
    model.update_posterior(inputs(20))
    after = model.prediction_module()(x)
    for name, value in module(x).items():
        assert torch.equal(value, before[name])
    assert not torch.allclose(after["probs"], before["probs"])
    assert not torch.allclose(after["latent_variance"], before["latent_variance"])


def test_it_follows_a_change_of_precision_and_copies() -> None:
    model = fitted("sngp", 3, posterior="exact")
    x = inputs(6).double()
    module = model.prediction_module().double()
    assert_as_predicted(module(x), copy.deepcopy(model).double(), x)
    again = pickle.loads(pickle.dumps(module))
    for name, value in copy.deepcopy(module)(x).items():
        assert torch.equal(value, module(x)[name])
        assert torch.equal(value, again(x)[name])


@pytest.mark.parametrize("posterior", [name for name in POSTERIOR_TYPES if name != "none"])
def test_an_unfitted_model_is_the_error_that_predict_raises(posterior: str) -> None:
    model = hetsngp.build("sngp", ResidualMLP(2, 8, 1), 3, random_features=16, posterior=posterior)
    with pytest.raises(hetsngp.PosteriorNotFittedError) as predicting:
        model.predict(inputs(2))
    for unfitted in (model, hetsngp.Ensemble([fitted("sngp", 3), model])):
        with pytest.raises(hetsngp.PosteriorNotFittedError) as making:
            unfitted.prediction_module()
        assert str(making.value) == str(predicting.value)


def test_weights_are_checked_when_it_is_made() -> None:
    model = fitted("sngp", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.prediction_module()
    with torch.no_grad():
        model.head.latent.beta.mul_(2)
    with pytest.warns(UserWarning, match="fit_posterior"):
        model.prediction_module()
    with torch.no_grad():
        model.head.latent.beta[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"head\.latent\.beta"):
        model.prediction_module()


@pytest.mark.parametrize(
    ("method", "link"),
    [("sngp", "softmax"), ("hetsngp", "softmax"), ("hetsngp", "sigmoid"), ("mimo", "softmax")],
)
def test_nan_in_an_example_is_in_its_answer_alone(method: str, link: str) -> None:
    model = fitted(method, 3, link)
    x = inputs(4)
    bad = x.clone()
    bad[2, 0] = torch.nan
    got, rest = model.prediction_module()(bad), torch.tensor([0, 1, 3])
    for name in ("probs", "total_uncertainty", "data_uncertainty", "model_uncertainty", "ood_score"):
        assert got[name][2].isnan().all(), name
        torch.testing.assert_close(
            got[name][rest], getattr(model.predict(x), name)[rest], rtol=1e-5, atol=1e-5
        )
