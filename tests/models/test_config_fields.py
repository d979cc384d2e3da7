"""Every field of config.json has a meaning, has no effect, or is refused by name."""

from typing import Any, get_args, get_type_hints

import pytest

from config_helpers import message, outcome, read_config, stored, without
from novalm_jax.models.families import FAMILIES, find_family
from novalm_jax.models.families.family import NO_EFFECT, NOT_SUPPORTED, REQUIRED, Ignore, Only, Use
from novalm_jax.models.families.traits import Traits

# --- every field counts ----------------------------------------------------------------------------------------------

CHANGED: dict[str, Any] = {
    # Sizes.
    "vocab_size": 97,
    **dict.fromkeys(("hidden_size", "d_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layers"), 4),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len"), 77),
    **dict.fromkeys(("num_attention_heads", "n_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "attn_config.kv_n_heads"), 4),
    "head_dim": 12,
    "rotary_dim": 4,
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size"), 40),
    **dict.fromkeys(("shared_expert_intermediate_size", "ffn_config.ffn_hidden_size"), 40),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 14),
    # Numbers.
    "hidden_act": "gelu",
    "rms_norm_eps": 0.125,
    "embedding_multiplier": 3,
    **dict.fromkeys(("attention_multiplier", "residual_multiplier", "logits_scaling"), 0.5),
    **dict.fromkeys(("clip_qkv", "attn_config.clip_qkv", "swiglu_limit"), 3),
    "swiglu_alpha": 0.5,
    "floor_scale": 4,
    "attn_scale": 0.5,
    # What there is and is not.
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "lm_head_bias", "tie_word_embeddings"), True),
    **dict.fromkeys(("qkv_bias", "rope_interleave", "attn_temperature_tuning"), False),
    "use_qk_norm": True,
    # Which layer is what.
    "sliding_window": 9,
    "use_sliding_window": False,
    "max_window_layers": 3,
    "attention_chunk_size": 9,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "no_rope_layers": [0, 1, 1],
    "no_rope_layer_interval": 2,
    "moe_layers": [0],
    "interleave_moe_layer_step": 3,
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_interval"), 2),
    "mlp_only_layers": [0],
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 2),
    "moe_layer_end_index": 1,
    # Experts, and how they are chosen.
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "ffn_config.moe_num_experts"), 6),
    "n_routed_experts": 12,
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "ffn_config.moe_top_k"), 1),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), 3),
    "norm_topk_prob": True,
    "ffn_config.moe_normalize_expert_weights": None,
    "routed_scaling_factor": 3,
    **dict.fromkeys(("router_jitter_noise", "moe_norm_min"), 0.25),
    "topk_method": "greedy",
    "n_group": 2,
    "topk_group": 1,
}
# In families that have the above already.
CHANGED_THERE: dict[tuple[str, str], Any] = {
    **{(family, "norm_topk_prob"): False for family in ("deepseek_v3", "glm4_moe", "kimi_k2")},
    **{(family, "num_experts_per_tok"): 2 for family in ("llama4", "llama4_text")},
    **{(family, "use_qk_norm"): False for family in ("llama4", "llama4_text")},
    **{
        (family, "layer_types"): ["full_attention", "chunked_attention", "full_attention"]
        for family in ("llama4", "llama4_text")
    },
    ("ernie4_5_moe", "tie_word_embeddings"): False,
    ("gpt_oss", "attention_bias"): False,
    # Its own YaRN reaches further than a small number.
    ("gpt_oss", "max_position_embeddings"): 200_000,
}
USES = [
    (family, name)
    for family in FAMILIES
    for name, meaning in find_family({"model_type": family}).fields.items()
    if isinstance(meaning, Use)
]
# In latent attention the number of heads says it all; another number of key-value heads is refused.
NO_CHOICE = [(family, "num_key_value_heads") for family in ("deepseek_v2", "deepseek_v3", "kimi_k2")]


def use_of(family: str, name: str) -> Use:
    use = find_family({"model_type": family}).fields[name]
    assert isinstance(use, Use)
    return use


