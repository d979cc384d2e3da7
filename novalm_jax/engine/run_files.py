"""Files that a run leaves behind: their places are tried before it begins, and they are written once, at its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
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
        self._done = False

    def write(self) -> None:
        """Writes the file, unless it is written.

        Raises:
          WriteError: it cannot be written.
        """
        with self._writing:
            if self._done:
                return
            if self._write(self._path):
                self.written = self._path
            else:
                _log.warning("%s: no token was decoded after a prompt, so that there is nothing to write", self.option)
            self._done = True


def run_files(options: EngineOptions, timeline: Timeline | None, recorder: Recorder) -> tuple[RunFile, ...]:
    """The files that options ask for, of a run that has this timeline and this recorder.

    Raises:
      OptionError: no file can be written at such a place, or the model has no experts to write of.
    """
    files = []
    if options.timeline is not None and timeline is not None:
        files.append(RunFile("timeline", options.timeline, partial(_write_timeline, timeline)))
    for name, path, write in (
        ("trace_out", options.trace_out, _write_trace),
        ("profile_out", options.profile_out, _write_profile),
    ):
        if path is not None:
            if not recorder.uses.size:
                raise OptionError(
                    f"{name}: this model has no routed experts, and so no choices to write. Leave it out."
                )
            files.append(RunFile(name, path, partial(write, recorder)))
    return tuple(files)


def _write_timeline(timeline: Timeline, place: Path) -> bool:
    if left_out := timeline.left_out:
        listed = ", ".join(f"{count:,} of {track}" for track, count in left_out.items())
        _log.warning("The timeline is full and lacks the last spans: %s. Trace a shorter run.", listed)
    write_whole(place, timeline.to_json())
    return True


def _write_trace(recorder: Recorder, place: Path) -> bool:
    if recorder.left_out:
        _log.warning("The trace is full and lacks the last %d tokens. Record a shorter run.", recorder.left_out)
    if (trace := recorder.trace()) is not None:
        write_trace(trace, place)
    return trace is not None


def _write_profile(recorder: Recorder, place: Path) -> bool:
    if (profile := recorder.profile()) is not None:
        write_profile(profile, place)
    return profile is not None
