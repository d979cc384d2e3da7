"""The programs of a resident model, as pure functions of arrays and compiled ahead of time.

A layer is split at the router: `attend` ends there and `experts` begins there, compiled once each for all layers of
one `LayerConfig`. Prefill runs them one by one; a decode step of the whole model is one program made of the same
functions, with barriers at the split, so that both round alike. Weights are arguments, never constants, and flat
tuples, because flattening a module costs more than a decode step of a small model.

Shapes depend on the model and the options alone. Decode never has fewer than 4 rows (XLA rounds those differently) and
stays below 64 rows; prefill has 64 rows or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from novalm_jax.compat import compile_program, program_bytes
from novalm_jax.config import LayerConfig, ModelConfig, MoEConfig
from novalm_jax.kernels import experts as expert_kernel
from novalm_jax.kernels.experts import Weights
from novalm_jax.kernels.storage import storage_dtype
from novalm_jax.kv.static import CacheView, LayerCache, cache_shape
from novalm_jax.models.attention import Positions
from novalm_jax.models.decoder import Decoder, DecoderLayer, Routed, without_experts
from novalm_jax.models.moe import MoE, input_scales
from novalm_jax.models.router import Routing

DECODE_ROWS = (4, 8, 16, 32)
"""Row counts that decode is compiled for. XLA's CPU backend rounds bfloat16 products of 2 rows differently."""

PREFILL_ROWS = (64, 512)
"""Token counts that a prefill chunk is compiled for; prompts are cut into chunks of the largest."""

EXPERT_GROUP = 64
"""Rows of one expert that prefill multiplies together."""

HEAD_BLOCK = 64
"""Tokens whose logits are computed at a time where all are asked for; divides every prefill chunk."""

KV_BLOCK = 128
"""Cache positions that attention handles at a time."""

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


@dataclass(frozen=True)
class Shapes:
    """What the programs are compiled for: cache rows, cache positions in each, and the number type."""

    rows: int
    capacity: int
    dtype: np.dtype


class Structure:
    """The module tree without its arrays: takes a model apart into flat leaves, and puts it together in a trace."""

    def __init__(self, model: Decoder):
        self.config: ModelConfig = model.config
        self._outer_def, self._outer_tree = _split(_outer(model))
        self._layer_defs = {layer.config: _split(without_experts(layer)) for layer in reversed(list(model.layers))}

    def outer(self, leaves: Leaves) -> Decoder:
        """The model without its layers."""
        return nnx.merge(self._outer_def, jax.tree.unflatten(self._outer_tree, leaves))

    def layer(self, config: LayerConfig, leaves: Leaves) -> DecoderLayer:
        """A layer without its routed experts."""
        graph, tree = self._layer_defs[config]
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

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


def _outer(model: Decoder) -> Decoder:
    outer = nnx.clone(model)
    del outer.layers
    return outer


def _split(module: nnx.Module) -> tuple[Any, Any]:
    graph, state = nnx.split(module)
    return graph, jax.tree.structure(state)


def _leaves(module: nnx.Module) -> Leaves:
    return tuple(jax.tree.leaves(nnx.state(module)))


class PrefillChunk(NamedTuple):
    """Where a prefill chunk goes, int32 scalars: its row, the position of its first token, how many of its tokens are
    not padding, and how many tokens of the sequence are known."""

    row: Ints
    start: Ints
    tokens: Ints
    known: Ints


class DecodeStep(NamedTuple):
    """The sequences of a decode step, int32 `[b]` each. An idle row has the row past the last and position -1.

    `known` is how many tokens of each sequence are known, at least its position + 1.
    """

    tokens: Ints
    rows: Ints
    positions: Ints
    known: Ints


class Decoded(NamedTuple):
    """float32 logits `[b, v]` and the most likely ids, int32 `[b]`."""

    logits: jax.Array
    greedy: jax.Array


