"""A model whose experts do not all fit on the device: layer by layer, experts in waves, as they come into slots.

A decode step stops at every router, to see who is wanted. Prefill runs some chunks of a prompt side by side, layer by
layer, so that an expert comes once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from novalm_jax.config import MoEConfig
from novalm_jax.engine.executor import Chunk, Executor
from novalm_jax.engine.functions import Decoded, DecodeStep, ModelWeights
from novalm_jax.engine.programs import StreamedPrograms
from novalm_jax.experts.streamer import Streamer
from novalm_jax.models.decoder import Routed
from novalm_jax.models.router import Routing

TAIL = 32
"""Last tokens of a prompt whose experts are kept for what follows it."""

CONFIDENT = 0.5
"""Experts are prefetched whose weight is at least this part of an even share among the chosen."""


class StreamedExecutor(Executor):
    """Dense weights on the device, experts in slots.

    Attributes:
      programs: what is run.
      streamer: the slots, ended and freed with this, as are the weights.
    """

    def __init__(
        self,
        weights: ModelWeights,
        programs: StreamedPrograms,
        streamer: Streamer,
        bytes_read: int,
        pass_chunks: int,
        lookahead: bool,
    ):
        """Takes what it runs.

        Args:
          weights: dense ones alone.
          programs: for as many slots as the streamer has.
          streamer: of this model's experts.
          bytes_read: what loading the dense weights took from disk.
          pass_chunks: prefill chunks that share a pass over the experts.
          lookahead: whether experts are prefetched that the next layer may need.
        """
        super().__init__(programs, weights.outer)
        self.programs = programs
        self._weights = weights
        self.streamer = streamer
        self._bytes_read = bytes_read
        self._pass_chunks = pass_chunks
        self._lookahead = lookahead

    @property
    def broken(self) -> bool:
        """As in `Executor`: experts come no more."""
        return self.streamer.broken

    def figures(self) -> dict[str, Any]:
        """As in `Executor`."""
        figures = self.streamer.figures()
        return figures | {"disk_bytes_read": self._bytes_read + figures["disk_bytes_read"]}

    def close(self) -> None:
        """Ends the streamer's threads, and frees weights, slots and caches."""
        self.streamer.close()
        for leaf in jax.tree.leaves((self._weights, self._caches)):
            leaf.delete()
        self._weights, self._caches = ModelWeights((), ()), []

    def _decode_step(self, bucket: int, step: DecodeStep) -> Decoded:
        programs = self.programs
        active = step.positions >= 0
        self.streamer.next_step()
        with self._experts_in_use():
            x = self._run(programs.embed_step(bucket), self._outer, step.tokens)
            for i, (config, weights) in enumerate(zip(self._layers, self._weights.layers, strict=True)):
                attend = programs.attend_step(config, bucket)
                x, self._caches[i] = self._run(attend, weights.dense, self._caches[i], x, step)
                if isinstance(moe := config.feed_forward, MoEConfig):
                    x = x._replace(routing=self._chosen(i, x.routing, active))
                    waves = self.streamer.waves(i, _most_wanted([x.routing], moe))
                    if self._lookahead:
                        self._look_ahead(i + 1, x.x, active)
                    (x,) = self._through_experts(i, [x], waves)
            return self._run(programs.head_of_step(bucket), self._outer, x)

    def _chosen(self, layer: int, routing: Routing, active: np.ndarray) -> Routing:
        """The experts that rows of a decode step use, those that are `active`; measurements replay others."""
        return routing

    def _predicted(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The experts of the next layer that are prefetched for each row, `[t, k]`, as `_chosen`."""
        return ids

    def _look_ahead(self, layer: int, x: jax.Array, active: np.ndarray) -> None:
        """Prefetches what the router of a layer would choose for the hidden state of the one before."""
        if layer == len(self._layers) or not isinstance(moe := self._layers[layer].feed_forward, MoEConfig):
            return
        program = self.programs.lookahead(self._layers[layer], len(active))
        routing = self._run(program, self._weights.layers[layer].dense, x)
        ids, weights = (np.asarray(part)[active] for part in routing)
        likely = weights >= CONFIDENT * weights.mean(axis=-1, keepdims=True)
        ids = self._predicted(layer, np.where(likely, ids, moe.num_experts))
        self.streamer.prefetch(layer, _most_wanted([(ids, weights)], moe))

    def _through_layers(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, jax.Array] | None]:
        left = list(chunks)
        while left:
            side_by_side, left = left[: self._pass_chunks], left[self._pass_chunks :]
            yield from self._pass(side_by_side)

    def _pass(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, jax.Array] | None]:
        """Runs chunks through all layers, side by side."""
        programs = self.programs
        self.streamer.next_step()
        states = [self._run(programs.embed(chunk.bucket), self._outer, chunk.tokens) for chunk in chunks]
        for i, (config, weights) in enumerate(zip(self._layers, self._weights.layers, strict=True)):
            with self._caches_in_use(), self._experts_in_use():
                for at, chunk in enumerate(chunks):
                    attend = programs.attend(config, chunk.bucket)
                    states[at], self._caches[i] = self._run(
                        attend, weights.dense, self._caches[i], states[at], chunk.at
                    )
                if isinstance(moe := config.feed_forward, MoEConfig):
                    tails = [
                        tuple(np.asarray(part)[max(0, chunk.length - TAIL) : chunk.length] for part in state.routing)
                        for chunk, state in zip(chunks, states, strict=True)
                        if chunk.last or chunk is chunks[-1]
                    ]
                    wanted = _most_wanted([state.routing for state in states], moe)
                    waves = self.streamer.waves(i, wanted, kept=_most_wanted(tails, moe))
                    states = self._through_experts(i, states, waves)
            jax.block_until_ready(states)
            yield None
        for chunk in chunks:
            yield chunk, states.pop(0)

    def _through_experts(self, layer: int, states: Sequence[Routed], waves: Iterator[np.ndarray]) -> list[jax.Array]:
        """The end of a layer, for all states with each wave of experts."""
        config, pool, programs = self._layers[layer], self.streamer.pool, self.programs
        products: list[jax.Array | None] = [None] * len(states)
        assert isinstance(config.feed_forward, MoEConfig)
        for wave in waves:
            slots = wave[: config.feed_forward.num_experts]
            for i, routed in enumerate(states):
                if (before := products[i]) is None:
                    products[i] = self._run(programs.first_wave(config, len(routed.h)), pool.arrays, routed, slots)
                else:
                    products[i] = self._run(programs.wave(config, len(routed.h)), pool.arrays, before, routed, slots)
        dense = self._weights.layers[layer].dense
        return [self._run(programs.combine(config, len(routed.h)), dense, routed, products.pop(0)) for routed in states]

    @contextmanager
    def _experts_in_use(self) -> Iterator[None]:
        """What is broken off leaves fetches under way, which nobody waits for any more."""
        try:
            yield
        except BaseException:
            self.streamer.recover()
            raise


def _most_wanted(routings: Sequence[Sequence[Any]], config: MoEConfig) -> list[int]:
    """All experts that are chosen, by ids and weights `[t, k]`, those with the largest weights in sum first."""
    total = np.zeros(config.num_experts)
    chosen = np.zeros(config.num_experts, bool)
    for ids, weights in (map(np.asarray, routing) for routing in routings):
        real = ids < config.num_experts
        np.add.at(total, ids[real], weights[real])
        chosen[ids[real]] = True
    order = np.argsort(-total, kind="stable")
    return [int(expert) for expert in order if chosen[expert]]
