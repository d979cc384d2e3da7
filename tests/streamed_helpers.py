"""Streamed models of a chosen number of slots, what they are asked, and what a run must have moved."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from novalm_jax import LLM, SamplingParams
from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.checkpoint.mapping import Assignment, is_expert
from novalm_jax.compat import compile_program
from novalm_jax.engine import sampler as sampler_module
from novalm_jax.engine import streamed_programs as programs_module
from novalm_jax.engine.estimate import Estimated
from novalm_jax.engine.fitting import KV_HOST_SHARE
from novalm_jax.engine.placement import Placement, place
from novalm_jax.engine.programs import Programs
from novalm_jax.engine.streamed import StreamedExecutor
from novalm_jax.engine.streamed_programs import StreamedPrograms
from novalm_jax.errors import BudgetError
from novalm_jax.experts.governor import Governor
from novalm_jax.experts.pools import compile_insert, compile_new
from novalm_jax.experts.records import moe_layers
from novalm_jax.experts.streamer import Streamer
from novalm_jax.kv.pages import blocks
from novalm_jax.options import EngineOptions

# --- models ----------------------------------------------------------------------------------------------------------


def least_bytes(folder: Path | None, **options: Any) -> int:
    """The smallest budget that a model runs with; dense weights are on the device, unless told otherwise."""
    with pytest.raises(BudgetError) as caught:
        _placed(folder, 1000, options)
    assert caught.value.least_bytes is not None
    return caught.value.least_bytes


def placed_with(folder: Path | None, slots: int, **options: Any) -> Placement:
    """The model with as many experts on the device, and pages as options say (`for_requests`); its budget is what that
    takes."""
    pages = options["kv_memory"] - for_requests(1, folder, **options)["kv_memory"]
    placement = _placed(folder, least_bytes(folder, **options) + pages, options)
    while placement.slots != slots:
        assert placement.slots < slots, f"{placement.slots} slots, not {slots}"
        # Some of what is spare goes to chunks of a prompt that share a pass.
        missing = (slots - placement.slots) * record_bytes(placement)
        placement = _placed(folder, placement.budgets.device + missing, options)
    return placement


def record_bytes(placement: Placement) -> int:
    """Bytes of an expert record of a model that is known to be streamed."""
    assert isinstance(placement.programs, StreamedPrograms)
    return placement.programs.record_bytes


def _placed(folder: Path | None, memory: int, options: dict[str, Any]) -> Placement:
    return place(Checkpoint.open(folder), EngineOptions(**{"dense_weights": "device", **options}, device_memory=memory))


def for_requests(count: int, folder: Path | None, **options: Any) -> dict[str, Any]:
    """These options, and pages for so many requests at a time and no more: all other memory is for experts."""
    asked = EngineOptions(**{name: options[name] for name in ("dtype", "max_batch", "context_length")})
    context = asked.context_length
    assert isinstance(context, int)
    sizes = Estimated(Checkpoint.open(folder).config, asked)
    return {**options, "kv_memory": sizes.kv_bytes(context, count * blocks(context))}


def host_room(records: int, size: int, pages: float = math.inf) -> int:
    """Host memory for so many records, beside what is kept for pages of requests that wait, at most so many bytes."""
    return math.ceil(min(records * size / (1 - KV_HOST_SHARE), records * size + pages))


def with_slots(folder: Path, slots: int, requests: int = 1, **options: Any) -> LLM:
    """As `placed_with`, with pages for so many requests at a time, ready to run."""
    options = for_requests(requests, folder, **{"dtype": EngineOptions.dtype, **options})
    asked = {name: options[name] for name in sorted(options) if name not in ("host_memory", "prefetch", "policy")}
    return LLM(folder, device_memory=_memory_for(folder, slots, tuple(asked.items())), **options)


@functools.cache
def _memory_for(folder: Path, slots: int, options: tuple[tuple[str, Any], ...]) -> int:
    return placed_with(folder, slots, **dict(options)).budgets.device


def executor_of(llm: LLM) -> StreamedExecutor:
    """The executor of a model that is known to be streamed."""
    executor = llm._executor
    assert isinstance(executor, StreamedExecutor)
    return executor


def set_pass_chunks(llm: LLM, count: int) -> None:
    """Lets so many chunks of prompts share a pass over the experts."""
    scheduler = llm._engine.scheduler
    executor_of(llm).pass_chunks = count
    scheduler._limits = replace(scheduler._limits, pass_chunks=count)


def deeper(checkpoint: Checkpoint, sparse: int) -> Checkpoint:
    """The model with its layers with experts again behind the others, until there are as many of them.

    Experts of a layer that comes again have other numbers there, so that no two records of the same number are alike.
    """
    numbers = list(moe_layers(checkpoint.config))
    layers, assignments = list(checkpoint.config.layers), list(checkpoint.weights.assignments)
    for turn, number in enumerate(itertools.islice(itertools.cycle(numbers), max(0, sparse - len(numbers))), 1):
        for assignment in checkpoint.weights.assignments:
            if assignment.path.startswith(f"layers.{number}."):
                path = assignment.path.replace(f".{number}.", f".{len(layers)}.", 1)
                turned = _turned(assignment, turn) if is_expert(path) else assignment
                assignments.append(replace(turned, path=path))
        layers.append(checkpoint.config.layers[number])
    return replace(
        checkpoint,
        config=replace(checkpoint.config, layers=tuple(layers)),
        weights=replace(checkpoint.weights, assignments=tuple(assignments)),
    )


def _turned(assignment: Assignment, by: int) -> Assignment:
    """Row i is what row i + `by` was."""
    rows = assignment.shape[0]
    pieces = (replace(assignment.row((row + by) % rows).pieces[0], row=row) for row in range(rows))
    return replace(assignment, pieces=tuple(pieces))


@contextmanager
def shared_programs() -> Iterator[dict[Any, Any]]:
    """Models that are opened in here take over programs of those before, as far as they are the same ones: tracing
    them anew takes nearly all of the time that a tiny model takes. Gives what is kept, to be cleared."""
    known: dict[Any, tuple[jax.stages.Compiled, int]] = {}
    get = Programs._get

    def shared(self: Programs, key: Any, function: Any, held: Any, live: Any, donate: Any = ()) -> jax.stages.Compiled:
        if key not in self._compiled:
            same = (
                self.config,
                key,
                self.shapes.kernels,
                *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((held, live))),
            )
            if same not in known:
                known[same] = get(self, key, function, held, live, donate), self._workspace[key]
            self._compiled[key], self._workspace[key] = known[same]
        return self._compiled[key]

    drawing: dict[Any, jax.stages.Compiled] = {}

    def shared_sampler(function: Any, arguments: Any, **options: Any) -> jax.stages.Compiled:
        same = function, *((np.shape(leaf), leaf.dtype) for leaf in jax.tree.leaves(arguments))
        if same not in drawing:
            drawing[same] = compile_program(function, arguments, **options)
        return drawing[same]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "_get", shared)
        patch.setattr(sampler_module, "compile_program", shared_sampler)
        patch.setattr(programs_module, "compile_insert", functools.cache(compile_insert))
        patch.setattr(programs_module, "compile_new", functools.cache(compile_new))
        yield known


def wait_for_prefetches(patch: pytest.MonkeyPatch) -> None:
    """Every step prefetches, and of the records that are fetched ahead for a layer, one at least is there when the
    layer comes: a slow machine must not decide whether a test sees a prefetch that helped."""
    waves = Streamer.waves

    def waited(self: Streamer, *arguments: Any, **others: Any) -> Iterator[np.ndarray]:
        self._fetcher.arrived(self._ahead.values(), wait=True)
        return waves(self, *arguments, **others)

    patch.setattr(Streamer, "waves", waited)
    patch.setattr(Governor, "took", lambda self, seconds: None)


# --- what they are asked ---------------------------------------------------------------------------------------------


class Questions(NamedTuple):
    """What a model is asked: the logits of `ids`, once as a prompt, once from token `decode_from` on step by step; and
    the greedy continuations of `prompts`, which run together, `tokens` long."""

    ids: list[int]
    decode_from: int
    prompts: list[Any]
    tokens: int

    def ask(self, llm: LLM) -> Answers:
        """Asks."""
        texts = llm.generate(self.prompts, SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True))
        said = [(text.token_ids, text.text) for text in texts]
        return Answers(said, llm.logits(self.ids), llm.logits(self.ids, decode_from=self.decode_from))


class Answers(NamedTuple):
    """What `Questions` found."""

    texts: list[tuple[Sequence[int], str]]
    whole: np.ndarray
    steps: np.ndarray


def assert_same(found: Answers, expected: Answers) -> None:
    """Fails unless these are the same bits."""
    assert found.texts == expected.texts
    assert found.whole.tobytes() == expected.whole.tobytes()
    assert found.steps.tobytes() == expected.steps.tobytes()


def assert_it_streamed(llm: LLM, prefetched: bool) -> None:
    """Misses, evictions and uploads there were, and they agree; prefetches that helped, or no prefetch at all."""
    report = llm.report()
    assert report.expert_misses > 0 and report.evictions > 0 and report.uploads > 0
    assert report.bytes_uploaded == report.uploads * executor_of(llm).programs.record_bytes
    if prefetched:
        assert report.prefetch_hits > 0
        assert report.uploads >= report.expert_misses + report.prefetch_hits
    else:
        assert report.prefetch_hits == report.prefetch_wasted == 0
        assert report.uploads == report.expert_misses
    assert report.policy == llm.options.policy
    assert report.experts_on_device == executor_of(llm).programs.slots


def assert_nothing_is_held(llm: LLM) -> None:
    """All rows and pages are free."""
    engine = llm._engine
    assert [one for one in engine._requests if one.row is not None or one.held or one.moved] == []
    assert [pool.in_use for pool in engine.scheduler.pages.pools] == [0] * len(engine.scheduler.pages.pools)


def assert_threads_end_with(make: Callable[[], LLM]) -> None:
    """Fails unless a model has threads, which end once it is dropped and nobody closed it."""
    threads = set(threading.enumerate())
    llm = make()
    assert set(threading.enumerate()) > threads
    del llm
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    assert set(threading.enumerate()) == threads
