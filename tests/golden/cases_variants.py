"""Golden cases of families with a router, norms or frequencies of their own: Phi-3.5-MoE, DBRX, Hunyuan.

Knows configuration keys only. Refuses to know how weights are drawn, checked and written (make.py).
"""

from __future__ import annotations

from typing import Any

from case import ABSENT, HUB, SMALL, Case

PHIMOE: dict[str, Any] = {
    **SMALL,
    "attention_bias": True,
    "intermediate_size": 6,
    "lm_head_bias": True,
    "num_experts_per_tok": 2,
    "num_local_experts": 6,
}
PHIMOE_BITES = {
    "tensor:input_layernorm.bias": 0.0,
    "tensor:post_attention_layernorm.bias": 0.0,
    "tensor:model.norm.bias": 0.0,
}
LONGROPE = {
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "short_mscale": 1.1,
    "long_mscale": 1.4,
}
DBRX_HEAD = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 96}
DBRX_ATTENTION = {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0}
DBRX_EXPERTS = {"ffn_hidden_size": 6, "moe_num_experts": 5, "moe_top_k": 2}
HUNYUAN = {
    **SMALL,
    "head_dim": 12,
    "intermediate_size": 6,
    "moe_topk": 2,
    "num_experts": 5,
}
HUNYUAN_BITES = {
    "tensor:query_layernorm": 1.0,
    "tensor:key_layernorm": 1.0,
    "tensor:shared_mlp.down_proj.weight": 0.0,
}

VARIANT_CASES: dict[str, Case] = {
    "phimoe": Case(
        "phimoe",
        PHIMOE,
        {
            **PHIMOE_BITES,
            "attention_bias": False,
            "lm_head_bias": False,
            "rope_parameters.rope_theta": 100.0,
            "router_jitter_noise": 0.3,
            "tensor:o_proj.bias": 0.0,
        },
    ),
    # The threshold is wide enough that most softmaxes see more than the expert that is chosen.
    "phimoe-jitter": Case(
        "phimoe",
        {
            **PHIMOE,
            "attention_bias": False,
            "lm_head_bias": False,
            "rms_norm_eps": 0.05,
            "router_jitter_noise": 0.4,
            "sliding_window": 7,
            "tie_word_embeddings": True,
        },
        {**PHIMOE_BITES, "rms_norm_eps": 1e-5, "router_jitter_noise": 0.01, "sliding_window": None},
    ),
    # Longer than the original length: cosine and sine take long_mscale; the frequencies of the reference stay short.
    "phimoe-longrope": Case(
        "phimoe",
        {
            **PHIMOE,
            "rope_parameters": {
                **LONGROPE,
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "original_max_position_embeddings": 16,
            },
        },
        {
            "rope_parameters.long_mscale": 1.0,
            "rope_parameters.short_factor": [1.0] * 4,
            "rope_parameters.original_max_position_embeddings": 64,
            "rope_parameters.rope_theta": 1e4,
        },
        greedy=False,
    ),
    "phimoe-hub": Case(
        "phimoe",
        {
            **HUB,
            "architectures": ["PhiMoEForCausalLM"],
            "model_type": "phimoe",
            "attention_bias": True,
            "hidden_dropout": 0.0,
            "input_jitter_noise": 0.01,
            "intermediate_size": 6,
            "lm_head_bias": True,
            "num_experts_per_tok": 2,
            "num_local_experts": 6,
            "original_max_position_embeddings": 64,
            "output_router_logits": False,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {**LONGROPE, "type": "longrope", "original_max_position_embeddings": 64},
            "rope_theta": 1000.0,
            "router_aux_loss_coef": 0.0,
            "router_jitter_noise": 0.2,
            "sliding_window": 128,
        },
        {
            "attention_bias": ABSENT,
            "lm_head_bias": ABSENT,
            "rope_scaling": None,
            "rope_scaling.short_mscale": 1.0,
            "rope_scaling.original_max_position_embeddings": 16,
            "rope_theta": ABSENT,
            "router_jitter_noise": ABSENT,
            "sliding_window": 7,
        },
        hub_config=True,
    ),
    "dbrx": Case(
        "dbrx",
        {**DBRX_HEAD, "attn_config": DBRX_ATTENTION, "ffn_config": DBRX_EXPERTS},
        {
            "attn_config.clip_qkv": 1.0,
            "attn_config.kv_n_heads": 1,
            "ffn_config.moe_normalize_expert_weights": None,
            "ffn_config.moe_top_k": 1,
            "rope_parameters.rope_theta": 100.0,
        },
    ),
    "dbrx-clip": Case(
        "dbrx",
        {
            **DBRX_HEAD,
            "attn_config": {**DBRX_ATTENTION, "clip_qkv": 0.6},
            "ffn_config": {**DBRX_EXPERTS, "moe_normalize_expert_weights": 2.0},
        },
        {"attn_config.clip_qkv": 8.0, "ffn_config.moe_normalize_expert_weights": 1.0},
    ),
    # The reference rotates by 10000 whatever attn_config.rope_theta says; DBRX means what it says.
    "dbrx-hub": Case(
        "dbrx",
        {
            **DBRX_HEAD,
            "architectures": ["DbrxForCausalLM"],
            "attn_config": {"clip_qkv": 2, "kv_n_heads": 2, "model_type": "", "rope_theta": 500},
            "emb_pdrop": 0.0,
            "ffn_config": {
                **DBRX_EXPERTS,
                "model_type": "",
                "moe_jitter_eps": 0,
                "moe_loss_weight": 0.05,
                "moe_normalize_expert_weights": None,
            },
            "initializer_range": 0.02,
            "model_type": "dbrx",
            "output_router_logits": False,
            "resid_pdrop": 0.0,
            "router_aux_loss_coef": 0.05,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "transformers_version": "4.38.2",
            "use_cache": True,
        },
        {
            "attn_config.clip_qkv": 8,
            "attn_config.rope_theta": 10000,
            "ffn_config.moe_normalize_expert_weights": 1.0,
        },
        hub_config=True,
        meant={"rope_theta": "attn_config.rope_theta"},
    ),
    "hunyuan_v1_moe": Case(
        "hunyuan_v1_moe",
        HUNYUAN,
        {**HUNYUAN_BITES, "moe_topk": 1, "rope_parameters.rope_theta": 100.0},
    ),
    # With alpha the "dynamic" frequencies are fixed ones; a number of experts for each layer.
    "hunyuan_v1_moe-hub": Case(
        "hunyuan_v1_moe",
        {
            **HUB,
            "architectures": ["HunYuanMoEV1ForCausalLM"],
            "model_type": "hunyuan_v1_moe",
            "attention_bias": True,
            "eod_token_id": 3,
            "head_dim": 12,
            "intermediate_size": 6,
            "max_position_embeddings": 16,
            "moe_topk": [1, 3],
            "num_experts": 5,
            "pretraining_tp": 1,
            "rms_norm_eps": 0.05,
            "rope_scaling": {
                "alpha": 50.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "type": "dynamic",
            },
            "rope_theta": 1000.0,
            "sep_token_id": 4,
            "tie_word_embeddings": True,
        },
        {
            **HUNYUAN_BITES,
            "attention_bias": False,
            "moe_topk": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling.alpha": 5.0,
            "rope_theta": ABSENT,
            "tensor:o_proj.bias": 0.0,
        },
        hub_config=True,
    ),
    "hunyuan_v1_moe-dynamic": Case(
        "hunyuan_v1_moe",
        {
            **HUNYUAN,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0},
        },
        {"rope_parameters.factor": 1.0, "max_position_embeddings": 64},
        greedy=False,
    ),
}
