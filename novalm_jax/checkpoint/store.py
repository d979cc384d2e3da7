"""The expert store: a checkpoint laid out for streaming, in files that the safetensors library reads as well.

The first file holds the dense weights, each further one the experts of a layer. The arrays of an expert lie one after
another, so that a record is one read, and every record begins at a multiple of 4096 bytes. `store.json` has a checksum
of each record. Tensors are named by the paths of parameters, with the number of the expert behind; `pad` is what lies
between two records.

This file reads; `store_write` writes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from novalm_jax.checkpoint.header import StoredTensor, read_json
from novalm_jax.checkpoint.mapping import Assignment, Piece, Shape, WeightMap, is_expert
from novalm_jax.errors import CheckpointError, some

STORE = "store.json"
"""The file that makes a folder a store."""

VERSION = 1
"""Of the layout."""

PAD = "pad."
"""How tensors are named that only fill up."""


def is_store(folder: Path) -> bool:
    """Whether a folder is a store."""
    return (folder / STORE).is_file()


def map_store(folder: Path, shapes: Mapping[str, Shape], stored: Mapping[str, StoredTensor]) -> WeightMap:
    """Which tensors of a store fill which parameters.

    Raises:
      CheckpointError: tensors are missing, left over, or of another shape than config.json asks for.
    """
    assignments, used, wrong = [], set[str](), list[str]()
    for path, shape in shapes.items():
        rows: list[tuple[str, Shape, int | None]] = [(path, shape, None)]
        if is_expert(path):
            rows = [(f"{path}.{expert}", shape[1:], expert) for expert in range(shape[0])]
        pieces = []
        for name, row_shape, row in rows:
            used.add(name)
            if name not in stored:
                wrong.append(f"{name} is missing")
            elif stored[name].shape != row_shape:
                wrong.append(f"{name} is {list(stored[name].shape)}, not {list(row_shape)}")
            else:
                pieces.append(Piece(stored[name], 0, row_shape, row))
        assignments.append(Assignment(path, shape, tuple(pieces)))
    wrong += [f"{name} is not known" for name in stored if name not in used and not name.startswith(PAD)]
    if wrong:
        raise CheckpointError(f"{folder}: this store does not fit its config.json: {some(wrong)}. Convert it anew.")
    return WeightMap(tuple(assignments), ())


def read_checksums(folder: Path) -> dict[tuple[int, int], int]:
    """(layer, expert) -> checksum, of all records of a store.

    Raises:
      CheckpointError: store.json is damaged, or of a version that is not known here.
    """
    content = read_json(folder / STORE)
    try:
        if content["version"] != VERSION:
            raise CheckpointError(f"{folder / STORE}: version {content['version']} is not known here; {VERSION} is.")
        return {
            (int(layer), expert): int(value)
            for layer, values in content["crc32"].items()
            for expert, value in enumerate(values)
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / STORE} is damaged: {error!r}. Convert the checkpoint anew.") from None


def checksum(arrays: Sequence[np.ndarray]) -> int:
    """CRC-32 of the bytes of these arrays, one after another."""
    value = 0
    for array in arrays:
        value = zlib.crc32(array.reshape(-1).view(np.uint8).data, value)
    return value
