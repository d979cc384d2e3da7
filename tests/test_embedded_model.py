"""The model inside the package: what it says, how large it is, and that it is used where no other one is given."""

from __future__ import annotations

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax import LLM, SamplingParams, load_model
from novalm_jax.generate import main
from novalm_jax.models.params import parameters_of
from novalm_jax.resources import embedded_checkpoint
from novalm_jax.text.tokenizer import Tokenizer

PROMPT = "Once upon a time"
# The sun shone brightly, again and again: a small model has its loops.
GREEDY_IDS = [
    *(12, 272, 454, 261, 1015, 307, 3153, 1752, 12, 261, 1015, 307, 3153, 1752, 272, 1752),
    *(12, 261, 1015, 307, 3153, 1752, 272, 1752, 12, 272),
    *(261, 1015, 3369, 1752, 314, 12, 272) * 5,
    *(261, 1015, 3369),
]
GREEDY_TEXT = (
    ", and when the sun was shining bright"
    + ", the sun was shining bright and bright" * 2
    + ", and the sun shone brightly" * 5
    + ", and the sun shone"
)
"""What transformers 5.24 (float32, eager) finds most likely after the prompt, token by token."""


def test_the_most_likely_text_is_that_of_the_reference() -> None:
    with LLM(None, dtype="float32") as llm:
        (out,) = llm.generate(PROMPT, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
    assert list(out.token_ids) == GREEDY_IDS
    assert out.text == GREEDY_TEXT


def test_generate_without_a_model_uses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prompt", PROMPT, "--temperature", "0", "--dtype", "float32", "--max-tokens", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == GREEDY_IDS[:12]


def test_the_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in embedded_checkpoint().iterdir()}
    assert sum(files.values()) < 25e6
    assert sorted(files) == [
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]


def test_the_card_is_true_and_no_expert_idles_in_its_samples() -> None:
    folder = embedded_checkpoint()
    card = (folder / "README.md").read_text(encoding="utf-8")
    config, model = json.loads((folder / "config.json").read_text()), load_model(None)
    assert f"{sum(param.size for param in parameters_of(model).values()):,} parameters" in card
    assert f"{config['num_experts']} experts a layer of width {config['moe_intermediate_size']}" in card
    samples = re.findall(rf"^\d\. ({PROMPT}.*)$", card, re.MULTILINE)
    assert len(samples) == 10
    tokenizer = Tokenizer.load(folder)
    ids = [token for sample in samples for token in tokenizer.encode(sample)]
    windows = len(ids) // 64
    _, traces = model.traced(jnp.asarray(ids[: windows * 64], jnp.int32).reshape(windows, 64))
    for trace in traces:
        counts = np.bincount(np.asarray(trace.ids).ravel(), minlength=config["num_experts"])
        assert counts.min() > 0.1 * counts.mean() and counts.max() < 5 * counts.mean()
