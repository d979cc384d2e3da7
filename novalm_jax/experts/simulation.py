"""Caches of several sizes and policies on one trace, side by side, and what they would make of a token's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from novalm_jax.errors import OptionError
from novalm_jax.experts.policy import POLICIES, Policy
from novalm_jax.experts.simulator import Belady, Events, Replay, events_of, replay
from novalm_jax.experts.slots import SlotTable
from novalm_jax.experts.traces import Trace
from novalm_jax.options import SimulateOptions
from novalm_jax.tables import aligned
from novalm_jax.units import format_size

_FOOT = (
    "a token: of the trace, so that rows of one step share what it fetches. ms a step: what it takes with all experts",
    "on the device, and then what it misses on the link, one after the other; all hidden: the longer one of both.",
)


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
      policy: its name.
      slots: how many there are.
      hit_rate: hits, as a part of the experts that layers of steps need.
      misses, evictions: for each token.
      bytes: that are uploaded for each token; None where nobody said how large an expert is.
      serial_ms, hidden_ms: of a step, as said below the table; None without a link.
    """

    policy: str
    slots: int
    hit_rate: float
    misses: float
    evictions: float
    bytes: float | None
    serial_ms: float | None
    hidden_ms: float | None

    def columns(self) -> tuple[str, ...]:
        """As people read it."""
        moved = "" if self.bytes is None else format_size(round(self.bytes))
        times = ("" if time is None else f"{time:.2f}" for time in (self.serial_ms, self.hidden_ms))
        return self.policy, str(self.slots), f"{100 * self.hit_rate:.1f} %", f"{self.misses:.2f}", moved, *times


@dataclass(frozen=True)
class Simulation:
    """All cells, in the order of the options, and what they were computed from."""

    trace: str
    options: SimulateOptions
    tokens: int
    steps: int
    layers: int
    experts: int
    cells: tuple[Cell, ...]

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return {name: getattr(self, name) for name in ("trace", "tokens", "steps", "layers", "experts")} | {
            "options": vars(self.options),
            "cells": [vars(cell) for cell in self.cells],
        }

    def __str__(self) -> str:
        heads = ("policy", "slots", "hits", "misses a token", "moved a token", "ms a step", "all hidden")
        rows = [heads, *(cell.columns() for cell in self.cells)]
        # Columns that nothing is known of are left out.
        columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
        lines = aligned([*zip(*columns, strict=True)])
        pool = "one pool for all layers" if self.options.pool == "global" else "as many slots in each layer"
        head = (
            f"trace    {self.trace}: {self.tokens} tokens in {self.steps} steps, {self.layers} layers of "
            f"{self.experts} experts\npool     {pool}"
        )
        return "\n".join([head, "", *lines, "", *_FOOT])


def simulate(trace: Trace, options: SimulateOptions) -> Simulation:
    """Replays a trace for every policy and number of slots.

    Raises:
      OptionError: a link, and nothing says how large an expert is.
    """
    record_bytes, link = options.sizes
    record_bytes = record_bytes or trace.record_bytes
    if link is not None and record_bytes is None:
        raise OptionError("link: it takes the size of an expert to say how long one takes; add record_bytes (9MB).")
    events = events_of(trace, options.batch)
    tokens, layers, _ = trace.experts.shape
    experts = trace.num_experts
    cells = []
    for name in options.policies:
        for slots in options.slots_of(layers * experts):
            found = replay(
                events,
                _policy(name, layers, experts, events),
                _tables(options.pool, layers, experts, slots),
                f"{name}, {slots} slots",
            )
            cells.append(_cell(name, found, tokens, len(events), record_bytes, link, options.compute_ms))
    return Simulation(trace.name, options, tokens, len(events), layers, experts, tuple(cells))


def _policy(name: str, layers: int, experts: int, events: Events) -> Policy:
    return Belady(layers, experts, events) if name == "belady" else POLICIES[name](layers, experts)


def _tables(pool: str, layers: int, experts: int, slots: int) -> Sequence[SlotTable]:
    if pool == "global":
        return [SlotTable(layers, experts, slots)]
    each = min(experts, max(1, round(slots / layers)))
    return [SlotTable(layers, experts, each) for _ in range(layers)]


def _cell(
    name: str, found: Replay, tokens: int, steps: int, record_bytes: int | None, link: int | None, compute_ms: float
) -> Cell:
    misses = int(found.missed.sum())
    moving = None if link is None or record_bytes is None else 1e3 * misses * record_bytes / link / steps
    return Cell(
        policy=name,
        slots=found.slots,
        hit_rate=found.hit_rate,
        misses=misses / tokens,
        evictions=found.evictions / tokens,
        bytes=None if record_bytes is None else misses * record_bytes / tokens,
        serial_ms=None if moving is None else compute_ms + moving,
        hidden_ms=None if moving is None else max(compute_ms, moving),
    )
