"""Experts in tiers: the bits of a resident run, whatever lies where, within the memory that was planned."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_events import events_of
from novalm_jax import LLM
from novalm_jax.checkpoint.files import TensorReader
from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.compat import copy_to_device, program_bytes
from novalm_jax.engine.estimate import Estimated
from novalm_jax.engine.executor import Executor
from novalm_jax.errors import BudgetError
from novalm_jax.experts import fetcher as fetcher_module
from novalm_jax.experts.host_tier import HostTier
from novalm_jax.experts.pools import DevicePool
from novalm_jax.experts.records import RecordReader
from novalm_jax.options import EngineOptions
from streamed_helpers import (
    assert_it_streamed,
    assert_nothing_is_held,
    assert_same,
    executor_of,
    for_requests,
    least_bytes,
    set_pass_chunks,
    wait_for_prefetches,
    with_slots,
)
from streamed_model import (
    BRIEF,
    CHOSEN,
    EXPERTS,
    GREEDY,
    IDS,
    LAYERS,
    OPTIONS,
    QUESTIONS,
    host_memory,
    record_size,
    streamed,
)
from tiny_checkpoints import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("shared")

HALF, ALL = LAYERS * EXPERTS // 2, LAYERS * EXPERTS

# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "host", "prefetch", "policy", "dtype"),
    [
        (CHOSEN, 0, "off", "default", "float32"),
        (CHOSEN, ALL, "lookahead", "lru", "bfloat16"),
        (12, HALF, "lookahead", "default", "float32"),
        (12, 0, "lookahead", "lru", "float32"),
        (24, ALL, "off", "lru", "float32"),
        (24, HALF, "off", "decayed", "bfloat16"),
        (40, 0, "lookahead", "lfu", "bfloat16"),
    ],
)
def test_every_placement_gives_the_bits_of_the_resident_run(
    moe_folder, resident, monkeypatch, slots, host, prefetch, policy, dtype
):
    wait_for_prefetches(monkeypatch)
    options = {"dtype": dtype, "prefetch": prefetch, "policy": policy, "host_memory": host_memory(host, dtype)}
    with streamed(moe_folder, slots, **options) as llm:
        assert executor_of(llm).programs.slots == slots
        assert_same(QUESTIONS.ask(llm), resident[dtype])
        assert_it_streamed(llm, prefetched=prefetch == "lookahead")
        report = llm.report()
        assert report.host_bytes == (host or 3) * record_size(dtype)
        assert (report.experts_on_disk == 0) == (host == ALL)


@pytest.fixture(scope="module")
def long(moe_folder) -> Path:
    """A model of a longer context, and of so many experts that those that are streamed leave room for pages."""
    fields = {"num_experts": 2 * EXPERTS, "num_experts_per_tok": CHOSEN, "max_position_embeddings": 2048}
    return tiny_checkpoint(moe_folder.parent / "long", "qwen3_moe", num_hidden_layers=4, scale=0.15, **fields)


PROMPTS = [[5 + (i * i + n) % 250 for i in range(length)] for n, length in enumerate((1300, 62, 700))]


LONG_OPTIONS: dict[str, Any] = {
    **{"max_batch": 3, "context_length": 1500, "dtype": "float32"},
    **{"prefix_cache": False, "prefill_seconds": 0},
}


def streamed_long(long: Path) -> LLM:
    """With a few slots, and pages for all of these prompts at a time."""
    sizes = Estimated(Checkpoint.open(long).config, EngineOptions(**LONG_OPTIONS))
    one, all_of_them = (sizes.kv_bytes(1500, pages) for pages in (24, 21 + 2 + 12))
    options: dict[str, Any] = LONG_OPTIONS | {"kv_memory": all_of_them, "dense_weights": "device", "host_memory": 0}
    memory = least_bytes(long, **options) + all_of_them - one + 12 * record_size()
    llm = LLM(long, device_memory=memory, **options)
    assert CHOSEN < executor_of(llm).programs.slots < 16 and llm._placement.pages == 35
    return llm


def test_prompts_side_by_side_and_in_turns_with_decoding(long):
    """Several chunks share a pass over the experts, which stops at every layer for those that decode."""
    with LLM(long, **LONG_OPTIONS) as llm:
        expected = [out.token_ids for out in llm.generate(PROMPTS, GREEDY)]
        logits = llm.logits(PROMPTS[0])
    with streamed_long(long) as llm:
        for pass_chunks in (1, 3, 99):
            set_pass_chunks(llm, pass_chunks)
            before = llm.report().uploads
            assert llm.logits(PROMPTS[0]).tobytes() == logits.tobytes()
            uploads = llm.report().uploads - before
            # Chunks that share a pass share its uploads.
            assert uploads < 4 * 2 * EXPERTS * (3 if pass_chunks == 1 else 1) + 1
            assert [out.token_ids for out in llm.generate(PROMPTS, GREEDY)] == expected
        assert_nothing_is_held(llm)


def test_a_prompt_that_is_given_up_in_the_middle_of_a_pass_changes_no_bit_of_the_others(long):
    """A page of it is another request's before its last layers come."""
    with streamed_long(long) as llm:
        set_pass_chunks(llm, 99)
        expected = [out.text for out in llm.generate(PROMPTS[:2], GREEDY)]
        running = llm.stream(PROMPTS[1], GREEDY)
        while running.token_count < 2:
            running.advance()
        given_up, kept = llm.streams([PROMPTS[2], PROMPTS[0]], GREEDY)
        running.advance()
        engine = llm._engine
        assert engine._pass is not None and len(engine._pass.takes) == 2
        pages = set(given_up._request.held.tables[0])
        given_up.close()
        assert len(pages) == 11 and engine.scheduler.pages.pools[0].in_use == 1 + 21
        running.advance()
        # Half of the layers are still to come.
        assert running._request.held.tables[0][1] in pages and engine._pass is not None
        assert ["".join(kept), "".join(running)] == expected
        assert_nothing_is_held(llm)


