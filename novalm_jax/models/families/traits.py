"""The flat vocabulary that family tables speak, and the `ModelConfig` that it builds, layer by layer.

Knows which traits exist and what they mean together. Refuses to know fields of any `config.json`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Final

from novalm_jax.config import (
    Activation,
    AttentionConfig,
    ClampConfig,
    ExpertConfig,
    LatentConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
    RouterConfig,
    TemperatureConfig,
)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What family tables translate `config.json` into. A default means the feature is off.

    Those of one name with an attribute of `ModelConfig` and its parts mean the same. Of the others:

    Attributes:
      attention_bias: a bias on q, k, v and the output; `qkv_bias` is one on the first three alone, `all_biases` one
        there, in MLPs, and on the head.
      rotary_dim, rotary_fraction: how many dimensions of each head are rotated, or which share of them.
      rope_layers, no_rope_interval: see `rotating_layers`.
      window_rule, window_boundary: see `layer_windows`.
      temperature_floor, temperature_scale: of the layers without rotary embedding, where `temperature` is set.
      query_rank, kv_rank, nope_dim, rope_dim, value_dim: latent attention, where kv_rank is not 0.
      norm_order: order of the norm that the weights of the chosen are divided by; 1 is their sum, `renormalise`.
      num_shared: shared experts, each as wide as a routed one; or `shared_width` says how wide they are together.
      sparse_layers, sparse_step, first_sparse, last_sparse, dense_layers: see `sparse_layers`.
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
    head_bias: bool = False
    norm_kind: str = "rms"
    norm_bias: bool = False

    rope: RopeConfig = field(default_factory=lambda: RopeConfig(theta=10000.0))
    rotary_dim: int | None = None
    rotary_fraction: float | None = None
    rope_layers: tuple[int, ...] | None = None
    no_rope_interval: int | None = None
    rope_pairs: bool = False
    rope_scales_softmax: bool = False

    all_biases: bool = False
    qkv_bias: bool = False
    attention_bias: bool = False
    qk_norm: str = "none"
    norm_after_rope: bool = False
    clip_qkv: float | None = None
    attention_scale: float | None = None
    sinks: bool = False
    temperature: bool = False
    temperature_floor: float = 1.0
    temperature_scale: float = 0.0
    window: int | None = None
    window_enabled: bool = True
    window_rule: str = "all"
    window_boundary: int = 0
    chunk: int | None = None
    layer_types: tuple[str, ...] | None = None

    query_rank: int | None = None
    kv_rank: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    latent_norm_eps: float = 1e-6

    mlp_width: int | None = None
    mlp_bias: bool = False
    num_experts: int = 0
    experts_per_token: int | tuple[int, ...] = 0
    expert_width: int = 0
    expert_bias: bool = False
    expert_joint: str = "no"
    expert_inputs_first: bool = False
    expert_down_inputs_first: bool = False
    clamped: bool = False
    clamp_limit: float | None = None
    clamp_alpha: float = 1.0
    scores: str = "softmax"
    choose_first: bool = False
    renormalise: bool = False
    norm_order: float | None = None
    norm_floor: float = 1e-20
    router_scale: float = 1.0
    router_bias: bool = False
    choice_bias: bool = False
    groups: int | None = None
    kept_groups: int | None = None
    group_rule: str | None = None
    jitter: float = 0.0
    scale_inputs: bool = False
    shared_width: int = 0
    num_shared: int | None = None
    shared_gate: bool = False
    sparse_layers: tuple[int, ...] | None = None
    sparse_step: int = 1
    first_sparse: int = 0
    last_sparse: int = -1
    dense_layers: tuple[int, ...] | None = None

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0


# transformers' names of activations, and ours. Its "gelu_pytorch_tanh" and "gelu_new" are the same formula.
ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def build_config(model_type: str, traits: Traits) -> ModelConfig:
    """The configuration that these traits describe. They must have passed `checks.check_traits`."""
    if traits.all_biases:
        traits = replace(traits, attention_bias=True, mlp_bias=True, head_bias=True)
    norm = NormConfig(traits.norm_eps, _literal(traits.norm_kind), traits.norm_bias)
    layers = tuple(
        LayerConfig(
            hidden_size=traits.hidden_size,
            norm=norm,
            attention=_latent(traits) if traits.kv_rank else _attention(traits, window, chunk, rotates),
            feed_forward=_moe(traits, k) if sparse else _mlp(traits),
            residual_multiplier=traits.residual_multiplier,
        )
        for window, chunk, rotates, sparse, k in zip(
            layer_windows(traits),
            layer_chunks(traits),
            rotating_layers(traits),
            sparse_layers(traits),
            experts_per_token(traits),
            strict=True,
        )
    )
    return ModelConfig(
        model_type=model_type,
        vocab_size=traits.vocab_size,
        hidden_size=traits.hidden_size,
        context_length=traits.context_length,
        norm=norm,
        tie_embeddings=traits.tie_embeddings,
        layers=layers,
        head_bias=traits.head_bias,
        embedding_multiplier=traits.embedding_multiplier,
        logits_divisor=traits.logits_divisor,
    )


# --- which layer is what ---------------------------------------------------------------------------------------------


def layer_windows(traits: Traits) -> list[int | None]:
    """The attention window of each layer, None where the layer sees everything.

    `layer_types` decides where the checkpoint gives it; else the family's rule does: `all` layers, the layers `from`
    the boundary on, the `even_before` it (Qwen2-MoE as transformers reads it), or the `even` ones (gpt-oss).
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
            or (rule == "even" and i % 2 == 0)
            for i in range(traits.num_layers)
        ]
    return [traits.window if slide else None for slide in slides]


