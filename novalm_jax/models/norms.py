"""Normalisation layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from novalm_jax.models.params import ones, parameter


class RMSNorm(nnx.Module):
    """x / rms(x) over the last axis of `[..., size]`, in float32, rounded to x's dtype, then times the scale.

    From arXiv:1910.07467, with the rounding of Llama.
    """

    def __init__(self, size: int, eps: float, *, axis: str = "embed", dtype: Any, rngs: nnx.Rngs):
        self.scale = parameter(rngs, (size,), (axis,), dtype, ones)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normal = (wide * lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normal * jnp.broadcast_to(self.scale[...], x.shape)
