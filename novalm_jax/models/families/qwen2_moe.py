"""Qwen1.5-MoE and Qwen2-MoE: routed experts beside a shared one behind a sigmoid gate, biases on q, k and v.

Sources: arXiv:2407.10671 and the Qwen1.5-MoE-A2.7B model card.
"""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    IGNORED_TENSORS,
    SPARSE_FIELDS,
    expert_tensors,
    mlp_tensors,
    router_tensors,
)
from novalm_jax.models.families.family import Family, Stored, Use

FAMILY = Family(
    model_type="qwen2_moe",
    fields=DECODER_FIELDS
    | SPARSE_FIELDS
    | {
        "num_key_value_heads": Use("num_kv_heads"),
        "qkv_bias": Use("qkv_bias", default=True),
        "shared_expert_intermediate_size": Use("shared_width"),
        "sliding_window": Use("window", default=4096),
        "use_sliding_window": Use("window_enabled", default=False),
        "max_window_layers": Use("window_boundary", default=28),
        "layer_types": Use("layer_types", default=None),
    },
    renamed={"num_experts": "num_local_experts"},
    traits={"shared_gate": True, "window_rule": "even_before"},
    tensors=DECODER_TENSORS
    | mlp_tensors("feed_forward", "mlp")
    | router_tensors("mlp.gate")
    | expert_tensors("mlp.experts")
    | mlp_tensors("feed_forward.shared", "mlp.shared_expert")
    | {"layers.{l}.feed_forward.shared_gate.weight": (Stored("model.layers.{l}.mlp.shared_expert_gate.weight"),)},
    ignored_tensors=IGNORED_TENSORS,
)
