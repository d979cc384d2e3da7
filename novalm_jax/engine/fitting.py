"""Which parts of a model lie where, and the longest context beside them, for budgets in bytes.

One algorithm, whatever says how much the parts take: compiled programs (`placement`) or formulas (`estimate`). Nothing
is compiled or read here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from novalm_jax.checkpoint.load import abstract_model
from novalm_jax.config import ModelConfig
from novalm_jax.engine.functions import DECODE_ROWS, PREFILL_ROWS
from novalm_jax.engine.programs import Shapes, capacity_for, prefill_rows
from novalm_jax.errors import OptionError
from novalm_jax.experts.dense import DensePlan, plan_dense
from novalm_jax.experts.fetcher import READERS
from novalm_jax.experts.memory_plan import MemoryPlan
from novalm_jax.experts.records import count_records, moe_layers, record_layout
from novalm_jax.kernels.storage import tree_bytes
from novalm_jax.kv.paged import page_bytes
from novalm_jax.kv.pages import PAGE, blocks
from novalm_jax.models.decoder import Decoder
from novalm_jax.options import EngineOptions
from novalm_jax.units import format_size, parse_size

_log = logging.getLogger("novalm_jax")

ROOMY = 4096
"""Tokens of context that are worth more than experts on the device: below it, experts are streamed instead."""

CACHE_SHARE = 0.25
"""Part of the device's budget that the KV cache of a streamed model takes at most, where the context is ours to say."""

PASS_SHARE = 0.2
"""Part of what is left then which prefill chunks may take that share a pass over the experts."""

KV_HOST_SHARE = 0.125
"""Part of host memory that is kept for pages of requests that have to wait."""

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
      pages: for layers that see everything; one request of `context_length` has room at least.
      kv_host_bytes: of host memory, for pages of requests that have to wait.
      slots: experts that there is room for on the device, where they come and go; 0 where all of them stay.
      host_slots: expert records that pinned host memory holds.
      pass_chunks: prefill chunks that share a pass over streamed weights.
      dense: where dense weights are that do not all stay on the device; None where they do.
    """

    plan: MemoryPlan
    context_length: int
    pages: int
    kv_host_bytes: int = 0
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
      rows: requests that run together.
    """

    def __init__(self, config: ModelConfig, options: EngineOptions):
        """`dtype`, `max_batch` and `kernels` count of the options."""
        self.config = config
        self.records = count_records(config)
        self.fewest_slots = _fewest_slots(config)
        self.rows = options.max_batch
        self._options = options

    @cached_property
    def model(self) -> Decoder:
        """With shapes in place of arrays."""
        return abstract_model(self.config, self._options.dtype)

    @cached_property
    def dense(self) -> DensePlan:
        """The parts of its dense weights, as they take least of the device."""
        return plan_dense(self.model).leanest()

    def shapes(self, context: int, pages: int, pass_chunks: int = 1) -> Shapes:
        """What programs are compiled for."""
        options = self._options
        return Shapes.of(self.config, options.max_batch, context, self._dtype, pages, pass_chunks, options.kernels)

    def kv_bytes(self, context: int, pages: int, pass_chunks: int = 1) -> int:
        """What pages take."""
        shapes = self.shapes(context, pages, pass_chunks)
        return sum(page_bytes(self.config, shapes.capacity, shapes.pages, shapes.dtype))

    def most_pages(self, context: int, memory: int, pass_chunks: int = 1) -> int:
        """Pages that fit in so many bytes: for one request at least, and for all that run together at most."""
        least = blocks(context)
        more = range(least + 1, least * self._options.max_batch + 1)
        return least + bisect_right(more, memory, key=lambda pages: self.kv_bytes(context, pages, pass_chunks))

    def longest_context(self, wanted: int, memory: int) -> int:
        """Up to `wanted`, the longest context of which one request's pages fit in so many bytes; 0: none."""
        counts = range(1, blocks(wanted) + 1)
        fitting = bisect_right(counts, memory, key=lambda count: self.kv_bytes(min(count * PAGE, wanted), count))
        return min(fitting * PAGE, wanted)

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(jnp.dtype(self._options.dtype))

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
    def held(self, context: int, pages: int) -> dict[str, int]:
        """What the resident model takes always, whatever its programs take besides."""

    @abstractmethod
    def resident(self, context: int, pages: int) -> MemoryPlan:
        """With all weights on the device."""

    @abstractmethod
    def streamed(self, context: int, pages: int, slots: int, pass_chunks: int, dense: DensePlan | None) -> MemoryPlan:
        """With so many experts on the device, and so many prefill chunks side by side; with a plan for dense weights,
        these where it says."""

    def leaves_room(self, context: int, budget: int, dense: DensePlan | None) -> bool:
        """Whether a streamed model with this context may fit, and one request takes no more than the cache's share."""
        held = self.held(context, blocks(context))
        elsewhere = held["experts"] + (held["dense weights"] if dense else 0)
        return held["KV cache"] <= CACHE_SHARE * budget and sum(held.values()) - elsewhere <= budget

    def longest(self, wanted: int, budget: int, kv: int) -> Fit:
        """The resident model with the longest context up to `wanted` that stays within `budget`, and its pages within
        `kv` bytes, with as many pages as that leaves room for; else with the context that takes the least."""
        everything = self.most_pages(wanted, kv)
        if self.kv_bytes(wanted, everything) <= kv and (plan := self.resident(wanted, everything)).fits(budget):
            return Fit(plan, wanted, everything)
        # Below the largest chunk, prefill takes smaller ones and a fraction of the workspace: a range of its own.
        for longest in dict.fromkeys((wanted, min(wanted, PREFILL_ROWS[-1] - PAGE))):
            held = self.held(longest, blocks(longest))
            always, context, workspace = sum(held.values()) - held["KV cache"], longest, 0
            while (context := self.longest_context(context, min(budget - workspace - always, kv))) > 0:
                plan = self.resident(context, blocks(context))
                if plan.fits(budget):
                    return self.widened(Fit(plan, context, blocks(context)), budget, kv)
                workspace = plan.parts["workspace"]
                context = (blocks(context) - 1) * PAGE
        shortest = _shortest(wanted)
        return min((Fit(self.resident(each, blocks(each)), each, blocks(each)) for each in shortest), key=_least)

    def widened(self, found: Fit, budget: int, kv: int) -> Fit:
        """A resident model that fits, with as many pages as memory is left for."""
        context = found.context_length
        spare = budget - found.plan.device_bytes + found.plan.parts["KV cache"]
        while (pages := self.most_pages(context, min(spare, kv))) > found.pages:
            plan = self.resident(context, pages)
            if plan.fits(budget):
                return Fit(plan, context, pages)
            # Programs may take more workspace for more pages than for few.
            spare -= plan.device_bytes - budget
        return found


