"""Memory of the device goes to pages where requests need them, and else to slots for experts.

Of a model that is streamed there are a few proportions, each with programs of its own: the one that the model was
placed with has most pages, each other one about half of those before, and experts in the memory that they leave. Works
between steps, on the thread that steps; pages keep what they hold, and experts come again as they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from operator import le

from novalm_jax.engine.executor import Executor
from novalm_jax.engine.placement import Placement
from novalm_jax.engine.request import Request
from novalm_jax.engine.scheduler import Scheduler
from novalm_jax.engine.streamed import StreamedExecutor
from novalm_jax.engine.streamed_programs import StreamedPrograms
from novalm_jax.options import EngineOptions

PROPORTIONS = 4
"""How many there are at most: the fewest pages are an eighth of the most."""

GAIN = 16
"""One with fewer pages has more slots by at least this part of those before: programs of its own are worth it."""

PATIENCE = 64
"""Steps for which pages stay that no request needs: experts that left have to come again."""


class Exchange:
    """Says how many pages there are, and changes it.

    Attributes:
      count: how often memory changed hands.
    """

    def __init__(self, placement: Placement, executor: StreamedExecutor):
        """Takes what the model was placed with, whose programs the executor runs."""
        self.count = 0
        self._executor = executor
        self._widest = placement
        self._placements = {placement.pages: placement}
        # Of each proportion the pages of each group, the fewest first.
        self._proportions = {pages: placement.page_counts(pages) for pages in proportions(placement)}
        self._unneeded = 0

    @property
    def placement(self) -> Placement:
        """What is where now."""
        # Asked for by any thread, and found on the one that steps.
        placements = tuple(self._placements.values())
        return next(one for one in placements if one.programs is self._executor.programs)

    @property
    def most_bytes(self) -> int:
        """Of the device, that were taken at any time."""
        return max(one.plan.device_bytes for one in tuple(self._placements.values()))

    def settle(self, scheduler: Scheduler, requests: Sequence[Request], spare: int = 0) -> None:
        """Between steps, with no pass on its way: as many pages as requests need that can run together, beside work
        with so many `spare` tokens. More come at once, and go again once nobody has needed them for some time."""
        wanted, present = scheduler.wanted(requests, spare), self.placement.pages
        enough = (pages for pages, counts in self._proportions.items() if all(map(le, wanted, counts)))
        pages = next(enough, self._widest.pages)
        self._unneeded = self._unneeded + 1 if pages < present else 0
        # Where no expert has come yet, none is lost.
        if pages > present or self._unneeded > PATIENCE or (pages < present and self._executor.without_experts):
            self._change(pages, scheduler, requests)

    def everything(self) -> list[Callable[[], object]]:
        """As `Programs.everything`, for all proportions, and for the ways between them."""
        placed = [self._placed(pages) for pages in list(self._proportions)]
        programs = [_streamed(one) for one in placed if one is not None]
        jobs = [job for each in programs for job in each.everything()]
        for before, after in permutations(programs, 2):
            for layer, group in enumerate(after.groups):
                jobs.append(partial(before.resize_pages, layer, after.shapes.pages[group]))
        return jobs

    def _change(self, pages: int, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        if (placement := self._placed(pages)) is not None:
            change_memory(_streamed(placement), self._executor, scheduler, requests)
            self._unneeded = 0
            self.count += 1

    def _placed(self, pages: int) -> Placement | None:
        """Found when it is needed first, as that compiles programs; None, once, where they take too much."""
        if pages not in self._placements:
            placement = self._widest.with_pages(pages)
            if not placement.plan.fits(placement.budgets.device):
                del self._proportions[pages]
                return None
            self._placements[pages] = placement
        return self._placements[pages]


def change_memory(
    programs: StreamedPrograms, executor: StreamedExecutor, scheduler: Scheduler, requests: Sequence[Request]
) -> None:
    """Between steps: as many pages and slots as these programs have. Pages in use have room."""
    counts = programs.shapes.pages
    # Books know of no page that is not there.
    fewer = list(map(min, counts, executor.programs.shapes.pages))
    scheduler.resize(fewer, requests)
    executor.change(programs)
    scheduler.resize(counts, requests)


def exchange_for(placement: Placement, executor: Executor, options: EngineOptions) -> Exchange | None:
    """None where memory cannot be used in another way, or options say how much of it pages take."""
    if not isinstance(executor, StreamedExecutor) or options.kv_memory != "auto" or len(proportions(placement)) == 1:
        return None
    return Exchange(placement, executor)


def proportions(placement: Placement) -> list[int]:
    """Numbers of pages that are worth programs of their own, up to those that a streamed model was placed with."""
    found = [placement.pages]
    while len(found) < PROPORTIONS and (fewer := -(-found[0] // 2)) < found[0]:
        before, slots = placement.slots_beside(found[0]), placement.slots_beside(fewer)
        if slots - before < max(1, before / GAIN):
            break
        found = [fewer, *found]
    return found


def _streamed(placement: Placement) -> StreamedPrograms:
    assert isinstance(placement.programs, StreamedPrograms)
    return placement.programs
