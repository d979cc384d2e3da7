"""What sets families apart: which layers hold experts, see in chunks or rotate, latent attention, groups, biases."""

from typing import Any

import pytest

from config_helpers import attention_of, message, read_config, stored
from novalm_jax.config import (
    AttentionConfig,
    ClampConfig,
    LatentConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RouterConfig,
    TemperatureConfig,
)


def sparse(family: str, **changes: Any) -> list[int]:
    """Which layers of four hold experts."""
    config = read_config(stored(family, **{"num_hidden_layers": 4, **changes}))
    return [i for i, layer in enumerate(config.layers) if isinstance(layer.feed_forward, MoEConfig)]


def experts_of(config: ModelConfig, layer: int = 1) -> MoEConfig:
    experts = config.layers[layer].feed_forward
    assert isinstance(experts, MoEConfig)
    return experts


def attentions(family: str, **changes: Any) -> list[AttentionConfig]:
    found = [layer.attention for layer in read_config(stored(family, **changes)).layers]
    assert all(isinstance(attention, AttentionConfig) for attention in found)
    return found  # type: ignore[return-value]


# --- which layers hold experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        *(
            (family, changes, expected)
            for family in ("qwen2_moe", "qwen3_moe")
            for changes, expected in (
                ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
                ({"decoder_sparse_step": 3, "mlp_only_layers": []}, [2]),
                ({"mlp_only_layers": None}, [0, 1, 2, 3]),
                ({"num_experts": 0}, []),
            )
        ),
        *(
            (family, {"first_k_dense_replace": first}, expected)
            for family in ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe")
            for first, expected in ((0, [0, 1, 2, 3]), (1, [1, 2, 3]), (4, []), (9, []))
        ),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": -1}, [0, 1, 2, 3]),
        ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 2}, [1, 2]),
        ("ernie4_5_moe", {"moe_layer_start_index": 2, "moe_layer_end_index": 2}, [2]),
        ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 0}, []),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 9, "moe_layer_interval": 2}, [1, 3]),
        ("ernie4_5_moe", {"moe_layer_start_index": 2, "moe_layer_end_index": -1, "moe_layer_interval": 2}, [3]),
        ("llama4_text", {"interleave_moe_layer_step": 1}, [0, 1, 2, 3]),
        ("llama4_text", {"interleave_moe_layer_step": 2}, [1, 3]),
        ("llama4_text", {"moe_layers": [0, 3]}, [0, 3]),
        ("llama4_text", {"moe_layers": []}, []),
        ("llama4_text", {"moe_layers": None}, [1, 3]),
    ],
    ids=str,
)
def test_which_layers_have_experts(family: str, changes: dict[str, Any], expected: list[int]) -> None:
    assert sparse(family, **changes) == expected


@pytest.mark.parametrize(
    "family", ["dbrx", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "minimax_m2", "mixtral", "phimoe"]
)
def test_families_whose_layers_all_have_experts(family: str) -> None:
    assert all(isinstance(layer.feed_forward, MoEConfig) for layer in read_config(stored(family)).layers)


@pytest.mark.parametrize(
    ("family", "layer", "dense", "routed", "shared", "gate"),
    [
        ("qwen2_moe", 0, 24, 16, 20, True),
        ("deepseek_v2", 1, 24, 16, 32, False),
        ("deepseek_v3", 1, 24, 16, 32, False),
        ("glm4_moe", 1, 24, 16, 32, False),
        ("ernie4_5_moe", 1, 24, 16, 32, False),
        ("llama4_text", 1, 24, 20, 20, False),
        ("hunyuan_v1_moe", 1, None, 20, 20, False),
        ("mixtral", 1, None, 20, 0, False),
        ("gpt_oss", 1, None, 20, 0, False),
    ],
)
def test_widths(family: str, layer: int, dense: int | None, routed: int, shared: int, gate: bool) -> None:
    config = read_config(stored(family))
    experts = experts_of(config, layer)
    assert (experts.expert.width, experts.shared_width, experts.shared_gate) == (routed, shared, gate)
    widths = {part.feed_forward.width for part in config.layers if isinstance(part.feed_forward, MLPConfig)}
    assert widths == (set() if dense is None else {dense})