@pytest.mark.parametrize(("family", "name"), [use for use in USES if use not in NO_CHOICE])
def test_every_field_that_a_table_reads_changes_the_model(family: str, name: str) -> None:
    value = CHANGED_THERE.get((family, name), CHANGED[name])
    assert read_config(stored(family)) != read_config(stored(family, **{name: value}))


@pytest.mark.parametrize(("family", "name"), NO_CHOICE)
def test_latent_attention_has_a_key_value_head_for_each_head(family: str, name: str) -> None:
    assert (
        read_config(without(family, name)) == read_config(stored(family)) == read_config(stored(family, **{name: None}))
    )
    assert "one key-value head for each of its 4 heads" in message(stored(family, **{name: 2}))


@pytest.mark.parametrize(("family", "name"), USES)
def test_every_field_that_a_table_reads_is_typed(family: str, name: str) -> None:
    expected = CHANGED[name]
    wrong = [1.5] if isinstance(expected, list) else "yes" if isinstance(expected, bool) else True
    assert f"{name} = {wrong!r}" in message(stored(family, **{name: wrong}))
    use = use_of(family, name)
    fault = "has the wrong type" if use.meanings is None else "is not supported"
    assert f"{name} = {{}} {fault}" in message(stored(family, **{name: {}}))
    hint = get_type_hints(Traits)[use.trait]
    if type(expected) is int and float not in (get_args(hint) or (hint,)):
        assert f"{name} = '{expected}' {fault}" in message(stored(family, **{name: str(expected)}))
        assert f"{name} = {expected + 0.5} {fault}" in message(stored(family, **{name: expected + 0.5}))


@pytest.mark.parametrize(("family", "name"), USES)
def test_an_absent_field_has_its_default_or_is_missing(family: str, name: str) -> None:
    use = use_of(family, name)
    rest = {"num_attention_heads": 8} if name == "num_key_value_heads" else {}
    if use.default is REQUIRED:
        assert f"{name} is missing" in message(without(family, name))
    else:
        # Some defaults do not fit the rest of a small model.
        assert outcome(without(family, name, **rest)) == outcome(stored(family, **rest, **{name: use.default}))


