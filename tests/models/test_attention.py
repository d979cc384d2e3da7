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
from parts_helpers import attended, random, same_bits, wide

RULES = {
    "everything": Rule(0.3),
    **{f"window {w}": Rule(0.3, window=w) for w in (1, 5, 8, 100)},
    **{f"chunk {c}": Rule(0.3, chunk=c) for c in (1, 5, 8, 12)},
    "window 3 in chunk 8": Rule(0.3, 3, 8),
    "window 9 in chunk 12": Rule(0.3, 9, 12),
}


def plain(q: Any, k: Any, v: Any, start: int, rule: Rule, sinks: Any = None) -> np.ndarray:
    stood = None if sinks is None else wide(sinks)
    limits: dict[str, Any] = {"window": rule.window, "chunk": rule.chunk, "sinks": stood}
    return attended(wide(q), wide(k), wide(v), start, rule.scale, **limits)


def some_sinks(h: int, dtype: Any = jnp.float32) -> jax.Array:
    """Far below the scores, among them, and far above."""
    return jnp.asarray(np.resize([-30.0, 0.5, 2.0, 8.0], h), dtype)


HEADS = {"multi-head": (4, 4), "grouped": (6, 2), "multi-query": (4, 1)}


@pytest.mark.parametrize(
    ("heads", "rule", "sunk"),
    [
        *(("grouped", rule, sunk) for rule in RULES for sunk in (False, True)),
        *((heads, "everything", True) for heads in ("multi-head", "multi-query")),
    ],
)
def test_reference_attention(heads: str, rule: str, sunk: bool) -> None:
    h, g = HEADS[heads]
    sinks = some_sinks(h) if sunk else None
    q, k, v = random(2, 9, h, 8), random(2, 9, g, 8, seed=1), random(2, 9, g, 5, seed=2)
    out = attention.reference(q, k, v, RULES[rule], sinks)
    for row in range(2):
        np.testing.assert_allclose(out[row], plain(q[row], k[row], v[row], 0, RULES[rule], sinks), atol=2e-6)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("t", "blocks"), [(9, 3), (10, 4), (7, 7), (5, 1)])
def test_blocked_attention_and_its_gradients_are_those_of_the_reference(
    t: int, blocks: int, rule: str, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_LEAST_BLOCK", 1)
    monkeypatch.setattr(attention, "_MOST_BLOCKS", blocks)
    given = random(2, t, 6, 8), random(2, t, 2, 8, seed=1), random(2, t, 2, 5, seed=2), some_sinks(6)
    towards = random(2, t, 6, 5, seed=3)

    def total(kernel: Any, q: Any, k: Any, v: Any, sinks: Any) -> tuple[jax.Array, jax.Array]:
        out = kernel(q, k, v, RULES[rule], sinks if sunk else None)
        return (out * towards).sum(), out

    runs = [
        jax.grad(partial(total, kernel), argnums=(0, 1, 2, 3), has_aux=True)(*given)
        for kernel in (attention.blocked, attention.reference)
    ]
    for found, expected in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("rule", "part"), [("everything", 0.6), ("window 5", 0.4), ("chunk 12", 0.4)])
def test_blocked_attention_leaves_out_what_is_not_seen(rule: str, part: float) -> None:
    """Operations as XLA counts them, of 1024 positions in 8 blocks."""
    shapes = [jax.ShapeDtypeStruct((1, 1024, heads, 64), jnp.float32) for heads in (4, 2, 2)]

    def counted(kernel: Any) -> float:
        compiled = jax.jit(lambda q, k, v: kernel(q, k, v, RULES[rule])).lower(*shapes).compile()
        return compiled.cost_analysis()["flops"]

    assert counted(attention.blocked) < part * counted(attention.reference)


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

    def attend(self, rule: str, which: list[int] | None = None, sinks: Any = None) -> np.ndarray:
        which = list(range(len(self.starts))) if which is None else which
        rows, starts = np.array(self.rows, np.int32)[which], np.array(self.starts, np.int32)[which]
        q = self.q[np.array(which)]
        return np.asarray(attend(q, self.keys, self.values, jnp.asarray(rows), jnp.asarray(starts), RULES[rule], sinks))

    def expected(self, row: int, rule: str, sinks: Any = None) -> np.ndarray:
        if self.starts[row] < 0:
            return np.zeros(self.q.shape[1:])
        return plain(self.q[row], self.k[row], self.v[row], self.starts[row], RULES[rule], sinks)


