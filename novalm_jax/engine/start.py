"""From a placement to an executor that holds the weights: everything resident, or experts in tiers, and perhaps dense
weights in parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import jax

from novalm_jax.checkpoint.load import Checkpoint, parameter_dtypes
from novalm_jax.checkpoint.mapping import is_expert
from novalm_jax.checkpoint.progress import bytes_bar
from novalm_jax.compat import available_ram, copy_to_device
from novalm_jax.engine.dense_streamed import DenseStreamedExecutor
from novalm_jax.engine.executor import Executor, ResidentExecutor, put_stored
from novalm_jax.engine.functions import Leaves, Structure
from novalm_jax.engine.placement import Placement
from novalm_jax.engine.streamed import StreamedExecutor
from novalm_jax.engine.streamed_programs import DenseStreamedPrograms, StreamedPrograms
from novalm_jax.experts.dense import DensePlan, Part
from novalm_jax.experts.dense_streamer import DenseHost, DenseReader, DenseStreamer
from novalm_jax.experts.fetcher import READERS, Fetcher
from novalm_jax.experts.host_tier import HostTier
from novalm_jax.experts.link import Link
from novalm_jax.experts.policy import POLICIES, Policy
from novalm_jax.experts.pools import DevicePool, HostPool
from novalm_jax.experts.profile import ExpertProfile
from novalm_jax.experts.records import Record, RecordReader, count_records, moe_layers, new_record
from novalm_jax.experts.slots import NOWHERE, SlotTable
from novalm_jax.experts.streamer import NoExperts, Streamer
from novalm_jax.options import EngineOptions
from novalm_jax.timeline import Timeline

_log = logging.getLogger("novalm_jax")


def start_executor(
    checkpoint: Checkpoint,
    placement: Placement,
    options: EngineOptions,
    timeline: Timeline | None = None,
    profile: ExpertProfile | None = None,
    streamed: Callable[..., StreamedExecutor] = StreamedExecutor,
) -> Executor:
    """Loads the weights to where the placement has room for them.

    Args:
      checkpoint: the model.
      placement: of it.
      options: how it is run.
      timeline: shows what is done.
      profile: of the model, whose most used experts are on the device at first.
      streamed: makes the executor where all dense weights are on the device, and not all experts.

    Raises:
      CheckpointError: a file cannot be read.
    """
    programs, link = placement.programs, Link(options.link_rate)
    if profile is not None and not 0 < placement.slots < count_records(checkpoint.config):
        _log.warning("expert_profile: without effect, as all experts are on the device")
    lookahead = options.prefetch == "lookahead"
    if not isinstance(programs, StreamedPrograms):
        model = checkpoint.load(options.dtype, put_stored)
        return ResidentExecutor(model, programs, checkpoint.weights.nbytes, timeline)
    if isinstance(programs, DenseStreamedPrograms):
        assert placement.dense is not None
        with ExitStack() as undo:
            ends, dense = _start_dense(checkpoint, placement.dense, programs, options, link, timeline, undo)
            streamer = _start_experts(checkpoint, placement, programs, options, link, timeline, profile)
            undo.pop_all()
        return DenseStreamedExecutor(ends, dense, programs, streamer, placement.pass_chunks, lookahead, timeline)
    resident = {
        path: dtype for path, dtype in parameter_dtypes(checkpoint.config, options.dtype).items() if not is_expert(path)
    }
    model = checkpoint.load(options.dtype, lambda _, buffer: jax.device_put(buffer), resident.__contains__)
    weights = Structure.take_apart(model)
    weights = weights._replace(layers=tuple(layer._replace(experts=None) for layer in weights.layers))
    bytes_read = sum(each.nbytes for each in checkpoint.weights.assignments if each.path in resident)
    streamer = _start_experts(checkpoint, placement, programs, options, link, timeline, profile)
    return streamed(weights, programs, streamer, bytes_read, placement.pass_chunks, lookahead, timeline)


def _start_dense(
    checkpoint: Checkpoint,
    plan: DensePlan,
    programs: DenseStreamedPrograms,
    options: EngineOptions,
    link: Link,
    timeline: Timeline | None,
    undo: ExitStack,
) -> tuple[Leaves, DenseStreamer]:
    """Dense weights in parts, and those that belong to none, on the device."""
    reader = DenseReader(checkpoint, parameter_dtypes(checkpoint.config, options.dtype))
    undo.callback(reader.close)
    ends = tuple(map(jax.device_put, reader.read(Part("the ends", programs.ends, None, 0))))
    host = DenseHost(plan, reader)
    undo.callback(host.close)
    dense = DenseStreamer(plan, reader, host, link, timeline)
    undo.callback(dense.close)
    return ends, dense


def _start_experts(
    checkpoint: Checkpoint,
    placement: Placement,
    programs: StreamedPrograms,
    options: EngineOptions,
    link: Link,
    timeline: Timeline | None,
    profile: ExpertProfile | None,
) -> Streamer | NoExperts:
    """Experts in tiers: the host's filled where it holds all of them, and both with a profile."""
    sparse = moe_layers(checkpoint.config)
    if not sparse:
        return NoExperts()
    layers, experts = len(checkpoint.config.layers), max(moe.num_experts for moe in sparse.values())
    wanted = [] if profile is None else profile.most_used()

    def new_policy() -> Policy:
        policy = POLICIES[options.policy](layers, experts)
        if profile is not None:
            policy.seed(profile.uses)
        return policy

    with ExitStack() as undo:
        reader, host = RecordReader(checkpoint, programs.shapes.dtype, timeline), None
        if slots := placement.host_slots:
            host_pool = HostPool(programs.layout, slots)
            undo.callback(host_pool.close)
            host = HostTier(host_pool, SlotTable(layers, experts, slots), new_policy())
        # Closed first, which waits for reads into the host's memory.
        undo.callback(reader.close)
        if host is not None and slots >= count_records(checkpoint.config):
            everything = [Record(number, expert) for number, moe in sparse.items() for expert in range(moe.num_experts)]
            _fill_host(host, reader, everything, programs.record_bytes)
        elif host is not None and wanted:
            # What the device has at first is read again should it leave there.
            _fill_host(host, reader, wanted[programs.slots :][:slots], programs.record_bytes)
        pool = DevicePool(programs.new_pool, programs.insert)
        undo.callback(pool.close)
        table = SlotTable(layers, experts, programs.slots)
        if wanted:
            _fill_device(pool, table, host, reader, wanted[: programs.slots], programs)
        fetcher = Fetcher(reader, programs.layout, host, link, timeline)
        undo.callback(fetcher.close)
        streamer = Streamer(pool, table, new_policy(), fetcher, count_records(checkpoint.config), timeline)
        undo.pop_all()
        return streamer


