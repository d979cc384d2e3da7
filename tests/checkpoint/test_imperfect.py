"""Checkpoints that are nearly right: what loads, what is skipped and said, and what is refused in words that help.

Files that are damaged are in test_headers.py, folders with the wrong files in test_folders.py, single tensors that do
not fit in test_load.py.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from novalm_jax.checkpoint import load
from novalm_jax.checkpoint.files import INDEX, SINGLE
from novalm_jax.checkpoint.load import Checkpoint, load_model
from novalm_jax.errors import CheckpointError
from novalm_jax.models.families import qwen3_moe
from novalm_jax.models.families.family import Ignore
from novalm_jax.models.params import parameters_of
from tiny_checkpoints import tiny_checkpoint

Tensors = dict[str, np.ndarray]
EXPERTS = "model.layers.{}.mlp.experts"
PARTS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A qwen3_moe of two layers with four experts, each a tensor."""
    return tiny_checkpoint(tmp_path / "model", "qwen3_moe")


def rewrite(folder: Path, tensors: Mapping[str, np.ndarray] | None = None, **fields: Any) -> Path:
    """Other tensors or other fields of config.json in a folder."""
    if tensors is not None:
        save_file(dict(tensors), folder / SINGLE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / SINGLE)


def weights_of(folder: Path, dtype: str = "float32") -> Tensors:
    return {path: np.asarray(p.get_value()) for path, p in parameters_of(load_model(folder, dtype)).items()}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert [path for path in found if found[path].tobytes() != expected[path].tobytes()] == []


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def renumbered(tensors: Tensors, old: int, new: int) -> Tensors:
    """The tensors of one layer under another number."""
    prefix = f"model.layers.{old}."
    return {n.replace(prefix, f"model.layers.{new}."): x for n, x in tensors.items() if n.startswith(prefix)}


def packed(tensors: Tensors, layer: int) -> Tensors:
    """The same weights with the experts of one layer in two tensors."""
    prefix = EXPERTS.format(layer)

    def stack(part: str) -> np.ndarray:
        return np.stack([tensors[f"{prefix}.{e}.{part}.weight"] for e in range(4)])

    rest = {name: value for name, value in tensors.items() if not name.startswith(prefix)}
    gate_up = np.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
    return rest | {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": stack("down_proj")}


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """qwen3_moe with the field that announces layers for multi-token prediction, as DeepSeek-V3 and GLM-4.5 have it."""
    fields = {**qwen3_moe.FAMILY.fields, "num_nextn_predict_layers": Ignore()}
    family = replace(qwen3_moe.FAMILY, fields=fields, extra_layers="num_nextn_predict_layers")
    monkeypatch.setattr(qwen3_moe, "FAMILY", family)


def with_extra_layer(tensors: Tensors, number: int = 2) -> Tensors:
    """With a layer for multi-token prediction: a layer as all others, and what joins it to them."""
    own = {"eh_proj.weight": (32, 64), "enorm.weight": (32,), "shared_head.head.weight": (8, 32)}
    extra = renumbered(tensors, 1, number)
    return tensors | extra | {f"model.layers.{number}.{n}": np.ones(s, np.float32) for n, s in own.items()}


@pytest.mark.usefixtures("announced")
def test_a_layer_for_further_tokens_is_skipped_and_listed(model: Path) -> None:
    tensors = tensors_of(model)
    expected, size = weights_of(model), Checkpoint.open(model).weights.nbytes
    rewrite(model, with_extra_layer(tensors), num_nextn_predict_layers=1)
    checkpoint = Checkpoint.open(model)
    assert sorted(checkpoint.weights.ignored) == sorted(with_extra_layer(tensors).keys() - tensors.keys())
    assert checkpoint.weights.nbytes == size and len(checkpoint.config.layers) == 2
    assert_same(weights_of(model), expected)


@pytest.mark.usefixtures("announced")
@pytest.mark.parametrize("count", [0, None, "1", True, -1, 1.0])
def test_only_layers_that_are_announced_are_skipped(model: Path, count: Any) -> None:
    rewrite(model, with_extra_layer(tensors_of(model)), num_nextn_predict_layers=count)
    assert "not known to this family: model.layers.2." in refusal(model)


@pytest.mark.usefixtures("announced")
def test_layers_beyond_the_announced_ones_are_refused(model: Path) -> None:
    tensors = with_extra_layer(tensors_of(model))
    names = ("input_layernorm.weight", "eh_proj.weight")
    beyond = {f"model.layers.3.{name}": np.ones(32, np.float32) for name in names}
    rewrite(model, tensors | beyond, num_nextn_predict_layers=1)
    assert "2 not known to this family: model.layers.3.eh_proj.weight, model.layers.3.input" in refusal(model)
    rewrite(model, num_nextn_predict_layers=2)
    assert "model.layers.3.input_layernorm.weight" in Checkpoint.open(model).weights.ignored
    # No list of all the names that there could be is made.
    rewrite(model, num_nextn_predict_layers=2**62)
    assert "model.layers.3.input_layernorm.weight" in Checkpoint.open(model).weights.ignored


@pytest.mark.usefixtures("announced")
def test_numbers_that_only_begin_like_the_extra_ones_are_not_skipped(tmp_path: Path) -> None:
    """Layer 61 of a model of 62 is a layer, and layers 10 and 20 do not belong to 1 and 2."""
    small = {
        "hidden_size": 4,
        "head_dim": 2,
        "moe_intermediate_size": 2,
        "num_experts": 2,
        "num_nextn_predict_layers": 1,
    }
    folder = tiny_checkpoint(tmp_path / "deep", "qwen3_moe", num_hidden_layers=62, **small)
    checkpoint = Checkpoint.open(folder)
    last = {a.path for a in checkpoint.weights.assignments if a.path.startswith("layers.61.")}
    assert len(checkpoint.config.layers) == 62 and len(last) == 12 and not checkpoint.weights.ignored
    folder = tiny_checkpoint(tmp_path / "short", "qwen3_moe", num_nextn_predict_layers=1)
    tensors = tensors_of(folder)
    rewrite(folder, tensors | renumbered(tensors, 1, 20))
    assert "not known to this family: model.layers.20." in refusal(folder)


def test_layer_numbers_with_a_gap_are_refused(model: Path) -> None:
    tensors = tensors_of(model)
    gap = {name: value for name, value in tensors.items() if ".layers.1." not in name} | renumbered(tensors, 1, 2)
    text = refusal(rewrite(model, gap))
    assert "missing: model.layers.1." in text and "not known to this family: model.layers.2." in text


def test_more_layers_than_there_can_be_are_refused_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "abstract_model", lambda *_: pytest.fail("a model of 10000 layers was made"))
    text = refusal(rewrite(model, num_hidden_layers=10_000))
    assert (
        f"{model}: config.json asks for 10000 layers, and the files hold only {len(tensors_of(model))} tensors" in text
    )


