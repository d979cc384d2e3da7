"""Which record leaves when a slot is needed. Small objects that know uses and nothing else, neither weights nor time.

Time is counted in steps of the model (decode steps and prefill passes) and, within one, in layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Policy(Protocol):
    """Watches what is used, and says what to evict."""

    def use(self, step: int, layer: int, experts: np.ndarray) -> None:
        """The layer uses these experts, int `[n]`, in this step."""

    def victim(self, step: int, layer: int, layers: np.ndarray, experts: np.ndarray) -> int:
        """Which of some records, int `[n]` each, leaves: its index. Something of `layer` comes in, in this step."""


class LRU:
    """The record whose last use is the longest ago."""

    def __init__(self, layers: int, experts: int):
        self._last = np.full((layers, experts), -1, np.int64)
        self._layers = layers

    def use(self, step: int, layer: int, experts: np.ndarray) -> None:
        """Remembers when."""
        self._last[layer, experts] = step * self._layers + layer

    def victim(self, step: int, layer: int, layers: np.ndarray, experts: np.ndarray) -> int:
        """The oldest one."""
        return int(np.argmin(self._last[layers, experts]))


class Decayed:
    """The record with the lowest decayed count of uses; of equal ones that whose layer comes round last.

    A use counts 1 in its step and less by a factor with every step after it. The factor grows with the steps seen: at
    first the age of the last use decides, as in LRU, later how often a record is used. Ties are what plain LRU lacks:
    with fewer slots than one step touches it evicts each record just before its turn.
    """

    def __init__(self, layers: int, experts: int):
        self._count = np.zeros((layers, experts))
        self._at = np.zeros((layers, experts), np.int64)
        self._layers = layers
        self._steps = 0
        self._now = -1

    def use(self, step: int, layer: int, experts: np.ndarray) -> None:
        """Counts a use."""
        if step != self._now:
            self._now = step
            self._steps += 1
        self._count[layer, experts] = self._decayed(step, layer, experts) + 1.0
        self._at[layer, experts] = step

    def victim(self, step: int, layer: int, layers: np.ndarray, experts: np.ndarray) -> int:
        """The least wanted one."""
        count = self._decayed(step, layers, experts)
        lowest = np.flatnonzero(count == count.min())
        waits = (layers[lowest] - layer - 1) % self._layers
        return int(lowest[np.argmax(waits)])

    def _decayed(self, step: int, layers: np.ndarray | int, experts: np.ndarray) -> np.ndarray:
        factor = min(_SLOWEST, 1.0 - 1.0 / (self._steps + 1))
        return self._count[layers, experts] * factor ** (step - self._at[layers, experts])


_SLOWEST = 0.95
"""Between 0.9, which is better on some recorded routings, and 0.97, which is better on others."""


POLICIES: dict[str, Callable[[int, int], Policy]] = {"decayed": Decayed, "lru": LRU}
"""Every policy, by the name that options give it, for so many layers and experts."""
