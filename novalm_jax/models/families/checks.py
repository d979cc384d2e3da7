"""Traits that no model could have: numbers out of range, and numbers that do not fit together."""

from __future__ import annotations

from typing import Final

from novalm_jax.config import MOST
from novalm_jax.errors import ConfigError
from novalm_jax.models.families.traits import (
    ACTIVATIONS,
    Traits,
    experts_per_token,
    head_dim,
    kv_heads,
    rotary_dim,
    sparse_layers,
)

# Where a size must lie. Everything below builds lists of some of these lengths, so they are looked at first.
_RANGES: Final[dict[str, tuple[int, int]]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "context_length", "num_heads", "sparse_step"), (1, MOST)),
    **dict.fromkeys(("num_kv_heads", "head_dim", "window", "rotary_dim"), (0, MOST)),
    **dict.fromkeys(("mlp_width", "expert_width", "shared_width", "first_sparse"), (0, MOST)),
    **dict.fromkeys(("kv_rank", "nope_dim", "rope_dim", "value_dim"), (0, MOST)),
    **dict.fromkeys(("query_rank", "groups", "kept_groups", "no_rope_interval", "chunk"), (1, MOST)),
    "last_sparse": (-1, MOST),
    "num_shared": (0, 1_000),
    "num_layers": (1, 10_000),
    "num_experts": (0, 100_000),
}
_POSITIVE: Final = (
    "norm_order",
    "norm_floor",
    "norm_eps",
    "latent_norm_eps",
    "clip_qkv",
    "clamp_limit",
    "rotary_fraction",
    "temperature_floor",
)
_FINITE: Final = (
    *("attention_scale", "embedding_multiplier", "residual_multiplier", "logits_divisor", "router_scale", "jitter"),
    *("temperature_scale", "clamp_alpha"),
)
_NOT_NEGATIVE: Final = ("jitter",)
# Normal numbers of float32, in which models compute.
_LARGEST: Final = (2 - 2**-23) * 2.0**127
_SMALLEST: Final = 2.0**-126


def check_traits(model_type: str, traits: Traits) -> None:
    """Passes traits that a model can be built from.

    Raises:
      ConfigError: sizes that do not fit together, or a value outside its range; all of them in one message.
    """
    problems = _out_of_range(traits) or _misfits(traits)
    if problems:
        raise ConfigError(f"config.json of a {model_type} model does not add up: {'; '.join(problems)}.")


def _out_of_range(traits: Traits) -> list[str]:
    """Numbers that no model could have, each by itself. None stands for a feature that is off."""
    problems = []
    for name, (least, most) in _RANGES.items():
        value = getattr(traits, name)
        if value is not None and value < least:
            problems.append(f"{name} is {value}, {'not positive' if least == 1 else 'which is negative'}")
        elif value is not None and value > most:
            problems.append(f"{name} is {value}, and {most} is the most that can be run")
    for name in _POSITIVE + _FINITE:
        value = getattr(traits, name)
        if value is None:
            continue
        if not abs(value) <= _LARGEST:
            problems.append(f"{name} is {value}, not a finite number of float32")
        elif name in _POSITIVE and not value > 0:
            problems.append(f"{name} is {value}, not positive")
        elif name in _NOT_NEGATIVE and value < 0:
            problems.append(f"{name} is {value}, which is negative")
    if abs(traits.logits_divisor) < _SMALLEST:
        problems.append(f"logits_divisor is {traits.logits_divisor}, and logits are divided by it in float32")
    return problems


