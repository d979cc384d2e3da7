"""Which files of a folder make a checkpoint, with and without an index, and what is wrong with those that make none."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoint_helpers import read, refusal, save, sharded, weights, write_index
from novalm_jax.checkpoint.files import INDEX, SINGLE, list_tensors


def assert_holds(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    listed = list_tensors(folder)
    assert listed.keys() == tensors.keys()
    for name, value in tensors.items():
        assert listed[name].name == name
        assert read(listed[name]).tobytes() == value.tobytes()
        assert listed[name].shape == value.shape


# Which files make a checkpoint


def test_a_single_file(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 5), np.float32),
        "matrix": np.arange(6, dtype=np.float16).reshape(2, 3),
        "flags": np.array([True, False]),
        **weights("bf16"),
    }
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    assert_holds(tmp_path, tensors)
    listed = list_tensors(tmp_path)["bf16"]
    assert (listed.dtype, listed.nbytes, listed.file) == ("BF16", 24, tmp_path / SINGLE)


def test_shards_with_an_index(tmp_path: Path) -> None:
    assert_holds(tmp_path, sharded(tmp_path))


def test_strays_beside_an_index_are_not_looked_at(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    save(tmp_path / "consolidated.safetensors", weights("layer.0", "other"))
    save(tmp_path / SINGLE, weights("layer.0"))
    (tmp_path / "model-00004-of-00004.safetensors").write_bytes(b"damaged")
    assert_holds(tmp_path, tensors)


def test_other_names_beside_a_single_file_are_not_looked_at(tmp_path: Path) -> None:
    save(tmp_path / SINGLE, weights("w"))
    save(tmp_path / "consolidated.safetensors", weights("w", "v"))
    (tmp_path / "adapter-00001-of-00002.safetensors").write_bytes(b"damaged")
    assert_holds(tmp_path, weights("w"))


def test_one_file_under_another_name(tmp_path: Path) -> None:
    save(tmp_path / "weights.safetensors", weights("w"))
    (tmp_path / "._weights.safetensors").write_bytes(b"what macOS leaves")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    assert_holds(tmp_path, weights("w"))


def test_shards_without_an_index(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    assert_holds(tmp_path, tensors)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "1 of 3 files missing: model-00002-of-00003.safetensors." in refusal(tmp_path)


def test_shards_without_an_index_that_hold_a_tensor_twice(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00002.safetensors", weights("w"))
    save(tmp_path / "model-00002-of-00002.safetensors", weights("w"))
    text = refusal(tmp_path)
    assert "stored twice: w in model-00001-of-00002.safetensors and model-00002-of-00002.safetensors" in text


def test_a_shard_number_outside_its_set(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00001.safetensors", weights("w"))
    save(tmp_path / "model-00002-of-00001.safetensors", weights("v"))
    assert "numbered 1 to 1, but there is 00002" in refusal(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("a.safetensors", "b.safetensors"),
        ("model-00001-of-00001.safetensors", SINGLE),
        ("model-00001-of-00001.safetensors", "model-00001-of-00002.safetensors"),
    ],
)
def test_files_that_could_be_two_checkpoints(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        save(tmp_path / name, weights("w"))
    text = refusal(tmp_path)
    assert "not clear" in text and all(name in text for name in names)


def test_hub_cache_of_links_with_spaces_and_unicode(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--größe -- 模型" / "snapshots" / "0a1b"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    tensors = sharded(snapshot)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / f"blob{number}")
        file.symlink_to(f"../../blobs/blob{number}")
    assert_holds(snapshot, tensors)

    (blobs / "blob1").rename(blobs / "blob1.incomplete")
    text = refusal(snapshot)
    assert "model-00002-of-00003.safetensors: is a link to a file that is not there: the download is incomplete" in text
    assert "unfinished download left blob1.incomplete" in text
    assert "under snapshots/" in refusal(blobs.parent)


def test_nothing_is_written(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    tmp_path.chmod(0o555)
    try:
        assert_holds(tmp_path, tensors)
    finally:
        tmp_path.chmod(0o755)
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before


# Folders that hold no checkpoint


def test_no_such_folder(tmp_path: Path) -> None:
    assert f"There is no folder {tmp_path / 'gone'}" in refusal(tmp_path / "gone")


def test_a_file_in_place_of_its_folder(tmp_path: Path) -> None:
    save(tmp_path / SINGLE, weights("w"))
    text = refusal(tmp_path / SINGLE)
    assert "is not a folder" in text and text.endswith(f": {tmp_path}.")


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "the folder is empty" in refusal(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "holds no .safetensors file, only config.json" in refusal(tmp_path)


def test_a_folder_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    assert f"{tmp_path}: may not be read by this user" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name, advice",
    [
        ("pytorch_model.bin", "from_pretrained"),
        ("consolidated.00.pth", "from_pretrained"),
        ("model-q4_k_m.gguf", "original checkpoint"),
        ("weights.npz", "original checkpoint"),
    ],
)
def test_other_formats_are_named_with_a_way_out(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / name).write_bytes(b"weights")
    text = refusal(tmp_path)
    assert name in text and "not read" in text and advice in text


def test_an_unfinished_download_is_named(tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (cache / "abc.incomplete").write_bytes(b"")
    (tmp_path / "model.safetensors.incomplete").write_bytes(b"")
    assert "left abc.incomplete, model.safetensors.incomplete: run the download again" in refusal(tmp_path)


def test_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    save(tmp_path / SINGLE, {})
    assert "hold no tensors" in refusal(tmp_path)


# Index and shards


def test_missing_shards_are_all_listed(tmp_path: Path) -> None:
    sharded(tmp_path, 12)
    gone = [f"model-{i:05}-of-00012.safetensors" for i in (2, 5, 6, 7, 8, 9, 10, 11, 12)]
    for name in gone:
        (tmp_path / name).unlink()
    assert f"9 of 12 files missing: {', '.join(gone)}. Download" in refusal(tmp_path)


def test_every_problem_is_in_one_error(tmp_path: Path) -> None:
    sharded(tmp_path, 5)
    (tmp_path / "model-00001-of-00005.safetensors").unlink()
    (tmp_path / "model-00002-of-00005.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with open(tmp_path / "model-00003-of-00005.safetensors", "ab") as file:
        file.write(b"more")
    save(tmp_path / "model-00004-of-00005.safetensors", weights("renamed"))
    text = refusal(tmp_path)
    assert text.startswith(f"5 problems with the checkpoint in {tmp_path}:\n- ")
    for words in (
        "1 of 5 files missing: model-00001-of-00005.safetensors",
        "model-00002-of-00005.safetensors: is a Git LFS pointer",
        "model-00003-of-00005.safetensors: is longer",
        "names tensors that their file lacks: layer.3 in model-00004-of-00005.safetensors",
        "does not name tensors that its files hold: renamed in model-00004-of-00005.safetensors",
    ):
        assert text.count(words) == 1


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "is not JSON"),
        ("[]", "holds a JSON list"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": ["w"]}', "no weight_map"),
        ('{"weight_map": {"layer.0": "a", "layer.0": "b"}}', "names twice: layer.0"),
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("<html></html>", "web page"),
    ],
)
def test_a_damaged_index(tmp_path: Path, content: str, words: str) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(content)
    text = refusal(tmp_path)
    assert f"{tmp_path / INDEX}: " in text and words in text


@pytest.mark.parametrize("shard", ["../w.safetensors", "/etc/passwd", "a/../../w", "..\\w", "", ".", "a\0b", 7, None])
def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path, shard: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save(tmp_path / "w.safetensors", weights("w"))
    write_index(folder, {"w": shard})
    text = refusal(folder)
    assert f"{folder / INDEX}: refused, because it leads out of the folder or names no file" in text


def test_shards_in_a_folder_below(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    save(tmp_path / "parts" / "a.safetensors", weights("w", "v"))
    write_index(tmp_path, {"w": "parts/a.safetensors", "v": "./parts/a.safetensors"})
    assert_holds(tmp_path, weights("w", "v"))


def test_a_tensor_in_two_shards_of_an_index(tmp_path: Path) -> None:
    sharded(tmp_path, 2)
    save(tmp_path / "model-00002-of-00002.safetensors", weights("layer.0", "layer.1"))
    assert "layer.0 in model-00001-of-00002.safetensors and model-00002-of-00002.safetensors" in refusal(tmp_path)


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    sharded(tmp_path, 2)
    write_index(
        tmp_path, {"layer.0": "model-00002-of-00002.safetensors", "layer.1": "model-00001-of-00002.safetensors"}
    )
    text = refusal(tmp_path)
    assert "lacks: layer.0 in model-00002-of-00002.safetensors, layer.1 in model-00001-of-00002.safetensors" in text


def test_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    sharded(tmp_path, 2)
    save(tmp_path / "model-00001-of-00002.safetensors", weights("layer.0", "extra"))
    assert "does not name tensors that its files hold: extra in model-00001" in refusal(tmp_path)
