"""Will a model fit, what lies where, and how fast would it be: from its configuration alone, before it is there.

Nothing is compiled and no weight is read, unless the machine is to be measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from novalm_jax.checkpoint.files import CONFIG
from novalm_jax.checkpoint.header import read_json
from novalm_jax.checkpoint.hub import find_folder
from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.config import ModelConfig
from novalm_jax.engine.estimate import Estimated, dense_bytes, expert_bytes, record_bytes
from novalm_jax.engine.fitting import Budgets, Fit, fit
from novalm_jax.engine.forecast import DenseTraffic, Forecast, Forecaster, Needs, Passes, cache_bytes
from novalm_jax.engine.functions import DECODE_ROWS
from novalm_jax.engine.machine import Machine
from novalm_jax.engine.placement import read_budgets
from novalm_jax.engine.plan_report import Plan, Planned, WeightSizes
from novalm_jax.engine.probing import Probe
from novalm_jax.engine.programs import capacity_for, prefill_rows
from novalm_jax.errors import CheckpointError, ConfigError, OptionError
from novalm_jax.experts.hit_rates import Hits, expected_hits
from novalm_jax.experts.records import count_records, moe_layers
from novalm_jax.models.counts import different_experts
from novalm_jax.models.families import find_family
from novalm_jax.options import EngineOptions, PlanOptions
from novalm_jax.units import parse_size


def plan_model(model: str | Path | None, options: PlanOptions) -> Plan:
    """Plans a model.

    Args:
      model: the folder of a checkpoint, the name of one in the Hugging Face cache, or a config.json; None for the model
        in this package.
      options: what for.

    Raises:
      CheckpointError, ConfigError: the configuration cannot be read, or is of no supported model.
      BudgetError: it does not fit.
      OptionError: a file that the options name cannot be used, or the machine cannot be measured.
    """
    if options.batch > DECODE_ROWS[-1]:
        raise OptionError(f"batch: {options.batch} is more than {DECODE_ROWS[-1]}, the most that run together.")
    planned = read_planned(model)
    config, engine, budgets = planned.config, options.engine, _budgets(options)
    found = fit(Estimated(config, engine, options.expert_bits), budgets, engine, planned.name or config.model_type)
    sizes, dtype = weight_sizes(config, options), np.dtype(jnp.dtype(options.dtype))
    machine = _machine(planned, options)
    forecaster = Forecaster(config, dtype, sizes.record, machine)
    hits = expected_hits(config, options, found.slots, found.host_slots) if found.slots else None
    return Plan(
        model=planned,
        options=options,
        budgets=budgets,
        sizes=sizes,
        fit=found,
        machine=machine,
        hits=hits,
        decode=_decode(forecaster, options, found, hits),
        prefill=_prefill(forecaster, options, found),
    )


def read_planned(model: str | Path | None) -> Planned:
    """Reads the configuration. What it says of a format of numbers is left out, and given beside it.

    Raises:
      CheckpointError, ConfigError: as `plan_model`.
    """
    path = find_folder(model)
    if path.suffix == ".json" and not path.exists():
        raise CheckpointError(f"There is no file {path}. Give a config.json, or the folder that holds it.")
    folder = None if path.is_file() else path
    raw = read_json(path if folder is None else path / CONFIG)
    name = None if model is None else str(model)
    quantised: Any = raw.get("quantization_config")
    if not isinstance(quantised, dict | None):
        raise ConfigError(f"{path}: quantization_config is {quantised!r:.60}, and no object. Download this file again.")
    try:
        config = find_family(raw).read_config({key: raw[key] for key in raw if key != "quantization_config"})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if quantised is None:
        return Planned(name, config, folder, None)
    return Planned(name, config, folder, str(quantised.get("quant_method", "quantised")))


def weight_sizes(config: ModelConfig, options: PlanOptions) -> WeightSizes:
    """How large it is, with experts in the format that they are planned in."""
    dtype, bits = np.dtype(jnp.dtype(options.dtype)), options.expert_bits
    sparse = moe_layers(config).values()
    return WeightSizes(
        dense=dense_bytes(config, dtype),
        record=record_bytes(config, dtype, bits) if sparse else 0,
        records=count_records(config),
        experts=sum(moe.num_experts * expert_bytes(config, moe, dtype, bits) for moe in sparse),
        cache=sum(cache_bytes(layer, dtype) for layer in config.layers),
    )


def _budgets(options: PlanOptions) -> Budgets:
    """As options say; what they leave to the machine is that of this one."""
    sizes = {name: getattr(options, name) for name in ("device_memory", "host_memory")}
    known = {name: parse_size(size, name=name) for name, size in sizes.items() if not _of_this_machine(size)}
    if len(known) < len(sizes):
        # What is given may be of another machine, and takes nothing here.
        device, host = (0 if name in known else size for name, size in sizes.items())
        here = read_budgets(EngineOptions(device_memory=device, host_memory=host))
        known = {"device_memory": here.device, "host_memory": here.host} | known
    return Budgets(known["device_memory"], known["host_memory"])


def _of_this_machine(size: str | int) -> bool:
    return isinstance(size, str) and (size == "auto" or size.strip().endswith("%"))


def _machine(planned: Planned, options: PlanOptions) -> Machine:
    machine = Machine()
    if options.measure:
        weights = planned.folder is not None and any(planned.folder.glob("*.safetensors"))
        checkpoint = Checkpoint.open(planned.folder) if planned.folder and weights and planned.format is None else None
        probe = Probe(planned.config, options.dtype, options.batch)
        machine = probe.machine(probe.time(), checkpoint)
    return machine.with_rates("given", options.rates)


def _decode(forecaster: Forecaster, options: PlanOptions, found: Fit, hits: Hits | None) -> Forecast:
    before = min(options.prompt_tokens, found.context_length)
    if found.resident:
        return forecaster.resident_step(options.batch, before)
    needs = Needs(0.0, 0.0, 0.0)
    if hits is not None:
        needs = Needs(hits.needed, hits.needed * (1 - hits.device), hits.needed * (1 - hits.memory))
    return forecaster.streamed_step(options.batch, before, needs, DenseTraffic.of(found.dense))


def _prefill(forecaster: Forecaster, options: PlanOptions, found: Fit) -> Forecast:
    """Of the experts that a pass needs, slots and host memory hold their share."""
    tokens = min(options.prompt_tokens, found.context_length)
    chunk = prefill_rows(capacity_for(found.context_length))[-1]
    if found.resident:
        return forecaster.prompt(tokens, Passes(chunk, 1, 0.0, 0.0))
    count = -(-tokens // (chunk * found.pass_chunks))
    needed = sum(different_experts(moe, -(-tokens // count)) for moe in moe_layers(forecaster.config).values())
    records, dense = max(1, count_records(forecaster.config)), DenseTraffic.of(found.dense)
    missed, from_disk = (
        needed * (1 - slots / records) * forecaster.record_bytes
        for slots in (found.slots, max(found.slots, found.host_slots))
    )
    return forecaster.prompt(tokens, Passes(chunk, count, missed + dense.moved, from_disk + dense.from_disk))
