"""The expert store: the same numbers, laid out so that a record is one read, and damage that is told from the rest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from novalm_jax.checkpoint.conversion import convert_checkpoint
from novalm_jax.checkpoint.dtypes import BFLOAT16
from novalm_jax.checkpoint.files import list_tensors
from novalm_jax.checkpoint.header import StoredTensor
from novalm_jax.checkpoint.load import Checkpoint, abstract_model, load_model
from novalm_jax.checkpoint.mapping import is_expert
from novalm_jax.convert import main
from novalm_jax.errors import CheckpointError
from novalm_jax.experts.records import Record, RecordReader, moe_layers, new_record, record_layout
from novalm_jax.models.params import parameters_of
from novalm_jax.options import ConvertOptions

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = ["qwen3_moe", "gpt_oss", "dbrx", "deepseek_v3", "mixtral-bf16", "granitemoe"]


def store_of(case: str, folder: Path, **options: Any) -> Path:
    return convert_checkpoint(GOLDEN / case, folder / case, ConvertOptions(to="store", **options)).folder


def parameters(folder: Path, dtype: str = "float32") -> dict[str, np.ndarray]:
    return {path: np.asarray(param.get_value()) for path, param in parameters_of(load_model(folder, dtype)).items()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(one[path].tobytes() == other[path].tobytes() for path in one)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_of("qwen3_moe", tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("case", CASES)
def test_a_store_holds_the_numbers_of_its_source_and_gives_them_back(case: str, tmp_path: Path) -> None:
    folder = store_of(case, tmp_path)
    assert same(parameters(folder), parameters(GOLDEN / case))
    back = convert_checkpoint(folder, tmp_path / "back").folder
    assert not (back / "store.json").exists()
    direct = convert_checkpoint(GOLDEN / case, tmp_path / "direct").folder
    assert (back / "model.safetensors").read_bytes() == (direct / "model.safetensors").read_bytes()


def test_the_safetensors_library_reads_it_and_records_are_aligned(store: Path) -> None:
    weights = parameters(GOLDEN / "qwen3_moe")
    files = sorted(store.glob("*.safetensors"))
    assert len(files) == 1 + len(moe_layers(Checkpoint.open(store).config))
    found = {name: array for file in files for name, array in load_file(file).items()}
    path = "layers.1.feed_forward.experts.down"
    for expert, row in enumerate(weights[path]):
        assert found[f"{path}.{expert}"].tobytes() == row.tobytes()
    assert all(not array.any() for name, array in found.items() if name.startswith("pad."))
    stored = list_tensors(store)
    firsts = {
        min(t.offset for n, t in stored.items() if n.startswith("layers.1.feed") and n.endswith(f".{e}"))
        for e in range(len(weights[path]))
    }
    assert all(offset % 4096 == 0 for offset in firsts) and len(firsts) == len(weights[path])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_record_is_one_read_from_a_store_and_the_same_from_its_source(
    case: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = parameters(GOLDEN / case, dtype)
    reads: list[int] = []
    preadv = os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        reads.append(offset)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    for folder in (store_of(case, tmp_path), GOLDEN / case):
        checkpoint = Checkpoint.open(folder)
        layout = record_layout(abstract_model(checkpoint.config, dtype))
        reader = RecordReader(checkpoint, np.dtype(np.float32) if dtype == "float32" else BFLOAT16)
        reads.clear()
        count = 0
        for layer, moe in moe_layers(checkpoint.config).items():
            for expert in range(moe.num_experts):
                out = new_record(layout)
                reader.read_into(Record(layer, expert), out)
                count += 1
                for name, array in out._asdict().items():
                    if array is not None:
                        stack = expected[f"layers.{layer}.feed_forward.experts.{name}"]
                        assert array.tobytes() == stack[expert].tobytes(), (folder, layer, expert, name)
        reader.close()
        of_experts = (each for each in checkpoint.weights.assignments if is_expert(each.path))
        assert reader.bytes_read == sum(each.nbytes for each in of_experts)
        # Files of the hub often have the matrices of an expert side by side, too.
        assert len(reads) == count if folder != GOLDEN / case else count <= len(reads) <= 6 * count


def test_a_store_can_be_rounded_on_the_way(tmp_path: Path) -> None:
    folder = store_of("qwen3_moe", tmp_path, dtype="bfloat16")
    assert same(parameters(folder, "bfloat16"), parameters(GOLDEN / "qwen3_moe", "bfloat16"))
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def damage(tensor: StoredTensor) -> None:
    """Changes one bit."""
    with tensor.file.open("r+b") as file:
        file.seek(tensor.offset + 5)
        (byte,) = file.read(1)
        file.seek(tensor.offset + 5)
        file.write(bytes([byte ^ 1]))


def test_a_byte_that_changed_is_found_by_the_record_it_is_in(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(store, folder)
    tensor = list_tensors(folder)["layers.1.feed_forward.experts.up.2"]
    damage(tensor)
    checkpoint = Checkpoint.open(folder)
    layout = record_layout(abstract_model(checkpoint.config))
    reader = RecordReader(checkpoint, np.dtype(np.float32))
    reader.read_into(Record(1, 1), new_record(layout))
    with pytest.raises(CheckpointError, match=rf"{tensor.file}: the record from byte \d+ .* its checksum differs"):
        reader.read_into(Record(1, 2), new_record(layout))
    rounding = RecordReader(checkpoint, BFLOAT16)
    with pytest.raises(CheckpointError, match="checksum differs"):
        rounding.read_into(Record(1, 2), new_record(record_layout(abstract_model(checkpoint.config, "bfloat16"))))


@pytest.mark.parametrize("array", ["gate", "up", "down"])
def test_a_byte_that_changed_is_found_when_all_is_loaded_and_before_it_is_converted(
    store: Path, tmp_path: Path, array: str
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(store, folder)
    damage(list_tensors(folder)[f"layers.1.feed_forward.experts.{array}.2"])
    says = rf"{folder}: expert 2 of layer 1 is not what was written; its checksum differs"
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(CheckpointError, match=says):
            load_model(folder, dtype)
    for form in ("safetensors", "store"):
        with pytest.raises(CheckpointError, match=says):
            convert_checkpoint(folder, tmp_path / "new", ConvertOptions(to=form))
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "change",
    [lambda sums: sums.clear(), lambda sums: sums["1"].pop(), lambda sums: sums.update({"99": [1]})],
    ids=["no checksums", "one too few", "of a layer that is not there"],
)
def test_checksums_of_another_model_are_refused(store: Path, tmp_path: Path, change: Callable[[Any], Any]) -> None:
    folder = tmp_path / "store"
    shutil.copytree(store, folder)
    content = json.loads((folder / "store.json").read_text())
    change(content["crc32"])
    (folder / "store.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"store.json is damaged: .*expert \d+ of layer \d+"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ('{"version": 2, "crc32": {}}', "version 2 is not known here; 1 is"),
        ('{"version": 1}', "is damaged: KeyError"),
        ('{"version": 1, "crc32": {"0": ["x"]}}', "is damaged: ValueError"),
        ('{"version": 1, "crc32": 5}', "is damaged: AttributeError"),
    ],
)
def test_a_damaged_store_is_refused(store: Path, tmp_path: Path, content: str, says: str) -> None:
    shutil.copytree(store, tmp_path / "store")
    (tmp_path / "store" / "store.json").write_text(content)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(tmp_path / "store")


def test_a_store_of_another_model_is_refused(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "store")
    config = json.loads((store / "config.json").read_text())
    wider = config | {"moe_intermediate_size": config["moe_intermediate_size"] + 2}
    (tmp_path / "store" / "config.json").write_text(json.dumps(wider))
    with pytest.raises(CheckpointError, match=r"this store does not fit its config.json: layers.*gate\.0 is \["):
        Checkpoint.open(tmp_path / "store")
    fewer = config | {"num_local_experts": config["num_local_experts"] - 1}
    (tmp_path / "store" / "config.json").write_text(json.dumps(fewer))
    with pytest.raises(CheckpointError, match="is not known"):
        Checkpoint.open(tmp_path / "store")


def test_the_command_makes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(GOLDEN / "mixtral"), str(tmp_path / "store"), "--to", "store"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'store'}\n"
    assert "an expert store, " in said.err
    assert json.loads((tmp_path / "store" / "store.json").read_text())["version"] == 1
