"""Attention, plain and cached, against float64 numpy, and what it promises about bits and memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.compat import compile_program
from novalm_jax.config import AttentionConfig, RopeConfig
from novalm_jax.kernels import attention
from novalm_jax.kernels.attention import Rule
from novalm_jax.kv.static import CacheView, LayerCache, cache_shape
from parts_helpers import plain_softmax, random, same_bits, wide


def plain_attention(q: Any, k: Any, v: Any, start: int, scale: float, window: int | None) -> np.ndarray:
    """One sequence, one head and query at a time: q `[t, h, c]` from position `start`, k and v `[s, g, c]`."""
    q, k, v = wide(q), wide(k), wide(v)
    out = np.zeros_like(q)
    for i, head in np.ndindex(*q.shape[:2]):
        group, at = head // (q.shape[1] // k.shape[1]), start + i
        first = 0 if window is None else max(0, at - window + 1)
        weights = plain_softmax(k[first : at + 1, group] @ q[i, head] * scale)
        out[i, head] = weights @ v[first : at + 1, group]
    return out


HEADS = {"multi-head": (4, 4), "grouped": (6, 2), "multi-query": (4, 1)}


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("heads", HEADS)
def test_reference_attention(heads: str, window: int | None) -> None:
    h, g = HEADS[heads]
    q, k, v = random(2, 9, h, 8), random(2, 9, g, 8, seed=1), random(2, 9, g, 8, seed=2)
    out = attention.reference(q, k, v, Rule(0.7, window))
    for row in range(2):
        np.testing.assert_allclose(out[row], plain_attention(q[row], k[row], v[row], 0, 0.7, window), atol=2e-6)


S, BLOCK = 32, 8
"""Positions in a cache of these tests, and how many of them attention takes at a time."""


class Cached:
    """Random sequences in a cache whose every other position is NaN."""

    def __init__(self, starts: list[int], t: int, h: int, g: int, dtype: Any = jnp.float32, *, rows: int = 5):
        self.starts, self.t, self.dtype = starts, t, dtype
        self.rows = list(np.random.default_rng(7).permutation(rows)[: len(starts)])
        self.q = random(len(starts), t, h, 8, seed=3, dtype=dtype)
        self.k, self.v = (random(len(starts), S, g, 8, seed=seed, dtype=dtype) for seed in (4, 5))
        self.keys, self.values = self._stored(self.k, rows), self._stored(self.v, rows)

    def _stored(self, new: jax.Array, rows: int) -> jax.Array:
        cache = np.full((rows, new.shape[2], S, 8), np.nan, np.asarray(new).dtype)
        for row, start, sequence in zip(self.rows, self.starts, np.asarray(new), strict=True):
            cache[row, :, : max(start, 0) + self.t] = sequence.swapaxes(0, 1)[:, : max(start, 0) + self.t]
        return jnp.asarray(cache if self.dtype == jnp.float32 else cache.view(np.uint16))

    def attend(self, window: int | None, which: list[int] | None = None) -> np.ndarray:
        which = list(range(len(self.starts))) if which is None else which
        rows, starts = np.array(self.rows, np.int32)[which], np.array(self.starts, np.int32)[which]
        q = self.q[np.array(which)]
        return np.asarray(attend(q, self.keys, self.values, jnp.asarray(rows), jnp.asarray(starts), window))

    def expected(self, row: int, window: int | None) -> np.ndarray:
        if self.starts[row] < 0:
            return np.zeros(self.q.shape[1:])
        return plain_attention(self.q[row], self.k[row], self.v[row], self.starts[row], 0.3, window)


@partial(jax.jit, static_argnames="window")
def attend(q: Any, keys: Any, values: Any, rows: Any, starts: Any, window: int | None) -> jax.Array:
    return attention.cached(q, keys, values, rows, starts, Rule(0.3, window), None, BLOCK)


@pytest.mark.parametrize(("t", "starts"), [(1, [0, 7, 8, 9, 31]), (3, [0, 5, 6, 16, 29]), (17, [0, 3, 15])])
@pytest.mark.parametrize(
    ("heads", "window"),
    [*(("grouped", w) for w in (None, 1, 5, 8, 9, 100)), ("multi-query", None), ("multi-head", 5)],
)
def test_cached_attention_sees_its_own_past_and_nothing_else(
    heads: str, t: int, starts: list[int], window: int | None
) -> None:
    """Starts lie on, before and behind block borders; rows of the cache are shuffled; the rest of it is NaN."""
    case = Cached(starts, t, *HEADS[heads])
    out = case.attend(window)
    for row in range(len(starts)):
        np.testing.assert_allclose(out[row], case.expected(row, window), atol=3e-6)


def test_cached_attention_equals_the_reference_on_a_whole_sequence() -> None:
    case = Cached([0, 0], S, 6, 2)
    np.testing.assert_allclose(case.attend(None), attention.reference(case.q, case.k, case.v, Rule(0.3)), atol=3e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_idle_rows_give_zeros(window: int | None) -> None:
    case = Cached([-1, 12, -1], 1, 4, 4)
    out = case.attend(window)
    assert np.array_equal(out[[0, 2]], np.zeros_like(out[[0, 2]]))
    np.testing.assert_allclose(out[1], case.expected(1, window), atol=3e-6)


def test_cached_attention_reads_bfloat16_in_storage_form() -> None:
    case = Cached([3, 20], 2, 6, 2, jnp.bfloat16)
    assert case.keys.dtype == jnp.uint16
    out = case.attend(None)
    assert out.dtype == jnp.bfloat16
    for row in range(2):
        np.testing.assert_allclose(wide(out[row]), case.expected(row, None), atol=0.02)
    view = case.keys.view(jnp.bfloat16), case.values.view(jnp.bfloat16)
    as_floats = attend(case.q, *view, jnp.asarray(case.rows, jnp.int32), jnp.asarray(case.starts, jnp.int32), None)
    assert same_bits(out, as_floats)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_of_cached_attention_does_not_depend_on_its_neighbours(dtype: Any) -> None:
    case = Cached([9, 30, 0, 17], 1, 6, 2, dtype)
    together = case.attend(None)
    for which in ([0, 1], [1, 0], [3, 2, 1, 0], [2, 3]):
        assert same_bits(case.attend(None, which), together[np.array(which)])


def test_a_decode_step_writes_its_cache_in_place() -> None:
    heads = AttentionConfig(8, 2, 64, 0.1, RopeConfig(1e4), 64)
    cache = cache_shape(heads, 4, 1024, np.dtype(jnp.bfloat16))
    q, kv = (jax.ShapeDtypeStruct((4, 1, n, 64), jnp.bfloat16) for n in (8, 2))
    ints = jax.ShapeDtypeStruct((4,), jnp.int32)

    def step(cache: LayerCache, q: Any, k: Any, v: Any, rows: Any, starts: Any) -> Any:
        out, view = CacheView(cache, rows, starts, 128).attend(q, k, v, Rule(0.1), None)
        return out, view.cache

    analysis: Any = compile_program(step, (cache, q, kv, kv, ints, ints), donate=(0,)).memory_analysis()
    cache_bytes = 2 * 4 * 2 * 1024 * 64 * 2
    assert analysis.alias_size_in_bytes == cache_bytes
    assert analysis.temp_size_in_bytes < cache_bytes / 4
