"""`LLM`: text in, text out. Prepares requests, waits for them, and reports; the engine does the rest.

Whoever waits for text drives the engine; threads of its own only move weights, where not all stay on the device. Safe
to use from several threads.
"""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.checkpoint.progress import steps_bar
from novalm_jax.compat import CompileCounter, compilation_cache_folder, enable_compilation_cache
from novalm_jax.engine.engine import Engine
from novalm_jax.engine.estimate import record_bytes
from novalm_jax.engine.exchange import Exchange, exchange_for
from novalm_jax.engine.executor import Executor, Line, cut
from novalm_jax.engine.placement import place
from novalm_jax.engine.prefixes import fingerprint, prefix_seed
from novalm_jax.engine.programs import Programs, decode_rows
from novalm_jax.engine.report import Report
from novalm_jax.engine.request import Completion, Request
from novalm_jax.engine.run_files import run_files
from novalm_jax.engine.sampler import Sampler
from novalm_jax.engine.sampling import choice_seed, resolve
from novalm_jax.engine.start import start_executor
from novalm_jax.errors import CheckpointError, EngineError, OptionError, RequestError, WriteError
from novalm_jax.experts.profile import read_profile
from novalm_jax.experts.recorder import Recorder
from novalm_jax.experts.records import moe_layers
from novalm_jax.options import EngineOptions, SamplingParams
from novalm_jax.text.detokenizer import TextStream
from novalm_jax.text.generation_config import GenerationConfig
from novalm_jax.text.tokenizer import Tokenizer
from novalm_jax.timeline import Timeline

