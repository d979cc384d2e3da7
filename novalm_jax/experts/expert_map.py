"""Where each expert of a model is, and how often it was used: a map to be looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DISK, HOST, DEVICE = range(3)
"""Tiers, the quicker the higher. An expert is in the quickest that holds it."""


@dataclass(frozen=True)
class ExpertMap:
    """All experts at one moment. Layers are those with experts.

    Attributes:
      layers: int64 `[layers]`, the numbers that the model gives them.
      uses: int64 `[layers, experts]`, decoded tokens that chose each, so far.
      tiers: int8 `[layers, experts]`, `DEVICE`, `HOST` or `DISK`; -1 where a layer has fewer experts.
      tokens: that were decoded.
    """

    layers: np.ndarray
    uses: np.ndarray
    tiers: np.ndarray
    tokens: int
