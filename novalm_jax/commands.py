"""What all commands share: options from a dataclass, errors as paragraphs, exit codes.

Exit codes: 0, 2 for a mistake of the user's, 1 for a failure while running, 130 for Ctrl-C.
"""

from __future__ import annotations

import _thread
import io
import logging
import os
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol, TypeVar

import tyro

from novalm_jax.errors import NovaError, OptionError, UserError


class Debuggable(Protocol):
    """Options with a --debug flag."""

    @property
    def debug(self) -> bool: ...


Options = TypeVar("Options", bound=Debuggable)


def run_command(
    options: type[Options], body: Callable[[Options], None], program: str, arguments: Sequence[str] | None = None
) -> int:
    """Parses the command line into `options`, runs `body` on them, and returns the exit code.

    Errors of this package become one paragraph on stderr; --debug shows where they came from.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Text is never lost to a terminal that cannot show a character of it.
        sys.stdout.reconfigure(errors="backslashreplace")
    debug = "--debug" in (sys.argv[1:] if arguments is None else arguments)
    try:
        with _interrupts_arrive():
            parsed = tyro.cli(options, prog=program, args=arguments, config=(tyro.conf.UseAppendAction,))
            if sys.stdin is None or sys.stdout is None:
                raise OptionError("stdin and stdout must be open; redirect them to /dev/null instead of closing them.")
            body(parsed)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        _explain(program, error)
        return 2 if isinstance(error, UserError) else 1
    return 0


def leave(code: int) -> NoReturn:
    """Ends the process. After Ctrl-C at once: everything of ours is closed, and a library whose threads still compile
    may crash while Python takes itself down."""
    if code == 130:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def _interrupts_arrive() -> Iterator[None]:
    """Delivers Ctrl-C once more where Python had to drop it: in a destructor or a callback of the garbage collector,
    such as JAX's, an exception cannot be raised."""
    usual = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Timer(0.01, _thread.interrupt_main).start()
        else:
            usual(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


def _explain(program: str, error: Exception) -> None:
    """One paragraph on stderr; for an error that nobody foresaw, with its type and how to see where it came from."""
    text = (
        str(error) if isinstance(error, NovaError) else f"failed: {type(error).__name__}: {error} (--debug shows where)"
    )
    width = max(60, min(120, os.get_terminal_size(2).columns if sys.stderr.isatty() else 120))
    print(textwrap.fill(f"{program}: {text}", width, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
