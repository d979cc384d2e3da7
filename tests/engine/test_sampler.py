"""The sampler against a sort-based oracle in numpy, at its edges, and its promise that company changes no bit."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.compat import compile_program, program_bytes
from novalm_jax.engine import sampler
from novalm_jax.engine.sampler import Sampled
from novalm_jax.engine.sampler_state import SamplerState, admit, init_state, row_of
from novalm_jax.engine.sampling import ResolvedSampling, choice_seed, greedy_suffices
from novalm_jax.errors import RequestError
from novalm_jax.options import MAX_LOGPROBS

INF = math.inf
OPTIONS = {"xla_allow_excess_precision": False}


def _float32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


class Machine:
    """The sampler's programs for one shape of state, compiled once per number of lines, states donated."""

    def __init__(self, rows: int, vocab: int):
        self.vocab = vocab
        self.state = init_state(rows, vocab)
        self.admit_program: Any = jax.jit(admit, donate_argnums=0)
        self.sample_program: Any = jax.jit(sampler.sample, donate_argnums=0, compiler_options=OPTIONS)

    def admit(
        self,
        index: int,
        params: ResolvedSampling,
        prompt: Sequence[int] = (),
        ends: Sequence[int] = (),
        output: Sequence[int] = (),
    ) -> None:
        row = row_of(params, prompt, ends, self.vocab, output)
        self.state = self.admit_program(self.state, row, np.int32(index))

    def sample(self, logits: Any, rows: Sequence[int], active: Sequence[bool] | None = None) -> Sampled:
        use = np.ones(len(rows), bool) if active is None else np.asarray(active)
        self.state, out = self.sample_program(self.state, _float32(logits), np.asarray(rows, np.int32), use)
        return jax.tree.map(np.asarray, out)


def choose(logits: Sequence[float] | np.ndarray, *, steps: int = 1, **options: Any) -> list[int]:
    """The ids that one request gets for the same logits at each step."""
    extra = {name: options.pop(name) for name in ("prompt", "ends", "output") if name in options}
    # Few widths mean few programs; impossible tokens make no difference.
    logits = np.pad(_float32(logits), (0, max(0, 8 - len(logits))), constant_values=-INF)
    machine = Machine(1, len(logits))
    machine.admit(0, ResolvedSampling(**({"seed": 7} | options)), **extra)
    return [int(machine.sample(logits[None], [0]).ids[0]) for _ in range(steps)]


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
    logits = _float32([1.0, 0.2, -0.5, 2.0, 1.9, -3.0])
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
            logits = np.asarray(edit(row, _float32([0.0, -INF, 5.0, -5.0])))
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


def requests(vocab: int) -> list[tuple[ResolvedSampling, list[int]]]:
    """Eight different requests."""
    plain = ResolvedSampling(seed=3, logprobs=2)
    changes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 7, "temperature": 0.7},
        {"top_p": 0.8},
        {"top_p": 0.93, "temperature": 5.0},
        {"min_p": 0.1, "repetition_penalty": 1.2, "top_k": vocab // 2},
        {"frequency_penalty": 0.4, "presence_penalty": 0.3, "min_tokens": 3},
        {"logit_bias": {1: 3.0, 2: -INF}, "top_p": 0.99, "top_k": 300},
    ]
    return [(dataclasses.replace(plain, seed=n, **change), [n, n + 1, 40]) for n, change in enumerate(changes)]


def test_company_rows_and_batch_sizes_change_no_bit() -> None:
    vocab, steps = 1501, 4
    logits = np.random.default_rng(1).normal(0, 2, (8, steps, vocab)).astype(np.float32)

    def run(batch: int, state_rows: Sequence[int], lines: Sequence[int]) -> list[Sampled]:
        """All requests, request n in state row state_rows[n] and line lines[n] of `batch`, in groups that fit."""
        machine = Machine(16, vocab)
        for n, (params, prompt) in enumerate(requests(vocab)):
            machine.admit(state_rows[n], params, prompt, ends=[5])
        per_step = []
        for step in range(steps):
            results: list[Any] = [None] * 8
            for group in range(0, 8, min(batch, 8)):
                members = range(group, group + min(batch, 8))
                place = {lines[n] % batch: n for n in members}
                data = np.stack([logits[place.get(i, 0), step] for i in range(batch)])
                rows = [state_rows[place[i]] if i in place else -5 for i in range(batch)]
                out = machine.sample(data, rows, [i in place for i in range(batch)])
                for i, n in place.items():
                    results[n] = jax.tree.map(operator.itemgetter(i), out)
            per_step.append(jax.tree.map(lambda *values: np.stack(values), *results))
        return per_step

    reference = run(1, range(8), [0] * 8)
    reversed_rows = [15 - 2 * n for n in range(8)]
    for other in (
        run(2, range(8), range(8)),
        run(8, reversed_rows, range(8)),
        run(16, range(8), [2 * n + 1 for n in range(8)]),
    ):
        for expected, got in zip(reference, other, strict=True):
            for name, one, two in zip(Sampled._fields, expected, got, strict=True):
                np.testing.assert_array_equal(one.view(np.int32), two.view(np.int32), err_msg=name)


