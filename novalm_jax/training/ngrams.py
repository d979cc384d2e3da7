"""The loss that counting would give: n-grams with interpolated Kneser-Ney smoothing (Chen and Goodman, 1998).

What a language model has learnt beyond them is what its network is for.
"""

from __future__ import annotations

import numpy as np

from novalm_jax.training.data import Corpus


def baselines(corpus: Corpus) -> dict[str, dict[str, float]]:
    """Losses of counting models of the validation text, by name: in nats a token and bits a byte."""
    found = {}
    vocab_size, text = corpus.tokenizer.get_vocab_size(), corpus.valid[1:]
    for order in (1, min(5, highest_order(vocab_size))):
        nats = ngram_loss(corpus.train, text, vocab_size, order)
        bits = nats * len(text) / np.log(2) / corpus.valid_bytes
        found[f"{order}-gram"] = {"nats_per_token": nats, "bits_per_byte": bits}
    return found


def ngram_loss(train: np.ndarray, valid: np.ndarray, vocab_size: int, order: int, discount: float = 0.75) -> float:
    """Mean loss, in nats a token, of an n-gram model of `train` on `valid`; both int32 `[n]`.

    The highest order counts how often words followed a history, lower ones after how many different words a text
    occurred. Order 0 is the uniform distribution, which order 1 falls back to.
    """
    bits = (vocab_size - 1).bit_length()
    assert order <= highest_order(vocab_size)
    chance = np.full(len(valid), 1.0 / vocab_size)
    for length in range(1, order + 1):
        grams = _grams(train, length, bits)
        if length < order:
            # Each n-gram once for each different word before it.
            longer = np.unique(_grams(train, length + 1, bits))
            grams = longer & ((1 << length * bits) - 1)
        seen, counts = np.unique(grams, return_counts=True)
        histories, first = np.unique(seen >> bits, return_index=True)
        totals, kinds = np.add.reduceat(counts, first), np.diff(np.append(first, len(seen)))
        wanted = _grams(np.append(np.zeros(length - 1, np.int32), valid), length, bits)
        count, total = _look_up(seen, counts, wanted), _look_up(histories, totals, wanted >> bits)
        known = np.maximum(total, 1)
        mixed = (
            np.maximum(count - discount, 0) / known
            + discount * _look_up(histories, kinds, wanted >> bits) / known * chance
        )
        chance = np.where(total > 0, mixed, chance)
    return float(-np.log(chance).mean())


def highest_order(vocab_size: int) -> int:
    """The longest n-grams that an int64 holds."""
    return 63 // (vocab_size - 1).bit_length()


def _grams(tokens: np.ndarray, length: int, bits: int) -> np.ndarray:
    """int64 `[n - length + 1]`: every run of so many tokens as one integer, the last token in its lowest bits."""
    count = len(tokens) - length + 1
    packed = np.zeros(count, np.int64)
    for i in range(length):
        packed = packed << bits | tokens[i : i + count].astype(np.int64)
    return packed


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 for those that are not among the (sorted) keys."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
