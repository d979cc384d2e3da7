"""Every field of config.json has a meaning, has no effect, or is refused by name."""

from typing import Any

import pytest

from config_helpers import OWN, message, read_config, stored
from novalm_jax.models.families import FAMILIES, find_family
from novalm_jax.models.families.family import NO_EFFECT, NOT_SUPPORTED, REQUIRED, Ignore, Only, Use

# --- every field counts ----------------------------------------------------------------------------------------------


CHANGED: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 77,
    "rms_norm_eps": 0.125,
    "tie_word_embeddings": True,
    "intermediate_size": 40,
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "attention_bias": True,
    "mlp_bias": True,
    "qkv_bias": False,
    "clip_qkv": 3,
    "shared_expert_intermediate_size": 24,
    "sliding_window": 9,
    "use_sliding_window": False,
    "max_window_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "embedding_multiplier": 3,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
}
USES = [
    (family, name)
    for family in FAMILIES
    for name, meaning in find_family({"model_type": family}).fields.items()
    if isinstance(meaning, Use)
]


@pytest.mark.parametrize(("family", "name"), USES)
def test_every_field_that_a_table_reads_changes_the_model(family: str, name: str) -> None:
    assert read_config(stored(family)) != read_config(stored(family, **{name: CHANGED[name]}))


@pytest.mark.parametrize(("family", "name"), USES)
def test_every_field_that_a_table_reads_is_typed(family: str, name: str) -> None:
    expected = CHANGED[name]
    wrong = [1.5] if isinstance(expected, list) else "yes" if isinstance(expected, bool) else True
    assert f"{name} = {wrong!r}" in message(stored(family, **{name: wrong}))
    assert f"{name} = {{}} has the wrong type" in message(stored(family, **{name: {}}))
    if type(expected) is int and name != "clip_qkv" and not name.endswith("multiplier"):
        assert f"{name} = '{expected}' has the wrong type" in message(stored(family, **{name: str(expected)}))
        assert f"{name} = {expected + 0.5} has the wrong type" in message(stored(family, **{name: expected + 0.5}))


@pytest.mark.parametrize(("family", "name"), [(f, n) for f, n in USES if n not in OWN[f]])
def test_an_absent_field_has_its_default_or_is_missing(family: str, name: str) -> None:
    use = find_family({"model_type": family}).fields[name]
    assert isinstance(use, Use)
    without = {key: value for key, value in stored(family, num_attention_heads=8).items() if key != name}
    if use.default is REQUIRED:
        assert f"{name} is missing" in message(without)
    else:
        assert read_config(without) == read_config({**without, name: use.default})


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_without_effect_have_none(family: str) -> None:
    ignored = [name for name in NO_EFFECT if name not in ("architectures", "model_type")]
    ignored += [n for n, what in find_family({"model_type": family}).fields.items() if isinstance(what, Ignore)]
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
        assert read_config(stored(family, **{name: value})) == read_config(stored(family))
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
    for config in ({}, {"model_type": None}, {"model_type": ["llama"]}):
        assert "no model_type" in message(config)
