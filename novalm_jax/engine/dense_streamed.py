"""A model whose dense weights do not all fit on the device either: layers and blocks of the head come in turn.

As `streamed`, with other ends: rows of the embedding are looked up on the host, and the head is multiplied block by
block.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from novalm_jax.engine.executor import Chunk
from novalm_jax.engine.functions import HEAD_BLOCK, Decoded, DecodeStep, Leaves, ModelWeights
from novalm_jax.engine.streamed import StreamedExecutor
from novalm_jax.engine.streamed_programs import DenseStreamedPrograms
from novalm_jax.experts.dense_streamer import DenseStreamer
from novalm_jax.experts.streamer import NoExperts, Streamer
from novalm_jax.timeline import Timeline


class DenseStreamedExecutor(StreamedExecutor):
    """Experts in slots, if there are any, and dense weights in parts.

    Attributes:
      dense: the parts, ended and freed with this.
    """

    programs: DenseStreamedPrograms

    def __init__(
        self,
        ends: Leaves,
        dense: DenseStreamer,
        programs: DenseStreamedPrograms,
        streamer: Streamer | NoExperts,
        pass_chunks: int,
        lookahead: bool,
        timeline: Timeline | None = None,
    ):
        """As `StreamedExecutor`.

        Args:
          ends: dense weights that belong to no part.
          dense: all others.
          programs: for these parts, and for as many slots as the streamer has.
          streamer: of this model's experts.
          pass_chunks: prefill chunks that share a pass over the weights.
          lookahead: whether experts are prefetched that the next layer may need, where its router is at hand.
          timeline: shows what is run.
        """
        super().__init__(ModelWeights(ends, ()), programs, streamer, 0, pass_chunks, lookahead, timeline)
        self.dense = dense
        blocks = (part.rows for part in programs.dense.parts[len(self._layers) :])
        self._blocks = [rows for rows in blocks if rows is not None]

    def figures(self) -> dict[str, Any]:
        """As in `Executor`."""
        figures, dense = super().figures(), self.dense
        return figures | {
            "dense_uploads": dense.uploads,
            "dense_bytes_uploaded": dense.bytes_uploaded,
            "disk_bytes_read": figures["disk_bytes_read"] + dense.bytes_read,
            "host_bytes": figures.get("host_bytes", 0) + dense.host_bytes,
            "stall_seconds": figures.get("stall_seconds", 0.0) + dense.stall_seconds,
        }

    def close(self) -> None:
        """Ends all threads, and frees weights, slots and pages."""
        self.dense.close()
        super().close()

    def _dense(self, layer: int, after: Any) -> Leaves:
        return self.dense.take(layer, after)

    def _resident(self, layer: int) -> bool:
        return self.dense.stays(layer)

    def _embed(self, chunk: Chunk) -> jax.Array:
        return self._embed_ids(chunk.tokens[None])

    def _embed_step(self, step: DecodeStep) -> jax.Array:
        return self._embed_ids(step.tokens[:, None])

    def _embed_ids(self, ids: np.ndarray) -> jax.Array:
        rows = self.dense.rows(np.clip(ids.reshape(-1), 0, self.programs.config.vocab_size - 1))
        return self._run(self.programs.embed_rows(*ids.shape), rows.reshape(*ids.shape, -1))

    def _head(self, chunk: Chunk, x: jax.Array) -> Decoded:
        normed = self.programs.normed(chunk.bucket)
        return self._read_out(self._run(normed, self._outer, x, np.int32(chunk.length - 1)))

    def _head_of_step(self, x: jax.Array) -> Decoded:
        return self._read_out(self._run(self.programs.normed_step(len(x)), self._outer, x))

    def _read_out(self, h: jax.Array) -> Decoded:
        """The logits of normed `h [n, d]`."""
        program = self.programs.some_logits(len(h))
        logits: list[jax.Array] = []
        for block, (first, _) in enumerate(self._blocks):
            weight = self._take_block(block, logits[-1:] or h)
            logits.append(self._run(program, self._outer, weight, h, np.int32(first)))
        return self._run(self.programs.joined(len(h)), *logits)

    def _head_of_all(self, chunk: Chunk, x: jax.Array, out: np.ndarray) -> None:
        # Blocks of the head outside, so that each comes once.
        normed, starts = self.programs.normed_tokens(chunk.bucket), range(0, chunk.length, HEAD_BLOCK)
        program = self.programs.some_logits(HEAD_BLOCK)
        for block, (first, end) in enumerate(self._blocks):
            weight = self._take_block(block, x)
            for start in starts:
                h = self._run(normed, self._outer, x, np.int32(start))
                place = out[start : start + HEAD_BLOCK, first:end]
                place[:] = np.asarray(self._run(program, self._outer, weight, h, np.int32(first)))[: len(place)]

    def _take_block(self, number: int, after: Any) -> jax.Array:
        (weight,) = self.dense.take(len(self._layers) + number, after)
        return weight
