"""`python -m novalm_jax.plan`: will a model fit, what goes where, and how fast would it be, on the command line.

The result goes to stdout, everything else to stderr, so that the output pipes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro

from novalm_jax.commands import leave, run_command
from novalm_jax.options import PlanOptions


@dataclass(frozen=True)
class PlanCommand:
    """Say whether a model fits, what goes where, and how fast it would be: from its config.json alone."""

    model: tyro.conf.Positional[str | None] = None
    """Folder of a Hugging Face checkpoint, the name (org/name) of one in the Hugging Face cache, or a config.json.
    None: the model in this package."""
    json: bool = False
    """Write one JSON object in place of tables."""
    debug: bool = False
    """Show tracebacks."""
    options: tyro.conf.OmitArgPrefixes[PlanOptions] = field(default_factory=PlanOptions)


def _plan(command: PlanCommand) -> None:
    # Only now, so that --help and mistakes in the options are answered before JAX is loaded.
    from novalm_jax.engine.planning import plan_model

    plan = plan_model(command.model, command.options)
    print(json.dumps(plan.to_dict()) if command.json else plan)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_command(PlanCommand, _plan, "python -m novalm_jax.plan", arguments)


if __name__ == "__main__":
    leave(main())