class Functions:
    """The functions that are compiled, over one `Structure`."""

    def __init__(self, structure: Structure):
        self._structure = structure

    def embed(self, outer: Leaves, tokens: jax.Array) -> jax.Array:
        """int32 `[t]` -> `[1, t, d]`."""
        return self._structure.outer(outer).embed(tokens[None])

    def head(self, outer: Leaves, x: jax.Array, index: jax.Array) -> Decoded:
        """Logits of token `index` of `x [1, t, d]`, on as many equal rows as the smallest decode step has."""
        last = lax.dynamic_index_in_dim(x[0], index, keepdims=True)
        return _decoded(self._structure.outer(outer).logits(jnp.concatenate([last] * DECODE_ROWS[0])))

    def head_of_block(self, outer: Leaves, x: jax.Array, start: jax.Array) -> jax.Array:
        """Logits of the `HEAD_BLOCK` tokens from `start` on of `x [1, t, d]`: float32 `[HEAD_BLOCK, v]`."""
        return self._structure.outer(outer).logits(lax.dynamic_slice_in_dim(x[0], start, HEAD_BLOCK))

    def attend(
        self, config: LayerConfig, dense: Leaves, cache: LayerCache, x: jax.Array, chunk: PrefillChunk
    ) -> tuple[Routed | jax.Array, LayerCache]:
        """A prefill chunk `x [1, t, d]` up to the router split; through the whole layer where it is dense."""
        offsets = jnp.arange(x.shape[1], dtype=jnp.int32)
        at = Positions((chunk.start + offsets)[None], chunk.known[None])
        view = CacheView(cache, chunk.row[None], chunk.start[None], KV_BLOCK)
        return self._attend(config, dense, view, x, at, offsets < chunk.tokens)

    def experts(self, config: LayerConfig, dense: Leaves, experts: Weights, routed: Routed) -> jax.Array:
        """A prefill chunk from the router split to the end of the layer: `[1, t, d]`."""
        assert isinstance(config.feed_forward, MoEConfig)
        ids, scales = routed.routing.ids, input_scales(config.feed_forward, routed.routing)
        products = expert_kernel.grouped(routed.h, ids, experts, config.feed_forward.expert, EXPERT_GROUP, scales)
        return self._structure.layer(config, dense).combine(routed, products)

    def decode(
        self, weights: ModelWeights, caches: tuple[LayerCache, ...], step: DecodeStep
    ) -> tuple[Decoded, tuple[LayerCache, ...]]:
        """One token for each row, through the whole model."""
        outer = self._structure.outer(weights.outer)
        x = lax.optimization_barrier(outer.embed(step.tokens[:, None]))
        after = []
        for config, layer, cache in zip(self._structure.config.layers, weights.layers, caches, strict=True):
            x, cache = self.decode_layer(config, layer, cache, x, step)
            after.append(cache)
        return _decoded(outer.logits(x[:, 0])), tuple(after)

    def decode_layer(
        self, config: LayerConfig, weights: LayerWeights, cache: LayerCache, x: jax.Array, step: DecodeStep
    ) -> tuple[jax.Array, LayerCache]:
        """One layer of a decode step, `x [b, 1, d]`, with barriers at the router split."""
        at = Positions(step.positions[:, None], step.known)
        view = CacheView(cache, step.rows, step.positions, KV_BLOCK)
        active = step.positions >= 0
        routed, cache = lax.optimization_barrier(self._attend(config, weights.dense, view, x, at, active))
        if not isinstance(routed, Routed):
            return routed, cache
        assert weights.experts is not None and isinstance(config.feed_forward, MoEConfig)
        ids, scales = routed.routing.ids, input_scales(config.feed_forward, routed.routing)
        products = expert_kernel.by_expert(routed.h, ids, weights.experts, config.feed_forward.expert, scales)
        layer = self._structure.layer(config, weights.dense)
        return lax.optimization_barrier(layer.combine(routed, lax.optimization_barrier(products))), cache

    def _attend(
        self, config: LayerConfig, dense: Leaves, view: CacheView, x: jax.Array, at: Positions, real: jax.Array
    ) -> tuple[Routed | jax.Array, LayerCache]:
        """`real` bool `[b * t]`: rows that are padding choose no expert."""
        layer = self._structure.layer(config, dense)
        if not isinstance(config.feed_forward, MoEConfig):
            x, view = layer(x, at, view)
            return x, view.cache
        x, view = layer.attend(x, at, view)
        routed = layer.route(x)
        nobody = jnp.int32(config.feed_forward.num_experts)
        ids = jnp.where(real[:, None], routed.routing.ids, nobody)
        return routed._replace(routing=Routing(ids, routed.routing.weights)), view.cache


