"""The shortest way through everything: load, run, generate. What CI tries on the newest jax as well."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import novalm_jax as nova
from tiny_checkpoints import tiny_checkpoint

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe"])
def test_logits_of_a_golden_model(case: str) -> None:
    golden = np.load(GOLDEN / case / "golden.npz")
    model = nova.load_model(GOLDEN / case)
    logits = jax.jit(lambda m, t: m(t))(model, jnp.asarray(golden["input_ids"]))
    assert np.abs(np.asarray(logits) - golden["logits"]).max() <= 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_from_a_checkpoint(tmp_path: Path, dtype: str) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    sampled = nova.SamplingParams(max_tokens=8, temperature=1.0, top_k=20, top_p=0.9, seed=1, logprobs=2)
    greedy = nova.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with nova.LLM(folder, dtype=dtype) as llm:
        first, second = llm.generate(["One", "Two"], [sampled, greedy])
        assert first.logprobs is not None and len(first.logprobs) == len(first.token_ids)
        assert len(second.token_ids) == 8
        assert "".join(llm.stream("Two", greedy)) == second.text
        logits = llm.logits(second.prompt_token_ids + second.token_ids, decode_from=len(second.prompt_token_ids))
        assert logits[len(second.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == second.token_ids
        assert llm.report().to_dict()["generated_tokens"] > 0
