"""What tests of a decoder's parts share: random arrays and parameters, plain float64 numpy, a check on row counts."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from novalm_jax.compat import compile_program
from novalm_jax.engine.functions import DECODE_ROWS
from novalm_jax.models.params import parameters_of

Module = TypeVar("Module", bound=nnx.Module)


def random(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def random_module(make: Callable[[nnx.Rngs], Module]) -> tuple[Module, dict[str, np.ndarray]]:
    """A module with random parameters, none of them as it is made, and these in float64, by path."""
    # Its own initial values would cost a program for each shape.
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    found = parameters_of(module)
    for i, param in enumerate(found.values()):
        drawn = np.random.default_rng((i, *param.shape)).standard_normal(param.shape)
        param.set_value(jnp.asarray(drawn * 0.3, param.dtype))
    return module, {path: wide(param.get_value()) for path, param in found.items()}


def plain_softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def plain_rms(x: np.ndarray, eps: float, scale: np.ndarray | float = 1.0) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def plain_rotation(x: np.ndarray, positions: np.ndarray, theta: float, dim: int, *, pairs: bool = False) -> np.ndarray:
    """The first `dim` of `x [t, h, c]`, as complex numbers, each turned by position * theta^(-2i / dim)."""
    angle = positions[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    part = x[..., :dim]
    numbers = part[..., ::2] + 1j * part[..., 1::2] if pairs else part[..., : dim // 2] + 1j * part[..., dim // 2 :]
    turned = numbers * np.exp(1j * angle)[:, None, :]
    whole = np.stack if pairs else np.concatenate
    parts = whole([turned.real, turned.imag], axis=-1).reshape(part.shape)
    return np.concatenate([parts, x[..., dim:]], axis=-1)


def attended(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    start: int,
    scale: float,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One sequence, one head and query at a time: q `[t, h, c]` from position `start`, k and v `[s, g, c]`."""
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for i, head in np.ndindex(*q.shape[:2]):
        group, at = head // (q.shape[1] // k.shape[1]), start + i
        seen = [
            j
            for j in range(at + 1)
            if (window is None or at - j < window) and (chunk is None or j // chunk == at // chunk)
        ]
        powers = np.exp(k[seen, group] @ q[i, head] * scale)
        rest = 0.0 if sinks is None else np.exp(sinks[head])
        out[i, head] = powers @ v[seen, group] / (powers.sum() + rest)
    return out


def rows_do_not_depend_on_company(
    function: Callable[..., jax.Array], arguments_of: Callable[[int], Sequence[Any]]
) -> bool:
    """Whether the first rows of a result have the same bits for every row count that decode is compiled for."""
    found = []
    for rows in DECODE_ROWS:
        arguments = arguments_of(rows)
        found.append(np.asarray(compile_program(function, arguments)(*arguments))[: DECODE_ROWS[0]])
    return all(same_bits(found[0], more) for more in found)
