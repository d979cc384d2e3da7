"""The simulator: by hand on a few events, against plainer code on many, and bounds that hold on every trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from novalm_jax import simulate as command
from novalm_jax.errors import OptionError
from novalm_jax.experts.curves import lru_hit_rates
from novalm_jax.experts.policy import LRU, POLICIES
from novalm_jax.experts.simulation import simulate
from novalm_jax.experts.simulator import Belady, Events, events_of, replay
from novalm_jax.experts.slots import SlotTable
from novalm_jax.experts.traces import NONE, Trace, read_trace, write_trace
from novalm_jax.options import SimulateOptions

LAYERS, EXPERTS, CHOSEN = 4, 12, 2


def skewed(tokens: int = 150, seed: int = 0) -> Trace:
    """Popular experts, others in each layer, in sequences of 50 that like others again."""
    draw = np.random.default_rng(seed)
    popularity = draw.gumbel(size=(tokens // 50, LAYERS, EXPERTS)).repeat(50, axis=0)
    experts = np.argsort(-(popularity + draw.gumbel(size=(tokens, LAYERS, EXPERTS))), axis=-1)[..., :CHOSEN]
    return Trace.of_rows("skewed", experts, np.full(tokens // 50, 50))


def hits(policy: str, trace: Trace, slots: int, batch: int | None = None) -> float:
    events = events_of(trace, batch)
    made = Belady(LAYERS, EXPERTS, events) if policy == "belady" else POLICIES[policy](LAYERS, EXPERTS)
    return replay(events, made, [SlotTable(LAYERS, EXPERTS, slots)]).hit_rate


def by_layer(*steps: list[list[int]]) -> Events:
    return [[np.array(layer) for layer in step] for step in steps]


def test_an_event_is_looked_up_before_anything_comes_in() -> None:
    # With two slots, 1 leaves for 2, and 0 stays, because the same event needs it.
    events = by_layer([[0, 1]], [[0, 2]], [[0, 1]], [[0, 1]])
    found = replay(events, LRU(1, 3), [SlotTable(1, 3, 2)])
    assert (found.needed.tolist(), found.missed.tolist(), found.evictions) == ([8], [4], 2)


def test_an_event_that_needs_more_than_there_is_leaves_the_table_full() -> None:
    table = SlotTable(1, 5, 2)
    found = replay(by_layer([[0, 1, 2, 3]], [[2, 3]], [[0, 1]]), LRU(1, 5), [table])
    assert found.missed.tolist() == [4 + 2 + 2] and sorted(np.flatnonzero(table.table[0] >= 0)) == [0, 1]


def test_a_pool_for_each_layer_keeps_layers_apart() -> None:
    events = by_layer(*[[[0], [step]] for step in range(4)])
    apart = replay(events, LRU(2, 4), [SlotTable(2, 4, 1), SlotTable(2, 4, 1)])
    together = replay(events, LRU(2, 4), [SlotTable(2, 4, 2)])
    assert apart.missed.tolist() == [1, 4] and apart.slots == 2
    assert together.missed.tolist() == [1, 4]
    assert replay(events, LRU(2, 4), [SlotTable(2, 4, 1)]).missed.tolist() == [4, 4]


def test_stack_distances_give_the_hits_of_every_number_of_slots() -> None:
    for batch in (1, 3):
        events = events_of(skewed(), batch)
        rates = lru_hit_rates(events, LAYERS, EXPERTS)
        most = max(len(layer) for step in events for layer in step)
        assert len(rates) == LAYERS * EXPERTS + 1
        for slots in range(most, LAYERS * EXPERTS + 1):
            found = replay(events, LRU(LAYERS, EXPERTS), [SlotTable(LAYERS, EXPERTS, slots)])
            assert rates[slots] == pytest.approx(found.hit_rate), slots


def fewest_misses(events: Events, slots: int) -> int:
    """By trying every way to evict."""
    states = {frozenset(): 0}
    for step in events:
        for layer, experts in enumerate(step):
            needed = frozenset((layer, int(expert)) for expert in experts)
            found: dict[frozenset, int] = {}
            for held, missed in states.items():
                missing = needed - held
                for kept in _subsets(held - needed, slots - len(needed)):
                    key = kept | needed
                    found[key] = min(found.get(key, 1 << 30), missed + len(missing))
            states = found
    return min(states.values())


def _subsets(items: frozenset, most: int) -> list[frozenset]:
    if len(items) <= most:
        return [items]
    return [subset for item in items for subset in _subsets(items - {item}, most)]


def test_belady_has_as_few_misses_as_can_be() -> None:
    for seed in range(6):
        draw = np.random.default_rng(seed)
        events = [[draw.permutation(5)[:2] for _ in range(2)] for _ in range(8)]
        found = replay(events, Belady(2, 5, events), [SlotTable(2, 5, 4)])
        assert found.missed.sum() == fewest_misses(events, 4)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("slots", [7, 14, 24])
def test_no_policy_beats_the_future_and_the_default_beats_the_others(slots: int, batch: int) -> None:
    trace = skewed(600)
    found = {name: hits(name, trace, slots, batch) for name in (*POLICIES, "belady")}
    assert max(found, key=lambda name: found[name]) == "belady"
    # Within half a point, for so short a trace.
    assert found["default"] >= max(found["lru"], found["decayed"], found["lfu"]) - 0.005, found


def test_below_one_step_of_slots_there_is_no_cliff() -> None:
    """LRU evicts each record just before its turn."""
    found = {name: hits(name, skewed(600), LAYERS * CHOSEN // 2) for name in POLICIES}
    assert found["lru"] < 0.02 and found["default"] > 0.15, found


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_table_of_policies_and_slots(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "trace.npz"
    write_trace(skewed(), path)
    assert command.main([str(path), "--slots", "25%,30", "--policy", "default,belady", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["tokens"], figures["steps"], figures["layers"], figures["experts"]) == (150, 150, LAYERS, EXPERTS)
    assert [(cell["policy"], cell["slots"]) for cell in figures["cells"]] == [
        ("default", 12), ("default", 30), ("belady", 12), ("belady", 30),
    ]  # fmt: skip
    for cell in figures["cells"]:
        assert cell["hit_rate"] == pytest.approx(hits(cell["policy"], skewed(), cell["slots"]))
        assert cell["misses"] == pytest.approx((1 - cell["hit_rate"]) * LAYERS * CHOSEN)
        assert cell["bytes"] is cell["serial_ms"] is None
    assert command.main([str(path), "--slots", "25%"]) == 0
    table = capsys.readouterr().out
    assert table.startswith("trace    trace.npz: 150 tokens in 150 steps, 4 layers of 12 experts\npool     one pool")
    assert "policy  slots    hits  misses a token\n" in table


def test_times_follow_from_bytes_and_link() -> None:
    options = SimulateOptions(slots="20", policy="lru", batch=3, record_bytes="1MB", link="2GB/s", compute_ms=1.5)
    (cell,) = simulate(skewed(), options).cells
    assert cell.bytes == pytest.approx(cell.misses * 1e6)
    # Three tokens a step, half a millisecond an expert.
    assert cell.serial_ms == pytest.approx(1.5 + 3 * cell.misses / 2)
    assert cell.hidden_ms == pytest.approx(max(1.5, 3 * cell.misses / 2))
    assert cell.columns(False)[:2] == ("lru", "20") and cell.columns(False)[-1] == f"{cell.hidden_ms:.2f}"


def test_rows_of_a_step_share_what_it_fetches() -> None:
    experts = np.array([[[0, 1]], [[1, 2]]])
    trace = Trace.of_rows("two", experts, step=np.array([0, 0]), sequence=np.array([0, 1]), num_experts=4)
    ((needed,),) = events_of(trace, None)
    assert needed.tolist() == [0, 1, 2]
    experts[0, 0, 1] = NONE
    assert [step[0].tolist() for step in events_of(trace, 1)] == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"slots": "0%"}, "slots: expected numbers or percentages"),
        ({"slots": "101%"}, "slots: expected"),
        ({"slots": "2.5"}, "slots: expected"),
        ({"slots": "many"}, "slots: expected"),
        ({"policy": "default,best"}, "policy: 'best' is not one of default, decayed, lfu, lru, belady"),
        ({"pool": "step"}, "pool"),
        ({"batch": 0}, "batch"),
        ({"record_bytes": "0MB"}, "record_bytes: '0MB' is nothing"),
        ({"compute_ms": -1}, "compute_ms"),
        ({"compute_ms": 1}, "compute_ms: without a link"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        SimulateOptions(**options)


def test_a_link_needs_the_size_of_an_expert() -> None:
    with pytest.raises(OptionError, match="add record_bytes"):
        simulate(skewed(), SimulateOptions(link="25GB/s"))


def test_the_examples_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text(encoding="utf-8")
    replayed, made = re.findall(r"^python -m novalm_jax\.simulate (.*)$", text, re.MULTILINE)
    write_trace(skewed(), tmp_path / "recorded.npz")
    monkeypatch.chdir(tmp_path)
    assert command.main(replayed.split()) == 0
    rows = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert rows[0].split("  ")[-1] == "all hidden" and len(rows) == 1 + 3 * 2
    assert command.main([*made.split(), "--tokens", "5"]) == 0
    assert read_trace(tmp_path / "made.npz").experts.shape == (16 * 5, 48, 8)
