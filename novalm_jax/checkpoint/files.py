"""Files of a checkpoint: which files of a folder make it, whether they agree, and the bytes of a tensor.

Knows names and bytes. Refuses to know models, JAX and what a tensor means. Never writes, and never maps a file into
memory: a file that breaks under a mapping kills the process, a read that fails is an error with a name.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from novalm_jax.checkpoint.header import (
    AGAIN,
    StoredTensor,
    load_object,
    open_file,
    read_header,
    reason_of,
    unreadable,
)
from novalm_jax.checkpoint.hub import cached_name
from novalm_jax.errors import CheckpointError, some

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_MAX_READ = 1 << 30  # Linux cuts a read at 2 GiB, macOS refuses it
_NUMBERED = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.safetensors")
FROM_TORCH = (".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack")
FROM_OTHERS = (".gguf", ".npz")


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder`, by name, from the headers alone.

    The files are those that `model.safetensors.index.json` names; without an index `model.safetensors`, else one
    complete set of numbered shards, else the only .safetensors file. Other files in the folder are not looked at.

    Raises:
      CheckpointError: with all that is wrong in the folder: files missing, cut short, damaged or of another format,
        tensors stored twice, or index and files that disagree.
    """
    names = _names_in(folder)
    problems: list[str] = []
    weight_map = _read_index(folder / INDEX, problems) if INDEX in names else None
    files = _files_without_index(folder, names, problems) if weight_map is None else sorted(set(weight_map.values()))

    missing = [name for name in files if not os.path.lexists(folder / name)]
    if missing:
        count = f"{len(missing)} of {len(files)} {'file' if len(files) == 1 else 'files'}"
        problems.append(f"{folder}: {count} missing: {some(missing, 1000)}. {_how_to_complete(folder)}")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name in files:
        if name not in missing:
            try:
                headers[name] = read_header(folder / name)
            except CheckpointError as error:
                problems.append(str(error))
    problems += _disagreements(folder, weight_map, headers)
    if not problems and not any(headers.values()):
        problems.append(f"{folder}: its files hold no tensors.")
    if problems:
        raise CheckpointError(_report(folder, problems))
    return {name: tensor for header in headers.values() for name, tensor in header.items()}


class Range(NamedTuple):
    """Bytes of a tensor from `start` on, as many as `out` has room for, and where they go."""

    tensor: StoredTensor
    start: int
    out: memoryview | np.ndarray

    @property
    def offset(self) -> int:
        """First byte, from the start of the file."""
        return self.tensor.offset + self.start


class TensorReader:
    """Reads bytes of stored tensors, by position; keeps each file open until `close`. Also a context manager.

    Any thread may call any method at any time; reads of several threads run at the same time.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open_files: dict[Path, int] = {}
        # Of a reader that nobody closed.
        weakref.finalize(self, _close_files, self._open_files)
        self._active = 0
        self._closed = False
        self._bytes_read = 0

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from files so far."""
        with self._changed:
            return self._bytes_read

    def read_into(self, tensor: StoredTensor, out: memoryview | np.ndarray, start: int = 0) -> None:
        """Fills `out` with the bytes of `tensor` from byte `start` of the tensor on.

        Args:
          tensor: from `list_tensors`.
          out: contiguous and writable; a view as uint8 where the buffer protocol does not know the type (bfloat16).
          start: first byte to read, counted from the start of the tensor.

        Raises:
          CheckpointError: the file went away, ends too early or cannot be read. `out` then holds no usable data.
          ValueError: `out` is not such a buffer, the range is not inside the tensor, or the reader is closed.
        """
        self.read_run([Range(tensor, start, out)])

    def read_run(self, ranges: Sequence[Range]) -> None:
        """As `read_into`, for ranges that lie one after another in one file, together.

        Raises:
          CheckpointError, ValueError: as `read_into`.
        """
        views = [_checked_view(part) for part in ranges]
        first = ranges[0]
        offset, total, done = first.offset, sum(len(view) for view in views), 0
        if total == 0:
            return
        file = self._begin(first.tensor.file)
        try:
            while done < total:
                count = os.preadv(file, _rest(views, done), offset + done)
                if count == 0:
                    raise EOFError
                done += count
        except (OSError, EOFError) as error:
            reason = "the file ends there; it was longer when its header was read"
            reason = reason_of(error) if isinstance(error, OSError) else reason
            raise CheckpointError(_read_failed(ranges, offset + done, reason)) from error
        finally:
            self._end(done)

    def announce(self, tensor: StoredTensor, start: int, nbytes: int) -> None:
        """Tells the system, where it can be told, that these bytes of `tensor` are read soon. Does not wait for them.

        Raises:
          CheckpointError: the file went away.
          ValueError: the reader is closed.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        file = self._begin(tensor.file)
        try:
            # No more than advice: a file system that takes none still reads.
            with suppress(OSError):
                os.posix_fadvise(file, tensor.offset + start, nbytes, os.POSIX_FADV_WILLNEED)
        finally:
            self._end(0)

    def forget_pages(self) -> None:
        """Tells the system, where it can be told, that what it keeps in memory of these files is not needed."""
        with self._changed:
            for file in self._open_files.values() if hasattr(os, "posix_fadvise") else ():
                with suppress(OSError):
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes the files once the reads that are running have ended. Reads that come later raise ValueError."""
        with self._changed:
            self._closed = True
            # A descriptor that is closed under a running read may by then name another file.
            self._changed.wait_for(lambda: self._active == 0)
            _close_files(self._open_files)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, path: Path) -> int:
        with self._changed:
            if self._closed:
                raise ValueError("this TensorReader is closed")
            if path not in self._open_files:
                self._open_files[path] = open_file(path)
            self._active += 1
            return self._open_files[path]

    def _end(self, count: int) -> None:
        with self._changed:
            self._bytes_read += count
            self._active -= 1
            self._changed.notify_all()


