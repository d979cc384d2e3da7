"""`bench plan`: forecasts are of what runs did, on the machine around them; and the page about it is true."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from novalm_jax import bench
from novalm_jax.benchmarks import planning
from novalm_jax.benchmarks.planning import Compared, PlanComparison
from novalm_jax.benchmarks.sweeping import Cell
from novalm_jax.engine.forecast import Forecaster, Needs
from novalm_jax.engine.machine import Machine
from novalm_jax.options import ComparePlanOptions, RoutingOptions
from tiny_checkpoints import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("shared")

PAGE = (Path(__file__).parent.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
FEW = ["--tokens", "4", "--warm-up", "3", "--rounds", "1"]
SHORT = {"load": FEW[4:], "prefill": ["--prompt-tokens", "4"], "decode": ["--prompt-tokens", "4", "--tokens", "6"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a recording, by the names that the page gives them."""
    folder = tmp_path_factory.mktemp("place")
    fields = {"num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    tiny_checkpoint(folder / "random-model", "qwen3_moe", **fields)
    draw = np.random.default_rng(3)
    experts = np.array([[draw.permutation(16)[:2] for _ in range(3)] for _ in range(30)], np.uint8)
    np.savez(folder / "recorded.npz", experts=experts)
    return folder


def test_every_run_is_forecast_from_what_it_needed(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Machine, Needs]] = []
    step = Forecaster.streamed_step

    def noted(self: Forecaster, batch: int, tokens: int, needs: Needs, *more: Any) -> Any:
        assert (batch, tokens) == (1, 1 + 2 + 3 + 2)
        asked.append((self.machine, needs))
        return step(self, batch, tokens, needs, *more)

    times = iter([{"upload": 1.0}, {"upload": 3.0}, {"upload": 5.0}])
    monkeypatch.setattr(Forecaster, "streamed_step", noted)
    monkeypatch.setattr(planning.Probe, "time", lambda self: next(times))
    monkeypatch.setattr(
        planning.Probe, "machine", lambda self, seconds: Machine(link=1e9, step_seconds=seconds["upload"])
    )
    arguments = [str(place / "random-model"), "--slots", "100,25", "--host-memory", "1GiB", "--json"]
    assert bench.main(["plan", *arguments, *FEW, "--routing", str(place / "recorded.npz")]) == 0
    resident, streamed = json.loads(capsys.readouterr().out)["runs"]
    assert [run["machine"]["step_seconds"]["value"] for run in (resident, streamed)] == [2.0, 4.0]
    ((machine, needs),) = asked
    assert machine.link == min(1e9, streamed["link"])
    counters = streamed["counters"]
    assert needs == (3 * 2, pytest.approx(counters["expert_misses"]), 0) and 0 < needs.missed < needs.needed
    for run in (resident, streamed):
        forecast, measured = run["forecast_tokens_per_second"], run["tokens_per_second"]
        assert run["forecast_of_measured"] == pytest.approx(forecast / measured)
    assert (resident["prefetch"], streamed["prefetch"]) == ("resident", "off")


def test_which_forecasts_are_close() -> None:
    cell = Cell(25, 12, 1, 5e8, "off", 0.4, (0.1,), {"expert_hits": 3.0, "expert_misses": 1.0})
    for forecast, close in ((12.9, True), (13.1, False), (7.1, True), (6.9, False)):
        assert Compared(cell, Machine(), forecast).close == close
    columns = Compared(cell, Machine(), 12.9).columns()
    assert columns == ("25 %", "12", "1", "476.84 MiB/s", "off", "75.0 %", "12.9", "10.0", "1.29")
    far = Compared(cell, Machine(), 20.0)
    comparison = PlanComparison(None, RoutingOptions(), ComparePlanOptions(), (far,))
    assert str(comparison).endswith("tokens/s; 0 of 1 forecasts are within 30 % of what was measured")


@pytest.mark.parametrize("line", re.findall(r"^python -m novalm_jax\.(.*)$", PAGE, re.MULTILINE))
def test_the_commands_of_the_page(
    line: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = line.split()
    monkeypatch.chdir(place)
    if arguments[0] == "make-model":
        monkeypatch.chdir(tmp_path)
        arguments += ["--layers", "1", "--hidden-size", "32", "--vocab-size", "300", "--expert-width", "8"]
    elif name == "bench":
        arguments += [*SHORT.get(arguments[0], FEW), *(["--slots", "25"] if arguments[0] == "plan" else [])]
    assert import_module(f"novalm_jax.{name}").main(arguments) == 0
    assert capsys.readouterr().out.strip()


def test_the_page_names_every_benchmark() -> None:
    assert set(re.findall(r"^\| `bench ([\w-]+)` \|", PAGE, re.MULTILINE)) == set(bench._BENCHMARKS)
