"""The residency table and its reverse."""

import numpy as np
import pytest

from novalm_jax.experts.records import Record
from novalm_jax.experts.slots import NOWHERE, SlotTable


def test_a_record_is_found_where_it_was_put_until_the_slot_is_cleared() -> None:
    table = SlotTable(layers=2, experts=3, slots=2)
    assert (table.empty_slot(), len(table)) == (0, 2)
    table.put(Record(1, 2), 0)
    assert table.find(Record(1, 2)) == 0 and table.record_in(0) == Record(1, 2)
    assert table.find(Record(0, 2)) == NOWHERE and table.record_in(1) is None
    assert table.table.tolist() == [[-1, -1, -1], [-1, -1, 0]]
    assert table.empty_slot() == 1
    assert table.empty_slot(but=[1]) is None
    table.clear(0)
    assert table.find(Record(1, 2)) == NOWHERE and table.empty_slot() == 0


def test_what_is_listed_leaves_out_empty_slots_and_those_of_no_concern() -> None:
    table = SlotTable(2, 3, 4)
    for slot, record in ((0, Record(0, 1)), (2, Record(1, 0)), (3, Record(1, 2))):
        table.put(record, slot)
    slots, layers, experts = table.listed(but={2})
    assert (slots.tolist(), layers.tolist(), experts.tolist()) == ([0, 3], [0, 1], [1, 2])
    assert table.listed(but={0, 2, 3})[0].size == 0


def test_nothing_is_put_twice_or_over_something_else() -> None:
    table = SlotTable(1, 3, 2)
    table.put(Record(0, 0), 0)
    with pytest.raises(AssertionError, match="has a slot"):
        table.put(Record(0, 0), 1)
    with pytest.raises(AssertionError, match="slot 0 is taken"):
        table.put(Record(0, 1), 0)
    assert np.array_equal(table.table, [[0, -1, -1]])
