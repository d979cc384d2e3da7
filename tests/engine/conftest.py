"""What tests of experts in tiers share: one model on disk, and the answers of its resident run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from novalm_jax import LLM
from streamed_helpers import Answers
from streamed_model import BRIEF, OPTIONS, QUESTIONS, make_model


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared model; nobody changes it."""
    return make_model(tmp_path_factory.mktemp("streamed") / "model")


@pytest.fixture(scope="session")
def resident(moe_folder: Path) -> dict[Any, Answers]:
    """What the resident model answers to `QUESTIONS`, by dtype, and to `BRIEF` in float32, by that."""
    found: dict[Any, Answers] = {}
    for dtype in ("float32", "bfloat16"):
        with LLM(moe_folder, dtype=dtype, **OPTIONS) as llm:
            assert llm.report().policy == "resident"
            found[dtype] = QUESTIONS.ask(llm)
            if dtype == "float32":
                found["brief"] = BRIEF.ask(llm)
    return found
