"""What JAX says of itself while something runs: counts that do not come from the code that is tested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"
"""A compilation of this process; the compilation cache may have answered it."""


@contextmanager
def events_of(kind: str) -> Iterator[list[str]]:
    """The events in whose names `kind` occurs."""
    heard: list[str] = []

    def hear(event: str, duration: float, **_: object) -> None:
        if kind in event:
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield heard
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
