"""Number types of stored tensors: safetensors codes <-> numpy dtypes, and the one rounding between float types.

Knows codes, widths and bits. Refuses to know files, JAX, and packed formats whose numbers mean nothing without a scale.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from novalm_jax.errors import CheckpointError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INFINITE = np.uint16(0x7F80)  # the exponent of infinities and NaNs in bfloat16
_FLOAT16, _FLOAT32, _FLOAT64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)

_READ = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": _FLOAT16,
    "BF16": BFLOAT16,
    "F32": _FLOAT32,
    "F64": _FLOAT64,
}

# Codes of the safetensors format that have no array type here, with their width in bits.
_NAMED_ONLY = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "C64": 64,
}


def element_bits(code: str) -> int | None:
    """Width in bits of one element of a safetensors dtype code; None for a code the format does not define."""
    if code in _READ:
        return _READ[code].itemsize * 8
    return _NAMED_ONLY.get(code)


def numpy_dtype(code: str) -> np.dtype:
    """The numpy dtype of a safetensors dtype code: `numpy_dtype("BF16")` is ml_dtypes' bfloat16.

    Raises:
      CheckpointError: a code of the format that is not read here (8-bit floats and smaller), or no such code.
    """
    if code in _READ:
        return _READ[code]
    if code in _NAMED_ONLY:
        raise CheckpointError(
            f"dtype {code} ({_NAMED_ONLY[code]} bits) is not supported. Use a BF16, F16 or F32 version of the model."
        )
    raise CheckpointError(f"dtype {code!r} is not one that the safetensors format defines; the file may be damaged.")


def to_dtype(array: np.ndarray, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
    """`array` in another float type, rounded to nearest even: the bits of `jnp.asarray(array).astype(dtype)`.

    Overflow gives infinity (`overflowed` tells), subnormals are kept, a NaN stays a NaN. float64 goes through float32,
    as it does in JAX.

    Args:
      array: any shape, float16, bfloat16, float32 or float64. An array that has `dtype` already may be of any type.
      dtype: bfloat16 or float32, the types that this project computes in.
      out: array of the same shape and of `dtype` to write into; must not overlap `array`.

    Returns:
      `out`; without `out` a new array, or `array` itself where there is nothing to convert.

    Raises:
      CheckpointError: `array` does not hold floats, so that there is no rounding to speak of.
      ValueError: `dtype` is another one, or `out` has another shape or dtype.
    """
    dtype = np.dtype(dtype)
    if out is not None and (out.shape != array.shape or out.dtype != dtype):
        raise ValueError(f"out is {out.dtype}{out.shape}, needed is {dtype}{array.shape}")
    if array.dtype == dtype:
        if out is None:
            return array
        np.copyto(out, array)
        return out
    if dtype not in (BFLOAT16, _FLOAT32):
        raise ValueError(f"to_dtype converts to bfloat16 or float32, not to {dtype}")
    if array.dtype not in (_FLOAT16, BFLOAT16, _FLOAT32, _FLOAT64):
        raise CheckpointError(
            f"A tensor of {array.dtype} cannot stand in for {dtype} weights: it does not hold floats."
        )
    if out is None:
        out = np.empty(array.shape, dtype)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if array.dtype == _FLOAT64 and dtype == BFLOAT16:
            array = array.astype(_FLOAT32)
        np.copyto(out, array, casting="unsafe")
        if array.dtype == _FLOAT16 and dtype == _FLOAT32:
            # numpy keeps a signalling NaN of float16 as it is, XLA makes it a quiet one.
            out.view(np.uint32)[np.isnan(out)] |= np.uint32(0x0040_0000)
    return out


def rounded(what: str, array: np.ndarray, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
    """`to_dtype` for the weights of `what`, which names them in an error.

    Raises:
      CheckpointError: as `to_dtype`; and where a finite number becomes infinite.
    """
    out = to_dtype(array, dtype, out)
    if overflowed(array, out):
        raise CheckpointError(
            f"{what} holds numbers that {dtype} cannot: the largest are beyond 3.39e38, and would become infinite. "
            "Use dtype float32."
        )
    return out


def overflowed(array: np.ndarray, out: np.ndarray) -> bool:
    """Whether `out`, bfloat16 or float32, is infinite where `array` is finite."""
    if array.dtype in (_FLOAT16, BFLOAT16):
        return False
    if out.dtype == BFLOAT16 and (out.view(np.uint16) & _INFINITE).max(initial=0) < _INFINITE:
        return False
    return bool(np.any(np.isinf(out) & np.isfinite(array)))
