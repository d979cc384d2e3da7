"""The one declaration that every parameter has: shape, dtype, logical axes and initialiser.

Initial values, loading and sharding all derive from it: `nnx.eval_shape` turns a module into the same tree of shapes,
each with its axes as metadata. Axis names are the logical ones that sharding plans map to a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

LOGICAL_AXES = ("vocab", "embed", "q_heads", "kv_heads", "head_dim", "latent", "mlp", "expert", "expert_mlp", "one")
"""Every name that dimensions of parameters have.

`q_heads` and `kv_heads` count heads times their dimension, or heads alone; `latent` is the rank of latent attention.
"""

Initialiser = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

ones: Initialiser = nnx.initializers.ones
zeros: Initialiser = nnx.initializers.zeros
normal: Initialiser = nnx.initializers.normal(0.02)


def parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any, init: Initialiser = normal
) -> nnx.Param:
    """A trainable array of this shape and dtype; `axes` names each dimension for sharding."""
    assert len(shape) == len(axes) and set(axes) <= set(LOGICAL_AXES), f"{axes} do not describe {shape}"
    return nnx.Param(init(rngs.params(), shape, dtype), axes=axes)


def parameters_of(module: nnx.Module) -> dict[str, nnx.Param]:
    """Every parameter by its path, such as `layers.0.attention.q.weight`."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): param for path, param in flat}
