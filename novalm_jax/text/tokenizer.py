"""Text <-> ids for one checkpoint folder.

Knows the tokenizer files of a checkpoint and the rules about first and last tokens. Refuses to know models and
requests. A loaded `Tokenizer` may be used from several threads at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from novalm_jax.errors import CheckpointError, RequestError
from novalm_jax.text.chat import ChatTemplates
from novalm_jax.text.files import read_optional_json
from novalm_jax.text.pieces import ByteStream, PieceDecoder
from novalm_jax.text.tokenizer_files import load_backend

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# tokenizer.json does not say which token ends a text; these are the partners of the usual first tokens.
_USUAL_EOS = {"<s>": "</s>", "<bos>": "<eos>", "<|begin_of_text|>": "<|end_of_text|>"}


class Tokenizer:
    """Text <-> ids for one checkpoint folder.

    The vocabulary and its rules are those of `tokenizer.json`. `tokenizer_config.json` and `special_tokens_map.json`
    add what it does not hold: the roles of special tokens, further added tokens, chat templates, and
    `add_bos_token` / `add_eos_token`. Where one of these two is given and `tokenizer.json` does otherwise, the flag
    counts. Padding and truncation stored in `tokenizer.json` are switched off: they would silently change prompts.

    Attributes:
      vocab_size: number of ids, added tokens included: the highest id + 1.
      bos_id, eos_id: ids of the first and last token of a text, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        templates: ChatTemplates | None = None,
    ):
        """Takes over a `tokenizers.Tokenizer` and sets it up; most callers want `load`.

        Args:
          backend: changed in place (padding, truncation, added tokens, first and last tokens).
          config: the fields of `tokenizer_config.json`.
          templates: the chat templates; without them there is no chat.

        Raises:
          CheckpointError: a decoder that is not implemented, or a `config` that contradicts `backend`.
        """
        config = config or {}
        backend.no_padding()
        backend.no_truncation()
        _add_declared_tokens(backend, config)
        self._backend = backend
        self._templates = templates or ChatTemplates()
        self._roles = _roles(backend, config)
        self.bos_id, self.eos_id = (self.token_id(self._roles.get(role)) for role in ("bos_token", "eos_token"))
        _follow_flags(backend, config, self.bos_id, self.eos_id)
        prefix, _ = _surroundings(backend)
        self._adds_bos = self.bos_id is not None and prefix[:1] == [self.bos_id]
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._decoder = PieceDecoder.from_spec(_decoder_spec(backend))
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads the tokenizer of a checkpoint folder.

        Raises:
          CheckpointError: there is none, a file is damaged, or the files contradict each other.
        """
        folder = Path(folder)
        tokenizer_config = read_optional_json(folder / "tokenizer_config.json")
        # special_tokens_map.json repeats the roles; the main file wins where both speak.
        config = read_optional_json(folder / "special_tokens_map.json")
        config |= {name: value for name, value in tokenizer_config.items() if value is not None}
        backend, templates = load_backend(folder), ChatTemplates.load(folder, tokenizer_config)
        try:
            return cls(backend, config=config, templates=templates)
        except CheckpointError as error:
            raise CheckpointError(f"Tokenizer of {folder}: {error}") from error

    def token_id(self, token: str | None) -> int | None:
        """The id of a vocabulary token, or None."""
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written in it are recognised.

        With `add_special_tokens` the tokens that this model expects around a text are added, but a text that already
        begins with the first token does not get a second one.

        Raises:
          RequestError: the text is not valid Unicode.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise RequestError(
                "A prompt must be a text of valid Unicode: whole characters, no lone surrogates."
            ) from error
        if add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_id]:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids outside the vocabulary give no text; bytes that are not UTF-8 give U+FFFD.

        Spaces before punctuation stay: `clean_up_tokenization_spaces` is not applied.
        """
        stream = self.text_stream(skip_special_tokens=skip_special_tokens)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.finish()

    def text_stream(self, *, skip_special_tokens: bool = True) -> IdStream:
        """`decode`, one id at a time."""
        return IdStream(self, self._decoder.stream(), skip_special_tokens)

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """The bytes that an id adds to a text (`first`: at its very start); none outside the vocabulary."""
        if first:
            return self._piece(token_id, first=True)
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id, first=False)
        return piece

    def is_special(self, token_id: int) -> bool:
        """Whether this is a special token, which decoded text leaves out."""
        return token_id in self._special_ids

    def knows(self, token_id: int) -> bool:
        """Whether this id stands for a token."""
        return 0 <= token_id < self.vocab_size and self._backend.id_to_token(token_id) is not None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The ids of `render_chat`. The template alone decides about special tokens: none is added to its text.

        Raises:
          RequestError: as `render_chat`.
        """
        text = self.render_chat(
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of chat messages: `ChatTemplates.render` with the special tokens as template variables.

        Raises:
          RequestError: there is no template, or it cannot render these messages.
        """
        return self._templates.render(
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            variables=self._roles | variables,
        )

    def _piece(self, token_id: int, *, first: bool) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if token is None else self._decoder.piece(token, first=first)


