"""Made-up traces whose statistics are those of recorded ones, for shapes of models that nobody recorded.

A hidden space of a few dimensions is shared by all layers. A token is a point in it: what its sequence is about, a
state that drifts from token to token, and what the token itself is, drawn from a Zipf distribution of words. A layer
has a direction for every expert, and so layers say something of each other; it has popular experts, and each sequence
likes some of its own. The experts with the largest scores are chosen. The first layers see little but the token
itself, and so repeat themselves least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from novalm_jax.experts.traces import Trace
from novalm_jax.options import MakeTraceOptions

_WORDS = 2000
_SHARPNESS = 1.5
"""Of scores in the hidden space; all other strengths are relative to it."""


@dataclass(frozen=True)
class Likeness:
    """What scores are made of. Strengths are standard deviations.

    Attributes:
      dimensions: of the hidden space.
      topic, state, word: strength of what the sequence is about, of what drifts, and of the token itself.
      memory: correlation of the state of one token with the next one's.
      popularity: exponent of the Zipf distribution that a layer's experts have, before anything else is added.
      liking: strength of what a sequence likes in each layer, beside the hidden space.
      noise: of each score.
      early: of the first layers, the part that topic and state have of their strength, and liking; what is missing of
        it, the word has more.
    """

    dimensions: int
    topic: float
    state: float
    memory: float
    word: float
    popularity: float
    liking: float
    noise: float
    early: tuple[float, ...]


LIKENESSES = {
    "gpt-oss-20b": Likeness(
        dimensions=4,
        topic=0.5,
        state=0.7,
        memory=0.6,
        word=0.4,
        popularity=0.37,
        liking=0.5,
        noise=0.1,
        early=(0.12, 0.4, 0.7, 0.85),
    ),
    "deepseek-v2-lite": Likeness(
        dimensions=9,
        topic=0.475,
        state=1.5,
        memory=0.41,
        word=0.68,
        popularity=0.4,
        liking=0.5,
        noise=0.1,
        early=(0.25, 0.45, 0.5),
    ),
}
"""By the name that options give them. Found by trying some hundred, against the statistics of recorded routing."""


def make_trace(options: MakeTraceOptions) -> Trace:
    """A trace of sequences of equal length, one after another, a token a step. The same for the same options."""
    like, draw = LIKENESSES[options.like], np.random.default_rng(options.seed)
    sequences, tokens, experts = options.sequences, options.tokens, options.experts
    rows = np.repeat(np.arange(sequences), tokens)
    words = _zipf(draw, len(rows))
    topic = draw.standard_normal((sequences, like.dimensions))[rows]
    state = _drifting(draw, len(rows), like)
    word = draw.standard_normal((_WORDS, like.dimensions))[words]
    chosen = np.empty((len(rows), options.layers, options.experts_per_token), np.int16)
    for layer in range(options.layers):
        depth = like.early[layer] if layer < len(like.early) else 1.0
        hidden = like.topic * depth**0.5 * topic + like.state * depth * state + (like.word + 1 - depth) * word
        directions = draw.standard_normal((like.dimensions, experts)) / like.dimensions**0.5
        scores = _SHARPNESS * hidden @ directions
        scores -= draw.permutation(like.popularity * np.log(np.arange(1, experts + 1)))
        scores += like.noise * draw.gumbel(size=scores.shape)
        scores += like.liking * depth**0.5 * draw.standard_normal((sequences, experts))[rows]
        chosen[:, layer] = np.argsort(-scores, axis=1)[:, : options.experts_per_token]
    lengths = np.full(sequences, tokens)
    return Trace.of_rows(f"made-up routing like {options.like}", chosen, lengths, num_experts=experts)


def _zipf(draw: np.random.Generator, count: int) -> np.ndarray:
    """Words; the second is half as frequent as the first, and so on."""
    frequency = 1 / np.arange(1, _WORDS + 1)
    return draw.choice(_WORDS, count, p=frequency / frequency.sum())


def _drifting(draw: np.random.Generator, count: int, like: Likeness) -> np.ndarray:
    """A state for each token, `[count, dimensions]`, of variance 1."""
    steps = draw.standard_normal((count, like.dimensions)) * (1 - like.memory**2) ** 0.5
    states, state = np.empty_like(steps), np.zeros(like.dimensions)
    for at, step in enumerate(steps):
        states[at] = state = like.memory * state + step
    return states
