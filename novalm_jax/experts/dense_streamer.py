"""Dense weights in parts, on their way to the device: read, held in host memory, and uploaded in turn.

Of the parts that do not stay on the device the next one comes while the one before it computes. Rows of the embedding
never come: they are looked up where they lie. The compute thread owns this; one thread of its own moves the parts.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from novalm_jax.checkpoint.files import TensorReader
from novalm_jax.checkpoint.load import Checkpoint, aligned_array, read_parameter
from novalm_jax.checkpoint.progress import bytes_bar
from novalm_jax.compat import copy_to_device, pinned_array
from novalm_jax.errors import CheckpointError
from novalm_jax.experts.dense import DensePlan, Part, padded
from novalm_jax.experts.link import Link
from novalm_jax.kernels.storage import delete_arrays
from novalm_jax.timeline import Timeline, span

Leaves = tuple[jax.Array, ...]


class DenseReader:
    """Reads dense weights of a checkpoint from disk, rounded as loading does it. Any thread may read."""

    def __init__(self, checkpoint: Checkpoint, dtypes: Mapping[str, np.dtype]):
        """`dtypes` of all parameters, by path."""
        self._assignments = {each.path: each for each in checkpoint.weights.assignments}
        self._dtypes = dtypes
        self._reader = TensorReader()

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from disk so far."""
        return self._reader.bytes_read

    def read(self, part: Part) -> list[np.ndarray]:
        """New arrays with the parameters of a part, aligned as XLA likes it.

        Raises:
          CheckpointError: a file went away, ends too early or cannot be read; a finite number becomes infinite.
        """
        try:
            return [self._parameter(path, part.rows) for path in part.paths]
        except CheckpointError as error:
            raise CheckpointError(f"The dense weights of {part.name} cannot be read. {error}") from error

    def read_row(self, part: Part, number: int) -> np.ndarray:
        """One row of the only parameter of a part.

        Raises:
          CheckpointError: as `read`.
        """
        (row,) = self.read(part._replace(rows=(number, number + 1)))
        return row[0]

    def close(self) -> None:
        """Closes the files, once reads that are running have ended."""
        self._reader.close()

    def _parameter(self, path: str, rows: tuple[int, int] | None) -> np.ndarray:
        assignment = self._assignments[path]
        if rows is not None:
            assignment = assignment.rows(*rows)
        return read_parameter(self._reader, assignment, self._dtypes[path])


