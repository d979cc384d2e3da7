"""Known faults of systems like this one: how a model and its files are read.

Each `check_*` names a fault that users of other systems have met, and exercises the product where it would show. Each
entry of `FAULTS` puts such a fault into the product, and the check must see it: a deviation in numbers by more than
ten times what the check allows. Text and sampling are in test_known_faults_text.py, the running engine in
test_known_faults_engine.py.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from safetensors.numpy import load_file, save_file

from fault_checks import Check, Fault, Patch, checks_of, name_of, near, refused, see
from novalm_jax import LLM, SamplingParams, load_model
from novalm_jax.checkpoint import load, mapping
from novalm_jax.checkpoint.header import read_header
from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.config import AttentionConfig, LayerConfig, MoEConfig, RouterConfig
from novalm_jax.errors import CheckpointError
from novalm_jax.models import moe, rope
from novalm_jax.models.families import family as family_table
from novalm_jax.models.families import find_family
from novalm_jax.models.families import traits as traits_table
from novalm_jax.models.families.family import Packed
from novalm_jax.models.families.traits import Traits
from novalm_jax.models.params import parameters_of
from novalm_jax.models.router import Routing, choose
from tiny_checkpoints import tiny_checkpoint, write_json

GOLDEN = Path(__file__).parent / "golden"


def whole(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Logits of the trainable module."""
    return np.asarray(jax.jit(lambda m, t: m(t))(load_model(folder), jnp.asarray(ids)))


def near_golden(case: str, folder: Path | None = None) -> None:
    """Fails unless the module has the logits of a golden case, loaded from another folder where one is given."""
    with np.load(GOLDEN / case / "golden.npz") as file:
        near(whole(folder or GOLDEN / case, file["input_ids"]), file["logits"], f"logits of {case}")


# --- the router ------------------------------------------------------------------------------------------------------


def check_router_weights(_: Path) -> None:
    """Text begins sensibly and wanders off: the weights of the chosen experts come from a softmax over them alone, or
    are raw logits, although the checkpoint does not renormalise."""
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]])
    shared = RouterConfig(renormalise=True)
    near(moe.choose(logits, RouterConfig(), 2).weights, [[0.6439, 0.2369]], "weights of two of four")
    near(moe.choose(logits, shared, 2).weights, [[0.7311, 0.2689]], "weights that add up to 1")


def check_unnormalised_models(_: Path) -> None:
    """The same, in the logits of whole models of both families that do so."""
    near_golden("olmoe")
    near_golden("qwen2_moe")


