"""Every part of a decoder against plain float64 numpy, and what each part promises about bits and memory."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from novalm_jax.compat import compile_program
from novalm_jax.config import (
    Activation,
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)
from novalm_jax.engine.programs import DECODE_ROWS
from novalm_jax.kernels import attention, experts
from novalm_jax.kernels.experts import Weights
from novalm_jax.kernels.linear import einsum
from novalm_jax.kv.static import CacheView, LayerCache, cache_shape
from novalm_jax.models import rope
from novalm_jax.models.attention import Positions, Uncached
from novalm_jax.models.decoder import Decoder, DecoderLayer
from novalm_jax.models.linear import GatedMLP
from novalm_jax.models.moe import MoE, choose
from novalm_jax.models.norms import RMSNorm
from novalm_jax.models.params import parameters_of


def random(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def randomise(module: nnx.Module) -> dict[str, np.ndarray]:
    """Gives every parameter random values and returns them in float64, by path."""
    found = parameters_of(module)
    for i, param in enumerate(found.values()):
        param.set_value(random(*param.shape, seed=i, dtype=param.dtype) * jnp.asarray(0.3, param.dtype))
    return {path: wide(param.get_value()) for path, param in found.items()}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def plain_softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


# --- norm ------------------------------------------------------------------------------------------------------------


def test_rms_norm_is_x_over_its_root_mean_square_times_the_scale() -> None:
    norm = RMSNorm(12, 0.3, dtype=jnp.float32, rngs=nnx.Rngs(0))
    scale = randomise(norm)["scale"]
    x = random(2, 5, 12)
    expected = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 0.3) * scale
    np.testing.assert_allclose(norm(x), expected, atol=1e-6)


def test_rms_norm_works_in_float32_and_rounds_before_the_scale() -> None:
    norm = RMSNorm(64, 1e-6, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    randomise(norm)
    x = random(8, 64, dtype=jnp.bfloat16) * jnp.asarray(300, jnp.bfloat16)
    scaled = x.astype(jnp.float32) / jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(
        wide(norm(x)), wide(scaled.astype(jnp.bfloat16) * norm.scale[...][None]), rtol=2**-8, atol=0
    )
    assert norm(x).dtype == jnp.bfloat16


# --- rotary positions ------------------------------------------------------------------------------------------------


def expected_frequencies(config: RopeConfig, c: int, length: int) -> np.ndarray:
    """Pair by pair, from the published formulas."""
    found = []
    turns_at = [
        c * np.log(config.original_context / (r * 2 * np.pi)) / (2 * np.log(config.theta))
        for r in (config.beta_fast, config.beta_slow)
        if config.original_context
    ]
    for i in range(c // 2):
        f = config.theta ** (-2 * i / c)
        if config.kind == "linear":
            f /= config.factor
        elif config.kind == "dynamic":
            n = max(length, config.original_context)
            stretch = config.factor * n / config.original_context - (config.factor - 1)
            f = (config.theta * stretch ** (c / (c - 2))) ** (-2 * i / c)
        elif config.kind == "llama3":
            wave, original = 2 * np.pi / f, config.original_context
            if wave > original / config.low_freq_factor:
                f /= config.factor
            elif wave >= original / config.high_freq_factor:
                s = (original / wave - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
                f = (1 - s) * f / config.factor + s * f
        elif config.kind == "yarn":
            low, high = turns_at
            if config.truncate:
                low, high = np.floor(low), np.ceil(high)
            low, high = max(low, 0), min(high, c - 1)
            ramp = min(max((i - low) / ((high - low) or 0.001), 0), 1)
            f = f / config.factor * ramp + f * (1 - ramp)
        found.append(f)
    return np.array(found)


ROPES = {
    "default": RopeConfig(1e4),
    "linear": RopeConfig(500.0, "linear", 4.0),
    "dynamic": RopeConfig(1e4, "dynamic", 4.0, 16),
    "llama3": RopeConfig(5e5, "llama3", 32.0, 8192, 1.0, 4.0),
    "yarn": RopeConfig(1e6, "yarn", 4.0, 4096, attention_factor=1.1386),
    "yarn, not truncated": RopeConfig(100.0, "yarn", 4.0, 32, beta_fast=4.0, beta_slow=0.25, truncate=False),
    "yarn, no ramp": RopeConfig(1e4, "yarn", 4.0, 64, beta_fast=4.0, beta_slow=4.0, truncate=False),
}


@pytest.mark.parametrize("name", ROPES)
def test_angles_follow_the_published_formulas(name: str) -> None:
    config, c = ROPES[name], 64
    positions = np.array([[0, 1, 7, 100], [3, 2, 39, 40]], np.int32)
    lengths = np.array([12, 41], np.int32)
    cos, sin = rope.angles(config, c, jnp.asarray(positions), jnp.asarray(lengths))
    for row, length in enumerate(lengths):
        angle = positions[row, :, None] * expected_frequencies(config, c, int(length))
        np.testing.assert_allclose(cos[row], np.cos(angle) * config.attention_factor, atol=2e-5)
        np.testing.assert_allclose(sin[row], np.sin(angle) * config.attention_factor, atol=2e-5)
    assert cos.dtype == sin.dtype == jnp.float32 and cos.shape == (2, 4, c // 2)


def test_llama3_keeps_divides_and_blends_the_right_pairs() -> None:
    plain = rope.static_frequencies(RopeConfig(5e5), 64)
    ratio = plain / rope.static_frequencies(ROPES["llama3"], 64)
    np.testing.assert_allclose(ratio[:15], 1, rtol=1e-6)
    assert np.all(ratio[15:18] > 1.01) and np.all(ratio[15:18] < 31.9)
    np.testing.assert_allclose(ratio[18:], 32, rtol=1e-6)


def test_dynamic_frequencies_move_only_past_the_models_own_context() -> None:
    def of(length: int) -> np.ndarray:
        return np.asarray(rope.angles(ROPES["dynamic"], 8, jnp.full((1, 1), 9), jnp.full((1,), length))[1])

    assert same_bits(of(3), of(16))
    assert not np.allclose(of(17), of(16), atol=1e-4)


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    x, angle = random(2, 3, 4, 6), np.array([[[0.1, 1.0, 2.0]] * 3] * 2) * np.arange(1, 4)[None, :, None]
    turned = rope.rotate(x, jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32))
    pair = wide(x)[..., :3] + 1j * wide(x)[..., 3:]
    expected = pair * np.exp(1j * angle)[:, :, None, :]
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), atol=1e-6)


# --- attention -------------------------------------------------------------------------------------------------------


def plain_attention(q: Any, k: Any, v: Any, start: int, scale: float, window: int | None) -> np.ndarray:
    """One sequence, one head and query at a time: q `[t, h, c]` from position `start`, k and v `[s, g, c]`."""
    q, k, v = wide(q), wide(k), wide(v)
    out = np.zeros_like(q)
    for i, head in np.ndindex(*q.shape[:2]):
        group, at = head // (q.shape[1] // k.shape[1]), start + i
        first = 0 if window is None else max(0, at - window + 1)
        weights = plain_softmax(k[first : at + 1, group] @ q[i, head] * scale)
        out[i, head] = weights @ v[first : at + 1, group]
    return out


HEADS = {"multi-head": (4, 4), "grouped": (6, 2), "multi-query": (4, 1)}


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("heads", HEADS)
def test_reference_attention(heads: str, window: int | None) -> None:
    h, g = HEADS[heads]
    q, k, v = random(2, 9, h, 8), random(2, 9, g, 8, seed=1), random(2, 9, g, 8, seed=2)
    out = attention.reference(q, k, v, 0.7, window)
    for row in range(2):
        np.testing.assert_allclose(out[row], plain_attention(q[row], k[row], v[row], 0, 0.7, window), atol=2e-6)


S, BLOCK = 32, 8
"""Positions in a cache of these tests, and how many of them attention takes at a time."""


class Cached:
    """Random sequences in a cache whose every other position is NaN."""

    def __init__(self, starts: list[int], t: int, h: int, g: int, dtype: Any = jnp.float32, *, rows: int = 5):
        self.starts, self.t, self.dtype = starts, t, dtype
        self.rows = list(np.random.default_rng(7).permutation(rows)[: len(starts)])
        self.q = random(len(starts), t, h, 8, seed=3, dtype=dtype)
        self.k, self.v = (random(len(starts), S, g, 8, seed=seed, dtype=dtype) for seed in (4, 5))
        self.keys, self.values = self._stored(self.k, rows), self._stored(self.v, rows)

    def _stored(self, new: jax.Array, rows: int) -> jax.Array:
        cache = np.full((rows, new.shape[2], S, 8), np.nan, np.asarray(new).dtype)
        for row, start, sequence in zip(self.rows, self.starts, np.asarray(new), strict=True):
            cache[row, :, : max(start, 0) + self.t] = sequence.swapaxes(0, 1)[:, : max(start, 0) + self.t]
        return jnp.asarray(cache if self.dtype == jnp.float32 else cache.view(np.uint16))

    def attend(self, window: int | None, which: list[int] | None = None) -> np.ndarray:
        which = list(range(len(self.starts))) if which is None else which
        rows, starts = np.array(self.rows, np.int32)[which], np.array(self.starts, np.int32)[which]
        q = self.q[np.array(which)]
        return np.asarray(attend(q, self.keys, self.values, jnp.asarray(rows), jnp.asarray(starts), window))

    def expected(self, row: int, window: int | None) -> np.ndarray:
        if self.starts[row] < 0:
            return np.zeros(self.q.shape[1:])
        return plain_attention(self.q[row], self.k[row], self.v[row], self.starts[row], 0.3, window)


@partial(jax.jit, static_argnames="window")
def attend(q: Any, keys: Any, values: Any, rows: Any, starts: Any, window: int | None) -> jax.Array:
    return attention.cached(q, keys, values, rows, starts, 0.3, window, BLOCK)


@pytest.mark.parametrize(("t", "starts"), [(1, [0, 7, 8, 9, 31]), (3, [0, 5, 6, 16, 29]), (17, [0, 3, 15])])
@pytest.mark.parametrize(
    ("heads", "window"),
    [*(("grouped", w) for w in (None, 1, 5, 8, 9, 100)), ("multi-query", None), ("multi-head", 5)],
)
def test_cached_attention_sees_its_own_past_and_nothing_else(
    heads: str, t: int, starts: list[int], window: int | None
) -> None:
    """Starts lie on, before and behind block borders; rows of the cache are shuffled; the rest of it is NaN."""
    case = Cached(starts, t, *HEADS[heads])
    out = case.attend(window)
    for row in range(len(starts)):
        np.testing.assert_allclose(out[row], case.expected(row, window), atol=3e-6)


def test_cached_attention_equals_the_reference_on_a_whole_sequence() -> None:
    case = Cached([0, 0], S, 6, 2)
    np.testing.assert_allclose(case.attend(None), attention.reference(case.q, case.k, case.v, 0.3, None), atol=3e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_idle_rows_give_zeros(window: int | None) -> None:
    case = Cached([-1, 12, -1], 1, 4, 4)
    out = case.attend(window)
    assert np.array_equal(out[[0, 2]], np.zeros_like(out[[0, 2]]))
    np.testing.assert_allclose(out[1], case.expected(1, window), atol=3e-6)


def test_cached_attention_reads_bfloat16_in_storage_form() -> None:
    case = Cached([3, 20], 2, 6, 2, jnp.bfloat16)
    assert case.keys.dtype == jnp.uint16
    out = case.attend(None)
    assert out.dtype == jnp.bfloat16
    for row in range(2):
        np.testing.assert_allclose(wide(out[row]), case.expected(row, None), atol=0.02)
    view = case.keys.view(jnp.bfloat16), case.values.view(jnp.bfloat16)
    as_floats = attend(case.q, *view, jnp.asarray(case.rows, jnp.int32), jnp.asarray(case.starts, jnp.int32), None)
    assert same_bits(out, as_floats)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_of_cached_attention_does_not_depend_on_its_neighbours(dtype: Any) -> None:
    case = Cached([9, 30, 0, 17], 1, 6, 2, dtype)
    together = case.attend(None)
    for which in ([0, 1], [1, 0], [3, 2, 1, 0], [2, 3]):
        assert same_bits(case.attend(None, which), together[np.array(which)])


def test_a_decode_step_writes_its_cache_in_place() -> None:
    heads = AttentionConfig(8, 2, 64, 0.1, RopeConfig(1e4))
    cache = cache_shape(heads, 4, 1024, np.dtype(jnp.bfloat16))
    q, kv = (jax.ShapeDtypeStruct((4, 1, n, 64), jnp.bfloat16) for n in (8, 2))
    ints = jax.ShapeDtypeStruct((4,), jnp.int32)

    def step(cache: LayerCache, q: Any, k: Any, v: Any, rows: Any, starts: Any) -> Any:
        out, view = CacheView(cache, rows, starts, 128).attend(q, k, v, 0.1, None)
        return out, view.cache

    analysis: Any = compile_program(step, (cache, q, kv, kv, ints, ints), donate=(0,)).memory_analysis()
    cache_bytes = 2 * 4 * 2 * 1024 * 64 * 2
    assert analysis.alias_size_in_bytes == cache_bytes
    assert analysis.temp_size_in_bytes < cache_bytes / 4


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [60, 512])
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(width: int, dtype: Any) -> None:
    """At widths of real models, before rounding: the router's logits are used as they are."""
    x, weight = random(DECODE_ROWS[-1], 768, dtype=dtype), random(width, 768, seed=1, dtype=dtype)
    found = []
    for rows in DECODE_ROWS:
        arguments = (x[:rows], weight)
        product = compile_program(lambda x, weight: einsum("td,ed->te", x, weight), arguments)
        found.append(np.asarray(product(*arguments))[: DECODE_ROWS[0]])
    assert all(same_bits(found[0], more) for more in found)


