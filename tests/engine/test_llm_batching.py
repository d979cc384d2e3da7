"""Many requests on one model: what they share, who comes first, and that nobody waits for a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_events import COMPILED, events_of
from novalm_jax import LLM, BudgetError, OptionError, SamplingParams
from novalm_jax.engine.programs import PREFILL_ROWS
from streamed_helpers import executor_of, for_requests, placed_with
from streamed_model import CHOSEN, EXPERTS, LAYERS, make_model
from tiny_checkpoints import TOKENS, tiny_checkpoint

pytestmark = pytest.mark.usefixtures("shared")

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("batching") / "model")


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, TOKENS, length).tolist()


@pytest.mark.parametrize("slots", [None, 12])
def test_after_a_warm_up_nothing_is_compiled_whatever_is_asked(folder: Path, shared: Any, slots: int | None) -> None:
    options: dict[str, Any] = {"max_batch": 5, "compilation_cache": False, "context_length": 256}
    kinds = [{}, {"temperature": 0.7, "seed": 1}, {"temperature": 1.0, "logprobs": 3, "top_k": 5}]
    memory: str | int = "auto"
    if slots is not None:
        options = for_requests(2, folder, dtype="float32", **options)
        memory = placed_with(folder, slots, **options).budgets.device
    shared.clear()
    with LLM(folder, device_memory=memory, warm_up=True, **options) as llm, events_of(COMPILED) as heard:
        for number, length in enumerate((1, 2, 63, 64, 65, 130, 200, 130)):
            batch = [prompt(length, seed) for seed in range(1 + number % 5)]
            params = [SamplingParams(max_tokens=3, n=1 + (number == 3), **kinds[at % 3]) for at in range(len(batch))]
            llm.generate(batch, params)
        report = llm.report()
        # The compilation cache of the process may have some of them already.
        assert heard == [] and report.prefix_tokens > 0 and report.programs_compiled + report.programs_from_cache > 10
        assert (report.expert_misses > 0) == (slots is not None)


def test_choices_share_their_prompt_and_part_ways_after_it(folder: Path) -> None:
    sampled = SamplingParams(temperature=1, seed=5, max_tokens=80, ignore_eos=True)
    with LLM(folder, max_batch=4, prefix_cache=False, context_length=256) as llm:
        before = llm.report().launches
        (alone,) = llm.generate([prompt(100)], SamplingParams(temperature=0, max_tokens=1))
        one_prompt = llm.report().launches - before
        several = llm.generate([prompt(100)], SamplingParams(temperature=0, max_tokens=1, n=4))
        assert llm.report().launches - before == 2 * one_prompt
        assert {tuple(each.token_ids) for each in several} == {tuple(alone.token_ids)}
        long = llm.generate([prompt(100)], SamplingParams(**{**vars(sampled), "n": 4}))
        # Two pages of the prompt, of which the second is copied for all but one; one more each for what follows.
        assert llm.report().kv_pages_peak == 1 + 4 + 4
        again = [
            llm.generate([prompt(100)], SamplingParams(**{**vars(sampled), "n": 1 + choice}))[choice]
            for choice in (0, 3)
        ]
        assert [each.token_ids for each in again] == [long[0].token_ids, long[3].token_ids]
        assert len({tuple(each.token_ids) for each in long}) == 4


def test_a_prompt_that_pages_hold_costs_its_last_token(folder: Path) -> None:
    with LLM(folder, dtype="float32", context_length=256) as llm:
        computed: list[int] = []
        chunks = llm._executor._chunks
        llm._executor._chunks = lambda parts: (computed.extend(len(p.tokens) for p in parts), chunks(parts))[1]  # type: ignore[method-assign]
        first = llm.generate([prompt(128)], GREEDY)
        again = llm.generate([prompt(128)], GREEDY)
        longer = llm.generate([prompt(128) + prompt(20, 1)], GREEDY)
        assert computed == [64, 64, 1, 20] or computed == [128, 1, 20]
        assert [each.token_ids for each in first] == [each.token_ids for each in again]
        assert llm.report().prefix_tokens == 127 + 128
        with LLM(folder, dtype="float32", context_length=256, prefix_cache=False) as other:
            assert other.generate([prompt(128) + prompt(20, 1)], GREEDY)[0].token_ids == longer[0].token_ids
            assert other.report().prefix_tokens == 0


def test_a_long_prompt_brings_each_expert_once_while_others_decode(tmp_path: Path, monkeypatch) -> None:
    # Most of what is spare is for chunks of a prompt that share a pass.
    monkeypatch.setattr("novalm_jax.engine.fitting.PASS_SHARE", 0.9)
    folder = tiny_checkpoint(
        tmp_path / "long",
        "qwen3_moe",
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        num_hidden_layers=LAYERS,
        max_position_embeddings=8192,
        moe_intermediate_size=512,
    )
    options: dict[str, Any] = {"max_batch": 5, "context_length": 4608, "dtype": "float32", "prefetch": "off"}
    options |= {"host_memory": "64MiB", "prefill_seconds": 0, "dense_weights": "device"}
    with pytest.raises(BudgetError) as least:
        LLM(folder, device_memory=1000, **options)
    with LLM(folder, device_memory=least.value.least_bytes + 6_000_000, **options) as llm:
        executor = executor_of(llm)
        assert executor.chunk == PREFILL_ROWS[-1] and executor.pass_chunks >= 8
        assert CHOSEN <= executor.programs.slots < LAYERS * EXPERTS
        decoding = llm.streams([prompt(30, seed) for seed in range(4)], SamplingParams(max_tokens=400, ignore_eos=True))
        while min(stream.token_count for stream in decoding) < 2:
            decoding[0].advance()
        uploads = {"prompt": 0, "decode": 0}
        order: list[str] = []

        def counted(kind: str, function: Any) -> Any:
            def run(*arguments: Any) -> Any:
                before = executor.streamer.figures()["uploads"]
                result = function(*arguments)
                uploads[kind] += executor.streamer.figures()["uploads"] - before
                order.append(kind)
                return result

            return run

        decode, through = executor.decode, executor._through_layers
        executor.decode = counted("decode", decode)  # type: ignore[method-assign]

        def layers(chunks: Any) -> Iterator[Any]:
            progress = through(chunks)
            step = counted("prompt", lambda: next(progress, None) or "border")
            for _ in range(LAYERS):
                step()
                yield None
            yield from progress

        executor._through_layers = layers  # type: ignore[method-assign]
        long = llm.stream(prompt(8 * PREFILL_ROWS[-1], 9), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        while long.token_count < 1:
            long.advance()
        assert 0 < uploads["prompt"] <= 1.02 * LAYERS * EXPERTS
        # A decode step at every border between layers: nobody waits for more than one of them.
        first = order.index("prompt")
        assert order[first : first + 2 * LAYERS] == ["prompt", "decode"] * LAYERS


def test_what_is_urgent_comes_first(folder: Path) -> None:
    with LLM(folder, max_batch=1, context_length=256, host_memory="64MiB") as llm:
        patient = llm.streams([prompt(5, seed) for seed in range(3)], SamplingParams(max_tokens=30, ignore_eos=True))
        while patient[0].token_count < 3:
            patient[0].advance()
        urgent = llm.stream(prompt(9), GREEDY, priority=1)
        "".join(urgent)
        assert [stream.token_count for stream in patient[1:]] == [0, 0] and patient[0].token_count < 30
        (alone,) = llm.generate([prompt(9)], GREEDY)
        assert urgent.completion.token_ids == alone.token_ids


@pytest.mark.parametrize("size", ["1KB", "0"])
def test_pages_for_less_than_one_request_are_refused(folder: Path, size: str) -> None:
    with pytest.raises(OptionError, match=r"kv_memory: .* too little for a request of 256 tokens"):
        LLM(folder, kv_memory=size, context_length=256)


def test_less_memory_for_pages_is_a_shorter_context_or_fewer_pages(folder: Path, caplog) -> None:
    with LLM(folder, max_batch=4) as llm:
        assert (llm.context_length, llm.report().kv_pages) == (256, 16)
        size = llm.report().device_table["KV cache"] // 16
    with LLM(folder, max_batch=4, kv_memory=7 * size) as llm:
        assert (llm.context_length, llm.report().kv_pages) == (256, 7)
    with LLM(folder, max_batch=4, kv_memory=3 * size) as llm:
        assert (llm.context_length, llm.report().kv_pages) == (192, 3)
    assert "the context is cut from 256 to 192 tokens to fit device_memory and kv_memory" in caplog.text
