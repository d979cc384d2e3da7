"""The table of golden cases: what each folder's config.json holds and which of its fields must matter.

Knows configuration keys only. Refuses to know how weights are drawn, checked and written (make.py).
"""

from __future__ import annotations

from case import ABSENT, HUB, SMALL, Case
from cases_deepseek import DEEPSEEK_CASES
from cases_layers import LAYER_CASES
from cases_variants import VARIANT_CASES

DENSE = {**SMALL, "intermediate_size": 24}
ROPE = {**DENSE, "tie_word_embeddings": True}
# Expert width 20: the packed gate and up, [e, 40, 32], must not be square, or a transposed reading would fit.
MIXTRAL = {**SMALL, "intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {**SMALL, "intermediate_size": 24, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
QWEN2_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": 20}
OLMOE = {**SMALL, "intermediate_size": 16, "num_experts": 5, "num_experts_per_tok": 3}
GRANITE = {
    **MIXTRAL,
    "num_local_experts": 5,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.6,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
# An explicit attention_factor must win over mscale, so mscale has a case of its own.
LONG_YARN_ROPE = {
    **YARN_ROPE,
    "rope_theta": 100.0,
    "attention_factor": 0.8,
    "beta_fast": 4.0,
    "beta_slow": 0.25,
    "mscale": 2.0,
    "mscale_all_dim": 0.5,
    "truncate": False,
}
MSCALE_ROPE = {**YARN_ROPE, "mscale": 2.0, "mscale_all_dim": 0.5}
GRANITE_BITES = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 8**-0.5,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_experts_per_tok": 1,
}
MIXTRAL_BITES = {"num_experts_per_tok": 1, "rope_parameters.rope_theta": 1e4}
QWEN3_MOE_FIELDS = {**QWEN_MOE, "moe_intermediate_size": 20, "norm_topk_prob": True}
QWEN3_MOE_BITES = {"norm_topk_prob": False, "num_experts_per_tok": 1, "tensor:q_norm": 1.0, "tensor:k_norm": 1.0}

CASES: dict[str, Case] = {
    "llama": Case(
        "llama",
        {**DENSE, "max_position_embeddings": 512, "rope_parameters": LLAMA3_ROPE},
        {f"rope_parameters.{key}": 2 * LLAMA3_ROPE[key] for key in list(LLAMA3_ROPE)[1:]},  # type: ignore[operator]
    ),
    "llama-linear": Case(
        "llama",
        {**ROPE, "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
        {"rope_parameters.factor": 1.0, "rope_parameters.rope_theta": 1e4},
    ),
    "llama-dynamic": Case(
        "llama",
        {
            **ROPE,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0},
        },
        {"rope_parameters.factor": 1.0, "max_position_embeddings": 64},
        greedy=False,
    ),
    "llama-yarn": Case(
        "llama",
        {**ROPE, "rope_parameters": YARN_ROPE},
        {
            "rope_parameters.factor": 2.0,
            "rope_parameters.attention_factor": 1.0,
            "rope_parameters.beta_slow": 0.25,
            "rope_parameters.original_max_position_embeddings": 128,
        },
    ),
    "llama-longyarn": Case(
        "llama",
        {**ROPE, "rope_parameters": LONG_YARN_ROPE},
        {
            "rope_parameters.attention_factor": None,
            "rope_parameters.beta_fast": 32.0,
            "rope_parameters.beta_slow": 1.0,
            "rope_parameters.truncate": True,
        },
    ),
    "llama-mscale": Case(
        "llama",
        {**ROPE, "rope_parameters": MSCALE_ROPE},
        {"rope_parameters.mscale": 1.0, "rope_parameters.mscale_all_dim": None},
    ),
    "llama-hub": Case(
        "llama",
        {
            **HUB,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "intermediate_size": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "pretraining_tp": 1,
            "rms_norm_eps": 0.02,
            "rope_scaling": {"type": "linear", "factor": 4.0},
            "rope_theta": 500.0,
            "tie_word_embeddings": True,
        },
        {
            "rope_scaling": None,
            "rope_theta": ABSENT,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "mlp_bias": False,
            "tensor:o_proj.bias": 0.0,
            "tensor:down_proj.bias": 0.0,
        },
        hub_config=True,
    ),
    "mistral": Case(
        "mistral",
        {**DENSE, "sliding_window": 7, "tie_word_embeddings": True},
        {"sliding_window": None, "rope_parameters.rope_theta": 1000.0},
    ),
    "qwen3": Case(
        "qwen3",
        {**DENSE, "head_dim": 12, "tie_word_embeddings": True},
        {"rope_parameters.rope_theta": 1000.0, "tensor:q_norm": 1.0, "tensor:k_norm": 1.0},
    ),
    "qwen3-window": Case(
        "qwen3",
        {
            **HUB,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": True,
            "head_dim": 8,
            "intermediate_size": 24,
            "max_window_layers": 1,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 5000.0,
            "sliding_window": 7,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
        },
        {
            "use_sliding_window": False,
            "max_window_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_theta": 500.0,
            "tensor:o_proj.bias": 0.0,
        },
        hub_config=True,
    ),
    "mixtral": Case("mixtral", MIXTRAL, MIXTRAL_BITES),
    "mixtral-packed": Case("mixtral", MIXTRAL, MIXTRAL_BITES, layout="packed", like="mixtral"),
    "mixtral-bf16": Case("mixtral", MIXTRAL, MIXTRAL_BITES, dtype="bfloat16"),
    "mixtral-window": Case(
        "mixtral",
        {
            **HUB,
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": 16,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 4,
            "output_router_logits": False,
            "rms_norm_eps": 0.02,
            "rope_theta": 500.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": 7,
        },
        {"sliding_window": None, "rope_theta": ABSENT, "rms_norm_eps": ABSENT, "num_experts_per_tok": 1},
        hub_config=True,
    ),
    "qwen2_moe": Case(
        "qwen2_moe",
        QWEN2_MOE,
        {"norm_topk_prob": True, "num_experts_per_tok": 1, "qkv_bias": False, "tensor:shared_expert_gate": 0.0},
    ),
    "qwen2_moe-sparse": Case(
        "qwen2_moe",
        {**QWEN2_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
        {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    ),
    "qwen2_moe-window": Case(
        "qwen2_moe",
        {
            **HUB,
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "decoder_sparse_step": 1,
            "intermediate_size": 24,
            "max_window_layers": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "output_router_logits": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000.0,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 20,
            "sliding_window": 7,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
        },
        {
            "use_sliding_window": False,
            "max_window_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "norm_topk_prob": False,
            "rope_theta": 500.0,
            "qkv_bias": False,
        },
        hub_config=True,
    ),
    "qwen3_moe": Case("qwen3_moe", QWEN3_MOE_FIELDS, QWEN3_MOE_BITES),
    "qwen3_moe-packed": Case("qwen3_moe", QWEN3_MOE_FIELDS, QWEN3_MOE_BITES, layout="packed", like="qwen3_moe"),
    "qwen3_moe-w123": Case("qwen3_moe", QWEN3_MOE_FIELDS, QWEN3_MOE_BITES, layout="w123", like="qwen3_moe"),
    "qwen3_moe-sparse": Case(
        "qwen3_moe",
        {
            **QWEN_MOE,
            "num_hidden_layers": 3,
            "head_dim": 12,
            "mlp_only_layers": [0, 2],
            "attention_bias": True,
        },
        {"mlp_only_layers": [], "norm_topk_prob": True, "attention_bias": False, "tensor:o_proj.bias": 0.0},
    ),
    "qwen3_moe-window": Case(
        "qwen3_moe",
        {**QWEN_MOE, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 7},
        {"use_sliding_window": False, "sliding_window": None},
    ),
    "olmoe": Case(
        "olmoe",
        {**OLMOE, "num_key_value_heads": 4},
        {"norm_topk_prob": True, "num_experts_per_tok": 2, "tensor:q_norm": 1.0, "tensor:k_norm": 1.0},
    ),
    "olmoe-clip": Case(
        "olmoe",
        {**OLMOE, "clip_qkv": 0.7, "norm_topk_prob": True},
        {"clip_qkv": None, "norm_topk_prob": False},
    ),
    "granitemoe": Case("granitemoe", {**GRANITE, "tie_word_embeddings": True}, GRANITE_BITES),
    "granitemoe-bias": Case(
        "granitemoe",
        {**GRANITE, "attention_bias": True},
        {**GRANITE_BITES, "attention_bias": False, "tensor:o_proj.bias": 0.0},
    ),
    **DEEPSEEK_CASES,
    **LAYER_CASES,
    **VARIANT_CASES,
}
