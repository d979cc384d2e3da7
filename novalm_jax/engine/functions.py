"""What the programs compute, as pure functions of arrays, over the module tree without its arrays.

A layer is split at the router: `attend` ends there and `experts` begins there. Prefill runs them one by one; a decode
step of the whole model is one function made of the same parts, with barriers at the split, so that both round alike.
Where experts come in waves, `wave` and `combine` are the parts of `experts`. Weights are arguments, never constants,
and flat tuples, because flattening a module costs more than a decode step of a small model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from novalm_jax.config import LayerConfig, ModelConfig, MoEConfig
from novalm_jax.kernels import experts as expert_kernel
from novalm_jax.kernels.experts import Wave, Weights
from novalm_jax.kv.paged import LayerPages, PagedView, groups_of
from novalm_jax.models.attention import Positions
from novalm_jax.models.decoder import Decoder, DecoderLayer, Routed, embedded, read_out, without_experts
from novalm_jax.models.moe import MoE, input_scales
from novalm_jax.models.params import parameters_of
from novalm_jax.models.router import Routing, stacked
from novalm_jax.options import Kernels

DECODE_ROWS = (4, 8, 16, 32)
"""Row counts that decode is compiled for. XLA's CPU backend rounds bfloat16 products of 2 rows differently."""

PREFILL_ROWS = (64, 512)
"""Token counts that a prefill chunk is compiled for; prompts are cut into chunks of the largest."""

EXPERT_GROUP = 64
"""Rows of one expert that prefill multiplies together."""

HEAD_BLOCK = 64
"""Tokens whose logits are computed at a time where all are asked for; divides every prefill chunk."""

Leaves = tuple[jax.Array, ...]

Ints = Any
"""int32, traced in a program or numpy on its way into one."""


class LayerWeights(NamedTuple):
    """A layer's dense weights as flat leaves, and its experts in storage form (None for a dense layer)."""

    dense: Leaves
    experts: Weights | None


class ModelWeights(NamedTuple):
    """All weights as the programs take them: `outer` is everything outside the layers."""

    outer: Leaves
    layers: tuple[LayerWeights, ...]


class Structure:
    """The module tree without its arrays: takes a model apart into flat leaves, and puts it together in a trace.

    Attributes:
      native: whether native code computes few rows.
    """

    def __init__(self, model: Decoder, kernels: Kernels = "xla"):
        """`kernels` as in `Shapes`."""
        self.config: ModelConfig = model.config
        self.native = kernels == "native"
        self._outer_def, self._outer_tree = self._split(_outer(model))
        self._ends_def, self._ends_tree = self._split(_ends(model))
        self._layer_defs = {layer.config: self._split(without_experts(layer)) for layer in reversed(list(model.layers))}

    def outer(self, leaves: Leaves) -> Decoder:
        """The model without its layers."""
        return nnx.merge(self._outer_def, jax.tree.unflatten(self._outer_tree, leaves))

    def ends(self, leaves: Leaves) -> Decoder:
        """The model without its layers, its embedding, and the matrix of its head."""
        return nnx.merge(self._ends_def, jax.tree.unflatten(self._ends_tree, leaves))

    def layer(self, config: LayerConfig, leaves: Leaves) -> DecoderLayer:
        """A layer without its routed experts."""
        graph, tree = self._layer_defs[config]
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

    def _split(self, module: nnx.Module) -> tuple[Any, Any]:
        module.set_attributes(native=self.native, raise_if_not_found=False)
        graph, state = nnx.split(module)
        return graph, jax.tree.structure(state)

    @staticmethod
    def take_apart(model: Decoder) -> ModelWeights:
        """The weights of `model`, as they are."""
        layers = []
        for layer in model.layers:
            experts = None
            if isinstance(layer.feed_forward, MoE):
                experts = layer.feed_forward.experts.weights()
            layers.append(LayerWeights(_leaves(without_experts(layer)), experts))
        return ModelWeights(_leaves(_outer(model)), tuple(layers))

    @staticmethod
    def paths_of_ends(model: Decoder) -> tuple[str, ...]:
        """The parameters that `ends` takes, in its order."""
        return tuple(parameters_of(_ends(model)))


def _outer(model: Decoder) -> Decoder:
    outer = nnx.clone(model)
    del outer.layers
    return outer


def _ends(model: Decoder) -> Decoder:
    ends = _outer(model)
    del ends.embed, ends.head
    return ends


def _leaves(module: nnx.Module) -> Leaves:
    return tuple(jax.tree.leaves(nnx.state(module)))


class PrefillChunk(NamedTuple):
    """Where a prefill chunk goes, int32 scalars: the position of its first token, how many of its tokens are not
    padding, and how many tokens of the sequence are known. And for each group of layers the pages of its sequence,
    int32 `[n]`."""

    start: Ints
    tokens: Ints
    known: Ints
    tables: tuple[Ints, ...]


