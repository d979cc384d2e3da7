"""How often needed experts are where they are needed, before a model is run: from recorded or made-up routing, from an
expert profile, or as somebody says."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from novalm_jax.config import ModelConfig
from novalm_jax.experts.policy import POLICIES
from novalm_jax.experts.profile import read_profile
from novalm_jax.experts.records import count_records, moe_layers
from novalm_jax.experts.simulator import Events, events_of, replay, warm
from novalm_jax.experts.slots import SlotTable
from novalm_jax.experts.synthetic import make_trace
from novalm_jax.experts.traces import Trace, read_trace
from novalm_jax.models.counts import different_experts
from novalm_jax.options import MakeTraceOptions, PlanOptions

_REPLAYED = 20_000
"""Needed records that are replayed at most, in 32 steps at least: that takes time."""

_ROWS, _SEQUENCE = 1000, 125
"""Tokens that are made up, or more where as many sequences run side by side, and of a sequence of them."""


class Hits(NamedTuple):
    """Records in a decode step, all layers together, and how that is known.

    Attributes:
      needed: records.
      device: hit rate of the slots on the device.
      memory: hit rate of device and host together; the rest comes from disk.
      source: in words.
    """

    needed: float
    device: float
    memory: float
    source: str


def expected_hits(config: ModelConfig, options: PlanOptions, slots: int, host_slots: int) -> Hits:
    """What the slots of a model with experts catch, on the device and in host memory.

    The host tier is taken to hold what the policy would keep in so many slots: what comes from disk goes through it.

    Raises:
      OptionError: the file that the options name cannot be read, or is of a model of another shape.
    """
    records, most = count_records(config), max(slots, host_slots)
    needed = sum(different_experts(moe, options.batch) for moe in moe_layers(config).values())
    if options.hit_rate is not None:
        others = max(0, records - slots)
        missing = (1 - options.hit_rate) * max(0, records - most) / max(1, others)
        return Hits(needed, options.hit_rate, 1 - missing, "given; host memory catches its share of the others")
    if options.expert_profile is not None:
        profile = read_profile(options.expert_profile)
        # An expert is needed once for all tokens of a step that choose it, as if each of them chose by itself.
        uses = 1 - (1 - np.sort(profile.of_model(config).uses, axis=None)[::-1]) ** options.batch
        needed = float(uses.sum())
        device, memory = (float(uses[:count].sum()) / needed for count in (slots, most))
        return Hits(needed, device, memory, f"the most used experts of {profile.name} stay")
    trace = _made_up(config, options) if options.routing is None else _fitting(config, options.routing)
    events = events_of(trace, options.batch)
    replayed = min(len(events), max(32, int(_REPLAYED / needed)))
    earlier, last = events[:-replayed], events[-replayed:]
    uses = _uses(trace, earlier or last)
    device = _hit_rate(last, uses, slots)
    memory = 1.0 if most >= records else device if most == slots else _hit_rate(last, uses, most)
    needed = sum(len(layer) for step in last for layer in step) / len(last)
    which = f"its last {len(last)} steps" if earlier else f"all its {len(last)} steps, in slots filled from these steps"
    return Hits(needed, device, memory, f"{trace.name}, {which} with the default policy")


def _fitting(config: ModelConfig, path: str) -> Trace:
    trace = read_trace(path)
    most = max(moe.num_experts for moe in moe_layers(config).values())
    return Trace.of_rows(trace.name, trace.fit(config), num_experts=most, sequence=trace.sequence, step=trace.step)


def _made_up(config: ModelConfig, options: PlanOptions) -> Trace:
    sparse = moe_layers(config).values()
    return make_trace(
        MakeTraceOptions(
            like=options.like,
            layers=len(sparse),
            experts=max(moe.num_experts for moe in sparse),
            experts_per_token=max(moe.experts_per_token for moe in sparse),
            sequences=max(options.batch, _ROWS // _SEQUENCE),
            tokens=_SEQUENCE,
        )
    )


def _uses(trace: Trace, events: Events) -> np.ndarray:
    """The part of steps that used each expert, float64 `[layers, experts]`."""
    uses = np.zeros((trace.experts.shape[1], trace.num_experts))
    for step in events:
        for layer, experts in enumerate(step):
            uses[layer, experts] += 1
    return uses / len(events)


def _hit_rate(events: Events, uses: np.ndarray, slots: int) -> float:
    """With slots that hold at first what was used most, as after a long run."""
    layers, experts = uses.shape
    policy, table = POLICIES["default"](layers, experts), SlotTable(layers, experts, slots)
    warm(policy, [table], uses)
    return replay(events, policy, [table]).hit_rate
