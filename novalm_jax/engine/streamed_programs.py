"""The programs of a model that is not all on the device: a step is cut wherever weights may have to come.

As `programs`: from shapes alone, which depend on the model, the options and the number of slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from novalm_jax.compat import compile_program, program_bytes
from novalm_jax.config import LayerConfig, MoEConfig
from novalm_jax.engine.functions import DECODE_ROWS, HEAD_BLOCK, PREFILL_ROWS, Structure
from novalm_jax.engine.programs import Programs, Shapes, decode_rows, int_shape, looked_up, prefill_rows
from novalm_jax.experts.dense import DensePlan
from novalm_jax.experts.fetcher import IN_FLIGHT
from novalm_jax.experts.pools import compile_insert, compile_new, pool_shapes
from novalm_jax.experts.records import record_layout
from novalm_jax.kernels.storage import tree_bytes
from novalm_jax.kv.paged import LayerPages, resized
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.params import parameters_of


class StreamedPrograms(Programs):
    """As `Programs`, for experts in slots of a pool: a step is cut at every router split.

    Attributes:
      slots: how many there are; 0 in a model without experts.
      layout: the arrays of a record, as shapes; only where there are slots.
    """

    def __init__(self, model: Decoder, shapes: Shapes, slots: int):
        super().__init__(model, shapes)
        self.slots = slots
        self._resizes: dict[tuple[LayerPages, int], jax.stages.Compiled] = {}
        if slots:
            self.layout = record_layout(model)
            self._pool = pool_shapes(self.layout, slots)

    @looked_up
    def embed_step(self, rows: int) -> jax.stages.Compiled:
        """(outer, int32 `[b]`) -> x `[b, 1, d]`."""
        return self._get(("embed step", rows), self._functions.embed_step, (self._weights.outer,), (int_shape(rows),))

    @looked_up
    def attend_step(self, config: LayerConfig, rows: int) -> jax.stages.Compiled:
        """(dense, pages, x, `DecodeStep`) -> (`Routed` or x, pages); the pages are donated."""
        held, live = self._attend_step_arguments(config, rows)
        function = partial(self._functions.attend_step, config)
        return self._get(("attend step", config, rows), function, held, live, donate=(1,))

    @looked_up
    def lookahead(self, config: LayerConfig, rows: int) -> jax.stages.Compiled:
        """(dense, x `[b, 1, d]`) -> the `Routing` that this layer would choose for it."""
        held, live = (self._layer_weights(config).dense,), (self._step_hidden(rows),)
        return self._get(("lookahead", config, rows), partial(self._functions.lookahead, config), held, live)

    @looked_up
    def first_wave(self, config: LayerConfig, tokens: int) -> jax.stages.Compiled:
        """(pool, `Routed`, slots) -> products; `tokens` are those of a prefill chunk, or the rows of a decode step."""
        live = (self._routed(config, tokens), self._wave_slots(config))
        function = partial(self._functions.first_wave, config)
        return self._get(("first wave", config, tokens), function, (self._pool,), live)

    @looked_up
    def wave(self, config: LayerConfig, tokens: int) -> jax.stages.Compiled:
        """(pool, products, `Routed`, slots) -> products; the ones before are donated."""
        live = (self._products(config, tokens), self._routed(config, tokens), self._wave_slots(config))
        function = partial(self._functions.wave, config)
        return self._get(("wave", config, tokens), function, (self._pool,), live, donate=(1,))

    @looked_up
    def combine(self, config: LayerConfig, tokens: int) -> jax.stages.Compiled:
        """(dense, `Routed`, products) -> x."""
        live = (self._routed(config, tokens), self._products(config, tokens))
        function = partial(self._functions.combine, config)
        return self._get(("combine", config, tokens), function, (self._layer_weights(config).dense,), live)

    @looked_up
    def head_of_step(self, rows: int) -> jax.stages.Compiled:
        """(outer, x `[b, 1, d]`) -> `Decoded`."""
        live = (self._step_hidden(rows),)
        return self._get(("head of step", rows), self._functions.head_of_step, (self._weights.outer,), live)

    @cached_property
    def insert(self) -> jax.stages.Compiled:
        """(pool, record, slot) -> (pool, a scalar that is there once the record is); the pool is donated."""
        return compile_insert(self.layout, self.slots)

    @cached_property
    def new_pool(self) -> jax.stages.Compiled:
        """() -> the pool, empty."""
        return compile_new(self.layout, self.slots)

    def resize_pages(self, layer: int, count: int) -> jax.stages.Compiled:
        """(pages of a layer) -> so many pages of it, as `resized` says."""
        key = self._pages[layer], count
        if key not in self._resizes:
            self._resizes[key] = compile_program(partial(resized, count=count), key[:1])
        return self._resizes[key]

    def workspace_bytes(self) -> int:
        """As in `Programs`."""
        rows, tokens = decode_rows(self.shapes.rows)[-1], prefill_rows(self.shapes.capacity)[-1]
        self._compile_ends(tokens)
        self._compile_moves()
        self._compile_ends_of_step(rows)
        for config in dict.fromkeys(self.config.layers):
            self.attend(config, tokens)
            self.attend_step(config, rows)
            if isinstance(config.feed_forward, MoEConfig):
                self.lookahead(config, rows)
                for count in (tokens, rows):
                    self.first_wave(config, count)
                    self.wave(config, count)
                    self.combine(config, count)
        inserting = sum(program_bytes(self.insert)) if self.slots else 0
        return max(*self._workspace.values(), inserting)

    def _of_experts(self, config: LayerConfig, tokens: int) -> list[Callable[[], object]]:
        return [partial(part, config, tokens) for part in (self.first_wave, self.wave, self.combine)]

    def _of_step(self, rows: int) -> list[Callable[[], object]]:
        jobs: list[Callable[[], object]] = [partial(self._compile_ends_of_step, rows)]
        for config in dict.fromkeys(self.config.layers):
            jobs.append(partial(self.attend_step, config, rows))
            if isinstance(config.feed_forward, MoEConfig):
                jobs += [partial(self.lookahead, config, rows), *self._of_experts(config, rows)]
        return jobs

    def _compile_ends_of_step(self, rows: int) -> None:
        """As `_compile_ends`, for a decode step."""
        self.embed_step(rows)
        self.head_of_step(rows)

    @property
    def chunk_bytes(self) -> int:
        """What a prefill chunk takes while the experts of a layer pass by, and after it."""
        tokens = prefill_rows(self.shapes.capacity)[-1]
        configs = [config for config in self.config.layers if isinstance(config.feed_forward, MoEConfig)]
        passing = (tree_bytes((self._routed(config, tokens), self._products(config, tokens))) for config in configs)
        return max(passing, default=0) + self.paused_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a slot; 0 in a model without experts."""
        return tree_bytes(self.layout) if self.slots else 0

    @cached_property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the dense weights, of all slots, and of copies that are on their way into one."""
        return {"dense weights": super().weight_bytes["dense weights"], **self._slot_bytes()}

    def _slot_bytes(self) -> dict[str, int]:
        if not self.slots:
            return {}
        return {"expert slots": self.slots * self.record_bytes, "experts under way": IN_FLIGHT * self.record_bytes}

    def _attend_step_arguments(self, config: LayerConfig, rows: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        held, _ = self._attend_arguments(config, rows)
        return held, (self._step_hidden(rows), self._step_shape(rows))

    def _attending(self, config: LayerConfig, tokens: int) -> tuple[Callable[..., Any], tuple[Any, Any]]:
        if tokens >= PREFILL_ROWS[0]:
            return super()._attending(config, tokens)
        return self._functions.attend_step, self._attend_step_arguments(config, tokens)

    def _products(self, config: LayerConfig, tokens: int) -> Any:
        routed = self._routed(config, tokens)
        return jax.ShapeDtypeStruct((*routed.routing.ids.shape, routed.h.shape[-1]), routed.h.dtype)

    def _step_hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, 1, self.config.hidden_size), jnp.float32)

    @staticmethod
    def _wave_slots(config: LayerConfig) -> jax.ShapeDtypeStruct:
        assert isinstance(config.feed_forward, MoEConfig)
        return int_shape(config.feed_forward.num_experts)


class DenseStreamedPrograms(StreamedPrograms):
    """As `StreamedPrograms`, for dense weights that come in parts: rows of the embedding are looked up elsewhere, and
    the head is multiplied block by block.

    Attributes:
      dense: the parts; what is said there of places has no effect here.
      ends: paths of the dense weights that belong to no part and stay on the device.
    """

    def __init__(self, model: Decoder, shapes: Shapes, slots: int, dense: DensePlan):
        super().__init__(model, shapes, slots)
        self.dense = dense
        parameters = parameters_of(model)
        self.ends = Structure.paths_of_ends(model)
        self._ends = tuple(jax.ShapeDtypeStruct(parameters[path].shape, parameters[path].dtype) for path in self.ends)
        (path,), (first, end) = dense.parts[-1].paths, dense.parts[-1].rows or (0, 0)
        width, self._dtype = self.config.hidden_size, parameters[path].dtype
        self._block = jax.ShapeDtypeStruct((end - first, width), self._dtype)
        self._blocks = len(dense.parts) - len(self.config.layers)

    @looked_up
    def embed_rows(self, b: int, t: int) -> jax.stages.Compiled:
        """(rows of the embedding `[b, t, d]`,) -> x `[b, t, d]`."""
        live = (jax.ShapeDtypeStruct((b, t, self.config.hidden_size), self._dtype),)
        name = "embed rows" if b == 1 else "embed rows of step"
        return self._get((name, b * t), self._functions.embed_rows, (), live)

    @looked_up
    def normed(self, tokens: int) -> jax.stages.Compiled:
        """(ends, x `[1, t, d]`, int32 index) -> h of that token, on equal rows."""
        live = (self._hidden(tokens), int_shape())
        return self._get(("normed", tokens), self._functions.normed, (self._ends,), live)

    @looked_up
    def normed_tokens(self, tokens: int) -> jax.stages.Compiled:
        """(ends, x `[1, t, d]`, int32 start) -> h `[HEAD_BLOCK, d]`."""
        live = (self._hidden(tokens), int_shape())
        return self._get(("normed tokens", tokens), self._functions.normed_tokens, (self._ends,), live)

    @looked_up
    def normed_step(self, rows: int) -> jax.stages.Compiled:
        """(ends, x `[b, 1, d]`) -> h `[b, d]`."""
        return self._get(("normed step", rows), self._functions.normed_step, (self._ends,), (self._step_hidden(rows),))

    @looked_up
    def some_logits(self, rows: int) -> jax.stages.Compiled:
        """(ends, a block of the head, h `[n, d]`, int32 first row of the block) -> float32 `[n, block]`."""
        live = (self._normed_shape(rows), int_shape())
        return self._get(("some logits", rows), self._functions.some_logits, (self._ends, self._block), live)

    @looked_up
    def joined(self, rows: int) -> jax.stages.Compiled:
        """(logits of every block of the head) -> `Decoded`."""
        live = (jax.ShapeDtypeStruct((rows, self._block.shape[0]), jnp.float32),) * self._blocks
        return self._get(("joined", rows), self._functions.joined, (), live)

    @cached_property
    def weight_bytes(self) -> dict[str, int]:
        """As in `StreamedPrograms`, without the parts of the dense weights."""
        return {"dense weights": tree_bytes(self._ends), **self._slot_bytes()}

    def _compile_ends(self, tokens: int) -> None:
        self.embed_rows(1, tokens)
        self.normed(tokens)
        self.normed_tokens(tokens)
        self.some_logits(HEAD_BLOCK)
        self._compile_head(DECODE_ROWS[0])

    def _compile_ends_of_step(self, rows: int) -> None:
        self.embed_rows(rows, 1)
        self.normed_step(rows)
        self._compile_head(rows)

    def _compile_head(self, rows: int) -> None:
        self.some_logits(rows)
        self.joined(rows)

    def _normed_shape(self, rows: int) -> Any:
        return jax.eval_shape(self._functions.normed_step, self._ends, self._step_hidden(rows))
