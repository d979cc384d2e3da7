"""Rotary position embedding (arXiv:2104.09864): angles for every kind of `RopeConfig`, and the rotation itself.

Angles are float32 and depend on absolute positions. The `dynamic` and `longrope` kinds also depend on how long the
sequence is when a token is computed; cached keys keep the rotation they were computed with, as in the reference.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.config import RopeConfig


def angles(config: RopeConfig, dim: int, positions: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for these positions, of a rotation of `dim` dimensions.

    Args:
      positions: int32 `[b, t]`.
      length: int32 `[b]`, tokens in each sequence once these are computed; read by the `dynamic` and `longrope` kinds.

    Returns:
      Two float32 arrays `[b, t, dim / 2]`.
    """
    factor: jax.Array | float = config.attention_factor
    if config.kind == "dynamic":
        frequencies = _dynamic_frequencies(config, dim, length)[:, None, :]
    elif config.kind == "longrope":
        long = (length > config.original_context)[:, None, None]
        short_ones, long_ones = (
            jnp.asarray(_divided(config, dim, factors))[None, None, :]
            for factors in (config.short_factors, config.long_factors)
        )
        frequencies = jnp.where(long, long_ones, short_ones)
        factor = jnp.where(long, jnp.float32(config.long_attention_factor), jnp.float32(config.attention_factor))
    else:
        frequencies = jnp.asarray(static_frequencies(config, dim))[None, None, :]
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, pairs: bool = False) -> jax.Array:
    """Rotates the first r dimensions of `x [b, t, h, c]` by the angles `[b, t, r/2]`, and leaves the rest.

    Dimensions (i, i + r/2) rotate together, or with `pairs` (2i, 2i + 1). float32 inside, x's dtype outside.
    """
    rotated = 2 * cos.shape[-1]
    part, rest = x[..., :rotated].astype(jnp.float32), x[..., rotated:]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second = (part[..., ::2], part[..., 1::2]) if pairs else jnp.split(part, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    whole = jnp.stack(turned, axis=-1).reshape(part.shape) if pairs else jnp.concatenate(turned, axis=-1)
    whole = whole.astype(x.dtype)
    return whole if rest.shape[-1] == 0 else jnp.concatenate([whole, rest], axis=-1)


def static_frequencies(config: RopeConfig, dim: int) -> np.ndarray:
    """Angle per position of each pair, float32 `[dim / 2]`, for kinds that do not depend on the length."""
    theta = config.theta
    if config.kind == "ntk":
        theta *= config.factor ** (dim / (dim - 2))
    plain = _plain(theta, dim)
    if config.kind == "linear":
        plain = plain / config.factor
    elif config.kind == "llama3":
        plain = _llama3(config, plain)
    elif config.kind == "yarn":
        plain = _yarn(config, plain, dim)
    return plain.astype(np.float32)


def _plain(theta: float, dim: int) -> np.ndarray:
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    frequencies: np.ndarray = theta**-exponents
    return frequencies


def _divided(config: RopeConfig, dim: int, factors: tuple[float, ...]) -> np.ndarray:
    """Each frequency divided by a factor of its own (arXiv:2402.13753): float32 `[dim / 2]`."""
    return (_plain(config.theta, dim) / np.asarray(factors)).astype(np.float32)


def _llama3(config: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Low frequencies are divided by the factor, high ones kept, those between blended (Llama 3.1 model card)."""
    low, high = config.low_freq_factor, config.high_freq_factor
    turns = config.original_context * plain / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns >= low).astype(np.float64)
    return plain * (keep + (1 - keep) / config.factor)


def _yarn(config: RopeConfig, plain: np.ndarray, dim: int) -> np.ndarray:
    """NTK by parts: between two dimensions the frequencies go from kept to divided by the factor (arXiv:2309.00071)."""

    def dimension(turns: float) -> float:
        return dim * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    divide = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return plain * (1 - divide) + plain / config.factor * divide


def _dynamic_frequencies(config: RopeConfig, dim: int, length: jax.Array) -> jax.Array:
    """NTK scaling of the base by the length of each sequence: float32 `[b, dim / 2]`."""
    stretch = jnp.maximum(length, config.original_context).astype(jnp.float32) / config.original_context
    base = config.theta * (config.factor * stretch - (config.factor - 1)) ** (dim / (dim - 2))
    exponents = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    return base[:, None] ** -exponents[None, :]
