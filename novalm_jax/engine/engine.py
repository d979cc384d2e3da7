"""Requests -> tokens, step by step: what each step runs, and what becomes of its results.

Single-threaded by design: whoever waits for a request steps the engine, and a lock lets several threads wait. In a step
the scheduler gives rows and pages to requests; prompts go on for as long as decoding may wait; then one token is
decoded for every request that runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import numpy as np

from novalm_jax.engine.exchange import Exchange
from novalm_jax.engine.executor import Executor, Line, Part, cut
from novalm_jax.engine.functions import Decoded
from novalm_jax.engine.request import Request
from novalm_jax.engine.sampler import Sampler
from novalm_jax.engine.sampling import greedy_suffices
from novalm_jax.engine.scheduler import Limits, Scheduler, Take
from novalm_jax.errors import CheckpointError, EngineError
from novalm_jax.kv.pages import Held
from novalm_jax.options import EngineOptions


class _Pass(NamedTuple):
    """Parts of prompts on their way through the model: whose part each is, and what it takes."""

    takes: list[Take]
    owners: list[Take]
    progress: Generator[tuple[int, Decoded] | None]

    @property
    def requests(self) -> list[Request]:
        """Whose prompts they are."""
        return [take.request for take in self.takes]

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for one that is not through."""
        return any(
            request.finish_reason is None and not request.dropped and not request.token_ids for request in self.requests
        )


