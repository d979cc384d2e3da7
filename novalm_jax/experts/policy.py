"""Which record leaves when a slot is needed. Small objects that know uses and nothing else, neither weights nor tiers.

Time is counted in steps of the model (decode steps and prefill passes) and, within one, in layers. Of an event, a layer
of a step, a policy hears all uses at once, and before anything leaves for what it misses; what it uses leaves last. The
engine and the simulator use the same objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Policy(Protocol):
    """Watches what is used, and says how much records are worth keeping."""

    def seed(self, rates: np.ndarray) -> None:
        """How often records were used in earlier runs, float64 `[layers, experts]`, a part of tokens. Comes first."""

    def use(self, step: int, layer: int, experts: np.ndarray) -> None:
        """The layer uses these experts, int `[n]` without repetition, in this step."""

    def worth(self, step: int, layer: int, layers: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Of some records, int `[n]` each, a new float64 `[n]`: the one with the lowest leaves first, and of equal ones
        the first. Something of `layer` comes in, in this step. But for `LRU`, whose worth is an order alone, it is at
        least 0, and twice as much is worth twice as much: uses, or uses a step."""


def lowest(worth: np.ndarray, count: int) -> np.ndarray:
    """The indices of the so many lowest of float `[n]`, or of all, the lowest first and of equal ones the first. What
    may not leave is infinite, and not among them."""
    if count > _FEW:
        last = min(count, len(worth)) - 1
        (near,) = (worth <= np.partition(worth, last)[last]).nonzero()
        order = near[worth[near].argsort(kind="stable")][:count]
        return order[worth[order] < np.inf]
    left, found = worth.copy(), []
    for _ in range(min(count, len(worth))):
        at = left.argmin()
        if left[at] == np.inf:
            break
        found.append(at)
        left[at] = np.inf
    return np.array(found, np.int64)