def test_a_preempted_request_goes_on_with_the_same_tokens() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1, (12, 1, 64)).astype(np.float32)
    params = ResolvedSampling(seed=9, frequency_penalty=0.7, repetition_penalty=1.3, min_tokens=8, top_p=0.95)
    machine = Machine(3, 64)
    machine.admit(0, params, [1, 2], ends=[3])
    whole = [int(machine.sample(step, [0]).ids[0]) for step in logits]
    machine.admit(2, params, [1, 2], ends=[3], output=whole[:5])
    assert [int(machine.sample(step, [2]).ids[0]) for step in logits[5:]] == whole[5:]
    assert len(set(whole)) > 4


def test_rows_are_penalised_for_their_own_tokens_only() -> None:
    machine = Machine(3, 4)
    params = ResolvedSampling(seed=0, temperature=0.0, frequency_penalty=100.0, repetition_penalty=2.0)
    machine.admit(0, params, prompt=[0])
    machine.admit(1, params, prompt=[1])
    machine.admit(2, params)
    logits = np.tile(_float32([4.0, 3.0, 2.5, 1.0]), (2, 1))
    assert machine.sample(logits, [1, 0]).ids.tolist() == [0, 1]
    assert machine.sample(logits, [0, 1]).ids.tolist() == [2, 2]
    assert np.asarray(machine.state.counts).tolist() == [[0, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert np.asarray(machine.state.generated).tolist() == [2, 2, 0]


def test_inactive_lines_change_nothing() -> None:
    machine = Machine(3, 8)
    for index in range(3):
        machine.admit(index, ResolvedSampling(seed=index, logprobs=1), prompt=[index], output=[1, 2])
    before = jax.tree.map(np.array, machine.state)
    logits = np.full((4, 8), np.nan)
    logits[2] = 1.0
    out = machine.sample(logits, [0, 2**30, 1, -1], [False, False, True, False])
    after = jax.tree.map(np.array, machine.state)
    expected = before.counts.copy()
    expected[1, out.ids[2]] += 1
    np.testing.assert_array_equal(after.counts, expected)
    assert after.generated.tolist() == [2, 3, 2]
    for name in set(SamplerState._fields) - {"counts", "generated"}:
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name), err_msg=name)
    assert out.ids[[0, 1, 3]].tolist() == [0, 0, 0]
    assert (out.top_ids[[0, 1, 3]] == -1).all() and (out.top_ids[2, :8] >= 0).all()

    out = machine.sample(logits, [0, 1, 2, 0], [False] * 4)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, machine.state), after)


def test_admit_leaves_nothing_of_the_previous_request() -> None:
    machine, fresh = Machine(2, 32), Machine(2, 32)
    everything = ResolvedSampling(
        seed=2**63 - 1, temperature=0.3, top_k=4, top_p=0.5, min_p=0.2, repetition_penalty=1.7, presence_penalty=1.0,
        frequency_penalty=1.0, logit_bias={4: 5.0}, min_tokens=9, logprobs=4,
    )  # fmt: skip
    machine.admit(1, everything, prompt=range(10), ends=[1, 2], output=[3, 4, 5])
    for name, used, unused in zip(SamplerState._fields, machine.state, fresh.state, strict=True):
        assert not np.array_equal(used[1], unused[1]), f"{name} was to be set"
        np.testing.assert_array_equal(used[0], unused[0], err_msg=name)
    machine.sample(np.zeros((1, 32)), [1])
    machine.admit(1, ResolvedSampling(seed=1), prompt=[7])
    fresh.admit(1, ResolvedSampling(seed=1), prompt=[7])
    for name, used, unused in zip(SamplerState._fields, machine.state, fresh.state, strict=True):
        np.testing.assert_array_equal(used, unused, err_msg=name)
        assert used.dtype == unused.dtype, name


def test_one_program_serves_every_mix_of_options() -> None:
    machine = Machine(8, 64)
    logits = np.random.default_rng(0).normal(0, 2, (4, 64)).astype(np.float32)
    sizes = set()
    for start, (params, prompt) in enumerate(requests(64)):
        machine.admit(start % 8, params, prompt[: start % 3 + 1], ends=range(start % 4))
        machine.sample(logits, [start % 8, 3, 5, 6], [True, start % 2 == 0, False, False])
        sizes.add((machine.sample_program._cache_size(), machine.admit_program._cache_size()))
    assert len(sizes) == 1


