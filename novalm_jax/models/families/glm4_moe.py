"""GLM-4.5 and 4.6 (Z.ai): partial rotation, optional QK norm, the routing of DeepSeek-V3.

Sources: arXiv:2508.06471 and the GLM-4.5 model card.
"""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    DEEPSEEK_SPARSE_FIELDS,
    IGNORED_TENSORS,
    QK_NORM_TENSORS,
    SHARED_EXPERT_TENSORS,
    router_tensors,
)
from novalm_jax.models.families.family import Family, Ignore, Use
from novalm_jax.models.families.rope import RopeDialect

FAMILY = Family(
    model_type="glm4_moe",
    fields=DECODER_FIELDS
    | DEEPSEEK_SPARSE_FIELDS
    | {
        "num_key_value_heads": Use("num_kv_heads", default=8),
        "rms_norm_eps": Use("norm_eps", default=1e-5),
        "attention_bias": Use("qkv_bias", default=False),
        "use_qk_norm": Use("qk_norm", default=False, meanings={False: "none", True: "head"}),
        "n_group": Use("groups", default=1),
        "topk_group": Use("kept_groups", default=1),
        "first_k_dense_replace": Use("first_sparse", default=1),
        "norm_topk_prob": Use("renormalise", default=True),
        "routed_scaling_factor": Use("router_scale", default=1.0),
        "num_nextn_predict_layers": Ignore(),
    },
    renamed={"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    rope=RopeDialect(fraction=0.5),
    traits={"scores": "sigmoid", "choice_bias": True, "group_rule": "sum_of_two"},
    tensors=DECODER_TENSORS
    | QK_NORM_TENSORS
    | router_tensors("mlp.gate", choice_bias="mlp.gate.e_score_correction_bias")
    | SHARED_EXPERT_TENSORS,
    ignored_tensors=IGNORED_TENSORS,
    extra_layers="num_nextn_predict_layers",
)
