"""Qwen2, dense: biases on q, k and v. Sources: arXiv:2407.10671 and the Qwen2.5-7B model card."""

from novalm_jax.models.families.common import DECODER_FIELDS, DECODER_TENSORS, IGNORED_TENSORS, mlp_tensors
from novalm_jax.models.families.family import Family, Only, Use

FAMILY = Family(
    model_type="qwen2",
    fields=DECODER_FIELDS
    | {
        "num_key_value_heads": Use("num_kv_heads"),
        "intermediate_size": Use("mlp_width"),
        "sliding_window": Use("window", default=4096),
        "use_sliding_window": Use("window_enabled", default=False),
        "max_window_layers": Use("window_boundary", default=28),
        "layer_types": Use("layer_types", default=None),
        "use_mrope": Only((False,)),
    },
    traits={"qkv_bias": True, "window_rule": "from"},
    tensors=DECODER_TENSORS | mlp_tensors("feed_forward", "mlp"),
    ignored_tensors=IGNORED_TENSORS,
)
