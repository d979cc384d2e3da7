"""The product of tokens with the experts they chose: `[t, k, d]`, one row for each choice, in router order.

`reference` says what is meant. Two fast forms compute an expert with one compiled body, run one expert at a time, so
that an expert's product does not depend on which others are computed, where they live, or how many there are.
`by_expert` is for few rows (decode): every present expert takes all rows in place. `grouped` is for many (prefill):
rows are gathered expert by expert into groups of fixed size. `batched` computes such groups side by side and is
differentiable (training).

Knows nothing of routers or tiers. A choice of `num_experts` or more means "no expert" and yields zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from novalm_jax.config import Activation, ClampConfig, ExpertConfig
from novalm_jax.kernels.linear import einsum
from novalm_jax.kernels.storage import view_as

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Weights(NamedTuple):
    """Weights of gated MLPs as they are stored, which `ExpertConfig` describes; experts are stacked in front.

    Attributes:
      gate: `[..., f, d]`, or `[..., d, f]` where the configuration says `inputs_first`; None where up holds both.
      up: as gate, or both in one matrix with 2 f in place of f.
      down: `[..., d, f]`, or the other way round.
      gate_bias, up_bias, down_bias: `[..., f]`, `[..., f]` (or `[..., 2 f]`) and `[..., d]`; None where there are none.
    """

    gate: jax.Array | None
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


def gated(gate: jax.Array, up: jax.Array, activation: Activation, clamp: ClampConfig | None = None) -> jax.Array:
    """act(gate) * up, or the formula of `ClampConfig`, in float32, rounded once to the dtype of the inputs."""
    wide, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if clamp is not None:
        wide, up = jnp.minimum(wide, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
        return ((up + 1) * wide * jax.nn.sigmoid(wide * clamp.alpha)).astype(gate.dtype)
    inner: jax.Array = _ACTIVATIONS[activation](wide) * up
    return inner.astype(gate.dtype)


def expert_product(x: jax.Array, weights: Weights, config: ExpertConfig) -> jax.Array:
    """One expert's gated MLP on `x [t, d]`: `[t, d]` in x's dtype (arXiv:2002.05202)."""

    def product(matrix: jax.Array, bias: jax.Array | None, inputs_first: bool, inputs: jax.Array) -> jax.Array:
        out = einsum("ti,io->to" if inputs_first else "ti,oi->to", inputs, matrix)
        return out if bias is None else out + bias.astype(jnp.float32)[None]

    up = product(weights.up, weights.up_bias, config.inputs_first, x)
    if config.joint == "halves":
        gate, up = jnp.split(up, 2, axis=-1)
    elif config.joint == "alternate":
        gate, up = up[:, ::2], up[:, 1::2]
    else:
        assert weights.gate is not None
        gate = product(weights.gate, weights.gate_bias, config.inputs_first, x)
    inner = gated(gate, up, config.activation, config.clamp).astype(x.dtype)
    return product(weights.down, weights.down_bias, config.down_inputs_first, inner).astype(x.dtype)


def reference(
    x: jax.Array, ids: jax.Array, weights: Weights, config: ExpertConfig, scales: jax.Array | None = None
) -> jax.Array:
    """Every expert on every token, then a choice: plain, differentiable, and as slow as there are experts.

    Args:
      x: `[t, d]`.
      ids: int32 `[t, k]`, the chosen experts.
      weights: stacked over `e` experts.
      config: what an expert computes.
      scales: float32 `[t, k]`, multiply what each chosen expert is given of x.

    Returns:
      `[t, k, d]` in x's dtype.
    """

    def add_expert(products: jax.Array, numbered: tuple[jax.Array, Weights]) -> tuple[jax.Array, None]:
        number, expert = numbered
        product = expert_product(_scaled(x, ids == number, scales), expert, config)
        return jnp.where((ids == number)[..., None], product[:, None, :], products), None

    products = jnp.zeros((*ids.shape, x.shape[-1]), x.dtype)
    numbers = jnp.arange(weights.down.shape[0], dtype=ids.dtype)
    return lax.scan(add_expert, products, (numbers, weights))[0]


def by_expert(
    x: jax.Array, ids: jax.Array, weights: Weights, config: ExpertConfig, scales: jax.Array | None = None
) -> jax.Array:
    """As `reference`, running the experts that are present and no others. For a few rows, at least 2."""
    num_experts = weights.down.shape[0]
    present = jnp.zeros(num_experts, jnp.int32).at[ids.reshape(-1)].set(1, mode="drop")
    numbers = jnp.argsort(1 - present, stable=True).astype(ids.dtype)

    def add_expert(i: jax.Array, products: jax.Array) -> jax.Array:
        number = numbers[i]
        chosen = ids == number
        product = expert_product(_scaled(x, chosen, scales), _expert(weights, number, x.dtype), config)
        return jnp.where(chosen[..., None], product[:, None, :], products)

    return lax.fori_loop(0, present.sum(), add_expert, jnp.zeros((*ids.shape, x.shape[-1]), x.dtype))


def grouped(
    x: jax.Array,
    ids: jax.Array,
    weights: Weights,
    config: ExpertConfig,
    group: int,
    scales: jax.Array | None = None,
) -> jax.Array:
    """As `reference`, on groups of `group` rows that share an expert; the last group of an expert is padded.

    The work is that of the chosen experts, rounded up to whole groups. For many rows.
    """
    (tokens, k), dim = ids.shape, x.shape[-1]
    groups = _groups(ids, weights.down.shape[0], group)

    def add_group(i: jax.Array, products: jax.Array) -> jax.Array:
        places = groups.choices[i]
        choice = jnp.minimum(places, tokens * k - 1)
        rows = x[choice // k]
        if scales is not None:
            rows = _times(rows, scales.reshape(-1)[choice])
        expert = _expert(weights, groups.experts[i], x.dtype)
        return products.at[places].set(expert_product(rows, expert, config), mode="drop")

    products = lax.fori_loop(0, groups.used, add_group, jnp.zeros((tokens * k, dim), x.dtype))
    return products.reshape(tokens, k, dim)


def batched(
    x: jax.Array,
    ids: jax.Array,
    weights: Weights,
    config: ExpertConfig,
    group: int | None = None,
    scales: jax.Array | None = None,
) -> jax.Array:
    """As `grouped`, with all groups in one batched product: differentiable in x, weights and scales.

    The weights of an expert are copied for each of its groups: fewer than `t k / group + e` copies in all. By default
    an expert with its even share of the rows fills four groups of 8 to 256 rows.
    """
    (tokens, k), dim, num_experts = ids.shape, x.shape[-1], weights.down.shape[0]
    if group is None:
        group = min(256, max(8, tokens * k // (4 * num_experts) // 8 * 8))
    groups = _groups(ids, num_experts, group)
    rows = jnp.broadcast_to(x[:, None], (tokens, k, dim)).reshape(tokens * k, dim)
    if scales is not None:
        rows = _times(rows, scales.reshape(-1))
    choices = groups.choices.reshape(groups.choices.size)
    rows = _rearranged(rows, choices, groups.slots).reshape(*groups.choices.shape, dim)
    experts = jax.tree.map(lambda stack: stack[groups.experts], weights)
    products = jax.vmap(expert_product, (0, 0, None))(rows, experts, config).reshape(choices.size, dim)
    return _rearranged(products, groups.slots, choices).reshape(tokens, k, dim)


class _Groups(NamedTuple):
    """Choices `[t, k]`, counted row by row, sorted into groups that share an expert.

    Attributes:
      experts: int32 `[n]`, the expert of each group.
      choices: int32 `[n, group]`, what is in it; `t k` where there is nothing.
      slots: int32 `[t k]`, the reverse: where each choice is, in groups laid end to end; `n group` for none.
      used: int32, how many groups hold something. The rest, up to n, is empty.
    """

    experts: jax.Array
    choices: jax.Array
    slots: jax.Array
    used: jax.Array


def _groups(ids: jax.Array, num_experts: int, group: int) -> _Groups:
    flat, total = ids.reshape(-1), ids.size
    most = min(total, total // group + num_experts)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    first_row = jnp.cumsum(counts) - counts
    ends = jnp.cumsum(-(-counts // group))
    experts = jnp.searchsorted(ends, jnp.arange(most, dtype=jnp.int32), side="right").astype(jnp.int32)
    experts = jnp.minimum(experts, num_experts - 1)
    first_group = ends - -(-counts // group)
    earlier = jnp.arange(most, dtype=jnp.int32) - first_group[experts]
    within = earlier[:, None] * group + jnp.arange(group, dtype=jnp.int32)[None]
    place = jnp.minimum(first_row[experts][:, None] + within, total - 1)
    choices = jnp.where(within < counts[experts][:, None], order[place], total)
    rank = jnp.zeros(total, jnp.int32).at[order].set(jnp.arange(total, dtype=jnp.int32))
    known = jnp.minimum(flat, num_experts - 1)
    slots = jnp.where(flat < num_experts, first_group[known] * group + rank - first_row[known], most * group)
    return _Groups(experts, choices, slots, ends[-1])


@jax.custom_vjp
def _rearranged(rows: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """`rows[sources]`, with zeros for what is past the end. `targets` is the reverse: where each row goes, or past the
    end. Each goes to one place at most, so that the gradient is a gather too, many times as fast as a scatter."""
    return rows.at[sources].get(mode="fill", fill_value=0)


def _rearranged_forward(rows: jax.Array, sources: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _rearranged(rows, sources, targets), targets


def _rearranged_backward(targets: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return gradient.at[targets].get(mode="fill", fill_value=0), None, None


_rearranged.defvjp(_rearranged_forward, _rearranged_backward)


def _scaled(x: jax.Array, chosen: jax.Array, scales: jax.Array | None) -> jax.Array:
    """What one expert is given of `x [t, d]`, where `chosen` bool `[t, k]` says which choices fell on it."""
    return x if scales is None else _times(x, jnp.where(chosen, scales, 0.0).sum(axis=-1))


def _times(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * scale[:, None]).astype(x.dtype)


def _expert(weights: Weights, number: jax.Array, dtype: jnp.dtype) -> Weights:
    """One expert's weights, from stacks in their own dtype or in storage form."""
    return jax.tree.map(lambda stack: view_as(lax.dynamic_index_in_dim(stack, number, keepdims=False), dtype), weights)