def test_one_slot_is_enough(moe_folder, resident, monkeypatch):
    """More experts than slots: every layer runs in waves of one."""
    monkeypatch.setattr("novalm_jax.engine.fitting._fewest_slots", lambda config: 1)
    options = {"dtype": "float32", **OPTIONS}
    with LLM(moe_folder, device_memory=least_bytes(moe_folder, **options), **options) as llm:
        assert executor_of(llm).programs.slots == 1
        assert_same(QUESTIONS.ask(llm), resident["float32"])


@pytest.mark.parametrize("host", [0, HALF])
def test_delays_anywhere_change_nothing(moe_folder, resident, monkeypatch, host):
    """In reads, copies and inserts, other ones in each of 20 runs, which begin with what the one before left."""
    draw = np.random.default_rng(0)

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def slept(*arguments: Any) -> Any:
            time.sleep(float(draw.exponential(3e-4)))
            return function(*arguments)

        return slept

    monkeypatch.setattr(RecordReader, "read_into", late(RecordReader.read_into))
    monkeypatch.setattr(fetcher_module, "copy_to_device", late(fetcher_module.copy_to_device))
    monkeypatch.setattr(DevicePool, "insert", late(DevicePool.insert))
    with streamed(moe_folder, host_memory=host_memory(host)) as llm:
        for seed in range(20):
            draw = np.random.default_rng(seed)
            before = llm.report()
            assert_same(BRIEF.ask(llm), resident["brief"])
            assert llm.report().evictions > before.evictions and llm.report().uploads > before.uploads
            assert llm.report().disk_bytes_read > before.disk_bytes_read


def test_read_buffers_that_were_given_back_do_not_matter(moe_folder, resident, monkeypatch):
    """They are overwritten as soon as they are free for something else."""

    def spoiling(array: np.ndarray, *memory: np.ndarray) -> jax.Array:
        copy = copy_to_device(array, *memory)
        array.view(np.uint8)[...] = 0xFF
        return copy

    monkeypatch.setattr(fetcher_module, "copy_to_device", spoiling)
    with streamed(moe_folder) as llm:
        assert_same(QUESTIONS.ask(llm), resident["float32"])