def fit(sizes: Sizes, budgets: Budgets, options: EngineOptions, name: str) -> Fit:
    """Finds room for everything; where that is not there, for as many experts as can be, and the others come as needed.

    Dense weights are on the device, if that fits and is allowed; else they come in turn, too. `name` is the model's.

    Raises:
      BudgetError: not even the shortest context fits (the one asked for, where a number was given).
      OptionError: `max_batch` or `context_length` is more than can be served, or `kv_memory` less than one request.
    """
    wanted = _wanted_context(options, sizes.config.context_length, name)
    found = _best(sizes, budgets, options, wanted)
    context = found.context_length
    shortest = "the shortest context, " if options.context_length == "auto" else ""
    requests = "one request" if options.max_batch == 1 else f"{options.max_batch} requests"
    what = f"{name} in {options.dtype}, with {shortest}{context} tokens, for {requests} at a time"
    found.plan.require(budgets.device, what, _advice(options, context))
    one_request, kv = sizes.kv_bytes(context, blocks(context)), _kv_memory(options, budgets)
    if one_request > kv:
        raise OptionError(
            f"kv_memory: {format_size(kv)} is too little for a request of {context} tokens, which takes "
            f"{format_size(one_request)}. Give more, or a shorter context_length."
        )
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
    least_held = sum(sizes.held(min(wanted, PAGE), 1).values())
    if sizes.records and least_held > budgets.device:
        # The whole model is far too large: no need to compile it.
        streamed = _fit_streamed(sizes, budgets, options, wanted)
        if streamed.plan.device_bytes <= max(budgets.device, least_held):
            return streamed
    resident = _fit_resident(sizes, budgets, options, wanted)
    fits = resident.plan.fits(budgets.device)
    if not sizes.records or (fits and resident.context_length >= min(wanted, ROOMY)):
        return resident
    streamed = streamed or _fit_streamed(sizes, budgets, options, wanted)
    if not fits:
        return min(resident, streamed, key=_least)
    longer = streamed.plan.fits(budgets.device) and streamed.context_length > resident.context_length
    return streamed if longer else resident


def _fit_resident(sizes: Sizes, budgets: Budgets, options: EngineOptions, wanted: int) -> Fit:
    kv = _kv_memory(options, budgets)
    if options.context_length == "auto":
        found = sizes.longest(wanted, budgets.device, kv)
    else:
        everything = Fit(sizes.resident(wanted, most := sizes.most_pages(wanted, kv)), wanted, most)
        if everything.plan.fits(budgets.device):
            found = everything
        else:
            found = Fit(sizes.resident(wanted, blocks(wanted)), wanted, blocks(wanted))
            if found.plan.fits(budgets.device):
                found = sizes.widened(found, budgets.device, kv)
    return replace(found, kv_host_bytes=_kv_on_host(sizes, budgets, found))


