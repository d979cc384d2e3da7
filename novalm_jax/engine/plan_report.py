"""What is known of a model before it is there: the plan, and how people and programs read it. Finds nothing out."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from novalm_jax.config import ModelConfig
from novalm_jax.engine.fitting import Budgets, Fit
from novalm_jax.engine.forecast import DenseTraffic, Forecast
from novalm_jax.engine.machine import Machine
from novalm_jax.experts.hit_rates import Hits
from novalm_jax.experts.records import moe_layers
from novalm_jax.options import PlanOptions
from novalm_jax.tables import aligned
from novalm_jax.units import format_size


class Planned(NamedTuple):
    """A model as far as it is known.

    Attributes:
      name: as it was given.
      config: what it is.
      folder: of its files; None where there is a configuration alone.
      format: that its weights are published in, where it is none that is loaded.
    """

    name: str | None
    config: ModelConfig
    folder: Path | None
    format: str | None


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model.

    Attributes:
      dense: everything that is not a routed expert.
      record: an expert, the largest, where they differ.
      records: how many there are.
      experts: all of them.
      cache: a token of the KV cache.
    """

    dense: int
    record: int
    records: int
    experts: int
    cache: int

    @property
    def total(self) -> int:
        """All weights."""
        return self.dense + self.experts


@dataclass(frozen=True)
class Plan:
    """All that is known beforehand; `hits` is None where no experts come and go."""

    model: Planned
    options: PlanOptions
    budgets: Budgets
    sizes: WeightSizes
    fit: Fit
    machine: Machine
    hits: Hits | None
    decode: Forecast
    prefill: Forecast

    @property
    def loadable(self) -> bool:
        """Whether this version runs what is planned."""
        return self.model.format is None and self.options.expert_bits is None

    @property
    def tiers(self) -> dict[str, int]:
        """Expert records that each tier holds; what is in slots of the device may be in those of the host as well."""
        records, host = self.sizes.records, self.fit.host_slots
        device = records if self.fit.resident else self.fit.slots
        return {"device": device, "host": host, "disk": max(0, records - max(device, host))}

    @property
    def command(self) -> tuple[str, ...]:
        """What runs it."""
        options, name = self.options, self.model.name
        model = () if name is None else ("--model", name if self.model.folder else "MODEL")
        memory = "--device-memory", str(options.device_memory), "--host-memory", str(options.host_memory)
        shape = "--context-length", str(self.fit.context_length), "--max-batch", str(options.batch)
        return "python", "-m", "novalm_jax.generate", *model, *memory, "--dtype", options.dtype, *shape

    @property
    def notes(self) -> list[str]:
        """What to know before one relies on it."""
        options, config, notes = self.options, self.model.config, []
        stored = options.experts_dtype or options.dtype
        if self.model.format is not None:
            notes.append(
                f"NOT LOADED BY THIS VERSION: the weights are published as {self.model.format}; planned is the same "
                f"model in {options.dtype}, with experts in {stored}"
            )
        if options.expert_bits is not None:
            notes.append(
                f"NOT LOADED BY THIS VERSION: experts in {stored}. They lie in the dtype that is computed in; this is "
                f"what they would take in {stored}, if that were read as fast"
            )
        if self.fit.context_length < config.context_length and options.context_length == "auto":
            notes.append(f"the context is cut from {config.context_length} to {self.fit.context_length} tokens")
        if options.prompt_tokens > self.fit.context_length:
            notes.append(
                f"forecasts are of {self.fit.context_length} tokens, as the context has no room for the "
                f"{options.prompt_tokens} of prompt_tokens"
            )
        if (dense := self.fit.dense) is not None:
            notes.append(
                f"{len(dense.in_turn)} of {len(dense.parts)} parts of the dense weights come in every step, "
                f"{format_size(DenseTraffic.of(dense).moved)}"
            )
        if any(source == "assumed" for _, _, source in self.machine.rows()):
            notes.append("machine rates marked assumed are generic; give yours, or --measure")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        fit, price, costs = self.fit, self.options.price, None
        if price is not None:
            costs = {"prefill": self.prefill.cost(price), "decode": self.decode.cost(price)}
        return {
            "model": self.model.name,
            "model_type": self.model.config.model_type,
            "published_format": self.model.format,
            "loadable": self.loadable,
            "options": vars(self.options),
            "sizes": {f"{name}_bytes" if name != "records" else name: size for name, size in asdict(self.sizes).items()}
            | {"total_bytes": self.sizes.total},
            "budgets": asdict(self.budgets),
            "memory": dict(fit.plan.parts),
            "device_bytes": fit.plan.device_bytes,
            "resident": fit.resident,
            "context_length": fit.context_length,
            "prefill_chunks_a_pass": fit.pass_chunks,
            "tiers": self.tiers,
            "hits": None if self.hits is None else self.hits._asdict(),
            "machine": self.machine.to_dict(),
            "decode": self.decode.to_dict(),
            "prefill": self.prefill.to_dict(),
            "cost_per_million_tokens": costs,
            "command": list(self.command) if self.loadable else None,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        return "\n\n".join(("\n".join(self._head()), "\n".join(self._memory()), "\n".join(self._speed())))

    def _head(self) -> list[str]:
        config, sizes = self.model.config, self.sizes
        layers = f"{len(config.layers)} layers, {len(moe_layers(config))} with experts"
        rows = [
            ("model", f"{self.model.name or 'the one in this package'} ({config.model_type}), {layers}"),
            ("weights", f"{sizes.total} bytes ({format_size(sizes.total)}), of them dense {format_size(sizes.dense)}"),
        ]
        if sizes.records:
            each = f"{sizes.records} of {format_size(sizes.record)} each"
            rows.append(("experts", f"{each}, {format_size(sizes.experts)} together"))
            device, host, disk = self.tiers.values()
            rows.append(("tiers", f"slots for {device} on the device and {host} in host memory; {disk} on disk alone"))
        requests = f"{self.options.batch} x {self.fit.context_length} tokens"
        rows.append(("KV cache", f"{format_size(sizes.cache)} a token, for {requests}"))
        if self.hits is not None:
            found = f"{100 * self.hits.device:.1f} % on the device, {100 * self.hits.memory:.1f} % there or on the host"
            rows.append(("hits", f"{found} ({self.hits.source})"))
        return _rows(rows)

    def _memory(self) -> list[str]:
        parts = {name: size for name, size in self.fit.plan.parts.items() if size}
        parts |= {"together": self.fit.plan.device_bytes}
        parts |= {"device_memory": self.budgets.device, "host_memory": self.budgets.host}
        return aligned([(name, str(size), format_size(size)) for name, size in parts.items()])

    def _speed(self) -> list[str]:
        rows = []
        for name, each in (("decode", self.decode), ("prefill", self.prefill)):
            best = f", {each.best_rate:.4g} with transfers fully overlapped"
            best = best if each.best_rate > 1.01 * each.rate else ""
            rows.append((name, f"{each.rate:.4g} tokens/s{best}; {each.bottleneck} takes longest"))
            rows.append(("", ", ".join(f"{part} {1e3 * taken:.3g} ms" for part, taken in each.parts.items() if taken)))
            if self.options.price is not None:
                rows.append(("", f"{each.cost(self.options.price):.3g} for a million tokens"))
        rows += [("machine", f"{title}: {value}, {source}") for title, value, source in self.machine.rows()]
        rows += [("note", note) for note in self.notes]
        return _rows([*rows, ("run", shlex.join(self.command))] if self.loadable else rows)


def _rows(rows: list[tuple[str, str]]) -> list[str]:
    return [f"{name:<8} {value}" for name, value in rows]