_log = logging.getLogger("novalm_jax")

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A language model that generates text. Also a context manager: leaving it frees the device's memory.

    Attributes:
      options: the `EngineOptions` it was made with.
      config: the `ModelConfig` of its checkpoint.
      timeline: what was done when, a `Timeline`; None unless the option of that name asks for it.
      files: those that are written at the end, as options say.
    """

    def __init__(self, model: str | Path | None = None, **options: Any):
        """Loads a checkpoint.

        Args:
          model: a Hugging Face folder, or the name of a model in the Hugging Face cache, such as org/name; None for
            the model inside this package.
          options: fields of `EngineOptions`.

        Raises:
          OptionError: an unknown option, or a value that cannot be used.
          CheckpointError, ConfigError: the folder cannot be loaded.
          BudgetError: the model does not fit `device_memory`; raised before any weight is read.
        """
        start = time.perf_counter()
        self.options = _engine_options(options)
        self.timeline = None if self.options.timeline is None else Timeline()
        self._compiles = CompileCounter()
        if self.options.compilation_cache:
            enable_compilation_cache(compilation_cache_folder())
        checkpoint = Checkpoint.open(model)
        self.config = checkpoint.config
        expert_bytes = record_bytes(self.config, np.dtype(jnp.dtype(self.options.dtype)))
        keeps_rows = self.options.trace_out is not None
        recorder = Recorder(self.config, checkpoint.folder.name, expert_bytes, keeps_rows)
        self.files = run_files(self.options, self.timeline, recorder)
        self._defaults = GenerationConfig.load(checkpoint.folder)
        self._tokenizer, self._no_tokenizer = _load_tokenizer(checkpoint.folder)
        self._checkpoint = checkpoint
        self._profile = None
        if self.options.expert_profile is not None:
            self._profile = read_profile(self.options.expert_profile).of_model(self.config)
        self._placement = place(checkpoint, self.options)
        self._fingerprint = fingerprint(checkpoint, self.options.dtype)
        sampler = Sampler(self.options.max_batch, self.config.vocab_size)
        self._executor = self._start()
        self._executor.recorder = recorder
        self._exchange = self._start_exchange()
        if self.options.warm_up:
            _warm_up(self._exchange or self._placement.programs, sampler, self.options.max_batch)
        kv_host_bytes = self._placement.kv_host_bytes
        self._engine = Engine(self._executor, sampler, self.options, kv_host_bytes, self._exchange)
        self._load_seconds = time.perf_counter() - start

    def _start(self) -> Executor:
        """Loads what runs the model; measurements have others."""
        return start_executor(self._checkpoint, self._placement, self.options, self.timeline, self._profile)

    def _start_exchange(self) -> Exchange | None:
        """What gives memory to pages or to experts; measurements have none."""
        return exchange_for(self._placement, self._executor, self.options)

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._placement.context_length

    @property
    def engine(self) -> Engine:
        """Runs what `requests` makes."""
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
          CheckpointError: it has none, or one that cannot be read.
        """
        if self._tokenizer is None:
            assert self._no_tokenizer is not None
            raise self._no_tokenizer
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[Completion]:
        """Completes prompts, all of them together.

        Args:
          prompts: a text, token ids, or a list of either.
          sampling: for all prompts, or one for each.
          priority: requests with a higher one come first, and others leave for them where pages or rows are short.

        Returns:
          Completions in the order of the prompts, the n choices of one side by side.

        Raises:
          RequestError: a prompt or its sampling cannot be served; nothing has run then.
          CheckpointError: a prompt is a text, and the checkpoint has no tokenizer.
          ConfigError: a default of the checkpoint is needed, and cannot be used.
          EngineError: the run failed, or the LLM is closed.
        """
        requests = self.requests(prompts, sampling, priority)
        self._engine.submit(requests)
        try:
            for request in requests:
                self._engine.run_until_ended(request)
        finally:
            self._engine.abort(requests)
        return [request.completion() for request in requests]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, *, priority: int = 0) -> TextIterator:
        """The text of one completion, piece by piece as it becomes certain, never half a character.

        Closing the iterator, or dropping it, ends the request. Its `completion` is there once it is exhausted.

        Raises:
          RequestError: also where n is not 1; else as `generate`. Reading the iterator raises EngineError where a step
            fails.
        """
        if isinstance(sampling, SamplingParams) and sampling.n != 1:
            raise RequestError(f"n: a stream is one completion, and {sampling.n} are asked for; use streams().")
        return self.streams([prompt], sampling, priority=priority)[0]

    def streams(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[TextIterator]:
        """As `stream` for every completion that `generate` would give; reading one moves all of them on.

        Raises:
          RequestError, CheckpointError, ConfigError, EngineError: as `generate`.
        """
        requests = self.requests(prompts, sampling, priority)
        self._engine.submit(requests)
        return [TextIterator(self._engine, request) for request in requests]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[Completion]:
        """Answers conversations: renders the checkpoint's chat template and completes it.

        Args:
          messages: one conversation, a list of {"role": ..., "content": ...}, or a list of conversations.
          sampling: as in `generate`.
          tools: JSON schemas, handed to the template as they are.
          chat_template: the name of one of the checkpoint's templates, or a template; None for its default.
          variables: further variables of the template.

        Returns:
          Completions, as `generate`: the answers of a conversation side by side.

        Raises:
          RequestError: also where there is no template, or the template refuses the messages.
          CheckpointError, ConfigError, EngineError: as `generate`.
        """
        return self.generate(
            self.chat_prompts(messages, tools=tools, chat_template=chat_template, **variables), sampling
        )

    def chat_prompts(
        self,
        messages: Messages | Sequence[Messages],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[list[int]]:
        """What `chat` completes: for each conversation the ids that the chat template makes of it.

        Raises:
          RequestError, CheckpointError: as `chat`.
        """
        if isinstance(messages, Mapping | str):
            raise RequestError("messages: expected a list of messages; put a single one into a list.")
        messages = cast("Messages", list(messages))
        single = not messages or isinstance(messages[0], Mapping)
        return [
            self.tokenizer.encode_chat(conversation, tools=tools, chat_template=chat_template, **variables)
            for conversation in cast("Sequence[Messages]", [messages] if single else messages)
        ]

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int = 0,
    ) -> list[Request]:
        """One request for each choice of each prompt, all of them checked. For those who step the `engine` themselves.

        Raises:
          RequestError, CheckpointError, ConfigError: as `generate`.
        """
        listed = _listed(prompts)
        sampling = SamplingParams() if sampling is None else sampling
        for one in [sampling] if not isinstance(sampling, list | tuple) else sampling:
            if not isinstance(one, SamplingParams):
                raise RequestError(
                    f"sampling: expected SamplingParams, or a list with one for each prompt, got {one!r}."
                )
        params = [sampling] * len(listed) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != len(listed):
            raise RequestError(f"sampling: there are {len(params)} for {len(listed)} prompts; give one, or one each.")
        return [
            request
            for index, (prompt, one) in enumerate(zip(listed, params, strict=True))
            for request in self._choices(index, prompt, one, priority)
        ]

    def logits(self, token_ids: Sequence[int], decode_from: int | None = None) -> np.ndarray:
        """Logits of given tokens through the engine's own path: prefill, then from `decode_from` on token by token.

        Returns:
          float32 `[t, v]`; row i holds the logits of the token after `token_ids[i]`.

        Raises:
          RequestError: no tokens, too many, ids outside the vocabulary, or `decode_from` not in 1 to t.
          CheckpointError: weights could not be read.
          EngineError: the LLM is closed, perhaps meanwhile.
        """
        ids = self._checked_ids(token_ids, "token_ids", most=self.context_length)
        try:
            first = len(ids) if decode_from is None else operator.index(decode_from)
        except TypeError:
            raise RequestError(f"decode_from: expected a whole number, got {decode_from!r}.") from None
        if not 1 <= first <= len(ids):
            raise RequestError(f"decode_from: {first} is not between 1 and the {len(ids)} tokens there are.")
        logits = np.empty((len(ids), self.config.vocab_size), np.float32)
        with self._engine.spare_pages(len(ids)) as held:
            pages, executor = self._engine.scheduler.pages, self._executor
            number, together = self._engine.next_number(), executor.chunk * executor.pass_chunks
            for start in range(0, first, together):
                end = min(start + together, first)
                pages.grow(held, start, end)
                parts = cut(ids[:first], start, end, executor.chunk, len(ids), held)
                with closing(executor.prefill_logits(parts, logits[start:end])) as borders:
                    for _ in borders:
                        self._engine.check_open()
            for position in range(first, len(ids)):
                self._engine.check_open()
                pages.grow(held, position, position + 1)
                decoded = executor.decode([Line(ids[position], position, len(ids), held, number)])
                logits[position] = np.asarray(decoded.logits)[0]
                del decoded
        return logits

    def report(self) -> Report:
        """What has been done so far, and what is where."""
        engine, exchange = self._engine, self._exchange
        placement = self._placement if exchange is None else exchange.placement
        return Report(
            device_budget_bytes=placement.budgets.device,
            device_peak_bytes=placement.plan.device_bytes if exchange is None else exchange.most_bytes,
            host_budget_bytes=placement.budgets.host,
            context_length=self.context_length,
            compute_seconds=engine.compute_seconds,
            load_seconds=self._load_seconds,
            step_seconds=engine.step_seconds,
            longest_wait_seconds=engine.longest_wait,
            prompt_tokens=engine.prompt_tokens,
            generated_tokens=engine.generated_tokens,
            decode_steps=engine.steps,
            memory_exchanges=0 if exchange is None else exchange.count,
            distinct_experts=self._executor.recorder.different,
            launches=self._executor.launches,
            programs_compiled=self._compiles.compiled,
            programs_from_cache=self._compiles.from_cache,
            kernels={"decode steps": placement.programs.shapes.kernels, "prompts": "xla"},
            device_table=dict(placement.plan.parts),
            ignored_tensors=self._checkpoint.weights.ignored,
            sampling_defaults=self._defaults.sampling(),
            policy=self.options.policy if placement.slots else "in turn" if placement.dense else "resident",
            experts=self._executor.expert_map() if moe_layers(self.config) else None,
            **engine.scheduler.figures(),
            **self._executor.figures(),
        )

    def close(self) -> None:
        """Ends what is running, frees the device's memory, and writes the files that were asked for. Closing twice is
        fine.

        Raises:
          WriteError: a file cannot be written; everything else is done.
        """
        with ExitStack() as last:
            for file in self.files:
                last.callback(file.write)
            self._engine.close()

    def __repr__(self) -> str:
        return f"<LLM {self._checkpoint.folder.name} ({self.config.model_type}, {self.options.dtype})>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except WriteError as error:
            if kind is None:
                raise
            # What ended the run counts for more.
            _log.warning("%s", error)

    def _choices(self, index: int, prompt: Prompt, params: SamplingParams, priority: int) -> Iterator[Request]:
        name = f"prompt {index}"
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_ids = self._checked_ids(ids, name, most=self.context_length - (params.max_tokens != 0))
        room = self.context_length - len(prompt_ids)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        vocab = self.config.vocab_size
        strange = [token for token in params.logit_bias or {} if not 0 <= token < vocab]
        if strange:
            raise RequestError(f"logit_bias: {strange[0]} is no token; the model's go from 0 to {vocab - 1}.")
        ends = frozenset(() if params.ignore_eos else self._end_ids()) | frozenset(params.stop_token_ids)
        fresh_seed = int.from_bytes(os.urandom(8), "little", signed=True)
        sampling = resolve(params, self._defaults.sampling(), fresh_seed=fresh_seed)
        leader, seed = None, prefix_seed(self._fingerprint, self.config, len(prompt_ids))
        for choice in range(params.n):
            request = Request(
                prompt_ids=prompt_ids,
                sampling=replace(sampling, seed=choice_seed(sampling.seed, choice)),
                max_tokens=min(max_tokens, room),
                end_ids=ends,
                text_stream=self._text_stream(params.stop, prompt_ids),
                index=index,
                choice=choice,
                priority=priority,
                leader=leader,
                prefix_seed=seed,
            )
            leader = leader or request
            if request.max_tokens == 0:
                request.finish("length")
            yield request

    def _checked_ids(self, ids: Sequence[int], name: str, most: int) -> list[int]:
        try:
            checked = [operator.index(token) for token in ids]
        except TypeError as error:
            raise RequestError(
                f"{name} must be a text or a list of token ids, which are whole numbers: {error}."
            ) from None
        if not checked:
            raise RequestError(f"{name} is empty: there is nothing to go on from. Give at least one token.")
        if len(checked) > most:
            raise RequestError(
                f"{name} has {len(checked)} tokens, and at most {most} fit a context of {self.context_length} tokens. "
                "Shorten it, or raise context_length if it was cut below the model's own."
            )
        vocab = self.config.vocab_size
        strange = [token for token in checked if not 0 <= token < vocab]
        if strange:
            raise RequestError(f"{name} holds {strange[0]}, which is no token; the model's go from 0 to {vocab - 1}.")
        return checked

    def _end_ids(self) -> tuple[int, ...]:
        if self._defaults.eos_token_ids or self._tokenizer is None or self._tokenizer.eos_id is None:
            return self._defaults.eos_token_ids
        return (self._tokenizer.eos_id,)

    def _text_stream(self, stop: Sequence[str], prompt_ids: Sequence[int]) -> TextStream | None:
        if self._tokenizer is not None:
            return TextStream(self._tokenizer, stop, prompt_ids)
        if stop:
            raise RequestError(f"stop: texts cannot be found without a tokenizer. {self._no_tokenizer}")
        return None


class TextIterator(Iterator[str]):
    """Pieces of one completion's text, as `LLM.stream` gives them."""

    def __init__(self, engine: Engine, request: Request):
        self._engine = engine
        self._request = request
        self._given = 0

    def __next__(self) -> str:
        while True:
            # Asked before the pieces are read: what comes between would be lost if it were asked after.
            over = self._request.finish_reason is not None
            while self._given < len(self._request.pieces):
                piece = self._request.pieces[self._given]
                self._given += 1
                if piece:
                    return piece
            if over and self._request.ended:
                raise StopIteration
            self.advance()

    @property
    def completion(self) -> Completion:
        """The outcome, once the text has ended or the iterator is closed.

        Raises:
          EngineError: not yet.
        """
        if self._request.finish_reason is None:
            raise EngineError("The completion is not finished; read its text to the end, or close the stream, first.")
        return self._request.completion()

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self._request.finish_reason is not None

    @property
    def token_count(self) -> int:
        """Tokens generated so far."""
        return len(self._request.token_ids)

    @property
    def token_times(self) -> tuple[float, float] | None:
        """When the first and the latest token were chosen, on `time.perf_counter`'s clock; None before the first."""
        return self._request.token_times

    def advance(self) -> None:
        """Runs one step, whether text comes of it or not: a token for every request that runs.

        Raises:
          CheckpointError, EngineError: the step failed.
        """
        self._engine.step_for(self._request)

    def close(self) -> None:
        """Ends the request where it is."""
        self._engine.abort([self._request])

    def __del__(self) -> None:
        self._request.dropped = True


def _warm_up(programs: Programs | Exchange, sampler: Sampler, rows: int) -> None:
    """Compiles everything that so many requests can need."""
    jobs = [*programs.everything(), sampler.prepare]
    jobs += [partial(sampler.program, bucket) for bucket in decode_rows(rows)]
    with steps_bar("compiling", len(jobs)) as bar:
        for job in jobs:
            job()
            bar.update()


def _engine_options(options: Mapping[str, Any]) -> EngineOptions:
    unknown = sorted(set(options) - set(EngineOptions.names()))
    if unknown:
        raise OptionError(f"LLM has no option {', '.join(unknown)}; there are: {', '.join(EngineOptions.names())}.")
    return EngineOptions(**options)


def _load_tokenizer(folder: Path) -> tuple[Tokenizer | None, CheckpointError | None]:
    """The tokenizer, or why there is none: prompts of token ids work without."""
    try:
        return Tokenizer.load(folder), None
    except CheckpointError as error:
        return None, error


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a text, or a list of ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, bytes):
        raise RequestError(f"prompts: expected a text, token ids, or a list of either, got {type(prompts).__name__}.")
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int | np.integer) else several
