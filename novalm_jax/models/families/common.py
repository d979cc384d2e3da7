"""Pieces that many family tables share: the usual fields, and the hub's usual tensor names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from novalm_jax.models.families.family import Fused, Ignore, Meaning, Only, Packed, PerExpert, Source, Stored, Use

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

DEEPSEEK_SPARSE_FIELDS: Final[dict[str, Meaning]] = {
    "intermediate_size": Use("mlp_width"),
    "moe_intermediate_size": Use("expert_width"),
    "n_routed_experts": Use("num_experts"),
    "n_shared_experts": Use("num_shared"),
    "num_experts_per_tok": Use("experts_per_token"),
    "n_group": Use("groups", default=None),
    "topk_group": Use("kept_groups", default=None),
    "first_k_dense_replace": Use("first_sparse", default=0),
    # What the published files also say of their routers, and what training made of it.
    "moe_layer_freq": Only((1,)),
    "aux_loss_alpha": Ignore(),
    "ep_size": Ignore(),
    "seq_aux": Ignore(),
}
"""DeepSeek's way of saying which layers hold experts, also used by GLM."""

LATENT_FIELDS: Final[dict[str, Meaning]] = {
    "q_lora_rank": Use("query_rank"),
    "kv_lora_rank": Use("kv_rank"),
    "qk_nope_head_dim": Use("nope_dim"),
    "qk_rope_head_dim": Use("rope_dim"),
    "v_head_dim": Use("value_dim"),
    "attention_bias": Use("attention_bias", default=False),
    # Follow from the four above; writers add them.
    "head_dim": Ignore(),
    "qk_head_dim": Ignore(),
}
"""Latent attention (DeepSeek)."""

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

NORM_BIAS_TENSORS: Final[dict[str, Sequence[Source]]] = {
    "norm.bias": (Stored("model.norm.bias"),),
    "layers.{l}.attention_norm.bias": (Stored(_LAYER + "input_layernorm.bias"),),
    "layers.{l}.feed_forward_norm.bias": (Stored(_LAYER + "post_attention_layernorm.bias"),),
}

HEAD_BIAS_TENSORS: Final[dict[str, Sequence[Source]]] = {"head_bias": (Stored("lm_head.bias"),)}

LATENT_TENSORS: Final[dict[str, Sequence[Source]]] = {
    f"layers.{{l}}.attention.{ours}": (Stored(f"{_LAYER}self_attn.{theirs}"),)
    for ours, theirs in (
        ("q_down.weight", "q_a_proj.weight"),
        ("q_down.bias", "q_a_proj.bias"),
        ("q_norm.scale", "q_a_layernorm.weight"),
        ("q_up.weight", "q_b_proj.weight"),
        ("kv_down.weight", "kv_a_proj_with_mqa.weight"),
        ("kv_down.bias", "kv_a_proj_with_mqa.bias"),
        ("kv_norm.scale", "kv_a_layernorm.weight"),
        ("kv_up.weight", "kv_b_proj.weight"),
    )
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


def router_tensors(*theirs: str, choice_bias: str | None = None) -> dict[str, Sequence[Source]]:
    """The router's weight and bias, stored under the first of these names that the checkpoint has."""
    tensors: dict[str, Sequence[Source]] = {
        f"layers.{{l}}.feed_forward.router.{part}": tuple(Stored(f"{_LAYER}{name}.{part}") for name in theirs)
        for part in ("weight", "bias")
    }
    if choice_bias is not None:
        tensors["layers.{l}.feed_forward.choice_bias"] = (Stored(_LAYER + choice_bias),)
    return tensors


def expert_tensors(
    *prefixes: str,
    named: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    packed: tuple[str, str] | None = None,
) -> dict[str, Sequence[Source]]:
    """The experts, in every layout that writers of these checkpoints use.

    Each stored under one of `prefixes`: one tensor an expert, called `named` (gate, up, down) or either of the two
    usual namings, or gate and up packed into one tensor. `packed` names two packed tensors of the published form.
    """
    namings = dict.fromkeys((tuple(named), ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")))

    def joint(part: int, gate_up: str, down: str) -> Source:
        return Packed(_LAYER + down) if part == 2 else Packed(_LAYER + gate_up, part, 2)

    def layouts(part: int) -> tuple[Source, ...]:
        published = [joint(part, *packed)] if packed else []
        split = [PerExpert(f"{_LAYER}{p}.{{e}}.{names[part]}.weight") for p in prefixes for names in namings]
        return (*published, *split, *(joint(part, f"{p}.gate_up_proj", f"{p}.down_proj") for p in prefixes))

    return {f"layers.{{l}}.feed_forward.experts.{name}": layouts(i) for i, name in enumerate(("gate", "up", "down"))}


def fused_qkv_tensors(theirs: str) -> dict[str, Sequence[Source]]:
    """The weights of q, k and v, stored one after another as one tensor of the layer."""
    paths = tuple(f"layers.{{l}}.attention.{name}.weight" for name in "qkv")
    return {path: (Fused(theirs, paths, part),) for part, path in enumerate(paths)}


def prefixed(prefix: str, tensors: Mapping[str, Sequence[Source]]) -> dict[str, Sequence[Source]]:
    """The same tensors, stored under names with a prefix."""
    return {
        path: [replace(source, name=prefix + source.name) for source in sources] for path, sources in tensors.items()
    }


SHARED_EXPERT_TENSORS: Final[dict[str, Sequence[Source]]] = {
    **mlp_tensors("feed_forward", "mlp"),
    **expert_tensors("mlp.experts"),
    **mlp_tensors("feed_forward.shared", "mlp.shared_experts"),
}
"""Dense MLPs, routed experts and the shared one, as DeepSeek names them; also GLM and ERNIE."""
