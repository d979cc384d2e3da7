"""How much of a resident model's speed is left: by slots on the device, by speed of the link, and by prefetching.

For each number of slots two runs say what a cell is compared with. `compute` is the time of a token with all experts on
the device. `missed` are the bytes of the experts that have no slot when a token needs them, without prefetching and
without a limit on the link. A cell of ratio r has a link on which `missed` take r times `compute`:

    link = missed / (r * compute)        ideal = max(compute, missed / link) = max(1, r) * compute

`ideal` is the time of a token whose uploads all hide behind computing, or the other way round; `of_ideal` is the part
of that speed that was reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from novalm_jax.benchmarks.replaying import ReplayingLLM
from novalm_jax.benchmarks.running import FIRST, Counted, count_decode, random_prompts
from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.engine.llm import LLM
from novalm_jax.engine.placement import place
from novalm_jax.engine.streamed_programs import StreamedPrograms
from novalm_jax.errors import BudgetError, OptionError
from novalm_jax.experts.records import count_records, moe_layers
from novalm_jax.experts.traces import read_trace
from novalm_jax.options import EngineOptions, RoutingOptions, SweepOptions
from novalm_jax.tables import aligned
from novalm_jax.units import format_size

_FOOT = (
    "ratio: time of the bytes that a token misses without prefetching, on this link, in units of the time of a token",
    "with all experts on the device. of ideal: speed as a part of what the longer one of both times allows.",
    "prefetching: steps that did so, as a part of all; where they take longer than the others it is switched off.",
)


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
      percent: slots that were asked for, of all experts.
      slots: how many there were, at least what a token chooses in a layer.
      ratio: of the link, as the module says; None where all experts are on the device.
      link: its bytes a second; None for what there is, where nothing is missed.
      prefetch: "off", "lookahead", "oracle", or "resident" where all experts are on the device.
      ideal_seconds: of a token.
      seconds: of a token, in each round.
      counters: what `Report` counted for a token, by name, the mean of all rounds.
    """

    percent: float
    slots: int
    ratio: float | None
    link: float | None
    prefetch: str
    ideal_seconds: float
    seconds: tuple[float, ...]
    counters: dict[str, float]

    @property
    def rate(self) -> float:
        """Tokens a second, in the median round."""
        return 1 / median(self.seconds)

    @property
    def hit_rate(self) -> float:
        """Needed experts that were on the device, as a part of all."""
        hits, misses = (self.counters[name] for name in ("expert_hits", "expert_misses"))
        return hits / (hits + misses) if hits + misses else 1.0

    @property
    def prefetching(self) -> float:
        """Steps that prefetched, as a part of all: where it does not help, it is switched off."""
        prefetches = self.prefetch in ("lookahead", "oracle")
        return 1 - self.counters["steps_without_prefetch"] if prefetches else 0.0

    @property
    def of_ideal(self) -> float:
        """Speed as a part of the ideal one."""
        return self.ideal_seconds * self.rate

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        derived = ("hit_rate", "prefetching", "of_ideal")
        return asdict(self) | {"tokens_per_second": self.rate} | {name: getattr(self, name) for name in derived}

    def columns(self) -> tuple[str, ...]:
        """As people read it."""
        ratio = "" if self.ratio is None else f"{self.ratio:g}"
        link = "" if self.link is None else f"{format_size(round(self.link))}/s"
        parts = (f"{100 * part:.1f} %" for part in (self.hit_rate, self.prefetching))
        figures = f"{self.rate:.1f}", *parts, f"{self.of_ideal:.2f}"
        return f"{self.percent:g} %", str(self.slots), ratio, link, self.prefetch, *figures


@dataclass(frozen=True)
class Sweep:
    """All cells, in the order of the options, and what they were measured with."""

    model: str | None
    routing: RoutingOptions
    options: SweepOptions
    records: int
    cells: tuple[Cell, ...]

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return asdict(self) | {"cells": [cell.to_dict() for cell in self.cells]}

    def __str__(self) -> str:
        heads = ("slots", "of them", "ratio", "link", "prefetch", "tokens/s", "hits", "prefetching", "of ideal")
        rows = [heads, *(cell.columns() for cell in self.cells)]
        options = self.options
        head = [
            f"model    {self.model or 'the one in this package'} ({options.dtype}, {options.policy}), {self.records} "
            "experts",
            f"routing  {str(self.routing) or 'of the model itself'}",
            f"tokens   {options.tokens} after {options.warm_up}, medians of {options.rounds}",
        ]
        return "\n".join([*head, "", *aligned(rows), "", *_FOOT])


def measure_sweep(model: str | Path | None, routing: RoutingOptions, options: SweepOptions) -> Sweep:
    """Measures every cell. Cells with the same slots share a model, and take turns in rounds.

    Raises:
      OptionError, CheckpointError, ConfigError, BudgetError: as `Sweeper`.
    """
    sweeper = Sweeper(model, routing, options)
    cells = [cell for percent in options.percents for cell in sweeper.cells(percent)]
    return Sweep(None if model is None else str(model), routing, options, sweeper.records, tuple(cells))


class _Link(NamedTuple):
    """A link, and how long a token takes on it at best."""

    ratio: float | None
    rate: float | None
    ideal_seconds: float


