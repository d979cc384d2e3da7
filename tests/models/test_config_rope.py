"""Rotary settings of config.json: both dialects, every kind, and what is refused."""

import itertools
from typing import Any

import pytest

from config_helpers import attention_of, message, read_config, stored
from novalm_jax.models.families.rope import ROPE_FIELDS

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "mscale": 2.0, "mscale_all_dim": 0.5}
LONGROPE = {
    **{"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 4, 8.0, 16.0]},
    **{"factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.25},
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4},
    "dynamic": {"factor": 4},
    "llama3": LLAMA3,
    "yarn": YARN,
    "longrope": LONGROPE,
}


def rope_of(**changes: Any) -> Any:
    return attention_of(read_config(stored("llama", **changes))).rope


@pytest.mark.parametrize(("kind", "spelling"), [*itertools.product(KINDS, ("rope_type", "type"))])
def test_both_dialects_and_both_spellings_say_the_same(kind: str, spelling: str) -> None:
    entries = {spelling: kind, **KINDS[kind]}
    old = stored("llama", rope_theta=5e5, rope_scaling=entries)
    new = stored("llama", rope_parameters={**entries, "rope_theta": 5e5})
    assert read_config(old) == read_config(new)
    rope = attention_of(read_config(old)).rope
    assert (rope.kind, rope.theta) == (kind, 5e5)
    both = old | {"rope_parameters": new["rope_parameters"]}
    assert read_config(both) == read_config(old)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *(("linear", "factor", 8), ("dynamic", "factor", 8)),
        *(("llama3", name, 2 * value) for name, value in LLAMA3.items()),
        *(("yarn", name, 2 * value) for name, value in YARN.items()),
        *(("longrope", name, [1.0] * 4) for name in ("short_factor", "long_factor")),
        *(("longrope", name, 64) for name in ("factor", "original_max_position_embeddings", "attention_factor")),
        *(("yarn", "beta_slow", 2), ("yarn", "attention_factor", 3.0), ("yarn", "truncate", False)),
    ],
)
def test_every_rotary_setting_counts(kind: str, name: str, value: Any) -> None:
    entries = {"rope_type": kind, **KINDS[kind]}
    assert rope_of(rope_scaling=entries) != rope_of(rope_scaling={**entries, name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_settings_of_another_kind_are_refused(kind: str) -> None:
    entries = {"rope_type": kind, **KINDS[kind], "alpha": 1.0}
    assert "alpha = 1.0 has no meaning there" in message(stored("llama", rope_scaling=entries))


@pytest.mark.parametrize(
    "required",
    [("linear", "factor"), ("llama3", "low_freq_factor"), ("yarn", "factor"), ("longrope", "long_factor")],
)
def test_missing_rotary_settings(required: tuple[str, str]) -> None:
    kind, name = required
    for value in ({}, {name: None}):
        entries = {key: x for key, x in KINDS[kind].items() if key != name} | {"rope_type": kind} | value
        assert f"{name} is missing" in message(stored("llama", rope_scaling=entries))


@pytest.mark.parametrize("value", ["4", True, 0, -1.0, [4], float("nan"), float("inf"), 10**400])
def test_unusable_rotary_numbers(value: Any) -> None:
    shown = f"{value!r:.60}"
    assert f"factor = {shown} is not usable" in message(
        stored("llama", rope_scaling={"rope_type": "linear", "factor": value})
    )
    for changes in ({"rope_theta": value}, {"rope_parameters": {"rope_theta": value}}):
        assert f"rope_theta = {shown}" in message(stored("llama", **changes))
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert f"original_max_position_embeddings = {shown}" in message(
        stored("llama", rope_scaling=yarn, original_max_position_embeddings=value)
    )


@pytest.mark.parametrize(
    ("kind", "changes", "part"),
    [
        ("linear", {"factor": 2e6}, "factor = 2000000.0 is not usable (a number from 1e-06 to 1e+06 is)"),
        ("llama3", {"low_freq_factor": 4.5}, "high_freq_factor = 4.0 must not be less than low_freq_factor = 4.5"),
        ("yarn", {"beta_slow": 17}, "beta_fast = 16 must not be less than beta_slow = 17"),
        ("yarn", {"beta_slow": 40, "beta_fast": None}, "beta_fast = 32.0 must not be less than beta_slow = 40"),
        ("yarn", {"beta_fast": 2e6}, "beta_fast = 2000000.0 is not usable"),
        ("yarn", {"rope_theta": 1}, "rope_theta = 1.0 must be more than 1"),
        ("yarn", {"attention_factor": 2000}, "attention_factor = 2000 is not usable"),
        ("yarn", {"mscale": 1001.0}, "mscale = 1001.0 is not usable"),
        ("yarn", {"original_max_position_embeddings": 0.5}, "embeddings = 0.5 is not usable (a whole number from 1"),
        ("yarn", {"truncate": 1}, "truncate = 1 is not usable (true or false is)"),
        *(
            ("longrope", {name: value}, f"{name} = {value!r} is not usable (a list of positive numbers is)")
            for name in ("short_factor", "long_factor")
            for value in ([], 2.0, [1.0, 0.0, 1.0, 1.0], [True] * 4, [None], ["1"], [float("inf")])
        ),
        ("longrope", {"short_factor": [1.0]}, "short_factor has 1 entries, and 4 pairs of dimensions are rotated"),
        ("longrope", {"long_factor": [1.0] * 8}, "long_factor has 8 entries, and 4 pairs of dimensions are rotated"),
    ],
)
def test_rotary_settings_from_which_no_frequencies_follow(kind: str, changes: dict[str, Any], part: str) -> None:
    entries = {"rope_type": kind, **KINDS[kind], **changes}
    assert part in message(stored("llama", rope_parameters=entries))


def test_two_dimensions_cannot_be_stretched_by_the_length() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    assert "head_dim is 2, for which" in message(stored("llama", head_dim=2, rope_scaling=dynamic))
    assert attention_of(read_config(stored("llama", head_dim=2))).head_dim == 2


@pytest.mark.parametrize("kind", ["su", "mrope", 3, ["yarn"]])
def test_unknown_kinds_of_rotary_embedding(kind: Any) -> None:
    assert f"{kind!r} is not supported (default, linear" in message(stored("llama", rope_scaling={"type": kind}))


def test_conflicting_dialects_are_refused() -> None:
    text = message(stored("llama", rope_theta=1e4, rope_parameters={"rope_theta": 1e6}))
    assert "rope_theta twice, as 1000000.0 and as 10000.0" in text
    linear = {"rope_type": "linear", "factor": 2.0}
    assert "factor twice" in message(stored("llama", rope_scaling=linear, rope_parameters={**linear, "factor": 4.0}))


def test_empty_and_null_rotary_settings_mean_the_default() -> None:
    plain = rope_of()
    assert (plain.kind, plain.theta) == ("default", 1e4)
    nothing = dict.fromkeys(ROPE_FIELDS)
    assert rope_of(**nothing) == rope_of(rope_scaling={}) == rope_of(rope_parameters={"rope_type": None}) == plain
    assert attention_of(read_config(stored("mixtral"))).rope.theta == 1e6


def test_rotary_settings_that_are_no_object() -> None:
    assert "rope_scaling should be an object" in message(stored("llama", rope_scaling="linear"))


def test_the_original_context_comes_from_the_outside_first_and_the_models_own_last() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert rope_of(rope_scaling=yarn).original_context == 128
    inside = {**yarn, "original_max_position_embeddings": 32}
    assert rope_of(rope_scaling=inside).original_context == 32
    assert rope_of(rope_scaling=inside, original_max_position_embeddings=64).original_context == 64
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    assert rope_of(rope_scaling=dynamic, original_max_position_embeddings=64).original_context == 128


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 1.138629),
        ({"attention_factor": 0.8, "mscale": 2.0, "mscale_all_dim": 0.5}, 0.8),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, 1.194465),
        ({"mscale": 2.0}, 1.138629),
        ({"mscale": None, "mscale_all_dim": None, "attention_factor": None}, 1.138629),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_attention_factors(more: dict[str, Any], expected: float) -> None:
    rope = rope_of(rope_scaling={"rope_type": "yarn", "factor": 4.0, **more})
    assert rope.attention_factor == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 128),
        ({"rope_type": "linear", "factor": 4.0}, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_the_context_reaches_as_far_as_the_rotary_embedding_is_stretched(scaling, context) -> None:
    assert read_config(stored("llama", max_position_embeddings=128, rope_scaling=scaling)).context_length == context
