"""Defaults of a request's sampling, and the seeds of its choices."""

import pytest

from novalm_jax.engine.sampling import ResolvedSampling, choice_seed, resolve
from novalm_jax.errors import ConfigError
from novalm_jax.options import SamplingParams

CHECKPOINT = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}


def test_nothing_given_means_the_plain_distribution() -> None:
    assert resolve(SamplingParams(), {}, fresh_seed=5) == ResolvedSampling(
        seed=5, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0
    )


def test_the_checkpoint_fills_what_is_open() -> None:
    resolved = resolve(SamplingParams(top_p=0.5), CHECKPOINT, fresh_seed=5)
    assert resolved == ResolvedSampling(
        seed=5, temperature=0.6, top_k=20, top_p=0.5, min_p=0.01, repetition_penalty=1.05
    )


def test_given_values_win_even_when_they_are_zero() -> None:
    given = SamplingParams(temperature=0.0, top_k=0, top_p=0.0, min_p=0.0, repetition_penalty=1.0, seed=0, logprobs=0)
    resolved = resolve(given, CHECKPOINT, fresh_seed=5)
    assert resolved == ResolvedSampling(
        seed=0, temperature=0.0, top_k=0, top_p=0.0, min_p=0.0, repetition_penalty=1.0, logprobs=0
    )


def test_everything_else_is_passed_on() -> None:
    given = SamplingParams(presence_penalty=0.1, frequency_penalty=0.2, logit_bias={1: 2.0}, min_tokens=3, seed=-4)
    resolved = resolve(given, {}, fresh_seed=5)
    assert resolved == ResolvedSampling(
        seed=-4, presence_penalty=0.1, frequency_penalty=0.2, logit_bias={1: 2.0}, min_tokens=3
    )


def test_an_unusable_checkpoint_default_names_its_file_and_yields_to_the_request() -> None:
    broken = CHECKPOINT | {"top_p": 1.5}
    with pytest.raises(ConfigError, match=r"generation_config\.json.*top_p.*1\.5.*Set top_p"):
        resolve(SamplingParams(), broken, fresh_seed=0)
    assert resolve(SamplingParams(top_p=0.9), broken, fresh_seed=0).top_p == 0.9


def test_choices_of_neighbouring_seeds_share_no_stream() -> None:
    seeds = [choice_seed(seed, choice) for seed in range(-20, 20) for choice in range(10)]
    assert len(set(seeds)) == 400
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
