"""Mixtral: eight experts, two a token, weights that sum to one. Sources: arXiv:2401.04088 and the Mixtral-8x7B card."""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    IGNORED_TENSORS,
    expert_tensors,
    router_tensors,
)
from novalm_jax.models.families.family import Family, Use
from novalm_jax.models.families.rope import RopeDialect

FAMILY = Family(
    model_type="mixtral",
    fields=DECODER_FIELDS
    | {
        "num_key_value_heads": Use("num_kv_heads", default=8),
        "rms_norm_eps": Use("norm_eps", default=1e-5),
        "intermediate_size": Use("expert_width"),
        "num_local_experts": Use("num_experts", default=8),
        "num_experts_per_tok": Use("experts_per_token", default=2),
        "sliding_window": Use("window", default=None),
    },
    renamed={"num_local_experts": "num_experts"},
    traits={"renormalise": True},
    rope=RopeDialect(theta=1e6),
    tensors=DECODER_TENSORS
    | router_tensors("block_sparse_moe.gate", "mlp.gate")
    | expert_tensors("block_sparse_moe.experts", "mlp.experts", named=("w1", "w3", "w2")),
    ignored_tensors=IGNORED_TENSORS,
)
