"""Reading config.json: every field has a meaning, no effect, or is refused; and the models that real files describe."""

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from novalm_jax.config import LayerConfig, MLPConfig, ModelConfig, MoEConfig
from novalm_jax.errors import ConfigError
from novalm_jax.models.families import FAMILIES, find_family
from novalm_jax.models.families.family import NO_EFFECT, NOT_SUPPORTED, REQUIRED, Ignore, Only, Use
from novalm_jax.models.families.rope import ROPE_FIELDS

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
QWEN: dict[str, Any] = {
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}
WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7}
# Small models in which every field that the family reads matters.
OWN: dict[str, dict[str, Any]] = {
    "granitemoe": {"intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {"intermediate_size": 24},
    "mistral": {"intermediate_size": 24},
    "mixtral": {"intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**QWEN, **WINDOWED, "shared_expert_intermediate_size": 20, "max_window_layers": 1},
    "qwen3": {"intermediate_size": 24, **WINDOWED, "max_window_layers": 1},
    "qwen3_moe": {**QWEN, **WINDOWED},
}


def stored(family: str, **changes: Any) -> dict[str, Any]:
    return copy.deepcopy({"model_type": family, **COMMON, **OWN[family], **changes})


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    return find_family(config).read_config(config)


def message(config: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(config)
    return str(caught.value)


def attention_of(config: ModelConfig) -> Any:
    return config.layers[0].attention


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


def experts_in(layer: LayerConfig) -> MoEConfig:
    assert isinstance(layer.feed_forward, MoEConfig)
    return layer.feed_forward


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


@pytest.mark.parametrize(
    ("family", "changes", "part"),
    [
        ("llama", {"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ("llama", {"num_key_value_heads": 0}, "cannot share 0 key-value heads"),
        ("llama", {"hidden_size": 34}, "hidden size 34 is not a multiple of 4 heads"),
        ("llama", {"head_dim": 7}, "head_dim is 7"),
        ("llama", {"head_dim": 0}, "head_dim is 0"),
        ("llama", {"hidden_act": "mish"}, "activation 'mish' is not one of silu"),
        ("llama", {"vocab_size": 0}, "vocab_size is 0, not positive"),
        ("llama", {"num_hidden_layers": -1}, "num_layers is -1"),
        ("llama", {"rms_norm_eps": -1e-6}, "norm_eps"),
        ("llama", {"intermediate_size": 0}, "a dense layer needs a width"),
        ("mistral", {"sliding_window": -4}, "window is -4, which is negative"),
        ("mixtral", {"num_experts_per_tok": 5}, "5 of 4 experts per token"),
        ("mixtral", {"num_experts_per_tok": 0}, "0 of 4 experts per token"),
        ("mixtral", {"intermediate_size": 0}, "expert width is 0"),
        ("mixtral", {"num_local_experts": 0}, "num_experts is 0, and a model whose layers are all made of experts"),
        ("qwen3_moe", {"num_experts": -1}, "num_experts is -1, which is negative"),
        ("qwen2_moe", {"shared_expert_intermediate_size": -8}, "shared_width is -8"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "layer 3 is named as dense, but there are 3 layers"),
        ("qwen3_moe", {"intermediate_size": None}, "a dense layer needs a width"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "sparse_step is 0"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention", "odd"]}, "linear_attention, odd"),
    ],
)
def test_sizes_that_do_not_fit_together(family: str, changes: dict[str, Any], part: str) -> None:
    assert part in message(stored(family, **changes))


@pytest.mark.parametrize(
    ("family", "name", "most"),
    [
        *(("llama", name, 2**31 - 1) for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")),
        *(("llama", name, 2**31 - 1) for name in ("max_position_embeddings", "num_attention_heads")),
        ("llama", "num_hidden_layers", 10_000),
        ("mixtral", "num_local_experts", 100_000),
        ("qwen3_moe", "moe_intermediate_size", 2**31 - 1),
    ],
)
def test_sizes_have_bounds_that_are_looked_at_before_anything_is_built(family: str, name: str, most: int) -> None:
    assert f"is {most + 1}, and {most} is the most" in message(stored(family, **{name: most + 1}))
    for value in (10**400, -(10**400)):
        assert f"{name} = {str(value)[:57]}... is not usable" in message(stored(family, **{name: value}))


def test_a_projection_has_a_bound_too() -> None:
    assert "65536 heads of 65536 are 4294967296 wide" in message(
        stored("llama", num_attention_heads=2**16, num_key_value_heads=2**16, head_dim=2**16)
    )


def test_the_stretched_context_has_the_same_bound() -> None:
    scaling = {"rope_type": "dynamic", "factor": 1e6}
    assert f"context_length is {2**20 * 10**6}" in message(
        stored("llama", max_position_embeddings=2**20, rope_scaling=scaling)
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 10**400])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "rms_norm_eps"),
        ("olmoe", "clip_qkv"),
        *(("granitemoe", f"{name}_multiplier") for name in ("attention", "embedding", "residual")),
        ("granitemoe", "logits_scaling"),
    ],
)
def test_numbers_that_are_not_finite(family: str, name: str, value: Any) -> None:
    assert ("not usable" if value == 10**400 else "not a finite number") in message(stored(family, **{name: value}))


@pytest.mark.parametrize(
    ("family", "changes", "part"),
    [
        ("olmoe", {"clip_qkv": 0.0}, "clip_qkv is 0.0, not positive"),
        ("olmoe", {"clip_qkv": -8}, "clip_qkv is -8, not positive"),
        ("llama", {"rms_norm_eps": 0}, "norm_eps is 0, not positive"),
        *(("granitemoe", {"logits_scaling": value}, f"logits_divisor is {value}") for value in (0, -0.0, 1e-40)),
        (
            "granitemoe",
            {"embedding_multiplier": -1e39},
            "embedding_multiplier is -1e+39, not a finite number of float32",
        ),
    ],
)
def test_numbers_that_a_model_cannot_compute_with(family: str, changes: dict[str, Any], part: str) -> None:
    assert part in message(stored(family, **changes))


def test_several_misfits_come_in_one_message() -> None:
    text = message(stored("mixtral", num_key_value_heads=3, num_experts_per_tok=9, head_dim=5))
    assert all(part in text for part in ("3 key-value heads", "9 of 4 experts", "head_dim is 5"))


# --- families --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_both_names_of_the_number_of_experts(family: str) -> None:
    own = "num_local_experts" if family == "mixtral" else "num_experts"
    other = "num_experts" if family == "mixtral" else "num_local_experts"
    plain = stored(family)
    renamed = {(other if key == own else key): value for key, value in plain.items()}
    assert read_config(renamed) == read_config(plain) == read_config({**plain, other: 4})
    assert f"{own} is 4, but {other}" in message({**plain, other: 5})


SLIDES: list[tuple[str, dict[str, Any], list[int | None]]] = [
    ("llama", {}, [None] * 4),
    ("mistral", {}, [4096] * 4),
    ("mistral", {"sliding_window": None}, [None] * 4),
    ("mistral", {"sliding_window": 7}, [7] * 4),
    ("mixtral", {}, [None] * 4),
    ("mixtral", {"sliding_window": 7}, [7] * 4),
    ("qwen3", {"max_window_layers": 2}, [None, None, 7, 7]),
    ("qwen3", {"max_window_layers": 2, "use_sliding_window": False}, [None] * 4),
    ("qwen3", {"layer_types": ["sliding_attention", *["full_attention"] * 3]}, [7, None, None, None]),
    ("qwen3", {"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, [None] * 4),
    ("qwen3_moe", {"max_window_layers": 2}, [7] * 4),
    ("qwen3_moe", {"use_sliding_window": False}, [None] * 4),
    ("qwen3_moe", {"sliding_window": None}, [None] * 4),
    ("qwen2_moe", {"max_window_layers": 3}, [7, None, 7, None]),
    ("qwen2_moe", {"max_window_layers": 2}, [7, None, None, None]),
    ("qwen2_moe", {"use_sliding_window": False}, [None] * 4),
    ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 0}, [None] * 4),
    ("qwen2_moe", {"layer_types": [*["full_attention"] * 3, "sliding_attention"]}, [None, None, None, 7]),
]


@pytest.mark.parametrize(("family", "changes", "expected"), SLIDES, ids=str)
def test_which_layers_slide(family: str, changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(read_config(stored(family, num_hidden_layers=4, **changes))) == expected


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_which_layers_have_experts(family: str) -> None:
    def sparse(**changes: Any) -> list[bool]:
        config = read_config(stored(family, num_hidden_layers=4, **changes))
        return [isinstance(layer.feed_forward, MoEConfig) for layer in config.layers]

    assert sparse(decoder_sparse_step=2, mlp_only_layers=[3]) == [False, True, False, False]
    assert sparse(decoder_sparse_step=3, mlp_only_layers=[]) == [False, False, True, False]
    assert sparse(mlp_only_layers=None) == [True] * 4
    assert sparse(num_experts=0) == [False] * 4


def test_dense_and_sparse_layers_have_widths_of_their_own() -> None:
    config = read_config(stored("qwen2_moe"))
    dense = config.layers[1].feed_forward
    assert isinstance(dense, MLPConfig) and dense.width == 24
    sparse = experts_in(config.layers[0])
    assert (sparse.expert_width, sparse.shared_width, sparse.shared_gate) == (16, 20, True)


@pytest.mark.parametrize(
    ("family", "softmax", "renormalise"),
    [("mixtral", "before", True), ("granitemoe", "after", False), ("olmoe", "before", False)],
)
def test_router_conventions(family: str, softmax: str, renormalise: bool) -> None:
    moe = experts_in(read_config(stored(family)).layers[0])
    assert (moe.softmax, moe.renormalise) == (softmax, renormalise)


@pytest.mark.parametrize(
    ("family", "changes", "qkv", "out"),
    [
        ("llama", {"attention_bias": True}, True, True),
        ("qwen2_moe", {}, True, False),
        ("qwen2_moe", {"qkv_bias": False}, False, False),
        ("mixtral", {}, False, False),
    ],
)
def test_biases(family: str, changes: dict[str, Any], qkv: bool, out: bool) -> None:
    attention = attention_of(read_config(stored(family, **changes)))
    assert (attention.qkv_bias, attention.out_bias) == (qkv, out)


@pytest.mark.parametrize(
    ("family", "norm"), [("olmoe", "all"), ("qwen3", "head"), ("qwen3_moe", "head"), ("llama", "none")]
)
def test_qk_norms(family: str, norm: str) -> None:
    assert attention_of(read_config(stored(family))).qk_norm == norm


def test_head_dim_and_scale() -> None:
    assert attention_of(read_config(stored("llama", head_dim=None))).head_dim == 8
    assert attention_of(read_config(stored("qwen3"))).head_dim == 128
    assert attention_of(read_config(stored("llama", head_dim=16))).scale == 0.25
    assert attention_of(read_config(stored("granitemoe"))).scale == 1.0
    assert attention_of(read_config(stored("granitemoe", attention_multiplier=0.3))).scale == 0.3


def test_key_value_heads_default_to_the_familys_rule() -> None:
    for family, expected in (("llama", 8), ("mistral", 8), ("granitemoe", 16)):
        config = stored(family, num_attention_heads=expected, hidden_size=16 * expected)
        del config["num_key_value_heads"]
        assert attention_of(read_config(config)).num_kv_heads == expected
    assert attention_of(read_config(stored("mixtral", num_key_value_heads=None))).num_kv_heads == 4


# --- rotary settings -------------------------------------------------------------------------------------------------

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "mscale": 2.0, "mscale_all_dim": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4},
    "dynamic": {"factor": 4},
    "llama3": LLAMA3,
    "yarn": YARN,
}


def rope_of(**changes: Any) -> Any:
    return attention_of(read_config(stored("llama", **changes))).rope


@pytest.mark.parametrize(("kind", "spelling"), [*itertools.product(KINDS, ("rope_type", "type"))])
def test_both_dialects_and_both_spellings_say_the_same(kind: str, spelling: str) -> None:
    entries = {spelling: kind, **KINDS[kind]}
    old = stored("llama", rope_theta=5e5, rope_scaling=entries)
    new = stored("llama", rope_parameters={**entries, "rope_theta": 5e5})
    assert read_config(old) == read_config(new)
    rope = attention_of(read_config(old)).rope
    assert (rope.kind, rope.theta) == (kind, 5e5)
    both = old | {"rope_parameters": new["rope_parameters"]}
    assert read_config(both) == read_config(old)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *(("linear", "factor", 8), ("dynamic", "factor", 8)),
        *(("llama3", name, 2 * value) for name, value in LLAMA3.items()),
        *(("yarn", name, 2 * value) for name, value in YARN.items()),
        *(("yarn", "beta_slow", 2), ("yarn", "attention_factor", 3.0), ("yarn", "truncate", False)),
    ],
)
def test_every_rotary_setting_counts(kind: str, name: str, value: Any) -> None:
    entries = {"rope_type": kind, **KINDS[kind]}
    assert rope_of(rope_scaling=entries) != rope_of(rope_scaling={**entries, name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_settings_of_another_kind_are_refused(kind: str) -> None:
    entries = {"rope_type": kind, **KINDS[kind], "short_factor": [1.0]}
    assert "short_factor = [1.0] has no meaning there" in message(stored("llama", rope_scaling=entries))


@pytest.mark.parametrize("required", [("linear", "factor"), ("llama3", "low_freq_factor"), ("yarn", "factor")])
def test_missing_rotary_settings(required: tuple[str, str]) -> None:
    kind, name = required
    for value in ({}, {name: None}):
        entries = {key: x for key, x in KINDS[kind].items() if key != name} | {"rope_type": kind} | value
        assert f"{name} is missing" in message(stored("llama", rope_scaling=entries))


@pytest.mark.parametrize("value", ["4", True, 0, -1.0, [4], float("nan"), float("inf"), 10**400])
def test_unusable_rotary_numbers(value: Any) -> None:
    shown = f"{value!r:.60}"
    assert f"factor = {shown} is not usable" in message(
        stored("llama", rope_scaling={"rope_type": "linear", "factor": value})
    )
    for changes in ({"rope_theta": value}, {"rope_parameters": {"rope_theta": value}}):
        assert f"rope_theta = {shown}" in message(stored("llama", **changes))
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert f"original_max_position_embeddings = {shown}" in message(
        stored("llama", rope_scaling=yarn, original_max_position_embeddings=value)
    )


@pytest.mark.parametrize(
    ("kind", "changes", "part"),
    [
        ("linear", {"factor": 2e6}, "factor = 2000000.0 is not usable (a number from 1e-06 to 1e+06 is)"),
        ("llama3", {"low_freq_factor": 4.0}, "high_freq_factor = 4.0 must be more than low_freq_factor = 4.0"),
        ("yarn", {"beta_slow": 16}, "beta_fast = 16 must be more than beta_slow = 16"),
        ("yarn", {"beta_slow": 40, "beta_fast": None}, "beta_fast = 32.0 must be more than beta_slow = 40"),
        ("yarn", {"beta_fast": 2e6}, "beta_fast = 2000000.0 is not usable"),
        ("yarn", {"rope_theta": 1}, "rope_theta = 1.0 must be more than 1"),
        ("yarn", {"attention_factor": 2000}, "attention_factor = 2000 is not usable"),
        ("yarn", {"mscale": 1001.0}, "mscale = 1001.0 is not usable"),
        ("yarn", {"original_max_position_embeddings": 0.5}, "embeddings = 0.5 is not usable (a whole number from 1"),
        ("yarn", {"truncate": 1}, "truncate = 1 is not usable (true or false is)"),
    ],
)
def test_rotary_settings_from_which_no_frequencies_follow(kind: str, changes: dict[str, Any], part: str) -> None:
    entries = {"rope_type": kind, **KINDS[kind], **changes}
    assert part in message(stored("llama", rope_parameters=entries))


def test_two_dimensions_cannot_be_stretched_by_the_length() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    assert "head_dim is 2, for which" in message(stored("llama", head_dim=2, rope_scaling=dynamic))
    assert attention_of(read_config(stored("llama", head_dim=2))).head_dim == 2


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", 3, ["yarn"]])
def test_unknown_kinds_of_rotary_embedding(kind: Any) -> None:
    assert f"{kind!r} is not supported (default, linear" in message(stored("llama", rope_scaling={"type": kind}))


def test_conflicting_dialects_are_refused() -> None:
    text = message(stored("llama", rope_theta=1e4, rope_parameters={"rope_theta": 1e6}))
    assert "rope_theta twice, as 1000000.0 and as 10000.0" in text
    linear = {"rope_type": "linear", "factor": 2.0}
    assert "factor twice" in message(stored("llama", rope_scaling=linear, rope_parameters={**linear, "factor": 4.0}))


def test_empty_and_null_rotary_settings_mean_the_default() -> None:
    plain = rope_of()
    assert (plain.kind, plain.theta) == ("default", 1e4)
    nothing = dict.fromkeys(ROPE_FIELDS)
    assert rope_of(**nothing) == rope_of(rope_scaling={}) == rope_of(rope_parameters={"rope_type": None}) == plain
    assert attention_of(read_config(stored("mixtral"))).rope.theta == 1e6


def test_partial_rotation_is_refused() -> None:
    assert "partial_rotary_factor = 0.5" in message(stored("llama", rope_parameters={"partial_rotary_factor": 0.5}))
    assert rope_of(rope_parameters={"partial_rotary_factor": 1.0}) == rope_of()


def test_rotary_settings_that_are_no_object() -> None:
    assert "rope_scaling should be an object" in message(stored("llama", rope_scaling="linear"))


def test_the_original_context_comes_from_the_outside_first_and_the_models_own_last() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert rope_of(rope_scaling=yarn).original_context == 128
    inside = {**yarn, "original_max_position_embeddings": 32}
    assert rope_of(rope_scaling=inside).original_context == 32
    assert rope_of(rope_scaling=inside, original_max_position_embeddings=64).original_context == 64
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    assert rope_of(rope_scaling=dynamic, original_max_position_embeddings=64).original_context == 128


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 1.138629),
        ({"attention_factor": 0.8, "mscale": 2.0, "mscale_all_dim": 0.5}, 0.8),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, 1.194465),
        ({"mscale": 2.0}, 1.138629),
        ({"mscale": None, "mscale_all_dim": None, "attention_factor": None}, 1.138629),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_attention_factors(more: dict[str, Any], expected: float) -> None:
    rope = rope_of(rope_scaling={"rope_type": "yarn", "factor": 4.0, **more})
    assert rope.attention_factor == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 128),
        ({"rope_type": "linear", "factor": 4.0}, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_the_context_reaches_as_far_as_the_rotary_embedding_is_stretched(scaling, context) -> None:
    assert read_config(stored("llama", max_position_embeddings=128, rope_scaling=scaling)).context_length == context
