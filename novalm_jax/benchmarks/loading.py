"""How fast weights come from disk: the loader beside a plain sequential read of the same files, in turns.

Knows files and times. Measures the host's side alone: reading, rounding and assembling parameters where they are to
lie. Rates depend on the disk and on what else runs; the ratio of the two is what counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from novalm_jax.checkpoint.header import open_file, unreadable
from novalm_jax.checkpoint.load import Checkpoint, parameter_dtypes
from novalm_jax.errors import CheckpointError
from novalm_jax.options import BenchOptions
from novalm_jax.units import format_size

_BUFFER = 16 << 20  # of the plain read; it is used again and again, as a copy of a file would


@dataclass(frozen=True)
class LoadRates:
    """What was measured. A plain read takes all `file_bytes`, the loader the `weight_bytes` that parameters need.

    Attributes:
      cold: whether the system could be asked to forget the files before each reading.
      open_seconds: config.json, headers, and the plan of which bytes go where; not in the rates.
      plain_seconds, load_seconds: one time for each round.
    """

    model: str
    model_type: str
    dtype: str
    files: int
    file_bytes: int
    weight_bytes: int
    cold: bool
    open_seconds: float
    plain_seconds: tuple[float, ...]
    load_seconds: tuple[float, ...]

    @property
    def plain_rate(self) -> float:
        """Bytes a second, in the median round."""
        return self.file_bytes / median(self.plain_seconds)

    @property
    def load_rate(self) -> float:
        """Bytes a second, in the median round."""
        return self.weight_bytes / median(self.load_seconds)

    @property
    def ratio(self) -> float:
        """The loader's rate as a part of the plain one."""
        return self.load_rate / self.plain_rate

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON; rates in MB (10^6 bytes) a second."""
        rates = {"plain_mb_per_second": self.plain_rate / 1e6, "load_mb_per_second": self.load_rate / 1e6}
        return asdict(self) | rates | {"ratio": self.ratio}

    def __str__(self) -> str:
        cache = "cold: forgotten before each reading" if self.cold else "warm: this system cannot be asked to forget"
        rows = [
            ("model", f"{self.model} ({self.model_type}, to {self.dtype})"),
            ("files", f"{self.files}, {format_size(self.file_bytes)}"),
            ("page cache", cache),
            ("plain read", _rates(self.plain_rate, self.file_bytes, self.plain_seconds)),
            ("loader", _rates(self.load_rate, self.weight_bytes, self.load_seconds)),
            ("ratio", f"{self.ratio:.2f}"),
            ("opening", f"{self.open_seconds:.2f} s before that"),
        ]
        return "\n".join(f"{name:<11} {value}" for name, value in rows)


def measure_loading(model: str | Path, options: BenchOptions) -> LoadRates:
    """Reads the weights of a checkpoint `rounds` times in each way, the ways in turns.

    Raises:
      CheckpointError, ConfigError: as `load_model`.
    """
    start = time.perf_counter()
    checkpoint = Checkpoint.open(model)
    open_seconds = time.perf_counter() - start
    pieces = [piece for assignment in checkpoint.weights.assignments for piece in assignment.pieces]
    files = sorted({piece.tensor.file for piece in pieces})

    dtypes = parameter_dtypes(checkpoint.config, options.dtype)

    def load() -> None:
        with closing(checkpoint.read(dtypes)) as read:
            held = dict(read)
        assert held.keys() == dtypes.keys()

    plain_seconds: list[float] = []
    load_seconds: list[float] = []
    for number in range(options.rounds):
        ways = [(plain_seconds, lambda: read_plainly(files)), (load_seconds, load)]
        # Neither always comes second.
        for times, way in ways if number % 2 == 0 else reversed(ways):
            cold = forget(files)
            times.append(_seconds(way))
    return LoadRates(
        model=str(model),
        model_type=checkpoint.config.model_type,
        dtype=options.dtype,
        files=len(files),
        file_bytes=sum(file.stat().st_size for file in files),
        weight_bytes=checkpoint.weights.nbytes,
        cold=cold,
        open_seconds=open_seconds,
        plain_seconds=tuple(plain_seconds),
        load_seconds=tuple(load_seconds),
    )


def read_plainly(files: Sequence[Path]) -> int:
    """Reads files from their beginning to their end, one after another; returns the bytes.

    Raises:
      CheckpointError: a file cannot be read.
    """
    buffer, total = bytearray(_BUFFER), 0
    for path in files:
        with os.fdopen(open_file(path), "rb", buffering=0) as file:
            try:
                while count := file.readinto(buffer):
                    total += count
            except OSError as error:
                raise CheckpointError(unreadable(path, error)) from error
    return total


def forget(files: Sequence[Path]) -> bool:
    """Asks the system to drop its copies of these files; False where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in files:
        with os.fdopen(open_file(path), "rb") as file:
            # What is not on the disk yet stays in memory.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _seconds(way: Callable[[], object]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def _rates(rate: float, size: int, seconds: Sequence[float]) -> str:
    slowest, fastest = size / max(seconds) / 1e6, size / min(seconds) / 1e6
    return f"{rate / 1e6:.0f} MB/s (median of {len(seconds)}; {slowest:.0f} to {fastest:.0f})"
