"""Expert records of a few numbers, a disk that does what a test says, and a small trace."""

from __future__ import annotations

import threading

import jax
import numpy as np

from novalm_jax.errors import CheckpointError
from novalm_jax.experts.records import Record
from novalm_jax.experts.traces import Trace
from novalm_jax.kernels.experts import Weights

LAYOUT = Weights(
    gate=None,
    up=jax.ShapeDtypeStruct((4, 6), np.dtype(np.uint16)),
    down=jax.ShapeDtypeStruct((6, 4), np.dtype(np.uint16)),
)

LAYERS, EXPERTS, CHOSEN = 4, 12, 2


def skewed(tokens: int = 150, seed: int = 0) -> Trace:
    """Popular experts, others in each layer, in sequences of 50 that like others again."""
    draw = np.random.default_rng(seed)
    popularity = draw.gumbel(size=(tokens // 50, LAYERS, EXPERTS)).repeat(50, axis=0)
    experts = np.argsort(-(popularity + draw.gumbel(size=(tokens, LAYERS, EXPERTS))), axis=-1)[..., :CHOSEN]
    return Trace.of_rows("skewed", experts, np.full(tokens // 50, 50))


class Disk:
    """Records whose numbers say which they are. While `gate` is shut, reads wait."""

    def __init__(self) -> None:
        self.reads: list[Record] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken: Record | None = None
        self.closed = False
        self.bytes_read = 0

    def read_into(self, record: Record, out: Weights) -> None:
        self.reads.append(record)
        assert self.gate.wait(30)
        if record == self.broken:
            raise CheckpointError(f"Expert {record.expert} of layer {record.layer} cannot be read.")
        for array in (out.up, out.down):
            array[...] = number(record)  # type: ignore[index]

    def close(self) -> None:
        self.closed = True


def number(record: Record) -> int:
    return record.layer * 100 + record.expert
