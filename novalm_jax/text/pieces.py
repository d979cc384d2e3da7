"""The bytes each vocabulary token stands for, and the text a growing list of tokens makes.

Knows the decoder descriptions of `tokenizer.json`. Refuses to know ids, vocabularies and stop texts.

Decoding goes through bytes, so that text can leave while ids still arrive: one token costs one table look-up and at
most three bytes are held back. It gives what the `tokenizers` library gives, with one difference: in a decoder with
byte fallback that library turns a whole run of byte tokens into U+FFFD when one of its bytes is invalid, however long
ago the others were sent; here, as in every other decoder, only the invalid bytes become U+FFFD.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from novalm_jax.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# (token text, is it the first token of the text?) -> token text
_Step = Callable[[str, bool], str]


def byte_level_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level tokenizers write bytes with, and the byte of each."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


@dataclass(frozen=True)
class PieceDecoder:
    """A `tokenizer.json` decoder, taken apart into what it does to one token and to the start of the whole text."""

    steps: tuple[_Step, ...]
    byte_fallback: bool = False
    byte_level: bool = False
    strip: str = ""
    strip_count: int = 0

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any] | None) -> PieceDecoder:
        """Compiles the decoder description `spec`; None joins tokens with spaces.

        Raises:
          CheckpointError: it has a stage that is not implemented.
        """
        if spec is None:
            return cls(steps=(lambda token, first: token if first else " " + token,))
        builder = _Builder()
        for stage in _stages(spec):
            builder.add(stage)
        return builder.build()

    def piece(self, token: str, *, first: bool) -> bytes:
        """The bytes that `token` adds to the text, before the text's start is stripped."""
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for step in self.steps:
            token = step(token, first)
        if self.byte_level and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        return token.encode()

    def stream(self) -> ByteStream:
        """A fresh text to add pieces to."""
        return ByteStream(self.strip, self.strip_count)


class ByteStream:
    """Bytes in, text out: never half a character, invalid bytes as U+FFFD, the start of the text stripped."""

    def __init__(self, strip: str, strip_count: int):
        self._strip, self._strip_left = strip, strip_count
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, piece: bytes) -> str:
        """The text that became certain with `piece`."""
        return self._stripped(self._utf8.decode(piece))

    def finish(self) -> str:
        """What is left: U+FFFD if the bytes end inside a character, else nothing."""
        text = self._stripped(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        return text

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._strip):
                self._strip_left = 0
                break
            text = text[len(self._strip) :]
            self._strip_left -= 1
        return text


class _Builder:
    """Collects the stages of one decoder in their order."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.fused = self.byte_fallback = self.byte_level = False
        self.strip, self.strip_count = "", 0

    def add(self, stage: Mapping[str, Any]) -> None:
        kind = stage.get("type")
        if self.byte_level:
            raise _unsupported(stage, "a stage after ByteLevel")
        if self.fused and kind not in ("Fuse", "Strip"):
            raise _unsupported(stage, "a stage other than Strip after Fuse")
        match kind:
            case "ByteFallback":
                self.byte_fallback = True
            case "ByteLevel":
                self.byte_level = True
            case "Fuse":
                self.fused = True
            case "Strip":
                self._add_strip(stage)
            case "Replace":
                self.steps.append(_replace(stage))
            case "Metaspace":
                self.steps.append(_metaspace(stage))
            case _:
                raise _unsupported(stage, "a decoder of this type")

    def _add_strip(self, stage: Mapping[str, Any]) -> None:
        content, start, stop = stage["content"], int(stage["start"]), int(stage["stop"])
        if not self.fused:
            self.steps.append(lambda token, first: _strip(token, content, start, stop))
            return
        # Stripping the end of a text that still grows would hold text back for ever.
        if stop or self.strip_count:
            raise _unsupported(stage, "stripping the end of the whole text, or its start twice")
        self.strip, self.strip_count = content, start

    def build(self) -> PieceDecoder:
        return PieceDecoder(tuple(self.steps), self.byte_fallback, self.byte_level, self.strip, self.strip_count)


def _stages(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if spec.get("type") != "Sequence":
        yield spec
        return
    for stage in spec["decoders"]:
        yield from _stages(stage)


def _strip(token: str, content: str, start: int, stop: int) -> str:
    cut_start = 0
    while cut_start < min(start, len(token)) and token[cut_start] == content:
        cut_start += 1
    cut_stop = len(token)
    while cut_stop > max(cut_start, len(token) - stop) and token[cut_stop - 1] == content:
        cut_stop -= 1
    return token[cut_start:cut_stop]


def _replace(stage: Mapping[str, Any]) -> _Step:
    pattern, content = stage["pattern"], stage["content"]
    if "String" not in pattern:
        raise _unsupported(stage, "a Replace with a regular expression")
    return lambda token, first: token.replace(pattern["String"], content)


def _metaspace(stage: Mapping[str, Any]) -> _Step:
    mark, scheme = stage["replacement"], stage.get("prepend_scheme", "always")
    return lambda token, first: token.replace(mark, "" if first and scheme != "never" else " ")


def _unsupported(stage: Mapping[str, Any], what: str) -> CheckpointError:
    return CheckpointError(
        f"tokenizer.json: its decoder has {what}, which is not implemented ({dict(stage)}). Decoders made of "
        "ByteLevel, Metaspace, Replace, ByteFallback, Fuse and Strip are."
    )


_BYTE_OF = byte_level_alphabet()
