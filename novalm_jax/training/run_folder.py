"""The folder of a training run: whose it is, its tokenizer, its checkpoints and its metrics.

Whatever moment the process dies at, every file is as it was, or complete. Refuses to know what is trained.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp  # type: ignore[import-untyped]
import tokenizers

from novalm_jax.checkpoint.atomic import Work, settle, unfinished_names, write_whole
from novalm_jax.checkpoint.header import reason_of
from novalm_jax.errors import OptionError, some
from novalm_jax.options import TrainOptions
from novalm_jax.training.data import END, Corpus, read_corpus

METRICS = "metrics.jsonl"
"""One JSON object a line: what each update and each validation gave."""

TOKENIZER = "tokenizer"
"""The folder of the tokenizer."""

# A small model knows little about rare words: a choice among all of them soon loses the thread.
_SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
_RUN = "run.json"
_log = logging.getLogger("novalm_jax")


@contextmanager
def hold(output: Path, texts: Sequence[Path], options: TrainOptions) -> Iterator[None]:
    """Keeps the folder of a run from other processes and other runs.

    Raises:
      OptionError: it cannot be made, holds something else, or a process is at work in it; a text cannot be read.
      WriteError: it cannot be written.
    """
    run = {"options": asdict(options), "texts": [[path.name, _digest(path)] for path in texts]}
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OptionError(f"output: {output} cannot be a folder: {reason_of(error)}. Give another one.") from None
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(f"output: another process is at work in {output}. Let it end first.") from None
        _begin(output, run)
        yield
    finally:
        os.close(folder)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise OptionError(f"texts: {path} cannot be read: {reason_of(error)}.") from None


def _begin(output: Path, run: dict[str, Any]) -> None:
    """Writes down what the run is, and refuses to go on with another one."""
    said, names = output / _RUN, set(os.listdir(output))
    if others := sorted(names - unfinished_names(names)) if _RUN not in names else []:
        raise OptionError(f"output: {output} holds {some(others, 3)}. Give a folder of its own.")
    # Before there are tokens nothing has been done, and what was wrong may be mended.
    if TOKENIZER not in names:
        write_whole(said, json.dumps(run, indent=2).encode())
    try:
        began = json.loads(said.read_text())
        options = dict(began["options"])
    except (OSError, ValueError, KeyError, TypeError):
        raise OptionError(f"output: {said} is damaged. Give another folder.") from None
    if began != run:
        differing = [name for name, value in run["options"].items() if options.get(name) != value]
        raise OptionError(
            f"output: {output} holds a run with other {', '.join(differing) or 'texts'}. Give the same to go on, or "
            "another folder to begin anew."
        )


def open_corpus(output: Path, texts: Sequence[Path], options: TrainOptions) -> Corpus:
    """The text as tokens. The tokenizer lies in a folder `TOKENIZER` as checkpoints have it, after the first time.

    Raises:
      OptionError: a text cannot be read, or is too short.
    """
    folder = output / TOKENIZER
    settle(folder)
    known = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")) if folder.exists() else None
    corpus = read_corpus(texts, options.validation, options.seed, options.vocab_size, known)
    if len(corpus.train) < 2 * options.context_length + 2:
        raise OptionError(
            f"texts: {len(corpus.train)} tokens to train on are too few for windows of {options.context_length}. Give "
            "more text, or a smaller context_length."
        )
    if known is not None:
        return corpus
    if (size := corpus.tokenizer.get_vocab_size()) < options.vocab_size:
        _log.warning("The texts give a vocabulary of %s tokens, fewer than vocab_size, %s.", size, options.vocab_size)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "add_bos_token": False}
    end = corpus.tokenizer.token_to_id(END)
    generation = _SAMPLING | {"bos_token_id": end, "eos_token_id": end}
    with Work(folder.absolute(), {}, resumable=False) as work:
        work.put("tokenizer.json", corpus.tokenizer.to_str(pretty=True).encode())
        work.put("tokenizer_config.json", json.dumps(config, indent=2).encode())
        work.put("generation_config.json", json.dumps(generation, indent=2).encode())
        work.finish()
    return corpus


@contextmanager
def open_checkpoints(folder: Path) -> Iterator[ocp.CheckpointManager]:
    """Orbax keeps the last two checkpoints; one that a kill cut short does not count."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        yield manager


class Log:
    """Appends records to a file of JSON lines; begins with those up to a step, and forgets later ones."""

    def __init__(self, output: Path, step: int):
        self._path = output / METRICS
        kept = [record for record in read_metrics(output) if record["step"] <= step] if step else []
        write_whole(self._path, "".join(map(_line, kept)).encode())

    def write(self, step: int, kind: str, record: Mapping[str, Any]) -> None:
        """Adds a record."""
        with self._path.open("a") as file:
            file.write(_line({"step": step, "kind": kind, **record}))


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """The records of a run, in order; without a last one that a kill cut short."""
    lines = (output / METRICS).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"
