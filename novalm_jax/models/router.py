"""How tokens choose experts: scores, groups, choice and weights, for every rule of `RouterConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from novalm_jax.config import RouterConfig

NONE = -1
"""In place of an expert, in layers that choose fewer than others."""


class Routing(NamedTuple):
    """The router's choice for each token, best first: ids int32 `[t, k]` and weights float32 `[t, k]`."""

    ids: jax.Array
    weights: jax.Array


def stacked(layers: Sequence[Routing], xp: Any = jnp) -> Routing | None:
    """The choices of all layers together, `[l, t, k]`, those that choose fewer filled up with `NONE` and 0; None where
    there are no layers. `xp` is `jnp` in a program, numpy outside."""
    if not layers:
        return None
    most = max(routing.ids.shape[-1] for routing in layers)

    def filled(part: Any, value: float) -> Any:
        missing = most - part.shape[-1]
        return xp.pad(part, ((0, 0), (0, missing)), constant_values=value) if missing else part

    return Routing(
        xp.stack([filled(routing.ids, NONE) for routing in layers]),
        xp.stack([filled(routing.weights, 0.0) for routing in layers]),
    )


def choose(logits: jax.Array, config: RouterConfig, k: int, choice_bias: jax.Array | None = None) -> Routing:
    """The k best experts for each row of float32 `logits [t, e]`, and their weights; of equal ones the lower id.

    `choice_bias` float32 `[e]` takes part in the choice alone (arXiv:2408.15664).
    """
    if config.scores == "sparsemixer":
        return _sparsemixer(logits, config.jitter)
    if config.choose_first:
        top, ids = lax.top_k(logits, k)
        return Routing(ids, _weigh(_scores(top, config), config))
    scores = _scores(logits, config)
    ranked = scores if choice_bias is None else scores + choice_bias[None]
    if config.groups > 1:
        ranked = _within_best_groups(ranked, config)
    _, ids = lax.top_k(ranked, k)
    return Routing(ids, _weigh(jnp.take_along_axis(scores, ids, axis=-1), config))


def _scores(logits: jax.Array, config: RouterConfig) -> jax.Array:
    return jax.nn.sigmoid(logits) if config.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def _weigh(scores: jax.Array, config: RouterConfig) -> jax.Array:
    """The weights `[t, k]` of the chosen, from their scores."""
    if config.renormalise:
        order = config.norm_order
        total = (
            (scores**order).sum(axis=-1, keepdims=True) ** (1 / order) if order != 1 else scores.sum(-1, keepdims=True)
        )
        scores = scores / jnp.maximum(total, config.norm_floor)
    return scores if config.scale == 1.0 else scores * config.scale


def _within_best_groups(ranked: jax.Array, config: RouterConfig) -> jax.Array:
    """`ranked [t, e]` with the experts of all but the best groups out of reach.

    Groups are neighbours in order. DeepSeek-V2 judges one by its best expert (arXiv:2405.04434, section 2.2.2), V3 by
    the sum of its two best (arXiv:2412.19437, section 2.1.2). Minus infinity, since biased scores may be negative.
    """
    t, e = ranked.shape
    members = ranked.reshape(t, config.groups, e // config.groups)
    best, _ = lax.top_k(members, 2 if config.group_rule == "sum_of_two" else 1)
    _, kept = lax.top_k(best.sum(axis=-1), config.kept_groups)
    keep = (kept[:, :, None] == jnp.arange(config.groups)[None, None, :]).any(axis=1)
    return jnp.where(keep[:, :, None], members, -jnp.inf).reshape(t, e)


def _sparsemixer(logits: jax.Array, jitter: float) -> Routing:
    """Two experts, each weighed by a softmax over the logits close to its own (arXiv:2409.12136, without sampling)."""
    first, first_weight = _closest(logits, logits, jitter)
    others = jnp.where(jnp.arange(logits.shape[-1])[None] == first[:, None], -jnp.inf, logits)
    second, second_weight = _closest(others, logits, jitter)
    return Routing(jnp.stack([first, second], axis=-1), jnp.stack([first_weight, second_weight], axis=-1))


def _closest(candidates: jax.Array, logits: jax.Array, jitter: float) -> tuple[jax.Array, jax.Array]:
    """The best candidate, int32 `[t]`, and its share among those that are within 2 jitter of it, relative to size."""
    top = candidates.max(axis=-1, keepdims=True)
    distance = lax.stop_gradient((top - logits) / jnp.maximum(jnp.abs(logits), top))
    shares = jax.nn.softmax(jnp.where(distance > 2 * jitter, -jnp.inf, candidates), axis=-1)
    best = jnp.argmax(candidates, axis=-1).astype(jnp.int32)
    return best, jnp.take_along_axis(shares, best[:, None], axis=-1)[:, 0]
