"""Runs the programs: owns the weights and the pages on the device, and the order in which they are used.

Knows tokens, positions and tables of pages. Refuses to know requests, sampling and text, and who holds which page. One
thread at a time may call it: pages that a program was given are gone, and only the newest are held here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from novalm_jax.checkpoint.mapping import is_expert
from novalm_jax.engine.functions import HEAD_BLOCK, Decoded, DecodeStep, Leaves, ModelWeights, PrefillChunk, Structure
from novalm_jax.engine.programs import Programs, decode_rows, prefill_rows
from novalm_jax.errors import PageError
from novalm_jax.experts.expert_map import DEVICE, ExpertMap
from novalm_jax.experts.recorder import Recorder
from novalm_jax.experts.records import count_records, moe_layers
from novalm_jax.kernels.storage import delete_arrays, storage_dtype
from novalm_jax.kv.paged import MOVED_TOGETHER, LayerPages
from novalm_jax.kv.pages import NONE, Copy, Held, Pages, blocks
from novalm_jax.models.decoder import Decoder, Routed
from novalm_jax.models.router import Routing
from novalm_jax.timeline import Timeline


class Part(NamedTuple):
    """Some tokens of a prompt, at most a chunk of them.

    Attributes:
      tokens: of the prompt.
      start: position of the first one; those before it are computed.
      known: tokens that are known of the sequence.
      held: its pages.
      last: whether the prompt ends here.
    """

    tokens: Sequence[int]
    start: int
    known: int
    held: Held
    last: bool


def cut(prompt: Sequence[int], start: int, end: int, chunk: int, known: int, held: Held) -> list[Part]:
    """Tokens `start` to `end` of a prompt, in parts of `chunk` tokens at most; of its sequence `known` are known."""
    ends = [min(begin + chunk, end) for begin in range(start, end, chunk)]
    begins = [start, *ends[:-1]]
    return [
        Part(prompt[begin:stop], begin, known, held, stop == len(prompt))
        for begin, stop in zip(begins, ends, strict=True)
    ]


class Line(NamedTuple):
    """What a decode step computes of a sequence.

    Attributes:
      token: the latest one.
      position: where it stands.
      known: tokens that are known of the sequence.
      held: its pages.
      sequence: a number that it has alone.
    """

    token: int
    position: int
    known: int
    held: Held
    sequence: int


class Chunk(NamedTuple):
    """A part of a prompt on its way: its tokens, padded to `bucket`, and the how manieth part it is."""

    tokens: np.ndarray
    bucket: int
    part: Part
    number: int

    @property
    def length(self) -> int:
        """Tokens that are not padding."""
        return len(self.part.tokens)


Saved = list[tuple[LayerPages, ...]]
"""The content of pages on the host: for each lot of up to `MOVED_TOGETHER` of each group all layers' arrays."""


