"""The parts in which dense weights come to the device where they do not all stay there, and which of them lie where.

A part is a layer's dense weights or a block of the head. A step needs them in an order that is always the same, so that
no policy is asked: some stay, spread evenly over the step. Knows shapes and bytes; moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from novalm_jax.checkpoint.load import ALIGNMENT
from novalm_jax.models.decoder import Decoder, without_experts
from novalm_jax.models.params import parameters_of

EMBEDDING, HEAD = "embed.weight", "head.weight"

UNDER_WAY = 2
"""Parts on the device that do not stay: one is in use while the next one comes."""

_BLOCK_UNIT = 64
"""A block of the head has a multiple of so many rows. On XLA's CPU backend products of float32 with such numbers of
rows round alike, and with others in several ways; in bfloat16 all do from 24 rows on."""


class Part(NamedTuple):
    """Dense weights that move together.

    Attributes:
      name: what they are.
      paths: their parameters, in the order in which programs take them.
      rows: the first row and the one after the last, of the only parameter; None for whole parameters.
      nbytes: their size in memory, each array a whole number of cache lines.
    """

    name: str
    paths: tuple[str, ...]
    rows: tuple[int, int] | None
    nbytes: int


@dataclass(frozen=True)
class DensePlan:
    """Where dense weights lie.

    Attributes:
      parts: all that come in turn or could, in the order of a step: the layers, then the blocks of the head.
      embedding: the table whose rows are looked up.
      on_device: parts that stay there, by number.
      on_host: parts that host memory holds, of those that do not.
      embedding_on_host: whether it holds the embedding; otherwise rows are read from disk.
    """

    parts: tuple[Part, ...]
    embedding: Part
    on_device: frozenset[int] = frozenset()
    on_host: frozenset[int] = frozenset()
    embedding_on_host: bool = False

    @property
    def kept_bytes(self) -> int:
        """Bytes of the parts that stay on the device."""
        return sum(self.parts[number].nbytes for number in self.on_device)

    @property
    def under_way_bytes(self) -> int:
        """Bytes of the device for the parts that come and go."""
        return UNDER_WAY * max((self.parts[number].nbytes for number in self.in_turn), default=0)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device for all parts."""
        return self.kept_bytes + self.under_way_bytes

    @property
    def in_turn(self) -> list[int]:
        """The parts that come and go, in order."""
        return [number for number in range(len(self.parts)) if number not in self.on_device]

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(part.nbytes for part in self.held_on_host().values())

    def held_on_host(self) -> dict[int | None, Part]:
        """What host memory holds, by number; the embedding as None. Blocks of a head that is tied to it are in it."""
        held: dict[int | None, Part] = {None: self.embedding} if self.embedding_on_host else {}
        return held | {number: self.parts[number] for number in sorted(self.on_host) if not self._tied(number)}

    def leanest(self) -> DensePlan:
        """What takes least of the device: a part that is larger than others by far stays, as there is room for two of
        those that come and go."""
        plans = [
            replace(self, on_device=frozenset(n for n, part in enumerate(self.parts) if part.nbytes > size))
            for size in {part.nbytes for part in self.parts}
        ]
        return min(plans, key=lambda plan: (plan.device_bytes, len(plan.on_device)))

    def keep(self, room: int) -> DensePlan:
        """As many more parts on the device as there is room for, spread evenly over a step."""
        rest = self.in_turn
        for more in range(len(rest), 0, -1):
            # Of n parts, part i stays where i * more / n passes a whole number.
            spread = (n for i, n in enumerate(rest) if (i + 1) * more // len(rest) > i * more // len(rest))
            plan = replace(self, on_device=self.on_device.union(spread))
            if plan.device_bytes - self.device_bytes <= room:
                return plan
        return self

    def hold(self, room: int) -> DensePlan:
        """The embedding, and then parts that do not stay on the device, in host memory, as far as there is room."""
        plan = replace(self, embedding_on_host=self.embedding.nbytes <= room)
        for number in self.in_turn:
            more = replace(plan, on_host=plan.on_host | {number})
            plan = more if more.host_bytes <= room else plan
        return plan

    def _tied(self, number: int) -> bool:
        return self.embedding_on_host and self.parts[number].paths == self.embedding.paths


def plan_dense(model: Decoder) -> DensePlan:
    """The dense weights of a model, which may have shapes in place of arrays, nothing of them kept anywhere.

    Blocks of the head are about as large as the largest layer; a head of float32 stays whole where blocks of it would
    round differently.
    """
    parts = []
    for number, layer in enumerate(model.layers):
        own = parameters_of(without_experts(layer))
        paths = tuple(f"layers.{number}.{path}" for path in own)
        parts.append(Part(f"layer {number}", paths, None, sum(map(_nbytes, own.values()))))
    parameters, rows = parameters_of(model), model.config.vocab_size
    path = HEAD if HEAD in parameters else EMBEDDING
    head = parameters[path]
    row_bytes = head.size // rows * np.dtype(head.dtype).itemsize
    whole = np.dtype(head.dtype) == np.float32 and rows % _BLOCK_UNIT
    about = rows if whole else max(part.nbytes for part in parts) // row_bytes
    for first, end in head_blocks(rows, about):
        name = f"the head from row {first} on"
        parts.append(Part(name, (path,), (first, end), padded((end - first) * row_bytes)))
    return DensePlan(tuple(parts), Part("the embedding", (EMBEDDING,), None, _nbytes(parameters[EMBEDDING])))


def head_blocks(rows: int, about: int) -> list[tuple[int, int]]:
    """Cuts the rows of the head into blocks of one size, about as large as asked for. The last two may overlap."""
    block = max(about // _BLOCK_UNIT, 1) * _BLOCK_UNIT
    if about >= rows or block >= rows:
        return [(0, rows)]
    firsts = [*range(0, rows - block, block), rows - block]
    return [(first, first + block) for first in firsts]


def _nbytes(parameter: Any) -> int:
    return padded(int(parameter.size) * np.dtype(parameter.dtype).itemsize)


def padded(nbytes: int) -> int:
    """Bytes of an array, up to where the next one may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
