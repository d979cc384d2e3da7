"""ERNIE 4.5 MoE (Baidu): softmax routing with a bias for the choice alone, pairs in the rotation.

Source: the ERNIE-4.5-21B-A3B model card and its technical report.
"""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    HEAD_BIAS_TENSORS,
    IGNORED_TENSORS,
    SHARED_EXPERT_TENSORS,
    router_tensors,
)
from novalm_jax.models.families.family import Family, Flat, Ignore, Only, Use
from novalm_jax.models.families.rope import RopeDialect

FAMILY = Family(
    model_type="ernie4_5_moe",
    fields=DECODER_FIELDS
    | {
        "rms_norm_eps": Use("norm_eps", default=1e-5),
        "num_key_value_heads": Use("num_kv_heads", default=4),
        "tie_word_embeddings": Use("tie_embeddings", default=True),
        "use_bias": Use("all_biases", default=False),
        "intermediate_size": Use("mlp_width", default=None),
        "moe_intermediate_size": Use("expert_width"),
        "moe_num_experts": Use("num_experts"),
        "moe_k": Use("experts_per_token"),
        "moe_num_shared_experts": Use("num_shared", default=2),
        "moe_layer_start_index": Use("first_sparse", default=1),
        "moe_layer_end_index": Use("last_sparse", default=-1),
        "moe_layer_interval": Use("sparse_step", default=1),
        "moe_norm_min": Use("norm_floor", default=1e-12),
        "moe_capacity": Ignore(),
        "num_nextn_predict_layers": Ignore(),
        # What the published files also say of the network, which is always so.
        "moe_gate": Only(("topk",)),
        "moe_use_aux_free": Only((True,)),
        "use_rmsnorm": Only((True,)),
    },
    renamed={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    rope=RopeDialect(theta=500_000.0),
    traits={"rope_pairs": True, "renormalise": True, "choice_bias": True},
    tensors=DECODER_TENSORS
    | HEAD_BIAS_TENSORS
    | router_tensors("mlp.gate")
    | {"layers.{l}.feed_forward.choice_bias": (Flat("model.layers.{l}.mlp.moe_statics.e_score_correction_bias"),)}
    | SHARED_EXPERT_TENSORS,
    ignored_tensors=(*IGNORED_TENSORS, r"model\.mtp_.*"),
)