class Executor(ABC):
    """A model with pages for sequences. A timeline shows its programs, each of which is waited for then.

    Attributes:
      rows: sequences that a decode step computes at most.
      chunk: tokens that a part of a prompt has at most.
      pass_chunks: parts of prompts that may share a pass over the weights.
      launches: programs that were run.
      recorder: counts the experts of decode steps. Whoever wants a trace puts one in its place that keeps one.
    """

    pass_chunks = 1

    def __init__(self, programs: Programs, outer: Leaves, timeline: Timeline | None = None):
        shapes = programs.shapes
        self.recorder = Recorder(programs.config)
        self.rows = shapes.rows
        self.launches = 0
        self._programs = programs
        self._timeline = timeline
        self._outer = outer
        self._layers = programs.config.layers
        self._pages = list(programs.new_pages())
        self._prefill_rows = prefill_rows(shapes.capacity)
        self._decode_rows = decode_rows(shapes.rows)
        self.chunk = self._prefill_rows[-1]

    def new_book(self) -> Pages:
        """Keeps book of the pages, none of which is in use."""
        shapes = self._programs.shapes
        return Pages(self._programs.reaches, shapes.pages, blocks(shapes.capacity))

    def prefill(self, parts: Sequence[Part]) -> Generator[tuple[int, Decoded] | None]:
        """Runs parts of prompts, those of one prompt in order, whose tokens get into pages that are there for them.

        Yields:
          None where a decode step may come between; all that was dispatched is done then. For each part with which a
          prompt ends its number and what follows its last token, as the first of some equal rows.
        """
        for through in self._through_layers(self._chunks(parts)):
            if through is None:
                yield None
            elif through[0].part.last:
                chunk, x = through
                yield chunk.number, self._head(chunk, x)
                del x
            del through

    def prefill_logits(self, parts: Sequence[Part], out: np.ndarray) -> Generator[None]:
        """As `prefill`, and fills `out`, float32 `[t, v]`, with the logits of all tokens, brought to the host block by
        block.

        Yields:
          At every border between layers.
        """
        begin = 0
        for through in self._through_layers(self._chunks(parts)):
            if through is not None:
                chunk, x = through
                self._head_of_all(chunk, x, out[begin : begin + chunk.length])
                begin += chunk.length
                del x
            del through
            yield

    def decode(self, lines: Sequence[Line]) -> Decoded:
        """One step of some sequences; the result is padded to a bucket of rows."""
        bucket = next(size for size in self._decode_rows if size >= len(lines))

        def padded(values: Iterable[int], idle: int) -> np.ndarray:
            return np.array([*values, *[idle] * (bucket - len(lines))], np.int32)

        step = DecodeStep(
            tokens=padded((line.token for line in lines), 0),
            positions=padded((line.position for line in lines), -1),
            known=padded((line.known for line in lines), 0),
            tables=tuple(
                np.stack([*tables, *[tables[0]] * (bucket - len(lines))])
                for tables in zip(*(self._tables(line.held) for line in lines), strict=True)
            ),
        )
        with self._pages_in_use():
            decoded, chosen = self._decode_step(bucket, step)
        if chosen is not None:
            self.recorder.step([line.sequence for line in lines], chosen)
        return decoded

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies pages within their groups."""
        for begin in range(0, len(copies), MOVED_TOGETHER):
            lot = copies[begin : begin + MOVED_TOGETHER]
            ends = [
                self._lot([[getattr(each, end) for each in lot if each.group == group] for group in self._groups])
                for end in ("source", "target")
            ]
            self._replace_pages(self._programs.copy_pages, *ends)

    def save(self, pages: Sequence[Sequence[int]]) -> Saved:
        """The content of some pages of each group, on the host."""
        return [self._saved(lot) for lot in _lots(pages)]

    def load(self, pages: Sequence[Sequence[int]], saved: Saved) -> None:
        """Fills pages with what was saved of as many."""
        for lot, content in zip(_lots(pages), saved, strict=True):
            self._replace_pages(self._programs.load_pages, jax.tree.map(_filled_up, content), self._lot(lot))

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of a page of each group, in all its layers."""
        return self._programs.bytes_of_page

    @property
    def broken(self) -> bool:
        """Whether it lost what it cannot work without."""
        return False

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """What it holds and what it moved, by the names of `Report`."""

    @abstractmethod
    def tiers(self) -> np.ndarray:
        """Where each expert is, int8 `[layers, experts]`, by the numbers of the model's layers."""

    def expert_map(self) -> ExpertMap:
        """Where each expert is, and how often decode steps used it."""
        recorder, tiers = self.recorder, self.tiers()[self.recorder.layers]
        for row, moe in zip(tiers, moe_layers(self._programs.config).values(), strict=True):
            row[moe.num_experts :] = -1
        return ExpertMap(recorder.layers, recorder.uses, tiers, recorder.tokens)

    @abstractmethod
    def close(self) -> None:
        """Frees weights and pages on the device."""

    @abstractmethod
    def _through_layers(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, jax.Array] | None]:
        """Runs chunks of prompts through all layers: each, in order, with its hidden states `[1, t, d]`, once they are
        dispatched; and None at every border between layers."""

    @abstractmethod
    def _decode_step(self, bucket: int, step: DecodeStep) -> tuple[Decoded, Routing | None]:
        """Runs a step of `bucket` rows; also gives what the routers of its layers chose, `[l, b, k]`."""

    def _embed(self, chunk: Chunk) -> jax.Array:
        """The tokens of a chunk: `[1, t, d]`."""
        return self._run(self._programs.embed(chunk.bucket), self._outer, chunk.tokens)

    def _head(self, chunk: Chunk, x: jax.Array) -> Decoded:
        """What follows the last token of a chunk, as the first of some equal rows."""
        return self._run(self._programs.head(chunk.bucket), self._outer, x, np.int32(chunk.length - 1))

    def _head_of_all(self, chunk: Chunk, x: jax.Array, out: np.ndarray) -> None:
        """Fills `out [t, v]` with the logits of all tokens of a chunk."""
        head = self._programs.head_of_block(chunk.bucket)
        for at in range(0, chunk.length, HEAD_BLOCK):
            block = out[at : at + HEAD_BLOCK]
            block[:] = np.asarray(self._run(head, self._outer, x, np.int32(at)))[: len(block)]

    def _chunks(self, parts: Sequence[Part]) -> Iterator[Chunk]:
        """Each part padded to the smallest size that holds it."""
        for number, part in enumerate(parts):
            if not part.tokens:
                raise ValueError("a part of a prompt has at least one token")
            tokens = np.asarray(part.tokens, np.int32)
            bucket = next(size for size in self._prefill_rows if size >= len(tokens))
            yield Chunk(np.pad(tokens, (0, bucket - len(tokens))), bucket, part, number)

    def _place(self, chunk: Chunk) -> PrefillChunk:
        """Where a chunk goes in the next layer: nowhere, and to no expert, once its pages were taken away."""
        part, tables = chunk.part, self._tables(chunk.part.held)
        there = any(part.held.tables)
        return PrefillChunk(
            np.int32(part.start), np.int32(chunk.length if there else 0), np.int32(part.known), tuple(tables)
        )

    def _tables(self, held: Held) -> list[np.ndarray]:
        """The pages of a sequence in each group, int32 `[n]`.

        Raises:
          PageError: there is no such page, or more of them than a table has.
        """
        shapes = self._programs.shapes
        length = blocks(shapes.capacity)
        return [device_table(*each, length) for each in zip(held.tables, shapes.pages, strict=True)]

    @property
    def _groups(self) -> range:
        return range(len(self._programs.reaches))

    def _lot(self, pages: Sequence[Sequence[int]]) -> tuple[np.ndarray, ...]:
        """Pages of each group, filled up with none."""
        counts = self._programs.shapes.pages
        return tuple(device_table(each, count, MOVED_TOGETHER) for each, count in zip(pages, counts, strict=True))

    def _saved(self, lot: Sequence[Sequence[int]]) -> tuple[LayerPages, ...]:
        """Pages of each group, in all layers; what fills them up takes no memory on the host, nor they any more on the
        device."""
        saved = self._run(self._programs.save_pages, tuple(self._pages), self._lot(lot))
        return tuple(
            jax.tree.map(lambda array, its=lot[group]: np.asarray(array)[: len(its)].copy(), layer)
            for layer, group in zip(saved, self._programs.groups, strict=True)
        )

    def _replace_pages(self, program: jax.stages.Compiled, *arguments: Any) -> None:
        with self._pages_in_use():
            self._pages = list(self._run(program, tuple(self._pages), *arguments))

    def _run(self, program: jax.stages.Compiled, *arguments: Any, layer: int | None = None) -> Any:
        self.launches += 1
        if self._timeline is None:
            return program(*arguments)
        name, rows = self._programs.name_of(program)
        with self._timeline.span("compute", name, rows=rows, **({} if layer is None else {"layer": layer})):
            return jax.block_until_ready(program(*arguments))

    @contextmanager
    def _pages_in_use(self) -> Iterator[None]:
        """A program that fails, or an interrupt before its results are kept, leaves pages that were given away: new
        ones take their place, and the caller must count every sequence as lost."""
        try:
            yield
        except BaseException:
            for layer, pages in enumerate(self._pages):
                if any(leaf.is_deleted() for leaf in jax.tree.leaves(pages)):
                    self._pages[layer] = self._programs.new_pages_of(layer)
            raise