class Engine:
    """Runs requests on an executor, many at a time.

    Attributes:
      scheduler: says which.
      prompt_tokens: tokens of prompts that are through.
      generated_tokens: tokens that were chosen.
      steps: decode steps.
      step_seconds: time spent in steps.
      compute_seconds: of it, in programs of prompts, decoding and sampling.
      longest_wait: most seconds that prompts took before a decode step that somebody waited for.
    """

    def __init__(
        self,
        executor: Executor,
        sampler: Sampler,
        options: EngineOptions,
        host_bytes: int = 0,
        exchange: Exchange | None = None,
    ):
        """Takes what it runs.

        Args:
          executor, sampler: closed with this.
          options: `prefix_cache`, `prefill_seconds` and `decode_quantum` of them.
          host_bytes: for pages of requests that have to wait.
          exchange: of this executor; None where there are always as many pages.
        """
        self._executor = executor
        self._sampler = sampler
        self._exchange = exchange
        self._prefill_seconds = options.prefill_seconds
        limits = Limits(
            rows=executor.rows,
            chunk=executor.chunk,
            pass_chunks=executor.pass_chunks,
            page_bytes=executor.page_bytes,
            host_bytes=host_bytes,
            keeps_prefixes=options.prefix_cache,
            quantum=options.decode_quantum,
        )
        self.scheduler = Scheduler(executor.new_book(), limits, executor)
        self._lock = threading.RLock()
        # In the order of arrival. One list and everything derived from it: an interrupt can come between any two
        # instructions, and must find no request between two places.
        self._requests: list[Request] = []
        self._numbers = 0
        self._pass: _Pass | None = None
        self._closed = self._freed = False
        # What closed it, where nobody did.
        self._error: Exception | None = None
        # Whose state the sampler has in each row.
        self._sampled_in: dict[int, int] = {}
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.steps = 0
        self.step_seconds = 0.0
        self.compute_seconds = 0.0
        self.longest_wait = 0.0

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; `step` runs them.

        Raises:
          EngineError: the engine is closed.
        """
        with self._lock:
            self.check_open()
            for request in requests:
                request.number = self.next_number()
            self._requests = [*self._requests, *requests]

    def next_number(self) -> int:
        """Of a sequence that begins."""
        self._numbers += 1
        return self._numbers - 1

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
        """Ends those that still run, and frees their rows and pages."""
        with self._lock:
            for request in requests:
                request.finish("abort")
            try:
                self._release()
            except BaseException as error:
                self._fail_with(error)

    def step(self) -> None:
        """One iteration. What fails in it ends every running request.

        Raises:
          CheckpointError: weights could not be read, and the engine is closed.
          EngineError: the step failed, or the engine is closed.
        """
        with self._lock:
            self.check_open()
            begin = time.perf_counter()
            try:
                self._release()
                self._place()
                waiting = bool(self._running())
                self._prefill()
                if waiting:
                    self.longest_wait = max(self.longest_wait, time.perf_counter() - begin)
                self._decode()
                self._release()
            except BaseException as error:
                self._fail_with(error)
            finally:
                self.step_seconds += time.perf_counter() - begin

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
    def spare_pages(self, tokens: int) -> Iterator[Held]:
        """A sequence of so many tokens for work outside the requests, which wait meanwhile. What fails in it ends those
        that run: their pages are lost. Such work asks `check_open` now and then, so that it ends with the engine.

        Raises:
          CheckpointError, EngineError: the engine is closed, or a step failed before there was room.
        """
        with self._lock:
            self.check_open()
            # The memory of prompts that are on their way is needed for it, too.
            while self._pass or not self._make_room(tokens):
                self.step()
            held = self.scheduler.pages.new()
            try:
                yield held
                self.scheduler.pages.free(held)
            except BaseException as error:
                self._fail(error)
                raise

    def shut(self) -> None:
        """From now on nothing begins; does not wait for what runs, which `close` ends."""
        self._closed = True

    def close(self) -> None:
        """Ends all requests and frees the device's memory. Again, it frees what an interrupt left.

        A step that runs in another thread ends first, a prompt in it at the next border of a layer.
        """
        # Before the lock, which that thread may take again and again.
        self.shut()
        with self._lock:
            for request in self._requests:
                if request.finish_reason is None and not request.dropped:
                    request.error = EngineError("The LLM was closed before this request had ended.")
                request.finish("abort")
            self._release()
            if not self._freed:
                self._executor.close()
                self._sampler.close()
                self._freed = True

    def _make_room(self, tokens: int) -> bool:
        try:
            if self._exchange is not None:
                self._exchange.settle(self.scheduler, self._requests, tokens)
            return self.scheduler.make_room(tokens, self._requests)
        except BaseException as error:
            self._fail_with(error)

    @property
    def _busy(self) -> list[Request]:
        """Those whose pages a pass uses."""
        return self._pass.requests if self._pass else []

    def _running(self) -> list[Request]:
        """Those whose prompts are through, and whose pages are on the device."""
        return [request for request in self._requests if request.row is not None and request.token_ids]

    def _place(self) -> None:
        """Rows and pages for those that wait, and memory for these pages."""
        if self._exchange is not None and self._pass is None and self._requests:
            self._exchange.settle(self.scheduler, self._requests)
        self.scheduler.place(self._requests, self._busy)

    def _prefill(self) -> None:
        """Goes on with prompts, and begins with others, until there are none or their time is over: others may wait for
        their next token, or to be submitted. One layer of a prompt is run at least."""
        begin = time.perf_counter()
        while not self._closed and (self._pass or self._begin_pass()):
            assert self._pass is not None
            start = time.perf_counter()
            for through in self._pass.progress:
                self.compute_seconds += time.perf_counter() - start
                if through is not None:
                    number, decoded = through
                    self._prompt_is_through(self._pass.owners[number].request, decoded)
                    del decoded
                del through
                if self._closed or not self._pass.wanted or time.perf_counter() - begin >= self._prefill_seconds:
                    break
                start = time.perf_counter()
            else:
                self._end_pass()
            self._release()
            if time.perf_counter() - begin >= self._prefill_seconds:
                return
            if self._pass is None:
                self._place()

    def _begin_pass(self) -> bool:
        """Begins with parts of prompts; whether there are any."""
        takes = self.scheduler.next_pass(self._requests)
        parts: list[Part] = []
        owners: list[Take] = []
        for take in takes:
            prompt, held, chunk = take.request.prompt_ids, take.request.held, self._executor.chunk
            assert held is not None
            its = cut(prompt, take.start, take.end, chunk, len(prompt), held)
            parts += its
            owners += [take] * len(its)
        if takes:
            self._pass = _Pass(takes, owners, self._executor.prefill(parts))
        return bool(takes)

    def _end_pass(self) -> None:
        assert self._pass is not None
        takes, self._pass = self._pass.takes, None
        for request, _, end in takes:
            if request.held is not None and request.computed < end:
                self.scheduler.computed(request, end)

    def _drop_pass(self) -> None:
        if self._pass is not None:
            dropped, self._pass = self._pass, None
            dropped.progress.close()

    def _prompt_is_through(self, request: Request, decoded: Decoded) -> None:
        """A prompt's last token is computed: its first token is chosen, and those of requests that share the prompt."""
        if request.finish_reason is not None:
            return
        self.prompt_tokens += len(request.prompt_ids)
        self.scheduler.computed(request, len(request.prompt_ids))
        followers = [one for one in self._requests if one.leader is request and one.finish_reason is None]
        together = [request, *(one for one in followers if self.scheduler.fork(request, one))]
        self.prompt_tokens += sum(len(one.prompt_ids) for one in together[1:])
        lines = len(decoded.greedy)
        for begin in range(0, len(together), lines):
            self._accept(together[begin : begin + lines], decoded)

    def _decode(self) -> None:
        running = self.scheduler.next_decode(self._requests, self._busy)
        lines = []
        for request in running:
            assert request.held is not None
            length = request.length
            lines.append(Line(request.token_ids[-1], length - 1, length, request.held, request.number))
        if lines:
            with self._computing():
                decoded = self._executor.decode(lines)
            self._accept(running, decoded)
            self.steps += 1

    def _accept(self, requests: Sequence[Request], decoded: Decoded) -> None:
        """Chooses a token for each request from its line of `decoded`, and hands it over."""
        for request in requests:
            self._enter(request)
        with self._computing():
            ids = np.asarray(decoded.greedy).tolist()
        logprobs: list[dict[int, float] | None] = [None] * len(requests)
        drawn = [None if greedy_suffices(request.sampling) else _row(request) for request in requests]
        if any(row is not None for row in drawn):
            wanted = [request.sampling.logprobs for request in requests]
            with self._computing():
                sampled, logprobs = self._sampler.sample(decoded.logits, drawn, wanted)
            ids = [ids[i] if row is None else int(sampled[i]) for i, row in enumerate(drawn)]
        for request, token, logprob in zip(requests, ids, logprobs, strict=False):
            request.accept(token, logprob)
            self.generated_tokens += 1

    @contextmanager
    def _computing(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.compute_seconds += time.perf_counter() - begin

    def _enter(self, request: Request) -> None:
        """Tells the sampler whose the row is, where it is another request's by now."""
        row = _row(request)
        if not greedy_suffices(request.sampling) and self._sampled_in.get(row) != request.number:
            ends, sampling = sorted(request.end_ids), request.sampling
            self._sampler.admit(row, sampling, request.prompt_ids, ends, request.token_ids)
            # What it had in another row is out of date.
            others = {other: number for other, number in self._sampled_in.items() if number != request.number}
            self._sampled_in = others | {row: request.number}

    def _release(self) -> None:
        """Lets go of requests that ended or that nobody waits for, and so of their rows and pages."""
        for request in self._requests:
            if request.dropped:
                request.finish("abort")
            if request.finish_reason is not None:
                self.scheduler.release(request)
        self._requests = [request for request in self._requests if request.finish_reason is None]
        if self._pass and not self._pass.wanted:
            self._drop_pass()

    def _fail_with(self, error: BaseException) -> NoReturn:
        """As `_fail`, and raises what whoever waits is told."""
        self._fail(error)
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            raise EngineError(f"A step failed, and the requests in it are lost: {error}") from error
        raise error

    def _fail(self, error: BaseException) -> None:
        """Ends what has pages: they are lost. Without all weights there is nothing left to run: where they cannot be
        read, everything ends."""
        lost = isinstance(error, CheckpointError) or self._executor.broken
        if lost and isinstance(error, Exception):
            self._error = self._error or error
        self._drop_pass()
        there = [one for one in self._requests if one.row is not None or one.held or one.moved]
        # Where nobody has anything, those that wait would see it fail for ever.
        for request in self._requests if lost or not there else there:
            if request.finish_reason is None:
                request.error = error if isinstance(error, Exception) else None
                request.finish("abort")
        for request in self._requests:
            request.row = request.held = request.moved = None
        self.scheduler.reset(self._executor.new_book())
        self._sampled_in.clear()
        self._release()
        if lost:
            self.close()


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row
