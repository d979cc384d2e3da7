"""Runs the programs: owns the weights and the caches on the device, and the order in which they are used.

Knows tokens, rows and positions. Refuses to know requests, sampling and text. One thread at a time may call it: a
cache that a program was given is gone, and only the newest one is held here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from novalm_jax.checkpoint.mapping import is_expert
from novalm_jax.engine.functions import HEAD_BLOCK, Decoded, DecodeStep, Leaves, ModelWeights, PrefillChunk, Structure
from novalm_jax.engine.programs import Programs, decode_rows, prefill_rows
from novalm_jax.experts.expert_map import DEVICE, ExpertMap
from novalm_jax.experts.recorder import Recorder
from novalm_jax.experts.records import count_records, moe_layers
from novalm_jax.kernels.storage import delete_arrays, storage_dtype
from novalm_jax.models.decoder import Decoder, Routed
from novalm_jax.models.router import Routing
from novalm_jax.timeline import Timeline


class Prompt(NamedTuple):
    """Tokens, and the row of the cache that they go to."""

    row: int
    tokens: Sequence[int]


class Chunk(NamedTuple):
    """A part of a prompt: its tokens, padded to `bucket`, and where they go; of which prompt, and whether the last."""

    tokens: np.ndarray
    bucket: int
    at: PrefillChunk
    prompt: int
    last: bool

    @property
    def length(self) -> int:
        """Tokens that are not padding."""
        return int(self.at.tokens)


class Executor(ABC):
    """A model with a cache for `programs.shapes.rows` sequences. A timeline shows its programs, each of which is waited
    for then.

    Attributes:
      rows: sequences that the cache has room for.
      launches: programs that were run.
      recorder: counts the experts of decode steps. Whoever wants a trace puts one in its place that keeps one.
    """

    def __init__(self, programs: Programs, outer: Leaves, timeline: Timeline | None = None):
        shapes = programs.shapes
        self.recorder = Recorder(programs.config)
        self.rows = shapes.rows
        self.launches = 0
        self._programs = programs
        self._timeline = timeline
        self._outer = outer
        self._layers = programs.config.layers
        self._caches = list(programs.new_caches())
        self._prefill_rows = prefill_rows(shapes.capacity)
        self._decode_rows = decode_rows(shapes.rows)

    def prefill(self, prompts: Sequence[Prompt]) -> Generator[tuple[int, Decoded] | None]:
        """Puts prompts into rows of the cache, chunk by chunk.

        Yields:
          None where a decode step may come between; all that was dispatched is done then. For each prompt, once it is
          through, its number and what follows its last token, as the first of some equal rows.
        """
        chunks = [
            chunk for number, prompt in enumerate(prompts) for chunk in self._chunks(prompt, len(prompt.tokens), number)
        ]
        for prompt in prompts:
            self.recorder.begin(prompt.row)
        for through in self._through_layers(chunks):
            if through is None:
                yield None
            elif through[0].last:
                chunk, x = through
                yield chunk.prompt, self._head(chunk, x)
                del x
            del through

    def prefill_logits(self, row: int, tokens: Sequence[int], known: int, out: np.ndarray) -> Generator[None]:
        """Puts a prompt, a part of a sequence of which `known` tokens are known, into a row of the cache, and fills
        `out`, float32 `[t, v]`, with the logits of all of its tokens, brought to the host block by block.

        Yields:
          At every border between layers.
        """
        begin = 0
        self.recorder.begin(row)
        for through in self._through_layers(self._chunks(Prompt(row, tokens), known)):
            if through is not None:
                chunk, x = through
                self._head_of_all(chunk, x, out[begin : begin + chunk.length])
                begin += chunk.length
                del x
            del through
            yield

    def decode(
        self, tokens: Sequence[int], rows: Sequence[int], positions: Sequence[int], known: Sequence[int]
    ) -> Decoded:
        """One step: `tokens[i]` stands at `positions[i]` of row `rows[i]`, in a sequence of `known[i]` known tokens.
        The result is padded to a bucket of rows."""
        bucket = next(size for size in self._decode_rows if size >= len(tokens))

        def padded(values: Sequence[int], idle: int) -> np.ndarray:
            return np.array([*values, *[idle] * (bucket - len(values))], np.int32)

        step = DecodeStep(padded(tokens, 0), padded(rows, self.rows), padded(positions, -1), padded(known, 0))
        with self._caches_in_use():
            decoded, chosen = self._decode_step(bucket, step)
        if chosen is not None:
            self.recorder.step(rows, chosen)
        return decoded

    @property
    def broken(self) -> bool:
        """Whether it lost what it cannot work without."""
        return False

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """What it holds and what it moved, by the names of `Report`."""

    @abstractmethod
    def tiers(self) -> np.ndarray:
        """Where each expert is, int8 `[layers, experts]`, by the numbers of the model's layers."""

    def expert_map(self) -> ExpertMap:
        """Where each expert is, and how often decode steps used it."""
        recorder, tiers = self.recorder, self.tiers()[self.recorder.layers]
        for row, moe in zip(tiers, moe_layers(self._programs.config).values(), strict=True):
            row[moe.num_experts :] = -1
        return ExpertMap(recorder.layers, recorder.uses, tiers, recorder.tokens)

    @abstractmethod
    def close(self) -> None:
        """Frees weights and caches on the device."""

    @abstractmethod
    def _through_layers(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, jax.Array] | None]:
        """Runs chunks of prompts through all layers: each, in order, with its hidden states `[1, t, d]`, once they are
        dispatched; and None at every border between layers."""

    @abstractmethod
    def _decode_step(self, bucket: int, step: DecodeStep) -> tuple[Decoded, Routing | None]:
        """Runs a step of `bucket` rows; also gives what the routers of its layers chose, `[l, b, k]`."""

    def _embed(self, chunk: Chunk) -> jax.Array:
        """The tokens of a chunk: `[1, t, d]`."""
        return self._run(self._programs.embed(chunk.bucket), self._outer, chunk.tokens)

    def _head(self, chunk: Chunk, x: jax.Array) -> Decoded:
        """What follows the last token of a chunk, as the first of some equal rows."""
        return self._run(self._programs.head(chunk.bucket), self._outer, x, np.int32(chunk.length - 1))

    def _head_of_all(self, chunk: Chunk, x: jax.Array, out: np.ndarray) -> None:
        """Fills `out [t, v]` with the logits of all tokens of a chunk."""
        head = self._programs.head_of_block(chunk.bucket)
        for at in range(0, chunk.length, HEAD_BLOCK):
            block = out[at : at + HEAD_BLOCK]
            block[:] = np.asarray(self._run(head, self._outer, x, np.int32(at)))[: len(block)]

    def _chunks(self, prompt: Prompt, known: int, number: int = 0) -> Iterator[Chunk]:
        """A prompt in chunks of the largest size, the last one of the smallest that holds it."""
        most, length = self._prefill_rows[-1], len(prompt.tokens)
        if not length:
            raise ValueError("a prompt has at least one token")
        for begin in range(0, length, most):
            part = np.asarray(prompt.tokens[begin : begin + most], np.int32)
            bucket = next(size for size in self._prefill_rows if size >= len(part))
            at = PrefillChunk(np.int32(prompt.row), np.int32(begin), np.int32(len(part)), np.int32(known))
            yield Chunk(np.pad(part, (0, bucket - len(part))), bucket, at, number, begin + most >= length)

    def _run(self, program: jax.stages.Compiled, *arguments: Any, layer: int | None = None) -> Any:
        self.launches += 1
        if self._timeline is None:
            return program(*arguments)
        name, rows = self._programs.name_of(program)
        with self._timeline.span("compute", name, rows=rows, **({} if layer is None else {"layer": layer})):
            return jax.block_until_ready(program(*arguments))

    @contextmanager
    def _caches_in_use(self) -> Iterator[None]:
        """A program that fails, or an interrupt before its results are kept, leaves caches that were given away: new
        ones take their place, and the caller must count every row as lost."""
        try:
            yield
        except BaseException:
            for layer, cache in enumerate(self._caches):
                if any(leaf.is_deleted() for leaf in jax.tree.leaves(cache)):
                    self._caches[layer] = self._programs.new_cache(layer)
            raise


