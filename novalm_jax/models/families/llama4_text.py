"""Llama 4 (Meta), its text model: chunked attention, layers without positions, experts whose inputs are scaled.

Source: the Llama-4-Scout-17B-16E model card.
"""

from novalm_jax.models.families.common import DECODER_FIELDS, DECODER_TENSORS, IGNORED_TENSORS, mlp_tensors
from novalm_jax.models.families.family import Family, Ignore, Stored, Use
from novalm_jax.models.families.rope import RopeDialect

FEED_FORWARD = "model.layers.{l}.feed_forward."

FAMILY = Family(
    model_type="llama4_text",
    fields=DECODER_FIELDS
    | {
        "rms_norm_eps": Use("norm_eps", default=1e-5),
        "num_key_value_heads": Use("num_kv_heads", default=8),
        "head_dim": Use("head_dim", default=128),
        # One width for routed and shared experts.
        "intermediate_size": Use("expert_width"),
        "intermediate_size_mlp": Use("mlp_width", default=None),
        "num_local_experts": Use("num_experts"),
        "num_experts_per_tok": Use("experts_per_token", default=1),
        "interleave_moe_layer_step": Use("sparse_step", default=1),
        "moe_layers": Use("sparse_layers", default=None),
        "no_rope_layers": Use("rope_layers", default=None),
        "no_rope_layer_interval": Use("no_rope_interval", default=4),
        "use_qk_norm": Use("qk_norm", default=True, meanings={False: "none", True: "unit"}),
        "attn_temperature_tuning": Use("temperature", default=True, meanings={True: True, False: False, 4: True}),
        "floor_scale": Use("temperature_floor", default=8192),
        "attn_scale": Use("temperature_scale", default=0.1),
        "attention_bias": Use("attention_bias", default=False),
        "attention_chunk_size": Use("chunk", default=8192),
        "layer_types": Use("layer_types", default=None),
        "for_llm_compressor": Ignore(),
    },
    renamed={"num_local_experts": "num_experts"},
    rope=RopeDialect(theta=500_000.0),
    traits={
        "rope_pairs": True,
        "scores": "sigmoid",
        "choose_first": True,
        "scale_inputs": True,
        "num_shared": 1,
        "expert_joint": "halves",
        "expert_inputs_first": True,
        "expert_down_inputs_first": True,
    },
    tensors=DECODER_TENSORS
    | mlp_tensors("feed_forward", "feed_forward")
    | mlp_tensors("feed_forward.shared", "feed_forward.shared_expert")
    | {
        "layers.{l}.feed_forward.router.weight": (Stored(FEED_FORWARD + "router.weight"),),
        "layers.{l}.feed_forward.experts.up": (Stored(FEED_FORWARD + "experts.gate_up_proj"),),
        "layers.{l}.feed_forward.experts.down": (Stored(FEED_FORWARD + "experts.down_proj"),),
    },
    ignored_tensors=IGNORED_TENSORS,
)
