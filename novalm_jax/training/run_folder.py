"""The folder of a training run: whose it is, its tokenizer, its checkpoints and its metrics.

Whatever moment the process dies at, every file is as it was, or complete. Refuses to know what is trained.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp  # type: ignore[import-untyped]
import tokenizers

from novalm_jax.checkpoint.atomic import Work
from novalm_jax.checkpoint.header import reason_of
from novalm_jax.errors import OptionError, some
from novalm_jax.options import TrainOptions
from novalm_jax.training.data import END, Corpus, read_corpus

METRICS = "metrics.jsonl"
"""One JSON object a line: what each update and each validation gave."""

TOKENIZER = "tokenizer"
"""The folder of the tokenizer."""

_RUN = "run.json"


@contextmanager
def hold(output: Path, texts: Sequence[Path], options: TrainOptions) -> Iterator[None]:
    """Keeps the folder of a run from other processes and other runs.

    Raises:
      OptionError: it cannot be made, holds something else, or a process is at work in it; a text is not there.
    """
    try:
        run = {"options": asdict(options), "texts": [[path.name, path.stat().st_size] for path in texts]}
        output.mkdir(parents=True, exist_ok=True)
        lock = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OptionError(f"{error.filename} cannot be used: {reason_of(error)}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _begin(output, run)
        yield
    except BlockingIOError:
        raise OptionError(f"output: another process is at work in {output}. Let it end first.") from None
    finally:
        os.close(lock)


def _begin(output: Path, run: dict[str, Any]) -> None:
    """Writes down what the run is, and refuses to go on with another one."""
    said = output / _RUN
    if not (output / TOKENIZER).exists():
        if others := sorted(set(os.listdir(output)) - {_RUN, _unfinished(said).name, f"{TOKENIZER}.partial"}):
            raise OptionError(f"output: {output} holds {some(others, 3)}. Give a folder of its own.")
        _rewrite(said, json.dumps(run, indent=2))
    began = json.loads(said.read_text())
    if began != run:
        differing = [name for name, value in run["options"].items() if began["options"].get(name) != value]
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
    known = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")) if folder.exists() else None
    corpus = read_corpus(texts, options.validation, options.seed, options.vocab_size, known)
    if len(corpus.train) < 2 * options.context_length + 2:
        raise OptionError(
            f"texts: {len(corpus.train)} tokens to train on are too few for windows of {options.context_length}. Give "
            "more text, or a smaller context_length."
        )
    if known is not None:
        return corpus
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "add_bos_token": False}
    end = corpus.tokenizer.token_to_id(END)
    with Work(folder.absolute(), {}, resumable=False) as work:
        work.put("tokenizer.json", corpus.tokenizer.to_str(pretty=True).encode())
        work.put("tokenizer_config.json", json.dumps(config, indent=2).encode())
        work.put("generation_config.json", json.dumps({"bos_token_id": end, "eos_token_id": end}, indent=2).encode())
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

    def __init__(self, path: Path, step: int):
        lines = path.read_text().splitlines(keepends=True) if step else []
        # A last line that a kill cut short is later than any checkpoint.
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        _rewrite(path, "".join(kept))
        self._path = path

    def write(self, step: int, kind: str, record: Mapping[str, Any]) -> None:
        """Adds a record."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "kind": kind, **record}) + "\n")


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """The records of a run, in order."""
    return [json.loads(line) for line in (output / METRICS).read_text().splitlines()]


def _rewrite(path: Path, text: str) -> None:
    """A file with this text, at no moment with a part of it."""
    with _unfinished(path).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(_unfinished(path), path)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".unfinished")