@partial(jax.jit, static_argnames="rule")
def attend(q: Any, keys: Any, values: Any, rows: Any, starts: Any, rule: Rule, sinks: Any = None) -> jax.Array:
    return attention.cached(q, keys, values, rows, starts, rule, sinks, BLOCK)


@pytest.mark.parametrize(("t", "starts"), [(1, [0, 7, 8, 9, 31]), (3, [0, 5, 6, 16, 29]), (17, [0, 3, 15])])
@pytest.mark.parametrize(
    ("heads", "rule", "sunk"),
    [
        *(("grouped", rule, len(rule) % 2 == 0) for rule in RULES),
        ("multi-query", "everything", True),
        ("multi-head", "window 5", True),
        ("multi-head", "chunk 12", False),
    ],
)
def test_cached_attention_sees_its_own_past_and_nothing_else(
    heads: str, rule: str, sunk: bool, t: int, starts: list[int]
) -> None:
    """Starts lie on and around borders of blocks and chunks; rows are shuffled; the rest of the cache is NaN."""
    case = Cached(starts, t, *HEADS[heads])
    sinks = some_sinks(HEADS[heads][0]) if sunk else None
    out = case.attend(rule, sinks=sinks)
    for row in range(len(starts)):
        np.testing.assert_allclose(out[row], case.expected(row, rule, sinks), atol=3e-6)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("everything", [0, 1, 2]), ("window 5", [2]), ("chunk 12", [1, 2]), ("window 9 in chunk 12", [1, 2])],
)
def test_blocks_that_nobody_sees_are_not_read(rule: str, expected: list[int]) -> None:
    """A cached step costs what it sees. Queries stand at 21 to 23."""
    numbers = []

    def read(row: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers.append(int(number))
        return jnp.ones((1, BLOCK, 8)), jnp.ones((1, BLOCK, 8))

    start = jnp.asarray([21], jnp.int32)
    with jax.disable_jit():
        attention.walk(random(1, 3, 2, 8), read, 1, 8, jnp.zeros(1, jnp.int32), start, RULES[rule], None, BLOCK)
    assert numbers == expected


def test_cached_attention_equals_the_reference_on_a_whole_sequence() -> None:
    case, rule, sinks = Cached([0, 0], S, 6, 2), "chunk 12", some_sinks(6)
    expected = attention.reference(case.q, case.k, case.v, RULES[rule], sinks)
    np.testing.assert_allclose(case.attend(rule, sinks=sinks), expected, atol=3e-6)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("rule", ["everything", "window 5", "chunk 12"])
def test_idle_rows_give_zeros(rule: str, sunk: bool) -> None:
    case, sinks = Cached([-1, 12, -1], 1, 4, 4), some_sinks(4) if sunk else None
    out = case.attend(rule, sinks=sinks)
    assert np.array_equal(out[[0, 2]], np.zeros_like(out[[0, 2]]))
    np.testing.assert_allclose(out[1], case.expected(1, rule, sinks), atol=3e-6)


def test_cached_attention_reads_bfloat16_in_storage_form() -> None:
    case = Cached([3, 20], 2, 6, 2, jnp.bfloat16)
    assert case.keys.dtype == jnp.uint16
    rule, sinks = "chunk 12", some_sinks(6, jnp.bfloat16)
    out = case.attend(rule, sinks=sinks)
    assert out.dtype == jnp.bfloat16
    for row in range(2):
        np.testing.assert_allclose(wide(out[row]), case.expected(row, rule, sinks), atol=0.02)
    view = case.keys.view(jnp.bfloat16), case.values.view(jnp.bfloat16)
    rows, starts = (jnp.asarray(numbers, jnp.int32) for numbers in (case.rows, case.starts))
    assert same_bits(out, attend(case.q, *view, rows, starts, RULES[rule], sinks))


@pytest.mark.parametrize("rule", ["everything", "chunk 12"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_of_cached_attention_does_not_depend_on_its_neighbours(dtype: Any, rule: str) -> None:
    case, sinks = Cached([9, 30, 0, 17], 1, 6, 2, dtype), some_sinks(6, dtype)
    together = case.attend(rule, sinks=sinks)
    for which in ([0, 1], [1, 0], [3, 2, 1, 0], [2, 3]):
        assert same_bits(case.attend(rule, which, sinks), together[np.array(which)])


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
