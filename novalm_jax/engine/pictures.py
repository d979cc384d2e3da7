"""Pictures of a run, each drawn on axes that are given: use of experts, what was needed, memory, a timeline.

Needs matplotlib, which the `notebook` extra brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

import numpy as np

from novalm_jax.experts.expert_map import DEVICE, HOST, ExpertMap
from novalm_jax.timeline import Timeline, Track

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20


def draw_experts(use: ExpertMap, axes: Axes) -> None:
    """A tile for each expert of each layer: the part of decoded tokens that chose it, with a large dot where it is on
    the device and a small one where it is in host memory."""
    parts = np.where(use.tiers < 0, np.nan, use.uses / max(use.tokens, 1))
    image = axes.imshow(parts, aspect="auto", cmap="YlOrBr", interpolation="nearest", vmin=0)
    for tier, label, size in ((DEVICE, "on the device", 14), (HOST, "in host memory", 2)):
        rows, experts = np.nonzero(use.tiers == tier)
        if len(rows):
            axes.scatter(experts, rows, s=size, color="tab:blue", label=label)
    axes.set(xlabel="expert", ylabel="layer", yticks=range(len(use.layers)), yticklabels=use.layers)
    if axes.collections:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=2, fontsize="small", frameon=False)
    axes.figure.colorbar(image, ax=axes, label=f"part of {use.tokens} tokens")


def draw_needed(hits: int, prefetch_hits: int, misses: int, wasted: int, axes: Axes) -> None:
    """What became of the experts that layers needed, and what was fetched for nothing."""
    bars = {"hit": hits - prefetch_hits, "prefetched": prefetch_hits, "missed": misses, "fetched in vain": wasted}
    axes.barh(list(bars), list(bars.values()), color=["tab:green", "tab:olive", "tab:red", "lightgray"])
    axes.invert_yaxis()
    axes.set(xlabel="experts")


def draw_memory(parts: Mapping[str, int], budget: int, axes: Axes) -> None:
    """What takes the device's memory at the peak of a step, and the budget."""
    shown = {name: size / _MIB for name, size in parts.items() if size}
    axes.barh(list(shown), list(shown.values()), color="tab:blue")
    axes.invert_yaxis()
    axes.set(xlabel=f"MiB of device memory, {sum(shown.values()):.0f} of {budget / _MIB:.0f} in all")


def draw_timeline(timeline: Timeline, axes: Axes, begin: float, end: float) -> None:
    """What was read, uploaded and computed from one second to another, counted from the timeline's start."""
    tracks = {track: intervals for track in get_args(Track) if (intervals := timeline.intervals(track))}
    for row, intervals in enumerate(tracks.values()):
        spans = [
            (max(first, begin), min(last, end) - max(first, begin))
            for first, last in intervals
            if last > begin and first < end
        ]
        axes.broken_barh(
            [(1e3 * (at - begin), 1e3 * length) for at, length in spans], (row - 0.4, 0.8), color=f"C{row}"
        )
    axes.set(yticks=range(len(tracks)), yticklabels=list(tracks), xlabel="ms", xlim=(0, 1e3 * (end - begin)))
    axes.invert_yaxis()
