"""Linear layers and the gated MLP made of them."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from novalm_jax.config import Activation
from novalm_jax.kernels.experts import gated
from novalm_jax.kernels.linear import linear
from novalm_jax.models.params import parameter, zeros


class Linear(nnx.Module):
    """y = x W^T + b on `[..., in]`, with W in the checkpoint's layout `[out, in]`; `axes` names its two dimensions."""

    def __init__(
        self, inputs: int, outputs: int, axes: tuple[str, str], *, bias: bool = False, dtype: Any, rngs: nnx.Rngs
    ):
        self.weight = parameter(rngs, (outputs, inputs), axes, dtype)
        self.bias = parameter(rngs, (outputs,), axes[:1], dtype, zeros) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])


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
        return self.down(gated(self.gate(x), self.up(x), self.activation))
