"""`AsyncLLM`: an `LLM` for tasks of event loops, whose requests run together. No loop ever waits for a step.

Knows what is awaited, and gives it the meaning that it has for `LLM`. The threads are the `Stepper`'s: what is here
runs on the thread of the loop that calls it, and only reads what a call's requests have so far.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from novalm_jax.engine.llm import LLM, Messages, Prompt
from novalm_jax.engine.report import Report
from novalm_jax.engine.request import Completion, Request
from novalm_jax.engine.stepper import Call, Stepper
from novalm_jax.errors import EngineError, RequestError, WriteError
from novalm_jax.options import SamplingParams

_log = logging.getLogger("novalm_jax")


class AsyncLLM:
    """A language model that generates text for many tasks at once, of any number of loops in any threads.

    Also an async context manager: leaving it closes it. Dropped without, its threads end and the LLM is left as it is,
    to whoever has it. With the interpreter they end as well, after the step at hand.

    Attributes:
      llm: the `LLM` that runs everything. May be used as well, in other threads than those of loops, which it blocks.
    """

    def __init__(self, model: str | Path | None = None, **options: Any):
        """Loads a checkpoint, and takes its time: in a loop, `await asyncio.to_thread(AsyncLLM, model)` does not block.

        Raises:
          OptionError, CheckpointError, ConfigError, BudgetError: as `LLM`, whose arguments these are.
        """
        self.llm = LLM(model, **options)
        self._stepper = Stepper(self.llm)
        weakref.finalize(self, self._stepper.drop).atexit = False
        # Of these, the latest runs first: JAX, which came before, is still there when the last step ends.
        self._at_exit = partial(_end_at_exit, weakref.ref(self._stepper))
        atexit.register(self._at_exit)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[Completion]:
        """Completes prompts, as `LLM.generate` does. To cancel it ends its requests, and frees their pages.

        Raises:
          RequestError, CheckpointError, ConfigError, EngineError: as `LLM.generate`.
        """
        return await self._completions(partial(self.llm.requests, prompts, sampling, priority))

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[Completion]:
        """Answers conversations, as `LLM.chat` does. To cancel it ends its requests, and frees their pages.

        Raises:
          RequestError, CheckpointError, ConfigError, EngineError: as `LLM.chat`.
        """
        how = {"tools": tools, "chat_template": chat_template, **variables}
        return await self._completions(partial(_chat, self.llm, messages, sampling, how))

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, *, priority: int = 0) -> AsyncTextIterator:
        """The text of one completion, piece by piece as it becomes certain, never half a character.

        The request begins now, and goes on however slowly its text is read. To close the iterator, to drop it, or to
        cancel who waits for a piece ends it. The iterator's `completion` is there once it is exhausted.

        Raises:
          RequestError, CheckpointError, ConfigError, EngineError: as `LLM.stream`, where the iterator is read.
        """
        return AsyncTextIterator(self, self._stepper.begin(partial(_single, self.llm, prompt, sampling, priority)))

    def report(self) -> Report:
        """What has been done so far, and what is where."""
        return self.llm.report()

    async def aclose(self) -> None:
        """Ends what is running, and closes the LLM. Closing twice is fine; cancelled, it still closes.

        Raises:
          WriteError: a file cannot be written; everything else is done.
        """
        self._stepper.close()
        end = self._stepper.end
        await end.until(lambda: end.over)
        # To say so was the last thing that it did.
        self._stepper.thread.join()
        atexit.unregister(self._at_exit)
        if end.error is not None:
            raise end.error

    def __repr__(self) -> str:
        return f"<AsyncLLM of {self.llm!r}>"

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            await self.aclose()
        except WriteError as error:
            if kind is None:
                raise
            # What ended the run counts for more.
            _log.warning("%s", error)

    async def _completions(self, make: Callable[[], list[Request]]) -> list[Completion]:
        call = self._stepper.begin(make, whole=True)
        try:
            await call.until(lambda: call.over)
        finally:
            call.cancel()
        if call.error is not None:
            raise call.error
        return [request.completion() for request in call.requests or ()]


class AsyncTextIterator(AsyncIterator[str]):
    """Pieces of one completion's text, as `AsyncLLM.stream` gives them. For one task at a time."""

    def __init__(self, llm: AsyncLLM, call: Call):
        # Kept: dropped, it would end its requests.
        self._llm = llm
        self._call = call
        self._given = 0

    async def __anext__(self) -> str:
        try:
            await self._call.until(lambda: self._call.over or self._unread())
        except BaseException:
            self._call.cancel()
            raise
        if self._unread():
            self._given += 1
            return self._pieces[self._given - 1]
        if self._call.error is not None:
            raise self._call.error
        raise StopAsyncIteration

    @property
    def completion(self) -> Completion:
        """The outcome, once the text has ended or the iterator is closed.

        Raises:
          EngineError: not yet, or it never began.
        """
        if not (self._call.over and self._call.requests):
            raise EngineError("The completion is not finished; read its text to the end, or close the stream, first.")
        return self._call.requests[0].completion()

    async def aclose(self) -> None:
        """Ends the request where it is."""
        self._call.cancel()
        await self._call.until(lambda: self._call.over)

    def __del__(self) -> None:
        self._call.cancel()

    @property
    def _pieces(self) -> list[str]:
        return self._call.requests[0].pieces if self._call.requests else []

    def _unread(self) -> bool:
        """Whether a piece is there to be given. Passes by empty ones."""
        pieces = self._pieces
        while self._given < len(pieces) and not pieces[self._given]:
            self._given += 1
        return self._given < len(pieces)


def _chat(
    llm: LLM,
    messages: Messages | Sequence[Messages],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    how: Mapping[str, Any],
) -> list[Request]:
    return llm.requests(llm.chat_prompts(messages, **how), sampling)


def _single(llm: LLM, prompt: Prompt, sampling: SamplingParams | None, priority: int) -> list[Request]:
    requests = llm.requests([prompt], sampling, priority)
    if len(requests) != 1:
        raise RequestError(f"n: a stream is one completion, and {len(requests)} are asked for; use generate().")
    return requests


def _end_at_exit(stepper: weakref.ref[Stepper]) -> None:
    running = stepper()
    if running is not None:
        running.drop()
        running.thread.join()
