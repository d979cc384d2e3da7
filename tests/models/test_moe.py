"""Feed-forward modules against float64 numpy: gated MLP, mixture of experts, shared expert, order of sums."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from novalm_jax.config import ClampConfig, ExpertConfig, MoEConfig, RouterConfig
from novalm_jax.kernels import experts
from novalm_jax.models.linear import GatedMLP
from novalm_jax.models.moe import MoE, input_scales
from parts_helpers import random, random_module, rows_do_not_depend_on_company, sigmoid, silu, wide

D, F = 24, 20
EXPERT = ExpertConfig(width=F, activation="silu")
GPT_OSS = ExpertConfig(F, "silu", True, ClampConfig(1.5, 1.702), "alternate", inputs_first=True, down_inputs_first=True)
LLAMA4 = ExpertConfig(F, "silu", joint="halves", inputs_first=True, down_inputs_first=True)


def moe_config(e: int = 4, k: int = 2, expert: ExpertConfig = EXPERT, **more: Any) -> MoEConfig:
    return MoEConfig(num_experts=e, experts_per_token=k, expert=expert, **more)


def plain_mlp(x: np.ndarray, values: dict[str, np.ndarray], prefix: str = "") -> np.ndarray:
    def part(name: str, inner: np.ndarray) -> np.ndarray:
        return inner @ values[f"{prefix}{name}.weight"].T + values.get(f"{prefix}{name}.bias", 0)

    return part("down", silu(part("gate", x)) * part("up", x))


@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(bias: bool) -> None:
    mlp, values = random_module(lambda rngs: GatedMLP(D, F, "silu", bias=bias, dtype=jnp.float32, rngs=rngs))
    assert len(values) == (6 if bias else 3)
    x = random(3, D)
    np.testing.assert_allclose(mlp(x), plain_mlp(wide(x), values), atol=1e-5)


def plain_expert(x: np.ndarray, e: int, values: dict[str, np.ndarray], config: ExpertConfig) -> np.ndarray:
    """`x [d]` through one expert, from its weights as they are stored."""

    def product(name: str, inputs_first: bool, inner: np.ndarray) -> np.ndarray:
        matrix = values[f"experts.{name}"][e]
        return inner @ (matrix if inputs_first else matrix.T) + values.get(f"experts.{name}_bias", np.zeros(e + 1))[e]

    up = product("up", config.inputs_first, x)
    if config.joint == "no":
        gate = product("gate", config.inputs_first, x)
    else:
        gate, up = (up[::2], up[1::2]) if config.joint == "alternate" else (up[:F], up[F:])
    if config.clamp is None:
        return product("down", config.down_inputs_first, silu(gate) * up)
    limit, alpha = config.clamp.limit, config.clamp.alpha
    gate, up = np.minimum(gate, limit), np.maximum(np.minimum(up, limit), -limit)
    return product("down", config.down_inputs_first, (up + 1) * gate * sigmoid(alpha * gate))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"shared_width": 12},
        {"shared_width": 12, "shared_bias": True},
        {"shared_width": 12, "shared_gate": True},
        {"router": RouterConfig(choose_first=True)},
        {"router": RouterConfig("sigmoid", renormalise=True, scale=2.5, choice_bias=True), "shared_width": 12},
        {"expert": GPT_OSS, "router": RouterConfig(choose_first=True, bias=True)},
        {"expert": LLAMA4, "router": RouterConfig("sigmoid", choose_first=True, scale_inputs=True), "shared_width": 12},
    ],
    ids=str,
)
def test_moe_is_the_weighted_sum_of_its_experts_and_the_shared_one(more: dict[str, Any]) -> None:
    """The choice itself is tested with the router."""
    config = moe_config(5, 3, **more)
    moe, values = random_module(lambda rngs: MoE(D, config, dtype=jnp.float32, rngs=rngs))
    x = random(7, D)
    routing = moe.route(x)
    expected = np.zeros((7, D))
    for token, choice in np.ndindex(7, 3):
        weight, e = wide(routing.weights)[token, choice], int(routing.ids[token, choice])
        if config.router.scale_inputs:
            expected[token] += plain_expert(wide(x)[token] * weight, e, values, config.expert)
        else:
            expected[token] += weight * plain_expert(wide(x)[token], e, values, config.expert)
    if config.shared_width:
        shared = plain_mlp(wide(x), values, "shared.")
        gate = sigmoid(wide(x) @ values["shared_gate.weight"].T) if config.shared_gate else 1.0
        expected += shared * gate
    assert ("shared.up.bias" in values) == config.shared_bias
    np.testing.assert_allclose(moe(x), expected, atol=1e-5)
    # As a runtime does it, which keeps the experts elsewhere.
    scales = input_scales(config, routing)
    assert (scales is not None) == config.router.scale_inputs
    products = experts.by_expert(x, routing.ids, moe.experts.weights(), config.expert, scales)
    np.testing.assert_allclose(moe.combine(x, products, routing.weights), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [36, 1000, 1536])
def test_the_gate_of_the_shared_expert_does_not_depend_on_the_number_of_rows(width: int, dtype: Any) -> None:
    config = moe_config(2, 1, shared_width=8, shared_gate=True)
    graph, weights = nnx.split(random_module(lambda rngs: MoE(width, config, dtype=dtype, rngs=rngs))[0])
    x, products = random(32, width, dtype=dtype), jnp.zeros((32, 1, width), dtype)

    def combine(weights: Any, x: Any, products: Any) -> Any:
        return nnx.merge(graph, weights).combine(x, products, jnp.ones((x.shape[0], 1)))

    assert rows_do_not_depend_on_company(combine, lambda n: (weights, x[:n], products[:n]))


@pytest.mark.parametrize("scaled", [False, True])
def test_combine_adds_in_router_order(scaled: bool) -> None:
    """Float addition does not commute over three: only this order gives these bits."""
    config = moe_config(4, 3, router=RouterConfig(scale_inputs=scaled))
    moe, _ = random_module(lambda rngs: MoE(2, config, dtype=jnp.float32, rngs=rngs))
    parts = np.array([1e8, -1e8, 1.25], np.float32)
    # Weights that have been used up on the inputs must not count again.
    weights = jnp.full((1, 3), 7.0 if scaled else 1.0)
    for order in itertools.permutations(range(3)):
        products = jnp.asarray(np.repeat(parts[list(order)][None, :, None], 2, -1))
        a, b, c = parts[list(order)]
        assert moe.combine(jnp.zeros((1, 2)), products, weights)[0, 0] == np.float32(np.float32(a + b) + c)
