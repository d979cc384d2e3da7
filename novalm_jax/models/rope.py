"""Rotary position embedding (arXiv:2104.09864): angles for every kind of `RopeConfig`, and the rotation itself.

Angles are float32 and depend on absolute positions. Only the `dynamic` kind also depends on how long the sequence is
when a token is computed; keys that are cached keep the rotation they were computed with, as in the reference.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.config import RopeConfig


def angles(config: RopeConfig, head_dim: int, positions: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for these positions.

    Args:
      positions: int32 `[b, t]`.
      length: int32 `[b]`, tokens in each sequence once these are computed; read by the `dynamic` kind alone.

    Returns:
      Two float32 arrays `[b, t, head_dim / 2]`.
    """
    if config.kind == "dynamic":
        frequencies = _dynamic_frequencies(config, head_dim, length)[:, None, :]
    else:
        frequencies = jnp.asarray(static_frequencies(config, head_dim))[None, None, :]
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angle) * config.attention_factor, jnp.sin(angle) * config.attention_factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs (i, i + c/2) of `x [b, t, h, c]` by the angles `[b, t, c/2]`; float32 inside, x's dtype outside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def static_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each pair, float32 `[head_dim / 2]`, for kinds that do not depend on the length."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = config.theta**-exponents
    if config.kind == "linear":
        plain = plain / config.factor
    elif config.kind == "llama3":
        plain = _llama3(config, plain)
    elif config.kind == "yarn":
        plain = _yarn(config, plain, head_dim)
    return plain.astype(np.float32)


def _llama3(config: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Low frequencies are divided by the factor, high ones kept, those between blended (Llama 3.1 model card)."""
    low, high = config.low_freq_factor, config.high_freq_factor
    turns = config.original_context * plain / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (keep + (1 - keep) / config.factor)


def _yarn(config: RopeConfig, plain: np.ndarray, head_dim: int) -> np.ndarray:
    """NTK by parts: between two dimensions the frequencies go from kept to divided by the factor (arXiv:2309.00071)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    divide = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return plain * (1 - divide) + plain / config.factor * divide


def _dynamic_frequencies(config: RopeConfig, head_dim: int, length: jax.Array) -> jax.Array:
    """NTK scaling of the base by the length of each sequence: float32 `[b, head_dim / 2]`."""
    stretch = jnp.maximum(length, config.original_context).astype(jnp.float32) / config.original_context
    base = config.theta * (config.factor * stretch - (config.factor - 1)) ** (head_dim / (head_dim - 2))
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return base[:, None] ** -exponents[None, :]
