"""Plans: what fits and where it goes agrees with real placements, sizes with what was published, and the command says
so."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from novalm_jax import plan
from novalm_jax.checkpoint.load import Checkpoint, read_config
from novalm_jax.engine.estimate import Estimated
from novalm_jax.engine.fitting import Budgets, Fit, fit
from novalm_jax.engine.forecast import DenseTraffic, Forecaster
from novalm_jax.engine.machine import Machine
from novalm_jax.engine.placement import place
from novalm_jax.engine.planning import _prefill, plan_model, read_planned, weight_sizes
from novalm_jax.engine.programs import capacity_for, prefill_rows
from novalm_jax.errors import BudgetError, ConfigError, OptionError
from novalm_jax.experts.dense import DensePlan, Part
from novalm_jax.experts.memory_plan import MemoryPlan
from novalm_jax.experts.profile import ExpertProfile, write_profile
from novalm_jax.experts.traces import Trace, write_trace
from novalm_jax.options import EngineOptions, PlanOptions
from published_helpers import CONFIGS, published
from streamed_helpers import least_bytes
from tiny_checkpoints import tiny_checkpoint

TESTS = Path(__file__).parents[1]
LAYERS, EXPERTS, CHOSEN = 3, 16, 2
RECORD = 3 * 16 * 32 * 4
MEMORY = ["--device-memory", "24GiB", "--host-memory", "128GiB"]


def config_file(folder: Path, name: str) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(published(name)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "num_hidden_layers": LAYERS}
    return tiny_checkpoint(tmp_path_factory.mktemp("plan") / "model", "qwen3_moe", **fields)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert plan.main([*arguments, "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes_are_the_published_ones(tmp_path: Path) -> None:
    mixtral = read_planned(config_file(tmp_path, "mixtral-8x22b-v0.1")).config
    sizes = weight_sizes(mixtral, PlanOptions())
    assert (sizes.total, sizes.records) == (281_241_268_224, 56 * 8)
    assert sizes.dense + sizes.records * sizes.record == sizes.total
    assert sizes.record == 3 * 6144 * 16384 * 2 and sizes.cache == 56 * 2 * 8 * 128 * 2
    # In the format that it is published in, as the index file says.
    gpt = read_planned(config_file(tmp_path, "gpt-oss-20b"))
    assert weight_sizes(gpt.config, PlanOptions(experts_dtype="mxfp4")).total == 13_761_264_768
    assert gpt.format == "mxfp4"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_published_model_is_planned_or_refused_by_its_configuration(name: str, tmp_path: Path) -> None:
    path = config_file(tmp_path, name)
    try:
        read_planned(path)
    except ConfigError as error:
        assert str(error).startswith(str(path)) and "quantization_config" not in str(error)
        return
    options = PlanOptions(device_memory="24GiB", host_memory="128GiB", hit_rate=0.5)
    found = plan_model(path, options)
    assert found.fit.plan.device_bytes <= 24 * 2**30
    assert found.decode.rate > 0 and found.prefill.rate > 0
    assert found.loadable == ("quantization_config" not in published(name))
    device, host, disk = found.tiers.values()
    assert device <= found.sizes.records and disk == found.sizes.records - max(device, host)
    assert host * found.sizes.record <= 128 * 2**30


# --- one placement, compiled and by formulas -------------------------------------------------------------------------


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.5])
def test_the_plan_of_a_budget_is_what_the_engine_does_with_it(folder: Path, share: float) -> None:
    """With room for what the bound of the workspace is larger than the workspace; without, there are no more slots."""
    checkpoint = Checkpoint.open(folder)
    options = EngineOptions(dtype="float32", max_batch=1, context_length=64, host_memory=20 * RECORD)
    least = least_bytes(folder, dtype="float32", max_batch=1, context_length=64)
    room = least + int(share * LAYERS * EXPERTS * RECORD)
    real = place(checkpoint, replace(options, device_memory=room))
    sizes = Estimated(checkpoint.config, options)
    bound = sizes.resident(64, 1) if real.resident else sizes.streamed(64, 1, real.slots, real.pass_chunks, None)
    more = bound.parts["workspace"] - real.plan.parts["workspace"]
    found = fit(sizes, Budgets(room + more, 20 * RECORD), options, "model")
    assert found == Fit(found.plan, 64, 1, real.kv_host_bytes, real.slots, real.host_slots, real.pass_chunks, None)
    assert real.pages == 1
    assert found.plan.device_bytes == real.plan.device_bytes + more <= room + more
    assert (real.slots, real.host_slots) == {0.0: (2, 20), 0.3: (16, 20), 0.6: (30, 20), 1.5: (0, 0)}[share]
    if not real.resident and more < share * LAYERS * EXPERTS * RECORD:
        assert fit(sizes, Budgets(room, 0), options, "model").slots <= real.slots


@pytest.mark.parametrize("case", sorted(path.parent.name for path in (TESTS / "golden").glob("*/config.json")))
def test_formulas_place_every_golden_in_its_least_memory(case: str) -> None:
    """With as many slots as a token chooses at least; and what the error says is needed is enough."""
    config = read_config(TESTS / "golden" / case)[2]
    options = EngineOptions(max_batch=1, context_length=min(64, config.context_length))
    with pytest.raises(BudgetError) as refused:
        fit(Estimated(config, options), Budgets(1, 0), options, case)
    least = refused.value.least_bytes
    assert fit(Estimated(config, options), Budgets(least, 0), options, case).plan.device_bytes == least
    with pytest.raises(BudgetError):
        fit(Estimated(config, options), Budgets(least - 1, 0), options, case)


def test_smaller_records_make_more_slots(folder: Path) -> None:
    """In what 6 experts of 2 bytes a number take, with three copies under way, there is room for more smaller ones."""
    options = EngineOptions(max_batch=1, context_length=64)
    large, small = (Estimated(Checkpoint.open(folder).config, options, bits) for bits in (None, 4.25))
    assert (large.record_bytes, small.record_bytes) == (3 * 16 * 32 * 2, 3 * 16 * 32 * 17 // 32)
    budgets = Budgets(large.streamed(64, 1, 6, 1, None).device_bytes, 0)
    assert fit(large, budgets, options, "model").slots == 6
    assert fit(small, budgets, options, "model").slots == 9 * large.record_bytes // small.record_bytes - 3 == 30


# --- pages -----------------------------------------------------------------------------------------------------------


def test_memory_that_is_left_becomes_pages_until_all_requests_have_theirs(folder: Path) -> None:
    """One request of the whole context has room at least, and the host has some for those that wait."""
    options = EngineOptions(max_batch=4, context_length=256)
    sizes = Estimated(Checkpoint.open(folder).config, options)
    one, all_of_them = (sizes.resident(256, pages).device_bytes for pages in (4, 16))
    page = sizes.kv_bytes(256, 5) - sizes.kv_bytes(256, 4)
    for room, pages in ((0, 4), (page - 1, 4), (page, 5), (7 * page, 11), (all_of_them - one, 16), (10**9, 16)):
        found = fit(sizes, Budgets(one + room, 10**9), options, "model")
        assert (found.resident, found.pages, found.plan) == (True, pages, sizes.resident(256, pages))
        # Rows can be short where pages are not.
        assert found.kv_host_bytes == 4 * sizes.kv_bytes(256, 4)
    # An eighth of host memory at most.
    assert fit(sizes, Budgets(one, 80_000), options, "model").kv_host_bytes == 10_000


def test_experts_that_are_streamed_leave_a_quarter_of_memory_to_pages(folder: Path) -> None:
    options = EngineOptions(max_batch=4, context_length=256, dense_weights="device")
    sizes = Estimated(Checkpoint.open(folder).config, options)
    budget = sizes.resident(256, 4).device_bytes - 1
    found = fit(sizes, Budgets(budget, 10**9), options, "model")
    assert found.slots > CHOSEN and 4 < found.pages < 16
    assert sizes.kv_bytes(256, found.pages) <= budget / 4 < sizes.kv_bytes(256, found.pages + 1)
    assert found.kv_host_bytes == 4 * sizes.kv_bytes(256, 4)
    # What is said counts, where it is said.
    found = fit(sizes, Budgets(budget, 10**9), replace(options, kv_memory=sizes.kv_bytes(256, 6)), "model")
    assert found.pages == 6


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("pages", [4, 6, 16, 99])
def test_pages_take_no_more_than_is_said(folder: Path, pages: int) -> None:
    checkpoint = Checkpoint.open(folder)
    options = EngineOptions(dtype="float32", max_batch=4, context_length=256, host_memory=10**6)
    sizes = Estimated(checkpoint.config, options)
    options = replace(options, kv_memory=sizes.kv_bytes(256, pages) + 1)
    placed, found = place(checkpoint, options), fit(sizes, Budgets(10**9, 10**6), options, "model")
    assert placed.pages == found.pages == min(pages, 16) and placed.kv_host_bytes == found.kv_host_bytes
    assert placed.plan.parts["KV cache"] == sizes.kv_bytes(256, placed.pages) == placed.programs.page_bytes


def test_a_request_has_room_in_what_pages_may_take(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = Checkpoint.open(folder)
    options = EngineOptions(dtype="float32", max_batch=4, context_length=256)
    sizes = Estimated(checkpoint.config, options)
    for budget in (10**9, sizes.streamed(256, 4, 6, 1, None).device_bytes):
        little = replace(options, kv_memory=sizes.kv_bytes(256, 4) - 1)
        with pytest.raises(OptionError, match=r"kv_memory: \S+ [KM]iB is too little for a request of 256 tokens"):
            fit(sizes, Budgets(budget, 0), little, "model")
        # Where the context is not said, it is what there is room for.
        found = fit(sizes, Budgets(budget, 0), replace(little, context_length="auto"), "model")
        assert found.context_length == 192 if found.resident else found.context_length in (64, 128)
        assert sizes.kv_bytes(found.context_length, found.pages) <= sizes.kv_bytes(256, 4) - 1


# --- hits ------------------------------------------------------------------------------------------------------------


def test_hits_come_from_where_the_options_say(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    rows = np.array([[draw.permutation(4)[:CHOSEN] for _ in range(LAYERS)] for _ in range(200)])
    write_trace(Trace.of_rows("few", rows, num_experts=EXPERTS), tmp_path / "few.npz")
    uses = np.full((LAYERS, EXPERTS), 0.01)
    uses[:, :4] = 0.46
    write_profile(ExpertProfile("profile", uses, 100), tmp_path / "profile.npz")
    config, engine = Checkpoint.open(folder).config, EngineOptions(max_batch=1, context_length=64)
    memory = Estimated(config, engine).streamed(64, 1, 12, 1, None).device_bytes
    record = 3 * 16 * 32 * 2
    fixed = [str(folder), "--device-memory", str(memory), "--host-memory", str(30 * record), "--context-length", "64"]
    found = planned(capsys, *fixed, "--routing", str(tmp_path / "few.npz"))
    assert found["tiers"] == {"device": 12, "host": 30, "disk": 18}
    # Twelve slots hold all that is ever used.
    assert found["hits"]["device"] == found["hits"]["memory"] == 1.0 and found["hits"]["needed"] == LAYERS * CHOSEN
    found = planned(capsys, *fixed, "--expert-profile", str(tmp_path / "profile.npz"))
    total = LAYERS * (4 * 0.46 + 12 * 0.01)
    assert found["hits"]["device"] == pytest.approx(LAYERS * 4 * 0.46 / total)
    assert found["hits"]["memory"] == pytest.approx((LAYERS * 4 * 0.46 + 18 * 0.01) / total)
    found = planned(capsys, *fixed, "--hit-rate", "0.75")
    # Of 36 that have no slot, 18 are on the host.
    assert (found["hits"]["device"], found["hits"]["memory"]) == (0.75, pytest.approx(1 - 0.25 * 18 / 36))
    found = planned(capsys, *fixed, "--like", "deepseek-v2-lite")
    assert found["hits"]["source"].startswith("made-up routing like deepseek-v2-lite, all its 1000 steps")
    assert 0 < found["hits"]["device"] < found["hits"]["memory"] < 1
    assert plan.main([*fixed, "--routing", str(tmp_path / "gone.npz")]) == 2
    assert "gone.npz is no recorded routing" in " ".join(capsys.readouterr().err.split())


# --- speed -----------------------------------------------------------------------------------------------------------


def test_a_prompt_moves_what_is_on_neither_tier(folder: Path) -> None:
    """Two passes of a chunk each: of 48 experts, 12 have slots, and 30 are on the host, which come from there."""
    config, record = Checkpoint.open(folder).config, 3 * 16 * 32 * 2
    options = PlanOptions(prompt_tokens=200, context_length=200, hit_rate=0.5)
    machine = Machine(link=1e5, disk=1e4)
    forecaster = Forecaster(config, np.dtype(np.float16), record, machine)
    kept, in_turn, from_disk = (Part(name, (), None, size) for name, size in (("a", 500), ("b", 7000), ("c", 9000)))
    dense = DensePlan((kept, in_turn, from_disk), kept, frozenset({0}), frozenset({1}))
    fit_of = partial(Fit, MemoryPlan({}), 200, 4, slots=12, host_slots=30)
    chunk = prefill_rows(capacity_for(200))[-1]
    passes = -(-200 // chunk)
    needed = LAYERS * 16 * (1 - (1 - 2 / 16) ** -(-200 // passes))
    for plan_of_dense, moved, read in ((None, 0, 0), (dense, 16000, 9000)):
        found = _prefill(forecaster, options, fit_of(dense=plan_of_dense))
        assert found.parts["link"] == pytest.approx(passes * (needed * record * 36 / 48 + moved) / 1e5)
        assert found.parts["disk"] == pytest.approx(passes * (needed * record * 18 / 48 + read) / 1e4)
        assert found.seconds == found.parts["disk"]
    # Without host memory, what has a slot is not read either.
    alone = _prefill(forecaster, options, Fit(MemoryPlan({}), 200, 4, slots=30))
    assert alone.parts["disk"] == pytest.approx(passes * needed * record * 18 / 48 / 1e4)
    # Chunks that share a pass move half as much, or less, and a resident model moves nothing.
    assert _prefill(forecaster, options, fit_of(pass_chunks=passes)).parts["link"] <= needed * record / 1e5
    still = _prefill(forecaster, options, Fit(MemoryPlan({}), 200, 4))
    assert still.parts["link"] == still.parts["disk"] == 0


def test_dense_weights_that_stream_are_moved_in_every_step(folder: Path) -> None:
    """Where not even they fit, each step moves what comes in turn; from disk, what the host does not hold."""
    options = PlanOptions(context_length=64, host_memory=0, hit_rate=1.0)
    with pytest.raises(BudgetError) as refused:
        plan_model(folder, replace(options, device_memory=1))
    least = refused.value.least_bytes
    assert least is not None
    found = plan_model(folder, replace(options, device_memory=least))
    dense = found.fit.dense
    assert dense is not None
    moved = sum(dense.parts[number].nbytes for number in dense.in_turn)
    assert moved > 0 and DenseTraffic.of(dense) == (moved, moved)
    rates = found.machine
    assert found.decode.parts["link"] == pytest.approx(moved / rates.link)
    assert found.decode.parts["disk"] == pytest.approx(moved / rates.disk)
    assert any("parts of the dense weights come in every step" in note for note in found.notes)
    held = plan_model(folder, replace(options, device_memory=least, host_memory="1GiB"))
    assert held.fit.dense is not None and DenseTraffic.of(held.fit.dense) == (moved, 0)
    assert held.decode.parts["disk"] == 0


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, "qwen3-30b-a3b")
    figures = planned(capsys, str(path), *MEMORY, "--price", "2.5", "--link", "25GB/s", "--hit-rate", "0.75")
    assert {*figures} >= {"sizes", "memory", "tiers", "hits", "machine", "decode", "prefill", "command", "notes"}
    assert figures["machine"]["link"] == {"value": 2.5e10, "source": "given"}
    assert figures["machine"]["disk"]["source"] == "assumed"
    decode = figures["decode"]
    assert figures["cost_per_million_tokens"]["decode"] == pytest.approx(2.5 / 3600 / decode["tokens_per_second"] * 1e6)
    assert decode["bottleneck"] == "link" and decode["parts"]["link"] == pytest.approx(96 * 9 * 2**20 / 2.5e10)
    assert figures["command"][:5] == ["python", "-m", "novalm_jax.generate", "--model", "MODEL"]
    assert plan.main([str(path), *MEMORY, "--price", "2.5", "--experts-dtype", "int8"]) == 0
    text = capsys.readouterr().out
    for part in ("NOT LOADED BY THIS VERSION: experts in int8", "for a million tokens", "assumed", "made-up routing"):
        assert part in text
    assert "\nrun " not in text
    assert plan.main([str(folder), "--device-memory", "1GiB", "--host-memory", "0"]) == 0
    text = capsys.readouterr().out
    assert f"--model {folder}" in text and "0 on disk alone" in text and "hits" not in text


def test_the_command_measures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--device-memory", "1GiB", "--host-memory", "0", "--measure", "--link", "25GB/s"]
    found = planned(capsys, str(folder), *given)
    sources = {name: each["source"] for name, each in found["machine"].items()}
    assert sources.pop("link") == "given" and set(sources.values()) == {"measured"}
    assert not any("assumed" in note for note in found["notes"])


def test_the_command_it_gives_can_be_pasted(folder: Path, tmp_path: Path) -> None:
    named = tmp_path / "my model"
    named.symlink_to(folder)
    found = plan_model(named, PlanOptions(device_memory="1GiB", host_memory=0))
    assert f"--model '{named}' --device-memory" in str(found)


def test_the_command_it_gives_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from novalm_jax import generate

    engine = EngineOptions(max_batch=1, context_length=64)
    memory = str(Estimated(Checkpoint.open(folder).config, engine).streamed(64, 1, 12, 1, None).device_bytes)
    given = ["--device-memory", memory, "--host-memory", "1MiB", "--context-length", "64"]
    found = planned(capsys, str(folder), *given)
    assert 0 < found["tiers"]["device"] < LAYERS * EXPERTS
    more = ["--prompt", "a", "--max-tokens", "2", "--report"]
    assert generate.main([*found["command"][3:], *more]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device-memory", "1MiB"], "device memory at least, and device_memory allows 1048576"),
        (["--hit-rate", "1.5"], "hit_rate: expected a number of at least 0 and at most 1"),
        (["--hit-rate", "0.5", "--routing", "x.npz"], "routing: hit_rate says already how many experts hit"),
        (["--link", "0"], "link: '0' lets nothing through"),
        (["--context-length", "9999999"], "context_length: "),
        (["--batch", "0"], "batch: expected a whole number of at least 1"),
        (["--batch", "99", "--hit-rate", "1"], " batch: 99 is more than 32"),
    ],
)
def test_mistakes(arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, "olmoe-1b-7b-0924")
    assert plan.main([str(path), *MEMORY, *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"model_type": "resnet"}')
    assert plan.main([str(tmp_path / "other.json"), *MEMORY]) == 2
    assert "other.json: Models of type 'resnet' are not supported yet" in " ".join(capsys.readouterr().err.split())
    assert plan.main([str(tmp_path / "gone"), *MEMORY]) == 2


def test_what_is_not_given_is_of_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("novalm_jax.engine.placement.available_ram", lambda: 10 * 2**30)
    found = plan_model(folder, PlanOptions(device_memory="99GiB"))
    assert found.budgets == Budgets(99 * 2**30, 9 * 2**30)
    found = plan_model(folder, PlanOptions(host_memory="99GiB"))
    assert found.budgets == Budgets(9 * 2**30, 99 * 2**30)
    with pytest.raises(OptionError):
        PlanOptions(device_tflops=-1.0)


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        ({"quantization_config": "fp8"}, [], "quantization_config is 'fp8', and no object"),
        ({}, ["--batch", "33"], "batch: 33 is more than 32"),
        (None, [], "There is no file"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any] | None, arguments: list[str], says: str
) -> None:
    path = tmp_path / "config.json"
    if change is not None:
        path.write_text(json.dumps(published("qwen3-30b-a3b") | change))
    assert plan.main([str(path), *MEMORY, *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_prompt_that_the_context_cuts_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, str(folder), "--device-memory", "1GiB", "--context-length", "64", "--prompt-tokens", "1000")
    assert found["prefill"]["tokens"] == 64
    assert any("forecasts are of 64 tokens" in note for note in found["notes"])
