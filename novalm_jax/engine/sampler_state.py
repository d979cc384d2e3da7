"""What sampling remembers of every row: its request's parameters, its prompt, and what it has generated.

Knows token ids and numbers. Refuses to know how tokens are chosen, and who owns which row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from novalm_jax.engine.sampling import SMALLEST, ResolvedSampling, as_float32
from novalm_jax.errors import RequestError

_MOST = 2**31 - 1


class SamplerState(NamedTuple):
    """What sampling needs to know of r rows over v tokens: 10 bytes per row and token, and a few numbers per row."""

    bias: Array
    """float32 [r, v], added to the logits."""
    ends: Array
    """bool [r, v], tokens ruled out while fewer than `min_tokens` are generated."""
    prompt: Array
    """bool [r, v], tokens of the prompt."""
    counts: Array
    """int32 [r, v], how often each token was generated."""
    key: Array
    """uint32 [r, 2], threefry key data."""
    generated: Array
    """int32 [r], tokens generated so far."""
    min_tokens: Array
    """int32 [r]."""
    temperature: Array
    """float32 [r], 0: the most likely token."""
    top_k: Array
    """int32 [r], 0: off."""
    top_p: Array
    """float32 [r], 1: off."""
    min_p: Array
    """float32 [r], 0: off."""
    repetition: Array
    """float32 [r], 1: off."""
    presence: Array
    """float32 [r]."""
    frequency: Array
    """float32 [r]."""
    biased: Array
    """bool [r], whether any bias differs from 0."""
    scored: Array
    """bool [r], whether the row wants log-probabilities."""


WIDE = ("bias", "ends", "prompt", "counts")
"""Fields with a value for each token of the vocabulary."""

SamplerRow = SamplerState
"""One row as numpy arrays without the leading axis."""


def row_of(
    params: ResolvedSampling,
    prompt_ids: Sequence[int],
    end_ids: Sequence[int],
    vocab: int,
    output_ids: Sequence[int] = (),
) -> SamplerRow:
    """One row's state, numpy arrays without the leading axis, on the host.

    Args:
      params: what `sampling.resolve` made; its `seed` is this completion's own (`choice_seed`).
      prompt_ids: the prompt, without what was generated.
      end_ids: tokens ruled out while fewer than `min_tokens` are generated; those outside the vocabulary are ignored.
      vocab: v, the width of the logits.
      output_ids: tokens generated before, where a preempted request comes back.

    Raises:
      RequestError: `logit_bias`, the prompt or the output names a token outside the vocabulary.
    """
    biases = params.logit_bias or {}
    bias = np.zeros(vocab, np.float32)
    bias[_ids("logit_bias", list(biases), vocab)] = [as_float32(value) for value in biases.values()]
    ends, prompt = np.zeros((2, vocab), np.bool_)
    ends[[token for token in end_ids if 0 <= token < vocab]] = True
    prompt[_ids("the prompt", prompt_ids, vocab)] = True
    seed = params.seed % 2**64
    values: dict[str, Any] = {
        "bias": bias,
        "ends": ends,
        "prompt": prompt,
        "counts": np.bincount(_ids("the output", output_ids, vocab), minlength=vocab).astype(np.int32),
        "key": np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        "generated": np.asarray(len(output_ids), np.int32),
        "min_tokens": np.asarray(min(params.min_tokens, _MOST), np.int32),
        "temperature": as_float32(params.temperature),
        "top_k": np.asarray(min(params.top_k, _MOST), np.int32),
        "top_p": as_float32(params.top_p),
        "min_p": as_float32(params.min_p),
        # Never 0: 0 / 0 is no logit.
        "repetition": as_float32(max(params.repetition_penalty, SMALLEST)),
        "presence": as_float32(params.presence_penalty),
        "frequency": as_float32(params.frequency_penalty),
        "biased": np.asarray(bias.any()),
        "scored": np.asarray(params.logprobs is not None),
    }
    return SamplerRow(**values)


def _ids(what: str, ids: Sequence[int], vocab: int) -> np.ndarray:
    """`ids` as an int64 index array, all inside the vocabulary."""
    array = np.asarray(ids, np.int64).reshape(-1)
    outside = array[(array < 0) | (array >= vocab)]
    if outside.size:
        raise RequestError(f"{what} names token {outside[0]}, but the model's tokens go from 0 to {vocab - 1}.")
    return array


def init_state(rows: int, vocab: int) -> SamplerState:
    """A state in which every row takes the most likely token. Also works under `jax.eval_shape`."""
    row = row_of(ResolvedSampling(seed=0, temperature=0.0), (), (), vocab=1)
    shapes = {name: (rows, vocab) if name in WIDE else (rows, *one.shape) for name, one in row._asdict().items()}
    return SamplerState(**{name: jnp.broadcast_to(getattr(row, name), shape) for name, shape in shapes.items()})


def admit(state: SamplerState, row: SamplerRow, index: Array) -> SamplerState:
    """Replaces everything the state holds about row `index` (int32 scalar, in range) by `row`; donate `state`.

    `row` is what `row_of` returns, so nothing of the row's previous request is left.
    """
    return jax.tree.map(lambda all_rows, one: lax.dynamic_update_index_in_dim(all_rows, one, index, 0), state, row)