# --- router ----------------------------------------------------------------------------------------------------------


def moe_config(e: int = 4, k: int = 2, **more: Any) -> MoEConfig:
    return MoEConfig(num_experts=e, experts_per_token=k, expert_width=20, activation="silu", **more)


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ({}, [0.6439, 0.2369]),
        ({"renormalise": True}, [0.7311, 0.2689]),
        ({"softmax": "after"}, [0.7311, 0.2689]),
    ],
)
def test_router_weights(more: dict[str, Any], weights: list[float]) -> None:
    routing = choose(jnp.asarray([[2.0, 1.0, 0.0, -1.0], [-1.0, 0.0, 2.0, 1.0]]), moe_config(**more))
    assert routing.ids.tolist() == [[0, 1], [2, 3]] and routing.ids.dtype == jnp.int32
    np.testing.assert_allclose(routing.weights, [weights] * 2, atol=1e-4)


@pytest.mark.parametrize("softmax", ["before", "after"])
def test_router_ties_go_to_the_lower_id(softmax: Any) -> None:
    logits = jnp.asarray([[0.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0], [-2.0, 5.0, -2.0, -2.0]])
    assert choose(logits, moe_config(softmax=softmax)).ids.tolist() == [[1, 2], [0, 1], [1, 0]]


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
        spoilt = Weights(*(stack.at[absent].set(jnp.nan) for stack in weights))
    out = KERNELS[kernel](x, jnp.asarray(ids), spoilt)
    np.testing.assert_allclose(out, plain_experts(x, ids, weights), rtol=1e-5, atol=2e-4)
    assert np.array_equal(np.asarray(out)[ids == 5], np.zeros(((ids == 5).sum(), D), np.float32))


