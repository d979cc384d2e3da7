"""Every family with experts in tiers: the bits of its resident run, wherever experts lie and however they come.

The models are the golden ones, with layers that come again so that there are always some with experts in a row: then
a quarter of the records is more than one token needs, and the next router can be asked ahead.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np
import pytest

from golden_helpers import GOLDEN, golden
from novalm_jax import LLM
from novalm_jax.checkpoint.load import Checkpoint, abstract_model, read_config
from novalm_jax.engine.placement import Placement
from novalm_jax.experts.fetcher import READERS
from novalm_jax.experts.records import (
    Record,
    RecordReader,
    count_records,
    moe_layers,
    new_record,
    record_layout,
)
from streamed_cells import OTHERS, SLOTS, Cell, all_cells, few_cells, pairwise, pairwise_cells
from streamed_helpers import (
    Answers,
    Questions,
    assert_it_streamed,
    assert_same,
    deeper,
    executor_of,
    for_requests,
    host_room,
    placed_with,
    record_bytes,
    shared_programs,
    wait_for_prefetches,
)
from workspace_helpers import assert_estimated

EMBEDDED = "stories-moe-10m"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz") if moe_layers(read_config(path.parent)[2]))
# One case a family, and those whose experts are laid out or weighed in a way of their own.
FAMILIES = [case for case in CASES if "-" not in case]
VARIANTS = ["dbrx-hub", "gpt_oss-clamp", "llama4_text-chunk", "mixtral-packed"]
CROSSED = [EMBEDDED, "qwen3_moe", "deepseek_v3"]
SPARSE_LAYERS = 4


class Model:
    """A model, what it is asked, and what its resident run answers."""

    def __init__(self, name: str):
        self.folder = None if name == EMBEDDED else GOLDEN / name
        options: dict[str, Any] = {"max_batch": 2, "context_length": 128}
        # Pages for one of them suffice for these prompts; experts, as small as pages, have the rest.
        self.options = {
            dtype: for_requests(1, self.folder, dtype=dtype, **options) for dtype in ("float32", "bfloat16")
        }
        # More than one prefill chunk.
        if self.folder is None:
            prompts = ["Once upon a time", "The little dog was sad because"]
            self.questions = Questions([5 + i * i % 4000 for i in range(80)], 66, prompts, 8)
        else:
            ids = golden(name).ids.tolist()
            self.questions = Questions([*ids[0], *ids[1]] * 2, 80, [ids[0][:9], ids[1]], 8)
        config = Checkpoint.open(self.folder).config
        self.records = count_records(config)
        least = max(moe.experts_per_token for moe in moe_layers(config).values())
        self.slots = {"all": self.records, "half": self.records // 2, "quarter": self.records // 4, "least": least}
        self.resident = functools.cache(self._resident)
        self._placed = functools.cache(self._placed_with)

    def open(self, cell: Cell) -> LLM:
        """The model as a cell says."""
        placement = self._placed("least" if cell.slots == "all" else cell.slots, cell.dtype)
        options = self.options[cell.dtype] | {"prefetch": cell.prefetch, "policy": cell.policy}
        pages = 2 * options["kv_memory"]
        options["host_memory"] = (
            host_room(self.host_slots(cell), record_bytes(placement), pages) if self.host_slots(cell) else 0
        )
        memory = self.resident(cell.dtype)[1] if cell.slots == "all" else placement.budgets.device
        return LLM(self.folder, device_memory=memory, **options)

    def host_slots(self, cell: Cell) -> int:
        """Records that host memory has room for."""
        return {"all": self.records, "half": self.records // 2, "none": 0}[cell.host]

    def _resident(self, dtype: str) -> tuple[Answers, int]:
        """The answers, and the memory that they took."""
        with LLM(self.folder, **self.options[dtype]) as llm:
            assert llm.report().policy == "resident"
            assert_estimated(llm)
            return self.questions.ask(llm), llm.report().device_peak_bytes

    def _placed_with(self, slots: str, dtype: str) -> Placement:
        return placed_with(self.folder, self.slots[slots], **self.options[dtype])


@pytest.fixture(scope="module")
def model_of() -> Iterator[Callable[[str], Model]]:
    """Gives the model of a name; the last one is kept."""
    opened = Checkpoint.open
    with shared_programs() as programs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "open", lambda folder: deeper(opened(folder), SPARSE_LAYERS))

        @functools.lru_cache(maxsize=1)
        def made(name: str) -> Model:
            programs.clear()
            return Model(name)

        yield made


def check(model: Model, cell: Cell) -> None:
    """Fails unless a model gives the bits of its resident run, and works for them as the cell says."""
    with model.open(cell) as llm:
        loaded = llm.report().disk_bytes_read
        assert_same(model.questions.ask(llm), model.resident(cell.dtype)[0])
        if cell.slots == "all":
            return check_all_is_resident(model, llm)
        assert_it_streamed(llm, prefetched=cell.prefetch == "lookahead")
        report, record = llm.report(), executor_of(llm).programs.record_bytes
        assert report.experts_on_device == model.slots[cell.slots]
        assert report.host_bytes == (model.host_slots(cell) or READERS + 1) * record
        assert (report.disk_bytes_read == loaded) == (cell.host == "all")
        assert_estimated(llm)
        if cell.host != "half":
            left = 0 if cell.host == "all" else model.records - report.experts_on_device
            assert report.experts_on_disk == left


def check_all_is_resident(model: Model, llm: LLM) -> None:
    """Fails unless nothing moves, and a decode step is one program."""

    def launches(ids: list[int], **where: Any) -> int:
        before = llm.report().launches
        llm.logits(ids, **where)
        return llm.report().launches - before

    ids, first = model.questions.ids, model.questions.decode_from
    assert launches(ids, decode_from=first) - launches(ids[:first]) == len(ids) - first
    report = llm.report()
    assert (report.policy, report.experts_on_device) == ("resident", model.records)
    assert report.uploads == report.bytes_uploaded == report.expert_misses == report.evictions == 0


def grid(names: Sequence[str], cells_of: Callable[[int], list[Cell]]) -> pytest.MarkDecorator:
    """Models and their cells, one model after the other."""
    cases = [(name, cell) for number, name in enumerate(names) for cell in cells_of(number)]
    return pytest.mark.parametrize(("name", "cell"), cases, ids=str)


OTHER_FAMILIES = [case for case in FAMILIES if case not in CROSSED]


@grid(CROSSED, pairwise_cells)
def test_every_pair_of_values_is_resident_bit_for_bit(
    model_of, name: str, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_prefetches(monkeypatch)
    check(model_of(name), cell)


@grid(OTHER_FAMILIES, few_cells)
def test_streamed_is_resident_bit_for_bit(model_of, name: str, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_prefetches(monkeypatch)
    check(model_of(name), cell)


@grid(VARIANTS, lambda number: [pairwise_cells(number)[-1 - number]])
def test_experts_of_another_layout_stream_as_well(model_of, name, cell, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_prefetches(monkeypatch)
    check(model_of(name), cell)


@pytest.mark.slow
@grid(OTHER_FAMILIES, pairwise_cells)
def test_every_pair_of_values_in_every_family(model_of, name, cell, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_prefetches(monkeypatch)
    check(model_of(name), cell)


@pytest.mark.slow
@grid(CROSSED, lambda number: all_cells())
def test_every_cell_is_resident_bit_for_bit(model_of, name, cell, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_prefetches(monkeypatch)
    check(model_of(name), cell)


def test_all_families_with_experts_are_among_the_models() -> None:
    families = {json.loads((GOLDEN / case / "config.json").read_text())["model_type"] for case in CASES}
    assert families == {json.loads((GOLDEN / case / "config.json").read_text())["model_type"] for case in FAMILIES}
    assert len(families) >= 16


@pytest.mark.parametrize("case", ["deepseek_v3", "dbrx", "gpt_oss"])
def test_layers_that_come_again_hold_other_records_under_the_same_numbers(case: str) -> None:
    """Each expert is a tensor of its own, they are stacked in one, or two of them share one."""
    checkpoint = deeper(Checkpoint.open(GOLDEN / case), SPARSE_LAYERS)
    layout = record_layout(abstract_model(checkpoint.config))
    sparse = moe_layers(checkpoint.config)
    assert len(sparse) == SPARSE_LAYERS
    with closing(RecordReader(checkpoint, np.dtype(np.float32))) as reader:
        for expert in range(next(iter(sparse.values())).num_experts):
            found = set()
            for layer in sparse:
                record = new_record(layout)
                reader.read_into(Record(layer, expert), record)
                found.add(b"".join(array.tobytes() for array in jax.tree.leaves(record)))
            assert len(found) == SPARSE_LAYERS


@pytest.mark.parametrize("turn", range(len(FAMILIES) + 1))
def test_the_cells_of_a_model_hold_every_pair_of_values(turn: int) -> None:
    """In cells that stream, but for what goes with a model that does not."""
    cells = pairwise_cells(turn)
    streamed = [cell for cell in cells if cell.slots != "all"]
    for (i, left), (j, right) in itertools.combinations(enumerate((SLOTS, *OTHERS)), 2):
        assert {(cell[i], cell[j]) for cell in streamed} == set(itertools.product(left, right))
    for place, values in enumerate(OTHERS, 1):
        assert {cell[place] for cell in cells if cell.slots == "all"} == set(values)
    assert len(cells) <= 14


def test_the_few_cells_of_families_together_hold_every_pair_of_values() -> None:
    few = [few_cells(turn) for turn in range(len(OTHER_FAMILIES))]
    for cells in few:
        assert [cell.slots == "all" for cell in cells] == [True, False, False]
        assert {cell.dtype for cell in cells[1:]} == {"float32", "bfloat16"}
    streamed = [cell for cells in few for cell in cells[1:]]
    for (i, left), (j, right) in itertools.combinations(enumerate((SLOTS, *OTHERS)), 2):
        assert {(cell[i], cell[j]) for cell in streamed} == set(itertools.product(left, right))


def test_a_pairwise_array_holds_every_pair_and_few_rows() -> None:
    factors = [range(4), "ab", range(3), "xyz", range(2)]
    rows = pairwise(factors)
    for i, j in itertools.combinations(range(len(factors)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(factors[i], factors[j]))
    assert len(rows) <= 15
    assert pairwise(factors) == rows
