"""Fits a model into its memory before any weight is read: budgets in bytes, and the longest context they hold."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.checkpoint.load import Checkpoint, abstract_model
from novalm_jax.compat import available_ram, device_bytes
from novalm_jax.config import ModelConfig
from novalm_jax.engine.functions import DECODE_ROWS, KV_BLOCK, PREFILL_ROWS
from novalm_jax.engine.programs import Programs, Shapes, capacity_for, prefill_rows
from novalm_jax.engine.sampler import Sampler
from novalm_jax.engine.streamed_programs import DenseStreamedPrograms, StreamedPrograms
from novalm_jax.errors import OptionError
from novalm_jax.experts.dense import DensePlan, plan_dense
from novalm_jax.experts.fetcher import READERS
from novalm_jax.experts.memory_plan import MemoryPlan
from novalm_jax.experts.records import count_records, moe_layers
from novalm_jax.options import EngineOptions
from novalm_jax.units import format_size, parse_size

_log = logging.getLogger("novalm_jax")

AUTO_SHARE = 0.9
"""Part of the memory that is free at the start which "auto" takes; the rest is for everything else on the machine."""


ROOMY = 4096
"""Tokens of context that are worth more than experts on the device: below it, experts are streamed instead."""

CACHE_SHARE = 0.25
"""Part of the device's budget that the KV cache of a streamed model takes at most, where the context is ours to say."""

PASS_SHARE = 0.2
"""Part of what is left then which prefill chunks may take that share a pass over the experts."""

FEWEST_HOST_SLOTS = READERS + 2
"""A host tier has one slot for each reader, and some for what waits for its upload."""


@dataclass(frozen=True)
class Budgets:
    """Bytes that may be used on the device and in pinned host memory."""

    device: int
    host: int


@dataclass(frozen=True)
class Placement:
    """A model with room for it.

    Attributes:
      budgets: what may be used.
      plan: what takes what.
      context_length: tokens of a request.
      programs: those it was sized with; `StreamedPrograms` where experts are streamed.
      host_slots: expert records that pinned host memory holds.
      pass_chunks: prefill chunks that share a pass over streamed weights.
      dense: where dense weights are that do not all stay on the device; None where they do.
    """

    budgets: Budgets
    plan: MemoryPlan
    context_length: int
    programs: Programs
    host_slots: int = 0
    pass_chunks: int = 1
    dense: DensePlan | None = None

    @property
    def slots(self) -> int:
        """Experts that there is room for on the device, where they come and go; 0 where all of them stay."""
        return self.programs.slots if isinstance(self.programs, StreamedPrograms) else 0


def read_budgets(options: EngineOptions) -> Budgets:
    """What the options allow on this machine.

    On a CPU, device and host are one RAM: the host's "auto" is what the device's budget leaves of it.

    Raises:
      OptionError: not a size.
    """
    ram = available_ram()
    accelerator = device_bytes(jax.devices()[0])
    memory = ram if accelerator is None else accelerator
    device = _budget("device_memory", options.device_memory, memory)
    left = max(ram - device, 0) if accelerator is None else ram
    return Budgets(device, _budget("host_memory", options.host_memory, left))


