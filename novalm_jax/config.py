"""What a decoder is made of: `ModelConfig` and its parts, built from the flat traits that a family's table yields.

Knows no checkpoint dialect, no file and no JAX. Names follow the field; sizes are counts of elements, never bytes.
Everything here is frozen and hashable: two layers with equal `LayerConfig` run through the same compiled programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from novalm_jax.errors import ConfigError

MOST: Final = 2**31 - 1
"""The largest size and the longest context: positions and indices are int32 on the device."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
QKNorm = Literal["none", "head", "all"]
SoftmaxOrder = Literal["before", "after"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) and its stretchings to longer contexts.

    `linear` divides positions by `factor`; `dynamic` is NTK scaling by the current length; `llama3` divides only low
    frequencies (Llama 3.1 model card); `yarn` ramps between both (arXiv:2309.00071) and scales cos and sin by
    `attention_factor`, its ramp ending at whole dimensions where `truncate` is set. `original_context` is the context,
    in tokens, that the model was first trained on.
    """

    theta: float
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention. `scale` multiplies q.k; `window` is how many tokens a query sees, itself included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm = "none"
    clip_qkv: float | None = None
    window: int | None = None


@dataclass(frozen=True)
class MLPConfig:
    """Gated MLP: down(act(gate(x)) * up(x))."""

    width: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts, with or without a shared expert beside them.

    `softmax` says whether router probabilities are taken before or after the top-k choice; `renormalise` makes the
    chosen weights sum to one. `shared_width` is 0 without a shared expert; `shared_gate` puts a sigmoid gate on it.
    """

    num_experts: int
    experts_per_token: int
    expert_width: int
    activation: Activation
    softmax: SoftmaxOrder = "before"
    renormalise: bool = False
    shared_width: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer, complete: enough to build it and to compile its programs."""

    hidden_size: int
    norm_eps: float
    attention: AttentionConfig
    feed_forward: MLPConfig | MoEConfig
    residual_multiplier: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model. `context_length` is in tokens; logits are divided by `logits_divisor`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    context_length: int
    norm_eps: float
    tie_embeddings: bool
    layers: tuple[LayerConfig, ...]
    embedding_multiplier: float = 1.0
    logits_divisor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The flat vocabulary that family tables translate `config.json` into. A default means the feature is off.

    `attention_bias` is a bias on q, k, v and the output, `qkv_bias` one on the first three alone.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    norm_eps: float
    activation: str
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    tie_embeddings: bool = False
    rope: RopeConfig = field(default_factory=lambda: RopeConfig(theta=10000.0))

    qkv_bias: bool = False
    attention_bias: bool = False
    qk_norm: str = "none"
    clip_qkv: float | None = None
    attention_scale: float | None = None
    window: int | None = None
    window_enabled: bool = True
    window_rule: str = "all"
    window_boundary: int = 0
    layer_types: tuple[str, ...] | None = None

    mlp_width: int | None = None
    mlp_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    softmax: str = "before"
    renormalise: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    sparse_step: int = 1
    dense_layers: tuple[int, ...] | None = None

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0


# transformers' names of activations, and ours. Its "gelu_pytorch_tanh" and "gelu_new" are the same formula.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def build_config(model_type: str, traits: Traits) -> ModelConfig:
    """The configuration that these traits describe, layer by layer.

    Raises:
      ConfigError: sizes that do not fit together, or a value outside its range; all of them in one message.
    """
    problems = _problems(traits)
    if problems:
        raise ConfigError(f"config.json of a {model_type} model does not add up: {'; '.join(problems)}.")
    layers = tuple(
        LayerConfig(
            hidden_size=traits.hidden_size,
            norm_eps=traits.norm_eps,
            attention=_attention(traits, window),
            feed_forward=_moe(traits) if sparse else _mlp(traits),
            residual_multiplier=traits.residual_multiplier,
        )
        for window, sparse in zip(layer_windows(traits), sparse_layers(traits), strict=True)
    )
    return ModelConfig(
        model_type=model_type,
        vocab_size=traits.vocab_size,
        hidden_size=traits.hidden_size,
        context_length=traits.context_length,
        norm_eps=traits.norm_eps,
        tie_embeddings=traits.tie_embeddings,
        layers=layers,
        embedding_multiplier=traits.embedding_multiplier,
        logits_divisor=traits.logits_divisor,
    )


def layer_windows(traits: Traits) -> list[int | None]:
    """The attention window of each layer, None where the layer sees everything.

    `layer_types` decides where the checkpoint gives it; else the family's rule does: `all` layers, the layers `from`
    the boundary on, or the `even_before` it (Qwen2-MoE as transformers reads it).
    """
    if not traits.window_enabled or not traits.window:
        return [None] * traits.num_layers
    if traits.layer_types is not None:
        slides = [kind == "sliding_attention" for kind in traits.layer_types]
    else:
        rule, boundary = traits.window_rule, traits.window_boundary
        slides = [
            rule == "all"
            or (rule == "from" and i >= boundary)
            or (rule == "even_before" and i % 2 == 0 and i < boundary)
            for i in range(traits.num_layers)
        ]
    return [traits.window if slide else None for slide in slides]


def sparse_layers(traits: Traits) -> list[bool]:
    """Which layers hold experts: every `sparse_step`-th, counting from one, except those named as dense."""
    dense = set(traits.dense_layers or ())
    return [
        traits.num_experts > 0 and (i + 1) % traits.sparse_step == 0 and i not in dense
        for i in range(traits.num_layers)
    ]


def _attention(traits: Traits, window: int | None) -> AttentionConfig:
    head_dim = _head_dim(traits)
    return AttentionConfig(
        num_heads=traits.num_heads,
        num_kv_heads=_kv_heads(traits),
        head_dim=head_dim,
        scale=1 / math.sqrt(head_dim) if traits.attention_scale is None else traits.attention_scale,
        rope=traits.rope,
        qkv_bias=traits.qkv_bias or traits.attention_bias,
        out_bias=traits.attention_bias,
        qk_norm=_literal(traits.qk_norm),
        clip_qkv=traits.clip_qkv,
        window=window,
    )


def _mlp(traits: Traits) -> MLPConfig:
    assert traits.mlp_width is not None
    return MLPConfig(width=traits.mlp_width, activation=_ACTIVATIONS[traits.activation], bias=traits.mlp_bias)


def _moe(traits: Traits) -> MoEConfig:
    return MoEConfig(
        num_experts=traits.num_experts,
        experts_per_token=traits.experts_per_token,
        expert_width=traits.expert_width,
        activation=_ACTIVATIONS[traits.activation],
        softmax=_literal(traits.softmax),
        renormalise=traits.renormalise,
        shared_width=traits.shared_width,
        shared_gate=traits.shared_gate,
    )


def _literal(value: str) -> Any:
    """A table's constant where a Literal is expected: tables are part of the package, not input."""
    return value


