"""The engine's book-keeping on a scripted executor: who gets a row when, and what is left after things go wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interrupts import interrupted_at
from novalm_jax.engine.engine import Engine
from novalm_jax.engine.executor import Prompt
from novalm_jax.engine.functions import Decoded
from novalm_jax.engine.request import Request
from novalm_jax.engine.sampler import Sampler
from novalm_jax.engine.sampling import ResolvedSampling
from novalm_jax.errors import CheckpointError, EngineError

VOCAB = 64
GREEDY = ResolvedSampling(seed=0, temperature=0.0)


class Script:
    """Stands in for the executor: the most likely token after i is i + 1, and every call is written down."""

    def __init__(self, rows: int):
        self.rows = rows
        self.prefills: list[tuple[int, tuple[int, ...]]] = []
        self.decodes: list[dict[str, list[int]]] = []
        self.before: Callable[[str], None] = lambda kind: None
        self.borders = 1
        self.broken = False
        self.prompts_ended = 0
        self.closed = 0

    def prefill(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Decoded] | None]:
        try:
            for number, (row, tokens) in enumerate(prompts):
                self.before("prefill")
                self.prefills.append((row, tuple(tokens)))
                for _ in range(self.borders):
                    self.before("border")
                    yield None
                yield number, self._decoded([tokens[-1]] * 2)
        finally:
            self.prompts_ended += 1

    def decode(
        self, tokens: Sequence[int], rows: Sequence[int], positions: Sequence[int], known: Sequence[int]
    ) -> Decoded:
        self.before("decode")
        assert len(set(rows)) == len(rows) <= self.rows
        self.decodes.append({"tokens": [*tokens], "rows": [*rows], "positions": [*positions], "known": [*known]})
        return self._decoded([*tokens, *[0] * (-len(tokens) % 4)])

    def close(self) -> None:
        self.closed += 1

    def _decoded(self, tokens: Sequence[int]) -> Decoded:
        following = [(token + 1) % VOCAB for token in tokens]
        logits = np.full((len(tokens), VOCAB), -50, np.float32)
        logits[np.arange(len(tokens)), following] = 50
        return Decoded(jnp.asarray(logits), jnp.asarray(following, jnp.int32))


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr("novalm_jax.engine.engine.time.perf_counter", lambda: self.now)


def request(first: int, tokens: int = 3, sampling: ResolvedSampling = GREEDY, ends: Sequence[int] = ()) -> Request:
    return Request(prompt_ids=[first], sampling=sampling, max_tokens=tokens, end_ids=frozenset(ends))


def answer(first: int, tokens: int = 3) -> list[int]:
    return [(first + 1 + i) % VOCAB for i in range(tokens)]


def run(engine: Engine, requests: Sequence[Request]) -> None:
    for _ in range(1000):
        if all(one.finish_reason is not None for one in requests):
            return
        engine.step()
    raise AssertionError("the requests do not end")


@pytest.fixture
def script() -> Script:
    return Script(rows=2)


@pytest.fixture
def engine(script: Script) -> Iterator[Engine]:
    # The scripted one has all that the engine asks of an executor.
    executor: Any = script
    engine = Engine(executor, Sampler(script.rows, VOCAB))
    yield engine
    engine.close()


def test_a_request_gets_its_tokens_one_a_step(engine, script):
    one = request(10, tokens=4)
    engine.submit([one])
    engine.step()
    assert one.token_ids == answer(10, 2)
    engine.step()
    assert one.token_ids == answer(10, 3)
    run(engine, [one])
    assert (one.token_ids, one.finish_reason) == (answer(10, 4), "length")
    assert [step["tokens"] for step in script.decodes] == [[11], [12], [13]]
    assert [step["positions"] for step in script.decodes] == [[1], [2], [3]]
    assert [step["known"] for step in script.decodes] == [[2], [3], [4]]
    assert (engine.prompt_tokens, engine.generated_tokens) == (1, 4)


def test_requests_are_admitted_in_order_and_rows_are_reused(engine, script):
    requests = [request(first, tokens=3) for first in (0, 10, 20, 30, 40)]
    engine.submit(requests)
    run(engine, requests)
    assert [tokens for _, tokens in script.prefills] == [(0,), (10,), (20,), (30,), (40,)]
    assert {row for row, _ in script.prefills} == {0, 1}
    assert all(one.token_ids == answer(one.prompt_ids[0]) for one in requests)
    assert max(len(step["rows"]) for step in script.decodes) == 2


def test_requests_submitted_later_join_those_that_run(engine, script):
    first = request(0, tokens=6)
    engine.submit([first])
    engine.step()
    second = request(10, tokens=3)
    engine.submit([second])
    run(engine, [first, second])
    assert (first.token_ids, second.token_ids) == (answer(0, 6), answer(10, 3))
    assert any(len(step["rows"]) == 2 for step in script.decodes)


def test_an_end_token_ends_a_request_and_frees_its_row(engine, script):
    short, long, waiting = request(0, tokens=9, ends=[2]), request(10, tokens=4), request(20, tokens=2)
    engine.submit([short, long, waiting])
    run(engine, [short, long, waiting])
    assert (short.token_ids, short.finish_reason) == ([1, 2], "stop")
    rows = dict(zip((0, 10, 20), (row for row, _ in script.prefills), strict=True))
    assert rows[20] == rows[0] != rows[10]


def test_a_request_of_one_token_never_decodes(engine, script):
    one = request(5, tokens=1)
    engine.submit([one])
    engine.step()
    assert one.finish_reason == "length"
    assert script.decodes == []


def test_a_request_that_is_given_up_while_it_waits_never_runs(engine, script):
    running, given_up, last = request(0), request(10), request(20)
    engine.submit([running, request(30), given_up, last])
    given_up.finish("abort")
    run(engine, [running, last])
    assert (10,) not in [tokens for _, tokens in script.prefills]
    assert (given_up.token_ids, given_up.finish_reason) == ([], "abort")
    assert last.token_ids == answer(20)


def test_a_request_that_is_given_up_while_it_runs_frees_its_row(engine, script):
    given_up, other = request(0, tokens=50), request(10, tokens=50)
    engine.submit([given_up, other])
    engine.step()
    row = given_up.row
    given_up.finish("abort")
    after = request(20, tokens=2)
    engine.submit([after])
    engine.step()
    assert script.prefills[-1] == (row, (20,))
    assert len(given_up.token_ids) == 2
    assert after.token_ids == answer(20, 2)
    assert other.token_ids == answer(10, 3)


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_step_that_fails_ends_its_requests_and_nothing_after_them(engine, script, where):
    def fail(kind: str) -> None:
        if kind == where:
            raise RuntimeError("the device is on fire")

    requests = [request(0), request(10)]
    engine.submit(requests)
    script.before = fail
    with pytest.raises(EngineError, match="the device is on fire") as caught:
        run(engine, requests)
    assert isinstance(caught.value.__cause__, RuntimeError)
    lost = [one for one in requests if one.finish_reason is not None]
    assert lost and all(one.finish_reason == "abort" and isinstance(one.error, RuntimeError) for one in lost)
    assert engine._free_rows() == [0, 1]
    script.before = lambda kind: None
    after = [request(20), request(30), request(40)]
    engine.submit(after)
    run(engine, after)
    assert [one.token_ids for one in after] == [answer(20), answer(30), answer(40)]
    assert {row for row, _ in script.prefills[-3:]} == {0, 1}


def test_an_interrupt_passes_through_and_leaves_a_working_engine(engine, script):
    def interrupt(kind: str) -> None:
        raise KeyboardInterrupt

    one = request(0)
    engine.submit([one])
    script.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert (one.finish_reason, one.error, engine._free_rows()) == ("abort", None, [0, 1])
    script.before = lambda kind: None
    after = request(20)
    engine.submit([after])
    run(engine, [after])
    assert after.token_ids == answer(20)


def test_closing_ends_running_and_waiting_requests(engine, script, monkeypatch):
    Clock(monkeypatch)
    requests = [request(first, tokens=50) for first in (0, 10, 20)]
    engine.submit(requests)
    engine.step()
    engine.close()
    engine.close()
    assert [one.finish_reason for one in requests] == ["abort"] * 3
    assert [len(one.token_ids) for one in requests] == [2, 2, 0]
    assert script.closed == 1


def test_a_closed_engine_takes_no_more_work(engine):
    engine.close()
    for use in (engine.step, lambda: engine.submit([request(0)]), lambda: engine.spare_row().__enter__()):
        with pytest.raises(EngineError, match="closed"):
            use()


# --- prompts and decoding in turns -----------------------------------------------------------------------------------


@pytest.fixture
def clock(script: Script, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A layer of a prompt takes 40 ms, of which two fit a slice and a third begins."""
    clock = Clock(monkeypatch)
    script.borders = 10

    def passes(kind: str) -> None:
        clock.now += 0.04 if kind == "border" else 0.0

    script.before = passes
    return clock


