"""Memory of an `LLM`: options, budgets and the context they hold, the report, and what is left after closing."""

from __future__ import annotations

import gc
import json
import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from novalm_jax import LLM, SamplingParams, load_model
from novalm_jax.checkpoint.files import TensorReader, list_tensors
from novalm_jax.compat import program_bytes
from novalm_jax.engine.executor import Executor
from novalm_jax.errors import BudgetError, CheckpointError, EngineError, OptionError, RequestError
from tiny_checkpoints import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("shared")

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A Mixtral of random weights."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "mixtral")


# --- options and budgets ---------------------------------------------------------------------------------------------


def test_unknown_options_are_named_with_those_that_exist(tiny):
    unknown: dict[str, Any] = {"device_memroy": "8GiB", "zeal": 3}
    with pytest.raises(OptionError, match=r"no option device_memroy, zeal; there are: device_memory, .*max_batch"):
        LLM(tiny, **unknown)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device_memory": "much"}, "device_memory"),
        ({"host_memory": -1}, "host_memory"),
        ({"dtype": "int8"}, "dtype"),
        ({"max_batch": 10**6}, "max_batch"),
        ({"context_length": 257}, "made for 256 tokens, and 257 are asked for"),
    ],
)
def test_options_that_cannot_be_served_are_refused(tiny, options: dict[str, Any], says):
    with pytest.raises(OptionError, match=says):
        LLM(tiny, **options)


def _least(folder: Path, **options: Any) -> BudgetError:
    with pytest.raises(BudgetError) as caught:
        LLM(folder, device_memory=1000, **options)
    return caught.value


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The names of the tensors that are read, in order."""
    names: list[str] = []
    read_into = TensorReader.read_into

    def counted(self: TensorReader, tensor: Any, *args: Any, **kwargs: Any) -> None:
        names.append(tensor.name)
        read_into(self, tensor, *args, **kwargs)

    monkeypatch.setattr(TensorReader, "read_into", counted)
    return names


@pytest.mark.parametrize("options", [{}, {"context_length": 256, "dtype": "float32"}, {"max_batch": 1}])
def test_the_least_budget_works_and_one_byte_less_is_refused_unread(tiny, options: dict[str, Any], reads):
    refusal = _least(tiny, **options)
    assert sum(refusal.table.values()) == refusal.least_bytes
    assert {"dense weights", "expert slots", "KV cache", "workspace"} <= set(refusal.table)
    assert str(refusal.least_bytes) in str(refusal) and "device_memory allows 1000 " in str(refusal)
    with pytest.raises(BudgetError):
        LLM(tiny, device_memory=refusal.least_bytes - 1, **options)
    assert reads == []
    with LLM(tiny, device_memory=refusal.least_bytes, **options) as llm:
        assert len(llm.generate("hi", GREEDY)[0].token_ids) == 8
        assert llm.report().device_peak_bytes <= refusal.least_bytes
    assert reads


@pytest.mark.parametrize(("room", "least", "most"), [(80_000, 256, 384), (3_000_000, 1024, 8000)])
def test_the_context_is_cut_to_what_the_budget_holds_and_said_so(tmp_path, caplog, room, least, most):
    """In both ranges: with small prefill chunks, and with large ones that need far more workspace."""
    folder = tiny_checkpoint(tmp_path, "llama", max_position_embeddings=8192)
    options: dict[str, Any] = {"max_batch": 1, "dtype": "float32", "dense_weights": "device"}
    budget = _least(folder, **options).least_bytes + room
    caplog.clear()
    with LLM(folder, device_memory=budget, **options) as llm:
        context = llm.context_length
        assert least <= context <= most
        assert f"the context is cut from 8192 to {context} tokens" in caplog.text
        assert llm.report().device_peak_bytes <= budget
        assert llm.report().context_length == context
        prompt = [5 + i % 200 for i in range(context - 9)]
        (out,) = llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True))
        assert (len(out.token_ids), out.finish_reason) == (9, "length")
        expected = np.asarray(load_model(folder)(jnp.asarray([[*prompt, *out.token_ids]], jnp.int32)))[0]
        assert list(out.token_ids) == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        with pytest.raises(RequestError, match=f"at most {context - 1} fit"):
            llm.generate([[5] * context], GREEDY)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_step_takes_more_than_the_plan_says(tmp_path, monkeypatch, dtype):
    """Live arrays at every launch, and what the program takes besides: of long prompts and of all their logits."""
    folder = tiny_checkpoint(tmp_path / "model", vocab_size=1024, max_position_embeddings=2048)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    peaks = []
    launch = Executor._run

    def measured(self: Executor, program: Any, *arguments: Any, **options: Any) -> Any:
        live = sum(array.nbytes for array in jax.live_arrays()) - before
        peaks.append(live + sum(program_bytes(program)))
        return launch(self, program, *arguments, **options)

    monkeypatch.setattr(Executor, "_run", measured)
    prompts = [np.random.default_rng(seed).integers(0, 1024, length).tolist() for seed, length in enumerate((1400, 30))]
    with LLM(folder, dtype=dtype, max_batch=2) as llm:
        llm.generate(prompts, [GREEDY, SamplingParams(max_tokens=8, temperature=1.0, seed=1)])
        llm.logits(prompts[0], decode_from=1300)
        planned = llm.report().device_peak_bytes
    assert len(peaks) > 100
    assert 0.8 * planned < max(peaks) <= planned


def test_pages_that_make_room_take_no_more_memory_while_they_are_on_their_way(tmp_path, monkeypatch):
    """Of a request with more pages than are moved at a time, whatever was moved before is gone."""
    folder = tiny_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    prompt = [5 + i * i % 200 for i in range(1400)]
    live: dict[str, list[int]] = {}
    launch = Executor._run

    def measured(self: Executor, program: Any, *arguments: Any, **options: Any) -> Any:
        name, _ = self._programs.name_of(program)
        live.setdefault(name, []).append(sum(array.nbytes for array in jax.live_arrays()))
        return launch(self, program, *arguments, **options)

    with LLM(folder, max_batch=2) as llm:
        kv = 34 * llm._executor.page_bytes[0]
        expected = llm.logits(prompt)
    monkeypatch.setattr(Executor, "_run", measured)
    with LLM(folder, max_batch=2, kv_memory=kv) as llm:
        stream = llm.stream(prompt, GREEDY)
        next(stream)
        assert np.array_equal(llm.logits(prompt), expected)
        list(stream)
        assert stream.completion.token_ids == llm.generate([prompt], GREEDY)[0].token_ids
        assert llm._engine.scheduler.preemptions == 1
    assert len(live["save pages"]) == len(live["load pages"]) == 3
    assert len(set(live["save pages"])) == len(set(live["load pages"])) == 1


def test_a_context_that_fits_is_not_cut(tiny, caplog):
    with LLM(tiny, max_batch=1) as llm:
        assert llm.context_length == 256
    assert "cut" not in caplog.text


def test_a_budget_above_the_memory_there_is_says_so(tiny, caplog):
    with LLM(tiny, max_batch=1, device_memory="1000TiB") as llm:
        assert llm.report().device_budget_bytes < 2**50
    assert "device_memory: 1000TiB is more than" in caplog.text


def test_the_two_memories_of_a_cpu_are_one(tiny):
    with LLM(tiny, max_batch=1) as llm:
        report = llm.report()
    assert report.device_budget_bytes + report.host_budget_bytes <= psutil.virtual_memory().total


# --- report ----------------------------------------------------------------------------------------------------------

PROMISED = """
    device_budget_bytes device_peak_bytes host_budget_bytes host_bytes disk_bytes_read experts_on_device experts_on_host
    experts_on_disk expert_hits expert_misses prefetch_hits prefetch_wasted uploads bytes_uploaded evictions
    stall_seconds compute_seconds prompt_tokens generated_tokens programs_compiled policy kernels
