"""Documents, split, vocabulary and batches: what is read, that nothing is lost, and that order comes from the seed."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest

from novalm_jax.errors import OptionError
from novalm_jax.training.data import END, batch, encode, read_corpus, split, train_tokenizer

DOCUMENTS = [f"Story {n}. " + "Once upon a time there was a cat. Ünïcode — 日本. " * (n + 1) for n in range(8)]


def write(path: Path, documents: list[str]) -> Path:
    path.write_text(f"\n{END}\n".join(documents) + "\n")
    return path


def test_documents_of_plain_and_compressed_files_become_tokens(tmp_path: Path) -> None:
    plain, packed = write(tmp_path / "a.txt", DOCUMENTS[:4]), tmp_path / "b.txt.xz"
    packed.write_bytes(lzma.compress(f"\n{END}\n\n{END}".join(DOCUMENTS[4:]).encode()))
    corpus = read_corpus([plain, packed], 0.2, 3, 300)
    decoded = [corpus.tokenizer.decode(part, skip_special_tokens=False) for part in (corpus.train, corpus.valid)]
    assert all(text.endswith(END) for text in decoded) and decoded[1].startswith(END)
    found = [text.removesuffix(END).removeprefix(END).split(END) for text in decoded]
    assert found[1] and sorted(found[0] + found[1]) == sorted(text.strip() for text in DOCUMENTS)
    assert corpus.valid_bytes == sum(len(text.encode()) + 1 for text in found[1])
    assert corpus.tokenizer.get_vocab_size() == 300 and corpus.tokenizer.token_to_id(END) == 0


def test_a_tokenizer_that_is_given_is_used(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(DOCUMENTS, 280)
    assert read_corpus([write(tmp_path / "a.txt", DOCUMENTS)], 0.2, 0, 400, tokenizer).tokenizer is tokenizer


def test_any_text_survives_the_vocabulary() -> None:
    """Also characters that no training text had."""
    tokenizer = train_tokenizer(["plain words only"], 300)
    strange = "  tabs\tand\n\n\nlines, é 日本 \U0001f600 \x00"
    assert tokenizer.decode(encode(tokenizer, [strange]).tolist()) == strange


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("validation", [0.01, 0.3, 0.99])
def test_the_split_takes_whole_documents_of_about_the_part(validation: float, seed: int) -> None:
    train, valid = split(DOCUMENTS, validation, seed)
    assert sorted(train + valid) == sorted(DOCUMENTS) and train and valid
    size = sum(map(len, valid)) / sum(map(len, DOCUMENTS))
    assert size <= validation or len(valid) == 1
    assert split(DOCUMENTS, validation, seed) == (train, valid)


def test_another_seed_splits_otherwise() -> None:
    assert len({tuple(split(DOCUMENTS, 0.3, seed)[1]) for seed in range(20)}) > 3


def test_an_epoch_has_every_window_once_and_the_next_another_order() -> None:
    tokens = np.arange(107, dtype=np.int32)
    # 107 tokens hold 9 windows of 10 that may begin at any of ten places.
    epochs = np.stack([batch(tokens, 10, 3, number, seed=5) for number in range(6)]).reshape(2, 9, 11)
    assert np.array_equal(epochs, epochs[:, :, :1] + np.arange(11))
    for epoch in epochs:
        starts = np.sort(epoch[:, 0])
        assert np.array_equal(np.diff(starts), np.full(8, 10)) and 0 <= starts[0] < 10
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0][:3], batch(tokens, 10, 3, 0, seed=6))


def test_a_batch_may_span_epochs() -> None:
    tokens = np.arange(107, dtype=np.int32)
    whole = np.concatenate([batch(tokens, 10, 1, number, seed=0) for number in range(14)])
    assert np.array_equal(batch(tokens, 10, 7, 1, seed=0), whole[7:])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b"one document", "only one document was found"),
        (b"", "no document was found"),
    ],
)
def test_files_that_are_no_text_are_told(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=f"^texts: .*{said}"):
        read_corpus([path], 0.1, 0, 300)


@pytest.mark.parametrize("content", [b"no xz", lzma.compress(b"cut short" * 99)[:-20]])
def test_damaged_compression_is_told(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.txt.xz"
    path.write_bytes(content)
    with pytest.raises(OptionError, match="compressed with xz if its name says so"):
        read_corpus([path], 0.1, 0, 300)
