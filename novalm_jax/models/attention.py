"""Grouped-query attention: projections, norms, rotation; and what every attention needs of a cache.

Refuses to know where keys and values are kept: the caller hands in a `KV`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from novalm_jax.config import AttentionConfig, TemperatureConfig
from novalm_jax.kernels import attention as kernel
from novalm_jax.kernels import latent_attention
from novalm_jax.kernels.attention import Rule
from novalm_jax.kernels.latent_attention import Up
from novalm_jax.models import rope
from novalm_jax.models.linear import Linear, products_of
from novalm_jax.models.norms import RMSNorm, unit_rms
from novalm_jax.models.params import parameter


class KV(Protocol):
    """What attention needs of a cache: take what it keeps of the new tokens, and attend to all it holds."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, rule: Rule, sinks: jax.Array | None
    ) -> tuple[jax.Array, Self]:
        """q `[b, t, h, c]`, k and v `[b, t, g, c]` -> attention `[b, t, h, c]` and the cache that follows."""
        ...

    def attend_latent(self, q: jax.Array, latents: jax.Array, up: Up, rule: Rule) -> tuple[jax.Array, Self]:
        """q `[b, t, h, n + r]`, latents `[b, t, l + r]` -> attention `[b, t, h, c]` and the cache that follows."""
        ...


Cache = TypeVar("Cache", bound=KV)


class Uncached:
    """No cache: whole sequences attend to themselves. Differentiable."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, rule: Rule, sinks: jax.Array | None
    ) -> tuple[jax.Array, Uncached]:
        """As `KV.attend`, for sequences that begin with these tokens."""
        return kernel.blocked(q, k, v, rule, sinks), self

    def attend_latent(self, q: jax.Array, latents: jax.Array, up: Up, rule: Rule) -> tuple[jax.Array, Uncached]:
        """As `KV.attend_latent`, for sequences that begin with these tokens."""
        return latent_attention.reference(q, latents, up, rule), self


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
        self.q_norm = self.k_norm = None
        if config.qk_norm in ("head", "all"):
            per_head = config.qk_norm == "head"
            sizes = (config.head_dim, config.head_dim) if per_head else (q_size, kv_size)
            axes = ("head_dim", "head_dim") if per_head else ("q_heads", "kv_heads")
            self.q_norm, self.k_norm = (
                nnx.data(RMSNorm(size, norm_eps, axis=axis, dtype=dtype, rngs=rngs))
                for size, axis in zip(sizes, axes, strict=True)
            )
        self.sinks = parameter(rngs, (config.num_heads,), ("q_heads",), dtype) if config.sinks else None
        self.norm_eps = norm_eps

    def __call__(self, x: jax.Array, at: Positions, kv: Cache) -> tuple[jax.Array, Cache]:
        """`x [b, t, d]` -> attention output `[b, t, d]` in x's dtype, and the cache with these tokens in it."""
        config = self.config
        angles = None
        if config.rope is not None:
            angles = rope.angles(config.rope, config.rotary_dim, at.tokens, at.length)
        q, k, v = products_of((self.q, self.k, self.v), x)
        q = self._placed(self._heads(q, self.q_norm, config.num_heads), self.q_norm, angles)
        k = self._placed(self._heads(k, self.k_norm, config.num_kv_heads), self.k_norm, angles)
        v = self._heads(v, None, config.num_kv_heads)
        if config.temperature is not None:
            q = (q.astype(jnp.float32) * temperature(config.temperature, at.tokens)[..., None, None]).astype(q.dtype)
        sinks = None if self.sinks is None else self.sinks[...]
        mixed, kv = kv.attend(q, k, v, Rule(config.scale, config.window, config.chunk), sinks)
        return self.out(mixed.reshape(*x.shape[:2], config.num_heads * config.head_dim)), kv

    def _heads(self, x: jax.Array, norm: RMSNorm | None, heads: int) -> jax.Array:
        """Split into heads, `[b, t, heads * c]` -> `[b, t, heads, c]`, after clipping and a norm over all of them."""
        if norm is not None and self.config.qk_norm == "all":
            x = norm(x)
        if self.config.clip_qkv is not None:
            x = jnp.clip(x, -self.config.clip_qkv, self.config.clip_qkv)
        return x.reshape(*x.shape[:2], heads, self.config.head_dim)

    def _placed(self, x: jax.Array, norm: RMSNorm | None, angles: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        """Rotation and norms over each head of `x [b, t, heads, c]`, in the order of the family."""
        config = self.config
        if norm is not None and config.qk_norm == "head" and not config.norm_after_rope:
            x = norm(x)
        if angles is not None and config.rope is not None:
            x = rope.rotate(x, *angles, pairs=config.rope.pairs)
        if norm is not None and config.qk_norm == "head" and config.norm_after_rope:
            x = norm(x)
        return unit_rms(x, self.norm_eps, x.dtype) if config.qk_norm == "unit" else x


def temperature(config: TemperatureConfig, positions: jax.Array) -> jax.Array:
    """What queries at these positions, int32 `[...]`, are multiplied by: float32 `[...]` (arXiv:2501.19399)."""
    steps = jnp.floor((positions.astype(jnp.float32) + 1.0) / config.floor)
    return jnp.log1p(steps) * config.scale + 1.0
