"""Matrix products with one numeric contract: float32 accumulation and float32 results, which callers round once.

Weights keep the checkpoint's layout, `[out, in]`. float32 means float32 on every backend (precision HIGHEST), and
low-precision products name their accumulator because XLA's CPU backend is 10-20 times slower without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from novalm_jax.kernels.native import FEW_ROWS
from novalm_jax.kernels.native import products as products_of_few


def einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    """`jnp.einsum` with a float32 result, whatever the (equal) dtypes of the operands."""
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def row_major(x: jax.Array) -> jax.Array:
    """`x`, laid out in memory in the order of its dimensions, for an operand or the result of a batched product.

    XLA's CPU backend likes to leave a transposed array as it lies and to transpose the product instead. Such products
    round differently for 8 rows and 16, and in bfloat16 they copy the weights to float32 or cannot be run at all.
    """
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def products(
    x: jax.Array, weights: Sequence[jax.Array], biases: Sequence[jax.Array | None], native: bool = False
) -> list[jax.Array]:
    """`x [..., d]` times each of `weights [f, d]`, plus its `bias [f]`: float32 `[..., f]`.

    Few rows are multiplied by native code where that is asked for, with other bits than those of XLA.
    """
    if native and math.prod(x.shape[:-1]) < FEW_ROWS:
        return biased(products_of_few(x, weights), biases)
    return biased([einsum("...d,fd->...f", x, weight) for weight in weights], biases)


def biased(products: Sequence[jax.Array], biases: Sequence[jax.Array | None]) -> list[jax.Array]:
    """float32 `[..., f]`, each plus its bias, `[f]` or `[..., f]`, where there is one."""
    return [
        y if bias is None else y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
        for y, bias in zip(products, biases, strict=True)
    ]
