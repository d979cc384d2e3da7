"""Fields with translated values, fields in objects, second names, and what lies around a text model."""

from typing import Any

import pytest

from config_helpers import message, read_config, stored, without
from novalm_jax.models.families import find_family

# --- translated values, and fields in objects ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("glm4_moe", "moe_layer_freq", 2),
        ("dbrx", "ffn_config.ffn_act_fn", {"name": "gelu"}),
        ("dbrx", "tie_word_embeddings", True),
        ("llama4", "attn_temperature_tuning", 3),
        ("phimoe", "num_experts_per_tok", 4),
        ("hunyuan_v1_moe", "use_cla", True),
        ("minimax_m2", "shared_intermediate_size", 512),
    ],
)
def test_values_that_the_network_could_have_and_is_not_built_for(family: str, name: str, value: Any) -> None:
    assert f"{name} = {value!r} is not supported" in message(stored(family, **{name: value}))


def test_the_number_four_means_true_where_old_files_say_so() -> None:
    assert read_config(stored("llama4_text", attn_temperature_tuning=4)) == read_config(stored("llama4_text"))


def test_an_object_of_fields_is_one() -> None:
    for value in (None, 3, [1]):
        assert f"attn_config should be an object with fields, and is {value!r}" in message(
            {**stored("dbrx"), "attn_config": value}
        )
        assert "text_config should be an object with fields" in message({**stored("llama4"), "text_config": value})
    assert "text_config should be an object" in message({"model_type": "llama4"})
    assert "ffn_config.ffn_hidden_size is missing" in message(without("dbrx", "ffn_config.ffn_hidden_size"))
    assert "attn_config.magic = 3 is not known here" in message(stored("dbrx", **{"attn_config.magic": 3}))


def test_objects_of_fields_may_hold_what_writers_put_into_every_object() -> None:
    junk = {"_name_or_path": "", "is_encoder_decoder": False, "model_type": "", "return_dict": True, "dtype": None}
    config = stored("dbrx", **{f"attn_config.{name}": value for name, value in junk.items()})
    assert read_config(config) == read_config(stored("dbrx"))
    assert "ffn_config.is_encoder_decoder = True is not known here" in message(
        stored("dbrx", **{"ffn_config.is_encoder_decoder": True})
    )


def test_what_lies_around_a_text_model_is_known_and_without_effect() -> None:
    plain = stored("llama4")
    around = {
        "vision_config": {"hidden_size": 3},
        "image_token_index": 9,
        "tie_word_embeddings": True,
        "transformers_version": "4.51.0",
        "architectures": ["Llama4ForConditionalGeneration"],
    }
    assert read_config({**plain, **around}) == read_config(plain)
    assert read_config(plain).layers == read_config(stored("llama4_text")).layers
    assert "audio_config = {} is not known here" in message({**plain, "audio_config": {}})
    assert "hidden_size = 32 is not known here" in message({**plain, "hidden_size": 32})
    assert "not a causal language model" in message({**plain, "architectures": ["Llama4VisionModel"]})


def test_quantised_weights_are_refused_wherever_it_is_said() -> None:
    quantised = {"quant_method": "fp8"}
    inside, outside = stored("llama4", quantization_config=quantised), stored("llama4", quantization_config=None)
    for config in (
        inside,
        {**stored("llama4"), **{"quantization_config": quantised}},
        outside | {"quantization_config": quantised},
    ):
        assert "'fp8'" in message(config)
    assert read_config(outside) == read_config(stored("llama4"))


@pytest.mark.parametrize(
    ("family", "own", "other"),
    [
        ("dbrx", "d_model", "hidden_size"),
        ("dbrx", "n_layers", "num_hidden_layers"),
        ("dbrx", "n_heads", "num_attention_heads"),
        ("dbrx", "max_seq_len", "max_position_embeddings"),
        ("deepseek_v2", "n_routed_experts", "num_experts"),
        ("deepseek_v3", "n_routed_experts", "num_local_experts"),
        ("ernie4_5_moe", "moe_num_experts", "num_experts"),
        ("ernie4_5_moe", "moe_k", "num_experts_per_tok"),
        ("glm4_moe", "n_routed_experts", "num_local_experts"),
        *(
            (family, "num_local_experts", "num_experts")
            for family in ("gpt_oss", "llama4_text", "minimax_m2", "mixtral")
        ),
        ("phimoe", "num_local_experts", "num_experts"),
        ("hunyuan_v1_moe", "num_experts", "num_local_experts"),
        ("hunyuan_v1_moe", "moe_topk", "num_experts_per_tok"),
        *((family, "num_experts", "num_local_experts") for family in ("olmoe", "qwen2_moe", "qwen3_moe")),
    ],
)
def test_second_names_of_fields(family: str, own: str, other: str) -> None:
    plain = stored(family)
    renamed = {(other if key == own else key): value for key, value in plain.items()}
    assert read_config(renamed) == read_config(plain) == read_config({**plain, other: plain[own]})
    assert f"{own} is {plain[own]}, but {other}" in message({**plain, other: 99})


def test_layers_for_multi_token_prediction_are_counted_under_either_name() -> None:
    family = find_family({"model_type": "deepseek_v3"})
    assert family.count_extra_layers({"num_nextn_predict_layers": 2}) == 2
    assert family.count_extra_layers({"num_mtp_layers": 1}) == 1
    for nothing in ({}, {"num_mtp_layers": None}, {"num_nextn_predict_layers": True}, {"num_mtp_layers": -1}):
        assert family.count_extra_layers(nothing) == 0
    assert find_family({"model_type": "deepseek_v2"}).count_extra_layers({"num_nextn_predict_layers": 2}) == 0


def test_a_dotted_name_is_no_field_of_an_object() -> None:
    name = "attn_config.clip_qkv"
    assert f"'{name}' = 0.01 is not known here" in message({**stored("dbrx"), name: 0.01})
