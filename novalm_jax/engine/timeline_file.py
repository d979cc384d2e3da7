"""The file that the timeline of a run goes to, at its end."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from novalm_jax.checkpoint.atomic import check_file, write_whole
from novalm_jax.timeline import Timeline

_log = logging.getLogger("novalm_jax")


class TimelineFile(Timeline):
    """A timeline that is written to a file, once.

    Attributes:
      written: the file, once it is complete.
    """

    def __init__(self, path: Path):
        """Begins it.

        Raises:
          OptionError: no file can be written there.
        """
        self._path = check_file(path, "timeline")
        self._writing = threading.Lock()
        self.written: Path | None = None
        super().__init__()

    def write(self) -> None:
        """Writes the file, unless it is written.

        Raises:
          WriteError: it cannot be written.
        """
        with self._writing:
            if self.written is None:
                if left_out := self.left_out:
                    listed = ", ".join(f"{count:,} of {track}" for track, count in left_out.items())
                    _log.warning("The timeline is full and lacks the last spans: %s. Trace a shorter run.", listed)
                write_whole(self._path, self.to_json())
                self.written = self._path
