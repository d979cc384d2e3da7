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
from novalm_jax.checkpoint.mapping import Assignment, Piece, Shape, WeightMap, expert_paths, is_expert
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


def read_checksums(folder: Path, shapes: Mapping[str, Shape]) -> dict[tuple[int, int], int]:
    """(layer, expert) -> checksum, of all records of a store with parameters of these shapes.

    Raises:
      CheckpointError: store.json is damaged, of a version that is not known here, or of another model.
    """
    counts = {layer: shapes[paths[0]][0] for layer, paths in expert_paths(shapes).items()}
    records = {(layer, expert) for layer, count in counts.items() for expert in range(count)}
    content = read_json(folder / STORE)
    try:
        if content["version"] != VERSION:
            raise CheckpointError(f"{folder / STORE}: version {content['version']} is not known here; {VERSION} is.")
        checksums = {
            (int(layer), expert): int(value)
            for layer, values in content["crc32"].items()
            for expert, value in enumerate(values)
        }
        if strange := sorted(checksums.keys() ^ records):
            raise ValueError(f"expert {strange[0][1]} of layer {strange[0][0]}, there or in config.json alone")
        return checksums
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / STORE} is damaged: {error!r}. Convert the checkpoint anew.") from None


class RecordChecks:
    """Checks the records of a store whose arrays are read one after another, as a model is loaded. Threads may take
    different experts."""

    def __init__(self, folder: Path, checksums: Mapping[tuple[int, int], int], paths: Sequence[str]):
        """`paths` are the arrays that are read, all of them, in the order of the file."""
        self._folder = folder
        self._checksums = checksums
        self._last = {_layer_of(path): path for path in paths}
        self._sums = dict.fromkeys(checksums, 0)

    def took(self, path: str, expert: int, stored: np.ndarray) -> None:
        """An array of a record was read.

        Raises:
          CheckpointError: it was the last one, and the record is not what was written.
        """
        record = _layer_of(path), expert
        self._sums[record] = checksum([stored], self._sums[record])
        if self._last[record[0]] == path and self._sums[record] != self._checksums[record]:
            raise CheckpointError(
                f"{self._folder}: expert {expert} of layer {record[0]} is not what was written; its checksum differs. "
                "Check the disk, or convert the checkpoint that the store was made from anew."
            )


def _layer_of(path: str) -> int:
    """The number in layers.N.feed_forward.experts.gate, or so."""
    return int(path.split(".")[1])


def checksum(arrays: Sequence[np.ndarray], value: int = 0) -> int:
    """CRC-32 of the bytes of these arrays, one after another, and after those that `value` is of."""
    for array in arrays:
        value = zlib.crc32(array.reshape(-1).view(np.uint8).data, value)
    return value