class DecodeStep(NamedTuple):
    """The sequences of a decode step, int32 `[b]` each. An idle row has position -1.

    `known` is how many tokens of each sequence are known, at least its position + 1. `tables` are for each group of
    layers the pages of the sequences, int32 `[b, n]`.
    """

    tokens: Ints
    positions: Ints
    known: Ints
    tables: tuple[Ints, ...]


class Decoded(NamedTuple):
    """float32 logits `[b, v]` and the most likely ids, int32 `[b]`."""

    logits: jax.Array
    greedy: jax.Array


class Functions:
    """The functions that are compiled, over one `Structure`, for sequences of so many positions at most."""

    def __init__(self, structure: Structure, capacity: int):
        self._structure = structure
        config = structure.config
        self._groups = dict(zip(config.layers, groups_of(config, capacity), strict=True))

    def embed(self, outer: Leaves, tokens: jax.Array) -> jax.Array:
        """int32 `[t]` -> `[1, t, d]`."""
        return self._structure.outer(outer).embed(tokens[None])

    def embed_step(self, outer: Leaves, tokens: jax.Array) -> jax.Array:
        """int32 `[b]` -> `[b, 1, d]`."""
        return self._structure.outer(outer).embed(tokens[:, None])

    def head_of_step(self, outer: Leaves, x: jax.Array) -> Decoded:
        """Logits of `x [b, 1, d]`."""
        return _decoded(self._structure.outer(outer).logits(x[:, 0]))

    def lookahead(self, config: LayerConfig, dense: Leaves, x: jax.Array) -> Routing:
        """What the router of a layer chooses for the hidden state `x [b, t, d]` of a layer before it."""
        return self._structure.layer(config, dense).route(x).routing

    def head(self, outer: Leaves, x: jax.Array, index: jax.Array) -> Decoded:
        """Logits of token `index` of `x [1, t, d]`, on as many equal rows as the smallest decode step has."""
        return _decoded(self._structure.outer(outer).logits(_one_token(x, index)))

    def head_of_block(self, outer: Leaves, x: jax.Array, start: jax.Array) -> jax.Array:
        """Logits of the `HEAD_BLOCK` tokens from `start` on of `x [1, t, d]`: float32 `[HEAD_BLOCK, v]`."""
        return self._structure.outer(outer).logits(_tokens(x, start))

    def embed_rows(self, rows: jax.Array) -> jax.Array:
        """Rows of the embedding `[b, t, d]` -> float32 `[b, t, d]`, as `embed` and `embed_step` give them."""
        return embedded(rows, self._structure.config.embedding_multiplier)

    def normed(self, ends: Leaves, x: jax.Array, index: jax.Array) -> jax.Array:
        """What `head` multiplies by the matrix of the head: `[rows, d]`."""
        return self._structure.ends(ends).norm(_one_token(x, index))

    def normed_tokens(self, ends: Leaves, x: jax.Array, start: jax.Array) -> jax.Array:
        """What `head_of_block` does: `[HEAD_BLOCK, d]`."""
        return self._structure.ends(ends).norm(_tokens(x, start))

    def normed_step(self, ends: Leaves, x: jax.Array) -> jax.Array:
        """What `head_of_step` does: `[b, d]`."""
        return self._structure.ends(ends).norm(x[:, 0])

    def some_logits(self, ends: Leaves, weight: jax.Array, h: jax.Array, first: jax.Array) -> jax.Array:
        """Logits of normed `h [n, d]` for the entries of the vocabulary from `first` on: `weight [v, d]` are their rows
        of the head; float32 `[n, v]`."""
        bias = self._structure.ends(ends).head_bias
        some = None if bias is None else lax.dynamic_slice_in_dim(bias[...], first, len(weight))
        return read_out(h, weight, some, self._structure.config.logits_divisor, self._structure.native)

    def joined(self, *blocks: jax.Array) -> Decoded:
        """Logits of the whole vocabulary, from those of blocks of it; the last two may overlap."""
        *most, last = blocks
        left = self._structure.config.vocab_size - sum(block.shape[-1] for block in most)
        return _decoded(jnp.concatenate([*most, last[:, last.shape[-1] - left :]], axis=-1))

    def attend(
        self, config: LayerConfig, dense: Leaves, pages: LayerPages, x: jax.Array, chunk: PrefillChunk
    ) -> tuple[Routed | jax.Array, LayerPages]:
        """A prefill chunk `x [1, t, d]` up to the router split; through the whole layer where it is dense."""
        offsets = jnp.arange(x.shape[1], dtype=jnp.int32)
        at = Positions((chunk.start + offsets)[None], chunk.known[None])
        table, start = chunk.tables[self._groups[config]][None], chunk.start[None]
        view = PagedView(pages, table, start, start + chunk.tokens)
        return self._attend(config, dense, view, x, at, offsets < chunk.tokens)

    def experts(self, config: LayerConfig, dense: Leaves, experts: Weights, routed: Routed) -> jax.Array:
        """A prefill chunk from the router split to the end of the layer: `[1, t, d]`."""
        return self.combine(config, dense, routed, self._products(config, experts, routed))

    def first_wave(self, config: LayerConfig, pool: Weights, routed: Routed, slots: jax.Array) -> jax.Array:
        """`[t, k, d]`, the products of experts in slots of a pool: int32 `slots [e]`, negative for all others."""
        ids, h = routed.routing.ids, routed.h
        return self.wave(config, pool, jnp.zeros((*ids.shape, h.shape[-1]), h.dtype), routed, slots)

    def wave(
        self, config: LayerConfig, pool: Weights, products: jax.Array, routed: Routed, slots: jax.Array
    ) -> jax.Array:
        """As `first_wave`, added to the products of earlier ones."""
        return self._products(config, pool, routed, Wave(slots, products))

    def combine(self, config: LayerConfig, dense: Leaves, routed: Routed, products: jax.Array) -> jax.Array:
        """The end of a layer, once all products are there: `[b, t, d]`."""
        return self._structure.layer(config, dense).combine(routed, products)

    def _products(self, config: LayerConfig, weights: Weights, routed: Routed, wave: Wave | None = None) -> jax.Array:
        assert isinstance(config.feed_forward, MoEConfig)
        ids, scales = routed.routing.ids, input_scales(config.feed_forward, routed.routing)
        expert = config.feed_forward.expert
        if len(ids) < EXPERT_GROUP:
            few = expert_kernel.by_choice if self._structure.native else expert_kernel.by_expert
            return few(routed.h, ids, weights, expert, scales, wave)
        return expert_kernel.grouped(routed.h, ids, weights, expert, EXPERT_GROUP, scales, wave)

    def decode(
        self, weights: ModelWeights, pages: tuple[LayerPages, ...], step: DecodeStep
    ) -> tuple[Decoded, tuple[LayerPages, ...], Routing | None]:
        """One token for each row, through the whole model; and what the routers of its layers chose, `[l, b, k]`."""
        x = lax.optimization_barrier(self.embed_step(weights.outer, step.tokens))
        after, chosen = [], []
        for config, layer, held in zip(self._structure.config.layers, weights.layers, pages, strict=True):
            x, held, routing = self.decode_layer(config, layer, held, x, step)
            after.append(held)
            if routing is not None:
                chosen.append(routing)
        return self.head_of_step(weights.outer, x), tuple(after), stacked(chosen)

    def decode_layer(
        self, config: LayerConfig, weights: LayerWeights, pages: LayerPages, x: jax.Array, step: DecodeStep
    ) -> tuple[jax.Array, LayerPages, Routing | None]:
        """One layer of a decode step, `x [b, 1, d]`, with barriers at the router split."""
        routed, pages = lax.optimization_barrier(self.attend_step(config, weights.dense, pages, x, step))
        if not isinstance(routed, Routed):
            return routed, pages, None
        assert weights.experts is not None
        products = lax.optimization_barrier(self._products(config, weights.experts, routed))
        x = lax.optimization_barrier(self.combine(config, weights.dense, routed, products))
        return x, pages, routed.routing

    def attend_step(
        self, config: LayerConfig, dense: Leaves, pages: LayerPages, x: jax.Array, step: DecodeStep
    ) -> tuple[Routed | jax.Array, LayerPages]:
        """As `attend`, of a decode step `x [b, 1, d]`."""
        at = Positions(step.positions[:, None], step.known)
        table, start = step.tables[self._groups[config]], step.positions
        view = PagedView(pages, table, start, start + 1, self._structure.native)
        return self._attend(config, dense, view, x, at, step.positions >= 0)

    def _attend(
        self, config: LayerConfig, dense: Leaves, view: PagedView, x: jax.Array, at: Positions, real: jax.Array
    ) -> tuple[Routed | jax.Array, LayerPages]:
        """`real` bool `[b * t]`: rows that are padding choose no expert."""
        layer = self._structure.layer(config, dense)
        if not isinstance(config.feed_forward, MoEConfig):
            x, view = layer(x, at, view)
            return x, view.pages
        x, view = layer.attend(x, at, view)
        routed = layer.route(x)
        nobody = jnp.int32(config.feed_forward.num_experts)
        ids = jnp.where(real[:, None], routed.routing.ids, nobody)
        return routed._replace(routing=Routing(ids, routed.routing.weights)), view.pages


def _one_token(x: jax.Array, index: jax.Array) -> jax.Array:
    """Token `index` of `x [1, t, d]`, on as many equal rows as the smallest decode step has."""
    return jnp.concatenate([lax.dynamic_index_in_dim(x[0], index, keepdims=True)] * DECODE_ROWS[0])


def _tokens(x: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(x[0], start, HEAD_BLOCK)


def _decoded(logits: jax.Array) -> Decoded:
    return Decoded(logits, jnp.argmax(logits, axis=-1).astype(jnp.int32))
