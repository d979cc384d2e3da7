"""Which experts decode steps use: counted always, and kept as a trace where somebody wants one.

Belongs to the compute thread; others may read the counts. Knows numbers of sequences and choices; refuses to know
requests and files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from novalm_jax.config import ModelConfig
from novalm_jax.experts.profile import ExpertProfile, count_choices
from novalm_jax.experts.records import moe_layers
from novalm_jax.experts.traces import Trace
from novalm_jax.models.router import Routing

_Kept = tuple[np.ndarray, np.ndarray, np.ndarray, int]
"""Experts and weights of a step, `[b, layers, k]` each, sequences `[b]`, and the number of the step."""

MOST_BYTES = 1 << 30
"""Of choices that are kept for a trace at most; a token of 48 layers that choose 8 experts takes 1.5 kB."""


class _Counted(NamedTuple):
    """What steps have left so far, changed as a whole: an interrupt can come between any two instructions."""

    uses: np.ndarray
    different: int = 0
    tokens: int = 0
    steps: int = 0
    kept: int = 0
    bytes: int = 0
    left_out: int = 0


class Recorder:
    """Listens to decode steps. Prompts are passes over all experts, and are not counted.

    Attributes:
      layers: int64 `[layers]`, the numbers of the model's layers that have experts.
    """

    def __init__(
        self, config: ModelConfig, name: str = "a run", record_bytes: int | None = None, keeps_rows: bool = False
    ):
        """For a model.

        Args:
          config: of the model.
          name: what the trace and the profile are called.
          record_bytes: of an expert.
          keeps_rows: whether there is a trace at the end; else only the counts.
        """
        sparse = moe_layers(config)
        self._name = name
        self.layers = np.array(list(sparse), np.int64)
        self._record_bytes = record_bytes
        self._keeps_rows = keeps_rows
        experts = max((moe.num_experts for moe in sparse.values()), default=0)
        self._counted = _Counted(np.zeros((len(sparse), experts), np.int64))
        self._kept: list[_Kept] = []

    @property
    def uses(self) -> np.ndarray:
        """int64 `[layers, experts]`, rows that chose each expert."""
        return self._counted.uses

    @property
    def tokens(self) -> int:
        """Rows that were counted."""
        return self._counted.tokens

    @property
    def different(self) -> int:
        """Experts that steps used, each once in a step."""
        return self._counted.different

    @property
    def left_out(self) -> int:
        """Rows that the trace lacks, since it is full."""
        return self._counted.left_out

    def step(self, sequences: Sequence[int], chosen: Routing) -> None:
        """A decode step of these sequences, each told by a number: what its layers chose, `[layers, b, k]`, `NONE`
        where there is nothing. Padding may follow the rows."""
        before, count = self._counted, len(sequences)
        ids = np.asarray(chosen.ids)[:, :count]
        uses = count_choices(ids, before.uses.shape[1])
        after = before._replace(
            uses=before.uses + uses,
            different=before.different + int((uses > 0).sum()),
            tokens=before.tokens + count,
            steps=before.steps + 1,
        )
        if self._keeps_rows:
            after = self._keep(after, sequences, ids, np.asarray(chosen.weights)[:, :count])
        self._counted = after

    def trace(self) -> Trace | None:
        """All rows that were kept; None where there are none."""
        kept = self._kept[: self._counted.kept]
        if not kept:
            return None
        experts, weights, sequences, steps = zip(*kept, strict=True)
        return Trace(
            name=self._name,
            experts=np.concatenate(experts),
            weights=np.concatenate(weights),
            sequence=np.concatenate(sequences),
            step=np.repeat(steps, [len(rows) for rows in sequences]),
            num_experts=self.uses.shape[1],
            layers=self.layers,
            record_bytes=self._record_bytes,
        )

    def profile(self) -> ExpertProfile | None:
        """How often each expert was used; None where nothing was decoded."""
        counted = self._counted
        if not counted.tokens or not counted.uses.size:
            return None
        return ExpertProfile(self._name, counted.uses / counted.tokens, counted.tokens)

    def _keep(self, counted: _Counted, sequences: Sequence[int], ids: np.ndarray, weights: np.ndarray) -> _Counted:
        # Experts are few, and the weights are there to be looked at.
        experts, weights = ids.swapaxes(0, 1).astype(np.int16), weights.swapaxes(0, 1).astype(np.float16)
        size = counted.bytes + experts.nbytes + weights.nbytes
        if size > MOST_BYTES:
            return counted._replace(left_out=counted.left_out + len(sequences))
        # In place of what a step left that was broken off.
        self._kept[counted.kept :] = [(experts, weights, np.array(sequences), counted.steps)]
        return counted._replace(bytes=size, kept=counted.kept + 1)
