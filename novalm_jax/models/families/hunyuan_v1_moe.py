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

LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# The published files describe more than the language model: towers for images, heads that classify, their tokens.
OTHER_MODELS = (
    *("anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "class_num", "dense_list"),
    *("im_end_id", "im_newline_id", "im_start_id", "image_token_id", "mask_init_id", "num_media_embeds"),
    *("org_vocab_size", "pad_id", "pool_type", "skip_cls_token", "text_end_id", "text_start_id", "video_end_id"),
    *("video_start_id", "vit_add_patchemb_bias", "vit_input_resolution", "vit_mapping_type", "vit_norm_type"),
    *("vit_patch", "vit_path", "vit_remove_prenorm", "vit_token", "vit_type", "vit_used_rms_norm", "xdrope_section"),
)

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
        "add_classification_head": Only((False,)),
        **dict.fromkeys(LATENT, Only((None,))),
        # The shapes of the stored tensors would tell if these were at odds with intermediate_size.
        "moe_intermediate_size": Ignore(),
        "num_shared_expert": Ignore(),
        "use_mixed_mlp_moe": Ignore(),
        "cla_share_factor": Ignore(),
        "moe_drop_tokens": Ignore(),
        "moe_random_routing_dropped_token": Ignore(),
        # Scales weights that are not normalised, and limits groups; there are none of either.
        "routed_scaling_factor": Ignore(),
        "n_group": Ignore(),
        "topk_group": Ignore(),
        **dict.fromkeys(OTHER_MODELS, Ignore()),
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
