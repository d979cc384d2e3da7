"""`python -m novalm_jax.train`: a language model with experts from text files, on the command line.

The path of the new model goes to stdout, everything else to stderr, so that the output pipes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from novalm_jax.commands import leave, run_command
from novalm_jax.options import TrainOptions


@dataclass(frozen=True)
class TrainCommand:
    """Train a Mixture-of-Experts language model on text files, and write it as a Hugging Face folder.

    Ended early, it goes on from its last checkpoint when the same command is run again.
    """

    texts: tyro.conf.Positional[tuple[Path, ...]]
    """Files of UTF-8 text, also compressed with xz; <|endoftext|> stands between two documents."""
    output: Path = Path("trained")
    """Folder for checkpoints, metrics.jsonl and, in the end, the model."""
    pictures: bool = False
    """Also draw the losses and the load of the experts (needs matplotlib, which the notebook extra brings)."""
    debug: bool = False
    """Show tracebacks."""
    options: tyro.conf.OmitArgPrefixes[TrainOptions] = field(default_factory=TrainOptions)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_command(TrainCommand, _train, "python -m novalm_jax.train", arguments)


def _train(command: TrainCommand) -> None:
    # Only now, so that --help and mistakes in the options are answered before JAX is loaded.
    from novalm_jax.compat import require_matplotlib
    from novalm_jax.training.pictures import save_pictures
    from novalm_jax.training.recipe import train
    from novalm_jax.training.run_folder import read_metrics
    from novalm_jax.training.summary import summary

    if command.pictures:
        require_matplotlib("pictures")
    model = train(command.texts, command.output, command.options)
    if command.pictures:
        save_pictures(command.output)
    tokens = command.options.batch_size * command.options.context_length
    print(summary(read_metrics(command.output), tokens), file=sys.stderr)
    print(model)


if __name__ == "__main__":
    leave(main())
