"""A request has the same logits, bit for bit, whoever else is there, whenever it comes, and wherever its pages were."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from operator import le
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax import LLM, SamplingParams, save_model
from novalm_jax.checkpoint.load import Checkpoint, abstract_model
from novalm_jax.engine.engine import Engine
from novalm_jax.engine.exchange import change_memory
from novalm_jax.engine.placement import Placement
from novalm_jax.engine.programs import Shapes
from novalm_jax.engine.request import Request
from novalm_jax.engine.streamed_programs import StreamedPrograms
from novalm_jax.experts.records import count_records, moe_layers
from novalm_jax.kv.paged import page_bytes
from novalm_jax.models.families import find_family
from novalm_jax.models.params import parameters_of
from streamed_helpers import executor_of, with_slots

GOLDEN = Path(__file__).parent.parent / "golden"
CONTEXT, REQUESTS = 320, 16
# Wide enough: XLA's CPU backend adds up bfloat16 products of less than 32 numbers in an order that depends on the rows.
# Windows are longer than a page, so that pages go while they move on.
FIELDS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "gpt_oss": {"sliding_window": 70, "head_dim": 16},
    "deepseek_v3": {
        "moe_intermediate_size": 64,
        **{"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_head_dim": 72, "v_head_dim": 64},
    },
    "llama4_text-chunk": {"attention_chunk_size": 100, "head_dim": 16, "intermediate_size_mlp": 64},
}
WIDE = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 512}

pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base, draw = tmp_path_factory.mktemp("batches"), np.random.default_rng(0)
    for name, fields in FIELDS.items():
        raw = {**json.loads((GOLDEN / name / "config.json").read_text()), **WIDE, **fields}
        model = abstract_model(find_family(raw).read_config(raw))
        for parameter in parameters_of(model).values():
            parameter.set_value(jnp.asarray(draw.normal(size=parameter.shape) * 0.2, parameter.dtype))
        save_model(model, base / name, config=raw)
    return {name: base / name for name in FIELDS}


def asked(llm: LLM) -> list[Request]:
    """Prompts of all lengths, of which some begin alike, half of them greedy; the same ones each time."""
    draw = np.random.default_rng(0)
    common = draw.integers(3, 96, 150).tolist()
    lengths = [1, 2, 63, 64, 65, 128, 129, 200, *draw.integers(3, 280, REQUESTS - 8).tolist()]
    requests = []
    for number, length in enumerate(lengths):
        prompt = draw.integers(3, 96, length).tolist()
        if number % 2:
            shared = min(length - 1, 130)
            prompt[:shared] = common[:shared]
        sampled = {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5, "seed": number, "logprobs": 2}
        greedy = {"temperature": 0}
        params = SamplingParams(
            **(sampled if number % 2 else greedy), max_tokens=4 + 5 * (number % 5), ignore_eos=True, min_tokens=2
        )
        requests += llm.requests([prompt], params)
    return requests


class Listened:
    """What every request of an engine was told: its tokens, and the logits that each was chosen from."""

    def __init__(self, engine: Engine):
        self.heard: dict[Request, list[bytes]] = {}
        accept = Engine._accept.__get__(engine)

        def listen(requests: Any, decoded: Any) -> None:
            for request, line in zip(requests, np.asarray(decoded.logits), strict=False):
                self.heard.setdefault(request, []).append(line.tobytes())
            accept(requests, decoded)

        engine._accept = listen  # type: ignore[method-assign]

    def of(self, request: Request) -> tuple[list[int], list[bytes], Any]:
        return request.token_ids, self.heard[request], request.logprobs


Expected = list[tuple[list[int], list[bytes], Any]]


def crowded(folder: Path, placement: str, dtype: str) -> LLM:
    """With a third of the pages that all rows together could use."""
    config = Checkpoint.open(folder).config
    everything = Shapes.of(config, REQUESTS, CONTEXT, np.dtype(jnp.dtype(dtype)))
    kv_memory = sum(page_bytes(config, everything.capacity, everything.pages, everything.dtype)) // 3
    options: dict[str, Any] = {"dtype": dtype, "context_length": CONTEXT, "host_memory": "64MiB"}
    options |= {"max_batch": REQUESTS, "kv_memory": kv_memory}
    if placement == "resident":
        return LLM(folder, **options)
    chosen = max(moe.experts_per_token for moe in moe_layers(config).values())
    return with_slots(folder, max(count_records(config) // 4, chosen), **options)


def run_alone(llm: LLM) -> Expected:
    """Every request by itself, with nothing left of those before."""
    listened, requests = Listened(llm._engine), asked(llm)
    for request in requests:
        llm._engine.scheduler.reset(llm._executor.new_book())
        llm._engine.submit([request])
        llm._engine.run_until_ended(request)
    return [listened.of(request) for request in requests]


def run_in_company(llm: LLM, seed: int, others: list[StreamedPrograms]) -> tuple[Expected, int, int]:
    """All requests, in any order and at any time; now and then one leaves for the host, or memory changes hands."""
    draw, engine = np.random.default_rng(seed), llm._engine
    listened, requests = Listened(engine), asked(llm)
    waiting, forced, changed = draw.permutation(REQUESTS).tolist(), 0, 0
    while waiting or any(request.finish_reason is None for request in requests):
        for _ in range(min(len(waiting), int(draw.integers(0, 4)))):
            engine.submit([requests[waiting.pop()]])
        engine.step()
        there = [one for one in engine._requests if one.held and one.row is not None and one not in engine._busy]
        if there and draw.random() < 0.3:
            before = engine.scheduler.preemptions
            engine.scheduler._move_out(there[int(draw.integers(len(there)))], engine._requests)
            # One that has nothing yet only loses its row.
            forced += engine.scheduler.preemptions - before
        in_use = [pool.in_use for pool in engine.scheduler.pages.pools]
        enough = [programs for programs in others if all(map(le, in_use, programs.shapes.pages))]
        if enough and engine._pass is None and draw.random() < 0.3:
            change_memory(enough[int(draw.integers(len(enough)))], executor_of(llm), engine.scheduler, engine._requests)
            changed += 1
    return [listened.of(request) for request in requests], forced, changed


def proportions(placement: Placement) -> list[StreamedPrograms]:
    """What a model was placed with, and more pages and slots, whatever memory they take."""
    more = replace(placement, pages=3 * placement.pages, slots=placement.slots + 1)
    programs = placement.programs, placement.sizes.programs(more)
    return [each for each in programs if isinstance(each, StreamedPrograms)]


# Every model once with each number type or placement; all of them by hand.
QUICK = {
    ("qwen2_moe", "float32"),
    ("gpt_oss", "bfloat16"),
    ("deepseek_v3", "bfloat16"),
    ("llama4_text-chunk", "float32"),
}


@pytest.mark.parametrize(
    ("name", "dtype", "seeds"),
    [
        pytest.param(name, dtype, seeds, marks=() if seeds == 4 and (name, dtype) in QUICK else pytest.mark.slow)
        for name, dtype, seeds in itertools.product(FIELDS, ("float32", "bfloat16"), (4, 20))
    ],
)
def test_company_changes_no_bit(folders: dict[str, Path], name: str, dtype: str, seeds: int) -> None:
    with crowded(folders[name], "resident", dtype) as llm:
        expected = run_alone(llm)
    for placement in ("resident", "quarter"):
        with crowded(folders[name], placement, dtype) as llm:
            others = proportions(llm._placement) if placement == "quarter" else []
            scheduler = llm._engine.scheduler
            for seed in range(seeds):
                before = scheduler.preemptions
                found, forced, changed = run_in_company(llm, seed, others)
                for number, (heard, right) in enumerate(zip(found, expected, strict=True)):
                    assert heard == right, f"request {number}, {placement}, seed {seed}"
                assert 0 < forced <= scheduler.preemptions - before and (changed > 0) == bool(others)
                assert [pool.in_use for pool in scheduler.pages.pools] == [0] * len(scheduler.pages.pools)
                assert scheduler.host_bytes == 0 and not llm._engine._requests
            assert scheduler.prefix_tokens > 0
            assert (llm.report().expert_misses > 0) == (placement == "quarter")
