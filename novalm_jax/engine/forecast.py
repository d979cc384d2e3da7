"""How long a token takes on a machine, by formulas of bytes and rates: nothing is run.

A decode step takes the time of its bytes and programs on the device, and that of what moves. Experts that a layer
misses come one after another through stages: disk, link, and the insert into a slot; while one is in a stage the
next one is in the stage before, and the layer's hits are computed while the first one comes. Of m misses in a layer

    moving = sum of stages + (m - 1) * longest stage - min(hits, disk and link of the first)

Dense weights that come in turn are on their way while those before them are used. A prompt goes through in passes, in
each of which every expert that it needs and that is not on the device comes once, while others are used: the longest of
computing, link and disk counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from novalm_jax.config import AttentionConfig, LatentConfig, LayerConfig, ModelConfig, MoEConfig
from novalm_jax.engine.functions import EXPERT_GROUP
from novalm_jax.engine.machine import Machine
from novalm_jax.experts.dense import DensePlan
from novalm_jax.kernels.storage import tree_bytes
from novalm_jax.kv.paged import page_shape
from novalm_jax.kv.pages import PAGE
from novalm_jax.models.counts import dense_counts, different_experts, expert_count, outer_counts


class Needs(NamedTuple):
    """Expert records in a decode step, all layers together: needed, missed on the device, and of these not on the host
    either."""

    needed: float
    missed: float
    from_disk: float


class DenseTraffic(NamedTuple):
    """Bytes of dense weights that come to the device in every step, and of these from disk."""

    moved: int = 0
    from_disk: int = 0

    @staticmethod
    def of(plan: DensePlan | None) -> DenseTraffic:
        """Of the parts that a plan has come in turn; None where all stay on the device."""
        if plan is None:
            return _NO_TRAFFIC
        moved = {number: plan.parts[number].nbytes for number in plan.in_turn}
        return DenseTraffic(sum(moved.values()), sum(moved[number] for number in moved if number not in plan.on_host))


_NO_TRAFFIC = DenseTraffic()


class Passes(NamedTuple):
    """How a prompt goes through: in chunks of so many tokens, and how often its layers are gone through for them; the
    bytes that come to the device each time, and of these from disk."""

    chunk: int
    times: int
    moved: float
    from_disk: float


@dataclass(frozen=True)
class Forecast:
    """Seconds of a decode step of `batch` tokens, or of a prompt, and what they are made of.

    Attributes:
      tokens: that it gives, or takes.
      seconds: that it takes.
      best_seconds: that it would take if whatever can hide did: the longest part.
      parts: seconds that would be taken alone, by name.
    """

    tokens: int
    seconds: float
    best_seconds: float
    parts: dict[str, float]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def best_rate(self) -> float:
        """The same at best."""
        return self.tokens / self.best_seconds

    @property
    def bottleneck(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])

    def cost(self, price: float) -> float:
        """Of a million tokens, where an hour has this price."""
        return price / 3600 / self.rate * 1e6

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        more = {"tokens_per_second": self.rate, "best_tokens_per_second": self.best_rate}
        return {**vars(self), **more, "bottleneck": self.bottleneck}


@dataclass(frozen=True)
class Forecaster:
    """One model on one machine.

    Attributes:
      config: the model.
      dtype: what it is computed in.
      record_bytes: of an expert.
      machine: what it runs on.
    """

    config: ModelConfig
    dtype: np.dtype
    record_bytes: int
    machine: Machine

    def resident_step(self, batch: int, tokens: int) -> Forecast:
        """A decode step with all weights on the device, after so many tokens each."""
        needs = Needs(sum(different_experts(moe, batch) for moe in self._sparse()), 0.0, 0.0)
        return self._step(batch, tokens, needs, _NO_TRAFFIC, self.machine.layer_seconds)

    def streamed_step(self, batch: int, tokens: int, needs: Needs, dense: DenseTraffic = _NO_TRAFFIC) -> Forecast:
        """A decode step in which experts, and dense weights, come as needed."""
        return self._step(batch, tokens, needs, dense, self.machine.cut_layer_seconds)

    def _step(self, batch: int, tokens: int, needs: Needs, dense: DenseTraffic, layer_seconds: float) -> Forecast:
        machine, size = self.machine, self.record_bytes
        read = (
            dense_read(self.config, self.dtype)
            + batch * cache_read(self.config, self.dtype, tokens)
            + needs.needed * size
        )
        parts = {
            "device memory": read / machine.device_bandwidth,
            "programs": machine.step_seconds + len(self.config.layers) * layer_seconds,
            "inserting": needs.missed * machine.insert_seconds,
            "link": (needs.missed * size + dense.moved) / machine.link,
            "disk": (needs.from_disk * size + dense.from_disk) / machine.disk,
        }
        computing = parts["device memory"] + parts["programs"]
        in_turn = max(dense.moved / machine.link, dense.from_disk / machine.disk)
        seconds = max(computing, in_turn) + self._moving(needs)
        best = max(computing + parts["inserting"], parts["link"], parts["disk"])
        return Forecast(batch, seconds, best, parts)

    def _moving(self, needs: Needs) -> float:
        """What the experts that are missed add to a step, all layers together."""
        if not needs.missed:
            return 0.0
        layers = len(self._sparse())
        machine, size = self.machine, self.record_bytes
        needed, missed = needs.needed / layers, needs.missed / layers
        disk = needs.from_disk / needs.missed * size / machine.disk
        stages = disk, size / machine.link, machine.insert_seconds
        # The part of layers that miss something, where every expert misses as often as the others.
        some = min(missed, 1 - (1 - missed / needed) ** needed)
        hidden = min((needed - missed) * size / machine.device_bandwidth, stages[0] + stages[1])
        return layers * (some * (sum(stages) - hidden) + (missed - some) * max(stages))

    def prompt(self, tokens: int, passes: Passes) -> Forecast:
        """A prompt."""
        machine, chunk = self.machine, min(tokens, passes.chunk)
        experts = sum(different_experts(moe, chunk) for moe in self._sparse())
        read = dense_read(self.config, self.dtype) + experts * self.record_bytes
        parts = {
            "matrix products": prompt_operations(self.config, tokens) / machine.device_operations,
            "device memory": -(-tokens // chunk) * read / machine.device_bandwidth,
            "link": passes.times * passes.moved / machine.link,
            "disk": passes.times * passes.from_disk / machine.disk,
        }
        seconds = max(parts.values())
        return Forecast(tokens, seconds, seconds, parts)

    def _sparse(self) -> list[MoEConfig]:
        return [layer.feed_forward for layer in self.config.layers if isinstance(layer.feed_forward, MoEConfig)]


def cache_read(config: ModelConfig, dtype: np.dtype, tokens: int) -> int:
    """Bytes of the KV cache that a token reads after so many others, of each sequence."""
    return sum(_seen(layer, tokens) * cache_bytes(layer, dtype) for layer in config.layers)


def dense_read(config: ModelConfig, dtype: np.dtype, layers: Sequence[LayerConfig] | None = None) -> int:
    """Bytes of dense weights that a step reads, of these layers or all: not the embedding, of which it looks up
    rows."""
    table = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    counts = (outer_counts(config), *map(dense_counts, config.layers if layers is None else layers))
    return sum(count.bytes(dtype.itemsize) for count in counts) - table * dtype.itemsize


def prompt_operations(config: ModelConfig, tokens: int, spread: bool = True) -> float:
    """Of the matrix products of a prompt, but for logits. Where its tokens are spread over experts, the rows of each
    are filled up to whole groups, by half a group."""
    total = 0.0
    for layer in config.layers:
        total += 2 * tokens * dense_counts(layer).plain + _attention_operations(layer, tokens)
        if isinstance(moe := layer.feed_forward, MoEConfig):
            filled = different_experts(moe, tokens) * EXPERT_GROUP / 2 if spread else 0.0
            rows = tokens * moe.experts_per_token + filled
            total += 2 * rows * expert_count(config.hidden_size, moe.expert)
    return total


def cache_bytes(layer: LayerConfig, dtype: np.dtype) -> int:
    """Bytes of a layer's KV cache for a token."""
    return tree_bytes(page_shape(layer.attention, 1, dtype)) // PAGE


def _seen(layer: LayerConfig, tokens: int) -> int:
    """Tokens that a query sees, of so many."""
    attention = layer.attention
    if isinstance(attention, LatentConfig):
        return tokens
    return min(tokens, attention.window or tokens, attention.chunk or tokens)


def _attention_operations(layer: LayerConfig, tokens: int) -> float:
    """Of scores and mixed values, where a token sees half of the prompt, or its window."""
    attention = layer.attention
    if isinstance(attention, AttentionConfig):
        numbers = attention.num_heads * 2 * attention.head_dim
    else:
        numbers = attention.num_heads * (attention.nope_dim + attention.rope_dim + attention.value_dim)
    return 2.0 * numbers * tokens * min(tokens / 2, _seen(layer, tokens))
