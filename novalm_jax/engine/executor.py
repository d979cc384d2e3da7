"""Runs the programs: owns the weights and the caches on the device, and the order in which they are used.

Knows tokens, rows and positions. Refuses to know requests, sampling and text. One thread at a time may call it: a
cache that a program was given is gone, and only the newest one is held here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from novalm_jax.engine.programs import (
    HEAD_BLOCK,
    Decoded,
    DecodeStep,
    ModelWeights,
    PrefillChunk,
    Programs,
    Structure,
    decode_rows,
    prefill_rows,
)
from novalm_jax.kernels.storage import storage_dtype
from novalm_jax.models.decoder import Decoder, Routed


class Executor:
    """A resident model with a cache for `programs.shapes.rows` sequences.

    `model` is given away: its experts are in storage form (`put_stored`), and its arrays are freed by `close`.

    Attributes:
      rows: sequences that the cache has room for.
      launches: programs that were run.
    """

    def __init__(self, model: Decoder, programs: Programs):
        self._programs = programs
        self._layers = model.config.layers
        self._vocab_size = model.config.vocab_size
        self._weights: ModelWeights = Structure.take_apart(model)
        self._caches = list(programs.new_caches())
        shapes = programs.shapes
        self.rows = shapes.rows
        self._prefill_rows = prefill_rows(shapes.capacity)
        self._decode_rows = decode_rows(shapes.rows)
        self.launches = 0

    def prefill(self, row: int, tokens: Sequence[int]) -> Decoded:
        """Puts a prompt into a row of the cache, chunk by chunk.

        Returns:
          What follows its last token, as the first of some equal rows.
        """
        *earlier, last = range(0, len(tokens), self._prefill_rows[-1])
        for begin in earlier:
            self._run_chunk(row, tokens, begin, len(tokens))
        x, count = self._run_chunk(row, tokens, last, len(tokens))
        return self._run(self._programs.head(x.shape[1]), self._weights.outer, x, np.int32(count - 1))

    def prefill_logits(self, row: int, tokens: Sequence[int], known: int) -> np.ndarray:
        """As `prefill`, for a sequence of which `known` tokens are known, but returns the logits of all tokens of the
        prompt: float32 `[t, v]`, brought to the host block by block."""
        out = np.empty((len(tokens), self._vocab_size), np.float32)
        for begin in range(0, len(tokens), self._prefill_rows[-1]):
            x, count = self._run_chunk(row, tokens, begin, known)
            head = self._programs.head_of_block(x.shape[1])
            for at in range(0, count, HEAD_BLOCK):
                block = out[begin + at : begin + min(at + HEAD_BLOCK, count)]
                block[:] = np.asarray(self._run(head, self._weights.outer, x, np.int32(at)))[: len(block)]
            del x
        return out

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
            decoded, caches = self._run(self._programs.decode(bucket), self._weights, tuple(self._caches), step)
            self._caches = list(caches)
        return decoded

    def close(self) -> None:
        """Frees weights and caches on the device."""
        for leaf in jax.tree.leaves((self._weights, self._caches)):
            leaf.delete()
        self._weights, self._caches = ModelWeights((), ()), []

    def _run_chunk(self, row: int, tokens: Sequence[int], begin: int, known: int) -> tuple[jax.Array, int]:
        """Runs the chunk from `begin` on through all layers: its hidden states `[1, t, d]`, and how many are real."""
        part = np.asarray(tokens[begin : begin + self._prefill_rows[-1]], np.int32)
        bucket = next(size for size in self._prefill_rows if size >= len(part))
        chunk = PrefillChunk(np.int32(row), np.int32(begin), np.int32(len(part)), np.int32(known))
        x = self._run(self._programs.embed(bucket), self._weights.outer, np.pad(part, (0, bucket - len(part))))
        with self._caches_in_use():
            for i, (config, weights) in enumerate(zip(self._layers, self._weights.layers, strict=True)):
                attend = self._programs.attend(config, bucket)
                # One name for all states of the layer: each is let go of as soon as the next one is there.
                x, self._caches[i] = self._run(attend, weights.dense, self._caches[i], x, chunk)
                if isinstance(x, Routed):
                    x = self._run(self._programs.experts(config, bucket), weights.dense, weights.experts, x)
        return x, len(part)

    def _run(self, program: jax.stages.Compiled, *arguments: Any) -> Any:
        self.launches += 1
        return program(*arguments)

    @contextmanager
    def _caches_in_use(self) -> Iterator[None]:
        """A program that fails, or an interrupt before its results are kept, leaves caches that were given away: new
        ones take their place, and the caller must count every row as lost."""
        try:
            yield
        except BaseException:
            self._caches = list(self._programs.new_caches())
            raise


def put_stored(path: str, parameter: np.ndarray) -> jax.Array:
    """Puts a parameter of a model on the device as the executor wants it: experts in storage form."""
    if ".experts." in path:
        parameter = parameter.view(storage_dtype(parameter.dtype))
    return jax.device_put(parameter)
