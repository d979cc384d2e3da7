"""Orbax checkpoints: a folder of config.json, the tokenizer's files, and `weights`, a dictionary of path -> array.

`weights` is an ordinary Orbax checkpoint that any program can restore. It is written from arrays as they are split
over devices, and restored straight into another split and dtype. Knows Orbax's interface; refuses to know what names
tensors have elsewhere. Of Orbax it uses the classes that are neither experimental nor shorthand: `Checkpointer` with
`PyTreeCheckpointHandler` saves before it returns and leaves no thread of Python behind.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]

from novalm_jax.checkpoint.atomic import Work, check_destination
from novalm_jax.checkpoint.companions import WEIGHTS, Companions, config_bytes, with_dtype
from novalm_jax.checkpoint.dtypes import BFLOAT16, rounded
from novalm_jax.checkpoint.files import CONFIG
from novalm_jax.checkpoint.hub import find_folder
from novalm_jax.checkpoint.load import ALIGNMENT, Shardings, abstract_model, read_config
from novalm_jax.checkpoint.mapping import Shape
from novalm_jax.checkpoint.progress import bytes_bar
from novalm_jax.checkpoint.sources import (
    FLOAT_CODES,
    IN_MEMORY,
    Held,
    ModelSource,
    Source,
    check_parameters,
    common_dtype,
)
from novalm_jax.errors import CheckpointError, WriteError
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.params import parameters_of
from novalm_jax.options import check_dtype
from novalm_jax.units import format_size

_METADATA = "_METADATA"
# A device that restores part of an array reads whole chunks of it.
_CHUNK = 64 << 20
_NOTES = re.compile(r" \[[a-z_ ]+='")

Result = TypeVar("Result")


def save_orbax(
    model: Decoder, folder: str | Path, *, config: Mapping[str, Any], files_from: str | Path | None = None
) -> Path:
    """Writes a model in memory as an Orbax checkpoint, each parameter in its own dtype and as it is split.

    Args:
      model: float32, bfloat16 or float16 parameters, on any devices of this process.
      folder: must not exist, or be empty. It comes into being at once, complete.
      config: the content of the model's config.json. It is written as it is, but for the fields that name the dtype.
      files_from: a checkpoint folder whose tokenizer and other small files go along.

    Returns:
      The path of the folder.

    Raises:
      CheckpointError: the model is not the one that `config` describes, or a file to go along cannot be read.
      ConfigError: `config` is of no supported model.
      OptionError: the folder cannot be made there.
      WriteError: it cannot be written.
    """
    destination = check_destination(folder)
    source = ModelSource(model, config)
    companions = Companions.of(files_from)
    with Work(destination, IN_MEMORY, resumable=False) as work:
        companions.put(work, config_bytes(with_dtype(config, source.dtype)))
        with work.writing_folder(WEIGHTS) as path:
            _save(path, source.arrays)
        work.finish()
    return destination


def load_orbax(folder: str | Path, dtype: str | None = None, shardings: Shardings | None = None) -> Decoder:
    """Loads a folder that `save_orbax` or `python -m novalm_jax.convert --to orbax` wrote, everything resident.

    Args:
      folder: holds config.json and weights.
      dtype: "float32" or "bfloat16", to which every weight is rounded once, to nearest even; None: bfloat16 where that
        rounds nothing, else float32.
      shardings: gives the sharding of each parameter by its path, such as `ShardingPlan.shardings`, whatever the
        weights were split by when they were saved; None puts all on the default device.

    Returns:
      The model, as `load_model` returns it.

    Raises:
      CheckpointError, ConfigError: the folder is no such checkpoint, is damaged, or does not hold what its config.json
        asks for, and the message lists all of it; or a finite number would become infinite.
      OptionError: another dtype.
    """
    if dtype is not None:
        check_dtype(dtype)
    with OrbaxSource(find_folder(folder)) as source:
        model = abstract_model(source.config, dtype or "bfloat16")
        parameters = parameters_of(model)
        if dtype is None and any(source.stored[path] not in (BFLOAT16, p.dtype) for path, p in parameters.items()):
            model = abstract_model(source.config, "float32")
            parameters = parameters_of(model)
        where = shardings(model) if shardings else {}
        default = jnp.zeros(()).sharding
        arguments = {
            path: ocp.ArrayRestoreArgs(
                sharding=where.get(path, default), global_shape=param.shape, dtype=np.dtype(param.dtype)
            )
            for path, param in parameters.items()
        }
        arrays = source.restore(arguments)
        for path, param in parameters.items():
            param.set_value(arrays[path])
            if source.stored[path] != arrays[path].dtype and bool(jnp.isinf(arrays[path]).any()):
                # Orbax rounds without a word; reading once more tells whether the infinity was there.
                source.read(path, None, np.dtype(param.dtype))
                source.keep_only(())
    return model


class OrbaxSource:
    """The weights of an Orbax folder, whole parameters at a time. A context manager.

    Attributes:
      folder: where it is.
      raw: the content of its config.json.
      family: the table that config.json is read with.
      config: the model that describes.
      stored: parameter path -> the float type it is stored in.
    """

    def __init__(self, folder: Path):
        """Reads config.json and what the weights say of themselves.

        Raises:
          CheckpointError: the folder is no such checkpoint, or does not hold what its config.json asks for.
          ConfigError: config.json is of no supported model.
        """
        _require(folder)
        self.folder = folder
        self.raw, self.family, self.config = read_config(folder)
        self._path = (folder / WEIGHTS).resolve()
        self._checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        self._held = Held()
        try:
            said = self._explained(lambda: self._checkpointer.metadata(self._path)).item_metadata
            # Of weights that it cannot make sense of, Orbax says nothing.
            tree = said.tree if said is not None and isinstance(said.tree, dict) else {}
            flat = {path: leaf for path, leaf in tree.items() if hasattr(leaf, "shape")}
            self._shapes = {path: tuple(leaf.shape) for path, leaf in flat.items()}
            self.stored = {path: np.dtype(leaf.dtype) for path, leaf in flat.items()}
            check_parameters(str(folder), self._shapes, self.config)
            if strange := [f"{path} is {dtype}" for path, dtype in self.stored.items() if dtype not in FLOAT_CODES]:
                raise CheckpointError(f"{folder}: weights of a dtype that is not read: {', '.join(strange[:8])}.")
        except BaseException:
            self.close()
            raise

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Parameter path -> shape."""
        return self._shapes

    def dtypes(self, path: str, row: int | None) -> Collection[np.dtype]:
        """The float type of the stored array."""
        return (self.stored[path],)

    def read(self, path: str, row: int | None, dtype: np.dtype) -> np.ndarray:
        """The numbers, from disk; a parameter is held while rows of it are asked for."""
        arguments = {path: ocp.RestoreArgs(restore_type=np.ndarray)}
        whole = self._held.get(path, lambda: self.restore(arguments)[path])
        return rounded(f"{self.folder}: {path}", whole if row is None else whole[row], dtype)

    def keep_only(self, paths: Collection[str]) -> None:
        """Lets go of other parameters."""
        self._held.keep_only(paths)

    def restore(self, arguments: Mapping[str, ocp.RestoreArgs]) -> dict[str, Any]:
        """The arrays of these paths, as Orbax's own arguments ask for them.

        Raises:
          CheckpointError: they cannot be read.
        """
        wanted = ocp.args.PyTreeRestore(
            item=dict.fromkeys(arguments, 0), restore_args=dict(arguments), partial_restore=True
        )
        arrays: dict[str, Any] = self._explained(lambda: self._checkpointer.restore(self._path, args=wanted))
        return arrays

    def close(self) -> None:
        """Ends what Orbax keeps running."""
        self._checkpointer.close()

    def __enter__(self) -> OrbaxSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _explained(self, action: Callable[[], Result]) -> Result:
        try:
            with _quiet():
                return action()
        # TensorStore and Orbax raise bare Exception, and other types, for the same faults.
        except Exception as error:
            raise CheckpointError(
                f"{self._path}: the weights cannot be read: {_reason(error)}. Convert or save the model again."
            ) from error


