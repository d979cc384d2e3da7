"""Dense weights that come in turn: the bits of a resident run, budgets that hold, and nothing left at the end."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from interrupts import interrupted_at
from novalm_jax import LLM, SamplingParams
from novalm_jax.checkpoint.files import TensorReader
from novalm_jax.checkpoint.load import Checkpoint, abstract_model
from novalm_jax.compat import program_bytes
from novalm_jax.engine.dense_streamed import DenseStreamedExecutor
from novalm_jax.engine.estimate import Estimated
from novalm_jax.engine.executor import Executor
from novalm_jax.errors import BudgetError, CheckpointError
from novalm_jax.experts import dense as dense_module
from novalm_jax.experts.dense import head_blocks, plan_dense
from novalm_jax.experts.dense_streamer import DenseHost, DenseStreamer
from novalm_jax.experts.link import Link
from novalm_jax.options import EngineOptions
from streamed_helpers import assert_threads_end_with, least_bytes
from tiny_checkpoints import tiny_checkpoint
from workspace_helpers import assert_estimated

pytestmark = pytest.mark.usefixtures("shared")

IDS = [7 + i * 13 % 240 for i in range(90)]
OPTIONS: dict[str, Any] = {"max_batch": 2, "context_length": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def outcome(llm: LLM) -> tuple[Any, ...]:
    """Logits of a prompt, of single steps after a part of it, and texts of two prompts together."""
    texts = llm.generate([IDS[:20], IDS[30:63]], GREEDY)
    return llm.logits(IDS).tobytes(), llm.logits(IDS, decode_from=40).tobytes(), [text.token_ids for text in texts]


def smallest(folder: Path, spare: int = 0, **options: Any) -> LLM:
    """With the least memory that it runs in, and some more."""
    options = OPTIONS | {"dense_weights": "stream"} | options
    return LLM(folder, device_memory=least_bytes(folder, **options) + spare, **options)


def kv_bytes(folder: Path, dtype: str, pages: int) -> int:
    """What so many pages take."""
    sizes = Estimated(Checkpoint.open(folder).config, EngineOptions(dtype=dtype, **OPTIONS))
    return sizes.kv_bytes(OPTIONS["context_length"], pages)


def dense_of(llm: LLM) -> DenseStreamer:
    executor = llm._executor
    assert isinstance(executor, DenseStreamedExecutor)
    return executor.dense


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "llama-tied": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "qwen3_moe": {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1600},
    "mixtral": {"num_hidden_layers": 4, "vocab_size": 1208},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Of heads that are one block or several, tied, and of a size that is no multiple of 64."""
    base = tmp_path_factory.mktemp("dense")
    return {name: tiny_checkpoint(base / name, name.removesuffix("-tied"), **fields) for name, fields in MODELS.items()}


@pytest.fixture(scope="module")
def expected(folders) -> Callable[[str, str], tuple[Any, ...]]:
    """What a resident model gives."""
    known: dict[tuple[str, str], tuple[Any, ...]] = {}

    def find(name: str, dtype: str) -> tuple[Any, ...]:
        if (name, dtype) not in known:
            with LLM(folders[name], dtype=dtype, **OPTIONS) as llm:
                assert llm.report().policy == "resident"
                known[name, dtype] = outcome(llm)
        return known[name, dtype]

    return find


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "host", "kept"),
    [
        ("llama", "float32", 0, 0),
        ("llama", "bfloat16", "1GiB", 3),
        ("llama-tied", "float32", "1GiB", 0),
        ("llama-tied", "bfloat16", 0, 1),
        ("qwen3_moe", "float32", "some", 0),
        ("qwen3_moe", "bfloat16", 0, 2),
        ("mixtral", "float32", "1GiB", 0),
        ("mixtral", "bfloat16", "some", 0),
    ],
)
def test_every_placement_gives_the_bits_of_the_resident_run(folders, expected, name, dtype, host, kept):
    parts = plan_dense(abstract_model(Checkpoint.open(folders[name]).config, dtype)).parts
    memory = sum(part.nbytes for part in parts) // 2 if host == "some" else host
    # Pages of the second request come before parts that stay.
    pages = kv_bytes(folders[name], dtype, 4) - kv_bytes(folders[name], dtype, 2)
    spare = int(kept * 1.5 * max(part.nbytes for part in parts)) + (pages if kept else 0)
    with smallest(folders[name], spare, dtype=dtype, host_memory=memory) as llm:
        assert outcome(llm) == expected(name, dtype)
        dense, report = dense_of(llm), llm.report()
        assert (sum(map(dense.stays, range(len(parts)))) >= kept) and not all(map(dense.stays, range(len(parts))))
        assert report.dense_uploads == dense.uploads > 50 and report.dense_bytes_uploaded == dense.bytes_uploaded
        assert report.device_peak_bytes <= report.device_budget_bytes
        assert_estimated(llm)
        assert (report.policy == "in turn") == name.startswith("llama")


