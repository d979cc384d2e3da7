"""The engine's book-keeping on a scripted executor: who gets a row and pages when, what pages hold then, and what is
left after things go wrong."""

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
from novalm_jax.engine.executor import Line, Part
from novalm_jax.engine.functions import Decoded
from novalm_jax.engine.request import Request
from novalm_jax.engine.sampler import Sampler
from novalm_jax.engine.sampling import ResolvedSampling
from novalm_jax.errors import CheckpointError, EngineError
from novalm_jax.kv.paged import page_counts
from novalm_jax.kv.pages import NONE, PAGE, Copy, Held, Pages, Reach
from novalm_jax.options import EngineOptions

VOCAB = 97
GREEDY = ResolvedSampling(seed=0, temperature=0.0)
REACHES = (Reach(), Reach(window=70))
CONTEXT = 4 * PAGE


def following(tokens: Sequence[int]) -> int:
    """What the script says after these tokens: every one of them counts, and where it stands."""
    code = 0
    for token in tokens:
        code = (31 * code + token + 1) % VOCAB
    return code


class Script:
    """Stands in for the executor: what is most likely next follows from all tokens that pages hold of a sequence, and
    every call is written down. Pages of the second group hold what its window sees.

    Attributes:
      certain: how much more likely that is than all else.
      book: the latest that it gave away.
    """

    page_bytes = (100, 10)

    def __init__(self, rows: int = 2, pages: int | None = None, pass_chunks: int = 1, chunk: int = PAGE):
        self.rows, self.chunk, self.pass_chunks = rows, chunk, pass_chunks
        most = rows * CONTEXT // PAGE if pages is None else pages
        self._counts = page_counts(REACHES, rows, CONTEXT, most, chunk * pass_chunks)
        self._content = [np.full((count, PAGE), -1) for count in self._counts]
        self.prefills: list[tuple[int, tuple[int, ...]]] = []
        self.decodes: list[list[Line]] = []
        self.copies: list[Copy] = []
        self.before: Callable[[str], None] = lambda kind: None
        self.certain = 100.0
        self.borders = 1
        self.broken = False
        self.prompts_ended = 0
        self.closed = 0

    def new_book(self) -> Pages:
        self.book = Pages(REACHES, self._counts, CONTEXT // PAGE)
        return self.book

    def prefill(self, parts: Sequence[Part]) -> Iterator[tuple[int, Decoded] | None]:
        try:
            for number, part in enumerate(parts):
                self.before("prefill")
                self.prefills.append((part.start, tuple(part.tokens)))
                for _ in range(self.borders):
                    # As in the layers of a model: each one writes, to the pages that there are by then.
                    self._write(part.held, part.start, part.tokens)
                    self.before("border")
                    yield None
                if part.last:
                    there = any(part.held.tables)
                    after = self._after(part.held, part.start + len(part.tokens)) if there else 0
                    yield number, self._decoded([after] * 2)
        finally:
            self.prompts_ended += 1

    def decode(self, lines: Sequence[Line]) -> Decoded:
        self.before("decode")
        assert len({line.sequence for line in lines}) == len(lines) <= self.rows
        self.decodes.append([*lines])
        for line in lines:
            assert line.known == line.position + 1 and any(line.held.tables)
            self._write(line.held, line.position, [line.token])
        after = [self._after(line.held, line.position + 1) for line in lines]
        return self._decoded([*after, *[0] * (-len(after) % 4)])

    def copy(self, copies: Sequence[Copy]) -> None:
        self.before("copy")
        self.copies += copies
        for group, source, target in copies:
            self._content[group][target] = self._content[group][source]

    def save(self, pages: Sequence[Sequence[int]]) -> list[np.ndarray]:
        self.before("save")
        saved = [content[[*each]] for content, each in zip(self._content, pages, strict=True)]
        self.before("saved")
        return saved

    def load(self, pages: Sequence[Sequence[int]], saved: list[np.ndarray]) -> None:
        self.before("load")
        for content, each, old in zip(self._content, pages, saved, strict=True):
            content[[*each]] = old

    def close(self) -> None:
        self.closed += 1

    def _write(self, held: Held, start: int, tokens: Sequence[int]) -> None:
        for content, pool, table in zip(self._content, self.book.pools, held.tables, strict=True):
            for position, token in enumerate(tokens, start):
                if table:
                    page = table[position // PAGE]
                    assert page != NONE and pool.users(page) == 1, "written to a page of others"
                    content[page, position % PAGE] = token

    def _after(self, held: Held, count: int) -> int:
        """What follows so many tokens, as the pages have them."""
        everything, windowed = (
            [int(content[table[at // PAGE], at % PAGE]) for at in range(reach.first(count - 1), count)]
            for content, table, reach in zip(self._content, held.tables, REACHES, strict=True)
        )
        assert windowed == everything[len(everything) - len(windowed) :]
        return following(everything)

    def _decoded(self, best: Sequence[int]) -> Decoded:
        logits = np.zeros((len(best), VOCAB), np.float32)
        logits[np.arange(len(best)), best] = self.certain
        return Decoded(jnp.asarray(logits), jnp.asarray(best, jnp.int32))


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr("novalm_jax.engine.engine.time.perf_counter", lambda: self.now)


def request(
    first: int,
    tokens: int = 3,
    sampling: ResolvedSampling = GREEDY,
    ends: Sequence[int] = (),
    length: int = 1,
    **more: Any,
) -> Request:
    """`length` tokens of prompt, of which no two requests with another `first` have a block in common."""
    prompt = [(first + i * i) % VOCAB for i in range(length)]
    return Request(prompt_ids=prompt, sampling=sampling, max_tokens=tokens, end_ids=frozenset(ends), **more)


def answer(first: int, tokens: int = 3, length: int = 1) -> list[int]:
    """What such a request gets."""
    sequence = list(request(first, length=length).prompt_ids)
    for _ in range(tokens):
        sequence.append(following(sequence))
    return sequence[length:]


def run(engine: Engine, requests: Sequence[Request]) -> None:
    for _ in range(2000):
        if all(one.finish_reason is not None for one in requests):
            return
        engine.step()
    raise AssertionError("the requests do not end")


def step_until_it_decodes(engine: Engine, one: Request) -> None:
    while not one.token_ids:
        engine.step()


def engine_of(script: Script, host_bytes: int = 0, keeps_prefixes: bool = True) -> Engine:
    # The scripted one has all that the engine asks of an executor.
    executor: Any = script
    return Engine(executor, Sampler(script.rows, VOCAB), EngineOptions(prefix_cache=keeps_prefixes), host_bytes)


def assert_nothing_is_held(engine: Engine) -> None:
    """All rows and pages are free, each page is there once, and the host holds nothing."""
    scheduler = engine.scheduler
    assert [one for one in engine._requests if one.row is not None or one.held or one.moved] == []
    assert engine._pass is None and scheduler.host_bytes == 0
    for pool in scheduler.pages.pools:
        assert pool.in_use == 0 and sorted([*pool._empty, *pool._idle]) == list(range(pool.count))


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def engine(script: Script) -> Iterator[Engine]:
    engine = engine_of(script)
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
    assert [[line.token for line in lines] for lines in script.decodes] == [[token] for token in answer(10, 3)]
    assert [[(line.position, line.known) for line in lines] for lines in script.decodes] == [
        [(1, 2)],
        [(2, 3)],
        [(3, 4)],
    ]
    assert (engine.prompt_tokens, engine.generated_tokens) == (1, 4)


def test_a_prompt_of_several_chunks_goes_through_in_order(engine, script):
    one = request(10, tokens=3, length=150)
    engine.submit([one])
    run(engine, [one])
    assert [(start, len(tokens)) for start, tokens in script.prefills] == [(0, 64), (64, 64), (128, 22)]
    assert one.token_ids == answer(10, 3, length=150)
    assert engine.prompt_tokens == 150


def test_requests_are_admitted_in_order_and_rows_are_reused(engine, script):
    requests = [request(first, tokens=3) for first in (0, 10, 20, 30, 40)]
    engine.submit(requests)
    rows = set()
    while any(one.finish_reason is None for one in requests):
        engine.step()
        rows |= {one.row for one in requests}
    assert [tokens for _, tokens in script.prefills] == [(0,), (10,), (20,), (30,), (40,)]
    assert rows == {None, 0, 1}
    assert all(one.token_ids == answer(one.prompt_ids[0]) for one in requests)
    assert max(map(len, script.decodes)) == 2


def test_requests_submitted_later_join_those_that_run(engine, script):
    first = request(0, tokens=6)
    engine.submit([first])
    engine.step()
    second = request(10, tokens=3)
    engine.submit([second])
    run(engine, [first, second])
    assert (first.token_ids, second.token_ids) == (answer(0, 6), answer(10, 3))
    assert any(len(lines) == 2 for lines in script.decodes)


def test_an_end_token_ends_a_request_and_frees_its_row(engine):
    short, long = request(0, tokens=9, ends=answer(0, 2)[1:]), request(10, tokens=9)
    waiting = request(20, tokens=3)
    engine.submit([short, long, waiting])
    engine.step()
    assert (short.token_ids, short.finish_reason) == (answer(0, 2), "stop")
    taken = long.row
    engine.step()
    assert {waiting.row, taken} == {0, 1} and long.row == taken
    run(engine, [long, waiting])
    assert waiting.token_ids == answer(20)


def test_a_request_of_one_token_never_decodes(engine, script):
    one = request(5, tokens=1)
    engine.submit([one])
    engine.step()
    assert one.finish_reason == "length"
    assert script.decodes == []
    assert_nothing_is_held(engine)


def test_a_request_without_a_prompt_fails_and_keeps_nobody_waiting(engine):
    """`LLM` refuses it; should one come here, it must not wait for ever for what never begins."""
    nothing = request(0, length=0)
    engine.submit([nothing])
    with pytest.raises(EngineError, match="Positions 0 to 0"):
        engine.run_until_ended(nothing)
    engine.submit([after := request(5)])
    run(engine, [after])
    assert after.token_ids == answer(5)


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
    after = request(20, tokens=9)
    engine.submit([after])
    engine.step()
    assert (after.row, script.prefills[-1]) == (row, (0, (20,)))
    assert len(given_up.token_ids) == 2
    assert after.token_ids == answer(20, 2)
    assert other.token_ids == answer(10, 3)


@pytest.mark.parametrize("where", ["prefill", "border", "decode"])
def test_a_step_that_fails_ends_its_requests_and_nothing_after_them(engine, script, where):
    def fail(kind: str) -> None:
        if kind == where:
            raise RuntimeError("the device is on fire")

    requests = [request(0, length=80), request(10)]
    engine.submit(requests)
    script.before = fail
    with pytest.raises(EngineError, match="the device is on fire") as caught:
        run(engine, requests)
    assert isinstance(caught.value.__cause__, RuntimeError)
    lost = [one for one in requests if one.finish_reason is not None]
    assert lost and all(one.finish_reason == "abort" and isinstance(one.error, RuntimeError) for one in lost)
    assert_nothing_is_held(engine)
    script.before = lambda kind: None
    # The first one again: what pages held of it is gone with them.
    before = len(script.prefills)
    after = [request(0, length=80), request(20), request(30), request(40)]
    engine.submit(after)
    run(engine, after)
    assert [one.token_ids for one in after] == [answer(0, length=80), answer(20), answer(30), answer(40)]
    assert (0, tuple(after[0].prompt_ids[:PAGE])) in script.prefills[before:]
    assert_nothing_is_held(engine)


def test_a_request_that_waits_outlives_a_step_that_fails(engine, script):
    def fail(kind: str) -> None:
        raise RuntimeError("the device is on fire")

    requests = [request(first, tokens=9) for first in (0, 10, 20)]
    engine.submit(requests)
    engine.step()
    script.before = fail
    with pytest.raises(EngineError, match="on fire"):
        engine.step()
    assert [one.finish_reason for one in requests] == ["abort", "abort", None]
    script.before = lambda kind: None
    run(engine, requests)
    assert requests[2].token_ids == answer(20, 9)


def test_an_interrupt_passes_through_and_leaves_a_working_engine(engine, script):
    def interrupt(kind: str) -> None:
        raise KeyboardInterrupt

    one = request(0)
    engine.submit([one])
    script.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert (one.finish_reason, one.error) == ("abort", None)
    assert_nothing_is_held(engine)
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
    assert_nothing_is_held(engine)


def test_a_closed_engine_takes_no_more_work(engine):
    engine.close()
    for use in (engine.step, lambda: engine.submit([request(0)]), lambda: engine.spare_pages(1).__enter__()):
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
    step_until_it_decodes(engine, first)
    engine.submit([second])
    for expected in (3, 4, 5):
        begin = clock.now
        engine.step()
        assert clock.now - begin == pytest.approx(0.12)
        assert (len(first.token_ids), second.token_ids) == (expected, [])
    engine.step()
    assert (len(first.token_ids), second.token_ids) == (6, answer(30, 2))
    # The first prompt delayed nobody.
    assert engine.longest_wait == pytest.approx(0.12)
    run(engine, [first, second])
    assert (first.token_ids, second.token_ids) == (answer(10, 20), answer(30))
    assert engine.prompt_tokens == 2 and script.prompts_ended == 2


def test_a_step_gives_way_even_where_nobody_decodes(engine, script, clock):
    """Others can be submitted then, or give up."""
    one = request(10)
    engine.submit([one])
    for _ in range(3):
        begin = clock.now
        engine.step()
        assert clock.now - begin == pytest.approx(0.12) and one.token_ids == []
    engine.step()
    assert one.token_ids == answer(10, 2) and engine.longest_wait == 0


@pytest.mark.parametrize("pass_chunks", [1, 2])
def test_prompts_that_are_admitted_together_go_on_until_one_of_them_decodes(script, clock, pass_chunks):
    """Side by side in one pass, or one after the other."""
    script.pass_chunks = pass_chunks
    engine, requests = engine_of(script), [request(10, tokens=9), request(30, tokens=9)]
    engine.submit(requests)
    step_until_it_decodes(engine, requests[0])
    assert [len(one.token_ids) for one in requests] == [2, 0]
    run(engine, requests)
    assert [one.token_ids for one in requests] == [answer(10, 9), answer(30, 9)]
    assert script.prompts_ended == 3 - pass_chunks


def test_a_prompt_that_nobody_waits_for_is_dropped_and_its_row_and_pages_are_free(engine, script, clock):
    first, second, third = request(10, tokens=30), request(30, length=130), request(50, tokens=9)
    engine.submit([first])
    step_until_it_decodes(engine, first)
    row = 1 - first.row
    engine.submit([second])
    engine.step()
    assert second.row == row and engine.scheduler.pages.pools[0].in_use == 2
    engine.abort([second])
    assert engine.scheduler.pages.pools[0].in_use == 1
    assert script.prompts_ended == 2 and second.token_ids == []
    engine.submit([third])
    engine.step()
    assert third.row == row
    run(engine, [first, third])
    assert third.token_ids == answer(50, 9)
    assert_nothing_is_held(engine)


def test_pages_of_a_prompt_that_was_given_up_in_a_pass_are_there_for_others_at_once(script, clock):
    """The pass goes on for the prompts beside it, and what it computes of this one is written nowhere any more."""
    script.rows, script.pass_chunks = 3, 4
    engine = engine_of(script)
    first, given_up, last = request(10, tokens=9, length=60), request(30, length=120), request(50, tokens=9)
    engine.submit([first, given_up, last])
    step_until_it_decodes(engine, first)
    engine.step()
    assert (len(first.token_ids), given_up.token_ids, last.token_ids) == (3, [], [])
    pool, pages = engine.scheduler.pages.pools[0], list(given_up.held.tables[0])
    assert (pool.in_use, len(pages)) == (4, 2)
    engine.abort([given_up])
    assert (pool.in_use, given_up.row, given_up.held) == (2, None, None)
    while len(first.held.tables[0]) == 1:
        engine.step()
    # It grew by one of these pages, while there were still layers to come of the prompt that had them.
    assert first.held.tables[0][1] in pages and last.token_ids == [] and script.prompts_ended == 0
    run(engine, [first, last])
    assert (first.token_ids, last.token_ids) == (answer(10, 9, length=60), answer(50, 9))
    assert_nothing_is_held(engine)


def test_a_pass_ends_where_all_that_is_left_of_it_was_given_up(script, clock):
    """Of two prompts side by side, the first one decodes, and nobody waits for the other one."""
    script.pass_chunks = 2
    engine = engine_of(script)
    first, second = request(10, tokens=9), request(30)
    engine.submit([first, second])
    step_until_it_decodes(engine, first)
    engine.abort([second])
    assert script.prompts_ended == 1 and len(first.token_ids) == 2
    run(engine, [first])
    assert first.token_ids == answer(10, 9)
    assert_nothing_is_held(engine)


def test_an_error_in_a_prompt_on_its_way_takes_the_running_requests_with_it(engine, script, clock):
    first, second = request(10, tokens=9), request(30)
    engine.submit([first])
    step_until_it_decodes(engine, first)
    engine.submit([second])
    engine.step()

    def fail(kind: str) -> None:
        raise RuntimeError("no memory")

    script.before = fail
    with pytest.raises(EngineError, match="no memory"):
        engine.step()
    assert (first.finish_reason, second.finish_reason) == ("abort", "abort")
    assert_nothing_is_held(engine)
    script.before = lambda kind: None
    third = request(50)
    engine.submit([third])
    run(engine, [third])
    assert third.token_ids == answer(50)


def test_closing_ends_a_prompt_on_its_way(engine, script, clock):
    engine.submit([first := request(10, tokens=9)])
    step_until_it_decodes(engine, first)
    engine.submit([request(30)])
    engine.step()
    engine.close()
    assert script.prompts_ended == 2 and script.closed == 1
    assert_nothing_is_held(engine)


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


# --- spare pages -----------------------------------------------------------------------------------------------------


def test_work_on_spare_pages_waits_for_prompts_on_their_way(engine, script, clock):
    first, second = request(10, tokens=30), request(30, tokens=30)
    engine.submit([first])
    engine.step()
    engine.submit([second])
    engine.step()
    with pytest.raises(EngineError), engine.spare_pages(CONTEXT):
        raise EngineError("not before the pass is over")
    assert script.prompts_ended == 2


def test_spare_pages_wait_for_a_request_to_end_where_the_host_has_no_room():
    script = Script(pages=6)
    engine = engine_of(script)
    requests = [request(0, tokens=3, length=100), request(10, tokens=6, length=100)]
    engine.submit(requests)
    engine.step()
    with engine.spare_pages(CONTEXT) as held:
        assert requests[0].finish_reason == "length"
        assert requests[1].finish_reason is None and requests[1].row is not None
        assert engine.scheduler.pages.grow(held, 0, CONTEXT) == []
    run(engine, requests)
    assert requests[1].token_ids == answer(10, 6, length=100)
    assert_nothing_is_held(engine)


def test_for_spare_pages_requests_leave_for_the_host_and_come_back():
    script = Script(pages=6)
    engine = engine_of(script, host_bytes=1000)
    requests = [request(0, tokens=3, length=100), request(10, tokens=6, length=100)]
    engine.submit(requests)
    engine.step()
    with engine.spare_pages(CONTEXT) as held:
        assert [one.moved is not None for one in requests] == [False, True]
        assert engine.scheduler.pages.grow(held, 0, CONTEXT) == []
    run(engine, requests)
    assert [one.token_ids for one in requests] == [answer(0, 3, length=100), answer(10, 6, length=100)]
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_what_fails_on_spare_pages_takes_the_running_requests_with_it(engine, error):
    running = request(0, tokens=50)
    engine.submit([running])
    engine.step()
    with pytest.raises(type(error)), engine.spare_pages(CONTEXT) as held:
        engine.scheduler.pages.grow(held, 0, CONTEXT)
        raise error
    assert running.finish_reason == "abort"
    assert_nothing_is_held(engine)
    after = [request(20), request(30)]
    engine.submit(after)
    run(engine, after)
    assert [one.token_ids for one in after] == [answer(20), answer(30)]


def test_room_for_spare_pages_that_cannot_be_made_takes_the_running_requests_with_it():
    """What was on its way to the host is in no place any more."""
    script = Script(pages=6)
    engine = engine_of(script, host_bytes=1000)
    requests = [request(0, tokens=9, length=100), request(10, tokens=9, length=100)]
    engine.submit(requests)
    engine.step()

    def fail(kind: str) -> None:
        if kind == "saved":
            raise RuntimeError("no memory on the host")

    script.before = fail
    with pytest.raises(EngineError, match="no memory on the host"), engine.spare_pages(CONTEXT):
        raise AssertionError("there is no room")
    assert [one.finish_reason for one in requests] == ["abort", "abort"]
    assert_nothing_is_held(engine)


# --- sampling --------------------------------------------------------------------------------------------------------


def test_greedy_and_sampled_requests_share_steps(engine, script):
    greedy, drawn = request(0, tokens=5), request(10, tokens=5, sampling=ResolvedSampling(seed=3, logprobs=2))
    engine.submit([greedy, drawn])
    run(engine, [greedy, drawn])
    assert (greedy.token_ids, drawn.token_ids) == (answer(0, 5), answer(10, 5))
    assert (greedy.logprobs, [next(iter(line)) for line in drawn.logprobs]) == ([], answer(10, 5))
    assert any(len(lines) == 2 for lines in script.decodes)


def test_sampling_state_does_not_outlive_its_request(engine):
    """The second request gets the row of the first, and none of its bias."""
    biased = request(0, sampling=ResolvedSampling(seed=3, logit_bias={50: 1000.0}))
    engine.submit([biased])
    run(engine, [biased])
    assert biased.token_ids == [50, 50, 50]
    plain = [request(20, sampling=ResolvedSampling(seed=3)) for _ in range(2)]
    engine.submit(plain)
    run(engine, plain)
    assert [one.token_ids for one in plain] == [answer(20)] * 2


def test_closing_frees_the_memory_of_the_sampler(script):
    executor: Any = script
    sampler = Sampler(script.rows, VOCAB)
    engine = Engine(executor, sampler, EngineOptions())
    drawn = request(10, sampling=ResolvedSampling(seed=3))
    engine.submit([drawn])
    run(engine, [drawn])
    state = sampler._state
    assert state is not None
    engine.close()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


# --- pages -----------------------------------------------------------------------------------------------------------


def test_pages_grow_with_the_tokens_and_go_where_nobody_sees_them_any_more(engine):
    one = request(10, tokens=140, length=60)
    engine.submit([one])
    most = [0, 0]
    while one.finish_reason is None:
        engine.step()
        if one.held is not None:
            assert one.held.count()[0] == -(-(one.length - 1) // PAGE)
            most = [max(each) for each in zip(most, one.held.count(), strict=True)]
    # Of the window's 70 positions, two pages are not enough where it begins in one and ends in the third.
    assert most == [4, 3]
    assert one.token_ids == answer(10, 140, length=60)
    assert_nothing_is_held(engine)


def test_requests_that_were_moved_out_give_the_tokens_that_they_give_alone():
    script = Script(rows=3, pages=5, pass_chunks=2)
    engine = engine_of(script, host_bytes=10_000)
    asked = [(first, 120 + first, 5 + 21 * first) for first in range(5)]
    requests = [request(first, tokens, length=length) for first, tokens, length in asked]
    engine.submit(requests)
    run(engine, requests)
    assert engine.scheduler.preemptions > 1 and engine.scheduler.bytes_out > 0
    for one, (first, tokens, length) in zip(requests, asked, strict=True):
        assert one.token_ids == answer(first, tokens, length)
    assert max(map(len, script.decodes)) > 1
    assert_nothing_is_held(engine)


def test_without_room_on_the_host_requests_wait_until_they_have_room_on_the_device():
    script = Script(rows=3, pages=6)
    engine = engine_of(script)
    requests = [request(first, tokens=90, length=60) for first in range(5)]
    engine.submit(requests)
    run(engine, requests)
    assert [one.token_ids for one in requests] == [answer(first, 90, length=60) for first in range(5)]
    assert engine.scheduler.preemptions == 0 and max(map(len, script.decodes)) == 2
    assert_nothing_is_held(engine)


def test_an_urgent_request_takes_the_place_of_another_which_goes_on_later():
    engine = engine_of(Script(rows=1), host_bytes=10_000)
    first, urgent = request(10, tokens=9, length=70), request(20, tokens=3, priority=1)
    engine.submit([first])
    engine.step()
    engine.submit([urgent])
    run(engine, [urgent])
    assert first.finish_reason is None and engine.scheduler.preemptions == 1
    run(engine, [first])
    assert (first.token_ids, urgent.token_ids) == (answer(10, 9, length=70), answer(20))
    assert_nothing_is_held(engine)


def test_a_request_that_is_given_up_while_it_is_moved_out_frees_the_memory_of_the_host():
    engine = engine_of(Script(rows=1), host_bytes=10_000)
    first, urgent = request(10, tokens=9, length=70), request(20, tokens=30, priority=1)
    engine.submit([first])
    engine.step()
    engine.submit([urgent])
    engine.step()
    assert engine.scheduler.host_bytes == first.moved.nbytes == 2 * 100 + 2 * 10
    engine.abort([first])
    assert engine.scheduler.host_bytes == 0
    run(engine, [urgent])
    assert (len(first.token_ids), urgent.token_ids) == (2, answer(20, 30))
    assert_nothing_is_held(engine)


def drawing(seed: int, **more: Any) -> ResolvedSampling:
    """What is drawn depends on how many tokens there are, and on which."""
    return ResolvedSampling(seed=seed, frequency_penalty=1.5, presence_penalty=0.5, **more)


def test_sampled_requests_that_were_moved_out_go_on_with_the_state_that_they_had():
    """Each of them alone draws the same, which takes the number of its step and the tokens that it has."""
    asked = [dict(first=first, tokens=100 + 9 * first, length=40, sampling=drawing(first)) for first in range(4)]
    alone = []
    for one in asked:
        script = Script(rows=3)
        script.certain = 2.0
        engine = engine_of(script)
        engine.submit([single := request(**one)])
        run(engine, [single])
        alone.append(single.token_ids)
    assert all(len(set(ids)) > 30 for ids in alone)
    script = Script(rows=3, pages=5)
    script.certain = 2.0
    engine = engine_of(script, host_bytes=10_000)
    requests = [request(**one) for one in asked]
    engine.submit(requests)
    run(engine, requests)
    assert engine.scheduler.preemptions > 1
    assert [one.token_ids for one in requests] == alone


def test_a_request_that_comes_back_to_a_row_of_its_own_has_the_state_of_its_latest_row():
    """What the sampler knows of it in a row where it was before is out of date."""
    script = Script(rows=2)
    script.certain = 2.0
    engine = engine_of(script, host_bytes=10_000)
    engine.submit([alone := request(10, tokens=40, sampling=drawing(5))])
    run(engine, [alone])
    engine.submit([moving := request(10, tokens=40, sampling=drawing(5))])
    rows, left = [], []
    for row in (0, 1, 0):
        engine.step()
        rows.append(moving.row)
        engine.abort(left)
        # Greedy ones, which the sampler knows nothing of, take all rows; the row beside its own is free again first.
        urgent = [request(20 + i, tokens=9, priority=1) for i in range(2)]
        engine.submit(urgent)
        engine.step()
        assert moving.moved is not None
        engine.abort([one for one in urgent if one.row == 1 - row])
        left = urgent
    run(engine, [moving])
    assert rows == [0, 1, 0] and moving.token_ids == alone.token_ids


# --- prompts that are alike ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_prefixes", [True, False])
def test_choices_of_a_prompt_share_its_pass_and_its_pages(keeps_prefixes):
    script = Script(rows=3, chunk=200)
    script.certain = 2.0
    engine = engine_of(script, keeps_prefixes=keeps_prefixes)
    leader = request(10, tokens=30, length=100, sampling=drawing(0))
    choices = [leader, *(request(10, 30, drawing(i), length=100, leader=leader) for i in (1, 2))]
    engine.submit(choices)
    engine.step()
    assert script.prefills == [(0, tuple(leader.prompt_ids))] and engine.prompt_tokens == 300
    # All have the first page, and each a second one of its own: two copies in both groups, and what was copied.
    assert engine.scheduler.pages.pools[0].in_use == 1 + 3 and len(script.copies) == 2 * 2
    run(engine, choices)
    assert len(script.prefills) == 1
    found = [one.token_ids for one in choices]
    assert len({tuple(ids) for ids in found}) == 3
    for i in range(3):
        engine.submit([alone := request(10, 30, drawing(i), length=100)])
        run(engine, [alone])
        assert alone.token_ids == found[i]
    assert_nothing_is_held(engine)


def test_choices_that_have_no_row_yet_find_what_the_first_one_left(engine, script):
    leader = request(10, tokens=9, length=100)
    choices = [leader, *(request(10, tokens=9, length=100, leader=leader) for _ in range(4))]
    engine.submit(choices)
    run(engine, choices)
    assert [one.token_ids for one in choices] == [answer(10, 9, length=100)] * 5
    assert [start for start, _ in script.prefills] == [0, 64, *[64] * 3]
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("where", ["waiting", "on its way", "decoding"])
def test_choices_go_on_without_the_first_one(engine, script, clock, where):
    leader = request(10, tokens=9, length=100)
    choices = [request(10, tokens=9, length=100, leader=leader) for _ in range(3)]
    running = request(30, tokens=60)
    engine.submit([running, leader, *choices])
    if where != "waiting":
        step_until_it_decodes(engine, running if where == "on its way" else leader)
    assert bool(leader.token_ids) == (where == "decoding")
    engine.abort([leader])
    run(engine, [running, *choices])
    assert leader.finish_reason == "abort" and len(leader.token_ids) < 9
    assert [one.token_ids for one in choices] == [answer(10, 9, length=100)] * 3
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("length", [128, 129, 150])
def test_a_prompt_that_was_seen_before_is_not_computed_again_but_for_what_is_no_whole_page(engine, script, length):
    """And for its last token, after which its first new one comes."""
    requests = [request(10, length=length) for _ in range(2)]
    for one in requests:
        engine.submit([one])
        run(engine, [one])
    found = min(128, length - 1)
    assert script.prefills[-1] == (found, tuple(requests[1].prompt_ids[found:]))
    assert engine.scheduler.prefix_tokens == found
    assert [one.token_ids for one in requests] == [answer(10, length=length)] * 2
    # One that goes on in another way shares what is alike.
    other = request(10, length=length)
    other.prompt_ids = [*other.prompt_ids[:100], 5, 5, 5]
    engine.submit([other])
    run(engine, [other])
    assert script.prefills[-1][0] == 64
    assert_nothing_is_held(engine)


def test_a_prompt_that_is_decoded_now_is_shared_while_it_is_in_use(engine, script):
    first, second = request(10, tokens=20, length=128), request(10, tokens=20, length=128)
    engine.submit([first])
    engine.step()
    engine.submit([second])
    engine.step()
    # The last token of the second is computed anew, in a copy of the page that it is in.
    assert script.prefills[-1][0] == 127
    assert [(copy.group, copy.source) for copy in script.copies] == [
        (0, first.held.tables[0][1]),
        (1, first.held.tables[1][1]),
    ]
    assert second.held.tables[0][0] == first.held.tables[0][0]
    run(engine, [first, second])
    assert first.token_ids == second.token_ids == answer(10, 20, length=128)
    assert_nothing_is_held(engine)


def test_prompts_that_are_computed_with_something_else_share_nothing(engine, script):
    for seed in (b"a", b"b", b"a"):
        engine.submit([one := request(10, length=130, prefix_seed=seed)])
        run(engine, [one])
    assert [start for start, _ in script.prefills] == [0, 64, 128, 0, 64, 128, 128]


def test_without_the_option_prompts_are_computed_again(script):
    engine = engine_of(script, keeps_prefixes=False)
    for _ in range(2):
        engine.submit([one := request(10, length=130)])
        run(engine, [one])
    assert [start for start, _ in script.prefills] == [0, 64, 128] * 2
    assert_nothing_is_held(engine)


def test_a_request_that_waits_keeps_no_pages_from_those_that_run():
    """It found the beginning of its prompt, and has no room yet for the rest."""
    script = Script(rows=2, pages=4)
    engine = engine_of(script, host_bytes=10_000)
    engine.submit([seen := request(10, tokens=1, length=190)])
    run(engine, [seen])
    running, waiting = request(20, tokens=150, length=100), request(10, tokens=20, length=192)
    engine.submit([running])
    engine.step()
    engine.submit([waiting])
    run(engine, [running, waiting])
    assert running.token_ids == answer(20, 150, length=100)
    assert waiting.token_ids == answer(10, 20, length=192)
    # What it found in vain does not count.
    assert engine.scheduler.prefix_tokens <= 128
    assert_nothing_is_held(engine)


# --- whatever comes in between ---------------------------------------------------------------------------------------


def test_two_threads_each_get_their_own_answers(engine):
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


def assert_it_goes_on(engine: Engine, requests: Sequence[Request], expected: Sequence[list[int]]) -> None:
    """After an interrupt whoever waits for a request elsewhere is told, or served; and what comes later runs."""
    for one, all_of_it in zip(requests, expected, strict=True):
        if one in engine._requests:
            engine.run_until_ended(one)
        whole = one.finish_reason == "length"
        assert one.token_ids == (all_of_it if whole else all_of_it[: len(one.token_ids)])
    after = [request(first, length=66) for first in (30, 40, 50)]
    engine.submit(after)
    run(engine, after)
    assert [one.token_ids for one in after] == [answer(first, length=66) for first in (30, 40, 50)]
    assert_nothing_is_held(engine)


def test_an_interrupt_at_any_line_loses_no_row_no_page_and_no_request(engine):
    """Signals arrive between any two instructions, also between two that belong together."""
    line = 0
    while True:
        line += 1
        requests = [request(first) for first in (0, 10, 20)]

        def work(requests: list[Request] = requests) -> None:
            engine.submit(requests)
            run(engine, requests)

        if not interrupted_at(line, work, "novalm_jax/"):
            break
        assert_it_goes_on(engine, requests, [answer(0), answer(10), answer(20)])
    assert line > 100


@pytest.mark.parametrize("lines", [151, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_while_pages_are_shared_copied_and_moved_loses_none_of_them(lines):
    """At every so many lines: choices, a prompt that was seen before, and too few pages for all of them."""
    script = Script(rows=3, pages=5, pass_chunks=2)
    engine = engine_of(script, host_bytes=10_000)
    line, moved = 1, 0
    while True:
        leader = request(0, tokens=40, length=100)
        requests = [leader, request(0, tokens=40, length=100, leader=leader), request(10, tokens=70, length=60)]

        def work(requests: list[Request] = requests) -> None:
            engine.submit(requests)
            run(engine, requests)

        before = engine.scheduler.preemptions
        if not interrupted_at(line, work, "novalm_jax/"):
            break
        moved += engine.scheduler.preemptions > before
        assert_it_goes_on(engine, requests, [answer(0, 40, length=100)] * 2 + [answer(10, 70, length=60)])
        line += lines
    assert moved and script.copies and line > 10 * lines


def test_an_interrupt_of_work_on_spare_pages_loses_none_of_them():
    script = Script(pages=6)
    engine = engine_of(script, host_bytes=1000)
    line = 0
    while True:
        line += 1
        requests = [request(0, tokens=6, length=100), request(10, tokens=6, length=100)]
        engine.submit(requests)
        engine.step()

        def work() -> None:
            with engine.spare_pages(CONTEXT) as held:
                engine.scheduler.pages.grow(held, 0, CONTEXT)

        over = not interrupted_at(line, work, "novalm_jax/")
        assert_it_goes_on(engine, requests, [answer(0, 6, length=100), answer(10, 6, length=100)])
        if over:
            break
    assert line > 100


def test_an_interrupt_of_giving_up_loses_no_page(script, clock):
    script.pass_chunks = 3
    engine = engine_of(script)
    line = 0
    while True:
        line += 1
        running, *given_up = request(0, tokens=60), request(10, length=100), request(20)
        engine.submit([running])
        engine.step()
        engine.submit(given_up)
        engine.step()
        assert engine._pass is not None
        over = not interrupted_at(line, lambda given_up=given_up: engine.abort(given_up), "novalm_jax/")
        engine.abort([running])
        assert_it_goes_on(engine, given_up, [answer(10, length=100), answer(20)])
        if over:
            break
    assert line > 20


def test_waiting_for_a_request_that_was_never_submitted_is_an_error(engine):
    with pytest.raises(EngineError, match="unknown"):
        engine.run_until_ended(request(0))


def test_text_is_complete_before_the_end_is_seen(engine):
    """Another thread may look in between."""
    seen = []

    class Text:
        stopped = False

        def push(self, token: int) -> str:
            return ""

        def finish(self) -> str:
            seen.append(one.finish_reason)
            return "the rest"

    one = request(0, tokens=1)
    stream: Any = Text()
    one.text_stream = stream
    engine.submit([one])
    run(engine, [one])
    assert (seen, one.completion().text) == ([None], "the rest")