def _fill_host(host: HostTier, reader: RecordReader, records: Sequence[Record], record_bytes: int) -> None:
    """Reads experts into empty slots of host memory, so that no token waits for the disk."""
    slots = range(len(records))
    with bytes_bar("loading experts", len(records) * record_bytes) as advance, ThreadPoolExecutor(READERS) as pool:
        try:
            done = pool.map(reader.read_into, records, map(host.memory, slots))
            for record, slot, _ in zip(records, slots, done, strict=True):
                host.fill(record, slot)
                advance(record_bytes)
        finally:
            pool.shutdown(cancel_futures=True)
    if available_ram() < len(records) * record_bytes:
        reader.forget_pages()


def _fill_device(
    pool: DevicePool,
    table: SlotTable,
    host: HostTier | None,
    reader: RecordReader,
    records: Sequence[Record],
    programs: StreamedPrograms,
) -> None:
    """Puts experts into empty slots of the device, from host memory where they are."""
    buffer = new_record(programs.layout)
    with bytes_bar("placing experts", len(records) * programs.record_bytes) as advance:
        for slot, record in enumerate(records):
            if host is not None and (there := host.table.find(record)) != NOWHERE:
                arrays = host.memory(there)
            else:
                reader.read_into(record, arrays := buffer)
            jax.block_until_ready(pool.insert(jax.tree.map(copy_to_device, arrays), slot))
            table.put(record, slot)
            advance(programs.record_bytes)
