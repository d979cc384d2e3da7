"""Every family against logits of its reference, through the trainable module and through the engine's own programs.

Knows the golden folders (tests/golden/README.md says what is in them and how exact they are).
"""

import dataclasses
import functools
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from golden_helpers import GOLDEN, TOLERANCE, golden, whole
from novalm_jax.checkpoint.load import Checkpoint, abstract_model, load_model
from novalm_jax.compat import compile_program
from novalm_jax.config import LayerConfig, ModelConfig, MoEConfig
from novalm_jax.engine.executor import ResidentExecutor, put_stored
from novalm_jax.engine.functions import DECODE_ROWS, DecodeStep, Functions, ModelWeights, Structure
from novalm_jax.engine.programs import Programs, Shapes
from novalm_jax.kernels import experts as expert_kernel
from novalm_jax.kv.paged import LayerPages, PagedView
from novalm_jax.kv.pages import PAGE
from novalm_jax.models import moe
from novalm_jax.models.attention import Positions
from novalm_jax.models.decoder import Decoder, Routed
from novalm_jax.models.families import FAMILIES
from novalm_jax.models.params import LOGICAL_AXES, parameters_of
from novalm_jax.options import Kernels
from paged_helpers import Sequences
from workspace_helpers import assert_bounded

CASES = sorted(folder.parent.name for folder in GOLDEN.glob("*/golden.npz"))
SAME_WEIGHTS = {"mixtral-packed": "mixtral", "qwen3_moe-packed": "qwen3_moe", "qwen3_moe-w123": "qwen3_moe"}
DISTINCT = [case for case in CASES if case not in SAME_WEIGHTS]
# Frequencies that change with the length: steps of the cached model and repeated whole passes differ there.
LENGTH_DEPENDENT = ["hunyuan_v1_moe-dynamic", "llama-dynamic", "phimoe-longrope"]
CAPACITY, SPLIT = 128, 11


@functools.cache
def logits_of(case: str) -> np.ndarray:
    return whole(load_model(GOLDEN / case), golden(case).ids)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


@functools.cache
def programs_of(config: ModelConfig, dtype: str, rows: int, kernels: Kernels = "native") -> Programs:
    shapes = Shapes.of(config, rows, CAPACITY, np.dtype(jnp.dtype(dtype)), kernels=kernels)
    return Programs(abstract_model(config, dtype), shapes)


def sequences_of(case: str, dtype: str = "float32", rows: int = 2, kernels: Kernels = "native") -> Sequences:
    checkpoint = Checkpoint.open(GOLDEN / case)
    programs = programs_of(checkpoint.config, dtype, rows, kernels)
    return Sequences(ResidentExecutor(checkpoint.load(dtype, put_stored), programs, 0))


def test_all_cases_are_there() -> None:
    assert CASES == sorted(config.parent.name for config in GOLDEN.glob("*/config.json"))
    # Kimi K2 has no reference of its own: it is DeepSeek-V3 under another name.
    assert {case.split("-")[0] for case in CASES} == set(FAMILIES) - {"kimi_k2"}


# --- the trainable module --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_logits_in_float32(case: str) -> None:
    logits = logits_of(case)
    assert logits.dtype == np.float32
    assert np.abs(logits - golden(case).logits).max() <= TOLERANCE


# One case a family; its other cases are made of the same parts, but for these.
ONE_A_FAMILY = [c for c in DISTINCT if "-" not in c] + ["deepseek_v2-full", "ernie4_5_moe-bias", "llama-hub"]


@pytest.mark.parametrize("case", ONE_A_FAMILY)
def test_logits_in_bfloat16(case: str) -> None:
    model = load_model(GOLDEN / case, "bfloat16")
    wide = {path for path, param in parameters_of(model).items() if param.dtype != jnp.bfloat16}
    assert all(path.endswith("choice_bias") for path in wide)
    logits = whole(model, golden(case).ids)
    assert logits.dtype == np.float32
    assert correlation(logits, golden(case).logits) > least_correlation(case)


def least_correlation(case: str) -> float:
    """Sparsemixer's thresholds are cliffs: a rounded logit takes other weights, in the reference too."""
    return 0.985 if case.startswith("phimoe") else 0.995


