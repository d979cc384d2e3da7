"""Llama 1 to 3 (Meta), dense. Sources: arXiv:2302.13971, arXiv:2407.21783 and the Llama 3.1 model card."""

from novalm_jax.models.families.common import DECODER_FIELDS, DECODER_TENSORS, IGNORED_TENSORS, mlp_tensors
from novalm_jax.models.families.family import Family, Use

FAMILY = Family(
    model_type="llama",
    fields=DECODER_FIELDS
    | {
        "intermediate_size": Use("mlp_width"),
        "attention_bias": Use("attention_bias", default=False),
        "mlp_bias": Use("mlp_bias", default=False),
    },
    tensors=DECODER_TENSORS | mlp_tensors("feed_forward", "mlp"),
    ignored_tensors=IGNORED_TENSORS,
)
