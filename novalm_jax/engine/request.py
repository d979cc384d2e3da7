"""One completion on its way: what was asked, what has been generated, and why it ended. Knows no device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from novalm_jax.engine.sampling import ResolvedSampling
from novalm_jax.errors import CheckpointError, EngineError
from novalm_jax.kv.pages import Held, Moved
from novalm_jax.text.detokenizer import TextStream

FinishReason = Literal["stop", "length", "abort"]
Logprobs = list[dict[int, float]]


@dataclass(frozen=True)
class Completion:
    """One generated text.

    Attributes:
      text: without end tokens and stop texts.
      token_ids: generated ids; an end token that ended the generation is the last of them.
      prompt_token_ids: what the model read.
      index: number of the prompt in the call.
      choice: number among the n completions of that prompt.
      finish_reason: "stop" (an end token or a stop text), "length" (max_tokens or the context), or "abort".
      logprobs: None, or for each generated token a dict id -> log-probability, the sampled one first.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    index: int
    choice: int
    finish_reason: FinishReason
    logprobs: Logprobs | None


class MovedOut(NamedTuple):
    """Pages of a request that are on the host: which they were, their content, and its bytes."""

    what: Moved
    saved: Any
    nbytes: int


@dataclass(eq=False)
class Request:
    """A completion that the engine works on. `max_tokens` is at least 1 and fits the context with the prompt."""

    prompt_ids: Sequence[int]
    sampling: ResolvedSampling
    max_tokens: int
    end_ids: frozenset[int]
    text_stream: TextStream | None = None
    index: int = 0
    choice: int = 0
    priority: int = 0
    """Those with a higher one come first."""
    leader: Request | None = None
    """Whose prompt it shares, for as long as that is on its way."""
    prefix_seed: bytes = b""
    """Stands for what its prompt is computed with: pages are shared where it is the same."""
    number: int = -1
    """Place in the order of arrival."""
    row: int | None = None
    """Of a decode step; None where it has no pages on the device."""
    held: Held | None = None
    moved: MovedOut | None = None
    computed: int = 0
    """Tokens of the prompt that pages hold."""
    passes: int = 0
    """Through the model, with parts of the prompt."""
    waited: int = 0
    """Steps for which it had no row, or a prompt that did not go on."""
    used: int = 0
    """The last step that computed something of it."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    token_times: tuple[float, float] | None = None
    """When the first and the latest token were chosen, on `time.perf_counter`'s clock."""
    error: Exception | None = None
    dropped: bool = False
    """Nobody waits for it any more; may be set at any time, from any thread."""

    @property
    def length(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def most_tokens(self) -> int:
        """Tokens of prompt and output, should it run to its end."""
        return len(self.prompt_ids) + self.max_tokens

    @property
    def prompt_done(self) -> bool:
        """Whether pages hold all of the prompt."""
        return self.computed >= len(self.prompt_ids)

    @property
    def ended(self) -> bool:
        """Whether it has run to its end.

        Raises:
          CheckpointError: weights that it needed could not be read.
          EngineError: a step failed and took it along, or the LLM was closed.
        """
        if isinstance(self.error, CheckpointError):
            raise CheckpointError(str(self.error)) from self.error
        if isinstance(self.error, EngineError):
            raise EngineError(str(self.error)) from self.error
        if self.error is not None:
            raise EngineError(f"A step failed, and this request is lost with it: {self.error}") from self.error
        return self.finish_reason is not None

    def accept(self, token: int, logprobs: dict[int, float] | None) -> None:
        """Takes the next token, and ends where it, the text, or the number of tokens says so."""
        now = time.perf_counter()
        self.token_times = (self.token_times[0] if self.token_times else now, now)
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token in self.end_ids:
            self.finish("stop")
            return
        if self.text_stream is not None:
            self.pieces.append(self.text_stream.push(token))
            if self.text_stream.stopped:
                self.finish("stop")
                return
        if len(self.token_ids) >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """Ends the request and lets go of text that was held back."""
        if self.finish_reason is None:
            if self.text_stream is not None:
                self.pieces.append(self.text_stream.finish())
            # Last: who sees it, perhaps in another thread, sees all of the text.
            self.finish_reason = reason

    def completion(self) -> Completion:
        """The outcome, once there is one."""
        assert self.finish_reason is not None
        return Completion(
            text="".join(self.pieces),
            token_ids=list(self.token_ids),
            prompt_token_ids=list(self.prompt_ids),
            index=self.index,
            choice=self.choice,
            finish_reason=self.finish_reason,
            logprobs=self.logprobs if self.sampling.logprobs is not None else None,
        )