@pytest.mark.parametrize(
    ("family", "name"), [("glm4_moe", "n_shared_experts"), ("ernie4_5_moe", "moe_num_shared_experts")]
)
def test_no_shared_experts(family: str, name: str) -> None:
    for none in (0, None):
        assert experts_of(read_config(stored(family, **{name: none}))).shared_width == 0


def test_the_number_of_chosen_experts_may_differ_by_layer() -> None:
    config = read_config(stored("hunyuan_v1_moe", moe_topk=[1, 2, 4]))
    assert [experts_of(config, layer).experts_per_token for layer in range(3)] == [1, 2, 4]
    assert read_config(stored("hunyuan_v1_moe", moe_topk=[2, 2, 2])) == read_config(
        stored("hunyuan_v1_moe", moe_topk=2)
    )


# --- chunks, rotation, temperature -----------------------------------------------------------------------------------

CHUNKED, FULL = "chunked_attention", "full_attention"


def test_llama4_sees_in_chunks_where_it_rotates() -> None:
    layers = attentions("llama4_text")
    assert [layer.chunk for layer in layers] == [7, 7, None]
    assert [layer.rope is not None for layer in layers] == [True, True, False]
    assert [layer.rotary_dim for layer in layers] == [8, 8, 0]
    assert [layer.qk_norm for layer in layers] == ["unit", "unit", "none"]
    assert [layer.temperature for layer in layers] == [None, None, TemperatureConfig(8192, 0.1)]
    assert all(layer.rope.pairs for layer in layers if layer.rope)


@pytest.mark.parametrize(
    ("changes", "rotating", "chunks"),
    [
        ({"no_rope_layers": [0, 1, 0]}, [False, True, False], [None, 7, None]),
        ({"no_rope_layers": []}, [True, True, False], [7, 7, None]),
        ({"no_rope_layers": None, "no_rope_layer_interval": 2}, [True, False, True], [7, None, 7]),
        ({"no_rope_layers": None, "no_rope_layer_interval": 1}, [False] * 3, [None] * 3),
        ({"attention_chunk_size": None}, [True, True, False], [None] * 3),
        ({"layer_types": [FULL, CHUNKED, CHUNKED]}, [True, True, False], [None, 7, 7]),
        ({"layer_types": [CHUNKED, FULL, CHUNKED], "no_rope_layers": [0, 0, 1]}, [False, False, True], [7, None, 7]),
        ({"layer_types": [FULL] * 3, "attention_chunk_size": None}, [True, True, False], [None] * 3),
    ],
    ids=str,
)
def test_masks_and_rotation_are_independent(changes: dict, rotating: list[bool], chunks: list[int | None]) -> None:
    layers = attentions("llama4_text", **changes)
    assert [layer.rope is not None for layer in layers] == rotating
    assert [layer.chunk for layer in layers] == chunks
    # Norm and temperature go with the rotation.
    assert [layer.qk_norm == "unit" for layer in layers] == rotating
    assert [layer.temperature is None for layer in layers] == rotating


def test_llama4_without_norm_and_temperature() -> None:
    layers = attentions("llama4_text", use_qk_norm=False, attn_temperature_tuning=False)
    assert {layer.qk_norm for layer in layers} == {"none"} and {layer.temperature for layer in layers} == {None}


def test_sinks_are_gpt_oss_alone_and_in_every_layer() -> None:
    assert [layer.sinks for layer in attentions("gpt_oss")] == [True] * 3
    assert [layer.sinks for layer in attentions("llama4_text")] == [False] * 3


# --- latent attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_latent_attention(family: str) -> None:
    attention = attention_of(read_config(stored(family)))
    assert isinstance(attention, LatentConfig)
    sizes = (attention.num_heads, attention.query_rank, attention.kv_rank, attention.nope_dim, attention.rope_dim)
    assert (*sizes, attention.value_dim) == (4, 12, 10, 8, 4, 6)
    assert (attention.scale, attention.norm_eps, attention.bias) == (pytest.approx(12**-0.5), 1e-6, False)
    assert attention_of(read_config(stored(family, rms_norm_eps=0.5))).norm_eps == 1e-6
    assert attention_of(read_config(stored(family, q_lora_rank=None))).query_rank is None
    assert attention_of(read_config(stored(family, attention_bias=True))).bias


