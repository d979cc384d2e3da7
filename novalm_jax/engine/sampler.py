"""Chooses the next token of every row from its logits.

Pure functions over the arrays of `sampler_state`: no shape and no program depends on what a request asks for, so that
one compiled program serves every mix of requests. Knows token ids and numbers; refuses to know text, stop conditions,
who owns which row, and the model. `Sampler` holds the arrays of one engine and compiles the functions; one thread at a
time may call it.

Order of operations, per row, in float32 (the filters in the order of transformers):

1. repetition penalty, for tokens of the prompt or the output: positive logits are divided, the others multiplied;
2. presence and frequency penalties, for generated tokens only;
3. logit bias, then end tokens are ruled out while fewer than `min_tokens` tokens are generated (a row in which steps
   1 to 3 rule out every token falls back to its raw logits);
4. temperature 0 or top_p 0: the most likely token, the lowest id among equals. Otherwise divide by the temperature;
5. top_k (tokens that tie with the k-th are kept), then top_p among what is left (the smallest set of most likely tokens
   that holds the probability; of equal ones the lowest ids), then min_p (relative to the most likely token);
6. draw by the Gumbel maximum, with noise from the row's key and the number of tokens the row has generated. A seed
   gives the same tokens alone, in company, in any row and after a restart from `row_of(..., output_ids=...)`.

Rows go through one loop body, one at a time: batching them into wider operations would let the number of rows change
how sums are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.random import threefry_2x32

from novalm_jax.compat import compile_program
from novalm_jax.engine.sampler_state import WIDE, SamplerState, admit, init_state, row_of
from novalm_jax.engine.sampling import LARGEST, ResolvedSampling
from novalm_jax.kernels.storage import delete_arrays
from novalm_jax.options import MAX_LOGPROBS

_INFINITY_BITS = 0x7F800000
_HEAD = 256
"""How many of the most likely tokens are looked at before the whole vocabulary is."""


# Bounds of what `sample` takes beside its arguments, in bytes; a test holds them against the compiled programs.
_WORKSPACE, _WORKSPACE_PER_TOKEN, _WORKSPACE_PER_ROW = 16384, 38, 512


class Sampled(NamedTuple):
    """The chosen tokens of b rows. An inactive row has id 0.

    Log-probabilities are of the raw logits, before penalties and temperature. Rows that did not ask for them, inactive
    rows, and places past the end of a small vocabulary hold 0 in `logprob`, -1 in `top_ids` and -inf in `top_logprobs`.
    """

    ids: Array
    """int32 [b]."""
    logprob: Array
    """float32 [b], of the chosen token."""
    top_ids: Array
    """int32 [b, 20], the most likely tokens, most likely first, the lowest id first among equals."""
    top_logprobs: Array
    """float32 [b, 20]."""


def sample(state: SamplerState, logits: Array, rows: Array, active: Array) -> tuple[SamplerState, Sampled]:
    """Chooses one token for each active row and counts it; donate `state`.

    Args:
      state: r rows over v tokens.
      logits: float32 [b, v].
      rows: int32 [b], the state row that each line of logits belongs to; active ones are in range and distinct.
      active: bool [b]; the others change nothing and may name any row.

    Returns:
      The state with the chosen tokens counted, and the tokens. A row's result depends on its own logits and its own
      state alone, bit for bit.
    """
    lines = logits.shape[0]
    # A trip count the compiler cannot see: it would inline a loop over one row, and round that row differently.
    end = jnp.max(jnp.where(active, jnp.arange(1, lines + 1, dtype=jnp.int32), 0))

    def line(i: Array, out: Sampled) -> Sampled:
        one = lax.cond(active[i], lambda: _sample_row(state, logits[i], rows[i]), _nothing)
        return jax.tree.map(lambda all_lines, value: all_lines.at[i].set(value), out, one)

    nothing = jax.tree.map(lambda value: jnp.broadcast_to(value, (lines, *value.shape)), _nothing())
    out = lax.fori_loop(0, end, line, nothing)
    # An index past the end, which "drop" ignores, keeps inactive rows as they are.
    target = jnp.where(active, rows, state.generated.shape[0])
    counts = state.counts.at[target, out.ids].add(1, mode="drop")
    generated = state.generated.at[target].add(1, mode="drop")
    return state._replace(counts=counts, generated=generated), out


def _nothing() -> Sampled:
    """What `Sampled` holds of one row without a token."""
    return Sampled(
        ids=jnp.int32(0),
        logprob=jnp.float32(0),
        top_ids=jnp.full(MAX_LOGPROBS, -1, jnp.int32),
        top_logprobs=jnp.full(MAX_LOGPROBS, -jnp.inf, jnp.float32),
    )


def _sample_row(state: SamplerState, raw: Array, index: Array) -> Sampled:
    """One row: `raw` float32 [v], `index` int32 the row of the state."""

    def of_row(values: Array) -> Array:
        return lax.dynamic_index_in_dim(values, index, keepdims=False)

    # The wide arrays stay whole until a branch reads them, so that a row that needs none of them pays for none.
    row = SamplerState(**{name: v if name in WIDE else of_row(v) for name, v in state._asdict().items()})
    penalised = (row.repetition != 1) | (row.presence != 0) | (row.frequency != 0)
    edited = penalised | row.biased | (row.generated < row.min_tokens)
    with jax.named_scope("edit"):
        logits = lax.cond(edited, lambda: _edit(row, raw, of_row), lambda: jnp.minimum(raw, LARGEST))
    with jax.named_scope("choose"):
        greedy = (row.temperature == 0) | (row.top_p == 0)
        token = lax.cond(
            greedy,
            lambda: _first_largest(logits),
            lambda: _first_largest(_filter(row, logits) + _gumbel(row, raw.shape[0])),
        )
    with jax.named_scope("logprobs"):
        return lax.cond(row.scored, lambda: _score(raw, token), lambda: _nothing()._replace(ids=token))


def _edit(row: SamplerState, raw: Array, of_row: Callable[[Array], Array]) -> Array:
    """Steps 1 to 3: penalties, bias and minimum length, float32 [v]. Never NaN or +inf for logits without them."""
    counts = of_row(row.counts)
    output = counts > 0
    logits = jnp.where(raw > 0, raw / row.repetition, raw * row.repetition)
    logits = jnp.minimum(jnp.where(of_row(row.prompt) | output, logits, raw), LARGEST)
    taken = jnp.where(output, row.presence, 0) + row.frequency * counts.astype(jnp.float32)
    logits = jnp.minimum(logits - jnp.clip(taken, -LARGEST, LARGEST), LARGEST)
    logits = jnp.minimum(logits + of_row(row.bias), LARGEST)
    logits = jnp.where(of_row(row.ends) & (row.generated < row.min_tokens), -jnp.inf, logits)
    return jnp.where(jnp.max(logits) == -jnp.inf, jnp.minimum(raw, LARGEST), logits)


def _filter(row: SamplerState, logits: Array) -> Array:
    """Steps 4 and 5 for a temperature above 0: float32 [v], 0 for the best token, -inf for those filtered out.

    The softmax of the result is what the row samples from.
    """
    # Distances from the best token, not logits: the best is exactly 0 at any temperature, nothing overflows into NaN,
    # and the bits of floats from 0 up are integers of the same order.
    distance = (jnp.max(logits) - logits) / row.temperature
    bits = _bits(distance)
    vocab = logits.shape[0]
    k = jnp.where((row.top_k > 0) & (row.top_k < vocab), row.top_k, vocab)
    limit, last_tie = lax.cond(
        (k < vocab) | (row.top_p < 1),
        lambda: _likeliest(distance, k, row.top_p),
        lambda: (jnp.int32(_INFINITY_BITS), jnp.int32(vocab - 1)),
    )
    kept = (bits < limit) | ((bits == limit) & (jnp.arange(vocab, dtype=jnp.int32) <= last_tie))
    kept &= distance <= -jnp.log(row.min_p)
    return jnp.where(kept, -distance, -jnp.inf)


def _likeliest(distance: Array, k: Array, top_p: Array) -> tuple[Array, Array]:
    """The tokens that top_k and top_p keep, of float32 [v] distances from the best token.

    Nearly always a few hundred of the nearest tokens decide; only where they do not is the whole vocabulary bisected,
    in about a tenth of the time of a sort.

    Returns:
      The bits of the farthest distance that is kept, and the highest id that is kept at exactly that distance.
    """
    vocab = distance.shape[0]
    bits, size = _bits(distance), min(_HEAD, vocab)
    nearest, ids = lax.top_k(-distance, size)
    head = _bits(-nearest)

    def kth_of_all() -> Array:
        return _least(lambda limit: jnp.sum(bits <= limit, dtype=jnp.int32) >= k, _INFINITY_BITS)

    within = lax.cond(k <= size, lambda: head[jnp.minimum(k, size) - 1], kth_of_all)

    def nucleus() -> tuple[Array, Array]:
        weights = jnp.where(bits <= within, jnp.exp(-distance), 0)
        wanted = top_p * jnp.sum(weights)
        held = jnp.cumsum(jnp.where(head <= within, jnp.exp(nearest), 0))
        last = jnp.minimum(jnp.sum(held < wanted, dtype=jnp.int32), size - 1)
        enough = held[-1] >= wanted
        return lax.cond(enough, lambda: (head[last], ids[last]), lambda: _nucleus(bits, weights, wanted, within))

    return lax.cond(top_p < 1, nucleus, lambda: (within, jnp.int32(vocab - 1)))


def _nucleus(bits: Array, weights: Array, wanted: Array, within: Array) -> tuple[Array, Array]:
    """The smallest set of nearest tokens whose weights add up to `wanted`, by bisection; result as `_likeliest`."""

    def mass(chosen: Array) -> Array:
        return jnp.sum(jnp.where(chosen, weights, 0))

    # Rounding may leave even the sum of all below a `wanted` that is nearly all.
    limit = jnp.minimum(_least(lambda limit: mass(bits <= limit) >= wanted, _INFINITY_BITS), within)
    tied = bits == limit
    weight = jnp.exp(-lax.bitcast_convert_type(limit, jnp.float32))
    needed = jnp.maximum(jnp.ceil((wanted - mass(bits < limit)) / weight), 1)
    ids = jnp.arange(bits.shape[0], dtype=jnp.int32)

    def enough(last: Array) -> Array:
        return jnp.sum(tied & (ids <= last), dtype=jnp.int32).astype(jnp.float32) >= needed

    last = bits.shape[0] - 1
    some = needed < jnp.sum(tied, dtype=jnp.int32).astype(jnp.float32)
    return limit, lax.cond(some, lambda: _least(enough, last), lambda: jnp.int32(last))


def _bits(distance: Array) -> Array:
    """The bits of float32 values from 0 up to infinity, as int32: integers of the same order."""
    return lax.bitcast_convert_type(distance, jnp.int32)


def _least(holds: Callable[[Array], Array], most: int) -> Array:
    """The least integer from 0 to `most` for which `holds`, which is true from there on and true at `most`."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        found = holds(middle)
        return jnp.where(found, low, middle + 1), jnp.where(found, middle, high)

    return lax.fori_loop(0, most.bit_length(), halve, (jnp.int32(0), jnp.int32(most)))[1]


