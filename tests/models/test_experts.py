"""Expert products in every layout against float64 numpy, and their promises on bits and memory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.compat import compile_program
from novalm_jax.config import Activation, ClampConfig, ExpertConfig
from novalm_jax.kernels import experts
from novalm_jax.kernels.experts import Wave, Weights
from parts_helpers import random, rows_do_not_depend_on_company, same_bits, sigmoid, silu, wide

D, F = 24, 20
PLAIN = ExpertConfig(F, "silu")
# gpt-oss: everything that can be otherwise.
OTHER = ExpertConfig(F, "silu", True, ClampConfig(2.0, 1.702), "alternate", inputs_first=True, down_inputs_first=True)
CONFIGS = {"plain": PLAIN, "other": OTHER}
LAYOUTS = [
    ExpertConfig(F, "silu", bias, ClampConfig(2.0, 1.702) if bias else None, joint, first, down_first)
    for joint in ("no", "halves", "alternate")
    for first in (False, True)
    for down_first in (False, True)
    for bias in (False, True)
]


class Matrices(NamedTuple):
    """Of e experts, numpy: gate and up `[e, f, d]`, down `[e, d, f]`, biases `[e, f]`, `[e, f]` and `[e, d]`."""

    gate: Any
    up: Any
    down: Any
    gate_bias: Any
    up_bias: Any
    down_bias: Any

    def laid_out(self, config: ExpertConfig) -> Weights:
        """As the configuration says that they are stored."""

        def joint(gate: Any, up: Any) -> tuple[Any, Any]:
            if config.joint == "no":
                return gate, up
            if config.joint == "halves":
                return None, np.concatenate([gate, up], axis=1)
            return None, np.stack([gate, up], axis=2).reshape(len(up), -1, *up.shape[2:])

        def turned(matrix: Any, inputs_first: bool) -> Any:
            return matrix.swapaxes(1, 2) if inputs_first and matrix is not None else matrix

        gate, up = joint(self.gate, self.up)
        first = config.inputs_first
        weights = Weights(turned(gate, first), turned(up, first), turned(self.down, config.down_inputs_first))
        if not config.bias:
            return weights
        gate_bias, up_bias = joint(self.gate_bias, self.up_bias)
        return weights._replace(gate_bias=gate_bias, up_bias=up_bias, down_bias=self.down_bias)


def draw(e: int, d: int = D, f: int = F, dtype: Any = jnp.float32) -> Matrices:
    shapes = ((f, d), (f, d), (d, f), (f,), (f,), (d,))
    return Matrices(*(np.asarray(random(e, *shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)))


def plain_experts(x: Any, ids: np.ndarray, drawn: Matrices, config: ExpertConfig, scales: Any = None) -> np.ndarray:
    gate, up, down, *biases = map(wide, drawn)
    gate_bias, up_bias, down_bias = biases if config.bias else (np.zeros_like(bias) for bias in biases)
    out = np.zeros((*ids.shape, x.shape[-1]))
    for token, choice in np.ndindex(*ids.shape):
        if (e := ids[token, choice]) < len(gate):
            row = wide(x[token]) * (1.0 if scales is None else wide(scales)[token, choice])
            g, u = gate[e] @ row + gate_bias[e], up[e] @ row + up_bias[e]
            if config.clamp is not None:
                g, u = min_of(g, config.clamp.limit), np.clip(u, -config.clamp.limit, config.clamp.limit)
                inner = (u + 1) * g * sigmoid(config.clamp.alpha * g)
            else:
                inner = silu(g) * u
            out[token, choice] = down[e] @ inner + down_bias[e]
    return out


def min_of(x: np.ndarray, most: float) -> np.ndarray:
    return np.where(x > most, most, x)


def products_of(
    kernel: str, x: Any, ids: Any, weights: Weights, config: ExpertConfig, scales: Any = None, wave: Any = None
) -> jax.Array:
    name, *group = kernel.split(" by ")
    waves = {} if wave is None else {"wave": wave}
    return getattr(experts, name)(x, ids, weights, config, *map(int, group), scales=scales, **waves)


run = jax.jit(products_of, static_argnames=("kernel", "config"))

KERNELS = ("reference", "by_expert", "by_choice", "grouped by 8", "grouped by 64")


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


@pytest.mark.parametrize("config", LAYOUTS, ids=str)
def test_layouts(config: ExpertConfig) -> None:
    """Every way to lie, the most intricate ones through every kernel; with scales, and with choices of nobody."""
    drawn, x, ids = draw(3), random(9, D), choices("nobody here and there", 9, 2, 3)
    scales = random(9, 2, seed=8) if config.inputs_first else None
    expected = plain_experts(x, ids, drawn, config, scales)
    for kernel in KERNELS[:4] if config.joint == "alternate" else KERNELS[1:3]:
        out = run(kernel, x, jnp.asarray(ids), drawn.laid_out(config), config, scales)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-4, err_msg=kernel)
        assert not np.asarray(out)[ids == 3].any(), kernel


@pytest.mark.parametrize("kernel", KERNELS[:4])
@pytest.mark.parametrize(
    ("kind", "t", "k", "layout"),
    [
        *(("any", t, k, "plain") for t, k in zip([2, 3, 64, 130, 3, 130], [2, 5, 1, 3, 1, 5], strict=True)),
        *(("one expert", t, 1, "plain") for t in (2, 64, 130)),
        ("few experts", 64, 1, "plain"),
        ("nobody here and there", 3, 3, "plain"),
        ("nobody here and there", 130, 3, "other"),
        ("nobody", 2, 2, "other"),
        ("nobody", 64, 2, "plain"),
    ],
)
def test_expert_products(kernel: str, kind: str, t: int, k: int, layout: str) -> None:
    """Shapes no kernel was made for, experts without tokens, and choices of nobody, which give zeros."""
    drawn, x, ids, config = draw(5), random(t, D, seed=t), choices(kind, t, k, 5), CONFIGS[layout]
    weights = drawn.laid_out(config)
    if kernel != "reference":
        # What nobody computes must not be read either; the plain form alone looks at all experts.
        there = np.isin(np.arange(5), ids)
        weights = jax.tree.map(
            lambda s: np.where(there.reshape(-1, *[1] * (s.ndim - 1)), s, np.float32(np.nan)), weights
        )
    out = run(kernel, x, jnp.asarray(ids), weights, config)
    np.testing.assert_allclose(out, plain_experts(x, ids, drawn, config), rtol=1e-5, atol=2e-4)
    assert np.array_equal(np.asarray(out)[ids == 5], np.zeros(((ids == 5).sum(), D), np.float32))


@pytest.mark.parametrize("kernel", KERNELS)
def test_scales_multiply_what_an_expert_is_given(kernel: str) -> None:
    """Two choices of one token have scales of their own, and a scale of nobody's choice counts nowhere."""
    config = ExpertConfig(1, "relu")
    weights = Weights(*(jnp.asarray(values).reshape(2, 1, 1) for values in ([1.0, 2.0], [1.0, 3.0], [1.0, 5.0])))
    ids = jnp.asarray([[0, 1], [1, 2], [2, 2]], jnp.int32)
    scales = jnp.asarray([[0.5, 2.0], [3.0, jnp.inf], [1.0, 1.0]])
    out = run(kernel, jnp.full((3, 1), 2.0), ids, weights, config, scales)
    assert out[..., 0].tolist() == [[1.0, 480.0], [1080.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("activation", "at_one"), [("silu", 0.731059), ("gelu", 0.841345), ("gelu_tanh", 0.841192), ("relu", 1.0)]
)
def test_activations(activation: Activation, at_one: float) -> None:
    one = jnp.ones((1, 1))
    np.testing.assert_allclose(experts.gated(one, one, activation), at_one, atol=1e-6)
    single = Weights(one, one, one)
    np.testing.assert_allclose(experts.expert_product(one, single, ExpertConfig(1, activation)), at_one, atol=1e-6)


@pytest.mark.parametrize(
    ("limit", "gate", "up", "expected"),
    [
        (7.0, 2.0, 3.0, 7.7426),
        (7.0, 10.0, -9.0, -41.9997),
        (7.0, 7.0, 9.0, 55.9996),
        (1.0, -3.0, 0.5, -0.0271),
    ],
)
def test_the_clamped_gate(limit: float, gate: float, up: float, expected: float) -> None:
    """The gate is cut above alone, the other factor on both sides."""
    out = experts.gated(jnp.full((1, 1), gate), jnp.full((1, 1), up), "silu", ClampConfig(limit, 1.702))
    np.testing.assert_allclose(out, expected, atol=1e-4)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["any", "few experts", "nobody here and there", "nobody"])
