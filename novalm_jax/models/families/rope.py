"""Rotary embedding settings of a `config.json`, in either dialect.

The hub's files carry `rope_theta` and `rope_scaling` at the top level; newer writers nest both in `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from novalm_jax.config import MOST, RopeConfig
from novalm_jax.errors import ConfigError

_ORIGINAL: Final = "original_max_position_embeddings"
FRACTION: Final = "partial_rotary_factor"
ROPE_FIELDS: Final = ("rope_theta", "rope_scaling", "rope_parameters", _ORIGINAL)

# Beyond these, angles leave float32 or the numbers are slips of the pen.
_LEAST: Final = 1e-6
_MOST: Final[Mapping[str, float]] = {
    **{"rope_theta": 1e14, "factor": 1e6, "low_freq_factor": 1e6, "high_freq_factor": 1e6},
    **{"beta_fast": 1e6, "beta_slow": 1e6, "attention_factor": 1e3, "mscale": 1e3, "mscale_all_dim": 1e3},
    **{"alpha": 1e6, "short_mscale": 1e3, "long_mscale": 1e3, FRACTION: 1.0},
}

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
    "longrope": ("short_factor", "long_factor", "factor?", "attention_factor?", "original_max_position_embeddings?"),
}
# Of the families with two attention factors of their own, and of those with a fixed stretch of the base. The rest of
# what the latter write has no effect.
_TWO_MSCALES: Final = ("short_factor", "long_factor", "short_mscale", "long_mscale", _ORIGINAL)
_ALPHA: Final = ("alpha", "factor?", "beta_fast?", "beta_slow?", "mscale?", "mscale_all_dim?")


@dataclass(frozen=True)
class RopeDialect:
    """How a family's rotary settings differ from the usual ones.

    Attributes:
      theta: the base frequency where the configuration names none.
      fraction: the share of a head's dimensions that is rotated where the configuration gives none; None: the family
        knows no such setting, and rotates all.
      settings: what stands for the settings where none are given, not even empty ones.
      two_mscales: kind `longrope` scales cos and sin by `short_mscale` or `long_mscale` and keeps the frequencies of
        `short_factor` at any length, as the reference implementation does (transformers' phimoe).
      alpha: kind `dynamic` with an `alpha` stretches the base once and for all (Hunyuan).
    """

    theta: float = 10000.0
    fraction: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    two_mscales: bool = False
    alpha: bool = False


def read_rope(stored: Mapping[str, Any], dialect: RopeDialect, *, context_length: int) -> RopeConfig:
    """The rotary embedding that `config.json` asks for. `context_length` is the model's, in tokens.

    Raises:
      ConfigError: an unknown kind, an entry the kind does not read, a missing, mistyped or senseless one, or dialects
        at odds.
    """
    settings = _merged(stored)
    settings.pop(FRACTION, None)
    theta = settings.pop("rope_theta", None)
    if not settings and stored.get("rope_parameters") is None and not stored.get("rope_scaling"):
        settings = dict(dialect.settings)
    given = [settings.pop(name, None) for name in ("rope_type", "type")]
    kinds = [name for name in given if name is not None] or ["default"]
    kind: Any = kinds[0]
    if kinds[-1] != kind:
        raise ConfigError(
            f"config.json gives the kind of rotary embedding twice, as {kind!r:.60} and {kinds[-1]!r:.60}."
        )
    known = ("default", "longrope") if dialect.two_mscales else tuple(_KINDS)
    if kind not in known:
        raise ConfigError(
            f"config.json: rotary embedding of kind {kind!r:.60} is not supported ({', '.join(known)} are)."
        )
    outside = {"rope_theta": theta, _ORIGINAL: stored.get(_ORIGINAL)}
    if faults := [fault for name, value in outside.items() if value is not None and (fault := _fault(name, value))]:
        raise ConfigError(f"config.json: {'; '.join(faults)}.")
    wanted = _KINDS[kind]
    if kind == "longrope" and dialect.two_mscales:
        wanted = _TWO_MSCALES
    elif kind == "dynamic" and dialect.alpha and settings.get("alpha"):
        kind, wanted = "ntk", _ALPHA
    values = _numbers(kind, wanted, settings)
    original = 0
    if kind in ("dynamic", "llama3", "yarn", "longrope"):
        # Dynamic scaling starts where the model's own context ends, whatever else is written.
        inner = None if kind == "dynamic" else outside[_ORIGINAL] or values.get(_ORIGINAL)
        if dialect.two_mscales and inner != values[_ORIGINAL]:
            raise ConfigError(f"config.json gives {_ORIGINAL} twice, as {inner} and as {values[_ORIGINAL]}.")
        original = int(inner or context_length)
    rope: dict[str, Any] = {
        name: values[name] for name in ("factor", "low_freq_factor", "high_freq_factor") if name in values
    }
    if kind == "ntk":
        rope["factor"] = values["alpha"]
    elif kind == "yarn":
        rope |= _yarn(values)
    elif kind == "longrope":
        rope |= _longrope(values, context_length / original, original)
    config = RopeConfig(theta=float(theta or dialect.theta), kind=kind, original_context=original, **rope)
    if contradiction := _contradiction(config):
        raise ConfigError(f"config.json: rotary embedding of kind {kind!r}: {contradiction}.")
    return config


def read_fraction(stored: Mapping[str, Any], dialect: RopeDialect) -> float | None:
    """The share of a head's dimensions that is rotated, as `config.json` gives it, or None.

    Raises:
      ConfigError: it is not a share, or the family knows none.
    """
    inner, outer = _merged(stored).get(FRACTION), stored.get(FRACTION)
    if inner is not None and outer is not None and inner != outer:
        raise ConfigError(f"config.json gives {FRACTION} twice, as {inner!r:.60} and as {outer!r:.60}.")
    value = outer if inner is None else inner
    if value is None:
        return None
    if fault := _fault(FRACTION, value):
        raise ConfigError(f"config.json: {fault}.")
    if dialect.fraction is None and value != 1:
        raise ConfigError(f"config.json: {FRACTION} = {value!r:.60} is not supported by this family.")
    return float(value)


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
    parts = []
    for name in ("rope_parameters", "rope_scaling"):
        value = stored.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {name} should be an object, and is {value!r:.60}.")
        parts.append(value or {})
    top = {"rope_theta": stored["rope_theta"]} if stored.get("rope_theta") is not None else {}
    merged: dict[str, Any] = {}
    for part in (*parts, top):
        for name, value in part.items():
            if name in merged and merged[name] != value:
                raise ConfigError(
                    f"config.json gives the rotary setting {name} twice, as {merged[name]!r:.60} and as {value!r:.60}. "
                    "Keep either rope_parameters or rope_theta with rope_scaling."
                )
            merged[name] = value
    return merged


def _numbers(kind: str, names: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The entries this kind reads, checked; null stands for absent where there is a default."""
    wanted = {name.rstrip("?"): not name.endswith("?") for name in names}
    problems = [
        f"{name} = {value!r:.60} has no meaning there" for name, value in settings.items() if name not in wanted
    ]
    values = {}
    for name, required in wanted.items():
        value = settings.get(name)
        if value is None:
            if required:
                problems.append(f"{name} is missing")
        elif fault := _fault(name, value):
            problems.append(fault)
        else:
            values[name] = value
    if problems:
        raise ConfigError(f"config.json: rotary embedding of kind {kind!r}: {'; '.join(problems)}.")
    return values


def _fault(name: str, value: Any) -> str | None:
    """Why the setting cannot have this value, or None."""
    if name == "truncate":
        usable, wanted = type(value) is bool, "true or false"
    elif name == _ORIGINAL:
        usable, wanted = type(value) is int and 1 <= value <= MOST, f"a whole number from 1 to {MOST}"
    elif name in ("short_factor", "long_factor"):
        usable = isinstance(value, list | tuple) and bool(value) and all(_is_factor(factor) for factor in value)
        wanted = "a list of positive numbers"
    else:
        # Neither NaN nor an integer too large for a float passes: it is compared, not converted.
        usable = type(value) in (int, float) and _LEAST <= value <= _MOST[name]
        wanted = f"a number from {_LEAST:g} to {_MOST[name]:g}"
    return None if usable else f"{name} = {value!r:.60} is not usable ({wanted} is)"


def _is_factor(value: Any) -> bool:
    return type(value) in (int, float) and _LEAST <= value <= _MOST["factor"]


def _contradiction(rope: RopeConfig) -> str | None:
    """Why no frequencies follow from these settings, though each is usable by itself, or None."""
    if rope.kind == "llama3" and rope.high_freq_factor < rope.low_freq_factor:
        return (
            f"high_freq_factor = {rope.high_freq_factor} must not be less than low_freq_factor = {rope.low_freq_factor}"
        )
    if rope.kind == "yarn" and rope.beta_fast < rope.beta_slow:
        return f"beta_fast = {rope.beta_fast} must not be less than beta_slow = {rope.beta_slow}"
    if rope.kind == "yarn" and not rope.theta > 1:
        return f"rope_theta = {rope.theta} must be more than 1"
    return None


def _yarn(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of YaRN with the reference's defaults; cos and sin are scaled by its attention factor."""
    factor, mscale, all_dim = values["factor"], values.get("mscale"), values.get("mscale_all_dim")
    attention = _yarn_attention(factor, mscale) / _yarn_attention(factor, all_dim) if mscale and all_dim else None
    return {
        "beta_fast": values.get("beta_fast", 32.0),
        "beta_slow": values.get("beta_slow", 1.0),
        "attention_factor": values.get("attention_factor", attention or _yarn_attention(factor, 1.0)),
        "truncate": values.get("truncate", True),
        "softmax_factor": _yarn_attention(factor, all_dim) ** 2 if all_dim else 1.0,
    }


def _longrope(values: Mapping[str, Any], stretch: float, original: int) -> dict[str, Any]:
    """The entries of LongRoPE; `stretch` is the model's context by the original one, in tokens."""
    short, long = tuple(values["short_factor"]), tuple(values["long_factor"])
    if "short_mscale" in values:
        return {
            "short_factors": short,
            "long_factors": short,
            "attention_factor": values["short_mscale"],
            "long_attention_factor": values["long_mscale"],
        }
    factor = values.get("factor", stretch)
    attention = values.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return {
        "short_factors": short,
        "long_factors": long,
        "attention_factor": attention,
        "long_attention_factor": attention,
    }


def _yarn_attention(factor: float, mscale: float) -> float:
    """Attention temperature of arXiv:2309.00071, equation 22, generalised by DeepSeek's mscale."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