def _close_files(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def _checked_view(part: Range) -> memoryview:
    """The bytes that a range goes to."""
    tensor, start, out = part
    view = out if isinstance(out, memoryview) else out.data
    if view.readonly or not view.c_contiguous:
        raise ValueError("out must be writable and contiguous")
    if start < 0 or start + view.nbytes > tensor.nbytes:
        end = start + view.nbytes
        raise ValueError(f"bytes {start} to {end} are not inside {tensor.name}, which has {tensor.nbytes} bytes")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of these after so many bytes, as much as one read may take."""
    rest, room = [], _MAX_READ
    for view in views:
        part = view[done : done + room]
        done = max(done - len(view), 0)
        room -= len(part)
        if len(part):
            rest.append(part)
    return rest


def _read_failed(ranges: Sequence[Range], byte: int, reason: str) -> str:
    tensor = next(part.tensor for part in reversed(ranges) if part.offset <= byte)
    where = f"{tensor.file}: reading tensor {tensor.name} stopped at byte {byte} of the file"
    done = byte - tensor.offset
    return f"{where} ({done} of {tensor.nbytes} of the tensor): {reason}. Check the disk, or download the file again."


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except NotADirectoryError:
        where = f": {folder.parent}" if folder.is_file() else ""
        raise CheckpointError(f"{folder} is not a folder. Give the folder that holds config.json{where}.") from None
    except FileNotFoundError:
        raise CheckpointError(
            f"There is no folder {folder}. Give the folder of a downloaded checkpoint, the one that holds config.json, "
            "or the name of a model in the Hugging Face cache, such as org/name."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(unreadable(folder, error)) from error


def _read_index(path: Path, problems: list[str]) -> dict[str, str]:
    """Tensor name -> file name, as far as the index can be used; the rest goes to `problems`."""
    try:
        index, doubled = load_object(path)
    except CheckpointError as error:
        problems.append(str(error))
        return {}
    if doubled:
        problems.append(f"{path}: names twice: {some(doubled)}. {AGAIN}")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{path}: has no weight_map, so it names no tensors. {AGAIN}")
        return {}
    strange = {name for name, shard in weight_map.items() if not _stays_inside(shard)}
    if strange:
        shards = some({str(weight_map[name]) for name in strange})
        problems.append(f"{path}: refused, because it leads out of the folder or names no file: {shards}. {AGAIN}")
    return {name: str(PurePosixPath(shard)) for name, shard in weight_map.items() if name not in strange}


def _stays_inside(shard: object) -> bool:
    if not isinstance(shard, str) or "\\" in shard or "\0" in shard:
        return False
    path = PurePosixPath(shard)
    return bool(path.name) and not path.is_absolute() and ".." not in path.parts


def _files_without_index(folder: Path, names: Sequence[str], problems: list[str]) -> list[str]:
    """The files of a checkpoint that has no index; nothing, and the reason in `problems`, where that is not clear."""
    stored = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
    sets: dict[tuple[str, int], set[int]] = defaultdict(set)
    for name in stored:
        if match := _NUMBERED.fullmatch(name):
            sets[match[1], int(match[3])].add(int(match[2]))
    # Other names are extras beside a checkpoint under the usual name.
    usual = [key for key in sets if key[0] == "model"]
    candidates = usual or ([] if SINGLE in stored else list(sets))
    if SINGLE in stored and not candidates:
        return [SINGLE]
    if len(candidates) == 1 and SINGLE not in stored:
        (prefix, total), numbers = candidates[0], sets[candidates[0]]
        strays = [f"{number:05}" for number in sorted(numbers) if not 1 <= number <= total]
        if strays:
            problems.append(f"{folder}: {prefix} shards are numbered 1 to {total}, but there is {some(strays)}.")
        return [f"{prefix}-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)]
    if not stored:
        problems.append(f"{folder}: {_no_safetensors(names)}")
        return []
    if len(stored) == 1:
        return stored
    problems.append(
        f"{folder}: which files make the checkpoint is not clear: there is no {INDEX}, and several .safetensors files: "
        f"{some(stored)}. Download the index, or leave only the files of one checkpoint."
    )
    return []


def _no_safetensors(names: Sequence[str]) -> str:
    if not names:
        return "the folder is empty. Download the checkpoint into it."
    if "weights" in names and CONFIG in names:
        return (
            "this is an Orbax checkpoint. nova.load_orbax reads it; `python -m novalm_jax.convert` turns it into "
            ".safetensors files."
        )
    if "snapshots" in names:
        return "this is a download cache. Give the folder of one version, under snapshots/."
    if found := [name for name in names if name.endswith(FROM_TORCH)]:
        return (
            f"holds {some(found)}, a format that is not read; only .safetensors files are. Convert it once with "
            "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
        )
    if found := [name for name in names if name.endswith(FROM_OTHERS)]:
        return (
            f"holds {some(found)}, a format that is not read; only .safetensors files are. Download the original "
            "checkpoint that this file was converted from."
        )
    return f"holds no .safetensors file, only {some(names)}. Give the folder that holds the weights."


def _disagreements(
    folder: Path, weight_map: Mapping[str, str] | None, headers: Mapping[str, Mapping[str, StoredTensor]]
) -> list[str]:
    """Tensors that the readable files hold twice, or that index and files do not agree about."""
    holders: dict[str, list[str]] = defaultdict(list)
    for file, header in headers.items():
        for name in header:
            holders[name].append(file)
    lines = []
    if doubled := [f"{name} in {' and '.join(files)}" for name, files in holders.items() if len(files) > 1]:
        lines.append(f"{folder}: stored twice: {some(doubled)}. Leave only the files of one checkpoint.")
    if weight_map is None:
        return lines
    lacking = [
        f"{name} in {file}" for name, file in weight_map.items() if file in headers and name not in headers[file]
    ]
    if lacking:
        lines.append(f"{folder / INDEX}: names tensors that their file lacks: {some(sorted(lacking))}. {AGAIN}")
    if unnamed := [f"{name} in {files[0]}" for name, files in holders.items() if name not in weight_map]:
        lines.append(f"{folder / INDEX}: does not name tensors that its files hold: {some(unnamed)}. {AGAIN}")
    return lines


def _how_to_complete(folder: Path) -> str:
    name = cached_name(folder)
    return f"Run `hf download {name}`: it fetches what is missing." if name else "Download what is missing."


def _report(folder: Path, problems: Sequence[str]) -> str:
    text = problems[0]
    if len(problems) > 1:
        text = "\n".join([f"{len(problems)} problems with the checkpoint in {folder}:", *(f"- {p}" for p in problems)])
    places = [folder, folder / ".cache/huggingface/download"]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    if left := [file.name for place in places for file in place.glob("*.incomplete")]:
        text += f"\nAn unfinished download left {some(sorted(left))}: run the download again, it goes on from there."
    return text
