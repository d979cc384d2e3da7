"""Whether prefetching helps, judged by how long steps take. Knows times alone."""

from __future__ import annotations

from statistics import median

TRIAL = 16
"""Steps of a trial, every other one without prefetching."""

TERM = 128
"""Steps until the next trial."""


class Governor:
    """Switches prefetching off where steps are quicker without it.

    What is fetched ahead of its need costs the link, the memory and often the processor something, needed or not, and
    how much that is against what it hides depends on the machine, the model and the text: so it is tried, now and then.

    Attributes:
      allows: whether to prefetch in the step at hand.
    """

    def __init__(self) -> None:
        self.allows = True
        self._with: list[float] = []
        self._without: list[float] = []
        self._term = 0

    def took(self, seconds: float) -> None:
        """The step at hand has ended, after so long."""
        if self._term:
            self._term -= 1
            self.allows |= not self._term
            return
        (self._with if self.allows else self._without).append(seconds)
        self.allows = not self.allows
        if len(self._without) == TRIAL // 2:
            self.allows = median(self._with) <= median(self._without)
            self._with, self._without, self._term = [], [], TERM