def place(checkpoint: Checkpoint, options: EngineOptions) -> Placement:
    """Finds room for everything; where that is not there, for as many experts as can be, and streams the others.

    Programs are compiled for it from shapes alone, so that their workspace is known and not guessed.

    Raises:
      BudgetError: not even the shortest context fits (the one asked for, where a number was given).
      OptionError: `max_batch` or `context_length` is more than can be served.
    """
    budgets = read_budgets(options)
    config, name = checkpoint.config, checkpoint.folder.name
    wanted = _wanted_context(options, config.context_length, name)
    placement = _best(_Sizes(checkpoint, options), budgets, options, wanted)
    context = placement.context_length
    shortest = "the shortest context, " if options.context_length == "auto" else ""
    requests = "one request" if options.max_batch == 1 else f"{options.max_batch} requests"
    what = f"{name} in {options.dtype}, with {shortest}{context} tokens, for {requests} at a time"
    placement.plan.require(budgets.device, what, _advice(options, context))
    if placement.dense is not None and not placement.dense.in_turn:
        _log.warning("%s: the embedding has no room on the device; its rows are looked up on the host", name)
    elif placement.dense is not None:
        counts = len(placement.dense.in_turn), len(placement.dense.parts)
        _log.warning(
            "%s: %d of %d parts of the dense weights have no room on the device, and come in every step", name, *counts
        )
    if 0 < placement.slots < count_records(config):
        counts = placement.slots, count_records(config)
        _log.warning("%s: %d of %d experts have room in device_memory; the others come as needed", name, *counts)
        if placement.dense is not None and placement.dense.in_turn and options.prefetch != "off":
            _log.warning("prefetch: only of experts in layers whose dense weights stay on the device")
    elif options.link is not None and (placement.dense is None or not placement.dense.in_turn):
        _log.warning("link: without effect, as %s is on the device as a whole", name)
    if context < wanted:
        room = f" with a max_batch of {options.max_batch}" if options.max_batch > 1 else ""
        _log.warning("%s: the context is cut from %d to %d tokens to fit device_memory%s", name, wanted, context, room)
    return placement


def _best(sizes: _Sizes, budgets: Budgets, options: EngineOptions, wanted: int) -> Placement:
    """With dense weights on the device, if that fits and is allowed; else they are streamed, too. What fits in no way
    is given as it takes least."""
    if options.dense_weights == "stream":
        return _place_streamed(sizes, budgets, options, wanted, sizes.dense)
    placement = _with_dense(sizes, budgets, options, wanted)
    if placement.plan.fits(budgets.device) or options.dense_weights == "device":
        return placement
    streamed = _place_streamed(sizes, budgets, options, wanted, sizes.dense)
    return min(placement, streamed, key=lambda placement: placement.plan.device_bytes)


def _with_dense(sizes: _Sizes, budgets: Budgets, options: EngineOptions, wanted: int) -> Placement:
    """Resident, if that fits with a context of some length; else streamed, if that is better or at all possible."""
    streamed = None
    if sizes.records and sizes.least_held() > budgets.device:
        # The whole model is far too large: no need to compile it.
        streamed = _place_streamed(sizes, budgets, options, wanted)
        if streamed.plan.device_bytes <= max(budgets.device, sizes.least_held()):
            return streamed
    if options.context_length == "auto":
        context, programs, plan = sizes.longest(wanted, budgets.device)
    else:
        context, (programs, plan) = wanted, sizes.of(wanted)
    resident = Placement(budgets, plan, context, programs)
    if not sizes.records or (plan.fits(budgets.device) and context >= min(wanted, ROOMY)):
        return resident
    streamed = streamed or _place_streamed(sizes, budgets, options, wanted)
    if not plan.fits(budgets.device):
        return min(resident, streamed, key=lambda placement: placement.plan.device_bytes)
    return streamed if streamed.plan.fits(budgets.device) and streamed.context_length > context else resident


