"""Every routing rule against float64 numpy, written from the papers, and what routing promises about bits."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.config import ExpertConfig, MoEConfig, RouterConfig
from novalm_jax.models.moe import MoE
from novalm_jax.models.params import parameters_of
from novalm_jax.models.router import choose
from parts_helpers import plain_softmax, random, random_module, rows_do_not_depend_on_company, sigmoid, wide


def plain_choice(
    logits: np.ndarray, config: RouterConfig, k: int, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """One token, `logits [e]`: the ids and weights of the chosen, best first."""
    if config.choose_first:
        ids = np.argsort(-logits, kind="stable")[:k]
        found = sigmoid(logits[ids]) if config.scores == "sigmoid" else plain_softmax(logits[ids])
    else:
        scores = sigmoid(logits) if config.scores == "sigmoid" else plain_softmax(logits)
        ranked = scores if bias is None else scores + bias
        allowed = set(range(len(logits)))
        if config.groups > 1:
            size = len(logits) // config.groups
            best = [sorted(ranked[g * size : (g + 1) * size])[::-1] for g in range(config.groups)]
            worth = [sum(group[:2]) if config.group_rule == "sum_of_two" else group[0] for group in best]
            kept = sorted(range(config.groups), key=lambda g: -worth[g])[: config.kept_groups]
            allowed = {e for e in allowed if e // size in kept}
        ids = np.array(sorted(allowed, key=lambda e: (-ranked[e], e))[:k])
        found = scores[ids]
    if config.renormalise:
        found = found / found.sum()
    return ids, found * config.scale


RULES: dict[str, tuple[RouterConfig, bool]] = {
    "mixtral": (RouterConfig(renormalise=True), False),
    "qwen2": (RouterConfig(), False),
    "gpt-oss": (RouterConfig(choose_first=True), False),
    "llama4": (RouterConfig("sigmoid", choose_first=True), False),
    "deepseek-v2": (RouterConfig(scale=16.0, groups=4, kept_groups=2), False),
    "deepseek-v3": (
        RouterConfig("sigmoid", renormalise=True, scale=2.5, groups=4, kept_groups=2, group_rule="sum_of_two"),
        True,
    ),
    "deepseek-v3, not renormalised": (
        RouterConfig("sigmoid", scale=2.5, groups=4, kept_groups=3, group_rule="sum_of_two"),
        True,
    ),
    "minimax": (RouterConfig("sigmoid", renormalise=True), True),
    "ernie": (RouterConfig(renormalise=True), True),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    """Biases are negative on the whole, and as large as scores differ: they change most choices."""
    config, biased = RULES[name]
    logits = random(64, 16) * jnp.float32(2)
    bias = random(16, seed=1) * jnp.float32(0.3) - jnp.float32(0.6) if biased else None
    routing = choose(logits, config, 4, bias)
    expected = [plain_choice(row, config, 4, None if bias is None else wide(bias)) for row in wide(logits)]
    assert np.array_equal(routing.ids, [ids for ids, _ in expected])
    np.testing.assert_allclose(routing.weights, [weights for _, weights in expected], rtol=2e-5)
    assert routing.ids.dtype == jnp.int32 and routing.weights.dtype == jnp.float32
    if biased:
        assert not np.array_equal(routing.ids, choose(logits, config, 4).ids)


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ({}, [0.6439, 0.2369]),
        ({"renormalise": True}, [0.7311, 0.2689]),
        ({"choose_first": True}, [0.7311, 0.2689]),
        ({"scores": "sigmoid"}, [0.8808, 0.7311]),
        ({"scores": "sigmoid", "choose_first": True, "scale": 2.0}, [1.7616, 1.4621]),
        ({"scores": "sigmoid", "renormalise": True, "scale": 2.0}, [1.0929, 0.9071]),
    ],
)
def test_weights_by_hand(more: dict[str, Any], weights: list[float]) -> None:
    routing = choose(jnp.asarray([[2.0, 1.0, 0.0, -1.0], [-1.0, 0.0, 2.0, 1.0]]), RouterConfig(**more), 2)
    assert routing.ids.tolist() == [[0, 1], [2, 3]]
    np.testing.assert_allclose(routing.weights, [weights] * 2, atol=1e-4)


@pytest.mark.parametrize("choose_first", [False, True])
def test_ties_go_to_the_lower_id(choose_first: bool) -> None:
    logits = jnp.asarray([[0.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0], [-2.0, 5.0, -2.0, -2.0]])
    assert choose(logits, RouterConfig(choose_first=choose_first), 2).ids.tolist() == [[1, 2], [0, 1], [1, 0]]


@pytest.mark.parametrize("bias", [[0.4, -1.0, 0.1, 0.0], [-0.55, -1.4, -0.6, -0.7]])
def test_a_group_is_judged_by_two_and_may_win_with_negative_scores(bias: list[float]) -> None:
    """The best single score is in the other group; in the second case zeros in its place would win."""
    config = RouterConfig("sigmoid", groups=2, kept_groups=1, group_rule="sum_of_two")
    assert sorted(choose(jnp.zeros((1, 4)), config, 2, jnp.asarray(bias)).ids[0].tolist()) == [2, 3]


def test_a_group_is_judged_by_its_best() -> None:
    logits = jnp.log(jnp.asarray([[0.4, 0.01, 0.3, 0.29]]))
    config = RouterConfig(groups=2, kept_groups=1)
    assert choose(logits, config, 2).ids.tolist() == [[0, 1]]


def test_saturated_logits_are_still_told_apart() -> None:
    """Their sigmoids are all 1, or 0, in float32."""
    for logits in ([40.0, 60.0, 50.0, 30.0], [-140.0, -120.0, -130.0, -150.0]):
        config = RouterConfig("sigmoid", choose_first=True)
        assert choose(jnp.asarray([logits]), config, 3).ids.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("choose_first", [False, True])
def test_sigmoids_that_are_all_zero_have_no_shares(choose_first: bool) -> None:
    routing = choose(jnp.full((1, 4), -200.0), RouterConfig("sigmoid", choose_first, renormalise=True), 2)
    assert routing.weights.tolist() == [[0.0, 0.0]]


def test_small_sigmoids_still_share_one() -> None:
    """An epsilon that is added to their sum would show."""
    routing = choose(jnp.full((1, 4), -30.0), RouterConfig("sigmoid", renormalise=True), 2)
    np.testing.assert_allclose(routing.weights, [[0.5, 0.5]], rtol=1e-6)


# --- sparsemixer -----------------------------------------------------------------------------------------------------


def plain_sparsemixer(logits: np.ndarray, jitter: float) -> tuple[list[int], list[float]]:
    """One token: twice the largest logit, among those that are left, with its share of those close to it."""
    ids: list[int] = []
    weights = []
    for _ in range(2):
        left = [j for j in range(len(logits)) if j not in ids]
        best = max(left, key=lambda j: logits[j])
        top = logits[best]
        close = [j for j in left if (top - logits[j]) / max(abs(logits[j]), top) <= 2 * jitter]
        weights.append(1 / sum(np.exp(logits[j] - top) for j in close))
        ids.append(best)
    return ids, weights


@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3])
def test_sparsemixer(jitter: float, shift: float) -> None:
    """With a shift down all logits of most tokens are negative, with one up none is."""
    logits = random(200, 8) + jnp.float32(shift)
    routing = choose(logits, RouterConfig("sparsemixer", jitter=jitter), 2)
    expected = [plain_sparsemixer(row, jitter) for row in wide(logits)]
    assert np.array_equal(routing.ids, [ids for ids, _ in expected])
    np.testing.assert_allclose(routing.weights, [weights for _, weights in expected], rtol=1e-5)
    shared = (np.asarray(routing.weights) < 0.999).mean()
    assert shared == 0 if jitter == 0 else shared > 0.01


def test_sparsemixer_by_hand() -> None:
    """2.0 and 1.99 are close, 1.5 is not; the second share is over what is close to 1.99, without the first."""
    routing = choose(jnp.asarray([[1.5, 1.99, 2.0, -1.0]]), RouterConfig("sparsemixer", jitter=0.01), 2)
    assert routing.ids.tolist() == [[2, 1]]
    np.testing.assert_allclose(routing.weights, [[0.5025, 1.0]], atol=1e-4)


# --- the router's own weights ----------------------------------------------------------------------------------------


def moe_config(e: int, **router: Any) -> MoEConfig:
    return MoEConfig(e, 2, ExpertConfig(4, "silu"), RouterConfig(**router))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_routers_bias_counts_and_logits_are_not_rounded(dtype: Any) -> None:
    config = moe_config(8, bias=True, choose_first=True)
    moe, values = random_module(lambda rngs: MoE(24, config, dtype=dtype, rngs=rngs))
    x = random(50, 24, dtype=dtype)
    logits = wide(x) @ values["router.weight"].T + values["router.bias"]
    ids = np.argsort(-logits, axis=-1)[:, :2]
    routing = moe.route(x)
    assert np.array_equal(routing.ids, ids)
    np.testing.assert_allclose(routing.weights, plain_softmax(np.take_along_axis(logits, ids, -1)), rtol=1e-5)


def test_the_bias_for_the_choice_is_float32_also_in_bfloat16() -> None:
    """Two experts whose biases differ by less than bfloat16 can say."""
    config = moe_config(2, scores="sigmoid", choice_bias=True)
    moe, _ = random_module(lambda rngs: MoE(8, config, dtype=jnp.bfloat16, rngs=rngs))
    assert {path for path, param in parameters_of(moe).items() if param.dtype == jnp.float32} == {"choice_bias"}
    assert moe.choice_bias is not None
    x = jnp.zeros((1, 8), jnp.bfloat16)
    for bias, best in (([6.0, 6.001], 1), ([6.001, 6.0], 0)):
        moe.choice_bias.set_value(jnp.asarray(bias))
        assert moe.route(x).ids[0, 0] == best
        np.testing.assert_allclose(moe.route(x).weights, [[0.5, 0.5]])


@pytest.mark.parametrize(("name", "e"), [("qwen2", 128), ("deepseek-v3", 256), ("gpt-oss", 32)])
def test_a_choice_does_not_depend_on_the_number_of_rows(name: str, e: int) -> None:
    """Softmax over 128 experts is a sum of 4096 numbers for 32 rows, where XLA would take another way."""
    config, biased = RULES[name]
    logits, bias = random(32, e), random(e, seed=1) if biased else None
    assert rows_do_not_depend_on_company(lambda x: choose(x, config, 8, bias).weights, lambda n: (logits[:n],))
