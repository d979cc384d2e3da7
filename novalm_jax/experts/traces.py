"""Traces: the experts that a model chose, token by token, as they are recorded, replayed and made up.

Knows files and arrays, and what of a configuration they must fit. Refuses to know how a model is run, and what a cache
does with it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from novalm_jax.config import ModelConfig
from novalm_jax.errors import OptionError
from novalm_jax.experts.array_files import UNREADABLE, read_arrays, write_arrays
from novalm_jax.experts.records import moe_layers
from novalm_jax.models.router import NONE

_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert")
_MOST_EXPERTS = 100_000
"""Of a layer; a number beyond is a mistake, and tables of so many would take all memory."""

_DECODE = 1  # in the column phase; 0 are prompts
_OPTIONAL = ("weights", "sequence", "step", "layers", "num_experts", "record_bytes")


@dataclass(frozen=True)
class Trace:
    """What was chosen. A row is a token of a sequence; rows follow one another as they were run.

    Attributes:
      name: of the file, or of what made it.
      experts: int `[rows, layers, k]`, best first; `NONE` where a layer chooses fewer. Layers are those with experts.
      sequence: int `[rows]`, which sequence a row belongs to.
      step: int `[rows]`, never falling: rows of one step were run together.
      num_experts: of a layer.
      weights: float `[rows, layers, k]`, of the experts; None where nobody recorded them.
      layers: int `[layers]`, the numbers that the model gives them.
      record_bytes: of an expert; None where nobody said.
    """

    name: str
    experts: np.ndarray
    sequence: np.ndarray
    step: np.ndarray
    num_experts: int
    layers: np.ndarray
    weights: np.ndarray | None = None
    record_bytes: int | None = None

    def __post_init__(self) -> None:
        """Checks that the parts fit each other.

        Raises:
          ValueError: they do not; the message says how.
        """
        rows, layers, _ = _shape(self.experts)
        for name, values, shape in (
            ("sequence", self.sequence, (rows,)),
            ("step", self.step, (rows,)),
            ("layers", self.layers, (layers,)),
            ("weights", self.weights, self.experts.shape),
        ):
            if values is not None and values.shape != shape:
                raise ValueError(f"{name} is {list(values.shape)} and experts {list(self.experts.shape)}")
            kind = np.floating if name == "weights" else np.integer
            if values is not None and not np.issubdtype(values.dtype, kind):
                raise ValueError(f"{name} is {values.dtype}")
        if (self.step[1:] < self.step[:-1]).any():
            raise ValueError("its steps are not in order")
        if self.record_bytes is not None and self.record_bytes < 1:
            raise ValueError(f"record_bytes is {self.record_bytes}")
        ranked = np.sort(self.experts, axis=2)
        if ((ranked[:, :, 1:] == ranked[:, :, :-1]) & (ranked[:, :, 1:] != NONE)).any():
            raise ValueError("a token has the same expert twice in a layer")
        if (self.experts[:, :, 0] == NONE).any():
            raise ValueError("in some layer a token has no expert")
        if not self.experts.max() < self.num_experts <= _MOST_EXPERTS:
            raise ValueError(f"it has expert {self.experts.max()}, and num_experts is {self.num_experts}")

    @staticmethod
    def of_rows(name: str, experts: np.ndarray, lengths: np.ndarray | None = None, **more: Any) -> Trace:
        """A trace of sequences of some lengths, one after another, a token a step; None: one sequence.

        Raises:
          ValueError: as above, or the lengths do not add up.
        """
        rows, layers, _ = _shape(experts)
        lengths = np.array([rows]) if lengths is None else lengths
        if lengths.sum() != rows:
            raise ValueError(f"its sequences have {lengths.sum()} tokens, and experts {rows}")
        parts: dict[str, Any] = {
            "sequence": np.repeat(np.arange(len(lengths)), lengths),
            "step": np.arange(rows),
            "layers": np.arange(layers),
            "num_experts": int(experts.max()) + 1,
        }
        return Trace(name, experts, **{**parts, **more})

    def of(self, rows: slice | np.ndarray) -> Trace:
        """Some of its rows, in their order."""
        return replace(
            self,
            experts=self.experts[rows],
            sequence=self.sequence[rows],
            step=self.step[rows],
            weights=None if self.weights is None else self.weights[rows],
        )

    def sequences(self) -> list[np.ndarray]:
        """The rows of each sequence, int `[n]`."""
        order = np.argsort(self.sequence, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(self.sequence[order])) + 1)

    def together(self, batch: int | None, quantum: int = 0) -> Iterator[np.ndarray]:
        """The rows of each step, int `[n]`: as recorded (None), or with so many sequences side by side. Where one ends,
        the next one begins. With a quantum, one half of them runs for so many steps before the other half does."""
        if batch is None:
            borders = np.flatnonzero(np.diff(self.step)) + 1
            yield from np.split(np.arange(len(self.step)), borders)
            return
        waiting = self.sequences()[::-1]
        # What is left of each, those that have waited for longest first.
        running: list[np.ndarray] = []
        turn, left = 0, 0
        while waiting or running:
            while waiting and len(running) < batch:
                running.append(waiting.pop())
            if not turn or not left:
                turn, left = -(-len(running) // 2) if quantum else len(running), quantum or 1
            yield np.array([rows[0] for rows in running[:turn]])
            left -= 1
            went_on = [rows[1:] for rows in running[:turn] if len(rows) > 1]
            running = [*running[turn:], *went_on] if not left else [*went_on, *running[turn:]]
            turn = len(went_on)

    def fit(self, config: ModelConfig) -> np.ndarray:
        """What a model replays: int `[rows, layers, k]`, of its first layers and its best experts.

        Raises:
          OptionError: the model has more layers with experts, chooses more for each token, or has fewer.
        """
        sparse = moe_layers(config).values()
        layers, chosen = len(sparse), max((moe.experts_per_token for moe in sparse), default=0)
        count = min((moe.num_experts for moe in sparse), default=0)
        rows, has_layers, has_chosen = self.experts.shape
        fitting = self.experts[:, :layers, :chosen]
        if not layers or has_layers < layers or has_chosen < chosen or fitting.max() >= count or fitting.min() < 0:
            raise OptionError(
                f"routing: {self.name} has {rows} tokens in {has_layers} layers, each with {has_chosen} experts "
                f"numbered up to {self.experts.max()}, and the model has {layers} layers that choose {chosen} of "
                f"{count} experts. Give a recording with as many layers and choices at least, and no other experts."
            )
        return fitting


def read_trace(path: str | Path, option: str = "routing") -> Trace:
    """Reads recorded routing. A `.npz` has an integer array `experts` `[rows, layers, k]`, best first, and may have the
    other arrays of `Trace`, or `seq_len`, the lengths of sequences that follow one another. A `.csv` has the columns
    turn, phase (1: decode), step, layer, slot (the rank) and expert, # before comments.

    Raises:
      OptionError: it cannot be read, or is something else. `option` is the one to blame.
    """
    path = Path(path)
    readers = {".npz": _read_arrays, ".csv": _read_table}
    try:
        if path.suffix not in readers:
            raise ValueError("its name ends in neither .npz nor .csv")
        return readers[path.suffix](path)
    except UNREADABLE as error:
        raise OptionError(
            f"{option}: {path} is no recorded routing: {error}. Give an .npz file with the experts of each token as an "
            f"integer array experts [tokens, layers, k], or a .csv file with the columns {', '.join(_COLUMNS)}."
        ) from error


def write_trace(trace: Trace, path: Path) -> None:
    """Writes a `.npz` that `read_trace` reads, whole or not at all.

    Raises:
      WriteError: it cannot be written.
    """
    arrays = {"experts": trace.experts} | {name: getattr(trace, name) for name in _OPTIONAL}
    write_arrays(path, {name: value for name, value in arrays.items() if value is not None})


def _shape(experts: np.ndarray) -> tuple[int, int, int]:
    if experts.ndim != 3 or not experts.size or not np.issubdtype(experts.dtype, np.integer) or experts.min() < NONE:
        raise ValueError(f"experts is {experts.dtype} {list(experts.shape)}")
    rows, layers, chosen = experts.shape
    return rows, layers, chosen


def _read_arrays(path: Path) -> Trace:
    parts: dict[str, Any] = read_arrays(path, ("experts", "seq_len", *_OPTIONAL))
    experts, lengths = parts.pop("experts"), parts.pop("seq_len", None)
    for name in ("num_experts", "record_bytes"):
        if name in parts:
            parts[name] = int(parts[name])
    return Trace.of_rows(path.name, experts, lengths, **parts)


def _read_table(path: Path) -> Trace:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        if missing := [name for name in _COLUMNS if name not in (rows.fieldnames or ())]:
            raise ValueError(f"it has no column {missing[0]}")
        table = np.array([[int(row[name]) for name in _COLUMNS] for row in rows]).reshape(-1, len(_COLUMNS))
    decode = table[table[:, 1] == _DECODE]
    expert = decode[:, 5]
    # Turn and step are a token.
    axes = [np.unique(decode[:, key], axis=0, return_inverse=True)[1].reshape(-1) for key in ([0, 2], [3], [4])]
    shape = [int(axis.max(initial=-1)) + 1 for axis in axes]
    # Asked before anything of this size is made.
    if math.prod(shape) != len(expert) or (expert < 0).any():
        raise ValueError("the layers of its decode steps do not all have the same number of experts")
    experts = np.full(shape, NONE)
    experts[tuple(axes)] = expert
    if (experts < 0).any():
        raise ValueError("the layers of its decode steps do not all have the same number of experts")
    turns = np.unique(decode[:, [0, 2]], axis=0)[:, 0]
    lengths = np.unique(turns, return_counts=True)[1]
    return Trace.of_rows(path.name, experts, lengths, layers=np.unique(decode[:, 3]))