def check_unnormalised_decoding(_: Path) -> None:
    """The same, in what the engine generates."""
    with np.load(GOLDEN / "olmoe/golden.npz") as file, LLM(GOLDEN / "olmoe", dtype="float32", max_batch=2) as llm:
        ids = file["input_ids"][0].tolist()
        near(llm.logits(ids, decode_from=11), file["logits"][0], "logits of the engine")
        (out,) = llm.generate(ids, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        assert out.token_ids == file["greedy"][0].tolist()


def softmax_over_the_chosen(patch: Patch) -> None:
    def chosen(logits: jax.Array, router: RouterConfig, k: int, bias: jax.Array | None = None) -> Routing:
        return choose(logits, replace(router, choose_first=True), k, bias)

    patch.setattr(moe, "choose", chosen)


def raw_logits_for_weights(patch: Patch) -> None:
    def chosen(logits: jax.Array, router: RouterConfig, k: int, bias: jax.Array | None = None) -> Routing:
        top, ids = lax.top_k(logits, k)
        return Routing(ids, top)

    patch.setattr(moe, "choose", chosen)


# --- which layers are sparse -----------------------------------------------------------------------------------------

FOUR_LAYERS: Mapping[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 128, "intermediate_size": 24, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    **{"num_experts": 4, "shared_expert_intermediate_size": 0},
}


def layers_of(stored: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    return find_family(stored).read_config(stored).layers


def check_sparse_layers(_: Path) -> None:
    """A model of experts runs as a dense one, or the reverse: which layers hold experts is guessed, counted from 0, or
    the number of experts is not looked at."""
    for family in ("qwen2_moe", "qwen3_moe"):
        for fields, expected in (
            ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
            ({"decoder_sparse_step": 3}, [2]),
            ({"mlp_only_layers": [0, 2]}, [1, 3]),
            ({"num_experts": 0}, []),
        ):
            layers = layers_of({"model_type": family, **FOUR_LAYERS, **fields})
            sparse = [i for i, layer in enumerate(layers) if isinstance(layer.feed_forward, MoEConfig)]
            assert sparse == expected, f"sparse layers of {family} with {fields}"


def check_models_with_dense_layers(_: Path) -> None:
    """The same, in checkpoints whose layers differ: a wrong guess lacks tensors or computes something else."""
    near_golden("qwen2_moe-sparse")
    near_golden("qwen3_moe-sparse")


def by_rule(name: str, rule: Callable[[Traits, int], bool]) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        patch.setattr(traits_table, "sparse_layers", lambda traits: [rule(traits, i) for i in range(traits.num_layers)])

    apply.__name__ = name
    return apply


every_layer = by_rule("every_layer", lambda traits, i: traits.num_experts > 0)
no_layer = by_rule("no_layer", lambda traits, i: False)
step_not_read = by_rule("step_not_read", lambda traits, i: traits.num_experts > 0 and i not in named_dense(traits))
names_not_read = by_rule("names_not_read", lambda traits, i: traits.num_experts > 0 and on_step(traits, i + 1))
counted_from_0 = by_rule(
    "counted_from_0",
    lambda traits, i: traits.num_experts > 0 and on_step(traits, i) and i not in named_dense(traits),
)


def named_dense(traits: Traits) -> tuple[int, ...]:
    return traits.dense_layers or ()


def on_step(traits: Traits, number: int) -> bool:
    return number % traits.sparse_step == 0


# --- rotary embedding of long contexts -------------------------------------------------------------------------------


DENSE_LAYERS = {name: value for name, value in FOUR_LAYERS.items() if "expert" not in name and name[:4] != "moe_"}


def check_llama3_frequencies(_: Path) -> None:
    """Short prompts are fine and long ones garbled: the scaling of frequencies is read and not applied, or read under
    one of its two spellings only."""
    entries = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    entries["original_max_position_embeddings"] = 8192
    for spelling in ("rope_type", "type"):
        fields = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {spelling: "llama3", **entries}}
        attention = layers_of({**DENSE_LAYERS, **fields})[0].attention
        assert isinstance(attention, AttentionConfig) and attention.rope is not None
        ratio = 5e5 ** (-np.arange(0, 64, 2) / 64) / rope.static_frequencies(attention.rope, 64)
        near(ratio[:15], 1, f"high frequencies ({spelling})")
        near(ratio[18:], 32, f"low frequencies ({spelling})")
        assert np.all((ratio[15:18] > 1.01) & (ratio[15:18] < 31.9)), "those between are blended"


def check_scaled_model(folder: Path) -> None:
    """The same, in the logits of a whole model, written in either dialect."""
    near_golden("llama")
    fields = json.loads((GOLDEN / "llama/config.json").read_text())
    scaling = fields.pop("rope_parameters")
    fields["rope_theta"] = scaling.pop("rope_theta")
    fields["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    write_json(folder / "config.json", fields)
    shutil.copy(GOLDEN / "llama/model.safetensors", folder)
    near_golden("llama", folder)


def scaling_not_applied(patch: Patch) -> None:
    patch.setattr(rope, "_llama3", lambda _, plain: plain)


def old_spelling_not_read(patch: Patch) -> None:
    right = family_table.read_rope

    def read(stored: Mapping[str, Any], *theta: float, **more: int) -> Any:
        unread = "type" in (stored.get("rope_scaling") or {})
        return right({**stored, "rope_scaling": None} if unread else stored, *theta, **more)

    patch.setattr(family_table, "read_rope", read)


# --- files of a checkpoint -------------------------------------------------------------------------------------------


def in_shards(folder: Path) -> Path:
    """A checkpoint in three files with an index."""
    tensors = load_file(tiny_checkpoint(folder) / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": files})
    return folder


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return {path: np.asarray(p.get_value()) for path, p in parameters_of(load_model(folder)).items()}


def assert_same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], what: str) -> None:
    assert found.keys() == expected.keys()
    assert [path for path in found if found[path].tobytes() != expected[path].tobytes()] == [], what


def check_missing_shard(folder: Path) -> None:
    """A checkpoint of which a file is missing loads, with zeros or noise for what was in it."""
    missing = in_shards(folder) / "model-00002-of-00003.safetensors"
    missing.unlink()
    refused(lambda: Checkpoint.open(folder), CheckpointError, re.escape(missing.name))


def check_stray_files(folder: Path) -> None:
    """A file that the index does not name is merged into the model, or counted in its size."""
    expected, size = weights_of(in_shards(folder)), Checkpoint.open(folder).weights.nbytes
    tiny_checkpoint(folder / "older", seed=1)
    for name in ("consolidated.safetensors", "model.safetensors"):
        shutil.copy(folder / "older/model.safetensors", folder / name)
    assert_same(weights_of(folder), expected, "weights beside stray files")
    assert Checkpoint.open(folder).weights.nbytes == size, "size beside stray files"


def files_by_pattern(patch: Patch) -> None:
    """All that is in the folder, whatever the index says; of two tensors of a name the last one counts."""

    def found(folder: Path) -> Any:
        return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in read_header(path).items()}

    patch.setattr(load, "list_tensors", found)
    not_strict(patch)


