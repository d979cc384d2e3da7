"""Orbax folders: bits, dtypes, devices, what is in them, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import novalm_jax as nova
from novalm_jax.checkpoint.conversion import convert_checkpoint
from novalm_jax.checkpoint.load import load_model
from novalm_jax.errors import CheckpointError, ConfigError, OptionError
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.params import parameters_of
from novalm_jax.options import ConvertOptions

GOLDEN = Path(__file__).parent.parent / "golden"
TO_ORBAX = ConvertOptions(to="orbax")


def raw_config(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / case / "config.json").read_text())


def assert_same(found: Decoder, wanted: Decoder) -> None:
    assert found.config == wanted.config
    ours, theirs = parameters_of(found), parameters_of(wanted)
    assert sorted(ours) == sorted(theirs)
    for path, param in theirs.items():
        assert ours[path].dtype == param.dtype, path
        assert np.asarray(ours[path].get_value()).tobytes() == np.asarray(param.get_value()).tobytes(), path
        assert ours[path].get_metadata("axes") == param.get_metadata("axes")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mixtral case as an Orbax folder, for reading only."""
    return convert_checkpoint(GOLDEN / "mixtral", tmp_path_factory.mktemp("orbax") / "mixtral", TO_ORBAX).folder


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["qwen2_moe", "mixtral-bf16", "deepseek_v3-bf16", "llama-hub", "gpt_oss"])
def test_a_model_comes_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    dtype = "bfloat16" if case.endswith("bf16") else "float32"
    model = load_model(GOLDEN / case, dtype=dtype)
    assert nova.save_orbax(model, tmp_path / "saved", config=raw_config(case)) == tmp_path / "saved"
    convert_checkpoint(GOLDEN / case, tmp_path / "converted", TO_ORBAX)
    for folder in ("saved", "converted"):
        # No dtype is asked for, and none of the stored bits is lost.
        assert_same(nova.load_orbax(tmp_path / folder), model)
        assert json.loads((tmp_path / folder / "config.json").read_text()) == raw_config(case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype_rounds_as_load_model_does(dtype: str, stored: Path, tmp_path: Path) -> None:
    assert_same(nova.load_orbax(stored, dtype=dtype), load_model(GOLDEN / "mixtral", dtype=dtype))
    convert_checkpoint(GOLDEN / "mixtral-bf16", tmp_path / "out", TO_ORBAX)
    assert_same(nova.load_orbax(tmp_path / "out", dtype=dtype), load_model(GOLDEN / "mixtral-bf16", dtype=dtype))


def test_rounding_is_to_nearest_even_and_keeps_what_is_special(tmp_path: Path) -> None:
    model = load_model(GOLDEN / "mixtral")
    bits = np.random.default_rng(1).integers(0, 1 << 32, 96 * 32, np.uint64).astype(np.uint32)
    bits[:5] = (0x3F808000, 0x3F818000, 0x00000001, 0x7F800000, 0x80000000)
    values = bits.view(np.float32)
    values[np.isnan(values)] = 1.0
    model.embed.weight.set_value(jnp.asarray(values.reshape(96, 32)))
    nova.save_orbax(model, tmp_path / "out", config=raw_config("mixtral"))
    found = np.asarray(nova.load_orbax(tmp_path / "out", dtype="bfloat16").embed.weight.get_value())
    assert found.tobytes() == np.asarray(jnp.asarray(values).astype(jnp.bfloat16)).tobytes()


def test_a_number_that_rounding_would_make_infinite_is_refused(tmp_path: Path) -> None:
    """An infinity that is stored is no fault."""
    model = load_model(GOLDEN / "mixtral")
    weight = model.embed.weight.get_value()
    for number, said in ((jnp.inf, None), (-3.4e38, r"embed\.weight holds numbers that bfloat16 cannot")):
        model.embed.weight.set_value(weight.at[5, 7].set(number))
        folder = nova.save_orbax(model, tmp_path / str(number), config=raw_config("mixtral"))
        assert nova.load_orbax(folder).embed.weight[5, 7] == np.float32(number)
        if said is None:
            assert nova.load_orbax(folder, dtype="bfloat16").embed.weight[5, 7] == jnp.inf
        else:
            with pytest.raises(CheckpointError, match=said):
                nova.load_orbax(folder, dtype="bfloat16")


def test_any_program_can_restore_the_weights(stored: Path) -> None:
    assert sorted(os.listdir(stored)) == ["config.json", "weights"]
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        abstract = {
            path: np.zeros(p.shape, p.dtype) for path, p in parameters_of(load_model(GOLDEN / "mixtral")).items()
        }
        arrays = checkpointer.restore(stored / "weights", args=ocp.args.StandardRestore(abstract))
    for path, param in parameters_of(load_model(GOLDEN / "mixtral")).items():
        assert np.array_equal(arrays[path], param.get_value())


def test_small_files_go_along(tmp_path: Path) -> None:
    model, config = load_model(GOLDEN / "mixtral", dtype="bfloat16"), raw_config("mixtral")
    nova.save_orbax(model, tmp_path / "out", config=config, files_from=GOLDEN)
    assert (tmp_path / "out" / "README.md").read_bytes() == (GOLDEN / "README.md").read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"dtype": "bfloat16"}


