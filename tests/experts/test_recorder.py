"""Recorders and profiles: what decode steps use is counted, kept by sequence and step, written and read again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from novalm_jax.checkpoint.load import read_config
from novalm_jax.config import ModelConfig
from novalm_jax.errors import OptionError
from novalm_jax.experts import recorder as recorder_module
from novalm_jax.experts.policy import POLICIES, lowest
from novalm_jax.experts.profile import ExpertProfile, read_profile, write_profile
from novalm_jax.experts.recorder import Recorder
from novalm_jax.experts.records import Record
from novalm_jax.experts.traces import Trace, write_trace
from novalm_jax.models.router import NONE
from tiny_checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Four layers, the first and the third of which have six experts."""
    fields = {"num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 4, "mlp_only_layers": [1, 3]}
    config: ModelConfig = read_config(tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", **fields))[2]
    return config


def choices(*layers: list[list[int]]) -> Any:
    """ids `[layers, b, k]`, and weights that say which layer, row and rank they are of."""
    ids = np.array(layers)
    return SimpleNamespace(ids=ids, weights=np.arange(ids.size, dtype=np.float32).reshape(ids.shape))


def recorded(config: ModelConfig) -> Recorder:
    """Three sequences, of which two run side by side at a time."""
    recorder = Recorder(config, "a model", record_bytes=99, keeps_rows=True)
    # Padding follows the rows that there are.
    recorder.step([0], choices([[3, 1], [6, 6]], [[0, 5], [6, 6]]))
    recorder.step([7, 0], choices([[3, 2], [1, 4]], [[5, NONE], [5, 4]]))
    recorder.step([8, 7], choices([[3, 5], [0, 4]], [[5, 1], [5, 3]]))
    return recorder


def test_a_trace_has_the_rows_of_every_step_with_their_sequences(config) -> None:
    trace = recorded(config).trace()
    assert trace is not None
    assert trace.sequence.tolist() == [0, 7, 0, 8, 7] and trace.step.tolist() == [1, 2, 2, 3, 3]
    assert trace.layers.tolist() == [0, 2] and (trace.num_experts, trace.record_bytes) == (6, 99)
    assert trace.experts[0].tolist() == [[3, 1], [0, 5]] and trace.experts[1].tolist() == [[3, 2], [5, NONE]]
    # Rank 1 of row 1 in layer 1 of the last step.
    assert trace.weights is not None and trace.weights[4, 1, 1] == 7.0


def test_uses_are_counted_without_padding_and_without_what_was_not_chosen(config) -> None:
    recorder = recorded(config)
    assert recorder.tokens == 5
    assert recorder.uses.tolist() == [[1, 2, 1, 3, 2, 1], [1, 1, 0, 1, 1, 5]]
    profile = recorder.profile()
    assert profile is not None and profile.uses[1].tolist() == [0.2, 0.2, 0.0, 0.2, 0.2, 1.0]
    np.testing.assert_array_equal(profile.uses, ExpertProfile.of_trace(recorder.trace()).uses)


def test_nothing_is_kept_that_nobody_asked_for_nor_more_than_there_is_room_for(config, monkeypatch) -> None:
    assert Recorder(config).trace() is None and Recorder(config).profile() is None
    counting = Recorder(config)
    counting.step([0], choices([[3, 1]], [[0, 5]]))
    assert counting.trace() is None and counting.tokens == 1
    # A token takes two layers, two choices, and two numbers of two bytes each.
    monkeypatch.setattr(recorder_module, "MOST_BYTES", 3 * 16)
    full = recorded(config)
    trace = full.trace()
    assert trace is not None and len(trace.step) == 3 and full.left_out == 2 and full.tokens == 5


@pytest.mark.parametrize("place", ["count_choices", "_keep", "_replace"])
def test_a_step_that_is_broken_off_leaves_no_part_of_it(config, monkeypatch, place) -> None:
    recorder = recorded(config)
    before = recorder.uses.tolist(), recorder.tokens
    trace = recorder.trace()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        holder = {"count_choices": recorder_module, "_keep": Recorder, "_replace": recorder_module._Counted}[place]
        patch.setattr(holder, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            recorder.step([0], choices([[3, 1]], [[0, 5]]))
    assert (recorder.uses.tolist(), recorder.tokens) == before
    recorder.step([0], choices([[3, 1]], [[0, 5]]))
    after = recorder.trace()
    assert trace is not None and after is not None and len(after.step) == len(trace.step) + 1 == recorder.tokens
    np.testing.assert_array_equal(recorder.uses, ExpertProfile.of_trace(after).uses * recorder.tokens)


# --- profiles --------------------------------------------------------------------------------------------------------


def test_a_profile_of_a_model_has_all_of_its_layers(config) -> None:
    uses = np.array([[0.1, 0, 0.9, 0.2, 0, 0], [0, 0.5, 0, 0, 0.3, 1.0]])
    profile = ExpertProfile("some text", uses, 10).of_model(config)
    assert profile.uses.shape == (4, 6) and not profile.uses[[1, 3]].any()
    best = [Record(2, 5), Record(0, 2), Record(2, 1), Record(2, 4), Record(0, 3), Record(0, 0)]
    assert profile.most_used() == best
    with pytest.raises(OptionError, match="has 3 layers of 6 experts, and the model 2 of 6"):
        ExpertProfile("other", np.ones((3, 6)), 1).of_model(config)


def test_a_profile_is_read_as_it_was_written_and_counted_from_a_trace(tmp_path) -> None:
    profile = ExpertProfile("p.npz", np.array([[0.25, 1.0], [0.0, 0.5]]), 4)
    write_profile(profile, tmp_path / "p.npz")
    read = read_profile(tmp_path / "p.npz")
    assert read.tokens == 4 and read.name == "p.npz"
    np.testing.assert_array_equal(read.uses, profile.uses)
    write_trace(Trace.of_rows("t", np.array([[[0], [1]], [[1], [1]]])), tmp_path / "t.npz")
    assert read_profile(tmp_path / "t.npz").uses.tolist() == [[0.5, 0.5], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"nothing of that kind", "no expert profile"),
        ({"uses": np.zeros((2, 2)), "token": 4}, "tokens"),
        ({"uses": np.zeros((2, 2)), "tokens": np.inf}, "infinity"),
        ({"uses": np.zeros(3), "tokens": 4}, r"uses is float64 \[3\]"),
        ({"uses": np.full((2, 2), 1.5), "tokens": 4}, "no parts of 1"),
        ({"uses": np.full((2, 2), np.nan), "tokens": 4}, "no parts of 1"),
        ({"other": np.zeros((2, 2))}, "no recorded routing"),
    ],
    ids=str,
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: Any, says: str) -> None:
    path = tmp_path / "p.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **content)
    with pytest.raises(OptionError, match=f"expert_profile: .*{says}"):
        read_profile(path)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_begins_with_a_profile_keeps_what_was_used_most(name: str) -> None:
    policy = POLICIES[name](2, 4)
    policy.seed(np.array([[0.5, 0.1, 0.4, 0.2], [0.3, 0.0, 0.7, 0.6]]))
    layers, experts = np.zeros(4, np.int64), np.arange(4)
    before = policy.worth(0, 1, layers, experts)
    assert lowest(before, 4).tolist() == [1, 3, 2, 0]
    # What is used is worth more than it was.
    policy.use(0, 0, np.array([1]))
    assert (policy.worth(0, 1, layers, experts) > before).tolist() == [False, True, False, False]
