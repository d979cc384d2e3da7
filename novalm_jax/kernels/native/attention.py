"""Attention of decode rows to pages, in C++, on the CPU: as `kernels.attention.paged`, for one new token a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.kernels.attention import Rule
from novalm_jax.kernels.native import check_dtype
from novalm_jax.kernels.native.build import load


def paged(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    value_dim: int,
    tables: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    rule: Rule,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention of one new token of each row to pages that already hold its own key and value.

    Bits of a row depend neither on other rows, nor on which pages it has, nor on how many threads compute; they are not
    those of XLA. A page that is needed and not there ends the program with an error.

    Args:
      q: `[b, 1, h, c]`, float32 or bfloat16.
      keys, values: `[p, g, page, c]` and `[p, g, page, c']`, in q's dtype or its storage form.
      value_dim: how many of the c' are values.
      tables, starts, ends, rule, sinks: as for `kernels.attention.paged`.

    Returns:
      `[b, 1, h, value_dim]` in q's dtype.

    Raises:
      TypeError: another dtype of q.
    """
    check_dtype(q)
    b, _, h, c = q.shape
    logits = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    call = jax.ffi.ffi_call(load()["attention_rows"], jax.ShapeDtypeStruct((b, h, value_dim), jnp.float32))
    limits = {"window": np.int64(rule.window or 0), "chunk": np.int64(rule.chunk or 0)}
    queries = q.reshape(b, h, c)
    out = call(queries, keys, values, tables, starts, ends, logits, scale=np.float32(rule.scale), **limits)
    return out.reshape(b, 1, h, value_dim).astype(q.dtype)