@pytest.mark.parametrize("layout", CONFIGS)
def test_gradients_are_those_of_the_plain_form(layout: str, kind: str, scaled: bool) -> None:
    """In inputs, weights and scales: nothing is lost or counted twice on the way into groups and back."""
    config, t, k, e = CONFIGS[layout], 40, 1 if kind == "few experts" else 2, 5
    ids, weights = jnp.asarray(choices(kind, t, k, e)), jax.tree.map(jnp.asarray, draw(e).laid_out(config))
    x, scales, towards = random(t, D), random(t, k, seed=1), random(t, k, D, seed=2)

    def gradients(kernel: str) -> Any:
        def total(x: Any, weights: Weights, scales: Any) -> jax.Array:
            return (run(kernel, x, ids, weights, config, scales if scaled else None) * towards).sum()

        return jax.grad(total, argnums=(0, 1, 2))(x, weights, scales)

    ours, plain = (jax.tree.leaves(gradients(kernel)) for kernel in ("grouped by 8", "reference"))
    for found, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert kind == "nobody" or np.abs(ours[0]).max() > 1


def test_gradients_touch_the_chosen_experts_alone() -> None:
    """The others may hold anything, and their own gradients are zeros."""
    weights, ids = jax.tree.map(jnp.asarray, draw(5).laid_out(OTHER)), jnp.asarray(choices("few experts", 40, 1, 5))
    chosen = np.isin(np.arange(5), ids)
    others = jax.tree.map(lambda s: jnp.where(chosen.reshape(-1, *[1] * (s.ndim - 1)), s, jnp.nan), weights)

    def total(x: Any, weights: Weights) -> jax.Array:
        return run("grouped by 8", x, ids, weights, OTHER).sum()

    found, expected = (jax.grad(total, argnums=(0, 1))(random(40, D), stacks) for stacks in (others, weights))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert all(not np.asarray(leaf)[~chosen].any() for leaf in found[1] if leaf is not None)