# --- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["each", "packed"])
@pytest.mark.parametrize("asked", [2, 8])
def test_another_number_of_experts_than_the_files_hold(model: Path, stored: str, asked: int) -> None:
    if stored == "packed":
        rewrite(model, packed(packed(tensors_of(model), 0), 1))
    text = refusal(rewrite(model, num_experts=asked))
    assert f"model.layers.0.mlp.gate.weight is [4, 32], not [{asked}, 32]" in text
    if stored == "packed":
        assert f"{EXPERTS.format(0)}.gate_up_proj is [4, 32, 32], not [{asked}, 32, 32]" in text
    elif asked == 8:
        assert f"24 missing: {EXPERTS.format(0)}.4.down_proj.weight, " in text
    else:
        assert f"12 not known to this family: {EXPERTS.format(0)}.2.down_proj.weight, " in text


def test_more_experts_than_there_can_be_are_refused_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "map_weights", lambda *_: pytest.fail("a list of 100000 experts was made"))
    size = sum(value.nbytes for value in tensors_of(model).values())
    text = refusal(rewrite(model, num_experts=100_000))
    assert "config.json asks for 3" in text and f"the files hold only {size} bytes of them" in text


def test_one_layer_packed_and_one_not(model: Path) -> None:
    tensors, expected = tensors_of(model), weights_of(model)
    for layer in range(2):
        assert_same(weights_of(rewrite(model, packed(tensors, layer))), expected)


def test_both_layouts_in_one_layer_are_refused(model: Path) -> None:
    tensors = tensors_of(model)
    text = refusal(rewrite(model, tensors | packed(tensors, 1)))
    experts = EXPERTS.format(1)
    assert "3 stored in two layouts at once: layers.1.feed_forward.experts.down, as " in text
    assert f"as {experts}.0.down_proj.weight and as {experts}.down_proj, " in text
    # Half of one and half of the other.
    half = packed(tensors, 1) | {
        f"{EXPERTS.format(1)}.0.up_proj.weight": tensors[f"{EXPERTS.format(1)}.0.up_proj.weight"]
    }
    assert "stored in two layouts at once: layers.1.feed_forward.experts.up" in refusal(rewrite(model, half))


def test_saved_anew_under_the_names_w1_w3_and_w2(model: Path) -> None:
    tensors, expected = tensors_of(model), weights_of(model)
    new = dict(zip(PARTS, ("w1", "w3", "w2"), strict=True))

    def renamed(name: str, only: str = "") -> str:
        for old, other in new.items():
            name = name.replace(old, other) if ".experts." in name and only in name else name
        return name

    assert_same(weights_of(rewrite(model, {renamed(name): value for name, value in tensors.items()})), expected)
    # Some experts under new names and some under old ones: what is meant cannot be known.
    mixed = {renamed(name, ".experts.2."): value for name, value in tensors.items()}
    assert f"experts.gate, as {EXPERTS.format(0)}.0.gate_proj.weight and as {EXPERTS.format(0)}.2.w1.weight" in refusal(
        rewrite(model, mixed)
    )


