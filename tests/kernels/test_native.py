"""Native products of rows with the matrices they chose: what they give, which bits nothing changes, and what becomes of
those who have no compiler. As a form of the expert product they are in tests/models/test_experts.py."""

import ctypes
import logging
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax import LLM, SamplingParams
from novalm_jax.compat import compile_program, native_code_folder
from novalm_jax.engine.functions import DECODE_ROWS, EXPERT_GROUP, HEAD_BLOCK, PREFILL_ROWS
from novalm_jax.errors import OptionError
from novalm_jax.kernels import native
from novalm_jax.kernels.native import build as build_module
from novalm_jax.kernels.storage import storage_dtype
from tiny_checkpoints import tiny_checkpoint

DTYPES = (jnp.float32, jnp.bfloat16)
TILES = sys.platform == "linux" and " amx_bf16 " in Path("/proc/cpuinfo").read_text()


def compiled(x: Any, slots: Any, stack: Any, inputs_first: bool) -> np.ndarray:
    def function(x: Any, slots: Any, stack: Any) -> jax.Array:
        return native.rows_times(x, slots, [stack], inputs_first)[0]

    arguments = (jnp.asarray(x), jnp.asarray(slots, jnp.int32), jnp.asarray(stack))
    return np.asarray(compile_program(function, arguments)(*arguments))


def draw(dtype: Any, *shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers of a dtype."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def stored(stack: np.ndarray) -> np.ndarray:
    return stack.view(storage_dtype(stack.dtype))


def laid_out(stack: np.ndarray, inputs_first: bool) -> np.ndarray:
    return np.ascontiguousarray(stack.swapaxes(1, 2)) if inputs_first else stack


# --- what they give --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("any_processor")
@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "k", "i", "o"),
    [(2, 1, 1, 1), (3, 2, 31, 33), (4, 8, 32, 17), (16, 4, 100, 64), (64, 8, 48, 130), (5, 3, 257, 700), (1, 1, 7, 2)],
)
def test_products(dtype: Any, inputs_first: bool, t: int, k: int, i: int, o: int) -> None:
    """Widths that no step divides, more rows for a matrix than are multiplied at a time, and choices of nobody."""
    x, stack, e = draw(dtype, t, i), draw(dtype, 5, o, i), 5
    slots = np.random.default_rng((t, k, i)).integers(-1, e, t * k)
    out = compiled(x, slots, stored(laid_out(stack, inputs_first)), inputs_first)
    wide_x, wide_stack = x.astype(np.float64), stack.astype(np.float64)
    expected = np.stack([wide_stack[s] @ wide_x[n // k] if s >= 0 else np.zeros(o) for n, s in enumerate(slots)])
    assert out.dtype == np.float32 and out.shape == (t * k, o)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5 * i**0.5)
    assert not out[slots < 0].any()


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_stacks_give_the_bits_that_each_gives_alone(dtype: Any, inputs_first: bool) -> None:
    """Of other widths, in storage form and as they are."""
    x, slots = draw(dtype, 6, 75), np.random.default_rng(2).integers(-1, 4, 18)
    stacks = [laid_out(draw(dtype, 4, o, 75, seed=o), inputs_first) for o in (40, 600, 3)]
    stacks[1] = stored(stacks[1])
    given = (jnp.asarray(x), jnp.asarray(slots, jnp.int32), [jnp.asarray(stack) for stack in stacks])
    outs = jax.jit(native.rows_times, static_argnums=3)(*given, inputs_first)
    for out, stack in zip(outs, stacks, strict=True):
        assert np.asarray(out).tobytes() == compiled(x, slots, stack, inputs_first).tobytes()


def test_prompts_are_too_many_rows_for_native_code_and_decode_steps_are_not() -> None:
    assert DECODE_ROWS[-1] < native.FEW_ROWS <= min(PREFILL_ROWS[0], HEAD_BLOCK, EXPERT_GROUP)


def test_the_system_lets_this_process_use_the_tiles_that_its_processor_has() -> None:
    """Else lanes would be tested twice, and products be slower without a word."""
    compiled(draw(jnp.bfloat16, 2, 8), [0, 1], draw(jnp.bfloat16, 2, 4, 8), False)
    permitted, arch_prctl, get_permitted, tile_data = ctypes.c_uint64(), 158, 0x1022, 18
    if TILES:
        assert ctypes.CDLL(None).syscall(arch_prctl, get_permitted, ctypes.byref(permitted)) == 0
    assert bool(permitted.value >> tile_data & 1) == TILES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 70), (3, 2, 70), (0, 70)])
