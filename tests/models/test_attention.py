"""Attention, plain and over pages, against float64 numpy, and what it promises about bits and memory."""

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.compat import compile_program
from novalm_jax.config import AttentionConfig, RopeConfig
from novalm_jax.kernels import attention
from novalm_jax.kernels.attention import Rule
from novalm_jax.kernels.native import attention as native_attention
from novalm_jax.kv.paged import LayerPages, PagedView, page_shape
from novalm_jax.kv.pages import PAGE, Reach
from parts_helpers import attended, random, same_bits, same_bits_however_cut, wide

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


@pytest.mark.parametrize(
    ("rule", "sunk", "t", "blocks"),
    [
        *((rule, len(rule) % 2 == 0, t, blocks) for rule in RULES for t, blocks in ((9, 3), (10, 4))),
        *((rule, True, t, blocks) for rule in ("everything", "window 9 in chunk 12") for t, blocks in ((7, 7), (5, 1))),
        ("everything", False, 9, 3),
    ],
)
def test_blocked_attention_and_its_gradients_are_those_of_the_reference(
    rule: str, sunk: bool, t: int, blocks: int, monkeypatch: pytest.MonkeyPatch
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
"""Positions of a sequence in these tests, and of a page."""


class Paged:
    """Random sequences in pages that lie in any order. What nobody has written is NaN, in pages of nobody too.

    Of t new tokens `real` ones are not padding.
    """

    def __init__(
        self,
        starts: list[int],
        t: int,
        h: int,
        g: int,
        dtype: Any = jnp.float32,
        *,
        real: int | None = None,
        width: int = S // BLOCK,
        order: int = 7,
    ):
        self.starts, self.real, self.dtype = starts, t if real is None else real, dtype
        self.ends = [start + self.real if start >= 0 else 0 for start in starts]
        self.q = random(len(starts), t, h, 8, seed=3, dtype=dtype)
        self.k, self.v = (random(len(starts), S, g, 8, seed=seed, dtype=dtype) for seed in (4, 5))
        self.count = len(starts) * S // BLOCK + 3
        self.tables = np.full((len(starts), width), self.count, np.int32)
        pages = iter(np.random.default_rng(order).permutation(self.count))
        for table, end in zip(self.tables, self.ends, strict=True):
            table[: -(-end // BLOCK)] = [next(pages) for _ in range(0, end, BLOCK)]
        self.keys, self.values = self._stored(self.k), self._stored(self.v)

    def _stored(self, new: jax.Array) -> jax.Array:
        pages = np.full((self.count, new.shape[2], BLOCK, 8), np.nan, np.asarray(new).dtype)
        for table, end, sequence in zip(self.tables, self.ends, np.asarray(new), strict=True):
            for at in range(end):
                pages[table[at // BLOCK], :, at % BLOCK] = sequence[at]
        return jnp.asarray(pages if self.dtype == jnp.float32 else pages.view(np.uint16))

    def arguments(self, rule: str, which: list[int] | None = None) -> tuple[Any, ...]:
        """Of some rows, which have let go of the pages that they see no more."""
        which = list(range(len(self.starts))) if which is None else which
        starts, ends, tables = (
            np.array(all_rows, np.int32)[which] for all_rows in (self.starts, self.ends, self.tables)
        )
        for table, start in zip(tables, starts, strict=True):
            table[: Reach(RULES[rule].window, RULES[rule].chunk).first(int(start)) // BLOCK] = self.count
        return np.asarray(self.q)[which], self.keys, self.values, tables, starts, ends

    def attend(self, rule: str, which: list[int] | None = None, sinks: Any = None, kernel: str = "xla") -> np.ndarray:
        arguments = (*self.arguments(rule, which), sinks)
        shapes = [None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
        return np.asarray(compiled(kernel, rule, *shapes)(*arguments))

    def expected(self, row: int, rule: str, sinks: Any = None) -> np.ndarray:
        """Zeros for padding, and for a row without tokens."""
        out = np.zeros(self.q.shape[1:])
        if self.starts[row] >= 0:
            q = self.q[row, : self.real]
            out[: self.real] = plain(q, self.k[row], self.v[row], self.starts[row], RULES[rule], sinks)
        return out


@lru_cache(4)
def compiled(kernel: str, rule: str, *shapes: Any) -> jax.stages.Compiled:
    def attend(*given: Any) -> jax.Array:
        q, keys, values, *where, sinks = given
        if kernel == "native":
            return native_attention.paged(q, keys, values, values.shape[-1], *where, RULES[rule], sinks)
        return attention.paged(q, keys, values, *where, RULES[rule], sinks)

    return compile_program(attend, shapes)


DECODE = [0, 7, 8, 9, 31]


@pytest.mark.parametrize(
    ("kernel", "t", "starts"),
    [("xla", 1, DECODE), ("native", 1, DECODE), ("xla", 3, [0, 5, 6, 16, 29]), ("xla", 17, [0, 3, 15])],
)
@pytest.mark.parametrize(
    ("heads", "rule", "sunk"),
    [
        *(("grouped", rule, len(rule) % 2 == 0) for rule in RULES),
        ("multi-query", "everything", True),
        ("multi-head", "window 5", True),
        ("multi-head", "chunk 12", False),
    ],
)
def test_attention_over_pages_sees_its_own_past_and_nothing_else(
    heads: str, rule: str, sunk: bool, kernel: str, t: int, starts: list[int]
) -> None:
    """Starts lie on and around borders of pages and chunks."""
    case = Paged(starts, t, *HEADS[heads])
    sinks = some_sinks(HEADS[heads][0]) if sunk else None
    out = case.attend(rule, sinks=sinks, kernel=kernel)
    for row in range(len(starts)):
        np.testing.assert_allclose(out[row], case.expected(row, rule, sinks), atol=3e-6)


@pytest.mark.parametrize(("rule", "sunk"), [("everything", False), ("window 5", True), ("chunk 12", False)])
@pytest.mark.parametrize("real", [1, 5])
def test_padding_sees_nothing_and_nobody_sees_what_its_positions_hold(real: int, rule: str, sunk: bool) -> None:
    """Padding would see positions that nobody has written, beyond the table at last; what it gave would not matter,
    but what it saw is multiplied by zero for all others."""
    case, sinks = Paged([0, 3, 22, 26], 17, 6, 2, real=real), some_sinks(6) if sunk else None
    out = case.attend(rule, sinks=sinks)
    assert not out[:, real:].any()
    for row in range(4):
        np.testing.assert_allclose(out[row], case.expected(row, rule, sinks), atol=3e-6)


@pytest.mark.parametrize(
    ("rule", "start", "end", "expected"),
    [
        ("everything", 21, 24, [0, 1, 2]),
        ("everything", 21, 22, [0, 1, 2]),
        ("window 5", 21, 24, [2]),
        ("chunk 12", 21, 24, [1, 2]),
        ("window 9 in chunk 12", 21, 24, [1, 2]),
        ("everything", 21, 21, []),
        ("everything", -1, 24, []),
    ],
)
def test_pages_that_nobody_sees_are_not_read(rule: str, start: int, end: int, expected: list[int]) -> None:
    """A step costs what it sees. There are 8 queries; those from `end` on are padding, and a row without a start is
    idle."""
    numbers = []

    def read(table: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers.append(int(table[number]))
        return jnp.ones((1, BLOCK, 8)), jnp.ones((1, BLOCK, 8))

    table, starts, ends = (jnp.asarray([numbers], jnp.int32) for numbers in ([9, 7, 8, 6], start, end))
    with jax.disable_jit():
        attention.walk(random(1, 8, 2, 8), read, 1, 8, table, starts, ends, RULES[rule], None, BLOCK)
    assert numbers == [[9, 7, 8, 6][block] for block in expected]


def test_attention_over_pages_equals_the_reference_on_a_whole_sequence() -> None:
    case, rule, sinks = Paged([0, 0], S, 6, 2), "chunk 12", some_sinks(6)
    expected = attention.reference(case.q, case.k, case.v, RULES[rule], sinks)
    np.testing.assert_allclose(case.attend(rule, sinks=sinks), expected, atol=3e-6)


KERNELS = ("xla", "native")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("rule", ["everything", "window 5", "chunk 12"])
def test_idle_rows_give_zeros(rule: str, sunk: bool, kernel: str) -> None:
    case, sinks = Paged([-1, 12, -1], 1, 4, 4), some_sinks(4) if sunk else None
    out = case.attend(rule, sinks=sinks, kernel=kernel)
    assert np.array_equal(out[[0, 2]], np.zeros_like(out[[0, 2]]))
    np.testing.assert_allclose(out[1], case.expected(1, rule, sinks), atol=3e-6)


def test_rows_may_share_pages() -> None:
    """Two sequences begin alike, and the second one's own page of that is NaN."""
    case = Paged([15, 20], 2, 6, 2)
    q, keys, values, tables, starts, ends = case.arguments("everything")
    keys, values = (pages.at[tables[1, 0]].set(jnp.nan) for pages in (keys, values))
    tables[1, 0] = tables[0, 0]
    case.k, case.v = (both.at[1, :BLOCK].set(both[0, :BLOCK]) for both in (case.k, case.v))
    out = attention.paged(q, keys, values, tables, starts, ends, RULES["everything"], None)
    for row in range(2):
        np.testing.assert_allclose(out[row], case.expected(row, "everything"), atol=3e-6)


@pytest.mark.parametrize(("kernel", "t"), [("xla", 2), ("native", 1)])
def test_attention_reads_bfloat16_pages_in_storage_form(kernel: str, t: int) -> None:
    case = Paged([3, 20], t, 6, 2, jnp.bfloat16)
    assert case.keys.dtype == jnp.uint16
    rule, sinks = "chunk 12", some_sinks(6, jnp.bfloat16)
    out = case.attend(rule, sinks=sinks, kernel=kernel)
    assert out.dtype == jnp.bfloat16
    for row in range(2):
        np.testing.assert_allclose(wide(out[row]), case.expected(row, rule, sinks), atol=0.02)
    case.keys, case.values = case.keys.view(jnp.bfloat16), case.values.view(jnp.bfloat16)
    assert same_bits(out, case.attend(rule, sinks=sinks, kernel=kernel))


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", ["everything", "chunk 12"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: Any, rule: str, kernel: str) -> None:
    case, sinks = Paged([9, 30, 0, 17], 1, 6, 2, dtype), some_sinks(6, dtype)
    together = case.attend(rule, sinks=sinks, kernel=kernel)
    for which in ([0, 1], [1, 0], [3, 2, 1, 0], [2, 3]):
        assert same_bits(case.attend(rule, which, sinks, kernel), together[np.array(which)])


@pytest.mark.parametrize(
    ("kernel", "rule", "t"),
    [("xla", "everything", 1), ("xla", "window 9 in chunk 12", 3), ("native", "window 9 in chunk 12", 1)],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_the_order_of_pages_or_the_width_of_tables(
    dtype: Any, kernel: str, rule: str, t: int
) -> None:
    starts, sinks = [9, 29, 0, 17], some_sinks(6, dtype)
    first = Paged(starts, t, 6, 2, dtype)
    out = first.attend(rule, sinks=sinks, kernel=kernel)
    for order, width in ((1, 4), (2, 4), (3, 64)):
        other = Paged(starts, t, 6, 2, dtype, order=order, width=width)
        assert not np.array_equal(first.tables, other.tables[:, :4])
        assert same_bits(other.attend(rule, sinks=sinks, kernel=kernel), out)


@pytest.mark.parametrize("rule", [Rule(0.3), Rule(0.3, 100, 192)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tokens_of_a_prompt_do_not_depend_on_how_it_is_cut(dtype: Any, rule: Rule) -> None:
    sinks = None if rule.window is None else some_sinks(6, dtype)

    def step(pages: LayerPages, q: Any, k: Any, v: Any, *where: Any) -> tuple[jax.Array, LayerPages]:
        out, view = PagedView(pages, *where).attend(q, k, v, rule, sinks)
        return out, view.pages

    new = [random(1, 600, n, 16, seed=seed, dtype=dtype) for seed, n in enumerate((6, 2, 2))]
    pages = page_shape(AttentionConfig(6, 2, 16, 0.3, None, 0), 12, np.dtype(dtype))
    assert same_bits_however_cut(step, pages, new)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "tokens"), [(8, 1), (1, 64)], ids=["decode", "prefill"])
def test_a_step_writes_pages_in_place_and_takes_no_memory_for_what_they_hold(rows: int, tokens: int) -> None:
    """However many pages there are, and however wide tables are."""
    heads, temporaries = AttentionConfig(8, 2, 64, 0.1, RopeConfig(1e4), 64), []
    q, kv = (jax.ShapeDtypeStruct((rows, tokens, n, 64), jnp.bfloat16) for n in (8, 2))
    ints, page_bytes = jax.ShapeDtypeStruct((rows,), jnp.int32), 2 * PAGE * 64 * 2

    def step(pages: LayerPages, q: Any, k: Any, v: Any, *where: Any) -> tuple[jax.Array, LayerPages]:
        out, view = PagedView(pages, *where).attend(q, k, v, Rule(0.1), None)
        return out, view.pages

    for width in (8, 64):
        pages = page_shape(heads, 8 * width, np.dtype(jnp.bfloat16))
        tables = jax.ShapeDtypeStruct((rows, width), jnp.int32)
        analysis: Any = compile_program(step, (pages, q, kv, kv, tables, ints, ints), donate=(0,)).memory_analysis()
        assert analysis.alias_size_in_bytes == 2 * 8 * width * page_bytes
        temporaries.append(analysis.temp_size_in_bytes)
    assert temporaries[1] - temporaries[0] < page_bytes
    if tokens == 1:
        assert temporaries[1] < 4 * page_bytes
