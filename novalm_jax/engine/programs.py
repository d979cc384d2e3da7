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
from novalm_jax.config import LayerConfig, ModelConfig, MoEConfig
from novalm_jax.engine.functions import (
    DECODE_ROWS,
    PREFILL_ROWS,
    DecodeStep,
    Functions,
    LayerWeights,
    ModelWeights,
    PrefillChunk,
    Structure,
)
from novalm_jax.kernels.storage import storage_dtype, tree_bytes
from novalm_jax.kv import paged
from novalm_jax.kv.paged import MOVED_TOGETHER, LayerPages, groups_of, page_counts, page_shape, reaches_of
from novalm_jax.kv.pages import PAGE, blocks
from novalm_jax.models.decoder import Decoder
from novalm_jax.options import Kernels


@dataclass(frozen=True)
class Shapes:
    """What the programs are compiled for.

    Attributes:
      rows: sequences of a decode step at most.
      capacity: positions of a sequence at most.
      pages: of each group of layers.
      dtype: of numbers.
      kernels: what computes decode steps, native code or xla; auto for formulas of memory, which hold for both then.
    """

    rows: int
    capacity: int
    pages: tuple[int, ...]
    dtype: np.dtype
    kernels: Kernels = "xla"

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        rows: int,
        context: int,
        dtype: np.dtype,
        pages: int | None = None,
        pass_chunks: int = 1,
        kernels: Kernels = "xla",
    ) -> Shapes:
        """For sequences of `context` tokens: with `pages` for layers that see everything, None for as many as all rows
        can fill, and for others those of them that they can fill while so many prefill chunks run side by side."""
        capacity = capacity_for(context)
        together = min(capacity, pass_chunks * prefill_rows(capacity)[-1])
        most = rows * blocks(capacity) if pages is None else pages
        counts = page_counts(reaches_of(config, capacity), rows, capacity, most, together)
        return cls(rows, capacity, counts, dtype, kernels)


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
      reaches: how far back each group of layers sees.
      groups: which of them each layer is in.
    """

    def __init__(self, model: Decoder, shapes: Shapes):
        assert shapes.kernels != "auto"
        structure = Structure(model, shapes.kernels)
        self.shapes = shapes
        self.config = structure.config
        self.reaches = reaches_of(self.config, shapes.capacity)
        self._functions = Functions(structure, shapes.capacity)
        self._weights = _in_storage_form(structure.take_apart(model))
        self.groups = groups_of(self.config, shapes.capacity)
        self._pages = tuple(
            page_shape(layer.attention, shapes.pages[group], shapes.dtype)
            for layer, group in zip(self.config.layers, self.groups, strict=True)
        )
        self._lot = tuple(int_shape(MOVED_TOGETHER) for _ in self.reaches)
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
        """(dense, pages, x, `PrefillChunk`) -> (`Routed` or x, pages); the pages are donated."""
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
        """(`ModelWeights`, pages, `DecodeStep`) -> (`Decoded`, pages, `Routing` or None); the pages are donated."""
        live = (self._step_shape(rows),)
        return self._get(("decode", rows), self._functions.decode, (self._weights, self._pages), live, donate=(1,))

    @cached_property
    def copy_pages(self) -> jax.stages.Compiled:
        """(pages, sources, targets) -> pages, which are donated; int32 `[MOVED_TOGETHER]` of each group."""
        function = partial(paged.copy_pages, self.groups)
        return self._get(("copy pages", MOVED_TOGETHER), function, (self._pages,), (self._lot, self._lot), donate=(0,))

    @cached_property
    def save_pages(self) -> jax.stages.Compiled:
        """(pages, int32 `[MOVED_TOGETHER]` of each group) -> these pages of all layers."""
        function = partial(paged.save_pages, self.groups)
        return self._get(("save pages", MOVED_TOGETHER), function, (self._pages,), (self._lot,))

    @cached_property
    def load_pages(self) -> jax.stages.Compiled:
        """(pages, what `save_pages` gave, int32 `[MOVED_TOGETHER]` of each group) -> pages, which are donated."""
        saved = jax.eval_shape(partial(paged.save_pages, self.groups), self._pages, self._lot)
        function = partial(paged.load_pages, self.groups)
        return self._get(("load pages", MOVED_TOGETHER), function, (self._pages,), (saved, self._lot), donate=(0,))

    def workspace_bytes(self) -> int:
        """Most bytes that a step takes beyond weights and pages. Compiles the largest programs of each kind."""
        tokens = prefill_rows(self.shapes.capacity)[-1]
        self.decode(decode_rows(self.shapes.rows)[-1])
        self._compile_ends(tokens)
        self._compile_moves()
        for config in dict.fromkeys(self.config.layers):
            self.attend(config, tokens)
            if isinstance(config.feed_forward, MoEConfig):
                self.experts(config, tokens)
        return max(self._workspace.values())

    def everything(self) -> list[Callable[[], object]]:
        """What finds or compiles each of the programs, so that no request has to wait for one."""
        jobs: list[Callable[[], object]] = [self._compile_moves]
        for tokens in prefill_rows(self.shapes.capacity):
            jobs.append(partial(self._compile_ends, tokens))
            for config in dict.fromkeys(self.config.layers):
                jobs.append(partial(self.attend, config, tokens))
                if isinstance(config.feed_forward, MoEConfig):
                    jobs += self._of_experts(config, tokens)
        return jobs + [job for rows in decode_rows(self.shapes.rows) for job in self._of_step(rows)]

    def _of_experts(self, config: LayerConfig, tokens: int) -> list[Callable[[], object]]:
        """As `everything`, of a layer's experts and a prefill chunk."""
        return [partial(self.experts, config, tokens)]

    def _of_step(self, rows: int) -> list[Callable[[], object]]:
        """As `everything`, of a decode step."""
        return [partial(self.decode, rows)]

    def _compile_moves(self) -> tuple[jax.stages.Compiled, ...]:
        return self.copy_pages, self.save_pages, self.load_pages

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
    def page_bytes(self) -> int:
        """Bytes of all pages."""
        return tree_bytes(self._pages)

    @cached_property
    def bytes_of_page(self) -> tuple[int, ...]:
        """Bytes of one page of each group, in all its layers."""
        sizes = [0] * len(self.reaches)
        for group, pages in zip(self.groups, self._pages, strict=True):
            sizes[group] += tree_bytes(pages) // self.shapes.pages[group]
        return tuple(sizes)

    @property
    def paused_bytes(self) -> int:
        """Bytes of a prefill chunk between two layers, where decode steps run."""
        return tree_bytes(self._hidden(prefill_rows(self.shapes.capacity)[-1]))

    def name_of(self, program: jax.stages.Compiled) -> tuple[str, int]:
        """What a program of this model does, and for how many rows or tokens."""
        return next((key[0], key[-1]) for key, known in self._compiled.items() if known is program)

    def new_pages(self) -> tuple[LayerPages, ...]:
        """Zeroed pages of all layers."""
        return tuple(map(self.new_pages_of, range(len(self._pages))))

    def new_pages_of(self, layer: int) -> LayerPages:
        """The zeroed pages of one layer."""
        pages: LayerPages = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._pages[layer])
        return pages

    def _get(
        self,
        key: tuple[Any, ...],
        function: Callable[..., Any],
        held: tuple[Any, ...],
        live: tuple[Any, ...],
        donate: Sequence[int] = (),
    ) -> jax.stages.Compiled:
        """`held` arguments exist all the time, weights and pages; `live` ones only while a step runs."""
        if key not in self._compiled:
            program = compile_program(function, (*held, *live), donate=donate)
            temporary, outputs = program_bytes(program)
            self._compiled[key] = program
            self._workspace[key] = temporary + outputs + tree_bytes(live)
        return self._compiled[key]

    def _attend_arguments(self, config: LayerConfig, tokens: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        index = self.config.layers.index(config)
        tables = tuple(int_shape(blocks(self.shapes.capacity)) for _ in self.reaches)
        chunk = PrefillChunk(int_shape(), int_shape(), int_shape(), tables)
        return (self._layer_weights(config).dense, self._pages[index]), (self._hidden(tokens), chunk)

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

    def _step_shape(self, rows: int) -> DecodeStep:
        tables = tuple(int_shape(rows, blocks(self.shapes.capacity)) for _ in self.reaches)
        return DecodeStep(int_shape(rows), int_shape(rows), int_shape(rows), tables)

    def _hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, tokens, self.config.hidden_size), jnp.float32)


def decode_rows(rows: int) -> tuple[int, ...]:
    """The row counts that decode is compiled for, where at most `rows` requests run together."""
    enough = next(bucket for bucket in DECODE_ROWS if bucket >= rows)
    return tuple(bucket for bucket in DECODE_ROWS if bucket <= enough)


def prefill_rows(capacity: int) -> tuple[int, ...]:
    """The chunk sizes that prefill is compiled for, where a sequence has `capacity` positions."""
    return tuple(tokens for tokens in PREFILL_ROWS if tokens <= capacity)


def capacity_for(context_length: int) -> int:
    """Positions for this many tokens: a whole number of pages."""
    return blocks(context_length) * PAGE


def _in_storage_form(weights: ModelWeights) -> ModelWeights:
    """Shapes of weights whose experts are held in storage form."""

    def stored(stack: Any) -> Any:
        return jax.ShapeDtypeStruct(stack.shape, storage_dtype(np.dtype(stack.dtype)))

    layers = (layer._replace(experts=jax.tree.map(stored, layer.experts)) for layer in weights.layers)
    return weights._replace(layers=tuple(layers))


def int_shape(*shape: int) -> jax.ShapeDtypeStruct:
    """An int32 array in an argument's place."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)
