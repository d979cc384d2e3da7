"""The supported families, one table file for each `model_type`, and how to find the one of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from novalm_jax.errors import ConfigError
from novalm_jax.models.families.family import Family

FAMILIES: Final = (
    *("dbrx", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "hunyuan_v1_moe"),
    *("kimi_k2", "llama", "llama4", "llama4_text", "minimax_m2", "mistral", "mixtral", "olmoe", "phimoe"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
"""Every `model_type` with a table; the table is `FAMILY` in the module of that name."""


def find_family(stored: Mapping[str, Any]) -> Family:
    """The table for this `config.json`, as a dictionary.

    Raises:
      ConfigError: no `model_type`, or one without a table.
    """
    model_type = stored.get("model_type") if isinstance(stored, Mapping) else None
    if not isinstance(model_type, str):
        raise ConfigError("config.json has no model_type, so nothing says which network this is.")
    if model_type not in FAMILIES:
        raise ConfigError(f"Models of type {model_type!r} are not supported yet; these are: {', '.join(FAMILIES)}.")
    family: Family = import_module(f"novalm_jax.models.families.{model_type}").FAMILY
    return family
