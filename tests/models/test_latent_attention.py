"""Latent attention in its forms, and its module, against float64 numpy; promises on the cache, bits and memory."""

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
from novalm_jax.kv.static import CacheView, LayerCache, cache_shape
from novalm_jax.models.attention import Positions, Uncached
from novalm_jax.models.mla import LatentAttention
from parts_helpers import (
    attended,
    plain_rms,
    plain_rotation,
    random,
    random_module,
    rows_do_not_depend_on_company,
    wide,
)

H, N, R, L, C = 4, 6, 4, 5, 7
"""Heads, dimensions of a key that are not and that are rotated, rank of the latents, dimensions of a value."""

S, BLOCK, PROMPT = 32, 8, 16
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
def attend(form: str, q: Any, cache: Any, up: Up, rows: Any, starts: Any) -> jax.Array:
    return FORMS[form](q, cache, up, rows, starts, Rule(0.3), BLOCK)


def cache_of(latents: jax.Array, ends: list[int], rows: list[int]) -> np.ndarray:
    """`[5, 1, S, l + r]`: NaN but for the first latents of each row."""
    cache = np.full((5, 1, S, L + R), np.nan, np.asarray(latents).dtype)
    for row, end, sequence in zip(rows, ends, np.asarray(latents), strict=True):
        cache[row, 0, :end] = sequence[:end]
    return cache


def test_reference() -> None:
    q, latents, up = random(2, 9, H, N + R), random(2, 9, L + R, seed=3), some_up()
    out = latent_attention.reference(q, latents, up, Rule(0.3))
    for row in range(2):
        np.testing.assert_allclose(out[row], plain_latent(q[row], latents[row], up, 0, 0.3), atol=3e-6)


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_in_chunks(form: str, chunk: int) -> None:
    """The first chunk has no earlier keys; the last one is shorter; what is not yet written is NaN."""
    q, latents, up = random(1, PROMPT, H, N + R), random(1, PROMPT, L + R, seed=3), some_up()
    row, parts = jnp.asarray([3], jnp.int32), []
    for start in range(0, PROMPT, chunk):
        end = min(start + chunk, PROMPT)
        cache = jnp.asarray(cache_of(latents, [end], [3]))
        parts.append(np.asarray(attend(form, q[:, start:end], cache, up, row, jnp.asarray([start], jnp.int32))))
    np.testing.assert_allclose(np.concatenate(parts, 1)[0], plain_latent(q[0], latents[0], up, 0, 0.3), atol=3e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_many_rows(form: str, dtype: Any) -> None:
    """Around the borders of blocks, with an idle row, in the form that a cache stores."""
    starts, rows, t = [0, 7, 8, 29, -1], [3, 0, 4, 1, 2], 3
    q, latents = random(5, t, H, N + R, dtype=dtype), random(5, S, L + R, seed=3, dtype=dtype)
    up, cache = some_up(dtype), cache_of(latents, [max(start, 0) + t for start in starts], rows)
    stored = jnp.asarray(cache if dtype == jnp.float32 else cache.view(np.uint16))
    out = attend(form, q, stored, up, jnp.asarray(rows, jnp.int32), jnp.asarray(starts, jnp.int32))
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
    """Without a cache, and with one: a prefill, another chunk, then step by step."""
    config = config_of(query_rank, bias=bias, pairs=pairs)
    module, values = random_module(lambda rngs: LatentAttention(12, config, dtype=jnp.float32, rngs=rngs))
    x = random(1, 12, 12)
    biases = {"kv_down.bias", "out.bias", *(["q_down.bias"] if query_rank else [])} if bias else set()
    assert {path for path in values if path.endswith("bias")} == biases
    expected = plain_module(wide(x)[0], values, config)
    at = Positions(jnp.arange(12)[None], jnp.full((1,), 12))
    uncached = jax.jit(lambda x: module(x, at, Uncached())[0])
    np.testing.assert_allclose(uncached(x)[0], expected, atol=3e-6)

    @jax.jit
    def run(cache: LayerCache, x: jax.Array, start: jax.Array) -> tuple[jax.Array, LayerCache]:
        positions = start + jnp.arange(x.shape[1], dtype=jnp.int32)
        at = Positions(positions[None], positions[-1:] + 1)
        out, view = module(x, at, CacheView(cache, jnp.ones(1, jnp.int32), start[None], BLOCK))
        return out, view.cache

    cache = jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan), cache_shape(config, 2, S, np.dtype(np.float32)))
    parts = []
    for start, end in ((0, 5), (5, 8), *((i, i + 1) for i in range(8, 12))):
        out, cache = run(cache, x[:, start:end], jnp.int32(start))
        parts.append(out[0])
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=3e-6)
    assert cache.values is None
    assert np.isfinite(cache.keys[1, 0, :12]).all()
    assert np.isnan(cache.keys[0]).all() and np.isnan(cache.keys[1, 0, 12:]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cache_holds_the_latent_and_the_shared_key_of_each_token(dtype: Any) -> None:
    cache = cache_shape(config_of(9), 3, 64, np.dtype(dtype))
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)]
    assert sum(sizes) / (3 * 64) == (L + R) * np.dtype(dtype).itemsize


