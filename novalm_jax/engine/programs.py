"""The programs of a model, compiled ahead of time from shapes alone: no weights are needed to know their cost.

Shapes depend on the model and the options alone. Decode never has fewer than 4 rows (XLA rounds those differently) and
stays below 64 rows; prefill has 64 rows or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.compat import compile_program, program_bytes
from novalm_jax.config import LayerConfig, MoEConfig
from novalm_jax.engine.functions import (
    DECODE_ROWS,
    KV_BLOCK,
    PREFILL_ROWS,
    DecodeStep,
    Functions,
    LayerWeights,
    ModelWeights,
    PrefillChunk,
    Structure,
)
from novalm_jax.kernels.storage import storage_dtype, tree_bytes
from novalm_jax.kv.static import LayerCache, cache_shape
from novalm_jax.models.decoder import Decoder


@dataclass(frozen=True)
class Shapes:
    """What the programs are compiled for: cache rows, cache positions in each, and the number type."""

    rows: int
    capacity: int
    dtype: np.dtype


_Find = Callable[..., jax.stages.Compiled]


def looked_up(method: _Find) -> _Find:
    """Finds a program that was asked for before by the identity of what it is for: to hash a configuration takes longer
    than to run a small program."""

    @wraps(method)
    def find(self: Programs, *arguments: Any) -> jax.stages.Compiled:
        key = (method.__name__, *[each if isinstance(each, int) else id(each) for each in arguments])
        program = self._found.get(key)
        if program is None:
            program = self._found[key] = method(self, *arguments)
        return program

    return find


class Programs:
    """Compiled programs, made when first asked for, from shapes alone: no weights are needed to know their cost.

    Attributes:
      config: the model.
      shapes: what they are compiled for.
    """

    def __init__(self, model: Decoder, shapes: Shapes):
        structure = Structure(model)
        self.shapes = shapes
        self.config = structure.config
        self._functions = Functions(structure)
        self._weights = _in_storage_form(structure.take_apart(model))
        self._caches = tuple(
            cache_shape(layer.attention, shapes.rows, shapes.capacity, shapes.dtype) for layer in self.config.layers
        )
        self._compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}
        # By identity; the configurations are held by the model's.
        self._found: dict[tuple[object, ...], jax.stages.Compiled] = {}
        self._workspace: dict[tuple[Any, ...], int] = {}
        self._routed_shapes: dict[tuple[LayerConfig, int], Any] = {}

    @looked_up
    def embed(self, tokens: int) -> jax.stages.Compiled:
        """(outer, int32 `[t]`) -> `[1, t, d]`."""
        return self._get(("embed", tokens), self._functions.embed, (self._weights.outer,), (int_shape(tokens),))

    @looked_up
    def head(self, tokens: int) -> jax.stages.Compiled:
        """(outer, x `[1, t, d]`, int32 index) -> `Decoded` of that token, on equal rows."""
        live = (self._hidden(tokens), int_shape())
        return self._get(("head", tokens), self._functions.head, (self._weights.outer,), live)

    @looked_up
    def head_of_block(self, tokens: int) -> jax.stages.Compiled:
        """(outer, x `[1, t, d]`, int32 start) -> float32 logits `[HEAD_BLOCK, v]`."""
        live = (self._hidden(tokens), int_shape())
        return self._get(("head_of_block", tokens), self._functions.head_of_block, (self._weights.outer,), live)

    @looked_up
    def attend(self, config: LayerConfig, tokens: int) -> jax.stages.Compiled:
        """(dense, cache, x, `PrefillChunk`) -> (`Routed` or x, cache); the cache is donated."""
        held, live = self._attend_arguments(config, tokens)
        return self._get(("attend", config, tokens), partial(self._functions.attend, config), held, live, donate=(1,))

    @looked_up
    def experts(self, config: LayerConfig, tokens: int) -> jax.stages.Compiled:
        """(dense, experts, `Routed`) -> x `[1, t, d]`."""
        weights, live = self._layer_weights(config), (self._routed(config, tokens),)
        function = partial(self._functions.experts, config)
        return self._get(("experts", config, tokens), function, (weights.dense, weights.experts), live)

    @looked_up
    def decode(self, rows: int) -> jax.stages.Compiled:
        """(`ModelWeights`, caches, `DecodeStep`) -> (`Decoded`, caches, `Routing` or None); caches are donated."""
        live = (DecodeStep(*[int_shape(rows)] * 4),)
        return self._get(("decode", rows), self._functions.decode, (self._weights, self._caches), live, donate=(1,))

    def workspace_bytes(self) -> int:
        """Most bytes that a step takes beyond weights and caches. Compiles the largest programs of each kind."""
        tokens = prefill_rows(self.shapes.capacity)[-1]
        self.decode(decode_rows(self.shapes.rows)[-1])
        self._compile_ends(tokens)
        for config in dict.fromkeys(self.config.layers):
            self.attend(config, tokens)
            if isinstance(config.feed_forward, MoEConfig):
                self.experts(config, tokens)
        return max(self._workspace.values())

    def _compile_ends(self, tokens: int) -> None:
        """What comes before and after the layers, for a prefill chunk."""
        self.embed(tokens)
        self.head(tokens)
        self.head_of_block(tokens)

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

    @property
    def paused_bytes(self) -> int:
        """Bytes of a prefill chunk between two layers, where decode steps run."""
        return tree_bytes(self._hidden(prefill_rows(self.shapes.capacity)[-1]))

    def name_of(self, program: jax.stages.Compiled) -> tuple[str, int]:
        """What a program of this model does, and for how many rows or tokens."""
        return next((key[0], key[-1]) for key, known in self._compiled.items() if known is program)

    def new_caches(self) -> tuple[LayerCache, ...]:
        """Zeroed caches."""
        return tuple(map(self.new_cache, range(len(self._caches))))

    def new_cache(self, layer: int) -> LayerCache:
        """The zeroed cache of one layer."""
        cache: LayerCache = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._caches[layer])
        return cache

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
        index = self.config.layers.index(config)
        chunk = PrefillChunk(*[int_shape()] * 4)
        return (self._layer_weights(config).dense, self._caches[index]), (self._hidden(tokens), chunk)

    def _attending(self, config: LayerConfig, tokens: int) -> tuple[Callable[..., Any], tuple[Any, Any]]:
        """What a layer begins with, for so many tokens, and its arguments beside the configuration."""
        return self._functions.attend, self._attend_arguments(config, tokens)

    def _routed(self, config: LayerConfig, tokens: int) -> Any:
        """The `Routed` of a prefill chunk, as shapes; kept, as finding it takes a trace."""
        if (config, tokens) not in self._routed_shapes:
            function, (held, live) = self._attending(config, tokens)
            routed, _ = jax.eval_shape(partial(function, config), *held, *live)
            self._routed_shapes[config, tokens] = routed
        return self._routed_shapes[config, tokens]

    def _layer_weights(self, config: LayerConfig) -> LayerWeights:
        return self._weights.layers[self.config.layers.index(config)]

    def _hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, tokens, self.config.hidden_size), jnp.float32)


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


def int_shape(*shape: int) -> jax.ShapeDtypeStruct:
    """An int32 array in an argument's place."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)
