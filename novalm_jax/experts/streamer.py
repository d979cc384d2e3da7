"""The device tier: brings the experts that a layer needs into slots, in waves, and keeps those worth keeping.

Belongs to the compute thread. Decides what lies in which slot; moving is the fetcher's, computing the caller's.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from novalm_jax.experts.expert_map import DEVICE, DISK, HOST
from novalm_jax.experts.fetcher import Fetch, Fetcher
from novalm_jax.experts.governor import Governor
from novalm_jax.experts.policy import Policy, lowest
from novalm_jax.experts.pools import DevicePool
from novalm_jax.experts.records import Record, record_span
from novalm_jax.experts.slots import NOWHERE, SlotTable
from novalm_jax.timeline import Timeline, span


class Streamer:
    """Experts in slots, of a model that has so many `records`. Owns pool and fetcher, which end with it at the latest.
    A timeline shows inserts, each of which is waited for then, and stalls.

    Attributes:
      hits: needed records that had a slot.
      misses: needed records that had none.
      prefetch_hits: misses that were spared: records that came as a prefetch and were needed in their slot.
      prefetch_wasted: records that came as a prefetch and were not needed by the layer they came for, or came too late.
      evictions: records that left a slot for another one.
      stall_seconds: how long computing waited for records.
      governor: says whether prefetching helps.
      steps_without_prefetch: decode steps in which it said no.
    """

    def __init__(
        self,
        pool: DevicePool,
        table: SlotTable,
        policy: Policy,
        fetcher: Fetcher,
        records: int,
        timeline: Timeline | None = None,
    ):
        self._records = records
        self._pool = pool
        self._table = table
        self._policy = policy
        self._fetcher = fetcher
        self._timeline = timeline
        # Threads of a model that nobody closed would keep its memory for ever.
        self._end_threads = weakref.finalize(self, fetcher.end)
        self._step = 0
        # The layer that is prefetched for, until it says what it needs; what is on its way, what has come, and what was
        # there already of what it may need.
        self._awaited = NOWHERE
        self._ahead: dict[Record, Fetch] = {}
        self._prefetched: set[Record] = set()
        self._predicted: set[Record] = set()
        # Slots in the order in which they are given up, found once for each event: without those that were since then;
        # and those of the event itself that are worth keeping.
        self._order: list[int] = []
        self._in_use: set[int] = set()
        self.governor = Governor()
        self.steps_without_prefetch = 0
        self.hits = self.misses = self.prefetch_hits = self.prefetch_wasted = self.evictions = 0
        self.stall_seconds = 0.0

    @property
    def pool(self) -> DevicePool:
        """The slots, for the programs that read them."""
        return self._pool

    @property
    def fetcher(self) -> Fetcher:
        """What moves records."""
        return self._fetcher

    @property
    def broken(self) -> bool:
        """Whether an error ended the fetcher."""
        return self._fetcher.failed

    def tiers(self) -> np.ndarray:
        """Where each expert is, int8 `[layers, experts]`: `DEVICE`, `HOST` or `DISK`."""
        there: np.ndarray = np.where(
            self._table.table != NOWHERE, DEVICE, np.where(self._fetcher.on_host(), HOST, DISK)
        )
        return there.astype(np.int8)

    def figures(self) -> dict[str, Any]:
        """What is where and what was moved, by the names of `Report`."""
        fetcher, tiers = self._fetcher, self.tiers()
        on_device, on_host = int((tiers == DEVICE).sum()), int((tiers == HOST).sum())
        return {
            "experts_on_device": on_device,
            "experts_on_host": on_host,
            "experts_on_disk": self._records - on_device - on_host,
            "expert_hits": self.hits,
            "expert_misses": self.misses,
            "prefetch_hits": self.prefetch_hits,
            "prefetch_wasted": self.prefetch_wasted,
            "steps_without_prefetch": self.steps_without_prefetch,
            "uploads": fetcher.uploads,
            "bytes_uploaded": fetcher.uploads * fetcher.record_bytes,
            "evictions": self.evictions,
            "stall_seconds": self.stall_seconds,
            "disk_bytes_read": fetcher.bytes_read,
            "host_bytes": fetcher.host_bytes,
        }

    def next_step(self) -> None:
        """A step of the model begins."""
        self._step += 1

    def decoded(self, seconds: float) -> None:
        """A decode step that may have prefetched has taken so long."""
        self.steps_without_prefetch += not self.governor.allows
        self.governor.took(seconds)

    def waves(self, layer: int, experts: Sequence[int], kept: Collection[int] | None = None) -> Iterator[np.ndarray]:
        """Brings experts of a layer to the device, those that are there first.

        Args:
          layer: its number.
          experts: without repetition, the most wanted ones first.
          kept: those that may be needed again soon, None for all. Others come into slots that this layer has done with,
            where there are some, and leave again.

        Returns:
          An iterator over int32 `[e]`, the slots of the experts of one wave; negative for all others. All waves are
          together the experts asked for, each once. What the caller dispatches with the pool before it goes on still
          finds them there. What is missing is on its way already.
        """
        needed = [Record(layer, expert) for expert in experts]
        kept = set(experts).intersection(experts if kept is None else kept)
        if self._awaited != layer:
            self._awaited = NOWHERE
        self._order, self._in_use = [], set()
        self._absorb(layer, needed)
        slots = {record: self._table.find(record) for record in needed}
        there = {record: slot for record, slot in slots.items() if slot != NOWHERE}
        missing = [self._fetcher.fetch(record, self._step, True) for record in needed if record not in there]
        self._count(layer, there, missing)
        self._forget()
        return self._arrivals(layer, there, missing, kept)

    def _arrivals(
        self, layer: int, there: Mapping[Record, int], missing: list[Fetch], kept: Collection[int]
    ) -> Iterator[np.ndarray]:
        if there:
            yield self._wave(there)
        # Only now: the device computes, and records are on their way, while the policy thinks.
        self._policy.use(self._step, layer, np.array(sorted(kept), np.int64))
        # With other worths, what was ranked for prefetches counts no more.
        self._order = []
        self._in_use = {slot for record, slot in there.items() if record.expert in kept}
        if missing and self._table.empty_slot() is None:
            self._rank(layer)
        # Slots of experts that came for a finished wave alone.
        free: list[int] = []
        while missing:
            wave: dict[Record, int] = {}
            for fetch in self._wait_for(layer, missing):
                slot = free.pop() if free else self._make_room(layer, wave.values())
                if slot is None:
                    break
                self._insert(fetch, slot)
                missing.remove(fetch)
                wave[fetch.record] = slot
                if fetch.record.expert in kept:
                    self._in_use.add(slot)
            yield self._wave(wave)
            free += [slot for record, slot in wave.items() if record.expert not in kept]
        self._in_use = set()
        # What came for the next layer meanwhile makes room for more of it.
        self._absorb(layer, ())

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Experts that a layer may need next: fetched where nothing urgent waits, the first ones first. Prefetches for
        other layers that nobody has begun with are forgotten."""
        self._forget()
        if self.governor.allows:
            wanted = [Record(layer, expert) for expert in experts]
            absent = [record for record in wanted if self._table.find(record) == NOWHERE]
            self._awaited = layer
            self._predicted = set(wanted).difference(absent)
            self._ahead |= {record: self._fetcher.fetch(record, self._step, False) for record in absent}

    def recover(self) -> None:
        """After a step that was broken off: nothing waits for what is under way, and what has not begun does not."""
        if self._pool.lost:
            # In this order: a table over empty slots would be wrong without a word.
            self._table.clear_all()
            self._prefetched.clear()
            self._pool.renew()
        self._await_nothing()

    @property
    def empty(self) -> bool:
        """Whether no slot holds anything."""
        return not len(self._table.listed()[0])

    def give_up_slots(self) -> None:
        """Between steps: all experts leave, and the memory of their slots is free until `take_slots`."""
        self._table.clear_all()
        self._prefetched.clear()
        self._await_nothing()
        if not self._pool.lost:
            self._pool.settle()
        self._pool.close()

    def take_slots(self, pool: DevicePool) -> None:
        """Goes on with other slots, all of them empty."""
        self._table = SlotTable(*self._table.table.shape, len(pool))
        self._pool = pool

    def close(self) -> None:
        """Ends the fetcher and frees the slots."""
        self._fetcher.close()
        self._end_threads.detach()
        self._ahead.clear()
        self._pool.close()

    def _await_nothing(self) -> None:
        self._awaited = NOWHERE
        self._order, self._in_use = [], set()
        self._predicted.clear()
        self._ahead = {fetch.record: fetch for fetch in self._fetcher.calm_down()}
        self._forget()

    def _forget(self) -> None:
        self._ahead = {fetch.record: fetch for fetch in self._fetcher.forget(self._ahead.values())}

    def _absorb(self, layer: int, needed: Collection[Record]) -> None:
        """Prefetches that have arrived go into slots, but not of what is needed now. Those of a layer that knows by now
        what it needs came too late."""
        for fetch in self._fetcher.arrived(self._ahead.values(), wait=False):
            record = fetch.record
            busy = {self._table.find(other) for other in {*needed, *self._prefetched}} - {NOWHERE}
            on_time = record.layer == self._awaited
            slot = self._make_room(layer, busy) if on_time else self._table.empty_slot()
            del self._ahead[record]
            if self._table.find(record) != NOWHERE:
                # An interrupt came between its slot and the word of it, and the copy may still be read.
                self._pool.settle()
                self._fetcher.dropped(fetch)
                continue
            if slot is None:
                self._fetcher.dropped(fetch)
            else:
                self._insert(fetch, slot)
            if slot is None or not on_time:
                self.prefetch_wasted += 1
            else:
                self._prefetched.add(record)

    def _wait_for(self, layer: int, fetches: Collection[Fetch]) -> list[Fetch]:
        start = time.perf_counter()
        with span(self._timeline, "stalls", f"layer {layer}", layer=layer, missing=len(fetches)):
            arrived = self._fetcher.arrived(fetches, wait=True)
        self.stall_seconds += time.perf_counter() - start
        return arrived

    def _make_room(self, layer: int, busy: Collection[int]) -> int | None:
        """An empty slot, if need be after an eviction; None where all are busy. What the layer uses is evicted last,
        and so is what the next one may use."""
        slot = self._table.empty_slot()
        if slot is not None:
            return slot
        spared = {self._table.find(record) for record in (*self._prefetched, *self._predicted)} - {NOWHERE}
        slot = self._leaving(layer, {*busy, *self._in_use, *spared})
        return self._leaving(layer, busy) if slot is None else slot

    def _leaving(self, layer: int, but: Collection[int]) -> int | None:
        """The slot that is given up first, and is none of `but`; None where there is none."""
        slot = next((slot for slot in self._order if slot not in but), None)
        if slot is None:
            self._rank(layer)
            slot = next((slot for slot in self._order if slot not in but), None)
        return slot

    def _rank(self, layer: int) -> None:
        """Finds the order in which slots are given up for records of a layer."""
        slots, layers, experts = self._table.listed()
        worth = self._policy.worth(self._step, layer, layers, experts)
        self._order = slots[lowest(worth, len(worth))].tolist()

    def _insert(self, fetch: Fetch, slot: int) -> None:
        assert fetch.arrays is not None
        # In this order: whenever an interrupt comes, the table names no record that its slot does not hold.
        self._evict(slot)
        with record_span(self._timeline, "inserts", fetch.record, self._fetcher.record_bytes):
            done = self._pool.insert(fetch.arrays, slot)
            if self._timeline is not None:
                jax.block_until_ready(done)
        self._table.put(fetch.record, slot)
        self._fetcher.inserted(fetch, done)

    def _evict(self, slot: int) -> None:
        record = self._table.record_in(slot)
        if record is not None:
            self._table.clear(slot)
            self.evictions += 1
        if slot in self._order:
            self._order.remove(slot)

    def _count(self, layer: int, there: Collection[Record], missing: Collection[Fetch]) -> None:
        """Counts what the layer needs, and what of its prefetches was right."""
        self.hits += len(there)
        self.misses += len(missing)
        useful = self._prefetched.intersection(there)
        self.prefetch_hits += len(useful)
        self.prefetch_wasted += len(self._prefetched) - len(useful)
        self._prefetched.clear()
        self._predicted.clear()
        self._awaited = NOWHERE
        self._ahead = {record: fetch for record, fetch in self._ahead.items() if not fetch.urgent}

    def _wave(self, slots: Mapping[Record, int]) -> np.ndarray:
        wave = np.full(self._table.table.shape[1], NOWHERE, np.int32)
        for record, slot in slots.items():
            wave[record.expert] = slot
        return wave


class NoExperts:
    """In place of a `Streamer`, in a model that has no experts."""

    broken = False

    def figures(self) -> dict[str, Any]:
        """As in `Streamer`: nothing is moved."""
        return {"disk_bytes_read": 0}

    def next_step(self) -> None:
        """As in `Streamer`."""

    def decoded(self, seconds: float) -> None:
        """As in `Streamer`."""

    def recover(self) -> None:
        """As in `Streamer`."""

    def close(self) -> None:
        """As in `Streamer`."""
