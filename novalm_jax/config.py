"""What a decoder is made of: `ModelConfig` and its parts.

Knows no checkpoint dialect, no file and no JAX. Names follow the field; sizes are counts of elements, never bytes.
Everything here is frozen and hashable: two layers with equal `LayerConfig` run through the same compiled programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

MOST: Final = 2**31 - 1
"""The largest size and the longest context: positions and indices are int32 on the device."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
QKNorm = Literal["none", "head", "all", "unit"]
Scores = Literal["softmax", "sigmoid", "sparsemixer"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) and its stretchings to longer contexts.

    Attributes:
      theta: the base of the frequencies.
      kind: `linear` divides positions by `factor`; `ntk` multiplies the base by a power of `factor`, and `dynamic` by
        one that grows with the current length; `llama3` divides only low frequencies (Llama 3.1 model card); `yarn`
        ramps between both (arXiv:2309.00071), its ramp ending at whole dimensions where `truncate` is set; `longrope`
        divides each frequency by an entry of `short_factors`, or of `long_factors` once the sequence is longer than
        `original_context` (arXiv:2402.13753).
      original_context: the context, in tokens, that the model was first trained on.
      attention_factor: multiplies cos and sin; of `longrope` while the sequence is short.
      long_attention_factor: that of `longrope` once the sequence is long.
      softmax_factor: multiplies q.k in those families whose YaRN has a second correction (DeepSeek).
      pairs: dimensions (2i, 2i + 1) rotate together, else (i, i + half).
    """

    theta: float
    kind: Literal["default", "linear", "ntk", "dynamic", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    long_attention_factor: float = 1.0
    softmax_factor: float = 1.0
    pairs: bool = False


@dataclass(frozen=True)
class TemperatureConfig:
    """Queries grow with their position: by log(1 + floor((position + 1) / floor)) * scale + 1 (arXiv:2501.19399)."""

    floor: float
    scale: float


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention.

    Attributes:
      scale: multiplies q.k.
      rope: of the first `rotary_dim` dimensions of each head; None for a layer without positions.
      qk_norm: RMS norm of q and k, over each `head` or `all` of them, with a learned scale; `unit` is over each head,
        without one.
      norm_after_rope: whether that comes after the rotation.
      window: how many tokens a query sees, itself included.
      chunk: tokens see only those of their own chunk of this length.
      sinks: each head has a learned logit that takes part in the softmax and stands for no token (arXiv:2309.17453).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    rotary_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm = "none"
    norm_after_rope: bool = False
    clip_qkv: float | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    temperature: TemperatureConfig | None = None


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1).

    Keys and values of a token come from one latent vector of `kv_rank` numbers, and `rope_dim` numbers of its rotated
    key are shared by all heads; that is all a cache holds. Queries come from a latent of `query_rank` numbers, or from
    the hidden state itself where that is None. `bias` is on the projections to the latents and on the output.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: RopeConfig
    norm_eps: float
    bias: bool = False


@dataclass(frozen=True)
class MLPConfig:
    """Gated MLP: down(act(gate(x)) * up(x))."""

    width: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True)
class ClampConfig:
    """The gate of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above, up on both sides."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class ExpertConfig:
    """What one expert computes, and how its weights lie, which is as the checkpoint has them.

    Attributes:
      width: f, of the inner vector.
      bias: whether the products have biases.
      clamp: takes the place of the activation.
      joint: gate and up are one matrix, either gate first and then up (`halves`), or row by row in turn (`alternate`).
      inputs_first: gate and up lie as `[in, out]` in place of `[out, in]`.
      down_inputs_first: so does down.
    """

    width: int
    activation: Activation
    bias: bool = False
    clamp: ClampConfig | None = None
    joint: Literal["no", "halves", "alternate"] = "no"
    inputs_first: bool = False
    down_inputs_first: bool = False


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts, and with which weights.

    Attributes:
      scores: of each logit: `softmax`, `sigmoid`, or `sparsemixer` (arXiv:2409.12136), which takes the softmax of what
        is close to the maximum, twice, for two experts.
      choose_first: the k largest logits are chosen, and scores are taken of those alone.
      renormalise: the weights of the chosen are divided by their sum, or by another norm of them, of `norm_order`.
      norm_floor: the least that they are divided by. Sigmoids can all be zero, and then so are their shares.
      scale: then they are multiplied by this.
      bias: the logits have a bias.
      choice_bias: a learned bias that is added for the choice only, not to the weights (arXiv:2408.15664).
      groups: experts are in so many groups, of which only the best `kept_groups` may be chosen from.
      group_rule: a group is as good as its best score, or as the `sum_of_two` best.
      jitter: the closeness of sparsemixer.
      scale_inputs: the weights multiply what the experts are given, and not what they give.
    """

    scores: Scores = "softmax"
    choose_first: bool = False
    renormalise: bool = False
    norm_order: float = 1.0
    norm_floor: float = 1e-20
    scale: float = 1.0
    bias: bool = False
    choice_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_rule: Literal["max", "sum_of_two"] = "max"
    jitter: float = 0.0
    scale_inputs: bool = False


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts, with or without a shared expert beside them.

    `shared_width` is 0 without a shared expert; `shared_gate` puts a sigmoid gate on it, `shared_bias` biases in it.
    """

    num_experts: int
    experts_per_token: int
    expert: ExpertConfig
    router: RouterConfig = RouterConfig()
    shared_width: int = 0
    shared_gate: bool = False
    shared_bias: bool = False


@dataclass(frozen=True)
class NormConfig:
    """RMS norm (arXiv:1910.07467), or layer norm (arXiv:1607.06450) with or without a bias."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer, complete: enough to build it and to compile its programs."""

    hidden_size: int
    norm: NormConfig
    attention: AttentionConfig | LatentConfig
    feed_forward: MLPConfig | MoEConfig
    residual_multiplier: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model. `context_length` is in tokens; logits are divided by `logits_divisor`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    context_length: int
    norm: NormConfig
    tie_embeddings: bool
    layers: tuple[LayerConfig, ...]
    head_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_divisor: float = 1.0
