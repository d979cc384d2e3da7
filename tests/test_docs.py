"""Examples in docs/ work: a family, whose table names every family there is, and the timeline of a run."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from novalm_jax.checkpoint.load import abstract_model
from novalm_jax.checkpoint.mapping import written_tensors
from novalm_jax.config import MLPConfig, MoEConfig
from novalm_jax.errors import ConfigError
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


def test_the_timeline_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    section = (DOCS / "streaming.md").read_text(encoding="utf-8").split("## What a timeline shows")[1].split("\n## ")[0]
    assert re.findall(r"^\| (\w+(?: \w+)?) \|", section, re.MULTILINE)[1:] == list(get_args(Track))
    assert f"The first {MOST_EVENTS:,} spans" in section.replace("\n", " ")
    (snippet,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(snippet.replace("path/to/model", str(tiny_checkpoint(tmp_path / "model"))), {})
    assert capsys.readouterr().out == "0.0 seconds of uploads while a program ran\n"
    assert list(rows_of((tmp_path / "trace.json").read_bytes())) == ["compute"]
