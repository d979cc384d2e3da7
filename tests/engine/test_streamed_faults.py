"""Faults of streaming that the comparison with a resident run would catch: each is made, and it fails."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.engine.functions import Functions, expert_kernel
from novalm_jax.errors import EngineError
from novalm_jax.experts import fetcher as fetcher_module
from novalm_jax.experts.fetcher import Fetcher, Stage
from novalm_jax.experts.host_tier import HostTier
from novalm_jax.experts.pools import DevicePool
from novalm_jax.experts.streamer import Streamer
from novalm_jax.models.decoder import Routed
from streamed_helpers import Answers, assert_same, wait_for_prefetches
from streamed_model import CHOSEN, QUESTIONS, host_memory, streamed

Patch = pytest.MonkeyPatch


def _copied_late(patch: Patch) -> None:
    """Whatever may be written over a record before it is copied has the time to do so."""
    copy = fetcher_module.copy_to_device

    def late(array: np.ndarray, *memory: np.ndarray) -> jax.Array:
        time.sleep(2e-3)
        return copy(array, *memory)

    patch.setattr(fetcher_module, "copy_to_device", late)


# --- what lies where -------------------------------------------------------------------------------------------------


def _wrong_slot(patch: Patch) -> None:
    insert = DevicePool.insert
    patch.setattr(
        DevicePool, "insert", lambda self, record, slot: insert(self, record, (slot + 1) % len(self.arrays.down))
    )


def _stale_residency(patch: Patch) -> None:
    evict = Streamer._evict

    def kept(self: Any, slot: int) -> None:
        record = self._table.record_in(slot)
        evict(self, slot)
        if record is not None:
            self._table.table[record] = slot

    patch.setattr(Streamer, "_evict", kept)


def _stale_residency_on_the_host(patch: Patch) -> None:
    make_room = HostTier.make_room

    def kept(self: HostTier, record: Any, step: int, used: Any) -> int:
        before = self.table.table.copy()
        slot = make_room(self, record, step, used)
        self.table.table[before == slot] = slot
        return slot

    patch.setattr(HostTier, "make_room", kept)


def _evicted_in_use(patch: Patch) -> None:
    """All that is missing comes into one slot, of which a wave computes."""
    make_room, arrived = Streamer._make_room, Fetcher.arrived
    patch.setattr(Streamer, "_make_room", lambda self, layer, busy: make_room(self, layer, ()))

    def together(self: Any, fetches: Any, wait: bool) -> Any:
        while wait and len(found := arrived(self, fetches, wait)) < min(len(fetches), 2):
            time.sleep(1e-3)
        return found if wait else arrived(self, fetches, wait)

    patch.setattr(Fetcher, "arrived", together)


def _evicted_in_use_on_the_host(patch: Patch) -> None:
    """A record is read into a slot of the host tier from which another one is copied."""
    _copied_late(patch)
    make_room = HostTier.make_room
    patch.setattr(HostTier, "make_room", lambda self, record, step, used: make_room(self, record, step, ()))


# --- who may touch what ----------------------------------------------------------------------------------------------


def _handed_over_early(patch: Patch) -> None:
    """The device's array is the read buffer itself, into which the next record goes."""

    def shared(array: np.ndarray, *memory: np.ndarray) -> jax.Array:
        handed = jax.device_put(array)
        array.view(np.uint8)[...] = 0xFF
        return handed

    patch.setattr(fetcher_module, "copy_to_device", shared)


def _read_over(patch: Patch) -> None:
    """A read buffer is free as soon as it is full."""
    _copied_late(patch)

    def reading(self: Fetcher) -> set[int]:
        return {fetch.place for fetch in self._under_way.values() if fetch.stage is Stage.READING}

    patch.setattr(Fetcher, "_held", reading)


def _copied_over(patch: Patch) -> None:
    """Every copy on the device is made in the same memory."""
    patch.setattr(Fetcher, "_copies_in_use", lambda self: set())


# --- the order of the router -----------------------------------------------------------------------------------------


def _by_expert(ids: jax.Array, values: jax.Array) -> jax.Array:
    """`values [t, k, ...]` in the order of the experts' numbers in place of the router's."""
    order = jnp.argsort(ids, axis=1)
    return jnp.take_along_axis(values, order.reshape(*order.shape, *[1] * (values.ndim - 2)), axis=1)


