"""Small files of a checkpoint folder that the text side reads, most of which need not be there.

Refuses to know what any of them means.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from novalm_jax.checkpoint.header import AGAIN, open_file, read_json, unreadable
from novalm_jax.errors import CheckpointError


def is_there(path: Path) -> bool:
    """Whether the folder has this file.

    Raises:
      CheckpointError: something else stands in its place, such as a link to nowhere or a folder, or it may not be read.
    """
    if not os.path.lexists(path):
        return False
    os.close(open_file(path))
    return True


def read_text(path: Path) -> str:
    """The UTF-8 text of `path`.

    Raises:
      CheckpointError: it cannot be read, or is not such text.
    """
    try:
        with os.fdopen(open_file(path), encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8 text ({error}). {AGAIN}") from error


def read_optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or an empty one if there is no such file.

    Raises:
      CheckpointError: the file is unreadable, is not JSON, is not an object, or holds a key twice.
    """
    return read_json(path) if is_there(path) else {}
