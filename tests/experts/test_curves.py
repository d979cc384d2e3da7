"""Hits of every number of slots at once, slots for each layer, and the picture of both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experts_helpers import EXPERTS, LAYERS, skewed
from novalm_jax import simulate as command
from novalm_jax.experts import pictures
from novalm_jax.experts.curves import fit_slots, lru_hit_rates, lru_hits
from novalm_jax.experts.policy import LRU
from novalm_jax.experts.simulation import simulate
from novalm_jax.experts.simulator import events_of, replay
from novalm_jax.experts.slots import SlotTable
from novalm_jax.experts.traces import Trace, write_trace
from novalm_jax.options import SimulateOptions


def test_stack_distances_give_the_hits_of_every_number_of_slots() -> None:
    for batch in (1, 3):
        events = events_of(skewed(), batch)
        rates = lru_hit_rates(events, LAYERS, EXPERTS)
        most = max(len(layer) for step in events for layer in step)
        assert len(rates) == LAYERS * EXPERTS + 1
        for slots in range(most, LAYERS * EXPERTS + 1):
            found = replay(events, LRU(LAYERS, EXPERTS), [SlotTable(LAYERS, EXPERTS, slots)])
            assert rates[slots] == pytest.approx(found.hit_rate), slots


def test_with_pools_of_their_own_layers_have_a_curve_each() -> None:
    events = events_of(skewed(), 2)
    hits = lru_hits(events, LAYERS, EXPERTS, apart=True)
    assert hits.shape == (LAYERS, EXPERTS + 1)
    for slots in range(2 * 2, EXPERTS + 1):
        found = replay(events, LRU(LAYERS, EXPERTS), [SlotTable(LAYERS, EXPERTS, slots) for _ in range(LAYERS)])
        assert hits[:, slots].tolist() == (found.needed - found.missed).tolist(), slots
    needed = sum(len(layer) for step in events for layer in step)
    assert lru_hit_rates(events, LAYERS, EXPERTS, apart=True).tolist() == (hits.sum(axis=0) / needed).tolist()


def test_slots_go_where_they_bring_most() -> None:
    # By slope: 5 and 1 in the first layer, 4 and 3 in the second.
    hits = np.array([[0, 5, 6, 6], [0, 4, 7, 7]])
    assert [fit_slots(hits, slots).tolist() for slots in range(2, 7)] == [[1, 1], [1, 2], [2, 2], [3, 2], [3, 3]]
    assert fit_slots(hits, 4, least=0).tolist() == [2, 2] and fit_slots(hits, 1, least=0).tolist() == [1, 0]
    assert fit_slots(hits, 4, least=2).tolist() == [2, 2]


def test_a_hollow_curve_counts_as_what_it_reaches() -> None:
    """The second slot of the first layer brings nothing, and the third much: a mean of 5, more than 4."""
    hits = np.array([[0, 3, 3, 13, 13], [0, 4, 8, 12, 12]])
    assert fit_slots(hits, 4).tolist() == [3, 1]
    assert fit_slots(hits, 6).tolist() == [3, 3]


def uneven() -> Trace:
    """The first layer goes through 6 experts in turns, the others keep to one and the same."""
    experts = np.zeros((60, 4, 1), np.int64)
    experts[:, 0, 0] = np.arange(60) % 6
    return Trace.of_rows("uneven", experts, num_experts=6)


def test_fitted_pools_follow_their_trace(tmp_path: Path) -> None:
    def misses(**options: Any) -> float:
        (cell,) = simulate(uneven(), SimulateOptions(slots="9", policy="lru", **options)).cells
        return cell.misses * 60

    assert misses(pool="fitted") == 6 + 3
    assert misses(pool="layer") == 60 + 3
    turned = uneven()
    write_trace(Trace.of_rows("turned", turned.experts[:, ::-1], num_experts=6), tmp_path / "turned.npz")
    assert misses(pool="fitted", fit_trace=str(tmp_path / "turned.npz")) == 60 + 3


def test_fitted_pools_hold_what_a_token_needs() -> None:
    """The first layer goes through 8 experts in pairs and would have all 8 slots; the other's never come again."""
    experts = np.stack([np.arange(120).reshape(60, 2) % 8, np.arange(120).reshape(60, 2)], axis=1)
    options = SimulateOptions(slots="8", policy="lru", pool="fitted")
    assert simulate(Trace.of_rows("pairs", experts, num_experts=120), options).cells[0].misses == 4
    assert (
        simulate(Trace.of_rows("pairs", experts, num_experts=120), replace(options, slots="10")).cells[0].misses < 2.2
    )


