"""build(): the methods of the paper, as a grid of latent × noise × wrapper."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Unpack, cast

import torch
from torch import nn

from hetsngp.choices import MethodName
from hetsngp.limits import is_out_of_memory
from hetsngp.models.classifier import Classifier
from hetsngp.models.components import Components, amplitude_for, check_members
from hetsngp.models.ensemble import Ensemble
from hetsngp.models.multi_input import MultiInput
from hetsngp.models.options import BuildOptions, Options
from hetsngp.nn.backbones import BACKBONES
from hetsngp.nn.extractor import Extractor
from hetsngp.nn.heads import Head
from hetsngp.nn.multi_input import input_stack
from hetsngp.validation import (
    check_choice,
    check_class_counts,
    check_generator,
    check_num_classes,
)


@dataclass(frozen=True)
class Method:
    """Title of a method in figures, and the function that composes its head."""

    title: str
    compose: Callable[[Components], Head]

    def __call__(self, parts: Components) -> Head:
        return self.compose(parts)


WIDEST = 2**40
"""Most features of a backbone: more than any memory has room for."""

METHODS: dict[str, Method] = {}
"""Methods by name, the only list of them that loops, evaluation and estimator use."""


def method(title: str) -> Callable[[Callable[[Components], Head]], Callable[[Components], Head]]:
    """Register a method in :data:`METHODS` under the name of its function."""

    def register(compose: Callable[[Components], Head]) -> Callable[[Components], Head]:
        METHODS[compose.__name__] = Method(title, compose)
        return compose

    return register


@method("Deterministic")
def deterministic(parts: Components) -> Head:
    """Linear latent, no noise: the ordinary classifier."""
    return parts.gaussian(parts.linear())


@method("Heteroscedastic")
def heteroscedastic(parts: Components) -> Head:
    """Linear latent, label noise (Collier et al. 2021)."""
    latent = parts.linear()
    return parts.gaussian(latent, parts.noise(latent))


@method("SNGP")
def sngp(parts: Components) -> Head:
    """Bounded backbone and a GP (Liu et al. 2020)."""
    parts.bound_backbone()
    return parts.gaussian(parts.gp())


@method("HetSNGP")
def hetsngp(parts: Components) -> Head:
    """Bounded backbone, a GP, and label noise on top of it: the paper."""
    parts.bound_backbone()
    latent = parts.gp()
    return parts.gaussian(latent, parts.noise(latent))


@method("Posterior Network")
def posterior_network(parts: Components) -> Head:
    """A Dirichlet from one density per class (Charpentier et al. 2020)."""
    return parts.dirichlet()


@method("MIMO")
def mimo(parts: Components) -> Head:
    """M inputs, M linear heads, one backbone (Havasi et al. 2021)."""
    return deterministic(parts.for_members())


@method("HetSNGP + MIMO")
def hetsngp_mimo(parts: Components) -> Head:
    """M inputs, M HetSNGP heads, one backbone: future work of the paper."""
    return hetsngp(parts.for_members())


def build(
    method: MethodName,
    backbone: nn.Module,
    num_classes: int,
    *,
    generator: torch.Generator | None = None,
    **options: Unpack[BuildOptions],
) -> Classifier:
    """Make a classifier of ``method`` on ``backbone``, which maps x to (B, D) and has ``num_features`` = D.

    :class:`BuildOptions` describes the options, :class:`Options` has their defaults. The backbone is not
    copied: a GP bounds its layers in place, several inputs widen its first layer. ``generator`` (on the CPU)
    draws the initial values of the head.

    >>> import hetsngp
    >>> from hetsngp.nn.backbones import ResidualMLP
    >>> model = hetsngp.build("hetsngp", ResidualMLP(2, width=16, depth=2), num_classes=3, random_features=64)
    >>> model(torch.zeros(5, 2)).shape
    torch.Size([5, 3])
    """
    check_method(method)
    num_classes = check_num_classes(num_classes)
    resolved = check_options(options)
    check_generator(generator, "cpu")
    width = _num_features(backbone)
    # Saved with the model, which must not change with the default.
    resolved = replace(resolved, amplitude=amplitude_for(backbone, resolved))
    head = make_head(method, backbone, num_classes, resolved, generator)
    inputs = input_stack(backbone)
    check_members(inputs, head.num_members)
    config = {
        "method": method,
        "num_classes": num_classes,
        "options": options_to_save(resolved),
        "given": sorted(options),
        "backbone": describe_backbone(backbone),
    }
    common: dict[str, Any] = {"num_features": width, "dataset_size": resolved.dataset_size, "config": config}
    if inputs is None:
        return Classifier(backbone, head, **common)
    model = MultiInput(backbone, head, **common)
    model.input_repetition, model.batch_repetition = resolved.input_repetition, resolved.batch_repetition
    return model


def check_method(name: str) -> MethodName:
    """Check that ``name`` is in :data:`METHODS`. Methods that other packages add are accepted at run time,
    though ``MethodName`` does not list them.
    """
    return cast(MethodName, check_choice("method", name, METHODS))


def check_options(options: Mapping[str, Any]) -> Options:
    """Make :class:`Options` of keyword arguments; an unknown name is an error."""
    known = {f.name for f in fields(Options)}
    for name in options:
        check_choice("option", name, sorted(known))
    return Options(**options)


def options_to_save(options: Options) -> dict[str, Any]:
    """Options for the config of a saved model, without the class counts, which the head saves as a buffer."""
    return {**asdict(options), "class_counts": None}


def make_head(
    method: MethodName,
    backbone: nn.Module,
    num_classes: int,
    options: Options,
    generator: torch.Generator | None = None,
) -> Head:
    """Make the head of ``method`` for the features of ``backbone``, which is prepared for it, in place."""
    parts = Components(backbone, _num_features(backbone), num_classes, options, generator)
    try:
        head = METHODS[method](parts)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) and "overflow" not in str(error):
            raise
        sizes = {name: getattr(options, name) for name in ("random_features", "rank", "num_members")}
        raise MemoryError(
            f"no memory for the head of method {method!r}, {num_classes} classes and {parts.num_features} "
            f"features: lower {', '.join(f'{name}={value}' for name, value in sizes.items())}"
        ) from error
    if options.class_counts is not None:
        head.set_class_counts(check_class_counts(options.class_counts, num_classes))
    elif options.dataset_size is not None:
        head.set_uniform_counts(options.dataset_size)
    device = next((t.device for t in (*backbone.parameters(), *backbone.buffers())), None)
    if device is not None and head.temperature.device.type != "meta":
        head.to(device)
    return head


def build_ensemble(
    methods: MethodName | Sequence[MethodName],
    make_backbone: Callable[[torch.Generator], nn.Module],
    num_classes: int,
    *,
    seeds: Iterable[int] = (0, 1, 2, 3),
    **options: Unpack[BuildOptions],
) -> Ensemble:
    """Make a deep ensemble: a member for every method and seed, each with another network and initial values.

    ``make_backbone`` gets the member's generator, seeded; torch's default generator is seeded too while it
    runs (and restored), for backbones that take none. Train, fit and save the ensemble as one model:
    ``train(ensemble, ...)``, ``fit_posterior(ensemble, ...)``, ``save(ensemble, path)``.

    >>> from hetsngp.nn.backbones import ResidualMLP
    >>> def network(generator):
    ...     return ResidualMLP(2, width=8, depth=1, generator=generator)
    >>> ensemble = build_ensemble("sngp", network, num_classes=3, seeds=[0, 1])
    >>> len(ensemble.members), ensemble(torch.zeros(5, 2)).shape
    (2, torch.Size([5, 3]))
    """
    if not callable(make_backbone) or isinstance(make_backbone, nn.Module):
        raise TypeError(
            f"make_backbone must be a function of a generator that returns a new network, got "
            f"{type(make_backbone).__name__}: lambda generator: MyNetwork()"
        )
    if not isinstance(methods, Iterable) or isinstance(methods, torch.Tensor):
        raise TypeError(f"methods must be a name or a list of names, got {type(methods).__name__}")
    seeds = _check_seeds(seeds)
    members = []
    for method in [methods] if isinstance(methods, str) else methods:
        check_method(method)
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach every GPU
                backbone = make_backbone(generator)
                members.append(build(method, backbone, num_classes, generator=generator, **options))
    if len({id(member.backbone) for member in members}) < len(members):
        raise ValueError("make_backbone must return a new network each time, or members share their weights")
    return Ensemble(members)


def _check_seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, Iterable) and not isinstance(seeds, str | torch.Tensor):
        found = list(seeds)
        if all(isinstance(s, numbers.Integral) and not isinstance(s, bool) for s in found):
            return [int(seed) for seed in found]
    raise TypeError(f"seeds must be whole numbers, one for each member, e.g. [0, 1, 2], got {seeds!r:.100}")


def _num_features(backbone: nn.Module) -> int:
    if not isinstance(backbone, nn.Module):
        raise TypeError(f"backbone must be a torch.nn.Module, got {type(backbone).__name__}")
    width = getattr(backbone, "num_features", None)
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= WIDEST:
        raise ValueError(
            f"{type(backbone).__name__}.num_features is {width!r}: set it to the width D of the features the "
            "backbone returns, e.g. backbone.num_features = 512"
        )
    return width


def describe_backbone(backbone: nn.Module) -> dict[str, Any]:
    """Name and arguments of a backbone of this package; for others the class, which ``load`` asks for."""
    if isinstance(backbone, Extractor):
        return backbone.description
    name = type(backbone).__name__
    if BACKBONES.get(name) is type(backbone):
        return {"name": name, "config": dict(backbone.config)}  # type: ignore[arg-type]
    return {"name": None, "class": name}
