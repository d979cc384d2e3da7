"""The text of one completion while its ids arrive, cut at stop texts.

Knows characters and stop texts. Refuses to know requests, stop ids and how ids are chosen. Objects here belong to one
completion and to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from novalm_jax.errors import RequestError

if TYPE_CHECKING:
    from novalm_jax.text.tokenizer import Tokenizer


class TextStream:
    """Ids of one completion in, text out; never half a character; stop texts held back and cut.

    The pieces of `push` and `finish`, joined, are what `tokenizer.decode(after + ids)` has beyond `after`, the ids that
    the completion goes on from: a space at its start is part of it. They are cut before the stop text that is complete
    first (of several complete with the same character: before the longest). A stop text may begin and end
    inside tokens. Special tokens and ids beyond the tokenizer's vocabulary give no text.

    Raises:
      RequestError: a stop text is empty or no text.

    Attributes:
      stopped: a stop text was found; from then on no more text comes out.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), after: Sequence[int] = ()):
        self._text = tokenizer.text_stream()
        for token_id in after:
            self._text.push(token_id)
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    def push(self, token_id: int) -> str:
        """The text that became certain with `token_id`, often empty."""
        return self._matcher.push(self._text.push(token_id))

    def finish(self) -> str:
        """The text held back so far, for a completion that ends here; an unfinished character becomes U+FFFD."""
        return self._matcher.push(self._text.finish()) + self._matcher.finish()


class StopMatcher:
    """Text in, text out, cut before the first complete stop text.

    Holds back exactly the text that may still begin a stop text: each stop text is followed character by character by
    the length of its longest beginning that the text ends with (Knuth, Morris and Pratt).
    """

    def __init__(self, stop: Sequence[str]):
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop must be a list of texts that are not empty, not {stop!r}.")
        self._stops = [(text, _borders(text)) for text in dict.fromkeys(stop)]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that can no longer be part of a stop text."""
        if self.stopped or not text:
            return ""
        if not self._stops:
            return text
        self._held += text
        before = len(self._held) - len(text)
        for offset, char in enumerate(text, start=1):
            found = self._advance(char)
            if found:
                self.stopped = True
                return self._release(before + offset - found)
        return self._release(len(self._held) - max(self._matched))

    def finish(self) -> str:
        """The text held back, now that no more follows."""
        self._matched = [0] * len(self._stops)
        return "" if self.stopped else self._release(len(self._held))

    def _advance(self, char: str) -> int:
        """Follows one character: the length of the longest stop text it completes, or 0."""
        found = 0
        for index, (text, borders) in enumerate(self._stops):
            length = self._matched[index]
            while length and text[length] != char:
                length = borders[length - 1]
            length += text[length] == char
            self._matched[index] = length
            if length == len(text):
                found = max(found, length)
        return found

    def _release(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        return released


def _borders(text: str) -> list[int]:
    """For each beginning of `text`: the length of its longest proper beginning that is also its end."""
    borders, length = [0], 0
    for char in text[1:]:
        while length and text[length] != char:
            length = borders[length - 1]
        length += text[length] == char
        borders.append(length)
    return borders
