"""Counting models against a Kneser-Ney model written out with dictionaries."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from novalm_jax.training.ngrams import highest_order, ngram_loss

VOCAB, D = 7, 0.75


def tokens(count: int, seed: int) -> np.ndarray:
    """Text with some order in it."""
    draw, found = np.random.default_rng(seed), [1]
    while len(found) < count:
        found.append((found[-1] * 2 + 1) % VOCAB if draw.random() < 0.7 else int(draw.integers(VOCAB)))
    return np.array(found, np.int32)


def plain_chance(train: list[int], history: tuple[int, ...], word: int, order: int) -> float:
    """Chance of a word after the last `order - 1` tokens of a history."""

    def grams(length: int) -> list[tuple[int, ...]]:
        return [tuple(train[i : i + length]) for i in range(len(train) - length + 1)]

    chance = 1 / VOCAB
    for length in range(1, order + 1):
        found = grams(length) if length == order else [gram[1:] for gram in set(grams(length + 1))]
        counts, context = Counter(found), tuple(history[len(history) - length + 1 :])
        total = sum(count for gram, count in counts.items() if gram[:-1] == context)
        if total:
            kinds = sum(gram[:-1] == context for gram in counts)
            chance = max(counts[(*context, word)] - D, 0) / total + D * kinds / total * chance
    return chance


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_losses_are_those_of_the_plain_model(order: int) -> None:
    train, valid = tokens(120, 0), tokens(40, 1)
    padded = [0] * (order - 1) + valid.tolist()
    chances = [
        plain_chance(train.tolist(), tuple(padded[i : i + order - 1]), padded[i + order - 1], order)
        for i in range(len(valid))
    ]
    assert ngram_loss(train, valid, VOCAB, order) == pytest.approx(-np.log(chances).mean(), rel=1e-9)


@pytest.mark.parametrize("vocab_size", [257, 4096, 4097, 65536])
def test_the_highest_order_fills_an_integer_and_no_more(vocab_size: int) -> None:
    """With the last token of a large vocabulary everywhere, so that all bits are set."""
    text = np.full(50, vocab_size - 1, np.int32)
    order = highest_order(vocab_size)
    assert order == {257: 7, 4096: 5, 4097: 4, 65536: 3}[vocab_size]
    assert ngram_loss(text, text[-1:].repeat(9), vocab_size, order) < ngram_loss(text, text * 0, vocab_size, order)


def test_chances_add_up_to_one() -> None:
    train, history = tokens(120, 0), tokens(6, 3)
    losses = [ngram_loss(train, np.append(history, word).astype(np.int32), VOCAB, 3) for word in range(VOCAB)]
    before = ngram_loss(train, history, VOCAB, 3) * len(history)
    assert sum(math.exp(before - loss * (len(history) + 1)) for loss in losses) == pytest.approx(1)


def test_longer_histories_help_on_text_with_order() -> None:
    train, valid = tokens(5000, 0), tokens(1000, 1)
    losses = [ngram_loss(train, valid, VOCAB, order) for order in (1, 2)]
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    # 70 % of the words follow from the one before, the rest are even.
    even = 0.3 / VOCAB
    best = -(0.7 + even) * math.log(0.7 + even) - (VOCAB - 1) * even * math.log(even)
    assert losses[1] == pytest.approx(best, abs=0.05)
