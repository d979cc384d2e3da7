"""Every option a user can set, once: command line, Python and server share these definitions.

Plain data with the checks that need nothing but the values themselves. Knows no file, no model and no JAX, so that
`--help` is quick.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from novalm_jax.errors import OptionError, RequestError

Dtype = Literal["float32", "bfloat16"]

MAX_LOGPROBS = 20
"""Most log-probabilities a request may ask for per token (the limit of the OpenAI interface)."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. None means the checkpoint's own default, else the field's.

    Raises:
      RequestError: a value no sampler can honour; the message names the field.
    """

    max_tokens: int | None = None
    """Most tokens to generate. None: as many as the context holds."""
    min_tokens: int = 0
    """End tokens are ruled out until this many tokens are generated."""
    temperature: float | None = None
    """0 takes the most likely token; 1 samples from the model's own distribution."""
    top_k: int | None = None
    """Sample only from the k most likely tokens (0: all)."""
    top_p: float | None = None
    """Sample only from the most likely tokens that hold this much probability (0: the most likely one)."""
    min_p: float | None = None
    """Drop tokens less likely than this fraction of the most likely one."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens in the prompt or the output (1: off)."""
    presence_penalty: float = 0.0
    """Taken once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for every time it was generated."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    seed: int | None = None
    """Makes this request's random choices repeatable, whatever else runs beside it."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation; they are not part of the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the generation, besides the checkpoint's own."""
    ignore_eos: bool = False
    """Go on after the checkpoint's end tokens."""
    logprobs: int | None = None
    """Log-probabilities to return per token besides the sampled one's own (at most 20)."""
    n: int = 1
    """Independent completions of each prompt."""

    def __post_init__(self) -> None:
        self._all_of("stop", str, "texts", (self.stop,) if isinstance(self.stop, str) else self.stop)
        self._all_of("stop_token_ids", int, "token ids", self.stop_token_ids)
        self._whole("max_tokens", 0)
        self._whole("min_tokens", 0)
        self._whole("top_k", 0)
        self._whole("n", 1)
        self._whole("logprobs", 0, MAX_LOGPROBS)
        self._whole("seed", -(2**63), 2**63 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens: {self.min_tokens} is more than max_tokens, which is {self.max_tokens}.")
        self._real("temperature", 0.0)
        self._real("top_p", 0.0, 1.0)
        self._real("min_p", 0.0, 1.0)
        self._real("repetition_penalty", math.ulp(0.0))
        self._real("presence_penalty")
        self._real("frequency_penalty")
        if any(not text for text in self.stop):
            raise RequestError("stop: an empty text would end every generation at once; leave it out.")
        for token, bias in (self.logit_bias or {}).items():
            if type(token) is not int:
                raise RequestError(f"logit_bias: {token!r} is not a token id.")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or math.isnan(bias):
                raise RequestError(f"logit_bias: the bias of token {token} is {bias!r}, not a number.")

    def _all_of(self, name: str, kind: type, what: str, values: Iterable[object] | None) -> None:
        """Makes the field a tuple; None is an empty one."""
        listed = tuple(values) if isinstance(values, Iterable) else () if values is None else (values,)
        if not all(type(value) is kind for value in listed):
            raise RequestError(f"{name}: expected a list of {what}, got {values!r}.")
        object.__setattr__(self, name, listed)

    def _whole(self, name: str, least: int, most: int | None = None) -> None:
        value = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or value < least
            or (most is not None and value > most)
        ):
            upto = "" if most is None else f" and at most {most}"
            raise RequestError(f"{name}: expected a whole number of at least {least}{upto}, got {value!r}.")

    def _real(self, name: str, least: float = -math.inf, most: float = math.inf) -> None:
        value = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RequestError(f"{name}: expected a number, got {value!r}.")
        if not least <= value <= most:
            bounds = f"of at least {least:g}" if least == 0 else "above 0"
            bounds += f" and at most {most:g}" if most < math.inf else ""
            raise RequestError(f"{name}: expected a number {bounds}, got {value}.")


@dataclass(frozen=True)
class EngineOptions:
    """How a model is held and run.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    device_memory: str | int = "auto"
    """Device memory to use at most: weights, KV cache and workspace together (8GiB, 500MB, 90%, auto)."""
    host_memory: str | int = "auto"
    """Pinned host memory to use at most (0: none)."""
    dtype: Dtype = "bfloat16"
    """What weights are rounded to and computed in."""
    context_length: str | int = "auto"
    """Tokens of prompt and output together; auto: the model's own, cut to what the memory holds."""
    max_batch: int = 8
    """Requests that are decoded together."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, for a quick next start."""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        _at_least("max_batch", self.max_batch, 1)
        context = self.context_length
        if isinstance(context, str) and context != "auto":
            if not context.isdecimal():
                raise OptionError(f"context_length: expected auto or a number of tokens, got {context!r}.")
            object.__setattr__(self, "context_length", int(context))
        if self.context_length != "auto":
            _at_least("context_length", self.context_length, 1)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options, in order."""
        return tuple(field.name for field in fields(cls))


def check_dtype(dtype: str) -> None:
    """Refuses a dtype that models are not computed in.

    Raises:
      OptionError: not one of `Dtype`.
    """
    if dtype not in get_args(Dtype):
        raise OptionError(f"dtype: {dtype!r} is not one of {', '.join(get_args(Dtype))}.")


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name}: expected a whole number of at least {least}, got {value!r}.")
