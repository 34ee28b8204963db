"""Where each parameter lies in a bucket: integers only.

A *bucket* is what one collective moves: `world` chunks of `numel` elements, one per rank. Each parameter is cut along
one dim (0 by default) into `world` pieces of `chunk` rows (as by `torch.chunk`, the last ones may be shorter or empty).
Every rank's piece of a parameter starts at the same `offset` in that rank's chunk. Pieces are padded to `chunk` rows,
so that all ranks send equally much. Another dim than 0 must divide evenly. Where the cuts along dim 0 have to be
multiples of some rows (`Ragged`), a full piece has as many more of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from .._policies import Wire
from .._torch.ragged import rows_of_chunk
from .parcel import SHARD_ALIGNMENT_BYTES, Parcel, parcel

T = TypeVar("T")

SLOT_ALIGNMENT_BYTES = 512


def slot_bytes(nbytes: int) -> int:
    """Bytes of a slot of the pool for `nbytes` bytes; no slot is empty."""
    return -(-max(nbytes, 1) // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """One parameter within a bucket; counts are in elements unless they say rows.

    Attributes:
        shape: the unsharded shape, at least one dim.
        world: number of pieces.
        chunk: rows of a full piece, ``ceil(shape[dim] / world)``, or more where cuts are multiples of some rows.
        row: elements of one row.
        offset: where the piece starts in each rank's chunk.
        dim: the dim that is cut; its indices are the rows.
    """

    shape: tuple[int, ...]
    world: int
    chunk: int
    row: int
    offset: int
    dim: int = 0

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.shape[self.dim] * self.row

    @property
    def piece(self) -> int:
        """Elements of one padded piece."""
        return self.chunk * self.row

    def rows_of(self, rank: int) -> int:
        """Rows that `rank` really holds."""
        return max(0, min(self.chunk, self.shape[self.dim] - rank * self.chunk))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the piece that `rank` really holds."""
        return (*self.shape[: self.dim], self.rows_of(rank), *self.shape[self.dim + 1 :])

    @property
    def even(self) -> bool:
        """Whether no piece needs padding."""
        return self.chunk * self.world == self.shape[self.dim]

    @property
    def full_pieces(self) -> int:
        """How many ranks hold a piece of `chunk` rows."""
        return self.world if self.chunk == 0 else self.shape[self.dim] // self.chunk

    @property
    def rest(self) -> int:
        """Elements of the one shorter piece that follows the full ones (0 if there is none)."""
        return self.numel - self.full_pieces * self.piece


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """All parameters of a bucket; `numel` is the length of one rank's chunk."""

    world: int
    params: tuple[ParamLayout, ...]
    numel: int

    @property
    def total(self) -> int:
        """Elements of the whole bucket, all ranks."""
        return self.world * self.numel

    @property
    def begins(self) -> list[int]:
        """Offset of each parameter, in elements, in memory with all ranks' pieces of one parameter in a row."""
        return [self.world * param.offset for param in self.params]


def piece_numel(shape: tuple[int, ...], world: int, dim: int, rows: int = 1) -> int:
    """Elements of one padded piece of a parameter that is cut along `dim`, at multiples of `rows`."""
    return rows_of_chunk(shape[dim], world, rows) * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def first_alike(sizes: Sequence[int], world: int, rank: int, rows: Sequence[int] | None = None) -> int:
    """The first rank that holds as many rows as `rank` of each parameter, whose sizes along the cut dim these are.

    `rows`: of which the cuts of each are multiples; 1 if not given.
    """
    params = bucket_layout([(size,) for size in sizes], world, rows=rows).params

    def held(by: int) -> list[int]:
        return [param.rows_of(by) for param in params]

    return next(other for other in range(world) if other == rank or held(other) == held(rank))


