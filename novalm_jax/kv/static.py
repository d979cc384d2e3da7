"""Key-value cache of fixed size: one row of `capacity` positions for each request, every layer in one array.

Knows positions and rows. Refuses to know requests: who owns which row, and up to where a row is valid, is the
caller's to remember. Rows are never cleared: a position is written before any query can see it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from novalm_jax.config import AttentionConfig, LatentConfig
from novalm_jax.kernels import attention as kernel
from novalm_jax.kernels import latent_attention
from novalm_jax.kernels.attention import Rule
from novalm_jax.kernels.latent_attention import Up
from novalm_jax.kernels.storage import storage_dtype, view_as


class LayerCache(NamedTuple):
    """What one layer keeps of each token, in storage form.

    `keys` and `values` are `[rows, g, capacity, c]`. With latent attention `keys` holds the latents,
    `[rows, 1, capacity, kv_rank + rope_dim]`, and there are no `values`.
    """

    keys: jax.Array
    values: jax.Array | None


def cache_shape(config: AttentionConfig | LatentConfig, rows: int, capacity: int, dtype: np.dtype) -> LayerCache:
    """One layer's cache with `jax.ShapeDtypeStruct`s in place of arrays."""

    def array(heads: int, size: int) -> Any:
        return jax.ShapeDtypeStruct((rows, heads, capacity, size), storage_dtype(dtype))

    if isinstance(config, LatentConfig):
        return LayerCache(array(1, config.kv_rank + config.rope_dim), None)
    return LayerCache(*[array(config.num_kv_heads, config.head_dim)] * 2)


class CacheView(NamedTuple):
    """Some rows of a layer's cache, as attention sees them; implements `models.attention.KV`.

    Attributes:
      cache: the whole layer.
      rows: int32 `[b]`, the row of each sequence. One past the last row stands for none, and nothing
        is written; where there is one sequence, it must have a row.
      starts: int32 `[b]`, position of each sequence's first new token; negative for none.
      block: positions that attention handles at a time; divides the capacity.
    """

    cache: LayerCache
    rows: jax.Array
    starts: jax.Array
    block: int

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, rule: Rule, sinks: jax.Array | None
    ) -> tuple[jax.Array, CacheView]:
        """Writes the new keys and values `[b, t, g, c]`, then attends q `[b, t, h, c]` to everything before."""
        assert self.cache.values is not None
        keys, values = self._written(self.cache.keys, k), self._written(self.cache.values, v)
        out = kernel.cached(q, keys, values, self.rows, self.starts, rule, sinks, self.block)
        return out, self._replace(cache=LayerCache(keys, values))

    def attend_latent(self, q: jax.Array, latents: jax.Array, up: Up, rule: Rule) -> tuple[jax.Array, CacheView]:
        """Writes the new latents `[b, t, l + r]`, then attends q `[b, t, h, n + r]` to everything before.

        One new token a row is a decode step, where the absorbed form costs less.
        """
        stored = self._written(self.cache.keys, latents[:, :, None])
        form = latent_attention.absorbed if q.shape[1] == 1 else latent_attention.expanded
        out = form(q, stored, up, self.rows, self.starts, rule, self.block)
        return out, self._replace(cache=LayerCache(stored, None))

    def _written(self, stored: jax.Array, new: jax.Array) -> jax.Array:
        new = view_as(new, stored.dtype)
        if new.shape[0] == 1:
            # One sequence: a block of positions, which the caller keeps inside the capacity.
            start = (self.rows[0], jnp.int32(0), self.starts[0], jnp.int32(0))
            return lax.dynamic_update_slice(stored, new.transpose(0, 2, 1, 3), start)
        positions = self.starts[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)[None]
        return stored.at[self.rows[:, None], :, positions].set(new, mode="drop")
