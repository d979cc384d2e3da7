"""What runs leave behind of their routing, and runs that start from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax import LLM, load_model
from novalm_jax.errors import OptionError
from novalm_jax.experts.profile import ExpertProfile, read_profile, write_profile
from novalm_jax.experts.records import Record
from novalm_jax.experts.slots import NOWHERE
from novalm_jax.experts.traces import Trace, read_trace
from novalm_jax.generate import main
from streamed_helpers import assert_same, executor_of
from streamed_model import CHOSEN, EXPERTS, GREEDY, IDS, LAYERS, OPTIONS, QUESTIONS, host_memory, record_size, streamed
from tiny_checkpoints import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("shared")

PROMPTS = [IDS[:20], IDS[30:63], IDS[5:9]]


def run(llm: LLM) -> list[tuple[int, ...]]:
    with llm:
        return [tuple(out.token_ids) for out in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def resident_run(moe_folder, tmp_path_factory) -> tuple[list[tuple[int, ...]], Trace, Path]:
    """The texts, the trace, and the profile of a run with everything on the device."""
    folder = tmp_path_factory.mktemp("recorded")
    options: dict[str, Any] = {"trace_out": folder / "trace.npz", "profile_out": folder / "profile.npz"}
    texts = run(LLM(moe_folder, dtype="float32", **OPTIONS, **options))
    return texts, read_trace(folder / "trace.npz"), folder / "profile.npz"


def by_sequence(trace: Trace) -> dict[int, np.ndarray]:
    return {int(trace.sequence[rows[0]]): trace.experts[rows] for rows in trace.sequences()}


def test_a_trace_holds_what_the_model_chooses_for_every_decoded_token(moe_folder, resident_run) -> None:
    texts, trace, _ = resident_run
    model = load_model(moe_folder, dtype="float32")
    assert trace.record_bytes == record_size() and trace.layers.tolist() == [*range(LAYERS)]
    assert trace.experts.shape[1:] == (LAYERS, CHOSEN) and trace.num_experts == EXPERTS
    recorded = by_sequence(trace)
    assert len(recorded) == len(PROMPTS)
    for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        # The last token is chosen and not run.
        ids = [*prompt, *text[:-1]]
        _, routers = model.traced(jnp.array([ids]))
        chosen = np.stack([np.asarray(router.ids)[len(prompt) :] for router in routers], axis=1)
        np.testing.assert_array_equal(recorded[number], chosen)
    # Rows of a step ran together.
    assert np.unique(trace.step, return_counts=True)[1].max() == len(PROMPTS)


@pytest.mark.parametrize("prefetch", ["off", "lookahead"])
def test_where_experts_are_changes_no_trace(moe_folder, resident_run, tmp_path, prefetch) -> None:
    path = tmp_path / "trace.npz"
    assert run(streamed(moe_folder, CHOSEN, prefetch=prefetch, trace_out=path)) == resident_run[0]
    trace = read_trace(path)
    for number, experts in by_sequence(resident_run[1]).items():
        np.testing.assert_array_equal(by_sequence(trace)[number], experts)
    assert trace.weights is not None and resident_run[1].weights is not None
    order, other = np.argsort(trace.sequence, kind="stable"), np.argsort(resident_run[1].sequence, kind="stable")
    np.testing.assert_array_equal(trace.weights[order], resident_run[1].weights[other])


def test_a_profile_counts_the_trace(resident_run) -> None:
    profile = read_profile(resident_run[2])
    np.testing.assert_array_equal(profile.uses, ExpertProfile.of_trace(resident_run[1]).uses)
    assert profile.tokens == len(resident_run[1].step)


# --- starting from a profile -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> tuple[Path, list[Record]]:
    """A profile of no run, in which every expert has a use of its own, and its experts, the most used ones first."""
    path = tmp_path_factory.mktemp("profile") / "profile.npz"
    uses = np.random.default_rng(3).permutation(np.arange(1, LAYERS * EXPERTS + 1) / 64).reshape(LAYERS, EXPERTS)
    made = ExpertProfile("made up", uses, 64)
    write_profile(made, path)
    return path, made.most_used()


@pytest.mark.parametrize("host", [0, 16, LAYERS * EXPERTS])
@pytest.mark.parametrize("policy", ["default", "lru"])
def test_the_most_used_experts_are_there_from_the_start_and_no_bit_changes(
    moe_folder, resident, profile, host, policy
) -> None:
    path, order = profile
    options = {"host_memory": host_memory(host), "policy": policy, "expert_profile": path}
    with streamed(moe_folder, 12, **options) as llm:
        report, streamer = llm.report(), executor_of(llm)._experts
        assert (report.experts_on_device, report.uploads, report.expert_misses) == (12, 0, 0)
        assert report.experts_on_host == max(0, min(host, LAYERS * EXPERTS - 12))
        assert {record for record in order if streamer._table.find(record) != NOWHERE} == set(order[:12])
        if policy == "lru":
            # What leaves first is what was used least of them.
            slot = streamer._leaving(0, ())
            assert slot is not None and streamer._table.record_in(slot) == order[11]
        assert_same(QUESTIONS.ask(llm), resident["float32"])
        assert llm.report().evictions > 0


def test_a_profile_that_can_do_nothing_is_told(moe_folder, profile, caplog) -> None:
    with LLM(moe_folder, dtype="float32", expert_profile=profile[0], **OPTIONS) as llm:
        assert llm.report().policy == "resident"
    assert "expert_profile: without effect" in caplog.text


def test_a_profile_of_another_model_is_refused(tmp_path, profile) -> None:
    other = tiny_checkpoint(tmp_path / "other", "qwen3_moe", num_experts=8, num_experts_per_tok=2)
    with pytest.raises(
        OptionError, match=f"expert_profile: .* has {LAYERS} layers of {EXPERTS} experts, and the model"
    ):
        LLM(other, expert_profile=profile[0], **OPTIONS)


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_command_says_where_it_wrote_what(tmp_path, capsys) -> None:
    paths = {name: tmp_path / f"{name}.npz" for name in ("trace", "profile")}
    arguments = ["--prompt", "Once upon a time", "--max-tokens", "4", "--temperature", "0"]
    arguments += ["--trace-out", str(paths["trace"]), "--profile-out", str(paths["profile"])]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    assert f"trace_out: {paths['trace']}" in said and f"profile_out: {paths['profile']}" in said
    assert len(read_trace(paths["trace"]).step) == read_profile(paths["profile"]).tokens == 3


def test_without_a_decoded_token_there_is_no_file(moe_folder, tmp_path, caplog) -> None:
    with LLM(moe_folder, trace_out=tmp_path / "t.npz", profile_out=tmp_path / "p.npz", **OPTIONS) as llm:
        llm.logits(IDS)
    assert not list(tmp_path.iterdir())
    assert caplog.text.count("no token was decoded") == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trace_out": "trace.json"}, "trace_out: trace.json is no name of an .npz file"),
        ({"profile_out": "a.npz", "trace_out": "a.npz"}, "trace_out and profile_out are to write the same file"),
        ({"trace_out": "nowhere/a.npz"}, "trace_out: there is no folder"),
        ({"expert_profile": ""}, "expert_profile: expected the path of a file"),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_is_refused(moe_folder, options, says) -> None:
    with pytest.raises(OptionError, match=says):
        LLM(moe_folder, **options, **OPTIONS)


def test_a_model_without_experts_has_no_trace(tmp_path) -> None:
    dense = tiny_checkpoint(tmp_path / "dense", "llama")
    with pytest.raises(OptionError, match="trace_out: this model has no routed experts"):
        LLM(dense, trace_out=tmp_path / "t.npz", **OPTIONS)
