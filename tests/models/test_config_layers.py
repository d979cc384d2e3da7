"""The layers, windows and experts that config.json describes, and sizes and numbers that no model can have."""

from typing import Any

import pytest

from config_helpers import attention_of, message, read_config, stored
from novalm_jax.config import LayerConfig, ModelConfig, MoEConfig


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


def experts_in(layer: LayerConfig) -> MoEConfig:
    assert isinstance(layer.feed_forward, MoEConfig)
    return layer.feed_forward


# --- sizes and numbers -----------------------------------------------------------------------------------------------


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
        ("qwen3", {"layer_types": ["full_attention", "linear_attention", "odd"]}, "'linear_attention', 'odd'"),
        *(
            (
                family,
                {"layer_types": ["sliding_attention"] * 3, **off},
                "names sliding_attention, but there is no window",
            )
            for family in ("qwen2", "qwen3")
            for off in ({"sliding_window": None}, {"sliding_window": 0}, {"use_sliding_window": False})
        ),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, "but there is no length of a chunk"),
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
    ("qwen2", {"max_window_layers": 3}, [None, None, None, 7]),
    ("qwen2", {"use_sliding_window": False}, [None] * 4),
    (
        "qwen2",
        {"max_window_layers": 0, "layer_types": [*["full_attention"] * 3, "sliding_attention"]},
        [*[None] * 3, 7],
    ),
    ("gpt_oss", {}, [7, None, 7, None]),
    ("gpt_oss", {"sliding_window": None}, [None] * 4),
    ("gpt_oss", {"layer_types": ["full_attention", *["sliding_attention"] * 3]}, [None, 7, 7, 7]),
    ("phimoe", {"sliding_window": 7}, [7] * 4),
    ("phimoe", {}, [None] * 4),
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


@pytest.mark.parametrize(
    ("family", "choose_first", "renormalise"),
    [
        ("dbrx", False, True),
        ("deepseek_v2", False, False),
        ("deepseek_v3", False, True),
        ("ernie4_5_moe", False, True),
        ("glm4_moe", False, True),
        ("gpt_oss", True, False),
        ("granitemoe", True, False),
        ("hunyuan_v1_moe", False, True),
        ("llama4_text", True, False),
        ("minimax_m2", False, True),
        ("mixtral", False, True),
        ("olmoe", False, False),
    ],
)
def test_router_conventions(family: str, choose_first: bool, renormalise: bool) -> None:
    router = experts_in(read_config(stored(family)).layers[1]).router
    assert (router.choose_first, router.renormalise) == (choose_first, renormalise)


@pytest.mark.parametrize(
    ("family", "changes", "qkv", "out"),
    [
        ("llama", {"attention_bias": True}, True, True),
        ("qwen2_moe", {}, True, False),
        ("qwen2_moe", {"qkv_bias": False}, False, False),
        ("mixtral", {}, False, False),
        ("qwen2", {}, True, False),
        ("glm4_moe", {"attention_bias": True}, True, False),
        ("gpt_oss", {}, True, True),
        ("phimoe", {"attention_bias": True}, True, True),
        ("hunyuan_v1_moe", {"attention_bias": True}, True, True),
        ("ernie4_5_moe", {"use_bias": True}, True, True),
        ("minimax_m2", {}, False, False),
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


def test_only_hunyuan_normalises_after_the_rotation() -> None:
    assert attention_of(read_config(stored("hunyuan_v1_moe"))).norm_after_rope
    assert not attention_of(read_config(stored("qwen3"))).norm_after_rope


def test_key_value_heads_default_to_the_familys_rule() -> None:
    for family, expected in (("llama", 8), ("mistral", 8), ("granitemoe", 16)):
        config = stored(family, num_attention_heads=expected, hidden_size=16 * expected)
        del config["num_key_value_heads"]
        assert attention_of(read_config(config)).num_kv_heads == expected
    assert attention_of(read_config(stored("mixtral", num_key_value_heads=None))).num_kv_heads == 4
