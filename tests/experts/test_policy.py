"""What policies evict, by hand on a few uses; the simulator has them on many."""

from typing import get_args

import numpy as np
import pytest

from novalm_jax.experts.policy import LFU, LRU, POLICIES, Decayed, Expected, Policy, admit, lowest
from novalm_jax.options import PolicyName


def victim(policy: Policy, step: int, layer: int, records: list[tuple[int, int]]) -> tuple[int, int]:
    layers, experts = map(np.array, zip(*records, strict=True))
    return records[int(np.argmin(policy.worth(step, layer, layers, experts)))]


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


def test_options_name_every_policy() -> None:
    assert get_args(PolicyName) == tuple(POLICIES)


def test_of_one_event_lru_evicts_the_lower_number() -> None:
    policy = use(LRU(2, 4), (0, 0, [3, 1]))
    assert victim(policy, 1, 1, [(0, 3), (0, 1)]) == (0, 1)


def test_lfu_evicts_what_was_used_least_and_of_equals_the_older() -> None:
    policy = use(LFU(1, 4), (0, 0, [0, 1]), (1, 0, [2]), (2, 0, [1]), (3, 0, [3]))
    assert victim(policy, 4, 0, [(0, 1), (0, 3), (0, 2)]) == (0, 2)
    assert victim(policy, 4, 0, [(0, 1), (0, 2), (0, 0)]) == (0, 0)


def test_the_default_weighs_three_rates_by_hand() -> None:
    policy = use(Expected(2, 2), (0, 0, [0]), (0, 1, [1]), (1, 0, [0]), (1, 1, [0]))
    # Of layer 0: steps 0 and 1 used expert 0. The second use counts at once, and is part of what there could be.
    (worth,) = policy.worth(1, 1, np.array([0]), np.array([0]))
    assert worth == pytest.approx(1 / (0 + 1 / (0.02 + 1)))
    # Layer 1 comes round last after itself. Its expert 1 was used in step 0, which is all there is until step 2 begins.
    (worth,) = policy.worth(1, 1, np.array([1]), np.array([1]))
    assert worth == pytest.approx(1 / (0.5 + 1 / (0.02 + 1)))
    use(policy, (2, 0, [1]))
    rates = [(1 - keep) * keep / (1 - keep**2) for keep in (0.5, 0.9, 0.99)]
    (worth,) = policy.worth(2, 0, np.array([1]), np.array([1]))
    assert worth == pytest.approx(1 / (0 + 1 / (0.02 + np.dot([0.1, 0.4, 0.5], rates))))


def test_the_default_keeps_what_is_used_often_and_of_equals_what_comes_next() -> None:
    policy = use(Expected(1, 4), *((step, 0, [0] if step % 2 else [1 + step // 2 % 3]) for step in range(12)))
    assert victim(policy, 12, 0, [(0, 0), (0, 1), (0, 2), (0, 3)]) == (0, 1)
    policy = use(Expected(4, 2), *((0, layer, [0]) for layer in range(4)))
    records = [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert victim(policy, 1, 2, records) == (2, 0)
    assert victim(policy, 1, 3, records) == (3, 0)
    assert victim(policy, 1, 0, records[1:]) == (3, 0)


def test_the_lowest_are_in_order_and_of_equals_the_first() -> None:
    assert lowest(np.array([3.0, 1.0, 2.0, 1.0, 0.5, 1.0]), 3).tolist() == [4, 1, 3]
    assert lowest(np.array([2.0, 1.0, 1.0]), 1).tolist() == [1]
    assert lowest(np.array([2.0, 1.0, 1.0]), 5).tolist() == [1, 2, 0]
    draw = np.random.default_rng(0)
    assert lowest(np.array([2.0, np.inf, 1.0]), 3).tolist() == [2, 0]
    assert lowest(np.array([2.0, np.inf, 1.0] * 7), 21).tolist() == [*range(2, 21, 3), *range(0, 21, 3)]
    for count in range(1, 40):
        worth = draw.integers(0, 9, 30).astype(float)
        assert lowest(worth, count).tolist() == np.argsort(worth, kind="stable")[:count].tolist()


@pytest.mark.parametrize(
    ("margin", "pairs"),
    [(1.0, [(2, 3), (0, 0)]), (1.5, [(2, 3), (0, 0)]), (2.0, [(2, 3)]), (5.0, []), (0.1, [(2, 3), (0, 0), (1, 1)])],
)
def test_those_worth_most_come_in_for_those_worth_least(margin: float, pairs: list[tuple[int, int]]) -> None:
    # 5 against 1, 4 against 2, 2 against 3; what may not leave is worth infinitely much.
    arriving, held = np.array([4.0, 2.0, 5.0]), np.array([2.0, 3.0, np.inf, 1.0, 6.0])
    assert [*zip(*(part.tolist() for part in admit(arriving, held, margin)), strict=True)] == pairs


def test_an_empty_slot_is_given_to_anything_and_to_the_best_first() -> None:
    chosen, places = admit(np.array([0.0, 1.0]), np.array([2.0, -1.0, 3.0]), 1.0)
    assert (chosen.tolist(), places.tolist()) == ([1], [1])
    assert [part.tolist() for part in admit(np.array([1.0, 2.0]), np.array([0.5]), 1.0)] == [[1], [0]]


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "lru"])
def test_worth_can_be_compared_by_ratio(name: str) -> None:
    """At least 0, also of what was never used, and more for more uses."""
    policy = POLICIES[name](3, 4)
    for step in range(40):
        for layer in range(3):
            policy.use(step, layer, np.array([0, 1] if step % 4 else [0, 2]))
    worth = policy.worth(39, 1, np.full(4, 2), np.arange(4))
    assert worth[3] >= 0 and 2 < worth[0] / worth[2] < 8, worth