def not_strict(patch: Patch) -> None:
    """Tensors that are missing or unknown are nobody's business."""
    patch.setattr(mapping._Problems, "raise_if_any", lambda *_: None)


def size_of_the_folder(patch: Patch) -> None:
    def size(weights: mapping.WeightMap) -> int:
        folder = weights.assignments[0].pieces[0].tensor.file.parent
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    patch.setattr(mapping.WeightMap, "nbytes", property(size))


# --- layouts of experts ----------------------------------------------------------------------------------------------


def check_layouts_of_experts(_: Path) -> None:
    """Experts hold noise after the checkpoint was saved anew: their tensors go by several names, or are packed, and
    what is unknown is skipped or cut at the wrong place."""
    expected = weights_of(GOLDEN / "qwen3_moe")
    for case in ("qwen3_moe-packed", "qwen3_moe-w123"):
        assert_same(weights_of(GOLDEN / case), expected, f"weights of {case}")


def check_renamed_expert(folder: Path) -> None:
    """The same, where a name is one that nobody knows."""
    path = tiny_checkpoint(folder, "qwen3_moe") / "model.safetensors"
    tensors = load_file(path)
    name, other = (f"model.layers.1.mlp.experts.2.{last}.weight" for last in ("up_proj", "upper_proj"))
    tensors[other] = tensors.pop(name)
    save_file(tensors, path)
    refused(lambda: Checkpoint.open(folder), CheckpointError, f"missing: {name}.*not known.*: {other}")


def packed_parts_swapped(patch: Patch) -> None:
    right = mapping._wanted

    def wanted(source: Any, shape: Any, shapes: Any) -> Any:
        swapped = isinstance(source, Packed) and source.parts == 2
        return right(replace(source, part=1 - source.part) if swapped else source, shape, shapes)

    patch.setattr(mapping, "_wanted", wanted)


# --- every fault is seen ---------------------------------------------------------------------------------------------

FAULTS = [
    Fault(check_router_weights, softmax_over_the_chosen, "weights of two of four"),
    Fault(check_router_weights, raw_logits_for_weights, "weights of two of four"),
    Fault(check_unnormalised_models, softmax_over_the_chosen, "logits of olmoe"),
    Fault(check_unnormalised_models, raw_logits_for_weights, "logits of olmoe"),
    Fault(check_unnormalised_decoding, softmax_over_the_chosen, "logits of the engine"),
    Fault(check_sparse_layers, every_layer, "sparse layers of qwen2_moe with .*step': 2"),
    Fault(check_sparse_layers, no_layer, "sparse layers of qwen2_moe with .*step': 2"),
    Fault(check_sparse_layers, step_not_read, "sparse layers of qwen2_moe with .*step': 2"),
    Fault(check_sparse_layers, names_not_read, "sparse layers of qwen2_moe with .*step': 2"),
    Fault(check_sparse_layers, counted_from_0, "sparse layers of qwen2_moe with .*step': 2"),
    Fault(check_models_with_dense_layers, every_layer, "do not match config.json.*missing"),
    Fault(check_models_with_dense_layers, counted_from_0, "do not match config.json.*missing"),
    Fault(check_llama3_frequencies, scaling_not_applied, "low frequencies"),
    Fault(check_llama3_frequencies, old_spelling_not_read, r"low frequencies \(type\)"),
    Fault(check_scaled_model, scaling_not_applied, "logits of llama"),
    Fault(check_scaled_model, old_spelling_not_read, "logits of llama"),
    Fault(check_missing_shard, files_by_pattern, "not refused"),
    Fault(check_stray_files, files_by_pattern, "weights beside stray files"),
    Fault(check_stray_files, size_of_the_folder, "size beside stray files"),
    Fault(check_layouts_of_experts, packed_parts_swapped, "weights of qwen3_moe-packed"),
    Fault(check_renamed_expert, not_strict, "not refused"),
]


@pytest.mark.parametrize("check", checks_of(FAULTS), ids=name_of)
def test_the_product_is_free_of_the_fault(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_the_fault_would_be_seen(fault: Fault, tmp_path: Path, monkeypatch: Patch) -> None:
    see(fault, tmp_path, monkeypatch)
