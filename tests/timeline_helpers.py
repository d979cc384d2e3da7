"""Traces as they are written, read again."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

Event = dict[str, Any]


def rows_of(trace: bytes) -> dict[str, list[Event]]:
    """The spans of each named row, in order. Every one has what the format asks for, and none lies over another."""
    events = json.loads(trace)["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X"}
    named = [event for event in events if event["name"] == "thread_name"]
    titles = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
    assert len(titles) == len(named) == len(set(titles.values()))
    rows: dict[str, list[Event]] = {title: [] for title in titles.values()}
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["args"], dict)
            rows[titles[event["pid"], event["tid"]]].append(event)
    for title, spans in rows.items():
        spans.sort(key=lambda span: span["ts"])
        for before, after in pairwise(spans):
            # Times are whole nanoseconds, in microseconds.
            assert before["ts"] + before["dur"] < after["ts"] + 1e-4, title
    assert all(rows.values())
    return rows