def test_a_long_prompt_lets_others_decode(engine, script, clock):
    first, second = request(10, tokens=20), request(30, tokens=3)
    engine.submit([first])
    engine.step()
    engine.submit([second])
    for expected in (3, 4, 5):
        begin = clock.now
        engine.step()
        assert clock.now - begin == pytest.approx(0.12)
        assert (len(first.token_ids), second.token_ids) == (expected, [])
    engine.step()
    assert (len(first.token_ids), second.token_ids) == (6, answer(30, 2))
    run(engine, [first, second])
    assert (first.token_ids, second.token_ids) == (answer(10, 20), answer(30))
    assert engine.prompt_tokens == 2 and script.prompts_ended == 2


def test_alone_a_prompt_runs_through(engine, script, clock):
    one = request(10)
    engine.submit([one])
    engine.step()
    assert one.token_ids == answer(10, 2)


def test_prompts_that_are_admitted_together_go_together_until_one_of_them_decodes(engine, script, clock):
    requests = [request(10, tokens=9), request(30, tokens=9)]
    engine.submit(requests)
    engine.step()
    assert [len(one.token_ids) for one in requests] == [2, 0]
    run(engine, requests)
    assert [one.token_ids for one in requests] == [answer(10, 9), answer(30, 9)]


def test_a_prompt_that_nobody_waits_for_is_dropped_and_its_row_is_free(engine, script, clock):
    first, second, third = request(10, tokens=30), request(30), request(50)
    engine.submit([first])
    engine.step()
    engine.submit([second])
    engine.step()
    engine.abort([second])
    engine.submit([third])
    engine.step()
    assert script.prompts_ended == 2 and second.token_ids == []
    run(engine, [third])
    assert third.token_ids == answer(50)
    assert [row for row, _ in script.prefills] == [0, 1, 1]


