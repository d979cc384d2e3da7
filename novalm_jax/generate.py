"""`python -m novalm_jax.generate`: text from a model, on the command line.

The text goes to stdout as it is made, everything else to stderr, so that the output pipes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from novalm_jax.commands import leave, run_command
from novalm_jax.errors import OptionError, RequestError
from novalm_jax.options import EngineOptions, SamplingParams

if TYPE_CHECKING:
    from novalm_jax.engine.llm import LLM, TextIterator


@dataclass(frozen=True)
class GenerateOptions:
    """Generate text with a language model."""

    model: str | None = None
    """Folder of a Hugging Face checkpoint, the one that holds config.json, or the name (org/name) of one in the Hugging
    Face cache. None: the model in this package."""
    prompt: tuple[str, ...] = ()
    """Text to go on from; - reads it from stdin."""
    prompt_file: tuple[Path, ...] = ()
    """File that holds one prompt, in UTF-8; - for stdin. A newline at its end is not part of the prompt."""
    chat: bool = False
    """Treat each prompt as a user's message, in the checkpoint's chat template."""
    system: str | None = None
    """System message of the chat."""
    interactive: bool = False
    """Read prompts from the terminal, a line each, until it ends; with --chat, one conversation."""
    json: bool = False
    """Write one JSON object a line for each completion, in place of its bare text."""
    report: bool = False
    """Print at the end what was used, on stderr."""
    debug: bool = False
    """Show tracebacks."""
    sampling: tyro.conf.OmitArgPrefixes[SamplingParams] = field(default_factory=SamplingParams)
    engine: tyro.conf.OmitArgPrefixes[EngineOptions] = field(default_factory=EngineOptions)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run_command(GenerateOptions, _generate, "python -m novalm_jax.generate", arguments)


def _generate(options: GenerateOptions) -> None:
    prompts = _prompts(options)
    # Only now, so that --help and mistakes in the options are answered before JAX is loaded.
    from novalm_jax.engine.llm import LLM

    llm = LLM(options.model, **asdict(options.engine))
    try:
        with llm:
            with _reported(llm, options):
                if options.interactive:
                    _converse(llm, options)
                else:
                    inputs = [_as_chat(llm, options, prompt) for prompt in prompts] if options.chat else prompts
                    _complete(llm, options, inputs)
    finally:
        for file in llm.files:
            if file.written is not None:
                print(f"{file.option}: {file.written}", file=sys.stderr)


@contextmanager
def _reported(llm: LLM, options: GenerateOptions) -> Iterator[None]:
    """The report at the end, if it is asked for; after Ctrl-C, too."""
    try:
        yield
    except KeyboardInterrupt:
        if options.report:
            print(llm.report(), file=sys.stderr)
        raise
    if options.report:
        print(llm.report(), file=sys.stderr)


def _prompts(options: GenerateOptions) -> list[str]:
    """All prompts, those of files after those given.

    Raises:
      OptionError: none, a file that cannot be read, or options that contradict each other.
    """
    if options.interactive and (options.prompt or options.prompt_file or options.json or options.sampling.n > 1):
        raise OptionError(
            "--interactive reads prompts from the terminal and writes one text for each; leave out --prompt, "
            "--prompt-file, --json and --n."
        )
    if not options.interactive and not options.prompt and not options.prompt_file:
        raise OptionError('There is nothing to go on from: give --prompt "...", --prompt-file FILE or --interactive.')
    if options.system is not None and not options.chat:
        raise OptionError("--system is a message of a chat; add --chat.")
    if options.sampling.logprobs is not None and not options.json:
        raise OptionError("--logprobs shows in JSON only; add --json.")
    given = [_read(Path("-"), "--prompt -") if prompt == "-" else prompt for prompt in options.prompt]
    return given + [_read(path, f"--prompt-file {path}") for path in options.prompt_file]


def _read(path: Path, option: str) -> str:
    """The text of a file or, for "-", of stdin, less the newline that editors and shells end it with."""
    try:
        stored = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return stored.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise OptionError(f"{option} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{option} is not text in UTF-8: {error.reason} at byte {error.start}.") from None


def _as_chat(llm: LLM, options: GenerateOptions, prompt: str) -> list[int]:
    return llm.tokenizer.encode_chat([*_system(options), {"role": "user", "content": prompt}])


def _system(options: GenerateOptions) -> list[dict[str, Any]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _complete(llm: LLM, options: GenerateOptions, prompts: Sequence[str | list[int]]) -> None:
    """Completions in order, an empty line between them; all of them run together."""
    clock = _Clock()
    texts = llm.streams(prompts, options.sampling)
    shown = 0
    try:
        for text in texts:
            if shown and not options.json:
                print()
            _show(text, prompts, options)
            shown += 1
    except KeyboardInterrupt:
        # What there is counts: the rest of the text in hand and, as records, of all that have begun.
        for text in texts:
            text.close()
        begun = [text for text in texts[shown:] if text.completion.token_ids]
        for text in begun if options.json else begun[:1]:
            _show(text, prompts, options)
        clock.tell(texts)
        raise
    clock.tell(texts)


def _show(text: TextIterator, prompts: Sequence[str | list[int]], options: GenerateOptions) -> None:
    """One completion: its pieces as they come, or its record once it is there."""
    for piece in text:
        if not options.json:
            print(piece, end="", flush=True)
    if options.json:
        prompt = prompts[text.completion.index]
        record = ({"prompt": prompt} if isinstance(prompt, str) else {}) | asdict(text.completion)
        print(json.dumps(record, ensure_ascii=False), flush=True)
    else:
        print(flush=True)


def _converse(llm: LLM, options: GenerateOptions) -> None:
    """Prompts from the terminal, one line each, until it ends. A prompt that cannot be served is not the end."""
    messages = _system(options)
    for line in _lines():
        clock = _Clock()
        turn = [*messages, {"role": "user", "content": line}]
        try:
            text = llm.stream(llm.tokenizer.encode_chat(turn) if options.chat else line, options.sampling)
        except RequestError as error:
            print(error, file=sys.stderr)
            continue
        _show(text, [line], options)
        clock.tell([text])
        messages = [*turn, {"role": "assistant", "content": text.completion.text}]


def _lines() -> Iterator[str]:
    """Lines from stdin that hold something; a prompt sign asks for them on a terminal."""
    asking = sys.stdin.isatty()
    while True:
        if asking:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            if asking:
                print(file=sys.stderr)
            return
        text = line.decode("utf-8", errors="replace").rstrip("\r\n")
        if text.strip():
            yield text


class _Clock:
    """Time to the first token, and tokens a second after it."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def tell(self, texts: Sequence[TextIterator]) -> None:
        """Prints both figures, over all of these texts, on stderr."""
        tokens = sum(text.token_count for text in texts)
        times = [text.token_times for text in texts if text.token_times is not None]
        if not times:
            print("0 tokens", file=sys.stderr)
            return
        first, last = min(first for first, _ in times), max(last for _, last in times)
        figures = f"{tokens} token{'s' * (tokens != 1)}, the first after {first - self._start:.2f} s"
        if last > first:
            figures += f", {(tokens - 1) / (last - first):.1f} tokens/s after it"
        if cut := sum(text.completion.finish_reason == "length" for text in texts):
            figures += "; cut at its length" if len(texts) == 1 else f"; {cut} of {len(texts)} cut at their length"
        print(figures, file=sys.stderr)


if __name__ == "__main__":
    leave(main())