@pytest.mark.parametrize("kernel", ["by_expert", "grouped"])
@pytest.mark.parametrize("t", [2, 64])
def test_storage_form_computes_the_same_bits(kernel: str, t: int) -> None:
    weights, x, ids = expert_weights(5, jnp.bfloat16), random(t, D, dtype=jnp.bfloat16), choices("any", t, 3, 5)
    out = KERNELS[kernel](x, jnp.asarray(ids), weights)
    stored = Weights(*(stack.view(jnp.uint16) for stack in weights))
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
        fewer = Weights(*(stack[np.array(part)] for stack in weights))
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
    np.testing.assert_allclose(experts.expert_product(one, single, activation), at_one, atol=1e-6)


@pytest.mark.parametrize(
    "more", [{}, {"shared_width": 12}, {"shared_width": 12, "shared_gate": True}, {"softmax": "after"}], ids=str
)
def test_moe_is_the_weighted_sum_of_its_experts_and_the_shared_one(more: dict[str, Any]) -> None:
    config = moe_config(5, 3, **more)
    moe = MoE(D, config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    values, x = randomise(moe), random(7, D)
    logits = wide(x) @ values["router.weight"].T
    ids = np.argsort(-logits, axis=-1)[:, :3]
    weights = np.take_along_axis(plain_softmax(logits), ids, -1)
    if config.softmax == "after":
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


def tiny_layer(residual_multiplier: float) -> LayerConfig:
    heads = AttentionConfig(2, 1, 4, 0.5, RopeConfig(1e4))
    return LayerConfig(8, 1e-6, heads, MLPConfig(6, "silu"), residual_multiplier)


def test_the_residual_multiplier_scales_both_branches() -> None:
    layer = DecoderLayer(tiny_layer(0.25), dtype=jnp.float32, rngs=nnx.Rngs(0))
    x, branch = random(1, 3, 8), random(3, 8, seed=1)
    np.testing.assert_allclose(layer.add(x, branch), wide(x) + 0.25 * wide(branch)[None], atol=1e-6)
    randomise(layer)
    plain = DecoderLayer(tiny_layer(1.0), dtype=jnp.float32, rngs=nnx.Rngs(0))
    randomise(plain)
    at = Positions(jnp.arange(3)[None], jnp.full((1,), 3))
    halves = [wide(module.attend(x, at, Uncached())[0]) - wide(x) for module in (layer, plain)]
    np.testing.assert_allclose(halves[0], 0.25 * halves[1], atol=1e-6)


def test_embedding_multiplier_and_logits_divisor() -> None:
    config = ModelConfig(
        "granitemoe", 11, 8, 64, 1e-6, True, (tiny_layer(1.0),), embedding_multiplier=12.0, logits_divisor=4.0
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    values = randomise(model)
    embedded = model.embed(jnp.asarray([[3, 0]], jnp.int32))
    np.testing.assert_allclose(embedded, 12 * values["embed.weight"][[3, 0]][None], rtol=1e-6)
    x = random(2, 8)
    normal = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6) * values["norm.scale"]
    np.testing.assert_allclose(model.logits(x), normal @ values["embed.weight"].T / 4, atol=1e-6)
    assert "head.weight" not in values
