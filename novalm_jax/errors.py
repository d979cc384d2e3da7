"""Errors a user can meet. Each says what happened, where, and what to do about it.

Commands turn a `UserError` into one paragraph and exit code 2, any other `NovaError` into exit code 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class NovaError(Exception):
    """Base of every error this package raises on purpose."""


class UserError(NovaError):
    """Something the caller can mend: an option, a file, a budget, a request."""


class OptionError(UserError):
    """An option has a value that cannot be used."""


class ConfigError(UserError):
    """`config.json` is unreadable, incomplete, or asks for something that is not implemented."""


class CheckpointError(UserError):
    """The files of a checkpoint are missing, damaged, or do not hold the tensors the configuration asks for."""


class RequestError(UserError):
    """A request cannot be served as it was asked: its prompt, its sampling parameters or its chat messages."""


class BudgetError(UserError):
    """The model does not fit the memory it was given.

    Attributes:
      least_bytes: the smallest device budget, in bytes, that works with the other options as they are.
      table: what needs how many bytes, by name.
    """

    def __init__(self, message: str, *, least_bytes: int, table: Mapping[str, int]):
        super().__init__(message)
        self.least_bytes = least_bytes
        self.table = dict(table)


class EngineError(NovaError):
    """The engine failed while it ran; the requests it was running are lost."""


class PageError(EngineError):
    """Pages of the key-value cache were used against the rules; without this, something wrong would be read."""


class WriteError(NovaError):
    """Files could not be written: the disk is full, was taken away, or failed."""


def some(names: Iterable[str], most: int = 8) -> str:
    """Names for a message, safe to print: long lists and long or unprintable names are cut or escaped."""
    texts = [name if name.isprintable() else ascii(name) for name in names]
    texts = [text if len(text) <= 200 else f"{text[:200]}..." for text in texts]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
