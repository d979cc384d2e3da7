"""The way of records to the device: order, limits, errors and the end, with a disk that does what a test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from experts_helpers import LAYOUT, Disk, number
from novalm_jax.errors import CheckpointError, EngineError
from novalm_jax.experts import fetcher as fetcher_module
from novalm_jax.experts.fetcher import IN_FLIGHT, READERS, Fetch, Fetcher
from novalm_jax.experts.host_tier import HostTier
from novalm_jax.experts.link import Link
from novalm_jax.experts.policy import LRU
from novalm_jax.experts.pools import HostPool
from novalm_jax.experts.records import Record
from novalm_jax.experts.slots import SlotTable


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def take(fetcher: Fetcher, fetches: list[Fetch]) -> list[int]:
    """Waits for all of them, in the order in which they come, and lets go of each."""
    numbers, fetches = [], list(fetches)
    while fetches:
        for fetch in fetcher.arrived(fetches, wait=True):
            assert fetch.arrays is not None
            values = {int(value) for leaf in jax.tree.leaves(fetch.arrays) for value in np.unique(leaf)}
            assert values == {number(fetch.record)}
            numbers.append(values.pop())
            fetcher.inserted(fetch, jax.numpy.zeros(()))
            fetches.remove(fetch)
    return numbers


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def make(disk: Disk) -> Iterator[Callable[..., Fetcher]]:
    made: list[Fetcher] = []
    threads = set(threading.enumerate())

    def one(host_slots: int = 0, rate: float | None = None) -> Fetcher:
        host = None
        if host_slots:
            host = HostTier(HostPool(LAYOUT, host_slots), SlotTable(4, 100, host_slots), LRU(4, 100))
        reader: Any = disk
        made.append(Fetcher(reader, LAYOUT, host, Link(rate)))
        return made[-1]

    yield one
    disk.gate.set()
    for fetcher in made:
        fetcher.close()
    assert disk.closed == bool(made)
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize("host_slots", [0, READERS + 2, 50])
def test_every_record_arrives_as_it_is_on_disk(make: Callable[..., Fetcher], disk: Disk, host_slots: int) -> None:
    fetcher = make(host_slots)
    records = [Record(layer, expert) for layer in range(4) for expert in range(10)]
    found = take(fetcher, [fetcher.fetch(record, 0, True) for record in records])
    assert sorted(found) == sorted(map(number, records))
    assert fetcher.uploads == 40 and len(disk.reads) == 40


def test_what_the_host_holds_is_not_read_again(make: Callable[..., Fetcher], disk: Disk) -> None:
    fetcher = make(host_slots=8)
    first = [Record(0, expert) for expert in range(8)]
    for records in (first, first[::-1], [Record(1, 0)], first[1:], [Record(0, 0)]):
        take(fetcher, [fetcher.fetch(record, 0, True) for record in records])
    # One came in, and took the slot of what was used longest ago; that one had to be read again.
    assert disk.reads[:8] != [] and len(disk.reads) == 8 + 1 + 1
    assert int(fetcher.on_host().sum()) == 8


def test_urgent_ones_overtake(make: Callable[..., Fetcher], disk: Disk) -> None:
    fetcher = make()
    disk.gate.clear()
    ahead = [fetcher.fetch(Record(1, expert), 0, False) for expert in range(6)]
    eventually(lambda: len(disk.reads) == READERS)
    urgent = [fetcher.fetch(Record(0, expert), 0, True) for expert in range(2)]
    # Wanted after all: one and the same fetch, and urgent from now on.
    assert fetcher.fetch(Record(1, 5), 0, True) is ahead[5]
    disk.gate.set()
    take(fetcher, [*urgent, ahead[5]])
    assert set(disk.reads[READERS : READERS + 3]) == {Record(0, 0), Record(0, 1), Record(1, 5)}
    take(fetcher, ahead[:5])


def test_prefetches_of_what_the_host_holds_leave_room_for_what_it_does_not(make: Callable[..., Fetcher]) -> None:
    """They hold no slot before they move, and may lose it."""
    fetcher = make(host_slots=READERS + 2)
    held = [Record(0, expert) for expert in range(READERS + 2)]
    take(fetcher, [fetcher.fetch(record, 0, True) for record in held])
    ahead = [fetcher.fetch(record, 1, False) for record in held]
    eventually(lambda: len(fetcher.arrived(ahead, wait=False)) == IN_FLIGHT - 1)
    for expert in range(8):
        assert take(fetcher, [fetcher.fetch(Record(1, expert), 1, True)]) == [100 + expert]
    # Those that lost theirs are read again.
    take(fetcher, ahead)


@pytest.mark.parametrize("host_slots", [0, READERS + 2, 50])
def test_prefetches_leave_room_for_what_is_urgent(make: Callable[..., Fetcher], host_slots: int) -> None:
    """On the device, and in the memory before it: they may lie there for as long as nobody takes them."""
    fetcher = make(host_slots)
    ahead = [fetcher.fetch(Record(0, expert), 0, False) for expert in range(10)]
    eventually(lambda: len(fetcher.arrived(ahead, wait=False)) == IN_FLIGHT - 1)
    time.sleep(0.05)
    assert len(fetcher.arrived(ahead, wait=False)) == IN_FLIGHT - 1
    assert take(fetcher, [fetcher.fetch(Record(1, 0), 0, True)]) == [100]
    dropped = fetcher.arrived(ahead, wait=False)[0]
    fetcher.dropped(dropped)
    take(fetcher, [fetch for fetch in ahead if fetch is not dropped])


def test_forgotten_ones_are_not_begun_with(make: Callable[..., Fetcher], disk: Disk) -> None:
    fetcher = make()
    disk.gate.clear()
    ahead = [fetcher.fetch(Record(0, expert), 0, False) for expert in range(6)]
    eventually(lambda: len(disk.reads) == READERS)
    left = fetcher.forget(ahead)
    assert left == ahead[:READERS]
    disk.gate.set()
    take(fetcher, left)
    assert len(disk.reads) == READERS
    take(fetcher, [fetcher.fetch(ahead[5].record, 0, True)])


def test_what_the_host_holds_can_be_forgotten_until_it_is_uploaded(make: Callable[..., Fetcher]) -> None:
    fetcher = make(host_slots=50)
    records = [Record(0, expert) for expert in range(10)]
    take(fetcher, [fetcher.fetch(record, 0, True) for record in records])
    ahead = [fetcher.fetch(record, 1, False) for record in records]
    eventually(lambda: len(fetcher.arrived(ahead, wait=False)) == IN_FLIGHT - 1)
    assert fetcher.forget(ahead) == ahead[: IN_FLIGHT - 1]
    take(fetcher, ahead[: IN_FLIGHT - 1])
    assert fetcher.uploads == 10 + IN_FLIGHT - 1


def test_no_more_copies_at_a_time_than_are_planned(make: Callable[..., Fetcher]) -> None:
    fetcher = make(host_slots=50)
    fetches = [fetcher.fetch(Record(0, expert), 0, True) for expert in range(10)]
    eventually(lambda: len(fetcher.arrived(fetches, wait=False)) == IN_FLIGHT)
    time.sleep(0.05)
    assert fetcher.uploads == IN_FLIGHT
    take(fetcher, fetches)


def test_a_slow_link_takes_its_time(make: Callable[..., Fetcher]) -> None:
    fetcher = make(host_slots=50, rate=96 / 0.02)
    assert fetcher.record_bytes == 96
    start = time.perf_counter()
    take(fetcher, [fetcher.fetch(Record(0, expert), 0, True) for expert in range(5)])
    assert time.perf_counter() - start >= 5 * 0.02


@pytest.mark.parametrize("host_slots", [0, 50])
def test_a_read_that_fails_wakes_everyone(make: Callable[..., Fetcher], disk: Disk, host_slots: int) -> None:
    fetcher = make(host_slots)
    disk.gate.clear()
    disk.broken = Record(2, 3)
    # Another thread waits for another record, which never comes: its wait must end as well.
    fetches = [fetcher.fetch(Record(2, 3), 0, True), fetcher.fetch(Record(0, 1), 0, True)]
    said: list[str] = []

    def wait() -> None:
        try:
            while True:
                take(fetcher, [fetcher.fetch(Record(3, 9), 0, True)])
        except CheckpointError as error:
            said.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    disk.gate.set()
    with pytest.raises(CheckpointError, match="Expert 3 of layer 2"):
        while True:
            fetcher.arrived(fetches[:1], wait=True)
    waiter.join(30)
    assert len(said) == 1 and "Expert 3 of layer 2" in said[0]
    with pytest.raises(CheckpointError, match="layer 2"):
        fetcher.fetch(Record(0, 0), 0, True)


def test_closing_ends_every_wait(make: Callable[..., Fetcher], disk: Disk) -> None:
    fetcher = make()
    disk.gate.clear()
    fetch = fetcher.fetch(Record(0, 0), 0, True)
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(EngineError, match="closed") as caught:
            fetcher.arrived([fetch], wait=True)
        said.append(str(caught.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=fetcher.close)
    closer.start()
    waiter.join(30)
    assert said and not waiter.is_alive()
    # The read that is under way ends on its own; only then do the threads.
    disk.gate.set()
    closer.join(30)
    assert not closer.is_alive()


def test_an_upload_that_fails_wakes_everyone(make: Callable[..., Fetcher], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(array: np.ndarray, *memory: np.ndarray) -> jax.Array:
        raise MemoryError("no room")

    monkeypatch.setattr(fetcher_module, "copy_to_device", fail)
    fetcher = make()
    with pytest.raises(MemoryError, match="no room"):
        fetcher.arrived([fetcher.fetch(Record(0, 0), 0, True)], wait=True)
    assert fetcher.failed


def test_nothing_is_held_after_the_end(make: Callable[..., Fetcher]) -> None:
    fetcher = make()
    fetches = [fetcher.fetch(Record(0, expert), 0, True) for expert in range(5)]
    eventually(lambda: len(fetcher.arrived(fetches, wait=False)) == IN_FLIGHT)
    fetcher.close()
    assert all(fetch.arrays is None for fetch in fetches)
    fetcher.close()
