"""Multi-head latent attention (arXiv:2405.04434, section 2.1): projections, norms, rotation.

Refuses to know where latents are kept, and in which of its two forms the sum is taken: the caller hands in a `KV`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from novalm_jax.config import LatentConfig
from novalm_jax.kernels.attention import Rule
from novalm_jax.kernels.latent_attention import Up
from novalm_jax.models import rope
from novalm_jax.models.attention import Cache, Positions
from novalm_jax.models.linear import Linear, products_of
from novalm_jax.models.norms import RMSNorm


class LatentAttention(nnx.Module):
    """Causal self-attention whose keys and values come from one latent vector a token."""

    def __init__(self, hidden_size: int, config: LatentConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        heads, query_dim = config.num_heads, config.nope_dim + config.rope_dim

        def linear(inputs: int, outputs: int, axes: tuple[str, str], bias: bool = False) -> Linear:
            return Linear(inputs, outputs, axes, bias=bias, dtype=dtype, rngs=rngs)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.norm_eps, axis="latent", dtype=dtype, rngs=rngs)

        self.q = self.q_down = self.q_norm = self.q_up = None
        if config.query_rank is None:
            self.q = nnx.data(linear(hidden_size, heads * query_dim, ("q_heads", "embed")))
        else:
            self.q_down = nnx.data(linear(hidden_size, config.query_rank, ("latent", "embed"), config.bias))
            self.q_norm = nnx.data(norm(config.query_rank))
            self.q_up = nnx.data(linear(config.query_rank, heads * query_dim, ("q_heads", "latent")))
        self.kv_down = linear(hidden_size, config.kv_rank + config.rope_dim, ("latent", "embed"), config.bias)
        self.kv_norm = norm(config.kv_rank)
        self.kv_up = linear(config.kv_rank, heads * (config.nope_dim + config.value_dim), ("q_heads", "latent"))
        self.out = linear(heads * config.value_dim, hidden_size, ("embed", "q_heads"), config.bias)

    def __call__(self, x: jax.Array, at: Positions, kv: Cache) -> tuple[jax.Array, Cache]:
        """`x [b, t, d]` -> attention output `[b, t, d]` in x's dtype, and the cache with these tokens in it."""
        config = self.config
        b, t, _ = x.shape
        cos, sin = rope.angles(config.rope, config.rope_dim, at.tokens, at.length)
        q, down = self._queries_and_latents(x)
        q = q.reshape(b, t, config.num_heads, config.nope_dim + config.rope_dim)
        plain, turned = q[..., : config.nope_dim], q[..., config.nope_dim :]
        q = jnp.concatenate([plain, rope.rotate(turned, cos, sin, pairs=config.rope.pairs)], axis=-1)
        compressed, key = self.kv_norm(down[..., : config.kv_rank]), down[..., None, config.kv_rank :]
        latents = jnp.concatenate([compressed, rope.rotate(key, cos, sin, pairs=config.rope.pairs)[:, :, 0]], axis=-1)
        mixed, kv = kv.attend_latent(q, latents, self._up(), Rule(config.scale))
        return self.out(mixed.reshape(b, t, config.num_heads * config.value_dim)), kv

    def _queries_and_latents(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The queries of all heads, and what latents are made of."""
        if self.q is not None:
            q, down = products_of((self.q, self.kv_down), x)
            return q, down
        assert self.q_down is not None and self.q_norm is not None and self.q_up is not None
        q, down = products_of((self.q_down, self.kv_down), x)
        return self.q_up(self.q_norm(q)), down

    def _up(self) -> Up:
        config = self.config
        weight = self.kv_up.weight[...].reshape(config.num_heads, config.nope_dim + config.value_dim, config.kv_rank)
        return Up(weight[:, : config.nope_dim], weight[:, config.nope_dim :])
