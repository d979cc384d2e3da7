"""Phi-3.5-MoE (Microsoft): sparsemixer routing, layer norm, biases everywhere outside the experts.

Sources: arXiv:2404.14219, arXiv:2409.12136 and the Phi-3.5-MoE-instruct model card.
"""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    HEAD_BIAS_TENSORS,
    IGNORED_TENSORS,
    NORM_BIAS_TENSORS,
    expert_tensors,
    router_tensors,
)
from novalm_jax.models.families.family import Family, Ignore, Only, Use
from novalm_jax.models.families.rope import RopeDialect

FAMILY = Family(
    model_type="phimoe",
    fields=DECODER_FIELDS
    | {
        "num_key_value_heads": Use("num_kv_heads", default=8),
        "rms_norm_eps": Use("norm_eps", default=1e-5),
        "intermediate_size": Use("expert_width"),
        "num_local_experts": Use("num_experts", default=16),
        # Sparsemixer chooses two, whatever is written.
        "num_experts_per_tok": Only((2,)),
        "attention_bias": Use("attention_bias", default=False),
        "lm_head_bias": Use("head_bias", default=False),
        "sliding_window": Use("window", default=None),
        "router_jitter_noise": Use("jitter", default=0.01),
        "input_jitter_noise": Ignore(),
        "hidden_dropout": Only((0.0,)),
    },
    renamed={"num_local_experts": "num_experts"},
    rope=RopeDialect(theta=1e6, two_mscales=True),
    traits={"norm_kind": "layer", "norm_bias": True, "scores": "sparsemixer", "experts_per_token": 2},
    tensors=DECODER_TENSORS
    | NORM_BIAS_TENSORS
    | HEAD_BIAS_TENSORS
    | router_tensors("block_sparse_moe.gate", "mlp.router")
    | expert_tensors("block_sparse_moe.experts", "mlp.experts", named=("w1", "w3", "w2")),
    ignored_tensors=IGNORED_TENSORS,
)
