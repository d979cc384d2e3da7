"""What `LLM` compiles and what it does not, and that no request feels its company, nor what pages are shared, copied or
moved, on tiny models of random weights."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_events import COMPILED, events_of
from novalm_jax import LLM, SamplingParams, load_model
from novalm_jax.checkpoint.load import Checkpoint, abstract_model
from novalm_jax.engine.estimate import Estimated
from novalm_jax.engine.executor import Executor, Part, Saved
from novalm_jax.engine.programs import Programs, Shapes
from novalm_jax.kernels.storage import tree_bytes
from novalm_jax.models.families import find_family
from novalm_jax.options import EngineOptions
from tiny_checkpoints import BOS, EOS, TOKENS, tiny_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
SHORT = [5, 77, 3]
LONG = [7 + i * 13 % 250 for i in range(50)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("programs") / "model", "qwen3_moe", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def llm(folder) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", max_batch=8) as llm:
        yield llm


# --- programs --------------------------------------------------------------------------------------------------------


def test_500_tokens_need_no_program_that_5_did_not(folder):
    with events_of(COMPILED) as at_start, LLM(folder, max_batch=2) as llm:
        params = SamplingParams(seed=1, ignore_eos=True, logprobs=2)
        llm.generate(SHORT, replace(params, max_tokens=5))
        assert at_start
        reported = llm.report()
        assert reported.programs_compiled + reported.programs_from_cache == len(at_start)
        with events_of(COMPILED) as later:
            (out,) = llm.generate(SHORT, replace(params, max_tokens=500))
        assert len(out.token_ids) == 500
        assert later == []
        after = llm.report()
        assert after.programs_compiled == reported.programs_compiled
        assert after.programs_from_cache == reported.programs_from_cache


def _mixed(i: int) -> SamplingParams:
    """Every kind of request in turn."""
    kinds = [
        {"temperature": 0},
        {"temperature": 0.7, "seed": i},
        {"logprobs": 5, "top_k": 7},
        {"stop": ("e", "the end"), "top_p": 0.9},
        {"frequency_penalty": 0.5, "logit_bias": {9: 2.0}, "min_tokens": 1},
        {"temperature": 0, "logprobs": 0, "stop_token_ids": (40,), "ignore_eos": True},
    ]
    return replace(SamplingParams(max_tokens=1 + i % 4), **kinds[i % len(kinds)])  # type: ignore[arg-type]


def test_after_a_warm_up_no_request_compiles_anything(llm):
    """Lengths 1 to 200 in batches of 1 to 4, of all kinds."""
    for prompts in ([[5] * 10], [[6] * 100] * 3):
        for kind in range(2):
            llm.generate(prompts, replace(_mixed(kind), max_tokens=3, ignore_eos=True))
    with events_of(COMPILED) as later:
        count = 0
        for length in range(1, 201, 5):
            batch = [[(length * 7 + i) % TOKENS for i in range(max(1, length - k))] for k in range(1 + length % 4)]
            llm.generate(batch, [_mixed(length + k) for k in range(len(batch))])
            count += len(batch)
    assert count > 90
    assert later == []


def test_no_program_of_prefill_holds_logits_of_a_whole_prompt():
    """A prompt of 600 tokens over 50,000 words would be 120 MB of them."""
    vocab = 50_048
    config = find_family({"model_type": "qwen3_moe"}).read_config(
        {
            "vocab_size": vocab,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 1024,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        }
    )
    programs = Programs(abstract_model(config), Shapes.of(config, 2, 1024, np.dtype(np.float32)))
    layer = config.layers[0]
    for tokens in (64, 512):
        parts = (
            programs.embed(tokens),
            programs.attend(layer, tokens),
            programs.experts(layer, tokens),
            programs.head(tokens),
        )
        for program in parts:
            assert _prompt_by_vocabulary(program.as_text() or "", vocab) == []
    whole = jax.jit(lambda x, w: x @ w).lower(
        jax.ShapeDtypeStruct((512, 32), jnp.float32), jax.ShapeDtypeStruct((32, vocab), jnp.float32)
    )
    assert _prompt_by_vocabulary(whole.compile().as_text() or "", vocab), "the search itself must find such an array"


def _prompt_by_vocabulary(program: str, vocab: int) -> list[str]:
    """Shapes in `program` with the vocabulary and another dimension of 64 or more."""
    found = []
    for shape in set(re.findall(r"\[((?:\d+,)+\d+)\]", program)):
        sizes = [int(size) for size in shape.split(",")]
        if vocab in sizes:
            sizes.remove(vocab)
            if max(sizes) >= 64:
                found.append(shape)
    return found


# --- isolation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_changes_no_bit(folder, dtype):
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)
    with LLM(folder, dtype=dtype, max_batch=8) as llm:
        (alone,) = llm.generate(SHORT, params)
        assert llm.generate([SHORT, LONG], params)[0] == alone
        assert replace(llm.generate([LONG, SHORT], params)[1], index=0) == alone
        crowd = llm.generate([[9 + i] * (1 + 20 * i) for i in range(7)] + [SHORT], params)
        assert replace(crowd[-1], index=0) == alone
        penalised = replace(params, frequency_penalty=1.5, presence_penalty=1.0, repetition_penalty=1.3)
        pair = llm.generate([SHORT, LONG], [params, penalised])
        assert pair[0] == alone
        assert pair[1] != llm.generate([SHORT, LONG], params)[1]
        short_lived = llm.generate([SHORT, LONG, LONG], [params, replace(params, max_tokens=2), params])
        assert short_lived[0] == alone


def test_rows_that_were_used_before_leave_nothing_behind(llm):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    (fresh,) = llm.generate(SHORT, params)
    llm.generate([[11] * 300] * 8, params)
    assert [replace(out, index=0) for out in llm.generate([SHORT] * 8, params)] == [fresh] * 8


@pytest.mark.parametrize(("case", "dtype"), [("gpt_oss", "float32"), ("deepseek_v3", "bfloat16")])
def test_requests_that_have_to_wait_on_the_host_go_on_with_the_same_bits(monkeypatch, case, dtype):
    """With pages for little more than one of them: of layers that see everything and of windows, or of latents."""
    folder, context = GOLDEN / case, 128
    options: dict[str, Any] = {"dtype": dtype, "max_batch": 4, "context_length": context}
    prompts = [[3 + (i * i * 7 + n) % 90 for i in range(length)] for n, length in enumerate((60, 30, 70, 20))]
    params = SamplingParams(temperature=0, max_tokens=50, logprobs=2, ignore_eos=True)
    drawn = replace(params, temperature=1.0, seed=3, frequency_penalty=1.0)
    each = [params, drawn, drawn, params]
    with LLM(folder, **options) as llm:
        expected = llm.generate(prompts, each)
        assert llm._engine.scheduler.preemptions == 0
    sizes = Estimated(Checkpoint.open(folder).config, EngineOptions(**options))
    with LLM(folder, kv_memory=sizes.kv_bytes(context, 3), **options) as llm:
        scheduler, moved = llm._engine.scheduler, []
        load = llm._executor.load

        def noted(pages: Any, saved: Saved) -> None:
            moved.append((tree_bytes(saved), sum(map(operator.mul, map(len, pages), llm._executor.page_bytes))))
            load(pages, saved)

        monkeypatch.setattr(llm._executor, "load", noted)
        assert llm.generate(prompts, each) == expected
        # On the host they take what is counted for them.
        assert moved and all(held == counted for held, counted in moved)
        assert scheduler.preemptions > 1 and scheduler.host_bytes == 0
        assert llm.logits(prompts[2]).shape == (70, 96)
        assert [pool.in_use for pool in scheduler.pages.pools] == [0] * len(scheduler.pages.pools)


@pytest.fixture
def computed(monkeypatch) -> list[tuple[int, int]]:
    """Of every part of a prompt that is computed, where it begins and ends."""
    noted: list[tuple[int, int]] = []
    prefill = Executor.prefill

    def counted(self: Executor, parts: Sequence[Part]) -> Any:
        noted.extend((part.start, part.start + len(part.tokens)) for part in parts)
        return prefill(self, parts)

    monkeypatch.setattr(Executor, "prefill", counted)
    return noted


def test_a_prompt_that_was_seen_before_is_not_computed_again_and_no_bit_changes(llm, computed):
    """But for what is no whole page, and for its last token."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    for length, parts in ((127, [(0, 127), (64, 127)]), (640, [(0, 512), (512, 640), (639, 640)])):
        computed.clear()
        tokens = [9 + (i * i + length) % 240 for i in range(length)]
        assert llm.generate(tokens, params) == llm.generate(tokens, params)
        assert computed == parts
    # Others beside it, and it beside itself.
    computed.clear()
    first, second, other = llm.generate([tokens, tokens, tokens[:100] + LONG], params)
    assert first == replace(second, index=0) == llm.generate(tokens, params)[0]
    assert computed == [(639, 640), (639, 640), (64, 150), (639, 640)]
    with LLM(llm._checkpoint.folder, dtype="float32", max_batch=1, prefix_cache=False) as alone:
        assert alone.generate(tokens[:100] + LONG, params)[0] == replace(other, index=0)
        assert alone.generate(tokens, params)[0] == first
        assert computed[4:] == [(0, 150), (0, 512), (512, 640)]


