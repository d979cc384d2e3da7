"""Which experts decode steps use: counted always, and kept as a trace where somebody wants one.

Belongs to the compute thread; others may read the counts. Knows rows of a cache and choices; refuses to know requests
and files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from novalm_jax.config import ModelConfig
from novalm_jax.experts.profile import ExpertProfile, count_choices
from novalm_jax.experts.records import moe_layers
from novalm_jax.experts.traces import Trace
from novalm_jax.models.router import Routing

MOST_BYTES = 1 << 30
"""Of choices that are kept for a trace at most; a token of 48 layers that choose 8 experts takes 1.5 kB."""


class Recorder:
    """Listens to decode steps. Prompts are passes over all experts, and are not counted.

    Attributes:
      layers: int64 `[layers]`, the numbers of the model's layers that have experts.
      uses: int64 `[layers, experts]`, rows that chose each expert.
      tokens: rows that were counted.
      left_out: rows that the trace lacks, since it is full.
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
        self.uses = np.zeros((len(sparse), experts), np.int64)
        self.tokens = self.left_out = 0
        self._bytes = self._step = self._sequences = 0
        self._sequence_in: dict[int, int] = {}
        self._kept: list[tuple[np.ndarray, np.ndarray, np.ndarray, int]] = []

    def begin(self, row: int) -> None:
        """Another sequence has this row of the cache from now on."""
        self._sequence_in[row] = self._sequences
        self._sequences += 1

    def step(self, rows: Sequence[int], chosen: Routing) -> None:
        """A decode step of these rows of the cache: what its layers chose, `[layers, b, k]`, `NONE` where there is
        nothing. Padding may follow the rows."""
        count = len(rows)
        ids = np.asarray(chosen.ids)[:, :count]
        self.uses += count_choices(ids, self.uses.shape[1])
        self.tokens += count
        self._step += 1
        if self._keeps_rows:
            self._keep(rows, ids, np.asarray(chosen.weights)[:, :count])

    def trace(self) -> Trace | None:
        """All rows that were kept; None where there are none."""
        if not self._kept:
            return None
        experts, weights, sequences, steps = zip(*self._kept, strict=True)
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
        return (
            ExpertProfile(self._name, self.uses / self.tokens, self.tokens) if self.tokens and self.uses.size else None
        )

    def _keep(self, rows: Sequence[int], ids: np.ndarray, weights: np.ndarray) -> None:
        # Experts are few, and the weights are there to be looked at.
        experts, weights = ids.swapaxes(0, 1).astype(np.int16), weights.swapaxes(0, 1).astype(np.float16)
        self._bytes += experts.nbytes + weights.nbytes
        if self._bytes > MOST_BYTES:
            self.left_out += len(rows)
            return
        self._kept.append((experts, weights, np.array([self._sequence_in[row] for row in rows]), self._step))
