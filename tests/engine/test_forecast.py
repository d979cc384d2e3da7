"""Forecasts: the formulas, by hand, and what a probe makes of times."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.config import AttentionConfig, ExpertConfig, LayerConfig, ModelConfig, MoEConfig, NormConfig
from novalm_jax.engine import probing
from novalm_jax.engine.estimate import dense_bytes
from novalm_jax.engine.forecast import (
    DenseTraffic,
    Forecaster,
    Needs,
    Passes,
    cache_read,
    dense_read,
    prompt_operations,
)
from novalm_jax.engine.machine import RATES, Machine
from novalm_jax.engine.probing import Probe, insert_seconds
from novalm_jax.engine.streamed import StreamedExecutor
from novalm_jax.errors import OptionError
from novalm_jax.experts.records import Record, RecordReader
from tiny_checkpoints import tiny_checkpoint, write_json

D, F, K, E, LAYERS, V = 64, 16, 2, 8, 3, 100
RECORD = 3 * D * F * 2
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, scale=1.0, rope=None, rotary_dim=0, window=10)
LAYER = LayerConfig(D, NormConfig(1e-6), ATTENTION, MoEConfig(E, K, ExpertConfig(F, "silu")))
CONFIG = ModelConfig("made", V, D, 512, NormConfig(1e-6), False, (LAYER,) * LAYERS)
LAYER_NUMBERS = 2 * D + 2 * D * 64 + 2 * D * 32 + D * E
DENSE = 2 * (V * D + D + LAYERS * LAYER_NUMBERS)  # without the embedding
MACHINE = Machine(
    device_bandwidth=1e6,
    device_operations=1e9,
    link=2e5,
    disk=1e5,
    step_seconds=0.5,
    layer_seconds=0.25,
    cut_layer_seconds=1.0,
    insert_seconds=0.01,
)
TIMES = {"hits": 9.0, "misses": 12.0, "ends": 3.0, "experts": 0.5, "no expert": 0.1, "upload": 0.2, "prompt": 4.0}
FORECASTER = Forecaster(CONFIG, np.dtype(np.float16), RECORD, MACHINE)


def test_what_a_step_reads() -> None:
    assert dense_read(CONFIG, np.dtype(np.float16)) == DENSE
    assert dense_read(replace(CONFIG, tie_embeddings=True), np.dtype(np.float16)) == DENSE
    # Keys and values of two heads, of what the window sees.
    assert cache_read(FORECASTER.config, FORECASTER.dtype, 7) == LAYERS * 7 * 2 * 2 * 16 * 2
    assert cache_read(FORECASTER.config, FORECASTER.dtype, 70) == LAYERS * 10 * 2 * 2 * 16 * 2


def test_a_resident_step_is_its_bytes_and_its_layers() -> None:
    found = FORECASTER.resident_step(1, 7)
    read = DENSE + LAYERS * K * RECORD + cache_read(FORECASTER.config, FORECASTER.dtype, 7)
    assert found.seconds == found.best_seconds == pytest.approx(read / 1e6 + 0.5 + LAYERS * 0.25)
    assert found.rate == pytest.approx(1 / found.seconds) and found.bottleneck == "programs"
    # Two tokens want 2 + 2 * 6 / 8 different experts of 8, if each chose at random.
    both = FORECASTER.resident_step(2, 7)
    more = LAYERS * 1.5 * RECORD + cache_read(FORECASTER.config, FORECASTER.dtype, 7)
    assert both.seconds == pytest.approx(found.seconds + more / 1e6) and both.tokens == 2


def test_misses_go_through_their_stages_one_after_another() -> None:
    hit = FORECASTER.streamed_step(1, 7, Needs(LAYERS * K, 0, 0))
    assert hit.seconds == pytest.approx(FORECASTER.resident_step(1, 7).seconds + LAYERS * 0.75)
    link, insert = RECORD / 2e5, 0.01
    # All are missed: two in each layer, the second on the link while the first is inserted.
    missed = FORECASTER.streamed_step(1, 7, Needs(LAYERS * K, LAYERS * K, 0))
    assert missed.seconds - hit.seconds == pytest.approx(LAYERS * (link + insert + link))
    assert missed.parts["link"] == pytest.approx(LAYERS * K * RECORD / 2e5) and missed.parts["disk"] == 0
    # All come from disk as well, which is the longest stage.
    disk = RECORD / 1e5
    cold = FORECASTER.streamed_step(1, 7, Needs(LAYERS * K, LAYERS * K, LAYERS * K))
    assert cold.seconds - hit.seconds == pytest.approx(LAYERS * (disk + link + insert + disk))
    # One of two is missed: in 3 of 4 layers some, and while it is on its way, the hit is computed.
    half = FORECASTER.streamed_step(1, 7, Needs(LAYERS * K, LAYERS * 1.0, 0))
    expected = 0.75 * (link + insert - RECORD / 1e6) + 0.25 * link
    assert half.seconds - hit.seconds == pytest.approx(LAYERS * expected)
    # Without any overlap it would be more, with all of it less.
    assert half.best_seconds < half.seconds < hit.seconds + LAYERS * (link + insert)


def test_dense_weights_in_turn_hide_under_what_they_are_used_for() -> None:
    needs = Needs(LAYERS * K, 0, 0)
    alone = FORECASTER.streamed_step(1, 7, needs).seconds
    assert FORECASTER.streamed_step(1, 7, needs, DenseTraffic(1000, 0)).seconds == alone
    assert FORECASTER.streamed_step(1, 7, needs, DenseTraffic(10**7, 0)).seconds == 50
    assert FORECASTER.streamed_step(1, 7, needs, DenseTraffic(10**7, 10**7)).seconds == 100


def test_a_prompt_takes_as_long_as_its_slowest_part() -> None:
    attention = 2 * 4 * 2 * 16 * 100 * 10
    expert = 3 * D * F
    rows = 100 * K
    assert prompt_operations(CONFIG, 100, spread=False) == LAYERS * (
        200 * LAYER_NUMBERS + attention + 2 * rows * expert
    )
    # Each of eight experts, all of them touched, is filled up by half a group of 64.
    spread = prompt_operations(CONFIG, 100) - prompt_operations(CONFIG, 100, spread=False)
    assert spread == pytest.approx(LAYERS * 2 * 8 * 32 * expert)
    moving = FORECASTER.prompt(100, Passes(64, 3, 1e6, 0.0))
    assert moving.seconds == pytest.approx(3 * 1e6 / 2e5) and moving.bottleneck == "link"
    assert FORECASTER.prompt(100, Passes(64, 3, 1e6, 1e6)).seconds == pytest.approx(3 * 1e6 / 1e5)
    still = FORECASTER.prompt(100, Passes(64, 1, 0.0, 0.0))
    assert still.parts["device memory"] == pytest.approx(2 * (DENSE + LAYERS * E * RECORD) / 1e6)
    assert still.seconds == max(still.parts.values())


def test_costs() -> None:
    # 4 tokens in 2 seconds: a million in 500,000.
    found = replace(FORECASTER.resident_step(1, 7), tokens=4, seconds=2.0)
    assert found.cost(3.6) == pytest.approx(500)


def test_rates_say_where_they_are_from() -> None:
    machine = MACHINE.with_rates("measured", {"link": 7.0, "disk": 8.0}).with_rates("given", {"disk": 9.0})
    assert [machine.source(name) for name in ("link", "disk", "device_bandwidth")] == ["measured", "given", "assumed"]
    assert (machine.link, machine.disk, machine.device_bandwidth) == (7.0, 9.0, 1e6)
    assert set(machine.to_dict()) == set(RATES) and len(machine.rows()) == len(RATES)


@pytest.mark.parametrize(("upload", "insert"), [(0.2, 0.05), (0.05, 0.2), (0.1, 0.1), (0.1, 0.0)])
def test_inserting_is_what_is_left_of_the_time_of_misses(upload: float, insert: float) -> None:
    layer = upload + insert + 3 * max(upload, insert)
    assert insert_seconds(layer, upload, 4) == pytest.approx(insert)


def test_a_probe_finds_the_machine_that_its_times_are_of() -> None:
    """A step on the machine that follows from made-up times takes what was measured."""
    probe = Probe(CONFIG, "float32", 1)
    machine = probe.machine({**TIMES, "experts": 0.2, "whole": 5.0})
    layers = len(probe._config.layers)
    cut = replace(CONFIG, layers=(LAYER,) * layers)
    record = 2 * RECORD
    assert probe.record_bytes == record
    assert machine.device_bandwidth == pytest.approx(K * record / 0.1) and machine.link == pytest.approx(record / 0.2)
    forecaster = Forecaster(cut, np.dtype(np.float32), record, machine)
    nothing_cached = 0
    assert all(rate >= 0 for rate in (machine.step_seconds, machine.layer_seconds, machine.cut_layer_seconds))
    assert forecaster.resident_step(1, nothing_cached).seconds == pytest.approx(5.0)
    assert forecaster.streamed_step(1, nothing_cached, Needs(layers * K, 0, 0)).seconds == pytest.approx(9.0)
    assert forecaster.streamed_step(1, nothing_cached, Needs(layers * K, layers * K, 0)).seconds == pytest.approx(12.0)


@pytest.mark.parametrize(
    "noise",
    [
        {"no expert": 0.5},
        {"no expert": 0.7},
        {"no expert": 0.5 - 1e-12},
        {"ends": 9.5, "hits": 9.0},
        {"ends": 9.0 - 1e-12},
        {"ends": 1e-6},
        {"ends": 9.5, "whole": 8.0, "no expert": 0.6},
        {"misses": 8.0},
    ],
)
def test_noise_makes_no_rate_below_nothing(noise: dict[str, float]) -> None:
    """A difference that is noise is left aside: all of a wave's time, or of a step's, says how fast memory is."""
    probe = Probe(CONFIG, "float32", 1)
    times = {**TIMES, **noise}
    machine = probe.machine(times)
    rates = [getattr(machine, name) for name in RATES]
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates)
    assert all(rate > 0 for rate in (machine.device_bandwidth, machine.device_operations, machine.link))
    layers = probe._read * LAYERS
    step = layers + probe._ends_read
    wave, least = (0.5 if times["no expert"] > 0.4 else 0.4), min(times.get("whole", 9.0), times["hits"])
    moving = least - times["ends"] if least - times["ends"] > 0.1 else least
    assert len(probe._config.layers) == LAYERS
    assert machine.device_bandwidth == pytest.approx(
        max(K * probe.record_bytes / wave, layers / moving, step / max(least, times["ends"]))
    )


def test_where_layers_are_faster_than_experts_they_say_how_fast_memory_is() -> None:
    """Then a layer costs nothing beyond its bytes, and a step still takes what was measured."""
    probe = Probe(CONFIG, "float32", 1)
    layers = len(probe._config.layers)
    read, ends = layers * probe._read, probe._ends_read
    expert = K * probe.record_bytes / 1e6
    times = {**TIMES, "experts": 0.1 + expert, "ends": 1.0 + ends / 2e6}
    times |= {"hits": times["ends"] + 3 * read / 2e6, "whole": times["ends"] + read / 2e6}
    machine = probe.machine({**times, "misses": times["hits"]})
    assert machine.device_bandwidth == pytest.approx(2e6)
    assert machine.step_seconds == pytest.approx(1.0) and machine.layer_seconds == pytest.approx(0.0, abs=1e-12)
    assert machine.cut_layer_seconds == pytest.approx(2 * read / 2e6 / layers)
    forecaster = Forecaster(probe._config, np.dtype(np.float32), probe.record_bytes, machine)
    assert forecaster.resident_step(1, 0).seconds == pytest.approx(times["whole"])
    assert forecaster.streamed_step(1, 0, Needs(layers * K, 0, 0)).seconds == pytest.approx(times["hits"])


def test_where_the_ends_are_faster_than_all_else_layers_cost_less() -> None:
    """A step costs nothing beyond its bytes, and takes what was measured in a model of its depth."""
    probe = Probe(CONFIG, "float32", 1)
    layers, expert = LAYERS * probe._read, K * probe.record_bytes / 1e6
    times = {**TIMES, "experts": 0.1 + expert, "ends": probe._ends_read / 5e6}
    times |= {"hits": times["ends"] + 2 * layers / 1e6, "whole": times["ends"] + layers / 1e6}
    machine = probe.machine({**times, "misses": times["hits"]})
    assert 1e6 < machine.device_bandwidth < 5e6 and machine.step_seconds == 0
    forecaster = Forecaster(CONFIG, np.dtype(np.float32), probe.record_bytes, machine)
    assert forecaster.resident_step(1, 0).seconds == pytest.approx(times["whole"])
    assert forecaster.streamed_step(1, 0, Needs(LAYERS * K, 0, 0)).seconds == pytest.approx(times["hits"])


def test_memory_is_counted_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both streamed models, with slots and host memory each; the resident one only where it fits beside them."""
    probe = Probe(CONFIG, "float32", 1)
    slots = probe._programs.slots
    held = probe._streamed_bytes()
    weights = dense_bytes(probe._config, np.dtype(np.float32))
    assert held > weights + 2 * 2 * slots * probe.record_bytes + 2 * 3 * probe.record_bytes
    monkeypatch.setattr(probing, "_room", lambda: held + probe._resident_bytes() - 1)
    assert "whole" not in probe.time()
    monkeypatch.setattr(probing, "_room", lambda: held - 1)
    with pytest.raises(OptionError, match="half of the memory"):
        Probe(CONFIG, "float32", 1)


