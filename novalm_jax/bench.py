"""`python -m novalm_jax.bench`: measurements, on the command line. Each is a subcommand.

The result goes to stdout, everything else to stderr, so that the output pipes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from novalm_jax.commands import leave, run_command
from novalm_jax.options import (
    BatchBenchOptions,
    BenchOptions,
    ComparePlanOptions,
    EngineOptions,
    MakeModelOptions,
    MakeTraceOptions,
    PolicyBenchOptions,
    RoutingOptions,
    SimulateOptions,
    SweepOptions,
)

_PROGRAM = "python -m novalm_jax.bench"


@dataclass(frozen=True)
class LoadCommand:
    """Measure how fast the weights of a checkpoint come from disk, beside a plain read of the same files."""

    model: tyro.conf.Positional[str]
    """Folder of a Hugging Face checkpoint, or the name (org/name) of one in the Hugging Face cache."""
    json: bool = False
    """Write one JSON object in place of a table."""
    debug: bool = False
    """Show tracebacks."""
    options: tyro.conf.OmitArgPrefixes[BenchOptions] = field(default_factory=BenchOptions)


def _load(command: LoadCommand) -> None:
    # Only now, so that --help and mistakes in the options are answered before JAX is loaded.
    import jax

    from novalm_jax.benchmarks.loading import measure_loading

    # The host's side is measured; an accelerator, and its memory, are left to others.
    jax.config.update("jax_platforms", "cpu")
    rates = measure_loading(command.model, command.options)
    print(json.dumps(rates.to_dict()) if command.json else rates)


@dataclass(frozen=True)
class _ModelCommand:
    """A model, or the one in this package."""

    model: tyro.conf.Positional[str | None] = None
    """Folder of a Hugging Face checkpoint, or the name (org/name) of one in the Hugging Face cache. None: the model in
    this package."""
    json: bool = False
    """Write one JSON object in place of a table."""
    debug: bool = False
    """Show tracebacks."""


@dataclass(frozen=True)
class StartCommand(_ModelCommand):
    """Measure how long a process takes until its first token is out: the first start of a model, and later ones."""

    options: tyro.conf.OmitArgPrefixes[BenchOptions] = field(default_factory=BenchOptions)


def _start(command: StartCommand) -> None:
    from novalm_jax.benchmarks.starting import measure_start

    times = measure_start(command.model, command.options)
    print(json.dumps(times.to_dict()) if command.json else times)


@dataclass(frozen=True)
class MakeModelCommand:
    """Write a checkpoint of random weights in a given shape, to measure with."""

    folder: tyro.conf.Positional[Path]
    """Folder to be made; must not exist, or be empty."""
    debug: bool = False
    """Show tracebacks."""
    options: tyro.conf.OmitArgPrefixes[MakeModelOptions] = field(default_factory=MakeModelOptions)


def _make_model(command: MakeModelCommand) -> None:
    from novalm_jax.benchmarks.making import make_model

    print(make_model(command.folder, command.options))


@dataclass(frozen=True)
class _RunCommand:
    """A model that is run, and how."""

    model: tyro.conf.Positional[str | None] = None
    """Folder of a Hugging Face checkpoint, or the name (org/name) of one in the Hugging Face cache. None: the model in
    this package."""
    prompt_tokens: int = 64
    """Random tokens of the prompt."""
    json: bool = False
    """Write one JSON object in place of a table."""
    debug: bool = False
    """Show tracebacks."""
    engine: tyro.conf.OmitArgPrefixes[EngineOptions] = field(default_factory=EngineOptions)


@dataclass(frozen=True)
class PrefillCommand(_RunCommand):
    """Measure how fast a prompt goes through a model, and what is moved for it."""

    prompt_tokens: int = 500


def _prefill(command: PrefillCommand) -> None:
    from novalm_jax.benchmarks.running import measure_prefill

    figures = measure_prefill(command.model, command.prompt_tokens, command.engine)
    print(json.dumps(figures.to_dict()) if command.json else figures)


@dataclass(frozen=True)
class DecodeCommand(_RunCommand):
    """Measure how fast tokens come after a prompt, and what is moved for them."""

    tokens: int = 64
    """Tokens to generate, of which the first two are not measured."""
    routing: tyro.conf.OmitArgPrefixes[RoutingOptions] = field(default_factory=RoutingOptions)


def _decode(command: DecodeCommand) -> None:
    from novalm_jax.benchmarks.running import measure_decode

    figures = measure_decode(command.model, command.prompt_tokens, command.tokens, command.engine, command.routing)
    print(json.dumps(figures.to_dict()) if command.json else figures)


@dataclass(frozen=True)
class BatchCommand(_ModelCommand):
    """Measure how fast requests are decoded together, beside what reading the weights alone would take."""

    options: tyro.conf.OmitArgPrefixes[BatchBenchOptions] = field(default_factory=BatchBenchOptions)
    engine: tyro.conf.OmitArgPrefixes[EngineOptions] = field(default_factory=EngineOptions)


def _batch(command: BatchCommand) -> None:
    from novalm_jax.benchmarks.batching import measure_batches

    figures = measure_batches(command.model, command.options, command.engine)
    print(json.dumps(figures.to_dict()) if command.json else figures)


@dataclass(frozen=True)
class _SweptCommand(_ModelCommand):
    """A model that is run in many ways."""

    routing: tyro.conf.OmitArgPrefixes[RoutingOptions] = field(default_factory=RoutingOptions)


@dataclass(frozen=True)
class SweepCommand(_SweptCommand):
    """Measure what is left of a resident model's speed: by slots, by speed of the link, and by prefetching."""

    options: tyro.conf.OmitArgPrefixes[SweepOptions] = field(default_factory=SweepOptions)


