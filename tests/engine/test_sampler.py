"""The sampler's filters and draws against a sort-based oracle in numpy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from novalm_jax.engine import sampler
from novalm_jax.engine.sampler_state import SamplerState, row_of
from novalm_jax.engine.sampling import ResolvedSampling
from sampler_helpers import INF, Machine, choose, float32

# The oracle: float32 where the order of tokens is decided, float64 for probabilities, sorts for everything else.


def edited(
    raw: np.ndarray, p: ResolvedSampling, prompt: Sequence[int], output: Sequence[int], ends: Sequence[int]
) -> Any:
    logits = raw.astype(np.float32).copy()
    for token in {*prompt, *output}:
        factor = np.float32(p.repetition_penalty)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        times = np.float32(list(output).count(token))
        logits[token] -= np.float32(p.presence_penalty) + np.float32(p.frequency_penalty) * times
    for token, bias in (p.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    if len(output) < p.min_tokens:
        logits[list(ends)] = -np.inf
    return logits


def filtered(logits: np.ndarray, p: ResolvedSampling) -> tuple[np.ndarray, float]:
    """Log-probabilities relative to the best token, float64 [V], and how near top_p came to a token's edge."""
    distance = ((logits.max() - logits) / np.float32(p.temperature)).astype(np.float64)
    order = np.argsort(distance, kind="stable")
    if 0 < p.top_k < len(order):
        order = order[: int(np.sum(distance <= distance[order[p.top_k - 1]]))]
    margin = INF
    if p.top_p < 1:
        share = np.exp(-distance[order])
        held = np.cumsum(share / share.sum())
        last = min(int(np.searchsorted(held, p.top_p)), len(order) - 1)
        margin = min(abs(held[last] - p.top_p), abs(held[last - 1] - p.top_p) if last else p.top_p)
        order = order[: last + 1]
    out = np.full(len(logits), -INF)
    out[order] = -distance[order]
    out[np.exp(-distance) < p.min_p * (1 - 1e-7)] = -INF
    return out, margin


