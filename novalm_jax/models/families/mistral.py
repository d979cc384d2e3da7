"""Mistral (dense, sliding window in every layer). Sources: arXiv:2310.06825 and the Mistral-7B-v0.1 model card."""

from novalm_jax.models.families.common import DECODER_FIELDS, DECODER_TENSORS, IGNORED_TENSORS, mlp_tensors
from novalm_jax.models.families.family import Family, Use

FAMILY = Family(
    model_type="mistral",
    fields=DECODER_FIELDS
    | {
        "num_key_value_heads": Use("num_kv_heads", default=8),
        "intermediate_size": Use("mlp_width"),
        "sliding_window": Use("window", default=4096),
    },
    tensors=DECODER_TENSORS | mlp_tensors("feed_forward", "mlp"),
    ignored_tensors=IGNORED_TENSORS,
)
