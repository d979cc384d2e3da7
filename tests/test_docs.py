"""Examples in docs/ work: a family, whose table names every family there is, the timeline of a run, and serving."""

import json
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest

from novalm_jax import LLM, SamplingParams
from novalm_jax.bench import main as bench
from novalm_jax.checkpoint.load import abstract_model
from novalm_jax.checkpoint.mapping import written_tensors
from novalm_jax.config import MLPConfig, MoEConfig
from novalm_jax.errors import ConfigError
from novalm_jax.experts.profile import read_profile
from novalm_jax.experts.traces import read_trace
from novalm_jax.generate import main as generate
from novalm_jax.models.families import FAMILIES
from novalm_jax.models.families.family import Family
from novalm_jax.models.params import parameters_of
from novalm_jax.timeline import MOST_EVENTS, Track
from timeline_helpers import rows_of
from tiny_checkpoints import tiny_checkpoint

DOCS = Path(__file__).parent.parent / "docs"
MODELS = (DOCS / "models.md").read_text(encoding="utf-8")
ACORN: dict[str, Any] = {
    **{"model_type": "acorn", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "dense_size": 24, "expert_size": 16},
    **{"num_experts": 8, "capacity_factor": 1.25, "score_function": "sigmoid"},
}


def example() -> Family:
    (code,) = re.findall(r"```python\n(.*?)```", MODELS, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/models.md", "exec"), names)
    family: Family = names["FAMILY"]
    return family


def test_the_table_names_every_family() -> None:
    supported = MODELS.split("## Supported")[1].split("## ")[0]
    rows = [row.split("|")[1] for row in supported.splitlines() if row.startswith("| `") and "model_type" not in row]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(FAMILIES)


def test_the_example_reads_its_configuration() -> None:
    config = example().read_config(ACORN)
    dense, sparse = (layer.feed_forward for layer in config.layers)
    assert isinstance(dense, MLPConfig) and dense.width == 24
    assert isinstance(sparse, MoEConfig)
    assert (sparse.num_experts, sparse.experts_per_token, sparse.shared_width) == (8, 6, 16)
    assert (sparse.router.scores, sparse.router.scale, sparse.router.choice_bias) == ("sigmoid", 2.0, True)
    with pytest.raises(ConfigError, match=r"score_function = 'softmax' is not supported \('sigmoid' is\)"):
        example().read_config({**ACORN, "score_function": "softmax"})


def test_the_example_knows_where_every_parameter_is_stored() -> None:
    family = example()
    model = abstract_model(family.read_config(ACORN))
    written = written_tensors(family, {path: param.shape for path, param in parameters_of(model).items()})
    names = {tensor.name for tensor in written}
    assert {"model.layers.1.moe.router.choice_bias", "model.layers.1.moe.experts.7.down_proj.weight"} <= names
    assert {"model.layers.1.moe.shared_expert.up_proj.weight", "model.layers.0.mlp.up_proj.weight"} <= names


def section_of(page: str, title: str) -> str:
    """What stands below a title, up to the next one."""
    return (DOCS / page).read_text(encoding="utf-8").split(f"## {title}")[1].split("\n## ")[0]


def test_the_timeline_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    section = section_of("streaming.md", "What a timeline shows")
    assert re.findall(r"^\| (\w+(?: \w+)?) \|", section, re.MULTILINE)[1:] == list(get_args(Track))
    assert f"The first {MOST_EVENTS:,} spans" in section.replace("\n", " ")
    (snippet,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(snippet.replace("path/to/model", str(tiny_checkpoint(tmp_path / "model"))), {})
    assert capsys.readouterr().out == "0.0 seconds of uploads while a program ran\n"
    assert list(rows_of((tmp_path / "trace.json").read_bytes())) == ["compute"]


def test_recording_and_starting_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    section = section_of("streaming.md", "Recording routing, and starting from it")
    fields = {"num_experts": 8, "num_experts_per_tok": 2}
    model = str(tiny_checkpoint(tmp_path / "model", "qwen3_moe", **fields))
    monkeypatch.chdir(tmp_path)
    (commands,) = re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)
    for command in commands.splitlines():
        arguments = shlex.split(command.replace("path/to/model", model))
        assert arguments[:3] == ["python", "-m", "novalm_jax.generate"]
        assert generate([*arguments[3:], "--max-tokens", "5", "--ignore-eos"]) == 0
    assert read_profile("profile.npz").tokens == len(read_trace("trace.npz").step) == 4
    capsys.readouterr()
    (snippet,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    exec(snippet.replace("path/to/model", model), {})
    assert (
        capsys.readouterr().out == f"(38, {len(read_trace('trace.npz').layers)}, 2) experts [tokens, layers, k] of 8\n"
    )


def test_many_requests(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = str(tiny_checkpoint(tmp_path / "model"))
    (snippet,) = re.findall(r"```python\n(.*?)```", section_of("serving.md", "Many requests"), flags=re.DOTALL)
    exec(snippet.replace("path/to/model", model), {})
    prompts = ["A small bird", "Once upon a time", "The dog", "In the garden"]
    with LLM(model, max_batch=8) as llm:
        outs = llm.generate(prompts, SamplingParams(max_tokens=20, temperature=0))
    assert capsys.readouterr().out == "\n".join(out.text for out in outs) + "\n"


def test_batches_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = str(tiny_checkpoint(tmp_path / "model"))
    (command,) = re.findall(r"```bash\n(.*?)```", section_of("serving.md", "Pages"), flags=re.DOTALL)
    arguments = shlex.split(command.replace("path/to/model", model))
    assert arguments[:3] == ["python", "-m", "novalm_jax.bench"]
    assert bench([*arguments[3:], "--json"]) == 0
    alone, together = json.loads(capsys.readouterr().out)["batches"]
    assert (alone["batch"], together["batch"]) == (1, 4)
    # Two layers of two experts each for a token; four tokens share some.
    assert alone["distinct"] == 4 and 4 < together["distinct"] <= 16
    assert together["bytes_read"] > alone["bytes_read"] > 0 and 0 < alone["bound_share"]
    assert bench(arguments[3:]) == 0
    assert "of its bound" in capsys.readouterr().out
