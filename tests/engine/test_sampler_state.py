"""A request's draws depend on neither company nor place, and the sampler's state, logprobs, seeds and memory."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.compat import compile_program, program_bytes
from novalm_jax.engine import sampler
from novalm_jax.engine.sampler import Sampled
from novalm_jax.engine.sampler_state import SamplerState, init_state, row_of
from novalm_jax.engine.sampling import ResolvedSampling, choice_seed
from novalm_jax.options import MAX_LOGPROBS
from sampler_helpers import INF, Machine, choose, float32


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
    logits = np.tile(float32([4.0, 3.0, 2.5, 1.0]), (2, 1))
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
        out = machine.sample(float32([[1.0, -INF, 2.0]]), [0])
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
