"""Parameters -> .safetensors files as the hub has them: one, or shards with an index.

The plan of all files comes first, from names and shapes alone; then bytes stream from a source into the files, one
parameter at a time. Knows the format and the hub's names of files. Refuses to know where numbers come from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from novalm_jax.checkpoint.atomic import Work, check_destination
from novalm_jax.checkpoint.companions import Companions, config_bytes, with_dtype
from novalm_jax.checkpoint.dtypes import numpy_dtype
from novalm_jax.checkpoint.files import INDEX, SINGLE
from novalm_jax.checkpoint.mapping import FLOATS, TensorOut, written_tensors
from novalm_jax.checkpoint.progress import Advance, bytes_bar
from novalm_jax.checkpoint.sources import FLOAT_CODES, IN_MEMORY, ModelSource, Source, common_dtype
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.families import find_family
from novalm_jax.models.families.family import Family
from novalm_jax.options import ConvertOptions
from novalm_jax.units import format_size


@dataclass(frozen=True)
class Tensor:
    """One tensor to be written: what fills it, its safetensors dtype code, and where it begins after the header."""

    out: TensorOut
    code: str
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.out.shape) * numpy_dtype(self.code).itemsize


@dataclass(frozen=True)
class Shard:
    """One file: its header, and its tensors in the order in which their sources are best read."""

    name: str
    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Plan:
    """All files of weights of a folder."""

    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, family: Family, source: Source, dtypes: Mapping[str, np.dtype] | None, shard_size: int) -> Plan:
        """Which tensor goes where, in the layout that the hub has for this family.

        Args:
          family: whose names to use.
          source: the parameters.
          dtypes: parameter path -> type to store it in; None keeps each tensor's, or the widest that its parts have.
          shard_size: most bytes of tensors in one file; a tensor that is larger has a file of its own.
        """
        tensors = []
        for out in written_tensors(family, source.shapes):
            found = [
                stored
                for part in out.parts
                for stored in ([dtypes[part.path]] if dtypes else source.dtypes(part.path, part.row))
            ]
            tensors.append(Tensor(out, FLOAT_CODES[common_dtype(found)]))
        groups = _groups(tensors, shard_size)
        names = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
        return cls(tuple(_shard(*pair) for pair in zip(names if len(groups) > 1 else [SINGLE], groups, strict=True)))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [tensor for shard in self.shards for tensor in shard.tensors]

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(shard.nbytes for shard in self.shards)

    def __str__(self) -> str:
        """What is written, in words."""
        count = f"{len(self.shards)} {'file' if len(self.shards) == 1 else 'files'}"
        return f"{len(self.tensors)} tensors in {count}, {format_size(self.nbytes)}"

    def write(self, work: Work, source: Source) -> None:
        """Writes the files that `work` does not hold yet, and the index.

        Raises:
          CheckpointError: the source cannot be read.
          WriteError: a file cannot be written.
          OptionError: the disk has no room for all of it.
        """
        missing = [shard for shard in self.shards if not work.holds(shard.name, shard.nbytes, shard.header)]
        left = sum(shard.nbytes for shard in missing)
        work.require(left)
        with bytes_bar("writing", self.nbytes, self.nbytes - left) as advance:
            for shard in missing:
                _write_shard(work, shard, source, advance)
        if len(self.shards) > 1:
            work.put(INDEX, self._index())

    def _index(self) -> bytes:
        weight_map = {tensor.out.name: shard.name for shard in self.shards for tensor in shard.tensors}
        metadata = {"total_size": sum(tensor.nbytes for tensor in self.tensors)}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(index, indent=2) + "\n").encode()


def save_model(
    model: Decoder,
    folder: str | Path,
    *,
    config: Mapping[str, Any],
    files_from: str | Path | None = None,
    shard_size: str | int = ConvertOptions.shard_size,
) -> Path:
    """Writes a model in memory as a Hugging Face folder, each parameter in its own dtype.

    Args:
      model: float32, bfloat16 or float16 parameters, on any devices of this process.
      folder: must not exist, or be empty. It comes into being at once, complete.
      config: the content of the model's config.json. It is written as it is, but for the fields that name the dtype.
      files_from: a checkpoint folder, or one that `save_orbax` wrote, whose tokenizer and other small files go along.
      shard_size: most bytes of one file, such as "5GB".

    Returns:
      The path of the folder.

    Raises:
      CheckpointError: the model is not the one that `config` describes, or a file to go along cannot be read.
      ConfigError: `config` is of no supported model.
      OptionError: the folder cannot be made there, or `shard_size` is no size.
      WriteError: it cannot be written.
    """
    size = ConvertOptions(shard_size=shard_size).shard_bytes
    destination = check_destination(folder)
    source = ModelSource(model, config)
    plan = Plan.of(find_family(config), source, None, size)
    companions = Companions.of(files_from)
    with Work(destination, IN_MEMORY, resumable=False) as work:
        companions.put(work, config_bytes(with_dtype(config, source.dtype)))
        plan.write(work, source)
        work.finish()
    return destination


def _groups(tensors: Sequence[Tensor], shard_size: int) -> list[list[Tensor]]:
    """Runs of tensors that fit into a file each."""
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return groups


def _shard(name: str, tensors: Sequence[Tensor]) -> Shard:
    """The file that the safetensors library would write. It cannot be used: it takes all tensors of a file at once."""
    # Wide types first, so that all are aligned, and names of one type in order.
    ordered = sorted(tensors, key=lambda tensor: (FLOATS.index(tensor.code), tensor.out.name))
    shard = lay_out(name, ordered, 8)
    placed = {tensor.out.name: tensor for tensor in shard.tensors}
    return replace(shard, tensors=tuple(placed[tensor.out.name] for tensor in tensors))


def lay_out(name: str, tensors: Sequence[Tensor], alignment: int) -> Shard:
    """A file of tensors in this order, whose data begin at a multiple of `alignment` bytes, 8 or more."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed, end = [], 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        placed.append(replace(tensor, offset=start))
        entries[tensor.out.name] = {
            "dtype": tensor.code,
            "shape": list(tensor.out.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % alignment)
    return Shard(name, len(text).to_bytes(8, "little") + text, tuple(placed))


def _write_shard(work: Work, shard: Shard, source: Source, advance: Advance) -> None:
    with work.writing(shard.name) as write:
        write(0, shard.header)
        advance(len(shard.header))
        for tensor in shard.tensors:
            source.keep_only({part.path for part in tensor.out.parts})
            _write_tensor(tensor, len(shard.header) + tensor.offset, source, write, advance)


def _write_tensor(
    tensor: Tensor, offset: int, source: Source, write: Callable[[int, memoryview], None], advance: Advance
) -> None:
    dtype = numpy_dtype(tensor.code)
    for part in tensor.out.parts:
        numbers = source.read(part.path, part.row, dtype)
        view = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data
        write(offset + part.start * dtype.itemsize, view)
        advance(view.nbytes)
