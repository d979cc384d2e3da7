"""`python -m novalm_jax.generate`: text from a model, on the command line.

The text goes to stdout as it is made, everything else to stderr, so that the output pipes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from novalm_jax.commands import run_command
from novalm_jax.errors import OptionError
from novalm_jax.options import EngineOptions, SamplingParams

if TYPE_CHECKING:
    from novalm_jax.engine.llm import LLM, TextIterator


@dataclass(frozen=True)
class GenerateOptions:
    """Generate text with a language model."""

    model: Path | None = None
    """Folder of a Hugging Face checkpoint, the one that holds config.json (default: the model in this package)."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text to go on from; - reads it from stdin."""
    prompt_file: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """File that holds a prompt; - for stdin."""
    chat: bool = False
    """Treat each prompt as a user's message, in the checkpoint's chat template."""
    system: str | None = None
    """System message of the chat."""
    interactive: bool = False
    """Read prompts from the terminal until it ends; with --chat, one conversation."""
    json: bool = False
    """Write one JSON object a line for each completion, and no text."""
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

    with LLM(options.model, **asdict(options.engine)) as llm:
        if options.interactive:
            _converse(llm, options)
        else:
            inputs = [_as_chat(llm, options, prompt) for prompt in prompts] if options.chat else prompts
            _complete(llm, options, inputs)
        if options.report:
            print(llm.report(), file=sys.stderr)


def _prompts(options: GenerateOptions) -> list[str]:
    """All prompts, those of files after those given.

    Raises:
      OptionError: none, a file that cannot be read, or options that contradict each other.
    """
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in options.prompt]
    for path in options.prompt_file:
        try:
            prompts.append(sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--prompt-file {path} cannot be read as text: {error}.") from None
    if options.interactive and prompts:
        raise OptionError("--interactive reads prompts from the terminal; leave out --prompt and --prompt-file.")
    if not options.interactive and not prompts:
        raise OptionError('There is nothing to go on from: give --prompt "...", --prompt-file FILE or --interactive.')
    if options.system is not None and not options.chat:
        raise OptionError("--system is a message of a chat; add --chat.")
    return prompts


def _as_chat(llm: LLM, options: GenerateOptions, prompt: str) -> list[int]:
    return llm.tokenizer.encode_chat([*_system(options), {"role": "user", "content": prompt}])


def _system(options: GenerateOptions) -> list[dict[str, Any]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _complete(llm: LLM, options: GenerateOptions, prompts: Sequence[str | list[int]]) -> None:
    """Completions in order, an empty line between them; all of them run together."""
    clock = _Clock()
    for number, text in enumerate(llm.streams(prompts, options.sampling)):
        if number and not options.json:
            print()
        try:
            _write(text, clock, quiet=options.json)
        finally:
            # Also on Ctrl-C: what there is of the completion is its result.
            text.close()
            _write(text, clock, quiet=options.json)
            clock.count(len(text.completion.token_ids))
            if options.json:
                record = _record(prompts[text.completion.index], text)
                print(json.dumps(record, ensure_ascii=False), flush=True)
            else:
                print(flush=True)
    clock.tell()


def _write(text: TextIterator, clock: _Clock, *, quiet: bool) -> None:
    """The pieces of one text, as they come."""
    for piece in text:
        clock.first()
        if not quiet:
            print(piece, end="", flush=True)


def _record(prompt: str | list[int], text: TextIterator) -> dict[str, Any]:
    completion = asdict(text.completion)
    return ({"prompt": prompt} if isinstance(prompt, str) else {}) | completion


def _converse(llm: LLM, options: GenerateOptions) -> None:
    """Prompts from the terminal, one line each, until it ends."""
    messages = _system(options)
    for line in _lines():
        clock = _Clock()
        if options.chat:
            messages.append({"role": "user", "content": line})
        text = llm.stream(llm.tokenizer.encode_chat(messages) if options.chat else line, options.sampling)
        _write(text, clock, quiet=False)
        clock.count(len(text.completion.token_ids))
        messages.append({"role": "assistant", "content": text.completion.text})
        print(flush=True)
        clock.tell()


def _lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


class _Clock:
    """Time to the first token, and tokens a second after it."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self._tokens = 0

    def first(self) -> None:
        """The first text is there; later calls change nothing."""
        if self._first is None:
            self._first = time.perf_counter()

    def count(self, tokens: int) -> None:
        """So many tokens were generated."""
        self._tokens += tokens

    def tell(self) -> None:
        """Prints both figures on stderr."""
        end = time.perf_counter()
        first = self._first or end
        rate = f", {(self._tokens - 1) / (end - first):.1f} tokens/s after it" if self._tokens > 1 else ""
        print(f"{self._tokens} tokens, the first after {first - self._start:.2f} s{rate}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
