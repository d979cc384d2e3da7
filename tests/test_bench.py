"""The bench command: what it measures is what it says, and its output can be read by people and by programs."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from novalm_jax import LLM, bench, load_model
from novalm_jax.benchmarks import loading
from novalm_jax.benchmarks.loading import LoadRates, forget, measure_loading, read_plainly
from novalm_jax.benchmarks.starting import StartTimes, measure_start
from novalm_jax.errors import BudgetError, CheckpointError, OptionError
from novalm_jax.models.params import parameters_of
from novalm_jax.options import BenchOptions
from tiny_checkpoints import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("bench") / "model")


def test_both_ways_are_taken_in_turns_from_files_that_were_forgotten(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            done.append(name)
            return call(*arguments)

        return run

    monkeypatch.setattr(loading, "forget", noted("forget", forget))
    monkeypatch.setattr(loading, "read_plainly", noted("plain", read_plainly))
    monkeypatch.setattr(loading.Checkpoint, "read", noted("load", loading.Checkpoint.read))
    rates = measure_loading(model, BenchOptions(rounds=3))
    forward, back = ["forget", "plain", "forget", "load"], ["forget", "load", "forget", "plain"]
    assert done == forward + back + forward
    assert len(rates.plain_seconds) == len(rates.load_seconds) == 3
    assert rates.files == 1 and rates.file_bytes == (model / "model.safetensors").stat().st_size
    assert 0 < rates.file_bytes - rates.weight_bytes < 10_000


def test_files_are_forgotten_whole(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int, int]] = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        asked.append((os.readlink(f"/proc/self/fd/{descriptor}"), offset, length, advice))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    files = [model / "model.safetensors", model / "config.json"]
    assert forget(files)
    assert asked == [(str(file), 0, 0, os.POSIX_FADV_DONTNEED) for file in files]
    with pytest.raises(CheckpointError, match="is missing"):
        forget([tmp_path / "gone"])
    monkeypatch.delattr(os, "posix_fadvise")
    assert not forget(files)


def test_a_plain_read_takes_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_BUFFER", 7)
    files = [tmp_path / "a", tmp_path / "b"]
    for file, size in zip(files, (20, 14), strict=True):
        file.write_bytes(bytes(size))
    assert read_plainly(files) == 34


def test_figures_are_medians_and_their_ratio() -> None:
    common: dict[str, Any] = {"model": "m", "model_type": "mixtral", "dtype": "bfloat16", "files": 2, "cold": True}
    rates = LoadRates(
        **common,
        file_bytes=10**9,
        weight_bytes=9 * 10**8,
        open_seconds=0.5,
        plain_seconds=(1.0, 4.0, 2.0),
        load_seconds=(3.0, 2.0, 9.0),
    )
    assert (rates.plain_rate, rates.load_rate, rates.ratio) == (5e8, 3e8, 0.6)
    text = str(rates)
    assert "500 MB/s (median of 3; 250 to 1000)" in text and "300 MB/s (median of 3; 100 to 450)" in text
    assert "ratio       0.60" in text and "cold" in text
    assert rates.to_dict()["ratio"] == 0.6 and rates.to_dict()["plain_mb_per_second"] == 500


def test_the_command_prints_a_table_or_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["load", str(model), "--rounds", "1"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        *["model", "files", "page cache", "plain read", "loader", "ratio", "opening"]
    ]
    assert bench.main(["load", str(model), "--rounds", "2", "--dtype", "float32", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["dtype"] == "float32" and len(figures["load_seconds"]) == 2
    assert figures["ratio"] == pytest.approx(figures["load_mb_per_second"] / figures["plain_mb_per_second"])


def test_starts_are_whole_processes_of_which_the_first_compiles(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["start", str(model), "--rounds", "2", "--dtype", "float32", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["model"] == str(model) and len(figures["later_seconds"]) == 2
    assert figures["first_seconds"] > 0 and figures["later_seconds_median"] > 0
    times = StartTimes(None, "bfloat16", 9.0, (2.0, 4.0, 2.5))
    assert "9.00 s to the first token" in str(times) and "2.50 s (median of 3; 2.00 to 4.00)" in str(times)


def test_all_starts_share_one_cache_that_is_empty_at_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, list[str]]] = []
    right = subprocess.Popen

    def noted(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        cache = options["env"]["XDG_CACHE_HOME"]
        assert "JAX_COMPILATION_CACHE_DIR" not in options["env"]
        begun.append((cache, os.listdir(cache)))
        return right(command, **options)

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    monkeypatch.setattr(subprocess, "Popen", noted)
    measure_start(model, BenchOptions(rounds=1))
    (first, empty), (second, full) = begun
    assert first == second and not empty and full


def test_a_model_of_random_weights_has_the_shape_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--layers 2 --hidden-size 32 --heads 2 --kv-heads 1 --experts 6 --experts-per-token 2 --expert-width 16"
    shape += " --vocab-size 100 --context-length 128 --dtype float32"
    for name, seed in (("one", "1"), ("same", "1"), ("other", "2")):
        assert bench.main(["make-model", str(tmp_path / name), *shape.split(), "--seed", seed]) == 0
        assert capsys.readouterr().out == f"{tmp_path / name}\n"
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "same", "other"))
    assert one == same != other
    weights = {
        path: np.asarray(param.get_value()) for path, param in parameters_of(load_model(tmp_path / "one")).items()
    }
    assert weights["layers.1.feed_forward.experts.down"].shape == (6, 32, 16)
    assert (weights["norm.scale"] == 1).all()
    spread = [array.std() for path, array in weights.items() if not path.endswith("scale")]
    assert 0.015 < min(spread) and max(spread) < 0.025
    assert bench.main(["make-model", str(tmp_path / "one")]) == 2


def streamed(model: Path) -> list[str]:
    """Options with which as few experts as can be are on the device, and none on the host."""
    with pytest.raises(BudgetError) as caught:
        LLM(model, device_memory=1000, dtype="float32", max_batch=1, dense_weights="device")
    memory = ["--device-memory", str(caught.value.least_bytes), "--host-memory", "0", "--dense-weights", "device"]
    return [*memory, "--dtype", "float32", "--max-batch", "1", "--prefetch", "off"]


def test_decoding_is_measured_with_what_it_moves(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["decode", str(model), "--prompt-tokens", "5", "--tokens", "6"]
    assert bench.main([*options, *streamed(model), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    counters = figures["counters"]
    # Two experts of two layers each token.
    assert figures["tokens"] == 4 and counters["expert_hits"] + counters["expert_misses"] == 4 * 2 * 2
    assert counters["uploads"] == counters["expert_misses"] > 0
    assert counters["disk_bytes_read"] == counters["bytes_uploaded"] > 0
    assert figures["tokens_per_second"] == pytest.approx(4 / figures["seconds"])
    assert bench.main([*options, "--dtype", "float32"]) == 0
    rows = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["model", "experts", "device", "decode"]


def test_a_prompt_is_measured_with_what_it_moves(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["prefill", str(model), "--prompt-tokens", "5", *streamed(model)]) == 0
    text = capsys.readouterr().out
    assert [line.split(" ")[0] for line in text.splitlines()] == [
        *["model", "experts", "device", "prefill", "hits", "moved", "waiting"]
    ]
    assert re.search(r"prefill +[\d.]+ tokens/s \(5 in [\d.]+ s\)", text)


def test_mistakes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["load", str(tmp_path / "gone")]) == 2
    assert "python -m novalm_jax.bench load: There is no folder" in capsys.readouterr().err
    assert bench.main(["load", str(model), "--rounds", "0"]) == 2
    capsys.readouterr()
    assert bench.main(["start", str(tmp_path / "gone")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "ended with exit code 2 and 0 bytes of text: python -m novalm_jax.generate:" in said
    for arguments in ([], ["lode"]):
        assert bench.main(arguments) == 2
        assert "usage: python -m novalm_jax.bench BENCHMARK" in capsys.readouterr().err
    assert bench.main(["--help"]) == 0
    assert "load        Measure how fast" in capsys.readouterr().out
    with pytest.raises(OptionError, match="rounds"):
        BenchOptions(rounds=0)
    with pytest.raises(OptionError, match="dtype"):
        BenchOptions(dtype="int8")  # type: ignore[arg-type]


def test_policies_are_timed_in_turns_on_the_same_steps(capsys: pytest.CaptureFixture[str]) -> None:
    made = "--layers 3 --experts 8 --experts-per-token 2 --sequences 2 --tokens 20"
    run = ["policy", *made.split(), "--slots", "50%", "--policy", "default,lru", "--warm-up", "10", "--steps", "5"]
    link = ["--record-bytes", "1MB", "--link", "1GB/s", "--compute-ms", "1"]
    assert bench.main([*run, *link, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [(cost["policy"], cost["slots"], len(cost["seconds"])) for cost in figures["costs"]] == [
        ("default", 12, 5),
        ("lru", 12, 5),
    ]
    for cost in figures["costs"]:
        # All six experts of a token, but for those that hit, at a millisecond each.
        assert cost["step_seconds"] == pytest.approx(max(1e-3, 6e-3 * (1 - cost["hit_rate"])))
        assert cost["part"] == pytest.approx(np.median(cost["seconds"]) / cost["step_seconds"])
    assert bench.main([*run, "--rounds", "2"]) == 0
    table = capsys.readouterr().out
    assert table.startswith("trace    made-up routing") and " of it" not in table
    assert bench.main([*run, "--rounds", "7"]) == 2
    assert "warm_up 10 + rounds 7 x steps 5 are run" in capsys.readouterr().err
