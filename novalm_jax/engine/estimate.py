"""What a model would take of device memory, by formulas of its configuration and options alone.

Of the parts that `placement` counts all are the same but the workspace, which is a bound here and compiled there. No
weight is needed, nothing is compiled, and no memory is taken.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from novalm_jax.config import ModelConfig, MoEConfig
from novalm_jax.engine.programs import Shapes, capacity_for
from novalm_jax.engine.sampler import Sampler
from novalm_jax.engine.workspace import Workspace
from novalm_jax.experts.fetcher import IN_FLIGHT
from novalm_jax.experts.memory_plan import MemoryPlan
from novalm_jax.experts.records import moe_layers
from novalm_jax.kernels.storage import tree_bytes
from novalm_jax.kv.static import cache_shape
from novalm_jax.models.counts import dense_counts, expert_count, outer_counts
from novalm_jax.options import EngineOptions


def estimate_plan(
    config: ModelConfig, options: EngineOptions, context: int, slots: int | None = None, pass_chunks: int = 1
) -> MemoryPlan:
    """The plan that placing the model comes to, or a little more.

    Args:
      config: the model.
      options: `dtype` and `max_batch` of them.
      context: tokens of a request.
      slots: experts on the device, where they come and go; None where all of them stay.
      pass_chunks: prefill chunks that share a pass over experts that come and go.
    """
    dtype = np.dtype(jnp.dtype(options.dtype))
    shapes = Shapes(options.max_batch, capacity_for(context), dtype)
    workspace = Workspace(config, shapes)
    caches = [cache_shape(layer.attention, shapes.rows, shapes.capacity, dtype) for layer in config.layers]
    held = {
        "KV cache": tree_bytes(caches),
        "sampler": Sampler(options.max_batch, config.vocab_size).nbytes,
        "prompt that waits": workspace.paused_bytes,
    }
    dense = {"dense weights": dense_bytes(config, dtype)}
    if slots is None:
        experts = sum(moe.num_experts * _expert_bytes(config, moe, dtype) for moe in moe_layers(config).values())
        return MemoryPlan({**dense, "experts": experts, **held, "workspace": workspace.resident_bytes()})
    record = record_bytes(config, dtype)
    pool = {"expert slots": slots * record, "experts under way": IN_FLIGHT * record}
    chunks = {"prefill chunks": (pass_chunks - 1) * workspace.chunk_bytes}
    return MemoryPlan({**dense, **pool, **held, **chunks, "workspace": workspace.streamed_bytes()})


def dense_bytes(config: ModelConfig, dtype: np.dtype) -> int:
    """Everything that is not a routed expert."""
    counts = (outer_counts(config), *map(dense_counts, config.layers))
    return sum(count.bytes(dtype.itemsize) for count in counts)


def record_bytes(config: ModelConfig, dtype: np.dtype) -> int:
    """A routed expert; the largest, where they differ (such a model can only be resident)."""
    return max(_expert_bytes(config, moe, dtype) for moe in moe_layers(config).values())


def _expert_bytes(config: ModelConfig, moe: MoEConfig, dtype: np.dtype) -> int:
    return dtype.itemsize * expert_count(config.hidden_size, moe.expert)
