"""Small configurations of every family, as config.json stores them, and what reading them gives or says."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from novalm_jax.config import ModelConfig
from novalm_jax.errors import ConfigError
from novalm_jax.models.families import find_family

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
QWEN: dict[str, Any] = {
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}
WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7}
LOCAL: dict[str, Any] = {"intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2}
GROUPED: dict[str, Any] = {
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    **GROUPED,
    "num_key_value_heads": None,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
LLAMA4: dict[str, Any] = {
    **LOCAL,
    "intermediate_size_mlp": 24,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 7,
    "head_dim": 8,
}
# Small models in which every field that the family reads matters; `a.b` is the field b of the object a.
OWN: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config.kv_n_heads": 2,
        "ffn_config.ffn_hidden_size": 20,
        "ffn_config.moe_num_experts": 4,
        "ffn_config.moe_top_k": 2,
    },
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
    "ernie4_5_moe": {
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_layer_end_index": 2,
    },
    "glm4_moe": GROUPED,
    "gpt_oss": {**LOCAL, "sliding_window": 7, "head_dim": 8},
    "granitemoe": LOCAL,
    "hunyuan_v1_moe": {"intermediate_size": 20, "num_experts": 4, "moe_topk": 2},
    "kimi_k2": LATENT,
    "llama": {"intermediate_size": 24},
    "llama4": LLAMA4,
    "llama4_text": LLAMA4,
    "minimax_m2": {**LOCAL, "head_dim": 8},
    "mistral": {"intermediate_size": 24},
    "mixtral": LOCAL,
    "olmoe": {"intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": LOCAL,
    "qwen2": {"intermediate_size": 24, **WINDOWED, "max_window_layers": 1},
    "qwen2_moe": {**QWEN, **WINDOWED, "shared_expert_intermediate_size": 20, "max_window_layers": 1},
    "qwen3": {"intermediate_size": 24, **WINDOWED, "max_window_layers": 1},
    "qwen3_moe": {**QWEN, **WINDOWED},
}


def stored(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json of this family, with these fields of its text model changed."""
    return _laid_out(family, {**_fields(family), **changes})


def without(family: str, *names: str, **changes: Any) -> dict[str, Any]:
    """The same with these fields left out."""
    fields = {**_fields(family), **changes}
    return _laid_out(family, {name: value for name, value in fields.items() if name not in names})


def _fields(family: str) -> dict[str, Any]:
    own_names = {other: name for name, other in find_family({"model_type": family}).renamed.items()}
    return {**{own_names.get(name, name): value for name, value in COMMON.items()}, **OWN[family]}


def _laid_out(family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, value in copy.deepcopy(dict(fields)).items():
        section, _, field = name.rpartition(".")
        (config.setdefault(section, {}) if section else config)[field] = value
    section = find_family({"model_type": family}).text_section
    return {"model_type": family, **({section: config} if section else config)}


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    return find_family(config).read_config(config)


def outcome(config: Mapping[str, Any]) -> ModelConfig | str:
    """The model, or why there is none."""
    try:
        return read_config(config)
    except ConfigError as error:
        return str(error)


def message(config: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(config)
    return str(caught.value)


def attention_of(config: ModelConfig) -> Any:
    return config.layers[0].attention
