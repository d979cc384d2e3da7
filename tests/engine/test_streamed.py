"""Experts in tiers: the bits of a resident run, whatever lies where, and nothing left when something goes wrong."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from novalm_jax import LLM, SamplingParams
from novalm_jax.checkpoint.files import TensorReader
from novalm_jax.compat import copy_to_device, program_bytes
from novalm_jax.engine.executor import Executor
from novalm_jax.errors import BudgetError, CheckpointError, EngineError
from novalm_jax.experts import fetcher as fetcher_module
from novalm_jax.experts.pools import DevicePool
from novalm_jax.experts.records import RecordReader
from novalm_jax.experts.streamer import Streamer
from streamed_helpers import assert_it_streamed, executor_of, least_bytes, with_slots
from tiny_checkpoints import tiny_checkpoint

LAYERS, EXPERTS, CHOSEN = 3, 16, 3
IDS = [7 + i * 13 % 250 for i in range(90)]
OPTIONS: dict[str, Any] = {"max_batch": 2, "context_length": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    fields = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "num_hidden_layers": LAYERS}
    return tiny_checkpoint(tmp_path_factory.mktemp("streamed") / "model", "qwen3_moe", **fields)


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, tuple[Any, ...]]:
    """What the resident model gives, by dtype."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        with LLM(folder, dtype=dtype, **OPTIONS) as llm:
            assert llm.report().policy == "resident"
            found[dtype] = outcome(llm)
    return found


def outcome(llm: LLM) -> tuple[Any, ...]:
    """Logits of a prompt, of single steps after a part of it, and texts of two prompts together."""
    texts = llm.generate([IDS[:20], IDS[30:63]], GREEDY)
    return llm.logits(IDS), llm.logits(IDS, decode_from=40), [text.token_ids for text in texts]


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert found[0].tobytes() == expected[0].tobytes()
    assert found[1].tobytes() == expected[1].tobytes()
    assert found[2] == expected[2]


# --- the same bits ---------------------------------------------------------------------------------------------------

HALF, ALL = "half", "all"


