"""The way to the device: as fast as it is, or made to look like a slower one. Knows bytes and times alone."""

from __future__ import annotations

import threading


class Link:
    """What everything that is uploaded goes over. Any thread may call it.

    Attributes:
      rate: bytes a second; None for what there is. May be changed.
    """

    def __init__(self, rate: float | None = None):
        """As the attribute."""
        self.rate = rate
        self._lock = threading.Lock()
        self._free = 0.0

    def arrival(self, nbytes: int, begin: float) -> float:
        """When bytes that are sent at `begin` have arrived at the earliest, both on `time.perf_counter`'s clock: one
        thing after another, as over a bus."""
        if (rate := self.rate) is None:
            return begin
        with self._lock:
            self._free = max(self._free, begin) + nbytes / rate
            return self._free
