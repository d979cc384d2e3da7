"""Slots on the device: what is evicted and what is spared, waves, prefetches, and their governor."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from novalm_jax.experts.fetcher import Fetch
from novalm_jax.experts.governor import TERM, TRIAL, Governor
from novalm_jax.experts.policy import LRU
from novalm_jax.experts.records import Record
from novalm_jax.experts.slots import NOWHERE, SlotTable
from novalm_jax.experts.streamer import Streamer
from novalm_jax.timeline import Timeline
from timeline_helpers import rows_of


class Fetched:
    """A fetcher whose records arrive when a test says so; urgent ones when they are waited for, one at a time."""

    record_bytes = 10
    host_bytes = bytes_read = 0
    failed = False

    def __init__(self) -> None:
        self.wanted: dict[Record, Fetch] = {}
        self.uploads = 0
        self.asked: list[tuple[Record, bool]] = []
        self.dropped_records: list[Record] = []

    def fetch(self, record: Record, step: int, urgent: bool) -> Fetch:
        self.asked.append((record, urgent))
        fetch = self.wanted.setdefault(record, Fetch(record, step, urgent))
        fetch.urgent |= urgent
        return fetch

    def arrive(self, *records: Record) -> None:
        for record in records:
            self.wanted[record].arrays = record  # type: ignore[assignment]

    def arrived(self, fetches: Any, wait: bool) -> list[Fetch]:
        if wait and fetches and not any(fetch.arrays for fetch in fetches):
            self.arrive(next(iter(fetches)).record)
        return [fetch for fetch in fetches if fetch.arrays is not None]

    def inserted(self, fetch: Fetch, done: Any) -> None:
        self.uploads += 1
        fetch.arrays = None
        del self.wanted[fetch.record]

    def dropped(self, fetch: Fetch) -> None:
        self.dropped_records.append(fetch.record)
        del self.wanted[fetch.record]

    def forget(self, fetches: Any) -> list[Fetch]:
        fetches = list(fetches)
        for fetch in fetches:
            if fetch.arrays is None:
                del self.wanted[fetch.record]
        return [fetch for fetch in fetches if fetch.arrays is not None]

    def calm_down(self) -> list[Fetch]:
        return list(self.wanted.values())

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass

    def on_host(self) -> np.ndarray:
        return np.array(False)


class Slots:
    """A pool that remembers what lies where."""

    def __init__(self) -> None:
        self.content: dict[int, Record] = {}

    def insert(self, record: Any, slot: int) -> Any:
        self.content[slot] = record
        return jax.numpy.zeros(())

    def settle(self) -> None:
        pass

    @property
    def lost(self) -> bool:
        return not self.content

    def renew(self) -> None:
        pass


class Run:
    """A streamer with its surroundings, of 4 layers with 8 experts."""

    def __init__(self, slots: int, timeline: Timeline | None = None):
        self.pool: Any = Slots()
        self.fetcher: Any = Fetched()
        self.streamer = Streamer(self.pool, SlotTable(4, 8, slots), LRU(4, 8), self.fetcher, 32, timeline)

    def layer(self, layer: int, experts: list[int], kept: list[int] | None = None) -> list[list[int]]:
        """The experts of each wave; every one lies in its slot while its wave is given."""
        waves = []
        for slots in self.streamer.waves(layer, experts, kept):
            here = [expert for expert in range(8) if slots[expert] != NOWHERE]
            assert [self.pool.content[slots[expert]] for expert in here] == [Record(layer, e) for e in here]
            waves.append(here)
        assert sorted(expert for wave in waves for expert in wave) == sorted(experts)
        return waves

    def resident(self) -> set[Record]:
        return {
            record for slot in range(99) if (record := self.pool.content.get(slot)) and self._is_there(record, slot)
        }

    def _is_there(self, record: Record, slot: int) -> bool:
        return bool(self.streamer._table.find(record) == slot)


def test_what_is_there_comes_first_and_is_not_fetched() -> None:
    run = Run(slots=4)
    assert run.layer(0, [3, 1]) == [[3], [1]]
    assert run.layer(0, [2, 1, 3]) == [[1, 3], [2]]
    assert [record.expert for record, _ in run.fetcher.asked] == [3, 1, 2]
    assert (run.streamer.hits, run.streamer.misses, run.streamer.evictions) == (2, 3, 0)


def test_more_experts_than_slots_come_in_waves() -> None:
    run = Run(slots=2)
    assert run.layer(0, [5, 4, 3, 2, 1]) == [[5], [4], [3], [2], [1]]
    assert run.streamer.evictions == 3
    run.streamer.next_step()
    waves = run.streamer.waves(1, [7, 6, 0, 1])
    run.fetcher.arrive(*(Record(1, expert) for expert in (7, 6, 0)))
    assert [int((slots != NOWHERE).sum()) for slots in waves] == [2, 1, 1]


def test_what_a_wave_uses_is_not_evicted_in_it() -> None:
    run = Run(slots=3)
    run.layer(0, [0, 1, 2])
    run.streamer.next_step()
    waves = run.streamer.waves(1, [4, 5, 6])
    run.fetcher.arrive(Record(1, 4), Record(1, 5), Record(1, 6))
    (slots,) = waves
    assert sorted(slots[[4, 5, 6]]) == [0, 1, 2]


def test_experts_that_are_not_kept_pass_through_few_slots() -> None:
    """A prompt needs all experts of a layer, once; what decoding used stays."""
    run = Run(slots=6)
    run.layer(0, [0, 1, 2, 3, 4, 5])
    run.streamer.next_step()
    run.layer(1, list(range(8)), kept=[6])
    assert run.streamer.evictions == 8
    assert run.resident() >= {Record(0, 2), Record(0, 3), Record(0, 4), Record(0, 5), Record(1, 6)}


def test_a_timeline_shows_inserts_once_they_are_complete_and_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline, waited = Timeline(), []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    run = Run(slots=2, timeline=timeline)
    run.layer(1, [5, 4, 3])
    rows = rows_of(timeline.to_json())
    inserts = [span["args"] for span in rows["inserts"]]
    assert inserts == [{"layer": 1, "expert": expert, "bytes": 10} for expert in (5, 4, 3)] and len(waited) == 3
    assert [span["args"] for span in rows["stalls"]] == [{"layer": 1, "missing": left} for left in (3, 2, 1)]
    assert sum(span["dur"] for span in rows["stalls"]) <= run.streamer.stall_seconds * 1e6


# --- prefetch --------------------------------------------------------------------------------------------------------


def test_a_prefetch_that_arrives_is_a_hit_later() -> None:
    run = Run(slots=4)
    run.streamer.prefetch(1, [5, 6])
    assert run.fetcher.asked == [(Record(1, 5), False), (Record(1, 6), False)]
    run.fetcher.arrive(Record(1, 5))
    assert run.layer(1, [5, 6]) == [[5], [6]]
    assert (run.streamer.hits, run.streamer.misses, run.streamer.prefetch_hits) == (1, 1, 1)
    assert run.layer(1, [5]) == [[5]]
    assert run.streamer.prefetch_hits == 1


def test_what_is_on_the_device_is_not_prefetched() -> None:
    run = Run(slots=4)
    run.layer(2, [5])
    run.streamer.prefetch(2, [5, 6])
    assert run.fetcher.asked[1:] == [(Record(2, 6), False)]


def test_prefetches_never_take_what_the_layer_needs_nor_each_other() -> None:
    run = Run(slots=3)
    run.layer(1, [0, 1, 2])
    run.streamer.next_step()
    run.streamer.prefetch(1, [4, 5, 6])
    run.fetcher.arrive(Record(1, 4), Record(1, 5), Record(1, 6))
    assert run.layer(1, [0, 1])[0] == [0, 1]
    assert run.resident() == {Record(1, 0), Record(1, 1), Record(1, 4)}
    assert run.fetcher.dropped_records == [Record(1, 5), Record(1, 6)]
    assert (run.streamer.prefetch_hits, run.streamer.prefetch_wasted) == (0, 3)


def test_demand_evicts_prefetched_ones_last() -> None:
    run = Run(slots=3)
    run.layer(0, [0, 1])
    run.streamer.next_step()
    run.streamer.prefetch(0, [4])
    run.fetcher.arrive(Record(0, 4))
    run.layer(0, [0, 2, 4])
    assert run.resident() == {Record(0, 0), Record(0, 2), Record(0, 4)}
    assert (run.streamer.prefetch_hits, run.streamer.hits) == (1, 2)


def test_a_prefetch_that_was_wrong_is_spared_no_longer_than_for_its_layer() -> None:
    run = Run(slots=2)
    run.layer(0, [0])
    run.streamer.prefetch(1, [4])
    run.fetcher.arrive(Record(1, 4))
    run.streamer.next_step()
    # Nobody ever used it: it is the first to go.
    run.layer(1, [5])
    assert run.resident() == {Record(0, 0), Record(1, 5)}
    assert run.streamer.prefetch_wasted == 1


def test_a_prefetch_that_comes_too_late_takes_an_empty_slot_or_none() -> None:
    run = Run(slots=3)
    run.layer(0, [0, 1])
    run.streamer.prefetch(1, [4, 5])
    run.fetcher.arrive(Record(1, 4), Record(1, 5))
    run.layer(2, [])
    assert run.resident() == {Record(0, 0), Record(0, 1), Record(1, 4)}
    assert run.fetcher.dropped_records == [Record(1, 5)] and run.streamer.prefetch_wasted == 2


def test_prefetches_that_come_while_a_layer_computes_make_room_for_more() -> None:
    run = Run(slots=3)
    waves = run.streamer.waves(0, [0, 1])
    run.streamer.prefetch(1, [4, 5])
    next(waves)
    run.fetcher.arrive(Record(1, 4))
    assert Record(1, 4) not in run.resident()
    list(waves)
    assert Record(1, 4) in run.resident() and Record(1, 4) not in run.fetcher.wanted
    assert run.layer(1, [4]) == [[4]]
    assert (run.streamer.prefetch_hits, run.streamer.misses) == (1, 2)


def test_what_the_next_layer_may_need_and_has_is_evicted_last() -> None:
    run = Run(slots=3)
    run.layer(1, [4])
    run.layer(0, [0, 1])
    run.streamer.prefetch(1, [4, 5])
    run.fetcher.arrive(Record(1, 5))
    assert run.layer(1, [4, 5]) == [[4, 5]]
    assert run.streamer.prefetch_hits == 1


def test_the_same_record_may_be_wanted_ahead_again_and_again() -> None:
    run = Run(slots=4)
    for _ in range(3):
        run.streamer.prefetch(1, [4])
    run.fetcher.arrive(Record(1, 4))
    for _ in range(3):
        run.streamer.prefetch(1, [4])
    assert run.layer(1, [4]) == [[4]]
    assert (run.streamer.prefetch_hits, run.streamer.prefetch_wasted) == (1, 0)


def test_prefetches_of_another_layer_are_forgotten() -> None:
    run = Run(slots=4)
    run.streamer.prefetch(1, [4, 5])
    run.fetcher.arrive(Record(1, 5))
    run.streamer.prefetch(2, [6])
    assert set(run.fetcher.wanted) == {Record(1, 5), Record(2, 6)}


# --- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", range(4))
def test_an_interrupt_at_any_moment_of_an_insert_leaves_a_true_table(
    moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the eviction, before the insert, after it, and before the fetcher hears of it."""
    run = Run(slots=2)
    run.layer(0, [0, 1])
    owner, name = [
        *((run.streamer, "_evict"), (run.pool, "insert"), (run.streamer._table, "put"), (run.fetcher, "inserted"))
    ][moment]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.layer(1, [5])
    run.streamer.recover()
    run.streamer.next_step()
    run.layer(1, [5, 6])
    run.layer(0, [0, 1])


