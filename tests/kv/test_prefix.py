"""Beginnings of prompts are found where pages hold them, and nothing else ever is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_helpers import Contents, check_books, values_of
from novalm_jax.kv.pages import NONE, PAGE, Held, Pages, Reach
from novalm_jax.kv.prefix import PrefixIndex

FULL = Reach()


class Prompts:
    """Computes prompts as the engine does: looks them up, fills pages with the rest, and has them remembered."""

    def __init__(self, reaches: Sequence[Reach] = (FULL,), counts: Sequence[int] = (20,), **index):
        self.pages = Pages(reaches, counts, 100)
        self.contents = Contents(self.pages)
        self.index = PrefixIndex(self.pages, **index)
        self.noted: Callable[[Held, range, bytes, Sequence[int]], None] = lambda *_: None

    def compute(self, tokens: Sequence[int], seed: bytes = b"model", part: int = 1000) -> tuple[Held, int] | None:
        """Its pages, and how many tokens were there; None where there are too few pages."""
        held, found = self.index.find(seed, tokens)
        assert 0 <= found < len(tokens)
        values = values_of(tokens, seed)
        self.contents.check(held, found, values[:found])
        for start in range(found, len(tokens), part):
            end = min(start + part, len(tokens))
            copies = self.pages.grow(held, start, end)
            if copies is None:
                self.pages.free(held)
                return None
            self.contents.copy(copies)
            self.contents.write(held, start, values[start:end])
            self.contents.check(held, start, values[:end])
            known = held.remembered
            self.index.remember(held, seed, tokens[:end])
            self.noted(held, range(known, held.remembered), seed, tokens)
        return held, found

    def resize(self, counts: Sequence[int], running: Sequence[Held]) -> None:
        """So many pages of each group."""
        self.contents.copy(self.pages.resize(counts, running))
        self.contents.resize(counts)

    def looked_up(self, tokens: Sequence[int], seed: bytes = b"model") -> int:
        """How many tokens of a prompt are there."""
        held, found = self.index.find(seed, tokens)
        self.contents.check(held, found, values_of(tokens[:found], seed))
        self.pages.free(held)
        return found

    def found(self, tokens: Sequence[int], seed: bytes = b"model") -> int:
        """Computes a prompt, ends it, and says how many of its tokens were there."""
        computed = self.compute(tokens, seed)
        assert computed is not None
        self.pages.free(computed[0])
        return computed[1]

    def use_all_pages(self) -> None:
        """Other work takes every page, and lets go of them again."""
        for pool in self.pages.pools:
            for page in [pool.take() for _ in range(pool.available)]:
                pool.give_back(page)


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


@pytest.mark.parametrize(("length", "again"), [(1, 0), (63, 0), (64, 63), (65, 64), (127, 64), (128, 127), (129, 128)])
def test_a_prompt_is_found_again_but_for_its_last_token_at_least(length, again):
    prompts = Prompts()
    assert [prompts.found(prompt(length)) for _ in range(3)] == [0, again, again]


@pytest.mark.parametrize(("length", "again"), [(63, 0), (64, 63), (65, 64), (128, 127)])
def test_a_prompt_is_found_while_others_still_use_its_pages(length, again):
    prompts = Prompts()
    computed = [prompts.compute(prompt(length)) for _ in range(3)]
    assert [found for _, found in computed] == [0, again, again]
    check_books(prompts.pages, [held for held, _ in computed])
    values = values_of(prompt(length), b"model")
    for held, _ in computed:
        prompts.contents.check(held, 0, values)
        prompts.pages.free(held)
    check_books(prompts.pages, [])


def test_prompts_share_as_much_as_they_have_in_common_and_no_more():
    prompts = Prompts()
    common = prompt(2 * PAGE)
    prompts.found(common + prompt(PAGE, 500))
    # The block after those is another one, though it differs in its last token alone.
    assert prompts.found([*common, *prompt(PAGE - 1, 500), 9]) == 2 * PAGE
    assert prompts.found([*common, 9]) == 2 * PAGE
    assert prompts.found(common[:PAGE] + prompt(PAGE, 500)) == PAGE
    assert prompts.found([9, *common[1:]]) == 0


def test_a_block_is_not_found_after_another_beginning():
    # Its keys depend on all tokens before it.
    prompts = Prompts()
    prompts.found(prompt(2 * PAGE))
    assert prompts.found([*prompt(PAGE, 900), *prompt(PAGE, PAGE), 1]) == 0
    assert prompts.found([*prompt(PAGE, PAGE), 1]) == 0


def test_what_was_computed_with_another_seed_is_never_found():
    prompts = Prompts()
    for seed in (b"a", b"b", b"", b"ab"):
        assert prompts.found(prompt(200), seed) == 0
    assert [prompts.found(prompt(200), seed) for seed in (b"a", b"b", b"", b"ab")] == [3 * PAGE] * 4


def test_a_seed_that_ends_like_tokens_is_no_token():
    # Seed and tokens make one name together, which must not be taken apart elsewhere.
    prompts = Prompts()
    word = (5).to_bytes(8, "little")
    prompts.found([5] * PAGE, seed=b"")
    assert prompts.found([5] * PAGE, seed=word) == 0
    assert prompts.found([5] * PAGE, seed=word * PAGE) == 0


def test_where_all_names_are_the_same_only_the_right_tokens_are_found():
    prompts = Prompts(digest=lambda content: b"x")
    assert prompts.found(prompt(130)) == 0
    # The first block has the name. The second one, of the same name, must not be taken for it, nor for one after it.
    assert [prompts.found(prompt(130)) for _ in range(2)] == [PAGE, PAGE]
    assert prompts.found(prompt(130, 1000)) == 0
    assert prompts.found(prompt(PAGE) * 3) == PAGE
    assert prompts.found(prompt(130), seed=b"other") == 0
    assert len(prompts.index) == 1
    prompts.use_all_pages()
    assert len(prompts.index) == 0
    # The name is free again.
    assert [prompts.found(prompt(130, 1000)) for _ in range(2)] == [0, PAGE]


def test_names_that_two_beginnings_share_later_on_are_told_apart_too():
    # The first block of each has a name of its own; what follows has not.
    prompts = Prompts(digest=lambda content: content[-8:] if content.startswith(b"model") else b"x")
    a, b = [*prompt(PAGE), *prompt(PAGE, 500), 1], [*prompt(PAGE, 100), *prompt(PAGE, 500), 1]
    assert [prompts.found(each) for each in (a, a, b, b, a)] == [0, 2 * PAGE, 0, PAGE, 2 * PAGE]


def test_a_name_that_says_nothing_of_what_came_before_leads_nowhere_else():
    prompts = Prompts(digest=lambda content: content[-8 * PAGE :])
    a, b = prompt(PAGE), prompt(PAGE, 500)
    assert [prompts.found([*a, *a, *b]) for _ in range(2)] == [0, PAGE]
    # The last block was computed after two of the first one.
    assert prompts.found([*a, *b, 1]) == PAGE


def test_a_prompt_in_parts_is_remembered_part_by_part():
    prompts = Prompts()
    tokens, values = prompt(600), values_of(prompt(600), b"model")
    held, _ = prompts.index.find(b"model", tokens)
    for start in range(0, 600, 100):
        prompts.pages.grow(held, start, start + 100)
        prompts.contents.write(held, start, values[start : start + 100])
        prompts.index.remember(held, b"model", tokens[: start + 100])
        # Others find it before it is through.
        assert prompts.looked_up(prompt(start + 101)) == (start + 100) // PAGE * PAGE
    prompts.pages.free(held)


def test_what_is_not_computed_yet_is_not_found():
    prompts = Prompts()
    held, _ = prompts.index.find(b"model", prompt(300))
    prompts.pages.grow(held, 0, 300)
    prompts.contents.write(held, 0, values_of(prompt(100), b"model"))
    prompts.index.remember(held, b"model", prompt(300)[:100])
    assert prompts.looked_up(prompt(300)) == PAGE


def test_finding_takes_no_pages_and_may_be_given_back():
    prompts = Prompts(counts=[5])
    prompts.found(prompt(200))
    free = prompts.pages.pools[0].available
    held, found = prompts.index.find(b"model", prompt(200))
    assert (found, prompts.pages.pools[0].in_use) == (3 * PAGE, 3)
    prompts.pages.free(held)
    assert prompts.pages.pools[0].available == free == 5
    nothing, found = prompts.index.find(b"model", prompt(200, 1))
    assert (nothing.count(), found) == ([0], 0)


# Under pressure


def test_pages_that_are_needed_go_last_block_first():
    prompts = Prompts(counts=[4])
    prompts.found(prompt(3 * PAGE + 1))
    for left in (3, 2, 1, 0):
        # Another prompt in so many pages.
        held = prompts.pages.new()
        prompts.pages.grow(held, 0, (4 - left) * PAGE)
        prompts.pages.free(held)
        assert prompts.looked_up(prompt(3 * PAGE + 1)) == left * PAGE
        assert len(prompts.index) == left


def test_the_prompt_that_was_used_last_stays_longest():
    prompts = Prompts(counts=[4])
    a, b, c = prompt(PAGE + 1), prompt(PAGE + 1, 500), prompt(2 * PAGE + 1, 900)
    prompts.found(a)
    prompts.found(b)
    assert prompts.found(a) == PAGE
    # Three pages, of which one was empty and one held the end of a prompt.
    prompts.found(c)
    assert (prompts.looked_up(b), prompts.looked_up(a)) == (0, PAGE)


def test_pages_in_use_are_never_needed_for_others():
    prompts = Prompts(counts=[4])
    held, _ = prompts.compute(prompt(2 * PAGE + 1))
    for first in range(1000, 9000, 1000):
        assert prompts.found(prompt(PAGE, first)) == 0
    prompts.contents.check(held, 2 * PAGE, values_of(prompt(2 * PAGE + 1), b"model"))
    assert prompts.looked_up(prompt(2 * PAGE + 1)) == 2 * PAGE


def test_blocks_whose_pages_went_are_learnt_again():
    prompts = Prompts(counts=[4])
    long = prompt(3 * PAGE + 1)
    prompts.found(long)
    prompts.found(prompt(2 * PAGE, 5000))
    assert [prompts.found(long) for _ in range(2)] == [2 * PAGE, 3 * PAGE]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_group_whose_pages_went_learns_them_again(gone):
    # The other group still has all of it, and the blocks are known.
    prompts = Prompts([FULL, Reach(window=3 * PAGE)], [9, 9])
    long = prompt(3 * PAGE + 1)
    prompts.found(long)
    pool = prompts.pages.pools[gone]
    for page in [pool.take() for _ in range(pool.available)]:
        pool.give_back(page)
    assert len(prompts.index) == 3
    assert [prompts.found(long) for _ in range(3)] == [0, 3 * PAGE, 3 * PAGE]


@pytest.mark.parametrize("reaches", [[FULL], [Reach(window=PAGE)], [FULL, Reach(window=5), Reach(chunk=PAGE)]])
def test_nothing_is_left_of_blocks_whose_pages_are_all_used_otherwise(reaches):
    prompts = Prompts(reaches, [9] * len(reaches))
    for first in (0, 500, 900):
        prompts.found(prompt(4 * PAGE + 3, first))
        prompts.found([*prompt(2 * PAGE, first), *prompt(2 * PAGE, 7000)])
    assert len(prompts.index) > 0
    prompts.use_all_pages()
    assert len(prompts.index) == 0
    assert prompts.found(prompt(4 * PAGE + 3)) == 0


def test_a_block_stays_known_for_as_long_as_one_after_it_is_held():
    # A window has let go of the first blocks; the last ones are found by way of them.
    prompts = Prompts([Reach(window=PAGE)], [6])
    held, _ = prompts.compute(prompt(5 * PAGE + 1), part=PAGE)
    pool = prompts.pages.pools[0]
    for page in [pool.take() for _ in range(pool.available)]:
        pool.give_back(page)
    assert len(prompts.index) == 5
    assert prompts.looked_up(prompt(5 * PAGE + 1)) == 5 * PAGE
    prompts.pages.free(held)


def fill_all_but_the_end(prompts: Prompts, tokens: Sequence[int]) -> Held:
    """A prompt up to token 130, of which a short window has let go but for the last block. Nothing is known of it."""
    held = prompts.pages.new()
    prompts.pages.grow(held, 0, 130)
    prompts.contents.write(held, 0, values_of(tokens[:130], b"model"))
    prompts.index.remember(held, b"model", tokens[:130])
    prompts.pages.trim(held, 130)
    prompts.use_all_pages()
    assert len(prompts.index) == 0
    return held


def test_blocks_of_which_nobody_has_a_page_are_not_kept():
    prompts = Prompts([Reach(window=2)])
    held = fill_all_but_the_end(prompts, prompt(300))
    # One that comes back from the host tells of all its blocks again.
    prompts.pages.bring_back(held, prompts.pages.take_out(held))
    prompts.pages.grow(held, 130, 140)
    prompts.index.remember(held, b"model", prompt(140))
    assert len(prompts.index) == 0


def test_one_whose_blocks_were_forgotten_does_not_keep_others_from_theirs():
    prompts = Prompts([Reach(window=2)])
    tokens = prompt(300)
    held = fill_all_but_the_end(prompts, tokens)
    # Another request makes the same beginning known again.
    assert prompts.found(tokens[:129]) == 0
    prompts.pages.grow(held, 130, 200)
    prompts.contents.write(held, 130, values_of(tokens[:200], b"model")[130:])
    prompts.index.remember(held, b"model", tokens[:200])
    assert [prompts.found(tokens[:200]) for _ in range(2)] == [2 * PAGE, 3 * PAGE]


# Groups that see less


def test_of_a_window_only_what_it_sees_is_needed_and_shared():
    prompts = Prompts([FULL, Reach(window=PAGE)], [9, 9])
    prompts.found(prompt(5 * PAGE + 1))
    held, found = prompts.index.find(b"model", prompt(5 * PAGE + 1))
    assert (found, held.count()) == (5 * PAGE, [5, 1])
    assert held.tables[1][:4] == [NONE] * 4
    prompts.contents.check(held, found, values_of(prompt(5 * PAGE), b"model"))


def test_a_beginning_that_a_window_has_lost_is_found_where_it_has_not():
    prompts = Prompts([FULL, Reach(window=PAGE)], [20, 6])
    held, _ = prompts.compute(prompt(5 * PAGE + 1), part=PAGE)
    prompts.pages.free(held)
    assert prompts.looked_up(prompt(3 * PAGE + 1)) == 3 * PAGE
    # What the window left behind goes first, but for the third block, which was just looked up.
    window = prompts.pages.pools[1]
    for page in [window.take() for _ in range(4)]:
        window.give_back(page)
    lengths = [2 * PAGE + 1, 3 * PAGE + 1, 4 * PAGE + 1, 5 * PAGE + 1]
    assert [prompts.looked_up(prompt(length)) for length in lengths] == [0, 3 * PAGE, 3 * PAGE, 5 * PAGE]


def test_a_chunk_begins_anew_and_needs_nothing_of_the_one_before():
    prompts = Prompts([Reach(chunk=2 * PAGE)], [9])
    prompts.found(prompt(5 * PAGE + 1))
    held, found = prompts.index.find(b"model", prompt(4 * PAGE + 1))
    assert (found, held.count()) == (4 * PAGE, [0])
    held, found = prompts.index.find(b"model", prompt(5 * PAGE + 1))
    assert (found, held.count()) == (5 * PAGE, [1])


def test_a_prompt_is_found_again_where_its_pages_got_other_numbers():
    prompts = Prompts([FULL, Reach(window=PAGE)], [12, 12])
    other, prompt = [7] * (4 * PAGE), [5] * (3 * PAGE + 1)
    first, _ = prompts.compute(other)
    held, _ = prompts.compute(prompt)
    prompts.pages.free(first)
    prompts.resize([4, 4], [held])
    assert held.tables[0] and max(map(max, held.tables)) < 4
    assert prompts.looked_up(prompt) == 3 * PAGE
    prompts.pages.free(held)
    prompts.resize([20, 20], [])
    assert prompts.looked_up(prompt) == 3 * PAGE
    # Some pages of the other one had to go, the last ones first.
    assert prompts.looked_up(other) < 4 * PAGE - 1


class Known:
    """What pages hold of beginnings, by all tokens of them; says how much of a prompt may be found at most."""

    def __init__(self, prompts: Prompts):
        prompts.noted = self._add
        self._pages = prompts.pages
        self._held: list[dict[int, tuple[bytes, tuple[int, ...]]]] = [{} for _ in prompts.pages.pools]
        for held, pool in zip(self._held, prompts.pages.pools, strict=True):

            def forget(page, held=held, then=pool.forget):
                del held[page]
                then(page)

            def renumber(page, to, held=held, then=pool.renumber):
                held[to] = held.pop(page)
                then(page, to)

            pool.forget, pool.renumber = forget, renumber

    def _add(self, held: Held, noted: range, seed: bytes, tokens: Sequence[int]) -> None:
        for group, table in enumerate(held.tables):
            for block in noted:
                beginning = seed, tuple(tokens[: (block + 1) * PAGE])
                if table[block] != NONE and beginning not in self._held[group].values():
                    self._held[group][table[block]] = beginning

    def most(self, seed: bytes, tokens: Sequence[int]) -> int:
        there = [set(held.values()) for held in self._held]
        for count in range(len(tokens) // PAGE, 0, -1):
            start = min(count * PAGE, len(tokens) - 1)
            if all(
                (seed, tuple(tokens[: (block + 1) * PAGE])) in there[group]
                for group, reach in enumerate(self._pages.reaches)
                for block in range(reach.first(start) // PAGE, count)
            ):
                return start
        return 0


BLOCKS = [[1] * PAGE, [2] * PAGE, [1] * (PAGE - 1) + [2]]
DIGESTS = [
    {},
    {"digest": lambda content: b"x"},
    {"digest": lambda content: content[-8 * PAGE :]},
    {"digest": lambda content: bytes([content[-8] + content[0] % 2])},
]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_found_is_right_and_as_much_as_there_is(data):
    others = st.builds(
        Reach, window=st.none() | st.sampled_from([2, 64, 65, 100]), chunk=st.none() | st.sampled_from([64, 100, 128])
    )
    reaches = data.draw(st.lists(others, max_size=2))
    # Without a layer that sees everything, it may be that nothing is left that leads to a block.
    reaches = [FULL, *reaches] if (complete := data.draw(st.booleans()) or not reaches) else reaches
    digest = DIGESTS[data.draw(st.integers(0, 3))]
    prompts = Prompts(reaches, [data.draw(st.integers(4, 12)) for _ in reaches], **digest)
    known, running = Known(prompts), []
    for _ in range(data.draw(st.integers(1, 25))):
        if not data.draw(st.integers(0, 5)):
            prompts.resize([data.draw(st.integers(pool.in_use, 12)) for pool in prompts.pages.pools], running)
        elif running and data.draw(st.booleans()):
            prompts.pages.free(running.pop(data.draw(st.integers(0, len(running) - 1))))
        else:
            beginning = data.draw(st.lists(st.integers(0, 2), max_size=4))
            tokens = [token for block in beginning for token in BLOCKS[block]]
            tokens += [3] * data.draw(st.sampled_from([0, 1, 5, 63]))
            seed = data.draw(st.sampled_from([b"model", b"other"]))
            if not tokens:
                continue
            most, found = known.most(seed, tokens), prompts.looked_up(tokens, seed)
            assert found == most if complete and not digest else found <= most
            if computed := prompts.compute(tokens, seed, data.draw(st.sampled_from([50, 64, 1000]))):
                running.append(computed[0])
        check_books(prompts.pages, running)
    for held in running:
        prompts.pages.free(held)
    check_books(prompts.pages, [])
    prompts.use_all_pages()
    assert len(prompts.index) == 0
