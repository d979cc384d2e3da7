"""SentencePiece models (`tokenizer.model`) as `tokenizers` objects.

Knows the model file and what the SentencePiece program does with it. Refuses to know what else is in the folder. The
packages that read the file are optional: the extra `novalm-jax[sentencepiece]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors

from novalm_jax.errors import CheckpointError

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


@dataclass(frozen=True)
class Piece:
    """One entry of a SentencePiece vocabulary; `kind` numbers are those of the file format."""

    text: str
    score: float
    kind: int = _NORMAL


@dataclass(frozen=True)
class SentencePieceModel:
    """What a `tokenizer.model` says. An id is a piece's position; `bos_id` is -1 where the model has none."""

    pieces: Sequence[Piece]
    is_bpe: bool
    unk_id: int = 0
    bos_id: int = 1
    byte_fallback: bool = False
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""


def convert_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    """Converts the SentencePiece model at `path`.

    Raises:
      CheckpointError: the optional packages are missing, or the file is damaged or of a kind that has no counterpart
        (word and character models).
    """
    try:
        from sentencepiece import sentencepiece_model_pb2 as model_format
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a SentencePiece model and there is no tokenizer.json beside it. Install the extra that "
            "converts it, `pip install 'novalm-jax[sentencepiece]'`, or copy the model's tokenizer.json there."
        ) from error
    proto = model_format.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    # protobuf's DecodeError, whose class is only there with the optional package.
    except Exception as error:
        raise CheckpointError(f"{path} is not a SentencePiece model ({error}); download the file again.") from error
    return to_tokenizer(from_proto(proto, path))


def from_proto(proto: Any, path: Path) -> SentencePieceModel:
    """The parts of a parsed SentencePiece `ModelProto` that matter; `path` is for messages.

    Raises:
      CheckpointError: neither a BPE nor a unigram model.
    """
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if not len(proto.pieces) or trainer.model_type not in (_UNIGRAM, _BPE):
        raise CheckpointError(
            f"{path} is not a BPE or unigram SentencePiece model (type {trainer.model_type}, {len(proto.pieces)} "
            "pieces); copy the model's tokenizer.json there."
        )
    return SentencePieceModel(
        pieces=[Piece(piece.piece, piece.score, piece.type) for piece in proto.pieces],
        is_bpe=trainer.model_type == _BPE,
        unk_id=trainer.unk_id,
        bos_id=trainer.bos_id,
        byte_fallback=trainer.byte_fallback,
        add_dummy_prefix=normalizer.add_dummy_prefix,
        remove_extra_whitespaces=normalizer.remove_extra_whitespaces,
        charsmap=normalizer.precompiled_charsmap,
    )


def to_tokenizer(model: SentencePieceModel) -> tokenizers.Tokenizer:
    """The tokenizer that gives the ids of `model`, with its first token in front as the Llama family does.

    Also like that family's `tokenizer.json`, text that follows a special or user-defined token gets a space mark of its
    own where SentencePiece gives one to the start of the whole text only.
    """
    vocabulary = {piece.text: index for index, piece in enumerate(model.pieces)}
    core: models.Model
    if model.is_bpe:
        core = models.BPE(
            vocab=vocabulary,
            merges=_merges(model.pieces, vocabulary),
            unk_token=model.pieces[model.unk_id].text,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    else:
        scored = [(piece.text, piece.score) for piece in model.pieces]
        core = models.Unigram(scored, unk_id=model.unk_id, byte_fallback=model.byte_fallback)
    tokenizer = tokenizers.Tokenizer(core)
    tokenizer.normalizer = _normalizer(model)
    tokenizer.decoder = _decoder(model)
    special = [piece.text for piece in model.pieces if piece.kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    defined = [piece.text for piece in model.pieces if piece.kind == _USER_DEFINED and not _is_mergeable(piece)]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in defined])
    if 0 <= model.bos_id < len(model.pieces):
        bos = model.pieces[model.bos_id].text
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, model.bos_id)]
        )
    return tokenizer


def _is_mergeable(piece: Piece) -> bool:
    """Whether the piece is found by joining.

    User-defined ones are found in the raw text, where no space is a mark yet; so those with marks (runs of spaces) are
    joined too, and first, as their score is the greatest.
    """
    return piece.kind == _NORMAL or (piece.kind == _USER_DEFINED and _SPACE in piece.text)


def _merges(pieces: Sequence[Piece], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, best score first: SentencePiece joins whatever gives the best piece."""
    usable = {piece.text for piece in pieces if _is_mergeable(piece)}
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for piece in pieces:
        if not _is_mergeable(piece):
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in usable and right in usable:
                ranked.append((-piece.score, vocabulary[piece.text], (left, right)))
    ranked.sort(key=lambda entry: entry[:2])
    return [pair for _, _, pair in ranked]


def _normalizer(model: SentencePieceModel) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


def _decoder(model: SentencePieceModel) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)