def layer_chunks(traits: Traits) -> list[int | None]:
    """The attention chunk of each layer: of those that `layer_types` names, else of those that rotate (Llama 4)."""
    if not traits.chunk:
        return [None] * traits.num_layers
    if traits.layer_types is not None:
        chunked = [kind == "chunked_attention" for kind in traits.layer_types]
    else:
        chunked = rotating_layers(traits)
    return [traits.chunk if chunk else None for chunk in chunked]


def rotating_layers(traits: Traits) -> list[bool]:
    """Which layers have a rotary embedding: 1 in `rope_layers`, else all but each `no_rope_interval`-th."""
    if traits.rope_layers:
        return [rotates == 1 for rotates in traits.rope_layers]
    return [traits.no_rope_interval is None or (i + 1) % traits.no_rope_interval != 0 for i in range(traits.num_layers)]


def experts_per_token(traits: Traits) -> list[int]:
    """How many experts a token chooses in each layer."""
    k = traits.experts_per_token
    return [k] * traits.num_layers if isinstance(k, int) else list(k)


def sparse_layers(traits: Traits) -> list[bool]:
    """Which layers hold experts: those of `sparse_layers` where it is given.

    Else every `sparse_step`-th, counting from one, from `first_sparse` to `last_sparse` (-1: to the end), counting from
    zero, except those named as dense.
    """
    layers = range(traits.num_layers)
    if traits.num_experts == 0:
        return [False for _ in layers]
    if traits.sparse_layers is not None:
        return [i in set(traits.sparse_layers) for i in layers]
    dense = set(traits.dense_layers or ())
    last = traits.num_layers - 1 if traits.last_sparse == -1 else traits.last_sparse
    return [(i + 1) % traits.sparse_step == 0 and traits.first_sparse <= i <= last and i not in dense for i in layers]


# --- the parts of a layer --------------------------------------------------------------------------------------------


def head_dim(traits: Traits) -> int:
    """Dimensions of one attention head."""
    return traits.hidden_size // traits.num_heads if traits.head_dim is None else traits.head_dim


def kv_heads(traits: Traits) -> int:
    """Key-value heads of a layer."""
    return traits.num_heads if traits.num_kv_heads is None else traits.num_kv_heads


