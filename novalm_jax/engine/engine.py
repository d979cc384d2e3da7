"""Requests -> tokens, step by step: which request has which row of the cache, and what each step runs.

Single-threaded by design: whoever waits for a request steps the engine, and a lock lets several threads wait. A step
admits waiting requests to free rows, in order, and then decodes one token for every running request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from novalm_jax.engine.executor import Executor
from novalm_jax.engine.programs import Decoded
from novalm_jax.engine.request import Request
from novalm_jax.engine.sampler import Sampler
from novalm_jax.engine.sampling import greedy_suffices
from novalm_jax.errors import EngineError


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
        self._closed = False
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.compute_seconds = 0.0

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; `step` runs them.

        Raises:
          EngineError: the engine is closed.
        """
        with self._lock:
            self._check_open()
            self._requests = [*self._requests, *requests]

    def run_until_ended(self, request: Request) -> None:
        """Steps until `request` has ended.

        Raises:
          EngineError: a step failed and took the request with it, or the engine is closed.
        """
        while not request.ended:
            self.step_for(request)

    def step_for(self, request: Request) -> None:
        """A step on behalf of `request`, which a step that fails with other requests does not concern.

        Raises:
          EngineError: as `run_until_ended`.
        """
        try:
            self.step()
        except EngineError:
            if self._closed or request.ended:
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
          EngineError: the step failed, or the engine is closed.
        """
        with self._lock:
            self._check_open()
            try:
                self._release()
                self._admit()
                self._decode()
                self._release()
            except BaseException as error:
                self._fail(error)
                if isinstance(error, Exception):
                    raise EngineError(f"A step failed, and the requests in it are lost: {error}") from error
                raise

    @contextmanager
    def spare_row(self) -> Iterator[int]:
        """A row of the cache for work outside the requests, which wait meanwhile. What fails in it ends those that
        run: their rows are lost with the caches.

        Raises:
          EngineError: the engine is closed, or a step failed before a row was free.
        """
        with self._lock:
            self._check_open()
            while not self._free_rows():
                self.step()
            try:
                yield self._free_rows()[0]
            except BaseException as error:
                self._fail(error)
                raise

    def close(self) -> None:
        """Ends all requests and frees the device's memory. Closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for request in self._requests:
                    request.finish("abort")
                self._requests = []
                self._executor.close()
                self._sampler.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("This LLM is closed; make a new one.")

    def _running(self) -> list[Request]:
        return [request for request in self._requests if request.row is not None]

    def _free_rows(self) -> list[int]:
        taken = {request.row for request in self._requests}
        return [row for row in range(self._executor.rows) if row not in taken]

    def _admit(self) -> None:
        for request in [request for request in self._requests if request.row is None]:
            free = self._free_rows()
            if not free:
                return
            request.row = free[0]
            if not greedy_suffices(request.sampling):
                self._sampler.admit(request.row, request.sampling, request.prompt_ids, sorted(request.end_ids))
            start = time.perf_counter()
            decoded = self._executor.prefill(request.row, request.prompt_ids)
            self.prompt_tokens += len(request.prompt_ids)
            self._accept([request], decoded, start)
            self._release()

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
            self._accept(running, decoded, start)

    def _accept(self, requests: Sequence[Request], decoded: Decoded, start: float) -> None:
        """Chooses a token for each request from its line of `decoded`, and hands it over."""
        ids = np.asarray(decoded.greedy).tolist()
        logprobs: list[dict[int, float] | None] = [None] * len(requests)
        drawn = [None if greedy_suffices(request.sampling) else _row(request) for request in requests]
        if any(row is not None for row in drawn):
            wanted = [request.sampling.logprobs for request in requests]
            sampled, logprobs = self._sampler.sample(decoded.logits, drawn, wanted)
            ids = [ids[i] if row is None else int(sampled[i]) for i, row in enumerate(drawn)]
        self.compute_seconds += time.perf_counter() - start
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
        """Ends what runs: its rows are lost with the caches."""
        for request in self._running():
            if request.finish_reason is None:
                request.error = error if isinstance(error, Exception) else None
                request.finish("abort")
        self._release()


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row
