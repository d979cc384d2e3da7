"""Data that travels with the package: sharding plans and the embedded checkpoint.

In a checkout both folders lie at the top of the repository, where people edit them; a wheel carries them inside the
package.
"""

from __future__ import annotations

from pathlib import Path

from novalm_jax.errors import CheckpointError

_PACKAGE = Path(__file__).resolve().parent


def resource_folder(name: str) -> Path:
    """The folder `name` ("sharding" or "checkpoints") of this installation."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def embedded_checkpoint() -> Path:
    """The folder of the model inside this package.

    Raises:
      CheckpointError: this version carries none.
    """
    folders = sorted(path.parent for path in resource_folder("checkpoints").glob("*/config.json"))
    if not folders:
        raise CheckpointError(
            "This version of novalm-jax carries no model of its own. Give the folder of a downloaded Hugging Face "
            "checkpoint, the one that holds config.json."
        )
    return folders[0]
