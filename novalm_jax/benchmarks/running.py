"""How fast an `LLM` is: the prompt, or what follows one, and what was moved between the tiers for it.

A request of the same kind comes first and is not counted, so that programs are compiled and the tiers are warm.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from novalm_jax.engine.llm import LLM
from novalm_jax.engine.report import Report
from novalm_jax.errors import OptionError
from novalm_jax.options import EngineOptions, SamplingParams
from novalm_jax.units import format_size

_COUNTERS = (
    *("expert_hits", "expert_misses", "prefetch_hits", "prefetch_wasted", "evictions"),
    *("uploads", "bytes_uploaded", "disk_bytes_read", "stall_seconds", "launches"),
)


@dataclass(frozen=True)
class RunFigures:
    """What was measured.

    Attributes:
      tokens, seconds: of the prompt ("prefill") or of what follows it ("decode").
      counters: what `Report` counted meanwhile, by name.
      report: everything, at the end.
    """

    phase: str
    model: str | None
    dtype: str
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
            (self.phase, f"{self.rate:.1f} tokens/s ({self.tokens} in {self.seconds:.2f} s)"),
        ]
        if needed := counted["expert_hits"] + counted["expert_misses"]:
            uploaded, read = (int(counted[name] / self.tokens) for name in ("bytes_uploaded", "disk_bytes_read"))
            rows += [
                ("hits", f"{100 * counted['expert_hits'] / needed:.1f} %, of {needed:.0f} experts needed"),
                ("moved", f"{format_size(uploaded)} uploaded a token, {format_size(read)} of it read from disk"),
                ("waiting", f"{100 * counted['stall_seconds'] / self.seconds:.0f} % of the time, for experts"),
            ]
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
        first, prompt = _prompts(llm, prompt_tokens)
        one = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([first], one)
        begin = _moment(llm)
        llm.generate([prompt], one)
        return _figures("prefill", model, prompt_tokens, begin, _moment(llm), engine)


def measure_decode(model: str | Path | None, prompt_tokens: int, tokens: int, engine: EngineOptions) -> RunFigures:
    """How fast tokens come after a prompt of random tokens: all but the first two.

    Raises:
      OptionError: fewer than three tokens, or no prompt.
      CheckpointError, ConfigError, BudgetError, RequestError: as `LLM`.
    """
    if prompt_tokens < 1 or tokens < 3:
        raise OptionError(f"A prompt of {prompt_tokens} and {tokens} tokens after it cannot be measured; give 1 and 3.")
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with LLM(model, **asdict(engine)) as llm:
        first, prompt = _prompts(llm, prompt_tokens)
        llm.generate([first], sampling)
        stream = llm.stream(prompt, sampling)
        # The prompt with its token, and a first step.
        stream.advance()
        begin, before = _moment(llm), stream.token_count
        while stream.token_count < tokens:
            stream.advance()
        return _figures("decode", model, tokens - before, begin, _moment(llm), engine)


_Moment = tuple[float, Report]


def _moment(llm: LLM) -> _Moment:
    return time.perf_counter(), llm.report()


def _prompts(llm: LLM, tokens: int) -> list[list[int]]:
    drawn = np.random.default_rng(0).integers(0, llm.config.vocab_size, (2, tokens))
    prompts: list[list[int]] = drawn.tolist()
    return prompts


def _figures(
    phase: str, model: str | Path | None, tokens: int, begin: _Moment, end: _Moment, engine: EngineOptions
) -> RunFigures:
    counters = {name: getattr(end[1], name) - getattr(begin[1], name) for name in _COUNTERS}
    name = None if model is None else str(model)
    return RunFigures(phase, name, engine.dtype, tokens, end[0] - begin[0], counters, end[1])
