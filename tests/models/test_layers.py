"""Rotary positions, products and a layer's multipliers against plain float64 numpy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig, RopeConfig
from novalm_jax.engine.functions import DECODE_ROWS
from novalm_jax.kernels.linear import einsum
from novalm_jax.models import rope
from novalm_jax.models.attention import Positions, Uncached
from novalm_jax.models.decoder import Decoder, DecoderLayer
from parts_helpers import (
    plain_rms,
    plain_rotation,
    random,
    random_module,
    rows_do_not_depend_on_company,
    same_bits,
    wide,
)

# --- rotary positions ------------------------------------------------------------------------------------------------


def expected_frequencies(config: RopeConfig, c: int, length: int) -> np.ndarray:
    """Pair by pair, from the published formulas."""
    found = []
    turns_at = [
        c * np.log(config.original_context / (r * 2 * np.pi)) / (2 * np.log(config.theta))
        for r in (config.beta_fast, config.beta_slow)
        if config.original_context
    ]
    for i in range(c // 2):
        f = config.theta ** (-2 * i / c)
        if config.kind == "linear":
            f /= config.factor
        elif config.kind == "ntk":
            f = (config.theta * config.factor ** (c / (c - 2))) ** (-2 * i / c)
        elif config.kind == "longrope":
            long = length > config.original_context
            f /= (config.long_factors if long else config.short_factors)[i]
        elif config.kind == "dynamic":
            n = max(length, config.original_context)
            stretch = config.factor * n / config.original_context - (config.factor - 1)
            f = (config.theta * stretch ** (c / (c - 2))) ** (-2 * i / c)
        elif config.kind == "llama3":
            wave, original = 2 * np.pi / f, config.original_context
            if wave > original / config.low_freq_factor:
                f /= config.factor
            elif wave >= original / config.high_freq_factor:
                s = (original / wave - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
                f = (1 - s) * f / config.factor + s * f
        elif config.kind == "yarn":
            low, high = turns_at
            if config.truncate:
                low, high = np.floor(low), np.ceil(high)
            low, high = max(low, 0), min(high, c - 1)
            ramp = min(max((i - low) / ((high - low) or 0.001), 0), 1)
            f = f / config.factor * ramp + f * (1 - ramp)
        found.append(f)
    return np.array(found)


ROPES = {
    "default": RopeConfig(1e4),
    "linear": RopeConfig(500.0, "linear", 4.0),
    "dynamic": RopeConfig(1e4, "dynamic", 4.0, 16),
    "llama3": RopeConfig(5e5, "llama3", 32.0, 8192, 1.0, 4.0),
    "ntk": RopeConfig(1e4, "ntk", 8.0),
    "longrope": RopeConfig(
        1e4,
        "longrope",
        original_context=16,
        short_factors=tuple(1 + i / 7 for i in range(32)),
        long_factors=tuple(3 + i / 3 for i in range(32)),
        attention_factor=1.2,
        long_attention_factor=1.5,
    ),
    "yarn": RopeConfig(1e6, "yarn", 4.0, 4096, attention_factor=1.1386),
    "yarn, not truncated": RopeConfig(100.0, "yarn", 4.0, 32, beta_fast=4.0, beta_slow=0.25, truncate=False),
    "yarn, no ramp": RopeConfig(1e4, "yarn", 4.0, 64, beta_fast=4.0, beta_slow=4.0, truncate=False),
}


@pytest.mark.parametrize("name", ROPES)
def test_angles_follow_the_published_formulas(name: str) -> None:
    config, c = ROPES[name], 64
    positions = np.array([[0, 1, 7, 100], [3, 2, 39, 40]], np.int32)
    lengths = np.array([12, 41], np.int32)
    cos, sin = rope.angles(config, c, jnp.asarray(positions), jnp.asarray(lengths))
    for row, length in enumerate(lengths):
        angle = positions[row, :, None] * expected_frequencies(config, c, int(length))
        long = config.kind == "longrope" and length > config.original_context
        factor = config.long_attention_factor if long else config.attention_factor
        np.testing.assert_allclose(cos[row], np.cos(angle) * factor, atol=2e-5)
        np.testing.assert_allclose(sin[row], np.sin(angle) * factor, atol=2e-5)
    assert cos.dtype == sin.dtype == jnp.float32 and cos.shape == (2, 4, c // 2)


def test_llama3_keeps_divides_and_blends_the_right_pairs() -> None:
    plain = rope.static_frequencies(RopeConfig(5e5), 64)
    ratio = plain / rope.static_frequencies(ROPES["llama3"], 64)
    np.testing.assert_allclose(ratio[:15], 1, rtol=1e-6)
    assert np.all(ratio[15:18] > 1.01) and np.all(ratio[15:18] < 31.9)
    np.testing.assert_allclose(ratio[18:], 32, rtol=1e-6)


def test_dynamic_frequencies_move_only_past_the_models_own_context() -> None:
    def of(length: int) -> np.ndarray:
        return np.asarray(rope.angles(ROPES["dynamic"], 8, jnp.full((1, 1), 9), jnp.full((1,), length))[1])

    assert same_bits(of(3), of(16))
    assert not np.allclose(of(17), of(16), atol=1e-4)


@pytest.mark.parametrize("moved", [3, 16, 17, 40])
def test_longrope_is_short_up_to_and_with_the_original_context(moved: int) -> None:
    config = ROPES["longrope"]
    cos, _ = rope.angles(config, 64, jnp.full((1, 1), 2), jnp.full((1,), moved))
    factors, scale = (config.short_factors, 1.2) if moved <= 16 else (config.long_factors, 1.5)
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64) / np.asarray(factors)
    np.testing.assert_allclose(cos[0, 0], np.cos(2 * plain) * scale, atol=2e-6)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dim", [6, 4])
def test_rotation_turns_pairs_and_leaves_the_rest(dim: int, pairs: bool) -> None:
    x, theta, positions = random(2, 3, 4, 6), 50.0, np.array([[1, 2, 9], [0, 3, 30]])
    angle = positions[..., None] * theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    turned = rope.rotate(x, cos, sin, pairs=pairs)
    for row in range(2):
        expected = plain_rotation(wide(x)[row], positions[row], theta, dim, pairs=pairs)
        np.testing.assert_allclose(turned[row], expected, atol=2e-6)
    assert same_bits(turned[..., dim:], x[..., dim:])


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [60, 512])
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(width: int, dtype: Any) -> None:
    """At widths of real models, before rounding: the router's logits are used as they are."""
    x, weight = random(DECODE_ROWS[-1], 768, dtype=dtype), random(width, 768, seed=1, dtype=dtype)
    assert rows_do_not_depend_on_company(lambda x, weight: einsum("td,ed->te", x, weight), lambda n: (x[:n], weight))


