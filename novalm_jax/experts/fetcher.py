"""Brings expert records from disk and host memory to the device, in the order in which they are wanted.

Threads: some readers take records from disk, into a slot of the host tier or, where there is none, into a read buffer.
One uploader copies them to the device and gives slot or buffer free again. The copy is the compute thread's, which puts
it into a slot of the device and says so. At most `IN_FLIGHT` copies exist at a time; prefetches leave one for demand.

One lock guards everything, and nobody holds it while bytes move. What fails, fails every wait at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto

import jax
import numpy as np

from novalm_jax.compat import copy_to_device, device_shares_memory
from novalm_jax.errors import EngineError
from novalm_jax.experts.host_tier import HostTier
from novalm_jax.experts.link import Link
from novalm_jax.experts.records import Record, RecordReader, new_record, record_span
from novalm_jax.experts.slots import NOWHERE
from novalm_jax.kernels.experts import Weights
from novalm_jax.kernels.storage import tree_bytes
from novalm_jax.timeline import Timeline

READERS = 2
"""Threads that read from disk; each record is several ranges, which are read one after another."""

IN_FLIGHT = 3
"""Copies on the device that are in no slot yet: one goes into its slot, one is made meanwhile, and one is demand's."""


class Stage(Enum):
    """How far a record has come."""

    WANTED = auto()
    READING = auto()
    IN_MEMORY = auto()
    UPLOADING = auto()
    THERE = auto()


_HOLDS_COPY = (Stage.UPLOADING, Stage.THERE)


@dataclass(eq=False)
class Fetch:
    """A record on its way to the device.

    Attributes:
      record: which.
      step: the step that it is fetched in.
      urgent: whether something waits for it; otherwise it may turn out to be wanted.
      stage: how far it has come.
      place: its slot of the host tier, or the number of its read buffer, while it is in memory.
      copy: which of the copies on the device it is, while it is one.
      arrays: the record on the device, once it is there.
    """

    record: Record
    step: int
    urgent: bool
    stage: Stage = Stage.WANTED
    place: int = NOWHERE
    copy: int = NOWHERE
    arrays: Weights | None = None


