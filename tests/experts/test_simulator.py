"""The simulator: by hand on a few events, against plainer code on many, and bounds that hold on every trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experts_helpers import CHOSEN, EXPERTS, LAYERS, skewed
from novalm_jax import bench
from novalm_jax import simulate as command
from novalm_jax.errors import OptionError
from novalm_jax.experts.policy import LRU, POLICIES
from novalm_jax.experts.profile import ExpertProfile, read_profile, write_profile
from novalm_jax.experts.simulation import simulate
from novalm_jax.experts.simulator import Belady, Events, Replay, events_of, replay
from novalm_jax.experts.slots import SlotTable
from novalm_jax.experts.traces import NONE, Trace, read_trace, write_trace
from novalm_jax.options import SimulateOptions


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


def test_without_admission_every_miss_is_an_upload() -> None:
    found = replay(by_layer([[0, 1]], [[2]], [[0]]), LRU(1, 3), [SlotTable(1, 3, 2)])
    assert (found.uploads, found.missed.tolist(), found.evictions) == (4, [4], 2)


class Fixed:
    """Every record is worth the same at all times."""

    def __init__(self, *worth: float):
        self._worth = np.array([worth], np.float64)

    def seed(self, rates: np.ndarray) -> None:
        raise AssertionError

    def use(self, step: int, layer: int, experts: np.ndarray) -> None: ...

    def worth(self, step: int, layer: int, layers: np.ndarray, experts: np.ndarray) -> np.ndarray:
        return self._worth[layers, experts]


def held_after(events: Events, margin: float, *worth: float) -> tuple[list[int], Replay]:
    table = SlotTable(1, len(worth), 2)
    found = replay(events, Fixed(*worth), [table], margin=margin)
    return np.flatnonzero(table.table[0] >= 0).tolist(), found


def test_what_is_missed_comes_in_if_it_is_worth_more() -> None:
    events = by_layer([[0, 1]], [[2]], [[3]])
    # Empty slots are for anything. 2 is worth twice what 1 is, and 3 less than any.
    held, found = held_after(events, 1.0, 4, 2, 4, 1)
    assert held == [0, 2] and (found.uploads, found.evictions, found.missed.tolist()) == (3, 1, [4])
    held, found = held_after(events, 2.0, 4, 2, 4, 1)
    assert held == [0, 1] and (found.uploads, found.evictions, found.missed.tolist()) == (2, 0, [4])


def test_all_of_an_event_is_weighed_at_once() -> None:
    """The best newcomer stands against the least resident. One by one, 2 would come in for 0 and leave for 3."""
    held, found = held_after(by_layer([[0, 1]], [[2, 3]]), 1.0, 1, 5, 2, 4)
    assert held == [1, 3] and found.uploads == 3


def test_nothing_comes_in_for_what_the_event_needs() -> None:
    held, found = held_after(by_layer([[0, 1]], [[0, 1, 2]]), 1.0, 1, 1, 9)
    assert held == [0, 1] and found.uploads == 2 and found.missed.tolist() == [3]


def test_admission_uploads_less_for_nearly_the_same_hits(tmp_path: Path, capsys: Any) -> None:
    write_trace(skewed(600), tmp_path / "trace.npz")
    run = [str(tmp_path / "trace.npz"), "--slots", "25%", "--policy", "default,belady", "--record-bytes", "1MB"]
    cells = []
    for more in ([], ["--admission", "1"], ["--admission", "2"]):
        assert command.main([*run, *more, "--json"]) == 0
        cells.append(json.loads(capsys.readouterr().out)["cells"])
    always, once, twice = ([cell["uploads"] for cell in part] for part in cells)
    assert always == [cell["misses"] for cell in cells[0]]
    assert once[0] < always[0] / 2 and twice[0] < once[0]
    assert cells[1][0]["hit_rate"] > cells[0][0]["hit_rate"] - 0.02
    assert cells[1][0]["bytes"] == pytest.approx(1e6 * once[0])
    # Of what the future does not need soon nothing is uploaded, and as much is hit.
    assert once[1] < always[1] and cells[1][1]["hit_rate"] >= cells[0][1]["hit_rate"]
    assert command.main([*run, "--admission", "1"]) == 0
    table = capsys.readouterr().out
    assert "misses   admitted if worth more than 1 times what leaves" in table and "  uploads  " in table


def test_a_profile_warms_the_start(tmp_path: Path) -> None:
    write_profile(ExpertProfile.of_trace(skewed()), tmp_path / "profile.npz")
    found = {}
    for pool in ("global", "layer"):
        for profile in (None, str(tmp_path / "profile.npz")):
            options = SimulateOptions("50%", "default,lfu", pool=pool, first_tokens=10, expert_profile=profile)
            found[pool, profile] = simulate(skewed(), options)
            assert found[pool, profile].tokens == 10
        cold, warm = found[pool, None].cells, found[pool, profile].cells
        assert all(b.hit_rate > a.hit_rate + 0.1 for a, b in zip(cold, warm, strict=True))
    assert "\nstart    with the most used experts of profile.npz\n" in str(found["layer", profile])


def test_the_most_used_records_have_the_slots_at_the_start(tmp_path: Path) -> None:
    write_profile(ExpertProfile("made", np.array([[0.1, 0.9, 0.8], [0.3, 0.2, 0.0]]), 10), tmp_path / "profile.npz")
    trace = Trace.of_rows("one", np.array([[[1], [0]], [[1], [0]]]), num_experts=3)
    for slots, pool, hit_rate in (("2", "layer", 1), ("3", "global", 1), ("2", "global", 0.75)):
        options = SimulateOptions(slots, "lru", pool=pool, expert_profile=str(tmp_path / "profile.npz"))
        assert simulate(trace, options).cells[0].hit_rate == hit_rate


@pytest.mark.parametrize("policy", [*POLICIES, "belady"])
def test_what_a_profile_brought_leaves_in_the_order_of_its_uses(policy: str, tmp_path: Path) -> None:
    """0 and 1 have the slots; for 2 leaves 1, which nobody needs."""
    write_profile(ExpertProfile("made", np.array([[0.9, 0.8, 0.1]]), 10), tmp_path / "profile.npz")
    trace = Trace.of_rows("one", np.array([[[2]], [[0]]]), num_experts=3)
    options = SimulateOptions("2", policy, expert_profile=str(tmp_path / "profile.npz"))
    assert simulate(trace, options).cells[0].hit_rate == 0.5


def test_a_profile_is_what_another_trace_used(tmp_path: Path, capsys: Any) -> None:
    write_trace(skewed(), tmp_path / "trace.npz")
    run = [str(tmp_path / "trace.npz"), "--slots", "50%", "--policy", "default", "--first-tokens", "20", "--json"]
    assert command.main([*run, "--profile-out", str(tmp_path / "profile.npz")]) == 0
    cold = json.loads(capsys.readouterr().out)
    hit_rates = []
    for profile in ("profile.npz", "trace.npz"):
        assert command.main([*run, "--expert-profile", str(tmp_path / profile)]) == 0
        warm = json.loads(capsys.readouterr().out)
        assert warm["warm"] == profile and cold["warm"] is None
        hit_rates.append(warm["cells"][0]["hit_rate"])
    assert hit_rates[0] == hit_rates[1] > cold["cells"][0]["hit_rate"]


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


def test_steps_need_what_their_rows_chose() -> None:
    trace = skewed()
    experts = trace.experts.astype(np.uint8)
    for batch in (None, 1, 2):
        events = events_of(Trace.of_rows("bytes", experts, np.full(3, 50)), batch)
        for rows, step in zip(trace.together(batch), events, strict=True):
            assert [layer.tolist() for layer in step] == [
                sorted(set(experts[rows, number].reshape(-1).tolist())) for number in range(LAYERS)
            ]


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
        ({"quantum": 4}, "give batch"),
        ({"quantum": -1, "batch": 2}, "quantum"),
        ({"record_bytes": "0MB"}, "record_bytes: '0MB' is nothing"),
        ({"compute_ms": -1}, "compute_ms"),
        ({"compute_ms": 1}, "compute_ms: without a link"),
        ({"admission": 0}, "admission: expected a number above 0"),
        ({"admission": 1.0}, "admission: lru only knows"),
        ({"fit_trace": "a.npz"}, "fit_trace: only fitted pools"),
        ({"first_tokens": 0}, "first_tokens"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        SimulateOptions(**options)


def test_a_link_needs_the_size_of_an_expert() -> None:
    with pytest.raises(OptionError, match="add record_bytes"):
        simulate(skewed(), SimulateOptions(link="25GB/s"))


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    other = str(tmp_path / "other.npz")
    write_trace(Trace.of_rows("other", skewed().experts[:, 1:], num_experts=EXPERTS), Path(other))
    for options in ({"expert_profile": other}, {"pool": "fitted", "fit_trace": other}):
        with pytest.raises(
            OptionError, match=f"{list(options)[-1]}: other.npz has 3 layers of 12 experts, and the tra"
        ):
            simulate(skewed(), SimulateOptions(**options))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--profile-out", "profile.csv"], "profile_out: profile.csv is no name"),
        (["--profile-out", "profile.npz", "--make-trace", "made.npz"], "profile_out: nothing is replayed"),
        (["--plot", "hits.png", "--make-trace", "made.npz"], "plot: nothing is replayed"),
    ],
)
def test_outputs_that_cannot_be_are_refused(arguments: list[str], says: str, capsys: Any) -> None:
    assert command.main([*arguments, *([] if "--make-trace" in arguments else ["trace.npz"])]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_the_examples_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text(encoding="utf-8")
    replayed, drawn, made = re.findall(r"^python -m novalm_jax\.simulate (.*)$", text, re.MULTILINE)
    (timed,) = re.findall(r"^python -m novalm_jax\.bench (policy .*)$", text, re.MULTILINE)
    write_trace(skewed(), tmp_path / "recorded.npz")
    monkeypatch.chdir(tmp_path)
    assert command.main(replayed.split()) == 0
    rows = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert rows[0].split("  ")[-1] == "all hidden" and len(rows) == 1 + 3 * 2
    assert command.main(drawn.split()) == 0
    assert (
        Path("hits.png").exists()
        and ExpertProfile.of_trace(skewed()).uses.tolist() == read_profile("profile.npz").uses.tolist()
    )
    assert bench.main([*timed.split(), "--warm-up", "20", "--steps", "5"]) == 0
    capsys.readouterr()
    assert command.main([*made.split(), "--tokens", "5"]) == 0
    assert read_trace(tmp_path / "made.npz").experts.shape == (16 * 5, 48, 8)