@pytest.mark.parametrize(
    ("choices_", "experts_", "group"), [(18, 8, 8), (4096, 16, 64), (8192, 16, 128), (10**6, 8, 128)]
)
def test_groups_are_a_quarter_of_an_even_share(choices_: int, experts_: int, group: int) -> None:
    assert experts.group_size(choices_, experts_) == group


@pytest.mark.parametrize("kind", ["any", "few experts", "nobody here and there", "nobody", "one expert"])
def test_there_are_no_more_groups_than_are_needed(kind: str) -> None:
    ids = choices(kind, 50, 1 if "expert" in kind else 2, 5)
    counts = np.bincount(ids.ravel(), minlength=6)[:5]
    groups = experts._groups(jnp.asarray(ids), 5, 8)
    assert int(groups.used) == (-(-counts // 8)).sum() <= len(groups.experts) == min(ids.size, ids.size // 8 + 5)


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PLAIN, OTHER], ids=["plain", "other"])
@pytest.mark.parametrize(
    ("kernel", "t"), [("by_expert", 2), ("by_expert", 64), ("by_choice", 3), ("by_choice", 64), ("grouped by 8", 64)]
)
def test_storage_form_computes_the_same_bits(kernel: str, t: int, config: ExpertConfig) -> None:
    drawn, ids = draw(5, dtype=jnp.bfloat16), choices("any", t, 3, 5)
    x, weights = random(t, D, dtype=jnp.bfloat16), drawn.laid_out(config)
    out = run(kernel, x, jnp.asarray(ids), weights, config)
    stored = jax.tree.map(lambda stack: stack.view(np.uint16), weights)
    assert same_bits(out, run(kernel, x, jnp.asarray(ids), stored, config))
    error = np.abs(wide(out) - plain_experts(x, ids, drawn, config)).max()
    assert error < 0.02 * np.abs(wide(out)).max()


