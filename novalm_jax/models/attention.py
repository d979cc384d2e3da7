"""Grouped-query attention: projections, norms, rotation.

Refuses to know where keys and values are kept: the caller hands in a `KV`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from novalm_jax.config import AttentionConfig
from novalm_jax.kernels import attention as kernel
from novalm_jax.models import rope
from novalm_jax.models.linear import Linear
from novalm_jax.models.norms import RMSNorm


class KV(Protocol):
    """What attention needs of a cache: take the new keys and values, and give the attention of q to all it holds."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, scale: float, window: int | None
    ) -> tuple[jax.Array, Self]:
        """q `[b, t, h, c]`, k and v `[b, t, g, c]` -> attention `[b, t, h, c]` and the cache that follows."""
        ...


Cache = TypeVar("Cache", bound=KV)


class Uncached:
    """No cache: whole sequences attend to themselves. Differentiable."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, scale: float, window: int | None
    ) -> tuple[jax.Array, Uncached]:
        """As `KV.attend`, for sequences that begin with these tokens."""
        return kernel.reference(q, k, v, scale, window), self


class Positions(NamedTuple):
    """Where tokens stand, int32 `[b, t]`, and how many tokens each sequence has with them, int32 `[b]`."""

    tokens: jax.Array
    length: jax.Array


class Attention(nnx.Module):
    """Causal self-attention with grouped key-value heads (arXiv:2305.13245) and rotary positions."""

    def __init__(self, hidden_size: int, config: AttentionConfig, norm_eps: float, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def project(size: int, axis: str) -> Linear:
            return Linear(hidden_size, size, (axis, "embed"), bias=config.qkv_bias, dtype=dtype, rngs=rngs)

        self.q = project(q_size, "q_heads")
        self.k = project(kv_size, "kv_heads")
        self.v = project(kv_size, "kv_heads")
        self.out = Linear(q_size, hidden_size, ("embed", "q_heads"), bias=config.out_bias, dtype=dtype, rngs=rngs)
        norm_sizes = {"none": None, "head": (config.head_dim, config.head_dim), "all": (q_size, kv_size)}
        self.q_norm = self.k_norm = None
        if sizes := norm_sizes[config.qk_norm]:
            axes = ("head_dim", "head_dim") if config.qk_norm == "head" else ("q_heads", "kv_heads")
            self.q_norm, self.k_norm = (
                nnx.data(RMSNorm(size, norm_eps, axis=axis, dtype=dtype, rngs=rngs))
                for size, axis in zip(sizes, axes, strict=True)
            )

    def __call__(self, x: jax.Array, at: Positions, kv: Cache) -> tuple[jax.Array, Cache]:
        """`x [b, t, d]` -> attention output `[b, t, d]` in x's dtype, and the cache with these tokens in it."""
        config = self.config
        cos, sin = rope.angles(config.rope, config.head_dim, at.tokens, at.length)
        q = rope.rotate(self._heads(self.q(x), self.q_norm, config.num_heads), cos, sin)
        k = rope.rotate(self._heads(self.k(x), self.k_norm, config.num_kv_heads), cos, sin)
        v = self._heads(self.v(x), None, config.num_kv_heads)
        mixed, kv = kv.attend(q, k, v, config.scale, config.window)
        return self.out(mixed.reshape(*x.shape[:2], config.num_heads * config.head_dim)), kv

    def _heads(self, x: jax.Array, norm: RMSNorm | None, heads: int) -> jax.Array:
        """Norm, clip and split into heads: `[b, t, heads * c]` -> `[b, t, heads, c]`."""
        across = norm is not None and self.config.qk_norm == "all"
        if norm is not None and across:
            x = norm(x)
        if self.config.clip_qkv is not None:
            x = jnp.clip(x, -self.config.clip_qkv, self.config.clip_qkv)
        x = x.reshape(*x.shape[:2], heads, self.config.head_dim)
        return x if norm is None or across else norm(x)
