"""The generate command as a process: pipes, interrupts, what importing costs, and the compilation cache."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import novalm_jax
from generate_helpers import run, speaker

ROOT = Path(novalm_jax.__file__).resolve().parent.parent
# No run here takes a tenth of it: a process that hangs is ended and its test fails.
PATIENCE = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return speaker(tmp_path_factory.mktemp("model"))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "novalm_jax.generate", *arguments]


def environment(**more: str) -> Mapping[str, str]:
    """This process's own, cache folder included, with the package in reach wherever it is started."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **more}


def finished(arguments: list[str], stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, input=stdin, capture_output=True, encoding="utf-8", timeout=PATIENCE, env=environment(**more)
    )


# --- pipes -----------------------------------------------------------------------------------------------------------


def test_a_pipe_gets_the_text_and_no_progress_bar(model):
    done = finished(command("--model", model, "--prompt", "-"), stdin="H")
    assert (done.returncode, done.stdout) == (0, "elo wé日!\n")
    assert re.fullmatch(r"12 tokens, the first after .*\n", done.stderr), done.stderr


def test_a_reader_that_goes_away_ends_the_command_quietly(model):
    words = " ".join(command("--model", model, "--prompt", "0", "--ignore-eos"))
    done = finished(["bash", "-c", f"{words} | head -c 10; echo :${{PIPESTATUS[0]}}"])
    assert done.stdout == "1234567890:1\n"
    assert done.stderr == ""