# --- bits and memory -------------------------------------------------------------------------------------------------

DEEPSEEK = {"nope_dim": 128, "rope_dim": 64, "value_dim": 128, "kv_rank": 512}
ODD = {"nope_dim": 20, "rope_dim": 12, "value_dim": 28, "kv_rank": 36}


def decode_step(
    hidden: int, heads: int, query_rank: int | None, dims: dict[str, int], dtype: Any, capacity: int
) -> tuple[Any, Any, LatentConfig]:
    """A decode step as a function of (weights, cache, x, rows, starts), and its weights."""
    config = LatentConfig(heads, query_rank, scale=0.07, rope=RopeConfig(1e4, pairs=True), norm_eps=1e-6, **dims)
    module, _ = random_module(lambda rngs: LatentAttention(hidden, config, dtype=dtype, rngs=rngs))
    graph, weights = nnx.split(module)

    def step(weights: Any, cache: LayerCache, x: Any, rows: Any, starts: Any) -> Any:
        at = Positions(starts[:, None], starts + 1)
        out, view = nnx.merge(graph, weights)(x, at, CacheView(cache, rows, starts, min(128, capacity)))
        return out, view.cache

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
    step, weights, config = decode_step(hidden, heads, query_rank, dims, dtype, 64)
    x, starts = random(32, 1, hidden, dtype=dtype), jnp.asarray(np.arange(32) * 17 % 64, jnp.int32)
    latents = np.asarray(random(32, 1, 64, config.kv_rank + config.rope_dim, seed=9, dtype=dtype))
    cache = LayerCache(jnp.asarray(latents if dtype == jnp.float32 else latents.view(np.uint16)), None)
    rows = jnp.arange(32, dtype=jnp.int32)
    assert rows_do_not_depend_on_company(
        lambda *arguments: step(*arguments)[0], lambda n: (weights, cache, x[:n], rows[:n], starts[:n])
    )


def test_a_decode_step_writes_in_place_and_takes_no_memory_for_the_cache_or_the_weights() -> None:
    temporaries = []
    for capacity in (1024, 8192):
        step, weights, config = decode_step(64, 16, None, DEEPSEEK, jnp.bfloat16, capacity)
        cache = cache_shape(config, 4, capacity, np.dtype(jnp.bfloat16))
        ints, x = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4, 1, 64), jnp.bfloat16)
        analysis: Any = compile_program(step, (weights, cache, x, ints, ints), donate=(1,)).memory_analysis()
        assert analysis.alias_size_in_bytes == 4 * capacity * (512 + 64) * 2
        temporaries.append(analysis.temp_size_in_bytes)
    assert temporaries[0] == temporaries[1]
    # Keys and values take their parts of one matrix, bfloat16 `[16, 256, 512]`, which may be copied but not widened.
    assert temporaries[0] < 1.5 * 16 * 256 * 512 * 2
