"""gpt-oss (OpenAI): sinks, a window in every other layer, experts with biases and a clamped gate.

Weights are read in bfloat16 or float32; the published MXFP4 files are refused. Source: the gpt-oss-20b model card and
arXiv:2508.10925.
"""

from novalm_jax.models.families.common import DECODER_FIELDS, DECODER_TENSORS, IGNORED_TENSORS, router_tensors
from novalm_jax.models.families.family import Family, Ignore, Stored, Use
from novalm_jax.models.families.rope import RopeDialect

EXPERTS = "model.layers.{l}.mlp.experts."

FAMILY = Family(
    model_type="gpt_oss",
    fields=DECODER_FIELDS
    | {
        "rms_norm_eps": Use("norm_eps", default=1e-5),
        "num_key_value_heads": Use("num_kv_heads", default=8),
        "head_dim": Use("head_dim", default=64),
        "intermediate_size": Use("expert_width"),
        "num_local_experts": Use("num_experts"),
        "num_experts_per_tok": Use("experts_per_token"),
        "attention_bias": Use("attention_bias", default=True),
        "sliding_window": Use("window", default=128),
        "layer_types": Use("layer_types", default=None),
        "swiglu_limit": Use("clamp_limit", default=7.0),
        "swiglu_alpha": Use("clamp_alpha", default=1.702),
        # The experts have a gate of their own; the rest repeats other fields.
        "hidden_act": Ignore(),
        "experts_per_token": Ignore(),
        "initial_context_length": Ignore(),
    },
    renamed={"num_local_experts": "num_experts"},
    rope=RopeDialect(
        theta=150_000.0,
        settings={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    traits={
        "activation": "silu",
        "clamped": True,
        "window_rule": "even",
        "sinks": True,
        "choose_first": True,
        "router_bias": True,
        "expert_bias": True,
        "expert_joint": "alternate",
        "expert_inputs_first": True,
        "expert_down_inputs_first": True,
    },
    tensors=DECODER_TENSORS
    | router_tensors("mlp.router")
    | {
        "layers.{l}.attention.sinks": (Stored("model.layers.{l}.self_attn.sinks"),),
        "layers.{l}.feed_forward.experts.up": (Stored(EXPERTS + "gate_up_proj"),),
        "layers.{l}.feed_forward.experts.up_bias": (Stored(EXPERTS + "gate_up_proj_bias"),),
        "layers.{l}.feed_forward.experts.down": (Stored(EXPERTS + "down_proj"),),
        "layers.{l}.feed_forward.experts.down_bias": (Stored(EXPERTS + "down_proj_bias"),),
    },
    ignored_tensors=IGNORED_TENSORS,
)
