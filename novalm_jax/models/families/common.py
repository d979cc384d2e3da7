"""Pieces that many family tables share: the usual fields, and the hub's usual tensor names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from novalm_jax.models.families.family import Meaning, Packed, PerExpert, Source, Stored, Use

# --- fields of config.json -------------------------------------------------------------------------------------------

DECODER_FIELDS: Final[dict[str, Meaning]] = {
    "vocab_size": Use("vocab_size"),
    "hidden_size": Use("hidden_size"),
    "num_hidden_layers": Use("num_layers"),
    "num_attention_heads": Use("num_heads"),
    "num_key_value_heads": Use("num_kv_heads", default=None),
    "head_dim": Use("head_dim", default=None),
    "hidden_act": Use("activation", default="silu"),
    "max_position_embeddings": Use("context_length"),
    "rms_norm_eps": Use("norm_eps", default=1e-6),
    "tie_word_embeddings": Use("tie_embeddings", default=False),
}

SPARSE_FIELDS: Final[dict[str, Meaning]] = {
    "moe_intermediate_size": Use("expert_width"),
    "num_experts": Use("num_experts"),
    "num_experts_per_tok": Use("experts_per_token"),
    "norm_topk_prob": Use("renormalise", default=False),
    "intermediate_size": Use("mlp_width", default=None),
    "decoder_sparse_step": Use("sparse_step", default=1),
    "mlp_only_layers": Use("dense_layers", default=None),
}
"""Qwen's way of saying which layers hold experts; `intermediate_size` is the width of the dense ones."""

# --- stored tensors --------------------------------------------------------------------------------------------------

_LAYER: Final = "model.layers.{l}."

DECODER_TENSORS: Final[dict[str, Sequence[Source]]] = {
    "embed.weight": (Stored("model.embed_tokens.weight"),),
    "norm.scale": (Stored("model.norm.weight"),),
    "head.weight": (Stored("lm_head.weight"),),
    "layers.{l}.attention_norm.scale": (Stored(_LAYER + "input_layernorm.weight"),),
    "layers.{l}.feed_forward_norm.scale": (Stored(_LAYER + "post_attention_layernorm.weight"),),
    **{
        f"layers.{{l}}.attention.{ours}.{part}": (Stored(f"{_LAYER}self_attn.{theirs}.{part}"),)
        for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "o_proj"))
        for part in ("weight", "bias")
    },
}

QK_NORM_TENSORS: Final[dict[str, Sequence[Source]]] = {
    f"layers.{{l}}.attention.{name}.scale": (Stored(f"{_LAYER}self_attn.{name}.weight"),)
    for name in ("q_norm", "k_norm")
}

IGNORED_TENSORS: Final = (
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    r"(model\.)?mtp\..*",
)
"""Frequencies that old writers stored, which follow from the configuration; layers for multi-token prediction."""


def mlp_tensors(ours: str, theirs: str) -> dict[str, Sequence[Source]]:
    """Tensors of a gated MLP at `layers.{l}.<ours>`, stored under `<theirs>` of the layer."""
    return {
        f"layers.{{l}}.{ours}.{name}.{part}": (Stored(f"{_LAYER}{theirs}.{name}_proj.{part}"),)
        for name in ("gate", "up", "down")
        for part in ("weight", "bias")
    }


def router_tensors(*theirs: str) -> dict[str, Sequence[Source]]:
    """The router's weight, stored under the first of these names that the checkpoint has."""
    return {"layers.{l}.feed_forward.router.weight": tuple(Stored(f"{_LAYER}{name}.weight") for name in theirs)}


def expert_tensors(
    *prefixes: str,
    named: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    packed: tuple[str, str] | None = None,
) -> dict[str, Sequence[Source]]:
    """The experts, in every layout that writers of these checkpoints use.

    Each stored under one of `prefixes`: one tensor an expert, called `named` (gate, up, down) or either of the two
    usual namings, or gate and up packed into one tensor. `packed` names a family's own two packed tensors.
    """
    namings = dict.fromkeys((tuple(named), ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")))
    pairs = [(f"{prefix}.gate_up_proj", f"{prefix}.down_proj") for prefix in prefixes]

    def layouts(part: int) -> tuple[Source, ...]:
        split = [PerExpert(f"{_LAYER}{p}.{{e}}.{names[part]}.weight") for p in prefixes for names in namings]
        joint = [Packed(_LAYER + down) if part == 2 else Packed(_LAYER + gate_up, part, 2) for gate_up, down in pairs]
        return (*split, *joint)

    if packed:
        pairs.insert(0, packed)
    parts = enumerate(("gate", "up", "down"))
    return {f"layers.{{l}}.feed_forward.experts.{name}": layouts(part) for part, name in parts}