@pytest.mark.parametrize("case", SAME_WEIGHTS)
def test_every_layout_of_the_same_weights_gives_the_same_bits(case: str) -> None:
    assert np.array_equal(logits_of(case), logits_of(SAME_WEIGHTS[case]))


def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "deepseek_v3", tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "model_type": "kimi_k2"}))
    assert np.array_equal(whole(load_model(tmp_path), golden("deepseek_v3").ids), logits_of("deepseek_v3"))


def without_gradient(case: str, path: str) -> bool:
    """A bias that takes part in the choice alone; a router whose weights are shares of what is close to the best."""
    return path.endswith("choice_bias") or (case.startswith("phimoe") and path.endswith("router.weight"))


@pytest.mark.parametrize("case", ONE_A_FAMILY)
def test_gradients_reach_every_parameter(case: str) -> None:
    """A detached branch has a gradient of zero; a masked softmax done wrong has one of NaN."""
    graph, state = nnx.split(load_model(GOLDEN / case))

    def loss(state: Any) -> jax.Array:
        return jnp.mean(jnp.square(nnx.merge(graph, state)(jnp.asarray(golden(case).ids))))

    gradients = {
        ".".join(map(str, path)): np.asarray(g.get_value())
        for path, g in nnx.to_flat_state(jax.jit(jax.grad(loss))(state))
    }
    assert len(gradients) == len(jax.tree.leaves(state))
    assert not [path for path, gradient in gradients.items() if not np.isfinite(gradient).all()]
    assert not [path for path, g in gradients.items() if not g.any() and not without_gradient(case, path)]


@pytest.mark.parametrize("case", DISTINCT)
def test_every_parameter_names_its_axes(case: str) -> None:
    for path, param in parameters_of(abstract_model(Checkpoint.open(GOLDEN / case).config)).items():
        assert len(param.axes) == len(param.shape), path
        assert set(param.axes) <= set(LOGICAL_AXES), path
        assert len(set(param.axes)) == len(param.axes), path


# --- the engine ------------------------------------------------------------------------------------------------------


def stepwise(sequences: Sequences, ids: np.ndarray) -> np.ndarray:
    """Logits `[b, t, v]`: a prefill up to SPLIT, then all sequences together, token by token."""
    b, t = ids.shape
    parts = [np.stack([sequences.prefill_logits(row, ids[row, :SPLIT].tolist(), t) for row in range(b)])]
    for at in range(SPLIT, t):
        step = sequences.decode(
            dict(enumerate(ids[:, at].tolist())), dict.fromkeys(range(b), at), dict.fromkeys(range(b), t)
        )
        parts.append(np.asarray(step.logits)[:b, None])
    return np.concatenate(parts, axis=1)


def continuation(sequences: Sequences, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    decoded = sequences.prefill(0, tokens)
    for _ in range(count - 1):
        tokens.append(int(decoded.greedy[0]))
        decoded = sequences.decode({0: tokens[-1]}, {0: len(tokens) - 1}, {0: len(tokens)})
    return [*tokens[len(prompt) :], int(decoded.greedy[0])]


@pytest.mark.parametrize("case", DISTINCT)
def test_prefill_and_decode_give_the_golden_logits_and_ids(case: str) -> None:
    sequences, expected = sequences_of(case), golden(case)
    assert np.abs(stepwise(sequences, expected.ids) - expected.logits).max() <= TOLERANCE
    if count := expected.greedy.shape[1]:
        assert continuation(sequences, expected.ids[0].tolist(), count) == expected.greedy[0].tolist()
    else:
        assert case in LENGTH_DEPENDENT
    assert_bounded(sequences.executor._programs)


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        *((case, "native") for case in ("mixtral-bf16", "qwen2_moe", "olmoe-clip", "granitemoe")),
        *itertools.product(("deepseek_v3", "gpt_oss", "llama4_text-chunk"), ("native", "xla")),
    ],
)
def test_prefill_and_decode_in_bfloat16(case: str, kernels: Kernels) -> None:
    sequences = sequences_of(case, "bfloat16", kernels=kernels)
    logits = stepwise(sequences, golden(case).ids)
    assert correlation(logits, golden(case).logits) > 0.995
    assert correlation(logits, whole(load_model(GOLDEN / case, "bfloat16"), golden(case).ids)) > 0.999
    assert_bounded(sequences.executor._programs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["qwen2_moe", "deepseek_v3", "gpt_oss", "llama4_text-chunk"])
