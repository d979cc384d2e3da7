"""Whole training runs of a tiny model: what they say, that they go on where they ended, and what is no run."""

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

import numpy as np
import optax
import pytest

from novalm_jax.checkpoint.atomic import MANIFEST
from novalm_jax.checkpoint.load import load_model
from novalm_jax.errors import EngineError, OptionError
from novalm_jax.training import recipe
from novalm_jax.training.recipe import train
from novalm_jax.training.run_folder import METRICS
from training_helpers import TINY, records, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "stories.txt")


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