def test_an_expert_with_the_wrong_half_swapped_in(model: Path) -> None:
    """Down in place of gate: the same number of elements, in another shape."""
    tensors = tensors_of(model)
    gate, down = (f"{EXPERTS.format(0)}.1.{part}.weight" for part in ("gate_proj", "down_proj"))
    tensors[gate], tensors[down] = tensors[down], tensors[gate]
    text = refusal(rewrite(model, tensors))
    assert f"{gate} is [32, 16], not [16, 32]" in text and f"{down} is [16, 32], not [32, 16]" in text


# --- shards ----------------------------------------------------------------------------------------------------------


def in_shards(folder: Path, tensors: Tensors, names: Mapping[str, str]) -> Path:
    """Tensors in the files that `names` gives for them, with an index."""
    (folder / SINGLE).unlink(missing_ok=True)
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(names)}))
    return folder


def test_files_under_any_names_and_in_folders_below(model: Path) -> None:
    tensors, expected = tensors_of(model), weights_of(model)
    (model / "experts").mkdir()
    names = {n: f"experts/{n[13]}.safetensors" if ".experts." in n else "dense.safetensors" for n in tensors}
    in_shards(model, tensors, names)
    save_file({"w": np.ones(3, np.float32)}, model / "experts" / "stray.safetensors")
    save_file({"w": np.ones(3, np.float32)}, model / SINGLE)
    assert_same(weights_of(model), expected)


def test_an_index_that_gives_one_file_two_names(model: Path) -> None:
    """Each tensor is there once, though the file seems to be read twice."""
    tensors, expected = tensors_of(model), weights_of(model)
    names = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    in_shards(model, tensors, names)
    for name in list(names)[::2]:
        names[name] = "./model-00001-of-00001.safetensors"
    (model / INDEX).write_text(json.dumps({"weight_map": names}))
    assert_same(weights_of(model), expected)
    (model / "second.safetensors").symlink_to("model-00001-of-00001.safetensors")
    for name in list(names)[::2]:
        names[name] = "second.safetensors"
    (model / INDEX).write_text(json.dumps({"weight_map": names}))
    assert "stored twice: " in refusal(model)


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_of_float16_are_all_held(model: Path) -> None:
    tensors = {name: value.astype(np.float16) for name, value in tensors_of(model).items()}
    tensors["model.norm.weight"][:3] = [65504, -65504, 2.0**-24]
    rewrite(model, tensors)
    for dtype, largest in (("float32", 65504), ("bfloat16", 65536)):
        found = weights_of(model, dtype)["norm.scale"].astype(np.float32)
        assert found[:3].tolist() == [largest, -largest, 2.0**-24]


def test_a_number_that_rounding_would_make_infinite_is_refused(model: Path) -> None:
    tensors = tensors_of(model)
    name = f"{EXPERTS.format(1)}.3.up_proj.weight"
    tensors[name][5, 7] = -3.4e38
    rewrite(model, tensors)
    assert weights_of(model)["layers.1.feed_forward.experts.up"][3, 5, 7] == np.float32(-3.4e38)
    with pytest.raises(CheckpointError) as caught:
        load_model(model, "bfloat16")
    text = str(caught.value)
    assert f"{model / SINGLE}: tensor {name} holds numbers that bfloat16 cannot" in text and "Use dtype float32" in text
    tensors[name][5, 7] = 3.38e38
    rewrite(model, tensors)
    assert np.isfinite(weights_of(model, "bfloat16")["layers.1.feed_forward.experts.up"].astype(np.float32)).all()


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_stored_infinities_and_nans_are_what_they_are(model: Path, kind: Any) -> None:
    tensors = {name: value.astype(kind) for name, value in tensors_of(model).items()}
    tensors["model.norm.weight"][:3] = np.array([np.inf, -np.inf, np.nan], kind)
    rewrite(model, tensors)
    for dtype in ("float32", "bfloat16"):
        found = weights_of(model, dtype)["norm.scale"].astype(np.float32)
        assert found[:2].tolist() == [np.inf, -np.inf] and np.isnan(found[2])


@pytest.mark.parametrize("part", [1, 200, 1000])
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_parameters_that_are_read_in_parts_are_whole(
    model: Path, kind: Any, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: value.astype(kind) for name, value in tensors_of(model).items()}
    each = weights_of(rewrite(model, tensors), "bfloat16")
    joint = rewrite(model, packed(tensors, 0))
    monkeypatch.setattr(load, "_PART", part)
    assert_same(weights_of(joint, "bfloat16"), each)
