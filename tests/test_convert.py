"""The convert command: every folder of the goldens there and back, bit for bit, and what it says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from novalm_jax.checkpoint.conversion import convert_checkpoint
from novalm_jax.checkpoint.load import load_model
from novalm_jax.checkpoint.write import Plan
from novalm_jax.convert import main
from novalm_jax.errors import CheckpointError
from novalm_jax.options import ConvertOptions
from tiny_checkpoints import assert_same, tensors

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
# Folders that hold more than the language model: layers that predict later tokens, an encoder of images.
NEEDLESS = {"deepseek_v3-hub", "glm4_moe-hub", "llama4"}
# Folders whose tensors have other names than the hub's, and the folder with the same weights under those.
OTHER_LAYOUTS = {"mixtral-packed": "mixtral", "qwen3_moe-packed": "qwen3_moe", "qwen3_moe-w123": "qwen3_moe"}


run_model = jax.jit(lambda model, ids: model(ids))


def logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    return np.asarray(run_model(load_model(folder), ids))


def convert(source: Path, destination: Path, *options: str) -> tuple[int, str]:
    return main([str(source), str(destination), *options]), str(destination)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_comes_out_bit_for_bit_under_the_hubs_name(case: str, tmp_path: Path) -> None:
    needless = convert_checkpoint(GOLDEN / case, tmp_path / "whole").needless
    wanted = tensors(GOLDEN / OTHER_LAYOUTS.get(case, case))
    assert bool(needless) == (case in NEEDLESS)
    wanted = {name: value for name, value in wanted.items() if name not in needless}
    assert_same(tensors(tmp_path / "whole"), wanted)
    assert sorted(os.listdir(tmp_path / "whole")) == ["config.json", "model.safetensors"]
    assert (tmp_path / "whole" / "config.json").read_bytes() == (GOLDEN / case / "config.json").read_bytes()
    # The file is the one that the safetensors library makes of these tensors.
    save_file(wanted, tmp_path / "library.safetensors", {"format": "pt"})
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()
    # In shards, and out of them.
    convert_checkpoint(tmp_path / "whole", tmp_path / "shards", ConvertOptions(shard_size="15kB"))
    assert_same(tensors(tmp_path / "shards"), wanted)
    convert_checkpoint(tmp_path / "shards", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_shards_are_numbered_and_indexed(tmp_path: Path) -> None:
    convert_checkpoint(GOLDEN / "mixtral", tmp_path / "out", ConvertOptions(shard_size="30kB"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (
        files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)] and len(files) > 2
    )
    whole = tensors(GOLDEN / "mixtral")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    assert sorted(index["weight_map"]) == sorted(whole)
    for name in files:
        with safe_open(tmp_path / "out" / name, "np") as file:
            assert file.metadata() == {"format": "pt"}
            inside = list(file.keys())
            assert [index["weight_map"][key] for key in inside] == [name] * len(inside)
            size = sum(whole[key].nbytes for key in inside)
            assert size <= 30_000 or len(inside) == 1


@pytest.mark.parametrize("case", ["mixtral-packed", "deepseek_v3-bf16", "gpt_oss"])
def test_logits_stay_as_they_are(case: str, tmp_path: Path) -> None:
    convert_checkpoint(GOLDEN / case, tmp_path / "hub", ConvertOptions(shard_size="20kB"))
    convert_checkpoint(tmp_path / "hub", tmp_path / "orbax", ConvertOptions(to="orbax"))
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    ids = np.load(GOLDEN / case / "golden.npz")["input_ids"]
    wanted = logits(GOLDEN / case, ids)
    for folder in ("hub", "back"):
        assert logits(tmp_path / folder, ids).tobytes() == wanted.tobytes()
    assert_same(tensors(tmp_path / "back"), tensors(tmp_path / "hub"))


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_weights_are_rounded_once_as_load_model_does(to: Any, tmp_path: Path) -> None:
    convert_checkpoint(GOLDEN / "qwen2_moe", tmp_path / "out", ConvertOptions(to=to, dtype="bfloat16"))
    if to == "orbax":
        convert_checkpoint(tmp_path / "out", tmp_path / "hub")
    wanted = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors(GOLDEN / "qwen2_moe").items()}
    assert_same(tensors(tmp_path / ("hub" if to == "orbax" else "out")), wanted)


def test_the_configuration_changes_in_the_dtype_alone(tmp_path: Path) -> None:
    source = copy_of("mixtral-bf16", tmp_path)
    raw = json.loads((source / "config.json").read_text())
    # Both names, and a number that must not change its form.
    raw |= {"torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}
    (source / "config.json").write_text(json.dumps(raw, indent=3))
    for dtype in ("as-stored", "bfloat16", "float32"):
        convert_checkpoint(source, tmp_path / dtype, ConvertOptions(dtype=dtype))  # type: ignore[arg-type]
    for dtype in ("as-stored", "bfloat16"):
        assert (tmp_path / dtype / "config.json").read_bytes() == (source / "config.json").read_bytes()
    changed = json.loads((tmp_path / "float32" / "config.json").read_text())
    assert list(changed) == list(raw)
    assert changed == raw | {"dtype": "float32", "torch_dtype": "float32"}


def test_types_that_no_model_computes_in_stay_too(tmp_path: Path) -> None:
    source = copy_of("mixtral-packed", tmp_path)
    halves = {name: value.astype(np.float16) for name, value in tensors(source).items()}
    # Tensors of several types, of which one is put together.
    halves["model.norm.weight"] = halves["model.norm.weight"].astype(np.float32)
    save_file(halves, source / "model.safetensors")
    convert_checkpoint(source, tmp_path / "hub")
    convert_checkpoint(source, tmp_path / "orbax", ConvertOptions(to="orbax"))
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    wanted = {name: value.astype(np.float16) for name, value in tensors(GOLDEN / "mixtral").items()}
    wanted["model.norm.weight"] = halves["model.norm.weight"]
    assert_same(tensors(tmp_path / "hub"), wanted)
    assert_same(tensors(tmp_path / "back"), wanted)
    ids = np.load(GOLDEN / "mixtral" / "golden.npz")["input_ids"]
    assert logits(tmp_path / "hub", ids).tobytes() == logits(source, ids).tobytes()


def test_a_tensor_is_put_together_from_parts_of_several_types_without_loss(tmp_path: Path) -> None:
    source = copy_of("granitemoe", tmp_path)
    stored, apart = tensors(source), {}
    for name, value in stored.items():
        if "_linear" not in name:
            apart[name] = value
            continue
        layer = name.partition(".block_sparse_moe")[0]
        half = value.shape[1] // 2
        for e, expert in enumerate(value):
            split = {"gate": expert[:half], "up": expert[half:]} if "input" in name else {"down": expert}
            # bfloat16 and float16 do not hold each other.
            dtype = np.float32 if layer.endswith("0") else (ml_dtypes.bfloat16, np.float16)[e % 2]
            for part, matrix in split.items():
                here = f"{layer}.block_sparse_moe.experts.{e}.{part}_proj.weight"
                apart[here] = np.ascontiguousarray(matrix).astype(dtype)
                matrix[:] = apart[here].astype(np.float32)
    save_file(apart, source / "model.safetensors")
    convert_checkpoint(source, tmp_path / "hub")
    convert_checkpoint(source, tmp_path / "orbax", ConvertOptions(to="orbax"))
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    assert_same(tensors(tmp_path / "hub"), stored)
    assert_same(tensors(tmp_path / "back"), stored)


# --- what goes along -------------------------------------------------------------------------------------------------


def copy_of(case: str, folder: Path) -> Path:
    source = folder / "source"
    source.mkdir()
    for path in (GOLDEN / case).iterdir():
        if path.name != "golden.npz":
            shutil.copy(path, source)
    return source


def test_small_files_go_along_and_other_weights_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copy_of("llama-hub", tmp_path)
    along = {
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "tokenizer.model": b"\0\1",
        "chat_template.jinja": b"{{ 1 }}",
        "generation_config.json": b"{}",
        "LICENSE": b"text",
        "README.md": b"text",
        "modeling_own.py": b"pass",
    }
    for name, data in along.items():
        (source / name).write_bytes(data)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "extra.gguf", ".gitattributes", "x.incomplete"):
        (source / name).write_bytes(b"weights")
    (source / "original").mkdir()
    (source / "original" / "params.json").write_text("{}")
    with open(source / "large.dat", "wb") as file:
        file.truncate((1 << 28) + 1)
    (source / "linked.txt").symlink_to(source / "LICENSE")
    assert convert(source, tmp_path / "orbax", "--to", "orbax") == (0, str(tmp_path / "orbax"))
    assert convert(tmp_path / "orbax", tmp_path / "out") == (0, str(tmp_path / "out"))
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out" / "linked.txt").is_symlink()
    assert sorted(found) == sorted([*along, "linked.txt", "config.json", "model.safetensors"])
    assert {name: found[name] for name in along} == along
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'orbax'}\n{tmp_path / 'out'}\n"
    assert "not copied, as they are large: large.dat" in err


def test_tensors_that_the_network_does_not_need_are_named_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = copy_of("llama-hub", tmp_path)
    stored = tensors(source)
    more = {
        "lm_head.weight": stored["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
    }
    save_file(stored | more, source / "model.safetensors")
    assert convert(source, tmp_path / "out")[0] == 0
    assert_same(tensors(tmp_path / "out"), stored)
    err = capsys.readouterr().err
    assert all(name in err for name in more)


def test_a_link_to_nowhere_is_an_incomplete_download(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copy_of("llama-hub", tmp_path)
    (source / "tokenizer.json").symlink_to(tmp_path / "blob")
    assert convert(source, tmp_path / "out")[0] == 2
    assert "is a link to a file that is not there" in " ".join(capsys.readouterr().err.split())
    assert sorted(os.listdir(tmp_path)) == ["source"]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shard-size", "0"], "shard_size: 0 leaves no room"),
        (["--shard-size", "much"], "shard_size: 'much' is not a size"),
        (["--to", "orbax", "--shard-size", "1GB"], "shard_size: only plain .safetensors files have one"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = convert(GOLDEN / "llama-hub", tmp_path / "out", *options)[0]
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    assert (code, os.listdir(tmp_path)) == (2, [])
    assert said.split(":")[0].replace("_", "-") in (out + err).replace("_", "-")


def test_sources_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert convert(tmp_path / "nowhere", tmp_path / "out")[0] == 2
    assert convert(tmp_path / "empty", tmp_path / "out")[0] == 2
    err = capsys.readouterr().err
    assert "There is no folder" in err and "the folder is empty" in " ".join(err.split())
    assert os.listdir(tmp_path) == ["empty"]


def test_the_command_prints_the_folder_and_no_bar_to_a_pipe(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "novalm_jax.convert", str(GOLDEN / "llama-hub"), str(tmp_path / "out")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, f"{tmp_path / 'out'}\n")
    assert run.stderr.startswith(f"{tmp_path / 'out'}: 34 tensors in 1 file, ") and run.stderr.count("\n") == 1


def test_help_does_no_work() -> None:
    program = """
