"""Formulas of memory beside what compiled programs take and what placing a model came to."""

from __future__ import annotations

import dataclasses
from typing import Any

from novalm_jax import LLM
from novalm_jax.compat import program_bytes
from novalm_jax.config import ModelConfig
from novalm_jax.engine.estimate import estimate_plan
from novalm_jax.engine.programs import Programs
from novalm_jax.engine.streamed_programs import DenseStreamedPrograms, StreamedPrograms
from novalm_jax.engine.workspace import Workspace

LOOSE, CONSTANT = 3, 64 << 10
"""A bound is at most so many times what it bounds, and a few bytes for scalars and alignment."""

_SIZES = ("hidden_size", "head_dim", "rotary_dim", "width", "shared_width", "vocab_size")
_LATENT_SIZES = ("kv_rank", "query_rank", "nope_dim", "rope_dim", "value_dim")


def assert_bounded(programs: Programs, loose: float = LOOSE) -> None:
    """Every program that is compiled takes no more than its formula says, which says no more than `loose` times it."""
    dense = programs.dense if isinstance(programs, DenseStreamedPrograms) else None
    workspace = Workspace(programs.config, programs.shapes, dense)
    assert programs._workspace
    for key, taken in programs._workspace.items():
        name, *arguments = key
        bound = getattr(workspace, name.replace(" ", "_"))(*arguments)
        assert taken <= bound <= loose * taken + CONSTANT, (key, taken, bound)
    if isinstance(programs, StreamedPrograms) and programs.slots:
        assert sum(program_bytes(programs.insert)) <= workspace.insert()


def assert_estimated(llm: LLM, loose: float = LOOSE) -> None:
    """The plan by formulas has the parts of the one that the model was placed with, but for the workspace, which is a
    bound; and so are the formulas of all of its programs."""
    placement, chunks = llm._placement, llm._executor.pass_chunks
    slots = placement.slots if placement.slots or placement.dense else None
    context, pages = placement.context_length, placement.pages
    estimated = estimate_plan(llm.config, llm.options, context, pages, slots, chunks, placement.dense)
    found, planned = dict(estimated.parts), dict(placement.plan.parts)
    bound, workspace = found.pop("workspace"), planned.pop("workspace")
    assert found == planned
    assert workspace <= bound <= loose * workspace + CONSTANT
    assert_bounded(placement.programs, loose)


def grown(part: Any, by: int = 8) -> Any:
    """A configuration with all sizes but the counts of heads and experts so many times as large: in a tiny model
    constants hide what is missing in a formula."""
    if isinstance(part, tuple):
        return tuple(grown(each, by) for each in part)
    if not dataclasses.is_dataclass(part):
        return part
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    for name, value in values.items():
        if name in (*_SIZES, *_LATENT_SIZES) and value is not None:
            values[name] = value * by
        elif name in ("short_factors", "long_factors"):
            values[name] = value * by
        else:
            values[name] = grown(value, by)
    return type(part)(**values)


def grown_config(config: ModelConfig) -> ModelConfig:
    """As `grown`, of a whole model."""
    larger: ModelConfig = grown(config)
    return larger