def _products_in_expert_order(patch: Patch) -> None:
    def sorted_ids(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x, ids, *others: kernel(x, _by_expert(ids, ids), *others)

    for name in ("by_choice", "by_expert", "grouped"):
        patch.setattr(expert_kernel, name, sorted_ids(getattr(expert_kernel, name)))


def _reordered_combine(patch: Patch, weights: bool, products: bool) -> None:
    combine = Functions.combine

    def reordered(self: Functions, config: Any, dense: Any, routed: Routed, found: jax.Array) -> jax.Array:
        routing = routed.routing
        if products:
            found = _by_expert(routing.ids, found)
        if weights:
            routed = routed._replace(routing=routing._replace(weights=_by_expert(routing.ids, routing.weights)))
        return combine(self, config, dense, routed, found)

    patch.setattr(Functions, "combine", reordered)


def _scales_in_expert_order(patch: Patch) -> None:
    _reordered_combine(patch, weights=True, products=False)


def _added_in_expert_order(patch: Patch) -> None:
    """The same products with the same scales, in another order."""
    _reordered_combine(patch, weights=True, products=True)


def _scale_dropped(patch: Patch) -> None:
    combine = Functions.combine

    def unscaled(self: Functions, config: Any, dense: Any, routed: Routed, products: jax.Array) -> jax.Array:
        routing = routed.routing._replace(weights=jnp.ones_like(routed.routing.weights))
        return combine(self, config, dense, routed._replace(routing=routing), products)

    patch.setattr(Functions, "combine", unscaled)


def _last_wave_alone(patch: Patch) -> None:
    """A wave begins with nothing, in place of what those before gave."""
    wave = Functions.wave

    def forgetful(self: Functions, config: Any, pool: Any, products: jax.Array, routed: Any, slots: Any) -> jax.Array:
        return wave(self, config, pool, jnp.zeros_like(products), routed, slots)

    patch.setattr(Functions, "wave", forgetful)


FROM_DISK = {"host_memory": 0, "prefetch": "off"}
FROM_HOST = {"host_memory": host_memory(4), "prefetch": "off"}
AHEAD = {"host_memory": 0, "prefetch": "lookahead"}
MOVING = [
    *((fault, FROM_DISK) for fault in (_wrong_slot, _stale_residency, _evicted_in_use)),
    *((fault, FROM_HOST) for fault in (_stale_residency_on_the_host, _evicted_in_use_on_the_host)),
    *((fault, FROM_DISK) for fault in (_handed_over_early, _read_over, _copied_over)),
]
COMPUTING = [
    *(_products_in_expert_order, _scales_in_expert_order, _added_in_expert_order),
    *(_scale_dropped, _last_wave_alone),
]


def check_it_shows(folder: Any, expected: Answers, doubled: bool = False, **options: Any) -> None:
    """`doubled`: the tables may notice two records in a slot before anybody compares."""
    with streamed(folder, CHOSEN, **options) as llm:
        try:
            found = QUESTIONS.ask(llm)
        except EngineError as error:
            assert doubled and re.search(r"slot \d is taken", str(error)), error
            return
        with pytest.raises(AssertionError):
            assert_same(found, expected)


@pytest.mark.parametrize(("fault", "options"), MOVING)
def test_the_comparison_sees_a_record_in_a_wrong_place(moe_folder, resident, shared, monkeypatch, fault, options):
    fault(monkeypatch)
    doubled = fault is _evicted_in_use_on_the_host
    check_it_shows(moe_folder, resident["float32"], doubled, **options)


@pytest.fixture
def traced_anew(shared: dict[Any, Any]) -> Iterator[None]:
    """No program from before a fault hides it, and none with it stays behind."""
    before = dict(shared)
    for key in before:
        if {"wave", "first wave", "combine"}.intersection(map(str, key[1])):
            del shared[key]
    yield
    shared.clear()
    shared.update(before)


@pytest.mark.parametrize("fault", COMPUTING)
def test_the_comparison_sees_a_wrong_sum(moe_folder, resident, traced_anew, monkeypatch, fault):
    fault(monkeypatch)
    check_it_shows(moe_folder, resident["float32"], **FROM_DISK)


@pytest.mark.parametrize("options", [FROM_DISK, FROM_HOST, AHEAD])
def test_without_a_fault_there_is_nothing_to_see(moe_folder, resident, shared, monkeypatch, options):
    _copied_late(monkeypatch)
    wait_for_prefetches(monkeypatch)
    with streamed(moe_folder, CHOSEN, **options) as llm:
        assert_same(QUESTIONS.ask(llm), resident["float32"])
