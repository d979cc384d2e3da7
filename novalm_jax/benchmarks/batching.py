"""How fast requests are decoded together: by their number, beside what reading the weights alone would take."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.benchmarks.running import FIRST
from novalm_jax.engine.estimate import record_bytes
from novalm_jax.engine.forecast import cache_read, dense_read
from novalm_jax.engine.llm import LLM
from novalm_jax.errors import OptionError
from novalm_jax.options import BatchBenchOptions, EngineOptions, SamplingParams
from novalm_jax.tables import aligned
from novalm_jax.units import format_size

_PROBE = 1 << 28
"""Bytes that are read to see how fast memory is: far more than caches hold."""


@dataclass(frozen=True)
class BatchFigures:
    """Requests that were decoded together.

    Attributes:
      batch: how many.
      step_seconds: the median of all steps.
      bookkeeping_seconds: of a step on average, outside of compiled programs.
      distinct: experts that a step used on average, each once in a layer.
      uploads: experts that came to the device in a step on average.
      bytes_read: weights and pages that a step reads at least.
      bandwidth: bytes a second that memory gave between the steps, the median.
    """

    batch: int
    step_seconds: float
    bookkeeping_seconds: float
    distinct: float
    uploads: float
    bytes_read: float
    bandwidth: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.batch / self.step_seconds

    @property
    def bound_share(self) -> float:
        """What reading takes at least, as a part of the step."""
        return self.bytes_read / self.bandwidth / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return asdict(self) | {"tokens_per_second": self.rate, "bound_share": self.bound_share}

    def columns(self) -> tuple[str, ...]:
        """As people read it."""
        return (
            f"{self.batch}",
            f"{self.rate:.1f}",
            f"{1000 * self.step_seconds:.1f} ms",
            f"{self.distinct:.0f}",
            f"{self.uploads / self.batch:.1f}",
            format_size(int(self.bytes_read)),
            f"{100 * self.bound_share:.0f} %",
            f"{100 * self.bookkeeping_seconds / self.step_seconds:.1f} %",
        )


@dataclass(frozen=True)
class Batches:
    """All batches, in the order of the options."""

    model: str | None
    dtype: str
    options: BatchBenchOptions
    batches: tuple[BatchFigures, ...]

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return asdict(self) | {"batches": [batch.to_dict() for batch in self.batches]}

    def __str__(self) -> str:
        heads = ("batch", "tokens/s", "step", "experts", "uploads/token", "read", "of its bound", "bookkeeping")
        rates = ", ".join(f"{batch.bandwidth / 1e9:.1f}" for batch in self.batches)
        head = [
            f"model    {self.model or 'the one in this package'} ({self.dtype})",
            f"tokens   {self.options.tokens} of each request, after prompts of {self.options.prompt_tokens}",
            f"memory   {rates} GB/s",
        ]
        return "\n".join([*head, "", *aligned([heads, *(batch.columns() for batch in self.batches)])])


def measure_batches(model: str | Path | None, options: BatchBenchOptions, engine: EngineOptions) -> Batches:
    """Decodes random prompts together, as many as each of the batches says.

    Raises:
      OptionError: the context is too short.
      OptionError, CheckpointError, ConfigError, BudgetError, RequestError: as `LLM`.
    """
    given = asdict(engine) | {"max_batch": max(options.sizes), "prefix_cache": False}
    with LLM(model, **given) as llm:
        probe = _Probe()
        measured = tuple(_measure(llm, size, options, probe) for size in options.sizes)
    return Batches(None if model is None else str(model), engine.dtype, options, measured)


def _measure(llm: LLM, size: int, options: BatchBenchOptions, probe: _Probe) -> BatchFigures:
    start, draw = llm.report(), np.random.default_rng(size)
    lengths = list(islice(cycle(options.lengths), size))
    prompts = [draw.integers(0, llm.config.vocab_size, length).tolist() for length in lengths]
    # Some begin to decode while prompts of others are on their way; all go on until they are closed.
    streams = llm.streams(prompts, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    while min(stream.token_count for stream in streams) < FIRST:
        streams[0].advance()
    first, steps, rates = llm.report(), [], []
    chosen = first.generated_tokens - start.generated_tokens
    for _ in range(options.tokens):
        # How fast memory is changes from second to second where others share the machine.
        rates.append(probe.read_rate())
        begin = time.perf_counter()
        streams[0].advance()
        steps.append(time.perf_counter() - begin)
    last = llm.report()
    if any(stream.ended for stream in streams):
        raise OptionError("context_length: requests reach it before their steps are measured; give more.")
    for stream in streams:
        stream.close()
    dtype = np.dtype(jnp.dtype(llm.options.dtype))
    record = record_bytes(llm.config, dtype)
    distinct = (last.distinct_experts - first.distinct_experts) / len(steps)
    after = chosen // size + options.tokens // 2
    cache = sum(cache_read(llm.config, dtype, length + after) for length in lengths)
    inside = last.step_seconds - first.step_seconds - (last.compute_seconds - first.compute_seconds)
    return BatchFigures(
        batch=size,
        step_seconds=median(steps),
        bookkeeping_seconds=inside / len(steps),
        distinct=distinct,
        uploads=(last.uploads - first.uploads) / len(steps),
        bytes_read=dense_read(llm.config, dtype) + distinct * record + cache,
        bandwidth=median(rates),
    )


class _Probe:
    """Numbers on the device that a compiled program reads, to see how fast its memory is."""

    def __init__(self) -> None:
        self._numbers = jnp.ones((1 << 14, _PROBE >> 16), jnp.float32)
        self._program = jax.jit(lambda x: x @ jnp.ones(x.shape[1], x.dtype)).lower(self._numbers).compile()
        self.read_rate()

    def read_rate(self) -> float:
        """Bytes a second, of reading them once."""
        begin = time.perf_counter()
        jax.block_until_ready(self._program(self._numbers))
        return self._numbers.nbytes / (time.perf_counter() - begin)
