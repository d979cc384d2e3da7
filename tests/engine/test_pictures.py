"""Pictures of a run show the numbers of the run."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from novalm_jax import LLM
from novalm_jax.engine.pictures import draw_experts, draw_needed, draw_timeline
from novalm_jax.engine.report import Report
from novalm_jax.errors import OptionError
from novalm_jax.experts.expert_map import DEVICE, DISK, HOST, ExpertMap
from novalm_jax.timeline import Timeline
from streamed_model import CHOSEN, EXPERTS, GREEDY, IDS, LAYERS, OPTIONS, host_memory, streamed
from tiny_checkpoints import tiny_checkpoint


def dots(axes: Any) -> dict[str, set[tuple[int, int]]]:
    """Where there are dots, (layer, expert) by label."""
    shown = (each for each in axes.collections if isinstance(each, PathCollection))
    return {each.get_label(): {(int(y), int(x)) for x, y in each.get_offsets()} for each in shown}


def test_tiles_are_the_part_of_tokens_and_dots_the_tiers() -> None:
    tiers = np.array([[DEVICE, DISK, HOST], [DISK, DEVICE, -1]], np.int8)
    axes = Figure().subplots()
    draw_experts(ExpertMap(np.array([1, 4]), np.array([[2, 0, 1], [0, 4, 0]]), tiers, 4), axes)
    shown = np.ma.filled(axes.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(shown, [[0.5, 0.0, 0.25], [0.0, 1.0, np.nan]])
    assert dots(axes) == {"on the device": {(0, 0), (1, 1)}, "in host memory": {(0, 2)}}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "4"]


def test_bars_add_up_to_what_was_needed() -> None:
    axes = Figure().subplots()
    draw_needed(10, 3, 5, 2, axes)
    widths = {
        label.get_text(): bar.get_width() for label, bar in zip(axes.get_yticklabels(), axes.patches, strict=True)
    }
    assert widths == {"hit": 7, "prefetched": 3, "missed": 5, "fetched in vain": 2}


def test_a_stretch_of_a_timeline_is_cut_at_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline()
    spans = {"compute": [(0.0, 1.0), (2.0, 3.0)], "stalls": [(1.0, 2.0)]}
    monkeypatch.setattr(timeline, "intervals", lambda track: spans.get(track, []))
    axes = Figure().subplots()
    draw_timeline(timeline, axes, 0.5, 2.5)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "stalls"]
    boxes = [[path.get_extents().intervalx.tolist() for path in each.get_paths()] for each in axes.collections]
    assert boxes == [[[0.0, 500.0], [1500.0, 2000.0]], [[500.0, 1500.0]]]


@pytest.mark.usefixtures("shared")
def test_a_report_knows_where_every_expert_is(moe_folder) -> None:
    with streamed(moe_folder, 12, host_memory=host_memory(20)) as llm:
        llm.generate([IDS[:20]], GREEDY)
        report = llm.report()
    use = report.experts
    assert use is not None and use.tokens == GREEDY.max_tokens - 1
    assert use.uses.shape == use.tiers.shape == (LAYERS, EXPERTS) and use.uses.sum() == use.tokens * LAYERS * CHOSEN
    counts = [int((use.tiers == tier).sum()) for tier in (DEVICE, HOST, DISK)]
    assert counts == [report.experts_on_device, report.experts_on_host, report.experts_on_disk]
    axes = report.plot().axes
    assert len(dots(axes[0])["on the device"]) == 12
    assert "experts" not in report.to_dict()


def test_a_dense_model_and_one_that_is_resident_have_pictures_too(moe_folder, tmp_path) -> None:
    with LLM(tiny_checkpoint(tmp_path / "dense", "llama"), **OPTIONS) as llm:
        report = llm.report()
        assert report.experts is None and len(report.plot().axes) == 1
    with LLM(moe_folder, **OPTIONS) as llm:
        use = llm.report().experts
        assert use is not None and (use.tiers == DEVICE).all() and use.tokens == 0
        assert len(llm.report().plot().axes) == 4


def test_without_matplotlib_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("novalm_jax.compat.find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(OptionError, match="plot: matplotlib draws it, and is not installed"):
        Report().plot()
