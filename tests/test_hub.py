"""Models by name: found in a local cache laid out as huggingface_hub does, never in place of a path."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest

from novalm_jax import generate, load_model
from novalm_jax.checkpoint.hub import cached_name, find_folder
from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.errors import CheckpointError
from novalm_jax.models.params import parameters_of
from tiny_checkpoints import tiny_checkpoint

NAME = "Some-Org/tiny.moe_v1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; whatever would reach the network fails."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    monkeypatch.chdir(tmp_path)
    return folder


def add(cache: Path, source: Path, name: str = NAME, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Puts a checkpoint into the cache, as a download does: blobs, links to them, and the name of the version."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(sorted(source.iterdir())):
        blob = repository / "blobs" / f"{commit[:8]}{number:032x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    if ref:
        (repository / "refs" / ref).write_text(commit)
    return snapshot


def refusal(model: str | Path) -> str:
    """One paragraph, not a trace of the library's own."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def embedding(model: str | Path) -> np.ndarray:
    return np.asarray(parameters_of(load_model(model))["embed.weight"].get_value())


def test_a_name_is_found_in_the_cache(cache: Path, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    snapshot = add(cache, source)
    assert Checkpoint.open(NAME).folder == find_folder(NAME) == find_folder(NAME + "/") == snapshot
    np.testing.assert_array_equal(embedding(NAME), embedding(source))


def test_a_version_may_be_named(cache: Path, tmp_path: Path) -> None:
    other = "f" * 40
    snapshot = add(cache, tiny_checkpoint(tmp_path / "source"))
    changed = add(cache, tiny_checkpoint(tmp_path / "changed", seed=1), commit=other, ref="next")
    assert find_folder(NAME) == find_folder(f"{NAME}@{COMMIT}") == snapshot
    assert find_folder(f"{NAME}@next") == find_folder(f"{NAME}@{other}") == changed
    text = refusal(f"{NAME}@v9")
    assert f"There is no folder {NAME}@v9" in text and f"Run `hf download {NAME} --revision v9`" in text


@pytest.mark.parametrize("kind", ["folder", "link", "file", "broken"])
def test_what_exists_is_a_path(cache: Path, tmp_path: Path, kind: str) -> None:
    add(cache, tiny_checkpoint(tmp_path / "source"))
    path = tmp_path / NAME
    path.parent.mkdir()
    if kind == "link":
        path.symlink_to(tmp_path / "source")
    elif kind == "file":
        path.write_text("")
    else:
        path.mkdir()
    assert find_folder(NAME) == find_folder(Path(NAME)) == find_folder(NAME + "/") == Path(NAME)
    if kind in ("file", "broken"):
        assert {"file": "is not a folder", "broken": "the folder is empty"}[kind] in refusal(NAME)


def test_home_is_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert find_folder("~/models/some") == tmp_path / "models/some"
    assert f"There is no folder {tmp_path}/models/some. Give the folder" in refusal("~/models/some/")
    assert find_folder("~nobody-of-that-name/x") == Path("~nobody-of-that-name/x")
    (tmp_path / "~").mkdir()
    assert find_folder("~") == Path("~")


def test_a_name_that_is_not_in_the_cache(cache: Path, tmp_path: Path) -> None:
    text = refusal(NAME)
    for words in (f"There is no folder {NAME}", str(cache), f"Run `hf download {NAME}`", "nothing is downloaded here"):
        assert words in text
    # A cache of which only some files have arrived.
    snapshot = add(cache, tiny_checkpoint(tmp_path / "source"))
    (snapshot / "config.json").unlink()
    assert f"holds no config.json of such a model. Run `hf download {NAME}`" in refusal(NAME)
    shutil.rmtree(cache)
    assert "holds no config.json" in refusal(NAME)


def test_an_incomplete_version_says_what_is_missing(cache: Path, tmp_path: Path) -> None:
    snapshot = add(cache, tiny_checkpoint(tmp_path / "source"))
    weights = snapshot / "model.safetensors"
    shard = weights.rename(snapshot / "model-00001-of-00003.safetensors")
    text = refusal(NAME)
    assert "2 of 3 files missing: model-00002-of-00003.safetensors, model-00003" in text
    assert f"Run `hf download {NAME}`: it fetches what is missing." in text
    shard.rename(weights).resolve().unlink()
    assert f"{weights}: is a link to a file that is not there: the download is incomplete" in refusal(NAME)


def test_the_name_of_a_folder_of_the_cache(cache: Path, tmp_path: Path) -> None:
    assert cached_name(add(cache, tiny_checkpoint(tmp_path / "source"))) == NAME
    assert cached_name(tmp_path / "source") is None
    assert cached_name(Path("/")) is None
    assert cached_name(Path("datasets--a--b/snapshots/0")) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/na..me", "no name that a model of the Hugging Face Hub can have: Cannot have -- or .."),
        ("org/na--me", "no name that a model of the Hugging Face Hub can have: Cannot have -- or .."),
        ("org/name.git", "no name that a model of the Hugging Face Hub can have"),
        ("org/" + "n" * 100, "no name that a model of the Hugging Face Hub can have"),
        ("org/-name", "no name that a model of the Hugging Face Hub can have"),
        ("https://huggingface.co/org/name/tree/main", "is an address.*Run `hf download org/name`, then give org/name"),
        (Path("https://huggingface.co/org/name"), "is an address.*Run `hf download org/name`, then give org/name"),
        ("hf.co/org/name", "is an address.*Run `hf download org/name`, then give org/name"),
    ],
)
def test_what_cannot_be_a_name(cache: Path, name: str | Path, words: str) -> None:
    assert re.search(words, refusal(name))


@pytest.mark.parametrize(
    "path",
    ["name", "a/b/c", "./org/name", "../org/name", "/org/name", "C:\\models\\name", "org\\name", "org/two words", "/"],
)
def test_other_texts_are_paths(cache: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert find_folder(path) == Path(path)
    if path != "/":
        assert f"There is no folder {Path(path)}. Give the folder of a downloaded" in refusal(path)


def test_without_the_library_a_name_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    text = refusal(NAME)
    assert f"There is no folder {NAME}" in text and "Run `pip install huggingface_hub`" in text


def test_a_cache_that_may_not_be_read(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(cache, tiny_checkpoint(tmp_path / "source"))

    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert f"{NAME}: the cache {cache} cannot be read: " in refusal(NAME)


def test_the_command_ends_with_a_users_mistake(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--model", NAME, "--prompt", "x"]) == 2
    assert f"hfdownload{NAME}" in "".join(capsys.readouterr().err.split())


FIND = """
import sys
from novalm_jax.checkpoint.hub import find_folder
find_folder(sys.argv[1])
assert "huggingface_hub" not in sys.modules
print(find_folder(sys.argv[2]))
assert "huggingface_hub" in sys.modules
"""


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_the_cache_is_where_the_library_has_it(variable: str, tmp_path: Path) -> None:
    """And the library is not imported for a folder."""
    cache = tmp_path / "hub"
    source = tiny_checkpoint(tmp_path / "source")
    snapshot = add(cache, source)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        variable: str(tmp_path if variable == "HF_HOME" else cache),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", FIND, str(source), NAME]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(snapshot)
