"""The sampler's options at their edges, where greedy choice suffices, and tokens outside the vocabulary."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from novalm_jax.engine import sampler
from novalm_jax.engine.sampler_state import row_of
from novalm_jax.engine.sampling import ResolvedSampling, greedy_suffices
from novalm_jax.errors import RequestError
from sampler_helpers import INF, choose, float32


class TestEdges:
    tied = (1.0, 3.0, 0.0, 3.0, 2.999)

    def test_temperature_zero_takes_the_lowest_id_of_equals(self) -> None:
        assert choose(self.tied, temperature=0.0, steps=3) == [1, 1, 1]

    def test_temperature_zero_obeys_penalties_and_bias(self) -> None:
        assert choose(self.tied, temperature=0.0, repetition_penalty=1.01, prompt=[1, 3]) == [4]
        assert choose(self.tied, temperature=0.0, logit_bias={2: 100.0}) == [2]
        assert choose(self.tied, temperature=0.0, presence_penalty=0.5, steps=4) == [1, 3, 4, 1]
        assert choose((3.0, 2.5, 1.7), temperature=0.0, frequency_penalty=1.0, steps=5) == [0, 1, 0, 2, 1]

    @pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-300])
    def test_a_tiny_temperature_takes_the_most_likely(self, temperature: float) -> None:
        assert choose((1.0, -INF, 2.5, 2.4, -40.0), temperature=temperature, top_k=4, top_p=0.5, steps=4) == [2] * 4

    @pytest.mark.parametrize("temperature", [1e30, 1e300])
    def test_a_huge_temperature_is_uniform_and_never_draws_what_is_ruled_out(self, temperature: float) -> None:
        assert set(choose((9.0, -INF, 2.5, -40.0), temperature=temperature, steps=60)) == {0, 2, 3}

    def test_all_but_one_ruled_out(self) -> None:
        bias = {token: -INF for token in (0, 1, 3, 4)}
        for options in ({}, {"top_k": 2, "top_p": 0.3}, {"temperature": 0.0}, {"min_p": 1.0}):
            assert choose(self.tied, logit_bias=bias, steps=3, **options) == [2, 2, 2]

    def test_extreme_bias_is_obeyed(self) -> None:
        for bias in (100.0, 1e300, INF):
            assert choose(self.tied, logit_bias={0: bias, 1: -bias}, steps=3) == [0, 0, 0]

    def test_where_everything_is_ruled_out_the_raw_logits_decide(self) -> None:
        bias = {token: -INF for token in range(1, 5)}
        assert choose(self.tied, temperature=0.0, min_tokens=2, ends=[0], logit_bias=bias, steps=3) == [1, 1, 0]
        drawn = choose(self.tied, temperature=0.5, min_tokens=20, ends=[0], logit_bias=bias, steps=21)
        assert {1, 3} <= set(drawn[:20]) and drawn[20] == 0

    def test_absurd_penalties_do_not_make_nan(self) -> None:
        worst: list[dict[str, Any]] = [
            {"repetition_penalty": 5e-324},
            {"repetition_penalty": 1e300},
            {"presence_penalty": 1e300, "frequency_penalty": 1e300},
            {"presence_penalty": -1e300, "frequency_penalty": -1e300, "logit_bias": {1: -INF}},
        ]
        edit = jax.jit(lambda row, raw: sampler._edit(row, raw, lambda values: values))
        for options in worst:
            row = row_of(ResolvedSampling(seed=1, **options), [0, 2], (), 4, [1, 1, 1, 3])
            logits = np.asarray(edit(row, float32([0.0, -INF, 5.0, -5.0])))
            assert not np.isnan(logits).any() and np.max(logits) < INF, options

    def test_top_k_of_zero_or_past_the_vocabulary_is_off(self) -> None:
        logits = np.linspace(0, 1, 8)
        for top_k in (0, 8, 9, 2**40):
            assert choose(logits, top_k=top_k, steps=60) == choose(logits, steps=60)
        assert set(choose(logits, steps=60)) == set(range(8))
        assert set(choose(logits, top_k=7, steps=60)) == set(range(1, 8))

    def test_top_k_keeps_ties_with_the_last(self) -> None:
        assert set(choose(self.tied, top_k=1, steps=30)) == {1, 3}

    def test_top_p_of_one_drops_nothing(self) -> None:
        row = row_of(ResolvedSampling(seed=0, top_p=1.0), (), (), 1000)
        logits = np.linspace(0, -80, 1000, dtype=np.float32)
        assert np.isfinite(jax.jit(sampler._filter)(row, logits)).all()

    @pytest.mark.parametrize("size", [100, 1000])
    def test_the_largest_top_p_below_one_stays_inside_top_k(self, size: int) -> None:
        top_p = float(np.nextafter(np.float32(1), np.float32(0)))
        logits = np.random.default_rng(0).normal(0, 0.01, size).astype(np.float32)
        row = row_of(ResolvedSampling(seed=0, top_p=top_p, top_k=size // 2), (), (), size)
        kept = np.isfinite(jax.jit(sampler._filter)(row, logits))
        assert kept.sum() in (size // 2 - 1, size // 2)
        assert set(np.flatnonzero(kept)) <= set(np.argsort(-logits)[: size // 2])

    def test_top_p_of_zero_takes_one_token(self) -> None:
        for top_p in (0.0, 1e-300, 1e-30, 1e-3):
            assert choose(self.tied, top_p=top_p, steps=12) == [1] * 12

    def test_top_p_takes_the_token_that_reaches_it_and_no_more(self) -> None:
        logits = np.log([0.5, 0.25, 0.125, 0.125])
        assert set(choose(logits, top_p=0.499, steps=60)) == {0}
        assert set(choose(logits, top_p=0.501, steps=60)) == {0, 1}
        assert set(choose(logits, top_p=0.749, steps=60)) == {0, 1}
        assert set(choose(logits, top_p=0.751, steps=60)) == {0, 1, 2}

    def test_top_p_is_of_what_top_k_left(self) -> None:
        logits = np.log([0.4, 0.3, 0.2, 0.1])
        assert set(choose(logits, top_p=0.56, steps=60)) == {0, 1}
        assert set(choose(logits, top_p=0.56, top_k=2, steps=60)) == {0}

    def test_min_p_of_one_keeps_the_most_likely_and_its_equals(self) -> None:
        assert set(choose((1.0, 3.0, 0.0, 3.0, np.nextafter(np.float32(3), np.float32(0))), min_p=1.0, steps=40)) == {
            1,
            3,
        }

    def test_end_tokens_wait_for_min_tokens(self) -> None:
        ids = choose((0.0, 9.0, 8.0, 1.0), temperature=0.0, min_tokens=3, ends=[1, 2, 99, -1], steps=5)
        assert ids == [3, 3, 3, 1, 1]
        assert choose((0.0, 9.0), temperature=0.0, min_tokens=3, ends=[1], output=[0, 0], steps=3) == [0, 1, 1]

    def test_penalties_know_prompt_from_output(self) -> None:
        logits = (2.0, 1.9)
        assert choose(logits, temperature=0.0, presence_penalty=1.0, frequency_penalty=1.0, prompt=[0, 0]) == [0]
        assert choose(logits, temperature=0.0, presence_penalty=1.0, output=[0]) == [1]
        assert choose(logits, temperature=0.0, repetition_penalty=1.1, prompt=[0]) == [1]
        assert choose(logits, temperature=0.0, repetition_penalty=1.1, output=[0]) == [1]
        assert choose((-2.0, -2.1), temperature=0.0, repetition_penalty=1.1, prompt=[0]) == [1]


@pytest.mark.parametrize(
    ("options", "suffices"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 1e-300}, True),
        ({"top_p": 0.0}, True),
        ({"temperature": 0.0, "top_k": 5, "min_p": 0.3, "top_p": 0.4}, True),
        ({"temperature": 1e-6}, False),
        ({"top_k": 1}, False),
        ({"min_p": 1.0}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0.0, "presence_penalty": -0.1}, False),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, False),
        ({"temperature": 0.0, "logit_bias": {0: 1.0}}, False),
        ({"temperature": 0.0, "min_tokens": 1}, False),
        ({"temperature": 0.0, "logprobs": 0}, False),
    ],
)
def test_greedy_suffices(options: dict[str, Any], suffices: bool) -> None:
    assert greedy_suffices(ResolvedSampling(**({"seed": 0} | options))) is suffices
    if suffices:
        assert choose((1.0, 2.0, 2.0, 0.5), steps=8, **options) == [1] * 8


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("logit_bias", (ResolvedSampling(seed=0, logit_bias={10: 1.0}), [], [], 10)),
        ("the prompt", (ResolvedSampling(seed=0), [1, -1], [], 10)),
        ("the output", (ResolvedSampling(seed=0), [1], [], 10, [10])),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(what: str, arguments: Any) -> None:
    with pytest.raises(RequestError, match=rf"{what} names token (10|-1), .* from 0 to 9"):
        row_of(*arguments)
