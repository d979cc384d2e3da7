"""The timeline of a run: shows all that the report counts, ends up in a file whatever happens, and changes nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from interrupts import interrupted_at
from novalm_jax import LLM, SamplingParams
from novalm_jax.checkpoint.files import TensorReader
from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.engine import run_files
from novalm_jax.engine.placement import place
from novalm_jax.engine.report import Report
from novalm_jax.errors import CheckpointError, OptionError, WriteError
from novalm_jax.experts.fetcher import Fetcher, Stage
from novalm_jax.options import EngineOptions
from streamed_helpers import executor_of, least_bytes
from timeline_helpers import Event, rows_of
from tiny_checkpoints import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("shared")

LAYERS, EXPERTS = 3, 16
OPTIONS: dict[str, Any] = {"max_batch": 2, "context_length": 64, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[7 + i * 13 % 250 for i in range(40)], [9, 8, 7]]
RECORD = 3 * 16 * 32 * 4
READS = ("disk reads", "disk reads 2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    fields = {"num_experts": EXPERTS, "num_experts_per_tok": 1, "num_hidden_layers": LAYERS}
    return tiny_checkpoint(tmp_path_factory.mktemp("timeline") / "model", "qwen3_moe", **fields)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """A model that is loaded soon."""
    return tiny_checkpoint(tmp_path_factory.mktemp("dense") / "model", "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def streamed(folder) -> Callable[..., LLM]:
    """Makes the model, or another one of its shape, with few slots, and as many all the time."""
    memory = least_bytes(folder, **OPTIONS) + 5 * RECORD
    placed = place(Checkpoint.open(folder), EngineOptions(device_memory=memory, **OPTIONS))
    fixed = {"device_memory": memory, "kv_memory": placed.plan.parts["KV cache"], **OPTIONS}
    return lambda other=folder, **options: LLM(other, **fixed, **options)


def texts(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(out.token_ids) for out in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def resident(folder, tmp_path_factory) -> tuple[list[tuple[int, ...]], Report, dict[str, list[Event]]]:
    """What a resident model says, counts and shows."""
    trace = tmp_path_factory.mktemp("traces") / "trace.json"
    with LLM(folder, timeline=trace, **OPTIONS) as llm:
        return texts(llm), llm.report(), traced(llm, trace)


def traced(llm: LLM, trace: Path) -> dict[str, list[Event]]:
    """The rows of the trace that closing a model leaves, and nothing beside it."""
    assert not trace.exists()
    llm.close()
    assert [file.written for file in llm.files] == [trace]
    assert list(trace.parent.iterdir()) == [trace]
    return rows_of(trace.read_bytes())


def total(spans: list[Event], of: str) -> Any:
    return sum(span["args"][of] for span in spans)


# --- what it shows ---------------------------------------------------------------------------------------------------


def test_a_resident_model_only_computes(resident):
    _, report, rows = resident
    assert list(rows) == ["compute"] and len(rows["compute"]) == report.launches
    layers = {(span["name"], span["args"].get("layer")) for span in rows["compute"]}
    inner = {(name, layer) for name in ("attend", "experts") for layer in range(LAYERS)}
    assert layers == inner | {("embed", None), ("head", None), ("decode", None)}
    assert {span["args"]["rows"] for span in rows["compute"] if span["name"] == "decode"} == {4}


def assert_all_is_shown(rows: dict[str, list[Event]], report: Report) -> None:
    """The rows of a streamed run hold what its report counts."""
    reads = [span for row in READS for span in rows.get(row, [])]
    assert set(rows) - set(READS) == {"uploads", "inserts", "compute", "stalls"} and reads
    uploads, inserts = rows["uploads"], rows["inserts"]
    assert report.expert_misses > 0 and report.evictions > 0
    assert (len(uploads), total(uploads, "bytes")) == (report.uploads, report.bytes_uploaded)
    assert report.expert_misses + report.prefetch_hits <= len(inserts) <= len(uploads)
    assert len(rows["compute"]) == report.launches
    # The waits themselves; the counter adds what it takes to count.
    assert 0 < sum(span["dur"] for span in rows["stalls"]) <= report.stall_seconds * 1e6
    for span in (*reads, *uploads, *inserts):
        args = span["args"]
        assert span["name"] == f"layer {args['layer']}, expert {args['expert']}" and args["bytes"] == RECORD
        assert args["layer"] in range(LAYERS) and args["expert"] in range(EXPERTS)
    waves = {span["args"]["layer"] for span in rows["compute"] if span["name"] == "first wave"}
    assert waves == {span["args"]["layer"] for span in rows["stalls"]} == set(range(LAYERS))


def test_it_shows_what_moves_between_the_tiers(streamed, resident, tmp_path):
    with streamed(host_memory=0, timeline=tmp_path / "trace.json") as llm:
        loaded = llm.report().disk_bytes_read
        assert texts(llm) == resident[0]
        rows = traced(llm, tmp_path / "trace.json")
        report = llm.report()
    assert_all_is_shown(rows, report)
    reads = [span for row in READS for span in rows.get(row, [])]
    assert total(reads, "bytes") == report.disk_bytes_read - loaded
    # Without a host tier whatever is uploaded is read first.
    assert len(reads) >= len(rows["uploads"])


@pytest.mark.parametrize("asked", [True, False])
def test_programs_are_waited_for_where_a_timeline_is_asked_for(dense, tmp_path, monkeypatch, asked):
    """Each has ended when its span does. Without a timeline only the layers of a prompt are, as ever."""
    waits: list[Any] = []
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: waits.append(tree) or wait(tree))
    with LLM(dense, timeline=tmp_path / "trace.json" if asked else None, **OPTIONS) as llm:
        llm.generate([[5]], GREEDY)
        assert (llm.timeline is not None) == asked
        assert len(waits) == 1 + (llm.report().launches if asked else 0)


# --- uploads under computing -----------------------------------------------------------------------------------------

LINK = 0.005
"""Seconds that an upload takes; nothing is computed for that, and nothing else waits for it."""


class Slow:
    """A program that lasts longer than what is under way on the link: so computing is what takes longest, however fast
    or busy the machine is."""

    def __init__(self, program: Any, fetcher: Fetcher):
        self._program = program
        self._fetcher = fetcher

    def __call__(self, *arguments: Any) -> Any:
        deadline = time.monotonic() + 30
        while self._under_way():
            assert time.monotonic() < deadline, "an upload waits for a program"
            time.sleep(1e-3)
        return self._program(*arguments)

    def _under_way(self) -> bool:
        with self._fetcher._lock:
            return any(fetch.stage is not Stage.THERE for fetch in self._fetcher._under_way.values())


def slow_down(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all programs of a model slow ones."""
    programs, fetcher = executor_of(llm).programs, executor_of(llm).streamer._fetcher
    get = programs._get

    def slowly(key: tuple[Any, ...], *arguments: Any, **options: Any) -> Any:
        program = get(key, *arguments, **options)
        programs._compiled[key] = program if isinstance(program, Slow) else Slow(program, fetcher)
        return programs._compiled[key]

    monkeypatch.setattr(programs, "_get", slowly)
    programs._found.clear()


