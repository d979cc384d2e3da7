"""Which stored bytes fill which parameter, and the reverse. Decided from names and shapes alone, without any memory.

Strict both ways: every parameter is filled exactly once, every stored tensor is read or known to be needless. All
that does not fit is collected and said at once. Knows the tables of families; reads no file and makes no array.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from novalm_jax.checkpoint.dtypes import numpy_dtype
from novalm_jax.checkpoint.header import StoredTensor
from novalm_jax.errors import CheckpointError, some
from novalm_jax.models.families.family import Family, Flat, Fused, Packed, PerExpert, Source

Shape = tuple[int, ...]

FLOATS = ("F32", "BF16", "F16")
"""Stored dtypes that weights are read from, in the order in which files hold them: wide ones first."""


_EXPERTS = re.compile(r"layers\.(\d+)\.feed_forward\.experts\.\w+")


def is_expert(path: str) -> bool:
    """Whether the parameter at this path holds routed experts, stacked."""
    return _EXPERTS.fullmatch(path) is not None


def expert_paths(shapes: Mapping[str, Shape]) -> dict[int, list[str]]:
    """The parameters that hold routed experts, by the number of their layer."""
    layers: dict[int, list[str]] = defaultdict(list)
    for path in shapes:
        if match := _EXPERTS.fullmatch(path):
            layers[int(match[1])].append(path)
    return dict(layers)


@dataclass(frozen=True)
class Piece:
    """A contiguous range of a stored tensor, from byte `start`, and the row of the parameter it fills (None: all)."""

    tensor: StoredTensor
    start: int
    shape: Shape
    row: int | None

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return int(np.prod(self.shape)) * numpy_dtype(self.tensor.dtype).itemsize


@dataclass(frozen=True)
class Assignment:
    """The pieces that make one parameter, in the order of its rows."""

    path: str
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(piece.nbytes for piece in self.pieces)

    def row(self, number: int) -> Assignment:
        """What makes one row of the parameter: one contiguous range."""
        piece = self.pieces[0]
        if piece.row is None:
            size = piece.nbytes // self.shape[0]
            piece = replace(piece, start=piece.start + number * size, shape=self.shape[1:])
        else:
            # Pieces are in the order of rows.
            piece = replace(self.pieces[number], row=None)
        return Assignment(self.path, self.shape[1:], (piece,))

    def rows(self, first: int, end: int) -> Assignment:
        """What makes some rows of a parameter that is stored in one piece."""
        (piece,) = self.pieces
        shape = (end - first, *self.shape[1:])
        start = piece.start + first * (piece.nbytes // self.shape[0])
        return Assignment(self.path, shape, (replace(piece, start=start, shape=shape),))


@dataclass(frozen=True)
class WeightMap:
    """All assignments of a checkpoint, and the stored tensors that the network does not need."""

    assignments: tuple[Assignment, ...]
    ignored: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(assignment.nbytes for assignment in self.assignments)


@dataclass(frozen=True)
class Part:
    """Elements of an output tensor, from `start` on, that are a parameter, or one `row` of it, in C order."""

    path: str
    row: int | None
    start: int
    shape: Shape


@dataclass(frozen=True)
class TensorOut:
    """A tensor of a checkpoint to be written, and the parts that make it, in order and without gaps."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]


def written_tensors(family: Family, shapes: Mapping[str, Shape]) -> list[TensorOut]:
    """The tensors of a checkpoint in the family's published form, from parameter path -> shape."""
    parts: dict[str, list[Part]] = defaultdict(list)
    whole: dict[str, Shape] = {}
    for path, shape in shapes.items():
        for want in _wanted(_sources(family, path)[0], shape, shapes):
            parts[want.name].append(Part(path, want.row, want.start, want.shape))
            whole[want.name] = want.tensor_shape
    return [
        TensorOut(name, shape, tuple(sorted(parts[name], key=lambda part: part.start))) for name, shape in whole.items()
    ]


def map_weights(
    family: Family, shapes: Mapping[str, Shape], stored: Mapping[str, StoredTensor], extra_layers: int = 0
) -> WeightMap:
    """Finds the stored tensors of every parameter.

    Args:
      family: whose tensor names to use.
      shapes: parameter path -> shape.
      stored: from `list_tensors`.
      extra_layers: how many stored layers after the last one are not needed.

    Raises:
      CheckpointError: tensors missing, left over, stored in two layouts at once, of the wrong shape, or of a dtype
        that is not read; all of them in one message.
    """
    problems = _Problems()
    used: set[str] = set()
    assignments = []
    for path, shape in shapes.items():
        layouts = [_wanted(source, shape, shapes) for source in _sources(family, path)]
        present = [layout for layout in layouts if any(want.name in stored for want in layout)]
        if len(present) > 1:
            found = [next(want.name for want in layout if want.name in stored) for layout in present]
            problems.doubled.append(f"{path}, as {' and as '.join(found)}")
        layout = present[0] if present else layouts[0]
        used.update(want.name for found in present for want in found)
        absent = [want.name for want in layout if want.name not in stored]
        problems.missing += absent
        if not absent:
            assignments.append(Assignment(path, shape, tuple(_checked(want, stored, problems) for want in layout)))
    left = [name for name in stored if name not in used]
    tied = "head.weight" not in shapes
    extra = _in_extra_layers(family, shapes, left, extra_layers)
    needless = [name for name in left if name in extra or _needless(family, name, tied=tied)]
    problems.unexpected += sorted(set(left) - set(needless))
    problems.raise_if_any(next(iter(stored.values())).file.parent if stored else None)
    return WeightMap(tuple(assignments), tuple(needless))


