"""How the tokens of a request are chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from novalm_jax.errors import RequestError, UserError
from novalm_jax.options.checks import Checked, as_real, as_text, as_whole, shown

MAX_LOGPROBS = 20
"""Most log-probabilities a request may ask for per token (the limit of the OpenAI interface)."""


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How the tokens of one request are chosen. None means the checkpoint's own default, else the field's.

    Raises:
      RequestError: a value no sampler can honour; the message names the field.
    """

    _error: ClassVar[type[UserError]] = RequestError

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
        self._all_of("stop", as_text, "texts", (self.stop,) if isinstance(self.stop, str) else self.stop)
        self._all_of("stop_token_ids", as_whole, "token ids", self.stop_token_ids)
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
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def _all_of(self, name: str, read: Callable[[object], Any], what: str, values: Iterable[object] | None) -> None:
        """Makes the field a tuple; None is an empty one."""
        listed = tuple(values) if isinstance(values, Iterable) else () if values is None else (values,)
        items = tuple(map(read, listed))
        if None in items:
            raise RequestError(f"{name}: expected a list of {what}, got {shown(values)}.")
        object.__setattr__(self, name, items)


def _biases(given: object) -> dict[int, float]:
    """A `logit_bias` with plain numbers in it."""
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias: expected an object of token ids and numbers, got {shown(given)}.")
    biases = {}
    for key, value in given.items():
        token, bias = as_whole(key), as_real(value)
        if token is None:
            raise RequestError(f"logit_bias: {shown(key)} is not a token id.")
        if bias is None or math.isnan(bias):
            raise RequestError(f"logit_bias: the bias of token {shown(token)} is {shown(value)}, not a number.")
        biases[token] = bias
    return biases