def test_the_row_of_a_prompt_on_its_way_is_not_given_away(engine, script, clock):
    first, second, third = request(10, tokens=9), request(30, tokens=9), request(50, tokens=9)
    engine.submit([first, second])
    engine.step()
    # The job goes on for the second; the first one's row is taken until it is through.
    engine.abort([first])
    engine.submit([third])
    run(engine, [second, third])
    assert (second.token_ids, third.token_ids) == (answer(30, 9), answer(50, 9))
    assert first.finish_reason == "abort"


def test_an_error_in_a_prompt_on_its_way_takes_the_running_requests_with_it(engine, script, clock):
    first, second = request(10, tokens=9), request(30)
    engine.submit([first])
    engine.step()
    engine.submit([second])
    engine.step()

    def fail(kind: str) -> None:
        raise RuntimeError("no memory")

    script.before = fail
    with pytest.raises(EngineError, match="no memory"):
        engine.step()
    assert (first.finish_reason, second.finish_reason) == ("abort", "abort")
    script.before = lambda kind: None
    third = request(50)
    engine.submit([third])
    run(engine, [third])
    assert third.token_ids == answer(50)


def test_closing_ends_a_prompt_on_its_way(engine, script, clock):
    engine.submit([request(10, tokens=9)])
    engine.step()
    engine.submit([request(30)])
    engine.step()
    engine.close()
    assert script.prompts_ended == 2 and script.closed == 1


def test_closing_from_another_thread_waits_for_no_more_than_a_layer_of_a_prompt(engine, script):
    script.borders = 5
    borders, closer = [], threading.Thread(target=engine.close)

    def close(kind: str) -> None:
        if kind == "border":
            borders.append(kind)
            if len(borders) == 2:
                closer.start()
                deadline = time.monotonic() + 30
                while not engine._closed:
                    assert time.monotonic() < deadline
                    time.sleep(1e-3)

    script.before = close
    one = request(10, tokens=9)
    engine.submit([one])
    # The step itself ends in peace; who closes comes between it and the next.
    engine.step()
    closer.join(30)
    assert len(borders) == 2 and script.decodes == []
    assert (one.finish_reason, script.closed) == ("abort", 1)


def test_unreadable_weights_end_everything_with_their_own_error(engine, script):
    waiting = [request(first, tokens=9) for first in (0, 10, 20)]
    engine.submit(waiting)
    engine.step()

    def fail(kind: str) -> None:
        raise CheckpointError("model.safetensors: gone")

    script.before = fail
    with pytest.raises(CheckpointError, match="gone"):
        engine.step()
    for one in waiting:
        with pytest.raises(CheckpointError, match="gone"):
            _ = one.ended
        # A thread that waited for the step meanwhile, to run the next one.
        with pytest.raises(CheckpointError, match="gone"):
            engine.step_for(one)
    assert script.closed == 1
    with pytest.raises(CheckpointError, match="gone"):
        engine.submit([request(1)])


# --- spare rows ------------------------------------------------------------------------------------------------------


def test_work_on_a_spare_row_waits_for_prompts_on_their_way(engine, script, clock):
    first, second = request(10, tokens=30), request(30, tokens=30)
    engine.submit([first])
    engine.step()
    engine.submit([second])
    engine.step()
    with pytest.raises(EngineError), engine.spare_row():
        raise EngineError("not before a row is free")
    assert script.prompts_ended == 2