# --- interrupts ------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_decoding_keeps_what_was_generated(model):
    """The generation would last far longer than the test waits."""
    process = subprocess.Popen(
        command("--model", model, "--prompt", "0", "--ignore-eos"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment(),
    )
    with process:
        assert process.stdout is not None
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    text = (first + rest).rstrip("\n")
    assert text == ("1234567890" * (len(text) // 10 + 1))[: len(text)]
    assert "Traceback" not in err


@pytest.mark.parametrize("form", ["text", "json"])
def test_ctrl_c_writes_what_there_is_of_the_completion(model, capsys, monkeypatch, form):
    from novalm_jax.engine.executor import Executor

    decode, calls = Executor.decode, []

    def interrupt(*arguments, **options):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return decode(*arguments, **options)

    monkeypatch.setattr(Executor, "decode", interrupt)
    assert run(["--model", model, "--prompt", "H", "--report", *(["--json"] if form == "json" else [])]) == 130
    out, err = capsys.readouterr()
    assert "Traceback" not in err and re.search(r"^generated tokens +3$", err, re.MULTILINE)
    if form == "text":
        assert out == "elo\n"
    else:
        record = json.loads(out)
        assert (record["text"], record["finish_reason"]) == ("elo", "abort")


@pytest.mark.parametrize(
    "place",
    [
        "novalm_jax.checkpoint.files.TensorReader.read_into",
        "novalm_jax.engine.programs.compile_program",
        "novalm_jax.engine.executor.Executor.prefill",
    ],
)
def test_ctrl_c_before_the_first_token_is_exit_code_130(model, place):
    """While the weights load, a program is compiled, or the prompt is read."""
    program = f"""
import os, pkgutil, signal, sys
from novalm_jax.generate import main
module, _, name = {place!r}.rpartition(".")
holder = pkgutil.resolve_name(module)
function = getattr(holder, name)
def interrupted(*arguments, **options):
    print("here", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    return function(*arguments, **options)
setattr(holder, name, interrupted)
sys.exit(main(["--model", {model!r}, "--prompt", "0", "--ignore-eos"]))
"""
    done = finished([sys.executable, "-c", program])
    said = [line for line in done.stderr.split("\n") if line]
    assert (done.returncode, done.stdout.strip(), said[0], said[1:] in ([], ["0 tokens"])) == (130, "", "here", True)


def test_an_interrupt_that_python_had_to_drop_arrives_after_all(model):
    """An exception cannot leave a destructor: Python prints it and goes on."""
    program = f"""
import os, signal, sys
from novalm_jax.engine.executor import Executor
from novalm_jax.generate import main

class Doomed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10):
            pass

prefill = Executor.prefill

def interrupted(self, *arguments):
    del Doomed.alive
    return prefill(self, *arguments)

Doomed.alive = Doomed()
Executor.prefill = interrupted
sys.exit(main(["--model", {model!r}, "--prompt", "0", "--ignore-eos", "--n", "64", "--max-tokens", "250"]))
"""
    assert finished([sys.executable, "-c", program]).returncode == 130


# --- what importing costs --------------------------------------------------------------------------------------------


def test_help_does_no_work():
    program = """
import sys
from novalm_jax.generate import main
try:
    main(["--help"])
except SystemExit as end:
    code = end.code
heavy = {"jax", "jaxlib", "flax", "optax", "orbax", "tokenizers", "safetensors", "ml_dtypes", "jinja2"}
print(code, sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    done = finished([sys.executable, "-c", program])
    assert done.stderr == "0 []\n"
    for option in ("--prompt-file", "--device-memory", "--max-tokens", "--no-compilation-cache", "--system"):
        assert option in done.stdout


def test_importing_the_package_does_no_work_either():
    program = """
import sys, novalm_jax
before = {"jax", "numpy", "flax", "tokenizers"} & set(sys.modules)
assert not before, before
assert set(novalm_jax.__all__) <= set(dir(novalm_jax))
novalm_jax.SamplingParams(max_tokens=3)
assert "jax" not in sys.modules
assert novalm_jax.LLM.__module__ == "novalm_jax.engine.llm"
assert "jax" in sys.modules
for name in novalm_jax.__all__:
    getattr(novalm_jax, name)
"""
    done = finished([sys.executable, "-W", "error", "-c", program])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_the_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = novalm_jax.LMM  # type: ignore[attr-defined]


# --- the compilation cache -------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_compiled_programs_are_kept_unless_told_otherwise(model, tmp_path):
    once = command("--model", model, "--prompt", "a")
    kept, none = tmp_path / "kept", tmp_path / "none"
    assert finished([*once, "--no-compilation-cache"], XDG_CACHE_HOME=str(none)).stdout == "bc\n"
    assert {path.parent for path in _files(none)} <= {none / "novalm-jax" / "native"}
    assert finished(once, XDG_CACHE_HOME=str(kept)).stdout == "bc\n"
    written = _files(kept)
    assert len(written) > 5 and all(path.is_relative_to(kept / "novalm-jax") for path in written)
    again = finished(once, XDG_CACHE_HOME=str(kept))
    assert again.stdout == "bc\n"
    programs = {path.name for path in _files(kept) if not path.name.endswith("-atime")}
    assert programs == {path.name for path in written if not path.name.endswith("-atime")}


def test_a_cache_that_cannot_be_written_only_warns(model, tmp_path):
    (tmp_path / "novalm-jax").write_text("in the way", encoding="utf-8")
    done = finished(command("--model", model, "--prompt", "a"), XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "bc\n")
    assert f"{tmp_path / 'novalm-jax' / 'programs'} cannot be written" in done.stderr


@pytest.mark.parametrize(("code", "ends"), [(130, True), (0, False)])
def test_after_ctrl_c_nothing_is_waited_for(code: int, ends: bool) -> None:
    """A thread that goes on, as a library's may that compiles, keeps a process only where it was not interrupted."""
    program = f"""
import os, threading
from novalm_jax.commands import leave
goes_on = threading.Event()
threading.Thread(target=lambda: (goes_on.wait(3), os._exit(77))).start()
print("out", end="")
leave({code})
"""
    done = finished([sys.executable, "-c", program])
    assert done.returncode == (code if ends else 77)
    assert not ends or done.stdout == "out"
