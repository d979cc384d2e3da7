"""`LLM` from outside: forms of prompts, completions, chat, streams and logits."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax import LLM, Completion, SamplingParams, load_model
from novalm_jax.errors import CheckpointError, EngineError, RequestError
from tiny_checkpoints import (
    ASSISTANT,
    BOS,
    EOS,
    SYSTEM,
    TOKENS,
    USER,
    chain,
    chain_checkpoint,
    cycle,
    encode,
    tiny_checkpoint,
    write_json,
    write_tokenizer,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A Mixtral of random weights."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "mixtral")


@pytest.fixture(scope="module")
def llm(tiny) -> Iterator[LLM]:
    with LLM(tiny, dtype="float32", max_batch=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def speaker(tmp_path_factory) -> Iterator[LLM]:
    """Says "elo wé日!" and stops after H, and goes on for ever after 0."""
    follows = chain("Helo wé日!") | cycle(encode("0123456789"))
    with LLM(chain_checkpoint(tmp_path_factory.mktemp("speaker"), follows), max_batch=2) as llm:
        yield llm


# --- prompts and completions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ("hi", [encode("hi")]),
        (["hi", "yes"], [encode("hi"), encode("yes")]),
        (("hi", "yes"), [encode("hi"), encode("yes")]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        ([(7, 8), range(9, 12)], [[7, 8], [9, 10, 11]]),
        (np.array([7, 8, 9]), [[7, 8, 9]]),
        (np.array([[7, 8], [9, 10]], np.uint8), [[7, 8], [9, 10]]),
        ([np.array([7, 8]), [9]], [[7, 8], [9]]),
        ([np.int64(7), np.int64(8)], [[7, 8]]),
        (["hi", [7]], [encode("hi"), [7]]),
        ([], []),
    ],
)
def test_every_form_of_prompt_is_understood(llm, prompts: Any, ids):
    outs = llm.generate(prompts, SamplingParams(max_tokens=1))
    assert [list(out.prompt_token_ids) for out in outs] == ids
    assert [out.index for out in outs] == list(range(len(ids)))


@pytest.mark.parametrize("prompts", [5, None, b"hi", {"prompt": "hi"}, [1.5], [[1.5]], [["a"]], [None], [7, "hi"]])
def test_what_is_no_prompt_is_refused(llm, prompts: Any):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("prompts", [[[TOKENS]], [[-1]], [[3], [10**9]]])
def test_ids_outside_the_vocabulary_are_refused_with_the_range(llm, prompts):
    with pytest.raises(RequestError, match=f"from 0 to {TOKENS - 1}"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("prompts", ["", [""], [[]], ["hi", ""]])
def test_an_empty_prompt_is_refused(llm, prompts):
    with pytest.raises(RequestError, match="is empty: there is nothing to go on from"):
        llm.generate(prompts, GREEDY)


def test_nothing_runs_where_one_of_several_prompts_is_refused(llm):
    before = llm.report().prompt_tokens
    with pytest.raises(RequestError, match="prompt 2 holds 999999"):
        llm.generate([[3], [4], [999999]], GREEDY)
    assert llm.generate([5], GREEDY)[0].finish_reason == "length"
    assert llm.report().prompt_tokens == before + 1


def test_sampling_is_one_for_all_or_one_each(llm):
    one, two = SamplingParams(temperature=0, max_tokens=2), SamplingParams(temperature=0, max_tokens=5)
    assert [len(out.token_ids) for out in llm.generate([[7], [8]], two)] == [5, 5]
    assert [len(out.token_ids) for out in llm.generate([[7], [8]], [one, two])] == [2, 5]
    for params in ([one], [one, two, one], []):
        with pytest.raises(RequestError, match=f"there are {len(params)} for 2 prompts"):
            llm.generate([[7], [8]], params)


def test_completions_come_in_prompt_order_with_choices_side_by_side(llm):
    params = [SamplingParams(max_tokens=1 + i, n=n, ignore_eos=True) for i, n in enumerate((2, 1, 3))]
    outs = llm.generate(["ab", "c", "d"], params)
    assert [(out.index, out.choice) for out in outs] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert [len(out.token_ids) for out in outs] == [1, 1, 2, 3, 3, 3]


def test_more_prompts_than_rows_all_get_the_answer_they_get_alone(llm):
    prompts = [[10 + i, 20 + i] for i in range(11)]
    together = llm.generate(prompts, GREEDY)
    assert [out.token_ids for out in together] == [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]


def test_a_completion_says_what_happened(speaker):
    assert speaker.generate("H") == [
        Completion(
            text="elo wé日!",
            token_ids=[*encode("elo wé日!"), EOS],
            prompt_token_ids=encode("H"),
            index=0,
            choice=0,
            finish_reason="stop",
            logprobs=None,
        )
    ]
    (out,) = speaker.generate(encode("H"), SamplingParams(max_tokens=3))
    assert (out.text, out.token_ids, out.finish_reason) == ("elo", encode("elo"), "length")
    json.dumps(asdict(out))


# --- chat ------------------------------------------------------------------------------------------------------------


def test_chat_renders_the_template_of_the_checkpoint(speaker):
    conversation = [{"role": "system", "content": "S"}, {"role": "user", "content": "H"}]
    (out,) = speaker.chat(conversation, SamplingParams(max_tokens=2))
    assert list(out.prompt_token_ids) == [BOS, SYSTEM, *encode("S"), USER, *encode("H"), ASSISTANT]
    several = speaker.chat([conversation, conversation[1:]], SamplingParams(max_tokens=2))
    assert [out.index for out in several] == [0, 1]
    assert list(several[1].prompt_token_ids) == [BOS, USER, *encode("H"), ASSISTANT]
    (out,) = speaker.chat(conversation, chat_template="{{ messages[1]['content'] }}")
    assert (list(out.prompt_token_ids), out.text) == (encode("H"), "elo wé日!")


@pytest.mark.parametrize("messages", [[], "hi", [{"content": "no role"}], [{"role": "user", "content": 5}]])
def test_chat_refuses_what_are_no_messages(speaker, messages: Any):
    with pytest.raises(RequestError):
        speaker.chat(messages)


@pytest.mark.parametrize(("add_bos", "template"), [(True, None), (True, "plain"), (False, None), (False, "plain")])
def test_a_prompt_has_as_many_first_tokens_as_it_should(tmp_path, add_bos, template):
    folder = chain_checkpoint(tmp_path, {})
    write_tokenizer(folder, add_bos=add_bos, **({"chat_template": "{{ messages[0].content }}"} if template else {}))
    message = [{"role": "user", "content": "hi"}]
    with LLM(folder, max_batch=1) as llm:
        (raw,) = llm.generate("hi", GREEDY)
        (given,) = llm.generate("<s>hi", GREEDY)
        (chat,) = llm.chat(message, GREEDY)
        if add_bos:
            assert llm.generate("", GREEDY)[0].prompt_token_ids == [BOS]
    assert raw.prompt_token_ids.count(BOS) == add_bos
    assert given.prompt_token_ids.count(BOS) == 1
    assert chat.prompt_token_ids.count(BOS) == (template is None)


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_pieces_of_a_stream_are_the_text_of_generate(llm, seed):
    params = SamplingParams(seed=seed, max_tokens=40, ignore_eos=True)
    (out,) = llm.generate("hé", params)
    stream = llm.stream("hé", params)
    pieces = list(stream)
    assert "".join(pieces) == out.text
    assert all(pieces)
    assert stream.completion == out


def test_a_stream_never_gives_half_a_character(speaker):
    assert list(speaker.stream("H")) == ["e", "l", "o", " ", "w", "é", "日", "!"]


def test_streams_move_together(speaker):
    first, second = speaker.streams(["H", "0"], [SamplingParams(), SamplingParams(max_tokens=6)])
    assert next(first) == "e"
    assert "".join(second) == "123456"
    assert "".join(first) == "lo wé日!"
    assert (first.completion.index, second.completion.index) == (0, 1)


def test_a_stream_is_one_completion(speaker):
    with pytest.raises(RequestError, match="n: a stream is one completion"):
        speaker.stream("H", SamplingParams(n=2))
    texts = speaker.streams(["H"], SamplingParams(n=2))
    assert ["".join(text) for text in texts] == ["elo wé日!"] * 2


def test_the_completion_of_a_stream_is_there_at_its_end(speaker):
    stream = speaker.stream("0")
    next(stream)
    with pytest.raises(EngineError, match="not finished"):
        _ = stream.completion
    stream.close()
    assert (stream.completion.finish_reason, stream.completion.text[:1]) == ("abort", "1")
    assert list(stream) == list(stream.completion.text[1:])


@pytest.mark.parametrize("how", ["close", "drop", "close unread"])
def test_a_stream_that_is_given_up_frees_its_row(speaker, how):
    """The model has two rows and these streams would hold them for ever."""
    for _ in range(3):
        streams = speaker.streams(["0", "0", "0"])
        if how != "close unread":
            next(streams[0]), next(streams[1])
        if how != "drop":
            for stream in streams:
                stream.close()
        del streams
        gc.collect()
        before = speaker.report().generated_tokens
        outs = speaker.generate(["H"] * 2)
        assert [out.text for out in outs] == ["elo wé日!"] * 2
        assert speaker.report().generated_tokens == before + sum(len(out.token_ids) for out in outs)


# --- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_logits_are_those_of_the_module_wherever_decoding_begins(tmp_path, family):
    folder = tiny_checkpoint(tmp_path, family)
    tokens = [5, 77, 3, 250, 12, 12, 9, 130, 41, 8, 8, 260]
    expected = np.asarray(load_model(folder)(jnp.asarray([tokens], jnp.int32)))[0]
    with LLM(folder, dtype="float32", max_batch=2) as llm:
        for first in (None, *range(1, len(tokens) + 1)):
            logits = llm.logits(tokens, decode_from=first)
            assert (logits.shape, logits.dtype) == ((len(tokens), TOKENS), np.float32)
            np.testing.assert_allclose(logits, expected, atol=1e-4, err_msg=f"decode_from={first}")


def test_logits_can_be_asked_for_between_the_steps_of_requests(llm):
    """Also while every row is taken: then they wait for one."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    alone = [out.token_ids for out in llm.generate([[7], [8], [9], [10]], params)]
    logits = llm.logits([7, 8, 9], 1)
    streams = llm.streams([[7], [8], [9], [10]], params)
    next(streams[0])
    np.testing.assert_array_equal(llm.logits([7, 8, 9], 1), logits)
    for stream in streams:
        assert list(stream) is not None
    assert [stream.completion.token_ids for stream in streams] == alone