def test_choices_share_the_pass_of_their_prompt(llm, computed):
    """Also those that there is no row for yet, which are more than run together."""
    tokens = [7 + i * i % 200 for i in range(100)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=9, logprobs=1, ignore_eos=True)
    choices = llm.generate(tokens, replace(params, n=11))
    assert computed == [(0, 100), *[(64, 100)] * 3]
    assert len({tuple(choice.token_ids) for choice in choices}) == 11
    (alone,) = llm.generate(tokens, params)
    assert alone == choices[0]


@pytest.mark.parametrize("length", [64, 65, 511, 512, 513, 700])
def test_a_prompt_of_several_chunks_is_read_as_one(llm, folder, length):
    tokens = [3 + i * 31 % 257 for i in range(length)]
    expected = np.asarray(jax.jit(lambda m, t: m(t))(load_model(folder), jnp.asarray([tokens], jnp.int32)))[0]
    np.testing.assert_allclose(llm.logits(tokens), expected, atol=2e-4)
    (out,) = llm.generate(tokens, SamplingParams(temperature=0, max_tokens=1, logprobs=1))
    assert out.token_ids == [int(expected[-1].argmax())]
    assert out.logprobs is not None
    best = expected[-1] - np.log(np.exp(expected[-1].astype(np.float64)).sum())
    np.testing.assert_allclose(out.logprobs[0][out.token_ids[0]], best.max(), atol=2e-4)


def test_special_tokens_in_a_prompt_are_tokens_like_others(llm):
    (out,) = llm.generate([BOS, EOS, BOS, 5], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(out.token_ids) == 4
