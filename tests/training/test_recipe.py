"""The parts of the training recipe, one by one: losses, optimiser, update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from novalm_jax.checkpoint.load import parameter_shapes
from novalm_jax.models.attention import Positions, Uncached
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.families import find_family
from novalm_jax.models.moe import RouterTrace
from novalm_jax.options import TrainOptions
from novalm_jax.training import recipe
from novalm_jax.training.recipe import config_json, losses, make_optimizer
from training_helpers import TINY, trainer


def first_model(options: TrainOptions) -> Decoder:
    t = trainer(options)
    return t.model(t.first_state().parameters)


def tokens(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, (rows, 25)).astype(np.int32)


# --- loss ------------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_the_papers() -> None:
    options = replace(TINY, balance_loss=0.5, router_z_loss=0.25)
    model, batch = first_model(options), tokens(3)
    found = losses(model, jnp.asarray(batch), options)
    logits, traces = model.traced(batch[:, :-1])
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    next_token = -np.log(np.take_along_axis(chances, batch[:, 1:, None], -1)).mean()
    balance, z = [], []
    for layer, trace in enumerate(traces):
        scores = np.asarray(trace.logits, np.float64)
        shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        load = np.bincount(np.asarray(trace.ids).ravel(), minlength=4) / trace.ids.size
        np.testing.assert_allclose(found.load[layer], load, atol=1e-6)
        balance.append(4 * (load * shares.mean(0)).sum())
        z.append((np.log(np.exp(scores).sum(-1)) ** 2).mean())
    np.testing.assert_allclose(found.next_token, next_token, rtol=1e-5)
    np.testing.assert_allclose([found.balance, found.router_z], [np.mean(balance), np.mean(z)], rtol=1e-5)
    np.testing.assert_allclose(found.total, next_token + 0.5 * np.mean(balance) + 0.25 * np.mean(z), rtol=1e-5)


def test_the_balance_loss_is_one_for_an_even_load_and_e_for_one_expert() -> None:
    even = RouterTrace(jnp.zeros((8, 4)), jnp.asarray([[0, 1], [2, 3]] * 4))
    one = RouterTrace(jnp.asarray([[50.0, 0, 0, 0]] * 8), jnp.zeros((8, 1), jnp.int32))
    for trace, expected in ((even, 1.0), (one, 4.0)):
        load = recipe.expert_counts(trace) / trace.ids.size
        np.testing.assert_allclose(recipe.balance_loss(trace, load), expected, rtol=1e-6)


def test_tokens_that_are_not_real_are_not_counted() -> None:
    trace = RouterTrace(jnp.zeros((3, 4)), jnp.asarray([[0, 1], [2, 3], [0, 2]]))
    assert recipe.expert_counts(trace, jnp.asarray([True, False, True])).tolist() == [2, 1, 1, 0]


# --- optimiser -------------------------------------------------------------------------------------------------------


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    for options in (TINY, replace(TINY, balance_bias=0.01)):
        raw = config_json(options, 300, options.balance_bias > 0)
        shapes = parameter_shapes(find_family(raw).read_config(raw))
        still = {path for path, decay in recipe.decays(shapes).items() if not decay}
        assert {path.split(".")[-1] for path in still} <= {"scale", "choice_bias"}
        assert all(len(shapes[path]) == 1 for path in still)
        assert all(len(shape) > 1 for path, shape in shapes.items() if path not in still)
    # Without a gradient, decay is all that moves a weight.
    optimizer = make_optimizer(replace(TINY, warmup=0, learning_rate=0.1, weight_decay=0.5))
    weights = {"a.weight": jnp.ones((2, 2)), "a.scale": jnp.ones(2)}
    changes, _ = optimizer.update(jax.tree.map(jnp.zeros_like, weights), optimizer.init(weights), weights)
    np.testing.assert_allclose(changes["a.weight"], -0.05, rtol=1e-5)
    assert not changes["a.scale"].any()


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    """With a gradient of one direction, Adam's step is the rate."""
    options = TrainOptions(steps=100, warmup=10, learning_rate=1.0, weight_decay=0.0)
    optimizer, weights = make_optimizer(options), {"w": jnp.zeros((1, 1))}
    state, steps = optimizer.init(weights), []
    for _ in range(101):
        changes, state = optimizer.update({"w": jnp.ones((1, 1))}, state, weights)
        steps.append(-float(changes["w"][0, 0]))
    np.testing.assert_allclose(
        [steps[0], steps[5], steps[10], steps[55], steps[100]], [0, 0.5, 1, 0.55, 0.1], atol=1e-3
    )


