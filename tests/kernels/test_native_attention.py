"""Native attention at the sizes of models, its bits and its mistakes. On small sizes and with every rule it is tested
beside XLA's, in tests/models/test_attention.py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.compat import compile_program
from novalm_jax.kernels.attention import Rule
from novalm_jax.kernels.native import attention as native_attention
from novalm_jax.kernels.storage import storage_dtype

PAGE = 64


class Case:
    """Random queries and pages; values are the first `value_dim` numbers of what is stored for a position."""

    def __init__(self, h: int, g: int, c: int, value_dim: int, lengths: list[int], dtype: Any, seed: int = 0):
        draw = np.random.default_rng(seed)
        self.value_dim, self.ends = value_dim, np.array(lengths, np.int32)
        blocks = -(-max(lengths) // PAGE)
        count = len(lengths) * blocks + 1
        self.q = draw.standard_normal((len(lengths), 1, h, c)).astype(dtype)
        self.keys = draw.standard_normal((count, g, PAGE, c)).astype(dtype)
        self.values = draw.standard_normal((count, g, PAGE, max(c, value_dim))).astype(dtype)
        self.tables = draw.permutation(count)[: len(lengths) * blocks].reshape(len(lengths), blocks).astype(np.int32)

    def attend(self, rule: Rule, sinks: Any = None, rows: Any = slice(None)) -> np.ndarray:
        def run(q: Any, keys: Any, values: Any, *where: Any) -> jax.Array:
            return native_attention.paged(q, keys, values, self.value_dim, *where, rule, sinks)

        stored = [pages.view(storage_dtype(pages.dtype)) for pages in (self.keys, self.values)]
        where = self.tables[rows], self.ends[rows] - 1, self.ends[rows]
        arguments = [jnp.asarray(a) for a in (self.q[rows], *stored, *where)]
        return np.asarray(compile_program(run, tuple(arguments))(*arguments))

    def expected(self, rule: Rule, sinks: Any = None) -> np.ndarray:
        """In float64, head by head."""
        b, _, h, _ = self.q.shape
        out = np.zeros((b, 1, h, self.value_dim))
        for row, end in enumerate(self.ends):
            first = max(0, end - rule.window) if rule.window else 0
            if rule.chunk:
                first = max(first, (end - 1) // rule.chunk * rule.chunk)
            for head in range(h):
                group = head // (h // self.keys.shape[1])
                k, v = (
                    pages[self.tables[row], group].astype(np.float64).reshape(-1, pages.shape[-1])[first:end]
                    for pages in (self.keys, self.values)
                )
                scores = k @ self.q[row, 0, head].astype(np.float64) * rule.scale
                logits = scores if sinks is None else np.append(scores, sinks[head])
                weights = np.exp(scores - logits.max())
                out[row, 0, head] = weights @ v[:, : self.value_dim] / np.exp(logits - logits.max()).sum()
        return out


SIZES = {
    "grouped": (16, 4, 64, 64),
    "many heads of one group": (20, 1, 96, 80),
    "latent": (20, 1, 576, 512),
    "narrow": (3, 3, 7, 5),
}


@pytest.mark.usefixtures("any_processor")
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "rule", [Rule(0.1), Rule(0.1, window=100), Rule(0.1, chunk=192)], ids=["all", "window", "chunk"]
)
@pytest.mark.parametrize("size", SIZES)
def test_attention(size: str, rule: Rule, dtype: Any) -> None:
    """Of sequences that end inside pages, at their borders, and after many."""
    h, *_ = SIZES[size]
    case = Case(*SIZES[size], [1, 64, 65, 200, 700], dtype)
    for sinks in (None, np.linspace(-4, 6, h).astype(np.float32)):
        out, expected = case.attend(rule, sinks), case.expected(rule, sinks)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.astype(np.float64), expected, atol=2e-6 if dtype == np.float32 else 0.01)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1e4])
def test_scores_of_any_size(scale: float) -> None:
    """All weights alike, and all but one of them nothing: the exponential is never below or above what it can be."""
    case, rule = Case(4, 2, 16, 16, [130], np.float32), Rule(scale)
    np.testing.assert_allclose(case.attend(rule), case.expected(rule), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("length", [5, 16, 64])
def test_scores_that_are_all_minus_infinity_weigh_nothing(length: int) -> None:
    case = Case(2, 1, 16, 16, [length], np.float32)
    case.q[:], case.keys[:] = 1e30, -1e30
    assert not case.attend(Rule(0.3)).any()


def test_what_is_not_a_number_stays_so_and_harms_nobody_else() -> None:
    case, rule = Case(4, 2, 16, 16, [70, 90], np.float32), Rule(0.3)
    clean = case.attend(rule)
    case.keys[case.tables[0, 0], 1, 5] = np.nan
    # Behind the end of both rows.
    case.keys[case.tables[:, 1], :, 40:], case.values[case.tables[:, 1], :, 40:] = np.nan, np.nan
    out = case.attend(rule)
    assert np.isnan(out[0, 0, 2:]).all()
    assert out[0, 0, :2].tobytes() == clean[0, 0, :2].tobytes() and out[1].tobytes() == clean[1].tobytes()


@pytest.mark.usefixtures("any_processor")
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_feels_neither_its_company_nor_its_pages(size: str, dtype: Any) -> None:
    case, rule = Case(*SIZES[size], [1, 64, 300, 200, 129, 5, 90], dtype), Rule(0.1)
    whole = case.attend(rule)
    for rows in ([2], [4, 0], [6, 5, 4, 3, 2, 1, 0]):
        assert case.attend(rule, rows=rows).tobytes() == whole[rows].tobytes()
    order = np.random.default_rng(3).permutation(len(case.keys))
    case.keys, case.values, case.tables = case.keys[order], case.values[order], np.argsort(order)[case.tables]
    assert case.attend(rule).tobytes() == whole.tobytes()


@pytest.mark.parametrize(("page", "end"), [(-1, 65), (9, 65), (2**31 - 1, 65), (3, 64 * 3 + 1)])
def test_a_page_that_is_not_there_is_an_error(page: int, end: int) -> None:
    """XLA would take another one without a word."""
    case = Case(4, 2, 16, 16, [128, 128, 128, 128], np.float32)
    case.tables[2, 1], case.ends[2] = page, end
    block = min((end - 1) // PAGE, 2)
    found = page if block == 1 else -1
    with pytest.raises(Exception, match=f"row 2 at position {end - 1} has page {found} of 9 for block {block} of 2"):
        case.attend(Rule(0.1))


def test_a_page_that_nobody_sees_need_not_be_there() -> None:
    case, rule = Case(4, 2, 16, 16, [128, 70], np.float32), Rule(0.1, window=3)
    expected = case.expected(rule)
    case.tables[:, 0] = -1
    np.testing.assert_allclose(case.attend(rule), expected, atol=2e-6)


def test_shapes_and_dtypes_that_do_not_match_are_an_error() -> None:
    case = Case(4, 2, 16, 16, [128], np.float32)
    case.values = case.values[:, :, :32]
    with pytest.raises(Exception, match=r"shapes do not match: q \[1, 4, 16\], keys"):
        case.attend(Rule(0.1))
    case = Case(4, 2, 16, 16, [128], np.float32)
    case.values = case.values.astype(jnp.bfloat16)
    with pytest.raises(Exception, match="all bfloat16 or all float32"):
        case.attend(Rule(0.1))
    case = Case(4, 2, 16, 16, [128], np.float16)
    with pytest.raises(TypeError, match="float16"):
        case.attend(Rule(0.1))