@pytest.mark.parametrize(
    ("t", "kernel", "config", "dtype"),
    [
        (2, "by_expert", PLAIN, jnp.bfloat16),
        (8, "by_expert", PLAIN, jnp.float32),
        (8, "by_expert", OTHER, jnp.bfloat16),
        (1, "by_choice", PLAIN, jnp.bfloat16),
        (32, "by_choice", PLAIN, jnp.float32),
        (7, "by_choice", OTHER, jnp.bfloat16),
        (16, "by_choice", OTHER, jnp.float32),
        (64, "grouped by 64", PLAIN, jnp.bfloat16),
        (64, "grouped by 64", OTHER, jnp.float32),
    ],
    ids=str,
)
def test_a_product_does_not_depend_on_what_else_is_computed(
    t: int, kernel: str, config: ExpertConfig, dtype: Any
) -> None:
    """Experts in two calls, as when some are elsewhere, give the bits of one call; so do other stacks around them."""
    weights, x, ids = draw(6, dtype=dtype).laid_out(config), random(t, D, dtype=dtype), choices("any", t, 3, 6)
    whole = np.asarray(run(kernel, x, jnp.asarray(ids), weights, config))
    for part in ([0, 3], [1, 2, 4, 5]):
        ours = np.isin(ids, part)
        alone = run(kernel, x, jnp.asarray(np.where(ours, ids, 6)), weights, config)
        assert same_bits(np.asarray(alone)[ours], whole[ours])
        fewer = jax.tree.map(lambda stack, part=part: stack[np.array(part)], weights)
        slots = np.where(ours, np.searchsorted(part, ids), len(part)).astype(np.int32)
        assert same_bits(np.asarray(run(kernel, x, jnp.asarray(slots), fewer, config))[ours], whole[ours])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("t", "kernel", "config", "dtype"),
    [
        (4, "by_expert", PLAIN, jnp.bfloat16),
        (8, "by_expert", OTHER, jnp.float32),
        (4, "by_choice", PLAIN, jnp.float32),
        (32, "by_choice", OTHER, jnp.bfloat16),
        (64, "grouped by 64", OTHER, jnp.bfloat16),
        (130, "grouped by 8", PLAIN, jnp.float32),
    ],
    ids=str,
)
def test_waves_from_slots_give_the_bits_of_one_product(
    t: int, kernel: str, config: ExpertConfig, dtype: Any, scaled: bool
) -> None:
    """Experts in two slots at a time, the later ones where earlier ones were, in an order of their own."""
    drawn = draw(6, dtype=dtype).laid_out(config)
    stored = drawn if dtype == jnp.float32 else jax.tree.map(lambda stack: stack.view(np.uint16), drawn)
    x, scales = random(t, D, dtype=dtype), random(t, 3, seed=1) if scaled else None
    ids = np.where(np.random.default_rng(0).random((t, 3)) < 0.2, 6, choices("any", t, 3, 6)).astype(np.int32)

    def compiled(*arguments: Any) -> Any:
        def function(x: Any, ids: Any, weights: Weights, scales: Any, wave: Any) -> jax.Array:
            return products_of(kernel, x, ids, weights, config, scales, wave)

        return compile_program(function, arguments)(*arguments)

    whole = compiled(x, ids, stored, scales, None)
    # Slots that no wave names hold what would spoil any product.
    spoilt = np.nan if dtype == jnp.float32 else 0x7FC0
    pool = jax.tree.map(lambda stack: np.full((4, *stack.shape[1:]), spoilt, stack.dtype), stored)
    products = jnp.zeros((*ids.shape, D), dtype)
    for experts_, slots_ in (((4, 1), (3, 1)), ((0, 5), (1, 3)), ((2, 3), (3, 0))):
        slots = np.full(6, -1, np.int32)
        slots[list(experts_)] = slots_
        for stack, part in zip(jax.tree.leaves(pool), jax.tree.leaves(stored), strict=True):
            stack[list(slots_)] = part[list(experts_)]
        products = compiled(x, ids, jax.tree.map(jnp.array, pool), scales, Wave(jnp.asarray(slots), products))
    assert same_bits(products, whole)


