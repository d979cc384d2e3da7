"""Single files that are damaged or are not what their name says: by header, by size and at random."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from checkpoint_helpers import by_hand, entry, refusal, save, weights
from novalm_jax.checkpoint.files import SINGLE, TensorReader, list_tensors
from novalm_jax.checkpoint.header import read_json
from novalm_jax.errors import CheckpointError

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
