"""Sizes as people write them ("8GiB", "500MB", "90%") and as programs need them (bytes)."""

from __future__ import annotations

import math
import re

from novalm_jax.errors import OptionError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z%]*)\s*", re.IGNORECASE)


def parse_size(size: int | str, *, total: int | None = None, name: str = "size") -> int:
    """Bytes of a size: `1GB` is 1000**3, `1GiB` is 1024**3, a bare number is bytes, `90%` is that part of `total`.

    Raises:
      OptionError: not a size, negative, larger than any, or a percentage where no total is known. `name` is the option
        to blame.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise OptionError(f"{name}: expected a size such as 8GiB, 500MB, 90% or a number of bytes, got {size!r}.")
    if isinstance(size, int):
        if size < 0:
            raise OptionError(f"{name}: {size} is negative; give a number of bytes of at least 0.")
        return size
    match = _SIZE.fullmatch(size)
    unit = match.group(2).lower() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise OptionError(f"{name}: {size!r} is not a size. Write for example 8GiB, 500MB, 90% or a number of bytes.")
    number = float(match.group(1))
    if unit == "%":
        if total is None:
            raise OptionError(f"{name}: {size!r} needs a memory to be a part of; give a size such as 8GiB instead.")
        if number > 100:
            raise OptionError(f"{name}: {size!r} is more than all of the memory; give at most 100%.")
        return math.floor(total * number / 100)
    if not math.isfinite(number * _UNITS[unit]):
        raise OptionError(f"{name}: {size!r:.60} is larger than any memory. Write for example 8GiB.")
    return math.floor(number * _UNITS[unit])


def format_size(size: int) -> str:
    """A size for people, in binary units: `format_size(3 * 2**29)` is "1.50 GiB"."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{size} B" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"