@pytest.mark.parametrize(
    ("slots", "host", "prefetch", "policy", "dtype"),
    [
        (CHOSEN, 0, "off", "decayed", "float32"),
        (CHOSEN, ALL, "lookahead", "lru", "bfloat16"),
        (12, HALF, "lookahead", "decayed", "float32"),
        (12, 0, "lookahead", "lru", "float32"),
        (24, ALL, "off", "lru", "float32"),
        (24, HALF, "off", "decayed", "bfloat16"),
        (40, 0, "lookahead", "decayed", "bfloat16"),
    ],
)
def test_every_placement_gives_the_bits_of_the_resident_run(folder, expected, slots, host, prefetch, policy, dtype):
    options = OPTIONS | {"dtype": dtype, "prefetch": prefetch, "policy": policy}
    record = 3 * 16 * 32 * (4 if dtype == "float32" else 2)
    host_memory = {0: 0, HALF: LAYERS * EXPERTS // 2 * record, ALL: "1GiB"}[host]
    with with_slots(folder, slots, host_memory=host_memory, **options) as llm:
        assert executor_of(llm).programs.slots == slots
        assert_same(outcome(llm), expected[dtype])
        assert_it_streamed(llm, prefetched=prefetch == "lookahead")
        report = llm.report()
        assert report.experts_on_device == slots
        assert report.host_bytes == (min(48, 24 if host == HALF else 48) if host else 3) * record
        assert (report.experts_on_disk == 0) == (host == ALL)


def test_prompts_side_by_side_and_in_turns_with_decoding(folder, monkeypatch):
    """Several chunks share a pass over the experts, which stops at every layer for those that decode."""
    long = tiny_checkpoint(
        folder.parent / "long",
        "qwen3_moe",
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=2048,
        scale=0.15,
    )
    options: dict[str, Any] = {"max_batch": 3, "context_length": 1500, "dtype": "float32"}
    prompts = [[5 + (i * i + n) % 250 for i in range(length)] for n, length in enumerate((1300, 9, 700))]
    with LLM(long, **options) as llm:
        expected = [out.token_ids for out in llm.generate(prompts, GREEDY)]
        logits = llm.logits(prompts[0])
    monkeypatch.setattr("novalm_jax.engine.engine.PREFILL_SLICE", 0.0)
    with with_slots(long, 12, host_memory=0, **options) as llm:
        for pass_chunks in (1, 3, 99):
            executor_of(llm)._pass_chunks = pass_chunks
            before = llm.report().uploads
            assert llm.logits(prompts[0]).tobytes() == logits.tobytes()
            uploads = llm.report().uploads - before
            # Chunks that share a pass share its uploads.
            assert uploads < 2 * EXPERTS * (3 if pass_chunks == 1 else 1) + 1
            assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == expected


def test_one_slot_is_enough(folder, expected, monkeypatch):
    """More experts than slots: every layer runs in waves of one."""
    monkeypatch.setattr("novalm_jax.engine.placement._fewest_slots", lambda config: 1)
    with LLM(folder, device_memory=least_bytes(folder, dtype="float32", **OPTIONS), dtype="float32", **OPTIONS) as llm:
        assert executor_of(llm).programs.slots == 1
        assert_same(outcome(llm), expected["float32"])


@pytest.mark.parametrize("seed", range(4))
def test_delays_anywhere_change_nothing(folder, expected, monkeypatch, seed):
    draw = np.random.default_rng(seed)

    def late(function: Any) -> Any:
        def slept(*arguments: Any) -> Any:
            time.sleep(float(draw.exponential(5e-4)))
            return function(*arguments)

        return slept

    monkeypatch.setattr(RecordReader, "read_into", late(RecordReader.read_into))
    monkeypatch.setattr(fetcher_module, "copy_to_device", late(fetcher_module.copy_to_device))
    monkeypatch.setattr(DevicePool, "insert", late(DevicePool.insert))
    with with_slots(folder, 12, dtype="float32", host_memory=0, **OPTIONS) as llm:
        assert_same(outcome(llm), expected["float32"])


def test_memory_that_was_given_back_does_not_matter(folder, expected, monkeypatch):
    """Read buffers are overwritten as soon as they are free for something else."""

    def spoiling(array: np.ndarray, *memory: np.ndarray) -> jax.Array:
        copy = copy_to_device(array, *memory)
        array.view(np.uint8)[...] = 0xFF
        return copy

    monkeypatch.setattr(fetcher_module, "copy_to_device", spoiling)
    with with_slots(folder, 12, dtype="float32", host_memory=0, **OPTIONS) as llm:
        assert_same(outcome(llm), expected["float32"])


# --- faults that must show -------------------------------------------------------------------------------------------


def _wrong_slot(monkeypatch) -> None:
    insert = DevicePool.insert
    monkeypatch.setattr(
        DevicePool, "insert", lambda self, record, slot: insert(self, record, (slot + 1) % len(self.arrays.down))
    )


def _stale_residency(monkeypatch) -> None:
    evict = Streamer._evict

    def kept(self: Any, slot: int) -> None:
        record = self._table.record_in(slot)
        evict(self, slot)
        if record is not None:
            self._table.table[record] = slot

    monkeypatch.setattr(Streamer, "_evict", kept)


def _evicted_in_use(monkeypatch) -> None:
    """All that is missing comes into one slot, of which a wave computes."""
    make_room, arrived = Streamer._make_room, fetcher_module.Fetcher.arrived
    monkeypatch.setattr(Streamer, "_make_room", lambda self, layer, busy: make_room(self, layer, ()))

    def together(self: Any, fetches: Any, wait: bool) -> Any:
        while wait and len(found := arrived(self, fetches, wait)) < min(len(fetches), 2):
            time.sleep(1e-3)
        return found if wait else arrived(self, fetches, wait)

    monkeypatch.setattr(fetcher_module.Fetcher, "arrived", together)


def _handed_over_early(monkeypatch) -> None:
    """The device's array is the read buffer itself, into which the next record goes."""

    def shared(array: np.ndarray, *memory: np.ndarray) -> jax.Array:
        handed = jax.device_put(array)
        array.view(np.uint8)[...] = 0xFF
        return handed

    monkeypatch.setattr(fetcher_module, "copy_to_device", shared)


@pytest.mark.parametrize("fault", [_wrong_slot, _stale_residency, _evicted_in_use, _handed_over_early])
def test_the_comparison_sees(folder, expected, monkeypatch, fault):
    fault(monkeypatch)
    with with_slots(folder, CHOSEN, dtype="float32", host_memory=0, prefetch="off", **OPTIONS) as llm:
        with pytest.raises((AssertionError, EngineError)):
            assert_same(outcome(llm), expected["float32"])


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_the_least_budget_runs_and_one_byte_less_is_refused_unread(folder, monkeypatch):
    names: list[str] = []
    read_run = TensorReader.read_run

    def noted(self: TensorReader, ranges: Any) -> None:
        names.extend(part.tensor.name for part in ranges)
        read_run(self, ranges)

    monkeypatch.setattr(TensorReader, "read_run", noted)
    options: dict[str, Any] = OPTIONS | {"dense_weights": "device"}
    least = least_bytes(folder, **options)
    with pytest.raises(BudgetError):
        LLM(folder, device_memory=least - 1, **options)
    assert names == []
    with LLM(folder, device_memory=least, **options) as llm:
        assert llm.report().device_peak_bytes <= least
        assert len(llm.generate([IDS], GREEDY)[0].token_ids) == 12
    assert names


@pytest.mark.parametrize("slots", [CHOSEN, 12, 24, 40, ALL])
def test_no_moment_takes_more_than_the_plan_says(folder, monkeypatch, slots):
    """Live arrays on the device at every launch and every insert, and what the program takes besides."""
    options = OPTIONS | {"dtype": "bfloat16", "context_length": 256}
    least_bytes(folder, **options)
    if slots == ALL:
        with LLM(folder, **options) as llm:
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
        LLM(folder, device_memory=everything, **options) if slots == ALL else with_slots(folder, slots, **options)
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


def test_spare_memory_becomes_slots_and_all_of_it_a_resident_model(folder):
    with LLM(folder, dtype="float32", **OPTIONS) as llm:
        peak = llm.report().device_peak_bytes
    with LLM(folder, device_memory=peak - 1, dtype="float32", **OPTIONS) as llm:
        # Some of it lets chunks of a prompt share a pass.
        assert 30 <= executor_of(llm).programs.slots < 48
    with LLM(folder, device_memory=peak, dtype="float32", **OPTIONS) as llm:
        llm.generate([IDS[:8]], GREEDY)
        before = llm.report().launches
        llm.generate([IDS[:8]], GREEDY)
        # One program for each token after the first, and those of the prompt.
        assert llm.report().launches - before == (12 - 1) + (1 + 2 * LAYERS + 1)


# --- the disk --------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_folder(tmp_path) -> Path:
    return tiny_checkpoint(tmp_path / "model", "qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=CHOSEN)


def test_a_model_in_memory_needs_its_files_no_more(own_folder):
    options = OPTIONS | {"dtype": "float32"}
    with with_slots(own_folder, 6, host_memory="1GiB", **options) as llm:
        expected = llm.generate([IDS[:5]], GREEDY)[0].token_ids
        (own_folder / "model.safetensors").write_bytes(b"")
        read = llm.report().disk_bytes_read
        long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        assert llm.generate([IDS[:5]], long)[0].token_ids[:12] == expected
        assert llm.report().disk_bytes_read == read


@pytest.mark.parametrize("prefetch", ["off", "lookahead"])
def test_a_read_that_fails_ends_everything_and_says_where(own_folder, prefetch):
    threads = set(threading.enumerate())
    llm = with_slots(own_folder, 6, host_memory=0, prefetch=prefetch, **OPTIONS)
    llm.generate([IDS[:5]], GREEDY)
    streams = [llm.stream(IDS[:n], GREEDY) for n in (3, 30, 50)]
    next(streams[0])
    with (own_folder / "model.safetensors").open("r+b") as file:
        file.truncate(20_000)
    says = r"Expert \d+ of layer \d+ cannot be read\. .*model\.safetensors: .* stopped at byte \d+ "
    for stream in streams:
        with pytest.raises(CheckpointError, match=says):
            "".join(stream)
    with pytest.raises(EngineError, match="closed"):
        llm.generate([IDS], GREEDY)
    assert set(threading.enumerate()) == threads


def test_closing_in_the_middle_leaves_no_thread_and_no_array(own_folder):
    gc.collect()
    threads, arrays = set(threading.enumerate()), {id(array) for array in jax.live_arrays()}
    llm = with_slots(own_folder, 6, host_memory=0, **OPTIONS)
    stream = llm.stream(IDS, SamplingParams(ignore_eos=True, temperature=0))
    next(stream)
    llm.close()
    assert set(threading.enumerate()) == threads
    gc.collect()
    assert [array.shape for array in jax.live_arrays() if id(array) not in arrays] == []


def test_nothing_is_traced_anew_once_a_model_is_warm(folder):
    heard: list[str] = []

    def hear(event: str, duration: float, **_: object) -> None:
        if "trace" in event:
            heard.append(event)

    with with_slots(folder, 12, dtype="float32", host_memory=0, **OPTIONS) as llm:
        outcome(llm)
        jax.monitoring.register_event_duration_secs_listener(hear)
        try:
            outcome(llm)
        finally:
            jax.monitoring.unregister_event_duration_listener(hear)
    assert heard == []


def test_a_model_that_nobody_closes_leaves_no_threads(folder):
    threads = set(threading.enumerate())
    llm = with_slots(folder, 12, dtype="float32", host_memory=0, **OPTIONS)
    assert set(threading.enumerate()) > threads
    del llm
    gc.collect()
    assert set(threading.enumerate()) == threads


def test_an_upload_that_fails_ends_everything(folder, monkeypatch):
    llm = with_slots(folder, 12, dtype="float32", host_memory=0, **OPTIONS)

    def fail(array: np.ndarray, *memory: np.ndarray) -> jax.Array:
        raise MemoryError("no room on the device")

    monkeypatch.setattr(fetcher_module, "copy_to_device", fail)
    with pytest.raises(EngineError, match="no room on the device"):
        llm.generate([IDS], GREEDY)
    with pytest.raises(EngineError, match="closed"):
        llm.generate([IDS], GREEDY)


def test_an_interrupted_step_leaves_a_model_that_goes_on(folder, expected, monkeypatch):
    """Whatever was on its way arrives as if it had been prefetched."""
    with with_slots(folder, 12, dtype="float32", host_memory=0, **OPTIONS) as llm:
        arrived, calls = fetcher_module.Fetcher.arrived, iter(range(10**6))

        def interrupted(self: Any, fetches: Any, wait: bool) -> Any:
            if wait and next(calls) % 7 == 6:
                raise KeyboardInterrupt
            return arrived(self, fetches, wait)

        with monkeypatch.context() as patch:
            patch.setattr(fetcher_module.Fetcher, "arrived", interrupted)
            for _ in range(5):
                with pytest.raises(KeyboardInterrupt):
                    llm.generate([IDS], GREEDY)
        assert_same(outcome(llm), expected["float32"])


@pytest.mark.parametrize(("ram", "forgotten"), [(10**12, False), (1000, True)])
def test_where_ram_is_short_the_system_need_not_keep_what_the_host_holds(folder, monkeypatch, ram, forgotten):
    calls: list[RecordReader] = []
    monkeypatch.setattr("novalm_jax.engine.start.available_ram", lambda: ram)
    monkeypatch.setattr(RecordReader, "forget_pages", lambda self: calls.append(self))
    with with_slots(folder, 12, host_memory="1GiB", **OPTIONS):
        assert bool(calls) == forgotten


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """Every wait in here has somebody who ends it."""
    before = set(threading.enumerate())
    yield
    assert [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()] == []
