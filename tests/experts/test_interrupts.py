"""Ctrl-C at every line of a step over experts: what is named is there afterwards, and everything still comes."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest

from experts_helpers import LAYOUT, Disk, number
from interrupts import interrupted_at
from novalm_jax.experts.fetcher import Fetcher
from novalm_jax.experts.host_tier import HostTier
from novalm_jax.experts.link import Link
from novalm_jax.experts.policy import LRU
from novalm_jax.experts.pools import DevicePool, HostPool, compile_insert, compile_new
from novalm_jax.experts.records import Record
from novalm_jax.experts.slots import NOWHERE, SlotTable
from novalm_jax.experts.streamer import Streamer
from novalm_jax.timeline import Timeline

SLOTS = 3


def check_step(streamer: Streamer, first: int) -> None:
    """A step over three layers, in which every slot that a wave names holds its expert."""
    streamer.next_step()
    for layer in range(3):
        wanted = [(first + i) % 8 for i in range(4)]
        waves = streamer.waves(layer, wanted, kept=wanted[:3])
        if layer < 2:
            streamer.prefetch(layer + 1, [first % 8, (first + 5) % 8])
        seen = []
        for slots in waves:
            here = np.flatnonzero(slots != NOWHERE)
            for stack in jax.tree.leaves(streamer.pool.arrays):
                held = np.asarray(stack)
                for expert in here:
                    assert (held[slots[expert]] == number(Record(layer, int(expert)))).all()
            seen += here.tolist()
        assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize(("host_slots", "recorded"), [(0, False), (6, False), (0, True)])
def test_an_interrupt_at_any_line_leaves_a_true_table_and_nothing_stuck(host_slots: int, recorded: bool) -> None:
    threads = set(threading.enumerate())
    disk: Any = Disk()
    host = HostTier(HostPool(LAYOUT, 6), SlotTable(3, 8, 6), LRU(3, 8)) if host_slots else None
    pool = DevicePool(compile_new(LAYOUT, SLOTS), compile_insert(LAYOUT, SLOTS))
    timeline = Timeline() if recorded else None
    fetcher = Fetcher(disk, LAYOUT, host, Link(), timeline)
    streamer = Streamer(pool, SlotTable(3, 8, SLOTS), LRU(3, 8), fetcher, 24, timeline)
    check_step(streamer, 0)
    line = 0
    while True:
        line += 7 if line > 200 else 1
        folder = "novalm_jax/" if recorded else "novalm_jax/experts"
        if not interrupted_at(line, lambda line=line: check_step(streamer, line % 8), folder):
            break
        streamer.recover()
        check_step(streamer, (line + 3) % 8)
    assert line > 300
    streamer.close()
    assert timeline is None or len(timeline.intervals("uploads")) == fetcher.uploads
    assert set(threading.enumerate()) == threads
