"""Ctrl-C at a line of one's choice: signals arrive between any two instructions."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from typing import Any


def interrupted_at(line: int, work: Callable[[], object], folder: str) -> bool:
    """Runs `work` with Ctrl-C at the `line`-th line it executes in files of `folder`; False where it has fewer."""
    left = line

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if folder not in frame.f_code.co_filename:
            return None
        # The end of a with-statement is a line again, but Python looks for signals only after that has let go.
        statement = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not statement.lstrip().startswith("with "):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
