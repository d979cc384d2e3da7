"""Sampling and stopping through `LLM`, on models whose logits the tests choose."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from novalm_jax import LLM, SamplingParams
from novalm_jax.errors import ConfigError, RequestError
from tiny_checkpoints import (
    BOS,
    EOS,
    TOKENS,
    bigram_checkpoint,
    chain,
    chain_checkpoint,
    cycle,
    encode,
    tiny_checkpoint,
    write_json,
)

A, B, C, X = (encode(letter)[0] for letter in "abcx")
MENU = {A: 5.0, B: 4.0, C: 3.0}
"""Logits after every token of the menu model; all others have -20."""


def menu_checkpoint(folder: Path, **fields: Any) -> Path:
    logits = np.full((TOKENS, TOKENS), -20, np.float32)
    for token, value in MENU.items():
        logits[:, token] = value
    return bigram_checkpoint(folder, logits, **fields)


@pytest.fixture(scope="module")
def menu(tmp_path_factory) -> Iterator[LLM]:
    """Whatever came before: a, b, c with the odds e^2 : e : 1."""
    with LLM(menu_checkpoint(tmp_path_factory.mktemp("menu")), dtype="float32", max_batch=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def speaker(tmp_path_factory) -> Iterator[LLM]:
    """Says "elo the world"-like chains, and digits for ever."""
    the = encode(" the")
    follows = chain("Helo w", "<abcd>") | cycle(encode("0123456789")) | {X: the[0], the[0]: encode("r")[0]}
    follows |= chain("ry!")
    with LLM(chain_checkpoint(tmp_path_factory.mktemp("speaker"), follows), max_batch=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> Path:
    """A Mixtral whose next token is nearly anything."""
    return tiny_checkpoint(tmp_path_factory.mktemp("noise") / "model", scale=0.08, seed=3)


@pytest.fixture(scope="module")
def noisy(noise) -> Iterator[LLM]:
    with LLM(noise, dtype="float32", max_batch=4) as llm:
        yield llm


def drawn(llm: LLM, **options: Any) -> tuple[int, ...]:
    """40 tokens after x."""
    params = replace(SamplingParams(seed=11, max_tokens=40, ignore_eos=True), **options)
    return tuple(llm.generate([X], params)[0].token_ids)


# --- which tokens may come -------------------------------------------------------------------------------------------


def test_temperature_0_takes_the_most_likely_token(menu):
    assert set(drawn(menu, temperature=0)) == {A}


def test_at_temperature_1_every_likely_token_comes(menu):
    assert set(drawn(menu)) == {A, B, C}


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"top_k": 1}, {A}),
        ({"top_k": 2}, {A, B}),
        ({"top_p": 0}, {A}),
        ({"top_p": 1e-9}, {A}),
        ({"top_p": 0.6}, {A}),
        ({"top_p": 0.7}, {A, B}),
        ({"min_p": 0.5}, {A}),
        ({"min_p": 0.2}, {A, B}),
        ({"min_p": 1}, {A}),
        ({"top_k": 2, "min_p": 0.1}, {A, B}),
        ({"logit_bias": {A: -math.inf}}, {B, C}),
        ({"logit_bias": {A: -100, B: -100}}, {C}),
        ({"logit_bias": {X: 1000}}, {X}),
        ({"temperature": 1e-6}, {A}),
    ],
)
def test_filters_and_biases_leave_these_tokens(menu, options, tokens):
    assert set(drawn(menu, **options)) == tokens


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 10**6}, {"top_k": TOKENS}, {"top_p": 1}, {"min_p": 0}])
def test_a_filter_that_keeps_everything_changes_nothing(menu, options):
    assert drawn(menu, **options) == drawn(menu)


def test_a_high_temperature_lets_unlikely_tokens_come(menu):
    assert len(set(drawn(menu, temperature=100))) > 20


@pytest.mark.parametrize("token", [TOKENS, -1, 10**9])
def test_a_bias_for_a_token_that_does_not_exist_is_refused(menu, token):
    with pytest.raises(RequestError, match=f"logit_bias: {token} is no token"):
        menu.generate([X], SamplingParams(logit_bias={A: 1, token: 1}))


# --- penalties -------------------------------------------------------------------------------------------------------


def _greedy(prompt: list[int], steps: int, repetition: float, presence: float, frequency: float) -> list[int]:
    """The oracle: one step at a time on plain numbers."""
    out: list[int] = []
    for _ in range(steps):
        logits = {token: MENU.get(token, -20.0) for token in range(TOKENS)}
        for token in {*prompt, *out}:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token in set(out):
            logits[token] -= presence + frequency * out.count(token)
        out.append(max(logits, key=lambda token: (logits[token], -token)))
    return out


@pytest.mark.parametrize(
    ("prompt", "repetition", "presence", "frequency"),
    [
        ([X], 1, 0, 0),
        ([X], 2, 0, 0),
        ([A], 1.3, 0, 0),
        ([A, B], 3, 0, 0),
        ([X], 0.5, 0, 0),
        ([X], 1, 2.6, 0),
        ([A], 1, 2.6, 0),
        ([X], 1, 0, 0.7),
        ([X], 1, -3, 0),
        ([X], 1.1, 0.3, 0.4),
        ([X], 1, 0, 30),
    ],
)
def test_penalties_are_those_of_the_formula(menu, prompt, repetition, presence, frequency):
    params = SamplingParams(
        temperature=0,
        max_tokens=12,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        ignore_eos=True,
    )
    (out,) = menu.generate(prompt, params)
    assert list(out.token_ids) == _greedy(prompt, 12, repetition, presence, frequency)


def test_a_penalty_breaks_a_chain_that_repeats_itself(speaker):
    plain = SamplingParams(temperature=0, max_tokens=15)
    assert speaker.generate("0", plain)[0].text == "123456789012345"
    (out,) = speaker.generate("0", replace(plain, frequency_penalty=30.0))
    assert out.text.startswith("1234567890") and not out.text.startswith("12345678901")


# --- the end of a text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "stop", "text", "reason"),
    [
        ("H", ("w",), "elo ", "stop"),
        ("H", ("lo w",), "e", "stop"),
        ("H", ("o w", "lo"), "e", "stop"),
        ("H", ("o ", "lo w"), "el", "stop"),
        ("H", ("elo w",), "", "stop"),
        ("H", ("Helo",), "elo w", "stop"),
        ("H", ("lo ww", "zz"), "elo w", "stop"),
        ("x", ("th",), " ", "stop"),
        ("x", ("her",), " t", "stop"),
        ("x", ("ry!",), " the", "stop"),
        ("0", ("789",), "123456", "stop"),
    ],
)
def test_a_stop_text_is_found_across_the_borders_of_tokens_and_cut(speaker, prompt, stop, text, reason):
    params = SamplingParams(stop=stop, max_tokens=30)
    (out,) = speaker.generate(prompt, params)
    assert (out.text, out.finish_reason) == (text, reason)
    stream = speaker.stream(prompt, params)
    assert "".join(stream) == text
    assert stream.completion == out


def test_text_held_back_for_a_stop_text_comes_out_at_the_end(speaker):
    (out,) = speaker.generate("0", SamplingParams(stop=("5678X",), max_tokens=8))
    assert (out.text, out.finish_reason) == ("12345678", "length")


def test_a_stop_token_ends_the_text_before_it(speaker):
    ids = encode("abcd")
    (out,) = speaker.generate("<", SamplingParams(stop_token_ids=(ids[2], 10**6)))
    assert (out.text, out.token_ids, out.finish_reason) == ("ab", ids[:3], "stop")


def test_a_first_token_that_ends_the_text_gives_an_empty_one(speaker):
    (out,) = speaker.generate("!", SamplingParams(logprobs=0))
    assert (out.text, out.token_ids, out.finish_reason) == ("", [EOS], "stop")
    assert out.logprobs is not None and [list(line) for line in out.logprobs] == [[EOS]]
    stream = speaker.stream("!")
    assert list(stream) == []
    assert stream.completion.finish_reason == "stop"


def test_ignore_eos_goes_on_and_the_end_token_has_no_text(speaker):
    (out,) = speaker.generate("!", SamplingParams(temperature=0, ignore_eos=True, max_tokens=3))
    assert (out.token_ids, out.text, out.finish_reason) == ([EOS, EOS, EOS], "", "length")
    ids = encode("abcd")
    (out,) = speaker.generate("<", SamplingParams(ignore_eos=True, stop_token_ids=(ids[2],)))
    assert out.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0, 1])
def test_min_tokens_rules_out_the_end_until_then(tmp_path, temperature):
    logits = np.zeros((TOKENS, TOKENS), np.float32)
    logits[:, EOS], logits[:, B] = 48, 24
    with LLM(bigram_checkpoint(tmp_path, logits), max_batch=1) as llm:
        params = SamplingParams(temperature=temperature, seed=1)
        assert llm.generate([X], params)[0].token_ids == [EOS]
        assert llm.generate([X], replace(params, min_tokens=3))[0].token_ids == [B, B, B, EOS]
        stopped = replace(params, min_tokens=2, stop_token_ids=(B,), logit_bias={C: 30})
        assert llm.generate([X], stopped)[0].token_ids == [C, C, EOS]
        assert llm.generate([X], replace(params, min_tokens=4, max_tokens=4))[0].finish_reason == "length"
    with pytest.raises(RequestError, match="min_tokens: 50 is more than max_tokens, which is 4"):
        replace(params, min_tokens=50, max_tokens=4)


def test_no_tokens_are_none_and_no_limit_is_the_context(speaker):
    (out,) = speaker.generate("0", SamplingParams(max_tokens=0))
    assert (out.text, out.token_ids, out.finish_reason) == ("", [], "length")
    assert list(speaker.stream("0", SamplingParams(max_tokens=0))) == []
    for most in (None, 10**6):
        (out,) = speaker.generate("0", SamplingParams(max_tokens=most))
        assert (len(out.token_ids), out.finish_reason) == (255, "length")
        assert out.text == ("1234567890" * 26)[:255]


def test_prompts_at_the_edge_of_the_context(tmp_path):
    """A prompt leaves room for one token, unless none is asked for."""
    digits = encode("0123456789" * 2)
    with LLM(chain_checkpoint(tmp_path, cycle(digits[:10])), context_length=16, max_batch=1) as llm:
        assert llm.context_length == 16
        (out,) = llm.generate(digits[:15])
        assert (out.text, out.finish_reason) == ("5", "length")
        for length, most in ((16, None), (16, 1), (17, None), (17, 0), (100, 5)):
            with pytest.raises(RequestError, match=f"prompt 0 has {length} tokens, and at most {16 - (most != 0)} fit"):
                llm.generate((digits * 5)[:length], SamplingParams(max_tokens=most))
        assert llm.generate(digits[:16], SamplingParams(max_tokens=0))[0].finish_reason == "length"


def test_the_end_tokens_are_those_of_generation_config(tmp_path):
    folder = chain_checkpoint(tmp_path, chain("<abcd>"), eos_token_id=encode("d")[0])
    texts = {}
    for name, config in (("none", None), ("list", [EOS, encode("c")[0]]), ("one", encode("b")[0])):
        if config is not None:
            write_json(folder / "generation_config.json", {"eos_token_id": config})
        with LLM(folder, max_batch=1) as llm:
            texts[name] = llm.generate("<")[0].text
    assert texts == {"none": "abc", "list": "ab", "one": "a"}


def test_an_id_that_the_tokenizer_does_not_know_has_no_text(tmp_path):
    """Heads have more rows than tokenizers, and one of the rest may win."""
    strange = TOKENS + 30
    follows = {X: strange, strange: encode("y")[0]}
    with LLM(chain_checkpoint(tmp_path, follows, vocab_size=TOKENS + 55), max_batch=2) as llm:
        params = SamplingParams(logprobs=3, max_tokens=3)
        (out,) = llm.generate("x", params)
        assert (out.token_ids, out.text, out.finish_reason) == ([strange, encode("y")[0], EOS], "y", "stop")
        json.dumps(out.logprobs)
        assert "".join(llm.stream("x", params)) == "y"
        assert llm.generate([strange], params)[0].text == "y"


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0}, {"temperature": 3.0, "top_k": 2}, {"logit_bias": {A: -math.inf}}]
)
def test_logprobs_are_of_the_models_own_distribution(noisy, options):
    """Before bias, temperature and filters."""
    params = replace(SamplingParams(seed=5, max_tokens=6, logprobs=4, ignore_eos=True), **options)
    (out,) = noisy.generate([9, 8, 7], params)
    logits = noisy.logits([9, 8, 7, *out.token_ids], 3)[2:-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert out.logprobs is not None and len(out.logprobs) == 6
    for token, line, row in zip(out.token_ids, out.logprobs, expected, strict=True):
        top = sorted(range(TOKENS), key=lambda i, row=row: -row[i])[:4]
        assert list(line) == [token, *(i for i in top if i != token)]
        np.testing.assert_allclose(list(line.values()), row[list(line)], atol=1e-4)


def test_logprobs_are_there_only_for_those_who_ask(menu):
    first, second, third = menu.generate(
        [[X]] * 3, [SamplingParams(max_tokens=2, logprobs=n, seed=n) for n in (None, 0, 20)]
    )
    assert first.logprobs is None
    assert second.logprobs is not None and [list(line) for line in second.logprobs] == [[t] for t in second.token_ids]
    assert third.logprobs is not None and all(len(line) == 20 for line in third.logprobs)


# --- seeds -----------------------------------------------------------------------------------------------------------

SEEDED = SamplingParams(seed=42, max_tokens=20, ignore_eos=True, temperature=1)
UNSEEDED = replace(SEEDED, seed=None)


def test_a_seed_gives_the_same_tokens_in_any_company_row_and_process(noise, noisy):
    (alone,) = noisy.generate([9, 8], SEEDED)
    assert noisy.generate([9, 8], SEEDED) == [alone]
    outs = noisy.generate([[5], [6, 7], [9, 8], [10] * 70], [UNSEEDED, UNSEEDED, SEEDED, UNSEEDED])
    assert outs[2].token_ids == alone.token_ids
    held = noisy.streams([[5], [6]], replace(UNSEEDED, max_tokens=200))
    next(held[0])
    assert noisy.generate([9, 8], SEEDED) == [alone]
    del held
    with LLM(noise, dtype="float32", max_batch=3) as again:
        assert again.generate([9, 8], SEEDED) == [alone]


def test_other_seeds_and_prompts_give_other_tokens(noisy):
    seeds = [noisy.generate([9, 8], replace(SEEDED, seed=seed))[0].token_ids for seed in (0, 1, -1, 2**63 - 1)]
    assert len(set(map(tuple, seeds))) == 4


def test_choices_are_repeatable_and_differ(noisy):
    four = [out.token_ids for out in noisy.generate([9, 8], replace(SEEDED, n=4))]
    assert [out.token_ids for out in noisy.generate([9, 8], replace(SEEDED, n=4))] == four
    assert len(set(map(tuple, four))) == 4
    assert four[0] == noisy.generate([9, 8], SEEDED)[0].token_ids
    assert [out.token_ids for out in noisy.generate([9, 8], replace(SEEDED, n=2))] == four[:2]


def test_requests_without_a_seed_differ_also_side_by_side(noisy):
    outs = noisy.generate([[9, 8]] * 4, UNSEEDED) + noisy.generate([9, 8], replace(UNSEEDED, n=3))
    assert len({tuple(out.token_ids) for out in outs}) == len(outs)


# --- defaults of the checkpoint --------------------------------------------------------------------------------------


def _with_defaults(folder: Path, config: Mapping[str, Any] | None, *asked: SamplingParams) -> list[list[int]]:
    if config is not None:
        write_json(folder / "generation_config.json", config)
    with LLM(folder, dtype="float32", max_batch=1) as llm:
        return [llm.generate([X], one)[0].token_ids for one in asked]


def test_what_a_request_leaves_open_is_as_generation_config_says(tmp_path, menu):
    unspecified = SamplingParams(seed=11, max_tokens=20, ignore_eos=True)
    at_1 = menu.generate([X], replace(unspecified, temperature=1))[0].token_ids
    likely = menu.generate([X], replace(unspecified, temperature=1, top_k=2))[0].token_ids
    greedy = [A] * 20
    assert at_1 != likely != greedy != at_1
    folder = menu_checkpoint(tmp_path)
    explicit = replace(unspecified, temperature=1, top_k=0)
    cases: list[tuple[Mapping[str, Any] | None, list[int]]] = [
        (None, at_1),
        ({}, at_1),
        ({"do_sample": False, "temperature": 0.6}, greedy),
        ({"do_sample": True, "top_k": 1}, greedy),
        ({"do_sample": True, "top_k": 2}, likely),
        ({"temperature": 0.0}, greedy),
    ]
    for config, expected in cases:
        zero = replace(unspecified, temperature=0)
        assert _with_defaults(folder, config, unspecified, explicit, zero) == [expected, at_1, greedy], config


def test_a_default_that_no_sampler_honours_is_an_error_only_where_it_counts(tmp_path):
    folder = menu_checkpoint(tmp_path)
    write_json(folder / "generation_config.json", {"repetition_penalty": 0.0})
    with LLM(folder, max_batch=1) as llm:
        with pytest.raises(ConfigError, match=r"generation_config\.json.*Set repetition_penalty in the request"):
            llm.generate([X])
        assert llm.generate([X], SamplingParams(repetition_penalty=1.0, max_tokens=1, top_k=1))[0].token_ids == [A]


def test_the_first_token_of_the_vocabulary_can_win(tmp_path):
    """Ties go to the lowest id, which is a special token without text."""
    with LLM(bigram_checkpoint(tmp_path, np.zeros((TOKENS, TOKENS), np.float32)), max_batch=1) as llm:
        (out,) = llm.generate([X], SamplingParams(temperature=0, max_tokens=3))
    assert (out.token_ids, out.text) == ([BOS] * 3, "")


def test_greedy_is_greedy_by_any_name(menu):
    greedy = [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}, {"temperature": 0, "logprobs": 1}]
    assert len({drawn(menu, **options) for options in greedy}) == 1
