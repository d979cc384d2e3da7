"""Which pages hold the beginnings of prompts: found again by their tokens, block by block.

A block is known by a digest of all tokens up to its end and of what they were computed with, a hash chain; tokens are
compared as well, so that two beginnings of one digest are never taken for each other. Plain Python; knows no device.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from novalm_jax.kv.pages import NONE, PAGE, Held, Pages

Digest = Callable[[bytes], bytes]


def _blake2b(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


@dataclass(eq=False)
class _Block:
    """A block of a prompt.

    Attributes:
      digest: its name.
      before: the block before it; for the first one what all are computed with.
      tokens: of it.
      pages: that hold it in each group, `NONE` where that is gone.
      after: blocks that are known to follow.
    """

    digest: bytes
    before: _Block | bytes
    tokens: tuple[int, ...]
    pages: list[int]
    after: int = 0

    @property
    def useless(self) -> bool:
        """Whether no page holds it or what follows it."""
        return not self.after and all(page == NONE for page in self.pages)


class PrefixIndex:
    """Blocks of prompts, and the pages that hold them."""

    def __init__(self, pages: Pages, digest: Digest = _blake2b):
        """Over these pages, which it remembers; `digest` makes names of blocks."""
        self._pages = pages
        self._digest = digest
        self._blocks: dict[bytes, _Block] = {}
        self._block_of: list[dict[int, _Block]] = [{} for _ in pages.pools]
        for group, pool in enumerate(pages.pools):
            pool.forget = partial(self._forgotten, group)
            pool.renumber = partial(self._renumbered, group)

    def __len__(self) -> int:
        """Blocks that are known."""
        return len(self._blocks)

    def find(self, seed: bytes, tokens: Sequence[int]) -> tuple[Held, int]:
        """The longest beginning of a prompt that pages hold.

        Args:
          seed: stands for what the tokens are computed with.
          tokens: of the prompt, at least one.

        Returns:
          A sequence that shares these pages, and how many tokens need not be computed: all but the last at most, as
          what follows a prompt is known from computing its last token alone.
        """
        chain, held = self._chain(seed, tokens), self._pages.new()
        count = len(chain)
        while count:
            start = min(count * PAGE, len(tokens) - 1)
            firsts = [reach.first(start) // PAGE for reach in self._pages.reaches]
            missing = [
                number
                for group, first in enumerate(firsts)
                for number in range(first, count)
                if chain[number].pages[group] == NONE
            ]
            if not missing:
                tables = [
                    [block.pages[group] if number >= first else NONE for number, block in enumerate(chain[:count])]
                    for group, first in enumerate(firsts)
                ]
                self._pages.share(held, tables)
                held.remembered, held.latest = count, chain[count - 1]
                return held, start
            # Shorter beginnings see back further, so that they lack it too, unless they end before it.
            count = min(missing)
        return held, 0

    def remember(self, held: Held, seed: bytes, tokens: Sequence[int]) -> None:
        """Takes note of the full blocks of a prompt of which these first tokens are computed."""
        before: _Block | bytes = held.latest if isinstance(held.latest, _Block) else seed
        if isinstance(before, _Block) and self._blocks.get(before.digest) is not before:
            # Gone meanwhile, and what follows would not be found.
            return
        for block in range(held.remembered, len(tokens) // PAGE):
            content = _content(tokens, block)
            digest = self._name(before, content)
            known = self._blocks.get(digest)
            if known is None:
                known = self._blocks[digest] = _Block(digest, before, content, [NONE] * len(self._pages.pools))
                if isinstance(before, _Block):
                    before.after += 1
            elif known.tokens != content or known.before != before:
                # Another beginning has this name.
                break
            for group, table in enumerate(held.tables):
                if known.pages[group] == NONE and table[block] != NONE:
                    known.pages[group] = table[block]
                    self._block_of[group][table[block]] = known
                    self._pages.pools[group].remember(table[block])
            held.remembered, held.latest, before = block + 1, known, known
        self._prune(before)

    def _chain(self, seed: bytes, tokens: Sequence[int]) -> list[_Block]:
        """The blocks that are known of a prompt, from the first one on."""
        chain: list[_Block] = []
        before: _Block | bytes = seed
        for number in range(len(tokens) // PAGE):
            content = _content(tokens, number)
            block = self._blocks.get(self._name(before, content))
            if block is None or block.tokens != content or block.before != before:
                break
            chain.append(block)
            before = block
        return chain

    def _name(self, before: _Block | bytes, tokens: Sequence[int]) -> bytes:
        digest = before.digest if isinstance(before, _Block) else before
        return self._digest(digest + array("q", tokens).tobytes())

    def _forgotten(self, group: int, page: int) -> None:
        """The content of a page is about to go."""
        block = self._block_of[group].pop(page)
        block.pages[group] = NONE
        self._prune(block)

    def _renumbered(self, group: int, page: int, to: int) -> None:
        """The content of a page goes into another one."""
        block = self._block_of[group].pop(page)
        block.pages[group] = to
        self._block_of[group][to] = block

    def _prune(self, block: _Block | bytes) -> None:
        """Lets go of a block that leads nowhere, and of those before it that lead nowhere then."""
        while isinstance(block, _Block) and block.useless:
            del self._blocks[block.digest]
            block = block.before
            if isinstance(block, _Block):
                block.after -= 1


def _content(tokens: Sequence[int], block: int) -> tuple[int, ...]:
    return tuple(tokens[block * PAGE : (block + 1) * PAGE])
