"""The parts of the training recipe, one by one, and whole runs of a tiny model: what is learnt, and going on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from novalm_jax.checkpoint.atomic import MANIFEST
from novalm_jax.checkpoint.load import load_model, parameter_shapes
from novalm_jax.errors import EngineError, OptionError
from novalm_jax.models.attention import Positions, Uncached
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.families import find_family
from novalm_jax.models.moe import RouterTrace
from novalm_jax.options import TrainOptions
from novalm_jax.training import recipe
from novalm_jax.training.data import END
from novalm_jax.training.recipe import Trainer, config_json, losses, make_optimizer, train
from novalm_jax.training.run_folder import METRICS

TINY = TrainOptions(
    vocab_size=300,
    context_length=24,
    layers=2,
    hidden_size=32,
    heads=2,
    kv_heads=1,
    experts=4,
    experts_per_token=2,
    expert_width=16,
    steps=12,
    batch_size=4,
    warmup=2,
    evaluate_every=5,
    save_every=4,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences in which much follows from what came before."""
    draw = np.random.default_rng(0)
    verbs = {"cat": "sleeps", "dog": "barks", "bird": "sings", "fish": "swims"}

    def sentence() -> str:
        who = str(draw.choice(list(verbs)))
        return f"The {draw.choice(['old', 'young'])} {who} {verbs[who]}. "

    stories = ["".join(sentence() for _ in range(40)) for _ in range(12)]
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text(f"\n{END}\n".join(stories))
    return path


def trainer(options: TrainOptions) -> Trainer:
    raw = config_json(options, options.vocab_size)
    return Trainer(find_family(raw).read_config(raw), options)


def first_model(options: TrainOptions) -> Decoder:
    t = trainer(options)
    return t.model(t.first_state().parameters)


def tokens(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, (rows, 25)).astype(np.int32)


