"""Router, expert products and feed-forward modules against float64 numpy, and their promises on bits and memory."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from novalm_jax.compat import compile_program
from novalm_jax.config import Activation, ExpertConfig, MoEConfig, RouterConfig
from novalm_jax.engine.programs import DECODE_ROWS
from novalm_jax.kernels import experts
from novalm_jax.kernels.experts import Weights
from novalm_jax.models.linear import GatedMLP
from novalm_jax.models.moe import MoE
from novalm_jax.models.router import choose
from parts_helpers import plain_softmax, random, randomise, same_bits, wide


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


EXPERT = ExpertConfig(width=20, activation="silu")


def moe_config(e: int = 4, k: int = 2, **more: Any) -> MoEConfig:
    return MoEConfig(num_experts=e, experts_per_token=k, expert=EXPERT, **more)


# --- router ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ({}, [0.6439, 0.2369]),
        ({"renormalise": True}, [0.7311, 0.2689]),
        ({"choose_first": True}, [0.7311, 0.2689]),
    ],
)
def test_router_weights(more: dict[str, Any], weights: list[float]) -> None:
    routing = choose(jnp.asarray([[2.0, 1.0, 0.0, -1.0], [-1.0, 0.0, 2.0, 1.0]]), RouterConfig(**more), 2)
    assert routing.ids.tolist() == [[0, 1], [2, 3]] and routing.ids.dtype == jnp.int32
    np.testing.assert_allclose(routing.weights, [weights] * 2, atol=1e-4)


@pytest.mark.parametrize("choose_first", [False, True])
def test_router_ties_go_to_the_lower_id(choose_first: bool) -> None:
    logits = jnp.asarray([[0.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0], [-2.0, 5.0, -2.0, -2.0]])
    assert choose(logits, RouterConfig(choose_first=choose_first), 2).ids.tolist() == [[1, 2], [0, 1], [1, 0]]


# --- experts ---------------------------------------------------------------------------------------------------------


D, F = 24, 20


def expert_weights(e: int, dtype: Any = jnp.float32) -> Weights:
    return Weights(*(random(e, *shape, seed=i, dtype=dtype) for i, shape in enumerate([(F, D), (F, D), (D, F)])))


def plain_experts(x: Any, ids: np.ndarray, weights: Weights) -> np.ndarray:
    gate, up, down = map(wide, weights)
    out = np.zeros((*ids.shape, D))
    for token, choice in np.ndindex(*ids.shape):
        if (e := ids[token, choice]) < len(gate):
            row = wide(x[token])
            out[token, choice] = down[e] @ (silu(gate[e] @ row) * (up[e] @ row))
    return out


Kernel = Callable[..., jax.Array]
KERNELS: dict[str, Kernel] = {
    "reference": jax.jit(lambda x, ids, w: experts.reference(x, ids, w, "silu")),
    "by_expert": jax.jit(lambda x, ids, w: experts.by_expert(x, ids, w, "silu")),
    "grouped": jax.jit(lambda x, ids, w: experts.grouped(x, ids, w, "silu", 8)),
    "grouped by 64": jax.jit(lambda x, ids, w: experts.grouped(x, ids, w, "silu", 64)),
}


def choices(kind: str, t: int, k: int, e: int) -> np.ndarray:
    """int32 `[t, k]`, distinct in each row."""
    draw = np.random.default_rng((t, k, e))
    some = np.stack([draw.permutation(e)[:k] for _ in range(t)]).astype(np.int32)
    if kind == "one expert":
        return np.full((t, 1), e - 2, np.int32)
    if kind == "few experts":
        return some % 2 + 1
    if kind == "nobody here and there":
        return np.where(draw.random((t, k)) < 0.4, e, some).astype(np.int32)
    return np.full((t, k), e, np.int32) if kind == "nobody" else some


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("kind", "t", "k"),
    [
        *(("any", t, k) for t, k in zip([2, 3, 64, 130, 3, 130], [2, 5, 1, 3, 1, 5], strict=True)),
        *(("one expert", t, 1) for t in (2, 64, 130)),
        ("few experts", 64, 1),
        *(("nobody here and there", t, 3) for t in (3, 130)),
        *(("nobody", t, 2) for t in (2, 64)),
    ],
)
def test_expert_products(kernel: str, kind: str, t: int, k: int) -> None:
    """Shapes no kernel was made for, experts without tokens, and choices of nobody, which give zeros."""
    weights, x, ids = expert_weights(5), random(t, D, seed=t), choices(kind, t, k, 5)
    if kernel == "reference":
        # What nobody computes must not be read either; the plain form alone looks at all experts.
        spoilt = weights
    else:
        absent = np.setdiff1d(np.arange(5), ids)
        spoilt = Weights(*(stack.at[absent].set(jnp.nan) for stack in weights[:3]))
    out = KERNELS[kernel](x, jnp.asarray(ids), spoilt)
    np.testing.assert_allclose(out, plain_experts(x, ids, weights), rtol=1e-5, atol=2e-4)
    assert np.array_equal(np.asarray(out)[ids == 5], np.zeros(((ids == 5).sum(), D), np.float32))


@pytest.mark.parametrize("kernel", ["by_expert", "grouped"])
@pytest.mark.parametrize("t", [2, 64])
def test_storage_form_computes_the_same_bits(kernel: str, t: int) -> None:
    weights, x, ids = expert_weights(5, jnp.bfloat16), random(t, D, dtype=jnp.bfloat16), choices("any", t, 3, 5)
    out = KERNELS[kernel](x, jnp.asarray(ids), weights)
    stored = Weights(*(stack.view(jnp.uint16) for stack in weights[:3]))
    assert same_bits(out, KERNELS[kernel](x, jnp.asarray(ids), stored))
    error = np.abs(wide(out) - plain_experts(x, ids, weights)).max()
    assert error < 0.02 * np.abs(wide(out)).max()


@pytest.mark.parametrize(("t", "kernel"), [(2, "by_expert"), (8, "by_expert"), (64, "grouped by 64")])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_does_not_depend_on_what_else_is_computed(t: int, kernel: str, dtype: Any) -> None:
    """Experts in two calls, as when some are elsewhere, give the bits of one call; so do other stacks around them."""
    weights, x, ids = expert_weights(6, dtype), random(t, D, dtype=dtype), choices("any", t, 3, 6)
    whole = np.asarray(KERNELS[kernel](x, jnp.asarray(ids), weights))
    for part in ([0, 3], [1, 2, 4, 5]):
        ours = np.isin(ids, part)
        alone = KERNELS[kernel](x, jnp.asarray(np.where(ours, ids, 6)), weights)
        assert same_bits(np.asarray(alone)[ours], whole[ours])
        fewer = Weights(*(stack[np.array(part)] for stack in weights[:3]))
        slots = np.where(ours, np.searchsorted(part, ids), len(part)).astype(np.int32)
        assert same_bits(np.asarray(KERNELS[kernel](x, jnp.asarray(slots), fewer))[ours], whole[ours])


E_BIG, F_BIG, D_BIG = 24, 256, 128


def expert_temporaries(kernel: str, t: int, dtype: Any) -> tuple[int, int]:
    """Bytes of temporaries of a compiled kernel, and of one expert."""
    sizes = [(E_BIG, F_BIG, D_BIG), (E_BIG, F_BIG, D_BIG), (E_BIG, D_BIG, F_BIG)]
    stacks = jax.eval_shape(lambda: Weights(*(jnp.zeros(size, dtype) for size in sizes)))
    arguments = (jax.ShapeDtypeStruct((t, D_BIG), jnp.bfloat16), jax.ShapeDtypeStruct((t, 4), jnp.int32), stacks)
    analysis: Any = compile_program(KERNELS[kernel], arguments).memory_analysis()
    return analysis.temp_size_in_bytes, 3 * F_BIG * D_BIG * 2


@pytest.mark.parametrize(("kernel", "t"), [("by_expert", 2), ("by_expert", 16), ("grouped", 64)])
def test_experts_in_storage_form_take_no_memory_for_the_stack(kernel: str, t: int) -> None:
    temporary, expert = expert_temporaries(kernel, t, jnp.uint16)
    assert temporary < 3 * expert


def test_the_memory_guard_would_catch_a_converted_stack() -> None:
    temporary, expert = expert_temporaries("by_expert", 2, jnp.bfloat16)
    assert temporary > E_BIG * expert


# --- modules ---------------------------------------------------------------------------------------------------------


def plain_mlp(x: np.ndarray, values: dict[str, np.ndarray], prefix: str = "") -> np.ndarray:
    def part(name: str, inner: np.ndarray) -> np.ndarray:
        return inner @ values[f"{prefix}{name}.weight"].T + values.get(f"{prefix}{name}.bias", 0)

    return part("down", silu(part("gate", x)) * part("up", x))


@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(bias: bool) -> None:
    mlp = GatedMLP(D, F, "silu", bias=bias, dtype=jnp.float32, rngs=nnx.Rngs(0))
    values = randomise(mlp)
    assert len(values) == (6 if bias else 3)
    x = random(3, D)
    np.testing.assert_allclose(mlp(x), plain_mlp(wide(x), values), atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "at_one"), [("silu", 0.731059), ("gelu", 0.841345), ("gelu_tanh", 0.841192), ("relu", 1.0)]
)
def test_activations(activation: Activation, at_one: float) -> None:
    one = jnp.ones((1, 1))
    np.testing.assert_allclose(experts.gated(one, one, activation), at_one, atol=1e-6)
    single = Weights(one, one, one)
    np.testing.assert_allclose(experts.expert_product(one, single, ExpertConfig(1, activation)), at_one, atol=1e-6)


@pytest.mark.parametrize(
    "more",
    [{}, {"shared_width": 12}, {"shared_width": 12, "shared_gate": True}, {"router": RouterConfig(choose_first=True)}],
    ids=str,
)
def test_moe_is_the_weighted_sum_of_its_experts_and_the_shared_one(more: dict[str, Any]) -> None:
    config = moe_config(5, 3, **more)
    moe = MoE(D, config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    values, x = randomise(moe), random(7, D)
    logits = wide(x) @ values["router.weight"].T
    ids = np.argsort(-logits, axis=-1)[:, :3]
    weights = np.take_along_axis(plain_softmax(logits), ids, -1)
    if config.router.choose_first:
        weights = plain_softmax(np.take_along_axis(logits, ids, -1))
    stacks = Weights(*(jnp.asarray(values[f"experts.{name}"], jnp.float32) for name in ("gate", "up", "down")))
    expected = (plain_experts(x, ids, stacks) * weights[..., None]).sum(1)
    if config.shared_width:
        shared = plain_mlp(wide(x), values, "shared.")
        gate = 1 / (1 + np.exp(-wide(x) @ values["shared_gate.weight"].T)) if config.shared_gate else 1.0
        expected += shared * gate
    np.testing.assert_allclose(moe(x), expected, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [36, 1000, 1536])
def test_the_gate_of_the_shared_expert_does_not_depend_on_the_number_of_rows(width: int, dtype: Any) -> None:
    config = moe_config(2, 1, shared_width=8, shared_gate=True)
    moe = MoE(width, config, dtype=dtype, rngs=nnx.Rngs(0))
    randomise(moe)
    x, products = random(32, width, dtype=dtype), jnp.zeros((32, 1, width), dtype)
    combine = nnx.jit(lambda module, x, products: module.combine(x, products, jnp.ones((x.shape[0], 1))))
    rows = [np.asarray(combine(moe, x[:n], products[:n]))[:2] for n in DECODE_ROWS]
    assert all(same_bits(rows[0], more) for more in rows)


def test_combine_adds_in_router_order() -> None:
    """Float addition does not commute over three: only this order gives these bits."""
    moe = MoE(2, moe_config(4, 3), dtype=jnp.float32, rngs=nnx.Rngs(0))
    parts = np.array([1e8, -1e8, 1.25], np.float32)
    weights = jnp.asarray([[1.0, 1.0, 1.0]])
    for order in itertools.permutations(range(3)):
        products = jnp.asarray(np.repeat(parts[list(order)][None, :, None], 2, -1))
        a, b, c = parts[list(order)]
        assert moe.combine(jnp.zeros((1, 2)), products, weights)[0, 0] == np.float32(np.float32(a + b) + c)
