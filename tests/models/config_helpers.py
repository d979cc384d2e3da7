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
# Small models in which every field that the family reads matters.
OWN: dict[str, dict[str, Any]] = {
    "granitemoe": {"intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {"intermediate_size": 24},
    "mistral": {"intermediate_size": 24},
    "mixtral": {"intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**QWEN, **WINDOWED, "shared_expert_intermediate_size": 20, "max_window_layers": 1},
    "qwen3": {"intermediate_size": 24, **WINDOWED, "max_window_layers": 1},
    "qwen3_moe": {**QWEN, **WINDOWED},
}


def stored(family: str, **changes: Any) -> dict[str, Any]:
    return copy.deepcopy({"model_type": family, **COMMON, **OWN[family], **changes})


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    return find_family(config).read_config(config)


def message(config: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(config)
    return str(caught.value)


def attention_of(config: ModelConfig) -> Any:
    return config.layers[0].attention
