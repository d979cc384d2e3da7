"""Whether a plan comes true: forecasts of decoding beside runs, for several numbers of slots.

Runs are those of a sweep. Before and after those with one number of slots the machine is measured, as `plan --measure`
does it. The forecast takes the mean of both, the link of the run, and the experts that it needed and missed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from novalm_jax.benchmarks.running import FIRST
from novalm_jax.benchmarks.sweeping import Cell, Sweeper
from novalm_jax.engine.forecast import Forecaster, Needs
from novalm_jax.engine.machine import Machine
from novalm_jax.engine.probing import Probe
from novalm_jax.options import ComparePlanOptions, RoutingOptions
from novalm_jax.tables import aligned

CLOSE = 0.3
"""A forecast within this part of what was measured is a good one."""


@dataclass(frozen=True)
class Compared:
    """A run, the machine as it was around it, and the forecast in tokens a second."""

    cell: Cell
    machine: Machine
    forecast: float

    @property
    def ratio(self) -> float:
        """The forecast as a part of what was measured."""
        return self.forecast / self.cell.rate

    @property
    def close(self) -> bool:
        """Whether it is a good one."""
        return abs(self.ratio - 1) <= CLOSE

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        figures = {"forecast_tokens_per_second": self.forecast, "forecast_of_measured": self.ratio}
        return {**self.cell.to_dict(), "machine": self.machine.to_dict(), **figures, "close": self.close}

    def columns(self) -> tuple[str, ...]:
        """As people read it."""
        percent, slots, ratio, link, prefetch, rate, hits, *_ = self.cell.columns()
        return percent, slots, ratio, link, prefetch, hits, f"{self.forecast:.1f}", rate, f"{self.ratio:.2f}"


@dataclass(frozen=True)
class PlanComparison:
    """All runs, in the order of the options."""

    model: str | None
    routing: RoutingOptions
    options: ComparePlanOptions
    runs: tuple[Compared, ...]

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return asdict(self) | {"runs": [run.to_dict() for run in self.runs]}

    def __str__(self) -> str:
        heads = ("slots", "of them", "ratio", "link", "prefetch", "hits", "forecast", "measured", "ratio of both")
        close = sum(run.close for run in self.runs)
        head = [
            f"model    {self.model or 'the one in this package'} ({self.options.dtype})",
            f"routing  {str(self.routing) or 'of the model itself'}",
            f"tokens   {self.options.tokens} after {self.options.warm_up}, medians of {self.options.rounds}",
        ]
        foot = f"tokens/s; {close} of {len(self.runs)} forecasts are within {100 * CLOSE:.0f} % of what was measured"
        return "\n".join([*head, "", *aligned([heads, *(run.columns() for run in self.runs)]), "", foot])


def compare_plan(model: str | Path | None, routing: RoutingOptions, options: ComparePlanOptions) -> PlanComparison:
    """Measures every run, and the machine around those of each number of slots.

    Raises:
      OptionError, CheckpointError, ConfigError, BudgetError: as `Sweeper`; OptionError also as `Probe`.
    """
    sweeper = Sweeper(model, routing, options)
    config, dtype = sweeper.checkpoint.config, np.dtype(jnp.dtype(options.dtype))
    probe = Probe(config, options.dtype, 1)
    before = options.prompt_tokens + FIRST + options.warm_up + options.tokens // 2
    runs, earlier = [], probe.time()
    for percent in options.percents:
        cells, later = sweeper.cells(percent), probe.time()
        machine = probe.machine({name: (earlier[name] + later[name]) / 2 for name in later})
        earlier = later
        for cell in cells:
            link = min(machine.link, cell.link or machine.link)
            forecaster = Forecaster(config, dtype, probe.record_bytes, replace(machine, link=link))
            runs.append(Compared(cell, machine, _forecast(forecaster, cell, before)))
    return PlanComparison(None if model is None else str(model), routing, options, tuple(runs))


def _forecast(forecaster: Forecaster, cell: Cell, before: int) -> float:
    """Tokens a second, after so many."""
    if cell.prefetch == "resident":
        return forecaster.resident_step(1, before).rate
    hits, misses, read = (cell.counters[name] for name in ("expert_hits", "expert_misses", "disk_bytes_read"))
    needs = Needs(hits + misses, misses, read / forecaster.record_bytes)
    return forecaster.streamed_step(1, before, needs).rate
