"""Qwen3-MoE: many small experts, QK norm per head. Sources: arXiv:2505.09388 and the Qwen3-30B-A3B model card."""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    IGNORED_TENSORS,
    QK_NORM_TENSORS,
    SPARSE_FIELDS,
    expert_tensors,
    mlp_tensors,
    router_tensors,
)
from novalm_jax.models.families.family import Family, Ignore, Only, Use

FAMILY = Family(
    model_type="qwen3_moe",
    fields=DECODER_FIELDS
    | SPARSE_FIELDS
    | {
        "num_key_value_heads": Use("num_kv_heads"),
        "attention_bias": Use("attention_bias", default=False),
        "sliding_window": Use("window", default=4096),
        "use_sliding_window": Use("window_enabled", default=False),
        # Windows, where they are on, cover every layer of this family.
        "max_window_layers": Ignore(),
        # Qwen3-Coder's files also say what is fixed here.
        "qkv_bias": Only((False,)),
        "use_qk_norm": Only((True,)),
        "shared_expert_intermediate_size": Only((0, None)),
    },
    renamed={"num_experts": "num_local_experts"},
    traits={"qk_norm": "head"},
    tensors=DECODER_TENSORS
    | QK_NORM_TENSORS
    | mlp_tensors("feed_forward", "mlp")
    | router_tensors("mlp.gate")
    | expert_tensors("mlp.experts"),
    ignored_tensors=IGNORED_TENSORS,
)
