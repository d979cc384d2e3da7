"""Tables as people read them in a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of rows of equal length, each column to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(part.rjust(width) for part, width in zip(row, widths, strict=True)) for row in rows]
