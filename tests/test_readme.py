"""The README is true: its commands and snippets run as they stand, on a checkpoint in place of `path/to/model`."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from novalm_jax.models.families import FAMILIES
from tiny_checkpoints import tiny_checkpoint

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLACEHOLDER = "path/to/model"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


SETUP, TESTS, *MORE = blocks("bash")
COMMANDS = [line.split("&& ")[-1] for block in (SETUP, *MORE) for line in block.splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The end token is likely: the model stops on its own, so that commands without --max-tokens end soon.
    return tiny_checkpoint(tmp_path_factory.mktemp("readme") / "model", max_position_embeddings=128)


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("A file's prompt")
    (tmp_path / "stories.txt").write_text("<|endoftext|>".join(f"Story {n} of many. " * 50 for n in range(4)))
    command = command.replace(PLACEHOLDER, shlex.quote(str(model))).replace("python", shlex.quote(sys.executable), 1)
    result = run(["bash", "-c", command], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("snippet", blocks("python"))
def test_snippets(snippet: str, model: Path, tmp_path: Path) -> None:
    result = run([sys.executable, "-W", "error", "-c", snippet.replace(PLACEHOLDER, str(model))], tmp_path)
    assert result.returncode == 0, result.stderr


def test_setup_is_two_commands_and_the_gate_runs_the_second() -> None:
    assert [len(block.splitlines()) for block in (SETUP, TESTS)] == [1, 1]
    install, tests = TESTS.strip().split(" && ")
    gate = (ROOT / ".ci" / "run").read_text().splitlines()
    assert tests in gate
    assert any(line.startswith("pip install") and '--editable ".[dev]"' in line for line in gate)
    assert install == 'pip install -e ".[dev]"'


def test_the_length_and_the_files_it_names() -> None:
    assert len(README.splitlines()) <= 120
    tree = re.search(r"^```\n(novalm_jax/.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert tree is not None
    for line in tree[1].splitlines():
        folder = ROOT / "novalm_jax" if line.startswith("  ") else ROOT
        for name in line.strip().split("   ")[0].split():
            assert (folder / name).exists(), f"the README's tree names {name}, which is not there"
    models = README.split("## Models")[1].split("## ")[0]
    rows = "".join(line for line in models.splitlines() if line.startswith(("| routed experts", "| dense")))
    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(FAMILIES)
