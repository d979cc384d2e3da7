"""Traces: every kind of file is read, ours is written, and steps hold the rows that they should."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from novalm_jax.errors import OptionError
from novalm_jax.experts import array_files
from novalm_jax.experts.profile import read_profile
from novalm_jax.experts.traces import NONE, Trace, read_trace, write_trace


def some_experts(tokens: int = 5, layers: int = 2, chosen: int = 3, experts: int = 16) -> np.ndarray:
    draw = np.random.default_rng(5)
    return np.stack([[draw.permutation(experts)[:chosen] for _ in range(layers)] for _ in range(tokens)])


# --- files -----------------------------------------------------------------------------------------------------------


def as_table(experts: np.ndarray) -> str:
    """As a .csv file, with a prompt before and rows in no order."""
    rows = [
        f"0,1,{7 + token},{layer + 1},{slot},{expert},0.5,0,1000"
        for (token, layer, slot), expert in np.ndenumerate(experts)
    ]
    np.random.default_rng(0).shuffle(rows)
    prompt = ["0,0,0,1,0,99,0.5,0,1000", "0,0,0,1,1,98,0.5,0,1000"]
    head = ["# route_trace v1", "# layer=1 expert_bytes=1000"]
    columns = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
    return "\n".join([*head, columns, *prompt, *rows]) + "\n"


def test_both_kinds_of_files_give_the_experts_in_order(tmp_path) -> None:
    experts = some_experts()
    np.savez(tmp_path / "a.npz", experts=experts, weights_u8=experts, seq_len=np.array([2, 3]))
    (tmp_path / "a.route.csv").write_text(as_table(experts))
    for name in ("a.npz", "a.route.csv"):
        recorded = read_trace(tmp_path / name)
        assert recorded.name == name
        np.testing.assert_array_equal(recorded.experts, experts)
        assert recorded.num_experts == experts.max() + 1
    assert read_trace(tmp_path / "a.npz").sequence.tolist() == [0, 0, 1, 1, 1]
    assert read_trace(tmp_path / "a.route.csv").layers.tolist() == [1, 2]


def test_a_step_of_another_turn_is_another_token(tmp_path) -> None:
    lines = ["turn,phase,step,layer,slot,expert", "0,1,4,0,0,5", "1,1,2,0,0,6", "1,1,4,0,0,7"]
    (tmp_path / "turns.csv").write_text("\n".join(lines))
    trace = read_trace(tmp_path / "turns.csv")
    assert trace.experts.tolist() == [[[5]], [[6]], [[7]]] and trace.sequence.tolist() == [0, 1, 1]


BROKEN: dict[str, tuple[Any, str]] = {
    "gone.npz": (None, "No such file"),
    "routing.txt": (b"experts", "neither .npz nor .csv"),
    "other.npz": ({"expert": np.zeros((2, 2, 2), np.uint8)}, "experts"),
    "float.npz": ({"experts": np.zeros((2, 2, 2))}, r"float64 \[2, 2, 2\]"),
    "flat.npz": ({"experts": np.zeros((2, 2), np.uint8)}, r"uint8 \[2, 2\]"),
    "empty.npz": ({"experts": np.zeros((0, 2, 2), np.uint8)}, r"uint8 \[0, 2, 2\]"),
    "negative.npz": ({"experts": np.full((1, 2, 2), -2)}, "int64"),
    "none.npz": ({"experts": np.full((1, 2, 2), NONE)}, "no expert"),
    "lengths.npz": ({"experts": np.zeros((3, 1, 1), int), "seq_len": np.array([1, 1])}, "have 2 tokens, and experts 3"),
    "order.npz": ({"experts": np.zeros((2, 1, 1), int), "step": np.array([1, 0])}, "not in order"),
    "sequences.npz": ({"experts": np.zeros((2, 1, 1), int), "sequence": np.zeros(3, int)}, r"sequence is \[3\]"),
    "few.npz": ({"experts": np.full((2, 1, 1), 7), "num_experts": 7}, "it has expert 7, and num_experts is 7"),
    "many.npz": ({"experts": np.zeros((2, 1, 1), int), "num_experts": 10**10}, "num_experts is 10000000000"),
    "endless.npz": ({"experts": np.zeros((2, 1, 1), int), "num_experts": np.inf}, "infinity"),
    "far.npz": ({"experts": np.full((2, 1, 1), 2**64 - 1, np.uint64)}, "it has expert 18446744073709551615"),
    "same.npz": ({"experts": np.ones((2, 1, 2), int)}, "same expert twice"),
    "falling.npz": ({"experts": np.zeros((2, 1, 1), int), "step": np.array([3, 2], np.uint8)}, "not in order"),
    "named.npz": ({"experts": np.zeros((2, 1, 1), int), "sequence": np.array(["a", "b"])}, "sequence is <U1"),
    "weights.npz": ({"experts": np.zeros((2, 1, 1), int), "weights": np.ones((2, 1, 1), int)}, "weights is int64"),
    "light.npz": ({"experts": np.zeros((2, 1, 1), int), "record_bytes": 0}, "record_bytes is 0"),
    "large.npz": ({"experts": np.zeros((500, 1, 1), int)}, "experts takes 4128 bytes, and 4096 are the most"),
    "pickled.npz": ({"experts": np.array([[["x"]]], object)}, "pickle"),
    "noise.npz": (b"PK\x03\x04" + bytes(50), "no .npz file"),
    "plain.npz": (np.zeros(3), ""),
    "columns.csv": (b"turn,phase,step,layer,slot\n0,1,0,0,0\n", "no column expert"),
    "short.csv": (b"turn,phase,step,layer,slot,expert\n0,1,0,0,0\n", "NoneType"),
    "words.csv": (b"turn,phase,step,layer,slot,expert\n0,1,0,0,zero,1\n", "zero"),
    "bytes.csv": (b"\xff\xfe", "utf-8"),
    "prompt.csv": (b"turn,phase,step,layer,slot,expert\n0,0,0,0,0,1\n", r"\[0, 0, 0\]"),
    "hole.csv": (b"turn,phase,step,layer,slot,expert\n0,1,0,0,0,1\n0,1,0,1,0,1\n0,1,1,0,0,1\n", "same number"),
    "sparse.csv": (
        b"turn,phase,step,layer,slot,expert\n" + b"".join(b"%d,1,%d,%d,%d,1\n" % (4 * (n,)) for n in range(9999)),
        "same number",
    ),
    "far.csv": (b"turn,phase,step,layer,slot,expert\n0,1,0,0,0,8589934592\n", "num_experts is 8589934593"),
    "twice.csv": (b"turn,phase,step,layer,slot,expert\n0,1,0,0,0,1\n0,1,0,0,0,2\n", "same number"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_recording_is_refused(tmp_path, name, monkeypatch) -> None:
    monkeypatch.setattr(array_files, "MOST_BYTES", 4096)
    content, says = BROKEN[name]
    path = tmp_path / name
    if isinstance(content, dict):
        np.savez(path, **content)
    elif isinstance(content, np.ndarray):
        with path.open("wb") as file:
            np.save(file, content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=rf"trace: .*{name} is no recorded routing: .*{says}"):
        read_trace(path, "trace")


@pytest.mark.parametrize("read", [read_trace, read_profile])
def test_a_member_that_is_no_array_is_refused(tmp_path, read) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        for name in ("experts", "uses", "tokens"):
            file.writestr(f"{name}.npy", b"hello")
    with pytest.raises(OptionError, match=r"a\.npz is no .* is no array"):
        read(tmp_path / "a.npz")


def test_a_trace_is_written_and_read(tmp_path: Path) -> None:
    experts = some_experts(tokens=4)
    experts[:, 1, 2] = NONE
    trace = Trace(
        name="own.npz",
        experts=experts,
        sequence=np.array([0, 1, 0, 1]),
        step=np.array([0, 0, 1, 1]),
        num_experts=16,
        layers=np.array([1, 3]),
        weights=np.random.default_rng(0).random(experts.shape, np.float32),
        record_bytes=3000,
    )
    write_trace(trace, tmp_path / "own.npz")
    again = read_trace(tmp_path / "own.npz")
    for name, value in vars(trace).items():
        np.testing.assert_array_equal(getattr(again, name), value)
    assert [path.name for path in tmp_path.iterdir()] == ["own.npz"]


# --- steps -----------------------------------------------------------------------------------------------------------


def steps(trace: Trace, batch: int | None, quantum: int = 0) -> list[list[int]]:
    return [rows.tolist() for rows in trace.together(batch, quantum)]


def test_sequences_run_side_by_side_and_the_next_begins_where_one_ends() -> None:
    trace = Trace.of_rows("", some_experts(tokens=7), np.array([3, 1, 2, 1]))
    assert steps(trace, None) == steps(trace, 1) == [[row] for row in range(7)]
    assert steps(trace, 2) == [[0, 3], [1, 4], [2, 5], [6]]
    assert steps(trace, 9) == [[0, 3, 4, 6], [1, 5], [2]]


def test_with_a_quantum_one_half_of_the_sequences_runs_before_the_other_does() -> None:
    trace = Trace.of_rows("", some_experts(tokens=12), np.array([5, 3, 3, 1]))
    # The first two for two steps, then the others, of which one ends; then those that waited.
    assert steps(trace, 4, quantum=2) == [[0, 5], [1, 6], [8, 11], [9], [2, 7], [3], [10], [4]]
    # Where one ends in the middle, the next one waits for its turn.
    assert steps(trace, 2, quantum=3) == [[0], [1], [2], [5], [6], [7], [3], [4], [8], [9], [10], [11]]
    for quantum in (1, 2, 5):
        assert sorted(row for rows in steps(trace, 3, quantum) for row in rows) == list(range(12))


def test_steps_as_recorded_may_be_taken_apart() -> None:
    trace = Trace.of_rows(
        "", some_experts(tokens=5), sequence=np.array([4, 2, 4, 2, 2]), step=np.array([0, 0, 3, 3, 7])
    )
    assert steps(trace, None) == [[0, 1], [2, 3], [4]]
    assert steps(trace, 1) == [[1], [3], [4], [0], [2]]


def test_some_rows_are_a_trace_of_their_own() -> None:
    experts = some_experts()
    trace = Trace.of_rows("all", experts, np.array([2, 3]), weights=experts / 16, num_experts=20, record_bytes=5)
    some = trace.of(slice(1, 4))
    assert some.experts.tolist() == experts[1:4].tolist() and some.weights is not None
    assert some.weights.tolist() == (experts[1:4] / 16).tolist()
    assert (some.sequence.tolist(), some.step.tolist()) == ([0, 1, 1], [1, 2, 3])
    assert (some.num_experts, some.record_bytes, some.name) == (20, 5, "all")
    assert trace.of(slice(None)).experts.shape == experts.shape
