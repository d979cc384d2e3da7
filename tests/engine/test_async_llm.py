"""`AsyncLLM` from outside: many tasks at once, their ends, and those of loops, threads and the LLM itself."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from novalm_jax import AsyncLLM, Completion, SamplingParams
from novalm_jax.engine.async_llm import AsyncTextIterator
from novalm_jax.engine.request import Request
from novalm_jax.errors import CheckpointError, EngineError, RequestError, WriteError

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_batch": 4}
PROMPTS = ["Once upon a time", "The dog", "A small bird", "Tom", "In the garden", "She said", "It was late", "One day"]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
LIMIT = 60
"""Seconds after which a test that hangs fails."""


@pytest.fixture(scope="module")
def allm(shared: Any) -> Iterator[AsyncLLM]:
    allm = AsyncLLM(**OPTIONS)
    yield allm
    asyncio.run(allm.aclose())


@pytest.fixture(scope="module")
def alone(allm: AsyncLLM) -> dict[str, Completion]:
    """The answer to each prompt."""
    return {prompt: allm.llm.generate(prompt, PARAMS)[0] for prompt in PROMPTS}


@pytest.fixture
def gate(allm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(allm, monkeypatch)
    yield gate
    gate.open()


class Gate:
    """Decode steps run when a test says so, and else wait."""

    def __init__(self, allm: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
        self._permits = threading.Semaphore(0)
        self._opened = False
        self.arrived = 0
        decode = allm.llm._executor.decode

        def held(lines: Any) -> Any:
            self.arrived += 1
            if not self._opened and not self._permits.acquire(timeout=LIMIT):
                raise AssertionError("nobody opened the gate")
            return decode(lines)

        monkeypatch.setattr(allm.llm._executor, "decode", held)

    async def shut(self, steps: int = 1) -> None:
        """Returns when so many steps more have come to the gate than were let through."""
        await until(lambda: self.arrived >= steps)

    async def let(self, steps: int = 1) -> None:
        """Lets steps through, and returns when the one after them waits."""
        arrived = self.arrived
        self._permits.release(steps)
        await until(lambda: self.arrived == arrived + steps)

    def open(self) -> None:
        self._opened = True
        self._permits.release(1000)


async def until(done: Callable[[], bool]) -> None:
    """Lets the loop run until something is so that no future tells."""
    while not done():
        await asyncio.sleep(0.001)


def run(work: Awaitable[Any]) -> Any:
    """Runs a test in a loop."""

    async def limited() -> Any:
        async with asyncio.timeout(LIMIT):
            return await work

    return asyncio.run(limited())


async def text_of(stream: AsyncTextIterator) -> str:
    return "".join([piece async for piece in stream])


def running(allm: AsyncLLM) -> list[Request]:
    return allm.llm.engine._requests


def pages_in_use(allm: AsyncLLM) -> int:
    return sum(pool.in_use for pool in allm.llm.engine.scheduler.pages.pools)


async def nothing_is_left(allm: AsyncLLM) -> None:
    """Returns when nothing runs any more, and nothing is held."""
    await until(lambda: not allm._stepper._calls and not running(allm))
    assert allm._stepper.thread.is_alive()
    assert pages_in_use(allm) == 0


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("novalm")]


# --- as LLM does -----------------------------------------------------------------------------------------------------


def test_many_tasks_get_the_answers_they_get_alone_and_share_steps(allm, alone, gate):
    async def work() -> None:
        before = allm.llm.engine.steps
        first = asyncio.create_task(allm.generate(PROMPTS[0], PARAMS))
        await gate.shut()
        tasks = [first, *(asyncio.create_task(allm.generate(prompt, PARAMS)) for prompt in PROMPTS[1:])]
        await until(lambda: allm._stepper._mail.qsize() == len(PROMPTS) - 1)
        gate.open()
        outs = [out for (out,) in await asyncio.gather(*tasks)]
        assert outs == [alone[prompt] for prompt in PROMPTS]
        # Eight in four rows; the first one began a step before the others.
        assert allm.llm.engine.steps - before <= 2 * PARAMS.max_tokens
        await nothing_is_left(allm)

    run(work())


def test_one_call_gives_what_llm_gives(allm):
    params = [SamplingParams(seed=3, max_tokens=5, n=2), SamplingParams(seed=4, max_tokens=7, stop=("e",))]
    prompts = ["Once", [47, 1533, 630]]
    assert run(allm.generate(prompts, params)) == allm.llm.generate(prompts, params)
    assert run(allm.generate([], PARAMS)) == []
    nothing = SamplingParams(max_tokens=0)
    assert run(allm.generate("Once", nothing)) == allm.llm.generate("Once", nothing)
    assert not running(allm)


def test_chat_gives_what_llm_gives(allm):
    messages, template = [{"role": "user", "content": "The dog"}], "{{ who }}: {{ messages[0].content }}"
    how: dict[str, Any] = {"chat_template": template, "who": "Tom"}
    assert run(allm.chat(messages, PARAMS, **how)) == allm.llm.chat(messages, PARAMS, **how)
    assert len(run(allm.chat([messages, messages], PARAMS, **how))) == 2
    with pytest.raises(RequestError, match="template"):
        run(allm.chat(messages, PARAMS))


@pytest.mark.parametrize("sampling", [PARAMS, SamplingParams(seed=5, max_tokens=40, stop=("the",))])
def test_a_stream_gives_the_pieces_that_llm_gives(allm, sampling):
    async def work() -> None:
        stream = allm.stream(PROMPTS[0], sampling)
        pieces = [piece async for piece in stream]
        expected = allm.llm.stream(PROMPTS[0], sampling)
        assert pieces == list(expected)
        assert all(pieces)
        assert stream.completion == expected.completion
        assert "".join(pieces) == stream.completion.text
        assert [piece async for piece in stream] == []

    run(work())


def test_priorities_and_figures_arrive(allm, gate):
    async def work() -> None:
        before = allm.report().generated_tokens
        task = asyncio.create_task(allm.generate("Tom", PARAMS, priority=7))
        stream = allm.stream("Tom", PARAMS, priority=-3)
        await gate.shut()
        await gate.let()
        assert sorted(request.priority for request in running(allm)) == [-3, 7]
        gate.open()
        await task
        await text_of(stream)
        assert allm.report().generated_tokens == before + 2 * PARAMS.max_tokens

    run(work())


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ("", PARAMS, "is empty"),
        ([1.5], PARAMS, "whole numbers"),
        ([10**6], PARAMS, "which is no token"),
        ("Tom", "greedy", "sampling: expected"),
    ],
)
def test_what_is_refused_is_refused_where_it_is_awaited(allm, prompt, params, says):
    async def work() -> None:
        stream = allm.stream(prompt, params)
        for _ in range(2):
            with pytest.raises(RequestError, match=says):
                await anext(stream)
        with pytest.raises(EngineError, match="not finished"):
            _ = stream.completion
        with pytest.raises(RequestError, match=says):
            await allm.generate(prompt, params)
        with pytest.raises(RequestError, match="n: a stream is one completion"):
            await anext(allm.stream("Tom", SamplingParams(n=2)))
        await nothing_is_left(allm)

    run(work())


# --- loops are not blocked -------------------------------------------------------------------------------------------


@asynccontextmanager
async def heartbeats() -> AsyncIterator[list[None]]:
    """Something else that the loop does."""
    beats: list[None] = []

    async def beat() -> None:
        while True:
            beats.append(None)
            await asyncio.sleep(0)

    task = asyncio.create_task(beat())
    yield beats
    task.cancel()


def test_a_loop_goes_on_while_a_step_runs(allm, alone, gate):
    async def work() -> None:
        async with heartbeats() as beats:
            task = asyncio.create_task(allm.generate(PROMPTS[0], PARAMS))
            await gate.shut()
            # The step waits for what only a loop that goes on can do.
            seen = len(beats)
            await until(lambda: len(beats) > seen + 50)
            others = [allm.stream(PROMPTS[1], PARAMS), allm.stream(PROMPTS[2], ENDLESS)]
            late = asyncio.create_task(allm.generate(PROMPTS[3], PARAMS))
            del others[1]
            seen = len(beats)
            await until(lambda: len(beats) > seen + 50)
            assert gate.arrived == 1 and not task.done() and not late.done()
            gate.open()
            assert await text_of(others[0]) == alone[PROMPTS[1]].text
            assert await asyncio.gather(task, late) == [[alone[PROMPTS[0]]], [alone[PROMPTS[3]]]]
            await nothing_is_left(allm)

    run(work())


def test_a_loop_goes_on_while_prompts_are_tokenized_and_the_engine_is_locked(allm, alone, monkeypatch):
    free, make = threading.Event(), allm.llm.requests

    def slow(*arguments: Any) -> list[Request]:
        assert free.wait(LIMIT)
        return make(*arguments)

    async def work() -> None:
        async with heartbeats() as beats:
            with monkeypatch.context() as patch:
                patch.setattr(allm.llm, "requests", slow)
                task = asyncio.create_task(allm.generate(PROMPTS[0], PARAMS))
                await until(lambda: len(beats) > 50)
            unlocked, locked = threading.Event(), threading.Event()

            def lock() -> None:
                with allm.llm.engine._lock:
                    locked.set()
                    assert unlocked.wait(LIMIT)

            locking = asyncio.create_task(asyncio.to_thread(lock))
            await until(locked.is_set)
            free.set()
            stream = allm.stream(PROMPTS[1], PARAMS)
            given_up = asyncio.create_task(allm.generate(PROMPTS[2], ENDLESS))
            await asyncio.sleep(0)
            given_up.cancel()
            seen = len(beats)
            await until(lambda: len(beats) > seen + 50)
            assert not task.done()
            unlocked.set()
            await locking
            assert await task == [alone[PROMPTS[0]]]
            assert await text_of(stream) == alone[PROMPTS[1]].text
            await nothing_is_left(allm)

    run(work())


def test_who_reads_slowly_holds_up_nobody(allm, alone):
    async def work() -> None:
        stream = allm.stream(PROMPTS[0], PARAMS)
        assert await allm.generate(PROMPTS[1:], PARAMS)
        await nothing_is_left(allm)
        assert await text_of(stream) == alone[PROMPTS[0]].text

    run(work())


def test_loops_in_several_threads_share_the_engine(allm, alone):
    got: dict[int, list[str]] = {}
    begin = threading.Barrier(2)

    async def work(number: int) -> None:
        begin.wait(LIMIT)
        streams = [text_of(allm.stream(prompt, PARAMS)) for prompt in PROMPTS[number::2]]
        got[number] = list(await asyncio.gather(*streams))

    loops = [threading.Thread(target=run, args=(work(number),)) for number in range(2)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(LIMIT)
    assert [got[number] for number in range(2)] == [[alone[one].text for one in PROMPTS[n::2]] for n in range(2)]
    run(nothing_is_left(allm))


# --- giving up -------------------------------------------------------------------------------------------------------


def test_a_cancelled_task_frees_its_pages_while_another_goes_on(allm, gate):
    async def work() -> None:
        stream = allm.stream(PROMPTS[0], LONG)
        await gate.shut()
        task = asyncio.create_task(allm.generate(PROMPTS[1:3], ENDLESS))
        await until(lambda: allm._stepper._mail.qsize() == 1)
        await gate.let(4)
        assert len(running(allm)) == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gate.let()
        (left,) = running(allm)
        assert left.finish_reason is None
        assert pages_in_use(allm) == sum(left.held.count())
        gate.open()
        text = await text_of(stream)
        await nothing_is_left(allm)
        assert await asyncio.to_thread(allm.llm.generate, PROMPTS[0], LONG) == [stream.completion]
        assert text == stream.completion.text

    run(work())


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_a_prompt_that_nobody_waits_for_does_not_run_to_its_end(allm, shared, monkeypatch, how):
    reached: list[int] = []
    at_border, go_on = threading.Event(), threading.Event()

    async def work(allm: AsyncLLM) -> None:
        prefill = allm.llm._executor.prefill

        def layers(parts: Any) -> Iterator[Any]:
            for border in range(5):
                reached.append(border)
                at_border.set()
                assert go_on.wait(LIMIT)
                yield None
            yield from prefill(parts)

        with monkeypatch.context() as patch:
            patch.setattr(allm.llm._executor, "prefill", layers)
            task = asyncio.create_task(allm.generate(PROMPTS[0], ENDLESS))
            await until(at_border.is_set)
            if how == "cancelled":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                go_on.set()
                await nothing_is_left(allm)
            else:
                closing = asyncio.create_task(allm.aclose())
                await asyncio.sleep(0)
                go_on.set()
                await closing
                with pytest.raises(EngineError, match="was closed before"):
                    await task
        assert reached == [0]

    run(work(allm if how == "cancelled" else AsyncLLM(**OPTIONS)))


async def leave(allm: AsyncLLM) -> None:
    async for _ in allm.stream(PROMPTS[0], ENDLESS):
        break


async def drop(allm: AsyncLLM) -> None:
    stream = allm.stream(PROMPTS[0], ENDLESS)
    await anext(stream)
    del stream


async def drop_in_a_circle(allm: AsyncLLM) -> None:
    circle: list[Any] = [allm.stream(PROMPTS[0], ENDLESS)]
    await anext(circle[0])
    circle.append(circle)
    del circle
    gc.collect()


async def drop_unread(allm: AsyncLLM) -> None:
    allm.stream(PROMPTS[0], ENDLESS)


async def close(allm: AsyncLLM) -> None:
    stream = allm.stream(PROMPTS[0], ENDLESS)
    first = await anext(stream)
    await stream.aclose()
    assert stream.completion.finish_reason == "abort"
    assert first + await text_of(stream) == stream.completion.text
    await stream.aclose()


async def close_unread(allm: AsyncLLM) -> None:
    stream = allm.stream(PROMPTS[0], ENDLESS)
    await stream.aclose()
    assert stream.completion.finish_reason == "abort"


async def cancel_its_reader(allm: AsyncLLM) -> None:
    stream = allm.stream(PROMPTS[0], ENDLESS)
    reader = asyncio.create_task(text_of(stream))
    await anext(stream)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await until(lambda: stream._call.over)
    assert stream.completion.finish_reason == "abort"


async def cancel_at_once(allm: AsyncLLM) -> None:
    tasks = [asyncio.create_task(allm.generate(prompt, ENDLESS)) for prompt in PROMPTS]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))


ENDS = [leave, drop, drop_in_a_circle, drop_unread, close, close_unread, cancel_its_reader, cancel_at_once]


@pytest.mark.parametrize("end", ENDS)
def test_what_is_given_up_ends(allm, alone, end):
    async def work() -> None:
        before = allm.llm.engine.generated_tokens
        await end(allm)
        await nothing_is_left(allm)
        # Long before it would have ended by itself.
        assert allm.llm.engine.generated_tokens - before < allm.llm.context_length - 100
        assert await allm.generate(PROMPTS[0], PARAMS) == [alone[PROMPTS[0]]]

    run(work())


def test_a_loop_that_is_closed_gives_up_what_was_awaited_in_it(allm, alone, gate):
    loop = asyncio.new_event_loop()
    # What is destroyed with the loop is said to a handler.
    loop.set_exception_handler(lambda *_: None)
    stream = allm.stream(PROMPTS[0], ENDLESS)

    async def begin() -> list[asyncio.Task[Any]]:
        tasks = [loop.create_task(text_of(stream)), loop.create_task(allm.generate(PROMPTS[1], PARAMS))]
        await gate.shut()
        await gate.let(2)
        await until(lambda: all(one._waiting for one in allm._stepper._calls))
        return tasks

    tasks = loop.run_until_complete(begin())
    loop.close()
    gate.open()
    run(nothing_is_left(allm))
    assert stream.completion.finish_reason == "abort"
    assert run(allm.generate(PROMPTS[0], PARAMS)) == [alone[PROMPTS[0]]]
    del tasks
    gc.collect()


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_is_told_to_all_that_it_took_along_and_others_go_on(allm, alone, gate, monkeypatch):
    async def work() -> None:
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(allm.generate(PROMPTS[:2], PARAMS))]
        await gate.shut()
        stream = allm.stream(PROMPTS[2], PARAMS)
        tasks.append(asyncio.create_task(text_of(stream)))
        tasks.append(asyncio.create_task(allm.generate(PROMPTS[3], PARAMS)))
        await until(lambda: allm._stepper._mail.qsize() == 2)
        await gate.let(3)
        # Five in four rows: this one has no pages yet, and so nothing to lose.
        waiting = asyncio.create_task(allm.generate(PROMPTS[4], PARAMS))
        await until(lambda: allm._stepper._mail.qsize() == 1)
        await gate.let()
        held = allm.llm._executor.decode

        def fail(lines: Any) -> Any:
            monkeypatch.setattr(allm.llm._executor, "decode", held)
            raise RuntimeError("a cosmic ray")

        monkeypatch.setattr(allm.llm._executor, "decode", fail)
        gate.open()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineError] * 3
        assert all("A step failed, and this request is lost with it: a cosmic ray" in str(end) for end in ends)
        assert stream.completion.finish_reason == "abort"
        assert await waiting == [alone[PROMPTS[4]]]
        assert await allm.generate(PROMPTS[0], PARAMS) == [alone[PROMPTS[0]]]
        await nothing_is_left(allm)

    run(work())


def test_steps_that_always_fail_are_told(allm, alone, monkeypatch):
    """Also where nobody has pages that could be lost."""

    def fail(*_: Any) -> None:
        raise RuntimeError("always")

    async def work() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(allm.llm.engine.scheduler, "place", fail)
            for _ in range(2):
                with pytest.raises(EngineError, match=r"A step failed.*always"):
                    await allm.generate(PROMPTS[0], PARAMS)
        assert await allm.generate(PROMPTS[0], PARAMS) == [alone[PROMPTS[0]]]
        await nothing_is_left(allm)

    run(work())


def test_lost_weights_end_everything(shared, monkeypatch):
    async def work() -> None:
        async with AsyncLLM(**OPTIONS) as allm:

            def fail(_: Any) -> Any:
                raise CheckpointError("the disk is gone")

            monkeypatch.setattr(allm.llm._executor, "decode", fail)
            ends = await asyncio.gather(*(allm.generate(prompt, PARAMS) for prompt in PROMPTS), return_exceptions=True)
            assert {(type(end), str(end)) for end in ends} == {(CheckpointError, "the disk is gone")}
            with pytest.raises(CheckpointError, match="the disk is gone"):
                await anext(allm.stream(PROMPTS[0]))
            assert allm._stepper.thread.is_alive()
        assert not allm._stepper.thread.is_alive()

    run(work())


def test_the_end_of_the_stepping_thread_is_told(shared, monkeypatch, caplog):
    async def work() -> None:
        allm = AsyncLLM(**OPTIONS)

        def fail() -> None:
            raise SystemExit("no reason")

        monkeypatch.setattr(allm.llm.engine, "step", fail)
        ends = await asyncio.gather(*(allm.generate(prompt, PARAMS) for prompt in PROMPTS), return_exceptions=True)
        assert {type(end) for end in ends} == {EngineError}
        allm._stepper.thread.join(LIMIT)
        with pytest.raises(EngineError, match="closed"):
            await allm.generate(PROMPTS[0], PARAMS)
        assert "The thread that steps the engine failed" in caplog.text
        await allm.aclose()

    run(work())


# --- closing ---------------------------------------------------------------------------------------------------------


def test_closing_ends_what_runs_and_what_comes_and_leaves_no_thread(shared, monkeypatch):
    before = threads()

    async def work() -> None:
        allm = AsyncLLM(**OPTIONS)
        gate = Gate(allm, monkeypatch)
        stream = allm.stream(PROMPTS[0], ENDLESS)
        await gate.shut()
        # Running, waiting for a row, read by nobody yet, and not even tokenized yet.
        tasks = [asyncio.create_task(allm.generate(PROMPTS, ENDLESS)), asyncio.create_task(text_of(stream))]
        tasks += [asyncio.create_task(text_of(allm.stream(prompt, PARAMS))) for prompt in PROMPTS]
        await gate.let(2)
        free, make = threading.Event(), allm.llm.requests

        def slow(*arguments: Any) -> list[Request]:
            assert free.wait(LIMIT)
            return make(*arguments)

        monkeypatch.setattr(allm.llm, "requests", slow)
        tasks.append(asyncio.create_task(allm.generate(PROMPTS[0], PARAMS)))
        await asyncio.sleep(0)
        closing = [asyncio.create_task(allm.aclose()) for _ in range(3)]
        await asyncio.sleep(0)
        closing.pop().cancel()
        gate.open()
        # Before those are through that are not tokenized, all others know.
        ends = await asyncio.gather(*tasks[:-1], return_exceptions=True)
        assert not tasks[-1].done()
        free.set()
        ends += await asyncio.gather(*tasks[-1:], return_exceptions=True)
        assert {(type(end), str(end)) for end in ends} == {
            (EngineError, "The LLM was closed before this request had ended.")
        }
        await asyncio.gather(*closing)
        assert threads() == before
        await allm.aclose()
        for use in (allm.generate("Tom"), anext(allm.stream("Tom")), allm.chat([{"role": "user", "content": "Tom"}])):
            with pytest.raises(EngineError, match="closed"):
                await use
        with pytest.raises(EngineError, match="closed"):
            allm.llm.generate("Tom")
        assert allm.report().generated_tokens

    run(work())


def test_an_llm_that_is_closed_under_it_ends_what_runs(shared):
    async def work() -> None:
        allm = AsyncLLM(**OPTIONS)
        stream = allm.stream(PROMPTS[0], ENDLESS)
        await anext(stream)
        await asyncio.to_thread(allm.llm.close)
        with pytest.raises(EngineError, match="was closed before this request had ended"):
            await text_of(stream)
        with pytest.raises(EngineError, match="closed"):
            await allm.generate(PROMPTS[0])
        await allm.aclose()

    run(work())


def test_files_that_cannot_be_written_are_told_at_the_end(shared, tmp_path):
    async def work(folder: Path, how: Callable[[AsyncLLM], Awaitable[None]]) -> None:
        folder.mkdir()
        async with AsyncLLM(timeline=folder / "trace.json", **OPTIONS) as allm:
            folder.rmdir()
            await how(allm)

    async def nothing(_: AsyncLLM) -> None: ...

    async def fail(_: AsyncLLM) -> None:
        raise ValueError("counts for more")

    with pytest.raises(WriteError):
        run(work(tmp_path / "one", nothing))
    with pytest.raises(ValueError, match="counts for more"):
        run(work(tmp_path / "two", fail))


def test_dropped_unclosed_its_threads_end_and_the_llm_goes_on(shared):
    before = threads()
    allm = AsyncLLM(**OPTIONS)
    llm, thread = allm.llm, allm._stepper.thread
    (out,) = run(allm.generate(PROMPTS[0], PARAMS))
    run(leave(allm))
    del allm
    gc.collect()
    thread.join(LIMIT)
    assert threads() == before
    assert llm.generate(PROMPTS[0], PARAMS) == [out]
    llm.close()


def test_text_is_read_to_its_end_of_one_that_nothing_else_holds(shared):
    stream = AsyncLLM(**OPTIONS).stream(PROMPTS[0], PARAMS)
    thread = stream._llm._stepper.thread
    gc.collect()
    assert run(text_of(stream)) == stream.completion.text
    del stream
    gc.collect()
    thread.join(LIMIT)
    assert not thread.is_alive()


UNCLOSED = """
import asyncio, contextlib, threading
from novalm_jax import AsyncLLM, SamplingParams
from novalm_jax.errors import EngineError

params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
allm = AsyncLLM(dtype="float32", max_batch=4)
begun = threading.Event()

async def endless():
    with contextlib.suppress(EngineError):
        while True:
            async for piece in allm.stream("Once", SamplingParams(ignore_eos=True, temperature=0)):
                begun.set()

threading.Thread(target=asyncio.run, args=(endless(),), daemon=True).start()
begun.wait()
print(len(asyncio.run(allm.generate("Tom", params))[0].token_ids), flush=True)
"""


def test_an_interpreter_ends_though_requests_run(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", UNCLOSED]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "3\n", "")
