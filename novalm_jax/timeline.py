"""What a run did when: spans of time on tracks, as a trace that Perfetto and Chrome show.

Knows names and times. Refuses to know what they stand for, and files. Any thread may record.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

Track = Literal["disk reads", "uploads", "dense uploads", "inserts", "compute", "stalls"]
"""What spans belong to, in the order in which it is shown."""

MOST_EVENTS = 250_000
"""Spans that are kept, each of some 500 bytes; all of them are 40 MB of JSON."""

_NOTHING = nullcontext()
# Perfetto takes the thread that has the number of its process for the main one.
_PROCESS, _FIRST_ROW = 1, 2


class _Event(NamedTuple):
    """A span; `begin` and `end` are nanoseconds on `time.perf_counter_ns`'s clock."""

    track: str
    name: str
    begin: int
    end: int
    args: Mapping[str, Any]


class Timeline:
    """Spans of time since it was made, the first ones where there are more than it keeps."""

    def __init__(self, most: int = MOST_EVENTS):
        """Keeps at most so many spans."""
        self._most = most
        self._start = time.perf_counter_ns()
        self._lock = threading.Lock()
        self._events: list[_Event] = []
        self._left_out: Counter[str] = Counter()
        self._gap: tuple[int, int] | None = None

    @property
    def left_out(self) -> dict[str, int]:
        """Spans that were not kept, by track."""
        with self._lock:
            return dict(self._left_out)

    def span(self, track: Track, name: str, **args: Any) -> AbstractContextManager[None]:
        """Records the time that the body of a with-statement takes, also where it fails: `failed` says how, then.

        Args:
          track: what it belongs to.
          name: is shown on it.
          args: numbers and texts that are shown with it.
        """
        return _Span(self, track, name, args)

    def intervals(self, track: Track) -> list[tuple[float, float]]:
        """When the spans of a track began and ended, in seconds since the start, in order; some may overlap."""
        with self._lock:
            events = [event for event in self._events if event.track == track]
        return sorted(((event.begin - self._start) / 1e9, (event.end - self._start) / 1e9) for event in events)

    def overlap(self, first: Track, second: Track) -> float:
        """Seconds in which there was a span on either track."""
        return overlap(self.intervals(first), self.intervals(second))

    def to_json(self) -> bytes:
        """The trace, in Chrome's format: an object with `traceEvents`, times in microseconds.

        Spans of a track that overlap are shown on several rows, so that those of a row never do.
        """
        with self._lock:
            events, left_out, gap = list(self._events), dict(self._left_out), self._gap
        rows = list(_rows(events))
        if gap is not None:
            name = f"{sum(left_out.values()):,} spans left out"
            rows.append(("left out", [_Event("left out", name, *gap, left_out)]))
        shown = [_metadata(_FIRST_ROW, "process_name", name="NovaLM-JAX")]
        for row, (title, spans) in enumerate(rows, _FIRST_ROW):
            shown += [_metadata(row, "thread_name", name=title), _metadata(row, "thread_sort_index", sort_index=row)]
            shown += [self._complete(row, event) for event in spans]
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": shown}).encode()

    def _complete(self, row: int, event: _Event) -> dict[str, Any]:
        begin, duration = (event.begin - self._start) / 1e3, (event.end - event.begin) / 1e3
        place = {"pid": _PROCESS, "tid": row, "ts": begin, "dur": duration}
        return {"name": event.name, "ph": "X", **place, "args": event.args}

    def _add(self, event: _Event) -> None:
        with self._lock:
            if len(self._events) < self._most:
                self._events.append(event)
            else:
                self._gap = (event.begin if self._gap is None else self._gap[0], event.end)
                self._left_out[event.track] += 1


class _Span(AbstractContextManager[None]):
    """The body of a with-statement; of a class of its own, as an interrupt may come between any two instructions."""

    def __init__(self, timeline: Timeline, track: Track, name: str, args: Mapping[str, Any]):
        self._timeline = timeline
        self._track: Track = track
        self._name = name
        self._args = args

    def __enter__(self) -> None:
        self._begin = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        end = time.perf_counter_ns()
        args = self._args if kind is None else {**self._args, "failed": kind.__name__}
        self._timeline._add(_Event(self._track, self._name, self._begin, end, args))


def span(timeline: Timeline | None, track: Track, name: str, **args: Any) -> AbstractContextManager[None]:
    """As `Timeline.span`; nothing where there is no timeline."""
    return _NOTHING if timeline is None else timeline.span(track, name, **args)


def overlap(first: Iterable[tuple[float, float]], second: Iterable[tuple[float, float]]) -> float:
    """How long there was an interval of either kind; begins and ends are of one unit, and in no order."""
    ours, others, total = _united(first), _united(second), 0.0
    i = j = 0
    while i < len(ours) and j < len(others):
        total += max(0.0, min(ours[i][1], others[j][1]) - max(ours[i][0], others[j][0]))
        if ours[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total


def _united(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same stretches of time in order, none of which touch."""
    united: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if united and begin <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((begin, end))
    return united


def _rows(events: Sequence[_Event]) -> Iterator[tuple[str, list[_Event]]]:
    """The rows that are shown, with their titles: of each track as many as have to lie side by side."""
    for track in get_args(Track):
        rows: list[list[_Event]] = []
        for event in sorted((event for event in events if event.track == track), key=lambda event: event.begin):
            free = next((row for row in rows if row[-1].end <= event.begin), None)
            if free is None:
                rows.append(free := [])
            free.append(event)
        for number, row in enumerate(rows, 1):
            yield track if number == 1 else f"{track} {number}", row


def _metadata(row: int, what: str, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": row, "args": args}
