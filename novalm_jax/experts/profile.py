"""Expert profiles: how often each expert of a model was used, as runs leave it behind for the next one's start.

Knows files and counts. Refuses to know what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from novalm_jax.config import ModelConfig
from novalm_jax.errors import OptionError
from novalm_jax.experts.array_files import UNREADABLE, read_arrays, write_arrays
from novalm_jax.experts.records import Record, moe_layers
from novalm_jax.experts.traces import Trace, read_trace
from novalm_jax.models.router import NONE


@dataclass(frozen=True)
class ExpertProfile:
    """How often experts were used.

    Attributes:
      name: of the file, or of what it was counted in.
      uses: float64 `[layers, experts]`, the part of tokens that chose each. Layers are those with experts, in order.
      tokens: that were counted.
    """

    name: str
    uses: np.ndarray
    tokens: int

    def __post_init__(self) -> None:
        """Checks that it can be what it says.

        Raises:
          ValueError: it cannot; the message says why.
        """
        if self.uses.ndim != 2 or not self.uses.size or not np.issubdtype(self.uses.dtype, np.floating):
            raise ValueError(f"uses is {self.uses.dtype} {list(self.uses.shape)}")
        if not ((self.uses >= 0) & (self.uses <= 1)).all() or not self.uses.any():
            raise ValueError("uses has numbers that are no parts of 1, or nothing else than 0")
        if self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens}")

    @staticmethod
    def of_trace(trace: Trace) -> ExpertProfile:
        """Counts a trace."""
        rows = len(trace.experts)
        return ExpertProfile(trace.name, count_choices(trace.experts.swapaxes(0, 1), trace.num_experts) / rows, rows)

    def most_used(self) -> list[Record]:
        """All records that were used, the most used ones first. Layers are counted as here."""
        return most_used(self.uses)

    def of_model(self, config: ModelConfig) -> ExpertProfile:
        """The same with all layers of a model, by its numbers; those without experts use none.

        Raises:
          OptionError: the model has other layers or experts.
        """
        sparse = moe_layers(config)
        experts = [moe.num_experts for moe in sparse.values()]
        if len(self.uses) != len(sparse) or self.uses.shape[1] != max(experts, default=0):
            layers, count = self.uses.shape
            raise OptionError(
                f"expert_profile: {self.name} has {layers} layers of {count} experts, and the model {len(sparse)} of "
                f"{max(experts, default=0)}. Give a profile of the same model."
            )
        uses = np.zeros((len(config.layers), self.uses.shape[1]))
        for row, (number, moe) in zip(self.uses, sparse.items(), strict=True):
            uses[number, : moe.num_experts] = row[: moe.num_experts]
        return ExpertProfile(self.name, uses, self.tokens)


def most_used(uses: np.ndarray) -> list[Record]:
    """All records that were used, by uses `[layers, experts]`, the most used ones first."""
    order = np.argsort(-uses, axis=None, kind="stable")
    layers, experts = np.unravel_index(order[uses.reshape(-1)[order] > 0], uses.shape)
    return [Record(int(layer), int(expert)) for layer, expert in zip(layers, experts, strict=True)]


def count_choices(ids: np.ndarray, experts: int) -> np.ndarray:
    """How often each expert was chosen, int64 `[layers, experts]`: int `ids [layers, b, k]`, `NONE` is nobody."""
    layers = len(ids)
    places = np.where(ids == NONE, experts, ids) + (np.arange(layers) * (experts + 1))[:, None, None]
    counts = np.bincount(places.reshape(-1), minlength=layers * (experts + 1))
    return counts.reshape(layers, experts + 1)[:, :-1]


def read_profile(path: str | Path) -> ExpertProfile:
    """Reads a profile that `write_profile` wrote, or counts a trace.

    Raises:
      OptionError: it is neither.
    """
    path = Path(path)
    try:
        held = read_arrays(path, ("uses", "tokens")) if path.suffix != ".csv" else {}
        if "uses" in held:
            return ExpertProfile(path.name, held["uses"], int(held["tokens"]))
    except UNREADABLE as error:
        raise OptionError(
            f"expert_profile: {path} is no expert profile: {error}. Give a file that --profile-out wrote, or recorded "
            "routing."
        ) from error
    return ExpertProfile.of_trace(read_trace(path, "expert_profile"))


def write_profile(profile: ExpertProfile, path: Path) -> None:
    """Writes a `.npz` that `read_profile` reads, whole or not at all.

    Raises:
      WriteError: it cannot be written.
    """
    write_arrays(path, {"uses": profile.uses, "tokens": profile.tokens})
