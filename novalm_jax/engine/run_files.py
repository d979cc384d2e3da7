"""Files that a run leaves behind: their places are tried before it begins, and they are written once, at its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from novalm_jax.checkpoint.atomic import check_file, write_whole
from novalm_jax.errors import OptionError
from novalm_jax.experts.profile import write_profile
from novalm_jax.experts.recorder import Recorder
from novalm_jax.experts.traces import write_trace
from novalm_jax.options import EngineOptions
from novalm_jax.timeline import Timeline

_log = logging.getLogger("novalm_jax")


class RunFile:
    """One of them.

    Attributes:
      option: the one that asks for it.
      written: the file, once it is complete.
    """

    def __init__(self, option: str, path: Path, write: Callable[[Path], bool]):
        """Tries the place.

        Args:
          option: is blamed where no file can be written there.
          path: of the file.
          write: writes it, unless there is nothing to write; whether there was.

        Raises:
          OptionError: no file can be written there.
        """
        self.option = option
        self._path = check_file(path, option)
        self._write = write
        self._writing = threading.Lock()
        self.written: Path | None = None

    def write(self) -> None:
        """Writes the file, unless it is written.

        Raises:
          WriteError: it cannot be written.
        """
        with self._writing:
            if self.written is None and self._write(self._path):
                self.written = self._path


def run_files(options: EngineOptions, timeline: Timeline | None, recorder: Recorder) -> tuple[RunFile, ...]:
    """The files that options ask for, of a run that has this timeline and this recorder.

    Raises:
      OptionError: no file can be written at such a place, or the model has no experts to write of.
    """
    files = []
    if options.timeline is not None and timeline is not None:
        files.append(_timeline_file(options.timeline, timeline))
    for name, path, make in (
        ("trace_out", options.trace_out, _trace_file),
        ("profile_out", options.profile_out, _profile_file),
    ):
        if path is not None:
            if not recorder.uses.size:
                raise OptionError(
                    f"{name}: this model has no routed experts, and so no choices to write. Leave it out."
                )
            files.append(make(path, recorder))
    return tuple(files)


def _timeline_file(path: Path, timeline: Timeline) -> RunFile:
    def write(place: Path) -> bool:
        if left_out := timeline.left_out:
            listed = ", ".join(f"{count:,} of {track}" for track, count in left_out.items())
            _log.warning("The timeline is full and lacks the last spans: %s. Trace a shorter run.", listed)
        write_whole(place, timeline.to_json())
        return True

    return RunFile("timeline", path, write)


def _trace_file(path: Path, recorder: Recorder) -> RunFile:
    def write(place: Path) -> bool:
        if recorder.left_out:
            _log.warning("The trace is full and lacks the last %d tokens. Record a shorter run.", recorder.left_out)
        trace = recorder.trace()
        if trace is not None:
            write_trace(trace, place)
        return _was_there("trace_out", trace)

    return RunFile("trace_out", path, write)


def _profile_file(path: Path, recorder: Recorder) -> RunFile:
    def write(place: Path) -> bool:
        profile = recorder.profile()
        if profile is not None:
            write_profile(profile, place)
        return _was_there("profile_out", profile)

    return RunFile("profile_out", path, write)


def _was_there(option: str, made: object) -> bool:
    if made is None:
        _log.warning("%s: no token was decoded after a prompt, so that there is nothing to write", option)
    return made is not None
