"""From a folder to a model: what must match, what may be left over, how weights are rounded, what memory it takes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from novalm_jax.checkpoint import load
from novalm_jax.checkpoint.dtypes import to_dtype
from novalm_jax.checkpoint.load import Checkpoint, load_model
from novalm_jax.errors import CheckpointError, OptionError
from novalm_jax.models.params import parameters_of

Tensors = dict[str, np.ndarray]
EXPERTS = 3
CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": EXPERTS,
}
MOE = "model.layers.{}.block_sparse_moe."


def names_and_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (24, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (24, 16),
    }
    for number in range(2):
        layer, moe = f"model.layers.{number}.", MOE.format(number)
        shapes |= {f"{layer}{name}_layernorm.weight": (16,) for name in ("input", "post_attention")}
        for name, shape in {"q": (16, 16), "k": (8, 16), "v": (8, 16), "o": (16, 16)}.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = shape
        shapes[f"{moe}gate.weight"] = (EXPERTS, 16)
        for e in range(EXPERTS):
            for name, shape in {"w1": (12, 16), "w3": (12, 16), "w2": (16, 12)}.items():
                shapes[f"{moe}experts.{e}.{name}.weight"] = shape
    return shapes


def draw(dtype: Any = np.float32) -> Tensors:
    """Random weights; some lie half way between two bfloat16 numbers, some are tiny."""
    random = np.random.default_rng(3)
    tensors = {}
    for name, shape in names_and_shapes().items():
        value = random.standard_normal(shape).astype(np.float32)
        value.reshape(-1)[:3] = [1 + 2**-8, 1 + 3 * 2**-8, 1e-7]
        tensors[name] = value.astype(dtype)
    return tensors


def packed(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """The same weights with all experts of a layer in two tensors."""
    result = {name: value for name, value in tensors.items() if ".experts." not in name}
    for number in range(2):
        moe = MOE.format(number)

        def stack(name: str, moe: str = moe) -> np.ndarray:
            return np.stack([tensors[f"{moe}experts.{e}.{name}.weight"] for e in range(EXPERTS)])

        result[f"model.layers.{number}.mlp.experts.gate_up_proj"] = np.concatenate([stack("w1"), stack("w3")], axis=1)
        result[f"model.layers.{number}.mlp.experts.down_proj"] = stack("w2")
    return result


def write(folder: Path, tensors: Mapping[str, np.ndarray], **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: Mapping[str, np.ndarray], count: int = 3) -> Path:
    """Tensors dealt out to shards in turn, so that the parts of a parameter lie in different files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def weights_of(folder: Path, dtype: str = "float32") -> Tensors:
    return {path: np.asarray(p.get_value()) for path, p in parameters_of(load_model(folder, dtype)).items()}


def assert_holds(found: Mapping[str, np.ndarray], tensors: Mapping[str, np.ndarray], dtype: str) -> None:
    """Every parameter has the bits of its tensors, rounded by `to_dtype`."""

    def rounded(name: str) -> np.ndarray:
        return to_dtype(tensors[name], np.dtype(jnp.dtype(dtype)))

    expected = {
        "embed.weight": rounded("model.embed_tokens.weight"),
        "norm.scale": rounded("model.norm.weight"),
        "head.weight": rounded("lm_head.weight"),
    }
    for number in range(2):
        ours, theirs, moe = f"layers.{number}.", f"model.layers.{number}.", MOE.format(number)
        expected[f"{ours}attention_norm.scale"] = rounded(f"{theirs}input_layernorm.weight")
        expected[f"{ours}feed_forward_norm.scale"] = rounded(f"{theirs}post_attention_layernorm.weight")
        for name, stored in {"q": "q", "k": "k", "v": "v", "out": "o"}.items():
            expected[f"{ours}attention.{name}.weight"] = rounded(f"{theirs}self_attn.{stored}_proj.weight")
        expected[f"{ours}feed_forward.router.weight"] = rounded(f"{moe}gate.weight")
        for name, stored in {"gate": "w1", "up": "w3", "down": "w2"}.items():
            stack = [rounded(f"{moe}experts.{e}.{stored}.weight") for e in range(EXPERTS)]
            expected[f"{ours}feed_forward.experts.{name}"] = np.stack(stack)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert (found[path].dtype, found[path].shape) == (value.dtype, value.shape), path
        assert found[path].tobytes() == value.tobytes(), path


