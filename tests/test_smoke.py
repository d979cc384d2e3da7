"""The shortest way through everything: load, run, generate. What CI tries on the newest jax as well."""

import os
import subprocess
import sys
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


WIDE = """
import sys
import jax
jax.config.update("jax_enable_x64", True)
import numpy as np
import novalm_jax as nova
golden = np.load(sys.argv[1] + "/golden.npz")
with nova.LLM(sys.argv[1], dtype="float32", max_batch=2) as llm:
    print(np.abs(llm.logits(golden["input_ids"][0], decode_from=5) - golden["logits"][0]).max())
    llm.generate([[1, 2, 3]], nova.SamplingParams(max_tokens=3, temperature=1.0, seed=1))
"""


def test_the_engine_works_beside_64_bit_numbers() -> None:
    """A process may have switched them on for purposes of its own."""
    command = [sys.executable, "-W", "error", "-c", WIDE, str(GOLDEN / "mixtral-window")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) <= 1e-4
