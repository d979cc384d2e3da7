"""`python -m novalm_jax.convert`: a checkpoint in another form, on the command line.

The path of the new folder goes to stdout, everything else to stderr, so that the output pipes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from novalm_jax.commands import leave, run_command
from novalm_jax.options import ConvertOptions


@dataclass(frozen=True)
class ConvertCommand:
    """Write a checkpoint anew: as .safetensors files of the Hugging Face layout, or as Orbax keeps it.

    Ended early, it goes on after the last complete .safetensors file when the same command is run again.
    """

    source: tyro.conf.Positional[str]
    """Folder of a Hugging Face checkpoint or one that this command wrote, or a name in the Hugging Face cache."""
    destination: tyro.conf.Positional[Path]
    """Folder to be made; must not exist, or be empty."""
    debug: bool = False
    """Show tracebacks."""
    options: tyro.conf.OmitArgPrefixes[ConvertOptions] = field(default_factory=ConvertOptions)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_command(ConvertCommand, _convert, "python -m novalm_jax.convert", arguments)


def _convert(command: ConvertCommand) -> None:
    # Only now, so that --help and mistakes in the options are answered before JAX is loaded.
    import jax

    from novalm_jax.checkpoint.conversion import convert_checkpoint

    # Nothing is computed; an accelerator, and its memory, are left to others.
    jax.config.update("jax_platforms", "cpu")
    summary = convert_checkpoint(command.source, command.destination, command.options)
    print(summary, file=sys.stderr)
    print(summary.folder)


if __name__ == "__main__":
    leave(main())
