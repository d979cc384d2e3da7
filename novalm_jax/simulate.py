"""`python -m novalm_jax.simulate`: what a cache of experts would do on recorded routing, on the command line.

The result goes to stdout, everything else to stderr, so that the output pipes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from novalm_jax.commands import leave, run_command
from novalm_jax.errors import OptionError
from novalm_jax.options import MakeTraceOptions, SimulateOptions

_PROGRAM = "python -m novalm_jax.simulate"


@dataclass(frozen=True)
class SimulateCommand:
    """Replay recorded routing through caches of several sizes and policies, and count hits; or make some up."""

    trace: tyro.conf.Positional[str | None] = None
    """File of recorded routing (.npz or .csv)."""
    make_trace: Path | None = None
    """File (.npz) for routing that is made up, in place of replaying any."""
    plot: Path | None = None
    """File (.png, .svg or .pdf) for a picture of hits by slots (needs matplotlib, which the notebook extra brings)."""
    profile_out: Path | None = None
    """File (.npz) for how often the whole trace uses each expert, for --expert-profile."""
    json: bool = False
    """Write one JSON object in place of a table."""
    debug: bool = False
    """Show tracebacks."""
    options: tyro.conf.OmitArgPrefixes[SimulateOptions] = field(default_factory=SimulateOptions)
    made: tyro.conf.OmitArgPrefixes[MakeTraceOptions] = field(default_factory=MakeTraceOptions)


def _simulate(command: SimulateCommand) -> None:
    # Only now, so that --help and mistakes in the options are answered at once.
    from novalm_jax.checkpoint.atomic import check_file
    from novalm_jax.experts.pictures import check_picture, save_picture
    from novalm_jax.experts.profile import ExpertProfile, write_profile
    from novalm_jax.experts.simulation import simulate
    from novalm_jax.experts.synthetic import make_trace
    from novalm_jax.experts.trace_statistics import statistics_of
    from novalm_jax.experts.traces import read_trace, write_trace

    if (command.trace is None) == (command.make_trace is None):
        raise OptionError("trace: give a file of recorded routing, or --make-trace and a file for made-up routing.")
    for name, path in (("make_trace", command.make_trace), ("profile_out", command.profile_out)):
        if path is not None and path.suffix != ".npz":
            raise OptionError(f"{name}: {path} is no name of an .npz file; give one.")
    if command.make_trace is not None:
        for name, path in (("plot", command.plot), ("profile_out", command.profile_out)):
            if path is not None:
                raise OptionError(f"{name}: nothing is replayed with --make-trace; leave one of them out.")
        trace = make_trace(command.made)
        write_trace(trace, command.make_trace)
        found = statistics_of(trace)
        print(json.dumps(found.to_dict()) if command.json else f"{command.make_trace}: {trace.name}\n\n{found}")
        return
    if command.made != MakeTraceOptions():
        raise OptionError("The options of made-up routing are without effect on a trace; leave them out.")
    if command.plot is not None:
        check_picture("plot", command.plot)
    if command.profile_out is not None:
        check_file(command.profile_out, "profile_out")
    trace = read_trace(str(command.trace), "trace")
    figures = simulate(trace, command.options, curve=command.json or command.plot is not None)
    if command.plot is not None:
        save_picture(figures, command.plot)
        print(f"plot: {command.plot}", file=sys.stderr)
    if command.profile_out is not None:
        write_profile(ExpertProfile.of_trace(trace), command.profile_out)
        print(f"profile_out: {command.profile_out}", file=sys.stderr)
    print(json.dumps(figures.to_dict()) if command.json else figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_command(SimulateCommand, _simulate, _PROGRAM, arguments)


if __name__ == "__main__":
    leave(main())
