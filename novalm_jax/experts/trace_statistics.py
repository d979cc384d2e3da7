"""What is typical of routing: how soon experts come again, how uneven their use is, what a layer says of the next.

The statistics by which a made-up trace is compared with recorded ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from novalm_jax.experts.traces import Trace
from novalm_jax.models.router import NONE

LAGS = (1, 2, 4, 8, 16, 64)
"""Tokens between two uses."""

WINDOWS = (2, 4, 8, 16)
"""Tokens in a row."""

SHARES = (0.125, 0.25, 0.5)
"""Parts of the experts of a layer, the most used ones."""


@dataclass(frozen=True)
class TraceStatistics:
    """Means over layers, unless said otherwise.

    Attributes:
      reuse: by lag of `LAGS`, the part of a token's experts that were chosen so many tokens later in its sequence, too.
      reuse_by_layer: `[layers]`, the same for lag 1.
      overlap: tokens that share an expert with the one before, as a part of all, in one layer.
      share: by part of `SHARES`, uses that so many experts of a layer take together.
      share_in_sequence: the same within a sequence, a mean over those of 32 tokens at least.
      distinct: by window of `WINDOWS`, experts that so many tokens in a row use.
      entropy: of the use of a layer's experts, 1 for even use.
      recall: experts that the previous layer's experts predict, by how often they came together in the trace: the part
        of a token's experts among as many that are predicted. A mean over all layers but the first.
    """

    reuse: dict[int, float]
    reuse_by_layer: np.ndarray
    overlap: float
    share: dict[float, float]
    share_in_sequence: dict[float, float]
    distinct: dict[int, float]
    entropy: float
    recall: float

    def to_dict(self) -> dict[str, Any]:
        """All of them by name, ready for JSON: None for what a trace is too short to say."""
        known = vars(self) | {"reuse_by_layer": self.reuse_by_layer.tolist()}
        return {name: _known(value) for name, value in known.items()}

    def __str__(self) -> str:
        def listed(values: Mapping[Any, float], unit: str) -> str:
            return ", ".join(f"{value:.2f} {unit} {key:g}" for key, value in values.items())

        rows = [
            ("reuse", listed(self.reuse, "after")),
            ("by layer", ", ".join(f"{value:.2f}" for value in self.reuse_by_layer)),
            ("overlap", f"{self.overlap:.2f} of tokens share an expert of a layer with the one before"),
            ("share", listed(self.share, "of uses by")),
            ("in a text", listed(self.share_in_sequence, "of uses by")),
            ("distinct", listed(self.distinct, "experts in tokens")),
            ("entropy", f"{self.entropy:.2f}"),
            ("recall", f"{self.recall:.2f} of experts predicted by the layer before"),
        ]
        return "\n".join(f"{name:<10} {value}" for name, value in rows)


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _known(each) for key, each in value.items()}
    return None if isinstance(value, float) and np.isnan(value) else value


def statistics_of(trace: Trace) -> TraceStatistics:
    """Computes all of them, from a trace of one token a step or of several."""
    used = _used(trace)
    sequences = [used[rows] for rows in trace.sequences()]
    reuse = {lag: _reuse(sequences, lag) for lag in LAGS}
    overlaps = np.concatenate([(part[1:] & part[:-1]).any(axis=2) for part in sequences])
    counts = used.sum(axis=0)
    chosen = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log(np.where(chosen > 0, chosen, 1.0))
    return TraceStatistics(
        reuse={lag: float(by_layer.mean()) for lag, by_layer in reuse.items()},
        reuse_by_layer=reuse[1],
        overlap=float(overlaps.mean()) if overlaps.size else float("nan"),
        share=_shares([counts]),
        share_in_sequence=_shares([part.sum(axis=0) for part in sequences if len(part) >= 32]),
        distinct={window: _distinct(sequences, window) for window in WINDOWS},
        entropy=float((-(chosen * logs).sum(axis=1) / np.log(max(2, trace.num_experts))).mean()),
        recall=_recall(used),
    )


def _used(trace: Trace) -> np.ndarray:
    """Bool `[rows, layers, experts]`."""
    rows, layers, _ = trace.experts.shape
    used = np.zeros((rows, layers, trace.num_experts + 1), bool)
    np.put_along_axis(used, np.where(trace.experts == NONE, trace.num_experts, trace.experts).astype(np.int64), True, 2)
    return used[:, :, :-1]


def _reuse(sequences: list[np.ndarray], lag: int) -> np.ndarray:
    """By layer; not a number where no sequence is long enough."""
    again = sum((part[lag:] & part[:-lag]).sum(axis=(0, 2)) for part in sequences if len(part) > lag)
    before = sum(part[:-lag].sum(axis=(0, 2)) for part in sequences if len(part) > lag)
    return np.asarray(again / np.maximum(before, 1))


def _shares(counts: list[np.ndarray]) -> dict[float, float]:
    """Of counts `[layers, experts]`."""
    if not counts:
        return dict.fromkeys(SHARES, float("nan"))
    ranked = -np.sort(-np.stack(counts), axis=2)
    ranked = ranked / ranked.sum(axis=2, keepdims=True)
    return {share: float(ranked[:, :, : round(share * ranked.shape[2])].sum(axis=2).mean()) for share in SHARES}


def _distinct(sequences: list[np.ndarray], window: int) -> float:
    """Windows do not overlap."""
    cut = [part[: len(part) // window * window] for part in sequences if len(part) >= window]
    if not cut:
        return float("nan")
    windows = np.concatenate([part.reshape(-1, window, *part.shape[1:]).any(axis=1) for part in cut])
    return float(windows.sum(axis=2).mean())


def _recall(used: np.ndarray) -> float:
    """Counts all rows first, and then predicts each of them."""
    recalls = []
    for before, after in zip(used.swapaxes(0, 1)[:-1], used.swapaxes(0, 1)[1:], strict=True):
        together = before.T.astype(np.float32) @ after.astype(np.float32)
        # By the previous layer's expert, so that one which is used often does not outvote the others.
        chances = together / np.maximum(before.sum(axis=0)[:, None], 1)
        scores = before.astype(np.float32) @ chances
        chosen = int(after.sum(axis=1).max())
        best = np.argpartition(-scores, chosen - 1, axis=1)[:, :chosen]
        recalls.append(np.take_along_axis(after, best, 1).sum() / after.sum())
    return float(np.mean(recalls)) if recalls else float("nan")
