"""Faults that are put into the product on purpose, and what every check of such a fault uses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from novalm_jax.errors import NovaError

Patch = pytest.MonkeyPatch
Check = Callable[[Path], None]
"""Takes an empty folder, and raises where the product has the fault."""


@dataclass(frozen=True)
class Fault:
    """A fault to put into the product, the check that must see it, and what the check then says (a pattern)."""

    check: Check
    apply: Callable[[Patch], None]
    says: str


class FarOff(AssertionError):
    """Numbers are off by `times` what is allowed."""

    def __init__(self, what: str, times: float):
        super().__init__(f"{what}: off by {times:.3g} times the tolerance")
        self.times = times


def near(found: Any, expected: Any, what: str, tolerance: float = 1e-4) -> None:
    """Fails unless all of `found` is within `tolerance` of what is expected."""
    off = np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).max() / tolerance
    if not off <= 1:
        raise FarOff(what, float("inf") if np.isnan(off) else float(off))


def refused(call: Callable[[], Any], kind: type[NovaError], says: str) -> None:
    """Fails unless `call` raises an error of this kind that says so."""
    try:
        call()
    except Exception as error:
        assert isinstance(error, kind) and re.search(says, str(error)), f"refused with {error!r}"
    else:
        raise AssertionError(f"not refused, though {says!r}")


def see(fault: Fault, folder: Path, patch: Patch) -> None:
    """Fails unless the check fails for the reason that the fault gives it."""
    fault.apply(patch)
    # JAX keeps what it traced: a program from before the fault must not hide it, and none with it may stay behind.
    jax.clear_caches()
    try:
        with pytest.raises((AssertionError, NovaError), match=fault.says) as caught:
            fault.check(folder)
    finally:
        jax.clear_caches()
    if isinstance(caught.value, FarOff):
        assert caught.value.times > 10


def checks_of(faults: list[Fault]) -> list[Check]:
    """Each check once, in order."""
    return list(dict.fromkeys(fault.check for fault in faults))


def name_of(case: Any) -> str:
    """The name of a check or a fault in a list of tests."""
    return f"{case.check.__name__}-{case.apply.__name__}" if isinstance(case, Fault) else case.__name__
