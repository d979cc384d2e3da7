"""What policies evict: by hand on a few uses, and on a routing that is worse than most."""

import numpy as np
import pytest

from novalm_jax.experts.policy import LRU, POLICIES, Decayed, Policy
from novalm_jax.experts.records import Record
from novalm_jax.experts.slots import NOWHERE, SlotTable


def victim(policy: Policy, step: int, layer: int, records: list[tuple[int, int]]) -> tuple[int, int]:
    layers, experts = map(np.array, zip(*records, strict=True))
    return records[policy.victim(step, layer, layers, experts)]


def use(policy: Policy, *uses: tuple[int, int, list[int]]) -> Policy:
    for step, layer, experts in uses:
        policy.use(step, layer, np.array(experts))
    return policy


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = use(LRU(2, 4), (0, 0, [0, 1]), (0, 1, [2]), (1, 0, [1]))
    assert victim(policy, 1, 1, [(0, 1), (0, 0), (1, 2)]) == (0, 0)
    assert victim(policy, 1, 1, [(0, 1), (1, 2)]) == (1, 2)
    assert victim(policy, 1, 1, [(0, 1), (1, 3)]) == (1, 3)


def test_decayed_counts_every_use_and_forgets_slowly() -> None:
    policy = use(Decayed(1, 4), *((step, 0, [0] if step < 3 else [1]) for step in range(4)))
    # Three uses of the one, the last a step ago, and one use of the other.
    assert victim(policy, 4, 0, [(0, 0), (0, 1)]) == (0, 1)
    assert victim(policy, 4, 0, [(0, 0), (0, 2)]) == (0, 2)
    # At first the age of the last use decides.
    policy = use(Decayed(1, 4), (0, 0, [0]), (1, 0, [1]))
    assert victim(policy, 2, 0, [(0, 1), (0, 0)]) == (0, 0)


def test_of_equals_decayed_evicts_what_comes_round_last() -> None:
    policy = use(Decayed(4, 2), *((0, layer, [0]) for layer in range(4)))
    records = [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert victim(policy, 1, 2, [r for r in records if r[0] != 2]) == (1, 0)
    # What the layer at hand does not need now, it will not need before the next step.
    assert victim(policy, 1, 0, records) == (0, 0)
    assert victim(policy, 1, 0, records[1:]) == (3, 0)


def hits(name: str, routing: np.ndarray, experts: int, slots: int) -> float:
    """The share of hits with a pool of so many slots, on `routing [steps, layers, k]`."""
    steps, layers, _ = routing.shape
    policy, table, found = POLICIES[name](layers, experts), SlotTable(layers, experts, slots), 0
    for step in range(steps):
        for layer in range(layers):
            needed = [Record(layer, int(expert)) for expert in routing[step, layer]]
            policy.use(step, layer, routing[step, layer])
            found += sum(table.find(record) != NOWHERE for record in needed)
            for record in needed:
                if table.find(record) == NOWHERE:
                    slot = table.empty_slot()
                    if slot is None:
                        busy = {table.find(other) for other in needed} - {NOWHERE}
                        free, at, which = table.listed(busy)
                        slot = int(free[policy.victim(step, layer, at, which)])
                        table.clear(slot)
                    table.put(record, slot)
    return found / routing.size


def skewed(steps: int, layers: int, experts: int, k: int) -> np.ndarray:
    """A routing with popular experts, others in each layer."""
    draw = np.random.default_rng(0)
    popularity = np.stack([draw.permutation(1 / np.arange(1, experts + 1) ** 0.8) for _ in range(layers)])
    noise = draw.gumbel(size=(steps, layers, experts))
    return np.argsort(-(np.log(popularity) + noise), axis=-1)[..., :k]


@pytest.mark.parametrize(("slots", "lru", "decayed"), [(10, (0.0, 0.02), (0.1, 0.5)), (60, (0.3, 0.6), (0.45, 0.7))])
def test_fewer_slots_than_a_step_touches_are_no_cliff(slots: int, lru: tuple, decayed: tuple) -> None:
    """Plain LRU evicts everything just before its turn; where there are more slots, counting is still better."""
    routing = skewed(200, 8, 16, 2)
    found = {name: hits(name, routing, 16, slots) for name in POLICIES}
    assert lru[0] <= found["lru"] <= lru[1], found
    assert decayed[0] <= found["decayed"] <= decayed[1], found
    assert found["decayed"] > found["lru"]