def bucket_layout(
    shapes: Sequence[tuple[int, ...]],
    world: int,
    itemsize: int | None = None,
    dims: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> BucketLayout:
    """Lay parameters of the given unsharded `shapes` one after the other.

    Args:
        shapes: unsharded shapes, each with at least one dim.
        world: number of ranks that share the bucket.
        itemsize: bytes of one element, to align each piece to 16 bytes; None to leave no gaps.
        dims: the dim along which each is cut; 0 if not given.
        rows: of which the cuts of each are multiples; 1 if not given.
    """
    align = 1 if itemsize is None else max(1, SHARD_ALIGNMENT_BYTES // itemsize)
    params, end = [], 0
    for shape, dim, block in zip(shapes, dims or [0] * len(shapes), rows or [1] * len(shapes), strict=True):
        offset = -(-end // align) * align
        chunk, row = rows_of_chunk(shape[dim], world, block), math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
        params.append(ParamLayout(tuple(shape), world, chunk, row, offset, dim))
        end = offset + chunk * row
    return BucketLayout(world, tuple(params), end)


@dataclass(frozen=True, slots=True)
class Route:
    """How a transport takes parameters: large ones *alone*, straight into their memory, the rest packed in a buffer.

    Attributes:
        name: the transport's name.
        gather_from: least bytes of a rank's piece for a parameter to be gathered alone; None for never.
        sums: whether ranks receive the gradients of the others in a buffer (`scratch`) and add them up themselves.
    """

    name: str
    gather_from: int | None = None
    sums: bool = False


def _is_alone(param: ParamLayout, itemsize: int, least: int | None) -> bool:
    return least is not None and param.dim == 0 and param.piece > 0 and param.piece * itemsize >= least


@dataclass(frozen=True, slots=True)
class GatherLayout:
    """Where the parameters of one gather land, and which of them share a buffer on the way.

    Attributes:
        places: the layout of all parameters in the slot, in which all ranks' pieces of one parameter are in a row (see
            `BucketLayout.begins`).
        alone: indices of the parameters that are gathered straight into the slot.
        packed: indices of the others.
        landing: the buffer that these share until they are copied to the slot; None if no buffer is needed.
        nbytes: bytes of the slot, with room for the marks of the reduction, which may take the slot over.
        landing_bytes: bytes of that buffer.
        parcel: what a rank sends if that is other than the parameters as they are computed with; then all share the
            landing buffer, whose elements are bytes.
    """

    places: BucketLayout
    alone: tuple[int, ...]
    packed: tuple[int, ...]
    landing: BucketLayout | None
    nbytes: int
    landing_bytes: int
    parcel: Parcel | None = None

    def moved(self, itemsize: int) -> int:
        """Bytes that the gather moves: all ranks' parts, padding included."""
        pieces = [self.places.params[i].piece for i in self.alone]
        return self.places.world * sum(pieces) * itemsize + self.landing_bytes


def gather_layout(
    shapes: Sequence[tuple[int, ...]],
    world: int,
    itemsize: int,
    dims: Sequence[int],
    route: Route | None,
    rows: Sequence[int] | None = None,
    wire: Wire | None = None,
) -> GatherLayout:
    """Lay out a gather of parameters of one dtype.

    Args:
        shapes, dims: of the unsharded parameters, and the dim along which each is cut.
        world: number of ranks.
        itemsize: bytes of an element.
        route: the transport's route; None where there is nothing to gather.
        rows: of which the cuts of each are multiples; 1 if not given.
        wire: what they travel as, if not as they are.
    """
    places = bucket_layout(shapes, world, itemsize, dims, rows)
    nbytes = world * _with_marks(places.numel, len(shapes), itemsize) * itemsize
    sent = None if route is None else parcel([(at.chunk, at.row) for at in places.params], itemsize, wire, ranks=world)
    if sent is None:
        return _gather_as_it_is(places, nbytes, itemsize, route, rows)
    landing = BucketLayout(world, (), sent.nbytes)
    return GatherLayout(places, (), tuple(range(len(shapes))), landing, nbytes, landing.total, sent)


def _gather_as_it_is(
    places: BucketLayout, nbytes: int, itemsize: int, route: Route | None, rows: Sequence[int] | None
) -> GatherLayout:
    least = None if route is None else route.gather_from
    alone = [i for i, param in enumerate(places.params) if _is_alone(param, itemsize, least)]
    packed = sorted({*range(len(places.params))} - {*alone})
    if len(packed) == 1 and places.params[packed[0]].dim == 0:  # a buffer would look like the slot
        alone, packed = sorted(alone + packed), []
    if route is None or not packed:
        return GatherLayout(places, tuple(alone), tuple(packed), None, nbytes, 0)
    landing = places
    if alone:
        shapes, dims = zip(*[(places.params[i].shape, places.params[i].dim) for i in packed], strict=True)
        landing = bucket_layout(shapes, places.world, itemsize, dims, rows and _some(rows, packed))
    return GatherLayout(places, tuple(alone), tuple(packed), landing, nbytes, landing.total * itemsize)


def _some(values: Sequence[T], indices: Sequence[int]) -> list[T]:
    return [values[index] for index in indices]


@dataclass(frozen=True, slots=True)
class ReduceLayout:
    """How gradients are reduced: in one bucket, each rank's chunk of which ends with a mark for each gradient.

    All transports use one order, because the result is reduced again over replicas, which may have other transports.

    Attributes:
        result: layout of one rank's pieces, without gaps.
        numel: length of a chunk, the marks included. It is a multiple of 16 bytes, so that the chunks of all ranks are
            aligned; NCCL is slow with those that are not.
        nbytes: bytes of the bucket's buffer; 0 if there is nothing to reduce.
        scratch: elements of the buffer for what the others send, if this rank adds it up (`Route.sums`); else 0. With a
            parcel, of that and of what this rank sends.
        moved: bytes that the reduction moves: all ranks' parts.
        parcel: what a rank sends to another, if that is other than its gradients in the dtype of the bucket.
    """

    result: BucketLayout
    numel: int
    nbytes: int
    scratch: int
    moved: int = 0
    parcel: Parcel | None = None

    @property
    def marks(self) -> int:
        """Elements behind the pieces: the marks, and what aligns the next chunk."""
        return self.numel - self.result.numel

    def between_replicas(self, itemsize: int, wire: Wire | None) -> Parcel | None:
        """What a replica sends of its chunk; None if that is the chunk as it is, of elements of `itemsize` bytes."""
        return parcel([(at.chunk, at.row) for at in self.result.params], itemsize, wire, self.marks)


def _with_marks(numel: int, marks: int, itemsize: int) -> int:
    """The length of a chunk with marks behind `numel` elements, so that the next one is aligned."""
    align = max(1, SHARD_ALIGNMENT_BYTES // itemsize)
    return -(-(numel + marks) // align) * align


def reduce_layout(
    shapes: Sequence[tuple[int, ...]],
    world: int,
    itemsize: int,
    dims: Sequence[int],
    route: Route | None,
    slots: Sequence[int] = (),
    rows: Sequence[int] | None = None,
    wire: Wire | None = None,
) -> ReduceLayout:
    """Lay out a reduction of gradients of one dtype.

    Args:
        shapes, dims: of the unsharded gradients, and the dim along which each is cut.
        world: number of ranks.
        itemsize: bytes of an element.
        route: the transport's route; None where there is nothing to reduce.
        slots: bytes of the gather's slots. A bucket that is up to 1/8 smaller than one of them gets its size, so that
            the two can share memory.
        rows: of which the cuts of each are multiples; 1 if not given.
        wire: what gradients travel as, if not as they are.
    """
    result = bucket_layout(shapes, world, dims=dims, rows=rows)
    numel = _with_marks(result.numel, len(shapes), itemsize)
    if route is None:
        return ReduceLayout(result, numel, 0, 0)
    nbytes = world * numel * itemsize
    roomy = [slot for slot in slots if nbytes <= slot <= nbytes * 9 // 8]
    room = min(roomy, default=nbytes)
    sent = parcel([(at.chunk, at.row) for at in result.params], itemsize, wire, numel - result.numel, world)
    if sent is not None:
        return ReduceLayout(result, numel, room, 2 * world * sent.nbytes // itemsize, world * sent.nbytes, sent)
    return ReduceLayout(result, numel, room, world * numel if route.sums else 0, nbytes)
