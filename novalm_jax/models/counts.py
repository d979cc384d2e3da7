"""How many weights the parts of a model have, from its configuration alone: nothing is built, and nothing is traced.

Says in numbers what the modules of this folder declare as parameters, and has to say the same.
"""

from __future__ import annotations

from typing import NamedTuple

from novalm_jax.config import (
    AttentionConfig,
    ExpertConfig,
    LatentConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
)


class Counts(NamedTuple):
    """Numbers that are held in the model's dtype, and those that are float32 in any."""

    plain: int
    wide: int = 0

    def bytes(self, itemsize: int) -> int:
        """What they take, where a number of the model's dtype takes `itemsize` bytes."""
        return self.plain * itemsize + self.wide * 4


def outer_counts(config: ModelConfig) -> Counts:
    """Everything outside the layers: embedding, last norm, head."""
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return Counts(tables + ends_counts(config).plain)


def ends_counts(config: ModelConfig) -> Counts:
    """What belongs to neither the layers nor one of the large tables."""
    bias = config.vocab_size if config.head_bias else 0
    return Counts(bias + _norm(config.hidden_size, config.norm))


def dense_counts(layer: LayerConfig) -> Counts:
    """A layer without its routed experts."""
    d, inner, attention = layer.hidden_size, layer.feed_forward, layer.attention
    plain = 2 * _norm(d, layer.norm)
    plain += _latent(d, attention) if isinstance(attention, LatentConfig) else _grouped(d, attention)
    if isinstance(inner, MLPConfig):
        return Counts(plain + gated_mlp(d, inner.width, inner.bias))
    plain += linear(d, inner.num_experts, inner.router.bias)
    if inner.shared_width:
        plain += gated_mlp(d, inner.shared_width, inner.shared_bias) + (d if inner.shared_gate else 0)
    return Counts(plain, inner.num_experts if inner.router.choice_bias else 0)


def expert_count(hidden_size: int, config: ExpertConfig) -> int:
    """One routed expert."""
    return gated_mlp(hidden_size, config.width, config.bias)


def different_experts(config: MoEConfig, tokens: int) -> float:
    """How many experts of a layer so many tokens choose together, if each chose at random."""
    return config.num_experts * (1 - (1 - config.experts_per_token / config.num_experts) ** tokens)


def linear(inputs: int, outputs: int, bias: bool = False) -> int:
    """A linear layer."""
    return inputs * outputs + (outputs if bias else 0)


def gated_mlp(hidden_size: int, width: int, bias: bool = False) -> int:
    """Gate, up and down."""
    return 2 * linear(hidden_size, width, bias) + linear(width, hidden_size, bias)


def _norm(size: int, config: NormConfig) -> int:
    return 2 * size if config.kind == "layer" and config.bias else size


def _grouped(d: int, config: AttentionConfig) -> int:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    count = linear(d, q, config.qkv_bias) + 2 * linear(d, kv, config.qkv_bias) + linear(q, d, config.out_bias)
    count += {"head": 2 * config.head_dim, "all": q + kv}.get(config.qk_norm, 0)
    return count + (config.num_heads if config.sinks else 0)


def _latent(d: int, config: LatentConfig) -> int:
    h, rank = config.num_heads, config.kv_rank
    q, latent = h * (config.nope_dim + config.rope_dim), rank + config.rope_dim
    count = linear(d, latent, config.bias) + rank + linear(rank, h * (config.nope_dim + config.value_dim))
    count += linear(h * config.value_dim, d, config.bias)
    if config.query_rank is None:
        return count + linear(d, q)
    return count + linear(d, config.query_rank, config.bias) + config.query_rank + linear(config.query_rank, q)