@pytest.mark.parametrize(
    ("d", "f", "dtype"),
    [
        (60, 64, jnp.float32),
        (512, 512, jnp.float32),
        (512, 512, jnp.bfloat16),
        (2880, 60, jnp.float32),
        (64, 2880, jnp.bfloat16),
    ],
)
@pytest.mark.parametrize(("kernel", "first"), [("by_expert", True), ("by_choice", True), ("by_choice", False)])
def test_a_product_does_not_depend_on_the_number_of_rows(kernel: str, first: bool, d: int, f: int, dtype: Any) -> None:
    """In the layout of gpt-oss and at its widths, and with outputs first; with scales as Llama 4 has them."""
    config = ExpertConfig(f, "silu", True, OTHER.clamp, "alternate", inputs_first=first, down_inputs_first=first)
    weights, x = draw(2, d, f, dtype).laid_out(config), random(32, d, dtype=dtype)
    stored = jax.tree.map(lambda stack: jnp.asarray(stack if dtype == jnp.float32 else stack.view(np.uint16)), weights)
    ids, scales = jnp.asarray(choices("any", 32, 1, 2)), random(32, 1, seed=2)

    def decode(x: Any, ids: Any, scales: Any, weights: Weights) -> jax.Array:
        return products_of(kernel, x, ids, weights, config, scales)

    assert rows_do_not_depend_on_company(decode, lambda n: (x[:n], ids[:n], scales[:n], stored))


# --- memory ----------------------------------------------------------------------------------------------------------


E_BIG, F_BIG, D_BIG = 24, 256, 128


def expert_temporaries(kernel: str, t: int, config: ExpertConfig, dtype: Any) -> tuple[int, int]:
    """Bytes of temporaries of a compiled kernel, and of one expert."""
    shapes = ((F_BIG, D_BIG), (F_BIG, D_BIG), (D_BIG, F_BIG), (F_BIG,), (F_BIG,), (D_BIG,))
    stacks = Matrices(*(np.zeros((E_BIG, *shape), dtype) for shape in shapes)).laid_out(config)
    arguments = (jax.ShapeDtypeStruct((t, D_BIG), jnp.bfloat16), jax.ShapeDtypeStruct((t, 4), jnp.int32), stacks)
    scales = jax.ShapeDtypeStruct((t, 4), jnp.float32)

    def function(x: Any, ids: Any, weights: Weights, scales: Any) -> jax.Array:
        return run(kernel, x, ids, weights, config, scales)

    analysis: Any = compile_program(function, (*arguments, scales)).memory_analysis()
    return analysis.temp_size_in_bytes, 3 * F_BIG * D_BIG * 2


@pytest.mark.parametrize("config", [PLAIN, OTHER, ExpertConfig(F, "silu", joint="halves", inputs_first=True)], ids=str)
@pytest.mark.parametrize(
    ("kernel", "t"), [("by_expert", 4), ("by_expert", 16), ("by_choice", 16), ("grouped by 8", 64)]
)
def test_experts_in_storage_form_take_no_memory_for_the_stack(kernel: str, t: int, config: ExpertConfig) -> None:
    temporary, expert = expert_temporaries(kernel, t, config, jnp.uint16)
    assert temporary < 3 * expert


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gradient_takes_memory_for_its_results_and_not_for_copies_of_experts(dtype: Any) -> None:
    t, k, config = 512, 2, ExpertConfig(F_BIG, "silu")
    stacks = Weights(
        *(jax.ShapeDtypeStruct((E_BIG, *s), dtype) for s in ((F_BIG, D_BIG), (F_BIG, D_BIG), (D_BIG, F_BIG)))
    )
    arguments = (jax.ShapeDtypeStruct((t, D_BIG), dtype), jax.ShapeDtypeStruct((t, k), jnp.int32), stacks)

    def gradient(x: Any, ids: Any, weights: Weights) -> Any:
        return jax.grad(lambda x, w: run("grouped by 32", x, ids, w, config).sum(), argnums=(0, 1))(x, weights)

    analysis: Any = compile_program(gradient, arguments).memory_analysis()
    one = 3 * F_BIG * D_BIG * 4
    # In float32: the stacks of gradients, rows in and out, and a few experts; in bfloat16 the stacks once more.
    rows = 4 * t * k * D_BIG * 4
    assert analysis.temp_size_in_bytes < (1 if dtype == jnp.float32 else 2.1) * E_BIG * one + rows + 8 * one


def test_the_memory_guard_would_catch_a_converted_stack() -> None:
    temporary, expert = expert_temporaries("by_expert", 2, PLAIN, jnp.bfloat16)
    assert temporary > E_BIG * expert
