"""A model whose experts do not all fit on the device: layer by layer, experts in waves, as they come into slots.

A decode step stops at every router, to see who is wanted. Prefill runs some chunks of a prompt side by side, layer by
layer, so that an expert comes once for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from novalm_jax.config import MoEConfig
from novalm_jax.engine.executor import Chunk, Executor
from novalm_jax.engine.functions import Decoded, DecodeStep, Leaves, ModelWeights
from novalm_jax.engine.streamed_programs import StreamedPrograms
from novalm_jax.experts.pools import DevicePool
from novalm_jax.experts.streamer import NoExperts, Streamer
from novalm_jax.kernels.storage import delete_arrays
from novalm_jax.models.decoder import Routed
from novalm_jax.models.router import Routing, stacked
from novalm_jax.timeline import Timeline

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
        streamer: Streamer | NoExperts,
        bytes_read: int,
        pass_chunks: int,
        lookahead: bool,
        timeline: Timeline | None = None,
    ):
        """Takes what it runs.

        Args:
          weights: dense ones alone.
          programs: for as many slots as the streamer has.
          streamer: of this model's experts.
          bytes_read: what loading the dense weights took from disk.
          pass_chunks: prefill chunks that share a pass over the experts.
          lookahead: whether experts are prefetched that the next layer may need.
          timeline: as in `Executor`.
        """
        super().__init__(programs, weights.outer, timeline)
        self.programs = programs
        self._weights = weights
        self.streamer = streamer
        self._bytes_read = bytes_read
        self.pass_chunks = pass_chunks
        self._lookahead = lookahead

    @property
    def broken(self) -> bool:
        """As in `Executor`: experts come no more."""
        return self.streamer.broken

    def figures(self) -> dict[str, Any]:
        """As in `Executor`."""
        figures = self.streamer.figures()
        return figures | {"disk_bytes_read": self._bytes_read + figures["disk_bytes_read"]}

    def tiers(self) -> np.ndarray:
        """As in `Executor`."""
        return self._experts.tiers()

    @property
    def without_experts(self) -> bool:
        """Whether no slot holds an expert."""
        return self._experts.empty

    def change(self, programs: StreamedPrograms) -> None:
        """Goes on with as many pages and slots as other programs of the model have, between steps and with no pass on
        its way. Pages stay that are there before and after; experts come again as they are needed. If it fails, or is
        interrupted, all pages are empty."""
        streamer, former, counts = self._experts, self.programs, programs.shapes.pages
        try:
            self.programs = self._programs = programs
            # In this order: never more than there was before or will be after it, but for pages of one layer.
            streamer.give_up_slots()
            for layer, group in enumerate(programs.groups):
                before = self._pages[layer]
                if counts[group] != former.shapes.pages[group]:
                    resize = former.resize_pages(layer, counts[group])
                    self._pages[layer] = jax.block_until_ready(resize(before))
                    delete_arrays(before)
            streamer.take_slots(DevicePool(programs.new_pool, programs.insert))
        except BaseException:
            # Those before, where it came first of all.
            programs = self._programs = self.programs
            delete_arrays(self._pages)
            streamer.give_up_slots()
            self._pages = list(programs.new_pages())
            streamer.take_slots(DevicePool(programs.new_pool, programs.insert))
            raise

    def close(self) -> None:
        """Ends the streamer's threads, and frees weights, slots and pages."""
        self.streamer.close()
        delete_arrays((self._weights, self._pages))
        self._weights, self._pages = ModelWeights((), ()), []

    def _decode_step(self, bucket: int, step: DecodeStep) -> tuple[Decoded, Routing | None]:
        programs, chosen = self.programs, []
        active = step.positions >= 0
        self.streamer.next_step()
        begin = time.perf_counter()
        with self._experts_in_use():
            x = self._embed_step(step)
            for i, config in enumerate(self._layers):
                dense, attend = self._dense(i, x), programs.attend_step(config, bucket)
                x, self._pages[i] = self._run(attend, dense, self._pages[i], x, step, layer=i)
                if isinstance(moe := config.feed_forward, MoEConfig):
                    x = x._replace(routing=self._chosen(i, x.routing, active))
                    chosen.append(x.routing)
                    waves = self._experts.waves(i, _most_wanted([x.routing], moe))
                    if self._lookahead and self._experts.governor.allows:
                        self._look_ahead(i + 1, x.x, active)
                    (x,) = self._through_experts(i, dense, [x], waves)
            decoded = self._head_of_step(x)
        if self._lookahead:
            self.streamer.decoded(time.perf_counter() - begin)
        return decoded, stacked(chosen, np)

    def _embed_step(self, step: DecodeStep) -> jax.Array:
        """The tokens of a decode step: `[b, 1, d]`."""
        return self._run(self.programs.embed_step(len(step.tokens)), self._outer, step.tokens)

    def _head_of_step(self, x: jax.Array) -> Decoded:
        """What follows each row of `x [b, 1, d]`."""
        return self._run(self.programs.head_of_step(len(x)), self._outer, x)

    def _dense(self, layer: int, after: Any) -> Leaves:
        """The dense weights of a layer; `after` is what was computed with those of the layer before it."""
        return self._weights.layers[layer].dense

    def _resident(self, layer: int) -> bool:
        """Whether they stay on the device."""
        return True

    def _chosen(self, layer: int, routing: Routing, active: np.ndarray) -> Routing:
        """The experts that rows of a decode step use, those that are `active`; measurements replay others."""
        return routing

    def _predicted(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The experts of the next layer that are prefetched for each row, `[t, k]`, as `_chosen`."""
        return ids

    def _look_ahead(self, layer: int, x: jax.Array, active: np.ndarray) -> None:
        """Prefetches what the router of a layer would choose for the hidden state of the one before."""
        if layer == len(self._layers) or not self._resident(layer):
            return
        if not isinstance(moe := self._layers[layer].feed_forward, MoEConfig):
            return
        program = self.programs.lookahead(self._layers[layer], len(active))
        routing = self._run(program, self._dense(layer, x), x, layer=layer)
        ids, weights = (np.asarray(part)[active] for part in routing)
        likely = weights >= CONFIDENT * weights.mean(axis=-1, keepdims=True)
        ids = self._predicted(layer, np.where(likely, ids, moe.num_experts))
        self._experts.prefetch(layer, _most_wanted([(ids, weights)], moe))

    def _through_layers(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, jax.Array] | None]:
        """All of them side by side, so that every expert comes once."""
        programs, chunks = self.programs, list(chunks)
        self.streamer.next_step()
        states: list[Any] = [self._embed(chunk) for chunk in chunks]
        for i, config in enumerate(self._layers):
            with self._pages_in_use(), self._experts_in_use():
                dense = self._dense(i, states)
                for at, chunk in enumerate(chunks):
                    attend = programs.attend(config, chunk.bucket)
                    states[at], self._pages[i] = self._run(
                        attend, dense, self._pages[i], states[at], self._place(chunk), layer=i
                    )
                if isinstance(moe := config.feed_forward, MoEConfig):
                    tails = [
                        tuple(np.asarray(part)[max(0, chunk.length - TAIL) : chunk.length] for part in state.routing)
                        for chunk, state in zip(chunks, states, strict=True)
                        if chunk.part.last or chunk is chunks[-1]
                    ]
                    wanted = _most_wanted([state.routing for state in states], moe)
                    waves = self._experts.waves(i, wanted, kept=_most_wanted(tails, moe))
                    states = self._through_experts(i, dense, states, waves)
            jax.block_until_ready(states)
            yield None
        for chunk in chunks:
            yield chunk, states.pop(0)

    def _through_experts(
        self, layer: int, dense: Leaves, states: Sequence[Routed], waves: Iterator[np.ndarray]
    ) -> list[jax.Array]:
        """The end of a layer, for all states with each wave of experts."""
        config, pool, programs = self._layers[layer], self._experts.pool, self.programs
        products: list[jax.Array | None] = [None] * len(states)
        assert isinstance(config.feed_forward, MoEConfig)
        for wave in waves:
            slots = wave[: config.feed_forward.num_experts]
            for i, routed in enumerate(states):
                if (before := products[i]) is None:
                    first = programs.first_wave(config, len(routed.h))
                    products[i] = self._run(first, pool.arrays, routed, slots, layer=layer)
                else:
                    later = programs.wave(config, len(routed.h))
                    products[i] = self._run(later, pool.arrays, before, routed, slots, layer=layer)
        return [
            self._run(programs.combine(config, len(routed.h)), dense, routed, products.pop(0), layer=layer)
            for routed in states
        ]

    @property
    def _experts(self) -> Streamer:
        """The streamer, where a layer with experts needs it."""
        assert isinstance(self.streamer, Streamer)
        return self.streamer

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
