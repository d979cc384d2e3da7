"""The decoder-only transformer of every family here, as Flax NNX modules.

`Decoder` is the trainable module: plain attention, all experts at hand. A runtime takes layers apart instead:
`attend` and `route` on one side of the router, experts wherever they live, `combine` on the other.
Hidden states between layers are float32 in any dtype: rounded there, a bfloat16 model is further from its reference.
Knows nothing of files, tiers or requests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from novalm_jax.config import LatentConfig, LayerConfig, MLPConfig, ModelConfig
from novalm_jax.kernels.linear import products
from novalm_jax.models.attention import Attention, Cache, Positions, Uncached
from novalm_jax.models.linear import GatedMLP, Linear
from novalm_jax.models.mla import LatentAttention
from novalm_jax.models.moe import MoE, RouterTrace
from novalm_jax.models.norms import make_norm
from novalm_jax.models.params import parameter, zeros
from novalm_jax.models.router import Routing


class Routed(NamedTuple):
    """The hidden state at the router split: x float32 `[b, t, d]`, normed h `[b * t, d]`, and the choice for h."""

    x: jax.Array
    h: jax.Array
    routing: Routing


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: LayerConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        size = config.hidden_size
        self.attention_norm = make_norm(size, config.norm, dtype=dtype, rngs=rngs)
        self.attention: Attention | LatentAttention
        if isinstance(config.attention, LatentConfig):
            self.attention = LatentAttention(size, config.attention, dtype=dtype, rngs=rngs)
        else:
            self.attention = Attention(size, config.attention, config.norm.eps, dtype=dtype, rngs=rngs)
        self.feed_forward_norm = make_norm(size, config.norm, dtype=dtype, rngs=rngs)
        inner = config.feed_forward
        self.feed_forward: GatedMLP | MoE
        if isinstance(inner, MLPConfig):
            self.feed_forward = GatedMLP(size, inner.width, inner.activation, bias=inner.bias, dtype=dtype, rngs=rngs)
        else:
            self.feed_forward = MoE(size, inner, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, at: Positions, kv: Cache) -> tuple[jax.Array, Cache]:
        """`x [b, t, d]` -> `[b, t, d]` and the cache that follows, with all weights at hand."""
        x, kv, _ = self.traced(x, at, kv)
        return x, kv

    def traced(self, x: jax.Array, at: Positions, kv: Cache) -> tuple[jax.Array, Cache, RouterTrace | None]:
        """As calling the layer; of one with experts also what its router did."""
        x, kv = self.attend(x, at, kv)
        with jax.named_scope("feed_forward"):
            h = self.feed_forward_norm(x)
            h = h.reshape(x.shape[0] * x.shape[1], h.shape[-1])
            if isinstance(self.feed_forward, MoE):
                out, trace = self.feed_forward.traced(h)
                return self.add(x, out), kv, trace
            return self.add(x, self.feed_forward(h)), kv, None

    def attend(self, x: jax.Array, at: Positions, kv: Cache) -> tuple[jax.Array, Cache]:
        """The attention half of the layer."""
        with jax.named_scope("attention"):
            out, kv = self.attention(self.attention_norm(x), at, kv)
            return self.add(x, out), kv

    def route(self, x: jax.Array) -> Routed:
        """The feed-forward half up to the router split; for layers with experts."""
        assert isinstance(self.feed_forward, MoE)
        with jax.named_scope("route"):
            h = self.feed_forward_norm(x)
            h = h.reshape(x.shape[0] * x.shape[1], h.shape[-1])
            return Routed(x, h, self.feed_forward.route(h))

    def combine(self, routed: Routed, products: jax.Array) -> jax.Array:
        """The feed-forward half after the router split: `products [b * t, k, d]` -> `[b, t, d]`."""
        assert isinstance(self.feed_forward, MoE)
        with jax.named_scope("combine"):
            return self.add(routed.x, self.feed_forward.combine(routed.h, products, routed.routing.weights))

    def add(self, x: jax.Array, branch: jax.Array) -> jax.Array:
        """x float32 plus a branch of the layer, times the family's residual multiplier."""
        branch = branch.reshape(x.shape).astype(jnp.float32)
        scale = self.config.residual_multiplier
        return x + branch if scale == 1.0 else x + branch * scale


def without_experts(layer: DecoderLayer) -> DecoderLayer:
    """The layer for a runtime that keeps its routed experts elsewhere: everything but their weights."""
    layer = nnx.clone(layer)
    if isinstance(layer.feed_forward, MoE):
        del layer.feed_forward.experts
    return layer


class Embedding(nnx.Module):
    """One vector for each vocabulary entry."""

    def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.weight = parameter(rngs, (config.vocab_size, config.hidden_size), ("vocab", "embed"), dtype)
        self.multiplier = config.embedding_multiplier

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 `[...]` -> float32 `[..., d]`."""
        return embedded(jnp.take(self.weight[...], tokens, axis=0, mode="clip"), self.multiplier)


def embedded(rows: jax.Array, multiplier: float) -> jax.Array:
    """Rows of the embedding -> float32 hidden states of the same shape."""
    x = rows.astype(jnp.float32)
    return x if multiplier == 1.0 else x * multiplier


class Decoder(nnx.Module):
    """A whole model. Calling it runs whole sequences without a cache and is differentiable.

    Attributes:
      native: of the head, as in `Linear`.
    """

    def __init__(self, config: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(layer, dtype=dtype, rngs=rngs) for layer in config.layers])
        self.norm = make_norm(config.hidden_size, config.norm, dtype=dtype, rngs=rngs)
        self.head = None if config.tie_embeddings else self._untied_head(dtype=dtype, rngs=rngs)
        self.head_bias = parameter(rngs, (config.vocab_size,), ("vocab",), dtype, zeros) if config.head_bias else None
        self.native = False

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 `tokens [b, t]` -> float32 logits `[b, t, v]`. Ids outside the vocabulary count as its nearest one."""
        return self.traced(tokens)[0]

    def traced(self, tokens: jax.Array) -> tuple[jax.Array, tuple[RouterTrace, ...]]:
        """As calling the model, and what the router of each layer with experts did, for the `b * t` tokens in order."""
        b, t = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
        at = Positions(positions, jnp.full((b,), t, jnp.int32))
        x, kv, traces = self.embed(tokens), Uncached(), []
        for layer in self.layers:
            x, kv, trace = layer.traced(x, at, kv)
            traces.append(trace)
        return self.logits(x), tuple(trace for trace in traces if trace is not None)

    def _untied_head(self, *, dtype: Any, rngs: nnx.Rngs) -> Linear:
        return Linear(self.config.hidden_size, self.config.vocab_size, ("vocab", "embed"), dtype=dtype, rngs=rngs)

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states `[..., d]` after the last layer -> float32 logits `[..., v]`."""
        with jax.named_scope("head"):
            weight = self.embed.weight if self.head is None else self.head.weight
            bias = None if self.head_bias is None else self.head_bias[...]
            return read_out(self.norm(x), weight[...], bias, self.config.logits_divisor, self.native)


def read_out(
    h: jax.Array, weight: jax.Array, bias: jax.Array | None, divisor: float, native: bool = False
) -> jax.Array:
    """Normed hidden states `[..., d]` times rows of the head, `weight [v, d]` and `bias [v]`: float32 `[..., v]`."""
    return products(h, (weight,), (bias,), native)[0] / divisor
