"""Configurations in the form that models are published in give networks of the published size."""

import dataclasses
from typing import Any

import jax
import pytest

from novalm_jax.checkpoint.load import abstract_model
from novalm_jax.config import ModelConfig
from novalm_jax.models.families import find_family
from novalm_jax.models.params import parameters_of

SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "max_position_embeddings",
)


def published(model_type: str, sizes: str, **fields: Any) -> dict[str, Any]:
    """A published config.json: `sizes` are those that every one has, in the order of `SIZES`, and rope_theta."""
    numbers = [int(size) for size in sizes.split()]
    return {
        "architectures": ["AnyForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": model_type,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        **dict(zip((*SIZES, "rope_theta"), numbers, strict=True)),
        **fields,
    }


def routed(experts: int, k: int, width: int, dense: int, **more: Any) -> dict[str, Any]:
    """Qwen's fields for experts."""
    return {
        "decoder_sparse_step": 1,
        "intermediate_size": dense,
        "moe_intermediate_size": width,
        "num_experts": experts,
        "num_experts_per_tok": k,
        "use_sliding_window": False,
        **more,
    }


MIXTRAL: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 8, "sliding_window": None}
GRANITE: dict[str, Any] = {
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "num_experts_per_tok": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
OLMOE: dict[str, Any] = {
    "attention_bias": False,
    "clip_qkv": None,
    "intermediate_size": 1024,
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "pad_token_id": 1,
    "rope_scaling": None,
}
QWEN15 = routed(
    *(60, 4, 1408, 5632),
    max_window_layers=21,
    norm_topk_prob=False,
    shared_expert_intermediate_size=5632,
    sliding_window=32768,
)
QWEN2 = routed(
    *(64, 8, 2560, 18944),
    max_window_layers=28,
    mlp_only_layers=[],
    norm_topk_prob=False,
    shared_expert_intermediate_size=20480,
    sliding_window=131072,
)
QWEN3: dict[str, Any] = {
    "head_dim": 128,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rope_scaling": None,
    "sliding_window": None,
}
CODER: dict[str, Any] = {
    "max_window_layers": 62,
    "qkv_bias": False,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}
# Sizes: vocabulary, hidden, layers, heads, key-value heads, context, rotary base. Then parameters, embeddings included.
REAL: dict[str, tuple[dict[str, Any], int]] = {
    "Mixtral-8x7B": (
        published("mixtral", "32000 4096 32 32 8 32768 1000000", intermediate_size=14336, **MIXTRAL),
        46_702_792_704,
    ),
    "Mixtral-8x22B": (
        published("mixtral", "32000 6144 56 48 8 65536 1000000", intermediate_size=16384, **MIXTRAL),
        140_620_634_112,
    ),
    "OLMoE-1B-7B": (published("olmoe", "50304 2048 16 16 16 4096 10000", **OLMOE), 6_919_161_856),
    "Qwen1.5-MoE-A2.7B": (published("qwen2_moe", "151936 2048 24 16 16 8192 1000000", **QWEN15), 14_315_784_192),
    "Qwen2-57B-A14B": (published("qwen2_moe", "151936 3584 28 28 4 131072 1000000", **QWEN2), 57_408_658_944),
    "Qwen3-30B-A3B": (
        published(
            "qwen3_moe",
            "151936 2048 48 32 4 40960 1000000",
            **routed(128, 8, 768, 6144, attention_bias=False, max_window_layers=48),
            **QWEN3,
        ),
        30_532_122_624,
    ),
    "Qwen3-Coder-480B-A35B": (
        published("qwen3_moe", "151936 6144 62 96 8 262144 10000000", **routed(160, 8, 2560, 8192), **QWEN3, **CODER),
        480_154_875_392,
    ),
    "Granite-3.0-3B-A800M": (
        published("granitemoe", "49155 1536 32 24 8 4096 10000", num_local_experts=40, **GRANITE),
        3_298_793_472,
    ),
    "Granite-3.1-1B-A400M": (
        published("granitemoe", "49155 1024 24 16 8 131072 1500000", num_local_experts=32, **GRANITE),
        1_334_628_352,
    ),
}


def parameter_bytes(config: ModelConfig) -> int:
    shapes = [param.get_value() for param in parameters_of(abstract_model(config, "bfloat16")).values()]
    assert all(isinstance(shape, jax.ShapeDtypeStruct) for shape in shapes)
    return sum(shape.size * shape.dtype.itemsize for shape in shapes)


@pytest.mark.parametrize("name", REAL)
def test_real_models_have_their_published_number_of_parameters(name: str) -> None:
    fields, expected = REAL[name]
    config = find_family(fields).read_config(fields)
    if name in ("Mixtral-8x22B", "Qwen1.5-MoE-A2.7B", "Granite-3.0-3B-A800M"):
        assert parameter_bytes(config) == 2 * expected
        return
    # Layers that are all alike need not all be made.
    assert len(set(config.layers)) == 1
    one, two = (parameter_bytes(dataclasses.replace(config, layers=config.layers[:n])) for n in (1, 2))
    assert one + (len(config.layers) - 1) * (two - one) == 2 * expected