@dataclass(frozen=True)
class _Want:
    """A range of elements of a tensor that is expected to be stored."""

    name: str
    tensor_shape: Shape
    start: int
    shape: Shape
    row: int | None


def _sources(family: Family, path: str) -> Sequence[Source]:
    """The ways in which this parameter may be stored, with the number of its layer filled in."""
    layer = re.search(r"\.(\d+)\.", path)
    number = layer.group(1) if layer else ""
    pattern = path.replace(f".{number}.", ".{l}.", 1) if layer else path

    def numbered(source: Source) -> Source:
        if isinstance(source, Fused):
            source = replace(source, paths=tuple(path.replace("{l}", number) for path in source.paths))
        return replace(source, name=source.name.replace("{l}", number))

    return [numbered(source) for source in family.tensors[pattern]]


def _wanted(source: Source, shape: Shape, shapes: Mapping[str, Shape]) -> list[_Want]:
    """What has to be stored for this parameter, if it is stored in this way."""
    if isinstance(source, PerExpert):
        names = (source.name.replace("{e}", str(e)) for e in range(shape[0]))
        return [_Want(name, shape[1:], 0, shape[1:], e) for e, name in enumerate(names)]
    if isinstance(source, Packed):
        experts, rows, *rest = shape
        whole = (experts, rows * source.parts, *rest)
        size = int(np.prod(shape[1:]))
        starts = (size * (e * source.parts + source.part) for e in range(experts))
        return [_Want(source.name, whole, start, shape[1:], e) for e, start in enumerate(starts)]
    if isinstance(source, Fused):
        lengths = [shapes[path][0] for path in source.paths]
        start = sum(lengths[: source.part]) * int(np.prod(shape[1:]))
        return [_Want(source.name, (sum(lengths), *shape[1:]), start, shape, None)]
    if isinstance(source, Flat):
        flat = (1, *shape) if len(shape) == 1 else (shape[0] * shape[1], *shape[2:])
        return [_Want(source.name, flat, 0, shape, None)]
    return [_Want(source.name, shape, 0, shape, None)]


def _checked(want: _Want, stored: Mapping[str, StoredTensor], problems: _Problems) -> Piece:
    tensor = stored[want.name]
    if tensor.dtype not in FLOATS:
        problems.unread.append(f"{want.name} is {tensor.dtype}")
        return Piece(tensor, 0, (), want.row)
    if tensor.shape != want.tensor_shape:
        problems.misshapen.append(f"{want.name} is {list(tensor.shape)}, not {list(want.tensor_shape)}")
    return Piece(tensor, want.start * numpy_dtype(tensor.dtype).itemsize, want.shape, want.row)


def _needless(family: Family, name: str, *, tied: bool) -> bool:
    """Whether no parameter needs this tensor; with tied embeddings that is also the head, stored once more."""
    if tied and any(name == source.name for source in family.tensors["head.weight"]):
        return True
    return any(re.fullmatch(pattern, name) for pattern in family.ignored_tensors)


def _in_extra_layers(family: Family, shapes: Mapping[str, Shape], names: Sequence[str], extra_layers: int) -> set[str]:
    """Those of `names` that belong to the first `extra_layers` layers after the last one.

    A layer for multi-token prediction joins two inputs in `eh_proj`. One without that is a layer of the model, which
    config.json does not count.
    """
    last = max((int(path.split(".")[1]) for path in shapes if path.startswith("layers.")), default=-1)
    before = {
        source.name.split("{l}")[0] for sources in family.tensors.values() for source in sources if "{l}" in source.name
    }
    numbered = re.compile(f"(?:{'|'.join(map(re.escape, sorted(before)))})([1-9][0-9]{{0,17}})\\..*", re.DOTALL)
    matches = {name: int(match[1]) for name in names if (match := numbered.fullmatch(name))}
    marked = {number for name, number in matches.items() if name.endswith(f"{number}.eh_proj.weight")}
    return {name for name, number in matches.items() if number in marked and last < number <= last + extra_layers}


class _Problems:
    """What does not fit, by kind."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.doubled: list[str] = []
        self.misshapen: list[str] = []
        self.unread: list[str] = []

    def raise_if_any(self, folder: object) -> None:
        headings = {
            "missing": self.missing,
            "not known to this family": self.unexpected,
            "stored in two layouts at once": self.doubled,
            "of another shape than config.json asks for": self.misshapen,
            f"of a dtype that is not read ({', '.join(FLOATS)} are)": self.unread,
        }
        found = [
            f"{len(unique)} {heading}: {some(unique)}"
            for heading, names in headings.items()
            if (unique := dict.fromkeys(names))
        ]
        if found:
            raise CheckpointError(
                f"{folder}: tensors do not match config.json. {'; '.join(found)}. Check that config.json belongs to "
                "these files and that the download is complete."
            )
