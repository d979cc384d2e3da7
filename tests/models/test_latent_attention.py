"""Latent attention in its forms, and its module, against float64 numpy; promises on pages, bits and memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from novalm_jax.compat import compile_program
from novalm_jax.config import LatentConfig, RopeConfig
from novalm_jax.kernels import latent_attention
from novalm_jax.kernels.attention import Rule
from novalm_jax.kernels.latent_attention import Up
from novalm_jax.kv.paged import LayerPages, PagedView, page_shape
from novalm_jax.kv.pages import PAGE
from novalm_jax.models.attention import Positions, Uncached
from novalm_jax.models.mla import LatentAttention
from parts_helpers import (
    attended,
    plain_rms,
    plain_rotation,
    random,
    random_module,
    rows_do_not_depend_on_company,
    same_bits,
    same_bits_however_cut,
    unwritten,
    wide,
)

H, N, R, L, C = 4, 6, 4, 5, 7
"""Heads, dimensions of a key that are not and that are rotated, rank of the latents, dimensions of a value."""

S, BLOCK, PROMPT, PAGES = 32, 8, 16, 24
FORMS = {"expanded": latent_attention.expanded, "absorbed": latent_attention.absorbed}


def some_up(dtype: Any = jnp.float32) -> Up:
    return Up(random(H, N, L, seed=1, dtype=dtype), random(H, C, L, seed=2, dtype=dtype))


def plain_latent(q: Any, latents: Any, up: Up, start: int, scale: float) -> np.ndarray:
    """One sequence: every head's keys and values from the latents `[s, l + r]`, then ordinary attention."""
    latents, rank = wide(latents), up.keys.shape[-1]
    rotated = latents[:, rank:]
    keys = np.stack([np.concatenate([latents[:, :rank] @ w.T, rotated], axis=-1) for w in wide(up.keys)], axis=1)
    values = np.stack([latents[:, :rank] @ w.T for w in wide(up.values)], axis=1)
    return attended(wide(q), keys, values, start, scale)


@partial(jax.jit, static_argnames="form")
def attend(form: str, q: Any, pages: Any, up: Up, tables: Any, starts: Any, ends: Any) -> jax.Array:
    return FORMS[form](q, pages, up, tables, starts, ends, Rule(0.3))


