"""Which bytes are which parameter, both ways, for every family: nothing left out, nothing twice, nothing guessed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from novalm_jax.checkpoint.files import list_tensors
from novalm_jax.checkpoint.header import StoredTensor
from novalm_jax.checkpoint.load import abstract_model
from novalm_jax.checkpoint.mapping import Shape, TensorOut, map_weights, written_tensors
from novalm_jax.errors import CheckpointError
from novalm_jax.models.families import find_family
from novalm_jax.models.families.family import Family
from novalm_jax.models.params import parameters_of

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(config.parent.name for config in GOLDEN.glob("*/config.json"))
OTHER_LAYOUTS = ("-packed", "-w123")
"""Endings of cases whose files are not in the published form."""


def read(case: str, **fields: Any) -> tuple[Family, dict[str, Shape], dict[str, Any]]:
    raw = json.loads((GOLDEN / case / "config.json").read_text()) | fields
    family = find_family(raw)
    parameters = parameters_of(abstract_model(family.read_config(raw)))
    return family, {path: param.shape for path, param in parameters.items()}, raw


def as_stored(tensors: list[TensorOut], dtype: str = "F32") -> dict[str, StoredTensor]:
    return {out.name: one(out.name, out.shape, dtype) for out in tensors}


def one(name: str, shape: Shape, dtype: str = "F32") -> StoredTensor:
    return StoredTensor(name, Path("model/model.safetensors"), dtype, shape, 8, int(np.prod(shape)) * 4)


def refusal(family: Family, shapes: dict[str, Shape], stored: dict[str, StoredTensor], extra: int = 0) -> str:
    with pytest.raises(CheckpointError) as caught:
        map_weights(family, shapes, stored, extra)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_covers_every_element_once(case: str) -> None:
    family, shapes, _ = read(case)
    written = written_tensors(family, shapes)
    assert len({out.name for out in written}) == len(written)
    pieces: Counter[tuple[str, int | None]] = Counter()
    for out in written:
        at = 0
        for part in out.parts:
            assert part.start == at, out.name
            at += int(np.prod(part.shape))
            pieces[part.path, part.row] += 1
            assert part.shape == (shapes[part.path] if part.row is None else shapes[part.path][1:])
        assert at == np.prod(out.shape), out.name
    rows = {path: {row for name, row in pieces if name == path} for path in shapes}
    assert set(pieces.values()) == {1} and {path for path, _ in pieces} == shapes.keys()
    assert all(found == {None} or found == set(range(shapes[path][0])) for path, found in rows.items())


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_read_as_it_was(case: str) -> None:
    family, shapes, _ = read(case)
    written = written_tensors(family, shapes)
    weights = map_weights(family, shapes, as_stored(written, "BF16"))
    assert weights.ignored == ()
    assert {assignment.path: assignment.shape for assignment in weights.assignments} == shapes
    found = {
        (piece.tensor.name, piece.start // 2): (assignment.path, piece.row, piece.shape)
        for assignment in weights.assignments
        for piece in assignment.pieces
    }
    expected = {(out.name, part.start): (part.path, part.row, part.shape) for out in written for part in out.parts}
    assert found == expected


@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith(OTHER_LAYOUTS)])
def test_what_is_written_is_the_published_form(case: str) -> None:
    family, shapes, raw = read(case)
    stored = {tensor.name: tensor for tensor in list_tensors(GOLDEN / case).values()}
    needless = map_weights(family, shapes, stored, family.count_extra_layers(raw)).ignored
    published = {name: tensor.shape for name, tensor in stored.items() if name not in needless}
    assert {out.name: out.shape for out in written_tensors(family, shapes)} == published


@pytest.mark.parametrize("case", ["dbrx", "ernie4_5_moe", "gpt_oss", "deepseek_v3", "llama4"])
def test_every_wrong_shape_is_reported(case: str) -> None:
    """Also one that has the right number of elements: experts that lie the other way round, or joined otherwise."""
    family, shapes, _ = read(case)
    stored = as_stored(written_tensors(family, shapes))
    flat = {name: one(name, (int(np.prod(tensor.shape)), 1, 1)) for name, tensor in stored.items()}
    text = refusal(family, shapes, flat)
    assert f"{len(stored)} of another shape" in text
    for name in stored:
        wrong = stored | {name: flat[name]}
        assert f"1 of another shape than config.json asks for: {name} is " in refusal(family, shapes, wrong)


@pytest.mark.parametrize(
    ("case", "name", "path"),
    [
        ("dbrx", "transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight", "layers.0.attention.k.weight"),
        ("dbrx", "transformer.blocks.1.ffn.experts.mlp.w2", "layers.1.feed_forward.experts.down"),
    ],
)
def test_bytes_of_fused_and_flat_tensors(case: str, name: str, path: str) -> None:
    """By hand: keys lie behind all queries, and expert e behind the e before it."""
    family, shapes, _ = read(case)
    weights = map_weights(family, shapes, as_stored(written_tensors(family, shapes), "BF16"))
    (pieces,) = (assignment.pieces for assignment in weights.assignments if assignment.path == path)
    assert [piece.tensor.name for piece in pieces] == [name]
    if "Wqkv" in name:
        queries, keys = shapes["layers.0.attention.q.weight"], shapes[path]
        assert pieces[0].start == queries[0] * queries[1] * 2 and pieces[0].shape == keys
        assert pieces[0].tensor.shape == (queries[0] + 2 * keys[0], keys[1])
    else:
        e, f, d = shapes[path]
        assert (pieces[0].start, pieces[0].shape, pieces[0].tensor.shape) == (0, (e, f, d), (e * f, d))


def test_packed_and_one_by_one_may_mix_but_not_for_one_parameter() -> None:
    family, shapes, _ = read("mixtral")
    stored = as_stored(written_tensors(family, shapes))
    e, f, d = shapes["layers.0.feed_forward.experts.gate"]
    single = "model.layers.0.block_sparse_moe.experts."
    packed = one("model.layers.0.mlp.experts.gate_up_proj", (e, 2 * f, d))
    both = {name: tensor for name, tensor in stored.items() if not name.startswith(single) or "w2" in name}
    weights = map_weights(family, shapes, both | {packed.name: packed})
    up = next(a for a in weights.assignments if a.path == "layers.0.feed_forward.experts.up")
    assert [piece.start for piece in up.pieces] == [4 * f * d * (2 * expert + 1) for expert in range(e)]
    down = next(a for a in weights.assignments if a.path == "layers.0.feed_forward.experts.down")
    assert [piece.tensor.name for piece in down.pieces] == [f"{single}{expert}.w2.weight" for expert in range(e)]
    assert "stored in two layouts at once" in refusal(family, shapes, stored | {packed.name: packed})


# --- layers after the last one ---------------------------------------------------------------------------------------


def with_layers(count: int, extra: int) -> tuple[Family, dict[str, Shape], dict[str, StoredTensor], int]:
    """DeepSeek-V3 with `count` layers, the files of one with `extra` more, and how many of these it announces."""
    fields = {"num_hidden_layers": count, "num_nextn_predict_layers": extra}
    family, shapes, raw = read("deepseek_v3", **fields)
    _, more, _ = read("deepseek_v3", num_hidden_layers=count + extra, num_nextn_predict_layers=0)
    marks = [one(f"model.layers.{count + i}.eh_proj.weight", (5, 10)) for i in range(extra)]
    stored = as_stored(written_tensors(family, more)) | {mark.name: mark for mark in marks}
    return family, shapes, stored, family.count_extra_layers(raw)


def test_announced_layers_for_more_tokens_are_ignored() -> None:
    family, shapes, stored, extra = with_layers(3, 2)
    own = one("model.layers.3.shared_head.head.weight", (5, 5))
    weights = map_weights(family, shapes, stored | {own.name: own}, extra)
    assert extra == 2
    assert set(weights.ignored) == {
        n for n in [*stored, own.name] if n.startswith(("model.layers.3.", "model.layers.4."))
    }


def test_a_layer_that_predicts_no_further_token_is_not_passed_over() -> None:
    family, shapes, stored, extra = with_layers(3, 1)
    del stored["model.layers.3.eh_proj.weight"]
    assert "model.layers.3.input_layernorm.weight" in refusal(family, shapes, stored, extra)


def test_layers_that_nobody_announced_are_refused() -> None:
    family, shapes, stored, _ = with_layers(3, 2)
    text = refusal(family, shapes, stored, 1)
    assert "model.layers.4." in text and "model.layers.3." not in text
    assert "model.layers.3." in refusal(family, shapes, stored, 0)
    for name in ("model.layers.30.input_layernorm.weight", "model.layers.03.input_layernorm.weight"):
        assert name in refusal(family, shapes, stored | {name: one(name, (5,))}, 2)


def test_a_model_of_62_layers_keeps_layer_61() -> None:
    family, shapes, stored, extra = with_layers(62, 1)
    weights = map_weights(family, shapes, stored, extra)
    assert {name.split(".")[2] for name in weights.ignored} == {"62"}
    assert any(assignment.path.startswith("layers.61.") for assignment in weights.assignments)
    stray = one("model.layers.61.shared_head.head.weight", (5, 5))
    assert stray.name in refusal(family, shapes, stored | {stray.name: stray}, extra)
    short = {name: tensor for name, tensor in stored.items() if not name.startswith("model.layers.61.")}
    assert "model.layers.61.input_layernorm.weight" in refusal(family, shapes, short, extra)