DEFAULTS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config.kv_n_heads": 1, "ffn_config.moe_normalize_expert_weights": 1},
    "deepseek_v2": {"topk_method": "greedy", "routed_scaling_factor": 1.0, "n_group": None, "first_k_dense_replace": 0},
    "deepseek_v3": {
        **{"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
        **{"norm_topk_prob": True, "rope_interleave": True},
    },
    "ernie4_5_moe": {
        **{"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "moe_layer_start_index": 1},
        **{"moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_num_shared_experts": 2, "use_bias": False},
    },
    "glm4_moe": {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": False, "n_group": 1, "topk_group": 1},
        **{"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_qk_norm": False},
    },
    "gpt_oss": {
        **{"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True},
        **{"sliding_window": 128, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    },
    "granitemoe": {"rms_norm_eps": 1e-6, "attention_multiplier": 1.0, "embedding_multiplier": 1.0},
    "hunyuan_v1_moe": {"rms_norm_eps": 1e-5, "attention_bias": False},
    "llama": {"rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False},
    "llama4_text": {
        **{"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "num_experts_per_tok": 1},
        **{"interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "use_qk_norm": True, "floor_scale": 8192},
        **{"attn_temperature_tuning": True, "attn_scale": 0.1, "attention_chunk_size": 8192, "attention_bias": False},
    },
    "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
        "sliding_window": None,
    },
    "olmoe": {"rms_norm_eps": 1e-5, "norm_topk_prob": False, "attention_bias": False},
    "phimoe": {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_local_experts": 16, "attention_bias": False},
        **{"lm_head_bias": False, "sliding_window": None, "router_jitter_noise": 0.01},
    },
    "qwen2": {"rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "qwen2_moe": {
        **{"rms_norm_eps": 1e-6, "qkv_bias": True, "norm_topk_prob": False, "use_sliding_window": False},
        **{"sliding_window": 4096, "max_window_layers": 28, "decoder_sparse_step": 1},
    },
    "qwen3": {"head_dim": 128, "attention_bias": False, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3_moe": {"norm_topk_prob": False, "attention_bias": False, "decoder_sparse_step": 1, "sliding_window": 4096},
}


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_the_reference_implementation(family: str) -> None:
    """As the classes of transformers 5.24 have them."""
    assert {name: use_of(family, name).default for name in DEFAULTS[family]} == DEFAULTS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_without_effect_have_none(family: str) -> None:
    fields = find_family({"model_type": family}).fields
    ignored = [name for name in NO_EFFECT if name not in ("architectures", "model_type", *fields)]
    ignored += [name for name, meaning in fields.items() if isinstance(meaning, Ignore)]
    assert read_config(stored(family, **dict.fromkeys(ignored, "anything"))) == read_config(stored(family))


@pytest.mark.parametrize(
    ("family", "name", "only"),
    [
        (family, name, meaning)
        for family in FAMILIES
        for name, meaning in find_family({"model_type": family}).fields.items()
        if isinstance(meaning, Only)
    ],
)
def test_fields_that_are_fixed_here_take_that_value_alone(family: str, name: str, only: Only) -> None:
    for value in only.values:
        assert read_config(stored(family, **{name: value})) == read_config(without(family, name))
    assert f"{name} = 'other' is not supported" in message(stored(family, **{name: "other"}))


# --- strictness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_fields_are_refused_by_name(family: str) -> None:
    assert "use_magic = 3 is not known here" in message(stored(family, use_magic=3))


def test_fields_of_other_families_are_unknown() -> None:
    assert "logits_scaling = 8.0 is not known here" in message(stored("llama", logits_scaling=8.0))
    assert "n_shared_experts = 1 is not known here" in message(stored("qwen3_moe", n_shared_experts=1))


def test_all_problems_come_in_one_message() -> None:
    config = stored("mixtral", hidden_size="32", rms_norm_eps=None, use_magic=True, quantization_config={})
    del config["vocab_size"]
    text = message(config | {"architectures": ["MixtralForSequenceClassification"]})
    for part in (
        "vocab_size is missing",
        "hidden_size = '32' has the wrong type",
        "rms_norm_eps = None has the wrong type",
        "use_magic = True is not known",
        "quantization_config: ",
        "MixtralForSequenceClassification",
    ):
        assert part in text


def test_quantised_weights_are_refused_by_their_method() -> None:
    text = message(stored("mixtral", quantization_config={"quant_method": "awq", "bits": 4}))
    assert "'awq'" in text and "bfloat16 or float32" in text
    assert read_config(stored("mixtral", quantization_config=None)) == read_config(stored("mixtral"))


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_what_no_family_supports_is_refused_unless_off(name: str) -> None:
    assert f"{name}: {NOT_SUPPORTED[name]}" in message(stored("llama", **{name: 5}))
    assert read_config(stored("llama", **{name: False})) == read_config(stored("llama", **{name: None}))


@pytest.mark.parametrize("names", [["LlamaForSequenceClassification"], ["LlamaModel"]])
def test_other_heads_than_a_language_models_are_refused(names: list[str]) -> None:
    assert "not a causal language model" in message(stored("llama", architectures=names))


@pytest.mark.parametrize("names", ["LlamaForCausalLM", 5, 0, "", [3], ["LlamaForCausalLM", None], {}])
def test_architectures_are_a_list_of_names(names: Any) -> None:
    assert f"architectures = {names!r} is not a list of names" in message(stored("llama", architectures=names))


@pytest.mark.parametrize("names", [None, [], ["LlamaForCausalLM"]])
def test_causal_architectures_are_fine(names: Any) -> None:
    assert read_config(stored("llama", architectures=names)) == read_config(stored("llama"))


def test_unsupported_model_types_name_the_supported_ones() -> None:
    text = message(stored("llama") | {"model_type": "bert"})
    assert "'bert'" in text and all(family in text for family in FAMILIES)
    nothing: Any = None
    for config in ({}, {"model_type": None}, {"model_type": ["llama"]}, nothing):
        assert "no model_type" in message(config)
