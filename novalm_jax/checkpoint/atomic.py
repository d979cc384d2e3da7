"""A folder that comes into being at once. It is filled beside its place, under another name, and renamed when complete.

Whatever moment the process dies at, the destination is as it was, or complete. Work that may be resumed carries a
manifest that says what it is made from and how; other work is never taken over. Knows names, bytes and the order of
effects on a disk. Refuses to know what files hold. POSIX only; one thread, and one process for each destination.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from novalm_jax.checkpoint.header import reason_of
from novalm_jax.errors import OptionError, WriteError, some
from novalm_jax.units import format_size

MANIFEST = ".novalm-work.json"
"""In the unfinished folder: what it is made from. It goes last, so a complete folder has it for a moment."""

_UNFINISHED = ".unfinished"
_PARTIAL = ".partial"
_REMOVALS, _PAUSE = 100, 0.05  # tries, seconds between them
_MAX_WRITE = 1 << 30  # Linux cuts a write at 2 GiB, macOS refuses it


def check_destination(destination: str | Path, source: Path | None = None) -> Path:
    """The place where a new folder may be made, without links in it. Reads no file.

    Args:
      destination: must not exist, or be an empty folder, or unfinished work.
      source: the folder that is read; the new one may be neither that nor inside it.

    Raises:
      OptionError: the folder cannot be made there; the message says why and what to do.
    """
    if not str(destination) or "\0" in str(destination):
        raise OptionError(f"{str(destination)!r} is no path. Give the path of a folder to be made.")
    try:
        path = Path(destination).expanduser().resolve()
        if source is not None and path.is_relative_to(source.resolve()):
            raise OptionError(f"{path} is the source itself or inside it. Give a folder elsewhere.")
        if not path.parent.is_dir():
            raise OptionError(f"there is no folder {path.parent} to make it in. Make that folder first.")
        if os.path.ismount(path):
            raise OptionError(
                f"{path} is where a file system is mounted, and cannot be put in place by renaming. Give "
                f"a folder inside it, such as {path / 'model'}."
            )
        if path.exists() and not path.is_dir():
            raise OptionError(f"{path} is a file. Give the path of a folder to be made.")
        if path.exists() and (names := sorted(os.listdir(path))) and MANIFEST not in names:
            raise OptionError(
                f"{path} exists and holds {some(names, 3)}. Give another folder, or delete this one; "
                "nothing is overwritten."
            )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise OptionError(f"This user may not write into {path.parent}. Change its mode, or go elsewhere.")
    except (OSError, RuntimeError) as error:
        raise OptionError(f"{destination} cannot be looked at: {reason_of(error)}.") from None
    return path


def check_file(path: str | Path, name: str) -> Path:
    """The place where `write_whole` may put a file, without links in it. Tries it; a file that is there stays.

    Raises:
      OptionError: no file can be written there; the message says why. `name` is the option to blame.
    """
    try:
        place = Path(path).expanduser().resolve()
        if not place.parent.is_dir():
            raise OptionError(f"{name}: there is no folder {place.parent} to write {place.name} in. Make it first.")
        if place.exists() and not place.is_file():
            raise OptionError(f"{name}: {place} is there and no file. Give the path of a file.")
        unfinished = place.with_name(place.name + _UNFINISHED)
        with open(unfinished, "wb"):
            pass
        os.unlink(unfinished)
    except (OSError, RuntimeError, ValueError) as error:
        raise OptionError(f"{name}: {path} cannot be written: {reason_of(error)}. Give another one.") from None
    return place


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is at no moment there in part, in place of one that may be there.

    Raises:
      WriteError: it cannot be written.
    """
    unfinished = path.with_name(path.name + _UNFINISHED)
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(unfinished)
        if not isinstance(error, OSError):
            raise
        raise WriteError(f"{path} cannot be written: {reason_of(error)}.") from error


def _remove(folder: Path) -> None:
    """Removes a folder that threads of a library which failed may still write into, for a moment."""
    for _ in range(_REMOVALS):
        with suppress(OSError):
            shutil.rmtree(folder)
        if not folder.exists():
            return
        time.sleep(_PAUSE)


def unfinished_names(names: Iterable[str]) -> set[str]:
    """Those names in a folder that a process left which died while it wrote."""
    return {name for name in names if name.endswith((_UNFINISHED, _PARTIAL))}


def settle(folder: Path) -> None:
    """Ends what `Work.finish` leaves where the process dies at its last line: the folder is in place, and complete."""
    with suppress(FileNotFoundError):
        os.unlink(folder / MANIFEST)


