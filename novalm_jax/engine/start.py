"""From a placement to an executor that holds the weights: everything resident, or experts in tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import jax

from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.checkpoint.mapping import is_expert
from novalm_jax.checkpoint.progress import bytes_bar
from novalm_jax.config import MoEConfig
from novalm_jax.engine.executor import Executor, ResidentExecutor, put_stored
from novalm_jax.engine.functions import Structure
from novalm_jax.engine.placement import Placement
from novalm_jax.engine.programs import StreamedPrograms
from novalm_jax.engine.streamed import StreamedExecutor
from novalm_jax.experts.fetcher import READERS, Fetcher
from novalm_jax.experts.host_tier import HostTier
from novalm_jax.experts.policy import POLICIES
from novalm_jax.experts.pools import DevicePool, HostPool
from novalm_jax.experts.records import Record, RecordReader, count_records, moe_layers
from novalm_jax.experts.slots import SlotTable
from novalm_jax.experts.streamer import Streamer
from novalm_jax.options import EngineOptions


def start_executor(
    checkpoint: Checkpoint,
    placement: Placement,
    options: EngineOptions,
    streamed: Callable[..., StreamedExecutor] = StreamedExecutor,
) -> Executor:
    """Loads the weights to where the placement has room for them; `streamed` makes the executor where that is not all
    of the device.

    Raises:
      CheckpointError: a file cannot be read.
    """
    programs = placement.programs
    if not isinstance(programs, StreamedPrograms):
        return ResidentExecutor(checkpoint.load(options.dtype, put_stored), programs, checkpoint.weights.nbytes)
    dense = checkpoint.load(options.dtype, lambda _, buffer: jax.device_put(buffer), lambda path: not is_expert(path))
    weights = Structure.take_apart(dense)
    weights = weights._replace(layers=tuple(layer._replace(experts=None) for layer in weights.layers))
    sparse = moe_layers(checkpoint.config)
    layers, experts = len(dense.layers), max(moe.num_experts for moe in sparse.values())
    policy = POLICIES[options.policy]
    with ExitStack() as undo:
        reader, host = RecordReader(checkpoint, programs.shapes.dtype), None
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
        fetcher = Fetcher(reader, programs.layout, host, options.link_rate)
        undo.callback(fetcher.close)
        table = SlotTable(layers, experts, programs.slots)
        streamer = Streamer(pool, table, policy(layers, experts), fetcher, count_records(checkpoint.config))
        dense_bytes = checkpoint.weights.nbytes - reader.nbytes
        lookahead = options.prefetch == "lookahead"
        executor = streamed(weights, programs, streamer, dense_bytes, placement.pass_chunks, lookahead)
        undo.pop_all()
        return executor


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
