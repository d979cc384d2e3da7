"""From a placement to an executor that holds the weights: everything resident, or experts in tiers, and perhaps dense
weights in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import jax

from novalm_jax.checkpoint.load import Checkpoint, parameter_dtypes
from novalm_jax.checkpoint.mapping import is_expert
from novalm_jax.checkpoint.progress import bytes_bar
from novalm_jax.compat import available_ram
from novalm_jax.config import MoEConfig
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
from novalm_jax.experts.policy import POLICIES
from novalm_jax.experts.pools import DevicePool, HostPool
from novalm_jax.experts.records import Record, RecordReader, count_records, moe_layers
from novalm_jax.experts.slots import SlotTable
from novalm_jax.experts.streamer import NoExperts, Streamer
from novalm_jax.options import EngineOptions
from novalm_jax.timeline import Timeline


def start_executor(
    checkpoint: Checkpoint,
    placement: Placement,
    options: EngineOptions,
    timeline: Timeline | None = None,
    streamed: Callable[..., StreamedExecutor] = StreamedExecutor,
) -> Executor:
    """Loads the weights to where the placement has room for them.

    Args:
      checkpoint: the model.
      placement: of it.
      options: how it is run.
      timeline: shows what is done.
      streamed: makes the executor where all dense weights are on the device, and not all experts.

    Raises:
      CheckpointError: a file cannot be read.
    """
    programs, link = placement.programs, Link(options.link_rate)
    lookahead = options.prefetch == "lookahead"
    if not isinstance(programs, StreamedPrograms):
        model = checkpoint.load(options.dtype, put_stored)
        return ResidentExecutor(model, programs, checkpoint.weights.nbytes, timeline)
    if isinstance(programs, DenseStreamedPrograms):
        assert placement.dense is not None
        with ExitStack() as undo:
            ends, dense = _start_dense(checkpoint, placement.dense, programs, options, link, timeline, undo)
            streamer = _start_experts(checkpoint, placement, programs, options, link, timeline)
            undo.pop_all()
        return DenseStreamedExecutor(ends, dense, programs, streamer, placement.pass_chunks, lookahead, timeline)
    resident = {
        path: dtype for path, dtype in parameter_dtypes(checkpoint.config, options.dtype).items() if not is_expert(path)
    }
    model = checkpoint.load(options.dtype, lambda _, buffer: jax.device_put(buffer), resident.__contains__)
    weights = Structure.take_apart(model)
    weights = weights._replace(layers=tuple(layer._replace(experts=None) for layer in weights.layers))
    bytes_read = sum(each.nbytes for each in checkpoint.weights.assignments if each.path in resident)
    streamer = _start_experts(checkpoint, placement, programs, options, link, timeline)
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
) -> Streamer | NoExperts:
    """Experts in tiers, the host's filled where it holds all of them."""
    sparse = moe_layers(checkpoint.config)
    if not sparse:
        return NoExperts()
    layers, experts = len(checkpoint.config.layers), max(moe.num_experts for moe in sparse.values())
    policy = POLICIES[options.policy]
    with ExitStack() as undo:
        reader, host = RecordReader(checkpoint, programs.shapes.dtype, timeline), None
        if slots := placement.host_slots:
            host_pool = HostPool(programs.layout, slots)
            undo.callback(host_pool.close)
            host = HostTier(host_pool, SlotTable(layers, experts, slots), policy(layers, experts))
        # Closed first, which waits for reads into the host's memory.
        undo.callback(reader.close)
        if host is not None and slots >= count_records(checkpoint.config):
            _fill(host, reader, sparse, programs.record_bytes)
        pool = DevicePool(programs.layout, programs.slots, programs.insert)
        undo.callback(pool.close)
        fetcher = Fetcher(reader, programs.layout, host, link, timeline)
        undo.callback(fetcher.close)
        table = SlotTable(layers, experts, programs.slots)
        streamer = Streamer(pool, table, policy(layers, experts), fetcher, count_records(checkpoint.config), timeline)
        undo.pop_all()
        return streamer


def _fill(host: HostTier, reader: RecordReader, sparse: Mapping[int, MoEConfig], record_bytes: int) -> None:
    """Reads all experts into host memory, so that no token waits for the disk."""
    records = [Record(number, expert) for number, moe in sparse.items() for expert in range(moe.num_experts)]
    slots = range(len(records))
    with bytes_bar("loading experts", len(records) * record_bytes) as advance, ThreadPoolExecutor(READERS) as pool:
        try:
            done = pool.map(reader.read_into, records, map(host.memory, slots))
            for record, slot, _ in zip(records, slots, done, strict=True):
                host.fill(record, slot, 0)
                advance(record_bytes)
        finally:
            pool.shutdown(cancel_futures=True)
    if available_ram() < len(records) * record_bytes:
        reader.forget_pages()