@dataclass(frozen=True)
class OrbaxPlan:
    """All parameters of a source, with the types to store them in, by path."""

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, np.dtype]

    @classmethod
    def of(cls, source: Source, dtypes: Mapping[str, np.dtype] | None) -> OrbaxPlan:
        """Takes the types by path; None keeps each parameter's, or the widest of its parts."""
        if dtypes is None:
            dtypes = {path: common_dtype(source.dtypes(path, None)) for path in source.shapes}
        return cls(source.shapes, dtypes)

    def __str__(self) -> str:
        """What is written, in words."""
        return f"{len(self.shapes)} arrays, {format_size(sum(self._sizes.values()))}"

    @property
    def _sizes(self) -> dict[str, int]:
        return {path: math.prod(shape) * self.dtypes[path].itemsize for path, shape in self.shapes.items()}

    def write(self, work: Work, source: Source) -> None:
        """Writes the weights of an Orbax folder, unless they are there.

        Orbax wants all arrays of a checkpoint at once. They are put together in a scratch file first, one after
        another, and mapped: the memory they take is the system's cache, which gives way. The disk holds them twice
        for a while.

        Raises:
          CheckpointError: the source cannot be read.
          WriteError: the weights cannot be written.
          OptionError: the disk has no room for them.
        """
        if (work.folder / WEIGHTS).is_dir():
            return
        work.require(2 * sum(self._sizes.values()))
        with work.scratch(WEIGHTS) as (file, write):
            starts = self._collect(source, write)
            # A mapping is safe here: nobody else knows this file.
            with open(os.dup(file), "rb") as opened:
                mapped = np.memmap(opened, np.uint8, "r")
            with work.writing_folder(WEIGHTS) as target:
                _save(target, {path: self._array(path, mapped, start) for path, start in starts.items()})

    def _collect(self, source: Source, write: Callable[[int, memoryview], None]) -> dict[str, int]:
        """Writes all parameters one after another, and says where each begins."""
        starts, end = {}, 0
        with bytes_bar("writing", sum(self._sizes.values())) as advance:
            for path, size in self._sizes.items():
                numbers = np.ascontiguousarray(source.read(path, None, self.dtypes[path]))
                write(end, numbers.reshape(-1).view(np.uint8).data)
                source.keep_only(())
                starts[path], end = end, end + size + -size % ALIGNMENT
                advance(size)
        return starts

    def _array(self, path: str, mapped: np.ndarray, start: int) -> jax.Array:
        """A parameter as an array of the CPU that takes no memory of its own."""
        numbers = np.asarray(mapped[start : start + self._sizes[path]]).view(self.dtypes[path])
        return jax.device_put(numbers.reshape(self.shapes[path]), jax.devices("cpu")[0])