class Work:
    """The folder in the making: `<destination>.partial`. A context manager; `finish` puts it in place.

    Left without `finish`, work that may be resumed stays as far as it has come, if that is more than small files;
    other work is deleted.
    """

    def __init__(self, destination: Path, identity: Mapping[str, Any], *, resumable: bool = True):
        """Takes a destination from `check_destination`, and what the folder is made from and how, as plain JSON."""
        self.destination = destination
        self.folder = destination.with_name(destination.name + _PARTIAL)
        self.identity = json.loads(json.dumps(identity))
        self._resumable = resumable
        self._lock = -1
        self._small = {MANIFEST}

    @property
    def in_place(self) -> bool:
        """Whether the folder is complete and in place already: the same work was ended just before its last line."""
        return _manifest(self.destination) == self.identity

    def __enter__(self) -> Work:
        """Takes hold of the folder, and of what the same work left in it.

        Raises:
          OptionError: it holds other work, or another process is at it.
          WriteError: it cannot be made.
        """
        if (self.destination / MANIFEST).exists():
            if not (self._resumable and self.in_place):
                raise OptionError(
                    f"{self.destination} is complete already, or from another source. Give "
                    "another folder, or delete this one; nothing is overwritten."
                )
            return self
        with self._explained():
            with suppress(FileExistsError):
                os.mkdir(self.folder)
            self._lock_folder()
            try:
                self._take_over()
            except BaseException:
                self._let_go()
                with suppress(OSError):
                    os.rmdir(self.folder)  # only where it is empty
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._lock < 0:
            return
        with suppress(OSError):
            if kind is not None and not self._worth_keeping():
                _remove(self.folder)
        self._let_go()

    def holds(self, name: str, size: int, start: bytes = b"") -> bool:
        """Whether this file is complete: of `size` bytes, and beginning with `start`."""
        try:
            with open(self.folder / name, "rb") as file:
                return os.fstat(file.fileno()).st_size == size and file.read(len(start)) == start
        except FileNotFoundError:
            return False

    def put(self, name: str, data: bytes) -> None:
        """Writes a whole file, unless it is there."""
        self._small.add(name)
        if not self.holds(name, len(data), data):
            with self.writing(name) as write:
                write(0, data)

    @contextmanager
    def writing(self, name: str) -> Iterator[Callable[[int, bytes | memoryview], None]]:
        """Gives a function that writes bytes at a position of a new file. The file has its name only once it is
        complete and on the disk.

        Raises:
          WriteError: it cannot be written.
        """
        unfinished = self.folder / (name + _UNFINISHED)
        with self._explained():
            file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            yield lambda start, data: self._write(file, start, data)
            with self._explained():
                os.fsync(file)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        finally:
            os.close(file)
        with self._explained():
            os.replace(unfinished, self.folder / name)

    @contextmanager
    def scratch(self, name: str) -> Iterator[tuple[int, Callable[[int, bytes | memoryview], None]]]:
        """Gives a file, and a function that writes bytes at a position of it. It goes away at the end.

        Raises:
          WriteError: it cannot be written.
        """
        path = self.folder / f"{name}{_UNFINISHED}.scratch"
        with self._explained():
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.unlink(path)
            yield file, lambda start, data: self._write(file, start, data)
        finally:
            os.close(file)

    @contextmanager
    def writing_folder(self, name: str) -> Iterator[Path]:
        """Gives a path at which someone else makes a folder; it gets its name once all of it is on the disk."""
        unfinished = self.folder / (name + _UNFINISHED)
        with self._explained():
            yield unfinished
            for folder, _, files in os.walk(unfinished, topdown=False):
                for path in [*(os.path.join(folder, file) for file in files), folder]:
                    _sync(path)
            os.rename(unfinished, self.folder / name)

    def require(self, nbytes: int) -> None:
        """Refuses to begin what the disk has no room for.

        Raises:
          OptionError: there are fewer than `nbytes` free bytes.
        """
        with self._explained():
            free = shutil.disk_usage(self.folder).free
        if free < nbytes:
            raise OptionError(
                f"{self.destination} needs {format_size(nbytes)} more, and its disk has "
                f"{format_size(free)} free. Make room, or give a folder on another disk."
            )

    def finish(self) -> None:
        """Puts the folder in place.

        Raises:
          WriteError: that fails; for example something has come into being at its place meanwhile.
        """
        with self._explained():
            if self._lock >= 0:
                os.fsync(self._lock)
                os.rename(self.folder, self.destination)
                _sync(self.destination.parent)
            os.unlink(self.destination / MANIFEST)
            _sync(self.destination)

    def _lock_folder(self) -> None:
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between opening and locking, another process may have put the folder in place.
            mine = os.path.samestat(os.fstat(self._lock), os.stat(self.folder))
        except (BlockingIOError, FileNotFoundError):
            mine = False
        except BaseException:
            self._let_go()
            raise
        if not mine:
            self._let_go()
            raise OptionError(f"another process is at work in {self.folder}. Let it end first.")

    def _let_go(self) -> None:
        os.close(self._lock)
        self._lock = -1

    def _take_over(self) -> None:
        """Keeps what the same work has completed, and nothing else."""
        names = set(os.listdir(self.folder))
        found = _manifest(self.folder)
        if found is None and names - {MANIFEST + _UNFINISHED}:
            raise OptionError(
                f"{self.folder} is in the way, and is no unfinished work: it holds "
                f"{some(sorted(names), 3)}. Move or delete it, or give another destination."
            )
        if found is not None and found != self.identity:
            differing = [key for key in {**found, **self.identity} if found.get(key) != self.identity.get(key)]
            raise OptionError(
                f"{self.folder} holds unfinished work of another kind: its {' and '.join(differing)} "
                "differ. Delete that folder to start anew, or give another destination."
            )
        for name in names - {MANIFEST}:
            if _UNFINISHED in name or not self._resumable:
                path = self.folder / name
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
        if found is None:
            self.put(MANIFEST, json.dumps(self.identity, indent=2).encode())

    def _worth_keeping(self) -> bool:
        """Whether more is complete than small files; a folder of those alone would only be in the way."""
        try:
            return self._resumable and any(
                name not in self._small and _UNFINISHED not in name for name in os.listdir(self.folder)
            )
        except OSError:
            return False

    def _write(self, file: int, start: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        done = 0
        with self._explained():
            while done < len(view):
                done += os.pwrite(file, view[done : done + _MAX_WRITE], start + done)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename2 or error.filename or self.folder
            kept = f" What is complete stays in {self.folder}: run the same again to go on, or delete it."
            raise WriteError(
                f"{self.destination} cannot be written: {reason_of(error)} ({where})."
                + (kept if self._worth_keeping() else "")
            ) from error


def _manifest(folder: Path) -> Any:
    """What the work in a folder is made from; None where there is no manifest."""
    try:
        return json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None


def _sync(path: str | Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
