"""Names that options take, for checks, editors and the help of the command line; imports nothing."""

from typing import Literal, get_args

MethodName = Literal[
    "deterministic", "heteroscedastic", "sngp", "hetsngp", "posterior_network", "mimo", "hetsngp_mimo"
]
NormalizationName = Literal["direction", "polar", "rms", "power"]
KernelName = Literal["rbf", "rbf+linear"]
FeaturesName = Literal["random", "inducing"]
PosteriorName = Literal["kronecker", "exact", "shared", "momentum", "none"]
NoiseName = Literal["low_rank", "parameter_efficient", "feature"]
LinkName = Literal["softmax", "sigmoid"]
LikelihoodName = Literal["log_mean", "mean_log"]
SamplerName = Literal["sobol", "mc", "antithetic"]

METHOD_NAMES: tuple[MethodName, ...] = get_args(MethodName)
NORMALIZATIONS: tuple[NormalizationName, ...] = get_args(NormalizationName)
KERNELS: tuple[KernelName, ...] = get_args(KernelName)
FEATURES: tuple[FeaturesName, ...] = get_args(FeaturesName)
POSTERIORS: tuple[PosteriorName, ...] = get_args(PosteriorName)
NOISES: tuple[NoiseName, ...] = get_args(NoiseName)
LINKS: tuple[LinkName, ...] = get_args(LinkName)
LIKELIHOODS: tuple[LikelihoodName, ...] = get_args(LikelihoodName)
SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