def test_a_spare_row_waits_for_a_request_to_end(engine, script):
    requests = [request(0, tokens=3), request(10, tokens=6)]
    engine.submit(requests)
    engine.step()
    with engine.spare_row() as row:
        assert requests[0].finish_reason == "length"
        assert requests[1].finish_reason is None
        assert row != requests[1].row
    run(engine, requests)
    assert requests[1].token_ids == answer(10, 6)
    after = [request(20), request(30)]
    engine.submit(after)
    run(engine, after)
    assert {row for row, _ in script.prefills[-2:]} == {0, 1}


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_what_fails_on_a_spare_row_takes_the_running_requests_with_it(engine, script, error):
    running = request(0, tokens=50)
    engine.submit([running])
    engine.step()
    with pytest.raises(type(error)), engine.spare_row():
        raise error
    assert (running.finish_reason, engine._free_rows()) == ("abort", [0, 1])
    after = [request(20), request(30)]
    engine.submit(after)
    run(engine, after)
    assert [one.token_ids for one in after] == [answer(20), answer(30)]
    assert {row for row, _ in script.prefills[-2:]} == {0, 1}


def test_greedy_and_sampled_requests_share_steps(engine, script):
    greedy, drawn = request(0, tokens=5), request(10, tokens=5, sampling=ResolvedSampling(seed=3, logprobs=2))
    engine.submit([greedy, drawn])
    run(engine, [greedy, drawn])
    assert (greedy.token_ids, drawn.token_ids) == (answer(0, 5), answer(10, 5))
    assert (greedy.logprobs, [next(iter(line)) for line in drawn.logprobs]) == ([], answer(10, 5))
    assert any(len(step["rows"]) == 2 for step in script.decodes)


def test_sampling_state_does_not_outlive_its_request(engine, script):
    """The second request gets the row of the first, and none of its bias."""
    biased = request(0, sampling=ResolvedSampling(seed=3, logit_bias={50: 1000.0}))
    engine.submit([biased])
    run(engine, [biased])
    assert biased.token_ids == [50, 50, 50]
    plain = [request(20, sampling=ResolvedSampling(seed=3)) for _ in range(2)]
    engine.submit(plain)
    run(engine, plain)
    assert [one.token_ids for one in plain] == [answer(20)] * 2


def test_two_threads_each_get_their_own_answers(engine, script):
    outcomes: dict[int, list[list[int]]] = {}

    def work(start: int) -> None:
        got = []
        for _ in range(10):
            one = request(start, tokens=4)
            engine.submit([one])
            while one.finish_reason is None:
                engine.step()
            got.append(one.token_ids)
        outcomes[start] = got

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 20, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert outcomes == {start: [answer(start, 4)] * 10 for start in (0, 20, 40)}


def test_closing_frees_the_memory_of_the_sampler(script):
    executor: Any = script
    sampler = Sampler(script.rows, VOCAB)
    engine = Engine(executor, sampler)
    drawn = request(10, sampling=ResolvedSampling(seed=3))
    engine.submit([drawn])
    run(engine, [drawn])
    state = sampler._state
    assert state is not None
    engine.close()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_an_interrupt_at_any_line_loses_no_row_and_no_request(engine, script):
    """Signals arrive between any two instructions, also between two that belong together."""
    line = 0
    while True:
        line += 1
        requests = [request(first) for first in (0, 10, 20)]

        def work(requests: list[Request] = requests) -> None:
            engine.submit(requests)
            run(engine, requests)

        if not interrupted_at(line, work, "novalm_jax/engine"):
            break
        # Whoever waits for them elsewhere is told, or served.
        for one in requests:
            if one in engine._requests:
                engine.run_until_ended(one)
        after = [request(first) for first in (30, 40, 50)]
        engine.submit(after)
        run(engine, after)
        assert [one.token_ids for one in after] == [answer(30), answer(40), answer(50)], line
        assert engine._free_rows() == [0, 1], line
    assert line > 100


def test_waiting_for_a_request_that_was_never_submitted_is_an_error(engine):
    with pytest.raises(EngineError, match="unknown"):
        engine.run_until_ended(request(0))


def test_text_is_complete_before_the_end_is_seen(engine):
    """Another thread may look in between."""
    seen = []

    class Held:
        stopped = False

        def push(self, token: int) -> str:
            return ""

        def finish(self) -> str:
            seen.append(one.finish_reason)
            return "the rest"

    one = request(0, tokens=1)
    stream: Any = Held()
    one.text_stream = stream
    engine.submit([one])
    run(engine, [one])
    assert (seen, one.completion().text) == ([None], "the rest")
