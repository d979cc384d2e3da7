"""Draws the golden checkpoints of this folder: tiny random models and what the reference implementation makes of them.

Run by hand, in an environment with torch and transformers (README.md names the versions):

    python tests/golden/make.py [case ...]

Knows the reference implementation and the table of cases. Refuses to know novalm_jax: nothing here may depend on the
code that the golden files judge. Every case is checked before it is kept: the written folder, read back, gives the same
logits; no token sits on a routing tie or a tie of its two best logits; and each named feature, taken away, moves them.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from case import ABSENT, Case
from cases import CASES
from routing import watch_routers

HERE = Path(__file__).parent
TOKENS, GREEDY = 24, 16
WEIGHT_STD, NORM_STD, BIAS_STD, ROUTER_STD, SINK_STD = 0.2, 0.3, 0.3, 0.6, 1.0
LEAST_ROUTER_MARGIN, LEAST_GREEDY_MARGIN, LEAST_BITE = 1e-4, 1e-3, 1e-2
# A continuation that only repeats one token would hide a wrong position or a stale cache.
LEAST_DISTINCT = 7
SHARD_SIZE = "20KB"
# Families whose published files hold the experts of a layer in one tensor.
FUSED = {"dbrx", "gpt_oss", "granitemoe", "llama4", "llama4_text"}


NORM_WEIGHT = re.compile(r"norm(_1|_2|_f)?\.weight$")
ROUTERS = (".gate.weight", ".router.weight", ".router.layer.weight", ".wg.weight")

State = dict[str, "torch.Tensor"]


class MissingTensors(Exception):
    """A configuration asks for tensors that the weights at hand lack, or have in another shape."""


def spell_out(case: Case, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with those keys that this case means and the reference does not read where they stand."""
    spelt = dict(fields)
    for key, path in case.meant.items():
        spelt[key] = functools.reduce(operator.getitem, path.split("."), spelt)
    return spelt


def configure(family: str, fields: Mapping[str, Any]) -> Any:
    """The reference's configuration of config.json's content."""
    config = transformers.CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(dict(fields))))
    config._experts_implementation = "eager"
    return config


def build(family: str, fields: Mapping[str, Any]) -> Any:
    """A fresh reference model, eager and in float32; rotary embeddings keep state, so one serves one length only."""
    return transformers.AutoModelForCausalLM.from_config(
        configure(family, fields), attn_implementation="eager", dtype=torch.float32
    ).eval()


def stored_dtype(name: str, dtype: str) -> str:
    """Published files keep the bias that corrects the choice of experts in float32."""
    return "float32" if name.endswith("e_score_correction_bias") else dtype


def draw(model: Any, seed: int, dtype: str) -> State:
    """Random weights under the in-memory names, rounded to `dtype` and given back in float32."""
    random = torch.Generator().manual_seed(seed)
    state: State = {}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict()]
    for name, weight in sorted([*model.named_parameters(), *buffers]):
        noise = torch.randn(weight.shape, generator=random)
        if NORM_WEIGHT.search(name):
            value = 1 + NORM_STD * noise
        elif name.endswith("bias"):
            value = BIAS_STD * noise
        elif name.endswith(ROUTERS):
            value = ROUTER_STD * noise
        elif name.endswith(".sinks"):
            value = SINK_STD * noise
        else:
            value = WEIGHT_STD * noise
        state[name] = value.to(getattr(torch, stored_dtype(name, dtype))).to(torch.float32)
    return state


def fill(model: Any, state: State) -> list[str]:
    """Loads `state`; gives back the names of the tensors that the model wants and `state` lacks."""
    wanted = model.state_dict()
    fitting = {name: x for name, x in state.items() if name in wanted and x.shape == wanted[name].shape}
    missing = model.load_state_dict(fitting, strict=False).missing_keys
    model.tie_weights()
    return [name for name in missing if not (name == "lm_head.weight" and model.config.tie_word_embeddings)]


@torch.no_grad()
def forward(family: str, fields: Mapping[str, Any], state: State, ids: Any) -> tuple[Any, float]:
    """Logits [B, T, V] of one full pass, and the least gap between the last chosen and the first rejected expert."""
    model = build(family, fields)
    if missing := fill(model, state):
        raise MissingTensors(missing)
    gaps = watch_routers(model)
    return model(ids, use_cache=False).logits, min(gaps, default=math.inf)


def continue_greedily(family: str, fields: Mapping[str, Any], state: State, ids: Any) -> tuple[Any, float, float]:
    """The next GREEDY ids of ids [1, T] by repeated full passes, with the least routing gap and top-2 logit gap."""
    router_margin = greedy_margin = math.inf
    for _ in range(GREEDY):
        logits, margin = forward(family, fields, state, ids)
        best = logits[:, -1].topk(2)
        router_margin = min(router_margin, margin)
        greedy_margin = min(greedy_margin, float(best.values[0, 0] - best.values[0, 1]))
        ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return ids[:, -GREEDY:], router_margin, greedy_margin