def test_slots_of_the_host_tier_do_not_matter_after_their_record_left(moe_folder, resident, monkeypatch):
    """They are overwritten as soon as they are another record's, before that is read."""
    make_room, spoiled = HostTier.make_room, itertools.count()

    def spoiling(self: HostTier, record: Any, step: int, used: Any) -> int:
        slot = make_room(self, record, step, used)
        for array in jax.tree.leaves(self.memory(slot)):
            array.view(np.uint8)[...] = 0xFF
        next(spoiled)
        return slot

    monkeypatch.setattr(HostTier, "make_room", spoiling)
    with streamed(moe_folder, host_memory=host_memory(6)) as llm:
        assert_same(QUESTIONS.ask(llm), resident["float32"])
    assert next(spoiled) > 100


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_the_least_budget_runs_and_one_byte_less_is_refused_unread(moe_folder, monkeypatch):
    names: list[str] = []
    read_run = TensorReader.read_run

    def noted(self: TensorReader, ranges: Any) -> None:
        names.extend(part.tensor.name for part in ranges)
        read_run(self, ranges)

    monkeypatch.setattr(TensorReader, "read_run", noted)
    least = least_bytes(moe_folder, **OPTIONS)
    options: dict[str, Any] = OPTIONS | {"dense_weights": "device"}
    with pytest.raises(BudgetError):
        LLM(moe_folder, device_memory=least - 1, **options)
    assert names == []
    with LLM(moe_folder, device_memory=least, **options) as llm:
        assert llm.report().device_peak_bytes <= least
        assert len(llm.generate([IDS], GREEDY)[0].token_ids) == 12
    assert names


@pytest.mark.parametrize("slots", [CHOSEN, 12, 24, 40, ALL])
def test_no_moment_takes_more_than_the_plan_says(moe_folder, monkeypatch, slots):
    """Live arrays on the device at every launch and every insert, and what the program takes besides."""
    options = OPTIONS | {"dtype": "bfloat16"}
    least_bytes(moe_folder, **options)
    if slots == ALL:
        with LLM(moe_folder, **options) as llm:
            everything = llm.report().device_peak_bytes
    gc.collect()
    before = on_device()
    peaks = []
    launch, insert = Executor._run, DevicePool.insert

    def launched(self: Executor, program: Any, *arguments: Any, **options: Any) -> Any:
        peaks.append(on_device() - before + sum(program_bytes(program)))
        return launch(self, program, *arguments, **options)

    def inserted(self: DevicePool, *arguments: Any) -> Any:
        peaks.append(on_device() - before + sum(program_bytes(self._insert)))
        return insert(self, *arguments)

    monkeypatch.setattr(Executor, "_run", launched)
    monkeypatch.setattr(DevicePool, "insert", inserted)
    with (
        LLM(moe_folder, device_memory=everything, **options)
        if slots == ALL
        else with_slots(moe_folder, slots, **options)
    ) as llm:
        llm.generate([IDS + IDS, IDS[:20]], GREEDY)
        llm.logits(IDS, decode_from=60)
        report = llm.report()
    assert (report.policy == "resident") == (slots == ALL)
    assert len(peaks) > 40
    assert max(peaks) <= report.device_peak_bytes <= report.device_budget_bytes


def on_device() -> int:
    arrays = (array for array in jax.live_arrays() if array.sharding.memory_kind == "device")
    return sum(array.nbytes for array in arrays)


def test_spare_memory_becomes_slots_and_all_of_it_a_resident_model(moe_folder):
    options = for_requests(1, moe_folder, dtype="float32", **OPTIONS)
    with LLM(moe_folder, **options) as llm:
        peak = llm.report().device_peak_bytes
    with LLM(moe_folder, device_memory=peak - 1, **options) as llm:
        # Some of it lets chunks of a prompt share a pass.
        assert 30 <= executor_of(llm).programs.slots < 48
    with LLM(moe_folder, device_memory=peak, **options) as llm:
        llm.generate([IDS[:8]], GREEDY)
        before = llm.report().launches
        llm.generate([IDS[:8]], GREEDY)
        # One program for each token after the first, and those of the prompt.
        assert llm.report().launches - before == (12 - 1) + (1 + 2 * LAYERS + 1)


def test_nothing_is_traced_anew_once_a_model_is_warm(moe_folder):
    with streamed(moe_folder) as llm:
        QUESTIONS.ask(llm)
        with events_of("trace") as heard:
            QUESTIONS.ask(llm)
    assert heard == []


@pytest.mark.parametrize(("ram", "forgotten"), [(10**12, False), (1000, True)])
def test_where_ram_is_short_the_system_need_not_keep_what_the_host_holds(moe_folder, monkeypatch, ram, forgotten):
    calls: list[RecordReader] = []
    monkeypatch.setattr("novalm_jax.engine.start.available_ram", lambda: ram)
    monkeypatch.setattr(RecordReader, "forget_pages", lambda self: calls.append(self))
    with with_slots(moe_folder, 12, host_memory="1GiB", **OPTIONS):
        assert bool(calls) == forgotten