@pytest.mark.parametrize(
    ("name", "dtype", "several"),
    [("qwen3_moe", "float32", True), ("mixtral", "bfloat16", True), ("mixtral", "float32", False)],
)
def test_a_head_is_cut_where_blocks_round_as_the_whole(folders, name, dtype, several):
    parts = plan_dense(abstract_model(Checkpoint.open(folders[name]).config, dtype)).parts
    assert (len([part for part in parts if part.rows]) > 1) == several


@pytest.mark.parametrize(
    ("rows", "about"), [(32000, 4000), (50257, 9999), (100, 500), (129, 1), (256, 128), (257, 128)]
)
def test_blocks_of_a_head_are_alike_and_cover_it(rows, about):
    blocks = head_blocks(rows, about)
    assert blocks[0][0] == 0 and blocks[-1][1] == rows
    assert len({end - first for first, end in blocks}) == 1
    covered = 0
    for first, end in blocks:
        assert first <= covered < end
        covered = end


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_with_a_bias_is_cut_with_it(monkeypatch, dtype):
    """In bfloat16: one of float32 with 96 rows is one block."""
    folder = Path(__file__).parents[1] / "golden" / "phimoe"
    if dtype == "bfloat16":
        monkeypatch.setattr(dense_module, "head_blocks", lambda rows, about: head_blocks(rows, 64))
    ids = [5 + i % 50 for i in range(40)]
    options: dict[str, Any] = {"dtype": dtype, "max_batch": 2, "context_length": 64}
    with LLM(folder, **options) as llm:
        logits = llm.logits(ids, decode_from=30)
    options |= {"dense_weights": "stream"}
    with LLM(folder, device_memory=least_bytes(folder, **options), **options) as llm:
        assert len([part for part in dense_of(llm)._plan.parts if part.rows]) == (2 if dtype == "bfloat16" else 1)
        assert llm.logits(ids, decode_from=30).tobytes() == logits.tobytes()


def test_prompts_of_several_chunks_in_turns_with_decoding(folders):
    """Each has a turn of its own over the parts, which the other comes into."""
    long = tiny_checkpoint(folders["llama"].parent / "long", "qwen3_moe", num_experts=8, max_position_embeddings=2048)
    options: dict[str, Any] = {"max_batch": 3, "context_length": 1500, "dtype": "float32"}
    prompts = [[5 + (i * i + n) % 250 for i in range(length)] for n, length in enumerate((1300, 9, 700))]
    with LLM(long, **options) as llm:
        texts = [out.token_ids for out in llm.generate(prompts, GREEDY)]
        logits = llm.logits(prompts[0])
    options["prefill_seconds"] = 0
    with smallest(long, **options) as llm:
        assert llm.logits(prompts[0]).tobytes() == logits.tobytes()
        assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == texts


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_a_model_whose_dense_weights_do_not_fit_streams_them_by_itself(folders, caplog, expected):
    # For one request at a time, as pages for more of them come before parts that stay.
    options = OPTIONS | {"dtype": "float32", "max_batch": 1}
    with_dense = least_bytes(folders["llama"], **options)
    with pytest.raises(BudgetError, match=r"Give more device_memory .* or dense_weights auto, which streams them\."):
        LLM(folders["llama"], device_memory=with_dense - 1, dense_weights="device", **options)
    caplog.clear()
    with LLM(folders["llama"], device_memory=with_dense - 1, **options) as llm:
        assert "the embedding has no room on the device; its rows are looked up on the host" in caplog.text
        assert outcome(llm) == expected("llama", "float32")
    caplog.clear()
    with smallest(folders["llama"], dense_weights="auto", dtype="float32", max_batch=1):
        assert "5 of 5 parts of the dense weights have no room on the device, and come in every step" in caplog.text


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_least_budget_works_and_one_byte_less_is_refused_unread(folders, monkeypatch, name):
    reads = []
    read = TensorReader.read_run
    monkeypatch.setattr(TensorReader, "read_run", lambda self, ranges: (reads.append(ranges), read(self, ranges))[1])
    least = least_bytes(folders[name], dense_weights="auto", **OPTIONS)
    with pytest.raises(BudgetError):
        LLM(folders[name], device_memory=least - 1, **OPTIONS)
    assert reads == []
    with LLM(folders[name], device_memory=least, **OPTIONS) as llm:
        assert len(llm.generate([IDS], GREEDY)[0].token_ids) == 12
        assert dense_of(llm).uploads > 0
    assert reads


