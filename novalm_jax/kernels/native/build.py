"""Builds the native code with the C++ compiler of this machine, once, and makes it known to XLA.

The library is kept beside compiled programs, under a name that says what it was built from, with and for. Processes may
build it at the same time: each writes a file of its own, and the last one to be renamed stays.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import jax

from novalm_jax.compat import jaxlib_version, native_code_folder

_SOURCES = sorted(Path(__file__).parent.glob("*.cc"))
"""Each has the handler of one custom call, which is named like it."""

_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_PREFIX = "rows_"
_COMPILERS = ("c++", "g++", "clang++")
# Every product is contracted with its sum, or none is: the bits must not depend on how many rows are computed together.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
_SECONDS = 300
"""That a compiler may take."""

_lock = threading.Lock()
_libraries: dict[str, ctypes.CDLL] = {}
"""By their names; what XLA knows once cannot be taken back."""


class BuildError(Exception):
    """The native code cannot be had here; says why, and what to do."""


def load() -> dict[str, str]:
    """The name of each custom call, by that of its source; XLA knows them from now on.

    Raises:
      BuildError: they cannot be built; tried once in a process.
    """
    with _lock:
        names, reason = _loaded()
    if names is None:
        raise BuildError(reason)
    return names


@cache
def _loaded() -> tuple[dict[str, str] | None, str]:
    """The names, or why there are none."""
    try:
        return _register(build()), ""
    except BuildError as error:
        return None, str(error)


def _register(path: Path) -> dict[str, str]:
    """Names have the digest of the library, so that a program that is kept is never run with other code."""
    names = {source.stem: f"novalm_{source.stem}_{path.stem.removeprefix(_PREFIX)}" for source in _SOURCES}
    if path.stem not in _libraries:
        try:
            library = ctypes.CDLL(str(path))
            handlers = {name: getattr(library, f"novalm_{source}") for source, name in names.items()}
        except (OSError, AttributeError) as error:
            raise BuildError(f"{path} cannot be loaded ({error}); remove it.") from error
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
        _libraries[path.stem] = library
    return names


def build() -> Path:
    """The library, built if it is not there yet.

    Raises:
      BuildError: there is no compiler, it fails, or the folder cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"there is no C++ compiler ({', '.join(_COMPILERS)}) on PATH; install one.")
    version = _run(compiler, "--version")
    texts = [path.read_text(encoding="utf-8") for path in (*_SOURCES, *_HEADERS)]
    parts = (*texts, version, jaxlib_version(), _processor(), *_FLAGS)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    try:
        folder = native_code_folder()
    except RuntimeError as error:
        raise BuildError(f"there is no cache folder ({error}); set XDG_CACHE_HOME.") from error
    path = folder / f"{_PREFIX}{digest}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(".tmp", path.stem, folder)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written ({error.strerror}); make it writable.") from error
    os.close(handle)
    # All in one: to read XLA's headers takes longer than to compile what is ours.
    *others, last = map(str, _SOURCES)
    sources = [part for source in others for part in ("-include", source)] + [last]
    try:
        _run(compiler, *_FLAGS, f"-I{jax.ffi.include_dir()}", *sources, "-o", name)
        with open(name, "rb") as written:
            if not os.fstat(written.fileno()).st_size:
                raise BuildError(f"{compiler} writes nothing; install another C++ compiler.")
            # For whoever shares the folder; and whole on the disk before it has its name, as half of it ends a process.
            os.fchmod(written.fileno(), 0o755)
            os.fsync(written.fileno())
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return path


def _run(*command: str) -> str:
    """What a command says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run ({error}); install another C++ compiler.") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        line = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{command[0]} fails: {line.strip()}. Install another C++ compiler.")
    return done.stdout


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    # Not its clock, which changes.
    said = [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "CPU part", "Features")]
    return "\n".join([platform.machine(), platform.processor(), *said])
