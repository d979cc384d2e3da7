"""The golden folders: what is in them, and the logits of the trainable module."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.models.decoder import Decoder

GOLDEN = Path(__file__).parent.parent / "golden"
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Golden:
    ids: np.ndarray
    logits: np.ndarray
    greedy: np.ndarray


@functools.cache
def golden(case: str) -> Golden:
    with np.load(GOLDEN / case / "golden.npz") as file:
        return Golden(file["input_ids"], file["logits"], file["greedy"])


def whole(model: Decoder, ids: Any) -> np.ndarray:
    return np.asarray(jax.jit(lambda m, t: m(t))(model, jnp.asarray(ids)))
