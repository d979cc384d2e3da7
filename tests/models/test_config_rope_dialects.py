"""Rotary settings that only some families have, and the numbers that they come to, against float64 numpy."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from config_helpers import attention_of, message, read_config, stored
from novalm_jax.config import RopeConfig
from novalm_jax.models import rope as embedding
from parts_helpers import random, wide

# --- which base, and which settings, where none are given -------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "theta"),
    [
        ("dbrx", 1e4),
        ("deepseek_v2", 1e4),
        ("deepseek_v3", 1e4),
        ("ernie4_5_moe", 5e5),
        ("glm4_moe", 1e4),
        ("gpt_oss", 1.5e5),
        ("hunyuan_v1_moe", 1e4),
        ("llama4_text", 5e5),
        ("minimax_m2", 5e6),
        ("mixtral", 1e6),
        ("phimoe", 1e6),
        ("qwen2", 1e4),
    ],
)
def test_the_base_where_none_is_given(family: str, theta: float) -> None:
    assert attention_of(read_config(stored(family))).rope.theta == theta
    assert attention_of(read_config(stored(family, rope_theta=7))).rope.theta == 7


def test_dbrx_has_its_base_inside() -> None:
    inside = stored("dbrx", **{"attn_config.rope_theta": 5e5})
    assert attention_of(read_config(inside)).rope.theta == 5e5
    assert read_config(inside) == read_config({**inside, "rope_theta": 5e5})
    assert "rope_theta is 10000.0, but attn_config.rope_theta" in message({**inside, "rope_theta": 1e4})
    assert "rope_theta twice" in message({**inside, "rope_parameters": {"rope_theta": 1e4}})


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": None}])
def test_gpt_oss_is_stretched_where_nothing_is_said(changes: dict[str, Any]) -> None:
    config = read_config(stored("gpt_oss", rope_theta=1e4, **changes))
    factor = 0.1 * math.log(32) + 1
    expected = RopeConfig(1e4, "yarn", 32.0, 4096, truncate=False, attention_factor=pytest.approx(factor))
    assert attention_of(config).rope == expected
    assert (attention_of(config).scale, config.context_length) == (pytest.approx(8**-0.5), 131_072)


@pytest.mark.parametrize("settings", [{}, {"rope_theta": 1e4}, {"rope_type": "default", "rope_theta": 1e4}])
def test_gpt_oss_is_not_stretched_where_something_else_is_said(settings: dict[str, Any]) -> None:
    config = read_config(stored("gpt_oss", rope_parameters=settings))
    assert attention_of(config).rope.kind == "default" and config.context_length == 128
    linear = {"rope_type": "linear", "factor": 2.0}
    assert attention_of(read_config(stored("gpt_oss", rope_scaling=linear))).rope.kind == "linear"


# --- how much of a head is rotated ------------------------------------------------------------------------------------


def rotated(family: str, **changes: Any) -> int:
    return attention_of(read_config(stored(family, **changes))).rotary_dim


def test_a_share_of_a_head() -> None:
    assert rotated("glm4_moe") == 4
    assert rotated("glm4_moe", head_dim=12) == 6
    assert rotated("glm4_moe", partial_rotary_factor=1.0) == 8
    assert rotated("glm4_moe", partial_rotary_factor=0.3) == 2
    assert rotated("glm4_moe", rope_parameters={"partial_rotary_factor": 0.25}) == 2
    twice = stored("glm4_moe", partial_rotary_factor=0.5, rope_parameters={"partial_rotary_factor": 1})
    assert "gives partial_rotary_factor twice, as 1 and as 0.5" in message(twice)
    for value in (0, 1.5, "half", True, float("nan")):
        assert f"partial_rotary_factor = {value!r} is not usable" in message(
            stored("glm4_moe", partial_rotary_factor=value)
        )


def test_a_number_of_dimensions_of_a_head() -> None:
    assert rotated("minimax_m2") == 8
    assert rotated("minimax_m2", rotary_dim=4) == 4
    assert rotated("minimax_m2", partial_rotary_factor=0.25) == 2
    assert rotated("minimax_m2", rotary_dim=4, rope_parameters={"partial_rotary_factor": 0.5}) == 4
    # In floating point 2/98 of 98 is a little less than 2.
    assert rotated("minimax_m2", head_dim=98, rotary_dim=2, partial_rotary_factor=2 / 98) == 2
    for changes in ({"partial_rotary_factor": 1.0}, {"rope_parameters": {"partial_rotary_factor": 1.0}}):
        assert "rotary_dim is 4, but a share of 1.0 of head_dim = 8 is 8" in message(
            stored("minimax_m2", rotary_dim=4, **changes)
        )


def test_most_families_rotate_all() -> None:
    assert "partial_rotary_factor = 0.5 is not supported" in message(
        stored("llama", rope_parameters={"partial_rotary_factor": 0.5})
    )
    assert rotated("llama", rope_parameters={"partial_rotary_factor": 1.0}) == 8
    assert "partial_rotary_factor = 0.5 is not known here" in message(stored("llama", partial_rotary_factor=0.5))


def test_factors_are_for_what_is_rotated() -> None:
    entries = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [2.0, 4.0]}
    assert rotated("glm4_moe", rope_scaling=entries) == 4
    entries["short_factor"] = [1.0] * 4
    assert "short_factor has 4 entries, and 2 pairs of dimensions" in message(stored("glm4_moe", rope_scaling=entries))


# --- longrope ---------------------------------------------------------------------------------------------------------

FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1, 4.0, 8.0, 16.0]}
MSCALES: dict[str, Any] = {"short_mscale": 1.1, "long_mscale": 1.4, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"original_max_position_embeddings": 32}, math.sqrt(1 + math.log(4) / math.log(32))),
        ({"original_max_position_embeddings": 32, "factor": 8.0}, math.sqrt(1 + math.log(8) / math.log(32))),
        ({"original_max_position_embeddings": 32, "factor": 0.5}, 1.0),
        ({"original_max_position_embeddings": 32, "attention_factor": 0.75}, 0.75),
        ({}, 1.0),
    ],
)
def test_longrope_scales_by_how_far_it_stretches(settings: dict[str, Any], factor: float) -> None:
    config = read_config(stored("llama", rope_scaling={"type": "longrope", **FACTORS, **settings}))
    found = attention_of(config).rope
    assert (found.short_factors, found.long_factors) == ((1.0, 1.5, 2.0, 2.5), (1.0, 4.0, 8.0, 16.0))
    assert found.attention_factor == found.long_attention_factor == pytest.approx(factor)
    assert found.original_context == settings.get("original_max_position_embeddings", 128)
    assert config.context_length == 128


def test_phimoe_has_two_scales_and_one_set_of_frequencies() -> None:
    found = attention_of(read_config(stored("phimoe", rope_scaling={"type": "longrope", **FACTORS, **MSCALES}))).rope
    assert (found.attention_factor, found.long_attention_factor, found.original_context) == (1.1, 1.4, 32)
    assert found.short_factors == found.long_factors == (1.0, 1.5, 2.0, 2.5)


def test_phimoe_is_refused_what_only_others_have() -> None:
    both = {"rope_type": "longrope", **FACTORS, **MSCALES}
    for name in (*FACTORS, *MSCALES):
        settings = {key: value for key, value in both.items() if key != name}
        assert f"{name} is missing" in message(stored("phimoe", rope_scaling=settings))
    for name in ("factor", "attention_factor"):
        assert f"{name} = 2.0 has no meaning there" in message(stored("phimoe", rope_scaling={**both, name: 2.0}))
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert "kind 'yarn' is not supported (default, longrope are)" in message(stored("phimoe", rope_scaling=yarn))
    twice = stored("phimoe", rope_scaling=both, original_max_position_embeddings=64)
    assert "original_max_position_embeddings twice, as 64 and as 32" in message(twice)
    assert read_config({**twice, "original_max_position_embeddings": 32}) == read_config(
        stored("phimoe", rope_scaling=both)
    )
    assert "short_mscale = 1.1 has no meaning there" in message(stored("llama", rope_scaling=both))


# --- a stretched base -------------------------------------------------------------------------------------------------


def test_an_alpha_stretches_the_base_once_and_for_all() -> None:
    settings = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    config = read_config(stored("hunyuan_v1_moe", rope_scaling={**settings, "mscale_all_dim": 1.0}))
    assert attention_of(config).rope == RopeConfig(1e4, "ntk", 1000.0)
    assert config.context_length == 128
    plain = read_config(stored("hunyuan_v1_moe", rope_scaling={"type": "dynamic", "factor": 4.0}))
    assert attention_of(plain).rope == RopeConfig(1e4, "dynamic", 4.0, 128)
    assert "alpha = 1000.0 has no meaning there" in message(stored("llama", rope_scaling=settings))
    assert "head_dim is 2, for which rotary embedding cannot be stretched by kind 'ntk'" in message(
        stored("hunyuan_v1_moe", head_dim=2, rope_scaling=settings)
    )


# --- YaRN's two corrections -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
@pytest.mark.parametrize(("mscale", "expected"), [(0.707, 1.5896), (1.0, 1.8739)])
def test_deepseek_corrects_the_softmax_and_not_the_angles(family: str, mscale: float, expected: float) -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64}
    attention = attention_of(
        read_config(stored(family, rope_scaling={**yarn, "mscale": mscale, "mscale_all_dim": mscale}))
    )
    assert attention.rope.attention_factor == 1.0
    assert attention.scale * 12**0.5 == pytest.approx(expected, abs=1e-4)
    # Without mscale_all_dim it is the other way round.
    plain = attention_of(read_config(stored(family, rope_scaling=yarn)))
    assert plain.scale == pytest.approx(12**-0.5)
    assert plain.rope.attention_factor == pytest.approx(0.1 * math.log(40) + 1)


def test_other_families_have_the_first_correction_alone() -> None:
    yarn = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    attention = attention_of(read_config(stored("llama", rope_scaling=yarn)))
    assert (attention.rope.attention_factor, attention.scale) == (1.0, pytest.approx(8**-0.5))


def test_ramps_without_a_width_are_steps() -> None:
    kimi = {
        "type": "yarn",
        "factor": 32.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
    }
    found = attention_of(read_config(stored("kimi_k2", rope_scaling=kimi))).rope
    # Where theta ** (-2 i / 64) turns once in 4096 tokens: i = 22.5, between whole dimensions 22 and 23.
    ratio = _ratio(RopeConfig(5e4, "yarn", 32.0, 4096, beta_fast=found.beta_fast, beta_slow=found.beta_slow), 64)
    border = 64 * math.log(4096 / (2 * math.pi)) / (2 * math.log(5e4))
    np.testing.assert_allclose(ratio[: math.floor(border) + 1], 1, rtol=1e-5)
    np.testing.assert_allclose(ratio[math.ceil(border) :], 32, rtol=1e-5)
    scout = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    config = read_config(stored("llama4_text", rope_scaling={**scout, "original_max_position_embeddings": 8192}))
    ratio = _ratio(RopeConfig(5e5, "llama3", 16.0, 8192, 1.0, 1.0), 128)
    turns = 8192 * 5e5 ** -(np.arange(64) / 64) / (2 * math.pi)
    np.testing.assert_allclose(ratio, np.where(turns >= 1, 1.0, 16.0), rtol=1e-5)
    assert attention_of(config).rope.high_freq_factor == attention_of(config).rope.low_freq_factor == 1


def _ratio(config: RopeConfig, dim: int) -> np.ndarray:
    """By how much frequencies are divided."""
    found: np.ndarray = embedding.static_frequencies(RopeConfig(config.theta), dim) / embedding.static_frequencies(
        config, dim
    )
    return found


# --- the numbers ------------------------------------------------------------------------------------------------------

POSITIONS = np.array([[0, 1, 7, 30, 31], [3, 2, 39, 40, 1000]], np.int32)
LENGTHS = np.array([32, 1001], np.int32)


def both_rows(config: RopeConfig, dim: int) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = embedding.angles(config, dim, jnp.asarray(POSITIONS), jnp.asarray(LENGTHS))
    assert cos.shape == sin.shape == (2, 5, dim // 2) and cos.dtype == sin.dtype == jnp.float32
    return np.asarray(cos), np.asarray(sin)


def plain_frequencies(theta: float, dim: int) -> np.ndarray:
    frequencies: np.ndarray = theta ** (-2.0 * np.arange(dim // 2) / dim)
    return frequencies


def test_longrope_changes_over_beyond_the_original_context() -> None:
    short, long = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5), (1.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    config = RopeConfig(
        *(1e4, "longrope", 8.0, 32),
        short_factors=short,
        long_factors=long,
        attention_factor=1.1,
        long_attention_factor=1.4,
    )
    cos, sin = both_rows(config, 12)
    # 32 tokens are not more than the original 32; 1001 are.
    for row, factors, scale in ((0, short, 1.1), (1, long, 1.4)):
        angle = POSITIONS[row, :, None] * plain_frequencies(1e4, 12) / np.asarray(factors)
        np.testing.assert_allclose(cos[row], np.cos(angle) * scale, atol=2e-4)
        np.testing.assert_allclose(sin[row], np.sin(angle) * scale, atol=2e-4)
    beyond = embedding.angles(config, 12, jnp.asarray(POSITIONS), jnp.asarray([33, 32], jnp.int32))
    assert not np.allclose(beyond[1][0], sin[0], atol=1e-3) and not np.allclose(beyond[1][1], sin[1], atol=1e-3)


def test_a_stretched_base() -> None:
    cos, sin = both_rows(RopeConfig(1e4, "ntk", 1000.0), 16)
    angle = POSITIONS[..., None] * plain_frequencies(1e4 * 1000 ** (16 / 14), 16)
    np.testing.assert_allclose(cos, np.cos(angle), atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(angle), atol=1e-4)


@pytest.mark.parametrize("pairs", [False, True])
def test_the_first_part_of_a_head_turns_and_the_rest_stays(pairs: bool) -> None:
    x, angle = random(2, 3, 4, 10), np.random.default_rng(3).uniform(0, 6, (2, 3, 3))
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    turned = np.asarray(embedding.rotate(x, cos, sin, pairs=pairs))
    part, turn = wide(x)[..., :6], np.exp(1j * angle)[:, :, None, :]
    expected = part.copy()
    if pairs:
        whole = (part[..., ::2] + 1j * part[..., 1::2]) * turn
        expected[..., ::2], expected[..., 1::2] = whole.real, whole.imag
    else:
        whole = (part[..., :3] + 1j * part[..., 3:]) * turn
        expected[..., :3], expected[..., 3:] = whole.real, whole.imag
    np.testing.assert_allclose(turned[..., :6], expected, atol=1e-6)
    np.testing.assert_array_equal(turned[..., 6:], np.asarray(x)[..., 6:])
