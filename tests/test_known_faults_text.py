"""Known faults of systems like this one: first tokens, chat templates, defaults of sampling, seeds.

As in test_known_faults.py: a check for each fault, and the fault itself to prove that the check sees it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fault_checks import Check, Fault, Patch, checks_of, name_of, refused, see
from novalm_jax import LLM, SamplingParams, generate
from novalm_jax.engine import llm as facade
from novalm_jax.engine import sampler as sampler_file
from novalm_jax.errors import RequestError
from novalm_jax.text import template_sandbox
from novalm_jax.text.chat import ChatTemplates
from novalm_jax.text.generation_config import GenerationConfig
from novalm_jax.text.tokenizer import Tokenizer
from tiny_checkpoints import (
    BOS,
    EOS,
    TEMPLATE,
    TOKENS,
    bigram_checkpoint,
    chain_checkpoint,
    encode,
    tiny_checkpoint,
    write_json,
    write_tokenizer,
)

# --- first tokens ----------------------------------------------------------------------------------------------------


def check_one_first_token(folder: Path) -> None:
    """A chat begins with two first tokens, one of the template and one of the tokenizer; or with the cure of that, a
    plain prompt has none."""
    chain_checkpoint(folder, {})
    write_tokenizer(folder, add_bos=True)
    with LLM(folder, max_batch=1) as llm:
        for text in ("hi", "<s>hi"):
            ids = llm.generate(text, SamplingParams(max_tokens=1))[0].prompt_token_ids
            assert ids == [BOS, *encode("hi")], f"first tokens of the prompt {text!r}"
        (out,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1))
        assert (out.prompt_token_ids[0], out.prompt_token_ids.count(BOS)) == (BOS, 1), "first tokens of a chat"
        command: Any = generate.GenerateOptions(chat=True)
        assert generate._as_chat(llm, command, "hi") == out.prompt_token_ids, "a chat on the command line"
        assert llm.report().prompt_tokens == 2 * (1 + len(encode("hi"))) + len(out.prompt_token_ids)
    write_tokenizer(folder, chat_template=TEMPLATE.replace("{{ bos_token }}", ""))
    plain = Tokenizer.load(folder)
    for ids in (plain.encode("hi"), plain.encode_chat([{"role": "user", "content": "hi"}])):
        assert BOS not in ids, "a first token that nothing asks for"


def backend_ids(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    ids: list[int] = tokenizer._backend.encode(text, add_special_tokens=special).ids
    return ids


def chat_encoded_as_a_prompt(patch: Patch) -> None:
    patch.setattr(Tokenizer, "encode_chat", lambda self, chat, **_: backend_ids(self, self.render_chat(chat), True))


def first_token_doubled(patch: Patch) -> None:
    patch.setattr(
        Tokenizer, "encode", lambda self, text, add_special_tokens=True: backend_ids(self, text, add_special_tokens)
    )


def first_token_lost(patch: Patch) -> None:
    patch.setattr(Tokenizer, "encode", lambda self, text, add_special_tokens=True: backend_ids(self, text, False))


# --- ids without a token ---------------------------------------------------------------------------------------------


def check_id_beyond_the_tokenizer(folder: Path) -> None:
    """A rare request dies of an unknown token: heads have more rows than tokenizers, and one of the rest may win."""
    x, y, strange = encode("x")[0], encode("y")[0], TOKENS + 30
    chain_checkpoint(folder, {x: strange, strange: y}, vocab_size=TOKENS + 55)
    with LLM(folder, max_batch=1) as llm:
        params = SamplingParams(logprobs=3, max_tokens=3)
        for prompt, ids in (("x", [strange, y, EOS]), ([strange], [y, EOS])):
            (out,) = llm.generate(prompt, params)
            assert (out.token_ids, out.text) == (ids, "y"), "text around an id without one"
            json.dumps(out.logprobs)
        assert "".join(llm.stream("x", params)) == "y"


def unknown_id_raises(patch: Patch) -> None:
    def knows(tokenizer: Tokenizer, token_id: int) -> bool:
        if token_id >= tokenizer.vocab_size:
            raise KeyError(f"unknown token id {token_id}")
        return True

    patch.setattr(Tokenizer, "knows", knows)


def unknown_id_has_a_text(patch: Patch) -> None:
    right = Tokenizer.token_bytes
    patch.setattr(Tokenizer, "knows", lambda self, token_id: True)
    patch.setattr(Tokenizer, "token_bytes", lambda self, i, **more: right(self, i, **more) or b"<unk>")


# --- chat templates --------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "hi"}]


def check_templates_that_refuse(folder: Path) -> None:
    """A chat ends in an internal error: the template refuses a role, and what it raises is not caught; or it calls a
    helper that is not there."""
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ 1 / 0 }}"
    write_tokenizer(folder, chat_template=refusing)
    tokenizer = Tokenizer.load(folder)
    refused(lambda: tokenizer.render_chat([{"role": "system", "content": "s"}]), RequestError, "no system here")
    refused(lambda: tokenizer.render_chat(CHAT), RequestError, "division by zero")
    write_tokenizer(folder, chat_template="{{ strftime_now('%Y') }} {{ messages[0] | tojson }}")
    assert re.fullmatch(r'\d{4} {"role": "user", "content": "hi"}', Tokenizer.load(folder).render_chat(CHAT))


def check_places_of_templates(folder: Path) -> None:
    """The template is said not to exist, though it is there: it has a file of its own."""
    for in_config, in_file, text in ((None, "file", "file"), ("config", "file", "file"), ("config", None, "config")):
        write_tokenizer(folder, chat_template=in_config)
        path = folder / "chat_template.jinja"
        path.unlink(missing_ok=True)
        if in_file is not None:
            path.write_text(in_file)
        assert Tokenizer.load(folder).render_chat(CHAT) == text, f"template of config {in_config}, file {in_file}"
    write_tokenizer(folder, chat_template=None)
    refused(lambda: Tokenizer.load(folder).render_chat(CHAT), RequestError, "no chat template.*Plain completion.*works")
    assert Tokenizer.load(folder).encode("hi") == encode("hi")


def templates_not_caught(patch: Patch) -> None:
    right = ChatTemplates.render

    def render(*arguments: Any, **options: Any) -> str:
        try:
            return right(*arguments, **options)
        except RequestError as error:
            raise error.__cause__ or error from None

    patch.setattr(ChatTemplates, "render", render)


def helpers_absent(patch: Patch) -> None:
    patch.delitem(template_sandbox._environment().globals, "strftime_now")


def file_of_the_template_not_read(patch: Patch) -> None:
    right = ChatTemplates.load
    patch.setattr(ChatTemplates, "load", lambda folder, config: right(folder / "nowhere", config))


def config_before_the_file(patch: Patch) -> None:
    right = ChatTemplates.load

    def read(folder: Path, config: Mapping[str, Any]) -> ChatTemplates:
        return right(folder / "nowhere" if "chat_template" in config else folder, config)

    patch.setattr(ChatTemplates, "load", read)


# --- defaults of sampling --------------------------------------------------------------------------------------------


def check_sampling_defaults(folder: Path) -> None:
    """Requests that leave it open sample where the checkpoint says greedy, or the reverse; or a 0 that a request gives
    counts as nothing."""
    logits = np.full((TOKENS, TOKENS), -20, np.float32)
    logits[:, 10:13] = 5.0, 4.5, 4.0
    bigram_checkpoint(folder, logits)
    unspecified = SamplingParams(seed=11, max_tokens=20, ignore_eos=True)
    given = [unspecified, replace(unspecified, temperature=0), replace(unspecified, temperature=1, top_k=0)]
    greedy = [10] * 20
    free: list[int] = []
    for stored, is_greedy, told in (
        (None, False, {}),
        ({"do_sample": False, "temperature": 0.6}, True, {"temperature": 0}),
        ({"do_sample": True, "top_k": 1}, True, {"temperature": 1, "top_k": 1}),
    ):
        if stored is not None:
            write_json(folder / "generation_config.json", stored)
        with LLM(folder, dtype="float32", max_batch=1) as llm:
            open_, zero, one = (llm.generate([9], params)[0].token_ids for params in given)
            shown = llm.report().sampling_defaults
        free = free or one
        assert free != greedy
        assert open_ == (greedy if is_greedy else free), f"what {stored} means"
        assert (zero, one) == (greedy, free), f"the request's own values beside {stored}"
        assert shown == told, f"defaults shown of {stored}"


def defaults_ignored(patch: Patch) -> None:
    patch.setattr(GenerationConfig, "load", lambda folder: GenerationConfig())


def do_sample_ignored(patch: Patch) -> None:
    right = GenerationConfig.load

    def read(folder: Path) -> GenerationConfig:
        path = folder / "generation_config.json"
        stored = json.loads(path.read_text()) if path.exists() else {}
        return replace(right(folder), temperature=stored.get("temperature"))

    patch.setattr(GenerationConfig, "load", read)


def defaults_not_used(patch: Patch) -> None:
    right = facade.resolve
    patch.setattr(facade, "resolve", lambda params, _, fresh_seed: right(params, {}, fresh_seed=fresh_seed))


def zero_counts_as_nothing(patch: Patch) -> None:
    right = facade.resolve

    def resolve(params: SamplingParams, defaults: Any, fresh_seed: int) -> Any:
        kept = replace(params, temperature=params.temperature or None, top_k=params.top_k or None)
        return right(kept, defaults, fresh_seed=fresh_seed)

    patch.setattr(facade, "resolve", resolve)


# --- seeds -----------------------------------------------------------------------------------------------------------


SHORT = [5, 77, 3]
SEEDED = SamplingParams(seed=42, max_tokens=12, ignore_eos=True, temperature=1)


def check_seeds(folder: Path) -> None:
    """What a seed gives changes with company, place or start; choices come back alike, or requests without a seed."""
    tiny_checkpoint(folder, "qwen3_moe", num_hidden_layers=1, scale=0.15)
    unseeded = replace(SEEDED, seed=None)
    with LLM(folder, dtype="float32", max_batch=4) as llm:
        choices = [tuple(out.token_ids) for out in llm.generate(SHORT, replace(SEEDED, n=4))]
        assert len(set(choices)) == 4, "choices of one request"
        free = llm.generate([SHORT] * 3, unseeded)
        assert len({tuple(out.token_ids) for out in free}) == 3, "requests without a seed"
        alone = llm.generate(SHORT, SEEDED)
        assert tuple(alone[0].token_ids) == choices[0], "a seed alone and with more choices"
        assert llm.generate(SHORT, SEEDED) == alone, "a seed once more"
        outs = llm.generate([[9], [8] * 90, SHORT], [unseeded, unseeded, SEEDED])
        assert replace(outs[2], index=0) == alone[0], "a seed in company"
    with LLM(folder, dtype="float32", max_batch=4) as llm:
        assert llm.generate(SHORT, SEEDED) == alone, "a seed after a new start"


def one_generator_for_all(patch: Patch) -> None:
    """Every request goes on where the one before has ended."""
    right, draws = sampler_file.row_of, itertools.count()

    def row_of(*arguments: Any) -> Any:
        key: Any = np.array([0, next(draws)], np.uint32)
        return right(*arguments)._replace(key=key)

    patch.setattr(sampler_file, "row_of", row_of)


def one_stream_for_the_batch(patch: Patch) -> None:
    right = sampler_file._sample_row

    def sample(state: Any, raw: jax.Array, index: jax.Array) -> Any:
        return right(state._replace(key=jnp.broadcast_to(state.key[:1], state.key.shape)), raw, index)

    patch.setattr(sampler_file, "_sample_row", sample)


def choices_share_the_seed(patch: Patch) -> None:
    patch.setattr(facade, "choice_seed", lambda seed, choice: seed)


def no_fresh_seed(patch: Patch) -> None:
    right = facade.resolve
    patch.setattr(facade, "resolve", lambda params, defaults, fresh_seed: right(params, defaults, fresh_seed=0))


# --- every fault is seen ---------------------------------------------------------------------------------------------

FAULTS = [
    Fault(check_one_first_token, chat_encoded_as_a_prompt, "first tokens of a chat"),
    Fault(check_one_first_token, first_token_doubled, "first tokens of the prompt '<s>hi'"),
    Fault(check_one_first_token, first_token_lost, "first tokens of the prompt 'hi'"),
    Fault(check_id_beyond_the_tokenizer, unknown_id_raises, "unknown token id"),
    Fault(check_id_beyond_the_tokenizer, unknown_id_has_a_text, "text around an id without one"),
    Fault(check_templates_that_refuse, templates_not_caught, r"refused with .*no system here"),
    Fault(check_templates_that_refuse, helpers_absent, "strftime_now"),
    Fault(check_places_of_templates, file_of_the_template_not_read, "no chat template"),
    Fault(check_places_of_templates, config_before_the_file, "template of config config, file file"),
    Fault(check_sampling_defaults, defaults_ignored, "what .* means"),
    Fault(check_sampling_defaults, do_sample_ignored, "what .* means"),
    Fault(check_sampling_defaults, defaults_not_used, "what .* means"),
    Fault(check_sampling_defaults, zero_counts_as_nothing, "the request's own values"),
    Fault(check_seeds, one_generator_for_all, "a seed alone and with more choices"),
    Fault(check_seeds, one_stream_for_the_batch, "choices of one request"),
    Fault(check_seeds, choices_share_the_seed, "choices of one request"),
    Fault(check_seeds, no_fresh_seed, "requests without a seed"),
]


@pytest.mark.parametrize("check", checks_of(FAULTS), ids=name_of)
def test_the_product_is_free_of_the_fault(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_the_fault_would_be_seen(fault: Fault, tmp_path: Path, monkeypatch: Patch) -> None:
    see(fault, tmp_path, monkeypatch)
