"""A streamed model whose decode steps use recorded experts, so that what is moved is real whatever the weights are.

Prompts, and the weights that experts are summed with, stay the model's own. The text means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from novalm_jax.config import MoEConfig
from novalm_jax.engine.executor import Executor
from novalm_jax.engine.functions import Decoded, DecodeStep
from novalm_jax.engine.llm import LLM
from novalm_jax.engine.start import start_executor
from novalm_jax.engine.streamed import StreamedExecutor
from novalm_jax.errors import OptionError
from novalm_jax.experts.governor import Governor
from novalm_jax.experts.records import moe_layers
from novalm_jax.experts.traces import Trace
from novalm_jax.models.router import Routing

Recorded = np.ndarray | Sequence[Sequence[np.ndarray]]
"""Experts, `[steps, layers, k]`; k may differ from layer to layer."""


class ReplayingExecutor(StreamedExecutor):
    """Decodes one sequence at a time with the experts that it is told.

    Attributes:
      seen: what the model's own routers chose while nothing was replayed, int `[k]` for each layer of each step.
      accuracy: part of the next layer's experts that lookahead predicts; None: it says what the model's gate does.
    """

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._numbers = {layer: number for number, layer in enumerate(moe_layers(self.programs.config))}
        self._recorded: Recorded | None = None
        self._step = -1
        self.seen: list[list[np.ndarray]] = []
        self.accuracy: float | None = None

    def replay(self, recorded: Recorded) -> None:
        """Decode steps use these experts one after another, and after the last the first again. A layer that chooses
        fewer takes the best of them."""
        self._recorded = recorded
        self.start_over()

    def start_over(self) -> None:
        """The next decode step uses the first of the experts that are replayed."""
        self._step = -1

    def set_prefetch(self, on: bool, accuracy: float | None) -> None:
        """Whether experts are prefetched from now on, and how well they are predicted."""
        self._lookahead, self.accuracy = on, accuracy
        self._experts.governor = Governor()

    def set_link(self, rate: float | None) -> None:
        """Bytes a second that uploads take at least from now on; None for what there is."""
        self._experts.fetcher.link.rate = rate

    def _decode_step(self, bucket: int, step: DecodeStep) -> tuple[Decoded, Routing | None]:
        self._step += 1
        if self._recorded is None:
            self.seen.append([])
        return super()._decode_step(bucket, step)

    def _chosen(self, layer: int, routing: Routing, active: np.ndarray) -> Routing:
        ids = np.array(routing.ids)
        if self._recorded is None:
            self.seen[-1].append(ids[active][0])
            return routing
        ids[active] = self._recorded_at(layer)
        return routing._replace(ids=jax.device_put(ids))

    def _predicted(self, layer: int, ids: np.ndarray) -> np.ndarray:
        if self._recorded is None or self.accuracy is None:
            return ids
        moe = self._layers[layer].feed_forward
        assert isinstance(moe, MoEConfig)
        seed = self._step, layer
        return predict(self._recorded_at(layer), moe.num_experts, self.accuracy, seed)[None].repeat(len(ids), axis=0)

    def _recorded_at(self, layer: int) -> np.ndarray:
        """The experts of a layer in this step, int `[k]`."""
        assert self._recorded is not None
        moe = self._layers[layer].feed_forward
        assert isinstance(moe, MoEConfig)
        experts: np.ndarray = self._recorded[self._step % len(self._recorded)][self._numbers[layer]]
        return experts[: moe.experts_per_token]


class ReplayingLLM(LLM):
    """An `LLM` with experts in tiers and a `ReplayingExecutor`.

    Attributes:
      replaying: its executor.
    """

    def __init__(self, model: str | Path | None, recorded: Trace | None, **options: Any):
        """Loads a checkpoint.

        Args:
          model: as in `LLM`.
          recorded: what is replayed from the start; None: nothing yet.
          options: as in `LLM`.

        Raises:
          OptionError: the recording does not fit, or all experts lie on the device; else as `LLM`.
        """
        self._recorded = recorded
        if options.get("dense_weights") == "stream":
            raise OptionError("dense_weights: with a recording they stay on the device; leave stream out.")
        # A layer whose dense weights come in turn has no router to ask ahead.
        super().__init__(model, **{**options, "dense_weights": "device"})

    def _start_exchange(self) -> None:
        """Experts have the slots that were asked for, all the time."""

    def _start(self) -> Executor:
        experts = None if self._recorded is None else self._recorded.fit(self.config)
        if not self._placement.slots:
            raise OptionError(
                "There is room for all experts on the device, so that nothing is moved, whatever is routed where. Give "
                "less device_memory, or fewer slots."
            )
        executor = start_executor(
            self._checkpoint, self._placement, self.options, self.timeline, self._profile, ReplayingExecutor
        )
        assert isinstance(executor, ReplayingExecutor)
        self.replaying = executor
        if experts is not None:
            executor.replay(experts)
        return executor


def predict(experts: np.ndarray, count: int, accuracy: float, seed: Sequence[int]) -> np.ndarray:
    """What lookahead of some accuracy says before int `experts` `[k]` are chosen out of `count`: each of them with this
    probability, else another one; `count` where there is none. The same for the same seed."""
    draw = np.random.default_rng(seed)
    others = draw.permutation(np.setdiff1d(np.arange(count), experts))[: len(experts)]
    wrong = np.pad(others, (0, len(experts) - len(others)), constant_values=count)
    return np.where(draw.random(len(experts)) < accuracy, experts, wrong)
