"""When something goes wrong with experts in tiers, or somebody stops it: who is told, what is left, what goes on."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from interrupts import interrupted_at
from novalm_jax import LLM, SamplingParams
from novalm_jax.checkpoint.conversion import convert_checkpoint
from novalm_jax.errors import CheckpointError, EngineError
from novalm_jax.experts import fetcher as fetcher_module
from novalm_jax.experts.records import Record, RecordReader
from novalm_jax.experts.streamer import Streamer
from novalm_jax.options import ConvertOptions
from streamed_helpers import assert_nothing_is_held, assert_same, assert_threads_end_with, executor_of, set_pass_chunks
from streamed_model import BRIEF, CHOSEN, GREEDY, IDS, LAYERS, QUESTIONS, host_memory, live_arrays, make_model, streamed

pytestmark = pytest.mark.usefixtures("shared")

LONG = [5 + i * i % 250 for i in range(230)]
"""A prompt of several chunks."""

ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def nothing_is_left(shared: object) -> Iterator[None]:
    """No thread, and no array on the device or pinned on the host."""
    gc.collect()
    threads, arrays = set(threading.enumerate()), {id(array) for array in live_arrays()}
    yield
    assert set(threading.enumerate()) - threads == set()
    gc.collect()
    assert [array.shape for array in live_arrays() if id(array) not in arrays] == []


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A model to damage."""
    return make_model(tmp_path / "model")


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What these give, or raise, each in a thread of its own."""
    found: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            found[number] = works[number]()
        except BaseException as error:
            # Without what its frames hold.
            found[number] = error.with_traceback(None)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


# --- reads that fail -------------------------------------------------------------------------------------------------


class Damage:
    """Makes every read of an expert fail from a moment on.

    Attributes:
      folder: the checkpoint.
      says: what is said of it, besides the expert.
    """

    def __init__(self, kind: str, folder: Path, patch: pytest.MonkeyPatch):
        self.folder = folder
        self._kind, self._patch = kind, patch
        if kind == "checksum":
            self.folder = convert_checkpoint(folder, folder.parent / "store", ConvertOptions(to="store")).folder
        self.says = (
            r"Expert \d+ of layer \d+ cannot be read\. "
            + {
                "truncated": r"\S*model\.safetensors: .* stopped at byte \d+ of the file .*the file ends there",
                "EIO": r"\S*model\.safetensors: .* stopped at byte \d+ of the file .*Input/output error",
                "checksum": r"\S*\.safetensors: the record from byte \d+ of the file .* its checksum differs",
            }[kind]
        )

    def __call__(self) -> None:
        if self._kind == "EIO":

            def fail(*_: Any) -> int:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            self._patch.setattr(os, "preadv", fail)
        elif self._kind == "truncated":
            os.truncate(self.folder / "model.safetensors", 20_000)
        else:
            # The first file holds dense weights; of the others every byte behind the header is another one.
            for file in sorted(self.folder.glob("*.safetensors"))[1:]:
                content = bytearray(file.read_bytes())
                begin = 8 + int.from_bytes(content[:8], "little")
                content[begin:] = (np.frombuffer(content[begin:], np.uint8) ^ 1).tobytes()
                file.write_bytes(content)


KINDS = ["truncated", "EIO", "checksum"]


@pytest.fixture(params=KINDS)
def damage(request: pytest.FixtureRequest, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Damage:
    return Damage(request.param, own_folder, monkeypatch)


def check_it_is_over(llm: LLM, error: type[Exception] = CheckpointError, says: str = "cannot be read") -> None:
    """Whoever comes later is told why, too."""
    with pytest.raises(error, match=says):
        llm.generate([IDS], GREEDY)
    with pytest.raises(error, match=says):
        llm.logits(IDS)
    assert llm.report().uploads > 0


@pytest.mark.parametrize(("prefetch", "host"), [("off", 0), ("lookahead", 6)])
def test_a_read_that_fails_is_told_to_every_thread_that_waits(damage, prefetch, host):
    llm = streamed(damage.folder, 6, requests=3, host_memory=host_memory(host), prefetch=prefetch)
    all_stream = threading.Barrier(3, action=damage)

    def read(length: int) -> str:
        stream = llm.stream(IDS[:length], ENDLESS)
        next(stream)
        all_stream.wait(60)
        return "".join(stream)

    for error in in_threads(lambda: read(3), lambda: read(30), lambda: read(50)):
        assert isinstance(error, CheckpointError) and re.search(damage.says, str(error)), repr(error)
    check_it_is_over(llm)


@pytest.mark.parametrize("asked", ["texts", "logits"])
def test_a_read_that_fails_in_the_middle_of_a_prompt_ends_everything(damage, monkeypatch, asked):
    llm = streamed(damage.folder, 12, requests=2)
    set_pass_chunks(llm, 1)
    running = llm.stream(IDS[:5], ENDLESS)
    next(running)
    waves, calls = Streamer.waves, itertools.count(1)

    def counted(self: Streamer, layer: int, experts: Any, kept: Any = None) -> Any:
        # Prompts say what is kept, decode steps do not.
        if kept is not None and next(calls) == LAYERS + 2:
            damage()
        return waves(self, layer, experts, kept)

    monkeypatch.setattr(Streamer, "waves", counted)
    with pytest.raises(CheckpointError, match=damage.says):
        llm.generate([LONG], GREEDY) if asked == "texts" else llm.logits(LONG)
    assert LAYERS + 2 < next(calls) <= 2 * LAYERS + 1
    with pytest.raises(CheckpointError, match=damage.says):
        "".join(running)
    check_it_is_over(llm)


@pytest.mark.parametrize("host", [0, 6])
def test_a_read_ahead_that_fails_ends_everything_before_anybody_waits_for_it(moe_folder, monkeypatch, host):
    llm = streamed(moe_folder, CHOSEN, host_memory=host_memory(host), prefetch="lookahead")
    under_way, read, preadv = executor_of(llm).streamer._fetcher._under_way, RecordReader._read, os.preadv
    here = threading.local()
    ahead = []

    def read_one(self: RecordReader, record: Record, out: Any) -> None:
        here.fails = not under_way[record].urgent
        if here.fails:
            ahead.append(record)
        read(self, record, out)

    def fail_ahead(*arguments: Any) -> int:
        if getattr(here, "fails", False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*arguments)

    monkeypatch.setattr(RecordReader, "_read", read_one)
    monkeypatch.setattr(os, "preadv", fail_ahead)
    says = r"Expert (\d+) of layer (\d+) cannot be read\. .*stopped at byte \d+ of the file .*Input/output error"
    with pytest.raises(CheckpointError, match=says) as caught:
        llm.generate([IDS[:3]], GREEDY)
    found = re.search(says, str(caught.value))
    assert found is not None and Record(int(found[2]), int(found[1])) in ahead
    check_it_is_over(llm)


def test_an_upload_that_fails_ends_everything(moe_folder, monkeypatch):
    llm = streamed(moe_folder)
    llm.generate([IDS[:3]], GREEDY)

    def fail(array: np.ndarray, *memory: np.ndarray) -> jax.Array:
        raise MemoryError("no room on the device")

    monkeypatch.setattr(fetcher_module, "copy_to_device", fail)
    with pytest.raises(EngineError, match="no room on the device"):
        llm.generate([IDS], GREEDY)
    check_it_is_over(llm, EngineError, "closed")


def test_a_model_in_memory_needs_its_files_no_more(own_folder):
    with streamed(own_folder, 6, host_memory="1GiB") as llm:
        expected = llm.generate([IDS[:5]], GREEDY)[0].token_ids
        os.truncate(own_folder / "model.safetensors", 0)
        before = llm.report()
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        found = llm.generate([IDS[:5]], long)[0].token_ids
        assert len(found) == 200 and found[:12] == expected
        after = llm.report()
        assert after.disk_bytes_read == before.disk_bytes_read
        assert after.expert_misses > before.expert_misses and after.evictions > before.evictions


# --- somebody stops it -----------------------------------------------------------------------------------------------


def test_closing_in_the_middle_of_a_text(moe_folder):
    llm = streamed(moe_folder, 6)
    stream = llm.stream(IDS, ENDLESS)
    next(stream)
    llm.close()


def close_while_it_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch, at: int, ask: Callable[[], Any]) -> int:
    """Closes from another thread when a layer begins, so many after the first; gives the number of layers that began.
    Who asked is told."""
    waves, calls, under_way = Streamer.waves, itertools.count(), threading.Event()

    def counted(self: Streamer, *arguments: Any, **others: Any) -> Any:
        if next(calls) == at:
            under_way.set()
            deadline = time.monotonic() + 60
            while not llm._engine._closed:
                assert time.monotonic() < deadline
                time.sleep(1e-3)
        return waves(self, *arguments, **others)

    monkeypatch.setattr(Streamer, "waves", counted)

    def close() -> None:
        assert under_way.wait(60)
        llm.close()

    outcome, closed = in_threads(ask, close)
    assert closed is None
    assert isinstance(outcome, EngineError) and "closed" in str(outcome), repr(outcome)
    return next(calls)


@pytest.mark.parametrize("prefetch", ["off", "lookahead"])
def test_closing_in_the_middle_of_a_prompt_from_another_thread(moe_folder, monkeypatch, prefetch):
    llm = streamed(moe_folder, CHOSEN, prefetch=prefetch)
    set_pass_chunks(llm, 1)
    layers = close_while_it_runs(llm, monkeypatch, LAYERS + 1, lambda: llm.generate([LONG], ENDLESS))
    # No layer began after the one that was running.
    assert layers == LAYERS + 2


@pytest.mark.parametrize(("layer", "part"), [(1, "the prompt"), (2 * LAYERS + 1, "decoding")])
def test_closing_in_the_middle_of_logits(moe_folder, monkeypatch, layer, part):
    llm = streamed(moe_folder, CHOSEN, prefetch="off")
    layers = close_while_it_runs(llm, monkeypatch, layer, lambda: llm.logits(IDS, decode_from=len(IDS) - 3))
    # A prompt ends at the border of a layer, decoding after its step.
    assert layers == (layer + 1 if part == "the prompt" else 3 * LAYERS)


def test_a_model_that_nobody_closes_leaves_no_threads(moe_folder):
    assert_threads_end_with(lambda: streamed(moe_folder))


def test_an_interrupted_wait_leaves_a_model_that_goes_on(moe_folder, resident, monkeypatch):
    """Whatever was on its way arrives as if it had been prefetched."""
    with streamed(moe_folder) as llm:
        arrived, calls = fetcher_module.Fetcher.arrived, itertools.count()

        def interrupted(self: Any, fetches: Any, wait: bool) -> Any:
            if wait and next(calls) % 7 == 6:
                raise KeyboardInterrupt
            return arrived(self, fetches, wait)

        with monkeypatch.context() as patch:
            patch.setattr(fetcher_module.Fetcher, "arrived", interrupted)
            for _ in range(5):
                with pytest.raises(KeyboardInterrupt):
                    llm.generate([IDS], GREEDY)
        assert_same(QUESTIONS.ask(llm), resident["float32"])


@pytest.mark.parametrize("host", [0, 6])
@pytest.mark.parametrize("lines", [1499, pytest.param(97, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_of_a_long_prompt_leaves_a_model_that_goes_on(moe_folder, resident, host, lines):
    """At every so many lines of those that the package runs for two prompts side by side and two tokens more."""
    with streamed(moe_folder, 6, requests=2, host_memory=host_memory(host)) as llm:
        set_pass_chunks(llm, 1)
        few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        line = 1 + host
        while interrupted_at(line, lambda: llm.generate([LONG, IDS[:3]], few), "novalm_jax/"):
            assert_same(BRIEF.ask(llm), resident["brief"])
            assert_nothing_is_held(llm)
            line += lines
        assert line > 10 * lines
