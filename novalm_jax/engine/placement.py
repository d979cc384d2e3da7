"""Fits a checkpoint into the memory of this machine before any weight is read, with compiled programs."""

from __future__ import annotations

import logging
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import jax

from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.compat import available_ram, device_bytes
from novalm_jax.config import ModelConfig
from novalm_jax.engine.fitting import Budgets, Fit, Sizes, fit
from novalm_jax.engine.programs import Programs, Shapes
from novalm_jax.engine.sampler import Sampler
from novalm_jax.engine.streamed_programs import DenseStreamedPrograms, StreamedPrograms
from novalm_jax.experts.dense import DensePlan
from novalm_jax.experts.memory_plan import MemoryPlan
from novalm_jax.kernels.native import choose_kernels
from novalm_jax.kv.pages import blocks
from novalm_jax.options import EngineOptions
from novalm_jax.units import format_size, parse_size

_log = logging.getLogger("novalm_jax")

AUTO_SHARE = 0.9
"""Part of the memory that is free at the start which "auto" takes; the rest is for everything else on the machine."""


@dataclass(frozen=True)
class Placement(Fit):
    """A model with room for it, and the programs that it was sized with.

    Attributes:
      budgets: what may be used.
      programs: `StreamedPrograms` where experts come and go.
      sizes: what it was found with.
    """

    _: KW_ONLY
    budgets: Budgets
    programs: Programs
    sizes: _Compiled

    def page_counts(self, pages: int) -> tuple[int, ...]:
        """Pages of each group of layers where those that see everything have so many."""
        return self.sizes.shapes(self.context_length, pages, self.pass_chunks).pages

    def slots_beside(self, pages: int) -> int:
        """Slots of a streamed model that there may be room for beside fewer pages."""
        kv_bytes = partial(self.sizes.kv_bytes, self.context_length, pass_chunks=self.pass_chunks)
        left = kv_bytes(self.pages) - kv_bytes(pages)
        return min(self.sizes.records, self.slots + left // self.sizes.record_bytes) if self.slots else 0

    def with_pages(self, pages: int) -> Placement:
        """The streamed model with fewer pages, and with experts in the memory that they leave; compiled, as by `place`.
        Its plan may be more than there is."""
        sizes, device, slots = self.sizes, self.budgets.device, self.slots_beside(pages)
        while True:
            plan = sizes.streamed(self.context_length, pages, slots, self.pass_chunks, self.dense)
            if plan.fits(device) or slots == self.slots:
                break
            # Programs may take more workspace for more slots than for few.
            slots = max(self.slots, slots - 1 - (plan.device_bytes - device) // sizes.record_bytes)
        found = replace(self, plan=plan, pages=pages, slots=slots)
        return replace(found, programs=sizes.programs(found))


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
      BudgetError, OptionError: as `fit`; or kernels that are asked for cannot be had.
    """
    budgets = read_budgets(options)
    config, name = checkpoint.config, checkpoint.folder.name
    sizes = _Compiled(config, replace(options, kernels=choose_kernels(options.kernels)))
    found = fit(sizes, budgets, options, name)
    if found.dense is not None and not found.dense.in_turn:
        _log.warning("%s: the embedding has no room on the device; its rows are looked up on the host", name)
    elif found.dense is not None:
        counts = len(found.dense.in_turn), len(found.dense.parts)
        _log.warning(
            "%s: %d of %d parts of the dense weights have no room on the device, and come in every step", name, *counts
        )
    if 0 < found.slots < sizes.records:
        counts = found.slots, sizes.records
        _log.warning("%s: %d of %d experts have room in device_memory; the others come as needed", name, *counts)
        if found.dense is not None and found.dense.in_turn and options.prefetch != "off":
            _log.warning("prefetch: only of experts in layers whose dense weights stay on the device")
    elif options.link is not None and (found.dense is None or not found.dense.in_turn):
        _log.warning("link: without effect, as %s is on the device as a whole", name)
    wanted = config.context_length
    if options.context_length == "auto" and found.context_length < wanted:
        limit = "device_memory" if options.kv_memory == "auto" else "device_memory and kv_memory"
        _log.warning("%s: the context is cut from %d to %d tokens to fit %s", name, wanted, found.context_length, limit)
    return Placement(**vars(found), budgets=budgets, programs=sizes.programs(found), sizes=sizes)


class _Compiled(Sizes):
    """What programs take once they are compiled."""

    def __init__(self, config: ModelConfig, options: EngineOptions):
        super().__init__(config, options)
        self._resident: dict[Shapes, Programs] = {}
        self._streamed: dict[tuple[Shapes, int, bool], StreamedPrograms] = {}
        self._sampler_bytes = Sampler(options.max_batch, config.vocab_size).nbytes

    def programs(self, found: Fit) -> Programs:
        """Those that it was sized with."""
        if found.resident:
            return self._resident_programs(self.shapes(found.context_length, found.pages))
        shapes = self.shapes(found.context_length, found.pages, found.pass_chunks)
        return self._streamed_programs(shapes, found.slots, found.dense)

    def chunk_bytes(self, context: int) -> int:
        """As in `Sizes`."""
        return self._streamed_programs(self.shapes(context, blocks(context)), self.fewest_slots, None).chunk_bytes

    def held(self, context: int, pages: int) -> dict[str, int]:
        """As in `Sizes`."""
        return self._held(self._resident_programs(self.shapes(context, pages)))

    def resident(self, context: int, pages: int) -> MemoryPlan:
        """As in `Sizes`. Compiles the largest programs of each kind, as does `streamed`."""
        programs = self._resident_programs(self.shapes(context, pages))
        return MemoryPlan({**self._held(programs), "workspace": programs.workspace_bytes()})

    def streamed(self, context: int, pages: int, slots: int, pass_chunks: int, dense: DensePlan | None) -> MemoryPlan:
        """As in `Sizes`."""
        programs = self._streamed_programs(self.shapes(context, pages, pass_chunks), slots, dense)
        held = self._held(programs)
        if dense is not None:
            held["dense weights"] += dense.kept_bytes
            held["dense weights under way"] = dense.under_way_bytes
        chunks = (pass_chunks - 1) * programs.chunk_bytes
        return MemoryPlan({**held, "prefill chunks": chunks, "workspace": programs.workspace_bytes()})

    def _resident_programs(self, shapes: Shapes) -> Programs:
        """Made once for each, here and below: that takes the whole model apart."""
        if shapes not in self._resident:
            self._resident[shapes] = Programs(self.model, shapes)
        return self._resident[shapes]

    def _streamed_programs(self, shapes: Shapes, slots: int, dense: DensePlan | None) -> StreamedPrograms:
        """Where the parts of a plan for dense weights lie is of no matter to them."""
        key = shapes, slots, dense is not None
        if key not in self._streamed:
            if dense is None:
                self._streamed[key] = StreamedPrograms(self.model, shapes, slots)
            else:
                self._streamed[key] = DenseStreamedPrograms(self.model, shapes, slots, dense)
        return self._streamed[key]

    def _held(self, programs: Programs) -> dict[str, int]:
        return {
            **programs.weight_bytes,
            "KV cache": programs.page_bytes,
            "sampler": self._sampler_bytes,
            "prompt that waits": programs.paused_bytes,
        }


def _budget(name: str, size: str | int, memory: int) -> int:
    if size == "auto":
        return int(memory * AUTO_SHARE)
    asked = parse_size(size, total=memory, name=name)
    if asked > memory:
        _log.warning("%s: %s is more than the %s there is, which is the budget then", name, size, format_size(memory))
    return min(asked, memory)
