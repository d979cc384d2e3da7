"""Small files of a checkpoint folder that the text side reads, most of which need not be there.

Refuses to know what any of them means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from novalm_jax.checkpoint.header import read_json
from novalm_jax.errors import CheckpointError


def read_text(path: Path) -> str:
    """The UTF-8 text of `path`.

    Raises:
      CheckpointError: it cannot be read, or is not such text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download the file again.") from error


def read_optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or an empty one if there is no such file.

    Raises:
      CheckpointError: the file is unreadable, is not JSON, or is not an object.
    """
    return read_json(path) if path.is_file() else {}
