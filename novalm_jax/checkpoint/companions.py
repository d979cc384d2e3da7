"""What lies beside the weights of a checkpoint and goes where they go: config.json, tokenizer, template, licence.

Knows file names and the two fields of a configuration that say how weights are stored. Refuses to know weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novalm_jax.checkpoint.atomic import Work
from novalm_jax.checkpoint.files import CONFIG, FROM_OTHERS, FROM_TORCH
from novalm_jax.checkpoint.header import open_file, reason_of, unreadable
from novalm_jax.checkpoint.hub import find_folder
from novalm_jax.checkpoint.store import STORE
from novalm_jax.errors import CheckpointError, ConfigError

WEIGHTS = "weights"
"""The folder of weights in a folder that holds them as Orbax does."""

_DTYPE_FIELDS = ("dtype", "torch_dtype")
# Other forms of the weights, and lists of the files that held them. Copies would be large, or would not be true.
_WEIGHTS = (".safetensors", *FROM_TORCH, *FROM_OTHERS, ".npy", ".onnx", ".tflite")
_OF_WEIGHTS = (".index.json", ".onnx_data", ".incomplete", ".lock")
_LARGEST = 1 << 28


@dataclass(frozen=True)
class Companions:
    """Small files of a folder.

    Attributes:
      paths: the files, by name; without config.json.
      left: names of files that are too large to be anything but weights of some kind.
    """

    paths: Mapping[str, Path]
    left: tuple[str, ...]

    @classmethod
    def of(cls, folder: str | Path | None) -> Companions:
        """Finds them; there are none where there is no folder. Folders, hidden files and weights are passed over.

        Raises:
          CheckpointError: the folder or one of the files may not be read, or is a link to nowhere.
        """
        if folder is None:
            return cls({}, ())
        folder = find_folder(folder)
        paths, left = {}, []
        try:
            for name in sorted(os.listdir(folder)):
                path = folder / name
                of_weights = name in (CONFIG, STORE) or name.endswith(_WEIGHTS + _OF_WEIGHTS)
                if path.is_dir() or name.startswith(".") or of_weights:
                    continue
                file = open_file(path)
                if os.fstat(file).st_size > _LARGEST:
                    left.append(name)
                else:
                    paths[name] = path
                os.close(file)
        except OSError as error:
            raise CheckpointError(unreadable(folder, error)) from error
        return cls(paths, tuple(left))

    def put(self, work: Work, config: bytes) -> None:
        """Copies them, beside a config.json that holds `config`."""
        work.put(CONFIG, config)
        for name, path in self.paths.items():
            work.put(name, read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """All bytes of a file.

    Raises:
      CheckpointError: it cannot be read.
    """
    try:
        with os.fdopen(open_file(path), "rb") as file:
            return file.read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {reason_of(error)}.") from error


def with_dtype(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """The configuration of the same model with its weights stored in `dtype` (None: as they were).

    A field that says so is changed, also in the part about the text model; none is added.
    """
    changed = dict(config)
    if dtype is not None:
        changed |= {name: dtype for name in _DTYPE_FIELDS if name in config}
        if isinstance(inner := config.get("text_config"), Mapping):
            changed["text_config"] = with_dtype(inner, dtype)
    return changed


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """A configuration as the text of config.json, fields in their order.

    Raises:
      ConfigError: it holds something that JSON cannot.
    """
    try:
        return (json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config cannot be written as JSON: {error}.") from None


def identity_of(paths: Iterable[Path]) -> dict[str, list[int]]:
    """What tells a version of these files from another: size and time of the last change, in nanoseconds, by path."""
    found = {}
    for path in sorted(paths):
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {reason_of(error)}.") from error
        found[str(path)] = [status.st_size, status.st_mtime_ns]
    return found
