"""The bars that long work shows on stderr, when that is a terminal. Knows counts; refuses to know what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

Advance = Callable[[int], object]
"""Hears of every count of bytes that were dealt with."""


@contextmanager
def bytes_bar(label: str, total: int, done: int = 0) -> Iterator[Advance]:
    """A bar of bytes with their rate; `done` of them were dealt with before."""
    sizes = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with _Bar(total=total, initial=done, desc=label, disable=None, **sizes) as bar:
        yield bar.update


def steps_bar(label: str, total: int, done: int = 0) -> tqdm:
    """A bar of steps, a context manager; `done` of them were taken before."""
    return _Bar(total=total, initial=done, desc=label, disable=None)


class _Bar(tqdm):
    """Without tqdm's monitor, a thread that would outlive the bar."""

    monitor_interval = 0
