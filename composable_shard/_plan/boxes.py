"""Rectangular parts of tensors: their arithmetic, and the parts that each rank of a sharded tensor holds.

Offsets and shapes count elements. Nothing here needs a device, a process group or torch's placements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add, sub
from typing import NamedTuple, TypeVar

from .._torch.ragged import rows_of_chunk

T = TypeVar("T")


class Box(NamedTuple):
    """A rectangular part of a tensor: its offset and its size in each dim."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[int, ...]:
        """The end in each dim."""
        return tuple(map(add, self.offsets, self.shape))

    def common(self, other: Box) -> Box | None:
        """The intersection with another box; None if it is empty."""
        # Plans call this for each pair of parts: without properties and generators it takes half the time.
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, map(add, *self), map(add, *other))
        shape = tuple(map(sub, ends, offsets))
        return Box(offsets, shape) if min(shape, default=1) > 0 else None

    def contains(self, other: Box) -> bool:
        """Whether another box of as many dims is inside of this one."""
        begins = zip(self.offsets, other.offsets, strict=True)
        return all(a <= b for a, b in begins) and all(a >= b for a, b in zip(self.ends, other.ends, strict=True))

    def slices(self, within: Box) -> tuple[slice, ...]:
        """Slices that select this box in the memory of a box that contains it."""
        starts = [begin - base for begin, base in zip(self.offsets, within.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def moved(self, by: Iterable[int]) -> Box:
        """The same shape at other offsets: `by` is added in each dim."""
        return Box(tuple(map(add, self.offsets, by)), self.shape)

    def part(self, dim: int, begin: int, size: int) -> Box:
        """A part of this box along one dim. `begin` counts from the begin of the box."""
        offsets = (*self.offsets[:dim], self.offsets[dim] + begin, *self.offsets[dim + 1 :])
        return Box(offsets, (*self.shape[:dim], size, *self.shape[dim + 1 :]))

    def span(self, within: Box) -> tuple[int, int]:
        """The range from its first to after its last element in the contiguous memory of a box that contains it."""
        first, last, stride = 0, 0, 1
        for begin, base, size, extent in reversed(list(zip(*self._and(within), strict=True))):
            first += (begin - base) * stride
            last += (begin - base + size - 1) * stride
            stride *= extent
        return first, last + 1

    def _and(self, within: Box) -> tuple[tuple[int, ...], ...]:
        return self.offsets, within.offsets, self.shape, within.shape

    def blocks(self, most: int, dim: int = 0) -> Iterator[Box]:
        """Split it into consecutive boxes of at most `most` elements, in the order of its elements in memory."""
        if self.numel <= max(most, 1):
            yield self
            return
        size = self.shape[dim]
        each = max(1, size * most // self.numel)
        for begin in range(0, size, each):
            part = self.part(dim, begin, min(each, size - begin))
            yield from part.blocks(most, dim + (each == 1))


def whole_box(shape: Iterable[int]) -> Box:
    """A box that covers a tensor."""
    shape = tuple(shape)
    return Box((0,) * len(shape), shape)


def chunk_of(size: int, count: int, index: int, rows: int = 1) -> tuple[int, int]:
    """Begin and size of a chunk, as in `torch.chunk` with empty chunks at the end.

    Args:
        size: size to split.
        count: number of chunks.
        index: index of the chunk.
        rows: chunks begin at multiples of this.
    """
    most = rows_of_chunk(size, count, rows)
    begin = min(most * index, size)
    return begin, min(most, size - begin)


def chunks_of(box: Box, count: int, dim: int = 0, rows: int = 1) -> tuple[Box, ...]:
    """Split a box along one dim into chunks. See `chunk_of`."""
    return tuple(box.part(dim, *chunk_of(box.shape[dim], count, index, rows)) for index in range(count))


# ---- coverage


def fill_once(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes cover each element of a tensor exactly once. All boxes must be inside of the tensor."""
    filled = sum(box.numel for box in boxes)
    return filled == math.prod(shape) and next(overlaps(boxes), None) is None  # so a gap would imply an overlap


def most_cut(boxes: Sequence[Box]) -> int | None:
    """The dim with the most distinct offsets; None if there are no boxes or no dims."""
    dims = range(len(boxes[0].shape)) if boxes else range(0)
    return max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}), default=None)


def overlaps(boxes: Iterable[Box]) -> Iterator[Box]:
    """Yield the common part of each two boxes that share elements.

    Boxes are sorted along the dim that cuts them most often. Each box is compared only with the following boxes that
    begin before it ends in this dim.
    """
    kept = [box for box in boxes if box.numel]
    dim = most_cut(kept)
    if dim is None:
        yield from (one for one, _ in itertools.combinations(kept, 2))
        return
    kept.sort(key=lambda box: box.offsets[dim])
    for index, box in enumerate(kept):
        end, after = box.ends[dim], index + 1
        while after < len(kept) and kept[after].offsets[dim] < end:
            if (common := box.common(kept[after])) is not None:
                yield common
            after += 1


def uncovered(whole: Box, boxes: Iterable[Box]) -> list[Box]:
    """The parts of a box that none of the other boxes covers. Empty boxes are omitted."""
    rest = [whole] if whole.numel else []
    for box in boxes:
        rest = [part for each in rest for part in _without(each, box)]
    return rest


def _without(box: Box, other: Box) -> Iterator[Box]:
    """The parts of a box outside of another one."""
    common = box.common(other)
    if common is None:
        yield box
        return
    for dim in range(len(box.shape)):
        before, after = common.offsets[dim] - box.offsets[dim], box.ends[dim] - common.ends[dim]
        if before:
            yield box.part(dim, 0, before)
        if after:
            yield box.part(dim, box.shape[dim] - after, after)
        box = box.part(dim, before, common.shape[dim])


def batches(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Group items, in order, into batches of a total size of at most `most`. A larger item is a batch of its own."""
    batch: list[T] = []
    total = 0
    for item in items:
        own = size(item)
        if batch and total + own > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += own
    if batch:
        yield batch


# ---- shardings


@dataclass(frozen=True)
class Split:
    """How one axis of a mesh splits a tensor.

    Attributes:
        dim: the dim that it splits.
        rows: chunks begin at multiples of this (`Ragged`).
        factor: `split_factor` of torch's `_StridedShard`. 1 for an ordinary sharding.
    """

    dim: int
    rows: int = 1
    factor: int = 1


class Region(NamedTuple):
    """A box of a tensor, and its offsets in the local tensor of a rank that holds it."""

    box: Box
    at: tuple[int, ...]


def local_shape(regions: Sequence[Region]) -> tuple[int, ...]:
    """Shape of the local tensor that consists of these regions."""
    ends = [Box(at, box.shape).ends for box, at in regions]
    return tuple(map(max, zip(*ends, strict=True)))


@dataclass(frozen=True)
class Sharding:
    """How a tensor is sharded over a mesh.

    Attributes:
        sizes: sizes of the mesh's axes.
        ranks: global ranks of the mesh, in row-major order.
        splits: what each axis does. None for an axis that replicates.
    """

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    splits: tuple[Split | None, ...]

    @cached_property
    def steps(self) -> tuple[tuple[int, Split], ...]:
        """The splitting axes in the order in which they split, with the factors that remain.

        The placements `(_StridedShard(0, split_factor=tp), Shard(0))` on a mesh of (dp, tp) mean that tp splits first.
        A factor that no order explains remains: each of as many equal chunks is split on its own, and a rank holds one
        part of each of them. So tensor parallelism splits fused projections.
        """
        order: list[tuple[int, Split]] = []
        for axis in reversed(range(len(self.splits))):
            split = self.splits[axis]
            if split is not None:
                place = self._place(order, split)
                order.insert(
                    0 if place is None else place, (axis, split if place is None else Split(split.dim, split.rows))
                )
        return tuple(order)

    def _place(self, order: list[tuple[int, Split]], split: Split) -> int | None:
        """Index in the order at which the axes of the same dim before it have `split.factor` ranks; None if none."""
        before = 1
        for place, (axis, other) in enumerate(order):
            if before == split.factor:
                return place
            before *= self.sizes[axis] if other.dim == split.dim else 1
        return len(order) if before == split.factor else None

    def regions_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[Region, ...]:
        """The parts that the rank at a coordinate of the mesh holds. At least one, which may be empty.

        Raises:
            IndexError: the tensor has no such dim.
        """
        ranges = [[(0, size)] for size in shape]
        for axis, split in self.steps:
            ranges[split.dim] = _take(ranges[split.dim], split, self.sizes[axis], coordinate[axis])
        parts = [_with_places(each) for each in ranges]
        return tuple(
            Region(
                Box(tuple(begin for begin, _, _ in dims), tuple(size for _, size, _ in dims)),
                tuple(at for *_, at in dims),
            )
            for dims in itertools.product(*parts)
        )

    def alike(self, coordinate: Sequence[int]) -> list[int]:
        """The ranks that hold the same parts as the one at a coordinate: those along the axes that replicate."""
        ends = zip(self.sizes, self.splits, coordinate, strict=True)
        places = itertools.product(*(range(size) if split is None else (at,) for size, split, at in ends))
        return [self.ranks[self._index(each)] for each in places]

    def _index(self, coordinate: Sequence[int]) -> int:
        index = 0
        for at, size in zip(coordinate, self.sizes, strict=True):
            index = index * size + at
        return index

    def coordinate_of(self, index: int) -> tuple[int, ...]:
        """The coordinate of a mesh member, from its index in `ranks`."""
        return tuple(index // math.prod(self.sizes[axis + 1 :]) % size for axis, size in enumerate(self.sizes))

    def regions(self, shape: Sequence[int]) -> tuple[tuple[Region, ...], ...]:
        """The parts that each rank holds, in the order of `ranks`."""
        return tuple(self.regions_at(shape, self.coordinate_of(index)) for index in range(len(self.ranks)))


def _take(ranges: list[tuple[int, int]], split: Split, count: int, index: int) -> list[tuple[int, int]]:
    """One of `count` chunks of consecutive ranges of indices. With a factor: one chunk of each of `factor` parts."""
    total = sum(size for _, size in ranges)
    taken: list[tuple[int, int]] = []
    for part in range(split.factor):
        base, whole = chunk_of(total, split.factor, part)
        begin, size = chunk_of(whole, count, index, split.rows)
        taken += _cut(ranges, base + begin, size)
    return taken or [(ranges[-1][0] + ranges[-1][1], 0)]


def _cut(ranges: list[tuple[int, int]], begin: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges at positions `begin` to `begin + size` of consecutive ranges."""
    for first, extent in ranges:
        low, high = max(begin, 0), min(begin + size, extent)
        if low < high:
            yield first + low, high - low
        begin -= extent


def _with_places(ranges: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Ranges with their offsets in the local tensor. Ranges that touch are merged."""
    merged: list[tuple[int, int, int]] = []
    at = 0
    for begin, size in ranges:
        if merged and merged[-1][0] + merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], merged[-1][1] + size, merged[-1][2])
        else:
            merged.append((begin, size, at))
        at += size
    return merged
