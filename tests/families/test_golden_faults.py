"""Faults that the comparisons with golden logits would catch: each is made, and is far out of tolerance."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from golden_helpers import GOLDEN, TOLERANCE, golden, whole
from novalm_jax.checkpoint.load import Checkpoint, load_model
from novalm_jax.kernels import attention as attention_kernel
from novalm_jax.models import moe


def change(case: str, **changes: Any) -> float:
    """How far the logits of a case are from the golden ones with other values of these attributes, wherever in the
    configuration they are; `rope_` and `router_` begin names of attributes of those parts."""
    checkpoint = Checkpoint.open(GOLDEN / case)
    found: set[str] = set()
    config = changed(checkpoint.config, changes, found)
    assert found == set(changes)
    model = dataclasses.replace(checkpoint, config=config).load("float32", lambda _, buffer: jax.device_put(buffer))
    return float(np.abs(whole(model, golden(case).ids) - golden(case).logits).max())


def changed(part: Any, changes: dict[str, Any], found: set[str], prefix: str = "") -> Any:
    """A part of a configuration with `changes` in it and in its own parts."""
    values: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(part)):
        value = getattr(part, name)
        if (key := prefix + name) in changes:
            found.add(key)
            values[name] = changes[key]
        elif isinstance(value, tuple):
            values[name] = tuple(changed(v, changes, found) if dataclasses.is_dataclass(v) else v for v in value)
        elif dataclasses.is_dataclass(value):
            values[name] = changed(value, changes, found, f"{name}_" if name in ("rope", "router", "norm") else "")
    return dataclasses.replace(part, **values)


def without_sinks() -> float:
    """As `change`, for a model whose sinks take nothing away."""
    model = load_model(GOLDEN / "gpt_oss")
    for layer in model.layers:
        layer.attention.sinks.set_value(jnp.full_like(layer.attention.sinks.get_value(), -1e30))
    return float(np.abs(whole(model, golden("gpt_oss").ids) - golden("gpt_oss").logits).max())


FAULTS: dict[str, Callable[[], float]] = {
    "router weights not renormalised": lambda: change("qwen3_moe", router_renormalise=False),
    "router weights renormalised": lambda: change("olmoe", router_renormalise=True),
    "one expert too few": lambda: change("mixtral", experts_per_token=1),
    "softmax before the choice": lambda: change("granitemoe", router_choose_first=False),
    "another activation": lambda: change("llama", activation="gelu"),
    "window off": lambda: change("mistral", window=None),
    "window one too long": lambda: change("mixtral-window", window=8),
    "another rotary base": lambda: change("mixtral", rope_theta=1e4),
    "plain frequencies": lambda: change("llama", rope_kind="default"),
    "attention factor dropped": lambda: change("llama-yarn", rope_attention_factor=1.0),
    "clipping off": lambda: change("olmoe-clip", clip_qkv=None),
    "attention scale": lambda: change("granitemoe", scale=8**-0.5),
    "residual multiplier dropped": lambda: change("granitemoe", residual_multiplier=1.0),
    "embedding multiplier dropped": lambda: change("granitemoe", embedding_multiplier=1.0),
    "logits divisor dropped": lambda: change("granitemoe", logits_divisor=1.0),
    "another norm epsilon": lambda: change("llama-hub", norm_eps=1e-6),
    "the norms of latents with the epsilon of the others": lambda: change("deepseek_v2-hub", norm_eps=0.05),
    "second correction of YaRN dropped": lambda: change("deepseek_v2-full", scale=24**-0.5),
    "halves in place of pairs": lambda: change("deepseek_v3", rope_pairs=False),
    "pairs in place of halves": lambda: change("deepseek_v3-plain", rope_pairs=True),
    "groups not looked at": lambda: change("deepseek_v3", router_groups=1),
    "one group too many": lambda: change("deepseek_v2-full", router_kept_groups=3),
    "groups judged by their best alone": lambda: change("deepseek_v3", router_group_rule="max"),
    "groups judged by their two best": lambda: change("deepseek_v2-full", router_group_rule="sum_of_two"),
    "scaling of routed experts dropped": lambda: change("deepseek_v3", router_scale=1.0),
    "softmax for sigmoid": lambda: change("minimax_m2", router_scores="softmax"),
    "sinks not looked at": without_sinks,
    "another limit": lambda: change("gpt_oss-clamp", limit=7.0),
    "another slope of the gate": lambda: change("gpt_oss", alpha=1.0),
    "gate and up as halves": lambda: change("gpt_oss", joint="halves"),
    "gate and up in turn": lambda: change("llama4_text", joint="alternate"),
    "chunks not looked at": lambda: change("llama4_text-chunk", chunk=None),
    "chunk one too long": lambda: change("llama4_text-chunk", chunk=9),
    "temperature off": lambda: change("llama4_text-chunk", temperature=None),
    "outputs scaled in place of inputs": lambda: change("llama4_text", router_scale_inputs=False),
    "no norm of q and k": lambda: change("llama4_text", qk_norm="none"),
    "norm before the rotation": lambda: change("hunyuan_v1_moe", norm_after_rope=False),
    "another stretch of the base": lambda: change("hunyuan_v1_moe-hub", rope_factor=1.0),
    "all of a head rotated": lambda: change("minimax_m2-rotary", rotary_dim=8),
    "another jitter": lambda: change("phimoe-jitter", router_jitter=0.0),
    "the long factor of cos and sin": lambda: change("phimoe-longrope", rope_long_attention_factor=1.0),
    "layer norm without its mean": lambda: change("dbrx", norm_kind="rms"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_configuration_is_far_out_of_tolerance(fault: str) -> None:
    assert FAULTS[fault]() > 10 * TOLERANCE


def test_the_unchanged_configuration_is_within_it() -> None:
    assert change("granitemoe", residual_multiplier=0.7) <= TOLERANCE


def test_a_dropped_router_weight_is_far_out_of_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    right = moe.choose
    monkeypatch.setattr(moe, "choose", lambda *a: right(*a)._replace(weights=jnp.ones_like(right(*a).weights)))
    assert change("mixtral") > 10 * TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_mask_is_far_out_of_tolerance(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_kernel._visible
    monkeypatch.setattr(attention_kernel, "_visible", lambda query, key, window: right(query + shift, key, window))
    assert change("llama") > 10 * TOLERANCE
