"""The product of tokens with the experts they chose: `[t, k, d]`, one row for each choice, in router order.

`reference` says what is meant. Two fast forms compute an expert with one compiled body, run one expert at a time, so
that an expert's product does not depend on which others are computed, where they live, or how many there are.
`by_expert` is for few rows (decode): every present expert takes all rows in place. `grouped` is for many (prefill,
training): rows are gathered expert by expert into groups of fixed size. Its gradient is such a loop too. `by_choice`
is for few rows on the CPU: native products of each choice with the weights where they lie. All three also run in waves,
a group of experts at a time, whose weights lie in slots of a pool.

Knows nothing of routers or tiers. A choice of `num_experts` or more means "no expert" and yields zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from novalm_jax.config import Activation, ClampConfig, ExpertConfig
from novalm_jax.kernels import native
from novalm_jax.kernels.linear import biased, einsum
from novalm_jax.kernels.storage import view_as

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}

_Matrix = tuple[jax.Array, jax.Array | None]
"""A matrix, and its bias."""

_Products = Callable[[Sequence[_Matrix], bool, jax.Array], list[jax.Array]]
"""(matrices, whether inputs are first in them, inputs) -> float32 of each."""


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


class Wave(NamedTuple):
    """Some of a layer's experts, whose weights lie in slots of a pool. What all waves of a layer give together has the
    bits of one product with all experts at hand.

    Attributes:
      slots: int32 `[e]`, the slot of each expert; negative for those that are not in this wave.
      products: `[t, k, d]`, what the waves before gave; zeros for the first one.
    """

    slots: jax.Array
    products: jax.Array


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

    def products(matrices: Sequence[_Matrix], inputs_first: bool, inputs: jax.Array) -> list[jax.Array]:
        subscripts = "ti,io->to" if inputs_first else "ti,oi->to"
        outs = [einsum(subscripts, inputs, matrix) for matrix, _ in matrices]
        return biased(outs, [bias for _, bias in matrices])

    return _gated_mlp(x, weights, config, products)


def _gated_mlp(x: jax.Array, weights: Weights, config: ExpertConfig, products: _Products) -> jax.Array:
    """The gated MLP on rows of x, in its dtype, with whatever multiplies them by matrices."""
    inward: list[_Matrix] = [(weights.up, weights.up_bias)]
    if weights.gate is not None:
        inward.append((weights.gate, weights.gate_bias))
    up, *gates = products(inward, config.inputs_first, x)
    if config.joint == "halves":
        gate, up = jnp.split(up, 2, axis=-1)
    elif config.joint == "alternate":
        gate, up = up[:, ::2], up[:, 1::2]
    else:
        (gate,) = gates
    inner = gated(gate, up, config.activation, config.clamp).astype(x.dtype)
    (out,) = products([(weights.down, weights.down_bias)], config.down_inputs_first, inner)
    return out.astype(x.dtype)


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
    x: jax.Array,
    ids: jax.Array,
    weights: Weights,
    config: ExpertConfig,
    scales: jax.Array | None = None,
    wave: Wave | None = None,
) -> jax.Array:
    """As `reference`, running the experts that are present and no others. For a few rows, at least 2.

    With a `wave` the stacks of `weights` are slots; choices of experts outside it stay as they are in its products.
    """
    present = jnp.zeros(_num_experts(weights, wave), jnp.int32).at[ids.reshape(-1)].set(1, mode="drop")
    if wave is not None:
        present = jnp.where(wave.slots >= 0, present, 0)
    numbers = jnp.argsort(1 - present, stable=True).astype(ids.dtype)

    def add_expert(i: jax.Array, products: jax.Array) -> jax.Array:
        number = numbers[i]
        chosen = ids == number
        expert = _expert(weights, number if wave is None else wave.slots[number], x.dtype)
        product = expert_product(_scaled(x, chosen, scales), expert, config)
        return jnp.where(chosen[..., None], product[:, None, :], products)

    begun = jnp.zeros((*ids.shape, x.shape[-1]), x.dtype) if wave is None else wave.products
    return lax.fori_loop(0, present.sum(), add_expert, begun)


def by_choice(
    x: jax.Array,
    ids: jax.Array,
    weights: Weights,
    config: ExpertConfig,
    scales: jax.Array | None = None,
    wave: Wave | None = None,
) -> jax.Array:
    """As `by_expert`, with products of `native`, from stacks in storage form or in the dtype of x, and for any number
    of rows, whose bits do not depend on each other."""
    slots = jnp.where(ids < len(weights.down), ids, -1) if wave is None else _looked_up(wave.slots, ids)
    slots = slots.reshape(-1)
    rows = x if scales is None else _times(jnp.repeat(x, ids.shape[1], axis=0), scales.reshape(-1))

    def products(stacks: Sequence[_Matrix], inputs_first: bool, inputs: jax.Array) -> list[jax.Array]:
        outs = native.rows_times(inputs, slots, [stack for stack, _ in stacks], inputs_first)
        return biased(outs, [None if bias is None else view_as(bias[slots], x.dtype) for _, bias in stacks])

    out = _gated_mlp(rows, weights, config, products).reshape(*ids.shape, -1)
    begun = jnp.zeros_like(out) if wave is None else wave.products
    return jnp.where(slots.reshape(*ids.shape, 1) >= 0, out, begun)


def grouped(
    x: jax.Array,
    ids: jax.Array,
    weights: Weights,
    config: ExpertConfig,
    group: int,
    scales: jax.Array | None = None,
    wave: Wave | None = None,
) -> jax.Array:
    """As `reference`, on groups of `group` rows that share an expert; the last group of an expert is padded.

    The work is that of the chosen experts, rounded up to whole groups. For many rows. Differentiable in reverse mode,
    at the same cost and with one expert at a time, too; gradients of weights add up in float32. With a `wave` as
    `by_expert`, and without a gradient.
    """
    if ids.size == 0:
        return jnp.zeros((*ids.shape, x.shape[-1]), x.dtype)
    if wave is None:
        return _grouped(x, scales, weights, ids, config, group)
    return _add_groups(x, scales, weights, ids, config, group, wave)


def group_size(choices: int, num_experts: int) -> int:
    """Rows of a group, a multiple of 8 up to 128, of which an expert with its share of the choices fills four."""
    return min(128, max(8, choices // (4 * num_experts) // 8 * 8))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped(
    x: jax.Array, scales: jax.Array | None, weights: Weights, ids: jax.Array, config: ExpertConfig, group: int
) -> jax.Array:
    return _add_groups(x, scales, weights, ids, config, group)


def _add_groups(
    x: jax.Array,
    scales: jax.Array | None,
    weights: Weights,
    ids: jax.Array,
    config: ExpertConfig,
    group: int,
    wave: Wave | None = None,
) -> jax.Array:
    num_experts = _num_experts(weights, wave)
    if wave is not None:
        ids = jnp.where(_looked_up(wave.slots, ids) >= 0, ids, num_experts)
    groups = _groups(ids, num_experts, group)

    def add_group(i: jax.Array, products: jax.Array) -> jax.Array:
        inputs = _inputs(x, scales, groups.choices[i], ids.shape[1])
        number = groups.experts[i] if wave is None else wave.slots[groups.experts[i]]
        product = _group_product(*inputs, _expert(weights, number, x.dtype), config)
        return products.at[groups.choices[i]].set(product, mode="drop")

    begun = jnp.zeros((*ids.shape, x.shape[-1]), x.dtype) if wave is None else wave.products
    products = lax.fori_loop(0, groups.used, add_group, begun.reshape(ids.size, x.shape[-1]))
    return products.reshape(*ids.shape, x.shape[-1])


def _looked_up(slots: jax.Array, ids: jax.Array) -> jax.Array:
    """The slot of each choice; -1 for those of no expert."""
    return slots.at[ids].get(mode="fill", fill_value=-1)


def _num_experts(weights: Weights, wave: Wave | None) -> int:
    return weights.down.shape[0] if wave is None else wave.slots.shape[0]


def _grouped_forward(
    x: jax.Array, scales: jax.Array | None, weights: Weights, ids: jax.Array, config: ExpertConfig, group: int
) -> tuple[jax.Array, Any]:
    return _grouped(x, scales, weights, ids, config, group), (x, scales, weights, ids)


def _grouped_backward(config: ExpertConfig, group: int, saved: Any, towards: jax.Array) -> tuple[Any, ...]:
    x, scales, weights, ids = saved
    groups, towards = _groups(ids, weights.down.shape[0], group), towards.reshape(ids.size, x.shape[-1])

    def add_group(i: jax.Array, sums: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        rows, factors, stacks = sums
        choices, number = groups.choices[i], groups.experts[i]
        given = (*_inputs(x, scales, choices, ids.shape[1]), _expert(weights, number, x.dtype))
        _, pull = jax.vjp(partial(_group_product, config=config), *given)
        pulled = pull(towards.at[choices].get(mode="fill", fill_value=0))
        row, factor, one = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), pulled)
        # Every choice is in one group; an expert may have several.
        rows, factors = jax.tree.map(
            lambda whole, part: whole.at[choices].set(part, mode="drop"), (rows, factors), (row, factor)
        )
        return rows, factors, jax.tree.map(lambda whole, part: whole.at[number].add(part), stacks, one)

    nothing = jnp.zeros((ids.size, x.shape[-1])), None if scales is None else jnp.zeros(ids.size)
    stacks = jax.tree.map(lambda stack: jnp.zeros(stack.shape), weights)
    rows, factors, stacks = lax.fori_loop(0, groups.used, add_group, (*nothing, stacks))
    return (
        rows.reshape(*ids.shape, x.shape[-1]).sum(axis=1).astype(x.dtype),
        None if factors is None else factors.reshape(ids.shape).astype(scales.dtype),
        jax.tree.map(lambda total, stack: total.astype(stack.dtype), stacks, weights),
        None,
    )


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _inputs(x: jax.Array, scales: jax.Array | None, choices: jax.Array, k: int) -> tuple[jax.Array, jax.Array | None]:
    """What some choices give to an expert: rows of x, and scales. In place of nobody's choice stands the last one."""
    choices = jnp.minimum(choices, x.shape[0] * k - 1)
    return x[choices // k], None if scales is None else scales.reshape(x.shape[0] * k)[choices]


def _group_product(rows: jax.Array, scales: jax.Array | None, expert: Weights, config: ExpertConfig) -> jax.Array:
    return expert_product(rows if scales is None else _times(rows, scales), expert, config)


class _Groups(NamedTuple):
    """Choices `[t, k]`, counted row by row, sorted into groups that share an expert.

    Attributes:
      experts: int32 `[n]`, the expert of each group.
      choices: int32 `[n, group]`, what is in it; `t k` where there is nothing.
      used: int32, how many groups hold something. The rest, up to n, is empty.
    """

    experts: jax.Array
    choices: jax.Array
    used: jax.Array


def _groups(ids: jax.Array, num_experts: int, group: int) -> _Groups:
    """Sorts `ids [t, k]` by expert, stably, into at most `n = min(t k, t k // group + e)` groups of `group` choices."""
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
    return _Groups(experts, choices, ends[-1])


def _scaled(x: jax.Array, chosen: jax.Array, scales: jax.Array | None) -> jax.Array:
    """What one expert is given of `x [t, d]`, where `chosen` bool `[t, k]` says which choices fell on it."""
    return x if scales is None else _times(x, jnp.where(chosen, scales, 0.0).sum(axis=-1))


def _times(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * scale[:, None]).astype(x.dtype)


def _expert(weights: Weights, number: jax.Array, dtype: jnp.dtype) -> Weights:
    """One expert's weights, from stacks in their own dtype or in storage form."""
    return jax.tree.map(lambda stack: view_as(lax.dynamic_index_in_dim(stack, number, keepdims=False), dtype), weights)
