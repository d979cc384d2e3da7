"""Memory goes from experts to pages and back as requests come and go, and nobody's text depends on it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from interrupts import interrupted_at
from jax_events import COMPILED, events_of
from novalm_jax import LLM, EngineError, SamplingParams
from novalm_jax.engine.exchange import GAIN, PATIENCE, PROPORTIONS, Exchange, proportions
from novalm_jax.engine.executor import Executor
from novalm_jax.engine.streamed_programs import StreamedPrograms
from novalm_jax.experts.pools import DevicePool
from novalm_jax.kernels.storage import tree_bytes
from novalm_jax.kv.pages import PAGE
from streamed_helpers import executor_of, least_bytes
from streamed_model import GREEDY, live_arrays, record_size
from tiny_checkpoints import TOKENS

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_batch": 4, "context_length": 256, "host_memory": "64MiB"}
SPARE = 150_000
"""Bytes beyond the least that the model runs with: room for six pages beside 19 of its 48 experts."""

pytestmark = pytest.mark.usefixtures("shared")


def elastic(folder: Path, **options: Any) -> LLM:
    options = {**OPTIONS, **options}
    counted = {name: options[name] for name in ("dtype", "max_batch", "context_length")}
    return LLM(folder, device_memory=least_bytes(folder, **counted) + SPARE, **options)


def exchange_of(llm: LLM) -> Exchange:
    assert llm._exchange is not None
    return llm._exchange


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, TOKENS, length).tolist()


def tokens(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def answers(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(prompts, tokens(count))]


@pytest.fixture(scope="module")
def expected(moe_folder: Path) -> dict[int, list[list[int]]]:
    """What each of four long prompts, and of two short ones, is answered by the resident model."""
    with LLM(moe_folder, **OPTIONS) as llm:
        assert llm._exchange is None
        return {length: answers(llm, [prompt(length, seed) for seed in range(4)], 50) for length in (20, 150)}


def state(llm: LLM) -> tuple[int, int]:
    """Pages and slots, by what is there; everybody who counts them agrees."""
    executor, report = executor_of(llm), llm.report()
    pages, slots = executor._pages[0].keys.shape[0], len(executor._experts.pool.arrays.down)
    placement = exchange_of(llm).placement
    assert (pages, slots) == (placement.pages, placement.slots) == (report.kv_pages, len(executor._experts._table))
    assert report.device_table["KV cache"] == tree_bytes(executor._pages)
    assert report.device_peak_bytes <= report.device_budget_bytes
    return pages, slots


def test_memory_is_for_experts_until_requests_need_pages(moe_folder: Path, expected: Any) -> None:
    with elastic(moe_folder) as llm:
        assert state(llm) == (6, 19)
        assert answers(llm, [prompt(20)], 10) == [expected[20][0][:10]]
        assert state(llm) == (1, 39)
        # At once, also while others decode.
        running = llm.stream(prompt(20, 1), tokens(40))
        first = [next(running)]
        assert answers(llm, [prompt(150, seed) for seed in range(4)], 50) == expected[150]
        assert state(llm) == (6, 19) and llm.report().memory_exchanges == 2
        first += list(running)
        assert running.completion.token_ids == expected[20][1][:40]
        # Not for a moment's lull; experts would have to come again.
        answers(llm, [prompt(20)], PATIENCE // 2)
        assert state(llm) == (6, 19)
        assert answers(llm, [prompt(20)], 40) == [expected[20][0][:40]]
        assert state(llm) == (1, 39) and llm.report().memory_exchanges == 3
        assert llm.report().expert_misses > 0


def test_with_more_slots_fewer_experts_are_missed(moe_folder: Path) -> None:
    misses = []
    for kv_memory in ("auto", 6 * 24576):
        with elastic(moe_folder, kv_memory=kv_memory, prefetch="off") as llm:
            assert (llm._exchange is None) == (kv_memory != "auto")
            llm.generate(prompt(20), tokens(40))
            misses.append(llm.report().expert_misses)
    assert misses[0] < misses[1] / 1.5


@pytest.mark.parametrize("dense_weights", ["device", "stream"])
def test_requests_go_on_whatever_memory_does_meanwhile(moe_folder: Path, expected: Any, dense_weights: str) -> None:
    with elastic(moe_folder, dense_weights=dense_weights) as llm:
        exchange, engine, draw = exchange_of(llm), llm._engine, np.random.default_rng(0)
        asked = [(length, seed) for seed in range(2) for length in (20, 150)]
        requests = [llm.requests([prompt(*each)], tokens(50))[0] for each in asked]
        engine.submit(requests)
        seen, moved = set(), 0
        while any(one.finish_reason is None for one in requests):
            engine.step()
            in_use = engine.scheduler.pages.pools[0].in_use
            fitting = [pages for pages in exchange._proportions if pages >= in_use]
            pages = fitting[int(draw.integers(len(fitting)))]
            if engine._pass is None and pages != exchange.placement.pages:
                before = [list(one.held.tables[0]) for one in requests if one.held]
                exchange._change(pages, engine.scheduler, engine._requests)
                moved += before != [one.held.tables[0] for one in requests if one.held]
                seen.add(state(llm))
        assert [one.token_ids for one in requests] == [expected[length][seed] for length, seed in asked]
        assert len(seen) > 1 and exchange.count > 10
        assert [pool.in_use for pool in engine.scheduler.pages.pools] == [0]


def test_pages_that_go_are_copied_first(moe_folder: Path, expected: Any) -> None:
    with elastic(moe_folder) as llm:
        streams = [llm.stream(prompt(20, seed), tokens(50)) for seed in range(4)]
        taken = [next(stream) for stream in streams]
        held = [stream._request.held for stream in streams]
        assert sorted(page for one in held if one for page in one.tables[0]) == [0, 1, 2, 3]
        for stream in streams[1:3]:
            stream.close()
        llm._engine.step()
        exchange_of(llm)._change(2, llm._engine.scheduler, llm._engine._requests)
        assert sorted(page for one in (held[0], held[3]) if one for page in one.tables[0]) == [0, 1]
        for number in (0, 3):
            assert taken[number] + "".join(streams[number]) != ""
            assert streams[number].completion.token_ids == expected[20][number]


def test_of_pages_that_are_not_copied_first_the_answers_tell(
    moe_folder: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Executor, "copy", lambda self, copies: None)
    with pytest.raises(AssertionError, match="At index"):
        test_pages_that_go_are_copied_first(moe_folder, expected)


def test_prompts_are_found_again_when_pages_have_come(moe_folder: Path, expected: Any) -> None:
    with elastic(moe_folder) as llm:
        answers(llm, [prompt(150)], 2)
        before, known = state(llm)[0], llm.report().prefix_tokens
        assert answers(llm, [prompt(150, seed) for seed in range(4)], 50) == expected[150]
        assert state(llm)[0] > before and llm.report().prefix_tokens == known + 2 * PAGE


def test_logits_of_a_long_text_get_their_pages(moe_folder: Path) -> None:
    ids = prompt(250)
    with LLM(moe_folder, **OPTIONS) as llm:
        right = llm.logits(ids, decode_from=200)
    with elastic(moe_folder) as llm:
        answers(llm, [prompt(20)], 2)
        assert state(llm)[0] == 1
        assert (llm.logits(ids, decode_from=200) == right).all() and state(llm)[0] >= 4


def test_no_more_memory_is_taken_than_there_is(moe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    before = sum(array.nbytes for array in live_arrays())

    def weighed(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            result = method(*arguments)
            taken.append(sum(array.nbytes for array in live_arrays()) - before)
            return result

        return call

    monkeypatch.setattr(jax, "block_until_ready", weighed(jax.block_until_ready))
    monkeypatch.setattr(DevicePool, "__init__", weighed(DevicePool.__init__))
    with elastic(moe_folder) as llm:
        answers(llm, [prompt(20)], 2)
        taken.clear()
        answers(llm, [prompt(150, seed) for seed in range(4)], 2)
        answers(llm, [prompt(20)], PATIENCE + 20)
        assert llm.report().memory_exchanges == 3
        report = llm.report()
        assert max(taken) <= report.device_peak_bytes - report.device_table["workspace"] + report.host_bytes


def test_after_a_warm_up_no_exchange_compiles(moe_folder: Path, shared: Any) -> None:
    shared.clear()
    with elastic(moe_folder, warm_up=True, compilation_cache=False) as llm, events_of(COMPILED) as heard:
        for length, count, new in ((20, 1, 5), (150, 4, 5), (20, 1, PATIENCE + 20), (20, 2, 60), (100, 3, 20)):
            llm.generate([prompt(length, seed) for seed in range(count)], tokens(new))
        assert heard == [] and llm.report().memory_exchanges > 3


def test_an_exchange_that_fails_takes_along_who_has_pages(
    moe_folder: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with elastic(moe_folder) as llm:
        running = llm.stream(prompt(20, 1), GREEDY)
        next(running)
        size = sum(array.nbytes for array in live_arrays())
        with monkeypatch.context() as patch:
            # Only when the pages of the first layer have their new size.
            resizes = iter([StreamedPrograms.resize_pages])
            patch.setattr(StreamedPrograms, "resize_pages", lambda *arguments: next(resizes)(*arguments))
            assert answers(llm, [prompt(150, seed) for seed in range(4)], 20) == [one[:20] for one in expected[150]]
        with pytest.raises(EngineError, match="A step failed"):
            list(running)
        # Nothing of what was there before is kept.
        assert sum(array.nbytes for array in live_arrays()) <= size + record_size()
        assert state(llm) == (6, 19) and answers(llm, [prompt(20)], 9) == [expected[20][0][:9]]


def test_an_interrupt_at_any_line_leaves_a_model_that_goes_on(moe_folder: Path, expected: Any) -> None:
    with elastic(moe_folder) as llm:
        engine, exchange = llm._engine, exchange_of(llm)
        line, over = 1, False
        while not over:
            (request,) = llm.requests([prompt(20, 1)], tokens(50))
            engine.submit([request])
            while not request.token_ids:
                engine.step()
            if exchange.placement.pages > 2:
                exchange._change(2, engine.scheduler, engine._requests)
            over = not interrupted_at(line, lambda: engine._make_room(4 * PAGE), "novalm_jax/")
            state(llm)
            assert [pool.count for pool in engine.scheduler.pages.pools] == list(executor_of(llm).programs.shapes.pages)
            if over or request.finish_reason is None:
                engine.run_until_ended(request)
                assert request.token_ids == expected[20][1]
            elif line % 20 == 0:
                assert answers(llm, [prompt(20)], 5) == [expected[20][0][:5]]
            line += 1
        assert line > 60


def test_proportions_are_few_and_each_is_worth_it(moe_folder: Path) -> None:
    with elastic(moe_folder) as llm:
        placement = llm._placement
        found = proportions(placement)
        assert found == [1, 2, 3, 6] and len(found) <= PROPORTIONS
        slots = [placement.slots_beside(pages) for pages in found]
        assert all(more - fewer >= fewer / GAIN for more, fewer in pairwise(slots))
        for pages in found:
            exact = placement.with_pages(pages)
            assert exact.plan.fits(placement.budgets.device) and exact.slots >= placement.slots
            # No record more would have had room, but for what programs take.
            assert abs(exact.slots - placement.slots_beside(pages)) <= 1