def find_golden(name: str, case: Case) -> tuple[State, dict[str, np.ndarray]]:
    """The first seed whose tokens keep clear of every tie, and what the reference answers with it."""
    first = zlib.crc32((case.like or name).encode())
    fields = spell_out(case, case.fields)
    for seed in range(first, first + 1000):
        model = build(case.family, fields)
        state = draw(model, seed, case.dtype)
        random = torch.Generator().manual_seed(seed + 1)
        ids = torch.randint(3, model.config.vocab_size, (2, TOKENS), generator=random)
        logits, router_margin = forward(case.family, fields, state, ids)
        if router_margin < LEAST_ROUTER_MARGIN:
            continue
        greedy, greedy_margin = ids[:1, :0], math.inf
        if case.greedy:
            greedy, margin, greedy_margin = continue_greedily(case.family, fields, state, ids[:1])
            router_margin = min(router_margin, margin)
            if len(greedy.unique()) < LEAST_DISTINCT:
                continue
        if router_margin < LEAST_ROUTER_MARGIN or greedy_margin < LEAST_GREEDY_MARGIN:
            continue
        return state, {
            "input_ids": ids.numpy().astype(np.int32),
            "logits": logits.numpy(),
            "greedy": greedy.numpy().astype(np.int32),
            "router_margin": np.float32(router_margin),
        }
    raise AssertionError(f"{name}: no seed of a thousand will do")


def write(folder: Path, case: Case, state: State, golden: Mapping[str, np.ndarray]) -> None:
    """Writes the folder; what an earlier run left there goes first."""
    folder.mkdir(exist_ok=True)
    for old in {*folder.glob("model*"), *folder.glob("*.json")}:
        old.unlink()
    model = build(case.family, case.fields)
    fill(model, state)
    size = SHARD_SIZE if case.dtype == "bfloat16" else "1GB"
    model.to(getattr(torch, case.dtype))
    for name, buffer in model.named_buffers():
        if stored_dtype(name, case.dtype) != case.dtype:
            buffer.data = state[name]
    model.save_pretrained(folder, max_shard_size=size, save_original_format=case.layout != "packed")
    (folder / "generation_config.json").unlink()
    if case.hub_config:
        (folder / "config.json").write_text(json.dumps(case.fields, indent=2, sort_keys=True) + "\n")
    if case.layout == "w123":
        rename(folder / "model.safetensors", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})
    if case.family == "llama4" or case.ignored:
        dress(folder / "model.safetensors", "language_model." if case.family == "llama4" else "", case.ignored)
    np.savez_compressed(folder / "golden.npz", **golden)  # type: ignore[arg-type]


def rename(path: Path, parts: Mapping[str, str]) -> None:
    """Renames whole dotted parts in the tensor names of a safetensors file."""
    tensors = {".".join(parts.get(part, part) for part in name.split(".")): x for name, x in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def dress(path: Path, prefix: str, ignored: Mapping[str, tuple[int, ...]]) -> None:
    """Puts a prefix before every name, and adds tensors (of ones) that the reference does not look at."""
    tensors = {prefix + name: x for name, x in load_file(path).items()}
    tensors |= {name: torch.ones(shape) for name, shape in ignored.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def check_folder(folder: Path, case: Case, golden: Mapping[str, np.ndarray]) -> None:
    """The written folder, read by the reference, gives the golden logits again, and the names are those meant."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    prefix = "language_model." if case.family == "llama4" else ""
    assert (f"{prefix}lm_head.weight" in names) != case.fields.get("tie_word_embeddings", False), folder
    if "experts" in "".join(case.fields) and case.family not in FUSED:
        part = {"packed": "experts.gate_up_proj", "w123": "experts.0.w3.weight", "hub": "experts.0."}[case.layout]
        assert any(part in name for name in names), (folder, part)
    if case.layout == "w123":
        return  # The reference reads these names for no family with this configuration.
    fields = spell_out(case, json.loads((folder / "config.json").read_text()))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=configure(case.family, fields), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(golden["input_ids"]).long(), use_cache=False).logits.numpy()
    assert np.array_equal(logits, golden["logits"]), folder


def change(fields: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of config.json's content with one dotted path set to `value`, or deleted if that is ABSENT."""
    changed: dict[str, Any] = json.loads(json.dumps(fields))
    *parents, key = path.split(".")
    inner = changed
    for parent in parents:
        inner = inner[parent]
    if value is ABSENT:
        del inner[key]
    else:
        inner[key] = value
    return changed


def bites(folder: Path, case: Case, state: State, golden: Mapping[str, np.ndarray]) -> Iterator[tuple[str, float]]:
    """Each change of the case with the largest logit difference it makes (inf: it asks for other tensors)."""
    fields = json.loads((folder / "config.json").read_text())
    ids = torch.from_numpy(golden["input_ids"]).long()
    for path, value in case.bites.items():
        weights, config = state, fields
        if path.startswith("tensor:"):
            pattern = path.removeprefix("tensor:")
            assert any(re.search(pattern, name) for name in state), (folder, path)
            weights = {n: torch.full_like(x, value) if re.search(pattern, n) else x for n, x in state.items()}
        else:
            config = change(fields, path, value)
        try:
            logits, _ = forward(case.family, spell_out(case, config), weights, ids)
            bite = float(np.abs(logits.numpy() - golden["logits"]).max())
        except MissingTensors:
            bite = math.inf
        yield f"{path} -> {'absent' if value is ABSENT else value}", bite


def make(name: str) -> None:
    """Draws, writes and checks one case; prints its row of the table."""
    case, folder = CASES[name], HERE / name
    state, golden = find_golden(name, case)
    write(folder, case, state, golden)
    check_folder(folder, case, golden)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name:18} {size:8,d} bytes  router margin {float(golden['router_margin']):.1e}")
    for label, bite in bites(folder, case, state, golden):
        print(f"{'':18} {bite:8.3f}  {label}")
        assert bite > LEAST_BITE, (name, label, bite)


def main(names: list[str]) -> None:
    if unknown := sorted(set(names) - set(CASES)):
        raise SystemExit(f"no such case: {', '.join(unknown)}; there are: {', '.join(CASES)}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in names or CASES:
        make(name)


if __name__ == "__main__":
    main(sys.argv[1:])
