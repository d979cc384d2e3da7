"""A training run small enough for a test: its options, its text, and what it said of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from novalm_jax.models.families import find_family
from novalm_jax.options import TrainOptions
from novalm_jax.training.data import END
from novalm_jax.training.recipe import Trainer, config_json
from novalm_jax.training.run_folder import METRICS

TINY = TrainOptions(
    vocab_size=300,
    context_length=24,
    layers=2,
    hidden_size=32,
    heads=2,
    kv_heads=1,
    experts=4,
    experts_per_token=2,
    expert_width=16,
    steps=12,
    batch_size=4,
    warmup=2,
    evaluate_every=5,
    save_every=4,
)


def write_text(path: Path) -> Path:
    """Sentences in which much follows from what came before."""
    draw = np.random.default_rng(0)
    verbs = {"cat": "sleeps", "dog": "barks", "bird": "sings", "fish": "swims"}

    def sentence() -> str:
        who = str(draw.choice(list(verbs)))
        return f"The {draw.choice(['old', 'young'])} {who} {verbs[who]}. "

    stories = ["".join(sentence() for _ in range(40)) for _ in range(12)]
    path.write_text(f"\n{END}\n".join(stories))
    return path


def trainer(options: TrainOptions) -> Trainer:
    raw = config_json(options, options.vocab_size, options.balance_bias > 0)
    return Trainer(find_family(raw).read_config(raw), options)


def records(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What a run said of itself, but for times."""
    found = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if name != "seconds"}
        for record in found
        if kind in (None, record["kind"])
    ]
