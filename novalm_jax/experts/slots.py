"""Which record lies in which slot of a tier. Plain bookkeeping: holds no weights, knows no policy, takes no locks."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from novalm_jax.experts.records import Record

NOWHERE = -1
"""In place of the slot of a record that has none."""


class SlotTable:
    """The residency table of one tier, and its reverse.

    Attributes:
      table: int32 `[layers, experts]`, the slot of each record, or `NOWHERE`.
    """

    def __init__(self, layers: int, experts: int, slots: int):
        self.table = np.full((layers, experts), NOWHERE, np.int32)
        self._layers = np.full(slots, NOWHERE, np.int64)
        self._experts = np.full(slots, NOWHERE, np.int64)

    def __len__(self) -> int:
        return len(self._layers)

    def find(self, record: Record) -> int:
        """The slot of a record, or `NOWHERE`."""
        return int(self.table[record])

    def record_in(self, slot: int) -> Record | None:
        """What lies in a slot."""
        layer, expert = int(self._layers[slot]), int(self._experts[slot])
        return None if layer == NOWHERE else Record(layer, expert)

    def empty_slot(self, but: Collection[int] = ()) -> int | None:
        """The first slot that holds nothing and is none of `but`; None where there is none."""
        return next((int(slot) for slot in np.flatnonzero(self._layers == NOWHERE) if slot not in but), None)

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """The layer and expert in each slot, `NOWHERE` where it holds nothing: int64 `[slots]` each, not to be kept."""
        return self._layers, self._experts

    def listed(self, but: Collection[int] = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The slots that hold a record and are none of `but`, and the layer and expert in each: int64 `[n]` each."""
        open_ = self._layers != NOWHERE
        open_[list(but)] = False
        slots = np.flatnonzero(open_)
        return slots, self._layers[slots], self._experts[slots]

    def put(self, record: Record, slot: int) -> None:
        """Gives an empty slot to a record that has none."""
        assert self.table[record] == NOWHERE, f"{record} has a slot"
        assert self._layers[slot] == NOWHERE, f"slot {slot} is taken"
        # The table last, as what it names is there; and the layer after the expert, as a slot with one is taken.
        self._experts[slot] = record.expert
        self._layers[slot] = record.layer
        self.table[record] = slot

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self.table[self._layers[slot], self._experts[slot]] = NOWHERE
        self._layers[slot] = self._experts[slot] = NOWHERE

    def clear_all(self) -> None:
        """Empties all of them."""
        for part in (self.table, self._layers, self._experts):
            part[...] = NOWHERE