def message(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


# --- weights arrive --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_weights_are_rounded_once_and_as_everywhere(tmp_path: Path, stored: Any, dtype: str) -> None:
    tensors = draw(stored)
    assert_holds(weights_of(write(tmp_path, tensors), dtype), tensors, dtype)


def test_files_may_mix_dtypes(tmp_path: Path) -> None:
    kinds = (np.float16, ml_dtypes.bfloat16, np.float32)
    tensors = {name: value.astype(kinds[i % 3]) for i, (name, value) in enumerate(draw().items())}
    assert_holds(weights_of(write(tmp_path, tensors), "bfloat16"), tensors, "bfloat16")


@pytest.mark.parametrize("stored", [np.float16, np.float32])
def test_packed_experts_are_cut_at_the_right_bytes(tmp_path: Path, stored: Any) -> None:
    tensors = draw(stored)
    assert_holds(weights_of(write(tmp_path, packed(tensors))), tensors, "float32")


def test_layouts_may_differ_from_layer_to_layer(tmp_path: Path) -> None:
    tensors = draw()
    mixed = {name: value for name, value in tensors.items() if ".layers.1." not in name or ".experts." not in name}
    mixed |= {name: value for name, value in packed(tensors).items() if ".layers.1.mlp" in name}
    assert_holds(weights_of(write(tmp_path, mixed)), tensors, "float32")


@pytest.mark.parametrize("layout", [dict, packed])
def test_shards(tmp_path: Path, layout: Callable[..., Tensors]) -> None:
    tensors = draw()
    assert_holds(weights_of(write_shards(tmp_path, layout(tensors))), tensors, "float32")


@pytest.mark.parametrize("place", ["a folder with spaces", "模型 é", "dots.in.name"])
def test_odd_folder_names(tmp_path: Path, place: str) -> None:
    tensors = draw()
    assert_holds(weights_of(write(tmp_path / place, tensors)), tensors, "float32")


def test_links_as_a_download_cache_makes_them(tmp_path: Path) -> None:
    tensors = draw()
    blobs, snapshot = write_shards(tmp_path / "blobs", tensors), tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(blobs.iterdir())):
        (snapshot / file.name).symlink_to(os.path.relpath(file.rename(blobs / f"{i:040x}"), snapshot))
    linked = tmp_path / "linked"
    linked.symlink_to(snapshot)
    assert_holds(weights_of(linked), tensors, "float32")


def test_a_read_only_folder_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    tensors = draw()
    folder = write(tmp_path / "model", tensors)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    for path in (*folder.iterdir(), folder):
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert_holds(weights_of(folder), tensors, "float32")
        assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    finally:
        folder.chmod(0o755)


def test_a_path_may_be_a_string(tmp_path: Path) -> None:
    assert Checkpoint.open(str(write(tmp_path, draw()))).folder == tmp_path


@pytest.mark.parametrize("folder", [5, "", b"model", ["model"]])
def test_what_is_no_path_is_refused(folder: Any) -> None:
    with pytest.raises(CheckpointError, match="Give the folder of a downloaded checkpoint"):
        load_model(folder)