@pytest.mark.parametrize(("name", "kept"), [("llama", 0), ("llama", 2), ("qwen3_moe", 1)])
def test_no_step_takes_more_than_the_plan_says(folders, monkeypatch, name, kept):
    """Live arrays at every launch, and what the program takes besides."""
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind != "pinned_host")
    peaks = []
    launch = Executor._run

    def measured(self: Executor, program: Any, *arguments: Any, **named: Any) -> Any:
        live = sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind != "pinned_host")
        peaks.append(live - before + sum(program_bytes(program)))
        return launch(self, program, *arguments, **named)

    monkeypatch.setattr(Executor, "_run", measured)
    largest = max(part.nbytes for part in plan_dense(abstract_model(Checkpoint.open(folders[name]).config)).parts)
    with smallest(folders[name], kept * largest, dtype="float32") as llm:
        outcome(llm)
        planned = llm.report().device_peak_bytes
    assert len(peaks) > 100
    assert 0.5 * planned < max(peaks) <= planned


def test_parts_that_stay_are_spread_over_the_step(folders):
    plan = plan_dense(abstract_model(Checkpoint.open(folders["llama"]).config))
    sizes = [part.nbytes for part in plan.parts]
    assert plan.keep(0).on_device == frozenset() and plan.keep(sum(sizes)).on_device == frozenset(range(len(sizes)))
    plans = [plan.keep(room) for room in range(0, sum(sizes), 1000)]
    few = next(sorted(kept.on_device) for kept in plans if len(kept.on_device) == 2)
    assert few[1] - few[0] > 1
    for room in range(0, sum(sizes), max(sizes) // 3):
        assert plan.keep(room).device_bytes <= room + plan.device_bytes
        assert plan.keep(room // 2).hold(room).host_bytes <= room


def test_a_part_that_is_larger_than_two_others_stays(folders):
    plan = plan_dense(abstract_model(Checkpoint.open(folders["mixtral"]).config, "float32"))
    *layers, head = (part.nbytes for part in plan.parts)
    assert plan.leanest().on_device == {len(layers)}
    assert plan.leanest().device_bytes == head + 2 * max(layers) < plan.device_bytes == 2 * head


def test_what_the_host_holds_is_read_once(tmp_path, expected):
    folder = tiny_checkpoint(tmp_path / "model", "llama", **MODELS["llama"])
    with smallest(folder, dtype="float32", host_memory="1GiB") as llm:
        before = llm.report().disk_bytes_read
        os.truncate(folder / "model.safetensors", 100)
        assert outcome(llm) == expected("llama", "float32")
        assert llm.report().disk_bytes_read == before


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_part_that_cannot_be_read_ends_everything(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "llama", **MODELS["llama"])
    threads = set(threading.enumerate())
    llm = smallest(folder, host_memory=0)
    llm.generate([IDS[:5]], GREEDY)
    os.truncate(folder / "model.safetensors", 3000)
    with pytest.raises(CheckpointError, match=r"The dense weights of .* cannot be read\. .*model\.safetensors: "):
        llm.generate([IDS], GREEDY)
    with pytest.raises(CheckpointError, match="cannot be read"):
        llm.generate([IDS], GREEDY)
    assert set(threading.enumerate()) == threads


def test_closing_in_the_middle_leaves_no_thread_and_no_array(folders):
    gc.collect()
    threads, arrays = set(threading.enumerate()), {id(array) for array in jax.live_arrays()}
    llm = smallest(folders["qwen3_moe"], host_memory="1GiB")
    stream = llm.stream(IDS, SamplingParams(ignore_eos=True, temperature=0))
    next(stream)
    llm.close()
    llm.close()
    assert set(threading.enumerate()) == threads
    gc.collect()
    assert [array.shape for array in jax.live_arrays() if id(array) not in arrays] == []


def test_a_model_that_nobody_closes_leaves_no_threads(folders):
    assert_threads_end_with(lambda: smallest(folders["llama"]))


def test_an_interrupted_step_leaves_a_model_that_goes_on(folders, expected, monkeypatch):
    with smallest(folders["llama"], dtype="float32") as llm:
        take, calls = DenseStreamer.take, iter(range(10**6))

        def interrupted(self: Any, number: int, after: Any) -> Any:
            taken = take(self, number, after)
            if next(calls) % 7 == 6:
                raise KeyboardInterrupt
            return taken

        with monkeypatch.context() as patch:
            patch.setattr(DenseStreamer, "take", interrupted)
            for _ in range(5):
                with pytest.raises(KeyboardInterrupt):
                    llm.generate([IDS], GREEDY)
        assert outcome(llm) == expected("llama", "float32")


def test_an_interrupt_at_any_line_leaves_parts_that_are_true(folders, monkeypatch):
    brief, pieces = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), []
    with smallest(folders["llama"], dtype="float32") as llm:
        (expected_text,) = llm.generate([IDS[:5]], brief)
        line = 1
        while interrupted_at(line, lambda: llm.generate([IDS[:5]], brief), "novalm_jax/experts/dense_streamer"):
            (text,) = llm.generate([IDS[:5]], brief)
            pieces.append(text.token_ids)
            line += 17
    assert len(pieces) > 10 and all(ids == expected_text.token_ids for ids in pieces)


def test_late_parts_change_nothing(folders, expected, monkeypatch):
    draw = np.random.default_rng(3)
    find = DenseHost.find

    def late(self: DenseHost, number: int) -> Any:
        time.sleep(float(draw.exponential(5e-4)))
        return find(self, number)

    monkeypatch.setattr(DenseHost, "find", late)
    with smallest(folders["qwen3_moe"], dtype="float32", host_memory="1GiB") as llm:
        assert outcome(llm) == expected("qwen3_moe", "float32")


def test_a_wrong_part_would_show(folders, expected, monkeypatch):
    """The comparison above sees it when a part is taken in place of another."""
    monkeypatch.setattr(DenseHost, "find", _shifted(DenseHost.find))
    with smallest(folders["llama"], dtype="float32", host_memory="1GiB") as llm:
        assert outcome(llm) != expected("llama", "float32")


def _shifted(find: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, number: find(self, {1: 2, 2: 1}.get(number, number))


def test_a_slower_link_takes_one_thing_after_another():
    link = Link(rate=1000.0)
    assert link.arrival(500, begin=10.0) == 10.5
    assert link.arrival(500, begin=10.1) == 11.0
    assert link.arrival(500, begin=20.0) == 20.5
    assert Link().arrival(500, begin=10.0) == 10.0


def test_a_timeline_shows_what_comes(folders, tmp_path):
    with smallest(folders["llama"], timeline=tmp_path / "trace.json") as llm:
        llm.generate([IDS[:5]], GREEDY)
        report = llm.report()
        timeline = llm.timeline
    assert timeline is not None and [file.written for file in llm.files] == [tmp_path / "trace.json"]
    # One more may be under way when the report is taken, and none is left out at the end.
    assert report.dense_uploads <= len(timeline.intervals("dense uploads")) == dense_of(llm).uploads
    assert len(timeline.intervals("stalls")) >= report.dense_uploads - 1
