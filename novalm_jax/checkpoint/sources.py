"""Where the numbers of parameters come from when they are written: stored tensors, or a model in memory.

One interface, one parameter or a row of it at a time. Knows parameters by path; refuses to know the names that tensors
have in files, and files that are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, Protocol

import jax
import numpy as np

from novalm_jax.checkpoint.dtypes import numpy_dtype, rounded
from novalm_jax.checkpoint.files import TensorReader
from novalm_jax.checkpoint.load import parameter_shapes, read_parameter
from novalm_jax.checkpoint.mapping import FLOATS, Assignment, Shape, WeightMap
from novalm_jax.config import ModelConfig
from novalm_jax.errors import CheckpointError, some
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.families import find_family
from novalm_jax.models.params import parameters_of

FLOAT_CODES = {numpy_dtype(code): code for code in FLOATS}
"""The float types that weights are stored in, with their safetensors codes."""

IN_MEMORY: Final = {"source": "a model in memory"}
"""What work is made from that nobody can resume."""


class Source(Protocol):
    """Parameters that can be read. A row is one index of a parameter's first axis, None all of the parameter."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Parameter path -> shape."""

    def dtypes(self, path: str, row: int | None) -> Collection[np.dtype]:
        """The float types that these numbers are stored in: one, but for odd checkpoints."""

    def read(self, path: str, row: int | None, dtype: np.dtype) -> np.ndarray:
        """The numbers, rounded once to `dtype` where they are of another type.

        Raises:
          CheckpointError: they cannot be read.
        """

    def keep_only(self, paths: Collection[str]) -> None:
        """Lets go of what is held of other parameters."""


def common_dtype(dtypes: Collection[np.dtype]) -> np.dtype:
    """The one float type that holds all numbers of these: bfloat16 and float16 do not hold each other, float32 does."""
    return next(iter(dtypes)) if len(set(dtypes)) == 1 else np.dtype(np.float32)


class StoredSource:
    """The stored tensors of a Hugging Face folder; holds no more than what it is asked for."""

    def __init__(self, weights: WeightMap, reader: TensorReader):
        self._assignments = {assignment.path: assignment for assignment in weights.assignments}
        self._reader = reader

    @property
    def files(self) -> set[Path]:
        """The files that are read."""
        return {piece.tensor.file for assignment in self._assignments.values() for piece in assignment.pieces}

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Parameter path -> shape."""
        return {path: assignment.shape for path, assignment in self._assignments.items()}

    def dtypes(self, path: str, row: int | None) -> Collection[np.dtype]:
        """The float types of the stored tensors that these numbers come from."""
        return {numpy_dtype(piece.tensor.dtype) for piece in self._assignment(path, row).pieces}

    def read(self, path: str, row: int | None, dtype: np.dtype) -> np.ndarray:
        """The numbers, from disk."""
        return read_parameter(self._reader, self._assignment(path, row), dtype)

    def keep_only(self, paths: Collection[str]) -> None:
        """Nothing is held."""

    def _assignment(self, path: str, row: int | None) -> Assignment:
        whole = self._assignments[path]
        return whole if row is None else whole.row(row)


class ModelSource:
    """A model in memory, on whatever devices of this process. One parameter at a time is held on the host."""

    def __init__(self, model: Decoder, config: Mapping[str, Any]):
        """Takes a model and the content of its config.json.

        Raises:
          CheckpointError: the model is another one than `config` describes, or holds something else than floats.
          ConfigError: `config` is of no supported model.
        """
        described = find_family(config).read_config(config)
        self._arrays = {path: param.get_value() for path, param in parameters_of(model).items()}
        self._held = Held()
        check_parameters("This model", self.shapes, described)
        differing = [
            field.name
            for field in fields(ModelConfig)
            if field.name != "context_length" and getattr(model.config, field.name) != getattr(described, field.name)
        ]
        if differing:
            raise CheckpointError(
                f"This model is not the one that the given config describes: they differ in {', '.join(differing)}. "
                "Give the config.json of this model."
            )
        strange = [f"{path} is {array.dtype}" for path, array in self._arrays.items() if array.dtype not in FLOAT_CODES]
        if strange:
            raise CheckpointError(
                f"This model cannot be stored: {some(strange)}; float32, bfloat16 and float16 can. Cast it first."
            )

    @property
    def arrays(self) -> Mapping[str, jax.Array]:
        """Parameter path -> array, where it is."""
        return self._arrays

    @property
    def dtype(self) -> str:
        """The name of the type that most numbers have."""
        sizes: Counter[str] = Counter()
        for array in self._arrays.values():
            sizes[str(array.dtype)] += array.size
        return sizes.most_common(1)[0][0]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Parameter path -> shape."""
        return {path: tuple(array.shape) for path, array in self._arrays.items()}

    def dtypes(self, path: str, row: int | None) -> Collection[np.dtype]:
        """The type of the array."""
        return (np.dtype(self._arrays[path].dtype),)

    def read(self, path: str, row: int | None, dtype: np.dtype) -> np.ndarray:
        """The numbers, gathered from all devices that hold some."""
        whole = self._held.get(path, lambda: np.asarray(jax.device_get(self._arrays[path])))
        return rounded(path, whole if row is None else whole[row], dtype)

    def keep_only(self, paths: Collection[str]) -> None:
        """Lets go of other parameters on the host."""
        self._held.keep_only(paths)


def check_parameters(what: str, shapes: Mapping[str, Shape], config: ModelConfig) -> None:
    """Refuses parameters that are not those of `config`.

    Raises:
      CheckpointError: some are missing, are too many or have another shape; all of them in one message.
    """
    wanted = parameter_shapes(config)
    missing = [path for path in wanted if path not in shapes]
    unexpected = [path for path in shapes if path not in wanted]
    misshapen = [
        f"{path} is {list(shapes[path])}, not {list(shape)}"
        for path, shape in wanted.items()
        if path in shapes and tuple(shapes[path]) != shape
    ]
    found = [
        f"{len(names)} {heading}: {some(names)}"
        for heading, names in (("missing", missing), ("not known", unexpected), ("of another shape", misshapen))
        if names
    ]
    if found:
        raise CheckpointError(
            f"{what} does not hold the parameters that config.json asks for. {'; '.join(found)}. Check that "
            "config.json belongs to it."
        )


class Held:
    """Whole parameters on the host, for as long as rows of them are asked for."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def get(self, path: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """The parameter, made if it is not held."""
        if path not in self._arrays:
            self._arrays[path] = make()
        return self._arrays[path]

    def keep_only(self, paths: Collection[str]) -> None:
        """Lets go of all others."""
        self._arrays = {path: array for path, array in self._arrays.items() if path in paths}
