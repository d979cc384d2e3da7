"""Made-up traces are like the recorded ones that they are named for, and their statistics are what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from novalm_jax import simulate as command
from novalm_jax.errors import OptionError
from novalm_jax.experts.simulation import simulate
from novalm_jax.experts.synthetic import LIKENESSES, make_trace
from novalm_jax.experts.trace_statistics import statistics_of
from novalm_jax.experts.traces import Trace, read_trace
from novalm_jax.options import MakeTraceOptions, SimulateOptions

# Of recorded decoding: gpt-oss-20b, 57,022 tokens in 112 sequences (GPT-OSS-MoE-ExpertFingerprinting, Apache-2.0), and
# DeepSeek-V2-Lite, 33,279 tokens of four tasks (ESFT, MIT). Hits are with as many slots in each layer, for 25 and 50 %.
RECORDED: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "reuse": [0.45, 0.39, 0.37, 0.36, 0.35, 0.33],
        "reuse_by_layer": [0.20, 0.30, 0.40, 0.45],
        "overlap": 0.85,
        "share": [0.27, 0.49, 0.80],
        "share_in_sequence": [0.45, 0.69, 0.92],
        "distinct": [6.2, 9.3, 12.8, 16.3],
        "entropy": 0.92,
        "recall": 0.62,
        "hits": {"lru": [0.66, 0.90], "belady": [0.81, 0.96]},
    },
    "deepseek-v2-lite": {
        "reuse": [0.28, 0.21, 0.20, 0.18, 0.20, 0.17],
        "reuse_by_layer": [0.14, 0.18, 0.20, 0.24],
        "overlap": 0.76,
        "share": [0.25, 0.43, 0.69],
        "share_in_sequence": [0.36, 0.56, 0.81],
        "distinct": [10.4, 17.1, 26.3, 37.3],
        "entropy": 0.97,
        "recall": 0.57,
        "hits": {"lru": [0.53, 0.76], "belady": [0.72, 0.89]},
    },
}
SHAPES = {"gpt-oss-20b": (24, 32, 4), "deepseek-v2-lite": (26, 64, 6)}


@pytest.fixture(scope="module", params=RECORDED)
def made(request: pytest.FixtureRequest) -> tuple[str, Trace]:
    layers, experts, chosen = SHAPES[request.param]
    return request.param, make_trace(MakeTraceOptions(request.param, layers, experts, chosen))


def test_statistics_are_those_of_the_recording(made: tuple[str, Trace]) -> None:
    name, trace = made
    found = statistics_of(trace)
    for figure, expected in RECORDED[name].items():
        if figure != "hits":
            value = getattr(found, figure)
            value = np.atleast_1d([*value.values()] if isinstance(value, dict) else value)[: np.size(expected)]
            if figure == "distinct":
                np.testing.assert_allclose(value, expected, rtol=0.05, err_msg=figure)
            else:
                np.testing.assert_allclose(value, expected, atol=0.06, err_msg=figure)
    assert found.reuse_by_layer.argmin() == 0


def test_caches_do_on_it_what_they_do_on_the_recording(made: tuple[str, Trace]) -> None:
    name, trace = made
    options = SimulateOptions(slots="25%,50%", policy="lru,belady", pool="layer")
    cells = simulate(trace, options).cells
    for policy, expected in RECORDED[name]["hits"].items():
        found = [cell.hit_rate for cell in cells if cell.policy == policy]
        np.testing.assert_allclose(found, expected, atol=0.05, err_msg=policy)


def test_every_likeness_has_an_option() -> None:
    assert get_args(get_type_hints(MakeTraceOptions)["like"]) == tuple(LIKENESSES)


def test_the_same_seed_makes_the_same_trace() -> None:
    small = {"layers": 2, "experts": 8, "experts_per_token": 2, "sequences": 2, "tokens": 9}
    one, again = (make_trace(MakeTraceOptions(**small, seed=3)) for _ in range(2))
    np.testing.assert_array_equal(one.experts, again.experts)
    assert not np.array_equal(one.experts, make_trace(MakeTraceOptions(**small, seed=4)).experts)
    assert one.experts.shape == (18, 2, 2) and one.num_experts == 8
    assert one.sequence.tolist() == [0] * 9 + [1] * 9
    assert all(len(set(chosen)) == 2 for chosen in one.experts.reshape(-1, 2).tolist())


# --- statistics, by hand ---------------------------------------------------------------------------------------------


def test_statistics_by_hand() -> None:
    experts = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 3]], [[1, 2], [0, 1]], [[0, 3], [0, 1]]])
    found = statistics_of(Trace.of_rows("", experts, np.array([3, 1])))
    # One of two experts of layer 0 comes again each time, and both, then none, of layer 1.
    assert found.reuse_by_layer.tolist() == [0.5, 0.5] and found.reuse[1] == 0.5
    # Two tokens later: 1 of (0, 1), none of (2, 3).
    assert found.reuse[2] == 0.25
    assert found.overlap == 0.75
    # Layer 0 uses 0 three times, 1 and 2 twice, 3 once; layer 1 each twice.
    assert (found.share[0.25], found.share[0.5]) == pytest.approx(((3 / 8 + 2 / 8) / 2, (5 / 8 + 0.5) / 2))
    # The window of two tokens: three experts in layer 0, two in layer 1.
    assert found.distinct[2] == 2.5
    even, uneven = 1.0, -sum(part * np.log(part) for part in (3 / 8, 1 / 4, 1 / 4, 1 / 8)) / np.log(4)
    assert found.entropy == pytest.approx((even + uneven) / 2)


def test_recall_is_whole_where_a_layer_follows_from_the_one_before() -> None:
    draw = np.random.default_rng(0)
    before = np.stack([draw.permutation(8)[:2] for _ in range(400)])
    follows = np.stack([before, (before + 3) % 8], axis=1)
    assert statistics_of(Trace.of_rows("", follows)).recall == pytest.approx(1)
    by_chance = np.stack([before, np.stack([draw.permutation(8)[:2] for _ in range(400)])], axis=1)
    assert statistics_of(Trace.of_rows("", by_chance)).recall < 0.4


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_trace_is_made_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "made.npz"
    size = ["--layers", "3", "--experts", "8", "--experts-per-token", "2", "--tokens", "64"]
    assert command.main(["--make-trace", str(path), *size, "--like", "deepseek-v2-lite"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{path}: made-up routing like deepseek-v2-lite\n\nreuse      ")
    assert read_trace(path).experts.shape == (16 * 64, 3, 2)
    assert command.main(["--make-trace", str(path), *size, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["reuse_by_layer"]) == 3
    assert command.main([str(path), "--slots", "12"]) == 0


@pytest.mark.parametrize("size", [("2", "4", "4", "2"), ("1", "1", "1", "1")])
def test_what_a_short_trace_cannot_say_is_null(size: tuple[str, ...], tmp_path: Path, capsys: Any) -> None:
    names = ("--layers", "--experts", "--experts-per-token", "--tokens")
    shape = [each for pair in zip(names, size, strict=True) for each in pair]
    assert command.main(["--make-trace", str(tmp_path / "made.npz"), "--sequences", "1", *shape, "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["distinct"]["16"] is None and found["entropy"] is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "trace: give a file of recorded routing"),
        (["a.npz", "--make-trace", "b.npz"], "trace: give a file of recorded routing"),
        (["--make-trace", "trace.txt"], "make_trace: trace.txt is no name"),
        (["--make-trace", "nowhere/trace.npz"], "cannot be written"),
        (["nowhere.npz"], "trace: nowhere.npz is no recorded routing"),
    ],
)
def test_mistakes_of_the_command(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) in (1, 2)
    assert says in " ".join(capsys.readouterr().err.split())


def test_more_than_memory_holds_is_refused() -> None:
    with pytest.raises(OptionError, match="tokens: 100000000 x 32 x 16 x 150 are more than"):
        MakeTraceOptions(layers=100_000_000)


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(OptionError, match="experts_per_token: 5 is more than experts"):
        MakeTraceOptions(experts=4, experts_per_token=5)
