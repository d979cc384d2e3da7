"""An executor with sequences by number: pages for what is written, and none of the engine around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from novalm_jax.engine.executor import Executor, Line, cut
from novalm_jax.engine.functions import Decoded
from novalm_jax.kv.pages import Held


class Sequences:
    """Sequences of an executor. Each begins with its first prompt, and again with every other one."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self.book = executor.new_book()
        self._held: dict[int, Held] = {}

    def prefill(self, number: int, tokens: Sequence[int]) -> Decoded:
        """What follows a prompt, whose passes are as wide as the executor allows."""
        decoded = None
        for parts, _ in self._passes(number, tokens, len(tokens)):
            for through in self.executor.prefill(parts):
                decoded = decoded if through is None else through[1]
        assert decoded is not None
        return decoded

    def prefill_logits(self, number: int, tokens: Sequence[int], known: int) -> np.ndarray:
        """The logits of a prompt's tokens `[t, v]`."""
        out = np.empty((len(tokens), self.executor._programs.config.vocab_size), np.float32)
        for parts, (start, end) in self._passes(number, tokens, known):
            for _ in self.executor.prefill_logits(parts, out[start:end]):
                pass
        return out

    def decode(self, tokens: Mapping[int, int], positions: Mapping[int, int], known: Mapping[int, int]) -> Decoded:
        """A step of some sequences; lines of the result are in their order."""
        lines = []
        for number, token in tokens.items():
            held, at = self._held[number], positions[number]
            assert self.book.grow(held, at, at + 1) == []
            lines.append(Line(token, at, known[number], held, number))
        return self.executor.decode(lines)

    def _passes(self, number, tokens, known):
        if number in self._held:
            self.book.free(self._held[number])
        held = self._held[number] = self.book.new()
        together = self.executor.chunk * self.executor.pass_chunks
        for start in range(0, len(tokens), together):
            end = min(start + together, len(tokens))
            assert self.book.grow(held, start, end) == []
            yield cut(tokens, start, end, self.executor.chunk, known, held), (start, end)