def test_keys_that_config_json_holds_twice_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, draw()) / "config.json"
    path.write_text(
        path.read_text()[:-1] + ', "vocab_size": 24, "rope_parameters": {"rope_theta": 1, "rope_theta": 1}}'
    )
    assert f"{path}: gives twice: rope_theta, vocab_size" in message(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "bf16", "int8", ""])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(OptionError, match="is not one of float32, bfloat16"):
        load_model(tmp_path, dtype)


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_everything_that_does_not_fit_comes_in_one_message(tmp_path: Path) -> None:
    tensors = draw()
    moe = MOE.format(0)
    del tensors["model.norm.weight"], tensors[f"{MOE.format(1)}experts.2.w3.weight"]
    tensors["model.layers.2.input_layernorm.weight"] = np.zeros(16, np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((16, 8), np.float32)
    tensors["lm_head.weight"] = np.zeros((24, 16), np.int8)
    tensors |= {name: value for name, value in packed(draw()).items() if "layers.0.mlp.experts.gate_up" in name}
    text = message(write(tmp_path, tensors))
    assert str(tmp_path) in text
    assert "2 missing: " in text and f"{MOE.format(1)}experts.2.w3.weight" in text and "model.norm.weight" in text
    assert "1 not known to this family: model.layers.2.input_layernorm.weight" in text
    assert "model.layers.0.self_attn.k_proj.weight is [16, 8], not [8, 16]" in text
    assert "lm_head.weight is I8" in text and "F32, BF16, F16 are" in text
    assert "2 stored in two layouts at once" in text
    for doubled in (
        f"{moe}experts.0.w1.weight",
        f"{moe}experts.0.w3.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
    ):
        assert doubled in text


@pytest.mark.parametrize("name", ["lm_head.weight", f"{MOE.format(0)}experts.0.w1.weight"])
def test_a_renamed_tensor_is_missing_and_unexpected(tmp_path: Path, name: str) -> None:
    tensors = draw()
    tensors["model.surprise.weight"] = tensors.pop(name)
    text = message(write(tmp_path, tensors))
    assert f"1 missing: {name}" in text and "1 not known to this family: model.surprise.weight" in text


@pytest.mark.parametrize(
    ("name", "kind"),
    [("I64", np.int64), ("U8", np.uint8), ("BOOL", np.bool_), ("F64", np.float64)],
)
def test_other_stored_dtypes_are_refused(tmp_path: Path, name: str, kind: Any) -> None:
    tensors = draw()
    gate = f"{MOE.format(1)}gate.weight"
    tensors[gate] = tensors[gate].astype(kind)
    assert f"{gate} is {name}" in message(write(tmp_path, tensors))


def test_transposed_packed_experts_are_refused(tmp_path: Path) -> None:
    tensors = packed(draw())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    assert f"{name} is [3, 16, 24], not [3, 24, 16]" in message(write(tmp_path, tensors))


def test_too_many_experts_are_refused(tmp_path: Path) -> None:
    assert f"{MOE.format(0)}experts.2.w1.weight" in message(write(tmp_path, draw(), num_local_experts=2))


def test_a_tied_head_is_read_only_where_it_is_not_tied(tmp_path: Path) -> None:
    tensors = draw()
    checkpoint = Checkpoint.open(write(tmp_path, tensors, tie_word_embeddings=True))
    assert checkpoint.weights.ignored == ("lm_head.weight",)
    assert load_model(tmp_path).head is None
    del tensors["lm_head.weight"]
    assert Checkpoint.open(write(tmp_path, tensors, tie_word_embeddings=True)).weights.ignored == ()
    assert "1 missing: lm_head.weight" in message(write(tmp_path, tensors))


def test_stored_frequencies_are_not_needed(tmp_path: Path) -> None:
    tensors = draw()
    needless = [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(2)] + ["model.rotary_emb.inv_freq"]
    extra = {name: np.ones(2, np.float32) for name in needless}
    folder = write(tmp_path, tensors | extra)
    assert sorted(Checkpoint.open(folder).weights.ignored) == sorted(needless)
    assert_holds(weights_of(folder), tensors, "float32")


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    tensors = draw()
    folder = write_shards(tmp_path, tensors)
    save_file({"tok_embeddings.weight": np.ones((2, 2), np.float32)}, folder / "consolidated.safetensors")
    assert Checkpoint.open(folder).weights.ignored == ()
    assert_holds(weights_of(folder), tensors, "float32")


# --- announcements ---------------------------------------------------------------------------------------------------


def test_the_disk_is_told_of_every_byte_once_and_never_far_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = draw()
    folder = write_shards(tmp_path, tensors)
    events: list[tuple[str, int, int]] = []
    right = os.preadv
    monkeypatch.setattr(load, "_AHEAD", 1000)
    monkeypatch.setattr(load, "_ANNOUNCED", 100)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, _: events.append(("told", start, size)))

    def read(file: int, buffers: list[memoryview], start: int) -> int:
        events.append(("read", start, len(buffers[0])))
        return right(file, buffers, start)

    checkpoint = Checkpoint.open(folder)
    monkeypatch.setattr(os, "preadv", read)
    checkpoint.load("float32", lambda _, buffer: jnp.asarray(buffer))
    told, seen = ([size for kind, _, size in events if kind == name] for name in ("told", "read"))
    assert sum(told) == sum(seen) == checkpoint.weights.nbytes and max(told) == 100
    ahead = np.cumsum([size if kind == "told" else -size for kind, _, size in events])
    assert ahead[9] == 1000 and max(ahead) < 1000 + 100


