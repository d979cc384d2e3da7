"""What a machine does in a second, as far as the time of a token follows from it. Numbers alone; measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Machine:
    """Rates, and what programs cost beyond them. The defaults are assumed: a desktop's GPU behind PCIe 4.

    Attributes:
      device_bandwidth: bytes of weights a second that decode programs read on the device.
      device_operations: operations a second of prefill's matrix products.
      link: bytes a second from host memory to the device.
      disk: bytes a second from disk to host memory.
      step_seconds: of a decode step, beyond its bytes and its layers.
      layer_seconds: of a layer beyond its bytes, where a step is one program.
      cut_layer_seconds: the same where a layer is cut at its router, which the host looks at.
      insert_seconds: of a missed expert, beyond its upload: to insert it into a slot, and a wave for it.
      sources: where each of these comes from, by name: "given" or "measured"; what is missing is assumed.
    """

    device_bandwidth: float = 1e12
    device_operations: float = 80e12
    link: float = 25e9
    disk: float = 5e9
    step_seconds: float = 1e-4
    layer_seconds: float = 1e-5
    cut_layer_seconds: float = 2e-4
    insert_seconds: float = 5e-5
    sources: Mapping[str, str] = field(default_factory=dict)

    def with_rates(self, source: str, rates: Mapping[str, float]) -> Machine:
        """The same with other rates, by name, that come from there."""
        return replace(self, **rates, sources={**self.sources, **dict.fromkeys(rates, source)})

    def source(self, name: str) -> str:
        """Where a rate comes from."""
        return self.sources.get(name, "assumed")

    def to_dict(self) -> dict[str, Any]:
        """All rates by name, ready for JSON, each with its source."""
        return {name: {"value": getattr(self, name), "source": self.source(name)} for name in RATES}

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, value and source of each, as people read them."""
        return [(title, write(getattr(self, name)), self.source(name)) for name, (title, write) in RATES.items()]


def _bytes(rate: float) -> str:
    return f"{rate / 1e9:.4g} GB/s"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


RATES = {
    "device_bandwidth": ("device memory", _bytes),
    "device_operations": ("matrix products", lambda rate: f"{rate / 1e12:.3g} TFLOP/s"),
    "link": ("link", _bytes),
    "disk": ("disk", _bytes),
    "step_seconds": ("a step, beyond bytes and layers", _milliseconds),
    "layer_seconds": ("a layer in one program, beyond bytes", _milliseconds),
    "cut_layer_seconds": ("a layer cut at its router, beyond bytes", _milliseconds),
    "insert_seconds": ("a missed expert, beyond its upload", _milliseconds),
}
"""What is shown of each, by its attribute: its name for people, and how it is written."""
