"""What a model would take of device memory, by formulas of its configuration and options alone.

Of the parts that `placement` counts all are the same but the workspace, which is a bound here and compiled there. No
weight is needed, nothing is compiled, and no memory is taken.
"""

from __future__ import annotations

import math
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from novalm_jax.config import ModelConfig, MoEConfig
from novalm_jax.engine.fitting import Sizes
from novalm_jax.engine.programs import Shapes
from novalm_jax.engine.sampler import Sampler
from novalm_jax.engine.workspace import Workspace
from novalm_jax.experts.dense import DensePlan
from novalm_jax.experts.fetcher import IN_FLIGHT
from novalm_jax.experts.memory_plan import MemoryPlan
from novalm_jax.experts.records import moe_layers
from novalm_jax.kv.paged import page_bytes
from novalm_jax.kv.pages import blocks
from novalm_jax.models.counts import dense_counts, ends_counts, expert_count, gated_mlp, outer_counts
from novalm_jax.options import EngineOptions


def estimate_plan(
    config: ModelConfig,
    options: EngineOptions,
    context: int,
    pages: int | None = None,
    slots: int | None = None,
    pass_chunks: int = 1,
    dense: DensePlan | None = None,
    expert_bits: float | None = None,
) -> MemoryPlan:
    """The plan that placing the model comes to, or a little more.

    Args:
      config: the model.
      options: `dtype`, `max_batch` and `kernels` of them.
      context: tokens of a request.
      pages: of layers that see everything; None: for `max_batch` requests.
      slots: experts on the device, where they come and go; None where all of them stay, 0 where there are none.
      pass_chunks: prefill chunks that share a pass over weights that come and go.
      dense: where dense weights are that come in parts; only with `slots`.
      expert_bits: as in `expert_bytes`.
    """
    dtype = np.dtype(jnp.dtype(options.dtype))
    shapes = Shapes.of(config, options.max_batch, context, dtype, pages, pass_chunks, options.kernels)
    workspace = Workspace(config, shapes, dense)
    held = {
        "KV cache": sum(page_bytes(config, shapes.capacity, shapes.pages, dtype)),
        "sampler": Sampler(options.max_batch, config.vocab_size).nbytes,
        "prompt that waits": workspace.paused_bytes,
    }
    weights = {"dense weights": dense_bytes(config, dtype)}
    if slots is None:
        experts = sum(
            moe.num_experts * expert_bytes(config, moe, dtype, expert_bits) for moe in moe_layers(config).values()
        )
        return MemoryPlan({**weights, "experts": experts, **held, "workspace": workspace.resident_bytes()})
    if dense is not None:
        kept = ends_counts(config).bytes(dtype.itemsize) + dense.kept_bytes
        weights = {"dense weights": kept, "dense weights under way": dense.under_way_bytes}
    if slots:
        record = record_bytes(config, dtype, expert_bits)
        weights |= {"expert slots": slots * record, "experts under way": IN_FLIGHT * record}
    chunks = {"prefill chunks": (pass_chunks - 1) * workspace.chunk_bytes}
    return MemoryPlan({**weights, **held, **chunks, "workspace": workspace.streamed_bytes()})


def dense_bytes(config: ModelConfig, dtype: np.dtype) -> int:
    """Everything that is not a routed expert."""
    counts = (outer_counts(config), *map(dense_counts, config.layers))
    return sum(count.bytes(dtype.itemsize) for count in counts)


def record_bytes(config: ModelConfig, dtype: np.dtype, expert_bits: float | None = None) -> int:
    """A routed expert; the largest, where they differ (such a model can only be resident); 0 where there are none."""
    return max((expert_bytes(config, moe, dtype, expert_bits) for moe in moe_layers(config).values()), default=0)


def expert_bytes(config: ModelConfig, moe: MoEConfig, dtype: np.dtype, expert_bits: float | None = None) -> int:
    """A routed expert of a layer. With `expert_bits`, which count what scales add, its matrices take so many for each
    number in place of the dtype's, as in formats that are not loaded yet; biases stay."""
    numbers = expert_count(config.hidden_size, moe.expert)
    if expert_bits is None:
        return dtype.itemsize * numbers
    matrices = gated_mlp(config.hidden_size, moe.expert.width)
    return math.ceil(matrices * expert_bits / 8) + dtype.itemsize * (numbers - matrices)


class Estimated(Sizes):
    """What the parts of a model take by formulas: as much as compiled programs say, or a little more."""

    def __init__(self, config: ModelConfig, options: EngineOptions, expert_bits: float | None = None):
        """`expert_bits` as in `expert_bytes`."""
        super().__init__(config, options)
        self._bits = expert_bits

    @cached_property
    def record_bytes(self) -> int:
        """As in `Sizes`."""
        return super().record_bytes if self._bits is None else record_bytes(self.config, self._dtype, self._bits)

    def chunk_bytes(self, context: int) -> int:
        """As in `Sizes`."""
        return Workspace(self.config, self.shapes(context, blocks(context))).chunk_bytes

    def held(self, context: int, pages: int) -> dict[str, int]:
        """As in `Sizes`."""
        return {name: size for name, size in self.resident(context, pages).parts.items() if name != "workspace"}

    def resident(self, context: int, pages: int) -> MemoryPlan:
        """As in `Sizes`."""
        return estimate_plan(self.config, self._options, context, pages, expert_bits=self._bits)

    def streamed(self, context: int, pages: int, slots: int, pass_chunks: int, dense: DensePlan | None) -> MemoryPlan:
        """As in `Sizes`."""
        return estimate_plan(self.config, self._options, context, pages, slots, pass_chunks, dense, self._bits)
