"""Llama 4 (Meta) as it is published, with images: its text model alone.

Source: the Llama-4-Scout-17B-16E model card.
"""

from dataclasses import replace

from novalm_jax.models.families import llama4_text
from novalm_jax.models.families.common import prefixed

FAMILY = replace(
    llama4_text.FAMILY,
    model_type="llama4",
    text_section="text_config",
    outer_fields=(
        *("vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "image_token_id"),
        *("tie_word_embeddings", "vision_feature_layer", "vision_feature_select_strategy"),
    ),
    tensors=prefixed("language_model.", llama4_text.FAMILY.tensors),
    ignored_tensors=(r"vision_model\..*", r"multi_modal_projector\..*"),
)
