"""Small checkpoint folders for tests, in the form that is published: config.json, safetensors, tokenizer.json.

`tiny_checkpoint` has random weights. `bigram_checkpoint` and `chain_checkpoint` compute a table of logits instead: what
follows a token depends on that token alone and is chosen by the test.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

BOS, EOS, USER, ASSISTANT, SYSTEM = range(5)
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
MERGES = (("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"))
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(*, add_bos: bool = False) -> tokenizers.Tokenizer:
    """Byte-level BPE: the special tokens, one token for each byte, then the merged ones."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in MERGES)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
        )
    return tokenizer


TOKENIZER = byte_tokenizer()
TOKENS = TOKENIZER.get_vocab_size()


def encode(text: str) -> list[int]:
    """The ids of `text` in `byte_tokenizer`, without special tokens around it."""
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def write_tokenizer(folder: Path, *, add_bos: bool = False, chat_template: str | None = TEMPLATE) -> None:
    """tokenizer.json and tokenizer_config.json."""
    byte_tokenizer(add_bos=add_bos).save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS]}
    if chat_template is not None:
        config["chat_template"] = chat_template
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """`content` as a JSON file."""
    path.write_text(json.dumps(content), encoding="utf-8")


def tiny_checkpoint(folder: Path, family: str = "mixtral", *, seed: int = 0, scale: float = 0.3, **fields: Any) -> Path:
    """Random weights, large enough that no two outputs are alike.

    Args:
      folder: is made.
      family: "llama", "mixtral" or "qwen3_moe".
      seed: of the weights.
      scale: standard deviation of the weights.
      fields: of config.json, in place of or besides the usual ones.
    """
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": TOKENS,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    if family == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    elif family == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config |= fields
    rng = np.random.default_rng(seed)
    tensors = {
        name: np.ones(shape, np.float32)
        if name.endswith("norm.weight")
        else (rng.standard_normal(shape) * scale).astype(np.float32)
        for name, shape in _shapes(config).items()
    }
    return _write(folder, config, tensors)


def bigram_checkpoint(folder: Path, logits: np.ndarray, **fields: Any) -> Path:
    """A llama whose logits after token i are `logits[i]` (float32 `[v, v]`), whatever came before."""
    vocab = len(logits)
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": vocab,
        "intermediate_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-12,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    } | fields
    tensors = {name: np.zeros(shape, np.float32) for name, shape in _shapes(config).items()}
    tensors["model.embed_tokens.weight"] = np.eye(vocab, dtype=np.float32)
    tensors["model.norm.weight"] = np.ones(vocab, np.float32)
    # The last norm makes sqrt(v) of the one in a one-hot vector.
    tensors["lm_head.weight"] = np.ascontiguousarray(logits.T / np.sqrt(vocab), np.float32)
    return _write(folder, config, tensors)


def chain_checkpoint(
    folder: Path, next_token: Mapping[int, int] | Sequence[int], *, vocab_size: int = TOKENS, **fields: Any
) -> Path:
    """A model that follows token i with `next_token[i]` and every other token with the end token.

    A logit is 24 for the token that follows and 0 for all others, so that sampling at temperature 1 follows the chain
    too.
    """
    follows = dict(next_token.items() if isinstance(next_token, Mapping) else enumerate(next_token))
    logits = np.zeros((vocab_size, vocab_size), np.float32)
    for token in range(vocab_size):
        logits[token, follows.get(token, EOS)] = 24.0
    return bigram_checkpoint(folder, logits, **fields)


def chain(*texts: str, end: int = EOS) -> dict[int, int]:
    """The `next_token` that says each of `texts` to its end; no token may occur twice in all of them."""
    follows: dict[int, int] = {}
    for text in texts:
        ids = encode(text)
        for token, after in zip(ids, [*ids[1:], end], strict=True):
            assert token not in follows, f"{text!r}: token {token} would have two successors"
            follows[token] = after
    return follows


def cycle(ids: Iterable[int]) -> dict[int, int]:
    """The `next_token` that goes round and round through `ids`."""
    ids = list(ids)
    return dict(zip(ids, [*ids[1:], ids[0]], strict=True))


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    save_file(dict(tensors), folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The published tensors of a model with this configuration."""
    d, v = config["hidden_size"], config["vocab_size"]
    heads, kv_heads, c = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (v, d)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        shapes |= {f"{layer}{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (kv_heads * c, d) for name in "kv"}
        shapes |= {f"{layer}self_attn.q_proj.weight": (heads * c, d), f"{layer}self_attn.o_proj.weight": (d, heads * c)}
        if config["model_type"] == "qwen3_moe":
            shapes |= {f"{layer}self_attn.{name}_norm.weight": (c,) for name in "qk"}
        shapes |= _feed_forward_shapes(config, layer)
    return shapes


def _feed_forward_shapes(config: Mapping[str, Any], layer: str) -> dict[str, tuple[int, ...]]:
    d, f = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "llama":
        inner, names, experts = f"{layer}mlp.", ("gate_proj", "up_proj", "down_proj"), 0
    elif config["model_type"] == "mixtral":
        inner, names, experts = f"{layer}block_sparse_moe.", ("w1", "w3", "w2"), config["num_local_experts"]
    else:
        inner, names, experts = f"{layer}mlp.", ("gate_proj", "up_proj", "down_proj"), config["num_experts"]
        f = config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {f"{inner}gate.weight": (experts, d)} if experts else {}
    for prefix in [f"{inner}experts.{e}." for e in range(experts)] or [inner]:
        shapes |= {f"{prefix}{name}.weight": (f, d) for name in names[:2]} | {f"{prefix}{names[2]}.weight": (d, f)}
    return shapes


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, as the safetensors library reads them."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def assert_same(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """Fails unless both hold the same tensors, bit for bit."""
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name
