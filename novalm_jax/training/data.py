"""Text files -> documents -> tokens -> batches.

Every choice is drawn from a seed, and every batch from the seed and its number alone: a run that goes on later sees
what it would have seen. Refuses to know models.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from novalm_jax.errors import OptionError

END = "<|endoftext|>"
"""Stands between two documents in a text file, and after each in the tokens."""


@dataclass(frozen=True)
class Corpus:
    """Text as tokens.

    Attributes:
      tokenizer: byte-level BPE.
      train, valid: int32 `[n]`, documents one after another, each followed by `END`; one more stands before the first
        document of `valid`, so that every token of it has one to be predicted from.
      valid_bytes: length of the validation text in UTF-8, with one byte for each end.
    """

    tokenizer: tokenizers.Tokenizer
    train: np.ndarray
    valid: np.ndarray
    valid_bytes: int


def read_corpus(
    paths: Sequence[Path], validation: float, seed: int, vocab_size: int, tokenizer: tokenizers.Tokenizer | None = None
) -> Corpus:
    """Reads text files and turns them into tokens.

    Args:
      paths: UTF-8 text, also compressed with xz (`.xz`).
      validation: part of the bytes, in whole documents, that is kept apart.
      seed: draws which documents these are.
      vocab_size: tokens of a vocabulary that is trained on the others.
      tokenizer: one to use in its place.

    Raises:
      OptionError: a file cannot be read, or there is too little text to split.
    """
    documents = [document for path in paths for document in _documents(path)]
    train, valid = split(documents, validation, seed)
    tokenizer = tokenizer or train_tokenizer(train, vocab_size)
    valid_bytes = sum(len(document.encode()) + 1 for document in valid)
    return Corpus(tokenizer, encode(tokenizer, train), encode(tokenizer, ["", *valid]), valid_bytes)


def split(documents: Sequence[str], validation: float, seed: int) -> tuple[list[str], list[str]]:
    """Documents to train on and to validate with, each in the given order.

    Raises:
      OptionError: there are fewer than two.
    """
    if len(documents) < 2:
        found = "only one document" if documents else "no document"
        raise OptionError(
            f"texts: {found} was found, and two are needed at least: one to train on and one to validate with. Put "
            f"{END} between documents."
        )
    sizes = np.array([len(document.encode()) for document in documents])
    order = np.random.default_rng((seed, 0)).permutation(len(documents))
    # Documents in this order, while they do not go beyond the part that is wanted; one at least, and never all.
    taken = order[: max(1, min(len(order) - 1, int((sizes[order].cumsum() <= validation * sizes.sum()).sum())))]
    kept = set(taken.tolist())
    train = [document for number, document in enumerate(documents) if number not in kept]
    return train, [documents[number] for number in sorted(kept)]


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE (arXiv:1508.07909) over these documents; its first token is `END`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """int32 `[n]`: the tokens of all documents, `END` after each."""
    end = np.array([tokenizer.token_to_id(END)], np.int32)
    parts = [part for found in tokenizer.encode_batch(documents) for part in (np.array(found.ids, np.int32), end)]
    return np.concatenate(parts)


def batch(tokens: np.ndarray, length: int, size: int, number: int, seed: int) -> np.ndarray:
    """Batch `number` (from 0): int32 `[size, length + 1]`, in each row `length` tokens and the one after them.

    In an epoch every window of `length` tokens comes once, in an order of its own and from an offset of its own.
    """
    windows = (len(tokens) - length - 1) // length
    samples = (divmod(sample, windows) for sample in range(number * size, (number + 1) * size))
    starts = [_epoch(seed, epoch, length, windows)[place] for epoch, place in samples]
    return np.stack([tokens[start : start + length + 1] for start in starts])


@lru_cache(2)
def _epoch(seed: int, epoch: int, length: int, windows: int) -> np.ndarray:
    """Where the windows of an epoch begin, in its order."""
    draw = np.random.default_rng((seed, 1, epoch))
    offset = draw.integers(length)
    return offset + length * draw.permutation(windows)


def _documents(path: Path) -> list[str]:
    """The documents of a file, without empty ones.

    Raises:
      OptionError: it cannot be read.
    """
    try:
        stored = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        text = stored.decode("utf-8")
    except OSError as error:
        raise OptionError(f"texts: {path} cannot be read: {error.strerror or error}.") from None
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise OptionError(
            f"texts: {path} is not text in UTF-8, compressed with xz if its name says so: {error}."
        ) from None
    return [document for part in text.split(END) if (document := part.strip())]
