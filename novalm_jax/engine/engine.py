"""Requests -> tokens, step by step: which request has which row of the cache, and what each step runs.

Single-threaded by design: whoever waits for a request steps the engine, and a lock lets several threads wait. A step
admits waiting requests to free rows, in order, goes on with their prompts for as long as decoding may wait, and then
decodes one token for every running request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from novalm_jax.engine.executor import Executor, Prompt
from novalm_jax.engine.functions import Decoded
from novalm_jax.engine.request import Request
from novalm_jax.engine.sampler import Sampler
from novalm_jax.engine.sampling import greedy_suffices
from novalm_jax.errors import CheckpointError, EngineError

PREFILL_SLICE = 0.1
"""Seconds that a decode step waits for prompts at most, and for the layer that they are in."""


class _Prefill(NamedTuple):
    """Prompts on their way through the model."""

    requests: list[Request]
    progress: Generator[tuple[int, Decoded] | None]

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for one that is not through."""
        return any(
            request.finish_reason is None and not request.dropped and not request.token_ids for request in self.requests
        )


class Engine:
    """Runs requests on an executor, many at a time.

    Attributes:
      prompt_tokens: tokens of prompts that were prefilled.
      generated_tokens: tokens that were chosen.
      compute_seconds: time spent in prefill, decode and sampling.
    """

    def __init__(self, executor: Executor, sampler: Sampler):
        self._executor = executor
        self._sampler = sampler
        self._lock = threading.RLock()
        # In the order of arrival. One list and rows derived from it: an interrupt can come between any two
        # instructions, and must find no request or row between two places.
        self._requests: list[Request] = []
        self._prefilling: _Prefill | None = None
        self._closed = self._freed = False
        # What closed it, where nobody did.
        self._error: Exception | None = None
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.compute_seconds = 0.0

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; `step` runs them.

        Raises:
          EngineError: the engine is closed.
        """
        with self._lock:
            self.check_open()
            self._requests = [*self._requests, *requests]

    def run_until_ended(self, request: Request) -> None:
        """Steps until `request` has ended.

        Raises:
          CheckpointError: weights that it needed could not be read.
          EngineError: a step failed and took the request with it, or the engine is closed.
        """
        while not request.ended:
            self.step_for(request)

    def step_for(self, request: Request) -> None:
        """A step on behalf of `request`, which a step that fails with other requests does not concern.

        Raises:
          CheckpointError, EngineError: as `run_until_ended`.
        """
        try:
            self.step()
        except EngineError:
            # In this order: who waited for the step that failed is told why the engine is closed.
            if request.ended or self._closed:
                raise
        with self._lock:
            if request.finish_reason is None and request not in self._requests:
                raise EngineError("The request is unknown here; it was submitted to another LLM, or not at all.")

    def abort(self, requests: Sequence[Request]) -> None:
        """Ends those that still run; their rows are free from the next step on."""
        with self._lock:
            for request in requests:
                request.finish("abort")

    def step(self) -> None:
        """One iteration. What fails in it ends every running request.

        Raises:
          CheckpointError: weights could not be read, and the engine is closed.
          EngineError: the step failed, or the engine is closed.
        """
        with self._lock:
            self.check_open()
            try:
                self._release()
                self._prefill()
                self._decode()
                self._release()
            except BaseException as error:
                self._fail(error)
                if isinstance(error, Exception) and not isinstance(error, CheckpointError):
                    raise EngineError(f"A step failed, and the requests in it are lost: {error}") from error
                raise

    def check_open(self) -> None:
        """Returns where the engine is open.

        Raises:
          CheckpointError: weights could not be read, which closed it.
          EngineError: it is closed.
        """
        if isinstance(self._error, CheckpointError):
            raise CheckpointError(str(self._error)) from self._error
        if self._closed:
            raise EngineError("This LLM is closed; make a new one.") from self._error

    @contextmanager
    def spare_row(self) -> Iterator[int]:
        """A row of the cache for work outside the requests, which wait meanwhile. What fails in it ends those that
        run: their rows are lost with the caches. Such work asks `check_open` now and then, so that it ends with the
        engine.

        Raises:
          CheckpointError, EngineError: the engine is closed, or a step failed before a row was free.
        """
        with self._lock:
            self.check_open()
            # The memory of prompts that are on their way is needed for it, too.
            while self._prefilling or not self._free_rows():
                self.step()
            try:
                yield self._free_rows()[0]
            except BaseException as error:
                self._fail(error)
                raise

    def close(self) -> None:
        """Ends all requests and frees the device's memory. Again, it frees what an interrupt left.

        A step that runs in another thread ends first, a prompt in it at the next border of a layer.
        """
        # Before the lock, which that thread may take again and again.
        self._closed = True
        with self._lock:
            for request in self._requests:
                if request.finish_reason is None and not request.dropped:
                    request.error = EngineError("The LLM was closed before this request had ended.")
                request.finish("abort")
            self._requests = []
            self._drop_prompts()
            if not self._freed:
                self._executor.close()
                self._sampler.close()
                self._freed = True

    def _placed(self) -> list[Request]:
        """Those that have a row."""
        return [request for request in self._requests if request.row is not None]

    def _running(self) -> list[Request]:
        """Those whose prompts are through."""
        return [request for request in self._placed() if request.token_ids]

    def _free_rows(self) -> list[int]:
        prompts = self._prefilling.requests if self._prefilling else []
        taken = {request.row for request in (*self._requests, *prompts)}
        return [row for row in range(self._executor.rows) if row not in taken]

    def _prefill(self) -> None:
        """Goes on with prompts, and begins with others, until there are none or decoding must not wait any longer. One
        layer of a prompt is run at least."""
        begin = time.perf_counter()
        while not self._closed and (self._prefilling or self._admit()):
            assert self._prefilling is not None
            start = time.perf_counter()
            for through in self._prefilling.progress:
                if through is not None:
                    number, decoded = through
                    request = self._prefilling.requests[number]
                    if request.finish_reason is None:
                        self.prompt_tokens += len(request.prompt_ids)
                        self._accept([request], decoded)
                    del decoded
                del through
                if self._closed or not self._prefilling.wanted or self._must_decode(begin):
                    break
            else:
                self._prefilling = None
            self.compute_seconds += time.perf_counter() - start
            self._release()
            if self._prefilling and not self._prefilling.wanted:
                self._drop_prompts()
            if self._must_decode(begin):
                return

    def _must_decode(self, begin: float) -> bool:
        """Whether prompts had their time since `begin`, and somebody waits for the next token."""
        return time.perf_counter() - begin >= PREFILL_SLICE and bool(self._running())

    def _admit(self) -> bool:
        """Gives rows to requests that wait, and begins with their prompts; whether there were any."""
        waiting = [request for request in self._requests if request.row is None]
        admitted = list(zip(waiting, self._free_rows(), strict=False))
        for request, row in admitted:
            request.row = row
            if not greedy_suffices(request.sampling):
                self._sampler.admit(row, request.sampling, request.prompt_ids, sorted(request.end_ids))
        prompts = [Prompt(row, request.prompt_ids) for request, row in admitted]
        if admitted:
            self._prefilling = _Prefill([request for request, _ in admitted], self._executor.prefill(prompts))
        return bool(admitted)

    def _drop_prompts(self) -> None:
        if self._prefilling is not None:
            prefilling, self._prefilling = self._prefilling, None
            prefilling.progress.close()

    def _decode(self) -> None:
        running = self._running()
        if running:
            start = time.perf_counter()
            lengths = [request.length for request in running]
            decoded = self._executor.decode(
                tokens=[request.token_ids[-1] for request in running],
                rows=[_row(request) for request in running],
                positions=[length - 1 for length in lengths],
                known=lengths,
            )
            self._accept(running, decoded)
            self.compute_seconds += time.perf_counter() - start

    def _accept(self, requests: Sequence[Request], decoded: Decoded) -> None:
        """Chooses a token for each request from its line of `decoded`, and hands it over."""
        ids = np.asarray(decoded.greedy).tolist()
        logprobs: list[dict[int, float] | None] = [None] * len(requests)
        drawn = [None if greedy_suffices(request.sampling) else _row(request) for request in requests]
        if any(row is not None for row in drawn):
            wanted = [request.sampling.logprobs for request in requests]
            sampled, logprobs = self._sampler.sample(decoded.logits, drawn, wanted)
            ids = [ids[i] if row is None else int(sampled[i]) for i, row in enumerate(drawn)]
        for request, token, logprob in zip(requests, ids, logprobs, strict=False):
            request.accept(token, logprob)
            self.generated_tokens += 1

    def _release(self) -> None:
        """Lets go of requests that ended or that nobody waits for, and so of their rows."""
        for request in self._requests:
            if request.dropped:
                request.finish("abort")
        self._requests = [request for request in self._requests if request.finish_reason is None]

    def _fail(self, error: BaseException) -> None:
        """Ends what runs: its rows are lost with the caches. Without all weights there is nothing left to run: where
        they cannot be read, everything ends."""
        lost = isinstance(error, CheckpointError) or self._executor.broken
        if lost and isinstance(error, Exception):
            self._error = self._error or error
        for request in self._requests if lost else self._placed():
            if request.finish_reason is None:
                request.error = error if isinstance(error, Exception) else None
                request.finish("abort")
        self._drop_prompts()
        self._release()
        if lost:
            self.close()


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row
