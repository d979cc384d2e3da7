"""Multi-head latent attention (arXiv:2405.04434, section 2.1) over latents: what a token's keys and values come from.

Layouts: queries `[b, t, h, n + r]`, their last r numbers rotated; latents `[..., l + r]`, a compressed vector of l
numbers and the r of the rotated key that all heads share. Two forms of the same sum: `expanded` computes keys and
values of every head from the latents, which pays where many queries share them (prefill); `absorbed` multiplies queries
and results instead, so that few queries attend to the latents themselves, as if they were one key-value head (decode).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from novalm_jax.kernels import attention
from novalm_jax.kernels.attention import Rule, read_page
from novalm_jax.kernels.linear import einsum, row_major
from novalm_jax.kernels.native import attention as native_attention


class Up(NamedTuple):
    """The projections from a latent to keys `[h, n, l]` and values `[h, c, l]` of all heads."""

    keys: jax.Array
    values: jax.Array


def expand(latents: jax.Array, up: Up) -> tuple[jax.Array, jax.Array]:
    """Latents `[s, l + r]` -> keys `[h, s, n + r]` and values `[h, s, c]`, in the latents' dtype."""
    rank = up.keys.shape[-1]
    compressed, rotated = latents[:, :rank], latents[:, rank:]
    keys = einsum("sl,hnl->hsn", compressed, up.keys).astype(latents.dtype)
    values = einsum("sl,hcl->hsc", compressed, up.values).astype(latents.dtype)
    shared = jnp.broadcast_to(rotated[None], (keys.shape[0], *rotated.shape))
    return jnp.concatenate([keys, shared], axis=-1), values


def reference(q: jax.Array, latents: jax.Array, up: Up, rule: Rule) -> jax.Array:
    """Attention of whole sequences to themselves: q `[b, t, h, n + r]`, latents `[b, t, l + r]` -> `[b, t, h, c]`."""
    keys, values = jax.vmap(lambda one: expand(one, up))(latents)
    return attention.reference(q, keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3), rule)


def expanded(
    q: jax.Array, latents: jax.Array, up: Up, tables: jax.Array, starts: jax.Array, ends: jax.Array, rule: Rule
) -> jax.Array:
    """Attention of new tokens to pages of latents `[p, 1, page, l + r]`: keys and values of one page at a time.

    As `attention.paged`: q `[b, t, h, n + r]` in, `[b, t, h, c]` out, int32 `tables [b, n]`, `starts` and `ends [b]`.
    """

    def read(table: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        return expand(read_page(latents, table[number], q.dtype)[0], up)

    heads, value_dim, _ = up.values.shape
    return attention.walk(q, read, heads, value_dim, tables, starts, ends, rule, None, latents.shape[2])


def absorbed(
    q: jax.Array,
    latents: jax.Array,
    up: Up,
    tables: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    rule: Rule,
    native: bool = False,
) -> jax.Array:
    """As `expanded`, with the projections moved to the queries and to the result. `native` is for one token a row."""
    nope, rank = up.keys.shape[1:]

    def read(table: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        stored = read_page(latents, table[number], q.dtype)
        return stored, stored[:, :, :rank]

    inner = _by_head("hmn,hnl->hml", q[..., :nope], up.keys)
    queries = jnp.concatenate([inner, q[..., nope:]], axis=-1)
    if native:
        mixed = native_attention.paged(queries, latents, latents, rank, tables, starts, ends, rule, None)
    else:
        mixed = attention.walk(queries, read, 1, rank, tables, starts, ends, rule, None, latents.shape[2])
    return _by_head("hml,hcl->hmc", mixed, up.values)


def _by_head(subscripts: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """`x [b, t, h, i]` times the weights of each head, in one product `[h, b * t, i]` -> `[h, b * t, o]`."""
    b, t, h, i = x.shape
    rows = row_major(x.reshape(b * t, h, i).transpose(1, 0, 2))
    out = row_major(einsum(subscripts, rows, weights))
    return out.transpose(1, 0, 2).reshape(b, t, h, out.shape[-1]).astype(x.dtype)
