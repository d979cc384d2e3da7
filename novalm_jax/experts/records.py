"""Expert records: what one is made of, how many there are, and reading one from disk by position.

Knows which parameters hold experts. Refuses to know where a record goes. Any thread may read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from novalm_jax.checkpoint.dtypes import numpy_dtype, rounded
from novalm_jax.checkpoint.files import Range, TensorReader
from novalm_jax.checkpoint.load import Checkpoint, aligned_array
from novalm_jax.checkpoint.mapping import Piece, is_expert
from novalm_jax.checkpoint.store import checksum
from novalm_jax.config import ModelConfig, MoEConfig
from novalm_jax.errors import CheckpointError, ConfigError
from novalm_jax.kernels.experts import Weights
from novalm_jax.kernels.storage import storage_dtype
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.moe import MoE
from novalm_jax.timeline import Timeline, Track, span


class Record(NamedTuple):
    """One expert of one layer, by the numbers that the model gives them."""

    layer: int
    expert: int


def record_span(
    timeline: Timeline | None, track: Track, record: Record, nbytes: int, **more: Any
) -> AbstractContextManager[None]:
    """The time in which a record, so many bytes of it, is moved; `more` is shown with it."""
    name = f"layer {record.layer}, expert {record.expert}"
    return span(timeline, track, name, layer=record.layer, expert=record.expert, bytes=nbytes, **more)


def moe_layers(config: ModelConfig) -> dict[int, MoEConfig]:
    """The layers with routed experts, by number."""
    return {
        number: layer.feed_forward
        for number, layer in enumerate(config.layers)
        if isinstance(layer.feed_forward, MoEConfig)
    }


def count_records(config: ModelConfig) -> int:
    """Expert records of a model."""
    return sum(moe.num_experts for moe in moe_layers(config).values())


def record_layout(model: Decoder) -> Weights:
    """The arrays of a record as `jax.ShapeDtypeStruct`s, in storage form.

    `model` has experts, and may have shapes in place of arrays.

    Raises:
      ConfigError: records of some layers are unlike those of others, so that a slot does not hold either.
    """

    def of_one(stack: Any) -> Any:
        return jax.ShapeDtypeStruct(stack.shape[1:], storage_dtype(np.dtype(stack.dtype)))

    modules = [layer.feed_forward for layer in model.layers]
    first, *others = (jax.tree.map(of_one, part.experts.weights()) for part in modules if isinstance(part, MoE))
    if any(other != first for other in others):
        raise ConfigError(
            "Experts of different shapes in different layers cannot be streamed. Give more device_memory."
        )
    layout: Weights = first
    return layout


class RecordReader:
    """Reads expert records straight from the files of a checkpoint, rounded to a model's dtype as loading does it.

    Where the arrays of a record lie one after another, as in an expert store, it is one read. A timeline shows the time
    until a record is checked and rounded.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: np.dtype, timeline: Timeline | None = None):
        self._assignments = {each.path: each for each in checkpoint.weights.assignments if is_expert(each.path)}
        self._checksums = checkpoint.checksums
        self._dtype = dtype
        self._timeline = timeline
        self._reader = TensorReader()

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from disk so far."""
        return self._reader.bytes_read

    def read_into(self, record: Record, out: Weights) -> None:
        """Fills `out`, arrays in storage form, with a record.

        Raises:
          CheckpointError: a file went away, ends too early or cannot be read, or holds something else than it did when
            its checksum was made; a finite number becomes infinite. Names layer and expert, too.
        """
        try:
            self._read(record, out)
        except CheckpointError as error:
            raise CheckpointError(f"Expert {record.expert} of layer {record.layer} cannot be read. {error}") from error

    def files(self, record: Record) -> set[Path]:
        """The files that a record is read from."""
        prefix = f"layers.{record.layer}.feed_forward.experts."
        parts = (each for path, each in self._assignments.items() if path.startswith(prefix))
        return {each.row(record.expert).pieces[0].tensor.file for each in parts}

    def forget_pages(self) -> None:
        """Nothing of the files is read again soon, so that the system need not keep their pages in memory."""
        self._reader.forget_pages()

    def close(self) -> None:
        """Closes the files, once reads that are running have ended."""
        self._reader.close()

    def _read(self, record: Record, out: Weights) -> None:
        prefix = f"layers.{record.layer}.feed_forward.experts."
        wanted = [
            (self._assignments[prefix + name].row(record.expert).pieces[0], array.view(self._dtype))
            for name, array in out._asdict().items()
            if array is not None
        ]
        wanted.sort(key=lambda pair: (str(pair[0].tensor.file), pair[0].tensor.offset + pair[0].start))
        stored = [_as_stored(piece, array) for piece, array in wanted]
        ranges = [
            Range(piece.tensor, piece.start, array.reshape(-1).view(np.uint8))
            for (piece, _), array in zip(wanted, stored, strict=True)
        ]
        with record_span(self._timeline, "disk reads", record, sum(array.nbytes for array in stored)):
            for run in _runs(ranges):
                self._reader.read_run(run)
            self._verify(record, ranges[0], stored)
            for (piece, array), read in zip(wanted, stored, strict=True):
                if read is not array:
                    rounded(f"{piece.tensor.file}: tensor {piece.tensor.name}", read, self._dtype, array)

    def _verify(self, record: Record, first: Range, arrays: Sequence[np.ndarray]) -> None:
        known = self._checksums.get(record)
        if known is not None and known != checksum(arrays):
            raise CheckpointError(
                f"{first.tensor.file}: the record from byte {first.offset} of the file on is not what was written; its "
                "checksum differs. Check the disk, or convert the checkpoint that the store was made from anew."
            )


def _as_stored(piece: Piece, array: np.ndarray) -> np.ndarray:
    """The array itself, or one of the same shape in the dtype that the file has."""
    dtype = numpy_dtype(piece.tensor.dtype)
    return array if dtype == array.dtype else np.empty(array.shape, dtype)


def _runs(ranges: Sequence[Range]) -> list[list[Range]]:
    """Ranges, which are in the order of their files, those together that lie one after another."""
    runs: list[list[Range]] = []
    end: tuple[Path, int] | None = None
    for part in ranges:
        if (part.tensor.file, part.offset) != end:
            runs.append([])
        runs[-1].append(part)
        end = part.tensor.file, part.offset + part.out.nbytes
    return runs


def new_record(layout: Weights) -> Weights:
    """Memory on the host for one record."""
    return jax.tree.map(lambda leaf: aligned_array(leaf.shape, np.dtype(leaf.dtype)), layout)