def admit(arriving: np.ndarray, held: np.ndarray, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """Which records get whose slots, where those that get none can as well be computed elsewhere; in the simulator, as
    the engine computes nothing elsewhere.

    All are weighed at once: the one that is worth most against the one that is worth least, the next against the next,
    and it gets that slot if it is worth more than `margin` times as much.

    Args:
      arriving: float `[n]`, what records without a slot are worth.
      held: float `[m]`, what those are worth that have one; negative for an empty slot, and infinite where nobody may
        leave.
      margin: of 1, whatever is worth more comes in; of more, fewer are moved for nearly the same hits.

    Returns:
      Indices into `arriving` and, side by side, into `held`: int `[a]` each.
    """
    best, least = lowest(-arriving, len(held)), lowest(held, len(arriving))
    count = min(len(best), len(least))
    best, least = best[:count], least[:count]
    comes = arriving[best] > margin * held[least]
    return best[comes], least[comes]


class LRU:
    """The record whose last use is the longest ago leaves; of one event, the lower number.

    With fewer slots than a step touches, each record leaves just before its turn, and there is no hit at all.
    """

    def __init__(self, layers: int, experts: int):
        self._last = np.zeros((layers, experts), np.int64)

    def seed(self, rates: np.ndarray) -> None:
        """As if all were used before the first step, the most used ones last."""
        order = np.argsort(rates, axis=None, kind="stable")
        self._last.reshape(-1)[order] = np.arange(rates.size)

    def use(self, step: int, layer: int, experts: np.ndarray) -> None:
        """Remembers when."""
        layers, count = self._last.shape
        self._last[layer][experts] = ((step + 1) * layers + layer) * count + experts

    def worth(self, step: int, layer: int, layers: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """The time of the last use, which says who is newer, and not how much more that is worth."""
        return self._last[layers, experts].astype(np.float64)


class LFU:
    """The record with the fewest uses leaves; of equal ones that which was used the longest ago."""

    def __init__(self, layers: int, experts: int):
        self._count = np.zeros((layers, experts))
        self._last = np.zeros((layers, experts))

    def seed(self, rates: np.ndarray) -> None:
        """Less than a use that is seen."""
        self._count[...] = rates

    def use(self, step: int, layer: int, experts: np.ndarray) -> None:
        """Counts a use."""
        self._count[layer][experts] += 1
        self._last[layer][experts] = step

    def worth(self, step: int, layer: int, layers: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """The count, and less than 1 for how new the last use is."""
        return np.asarray(self._count[layers, experts] + self._last[layers, experts] / (step + 1.0))


class Decayed:
    """The record with the lowest decayed count of uses leaves; of equal ones that whose layer comes round last.

    A use counts 1 in its step and less by a factor with every step after it. The factor grows with the steps seen: at
    first the age of the last use decides, as in LRU, later how often a record is used. Ties are what plain LRU lacks:
    with fewer slots than one step touches it evicts each record just before its turn.
    """

    def __init__(self, layers: int, experts: int):
        self._way = _way(layers)
        self._count = np.zeros((layers, experts))
        self._at = np.zeros((layers, experts), np.int64)
        self._steps = 0
        self._now = -1

    def seed(self, rates: np.ndarray) -> None:
        """Less than a use that is seen."""
        self._count[...] = rates

    def use(self, step: int, layer: int, experts: np.ndarray) -> None:
        """Counts a use."""
        if step != self._now:
            self._now = step
            self._steps += 1
        self._count[layer][experts] = self._decayed(step, layer, experts) + 1.0
        self._at[layer][experts] = step

    def worth(self, step: int, layer: int, layers: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """The count as it is now, and next to nothing for how soon its layer comes round."""
        return self._decayed(step, layers, experts) + _TIE * (1 - self._way[layer][layers])

    def _decayed(self, step: int, layers: np.ndarray | int, experts: np.ndarray) -> np.ndarray:
        factor = min(_SLOWEST, 1.0 - 1.0 / (self._steps + 1))
        return np.asarray(self._count[layers, experts] * factor ** (step - self._at[layers, experts]))


class Expected:
    """The record that is expected to be unused for longest leaves: the default.

    A record is next used after `way + 1 / rate` steps: `way` is the part of a step until its layer comes round, and
    `rate` the part of its visits in which it is used. Three rates are kept, means that forget by a half, a tenth and a
    hundredth with every step, and 0.1, 0.4 and 0.5 of them are added, for what the last words, the text and the model
    say; and 0.02, so that what was not used for long is not beyond all others. So

        worth = 1 / (way + 1 / (0.02 + sum of shares of rates))

    Of records with equal rates that leaves whose layer comes round last, as below one step's worth of slots it must.
    Within a step the uses of an event count at once, and those of other records when the next step begins. A mean is
    over the steps that there were, so that nothing has to be known at first: after one step all three are what that
    step used. Prefill passes are steps, whose last tokens count.

    The numbers were chosen on recorded routing of gpt-oss-20b, DeepSeek-V2-Lite, Qwen3-30B-A3B and Gemma-4-26B-A4B. Of
    seven choices of paces and shares that were tried, the mean hit rates were within 0.004 of each other.
    """

    def __init__(self, layers: int, experts: int):
        self._way = _way(layers)
        self._mean = np.zeros((len(_KEEP), layers, experts))
        # What a record would have that was used in every step so far: less than 1 at first.
        self._full = np.zeros((len(_KEEP), 1, 1))
        self._used = np.zeros((layers, experts), bool)
        # Visits of its layer until a record is used, and what that is once this step uses it.
        self._visits = np.full((layers, experts), 1 / _RARE)
        self._visits_if_used = self._visits
        self._step: int | None = None

    def seed(self, rates: np.ndarray) -> None:
        """As if it had been so for long."""
        self._mean[...] = rates
        self._full[...] = 1.0
        self._visits = _visits(self._mean, self._full)

    def use(self, step: int, layer: int, experts: np.ndarray) -> None:
        """Raises their rates."""
        if step != self._step:
            self._begin(step)
        # Indexing a row is several times quicker than naming row and column.
        self._used[layer][experts] = True
        self._visits[layer][experts] = self._visits_if_used[layer][experts]

    def worth(self, step: int, layer: int, layers: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """1 / steps until the next use."""
        return np.asarray(1 / (self._way[layer][layers] + self._visits[layers, experts]))

    def _begin(self, step: int) -> None:
        if self._step is not None:
            self._mean *= _KEEP
            self._mean += (1 - _KEEP) * self._used
            self._full = self._full * _KEEP + (1 - _KEEP)
            self._visits = _visits(self._mean, self._full)
        self._visits_if_used = _visits(self._mean * _KEEP + (1 - _KEEP), self._full * _KEEP + (1 - _KEEP))
        self._used[...] = False
        self._step = step


POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "default": Expected,
    "decayed": Decayed,
    "lfu": LFU,
    "lru": LRU,
}
"""Every policy, by the name that options give it, for so many layers and experts."""

_FEW = 16
"""Of a few thousand numbers so many are found more quickly one after the other than by sorting all."""

_SLOWEST = 0.95
"""Between 0.9, which is better on some recorded routings, and 0.97, which is better on others."""

_TIE = 1e-9
"""Less than what two counts differ by."""

_KEEP = np.array([0.5, 0.9, 0.99])[:, None, None]
_SHARES = np.array([0.1, 0.4, 0.5])
_RARE = 0.02


def _visits(mean: np.ndarray, full: np.ndarray) -> np.ndarray:
    """1 / rate of records, `[layers, experts]`, of means `[3, layers, experts]`."""
    weights = _SHARES / full.reshape(-1)
    return np.asarray(1 / (_RARE + (weights @ mean.reshape(len(mean), -1)).reshape(mean.shape[1:])))


def _way(count: int) -> np.ndarray:
    """From each layer, the part of a step until each other comes round, and itself last: float `[count, count]`."""
    layers = np.arange(count)
    return np.asarray((layers - layers[:, None] - 1) % count / count)
