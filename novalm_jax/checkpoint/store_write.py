"""Writes an expert store; `store` says what that is, and reads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from novalm_jax.checkpoint.atomic import Work
from novalm_jax.checkpoint.dtypes import numpy_dtype
from novalm_jax.checkpoint.files import Range, TensorReader, list_tensors
from novalm_jax.checkpoint.header import StoredTensor
from novalm_jax.checkpoint.mapping import Part, Shape, TensorOut, expert_paths, is_expert
from novalm_jax.checkpoint.progress import bytes_bar
from novalm_jax.checkpoint.sources import FLOAT_CODES, Source, common_dtype
from novalm_jax.checkpoint.store import PAD, STORE, VERSION, checksum
from novalm_jax.checkpoint.write import Plan, Tensor, lay_out

ALIGNMENT = 4096
"""A record begins at a multiple of this: disks and direct reads work in such blocks."""


@dataclass(frozen=True)
class StorePlan:
    """All files of a store: what goes where, and the shapes of its parameters."""

    plan: Plan
    shapes: Mapping[str, Shape]

    @classmethod
    def of(cls, source: Source, dtypes: Mapping[str, np.dtype] | None) -> StorePlan:
        """Which tensor goes where; `dtypes` as for `Plan.of`."""

        def code(path: str, row: int | None) -> str:
            return FLOAT_CODES[common_dtype([dtypes[path]] if dtypes else source.dtypes(path, row))]

        dense = [
            Tensor(TensorOut(path, shape, (Part(path, None, 0, shape),)), code(path, None))
            for path, shape in source.shapes.items()
            if not is_expert(path)
        ]
        files = [sorted(dense, key=lambda tensor: -numpy_dtype(tensor.code).itemsize)]
        for layer, paths in expert_paths(source.shapes).items():
            tensors: list[Tensor] = []
            for expert in range(source.shapes[paths[0]][0]):
                tensors += _pad(sum(tensor.nbytes for tensor in tensors), f"{layer}.{expert}")
                for path in paths:
                    shape = source.shapes[path][1:]
                    out = TensorOut(f"{path}.{expert}", shape, (Part(path, expert, 0, shape),))
                    tensors.append(Tensor(out, code(path, expert)))
            files.append(tensors)
        names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
        shards = (lay_out(name, tensors, ALIGNMENT) for name, tensors in zip(names, files, strict=True))
        return cls(Plan(tuple(shards)), source.shapes)

    def __str__(self) -> str:
        """What is written, in words."""
        return f"an expert store, {self.plan}"

    def write(self, work: Work, source: Source) -> None:
        """Writes the files that `work` does not hold yet, and then, of what the disk gives back, the checksums.

        Raises:
          CheckpointError, WriteError, OptionError: as `Plan.write`.
        """
        self.plan.write(work, source)
        stored = list_tensors(work.folder)
        layers = {
            layer: [[stored[f"{path}.{expert}"] for path in paths] for expert in range(self.shapes[paths[0]][0])]
            for layer, paths in expert_paths(self.shapes).items()
        }
        sums: dict[int, list[int]] = {}
        size = sum(tensor.nbytes for records in layers.values() for record in records for tensor in record)
        with TensorReader() as reader, bytes_bar("checking", size) as advance:
            for layer, records in layers.items():
                sums[layer] = []
                for record in records:
                    sums[layer].append(checksum(_read(reader, record)))
                    advance(sum(tensor.nbytes for tensor in record))
        made_from = hashlib.sha256(json.dumps(work.identity, sort_keys=True).encode()).hexdigest()
        work.put(STORE, json.dumps({"version": VERSION, "source": made_from, "crc32": sums}).encode())


def _pad(end: int, name: str) -> list[Tensor]:
    length = -end % ALIGNMENT
    return [Tensor(TensorOut(PAD + name, (length,), ()), "U8")] if length else []


def _read(reader: TensorReader, tensors: Sequence[StoredTensor]) -> list[np.ndarray]:
    arrays = [np.empty(tensor.nbytes, np.uint8) for tensor in tensors]
    reader.read_run([Range(tensor, 0, array) for tensor, array in zip(tensors, arrays, strict=True)])
    return arrays
