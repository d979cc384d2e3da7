"""How fast an `LLM` is: the prompt, or what follows one, and what was moved between the tiers for it.

A request of the same kind comes first and is not counted, so that programs are compiled and the tiers are warm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from novalm_jax.benchmarks.replaying import ReplayingLLM
from novalm_jax.engine.llm import LLM
from novalm_jax.engine.report import Report
from novalm_jax.errors import OptionError
from novalm_jax.experts.traces import read_trace
from novalm_jax.options import EngineOptions, RoutingOptions, SamplingParams
from novalm_jax.units import format_size

_COUNTERS = (
    *("expert_hits", "expert_misses", "prefetch_hits", "prefetch_wasted", "steps_without_prefetch", "evictions"),
    *("uploads", "bytes_uploaded", "dense_uploads", "dense_bytes_uploaded", "disk_bytes_read"),
    *("stall_seconds", "launches"),
)

FIRST = 2
"""Tokens that come with the prompt: the one after it, and that of the step which follows at once."""


class Counted(NamedTuple):
    """Seconds of a run, what `Report` counted meanwhile, by name, and everything at its end."""

    seconds: float
    counters: dict[str, float]
    report: Report


@dataclass(frozen=True)
class RunFigures:
    """What was measured.

    Attributes:
      routing: what was replayed.
      tokens, seconds: of the prompt ("prefill") or of what follows it ("decode").
      counters: what `Report` counted meanwhile, by name.
      report: everything, at the end.
    """

    phase: str
    model: str | None
    dtype: str
    routing: RoutingOptions
    tokens: int
    seconds: float
    counters: dict[str, float]
    report: Report

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return asdict(self) | {"tokens_per_second": self.rate, "report": self.report.to_dict()}

    def __str__(self) -> str:
        report, counted = self.report, self.counters
        where = f"{report.experts_on_device} on the device, {report.experts_on_host} on the host"
        rows = [
            ("model", f"{self.model or 'the one in this package'} ({self.dtype})"),
            ("experts", f"{where}, {report.experts_on_disk} on disk ({report.policy})"),
            ("device", f"{format_size(report.device_peak_bytes)} at the peak"),
        ]
        if routed := str(self.routing):
            rows.append(("routing", routed))
        rows.append((self.phase, f"{self.rate:.1f} tokens/s ({self.tokens} in {self.seconds:.2f} s)"))
        if needed := counted["expert_hits"] + counted["expert_misses"]:
            rows.append(("hits", f"{100 * counted['expert_hits'] / needed:.1f} %, of {needed:.0f} experts needed"))
        moved = {
            "of experts": counted["bytes_uploaded"],
            "of dense weights": counted["dense_bytes_uploaded"],
            "read from disk": counted["disk_bytes_read"],
        }
        if any(moved.values()):
            each = (f"{format_size(int(size / self.tokens))} {what}" for what, size in moved.items())
            rows.append(("moved", f"a token: {', '.join(each)}"))
            share = 100 * counted["stall_seconds"] / self.seconds
            rows.append(("waiting", f"{share:.0f} % of the time, for weights"))
        return "\n".join(f"{name:<8} {value}" for name, value in rows)


def measure_prefill(model: str | Path | None, prompt_tokens: int, engine: EngineOptions) -> RunFigures:
    """How fast a prompt of random tokens goes through, up to the first token after it.

    Raises:
      OptionError: no prompt.
      CheckpointError, ConfigError, BudgetError, RequestError: as `LLM`.
    """
    if prompt_tokens < 1:
        raise OptionError(f"prompt_tokens: {prompt_tokens} cannot be measured; give 1 or more.")
    with LLM(model, **asdict(engine)) as llm:
        first, prompt = random_prompts(llm, prompt_tokens)
        one = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([first], one)
        count = _start_counting(llm)
        llm.generate([prompt], one)
        return _figures("prefill", model, prompt_tokens, count(), engine, RoutingOptions())


def measure_decode(
    model: str | Path | None, prompt_tokens: int, tokens: int, engine: EngineOptions, routing: RoutingOptions
) -> RunFigures:
    """How fast tokens come after a prompt of random tokens: all but the first two.

    Raises:
      OptionError: fewer than three tokens, no prompt, or a recording that cannot be replayed.
      CheckpointError, ConfigError, BudgetError, RequestError: as `LLM`.
    """
    if prompt_tokens < 1 or tokens <= FIRST:
        raise OptionError(f"A prompt of {prompt_tokens} and {tokens} tokens after it cannot be measured; give 1 and 3.")
    recorded = None if routing.routing is None else read_trace(routing.routing)
    options = asdict(engine)
    with LLM(model, **options) if recorded is None else ReplayingLLM(model, recorded, **options) as llm:
        if isinstance(llm, ReplayingLLM):
            llm.replaying.set_prefetch(engine.prefetch == "lookahead", routing.accuracy)
        first, prompt = random_prompts(llm, prompt_tokens)
        llm.generate([first], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        counted = count_decode(llm, prompt, FIRST, tokens - FIRST)
        return _figures("decode", model, tokens - FIRST, counted, engine, routing)


def count_decode(llm: LLM, prompt: list[int], before: int, tokens: int) -> Counted:
    """Counts what happens while so many tokens come, after a prompt and at least `FIRST` tokens before."""
    stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=before + tokens, ignore_eos=True))
    while stream.token_count < before:
        stream.advance()
    count = _start_counting(llm)
    while stream.token_count < before + tokens:
        stream.advance()
    return count()


def random_prompts(llm: LLM, tokens: int) -> list[list[int]]:
    """Two prompts, the same ones each time."""
    drawn = np.random.default_rng(0).integers(0, llm.config.vocab_size, (2, tokens))
    prompts: list[list[int]] = drawn.tolist()
    return prompts


def _start_counting(llm: LLM) -> Callable[[], Counted]:
    """Counts from now until the call."""
    before, begin = llm.report(), time.perf_counter()

    def counted() -> Counted:
        seconds, after = time.perf_counter() - begin, llm.report()
        counters = {name: getattr(after, name) - getattr(before, name) for name in _COUNTERS}
        return Counted(seconds, counters, after)

    return counted


def _figures(
    phase: str,
    model: str | Path | None,
    tokens: int,
    counted: Counted,
    engine: EngineOptions,
    routing: RoutingOptions,
) -> RunFigures:
    name = None if model is None else str(model)
    return RunFigures(phase, name, engine.dtype, routing, tokens, *counted)