def _sweep(command: SweepCommand) -> None:
    from novalm_jax.benchmarks.sweeping import measure_sweep

    figures = measure_sweep(command.model, command.routing, command.options)
    print(json.dumps(figures.to_dict()) if command.json else figures)


@dataclass(frozen=True)
class PolicyCommand:
    """Measure what policies and their tables cost a step, without a model."""

    trace: tyro.conf.Positional[str | None] = None
    """File of recorded routing (.npz or .csv). None: routing that is made up."""
    json: bool = False
    """Write one JSON object in place of a table."""
    debug: bool = False
    """Show tracebacks."""
    options: tyro.conf.OmitArgPrefixes[SimulateOptions] = field(
        default_factory=lambda: SimulateOptions(slots="25%,50%", policy="default,decayed,lfu,lru")
    )
    how: tyro.conf.OmitArgPrefixes[PolicyBenchOptions] = field(default_factory=PolicyBenchOptions)
    made: tyro.conf.OmitArgPrefixes[MakeTraceOptions] = field(default_factory=MakeTraceOptions)


def _policy(command: PolicyCommand) -> None:
    from novalm_jax.benchmarks.policies import measure_policies
    from novalm_jax.experts.synthetic import make_trace
    from novalm_jax.experts.traces import read_trace

    trace = make_trace(command.made) if command.trace is None else read_trace(command.trace, "trace")
    costs = measure_policies(trace, command.options, command.how)
    print(json.dumps(costs.to_dict()) if command.json else costs)


@dataclass(frozen=True)
class PlanCommand(_SweptCommand):
    """Measure whether forecasts of decoding come true: by slots, on a machine that is measured just before."""

    options: tyro.conf.OmitArgPrefixes[ComparePlanOptions] = field(default_factory=ComparePlanOptions)


def _plan(command: PlanCommand) -> None:
    from novalm_jax.benchmarks.planning import compare_plan

    figures = compare_plan(command.model, command.routing, command.options)
    print(json.dumps(figures.to_dict()) if command.json else figures)


_BENCHMARKS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    "load": (LoadCommand, _load),
    "start": (StartCommand, _start),
    "make-model": (MakeModelCommand, _make_model),
    "prefill": (PrefillCommand, _prefill),
    "decode": (DecodeCommand, _decode),
    "batch": (BatchCommand, _batch),
    "sweep": (SweepCommand, _sweep),
    "policy": (PolicyCommand, _policy),
    "plan": (PlanCommand, _plan),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    if name not in _BENCHMARKS:
        asked = name in ("-h", "--help")
        if name and not asked:
            print(f"{_PROGRAM}: {name} is no benchmark.", file=sys.stderr)
        lines = [f"  {known:<11} {options.__doc__}" for known, (options, _) in _BENCHMARKS.items()]
        print(
            f"usage: {_PROGRAM} BENCHMARK ... (BENCHMARK --help shows its options)",
            *lines,
            sep="\n",
            file=sys.stdout if asked else sys.stderr,
        )
        return 0 if asked else 2
    options, body = _BENCHMARKS[name]
    return run_command(options, body, f"{_PROGRAM} {name}", rest)


if __name__ == "__main__":
    leave(main())
