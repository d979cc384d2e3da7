"""What a cache of expert records would do on a trace: the engine's policies and its residency table, without weights.

A layer of a step is one event: all of its experts are looked up before one of them comes in, as the engine does it.
Layers come in their order. A hit is an expert that an event needs and that has a slot; rows of a step share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from novalm_jax.experts.policy import Policy, admit, lowest
from novalm_jax.experts.profile import most_used
from novalm_jax.experts.records import Record
from novalm_jax.experts.slots import NOWHERE, SlotTable
from novalm_jax.experts.traces import Trace
from novalm_jax.models.router import NONE

Events = Sequence[Sequence[np.ndarray]]
"""The experts that each layer of each step needs, int `[n]` without repetition."""


@dataclass(frozen=True)
class Replay:
    """What was counted.

    Attributes:
      slots: that there were.
      needed: int `[layers]`, experts that events of each layer needed.
      missed: int `[layers]`, those that had no slot.
      uploads: records that came to the device: all that were missed, or those that were admitted.
      evictions: records that left.
    """

    slots: int
    needed: np.ndarray
    missed: np.ndarray
    uploads: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Hits, as a part of all that was needed."""
        return 1 - int(self.missed.sum()) / int(self.needed.sum())


class Cache:
    """Slots and the policy that keeps them, to run steps through one by one.

    Without a margin every miss is uploaded and gets a slot, where the event leaves one. With one, misses are computed
    elsewhere, and `admit` says which of them come in all the same.
    """

    def __init__(self, policy: Policy, tables: Sequence[SlotTable], margin: float | None = None):
        """`policy` is of as many layers as the tables have, of which there is one for all layers, or one for each."""
        self._policy = policy
        self._tables = tables
        self._margin = margin
        layers, _ = tables[0].table.shape
        self._needed, self._missed = np.zeros((2, layers), np.int64)
        self._uploads = self._evictions = 0

    def step(self, step: int, needed: Sequence[np.ndarray]) -> None:
        """All layers use what they need, int `[n]` without repetition each, in this step."""
        for layer, experts in enumerate(needed):
            self._policy.use(step, layer, experts)
            table = self._tables[layer % len(self._tables)]
            slots = table.table[layer][experts]
            absent = slots == NOWHERE
            missing = experts[absent]
            self._needed[layer] += len(experts)
            if len(missing):
                self._missed[layer] += len(missing)
                self._bring(table, step, layer, missing, slots[~absent])

    def counted(self) -> Replay:
        """What was counted so far."""
        slots = sum(map(len, self._tables))
        return Replay(slots, self._needed.copy(), self._missed.copy(), self._uploads, self._evictions)

    def _bring(self, table: SlotTable, step: int, layer: int, missing: np.ndarray, busy: np.ndarray) -> None:
        """Brings what is missing into slots that are not busy. Where there are too few, the last ones have no slot in
        the end, nor do they push others out."""
        layers, held = table.contents()
        worth = self._policy.worth(step, layer, layers, held)
        worth[layers == NOWHERE] = -1
        worth[busy] = np.inf
        if self._margin is None:
            self._uploads += len(missing)
            places = lowest(worth, len(missing))
        else:
            arriving = self._policy.worth(step, layer, np.full(len(missing), layer), missing)
            chosen, places = admit(arriving, worth, self._margin)
            missing = missing[chosen]
            self._uploads += len(missing)
        for expert, slot in zip(missing.tolist(), places.tolist(), strict=False):
            if layers[slot] != NOWHERE:
                table.clear(slot)
                self._evictions += 1
            table.put(Record(layer, expert), slot)


def events_of(trace: Trace, batch: int | None, quantum: int = 0) -> Events:
    """What is needed when steps are as recorded (None), or with so many sequences side by side, perhaps half of them at
    a time; see `Trace.together`."""
    layers, most = trace.experts.shape[1], trace.num_experts
    together = list(trace.together(batch, quantum))
    steps = np.repeat(np.arange(len(together)), [len(rows) for rows in together])
    chosen = trace.experts[np.concatenate(together)]
    keys = (steps[:, None, None] * layers + np.arange(layers)[:, None]) * most + chosen
    different = np.unique(keys[chosen != NONE])
    borders = np.searchsorted(different, np.arange(1, len(together) * layers) * most)
    found = np.split(different % most, borders)
    return [found[start : start + layers] for start in range(0, len(found), layers)]


def warm(policy: Policy, tables: Sequence[SlotTable], uses: np.ndarray) -> None:
    """Starts a new policy and empty tables from how often records were used, float64 `[layers, experts]`: those that
    were used most have the slots."""
    policy.seed(uses)
    for record in most_used(uses):
        table = tables[record.layer % len(tables)]
        if (slot := table.empty_slot()) is not None:
            table.put(record, slot)


def replay(
    events: Events,
    policy: Policy,
    tables: Sequence[SlotTable],
    progress: str | None = None,
    margin: float | None = None,
) -> Replay:
    """Runs all events through a `Cache`, with a bar of some name; None for no bar."""
    cache = Cache(policy, tables, margin)
    for step, needed in enumerate(tqdm(events, desc=progress, disable=progress is None or None, leave=False)):
        cache.step(step, needed)
    return cache.counted()


class Belady:
    """The record that is used next the latest leaves. Knows the future, and so serves as a bound: where every miss gets
    a slot, and all records are of one size, no policy has more hits.

    Source: Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
    """

    def __init__(self, layers: int, experts: int, events: Events):
        """`events` are what will be used, from step 0 on."""
        later = np.full((layers, experts), np.inf)
        self._coming: list[list[np.ndarray]] = []
        for step in reversed(range(len(events))):
            row = []
            for layer in reversed(range(layers)):
                used = events[step][layer]
                row.append(later[layer][used])
                later[layer][used] = step * layers + layer
            self._coming.append(row[::-1])
        self._coming.reverse()
        self._next = later

    def seed(self, rates: np.ndarray) -> None:
        """Nothing: it knows better."""

    def use(self, step: int, layer: int, experts: np.ndarray) -> None:
        """Looks up when they are used again."""
        self._next[layer][experts] = self._coming[step][layer]

    def worth(self, step: int, layer: int, layers: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """1 / steps until the next use, 0 where there is none."""
        count = len(self._next)
        return np.asarray(count / (self._next[layers, experts] - (step * count + layer)))