""".split()


def test_the_report_has_every_figure_it_promises(tiny):
    with LLM(tiny, max_batch=1) as llm:
        llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True, n=2))
        report = llm.report()
    figures = report.to_dict()
    assert set(PROMISED) <= set(figures)
    json.dumps(figures)
    assert (figures["prompt_tokens"], figures["generated_tokens"]) == (6, 8)
    assert (figures["experts_on_device"], figures["experts_on_host"], figures["experts_on_disk"]) == (8, 0, 0)
    # The cache of programs has some, where another test came first.
    assert figures["programs_compiled"] + figures["programs_from_cache"] > 0 and figures["compute_seconds"] > 0
    assert figures["disk_bytes_read"] == sum(tensor.nbytes for tensor in list_tensors(tiny).values())
    text, html = str(report), report._repr_html_()
    for name in ("device peak", "experts on device", "generated tokens", "kernel: decode steps"):
        assert re.search(rf"^{name} +\S", text, re.MULTILINE)
        assert f"<th>{name}</th>" in html
    assert html.startswith("<table>") and html.endswith("</table>")


# --- the end ---------------------------------------------------------------------------------------------------------


def test_closing_frees_the_memory_and_refuses_further_work(tiny):
    gc.collect()
    before, threads = {id(array) for array in jax.live_arrays()}, threading.enumerate()
    llm = LLM(tiny, max_batch=2)
    stream = llm.stream("hi", SamplingParams(ignore_eos=True, seed=1))
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed before this request had ended"):
        "".join(stream)
    assert stream.completion.finish_reason == "abort"
    gc.collect()
    assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []
    assert threading.enumerate() == threads
    uses = (
        lambda: llm.generate("hi"),
        lambda: llm.stream("hi"),
        lambda: llm.streams(["hi"]),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.logits([1, 2]),
    )
    for use in uses:
        with pytest.raises(EngineError, match="closed"):
            use()
    assert llm.report().generated_tokens > 0


def test_a_context_manager_closes_also_when_something_fails(tiny):
    with pytest.raises(ZeroDivisionError), LLM(tiny, max_batch=1) as llm:
        raise ZeroDivisionError
    with pytest.raises(EngineError, match="closed"):
        llm.generate("hi")


def test_without_a_model_of_its_own_the_package_says_what_to_give(monkeypatch, tmp_path):
    monkeypatch.setattr("novalm_jax.resources.resource_folder", lambda name: tmp_path / name)
    with pytest.raises(CheckpointError, match=r"carries no model of its own\. Give the folder"):
        LLM(None)
