"""Fits a model into its memory before any weight is read: budgets in bytes, and the longest context they hold."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.checkpoint.load import Checkpoint, abstract_model
from novalm_jax.compat import available_ram, device_bytes
from novalm_jax.engine.programs import DECODE_ROWS, KV_BLOCK, PREFILL_ROWS, Programs, Shapes, capacity_for
from novalm_jax.engine.sampler import Sampler
from novalm_jax.errors import OptionError
from novalm_jax.experts.memory_plan import MemoryPlan
from novalm_jax.options import EngineOptions
from novalm_jax.units import format_size, parse_size

_log = logging.getLogger("novalm_jax")

AUTO_SHARE = 0.9
"""Part of the memory that is free at the start which "auto" takes; the rest is for everything else on the machine."""


@dataclass(frozen=True)
class Budgets:
    """Bytes that may be used on the device and in pinned host memory."""

    device: int
    host: int


@dataclass(frozen=True)
class Placement:
    """A model with room for it: budgets, what takes what, the context in tokens, and the programs it was sized with."""

    budgets: Budgets
    plan: MemoryPlan
    context_length: int
    programs: Programs


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
    """Finds the longest context up to the one asked for whose peak stays within the budget.

    Programs are compiled for it from shapes alone, so that their workspace is known and not guessed.

    Raises:
      BudgetError: not even the shortest context fits (the one asked for, where a number was given).
      OptionError: `max_batch` or `context_length` is more than can be served.
    """
    budgets = read_budgets(options)
    config, name = checkpoint.config, checkpoint.folder.name
    wanted = _wanted_context(options, config.context_length, name)
    sizes = _Sizes(checkpoint, options)
    if options.context_length == "auto":
        context, programs, plan = sizes.longest(wanted, budgets.device)
    else:
        context, (programs, plan) = wanted, sizes.of(wanted)
    shortest = "the shortest context, " if options.context_length == "auto" else ""
    requests = "one request" if options.max_batch == 1 else f"{options.max_batch} requests"
    what = f"{name} in {options.dtype}, with {shortest}{context} tokens, for {requests} at a time"
    plan.require(budgets.device, what, _advice(options, context))
    if context < wanted:
        _log.warning("%s: the context is cut from %d to %d tokens to fit device_memory", name, wanted, context)
    return Placement(budgets, plan, context, programs)


class _Sizes:
    """Programs and memory of one checkpoint, by context length."""

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions):
        self._model = abstract_model(checkpoint.config, options.dtype)
        self._dtype = np.dtype(jnp.dtype(options.dtype))
        self._rows = options.max_batch
        self._made: dict[int, Programs] = {}
        self._sampler_bytes = Sampler(options.max_batch, checkpoint.config.vocab_size).nbytes

    def of(self, context: int) -> tuple[Programs, MemoryPlan]:
        """The programs for `context` tokens, the largest of them compiled, and what a step takes at its peak."""
        programs = self._programs(context)
        return programs, MemoryPlan({**self._held(programs), "workspace": programs.workspace_bytes()})

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
        capacity = capacity_for(context)
        if capacity not in self._made:
            self._made[capacity] = Programs(self._model, Shapes(self._rows, capacity, self._dtype))
        return self._made[capacity]

    def _held(self, programs: Programs) -> dict[str, int]:
        return {**programs.weight_bytes, "KV cache": programs.cache_bytes, "sampler": self._sampler_bytes}


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
