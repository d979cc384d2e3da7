"""DBRX (Databricks): fused and clipped q, k and v, layer norm, experts in one matrix. Source: the model card."""

from novalm_jax.models.families.common import fused_qkv_tensors, prefixed
from novalm_jax.models.families.family import Family, Flat, Ignore, Only, Stored, Use

BLOCK = "transformer.blocks.{l}."

FAMILY = Family(
    model_type="dbrx",
    fields={
        "vocab_size": Use("vocab_size"),
        "d_model": Use("hidden_size"),
        "n_layers": Use("num_layers"),
        "n_heads": Use("num_heads"),
        "max_seq_len": Use("context_length"),
        "tie_word_embeddings": Only((False,)),
        "num_key_value_heads": Ignore(),
        "emb_pdrop": Ignore(),
        "resid_pdrop": Ignore(),
        "attn_config.kv_n_heads": Use("num_kv_heads", default=1),
        "attn_config.clip_qkv": Use("clip_qkv", default=None),
        "attn_config.attn_pdrop": Ignore(),
        "ffn_config.ffn_hidden_size": Use("expert_width"),
        "ffn_config.moe_num_experts": Use("num_experts"),
        "ffn_config.moe_top_k": Use("experts_per_token"),
        "ffn_config.ffn_act_fn": Only(({"name": "silu"}, None)),
        "ffn_config.moe_normalize_expert_weights": Use("norm_order", default=1.0),
        "ffn_config.hidden_size": Ignore(),
        "ffn_config.moe_jitter_eps": Ignore(),
        "ffn_config.moe_loss_weight": Ignore(),
        "ffn_config.uniform_expert_assignment": Ignore(),
    },
    renamed={
        "rope_theta": "attn_config.rope_theta",
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
    },
    traits={"activation": "silu", "norm_kind": "layer", "norm_eps": 1e-5, "expert_down_inputs_first": True},
    tensors={
        "embed.weight": (Stored("transformer.wte.weight"),),
        "norm.scale": (Stored("transformer.norm_f.weight"),),
        "head.weight": (Stored("lm_head.weight"),),
    }
    | prefixed(
        BLOCK,
        {
            "layers.{l}.attention_norm.scale": (Stored("norm_attn_norm.norm_1.weight"),),
            "layers.{l}.feed_forward_norm.scale": (Stored("norm_attn_norm.norm_2.weight"),),
            **fused_qkv_tensors("norm_attn_norm.attn.Wqkv.weight"),
            "layers.{l}.attention.out.weight": (Stored("norm_attn_norm.attn.out_proj.weight"),),
            "layers.{l}.feed_forward.router.weight": (Stored("ffn.router.layer.weight"),),
            "layers.{l}.feed_forward.experts.gate": (Flat("ffn.experts.mlp.w1"),),
            "layers.{l}.feed_forward.experts.up": (Flat("ffn.experts.mlp.v1"),),
            "layers.{l}.feed_forward.experts.down": (Flat("ffn.experts.mlp.w2"),),
        },
    ),
)
