"""Options refuse what cannot be used, by name, and leave the rest as it was given."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from novalm_jax.errors import OptionError, RequestError
from novalm_jax.options import MAX_LOGPROBS, EngineOptions, SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", NAN),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", INF),
        ("presence_penalty", NAN),
        ("presence_penalty", None),
        ("frequency_penalty", -INF),
        ("frequency_penalty", "1"),
        ("logit_bias", {3: NAN}),
        ("logit_bias", {3: "much"}),
        ("logit_bias", {3: True}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", [3]),
        ("logit_bias", ()),
        ("logit_bias", "3"),
        ("temperature", np.bool_(True)),
        ("temperature", np.float32(NAN)),
        ("max_tokens", np.float32(1)),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 0.5),
        ("stop", ""),
        ("stop", ("a", "")),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("n", 0),
        ("n", None),
    ],
)
def test_sampling_that_nothing_can_honour_is_refused_by_name(name, value: Any):
    with pytest.raises(RequestError, match=f"^{name}: "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", None),
        ("temperature", 0),
        ("temperature", 0.0),
        ("temperature", 100),
        ("top_k", 0),
        ("top_k", 10**9),
        ("top_p", 0),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1.0),
        ("repetition_penalty", 0.01),
        ("presence_penalty", -2),
        ("logit_bias", {3: INF, 4: -INF, 5: -100}),
        ("logit_bias", {}),
        ("seed", 2**63 - 1),
        ("seed", -(2**63)),
        ("logprobs", 0),
        ("logprobs", MAX_LOGPROBS),
        ("n", 100),
    ],
)
def test_sampling_at_its_limits_stays_as_it_was_given(name, value: Any):
    assert getattr(SamplingParams(**{name: value}), name) == value


# Python converts the first to no float, and the second not even to a text.
@pytest.mark.parametrize("huge", [10**400, 10**5000], ids=["401 digits", "5001 digits"])
def test_numbers_beyond_all_types_are_refused_by_name(huge):
    for name in ("temperature", "top_p", "repetition_penalty", "presence_penalty", "seed"):
        with pytest.raises(RequestError, match=f"^{name}: .* bits"):
            SamplingParams(**{name: huge})
    with pytest.raises(RequestError, match=r"^logit_bias: the bias of token 3 is a number of .* bits"):
        SamplingParams(logit_bias={3: huge})
    for name in ("context_length", "max_batch"):
        with pytest.raises(OptionError, match=f"^{name}: .* bits"):
            EngineOptions(**{name: huge})
    with pytest.raises(OptionError, match=r"^context_length: .*999\.\.\."):
        EngineOptions(context_length="9" * 5000)


def test_numbers_of_numpy_become_plain_ones():
    params = SamplingParams(
        max_tokens=np.int32(5),  # type: ignore[arg-type]
        seed=np.uint64(7),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=np.int64(1),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={np.int32(3): np.float64(-1)},  # type: ignore[dict-item]
    )
    assert params.logit_bias == {3: -1.0}
    numbers = [params.max_tokens, params.seed, *params.stop_token_ids, *params.logit_bias]
    assert (numbers, {type(number) for number in numbers}) == ([5, 7, 3, 4, 3], {int})
    assert [type(number) for number in (params.temperature, params.top_p, params.logit_bias[3])] == [float] * 3


def test_what_is_not_given_is_left_to_the_checkpoint():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (None,) * 5


def test_one_stop_text_is_a_tuple_of_one():
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]


def test_options_cannot_be_changed_later():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineOptions().max_batch = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float16"),
        ("dtype", None),
        ("max_batch", 0),
        ("max_batch", 1.0),
        ("max_batch", True),
        ("context_length", 0),
        ("context_length", -5),
        ("context_length", "long"),
        ("context_length", "12.5"),
        ("context_length", "-3"),
        ("context_length", "0"),
        ("context_length", None),
        ("context_length", 2**31),
        ("context_length", str(2**31)),
        ("timeline", ""),
        ("timeline", "a\0b"),
        ("timeline", b"trace.json"),
        ("timeline", True),
    ],
)
def test_engine_options_outside_their_range_are_refused_by_name(name, value: Any):
    with pytest.raises(OptionError, match=f"^{name}: "):
        EngineOptions(**{name: value})


def test_a_context_length_from_a_command_line_is_a_number():
    assert EngineOptions(context_length="4096").context_length == 4096
    assert EngineOptions(context_length="auto").context_length == "auto"


def test_names_lists_every_option():
    assert EngineOptions.names() == tuple(field.name for field in dataclasses.fields(EngineOptions))
    assert {"device_memory", "host_memory", "dtype", "context_length", "max_batch"} <= set(EngineOptions.names())


@pytest.mark.parametrize(
    "options",
    [
        {"stop": ("a", 1)},
        {"stop": 5},
        {"stop_token_ids": ("1",)},
        {"stop_token_ids": (True,)},
        {"logit_bias": {"1": 1.0}},
    ],
)
def test_lists_of_the_wrong_thing_are_refused_by_name(options):
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)


def test_no_stops_may_be_given_as_none():
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert (params.stop, params.stop_token_ids) == ((), ())
