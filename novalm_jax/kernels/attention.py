"""Causal grouped-query attention: the plain form, one of whole sequences that computes little that is not seen, and
one over pages of a cache that costs what the true length costs.

Scores, softmax and sums are float32. Layouts: queries `[..., t, h, c]`; keys and values in pages `[p, g, page, c]`, h a
multiple of g, so that a head's positions are contiguous. Pages may be in storage form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from novalm_jax.kernels.linear import einsum
from novalm_jax.kernels.storage import view_as

_NEVER = -1e30
"""Score of a key that may not be seen: finite, so that a row which sees nothing yet stays free of NaN."""


class Rule(NamedTuple):
    """What a query sees, and how strongly.

    Attributes:
      scale: multiplies q.k.
      window: a query at position p sees keys at j > p - window; at all j <= p where it is None.
      chunk: of those, the keys with j // chunk == p // chunk.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None


_LEAST_BLOCK = 128
"""Queries of a block of `blocked`, at least."""

_MOST_BLOCKS = 8
"""Blocks of it, at most."""

ReadBlock = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""A row's table and the number of a block of positions -> its keys `[g, block, c]` and values `[g, block, c']`."""


def reference(q: jax.Array, k: jax.Array, v: jax.Array, rule: Rule, sinks: jax.Array | None = None) -> jax.Array:
    """Attention of a whole sequence to itself.

    Args:
      q: `[b, t, h, c]`.
      k, v: `[b, t, g, c]` and `[b, t, g, c']`.
      rule: what is seen.
      sinks: `[h]`, a logit of each head that takes part in the softmax and stands for no key (arXiv:2309.17453).

    Returns:
      `[b, t, h, c']` in q's dtype.
    """
    b, t, h, c = q.shape
    g = k.shape[2]
    scores = einsum("btgnc,bsgc->bgnts", q.reshape(b, t, g, h // g, c), k) * rule.scale
    position = jnp.arange(t)
    seen = _visible(position[:, None], position[None, :], rule)[None, None, None]
    scores = jnp.where(seen, scores, _NEVER)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, g, h // g, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :t]
    mixed = einsum("bgnts,bsgc->btgnc", weights, v.astype(jnp.float32))
    return mixed.reshape(b, t, h, v.shape[-1]).astype(q.dtype)


def blocked(q: jax.Array, k: jax.Array, v: jax.Array, rule: Rule, sinks: jax.Array | None = None) -> jax.Array:
    """As `reference`, a block of queries after another: half the work, and scores that stay small. Differentiable.

    The program grows with the number of blocks, so that there are no more than `_MOST_BLOCKS` of them.
    """
    b, t, h, c = q.shape
    g, n, dim = k.shape[2], h // k.shape[2], v.shape[-1]
    block = max(_LEAST_BLOCK, -(-t // _MOST_BLOCKS))
    q = q.transpose(0, 2, 1, 3).reshape(b, g, n, t, c)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3).astype(jnp.float32)
    mixed = []
    for start in range(0, max(t, 1), block):
        end = min(start + block, t)
        # The first key that any query of the block sees.
        first = max(0 if rule.window is None else start - rule.window + 1, 0)
        first = max(0 if rule.chunk is None else start // rule.chunk * rule.chunk, first)
        # The heads of a group share keys: one product for all of them.
        queries = q[:, :, :, start:end].reshape(b, g, n * (end - start), c)
        scores = einsum("bgtc,bgsc->bgts", queries, k[:, :, first:end]) * rule.scale
        seen = _visible(jnp.arange(start, end)[:, None], jnp.arange(first, end)[None, :], rule)
        scores = jnp.where(jnp.tile(seen, (n, 1))[None, None], scores, _NEVER)
        if sinks is not None:
            sink = jnp.repeat(sinks.astype(jnp.float32).reshape(1, g, n), end - start, axis=-1)[..., None]
            scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : end - first]
        mixed.append(einsum("bgts,bgsc->bgtc", weights, v[:, :, first:end]).reshape(b, g, n, end - start, dim))
    return jnp.concatenate(mixed, axis=3).reshape(b, h, t, dim).transpose(0, 2, 1, 3).astype(q.dtype)


def paged(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    rule: Rule,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention of new tokens to pages that already hold their own keys and values.

    Args:
      q: `[b, t, h, c]`; token i of row r stands at position `starts[r] + i`.
      keys, values: `[p, g, page, c]` and `[p, g, page, c']`, in q's dtype or its storage form.
      tables: int32 `[b, n]`, which page holds each block of positions of each row of q.
      starts: int32 `[b]`; negative for a row that is to see nothing (its result is zeros).
      ends: int32 `[b]`, position after the last new token of each row: what follows is padding, which sees nothing.
      rule, sinks: as for `reference`.

    Returns:
      `[b, t, h, c']` in q's dtype.
    """

    def read(table: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = (read_page(pages, table[number], q.dtype) for pages in (keys, values))
        return k, v

    return walk(q, read, keys.shape[1], values.shape[-1], tables, starts, ends, rule, sinks, keys.shape[2])


def walk(
    q: jax.Array,
    read: ReadBlock,
    g: int,
    value_dim: int,
    tables: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    rule: Rule,
    sinks: jax.Array | None,
    block: int,
) -> jax.Array:
    """`paged` over anything that blocks of keys and values can be read from, of g heads and values of `value_dim`.

    Every row walks the blocks it can see, with a trip count that only the run knows, and carries an online softmax
    (arXiv:1805.02867) through them in order. It begins with the sinks, as with a key whose value is nothing.
    """
    _, t, h, c = q.shape
    m = h // g * t
    position = jnp.arange(t, dtype=jnp.int32)
    zeros = jnp.zeros((g, m, 1), jnp.float32)
    top, total = zeros + _NEVER, zeros
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(g, h // g, 1)
        top, total = jnp.broadcast_to(sink, (g, h // g, t)).reshape(g, m, 1), zeros + 1.0
    empty = (top, total, jnp.zeros((g, m, value_dim), jnp.float32))

    def one_row(row: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, table, start, end = row
        end = jnp.where(start < 0, start, jnp.minimum(start + t, end))
        queries = queries.reshape(t, g, h // g, c).transpose(1, 2, 0, 3).reshape(g, m, c)
        at = jnp.tile(start + position, h // g)

        def see_block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, mixed = carry
            k, v = read(table, i)
            key_at = i * block + jnp.arange(block, dtype=jnp.int32)
            # Padding would see positions that were never written.
            seen = _visible(at[None, :, None], key_at[None, None, :], rule) & (at < end)[None, :, None]
            scores = jnp.where(seen, einsum("gmc,gsc->gms", queries, k) * rule.scale, _NEVER)
            new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
            fade = jnp.exp(top - new_top)
            # Nothing times NaN is NaN: what an earlier user of the page left behind must not count even once.
            v = jnp.where(seen.any(axis=1)[:, :, None], v.astype(jnp.float32), 0.0)
            mixed = mixed * fade + einsum("gms,gsc->gmc", weights, v)
            return new_top, total * fade + weights.sum(axis=-1, keepdims=True), mixed

        last = jnp.where(end <= start, 0, -(-end // block))
        _, total, mixed = lax.fori_loop(_first_seen(start, rule) // block, last, see_block, empty)
        out = mixed / jnp.where(total > 0, total, 1.0)
        return out.reshape(g, h // g, t, value_dim).transpose(2, 0, 1, 3).reshape(t, h, value_dim).astype(q.dtype)

    return lax.map(one_row, (q, tables, starts, ends))


def read_page(pages: jax.Array, page: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """One page of `pages [p, g, page, c]`: `[g, page, c]` in `dtype`."""
    return view_as(lax.dynamic_index_in_dim(pages, page, keepdims=False), dtype)


def _visible(query: jax.Array, key: jax.Array, rule: Rule) -> jax.Array:
    seen = key <= query
    if rule.window is not None:
        seen &= key > query - rule.window
    if rule.chunk is not None:
        seen &= key // rule.chunk == query // rule.chunk
    return seen


def _first_seen(start: jax.Array, rule: Rule) -> jax.Array:
    """The first position that the query at `start` sees, or 0 where none is known."""
    first = jnp.int32(0)
    if rule.window is not None:
        first = jnp.maximum(first, start - rule.window + 1)
    if rule.chunk is not None:
        first = jnp.maximum(first, start // rule.chunk * rule.chunk)
    return first
