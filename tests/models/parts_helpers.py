"""Random arrays and parameters, and plain float64 numpy, for the tests of a decoder's parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from novalm_jax.models.params import parameters_of


def random(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def randomise(module: nnx.Module) -> dict[str, np.ndarray]:
    """Gives every parameter random values and returns them in float64, by path."""
    found = parameters_of(module)
    for i, param in enumerate(found.values()):
        param.set_value(random(*param.shape, seed=i, dtype=param.dtype) * jnp.asarray(0.3, param.dtype))
    return {path: wide(param.get_value()) for path, param in found.items()}


def plain_softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
