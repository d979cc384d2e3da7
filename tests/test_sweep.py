"""`bench sweep`: every cell is measured, on the link that its ratio asks for, and compared with the right ideal."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from novalm_jax import bench
from novalm_jax.benchmarks import sweeping
from novalm_jax.benchmarks.running import FIRST
from novalm_jax.benchmarks.sweeping import Cell, memory_for_slots
from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.engine.streamed_programs import StreamedPrograms
from novalm_jax.errors import BudgetError, OptionError
from novalm_jax.options import EngineOptions, SweepOptions
from novalm_jax.units import parse_size
from streamed_helpers import least_bytes
from tiny_checkpoints import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("shared")

RECORDS = 3 * 16
RECORD = 3 * 16 * 32 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    fields = {"num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    return tiny_checkpoint(tmp_path_factory.mktemp("sweep") / "model", "qwen3_moe", **fields)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    draw = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("traces") / "recorded.npz"
    np.savez(path, experts=np.array([[draw.permutation(16)[:2] for _ in range(3)] for _ in range(30)], np.uint8))
    return path


def sweep(folder: Path, *options: str) -> int:
    few = ["--tokens", "4", "--warm-up", "3", "--dtype", "float32", "--host-memory", "1GiB"]
    return bench.main(["sweep", str(folder), *few, *options])


def test_every_cell_is_measured_in_turns(folder, trace, capsys, monkeypatch) -> None:
    begun: list[tuple[Any, ...]] = []
    count = sweeping.count_decode

    def noted(llm: Any, prompt: list[int], before: int, tokens: int) -> Any:
        if hasattr(llm, "replaying"):
            executor = llm.replaying
            begun.append((executor._experts.fetcher.link.rate, executor._lookahead, executor.accuracy))
            assert executor._step == -1
        assert (before, tokens) == (FIRST + 3, 4)
        return count(llm, prompt, before, tokens)

    monkeypatch.setattr(sweeping, "count_decode", noted)
    arguments = ["--slots", "100,25", "--ratios", "0.5,2", "--rounds", "2", "--routing", str(trace), "--json"]
    assert sweep(folder, *arguments) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["records"] == RECORDS and figures["options"]["rounds"] == 2
    assert figures["routing"] == {"routing": str(trace), "accuracy": 0.8}
    resident, *cells = figures["cells"]
    assert (resident["prefetch"], resident["slots"], resident["hit_rate"]) == ("resident", RECORDS, 1.0)
    assert resident["of_ideal"] == pytest.approx(1) and resident["ratio"] is resident["link"] is None
    ways = [(ratio, way) for ratio in (0.5, 2) for way in ("off", "lookahead", "oracle")]
    assert [(cell["slots"], cell["ratio"], cell["prefetch"]) for cell in cells] == [(12, *way) for way in ways]
    fast, slow = cells[0]["link"], cells[3]["link"]
    assert [cell["link"] for cell in cells] == [fast] * 3 + [slow] * 3 and fast == pytest.approx(4 * slow)
    compute = cells[0]["ideal_seconds"]
    assert [cell["ideal_seconds"] / compute for cell in cells] == pytest.approx([1, 1, 1, 2, 2, 2])
    # What the link carries in the time of four tokens are whole records.
    missed = fast * 0.5 * compute / RECORD * 4
    assert missed == pytest.approx(round(missed)) and 0 < round(missed) <= 4 * 3 * 2
    order = [(link, accuracy is not None, accuracy) for link in (fast, slow) for accuracy in (None, 0.8, 1.0)]
    assert begun == [(None, False, None), (None, False, None), *order, *reversed(order)]
    for cell in cells:
        assert len(cell["seconds"]) == 2 and 0 < cell["hit_rate"] < 1
        assert cell["of_ideal"] == pytest.approx(cell["ideal_seconds"] * cell["tokens_per_second"])
        assert cell["counters"]["expert_hits"] + cell["counters"]["expert_misses"] == pytest.approx(3 * 2)
        assert cell["counters"]["prefetch_hits"] == 0 or cell["prefetch"] != "off"
        # Every other step of a trial, which lasts longer than these runs.
        assert cell["prefetching"] == (0 if cell["prefetch"] == "off" else 0.5)


def test_without_a_recording_the_model_is_replayed_itself(folder, capsys) -> None:
    assert sweep(folder, "--slots", "25", "--ratios", "1", "--prefetch", "oracle", "--rounds", "1") == 0
    head, empty, cells, empty_again, foot = (part.splitlines() for part in split(capsys.readouterr().out))
    assert not empty and not empty_again
    assert head[1:] == ["routing  of the model itself", "tokens   4 after 3, medians of 1"]
    assert head[0].endswith("(float32, default), 48 experts")
    assert cells[0].split() == "slots of them ratio link prefetch tokens/s hits prefetching of ideal".split()
    assert cells[1].split()[:4] == ["25", "%", "12", "1"] and len(cells) == 2
    assert "iB/s" in cells[1] and "oracle" in cells[1]
    assert foot[0].startswith("ratio: time of the bytes that a token misses")


def split(text: str) -> list[str]:
    """Head, table and foot, and what is between them."""
    head, table, foot = text.split("\n\n")
    return [head, "", table, "", foot]


def test_figures_of_a_cell() -> None:
    counters = {"expert_hits": 3.0, "expert_misses": 1.0, "steps_without_prefetch": 0.25}
    cell = Cell(12, 23, 4, 5e8, "oracle", 0.4, (0.5, 9.0, 0.8), counters)
    assert (cell.rate, cell.hit_rate, cell.prefetching, cell.of_ideal) == (1.25, 0.75, 0.75, 0.5)
    assert cell.columns() == ("12 %", "23", "4", "476.84 MiB/s", "oracle", "1.2", "75.0 %", "75.0 %", "0.50")
    assert replace(cell, prefetch="off", counters=counters | {"steps_without_prefetch": 0.0}).prefetching == 0


def test_where_nothing_is_missed_the_link_has_no_limit() -> None:
    assert sweeping._link(4, 0.1, missed=0) == (4, None, 0.1)
    assert sweeping._link(4, 0.1, missed=2e6) == (4, pytest.approx(5e6), pytest.approx(0.4))
    assert sweeping._link(0.5, 0.1, missed=2e6) == (0.5, pytest.approx(4e7), 0.1)


def test_the_memory_for_some_slots_where_not_all_of_it_becomes_slots(folder, monkeypatch) -> None:
    """The real placement is asked by the tests above."""
    asked: list[int] = []

    def placed(checkpoint: Checkpoint, engine: EngineOptions) -> Any:
        memory = parse_size(engine.device_memory)
        asked.append(memory)
        if memory < 5000:
            raise BudgetError("too little", least_bytes=5000, table={})
        if memory >= 12000:
            return SimpleNamespace(programs=None)
        programs = StreamedPrograms.__new__(StreamedPrograms)
        programs.slots, programs.layout = 2 + (memory - 5000) * 4 // 500, jax.ShapeDtypeStruct((100,), np.uint8)
        return SimpleNamespace(programs=programs)

    monkeypatch.setattr(sweeping, "place", placed)
    checkpoint, engine = Checkpoint.open(folder), EngineOptions()
    assert memory_for_slots(checkpoint, 1, engine) == memory_for_slots(checkpoint, 2, engine) == 5000
    memory = memory_for_slots(checkpoint, 40, engine)
    assert memory == asked[-1] and placed(checkpoint, EngineOptions(device_memory=memory)).programs.slots == 40
    with pytest.raises(OptionError, match="takes less device memory as a whole than with slots for 70 of its 48"):
        memory_for_slots(checkpoint, 70, engine)


def test_mistakes(folder, tmp_path, capsys, monkeypatch) -> None:
    dense = tiny_checkpoint(tmp_path / "dense", "llama")
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, experts=np.tile(np.arange(2, dtype=np.uint8), (4, 2, 1)))
    for model, options, says in (
        (dense, [], "it has no routed experts"),
        (folder, ["--routing", str(wrong)], "wrong.npz has 4 tokens in 2 layers"),
        (folder, ["--slots", "0"], "slots: expected numbers above 0 and at most 100"),
        (folder, ["--ratios", "1,x"], "ratios: expected numbers above 0 with commas"),
        (folder, ["--prefetch", "off,magic"], "prefetch: 'magic' is not one of off, lookahead, oracle"),
        (folder, ["--tokens", "0"], "tokens"),
    ):
        assert sweep(model, *options) == 2
        assert says in " ".join(capsys.readouterr().err.split())
    little = 4 * least_bytes(folder, dtype="float32", max_batch=1, context_length=64) // 3
    monkeypatch.setattr("novalm_jax.engine.placement.available_ram", lambda: little)
    assert sweep(folder) == 2
    assert "there is no room on the device for all of its experts" in " ".join(capsys.readouterr().err.split())


def test_help_names_every_option(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["sweep", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for option in (*(each.name for each in fields(SweepOptions)), "routing", "accuracy", "json"):
        assert f"--{option.replace('_', '-')}" in text
    assert "the text means nothing" in " ".join(text.replace("│", " ").split())
    assert bench.main(["--help"]) == 0
    assert "sweep       Measure what is left" in capsys.readouterr().out


def test_options_are_checked_without_a_command() -> None:
    options = SweepOptions(slots="50, 12.5", ratios="2", prefetch="off, oracle")
    assert (options.percents, options.link_ratios, options.ways) == ((50, 12.5), (2,), ("off", "oracle"))
    for given in ({"slots": ""}, {"ratios": "inf"}, {"ratios": "-1"}, {"policy": "fifo"}, {"dtype": "int8"}):
        with pytest.raises(OptionError):
            SweepOptions(**given)
