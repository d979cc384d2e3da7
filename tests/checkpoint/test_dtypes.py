"""Codes and the one rounding. JAX is the reference: converting on the host must give the bits JAX would have given."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save

from novalm_jax.checkpoint.dtypes import BFLOAT16, element_bits, numpy_dtype, overflowed, to_dtype
from novalm_jax.errors import CheckpointError

FLOAT16, FLOAT32, FLOAT64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
CODES = {
    **{"BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32},
    **{"I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64},
    "BF16": BFLOAT16,
}


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def every_kind_of_float(dtype: np.dtype) -> np.ndarray:
    """All values of a 16-bit type; of a wider one random bits, every bfloat16 tie and its neighbours, and the edges."""
    if dtype.itemsize == 2:
        return np.arange(2**16, dtype=np.uint16).view(dtype)
    random = np.random.default_rng(7)
    upper = np.arange(2**16, dtype=np.uint32) << 16
    ties = [upper | low for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    single = np.concatenate([random.integers(0, 2**32, 2**18, dtype=np.uint32), *ties]).view(FLOAT32)
    half_steps = np.arange(-70000, 70000, 0.5, dtype=FLOAT32)
    single = np.concatenate([single, half_steps, half_steps * FLOAT32.type(2.0**-24)])
    if dtype == FLOAT32:
        return single
    with np.errstate(invalid="ignore"):
        double = single.astype(FLOAT64)
        near = [np.nextafter(double, np.inf), np.nextafter(double, -np.inf)]
    return np.concatenate([double, *near, random.integers(0, 2**64, 2**16, dtype=np.uint64).view(FLOAT64)])


@pytest.mark.parametrize("target", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("source", [FLOAT16, BFLOAT16, FLOAT32, FLOAT64], ids=str)
def test_rounds_to_the_bits_of_jax(source: np.dtype, target: np.dtype) -> None:
    values = every_kind_of_float(source)
    with np.errstate(all="ignore"):  # float64 -> float32 happens in numpy, inside jnp.asarray
        expected = np.asarray(jnp.asarray(values, dtype=None if source != FLOAT64 else FLOAT32).astype(target))
    result = to_dtype(values, target)
    assert result.dtype == target
    np.testing.assert_array_equal(bits(result), bits(expected))
    with np.errstate(invalid="ignore"):  # ml_dtypes reports signalling NaNs
        assert np.isnan(result).any() and np.isinf(result).any()


def test_float16_to_bfloat16_rounds_ties_to_even() -> None:
    # bfloat16 keeps 8 significant bits: 257 lies halfway between 256 and 258, 259 halfway between 258 and 260.
    values = np.array([257, 259, -257, 2.0**-24, 65504, -0.0, np.inf], FLOAT16)
    expected = np.array([256, 260, -256, 2.0**-24, 65536, -0.0, np.inf], BFLOAT16)
    np.testing.assert_array_equal(bits(to_dtype(values, BFLOAT16)), bits(expected))


def test_overflow_is_infinity_and_subnormals_are_kept() -> None:
    values = np.array([3.4e38, 3.39e38, 1e-40, -1e-40], FLOAT32)
    result = to_dtype(values, BFLOAT16).astype(FLOAT32)
    assert result[0] == np.inf and np.isfinite(result[1])
    assert result[2] > 0 > result[3]


@pytest.mark.parametrize("source", [FLOAT16, BFLOAT16, FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("target", [BFLOAT16, FLOAT32], ids=str)
def test_overflow_is_told_from_infinities_that_were_there(source: np.dtype, target: np.dtype) -> None:
    top = {FLOAT16: 65504, BFLOAT16: 3.3895314e38, FLOAT32: 3.4028235e38, FLOAT64: 1e300}[source]
    values = np.array([[1, -2], [np.inf, np.nan]], np.float64).astype(source)
    assert not overflowed(values, to_dtype(values, target))
    values[0, 1] = source.type(-top)
    beyond = (source == FLOAT32 and target == BFLOAT16) or source == FLOAT64
    assert overflowed(values, to_dtype(values, target)) == beyond
    assert not overflowed(values[:0], to_dtype(values[:0], target))


def test_writes_into_a_strided_or_scalar_out() -> None:
    values = np.arange(12, dtype=FLOAT16).reshape(3, 4)
    whole = np.zeros((4, 6), FLOAT32)
    view = whole[:3, 1:5]
    assert to_dtype(values, FLOAT32, view) is view
    np.testing.assert_array_equal(view, values)
    assert whole.sum() == values.sum()
    scalar = to_dtype(np.array(np.nan, FLOAT16), FLOAT32)
    assert scalar.shape == () and np.isnan(scalar)
    assert to_dtype(np.zeros((0, 3), FLOAT16), FLOAT32).shape == (0, 3)


def test_same_dtype_is_not_copied_and_keeps_every_bit() -> None:
    values = every_kind_of_float(FLOAT16)
    assert to_dtype(values, FLOAT16) is values
    out = np.empty_like(values)
    assert to_dtype(values, FLOAT16, out) is out
    np.testing.assert_array_equal(bits(out), bits(values))
    assert to_dtype(np.arange(3), np.dtype(np.int64)).dtype == np.int64


def test_refuses_what_is_no_rounding() -> None:
    with pytest.raises(CheckpointError, match="int8"):
        to_dtype(np.zeros(3, np.int8), FLOAT32)
    with pytest.raises(ValueError, match="not to float16"):
        to_dtype(np.zeros(3, FLOAT32), FLOAT16)
    with pytest.raises(ValueError, match="needed is bfloat16"):
        to_dtype(np.zeros(3, FLOAT32), BFLOAT16, np.zeros(3, FLOAT32))
    with pytest.raises(ValueError, match="needed is"):
        to_dtype(np.zeros(3, FLOAT32), BFLOAT16, np.zeros((1, 3), BFLOAT16))


@pytest.mark.parametrize("code", CODES)
def test_codes_are_those_that_the_library_writes(code: str) -> None:
    dtype = np.dtype(CODES[code])
    assert numpy_dtype(code) == dtype
    assert element_bits(code) == dtype.itemsize * 8
    assert f'"dtype":"{code}"'.encode() in save({"x": np.zeros(1, dtype)})


@pytest.mark.parametrize("code, width", [("F8_E4M3", 8), ("F8_E5M2", 8), ("F8_E8M0", 8), ("F4", 4), ("C64", 64)])
def test_known_codes_that_are_not_read_are_named(code: str, width: int) -> None:
    assert element_bits(code) == width
    with pytest.raises(CheckpointError, match=f"{code} .*not supported"):
        numpy_dtype(code)


def test_an_unknown_code_is_named() -> None:
    assert element_bits("F33") is None
    with pytest.raises(CheckpointError, match="'F33'"):
        numpy_dtype("F33")
