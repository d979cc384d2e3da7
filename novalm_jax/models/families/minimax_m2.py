"""MiniMax-M2 and M2.5: QK norm across all heads, partial rotation, sigmoid routing with a bias for the choice alone.

Source: the MiniMax-M2 model card.
"""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    IGNORED_TENSORS,
    QK_NORM_TENSORS,
    expert_tensors,
    router_tensors,
)
from novalm_jax.models.families.family import Family, Ignore, Only, Use
from novalm_jax.models.families.rope import RopeDialect

FAMILY = Family(
    model_type="minimax_m2",
    fields=DECODER_FIELDS
    | {
        "num_key_value_heads": Use("num_kv_heads", default=8),
        "head_dim": Use("head_dim", default=128),
        "intermediate_size": Use("expert_width"),
        "num_local_experts": Use("num_experts"),
        "num_experts_per_tok": Use("experts_per_token"),
        "rotary_dim": Use("rotary_dim", default=None),
        # What the published files also say of the network, which is always so, and of training.
        "use_qk_norm": Only((True,)),
        "qk_norm_type": Only(("per_layer",)),
        "use_routing_bias": Only((True,)),
        "scoring_func": Only(("sigmoid",)),
        "shared_intermediate_size": Only((0, None)),
        "attn_type_list": Ignore(),
        "layernorm_full_attention_beta": Ignore(),
        "layernorm_linear_attention_beta": Ignore(),
        "layernorm_mlp_beta": Ignore(),
        "mlp_intermediate_size": Ignore(),
        "max_model_len": Ignore(),
        "mtp_transformer_layers": Ignore(),
        "num_mtp_modules": Ignore(),
        "use_mtp": Ignore(),
    },
    renamed={"num_local_experts": "num_experts"},
    rope=RopeDialect(theta=5e6, fraction=1.0),
    traits={"qk_norm": "all", "scores": "sigmoid", "renormalise": True, "choice_bias": True},
    tensors=DECODER_TENSORS
    | QK_NORM_TENSORS
    | router_tensors("block_sparse_moe.gate", choice_bias="block_sparse_moe.e_score_correction_bias")
    | expert_tensors("block_sparse_moe.experts", named=("w1", "w3", "w2")),
    ignored_tensors=IGNORED_TENSORS,
)
