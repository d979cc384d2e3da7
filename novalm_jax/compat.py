"""Everything that depends on the version of JAX, on the platform underneath or on what else is installed, so that
nothing else does.

Works with jax 0.10.2 (Python 3.11) and later. Imports JAX inside functions, as the ground floor must stay light.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from novalm_jax.errors import OptionError

if TYPE_CHECKING:
    import jax

_log = logging.getLogger("novalm_jax")

# The first comes with every program that is wanted, also where the second says that the cache had it.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


def compile_program(
    function: Callable[..., Any], arguments: Sequence[Any], *, donate: Sequence[int] = ()
) -> jax.stages.Compiled:
    """Compiles `function` ahead of time for arguments of these shapes (`jax.ShapeDtypeStruct` or arrays, in trees).

    Excess precision is off: XLA must not keep bfloat16 results in float32 between operations, or the same step cut
    into other programs would round differently. For the same reason optimization barriers stay to the end on the CPU,
    whose backend otherwise drops them before it fuses, and what is fused rounds differently. And a library of that
    backend may have matrix products but no sums: it takes those of 4096 numbers and more, so that a norm or a softmax
    would round differently for more rows.
    """
    import jax

    options: dict[str, bool | str] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
        options["xla_disable_hlo_passes"] = "cse_barrier_expander"
        options["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    lowered = jax.jit(function, donate_argnums=tuple(donate)).lower(*arguments)
    return lowered.compile(compiler_options=options)


def program_bytes(program: jax.stages.Compiled) -> tuple[int, int]:
    """Bytes that a run of `program` takes beyond its arguments: temporaries, and outputs that alias no argument."""
    analysis: Any = program.memory_analysis()
    return int(analysis.temp_size_in_bytes), int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes)


class CompileCounter:
    """Counts programs of this process from the time it is made on, from JAX's own events."""

    _totals: ClassVar[Counter[str]] = Counter()
    _listening: ClassVar[bool] = False

    def __init__(self) -> None:
        if not CompileCounter._listening:
            import jax

            jax.monitoring.register_event_duration_secs_listener(CompileCounter._hear_duration)
            jax.monitoring.register_event_listener(CompileCounter._hear)
            CompileCounter._listening = True
        self._start = Counter(CompileCounter._totals)

    @classmethod
    def _hear(cls, event: str, **_: Any) -> None:
        cls._totals[event] += 1

    @classmethod
    def _hear_duration(cls, event: str, duration_secs: float, **_: Any) -> None:
        cls._totals[event] += 1

    @property
    def compiled(self) -> int:
        """Programs that were compiled."""
        return self._since(_COMPILE_EVENT) - self.from_cache

    @property
    def from_cache(self) -> int:
        """Programs that were taken from the compilation cache."""
        return self._since(_CACHE_HIT_EVENT)

    def _since(self, event: str) -> int:
        return CompileCounter._totals[event] - self._start[event]


def enable_compilation_cache(folder: Path) -> None:
    """Keeps compiled programs in `folder`, small and quick ones too. A folder that cannot be written only warns.

    A cache that the process has already chosen stays as it is.
    """
    import jax
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        _log.warning("%s cannot be written: compiled programs are not kept, so the next start compiles again", folder)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX decides once whether there is a cache, with the first program it compiles; this makes it look again.
    reset_cache()


def compilation_cache_folder() -> Path:
    """Where the user's compiled programs are kept: below XDG_CACHE_HOME, else ~/.cache."""
    return _cache_folder() / "programs"


def native_code_folder() -> Path:
    """Where native code that was built for this machine is kept, beside compiled programs."""
    return _cache_folder() / "native"


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "novalm-jax"


def jaxlib_version() -> str:
    """Of the library that native code is built against."""
    import jaxlib

    return jaxlib.__version__


def pinned_array(shape: tuple[int, ...], dtype: np.dtype) -> tuple[jax.Array, np.ndarray]:
    """Zeros in pinned host memory, and a view of the same memory that can be written.

    The view is good for as long as the array is there. JAX knows nothing of what is written through it: nobody else
    may read the array meanwhile.
    """
    import jax
    import jax.numpy as jnp

    array = jax.jit(lambda: jax.device_put(jnp.zeros(shape, dtype), jax.memory.Space.Host))()
    assert array.sharding.memory_kind == "pinned_host", array.sharding
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return array, np.frombuffer(memory, dtype).reshape(shape)


def copy_to_device(array: np.ndarray, memory: np.ndarray | None = None) -> jax.Array:
    """A copy on the default device, complete on return: what becomes of `array` after that does not matter.

    On the CPU `device_put` would take over its memory instead, if it is aligned. So the copy is made in `memory`, which
    is aligned and which nobody may touch while the copy is needed; without it, in new memory that costs more than that.
    """
    import jax

    if device_shares_memory():
        copy = np.empty_like(array) if memory is None else memory
        np.copyto(copy, array)
        array = copy
    return jax.device_put(array).block_until_ready()


def device_shares_memory() -> bool:
    """Whether the default device computes in the host's own memory, as the CPU does."""
    import jax

    return jax.default_backend() == "cpu"


def device_bytes(device: jax.Device) -> int | None:
    """Memory of an accelerator, in bytes, as its allocator sees it; None for a CPU, and where nothing says it."""
    if device.platform == "cpu":
        return None
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def available_ram() -> int:
    """RAM this process may still take, in bytes: what the kernel calls available, within the container's limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            room = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):
            continue
        available = min(available, max(room, 0))
    return available


def require_matplotlib(option: str) -> None:
    """Raises OptionError where matplotlib, which `option` needs, is not installed."""
    if find_spec("matplotlib") is None:
        raise OptionError(f"{option}: matplotlib draws it, and is not installed. `pip install matplotlib`.")