class ResidentExecutor(Executor):
    """All weights on the device: a decode step is one program.

    `model` is given away: its experts are in storage form (`put_stored`), and its arrays are freed by `close`. Loading
    it took `bytes_read` from disk.
    """

    def __init__(self, model: Decoder, programs: Programs, bytes_read: int, timeline: Timeline | None = None):
        self._bytes_read = bytes_read
        self._weights: ModelWeights = Structure.take_apart(model)
        super().__init__(programs, self._weights.outer, timeline)

    def figures(self) -> dict[str, Any]:
        """As in `Executor`: everything is on the device, and was read once."""
        return {"experts_on_device": count_records(self._programs.config), "disk_bytes_read": self._bytes_read}

    def tiers(self) -> np.ndarray:
        """As in `Executor`."""
        return np.full((len(self._layers), self.recorder.uses.shape[1]), DEVICE, np.int8)

    def close(self) -> None:
        """Frees weights and caches on the device."""
        delete_arrays((self._weights, self._caches))
        self._weights, self._caches = ModelWeights((), ()), []

    def _through_layers(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, jax.Array] | None]:
        for chunk in chunks:
            x = self._embed(chunk)
            for i, (config, weights) in enumerate(zip(self._layers, self._weights.layers, strict=True)):
                with self._caches_in_use():
                    attend = self._programs.attend(config, chunk.bucket)
                    # One name for all states of the layer: each is let go of as soon as the next one is there.
                    x, self._caches[i] = self._run(attend, weights.dense, self._caches[i], x, chunk.at, layer=i)
                    if isinstance(x, Routed):
                        experts = self._programs.experts(config, chunk.bucket)
                        x = self._run(experts, weights.dense, weights.experts, x, layer=i)
                jax.block_until_ready(x)
                yield None
            yield chunk, x
            del x

    def _decode_step(self, bucket: int, step: DecodeStep) -> tuple[Decoded, Routing | None]:
        decode = self._programs.decode(bucket)
        decoded, caches, chosen = self._run(decode, self._weights, tuple(self._caches), step)
        self._caches = list(caches)
        return decoded, chosen


def put_stored(path: str, parameter: np.ndarray) -> jax.Array:
    """Puts a parameter of a model on the device as the executor wants it: experts in storage form."""
    if is_expert(path):
        parameter = parameter.view(storage_dtype(parameter.dtype))
    return jax.device_put(parameter)