class ResidentExecutor(Executor):
    """All weights on the device: a decode step is one program.

    `model` is given away: its experts are in storage form (`put_stored`), and its arrays are freed by `close`. Loading
    it took `bytes_read` from disk.
    """

    def __init__(self, model: Decoder, programs: Programs, bytes_read: int, timeline: Timeline | None = None):
        self._bytes_read = bytes_read
        self._weights: ModelWeights = Structure.take_apart(model)
        super().__init__(programs, self._weights.outer, timeline)

    def figures(self) -> dict[str, Any]:
        """As in `Executor`: everything is on the device, and was read once."""
        return {"experts_on_device": count_records(self._programs.config), "disk_bytes_read": self._bytes_read}

    def tiers(self) -> np.ndarray:
        """As in `Executor`."""
        return np.full((len(self._layers), self.recorder.uses.shape[1]), DEVICE, np.int8)

    def close(self) -> None:
        """Frees weights and pages on the device."""
        delete_arrays((self._weights, self._pages))
        self._weights, self._pages = ModelWeights((), ()), []

    def _through_layers(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, jax.Array] | None]:
        for chunk in chunks:
            x = self._embed(chunk)
            for i, (config, weights) in enumerate(zip(self._layers, self._weights.layers, strict=True)):
                with self._pages_in_use():
                    attend = self._programs.attend(config, chunk.bucket)
                    # One name for all states of the layer: each is let go of as soon as the next one is there.
                    x, self._pages[i] = self._run(attend, weights.dense, self._pages[i], x, self._place(chunk), layer=i)
                    if isinstance(x, Routed):
                        experts = self._programs.experts(config, chunk.bucket)
                        x = self._run(experts, weights.dense, weights.experts, x, layer=i)
                jax.block_until_ready(x)
                yield None
            yield chunk, x
            del x

    def _decode_step(self, bucket: int, step: DecodeStep) -> tuple[Decoded, Routing | None]:
        decode = self._programs.decode(bucket)
        decoded, pages, chosen = self._run(decode, self._weights, tuple(self._pages), step)
        self._pages = list(pages)
        return decoded, chosen


