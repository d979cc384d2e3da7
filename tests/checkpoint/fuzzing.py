"""Small whole checkpoints in memory, and ways to break them: bytes, headers, indices, configurations, files.

A checkpoint is a dictionary of file names and contents. A mutation changes it in place, by the numbers of a generator.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save

Files = dict[str, bytes]
Random = np.random.Generator
Mutation = Callable[[Random, Files], None]

CONFIG, INDEX = "config.json", "model.safetensors.index.json"

MIXTRAL: dict[str, Any] = {
    **{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "torch_dtype": "float32", "vocab_size": 7},
    **{"hidden_size": 6, "intermediate_size": 5, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 48, "rms_norm_eps": 1e-4},
    **{"num_local_experts": 3, "num_experts_per_tok": 1, "rope_theta": 5000.0, "sliding_window": 9},
    **{"tie_word_embeddings": False, "hidden_act": "gelu", "initializer_range": 0.02, "bos_token_id": 1},
}
QWEN3: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "vocab_size": 5, "hidden_size": 6, "intermediate_size": 7, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32},
    **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 3, "norm_topk_prob": True},
    **{"rope_theta": 2e6, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "mlp_only_layers": [1]},
    **{"use_sliding_window": True, "sliding_window": 7, "router_aux_loss_coef": 0.1, "eos_token_id": 2},
    "rope_scaling": {"type": "linear", "factor": 2.0},
}
BASES: dict[str, dict[str, Any]] = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3}


def base(name: str) -> Files:
    """mixtral in one file, or qwen3_moe in three with an index; of three dtypes, with packed experts in the second."""
    config = BASES[name]
    random = np.random.default_rng(len(name))
    kinds = (np.float32, ml_dtypes.bfloat16, np.float16)
    tensors = {
        tensor: random.standard_normal(shape).astype(kinds[i % 3]) for i, (tensor, shape) in enumerate(_shapes(config))
    }
    files = {CONFIG: json.dumps(config).encode()}
    if name == "mixtral":
        return files | {"model.safetensors": save(tensors, {"format": "pt"})}
    weight_map = {tensor: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, tensor in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        files[file] = save({tensor: value for tensor, value in tensors.items() if weight_map[tensor] == file})
    return files | {INDEX: json.dumps({"metadata": {}, "weight_map": weight_map}).encode()}


def _shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    v, d, q = config["vocab_size"], config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    kv, c, wide = config["num_key_value_heads"] * config["head_dim"], config["head_dim"], config["intermediate_size"]
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (v, d)), ("model.norm.weight", (d,))]
    for number in range(2):
        layer = f"model.layers.{number}."
        shapes += [(f"{layer}{name}_layernorm.weight", (d,)) for name in ("input", "post_attention")]
        shapes += [(f"{layer}self_attn.{name}_proj.weight", (n, d)) for name, n in (("q", q), ("k", kv), ("v", kv))]
        shapes += [(f"{layer}self_attn.o_proj.weight", (d, q))]
        if config["model_type"] == "mixtral":
            moe, e = f"{layer}block_sparse_moe.", config["num_local_experts"]
            shapes += [(f"{moe}gate.weight", (e, d))]
            for expert in range(e):
                names = (("w1", (wide, d)), ("w2", (d, wide)), ("w3", (wide, d)))
                shapes += [(f"{moe}experts.{expert}.{name}.weight", shape) for name, shape in names]
            continue
        shapes += [(f"{layer}self_attn.{name}_norm.weight", (c,)) for name in "qk"]
        if number == 0:
            e, f = config["num_experts"], config["moe_intermediate_size"]
            shapes += [(f"{layer}mlp.gate.weight", (e, d)), (f"{layer}mlp.experts.gate_up_proj", (e, 2 * f, d))]
            shapes += [(f"{layer}mlp.experts.down_proj", (e, d, f))]
        else:
            shapes += [(f"{layer}mlp.{name}_proj.weight", (wide, d)) for name in ("gate", "up")]
            shapes += [(f"{layer}mlp.down_proj.weight", (d, wide))]
    return [*shapes, ("lm_head.weight", (v, d))] if not config["tie_word_embeddings"] else shapes


# --- choosing --------------------------------------------------------------------------------------------------------


def pick(random: Random, items: Any) -> Any:
    """One of some items."""
    items = list(items)
    return items[int(random.integers(len(items)))]


def _weights(files: Files) -> list[str]:
    return sorted(name for name in files if name.endswith(".safetensors") and len(files[name]) > 8)


def _header(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _with_header(header: Any, data: bytes, by: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", max(0, len(text) + by)) + text + data


NUMBERS: tuple[Any, ...] = (0, -1, 1, 2, 2**31 - 1, 2**31, 2**40, 2**63, 10**30, 0.5, -0.0, 1e-300, 1e300, 1e39)
OTHERS: tuple[Any, ...] = (None, True, False, "", "4", "text", [], [1], ["x"], {}, {"a": 1}, float("nan"), float("inf"))


def other_value(random: Random, value: Any) -> Any:
    """A value near a given one, or one of another kind."""
    kind = int(random.integers(4))
    if kind == 0 and isinstance(value, int | float):
        return pick(random, (value + 1, value - 1, value * 2, value // 2, -value, float(value), str(value)))
    if kind == 1 and isinstance(value, str):
        return pick(random, (value.upper(), value[:-1], value + "x", [value]))
    return pick(random, NUMBERS if kind == 2 else OTHERS)


# --- mutations -------------------------------------------------------------------------------------------------------


def bytes_changed(random: Random, files: Files) -> None:
    """A few bytes of some file, mostly of its first part."""
    name = pick(random, files)
    content = bytearray(files[name])
    for _ in range(int(random.integers(1, 4))):
        place = int(random.integers(len(content) if random.integers(4) == 0 else min(len(content), 600)))
        content[place] = pick(random, b'0123456789,:"[]{}-.eUFIB\0 ') if random.integers(2) else random.integers(256)
    files[name] = bytes(content)


def length_changed(random: Random, files: Files) -> None:
    """A file cut, extended, emptied, doubled, or with a part taken out."""
    name = pick(random, files)
    content = files[name]
    a, b = sorted(int(random.integers(len(content) + 1)) for _ in range(2))
    changed = (content[:a], content + random.bytes(5), b"", content + content, content[:a] + content[b:], content[a:])
    files[name] = pick(random, changed)


def parts_swapped(random: Random, files: Files) -> None:
    """Two ranges of a file change places."""
    name = pick(random, files)
    a, b, c, d = sorted(int(random.integers(len(files[name]) + 1)) for _ in range(4))
    content = files[name]
    files[name] = content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def header_length_changed(random: Random, files: Files) -> None:
    """The eight bytes before a header."""
    name = pick(random, _weights(files))
    length = int.from_bytes(files[name][:8], "little")
    size = len(files[name])
    lengths = (length + 1, length - 1, 0, size, size - 8, 2**31, 2**63, 2**64 - 1, 10**8, int(random.integers(2**20)))
    files[name] = struct.pack("<Q", pick(random, lengths)) + files[name][8:]


def entry_changed(random: Random, files: Files) -> None:
    """One thing that a header says of one tensor."""
    name = pick(random, _weights(files))
    header, data = _header(files[name])
    entry = header[pick(random, [key for key in header if key != "__metadata__"])]
    what = int(random.integers(5))
    if what == 0:
        entry["dtype"] = pick(random, ("F32", "F16", "BF16", "F64", "I8", "U8", "I16", "F8_E4M3", "x", None, 3))
    elif what == 1:
        entry["shape"] = pick(random, (entry["shape"][::-1], [*entry["shape"], 1], entry["shape"][1:], [], None))
    elif what == 2 and entry["shape"]:
        entry["shape"][int(random.integers(len(entry["shape"])))] = other_value(random, entry["shape"][0])
    elif what == 3:
        place = int(random.integers(2))
        entry["data_offsets"][place] = other_value(random, entry["data_offsets"][place])
    else:
        del entry[pick(random, entry)]
    files[name] = _with_header(header, data)


def tensors_swapped(random: Random, files: Files) -> None:
    """Two tensors of a file change names, or the bytes they lie at."""
    name = pick(random, _weights(files))
    header, data = _header(files[name])
    keys = [key for key in header if key != "__metadata__"]
    a, b = pick(random, keys), pick(random, keys)
    if random.integers(2):
        header[a], header[b] = header[b], header[a]
    else:
        header[a]["data_offsets"], header[b]["data_offsets"] = header[b]["data_offsets"], header[a]["data_offsets"]
    files[name] = _with_header(header, data)


def tensor_renamed(random: Random, files: Files) -> None:
    """A tensor under another name, in the index too or not; or twice in a header, or not at all."""
    name = pick(random, _weights(files))
    header, data = _header(files[name])
    old = pick(random, [key for key in header if key != "__metadata__"])
    numbered = old.replace("1", pick(random, "0234")) if "1" in old else old.replace("0", pick(random, "1234"))
    new = pick(random, (numbered, old + "x", old[:-1], old.upper(), "model.rotary_emb.inv_freq", "mtp.x", "x", ""))
    what = int(random.integers(4))
    if what == 0:
        text = json.dumps(header).encode()
        files[name] = _with_header(text[:-1] + b", " + json.dumps({old: header[old]}).encode()[1:], data)
        return
    entry = header.pop(old)
    if what > 1:
        header[new] = entry
    files[name] = _with_header(header, data)
    if what == 3 and INDEX in files:
        files[INDEX] = files[INDEX].replace(json.dumps(old).encode(), json.dumps(new).encode())


def index_changed(random: Random, files: Files) -> None:
    """What an index says, or an index where there was none."""
    if INDEX not in files:
        name = pick(random, _weights(files))
        keys = [key for key in _header(files[name])[0] if key != "__metadata__"]
        files[INDEX] = json.dumps({"weight_map": dict.fromkeys(keys, name)}).encode()
    index = json.loads(files[INDEX])
    weight_map = index["weight_map"]
    key = pick(random, weight_map)
    what = int(random.integers(6))
    shards: tuple[Any, ...] = (*_weights(files), f"./{weight_map[key]}", "../x", "/x", "x", "", None, 3)
    if what == 0:
        weight_map[key] = pick(random, shards)
    elif what == 1:
        del weight_map[key]
    elif what == 2:
        weight_map[key + "x"] = weight_map.pop(key)
    elif what == 3:
        index["weight_map"] = pick(random, OTHERS)
    elif what == 4:
        shard = pick(random, shards)
        index["weight_map"] = dict.fromkeys(weight_map, shard)
    files[INDEX] = json.dumps(index).encode()


def config_changed(random: Random, files: Files) -> None:
    """One field of config.json: another value, gone, or one more."""
    config = json.loads(files[CONFIG])
    name = pick(random, config)
    what = int(random.integers(8))
    if what == 0:
        del config[name]
    elif what == 1:
        more = ("unknown", "attention_bias", "quantization_config", "rope_scaling", "num_experts", "layer_types")
        config[pick(random, (*more, "decoder_sparse_step", "is_encoder_decoder"))] = other_value(random, 1)
    elif isinstance(config[name], dict) and random.integers(2):
        key = pick(random, config[name])
        config[name][key] = other_value(random, config[name][key])
    else:
        config[name] = other_value(random, config[name])
    text = json.dumps(config)
    if random.integers(20) == 0:
        text = text[:-1] + ", " + json.dumps({name: config.get(name)})[1:]
    files[CONFIG] = text.encode()


def files_changed(random: Random, files: Files) -> None:
    """Files gone, under another name, swapped, copied, or merged into one."""
    name = pick(random, files)
    weights = _weights(files)
    what = int(random.integers(6))
    if what == 0:
        del files[name]
    elif what == 1:
        files[pick(random, ("x.safetensors", "model.safetensors", "model-00001-of-00002.safetensors"))] = files.pop(
            name
        )
    elif what == 2:
        other = pick(random, files)
        files[name], files[other] = files[other], files[name]
    elif what == 3:
        files[pick(random, ("x.safetensors", "model.safetensors", "model-00004-of-00003.safetensors"))] = files[name]
    else:
        merged: dict[str, Any] = {}
        data = b""
        for weight in weights:
            header, content = _header(files[weight] if what == 4 else files.pop(weight))
            header.pop("__metadata__", None)
            for entry in header.values():
                entry["data_offsets"] = [offset + len(data) for offset in entry["data_offsets"]]
            merged |= header
            data += content
        files["model.safetensors"] = _with_header(merged, data)
        if random.integers(2):
            files.pop(INDEX, None)


def data_changed(random: Random, files: Files) -> None:
    """A byte of a tensor: what is stored is another number."""
    name = pick(random, _weights(files))
    content = bytearray(files[name])
    content[-1 - int(random.integers(40))] ^= 1 << int(random.integers(8))
    files[name] = bytes(content)


MUTATIONS: tuple[Mutation, ...] = (
    *(bytes_changed, length_changed, parts_swapped, header_length_changed, entry_changed, tensors_swapped),
    *(tensor_renamed, index_changed, config_changed, config_changed, config_changed, files_changed, data_changed),
)


def mutated(random: Random, files: Files) -> list[str]:
    """Breaks a checkpoint in one or two ways; returns what was done."""
    done = []
    for _ in range(int(random.integers(1, 3))):
        mutation = pick(random, MUTATIONS)
        try:
            mutation(random, files)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            # The first mutation left nothing that the second could be applied to.
            continue
        done.append(mutation.__name__)
    return done