class Fetcher:
    """Moves records. Its threads live until `close`.

    Attributes:
      uploads: records that were copied to the device.
      record_bytes: bytes of a record.
      host_bytes: bytes of the host tier, or of the read buffers where there is none.
      link: what uploads go over.
    """

    def __init__(
        self,
        reader: RecordReader,
        layout: Weights,
        host: HostTier | None,
        link: Link,
        timeline: Timeline | None = None,
    ):
        """Starts the threads.

        Args:
          reader: is closed with this.
          layout: the arrays of a record.
          host: the host tier, closed with this; None where there is none.
          link: what uploads go over.
          timeline: shows the uploads.
        """
        self.uploads = 0
        self.record_bytes = tree_bytes(layout)
        self._reader = reader
        self._host = host
        self._buffers = [new_record(layout) for _ in range(READERS + 1)] if host is None else []
        self._places = len(self._buffers) if host is None else len(host.table)
        self.host_bytes = self.record_bytes * self._places
        self.link = link
        self._timeline = timeline
        # The lock itself, and not its condition, is entered: an interrupt cannot come between taking and giving it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # The one truth about what is where: an interrupt can come between any two instructions of the compute thread,
        # and must find nothing between two places.
        self._under_way: dict[Record, Fetch] = {}
        # Copies that go into a slot, until they are there, and their numbers.
        self._settling: list[tuple[jax.Array, int]] = []
        self._copies = [new_record(layout) if device_shares_memory() else None for _ in range(IN_FLIGHT)]
        self._error: BaseException | None = None
        self._closed = False
        targets: list[Callable[[], None]] = [self._read_next] * READERS + [self._upload_next]
        self._threads = [threading.Thread(target=self._work, args=(target,), daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from disk."""
        return self._reader.bytes_read

    @property
    def failed(self) -> bool:
        """Whether an error ended the threads, so that nothing comes any more."""
        return self._error is not None

    def on_host(self) -> np.ndarray:
        """Which records are in the host tier, bool `[layers, experts]`, or False for none."""
        with self._lock:
            return np.array(False) if self._host is None else self._host.table.table != NOWHERE

    def fetch(self, record: Record, step: int, urgent: bool) -> Fetch:
        """Wants a record. One that is under way is not fetched again, but becomes urgent if this is.

        Raises:
          CheckpointError, EngineError: a read failed earlier, or this is closed.
        """
        with self._lock:
            self._check()
            fetch = self._under_way.get(record) or Fetch(record, step, urgent)
            fetch.urgent |= urgent
            fetch.step = step
            self._look_up(fetch)
            if self._host is not None and fetch.stage is Stage.IN_MEMORY and record not in self._under_way:
                self._host.use(record, step)
            self._under_way[record] = fetch
            self._changed.notify_all()
            return fetch

    def arrived(self, fetches: Collection[Fetch], wait: bool) -> list[Fetch]:
        """Those whose arrays are there; with `wait` at least one, if there are any.

        Raises:
          CheckpointError, EngineError: a read failed, or this was closed meanwhile.
        """

        def there() -> list[Fetch]:
            return [fetch for fetch in fetches if fetch.stage is Stage.THERE]

        with self._lock:
            if wait and fetches:
                self._changed.wait_for(lambda: self._stopped() or bool(there()))
            self._check()
            return there()

    def inserted(self, fetch: Fetch, done: jax.Array) -> None:
        """The arrays of a fetch go into a slot, which is complete once `done` is there; they are let go of."""
        with self._lock:
            self._settling.append((done, fetch.copy))
            self._let_go(fetch)

    def dropped(self, fetch: Fetch) -> None:
        """The arrays of a fetch are not wanted; they are let go of."""
        with self._lock:
            self._let_go(fetch)

    def forget(self, fetches: Collection[Fetch]) -> list[Fetch]:
        """Nobody wants these any more. Returns those that come all the same, because they are under way already."""
        # What was read into a read buffer would be lost, and waits for its upload.
        idle = (Stage.WANTED,) if self._host is None else (Stage.WANTED, Stage.IN_MEMORY)
        with self._lock:
            for fetch in fetches:
                if fetch.stage in idle:
                    self._leave(fetch)
            return [fetch for fetch in fetches if self._under_way.get(fetch.record) is fetch]

    def calm_down(self) -> list[Fetch]:
        """Nothing waits for what is under way any more, all of which is returned."""
        with self._lock:
            for fetch in self._under_way.values():
                fetch.urgent = False
            return list(self._under_way.values())

    def end(self) -> None:
        """Has the threads end, and every wait, without waiting for them: any thread may call it, also one of them."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads, after reads and copies that are under way, and frees host memory. Every wait ends."""
        self.end()
        for thread in self._threads:
            thread.join()
        self._reader.close()
        if self._host is not None:
            self._host.close()
        for fetch in self._under_way.values():
            fetch.arrays = None
        for held in (self._under_way, self._settling, self._buffers, self._copies):
            held.clear()

    def _let_go(self, fetch: Fetch) -> None:
        self._leave(fetch)
        fetch.arrays = None
        self._changed.notify_all()

    def _leave(self, fetch: Fetch) -> None:
        if self._under_way.get(fetch.record) is fetch:
            del self._under_way[fetch.record]

    def _look_up(self, fetch: Fetch) -> None:
        """Finds a record that nothing has been done for in the host tier, or that it has left it meanwhile."""
        if self._host is not None and fetch.stage in (Stage.WANTED, Stage.IN_MEMORY):
            fetch.place = self._host.table.find(fetch.record)
            fetch.stage = Stage.WANTED if fetch.place == NOWHERE else Stage.IN_MEMORY

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise EngineError("Experts are not fetched any more: the LLM is closed.")

    def _stopped(self) -> bool:
        return self._closed or self._error is not None

    def _work(self, step: Callable[[], None]) -> None:
        try:
            while not self._stopped():
                step()
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
                self._changed.notify_all()

    def _next(self, stage: Stage, room: int) -> Fetch | None:
        """What is at this stage and may go on, where there is room for so many: the first urgent one, else the first.
        One that is not urgent leaves room for one that is, which it may have to wait for later."""
        ready = [fetch for fetch in self._under_way.values() if fetch.stage is stage and room > (not fetch.urgent)]
        return next((fetch for fetch in ready if fetch.urgent), ready[0] if ready else None)

    # --- readers ---

    def _read_next(self) -> None:
        with self._lock:
            self._changed.wait_for(lambda: self._stopped() or self._to_read() is not None)
            if self._stopped() or (fetch := self._to_read()) is None:
                return
            self._look_up(fetch)
            if fetch.stage is not Stage.WANTED:
                return
            held = self._held()
            if self._host is None:
                fetch.place = next(place for place in range(self._places) if place not in held)
            else:
                fetch.place = self._host.make_room(fetch.record, fetch.step, held)
            fetch.stage = Stage.READING
        self._reader.read_into(fetch.record, self._memory(fetch))
        with self._lock:
            if self._host is not None:
                self._host.fill(fetch.record, fetch.place)
                self._host.use(fetch.record, fetch.step)
            fetch.stage = Stage.IN_MEMORY
            self._changed.notify_all()

    def _to_read(self) -> Fetch | None:
        return self._next(Stage.WANTED, self._places - len(self._held()))

    def _held(self) -> set[int]:
        """Host slots, or read buffers, that are in use. A prefetch only holds its slot of the host tier while it moves:
        until then it may lose it to something urgent."""
        moving = (Stage.READING, Stage.UPLOADING)
        return {
            fetch.place
            for fetch in self._under_way.values()
            if fetch.stage in moving or (fetch.stage is Stage.IN_MEMORY and (fetch.urgent or self._host is None))
        }

    def _memory(self, fetch: Fetch) -> Weights:
        return self._buffers[fetch.place] if self._host is None else self._host.memory(fetch.place)

    # --- the uploader ---

    def _upload_next(self) -> None:
        with self._lock:
            self._changed.wait_for(lambda: self._stopped() or self._to_upload() is not None or bool(self._settling))
            if self._stopped():
                return
            fetch, settling = self._to_upload(), list(self._settling)
            if fetch is not None:
                self._look_up(fetch)
                if fetch.stage is not Stage.IN_MEMORY:
                    self._changed.notify_all()
                    return
                in_use = self._copies_in_use()
                fetch.copy = next(copy for copy in range(IN_FLIGHT) if copy not in in_use)
                fetch.stage = Stage.UPLOADING
        if fetch is None:
            jax.block_until_ready([done for done, _ in settling])
            with self._lock:
                del self._settling[: len(settling)]
            return
        with record_span(self._timeline, "uploads", fetch.record, self.record_bytes, demand=fetch.urgent):
            arrays = self._copied(fetch)
        with self._lock:
            fetch.arrays = arrays
            fetch.stage = Stage.THERE
            self.uploads += 1
            self._changed.notify_all()

    def _copied(self, fetch: Fetch) -> Weights:
        """A copy of a record on the device, after the time that the link takes for it."""
        begin = time.perf_counter()
        memory = self._copies[fetch.copy]
        to = (memory,) if memory is not None else ()
        arrays: Weights = jax.tree.map(copy_to_device, self._memory(fetch), *to)
        if (left := self.link.arrival(self.record_bytes, begin) - time.perf_counter()) > 0:
            with self._lock:
                self._changed.wait_for(self._stopped, timeout=left)
        return arrays

    def _to_upload(self) -> Fetch | None:
        return self._next(Stage.IN_MEMORY, IN_FLIGHT - len(self._copies_in_use()))

    def _copies_in_use(self) -> set[int]:
        held = {fetch.copy for fetch in self._under_way.values() if fetch.stage in _HOLDS_COPY}
        return held | {copy for _, copy in self._settling}
