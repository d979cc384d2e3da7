"""Where experts may lie and how they may come, as a grid: every pair of values, or all of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple


class Cell(NamedTuple):
    """One way to run a model; all values are names.

    Attributes:
      slots: how many experts have room on the device: "all" of them, "half", a "quarter", or the "least" that runs.
      host: how many have room in host memory: "all", "half" or "none".
      prefetch, policy, dtype: as in `EngineOptions`.
    """

    slots: str
    host: str
    prefetch: str
    policy: str
    dtype: str

    def __str__(self) -> str:
        return "-".join(self)


SLOTS = ("half", "quarter", "least")
OTHERS = (("all", "half", "none"), ("lookahead", "off"), ("default", "lru"), ("float32", "bfloat16"))


def pairwise(factors: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows with one value of each factor, so that every pair of values of two factors stands in one of them: always
    the next row that has most of what is missing."""
    rows = list(itertools.product(*factors))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(missing.intersection(_pairs(row)))))
        missing.difference_update(_pairs(chosen[-1]))
    return chosen


def _pairs(row: Sequence[Any]) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(enumerate(row), 2))


def pairwise_cells(turn: int) -> list[Cell]:
    """A pairwise array of cells, another one for each `turn`.

    With all experts on the device nothing streams, and nothing else matters. So the pairs of all other values are in
    cells that stream, and each of those values is in one that does not.
    """
    draw = random.Random(turn)
    factors = [draw.sample(values, len(values)) for values in (SLOTS, *OTHERS)]
    still = [tuple(values[row % len(values)] for values in factors[1:]) for row in range(max(map(len, OTHERS)))]
    return [Cell("all", *row) for row in still] + [Cell(*row) for row in pairwise(factors)]


def few_cells(turn: int) -> list[Cell]:
    """Of the pairwise array of a `turn`: one cell that does not stream, and one of either dtype that does."""
    cells = pairwise_cells(turn)
    kinds = [[cell for cell in cells if cell.slots == "all"]]
    kinds += [[cell for cell in cells if cell.slots != "all" and cell.dtype == dtype] for dtype in OTHERS[-1]]
    return [kind[turn % len(kind)] for kind in kinds]


def all_cells() -> list[Cell]:
    """Every cell that streams."""
    return [Cell(*row) for row in itertools.product(SLOTS, *OTHERS)]