@pytest.mark.parametrize(
    ("tokens", "first", "says"),
    [
        ([], None, "token_ids is empty"),
        ([1, TOKENS], None, "token_ids holds"),
        ([1] * 257, None, "at most 256"),
        ([1, 2], 0, "decode_from: 0"),
        ([1, 2], 3, "decode_from: 3"),
        ([1, 2], -1, "decode_from: -1"),
    ],
)
def test_logits_that_cannot_be_had_are_refused(llm, tokens, first, says):
    with pytest.raises(RequestError, match=says):
        llm.logits(tokens, first)


def test_logits_reach_to_the_end_of_the_context(llm):
    assert llm.logits([5] * 256, 250).shape == (256, TOKENS)


# --- other circumstances ----------------------------------------------------------------------------------------------


def test_without_a_tokenizer_ids_still_work_and_text_says_what_is_missing(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    with LLM(folder, max_batch=1) as llm:
        (out,) = llm.generate([5, 6], GREEDY)
        assert (len(out.token_ids), out.text) == (8, "")
        with pytest.raises(CheckpointError, match=r"no tokenizer.*tokenizer\.json"):
            llm.generate("hi")
        with pytest.raises(RequestError, match=r"stop: .*tokenizer"):
            llm.generate([5, 6], SamplingParams(stop=("x",)))


def test_several_threads_can_use_one_model(llm):
    prompts = [[10 + i] for i in range(6)]
    expected = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    got: dict[int, tuple[int, ...]] = {}

    def work(number: int) -> None:
        for _ in range(3):
            got[number] = llm.generate(prompts[number], GREEDY)[0].token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert [got[number] for number in range(len(prompts))] == expected


def test_a_damaged_generation_config_is_an_error_of_the_checkpoint(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "damaged")
    write_json(folder / "generation_config.json", {"eos_token_id": "two"})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        LLM(folder)