def records(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What a run said of itself, but for times."""
    found = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if name != "seconds"}
        for record in found
        if kind in (None, record["kind"])
    ]


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
        raw = config_json(options, 300)
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


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train([text], folder, TINY) == folder / "model"
    return folder


def test_a_run_says_what_it_did(whole: Path) -> None:
    assert [record["step"] for record in records(whole, "update")] == list(range(1, 13))
    assert [record["step"] for record in records(whole, "validation")] == [5, 10, 12]
    counting = records(whole, "baselines")[0]["losses"]
    assert counting["5-gram"]["nats_per_token"] < counting["1-gram"]["nats_per_token"] < np.log(300)
    for record in records(whole, "validation"):
        assert np.shape(record["load"]) == (2, 4)
        np.testing.assert_allclose(np.sum(record["load"], axis=1), 1)
    assert json.loads((whole / "run.json").read_text())["options"] == asdict(TINY)


def test_validation_is_the_mean_over_every_token(whole: Path, text: Path) -> None:
    """Window by window with the model that was written, whose last window is short."""
    corpus = recipe.open_corpus(whole, [text], TINY)
    model = load_model(whole / "model")
    total, counts = 0.0, np.zeros((2, 4))
    for start in range(0, len(corpus.valid) - 1, 24):
        window = corpus.valid[start : start + 25][None]
        logits, traces = model.traced(window[:, :-1])
        total += float(optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).sum())
        counts += [np.bincount(np.asarray(trace.ids).ravel(), minlength=4) for trace in traces]
    assert (len(corpus.valid) - 1) % 24
    last = records(whole, "validation")[-1]
    np.testing.assert_allclose(last["nats_per_token"], total / (len(corpus.valid) - 1), rtol=1e-5)
    np.testing.assert_allclose(last["bits_per_byte"], total / np.log(2) / corpus.valid_bytes, rtol=1e-5)
    np.testing.assert_allclose(last["load"], counts / counts.sum(1, keepdims=True), atol=1e-6)


def test_a_run_that_has_ended_is_left_alone(whole: Path, text: Path) -> None:
    before = (whole / METRICS).read_bytes()
    assert train([text], whole, TINY) == whole / "model"
    assert (whole / METRICS).read_bytes() == before


def test_more_steps_than_counting(text: Path, tmp_path: Path) -> None:
    """It learns what follows from the words before, as a 5-gram does, and uses all experts."""
    options = replace(TINY, steps=150, batch_size=16, learning_rate=1e-2, evaluate_every=150, save_every=150)
    train([text], tmp_path / "run", options)
    (last,), counting = records(tmp_path / "run", "validation"), records(tmp_path / "run", "baselines")[0]["losses"]
    assert last["nats_per_token"] < 0.5 * counting["1-gram"]["nats_per_token"]
    assert last["nats_per_token"] < counting["5-gram"]["nats_per_token"] + 0.1
    assert np.min(last["load"]) > 0.02


def test_a_run_goes_on_after_an_error(whole: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., np.ndarray] = recipe.batch

    def fails(*arguments: Any) -> np.ndarray:
        if arguments[3] == 7:
            raise RuntimeError("no more")
        return right(*arguments)

    monkeypatch.setattr(recipe, "batch", fails)
    with pytest.raises(RuntimeError, match="no more"):
        train([text], tmp_path / "run", TINY)
    assert [record["step"] for record in records(tmp_path / "run", "update")] == list(range(1, 8))
    monkeypatch.undo()
    train([text], tmp_path / "run", TINY)
    same_run(tmp_path / "run", whole)


def test_a_run_goes_on_from_its_very_end_and_past_torn_lines(whole: Path, text: Path, tmp_path: Path) -> None:
    """Killed after the last checkpoint, and while a record was written."""
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    with (tmp_path / "run" / METRICS).open("a") as file:
        file.write('{"step": 13, "ki')
    train([str(text)], str(tmp_path / "run"), TINY)
    same_run(tmp_path / "run", whole)


def test_a_model_that_was_put_in_place_at_the_last_moment_is_settled(whole: Path, text: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "model" / MANIFEST).write_text("{}")
    train([text], tmp_path / "run", TINY)
    same_run(tmp_path / "run", whole)


def test_a_run_that_diverges_ends_at_once_and_is_not_written(text: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"the loss of step \d+ is .*(nan|inf).*learning_rate below 1e\+30"):
        train([text], tmp_path / "run", replace(TINY, learning_rate=1e30, warmup=0))
    assert not (tmp_path / "run" / "model").exists()
    assert all(np.isfinite(record["total"]) for record in records(tmp_path / "run", "update"))


def same_run(ours: Path, reference: Path) -> None:
    assert records(ours) == records(reference)
    assert sorted(os.listdir(ours / "model")) == sorted(os.listdir(reference / "model"))
    for path in (reference / "model").iterdir():
        assert (ours / "model" / path.name).read_bytes() == path.read_bytes(), path.name


# Every child is killed just before its n-th change of the disk, and the next one goes on.
KILLED = """
import json, os, signal, sys
from pathlib import Path
import jax
from novalm_jax.options import TrainOptions
from novalm_jax.training import recipe
text, folder, cache, options, moments = sys.argv[1:]
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
options = TrainOptions(**json.loads(options))

def child(last):
    if (pid := os.fork()) == 0:
        count = 0
        def wrapped(right):
            def effect(*arguments, **named):
                nonlocal count
                count += 1
                if count == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return right(*arguments, **named)
            return effect
        for owner, names in ((os, ("mkdir", "rename", "replace", "unlink", "rmdir")), (recipe.Log, ("write",))):
            for name in names:
                setattr(owner, name, wrapped(getattr(owner, name)))
        recipe.train([Path(text)], Path(folder), options)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

for moment in json.loads(moments):
    code = child(moment)
    said = sorted(os.listdir(Path(folder) / "state")) if (Path(folder) / "state").is_dir() else []
    print(json.dumps([code, said]), flush=True)
"""


def test_a_run_that_is_killed_again_and_again_gives_the_same_curve(whole: Path, text: Path, tmp_path: Path) -> None:
    # In the files of the beginning; between updates; in the checkpoints of steps 4, 8 and 12, several times, and while
    # the oldest of them is deleted; while the model is written; and never.
    moments = [1, 2, 5, 9, 3, 11, 12, 13, 14, 15, 7, 10, 11, 12, 13, 14, 15, 16, 9, 12, 13, 14, 15, 16, 17, -1]
    command = [sys.executable, "-c", KILLED, str(text), str(tmp_path / "run"), str(tmp_path / "cache")]
    command += [json.dumps(asdict(TINY)), json.dumps(moments)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    codes, states = zip(*map(json.loads, run.stdout.splitlines()), strict=True)
    assert codes == (*[9] * (len(moments) - 1), 0), run.stderr
    # Some died in the middle of a checkpoint.
    assert any("tmp" in name for names in states for name in names)
    same_run(tmp_path / "run", whole)


def test_no_thread_is_left(whole: Path, text: Path, tmp_path: Path) -> None:
    code = (
        "import sys, threading; from pathlib import Path; from novalm_jax.options import TrainOptions;"
        "from novalm_jax.training.recipe import train; import json;"
        "train([Path(sys.argv[1])], Path(sys.argv[2]), TrainOptions(**json.loads(sys.argv[3])));"
        "print([thread.name for thread in threading.enumerate()])"
    )
    options = json.dumps(asdict(replace(TINY, steps=3)))
    command = [sys.executable, "-c", code, str(text), str(tmp_path / "run"), options]
    run = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300
    )
    assert run.stdout.strip() == "['MainThread']", run.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [({"steps": 13}, "holds a run with other steps"), ({"seed": 1, "dtype": "bfloat16"}, "other dtype, seed")],
)
def test_a_run_goes_on_with_its_own_options_alone(change: dict[str, Any], said: str, whole: Path, text: Path) -> None:
    with pytest.raises(OptionError, match=said):
        train([text], whole, replace(TINY, **change))


def test_other_texts_are_another_run(whole: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / text.name
    other.write_text(text.read_text() + " More.")
    with pytest.raises(OptionError, match="holds a run with other texts"):
        train([other], whole, TINY)


def test_a_folder_with_other_things_in_it_is_left_alone(text: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"holds notes\.txt"):
        train([text], tmp_path, TINY)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_run_that_could_not_begin_is_no_run(text: Path, tmp_path: Path) -> None:
    """What was wrong with the texts or the options may be mended in the same folder."""
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff")
    with pytest.raises(OptionError, match="is not text"):
        train([bad], tmp_path / "run", replace(TINY, steps=4))
    train([text], tmp_path / "run", replace(TINY, steps=3))


def test_too_little_text_is_told(text: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"texts: \d+ tokens to train on are too few for windows of 100000"):
        train([text], tmp_path / "run", replace(TINY, context_length=100_000))
    with pytest.raises(OptionError, match="texts: expected a list"):
        train(str(text), tmp_path / "run", TINY)


def test_two_runs_in_one_folder(whole: Path, text: Path) -> None:
    with recipe.hold(whole, [text], TINY), pytest.raises(OptionError, match="another process is at work"):
        train([text], whole, TINY)
