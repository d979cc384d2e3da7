"""Writing .safetensors: models from memory, what is refused, and how much memory streaming takes."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import novalm_jax as nova
from novalm_jax.checkpoint.atomic import Work
from novalm_jax.checkpoint.conversion import convert_checkpoint
from novalm_jax.checkpoint.load import load_model
from novalm_jax.errors import CheckpointError, ConfigError, OptionError, WriteError
from novalm_jax.models.params import parameters_of
from novalm_jax.options import ConvertOptions
from tiny_checkpoints import assert_same, tensors

GOLDEN = Path(__file__).parent.parent / "golden"


def raw_config(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / case / "config.json").read_text())


# --- models in memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["mixtral", "granitemoe", "llama-hub", "deepseek_v3", "gpt_oss", "qwen2_moe-sparse"])
def test_a_model_in_memory_becomes_the_folder_it_came_from(case: str, tmp_path: Path) -> None:
    folder = nova.save_model(load_model(GOLDEN / case), tmp_path / "out", config=raw_config(case), shard_size="20kB")
    assert folder == tmp_path / "out"
    assert_same(tensors(folder), tensors(GOLDEN / case))
    assert json.loads((folder / "config.json").read_text()) == raw_config(case)
    assert len(list(folder.glob("*.safetensors"))) > 1


def test_a_model_in_bfloat16_says_so(tmp_path: Path) -> None:
    config = raw_config("mixtral") | {"torch_dtype": "float32"}
    model = load_model(GOLDEN / "mixtral", dtype="bfloat16")
    nova.save_model(model, tmp_path / "out", config=config, files_from=GOLDEN)
    wanted = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors(GOLDEN / "mixtral").items()}
    assert_same(tensors(tmp_path / "out"), wanted)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"} and list(written) == list(config)
    assert (tmp_path / "out" / "README.md").read_bytes() == (GOLDEN / "README.md").read_bytes()


def test_a_change_of_the_weights_is_written(tmp_path: Path) -> None:
    model = load_model(GOLDEN / "mixtral")
    gate = model.layers[1].feed_forward.experts.gate
    gate.set_value(gate.get_value().at[2].multiply(2))
    nova.save_model(model, tmp_path / "out", config=raw_config("mixtral"))
    before, after = tensors(GOLDEN / "mixtral"), tensors(tmp_path / "out")
    changed = [name for name in before if before[name].tobytes() != after[name].tobytes()]
    assert changed == ["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    assert np.array_equal(after[changed[0]], before[changed[0]] * 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 3}, r"\d+ missing: layers.2"),
        ({"num_hidden_layers": 1}, r"\d+ not known: layers.1"),
        ({"vocab_size": 97}, r"embed.weight is \[96, 32\], not \[97, 32\]"),
        ({"tie_word_embeddings": True}, "1 not known: head.weight"),
        ({"num_experts_per_tok": 3}, "they differ in layers"),
        ({"rms_norm_eps": 1e-3}, "they differ in norm, layers"),
    ],
)
def test_a_configuration_of_another_model_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        nova.save_model(load_model(GOLDEN / "mixtral"), tmp_path / "out", config=raw_config("mixtral") | change)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    model, config = load_model(GOLDEN / "mixtral"), raw_config("mixtral")
    with pytest.raises(ConfigError, match="no model_type"):
        nova.save_model(model, tmp_path / "out", config={})
    with pytest.raises(OptionError, match="shard_size"):
        nova.save_model(model, tmp_path / "out", config=config, shard_size="0")
    with pytest.raises(OptionError, match=r"exists and holds config\.json"):
        nova.save_model(model, GOLDEN / "mixtral", config=config)
    model.norm.scale.set_value(model.norm.scale.get_value().astype(jnp.int32))
    with pytest.raises(CheckpointError, match=r"norm.scale is int32; float32, bfloat16 and float16 can"):
        nova.save_model(model, tmp_path / "out", config=config)
    assert os.listdir(tmp_path) == []


def test_a_save_that_was_ended_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = load_model(GOLDEN / "mixtral"), raw_config("mixtral")

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Work, "finish", ended)
        with pytest.raises(KeyboardInterrupt):
            nova.save_model(model, tmp_path / "out", config=config)
        assert os.listdir(tmp_path) == []
        # As a kill leaves it: nothing cleans up, and the weights in memory may be others by now.
        patch.setattr(Work, "__exit__", lambda self, *_: os.close(self._lock))
        with pytest.raises(KeyboardInterrupt):
            nova.save_model(model, tmp_path / "out", config=config)
    assert "model.safetensors" in os.listdir(tmp_path / "out.partial")
    model.norm.scale.set_value(model.norm.scale.get_value() * 2)
    nova.save_model(model, tmp_path / "out", config=config)
    assert os.listdir(tmp_path) == ["out"]
    assert np.array_equal(load_model(tmp_path / "out").norm.scale.get_value(), model.norm.scale.get_value())


def test_a_failure_to_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WriteError, match=r"out cannot be written: No space left on device \(.*\)\.$"):
        nova.save_model(load_model(GOLDEN / "llama-hub"), tmp_path / "out", config=raw_config("llama-hub"))
    assert os.listdir(tmp_path) == []


# --- streaming -------------------------------------------------------------------------------------------------------


def large(folder: Path) -> int:
    """A model of 40 MB, mostly experts; returns the size of its largest parameter."""
    config = raw_config("qwen3_moe") | {"hidden_size": 256, "moe_intermediate_size": 256, "vocab_size": 1024}
    config |= {"num_local_experts": 8, "num_hidden_layers": 6}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    from novalm_jax.checkpoint.load import abstract_model
    from novalm_jax.checkpoint.mapping import written_tensors
    from novalm_jax.models.families import find_family

    family = find_family(config)
    shapes = {path: p.shape for path, p in parameters_of(abstract_model(family.read_config(config))).items()}
    save_file(
        {out.name: np.zeros(out.shape, np.float32) for out in written_tensors(family, shapes)},
        folder / "model.safetensors",
    )
    return max(int(np.prod(shape)) * 4 for shape in shapes.values())


def test_conversion_takes_the_memory_of_one_parameter(tmp_path: Path) -> None:
    largest = large(tmp_path / "source")
    total = (tmp_path / "source" / "model.safetensors").stat().st_size
    assert total > 12 * largest
    for to in ("safetensors", "orbax"):
        # What is imported on the way takes memory, too.
        convert_checkpoint(GOLDEN / "mixtral", tmp_path / f"first-{to}", ConvertOptions(to=to))  # type: ignore[arg-type]
        tracemalloc.start()
        convert_checkpoint(tmp_path / "source", tmp_path / to, ConvertOptions(to=to))  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * largest + (6 << 20), (to, peak, largest, total)
    tracemalloc.start()
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * largest + (6 << 20), (peak, largest, total)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        tmp_path / "safetensors" / "model.safetensors"
    ).read_bytes()


def test_a_module_of_nnx_counts_as_a_model(tmp_path: Path) -> None:
    """A model that was split and merged again, as training does it."""
    model = nnx.merge(*nnx.split(load_model(GOLDEN / "llama-hub")))
    nova.save_model(model, tmp_path / "out", config=raw_config("llama-hub"))
    assert_same(tensors(tmp_path / "out"), tensors(GOLDEN / "llama-hub"))