# --- pictures --------------------------------------------------------------------------------------------------------


def test_a_picture_has_the_curve_and_a_point_for_each_replay() -> None:
    from matplotlib.figure import Figure

    options = SimulateOptions(slots="50%,25%", policy="default,lru")
    simulation = simulate(skewed(), options, curve=True)
    axes = Figure().subplots()
    pictures.draw_hits(simulation, axes)
    curve, *points = axes.get_lines()
    assert len(curve.get_xdata()) == LAYERS * EXPERTS + 1 and max(curve.get_xdata()) == pytest.approx(100)
    assert [line.get_label() for line in points] == ["default", "lru"]
    for line in points:
        rates = {cell.slots: cell.hit_rate for cell in simulation.cells if cell.policy == line.get_label()}
        assert list(line.get_xdata()) == [25, 50]
        assert list(line.get_ydata()) == pytest.approx([100 * rates[12], 100 * rates[24]])
    # What lru hit lies on its curve.
    assert list(points[1].get_ydata()) == pytest.approx([curve.get_ydata()[12], curve.get_ydata()[24]])
    pictures.draw_hits(simulate(skewed(), options), without := Figure().subplots())
    assert len(without.get_lines()) == 2


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_command_writes_pictures(suffix: str, start: bytes, tmp_path: Path, capsys: Any) -> None:
    # A name that would be a formula without an end.
    write_trace(skewed(), tmp_path / "a${b.npz")
    picture = tmp_path / f"hits{suffix}"
    assert command.main([str(tmp_path / "a${b.npz"), "--slots", "25%", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(start) and capsys.readouterr().out.startswith("trace ")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a${b.npz", picture.name])


def test_what_cannot_be_drawn_is_refused_before_anything_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write_trace(skewed(), tmp_path / "trace.npz")
    monkeypatch.setattr("novalm_jax.experts.simulation.simulate", None)
    assert command.main([str(tmp_path / "trace.npz"), "--plot", str(tmp_path / "hits.gif")]) == 2
    assert "plot:" in (said := capsys.readouterr().err) and ".svg" in said
    monkeypatch.setattr("novalm_jax.compat.find_spec", lambda name: None)
    assert command.main([str(tmp_path / "trace.npz"), "--plot", str(tmp_path / "hits.png")]) == 2
    assert "plot: matplotlib" in capsys.readouterr().err and not (tmp_path / "hits.png").exists()


def test_json_has_the_curve(tmp_path: Path, capsys: Any) -> None:
    write_trace(skewed(), tmp_path / "trace.npz")
    for pool, count, each in (("global", LAYERS * EXPERTS, 1), ("layer", EXPERTS, LAYERS)):
        run = [str(tmp_path / "trace.npz"), "--slots", "50%", "--policy", "lru", "--pool", pool, "--json"]
        assert command.main(run) == 0
        figures = json.loads(capsys.readouterr().out)
        curve = dict(zip(figures["lru_curve"]["slots"], figures["lru_curve"]["hit_rate"], strict=True))
        assert list(curve) == [each * number for number in range(count + 1)]
        assert curve[24] == pytest.approx(figures["cells"][0]["hit_rate"])