def test_slots_that_were_lost_are_empty() -> None:
    run = Run(slots=2)
    run.layer(0, [0, 1])
    run.pool.content.clear()
    run.streamer.recover()
    assert run.streamer.figures()["experts_on_device"] == 0
    assert run.layer(0, [0, 1]) == [[0], [1]]


# --- the governor ----------------------------------------------------------------------------------------------------


def test_a_streamer_whose_governor_says_no_asks_for_nothing_ahead() -> None:
    run = Run(slots=4)
    run.streamer.decoded(2.0)
    assert not run.streamer.governor.allows
    run.streamer.prefetch(1, [6])
    assert run.fetcher.asked == []
    run.streamer.decoded(1.0)
    run.streamer.prefetch(1, [6])
    assert run.fetcher.asked == [(Record(1, 6), False)]


def test_prefetches_that_nobody_needed_are_forgotten_without_further_ones() -> None:
    run = Run(slots=4)
    run.streamer.prefetch(1, [4, 5])
    run.layer(1, [5])
    assert Record(1, 4) not in run.fetcher.wanted


@pytest.mark.parametrize(("quicker", "term"), [(True, True), (False, False)])
def test_the_governor_keeps_what_was_quicker_until_the_next_trial(quicker: bool, term: bool) -> None:
    governor = Governor()

    def trial() -> list[bool]:
        allowed = []
        for _ in range(TRIAL):
            allowed.append(governor.allows)
            slow = governor.allows != quicker
            # One step in a trial takes far longer than others, which says nothing.
            governor.took(50.0 if len(allowed) == 5 else 2.0 if slow else 1.0)
        return allowed

    assert trial() == [True, False] * (TRIAL // 2)
    for _ in range(TERM):
        assert governor.allows == term
        governor.took(1.0)
    assert trial() == [True, False] * (TRIAL // 2)
    assert governor.allows == term
