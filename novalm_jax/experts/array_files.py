"""Arrays in `.npz` files: those that runs leave behind, and those that come from elsewhere and may hold anything."""

from __future__ import annotations

import csv
import io
import lzma
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from novalm_jax.checkpoint.atomic import write_whole

MOST_BYTES = 1 << 30
"""Of one array: a recording of 60,000 tokens of a large model takes a tenth of it."""

UNREADABLE = (
    *(
        OSError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
        AttributeError,
    ),
    *(csv.Error, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)
"""What reading and checking such a file may raise."""


def read_arrays(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Those of these arrays that the file has.

    Raises:
      any of `UNREADABLE`; ValueError: an array is too large, or none.
    """
    arrays = {}
    if not zipfile.is_zipfile(path) and path.is_file():
        raise ValueError("it is no .npz file")
    with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
        assert isinstance(held, np.lib.npyio.NpzFile) and held.zip is not None
        sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in held.zip.infolist()}
        for name in names:
            if name not in sizes:
                continue
            if sizes[name] > MOST_BYTES:
                raise ValueError(f"{name} takes {sizes[name]} bytes, and {MOST_BYTES} are the most that are read")
            array = held[name]
            if not isinstance(array, np.ndarray):
                raise ValueError(f"{name} is no array")
            arrays[name] = array
    return arrays


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes them, whole or not at all.

    Raises:
      WriteError: they cannot be written.
    """
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    write_whole(path, packed.getvalue())
