"""Memory by formulas: never less than compiled programs take, and not much more. `assert_bounded` and
`assert_estimated` also run where other tests have compiled programs of every golden anyway."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.checkpoint.load import abstract_model, read_config
from novalm_jax.config import LayerConfig, ModelConfig, MoEConfig
from novalm_jax.engine.estimate import estimate_plan
from novalm_jax.engine.programs import Programs, Shapes, decode_rows, prefill_rows
from novalm_jax.engine.streamed_programs import StreamedPrograms
from novalm_jax.engine.workspace import Workspace
from novalm_jax.models.families import find_family
from novalm_jax.options import EngineOptions, Kernels, MakeModelOptions
from novalm_jax.training.recipe import config_json
from workspace_helpers import assert_bounded, grown_config

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
SHAPES = ((2, 128, None), (8, 1024, 20), (1, 64, 1))
"""Requests that run together, tokens of each, and pages; None: for all of these tokens."""


def standard() -> ModelConfig:
    """The model that is measured with: 16 layers, hidden size 1024."""
    options = MakeModelOptions()
    raw = config_json(options, options.vocab_size)
    return find_family(raw).read_config(raw)


def golden_config(case: str) -> ModelConfig:
    return read_config(GOLDEN / case)[2]


def sparse_layers(config: ModelConfig) -> list[LayerConfig]:
    return [layer for layer in dict.fromkeys(config.layers) if isinstance(layer.feed_forward, MoEConfig)]


def programs_of(
    config: ModelConfig, dtype: str, rows: int, context: int, pages: int | None = None, kernels: Kernels = "xla"
) -> tuple[Programs, StreamedPrograms | None]:
    model = abstract_model(config, dtype)
    shapes = Shapes.of(config, rows, context, np.dtype(jnp.dtype(dtype)), pages, kernels=kernels)
    return Programs(model, shapes), StreamedPrograms(model, shapes, 8) if sparse_layers(config) else None


def compile_all(programs: Programs) -> None:
    """In every size."""
    layers, rows, tokens = (
        dict.fromkeys(programs.config.layers),
        decode_rows(programs.shapes.rows),
        prefill_rows(programs.shapes.capacity),
    )
    for count in tokens:
        programs.embed(count)
        programs.head(count)
        programs.head_of_block(count)
        for layer in layers:
            programs.attend(layer, count)
        for layer in sparse_layers(programs.config):
            programs.experts(layer, count)
    for count in rows:
        programs.decode(count)
    programs._compile_moves()


def compile_all_streamed(programs: StreamedPrograms) -> None:
    """What is not in `compile_all`, in every size."""
    layers, rows = dict.fromkeys(programs.config.layers), decode_rows(programs.shapes.rows)
    for count in rows:
        programs.embed_step(count)
        programs.head_of_step(count)
        for layer in layers:
            programs.attend_step(layer, count)
        for layer in sparse_layers(programs.config):
            programs.lookahead(layer, count)
    for count in (*rows, *prefill_rows(programs.shapes.capacity)):
        for layer in sparse_layers(programs.config):
            programs.first_wave(layer, count)
            programs.wave(layer, count)
            programs.combine(layer, count)


@pytest.fixture(scope="module")
def compiled_standard() -> tuple[Programs, StreamedPrograms]:
    resident, streamed = programs_of(standard(), "bfloat16", 2, 1024)
    assert streamed is not None
    resident.workspace_bytes()
    streamed.workspace_bytes()
    return resident, streamed


def test_bounds_of_the_standard_model(compiled_standard):
    for programs in compiled_standard:
        assert_bounded(programs, loose=2)


def test_a_plan_of_the_standard_model_needs_no_compiler(compiled_standard):
    resident, streamed = compiled_standard
    options = EngineOptions(dtype="bfloat16", max_batch=2)
    for programs, slots in ((resident, None), (streamed, streamed.slots)):
        parts = dict(estimate_plan(resident.config, options, 1024, slots=slots, pass_chunks=3).parts)
        assert programs.workspace_bytes() <= parts.pop("workspace") <= 1.5 * programs.workspace_bytes()
        assert parts.pop("sampler") > 10 * 2 * 32000
        assert parts.pop("prefill chunks", 0) == (0 if slots is None else 2 * streamed.chunk_bytes)
        held = {"KV cache": programs.page_bytes, "prompt that waits": programs.paused_bytes}
        assert parts == programs.weight_bytes | held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_weights_and_pages_are_counted_exactly(case, dtype):
    """Three pages are less than two requests of 128 tokens can fill."""
    config = golden_config(case)
    programs = Programs(abstract_model(config, dtype), Shapes.of(config, 2, 128, np.dtype(jnp.dtype(dtype)), 3))
    parts = estimate_plan(config, EngineOptions(dtype=dtype, max_batch=2), 128, 3).parts
    assert {name: parts[name] for name in ("dense weights", "experts")} == programs.weight_bytes
    assert (parts["KV cache"], parts["prompt that waits"]) == (programs.page_bytes, programs.paused_bytes)


# Attention of either kind, with sinks and biases; experts of matrices that lie the other way round.
GROWN = [
    ("deepseek_v3", "bfloat16", (2, 128, None)),
    ("gpt_oss", "float32", (8, 1024, 20)),
    ("dbrx", "bfloat16", (1, 512, None)),
    ("mixtral", "bfloat16", (1, 64, 1)),
]


@pytest.mark.parametrize(("case", "dtype", "shape"), GROWN)
def test_bounds_of_larger_layers(case, dtype, shape):
    """Constants are nothing here, so that no formula is right because of them."""
    config = grown_config(golden_config(case))
    resident, streamed = programs_of(config, dtype, *shape)
    layer, tokens, rows = sparse_layers(config)[-1], prefill_rows(shape[1])[-1], decode_rows(shape[0])[-1]
    resident.decode(rows)
    resident.attend(layer, tokens)
    resident.experts(layer, tokens)
    resident._compile_moves()
    assert streamed is not None
    streamed.attend_step(layer, rows)
    streamed.first_wave(layer, tokens)
    for programs in (resident, streamed):
        assert_bounded(programs)


@pytest.mark.parametrize(("case", "dtype", "rows"), [("gpt_oss", "bfloat16", 4), ("llama4_text", "float32", 32)])
def test_bounds_of_decoding_with_native_products(case, dtype, rows):
    """With biases and with scaled inputs; and a bound for whichever kernels there will be holds for both."""
    config = grown_config(golden_config(case))
    layer, steps = sparse_layers(config)[-1], []
    for kernels in ("native", "xla"):
        resident, streamed = programs_of(config, dtype, rows, 128, kernels=kernels)
        assert streamed is not None
        resident.decode(rows)
        streamed.first_wave(layer, rows)
        streamed.wave(layer, rows)
        for programs in (resident, streamed):
            assert_bounded(programs)
        either = Workspace(config, replace(resident.shapes, kernels="auto"))
        assert either.decode(rows) >= Workspace(config, resident.shapes).decode(rows)
        steps.append(streamed._workspace["first wave", layer, rows])
    # Native products read weights where they lie.
    assert steps[0] < steps[1]


CROSS = itertools.product(CASES, (False, True), ("float32", "bfloat16"), SHAPES, ("native", "xla"))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "larger", "dtype", "shape", "kernels"), list(CROSS))
def test_bounds_of_every_program(case, larger, dtype, shape, kernels):
    config = grown_config(golden_config(case)) if larger else golden_config(case)
    resident, streamed = programs_of(config, dtype, *shape, kernels=kernels)
    compile_all(resident)
    assert_bounded(resident)
    if streamed is not None:
        compile_all_streamed(streamed)
        assert_bounded(streamed)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 128), (2, 128), (8, 1024), (20, 4096)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bounds_of_every_program_of_the_standard_model(dtype, shape):
    resident, streamed = programs_of(standard(), dtype, *shape)
    assert streamed is not None
    compile_all(resident)
    compile_all_streamed(streamed)
    for programs in (resident, streamed):
        assert_bounded(programs)
