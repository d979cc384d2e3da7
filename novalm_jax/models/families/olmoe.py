"""OLMoE (Ai2): 64 experts, QK norm across all heads, optional clipping of q, k and v. Source: arXiv:2409.02060."""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    IGNORED_TENSORS,
    QK_NORM_TENSORS,
    expert_tensors,
    router_tensors,
)
from novalm_jax.models.families.family import Family, Use

FAMILY = Family(
    model_type="olmoe",
    fields=DECODER_FIELDS
    | {
        "rms_norm_eps": Use("norm_eps", default=1e-5),
        "intermediate_size": Use("expert_width"),
        "num_experts": Use("num_experts"),
        "num_experts_per_tok": Use("experts_per_token"),
        "norm_topk_prob": Use("renormalise", default=False),
        "attention_bias": Use("attention_bias", default=False),
        "clip_qkv": Use("clip_qkv", default=None),
    },
    renamed={"num_experts": "num_local_experts"},
    traits={"qk_norm": "all"},
    tensors=DECODER_TENSORS | QK_NORM_TENSORS | router_tensors("mlp.gate") | expert_tensors("mlp.experts"),
    ignored_tensors=IGNORED_TENSORS,
)
