"""Measures a machine for forecasts: a model's programs, run by the engine's executors over weights of zeros.

A few layers are enough. Zeros choose the same experts in each of them, so that a step has hits alone where every layer
has slots for its own, and misses alone where all layers share the slots of one.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.checkpoint.load import Checkpoint, abstract_model
from novalm_jax.checkpoint.mapping import is_expert
from novalm_jax.compat import available_ram, copy_to_device, device_bytes, device_shares_memory
from novalm_jax.config import ModelConfig, MoEConfig
from novalm_jax.engine.executor import Executor, Line, ResidentExecutor, cut
from novalm_jax.engine.forecast import dense_read, prompt_operations
from novalm_jax.engine.functions import Leaves, ModelWeights, Structure
from novalm_jax.engine.machine import Machine
from novalm_jax.engine.programs import Programs, Shapes, capacity_for, decode_rows, prefill_rows
from novalm_jax.engine.streamed import StreamedExecutor
from novalm_jax.engine.streamed_programs import StreamedPrograms
from novalm_jax.engine.workspace import Workspace
from novalm_jax.errors import OptionError
from novalm_jax.experts.fetcher import Fetcher
from novalm_jax.experts.host_tier import HostTier
from novalm_jax.experts.link import Link
from novalm_jax.experts.policy import LRU
from novalm_jax.experts.pools import DevicePool, HostPool
from novalm_jax.experts.records import Record, RecordReader, moe_layers, new_record
from novalm_jax.experts.slots import NOWHERE, SlotTable
from novalm_jax.experts.streamer import NoExperts, Streamer
from novalm_jax.kernels.native import choose_kernels
from novalm_jax.kernels.storage import storage_dtype
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.params import parameters_of
from novalm_jax.units import format_size

_ENOUGH = 128 << 20
"""Bytes that a step reads at least, where the model has so many: more than a processor's caches hold."""

_STEPS, _FIRST = 16, 3
"""Rounds that are timed, and those before them that are not."""

_PROMPTS = 3
"""Prompts that are."""

_FROM_DISK = 16
"""Records that are read from disk, and timed, at most."""

_NOISE = 0.01
"""Part of a time that says nothing, where it is all that one is longer than another."""

_Run = Callable[[], object]


