"""How long a user waits for the first token: whole processes, from their start until text comes out.

Knows the generate command from outside. The first process finds no compiled programs and makes them, and may read the
weights from a cold disk; later ones find both, as a user's second start does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from novalm_jax.checkpoint.hub import find_folder
from novalm_jax.errors import EngineError, OptionError
from novalm_jax.options import BenchOptions

_PROMPT = "Once upon a time"


@dataclass(frozen=True)
class StartTimes:
    """Seconds from the start of a process until its first token is out. `model` None is the one in this package."""

    model: str | None
    dtype: str
    first_seconds: float
    later_seconds: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return asdict(self) | {"later_seconds_median": median(self.later_seconds)}

    def __str__(self) -> str:
        later = self.later_seconds
        rows = [
            ("model", f"{self.model or 'the one in this package'} ({self.dtype})"),
            ("first start", f"{self.first_seconds:.2f} s to the first token, programs compiled on the way"),
            ("later", f"{median(later):.2f} s (median of {len(later)}; {min(later):.2f} to {max(later):.2f})"),
        ]
        return "\n".join(f"{name:<11} {value}" for name, value in rows)


def measure_start(model: str | Path | None, options: BenchOptions) -> StartTimes:
    """Starts the generate command once with an empty cache for compiled programs, and `rounds` times with a full one.

    Raises:
      OptionError: the model cannot be used; with what the command said of it.
      EngineError: the command fails while it runs.
    """
    # Names are looked up here: where the cache of models is follows from that of programs, which moves.
    folder = None if model is None else find_folder(model)
    with tempfile.TemporaryDirectory() as cache:
        first, *later = (_start(folder, options.dtype, cache) for _ in range(options.rounds + 1))
    return StartTimes(None if model is None else str(model), options.dtype, first, tuple(later))


def _start(model: Path | None, dtype: str, cache: str) -> float:
    command = [sys.executable, "-m", "novalm_jax.generate", "--prompt", _PROMPT, "--max-tokens", "8"]
    command += ["--temperature", "0", "--ignore-eos", "--dtype", dtype]
    command += [] if model is None else ["--model", str(model)]
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, env=environment) as process,
    ):
        assert process.stdout is not None
        text = process.stdout.read(1)
        seconds = time.perf_counter() - start
        text += process.stdout.read()
        code = process.wait()
        said.seek(0)
        errors = said.read().decode(errors="replace").strip()
    if code or not text.strip():
        kind = OptionError if code == 2 else EngineError
        raise kind(f"model: the generate command ended with exit code {code} and {len(text)} bytes of text: {errors}")
    return seconds
