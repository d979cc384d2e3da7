"""DeepSeek-V3 and R1: latent attention, sigmoid routing with a bias for the choice alone.

Sources: arXiv:2412.19437 and the DeepSeek-V3 model card.
"""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    DEEPSEEK_SPARSE_FIELDS,
    IGNORED_TENSORS,
    LATENT_FIELDS,
    LATENT_TENSORS,
    SHARED_EXPERT_TENSORS,
    router_tensors,
)
from novalm_jax.models.families.family import Family, Ignore, Only, Use

FAMILY = Family(
    model_type="deepseek_v3",
    fields=DECODER_FIELDS
    | LATENT_FIELDS
    | DEEPSEEK_SPARSE_FIELDS
    | {
        "n_group": Use("groups", default=8),
        "topk_group": Use("kept_groups", default=4),
        "first_k_dense_replace": Use("first_sparse", default=3),
        "norm_topk_prob": Use("renormalise", default=True),
        "routed_scaling_factor": Use("router_scale", default=2.5),
        "rope_interleave": Use("rope_pairs", default=True),
        "topk_method": Only(("noaux_tc",)),
        "scoring_func": Only(("sigmoid",)),
        "num_nextn_predict_layers": Ignore(),
    },
    renamed={"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    traits={"scores": "sigmoid", "choice_bias": True, "group_rule": "sum_of_two", "rope_scales_softmax": True},
    tensors=DECODER_TENSORS
    | LATENT_TENSORS
    | router_tensors("mlp.gate", choice_bias="mlp.gate.e_score_correction_bias")
    | SHARED_EXPERT_TENSORS,
    ignored_tensors=IGNORED_TENSORS,
    extra_layers="num_nextn_predict_layers",
)
