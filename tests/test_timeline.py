"""Spans on tracks: what a trace holds, whoever records it, how much of it, and how long two tracks go together."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from novalm_jax import timeline as timeline_module
from novalm_jax.timeline import Timeline, overlap, span
from timeline_helpers import rows_of


class Clock:
    """A clock that goes as far as a test says."""

    now = 7_000_000_000

    def perf_counter_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(timeline_module, "time", clock)
    yield clock


def record(timeline: Timeline, clock: Clock, track: Any, name: str, milliseconds: int, **args: Any) -> None:
    with timeline.span(track, name, **args):
        clock.now += milliseconds * 10**6


def test_a_trace_in_numbers(clock: Clock) -> None:
    timeline = Timeline()
    clock.now += 1500
    record(timeline, clock, "compute", "attend", 2, layer=3)
    record(timeline, clock, "uploads", "layer 3, expert 4", 1, layer=3, expert=4, bytes=96)
    trace = json.loads(timeline.to_json())
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [{name: event[name] for name in ("name", "ts", "dur", "args")} for event in shown] == [
        {"name": "layer 3, expert 4", "ts": 2001.5, "dur": 1000.0, "args": {"layer": 3, "expert": 4, "bytes": 96}},
        {"name": "attend", "ts": 1.5, "dur": 2000.0, "args": {"layer": 3}},
    ]
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    # In the order in which data goes.
    assert list(names.values()) == ["uploads", "compute"]
    assert [names[event["tid"]] for event in shown] == ["uploads", "compute"]


def test_a_track_has_as_many_rows_as_lie_side_by_side(clock: Clock) -> None:
    timeline = Timeline()
    with timeline.span("disk reads", "long"):
        clock.now += 1000
        record(timeline, clock, "disk reads", "first", 1)
        record(timeline, clock, "disk reads", "second", 1)
    record(timeline, clock, "disk reads", "after", 1)
    rows = rows_of(timeline.to_json())
    titles = {row: [event["name"] for event in events] for row, events in rows.items()}
    assert titles == {"disk reads": ["long", "after"], "disk reads 2": ["first", "second"]}


def test_a_span_that_fails_is_there_and_says_so() -> None:
    timeline = Timeline()
    with pytest.raises(KeyboardInterrupt), timeline.span("compute", "attend", layer=1):
        raise KeyboardInterrupt
    (events,) = rows_of(timeline.to_json()).values()
    assert [event["args"] for event in events] == [{"layer": 1, "failed": "KeyboardInterrupt"}]


def test_without_a_timeline_a_span_does_nothing() -> None:
    with span(None, "compute", "attend", layer=1) as nothing:
        assert nothing is None
    assert span(None, "compute", "a") is span(None, "uploads", "b")


def test_the_bound_keeps_the_first_spans_and_says_what_is_missing(clock: Clock) -> None:
    timeline = Timeline(most=3)
    for number in range(3):
        record(timeline, clock, "compute", str(number), 1)
    assert timeline.left_out == {} and list(rows_of(timeline.to_json())) == ["compute"]
    record(timeline, clock, "uploads", "3", 1)
    record(timeline, clock, "compute", "4", 1)
    record(timeline, clock, "compute", "5", 1)
    assert timeline.left_out == {"uploads": 1, "compute": 2}
    rows = rows_of(timeline.to_json())
    assert [event["name"] for event in rows["compute"]] == ["0", "1", "2"]
    (gap,) = rows["left out"]
    assert (gap["name"], gap["args"]) == ("3 spans left out", {"uploads": 1, "compute": 2})
    assert (gap["ts"], gap["dur"]) == (3000.0, 3000.0)


def test_no_span_of_many_threads_is_lost() -> None:
    timeline = Timeline(most=3000)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(30)
        for number in range(1000):
            with timeline.span("disk reads", str(number)):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(timeline.intervals("disk reads")) == 3000
    assert timeline.left_out == {"disk reads": 1000}


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ([], [(0, 1)], 0),
        ([(0, 1)], [(1, 2)], 0),
        ([(0, 4)], [(1, 2), (3, 5)], 2),
        ([(3, 5), (1, 2)], [(0, 4)], 2),
        # Those of one kind that lie over each other count once.
        ([(0, 2), (1, 3), (1, 2)], [(0, 1.5), (1, 4)], 3),
        ([(0, 10), (1, 2)], [(3, 4), (8, 12)], 3),
    ],
)
def test_how_long_there_is_something_of_both(first: Any, second: Any, both: float) -> None:
    assert overlap(first, second) == overlap(second, first) == both


def test_tracks_that_go_together(clock: Clock) -> None:
    timeline = Timeline()
    with timeline.span("uploads", "a"):
        clock.now += 10**9
        record(timeline, clock, "compute", "b", 250)
    record(timeline, clock, "compute", "c", 500)
    assert timeline.intervals("compute") == [(1.0, 1.25), (1.25, 1.75)]
    assert timeline.overlap("uploads", "compute") == 0.25
    assert timeline.overlap("stalls", "compute") == 0
