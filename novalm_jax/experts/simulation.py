"""Caches of several sizes and policies on one trace, side by side, and what they would make of a token's time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from novalm_jax.errors import OptionError
from novalm_jax.experts.curves import fit_slots, lru_hit_rates, lru_hits
from novalm_jax.experts.policy import POLICIES, Policy
from novalm_jax.experts.profile import ExpertProfile, read_profile
from novalm_jax.experts.simulator import Belady, Events, Replay, events_of, replay, warm
from novalm_jax.experts.slots import SlotTable
from novalm_jax.experts.traces import Trace, read_trace
from novalm_jax.options import SimulateOptions
from novalm_jax.tables import aligned
from novalm_jax.units import format_size

_FOOT = "a token: of the trace, so that rows of one step share what it fetches."
_TIMES = (
    "ms a step: what it takes with all experts on the device, and then what it uploads on the link, one after the",
    "other; all hidden: the longer one of both.",
)
_ELSEWHERE = "What is missed is computed elsewhere, in time that is not counted."


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
      policy: its name.
      slots: how many there are.
      hit_rate: hits, as a part of the experts that layers of steps need.
      misses, uploads, evictions: for each token. Uploads are fewer than misses only with admission.
      bytes: that are uploaded for each token; None where nobody said how large an expert is.
      serial_ms, hidden_ms: of a step, as said below the table; None without a link.
    """

    policy: str
    slots: int
    hit_rate: float
    misses: float
    uploads: float
    evictions: float
    bytes: float | None
    serial_ms: float | None
    hidden_ms: float | None

    def columns(self, admission: bool) -> tuple[str, ...]:
        """As people read it."""
        moved = "" if self.bytes is None else format_size(round(self.bytes))
        times = ("" if time is None else f"{time:.2f}" for time in (self.serial_ms, self.hidden_ms))
        counts = (f"{100 * self.hit_rate:.1f} %", f"{self.misses:.2f}", f"{self.uploads:.2f}" if admission else "")
        return self.policy, str(self.slots), *counts, moved, *times


@dataclass(frozen=True)
class Simulation:
    """All cells, in the order of the options, and what they were computed from.

    Attributes:
      warm: what the profile is called that the caches started with; None: they were empty.
      lru_curve: hit rate of `lru` by slots, float64 `[n + 1]` for 0, 1, ... slots, in one pool or in each layer; None
        where nobody asked.
    """

    trace: str
    options: SimulateOptions
    tokens: int
    steps: int
    layers: int
    experts: int
    cells: tuple[Cell, ...]
    warm: str | None = None
    lru_curve: np.ndarray | None = None

    @property
    def curve_slots(self) -> np.ndarray:
        """The slots, in all layers together, of each point of `lru_curve`."""
        assert self.lru_curve is not None
        return np.arange(len(self.lru_curve)) * (1 if self.options.pool == "global" else self.layers)

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        names = ("trace", "tokens", "steps", "layers", "experts", "warm")
        figures = {name: getattr(self, name) for name in names} | {
            "options": vars(self.options),
            "cells": [vars(cell) for cell in self.cells],
        }
        if self.lru_curve is not None:
            figures["lru_curve"] = {"slots": self.curve_slots.tolist(), "hit_rate": self.lru_curve.tolist()}
        return figures

    def __str__(self) -> str:
        admission = self.options.admission
        heads = ("policy", "slots", "hits", "misses a token", "uploads", "moved a token", "ms a step", "all hidden")
        rows = [heads, *(cell.columns(admission is not None) for cell in self.cells)]
        # Columns that nothing is known of are left out.
        columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
        lines = aligned([*zip(*columns, strict=True)])
        head = [
            f"trace    {self.trace}: {self.tokens} tokens in {self.steps} steps, {self.layers} layers of "
            f"{self.experts} experts",
            f"pool     {self._pool()}",
        ]
        head += [] if self.warm is None else [f"start    with the most used experts of {self.warm}"]
        head += [] if admission is None else [f"misses   admitted if worth more than {admission:g} times what leaves"]
        times = () if self.options.link is None else _TIMES
        return "\n".join([*head, "", *lines, "", _FOOT, *times, *([] if admission is None else [_ELSEWHERE])])

    def _pool(self) -> str:
        if self.options.pool == "fitted":
            return (
                f"slots in each layer as fitted to {self.options.fit_trace or 'this very trace, which flatters them'}"
            )
        return "one pool for all layers" if self.options.pool == "global" else "as many slots in each layer"


