"""Budgets from outside: the peak RSS of a process is what it has without a model, and the two budgets."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import memory_run
from novalm_jax.benchmarks.making import make_model
from novalm_jax.checkpoint.load import read_config
from novalm_jax.config import ModelConfig
from novalm_jax.engine.estimate import estimate_plan
from novalm_jax.options import EngineOptions, MakeModelOptions
from streamed_helpers import least_bytes
from tiny_checkpoints import tiny_checkpoint

LAYERS, EXPERTS, RECORD = 2, 64, 3 * 512 * 512 * 2
RECORDS = LAYERS * EXPERTS
OPTIONS: dict[str, Any] = {"max_batch": 2, "context_length": 1024, "dtype": "bfloat16", "dense_weights": "device"}


@dataclass(frozen=True)
class Budgets:
    """Bytes, as the options of `LLM` have them."""

    device_memory: int
    host_memory: int


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """200 MB of experts, and little else."""
    shape = MakeModelOptions(
        vocab_size=512,
        context_length=1024,
        layers=LAYERS,
        hidden_size=512,
        heads=8,
        kv_heads=2,
        experts=EXPERTS,
        experts_per_token=2,
        expert_width=512,
    )
    return make_model(tmp_path_factory.mktemp("memory") / "model", shape)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """As many experts of 3 kB."""
    fields = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "max_position_embeddings": 1024}
    return tiny_checkpoint(tmp_path_factory.mktemp("memory") / "tiny", "qwen3_moe", **fields)


def config_of(folder: Path) -> ModelConfig:
    return read_config(folder)[2]


@functools.cache
def measured(folder: Path, budgets: Budgets) -> dict[str, Any]:
    """What a process says that runs a model. Its programs have been compiled before, which takes a memory of its own
    that is never quite the same."""
    options = OPTIONS | asdict(budgets)
    memory_run.run(folder, options)
    command = [sys.executable, memory_run.__file__, str(folder), json.dumps(options)]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def resident(folder: Path) -> Budgets:
    """All that a resident model needs, by formula."""
    return Budgets(estimate_plan(config_of(folder), EngineOptions(**OPTIONS), 1024).device_bytes, 0)


@functools.cache
def least(folder: Path) -> int:
    return least_bytes(folder, **OPTIONS)


@pytest.fixture
def bases(tiny) -> tuple[int, int]:
    """Peaks of processes with a model of no size: resident, and streamed, which holds more programs."""
    budgets = resident(tiny), Budgets(least(tiny), 0)
    whole, streamed = (measured(tiny, each)["peak_rss"] for each in budgets)
    return whole, streamed


def placements(folder: Path) -> dict[str, Budgets]:
    half = RECORDS // 2
    in_halves = estimate_plan(config_of(folder), EngineOptions(**OPTIONS), 1024, slots=half).device_bytes
    return {
        "resident": resident(folder),
        "half and half": Budgets(in_halves, half * RECORD),
        "least": Budgets(least(folder), 0),
        "least, half on the host": Budgets(least(folder), half * RECORD),
    }


@pytest.mark.parametrize("name", ["resident", "half and half", "least", "least, half on the host"])
def test_a_process_takes_no_more_than_its_budgets(model, bases, name):
    budgets, whole = placements(model)[name], measured(model, resident(model))
    found = measured(model, budgets)
    report, experts, base = found["report"], RECORDS * RECORD, bases[name != "resident"]
    assert report["device_peak_bytes"] <= budgets.device_memory
    assert found["peak_rss"] <= 1.1 * (base + budgets.device_memory + budgets.host_memory)
    assert (found["tokens"], found["best"]) == (whole["tokens"], whole["best"])
    if name == "resident":
        assert report["policy"] == "resident" and report["experts_on_device"] == RECORDS
    else:
        assert budgets.device_memory < experts and report["uploads"] > 0
    if name.startswith("least"):
        # What is saved is seen from outside, too.
        assert found["peak_rss"] < base + experts
