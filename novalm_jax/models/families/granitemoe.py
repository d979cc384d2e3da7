"""Granite 3.0 and 3.1 MoE (IBM): softmax over the chosen logits, and four multipliers. Source: the model cards."""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    IGNORED_TENSORS,
    expert_tensors,
    router_tensors,
)
from novalm_jax.models.families.family import Family, Use

FAMILY = Family(
    model_type="granitemoe",
    fields=DECODER_FIELDS
    | {
        "intermediate_size": Use("expert_width"),
        "num_local_experts": Use("num_experts"),
        "num_experts_per_tok": Use("experts_per_token"),
        "attention_bias": Use("attention_bias", default=False),
        "embedding_multiplier": Use("embedding_multiplier", default=1.0),
        "attention_multiplier": Use("attention_scale", default=1.0),
        "residual_multiplier": Use("residual_multiplier", default=1.0),
        "logits_scaling": Use("logits_divisor", default=1.0),
    },
    traits={"choose_first": True},
    tensors=DECODER_TENSORS
    | router_tensors("block_sparse_moe.router.layer", "block_sparse_moe.router")
    | expert_tensors(
        "block_sparse_moe.experts",
        packed=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    ignored_tensors=IGNORED_TENSORS,
)
