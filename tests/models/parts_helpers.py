"""What tests of a decoder's parts share: random arrays and parameters, plain float64 numpy, checks on row counts and on
how prompts are cut."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from novalm_jax.compat import compile_program
from novalm_jax.engine.functions import DECODE_ROWS, PREFILL_ROWS
from novalm_jax.kv.paged import LayerPages
from novalm_jax.kv.pages import blocks
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


def unwritten(pages: LayerPages) -> LayerPages:
    """Pages of these shapes that nobody has written: NaN, which must not count."""
    return jax.tree.map(lambda a: jnp.full(a.shape, 0x7FC0 if a.dtype == jnp.uint16 else jnp.nan, a.dtype), pages)


def same_bits_however_cut(
    step: Callable[..., tuple[jax.Array, LayerPages]], pages: LayerPages, new: Sequence[jax.Array]
) -> bool:
    """Whether each token of a prompt gets the same bits in chunks of every size that prefill is compiled for, and where
    what comes before it was computed earlier, as after a hit in the prefix index.

    `step(pages, *new, tables, starts, ends)` gives a result `[1, t, ...]` and pages; `new` are `[1, s, ...]`.
    """
    tokens, count = new[0].shape[1], len(pages.keys)
    ints, table = jax.ShapeDtypeStruct((1,), jnp.int32), np.random.default_rng(0).permutation(count).astype(np.int32)
    table[blocks(tokens) :] = count
    programs = {
        size: compile_program(
            step,
            (pages, *(jax.ShapeDtypeStruct((1, size, *a.shape[2:]), a.dtype) for a in new), table[None], ints, ints),
        )
        for size in PREFILL_ROWS
    }

    def prefilled(begin: int, end: int, most: int, pages: LayerPages) -> tuple[list[np.ndarray], LayerPages]:
        parts = []
        for start in range(begin, end, most):
            stop = min(start + most, end)
            size = next(size for size in PREFILL_ROWS if size >= stop - start)
            padding = ((0, 0), (0, size - (stop - start)))
            chunk = (np.pad(np.asarray(a)[:, start:stop], (*padding, *[(0, 0)] * (a.ndim - 2))) for a in new)
            where = table[None], np.array([start], np.int32), np.array([stop], np.int32)
            out, pages = programs[size](pages, *chunk, *where)
            parts.append(np.asarray(out)[0, : stop - start])
        return parts, pages

    most = PREFILL_ROWS[-1]
    whole = np.concatenate(prefilled(0, tokens, most, unwritten(pages))[0])
    for begin, size in ((0, 64), (1, most), (37, 64), (64, most), (192, 64), (most - 1, 64), (tokens - 1, 64)):
        before, held = prefilled(0, begin, most, unwritten(pages))
        after, _ = prefilled(begin, tokens, size, held)
        if not same_bits(np.concatenate(before + after), whole):
            return False
    return True