import sys
from novalm_jax.convert import main
try:
    main(["--help"])
except SystemExit as end:
    code = end.code
heavy = {"jax", "jaxlib", "flax", "orbax", "safetensors", "ml_dtypes", "numpy"}
print(code, sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.stderr == "0 []\n"
    for option in ("--to", "--dtype", "--shard-size", "--debug"):
        assert option in run.stdout


def test_ctrl_c_is_exit_code_130_and_the_work_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from novalm_jax.checkpoint import write

    right, calls = write._write_shard, []

    def interrupt(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        right(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(write, "_write_shard", interrupt)
        assert convert(GOLDEN / "mixtral", tmp_path / "out", "--shard-size", "30kB")[0] == 130
    assert os.listdir(tmp_path) == ["out.partial"]
    assert len(list((tmp_path / "out.partial").glob("*.safetensors"))) == 2
    assert convert(GOLDEN / "mixtral", tmp_path / "out", "--shard-size", "30kB")[0] == 0
    assert_same(tensors(tmp_path / "out"), tensors(GOLDEN / "mixtral"))


def test_a_part_for_the_text_model_says_its_dtype_too(tmp_path: Path) -> None:
    convert_checkpoint(GOLDEN / "llama4", tmp_path / "out", ConvertOptions(dtype="bfloat16"))
    before, after = (json.loads((path / "config.json").read_text()) for path in (GOLDEN / "llama4", tmp_path / "out"))
    said = {"torch_dtype": "bfloat16"}
    assert before["text_config"]["torch_dtype"] == before["torch_dtype"] == "float32"
    assert after == before | said | {"text_config": before["text_config"] | said}


def test_a_number_that_would_become_infinite_is_refused(tmp_path: Path) -> None:
    source = copy_of("mixtral", tmp_path)
    stored = tensors(source)
    stored["model.norm.weight"][3] = 3.4e38
    save_file(stored, source / "model.safetensors")
    convert_checkpoint(source, tmp_path / "orbax", ConvertOptions(to="orbax"))
    for folder in (source, tmp_path / "orbax"):
        with pytest.raises(CheckpointError, match="would become infinite"):
            convert_checkpoint(folder, tmp_path / "out", ConvertOptions(dtype="bfloat16"))
    assert sorted(os.listdir(tmp_path)) == ["orbax", "source"]


def test_a_source_that_changes_while_it_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "llama-hub", source)
    write = Plan.write

    def write_and_touch(self: Plan, *arguments: Any) -> None:
        write(self, *arguments)
        os.utime(source / "model.safetensors", (1, 1))

    monkeypatch.setattr(Plan, "write", write_and_touch)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        convert_checkpoint(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()
