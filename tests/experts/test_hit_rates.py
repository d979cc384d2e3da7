"""How often experts will be where they are needed: for several requests, and from short recordings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from novalm_jax.config import AttentionConfig, ExpertConfig, LayerConfig, ModelConfig, MoEConfig, NormConfig
from novalm_jax.experts import hit_rates
from novalm_jax.experts.hit_rates import expected_hits
from novalm_jax.experts.profile import ExpertProfile, write_profile
from novalm_jax.experts.traces import Trace, write_trace
from novalm_jax.options import PlanOptions

ATTENTION = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0, rope=None, rotary_dim=0)
LAYER = LayerConfig(8, NormConfig(1e-6), ATTENTION, MoEConfig(4, 1, ExpertConfig(4, "silu")))
CONFIG = ModelConfig("made", 10, 8, 64, NormConfig(1e-6), False, (LAYER, LAYER))


def test_a_profile_for_several_requests(tmp_path: Path) -> None:
    """An expert that a token chooses with probability u is needed by two with 1 - (1 - u)^2."""
    uses = np.array([[0.5, 0.5, 0.0, 0.0], [0.9, 0.1, 0.0, 0.0]])
    write_profile(ExpertProfile("p", uses, 100), tmp_path / "p.npz")
    options = PlanOptions(expert_profile=str(tmp_path / "p.npz"))
    alone = expected_hits(CONFIG, options, 1, 3)
    assert alone[:3] == (pytest.approx(2), pytest.approx(0.9 / 2), pytest.approx(1.9 / 2))
    both = expected_hits(CONFIG, replace(options, batch=2), 1, 3)
    needed = 0.75 + 0.75 + 0.99 + 0.19
    assert both[:3] == (pytest.approx(needed), pytest.approx(0.99 / needed), pytest.approx(2.49 / needed))


def test_what_came_before_fills_the_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are replayed count, and those before them say what lies in slots at first."""
    rows = np.array([[[0], [1]]] * 40 + [[[2], [3]]] * 40)
    write_trace(Trace.of_rows("t", rows, num_experts=4), tmp_path / "t.npz")
    options = PlanOptions(routing=str(tmp_path / "t.npz"))
    monkeypatch.setattr(hit_rates, "_REPLAYED", 80)
    found = expected_hits(CONFIG, options, 2, 8)
    # Other experts than before: they are missed until they are worth more.
    assert (found.needed, found.memory) == (2, 1.0) and 0.5 < found.device < 1
    assert found.source == "t.npz, its last 40 steps with the default policy"
    write_trace(Trace.of_rows("t", rows[:40].repeat(2, axis=0), num_experts=4), tmp_path / "t.npz")
    assert expected_hits(CONFIG, options, 2, 8).device == 1


def test_a_short_recording_says_that_it_fills_the_slots_itself(tmp_path: Path) -> None:
    rows = np.array([[[0], [1]]] * 10)
    write_trace(Trace.of_rows("t", rows, num_experts=4), tmp_path / "t.npz")
    found = expected_hits(CONFIG, PlanOptions(routing=str(tmp_path / "t.npz")), 2, 0)
    assert (found.needed, found.device, found.memory) == (2, 1.0, 1.0)
    assert found.source == "t.npz, all its 10 steps, in slots filled from these steps with the default policy"


def test_a_recording_with_several_sequences_side_by_side(tmp_path: Path) -> None:
    """Experts that two sequences choose in a step are needed once: two in one layer, one in the other."""
    rows = np.concatenate([[[[0], [1]]] * 40, [[[2], [1]]] * 40])
    trace = Trace.of_rows("t", rows, np.array([40, 40]), num_experts=4)
    write_trace(trace, tmp_path / "t.npz")
    found = expected_hits(CONFIG, PlanOptions(routing=str(tmp_path / "t.npz"), batch=2), 3, 0)
    assert (found.needed, found.device) == (3, 1.0) and "all its 40 steps" in found.source