class IdStream:
    """Ids of one text in, its text out as soon as it is certain; never half a character."""

    def __init__(self, tokenizer: Tokenizer, stream: ByteStream, skip_special_tokens: bool):
        self._tokenizer, self._stream, self._skip = tokenizer, stream, skip_special_tokens
        self._first = True

    def push(self, token_id: int) -> str:
        """The text that became certain with `token_id`, often empty."""
        if (self._skip and self._tokenizer.is_special(token_id)) or not self._tokenizer.knows(token_id):
            return ""
        piece = self._tokenizer.token_bytes(token_id, first=self._first)
        self._first = False
        return self._stream.push(piece)

    def finish(self) -> str:
        """What was held back: U+FFFD if the text ends inside a character, else nothing."""
        return self._stream.finish()


def _decoder_spec(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    return None if backend.decoder is None else json.loads(backend.decoder.__getstate__())


def _token_text(value: object) -> str | None:
    """A token as these files write it: a text, or an object with a text `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _roles(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens by role. Where no file names the first and last token, `tokenizer.json` is asked what it adds."""
    roles: dict[str, Any] = {name: text for name in _ROLES if (text := _token_text(config.get(name))) is not None}
    if isinstance(extra := config.get("additional_special_tokens"), list):
        roles["additional_special_tokens"] = [text for token in extra if (text := _token_text(token)) is not None]
    prefix, suffix = _surroundings(backend)
    if "bos_token" not in roles and len(prefix) == 1:
        roles["bos_token"] = backend.id_to_token(prefix[0])
    if "eos_token" not in roles:
        usual = _USUAL_EOS.get(roles.get("bos_token", ""))
        if len(suffix) == 1:
            roles["eos_token"] = backend.id_to_token(suffix[0])
        elif usual is not None and backend.token_to_id(usual) is not None:
            roles["eos_token"] = usual
    return roles


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tells the backend about added tokens that only the other files name; their ids must come out as declared."""
    known = backend.get_added_tokens_decoder()
    for token_id, token in _declared_tokens(config):
        if token_id in known and known[token_id].content == token.content:
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if (actual := backend.token_to_id(token.content)) != token_id:
            raise CheckpointError(
                f"tokenizer_config.json gives the added token {token.content!r} the id {token_id}, tokenizer.json the "
                f"id {actual}; the two files belong to different models."
            )
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for text in {_token_text(config.get(name)) for name in _ROLES} - special:
        # A role for a token that the vocabulary lacks would create an id that the model has no row for.
        if text and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _declared_tokens(config: Mapping[str, Any]) -> list[tuple[int, AddedToken]]:
    """`added_tokens_decoder` of `tokenizer_config.json`, in the order of ids."""
    declared = config.get("added_tokens_decoder") or {}
    options = ("special", "single_word", "lstrip", "rstrip", "normalized")
    try:
        tokens = [
            (int(token_id), AddedToken(token["content"], **{name: token[name] for name in options if name in token}))
            for token_id, token in declared.items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder must map ids to tokens with a text content ({error})."
        ) from error
    return sorted(tokens, key=lambda entry: entry[0])


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the backend adds before and after a text."""
    ids: list[int] = []
    # Some text that has ids, whatever the vocabulary: an added token always has one.
    for probe in ("a", *(token.content for token in backend.get_added_tokens_decoder().values())):
        encoding = backend.encode(probe, add_special_tokens=True)
        ids, mask = encoding.ids, encoding.special_tokens_mask
        if 0 in mask:
            start, end = mask.index(0), len(mask) - mask[::-1].index(0)
            return ids[:start], ids[end:]
    return ids, []


def _follow_flags(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos_id: int | None, eos_id: int | None
) -> None:
    """Makes the backend add the first and last token exactly if explicit flags say so, and leaves its other tokens."""
    before, after = _surroundings(backend)
    wanted_before, wanted_after = before, after
    if bos_id is not None and isinstance(add_bos := config.get("add_bos_token"), bool):
        wanted_before = [bos_id] * add_bos + [token_id for token_id in before if token_id != bos_id]
    if eos_id is not None and isinstance(add_eos := config.get("add_eos_token"), bool):
        wanted_after = [token_id for token_id in after if token_id != eos_id] + [eos_id] * add_eos
    if (wanted_before, wanted_after) == (before, after):
        return
    # The template language gives ":" and "$" a meaning, so it gets numbers for names, not the tokens' texts.
    template = [*(f"T{token_id}" for token_id in wanted_before), "$A", *(f"T{token_id}" for token_id in wanted_after)]
    special = [
        {"id": f"T{token_id}", "ids": [token_id], "tokens": [str(backend.id_to_token(token_id))]}
        for token_id in dict.fromkeys(wanted_before + wanted_after)
    ]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
