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
from novalm_jax.kv.pages import PAGE, Copy, Pages
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
      quantum: steps for which one half of the requests decodes before the other half does; 0: all decode together.
    """

    rows: int
    chunk: int
    pass_chunks: int
    page_bytes: tuple[int, ...]
    host_bytes: int
    keeps_prefixes: bool = True
    quantum: int = 0


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
        # Who decodes in the present quantum, and when that is over.
        self._turn: list[Request] = []
        self._turn_ends = 0
        self.preemptions = self.bytes_out = self.host_bytes = self.prefix_tokens = 0

    def reset(self, pages: Pages) -> None:
        """Nobody holds pages any more, and nothing is known of what they hold."""
        self.pages, self.index = pages, PrefixIndex(pages)
        self.host_bytes = 0

    def figures(self) -> dict[str, int]:
        """What is where, by the names of `Report`."""
        pools = self.pages.pools
        return {
            "kv_pages": sum(pool.count for pool in pools),
            "kv_pages_in_use": sum(pool.in_use for pool in pools),
            "kv_pages_peak": sum(pool.most_in_use for pool in pools),
            "kv_page_tokens": PAGE,
            "preemptions": self.preemptions,
            "kv_bytes_moved": self.bytes_out,
            "kv_host_bytes": self.host_bytes,
            "prefix_tokens": self.prefix_tokens,
        }

    def wanted(self, requests: Sequence[Request], spare: int = 0) -> list[int]:
        """Pages of each group with which those that run together first, as many as there are rows, run to their ends,
        beside other work with so many `spare` tokens; at least those in use."""
        first = self.in_rank(requests)[: self._limits.rows]
        most = [self._most(one.most_tokens) for one in first] + ([self._most(spare)] if spare else [])
        return [max(pool.in_use, sum(each[group] for each in most)) for group, pool in enumerate(self.pages.pools)]

    def resize(self, counts: Sequence[int], requests: Sequence[Request]) -> None:
        """So many pages of each group from now on, at least those in use; what is to be kept is in them then."""
        copies = self.pages.resize(counts, [one.held for one in requests if one.held is not None])
        if copies:
            self._mover.copy(copies)

    def fits(self, tokens: int) -> bool:
        """Whether a request of so many tokens, prompt and output, can ever run."""
        return all(need <= pool.count for need, pool in zip(self._most(tokens), self.pages.pools, strict=True))

    def place(self, requests: Sequence[Request], busy: Collection[Request]) -> None:
        """Gives rows to those that wait, the first in rank first, and pages back to those that were moved out. For one
        of higher priority, others have to leave, but for the `busy` ones."""
        for request in requests:
            on_its_way = not (request.prompt_done or request.leader is not None)
            if (request.row is None or on_its_way) and request.used != self._step and request not in busy:
                request.waited += 1
            if (leader := request.leader) is not None and (leader.finish_reason is not None or leader.token_ids):
                # It went on, or ended, without this one.
                request.leader = None
        self._step += 1
        admitted = [one for one in requests if _is_admitted(one)]
        patient = True
        for request in self.in_rank(one for one in requests if one.row is None):
            if not (patient or request.moved) or (request.leader is not None and request.leader.row is None):
                continue
            if self._make_way(request, admitted, busy):
                request.row = min(set(range(self._limits.rows)) - {one.row for one in admitted})
                admitted = [request, *(one for one in admitted if _is_admitted(one) and one is not request)]
            else:
                patient = patient and request.waited <= PATIENCE

    def next_pass(self, requests: Sequence[Request]) -> list[Take]:
        """Parts of prompts to go through the model together, with pages to write to: those first that had the fewest
        passes so far."""
        taken: list[Take] = []
        left = self._limits.pass_chunks
        prompts = [one for one in requests if one.row is not None and one.leader is None and not one.token_ids]
        for request in sorted(prompts, key=lambda one: (-self._urgency(one), one.passes, one.number)):
            if request.row is None:
                # It had to leave for one before it.
                continue
            if not left:
                break
            self._look_up(request)
            start = request.computed
            end = min(len(request.prompt_ids), start + left * self._limits.chunk)
            if self._grow(request, start, end, requests, [take.request for take in taken]):
                taken.append(Take(request, start, end))
                self.prefix_tokens += 0 if request.passes else start
                request.passes += 1
                left -= -(-(end - start) // self._limits.chunk)
        return taken

    def next_decode(self, requests: Sequence[Request], busy: Collection[Request]) -> list[Request]:
        """Those that decode a token now, each with a page to write to. Where pages are short, those last in rank leave
        for the host; `busy` ones stay."""
        chosen: list[Request] = []
        running = self.in_rank(one for one in requests if one.row is not None and one.token_ids)
        for request in self._in_turn(running) if self._limits.quantum else running:
            if request.row is None:
                # It had to leave for one before it.
                continue
            position = request.length - 1
            if self._grow(request, position, position + 1, requests, busy):
                request.used = self._step
                chosen.append(request)
        return chosen

    def _in_turn(self, running: Sequence[Request]) -> list[Request]:
        """The half of those that run that has its turn: in each quantum those that were used longest ago."""
        turn = [one for one in running if one in self._turn]
        if not turn or self._step >= self._turn_ends:
            turn = sorted(running, key=lambda one: one.used)[: -(-len(running) // 2)]
            self._turn_ends = self._step + self._limits.quantum
        self._turn = turn
        return self.in_rank(turn)

    def fork(self, request: Request, follower: Request) -> bool:
        """Gives a follower the pages of the prompt that it shares; False where it has no row for them."""
        follower.leader = None
        if follower.row is None:
            return False
        assert request.held is not None
        follower.held = self.pages.fork(request.held)
        follower.computed, follower.used = request.computed, self._step
        return True

    def computed(self, request: Request, end: int) -> None:
        """The prompt of a request is computed up to there."""
        assert request.held is not None
        request.computed, request.used = end, self._step
        if self._limits.keeps_prefixes:
            self.index.remember(request.held, request.prefix_seed, request.prompt_ids[:end])
        # Others can have what was seen within the pass alone.
        self.pages.trim(request.held, end)

    def release(self, request: Request) -> None:
        """Takes everything from a request."""
        if request.held is not None:
            self.pages.free(request.held)
        if request.moved is not None:
            self.host_bytes -= request.moved.nbytes
        request.row = request.held = request.moved = None

    def make_room(self, tokens: int, requests: Sequence[Request]) -> bool:
        """Moves requests out, but for those of a pass, until one of so many tokens would have room; moves none, and
        returns False, where that cannot be done now."""
        needs, leaving = self._most(tokens), list[Request]()
        while any(need > each for need, each in zip(needs, self._available_without(leaving), strict=True)):
            victim = self._victim(requests, leaving)
            if victim is None:
                return False
            leaving.append(victim)
        return self._move_all_out(leaving, requests)

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

    def _make_way(self, request: Request, admitted: Sequence[Request], busy: Collection[Request]) -> bool:
        """Whether there is a row and room for a request, which gets its pages then. Others of lower priority leave for
        it where that suffices, and nobody does where it does not. All can still run to their ends then."""
        urgencies = [self._urgency(one) for one in admitted if one.row is not None]
        if len(urgencies) >= self._limits.rows and request.priority <= min(urgencies):
            return False
        together = admitted if request.moved is not None else [*admitted, request]
        roomy = self._suffice(together)
        if not roomy and not self._host_suffices(together):
            return False
        self._look_up(request)
        leaving: list[Request] = []
        while not (room := self._has_room(request, admitted, leaving, roomy)):
            victim = self._victim(admitted, [*busy, *leaving], below=request.priority)
            if victim is None:
                break
            leaving.append(victim)
        if not (room and self._move_all_out(leaving, admitted)):
            # For others to use, for as long as this one waits.
            self._let_go(request)
            return False
        if request.moved is not None:
            assert request.held is not None
            there = self.pages.bring_back(request.held, request.moved.what)
            assert there is not None
            self._mover.load(there.pages, request.moved.saved)
            self.host_bytes -= request.moved.nbytes
            request.moved = None
        return True

    def _suffice(self, requests: Sequence[Request]) -> bool:
        """Whether pages suffice for all of these to run to their ends: for one that grows by a pass, while the others
        have what they need between passes."""
        most = [self._most(one.most_tokens) for one in requests]
        for group, (reach, pool) in enumerate(zip(self.pages.reaches, self.pages.pools, strict=True)):
            least = [reach.most_blocks(one.most_tokens, 1) for one in requests]
            grows = max(each[group] - between for each, between in zip(most, least, strict=True))
            if sum(least) + grows > pool.count:
                return False
        return True

    def _host_suffices(self, requests: Sequence[Request]) -> bool:
        """Whether the host has room for all of these but one, whatever they come to need: any of them can be left
        alone with the pages then."""
        sizes = [self._most_bytes(one) for one in requests]
        return sum(sizes) - min(sizes) <= self._limits.host_bytes

    def _has_room(
        self, request: Request, admitted: Sequence[Request], leaving: Collection[Request], roomy: bool
    ) -> bool:
        """Whether a row and pages are left for a request, once those that are `leaving` have left. Where it is not
        `roomy`, pages that all come to need soon are left, too, so that nobody has to leave at once."""
        staying = [one for one in admitted if one.row is not None and one not in leaving]
        if len(staying) >= self._limits.rows:
            return False
        if request.leader is not None:
            return True
        crowd = [] if roomy else staying
        if request.moved is None:
            needs = [self._wants(one) for one in (request, *crowd)]
        else:
            needs = [self._counts(request), *(self._wants(one) for one in (*crowd, *([request] if crowd else [])))]
        free = self._available_without(leaving)
        return all(sum(each) <= there for *each, there in zip(*needs, free, strict=True))

    def _wants(self, request: Request) -> list[int]:
        """Pages of each group that a request comes to need soon: for the rest of its prompt, or for its next token."""
        if request.prompt_done or request.leader is not None:
            return [1] * len(self.pages.pools)
        most = self._most(len(request.prompt_ids))
        return [max(1, need - have) for need, have in zip(most, self._counts(request), strict=True)]

    def _available_without(self, leaving: Iterable[Request]) -> list[int]:
        """Pages of each group that can be taken once these have left."""
        return self.pages.available_without([one.held for one in leaving if one.held is not None])

    def _look_up(self, request: Request) -> None:
        """Before the first pass of a prompt: takes what pages hold of it already."""
        if not _is_new(request):
            return
        held, found = self.index.find(request.prefix_seed, request.prompt_ids)
        if request.held is None or found > request.computed:
            self._let_go(request)
            request.held, request.computed = held, found
        else:
            self.pages.free(held)

    def _let_go(self, request: Request) -> None:
        """Gives back what was looked up."""
        if _is_new(request) and request.held is not None:
            self.pages.free(request.held)
            request.computed = 0

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
        used longest ago, and of these the last in rank. Where it is about pages, one that has some."""
        ranked = self.in_rank(one for one in requests if one.row is not None and one.held is not None)
        if after is not None:
            ranked = ranked[ranked.index(after) + 1 :]
        if below is None:
            free = [one for one in ranked if one not in busy and any(self._counts(one))]
        else:
            free = [one for one in ranked if one not in busy and self._urgency(one) < below]
        oldest = min((one.used for one in free), default=0)
        return next((one for one in reversed(free) if one.used == oldest), None)

    def _counts(self, request: Request) -> list[int]:
        """Pages of each group that a request has, on the device or on the host."""
        if request.moved is not None:
            return [len(each) for each in request.moved.what.blocks]
        return [0] * len(self.pages.pools) if request.held is None else request.held.count()

    def _bytes(self, request: Request) -> int:
        """Of the pages of a request that must not be lost."""
        if _is_new(request):
            return 0
        return sum(count * size for count, size in zip(self._counts(request), self._limits.page_bytes, strict=True))

    def _move_all_out(self, leaving: Sequence[Request], requests: Sequence[Request]) -> bool:
        """Moves requests out; none of them, and False, where the host has no room for all."""
        if self.host_bytes + sum(map(self._bytes, leaving)) > self._limits.host_bytes:
            return False
        return all(self._move_out(one, requests) for one in leaving)

    def _move_out(self, request: Request, requests: Sequence[Request]) -> bool:
        """Moves the pages of a request to the host, and takes its row; False where there is no room."""
        size = self._bytes(request)
        if self.host_bytes + size > self._limits.host_bytes:
            return False
        self._let_go(request)
        if size:
            assert request.held is not None
            what = self.pages.take_out(request.held)
            request.moved = MovedOut(what, self._mover.save(what.pages), size)
            self.host_bytes += size
            self.bytes_out += size
            self.preemptions += 1
        for one in (request, *(one for one in requests if one.leader is request)):
            one.row = None
        return True


def _is_admitted(request: Request) -> bool:
    """Whether pages are counted on for it: it has a row, or waits to come back."""
    return request.row is not None or request.moved is not None


def _is_new(request: Request) -> bool:
    """Whether nothing was computed for it, and nobody else does that."""
    return not (request.passes or request.token_ids) and request.leader is None
