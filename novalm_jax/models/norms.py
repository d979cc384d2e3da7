"""Normalisation layers. Their results have the dtype of their weights, in which products are computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from novalm_jax.config import NormConfig
from novalm_jax.models.params import ones, parameter, zeros


def unit_rms(x: jax.Array, eps: float, dtype: Any) -> jax.Array:
    """x / rms(x) over the last axis of `[..., size]`, in float32, rounded to `dtype` (arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + eps)).astype(dtype)


class RMSNorm(nnx.Module):
    """`unit_rms`, then times the scale, with the rounding of Llama."""

    def __init__(self, size: int, eps: float, *, axis: str = "embed", dtype: Any, rngs: nnx.Rngs):
        self.scale = parameter(rngs, (size,), (axis,), dtype, ones)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        return unit_rms(x, self.eps, scale.dtype) * jnp.broadcast_to(scale, x.shape)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / std(x) over the last axis, times the scale, plus a bias if there is one (arXiv:1607.06450).

    In float32, rounded once.
    """

    def __init__(self, size: int, eps: float, *, bias: bool, dtype: Any, rngs: nnx.Rngs):
        self.scale = parameter(rngs, (size,), ("embed",), dtype, ones)
        self.bias = parameter(rngs, (size,), ("embed",), dtype, zeros) if bias else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        scale = self.scale[...]
        y = centred * lax.rsqrt(variance + self.eps) * jnp.broadcast_to(scale.astype(jnp.float32), x.shape)
        if self.bias is not None:
            y += jnp.broadcast_to(self.bias[...].astype(jnp.float32), x.shape)
        return y.astype(scale.dtype)


def make_norm(size: int, config: NormConfig, *, dtype: Any, rngs: nnx.Rngs) -> RMSNorm | LayerNorm:
    """The norm that a configuration describes, over `size` numbers of the hidden state."""
    if config.kind == "layer":
        return LayerNorm(size, config.eps, bias=config.bias, dtype=dtype, rngs=rngs)
    return RMSNorm(size, config.eps, dtype=dtype, rngs=rngs)
