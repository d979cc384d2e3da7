"""What every number of slots would hit, in one pass over the events, and how many slots each layer deserves by that."""

from __future__ import annotations

import numpy as np

from novalm_jax.experts.simulator import Events


def lru_hits(events: Events, layers: int, experts: int, apart: bool = False) -> np.ndarray:
    """How often `LRU` finds what each layer needs, for every number of slots at once.

    With so few slots that an event needs more, the engine goes in waves, and this is a little too high.

    Args:
      events: of so many layers.
      layers, experts: how many there are, experts in each layer.
      apart: each layer has a pool of its own, in place of one for all.

    Returns:
      int64 `[layers, slots + 1]`, the first for 0, up to all records that a pool could hold.

    Source: stack distances, Mattson et al., Evaluation techniques for storage hierarchies, 1970.
    """
    last = np.full((layers, experts), -1, np.int64)
    found = np.zeros((layers, (1 if apart else layers) * experts + 1), np.int64)
    for step, event in enumerate(events):
        for layer, chosen in enumerate(event):
            before = last[layer][chosen]
            known = before[before >= 0]
            rivals = last[layer] if apart else last.reshape(-1)
            # Records that were used later than this one have a slot before it does.
            np.add.at(found[layer], (rivals >= known[:, None]).sum(axis=1), 1)
            last[layer][chosen] = (step * layers + layer) * experts + chosen
    return np.cumsum(found, axis=1)


def lru_hit_rates(events: Events, layers: int, experts: int, apart: bool = False) -> np.ndarray:
    """The part of all that is needed which `LRU` finds, for every number of slots: float64 `[slots + 1]`, the first for
    0. Arguments as of `lru_hits`; with `apart` so many in each layer."""
    needed = sum(len(chosen) for event in events for chosen in event)
    return lru_hits(events, layers, experts, apart).sum(axis=0) / needed


def fit_slots(hits: np.ndarray, slots: int, least: int = 1) -> np.ndarray:
    """How many of so many slots each layer should have for the most hits: int64 `[layers]`.

    A slot goes where it brings most. Where a curve is hollow, so that a slot brings little before the next ones bring
    much, those count together, as a mean.

    Args:
      hits: int `[layers, experts + 1]`, of each layer with 0, 1, ... slots of its own, never falling.
      slots: in all layers together, at most as many as records.
      least: of each layer, where there are as many.
    """
    gains = np.stack([_gains(curve) for curve in hits])
    gains[:, :least] = np.inf
    # Of equal gains a layer's earlier slot comes first.
    order = np.argsort(-gains.T, axis=None, kind="stable")[:slots]
    return np.bincount(order % len(hits), minlength=len(hits))


def _gains(curve: np.ndarray) -> np.ndarray:
    """What each further slot brings, float64 `[n]`, never rising: the slopes of the least concave curve above one, int
    `[n + 1]`."""
    gains = np.empty(len(curve) - 1)
    at = 0
    while at < len(gains):
        slopes = (curve[at + 1 :] - curve[at]) / np.arange(1, len(curve) - at)
        length = int(np.argmax(slopes)) + 1
        gains[at : at + length] = slopes[length - 1]
        at += length
    return gains
