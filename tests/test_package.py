"""The wheel carries what the package needs at run time, and works away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

OUTSIDE = """
import novalm_jax
from novalm_jax.parallel.plan import ShardingPlan
from novalm_jax.resources import resource_folder
print(novalm_jax.__file__)
assert ShardingPlan.read("single").mesh_shape == {"data": 1, "expert": 1, "tensor": 1}
assert resource_folder("checkpoints").parent.name == "novalm_jax"
with novalm_jax.LLM(None, compilation_cache=False) as llm:
    (out,) = llm.generate("Once upon a time", novalm_jax.SamplingParams(max_tokens=4, temperature=0))
print(out.text)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, str(folder), str(ROOT)], check=True, capture_output=True, timeout=300)
    (path,) = folder.glob("novalm_jax-*.whl")
    return path


def test_the_wheel_holds_code_and_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    model = [f"checkpoints/stories-moe-10m/{name}" for name in ("README.md", "config.json", "model.safetensors")]
    for name in ("sharding/single.toml", "sharding/README.md", "checkpoints/README.md", "generate.py", *model):
        assert f"novalm_jax/{name}" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"novalm_jax"}


def test_an_installed_wheel_finds_its_data_and_runs_its_model(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = [sys.executable, "-c", OUTSIDE]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    place, text = run.stdout.split("\n", 1)
    assert Path(place).is_relative_to(tmp_path)
    assert text.strip()