def _gumbel(row: SamplerState, size: int) -> Array:
    """Standard Gumbel noise, float32 [size], finite, of the row's stream at its present step.

    From 32 random bits each: with the 23 of `jax.random.gumbel` the greatest values of a large vocabulary tie. And from
    both words of each cipher block, which takes half of its time, and no setting of JAX can change the stream.
    """
    step = jnp.stack([jnp.uint32(0), row.generated.astype(jnp.uint32)])
    bits = threefry_2x32(threefry_2x32(row.key, step), lax.iota(jnp.uint32, size + size % 2))[:size]
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _first_largest(values: Array) -> Array:
    """The argmax of float32 [v] as int32, the lowest id among equals (a third of `jnp.argmax`'s time on a CPU)."""
    ids = jnp.arange(values.shape[0], dtype=jnp.int32)
    # NaN equals nothing: the last id is then the result, which at least exists.
    return jnp.min(jnp.where(values == jnp.max(values), ids, values.shape[0] - 1))


def _score(raw: Array, token: Array) -> Sampled:
    """The row's result with log-probabilities of the raw logits."""
    out = _nothing()
    total = jax.nn.logsumexp(raw)
    most = min(MAX_LOGPROBS, raw.shape[0])
    largest, ids = lax.top_k(raw, most)
    return Sampled(
        ids=token,
        logprob=raw[token] - total,
        top_ids=out.top_ids.at[:most].set(ids),
        top_logprobs=out.top_logprobs.at[:most].set(largest - total),
    )


