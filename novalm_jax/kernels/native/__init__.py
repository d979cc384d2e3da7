"""Products of few rows and their attention, in C++, on the CPU.

XLA's CPU backend copies a matrix out of its stack, in one thread, before it multiplies it, and takes several times as
long as reading does for the bfloat16 products of few rows. These custom calls read matrices where they lie. Products of
a row do not depend on which other rows there are, in which slot its matrix lies, or how many threads compute; they are
not the bits of XLA's own products.

Knows rows and matrices, and whether the code can be had on this machine. Refuses to know what they are products for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.errors import OptionError
from novalm_jax.kernels.native.build import BuildError, load
from novalm_jax.options import Kernels

_log = logging.getLogger("novalm_jax")

FEW_ROWS = 64
"""From so many rows on XLA multiplies: only fewer leave it waiting for memory."""

_STEP = 32
"""Inputs that the code reads at a time; it pads rows to a multiple of them."""


def choose_kernels(asked: Kernels) -> Literal["native", "xla"]:
    """What this process computes with: builds the native code, or says once why it cannot be had.

    Raises:
      OptionError: the native code is asked for, and cannot be had.
    """
    if asked == "xla":
        return "xla"
    platform = jax.default_backend()
    if platform != "cpu":
        if asked == "native":
            raise OptionError(f"kernels: native ones are for the CPU, and JAX computes on {platform}; use auto.")
        return "xla"
    try:
        load()
    except BuildError as error:
        if asked == "native":
            raise OptionError(f"kernels: the native ones cannot be had: {error} Or use auto.") from error
        _warn_once(str(error))
        return "xla"
    return "native"


@cache
def _warn_once(reason: str) -> None:
    _log.warning("kernels: XLA computes everything, and decodes several times slower: %s", reason)


def rows_times(
    x: jax.Array, slots: jax.Array, stacks: Sequence[jax.Array], inputs_first: bool
) -> tuple[jax.Array, ...]:
    """Each choice's row of x times its matrix of each stack, added up in float32, whatever the dtype of x: `[n, o]`.

    Args:
      x: `[t, i]`, float32 or bfloat16.
      slots: int32 `[n]`, where n is a multiple of t: matrices of the first row, then those of the second, and so on. A
        negative one gives zeros; one that is not there ends the program with an error.
      stacks: `[s, o, i]` each, or `[s, i, o]` with `inputs_first`; in the dtype of x or in storage form.
      inputs_first: how matrices lie.

    Raises:
      TypeError: another dtype of x.
    """
    check_dtype(x)
    count, outputs = slots.shape[0], [stack.shape[2 if inputs_first else 1] for stack in stacks]
    shapes = (packed_shape(count, x.shape[1]), *((count, o) for o in outputs))
    call = jax.ffi.ffi_call(load()["matrix_rows"], [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    _, *out = call(x, slots, *stacks, choices=np.int64(max(1, count // max(1, len(x)))), inputs_first=inputs_first)
    return tuple(out)


def products(x: jax.Array, weights: Sequence[jax.Array]) -> list[jax.Array]:
    """x `[..., i]`, as in `rows_times`, times each of `weights [o, i]`: float32 `[..., o]`."""
    rows = x.reshape(-1, x.shape[-1])
    out = rows_times(rows, jnp.zeros(len(rows), jnp.int32), [weight[None] for weight in weights], False)
    return [each.reshape(*x.shape[:-1], each.shape[-1]) for each in out]


def check_dtype(x: jax.Array) -> None:
    """Raises TypeError where the native code does not know the dtype of x."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"native code knows float32 and bfloat16, not {x.dtype}")


def packed_shape(choices: int, inputs: int) -> tuple[int, int]:
    """Of the float32 array that products take besides their arguments and result."""
    return choices, -(-inputs // _STEP) * _STEP
