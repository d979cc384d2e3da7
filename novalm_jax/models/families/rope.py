"""Rotary embedding settings of a `config.json`, in either dialect.

The hub's files carry `rope_theta` and `rope_scaling` at the top level; newer writers nest both in `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from novalm_jax.config import RopeConfig
from novalm_jax.errors import ConfigError

_ORIGINAL: Final = "original_max_position_embeddings"
ROPE_FIELDS: Final = ("rope_theta", "rope_scaling", "rope_parameters", _ORIGINAL)

# Which entries of the dictionary each kind reads; `?` marks those with a default.
_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings?"),
    "yarn": (
        *("factor", "original_max_position_embeddings?", "beta_fast?", "beta_slow?", "attention_factor?"),
        *("mscale?", "mscale_all_dim?", "truncate?"),
    ),
}


def read_rope(stored: Mapping[str, Any], default_theta: float, *, context_length: int) -> RopeConfig:
    """The rotary embedding that `config.json` asks for. `context_length` is the model's, in tokens.

    Raises:
      ConfigError: an unknown kind, an entry the kind does not read, a missing or mistyped one, or dialects at odds.
    """
    settings = _merged(stored)
    kind: Any = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    if kind not in tuple(_KINDS):
        raise ConfigError(f"config.json: rotary embedding of kind {kind!r} is not supported ({', '.join(_KINDS)} are).")
    outside = {"rope_theta": settings.pop("rope_theta", None), _ORIGINAL: stored.get(_ORIGINAL)}
    if unusable := [f"{name} = {value!r}" for name, value in outside.items() if value is not None and _odd(value)]:
        raise ConfigError(f"config.json: {', '.join(unusable)}: a positive number is needed.")
    values = _numbers(kind, settings)
    original = 0
    if kind in ("dynamic", "llama3", "yarn"):
        # Dynamic scaling starts where the model's own context ends, whatever else is written.
        inner = None if kind == "dynamic" else outside[_ORIGINAL] or values.get(_ORIGINAL)
        original = int(inner or context_length)
    rope: dict[str, Any] = {
        name: values[name] for name in ("factor", "low_freq_factor", "high_freq_factor") if name in values
    }
    if kind == "yarn":
        rope |= _yarn(values)
    return RopeConfig(theta=float(outside["rope_theta"] or default_theta), kind=kind, original_context=original, **rope)


def stretched_context(rope: RopeConfig, context_length: int) -> int:
    """Tokens of context that the model reaches with this rotary embedding.

    Dynamic scaling begins where `max_position_embeddings` ends, and goes on to its factor times that. For YaRN writers
    put the stretched length there, or leave the original one. The other kinds leave no doubt: it is as written.
    """
    if rope.kind == "dynamic":
        return int(context_length * rope.factor)
    if rope.kind == "yarn":
        return max(context_length, int(rope.original_context * rope.factor))
    return context_length


def _merged(stored: Mapping[str, Any]) -> dict[str, Any]:
    """One dictionary from both dialects; where both speak they must agree."""
    nested = stored.get("rope_parameters") or {}
    scaling = stored.get("rope_scaling") or {}
    for name, value in (("rope_parameters", nested), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {name} should be an object, and is {value!r}.")
    top = {"rope_theta": stored["rope_theta"]} if stored.get("rope_theta") is not None else {}
    merged: dict[str, Any] = {}
    for part in (nested, scaling, top):
        for name, value in part.items():
            if merged.setdefault(name, value) != value:
                raise ConfigError(
                    f"config.json gives the rotary setting {name} twice, as {merged[name]!r} and as {value!r}. "
                    "Keep either rope_parameters or rope_theta with rope_scaling."
                )
    partial = merged.pop("partial_rotary_factor", None)
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"config.json: partial_rotary_factor = {partial!r} is not supported by this family.")
    return merged


def _numbers(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The entries this kind reads, checked; null stands for absent where there is a default."""
    wanted = {name.rstrip("?"): not name.endswith("?") for name in _KINDS[kind]}
    problems = [f"{name} = {value!r} has no meaning there" for name, value in settings.items() if name not in wanted]
    values = {}
    for name, required in wanted.items():
        value = settings.get(name)
        if value is None:
            if required:
                problems.append(f"{name} is missing")
        elif type(value) is not bool if name == "truncate" else _odd(value):
            problems.append(f"{name} = {value!r} is not usable")
        else:
            values[name] = value
    if problems:
        raise ConfigError(f"config.json: rotary embedding of kind {kind!r}: {'; '.join(problems)}.")
    return values


def _odd(value: Any) -> bool:
    """Whether this is no positive number."""
    return type(value) not in (int, float) or not value > 0


def _yarn(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of YaRN with the reference's defaults; cos and sin are scaled by its attention factor."""
    factor, mscale, all_dim = values["factor"], values.get("mscale"), values.get("mscale_all_dim")
    attention = _yarn_attention(factor, mscale) / _yarn_attention(factor, all_dim) if mscale and all_dim else None
    return {
        "beta_fast": values.get("beta_fast", 32.0),
        "beta_slow": values.get("beta_slow", 1.0),
        "attention_factor": values.get("attention_factor", attention or _yarn_attention(factor, 1.0)),
        "truncate": values.get("truncate", True),
    }


def _yarn_attention(factor: float, mscale: float) -> float:
    """Attention temperature of arXiv:2309.00071, equation 22, generalised by DeepSeek's mscale."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
