"""Caches of several sizes and policies on one trace, side by side, and what they would make of a token's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from novalm_jax.errors import OptionError
from novalm_jax.experts.curves import fit_slots, lru_hit_rates, lru_hits
from novalm_jax.experts.policy import POLICIES, Policy
from novalm_jax.experts.profile import ExpertProfile, read_profile
from novalm_jax.experts.simulator import Belady, Events, Replay, events_of, replay
from novalm_jax.experts.slots import SlotTable
from novalm_jax.experts.traces import Trace, read_trace
from novalm_jax.options import SimulateOptions
from novalm_jax.tables import aligned
from novalm_jax.units import format_size

_FOOT = (
    "a token: of the trace, so that rows of one step share what it fetches. ms a step: what it takes with all experts",
    "on the device, and then what it uploads on the link, one after the other; all hidden: the longer one of both.",
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
        return "\n".join([*head, "", *lines, "", *_FOOT, *([] if admission is None else [_ELSEWHERE])])

    def _pool(self) -> str:
        if self.options.pool == "fitted":
            return (
                f"slots in each layer as fitted to {self.options.fit_trace or 'this very trace, which flatters them'}"
            )
        return "one pool for all layers" if self.options.pool == "global" else "as many slots in each layer"


def simulate(trace: Trace, options: SimulateOptions, curve: bool = False) -> Simulation:
    """Replays a trace for every policy and number of slots; `curve` adds `lru` with all numbers of slots.

    Raises:
      OptionError: a link, and nothing says how large an expert is; or a profile or a trace to fit to that cannot be
        read, or is of another model.
    """
    record_bytes, link = options.sizes
    record_bytes = record_bytes or trace.record_bytes
    if link is not None and record_bytes is None:
        raise OptionError("link: it takes the size of an expert to say how long one takes; add record_bytes (9MB).")
    trace = trace.of(slice(options.first_tokens))
    tokens, layers, _ = trace.experts.shape
    experts = trace.num_experts
    profile = None if options.expert_profile is None else _profile(options.expert_profile, layers, experts)
    events = events_of(trace, options.batch)
    layer_hits = _hits_to_fit(trace, options) if options.pool == "fitted" else None
    cells = []
    for name in options.policies:
        for slots in options.slots_of(layers * experts):
            tables = [
                SlotTable(layers, experts, size)
                for size in _pools(options.pool, trace.experts.shape[2], layers, experts, slots, layer_hits)
            ]
            policy = _policy(name, layers, experts, events)
            if profile is not None:
                _warm(policy, tables, profile)
            found = replay(events, policy, tables, f"{name}, {slots} slots", options.admission)
            cells.append(_cell(name, found, tokens, len(events), record_bytes, link, options.compute_ms))
    return Simulation(
        trace=trace.name,
        options=options,
        tokens=tokens,
        steps=len(events),
        layers=layers,
        experts=experts,
        cells=tuple(cells),
        warm=None if profile is None else profile.name,
        lru_curve=lru_hit_rates(events, layers, experts, options.pool != "global") if curve else None,
    )


def _policy(name: str, layers: int, experts: int, events: Events) -> Policy:
    return Belady(layers, experts, events) if name == "belady" else POLICIES[name](layers, experts)


def _pools(pool: str, chosen: int, layers: int, experts: int, slots: int, layer_hits: np.ndarray | None) -> list[int]:
    """The slots of the one pool, or of each layer's: fitted ones have as many at least as a token needs."""
    if pool == "global":
        return [slots]
    if layer_hits is not None:
        return fit_slots(layer_hits, max(slots, layers), min(chosen, max(1, slots // layers))).tolist()
    return [min(experts, max(1, round(slots / layers)))] * layers


def _hits_to_fit(trace: Trace, options: SimulateOptions) -> np.ndarray:
    """What `fit_slots` takes."""
    layers, experts = trace.experts.shape[1], trace.num_experts
    if options.fit_trace is not None:
        trace = read_trace(options.fit_trace, "fit_trace")
        _check_shape("fit_trace", options.fit_trace, (trace.experts.shape[1], trace.num_experts), (layers, experts))
    return lru_hits(events_of(trace, options.batch), layers, experts, apart=True)


def _profile(path: str, layers: int, experts: int) -> ExpertProfile:
    profile = read_profile(path)
    _check_shape("expert_profile", path, profile.uses.shape, (layers, experts))
    return profile


def _check_shape(option: str, path: str, shape: tuple[int, ...], wanted: tuple[int, int]) -> None:
    if shape != wanted:
        raise OptionError(
            f"{option}: {path} has {shape[0]} layers of {shape[1]} experts, and the trace {wanted[0]} of {wanted[1]}. "
            "Give one of the same model."
        )


def _warm(policy: Policy, tables: Sequence[SlotTable], profile: ExpertProfile) -> None:
    """As at the start of a run that has a profile: the most used records have slots."""
    policy.seed(profile.uses)
    for record in profile.most_used(profile.uses.size):
        table = tables[record.layer % len(tables)]
        slot = table.empty_slot()
        if slot is not None:
            table.put(record, slot)


def _cell(
    name: str, found: Replay, tokens: int, steps: int, record_bytes: int | None, link: int | None, compute_ms: float
) -> Cell:
    moving = None if link is None or record_bytes is None else 1e3 * found.uploads * record_bytes / link / steps
    return Cell(
        policy=name,
        slots=found.slots,
        hit_rate=found.hit_rate,
        misses=int(found.missed.sum()) / tokens,
        uploads=found.uploads / tokens,
        evictions=found.evictions / tokens,
        bytes=None if record_bytes is None else found.uploads * record_bytes / tokens,
        serial_ms=None if moving is None else compute_ms + moving,
        hidden_ms=None if moving is None else max(compute_ms, moving),
    )