def _lots(pages: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Some pages of each group, cut into lots that are moved together."""
    for begin in range(0, max(map(len, pages)), MOVED_TOGETHER):
        yield [each[begin : begin + MOVED_TOGETHER] for each in pages]


def _filled_up(pages: np.ndarray) -> np.ndarray:
    """As many pages as are moved together."""
    return np.concatenate([pages, np.zeros((MOVED_TOGETHER - len(pages), *pages.shape[1:]), pages.dtype)])


def device_table(table: Sequence[int], count: int, length: int) -> np.ndarray:
    """A table of pages for the device, int32 `[length]`: `count`, one past the last, stands for none.

    Raises:
      PageError: it is too long, or names a page that is not there. On the device both would change or read others.
    """
    if len(table) > length:
        raise PageError(f"A table has {len(table)} pages, and {length} at most.")
    padded = np.full(length, count, np.int32)
    named = np.array(table, np.int64).reshape(-1)
    if ((named < NONE) | (named >= count)).any():
        raise PageError(f"A table names page {named.min() if named.min() < NONE else named.max()} of {count}.")
    padded[: len(table)] = np.where(named == NONE, count, named)
    return padded


def put_stored(path: str, parameter: np.ndarray) -> jax.Array:
    """Puts a parameter of a model on the device as the executor wants it: experts in storage form."""
    if is_expert(path):
        parameter = parameter.view(storage_dtype(parameter.dtype))
    return jax.device_put(parameter)
