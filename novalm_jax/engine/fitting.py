"""Which parts of a model lie where, and the longest context beside them, for budgets in bytes.

One algorithm, whatever says how much the parts take: compiled programs (`placement`) or formulas (`estimate`). Nothing
is compiled or read here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from novalm_jax.checkpoint.load import abstract_model
from novalm_jax.config import ModelConfig
from novalm_jax.engine.functions import DECODE_ROWS, KV_BLOCK, PREFILL_ROWS
from novalm_jax.engine.programs import Shapes, capacity_for, prefill_rows
from novalm_jax.errors import OptionError
from novalm_jax.experts.dense import DensePlan, plan_dense
from novalm_jax.experts.fetcher import READERS
from novalm_jax.experts.memory_plan import MemoryPlan
from novalm_jax.experts.records import count_records, moe_layers, record_layout
from novalm_jax.kernels.storage import tree_bytes
from novalm_jax.models.decoder import Decoder
from novalm_jax.options import EngineOptions
from novalm_jax.units import format_size

_log = logging.getLogger("novalm_jax")

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
class Fit:
    """What lies where.

    Attributes:
      plan: what takes what of device memory; it may be more than there is, and is the least then.
      context_length: tokens of a request.
      slots: experts that there is room for on the device, where they come and go; 0 where all of them stay.
      host_slots: expert records that pinned host memory holds.
      pass_chunks: prefill chunks that share a pass over streamed weights.
      dense: where dense weights are that do not all stay on the device; None where they do.
    """

    plan: MemoryPlan
    context_length: int
    slots: int = 0
    host_slots: int = 0
    pass_chunks: int = 1
    dense: DensePlan | None = None

    @property
    def resident(self) -> bool:
        """Whether all weights stay on the device."""
        return not self.slots and self.dense is None


class Sizes(ABC):
    """How much memory the parts of one model take, by context length.

    Attributes:
      config: the model.
      records: expert records of it.
      fewest_slots: slots that it has at least where it is streamed: what one token chooses in a layer.
    """

    def __init__(self, config: ModelConfig, options: EngineOptions):
        """`dtype` and `max_batch` count of the options."""
        self.config = config
        self.records = count_records(config)
        self.fewest_slots = _fewest_slots(config)
        self._options = options

    @cached_property
    def model(self) -> Decoder:
        """With shapes in place of arrays."""
        return abstract_model(self.config, self._options.dtype)

    @cached_property
    def dense(self) -> DensePlan:
        """The parts of its dense weights, as they take least of the device."""
        return plan_dense(self.model).leanest()

    def shapes(self, context: int) -> Shapes:
        """What programs are compiled for."""
        return Shapes(self._options.max_batch, capacity_for(context), np.dtype(jnp.dtype(self._options.dtype)))

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of an expert record; only where there are some.

        Raises:
          ConfigError: they differ from layer to layer.
        """
        return tree_bytes(record_layout(self.model))

    @abstractmethod
    def chunk_bytes(self, context: int) -> int:
        """What a prefill chunk takes while the weights of a layer pass by, and after it."""

    @abstractmethod
    def held(self, context: int) -> dict[str, int]:
        """What the resident model takes always, whatever its programs take besides."""

    @abstractmethod
    def resident(self, context: int) -> MemoryPlan:
        """With all weights on the device."""

    @abstractmethod
    def streamed(self, context: int, slots: int, pass_chunks: int, dense: DensePlan | None) -> MemoryPlan:
        """With so many experts on the device, and so many prefill chunks side by side; with a plan for dense weights,
        these where it says."""

    def leaves_room(self, context: int, budget: int, dense: DensePlan | None) -> bool:
        """Whether a streamed model with this context may fit, and its cache takes no more than its share."""
        held = self.held(context)
        elsewhere = held["experts"] + (held["dense weights"] if dense else 0)
        return held["KV cache"] <= CACHE_SHARE * budget and sum(held.values()) - elsewhere <= budget

    def longest(self, wanted: int, budget: int) -> Fit:
        """The resident model with the longest context up to `wanted` that stays within `budget`; else with the one that
        takes the least."""
        held, capacity = self.held(wanted), self.shapes(wanted).capacity
        cache_of_block = held["KV cache"] // (capacity // KV_BLOCK)
        always = sum(held.values()) - held["KV cache"]
        # Below the largest chunk, prefill takes smaller ones and a fraction of the workspace: a range of its own.
        for longest in dict.fromkeys((wanted, min(wanted, PREFILL_ROWS[-1] - KV_BLOCK))):
            context, workspace = longest, 0
            while (context := min(context, _that_fits(budget - workspace - always, cache_of_block))) > 0:
                plan = self.resident(context)
                if plan.fits(budget):
                    return Fit(plan, context)
                workspace = plan.parts["workspace"]
                context -= KV_BLOCK
        # One block can take more than two: XLA copies a cache that is sliced whole.
        shortest = dict.fromkeys(min(wanted, KV_BLOCK * blocks) for blocks in (1, 2))
        return min((Fit(self.resident(context), context) for context in shortest), key=_least)