def test_products_of_rows_that_all_choose_the_same(dtype: Any, shape: tuple[int, ...]) -> None:
    x, weights = draw(dtype, *shape), [draw(dtype, o, 70, seed=o) for o in (5, 90)]
    for out, weight in zip(jax.jit(native.products)(x, weights), weights, strict=True):
        expected = x.astype(np.float64) @ weight.astype(np.float64).T
        assert out.dtype == jnp.float32 and out.shape == expected.shape
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("any_processor")
@pytest.mark.parametrize("inputs_first", [False, True])
def test_every_bit_of_a_weight_counts(inputs_first: bool) -> None:
    """bfloat16 is widened exactly: one input that is 1 gives the weights back, NaN and infinities too. Denormals are
    zeros, as everywhere in XLA's programs."""
    every = np.arange(1 << 16, dtype=np.uint16).reshape(1, -1, 1)
    matrix = np.concatenate([every, np.zeros_like(every)], axis=2)
    x = jnp.asarray([[1.0, 0.0]], jnp.bfloat16)
    out = compiled(x, [0], laid_out(matrix, inputs_first), inputs_first)[0]
    expected = (every.reshape(-1).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(out, np.where(np.abs(expected) < np.finfo(np.float32).tiny, 0, expected))


# --- bits ------------------------------------------------------------------------------------------------------------

SHAPES = [(64, 96), (37, 45), (1024, 520)]


@pytest.mark.usefixtures("any_processor")
@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("i", "o"), SHAPES)
def test_a_row_feels_neither_its_company_nor_its_slot(dtype: Any, inputs_first: bool, i: int, o: int) -> None:
    """Alone, among 1 to 64 others that choose the same matrix or others, and in other slots of other stacks."""
    x, stack = draw(dtype, 64, i), draw(dtype, 6, o, i)
    slots = np.random.default_rng(1).integers(0, 6, 64)
    matrices = stored(laid_out(stack, inputs_first))
    whole = compiled(x, slots, matrices, inputs_first)
    for count in (1, 2, 3, 5, 17):
        assert compiled(x[:count], slots[:count], matrices, inputs_first).tobytes() == whole[:count].tobytes()
    one = compiled(x, np.zeros(64), matrices[slots[:1]], inputs_first)
    assert one[:1].tobytes() == whole[:1].tobytes()
    order = np.array([3, 5, 0, 2, 1, 4])
    moved = np.argsort(order)[slots]
    assert compiled(x, moved, matrices[order], inputs_first).tobytes() == whole.tobytes()
    # Rows in another order, two choices for each.
    twice = compiled(x[::-1], np.repeat(slots[::-1], 2), matrices, inputs_first)
    assert twice[::2].tobytes() == twice[1::2].tobytes() == np.ascontiguousarray(whole[::-1]).tobytes()
    some = np.where(slots % 2 == 0, slots, -1)
    assert compiled(x, some, matrices, inputs_first)[slots % 2 == 0].tobytes() == whole[slots % 2 == 0].tobytes()


PRINTS = """
import hashlib, os
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:{threads}]))
import jax, numpy as np
from novalm_jax.kernels import native
x, slots = np.random.default_rng(0).standard_normal((16, 640)).astype(np.float32), np.arange(64, dtype=np.int32) % 8
digest = hashlib.sha256()
for first, shape in ((False, (8, 700, 640)), (True, (8, 640, 700))):
    stack = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    digest.update(np.asarray(jax.jit(native.rows_times, static_argnums=3)(x, slots, [stack], first)[0]).tobytes())
print(digest.hexdigest())
"""


def run_python(code: str, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", **variables}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def output_of(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return out


def test_the_number_of_threads_changes_no_bit_and_processes_may_build_at_once(tmp_path: Path) -> None:
    """Both find no library, and one is there afterwards."""
    processes = [run_python(PRINTS.format(threads=count), XDG_CACHE_HOME=str(tmp_path)) for count in (1, 64)]
    alone, together = map(output_of, processes)
    assert alone == together != ""
    (library,) = (tmp_path / "novalm-jax" / "native").iterdir()
    assert re.fullmatch(r"rows_[0-9a-f]{16}\.so", library.name)


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [3, 2**31 - 1])
def test_a_slot_that_is_not_there_is_an_error(slot: int) -> None:
    with pytest.raises(Exception, match=f"slot {slot} of 3"):
        compiled(draw(np.float32, 2, 8), [0, slot], draw(np.float32, 3, 4, 8), False)


@pytest.mark.parametrize(
    ("x", "slots", "stack", "inputs_first"),
    [((2, 8), 2, (3, 4, 9), False), ((2, 8), 2, (3, 4, 8), True), ((2, 8), 5, (3, 4, 8), False)],
)
def test_shapes_that_do_not_match_are_an_error(x: Any, slots: int, stack: Any, inputs_first: bool) -> None:
    with pytest.raises(Exception, match=r"shapes do not match: x \[2, 8\], slots"):
        compiled(draw(np.float32, *x), [0] * slots, draw(np.float32, *stack), inputs_first)