def test_a_row_does_not_depend_on_its_neighbours(case: str, dtype: str) -> None:
    """Alone in the smallest bucket and among others of other lengths, a sequence has the same logits, bit for bit."""
    count, length = 8, 24
    ids = np.random.default_rng(5).integers(3, 96, (count, length + 8)).astype(np.int32)
    starts = [length - 2 * i for i in range(count)]
    crowd, single = sequences_of(case, dtype, rows=8), sequences_of(case, dtype, rows=8)
    for row, start in enumerate(starts):
        crowd.prefill(row, ids[row, :start].tolist())
    for row in (0, 5):
        # Other pages than in the crowd, after another sequence has been there.
        single.prefill(row, ids[3].tolist())
        single.prefill(row, ids[row, : starts[row]].tolist())
    for i in range(6):
        places = {row: start + i for row, start in enumerate(starts)}
        tokens = {row: int(ids[row, at]) for row, at in places.items()}
        known = {row: at + 1 for row, at in places.items()}
        together = np.asarray(crowd.decode(tokens, places, known).logits)
        for row in (0, 5):
            alone = single.decode({row: tokens[row]}, places, known)
            assert alone.logits.shape[0] == DECODE_ROWS[0]
            assert np.asarray(alone.logits)[0].tobytes() == together[row].tobytes()


