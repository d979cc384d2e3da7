"""Which files make a checkpoint, every way in which they can be broken, and reads of their bytes."""

import json
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from novalm_jax.checkpoint import files
from novalm_jax.checkpoint.dtypes import numpy_dtype
from novalm_jax.checkpoint.files import INDEX, SINGLE, TensorReader, list_tensors
from novalm_jax.checkpoint.header import StoredTensor, read_json
from novalm_jax.errors import CheckpointError


def weights(*names: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(len(names))
    return {name: random.standard_normal((3, 4)).astype(ml_dtypes.bfloat16) for name in names}


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    save_file(dict(tensors), path)


def by_hand(path: Path, header: Any, data: bytes = bytes(8)) -> None:
    """A file with a header that the library would not write; text and bytes are written as they are."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def entry(dtype: Any = "U8", shape: Any = (8,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def sharded(folder: Path, count: int = 3) -> dict[str, np.ndarray]:
    """A checkpoint of one tensor per shard, with its index."""
    tensors = weights(*(f"layer.{i}" for i in range(count)))
    weight_map = {}
    for i, (name, value) in enumerate(tensors.items(), 1):
        weight_map[name] = f"model-{i:05}-of-{count:05}.safetensors"
        save(folder / weight_map[name], {name: value})
    # The total is wrong on purpose, as it is in many real files.
    write_index(folder, weight_map)
    return tensors


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 17}, "weight_map": weight_map}))


def read(tensor: StoredTensor) -> np.ndarray:
    out = np.zeros(tensor.nbytes, np.uint8)
    with TensorReader() as reader:
        reader.read_into(tensor, out)
    return out.view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)


def assert_holds(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    listed = list_tensors(folder)
    assert listed.keys() == tensors.keys()
    for name, value in tensors.items():
        assert listed[name].name == name
        assert read(listed[name]).tobytes() == value.tobytes()
        assert listed[name].shape == value.shape


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        list_tensors(folder)
    return str(caught.value)


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


# Files that are not what their name says


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is empty (0 bytes)"),
        (b"abc", "its header alone takes 8 bytes, the file has 3"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        (b"<!DOCTYPE html>\n<html><body>404</body></html>", "web page"),
        (b'\n <?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "web page"),
        (struct.pack("<Q", 100_000_001) + b"{}", "100000001 bytes"),
        (b"PK\x03\x04" + bytes(range(200, 240)), "not a safetensors file"),
        (
            struct.pack("<Q", 500) + b'{"w":',
            "is truncated or damaged: its header alone takes 508 bytes, the file has 13",
        ),
        (struct.pack("<Q", 7) + b'{"w": 1', "not JSON"),
        (struct.pack("<Q", 4) + b'"\xff\xfe"', "not JSON"),
        (struct.pack("<Q", 40_000) + b"[" * 40_000, "nested too deeply"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    text = refusal(tmp_path)
    assert text.startswith(f"{tmp_path / SINGLE}: ") and words in text


def test_truncated_and_too_long_files_tell_both_sizes(tmp_path: Path) -> None:
    file = tmp_path / SINGLE
    save(file, weights("w"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert f"its header says {len(whole)} bytes, the file has {len(whole) - 1}" in refusal(tmp_path)
    file.write_bytes(whole + b"\0")
    assert f"longer than its header says: {len(whole)} bytes by the header, the file has {len(whole) + 1}" in refusal(
        tmp_path
    )


def test_a_folder_and_a_pipe_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).mkdir()
    assert "is not a file" in refusal(tmp_path)
    (tmp_path / SINGLE).rmdir()
    os.mkfifo(tmp_path / SINGLE)
    assert "is not a file" in refusal(tmp_path)


def test_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    (tmp_path / SINGLE).symlink_to(SINGLE)
    assert "cannot be read: Too many levels of symbolic links" in refusal(tmp_path)


# Headers


def json_entry(**changes: Any) -> str:
    return json.dumps(entry(**changes))


@pytest.mark.parametrize(
    "header, words",
    [
        (f'{{"w": {json_entry()}, "w": {json_entry()}}}', "named twice: w"),
        ({"w": entry(), "v": entry()}, "overlap with the tensor before them: "),
        ({"w": entry(shape=(5,), offsets=(0, 5)), "v": entry(shape=(4,), offsets=(4, 8))}, "before them: v"),
        ({"w": entry(shape=(3,), offsets=(0, 3)), "v": entry(shape=(4,), offsets=(4, 8))}, "no tensor lie before v"),
        ({"w": entry(shape=(7,), offsets=(1, 8))}, "no tensor lie before w"),
        ({"w": entry(), "v": entry(offsets=(8, 16))}, "is truncated"),
        ({"w": entry(offsets=(8, 0))}, "do not fit the number of bytes: w"),
        ({"w": entry(offsets=(-8, 0))}, "whole numbers from 0"),
        ({"w": entry(offsets=(0, 8, 8))}, "whole numbers from 0"),
        ({"w": entry(offsets=(0, 8.0))}, "whole numbers from 0"),
        ({"w": entry(offsets=(0, 10**30))}, "whole numbers from 0"),
        ({"w": entry(shape=(-2, -4))}, "whole numbers from 0"),
        ({"w": entry(shape=(True, 8))}, "whole numbers from 0"),
        ({"w": entry(shape=8)}, "whole numbers from 0"),
        ({"w": entry(shape=(9,))}, "do not fit the number of bytes: w"),
        ({"w": entry(dtype="F32")}, "do not fit the number of bytes: w"),
        ({"w": entry(dtype="F4", shape=(15,))}, "do not fit the number of bytes: w"),
        ({"w": entry(shape=(2**62, 4))}, "impossible shape: w"),
        ({"w": entry(shape=(0, 2**62, 4), offsets=(0, 0))}, "impossible shape: w"),
        ({"w": entry(shape=[1] * 64 + [8])}, "impossible shape: w"),
        ({"w": entry(dtype="F33"), "v": entry(dtype="F33")}, "unknown dtype F33: w, v"),
        ({"w": entry(dtype=["U8"])}, "no entry of dtype"),
        ({"w": [8]}, "no entry of dtype"),
        ({"__metadata__": {"step": 3}, "w": entry()}, "not a table of texts: __metadata__"),
        ({"__metadata__": "text", "w": entry()}, "not a table of texts: __metadata__"),
        ({"w\n\x1b[31m": entry(shape=(9,))}, r"w\n\x1b[31m"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: Any, words: str) -> None:
    by_hand(tmp_path / SINGLE, header)
    text = refusal(tmp_path)
    assert text.startswith(f"{tmp_path / SINGLE}: ") and words in text


def test_all_faults_of_a_header_in_one_error(tmp_path: Path) -> None:
    by_hand(tmp_path / SINGLE, {"w": entry(dtype="F33"), "v": entry(shape=(9,)), "__metadata__": 1})
    text = refusal(tmp_path)
    assert "unknown dtype F33: w" in text and "bytes: v" in text and "__metadata__" in text


def test_long_lists_of_names_are_cut(tmp_path: Path) -> None:
    by_hand(tmp_path / SINGLE, {f"w{i}": entry(dtype="F33") for i in range(1000)})
    text = refusal(tmp_path)
    assert "w7 and 992 more" in text and len(text) < 1000


def test_types_without_arrays_are_listed_all_the_same(tmp_path: Path) -> None:
    by_hand(tmp_path / SINGLE, {"w": entry(dtype="F8_E4M3"), "v": entry("F4", (2, 8), (8, 16))}, bytes(16))
    assert [(t.dtype, t.nbytes) for t in list_tensors(tmp_path).values()] == [("F8_E4M3", 8), ("F4", 8)]


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


# JSON files


def test_read_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"limits": [0.0, Infinity], "name": "gr\xc3\xb6\xc3\x9fe"}')
    assert read_json(path) == {"limits": [0.0, float("inf")], "name": "größe"}
    for content, words in [(b"", "is not JSON"), (b"[1]", "holds a JSON list"), (b"{'a': 1}", "is not JSON")]:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            read_json(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: is missing"):
        read_json(path)


# Reads


def one_tensor(folder: Path, data: bytes) -> StoredTensor:
    by_hand(folder / SINGLE, {"before": entry(), "w": entry("U8", (len(data),), (8, 8 + len(data)))}, bytes(8) + data)
    return list_tensors(folder)["w"]


def test_reads_a_part_of_a_tensor_and_counts_bytes(tmp_path: Path) -> None:
    data = bytes(range(100))
    tensor = one_tensor(tmp_path, data)
    with TensorReader() as reader:
        out = np.zeros(120, np.uint8)
        reader.read_into(tensor, out[7:37], start=40)
        assert out.tobytes() == bytes(7) + data[40:70] + bytes(83)
        words = np.zeros((5, 5), np.uint32)
        reader.read_into(tensor, words)
        assert words.tobytes() == data
        reader.read_into(tensor, memoryview(bytearray(0)), start=100)
        reader.read_into(tensor, np.zeros((0, 3), np.uint8))
        assert reader.bytes_read == 130


def test_refuses_buffers_and_ranges_that_do_not_fit(tmp_path: Path) -> None:
    tensor = one_tensor(tmp_path, bytes(100))
    with TensorReader() as reader:
        cases: list[tuple[np.ndarray | memoryview, int, str]] = [
            (np.zeros(101, np.uint8), 0, "not inside w, which has 100 bytes"),
            (np.zeros(10, np.uint8), 91, "bytes 91 to 101 are not inside"),
            (np.zeros(10, np.uint8), -1, "not inside"),
            (np.zeros(20, np.uint8)[::2], 0, "contiguous"),
            (memoryview(bytes(10)), 0, "writable"),
        ]
        for out, start, words in cases:
            with pytest.raises(ValueError, match=words):
                reader.read_into(tensor, out, start)
        assert reader.bytes_read == 0


def test_goes_on_after_partial_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).bytes(1000)
    tensor = one_tensor(tmp_path, data)
    sizes = []

    def short(file: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        return real(file, [buffers[0][:17]], offset)

    real = os.preadv
    monkeypatch.setattr(os, "preadv", short)
    monkeypatch.setattr(files, "_MAX_READ", 300)
    out = np.zeros(1000, np.uint8)
    with TensorReader() as reader:
        reader.read_into(tensor, out)
        assert reader.bytes_read == 1000
    assert out.tobytes() == data
    assert max(sizes) == 300 and len(sizes) == 59


def test_a_tensor_beyond_4_gib_in_a_sparse_file(tmp_path: Path) -> None:
    far = 5 * 2**30
    header = json.dumps({"hole": entry("U8", (far,), (0, far)), "w": entry("U8", (4,), (far, far + 4))}).encode()
    with open(tmp_path / SINGLE, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(8 + len(header) + far)
        file.write(b"\1\2\3\4")
    assert read(list_tensors(tmp_path)["w"]).tolist() == [1, 2, 3, 4]


def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    tensor = one_tensor(tmp_path, bytes(100))
    out = np.zeros(100, np.uint8)
    with TensorReader() as reader:
        reader.read_into(tensor, out)
        os.truncate(tensor.file, tensor.offset + 60)
        with pytest.raises(CheckpointError) as caught:
            reader.read_into(tensor, out)
        assert reader.bytes_read == 160
    text = str(caught.value)
    assert str(tensor.file) in text and "tensor w" in text
    assert f"byte {tensor.offset + 60} of the file (60 of 100 of the tensor)" in text


def test_an_error_of_the_disk_names_file_tensor_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = one_tensor(tmp_path, bytes(100))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with TensorReader() as reader, pytest.raises(CheckpointError) as caught:
        reader.read_into(tensor, np.zeros(10, np.uint8), start=3)
    text = str(caught.value)
    assert f"{tensor.file}: reading tensor w stopped at byte {tensor.offset + 3}" in text
    assert "Input/output error" in text


def test_a_file_that_went_away_and_a_closed_reader(tmp_path: Path) -> None:
    tensor = one_tensor(tmp_path, bytes(100))
    tensor.file.unlink()
    reader = TensorReader()
    with pytest.raises(CheckpointError, match="is missing"):
        reader.read_into(tensor, np.zeros(10, np.uint8))
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read_into(tensor, np.zeros(10, np.uint8))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / SINGLE, weights("w"))

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    assert f"{tmp_path / SINGLE}: may not be read by this user" in refusal(tmp_path)


def test_threads_share_a_reader_and_close_leaves_no_descriptor(tmp_path: Path) -> None:
    tensors = sharded(tmp_path, 4)
    listed = list_tensors(tmp_path)
    reader = TensorReader()
    wrong: list[str] = []

    def work() -> None:
        for _ in range(50):
            for name, value in tensors.items():
                out = np.zeros(24, np.uint8)
                reader.read_into(listed[name], out)
                if out.tobytes() != value.tobytes():
                    wrong.append(name)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert reader.bytes_read == 8 * 50 * 4 * 24
    descriptors = list(reader._open_files.values())
    assert len(descriptors) == 4
    reader.close()
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_close_waits_for_reads_that_are_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = one_tensor(tmp_path, bytes(range(100)))
    reader = TensorReader()
    reading, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    out = np.zeros(100, np.uint8)
    real = os.preadv

    def slow(file: int, buffers: list[memoryview], offset: int) -> int:
        reading.set()
        assert go_on.wait(60)
        assert not closed.is_set()
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)

    def close() -> None:
        reader.close()
        closed.set()

    read_thread = threading.Thread(target=lambda: reader.read_into(tensor, out))
    close_thread = threading.Thread(target=close)
    read_thread.start()
    assert reading.wait(60)
    close_thread.start()
    while not reader._closed:
        closed.wait(0.001)
    go_on.set()
    read_thread.join()
    close_thread.join()
    assert out.tobytes() == bytes(range(100)) and closed.is_set()


# Random damage


def damaged(random: np.random.Generator, whole: bytes) -> bytes:
    """A small file with a few bytes of its header changed, or its end cut off or extended."""
    header_end = 8 + int.from_bytes(whole[:8], "little")
    kind = random.integers(4)
    if kind == 0:
        return whole[: random.integers(len(whole))]
    if kind == 1:
        return whole + random.bytes(int(random.integers(1, 40)))
    changed = bytearray(whole)
    for _ in range(random.integers(1, 3)):
        place = int(random.integers(8 if kind == 2 else 0, header_end))
        # Mostly characters that occur in headers: a random byte is nearly always refused by the JSON parser.
        changed[place] = random.choice(list(b'0123456789,:"[]{}- UFIBabw')) if kind == 2 else random.integers(256)
    return bytes(changed)


def test_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    """The library is the judge: what is accepted here it accepts too, with the same names, shapes, types and bytes."""
    path = tmp_path / SINGLE
    long = "model.layers.0.mlp.experts.17.down_proj.weight"
    tensors = weights(long + "_scale", long + "_other") | {long: np.arange(12, dtype=np.uint8)}
    save_file(tensors, path, metadata={"format": "pt", "note": long})
    whole = path.read_bytes()
    random = np.random.default_rng(20)
    accepted = 0
    for _ in range(300):
        content = damaged(random, whole)
        path.write_bytes(content)
        try:
            listed = list_tensors(tmp_path)
        except CheckpointError as error:
            try:
                safetensors.deserialize(content)
            except Exception:
                continue
            assert "named twice" in str(error)
            continue
        accepted += 1
        expected = dict(safetensors.deserialize(content))
        assert listed.keys() == expected.keys()
        for name, tensor in listed.items():
            assert tensor.dtype == expected[name]["dtype"] and list(tensor.shape) == expected[name]["shape"]
            out = np.zeros(tensor.nbytes, np.uint8)
            with TensorReader() as reader:
                reader.read_into(tensor, out)
            assert out.tobytes() == bytes(expected[name]["data"])
    assert 20 < accepted < 200