def _place_streamed(
    sizes: _Sizes, budgets: Budgets, options: EngineOptions, wanted: int, dense: DensePlan | None = None
) -> Placement:
    """As many slots as there is room for, beside a cache that takes a quarter of the memory at most, if that is for us
    to say. With a plan for dense weights, as many of its parts on the device as there is room for come first, as every
    token needs them."""
    device, few = budgets.device, sizes.fewest_slots
    context, programs, plan = _streamed_context(sizes, device, options, wanted, dense)
    spare = max(0, device - plan.device_bytes)
    chunks = programs.shapes.rows * -(-programs.shapes.capacity // prefill_rows(programs.shapes.capacity)[-1])
    pass_chunks = 1 + min(chunks - 1, int(PASS_SHARE * spare) // programs.chunk_bytes)
    spare -= (pass_chunks - 1) * programs.chunk_bytes
    if dense is not None:
        least = dense.device_bytes
        dense = dense.keep(spare).hold(budgets.host)
        spare -= dense.device_bytes - least
    slots = min(sizes.records, few + spare // programs.record_bytes) if few else 0
    programs, plan = sizes.streamed(context, slots, pass_chunks, dense)
    while not plan.fits(device) and (slots, pass_chunks) != (few, 1):
        # Programs may take more workspace for more slots than for few.
        if slots > few:
            slots = max(few, slots - 1 - (plan.device_bytes - device) // programs.record_bytes)
        else:
            pass_chunks = 1
        programs, plan = sizes.streamed(context, slots, pass_chunks, dense)
    host = _host_slots(sizes, programs, budgets.host - (dense.host_bytes if dense else 0))
    return Placement(budgets, plan, context, programs, host, pass_chunks, dense)


def _streamed_context(
    sizes: _Sizes, device: int, options: EngineOptions, wanted: int, dense: DensePlan | None
) -> tuple[int, StreamedPrograms, MemoryPlan]:
    """A context with which the fewest slots fit, if there is one, and what they take."""
    context, few = wanted, sizes.fewest_slots
    if options.context_length != "auto":
        return context, *sizes.streamed(context, few, 1, dense)
    while context > KV_BLOCK and not sizes.leaves_room(context, device, dense):
        context = max(context // 2, KV_BLOCK)
    programs, plan = sizes.streamed(context, few, 1, dense)
    while context > KV_BLOCK and not plan.fits(device):
        context = max(context // 2, KV_BLOCK)
        programs, plan = sizes.streamed(context, few, 1, dense)
    if plan.fits(device):
        return context, programs, plan
    # One block can take more than two: XLA copies a cache that is sliced whole.
    other = min(wanted, 2 * KV_BLOCK)
    found = (context, programs, plan), (other, *sizes.streamed(other, few, 1, dense))
    return min(found, key=lambda found: found[2].device_bytes)


def _host_slots(sizes: _Sizes, programs: StreamedPrograms, room: int) -> int:
    """Expert records that host memory holds."""
    if not sizes.records:
        return 0
    host = min(sizes.records, room // programs.record_bytes)
    if 0 < room and host < min(FEWEST_HOST_SLOTS, sizes.records):
        _log.warning(
            "host_memory: %s holds fewer than %d experts, so that there is no host tier",
            *(format_size(room), FEWEST_HOST_SLOTS),
        )
        host = 0
    return host


class _Sizes:
    """Programs and memory of one checkpoint, by context length.

    Attributes:
      records: expert records of the model.
      fewest_slots: slots that a streamed model has at least: what one token chooses in a layer.
    """

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions):
        self._model = abstract_model(checkpoint.config, options.dtype)
        self._dtype = np.dtype(jnp.dtype(options.dtype))
        self._rows = options.max_batch
        self._made: dict[int, Programs] = {}
        self.records = count_records(checkpoint.config)
        self.fewest_slots = _fewest_slots(checkpoint.config)
        self._sampler_bytes = Sampler(options.max_batch, checkpoint.config.vocab_size).nbytes

    @cached_property
    def dense(self) -> DensePlan:
        """The parts of its dense weights, as they take least of the device."""
        return plan_dense(self._model).leanest()

    def of(self, context: int) -> tuple[Programs, MemoryPlan]:
        """The programs for `context` tokens, the largest of them compiled, and what a step takes at its peak."""
        programs = self._programs(context)
        return programs, MemoryPlan({**self._held(programs), "workspace": programs.workspace_bytes()})

    def least_held(self) -> int:
        """What the resident model takes always, whatever its programs take besides."""
        return sum(self._held(self._programs(KV_BLOCK)).values())

    def leaves_room(self, context: int, budget: int, dense: DensePlan | None) -> bool:
        """Whether a streamed model with this context may fit, and its cache takes no more than its share."""
        held = self._held(self._programs(context))
        elsewhere = held["experts"] + (held["dense weights"] if dense else 0)
        return held["KV cache"] <= CACHE_SHARE * budget and sum(held.values()) - elsewhere <= budget

    def streamed(
        self, context: int, slots: int, pass_chunks: int, dense: DensePlan | None
    ) -> tuple[StreamedPrograms, MemoryPlan]:
        """As `of`, with so many experts on the device, and so many prefill chunks side by side; with a plan for dense
        weights, these where it says."""
        shapes = self._shapes(context)
        if dense is None:
            programs = StreamedPrograms(self._model, shapes, slots)
            held = self._held(programs)
        else:
            programs = DenseStreamedPrograms(self._model, shapes, slots, dense)
            held = self._held(programs)
            held["dense weights"] += dense.kept_bytes
            held["dense weights under way"] = dense.under_way_bytes
        chunks = (pass_chunks - 1) * programs.chunk_bytes
        return programs, MemoryPlan({**held, "prefill chunks": chunks, "workspace": programs.workspace_bytes()})

    def longest(self, wanted: int, budget: int) -> tuple[int, Programs, MemoryPlan]:
        """As `of`, for the longest context up to `wanted` that stays within `budget`; else for the one that takes the
        least."""
        first = self._programs(wanted)
        cache_of_block = first.cache_bytes // (first.shapes.capacity // KV_BLOCK)
        always = sum(self._held(first).values()) - first.cache_bytes
        # Below the largest chunk, prefill takes smaller ones and a fraction of the workspace: a range of its own.
        for longest in dict.fromkeys((wanted, min(wanted, PREFILL_ROWS[-1] - KV_BLOCK))):
            context, workspace = longest, 0
            while (context := min(context, _that_fits(budget - workspace - always, cache_of_block))) > 0:
                programs, plan = self.of(context)
                if plan.fits(budget):
                    return context, programs, plan
                workspace = plan.parts["workspace"]
                context -= KV_BLOCK
        # One block can take more than two: XLA copies a cache that is sliced whole.
        shortest = dict.fromkeys(min(wanted, KV_BLOCK * blocks) for blocks in (1, 2))
        return min(((context, *self.of(context)) for context in shortest), key=lambda found: found[2].device_bytes)

    def _programs(self, context: int) -> Programs:
        """Made once for each capacity: that takes the whole model apart."""
        shapes = self._shapes(context)
        if shapes.capacity not in self._made:
            self._made[shapes.capacity] = Programs(self._model, shapes)
        return self._made[shapes.capacity]

    def _shapes(self, context: int) -> Shapes:
        return Shapes(self._rows, capacity_for(context), self._dtype)

    def _held(self, programs: Programs) -> dict[str, int]:
        return {
            **programs.weight_bytes,
            "KV cache": programs.cache_bytes,
            "sampler": self._sampler_bytes,
            "prompt that waits": programs.paused_bytes,
        }


def _fewest_slots(config: ModelConfig) -> int:
    return max((moe.experts_per_token for moe in moe_layers(config).values()), default=0)


def _that_fits(memory: int, cache_of_block: int) -> int:
    """Tokens of context whose cache fits in `memory`, where each block of positions takes `cache_of_block` bytes."""
    positions = max(memory, 0) // cache_of_block * KV_BLOCK
    return positions if positions <= PREFILL_ROWS[-1] else positions // PREFILL_ROWS[-1] * PREFILL_ROWS[-1]


def _advice(options: EngineOptions, context: int) -> list[str]:
    """What would take less memory than these options with this context do."""
    advice = ["more device_memory"]
    if context > KV_BLOCK:
        advice.append("a shorter context_length")
    if options.max_batch > 1:
        advice.append("a smaller max_batch")
    if options.dtype == "float32":
        advice.append("dtype bfloat16")
    if options.dense_weights == "device":
        advice.append("dense_weights auto, which streams them")
    return advice


def _wanted_context(options: EngineOptions, longest: int, name: str) -> int:
    if options.max_batch > DECODE_ROWS[-1]:
        raise OptionError(f"max_batch: {options.max_batch} is more than {DECODE_ROWS[-1]}, the most that run together.")
    if isinstance(options.context_length, str):
        return longest
    if options.context_length > longest:
        raise OptionError(
            f"context_length: {name} was made for {longest} tokens, and {options.context_length} are asked for. Give "
            "at most the model's own."
        )
    return options.context_length


def _budget(name: str, size: str | int, memory: int) -> int:
    if size == "auto":
        return int(memory * AUTO_SHARE)
    asked = parse_size(size, total=memory, name=name)
    if asked > memory:
        _log.warning("%s: %s is more than the %s there is, which is the budget then", name, size, format_size(memory))
    return min(asked, memory)