def test_dtypes_that_are_not_known_are_an_error() -> None:
    x, stack = draw(np.float32, 2, 8), draw(np.float32, 3, 4, 8)
    with pytest.raises(Exception, match="all bfloat16 or all float32, slots are int32"):
        jax.block_until_ready(native.rows_times(jnp.asarray(x), jnp.zeros(2, jnp.int16), [jnp.asarray(stack)], False))
    with pytest.raises(TypeError, match="float16"):
        compiled(x.astype(np.float16), [0, 0], stack.astype(np.float16), False)


# --- building --------------------------------------------------------------------------------------------------------


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has built nothing, with an empty cache; gives the only folder of PATH, which is empty."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(programs))
    for function in (build_module._loaded, native._warn_once):
        function.cache_clear()
    yield programs
    for function in (build_module._loaded, native._warn_once):
        function.cache_clear()


def make_compiler(folder: Path, script: str) -> None:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("native") / "model", "qwen3_moe")


GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_a_model_says_what_computes_its_steps(folder: Path) -> None:
    said, tokens = [], []
    for kernels in ("auto", "native", "xla"):
        with LLM(folder, dtype="float32", max_batch=2, context_length=64, kernels=kernels) as llm:
            tokens.append(llm.generate([5, 7, 9], GREEDY)[0].token_ids)
            said.append(llm.report().kernels["decode steps"])
            step = llm._placement.programs.decode(4).as_text() or ""
            for call in ("novalm_matrix_rows", "novalm_attention_rows"):
                assert (call in step) == (kernels != "xla")
    assert said == ["native", "native", "xla"]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "there is no C++ compiler"),
        ("exit 3", "fails: exit code 3"),
        ("exit 0", "writes nothing"),
        (r'printf "\351" >&2; exit 1', "fails: \N{REPLACEMENT CHARACTER}"),
        (
            '[ "$1" = --version ] && exit 0; echo "In file x:" >&2; echo "x:3: error: no such thing" >&2; exit 1',
            "thing",
        ),
    ],
)
def test_without_a_compiler_that_works_xla_computes_and_it_is_said_once(
    unbuilt: Path, folder: Path, caplog: pytest.LogCaptureFixture, script: str | None, reason: str
) -> None:
    if script is not None:
        make_compiler(unbuilt, script)
    with caplog.at_level(logging.WARNING, "novalm_jax"):
        for _ in range(2):
            assert native.choose_kernels("auto") == "xla"
        with LLM(folder, max_batch=2, context_length=64, compilation_cache=False) as llm:
            assert llm.report().kernels["decode steps"] == "xla"
    (said,) = (record.message for record in caplog.records if record.message.startswith("kernels:"))
    assert reason in said and "XLA computes everything" in said
    with pytest.raises(
        OptionError, match=rf"^kernels: the native ones cannot be had: .*{re.escape(reason)}.* use auto\."
    ):
        LLM(folder, kernels="native")
    caplog.clear()
    assert native.choose_kernels("xla") == "xla" and not caplog.records
    assert not list(native_code_folder().glob("*"))


def test_a_folder_that_cannot_be_written_is_said(unbuilt: Path) -> None:
    make_compiler(unbuilt, "exit 0")
    native_code_folder().parent.parent.write_text("a file where the folder would be")
    with pytest.raises(OptionError, match=r"native cannot be written"):
        native.choose_kernels("native")


def test_without_a_home_the_cache_has_no_folder_and_that_is_said(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(*_: Any) -> Any:
        raise RuntimeError("no home")

    make_compiler(unbuilt, "exit 0")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(OptionError, match=r"there is no cache folder \(no home\); set XDG_CACHE_HOME"):
        native.choose_kernels("native")


def test_another_compiler_or_processor_builds_another_library(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the custom call has it too, so that a program that is kept is never run with other code."""
    names = set()
    for version, processor in (("1", "a"), ("2", "a"), ("2", "b")):
        make_compiler(
            unbuilt, f'[ "$1" = --version ] && echo {version} && exit; for last; do :; done; echo x > "$last"'
        )
        monkeypatch.setattr(build_module, "_processor", lambda processor=processor: processor)
        names.add(build_module.build())
    assert len(names) == 3 and {stat.S_IMODE(path.stat().st_mode) for path in names} == {0o755}


def test_other_backends_compute_with_xla(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert native.choose_kernels("auto") == "xla" and not caplog.records
    with pytest.raises(OptionError, match="for the CPU, and JAX computes on gpu"):
        native.choose_kernels("native")