class DenseHost:
    """Dense weights in one large array of pinned host memory, read once. Nobody writes it afterwards."""

    def __init__(self, plan: DensePlan, reader: DenseReader):
        """Reads what the plan holds on the host.

        Raises:
          CheckpointError: a file cannot be read.
        """
        self.nbytes = plan.host_bytes
        self._plan = plan
        self._parts: dict[int | None, list[np.ndarray]] = {}
        self._memory: Any = None
        if not self.nbytes:
            return
        self._memory, view = pinned_array((self.nbytes,), np.dtype(np.uint8))
        end = 0
        with bytes_bar("loading dense weights", self.nbytes) as advance:
            for number, part in plan.held_on_host().items():
                held = []
                begin, end = end, end + part.nbytes
                for array in reader.read(part):
                    place = view[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
                    place[...] = array
                    held.append(place)
                    begin += padded(array.nbytes)
                self._parts[number] = held
                advance(part.nbytes)

    def find(self, number: int) -> list[np.ndarray] | None:
        """The arrays of a part; None where they are on disk alone."""
        part = self._plan.parts[number]
        if number in self._plan.on_host and number not in self._parts:
            assert part.rows is not None
            return [self._parts[None][0][slice(*part.rows)]]
        return self._parts.get(number)

    @property
    def embedding(self) -> np.ndarray | None:
        """`[v, d]`; None where it is on disk alone."""
        return self._parts[None][0] if None in self._parts else None

    def close(self) -> None:
        """Frees the memory. Nobody may use an array of it any more."""
        self._parts.clear()
        if self._memory is not None:
            self._memory.delete()
            self._memory = None


class DenseStreamer:
    """Dense weights on the device, part by part. Owns reader and host memory, which end with it at the latest.

    Attributes:
      uploads: parts that were copied to the device.
      bytes_uploaded: their bytes.
      stall_seconds: how long computing waited for parts.
    """

    def __init__(
        self,
        plan: DensePlan,
        reader: DenseReader,
        host: DenseHost,
        link: Link,
        timeline: Timeline | None = None,
    ):
        """Puts what stays on the device there, and begins with the first part that does not. A timeline shows uploads,
        with what is read from disk for them, and stalls.

        Raises:
          CheckpointError: a file cannot be read.
        """
        self.uploads = self.bytes_uploaded = 0
        self.stall_seconds = 0.0
        self._plan = plan
        self._reader = reader
        self._host = host
        self._link = link
        self._timeline = timeline
        self._kept = {number: _taken_over(reader.read(plan.parts[number])) for number in sorted(plan.on_device)}
        self._turn = plan.in_turn
        self._in_use: Leaves = ()
        self._coming: tuple[int, Future[Leaves]] | None = None
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "dense")
        # A thread of a model that nobody closed would keep its memory for ever. Not waited for: it may be what lets go
        # of this last.
        self._end_thread = weakref.finalize(self, _end, self._thread, self._closed, join=False)
        self._begin(self._turn[0] if self._turn else None)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return self._host.nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from disk."""
        return self._reader.bytes_read

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the embedding, `[n, d]`, of int32 `ids [n]` of the vocabulary.

        Raises:
          CheckpointError: a file cannot be read.
        """
        if (table := self._host.embedding) is not None:
            return table[ids]
        unique, where = np.unique(ids, return_inverse=True)
        start = time.perf_counter()
        with span(self._timeline, "stalls", self._plan.embedding.name, rows=len(unique)):
            rows = np.stack([self._reader.read_row(self._plan.embedding, int(row)) for row in unique])
        self.stall_seconds += time.perf_counter() - start
        return rows[where]

    def stays(self, number: int) -> bool:
        """Whether a part is on the device all the time."""
        return number in self._kept

    def take(self, number: int, after: Any) -> Leaves:
        """A part on the device; one that does not stay is there until the next such one is taken.

        Args:
          number: which.
          after: what was computed with the part before it, which is waited for.

        Raises:
          CheckpointError: a file cannot be read.
        """
        if number in self._kept:
            return self._kept[number]
        jax.block_until_ready(after)
        delete_arrays(self._in_use)
        start = time.perf_counter()
        with span(self._timeline, "stalls", self._plan.parts[number].name):
            if self._coming is None or self._coming[0] != number:
                # Somebody else had a turn in between.
                self._drop_coming()
                self._begin(number)
            assert self._coming is not None
            # Waited for first, and then forgotten before it is in use: an interrupt must neither leave it to nobody nor
            # in two places.
            wait([self._coming[1]])
            coming, self._coming = self._coming[1], None
            self._in_use = coming.result()
        self.stall_seconds += time.perf_counter() - start
        self._begin(self._turn[(self._turn.index(number) + 1) % len(self._turn)])
        return self._in_use

    def close(self) -> None:
        """Ends the thread, and frees memory on device and host. Closing twice is fine."""
        _end(self._thread, self._closed, join=True)
        self._end_thread.detach()
        self._drop_coming()
        delete_arrays((self._in_use, self._kept))
        self._reader.close()
        self._host.close()

    def _begin(self, number: int | None) -> None:
        self._coming = None if number is None else (number, self._thread.submit(self._upload, number))

    def _drop_coming(self) -> None:
        if self._coming is not None:
            coming = self._coming[1]
            if not coming.cancel():
                wait([coming])
            self._coming = None
            if not coming.cancelled() and coming.exception() is None:
                delete_arrays(coming.result())

    def _upload(self, number: int) -> Leaves:
        part = self._plan.parts[number]
        with span(self._timeline, "dense uploads", part.name, bytes=part.nbytes):
            held = self._host.find(number)
            read = self._reader.read(part) if held is None else []
            begin = time.perf_counter()
            arrays = _taken_over(read) if held is None else _copied(held)
            self._closed.wait(max(self._link.arrival(part.nbytes, begin) - time.perf_counter(), 0.0))
        self.uploads += 1
        self.bytes_uploaded += part.nbytes
        return arrays


def _taken_over(arrays: Sequence[np.ndarray]) -> Leaves:
    """On the device, which on the CPU takes over the memory: nobody else has these."""
    return tuple(jax.device_put(array).block_until_ready() for array in arrays)


def _copied(arrays: Sequence[np.ndarray]) -> Leaves:
    """On the device, in memory of its own."""
    return tuple(copy_to_device(array, aligned_array(array.shape, array.dtype)) for array in arrays)


def _end(thread: ThreadPoolExecutor, closed: threading.Event, join: bool) -> None:
    closed.set()
    thread.shutdown(wait=join, cancel_futures=True)
