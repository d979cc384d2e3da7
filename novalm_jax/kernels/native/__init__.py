"""Rows times the matrices that they chose, in C++, on the CPU.

XLA's CPU backend copies a matrix out of its stack, in one thread, before it multiplies it, which takes most of the time
where few rows choose many experts. The custom call reads matrices where they lie. Products of a row do not depend on
which other rows there are, in which slot its matrix lies, or how many threads compute; they are not the bits of XLA's
own products.

Knows rows and matrices, and whether the code can be had on this machine. Refuses to know what an expert is.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.errors import OptionError
from novalm_jax.kernels.native.build import BuildError, load
from novalm_jax.kernels.storage import storage_dtype, view_as
from novalm_jax.options import Kernels

_log = logging.getLogger("novalm_jax")

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
    _log.warning("kernels: experts are computed by XLA, which decodes several times slower: %s", reason)


def rows_times(x: jax.Array, slots: jax.Array, stack: jax.Array, inputs_first: bool) -> jax.Array:
    """Each choice's row of x times its matrix, added up in float32, whatever the dtype of x: `[n, o]`.

    Args:
      x: `[t, i]`, float32 or bfloat16.
      slots: int32 `[n]`, where n is a multiple of t: matrices of the first row, then those of the second, and so on. A
        negative one gives zeros; one that is not there ends the program with an error.
      stack: `[s, o, i]`, or `[s, i, o]` with `inputs_first`; in the dtype of x or in storage form.
      inputs_first: how matrices lie.

    Raises:
      TypeError: another dtype of x.
    """
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"native products are of float32 or bfloat16, not {x.dtype}")
    stored = storage_dtype(np.dtype(x.dtype))
    results = (
        jax.ShapeDtypeStruct((slots.shape[0], stack.shape[2 if inputs_first else 1]), jnp.float32),
        jax.ShapeDtypeStruct(unpacked_shape(*x.shape), jnp.float32),
    )
    call = jax.ffi.ffi_call(load(), results)
    choices = np.int64(slots.shape[0] // x.shape[0])
    out, _ = call(view_as(x, stored), slots, view_as(stack, stored), choices=choices, inputs_first=inputs_first)
    return out


def unpacked_shape(rows: int, inputs: int) -> tuple[int, int]:
    """Of rows in float32, which a product takes besides its arguments and result."""
    return rows, -(-inputs // _STEP) * _STEP
