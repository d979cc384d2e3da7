"""Conversions that are killed at every moment, and go on; what stands in the way of a folder, and what does not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from novalm_jax.checkpoint import atomic, orbax
from novalm_jax.checkpoint.atomic import MANIFEST, Work, check_destination, write_whole
from novalm_jax.checkpoint.conversion import convert_checkpoint
from novalm_jax.checkpoint.orbax import load_orbax
from novalm_jax.errors import OptionError, WriteError
from novalm_jax.options import ConvertOptions

GOLDEN = Path(__file__).parent.parent / "golden"
SHARDED = ConvertOptions(shard_size="20kB")

# One process that forks a child for every moment, so that JAX is imported once. A child is killed just before its n-th
# change of the disk; where that is a write, after half of it. Then another child does the same conversion in peace.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from novalm_jax.checkpoint.conversion import convert_checkpoint
from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.options import ConvertOptions
source, base, to = sys.argv[1:]
opened = Checkpoint.open(source)
Checkpoint.open = lambda folder: opened
options = ConvertOptions(to=to, **({"shard_size": "20kB"} if to == "safetensors" else {}))
if to == "orbax":
    import novalm_jax.checkpoint.orbax

def watch(last):
    done = {"effects": 0, "bytes": 0}
    def wrapped(name, right):
        def effect(*arguments, **named):
            if name == "open" and not arguments[1] & os.O_CREAT:
                return right(*arguments, **named)
            done["effects"] += 1
            if done["effects"] == last:
                if name == "pwrite":
                    right(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "pwrite":
                done["bytes"] += len(arguments[1])
            return right(*arguments, **named)
        return effect
    for name in ("mkdir", "open", "pwrite", "fsync", "replace", "rename", "unlink", "rmdir"):
        setattr(os, name, wrapped(name, getattr(os, name)))
    return done

def child(destination, last):
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        done = watch(last)
        convert_checkpoint(source, destination, options)
        os.write(write, json.dumps(done).encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    said = os.read(read, 1000)
    os.close(read)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), json.loads(said or b"{}")

def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

code, whole = child(Path(base) / "whole", -1)
assert code == 0
print(json.dumps(whole))
for moment in range(1, whole["effects"] + 1):
    # Most of what Orbax does is alike, and the beginning is the same.
    if to == "orbax" and moment % 8 and moment < whole["effects"] - 10:
        continue
    destination = Path(base) / str(moment)
    record = {"moment": moment, "code": child(destination, moment)[0]}
    record |= {"after": names(destination), "partial": names(Path(f"{destination}.partial"))}
    code, again = child(destination, -1)
    print(json.dumps(record | {"resumed": code, "left": names(Path(base)), "bytes": again.get("bytes")}), flush=True)
"""


