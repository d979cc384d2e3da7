"""Configurations of published models are read or refused as they should be, and give networks of the published size.

`tests/published` holds what is known of the models.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict
from typing import Any

import jax
import pytest

from config_helpers import message, read_config
from novalm_jax.checkpoint.load import abstract_model
from novalm_jax.checkpoint.mapping import TensorOut, written_tensors
from novalm_jax.config import ModelConfig
from novalm_jax.models.families import FAMILIES, find_family
from novalm_jax.models.params import parameters_of
from published_helpers import CONFIGS, TENSORS, published


def readable(name: str) -> dict[str, Any]:
    """The same of the model in bfloat16, and of Phi-3.5-MoE with made-up lists where the real ones are not known."""
    config = {field: value for field, value in published(name).items() if field != "quantization_config"}
    if name == "phi-3.5-moe":
        factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
        config["rope_scaling"] = {**config["rope_scaling"], **factors}
    return config


# --- what is read, and what is refused and why ------------------------------------------------------------------------

# Parameters without those of layers for multi-token prediction; and the total, in thousand millions, that the authors
# give, or the makers of a file, where it is of the same parts.
SUPPORTED: dict[str, tuple[int, str | None]] = {
    "dbrx-instruct": (131_596_523_520, "132"),
    "deepseek-r1": (671_026_419_200, "671"),
    "deepseek-v2": (235_741_434_880, "236"),
    "deepseek-v2-lite": (15_706_484_224, "15.7"),
    "deepseek-v3": (671_026_419_200, "671"),
    "ernie-4.5-21b-a3b": (21_825_437_888, "21.8"),
    "glm-4.5": (352_797_829_024, None),
    "glm-4.5-air": (106_852_251_264, None),
    "glm-4.6": (352_797_829_024, None),
    "gpt-oss-120b": (116_829_156_672, "116.83"),
    "gpt-oss-20b": (20_914_757_184, "20.91"),
    "granite-3.0-3b-a800m": (3_298_793_472, "3.3"),
    "granite-3.1-1b-a400m": (1_334_628_352, "1.3"),
    "hunyuan-a13b": (80_393_183_232, "80.39"),
    "kimi-k2-instruct": (1_026_408_232_448, "1026"),
    "llama-4-maverick": (400_711_848_960, None),
    "llama-4-scout": (107_769_861_120, None),
    "minimax-m2.5": (228_689_764_864, "229"),
    "mixtral-8x22b-v0.1": (140_620_634_112, "141"),
    "mixtral-8x7b-v0.1": (46_702_792_704, "46.7"),
    "olmoe-1b-7b-0924": (6_919_161_856, "6.9"),
    "phi-3.5-moe": (41_873_153_344, "42"),
    "qwen1.5-moe-a2.7b": (14_315_784_192, "14.3"),
    "qwen2-57b-a14b": (57_408_658_944, "57.4"),
    "qwen3-235b-a22b": (235_093_634_560, "235"),
    "qwen3-30b-a3b": (30_532_122_624, "30.5"),
    "qwen3-coder-480b-a35b": (480_154_875_392, "480"),
    "wizardlm-2-8x22b": (140_620_634_112, "141"),
}
# Of those above, the files whose weights cannot be read, and the format they are in.
QUANTISED = {
    **dict.fromkeys(("deepseek-r1", "deepseek-v3", "kimi-k2-instruct", "minimax-m2.5"), "fp8"),
    **dict.fromkeys(("gpt-oss-120b", "gpt-oss-20b"), "mxfp4"),
}
INCOMPLETE = {"phi-3.5-moe": "kind 'longrope': short_factor is missing; long_factor is missing"}
OTHER_FAMILIES = {
    "deepseek-v3.2": "deepseek_v32",
    "deepseek-v4-flash": "deepseek_v4",
    "deepseek-v4-pro": "deepseek_v4",
    "gemma-4-26b-a4b": "gemma4",
    "glm-5": "glm_moe_dsa",
    "grok-1": "grok-1",
    "jamba-v0.1": "jamba",
    "mimo-v2-flash": "mimo_v2_flash",
    "minimax-m1-80k": "minimax_m1",
    "qwen3-next-80b-a3b": "qwen3_next",
    "qwen3.5-35b-a3b": "qwen3_5_moe",
}


def test_every_published_model_is_here() -> None:
    assert {*SUPPORTED, *OTHER_FAMILIES} == set(CONFIGS) - {"usual"}
    assert not set(SUPPORTED) & set(OTHER_FAMILIES) and set(TENSORS) < set(SUPPORTED)
    covered = {published(name)["model_type"] for name in SUPPORTED}
    # Dense families, and Llama 4's text model, which is published inside the other.
    assert set(FAMILIES) - covered == {"llama", "llama4_text", "mistral", "qwen2", "qwen3"}


@pytest.mark.parametrize("name", [name for name in SUPPORTED if name not in {**QUANTISED, **INCOMPLETE}])
def test_published_models_are_read_as_they_are(name: str) -> None:
    config = published(name)
    assert len(read_config(config).layers) == config.get("text_config", config).get(
        "num_hidden_layers", config.get("n_layers")
    )


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_files_are_refused_for_that_alone(name: str) -> None:
    config = published(name)
    assert message(config) == (
        f"config.json ({config['model_type']}): quantization_config: weights in the {QUANTISED[name]!r} format cannot "
        "be read yet; use the bfloat16 or float32 checkpoint of this model."
    )
    assert len(read_config(readable(name)).layers) == config["num_hidden_layers"]


@pytest.mark.parametrize("name", INCOMPLETE)
def test_incomplete_files_are_told_what_is_missing(name: str) -> None:
    assert INCOMPLETE[name] in message(published(name))
    assert len(read_config(readable(name)).layers) == published(name)["num_hidden_layers"]


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_other_families_are_refused_by_their_type(name: str) -> None:
    text = message(published(name))
    assert text.startswith(f"Models of type {OTHER_FAMILIES[name]!r} are not supported yet; these are: dbrx, ")
    assert all(family in text for family in FAMILIES)


# --- how large they are -----------------------------------------------------------------------------------------------


def size_of(config: ModelConfig) -> int:
    """Parameters. Layers that are alike are made once."""

    def made(*layers: Any) -> int:
        model = abstract_model(dataclasses.replace(config, layers=layers), "bfloat16")
        return sum(math.prod(parameter.shape) for parameter in parameters_of(model).values())

    rest = made()
    return rest + sum(count * (made(layer) - rest) for layer, count in Counter(config.layers).items())


@pytest.mark.parametrize("name", SUPPORTED)
def test_models_have_their_published_number_of_parameters(name: str) -> None:
    exact, total = SUPPORTED[name]
    assert size_of(read_config(readable(name))) == exact
    if total is not None:
        digits = len(total.partition(".")[2])
        assert f"{exact / 1e9:.{digits}f}" == total


def test_whole_models_have_as_many_bytes_as_their_index_files_say() -> None:
    mixtral = written("mixtral-8x22b-v0.1")
    assert len(mixtral) == 1_739
    assert 2 * sum(math.prod(tensor.shape) for tensor in mixtral) == 281_241_268_224
    # Published in MXFP4: 32 numbers of the experts' matrices are 16 bytes of digits in one tensor, and one byte of
    # scale in another; the rest is bfloat16.
    gpt = written("gpt-oss-20b")
    matrices = [tensor for tensor in gpt if tensor.name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    packed = sum(math.prod(tensor.shape) for tensor in matrices)
    assert len(gpt) + len(matrices) == 459
    assert packed * 17 // 32 + 2 * (sum(math.prod(tensor.shape) for tensor in gpt) - packed) == 13_761_264_768


# --- what their tensors are called ------------------------------------------------------------------------------------


def written(name: str, layers: int | None = None) -> list[TensorOut]:
    """The tensors of the model, or of one that ends after its first layers, as they are published."""
    config = read_config(readable(name))
    model = abstract_model(dataclasses.replace(config, layers=config.layers[:layers]), "bfloat16")
    parameters = {path: parameter.get_value() for path, parameter in parameters_of(model).items()}
    assert all(isinstance(value, jax.ShapeDtypeStruct) for value in parameters.values())
    return written_tensors(find_family(published(name)), {path: value.shape for path, value in parameters.items()})


def described(tensors: list[TensorOut], num_layers: int) -> dict[str, str]:
    """Shapes by name, with all layers and all experts as one: `3 of [8, 4] in 1, 2`."""
    where: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for tensor in tensors:
        numbered = re.sub(r"\b(layers|blocks)\.\d+\.", r"\1.{l}.", tensor.name)
        layer = re.search(r"\b(?:layers|blocks)\.(\d+)\.", tensor.name)
        pattern = re.sub(r"experts\.\d+\.", "experts.{e}.", numbered)
        where[pattern].append((str(list(tensor.shape)), int(layer.group(1)) if layer else -1))
    found = {}
    for pattern, places in where.items():
        shapes, layers = sorted({shape for shape, _ in places}), sorted({layer for _, layer in places})
        experts = f"{len(places) // len(layers)} of " if "{e}" in pattern else ""
        some = f" in {', '.join(map(str, layers))}" if layers != [-1] and len(layers) < num_layers else ""
        found[pattern] = experts + " or ".join(shapes) + some
    return found


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_have_their_published_names_and_shapes(name: str) -> None:
    layers = TENSORS[name]["layers"]
    assert described(written(name, layers), layers) == TENSORS[name]["tensors"]