@pytest.mark.parametrize("prefetch", ["lookahead", "off"])
def test_only_prefetched_uploads_lie_under_computing(streamed, tmp_path, monkeypatch, prefetch):
    """A demand upload would lie under the computing of other experts of its layer, those that are there or came first.
    So a layer needs one alone here: one sequence of a model that chooses one, from a prompt of one token on. Where it
    is missing there is nothing to compute meanwhile."""
    trace, link = tmp_path / "trace.json", int(RECORD / LINK)
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with streamed(link=link, prefetch=prefetch, timeline=trace, host_memory="1GiB") as llm:
        slow_down(llm, monkeypatch)
        llm.generate([[5]], sampling)
        rows = traced(llm, trace)
        report = llm.report()
        assert llm.timeline is not None
        hidden = llm.timeline.overlap("uploads", "compute")
    assert_all_is_shown(rows, report)
    # All were read at the start, each once.
    assert sum(len(rows.get(row, [])) for row in READS) == LAYERS * EXPERTS
    uploads, inserts = rows["uploads"], rows["inserts"]
    assert all(span["dur"] >= LINK * 1e6 for span in uploads)
    ahead = [span for span in uploads if not span["args"]["demand"]]
    if prefetch == "off":
        assert len(uploads) == len(inserts) == report.expert_misses > 20 and not ahead
        # One ends before what waits for it begins, and begins after the one that asks for it has ended.
        assert hidden == 0
    else:
        # In every other step at least: prefetching is on trial.
        assert report.prefetch_hits > 0 and len(ahead) > 8
        # A program begins soon after its upload did, and ends after it. Half leaves room for a thread that sleeps in.
        assert hidden > 0.5 * sum(span["dur"] for span in ahead) / 1e6


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["nowhere/trace.json", ".", "n" * 250, "new\0line", "", 5, b"trace.json"])
def test_a_place_that_cannot_be_written_is_refused_before_weights_are_read(folder, tmp_path, monkeypatch, place):
    def read(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(TensorReader, "read_run", read)
    path = tmp_path / place if isinstance(place, str) and place and "\0" not in place else place
    with pytest.raises(OptionError, match=r"^timeline: "):
        LLM(folder, timeline=path, **OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_replaced_at_the_end_and_no_earlier(dense, tmp_path, monkeypatch):
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "trace.json").symlink_to("old.json")
    monkeypatch.chdir(tmp_path)
    with LLM(dense, timeline="trace.json", **OPTIONS) as llm:
        monkeypatch.chdir("/")
        llm.generate([[5]], GREEDY)
        assert (tmp_path / "old.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json", "trace.json"]
    assert (tmp_path / "trace.json").is_symlink()
    assert list(rows_of((tmp_path / "old.json").read_bytes())) == ["compute"]
    (tmp_path / "old.json").unlink()
    llm.close()
    assert not (tmp_path / "old.json").exists()


def test_a_read_that_fails_is_the_last_thing_it_shows(folder, streamed, tmp_path):
    own = shutil.copytree(folder, tmp_path / "model")
    trace = tmp_path / "trace.json"

    def run() -> None:
        with streamed(own, host_memory=0, timeline=trace) as llm:
            texts(llm)
            with (own / "model.safetensors").open("r+b") as file:
                file.truncate(20_000)
            texts(llm)

    with pytest.raises(CheckpointError):
        run()
    rows = rows_of(trace.read_bytes())
    failed = [span["args"]["failed"] for row in READS for span in rows.get(row, []) if "failed" in span["args"]]
    assert failed and set(failed) == {"CheckpointError"}
    assert rows["stalls"][-1]["args"]["failed"] == "CheckpointError"


def test_interrupts_while_it_records_lose_nothing_else(streamed, resident, tmp_path):
    trace, short = tmp_path / "trace.json", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with streamed(host_memory=0, timeline=trace) as llm:
        line = 1
        while interrupted_at(line, lambda: llm.generate([[9, 8, 7]], short), "novalm_jax/timeline"):
            # The first lines, and each line of what records in turn.
            line += 1 if line < 12 else 41
        assert line > 300
        assert texts(llm) == resident[0]
        rows = traced(llm, trace)
        report = llm.report()
    # Of what this thread recorded, an interrupt can have come before the record.
    assert len(rows["uploads"]) == report.uploads and len(rows["compute"]) <= report.launches


def test_a_full_timeline_says_what_it_lacks(streamed, resident, tmp_path, caplog):
    with streamed(host_memory=0, timeline=tmp_path / "trace.json") as llm:
        llm.timeline._most = 40
        assert texts(llm) == resident[0]
        rows = traced(llm, tmp_path / "trace.json")
        lacks = llm.timeline.left_out
    kept = [span for title, spans in rows.items() if title != "left out" for span in spans]
    assert len(kept) == 40
    (gap,) = rows["left out"]
    assert gap["args"] == lacks and lacks["compute"] > 0 and lacks["uploads"] > 0
    (said,) = [record.getMessage() for record in caplog.records if "timeline" in record.getMessage()]
    assert "lacks the last spans" in said and all(f"{count} of {track}" in said for track, count in lacks.items())


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A disk that is full until the list is emptied."""
    full, write = [1], run_files.write_whole

    def written(path: Path, data: bytes) -> None:
        if full:
            raise WriteError(f"{path} cannot be written: No space left on device.")
        write(path, data)

    monkeypatch.setattr(run_files, "write_whole", written)
    yield full


def test_a_full_disk_is_an_error_of_closing_which_can_be_tried_again(dense, tmp_path, full_disk):
    with pytest.raises(WriteError, match=r"trace\.json cannot be written"):
        with LLM(dense, timeline=tmp_path / "trace.json", **OPTIONS) as llm:
            llm.generate([[5]], GREEDY)
    assert [file.written for file in llm.files] == [None]
    full_disk.clear()
    assert list(traced(llm, tmp_path / "trace.json")) == ["compute"]


def test_a_full_disk_does_not_hide_what_ended_the_run(dense, tmp_path, full_disk, caplog):
    with pytest.raises(ZeroDivisionError), LLM(dense, timeline=tmp_path / "trace.json", **OPTIONS):
        _ = 1 / 0
    assert [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]


def test_an_interrupt_while_closing_still_leaves_the_file(dense, tmp_path, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    llm = LLM(dense, timeline=tmp_path / "trace.json", **OPTIONS)
    llm.generate([[5]], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(llm._executor, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.close()
    assert list(rows_of((tmp_path / "trace.json").read_bytes())) == ["compute"]
    llm.close()
