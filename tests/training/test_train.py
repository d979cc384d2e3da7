"""The train command: what goes where, pictures, and mistakes. The recipe itself is tested beside this."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from novalm_jax import LLM, SamplingParams
from novalm_jax.text.generation_config import GenerationConfig
from novalm_jax.train import main
from novalm_jax.training.data import END
from novalm_jax.training.pictures import draw_experts, draw_losses
from novalm_jax.training.run_folder import read_metrics
from novalm_jax.training.summary import summary

SMALL = (
    "--vocab-size 280 --context-length 16 --layers 1 --hidden-size 16 --heads 2 --kv-heads 1 --experts 4 "
    "--expert-width 8 --steps 4 --batch-size 2 --warmup 1 --evaluate-every 2"
).split()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text(END.join(f"{n} little mice went out to play. " * 20 for n in range(5)))
    return path


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "out"
    assert main([str(text), "--output", str(folder), "--pictures", *SMALL]) == 0
    return folder


def test_the_model_that_comes_out_speaks(run: Path, text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(text), "--output", str(run), *SMALL]) == 0
    said = capfd.readouterr()
    folder = Path(said.out.strip())
    assert "training    4 steps of 32 tokens, " in said.err
    assert folder == run / "model"
    assert sorted(path.name for path in folder.iterdir()) == [
        *["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    ]
    assert GenerationConfig.load(folder).sampling() == {"temperature": 0.8, "top_p": 0.95}
    with LLM(folder, dtype="float32") as llm:
        (out,) = llm.generate("little", SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
        assert len(out.token_ids) == 5
        assert llm.tokenizer.encode(f"mice{END}")[-1] == llm.tokenizer.eos_id == 0


def test_the_summary_has_the_last_validation_and_the_median_speed() -> None:
    validation = {"kind": "validation", "step": 8, "nats_per_token": 2.5, "bits_per_byte": 1.25}
    records = [
        {"kind": "baselines", "step": 0, "losses": {"1-gram": {"nats_per_token": 5.0, "bits_per_byte": 2.0}}},
        *({"kind": "update", "step": step, "seconds": seconds} for step, seconds in enumerate([9.0, 0.5, 0.25], 1)),
        validation | {"step": 4, "nats_per_token": 9.0, "load": [[0.5, 0.5]]},
        validation | {"load": [[0.25, 0.75], [0.5, 0.5]]},
    ]
    assert summary(records, 100).splitlines() == [
        "validation  nats a token  bits a byte",
        "1-gram             5.000        2.000",
        "model              2.500        1.250",
        "experts     chosen 0.50 to 1.50 times as often as an even share",
        "training    8 steps of 100 tokens, 200 tokens/s",
    ]


def test_pictures_show_the_metrics(run: Path) -> None:
    assert (run / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "experts.png").read_bytes().startswith(b"\x89PNG")
    records = read_metrics(run)
    training, validation, *counting = draw_losses(records).axes[0].lines
    updates = [record for record in records if record["kind"] == "update"]
    assert training.get_xydata().tolist() == [[each["step"], each["next_token"]] for each in updates]
    validations = [record for record in records if record["kind"] == "validation"]
    assert validation.get_xydata().tolist() == [[each["step"], each["nats_per_token"]] for each in validations]
    assert len(counting) == 2
    shares = draw_experts(records).axes[0].images[0].get_array()
    assert shares.tolist() == [[4 * part for part in validations[-1]["load"][0]]]


def test_pictures_without_matplotlib_are_refused_before_anything_is_done(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = importlib.util.find_spec
    monkeypatch.setattr("novalm_jax.compat.find_spec", lambda name: None if name == "matplotlib" else right(name))
    assert main([str(text), "--output", str(tmp_path / "out"), "--pictures", *SMALL]) == 2
    assert "matplotlib" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone.txt"], "texts: gone.txt cannot be read: No such file"),
        ([], "texts"),
        (["--vocab-size", "100"], "vocab_size: expected a whole number of at least 257 and at most 65536"),
        (["--experts-per-token", "9"], "experts_per_token: 9 is more than experts, which is 4"),
        (["--heads", "3"], "heads: 3 does not divide hidden_size, which is 16"),
        (["--heads", "16"], "heads: a head of 1 is odd"),
        (["--accumulate", "4"], "accumulate: 4 does not divide batch_size, which is 2"),
        (["--validation", "1"], "validation: expected a part between 0 and 1"),
        (["--learning-rate", "nan"], "learning_rate: expected a number, got nan"),
        (["--clip-norm", "0"], "clip_norm: expected a number above 0"),
        (["--steps", "0"], "steps: expected a whole number of at least 1"),
        (["--warmup", "4"], "warmup: 4 steps leave none of 4"),
        (["--seed", "-1"], "seed: expected a whole number of at least 0"),
    ],
)
def test_mistakes_are_one_paragraph(
    arguments: list[str], said: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [] if arguments == [] or arguments[0].endswith(".txt") else [str(text)]
    try:
        code: object = main([*texts, "--output", str(tmp_path / "out"), *SMALL, *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert said in shown and "Traceback" not in shown


def test_the_run_says_what_it_was_given(run: Path) -> None:
    said = json.loads((run / "run.json").read_text())
    assert said["options"]["steps"] == 4 and said["texts"][0][0] == "stories.txt"