def test_the_disk_is_timed_on_files_that_were_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two files, a record each opens them; then they are forgotten, and other records are timed."""
    folder = tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-{1 + ('layers.1.' in name):05}-of-00002.safetensors" for name in tensors}
    for file in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == file}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": shards})
    done: list[Any] = []
    read, forget = RecordReader.read_into, RecordReader.forget_pages

    def noted(self: RecordReader, record: Record, out: Any) -> None:
        done.append(record)
        read(self, record, out)

    def forgotten(self: RecordReader) -> None:
        done.append({Path(file).name for file in self._reader._open_files})
        forget(self)

    monkeypatch.setattr(RecordReader, "read_into", noted)
    monkeypatch.setattr(RecordReader, "forget_pages", forgotten)
    checkpoint = Checkpoint.open(folder)
    probe = Probe(checkpoint.config, "float32", 1)
    machine = probe.machine(TIMES, checkpoint)
    assert done == [Record(0, 0), Record(1, 0), set(shards.values()), Record(0, 1), Record(1, 1)]
    assert machine.disk > 0 and machine.source("disk") == "measured"


def test_a_probe_runs_hits_and_misses_alone() -> None:
    probe = Probe(CONFIG, "float32", 2)
    seen = {}
    streamed = probe._streamed

    def kept(slots: int, *more: Any) -> StreamedExecutor:
        seen[slots] = streamed(slots, *more)
        return seen[slots]

    probe._streamed = kept
    times = probe.time()
    assert set(times) == {"hits", "misses", "ends", "experts", "no expert", "upload", "whole", "prompt"}
    assert all(seconds > 0 for seconds in times.values())
    all_, few = (seen[slots].streamer for slots in sorted(seen, reverse=True))
    assert all_.misses == len(probe._config.layers) * K and all_.hits > 10 * all_.misses
    assert few.hits == 0 and few.misses == few.evictions + K
    machine = probe.machine(times)
    rates = [getattr(machine, name) for name in RATES]
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates)
    assert all(rate > 0 for rate in (machine.device_bandwidth, machine.device_operations, machine.link))


def test_a_model_without_experts_is_not_measured() -> None:
    dense = replace(LAYER, feed_forward=replace(LAYER.feed_forward, experts_per_token=1))
    assert Probe(replace(CONFIG, layers=(dense,)), "float32", 1).record_bytes == 2 * RECORD
    with pytest.raises(OptionError, match="no routed experts"):
        Probe(replace(CONFIG, layers=()), "float32", 1)
