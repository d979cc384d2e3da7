"""The product of tokens with the experts they chose: `[t, k, d]`, one row for each choice, in router order.

`reference` says what is meant. The two fast forms compute an expert with one compiled body, run one expert at a
time, so that an expert's product does not depend on which others are computed, where they live, or how many there
are. `by_expert` is for few rows (decode): every present expert takes all rows in place. `grouped` is for many
(prefill): rows are gathered expert by expert into groups of fixed size.

Knows nothing of routers or tiers. A choice of `num_experts` or more means "no expert" and yields zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from novalm_jax.config import Activation
from novalm_jax.kernels.linear import einsum
from novalm_jax.kernels.storage import view_as

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Weights(NamedTuple):
    """Weights of gated MLPs: gate and up `[..., f, d]`, down `[..., d, f]`; experts are stacked in front."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array


def gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """act(gate) * up in float32, rounded once to the dtype of the inputs."""
    inner: jax.Array = _ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return inner.astype(gate.dtype)


def expert_product(x: jax.Array, weights: Weights, activation: Activation) -> jax.Array:
    """One expert's gated MLP on `x [t, d]`: `[t, d]` in x's dtype (arXiv:2002.05202)."""
    inner = gated(einsum("td,fd->tf", x, weights.gate), einsum("td,fd->tf", x, weights.up), activation)
    return einsum("tf,df->td", inner.astype(x.dtype), weights.down).astype(x.dtype)


def reference(x: jax.Array, ids: jax.Array, weights: Weights, activation: Activation) -> jax.Array:
    """Every expert on every token, then a choice: plain, differentiable, and as slow as there are experts.

    Args:
      x: `[t, d]`.
      ids: int32 `[t, k]`, the chosen experts.
      weights: stacked over `e` experts.

    Returns:
      `[t, k, d]` in x's dtype.
    """

    def add_expert(products: jax.Array, numbered: tuple[jax.Array, Weights]) -> tuple[jax.Array, None]:
        number, expert = numbered
        chosen = (ids == number)[..., None]
        return jnp.where(chosen, expert_product(x, expert, activation)[:, None, :], products), None

    products = jnp.zeros((*ids.shape, x.shape[-1]), x.dtype)
    numbers = jnp.arange(weights.gate.shape[0], dtype=ids.dtype)
    return lax.scan(add_expert, products, (numbers, weights))[0]


def by_expert(x: jax.Array, ids: jax.Array, weights: Weights, activation: Activation) -> jax.Array:
    """As `reference`, running the experts that are present and no others. For a few rows, at least 2."""
    num_experts = weights.gate.shape[0]
    present = jnp.zeros(num_experts, jnp.int32).at[ids.reshape(-1)].set(1, mode="drop")
    numbers = jnp.argsort(1 - present, stable=True).astype(ids.dtype)

    def add_expert(i: jax.Array, products: jax.Array) -> jax.Array:
        number = numbers[i]
        product = expert_product(x, _expert(weights, number, x.dtype), activation)
        return jnp.where((ids == number)[..., None], product[:, None, :], products)

    return lax.fori_loop(0, present.sum(), add_expert, jnp.zeros((*ids.shape, x.shape[-1]), x.dtype))


def grouped(x: jax.Array, ids: jax.Array, weights: Weights, activation: Activation, group: int) -> jax.Array:
    """As `reference`, on groups of `group` rows that share an expert; the last group of an expert is padded.

    The work is that of the chosen experts, rounded up to whole groups. For many rows.
    """
    (tokens, k), num_experts, dim = ids.shape, weights.gate.shape[0], x.shape[-1]
    choices = ids.reshape(-1)
    order = jnp.argsort(choices, stable=True).astype(jnp.int32)
    counts = jnp.zeros(num_experts, jnp.int32).at[choices].add(1, mode="drop")
    first_row = jnp.cumsum(counts) - counts
    last_group = jnp.cumsum(-(-counts // group))

    def add_group(i: jax.Array, products: jax.Array) -> jax.Array:
        number = jnp.searchsorted(last_group, i, side="right").astype(jnp.int32)
        earlier = i - (last_group[number] - -(-counts[number] // group))
        within = earlier * group + jnp.arange(group, dtype=jnp.int32)
        real = within < counts[number]
        places = jnp.where(real, order[jnp.minimum(first_row[number] + within, tokens * k - 1)], tokens * k)
        rows = x[jnp.minimum(places, tokens * k - 1) // k]
        return products.at[places].set(expert_product(rows, _expert(weights, number, x.dtype), activation), mode="drop")

    products = lax.fori_loop(0, last_group[-1], add_group, jnp.zeros((tokens * k, dim), x.dtype))
    return products.reshape(tokens, k, dim)


def _expert(weights: Weights, number: jax.Array, dtype: jnp.dtype) -> Weights:
    """One expert's weights, from stacks in their own dtype or in storage form."""
    parts = (lax.dynamic_index_in_dim(stack, number, keepdims=False) for stack in weights)
    return Weights(*(view_as(part, dtype) for part in parts))
