"""The host tier: which expert record lies in which slot of pinned memory, and which leaves when one is needed.

Takes no lock: the fetcher, which owns it, calls it under its own, and says which slots are in use.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from novalm_jax.experts.policy import Policy
from novalm_jax.experts.pools import HostPool
from novalm_jax.experts.records import Record
from novalm_jax.experts.slots import SlotTable
from novalm_jax.kernels.experts import Weights


class HostTier:
    """Slots in pinned host memory.

    Attributes:
      table: the residency table.
    """

    def __init__(self, pool: HostPool, table: SlotTable, policy: Policy):
        self.table = table
        self._pool = pool
        self._policy = policy

    def memory(self, slot: int) -> Weights:
        """The arrays of a slot."""
        return self._pool.slot(slot)

    def use(self, record: Record, step: int) -> None:
        """The record is wanted in this step."""
        self._policy.use(step, record.layer, np.array([record.expert]))

    def make_room(self, record: Record, step: int, used: Collection[int]) -> int:
        """A slot for a record that has none, and none of those that are in use. What lay there is forgotten."""
        slot = self.table.empty_slot(but=used)
        if slot is None:
            slots, layers, experts = self.table.listed(but=used)
            slot = int(slots[self._policy.worth(step, record.layer, layers, experts).argmin()])
            self.table.clear(slot)
        return slot

    def fill(self, record: Record, slot: int) -> None:
        """The slot holds the record from now on."""
        self.table.put(record, slot)

    def close(self) -> None:
        """Frees the memory."""
        self._pool.close()
