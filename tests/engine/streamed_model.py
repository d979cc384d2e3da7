"""The model with experts in tiers that tests of the engine share, and what they ask it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from novalm_jax import LLM, SamplingParams
from streamed_helpers import Questions, host_room, with_slots
from tiny_checkpoints import tiny_checkpoint

LAYERS, EXPERTS, CHOSEN = 3, 16, 3
OPTIONS: dict[str, Any] = {"max_batch": 3, "context_length": 256}
IDS = [7 + i * 13 % 250 for i in range(90)]
QUESTIONS = Questions(IDS, 40, [IDS[:20], IDS[30:63]], 12)
BRIEF = Questions(IDS[:50], 44, [IDS[:5]], 2)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_model(folder: Path) -> Path:
    """Writes it into a folder of its own, which tests may damage."""
    fields = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "num_hidden_layers": LAYERS}
    return tiny_checkpoint(folder, "qwen3_moe", **fields)


def streamed(folder: Path, slots: int = 12, **options: Any) -> LLM:
    """The model with as many experts on the device, in float32 and without a host tier unless `options` say else; see
    `with_slots`."""
    return with_slots(folder, slots, **{"dtype": "float32", "host_memory": 0, **OPTIONS, **options})


def record_size(dtype: str = "float32") -> int:
    """Bytes of an expert record."""
    return 3 * 16 * 32 * (4 if dtype == "float32" else 2)


def host_memory(records: int, dtype: str = "float32") -> int:
    """Room for so many of them on the host."""
    return host_room(records, record_size(dtype))


def live_arrays() -> list[jax.Array]:
    """Arrays in memory of any kind that were not given away."""
    return [array for array in jax.live_arrays() if not array.is_deleted()]