def _misfits(traits: Traits) -> list[str]:
    """Numbers that do not fit together."""
    problems = _latent_problems(traits) if traits.kv_rank or traits.nope_dim else _attention_problems(traits)
    if traits.activation not in ACTIVATIONS:
        problems.append(f"activation {traits.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if traits.clamped and traits.clamp_limit is None:
        problems.append("clamp_limit is null, and the gate of the experts needs one")
    if traits.layer_types is not None:
        problems += _layer_type_problems(traits)
    for name, entries in (("rope_layers", traits.rope_layers or None), ("experts_per_token", traits.experts_per_token)):
        if isinstance(entries, tuple) and len(entries) != traits.num_layers:
            problems.append(f"{name} has {len(entries)} entries for {traits.num_layers} layers")
    if strange := set(traits.rope_layers or ()) - {0, 1}:
        problems.append(f"rope_layers has {', '.join(map(str, sorted(strange)))} in place of 0 or 1")
    for names in (traits.dense_layers, traits.sparse_layers):
        for layer in names or ():
            if not 0 <= layer < traits.num_layers:
                what = "dense" if names is traits.dense_layers else "holding experts"
                problems.append(f"layer {layer} is named as {what}, but there are {traits.num_layers} layers")
    return problems + _feed_forward_problems(traits)


def _attention_problems(traits: Traits) -> list[str]:
    problems = []
    heads, kv, size, rotated = traits.num_heads, kv_heads(traits), head_dim(traits), rotary_dim(traits)
    if kv == 0 or heads % kv:
        problems.append(f"{heads} attention heads cannot share {kv} key-value heads evenly")
    if traits.head_dim is None and traits.hidden_size % heads:
        problems.append(
            f"hidden size {traits.hidden_size} is not a multiple of {heads} heads and head_dim is not given"
        )
    elif size == 0:
        problems.append("head_dim is 0")
    elif rotated == 0 or rotated % 2 or rotated > size:
        what = f"head_dim is {size}" if rotated == size else f"{rotated} of {size} dimensions of a head are rotated"
        problems.append(f"{what}, but rotary embedding needs a positive even number")
    else:
        problems += _rope_problems(traits, rotated)
    share = traits.rotary_fraction
    if share is not None and size and rotated / size != share and rotated != int(size * share):
        problems.append(f"rotary_dim is {rotated}, but a share of {share} of head_dim = {size} is {int(size * share)}")
    if heads * size > MOST:
        problems.append(f"{heads} heads of {size} are {heads * size} wide, more than {MOST}")
    return problems


def _latent_problems(traits: Traits) -> list[str]:
    problems = []
    if kv_heads(traits) != traits.num_heads:
        problems.append(f"latent attention has one key-value head for each of its {traits.num_heads} heads")
    if traits.rope_dim == 0 or traits.rope_dim % 2:
        problems.append(f"{traits.rope_dim} dimensions are rotated, but rotary embedding needs a positive even number")
    else:
        problems += _rope_problems(traits, traits.rope_dim)
    problems += [f"{name} is 0" for name in ("kv_rank", "nope_dim", "value_dim") if getattr(traits, name) == 0]
    widest = traits.num_heads * max(traits.nope_dim + traits.rope_dim, traits.nope_dim + traits.value_dim)
    if widest > MOST:
        problems.append(f"{traits.num_heads} heads are {widest} wide together, more than {MOST}")
    return problems


def _rope_problems(traits: Traits, rotated: int) -> list[str]:
    rope = traits.rope
    if rotated == 2 and rope.kind in ("dynamic", "ntk"):
        return [f"head_dim is 2, for which rotary embedding cannot be stretched by kind {rope.kind!r}"]
    return [
        f"{name} has {len(factors)} entries, and {rotated // 2} pairs of dimensions are rotated"
        for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors))
        if rope.kind == "longrope" and len(factors) != rotated // 2
    ]


def _feed_forward_problems(traits: Traits) -> list[str]:
    problems = []
    sparse = sparse_layers(traits)
    if any(sparse):
        for k in sorted(set(experts_per_token(traits))):
            if not 1 <= k <= traits.num_experts:
                problems.append(f"{k} of {traits.num_experts} experts per token")
        if traits.expert_width == 0:
            problems.append("expert width is 0")
        if (shared := (traits.num_shared or 0) * traits.expert_width) > MOST:
            problems.append(f"shared experts are {shared} wide together, more than {MOST}")
        if traits.group_rule is not None:
            problems += _group_problems(traits)
    if traits.num_experts == 0 and traits.expert_width and traits.mlp_width is None:
        problems.append("num_experts is 0, and a model whose layers are all made of experts needs at least one")
    elif not all(sparse) and not traits.mlp_width:
        problems.append(f"a dense layer needs a width, and it is {traits.mlp_width}")
    return problems


def _group_problems(traits: Traits) -> list[str]:
    groups, kept = traits.groups or 1, traits.kept_groups or 1
    if traits.num_experts % groups:
        return [f"{traits.num_experts} experts cannot be in {groups} equal groups"]
    size = traits.num_experts // groups
    if kept > groups:
        return [f"{kept} groups are kept of {groups}"]
    if (k := max(experts_per_token(traits), default=0)) > kept * size:
        return [f"{k} experts per token do not fit in {kept} groups of {size}"]
    if traits.group_rule == "sum_of_two" and size < 2:
        return ["a group is judged by its two best experts, and each has one"]
    return []


def _layer_type_problems(traits: Traits) -> list[str]:
    problems = []
    layer_types, num_layers = traits.layer_types or (), traits.num_layers
    if len(layer_types) != num_layers:
        problems.append(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    if "sliding_attention" in layer_types and not (traits.window and traits.window_enabled):
        problems.append("layer_types names sliding_attention, but there is no window")
    if "chunked_attention" in layer_types and not traits.chunk:
        problems.append("layer_types names chunked_attention, but there is no length of a chunk")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention", "chunked_attention"})
    if unknown:
        problems.append(
            f"layer_types names {', '.join(f'{name!r:.60}' for name in unknown)}, of which nothing is known here"
        )
    return problems
