"""What options of all kinds share: their types, and the checks that make values plain or refuse them.

Knows values alone. Refuses to know files, models and JAX, as all of this package does, so that `--help` is quick.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from novalm_jax.errors import OptionError, UserError
from novalm_jax.units import parse_size

Dtype = Literal["float32", "bfloat16"]
PolicyName = Literal["default", "decayed", "lfu", "lru"]
Kernels = Literal["auto", "native", "xla"]


@dataclass(frozen=True)
class Checked:
    """Options whose numbers are checked and made plain, whatever types they are given in."""

    _error: ClassVar[type[UserError]] = OptionError

    def _whole(self, name: str, least: int, most: int | None = None) -> None:
        """Makes the field an int within these bounds; None stays where it is the default."""
        value = getattr(self, name)
        if value is None and self.__dataclass_fields__[name].default is None:
            return
        number = as_whole(value)
        if number is None or number < least or (most is not None and number > most):
            raise self._error(f"{name}: expected {number_range(least, most)}, got {shown(value)}.")
        object.__setattr__(self, name, number)

    def _real(self, name: str, least: float = -math.inf, most: float = math.inf) -> None:
        """Makes the field a finite float within these bounds; None stays where it is the default."""
        value = getattr(self, name)
        if value is None and self.__dataclass_fields__[name].default is None:
            return
        number = as_real(value)
        if number is None or not math.isfinite(number):
            raise self._error(f"{name}: expected a number, got {shown(value)}.")
        if not least <= number <= most:
            bounds = f"of at least {least:g}" if least == 0 else "above 0"
            bounds += f" and at most {most:g}" if most < math.inf else ""
            raise self._error(f"{name}: expected a number {bounds}, got {value}.")
        object.__setattr__(self, name, number)


def check_dtype(dtype: str) -> None:
    """Refuses a dtype that models are not computed in.

    Raises:
      OptionError: not one of `Dtype`.
    """
    if dtype not in get_args(Dtype):
        raise OptionError(f"dtype: {dtype!r} is not one of {', '.join(get_args(Dtype))}.")


def size_of(options: Any, name: str) -> int | None:
    """The bytes, or bytes a second, of a field."""
    value = getattr(options, name)
    return (
        None if value is None else parse_size(value.removesuffix("/s") if isinstance(value, str) else value, name=name)
    )


def no_more_choices_than_experts(chosen: int, experts: int) -> None:
    """Refuses a model whose tokens choose more experts than a layer has."""
    if chosen > experts:
        raise OptionError(f"experts_per_token: {chosen} is more than experts, which is {experts}.")


def one_of(options: object, name: str) -> None:
    """Refuses a value that the type of the field does not list."""
    value, allowed = getattr(options, name), get_args(get_type_hints(type(options))[name])
    if value not in allowed:
        raise OptionError(f"{name}: {shown(value)} is not one of {', '.join(allowed)}.")


def positive(name: str, value: object) -> None:
    """Refuses what does not count rows or tokens: those are int32 on the device."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise OptionError(f"{name}: expected {number_range(1, 2**31 - 1)}, got {shown(value)}.")


def as_path(name: str, value: object) -> Path:
    """The path of a file; whether it can be there is not looked at.

    Raises:
      OptionError: no path. `name` is the option to blame.
    """
    given = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(given, str) or not given or "\0" in given:
        raise OptionError(f"{name}: expected the path of a file, got {shown(value)}.")
    return Path(given)


def as_text(value: object) -> str | None:
    return value if type(value) is str else None


def as_whole(value: object) -> int | None:
    """A whole number of any type, numpy's too, as an int; None for anything else. A bool is no number."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def as_real(value: object) -> float | None:
    """As `as_whole`, for a number with or without a fraction; None also for an integer that no float can hold."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def number_range(least: int, most: int | None) -> str:
    return f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}")


def shown(value: object) -> str:
    """A value for a message, cut where it is long. Python refuses to write integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
