"""Components of the methods of build(): latents, noises and heads, and the preparation of a backbone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hetsngp.models.options import Options
from hetsngp.nn.dirichlet import DirichletHead
from hetsngp.nn.extractor import Extractor, Features
from hetsngp.nn.heads import GaussianHead, Link
from hetsngp.nn.latent import Kernel, LinearLatent, RandomFeatureGP
from hetsngp.nn.multi_input import InputStack, input_stack, tighten_for_tiles, widen_inputs, widened_module
from hetsngp.nn.noise import CLASS_NOISES, FeatureNoise, Noise
from hetsngp.nn.spectral import bound_spectrally

# Amplitude, normalization of the kernel's inputs and spectral bound, by kind of backbone; measured in
# docs/decisions.md.
DEFAULT_AMPLITUDE = {"mlp": 10.0, "convolutional": 5.0, "attention": 10.0}
DEFAULT_NORMALIZATION = {"mlp": "rms", "convolutional": "direction", "attention": "direction"}
DEFAULT_BOUND = {"mlp": 0.95, "convolutional": 6.0, "attention": None}


@dataclass(frozen=True)
class Components:
    """Factory of the components of a method, for one backbone and one set of options."""

    backbone: nn.Module
    num_features: int
    num_classes: int
    options: Options
    generator: torch.Generator | None
    members: int = 1

    def bound_backbone(self) -> None:
        """Bound the backbone spectrally, in place. The features of a converted network do not change, and a
        frozen network is not bounded.
        """
        check_members(input_stack(self.backbone), self.members)
        bound = spectral_bound_for(self.backbone, self.options)
        if bound is not None:
            fresh = bound_spectrally(self.backbone, bound, keep=isinstance(self.backbone, Extractor))
            widened = widened_module(self.backbone)
            if widened is not None and any(self.backbone.get_submodule(n) is widened[0] for n in fresh):
                tighten_for_tiles(widened[0], self.members)

    def for_members(self) -> Components:
        """Components for ``num_members`` inputs and heads; widens the backbone's first layer, in place."""
        members = self.options.num_members
        widen_inputs(self.backbone, members, generator=self.generator)
        return replace(self, members=members)

    def linear(self) -> LinearLatent:
        return LinearLatent(
            self.num_features, self.num_classes, members=self.members, generator=self.generator
        )

    def gp(self) -> RandomFeatureGP:
        o = self.options
        kind = o.normalization or DEFAULT_NORMALIZATION[kind_of(self.backbone)]
        form = "sincos" if o.features == "random" else o.features
        kernel = Kernel(
            o.random_features,
            amplitude_for(self.backbone, o),
            o.length_scale,
            kind,
            features=form,
            linear_share=o.linear_share if o.kernel == "rbf+linear" else 0.0,
        )
        return RandomFeatureGP(
            self.num_features,
            self.num_classes,
            kernel,
            posterior=o.posterior,
            link=o.link,
            members=self.members,
            generator=self.generator,
        )

    def noise(self, latent: LinearLatent | RandomFeatureGP) -> Noise:
        """Noise of the logits that ``latent`` gives."""
        o = self.options
        shared: dict[str, Any] = {"members": self.members, "generator": self.generator}
        if o.noise in CLASS_NOISES:
            return CLASS_NOISES[o.noise](self.num_features, self.num_classes, o.rank, **shared)
        if isinstance(latent, LinearLatent):
            return FeatureNoise(self.num_features, self.num_features, o.rank, **shared)
        unit = latent.kernel.amplitude / math.sqrt(latent.num_kernel_features)  # ‖φ‖ = a
        return FeatureNoise(self.num_features, latent.num_kernel_features, o.rank, unit=unit, **shared)

    @property
    def link(self) -> Link:
        o = self.options
        return Link(o.link, o.likelihood, o.sampler, o.num_samples)

    def gaussian(self, latent: LinearLatent | RandomFeatureGP, noise: Noise | None = None) -> GaussianHead:
        o = self.options
        return GaussianHead(
            latent,
            noise,
            self.link,
            num_classes=self.num_classes,
            temperature=o.temperature,
            sample_beta=o.sample_beta,
        )

    def dirichlet(self) -> DirichletHead:
        o = self.options
        if o.link != "softmax":
            raise ValueError(
                f"a Dirichlet is for one label of each example, not for link={o.link!r}: build with "
                "link='softmax', or another method"
            )
        return DirichletHead(
            self.num_features,
            self.num_classes,
            self.link,
            latent_dim=o.latent_dim,
            flow_layers=o.flow_layers,
            entropy_weight=o.entropy_weight,
            temperature=o.temperature,
            generator=self.generator,
        )


def amplitude_for(backbone: nn.Module, options: Options) -> float:
    """Amplitude of the kernel: that of the options, or the default for this kind of backbone."""
    return DEFAULT_AMPLITUDE[kind_of(backbone)] if options.amplitude is None else options.amplitude


def spectral_bound_for(backbone: nn.Module, options: Options) -> float | None:
    """Bound c for the layers of ``backbone``; None: no bound."""
    if isinstance(backbone, Extractor) and backbone.frozen:
        return None
    bound = options.spectral_bound
    bound = DEFAULT_BOUND[kind_of(backbone)] if bound is None else bound
    return None if bound == float("inf") else bound


def check_members(inputs: InputStack | None, members: int) -> None:
    """Check that a backbone widened for several inputs has a head for each of them."""
    if inputs is not None and inputs.num_inputs != members:
        raise ValueError(
            f"this backbone was widened to take {inputs.num_inputs} inputs at once: a model of {members} "
            "needs a fresh one"
        )


def kind_of(backbone: nn.Module) -> str:
    """Kind of network the defaults depend on: "attention", "convolutional" or "mlp"."""
    if isinstance(backbone, Features) and backbone.kind is not None:
        return backbone.kind
    names = [type(module).__name__.lower() for module in backbone.modules()]
    if any("attention" in name or "transformer" in name for name in names):
        return "attention"
    return "convolutional" if any("conv" in name for name in names) else "mlp"
