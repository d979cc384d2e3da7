"""Every option a user can set, once: command line, Python and server share these definitions.

Plain data with the checks that need nothing but the values themselves. Knows no file, no model and no JAX, so that
`--help` is quick.
"""

from novalm_jax.options.checks import Dtype, Kernels, PolicyName, check_dtype
from novalm_jax.options.engine import EngineOptions
from novalm_jax.options.files import ConvertOptions
from novalm_jax.options.measuring import (
    BatchBenchOptions,
    BenchOptions,
    ComparePlanOptions,
    PolicyBenchOptions,
    SweepOptions,
)
from novalm_jax.options.models import MakeModelOptions, ModelShape, TrainOptions
from novalm_jax.options.planning import EXPERT_BITS, PlanOptions
from novalm_jax.options.routing import MakeTraceOptions, RoutingOptions, SimulateOptions
from novalm_jax.options.sampling import MAX_LOGPROBS, SamplingParams

__all__ = [
    "EXPERT_BITS",
    "MAX_LOGPROBS",
    "BatchBenchOptions",
    "BenchOptions",
    "ComparePlanOptions",
    "ConvertOptions",
    "Dtype",
    "EngineOptions",
    "Kernels",
    "MakeModelOptions",
    "MakeTraceOptions",
    "ModelShape",
    "PlanOptions",
    "PolicyBenchOptions",
    "PolicyName",
    "RoutingOptions",
    "SamplingParams",
    "SimulateOptions",
    "SweepOptions",
    "TrainOptions",
    "check_dtype",
]
