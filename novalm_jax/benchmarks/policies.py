"""What a policy and its table cost a step: the simulator's steps, which are the engine's bookkeeping, on a clock.

Of a step all is counted that decides: uses, lookups, ranking what may leave, once for each layer that misses something,
and the changes of the table. Nothing is moved or computed. The first steps, in which slots fill, are not measured.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from novalm_jax.errors import OptionError
from novalm_jax.experts.simulation import Setting
from novalm_jax.experts.simulator import Cache
from novalm_jax.experts.traces import Trace
from novalm_jax.options import PolicyBenchOptions, SimulateOptions
from novalm_jax.tables import aligned

_FOOT = "ms: processor time of policy and table in a step, median, least and most of the rounds."
_STEP = (
    "step: what its uploads take on the link, or its computing, the longer one of both; the shortest that there can be."
)


@dataclass(frozen=True)
class Cost:
    """One line of the table.

    Attributes:
      policy: its name.
      slots: how many there are.
      hit_rate: of the steps that were measured.
      seconds: of policy and table in a step, in each round.
      step_seconds: of a whole step, as said below the table; None without a link.
    """

    policy: str
    slots: int
    hit_rate: float
    seconds: tuple[float, ...]
    step_seconds: float | None

    @property
    def part(self) -> float | None:
        """What a step spends on it, in the median round."""
        return None if not self.step_seconds else median(self.seconds) / self.step_seconds

    def columns(self) -> tuple[str, ...]:
        """As people read it."""
        times = (f"{1e3 * time:.3f}" for time in (median(self.seconds), min(self.seconds), max(self.seconds)))
        step = "" if self.step_seconds is None else f"{1e3 * self.step_seconds:.2f}"
        part = "" if self.part is None else f"{100 * self.part:.2f} %"
        return self.policy, str(self.slots), f"{100 * self.hit_rate:.1f} %", *times, step, part


@dataclass(frozen=True)
class PolicyCosts:
    """All lines, and what they were measured with."""

    trace: str
    layers: int
    experts: int
    how: PolicyBenchOptions
    costs: tuple[Cost, ...]

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return asdict(self) | {"costs": [asdict(cost) | {"part": cost.part} for cost in self.costs]}

    def __str__(self) -> str:
        heads = ("policy", "slots", "hits", "ms", "least", "most", "step", "share of it")
        rows = [heads, *(cost.columns() for cost in self.costs)]
        # Without a link nothing is known of a whole step.
        columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
        head = f"trace    {self.trace}: {self.layers} layers of {self.experts} experts"
        foot = [_FOOT] if len(columns) < len(heads) else [_FOOT, _STEP]
        return "\n".join([head, "", *aligned([*zip(*columns, strict=True)]), "", *foot])


def measure_policies(trace: Trace, options: SimulateOptions, how: PolicyBenchOptions) -> PolicyCosts:
    """Runs the steps of a trace through caches of all policies and sizes, in turns.

    Raises:
      OptionError: the trace has too few steps, or as `simulate`.
    """
    setting = Setting.of(trace, options)
    if len(setting.events) < how.all_steps:
        raise OptionError(
            f"steps: warm_up {how.warm_up} + rounds {how.rounds} x steps {how.steps} are run, and {trace.name} has "
            f"{len(setting.events)} steps. Give fewer of these, or a longer trace."
        )
    cells = setting.cells()
    caches = [Cache(*setting.cache(*cell), options.admission) for cell in cells]
    for cache in caches:
        _run(cache, setting, range(how.warm_up))
    before = [cache.counted() for cache in caches]
    seconds: list[list[float]] = [[] for _ in cells]
    for number in range(how.rounds):
        start = how.warm_up + number * how.steps
        turns = list(zip(caches, seconds, strict=True))
        # Neither always comes second.
        for cache, times in turns if number % 2 == 0 else reversed(turns):
            times.append(_run(cache, setting, range(start, start + how.steps)) / how.steps)
    costs = []
    for (name, _), cache, earlier, times in zip(cells, caches, before, seconds, strict=True):
        found = cache.counted()
        needed, missed = (found.needed - earlier.needed).sum(), (found.missed - earlier.missed).sum()
        step = setting.step_ms((found.uploads - earlier.uploads) / (how.rounds * how.steps))
        costs.append(
            Cost(name, found.slots, float(1 - missed / needed), tuple(times), None if step is None else step[1] / 1e3)
        )
    return PolicyCosts(trace.name, *setting.shape, how, tuple(costs))


def _run(cache: Cache, setting: Setting, steps: range) -> float:
    """Seconds of processor time that these steps took: what else runs on the machine counts less."""
    start = time.thread_time()
    for step in steps:
        cache.step(step, setting.events[step])
    return time.thread_time() - start