def test_state_is_updated_in_place_and_shapes_are_known_without_arrays() -> None:
    shapes = jax.eval_shape(lambda: init_state(4, 64))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes)
    lines = [
        jax.ShapeDtypeStruct((2, 64), jnp.float32),
        *(jax.ShapeDtypeStruct((2,), d) for d in (jnp.int32, jnp.bool_)),
    ]
    program: Any = jax.jit(sampler.sample, donate_argnums=0).lower(shapes, *lines).compile()
    assert program.memory_analysis().alias_size_in_bytes == size
    out_state, _ = jax.eval_shape(sampler.sample, shapes, *lines)
    assert out_state == shapes
    row = row_of(ResolvedSampling(seed=0), (), (), 64)
    assert [(leaf.shape[1:], leaf.dtype) for leaf in shapes] == [(leaf.shape, leaf.dtype) for leaf in row]


class TestLogprobs:
    def test_they_are_of_the_raw_logits(self) -> None:
        raw = np.random.default_rng(4).normal(0, 3, 200).astype(np.float32)
        raw[17] = raw[23]
        machine = Machine(1, 200)
        machine.admit(0, ResolvedSampling(seed=0, temperature=0.0, logit_bias={5: 90.0}, logprobs=0))
        out = machine.sample(raw[None], [0])
        expected = np.float64(raw) - np.log(np.sum(np.exp(np.float64(raw))))
        assert out.ids.tolist() == [5]
        np.testing.assert_allclose(out.logprob[0], expected[5], rtol=1e-6)
        assert out.top_ids[0].tolist() == np.argsort(-raw, kind="stable")[:MAX_LOGPROBS].tolist()
        np.testing.assert_allclose(out.top_logprobs[0], expected[out.top_ids[0]], rtol=1e-6)

    def test_a_small_vocabulary_leaves_places_empty(self) -> None:
        machine = Machine(1, 3)
        machine.admit(0, ResolvedSampling(seed=0, temperature=0.0, logprobs=20))
        out = machine.sample(_float32([[1.0, -INF, 2.0]]), [0])
        assert out.top_ids[0, :4].tolist() == [2, 0, 1, -1]
        assert out.top_logprobs[0, 2:].tolist() == [-INF] * 18
        np.testing.assert_allclose(out.logprob, -math.log(1 + math.exp(-1)), rtol=1e-6)

    def test_rows_that_do_not_ask_get_none(self) -> None:
        machine = Machine(1, 30)
        machine.admit(0, ResolvedSampling(seed=0))
        out = machine.sample(np.zeros((1, 30)), [0])
        assert out.logprob.tolist() == [0.0] and (out.top_ids == -1).all()


class TestSeeds:
    def test_choices_differ_and_repeat(self) -> None:
        logits = np.zeros(1000)
        runs = [choose(logits, seed=choice_seed(42, choice), steps=6) for choice in range(4)]
        again = [choose(logits, seed=choice_seed(42, choice), steps=6) for choice in range(4)]
        assert runs == again
        assert runs[0] == choose(logits, seed=42, steps=6)
        assert len({tuple(run) for run in runs}) == 4
        assert len({token for run in runs for token in run}) > 20

    @pytest.mark.parametrize("other", [1 + 2**32, 1 + 2**62, 1 - 2**63, -1, 0])
    def test_every_half_of_a_seed_counts(self, other: int) -> None:
        assert choose(np.zeros(1000), seed=1, steps=4) != choose(np.zeros(1000), seed=other, steps=4)

    def test_no_setting_of_jax_changes_the_stream(self) -> None:
        ids = choose(np.zeros(1000), steps=4)
        with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
            assert choose(np.zeros(1000), steps=4) == ids


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


@pytest.mark.parametrize("vocab", [97, 4096, 151936])
def test_the_stated_memory_bounds_what_the_programs_take(vocab: int) -> None:
    rows = 4
    held = sampler.Sampler(rows, vocab)
    state = jax.eval_shape(partial(init_state, rows, vocab))
    logits = jax.ShapeDtypeStruct((rows, vocab), jnp.float32)
    lines = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.bool_)
    program = compile_program(sampler.sample, (state, logits, *lines), donate=(0,))
    taken = sum(leaf.size * leaf.dtype.itemsize for leaf in state) + sum(program_bytes(program))
    assert taken <= held.nbytes <= 1.5 * taken + 65536
