"""Qwen3, dense: QK norm per head. Sources: arXiv:2505.09388 and the Qwen3-8B model card."""

from novalm_jax.models.families.common import (
    DECODER_FIELDS,
    DECODER_TENSORS,
    IGNORED_TENSORS,
    QK_NORM_TENSORS,
    mlp_tensors,
)
from novalm_jax.models.families.family import Family, Use

FAMILY = Family(
    model_type="qwen3",
    fields=DECODER_FIELDS
    | {
        "num_key_value_heads": Use("num_kv_heads"),
        "head_dim": Use("head_dim", default=128),
        "intermediate_size": Use("mlp_width"),
        "attention_bias": Use("attention_bias", default=False),
        "sliding_window": Use("window", default=4096),
        "use_sliding_window": Use("window_enabled", default=False),
        "max_window_layers": Use("window_boundary", default=28),
        "layer_types": Use("layer_types", default=None),
    },
    traits={"qk_norm": "head", "window_rule": "from"},
    tensors=DECODER_TENSORS | QK_NORM_TENSORS | mlp_tensors("feed_forward", "mlp"),
    ignored_tensors=IGNORED_TENSORS,
)
