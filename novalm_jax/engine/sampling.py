"""How one completion's tokens are chosen, with every default filled in. Plain numbers; knows no device and no text."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from novalm_jax.errors import ConfigError, RequestError
from novalm_jax.options import SamplingParams

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class ResolvedSampling:
    """How one completion's tokens are chosen, with every default filled in; fields as in `SamplingParams`."""

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    logprobs: int | None = None


def resolve(params: SamplingParams, defaults: Mapping[str, float], *, fresh_seed: int) -> ResolvedSampling:
    """Fills what a request leaves open: the checkpoint's default, else temperature 1 and every filter off.

    A value the request gives wins, 0 included. `defaults` holds what the checkpoint says, by name
    (`GenerationConfig.sampling`). `fresh_seed` is used where the request has no seed.

    Raises:
      ConfigError: the checkpoint's default is needed, and no sampler can honour it.
    """
    given = {field.name: getattr(params, field.name, None) for field in fields(ResolvedSampling)}
    for name, value in defaults.items():
        if given[name] is None:
            given[name] = _checked_default(name, value)
    values: dict[str, Any] = {"seed": fresh_seed} | {name: value for name, value in given.items() if value is not None}
    return ResolvedSampling(**values)


def _checked_default(name: str, value: float) -> float:
    values: dict[str, Any] = {name: value}
    try:
        return getattr(SamplingParams(**values), name)
    except RequestError as error:
        raise ConfigError(
            f"generation_config.json holds a default that cannot be used: {error} Set {name} in the request."
        ) from None


def greedy_suffices(params: ResolvedSampling) -> bool:
    """True where the argmax of the raw logits (the lowest id among equals) is all that the request needs."""
    greedy = as_float32(params.temperature) == 0 or as_float32(params.top_p) == 0
    penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return (
        bool(greedy) and not penalised and not params.logit_bias and not params.min_tokens and params.logprobs is None
    )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's n choices: the seed itself for choice 0, an unrelated one for each other.

    From -2**63 to 2**63 - 1, like `SamplingParams.seed`.
    """
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def as_float32(value: float) -> np.ndarray:
    """A float32 scalar, finite unless it is -inf (which rules a token out), and 0 where only a denormal would fit."""
    if value == -math.inf:
        return np.asarray(value, np.float32)
    # Backends differ in whether a denormal counts as 0.
    value = 0.0 if abs(value) < SMALLEST else max(-LARGEST, min(value, LARGEST))
    return np.asarray(value, np.float32)
