"""Hunyuan-A13B (Tencent): QK norm after the rotation, one shared expert as wide as a routed one.

Source: the Hunyuan-A13B-Instruct model card.
"""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    IGNORED_TENSORS,
    expert_tensors,
    mlp_tensors,
    router_tensors,
)
from novalm_jax.models.families.family import Family, Ignore, Only, Stored, Use
from novalm_jax.models.families.rope import RopeDialect

FAMILY = Family(
    model_type="hunyuan_v1_moe",
    fields=DECODER_FIELDS
    | {
        "rms_norm_eps": Use("norm_eps", default=1e-5),
        "head_dim": Use("head_dim", default=None),
        "intermediate_size": Use("expert_width"),
        "num_experts": Use("num_experts"),
        "moe_topk": Use("experts_per_token"),
        "attention_bias": Use("attention_bias", default=False),
        # What the published files also say of the network, which is always so.
        "use_qk_norm": Only((True,)),
        "norm_topk_prob": Only((True,)),
        "norm_type": Only(("rms",)),
        "mlp_bias": Only((False,)),
        "use_cla": Only((False,)),
        "use_mla": Only((False,)),
        "use_rotary_pos_emb": Only((True,)),
        "position_embedding_xdrope": Only((False,)),
        "group_limited_greedy": Only((False,)),
        "moe_layer_num_skipped": Only((0,)),
        # The shapes of the stored tensors would tell if these were at odds with intermediate_size.
        "moe_intermediate_size": Ignore(),
        "num_shared_expert": Ignore(),
        "use_mixed_mlp_moe": Ignore(),
        "cla_share_factor": Ignore(),
        "moe_drop_tokens": Ignore(),
        "moe_random_routing_dropped_token": Ignore(),
    },
    renamed={"head_dim": "attention_head_dim", "num_experts": "num_local_experts", "moe_topk": "num_experts_per_tok"},
    rope=RopeDialect(alpha=True),
    traits={"qk_norm": "head", "norm_after_rope": True, "renormalise": True, "num_shared": 1},
    tensors=DECODER_TENSORS
    | {
        "layers.{l}.attention.q_norm.scale": (Stored("model.layers.{l}.self_attn.query_layernorm.weight"),),
        "layers.{l}.attention.k_norm.scale": (Stored("model.layers.{l}.self_attn.key_layernorm.weight"),),
    }
    | router_tensors("mlp.gate.wg")
    | expert_tensors("mlp.experts")
    | mlp_tensors("feed_forward.shared", "mlp.shared_mlp"),
    ignored_tensors=IGNORED_TENSORS,
)