def pages_of(latents: jax.Array, ends: Any, width: int = S // BLOCK, order: int = 7) -> tuple[np.ndarray, Any]:
    """`[PAGES, 1, BLOCK, l + r]`, NaN but for the first latents of each row; and the tables of the rows."""
    numbers = iter(np.random.default_rng(order).permutation(PAGES))
    pages = np.full((PAGES, 1, BLOCK, L + R), np.nan, np.asarray(latents).dtype)
    tables = np.full((len(ends), width), PAGES, np.int32)
    for table, end, sequence in zip(tables, ends, np.asarray(latents), strict=True):
        table[: -(-end // BLOCK)] = [next(numbers) for _ in range(0, end, BLOCK)]
        for at in range(end):
            pages[table[at // BLOCK], 0, at % BLOCK] = sequence[at]
    return pages if latents.dtype == jnp.float32 else pages.view(np.uint16), tables


def test_reference() -> None:
    q, latents, up = random(2, 9, H, N + R), random(2, 9, L + R, seed=3), some_up()
    out = latent_attention.reference(q, latents, up, Rule(0.3))
    for row in range(2):
        np.testing.assert_allclose(out[row], plain_latent(q[row], latents[row], up, 0, 0.3), atol=3e-6)


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_in_chunks(form: str, chunk: int) -> None:
    """The first chunk has no earlier keys; the last one is padded; what is not yet written is NaN."""
    q, latents, up = random(1, PROMPT, H, N + R), random(1, PROMPT, L + R, seed=3), some_up()
    parts = []
    for start in range(0, PROMPT, chunk):
        end = min(start + chunk, PROMPT)
        pages, tables = pages_of(latents, [end])
        padded = np.pad(q[:, start:end], ((0, 0), (0, chunk - (end - start)), (0, 0), (0, 0)), constant_values=1)
        out = np.asarray(attend(form, padded, pages, up, tables, *(np.array([at], np.int32) for at in (start, end))))
        assert not out[:, end - start :].any()
        parts.append(out[:, : end - start])
    np.testing.assert_allclose(np.concatenate(parts, 1)[0], plain_latent(q[0], latents[0], up, 0, 0.3), atol=3e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_many_rows(form: str, dtype: Any) -> None:
    """Around the borders of pages, with an idle row, in the form that pages have. Neither the order of pages nor the
    width of tables makes a difference to a bit."""
    t, starts = 3, np.array([0, 7, 8, 29, -1], np.int32)
    ends = np.where(starts < 0, 0, starts + t)
    q, latents = random(5, t, H, N + R, dtype=dtype), random(5, S, L + R, seed=3, dtype=dtype)
    up = some_up(dtype)
    pages, tables = pages_of(latents, ends)
    out = attend(form, q, pages, up, tables, starts, ends)
    for order, width in ((1, 4), (2, 64)):
        pages, tables = pages_of(latents, ends, width, order)
        assert same_bits(attend(form, q, pages, up, tables, starts, ends), out)
    assert out.dtype == dtype and out.shape == (5, t, H, C)
    assert not wide(out[4]).any()
    for row, start in enumerate(starts[:4]):
        expected = plain_latent(q[row], latents[row], up, start, 0.3)
        np.testing.assert_allclose(wide(out[row]), expected, atol=3e-6 if dtype == jnp.float32 else 0.06)


# --- the module ------------------------------------------------------------------------------------------------------


def config_of(query_rank: int | None, *, bias: bool = False, pairs: bool = True) -> LatentConfig:
    return LatentConfig(H, query_rank, L, N, R, C, 0.21, RopeConfig(50.0, pairs=pairs), norm_eps=0.1, bias=bias)


def plain_module(x: np.ndarray, values: dict[str, np.ndarray], config: LatentConfig) -> np.ndarray:
    """One sequence `[t, d]` from position 0 (arXiv:2405.04434, section 2.1 and appendix C)."""

    def product(name: str, inner: np.ndarray) -> np.ndarray:
        return inner @ values[f"{name}.weight"].T + values.get(f"{name}.bias", 0.0)

    t, at = len(x), np.arange(len(x))
    if config.query_rank is None:
        q = product("q", x)
    else:
        q = product("q_up", plain_rms(product("q_down", x), config.norm_eps, values["q_norm.scale"]))
    q = q.reshape(t, H, N + R)
    down = product("kv_down", x)
    compressed = plain_rms(down[:, :L], config.norm_eps, values["kv_norm.scale"])
    up = product("kv_up", compressed).reshape(t, H, N + C)

    def turned(part: np.ndarray) -> np.ndarray:
        return plain_rotation(part, at, config.rope.theta, R, pairs=config.rope.pairs)

    shared = np.repeat(turned(down[:, None, L:]), H, axis=1)
    q = np.concatenate([q[..., :N], turned(q[..., N:])], axis=-1)
    mixed = attended(q, np.concatenate([up[..., :N], shared], axis=-1), up[..., N:], 0, config.scale)
    return product("out", mixed.reshape(t, H * C))


@pytest.mark.parametrize(
    ("query_rank", "bias", "pairs"), [(None, False, True), (None, True, False), (9, False, False), (9, True, True)]
)
def test_module(query_rank: int | None, bias: bool, pairs: bool) -> None:
    """Without pages, and with them: a prefill, another chunk, then step by step into another page."""
    config = config_of(query_rank, bias=bias, pairs=pairs)
    module, values = random_module(lambda rngs: LatentAttention(12, config, dtype=jnp.float32, rngs=rngs))
    x = random(1, 67, 12)
    biases = {"kv_down.bias", "out.bias", *(["q_down.bias"] if query_rank else [])} if bias else set()
    assert {path for path in values if path.endswith("bias")} == biases
    expected = plain_module(wide(x)[0], values, config)
    at = Positions(jnp.arange(67)[None], jnp.full((1,), 67))
    uncached = jax.jit(lambda x: module(x, at, Uncached())[0])
    np.testing.assert_allclose(uncached(x)[0], expected, atol=3e-6)

    @jax.jit
    def run(pages: LayerPages, x: jax.Array, start: jax.Array) -> tuple[jax.Array, LayerPages]:
        positions = start + jnp.arange(x.shape[1], dtype=jnp.int32)
        at = Positions(positions[None], positions[-1:] + 1)
        out, view = module(x, at, PagedView(pages, jnp.asarray([[2, 0]], jnp.int32), start[None], at.length))
        return out, view.pages

    pages, parts = unwritten(page_shape(config, 3, np.dtype(np.float32))), []
    for start, end in ((0, 50), (50, 62), *((i, i + 1) for i in range(62, 67))):
        out, pages = run(pages, x[:, start:end], jnp.int32(start))
        parts.append(out[0])
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=3e-6)
    assert pages.values is None
    assert np.isfinite(pages.keys[2]).all() and np.isfinite(pages.keys[0, 0, :3]).all()
    assert np.isnan(pages.keys[1]).all() and np.isnan(pages.keys[0, 0, 3:]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_page_holds_the_latent_and_the_shared_key_of_each_token(dtype: Any) -> None:
    pages = page_shape(config_of(9), 3, np.dtype(dtype))
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages)]
    assert sum(sizes) / (3 * PAGE) == (L + R) * np.dtype(dtype).itemsize


# --- bits and memory -------------------------------------------------------------------------------------------------

DEEPSEEK = {"nope_dim": 128, "rope_dim": 64, "value_dim": 128, "kv_rank": 512}
ODD = {"nope_dim": 20, "rope_dim": 12, "value_dim": 28, "kv_rank": 36}


def step_of(
    hidden: int, heads: int, query_rank: int | None, dims: dict[str, int], dtype: Any
) -> tuple[Any, Any, LatentConfig]:
    """A step as a function of (weights, pages, x, tables, starts, ends), and its weights."""
    config = LatentConfig(heads, query_rank, scale=0.07, rope=RopeConfig(1e4, pairs=True), norm_eps=1e-6, **dims)
    module, _ = random_module(lambda rngs: LatentAttention(hidden, config, dtype=dtype, rngs=rngs))
    graph, weights = nnx.split(module)

    def step(weights: Any, pages: LayerPages, x: Any, tables: Any, starts: Any, ends: Any) -> Any:
        at = Positions(starts[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None], ends)
        out, view = nnx.merge(graph, weights)(x, at, PagedView(pages, tables, starts, ends))
        return out, view.pages

    return step, weights, config


@pytest.mark.parametrize(
    ("hidden", "heads", "query_rank", "dims", "dtype"),
    [
        (512, 16, 192, DEEPSEEK, jnp.float32),
        (512, 16, None, DEEPSEEK, jnp.bfloat16),
        (60, 3, None, ODD, jnp.float32),
    ],
    ids=["deepseek", "deepseek in bfloat16", "odd"],
)
def test_a_row_of_a_decode_step_does_not_depend_on_the_number_of_rows(
    hidden: int, heads: int, query_rank: int | None, dims: dict[str, int], dtype: Any
) -> None:
    """In bfloat16 it must first of all run: XLA's CPU backend has no product of all heads but in one layout."""
    step, weights, config = step_of(hidden, heads, query_rank, dims, dtype)
    x, starts = random(32, 1, hidden, dtype=dtype), jnp.asarray(np.arange(32) * 17 % 128, jnp.int32)
    latents = np.asarray(random(64, 1, PAGE, config.kv_rank + config.rope_dim, seed=9, dtype=dtype))
    pages = LayerPages(jnp.asarray(latents if dtype == jnp.float32 else latents.view(np.uint16)), None)
    tables = jnp.asarray(np.random.default_rng(3).permutation(64).reshape(32, 2), jnp.int32)
    assert rows_do_not_depend_on_company(
        lambda *arguments: step(*arguments)[0],
        lambda n: (weights, pages, x[:n], tables[:n], starts[:n], starts[:n] + 1),
    )


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [(4, DEEPSEEK, jnp.bfloat16), (3, ODD, jnp.float32)],
    ids=["deepseek in bfloat16", "odd"],
)
def test_a_token_of_a_prompt_does_not_depend_on_how_it_is_cut(heads: int, dims: dict[str, int], dtype: Any) -> None:
    step, weights, config = step_of(60, heads, 24, dims, dtype)
    new = [random(1, 600, 60, dtype=dtype)]
    assert same_bits_however_cut(partial(step, weights), page_shape(config, 10, np.dtype(dtype)), new)


def test_a_decode_step_writes_in_place_and_takes_no_memory_for_the_pages_or_the_weights() -> None:
    temporaries = []
    for width in (16, 128):
        step, weights, config = step_of(64, 16, None, DEEPSEEK, jnp.bfloat16)
        pages = page_shape(config, 4 * width, np.dtype(jnp.bfloat16))
        ints, x = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4, 1, 64), jnp.bfloat16)
        tables = jax.ShapeDtypeStruct((4, width), jnp.int32)
        arguments = (weights, pages, x, tables, ints, ints)
        analysis: Any = compile_program(step, arguments, donate=(1,)).memory_analysis()
        assert analysis.alias_size_in_bytes == 4 * width * PAGE * (512 + 64) * 2
        temporaries.append(analysis.temp_size_in_bytes)
    assert temporaries[0] == temporaries[1]
    # Keys and values take their parts of one matrix, bfloat16 `[16, 256, 512]`, which may be copied but not widened.
    assert temporaries[0] < 1.5 * 16 * 256 * 512 * 2
