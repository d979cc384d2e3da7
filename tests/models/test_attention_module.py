"""The attention module against float64 numpy: norms, rotation, temperature, sinks; its promises on bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from novalm_jax.config import AttentionConfig, RopeConfig, TemperatureConfig
from novalm_jax.kv.paged import LayerPages, PagedView, page_shape
from novalm_jax.kv.pages import PAGE
from novalm_jax.models.attention import Attention, Positions, Uncached, temperature
from parts_helpers import (
    attended,
    plain_rms,
    plain_rotation,
    random,
    random_module,
    rows_do_not_depend_on_company,
    same_bits_however_cut,
    unwritten,
    wide,
)

H, G, C, EPS = 4, 2, 8, 0.2
ROPE = RopeConfig(50.0)
PAIRS = RopeConfig(50.0, pairs=True)
BASE = AttentionConfig(H, G, C, 0.4, ROPE, C)
CONFIGS = {
    "plain": BASE,
    "biases": dataclasses.replace(BASE, qkv_bias=True, out_bias=True),
    "partial rotation": dataclasses.replace(BASE, rotary_dim=4),
    "pairs": dataclasses.replace(BASE, rope=PAIRS),
    "partial rotation in pairs": dataclasses.replace(BASE, rope=PAIRS, rotary_dim=6),
    "norm of each head": dataclasses.replace(BASE, qk_norm="head"),
    "norm after rotation": dataclasses.replace(BASE, qk_norm="head", norm_after_rope=True),
    "norm of all heads": dataclasses.replace(BASE, qk_norm="all", rotary_dim=4),
    "unit norm": dataclasses.replace(BASE, qk_norm="unit", rope=PAIRS),
    "clip": dataclasses.replace(BASE, clip_qkv=0.8),
    "no positions, temperature": dataclasses.replace(
        BASE, rope=None, rotary_dim=0, temperature=TemperatureConfig(4.0, 0.7)
    ),
    "sinks in a window": dataclasses.replace(BASE, sinks=True, window=3, qkv_bias=True),
    "chunks": dataclasses.replace(BASE, chunk=5, qk_norm="unit"),
}


def plain_module(x: np.ndarray, values: dict[str, np.ndarray], config: AttentionConfig) -> np.ndarray:
    """One sequence `[t, d]` from position 0."""
    at = np.arange(len(x))

    def product(name: str, inner: np.ndarray) -> np.ndarray:
        return inner @ values[f"{name}.weight"].T + values.get(f"{name}.bias", 0.0)

    def heads(name: str) -> np.ndarray:
        flat, scale = product(name, x), values.get(f"{name}_norm.scale", np.ones(1))
        normed = name != "v"
        if normed and config.qk_norm == "all":
            flat = plain_rms(flat, EPS, scale)
        if config.clip_qkv is not None:
            flat = np.maximum(np.minimum(flat, config.clip_qkv), -config.clip_qkv)
        part = flat.reshape(len(x), -1, C)
        if not normed:
            return part
        if config.qk_norm == "head" and not config.norm_after_rope:
            part = plain_rms(part, EPS, scale)
        if config.rope is not None:
            part = plain_rotation(part, at, config.rope.theta, config.rotary_dim, pairs=config.rope.pairs)
        if config.qk_norm == "head" and config.norm_after_rope:
            part = plain_rms(part, EPS, scale)
        return plain_rms(part, EPS) if config.qk_norm == "unit" else part

    q = heads("q")
    if config.temperature is not None:
        steps = np.floor((at + 1) / config.temperature.floor)
        q = q * (np.log(1 + steps) * config.temperature.scale + 1)[:, None, None]
    limits: dict[str, Any] = {"window": config.window, "chunk": config.chunk, "sinks": values.get("sinks")}
    mixed = attended(q, heads("k"), heads("v"), 0, config.scale, **limits)
    return product("out", mixed.reshape(len(x), H * C))


@pytest.mark.parametrize("name", CONFIGS)
def test_module(name: str) -> None:
    """Without pages, and with them: a prefill, then step by step into another page."""
    config = CONFIGS[name]
    module, values = random_module(lambda rngs: Attention(12, config, EPS, dtype=jnp.float32, rngs=rngs))
    x = random(1, 67, 12)
    expected = plain_module(wide(x)[0], values, config)
    at = Positions(jnp.arange(67)[None], jnp.full((1,), 67))
    uncached = jax.jit(lambda x: module(x, at, Uncached())[0])
    np.testing.assert_allclose(uncached(x)[0], expected, atol=3e-6)
    if name not in ("plain", "biases"):
        assert np.abs(plain_module(wide(x)[0], values, BASE) - expected).max() > 1e-3, "it makes no difference here"

    @jax.jit
    def run(pages: LayerPages, x: jax.Array, start: jax.Array) -> tuple[jax.Array, LayerPages]:
        positions = start + jnp.arange(x.shape[1], dtype=jnp.int32)
        at = Positions(positions[None], positions[-1:] + 1)
        out, view = module(x, at, PagedView(pages, jnp.asarray([[2, 0]], jnp.int32), start[None], at.length))
        return out, view.pages

    pages, parts = unwritten(page_shape(config, 3, np.dtype(np.float32))), []
    for start, end in ((0, 61), *((i, i + 1) for i in range(61, 67))):
        out, pages = run(pages, x[:, start:end], jnp.int32(start))
        parts.append(out[0])
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=3e-6)


def test_temperature_grows_by_steps_of_the_floor() -> None:
    positions = jnp.asarray([0, 8190, 8191, 16382, 16383, 100_000], jnp.int32)
    found = temperature(TemperatureConfig(8192, 0.1), positions)
    np.testing.assert_allclose(found, 1 + 0.1 * np.log([1, 1, 2, 2, 3, 13]), rtol=1e-6)
    assert found.dtype == jnp.float32


WIDE: dict[str, Any] = {"num_heads": 8, "head_dim": 64, "rotary_dim": 64, "window": 40, "scale": 0.125}


@pytest.mark.parametrize(("name", "dtype"), [("sinks in a window", jnp.bfloat16), ("chunks", jnp.float32)])
def test_a_row_of_a_decode_step_does_not_depend_on_the_number_of_rows(name: str, dtype: Any) -> None:
    """At widths of real models, with a head's 64 dimensions."""
    config = dataclasses.replace(CONFIGS[name], **WIDE)
    graph, weights = nnx.split(random_module(lambda rngs: Attention(512, config, 1e-6, dtype=dtype, rngs=rngs))[0])

    def step(weights: Any, pages: LayerPages, x: Any, tables: Any, starts: Any) -> jax.Array:
        at = Positions(starts[:, None], starts + 1)
        return nnx.merge(graph, weights)(x, at, PagedView(pages, tables, starts, at.length))[0]

    x, starts = random(32, 1, 512, dtype=dtype), jnp.asarray(np.arange(32) * 17 % 128, jnp.int32)
    stored = (np.asarray(random(64, G, PAGE, 64, seed=seed, dtype=dtype)) for seed in (1, 2))
    pages = LayerPages(*(jnp.asarray(s if dtype == jnp.float32 else s.view(np.uint16)) for s in stored))
    tables = jnp.asarray(np.random.default_rng(3).permutation(64).reshape(32, 2), jnp.int32)
    assert rows_do_not_depend_on_company(step, lambda n: (weights, pages, x[:n], tables[:n], starts[:n]))


@pytest.mark.parametrize(("name", "dtype"), [("sinks in a window", jnp.bfloat16), ("norm of all heads", jnp.float32)])
def test_a_token_of_a_prompt_does_not_depend_on_how_it_is_cut(name: str, dtype: Any) -> None:
    config = dataclasses.replace(CONFIGS[name], **WIDE)
    module, _ = random_module(lambda rngs: Attention(512, config, 1e-6, dtype=dtype, rngs=rngs))

    def step(pages: LayerPages, x: Any, tables: Any, starts: Any, ends: Any) -> tuple[jax.Array, LayerPages]:
        at = Positions(starts[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None], ends)
        out, view = module(x, at, PagedView(pages, tables, starts, ends))
        return out, view.pages

    pages = page_shape(config, 10, np.dtype(dtype))
    assert same_bits_however_cut(step, pages, [random(1, 600, 512, dtype=dtype)])
