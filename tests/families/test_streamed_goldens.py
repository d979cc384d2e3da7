"""Every family with experts in tiers: the bits of its resident run, through prefill and through single steps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from golden_helpers import GOLDEN, golden
from novalm_jax import LLM
from novalm_jax.checkpoint.load import read_config
from novalm_jax.experts.records import count_records, moe_layers
from streamed_helpers import assert_it_streamed, with_slots
from workspace_helpers import assert_estimated


def _sparse(case: str) -> bool:
    return bool(moe_layers(read_config(GOLDEN / case)[2]))


CASES = [name for name in sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz")) if _sparse(name)]
# One case a family, and those whose experts are laid out or weighed in a way of their own.
CHOSEN = [case for case in CASES if "-" not in case] + [
    "dbrx-hub",
    "gpt_oss-clamp",
    "llama4_text-lists",
    "mixtral-packed",
]
CELLS = list(itertools.product((0, "1GiB"), ("off", "lookahead"), ("decayed", "lru"), ("float32", "bfloat16")))


def test_the_chosen_cases_have_experts_of_every_kind() -> None:
    families = {json.loads((GOLDEN / case / "config.json").read_text())["model_type"] for case in CASES}
    assert len(families) >= 15 and {case.split("-")[0] for case in CHOSEN} >= {case.split("-")[0] for case in CASES}


@pytest.mark.parametrize(("case", "cell"), [(case, CELLS[i * 5 % len(CELLS)]) for i, case in enumerate(CHOSEN)])
def test_streamed_is_resident_bit_for_bit(case: str, cell: tuple[Any, ...]) -> None:
    host_memory, prefetch, policy, dtype = cell
    folder: Path = GOLDEN / case
    config = read_config(folder)[2]
    options = {"dtype": dtype, "max_batch": 2, "context_length": min(128, config.context_length)}
    ids = golden(case).ids[0].tolist()
    with LLM(folder, **options) as llm:
        whole, steps = llm.logits(ids), llm.logits(ids, decode_from=len(ids) // 2)
        assert_estimated(llm)
    slots = max(count_records(config) // 4, max(moe.experts_per_token for moe in moe_layers(config).values()))
    options |= {"host_memory": host_memory, "prefetch": prefetch, "policy": policy}
    with with_slots(folder, slots, **options) as llm:
        assert llm.logits(ids).tobytes() == whole.tobytes()
        assert llm.logits(ids, decode_from=len(ids) // 2).tobytes() == steps.tobytes()
        assert_it_streamed(llm, prefetched=None)
        assert_estimated(llm)
