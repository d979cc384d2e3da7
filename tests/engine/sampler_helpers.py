"""The sampler's compiled programs with a state to run them on, and the ids that one request gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from novalm_jax.engine import sampler
from novalm_jax.engine.sampler import Sampled
from novalm_jax.engine.sampler_state import admit, init_state, row_of
from novalm_jax.engine.sampling import ResolvedSampling

INF = math.inf
OPTIONS = {"xla_allow_excess_precision": False}


def float32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


class Machine:
    """The sampler's programs for one shape of state, compiled once per number of lines, states donated."""

    def __init__(self, rows: int, vocab: int):
        self.vocab = vocab
        self.state = init_state(rows, vocab)
        self.admit_program: Any = jax.jit(admit, donate_argnums=0)
        self.sample_program: Any = jax.jit(sampler.sample, donate_argnums=0, compiler_options=OPTIONS)

    def admit(
        self,
        index: int,
        params: ResolvedSampling,
        prompt: Sequence[int] = (),
        ends: Sequence[int] = (),
        output: Sequence[int] = (),
    ) -> None:
        row = row_of(params, prompt, ends, self.vocab, output)
        self.state = self.admit_program(self.state, row, np.int32(index))

    def sample(self, logits: Any, rows: Sequence[int], active: Sequence[bool] | None = None) -> Sampled:
        use = np.ones(len(rows), bool) if active is None else np.asarray(active)
        self.state, out = self.sample_program(self.state, float32(logits), np.asarray(rows, np.int32), use)
        return jax.tree.map(np.asarray, out)


def choose(logits: Sequence[float] | np.ndarray, *, steps: int = 1, **options: Any) -> list[int]:
    """The ids that one request gets for the same logits at each step."""
    extra = {name: options.pop(name) for name in ("prompt", "ends", "output") if name in options}
    # Few widths mean few programs; impossible tokens make no difference.
    logits = np.pad(float32(logits), (0, max(0, 8 - len(logits))), constant_values=-INF)
    machine = Machine(1, len(logits))
    machine.admit(0, ResolvedSampling(**({"seed": 7} | options)), **extra)
    return [int(machine.sample(logits[None], [0]).ids[0]) for _ in range(steps)]