def test_the_order_of_rotated_dimensions() -> None:
    for family, pairs in (("deepseek_v2", True), ("deepseek_v3", True), ("ernie4_5_moe", True), ("glm4_moe", False)):
        assert attention_of(read_config(stored(family))).rope.pairs is pairs
    assert not attention_of(read_config(stored("deepseek_v3", rope_interleave=False))).rope.pairs


# --- routers ---------------------------------------------------------------------------------------------------------

SIGMOID: dict[str, Any] = {"scores": "sigmoid", "renormalise": True, "choice_bias": True}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("deepseek_v2", {}, RouterConfig(groups=4, kept_groups=2, group_rule="max")),
        ("deepseek_v2", {"topk_method": "greedy", "routed_scaling_factor": 16}, RouterConfig(scale=16)),
        (
            "deepseek_v3",
            {},
            RouterConfig(**SIGMOID, scale=2.5, groups=4, kept_groups=2, group_rule="sum_of_two"),
        ),
        (
            "glm4_moe",
            {"n_group": 1, "topk_group": 1},
            RouterConfig(**SIGMOID, group_rule="sum_of_two"),
        ),
        ("minimax_m2", {}, RouterConfig(**SIGMOID)),
        ("ernie4_5_moe", {}, RouterConfig("softmax", renormalise=True, norm_floor=1e-12, choice_bias=True)),
        ("hunyuan_v1_moe", {}, RouterConfig("softmax", renormalise=True)),
        ("llama4_text", {}, RouterConfig("sigmoid", choose_first=True, scale_inputs=True)),
        ("gpt_oss", {}, RouterConfig("softmax", choose_first=True, bias=True)),
        ("dbrx", {"ffn_config.moe_normalize_expert_weights": None}, RouterConfig("softmax")),
        ("dbrx", {}, RouterConfig("softmax", renormalise=True)),
        (
            "dbrx",
            {"ffn_config.moe_normalize_expert_weights": 2},
            RouterConfig("softmax", renormalise=True, norm_order=2),
        ),
        ("phimoe", {"router_jitter_noise": 0.3}, RouterConfig("sparsemixer", jitter=0.3)),
    ],
)
def test_routers(family: str, changes: dict[str, Any], expected: RouterConfig) -> None:
    assert experts_of(read_config(stored(family, **changes))).router == expected


def test_how_experts_lie_in_the_files() -> None:
    def layout(family: str) -> tuple[Any, ...]:
        expert = experts_of(read_config(stored(family))).expert
        return expert.joint, expert.inputs_first, expert.down_inputs_first, expert.bias, expert.clamp

    assert layout("mixtral") == layout("deepseek_v3") == ("no", False, False, False, None)
    assert layout("dbrx") == ("no", False, True, False, None)
    assert layout("llama4_text") == ("halves", True, True, False, None)
    assert layout("gpt_oss") == ("alternate", True, True, True, ClampConfig(7.0, 1.702))


# --- norms and biases outside attention ------------------------------------------------------------------------------


def test_layer_norms() -> None:
    assert (read_config(stored("dbrx")).norm.kind, read_config(stored("dbrx")).norm.bias) == ("layer", False)
    assert read_config(stored("dbrx")).norm.eps == 1e-5
    phi = read_config(stored("phimoe", rms_norm_eps=0.25))
    assert (phi.norm.kind, phi.norm.bias, phi.norm.eps) == ("layer", True, 0.25)
    assert {layer.norm for layer in phi.layers} == {phi.norm}
    assert read_config(stored("llama")).norm.kind == "rms"


def test_biases_of_mlps_and_heads() -> None:
    def biases(family: str, **changes: Any) -> tuple[bool, bool, bool]:
        config = read_config(stored(family, **changes))
        dense = [layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, MLPConfig)]
        return config.head_bias, any(part.bias for part in dense), experts_of(config).shared_bias

    assert biases("ernie4_5_moe", use_bias=True) == (True, True, True)
    assert biases("ernie4_5_moe") == (False, False, False)
    assert biases("deepseek_v2", mlp_bias=True) == (False, True, True)
    assert biases("phimoe", lm_head_bias=True) == (True, False, False)
    assert not experts_of(read_config(stored("ernie4_5_moe", use_bias=True))).expert.bias


