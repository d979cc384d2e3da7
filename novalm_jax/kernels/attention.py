"""Causal grouped-query attention: the plain form, and the one over a cache that costs what the true length costs.

Scores, softmax and sums are float32. A query at position p sees keys at positions j <= p and, with a window of w,
j > p - w. Layouts: queries `[..., t, h, c]`; keys and values of the cache `[rows, g, s, c]`, h a multiple of g, so that
a head's positions are contiguous. Caches may be in storage form.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from novalm_jax.kernels.linear import einsum
from novalm_jax.kernels.storage import view_as

_NEVER = -1e30
"""Score of a key that may not be seen: finite, so that a row which sees nothing yet stays free of NaN."""


def reference(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, window: int | None) -> jax.Array:
    """Attention of a whole sequence to itself: q `[b, t, h, c]`, k and v `[b, t, g, c]`, result `[b, t, h, c]`."""
    b, t, h, c = q.shape
    g = k.shape[2]
    scores = einsum("btgnc,bsgc->bgnts", q.reshape(b, t, g, h // g, c), k) * scale
    position = jnp.arange(t)
    seen = _visible(position[:, None], position[None, :], window)[None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, _NEVER), axis=-1)
    return einsum("bgnts,bsgc->btgnc", weights, v.astype(jnp.float32)).reshape(b, t, h, c).astype(q.dtype)


def cached(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    rows: jax.Array,
    starts: jax.Array,
    scale: float,
    window: int | None,
    block: int,
) -> jax.Array:
    """Attention of new tokens to a cache that already holds their own keys and values.

    Every row walks the blocks it can see, with a trip count that only the run knows, and carries an online softmax
    (arXiv:1805.02867) through them in order.

    Args:
      q: `[b, t, h, c]`; token i of row r stands at position `starts[r] + i`.
      keys, values: `[rows, g, s, c]`, in q's dtype or its storage form; s is a multiple of `block`.
      rows: int32 `[b]`, which row of the cache each row of q reads.
      starts: int32 `[b]`; negative for a row that is to see nothing (its result is zeros).
      block: cache positions handled at a time.

    Returns:
      `[b, t, h, c]` in q's dtype.
    """
    _, t, h, c = q.shape
    g = keys.shape[1]
    position = jnp.arange(t, dtype=jnp.int32)

    def one_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, index, start = row
        queries = queries.reshape(t, g, h // g, c).transpose(1, 2, 0, 3).reshape(g, h // g * t, c)
        at = jnp.tile(start + position, h // g)

        def see_block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, mixed = carry
            k, v = (_block(cache, index, i, block, q.dtype) for cache in (keys, values))
            key_at = i * block + jnp.arange(block, dtype=jnp.int32)
            seen = _visible(at[None, :, None], key_at[None, None, :], window)
            scores = jnp.where(seen, einsum("gmc,gsc->gms", queries, k) * scale, _NEVER)
            new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
            fade = jnp.exp(top - new_top)
            # Nothing times NaN is NaN: what an earlier user of the row left behind must not count even once.
            v = jnp.where(seen.any(axis=1)[:, :, None], v.astype(jnp.float32), 0.0)
            mixed = mixed * fade + einsum("gms,gsc->gmc", weights, v)
            return new_top, total * fade + weights.sum(axis=-1, keepdims=True), mixed

        nothing = jnp.zeros((g, h // g * t, 1), jnp.float32)
        first = jnp.int32(0) if window is None else jnp.maximum(start - window + 1, 0) // block
        last = jnp.where(start < 0, 0, -(-(start + t) // block))
        empty = (nothing + _NEVER, nothing, jnp.zeros((g, h // g * t, c), jnp.float32))
        _, total, mixed = lax.fori_loop(first, last, see_block, empty)
        out = mixed / jnp.where(total > 0, total, 1.0)
        return out.reshape(g, h // g, t, c).transpose(2, 0, 1, 3).reshape(t, h, c).astype(q.dtype)

    return lax.map(one_row, (q, rows, starts))


def _visible(query: jax.Array, key: jax.Array, window: int | None) -> jax.Array:
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _block(cache: jax.Array, row: jax.Array, number: jax.Array, block: int, dtype: jnp.dtype) -> jax.Array:
    """Positions `number * block` on of one row of the cache: `[g, block, c]`."""
    _, g, _, c = cache.shape
    zero = jnp.int32(0)
    part = lax.dynamic_slice(cache, (row, zero, number * block, zero), (1, g, block, c))[0]
    return view_as(part, dtype)
