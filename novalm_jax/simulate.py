"""`python -m novalm_jax.simulate`: what a cache of experts would do on recorded routing, on the command line.

The result goes to stdout, everything else to stderr, so that the output pipes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro

from novalm_jax.commands import run_command
from novalm_jax.options import SimulateOptions

_PROGRAM = "python -m novalm_jax.simulate"


@dataclass(frozen=True)
class SimulateCommand:
    """Replay recorded routing through caches of several sizes and policies, and count hits."""

    trace: tyro.conf.Positional[str]
    """File of recorded routing (.npz or .csv)."""
    json: bool = False
    """Write one JSON object in place of a table."""
    debug: bool = False
    """Show tracebacks."""
    options: tyro.conf.OmitArgPrefixes[SimulateOptions] = field(default_factory=SimulateOptions)


def _simulate(command: SimulateCommand) -> None:
    # Only now, so that --help and mistakes in the options are answered at once.
    from novalm_jax.experts.simulation import simulate
    from novalm_jax.experts.traces import read_trace

    figures = simulate(read_trace(command.trace, "trace"), command.options)
    print(json.dumps(figures.to_dict()) if command.json else figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_command(SimulateCommand, _simulate, _PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(main())
