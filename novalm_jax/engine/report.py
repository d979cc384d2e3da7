"""What a run did and what it holds, in figures: nothing that matters is left unsaid.

Knows names, figures and how people read them. Counts nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from html import escape
from typing import TYPE_CHECKING, Any

from novalm_jax.compat import require_matplotlib
from novalm_jax.engine.pictures import draw_experts, draw_memory, draw_needed
from novalm_jax.errors import some
from novalm_jax.experts.expert_map import ExpertMap
from novalm_jax.units import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Report:
    """Counters of one `LLM` since it started. Sizes are bytes, times seconds.

    `device_peak_bytes` is the planned peak, whose parts are `device_table`. Hits and misses are of experts on the
    device; `stall_seconds` is time that computing waited for weights. `uploads` are of experts, `dense_uploads` of a
    layer's dense weights or a block of the head. `step_seconds` is the time of steps, `compute_seconds` what programs
    took of it, `load_seconds` the time of everything before the first one, `longest_wait_seconds` the most that prompts
    took before a decode step that somebody waited for. `launches` counts compiled programs that were run.
    `prefix_tokens`, of `prompt_tokens`, were not computed, as pages had them; `distinct_experts` were used by decode
    steps, each once in a step. `kv_pages` are of all groups of layers; `preemptions` moved `kv_bytes_moved` of them to
    the host, where `kv_host_bytes` are now; `memory_exchanges` gave memory of experts to pages, or back. `experts` is a
    map of all experts, which `plot` draws and no other form shows; None where there are none.
    """

    device_budget_bytes: int = 0
    device_peak_bytes: int = 0
    host_budget_bytes: int = 0
    host_bytes: int = 0
    disk_bytes_read: int = 0
    context_length: int = 0
    experts_on_device: int = 0
    experts_on_host: int = 0
    experts_on_disk: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    prefetch_hits: int = 0
    prefetch_wasted: int = 0
    steps_without_prefetch: int = 0
    uploads: int = 0
    bytes_uploaded: int = 0
    evictions: int = 0
    dense_uploads: int = 0
    dense_bytes_uploaded: int = 0
    stall_seconds: float = 0.0
    compute_seconds: float = 0.0
    load_seconds: float = 0.0
    step_seconds: float = 0.0
    longest_wait_seconds: float = 0.0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    distinct_experts: int = 0
    kv_pages: int = 0
    kv_pages_in_use: int = 0
    kv_pages_peak: int = 0
    kv_page_tokens: int = 0
    preemptions: int = 0
    kv_bytes_moved: int = 0
    kv_host_bytes: int = 0
    memory_exchanges: int = 0
    launches: int = 0
    programs_compiled: int = 0
    programs_from_cache: int = 0
    policy: str = "resident"
    kernels: dict[str, str] = field(default_factory=dict)
    device_table: dict[str, int] = field(default_factory=dict)
    ignored_tensors: tuple[str, ...] = ()
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    experts: ExpertMap | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "experts"}
        return values | {"ignored_tensors": list(self.ignored_tensors)}

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) of every figure, as people read them."""
        return [
            (name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " "), _readable(name, value))
            for name, value in self._flat()
        ]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows())

    def _repr_html_(self) -> str:
        body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self.rows())
        return f"<table>{body}</table>"

    def plot(self) -> Figure:
        """A picture: which experts were used how often and where they are, what became of those that were needed, and
        what takes the device's memory.

        Raises:
          OptionError: matplotlib is not installed.
        """
        require_matplotlib("plot")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 6), layout="constrained")
        if self.experts is None:
            draw_memory(self.device_table, self.device_budget_bytes, figure.subplots())
            return figure
        axes = figure.subplot_mosaic([["use", "use"], ["needed", "memory"]], height_ratios=(3, 2))
        draw_experts(self.experts, axes["use"])
        draw_needed(self.expert_hits, self.prefetch_hits, self.expert_misses, self.prefetch_wasted, axes=axes["needed"])
        draw_memory(self.device_table, self.device_budget_bytes, axes["memory"])
        return figure

    def _flat(self) -> list[tuple[str, Any]]:
        flat: list[tuple[str, Any]] = []
        for name, value in self.to_dict().items():
            if name == "device_table":
                flat += [(f"device: {part}_bytes", size) for part, size in value.items()]
            elif name in ("kernels", "sampling_defaults"):
                flat += [(f"{name.removesuffix('s').replace('_', ' ')}: {key}", item) for key, item in value.items()]
            else:
                flat.append((name, value))
        return flat


def _readable(name: str, value: Any) -> str:
    if name.endswith("_bytes") or name in (
        "kv_bytes_moved",
        "bytes_uploaded",
        "dense_bytes_uploaded",
        "disk_bytes_read",
    ):
        return format_size(value)
    if name.endswith("_seconds"):
        return f"{value:.3f} s"
    if isinstance(value, list):
        return some(value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
