"""The engine's book-keeping on a scripted executor: who gets a row when, and what is left after things go wrong."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.engine.engine import Engine
from novalm_jax.engine.programs import Decoded
from novalm_jax.engine.request import Request
from novalm_jax.engine.sampler import Sampler
from novalm_jax.engine.sampling import ResolvedSampling
from novalm_jax.errors import EngineError

VOCAB = 64
GREEDY = ResolvedSampling(seed=0, temperature=0.0)


class Script:
    """Stands in for the executor: the most likely token after i is i + 1, and every call is written down."""

    def __init__(self, rows: int):
        self.rows = rows
        self.prefills: list[tuple[int, tuple[int, ...]]] = []
        self.decodes: list[dict[str, list[int]]] = []
        self.before: Callable[[str], None] = lambda kind: None
        self.closed = 0

    def prefill(self, row: int, tokens: Sequence[int]) -> Decoded:
        self.before("prefill")
        self.prefills.append((row, tuple(tokens)))
        return self._decoded([tokens[-1]] * 2)

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


def test_closing_ends_running_and_waiting_requests(engine, script):
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


def interrupted_at(line: int, work: Callable[[], object]) -> bool:
    """Runs `work` with Ctrl-C at the `line`-th line it executes in the engine's files; False where it has fewer."""
    left = line

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if "novalm_jax/engine" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_at_any_line_loses_no_row_and_no_request(engine, script):
    """Signals arrive between any two instructions, also between two that belong together."""
    line = 0
    while True:
        line += 1
        requests = [request(first) for first in (0, 10, 20)]

        def work(requests: list[Request] = requests) -> None:
            engine.submit(requests)
            run(engine, requests)

        if not interrupted_at(line, work):
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
