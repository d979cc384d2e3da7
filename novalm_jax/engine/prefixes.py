"""What the pages of a prompt depend on beside its tokens: pages are shared only where all of it is the same."""

from __future__ import annotations

import hashlib

from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.config import ModelConfig


def fingerprint(checkpoint: Checkpoint, dtype: str) -> bytes:
    """Stands for a model: its configuration, its files as they are now, and the dtype it is computed in."""
    files = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in checkpoint.folder.iterdir()
        if path.is_file()
    )
    return hashlib.blake2b(repr((checkpoint.config, dtype, files)).encode(), digest_size=16).digest()


def prefix_seed(model: bytes, config: ModelConfig, tokens: int) -> bytes:
    """Stands for what a prompt of so many tokens is computed with: the model, and where rotations depend on the length
    of the sequence, beyond the context that they were trained on, on that."""
    ropes = {rope for layer in config.layers if (rope := layer.attention.rope) is not None}
    beyond = {rope.kind for rope in ropes if tokens > rope.original_context} & {"dynamic", "longrope"}
    if not beyond:
        return model
    return model + (tokens if "dynamic" in beyond else 0).to_bytes(8, "little")
