"""Which requests run: who gets a row and pages, whose prompt goes on, who decodes, and who has to wait on the host.

Plain Python: decides by numbers of pages and tokens, and asks a `Mover` to move what must move. Refuses to know the
device, text and time: waiting is counted in steps. A request is in one of these states, which its fields tell: it
waits (no row), it is moved out (no row, `moved`), its prompt is on its way (a row, `computed` short of the prompt), or
it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from novalm_jax.engine.request import MovedOut, Request
from novalm_jax.kv.pages import Copy, Pages
from novalm_jax.kv.prefix import PrefixIndex

AGING = 64
"""Steps of waiting that count as much as one level of priority, so that nobody waits for ever."""

PATIENCE = 256
"""Steps for which requests that fit may pass by one that does not fit yet."""


class Mover(Protocol):
    """What brings pages to the host and back, and copies them; done before anything else is run."""

    def save(self, pages: Sequence[Sequence[int]]) -> Any:
        """The content of these pages of each group, which are let go of."""
        ...

    def load(self, pages: Sequence[Sequence[int]], saved: Any) -> None:
        """Fills these pages with what was saved of as many."""
        ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies pages."""
        ...


@dataclass(frozen=True)
class Limits:
    """What there is room for.

    Attributes:
      rows: sequences that have pages on the device, at most.
      chunk: tokens of a part of a prompt.
      pass_chunks: parts that may go through the model together.
      page_bytes: of a page of each group, in all its layers.
      host_bytes: for pages that are moved out.
      keeps_prefixes: whether prompts that begin alike share pages.
    """

    rows: int
    chunk: int
    pass_chunks: int
    page_bytes: tuple[int, ...]
    host_bytes: int
    keeps_prefixes: bool = True


class Take(NamedTuple):
    """Tokens of a request's prompt that go through the model now."""

    request: Request
    start: int
    end: int


