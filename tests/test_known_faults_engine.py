"""Known faults of systems like this one: neighbours, pages, limits, interruption, compilation, and what failure leaves.

As in test_known_faults.py: a check for each fault, and the fault itself to prove that the check sees it.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from safetensors.numpy import load_file, save_file

from fault_checks import Check, Fault, Patch, checks_of, name_of, near, refused, see
from novalm_jax import LLM, SamplingParams, generate, load_model
from novalm_jax.checkpoint.files import TensorReader
from novalm_jax.checkpoint.load import Checkpoint, abstract_model
from novalm_jax.engine import executor as executor_file
from novalm_jax.engine import functions as functions_file
from novalm_jax.engine import sampler as sampler_file
from novalm_jax.engine.engine import Engine
from novalm_jax.engine.executor import Executor, ResidentExecutor, cut, put_stored
from novalm_jax.engine.functions import Decoded, Functions
from novalm_jax.engine.programs import Programs, Shapes
from novalm_jax.engine.scheduler import Scheduler
from novalm_jax.errors import EngineError, RequestError
from novalm_jax.kernels import experts as kernel
from novalm_jax.kv.pages import PagePool
from novalm_jax.models.decoder import Routed
from tiny_checkpoints import EOS, chain_checkpoint, cycle, encode, tiny_checkpoint

SHORT = [5, 77, 3]
LONG = [7 + i * 13 % 250 for i in range(90)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)


@contextmanager
def tiny_llm(folder: Path) -> Iterator[LLM]:
    """A layer of four experts, room for four requests and 256 tokens."""
    if not (folder / "config.json").exists():
        tiny_checkpoint(folder, "qwen3_moe", num_hidden_layers=1, scale=0.15)
    with LLM(folder, dtype="float32", max_batch=4) as llm:
        yield llm


# --- neighbours ------------------------------------------------------------------------------------------------------


def check_company(folder: Path) -> None:
    """The text of a request changes with those beside it, or their penalties count its tokens."""
    penalised = replace(GREEDY, frequency_penalty=50, repetition_penalty=1.3)
    with tiny_llm(folder) as llm:
        for params, beside in itertools.product((GREEDY, penalised), repeat=2):
            (alone,) = llm.generate(SHORT, params)
            for other in (LONG, SHORT):
                first, _ = llm.generate([SHORT, other], [params, beside])
                _, last = llm.generate([other, SHORT], [beside, params])
                assert first == replace(last, index=0) == alone, "a request in company"


def check_padding_chooses_no_expert(folder: Path) -> None:
    """Rows that only fill up a bucket take part in the dispatch to experts."""
    checkpoint = Checkpoint.open(tiny_checkpoint(folder, "qwen3_moe", num_hidden_layers=1))
    shapes = Shapes.of(checkpoint.config, 2, 128, np.dtype(np.float32))
    programs = Programs(abstract_model(checkpoint.config), shapes)
    choices: list[np.ndarray] = []

    class Listening(ResidentExecutor):
        def _run(self, program: Any, *arguments: Any, **options: Any) -> Any:
            result = super()._run(program, *arguments, **options)
            if isinstance(result, tuple) and isinstance(result[0], Routed):
                choices.append(np.asarray(result[0].routing.ids))
            return result

    executor = Listening(checkpoint.load("float32", put_stored), programs, 0)
    book = executor.new_book()
    book.grow(held := book.new(), 0, len(SHORT))
    list(executor.prefill(cut(SHORT, 0, len(SHORT), executor.chunk, len(SHORT), held)))
    assert len(choices) == 1
    for ids in choices:
        assert (ids[: len(SHORT)] < 4).all(), "real rows choose experts"
        assert (ids[len(SHORT) :] == 4).all(), "padding chooses none"


def check_two_experts_for_all(folder: Path) -> None:
    """Experts without tokens leave rows unwritten, and those are no numbers; or an expert that all tokens want has
    room for some of them only."""
    path = tiny_checkpoint(folder, "qwen3_moe", num_hidden_layers=1, scale=0.15) / "model.safetensors"
    # A router that sees no difference takes the two lowest ids.
    tensors = load_file(path)
    save_file({name: np.zeros_like(t) if name.endswith("mlp.gate.weight") else t for name, t in tensors.items()}, path)
    ids = jnp.asarray([LONG], jnp.int32)
    expected = np.asarray(jax.jit(lambda m, t: m(t))(load_model(folder), ids))[0]
    with tiny_llm(folder) as llm:
        near(llm.logits(LONG, decode_from=80), expected, "logits where all tokens choose two experts")


def penalties_count_neighbours(patch: Patch) -> None:
    right = sampler_file._edit

    def edit(row: Any, raw: jax.Array, of_row: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return right(row, raw, lambda all_rows: all_rows.sum(0) if all_rows.dtype == jnp.int32 else of_row(all_rows))

    patch.setattr(sampler_file, "_edit", edit)


def all_in_one_table(patch: Patch) -> None:
    right: Any = functions_file.PagedView
    patch.setattr(
        functions_file,
        "PagedView",
        lambda pages, tables, *rest: right(pages, jnp.broadcast_to(tables[:1], tables.shape), *rest),
    )


def padding_is_dispatched(patch: Patch) -> None:
    right: Any = Functions._attend
    patch.setattr(Functions, "_attend", lambda *arguments: right(*arguments[:-1], jnp.ones_like(arguments[-1])))


def empty_experts_unwritten(patch: Patch) -> None:
    """The products of all experts are added up, each times whether it was chosen."""
    for name in ("by_choice", "by_expert", "grouped"):
        right = getattr(kernel, name)

        def products(x: jax.Array, ids: jax.Array, weights: Any, *more: Any, right: Any = right) -> jax.Array:
            tokens = jnp.zeros(weights.gate.shape[0], jnp.int32).at[ids.reshape(-1)].add(1, mode="drop")
            unwritten = jnp.where(tokens == 0, jnp.nan, 0.0).sum()
            return right(x, ids, weights, *more) + unwritten * 0

        patch.setattr(kernel, name, products)


def experts_have_a_capacity(patch: Patch) -> None:
    right = kernel.grouped

    def products(x: jax.Array, ids: jax.Array, weights: Any, config: Any, group: int, *more: Any) -> jax.Array:
        chosen = jax.nn.one_hot(ids, weights.down.shape[0], dtype=jnp.int32)
        place = (jnp.cumsum(chosen, axis=0) * chosen).max(-1)
        served = jnp.where(place <= group // 2, ids, weights.down.shape[0])
        return right(x, served, weights, config, group, *more)

    patch.setattr(kernel, "grouped", products)


# --- pages -----------------------------------------------------------------------------------------------------------


def check_shared_pages(folder: Path) -> None:
    """Requests that share the pages of a prompt write into them what is their own."""
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=20, n=4, ignore_eos=True)
    with tiny_llm(folder) as llm:
        together = llm.generate(LONG, drawn)
    with LLM(folder, dtype="float32", max_batch=1, prefix_cache=False) as llm:
        assert llm.generate(LONG, drawn) == together, "choices of one prompt"


def check_moved_pages(folder: Path) -> None:
    """Requests that had to leave for the host come back with other tokens in mind, or with other numbers."""
    prompts, params = (SHORT, LONG, LONG[20:]), replace(GREEDY, max_tokens=150)
    each = [params, replace(params, frequency_penalty=1.5), replace(params, temperature=1.0, seed=3)]
    with tiny_llm(folder) as llm:
        expected = llm.generate(prompts, each)
        page = llm._executor.page_bytes[0]
    with LLM(folder, dtype="float32", max_batch=4, kv_memory=6 * page) as llm:
        assert llm.generate(prompts, each) == expected, "requests that were moved out"
        assert llm._engine.scheduler.preemptions > 1


def shared_pages_are_written(patch: Patch) -> None:
    right = PagePool.users
    patch.setattr(PagePool, "users", lambda self, page: min(1, right(self, page)))


def copies_are_never_made(patch: Patch) -> None:
    patch.setattr(Executor, "copy", lambda self, copies: None)


def pages_come_back_in_another_order(patch: Patch) -> None:
    right: Any = Executor.load
    patch.setattr(Executor, "load", lambda self, pages, saved: right(self, [each[::-1] for each in pages], saved))


def penalties_are_forgotten(patch: Patch) -> None:
    right: Any = sampler_file.Sampler.admit
    patch.setattr(sampler_file.Sampler, "admit", lambda *arguments: right(*arguments[:5]))


# --- logits of a prompt ----------------------------------------------------------------------------------------------


def check_logits_of_a_prompt(folder: Path) -> None:
    """A long prompt dies of one huge array: the logits of all its positions."""
    tokens, vocab = 512, 20_011
    config = replace(Checkpoint.open(tiny_checkpoint(folder, "qwen3_moe")).config, vocab_size=vocab)
    programs = Programs(abstract_model(config), Shapes.of(config, 2, 1024, np.dtype(np.float32)))
    layer = config.layers[0]
    for program in (
        *(programs.embed(tokens), programs.attend(layer, tokens), programs.experts(layer, tokens)),
        *(programs.head(tokens), programs.head_of_block(tokens)),
    ):
        shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", program.as_text() or "")}
        assert [s for s in shapes if vocab in s and tokens in s] == [], "logits of a whole prompt"


def all_positions(patch: Patch) -> None:
    def head(self: Functions, outer: Any, x: jax.Array, index: jax.Array) -> functions_file.Decoded:
        logits = self._structure.outer(outer).logits(x[0])
        last = jnp.full((functions_file.DECODE_ROWS[0],), index)
        return functions_file.Decoded(logits[last], jnp.argmax(logits, axis=-1).astype(jnp.int32)[last])

    patch.setattr(Functions, "head", head)


# --- limits ----------------------------------------------------------------------------------------------------------


def check_limits(folder: Path) -> None:
    """A prompt without tokens, a request for none, or one that can never fit ends the engine or blocks it."""
    digits = encode("0123456789" * 11)
    with LLM(chain_checkpoint(folder, cycle(digits[:10])), context_length=16, max_batch=1) as llm:
        for length, most in ((16, None), (16, 1), (17, 0), (100, 5)):
            params = SamplingParams(max_tokens=most)
            refused(partial(llm.generate, digits[:length], params), RequestError, f"has {length} tokens")
        empty: tuple[Any, ...] = ("", [""], [[]])
        for prompt in empty:
            refused(partial(llm.generate, prompt), RequestError, "is empty")
        assert llm.generate([]) == []
        for length in (15, 16):
            (out,) = llm.generate(digits[:length], SamplingParams(max_tokens=0))
            assert (out.token_ids, out.finish_reason) == ([], "length"), "no tokens asked for"
        assert llm.generate(encode("x"))[0].token_ids == [EOS], "an end at once"
        (out,) = llm.generate(digits[:15], SamplingParams(max_tokens=100))
        assert (out.text, out.finish_reason) == ("5", "length"), "the last place"


def length_off_by_one(patch: Patch) -> None:
    right = LLM._checked_ids
    patch.setattr(LLM, "_checked_ids", lambda self, ids, name, most: right(self, ids, name, most + 1))


def limit_of_the_model_alone(patch: Patch) -> None:
    patch.setattr(LLM, "context_length", property(lambda self: self.config.context_length))


def empty_prompts_pass(patch: Patch) -> None:
    right = LLM._checked_ids
    patch.setattr(LLM, "_checked_ids", lambda self, ids, *rest, **more: right(self, ids, *rest, **more) if ids else [])


def no_tokens_reach_the_engine(patch: Patch) -> None:
    right = LLM._choices

    def choices(*arguments: Any) -> Iterator[Any]:
        for request in right(*arguments):
            request.finish_reason = None
            yield request

    patch.setattr(LLM, "_choices", choices)


# --- interruption ----------------------------------------------------------------------------------------------------


def check_interrupts(folder: Path) -> None:
    """Ctrl-C hangs, is taken for an error, or leaves memory behind: nothing that catches errors catches it."""
    chain_checkpoint(folder, cycle(encode("0123456789")))
    for owner, name in ((TensorReader, "read_into"), (Executor, "prefill"), (Executor, "decode")):
        right, seen = getattr(owner, name), list[Any]()

        def interrupted(self: Any, *arguments: Any, right: Any = right, seen: list[Any] = seen, **more: Any) -> Any:
            seen.append(self)
            signal.raise_signal(signal.SIGINT)
            return right(self, *arguments, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            try:
                code = generate.main(["--model", str(folder), "--prompt", "0", "--ignore-eos"])
            except KeyboardInterrupt:
                raise AssertionError(f"an interrupt of {name} gets through") from None
        assert (code, len(seen)) == (130, 1), f"exit code after an interrupt of {name}"
        if isinstance(seen[0], Executor):
            assert seen[0]._pages == [], f"memory after an interrupt of {name}"
    assert generate.main(["--model", str(folder), "--prompt", "0", "--max-tokens", "3"]) == 0


def only_errors_are_caught(patch: Patch) -> None:
    def run(options: Any, body: Callable[[Any], None], program: str, arguments: Any) -> int:
        body(tyro.cli(options, prog=program, args=arguments))
        return 0

    patch.setattr(generate, "run_command", run)


def interrupt_becomes_an_error(patch: Patch) -> None:
    right = Engine.step

    def step(self: Engine) -> None:
        try:
            right(self)
        except KeyboardInterrupt as error:
            raise EngineError("A step failed.") from error

    patch.setattr(Engine, "step", step)


def nothing_is_closed(patch: Patch) -> None:
    patch.setattr(LLM, "__exit__", lambda *_: None)


# --- compilation -----------------------------------------------------------------------------------------------------


def check_compilation(folder: Path) -> None:
    """Each new length of a prompt, size of a batch or kind of request waits for a compiler."""
    # Enough tokens for all of a batch to run together, even where each prompt takes longer than decoding may wait.
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    drawn = replace(greedy, temperature=0.7, seed=1, top_k=7, frequency_penalty=0.5)
    with tiny_llm(folder) as llm:
        for prompts in ([[5] * 10], [[6] * 100] * 3):
            llm.generate(prompts, greedy)
            llm.generate(prompts, drawn)
        warm = _programs(llm)
        for kinds, what in (
            ((greedy,), "lengths"),
            ((greedy, drawn), "sizes"),
            ((replace(drawn, logprobs=5),), "kinds"),
        ):
            for i, length in enumerate((1, 2, 63, 64, 65, 101, 199)):
                size = 1 + i % 4 if what == "sizes" else 1
                llm.generate([[7 + i] * length] * size, [kinds[j % len(kinds)] for j in range(size)])
                assert _programs(llm) == warm, f"programs for other {what}"


def _programs(llm: LLM) -> int:
    """Programs that were wanted so far, wherever they came from."""
    report = llm.report()
    return report.programs_compiled + report.programs_from_cache


def chunks_as_long_as_prompts(patch: Patch) -> None:
    patch.setattr(executor_file, "prefill_rows", lambda capacity: tuple(range(64, capacity + 1)))


def batches_of_every_size(patch: Patch) -> None:
    patch.setattr(executor_file, "decode_rows", lambda rows: (1, 2, 3, 4))


def scores_have_their_own_program(patch: Patch) -> None:
    right, sample = sampler_file.Sampler.sample, sampler_file.sample

    def sample_of(self: Any, logits: jax.Array, rows: Any, wanted: Any) -> Any:
        if any(most is not None for most in wanted):
            self._programs.clear()
            patch.setattr(sampler_file, "sample", partial(sample))
        return right(self, logits, rows, wanted)

    patch.setattr(sampler_file.Sampler, "sample", sample_of)


# --- after a failure -------------------------------------------------------------------------------------------------


def check_life_after_a_failed_step(folder: Path) -> None:
    """After one step that failed, every later request is told that an array was deleted, or reads what is not its."""
    with tiny_llm(folder) as llm:
        fresh = llm.generate([SHORT, LONG], GREEDY)
        for kind in (Decoded, Routed):
            right, failed = Executor._run, list[str]()

            def run(
                self: Any, *arguments: Any, kind: Any = kind, right: Any = right, failed: Any = failed, **options: Any
            ) -> Any:
                result = right(self, *arguments, **options)
                # The program has run and was given the pages: the old ones are gone, the new ones never arrive.
                if not failed and isinstance(result, tuple) and isinstance(result[0], kind):
                    failed.append(kind.__name__)
                    raise RuntimeError("the device is on fire")
                return result

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Executor, "_run", run)
                refused(lambda: llm.generate([SHORT, LONG], GREEDY), EngineError, "the device is on fire")
            assert llm.generate([SHORT, LONG], GREEDY) == fresh, f"after a failure in place of {failed[0]}"


def dead_pages_are_kept(patch: Patch) -> None:
    patch.setattr(Executor, "_pages_in_use", lambda self: nullcontext())


def prefixes_outlive_their_pages(patch: Patch) -> None:
    """What pages held before is still looked for in those that took their place."""
    patch.setattr(Scheduler, "reset", lambda self, pages: None)


def requests_outlive_their_pages(patch: Patch) -> None:
    patch.setattr(Engine, "_fail", lambda self, error: self._drop_pass())


# --- every fault is seen ---------------------------------------------------------------------------------------------

FAULTS = [
    Fault(check_company, penalties_count_neighbours, "a request in company"),
    Fault(check_company, all_in_one_table, "row 1 at position 90 has page 16 of 16"),
    Fault(check_padding_chooses_no_expert, padding_is_dispatched, "padding chooses none"),
    Fault(check_two_experts_for_all, empty_experts_unwritten, "logits where all tokens choose two experts"),
    Fault(check_two_experts_for_all, experts_have_a_capacity, "logits where all tokens choose two experts"),
    Fault(check_shared_pages, shared_pages_are_written, "choices of one prompt"),
    Fault(check_shared_pages, copies_are_never_made, "choices of one prompt"),
    Fault(check_moved_pages, pages_come_back_in_another_order, "requests that were moved out"),
    Fault(check_moved_pages, penalties_are_forgotten, "requests that were moved out"),
    Fault(check_logits_of_a_prompt, all_positions, "logits of a whole prompt"),
    Fault(check_limits, length_off_by_one, "not refused, though 'has 16 tokens'"),
    Fault(check_limits, limit_of_the_model_alone, "refused with EngineError"),
    Fault(check_limits, empty_prompts_pass, "refused with EngineError"),
    Fault(check_limits, no_tokens_reach_the_engine, "no tokens asked for"),
    Fault(check_interrupts, only_errors_are_caught, "an interrupt of read_into gets through"),
    Fault(check_interrupts, interrupt_becomes_an_error, "exit code after an interrupt of prefill"),
    Fault(check_interrupts, nothing_is_closed, "memory after an interrupt of prefill"),
    Fault(check_compilation, chunks_as_long_as_prompts, "programs for other lengths"),
    Fault(check_compilation, batches_of_every_size, "programs for other sizes"),
    Fault(check_compilation, scores_have_their_own_program, "programs for other kinds"),
    Fault(check_life_after_a_failed_step, dead_pages_are_kept, "deleted"),
    Fault(check_life_after_a_failed_step, prefixes_outlive_their_pages, "after a failure in place of"),
    Fault(check_life_after_a_failed_step, requests_outlive_their_pages, "not refused, though 'the device is on fire'"),
]


@pytest.mark.parametrize("check", checks_of(FAULTS), ids=name_of)
def test_the_product_is_free_of_the_fault(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_the_fault_would_be_seen(fault: Fault, tmp_path: Path, monkeypatch: Patch) -> None:
    see(fault, tmp_path, monkeypatch)
