"""Streamed models of a chosen number of slots, and what a run must have moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from novalm_jax import LLM
from novalm_jax.engine.streamed import StreamedExecutor
from novalm_jax.errors import BudgetError


def least_bytes(folder: Path, **options: Any) -> int:
    """The smallest budget that a model runs with; dense weights are on the device, unless told otherwise."""
    with pytest.raises(BudgetError) as caught:
        LLM(folder, device_memory=1000, **{"dense_weights": "device", **options})
    assert caught.value.least_bytes is not None
    return caught.value.least_bytes


def with_slots(folder: Path, slots: int, **options: Any) -> LLM:
    """The model with as many experts on the device; the budget is what that takes."""
    least = least_bytes(folder, **options)
    with LLM(folder, device_memory=least, **options) as smallest:
        programs = executor_of(smallest).programs
    return LLM(folder, device_memory=least + (slots - programs.slots) * programs.record_bytes, **options)


def executor_of(llm: LLM) -> StreamedExecutor:
    """The executor of a model that is known to be streamed."""
    executor = llm._executor
    assert isinstance(executor, StreamedExecutor)
    return executor


def assert_it_streamed(llm: LLM, prefetched: bool | None) -> None:
    """Misses, evictions and uploads there were, and they agree; and prefetches that helped, None: perhaps."""
    report = llm.report()
    assert report.expert_misses > 0 and report.evictions > 0 and report.uploads > 0
    assert report.bytes_uploaded == report.uploads * executor_of(llm).programs.record_bytes
    assert report.uploads >= report.expert_misses
    assert prefetched is None or (report.prefetch_hits > 0) == prefetched
    assert report.policy == llm.options.policy
