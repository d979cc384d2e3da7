"""Recorded routing: the experts that a real model chose, token by token, for models of random weights to replay.

Knows files and arrays, and what of a configuration they must fit. Refuses to know how a model is run.
"""

from __future__ import annotations

import csv
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from novalm_jax.config import ModelConfig
from novalm_jax.errors import OptionError
from novalm_jax.experts.records import moe_layers

_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert")
_DECODE = 1  # in the column phase; 0 are prompts


@dataclass(frozen=True)
class RecordedRouting:
    """What was chosen.

    Attributes:
      name: of the file.
      experts: int `[tokens, layers, k]`, best first; layers are those with experts. Sequences follow one another.
    """

    name: str
    experts: np.ndarray

    def fit(self, config: ModelConfig) -> np.ndarray:
        """What a model replays: int `[tokens, layers, k]`, of its first layers and its best experts.

        Raises:
          OptionError: the model has more layers with experts, chooses more for each token, or has fewer.
        """
        sparse = moe_layers(config).values()
        layers, chosen = len(sparse), max((moe.experts_per_token for moe in sparse), default=0)
        count = min((moe.num_experts for moe in sparse), default=0)
        tokens, has_layers, has_chosen = self.experts.shape
        fitting = self.experts[:, :layers, :chosen]
        if not layers or has_layers < layers or has_chosen < chosen or fitting.max() >= count:
            raise OptionError(
                f"routing: {self.name} has {tokens} tokens in {has_layers} layers, each with {has_chosen} experts "
                f"numbered up to {self.experts.max()}, and the model has {layers} layers that choose {chosen} of "
                f"{count} experts. Give a recording with as many layers and choices at least, and no other experts."
            )
        return fitting


def read_routing(path: str | Path) -> RecordedRouting:
    """Reads a file of recorded routing: `.npz` with an integer array `experts` `[tokens, layers, k]`, best first, or
    `.csv` with the columns turn, phase (1: decode), step, layer, slot (the rank) and expert, # before comments.

    Raises:
      OptionError: it cannot be read, or is something else.
    """
    path = Path(path)
    readers = {".npz": _read_arrays, ".csv": _read_table}
    try:
        if path.suffix not in readers:
            raise ValueError("its name ends in neither .npz nor .csv")
        experts = readers[path.suffix](path)
        if experts.ndim != 3 or not experts.size or not np.issubdtype(experts.dtype, np.integer) or experts.min() < 0:
            raise ValueError(f"experts is {experts.dtype} {list(experts.shape)}")
    except (OSError, EOFError, KeyError, TypeError, ValueError, csv.Error, zipfile.BadZipFile, zlib.error) as error:
        raise OptionError(
            f"routing: {path} is no recorded routing: {error}. Give an .npz file with the experts of each token as an "
            f"integer array experts [tokens, layers, k], or a .csv file with the columns {', '.join(_COLUMNS)}."
        ) from error
    return RecordedRouting(path.name, experts)


def _read_arrays(path: Path) -> np.ndarray:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
        experts: np.ndarray = held["experts"]
        return experts


def _read_table(path: Path) -> np.ndarray:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        if missing := [name for name in _COLUMNS if name not in (rows.fieldnames or ())]:
            raise ValueError(f"it has no column {missing[0]}")
        table = np.array([[int(row[name]) for name in _COLUMNS] for row in rows]).reshape(-1, len(_COLUMNS))
    decode = table[table[:, 1] == _DECODE]
    expert = decode[:, 5]
    # Turn and step are a token.
    axes = [np.unique(decode[:, key], axis=0, return_inverse=True)[1].reshape(-1) for key in ([0, 2], [3], [4])]
    experts = np.full([axis.max(initial=-1) + 1 for axis in axes], -1)
    experts[tuple(axes)] = expert
    if experts.size != len(expert) or (experts < 0).any():
        raise ValueError("the layers of its decode steps do not all have the same number of experts")
    return experts


def predict(experts: np.ndarray, count: int, accuracy: float, seed: Sequence[int]) -> np.ndarray:
    """What lookahead of some accuracy says before int `experts` `[k]` are chosen out of `count`: each of them with this
    probability, else another one; `count` where there is none. The same for the same seed."""
    draw = np.random.default_rng(seed)
    others = draw.permutation(np.setdiff1d(np.arange(count), experts))[: len(experts)]
    wrong = np.pad(others, (0, len(experts) - len(others)), constant_values=count)
    return np.where(draw.random(len(experts)) < accuracy, experts, wrong)