def test_no_thread_stays_behind(stored: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model = nova.load_orbax(stored)
    nova.save_orbax(model, tmp_path / "out", config=raw_config("mixtral"))
    convert_checkpoint(stored, tmp_path / "back")
    gc.collect()
    assert set(threading.enumerate()) <= before


# --- devices ---------------------------------------------------------------------------------------------------------

MESHES = """
import json, sys
from pathlib import Path
import jax, numpy as np
import novalm_jax as nova
from novalm_jax.models.params import parameters_of
from novalm_jax.parallel.plan import ShardingPlan
golden, stored, base = map(Path, sys.argv[1:])
assert len(jax.devices()) == 4
config = json.loads((golden / "config.json").read_text())
rules = {"expert": "expert", "expert_mlp": "tensor", "q_heads": "tensor", "kv_heads": "tensor", "vocab": "tensor"}
square = ShardingPlan({"expert": 2, "tensor": 2}, rules).shardings
row = ShardingPlan({"expert": 4}, {"expert": "expert"}).shardings
wanted = {path: np.asarray(param.get_value()) for path, param in parameters_of(nova.load_model(golden)).items()}

def check(model, shardings, dtype=np.float32):
    where = shardings(model) if shardings else {}
    for path, param in parameters_of(model).items():
        array = param.get_value()
        if shardings:
            assert array.sharding.is_equivalent_to(where[path], array.ndim), path
        else:
            assert array.devices() == {jax.devices()[0]}, path
        assert array.dtype == dtype and np.asarray(array).tobytes() == wanted[path].astype(dtype).tobytes(), path
    return model

# Stored from one device, opened on four; stored from four, opened on one, and on another mesh of four.
meshed = check(nova.load_orbax(stored, shardings=square), square)
gate = meshed.layers[0].feed_forward.experts.gate.get_value()
e, f, d = gate.shape
assert {shard.data.shape for shard in gate.addressable_shards} == {(e // 2, f // 2, d)}
nova.save_orbax(meshed, base / "square", config=config)
check(nova.load_orbax(base / "square"), None)
moved = check(nova.load_orbax(base / "square", shardings=row), row)
check(nova.load_orbax(base / "square", dtype="bfloat16", shardings=row), row, jax.numpy.bfloat16)
case = np.load(golden / "golden.npz")
logits = jax.jit(lambda m, t: m(t))(meshed, case["input_ids"])
print(float(np.abs(np.asarray(logits) - case["logits"]).max()))
nova.save_model(moved, base / "hub", config=config)
check(nova.load_model(base / "hub"), None)
"""


def test_what_one_mesh_stores_another_opens(stored: Path, tmp_path: Path) -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", MESHES, str(GOLDEN / "mixtral"), str(stored), str(tmp_path)]
    run = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) <= 1e-4
    # And a command of one device reads what four have stored.
    convert_checkpoint(tmp_path / "square", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        tmp_path / "hub" / "model.safetensors"
    ).read_bytes()


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        nova.load_orbax(folder)
    return str(caught.value)


def test_a_folder_that_is_no_such_checkpoint_is_told_what_it_lacks(stored: Path, tmp_path: Path) -> None:
    assert "There is no folder" in refusal(tmp_path / "nowhere")
    assert "config.json and weights/_METADATA are missing" in refusal(tmp_path)
    said = refusal(GOLDEN / "mixtral")
    assert "weights/_METADATA is missing" in said and "load_model" in said
    shutil.copytree(stored, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").unlink()
    assert "config.json is missing" in refusal(tmp_path / "copy")
    with pytest.raises(OptionError, match="dtype"):
        nova.load_orbax(stored, dtype="int8")


@pytest.mark.parametrize("damage", ["truncated", "gone", "metadata"])
def test_damaged_weights_are_named(damage: str, stored: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(stored, folder)
    files = sorted((folder / "weights").rglob("d/*"), key=lambda path: path.stat().st_size)
    if damage == "truncated":
        files[-1].write_bytes(files[-1].read_bytes()[:100])
    elif damage == "gone":
        files[-1].unlink()
    else:
        (folder / "weights" / "_METADATA").write_text("{")
    said = (
        "does not hold the parameters" if damage == "metadata" else f"{folder / 'weights'}: the weights cannot be read"
    )
    # Orbax forgets the other reads of a restore that fails, and they die whenever they end: in a process of their own.
    code = "import sys, novalm_jax as nova; nova.load_orbax(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert f"CheckpointError: {said}" in run.stderr or f"CheckpointError: {folder} {said}" in run.stderr


def test_weights_of_another_model_are_refused(stored: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(stored, folder)
    (folder / "config.json").write_text(json.dumps(raw_config("mixtral") | {"num_hidden_layers": 3, "vocab_size": 7}))
    said = refusal(folder)
    assert "missing: layers.2" in said and "embed.weight is [96, 32], not [7, 32]" in said
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no model_type"):
        nova.load_orbax(folder)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        shutil.rmtree(folder / "weights")
        checkpointer.save(folder / "weights", args=ocp.args.StandardSave({"params": {"embed": np.zeros(3)}}))
    shutil.copy(GOLDEN / "mixtral" / "config.json", folder)
    assert "missing: embed.weight" in refusal(folder)


def test_a_model_that_is_not_the_one_described_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="they differ in norm"):
        nova.save_orbax(
            load_model(GOLDEN / "mixtral"), tmp_path / "out", config=raw_config("mixtral") | {"rms_norm_eps": 1e-3}
        )
    assert os.listdir(tmp_path) == []


def test_a_folder_for_orbax_is_named_where_safetensors_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"Orbax checkpoint\. nova\.load_orbax reads it"):
        load_model(tmp_path)
