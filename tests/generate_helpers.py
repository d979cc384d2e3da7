"""The generate command in this process, and a model whose words a test knows."""

from __future__ import annotations

from pathlib import Path

from novalm_jax.generate import main
from tiny_checkpoints import chain, chain_checkpoint, cycle, encode


def speaker(folder: Path) -> str:
    """Says "elo wé日!" after H, "ok" after the opening of an assistant's turn, and digits for ever."""
    follows = chain("Helo wé日!", "abc", "<|assistant|>k") | cycle(encode("0123456789"))
    return str(chain_checkpoint(folder / "speaker", follows, max_position_embeddings=100_000))


def run(arguments: list[str]) -> int:
    """The command in this process; its exit code, also where the parser of options ends it."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
