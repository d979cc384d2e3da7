"""How much memory each program takes at most, by formulas of shapes alone: nothing is compiled, and nothing is traced.

A bound counts what `Programs.workspace_bytes` measures of a compiled program: temporaries, outputs that alias no
argument, and arguments that exist only while a step runs. Formulas name the buffers that XLA's CPU backend makes, of
which some share their memory; tests hold the bounds against compiled programs.
"""

from __future__ import annotations

import math

from novalm_jax.config import AttentionConfig, LatentConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig
from novalm_jax.engine.functions import DECODE_ROWS, EXPERT_GROUP, HEAD_BLOCK
from novalm_jax.engine.programs import Shapes, decode_rows, prefill_rows
from novalm_jax.experts.dense import DensePlan
from novalm_jax.kernels.native import FEW_ROWS, packed_shape
from novalm_jax.kv.paged import MOVED_TOGETHER, page_bytes
from novalm_jax.kv.pages import PAGE
from novalm_jax.models.counts import expert_count

_F32 = _I32 = 4

_SMALL = 4096
"""Scalars, tuples, and what is lost as every buffer begins at a multiple of 64 bytes; of each program and layer."""


class Workspace:
    """Bounds in bytes, by the names of the programs that they are for (`Programs`, `StreamedPrograms`).

    Attributes:
      config: the model.
      shapes: what the programs would be compiled for.
    """

    def __init__(self, config: ModelConfig, shapes: Shapes, dense: DensePlan | None = None):
        """With the parts in which dense weights come, where they do (`DenseStreamedPrograms`)."""
        self.config = config
        self.shapes = shapes
        self._blocks = [part.rows for part in dense.parts if part.rows] if dense else []
        self._item = shapes.dtype.itemsize

    def resident_bytes(self) -> int:
        """Most that a step of a resident model takes beyond weights and pages."""
        tokens, layers = prefill_rows(self.shapes.capacity)[-1], dict.fromkeys(self.config.layers)
        most = [self.decode(decode_rows(self.shapes.rows)[-1]), self.save_pages(MOVED_TOGETHER), *self._around(tokens)]
        most += [self.attend(layer, tokens) for layer in layers]
        return max(most + [self.experts(layer, tokens) for layer in layers if _is_sparse(layer)])

    def streamed_bytes(self) -> int:
        """As `resident_bytes`, for experts in slots, and for dense weights in parts if they are."""
        tokens, rows = prefill_rows(self.shapes.capacity)[-1], decode_rows(self.shapes.rows)[-1]
        if self._blocks:
            most = [self.insert(), self.embed_rows(tokens), self.normed(tokens), self.normed_tokens(tokens)]
            most += [self.normed_step(rows), self.some_logits(HEAD_BLOCK), self.some_logits(rows), self.joined(rows)]
        else:
            most = [self.embed_step(rows), self.head_of_step(rows), self.insert(), *self._around(tokens)]
        most.append(self.save_pages(MOVED_TOGETHER))
        for layer in dict.fromkeys(self.config.layers):
            most += [self.attend(layer, tokens), self.attend_step(layer, rows)]
            if _is_sparse(layer):
                most.append(self.lookahead(layer, rows))
                most += [part(layer, n) for part in (self.first_wave, self.wave, self.combine) for n in (tokens, rows)]
        return max(most)

    @property
    def paused_bytes(self) -> int:
        """A prefill chunk between two layers, where decode steps run."""
        return self._hidden(prefill_rows(self.shapes.capacity)[-1])

    @property
    def chunk_bytes(self) -> int:
        """What a prefill chunk takes while the experts of a layer pass by, and after it."""
        tokens = prefill_rows(self.shapes.capacity)[-1]
        sparse = filter(_is_sparse, self.config.layers)
        passing = (self._result(layer, tokens) + self._products(layer, tokens) for layer in sparse)
        return max(passing, default=0) + self.paused_bytes

    # --- whole programs ---

    def embed(self, tokens: int) -> int:
        """Rows of the table, in float32 and, where that is another dtype, as they lie."""
        rows = tokens * self.config.hidden_size
        return _I32 * tokens + (_F32 + self._item % _F32) * rows + _SMALL

    embed_step = embed

    def head(self, tokens: int) -> int:
        """The prompt's hidden states, and logits of as many rows as the smallest decode step has."""
        return self._hidden(tokens) + self.head_of_step(DECODE_ROWS[0])

    def head_of_block(self, tokens: int) -> int:
        """The prompt's hidden states, and logits of a block of them."""
        return self._hidden(tokens) + self.head_of_step(HEAD_BLOCK)

    def head_of_step(self, rows: int) -> int:
        """Hidden states, their norm, logits; and these once more where something is still to be done to them."""
        wide = _F32 * rows * self.config.vocab_size
        edited = self.config.head_bias or self.config.logits_divisor != 1
        return self._hidden(rows) + self._normed(rows) + wide * (2 if edited else 1) + _I32 * rows + _SMALL

    def embed_rows(self, count: int) -> int:
        """Rows of the table as they lie, and in float32."""
        return (_F32 + self._item) * count * self.config.hidden_size + _SMALL

    embed_rows_of_step = embed_rows

    def normed(self, tokens: int) -> int:
        """The prompt's hidden states, and as many rows as the smallest decode step has."""
        return self._hidden(tokens) + self.normed_step(DECODE_ROWS[0])

    def normed_tokens(self, tokens: int) -> int:
        """The prompt's hidden states, and a block of them."""
        return self._hidden(tokens) + self.normed_step(HEAD_BLOCK)

    def normed_step(self, rows: int) -> int:
        """Hidden states and their norm."""
        return self._hidden(rows) + self._normed(rows) + _SMALL

    def some_logits(self, rows: int) -> int:
        """Normed rows, what native code packs of them, and their logits for a block of the head; once more where
        something is still to be done."""
        first, end = self._blocks[0]
        wide = _F32 * rows * (end - first) * (2 if self.config.head_bias or self.config.logits_divisor != 1 else 1)
        packed = _F32 * math.prod(packed_shape(rows, self.config.hidden_size)) if rows < FEW_ROWS else 0
        wide += self._by_kernels(native=packed, xla=0)
        return self._item * rows * self.config.hidden_size + wide + _I32 * rows + _SMALL

    def joined(self, rows: int) -> int:
        """Logits of all blocks, and those of the whole vocabulary."""
        blocks = sum(end - first for first, end in self._blocks)
        return _F32 * rows * (blocks + self.config.vocab_size) + _I32 * rows + _SMALL

    def attend(self, layer: LayerConfig, tokens: int) -> int:
        """A prefill chunk up to the router split."""
        return self._hidden(tokens) + self._attended(layer, 1, tokens) + self._result(layer, tokens) + _SMALL

    def attend_step(self, layer: LayerConfig, rows: int) -> int:
        """A decode step up to the router split."""
        return self._hidden(rows) + self._attended(layer, rows, 1) + self._result(layer, rows) + _SMALL

    def lookahead(self, layer: LayerConfig, rows: int) -> int:
        """The norm and the router."""
        return self._hidden(rows) + self._normed(rows) + self._chosen(layer, rows) + _SMALL

    def experts(self, layer: LayerConfig, tokens: int) -> int:
        """A prefill chunk from the router split on."""
        inside = max(self._multiplied(layer, tokens), self._products(layer, tokens) + self._combined(layer, tokens))
        return self._result(layer, tokens) + inside + self._hidden(tokens) + _SMALL

    def first_wave(self, layer: LayerConfig, tokens: int) -> int:
        """A `Routed`, and the products of experts in slots."""
        products = self._products(layer, tokens)
        return self._result(layer, tokens) + self._multiplied(layer, tokens) + products + _SMALL

    wave = first_wave

    def combine(self, layer: LayerConfig, tokens: int) -> int:
        """A `Routed`, the products, and what they add up to."""
        live = self._result(layer, tokens) + self._products(layer, tokens)
        return live + self._combined(layer, tokens) + self._hidden(tokens) + _SMALL

    def insert(self) -> int:
        """The scalar that is there once the record is: all else is done in place."""
        return _SMALL

    def copy_pages(self, count: int) -> int:
        """Pages of every layer, between where they were and where they go."""
        return sum(self._pages(count)) + _SMALL * len(self.config.layers)

    load_pages = copy_pages

    def save_pages(self, count: int) -> int:
        """Pages of every layer, and one array of them in another order."""
        return self.copy_pages(count) + max(self._pages(count))

    def decode(self, rows: int) -> int:
        """A step of the whole model: what takes most of it, and of every layer what its loops begin with, which may
        all be there from the start. Where native code computes, there are no loops."""
        begun, inside = 0, [self.head_of_step(rows)]
        for layer in self.config.layers:
            attention = layer.attention
            begun += _SMALL + self._up_copies(attention)
            loops = self._hidden(rows)
            loops += self._item * rows * attention.num_heads * max(_key_dim(attention), _value_dim(attention))
            inside.append(self._attended(layer, rows, 1) + self._result(layer, rows))
            if isinstance(layer.feed_forward, MoEConfig):
                loops += self._products(layer, rows)
                inside.append(self._result(layer, rows) + self._multiplied(layer, rows))
                inside.append(self._result(layer, rows) + self._combined(layer, rows) + self._hidden(rows))
            begun += self._by_kernels(native=0, xla=loops)
        return begun + max(inside) + _F32 * rows * self.config.vocab_size + _SMALL

    def _around(self, tokens: int) -> list[int]:
        return [self.embed(tokens), self.head(tokens), self.head_of_block(tokens)]

    # --- parts of programs ---

    def _by_kernels(self, *, native: int, xla: int) -> int:
        """What few rows take where native code computes, or XLA; the most of both where that is not known."""
        return {"native": native, "xla": xla, "auto": max(native, xla)}[self.shapes.kernels]

    def _pages(self, count: int) -> list[int]:
        """So many pages of each layer."""
        counts = (count,) * len(self.shapes.pages)
        return page_bytes(self.config, self.shapes.capacity, counts, self.shapes.dtype)

    def _hidden(self, rows: int) -> int:
        return _F32 * rows * self.config.hidden_size

    def _normed(self, rows: int) -> int:
        """The norm of hidden states, before and after it is rounded."""
        return (_F32 + self._item) * rows * self.config.hidden_size

    def _result(self, layer: LayerConfig, rows: int) -> int:
        """A `Routed`, or the hidden states after a dense layer."""
        if not isinstance(layer.feed_forward, MoEConfig):
            return self._hidden(rows)
        normed = self._item * rows * self.config.hidden_size
        return self._hidden(rows) + normed + (_I32 + _F32) * rows * layer.feed_forward.experts_per_token

    def _products(self, layer: LayerConfig, rows: int) -> int:
        assert isinstance(layer.feed_forward, MoEConfig)
        return self._item * rows * layer.feed_forward.experts_per_token * self.config.hidden_size

    def _attended(self, layer: LayerConfig, rows: int, tokens: int) -> int:
        """The attention half of a layer and, where it is dense, the other one; of so many tokens of each row."""
        count, inner = rows * tokens, layer.feed_forward
        after = self._mlp(count, inner.width) if isinstance(inner, MLPConfig) else self._chosen(layer, count)
        # The hidden states after attention, as summed up and as they come from its last product.
        after += self._normed(count) + self._hidden(count)
        projected = self._normed(count) + self._projected(layer.attention, count)
        return self._hidden(count) + max(projected, self._walked(layer.attention, rows, tokens), after)

    def _projected(self, attention: AttentionConfig | LatentConfig, count: int) -> int:
        """Queries, keys and values: products in float32, what norms and rotation make of them, and that rounded."""
        q = attention.num_heads * _key_dim(attention)
        if isinstance(attention, AttentionConfig):
            kv, latent = 2 * attention.num_kv_heads * attention.head_dim, 0
        else:
            kv, latent = attention.kv_rank + attention.rope_dim, attention.query_rank or 0
        return (2 * _F32 + self._item) * count * (q + kv + latent)

    def _walked(self, attention: AttentionConfig | LatentConfig, rows: int, tokens: int) -> int:
        """Attention to the cache: block by block, of one row after another; or natively, of pages where they lie."""
        key, value, each = _key_dim(attention), _value_dim(attention), attention.num_heads * tokens
        if isinstance(attention, LatentConfig) and tokens == 1:
            # Queries multiplied by the projections, and results before they are.
            key, value = attention.kv_rank + attention.rope_dim, attention.kv_rank
        queries_and_result = self._item * rows * each * (key + value)
        if isinstance(attention, LatentConfig):
            queries_and_result += 2 * _F32 * rows * each * max(key, value) + self._up_copies(attention)
        blocks = self._kv_block(attention, tokens)
        scores, mixed, sums = _F32 * each * PAGE, _F32 * each * value, 4 * _F32 * each
        masks = 2 * each * PAGE // (attention.num_kv_heads if isinstance(attention, AttentionConfig) else 1)
        # Scores before and after masking; then weights, and the values that they mix.
        walked = queries_and_result + blocks + masks + sums + mixed + scores + max(scores, mixed)
        if tokens > 1:
            return walked
        # The result is in float32 first.
        return self._by_kernels(native=queries_and_result + _F32 * rows * each * value, xla=walked)

    def _kv_block(self, attention: AttentionConfig | LatentConfig, tokens: int) -> int:
        """Keys and values of a block of positions, these also in float32."""
        wide = _F32 + self._item
        if isinstance(attention, AttentionConfig):
            # 16 bits: keys, values, values in float32, and both once more where there is one page, which is cut out
            # whole. Float32: keys, and values of what is seen.
            narrow = self._item < _F32
            each = 2 * _F32 + (2 * self._item if narrow and 1 in self.shapes.pages else 0)
            return PAGE * attention.num_kv_heads * attention.head_dim * each
        latents = PAGE * (attention.kv_rank + attention.rope_dim) * self._item
        if tokens == 1:
            return 2 * latents + PAGE * attention.kv_rank * wide
        # Keys and values of all heads: products, put in order, and rounded; keys with what all heads share.
        nope, value = attention.nope_dim, attention.value_dim
        numbers = (nope + value) * (_F32 + wide) + (nope + attention.rope_dim) * self._item + value * _F32
        return latents + PAGE * attention.num_heads * numbers

    def _up_copies(self, attention: AttentionConfig | LatentConfig) -> int:
        """The two halves of a projection from latents, which are cut from one matrix."""
        if isinstance(attention, AttentionConfig):
            return 0
        return self._item * attention.num_heads * (attention.nope_dim + attention.value_dim) * attention.kv_rank

    def _chosen(self, layer: LayerConfig, count: int) -> int:
        """Router logits, scores, ranks and groups, and what is sorted of them."""
        assert isinstance(layer.feed_forward, MoEConfig)
        experts, chosen = layer.feed_forward.num_experts, layer.feed_forward.experts_per_token
        return 4 * _F32 * count * experts + 4 * (_F32 + _I32) * count * chosen

    def _mlp(self, count: int, width: int) -> int:
        """A gated MLP: gate and up as products and rounded, what both make, and its product."""
        return (2 * _F32 + 3 * self._item) * count * width + self._normed(count)

    def _multiplied(self, layer: LayerConfig, rows: int) -> int:
        """Rows times their experts, beside the products that go out."""
        if rows < EXPERT_GROUP:
            return self._by_kernels(native=self._natively(layer, rows), xla=self._by_expert(layer, rows))
        assert isinstance(layer.feed_forward, MoEConfig)
        moe, d = layer.feed_forward, self.config.hidden_size
        weights = self._item * expert_count(d, moe.expert)
        choices = rows * moe.experts_per_token
        groups = min(choices, choices // EXPERT_GROUP + moe.num_experts)
        lists = 6 * _I32 * (choices + groups + moe.num_experts) + 2 * _I32 * groups * EXPERT_GROUP
        kept = self._item * choices * d
        if self._item < _F32:
            # The CPU scatters and gathers such rows in float32, all of them for each group.
            kept += _F32 * (choices + rows) * d
        return kept + weights + self._one_expert(EXPERT_GROUP, layer) + lists

    def _by_expert(self, layer: LayerConfig, rows: int) -> int:
        """Few rows, one expert at a time."""
        assert isinstance(layer.feed_forward, MoEConfig)
        moe, d = layer.feed_forward, self.config.hidden_size
        choices = rows * moe.experts_per_token
        # Products before and after an expert's go in, which the CPU does in float32.
        kept = (self._item + _F32) * choices * d
        weights = self._item * expert_count(d, moe.expert)
        return kept + weights + self._one_expert(rows, layer) + 4 * _I32 * (moe.num_experts + choices)

    def _natively(self, layer: LayerConfig, rows: int) -> int:
        """Few rows, all choices at once: what is packed of inputs, products and biases in float32, and what is
        rounded. Weights are read where they lie."""
        assert isinstance(layer.feed_forward, MoEConfig)
        moe, d = layer.feed_forward, self.config.hidden_size
        choices, width = rows * moe.experts_per_token, moe.expert.width
        scaled = moe.router.scale_inputs
        inputs, inside = math.prod(packed_shape(choices, d)), math.prod(packed_shape(choices, width))
        wide = inputs + inside + choices * (2 * width + d)
        if moe.expert.bias:
            wide += choices * max(2 * width, d)
        narrow = choices * ((2 if scaled else 1) * d + 2 * width)
        return _F32 * wide + self._item * narrow + 4 * _I32 * (moe.num_experts + choices)

    def _one_expert(self, rows: int, layer: LayerConfig) -> int:
        assert isinstance(layer.feed_forward, MoEConfig)
        inputs = (_F32 + self._item) * rows * self.config.hidden_size
        return inputs + self._mlp(rows, layer.feed_forward.expert.width)

    def _combined(self, layer: LayerConfig, count: int) -> int:
        """The sum of the products, and the shared expert."""
        assert isinstance(layer.feed_forward, MoEConfig)
        total, width = self._hidden(count), layer.feed_forward.shared_width
        return total + (self._mlp(count, width) + 8 * _F32 * count if width else 0)


def _is_sparse(layer: LayerConfig) -> bool:
    return isinstance(layer.feed_forward, MoEConfig)


def _key_dim(attention: AttentionConfig | LatentConfig) -> int:
    if isinstance(attention, LatentConfig):
        return attention.nope_dim + attention.rope_dim
    return attention.head_dim


def _value_dim(attention: AttentionConfig | LatentConfig) -> int:
    return attention.value_dim if isinstance(attention, LatentConfig) else attention.head_dim