# --- multipliers -----------------------------------------------------------------------------------------------------


def tiny_layer(residual_multiplier: float) -> LayerConfig:
    heads = AttentionConfig(2, 1, 4, 0.5, RopeConfig(1e4), 4)
    return LayerConfig(8, NormConfig(1e-6), heads, MLPConfig(6, "silu"), residual_multiplier)


def test_the_residual_multiplier_scales_both_branches() -> None:
    layer, plain = (
        random_module(lambda rngs, by=by: DecoderLayer(tiny_layer(by), dtype=jnp.float32, rngs=rngs))[0]
        for by in (0.25, 1.0)
    )
    x, branch = random(1, 3, 8), random(3, 8, seed=1)
    np.testing.assert_allclose(layer.add(x, branch), wide(x) + 0.25 * wide(branch)[None], atol=1e-6)
    at = Positions(jnp.arange(3)[None], jnp.full((1,), 3))
    halves = [wide(module.attend(x, at, Uncached())[0]) - wide(x) for module in (layer, plain)]
    np.testing.assert_allclose(halves[0], 0.25 * halves[1], atol=1e-6)


def test_embedding_multiplier_and_logits_divisor() -> None:
    config = ModelConfig(
        "granitemoe",
        11,
        8,
        64,
        NormConfig(1e-6),
        True,
        (tiny_layer(1.0),),
        embedding_multiplier=12.0,
        logits_divisor=4.0,
    )
    model, values = random_module(lambda rngs: Decoder(config, rngs=rngs))
    embedded = model.embed(jnp.asarray([[3, 0]], jnp.int32))
    np.testing.assert_allclose(embedded, 12 * values["embed.weight"][[3, 0]][None], rtol=1e-6)
    x = random(2, 8)
    normal = plain_rms(wide(x), 1e-6, values["norm.scale"])
    np.testing.assert_allclose(model.logits(x), normal @ values["embed.weight"].T / 4, atol=1e-6)
    assert "head.weight" not in values


@pytest.mark.parametrize("tied", [False, True])
def test_the_bias_of_the_head_is_added_before_the_division(tied: bool) -> None:
    layer, norm = tiny_layer(1.0), NormConfig(0.2, "layer", True)
    config = ModelConfig("phimoe", 11, 8, 64, norm, tied, (layer,), head_bias=True, logits_divisor=4.0)
    model, values = random_module(lambda rngs: Decoder(config, rngs=rngs))
    x = random(2, 3, 8) + 2.0
    centred = wide(x) - wide(x).mean(-1, keepdims=True)
    normal = plain_rms(centred, 0.2, values["norm.scale"]) + values["norm.bias"]
    head = values["embed.weight" if tied else "head.weight"]
    np.testing.assert_allclose(model.logits(x), (normal @ head.T + values["head_bias"]) / 4, atol=2e-6)
    assert model.logits(x).dtype == jnp.float32