def _save(path: Path, arrays: Mapping[str, jax.Array]) -> None:
    """An Orbax checkpoint of these arrays. Beyond them it takes 1 GB, or the largest of them."""
    gigabytes = 1 + max(array.nbytes for array in arrays.values()) // 10**9
    handler = ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=gigabytes,
        save_device_host_concurrent_gb=gigabytes,
        # Weights are random in most of their bits; compressing them costs much time and saves little.
        use_compression=False,
    )
    chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK) for name in arrays}
    try:
        with _quiet(), ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(dict(arrays), save_args=chunks))
    # As above.
    except Exception as error:
        raise WriteError(f"{path} cannot be written: {_reason(error)}. See how much room its disk has.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what Orbax logs, with tracebacks of its threads, off the screen: an error says it all, once."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addFilter(_nothing)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False


def _reason(error: BaseException) -> str:
    """The first line of what was first to fail, without TensorStore's notes; of a long one the start and the end."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # The notes come in any order, and one of them is the whole specification of an array.
    line = _NOTES.split(lines[0])[0] or lines[0]
    return line if len(line) <= 300 else f"{line[:140]} ... {line[-140:]}"


def _require(folder: Path) -> None:
    """Says what a folder lacks of an Orbax checkpoint."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder {folder}. Give one that save_orbax or `--to orbax` wrote.")
    needed = {
        CONFIG: (folder / CONFIG).is_file(),
        f"{WEIGHTS}/{_METADATA}": (folder / WEIGHTS / _METADATA).is_file(),
    }
    if missing := [name for name, there in needed.items() if not there]:
        raise CheckpointError(
            f"{folder} is no Orbax checkpoint of this program, or an incomplete one: {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing. Give a folder that save_orbax or `--to orbax` wrote; a "
            "Hugging Face folder is loaded with load_model."
        )
