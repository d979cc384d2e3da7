"""DeepSeek-V2: latent attention, shared experts, routing within the best groups.

Sources: arXiv:2405.04434 and the DeepSeek-V2-Lite model card.
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
from novalm_jax.models.families.family import Family, Only, Use

FAMILY = Family(
    model_type="deepseek_v2",
    fields=DECODER_FIELDS
    | LATENT_FIELDS
    | DEEPSEEK_SPARSE_FIELDS
    | {
        "mlp_bias": Use("mlp_bias", default=False),
        "routed_scaling_factor": Use("router_scale", default=1.0),
        "topk_method": Use("group_rule", default="greedy", meanings={"greedy": None, "group_limited_greedy": "max"}),
        "scoring_func": Only(("softmax",)),
        # The reference implementation does not renormalise whatever is written, the authors' own does.
        "norm_topk_prob": Only((False,)),
    },
    renamed={"n_routed_experts": "num_experts"},
    traits={"rope_pairs": True, "rope_scales_softmax": True},
    tensors=DECODER_TENSORS | LATENT_TENSORS | router_tensors("mlp.gate") | SHARED_EXPERT_TENSORS,
    ignored_tensors=IGNORED_TENSORS,
)
