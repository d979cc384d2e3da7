"""Pages of the key-value cache: which sequence holds which, which are shared, and which are kept for later prompts.

Plain Python: knows numbers of pages and positions of tokens, no arrays and no device. Layers that see as far back as
each other form a group, and a page is a number that stands for the same place in every layer of its group. What is
used against the rules raises `PageError`: on the device a wrong number would be clamped, and read or write something
else without a word.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from novalm_jax.errors import PageError

PAGE = 64
"""Positions of a page."""

NONE = -1
"""In place of a page, in a block that has none: not yet, or not any more."""


class Reach(NamedTuple):
    """How far back layers see: from position p the last `window` positions, and those since p // chunk * chunk; None:
    all of them."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        first = 0 if self.window is None else position - self.window + 1
        return max(0, first, 0 if self.chunk is None else position // self.chunk * self.chunk)

    def most_blocks(self, tokens: int, together: int) -> int:
        """Blocks that a sequence of so many tokens holds at a time, where it grows by up to `together` tokens."""
        span = min((each for each in self if each is not None), default=tokens)
        # A stretch that begins anywhere touches one block more than it fills.
        return min(blocks(tokens), blocks(span + together) + 1)


def blocks(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)


class PagePool:
    """The pages of one group: who uses how many of them, and which are empty.

    Those that nobody uses but that are remembered stay as they are until others are needed, the longest unused first.

    Attributes:
      count: pages in all.
      most_in_use: at any time.
      forget: called with a remembered page before it is given away.
      renumber: called with a remembered page and what its number becomes.
    """

    def __init__(self, count: int):
        """Pages 0 to `count - 1`, all empty."""
        self.count = count
        self.most_in_use = 0
        self.forget: Callable[[int], None] = lambda page: None
        self.renumber: Callable[[int, int], None] = lambda page, to: None
        self._empty = list(range(count - 1, -1, -1))
        self._users = [0] * count
        self._remembered: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self._empty) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Pages that somebody uses."""
        return self.count - self.available

    def users(self, page: int) -> int:
        """How many sequences use a page.

        Raises:
          PageError: there is no such page.
        """
        if not 0 <= page < self.count:
            raise PageError(f"There is no page {page}; they go from 0 to {self.count - 1}.")
        return self._users[page]

    def take(self) -> int:
        """A page for one user.

        Raises:
          PageError: all are in use.
        """
        if self._empty:
            page = self._empty.pop()
        elif self._idle:
            self._forget(page := next(iter(self._idle)))
        else:
            raise PageError(f"All {self.count} pages are in use.")
        self._users[page] = 1
        self.most_in_use = max(self.most_in_use, self.in_use)
        return page

    def share(self, page: int) -> None:
        """One user more, of a page in use or a remembered one.

        Raises:
          PageError: the page is empty.
        """
        if not self.users(page) and page not in self._idle:
            raise PageError(f"Page {page} is empty: there is nothing to share.")
        self._idle.pop(page, None)
        self._users[page] += 1

    def give_back(self, page: int) -> None:
        """One user less.

        Raises:
          PageError: nobody uses it.
        """
        if not self.users(page):
            raise PageError(f"Page {page} is given back, and nobody uses it.")
        self._users[page] -= 1
        if not self._users[page]:
            if page in self._remembered:
                self._idle[page] = None
            else:
                self._empty.append(page)

    def remember(self, page: int) -> None:
        """Its content stays, for as long as no empty page is left, once nobody uses it any more.

        Raises:
          PageError: nobody uses it now.
        """
        if not self.users(page):
            raise PageError(f"Page {page} cannot be remembered: nobody uses it.")
        self._remembered.add(page)

    def resize(self, count: int) -> dict[int, int]:
        """Other pages than before: those behind the first `count` go, or empty ones come.

        Returns:
          What pages in use become whose numbers are gone: where their content has to be.

        Raises:
          PageError: more are in use.
        """
        if self.in_use > count:
            raise PageError(f"{self.in_use} pages are in use, and only {count} are to be left.")
        for page in [page for page in self._idle if page >= count]:
            self._forget(page)
        moved, most = {}, self.most_in_use
        self._empty = [*range(count - 1, self.count - 1, -1), *(page for page in self._empty if page < count)]
        self._users += [0] * (count - self.count)
        for page in range(count, self.count):
            if users := self._users[page]:
                moved[page] = to = self.take()
                self._users[to] = users
                if page in self._remembered:
                    self._remembered.remove(page)
                    self._remembered.add(to)
                    self.renumber(page, to)
        del self._users[count:]
        # Pages are counted twice while they move.
        self.count, self.most_in_use = count, most
        return moved

    def _forget(self, page: int) -> None:
        """What nobody uses is remembered no more."""
        del self._idle[page]
        self._remembered.discard(page)
        self.forget(page)


class Held:
    """The pages of one sequence.

    Attributes:
      tables: for each group the page of every block of positions, `NONE` where there is none.
      remembered: blocks from the first one on that the prefix index was told of.
      latest: the last of them, as the index knows it.
    """

    def __init__(self, groups: int):
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        self.remembered = 0
        self.latest: object = None

    def count(self) -> list[int]:
        """Pages of each group."""
        return [sum(page != NONE for page in table) for table in self.tables]


class Copy(NamedTuple):
    """The content of a page is needed in another one of its group."""

    group: int
    source: int
    target: int


class Moved(NamedTuple):
    """Pages of a sequence that left the device: which blocks of each group, and what they were on the way out."""

    blocks: list[list[int]]
    pages: list[list[int]]


class Pages:
    """The pages of all groups, and the sequences that hold them. A sequence is a `Held`.

    Attributes:
      reaches: how far back the layers of each group see.
      pools: the pages of each group.
      most_blocks: of a sequence.
    """

    def __init__(self, reaches: Sequence[Reach], counts: Sequence[int], most_blocks: int):
        """`counts[i]` pages for layers that see as far as `reaches[i]`."""
        self.reaches = tuple(reaches)
        self.pools = [PagePool(count) for count in counts]
        self.most_blocks = most_blocks

    def new(self) -> Held:
        """A sequence without pages."""
        return Held(len(self.pools))

    def available_without(self, others: Collection[Held]) -> list[int]:
        """Pages of each group that can be taken once these sequences are gone."""
        counts = []
        for group, pool in enumerate(self.pools):
            users = Counter(page for held in others for page in held.tables[group] if page != NONE)
            counts.append(pool.available + sum(pool.users(page) == number for page, number in users.items()))
        return counts

    def grow(self, held: Held, start: int, end: int) -> list[Copy] | None:
        """Gives a sequence pages of its own for the positions from `start` to `end`, which are to be written, and lets
        go of those that no position from `start` on sees.

        Returns:
          What must be copied before anything is written, as pages were shared; None where there are too few pages, and
          nothing has changed then but what was let go of.

        Raises:
          PageError: a block before `start` that is seen from there has no page: it was never written, or is gone. Or
            there are more blocks than a table has.
        """
        first, last = start // PAGE, blocks(end)
        if not 0 <= start < end or last > self.most_blocks:
            raise PageError(f"Positions {start} to {end} do not fit a table of {self.most_blocks} blocks of {PAGE}.")
        self.trim(held, start)
        shared: list[list[int]] = []
        for group, (pool, table) in enumerate(zip(self.pools, held.tables, strict=True)):
            seen = range(self.reaches[group].first(start) // PAGE, min(blocks(start), last))
            if missing := [block for block in seen if block >= len(table) or table[block] == NONE]:
                raise PageError(f"Position {start} sees block {missing[0]} of group {group}, which has no page.")
            present = range(first, min(last, len(table)))
            shared.append([block for block in present if table[block] != NONE and pool.users(table[block]) > 1])
            fresh = last - first - len([block for block in present if table[block] != NONE])
            if fresh + len(shared[-1]) > pool.available:
                return None
        copies = []
        for group, (pool, table) in enumerate(zip(self.pools, held.tables, strict=True)):
            table += [NONE] * (last - len(table))
            for block in range(first, last):
                if table[block] == NONE:
                    table[block] = pool.take()
                elif block in shared[group]:
                    source, table[block] = table[block], pool.take()
                    pool.give_back(source)
                    copies.append(Copy(group, source, table[block]))
        return copies

    def trim(self, held: Held, start: int) -> None:
        """Lets go of pages that no position from `start` on sees."""
        for pool, reach, table in zip(self.pools, self.reaches, held.tables, strict=True):
            first = min(reach.first(start) // PAGE, len(table))
            # What lies before a block without a page was let go of before.
            block = first - 1
            while block >= 0 and table[block] != NONE:
                pool.give_back(table[block])
                table[block] = NONE
                block -= 1

    def fork(self, held: Held) -> Held:
        """A sequence that shares all pages of another one."""
        fork = self.new()
        self.share(fork, held.tables)
        fork.remembered, fork.latest = held.remembered, held.latest
        return fork

    def share(self, held: Held, tables: Iterable[Sequence[int]]) -> None:
        """Gives a sequence without pages those of `tables`, as one more user of each."""
        for pool, mine, table in zip(self.pools, held.tables, tables, strict=True):
            for page in table:
                if page != NONE:
                    pool.share(page)
                mine.append(page)

    def free(self, held: Held) -> None:
        """Lets go of all pages of a sequence; of remembered ones, those are needed first again that come last in it."""
        for pool, table in zip(self.pools, held.tables, strict=True):
            while table:
                if (page := table.pop()) != NONE:
                    pool.give_back(page)
        held.remembered, held.latest = 0, None

    def resize(self, counts: Sequence[int], holders: Iterable[Held]) -> list[Copy]:
        """So many pages of each group from now on. `holders` are all sequences that have some.

        Returns:
          What must be copied before the pages go that there are no more.

        Raises:
          PageError: more are in use.
        """
        copies, holders = [], list(holders)
        for group, (pool, count) in enumerate(zip(self.pools, counts, strict=True)):
            moved = pool.resize(count)
            copies += [Copy(group, source, target) for source, target in moved.items()]
            for held in holders:
                held.tables[group] = [moved.get(page, page) for page in held.tables[group]]
        return copies

    def take_out(self, held: Held) -> Moved:
        """Lets go of all pages of a sequence whose content is brought elsewhere before anything else is written."""
        there = [[block for block, page in enumerate(table) if page != NONE] for table in held.tables]
        pages = [[table[block] for block in each] for each, table in zip(there, held.tables, strict=True)]
        self.free(held)
        return Moved(there, pages)

    def bring_back(self, held: Held, moved: Moved) -> Moved | None:
        """Gives a sequence without pages new ones for what was moved; None where there are too few."""
        if any(len(each) > pool.available for pool, each in zip(self.pools, moved.blocks, strict=True)):
            return None
        for pool, table, each in zip(self.pools, held.tables, moved.blocks, strict=True):
            table += [NONE] * (max(each, default=-1) + 1)
            for block in each:
                table[block] = pool.take()
        pages = [[table[block] for block in each] for each, table in zip(moved.blocks, held.tables, strict=True)]
        return Moved(moved.blocks, pages)