# --- what does not add up --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "part"),
    [
        ("deepseek_v2", {"n_routed_experts": 6}, "6 experts cannot be in 4 equal groups"),
        ("deepseek_v3", {"topk_group": 5}, "5 groups are kept of 4"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "5 experts per token do not fit in 2 groups of 2"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 8}, "a group is judged by its two best experts, and each has one"),
        ("glm4_moe", {"n_group": 0}, "groups is 0, not positive"),
        ("deepseek_v3", {"topk_group": -1}, "kept_groups is -1, not positive"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_rank is 0"),
        ("deepseek_v3", {"kv_lora_rank": -2}, "kv_rank is -2, which is negative"),
        ("deepseek_v3", {"q_lora_rank": 0}, "query_rank is 0, not positive"),
        ("deepseek_v3", {"qk_nope_head_dim": 0}, "nope_dim is 0"),
        ("deepseek_v3", {"v_head_dim": 0}, "value_dim is 0"),
        *(("deepseek_v3", {"qk_rope_head_dim": dim}, f"{dim} dimensions are rotated, but rotary") for dim in (0, 5)),
        ("deepseek_v3", {"v_head_dim": 2**30}, "4 heads are 4294967328 wide together"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_sparse is -1, which is negative"),
        ("glm4_moe", {"n_shared_experts": 1001}, "num_shared is 1001, and 1000 is the most"),
        ("glm4_moe", {"moe_intermediate_size": 2**30}, "shared experts are 2147483648 wide together"),
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, "last_sparse is -2"),
        ("ernie4_5_moe", {"moe_norm_min": -1e-9}, "norm_floor is -1e-09, not positive"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "sparse_step is 0, not positive"),
        ("ernie4_5_moe", {"intermediate_size": None}, "a dense layer needs a width, and it is None"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "experts_per_token has 2 entries for 3 layers"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2, 5]}, "5 of 4 experts per token"),
        ("hunyuan_v1_moe", {"moe_topk": [0, 2, 2]}, "0 of 4 experts per token"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "rope_layers has 2 entries for 3 layers"),
        ("llama4_text", {"no_rope_layers": [1, 0, 2]}, "rope_layers has 2 in place of 0 or 1"),
        ("llama4_text", {"no_rope_layer_interval": 0}, "no_rope_interval is 0, not positive"),
        ("llama4_text", {"moe_layers": [3]}, "layer 3 is named as holding experts, but there are 3 layers"),
        ("llama4_text", {"moe_layers": [-1]}, "layer -1 is named as holding experts"),
        ("llama4_text", {"layer_types": [CHUNKED] * 3, "attention_chunk_size": None}, "there is no length of a chunk"),
        ("llama4_text", {"layer_types": [CHUNKED] * 4}, "layer_types has 4 entries for 3 layers"),
        ("llama4_text", {"attention_chunk_size": 0}, "chunk is 0, not positive"),
        ("gpt_oss", {"swiglu_limit": None}, "clamp_limit is null"),
        ("llama4_text", {"floor_scale": 0}, "temperature_floor is 0, not positive"),
        ("llama4_text", {"attn_scale": float("nan")}, "temperature_scale is nan, not a finite number"),
        ("llama4_text", {"moe_layers": [], "intermediate_size_mlp": None}, "a dense layer needs a width"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "clamp_limit is 0.0, not positive"),
        ("gpt_oss", {"swiglu_alpha": float("inf")}, "clamp_alpha is inf, not a finite number"),
        ("phimoe", {"router_jitter_noise": -0.01}, "jitter is -0.01, which is negative"),
        ("phimoe", {"num_local_experts": 1}, "2 of 1 experts per token"),
        ("deepseek_v3", {"routed_scaling_factor": float("nan")}, "router_scale is nan, not a finite number"),
        ("minimax_m2", {"rotary_dim": 3}, "3 of 8 dimensions of a head are rotated, but rotary embedding needs"),
        ("minimax_m2", {"rotary_dim": 10}, "10 of 8 dimensions of a head are rotated"),
        ("minimax_m2", {"rotary_dim": 0}, "0 of 8 dimensions of a head are rotated"),
        ("glm4_moe", {"head_dim": 6}, "3 of 6 dimensions of a head are rotated"),
        ("dbrx", {"attn_config.clip_qkv": 0}, "clip_qkv is 0, not positive"),
        ("dbrx", {"attn_config.kv_n_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
    ],
)
def test_what_does_not_add_up(family: str, changes: dict[str, Any], part: str) -> None:
    assert part in message(stored(family, **changes))