class Scheduler:
    """Decides for the requests of one engine.

    Attributes:
      pages: who holds which.
      index: beginnings of prompts that pages hold.
      preemptions: how often pages of a request were moved to the host.
      bytes_out: of what was moved there.
      host_bytes: of what is there now.
      prefix_tokens: tokens of prompts that pages had already.
    """

    def __init__(self, pages: Pages, limits: Limits, mover: Mover):
        self.pages = pages
        self.index = PrefixIndex(pages)
        self._limits = limits
        self._mover = mover
        self._step = 0
        self.preemptions = self.bytes_out = self.host_bytes = self.prefix_tokens = 0

    def reset(self, pages: Pages) -> None:
        """Nobody holds pages any more, and nothing is known of what they hold."""
        self.pages, self.index = pages, PrefixIndex(pages)
        self.host_bytes = 0

    def fits(self, tokens: int) -> bool:
        """Whether a request of so many tokens, prompt and output, can ever run."""
        return all(need <= pool.count for need, pool in zip(self._most(tokens), self.pages.pools, strict=True))

    def place(self, requests: Sequence[Request], busy: Collection[Request]) -> None:
        """Gives rows to those that wait, the first in rank first, and pages back to those that were moved out. For one
        of higher priority, others have to leave, but for the `busy` ones."""
        self._step += 1
        for request in requests:
            if (leader := request.leader) is not None and (leader.finish_reason is not None or leader.token_ids):
                # It went on, or ended, without this one.
                request.leader = None
        rows = set(range(self._limits.rows)) - {one.row for one in requests if one.row is not None}
        patient = True
        for request in self.in_rank(one for one in requests if one.row is None):
            request.waited += 1
            if not (patient or request.moved) or (request.leader is not None and request.leader.row is None):
                continue
            if self._is_safe(request, requests):
                while not (rows and self._get_pages(request, requests)):
                    victim = self._victim(requests, busy, below=request.priority)
                    row = None if victim is None else victim.row
                    if victim is None or row is None or not self._move_out(victim, requests):
                        break
                    rows.add(row)
                else:
                    request.row = rows.pop()
                    continue
            patient = patient and request.waited <= PATIENCE

    def next_pass(self, requests: Sequence[Request]) -> list[Take]:
        """Parts of prompts to go through the model together, with pages to write to: those first that had the fewest
        passes so far."""
        taken: list[Take] = []
        left = self._limits.pass_chunks
        prompts = [one for one in requests if one.row is not None and one.leader is None and not one.token_ids]
        for request in sorted(prompts, key=lambda one: (-self._urgency(one), one.passes, one.number)):
            if not left:
                break
            self._look_up(request)
            start = request.computed
            end = min(len(request.prompt_ids), start + left * self._limits.chunk)
            if self._grow(request, start, end, requests, [take.request for take in taken]):
                taken.append(Take(request, start, end))
                request.passes += 1
                left -= -(-(end - start) // self._limits.chunk)
        return taken

    def next_decode(self, requests: Sequence[Request], busy: Collection[Request]) -> list[Request]:
        """Those that decode a token now, each with a page to write to. Where pages are short, those last in rank leave
        for the host; `busy` ones stay."""
        chosen: list[Request] = []
        for request in self.in_rank(one for one in requests if one.row is not None and one.token_ids):
            if request.row is None:
                # It had to leave for one before it.
                continue
            position = request.length - 1
            if self._grow(request, position, position + 1, requests, [*busy, *chosen]):
                request.used = self._step
                chosen.append(request)
        return chosen

    def fork(self, request: Request, follower: Request) -> bool:
        """Gives a follower the pages of the prompt that it shares; False where it has no row for them."""
        follower.leader = None
        if follower.row is None:
            return False
        assert request.held is not None
        follower.held, follower.computed = self.pages.fork(request.held), len(request.prompt_ids)
        return True

    def computed(self, request: Request, end: int) -> None:
        """The prompt of a request is computed up to there."""
        assert request.held is not None
        request.computed = end
        if self._limits.keeps_prefixes:
            self.index.remember(request.held, request.prefix_seed, request.prompt_ids[:end])

    def release(self, request: Request) -> None:
        """Takes everything from a request."""
        if request.held is not None:
            self.pages.free(request.held)
        if request.moved is not None:
            self.host_bytes -= request.moved.nbytes
        request.row = request.held = request.moved = None

    def make_room(self, tokens: int, requests: Sequence[Request]) -> bool:
        """Moves requests out, but for those of a pass, until one of so many tokens would have room; False where that
        cannot be done now."""
        while any(need > pool.available for need, pool in zip(self._most(tokens), self.pages.pools, strict=True)):
            victim = self._victim(requests, ())
            if victim is None or not self._move_out(victim, requests):
                return False
        return True

    def in_rank(self, requests: Iterable[Request]) -> list[Request]:
        """The most urgent first, then in the order of their arrival."""
        return sorted(requests, key=lambda one: (-self._urgency(one), one.number))

    def _urgency(self, request: Request) -> int:
        return request.priority + request.waited // AGING

    def _most(self, tokens: int) -> list[int]:
        """Pages of each group that a request of so many tokens needs at most."""
        together = self._limits.chunk * self._limits.pass_chunks
        return [reach.most_blocks(tokens, min(tokens, together)) for reach in self.pages.reaches]

    def _most_bytes(self, request: Request) -> int:
        most = self._most(request.most_tokens)
        return sum(need * size for need, size in zip(most, self._limits.page_bytes, strict=True))

    def _is_safe(self, request: Request, requests: Sequence[Request]) -> bool:
        """Whether all can run to their ends with this one, whatever they come to need: either pages suffice for all of
        them, or the host has room for all but one."""
        together = [one for one in requests if one.row is not None or one.moved is not None]
        together += [] if request.moved is not None else [request]
        needs = [self._most(one.most_tokens) for one in together]
        if all(sum(each) <= pool.count for each, pool in zip(zip(*needs, strict=True), self.pages.pools, strict=True)):
            return True
        sizes = [self._most_bytes(one) for one in together]
        return sum(sizes) - min(sizes) <= self._limits.host_bytes

    def _get_pages(self, request: Request, requests: Sequence[Request]) -> bool:
        """Brings back what was moved out, if a page more is left to go on; of a prompt, says whether it has room."""
        if request.moved is not None:
            request.held = request.held or self.pages.new()
            short = [
                len(each) + 1 - pool.available
                for each, pool in zip(request.moved.what.blocks, self.pages.pools, strict=True)
            ]
            alone = not any(one.row is not None for one in requests)
            if max(short) > (1 if alone else 0):
                return False
            there = self.pages.bring_back(request.held, request.moved.what)
            if there is None:
                return False
            self._mover.load(there.pages, request.moved.saved)
            self.host_bytes -= request.moved.nbytes
            request.moved = None
            return True
        if request.leader is not None:
            return True
        self._look_up(request)
        assert request.held is not None
        growing = sum(one.row is not None for one in requests)
        needs = zip(self._most(len(request.prompt_ids)), request.held.count(), self.pages.pools, strict=True)
        if not growing or all(need - have + growing <= pool.available for need, have, pool in needs):
            return True
        # One that waits holds nothing: those that run could not take it.
        self.pages.free(request.held)
        self.prefix_tokens -= request.computed
        request.held, request.computed = None, 0
        return False

    def _look_up(self, request: Request) -> None:
        """Before the first pass of a prompt: takes what pages hold of it already."""
        if request.passes:
            return
        held, found = self.index.find(request.prefix_seed, request.prompt_ids)
        if request.held is None or found > request.computed:
            self.prefix_tokens += found - request.computed
            if request.held is not None:
                self.pages.free(request.held)
            request.held, request.computed = held, found
        else:
            self.pages.free(held)

    def _grow(
        self, request: Request, start: int, end: int, requests: Sequence[Request], busy: Collection[Request]
    ) -> bool:
        """Pages to write to; others that come later in rank leave for them, or else the request itself does."""
        assert request.held is not None
        while (copies := self.pages.grow(request.held, start, end)) is None:
            victim = self._victim(requests, busy, after=request)
            if victim is None or not self._move_out(victim, requests):
                others = any(one.row is not None and one is not request for one in requests)
                if others and request not in busy:
                    self._move_out(request, requests)
                return False
        if copies:
            self._mover.copy(copies)
        return True

    def _victim(
        self,
        requests: Sequence[Request],
        busy: Collection[Request],
        *,
        below: int | None = None,
        after: Request | None = None,
    ) -> Request | None:
        """Who leaves next: of those that come after another one in rank, or that are less urgent, the one that was
        used longest ago, and of these the last in rank."""
        ranked = self.in_rank(one for one in requests if one.row is not None and one.held is not None)
        if after is not None:
            ranked = ranked[ranked.index(after) + 1 :]
        free = [one for one in ranked if one not in busy and (below is None or self._urgency(one) < below)]
        oldest = min((one.used for one in free), default=0)
        return next((one for one in reversed(free) if one.used == oldest), None)

    def _move_out(self, request: Request, requests: Sequence[Request]) -> bool:
        """Moves the pages of a request to the host, and takes its row; False where there is no room."""
        assert request.held is not None
        counts = request.held.count()
        size = sum(count * each for count, each in zip(counts, self._limits.page_bytes, strict=True))
        if self.host_bytes + size > self._limits.host_bytes:
            return False
        what = self.pages.take_out(request.held)
        request.moved = MovedOut(what, self._mover.save(what.pages), size)
        for one in (request, *(one for one in requests if one.leader is request)):
            one.row = None
        self.host_bytes += size
        self.bytes_out += size
        self.preemptions += 1
        return True