def test_a_file_system_that_takes_no_advice_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(22, "Invalid argument")

    tensors = draw()
    folder = write(tmp_path, tensors)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert_holds(weights_of(folder), tensors, "float32")
    monkeypatch.delattr(os, "posix_fadvise")
    assert_holds(weights_of(folder), tensors, "float32")


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["missing shard", "short shard", "missing tensor", "bad config"])
def test_faults_are_found_before_memory_is_taken(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw()
    if fault == "missing tensor":
        del tensors["model.norm.weight"]
    folder = write_shards(tmp_path, tensors)
    shard = folder / "model-00002-of-00003.safetensors"
    if fault == "missing shard":
        shard.unlink()
    elif fault == "short shard":
        shard.write_bytes(shard.read_bytes()[:-4])
    elif fault == "bad config":
        (folder / "config.json").write_text("{")

    def touched(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(load, "TensorReader", touched)
    monkeypatch.setattr(load, "read_parameter", touched)
    part = {"missing tensor": "model.norm.weight", "bad config": "config.json"}.get(fault, shard.name)
    with pytest.raises(CheckpointError, match=part):
        load_model(folder)


def test_the_guard_above_would_notice_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(load, "TensorReader", touched)
    with pytest.raises(AssertionError, match="weights were read"):
        load_model(write(tmp_path, draw()))


BIG = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 8}
CHILD = """
import re, sys
from novalm_jax.checkpoint.load import load_model
from novalm_jax.models.params import parameters_of

def memory(field):
    # Not getrusage: its peak begins with that of the process that started this one.
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

load_model(sys.argv[2])
before = memory("VmRSS")
model = load_model(sys.argv[1])
sizes = [param.get_value().nbytes for param in parameters_of(model).values()]
print(memory("VmHWM") - before, sum(sizes), max(sizes))
"""


def test_loading_takes_the_final_size_and_one_tensor(tmp_path: Path) -> None:
    """Peak memory of a process that loads a model of 120 MB, from bfloat16 experts one by one to float32."""
    d, f, e = BIG["hidden_size"], BIG["intermediate_size"], BIG["num_local_experts"]
    larger = {(24, 16): (4096, d), (16,): (d,), (16, 16): (d, d), (8, 16): (d // 2, d), (EXPERTS, 16): (e, d)}
    experts = {"w1": (f, d), "w3": (f, d), "w2": (d, f)}
    tensors = {n: np.ones(larger[s]) for n, s in names_and_shapes().items() if ".experts." not in n}
    for number in range(2):
        for name, shape in experts.items():
            prefix = f"{MOE.format(number)}experts."
            tensors |= {f"{prefix}{i}.{name}.weight": np.full(shape, i + 1.0) for i in range(e)}
    folder = write(tmp_path / "big", {n: x.astype(ml_dtypes.bfloat16) for n, x in tensors.items()}, **BIG)
    small = write(tmp_path / "small", draw(ml_dtypes.bfloat16))
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(small)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    growth, final, largest = map(int, run.stdout.split())
    assert final > 120e6 and largest < final / 4
    assert 0.9 * final < growth < final + largest + 0.15 * final
