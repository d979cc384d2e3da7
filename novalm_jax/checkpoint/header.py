"""One file of a checkpoint: the JSON in it, or the header of a .safetensors file, each checked in full.

Knows bytes, names, shapes and dtype codes. Refuses to know which files belong together, and what a tensor means. Reads
no tensor data. Nothing here has state; any thread may call it.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from novalm_jax.checkpoint.dtypes import element_bits
from novalm_jax.errors import CheckpointError, some

AGAIN = "Download this file again."

_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_MAX_RANK = 64  # the limit of numpy


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its header says about it."""

    name: str
    file: Path
    dtype: str
    """safetensors code, for example "BF16"; see `novalm_jax.checkpoint.dtypes`."""
    shape: tuple[int, ...]
    offset: int
    """First byte, from the start of the file."""
    nbytes: int


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file such as config.json.

    Raises:
      CheckpointError: the file is missing or unreadable, is not JSON, is not an object, or holds a key twice.
    """
    value, doubled = load_object(path)
    if doubled:
        raise CheckpointError(f"{path}: gives twice: {some(doubled)}. Keep the right one of each.")
    return value


def load_object(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A JSON object from a file, and the keys that it holds more than once."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            data = file.read()
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
    _refuse_stand_in(path, data)
    try:
        value, doubled = _parse(data.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error}). {AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object {{...}}. {AGAIN}")
    return value, doubled


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one .safetensors file, in the order of their bytes.

    Raises:
      CheckpointError: the file is not such a file, or header and size do not describe one gapless run of tensors.
    """
    data, size = _header_bytes(path)
    try:
        header, doubled = _parse(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is damaged: not JSON ({error}). {AGAIN}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is damaged: not a JSON object. {AGAIN}")
    faults: dict[str, list[str]] = defaultdict(list)
    if doubled:
        faults["named twice"] += doubled
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        faults["not a table of texts"].append("__metadata__")
    tensors = []
    for name, entry in header.items():
        if fault := _entry_fault(entry):
            faults[fault].append(name)
        else:
            begin, end = entry["data_offsets"]
            start = 8 + len(data) + begin
            tensors.append(StoredTensor(name, path, entry["dtype"], tuple(entry["shape"]), start, end - begin))
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    lines = [f"{fault}: {some(where)}" for fault, where in faults.items()]
    # Around an entry that cannot be read there is a hole that means nothing.
    lines += [] if faults else _layout_faults(tensors, 8 + len(data), size)
    if lines:
        raise CheckpointError(f"{path}: {'; '.join(lines)}. {AGAIN}")
    return {tensor.name: tensor for tensor in tensors}


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """The JSON text of a header and the size of its file in bytes."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(512)
            if size == 0:
                raise CheckpointError(f"{path}: is empty (0 bytes). {AGAIN}")
            _refuse_stand_in(path, start)
            length = int.from_bytes(start[:8], "little") if size >= 8 else 0
            if length > _MAX_HEADER:
                raise CheckpointError(
                    f"{path}: is not a safetensors file, or its start is damaged: its header would take {length} "
                    f"bytes, and {_MAX_HEADER} are the most. {AGAIN}"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path}: is truncated or damaged: its header alone takes {8 + length} bytes, the file has {size}. "
                    f"{AGAIN}"
                )
            file.seek(8)
            return file.read(length), size
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error


def _entry_fault(entry: object) -> str | None:
    """What is wrong with one entry of a header, taken by itself."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return "no entry of dtype, shape and data_offsets"
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        return "shape or data_offsets hold something else than whole numbers from 0 to 2**63"
    bits = element_bits(entry["dtype"])
    if bits is None:
        return f"unknown dtype {some([entry['dtype']])}"
    # Sizes of 0 do not count here: array libraries refuse such a shape, however few bytes it has.
    if len(shape) > _MAX_RANK or math.prod(size or 1 for size in shape) * bits >= 2**63:
        return "impossible shape"
    if math.prod(shape) * bits != (offsets[1] - offsets[0]) * 8:
        return "shape and dtype do not fit the number of bytes"
    return None


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _layout_faults(tensors: Sequence[StoredTensor], start: int, size: int) -> list[str]:
    """Whether tensors, in order of their offsets, fill a file of `size` bytes from byte `start` on, each byte once."""
    holes, overlaps = [], []
    end = start
    for tensor in tensors:
        if tensor.offset > end:
            holes.append(tensor.name)
        elif tensor.offset < end:
            overlaps.append(tensor.name)
        end = max(end, tensor.offset + tensor.nbytes)
    lines = []
    if holes:
        lines.append(f"bytes that belong to no tensor lie before {some(holes)}")
    if overlaps:
        lines.append(f"overlap with the tensor before them: {some(overlaps)}")
    if end > size:
        lines.append(f"is truncated: its header says {end} bytes, the file has {size}")
    if end < size:
        lines.append(f"is longer than its header says: {end} bytes by the header, the file has {size}")
    return lines


def _parse(data: bytes) -> tuple[Any, list[str]]:
    """A JSON value, and the keys that some object in it holds more than once (the last one counts)."""
    doubled: list[str] = []

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            doubled.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return value

    try:
        return json.loads(data.decode(), object_pairs_hook=to_dict), doubled
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def open_file(path: Path) -> int:
    """A descriptor of a regular file, for reading; CheckpointError, with the reason, where there is none."""
    try:
        # Opening a pipe would wait for a writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path}: is not a file. {AGAIN}")
        return os.open(path, os.O_RDONLY)
    except (OSError, ValueError) as error:
        raise CheckpointError(unreadable(path, error)) from error


def unreadable(path: Path, error: OSError | ValueError) -> str:
    """Why a path could not be opened, for a message."""
    if isinstance(error, FileNotFoundError):
        if path.is_symlink():
            return f"{path}: is a link to a file that is not there: the download is incomplete. {AGAIN}"
        return f"{path}: is missing. Download it, or give the folder that holds it."
    if isinstance(error, PermissionError):
        return f"{path}: may not be read by this user (permission denied). Change its owner or its mode."
    return f"{path}: cannot be read: {reason_of(error)}."


def reason_of(error: Exception) -> str:
    """The system's own words for an error, without number and path."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _refuse_stand_in(path: Path, start: bytes) -> None:
    """Raises for the texts that failed downloads leave where a file should be."""
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself. Run `git lfs pull` in its folder.")
    if start[:100].lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(f"{path}: is a web page, most likely an error page of the server. {AGAIN}")