def rotary_dim(traits: Traits) -> int:
    """Dimensions of one head that are rotated."""
    if traits.rotary_dim is not None:
        return traits.rotary_dim
    return head_dim(traits) if traits.rotary_fraction is None else int(head_dim(traits) * traits.rotary_fraction)


def _attention(traits: Traits, window: int | None, chunk: int | None, rotates: bool) -> AttentionConfig:
    size = head_dim(traits)
    # Llama 4 normalises q and k only where it rotates them, and tempers them only where it does not.
    unit = traits.qk_norm == "unit"
    tempered = traits.temperature and not rotates
    return AttentionConfig(
        num_heads=traits.num_heads,
        num_kv_heads=kv_heads(traits),
        head_dim=size,
        scale=1 / math.sqrt(size) if traits.attention_scale is None else traits.attention_scale,
        rope=replace(traits.rope, pairs=traits.rope_pairs) if rotates else None,
        rotary_dim=rotary_dim(traits) if rotates else 0,
        qkv_bias=traits.qkv_bias or traits.attention_bias,
        out_bias=traits.attention_bias,
        qk_norm="none" if unit and not rotates else _literal(traits.qk_norm),
        norm_after_rope=traits.norm_after_rope,
        clip_qkv=traits.clip_qkv,
        window=window,
        chunk=chunk,
        sinks=traits.sinks,
        temperature=TemperatureConfig(traits.temperature_floor, traits.temperature_scale) if tempered else None,
    )


def _latent(traits: Traits) -> LatentConfig:
    scale = 1 / math.sqrt(traits.nope_dim + traits.rope_dim)
    return LatentConfig(
        num_heads=traits.num_heads,
        query_rank=traits.query_rank,
        kv_rank=traits.kv_rank,
        nope_dim=traits.nope_dim,
        rope_dim=traits.rope_dim,
        value_dim=traits.value_dim,
        scale=scale * traits.rope.softmax_factor if traits.rope_scales_softmax else scale,
        rope=replace(traits.rope, pairs=traits.rope_pairs),
        norm_eps=traits.latent_norm_eps,
        bias=traits.attention_bias,
    )


def _mlp(traits: Traits) -> MLPConfig:
    assert traits.mlp_width is not None
    return MLPConfig(width=traits.mlp_width, activation=ACTIVATIONS[traits.activation], bias=traits.mlp_bias)


def _moe(traits: Traits, k: int) -> MoEConfig:
    shared = traits.shared_width or (traits.num_shared or 0) * traits.expert_width
    return MoEConfig(
        num_experts=traits.num_experts,
        experts_per_token=k,
        expert=ExpertConfig(
            width=traits.expert_width,
            activation=ACTIVATIONS[traits.activation],
            bias=traits.expert_bias,
            clamp=ClampConfig(traits.clamp_limit, traits.clamp_alpha) if traits.clamp_limit is not None else None,
            joint=_literal(traits.expert_joint),
            inputs_first=traits.expert_inputs_first,
            down_inputs_first=traits.expert_down_inputs_first,
        ),
        router=_router(traits),
        shared_width=shared,
        shared_gate=traits.shared_gate,
        shared_bias=traits.mlp_bias,
    )


def _router(traits: Traits) -> RouterConfig:
    grouped = traits.group_rule is not None
    return RouterConfig(
        scores=_literal(traits.scores),
        choose_first=traits.choose_first,
        renormalise=traits.renormalise or traits.norm_order is not None,
        norm_order=traits.norm_order or 1.0,
        norm_floor=traits.norm_floor,
        scale=traits.router_scale,
        bias=traits.router_bias,
        choice_bias=traits.choice_bias,
        groups=traits.groups or 1 if grouped else 1,
        kept_groups=traits.kept_groups or 1 if grouped else 1,
        group_rule=_literal(traits.group_rule or "max"),
        jitter=traits.jitter,
        scale_inputs=traits.scale_inputs,
    )


def _literal(value: str) -> Any:
    """A table's constant where a Literal is expected: tables are part of the package, not input."""
    return value
