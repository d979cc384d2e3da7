"""Reads of a tensor's bytes: parts, errors of the disk, threads, and the end of a reader."""

import json
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from checkpoint_helpers import by_hand, entry, read, refusal, save, sharded, weights
from novalm_jax.checkpoint import files
from novalm_jax.checkpoint.files import SINGLE, TensorReader, list_tensors
from novalm_jax.checkpoint.header import StoredTensor
from novalm_jax.errors import CheckpointError


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


def test_forgets_pages_of_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int, int]] = []

    def advise(file: int, start: int, length: int, advice: int) -> None:
        told.append((os.readlink(f"/proc/self/fd/{file}"), start, length, advice))
        raise OSError("this file system takes no advice")

    tensor = one_tensor(tmp_path, bytes(100))
    with TensorReader() as reader:
        reader.read_into(tensor, np.zeros(100, np.uint8))
        monkeypatch.setattr(os, "posix_fadvise", advise)
        reader.forget_pages()
    assert told == [(str(tensor.file), 0, 0, os.POSIX_FADV_DONTNEED)]
