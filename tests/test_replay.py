"""Recorded routing: what does not fit, and that decoding really uses what was recorded."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from novalm_jax import SamplingParams, bench
from novalm_jax.benchmarks.replaying import ReplayingLLM, predict
from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.engine.streamed import StreamedExecutor
from novalm_jax.errors import OptionError
from novalm_jax.experts import fetcher as fetcher_module
from novalm_jax.experts.governor import Governor
from novalm_jax.experts.policy import POLICIES
from novalm_jax.experts.simulator import Cache
from novalm_jax.experts.streamer import Streamer
from novalm_jax.experts.traces import Trace
from streamed_helpers import least_bytes
from tiny_checkpoints import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("shared")

LAYERS, EXPERTS, CHOSEN, SLOTS = 3, 16, 2, 20
PROMPT = [11]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_batch": 1, "context_length": 64}
RECORD = 3 * 16 * 32 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    fields = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "num_hidden_layers": LAYERS}
    return tiny_checkpoint(tmp_path_factory.mktemp("replay") / "model", "qwen3_moe", **fields)


@pytest.fixture(scope="module")
def memory(folder) -> int:
    """Device memory for so many slots."""
    return least_bytes(folder, **OPTIONS) + (SLOTS - CHOSEN) * RECORD


def recording(tokens: int = 40, layers: int = LAYERS, chosen: int = CHOSEN, experts: int = EXPERTS) -> Trace:
    """Some experts more often than others."""
    draw = np.random.default_rng(5)
    likely = draw.dirichlet(np.full(experts, 0.5), layers)
    chosen_ones = [[draw.choice(experts, chosen, False, p) for p in likely] for _ in range(tokens)]
    return Trace.of_rows("made.npz", np.array(chosen_ones, np.uint8))


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


# --- what fits -------------------------------------------------------------------------------------------------------


def test_more_layers_and_choices_than_the_model_has_are_left_out(folder) -> None:
    config = Checkpoint.open(folder).config
    large = recording(layers=LAYERS + 2, chosen=CHOSEN + 2)
    large.experts[:, LAYERS:] = 200
    large.experts[:, :, CHOSEN:] = 200
    np.testing.assert_array_equal(large.fit(config), large.experts[:, :LAYERS, :CHOSEN])


@pytest.mark.parametrize(("layers", "chosen", "experts"), [(2, 2, 16), (3, 1, 16), (3, 2, 40)])
def test_a_recording_of_another_shape_is_refused_with_both(folder, layers, chosen, experts) -> None:
    recorded = recording(400, layers, chosen, experts)
    says = (
        rf"routing: made.npz has 400 tokens in {layers} layers, each with {chosen} experts numbered up to "
        rf"{recorded.experts.max()}, and the model has 3 layers that choose 2 of 16 experts"
    )
    with pytest.raises(OptionError, match=says):
        recorded.fit(Checkpoint.open(folder).config)


def test_a_model_without_experts_replays_nothing(tmp_path) -> None:
    with pytest.raises(OptionError, match="0 layers that choose 0 of 0 experts"):
        recording().fit(Checkpoint.open(tiny_checkpoint(tmp_path / "dense", "llama")).config)


def test_the_bench_says_what_does_not_fit(folder, memory, tmp_path, capsys) -> None:
    np.savez(tmp_path / "small.npz", experts=recording(layers=2).experts)
    np.savez(tmp_path / "right.npz", experts=recording().experts)
    model = ["decode", str(folder), "--tokens", "4", "--dtype", "float32", "--max-batch", "1"]
    model += ["--context-length", "64"]
    small = [*model, "--device-memory", str(memory), "--routing"]
    for arguments, says in (
        ([*small, str(tmp_path / "small.npz")], "small.npz has 40 tokens in 2 layers"),
        ([*small, str(tmp_path / "gone.npz")], "gone.npz is no recorded routing"),
        ([*model, "--routing", str(tmp_path / "right.npz")], "There is room for all experts on the device"),
        ([*model, "--accuracy", "0.5"], "accuracy: only recorded routing has one"),
        ([*model, "--accuracy", "2"], "accuracy: expected a number of at least 0 and at most 1"),
    ):
        assert bench.main(arguments) == 2
        assert says in " ".join(capsys.readouterr().err.split())


# --- predictions -----------------------------------------------------------------------------------------------------


def test_predictions_are_as_right_as_asked_for() -> None:
    experts = np.array([3, 9, 1, 12])
    right = 0
    for seed in range(500):
        guess = predict(experts, 16, 0.8, (seed, 0))
        assert len({*guess.tolist()}) == 4 and guess.max() < 16
        right += int((guess == experts).sum())
        # What is not right is wrong: no other true expert in its place.
        assert set(guess[guess != experts]).isdisjoint(experts)
        np.testing.assert_array_equal(guess, predict(experts, 16, 0.8, (seed, 0)))
    assert 0.76 < right / 2000 < 0.84
    np.testing.assert_array_equal(predict(experts, 16, 1.0, (0, 0)), experts)
    assert not (predict(experts, 16, 0.0, (0, 0)) == experts).any()
    # Where nearly all are chosen, there are not enough others; 5 is nobody.
    assert sorted(predict(np.arange(4), 5, 0.0, (0, 0))) == [4, 5, 5, 5]


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.fixture
def used(monkeypatch) -> list[tuple[int, list[int], list[int]]]:
    """Every layer of every decode step: its number, the experts that were brought, and those that were computed."""
    noted: list[tuple[int, list[int], list[int]]] = []
    brought: list[list[int]] = []
    waves, through = Streamer.waves, StreamedExecutor._through_experts

    def noted_waves(self: Any, layer: int, experts: Any, kept: Any = None) -> Any:
        brought.append(sorted(experts))
        return waves(self, layer, experts, kept)

    def noted_through(self: Any, layer: int, dense: Any, states: Any, slots: Any) -> Any:
        ids = np.asarray(states[0].routing.ids)
        if len(ids) < 64:
            noted.append((layer, brought[-1], sorted(ids[ids < EXPERTS].tolist())))
        return through(self, layer, dense, states, slots)

    monkeypatch.setattr(Streamer, "waves", noted_waves)
    monkeypatch.setattr(StreamedExecutor, "_through_experts", noted_through)
    return noted


def test_decode_steps_use_the_recorded_experts_and_begin_again_after_the_last(folder, memory, used) -> None:
    recorded = recording(tokens=7)
    with ReplayingLLM(folder, recorded, device_memory=memory, **OPTIONS) as llm:
        llm.generate([PROMPT], greedy(6))
        llm.generate([PROMPT], greedy(6))
        expected = [
            (layer, sorted(experts), sorted(experts))
            for token in (0, 1, 2, 3, 4, 5, 6, 0, 1, 2)
            for layer, experts in enumerate(recorded.experts[token].tolist())
        ]
        assert used == expected
        llm.replaying.start_over()
        llm.generate([PROMPT], greedy(2))
        assert used[-LAYERS:] == expected[:LAYERS]


@pytest.mark.parametrize("policy", POLICIES)
def test_hits_are_those_of_a_simulation(folder, memory, monkeypatch, policy) -> None:
    arrived = fetcher_module.Fetcher.arrived

    def together(self: Any, fetches: Any, wait: bool) -> Any:
        """What a layer lacks comes in one wave, so that it does not matter what came when."""
        while wait and len(arrived(self, fetches, wait)) < len(fetches):
            time.sleep(1e-3)
        return arrived(self, fetches, wait)

    monkeypatch.setattr(fetcher_module.Fetcher, "arrived", together)
    recorded, tokens = recording(), 35
    options = OPTIONS | {"policy": policy, "prefetch": "off", "device_memory": memory}
    with ReplayingLLM(folder, recorded, **options) as llm:
        stream = llm.stream(PROMPT, greedy(2 + tokens))
        stream.advance()
        streamer = llm.replaying.streamer
        before = streamer.hits, streamer.misses
        hits = simulated_hits(streamer, recorded.experts[1 : 1 + tokens])
        while stream.token_count < 2 + tokens:
            stream.advance()
        assert (streamer.hits - before[0], streamer.misses - before[1]) == (hits, tokens * LAYERS * CHOSEN - hits)
        assert hits > 0 and streamer.evictions > SLOTS


def simulated_hits(streamer: Streamer, tokens: np.ndarray) -> int:
    """What would hit from here on, by the simulator, with the policy and the slots as they are now."""
    cache = Cache(copy.deepcopy(streamer._policy), [copy.deepcopy(streamer._table)])
    for step, layers in enumerate(np.sort(tokens.astype(int)), streamer._step + 1):
        cache.step(step, list(layers))
    counted = cache.counted()
    return int((counted.needed - counted.missed).sum())


@pytest.fixture
def missed(monkeypatch) -> list[int]:
    """Misses of each layer, where prefetches have all the time they need."""
    misses = [0] * LAYERS
    waves = Streamer.waves

    def patient(self: Any, layer: int, experts: Any, kept: Any = None) -> Any:
        while any(fetch.arrays is None for fetch in self._ahead.values()):
            time.sleep(1e-3)
        before = self.misses
        arrivals = waves(self, layer, experts, kept)
        if kept is None:
            misses[layer] += self.misses - before
        return arrivals

    monkeypatch.setattr(Streamer, "waves", patient)
    return misses


def test_an_oracle_misses_in_the_first_layer_alone(folder, memory, missed, monkeypatch) -> None:
    """With slots for all that is used: what is brought for one layer may be in the way of the next."""
    # Prefetching in every step, however long they take.
    monkeypatch.setattr(Governor, "took", lambda self, seconds: None)
    recorded = recording(tokens=30, experts=4)
    with ReplayingLLM(folder, recorded, device_memory=memory, **OPTIONS) as llm:
        llm.replaying.set_prefetch(True, 1.0)
        llm.generate([PROMPT], greedy(30))
        report = llm.report()
        # Nobody looks ahead to the first one.
        assert missed[0] > 0 and missed[1:] == [0] * (LAYERS - 1)
        assert report.prefetch_hits > 0 and report.prefetch_wasted == report.evictions == 0
        llm.replaying.replay(recorded.experts + 12)
        llm.replaying.set_prefetch(False, None)
        llm.generate([PROMPT], greedy(30))
        assert min(missed) > 0 and llm.report().prefetch_hits == report.prefetch_hits


def test_lookahead_that_is_never_right_brings_nothing_that_is_needed(folder, memory, missed) -> None:
    with ReplayingLLM(folder, recording(), device_memory=memory, **OPTIONS) as llm:
        llm.replaying.set_prefetch(True, 0.0)
        llm.generate([PROMPT], greedy(12))
        report = llm.report()
        assert report.prefetch_hits == 0 < report.prefetch_wasted
        assert min(missed) > 0


def test_what_the_model_chose_itself_can_be_replayed(folder, memory) -> None:
    """Its text comes again, and lookahead is its own until an accuracy is given."""
    with ReplayingLLM(folder, None, device_memory=memory, **OPTIONS) as llm:
        (own,) = llm.generate([PROMPT], greedy(10))
        seen = llm.replaying.seen
        assert np.array(seen).shape == (9, LAYERS, CHOSEN)
        llm.replaying.replay(seen)
        (again,) = llm.generate([PROMPT], greedy(10))
        assert again.token_ids == own.token_ids and len(seen) == 9
        llm.replaying.replay((np.array(seen) + 1) % EXPERTS)
        (other,) = llm.generate([PROMPT], greedy(10))
        assert other.token_ids != own.token_ids


def test_the_bench_replays_on_a_slow_link(folder, memory, tmp_path, capsys) -> None:
    path = tmp_path / "recorded.npz"
    np.savez(path, experts=recording().experts)
    options = ["decode", str(folder), "--dtype", "float32", "--max-batch", "1", "--context-length", "64"]
    options += ["--device-memory", str(memory), "--prompt-tokens", "1", "--tokens", "22"]
    options += ["--routing", str(path)]
    assert bench.main([*options, "--prefetch", "off", "--link", "1MB/s", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["routing"] == {"routing": str(path), "accuracy": 0.8}
    counters = figures["counters"]
    assert counters["expert_hits"] + counters["expert_misses"] == 20 * LAYERS * CHOSEN
    assert figures["seconds"] >= counters["expert_misses"] * RECORD / 1e6 > 0
    assert bench.main([*options, "--accuracy", "0.9"]) == 0
    text = capsys.readouterr().out
    assert f"routing  {path}, replayed; lookahead is right in 90 %\n" in text