class Programs:
    """Compiled programs, made when first asked for, from shapes alone: no weights are needed to know their cost."""

    def __init__(self, model: Decoder, shapes: Shapes):
        structure = Structure(model)
        self.shapes = shapes
        self._config = structure.config
        self._functions = Functions(structure)
        self._weights = _in_storage_form(structure.take_apart(model))
        self._caches = tuple(
            cache_shape(layer.attention, shapes.rows, shapes.capacity, shapes.dtype) for layer in self._config.layers
        )
        self._compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}
        self._workspace: dict[tuple[Any, ...], int] = {}

    def embed(self, tokens: int) -> jax.stages.Compiled:
        """(outer, int32 `[t]`) -> `[1, t, d]`."""
        return self._get(("embed", tokens), self._functions.embed, (self._weights.outer,), (_ints(tokens),))

    def head(self, tokens: int) -> jax.stages.Compiled:
        """(outer, x `[1, t, d]`, int32 index) -> `Decoded` of that token, on equal rows."""
        live = (self._hidden(tokens), _ints())
        return self._get(("head", tokens), self._functions.head, (self._weights.outer,), live)

    def head_of_block(self, tokens: int) -> jax.stages.Compiled:
        """(outer, x `[1, t, d]`, int32 start) -> float32 logits `[HEAD_BLOCK, v]`."""
        live = (self._hidden(tokens), _ints())
        return self._get(("head_of_block", tokens), self._functions.head_of_block, (self._weights.outer,), live)

    def attend(self, config: LayerConfig, tokens: int) -> jax.stages.Compiled:
        """(dense, cache, x, `PrefillChunk`) -> (`Routed` or x, cache); the cache is donated."""
        held, live = self._attend_arguments(config, tokens)
        return self._get(("attend", config, tokens), partial(self._functions.attend, config), held, live, donate=(1,))

    def experts(self, config: LayerConfig, tokens: int) -> jax.stages.Compiled:
        """(dense, experts, `Routed`) -> x `[1, t, d]`."""
        held, live = self._attend_arguments(config, tokens)
        routed, _ = jax.eval_shape(partial(self._functions.attend, config), *held, *live)
        weights = self._layer_weights(config)
        function = partial(self._functions.experts, config)
        return self._get(("experts", config, tokens), function, (weights.dense, weights.experts), (routed,))

    def decode(self, rows: int) -> jax.stages.Compiled:
        """(`ModelWeights`, caches, `DecodeStep`) -> (`Decoded`, caches); the caches are donated."""
        live = (DecodeStep(*[_ints(rows)] * 4),)
        return self._get(("decode", rows), self._functions.decode, (self._weights, self._caches), live, donate=(1,))

    def workspace_bytes(self) -> int:
        """Most bytes that a step takes beyond weights and caches. Compiles the largest programs of each kind."""
        tokens = prefill_rows(self.shapes.capacity)[-1]
        self.decode(decode_rows(self.shapes.rows)[-1])
        self.embed(tokens)
        self.head(tokens)
        self.head_of_block(tokens)
        for config in dict.fromkeys(self._config.layers):
            self.attend(config, tokens)
            if isinstance(config.feed_forward, MoEConfig):
                self.experts(config, tokens)
        return max(self._workspace.values())

    @cached_property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the dense weights and of the experts."""
        layers = self._weights.layers
        dense = (self._weights.outer, [layer.dense for layer in layers])
        return {"dense weights": tree_bytes(dense), "experts": tree_bytes([layer.experts for layer in layers])}

    @property
    def cache_bytes(self) -> int:
        """Bytes of all layers' caches."""
        return tree_bytes(self._caches)

    def new_caches(self) -> tuple[LayerCache, ...]:
        """Zeroed caches."""
        caches: tuple[LayerCache, ...] = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._caches)
        return caches

    def _get(
        self,
        key: tuple[Any, ...],
        function: Callable[..., Any],
        held: tuple[Any, ...],
        live: tuple[Any, ...],
        donate: Sequence[int] = (),
    ) -> jax.stages.Compiled:
        """`held` arguments exist all the time, weights and caches; `live` ones only while a step runs."""
        if key not in self._compiled:
            program = compile_program(function, (*held, *live), donate=donate)
            temporary, outputs = program_bytes(program)
            self._compiled[key] = program
            self._workspace[key] = temporary + outputs + tree_bytes(live)
        return self._compiled[key]

    def _attend_arguments(self, config: LayerConfig, tokens: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        index = self._config.layers.index(config)
        chunk = PrefillChunk(*[_ints()] * 4)
        return (self._layer_weights(config).dense, self._caches[index]), (self._hidden(tokens), chunk)

    def _layer_weights(self, config: LayerConfig) -> LayerWeights:
        return self._weights.layers[self._config.layers.index(config)]

    def _hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, tokens, self._config.hidden_size), jnp.float32)


def decode_rows(rows: int) -> tuple[int, ...]:
    """The row counts that decode is compiled for, where at most `rows` requests run together."""
    enough = next(bucket for bucket in DECODE_ROWS if bucket >= rows)
    return tuple(bucket for bucket in DECODE_ROWS if bucket <= enough)


def prefill_rows(capacity: int) -> tuple[int, ...]:
    """The chunk sizes that prefill is compiled for, where a row of the cache has `capacity` positions."""
    return tuple(tokens for tokens in PREFILL_ROWS if tokens <= capacity)


def capacity_for(context_length: int) -> int:
    """Cache positions for this many tokens: a whole number of blocks, and of chunks once there is more than one."""
    unit = KV_BLOCK if context_length <= PREFILL_ROWS[-1] else PREFILL_ROWS[-1]
    return -(-context_length // unit) * unit


def _in_storage_form(weights: ModelWeights) -> ModelWeights:
    """Shapes of weights whose experts are held in storage form."""

    def stored(stack: Any) -> Any:
        return jax.ShapeDtypeStruct(stack.shape, storage_dtype(np.dtype(stack.dtype)))

    layers = (layer._replace(experts=jax.tree.map(stored, layer.experts)) for layer in weights.layers)
    return weights._replace(layers=tuple(layers))


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays in a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _decoded(logits: jax.Array) -> Decoded:
    return Decoded(logits, jnp.argmax(logits, axis=-1).astype(jnp.int32))