def fit(sizes: Sizes, budgets: Budgets, options: EngineOptions, name: str) -> Fit:
    """Finds room for everything; where that is not there, for as many experts as can be, and the others come as needed.

    Dense weights are on the device, if that fits and is allowed; else they come in turn, too. `name` is the model's.

    Raises:
      BudgetError: not even the shortest context fits (the one asked for, where a number was given).
      OptionError: `max_batch` or `context_length` is more than can be served.
    """
    wanted = _wanted_context(options, sizes.config.context_length, name)
    found = _best(sizes, budgets, options, wanted)
    context = found.context_length
    shortest = "the shortest context, " if options.context_length == "auto" else ""
    requests = "one request" if options.max_batch == 1 else f"{options.max_batch} requests"
    what = f"{name} in {options.dtype}, with {shortest}{context} tokens, for {requests} at a time"
    found.plan.require(budgets.device, what, _advice(options, context))
    return found


def _best(sizes: Sizes, budgets: Budgets, options: EngineOptions, wanted: int) -> Fit:
    """What fits in no way is given as it takes least."""
    if options.dense_weights == "stream":
        return _fit_streamed(sizes, budgets, options, wanted, sizes.dense)
    found = _with_dense(sizes, budgets, options, wanted)
    if found.plan.fits(budgets.device) or options.dense_weights == "device":
        return found
    return min(found, _fit_streamed(sizes, budgets, options, wanted, sizes.dense), key=_least)


def _with_dense(sizes: Sizes, budgets: Budgets, options: EngineOptions, wanted: int) -> Fit:
    """Resident, if that fits with a context of some length; else streamed, if that is better or at all possible."""
    streamed = None
    least_held = sum(sizes.held(KV_BLOCK).values())
    if sizes.records and least_held > budgets.device:
        # The whole model is far too large: no need to compile it.
        streamed = _fit_streamed(sizes, budgets, options, wanted)
        if streamed.plan.device_bytes <= max(budgets.device, least_held):
            return streamed
    if options.context_length == "auto":
        resident = sizes.longest(wanted, budgets.device)
    else:
        resident = Fit(sizes.resident(wanted), wanted)
    fits = resident.plan.fits(budgets.device)
    if not sizes.records or (fits and resident.context_length >= min(wanted, ROOMY)):
        return resident
    streamed = streamed or _fit_streamed(sizes, budgets, options, wanted)
    if not fits:
        return min(resident, streamed, key=_least)
    longer = streamed.plan.fits(budgets.device) and streamed.context_length > resident.context_length
    return streamed if longer else resident


def _fit_streamed(
    sizes: Sizes, budgets: Budgets, options: EngineOptions, wanted: int, dense: DensePlan | None = None
) -> Fit:
    """As many slots as there is room for, beside a cache that takes a quarter of the memory at most, if that is for us
    to say. With a plan for dense weights, as many of its parts on the device as there is room for come first, as every
    token needs them."""
    device, few = budgets.device, sizes.fewest_slots
    record_bytes = sizes.record_bytes if few else 0
    context, plan = _streamed_context(sizes, device, options, wanted, dense)
    spare = max(0, device - plan.device_bytes)
    shapes, chunk_bytes = sizes.shapes(context), sizes.chunk_bytes(context)
    chunks = shapes.rows * -(-shapes.capacity // prefill_rows(shapes.capacity)[-1])
    pass_chunks = 1 + min(chunks - 1, int(PASS_SHARE * spare) // chunk_bytes)
    spare -= (pass_chunks - 1) * chunk_bytes
    if dense is not None:
        least = dense.device_bytes
        dense = dense.keep(spare).hold(budgets.host)
        spare -= dense.device_bytes - least
    slots = min(sizes.records, few + spare // record_bytes) if few else 0
    plan = sizes.streamed(context, slots, pass_chunks, dense)
    while not plan.fits(device) and (slots, pass_chunks) != (few, 1):
        # Programs may take more workspace for more slots than for few.
        if slots > few:
            slots = max(few, slots - 1 - (plan.device_bytes - device) // record_bytes)
        else:
            pass_chunks = 1
        plan = sizes.streamed(context, slots, pass_chunks, dense)
    host = _host_slots(sizes, budgets.host - (dense.host_bytes if dense else 0))
    return Fit(plan, context, slots, host, pass_chunks, dense)


def _streamed_context(
    sizes: Sizes, device: int, options: EngineOptions, wanted: int, dense: DensePlan | None
) -> tuple[int, MemoryPlan]:
    """A context with which the fewest slots fit, if there is one, and what they take."""
    context, few = wanted, sizes.fewest_slots
    if options.context_length != "auto":
        return context, sizes.streamed(context, few, 1, dense)
    while context > KV_BLOCK and not sizes.leaves_room(context, device, dense):
        context = max(context // 2, KV_BLOCK)
    plan = sizes.streamed(context, few, 1, dense)
    while context > KV_BLOCK and not plan.fits(device):
        context = max(context // 2, KV_BLOCK)
        plan = sizes.streamed(context, few, 1, dense)
    if plan.fits(device):
        return context, plan
    # One block can take more than two: XLA copies a cache that is sliced whole.
    other = min(wanted, 2 * KV_BLOCK)
    return min((context, plan), (other, sizes.streamed(other, few, 1, dense)), key=lambda found: found[1].device_bytes)


def _host_slots(sizes: Sizes, room: int) -> int:
    """Expert records that host memory holds."""
    if not sizes.records:
        return 0
    host = min(sizes.records, room // sizes.record_bytes)
    if 0 < room and host < min(FEWEST_HOST_SLOTS, sizes.records):
        _log.warning(
            "host_memory: %s holds fewer than %d experts, so that there is no host tier",
            *(format_size(room), FEWEST_HOST_SLOTS),
        )
        host = 0
    return host


def _least(found: Fit) -> int:
    return found.plan.device_bytes


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