class Sweeper:
    """One model, and how its cells are measured.

    Attributes:
      checkpoint: the model.
      records: its experts.
    """

    def __init__(self, model: str | Path | None, routing: RoutingOptions, options: SweepOptions):
        """Opens a checkpoint, None for the one in this package.

        Raises:
          OptionError: the recording does not fit the model, or nothing can be streamed. Cells raise it, too, where
            there is no room for all experts.
          CheckpointError, ConfigError, BudgetError: as `LLM`.
        """
        recorded = None if routing.routing is None else read_trace(routing.routing)
        self.checkpoint = Checkpoint.open(model)
        if not moe_layers(self.checkpoint.config):
            raise OptionError("model: it has no routed experts, so that nothing streams.")
        if recorded is not None:
            recorded.fit(self.checkpoint.config)
        self._model = self.checkpoint.folder
        self.records = count_records(self.checkpoint.config)
        self._recorded = recorded
        accuracy = routing.accuracy
        # Where its own routers choose, the model's own lookahead predicts.
        self._accuracy = {"off": None, "lookahead": None if recorded is None else accuracy, "oracle": 1.0}
        self._options = options
        self._before = FIRST + options.warm_up
        self._engine = EngineOptions(
            host_memory=options.host_memory,
            dtype=options.dtype,
            context_length=options.prompt_tokens + self._before + options.tokens,
            max_batch=1,
            policy=options.policy,
            dense_weights="device",
        )

    def cells(self, percent: float) -> list[Cell]:
        """All cells with slots for this part of the experts, after a resident run to compare them with."""
        resident = self._resident()
        compute = median(run.seconds for run in resident) / self._options.tokens
        if percent == 100:
            return [self._cell(percent, self.records, "resident", _Link(None, None, compute), resident)]
        memory = memory_for_slots(self.checkpoint, round(percent / 100 * self.records), self._engine)
        engine = replace(self._engine, device_memory=memory)
        with closing(ReplayingLLM(self._model, self._recorded, **asdict(engine))) as llm:
            missed, slots = self._missed_bytes(llm), llm.replaying.programs.slots
            links = [_link(ratio, compute, missed) for ratio in self._options.link_ratios]
            return [
                self._cell(percent, slots, way, link, runs) for (link, way), runs in self._in_turns(llm, links).items()
            ]

    def _resident(self) -> list[Counted]:
        with LLM(self._model, **asdict(self._engine)) as llm:
            if llm.report().policy != "resident":
                raise OptionError(
                    "model: there is no room on the device for all of its experts, and so no run that others could be "
                    "compared with. Measure a smaller one, or with more memory."
                )
            self._run(llm)
            return [self._run(llm) for _ in range(self._options.rounds)]

    def _missed_bytes(self, llm: ReplayingLLM) -> float:
        """What a token misses without prefetching. A run that nobody counts comes first; where there is no recording,
        what routers choose in it is replayed from then on."""
        executor = llm.replaying
        executor.set_prefetch(False, None)
        self._run(llm)
        if self._recorded is None:
            executor.replay(executor.seen)
        counted = self._run(llm)
        return counted.counters["expert_misses"] / self._options.tokens * executor.programs.record_bytes

    def _in_turns(self, llm: ReplayingLLM, links: Sequence[_Link]) -> dict[tuple[_Link, str], list[Counted]]:
        """Runs every cell in every round, in one order and the other."""
        runs: dict[tuple[_Link, str], list[Counted]] = {(link, way): [] for link in links for way in self._options.ways}
        with tqdm(total=len(runs) * self._options.rounds, desc="cells", disable=None) as bar:
            for number in range(self._options.rounds):
                for (link, way), done in runs.items() if number % 2 == 0 else reversed(runs.items()):
                    llm.replaying.set_link(link.rate)
                    llm.replaying.set_prefetch(way != "off", self._accuracy[way])
                    done.append(self._run(llm))
                    bar.update()
        return runs

    def _run(self, llm: LLM) -> Counted:
        """The same tokens each time."""
        prompt = random_prompts(llm, self._options.prompt_tokens)[0]
        if isinstance(llm, ReplayingLLM):
            llm.replaying.start_over()
        return count_decode(llm, prompt, self._before, self._options.tokens)

    def _cell(self, percent: float, slots: int, prefetch: str, link: _Link, runs: Sequence[Counted]) -> Cell:
        tokens = self._options.tokens
        return Cell(
            percent=percent,
            slots=slots,
            ratio=link.ratio,
            link=link.rate,
            prefetch=prefetch,
            ideal_seconds=link.ideal_seconds,
            seconds=tuple(run.seconds / tokens for run in runs),
            counters={name: sum(run.counters[name] for run in runs) / len(runs) / tokens for name in runs[0].counters},
        )


def _link(ratio: float, compute: float, missed: float) -> _Link:
    """For a token of `compute` seconds and `missed` bytes."""
    if not missed:
        return _Link(ratio, None, compute)
    return _Link(ratio, missed / (ratio * compute), max(1.0, ratio) * compute)


def memory_for_slots(checkpoint: Checkpoint, slots: int, engine: EngineOptions) -> int:
    """The `device_memory`, in bytes, that a model runs in with so many of its experts on the device, and no fewer.

    Raises:
      OptionError: the model takes less as a whole than so, or `engine` asks for what cannot be served.
    """
    try:
        placement = place(checkpoint, replace(engine, device_memory=1))
    except BudgetError as error:
        memory = error.least_bytes
        placement = place(checkpoint, replace(engine, device_memory=memory))
    while isinstance(placement.programs, StreamedPrograms):
        lacking = slots - placement.programs.slots
        if lacking <= 0:
            return memory
        # Not all of what is added need become slots.
        memory += lacking * placement.programs.record_bytes
        placement = place(checkpoint, replace(engine, device_memory=memory))
    raise OptionError(
        f"slots: {checkpoint.folder.name} takes less device memory as a whole than with slots for {slots} of its "
        f"{count_records(checkpoint.config)} experts. Give fewer."
    )