def _fit_streamed(
    sizes: Sizes, budgets: Budgets, options: EngineOptions, wanted: int, dense: DensePlan | None = None
) -> Fit:
    """As many slots as there is room for, beside pages that take a quarter of the memory at most, if that is for us to
    say. With a plan for dense weights, as many of its parts on the device as there is room for come first, as every
    token needs them."""
    device, few = budgets.device, sizes.fewest_slots
    record_bytes = sizes.record_bytes if few else 0
    context, plan = _streamed_context(sizes, budgets, options, wanted, dense)
    share = _kv_memory(options, budgets) if options.kv_memory != "auto" else int(CACHE_SHARE * device)
    spare = max(0, device - plan.device_bytes)
    least_cache, chunk_bytes = sizes.kv_bytes(context, blocks(context)), sizes.chunk_bytes(context)
    pages = sizes.most_pages(context, min(share, least_cache + spare))
    spare -= sizes.kv_bytes(context, pages) - least_cache
    chunks = options.max_batch * -(-context // prefill_rows(capacity_for(context))[-1])
    pass_chunks = 1 + min(chunks - 1, int(PASS_SHARE * spare) // chunk_bytes)
    spare -= (pass_chunks - 1) * chunk_bytes
    spare -= sizes.kv_bytes(context, pages, pass_chunks) - sizes.kv_bytes(context, pages)
    if dense is not None:
        least = dense.device_bytes
        dense = dense.keep(max(spare, 0))
        spare -= dense.device_bytes - least
    slots = min(sizes.records, few + max(spare, 0) // record_bytes) if few else 0
    plan = sizes.streamed(context, pages, slots, pass_chunks, dense)
    while not plan.fits(device) and (pages, slots, pass_chunks) != (blocks(context), few, 1):
        # Programs may take more workspace for more slots than for few.
        if slots > few:
            slots = max(few, slots - 1 - (plan.device_bytes - device) // record_bytes)
        elif pass_chunks > 1:
            pass_chunks = 1
        else:
            pages = blocks(context)
        plan = sizes.streamed(context, pages, slots, pass_chunks, dense)
    found = Fit(plan, context, pages, slots=slots, pass_chunks=pass_chunks, dense=dense)
    kept = _kv_on_host(sizes, budgets, found)
    room = budgets.host - kept
    if dense is not None:
        dense = dense.hold(room)
        room -= dense.host_bytes
    return replace(found, host_slots=_host_slots(sizes, room), kv_host_bytes=kept, dense=dense)


def _streamed_context(
    sizes: Sizes, budgets: Budgets, options: EngineOptions, wanted: int, dense: DensePlan | None
) -> tuple[int, MemoryPlan]:
    """A context with which the fewest slots and one request fit, if there is one, and what they take."""
    device, context = budgets.device, wanted

    def plan_of(context: int) -> MemoryPlan:
        return sizes.streamed(context, blocks(context), sizes.fewest_slots, 1, dense)

    if options.context_length != "auto":
        return context, plan_of(context)
    kv = _kv_memory(options, budgets)
    while context > PAGE and not (
        sizes.leaves_room(context, device, dense) and sizes.kv_bytes(context, blocks(context)) <= kv
    ):
        context = max(context // 2, PAGE)
    plan = plan_of(context)
    while context > PAGE and not plan.fits(device):
        context = max(context // 2, PAGE)
        plan = plan_of(context)
    if plan.fits(device):
        return context, plan
    return min(((each, plan_of(each)) for each in _shortest(wanted)), key=lambda found: found[1].device_bytes)


def _shortest(wanted: int) -> set[int]:
    """Contexts of which one takes the least: one page can take more than two, as XLA copies pages that are cut out
    whole."""
    return {min(wanted, PAGE), min(wanted, 2 * PAGE)}


def _kv_memory(options: EngineOptions, budgets: Budgets) -> int:
    """Bytes that pages may take on the device."""
    if options.kv_memory == "auto":
        return budgets.device
    return parse_size(options.kv_memory, total=budgets.device, name="kv_memory")


def _kv_on_host(sizes: Sizes, budgets: Budgets, found: Fit) -> int:
    """Bytes of host memory for pages of requests that have to wait: as many as run together, at most a part of what
    there is. Where experts need that memory, none if all requests have room on the device."""
    context, rows = found.context_length, sizes.rows
    if not found.resident and found.pages >= rows * blocks(context):
        return 0
    return min(rows * sizes.kv_bytes(context, blocks(context)), int(KV_HOST_SHARE * budgets.host))


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


def _advice(options: EngineOptions, context: int) -> list[str]:
    """What would take less memory than these options with this context do."""
    advice = ["more device_memory"]
    if context > PAGE:
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
