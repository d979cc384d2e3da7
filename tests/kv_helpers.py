"""What pages hold, kept in Python: in place of keys a number that stands for a token and all those before it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from novalm_jax.kv.pages import NONE, PAGE, Copy, Held, Pages


def values_of(tokens: Iterable[int], seed: bytes = b"") -> list[int]:
    """What a model would keep of each token: another number where any token before it, or the seed, is another."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=hash(seed)))[1:]


class Contents:
    """The content of all pages; also a `Mover` of it."""

    def __init__(self, pages: Pages):
        self.pages = pages
        self._of: dict[tuple[int, int], list[Any]] = defaultdict(lambda: [None] * PAGE)

    def write(self, held: Held, start: int, values: Sequence[Any]) -> None:
        """Puts values in place, from position `start` on; others who see the page have the same ones there."""
        for group, table in enumerate(held.tables):
            for position, value in enumerate(values, start):
                page = table[position // PAGE]
                kept = self._of[group, page]
                assert self.pages.pools[group].users(page) == 1 or kept[position % PAGE] == value
                kept[position % PAGE] = value

    def check(self, held: Held, start: int, values: Sequence[Any]) -> None:
        """A sequence with these values, the whole of it, has all of them that positions from `start` on see."""
        for group, (reach, table) in enumerate(zip(self.pages.reaches, held.tables, strict=True)):
            first = reach.first(start)
            for block in range(first // PAGE, -(-len(values) // PAGE)):
                begin, end = max(first, block * PAGE), min(len(values), (block + 1) * PAGE)
                assert table[block] != NONE
                kept = self._of[group, table[block]]
                assert kept[begin - block * PAGE : end - block * PAGE] == values[begin:end]

    def save(self, pages: Sequence[Sequence[int]]) -> Any:
        return [[list(self._of[group, page]) for page in each] for group, each in enumerate(pages)]

    def load(self, pages: Sequence[Sequence[int]], saved: Any) -> None:
        assert [len(each) for each in pages] == [len(each) for each in saved]
        for group, (ids, contents) in enumerate(zip(pages, saved, strict=True)):
            self._of.update({(group, page): list(content) for page, content in zip(ids, contents, strict=True)})

    def resize(self, counts: Sequence[int]) -> None:
        """What lies in pages that there are no more is lost."""
        for group, page in [(group, page) for group, page in self._of if page >= counts[group]]:
            del self._of[group, page]

    def copy(self, copies: Sequence[Copy]) -> None:
        # Copies are made many at a time, so that none may depend on another.
        sources = {(group, source) for group, source, _ in copies}
        targets = [(group, target) for group, _, target in copies]
        assert len(set(targets)) == len(targets) and not sources & set(targets)
        for group, source, target in copies:
            self._of[group, target] = list(self._of[group, source])


def check_books(pages: Pages, holders: Iterable[Held | None]) -> None:
    """Every page has as many users as sequences hold it."""
    held = [each for each in holders if each is not None]
    for group, pool in enumerate(pages.pools):
        users = Counter(page for each in held for page in each.tables[group] if page != NONE)
        assert [pool.users(page) for page in range(pool.count)] == [users[page] for page in range(pool.count)]
        assert pool.in_use == len(users)
