"""The scheduler under a loop that works as the engine does, with values in place of keys: who runs, who waits, who
leaves, and that everybody reads what is its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_helpers import Contents, check_books, values_of
from novalm_jax.engine.request import Request
from novalm_jax.engine.sampling import ResolvedSampling
from novalm_jax.engine.scheduler import AGING, PATIENCE, Limits, Scheduler, Take
from novalm_jax.kv.paged import page_counts
from novalm_jax.kv.pages import PAGE, Pages, Reach, blocks

GREEDY = ResolvedSampling(seed=0, temperature=0.0)
FULL = Reach()
PLENTY = 1 << 40


class Loop:
    """Steps requests as the engine does, one part of a pass after the other."""

    def __init__(
        self,
        pages: int | Sequence[int] = 16,
        reaches: Sequence[Reach] = (FULL,),
        rows: int = 4,
        chunk: int = PAGE,
        pass_chunks: int = 1,
        host: int = 0,
        keeps_prefixes: bool = True,
        quantum: int = 0,
    ):
        counts = [pages] * len(reaches) if isinstance(pages, int) else list(pages)
        # Each group has another size, so that none is taken for another.
        sizes = tuple(range(1, len(reaches) + 1))
        self.limits = Limits(rows, chunk, pass_chunks, sizes, host, keeps_prefixes, quantum)
        self.pages = Pages(reaches, counts, 64)
        self.contents = Contents(self.pages)
        self.scheduler = Scheduler(self.pages, self.limits, self.contents)
        self.requests: list[Request] = []
        self.number = 0
        self.flying: list[Take] = []
        self.began: list[list[list[int]]] = []
        self.work = 0
        self.ended: list[Request] = []
        self.decoded: list[list[Request]] = []
        self.passes: list[list[Take]] = []

    def submit(self, *requests: Request) -> None:
        for request in requests:
            request.number, self.number = self.number, self.number + 1
        self.requests = [*self.requests, *requests]

    def abort(self, *requests: Request) -> None:
        for request in requests:
            request.finish("abort")
        self.release()

    def step(self, parts: int = 1000) -> None:
        """Places requests, goes on with so many parts of passes, and decodes."""
        self.release()
        self.scheduler.place(self.requests, self.busy)
        self.check()
        for _ in range(parts):
            if not self.advance():
                break
            self.release()
            if not self.flying:
                self.scheduler.place(self.requests, ())
            self.check()
        else:
            # A pass that decoding comes in between of.
            if not self.flying:
                self.begin_pass()
            self.check()
        self.decode()
        self.check()
        self.release()
        self.check()

    def run(self, *requests: Request) -> None:
        """Steps until these have ended, or all; somebody gets on all the time."""
        idle = 0
        while any(one.finish_reason is None for one in requests or self.requests):
            before = self.work
            self.step()
            idle = idle + 1 if self.work == before else 0
            assert idle < 4, "nobody gets on"

    def work_between(self, tokens: int) -> None:
        """Uses pages for something else, for which requests have to make room."""
        steps = 0
        while self.flying or not self.scheduler.make_room(tokens, self.requests):
            self.step()
            steps += 1
            assert steps < 2000
        held = self.pages.new()
        together = self.limits.chunk * self.limits.pass_chunks
        for start in range(0, tokens, together):
            values = [("other work", position) for position in range(start, min(start + together, tokens))]
            assert self.pages.grow(held, start, start + len(values)) == []
            self.contents.write(held, start, values)
        self.pages.free(held)

    def resize(self, counts: Sequence[int]) -> None:
        """So many pages of each group, between passes."""
        assert not self.flying
        self.scheduler.resize(counts, self.requests)
        self.contents.resize(counts)
        self.check()

    @property
    def busy(self) -> list[Request]:
        return [take.request for take in self.passes[-1]] if self.flying else []

    @property
    def placed(self) -> list[Request]:
        return [one for one in self.requests if one.row is not None]

    def advance(self) -> bool:
        """Goes on by a part of a pass, which begins if need be; False where there is none."""
        going_on = bool(self.flying) or self.begin_pass()
        if going_on:
            self.end_part()
        return going_on

    def begin_pass(self) -> bool:
        takes = self.scheduler.next_pass(self.requests)
        chunks = sum(-(-(take.end - take.start) // self.limits.chunk) for take in takes)
        assert chunks <= self.limits.pass_chunks
        assert len({take.request.number for take in takes}) == len(takes)
        for request, start, end in takes:
            assert request.row is not None and request.moved is None and request.leader is None
            assert request.computed == start < end <= len(request.prompt_ids)
            self.contents.check(request.held, start, self.values(request)[:start])
        for take in takes:
            self.write(take)
        self.flying = list(takes)
        self.passes += [takes] if takes else []
        self.began = [[list(table) for table in take.request.held.tables] for take in takes]
        return bool(takes)

    def end_part(self) -> None:
        """The first part that is left is through all layers; after the last one the pass has ended."""
        take, began = self.flying.pop(0), self.began.pop(0)
        request, start, end = take
        if request.finish_reason is None:
            assert request.held.tables == began
            # Layers are written one after the other.
            self.write(take)
            self.contents.check(request.held, start, self.values(request)[:end])
            self.work += end - start
            if end == len(request.prompt_ids):
                self.scheduler.computed(request, end)
                followers = [one for one in self.requests if one.leader is request and one.finish_reason is None]
                for one in [request, *(one for one in followers if self.scheduler.fork(request, one))]:
                    self.accept(one)
        if not self.flying:
            for request, _, end in self.passes[-1]:
                if request.held is not None and request.computed < end:
                    self.scheduler.computed(request, end)

    def decode(self) -> None:
        chosen = self.scheduler.next_decode(self.requests, self.busy)
        assert len({one.row for one in chosen}) == len(chosen)
        for one in chosen:
            assert one.row is not None and one.moved is None and one.token_ids and one.finish_reason is None
            self.contents.write(one.held, one.length - 1, self.values(one)[-1:])
        for one in chosen:
            self.contents.check(one.held, one.length - 1, self.values(one))
        for one in chosen:
            self.accept(one)
        self.work += len(chosen)
        self.decoded += [chosen] if chosen else []

    def accept(self, request: Request) -> None:
        # Another token for each request, so that followers differ at once.
        request.accept(1_000_000 + 1000 * request.number + len(request.token_ids), None)

    def release(self) -> None:
        for request in self.requests:
            if request.finish_reason is not None:
                self.scheduler.release(request)
                self.ended.append(request)
        self.requests = [one for one in self.requests if one.finish_reason is None]
        if self.flying and all(take.request.finish_reason is not None for take in self.passes[-1]):
            self.flying, self.began = [], []

    def write(self, take: Take) -> None:
        request, start, end = take
        self.contents.write(request.held, start, self.values(request)[start:end])

    def values(self, request: Request) -> list[int]:
        return values_of([*request.prompt_ids, *request.token_ids], request.prefix_seed)

    def check(self) -> None:
        """Books and limits, at any time."""
        rows = [one.row for one in self.placed]
        assert len(set(rows)) == len(rows) <= self.limits.rows
        assert all(0 <= row < self.limits.rows for row in rows if row is not None)
        check_books(self.pages, [one.held for one in self.requests])
        moved = [one for one in self.requests if one.moved is not None]
        assert all(one.row is None and not any(one.held.count()) for one in moved)
        assert self.scheduler.host_bytes == sum(one.moved.nbytes for one in moved if one.moved)
        assert self.scheduler.host_bytes <= self.limits.host_bytes
        # Who waits without a row keeps nobody from running.
        assert not any(any(one.held.count()) for one in self.requests if one.row is None and one.held is not None)

    def check_empty(self) -> None:
        """Nothing is left of anybody."""
        assert not self.requests and not self.flying and self.scheduler.host_bytes == 0
        assert all(pool.available == pool.count for pool in self.pages.pools)
        for one in self.ended:
            assert one.row is None and one.held is None and one.moved is None
        # Nor of what was remembered, once others need the pages.
        for pool in self.pages.pools:
            for page in [pool.take() for _ in range(pool.available)]:
                pool.give_back(page)
        assert len(self.scheduler.index) == 0


STRANGERS = count(1)


def ask(length: int, tokens: int = 3, first: int | None = None, **fields: Any) -> Request:
    """A request with a prompt that begins with `first`, or like no other one."""
    begin = 10_000 * next(STRANGERS) if first is None else first
    return Request(range(begin, begin + length), GREEDY, tokens, frozenset(), **fields)


def choices(number: int, length: int, tokens: int = 3, **fields: Any) -> list[Request]:
    """Several completions of one prompt."""
    leader = ask(length, tokens, **fields)
    fields["first"] = leader.prompt_ids[0]
    return [leader, *(ask(length, tokens, leader=leader, **fields) for _ in range(number - 1))]


def run_together(loop: Loop, *requests: Request, steps: int = 1) -> None:
    """Submits requests and steps until all of them decode."""
    loop.submit(*requests)
    for _ in range(steps):
        loop.step()
    assert all(one.token_ids and one.row is not None for one in requests)


# Rows and passes


def test_requests_get_rows_in_the_order_of_their_arrival():
    loop = Loop(rows=2)
    requests = [ask(10, 5) for _ in range(5)]
    loop.submit(*requests)
    began: list[Request] = []
    while loop.requests:
        loop.step()
        began += [one for one in requests if one.token_ids and one not in began]
    assert began == requests
    assert max(map(len, loop.decoded)) == 2
    loop.check_empty()


def test_a_prompt_goes_through_in_parts_of_a_chunk():
    loop = Loop(chunk=PAGE, pass_chunks=1)
    one = ask(150)
    loop.submit(one)
    loop.run()
    assert [(take.start, take.end) for takes in loop.passes for take in takes] == [(0, 64), (64, 128), (128, 150)]


def test_prompts_share_a_pass_up_to_its_chunks():
    loop = Loop(chunk=PAGE, pass_chunks=3)
    short, long, last = ask(10), ask(200), ask(10)
    loop.submit(short, long, last)
    loop.run()
    assert [[(take.request, take.start, take.end) for take in takes] for takes in loop.passes] == [
        [(short, 0, 10), (long, 0, 128)],
        [(last, 0, 10), (long, 128, 200)],
    ]


def test_a_short_prompt_does_not_wait_for_long_ones_to_be_through():
    loop = Loop(pages=64, rows=4)
    long = [ask(10 * PAGE) for _ in range(3)]
    loop.submit(*long)
    for _ in range(5):
        loop.step(parts=1)
    short = ask(10)
    loop.submit(short)
    loop.step(parts=2)
    assert short.token_ids and not any(one.token_ids for one in long)


def test_long_prompts_that_keep_coming_do_not_starve_a_short_one():
    loop = Loop(pages=30, rows=2)
    loop.submit(ask(9 * PAGE), ask(9 * PAGE), short := ask(10))
    while not short.token_ids:
        loop.submit(ask(9 * PAGE))
        loop.step(parts=1)
        assert len(loop.passes) < 25


def test_short_prompts_that_keep_coming_do_not_starve_a_long_one():
    # Each of them had fewer passes than the long one.
    loop = Loop(pages=30, rows=2)
    loop.submit(long := ask(9 * PAGE))
    while not long.token_ids:
        loop.submit(ask(10, 1), ask(10, 1))
        loop.step(parts=1)
        assert len(loop.passes) < 3 * AGING
    assert long.passes == 9


def test_a_prompt_that_had_to_leave_is_not_in_the_same_pass():
    loop = Loop(pages=6, rows=2, pass_chunks=2, host=PLENTY)
    loop.submit(first := ask(3 * PAGE), second := ask(3 * PAGE))
    taken = []
    for _ in range(3):
        loop.scheduler.place(loop.requests, ())
        loop.begin_pass()
        while loop.flying:
            loop.end_part()
        if second.passes and not taken:
            taken = [loop.pages.pools[0].take() for _ in range(2)]
    # The third part of the first one took a page of the second, which was to come after it.
    assert [[take.request for take in takes] for takes in loop.passes] == [[first], [second], [first]]
    assert second.moved is not None and second.row is None and second.computed == 2 * PAGE
    for page in taken:
        loop.pages.pools[0].give_back(page)
    loop.run()
    loop.check_empty()


def test_who_is_in_a_pass_does_not_leave_for_another_one_in_it():
    loop = Loop(pages=6, pass_chunks=2, host=PLENTY)
    loop.submit(first := ask(5 * PAGE))
    loop.scheduler.place(loop.requests, ())
    loop.begin_pass()
    loop.end_part()
    loop.submit(second := ask(10))
    loop.scheduler.place(loop.requests, ())
    for _ in range(3):
        loop.pages.pools[0].take()
    # It comes first, as it had no pass yet, and takes the last page.
    assert [take.request for take in loop.scheduler.next_pass(loop.requests)] == [second]
    assert second.row is not None and second.moved is None and first.moved is not None


def test_who_goes_on_does_not_grow_more_urgent():
    loop = Loop(pages=60)
    run_together(loop, running := ask(10, 100))
    loop.submit(*(group := choices(2, 20 * PAGE)))
    loop.step(parts=1)
    before = [one.waited for one in (running, *group)]
    for _ in range(15):
        loop.step(parts=1)
        # A pass that takes longer than a step.
        loop.step(parts=0)
    assert not group[0].token_ids and [one.waited for one in (running, *group)] == before


def test_whose_prompt_waits_for_its_next_pass_leaves_before_one_that_decodes():
    # It was used longest ago, though it came first.
    loop = Loop(rows=2, host=PLENTY)
    loop.submit(prompt := ask(9 * PAGE))
    loop.step(parts=1)
    loop.submit(running := ask(10, 50))
    while loop.flying or not running.token_ids:
        loop.scheduler.place(loop.requests, loop.busy)
        loop.advance()
    loop.submit(ask(10, priority=1))
    loop.scheduler.place(loop.requests, ())
    assert prompt.moved is not None and running.row is not None
    loop.run()


def test_prompts_that_begin_alike_and_come_together_share_what_is_computed_by_then():
    loop = Loop()
    loop.submit(ask(3 * PAGE, first=0), ask(3 * PAGE, first=0))
    loop.run()
    assert loop.scheduler.prefix_tokens == PAGE
    loop.check_empty()


def test_with_a_quantum_one_half_decodes_before_the_other_does():
    loop = Loop(pages=16, rows=5, quantum=3)
    requests = [ask(5, 40) for _ in range(5)]
    run_together(loop, *requests)
    loop.decoded.clear()
    for _ in range(12):
        loop.step()
    turns = [frozenset(one.number for one in chosen) for chosen in loop.decoded]
    assert {len(turn) for turn in turns} == {3}
    changes = [at for at in range(1, 12) if turns[at] != turns[at - 1]]
    assert all(later - earlier == 3 for earlier, later in pairwise(changes)) and len(changes) >= 3
    # Who had no turn has the next one.
    for at in changes:
        assert frozenset(range(5)) - turns[at - 1] <= turns[at]
    # Whose half has ended does not keep the others waiting.
    loop.abort(*(one for one in requests if one.number in turns[-1]))
    loop.decoded.clear()
    loop.step()
    assert loop.decoded and not any(one.number in turns[-1] for one in loop.decoded[0])
    loop.run()
    loop.check_empty()


# Priority


def test_what_is_urgent_comes_first():
    loop = Loop(rows=1)
    requests = [ask(10, priority=priority) for priority in (0, 2, 1, 2)]
    loop.submit(*requests)
    began: list[int] = []
    while loop.requests:
        loop.step()
        began += [one.number for one in requests if one.token_ids and one.number not in began]
    assert began == [1, 3, 2, 0]


@pytest.mark.parametrize(("pages", "rows"), [(4, 4), (20, 1)])
def test_for_an_urgent_one_another_leaves_and_comes_back(pages, rows):
    # It needs the pages in one case, the row in the other.
    loop = Loop(pages, rows=rows, host=PLENTY)
    run_together(loop, slow := ask(3 * PAGE + 3, 20))
    loop.submit(urgent := ask(2 * PAGE + 3, 20, priority=1))
    loop.step()
    assert urgent.token_ids and slow.moved is not None and slow.row is None
    length = slow.length
    loop.run(urgent)
    assert slow.length == length and loop.scheduler.preemptions == 1
    loop.run()
    assert len(slow.token_ids) == 20 and loop.scheduler.bytes_out == 4
    loop.check_empty()


def test_without_host_memory_an_urgent_one_waits():
    loop = Loop(pages=4, host=0)
    run_together(loop, slow := ask(2 * PAGE, 20))
    loop.submit(urgent := ask(2 * PAGE, 20, priority=1))
    loop.run(slow)
    assert not urgent.token_ids
    loop.run(urgent)
    assert loop.scheduler.preemptions == 0


@pytest.mark.parametrize("length", [10, 3 * PAGE])
def test_a_request_that_has_not_begun_gives_its_row_away_without_host_memory(length):
    # The longer one has pages already, which are nobody's loss.
    loop = Loop(rows=1, host=0)
    loop.submit(ask(3 * PAGE, 1, first=0))
    loop.run()
    loop.submit(slow := ask(length, first=0))
    loop.scheduler.place(loop.requests, ())
    assert slow.row is not None and slow.held.count() == [length // PAGE]
    loop.submit(urgent := ask(10, priority=1))
    loop.run(urgent)
    assert not slow.token_ids and loop.scheduler.preemptions == 0
    loop.run()
    assert loop.scheduler.prefix_tokens == max(0, length // PAGE * PAGE - 1)


def test_an_urgent_one_waits_for_a_pass_to_end():
    # Its pages are written by then.
    loop = Loop(rows=1, host=PLENTY)
    loop.submit(slow := ask(2 * PAGE))
    loop.step(parts=0)
    loop.submit(urgent := ask(10, priority=1))
    loop.step(parts=0)
    assert slow.row is not None and urgent.row is None
    loop.step(parts=1)
    assert slow.moved is not None and urgent.row is not None
    loop.run()
    loop.check_empty()


def test_one_that_waited_for_long_does_not_leave_for_an_urgent_one():
    loop = Loop(pages=4, host=PLENTY)
    slow = ask(2 * PAGE, 9)
    slow.waited = AGING
    run_together(loop, slow)
    loop.submit(urgent := ask(2 * PAGE, 9, priority=1))
    loop.run(slow)
    assert not urgent.token_ids and loop.scheduler.preemptions == 0
    loop.run()


def test_nobody_leaves_for_one_that_cannot_run_then_either():
    # Nine pages: the urgent one that runs keeps five of them, and another one needs five.
    loop = Loop(pages=9, host=PLENTY)
    run_together(loop, ask(4 * PAGE + 1, 50, priority=1), slow := ask(2 * PAGE, 50))
    loop.submit(ask(4 * PAGE + 1, 5, priority=1))
    for _ in range(10):
        loop.step()
    assert slow.row is not None and loop.scheduler.preemptions == 0
    loop.run()


def test_pages_that_others_share_do_not_count_as_free_when_one_leaves():
    # The second shares all but its last page with the first, which stays.
    loop = Loop(pages=7, host=PLENTY)
    run_together(loop, ask(4 * PAGE + 1, 60, first=0, priority=1), slow := ask(4 * PAGE + 1, 60, first=0))
    loop.submit(ask(3 * PAGE, 5, priority=1))
    for _ in range(10):
        loop.step()
    assert slow.row is not None and loop.scheduler.preemptions == 0
    loop.run()


def test_urgent_requests_that_keep_coming_do_not_starve_others():
    loop = Loop(rows=1, host=PLENTY)
    loop.submit(slow := ask(10, 5))
    steps = 0
    while slow.finish_reason is None:
        loop.submit(ask(10, 2, priority=1))
        loop.step()
        steps += 1
        assert steps < 2 * AGING


# Room


def test_one_that_does_not_fit_yet_lets_others_pass_and_runs_in_the_end():
    loop = Loop(pages=8, rows=4)
    run_together(loop, ask(PAGE, 100))
    loop.submit(large := ask(7 * PAGE, 5), *[ask(10, 50) for _ in range(3)])
    loop.step()
    assert large.row is None and len(loop.placed) == 4
    loop.run(large)
    loop.run()
    loop.check_empty()


@pytest.mark.parametrize("host", [0, PLENTY])
def test_small_requests_that_keep_coming_do_not_starve_a_large_one(host):
    loop = Loop(pages=8, rows=4, host=host)
    loop.submit(ask(PAGE, 40), large := ask(6 * PAGE, 64))
    steps = 0
    while large.finish_reason is None:
        loop.submit(ask(PAGE, 20))
        loop.step()
        steps += 1
        assert steps < 2 * PATIENCE


def test_requests_that_cannot_all_run_to_their_ends_do_not_run_together():
    # Without host memory nobody could leave when pages run out.
    loop = Loop(pages=5, host=0)
    loop.submit(*[ask(60, 70) for _ in range(4)])
    loop.run()
    assert max(map(len, loop.decoded)) == 1
    assert loop.scheduler.preemptions == 0
    loop.check_empty()


def test_with_host_memory_more_run_than_pages_could_ever_hold():
    loop = Loop(pages=7, host=PLENTY)
    requests = [ask(60, 150) for _ in range(4)]
    loop.submit(*requests)
    loop.run()
    assert max(map(len, loop.decoded)) == 4
    assert loop.scheduler.preemptions > 0
    assert all(len(one.token_ids) == 150 for one in requests)
    loop.check_empty()


def test_where_pages_run_out_the_last_in_rank_leaves():
    loop = Loop(pages=3, host=PLENTY)
    run_together(loop, first := ask(PAGE - 1, 9), second := ask(PAGE - 1, 9))
    loop.step()
    # Both needed another page, and there was one.
    assert (len(first.token_ids), first.row is None) == (3, False)
    assert (len(second.token_ids), second.row) == (2, None) and second.moved is not None
    loop.run(first)
    assert len(second.token_ids) == 2
    loop.run()
    loop.check_empty()


def test_who_has_no_pages_does_not_leave_for_the_want_of_them():
    loop = Loop(pages=5, host=PLENTY)
    run_together(loop, first := ask(PAGE - 1, 9), second := ask(PAGE - 1, 9))
    loop.submit(third := ask(10))
    loop.scheduler.place(loop.requests, ())
    for _ in range(3):
        loop.pages.pools[0].take()
    assert loop.scheduler.next_decode(loop.requests, ()) == [first]
    assert second.moved is not None and third.row is not None


def test_with_pages_for_all_rows_nobody_waits_for_pages():
    # Though those that run have all but one page of theirs, and each page that is left is needed by one of them.
    loop = Loop(pages=12, rows=3, host=0)
    run_together(loop, *[ask(3 * PAGE + 9, 30) for _ in range(2)])
    loop.submit(last := ask(3 * PAGE + 9, 30))
    loop.step()
    assert last.token_ids
    loop.run()


def test_of_two_that_cannot_both_leave_only_one_runs():
    # The host has room for the small one, which is no help once the large one has to leave.
    loop = Loop(pages=6, host=3)
    run_together(loop, small := ask(10, 150))
    loop.submit(large := ask(4 * PAGE - 6, 2 * PAGE))
    loop.step()
    assert large.row is None
    loop.run(small)
    loop.run()
    loop.check_empty()


def test_two_long_prompts_for_whose_passes_pages_do_not_suffice_go_one_after_the_other():
    # Between passes both would hold little, and then neither could go on.
    loop = Loop(pages=11, reaches=[Reach(window=100)], pass_chunks=8, host=0)
    first, second = ask(20 * PAGE), ask(20 * PAGE)
    loop.submit(first, second)
    loop.run(first)
    assert not second.passes
    loop.run()
    loop.check_empty()


def test_one_that_a_pass_leaves_no_page_for_waits_for_its_end():
    # Prompts of one pass took what it will have again after that; the host has no room for it.
    loop = Loop(pages=14, reaches=[Reach(window=100)], pass_chunks=16, host=1)
    loop.submit(one := ask(60, 300))
    while one.length < 3 * PAGE + 1:
        loop.step()
    loop.submit(ask(8 * PAGE - 5, 5), ask(4 * PAGE - 5, 5))
    loop.step(parts=0)
    assert len(loop.flying) == 2 and loop.pages.pools[0].available == 0
    assert one.length == 3 * PAGE + 1 and one.row is not None
    loop.step()
    assert one.length == 3 * PAGE + 2 and loop.scheduler.preemptions == 0
    loop.run()
    loop.check_empty()


def test_those_that_were_moved_out_come_back_before_one_that_waits_for_all_pages():
    # It could never run beside them, however long it has waited.
    loop = Loop(pages=6, host=4)
    loop.submit(ask(60, 150), second := ask(60, 150))
    while second.moved is None:
        loop.step()
    large = ask(5 * PAGE, 10)
    large.waited = PATIENCE + 1
    loop.submit(large)
    loop.run()
    loop.check_empty()


def test_host_memory_is_never_exceeded():
    # Room for all but one of them, and not a byte more.
    loop = Loop(pages=5, reaches=[FULL, Reach(window=PAGE)], host=2 * (4 + 2 * 3))
    loop.submit(*[ask(60, 150) for _ in range(3)])
    loop.run()
    assert loop.scheduler.preemptions > 0 and max(map(len, loop.decoded)) == 3
    loop.check_empty()


def test_a_waiting_request_keeps_no_pages_from_those_that_run():
    # Its beginning is in the pages that the other one comes to need.
    loop = Loop(pages=6, host=PLENTY)
    loop.submit(ask(3 * PAGE, 1, first=0))
    loop.run()
    run_together(loop, first := ask(2 * PAGE, 3 * PAGE))
    loop.submit(again := ask(3 * PAGE + 1, 1, first=0))
    loop.step()
    assert first.row is not None and again.row is None
    assert loop.pages.pools[0].in_use == 3
    loop.run(first)
    loop.run()
    loop.check_empty()


def test_what_is_looked_up_in_vain_is_found_later_and_counted_once():
    loop = Loop(pages=5, host=PLENTY)
    loop.submit(ask(2 * PAGE, 1, first=0))
    loop.run()
    run_together(loop, other := ask(2 * PAGE, PAGE))
    loop.submit(again := ask(3 * PAGE, 60, first=0))
    loop.run(other)
    assert not again.passes
    loop.run(again)
    assert loop.scheduler.prefix_tokens == 2 * PAGE
    assert [(take.start, take.end) for take in loop.passes[-1]] == [(2 * PAGE, 3 * PAGE)]


@pytest.mark.parametrize("keeps_prefixes", [True, False])
def test_prompts_that_begin_alike_share_pages_where_that_is_wanted(keeps_prefixes):
    loop = Loop(keeps_prefixes=keeps_prefixes)
    run_together(loop, ask(3 * PAGE, 9, first=0))
    run_together(loop, ask(3 * PAGE, 9, first=0))
    run_together(loop, ask(3 * PAGE, 9, first=0, prefix_seed=b"another model"))
    assert loop.scheduler.prefix_tokens == (3 * PAGE - 1 if keeps_prefixes else 0)
    assert loop.pages.pools[0].in_use == (2 + 2 + 2 + 4 if keeps_prefixes else 12)
    loop.run()
    loop.check_empty()


def test_windowed_layers_with_pages_for_all_rows_run_all_rows():
    # As many as the device is given for them: one prompt grows by a pass, and then lets go of what it saw in it.
    reaches, rows, length = [FULL, Reach(window=2 * PAGE), Reach(chunk=3 * PAGE)], 4, 20 * PAGE
    pages = page_counts(reaches, rows, length, rows * blocks(length), together=4 * PAGE)
    loop = Loop(pages, reaches, rows, pass_chunks=4, host=0)
    requests = [ask(length - 70, 70) for _ in range(rows)]
    loop.submit(*requests)
    loop.step()
    assert all(one.row is not None for one in requests)
    loop.run()
    assert max(map(len, loop.decoded)) == rows and loop.scheduler.preemptions == 0
    loop.check_empty()


def test_after_a_pass_a_window_holds_no_more_than_it_sees():
    loop = Loop(reaches=[Reach(window=PAGE)], pass_chunks=8)
    loop.submit(ask(8 * PAGE + 1))
    assert loop.begin_pass() is False
    loop.scheduler.place(loop.requests, ())
    loop.begin_pass()
    assert loop.pages.pools[0].in_use == 8
    loop.end_part()
    assert loop.pages.pools[0].in_use == 1
    loop.run()


def test_whether_a_request_can_ever_run_is_known():
    loop = Loop([4, 3], [FULL, Reach(window=PAGE)])
    assert loop.scheduler.fits(4 * PAGE) and not loop.scheduler.fits(4 * PAGE + 1)
    assert not Loop([4, 2], [FULL, Reach(window=PAGE)]).scheduler.fits(4 * PAGE)


def test_room_is_made_for_other_work():
    loop = Loop(pages=8, host=PLENTY)
    run_together(loop, ask(PAGE, 20), last := ask(2 * PAGE, 20))
    loop.work_between(6 * PAGE)
    # One has left, and that is enough.
    assert loop.scheduler.preemptions == 1 and last.moved is not None and len(loop.placed) == 1
    loop.run()
    loop.check_empty()


@pytest.mark.parametrize("host", [0, 2])
def test_where_no_room_can_be_made_nobody_moves(host):
    loop = Loop(pages=8, host=host)
    run_together(loop, one := ask(3 * PAGE, 5), ask(10, 5))
    assert not loop.scheduler.make_room(8 * PAGE, loop.requests)
    assert loop.scheduler.preemptions == 0 and len(loop.placed) == 2
    loop.run(one)
    loop.run()
    assert loop.scheduler.make_room(8 * PAGE, loop.requests)


def test_after_a_reset_nothing_is_known_of_old_pages():
    loop = Loop()
    run_together(loop, one := ask(3 * PAGE, 1000, first=0))
    one.row = one.held = one.moved = None
    loop.requests = []
    loop.scheduler.reset(Pages([FULL], [5], 64))
    loop.pages = loop.contents.pages = loop.scheduler.pages
    loop.submit(ask(3 * PAGE, 5, first=0))
    loop.run()
    assert loop.scheduler.prefix_tokens == 0
    loop.check_empty()


def test_what_is_wanted_is_what_those_that_run_together_come_to_need():
    loop = Loop([20, 20], [FULL, Reach(window=PAGE)], rows=2, chunk=2 * PAGE)
    assert loop.scheduler.wanted([]) == [0, 0]
    small, large = ask(PAGE, PAGE), ask(5 * PAGE, 5 * PAGE, priority=1)
    assert loop.scheduler.wanted([small]) == [2, 2]
    # A window sees two pages at most while it grows by a chunk of two, which begins anywhere.
    assert loop.scheduler.wanted([small, small, large]) == [12, 2 + 4]
    assert loop.scheduler.wanted([small], spare=3 * PAGE) == [5, 2 + 3]
    run_together(loop, small, ask(10, 10))
    small.finish("abort")
    assert loop.scheduler.wanted([small])[0] >= loop.pages.pools[0].in_use


def test_requests_go_on_with_other_pages():
    loop = Loop(pages=12, rows=3)
    gone, *stay = ask(3 * PAGE, 30), ask(2 * PAGE, 70, first=0), ask(2 * PAGE, 70, first=0)
    for one in (gone, *stay):
        run_together(loop, one)
    loop.abort(gone)
    loop.resize(loop.scheduler.wanted(loop.requests))
    assert loop.pages.pools[0].count == 8 and loop.scheduler.preemptions == 0
    loop.step()
    loop.resize([16])
    again = ask(2 * PAGE + 5, first=0)
    loop.submit(again)
    loop.run()
    # Two shared the pages of their prompt, and the third found them after all that.
    assert loop.scheduler.prefix_tokens == 2 * PAGE - 1 + 2 * PAGE
    assert all(len(one.token_ids) == 70 for one in stay)
    loop.check_empty()


# Several completions of a prompt


def test_choices_share_the_pages_of_their_prompt_until_they_differ():
    loop = Loop(rows=4)
    group = choices(4, 2 * PAGE + 10, 60)
    loop.submit(*group)
    loop.scheduler.place(loop.requests, ())
    while not group[0].token_ids:
        loop.advance()
    assert loop.pages.pools[0].in_use == 3
    assert [len(one.token_ids) for one in group] == [1] * 4
    assert len({one.used for one in group}) == 1
    loop.run()
    # The prompt was computed once, two pages stay common, and each has its own after that.
    assert sum(len(takes) for takes in loop.passes) == 3
    assert all(len(one.token_ids) == 60 for one in group)
    loop.check_empty()


def test_of_a_prompt_that_ends_with_its_page_nothing_is_copied():
    loop = Loop(rows=3)
    group = choices(3, 2 * PAGE, 9)
    run_together(loop, *group)
    assert loop.pages.pools[0].in_use == 2 + 3
    loop.run()
    loop.check_empty()


@pytest.mark.parametrize("keeps_prefixes", [True, False])
def test_choices_go_on_without_a_leader_that_is_aborted(keeps_prefixes):
    loop = Loop(rows=4, keeps_prefixes=keeps_prefixes)
    leader, *followers = choices(3, 3 * PAGE, 9)
    loop.submit(leader, *followers)
    loop.step(parts=1)
    assert leader.passes and not leader.token_ids
    loop.abort(leader)
    loop.run()
    assert all(len(one.token_ids) == 9 for one in followers)
    loop.check_empty()


def test_choices_outlive_a_leader_that_ends_first():
    loop = Loop(rows=3)
    leader, *followers = choices(3, PAGE + 5, 70)
    leader.max_tokens = 1
    loop.submit(leader, *followers)
    loop.step()
    assert leader.finish_reason == "length"
    assert [len(one.token_ids) for one in followers] == [2, 2]
    loop.run()
    loop.check_empty()


def test_choices_wait_for_a_leader_that_is_moved_out():
    loop = Loop(pages=12, rows=4, host=PLENTY)
    leader, *followers = choices(3, 5 * PAGE, 9)
    loop.submit(leader, *followers)
    loop.step(parts=1)
    loop.submit(urgent := ask(8 * PAGE, 9, priority=1))
    loop.end_part()
    while loop.flying:
        loop.end_part()
    loop.scheduler.place(loop.requests, ())
    assert leader.moved is not None and urgent.row is not None
    for _ in range(2):
        # Rows are of no use to them without it.
        assert all(one.row is None and one.leader is leader for one in followers)
        loop.scheduler.place(loop.requests, ())
    loop.run(urgent)
    loop.run()
    # What was computed of the prompt came back.
    assert sum(take.end - take.start for takes in loop.passes for take in takes) == 5 * PAGE + 8 * PAGE
    assert all(len(one.token_ids) == 9 for one in [leader, *followers])
    loop.check_empty()


@pytest.mark.parametrize("keeps_prefixes", [True, False])
def test_choices_beyond_the_rows_run_on_their_own_later(keeps_prefixes):
    loop = Loop(rows=2, keeps_prefixes=keeps_prefixes)
    group = choices(5, PAGE + 5, 9)
    loop.submit(*group)
    loop.run()
    assert all(len(one.token_ids) == 9 for one in group)
    assert loop.scheduler.prefix_tokens == (3 * PAGE if keeps_prefixes else 0)
    loop.check_empty()


def test_a_choice_that_comes_when_its_leader_runs_does_not_wait_for_its_end():
    loop = Loop()
    run_together(loop, leader := ask(PAGE + 5, 50, first=0))
    loop.submit(late := ask(PAGE + 5, 9, first=0, leader=leader))
    loop.run(late)
    assert leader.finish_reason is None and loop.scheduler.prefix_tokens == PAGE
    loop.run()
    loop.check_empty()


# Ends


@pytest.mark.parametrize("state", ["waiting", "placed", "on its way", "running", "moved out"])
def test_an_aborted_request_leaves_nothing_behind(state):
    loop = Loop(pages=4, rows=1, host=PLENTY)
    one = ask(100, 50)
    if state == "waiting":
        loop.submit(other := ask(10, 50))
        loop.step()
    loop.submit(one)
    loop.scheduler.place(loop.requests, ())
    if state not in ("waiting", "placed"):
        loop.begin_pass()
    if state in ("running", "moved out"):
        loop.step()
    if state == "moved out":
        loop.submit(other := ask(10, 5, priority=1))
        loop.step()
        assert one.moved is not None and loop.scheduler.host_bytes == 2
    loop.abort(one)
    assert one.row is None and one.held is None and one.moved is None and loop.scheduler.host_bytes == 0
    if state in ("waiting", "moved out"):
        assert other.row is not None
        loop.abort(other)
    loop.check_empty()


def test_what_an_aborted_prompt_leaves_goes_to_others_while_the_pass_goes_on():
    loop = Loop(pages=6, rows=3, pass_chunks=4, host=0)
    gone, stays = ask(2 * PAGE, 1), ask(2 * PAGE, 1)
    loop.submit(gone, stays)
    loop.step(parts=0)
    assert [take.request for take in loop.flying] == [gone, stays]
    loop.abort(gone)
    assert loop.pages.pools[0].in_use == 2
    loop.submit(ask(3 * PAGE, 5))
    loop.run()
    loop.check_empty()


REACHES = [
    [FULL],
    [FULL, Reach(window=PAGE)],
    [Reach(window=100)],
    [FULL, Reach(chunk=2 * PAGE), Reach(window=10)],
]

ARRIVALS = st.tuples(
    st.integers(0, 12),  # the step
    st.integers(1, 300),  # tokens of the prompt
    st.integers(1, 90),  # of the output
    st.sampled_from([None, 0, 0, 100]),  # how it begins
    st.sampled_from([0, 0, 0, 1, 2]),  # priority
    st.sampled_from([1, 1, 1, 2, 3]),  # choices
    st.sampled_from([None, None, None, 0, 1, 4, 30]),  # steps until it is aborted
    st.booleans(),  # with its followers
)


@settings(deadline=None, max_examples=80)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=8),
    reaches=st.sampled_from(REACHES),
    pages=st.integers(3, 20),
    rows=st.integers(1, 4),
    chunk=st.sampled_from([PAGE, 2 * PAGE]),
    pass_chunks=st.integers(1, 3),
    host=st.sampled_from([0, 0, 5, 12, PLENTY]),
    keeps_prefixes=st.booleans(),
    quantum=st.sampled_from([0, 0, 1, 3]),
    parts=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    other_work=st.none() | st.tuples(st.integers(0, 20), st.integers(1, 500)),
    resizes=st.lists(st.none() | st.integers(0, 20), min_size=1, max_size=4),
)
def test_everybody_ends_and_reads_its_own(
    arrivals, reaches, pages, rows, chunk, pass_chunks, host, keeps_prefixes, quantum, parts, other_work, resizes
):
    loop = Loop(pages, reaches, rows, chunk, pass_chunks, host, keeps_prefixes, quantum)
    groups = [
        (step, leaves, many, choices(number, length, tokens, first=first, priority=priority))
        for step, length, tokens, first, priority, number, leaves, many in arrivals
        if loop.scheduler.fits(length + tokens)
    ]
    everybody = [one for *_, group in groups for one in group]
    step = idle = 0
    while any(one.finish_reason is None for one in everybody):
        for begins, leaves, many, group in groups:
            if begins == step:
                loop.submit(*group)
            if leaves is not None and begins + leaves == step:
                loop.abort(*(group if many else group[:1]))
        if (size := resizes[step % len(resizes)]) is not None and not loop.flying:
            wanted = loop.scheduler.wanted(loop.requests)
            loop.resize([min(pages, max(size, need)) for need in wanted])
        if other_work and other_work[0] == step and loop.scheduler.fits(other_work[1]):
            loop.work_between(other_work[1])
        before = loop.work
        # Parts of a pass come to an end now and then at least.
        loop.step(parts[step % len(parts)] if step % 3 else 4)
        idle = idle + 1 if loop.work == before and loop.requests else 0
        assert idle < 6, "nobody gets on"
        step += 1
    loop.check_empty()
    # Nothing was computed twice.
    assert loop.work <= sum(len(one.prompt_ids) + one.max_tokens for one in everybody)
    assert all(one.finish_reason == "abort" or len(one.token_ids) == one.max_tokens for one in everybody)
    if not host:
        assert loop.scheduler.preemptions == 0