class Sampler:
    """The state of all rows of one engine, and the compiled functions. One thread at a time may call it."""

    def __init__(self, rows: int, vocab: int):
        self._rows = rows
        self._vocab = vocab
        self._shapes = jax.eval_shape(partial(init_state, rows, vocab))
        self._state: SamplerState | None = None
        self._programs: dict[int, jax.stages.Compiled] = {}
        self._admit: jax.stages.Compiled | None = None

    @property
    def nbytes(self) -> int:
        """Device memory, in bytes: the state, and at most what a draw takes beside it and the logits."""
        state = sum(leaf.size * leaf.dtype.itemsize for leaf in self._shapes)
        return state + _WORKSPACE_PER_TOKEN * self._vocab + _WORKSPACE_PER_ROW * self._rows + _WORKSPACE

    def admit(
        self,
        row: int,
        params: ResolvedSampling,
        prompt_ids: Sequence[int],
        end_ids: Sequence[int],
        output_ids: Sequence[int] = (),
    ) -> None:
        """Makes row `row` that of a request: a new one, or one that comes back after `output_ids`.

        Raises:
          RequestError: an id outside the vocabulary.
        """
        values = row_of(params, prompt_ids, end_ids, self._vocab, output_ids)
        self._state = self._admitting()(self._taken(), values, np.int32(row))

    def sample(
        self, logits: Array, rows: Sequence[int | None], wanted: Sequence[int | None]
    ) -> tuple[np.ndarray, list[dict[int, float] | None]]:
        """Chooses a token for each row.

        Args:
          logits: float32 `[b, v]`; line i belongs to `rows[i]`, and to no row where that is None or past the end.
          rows: at most b rows.
          wanted: for each of them how many log-probabilities, None for none.

        Returns:
          ids int32 `[b]`, and for each row that wants log-probabilities a dict of its own token's and the `wanted`
          most likely ones, its own first.
        """
        lines = logits.shape[0]
        index = np.full(lines, self._rows, np.int32)
        for line, row in enumerate(rows):
            index[line] = self._rows if row is None else row
        active = index < self._rows
        self._state, sampled = self.program(lines)(self._taken(), logits, index, active)
        host = jax.tree.map(np.asarray, sampled)
        return host.ids, [_as_dict(host, i, most) for i, most in enumerate(wanted)]

    def prepare(self) -> None:
        """Gets ready to admit a row."""
        self._admitting()
        self._state = self._taken()

    def _admitting(self) -> jax.stages.Compiled:
        if self._admit is None:
            row = row_of(ResolvedSampling(seed=0), (), (), self._vocab)
            self._admit = compile_program(admit, (self._shapes, row, np.int32(0)), donate=(0,))
        return self._admit

    def program(self, lines: int) -> jax.stages.Compiled:
        """What chooses a token from each of so many lines of logits; compiled when first asked for."""
        if lines not in self._programs:
            logits = jax.ShapeDtypeStruct((lines, self._vocab), jnp.float32)
            index = np.zeros(lines, np.int32)
            self._programs[lines] = compile_program(sample, (self._shapes, logits, index, index < 1), donate=(0,))
        return self._programs[lines]

    def close(self) -> None:
        """Frees the device's memory."""
        if self._state is not None:
            delete_arrays(self._state)
            self._state = None

    def _taken(self) -> SamplerState:
        """The state, for a program to consume. Should that fail, the next one begins afresh; a request admitted before
        is lost with the step that failed."""
        state, self._state = self._state, None
        return init_state(self._rows, self._vocab) if state is None else state


def _as_dict(sampled: Sampled, line: int, most: int | None) -> dict[int, float] | None:
    if most is None:
        return None
    values = {int(sampled.ids[line]): float(sampled.logprob[line])}
    for token, logprob in zip(sampled.top_ids[line, :most], sampled.top_logprobs[line, :most], strict=True):
        if token >= 0:
            values.setdefault(int(token), float(logprob))
    return values
