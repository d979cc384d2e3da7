"""Who holds which page: pools, sequences that grow, share and leave, and what they read back."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_helpers import Contents, check_books
from novalm_jax.errors import PageError
from novalm_jax.kv.pages import NONE, PAGE, Copy, Held, Moved, PagePool, Pages, Reach, blocks

FULL = Reach()


def forgetful(pool: PagePool) -> list[int]:
    """Writes down which pages a pool forgets."""
    forgotten: list[int] = []
    pool.forget = forgotten.append
    return forgotten


# Reach


@pytest.mark.parametrize(
    ("reach", "firsts"),
    [
        (Reach(), [0, 0, 0, 0, 0, 0, 0, 0]),
        (Reach(window=3), [0, 0, 0, 1, 2, 3, 4, 5]),
        (Reach(chunk=3), [0, 0, 0, 3, 3, 3, 6, 6]),
        (Reach(window=2, chunk=3), [0, 0, 1, 3, 3, 4, 6, 6]),
    ],
)
def test_a_position_sees_its_window_and_its_chunk(reach, firsts):
    assert [reach.first(position) for position in range(8)] == firsts


@settings(deadline=None)
@given(
    reach=st.builds(Reach, window=st.none() | st.integers(1, 3 * PAGE), chunk=st.none() | st.integers(1, 3 * PAGE)),
    start=st.integers(0, 3 * PAGE),
    steps=st.lists(st.integers(1, 2 * PAGE), min_size=1, max_size=6),
)
def test_a_sequence_never_holds_more_blocks_than_announced(reach, start, steps):
    pages = Pages([reach], [40], 40)
    held, end = pages.new(), start + sum(steps)
    for position in range(0, start, PAGE):
        pages.grow(held, position, min(position + PAGE, start))
    for step in steps:
        pages.grow(held, start, start + step)
        start += step
        if step == max(steps):
            assert held.count()[0] <= reach.most_blocks(end, step)
        pages.trim(held, start)
        assert held.count()[0] <= reach.most_blocks(end, 1)


# The pool of a group


def test_pages_are_given_away_until_none_is_left():
    pool = PagePool(3)
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
    assert (pool.available, pool.in_use) == (0, 3)
    with pytest.raises(PageError, match="All 3 pages are in use"):
        pool.take()
    pool.give_back(1)
    assert (pool.available, pool.take(), pool.users(1)) == (1, 1, 1)


def test_a_page_is_in_use_until_its_last_user_gives_it_back():
    pool = PagePool(1)
    page = pool.take()
    pool.share(page)
    assert pool.users(page) == 2
    pool.give_back(page)
    assert (pool.users(page), pool.available) == (1, 0)
    pool.give_back(page)
    assert (pool.users(page), pool.available) == (0, 1)


def test_nothing_is_given_back_twice():
    pool = PagePool(2)
    page = pool.take()
    pool.give_back(page)
    with pytest.raises(PageError, match=f"Page {page} is given back, and nobody uses it"):
        pool.give_back(page)
    assert pool.available == 2


def test_a_remembered_page_is_not_given_back_twice_either():
    pool = PagePool(2)
    page = pool.take()
    pool.remember(page)
    pool.give_back(page)
    with pytest.raises(PageError, match="nobody uses it"):
        pool.give_back(page)
    assert pool.available == 2


@pytest.mark.parametrize("method", ["users", "share", "give_back", "remember"])
@pytest.mark.parametrize("page", [-1, 2, 100])
def test_pages_that_do_not_exist_are_refused(method, page):
    # A list would take -1 for the last one.
    pool = PagePool(2)
    for _ in range(2):
        pool.take()
    with pytest.raises(PageError, match=f"no page {page}; they go from 0 to 1"):
        getattr(pool, method)(page)


def test_an_empty_page_is_neither_shared_nor_remembered():
    pool = PagePool(1)
    with pytest.raises(PageError, match="Page 0 is empty"):
        pool.share(0)
    with pytest.raises(PageError, match="Page 0 cannot be remembered"):
        pool.remember(0)
    pool.give_back(pool.take())
    with pytest.raises(PageError, match="Page 0 is empty"):
        pool.share(0)


def test_remembered_pages_go_last_and_the_longest_unused_first():
    pool = PagePool(4)
    forgotten = forgetful(pool)
    taken = [pool.take() for _ in range(4)]
    for page in taken[:3]:
        pool.remember(page)
    for page in (taken[1], taken[3], taken[0], taken[2]):
        pool.give_back(page)
    assert (pool.take(), forgotten) == (taken[3], [])
    # Using one again makes it the one that was used last.
    pool.share(taken[1])
    pool.give_back(taken[1])
    assert [pool.take() for _ in range(3)] == forgotten == [taken[0], taken[2], taken[1]]


def test_a_remembered_page_that_is_shared_again_is_not_given_away():
    pool = PagePool(2)
    forgotten = forgetful(pool)
    page = pool.take()
    pool.remember(page)
    pool.give_back(page)
    pool.share(page)
    assert (pool.users(page), pool.available) == (1, 1)
    assert pool.take() != page and forgotten == []
    with pytest.raises(PageError, match="All 2 pages"):
        pool.take()
    pool.give_back(page)
    assert (pool.take(), forgotten) == (page, [page])


def test_a_page_is_forgotten_before_it_has_a_new_user_and_once_only():
    pool = PagePool(1)
    users: list[int] = []
    pool.forget = lambda page: users.append(pool.users(page))
    pool.remember(pool.take())
    pool.give_back(0)
    pool.take()
    assert users == [0]
    # What the new user leaves is nobody's to remember.
    pool.give_back(0)
    with pytest.raises(PageError, match="is empty"):
        pool.share(0)
    pool.take()
    assert users == [0]


# Sequences


def sequence(pages: Pages, length: int) -> Held:
    held = pages.new()
    assert pages.grow(held, 0, length) == []
    return held


@pytest.mark.parametrize(("length", "held"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_a_sequence_holds_as_many_pages_as_its_tokens_need(length, held):
    pages = Pages([FULL, Reach(window=1000)], [6, 6], 4)
    at_once, one_by_one = sequence(pages, length), pages.new()
    for position in range(length):
        assert pages.grow(one_by_one, position, position + 1) == []
    assert at_once.count() == one_by_one.count() == [held, held]
    check_books(pages, [at_once, one_by_one])


def test_growing_within_a_page_takes_none():
    pages = Pages([FULL], [2], 4)
    held = sequence(pages, 10)
    before = list(held.tables[0])
    assert pages.grow(held, 10, 64) == [] and held.tables[0] == before
    assert pages.grow(held, 64, 65) == [] and held.count() == [2]


def test_with_too_few_pages_nothing_changes_in_any_group():
    pages = Pages([FULL, FULL], [4, 2], 8)
    held = sequence(pages, 70)
    before = [list(table) for table in held.tables]
    # The first group has enough of them.
    assert pages.grow(held, 70, 130) is None
    assert held.tables == before and [pool.in_use for pool in pages.pools] == [2, 2]
    assert pages.grow(held, 70, 128) == []


def test_too_few_pages_for_a_copy_change_nothing_either():
    pages = Pages([FULL], [2], 8)
    held = sequence(pages, 100)
    fork = pages.fork(held)
    assert pages.grow(fork, 100, 101) is None
    assert fork.tables == held.tables and pages.pools[0].users(held.tables[0][1]) == 2
    pages.free(held)
    # Its alone by now: there is nothing to copy.
    assert pages.grow(fork, 100, 101) == []


def test_a_shared_page_is_copied_for_the_one_that_writes_first():
    pages = Pages([FULL, FULL], [5, 5], 8)
    held = sequence(pages, 100)
    fork = pages.fork(held)
    shared = [list(table) for table in held.tables]
    copies = pages.grow(fork, 100, 101)
    assert copies == [Copy(group, shared[group][1], fork.tables[group][1]) for group in range(2)]
    assert held.tables == shared
    assert [table[0] for table in fork.tables] == [table[0] for table in shared]
    assert all(table[1] not in mine for table, mine in zip(fork.tables, shared, strict=True))
    # The other one is alone with the old page.
    assert pages.grow(held, 100, 101) == []
    check_books(pages, [held, fork])


def test_only_pages_that_are_written_are_copied():
    pages = Pages([FULL], [8], 8)
    held = sequence(pages, 3 * PAGE)
    fork = pages.fork(held)
    assert pages.grow(fork, 3 * PAGE, 3 * PAGE + 1) == []
    third = pages.fork(held)
    copies = pages.grow(third, PAGE, 2 * PAGE)
    assert copies is not None and [copy.source for copy in copies] == [held.tables[0][1]]
    assert pages.pools[0].in_use == 3 + 1 + 1


def test_a_table_takes_no_more_blocks_than_it_has():
    pages = Pages([FULL], [9], 2)
    held = sequence(pages, 128)
    with pytest.raises(PageError, match="Positions 128 to 129 do not fit a table of 2 blocks"):
        pages.grow(held, 128, 129)
    assert held.count() == [2] and pages.pools[0].in_use == 2


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (5, 5), (200, 100)])
def test_positions_that_make_no_sense_are_refused_and_cost_nothing(start, end):
    pages = Pages([Reach(window=4)], [4], 4)
    held = sequence(pages, 128)
    before = list(held.tables[0])
    with pytest.raises(PageError, match="do not fit"):
        pages.grow(held, start, end)
    assert held.tables[0] == before


def test_what_was_never_written_is_not_read():
    pages = Pages([FULL, Reach(window=10)], [9, 9], 9)
    with pytest.raises(PageError, match="Position 1 sees block 0 of group 0, which has no page"):
        pages.grow(pages.new(), 1, 2)
    held = sequence(pages, 64)
    with pytest.raises(PageError, match="Position 129 sees block 1 of group 0"):
        pages.grow(held, 129, 130)
    check_books(pages, [held])


def test_what_a_window_left_behind_is_not_read_again():
    pages = Pages([Reach(window=10)], [9], 9)
    held = sequence(pages, 200)
    pages.grow(held, 200, 201)
    with pytest.raises(PageError, match="Position 140 sees block 2 of group 0") as error:
        pages.trim(held, 300)
        pages.grow(held, 140, 141)
    assert "no page" in str(error.value)


def test_windows_and_chunks_let_go_of_what_no_later_position_sees():
    pages = Pages([FULL, Reach(window=PAGE), Reach(chunk=2 * PAGE)], [9, 9, 9], 9)
    held = sequence(pages, 2 * PAGE)
    assert held.count() == [2, 2, 2]
    # Position 128 sees from 65 on, and begins a chunk.
    pages.grow(held, 2 * PAGE, 2 * PAGE + 1)
    assert [[page != NONE for page in table] for table in held.tables] == [
        [True, True, True],
        [False, True, True],
        [False, False, True],
    ]
    pages.grow(held, 2 * PAGE + 63, 2 * PAGE + 64)
    assert [pool.in_use for pool in pages.pools] == [3, 1, 1]


def test_a_window_lets_its_pages_go_even_where_there_are_too_few():
    pages = Pages([FULL, Reach(window=1)], [1, 2], 4)
    held = sequence(pages, PAGE)
    assert pages.grow(held, PAGE, PAGE + 1) is None
    assert held.count() == [1, 0]
    # It can try again.
    assert pages.grow(held, PAGE, PAGE + 1) is None
    check_books(pages, [held])


def test_a_window_does_not_take_a_page_from_others_that_share_it():
    pages = Pages([Reach(window=1)], [9], 9)
    held = sequence(pages, 2 * PAGE)
    fork = pages.fork(held)
    pages.grow(fork, 2 * PAGE, 2 * PAGE + 1)
    assert held.count() == [2] and fork.count() == [1]
    check_books(pages, [held, fork])


def test_a_long_prompt_of_a_windowed_group_needs_few_pages():
    pages = Pages([Reach(window=PAGE)], [4], 100)
    held = pages.new()
    for start in range(0, 90 * PAGE, 2 * PAGE):
        assert pages.grow(held, start, start + 2 * PAGE) == []
    assert len(held.tables[0]) == 90 and held.count()[0] <= 4


def test_it_is_known_what_there_would_be_without_some_sequences():
    pages = Pages([FULL, Reach(window=PAGE)], [9, 5], 9)
    held = sequence(pages, 2 * PAGE)
    fork, other = pages.fork(held), sequence(pages, 3)
    assert pages.available_without([]) == [6, 2]
    assert pages.available_without([other]) == [7, 3]
    # What one that stays shares is not there.
    assert pages.available_without([held]) == pages.available_without([fork]) == [6, 2]
    assert pages.available_without([held, fork]) == [8, 4]
    for each in (held, fork):
        pages.free(each)
    assert pages.available_without([]) == [8, 4]


def test_freeing_gives_back_everything_and_may_be_repeated():
    pages = Pages([FULL, Reach(window=3)], [4, 4], 4)
    held = sequence(pages, 200)
    fork = pages.fork(held)
    pages.free(held)
    assert held.tables == [[], []]
    check_books(pages, [fork])
    pages.free(held)
    pages.free(fork)
    check_books(pages, [])


def test_of_a_freed_sequence_the_last_pages_are_given_away_first():
    # What a beginning is looked up by is at the front.
    pages = Pages([FULL], [3], 3)
    held = sequence(pages, 3 * PAGE)
    table = list(held.tables[0])
    for page in table:
        pages.pools[0].remember(page)
    pages.free(held)
    assert [pages.pools[0].take() for _ in table] == table[::-1]


def test_a_fork_knows_what_was_remembered_and_a_freed_sequence_does_not():
    pages = Pages([FULL], [3], 3)
    held = sequence(pages, 100)
    held.remembered, held.latest = 1, "block"
    fork = pages.fork(held)
    pages.free(held)
    assert (held.remembered, held.latest) == (0, None)
    assert (fork.remembered, fork.latest) == (1, "block")


def test_sharing_leaves_blocks_without_a_page_without_one():
    pages = Pages([FULL, FULL], [3, 3], 3)
    held = sequence(pages, 100)
    other = pages.new()
    pages.share(other, [held.tables[0], [NONE, held.tables[1][1]]])
    assert other.tables == [held.tables[0], [NONE, held.tables[1][1]]] and other.count() == [2, 1]
    check_books(pages, [held, other])


def test_what_is_moved_out_comes_back_to_the_same_blocks():
    pages = Pages([FULL, Reach(window=PAGE)], [9, 9], 9)
    held = sequence(pages, 3 * PAGE)
    pages.grow(held, 3 * PAGE, 3 * PAGE + 5)
    before = [list(table) for table in held.tables]
    moved = pages.take_out(held)
    assert moved == Moved([[0, 1, 2, 3], [2, 3]], [before[0], before[1][2:]])
    check_books(pages, [])
    other = sequence(pages, 2 * PAGE)
    back = pages.bring_back(held, moved)
    assert back is not None and back.blocks == moved.blocks
    assert [[page != NONE for page in table] for table in held.tables] == [[True] * 4, [False, False, True, True]]
    assert back.pages == [held.tables[0], held.tables[1][2:]]
    check_books(pages, [held, other])


def test_what_does_not_fit_stays_away_and_takes_nothing():
    pages = Pages([FULL, FULL], [4, 3], 4)
    held = sequence(pages, 3 * PAGE)
    moved = pages.take_out(held)
    other = sequence(pages, 1)
    # The first group has room.
    assert pages.bring_back(held, moved) is None
    assert held.tables == [[], []]
    check_books(pages, [other])
    pages.free(other)
    assert pages.bring_back(held, moved) is not None


def test_pages_that_others_share_stay_with_them_when_one_is_moved_out():
    pages = Pages([FULL], [4], 4)
    held = sequence(pages, 2 * PAGE)
    fork = pages.fork(held)
    pages.take_out(held)
    check_books(pages, [fork])
    assert fork.count() == [2]


def test_pages_that_come_are_empty_and_pages_that_go_were():
    pool = PagePool(2)
    taken = [pool.take() for _ in range(2)]
    assert pool.resize(5) == {} and (pool.count, pool.available, pool.in_use) == (5, 3, 2)
    assert sorted([*taken, *(pool.take() for _ in range(3))]) == [0, 1, 2, 3, 4]
    for page in (0, 2, 3, 4):
        pool.give_back(page)
    assert pool.resize(2) == {} and (pool.available, pool.take()) == (1, 0)
    with pytest.raises(PageError, match="All 2 pages"):
        pool.take()
    assert pool.most_in_use == 5


def test_pages_in_use_get_numbers_that_stay():
    pages = Pages([FULL, FULL], [6, 6], 6)
    gone, held = sequence(pages, 2 * PAGE), sequence(pages, 3 * PAGE)
    fork, other = pages.fork(held), sequence(pages, 1)
    before = [list(table) for table in held.tables]
    pages.free(gone)
    copies = pages.resize([4, 6], [held, fork, other])
    assert held.tables == fork.tables and held.tables[1] == before[1]
    assert sorted([*held.tables[0], *other.tables[0]]) == [0, 1, 2, 3]
    assert [Copy(0, was, now) for was, now in zip(before[0], held.tables[0], strict=True) if was != now] == [
        copy for copy in copies if copy.source in before[0]
    ]
    check_books(pages, [held, fork, other])
    # Not one more is taken for them.
    assert pages.pools[0].most_in_use == 6 and pages.pools[0].available == 0


@pytest.mark.parametrize("count", [0, 2])
def test_pages_in_use_do_not_go(count):
    pages = Pages([FULL], [5], 5)
    held = sequence(pages, 3 * PAGE)
    with pytest.raises(PageError, match=f"3 pages are in use, and only {count} are to be left"):
        pages.resize([count], [held])
    assert pages.pools[0].count == 5
    check_books(pages, [held])


def test_of_remembered_pages_those_in_use_stay_so_and_those_that_go_are_forgotten():
    pool = PagePool(4)
    forgotten, renumbered = forgetful(pool), []
    pool.renumber = lambda page, to: renumbered.append((page, to))
    taken = [pool.take() for _ in range(4)]
    for page in taken:
        pool.remember(page)
    for page in (0, 1, 2):
        pool.give_back(page)
    # Page 3 takes the place of the one that was unused for longest, of those that stay.
    assert pool.resize(2) == {3: 0} and (forgotten, renumbered) == ([2, 0], [(3, 0)])
    pool.give_back(0)
    assert [pool.take(), pool.take()] == [1, 0] and forgotten == [2, 0, 1, 0]


class Run:
    """A sequence: its values, from where on it must see them, and its pages or where they went."""

    def __init__(self, held: Held):
        self.held = held
        self.values: list[int] = []
        self.start = 0
        self.moved: tuple[Moved, object] | None = None


class Sequences(RuleBasedStateMachine):
    """Anything that sequences may do, in any order, in few pages: each reads its own values, whatever the others do."""

    @initialize(
        groups=st.lists(
            st.tuples(
                st.builds(
                    Reach,
                    window=st.none() | st.sampled_from([1, 2, 63, 64, 65, 100]),
                    chunk=st.none() | st.sampled_from([1, 64, 100, 128]),
                ),
                st.integers(2, 9),
            ),
            min_size=1,
            max_size=3,
        )
    )
    def begin(self, groups):
        self.pages = Pages([reach for reach, _ in groups], [pages for _, pages in groups], 6)
        self.contents = Contents(self.pages)
        self.sequences: list[Run] = []
        self.numbers = count()

    def any(self, data, moved=False):
        return data.draw(st.sampled_from([one for one in self.sequences if (one.moved is not None) == moved]))

    @precondition(lambda self: len(self.sequences) < 5)
    @rule()
    def new(self):
        self.sequences.append(Run(self.pages.new()))

    @precondition(lambda self: any(one.moved is None for one in self.sequences))
    @rule(data=st.data(), tokens=st.integers(1, 130) | st.just(1))
    def write(self, data, tokens):
        one = self.any(data)
        start, end = len(one.values), len(one.values) + tokens
        if end > self.pages.most_blocks * PAGE:
            return
        self.grow(one, start, [next(self.numbers) for _ in range(tokens)])

    @precondition(lambda self: any(one.moved is None and one.values for one in self.sequences))
    @rule(data=st.data())
    def write_the_last_one_again(self, data):
        one = self.any(data)
        # Where one had too few pages to go on, what only this one sees may be gone.
        if one.start < len(one.values):
            self.grow(one, len(one.values) - 1, [next(self.numbers)])

    def grow(self, one, start, values):
        before = [list(table) for table in one.held.tables]
        copies = self.pages.grow(one.held, start, start + len(values))
        one.start = start
        if copies is None:
            for reach, was, now in zip(self.pages.reaches, before, one.held.tables, strict=True):
                kept = reach.first(start) // PAGE
                assert (was[kept:], len(was)) == (now[kept:], len(now))
        else:
            self.contents.copy(copies)
            self.contents.write(one.held, start, values)
            one.values[start:] = values

    @precondition(lambda self: any(one.moved is None for one in self.sequences) and len(self.sequences) < 5)
    @rule(data=st.data())
    def fork(self, data):
        one = self.any(data)
        fork = Run(self.pages.fork(one.held))
        fork.values, fork.start = list(one.values), one.start
        self.sequences.append(fork)

    @precondition(lambda self: any(one.moved is None for one in self.sequences))
    @rule(data=st.data())
    def free(self, data):
        one = self.any(data)
        self.pages.free(one.held)
        self.sequences.remove(one)

    @precondition(lambda self: any(one.moved is None for one in self.sequences))
    @rule(data=st.data())
    def remember(self, data):
        for pool, table in zip(self.pages.pools, self.any(data).held.tables, strict=True):
            for page in table:
                if page != NONE:
                    pool.remember(page)

    @precondition(lambda self: any(one.moved is None for one in self.sequences))
    @rule(data=st.data())
    def move_out(self, data):
        one = self.any(data)
        moved = self.pages.take_out(one.held)
        one.moved = moved, self.contents.save(moved.pages)

    @precondition(lambda self: any(one.moved is not None for one in self.sequences))
    @rule(data=st.data())
    def bring_back(self, data):
        one = self.any(data, moved=True)
        moved, saved = one.moved
        back = self.pages.bring_back(one.held, moved)
        if back is not None:
            self.contents.load(back.pages, saved)
            one.moved = None

    @rule(data=st.data())
    def resize(self, data):
        counts = [data.draw(st.integers(pool.in_use, 10)) for pool in self.pages.pools]
        self.contents.copy(self.pages.resize(counts, [one.held for one in self.sequences]))
        self.contents.resize(counts)

    @invariant()
    def everyone_reads_its_own_values(self):
        for one in getattr(self, "sequences", []):
            if one.moved is None and one.values:
                self.contents.check(one.held, one.start, one.values)

    @invariant()
    def the_books_are_right(self):
        if hasattr(self, "pages"):
            check_books(self.pages, [one.held for one in self.sequences])

    @invariant()
    def everyone_holds_the_blocks_that_it_sees_and_no_others(self):
        for one in getattr(self, "sequences", []):
            seen = [blocks(len(one.values)) - reach.first(one.start) // PAGE for reach in self.pages.reaches]
            assert one.held.count() == ([0] * len(seen) if one.moved else seen)

    def teardown(self):
        for one in getattr(self, "sequences", []):
            self.pages.free(one.held)
        if hasattr(self, "pages"):
            check_books(self.pages, [])
            assert all(pool.available == pool.count for pool in self.pages.pools)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