def cases(vocab: int, count: int) -> Iterator[tuple[np.ndarray, ResolvedSampling, list[int], list[int], list[int]]]:
    rng = np.random.default_rng(vocab)
    for number in range(count):
        raw = rng.normal(0, rng.choice([0.3, 2.0, 6.0]), vocab).astype(np.float32)
        if number % 2:
            raw = np.round(raw * 8) / np.float32(8)  # bfloat16 logits tie often
        prompt, output = (rng.integers(0, vocab, rng.integers(0, 6)).tolist() for _ in range(2))
        yield (
            raw,
            ResolvedSampling(
                seed=number,
                temperature=float(rng.choice([0.1, 0.7, 1.0, 2.0])),
                top_k=int(rng.choice([0, 1, 3, vocab // 2, vocab - 1, vocab, vocab + 7])),
                top_p=float(rng.choice([1.0, rng.uniform(0.02, 0.98), 0.9, 0.999])),
                min_p=float(rng.choice([0.0, 0.013, 0.37])),
                repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
                presence_penalty=float(rng.choice([0.0, 0.6, -0.4])),
                frequency_penalty=float(rng.choice([0.0, 0.25])),
                logit_bias=None if number % 3 else {int(rng.integers(vocab)): 1.5, 2: -2.0},
                min_tokens=int(rng.integers(0, 5)),
            ),
            prompt,
            output,
            [1, 3],
        )


@pytest.mark.parametrize(("vocab", "count"), [(5, 150), (64, 150), (1001, 200)])
def test_the_distribution_is_the_one_of_a_sort(vocab: int, count: int) -> None:
    @jax.jit
    def distribution(row: SamplerState, raw: jax.Array) -> jax.Array:
        return sampler._filter(row, sampler._edit(row, raw, lambda values: values))

    sizes = set()
    for raw, params, prompt, output, ends in cases(vocab, count):
        logits = edited(raw, params, prompt, output, ends)
        expected, margin = filtered(logits, params)
        while margin < 2e-6:
            params = dataclasses.replace(params, top_p=params.top_p - 1e-5)
            expected, margin = filtered(logits, params)
        got = np.asarray(distribution(row_of(params, prompt, ends, vocab, output), raw))
        np.testing.assert_array_equal(np.isfinite(got), expected > -INF, err_msg=str(params))
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6, err_msg=str(params))
        if 0 < params.top_k < vocab or params.top_p < 1:
            sizes.add(bool(np.sum(expected > -INF) > sampler._HEAD))
    assert sizes == ({False, True} if vocab > sampler._HEAD else {False}), "both ways to the border were to be tried"


def test_the_smallest_set_is_found_among_many_equal_tokens_beyond_the_head() -> None:
    row = row_of(ResolvedSampling(seed=0, top_p=0.75), (), (), 1000)
    kept = np.isfinite(jax.jit(sampler._filter)(row, np.zeros(1000, np.float32)))
    assert kept.tolist() == [True] * 750 + [False] * 250
    below = np.r_[np.full(600, -1.0), np.zeros(400)].astype(np.float32)
    top_p = (400 + 300.5 / math.e) / (400 + 600 / math.e)
    kept = np.isfinite(jax.jit(sampler._filter)(row_of(ResolvedSampling(seed=0, top_p=top_p), (), (), 1000), below))
    assert kept.tolist() == [True] * 301 + [False] * 299 + [True] * 400


def test_a_sum_that_rounds_below_what_is_wanted_keeps_top_ks_limit() -> None:
    distance = np.arange(1000, dtype=np.float32) / 1000
    bits = distance.view(np.int32)
    weights = np.where(bits <= bits[299], np.exp(-distance), 0).astype(np.float32)
    wanted = np.float32(weights.sum(dtype=np.float64) * (1 + 1e-6))
    limit, last_tie = jax.jit(sampler._nucleus)(bits, weights, wanted, bits[299])
    assert limit == bits[299] and last_tie >= 299


def test_ids_are_drawn_from_that_distribution() -> None:
    logits = float32([1.0, 0.2, -0.5, 2.0, 1.9, -3.0])
    params = ResolvedSampling(seed=11, temperature=0.8, top_p=0.9, repetition_penalty=1.5)
    scores, _ = filtered(edited(logits, params, [4], [], []), params)
    expected = np.exp(scores) / np.exp(scores).sum()
    machine, draws = Machine(64, 6), 64 * 60
    counts = np.zeros(6)
    for start in range(0, draws, 64):
        for index in range(64):
            machine.admit(index, dataclasses.replace(params, seed=start + index), prompt=[4])
        counts += np.bincount(machine.sample(np.tile(logits, (64, 1)), range(64)).ids, minlength=6)
    assert set(np.flatnonzero(counts)) == set(np.flatnonzero(expected))
    # Four standard deviations of a frequency; the seeds are fixed.
    np.testing.assert_array_less(np.abs(counts / draws - expected), 4 * np.sqrt(0.25 / draws))


def test_successive_steps_of_one_stream_are_independent_draws() -> None:
    ids = np.array(choose(np.zeros(4), steps=2000))
    pairs = np.bincount(ids[:-1] * 4 + ids[1:], minlength=16) / 1999
    np.testing.assert_array_less(np.abs(pairs - 1 / 16), 4 * np.sqrt(1 / 16 / 1999))


def test_noise_is_gumbel_to_its_far_tail() -> None:
    row = row_of(ResolvedSampling(seed=5), (), (), 1)
    noise = np.sort(np.float64(jax.jit(sampler._gumbel, static_argnums=1)(row, 2**20)))
    assert np.isfinite(noise).all()
    quantile = np.exp(-np.exp(-noise))
    assert np.abs(quantile - (np.arange(2**20) + 0.5) / 2**20).max() < 2e-3
    # 23 bits would leave about 60 ties among the greatest thousand.
    assert len(set(noise[-1000:])) > 995


def test_sampled_id_is_the_gumbel_maximum_of_the_filtered_distribution() -> None:
    machine = Machine(1, 64)
    noise_of = jax.jit(sampler._gumbel, static_argnums=1)
    for raw, params, prompt, output, ends in cases(64, 60):
        expected, _ = filtered(edited(raw, params, prompt, output, ends), params)
        noise = np.float64(noise_of(row_of(params, prompt, ends, 64, output), 64))
        machine.admit(0, params, prompt, ends, output)
        assert machine.sample(raw[None], [0]).ids[0] == np.argmax(expected + noise), params
