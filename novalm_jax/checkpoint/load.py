"""A checkpoint folder -> a resident model. Memory while loading: the final size and one tensor.

Knows parameters by their paths and the bytes that fill them. Refuses to know families' names for tensors, budgets, and
where arrays are to live: callers say that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from novalm_jax.checkpoint.dtypes import numpy_dtype, rounded
from novalm_jax.checkpoint.files import CONFIG, TensorReader, list_tensors
from novalm_jax.checkpoint.header import StoredTensor, read_json
from novalm_jax.checkpoint.hub import find_folder
from novalm_jax.checkpoint.mapping import Assignment, Piece, Shape, WeightMap, is_expert, map_weights
from novalm_jax.checkpoint.progress import Advance, bytes_bar
from novalm_jax.checkpoint.store import RecordChecks, is_store, map_store, read_checksums
from novalm_jax.config import ModelConfig
from novalm_jax.errors import CheckpointError, ConfigError
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.families import find_family
from novalm_jax.models.families.family import Family
from novalm_jax.models.params import parameters_of
from novalm_jax.options import check_dtype

Shardings = Callable[[Decoder], Mapping[str, jax.sharding.Sharding]]
"""Where parameters go, by path, given the model with shapes in place of arrays."""

Put = Callable[[str, np.ndarray], jax.Array]
"""Takes a parameter, by its path, from host memory to where it is to live. The buffer is not used again."""

_READERS = max(2, min(8, os.cpu_count() or 1))
"""Threads that read a parameter."""

_PART = 8 << 20
"""Bytes that one of them reads at a time."""

_AHEAD = 32 << 20
"""Bytes that the disk is told of before they are read."""

_ANNOUNCED = 1 << 20
"""Bytes that it is told of at a time: Linux cuts longer announcements down to its own idea of reading ahead."""

_FAR_TOO_MANY = 100
"""Weights that config.json asks for, for each byte that is stored."""

ALIGNMENT = 64
"""XLA's CPU backend takes over a numpy buffer with this alignment instead of copying it."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was read as far as it can be without its weights: all that can be wrong with it has been said.

    Attributes:
      folder: where it is.
      raw: the content of its config.json.
      family: the table that config.json is read with.
      config: the model it holds.
      weights: which stored bytes fill which parameter.
      checksums: (layer, expert) -> checksum of a record's bytes, where they are known.
    """

    folder: Path
    raw: Mapping[str, Any]
    family: Family
    config: ModelConfig
    weights: WeightMap
    checksums: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: str | Path | None) -> Checkpoint:
        """Reads config.json and the headers of all files; None: of the model inside this package.

        Raises:
          CheckpointError: no folder is given; files are missing, damaged, or do not hold what config.json asks for.
          ConfigError: config.json asks for something that is not supported.
        """
        if not isinstance(folder, str | Path | None) or folder == "":
            raise CheckpointError(
                f"{folder!r:.60} is no folder. Give the folder of a downloaded checkpoint, the one that holds "
                "config.json, as a text or a Path."
            )
        folder = find_folder(folder)
        stored = list_tensors(folder)
        raw, family, config = read_config(folder)
        shapes = _shapes(folder, config, stored)
        if is_store(folder):
            weights, checksums = map_store(folder, shapes, stored), read_checksums(folder, shapes)
        else:
            weights, checksums = map_weights(family, shapes, stored, family.count_extra_layers(raw)), {}
        return cls(folder, raw, family, config, weights, checksums)

    def load(self, dtype: str, put: Put, wanted: Callable[[str], bool] = lambda path: True) -> Decoder:
        """The model with its weights, each rounded once to `dtype` ("float32" or "bfloat16") and given to `put`.

        Parameters whose path is not `wanted` stay shapes without arrays.

        Raises:
          CheckpointError: a file went away, ends too early or cannot be read; a finite number becomes infinite.
        """
        model = abstract_model(self.config, dtype)
        parameters = parameters_of(model)
        dtypes = {path: np.dtype(parameter.dtype) for path, parameter in parameters.items() if wanted(path)}
        with closing(self.read(dtypes)) as read:
            for path, buffer in read:
                parameters[path].set_value(put(path, buffer))
        return model

    def read(self, dtypes: Mapping[str, np.dtype]) -> Generator[tuple[str, np.ndarray], None, None]:
        """Parameters by their paths, those that a dtype is given for. Threads and files are there until `close`.

        Raises:
          CheckpointError: as `load`; an expert of a store is not what was written.
        """
        order = sorted((each for each in self.weights.assignments if each.path in dtypes), key=_place)
        pieces = [piece for assignment in order for piece in assignment.pieces]
        checks = self._record_checks(order)
        with (
            TensorReader() as reader,
            ThreadPoolExecutor(_READERS) as pool,
            bytes_bar("loading", sum(piece.nbytes for piece in pieces)) as advance,
        ):
            announce = _announcer(reader, pieces)

            def advanced(count: int) -> None:
                advance(count)
                announce(count)

            for assignment in order:
                path = assignment.path
                took = partial(checks.took, path) if checks is not None and is_expert(path) else None
                yield path, read_parameter(reader, assignment, dtypes[path], advanced, pool, took)

    def verify(self, reader: TensorReader) -> None:
        """Reads all records whose checksums are known.

        Raises:
          CheckpointError: one is not what was written, or cannot be read.
        """
        experts = sorted((each for each in self.weights.assignments if is_expert(each.path)), key=_place)
        checks = self._record_checks(experts)
        if checks is not None:
            size = sum(piece.nbytes for each in experts for piece in each.pieces)
            with bytes_bar("checking", size) as advance:
                for each in experts:
                    for expert, piece in enumerate(each.pieces):
                        stored = np.empty(piece.nbytes, np.uint8)
                        reader.read_into(piece.tensor, stored, piece.start)
                        checks.took(each.path, expert, stored)
                        advance(piece.nbytes)

    def _record_checks(self, order: Sequence[Assignment]) -> RecordChecks | None:
        """Checks of records, where all of their arrays are read and their checksums are known."""
        experts = [each.path for each in order if is_expert(each.path)]
        if not experts or len(experts) < sum(is_expert(each.path) for each in self.weights.assignments):
            return None
        return RecordChecks(self.folder, self.checksums, experts) if self.checksums else None


def load_model(path: str | Path | None, dtype: str = "float32", shardings: Shardings | None = None) -> Decoder:
    """Loads a Hugging Face checkpoint folder, everything resident.

    Args:
      path: the folder that holds config.json and the .safetensors files, or the name of a model in the Hugging Face
        cache, such as org/name; None for the model inside this package.
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


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The shape of every parameter, by its path."""
    return {path: tuple(param.shape) for path, param in parameters_of(abstract_model(config)).items()}


def parameter_dtypes(config: ModelConfig, dtype: str) -> dict[str, np.dtype]:
    """The type of every parameter, by its path, in a model of `dtype`: some stay float32 in any."""
    return {path: np.dtype(param.dtype) for path, param in parameters_of(abstract_model(config, dtype)).items()}


def read_config(folder: Path) -> tuple[dict[str, Any], Family, ModelConfig]:
    """The content of a folder's config.json, the table that it is read with, and the model that it describes.

    Raises:
      CheckpointError: it cannot be read.
      ConfigError: it is of no supported model.
    """
    raw = read_json(folder / CONFIG)
    try:
        family = find_family(raw)
        return raw, family, family.read_config(raw)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None


def _shapes(folder: Path, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, Shape]:
    """The shape of every parameter.

    Raises:
      CheckpointError: config.json asks for so much more than there is that a list of it would help nobody, and could
        take any time and memory to make.
    """
    asked, there = f"{len(config.layers)} layers", f"{len(stored)} tensors"
    if len(config.layers) <= len(stored):
        shapes = parameter_shapes(config)
        weights, size = sum(map(math.prod, shapes.values())), sum(tensor.nbytes for tensor in stored.values())
        if weights <= _FAR_TOO_MANY * size:
            return shapes
        asked, there = f"{weights} weights", f"{size} bytes of them"
    raise CheckpointError(
        f"{folder}: config.json asks for {asked}, and the files hold only {there}. Check that config.json belongs to "
        "these files and that the download is complete."
    )


class _OneKey:
    """Stands in for `nnx.Rngs` where nothing is drawn. That counts its keys in arrays, and with every parameter of a
    deep model under trace that takes quadratic time."""

    def params(self) -> jax.Array:
        """A key."""
        return jax.random.key(0)


def read_parameter(
    reader: TensorReader,
    assignment: Assignment,
    dtype: np.dtype,
    advance: Advance = lambda count: None,
    pool: Executor | None = None,
    took: Callable[[int, np.ndarray], None] | None = None,
) -> np.ndarray:
    """One parameter of shape `assignment.shape`, read part by part and rounded to `dtype`, bfloat16 or float32.

    With a pool its threads read: one waits for the disk while another rounds, or first touches new memory. Beside the
    parameter each takes the memory of one part. `took` is given the rows that are stored one by one, each as a whole
    and as it is stored.

    Raises:
      CheckpointError: a file went away, ends too early or cannot be read; a finite number becomes infinite; or `took`
        says so.
    """
    whole = aligned_array(assignment.shape, dtype)

    def read(part: _Part) -> int:
        stored = numpy_dtype(part.tensor.dtype)
        read = part.out if stored == dtype else np.empty(part.out.shape, stored)
        reader.read_into(part.tensor, _bytes(read), part.start)
        if took is not None and part.row is not None:
            took(part.row, read)
        if read is not part.out:
            rounded(f"{part.tensor.file}: tensor {part.tensor.name}", read, dtype, part.out)
        return read.nbytes

    parts = [part for piece in assignment.pieces for part in _parts(piece, whole, rows_whole=took is not None)]
    for count in map(read, parts) if pool is None else pool.map(read, parts):
        advance(count)
    return whole


class _Part(NamedTuple):
    """Bytes of a tensor, from `start` on, the place in memory for them, and the row that they are of; None: several."""

    tensor: StoredTensor
    start: int
    out: np.ndarray
    row: int | None


def _parts(piece: Piece, whole: np.ndarray, rows_whole: bool) -> Iterator[_Part]:
    """A piece in parts of `_PART` bytes, or of one row where that takes more; or as a whole, where it fills a row."""
    out = whole if piece.row is None else whole[piece.row]
    row_bytes = piece.nbytes // max(1, len(out))
    step = max(1, len(out)) if rows_whole and piece.row is not None else max(1, _PART // max(1, row_bytes))
    for row in range(0, len(out), step):
        yield _Part(piece.tensor, piece.start + row * row_bytes, out[row : row + step], piece.row)


def _announcer(reader: TensorReader, pieces: Sequence[Piece]) -> Advance:
    """Announces the first pieces, and gives a function that goes on whenever some bytes of them were read.

    The rows of a parameter often lie among those of others. The system sees jumps, and reads nothing ahead by itself.
    """
    ranges = (
        (piece.tensor, piece.start + start, min(_ANNOUNCED, piece.nbytes - start))
        for piece in pieces
        for start in range(0, piece.nbytes, _ANNOUNCED)
    )
    room = 0

    def announce(count: int) -> None:
        nonlocal room
        room += count
        while room > 0 and (found := next(ranges, None)):
            reader.announce(*found)
            room -= found[2]

    announce(_AHEAD)
    return announce


def aligned_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that XLA takes over as it is."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + size].view(dtype).reshape(shape)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _place(assignment: Assignment) -> tuple[str, int]:
    """Where a parameter begins on disk: reading in this order is reading forwards."""
    first = assignment.pieces[0]
    return str(first.tensor.file), first.tensor.offset + first.start
