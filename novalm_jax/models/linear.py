"""Linear layers and the gated MLP made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from novalm_jax.config import Activation
from novalm_jax.kernels.experts import gated
from novalm_jax.kernels.linear import products
from novalm_jax.models.params import parameter, zeros


class Linear(nnx.Module):
    """y = x W^T + b on `[..., in]`, with W in the checkpoint's layout `[out, in]`; `axes` names its two dimensions.

    Attributes:
      native: a runtime's choice, False at first: native code multiplies few rows.
    """

    def __init__(
        self, inputs: int, outputs: int, axes: tuple[str, str], *, bias: bool = False, dtype: Any, rngs: nnx.Rngs
    ):
        self.weight = parameter(rngs, (outputs, inputs), axes, dtype)
        self.bias = parameter(rngs, (outputs,), axes[:1], dtype, zeros) if bias else None
        self.native = False

    def __call__(self, x: jax.Array) -> jax.Array:
        return products_of((self,), x)[0]

    def unrounded(self, x: jax.Array) -> jax.Array:
        """As calling it, in float32 whatever the dtype of x."""
        return _unrounded((self,), x)[0]


def products_of(layers: Sequence[Linear], x: jax.Array) -> list[jax.Array]:
    """What each of some layers gives for the same `x [..., in]`; together they take less time."""
    return [y.astype(x.dtype) for y in _unrounded(layers, x)]


def _unrounded(layers: Sequence[Linear], x: jax.Array) -> list[jax.Array]:
    biases = [None if layer.bias is None else layer.bias[...] for layer in layers]
    return products(x, [layer.weight[...] for layer in layers], biases, layers[0].native)


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x)) on `[..., d]` (arXiv:2002.05202)."""

    def __init__(
        self, hidden_size: int, width: int, activation: Activation, *, bias: bool = False, dtype: Any, rngs: nnx.Rngs
    ):
        self.gate = Linear(hidden_size, width, ("mlp", "embed"), bias=bias, dtype=dtype, rngs=rngs)
        self.up = Linear(hidden_size, width, ("mlp", "embed"), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(width, hidden_size, ("embed", "mlp"), bias=bias, dtype=dtype, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = products_of((self.gate, self.up), x)
        return self.down(gated(gate, up, self.activation))