class Apart:
    """A decode step as programs of its own on each side of the router, one expert subset after the other."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, pages: tuple[LayerPages, ...], kernels: Kernels):
        self._product = expert_kernel.by_choice if kernels == "native" else expert_kernel.by_expert
        self._structure = Structure(abstract_model(config, str(weights.outer[0].dtype)), kernels)
        self._config, self._weights = config, weights
        self._functions = Functions(self._structure, CAPACITY)
        self._compiled: dict[Any, Any] = {}
        self.pages = list(pages)

    def run(self, step: DecodeStep) -> np.ndarray:
        """Logits `[b, v]`."""
        outer, structure = self._weights.outer, self._structure
        x = self._call("embed", lambda o, t: structure.outer(o).embed(t[:, None]), outer, step.tokens)
        for i, (config, layer) in enumerate(zip(self._config.layers, self._weights.layers, strict=True)):
            attend = functools.partial(self._attend, config)
            routed, self.pages[i] = self._call(("attend", config), attend, layer.dense, self.pages[i], x, step)
            x = self._experts(config, layer, Routed(*routed)) if layer.experts else routed
        return np.asarray(self._call("head", lambda o, x: structure.outer(o).logits(x[:, 0]), outer, x))

    def _attend(self, config: LayerConfig, dense: Any, pages: Any, x: Any, step: DecodeStep) -> Any:
        at, table = Positions(step.positions[:, None], step.known), step.tables[self._functions._groups[config]]
        view = PagedView(pages, table, step.positions, step.positions + 1, self._structure.native)
        return self._functions._attend(config, dense, view, x, at, step.positions >= 0)

    def _experts(self, config: LayerConfig, layer: Any, routed: Routed) -> jax.Array:
        assert isinstance(config.feed_forward, MoEConfig)
        moe_config, ids = config.feed_forward, np.asarray(routed.routing.ids)
        products: Any = None
        scales = moe.input_scales(moe_config, routed.routing)
        for subset in (ids % 2 == 0, ids % 2 == 1):
            mine = np.where(subset, ids, moe_config.num_experts)
            part = self._call(
                ("experts", config),
                lambda h, ids, weights, scales: self._product(h, ids, weights, moe_config.expert, scales),
                *(routed.h, mine, layer.experts, scales),
            )
            products = part if products is None else np.where(subset[..., None], part, products)
        return self._call(
            ("combine", config),
            lambda dense, routed, products: self._structure.layer(config, dense).combine(routed, products),
            *(layer.dense, routed, products),
        )

    def _call(self, key: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        if key not in self._compiled:
            self._compiled[key] = compile_program(function, arguments)
        return self._compiled[key](*arguments)


@pytest.mark.parametrize(
    ("case", "rows", "kernels"),
    [
        *((case, 8, "native") for case in ("qwen2_moe", "granitemoe", "deepseek_v3", "gpt_oss", "llama4_text")),
        *((case, 4, "xla") for case in ("deepseek_v3", "gpt_oss", "llama4_text")),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_cut_at_the_router_gives_the_bits_of_the_whole_step(
    case: str, dtype: str, rows: int, kernels: Kernels
) -> None:
    checkpoint = Checkpoint.open(GOLDEN / case)
    model = checkpoint.load(dtype, put_stored)
    weights, programs = Structure.take_apart(model), programs_of(checkpoint.config, dtype, rows, kernels)
    pages, blocks = programs.new_pages(), CAPACITY // PAGE
    # Row r has page r of every group first, then page r + rows.
    table = (np.arange(rows)[:, None] + rows * np.arange(blocks)[None]).astype(np.int32)
    tokens = np.random.default_rng(rows).integers(3, 96, (8, rows)).astype(np.int32)
    apart = Apart(checkpoint.config, weights, programs.new_pages(), kernels)
    for at, now in enumerate(tokens):
        # The last row is idle at first, as in a bucket that is not full.
        positions = np.full(rows, at, np.int32)
        positions[-1] = -1 if at < 3 else at - 3
        step = DecodeStep(now, positions, positions + 1, (table,) * len(programs.reaches))
        decoded, pages, _ = programs.decode(rows)(weights, pages, step)
        active = positions >= 0
        assert apart.run(step)[active].tobytes() == np.asarray(decoded.logits)[active].tobytes()


# --- programs hold no weights ----------------------------------------------------------------------------------------

CONSTANT = re.compile(r"= (\w+?)(\d+)\[([\d,]*)\]\S* constant\(")


def constant_bytes(compiled: Any) -> int:
    """Size of the largest constant in a compiled program."""
    sizes = [
        int(bits) // 8 * int(np.prod([int(n) for n in shape.split(",") if n]))
        for _, bits, shape in CONSTANT.findall(compiled.as_text())
    ]
    return max(sizes, default=0)


def big_model() -> Decoder:
    config = dataclasses.replace(Checkpoint.open(GOLDEN / "qwen2_moe").config, vocab_size=1 << 14)
    return Decoder(config, rngs=nnx.Rngs(0))


def test_the_module_is_compiled_without_its_weights() -> None:
    model, tokens = big_model(), jnp.zeros((1, 4), jnp.int32)
    assert max(param.get_value().nbytes for param in parameters_of(model).values()) > 1 << 20
    assert constant_bytes(jax.jit(lambda m, t: m(t)).lower(model, tokens).compile()) < 1 << 20
    # What the guard is for: this form copies the weights into the program.
    assert constant_bytes(jax.jit(model).lower(tokens).compile()) > 1 << 20


def test_the_engines_programs_are_compiled_without_weights() -> None:
    model = big_model()
    programs = Programs(model, Shapes.of(model.config, 4, CAPACITY, np.dtype(np.float32)))
    layer = model.config.layers[0]
    made = [programs.decode(4), programs.embed(64), programs.head(64), programs.head_of_block(64)]
    made += [programs.attend(layer, 64), programs.experts(layer, 64)]
    for compiled in made:
        assert constant_bytes(compiled) < 1 << 20


def test_a_decode_step_leaves_the_pages_where_they_are() -> None:
    config = Checkpoint.open(GOLDEN / "qwen2_moe").config
    programs = Programs(abstract_model(config, "bfloat16"), Shapes.of(config, 4, 4096, np.dtype(jnp.bfloat16)))
    analysis: Any = programs.decode(4).memory_analysis()
    assert analysis.alias_size_in_bytes == programs.page_bytes
    assert analysis.temp_size_in_bytes < programs.page_bytes / 4


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
def test_empty_batches_have_empty_logits(shape: tuple[int, int]) -> None:
    logits = load_model(GOLDEN / "qwen2_moe")(jnp.zeros(shape, jnp.int32))
    assert logits.shape == (*shape, 96)