def test_long_gradients_are_clipped() -> None:
    optimizer, weights = make_optimizer(replace(TINY, clip_norm=0.5)), {"w": jnp.zeros((2, 2))}
    (state,) = (
        leaf
        for leaf in jax.tree.leaves(
            optimizer.update({"w": jnp.full((2, 2), 100.0)}, optimizer.init(weights), weights)[1],
            is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState),
        )
        if isinstance(leaf, optax.ScaleByAdamState)
    )
    np.testing.assert_allclose(jnp.linalg.norm(state.mu["w"]), 0.1 * 0.5, rtol=1e-5)


def test_choice_biases_move_against_the_load_of_their_layer() -> None:
    """Of eleven layers, whose paths in order of letters are not in order of numbers."""
    paths = [f"layers.{layer}.feed_forward.choice_bias" for layer in range(11)]
    parameters = {path: jnp.zeros(3) for path in paths} | {"layers.0.norm.scale": jnp.ones(3)}
    load = np.full((11, 3), 1 / 3, np.float32)
    load[2], load[10] = [0.5, 0.5 / 3, 1 / 3], [0.0, 0.0, 1.0]
    moved = jax.jit(recipe.move_choice_biases, static_argnums=2)(parameters, load, 0.125)
    assert moved[paths[2]].tolist() == [-0.125, 0.125, 0.0]
    assert moved[paths[10]].tolist() == [0.125, 0.125, -0.125]
    assert not any(moved[path].any() for path in paths if path not in (paths[2], paths[10]))
    assert moved["layers.0.norm.scale"].tolist() == [1, 1, 1]


# --- update ----------------------------------------------------------------------------------------------------------


def updated(options: TrainOptions, batch: np.ndarray) -> tuple[Any, Any, Any]:
    t = trainer(options)
    return t.update(t.first_state(), batch)


def test_a_batch_in_parts_gives_the_same_update() -> None:
    plain = replace(TINY, warmup=0, balance_loss=0.0)
    whole, found, norm = updated(plain, tokens(4))
    parts, found_parts, norm_parts = updated(replace(plain, accumulate=4), tokens(4))
    for name in ("next_token", "router_z"):
        np.testing.assert_allclose(getattr(found_parts, name), getattr(found, name), rtol=1e-6)
    np.testing.assert_allclose(found_parts.load, found.load, atol=1e-6)
    np.testing.assert_allclose(norm_parts, norm, rtol=1e-4)
    moments = [state.optimizer[1][0].mu for state in (whole, parts)]
    for path, moment in moments[0].items():
        np.testing.assert_allclose(moments[1][path], moment, atol=1e-7, err_msg=path)


def test_bfloat16_computes_in_it_and_keeps_weights_in_float32() -> None:
    options = replace(TINY, dtype="bfloat16")
    state, found, _ = updated(options, tokens(4))
    assert {leaf.dtype for leaf in state.parameters.values()} == {jnp.dtype("float32")}
    model = trainer(options).model(state.parameters)
    assert model.layers[0].attention.q.weight.dtype == jnp.bfloat16
    _, exact, _ = updated(TINY, tokens(4))
    assert 0 < abs(float(found.next_token - exact.next_token)) < 0.01


def test_balancing_biases_even_out_the_load() -> None:
    """A router that sends everything to one pair of experts; without a balance loss only the biases can help."""
    options = replace(TINY, balance_bias=0.004, balance_loss=0.0, steps=60, warmup=0, learning_rate=1e-6)
    t = trainer(options)
    assert t.model(t.first_state().parameters).config.model_type == "glm4_moe"
    state = t.first_state()
    tilted = {path: value for path, value in state.parameters.items() if path.endswith("choice_bias")}
    assert len(tilted) == 2
    parameters = dict(state.parameters) | {path: jnp.asarray([0.1, 0.1, 0.0, 0.0]) for path in tilted}
    state, spread = state._replace(parameters=parameters), []
    for step in range(60):
        state, found, _ = t.update(state, tokens(4, step))
        spread.append(float(jnp.abs(found.load - 0.25).max()))
    assert spread[0] > 0.2 and max(spread[-5:]) < 0.1


def test_the_trace_is_what_the_model_did() -> None:
    model, batch = first_model(TINY), tokens(2)[:, :-1]
    logits, traces = model.traced(batch)
    assert np.array_equal(logits, model(batch))
    assert [(trace.logits.shape, trace.ids.shape) for trace in traces] == [((48, 4), (48, 2))] * 2
    at = Positions(jnp.broadcast_to(jnp.arange(24)[None], (2, 24)), jnp.full(2, 24))
    x = model.embed(batch)
    for layer, trace in zip(model.layers, traces, strict=True):
        routed = layer.route(layer.attend(x, at, Uncached())[0])
        assert np.array_equal(trace.ids, routed.routing.ids)
        assert np.array_equal(trace.ids, jax.lax.top_k(trace.logits, 2)[1])
        x, _ = layer(x, at, Uncached())