def _head_dim(traits: Traits) -> int:
    return traits.hidden_size // traits.num_heads if traits.head_dim is None else traits.head_dim


def _kv_heads(traits: Traits) -> int:
    return traits.num_heads if traits.num_kv_heads is None else traits.num_kv_heads


# Where a size must lie. Everything below builds lists of some of these lengths, so they are looked at first.
_RANGES: Final[dict[str, tuple[int, int]]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "context_length", "num_heads", "sparse_step"), (1, MOST)),
    **dict.fromkeys(("num_kv_heads", "head_dim", "window", "mlp_width", "expert_width", "shared_width"), (0, MOST)),
    "num_layers": (1, 10_000),
    "num_experts": (0, 100_000),
}
_POSITIVE: Final = ("norm_eps", "clip_qkv")
_FINITE: Final = ("attention_scale", "embedding_multiplier", "residual_multiplier", "logits_divisor")
# Normal numbers of float32, in which models compute.
_LARGEST: Final = (2 - 2**-23) * 2.0**127
_SMALLEST: Final = 2.0**-126


def _problems(traits: Traits) -> list[str]:
    """Everything about the traits that cannot work, in words."""
    return _range_problems(traits) or _misfits(traits)


def _range_problems(traits: Traits) -> list[str]:
    """Numbers that no model could have, each by itself. None stands for a feature that is off."""
    problems = []
    for name, (least, most) in _RANGES.items():
        value = getattr(traits, name)
        if value is not None and value < least:
            problems.append(f"{name} is {value}, {'not positive' if least else 'which is negative'}")
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
    if abs(traits.logits_divisor) < _SMALLEST:
        problems.append(f"logits_divisor is {traits.logits_divisor}, and logits are divided by it in float32")
    return problems


def _misfits(traits: Traits) -> list[str]:
    """Numbers that do not fit together."""
    problems = []
    heads, kv_heads = traits.num_heads, _kv_heads(traits)
    if kv_heads == 0 or heads % kv_heads:
        problems.append(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if traits.head_dim is None and traits.hidden_size % heads:
        problems.append(
            f"hidden size {traits.hidden_size} is not a multiple of {heads} heads and head_dim is not given"
        )
    elif _head_dim(traits) == 0 or _head_dim(traits) % 2:
        problems.append(f"head_dim is {_head_dim(traits)}, but rotary embedding needs a positive even number")
    elif _head_dim(traits) == 2 and traits.rope.kind == "dynamic":
        problems.append("head_dim is 2, for which rotary embedding cannot be stretched by kind 'dynamic'")
    if heads * _head_dim(traits) > MOST:
        problems.append(f"{heads} heads of {_head_dim(traits)} are {heads * _head_dim(traits)} wide, more than {MOST}")
    if traits.activation not in _ACTIVATIONS:
        problems.append(f"activation {traits.activation!r} is not one of {', '.join(_ACTIVATIONS)}")
    if traits.layer_types is not None:
        problems += _layer_type_problems(traits.layer_types, traits.num_layers)
    for layer in traits.dense_layers or ():
        if not 0 <= layer < traits.num_layers:
            problems.append(f"layer {layer} is named as dense, but there are {traits.num_layers} layers")
    return problems + _feed_forward_problems(traits)


def _feed_forward_problems(traits: Traits) -> list[str]:
    problems = []
    sparse = sparse_layers(traits)
    if any(sparse):
        if not 1 <= traits.experts_per_token <= traits.num_experts:
            problems.append(f"{traits.experts_per_token} of {traits.num_experts} experts per token")
        if traits.expert_width == 0:
            problems.append("expert width is 0")
    if traits.num_experts == 0 and traits.expert_width and traits.mlp_width is None:
        problems.append("num_experts is 0, and a model whose layers are all made of experts needs at least one")
    elif not all(sparse) and not traits.mlp_width:
        problems.append(f"a dense layer needs a width, and it is {traits.mlp_width}")
    return problems


def _layer_type_problems(layer_types: tuple[str, ...], num_layers: int) -> list[str]:
    problems = []
    if len(layer_types) != num_layers:
        problems.append(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        problems.append(f"layer_types names {', '.join(unknown)}, of which nothing is known here")
    return problems
