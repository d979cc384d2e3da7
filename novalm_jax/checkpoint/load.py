"""A checkpoint folder -> a resident model. Memory while loading: the final size and one tensor.

Knows parameters by their paths and the bytes that fill them. Refuses to know families' names for tensors, budgets, and
where arrays are to live: callers say that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from novalm_jax.checkpoint.dtypes import numpy_dtype, to_dtype
from novalm_jax.checkpoint.files import TensorReader, list_tensors
from novalm_jax.checkpoint.header import read_json
from novalm_jax.checkpoint.mapping import Assignment, WeightMap, map_weights
from novalm_jax.config import ModelConfig
from novalm_jax.errors import CheckpointError, ConfigError
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.families import find_family
from novalm_jax.models.params import parameters_of
from novalm_jax.options import check_dtype

Shardings = Callable[[Decoder], Mapping[str, jax.sharding.Sharding]]
"""Where parameters go, by path, given the model with shapes in place of arrays."""

Put = Callable[[str, np.ndarray], jax.Array]
"""Takes a parameter, by its path, from host memory to where it is to live. The buffer is not used again."""

Advance = Callable[[int], object]
"""Hears of every count of bytes that were read."""

_ALIGNMENT = 64
"""XLA's CPU backend takes over a numpy buffer with this alignment instead of copying it."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was read as far as it can be without its weights: all that can be wrong with it has been said.

    Attributes:
      folder: where it is.
      config: the model it holds.
      weights: which stored bytes fill which parameter.
    """

    folder: Path
    config: ModelConfig
    weights: WeightMap

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Reads config.json and the headers of all files.

        Raises:
          CheckpointError: no folder is given; files are missing, damaged, or do not hold what config.json asks for.
          ConfigError: config.json asks for something that is not supported.
        """
        if not isinstance(folder, str | Path) or not str(folder):
            raise CheckpointError(
                f"{folder!r:.60} is no folder. Give the folder of a downloaded checkpoint, the one that holds "
                "config.json, as a text or a Path."
            )
        folder = Path(folder)
        stored = list_tensors(folder)
        raw = read_json(folder / "config.json")
        try:
            family = find_family(raw)
            config = family.read_config(raw)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None
        shapes = {path: param.shape for path, param in parameters_of(abstract_model(config)).items()}
        return cls(folder, config, map_weights(family, shapes, stored, family.count_extra_layers(raw)))

    def load(self, dtype: str, put: Put) -> Decoder:
        """The model with its weights, each rounded once to `dtype` ("float32" or "bfloat16") and given to `put`.

        Raises:
          CheckpointError: a file went away, ends too early or cannot be read.
        """
        model = abstract_model(self.config, dtype)
        parameters = parameters_of(model)
        with TensorReader() as reader, _progress(self.weights.nbytes) as advance:
            for assignment in sorted(self.weights.assignments, key=_place):
                parameter = parameters[assignment.path]
                buffer = read_parameter(reader, assignment, np.dtype(parameter.dtype), advance)
                parameter.set_value(put(assignment.path, buffer))
        return model


def load_model(path: str | Path, dtype: str = "float32", shardings: Shardings | None = None) -> Decoder:
    """Loads a Hugging Face checkpoint folder, everything resident.

    Args:
      path: the folder that holds config.json and the .safetensors files.
      dtype: "float32" or "bfloat16"; every weight is rounded to it once, to nearest even.
      shardings: gives the sharding of each parameter by its path, such as `ShardingPlan.shardings`; None puts all on
        the default device.

    Returns:
      A Flax NNX module: `model(tokens)` maps int32 `[b, t]` to float32 logits `[b, t, v]` and is differentiable.
      Under jit pass it as an argument, `jax.jit(lambda m, t: m(t))(model, tokens)`: `jax.jit(model)` would copy the
      weights into the program.

    Raises:
      CheckpointError, ConfigError: the folder cannot be loaded; the message lists everything that is wrong.
      OptionError: another dtype.
    """
    check_dtype(dtype)
    checkpoint = Checkpoint.open(path)
    where = shardings(abstract_model(checkpoint.config)) if shardings else {}
    return checkpoint.load(dtype, lambda name, buffer: jax.device_put(buffer, where.get(name)))


def abstract_model(config: ModelConfig, dtype: str = "float32") -> Decoder:
    """The module with shapes in place of arrays: no memory is taken."""
    keys: Any = _OneKey()
    return nnx.eval_shape(lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=keys))


class _OneKey:
    """Stands in for `nnx.Rngs` where nothing is drawn. That counts its keys in arrays, and with every parameter of a
    deep model under trace that takes quadratic time."""

    def params(self) -> jax.Array:
        """A key."""
        return jax.random.key(0)


def read_parameter(
    reader: TensorReader, assignment: Assignment, dtype: np.dtype, advance: Advance = lambda count: None
) -> np.ndarray:
    """One parameter of shape `assignment.shape`, read piece by piece and rounded to `dtype`, bfloat16 or float32.

    Raises:
      CheckpointError: a file went away, ends too early or cannot be read.
    """
    whole = _aligned(assignment.shape, dtype)
    for piece in assignment.pieces:
        out = whole if piece.row is None else whole[piece.row]
        stored = numpy_dtype(piece.tensor.dtype)
        if stored == dtype:
            reader.read_into(piece.tensor, _bytes(out), piece.start)
        else:
            scratch = np.empty(piece.shape, stored)
            reader.read_into(piece.tensor, _bytes(scratch), piece.start)
            to_dtype(scratch, dtype, out)
        advance(piece.nbytes)
    return whole


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + size].view(dtype).reshape(shape)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _place(assignment: Assignment) -> tuple[str, int]:
    """Where a parameter begins on disk: reading in this order is reading forwards."""
    first = assignment.pieces[0]
    return str(first.tensor.file), first.tensor.offset + first.start


@contextmanager
def _progress(total: int) -> Iterator[Advance]:
    """A bar of bytes with their rate, on stderr when that is a terminal."""
    with _Bar(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="loading", disable=None) as bar:
        yield bar.update


class _Bar(tqdm):
    """Without tqdm's monitor, a thread that would outlive the bar."""

    monitor_interval = 0
