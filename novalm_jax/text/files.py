"""Small JSON files of a checkpoint folder.

Knows how to read one and how to say what is wrong with it. Refuses to know what any of them means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from novalm_jax.errors import CheckpointError


def read_text(path: Path) -> str:
    """The UTF-8 text of `path`; `CheckpointError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download the file again.") from error


def read_json(path: Path) -> Any:
    """The JSON value in `path`, or None if there is no such file; `CheckpointError` if it is damaged."""
    if not path.is_file():
        return None
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download the file again.") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or an empty one if there is no file; `CheckpointError` if it is something else."""
    value = read_json(path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}; download the file again.")
    return value
