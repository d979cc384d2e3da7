"""What a cache of expert records would do on a trace: the engine's policies and its residency table, without weights.

A layer of a step is one event: all of its experts are looked up before one of them comes in, as the engine does it.
Layers come in their order. A hit is an expert that an event needs and that has a slot; rows of a step share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from novalm_jax.experts.policy import Policy, leaving
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
      evictions: records that left.
    """

    slots: int
    needed: np.ndarray
    missed: np.ndarray
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Hits, as a part of all that was needed."""
        return 1 - int(self.missed.sum()) / int(self.needed.sum())


def events_of(trace: Trace, batch: int | None) -> Events:
    """What is needed when steps are as recorded (None), or with so many sequences side by side."""
    return [[_needed(layer) for layer in trace.experts[rows].swapaxes(0, 1)] for rows in trace.together(batch)]


def replay(events: Events, policy: Policy, tables: Sequence[SlotTable], progress: str | None = None) -> Replay:
    """Runs all events through empty tables.

    Args:
      events: of as many layers as the tables have.
      policy: new, and of that size.
      tables: one for all layers, or one for each.
      progress: what a bar is called, None for no bar.
    """
    layers, _ = tables[0].table.shape
    needed, missed = np.zeros((2, layers), np.int64)
    evictions = 0
    for step, event in enumerate(tqdm(events, desc=progress, disable=progress is None or None, leave=False)):
        for layer, experts in enumerate(event):
            policy.use(step, layer, experts)
            table = tables[layer % len(tables)]
            missing = experts[table.table[layer, experts] == NOWHERE]
            needed[layer] += len(experts)
            missed[layer] += len(missing)
            if len(missing):
                evictions += _bring(table, policy, step, layer, experts, missing)
    return Replay(sum(map(len, tables)), needed, missed, evictions)


def lru_hit_rates(events: Events, layers: int, experts: int) -> np.ndarray:
    """The hit rate of `LRU` in one pool for every number of slots at once, `[layers * experts + 1]`, the first for 0.

    With so few slots that an event needs more, the engine goes in waves, and this is a little too high.

    Source: stack distances, Mattson et al., Evaluation techniques for storage hierarchies, 1970.
    """
    last = np.full((layers, experts), -1, np.int64)
    found = np.zeros(layers * experts + 1, np.int64)
    needed = 0
    for step, event in enumerate(events):
        for layer, chosen in enumerate(event):
            before = last[layer, chosen]
            known = before[before >= 0]
            # Records that were used later than this one have a slot before it does.
            distances = (last.reshape(-1)[None, :] >= known[:, None]).sum(axis=1)
            np.add.at(found, distances, 1)
            needed += len(chosen)
            last[layer, chosen] = (step * layers + layer) * experts + chosen
    return np.cumsum(found) / needed


class Belady:
    """The record that is used next the latest leaves. Knows the future, and so serves as a bound: no policy has more
    hits where all records are of one size.

    Source: Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
    """

    def __init__(self, layers: int, experts: int, events: Events):
        """`events` are what will be used, from step 0 on."""
        self._next = np.full((layers, experts), np.inf)
        self._coming: list[list[np.ndarray]] = []
        later = self._next.copy()
        for step in reversed(range(len(events))):
            row = []
            for layer in reversed(range(layers)):
                used = events[step][layer]
                row.append(later[layer, used])
                later[layer, used] = step * layers + layer
            self._coming.append(row[::-1])
        self._coming.reverse()

    def seed(self, rates: np.ndarray) -> None:
        """Nothing: it knows better."""

    def use(self, step: int, layer: int, experts: np.ndarray) -> None:
        """Looks up when they are used again."""
        self._next[layer, experts] = self._coming[step][layer]

    def worth(self, step: int, layer: int, layers: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Events until the next use, negative."""
        return -self._next[layers, experts]


def _needed(experts: np.ndarray) -> np.ndarray:
    """The different ones of int `[rows, k]`."""
    different = np.unique(experts)
    return different[different != NONE].astype(np.int64)


def _bring(table: SlotTable, policy: Policy, step: int, layer: int, experts: np.ndarray, missing: np.ndarray) -> int:
    """Brings what is missing into slots, and gives the number of records that leave for it. Where there are fewer slots
    than an event needs, the last ones have no slot in the end, nor do they push others out."""
    for expert in missing:
        slot = table.empty_slot()
        if slot is None:
            break
        table.put(Record(layer, int(expert)), slot)
    left = missing[table.table[layer, missing] == NOWHERE]
    if not len(left):
        return 0
    slots, layers, held = table.listed(but=table.table[layer, experts[table.table[layer, experts] != NOWHERE]])
    given_up = slots[leaving(policy, step, layer, layers, held)[: len(left)]]
    for slot, expert in zip(given_up, left, strict=False):
        table.clear(int(slot))
        table.put(Record(layer, int(expert)), int(slot))
    return len(given_up)