def killed_everywhere(tmp_path: Path, case: str, to: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", KILLED, str(GOLDEN / case), str(tmp_path), to]
    run = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_conversion_killed_at_any_moment_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    whole, *killed = killed_everywhere(tmp_path, "mixtral-bf16", "safetensors")
    reference = contents(tmp_path / "whole")
    complete = sorted(reference)
    assert len(complete) == 5 and len(killed) == whole["effects"] >= 30
    for record in killed:
        # Nothing at the destination, or all of it: for a moment with the manifest, then as a folder to be left alone.
        assert record["after"] in ([], complete, sorted([MANIFEST, *complete]))
        assert (record["code"], record["resumed"]) == (9, int(record["after"] == complete))
        assert contents(tmp_path / str(record["moment"])) == reference
        assert not any(name.endswith(".partial") for name in record["left"])
    # Shards that were complete are not written again.
    last = [record for record in killed if sum(name.endswith(".safetensors") for name in record["partial"]) == 2]
    assert last and max(record["bytes"] for record in last) < whole["bytes"] / 2
    assert killed[-2]["bytes"] == 0


def test_a_conversion_to_orbax_killed_at_any_moment_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    whole, *killed = killed_everywhere(tmp_path, "mixtral", "orbax")
    reference = np.load(GOLDEN / "mixtral" / "golden.npz")
    assert whole["effects"] > 40 and len(killed) > 12
    for record in killed:
        assert record["after"] in ([], ["config.json", "weights"], [MANIFEST, "config.json", "weights"])
        # Orbax's threads do not always take the same number of steps.
        assert record["code"] in (9, 0) if record["moment"] > whole["effects"] - 4 else record["code"] == 9
        assert record["resumed"] == int(record["after"] == ["config.json", "weights"])
        assert sorted(os.listdir(tmp_path / str(record["moment"]))) == ["config.json", "weights"]
        assert not any(name.endswith(".partial") for name in record["left"])
    for moment in (killed[0]["moment"], killed[-6]["moment"]):
        logits = load_orbax(tmp_path / str(moment))(reference["input_ids"])
        assert np.abs(np.asarray(logits) - reference["logits"]).max() <= 1e-4


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut, unlike a kill, loses what was written but not synced."""
    synced: set[int] = set()
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def sync(file: int) -> None:
        synced.add(os.fstat(file).st_ino)
        fsync(file)

    def move(right: Any) -> Any:
        def moved(old: Path, new: Path) -> None:
            # Orbax renames within a folder that has no name yet.
            if "orbax-checkpoint-tmp" not in str(old):
                assert {os.stat(path).st_ino for path in [old, *Path(old).rglob("*")]} <= synced, (old, new)
            right(old, new)

        return moved

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", move(replace))
    monkeypatch.setattr(os, "rename", move(rename))
    for to in ("safetensors", "orbax"):
        convert_checkpoint(GOLDEN / "llama-hub", tmp_path / to, ConvertOptions(to=to))  # type: ignore[arg-type]
        assert os.stat(tmp_path).st_ino in synced


# --- what another run left -------------------------------------------------------------------------------------------


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A destination whose conversion stopped before its last step."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Work, "finish", interrupted)
        convert_checkpoint(GOLDEN / "mixtral-bf16", tmp_path / "out", SHARDED)
    assert len(contents(tmp_path / "out.partial")) == 6
    return tmp_path / "out"


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("source", "options", "differing"),
    [
        ("mixtral-bf16", ConvertOptions(), "its options differ"),
        ("mixtral-bf16", ConvertOptions(shard_size="20kB", dtype="float32"), "its options differ"),
        ("mixtral", SHARDED, "its source and files differ"),
    ],
)
def test_work_of_another_kind_is_not_taken_over(
    unfinished: Path, source: str, options: ConvertOptions, differing: str
) -> None:
    before = contents(unfinished.parent)
    with pytest.raises(OptionError, match=rf"out.partial holds unfinished work of another kind: {differing}.*Delete"):
        convert_checkpoint(GOLDEN / source, unfinished, options)
    assert contents(unfinished.parent) == before


def test_a_source_that_has_changed_since_is_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((GOLDEN / "llama-hub" / name).read_bytes())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Work, "finish", interrupted)
        convert_checkpoint(source, tmp_path / "out")
    os.utime(source / "model.safetensors", ns=(0, 1))
    with pytest.raises(OptionError, match="its files differ"):
        convert_checkpoint(source, tmp_path / "out")


def test_a_size_written_in_another_way_is_the_same_option(unfinished: Path) -> None:
    convert_checkpoint(GOLDEN / "mixtral-bf16", unfinished, ConvertOptions(shard_size=20_000))
    assert os.listdir(unfinished.parent) == ["out"]


def test_a_shard_that_is_not_as_planned_is_written_again(unfinished: Path) -> None:
    shard = unfinished.with_name("out.partial") / "model-00002-of-00003.safetensors"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1])
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "finish", interrupted)
        convert_checkpoint(GOLDEN / "mixtral-bf16", unfinished, SHARDED)
    assert shard.read_bytes() == good
    shard.write_bytes(bytes(len(good)))
    convert_checkpoint(GOLDEN / "mixtral-bf16", unfinished, SHARDED)
    assert (unfinished / shard.name).read_bytes() == good


def test_two_processes_do_not_make_one_folder(tmp_path: Path) -> None:
    place = check_destination(tmp_path / "out")
    with Work(place, {"source": 1}), pytest.raises(OptionError, match="another process is at work"):
        Work(place, {"source": 1}).__enter__()
    # Nothing was completed, so nothing stays.
    with Work(place, {"source": 1}) as work:
        work.put("file", b"data")
        work.finish()
    assert contents(tmp_path) == {"out/file": b"data"}


# --- what stands in the way ------------------------------------------------------------------------------------------


def refusal(destination: Path, source: Path = GOLDEN / "llama-hub") -> str:
    with pytest.raises(OptionError) as caught:
        convert_checkpoint(source, destination)
    return str(caught.value)


def test_places_where_no_folder_can_be_made_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("here")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    before = contents(tmp_path)
    assert "full exists and holds mine" in refusal(tmp_path / "full", damaged)
    assert "file is a file" in refusal(tmp_path / "file", damaged)
    assert f"there is no folder {tmp_path / 'no'}" in refusal(tmp_path / "no" / "out", damaged)
    assert "is the source itself" in refusal(damaged, damaged)
    assert "or inside it" in refusal(damaged / "out", damaged)
    assert "a file system is mounted" in refusal(Path("/proc"), damaged)
    assert "no path" in refusal(Path("a\0b"), damaged)
    (tmp_path / "link").symlink_to(damaged)
    assert "is the source itself" in refusal(tmp_path / "link", damaged)
    assert contents(tmp_path) == before


def test_a_partial_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("here")
    assert "out.partial is in the way" in refusal(tmp_path / "out")
    assert contents(tmp_path) == {"out.partial/mine": b"here"}


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert convert_checkpoint(GOLDEN / "llama-hub", tmp_path / "link").folder == tmp_path / "real"
    assert sorted(contents(tmp_path / "real")) == ["config.json", "model.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The user of this test may be root, whom no mode stops.
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert "This user may not write into" in refusal(tmp_path / "out")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(WriteError, match=r"out cannot be written: Permission denied"):
        convert_checkpoint(GOLDEN / "llama-hub", tmp_path / "out")
    assert contents(tmp_path) == {}


def test_a_disk_without_room_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
    for to in ("safetensors", "orbax"):
        with pytest.raises(OptionError, match=r"needs .* KiB more, and its disk has 1000 B free"):
            convert_checkpoint(GOLDEN / "llama-hub", tmp_path / to, ConvertOptions(to=to))  # type: ignore[arg-type]
    assert contents(tmp_path) == {}


# Files of this process may not grow beyond 21 kB: the kernel refuses a write near the end of the second shard.
FULL = """
import resource, sys
from novalm_jax.convert import main
resource.setrlimit(resource.RLIMIT_FSIZE, (21_000, 21_000))
sys.exit(main(sys.argv[1:]))
"""


def test_a_write_that_fails_is_explained_and_can_be_gone_on_with(tmp_path: Path) -> None:
    arguments = [str(GOLDEN / "mixtral-bf16"), str(tmp_path / "out"), "--shard-size", "20kB"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", FULL, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    said = " ".join(run.stderr.split())
    assert (run.returncode, run.stdout) == (1, "")
    assert f"{tmp_path / 'out'} cannot be written: File too large" in said and "run the same again to go on" in said
    kept = [MANIFEST, "config.json", "model-00001-of-00003.safetensors"]
    assert sorted(contents(tmp_path / "out.partial")) == kept
    convert_checkpoint(GOLDEN / "mixtral-bf16", tmp_path / "out", SHARDED)
    assert os.listdir(tmp_path) == ["out"]


def test_a_failure_within_orbax_is_explained_and_leaves_nothing(tmp_path: Path) -> None:
    # Less than the arrays together, more than the scratch file, which is not limited: the failure is Orbax's.
    program = FULL.replace(
        "resource.setrlimit",
        "import novalm_jax.checkpoint.orbax as orbax\nright = orbax._save\n"
        "orbax._save = lambda *a: (resource.setrlimit(resource.RLIMIT_FSIZE, (21_000, 21_000)), right(*a))\n#",
    )
    arguments = [str(GOLDEN / "mixtral"), str(tmp_path / "out"), "--to", "orbax"]
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = " ".join(run.stderr.split())
    assert (run.returncode, run.stdout, os.listdir(tmp_path)) == (1, "", [])
    assert "python -m novalm_jax.convert: " in said and "cannot be written: " in said and "File too large" in said
    # Its threads log what they fail of, at length.
    assert "run() raised" not in said


@pytest.mark.parametrize("spec", ["", """ [tensorstore_spec='{"driver":"zarr3","path":"a","chunks":[1,2]}']"""])
@pytest.mark.parametrize("code", ["", " [os_error_code='27']"])
def test_the_reason_of_a_failure_within_orbax_is_short(spec: str, code: str) -> None:
    said = 'OUT_OF_RANGE: Error writing "w": Failed to write 9 bytes to file 12: File too large'
    for notes in (spec + code, code + spec):
        assert orbax._reason(ValueError(said + notes + "\nmore")) == said
    assert orbax._reason(ValueError()) == "ValueError"


def test_a_folder_is_removed_while_something_still_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, late, rmtree = tmp_path / "out", iter(range(3)), shutil.rmtree

    def beaten(path: Path) -> None:
        rmtree(path)
        if next(late, None) is not None:
            (path / "c").mkdir(parents=True)
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", beaten)
    folder.mkdir()
    atomic._remove(folder)
    assert os.listdir(tmp_path) == [] and next(late, None) is None


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch, error: BaseException) -> None:
    (tmp_path / "a").write_bytes(b"before")

    def full(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((WriteError, KeyboardInterrupt)):
        write_whole(tmp_path / "a", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == b"before"
