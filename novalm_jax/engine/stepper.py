"""Requests of tasks -> steps: the thread that steps an engine for event loops, and how it and tasks tell each other.

Knows threads, and when to wake whom. Refuses to know how a prompt becomes requests, what a step runs, and text. Which
thread owns what:

- **Loops**, any number of them in any threads: a task begins a `Call`, reads what its requests have so far, and waits
  for nothing but futures of its own loop. It never waits for the engine's lock.
- **Preparing threads** make the requests, as tokenizers and templates take their time, and post the call.
- **The stepping thread** alone submits, steps and aborts. It reads its mail before each step, tells afterwards whom the
  step concerns, and sleeps in its mailbox while there is nothing to run. Whatever ends it ends every call.

There are no locks here. The mailbox is a `SimpleQueue`, which takes letters at any time, in a destructor as well. Who
waits looks again once he is known to wait, and who tells looks for those after what he tells is there: neither can miss
the other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue

from novalm_jax.engine.llm import LLM
from novalm_jax.engine.request import Request
from novalm_jax.errors import EngineError, NovaError

_log = logging.getLogger("novalm_jax")

PREPARERS = 4
"""Threads that make requests, so that short prompts need not wait for a very long one."""

Mailbox = SimpleQueue["Call | None"]
"""Calls to attend to; None: the end."""


class Call:
    """Requests of one caller: what becomes of them, and who waits for it.

    Attributes:
      requests: None until they are made.
      cancelled: nobody wants them any more.
      error: what they were lost to.
      over: nothing more becomes of them; set last.
    """

    def __init__(self, mail: Mailbox, whole: bool):
        """With `whole`, who waits wants the end, not pieces."""
        self.requests: list[Request] | None = None
        self.error: BaseException | None = None
        self.cancelled = self.over = False
        self._mail = mail
        self._whole = whole
        self._told = 0
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    async def until(self, ready: Callable[[], bool]) -> None:
        """Waits, in any loop."""
        while not ready():
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._waiting.append((loop, future))
            # Again: what came before the future woke nobody.
            if not ready():
                await future

    def cancel(self) -> None:
        """Gives up what is not over yet; in any thread, in a destructor as well."""
        if not self.over:
            self.cancelled = True
            for request in self.requests or ():
                # A prompt on its way ends with the layer that it is in.
                request.dropped = True
            self._mail.put(self)

    def look(self) -> bool:
        """Whether it has come to an end; else, who waits for pieces hears of new ones."""
        requests = self.requests or []
        try:
            # Each of them: if one is lost, that is told at once, though others may run.
            over = all([request.ended for request in requests])
        except NovaError as error:
            self.error = error
            return True
        if not over and not self._whole:
            pieces = requests[0].pieces
            told, self._told = self._told, len(pieces)
            if any(pieces[told : self._told]):
                self._wake()
        return over

    def finish(self, error: BaseException | None = None) -> None:
        """Nothing more becomes of it; by an error, or without."""
        self.error = self.error or error
        self.over = True
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            loop, future = self._waiting.popleft()
            try:
                loop.call_soon_threadsafe(_settle, future)
            except RuntimeError:
                # The loop is closed: who waited there is gone.
                self.cancel()


class Stepper:
    """Steps an LLM's engine in a thread of its own while there is something to run.

    Attributes:
      thread: which does.
      end: over once everything has ended; its error is what would not end.
    """

    def __init__(self, llm: LLM):
        self._llm = llm
        self._engine = llm.engine
        self._mail: Mailbox = SimpleQueue()
        self._calls: list[Call] = []
        self._closing = False
        self.end = Call(self._mail, whole=True)
        self._preparers = ThreadPoolExecutor(PREPARERS, "novalm-prepare")
        # For one that is no daemon, an interpreter waits before it calls what would end it.
        self.thread = threading.Thread(target=self._run, name="novalm-steps", daemon=True)
        self.thread.start()

    def begin(self, make: Callable[[], list[Request]], whole: bool = False) -> Call:
        """A call for the requests that `make` makes, in another thread; without `whole` it makes one."""
        call = Call(self._mail, whole)
        try:
            self._engine.check_open()
            self._preparers.submit(self._prepare, call, make)
        except NovaError as error:
            call.finish(error)
        except RuntimeError as error:
            call.finish(EngineError(f"This request cannot begin: {error}."))
        return call

    def close(self) -> None:
        """Everything is to end, the LLM too. Does not wait for it."""
        self._closing = True
        self._mail.put(None)
        self._engine.shut()

    def drop(self) -> None:
        """Everything is to end but the LLM. Does not wait for it; the garbage collector may call this."""
        self._mail.put(None)
        for call in tuple(self._calls):
            call.cancel()

    def _prepare(self, call: Call, make: Callable[[], list[Request]]) -> None:
        try:
            call.requests = make()
        except BaseException as error:
            call.finish(error)
        else:
            self._mail.put(call)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._read_mail():
                self._step()
        except BaseException as error:
            _log.exception("The thread that steps the engine failed, and the LLM closes.")
            self._closing, failure = True, error
        unended: BaseException | None = None
        try:
            with ExitStack() as last:
                last.callback(self._end_late_calls)
                # Whoever prepares still posts.
                last.callback(self._preparers.shutdown)
                last.callback(self._end_calls, failure)
                if self._closing:
                    self._llm.close()
        except BaseException as error:
            unended = error
        self.end.finish(unended)

    def _read_mail(self) -> bool:
        """Attends to what came, and waits until there is something to run; False where everything is to end."""
        while not (self._calls and self._mail.empty()):
            if not self._attend(self._mail.get()):
                return False
        return True

    def _attend(self, call: Call | None) -> bool:
        if call is None:
            return False
        # Without requests it was given up early, and comes again with them.
        if call.requests is not None and not call.over:
            error = None
            try:
                if not call.cancelled:
                    self._engine.submit(call.requests)
                    self._calls.append(call)
            except NovaError as failure:
                error = failure
            if call.cancelled or error or call.look():
                self._forget(call, error)
        return True

    def _step(self) -> None:
        # Whoever a step that failed concerns is told by its requests.
        with suppress(NovaError):
            self._engine.step()
        try:
            self._engine.check_open()
        except NovaError:
            # Who closes it may not have the lock yet, so that requests do not know of it.
            self._engine.close()
        for call in tuple(self._calls):
            if call.look():
                self._forget(call)

    def _forget(self, call: Call, error: BaseException | None = None) -> None:
        """Ends what may be left of it, and frees its pages."""
        if call in self._calls:
            self._calls.remove(call)
        try:
            self._engine.abort(call.requests or ())
        except NovaError as failure:
            error = error or failure
        call.finish(error)

    def _end_calls(self, cause: BaseException | None) -> None:
        for call in tuple(self._calls):
            call.look()
            self._forget(call, _lost(cause))

    def _end_late_calls(self) -> None:
        """Ends what was posted after the mail was read for the last time."""
        while True:
            try:
                call = self._mail.get_nowait()
            except Empty:
                return
            if call is not None and not call.over:
                self._forget(call, _lost(None))


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _lost(cause: BaseException | None) -> EngineError:
    if cause is None:
        return EngineError("The LLM was closed before this request had ended.")
    error = EngineError(f"No step works any more, and this request is lost: {cause}")
    error.__cause__ = cause
    return error