@dataclass(frozen=True)
class Setting:
    """A trace as options want it replayed, and what its caches are made from.

    Attributes:
      trace: what of it is replayed.
      events: of its steps.
      profile: that caches start with, None where they are empty.
      layer_hits: what fitted pools are fitted to, as `fit_slots` takes it; None for other pools.
    """

    trace: Trace
    options: SimulateOptions
    events: Events
    profile: ExpertProfile | None
    layer_hits: np.ndarray | None

    @staticmethod
    def of(trace: Trace, options: SimulateOptions) -> Setting:
        """Reads what else the options name.

        Raises:
          OptionError: that cannot be read, or is of another model; or a link, and nothing says how large an expert is.
        """
        if options.link is not None and (options.sizes[0] or trace.record_bytes) is None:
            raise OptionError("link: it takes the size of an expert to say how long one takes; add record_bytes (9MB).")
        trace = trace.of(slice(options.first_tokens))
        profile = None if options.expert_profile is None else read_profile(options.expert_profile)
        if profile is not None:
            _check_shape("expert_profile", profile.name, profile.uses.shape, trace)
        hits = _hits_to_fit(trace, options) if options.pool == "fitted" else None
        events = events_of(trace, options.batch, options.quantum)
        return Setting(trace, options, events, profile, hits)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, and experts of each."""
        return self.trace.experts.shape[1], self.trace.num_experts

    @property
    def record_bytes(self) -> int | None:
        """Bytes of an expert, None where nobody said."""
        return self.options.sizes[0] or self.trace.record_bytes

    def cells(self) -> list[tuple[str, int]]:
        """Every policy with every number of slots."""
        layers, experts = self.shape
        return [(name, slots) for name in self.options.policies for slots in self.options.slots_of(layers * experts)]

    def cache(self, name: str, slots: int) -> tuple[Policy, list[SlotTable]]:
        """A new policy and its tables, which hold the most used records of the profile, if there is one."""
        policy = Belady(*self.shape, self.events) if name == "belady" else POLICIES[name](*self.shape)
        tables = [SlotTable(*self.shape, size) for size in self._pools(slots)]
        if self.profile is not None:
            warm(policy, tables, self.profile.uses)
        return policy, tables

    def step_ms(self, uploads: float) -> tuple[float, float] | None:
        """Milliseconds of a step with so many uploads, with nothing hidden and with all; None without a link."""
        if self.options.sizes[1] is None or self.record_bytes is None:
            return None
        moving = 1e3 * uploads * self.record_bytes / self.options.sizes[1]
        return self.options.compute_ms + moving, max(self.options.compute_ms, moving)

    def _pools(self, slots: int) -> list[int]:
        """The slots of the one pool, or of each layer's: fitted ones have as many at least as a token needs."""
        layers, experts = self.shape
        if self.options.pool == "global":
            return [slots]
        each = min(experts, max(1, round(slots / layers)))
        if self.layer_hits is None:
            return [each] * layers
        least = min(self.trace.experts.shape[2], max(1, slots // layers))
        return fit_slots(self.layer_hits, max(slots, layers), least).tolist()


def simulate(trace: Trace, options: SimulateOptions, curve: bool = False) -> Simulation:
    """Replays a trace for every policy and number of slots; `curve` adds `lru` with all numbers of slots.

    Raises:
      OptionError: as `Setting.of`.
    """
    setting = Setting.of(trace, options)
    cells = []
    for name, slots in setting.cells():
        found = replay(setting.events, *setting.cache(name, slots), f"{name}, {slots} slots", options.admission)
        cells.append(_cell(name, found, setting))
    layers, experts = setting.shape
    return Simulation(
        trace=trace.name,
        options=options,
        tokens=len(setting.trace.experts),
        steps=len(setting.events),
        layers=layers,
        experts=experts,
        cells=tuple(cells),
        warm=None if setting.profile is None else setting.profile.name,
        lru_curve=lru_hit_rates(setting.events, layers, experts, options.pool != "global") if curve else None,
    )


def _hits_to_fit(trace: Trace, options: SimulateOptions) -> np.ndarray:
    """What `fit_slots` takes."""
    fitted = trace
    if options.fit_trace is not None:
        fitted = read_trace(options.fit_trace, "fit_trace")
        _check_shape("fit_trace", fitted.name, (fitted.experts.shape[1], fitted.num_experts), trace)
    events = events_of(fitted, options.batch, options.quantum)
    return lru_hits(events, fitted.experts.shape[1], fitted.num_experts, apart=True)


def _check_shape(option: str, name: str, shape: tuple[int, ...], trace: Trace) -> None:
    layers, experts = trace.experts.shape[1], trace.num_experts
    if shape != (layers, experts):
        raise OptionError(
            f"{option}: {name} has {shape[0]} layers of {shape[1]} experts, and the trace {layers} of {experts}. Give "
            "one of the same model."
        )


def _cell(name: str, found: Replay, setting: Setting) -> Cell:
    tokens, size = len(setting.trace.experts), setting.record_bytes
    times = setting.step_ms(found.uploads / len(setting.events)) or (None, None)
    return Cell(
        policy=name,
        slots=found.slots,
        hit_rate=found.hit_rate,
        misses=int(found.missed.sum()) / tokens,
        uploads=found.uploads / tokens,
        evictions=found.evictions / tokens,
        bytes=None if size is None else found.uploads * size / tokens,
        serial_ms=times[0],
        hidden_ms=times[1],
    )