class Probe:
    """One model's programs on this machine. They are compiled once, at the first measurement.

    Attributes:
      record_bytes: of an expert.
    """

    def __init__(self, config: ModelConfig, dtype: str, batch: int):
        """`batch` requests are decoded together.

        Raises:
          OptionError: there are no experts, or no room for a few layers.
        """
        if not moe_layers(config):
            raise OptionError("measure: the model has no routed experts, so that there is nothing to plan for.")
        layer = Counter(each for each in config.layers if isinstance(each.feed_forward, MoEConfig)).most_common(1)[0][0]
        assert isinstance(layer.feed_forward, MoEConfig)
        self._layer, self._moe, self._batch = layer, layer.feed_forward, batch
        self._prompt = prefill_rows(capacity_for(config.context_length))[-1]
        kernels = choose_kernels("auto")
        self._shapes = Shapes.of(config, batch, self._prompt, np.dtype(jnp.dtype(dtype)), kernels=kernels)
        one = StreamedPrograms(abstract_model(replace(config, layers=(layer,)), dtype), self._shapes, 1)
        self.record_bytes = one.record_bytes
        self._ends_read = dense_read(config, self._shapes.dtype, ())
        self._read = dense_read(config, self._shapes.dtype, (layer,)) - self._ends_read
        self._read += self._moe.experts_per_token * one.record_bytes
        count = min(max(2, -(-_ENOUGH // self._read)), max(2, len(config.layers)))
        self._config, self._depth = replace(config, layers=(layer,) * count), len(config.layers)
        slots = count * self._moe.experts_per_token
        self._programs = StreamedPrograms(abstract_model(self._config, dtype), self._shapes, slots)
        if (held := self._streamed_bytes()) > _room():
            raise OptionError(
                f"measure: {count} layers and twice {slots} experts take {format_size(held)}, and half of the memory "
                f"is {format_size(_room())}. Leave measure out, and give the rates of the machine instead."
            )

    def time(self) -> dict[str, float]:
        """Seconds of parts of a step, and of a prompt, by name. All take turns, so that whatever else runs slows
        all of them."""
        layers, chosen = len(self._config.layers), self._moe.experts_per_token
        weights = self._dense_weights()
        with ExitStack() as held:
            host = self._host()
            hits = held.enter_context(closing(self._streamed(layers * chosen, weights, host)))
            misses = held.enter_context(closing(self._streamed(chosen, weights, self._host())))
            all_experts, no_expert = self._waves(hits.streamer)
            runs = {
                "hits": self._step(hits),
                "misses": self._step(misses),
                "ends": self._ends(weights.outer),
                "experts": all_experts,
                "no expert": no_expert,
                "upload": self._upload(host),
            }
            if self._streamed_bytes() + self._resident_bytes() <= _room():
                runs["whole"] = self._step(held.enter_context(closing(self._resident())))
            seconds = _in_turns(runs, _STEPS)
            seconds |= _in_turns({"prompt": self._whole_prompt(hits)}, _PROMPTS)
        return seconds

    def machine(self, seconds: Mapping[str, float], checkpoint: Checkpoint | None = None) -> Machine:
        """What follows from these times; of the disk only with a checkpoint, of which some records are read.

        Experts say how fast device memory is; or all bytes of whole layers, or of a step of the model, where these are
        read faster. So nothing costs less than 0 beyond its bytes, and a step takes what was measured all the same:
        where embedding and head are read faster, layers cost that much less.
        """
        layers, chosen, ends = len(self._config.layers), self._moe.experts_per_token, seconds["ends"]
        steps = {"cut_layer_seconds": seconds["hits"]}
        if "whole" in seconds:
            steps["layer_seconds"] = seconds["whole"]
        bandwidth = _rate(self.record_bytes * chosen, seconds["experts"], seconds["no expert"])
        read = self._ends_read + self._depth * self._read
        for step in steps.values():
            whole = ends + self._depth * max(0.0, step - ends) / layers
            bandwidth = max(bandwidth, _rate(layers * self._read, step, ends), read / whole)
        beyond = ends - self._ends_read / bandwidth
        operations = prompt_operations(self._config, self._prompt, spread=False)
        rates = {
            "device_bandwidth": bandwidth,
            "device_operations": operations / seconds["prompt"],
            "link": self.record_bytes / seconds["upload"],
            "step_seconds": max(0.0, beyond),
            "insert_seconds": insert_seconds((seconds["misses"] - seconds["hits"]) / layers, seconds["upload"], chosen),
        }
        less = min(0.0, beyond) / self._depth
        for name, step in steps.items():
            rates[name] = max(0.0, (step - ends) / layers - self._read / bandwidth + less)
        if checkpoint is not None:
            rates["disk"] = self._disk_rate(checkpoint)
        return Machine().with_rates("measured", rates)

    # --- what is run ---

    def _dense_weights(self) -> ModelWeights:
        weights = Structure.take_apart(_zeros(self._config, self._shapes.dtype.name, experts=False))
        return ModelWeights(weights.outer, tuple(layer._replace(experts=None) for layer in weights.layers))

    def _host(self) -> HostTier:
        """Host memory with all records that are needed."""
        layers, experts, chosen = len(self._config.layers), self._moe.num_experts, self._moe.experts_per_token
        records = [Record(layer, expert) for layer in range(layers) for expert in range(chosen)]
        table = SlotTable(layers, experts, len(records))
        host = HostTier(HostPool(self._programs.layout, len(records)), table, LRU(layers, experts))
        for slot, record in enumerate(records):
            host.fill(record, slot)
        return host

    def _streamed(self, slots: int, weights: ModelWeights, host: HostTier) -> StreamedExecutor:
        """With so many of the pool's slots in use. Owns `host`; `weights` may be shared, and are freed with it."""
        programs, layers, experts = self._programs, len(self._config.layers), self._moe.num_experts
        fetcher = Fetcher(_NoDisk(), programs.layout, host, Link())
        pool = DevicePool(programs.new_pool, programs.insert)
        table = SlotTable(layers, experts, slots)
        streamer = Streamer(pool, table, LRU(layers, experts), fetcher, len(host.table))
        return StreamedExecutor(weights, programs, streamer, 0, 1, lookahead=False)

    def _resident(self) -> ResidentExecutor:
        dtype = self._shapes.dtype.name
        return ResidentExecutor(_zeros(self._config, dtype, experts=True), self._whole, 0)

    @cached_property
    def _whole(self) -> Programs:
        return Programs(abstract_model(self._config, self._shapes.dtype.name), self._shapes)

    def _streamed_bytes(self) -> int:
        """Of two streamed models on device and host: dense weights, which they share; for each its slots, the copies
        on their way into one, host memory and caches; a copy that is timed, and workspace."""
        programs = self._programs
        held = programs.weight_bytes
        own = held["expert slots"] + held["experts under way"] + programs.slots * self.record_bytes
        once = held["dense weights"] + self.record_bytes + Workspace(self._config, self._shapes).streamed_bytes()
        return once + 2 * (own + programs.page_bytes)

    def _resident_bytes(self) -> int:
        """Of a resident model with its caches."""
        return sum(self._whole.weight_bytes.values()) + self._whole.page_bytes

    # --- what is timed ---

    def _step(self, executor: Executor) -> _Run:
        """A decode step."""
        book, at = executor.new_book(), itertools.count()
        sequences = [book.new() for _ in range(self._batch)]

        def step() -> None:
            position = next(at)
            for held in sequences:
                book.grow(held, position, position + 1)
            lines = [Line(0, position, position + 1, held, number) for number, held in enumerate(sequences)]
            jax.block_until_ready(executor.decode(lines))

        return step

    def _whole_prompt(self, executor: Executor) -> _Run:
        """A prompt."""
        book = executor.new_book()
        book.grow(held := book.new(), 0, self._prompt)
        parts = cut([0] * self._prompt, 0, self._prompt, executor.chunk, self._prompt, held)
        return lambda: jax.block_until_ready(list(executor.prefill(parts)))

    def _ends(self, outer: Leaves) -> _Run:
        """What comes before and after the layers of a step."""
        rows, programs = decode_rows(self._batch)[-1], self._programs
        embed, head = programs.embed_step(rows), programs.head_of_step(rows)
        tokens = np.zeros(rows, np.int32)
        return lambda: jax.block_until_ready(head(outer, embed(outer, tokens)))

    def _waves(self, streamer: Streamer | NoExperts) -> tuple[_Run, _Run]:
        """A wave of as many experts as a token chooses, other slots each time; and one of none."""
        assert isinstance(streamer, Streamer)
        rows, chosen, experts = decode_rows(self._batch)[-1], self._moe.experts_per_token, self._moe.num_experts
        program, pool = self._programs.first_wave(self._layer, rows), streamer.pool
        _, routed, _ = program.args_info[0]
        routed = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), routed)
        ids = np.full((rows, chosen), experts, np.int32)
        ids[0] = range(chosen)
        routed = routed._replace(routing=routed.routing._replace(ids=jnp.asarray(ids)))
        numbers = itertools.cycle(range(self._programs.slots))

        def wave(count: int) -> None:
            slots = np.full(experts, NOWHERE, np.int32)
            slots[:count] = [next(numbers) for _ in range(count)]
            jax.block_until_ready(program(pool.arrays, routed, slots))

        return partial(wave, chosen), partial(wave, 0)

    def _upload(self, host: HostTier) -> _Run:
        """What the fetcher does for a record in host memory, each time for another one."""
        to = (new_record(self._programs.layout),) if device_shares_memory() else ()
        slots = itertools.cycle(range(len(host.table)))
        return lambda: jax.tree.map(copy_to_device, host.memory(next(slots)), *to)

    def _disk_rate(self, checkpoint: Checkpoint) -> float:
        """Bytes a second of records that are read one after another, and that memory does not hold yet."""
        sparse = moe_layers(checkpoint.config).items()
        records = [Record(layer, expert) for layer, moe in sparse for expert in range(min(2, moe.num_experts))]
        out = new_record(self._programs.layout)
        with closing(RecordReader(checkpoint, self._shapes.dtype)) as reader:
            # Only files that are open can be forgotten: a record of each file opens it, and others are timed.
            timed, opened = [], set[Path]()
            for record in records[: 2 * _FROM_DISK]:
                if reader.files(record) <= opened:
                    timed.append(record)
                else:
                    reader.read_into(record, out)
                    opened |= reader.files(record)
            reader.forget_pages()
            before, begin = reader.bytes_read, time.perf_counter()
            for record in timed[:_FROM_DISK] or records[:1]:
                reader.read_into(record, out)
            return (reader.bytes_read - before) / (time.perf_counter() - begin)


class _NoDisk(RecordReader):
    """Reads nothing: all is in host memory."""

    def __init__(self) -> None:
        """Opens nothing."""

    @property
    def bytes_read(self) -> int:
        """None."""
        return 0

    def close(self) -> None:
        """Nothing is open."""


def _zeros(config: ModelConfig, dtype: str, experts: bool) -> Decoder:
    """A model of zeros, with shapes in place of its experts unless they are wanted, then in storage form."""
    model = abstract_model(config, dtype)
    for path, parameter in parameters_of(model).items():
        kind = np.dtype(parameter.dtype)
        if not is_expert(path):
            parameter.set_value(jnp.zeros(parameter.shape, kind))
        elif experts:
            parameter.set_value(jnp.zeros(parameter.shape, storage_dtype(kind)))
    return model


def _in_turns(runs: Mapping[str, _Run], rounds: int) -> dict[str, float]:
    """Seconds of each run, the median of so many rounds after some that do not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(_FIRST + rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if number >= _FIRST:
                times[name].append(time.perf_counter() - begin)
    return {name: median(taken) for name, taken in times.items()}


def _rate(nbytes: int, longer: float, shorter: float) -> float:
    """Bytes a second, where reading them makes the `longer` of two times; at least what follows from all of that time
    where their difference is below 0, or noise."""
    more = longer - shorter
    return nbytes / (more if more > _NOISE * longer else longer)


def insert_seconds(layer: float, upload: float, missed: int) -> float:
    """Of a record, where so many that a layer misses add `layer` seconds to it, and each is uploaded in `upload`
    seconds: as `forecast` has it, whether inserting one takes longer than its upload or not."""
    return max(0.0, min((layer - upload) / missed, layer - missed * upload))


def _room() -> int:
    """Half of the memory of the device; of what is free, where that is the host's."""
    memory = device_bytes(jax.devices()[0])
    return (available_ram() if memory is None else memory) // 2
